"""What nanoGPT's prepare.py writes: train.bin and val.bin, token ids as uint16, and meta.pkl, the characters."""

import hashlib
import io
import json
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from core.files import cache_folder, expand, file_sha256
from core.schema import ConfigError, one_line, require
from data.corpora import read_bytes
from data.options import BinOptions
from data.shards import Shards
from data.tokenizer import CharTokenizer, GPT2Tokenizer, Tokenizer, fetch_gpt2

FILES = ("train.bin", "val.bin")


class PlainUnpickler(pickle.Unpickler):
    """Dicts, lists, text and numbers; nothing is imported or called."""

    def find_class(self, module: str, name: str) -> Any:
        raise ConfigError(f"holds {module}.{name}")


def read_meta(file: Path, name: str) -> CharTokenizer:
    """The characters of a meta.pkl. Raises: ConfigError that begins with `name`."""
    try:
        itos = PlainUnpickler(io.BytesIO(read_bytes(file, name))).load()["itos"]
        chars = "".join(itos[i] for i in range(len(itos)))
    except ConfigError as error:
        told = str(error) if str(error).startswith(name) else f"{name} {error}"
        raise ConfigError(f"{told}: only plain dicts, text and numbers are read") from error
    except Exception as error:  # whatever pickle meets in a file of another kind
        raise ConfigError(f"{name} is not nanoGPT's meta.pkl: {one_line(error)[:150]}") from error
    one_each = len(chars) == len(itos) == len(set(chars)) > 0
    require(one_each, f"{name} must have itos, one character for each of 0 .. n - 1")
    return CharTokenizer(chars)


def open_bins(config: BinOptions, given: Tokenizer | None) -> tuple[str, Tokenizer, Shards, int]:
    """SHA-256 of both files, the tokenizer, their tokens, and the number of training tokens, which come first.

    The tokens are meta.pkl's characters; without it those of init_from, `given`, or GPT-2's. Raises: ConfigError.
    """
    folder = expand(config.path)
    require(folder.is_dir(), f"data.path={config.path} must be a folder with train.bin and val.bin")
    for name in FILES:
        require((folder / name).is_file(), f"data.path={config.path} has no {name}; data=text takes a text")
    if (folder / "meta.pkl").is_file():
        tokenizer: Tokenizer = read_meta(folder / "meta.pkl", str(folder / "meta.pkl"))
    else:
        tokenizer = given or GPT2Tokenizer(fetch_gpt2("data=bin without meta.pkl: tokenizer"), has_separator=True)
    arrays, digest = [], hashlib.sha256()
    for file in (folder / name for name in FILES):
        size = file.stat().st_size
        require(
            size >= 4 and size % 2 == 0, f"{file} is {size} bytes long: uint16 tokens take two each, and two at least"
        )
        arrays.append(np.memmap(file, dtype=np.uint16, mode="r"))
        sha256, largest = facts_of(file, arrays[-1], again=config.verify)
        digest.update(sha256.encode())
        there = "meta.pkl" if (folder / "meta.pkl").is_file() else "GPT-2"
        told = f"{file} holds token {largest}, and {there} has {tokenizer.vocab_size}: is it of another tokenizer?"
        require(largest < tokenizer.vocab_size, told)
    return digest.hexdigest(), tokenizer, Shards(arrays), len(arrays[0])


def facts_of(file: Path, tokens: np.ndarray, again: bool) -> tuple[str, int]:
    """SHA-256 and largest token of a file, computed once a machine, or `again`."""
    stat = file.stat()
    identity = json.dumps([str(file.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns])
    known = cache_folder() / "verified" / f"{hashlib.sha256(identity.encode()).hexdigest()}.json"
    if not again:
        with suppress(OSError, ValueError):
            sha256, largest = json.loads(known.read_bytes())
            return str(sha256), int(largest)
    found = file_sha256(file), int(tokens.max())
    with suppress(OSError):  # a read-only cache: the next start reads it again
        known.parent.mkdir(parents=True, exist_ok=True)
        known.write_text(json.dumps(found))
    return found
