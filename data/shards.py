"""Token shards on disk, as data/prepare_fineweb.py writes them: a corpus that is larger than memory.

index.json            settings, totals, and for each shard: tokens, documents, bytes of text, SHA-256
train_000000.bin, …   token ids, uint16 or uint32 as index.json says; each document ends with the separator
val_000000.bin, …     the same for the held-out documents
tokenizer.json        the tokenizer; index.json has its SHA-256
times.json            when the files of the data set were changed; no reader needs it
"""

import hashlib
import json
import math
import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from core.files import (
    WHOLE_BYTES,
    cache_folder,
    expand,
    file_sha256,
    is_intact,
    parse_object,
    program,
    read_json,
    sealed,
    write_json,
)
from core.schema import ConfigError, require, show
from data.corpora import data_folders, read_bytes
from data.options import FineWebOptions
from data.tokenizer import Tokenizer, from_dict, token_dtype, tokenizer_sha256

FORMAT = 1
INDEX, PROGRESS, TOKENIZER = "index.json", "progress.json", "tokenizer.json"
SPLITS = ("train", "val")
CHANGED = "it was changed since data/prepare_fineweb.py wrote it"


class Shards:
    """Memory-mapped arrays as one sequence: `shards[a:b]` has the tokens a to b - 1 of all arrays joined. versions:
    file_versions() as they are now, so before measured() reads them: what is written in between shows later, too."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self.files = [array.filename for array in arrays if isinstance(array, np.memmap)]
        self.arrays = [np.asarray(array) for array in arrays]  # slices of a plain view are cheaper than np.memmap's
        self.ends = np.cumsum([len(array) for array in arrays])
        self.versions = file_versions(self)

    def __len__(self) -> int:
        return int(self.ends[-1])

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def __getitem__(self, where: slice) -> np.ndarray:
        start, end, _ = where.indices(len(self))
        first = int(np.searchsorted(self.ends, start, side="right"))
        pieces = []
        for array, shard_end in zip(self.arrays[first:], self.ends[first:].tolist(), strict=True):
            shard_start = shard_end - len(array)
            pieces.append(array[max(start - shard_start, 0) : max(end - shard_start, 0)])
            if end <= shard_end:
                break
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces or [self.arrays[0][:0]])


Tokens = np.ndarray | Shards


def file_versions(tokens: Tokens) -> dict[str, tuple[int, int, int]]:
    """Inode, size and time of change of each file that tokens are memory-mapped from, and that is still there."""
    files = tokens.files if isinstance(tokens, Shards) else [getattr(tokens, "filename", None)]
    found = {}
    for file in map(str, filter(None, files)):
        with suppress(FileNotFoundError):
            about = os.stat(file)
            found[file] = (about.st_ino, about.st_size, about.st_mtime_ns)
    return found


def open_shards(config: FineWebOptions) -> tuple[str, Tokenizer, Shards, int]:
    """SHA-256 of the index, the tokenizer, all tokens, and the number of training tokens, which come first. Raises:
    ConfigError where the shards are absent, unfinished, or differ from their index."""
    folder = find_shards(config)
    raw = read_bytes(folder / INDEX, str(folder / INDEX), WHOLE_BYTES)
    index = parse_index(folder, raw)
    listed, dtype = [shard for split in SPLITS for shard in index[split]["shards"]], np.dtype(index["dtype"])
    for shard in listed:
        file = folder / shard["file"]
        size, expected = file.stat().st_size if file.is_file() else None, shard["tokens"] * dtype.itemsize
        found = "absent" if size is None else f"{size} bytes long"
        require(size == expected, f"{file} is {found}, its index says {expected} bytes: {CHANGED}")
    tokens = Shards([np.memmap(folder / shard["file"], dtype=dtype, mode="r") for shard in listed])
    for shard, array in zip(listed, tokens.arrays, strict=True):
        file = folder / shard["file"]
        sha256, highest = measured(file, array, again=config.verify)
        require(sha256 == shard["sha256"], f"{file} has another SHA-256: {CHANGED}")
        vocab_size = index["vocab_size"]
        require(highest < vocab_size, f"{file} holds token {highest}, its tokenizer has {vocab_size}")
    for split in SPLITS:
        require(index[split]["tokens"] >= 2, f"{folder} holds {index[split]['tokens']} tokens of {split}, too few")
    tokenizer = read_tokenizer(folder / TOKENIZER)
    named = tokenizer_sha256(tokenizer) == index["tokenizer_sha256"]
    require(named, f"{folder / TOKENIZER} is not the one that {INDEX} names")
    return hashlib.sha256(raw).hexdigest(), tokenizer, tokens, index["train"]["tokens"]


def measured(file: Path, tokens: np.ndarray, again: bool) -> tuple[str, int]:
    """SHA-256 and highest token of a file, computed once a machine, or `again`."""
    stat = file.stat()
    identity = json.dumps([str(file.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns])
    seen = cache_folder() / "verified" / f"{hashlib.sha256(identity.encode()).hexdigest()}.json"
    found = {} if again else read_json(seen)
    if not ("found" in found and "sha256" in found and is_intact(found)):
        found = {"found": [file_sha256(file, math.inf), int(tokens.max(initial=0))]}
        with suppress(OSError):  # a read-only cache: the next start reads the file again
            seen.parent.mkdir(parents=True, exist_ok=True)
            write_json(seen, sealed(found))
    sha256, highest = found["found"]
    return sha256, highest


def find_shards(config: FineWebOptions) -> Path:
    folders = [folder / "fineweb" for folder in data_folders()] if config.path is None else [expand(config.path)]
    for folder in folders:
        if (folder / INDEX).exists():
            return folder
    for folder in folders:
        require(
            not (folder / PROGRESS).exists(),
            f"data={config.name} is not complete in {folder}: the command of data/prepare_fineweb.py goes on there",
        )
    where = f"data.path={config.path}" if config.path is not None else f"data={config.name}"
    names = " nor ".join(str(folder / INDEX) for folder in folders)
    own = config.path is not None and folders[0].is_dir() and any(folders[0].iterdir())
    words = [f"dataset={folders[0]}", "out=my_shards"] if own else [f"out={folders[0]}", "max_tokens=1000000000"]
    command = f"{program('data/prepare_fineweb.py')} {shlex.join(words)}"
    raise ConfigError(f"{where} has no {names}: {command} makes {'one of its files' if own else 'it'}")


def parse_index(folder: Path, raw: bytes) -> dict[str, Any]:
    """The content of index.json. Raises: ConfigError where its parts do not agree."""
    try:
        index = parse_object(raw)
        found = index["format"]
        good = index["dtype"] == np.dtype(token_dtype(index["vocab_size"])).name
        good &= type(index["vocab_size"]) is int and isinstance(index["tokenizer_sha256"], str)
        for split in SPLITS:
            shards = index[split]["shards"]
            names = [f"{split}_{i:06d}.bin" for i in range(len(shards))]
            counts = [shard["tokens"] for shard in shards]
            good &= names == [shard["file"] for shard in shards] and all(type(n) is int and n > 0 for n in counts)
            good &= index[split]["tokens"] == sum(counts) and all(isinstance(shard["sha256"], str) for shard in shards)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder / INDEX} is not an index of token shards") from error
    require(found == FORMAT, f"{folder / INDEX} has format {show(found)}, not {FORMAT}")
    require(good, f"{folder / INDEX} contradicts itself: {CHANGED}")
    return index


def read_tokenizer(file: Path) -> Tokenizer:
    try:
        return from_dict(parse_object(read_bytes(file, str(file), WHOLE_BYTES)))
    except (ValueError, LookupError, TypeError, AttributeError, AssertionError) as error:
        raise ConfigError(f"{file} is not a tokenizer: {error}") from error
