"""Differential attention: (softmax(q1 k1) - lambda softmax(q2 k2)) v for each pair of heads, whose values are joined (arXiv
2410.05258, eq. 1 to 3). Then RMSNorm of the pair's output with a gain that the layer's pairs share, times 1 - lambda_init.

lambda = exp(lq1 . lk1) - exp(lq2 . lk2) + lambda_init, four learned vectors a layer. Here lambda_init is the same in every
layer, as in one of the paper's ablations, and not 0.8 - 0.6 exp(-0.3 (l - 1)); the vectors start at 0.1, theirs from N(0, 0.1).
"""

from typing import Annotated

import torch
from torch import Tensor, nn

from core.schema import Between, Help, options, require
from model.gpt import GroupedQueryAttention
from model.ops import at_least_fp32
from model.options import GPTConfig, MHAOptions
from model.slots import LateInit, register


@options
class DiffOptions(MHAOptions):
    """Differential attention: (softmax - lambda softmax') v for each pair of heads, then RMSNorm (arXiv 2410.05258)"""

    name: str = "diff"
    lambda_init: Annotated[float, Between(0, 1), Help("where lambda starts, in every layer")] = 0.8

    def check_fit(self, config):
        super().check_fit(config)
        require(config.model.n_head % 2 == 0, "attention=diff needs an even model.n_head: it pairs the heads")


class Difference(LateInit):
    """The learned numbers of a layer."""

    EPS = 1e-5

    def __init__(self, head_dim: int, lambda_init: float):
        super().__init__()
        self.lambda_init = lambda_init
        self.lq1, self.lk1, self.lq2, self.lk2 = (nn.Parameter(torch.empty(head_dim)) for _ in range(4))
        self.gain = nn.Parameter(torch.empty(2 * head_dim))

    def init_weights(self) -> None:
        for vector in (self.lq1, self.lk1, self.lq2, self.lk2):
            nn.init.constant_(vector, 0.1)
        nn.init.ones_(self.gain)

    def forward(self, one: Tensor, two: Tensor) -> Tensor:  # (B, nh / 2, T, 2 hs) both
        factor = (self.lq1 * self.lk1).sum().exp() - (self.lq2 * self.lk2).sum().exp() + self.lambda_init
        y = at_least_fp32(one) - factor * at_least_fp32(two)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.EPS)
        return (1 - self.lambda_init) * self.gain * y


class DifferentialAttention(GroupedQueryAttention):
    def __init__(self, config: GPTConfig):
        super().__init__(config)
        self.difference = Difference(self.head_dim, config.attention.lambda_init)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:  # (B, nh, T, hs), k and v (B, nh, S, hs)
        joined = torch.cat([v[:, 0::2], v[:, 1::2]], -1)  # (B, nh / 2, S, 2 hs)
        one, two = (super(DifferentialAttention, self).attend(q[:, i::2], k[:, i::2], joined, scale) for i in (0, 1))
        y = self.difference(one, two).to(q.dtype)
        return torch.stack(y.chunk(2, -1), 2).flatten(1, 2)  # (B, nh, T, hs)


register(DiffOptions, DifferentialAttention)
