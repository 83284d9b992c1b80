"""What nanoGPT's prepare.py writes: train.bin and val.bin, token ids as uint16, and meta.pkl, the characters."""

import hashlib
import io
import os
import pickle
import pickletools
import sys
from pathlib import Path
from typing import Any

import numpy as np

from core.files import expand
from core.schema import ConfigError, one_line, require
from data.corpora import read_bytes
from data.options import BinOptions
from data.shards import Shards, measured
from data.tokenizer import CharTokenizer, GPT2Tokenizer, Tokenizer, fetch_gpt2

META_BYTES = 2**24
PLAIN = {  # pickle's operations for dicts, lists, text and numbers: without tuples, whose hashes may take for ever
    "PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "EMPTY_DICT", "DICT", "SETITEM", "SETITEMS", "EMPTY_LIST",
    "LIST", "APPEND", "APPENDS", "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT",
    "NONE", "NEWTRUE", "NEWFALSE", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "MEMOIZE", "PUT",
    "BINPUT", "LONG_BINPUT", "GET", "BINGET", "LONG_BINGET",
}  # fmt: skip


MOST_VALUES, MOST_LEVELS = 10**6, 100  # of a tuple
MOST_ITEMS = 10**4  # of dicts and sets: their keys may all share one hash
MODULUS = sys.hash_info.modulus  # integers below it have hashes of their own


def require_flat(content: bytes) -> None:
    """Refuse a pickle with a tuple so deep, or so large as it holds others twice, that Python cannot hash it, or with
    more than MOST_ITEMS keys."""
    items = 0
    stack: list[tuple[int, int] | None] = []  # values and levels of each object; None is a mark
    memo: dict[int, tuple[int, int] | None] = {}
    for operation, argument, _ in pickletools.genops(content):
        name, held = operation.name, list[tuple[int, int]]()
        require(name != "DUP", "holds DUP")
        if name == "MEMOIZE" or name.endswith("PUT"):
            memo[len(memo) if argument is None else int(argument)] = stack[-1]
        elif name.endswith("GET"):
            stack.append(memo[int(argument or 0)])
        else:
            for before in reversed(operation.stack_before):
                while before is not pickletools.markobject and (top := stack.pop()) is not None:
                    held.append(top)
                    if before is not pickletools.stackslice:
                        break
            items += len(held) // 2 if name in ("SETITEM", "SETITEMS", "DICT") else 0
            items += len(held) if name in ("ADDITEMS", "FROZENSET") else 0
            require(items <= MOST_ITEMS, f"holds more than {MOST_ITEMS:,} keys")
            size = (1, 1)
            if name.startswith(("TUPLE", "FROZENSET")):
                size = (1 + sum(values for values, _ in held), 1 + max((levels for _, levels in held), default=0))
            require(size[0] <= MOST_VALUES and size[1] <= MOST_LEVELS, "holds tuples within tuples without end")
            stack += [None if after is pickletools.markobject else size for after in operation.stack_after]


class PlainUnpickler(pickle.Unpickler):
    """Dicts, lists, text and numbers; nothing is imported or called."""

    def find_class(self, module: str, name: str) -> Any:
        raise ConfigError(f"holds {module}.{name}: only plain dicts, text and numbers are read")


def read_meta(file: Path, name: str) -> CharTokenizer:
    """The characters of a meta.pkl. Raises: ConfigError that begins with `name`."""
    content = read_bytes(file, name, META_BYTES)
    try:
        for operation, argument, _ in pickletools.genops(content):
            if operation.name in ("GLOBAL", "STACK_GLOBAL"):
                break  # the unpickler names it, and goes no further
            require(operation.name in PLAIN, f"holds {operation.name}: only plain dicts, text and numbers are read")
            sparse = operation.name in ("PUT", "LONG_BINPUT") and int(argument or 0) > len(content)
            large = isinstance(argument, int) and abs(argument) >= MODULUS
            require(not large, "holds an integer too large for a token")
            require(not sparse, f"numbers an object {argument}, in {len(content)} bytes")
        itos = PlainUnpickler(io.BytesIO(content)).load()["itos"]
        chars = [itos[i] for i in range(len(itos))]
        good = all(isinstance(char, str) and len(char) == 1 for char in chars) and len({*chars}) == len(chars) > 0
        tokenizer = CharTokenizer("".join(chars)) if good else None  # a lone surrogate is no character
    except Exception as error:  # whatever pickle meets in a file of another kind
        raise ConfigError(f"{name} is not nanoGPT's meta.pkl: {one_line(error)[:150]}") from error
    if tokenizer is None:
        raise ConfigError(f"{name} must have itos, a character for each of 0 .. n - 1")
    return tokenizer


def open_bins(config: BinOptions, known: Tokenizer | None) -> tuple[str, Tokenizer, Shards]:
    """SHA-256 of both files, the tokenizer, and the tokens of each, memory-mapped. The tokens are those of meta.pkl;
    without it the `known` ones, or GPT-2's. Raises: ConfigError."""
    folder, digest = expand(config.path), hashlib.sha256()
    files = (folder / "train.bin", folder / "val.bin")
    if os.path.lexists(folder / "meta.pkl"):
        tokenizer: Tokenizer = read_meta(folder / "meta.pkl", str(folder / "meta.pkl"))
    else:
        tokenizer = known or GPT2Tokenizer(fetch_gpt2("data=bin without meta.pkl: tokenizer"), has_separator=True)
    for file in files:
        require(file.is_file(), f"data.path={config.path} has no {file.name}: nanoGPT's prepare.py writes it")
        size = file.stat().st_size
        require(size >= 4 and size % 2 == 0, f"{file} has {size} bytes, and must hold two or more tokens of two bytes")
    tokens = Shards([np.memmap(file, dtype=np.uint16, mode="r") for file in files])
    for file, array in zip(files, tokens.arrays, strict=True):
        sha256, highest = measured(file, array, again=config.verify)
        digest.update(sha256.encode())
        told = f"{file} holds token {highest}, and its tokenizer, {tokenizer.name}, has {tokenizer.vocab_size}"
        require(highest < tokenizer.vocab_size, told)
    return digest.hexdigest(), tokenizer, tokens
