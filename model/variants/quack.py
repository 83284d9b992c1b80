"""QuacK: in every update the learning rate of W_q is multiplied by tau |W_k at the start| / |W_k|, and that of W_k by
tau |W_q at the start| / |W_q|, for each head, in Frobenius norms (arXiv 2511.21377, algorithms 1 and 2).

A change of the logits is then bounded whatever the size of the weights. Where heads share a key, its rate follows the
largest of their query norms, as the rates of MLA's shared matrices do in algorithm 2. A bias has the rate of its row.
"""

from typing import Any

import torch
from torch import Tensor, nn

from core.schema import require
from model.options import QuackOptions
from model.slots import Weights, register


def norms(w: Tensor, heads: int) -> Tensor:
    """The Frobenius norm of each head's rows of w (heads * rows, columns), (heads,)."""
    return torch.linalg.vector_norm(w.unflatten(0, (heads, -1)), dim=(1, 2))


class Quack(Weights):
    """`start`: 1 / rate_factors() at the start. No trained weight, but a checkpoint must hold it."""

    def __init__(self, options: QuackOptions, block: Any):
        super().__init__(options, block)
        known = hasattr(block.attn, "c_attn") or hasattr(block.attn, "c_kv_b")
        require(known, f"weights=quack: {type(block.attn).__name__} has neither c_attn nor c_kv_b")
        self.attn = (block.attn,)  # a tuple: no submodule
        count = sum(len(factors) for _, factors in self.rate_factors())
        self.start = nn.Parameter(torch.empty(count), requires_grad=False)

    def init_weights(self) -> None:
        self.start.copy_(torch.cat([1 / factors for _, factors in self.rate_factors()]))

    @torch.no_grad()
    def restart(self) -> None:
        self.init_weights()

    def update_factors(self) -> list[tuple[Tensor, Tensor]]:
        current, found = self.rate_factors(), []
        starts = self.start.split([len(factors) for _, factors in current])
        for (rows, factors), start in zip(current, starts, strict=True):
            relative = self.options.tau * start * factors  # 1 each at the start, times tau
            found.append((rows, relative.repeat_interleave(len(rows) // len(factors))[:, None]))
        c_attn = getattr(self.attn[0], "c_attn", None)
        if c_attn is not None and c_attn.bias is not None:
            biases = c_attn.bias.detach().split(c_attn.split_sizes)[:2]  # of queries and keys
            found += [(bias, factor[:, 0]) for bias, (_, factor) in zip(biases, found, strict=True)]
        return found

    @torch.no_grad()
    def rate_factors(self) -> list[tuple[Tensor, Tensor]]:
        """Rows of a weight (a view), and what their learning rate is proportional to, (n,): a number a head, or one."""
        attn: Any = self.attn[0]
        if hasattr(attn, "c_kv_b"):
            return self.mla_rate_factors(attn)
        q, k, _ = attn.c_attn.weight.detach().split(attn.c_attn.split_sizes)
        of_q, of_k = norms(q, attn.n_head), norms(k, attn.n_kv_head)
        group = attn.n_head // attn.n_kv_head
        return [(q, 1 / of_k.repeat_interleave(group)), (k, 1 / of_q.view(-1, group).amax(1))]

    def mla_rate_factors(self, attn: Any) -> list[tuple[Tensor, Tensor]]:
        """Algorithm 2. Without a query rank there is no W_dq: its norm counts as 1. A query's content and RoPE rows lie
        side by side, so that each is listed for each head."""
        nh = attn.n_head
        heads = attn.c_q.weight.detach().unflatten(0, (nh, -1))  # (nh, dn + dr, in)
        uq, qr = heads[:, : attn.nope_dim], heads[:, attn.nope_dim :]
        dkv, kr = attn.c_kv_a.weight.detach().split(attn.c_kv_a.split_sizes)
        uk, _ = attn.c_kv_b.weight.detach().split(attn.c_kv_b.split_sizes)
        of_uq, of_qr = (torch.linalg.vector_norm(part, dim=(1, 2)) for part in (uq, qr))
        of_uk, (of_dkv, of_kr) = norms(uk, nh), (torch.linalg.vector_norm(part) for part in (dkv, kr))
        dq = attn.c_q_a.weight.detach() if isinstance(attn.c_q_a, nn.Linear) else None
        of_dq = torch.ones(()) if dq is None else torch.linalg.vector_norm(dq)
        content, rotated = of_uq * of_uk * of_dkv, of_qr * of_kr  # of each head, without W_dq
        found = [(uk, 1 / (of_uq * of_dq * of_dkv)), (dkv, 1 / (of_uq * of_dq * of_uk).amax()[None])]
        found += [(kr, 1 / (of_qr * of_dq).amax()[None])]
        found += [(uq[h], (1 / (of_dq * of_uk[h] * of_dkv))[None]) for h in range(nh)]
        found += [(qr[h], (1 / (of_dq * of_kr))[None]) for h in range(nh)]
        if dq is not None:
            found += [(dq, (1 / torch.maximum(content.amax(), rotated.amax()))[None])]
        return found


register(QuackOptions, Quack)
