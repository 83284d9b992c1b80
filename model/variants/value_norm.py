"""RMS norm of each head's values, without a gain: Gemma 3n's v_norm."""

from torch import Tensor

from model import ops
from model.ops import at_least_fp32
from model.options import ValueNormOptions
from model.slots import Output, register


class ValueNorm(Output):
    """v / sqrt(mean(v^2) + eps) over a head's channels."""

    def transform_values(self, v: Tensor) -> Tensor:
        return (at_least_fp32(v) * ops.inverse_rms(v, self.options.eps)).to(v.dtype)  # (B, nkv, T, hs)


register(ValueNormOptions, ValueNorm)
