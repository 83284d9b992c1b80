"""RMS norm of queries and keys times a fixed gain, after RoPE: nanochat's gpt.py, q = norm(q) * 1.2.

RoPE keeps the length of a vector, so that norm(rotate(x)) = rotate(norm(x)): it is computed before RoPE.
"""

from torch import Tensor

from model import ops
from model.options import ScaledRMSNormOptions
from model.slots import QKNorm, register


class ScaledRMSNorm(QKNorm):
    """gain * x / sqrt(mean(x^2) + eps) over each head's channels, with one constant gain."""

    def scale(self, x: Tensor) -> Tensor:
        return self.options.gain * ops.inverse_rms(x, self.options.eps)  # (..., 1)


register(ScaledRMSNormOptions, ScaledRMSNorm)
