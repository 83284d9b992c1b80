"""Exclusive self attention (XSA): y - (y . u) u, u = v / |v| of the token's own value (arXiv 2603.09078)."""

from torch import Tensor
from torch.nn import functional as F

from model.ops import at_least_fp32
from model.options import XSAOptions
from model.slots import Output, register


class XSA(Output):
    takes_values = True

    def forward(self, y: Tensor, x: Tensor, v: Tensor) -> Tensor:  # type: ignore[override]
        u = F.normalize(at_least_fp32(v[:, :, -y.size(2) :]), dim=-1)  # (B, nkv, T, hs)
        u = u.repeat_interleave(y.size(1) // u.size(1), 1)  # (B, nh, T, hs)
        z = at_least_fp32(y)
        return (z - (z * u).sum(-1, keepdim=True) * u).to(y.dtype)


register(XSAOptions, XSA)
