"""The GPT in one file: RoPE, QK norms, attention layouts, MLPs, Block, GPT, initialisation, cost accounting. The
arithmetic of norms and attention, with its kernels, is in ops.py.

Attention layout and QK norm are independent choices: any entry of ATTENTIONS works with any entry of QK_NORMS, but
unified MLA needs a norm, and one without gains for each head.
Names of parameters follow nanoGPT; a tied model has no lm_head.weight of its own.

Shapes: B batch, T positions, S cached positions, C = n_embd, nh heads, nkv key and value heads, hs channels a head,
V vocabulary; in MLA kr = kv_rank, dv = v_dim, and a head's query and key are dn = nope_dim channels and dr = rope_dim
rotated ones.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from core.schema import require
from model import cross_entropy, ops, slots
from model.linear import Embedding, FusedLinear, Linear, linear, scale_rows
from model.ops import at_least_fp32
from model.options import GPTConfig, GQAOptions, LpNormOptions, MHAOptions, MLAOptions, ModelOptions, RMSNormOptions
from model.slots import ATTENTIONS, QK_NORMS, LateInit, QKNorm

INIT_STD = 0.02

# -----------------------------------------------------------------------------
# Rotary position embedding (RoFormer), in the half-split layout of Llama and Qwen

Rope = tuple[Tensor, Tensor]  # cos and sin of every position's angles, each (block_size, d / 2)


def rope_table(n_positions: int, dim: int, theta: float) -> Rope:
    """cos and sin of position / theta^(2i / dim), (n_positions, dim / 2) each, on the CPU."""
    frequency = theta ** (-torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)  # (d / 2,)
    angle = torch.arange(n_positions, dtype=torch.float32, device="cpu")[:, None] * frequency  # (n_positions, d / 2)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, rope: Rope, pos: int = 0) -> Tensor:
    """Rotate channel pairs (i, i + d/2) of x (..., T, d) at positions pos .. pos+T-1 (RoFormer, eq. 34)."""
    cos, sin = (table[pos : pos + x.size(-2)] for table in rope)  # (T, d / 2)
    a, b = at_least_fp32(x).chunk(2, -1)  # (..., T, d / 2)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


# -----------------------------------------------------------------------------
# QK norms: these act on the queries and keys of each head, before RoPE (as in Qwen3). slots.py has their base class
# with its formula, variants/ the norms of other papers.


class NoNorm(QKNorm):
    """The identity."""

    def scale(self, x: Tensor) -> Tensor:
        return torch.ones_like(at_least_fp32(x[..., :1]))

    def forward(self, x: Tensor, alpha: Tensor | None = None) -> Tensor:
        assert alpha is None
        return x


class QKRMSNorm(QKNorm):
    """QK norm: gain * x / sqrt(mean(x^2) + eps) over each head's channels, one gain for all heads (Qwen3)."""

    def __init__(self, options: RMSNormOptions, head_dim: int, n_head: int):
        super().__init__(options, head_dim, n_head)
        self.eps = options.eps
        self.gain = nn.Parameter(torch.empty(head_dim))

    def scale(self, x: Tensor) -> Tensor:
        return ops.inverse_rms(x, self.eps)

    def forward(self, x: Tensor, alpha: Tensor | None = None) -> Tensor:
        gain = self.gain
        assert gain is not None and alpha is None
        return ops.rms_norm(x, gain, self.eps)  # (..., hs)


class QKLayerNorm(QKRMSNorm):
    """QK norm: gain * (x - mean(x)) / sqrt(var(x) + eps) (ViT-22B). No bias: a key's would cancel in the softmax."""

    centred = True

    def scale(self, x: Tensor) -> Tensor:
        x = at_least_fp32(x)
        return super().scale(x - x.mean(-1, keepdim=True))

    def forward(self, x: Tensor, alpha: Tensor | None = None) -> Tensor:
        y = at_least_fp32(x)
        # rms_norm(), which has a kernel with a derivative; scale() has none
        return super().forward(y - y.mean(-1, keepdim=True), alpha).to(x.dtype)  # (..., hs)


class LpNorm(QKNorm):
    """x / ||x||_p over each head's channels (Enhanced QKNorm, eq. 12-14). p >= 1, inf included.

    p=learned makes p = 1 + softplus(raw_p) a parameter, one a head, that starts at 2; queries and keys have their own.
    For p != 2 the norm is not invariant under rotations, RoPE's among them.
    """

    p_tensor: Tensor | None  # (); None if p is inf

    def __init__(self, options: LpNormOptions, head_dim: int, n_head: int):
        super().__init__(options, head_dim, n_head)
        self.learned = options.p == "learned"
        if isinstance(options.p, str):
            self.raw_p = self.new_parameter(n_head, math.log(math.e - 1))
        else:
            self.fixed_p = options.p
            p_tensor = torch.tensor(options.p, device="cpu") if math.isfinite(options.p) else None
            self.register_buffer("p_tensor", p_tensor, persistent=False)

    @property
    def p(self) -> float | Tensor:
        """Learned: a tensor (nh, 1, 1). Fixed: a number, or the same as a tensor ()."""
        if self.learned:
            return 1 + F.softplus(self.raw_p)[:, None, None]
        return ops.as_data(self.fixed_p, self.p_tensor)

    def scale(self, x: Tensor) -> Tensor:
        return ops.inverse_lp_norm(x, self.p)

    def forward(self, x: Tensor, alpha: Tensor | None = None) -> Tensor:
        return ops.lp_norm(x, self.p, alpha)


