"""Batches without state: what a batch holds follows from (seed, step), so a resumed run continues with the same ones.

B: windows in a batch, T: block_size.
"""

from collections.abc import Iterator
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from data.folds import Split
from training.config import require

# One independent random stream a purpose: how often a run evaluates does not change what it trains on.
TRAIN_STREAM, SAMPLED_STREAMS = 0, {"train": 1, "val": 2}


class Batches:
    """Windows of `tokens` (an array or a memmap of any integer type): x, y int64, y[t] is the token after x[t].

    Raises: ConfigError when no training range holds a window, or nothing in the held-out block can be predicted.
    """

    def __init__(self, tokens: np.ndarray, split: Split, block_size: int, batch_size: int, seed: int) -> None:
        self.tokens, self.split = tokens, split
        self.block_size, self.batch_size, self.seed = block_size, batch_size, seed
        longest = max((end - start for start, end in split.train), default=0)
        held_out = split.val[1] - split.val[0]
        require(
            longest > block_size,
            f"model.block_size={block_size} needs a training range of more than {block_size} tokens; "
            f"the longest has {longest}",
        )
        require(
            held_out >= 2,
            f"data.folds leaves a held-out block of {held_out} of {len(tokens)} tokens; it must have at least 2",
        )
        # Row s of this view is tokens[s : s + T + 1]: a batch is one gather of B rows, each of them contiguous.
        self.windows = np.lib.stride_tricks.sliding_window_view(tokens, block_size + 1)  # (n_tokens - T, T + 1)

    def get_batch(self, step: int, micro_step: int = 0) -> tuple[Tensor, Tensor]:
        """Training x, y (B, T): a pure function of (seed, step, micro_step), uniform over the windows that lie
        within one training range. Ranks that train together pass different micro steps."""
        return self._sample(self.split.train, purpose=TRAIN_STREAM, step=step, micro_step=micro_step)

    def sampled_batch(self, split: Literal["train", "val"], index: int) -> tuple[Tensor, Tensor]:
        """x, y (B, T) for nanoGPT's sampled evaluation: a pure function of (seed, split, index).

        Raises: ConfigError when the held-out block holds no window.
        """
        ranges = self.split.train if split == "train" else (self.split.val,)
        return self._sample(ranges, purpose=SAMPLED_STREAMS[split], step=index, micro_step=0)

    def eval_batches(self, max_batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """x, y (B, T), B <= max_batch, in which every held-out token but the first is a target exactly once.

        The windows are consecutive. Batches have equal shapes; what is left over has target -1, and input 0.
        """
        start, end = self.split.val
        n_windows = -(-(end - 1 - start) // self.block_size)
        n_batches = -(-n_windows // max_batch)
        n_rows = -(-n_windows // n_batches)  # B: spread evenly, so that little is padding
        size = n_rows * self.block_size
        for first in range(start, end - 1, size):
            block = self.tokens[first : min(first + size + 1, end)]
            x, y = np.zeros(size, dtype=np.int64), np.full(size, -1, dtype=np.int64)
            x[: len(block) - 1], y[: len(block) - 1] = block[:-1], block[1:]
            shape = (n_rows, self.block_size)  # (B, T)
            yield torch.from_numpy(x.reshape(shape)), torch.from_numpy(y.reshape(shape))

    def _sample(
        self, ranges: tuple[tuple[int, int], ...], purpose: int, step: int, micro_step: int
    ) -> tuple[Tensor, Tensor]:
        counts = [max(end - start - self.block_size, 0) for start, end in ranges]  # windows in each range
        require(
            sum(counts) > 0,
            f"model.block_size={self.block_size} needs a held-out block of more than {self.block_size} tokens "
            "to sample from; eval_iters=0 evaluates it exactly",
        )
        # Philox is a function of (key, counter); a draw advances the counter's first word only.
        bits = np.random.Philox(key=[self.seed, purpose], counter=[0, micro_step, step, 0])
        drawn = np.random.Generator(bits).integers(sum(counts), size=self.batch_size)  # (B,)
        starts, before = drawn, 0
        for (start, _), count in zip(ranges, counts, strict=True):
            starts = np.where(drawn >= before, start + drawn - before, starts)
            before += count
        windows = self.windows[starts]  # (B, T + 1)
        x, y = windows[:, :-1].astype(np.int64), windows[:, 1:].astype(np.int64)  # (B, T), contiguous
        return torch.from_numpy(x), torch.from_numpy(y)
