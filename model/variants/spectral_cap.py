"""After each update W is divided by max(1, sigma(W) / (c sqrt(rows / columns))), sigma its largest singular value, for
every projection of a block (arXiv 2507.13338, spectral normalization; phess2/lipschitz-transformers).

The paper estimates sigma from below, by power iteration from a random vector. Here it is bounded from above, so that
the cap holds, and nothing is kept from one update to the next.
"""

import math
from typing import Any

import torch
from torch import Tensor

from model.linear import Linear
from model.ops import at_least_fp32
from model.options import SpectralCapOptions
from model.slots import Weights, register

SQUARINGS = 6


def spectral_norm_bound(w: Tensor) -> Tensor:
    """At least the largest singular value of w (rows, columns), (), and at most n^(1 / 256) times that, 2 % for n = 128
    equal ones: |G^64|_F^(1 / 128), G = w w^T (n, n) of the shorter side."""
    power, bound = w if w.size(0) <= w.size(1) else w.mT, w.new_ones(())
    for i in range(SQUARINGS + 2):  # w, G, then its powers, each over its norm: none over- or underflows
        power = power if i == 0 else power @ power.mT
        size = torch.linalg.matrix_norm(power).clamp(min=torch.finfo(w.dtype).tiny)
        power, bound = power / size, bound * size ** (0.5**i)
    return bound


class SpectralCap(Weights):
    def __init__(self, options: SpectralCapOptions, block: Any):
        super().__init__(options, block)
        self.linears = tuple(module for module in block.modules() if isinstance(module, Linear))  # no submodules

    def after_update(self) -> None:
        for linear in self.linears:
            for w in linear.weight.split(linear.split_sizes):
                cap = self.options.c * math.sqrt(w.size(0) / w.size(1))
                w.div_((spectral_norm_bound(at_least_fp32(w)) / cap).clamp(min=1))


register(SpectralCapOptions, SpectralCap)
