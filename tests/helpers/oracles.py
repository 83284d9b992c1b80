"""Inputs of kernels and their references: by the definition, in float64."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from core.device import cpu_flags
from model.kernels import operators as kernels
from model.options import LpNormOptions, QKNormOptions


@contextmanager
def operations_alone() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "loaded", lambda: False)
        yield


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def leaves(*tensors: Tensor) -> Any:
    """The same values, of which derivatives are taken."""
    return [x.detach().requires_grad_() for x in tensors]


def splitmix(seed: int, words: int) -> np.ndarray:
    """The generator as it is published, a loop over its state: (8 words,) bytes."""
    state, mask, drawn = seed % 2**64, 2**64 - 1, []
    for _ in range(words):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        drawn.append(z ^ (z >> 31))
    return np.array(drawn, dtype="<u8").view(np.uint8)


def norm_by_hand(x: Tensor, config: QKNormOptions, of_norm: dict[str, Tensor], head: int) -> Tensor:
    """The QK norm of a head's queries or keys, (..., d), by its definition. of_norm: the parameters of its module."""
    if isinstance(config, LpNormOptions):
        raw = of_norm.get("raw_p")
        p: Any = config.p if raw is None else 1 + raw[head % len(raw)].exp().log1p()
        size = x.abs().amax(-1, True) if p == math.inf else (x.abs() ** p).sum(-1, True) ** (1 / p)
        return x / size
    if config.name == "none":
        return x
    x = x - x.mean(-1, True) if config.name == "layernorm" else x
    return x / (x.square().mean(-1, True) + 1e-6).sqrt() * of_norm["gain"]


needs_bf16 = pytest.mark.skipif(
    "avx512_bf16" not in cpu_flags(), reason="attention is compiled for AVX-512 bf16; elsewhere the reference serves"
)


def heads(B: int, n: int, T: int, d: int, seed: int, pad: int = 0) -> Tensor:
    """(B, n, T, d) in bf16 as projections leave it: heads side by side, other channels between them."""
    x = draw(B, T, n * d + pad, seed=seed).bfloat16()[..., pad:]
    return x.unflatten(-1, (n, d)).transpose(1, 2)


def causal_logits(q: Tensor, k: Tensor, scale: float, cap: float | None = None) -> Tensor:
    """(B, nh, T, T): scale q k^T, bent by cap tanh(x / cap), with -inf where a query would see a later key."""
    logits = q @ k.repeat_interleave(q.size(1) // k.size(1), 1).mT * scale
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    return logits.masked_fill(torch.ones(q.size(2), q.size(2), dtype=torch.bool).triu(1), -torch.inf)


def attention_reference(qkv: Sequence[Tensor], scale: float, factor: Tensor | float = 1.0) -> Tensor:
    """By the definition; `factor` is what dropout multiplies the probabilities by."""
    q, k, v = qkv
    return (causal_logits(q, k, scale).softmax(-1) * factor) @ v.repeat_interleave(q.size(1) // k.size(1), 1)
