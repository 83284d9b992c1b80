"""The operators torch.ops.nanoqk of the C++ files: when each can be used, and what its results look like.

Each has a fake implementation, which says the shape of its results to a compiler and to estimates. Those of a
model in training have a derivative, from autograd.cpp, which raises RuntimeError under create_graph=True and in
torch.func. The C++ files check dtypes and shapes and raise RuntimeError. ops.py has the formulas.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from core.device import cpu_flags
from model.kernels import build

MAX_CHANNELS = 2048  # as in kernels.h
LP = (1, 1.5, 2, 2.5, 3, 3.5, 4)  # p of lp_norm
DTYPES = (torch.float32, torch.bfloat16)
SMALL = 2**14  # fewer elements do not repay the call of a kernel for GELU, dropout, a residual norm or a linear layer
HAS_TRITON = importlib.util.find_spec("triton") is not None

nanoqk: Any = torch.ops.nanoqk


def available(x: Tensor) -> bool:
    """Whether there are kernels for x: it lies on a CPU, in fp32 or bf16, and they are compiled (by the first call)."""
    return x.is_cpu and x.dtype in DTYPES and loaded()


def loaded() -> bool:
    """load(), as a plain function: the compiler does not see the mark below on a cached one."""
    return load()


@functools.cache
def load() -> bool:
    if not build.load():
        return False
    for name, result in FAKES.items():
        torch.library.register_fake(f"nanoqk::{name}")(result)
    return True


def attends() -> bool:
    """Whether the CPU has AVX-512 bf16: without it the attention operators have no implementation."""
    return torch._C._dispatch_has_kernel_for_dispatch_key("nanoqk::attention", "CPU")


def has_matrix_units() -> bool:
    return "amx_bf16" in cpu_flags()


# Constants to a compiler, as torch.compiler.assume_constant_result() marks them
for function in (loaded, attends, has_matrix_units):
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]


# -----------------------------------------------------------------------------
# Which operator can be used, by its arguments


def can_use_rms_norm(x: Tensor) -> bool:
    return available(x) and x.ndim <= 4 and 0 < x.size(-1) <= MAX_CHANNELS


def can_use_lp_norm(x: Tensor, p: float | Tensor) -> bool:
    return not isinstance(p, Tensor) and p in LP and can_use_rms_norm(x)


def can_use_absorb(q: Tensor, latent: Tensor) -> bool:
    """Of one token's query and latent."""
    return q.size(0) * q.size(2) == 1 and not torch.is_grad_enabled() and can_use_rms_norm(latent)


def can_use_pointwise(x: Tensor) -> bool:
    """Whether x repays the call of GELU, dropout, a residual norm or a linear layer."""
    return x.numel() >= SMALL and available(x)


def can_use_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> bool:
    """As many queries as keys, in bf16, multiples of 16 channels, a positive scale, on a CPU with AVX-512 bf16."""
    if not q.dtype == k.dtype == v.dtype == torch.bfloat16 or q.size(-1) % 16 or v.size(-1) % 16:
        return False
    return q.size(-2) == k.size(-2) and scale > 0 and available(q) and attends()


def can_use_linear(x: Tensor, weight: Tensor) -> bool:
    """x (..., n_in) in bf16 and weight (n_out, n_in) in fp32, multiples of 16, on a CPU with AVX-512 bf16 but without
    matrix units, which PyTorch's matmuls use."""
    if x.dtype != torch.bfloat16 or weight.dtype != torch.float32 or weight.size(0) % 16 or weight.size(1) % 16:
        return False
    return weight.is_contiguous() and can_use_pointwise(x) and attends() and not has_matrix_units()


def can_use_decoding_linear(x: Tensor, weight: Tensor) -> bool:
    """weight (n_out, n_in) in bf16, and x (..., n_in) of at most 16 rows once x is in bf16, without a derivative."""
    few = weight.dtype == torch.bfloat16 and x.numel() <= 16 * x.size(-1) and x.size(-1) % 32 == 0
    return few and not torch.is_grad_enabled() and weight.is_contiguous() and available(x) and attends()


