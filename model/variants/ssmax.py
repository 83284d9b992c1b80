"""Scalable softmax (SSMax): softmax(s log(n) logits), n the number of visible keys (arXiv 2501.19399, eq. 4)."""

import math

import torch
from torch import Tensor, nn

from model.options import GPTConfig, SSMaxOptions
from model.slots import Logits, register


class SSMax(Logits):
    """s is learned, one number a head. By default it starts where s log n is 1 on average: as the plain softmax."""

    def __init__(self, options: SSMaxOptions, config: GPTConfig):
        super().__init__(options, config)
        self.s = nn.Parameter(torch.empty(config.model.n_head))
        mean_log = math.lgamma(config.model.block_size + 1) / config.model.block_size  # log(T!) / T
        self.initial = options.s_init or 1 / (mean_log or 1.0)  # T = 1: log n is 0 for any s

    def init_weights(self) -> None:
        nn.init.constant_(self.s, self.initial)

    def scale_queries(self, q: Tensor, pos: int) -> Tensor:
        n = torch.arange(pos + 1, pos + q.size(-2) + 1, device=q.device, dtype=self.s.dtype)
        return (q * self.s[:, None, None] * n.log()[:, None]).to(q.dtype)  # (B, nh, T, hs)


register(SSMaxOptions, SSMax)