QK_NORMS |= {"none": NoNorm, "lp": LpNorm, "rms": QKRMSNorm, "layernorm": QKLayerNorm}


class Alpha(LateInit):
    """The learnable positive logit scale of the Lp norm (Enhanced QKNorm, eq. 15): one a layer, or one a head.
    block_dims: the channels of each block that is normalised separately, (hs,) or MLA's (dn, dr)."""

    MAPS: dict[str, Callable[[Tensor], Tensor]] = {"exp": torch.exp, "softplus": F.softplus, "linear": torch.abs}

    def __init__(self, options: LpNormOptions, n_head: int, block_dims: tuple[int, ...], block_size: int):
        super().__init__()
        self.alpha_map = options.alpha_map
        alpha = initial_alpha(options, block_dims, block_size)
        # softplus(raw) = alpha at raw = alpha + log(1 - exp(-alpha))
        raw = {"exp": math.log(alpha), "softplus": alpha + math.log(-math.expm1(-alpha)), "linear": alpha}
        self.raw = self.new_parameter(n_head if options.alpha_per == "head" else 1, raw[self.alpha_map])

    def forward(self) -> Tensor:
        return self.MAPS[self.alpha_map](self.raw).view(-1, 1, 1)  # (nh or 1, 1, 1)


class LogitScale(nn.Module):
    """Logits are softmax_scale * q . k. With an Lp norm softmax_scale is 1, and q_norm multiplies q by alpha. Else
    softmax_scale is 1 / sqrt(channels of a head)."""

    def __init__(self, config: GPTConfig, block_dims: tuple[int, ...]):
        super().__init__()
        self.softmax_scale = 1 / math.sqrt(sum(block_dims))
        self.alpha: Alpha | None = None
        if isinstance(config.qk_norm, LpNormOptions):
            self.softmax_scale = 1.0
            self.alpha = Alpha(config.qk_norm, config.model.n_head, block_dims, config.model.block_size)

    def query_factor(self) -> Tensor | None:
        """alpha, (nh or 1, 1, 1); None without an Lp norm."""
        return None if self.alpha is None else self.alpha()


def initial_alpha(options: LpNormOptions, block_dims: tuple[int, ...], block_size: int) -> float:
    """The alpha that a run starts from. For Gaussian vectors the initial logits have Var = alpha^2 * (sum over blocks
    of E[g]^4 / d), for blocks of d channels and E[g] = mean_norm_ratio(p, d), which is 1 at p = 2.

    henry    log2(L^2 - L) for the context length L (Henry et al. 2020)
    sqrt_d   Var = 1 at p = 2; for one block alpha is sqrt(hs), and p = 2 equals RMS QK-norm
    matched  Var = 1 for every p, to a few per cent
    """
    if options.alpha_init == "henry":
        return math.log2(block_size**2 - block_size)
    if options.alpha_init == "sqrt_d":
        return 1 / math.sqrt(sum(1 / d for d in block_dims))
    if options.alpha_init == "matched":
        p = 2.0 if isinstance(options.p, str) else options.p  # a learned p starts at 2
        return 1 / math.sqrt(sum(mean_norm_ratio(p, d) ** 4 / d for d in block_dims))
    assert isinstance(options.alpha_init, float)
    return options.alpha_init


