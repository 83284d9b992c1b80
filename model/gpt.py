"""The single-file GPT: QK norms, attention, MLP, Block, GPT, initialisation, cost accounting.

Attention layout and QK norm are independent choices: any entry of ATTENTIONS works with any entry of QK_NORMS.
Names follow nanoGPT, so its weights load by name.

Shapes: B batch, T positions, S cached positions, C = n_embd, nh heads, hs = C / nh channels a head, V vocabulary.
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

from training.config import LpQKNormConfig, QKNormConfig, RMSQKNormConfig, TrainConfig

INIT_STD = 0.02

# -----------------------------------------------------------------------------
# QK norms: gain * x * s(x), a static per-feature gain times one scalar a vector


class NoNorm(nn.Module):
    """The identity, in the interface that every QK norm has. One instance normalises queries, another one keys.

    `gain` is None or a parameter of shape (hs,); `scale(x)` maps (..., hs) to the fp32 scalar s(x), (..., 1).
    """

    def __init__(self, config: QKNormConfig, head_dim: int):
        super().__init__()
        self.gain: nn.Parameter | None = None

    def init_weights(self) -> None:
        pass

    def scale(self, x: Tensor) -> Tensor:
        return torch.ones_like(x[..., :1], dtype=torch.promote_types(x.dtype, torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        return x  # (..., hs)


class LpNorm(NoNorm):
    """x / ||x||_p over each head's channels (papers: Lp QK-norm, eq. 12-14). p >= 1, inf included.

    Computed in fp32 at least, on x / max|x|: no power overflows or underflows. A vector with max|x| below 1e-30 maps to
    zero with zero gradient. For p != 2 the norm is not invariant under rotations, RoPE's among them.
    """

    TINY = 1e-30

    def __init__(self, config: LpQKNormConfig, head_dim: int):
        super().__init__(config, head_dim)
        self.p = config.p

    def unit(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x / max|x| (0 for a zero vector) and 1 / max|x|, a constant to autograd: y does not depend on it."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        largest = x.detach().abs().amax(-1, keepdim=True)  # (..., 1)
        inverse = torch.where(largest >= self.TINY, 1 / largest, 0.0)
        return x * inverse, inverse

    def scale(self, x: Tensor) -> Tensor:
        u, inverse = self.unit(x)
        return LpScale.apply(u, self.p) * inverse

    def forward(self, x: Tensor) -> Tensor:
        u, _ = self.unit(x)
        return (u * LpScale.apply(u, self.p)).to(x.dtype)  # (..., hs)


class LpScale(torch.autograd.Function):
    """s(u) = 1 / ||u||_p along the last dimension, (..., hs) -> (..., 1), for u with max|u| = 1; 1 for a zero vector.

    The derivative is written out, -s^2 sgn(u) |u s|^(p-1): it is finite at zeros of u, where autograd through roots is
    not, and keeps no intermediate. For p = inf, ties share the derivative evenly.
    """

    @staticmethod
    def forward(ctx: Any, u: Tensor, p: float) -> Tensor:
        magnitude = u.abs()
        if math.isinf(p):
            norm = magnitude.amax(-1, keepdim=True)
        else:
            norm = power(power(magnitude, p).sum(-1, keepdim=True), 1 / p)
        s = torch.where(norm > 0, 1 / norm, 1.0)
        ctx.save_for_backward(u, s)
        ctx.p = p
        return s

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        u, s = ctx.saved_tensors
        if math.isinf(ctx.p):
            peak = u.abs() == u.abs().amax(-1, keepdim=True)
            direction = torch.sgn(u) * peak / peak.sum(-1, keepdim=True)
        else:
            direction = signed_power(u * s, ctx.p - 1)
        return direction * (-grad * s * s), None


def power(u: Tensor, p: float) -> Tensor:
    """u**p for u >= 0. Small multiples of 1/2 take products and a square root, several times cheaper than pow."""
    whole, half = divmod(p, 1)
    if p > 8 or half not in (0, 0.5) or p < 0.5:
        return u**p
    result = u.sqrt() if half else None
    square = u
    count = int(whole)
    while count:  # binary exponentiation
        if count & 1:
            result = square if result is None else result * square
        count >>= 1
        square = square * square if count else square
    return u if result is None else result


def signed_power(x: Tensor, q: float) -> Tensor:
    """sgn(x) |x|**q, with sgn(0) = 0 when q = 0."""
    if q == 0:
        return torch.sgn(x)
    if q <= 8 and q % 2 == 1:
        return power(x, q)
    return torch.sgn(x) * power(x.abs(), q) if q < 1 else x * power(x.abs(), q - 1) if q > 1 else x


class RMSNorm(NoNorm):
    """gain * x / sqrt(mean(x^2) + eps) over each head's channels, one gain for all heads (Qwen3)."""

    def __init__(self, config: RMSQKNormConfig, head_dim: int):
        super().__init__(config, head_dim)
        self.eps = config.eps
        self.gain = nn.Parameter(torch.empty(head_dim))

    def init_weights(self) -> None:
        assert self.gain is not None
        nn.init.ones_(self.gain)

    def scale(self, x: Tensor) -> Tensor:
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        return torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        assert self.gain is not None
        return (x * self.scale(x) * self.gain).to(x.dtype)  # (..., hs)


