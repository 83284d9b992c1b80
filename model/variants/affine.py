"""Affine-scaled attention: (alpha(x) softmax + beta(x)) v, alpha = clip(W x), beta = (alpha_ma - alpha) / n, n visible
keys, and alpha_ma a moving average of alpha's mean over a batch, from 0 (arXiv 2602.23057, eq. 6-9 and 11).

Here alpha_ma is that of the updates before, so that no token moves an earlier one. A batch is the last windows of an
update that go through the model together.
"""

import torch
from torch import Tensor, nn

from core import dist
from model.linear import Linear
from model.ops import at_least_fp32
from model.options import AffineOptions, GPTConfig
from model.slots import Output, register


class Affine(Output):
    """`means`: alpha_ma, and alpha's mean over the last batch. No trained weight, but a checkpoint must hold it."""

    takes_values = True
    MOMENTUM = 0.9  # rho

    def __init__(self, options: AffineOptions, config: GPTConfig, v_dim: int):
        super().__init__(options, config, v_dim)
        self.w = Linear(config.model.n_embd, config.model.n_head, bias=False)
        self.means = nn.Parameter(torch.empty(2, config.model.n_head), requires_grad=False)

    def init_weights(self) -> None:
        nn.init.zeros_(self.means)

    def forward(self, y: Tensor, x: Tensor, v: Tensor) -> Tensor:  # type: ignore[override]
        alpha = (0.1 * at_least_fp32(self.w(x)) + 0.5).clamp(0, 1).mT[..., None]  # (B, nh, T, 1)
        if self.training:
            with torch.no_grad():
                self.means[1].copy_(alpha.mean((0, 2, 3)))
        (nkv, S), T = v.shape[1:3], y.size(2)
        v = at_least_fp32(v)  # (B, nkv, S, hs)
        total = v[:, :, : S - T].sum(2, keepdim=True) + v[:, :, S - T :].cumsum(2)  # (B, nkv, T, hs)
        n = torch.arange(S - T + 1, S + 1, device=v.device)[:, None]
        mean = (total / n).repeat_interleave(y.size(1) // nkv, 1)  # (B, nh, T, hs)
        return (alpha * y + (self.means[0][:, None, None] - alpha) * mean).to(y.dtype)

    def after_update(self) -> None:
        self.means[0].lerp_(dist.of_last_rank(self.means[1]), 1 - self.MOMENTUM)


register(AffineOptions, Affine)
