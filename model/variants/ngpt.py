"""nGPT's queries and keys: q = s_qk Norm(q), k = s_qk Norm(k), logits sqrt(hs) q . k (arXiv 2410.01131, eq. 15 and 16).

Of unit vectors times sqrt(hs), which ops.inverse_rms gives, the logits are q . k / sqrt(hs), as for every other norm.
s_qk acts on each channel after RoPE, on both sides: the query takes its square, so that heads may share a key.
"""

from torch import Tensor, nn

from model import ops
from model.options import NGPTNormOptions
from model.slots import QKNorm, register


class NGPTNorm(QKNorm):
    """s_qk^2 * rotate(sqrt(hs) x / |x|) for queries, without s_qk for keys. What is trained is raw = s_qk / SPEED."""

    SPEED = 32.0  # Adam moves s_qk so many times as fast: sqrt(n_embd) of nGPT's own 1024

    def __init__(self, options: NGPTNormOptions, head_dim: int, n_head: int):
        super().__init__(options, head_dim, n_head)
        self.raw: nn.Parameter | None = self.new_parameter(n_head * head_dim, 1 / self.SPEED)

    def scale(self, x: Tensor) -> Tensor:
        return ops.inverse_rms(x, self.options.eps)  # (..., 1)

    def for_keys(self) -> QKNorm:
        self.raw = None
        return self

    def after_rope(self, q: Tensor) -> Tensor:
        assert self.raw is not None
        s_qk = self.SPEED * self.raw.view(self.n_head, 1, self.head_dim)
        return (q * s_qk.square()).to(q.dtype)  # (B, nh, T, hs)


register(NGPTNormOptions, NGPTNorm)