# The names are those of training/config.py's QK_NORMS.
QK_NORMS: dict[str, type] = {"none": NoNorm, "lp": LpNorm, "rms": RMSNorm}


class Alpha(nn.Module):
    """The learnable positive logit scale of Lp QK-norm (eq. 15): one a layer, or one a head.

    `alpha_map` takes the free parameter `raw` to alpha: exp, softplus, or linear, which is |raw|.
    """

    def __init__(self, config: LpQKNormConfig, n_head: int, head_dim: int, block_size: int):
        super().__init__()
        self.alpha_map = config.alpha_map
        self.initial = initial_alpha(config, head_dim, block_size)
        self.raw = nn.Parameter(torch.empty(n_head if config.alpha_per == "head" else 1))

    def init_weights(self) -> None:
        # softplus(y) = a at y = a + log(1 - exp(-a))
        a = self.initial
        inverse = {"exp": math.log(a), "softplus": a + math.log(-math.expm1(-a)), "linear": a}
        nn.init.constant_(self.raw, inverse[self.alpha_map])

    def forward(self) -> Tensor:
        maps: dict[str, Callable[[Tensor], Tensor]] = {"exp": torch.exp, "softplus": F.softplus, "linear": torch.abs}
        alpha = maps[self.alpha_map](self.raw)
        return alpha[:, None, None]  # (nh or 1, 1, 1)


def initial_alpha(config: LpQKNormConfig, head_dim: int, block_size: int) -> float:
    """The alpha that a run starts from.

    henry: log2(L^2 - L) for the context length L (Henry et al. 2020). sqrt_d: sqrt(hs), the scale that makes p = 2
    equal to RMS QK-norm. matched: for every p the spread of the initial logits that sqrt_d gives at p = 2.
    """
    if config.alpha_init == "henry":
        return math.log2(block_size**2 - block_size)
    if config.alpha_init == "sqrt_d":
        return math.sqrt(head_dim)
    if config.alpha_init == "matched":
        return math.sqrt(head_dim) / mean_norm_ratio(config.p, head_dim) ** 2
    assert isinstance(config.alpha_init, float)
    return config.alpha_init


