"""The variants that docs/attention_track.md compares: NAME.py has the one called NAME, with its source. model/slots.py
has their base classes and imports a variant when a run asks for it. Their options are in model/options.py."""
