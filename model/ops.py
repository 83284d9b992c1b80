"""The operations of the GPT: each with its formula, a reference in PyTorch's operations, and the choice of a kernel.

A kernel computes what the reference does, in fp32 inside, with the same random numbers. CXX=none turns those of a CPU
off. An operation is differentiable unless it says otherwise, with a kernel once: create_graph=True raises.

Shapes: B batch, T positions, S keys, C = n_embd, nh heads, nkv key and value heads, hs channels a head, V vocabulary;
dk of a query or key, dv of a value; in MLA kr channels of a latent, dn of a head's content, dr of the rotated key.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from model.kernels import operators as kernels
from model.kernels.operators import nanoqk

QUERIES = 64  # that attention takes at a time on a CPU; attention.cpp's ROWS
TINY = 1e-30  # a vector with max|x| <= TINY is a zero vector to the Lp norms


def at_least_fp32(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def matmul_dtype(x: Tensor) -> torch.dtype:
    """The dtype to which autocast casts the operands of a matmul with x."""
    device = x.device.type
    autocast = device != "meta" and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if autocast else x.dtype


# -----------------------------------------------------------------------------
# RMS norm and LayerNorm


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """gain * x / sqrt(mean(x^2) + eps) along the last dimension, (..., n) -> (..., n)."""
    if kernels.can_use_rms_norm(x):
        return nanoqk.rms_norm(x, gain, eps)
    y = at_least_fp32(x)
    return (y * inverse_rms_reference(y, eps) * gain).to(x.dtype)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps), (..., n) -> (..., 1), in fp32 at least: 0 above ||x||_2 = 1.8e19, as x^2 overflows."""
    if kernels.can_use_rms_norm(x) and not torch.is_grad_enabled():
        return nanoqk.inverse_rms(x, eps)
    return inverse_rms_reference(x, eps)


def inverse_rms_reference(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(at_least_fp32(x).square().mean(-1, keepdim=True) + eps)


def residual_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool = True) -> Tensor:
    """LayerNorm of the residual stream, or RMSNorm where not `centred`, (..., C) -> (..., C). Unlike rms_norm(), its
    kernel rounds the result to the dtype of the next matmul."""
    dtype = matmul_dtype(x)
    if x.dtype == weight.dtype == torch.float32 and dtype in kernels.DTYPES and kernels.can_use_pointwise(x):
        return nanoqk.layer_norm(x, weight, bias, eps, centred, dtype)
    if centred:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return F.rms_norm(x, x.shape[-1:], weight, eps)


# -----------------------------------------------------------------------------
# Lp norm (Lp QK-norm, eq. 12-14)


def lp_norm(x: Tensor, p: float | Tensor, alpha: Tensor | None = None) -> Tensor:
    """x / ||x||_p along the last dimension, (..., hs) -> (..., hs), times alpha (nh or 1, 1, 1); p >= 1, inf included,
    is a number or a tensor, () or (nh, 1, 1). A zero vector maps to zero, with zero gradient."""
    if kernels.can_use_lp_norm(x, p):
        return nanoqk.lp_norm(x, alpha, p)
    u, _ = scale_by_absmax(at_least_fp32(x))
    y = u * inverse_norm_of_scaled(u, p)
    return (y if alpha is None else y * alpha).to(x.dtype)


def inverse_lp_norm(x: Tensor, p: float | Tensor) -> Tensor:
    """1 / ||x||_p, of a zero vector 0, (..., hs) -> (..., 1), in fp32 at least."""
    if kernels.can_use_lp_norm(x, p) and not torch.is_grad_enabled():
        return nanoqk.inverse_lp_norm(x, p)
    u, largest = scale_by_absmax(at_least_fp32(x))
    return inverse_norm_of_scaled(u, p) / largest


def as_data(number: float, tensor: Tensor | None) -> float | Tensor:
    """`number`, but in compiled code `tensor`, if there is one: one graph is then right for every number."""
    return number if tensor is None or not torch.compiler.is_compiling() else tensor


def scale_by_absmax(x: Tensor) -> tuple[Tensor, Tensor]:
    """x / max|x| and max|x|, of a zero vector 0 and inf: then no power overflows. max|x| is a constant to autograd, as
    no norm depends on it."""
    largest = x.detach().abs().amax(-1, keepdim=True)  # (..., 1)
    largest = F.threshold(largest, TINY, math.inf)
    return x / largest, largest


