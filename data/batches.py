"""Batches as a pure function of (seed, step, micro_step): a resumed run continues with the same ones.

B: windows in a batch, T: block_size.
"""

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from itertools import islice
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from core.device import move
from core.schema import require
from data.folds import Ranges, Split
from data.shards import Shards, Tokens, file_versions

# Independent random streams: how often a run evaluates does not change its training batches.
TRAIN_STREAM, SAMPLED_STREAMS = 0, {"train": 1, "val": 2}
PREFETCHED_TASKS, THREADS = 8, 4
SMALL_BATCH, BATCHES_PER_TASK = 2**11, 4  # a task makes several batches of at most 2^11 tokens
TOKENS_PER_COPY = 2**24  # tokens that go to the device at a time


class Batches:
    """Windows x, y (int64) of `tokens`, an array, memmap or shards of any integer type. y[t] is the token after x[t].

    device: where training batches are cut from a copy of all tokens; None: from `tokens` themselves, on the CPU.
    Raises: ConfigError where no training range holds a window, or no held-out token can be predicted.
    """

    def __init__(
        self, tokens: Tokens, split: Split, block_size: int, batch_size: int, seed: int,
        device: torch.device | None = None,
    ) -> None:  # fmt: skip
        self.tokens, self.split = tokens, split
        self.block_size, self.batch_size, self.seed = block_size, batch_size, seed
        longest = max((end - start for start, end in split.train), default=0)
        held_out = max((end - start for start, end in split.val), default=0)
        rule = f"needs a training range of more than {block_size} tokens; the longest has {longest}"
        require(longest > block_size, f"model.block_size={block_size} {rule}")
        block = f"a held-out block of {held_out} of {len(tokens)} tokens; it must have at least 2"
        require(held_out >= 2, f"data.folds leaves {block}")
        self.resident = None if device is None else copy_tokens(tokens, device)
        self.versions = tokens.versions if isinstance(tokens, Shards) else file_versions(tokens)

    def require_unchanged(self) -> None:
        """Raise OSError where a file that tokens are memory-mapped from was written to since."""
        now = file_versions(self.tokens)
        for file, (inode, *_) in self.versions.items():
            kept = file not in now or now[file][0] != inode  # removed or replaced: what is mapped stays
            if not kept and now[file] != self.versions[file]:
                raise OSError(f"{file} was changed while the run trained on it; its last checkpoint is of before")

    def get_batch(self, step: int, micro_step: int = 0) -> tuple[Tensor, Tensor]:
        """Training x, y (B, T), uniform over the windows within a training range. Each rank passes its micro steps."""
        starts = self._draw(self.split.train, purpose=TRAIN_STREAM, step=step, micro_step=micro_step)
        return self._read(starts) if self.resident is None else cut_windows(self.resident, starts, self.block_size)

    def prefetch(self, steps: Iterable[tuple[int, int]]) -> Generator[tuple[Tensor, Tensor], None, None]:
        """get_batch(step, micro_step) for each of `steps`, prepared by threads while the caller uses the ones before.
        Passing a small batch between threads takes longer than making it, so a task makes several."""
        steps = iter(steps)
        if self.resident is not None:  # the device cuts them at once
            yield from (self.get_batch(step, micro_step) for step, micro_step in steps)
            return
        per_task = BATCHES_PER_TASK if self.batch_size * self.block_size <= SMALL_BATCH else 1
        threads = ThreadPoolExecutor(THREADS)  # they mostly wait for a disk
        tasks: deque[Future[list[tuple[Tensor, Tensor]]]] = deque()
        try:
            while task := list(islice(steps, per_task)):
                tasks.append(threads.submit(lambda steps: [self.get_batch(*one) for one in steps], task))
                if len(tasks) > PREFETCHED_TASKS:
                    yield from tasks.popleft().result()
            while tasks:
                yield from tasks.popleft().result()
        finally:
            threads.shutdown(cancel_futures=True)

    def some_tokens(self) -> np.ndarray:
        """Pieces from all over the longest training range, (n,), up to 2^16 tokens, to count frequencies in."""
        start, end = max(self.split.train, key=lambda bounds: bounds[1] - bounds[0])
        if end - start <= 2**16:
            return np.asarray(self.tokens[start:end])
        return np.concatenate([self.tokens[i : i + 2**10] for i in np.linspace(start, end - 2**10, 2**6, dtype=int)])

    def sampled_batch(self, split: Literal["train", "val"], index: int) -> tuple[Tensor, Tensor]:
        """x, y (B, T) for nanoGPT's sampled evaluation, a pure function of (seed, split, index)."""
        ranges = self.split.train if split == "train" else self.split.val
        return self._read(self._draw(ranges, purpose=SAMPLED_STREAMS[split], step=index, micro_step=0))

    def eval_batches(self, max_batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """x, y (B, T), B <= max_batch, in which every held-out token but a range's first is a target exactly once. All
        batches have one shape: padding has input 0 and target -1."""
        T = self.block_size
        windows = [(at, min(at + T + 1, end)) for start, end in self.split.val for at in range(start, end - 1, T)]
        n_batches = -(-len(windows) // max_batch)
        n_rows = -(-len(windows) // n_batches)  # B: the windows spread evenly, for little padding
        for first in range(0, len(windows), n_rows):
            x, y = np.zeros((n_rows, T), dtype=np.int64), np.full((n_rows, T), -1, dtype=np.int64)
            for row, (start, end) in enumerate(windows[first : first + n_rows]):
                x[row, : end - start - 1] = self.tokens[start : end - 1]
                y[row, : end - start - 1] = self.tokens[start + 1 : end]
            yield torch.from_numpy(x), torch.from_numpy(y)

    def _draw(self, ranges: Ranges, purpose: int, step: int, micro_step: int) -> np.ndarray:
        """The first positions of a batch's windows, (B,)."""
        T = self.block_size
        firsts, total = count_windows(ranges, T)
        rule = f"needs a held-out block of more than {T} tokens to sample from; eval_iters=0 evaluates it exactly"
        require(total > 0, f"model.block_size={T} {rule}")
        # Philox is a function of (key, counter). A draw advances only the first word of the counter.
        bits = np.random.Philox(key=[self.seed, purpose], counter=[0, micro_step, step, 0])
        drawn = np.random.Generator(bits).integers(total, size=self.batch_size)  # (B,)
        at = np.searchsorted(firsts[:, 0], drawn, side="right") - 1
        return firsts[at, 1] + drawn - firsts[at, 0]

    def _read(self, starts: np.ndarray) -> tuple[Tensor, Tensor]:
        x, y = np.empty((2, self.batch_size, self.block_size), dtype=np.int64)  # (B, T) each
        for row, start in enumerate(starts.tolist()):
            window = self.tokens[start : start + self.block_size + 1]  # (T + 1,)
            x[row], y[row] = window[:-1], window[1:]
        return torch.from_numpy(x), torch.from_numpy(y)


@lru_cache
def count_windows(ranges: Ranges, block_size: int) -> tuple[np.ndarray, int]:
    """For each range that holds a window the number of windows before it and its start, (n, 2); their total."""
    bounds = np.array(ranges, dtype=np.int64).reshape(-1, 2)
    counts = bounds[:, 1] - bounds[:, 0] - block_size
    bounds, counts = bounds[counts > 0], counts[counts > 0]
    before = np.cumsum(counts) - counts
    return np.stack([before, bounds[:, 0]], axis=1), int(counts.sum())


def copy_tokens(tokens: Tokens, device: torch.device) -> Tensor:
    """All tokens (n,) on the device, as small as they are; uint16 becomes int16, and uint32 int32, bit for bit."""
    dtype = np.asarray(tokens[:0]).dtype
    signed = dtype if dtype == np.uint8 else np.dtype(f"i{dtype.itemsize}")
    copy = torch.empty(len(tokens), dtype=torch.from_numpy(np.empty(0, signed)).dtype, device=device)
    for at in range(0, len(tokens), TOKENS_PER_COPY):
        copy[at : at + TOKENS_PER_COPY] = torch.from_numpy(np.array(tokens[at : at + TOKENS_PER_COPY]).view(signed))
    return copy


def cut_windows(tokens: Tensor, starts: np.ndarray, block_size: int) -> tuple[Tensor, Tensor]:
    """x, y (B, T) of the windows that begin at `starts`, (B,). The tokens are on the device; the starts go there."""
    positions = move(torch.from_numpy(starts), tokens.device)[:, None]  # (B, 1)
    positions = positions + torch.arange(block_size + 1, device=tokens.device)  # (B, T + 1)
    windows = tokens[positions].long()
    if tokens.dtype == torch.int16:
        windows &= 2**16 - 1  # uint16 again
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
