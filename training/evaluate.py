"""Validation loss: exact, and nanoGPT's sampled estimate for comparison."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch
import torch.nn as nn
from torch import Tensor

from training import dist
from training.dist import World

Batch = tuple[Tensor, Tensor]


@torch.no_grad()
def mean_loss(
    model: nn.Module, batches: Iterable[Batch], autocast: Callable[[], AbstractContextManager[None]], world: World
) -> float:
    """Nats a token over `batches` of (B, T) inputs and targets, where targets of -1 do not count.

    The ranks share the batches out. The model is put into evaluation mode and back; nothing random is drawn.
    """
    device = next(model.parameters()).device
    total = torch.zeros(2, dtype=torch.float64)  # sum of losses, number of targets
    was_training = model.training
    model.eval()
    with autocast():  # around all of them: it casts a weight once
        for i, (x, y) in enumerate(batches):
            if i % world.size == world.rank:
                _, loss = model(x.to(device), y.to(device))
                n = int((y >= 0).sum())
                total += torch.tensor([loss.item() * n, n], dtype=torch.float64)
    model.train(was_training)
    loss_sum, n_targets = dist.all_reduce(total.to(device) if world.size > 1 and device.type == "cuda" else total)
    return (loss_sum / n_targets).item()
