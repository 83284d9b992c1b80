"""Softpick instead of the softmax: relu(e^l - 1) / (sum |e^l - 1| + eps) of a query's logits l (arXiv 2504.20966).

Weights need not add to 1, and are 0 for keys with l <= 0, so that no token serves as a sink. As in the authors' code
both parts are divided by e^m first, so that eps counts e^m times. Theirs takes m = max l; ours is never below 0, where
e^-m would overflow.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from model import ops
from model.gpt import GroupedQueryAttention
from model.options import SoftpickOptions
from model.slots import register


class SoftpickAttention(GroupedQueryAttention):
    """Multi-head attention with softpick. It holds T x T logits of each head on a GPU."""

    EPS = 1e-6

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        (B, nh, T, _), S = q.shape, k.size(2)
        rows = ops.queries_at_once(B, nh, S, q.device.type)
        with torch.autocast(q.device.type, enabled=False):
            parts = [self.pick(q[:, :, i : i + rows], k, v, scale, S - T + i) for i in range(0, T, rows)]
        return torch.cat(parts, 2).to(q.dtype)

    def pick(self, q: Tensor, k: Tensor, v: Tensor, scale: float, first: int) -> Tensor:
        """The output of queries q (B, nh, T, hs) of the positions from `first` on, (B, nh, T, hs)."""
        k, v = (x[:, :, : first + q.size(2)] for x in (k, v))  # (B, nh, S, hs)
        logits = scale * (ops.at_least_fp32(q) @ ops.at_least_fp32(k).mT)  # (B, nh, T, S)
        att = self.weigh(logits.masked_fill(ops.is_future(q.size(2), k.size(2), q.device), -torch.inf))
        return F.dropout(att, self.p_dropout, self.training).to(v.dtype) @ v

    def weigh(self, logits: Tensor) -> Tensor:
        """The weights by the logits (..., S), which are -inf where a key is not seen."""
        m = logits.detach().amax(-1, keepdim=True).clamp(min=0)  # both parts are divided by e^m, against overflow
        risen = ((logits - m).exp() - (-m).exp()).masked_fill(logits.isneginf(), 0)
        return risen.relu() / (risen.abs().sum(-1, keepdim=True) + self.EPS)


register(SoftpickOptions, SoftpickAttention)
