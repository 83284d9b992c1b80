"""Our tokenizers as tokenizer.json, the format of the library `tokenizers`."""

from typing import Any


def tokenizer_json(saved: dict[str, Any]) -> dict[str, Any] | None:
    """tokenizer.json for a tokenizer's `to_dict()`, or None for one that the format cannot hold."""
    absent = ("truncation", "padding", "normalizer", "post_processor")
    common: dict[str, Any] = {"version": "1.0", "added_tokens": [], **dict.fromkeys(absent)}
    if saved["name"] == "char":
        vocab: dict[str, int] = {char: i for i, char in enumerate(saved["chars"])}
        # without an unknown token the library refuses what the vocabulary lacks, as ours does
        split = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
        words = {"type": "WordLevel", "vocab": vocab, "unk_token": ""}
        return {**common, "pre_tokenizer": split, "decoder": {"type": "Fuse"}, "model": words}
    if saved["name"] == "byte":
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        vocab = {char: byte for byte, char in enumerate(printable_bytes())}
        bpe = {"type": "BPE", "vocab": vocab, "merges": []}
        return {**common, "pre_tokenizer": level, "decoder": level, "model": bpe}
    return None


def printable_bytes() -> list[str]:
    """GPT-2's character for each byte: itself where it is printable, else one from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]
