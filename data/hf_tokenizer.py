"""Our tokenizers as tokenizer.json, the format of the library `tokenizers`, and back; GPT-2's own files."""

import json
from pathlib import Path
from typing import Any

from core.files import ANYWHERE, read_json
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

MOST_CUT, MOST_JOINED = 2**33, 2**24  # bytes that merges() looks at, and finds: seconds, GPT-2 has 2**21


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
    known, size = set(tokens), 0
    require(sum(len(token) ** 2 for token in tokens) <= MOST_CUT, "its tokens are too long")
    cuts = ((token[:i], token[i:]) for token in tokens for i in range(1, len(token)))
    found = []
    for a, b in cuts:
        if a in known and b in known:
            size += len(a) + len(b)
            require(size <= MOST_JOINED, "its tokens join in too many ways")
            found.append((bytes_to_printable(a), bytes_to_printable(b)))
    return found


def folder_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a Hugging Face folder: GPT-2's vocab.json and merges.txt, or what tokenizer_json() writes; None
    without one. Raises: ConfigError for another."""
    pair, content = folder / "merges.txt", read_json(folder / "tokenizer.json", ANYWHERE)
    model = {"vocab": read_json(folder / "vocab.json", ANYWHERE)} if pair.is_file() else content.get("model", {})
    vocab = model.get("vocab")
    told = f"{folder} has a tokenizer that is neither GPT-2's nor one of scripts/export_hf.py"
    if not vocab:
        return None
    try:
        tokens = sorted(vocab, key=vocab.__getitem__)
        learnt = [] if model.get("type") == "WordLevel" else [printable_to_bytes(t) for t in tokens if t != SEPARATOR]
        special = SEPARATOR in json.dumps([vocab, content.get("added_tokens")])
        made: Tokenizer = BPETokenizer(learnt, special) if learnt else CharTokenizer("".join(tokens))
    except (AttributeError, TypeError, LookupError, ValueError, AssertionError) as error:
        raise ConfigError(told) from error
    if learnt == ByteTokenizer.pieces and not special:
        made = ByteTokenizer()
    if pair.is_file():
        joins = [line.replace(" ", "") for line in read_text(str(pair), pair.name).split("\n")]
        in_order = [join for join in joins if join and not join.startswith("#version")] == tokens[256 : len(learnt)]
        require(in_order and [vocab[token] for token in tokens] == [*range(len(vocab))], told)
    require(pair.is_file() or tokenizer_json(made) == content, told)
    return made
