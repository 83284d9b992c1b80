"""Our tokenizers as tokenizer.json, the format of the library `tokenizers`."""

from typing import Any

from data.tokenizer import SEPARATOR, BPETokenizer, ByteTokenizer, CharTokenizer, Tokenizer, bytes_to_printable


def tokenizer_json(tokenizer: Tokenizer) -> dict[str, Any] | None:
    """The content of tokenizer.json, or None for a tokenizer that the format cannot hold."""
    absent = ("truncation", "padding", "normalizer", "post_processor")
    common: dict[str, Any] = {"version": "1.0", "added_tokens": [], **dict.fromkeys(absent)}
    model: dict[str, Any]
    if isinstance(tokenizer, CharTokenizer):
        # without an unknown token the library raises for a character outside the vocabulary, as ours does
        split = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
        model = {"type": "WordLevel", "vocab": {c: i for i, c in enumerate(tokenizer.chars)}, "unk_token": ""}
        return {**common, "pre_tokenizer": split, "decoder": {"type": "Fuse"}, "model": model}
    if isinstance(tokenizer, ByteTokenizer | BPETokenizer):
        learnt = tokenizer.pieces[: tokenizer.separator]  # the separator is the last token
        vocab = {bytes_to_printable(token): i for i, token in enumerate(learnt)}
        model = {"type": "BPE", "vocab": vocab, "merges": merges(learnt)}
        if tokenizer.separator is not None:
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            common["added_tokens"] = [{"id": tokenizer.separator, "content": SEPARATOR, "special": True, **flags}]
        # the regular expression splits as GPT-2's does
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
        return {**common, "pre_tokenizer": level, "decoder": level, "model": model}
    return None


def merges(tokens: list[bytes]) -> list[list[str]]:
    """The pairs that BPE joins, in the order of the tokens that they form. Every token has all its pairs, since our
    encoder joins any two tokens that form another one."""
    known = set(tokens)
    pairs = []
    for token in tokens:
        cuts = [(token[:i], token[i:]) for i in range(1, len(token))]
        pairs += [[bytes_to_printable(a), bytes_to_printable(b)] for a, b in cuts if a in known and b in known]
    return pairs
