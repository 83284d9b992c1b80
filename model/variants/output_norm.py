"""RMS norm of each head's output before the output projection, with a learned gain from 1: the norm of marin 5854."""

from torch import Tensor

from model import ops
from model.ops import at_least_fp32
from model.options import GPTConfig, OutputNormOptions
from model.slots import Output, register


class OutputNorm(Output):
    """gain * y / sqrt(mean(y^2) + eps) over a head's channels."""

    def __init__(self, options: OutputNormOptions, config: GPTConfig, v_dim: int):
        super().__init__(options, config, v_dim)
        self.gain = self.new_parameter(config.model.n_head * v_dim, 1.0) if options.gain else None

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        gain = 1.0 if self.gain is None else self.gain.view(y.size(1), 1, -1)  # (nh, 1, dv)
        return (at_least_fp32(y) * (ops.inverse_rms(y, self.options.eps) * gain)).to(y.dtype)  # (B, nh, T, dv)


register(OutputNormOptions, OutputNorm)
