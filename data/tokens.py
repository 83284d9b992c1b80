"""A corpus as tokens: `load_corpus(config.data, …)`. BPE merges and the tokens of a text are cached."""

import hashlib
import json
import math
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from core.files import cache_folder
from core.schema import require
from data.corpora import creating, load_text, read_text, write_cache
from data.folds import Ranges, Split, leak_split, split
from data.nanogpt import open_bins
from data.options import BinOptions, CorpusOptions, FineWebOptions, FoldedTextOptions, RandomOptions, TextFileOptions
from data.shards import Shards, Tokens, open_shards
from data.tokenizer import (
    PRE_TOKENS,
    NoText,
    Tokenizer,
    build_tokenizer,
    from_dict,
    text_size,
    token_dtype,
    tokenizer_sha256,
)

CHUNK = 2**20  # tokens whose bytes are counted at a time, to bound the memory


class Corpus(NamedTuple):
    sha256: str  # of the text, or of the shards' index
    tokenizer: Tokenizer
    tokens: Tokens
    split: Split


def load_corpus(config: CorpusOptions, block_size: int, known: dict[str, Any] | None = None) -> Corpus:
    """known: the state of a checkpoint, whose tokens a run that resumes on the same text keeps, even if a newer library
    would learn others, or GPT-2's cannot be fetched; or {"tokenizer": …} of init_from. Raises: ConfigError."""
    if isinstance(config, FineWebOptions):
        return load_fineweb(config)
    if isinstance(config, RandomOptions):
        return random_tokens(config)
    if isinstance(config, BinOptions):
        return in_two(*open_bins(config, from_dict(known["tokenizer"]) if known else None))
    texts = [load_text(config)]
    if isinstance(config, TextFileOptions) and config.val_path is not None:
        texts.append(read_text(config.val_path, f"data.val_path={config.val_path}", math.inf))
    hashes = [hashlib.sha256(text.encode()).hexdigest() for text in texts]
    sha256 = hashes[0] if len(hashes) == 1 else hashlib.sha256(" ".join(hashes).encode()).hexdigest()
    tokenizer = kept(config, known or {}, sha256)
    if tokenizer is None and config.tokenizer == "bpe":
        tokenizer = learnt_tokenizer("".join(texts), sha256, config.bpe_vocab_size)
    elif tokenizer is None:
        tokenizer = build_tokenizer(config.tokenizer, "".join(texts))
    slow = config.tokenizer in ("bpe", "gpt2")
    tokens = [
        encoded(text, part, tokenizer) if slow else tokenizer.encode(text)
        for text, part in zip(texts, hashes, strict=True)
    ]
    if len(tokens) == 2:
        require(len(tokens[1]) >= 2, "data.val_path holds fewer than two tokens: none could be predicted")
        return in_two(sha256, tokenizer, Shards(tokens))
    return Corpus(sha256, tokenizer, tokens[0], split_of(config, len(tokens[0]), block_size))


def in_two(sha256: str, tokenizer: Tokenizer, tokens: Shards) -> Corpus:
    """A corpus of two parts: train on the first, hold out the second."""
    n_train = len(tokens.arrays[0])
    return Corpus(sha256, tokenizer, tokens, Split(train=((0, n_train),), val=((n_train, len(tokens)),)))


def kept(config: FoldedTextOptions, known: dict[str, Any], sha256: str) -> Tokenizer | None:
    """The known tokenizer, if it is of the kind and size that the settings ask for, and not learnt from another text
    than the run has now."""
    saved = known.get("tokenizer", {})
    if saved.get("name") != config.tokenizer or known.get("corpus_sha256", sha256) != sha256:
        return None
    tokenizer = from_dict(saved)
    return tokenizer if config.tokenizer != "bpe" or tokenizer.vocab_size == config.bpe_vocab_size else None