def inverse_norm_of_scaled(u: Tensor, p: float | Tensor) -> Tensor:
    """1 / ||u||_p, (..., hs) -> (..., 1), for u with max|u| = 1; 1 for a zero vector.

    |u|^p is exp(p log|u|), with a finite derivative at zeros; torch's pow with a tensor as exponent rounds the end of a
    row differently from the rest.
    """
    if not isinstance(p, Tensor) and math.isinf(p):
        return 1 / u.abs().amax(-1, keepdim=True).clamp(min=1)  # 1; ties share the derivative
    log = u.abs().clamp(min=torch.finfo(u.dtype).tiny).log()
    total = torch.exp(p * log).sum(-1, keepdim=True)  # >= 1, but for zero vectors
    return torch.exp(-torch.log(total.clamp(min=1)) / p)


# -----------------------------------------------------------------------------
# GELU and dropout


def gelu(x: Tensor) -> Tensor:
    """x Phi(x) with the normal distribution Phi."""
    if x.dtype == torch.bfloat16 and kernels.can_use_pointwise(x):
        return nanoqk.gelu(x)
    return F.gelu(x)


def dropout(x: Tensor, p: float) -> Tensor:
    """Zero each element with probability p and scale the rest by 1 / (1 - p). On a CPU, where F.dropout draws its mask
    serially, a byte of random_bytes() decides for each element, and p is rounded to one of 1/256 .. 255/256."""
    if p == 0 or not x.is_cpu:
        return F.dropout(x, p)
    seed, dropped = draw_seed(), out_of_256(p)
    if x.dtype == torch.float32 and kernels.can_use_pointwise(x):
        return nanoqk.dropout(x, dropped, seed, x.dtype)
    drawn = random_bytes(seed, (x.numel() + 7) // 8)[: x.numel()].view(x.shape)
    return ApplyMask.apply(x, *dropout_mask(drawn, dropped, x.dtype))


def dropout_add(x: Tensor, y: Tensor, p: float) -> Tensor:
    """x + dropout(y, p), of one shape."""
    if x.dtype == torch.float32 and kernels.available(y) and kernels.can_use_pointwise(x):
        return nanoqk.dropout_add(x, y, *draw_dropout(p))
    return x + dropout(y, p)


def out_of_256(p: float) -> int:
    """How many of the 256 values of a byte drop an element."""
    return min(max(round(256 * p), 1), 255) if p else 0


def draw_dropout(p: float) -> tuple[int, Tensor | None]:
    """out_of_256(p), and a seed; without dropout 0 and None."""
    return out_of_256(p), draw_seed() if p else None


def draw_seed() -> Tensor:
    """64 bits of the CPU's generator, () in int64: a mask's seed. randint adds info.min to the bits; ^ removes it."""
    info = torch.iinfo(torch.int64)
    return torch.randint(info.min, info.max, (), dtype=torch.int64, device="cpu") ^ info.min


def random_bytes(seed: int | Tensor, words: int, first: Tensor | None = None) -> Tensor:
    """Bytes of the words first .. first + words - 1, first (...) or 0, of SplitMix64 (Steele et al. 2014) from `seed`:
    (..., 8 words). Integers wrap around, and what a shift to the right brings in on the left is masked away."""
    z = torch.arange(1, words + 1, device="cpu")
    z = (z if first is None else z + first[..., None]) * (0x9E3779B97F4A7C15 - 2**64) + seed
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ (z >> shift & 2 ** (64 - shift) - 1)) * (factor - 2**64)
    return (z ^ (z >> 31 & 2**33 - 1)).view(torch.uint8)


