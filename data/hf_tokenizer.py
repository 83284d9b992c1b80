"""Our tokenizers as tokenizer.json, the format of the library `tokenizers`, and back; GPT-2's own files."""

import json
from pathlib import Path
from typing import Any

from core.files import read_json
from core.schema import ConfigError, require
from data.corpora import read_text
from data.tokenizer import (
    SEPARATOR,
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
    bytes_to_printable,
    printable_to_bytes,
)


def tokenizer_json(tokenizer: Tokenizer) -> dict[str, Any] | None:
    """The content of tokenizer.json, or None for a tokenizer that the format cannot hold."""
    import tokenizers
    from tokenizers import Regex, decoders, models, pre_tokenizers

    if isinstance(tokenizer, CharTokenizer):
        # without an unknown token the library raises for a character outside the vocabulary, as ours does
        theirs = tokenizers.Tokenizer(models.WordLevel({c: i for i, c in enumerate(tokenizer.chars)}, unk_token=""))
        theirs.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        theirs.decoder = decoders.Fuse()
    elif isinstance(tokenizer, ByteTokenizer | BPETokenizer):
        learnt = tokenizer.pieces[: tokenizer.separator]  # the separator is the last token
        vocab = {bytes_to_printable(token): i for i, token in enumerate(learnt)}
        theirs = tokenizers.Tokenizer(models.BPE(vocab, merges(learnt)))
        # its regular expression splits as GPT-2's does
        theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False)
        theirs.decoder = decoders.ByteLevel()
        theirs.add_special_tokens([] if tokenizer.separator is None else [SEPARATOR])
    else:
        return None
    return json.loads(theirs.to_str())


def merges(tokens: list[bytes]) -> list[tuple[str, str]]:
    """The pairs that BPE joins, in the order of the tokens that they form. Every token has all its pairs, since our
    encoder joins any two tokens that form another one."""
    known = set(tokens)
    cuts = ((token[:i], token[i:]) for token in tokens for i in range(1, len(token)))
    return [(bytes_to_printable(a), bytes_to_printable(b)) for a, b in cuts if a in known and b in known]


def folder_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a Hugging Face folder: what tokenizer_json() writes, or GPT-2's files; None where it has none.

    Raises: ConfigError for another tokenizer.
    """
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        vocab, joins = read_json(folder / "vocab.json"), read_text(str(folder / "merges.txt"), "merges.txt").split("\n")
        special = vocab.pop(SEPARATOR, None) is not None
        pairs = [line.replace(" ", "") for line in joins if line and not line.startswith("#version")]
        made = sorted(vocab, key=vocab.__getitem__)[256:]
        require(made == pairs, "its vocab.json does not have merges.txt's tokens in their order")
    elif (folder / "tokenizer.json").is_file():
        content = read_json(folder / "tokenizer.json")
        model, added = content.get("model", {}), [token["content"] for token in content.get("added_tokens", [])]
        vocab, special = {k: v for k, v in model.get("vocab", {}).items() if k not in added}, SEPARATOR in added
        if model.get("type") == "WordLevel" and all(len(token) == 1 for token in vocab) and not added:
            return CharTokenizer("".join(sorted(vocab, key=vocab.__getitem__)))
        level = content.get("pre_tokenizer") or {}
        plain = model.get("type") == "BPE" and level.get("type") == "ByteLevel" and not level.get("add_prefix_space")
        require(
            plain and {*added} <= {SEPARATOR}, "its tokenizer.json is not of characters, bytes or GPT-2's kind of BPE"
        )
    else:
        return None
    try:
        learnt = [printable_to_bytes(token) for token in sorted(vocab, key=vocab.__getitem__)]
        dense = sorted(vocab.values()) == [*range(len(vocab))]
    except (KeyError, TypeError) as error:
        raise ConfigError("its vocabulary is not one of byte-level BPE") from error
    require(dense, "its vocabulary does not number its tokens from 0 on")
    if learnt == ByteTokenizer.pieces and not special:
        return ByteTokenizer()
    return BPETokenizer(learnt, has_separator=special)
