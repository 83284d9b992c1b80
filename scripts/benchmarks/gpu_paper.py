"""Part `paper` of scripts/check_gpu.py: what an update launches, reads and computes, without a GPU.

Counted on PyTorch's meta device in bf16, with attention as one operator that keeps q, k, v and its output, as
FlashAttention does. torch.compile fuses most operators between matmuls, so the counts are those of compile=false.
"""

from collections import Counter
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from model import ops
from model.gpt import GPT
from scripts.benchmarks.gpu_part import CheckOptions, Row, Rows, rows_of
from sweeps.plan import compose
from training.config import load_config

MODELS = {"baby_gpt": 65, "mla_400m": 50304}  # vocabularies
CARDS = {"H100": (989e12, 3.35e12), "H200": (989e12, 4.8e12)}  # bf16 FLOP/s and bytes/s of the data sheets
BATCH = {"baby_gpt": 64, "mla_400m": 8}  # windows of a micro-batch
# Bytes a parameter of an update in bf16: cast 4 + 2; read forwards and backwards 2 + 2; gradient written in bf16, cast
# and written in fp32 2 + 2 + 4; norm and clipping 4 + 8; AdamW reads four numbers and writes three 16 + 12
BYTES_OF_PARAMETER = 58
MATMULS = ("mm", "bmm", "addmm", "baddbmm")
NO_KERNEL = {"_unsafe_view", "detach", "empty", "empty_like", "new_empty", "promote_types"}


class Attention(torch.autograd.Function):
    """The shapes of causal attention, and what its derivative needs."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = q.new_zeros(*q.shape[:3], v.size(-1))  # counts as a kernel
        ctx.save_for_backward(q, k, v, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return tuple(x.new_zeros(x.shape) for x in ctx.saved_tensors[:3])


class Operators(TorchDispatchMode):
    """Counts operators that launch a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, aliases = func.__name__.split(".")[0], [one.alias_info for one in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        self.counts[name] += not is_view and name not in NO_KERNEL
        return func(*args, **(kwargs or {}))


def paper(asked: CheckOptions, overrides: list[str]) -> Rows:
    """On paper: operators, FLOPs and bytes of an update in bf16, and the least time of each on an H100 and an H200."""
    return rows_of(paper_row, {model: (model, overrides) for model in MODELS})


def paper_row(name: str, overrides: list[str]) -> Row:
    config = load_config(compose([f"model={name}", f"batch_size={BATCH[name]}", *overrides]))
    with torch.device("meta"):
        model = GPT(config.gpt, MODELS[name])
    n, flops = model.num_params(), model.flops_per_token() * config.tokens_per_iter
    forward, backward, saved = count(model.bfloat16(), config.batch_size)
    row: Row = {
        "tokens": config.tokens_per_iter, "operators forwards": forward.total(), "backwards": backward.total(),
        "matmuls": sum((forward + backward)[one] for one in MATMULS), "TFLOP": flops / 1e12,
        "GB of weights": BYTES_OF_PARAMETER * n / 1e9, "GB of activations": 2 * saved / 1e9,
    }  # fmt: skip
    for card, (peak, bandwidth) in CARDS.items():
        moved = 1e9 * (row["GB of weights"] + row["GB of activations"])
        row |= {f"{card}: FLOPs, ms": 1000 * flops / peak, f"{card}: bytes, ms": 1000 * moved / bandwidth}
    return row


def count(model: GPT, batch_size: int) -> tuple[Counter[str], Counter[str], int]:
    """Operators of the forward and the backward pass, and the bytes that one keeps for the other."""
    kept: dict[int, Tensor] = {}
    own = {id(parameter) for parameter in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        if id(tensor) not in own:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, p_dropout: float = 0.0) -> Tensor:
        return Attention.apply(q, k, v)

    stubs: Any = {  # the meta device knows no autocast
        "causal_attention": attend, "matmul_dtype": lambda x: x.dtype,
    }  # fmt: skip
    idx = torch.zeros(batch_size, model.block_size, dtype=torch.int64, device="meta")
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    no_autocast = mock.patch.object(torch, "autocast", lambda *_, **__: nullcontext())
    with mock.patch.multiple(ops, **stubs), no_autocast, Operators() as forward, hooks:
        loss = model.train()(idx, idx)[1]
    saved = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    with no_autocast, Operators() as backward:
        loss.backward()
    return forward.counts, backward.counts, saved
