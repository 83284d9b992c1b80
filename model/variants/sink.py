"""An attention sink: exp(l_j) / (exp(sink) + sum exp(l)). gpt-oss learns it for each head (arXiv 2508.10925). With
sink = 0 this is the off-by-one softmax (E. Miller, Attention Is Off By One, 2023).

The plain softmax divides by exp(lse), so that the output is the plain one times sigmoid(lse - sink).
"""

import torch
from torch import Tensor

from model.options import GPTConfig, SinkOptions
from model.slots import Softmax, register


class Sink(Softmax):
    def __init__(self, options: SinkOptions, config: GPTConfig):
        super().__init__(options, config)
        self.logit = self.new_parameter(config.model.n_head, 0.0) if options.logit == "learned" else None

    def forward(self, y: Tensor, lse: Tensor) -> Tensor:
        sink = self.options.logit if self.logit is None else self.logit[:, None]  # (nh, 1)
        return (y * torch.sigmoid(lse - sink)[..., None]).to(y.dtype)  # (B, nh, T, dv)


register(SinkOptions, Sink)