def bytes_of_logits(seed: Tensor, heads: Sequence[int], T: int, first: int, seen: int) -> Tensor:
    """The random bytes of the logits of a block of queries from `first` on, (*heads, queries, seen). As in
    attention.cpp each of the T queries has those of whole blocks of 64 keys."""
    rows = min(QUERIES, T - first)
    query = torch.arange(math.prod(heads))[:, None] * T + torch.arange(first, first + rows)  # (heads, queries)
    return random_bytes(seed, (seen + 7) // 8, (T + 63) // 64 * 8 * query)[..., :seen].view(*heads, rows, seen)


def dropout_mask(drawn: Tensor, dropped: int, dtype: torch.dtype) -> tuple[Tensor, float]:
    """What random bytes keep, ones and zeros in `dtype`, and the scale of what is kept."""
    return torch.ge(drawn, dropped, out=drawn.new_empty(drawn.shape, dtype=dtype)), 256 / (256 - dropped)


def apply_mask(x: Tensor, keep: Tensor | None, scale: float) -> Tensor:
    """x * keep * scale in one pass; `keep` in x's dtype, as one in bool would be converted at every use."""
    return x if keep is None else torch.addcmul(x.new_zeros(()), x, keep, value=scale)


class ApplyMask(torch.autograd.Function):
    """x * keep * scale, forwards and backwards: autograd's derivative would round the scale to bf16 first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(keep)
        ctx.scale = scale
        return apply_mask(x, keep, scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (keep,) = ctx.saved_tensors
        return apply_mask(grad, keep, ctx.scale), None, None


# -----------------------------------------------------------------------------
# Causal attention


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, p_dropout: float = 0.0) -> Tensor:
    """softmax(scale q k^T) v, where query i of the T last positions sees keys 0 .. S - T + i.

    q (B, nh, T, dk), k (B, nkv, S, dk), v (B, nkv, S, dv) -> (B, nh, T, dv); head h has key head h // (nh / nkv).
    """
    if q.dtype != k.dtype:  # the cache has another dtype. Cast the few queries: autocast would cast the whole cache
        with torch.autocast(q.device.type, enabled=False):
            return causal_attention(q.to(k.dtype), k, v, scale, p_dropout).to(q.dtype)
    T, S, group = q.size(-2), k.size(-2), q.size(1) // k.size(1)
    if kernels.can_use_attention(q, k, v, scale):
        return nanoqk.attention(q, k, v, scale, 0.0, *draw_dropout(p_dropout))[0]
    # torch.compile has kernels for SDPA, and cannot trace the flag of oneDNN that BlockedAttention sets
    on_cpu = q.is_cpu and not torch.compiler.is_compiling()
    if on_cpu and T == S and (p_dropout > 0 or (torch.is_grad_enabled() and T <= BlockedAttention.POSITIONS)):
        k, v = (x.repeat_interleave(group, 1) if group > 1 else x for x in (k, v))
        return BlockedAttention.apply(q, k, v, scale, *draw_dropout(p_dropout))
    if T == S and group > 1 and q.is_cuda and q.dtype == torch.float32:
        # SDPA's kernel for fp32 takes no groups, and without it T x T would be held
        k, v, group = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), 1
    asked: dict[str, Any] = {"dropout_p": p_dropout, "scale": scale, "enable_gqa": group > 1}
    if T == S > 1:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, **asked)
    mask = None if T == 1 else ~is_future(T, S, q.device)  # one query is the last, and sees every key
    return F.scaled_dot_product_attention(q, k, v, mask, **asked)


def is_future(T: int, S: int, device: torch.device) -> Tensor:
    """Whether key j lies after query i, bool (T, S). The queries are the last T of S positions."""
    return torch.ones(T, S, dtype=torch.bool, device=device).triu(S - T + 1)


Bend = Callable[[Tensor], Tensor]  # an increasing elementwise function of logits in fp32 at least


@dataclass(frozen=True)
class Softcap:
    """cap tanh(x / cap) (Gemma 2): a Bend that a kernel knows."""

    cap: float

    def __call__(self, x: Tensor) -> Tensor:
        return self.cap * torch.tanh(x / self.cap)


def attention_and_lse(
    q: Tensor, k: Tensor, v: Tensor, scale: float, p_dropout: float = 0.0, bend: Bend | None = None
) -> tuple[Tensor, Tensor]:
    """causal_attention() of logits bend(scale q k^T), and each query's log-sum-exp, (B, nh, T), in fp32 at least."""
    cap = bend.cap if isinstance(bend, Softcap) else 0.0
    known = bend is None or 0 < cap <= 1e4  # the kernel's tanh is good to 6e-8 cap
    if known and kernels.can_use_attention(q, k, v, scale):
        y, softmax = nanoqk.attention(q, k, v, scale, cap, *draw_dropout(p_dropout))
        largest = scale * softmax[0].detach()  # the derivative of the log-sum-exp comes in by softmax[1]
        return y, (largest if bend is None else bend(largest)) + softmax[1]
    with torch.autocast(q.device.type, enabled=False):
        y, lse = attention_and_lse_reference(q.to(k.dtype), k, v.to(k.dtype), scale, p_dropout, bend)
    return y.to(q.dtype), lse


def attention_and_lse_reference(
    q: Tensor, k: Tensor, v: Tensor, scale: float, p_dropout: float, bend: Bend | None
) -> tuple[Tensor, Tensor]:
    """attention_and_lse(), a block of queries at a time. The heads of a group are rows of one matmul."""
    (B, nkv, S, _), T = k.shape, q.size(-2)
    q = q.unflatten(1, (nkv, -1))  # (B, nkv, group, T, dk)
    group, parts, sums = q.size(2), [], []
    seed = draw_seed() if p_dropout and q.is_cpu else None
    rows = QUERIES if q.is_cpu else queries_at_once(B, nkv * group, S, q.device.type)
    for i in range(0, T, rows):
        end = min(i + rows, T)
        seen = S - T + end
        block = at_least_fp32(q[..., i:end, :]).flatten(2, 3)  # (B, nkv, group rows, dk)
        logits = (block @ at_least_fp32(k[:, :, :seen]).mT * scale).unflatten(2, (group, -1))
        logits = (logits if bend is None else bend(logits)).masked_fill(is_future(end - i, seen, q.device), -math.inf)
        lse = logits.logsumexp(-1)  # (B, nkv, group, rows)
        att = logits.softmax(-1).to(v.dtype)  # exp(logits - lse) would have another sum than 1: lse is rounded
        if seed is None:
            att = F.dropout(att, p_dropout)
        else:
            drawn = bytes_of_logits(seed, att.shape[:3], T, i, seen)
            att = ApplyMask.apply(att, *dropout_mask(drawn, out_of_256(p_dropout), att.dtype))
        parts.append((att.flatten(2, 3) @ v[:, :, :seen]).unflatten(2, (group, -1)).flatten(1, 2))
        sums.append(lse.flatten(1, 2))
    return torch.cat(parts, 2), torch.cat(sums, 2)


class BlockedAttention(torch.autograd.Function):
    """Causal attention for training on a CPU, where SDPA's derivative in bf16 is several times slower, and its dropout
    draws T x T masks serially: q, k (B, nh, T, dk), v (B, nh, T, dv) -> (B, nh, T, dv).

    A block of queries meets the keys up to the last of them, so that little more than half of T x T is computed. The
    probabilities are kept for the derivative, in v's dtype: at POSITIONS they take about the memory of the rest of a
    block. Of longer sequences without dropout SDPA keeps none.
    """

    POSITIONS = 1024

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, dropped: int, seed: Tensor | None) -> Tensor:
        ctx.shape, ctx.scale = q.shape[:3], scale
        q, k, v = (x.to(v.dtype).flatten(0, 1).contiguous() for x in (q, k, v))  # (B nh, T, dk or dv)
        y = torch.empty_like(v)
        parts: list[Tensor | None] = []
        keep, ctx.kept = None, 1.0
        with torch.autocast("cpu", enabled=False), matmuls_in(v.dtype):
            for i in range(0, q.size(1), QUERIES):
                end = min(i + QUERIES, q.size(1))
                exact_q, exact_k = at_least_fp32(q[:, i:end]), at_least_fp32(k[:, :end])
                logits = exact_q.new_empty(len(q), end - i, end)  # a bias in baddbmm would be copied for every head
                logits.baddbmm_(exact_q, exact_k.transpose(1, 2), beta=0, alpha=scale)
                logits[..., i:] += torch.full((end - i, end - i), -math.inf, dtype=logits.dtype).triu(1)
                att = logits.softmax(-1).to(v.dtype)
                if seed is not None:
                    drawn = bytes_of_logits(seed, q.shape[:1], q.size(1), i, end)
                    keep, ctx.kept = dropout_mask(drawn, dropped, att.dtype)
                torch.bmm(apply_mask(att, keep, ctx.kept), v[:, :end], out=y[:, i:end])
                parts += [att, keep]
        ctx.save_for_backward(q, k, v, *parts)
        return y.view(*ctx.shape, y.size(-1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *parts = ctx.saved_tensors
        grad = grad.flatten(0, 1).contiguous()  # (B nh, T, dv)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for i, att, keep in zip(range(0, q.size(1), QUERIES), parts[::2], parts[1::2], strict=True):
            end = i + att.size(1)
            dv[:, :end].baddbmm_(apply_mask(att, keep, ctx.kept).transpose(1, 2), grad[:, i:end])
            datt = apply_mask(grad[:, i:end] @ v[:, :end].transpose(1, 2), keep, ctx.kept)
            dlogits = torch.ops.aten._softmax_backward_data(datt, att, -1, att.dtype)
            dq[:, i:end].baddbmm_(dlogits, k[:, :end], beta=0, alpha=ctx.scale)
            dk[:, :end].baddbmm_(dlogits.transpose(1, 2), q[:, i:end], alpha=ctx.scale)
        return *(x.view(*ctx.shape, x.size(-1)) for x in (dq, dk, dv)), None, None, None


@contextlib.contextmanager
def matmuls_in(dtype: torch.dtype) -> Iterator[None]:
    """If `dtype` is bf16, oneDNN multiplies fp32 matrices in bf16 and sums in fp32, in the whole process. Nothing is
    rounded where the matrices hold bf16 values. This is for AMX; on an AMD oneDNN is up to twice as fast as MKL."""
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16" if dtype == torch.bfloat16 else before
    try:
        yield
    finally:
        matmul.fp32_precision = before


def max_logits(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """max over batch and visible (i, j) of scale q_i . k_j, signed, in fp32: (nh,)."""
    return torch.stack([logits.amax((0, 2, 3)) for logits in visible_logits(q, k, scale)]).amax(0)


def visible_logits(q: Tensor, k: Tensor, scale: float, bend: Bend | None = None) -> Iterator[Tensor]:
    """bend(scale q_i . k_j) in fp32, -inf where j > i, a few queries at a time so that T x T is never held:
    q (B, nh, T, dk), k (B, nkv, T, dk) -> (B, nh, rows, keys up to the last of these queries)."""
    B, nh, T, _ = q.shape
    q, k = q.float(), k.float().repeat_interleave(nh // k.size(1), 1)
    rows = queries_at_once(B, nh, T, q.device.type)
    matmul = matmul_3xtf32 if q.is_cuda else torch.matmul
    for i in range(0, T, rows):
        end = min(i + rows, T)
        with torch.autocast(q.device.type, enabled=False):  # which would round the logits to bf16
            logits = matmul(q[:, :, i:end], k[:, :, :end].transpose(-2, -1)) * scale
        yield (logits if bend is None else bend(logits)).masked_fill(is_future(end - i, end, q.device), -math.inf)


def matmul_3xtf32(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of fp32 with relative errors of 2^-21 on a GPU, which may round the inputs of fp32 matmuls to TF32: each
    input is split into 11 bits, which TF32 holds, and the rest."""
    a_high, b_high = ((x.contiguous().view(torch.int32) & -(2**13)).view(torch.float32) for x in (a, b))
    a_low, b_low = a - a_high, b - b_high
    return a_high @ b_high + (a_high @ b_low + a_low @ b_high)


def queries_at_once(B: int, nh: int, T: int, device: str) -> int:
    """Queries at a time: on a CPU few, which fit its cache; elsewhere many, as torch.compile unrolls the loop."""
    return max(1, (2**22 if device == "cpu" else 2**28) // (B * nh * T))


# -----------------------------------------------------------------------------
# Absorbed decoding of MLA: attention over cached latents


def each_head(x: Tensor, w: Tensor) -> Tensor:
    """x (B, nh, T, i) times each head's own matrix of w (nh, i, o) -> (B, nh, T, o)."""
    B, nh, T, _ = x.shape
    return (x.transpose(0, 1).reshape(nh, B * T, -1) @ w).view(nh, B, T, -1).transpose(0, 1)


def absorb(w: Tensor, q: Tensor, gain: Tensor | None, latent: Tensor, with_keys: bool) -> tuple[Tensor, Tensor | None]:
    """Absorb the key projection w (nh, dn, kr) into queries: (gain q) w, (B, nh, T, dn) -> (B, nh, T, kr). with_keys:
    also the content keys (B, nh, T, dn) of the latents (B, T, kr); a kernel reads w once for both."""
    if kernels.can_use_absorb(q, latent):
        q_latent, k = nanoqk.absorb(w, q, gain, latent, with_keys)
        return q_latent, k if with_keys else None
    q = q if gain is None else (q * gain).to(q.dtype)
    return each_head(q, w), content_keys(w, latent) if with_keys else None


def content_keys(w: Tensor, latent: Tensor) -> Tensor:
    """Each head's content keys (B, nh, T, dn) of latents (B, T, kr), with w (nh, dn, kr)."""
    return F.linear(latent, w.flatten(0, 1).to(latent.dtype)).unflatten(-1, (w.size(0), -1)).transpose(1, 2)


MAX_COPIED = 2**20  # elements of latents that a CPU may copy for each matmul


def latent_attention(
    q_latent: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, key_scale: Tensor | None, shift: Tensor | None,
    scale: float, unified: bool, bend: Bend | None = None, with_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Causal attention of T last positions whose keys and values are S latents -> (B, nh, T, kr), and with_lse each
    query's log-sum-exp, (B, nh, T); of bend(logits) where there is a `bend`.

    q_latent (B, nh, T, kr), q_rope (B, nh, T, dr), latent (B, S, kr), k_rope (B, S, dr). A key's logit is
    scale (key_scale q_latent . latent + q_rope . k_rope - shift), key_scale (B, nh, S, 1), shift (B, nh, T, S). In the
    unified layout key_scale multiplies q_rope . k_rope as well.
    """
    if q_latent.dtype != latent.dtype:  # as in causal_attention()
        q, q_r = q_latent.to(latent.dtype), q_rope.to(latent.dtype)
        with torch.autocast(q.device.type, enabled=False):
            y, lse = latent_attention(q, q_r, latent, k_rope, key_scale, shift, scale, unified, bend, with_lse)
        return y.to(q_latent.dtype), lse
    plain = shift is None and bend is None
    if plain and not with_lse and kernels.can_use_triton(q_latent, latent, k_rope, key_scale):
        from model.kernels.mla_decode_triton import attend_latents

        s = None if key_scale is None else key_scale.squeeze(-1).mT  # (B, S, nh)
        y = attend_latents(q_latent[:, :, 0], q_rope[:, :, 0], latent, k_rope, s, scale, unified)
        return y[:, :, None], None
    if plain and kernels.can_use_latent_attention(q_latent, latent, k_rope, key_scale):
        q_rope = q_rope.to(latent.dtype)
        y, lse = nanoqk.latent_attention(q_latent, q_rope, latent, k_rope, key_scale, scale, unified)
        return y, lse if with_lse else None
    inputs = (q_latent, q_rope, latent, k_rope, key_scale, shift)
    settings: Any = (scale, unified, bend, with_lse)
    B, S, kr = latent.shape
    if B == 1 or S * kr <= MAX_COPIED or not latent.is_cpu:
        return latent_attention_reference(*inputs, *settings)
    # a sequence at a time: one matmul of all would copy them first
    each: Any = zip(*([None] * B if x is None else x.split(1) for x in inputs), strict=True)
    ys, sums = zip(*(latent_attention_reference(*one, *settings) for one in each), strict=True)
    return torch.cat(ys), torch.cat(sums) if with_lse else None


def latent_attention_reference(
    q_latent: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, key_scale: Tensor | None, shift: Tensor | None,
    scale: float, unified: bool, bend: Bend | None = None, with_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The matmuls are plain GEMMs of all heads over the cache as it lies, with its positions as rows: few rows times
    many columns is up to 20 times slower on a CPU. What comes between works in place."""
    (B, S, kr), (nh, T) = latent.shape, q_latent.shape[1:3]

    def matmul(keys: Tensor, q: Tensor) -> Tensor:  # (B, S, n), (B, nh, T, n) -> (B, S, nh, T)
        if not latent.is_cpu:
            return (keys @ q.to(keys.dtype).flatten(1, 2).mT).view(B, S, nh, T)
        q = at_least_fp32(q).flatten(1, 2).mT  # as in the kernel, bf16 products are summed in fp32
        return torch.cat([at_least_fp32(part) @ q for part in keys.split(MAX_COPIED // kr, 1)], 1).view(B, S, nh, T)

    with torch.autocast(latent.device.type, enabled=False), matmuls_in(latent.dtype):
        content, logits = matmul(latent, q_latent), matmul(k_rope, q_rope)
    logits *= scale  # the RoPE part first; to add it in its matmul would be slower
    if key_scale is not None and not unified:
        logits.addcmul_(content, key_scale.transpose(1, 2), value=scale)
    else:
        logits.add_(content, alpha=scale)
        if key_scale is not None:
            logits *= key_scale.transpose(1, 2)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    logits = logits.new_empty(B, nh, T, S, dtype=dtype).copy_(logits.permute(0, 2, 3, 1))  # in one pass
    if shift is not None:
        logits = logits - scale * shift
    logits = logits if bend is None else bend(logits)
    if T > 1:
        logits = logits.masked_fill(is_future(T, S, logits.device), -math.inf)
    att = F.softmax(logits, -1).to(latent.dtype)
    return (att.flatten(1, 2) @ latent).view(B, nh, T, -1), logits.logsumexp(-1) if with_lse else None