def split_of(config: FoldedTextOptions | RandomOptions, n_tokens: int, block_size: int) -> Split:
    if isinstance(config, RandomOptions):
        n_train = n_tokens - config.val_tokens
        return Split(train=((0, n_train),), val=((n_train, n_tokens),))
    if config.split in ("near", "far"):
        assert config.fold is not None
        return leak_split(n_tokens, config.folds, config.fold, block_size, far=config.split == "far")
    return split(n_tokens, config.folds, config.fold, block_size if config.split == "shuffled" else None)


def load_fineweb(config: FineWebOptions) -> Corpus:
    sha256, tokenizer, tokens, n_train = open_shards(config)
    held_out = len(tokens) - n_train
    n_val = held_out if config.val_tokens is None else config.val_tokens
    require(n_val <= held_out, f"data.val_tokens={n_val} must be <= {held_out}, the tokens that are held out")
    return Corpus(sha256, tokenizer, tokens, Split(train=((0, n_train),), val=((n_train, n_train + n_val),)))


def random_tokens(config: RandomOptions) -> Corpus:
    """Independent uniform tokens. The expected loss on those that a model has not seen is at least ln vocab_size."""
    bits = np.random.Philox(key=config.seed)
    dtype = token_dtype(config.vocab_size)
    tokens = np.random.Generator(bits).integers(config.vocab_size, size=config.n_tokens, dtype=dtype)
    sha256 = hashlib.sha256(tokens.data).hexdigest()
    return Corpus(sha256, NoText(config.vocab_size), tokens, split_of(config, len(tokens), 0))


def size_of_text(tokenizer: Tokenizer, tokens: Tokens, ranges: Ranges) -> tuple[int, int]:
    """(bytes, characters) of the text that the tokens of `ranges` stand for."""
    totals = np.zeros(2, dtype=np.int64)
    sizes = np.stack(text_size(tokenizer))  # (2, V)
    for start, end in ranges:
        for at in range(start, end, CHUNK):
            totals += sizes[:, tokens[at : min(at + CHUNK, end)]].sum(1)
    return int(totals[0]), int(totals[1])


# -----------------------------------------------------------------------------
# The cache


def learnt_tokenizer(text: str, sha256: str, vocab_size: int) -> Tokenizer:
    key = f"bpe/{sha256[:32]}-{vocab_size}-{version('tokenizers')}"  # another version may learn other merges
    learnt = cached(key, lambda: json.dumps(build_tokenizer("bpe", text, vocab_size).to_dict()).encode())
    return from_dict(json.loads(learnt.tobytes()))


def encoded(text: str, sha256: str, tokenizer: Tokenizer) -> np.ndarray:
    """The text's tokens, memory-mapped where the cache has them."""
    rule = hashlib.sha256(PRE_TOKENS.encode()).hexdigest()[:8]
    key = f"tokens/{sha256[:32]}-{tokenizer_sha256(tokenizer)[:32]}-{rule}"
    return cached(key, lambda: tokenizer.encode(text).tobytes()).view(token_dtype(tokenizer.vocab_size))


def cached(key: str, make: Callable[[], bytes]) -> np.ndarray:
    """The bytes of the cache file `key`, uint8; if it is absent or damaged, those of `make`, which are then cached."""
    path = cache_folder() / key
    if (found := read_cached(path, key)) is not None:
        return found
    with creating(path):
        if (found := read_cached(path, key)) is not None:  # another process has made it
            return found
        content = make()
        write_cache(path, seal(key, content) + content, "computes it again")
    return np.frombuffer(content, dtype=np.uint8)


def read_cached(path: Path, key: str) -> np.ndarray | None:
    """The content of a cache file, memory-mapped; None where it is absent or damaged. It begins with its seal."""
    try:
        raw = np.memmap(path, dtype=np.uint8, mode="r")
    except (OSError, ValueError):  # absent, or empty
        return None
    return raw[32:] if seal(key, raw[32:].data) == raw[:32].tobytes() else None


def seal(key: str, content: bytes | memoryview) -> bytes:
    """SHA-256 of a cache file's key and content: a file under another name is damaged, too."""
    found = hashlib.sha256(key.encode())
    found.update(content)
    return found.digest()
