"""Batches without state: what a batch holds follows from (seed, step), so a resumed run continues with the same ones.

B: windows in a batch, T: block_size.
"""

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from core.schema import require
from data.folds import Ranges, Split
from data.shards import Tokens

# One independent random stream a purpose: how often a run evaluates does not change what it trains on.
TRAIN_STREAM, SAMPLED_STREAMS = 0, {"train": 1, "val": 2}
AHEAD, THREADS = 8, 4  # tasks that make batches before they are asked for, and who does them
SMALL, OF_A_TASK = 2**11, 4  # tokens of a batch of which a task makes several


class Batches:
    """Windows of `tokens` (an array, a memmap or shards, of any integer type): x, y int64, y[t] is what follows x[t].

    Raises: ConfigError when no training range holds a window, or nothing in the held-out block can be predicted.
    """

    def __init__(self, tokens: Tokens, split: Split, block_size: int, batch_size: int, seed: int) -> None:
        self.tokens, self.split = tokens, split
        self.block_size, self.batch_size, self.seed = block_size, batch_size, seed
        self._known: dict[Ranges, tuple[np.ndarray, int]] = {}
        longest = max((end - start for start, end in split.train), default=0)
        held_out = max(end - start for start, end in split.val)
        require(
            longest > block_size,
            f"model.block_size={block_size} needs a training range of more than {block_size} tokens; "
            f"the longest has {longest}",
        )
        require(
            held_out >= 2,
            f"data.folds leaves a held-out block of {held_out} of {len(tokens)} tokens; it must have at least 2",
        )

    def get_batch(self, step: int, micro_step: int = 0) -> tuple[Tensor, Tensor]:
        """Training x, y (B, T): a pure function of (seed, step, micro_step), uniform over the windows that lie
        within one training range. Ranks that train together pass different micro steps."""
        return self._sample(self.split.train, purpose=TRAIN_STREAM, step=step, micro_step=micro_step)

    def ahead(self, places: Iterable[tuple[int, int]]) -> Generator[tuple[Tensor, Tensor], None, None]:
        """get_batch(step, micro_step) of one place after the other, made while those before are worked on. To hand a
        small batch over takes longer than to make it: a task makes several."""
        places = iter(places)
        of_a_task = OF_A_TASK if self.batch_size * self.block_size <= SMALL else 1

        def make(several: list[tuple[int, int]]) -> list[tuple[Tensor, Tensor]]:
            return [self.get_batch(*place) for place in several]

        threads = ThreadPoolExecutor(THREADS)  # waiting for a disk mostly
        made: deque[Future[list[tuple[Tensor, Tensor]]]] = deque()
        try:
            while several := list(islice(places, of_a_task)):
                made.append(threads.submit(make, several))
                if len(made) > AHEAD:
                    yield from made.popleft().result()
            while made:
                yield from made.popleft().result()
        finally:
            threads.shutdown(cancel_futures=True)

    def some_tokens(self) -> np.ndarray:
        """Training text, to see what is common: up to 2^16 tokens from the start, (n,)."""
        start, end = max(self.split.train, key=lambda of: of[1] - of[0])
        return np.asarray(self.tokens[start : min(end, start + 2**16)])

    def sampled_batch(self, split: Literal["train", "val"], index: int) -> tuple[Tensor, Tensor]:
        """x, y (B, T) for nanoGPT's sampled evaluation: a pure function of (seed, split, index).

        Raises: ConfigError when the held-out block holds no window.
        """
        ranges = self.split.train if split == "train" else self.split.val
        return self._sample(ranges, purpose=SAMPLED_STREAMS[split], step=index, micro_step=0)

    def eval_batches(self, max_batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """x, y (B, T), B <= max_batch, in which every held-out token but a range's first is a target exactly once.

        The windows of a range are consecutive. Batches have equal shapes; what is left over has target -1, and input 0.
        """
        T = self.block_size
        windows = [(at, min(at + T + 1, end)) for start, end in self.split.val for at in range(start, end - 1, T)]
        n_batches = -(-len(windows) // max_batch)
        n_rows = -(-len(windows) // n_batches)  # B: spread evenly, so that little is padding
        for first in range(0, len(windows), n_rows):
            x, y = np.zeros((n_rows, T), dtype=np.int64), np.full((n_rows, T), -1, dtype=np.int64)
            for row, (start, end) in enumerate(windows[first : first + n_rows]):
                x[row, : end - start - 1] = self.tokens[start : end - 1]
                y[row, : end - start - 1] = self.tokens[start + 1 : end]
            yield torch.from_numpy(x), torch.from_numpy(y)

    def _sample(self, ranges: Ranges, purpose: int, step: int, micro_step: int) -> tuple[Tensor, Tensor]:
        firsts, total = self._windows_of(ranges)
        require(
            total > 0,
            f"model.block_size={self.block_size} needs a held-out block of more than {self.block_size} tokens "
            "to sample from; eval_iters=0 evaluates it exactly",
        )
        # Philox is a function of (key, counter); a draw advances the counter's first word only.
        bits = np.random.Philox(key=[self.seed, purpose], counter=[0, micro_step, step, 0])
        drawn = np.random.Generator(bits).integers(total, size=self.batch_size)  # (B,)
        at = np.searchsorted(firsts[:, 0], drawn, side="right") - 1
        x, y = np.empty((2, self.batch_size, self.block_size), dtype=np.int64)  # (B, T) each
        for row, start in enumerate((firsts[at, 1] + drawn - firsts[at, 0]).tolist()):
            window = self.tokens[start : start + self.block_size + 1]  # (T + 1,)
            x[row], y[row] = window[:-1], window[1:]
        return torch.from_numpy(x), torch.from_numpy(y)

    def _windows_of(self, ranges: Ranges) -> tuple[np.ndarray, int]:
        """For each range with a window: how many windows lie in the ranges before it, and its start; and how many
        windows lie in all."""
        if ranges not in self._known:
            bounds = np.array(ranges, dtype=np.int64).reshape(-1, 2)
            counts = bounds[:, 1] - bounds[:, 0] - self.block_size
            bounds, counts = bounds[counts > 0], counts[counts > 0]
            before = np.cumsum(counts) - counts
            self._known[ranges] = np.stack([before, bounds[:, 0]], axis=1), int(counts.sum())
        return self._known[ranges]
