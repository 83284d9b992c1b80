"""One update: its random numbers, and the gradients of its micro-batches."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from core.device import move
from training.session import Batch, Machine

# Tokens that go through the model together on a CPU. They are few, so that activations fit the CPU's cache and the
# allocator reuses their memory. Memory from the system would cost a page fault for every 4 KiB.
CPU_TOKENS = 2**11


def accumulate_gradients(forward: nn.Module, batches: Iterator[Batch], n: int, machine: Machine) -> Tensor:
    """Add the gradients of the mean loss over the next n micro-batches. Returns that loss, ()."""
    device = machine.device
    total = torch.zeros((), device=device)
    with machine.autocast():  # around all of them: it casts a weight once
        for i in range(n):
            x, y = next(batches)  # (B, T)
            rows = rows_at_once(len(x), x.size(1), device)
            for first in range(0, len(x), rows):
                if isinstance(forward, DistributedDataParallel):  # one exchange of gradients, after the last backward
                    forward.require_backward_grad_sync = i == n - 1 and first + rows >= len(x)
                part = slice(first, first + rows)
                _, loss = forward(move(x[part], device), move(y[part], device))
                loss = loss / (n * len(x) / len(x[part]))  # the part's share of the mean over all n
                with torch.autocast(device.type, enabled=False):  # backward uses the dtypes of the forward
                    loss.backward()
                total += loss.detach()
    return total


def rows_at_once(batch_size: int, block_size: int, device: torch.device) -> int:
    """Windows of a micro-batch that go through the model together."""
    if device.type != "cpu":
        return batch_size
    parts = -(-batch_size * block_size // CPU_TOKENS)
    return -(-batch_size // parts)


def seed_of_update(seed: int, step: int, rank: int) -> int:
    """Every random number of an update follows from it, so that a checkpoint need not save a generator."""
    return int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0])
