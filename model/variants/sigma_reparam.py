"""Every matrix of a block as gamma / sigma(W) * W: sigma its largest singular value by power iteration, gamma learned
(arXiv 2303.06296; apple/ml-sigma-reparam). gamma starts at sigma(W), as in the vision models there: the first model is
that without it. The speech models there start at gamma = 1.

Projections that share a matrix are separate ones here: queries, keys and values have a sigma each. A forward pass
takes one step from u and does not keep it, so that two passes over the same weights give the same; an update keeps it.
"""

from typing import Any

import torch
from torch import Tensor, nn

from model.linear import Linear
from model.ops import at_least_fp32
from model.options import SigmaReparamOptions
from model.slots import LateInit, Weights, register


class Reparam(LateInit):
    """W (rows, columns) -> gamma / sigma(W) * W for each of its projections. `u`, a row a projection, is the right
    singular vector so far: no trained weight, but a checkpoint must hold it."""

    def __init__(self, linear: Linear):
        super().__init__()
        self.split_sizes = linear.split_sizes
        self.linear = (linear,)  # a tuple: no submodule
        self.gamma = nn.Parameter(torch.empty(len(self.split_sizes)))
        self.u = nn.Parameter(torch.empty(len(self.split_sizes), linear.in_features), requires_grad=False)

    def init_weights(self) -> None:
        for i, w in enumerate(self.linear[0].weight.split(self.split_sizes)):
            _, sigma, v = torch.linalg.svd(w, full_matrices=False)
            self.gamma[i], self.u[i] = sigma[0], v[0]

    def forward(self, weight: Tensor) -> Tensor:
        with torch.autocast(weight.device.type, enabled=False):
            parts = []
            for w, gamma, u in zip(at_least_fp32(weight).split(self.split_sizes), self.gamma, self.u, strict=True):
                left, right = power_step(w, u)
                parts.append(w * (gamma / (left @ w @ right)))  # gamma / sigma(W) * W
        return torch.cat(parts).to(weight.dtype)

    @torch.no_grad()
    def after_update(self) -> None:
        for w, u in zip(self.linear[0].weight.split(self.split_sizes), self.u, strict=True):
            u.copy_(power_step(w, u)[1])


@torch.no_grad()
def power_step(w: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Left and right singular vectors of w (rows, columns) by one step from the right one, u (columns,)."""
    left = nn.functional.normalize(w @ u.to(w.dtype), dim=0)
    return left, nn.functional.normalize(left @ w, dim=0)


class SigmaReparam(Weights):
    def __init__(self, options: SigmaReparamOptions, block: Any):
        super().__init__(options, block)
        for linear in [module for module in block.modules() if isinstance(module, Linear)]:
            linear.reparam = Reparam(linear)


register(SigmaReparamOptions, SigmaReparam)