def can_use_latent_attention(q_latent: Tensor, latent: Tensor, k_rope: Tensor, key_scale: Tensor | None) -> bool:
    """q_latent (B, nh, T, kr): T = 1, all in bf16, kr a multiple of 32, even strides, contiguous heads in key_scale,
    on a CPU with AVX-512 bf16, without a derivative."""
    in_bf16 = all(x is None or x.dtype == torch.bfloat16 for x in (q_latent, latent, k_rope, key_scale))
    if torch.is_grad_enabled() or q_latent.size(2) != 1 or latent.size(-1) % 32 or not in_bf16:
        return False
    if key_scale is not None and key_scale.size(1) > 1 and key_scale.stride(1) != 1:
        return False
    read = [n for x in (latent, k_rope) for n in (x.size(-1), x.storage_offset(), *x.stride()[:-1])]
    return all(n % 2 == 0 for n in read) and available(latent) and attends()


def can_use_triton(q_latent: Tensor, latent: Tensor, k_rope: Tensor, key_scale: Tensor | None) -> bool:
    """Whether mla_decode_triton.py takes these: T = 1, CUDA, 16 bits, powers of two, key_scale's strides as a cache's,
    without a derivative."""
    if not HAS_TRITON or not latent.is_cuda or latent.itemsize != 2 or q_latent.requires_grad:
        return False
    if key_scale is not None and key_scale.stride()[1:3] != (1, key_scale.size(1)):
        return False
    return q_latent.size(2) == 1 and latent.size(-1) in (64, 128, 256, 512) and k_rope.size(-1) in (16, 32, 64, 128)


# -----------------------------------------------------------------------------
# The fake implementations: dtype, shape and strides of the results


def like_vectors(x: Tensor) -> Tensor:
    """As norms.cpp's empty_vectors."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    if x.is_contiguous():
        return x.new_empty_strided(x.shape, x.stride())
    order = sorted(range(x.ndim - 1), key=x.stride, reverse=True)
    return torch.empty_permuted(x.shape, [*order, x.ndim - 1], dtype=x.dtype, device=x.device)


def like_heads(x: Tensor, n: int) -> Tensor:
    """(B, nh, T, n), shaped as x but for n, in the order (B, T, nh, n)."""
    B, nh, T, _ = x.shape
    return x.new_empty(B, T, nh, n).transpose(1, 2)


def like_factor(x: Tensor, factor: Tensor | None) -> Tensor:
    return x.new_empty(0 if factor is None else factor.shape, dtype=torch.float32)


def dense(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def like_scale(x: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)


FAKES: dict[str, Callable[..., Any]] = {
    "rms_norm": lambda x, gain, eps: like_vectors(x),
    "rms_norm_backward": lambda grad, x, gain, eps: (like_vectors(x), like_factor(x, gain)),
    "inverse_rms": lambda x, eps: like_scale(x),
    "lp_norm": lambda x, alpha, p: like_vectors(x),
    "lp_norm_backward": lambda grad, x, alpha, p: (like_vectors(x), like_factor(x, alpha)),
    "inverse_lp_norm": lambda x, p: like_scale(x),
    "absorb": lambda w, q, gain, latent, with_keys: (
        q.new_empty(1, w.size(0), 1, w.size(2)),
        q.new_empty(int(with_keys), w.size(0), 1, w.size(1), dtype=torch.float32),
    ),
    "attention": lambda q, k, v, scale, cap, dropped, seed: (
        like_heads(q, v.size(-1)),
        q.new_empty(2, *q.shape[:3], dtype=torch.float32),
    ),
    "attention_backward": lambda grad, q, k, v, softmax, grad_lse, scale, cap, dropped, seed: tuple(
        like_heads(q, x.size(-1)) for x in (q, k, v)
    ),
    "latent_attention": lambda q_latent, q_rope, latent, k_rope, key_scale, scale, unified: (
        dense(q_latent),
        q_latent.new_empty(q_latent.shape[:3], dtype=torch.float32),
    ),
    "decoding_linear": lambda x, weight: x.new_empty(*x.shape[:-1], weight.size(0)),
    "linear": lambda x, weight: x.new_empty(*x.shape[:-1], weight.size(0)),
    "linear_backward": lambda grad, x, weight: (dense(x), dense(weight)),
    "layer_norm": lambda x, weight, bias, eps, centred, dtype: dense(x, dtype),
    "layer_norm_backward": lambda grad, x, weight, has_bias, eps, centred: (
        dense(x),
        dense(weight),
        weight.new_empty(weight.size(0) if has_bias else 0),
    ),
    "dropout_add": lambda x, y, dropped, seed: dense(x),
    "dropout": lambda x, dropped, seed, dtype: dense(x, dtype),
    "clip_grad_norm_": lambda grads, max_norm: grads[0].new_empty(()),
    "gelu": lambda x: dense(x),
    "gelu_backward": lambda grad, x: dense(x),
}
