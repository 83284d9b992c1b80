"""RMS norm of each head's values: Gemma 3n's v_norm, without a gain; with a learned one HybridNorm (arXiv 2503.04598),
whose gain starts at 1. Ours starts at the size that values have without a norm, as RMS 1 is several times that."""

import math
from typing import Any

from torch import Tensor

from model import ops
from model.gpt import INIT_STD
from model.ops import at_least_fp32
from model.options import GPTConfig, ValueNormOptions
from model.slots import Output, register


class ValueNorm(Output):
    """gain * v / sqrt(mean(v^2) + eps) over a head's channels."""

    def __init__(self, options: ValueNormOptions, config: GPTConfig, v_dim: int):
        super().__init__(options, config, v_dim)
        untouched = INIT_STD * math.sqrt(config.model.n_embd)  # of the projection of a normalised x
        size = untouched if isinstance(options.gain, str) else options.gain or 1.0
        n = {"learned": v_dim, "learned_head": getattr(config.attention, "n_kv_head", config.model.n_head)}
        self.gain: Any = self.new_parameter(n[options.gain], size) if options.gain in n else size

    def transform_values(self, v: Tensor) -> Tensor:
        gain = self.gain[:, None, None] if self.options.gain == "learned_head" else self.gain
        return (at_least_fp32(v) * (ops.inverse_rms(v, self.options.eps) * gain)).to(v.dtype)  # (B, nkv, T, hs)


register(ValueNormOptions, ValueNorm)
