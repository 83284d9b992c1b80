"""How fast do batches come? python scripts/bench_data.py [path=FOLDER of token shards] [tokens_per_second=1000000]

Draws batches as train.py does, first as fast as they come, then at the pace of a model that takes so many tokens a
second, and counts how long that model would wait. Without a path it writes shards of random tokens to a temporary
folder, and measures them once dropped from the page cache and once in it. The last line is one JSON object.
"""

import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from data.batches import Batches
from data.folds import Split
from data.shards import Shards, open_shards
from training.config import ConfigError, FineWebConfig, at_least, build, refuse


@dataclass(frozen=True)
class BenchConfig:
    path: str | None = None
    block_size: int = 1024
    batch_size: int = 32
    steps: int = 100
    tokens_per_second: int = 1_000_000
    shard_tokens: int = 100_000_000  # of the random shards, four of them

    def check(self) -> None:
        for key in ("block_size", "batch_size", "steps", "tokens_per_second", "shard_tokens"):
            at_least(key, getattr(self, key), 1)


def random_shards(folder: Path, n_tokens: int) -> list[Path]:
    files = [folder / f"{i}.bin" for i in range(4)]
    for i, file in enumerate(files):
        np.random.default_rng(i).integers(2**16, size=n_tokens, dtype=np.uint16).tofile(file)
    return files


def drop_from_page_cache(files: list[Path]) -> None:
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def measure(batches: Batches, config: BenchConfig, first: int) -> dict[str, float]:
    """tok_per_sec: as fast as they come, by the median step, and slowest_ms the slowest. Between the steps of a model
    of the asked pace: wait_ms, the median time for a batch, and stall, the part of the time that goes into batches."""
    n_tokens = config.batch_size * config.block_size
    seconds = []
    for step in range(first, first + config.steps):
        start = time.perf_counter()
        batches.get_batch(step)
        seconds.append(time.perf_counter() - start)
    compute = n_tokens / config.tokens_per_second
    waits = []
    for step in range(first + config.steps, first + 2 * config.steps):
        time.sleep(compute)
        start = time.perf_counter()
        batches.get_batch(step)
        waits.append(time.perf_counter() - start)
    return {
        "tok_per_sec": round(n_tokens / float(np.median(seconds))),
        "slowest_ms": round(1000 * max(seconds), 3),
        "wait_ms": round(1000 * float(np.median(waits)), 3),
        "stall": round(sum(waits) / (sum(waits) + compute * len(waits)), 5),
    }


def bench(config: BenchConfig) -> dict[str, Any]:
    found: dict[str, Any] = {"block_size": config.block_size, "batch_size": config.batch_size}
    found |= {"asked_tok_per_sec": config.tokens_per_second}
    if config.path is not None:
        _, _, tokens, n_train = open_shards(FineWebConfig(path=config.path))
        split = Split(train=((0, n_train),), val=((n_train, len(tokens)),))
        batches = Batches(tokens, split, config.block_size, config.batch_size, seed=0)
        found |= {"tokens": len(tokens), "as_found": measure(batches, config, 0)}
        return found
    with tempfile.TemporaryDirectory() as folder:
        files = random_shards(Path(folder), config.shard_tokens)
        for name in ("cold", "warm"):
            if name == "cold":
                drop_from_page_cache(files)
            else:
                for file in files:
                    file.read_bytes()
            shards = Shards([np.memmap(file, dtype=np.uint16, mode="r") for file in files])
            n_train = len(shards) - config.block_size
            split = Split(train=((0, n_train),), val=((n_train, len(shards)),))
            batches = Batches(shards, split, config.block_size, config.batch_size, seed=0)
            found |= {"tokens": len(shards), name: measure(batches, config, 0 if name == "cold" else 10**6)}
            print(f"{name}: {found[name]}")
    return found


def main() -> None:
    try:
        words = [word.partition("=") for word in sys.argv[1:]]
        given = {key: int(value) if value.isdigit() else value for key, _, value in words}
        config = build(BenchConfig, given)
        config.check()
        print(json.dumps(bench(config)))
    except ConfigError as error:
        sys.exit(refuse(str(error)))


if __name__ == "__main__":
    main()
