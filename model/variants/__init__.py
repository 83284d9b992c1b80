"""The contestants of docs/attention_track.md: NAME.py has the variant called NAME, with its source. model/seams.py has
what each one fills, and imports it when a run asks for it. Its options are in model/options.py."""
