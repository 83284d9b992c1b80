"""Speed of the batches

python scripts/benchmarks/bench_data.py [path=FOLDER]

Draws batches as train.py does: first as fast as possible, then for a model that takes so many tokens a second, to
measure how long that model would wait. Without a path it writes four shards of random tokens to a temporary folder and
measures them twice: dropped from the page cache, and in it. The last line is JSON.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from core.schema import NOT_EMPTY, AtLeast, Help, options
from data.batches import Batches
from data.folds import Split
from data.options import FineWebOptions
from data.shards import Shards, open_shards
from scripts.benchmarks.timing import machine, run_benchmark


@options
class DataOptions:
    path: Annotated[str | None, NOT_EMPTY, Help("a folder of token shards; null: random ones")] = None
    block_size: Annotated[int, AtLeast(1), Help("tokens of a window")] = 1024
    batch_size: Annotated[int, AtLeast(1), Help("windows of a batch")] = 32
    steps: Annotated[int, AtLeast(1), Help("batches of each measurement")] = 100
    tokens_per_second: Annotated[int, AtLeast(1), Help("speed of the model that waits for batches")] = 1_000_000
    shard_tokens: Annotated[int, AtLeast(1), Help("of each of the four random shards")] = 100_000_000


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


def measure(fresh: Callable[[], Batches], values: DataOptions, first: int) -> dict[str, float]:
    """As fast as possible, from step `first` on: tok_per_sec of the median step, slowest_ms. Then prefetched as in
    train.py, for a model of the asked speed: wait_ms, the median wait for a batch, and stall, the share of time spent
    waiting. `fresh` opens the tokens anew."""
    batches = fresh()
    n_tokens, steps = batches.batch_size * batches.block_size, values.steps
    seconds = []
    for step in range(first, first + steps):
        start = time.perf_counter()
        batches.get_batch(step)
        seconds.append(time.perf_counter() - start)
    del batches  # mapped files cannot be dropped from the page cache
    compute, waits = n_tokens / values.tokens_per_second, []
    prefetched = fresh().prefetch((step, 0) for step in range(first + steps, first + 2 * steps + 2))
    next(prefetched)
    for _ in range(steps):
        time.sleep(compute)
        start = time.perf_counter()
        next(prefetched)
        waits.append(time.perf_counter() - start)
    prefetched.close()
    return {
        "tok_per_sec": round(n_tokens / float(np.median(seconds))),
        "slowest_ms": round(1000 * max(seconds), 3),
        "wait_ms": round(1000 * float(np.median(waits)), 3),
        "stall": round(sum(waits) / (sum(waits) + compute * len(waits)), 5),
    }


def bench(values: DataOptions) -> dict[str, Any]:
    T, batch_size = values.block_size, values.batch_size

    def batches_of(tokens: Any, n_train: int) -> Batches:
        split = Split(train=((0, n_train),), val=((n_train, len(tokens)),))
        return Batches(tokens, split, T, batch_size, seed=0)

    rate = values.tokens_per_second
    found: dict[str, Any] = {"block_size": T, "batch_size": batch_size, "asked_tok_per_sec": rate}
    if values.path:
        _, _, tokens, n_train = open_shards(FineWebOptions(path=values.path))
        measured = measure(lambda: batches_of(tokens, n_train), values, 0)
        return {**found, "tokens": len(tokens), "as_found": measured, **machine()}
    with tempfile.TemporaryDirectory() as folder:
        files = random_shards(Path(folder), values.shard_tokens)

        def shards() -> Batches:
            found = Shards([np.memmap(file, dtype=np.uint16, mode="r") for file in files])
            return batches_of(found, len(found) - T)

        def cold() -> Batches:
            drop_from_page_cache(files)
            return shards()

        for name, fresh, first in (("cold", cold, 0), ("warm", shards, 10**6)):  # other batches
            for file in files if name == "warm" else []:
                file.read_bytes()
            found[name] = measure(fresh, values, first)
            print(f"{name}: {found[name]}")
    return {**found, "tokens": len(files) * values.shard_tokens, **machine()}


if __name__ == "__main__":
    sys.exit(run_benchmark(DataOptions, bench, __doc__, passes_on=False))
