"""Validation loss: exact, and nanoGPT's sampled estimate for comparison."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch
import torch.nn as nn
from torch import Tensor

from core import dist
from core.device import move
from core.dist import World

Batch = tuple[Tensor, Tensor]


@torch.no_grad()
def mean_loss(
    model: nn.Module, batches: Iterable[Batch], autocast: Callable[[], AbstractContextManager[None]], world: World
) -> float:
    """Nats a token over `batches` of (B, T) inputs and targets, where targets of -1 do not count.

    The ranks share the batches out. The model is put into evaluation mode and back; nothing random is drawn.
    """
    device = next(model.parameters()).device
    losses, counts = [], []
    was_training = model.training
    model.eval()
    with autocast():  # around all of them: it casts a weight once
        for i, (x, y) in enumerate(batches):
            if i % world.size == world.rank:
                losses.append(model(move(x, device), move(y, device))[1])
                counts.append(int((y >= 0).sum()))
    model.train(was_training)
    total = torch.zeros(2, dtype=torch.float64)  # sum of losses, number of targets
    # read together: the host waits for the device once
    for loss, n in zip(torch.stack(losses).tolist() if losses else [], counts, strict=True):
        total += torch.tensor([loss * n, n], dtype=torch.float64)
    loss_sum, n_targets = dist.all_reduce(total.to(device) if world.size > 1 and device.type == "cuda" else total)
    return (loss_sum / n_targets).item()
