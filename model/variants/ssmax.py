"""Scalable softmax (SSMax): softmax(s log(n) logits), n the number of visible keys (arXiv 2501.19399, eq. 4). Other
powers of log(n): arXiv 2605.12697."""

import math

import torch
from torch import Tensor

from model.options import GPTConfig, SSMaxOptions
from model.slots import Logits, register


class SSMax(Logits):
    """s is learned, one number a head. By default s (log n)^power starts at 1 on average, as the plain softmax."""

    def __init__(self, options: SSMaxOptions, config: GPTConfig):
        super().__init__(options, config)
        powers = [math.log(n) ** options.power for n in range(1, config.model.block_size + 1)]
        start = options.s_init or len(powers) / (sum(powers) or 1.0)  # T = 1: log n is 0 for any s
        self.s = self.new_parameter(config.model.n_head, start)

    def scale_queries(self, q: Tensor, pos: int) -> Tensor:
        n = torch.arange(pos + 1, pos + q.size(-2) + 1, device=q.device, dtype=self.s.dtype)
        return (q * self.s[:, None, None] * (n.log() ** self.options.power)[:, None]).to(q.dtype)  # (B, nh, T, hs)


register(SSMaxOptions, SSMax)