@functools.lru_cache
def mean_norm_ratio(p: float, head_dim: int) -> float:
    """E[g], g = ||x||_2 / ||x||_p, for x ~ N(0, 1)^head_dim: logits are alpha cos(q, k) g(q) g(k).

    Measured on 16384 vectors of a fixed seed: good to about 0.1 %.
    """
    x = torch.randn(16384, head_dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return (torch.linalg.vector_norm(x, 2, -1) / torch.linalg.vector_norm(x, p, -1)).mean().item()


# -----------------------------------------------------------------------------
# Dropout and the attention product


def dropout(x: Tensor, p: float) -> Tensor:
    """Zero each element with probability p and scale the rest by 1 / (1 - p).

    On a CPU F.dropout draws its mask serially, a third of a training step. There p is rounded to one of 1/256 ..
    255/256 (0.2 becomes 0.1992, and the scale follows), and one random 64-bit integer decides for eight elements.
    """
    if p == 0 or x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(x, p)
    dropped = min(max(round(256 * p), 1), 255)
    words = torch.empty((x.numel() + 7) // 8, dtype=torch.int64)
    words.random_(torch.iinfo(torch.int64).min, None)  # all 64 bits
    keep = words.view(torch.uint8)[: x.numel()].view(x.shape) >= dropped
    return ApplyMask.apply(x, keep, 256 / (256 - dropped))


class ApplyMask(torch.autograd.Function):
    """x * keep * scale in one pass, forwards and backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(keep)
        ctx.scale = scale
        return torch.ops.aten.native_dropout_backward(x, keep, scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (keep,) = ctx.saved_tensors
        return torch.ops.aten.native_dropout_backward(grad, keep, ctx.scale), None, None


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, p_dropout: float = 0.0) -> Tensor:
    """softmax(scale q k^T) v, where query i of the T last positions sees keys 0 .. S - T + i.

    q (B, nh, T, hs), k and v (B, nh, S, hs) -> (B, nh, T, hs)
    """
    T, S = q.size(-2), k.size(-2)
    if p_dropout > 0 and q.device.type == "cpu" and not torch.compiler.is_compiling():
        # SDPA would materialise T x T too, and draw its mask serially
        att = (q * scale) @ k.transpose(-2, -1)  # (B, nh, T, S)
        att = F.softmax(att + causal_bias(T, S, att.dtype), dim=-1)
        return dropout(att, p_dropout) @ v
    if T == 1:  # one query, the last: it sees every key (is_causal would let it see key 0 alone)
        return F.scaled_dot_product_attention(q, k, v, scale=scale)
    if T == S:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=p_dropout, is_causal=True, scale=scale)
    visible = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, dropout_p=p_dropout, scale=scale)


@functools.lru_cache(maxsize=4)
def causal_bias(T: int, S: int, dtype: torch.dtype) -> Tensor:
    return torch.full((T, S), -math.inf, dtype=dtype).triu(S - T + 1)  # 0 where visible


# -----------------------------------------------------------------------------
# Attention layouts: forward(x, cache, pos), new_cache(batch, max_len), cache_bytes_per_token()


@dataclass
class KVCache:
    """Keys and values of the positions decoded so far; preallocated, written in place by the attention module."""

    k: Tensor  # (B, nh, max_len, hs)
    v: Tensor  # (B, nh, max_len, hs)


class MultiHeadAttention(nn.Module):
    """Multi-head causal self-attention. Queries and keys are normalised a head, before any position encoding."""

    def __init__(self, config: TrainConfig):
        super().__init__()
        m = config.model
        self.n_head, self.head_dim, self.p_dropout = m.n_head, m.head_dim, m.dropout
        self.c_attn = nn.Linear(m.n_embd, 3 * m.n_embd, bias=m.bias)
        self.c_proj = nn.Linear(m.n_embd, m.n_embd, bias=m.bias)
        norm = QK_NORMS[config.qk_norm.name]
        self.q_norm = norm(config.qk_norm, self.head_dim)
        self.k_norm = norm(config.qk_norm, self.head_dim)
        self.alpha: Alpha | None = None  # without it the logit scale is 1 / sqrt(hs)
        if isinstance(config.qk_norm, LpQKNormConfig):
            self.alpha = Alpha(config.qk_norm, self.n_head, self.head_dim, m.block_size)

    def forward(self, x: Tensor, cache: KVCache | None = None, pos: int = 0) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.c_attn(x).view(B, T, 3, self.n_head, self.head_dim).permute(2, 0, 3, 1, 4)  # (B, nh, T, hs)
        q, k = self.q_norm(q), self.k_norm(k)
        scale = 1 / math.sqrt(self.head_dim)
        if self.alpha is not None:  # a tensor: it goes into q, since SDPA takes a number
            q, scale = (q * self.alpha()).to(q.dtype), 1.0
        if cache is not None:
            cache.k[:, :, pos : pos + T] = k
            cache.v[:, :, pos : pos + T] = v
            k, v = cache.k[:, :, : pos + T], cache.v[:, :, : pos + T]  # (B, nh, S, hs)
        y = causal_attention(q, k, v, scale, self.p_dropout if self.training else 0.0)  # (B, nh, T, hs)
        y = self.c_proj(y.transpose(1, 2).reshape(B, T, C))
        return dropout(y, self.p_dropout) if self.training else y

    def new_cache(self, batch: int, max_len: int, dtype: torch.dtype) -> KVCache:
        shape = (batch, self.n_head, max_len, self.head_dim)
        device = self.c_attn.weight.device
        return KVCache(*(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)))

    def cache_bytes_per_token(self, dtype: torch.dtype) -> int:
        return 2 * self.n_head * self.head_dim * dtype.itemsize

    def flops_per_token(self, context: int) -> int:
        """Training FLOPs of q k^T and att v for one token that sees `context` keys: 2 products, 2 FLOPs, 3 passes."""
        return 12 * self.n_head * self.head_dim * context


ATTENTIONS: dict[str, type] = {"mha": MultiHeadAttention}

# -----------------------------------------------------------------------------
# The transformer


class LayerNorm(nn.Module):
    """Layer normalisation with an optional bias."""

    def __init__(self, ndim: int, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(ndim))
        self.bias = nn.Parameter(torch.empty(ndim)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class MLP(nn.Module):
    def __init__(self, config: TrainConfig):
        super().__init__()
        m = config.model
        self.p_dropout = m.dropout
        self.c_fc = nn.Linear(m.n_embd, 4 * m.n_embd, bias=m.bias)
        self.c_proj = nn.Linear(4 * m.n_embd, m.n_embd, bias=m.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.c_proj(F.gelu(self.c_fc(x)))  # (B, T, 4C) inside
        return dropout(x, self.p_dropout) if self.training else x


class Block(nn.Module):
    def __init__(self, config: TrainConfig):
        super().__init__()
        self.ln_1 = LayerNorm(config.model.n_embd, config.model.bias)
        self.attn = ATTENTIONS[config.attention.name](config)
        self.ln_2 = LayerNorm(config.model.n_embd, config.model.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cache: KVCache | None = None, pos: int = 0) -> Tensor:
        x = x + self.attn(self.ln_1(x), cache, pos)
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    """The modules of a GPT, under the names that they have in GPT-2's and nanoGPT's checkpoints."""

    def __init__(self, config: TrainConfig, vocab_size: int):
        super().__init__()
        m = config.model
        self.wte = nn.Embedding(vocab_size, m.n_embd)
        self.wpe = nn.Embedding(m.block_size, m.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(m.n_layer))
        self.ln_f = LayerNorm(m.n_embd, m.bias)


class GPT(nn.Module):
    """A GPT language model with nanoGPT's structure; the output layer shares the token embedding's weights."""

    def __init__(self, config: TrainConfig, vocab_size: int):
        super().__init__()
        self.config, self.vocab_size, self.block_size = config, vocab_size, config.model.block_size
        self.transformer = Transformer(config, vocab_size)

    def forward(
        self,
        idx: Tensor,
        targets: Tensor | None = None,
        caches: list[KVCache] | None = None,
        pos: int = 0,
        last_only: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Logits, and with targets the mean cross-entropy in nats.

        idx (B, T) tokens at positions pos .. pos+T-1; targets (B, T), -1 is ignored; caches hold the positions before
        pos and take up the new ones; last_only gives the last position's logits alone. -> (B, T or 1, V), ()
        """
        T = idx.size(1)
        assert pos + T <= self.block_size, f"{pos + T} positions are more than block_size={self.block_size}"
        positions = torch.arange(pos, pos + T, device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(positions)  # (B, T, C)
        if self.training:
            x = dropout(x, self.config.model.dropout)
        for i, block in enumerate(self.transformer.h):
            x = block(x, None if caches is None else caches[i], pos)
        x = self.transformer.ln_f(x[:, -1:] if last_only else x)
        logits = F.linear(x, self.transformer.wte.weight)  # (B, T, V)
        if targets is None:
            return logits, None
        exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = F.cross_entropy(exact.flatten(0, 1), targets.flatten(), ignore_index=-1)
        return logits, loss

    # Initialisation

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Set every parameter from `seed`: normal(0, 0.02), residual projections divided by sqrt(2 n_layer) (GPT-2)."""
        for parameter in self.parameters():
            nn.init.constant_(parameter, math.nan)
        g = torch.Generator(next(self.parameters()).device).manual_seed(seed)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                residual = name.endswith("c_proj")
                std = INIT_STD / math.sqrt(2 * self.config.model.n_layer) if residual else INIT_STD
                nn.init.normal_(module.weight, std=std, generator=g)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, LayerNorm):
                nn.init.ones_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, NoNorm | Alpha):
                module.init_weights()
        missed = [name for name, parameter in self.named_parameters() if parameter.isnan().any()]
        assert not missed, f"init_weights leaves out {missed}"

    @property
    def expected_initial_loss(self) -> float:
        """Nats a token. At init the logits are nearly independent N(0, C std^2): ln V plus half that variance."""
        return math.log(self.vocab_size) + 0.5 * self.config.model.n_embd * INIT_STD**2

    # Cost accounting

    @property
    def attentions(self) -> list[Any]:
        """The attention modules, first layer first."""
        return [block.attn for block in self.transformer.h]

    def num_params(self, non_embedding: bool = False) -> int:
        """Number of parameters; as in nanoGPT, non_embedding leaves out the position embedding alone."""
        total = sum(p.numel() for p in self.parameters())
        return total - self.transformer.wpe.weight.numel() if non_embedding else total

    def flops_per_token(self) -> int:
        """Training FLOPs a token, forward and backward: 6 N + 12 L C T (PaLM, appendix B; nanoGPT's estimate_mfu)."""
        attention = sum(attn.flops_per_token(self.block_size) for attn in self.attentions)
        return 6 * self.num_params(non_embedding=True) + attention

    def new_caches(self, batch: int, max_len: int, dtype: torch.dtype) -> list[KVCache]:
        return [attn.new_cache(batch, max_len, dtype) for attn in self.attentions]

    def cache_bytes_per_token(self, dtype: torch.dtype) -> int:
        return sum(attn.cache_bytes_per_token(dtype) for attn in self.attentions)
