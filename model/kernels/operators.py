"""The operators torch.ops.nanoqk of the C++ files, as functions.

Each has a fake implementation, which says the shape of its results to a compiler and to estimates. Those of a
model in training have a derivative, from autograd.cpp, which raises RuntimeError under create_graph=True and in
torch.func. The C++ files check dtypes and shapes and raise RuntimeError.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from core.device import cpu_flags
from model.kernels import build

MAX_CHANNELS = 2048  # as in norms.cpp
LP = (1, 1.5, 2, 2.5, 3, 3.5, 4)  # p of lp_norm
DTYPES = (torch.float32, torch.bfloat16)

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


def can_normalize(x: Tensor) -> bool:
    return available(x) and x.ndim <= 4 and 0 < x.size(-1) <= MAX_CHANNELS


def can_attend(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether attention() takes these heads: bf16, on a CPU that multiplies in it, multiples of 16 channels."""
    if not q.dtype == k.dtype == v.dtype == torch.bfloat16 or q.size(-1) % 16 or v.size(-1) % 16:
        return False
    return available(q) and attends()


def attends() -> bool:
    """Whether the CPU has AVX-512 bf16: without it the attention operators have no implementation."""
    return torch._C._dispatch_has_kernel_for_dispatch_key("nanoqk::attention", "CPU")


def can_multiply(x: Tensor, weight: Tensor) -> bool:
    """Whether linear() takes x (..., n_in) in bf16 and weight (n_out, n_in) in fp32, multiples of 16, and is fast."""
    if x.dtype != torch.bfloat16 or weight.dtype != torch.float32 or weight.size(0) % 16 or weight.size(1) % 16:
        return False
    return weight.is_contiguous() and available(x) and multiplies()


def can_decode(x: Tensor, weight: Tensor) -> bool:
    """Whether decoding_linear() takes weight (n_out, n_in), and x (..., n_in) of at most 16 rows once x is in bf16."""
    few = weight.dtype == torch.bfloat16 and x.numel() <= 16 * x.size(-1) and x.size(-1) % 32 == 0
    return few and weight.is_contiguous() and available(x) and attends()


def multiplies() -> bool:
    """Whether the CPU has AVX-512 bf16 but no matrix units, which PyTorch's matmuls use."""
    return attends() and not has_matrix_units()


@functools.cache
def has_matrix_units() -> bool:
    return "amx_bf16" in cpu_flags()


def can_attend_latents(q_latent: Tensor, latent: Tensor, k_rope: Tensor, key_scale: Tensor | None) -> bool:
    """Whether latent_attention() takes q_latent (B, nh, T, kr): T = 1, all in bf16, kr a multiple of 32, even strides,
    key_scale's heads side by side, on a CPU with AVX-512 bf16."""
    in_bf16 = all(x is None or x.dtype == torch.bfloat16 for x in (q_latent, latent, k_rope, key_scale))
    if q_latent.size(2) != 1 or latent.size(-1) % 32 or not in_bf16:
        return False
    if key_scale is not None and key_scale.size(1) > 1 and key_scale.stride(1) != 1:
        return False
    read = [n for x in (latent, k_rope) for n in (x.size(-1), x.storage_offset(), *x.stride()[:-1])]
    return all(n % 2 == 0 for n in read) and available(latent) and attends()


# To a compiler these are constants: torch.compiler.assume_constant_result(), without loading the compiler
for function in (loaded, attends, multiplies):
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]