@functools.lru_cache
def mean_norm_ratio(p: float, head_dim: int) -> float:
    """E[g], g = ||x||_2 / ||x||_p, for x ~ N(0, 1)^head_dim: logits are alpha cos(q, k) g(q) g(k). Measured on vectors
    of a fixed seed: good to about 0.1 %."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(16384, head_dim, dtype=torch.float64, generator=g, device="cpu")  # whatever the default device is
    x /= x.abs().amax(-1, keepdim=True)  # no power overflows
    return (torch.linalg.vector_norm(x, 2, -1) / torch.linalg.vector_norm(x, p, -1)).mean().item()


# -----------------------------------------------------------------------------
# Attention layouts


@dataclass
class KVCache:
    """Keys and values of the positions decoded so far; preallocated, written in place by the attention module."""

    k: Tensor  # (B, nkv, max_len, hs)
    v: Tensor  # (B, nkv, max_len, hs)


class CausalAttention(nn.Module):
    """Base class of the layouts: softmax(scale q k^T) v, and what QK-Clip and the diagnostics observe of q and k.
    docs/your_own_variant.md says what a layout defines and sets."""

    n_head: int
    p_dropout: float
    layer_idx: int  # 0 is the lowest; set after __init__
    wraps_attend = False  # True where the attend() of a subclass calls this one
    caches_keys = False  # new_cache() holds keys and values
    bend: ops.Bend | None = None  # what logits= does to each logit
    plain_softmax = True  # False where logits= bends the logits or softmax= changes the sum: SDPA has neither

    def __init__(self) -> None:
        super().__init__()
        self.max_logits: Tensor | None = None
        self.probe: Callable[[Tensor, Tensor, float], None] | None = None  # of the diagnostics

    def init_weights(self) -> None:
        """Sets the parameters of a layout that are those of no submodule."""

    def fill_slots(self, config: GPTConfig, v_dim: int) -> None:
        self.logits = slots.LOGITS[config.logits.name](config.logits, config)
        self.softmax = slots.SOFTMAXES[config.softmax.name](config.softmax, config)
        self.output = slots.OUTPUTS[config.output.name](config.output, config, v_dim)
        self.bend = self.logits.bend
        self.plain_softmax = self.bend is None and config.softmax.name == "plain"

    fill_seams = fill_slots  # the old name, for layouts that exist

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        p = self.p_dropout if self.training else 0.0
        if self.plain_softmax:
            return ops.causal_attention(q, k, v, scale, p)
        return self.softmax(*ops.attention_and_lse(q, k, v, scale, p, self.bend))

    def observe(self, q: Tensor, k: Tensor, scale: float) -> None:
        """q (B, nh, T, dk), k (B, nkv, T, dk) of all positions: normalised and rotated, the factors of the logits."""
        if self.max_logits is not None and self.training:
            self.max_logits = torch.maximum(self.max_logits, ops.max_logits(q.detach(), k.detach(), scale))
        if self.probe is not None:
            self.probe(q, k, scale)

    def track_max_logits(self) -> None:
        # never None again: else the compiled forward recompiles
        self.max_logits = torch.full((self.n_head,), -math.inf, device=next(self.parameters()).device)

    def pop_max_logits(self) -> Tensor:
        """The exact largest logit of each head before `bend`, (nh,), over the training forwards since the last call."""
        assert self.max_logits is not None, "track_max_logits() was not called"
        result, self.max_logits = self.max_logits, torch.full_like(self.max_logits, -math.inf)
        return result


class GroupedQueryAttention(CausalAttention):
    """Causal self-attention with n_kv_head keys and values: multi-head (all), grouped-query, multi-query (1)."""

    caches_keys = True

    def __init__(self, config: GPTConfig):
        super().__init__()
        m, a = config.model, config.attention
        assert isinstance(a, MHAOptions)
        self.n_head = m.n_head
        self.n_kv_head = a.n_kv_head if isinstance(a, GQAOptions) else m.n_head
        self.head_dim = self.rope_dim = a.head_dim or m.n_embd // m.n_head
        self.p_dropout = m.dropout
        rows = [n * self.head_dim for n in (self.n_head, self.n_kv_head, self.n_kv_head)]
        self.c_attn = FusedLinear(m.n_embd, rows, bias=m.bias)  # queries, keys, values
        self.c_proj = Linear(self.n_head * self.head_dim, m.n_embd, bias=m.bias)
        norm = QK_NORMS[config.qk_norm.name]
        self.q_norm = norm(config.qk_norm, self.head_dim, self.n_head)
        self.k_norm = norm(config.qk_norm, self.head_dim, self.n_kv_head).for_keys()
        self.logit_scale = LogitScale(config, (self.head_dim,))
        self.fill_slots(config, self.head_dim)

    # Whose each call is, here and in MLA:
    #   qk_norm=             q_norm, k_norm, query_factor (alpha of the Lp norm), after_rope (nGPT)
    #   logits=              scale_queries (SSMax), attend (soft cap)
    #   softmax=             attend (sink)
    #   output=              transform_values (value norm), output (gate; with the values: XSA)
    #   qk_clip=, diagnose() observe
    def forward(self, x: Tensor, rope: Rope | None, cache: KVCache | None = None, pos: int = 0) -> Tensor:
        B, T, _ = x.shape
        heads = (self.n_head, self.n_kv_head, self.n_kv_head)
        qkv = self.c_attn(x).view(B, T, sum(heads), self.head_dim)
        q, k, v = (part.transpose(1, 2) for part in qkv.split(heads, 2))  # (B, nh, T, hs), (B, nkv, T, hs) twice
        q, k = self.q_norm(q, self.logit_scale.query_factor()), self.k_norm(k)
        if rope is not None:
            q, k = rotate(q, rope, pos), rotate(k, rope, pos)
        q = self.logits.scale_queries(self.q_norm.after_rope(q), pos)
        v = self.output.transform_values(v)
        if cache is None:  # neither training nor diagnostics have one
            self.observe(q, k, self.logit_scale.softmax_scale)
        else:
            assert pos + T <= cache.k.size(2), "the cache is full"
            cache.k[:, :, pos : pos + T] = k
            cache.v[:, :, pos : pos + T] = v
            if pos > 0:  # at pos 0, k and v are the whole context
                k, v = cache.k[:, :, : pos + T], cache.v[:, :, : pos + T]  # (B, nkv, S, hs)
        y = self.attend(q, k, v, self.logit_scale.softmax_scale)  # (B, nh, T, hs)
        y = self.output(y, x, v) if self.output.takes_values else self.output(y, x)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, -1))

    @torch.no_grad()
    def scale_logits(self, gamma: Tensor, balance: float) -> None:
        """Multiply head h's logits by gamma[h], (nh,): queries take gamma^balance, keys the rest (QK-Clip). A group
        shares its key, so that the smallest gamma of its heads counts for all of them."""
        assert type(self.q_norm) is NoNorm, "a QK norm undoes the scaling"
        gamma = gamma.view(self.n_kv_head, -1).amin(1)  # (nkv,)
        per_query_head = gamma.repeat_interleave(self.n_head // self.n_kv_head)
        factors = torch.cat([per_query_head**balance, gamma ** (1 - balance), torch.ones_like(gamma)])
        scale_rows(self.c_attn, factors.repeat_interleave(self.head_dim))

    def new_cache(self, batch: int, max_len: int, dtype: torch.dtype) -> KVCache:
        shape, device = (batch, self.n_kv_head, max_len, self.head_dim), self.c_attn.weight.device
        return KVCache(*(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)))

    def flops_per_token(self, context: int) -> int:
        """Training FLOPs of q k^T and att v for one token that sees `context` keys: 2 matmuls * 2 FLOPs * 3 passes."""
        return 12 * self.n_head * self.head_dim * context


@dataclass
class LatentCache:
    """MLA's cache: the normalised latent, and the rotated RoPE key that all heads share; no keys or values of heads."""

    latent: Tensor  # (B, max_len, kr)
    k_rope: Tensor  # (B, max_len, dr)
    key_scale: Tensor | None  # (B, nh, max_len, 1), contiguous over the heads of a token; of a QK norm
    mean_term: Tensor | None  # (B, nh, max_len, 1): key_scale * the key's mean; of unified LayerNorm


