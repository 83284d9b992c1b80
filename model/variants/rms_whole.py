"""RMS norm of the whole query and key projections, before they are split into heads: OLMo 2 (arXiv 2501.00656).
With one gain for the layer: marin 5373, full-norm-learnable."""

import torch
from torch import Tensor, nn

from model import ops
from model.options import WholeRMSNormOptions
from model.slots import QKNorm, register


class WholeRMSNorm(QKNorm):
    """gain * x / sqrt(mean(x^2) + eps), the mean over all channels of all heads of a token. A gain of the layer is the
    queries' alone."""

    def __init__(self, options: WholeRMSNormOptions, head_dim: int, n_head: int):
        super().__init__(options, head_dim, n_head)
        self.gain = nn.Parameter(torch.empty(n_head * head_dim if options.gain == "channel" else 1))

    def for_keys(self) -> QKNorm:
        self.gain = self.gain if self.options.gain == "channel" else None
        return self

    def scale(self, x: Tensor) -> Tensor:
        together = x.transpose(-3, -2).flatten(-2)  # (B, nh, T, hs) -> (B, T, nh hs)
        return ops.inverse_rms(together, self.options.eps).unsqueeze(-3)  # (B, 1, T, 1)


register(WholeRMSNormOptions, WholeRMSNorm)
