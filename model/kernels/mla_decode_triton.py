"""MLA's absorbed decoding of one token on CUDA, fused (split-KV, after Flash-Decoding): the cache is read once.

A program takes one slice of the positions for up to 16 heads: latent and RoPE products, the key scalars, online softmax
and the weighted sum of latents. A second kernel weighs the slices together. The reference is
latent_attention_reference in ops.py.

Shapes: B batch, nh heads, S cached positions, kr = kv_rank, dr = rope_dim.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

HEADS = 16  # a program's: the least that tl.dot takes
POSITIONS = 32  # a tile's: two stages of 36 KiB at kr 512 and 16 bits, so two programs fit an SM of 228 KiB
COLUMNS = 32  # of a program that combines
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend_slice(  # type: ignore[no-untyped-def]
    q_latent, q_rope, latent, k_rope, s, partial, lse,
    S, per_slice, scale, stride_latent, stride_rope, stride_s,
    NH: tl.constexpr, KR: tl.constexpr, DR: tl.constexpr, H: tl.constexpr, N: tl.constexpr,
    NORM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """partial (B, slices, nh, kr): each slice's softmax-weighted latents; lse (B, slices, nh): log2 of its weight.

    Strides are those of a batch, positions of latent, k_rope and s being dense. NORM: what s multiplies: 0 nothing,
    1 the content's logit (blockwise), 2 all of it (unified).
    """
    batch, piece, slices = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    heads, r, d = tl.program_id(2) * H + tl.arange(0, H), tl.arange(0, KR), tl.arange(0, DR)
    real = heads < NH
    row = batch * NH + heads
    ql = tl.load(q_latent + row[:, None] * KR + r[None, :], mask=real[:, None], other=0.0)  # (H, KR)
    qr = tl.load(q_rope + row[:, None] * DR + d[None, :], mask=real[:, None], other=0.0)  # (H, DR)
    latent += batch * stride_latent
    k_rope += batch * stride_rope
    s += batch * stride_s + heads[:, None]  # (H, 1)
    top = tl.full((H,), float("-inf"), tl.float32)
    total = tl.zeros((H,), tl.float32)
    acc = tl.zeros((H, KR), tl.float32)
    begin = piece * per_slice
    end = tl.minimum(begin + per_slice, S)
    for at in range(begin, end, N):
        n = at + tl.arange(0, N)
        seen = n < end
        c = tl.load(latent + n[:, None].to(tl.int64) * KR + r[None, :], mask=seen[:, None], other=0.0)  # (N, KR)
        k = tl.load(k_rope + n[:, None].to(tl.int64) * DR + d[None, :], mask=seen[:, None], other=0.0)  # (N, DR)
        logits = tl.dot(ql, tl.trans(c), input_precision=PRECISION)  # (H, N)
        if NORM == 1:
            logits *= tl.load(s + n[None, :] * NH, mask=real[:, None] & seen[None, :], other=0.0).to(tl.float32)
        logits = tl.dot(qr, tl.trans(k), logits, input_precision=PRECISION)
        if NORM == 2:
            logits *= tl.load(s + n[None, :] * NH, mask=real[:, None] & seen[None, :], other=0.0).to(tl.float32)
        logits = tl.where(seen[None, :], logits * (scale * LOG2E), float("-inf"))
        higher = tl.maximum(top, tl.max(logits, 1))
        weight = tl.exp2(logits - higher[:, None])
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(weight, 1)
        acc = tl.dot(weight.to(c.dtype), c, acc * fade[:, None], input_precision=PRECISION)
        top = higher
    row = (batch * slices + piece) * NH + heads
    tl.store(partial + row[:, None] * KR + r[None, :], acc / total[:, None], mask=real[:, None])
    tl.store(lse + row, top + tl.log2(total), mask=real)


@triton.jit
def combine(  # type: ignore[no-untyped-def]
    partial, lse, y, slices, NH: tl.constexpr, KR: tl.constexpr, P: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """y (B, nh, kr): the slices' latents, each by its share of the softmax. P >= slices is a power of two."""
    row, r, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * C + tl.arange(0, C), tl.arange(0, P)
    here = i < slices
    at = (row // NH * slices + i) * NH + row % NH  # (P,)
    log = tl.load(lse + at, mask=here, other=float("-inf"))
    weight = tl.exp2(log - tl.max(log, 0))
    parts = tl.load(partial + at[:, None] * KR + r[None, :], mask=here[:, None], other=0.0)  # (P, C)
    total = tl.sum(parts * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(y + row * KR + r, total.to(y.dtype.element_ty))


def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def attend_latents(
    q_latent: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    s: Tensor | None,
    scale: float,
    unified: bool,
    slices: int | None = None,
) -> Tensor:
    """softmax(scale logits) latent, in fp32 inside -> (B, nh, kr).

    logits = s (q_latent . latent) + q_rope . k_rope, or unified s (q_latent . latent + q_rope . k_rope);
    q_latent (B, nh, kr), q_rope (B, nh, dr), latent (B, S, kr), k_rope (B, S, dr), s (B, S, nh). slices: into how many
    the positions are cut, by default so many that every SM has a program.
    """
    B, nh, kr = q_latent.shape
    S, dr = latent.size(1), q_rope.size(2)
    blocks = triton.cdiv(nh, HEADS)
    if slices is None:
        slices = triton.cdiv(processors(latent.device), B * blocks)
    per_slice = triton.cdiv(triton.cdiv(S, slices), POSITIONS) * POSITIONS
    slices = triton.cdiv(S, per_slice)  # none is empty
    partial = torch.empty(B, slices, nh, kr, dtype=torch.float32, device=latent.device)
    lse = torch.empty(B, slices, nh, dtype=torch.float32, device=latent.device)
    y = torch.empty_like(q_latent, memory_format=torch.contiguous_format)
    scalars, norm = (latent, 0) if s is None else (s, 2 if unified else 1)
    with torch.cuda.device_of(latent):  # Triton launches on the current device
        attend_slice[(B, slices, blocks)](
            q_latent.contiguous(), q_rope.contiguous(), latent, k_rope, scalars, partial, lse,
            S, per_slice, scale, latent.stride(0), k_rope.stride(0), scalars.stride(0),
            NH=nh, KR=kr, DR=dr, H=HEADS, N=POSITIONS, NORM=norm,
            PRECISION="ieee" if latent.dtype == torch.float32 else "tf32", num_warps=4, num_stages=2,
        )  # fmt: skip
        combine[(B * nh, kr // COLUMNS)](
            partial, lse, y, slices, NH=nh, KR=kr, P=triton.next_power_of_2(slices), C=COLUMNS, num_warps=4
        )
    return y
