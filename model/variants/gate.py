"""A gate after the softmax: output * sigmoid(W x), a number for each head or each channel (Qwen, arXiv 2505.06708,
position G1). x is what queries, keys and values are projected from."""

import torch
from torch import Tensor

from model.linear import Linear
from model.options import GateOptions, GPTConfig
from model.slots import Output, register


class Gate(Output):
    def __init__(self, options: GateOptions, config: GPTConfig, v_dim: int):
        super().__init__(options, config, v_dim)
        self.n_head = config.model.n_head
        rows = self.n_head * (1 if options.per == "head" else v_dim)
        self.w = Linear(config.model.n_embd, rows, bias=False)

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.w(x)).unflatten(-1, (self.n_head, -1)).transpose(1, 2)  # (B, nh, T, 1 or dv)
        return y * gate.to(y.dtype)


register(GateOptions, Gate)