# -----------------------------------------------------------------------------
# Norms of vectors x (..., n), of at most four dimensions


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """gain * x / sqrt(mean(x^2) + eps), in x's dtype."""
    return nanoqk.rms_norm(x, gain, eps)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps), (..., 1) in fp32, without a derivative."""
    return nanoqk.inverse_rms(x, eps)


def lp_norm(x: Tensor, p: float, alpha: Tensor | None = None) -> Tensor:
    """x / ||x||_p for a p of LP, times alpha: one number, or (nh, 1, 1) for x (B, nh, T, n)."""
    return nanoqk.lp_norm(x, alpha, p)


def inverse_lp_norm(x: Tensor, p: float) -> Tensor:
    """1 / ||x||_p, of a zero vector 0, (..., 1) in fp32, without a derivative."""
    return nanoqk.inverse_lp_norm(x, p)


def absorb(w: Tensor, q: Tensor, gain: Tensor | None, latent: Tensor, with_keys: bool) -> tuple[Tensor, Tensor | None]:
    """One token's queries and keys through an up-projection w (nh, n, rank) in one pass over it, without a derivative:
    queries q (1, nh, 1, n) times gain (n) or (nh, 1, n) -> (1, nh, 1, rank), and with_keys its latent (1, 1, rank) ->
    (1, nh, 1, n) in fp32."""
    q_latent, k = nanoqk.absorb(w, q, gain, latent, with_keys)
    return q_latent, k if with_keys else None


# -----------------------------------------------------------------------------
# Attention


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, dropped: int, seed: Tensor | None) -> Tensor:
    """softmax(scale q k^T) v, causal, for a scale > 0. Probabilities whose random byte is below `dropped` become 0.

    q (B, nh, T, dk), k (B, nkv, T, dk), v (B, nkv, T, dv) -> (B, nh, T, dv), which lies in memory as (B, T, nh, dv).
    """
    return nanoqk.attention(q, k, v, scale, 0.0, dropped, seed)[0]


def attention_and_lse(
    q: Tensor, k: Tensor, v: Tensor, scale: float, cap: float, dropped: int, seed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """attention(), and each query's log-sum-exp of its logits, (B, nh, T) in fp32; of cap tanh(logit / cap) where cap
    is not 0."""
    y, softmax = nanoqk.attention(q, k, v, scale, cap, dropped, seed)
    largest = scale * softmax[0].detach()  # the derivative of the log-sum-exp comes in by softmax[1]
    return y, (largest if cap == 0 else cap * torch.tanh(largest / cap)) + softmax[1]


def latent_attention(
    q_latent: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, key_scale: Tensor | None,
    scale: float, unified: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """latent_attention() of ops.py for one query a head, without a derivative: the output (B, nh, 1, kr) and the
    log-sum-exp (B, nh, 1) in fp32 of q_latent (B, nh, 1, kr), q_rope (B, nh, 1, dr), latent (B, S, kr),
    k_rope (B, S, dr), key_scale (B, nh, S, 1), the heads side by side."""
    return nanoqk.latent_attention(q_latent, q_rope, latent, k_rope, key_scale, scale, unified)


# -----------------------------------------------------------------------------
# Linear layers


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T, (..., n_in) -> (..., n_out), of x in bf16 and W (n_out, n_in) in fp32, which is rounded; its derivative is
    not."""
    return nanoqk.linear(x, weight)


def decoding_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T, (..., n_in) -> (..., n_out), of a few rows in one pass over W, both in bf16, without a derivative."""
    return nanoqk.decoding_linear(x, weight)


# -----------------------------------------------------------------------------
# Between a block's matmuls


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool, dtype: torch.dtype) -> Tensor:
    """weight * (x - mean) / sqrt(var + eps) + bias along the last dimension of x (..., n), fp32 -> (..., n) in `dtype`;
    not centred: weight * x / sqrt(mean(x^2) + eps)."""
    return nanoqk.layer_norm(x, weight, bias, eps, centred, dtype)


def dropout_add(x: Tensor, y: Tensor, dropped: int, seed: Tensor | None) -> Tensor:
    """x + dropout(y) of one shape, x in fp32. Elements whose random byte is below `dropped` become 0."""
    return nanoqk.dropout_add(x, y, dropped, seed)


def dropout(x: Tensor, dropped: int, seed: Tensor) -> Tensor:
    """As in dropout_add(), of x in fp32."""
    return nanoqk.dropout(x, dropped, seed, x.dtype)


def gelu(x: Tensor) -> Tensor:
    """x Phi(x) for x in bf16."""
    return nanoqk.gelu(x)


# -----------------------------------------------------------------------------
# Between backward pass and optimizer


def clip_grad_norm_(grads: list[Tensor], max_norm: float) -> Tensor:
    """The 2-norm of all `grads` together, (), which are scaled to max_norm if it is larger: contiguous, in fp32."""
    return nanoqk.clip_grad_norm_(grads, max_norm)


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
