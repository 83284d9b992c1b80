"""Affine-scaled attention: (alpha(x) softmax + beta(x)) v, with alpha = clip(0.1 W x + 0.5) to 0 .. 1 and beta =
(alpha_ma - alpha) / n, n visible keys; alpha_ma is a moving average of alpha's mean over a batch, from 0 (arXiv
2602.23057, eq. 6-9, 11).

Here alpha_ma is that of the updates before, so that no token moves an earlier one. A batch is the last windows of an
update that go through the model together.
"""

import torch
from torch import Tensor

from core import dist
from model.linear import Linear
from model.ops import at_least_fp32
from model.options import AffineOptions, GPTConfig
from model.slots import Output, register


class Affine(Output):
    """`average` is alpha_ma, `batch` alpha's mean over the last batch: not trained, but a checkpoint must hold them."""

    takes_values = True
    MOMENTUM = 0.9  # rho

    def __init__(self, options: AffineOptions, config: GPTConfig, v_dim: int):
        super().__init__(options, config, v_dim)
        self.w = Linear(config.model.n_embd, config.model.n_head, bias=False)
        self.average = self.new_parameter(config.model.n_head, 0.0).requires_grad_(False)
        self.batch = self.new_parameter(config.model.n_head, 0.0).requires_grad_(False)

    def forward(self, y: Tensor, x: Tensor, v: Tensor) -> Tensor:  # type: ignore[override]
        alpha = (0.1 * at_least_fp32(self.w(x)) + 0.5).clamp(0, 1).mT[..., None]  # (B, nh, T, 1)
        if self.training:
            with torch.no_grad():
                self.batch.copy_(alpha.mean((0, 2, 3)))
        (nkv, S), T = v.shape[1:3], y.size(2)
        v = at_least_fp32(v)  # (B, nkv, S, hs)
        total = v[:, :, : S - T].sum(2, keepdim=True) + v[:, :, S - T :].cumsum(2)  # (B, nkv, T, hs)
        n = torch.arange(S - T + 1, S + 1, device=v.device)[:, None]
        mean = (total / n).repeat_interleave(y.size(1) // nkv, 1)  # (B, nh, T, hs)
        return (alpha * y + (self.average[:, None, None] - alpha) * mean).to(y.dtype)

    def after_update(self) -> None:
        self.average.lerp_(dist.of_last_rank(self.batch), 1 - self.MOMENTUM)


register(AffineOptions, Affine)