Cache = KVCache | LatentCache


class LatentNorm(nn.RMSNorm):
    """RMSNorm of a latent, computed in fp32 at least."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.eps is not None
        return ops.rms_norm(x, self.weight, self.eps)


class MultiHeadLatentAttention(CausalAttention):
    """Multi-head latent attention (DeepSeek-V2 eq. 9-19, V3's names and norms), with QK norms (QK-Normed MLA).

    A key is [content from the latent | one RoPE key shared by the heads]. qk_norm_layout=blockwise normalises the two
    blocks separately, unified the whole vector; both before RoPE. Training and prefill compute keys and values
    (explicit path). Decoding multiplies the key projection into the query, and the value projection into the output
    (absorbed path). This works for any norm gain * (x - mean) * s: the query takes the gain, and s is cached.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        m, a = config.model, config.attention
        assert isinstance(a, MLAOptions)
        self.n_head, self.p_dropout = m.n_head, m.dropout
        self.kv_rank, self.nope_dim, self.rope_dim, self.v_dim = a.kv_rank, a.nope_dim, a.rope_dim, a.v_dim
        self.unified = a.qk_norm_layout == "unified"
        d = a.nope_dim + a.rope_dim
        self.c_q_a = Linear(m.n_embd, a.q_rank, bias=False) if a.q_rank is not None else nn.Identity()
        self.q_a_norm = LatentNorm(a.q_rank, m.norm_eps) if a.q_rank is not None else nn.Identity()
        self.c_q = Linear(a.q_rank or m.n_embd, m.n_head * d, bias=False)
        self.c_kv_a = FusedLinear(m.n_embd, [a.kv_rank, a.rope_dim], bias=False)  # latent, RoPE key
        self.kv_a_norm = LatentNorm(a.kv_rank, m.norm_eps)
        self.c_kv_b = FusedLinear(a.kv_rank, [m.n_head * a.nope_dim, m.n_head * a.v_dim], bias=False)  # keys, values
        self.c_proj = Linear(m.n_head * a.v_dim, m.n_embd, bias=False)
        norm = functools.partial(QK_NORMS[config.qk_norm.name], config.qk_norm)
        if self.unified:
            self.q_norm, self.k_norm = norm(d, m.n_head), norm(d, m.n_head).for_keys()
        else:
            self.q_norm, self.k_norm = norm(a.nope_dim, m.n_head), norm(a.nope_dim, m.n_head).for_keys()
            self.q_rope_norm, self.k_rope_norm = norm(a.rope_dim, m.n_head), norm(a.rope_dim, 1).for_keys()
        self.logit_scale = LogitScale(config, (d,) if self.unified else (a.nope_dim, a.rope_dim))
        self.normed = config.qk_norm.name != "none"
        self.fill_slots(config, a.v_dim)

    def forward(self, x: Tensor, rope: Rope | None, cache: LatentCache | None = None, pos: int = 0) -> Tensor:
        assert rope is not None
        q_nope, q_rope, latent, k_rope = self.project(x, rope, pos)
        if cache is not None and pos > 0:
            y = self.absorbed(q_nope, q_rope, latent, k_rope, rope, cache, pos)  # writes the cache, too
        else:
            if cache is not None:
                self.write_cache(latent, self.content_keys(latent), k_rope, rope, cache, pos)
            y = self.explicit(q_nope, q_rope, latent, k_rope, rope)
        y = self.output(y, x)  # (B, nh, T, dv)
        return self.c_proj(y.transpose(1, 2).reshape(x.size(0), x.size(1), -1))

    def project(self, x: Tensor, rope: Rope, pos: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries (B, nh, T, dn) and (B, nh, T, dr), normalised and the second rotated; latents (B, T, kr); RoPE keys
        (B, 1, T, dr), not rotated yet, and normalised only in the blockwise layout."""
        B, T, _ = x.shape
        latent, k_rope = self.c_kv_a(x).split((self.kv_rank, self.rope_dim), -1)
        q = self.c_q(self.q_a_norm(self.c_q_a(x))).view(B, T, self.n_head, -1).transpose(1, 2)  # (B, nh, T, dn + dr)
        latent, k_rope, alpha = self.kv_a_norm(latent), k_rope[:, None], self.logit_scale.query_factor()
        if self.unified:
            q_nope, q_rope = self.split(self.q_norm(q, alpha))
            q = torch.cat([q_nope, rotate(q_rope, rope, pos)], -1)
            q_nope, q_rope = self.split(self.q_norm.after_rope(q))
        else:
            q_nope, q_rope = self.split(q)
            q_nope, q_rope = self.q_norm(q_nope, alpha), rotate(self.q_rope_norm(q_rope, alpha), rope, pos)
            q_nope, q_rope = self.q_norm.after_rope(q_nope), self.q_rope_norm.after_rope(q_rope)
            k_rope = self.k_rope_norm(k_rope)
        return self.logits.scale_queries(q_nope, pos), self.logits.scale_queries(q_rope, pos), latent, k_rope

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(..., dn + dr) -> (..., dn), (..., dr)"""
        return x[..., : self.nope_dim], x[..., self.nope_dim :]

    def join(self, nope: Tensor, rope: Tensor) -> Tensor:
        """(B, nh, T, dn), and (B, 1, T, dr) shared by the heads or (B, nh, T, dr) -> (B, nh, T, dn + dr)"""
        return torch.cat([nope, rope.expand(-1, self.n_head, -1, -1)], -1)

    def explicit(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, rope: Rope) -> Tensor:
        """Attention over keys and values formed from the latents of the same T positions -> (B, nh, T, dv)."""
        B, T, _ = latent.shape
        k_nope, v = (
            part.view(B, T, self.n_head, -1).transpose(1, 2)  # (B, nh, T, dn) and (B, nh, T, dv)
            for part in self.c_kv_b(latent).split(self.c_kv_b.split_sizes, -1)
        )
        if self.unified:
            k_nope, k_rope = self.split(self.k_norm(self.join(k_nope, k_rope)))
        else:
            k_nope = self.k_norm(k_nope)
        k = self.join(k_nope, rotate(k_rope, rope))  # (B, nh, T, dn + dr)
        q = torch.cat([q_nope, q_rope], -1)
        self.observe(q, k, self.logit_scale.softmax_scale)
        return self.attend(q, k, v, self.logit_scale.softmax_scale)

    # Absorbed decoding (docs/qk_norms.md derives it). (q_n, q_r) is the query that project() returns, R rotates, g_n
    # and g_r are the gains of a key's content and RoPE channels, s is key_scale, m the key's mean before its norm,
    # which LayerNorm alone subtracts.
    #   unified:   s [W_uk^T (g_n q_n) . latent + q_r . R g_r k_rope] - s m [g_n . q_n + q_r . R g_r]
    #   blockwise: k_rope is normalised already, so g_r = 1, and s and m are of the content alone. s multiplies the
    #              first product only, and g_n q_n is centred in place of the key.

    def up_projections(self) -> tuple[Tensor, Tensor]:
        """c_kv_b's weights for keys, (nh, dn, kr), and for values, (nh, dv, kr): W^UK and W^UV of DeepSeek-V2."""
        w_uk, w_uv = self.c_kv_b.matrix().split(self.c_kv_b.split_sizes)
        return w_uk.view(self.n_head, self.nope_dim, self.kv_rank), w_uv.view(self.n_head, self.v_dim, self.kv_rank)

    def key_gains(self) -> tuple[Tensor | None, Tensor | float]:
        """The key gain of the content, and in the unified layout of the RoPE block."""
        gain = self.k_norm.head_gain
        if gain is None or not self.unified:
            return gain, 1.0
        return self.split(gain)

    def content_keys(self, latent: Tensor) -> Tensor | None:
        """Content keys (B, nh, T, dn) of latents (B, T, kr) before their norm; None without a QK norm."""
        return ops.content_keys(self.up_projections()[0], latent) if self.normed else None

    def write_cache(
        self, latent: Tensor, k_nope: Tensor | None, k_rope: Tensor, rope: Rope, cache: LatentCache, pos: int
    ) -> None:
        """Write T positions from `pos` on. k_nope: content_keys(latent). k_rope: as project() returns it."""
        new = slice(pos, pos + latent.size(1))
        assert new.stop <= cache.latent.size(1), "the cache is full"
        if cache.key_scale is not None:
            assert k_nope is not None
            k = self.join(k_nope, k_rope) if self.unified else k_nope  # what k_norm normalises
            s = self.k_norm.scale(k)  # (B, nh, T, 1)
            cache.key_scale[:, :, new] = s
            if cache.mean_term is not None:
                cache.mean_term[:, :, new] = s * at_least_fp32(k).mean(-1, keepdim=True)
        cache.latent[:, new] = latent
        cache.k_rope[:, new] = rotate(k_rope * self.key_gains()[1], rope, pos)[:, 0]

    def absorbed(
        self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, rope: Rope, cache: LatentCache, pos: int
    ) -> Tensor:
        """Write T positions, the first at `pos`, to the cache; attend to all pos + T positions -> (B, nh, T, dv)."""
        T = q_nope.size(2)
        gain, rope_gain = self.key_gains()
        q_content, dtype = q_nope, q_nope.dtype
        if self.k_norm.centred:
            q_content, gain = q_content if gain is None else q_content * gain, None
            if not self.unified:  # q . (k - mean k) = (q - mean q) . k
                q_content = q_content - q_content.mean(-1, keepdim=True)
        w_uk, w_uv = self.up_projections()
        q_latent, k_nope = ops.absorb(w_uk.to(dtype), q_content.to(dtype), gain, latent, self.normed)
        self.write_cache(latent, k_nope, k_rope, rope, cache, pos)
        shift = None  # s m [g_n . q_n + q_r . R g_r]
        if cache.mean_term is not None:
            gains = rotate(q_rope.new_ones(pos + T, self.rope_dim) * rope_gain, rope)  # (S, dr): R g_r
            q_sum = q_content.sum(-1, keepdim=True) + torch.einsum("bhtd,sd->bhts", q_rope, gains.to(q_rope.dtype))
            shift = q_sum * cache.mean_term[:, :, : pos + T].mT  # (B, nh, T, S)
        key_scale = None if cache.key_scale is None else cache.key_scale[:, :, : pos + T]
        latents, k_ropes = cache.latent[:, : pos + T], cache.k_rope[:, : pos + T]
        scale, with_lse = self.logit_scale.softmax_scale, not self.plain_softmax
        y, lse = ops.latent_attention(
            q_latent, q_rope, latents, k_ropes, key_scale, shift, scale, self.unified, self.bend, with_lse
        )
        y = ops.each_head(y, w_uv.transpose(1, 2).to(y.dtype))
        return y if lse is None else self.softmax(y, lse)

    @torch.no_grad()
    def scale_logits(self, gamma: Tensor, balance: float) -> None:
        """Multiply head h's logits by gamma[h], (nh,), without touching the shared RoPE key or the values (MuonClip):
        content queries take gamma^balance, content keys the rest, RoPE queries all of it."""
        assert not self.normed, "a QK norm undoes the scaling"
        content, rotated = (gamma**balance)[:, None].expand(-1, self.nope_dim), gamma[:, None].expand(-1, self.rope_dim)
        scale_rows(self.c_q, torch.cat([content, rotated], 1).flatten())
        keys = (gamma ** (1 - balance)).repeat_interleave(self.nope_dim)
        scale_rows(self.c_kv_b, torch.cat([keys, keys.new_ones(self.n_head * self.v_dim)]))

    def new_cache(self, batch: int, max_len: int, dtype: torch.dtype) -> LatentCache:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(batch, *shape, dtype=dtype, device=self.c_proj.weight.device)

        def of_heads() -> Tensor:
            return zeros(max_len, self.n_head).mT[..., None]

        key_scale = of_heads() if self.normed else None
        mean_term = of_heads() if self.k_norm.centred and self.unified else None
        return LatentCache(zeros(max_len, self.kv_rank), zeros(max_len, self.rope_dim), key_scale, mean_term)

    def flops_per_token(self, context: int) -> int:
        """As in GroupedQueryAttention, on the explicit path; 6 = 2 FLOPs * 3 passes."""
        return 6 * self.n_head * (self.nope_dim + self.rope_dim + self.v_dim) * context


ATTENTIONS |= {"mha": GroupedQueryAttention, "gqa": GroupedQueryAttention, "mla": MultiHeadLatentAttention}

# -----------------------------------------------------------------------------
# The transformer


def new_norm(config: ModelOptions) -> nn.Module:
    if config.norm == "rmsnorm":
        return RMSNorm(config.n_embd, config.norm_eps)
    return LayerNorm(config.n_embd, config.norm_eps, bias=config.bias)


class LayerNorm(nn.LayerNorm):
    """LayerNorm of the residual stream (B, T, C), computed in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.residual_norm(x, self.weight, self.bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """RMSNorm of the residual stream (B, T, C), computed in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.eps is not None
        return ops.residual_norm(x, self.weight, None, self.eps, centred=False)


class MLP(nn.Module):
    """Linear, GELU (GPT-2: its tanh approximation), linear; or SwiGLU: silu(gate) * up between the two (Llama)."""

    def __init__(self, config: ModelOptions):
        super().__init__()
        hidden = config.mlp_hidden or 4 * config.n_embd
        self.activation = config.mlp
        widths = [hidden, hidden] if config.mlp == "swiglu" else [hidden]  # gate and up, or one
        self.c_fc = FusedLinear(config.n_embd, widths, bias=config.bias)
        self.c_proj = Linear(hidden, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.c_fc(x)  # (B, T, hidden), or gate and up: (B, T, 2 hidden)
        if self.activation == "swiglu":
            gate, up = x.chunk(2, -1)
            x = F.silu(gate) * up
        elif self.activation == "gelu_tanh":
            x = F.gelu(x, approximate="tanh")
        else:
            x = ops.gelu(x)
        return self.c_proj(x)


class Block(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)): pre-norm, as in GPT-2."""

    def __init__(self, config: GPTConfig, layer_idx: int):
        super().__init__()
        self.ln_1 = new_norm(config.model)
        self.attn = ATTENTIONS[config.attention.name](config)
        self.attn.layer_idx = layer_idx
        slots.require_fit(self.attn, config)
        self.ln_2 = new_norm(config.model)
        self.mlp = MLP(config.model)
        self.p_dropout = config.model.dropout
        self.weights = slots.WEIGHTS[config.weights.name](config.weights, self)  # last: it may change the Linears above

    def forward(self, x: Tensor, rope: Rope | None, cache: Cache | None = None, pos: int = 0) -> Tensor:
        p = self.p_dropout if self.training else 0.0
        x = ops.dropout_add(x, self.attn(self.ln_1(x), rope, cache, pos), p)
        return ops.dropout_add(x, self.mlp(self.ln_2(x)), p)


class Transformer(nn.Module):
    """The modules of a GPT, under the names that they have in GPT-2's and nanoGPT's checkpoints."""

    def __init__(self, config: GPTConfig, vocab_size: int):
        super().__init__()
        m = config.model
        self.wte = Embedding(vocab_size, m.n_embd)
        self.wpe = Embedding(m.block_size, m.n_embd) if m.position == "learned" else None
        self.h = nn.ModuleList(Block(config, layer_idx) for layer_idx in range(m.n_layer))
        self.ln_f = new_norm(m)


class GPT(nn.Module):
    """A GPT language model with nanoGPT's structure; tied: the output layer shares the token embedding's weights."""

    def __init__(self, config: GPTConfig, vocab_size: int):
        super().__init__()
        m = config.model
        self.config, self.vocab_size, self.block_size = config, vocab_size, m.block_size
        self.transformer = Transformer(config, vocab_size)
        self.lm_head = None if m.tied else Linear(m.n_embd, vocab_size, bias=False)
        self.init_rope()

    @property
    def attentions(self) -> list[Any]:
        """The attention modules, first layer first."""
        return [block.attn for block in self.transformer.h]

    def init_rope(self) -> None:
        """Compute the tables of RoPE; checkpoints do not hold them. load_run() calls it again for a model built on the
        meta device, which has their shapes alone."""
        m, device = self.config.model, self.transformer.wte.weight.device
        if m.position == "rope":
            assert m.rope_theta is not None
            d = self.attentions[0].rope_dim
            if device.type == "meta":
                cos, sin = (torch.empty(m.block_size, d // 2, device=device) for _ in range(2))
            else:
                cos, sin = rope_table(m.block_size, d, m.rope_theta)
            self.register_buffer("cos", cos.to(device), persistent=False)
            self.register_buffer("sin", sin.to(device), persistent=False)

    def forward(
        self,
        idx: Tensor,
        targets: Tensor | None = None,
        caches: list[Cache] | None = None,
        pos: int = 0,
        last_only: bool = False,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Logits (B, T or 1, V), and with targets the mean cross-entropy in nats, (). With targets the logits are None
        where they are more than LOGITS_AT_ONCE.

        idx (B, T) tokens at positions pos .. pos+T-1; targets (B, T), -1 is ignored; caches hold the positions before
        pos, and the new ones are written to them; last_only computes the last position's logits alone.
        """
        T = idx.size(1)
        assert pos + T <= self.block_size, f"{pos + T} positions are more than block_size={self.block_size}"
        assert pos == 0 or caches is not None, "pos > 0 needs the caches of the positions before"
        x = self.transformer.wte(idx)  # (B, T, C)
        rope = None
        if self.transformer.wpe is None:
            rope = (self.cos, self.sin)
        else:
            x = x + self.transformer.wpe(torch.arange(pos, pos + T, device=idx.device))
        if self.training:
            x = ops.dropout(x, self.config.model.dropout)
        for i, block in enumerate(self.transformer.h):
            if self.training and caches is None and self.config.model.activation_checkpointing:
                x = checkpoint(block, x, rope, use_reentrant=False)
            else:
                x = block(x, rope, None if caches is None else caches[i], pos)
        x = self.transformer.ln_f(x[:, -1:] if last_only else x)
        output = self.transformer.wte if self.lm_head is None else self.lm_head
        if targets is None:
            return linear(x, output.weight), None  # (B, T or 1, V)
        return cross_entropy.logits_and_loss(x, output.weight, targets)

    def new_caches(self, batch: int, max_len: int, dtype: torch.dtype) -> list[Cache]:
        return [attn.new_cache(batch, max_len, dtype) for attn in self.attentions]

    # Initialisation

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Set every parameter from `seed`: normal(0, 0.02), residual projections divided by sqrt(2 n_layer) (GPT-2)."""
        for parameter in self.parameters():
            nn.init.constant_(parameter, math.nan)  # NaN marks what no branch sets
        g = torch.Generator(next(self.parameters()).device).manual_seed(seed)
        late = {part for module in self.modules() if isinstance(module, LateInit) for part in module.modules()}
        late |= {*self.attentions}
        with torch.random.fork_rng(devices=[]):  # LateInit modules and layouts draw from PyTorch's own generator
            torch.default_generator.manual_seed(seed + 2**31)  # with `seed` alone they would get the numbers of g
            for name, module in sorted(self.named_modules(), key=lambda named: named[1] in late):
                if isinstance(module, nn.Linear | nn.Embedding):
                    residual = name.endswith("c_proj")  # c_proj: an output that is added to the residual stream
                    std = INIT_STD / math.sqrt(2 * self.config.model.n_layer) if residual else INIT_STD
                    nn.init.normal_(module.weight, std=std, generator=g)
                elif isinstance(module, nn.LayerNorm | nn.RMSNorm) and module.weight is not None:
                    nn.init.ones_(module.weight)
                elif isinstance(module, LateInit | CausalAttention):
                    module.init_weights()
                if isinstance(module, nn.Linear | nn.LayerNorm) and module.bias is not None:
                    nn.init.zeros_(module.bias)
        missed = [name for name, parameter in self.named_parameters() if parameter.isnan().any()]
        some = ", ".join(missed[:3]) + (f" and {len(missed) - 3} more" if len(missed) > 3 else "")
        require(not missed, f"init_weights() sets no values of {some}: each part sets those of its own parameters")
        for name, tensor in self.state_dict(keep_vars=True).items():
            told = f"{name} has one number in several places, so that no checkpoint can be loaded: clone() it"
            require(tensor.numel() < 2 or 0 not in tensor.stride(), told)

    @property
    def expected_initial_loss(self) -> float:
        """Nats a token. At init the logits are nearly independent N(0, C std^2): ln V plus half that variance."""
        return math.log(self.vocab_size) + 0.5 * self.config.model.n_embd * INIT_STD**2

    # Cost accounting

    def num_params(self, non_embedding: bool = False) -> int:
        """Number of parameters, with the vectors that quack and sigma_reparam keep in checkpoints; as in nanoGPT,
        non_embedding leaves out the position embedding alone."""
        wpe = self.transformer.wpe
        total = sum(p.numel() for p in self.parameters())
        return total - wpe.weight.numel() if non_embedding and wpe is not None else total

    @property
    def nbytes(self) -> int:
        """Of the weights, and of the tables of RoPE with the angles that they are computed from."""
        tables = sum(buffer.nbytes for buffer in self.buffers())
        return sum(p.nbytes for p in self.parameters()) + 3 * tables // 2

    def flops_per_token(self) -> int:
        """Training FLOPs a token, forward and backward: 6 N + 12 L C T (PaLM, appendix B; nanoGPT's estimate_mfu). N
        excludes embeddings that are only looked up."""
        n = self.num_params(non_embedding=True)
        n -= 0 if self.lm_head is None else self.transformer.wte.weight.numel()
        return 6 * n + sum(attn.flops_per_token(self.block_size) for attn in self.attentions)

    def cache_bytes_per_token(self, dtype: torch.dtype) -> int:
        tensors = [tensor for cache in self.new_caches(1, 1, dtype) for tensor in vars(cache).values()]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


register_qk_norm = register_attention = slots.register  # the old names, for plugins that exist
