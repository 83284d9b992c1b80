"""Token shards on disk, as data/prepare_fineweb.py writes them: a corpus that is larger than memory.

index.json            settings, totals, and for each shard: tokens, documents, bytes of text, SHA-256
train_000000.bin, …   token ids, uint16 or uint32 as index.json says; each document ends with the separator
val_000000.bin, …     the same for the held-out documents
tokenizer.json        the tokenizer; index.json has its SHA-256
"""

import hashlib
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from core.schema import ConfigError, require
from data.corpora import data_folders, expand, read_bytes
from data.options import FineWebOptions
from data.tokenizer import Tokenizer, from_dict, tokenizer_sha256

FORMAT = 1
INDEX, PROGRESS, TOKENIZER = "index.json", "progress.json", "tokenizer.json"
SPLITS = ("train", "val")


class Shards:
    """Memory-mapped arrays as one sequence: `shards[a:b]` has the tokens a to b - 1 of all arrays joined."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self.arrays = [np.asarray(array) for array in arrays]  # slices of a plain view are cheaper than np.memmap's
        self.ends = np.cumsum([len(array) for array in arrays])

    def __len__(self) -> int:
        return int(self.ends[-1])

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


def open_shards(config: FineWebOptions) -> tuple[str, Tokenizer, Shards, int]:
    """SHA-256 of the index, the tokenizer, all tokens, and the number of training tokens, which come first.

    Raises: ConfigError where the shards are absent, unfinished, or differ in size from their index.
    """
    folder = find_shards(config)
    raw = read_bytes(folder / INDEX, str(folder / INDEX))
    index = parse_index(folder, raw)
    arrays = []
    for shard in (shard for split in SPLITS for shard in index[split]["shards"]):
        file, dtype = folder / shard["file"], np.dtype(index["dtype"])
        size = file.stat().st_size if file.is_file() else -1
        require(
            size == shard["tokens"] * dtype.itemsize,
            f"{file} is {'absent' if size < 0 else f'{size} bytes long'}, its index says "
            f"{shard['tokens'] * dtype.itemsize} bytes: it was changed since data/prepare_fineweb.py wrote it",
        )
        arrays.append(np.memmap(file, dtype=dtype, mode="r"))
    for split in SPLITS:
        require(index[split]["tokens"] >= 2, f"{folder} holds {index[split]['tokens']} tokens of {split}, too few")
    return hashlib.sha256(raw).hexdigest(), load_tokenizer(folder, index), Shards(arrays), index["train"]["tokens"]


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
    command = shlex.join(["python", "data/prepare_fineweb.py", f"out={folders[0]}", "max_tokens=1000000000"])
    raise ConfigError(f"{where} has no {names}: {command} makes it")


def parse_index(folder: Path, raw: bytes) -> dict[str, Any]:
    try:
        index = json.loads(raw)
        found = index["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder / INDEX} is not an index of token shards") from error
    require(found == FORMAT, f"{folder / INDEX} has format {found}, not {FORMAT}")
    return index


def load_tokenizer(folder: Path, index: dict[str, Any]) -> Tokenizer:
    file = folder / TOKENIZER
    try:
        tokenizer = from_dict(json.loads(read_bytes(file, str(file))))
    except (ValueError, KeyError, TypeError, AssertionError) as error:
        raise ConfigError(f"{file} is not a tokenizer: {error}") from error
    require(tokenizer_sha256(tokenizer) == index["tokenizer_sha256"], f"{file} is not the one that {INDEX} names")
    return tokenizer
