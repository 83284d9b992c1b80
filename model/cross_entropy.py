"""Logits and their cross-entropy: of too many logits to hold at once, some positions at a time."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from model.ops import at_least_fp32, matmul_dtype

LOGITS_AT_ONCE = 2**26  # elements; a loss of more logits is computed some positions at a time


def max_positions_with_logits(vocab_size: int) -> int:
    """The most positions that a window may have for its loss to come with logits; at least 1."""
    return max(1, LOGITS_AT_ONCE // vocab_size)


def loss_bytes(n_logits: int) -> int:
    """Bytes that the loss of so many logits takes for a while, besides what autograd saves: two fp32 numbers a logit,
    input and output of log_softmax or their gradients."""
    return 8 * min(n_logits, LOGITS_AT_ONCE)


def logits_and_loss(x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor | None, Tensor]:
    """Logits (B, T, V) = x W^T, None if they are more than LOGITS_AT_ONCE, and their mean cross-entropy in nats, (), of
    x (B, T, C), weight (V, C), targets (B, T), -1 is ignored."""
    if targets.numel() * len(weight) > LOGITS_AT_ONCE:
        rows = max_positions_with_logits(len(weight))
        gradients = torch.is_grad_enabled()
        return None, LinearCrossEntropy.apply(x.flatten(0, 1), weight, targets.flatten(), rows, gradients)
    logits = F.linear(x, weight)
    loss = F.cross_entropy(at_least_fp32(logits).flatten(0, 1), targets.flatten(), ignore_index=-1)
    return logits, loss


class LinearCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy in nats, (), of logits x W^T, `rows` positions at a time and never held whole: x (N, C),
    weight (V, C), targets (N,), -1 is ignored.

    With `gradients` the forward also computes those of the sum, which backward scales: no logits are kept or
    computed twice (as in Liger Kernel's fused linear cross-entropy). Matmuls are in autocast's dtype, as F.linear's
    are; the weight's gradient is summed in its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, rows: int, gradients: bool) -> Tensor:
        device, dtype = x.device.type, matmul_dtype(x)
        kept = targets >= 0
        total = at_least_fp32(x.new_zeros(()))
        x, w = x.to(dtype), weight.to(dtype)
        dx, dw = torch.empty_like(x if gradients else total), torch.zeros_like(weight if gradients else total)
        with torch.autocast(device, enabled=False):
            for part in (slice(i, i + rows) for i in range(0, len(x), rows)):
                y = at_least_fp32(x[part] @ w.T).log_softmax(-1)  # (rows, V)
                total = total + F.nll_loss(y, targets[part], ignore_index=-1, reduction="sum")
                if gradients:
                    y.exp_().scatter_add_(1, targets[part, None].clamp(min=0), y.new_full((len(y), 1), -1.0))
                    y = y.mul_(kept[part, None]).to(dtype)  # of the logits: softmax, less 1 at the target
                    dx[part] = y @ w
                    dw += y.T @ x[part]
                del y  # before the next ones
        n = kept.sum()
        ctx.save_for_backward(dx, dw, n)
        return total / n

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        dx, dw, n = ctx.saved_tensors
        return at_least_fp32(dx) * (grad / n), dw * (grad / n), None, None, None
