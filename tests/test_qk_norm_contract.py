"""The QK normalisation contract, qk-norm-v1: FALSIFY-QKN-001 ... 007 and KANI-QKN-001, -002 by these names.

The contract speaks of RMSNorm over a head's channels. LayerNorm is held to the same relations for its centred vector,
Lp norms to their own: p-norm 1. Each rule is tested on the norms alone, in fp32 over many magnitudes, and on the
queries and keys that the attention product of every layout gets.

Shapes: B batch, nh heads, T positions, hs channels a head.
"""

import copy
import functools
import math
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import z3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from torch import Tensor
from variants import NORMS, PAIRS, attended, build, config_of, raw_queries_and_keys

from model.gpt import GPT, QK_NORMS, LayerNorm, MultiHeadLatentAttention, QKNorm, RMSNorm
from model.ops import TINY
from model.options import LayerNormOptions, LpNormOptions, QKNormOptions, RMSNormOptions

pytestmark = pytest.mark.usefixtures("each_implementation")

U = 2.0**-24  # unit round-off of fp32
EPS = [1e-12, 1e-6, 1e-2, 1.0]
PS = [1.0, 1.5, 2.0, 3.0, 4.0, 7.3, math.inf]
PROPERTY = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
FEW = settings(PROPERTY, max_examples=3)
each_norm = pytest.mark.parametrize("name", NORMS)
each_mean_norm = pytest.mark.parametrize("name", ["rms", "layernorm"])
each_lp = pytest.mark.parametrize("name", [name for name in NORMS if name.startswith("lp")])
each_pair = pytest.mark.parametrize("layout, name", PAIRS)

# RMSNorm squares x in fp32, so that the contract's relations need |x| < 1.8e19 / sqrt(hs); beyond, the output is 0.
LARGEST = 2.0**59


def new_norm(config: QKNormOptions, d: int, n_head: int = 1, gain: bool = False) -> Any:
    """A QK norm over d channels, of gain 1 or (gain) of random gains; learned p differ from head to head."""
    norm = QK_NORMS[config.name](config, d, n_head)
    norm.init_weights()
    g = torch.Generator().manual_seed(d)
    with torch.no_grad():
        for name, parameter in norm.named_parameters():
            if gain or name != "gain":
                parameter.add_(torch.randn(parameter.shape, generator=g))
    return norm


def mean_norm(name: str, d: int, eps: float, gain: bool = False) -> Any:
    return new_norm({"rms": RMSNormOptions, "layernorm": LayerNormOptions}[name](eps=eps), d, gain=gain)


@st.composite
def vectors(draw: st.DrawFn, most: int = 96) -> Tensor:
    """(hs,) fp32: components of any magnitudes side by side, or of one magnitude with an offset."""
    d = draw(st.integers(1, most))
    if draw(st.booleans()):
        values = npst.arrays(np.float32, d, elements=st.floats(-LARGEST, LARGEST, width=32))
        return torch.from_numpy(draw(values))
    x = torch.randn(d, generator=torch.Generator().manual_seed(draw(st.integers(0, 2**32))))
    return (x + draw(st.sampled_from([0.0, 0.0, 3.0, 1e4]))) * 2.0 ** draw(st.integers(-60, 40))


def as_heads(x: Tensor) -> Tensor:
    return x[None, None, None]  # (hs,) -> (B, nh, T, hs)


def moment(x: Tensor, name: str) -> tuple[float, float]:
    """m, the float64 mean of squares of what is divided, and how far, relative to sqrt(m), fp32 can be off in it.

    LayerNorm's mean is off by round-off of the largest |x|, which may exceed what is left after centring.
    """
    z = x.double() - (x.double().mean() if name == "layernorm" else 0)
    off = (x.numel() + 2) * U * x.abs().max().item() if name == "layernorm" else 0.0
    return z.square().mean().item(), off


def mean_square(y: Tensor) -> float:
    return y.double().square().mean().item()


# -----------------------------------------------------------------------------
# What each head's query and key are, in every layout: the raw projections from the weights, and what attention gets


def gpt_of(layout: str, name: str, seed: int = 0, magnitude: float = 1.0, gain: bool = False) -> GPT:
    """Float64, alpha = 1; gains of 1 or (gain) random; the projections to q and k scaled."""
    gpt = build(config_of(layout, name, n_layer=1), seed)
    attn = gpt.attentions[0]
    with torch.no_grad():
        if attn.logit_scale.alpha is not None:
            attn.logit_scale.alpha.raw.zero_()  # alpha = exp(raw)
        for norm in (m for m in attn.modules() if isinstance(m, QKNorm)):
            if norm.gain is not None and not gain:
                norm.gain.fill_(1.0)
        for projection in ("c_attn", "c_q", "c_kv_a", "c_kv_b"):
            if hasattr(attn, projection):
                getattr(attn, projection).weight.mul_(magnitude)
    return gpt


def queries_and_keys(gpt: GPT, x: Tensor) -> tuple[Tensor, Tensor]:
    """q (B, nh, 1, dk) and k (B, nkv, 1, dk) of x (B, 1, C) at position 0, where RoPE turns nothing."""
    q, k, _, scale = attended(gpt, x)
    assert gpt.attentions[0].logit_scale.alpha is None or scale == 1.0
    return q, k


def blocks(gpt: GPT, *tensors: Tensor) -> Iterator[list[Tensor]]:
    """The channel ranges that are normalised on their own: the head, or MLA's content and RoPE blocks."""
    attn = gpt.attentions[0]
    if isinstance(attn, MultiHeadLatentAttention) and not attn.unified:
        yield [t[..., : attn.nope_dim] for t in tensors]
        yield [t[..., attn.nope_dim :] for t in tensors]
    else:
        yield list(tensors)


def norms_of(gpt: GPT) -> Iterator[list[Any]]:
    """[q's norm, k's norm] of each of `blocks`."""
    attn = gpt.attentions[0]
    yield [attn.q_norm, attn.k_norm]
    if hasattr(attn, "q_rope_norm"):
        yield [attn.q_rope_norm, attn.k_rope_norm]


def normalised_blocks(gpt: GPT, x: Tensor) -> Iterator[tuple[Any, Tensor, Tensor]]:
    """(norm, raw, normalised) of the queries' and the keys' blocks, raw and normalised (B, nh or nkv, 1, hs)."""
    pairs = zip(raw_queries_and_keys(gpt.attentions[0], x), queries_and_keys(gpt, x), strict=True)
    for i, (raw, y) in enumerate(pairs):
        for norms, (raw_block, block) in zip(norms_of(gpt), blocks(gpt, raw, y), strict=True):
            yield norms[i], raw_block, block


def inputs(seed: int) -> Tensor:
    return torch.randn(3, 1, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def p_of(norm: Any, n_head: int) -> Any:
    """p as a number, or a learned p as (nh, 1)."""
    return norm.p if isinstance(norm.p, float) else norm.p.detach()[..., 0].expand(n_head, 1)


def p_norm(y: Tensor, p: Any) -> Tensor:
    """(..., hs) -> (...), p a number or a tensor that broadcasts with the result."""
    if isinstance(p, float):
        return torch.linalg.vector_norm(y.double(), p, -1)
    return (y.double().abs() ** p.double()[..., None]).sum(-1) ** (1 / p.double())


seeds = st.integers(0, 2**32)
magnitudes = st.integers(-12, 12).map(lambda e: 10.0**e)


# -----------------------------------------------------------------------------
# FALSIFY-QKN-001: unit RMS


@each_mean_norm
@PROPERTY
@given(x=vectors(), eps=st.sampled_from(EPS))
def test_falsify_qkn_001_rms_squared_is_m_over_m_plus_eps(name: str, x: Tensor, eps: float) -> None:
    """FALSIFY-QKN-001: with unit weight the output's RMS is 1."""
    # The contract says "approx 1", which is false unless mean(x^2) >> eps. Exactly: RMS^2 = m / (m + eps).
    y = mean_norm(name, x.numel(), eps)(as_heads(x))
    m, off = moment(x, name)
    off /= math.sqrt(m + eps)
    tolerance = (x.numel() + 8) * U * m / (m + eps) + 2 * off + off * off
    assert abs(mean_square(y) - m / (m + eps)) <= tolerance + 1e-37


@each_lp
@PROPERTY
@given(x=vectors())
def test_falsify_qkn_001_lp_outputs_have_p_norm_1(name: str, x: Tensor) -> None:
    """FALSIFY-QKN-001: for Lp norms, unit p-norm; there is no eps. A vector below 1e-30 is a zero vector."""
    norm = new_norm(NORMS[name], x.numel())
    y = norm(as_heads(x))
    expected = 1.0 if x.abs().max() >= TINY else 0.0
    assert p_norm(y, p_of(norm, 1)).item() == pytest.approx(expected, rel=(x.numel() + 16) * U)


@each_pair
@FEW
@given(seed=seeds, magnitude=magnitudes)
def test_falsify_qkn_001_in_every_layout(layout: str, name: str, seed: int, magnitude: float) -> None:
    """FALSIFY-QKN-001: what attention multiplies has, per head and block, the relation of its norm."""
    gpt = gpt_of(layout, name, seed, magnitude)
    for norm, raw, y in normalised_blocks(gpt, inputs(seed)):
        if name == "none":
            torch.testing.assert_close(y, raw, rtol=1e-11, atol=1e-11 * raw.abs().max().item())
        elif name.startswith("lp"):
            size = p_norm(y, p_of(norm, y.size(1)))
            torch.testing.assert_close(size, torch.ones_like(size), rtol=1e-11, atol=0)
        else:
            m = (raw - raw.mean(-1, keepdim=True) if name == "layernorm" else raw).square().mean(-1)
            torch.testing.assert_close(y.square().mean(-1), m / (m + norm.eps), rtol=1e-10, atol=0)


# -----------------------------------------------------------------------------
# FALSIFY-QKN-002: bounded amplitude


@each_mean_norm
@PROPERTY
@given(x=vectors(), eps=st.sampled_from(EPS))
def test_falsify_qkn_002_outputs_are_within_weight_times_root_d(name: str, x: Tensor, eps: float) -> None:
    """FALSIFY-QKN-002: |output_i| <= |weight_i| sqrt(d / eps)."""
    # The contract's bound is vacuous: sqrt(1 / eps) is 1000 at the default eps. The tight one is |weight_i| sqrt(d).
    d = x.numel()
    norm = mean_norm(name, d, eps, gain=True)
    y, w = norm(as_heads(x)).flatten(), norm.gain
    assert w is not None
    assert (y.abs() <= w.abs() * math.sqrt(d) * (1 + (d + 8) * U)).all()
    assert (y.abs() <= w.abs() * math.sqrt(d / eps) * (1 + (d + 8) * U)).all()  # implied, as here eps <= 1


@pytest.mark.parametrize("d", [1, 2, 64, 96])
def test_falsify_qkn_002_the_tight_bound_is_attained_by_one_hot_vectors(d: int) -> None:
    """FALSIFY-QKN-002: so that no smaller bound holds; and for eps > 1 the contract's own bound does not."""
    one_hot = torch.zeros(d)
    one_hot[d // 2] = 2.0**40
    norm = mean_norm("rms", d, 1e-6, gain=True)
    assert norm.gain is not None
    y, bound = norm(as_heads(one_hot)).flatten(), norm.gain.detach().abs() * math.sqrt(d)
    assert y[d // 2].abs().item() == pytest.approx(bound[d // 2].item(), rel=4 * U)
    large_eps = mean_norm("rms", d, 4.0)(as_heads(one_hot)).abs().max().item()
    assert large_eps > math.sqrt(d / 4.0)  # the contract should ask for eps <= 1
    # LayerNorm's components sum to 0 before the gain, and its tight bound is |weight_i| sqrt(d - 1)
    centred = mean_norm("layernorm", d, 1e-6)(as_heads(one_hot)).abs().max().item()
    assert centred == pytest.approx(math.sqrt(d - 1), rel=8 * U)


@pytest.mark.parametrize("d, value", [(43, 390169.0), (96, 1e8), (3, 0.1), (7, 1e17)])
def test_falsify_qkn_002_layernorm_of_a_constant_vector_is_bounded(d: int, value: float) -> None:
    """FALSIFY-QKN-002: what centring leaves there is round-off, which eps does not dwarf; it counts as the vector."""
    assert mean_norm("layernorm", d, 1e-12)(torch.full((1, 1, 1, d), value)).abs().max() <= math.sqrt(d) * (1 + 99 * U)


@each_lp
@PROPERTY
@given(x=vectors())
def test_falsify_qkn_002_lp_outputs_are_within_1(name: str, x: Tensor) -> None:
    """FALSIFY-QKN-002: for Lp norms, |output_i| <= 1: no component exceeds the p-norm. One-hot vectors attain it."""
    norm = new_norm(NORMS[name], x.numel())
    assert norm(as_heads(x)).abs().max() <= 1 + 4 * U
    assert norm(as_heads(torch.eye(x.numel())[0] * 3)).abs().max() == 1


@each_pair
@FEW
@given(seed=seeds, magnitude=magnitudes)
def test_falsify_qkn_002_in_every_layout(layout: str, name: str, seed: int, magnitude: float) -> None:
    """FALSIFY-QKN-002: |gain_i| sqrt(d) for every block of d channels, or 1 for Lp norms; so logits are bounded."""
    gpt = gpt_of(layout, name, seed, magnitude, gain=True)
    for norm, _, y in normalised_blocks(gpt, inputs(seed)):
        if name != "none":  # unbounded: that is what it is for
            bound = 1.0 if norm.gain is None else norm.gain.abs() * math.sqrt(y.size(-1))
            assert (y.abs() <= bound * torch.tensor(1 + 1e-12)).all()


# -----------------------------------------------------------------------------
# FALSIFY-QKN-003: idempotent


@each_mean_norm
@PROPERTY
@given(x=vectors(), eps=st.sampled_from(EPS))
def test_falsify_qkn_003_a_second_application_divides_by_a_known_number(name: str, x: Tensor, eps: float) -> None:
    """FALSIFY-QKN-003: with unit weight, applying the norm twice is applying it once."""
    # "approx" holds only where m >> eps (and eps << 1). Exactly: with m1 = m / (m + eps), the second output is the
    # first one over sqrt(m1 + eps), and its RMS^2 is m1 / (m1 + eps).
    d = x.numel()
    norm = mean_norm(name, d, eps)
    once = norm(as_heads(x))
    twice = norm(once)
    m1, off = moment(once, name)
    # LayerNorm centres again: exactly the first output has no mean, in fp32 it has round-off of one
    residue = once.double().mean().item() if name == "layernorm" else 0.0
    expected = (once.double() - residue) / math.sqrt(m1 + eps)
    slack = (d + 8) * U * expected.abs().max().item() + 2 * off / math.sqrt(m1 + eps)
    torch.testing.assert_close(twice.double(), expected, rtol=0, atol=slack + 1e-37)
    assert mean_square(twice) == pytest.approx(m1 / (m1 + eps), rel=(d + 8) * U + 4 * off / math.sqrt(m1 + eps))
    m, off = moment(x, name)
    if m > 1e8 * eps and eps <= 1e-6 and off < 1e-3 * math.sqrt(m):  # the contract's statement, where it is true
        torch.testing.assert_close(twice, once, rtol=0, atol=2e-6 * math.sqrt(d))


def test_falsify_qkn_003_is_not_idempotent_where_the_mean_square_is_eps() -> None:
    """FALSIFY-QKN-003: the case that "approx" hides."""
    norm = mean_norm("rms", 64, 1e-6)
    once = norm(torch.full((1, 1, 1, 64), 1e-3))
    assert mean_square(once) == pytest.approx(1 / 2, rel=1e-5)
    assert mean_square(norm(once)) == pytest.approx(1, rel=1e-5)


@each_lp
@PROPERTY
@given(x=vectors())
def test_falsify_qkn_003_lp_norms_are_idempotent(name: str, x: Tensor) -> None:
    """FALSIFY-QKN-003: Lp norms, without an eps, are: up to round-off."""
    norm = new_norm(NORMS[name], x.numel())
    once = norm(as_heads(x))
    torch.testing.assert_close(norm(once), once, rtol=(x.numel() + 16) * U, atol=1e-37)


@each_pair
def test_falsify_qkn_003_in_every_layout(layout: str, name: str) -> None:
    """FALSIFY-QKN-003: the module's own norms, applied once more to what its attention multiplies."""
    gpt = gpt_of(layout, name)
    for norm, raw, y in normalised_blocks(gpt, inputs(0)):
        if name in ("rms", "layernorm"):
            m = (raw - raw.mean(-1, keepdim=True) if name == "layernorm" else raw).square().mean(-1, keepdim=True)
            m1 = m / (m + norm.eps)
            torch.testing.assert_close(norm(y), y / (m1 + norm.eps).sqrt(), rtol=1e-11, atol=1e-12)
        elif y.size(1) == raw.size(1) and (name != "lp_learned" or norm.p.size(0) == y.size(1)):
            torch.testing.assert_close(norm(y), y, rtol=1e-12, atol=0)


# -----------------------------------------------------------------------------
# FALSIFY-QKN-004: zero stability


@each_norm
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@PROPERTY
@given(d=st.integers(1, 96), zeros=st.lists(st.sampled_from([0.0, -0.0]), min_size=1, max_size=4))
def test_falsify_qkn_004_zero_maps_to_zero(name: str, dtype: torch.dtype, d: int, zeros: list[float]) -> None:
    """FALSIFY-QKN-004: RMSNorm(0, w) = 0. For every norm, whatever the gain, with finite gradients and scale."""
    norm = new_norm(NORMS[name], d, gain=True)
    x = torch.tensor(zeros, dtype=dtype)[None, None, :, None].repeat(1, 1, 1, d)
    x = torch.cat([x, torch.ones_like(x)], 2).requires_grad_()  # zero vectors among others
    y = norm(x)
    assert (y[:, :, : len(zeros)] == 0).all() and y.dtype == dtype
    assert name == "layernorm" or (y[:, :, len(zeros) :] != 0).all()
    assert norm.scale(x).isfinite().all()
    (gradient,) = torch.autograd.grad(y.float().sum(), x)
    assert gradient.isfinite().all()


@each_pair
def test_falsify_qkn_004_in_every_layout(layout: str, name: str) -> None:
    """FALSIFY-QKN-004: a zero input has zero queries and keys, and a finite output and gradient."""
    gpt = gpt_of(layout, name, gain=True)
    x = torch.zeros(1, 5, 32, dtype=torch.float64, requires_grad=True)
    q, k, _, _ = attended(gpt, x)
    assert (q == 0).all() and (k == 0).all()
    gpt.attentions[0](x, (gpt.cos, gpt.sin) if gpt.transformer.wpe is None else None).sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


# -----------------------------------------------------------------------------
# FALSIFY-QKN-005: vectorised against scalar


def ulps(a: np.ndarray, b: np.ndarray) -> int:
    """The largest number of fp32 steps from a to b: on the integers that order the floats, with -0 and 0 the same."""
    assert a.dtype == b.dtype == np.float32 and np.isfinite(a).all() and np.isfinite(b).all()

    def ordered(x: np.ndarray) -> np.ndarray:
        bits = x.view(np.int32).astype(np.int64)
        return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)

    return int(np.abs(ordered(a) - ordered(b)).max())


def scalar_sum(terms: list[np.float32]) -> np.float32:
    """Sum in fp32 by halves: each term meets at most ceil(log2 d) additions, 7 for d = 128."""
    half = len(terms) // 2
    return terms[0] if half == 0 else scalar_sum(terms[:half]) + scalar_sum(terms[half:])


def running_sum(terms: list[np.float32]) -> np.float32:
    total = np.float32(0)
    for term in terms:
        total = total + term
    return total


def scalar_rms_norm(
    x: np.ndarray, w: np.ndarray, eps: float, total: Callable[[list[np.float32]], np.float32] = scalar_sum
) -> np.ndarray:
    """RMSNorm one number at a time, every operation rounded to fp32."""
    mean = total([a * a for a in x]) / np.float32(x.size)
    inverse = np.float32(1) / np.sqrt(mean + np.float32(eps))
    out = [a * inverse * b for a, b in zip(x, w, strict=True)]
    assert all(type(a) is np.float32 for a in out)
    return np.array(out)


@PROPERTY
@given(x=vectors(128), eps=st.sampled_from(EPS))
def test_falsify_qkn_005_vectorised_rms_norm_is_within_8_ulp_of_a_scalar_loop(x: Tensor, eps: float) -> None:
    """FALSIFY-QKN-005: SIMD matches scalar within 8 ULP."""
    # The contract names no order of additions, and a running sum is no reference: it alone can be 60 ULP off (below).
    # By halves a term meets at most 7 roundings at d = 128; terms are positive, so the sum is off by at most 7 u, and
    # the root halves that: 3.5 ULP. Mean, eps, root, quotient and two products add less than 4. The vectorised sum adds
    # up lanes and the tail in a row, which only an adversary makes err in one direction (below). Measured over these
    # and 6,000 random vectors: at most 4.
    assert scalar_distance(x, eps, scalar_sum) <= 8


def scalar_distance(x: Tensor, eps: float, total: Callable[[list[np.float32]], np.float32]) -> int:
    norm = mean_norm("rms", x.numel(), eps, gain=True)
    assert norm.gain is not None
    y = norm(as_heads(x)).detach().numpy().ravel()
    return ulps(y, scalar_rms_norm(x.numpy(), norm.gain.detach().numpy(), eps, total))


def test_falsify_qkn_005_only_an_adversary_needs_more_and_a_running_sum_is_no_reference() -> None:
    """FALSIFY-QKN-005: squares just above half an ULP of the sum so far, so that each rounding errs upwards."""
    vectorised, running = 0, 0
    for d in (103, 119, 127, 128):
        for largest in (0, d // 16 * 16 % d, d - 1):
            for share in (0.51, 0.55, 0.6):
                x = torch.full((d,), math.sqrt(share * 2 * U))
                x[largest] = 1
                vectorised = max(vectorised, scalar_distance(x, 1e-12, scalar_sum))
                running = max(running, scalar_distance(x, 1e-12, running_sum))
    # The worst for lanes of 16: 15 of the tail, 16 lanes and 8 rounds in a row, halved by the root: 20, plus 3.5 + 4.
    assert vectorised <= 27  # measured: 8
    assert running > 8  # measured: 62


@each_lp
@PROPERTY
@given(x=vectors(128))
def test_falsify_qkn_005_vectorised_lp_norms_are_near_a_scalar_loop(name: str, x: Tensor) -> None:
    """FALSIFY-QKN-005: the contract speaks of RMSNorm; Lp norms have a bound of their own."""
    # pow is good to 1 ULP in torch and in numpy, and x / max|x| enters it with a relative error of u, which the power p
    # multiplies and the root 1/p divides again; exp and log of a learned p add ln(d) / p <= 5. Measured: at most 4.
    norm = new_norm(NORMS[name], x.numel())
    p = p_of(norm, 1)
    distance = ulps(norm(as_heads(x)).detach().numpy().ravel(), scalar_lp_norm(x.numpy(), p))
    assert distance <= 16


def scalar_lp_norm(x: np.ndarray, p: Any) -> np.ndarray:
    """x / ||x||_p one number at a time, every operation rounded to fp32."""
    f32 = np.float32
    largest = max(abs(a) for a in x)
    if largest <= f32(1e-30):
        return np.zeros_like(x)
    inverse = f32(1) / largest
    u = [a * inverse for a in x]
    if p == math.inf:
        size = max(abs(a) for a in u)
    else:
        exponent = f32(float(p))
        size = scalar_sum([abs(a) ** exponent for a in u]) ** (f32(1) / exponent)
    return np.array([a * (f32(1) / size) for a in u])


# -----------------------------------------------------------------------------
# FALSIFY-QKN-006: across backends


def all_norms(norms: list[QKNorm], x: Tensor) -> list[Tensor]:
    return [norm(x) for norm in norms]


@torch.no_grad()
def test_falsify_qkn_006_backends_agree() -> None:
    """FALSIFY-QKN-006: GPU matches CPU; where there is no GPU, compiled matches eager."""
    # The contract names no tolerance. Each backend has its own order of additions, rsqrt and pow: 32 units of round-off
    # of the largest component (measured, compiled against eager: at most 5).
    norms = [new_norm(config, 64, 4, gain=True) for config in NORMS.values()]
    scales = 10.0 ** torch.linspace(-20, 12, 7)[:, None]
    x = torch.randn(3, 4, 7, 64, generator=torch.Generator().manual_seed(0)) * scales
    x[0, 0, 0] = 0
    expected = all_norms(norms, x)
    if torch.cuda.is_available():
        actual = [y.cpu() for y in all_norms([copy.deepcopy(norm).cuda() for norm in norms], x.cuda())]
    elif shutil.which("g++") is None and not os.environ.get("CI"):
        pytest.skip("torch.compile needs g++")
    else:
        actual = torch.compile(all_norms)(norms, x)
    for name, y, reference in zip(NORMS, actual, expected, strict=True):
        largest = reference.abs().amax(-1, keepdim=True)
        assert ((y - reference).abs() <= 32 * U * largest).all(), name


@torch.no_grad()
@each_pair
def test_falsify_qkn_006_gpu_and_cpu_agree_in_every_layout(layout: str, name: str) -> None:
    """FALSIFY-QKN-006: what attention multiplies on a GPU is what it multiplies on a CPU."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    gpt = gpt_of(layout, name, gain=True)
    expected = queries_and_keys(gpt, inputs(0))
    actual = queries_and_keys(copy.deepcopy(gpt).cuda(), inputs(0).cuda())
    for y, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(y.cpu(), reference, rtol=1e-11, atol=1e-12)


# -----------------------------------------------------------------------------
# FALSIFY-QKN-007: per-head independence


@each_norm
@PROPERTY
@given(n_head=st.integers(1, 6), T=st.integers(1, 3), d=st.integers(1, 96), seed=seeds, transposed=st.booleans())
def test_falsify_qkn_007_all_heads_at_once_equal_each_alone(
    name: str, n_head: int, T: int, d: int, seed: int, transposed: bool
) -> None:
    """FALSIFY-QKN-007: normalising N heads is normalising each one, bit for bit."""
    # Except where a root takes pow (p = 1.5 and 3): torch's pow of a whole SIMD register and that of a remainder differ
    # in the last place, so that the number of vectors beside this one shows. Measured: at most 3 ULP.
    norm = new_norm(NORMS[name], d, n_head, gain=True)
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(2, T, n_head, d, generator=g) * 10.0 ** torch.randint(-9, 10, (2, T, n_head, 1), generator=g)
    x = x.transpose(1, 2) if transposed else x.transpose(1, 2).contiguous()  # (B, nh, T, hs), as attention has it
    together = norm(x)
    for h in range(n_head):
        alone = copy.deepcopy(norm)
        if name == "lp_learned":
            alone.raw_p = torch.nn.Parameter(norm.raw_p[h : h + 1])
        a, b = (y.detach().contiguous().numpy() for y in (alone(x[:, h : h + 1].clone()), together[:, h : h + 1]))
        assert ulps(a, b) <= (4 if name in ("lp1.5", "lp3") else 0)


@torch.no_grad()
@each_pair
def test_falsify_qkn_007_a_heads_projection_reaches_that_head_alone(layout: str, name: str) -> None:
    """FALSIFY-QKN-007: a change of one head's rows of the projections leaves every other q and k as it is, bitwise."""
    gpt = gpt_of(layout, name, gain=True)
    attn, x = gpt.attentions[0], inputs(0)
    before = queries_and_keys(gpt, x)

    def changed(weight: Tensor, rows: slice) -> list[list[int]]:
        """The heads whose q, and whose k, differ once these rows of `weight` are others."""
        kept = weight[rows].clone()
        weight[rows] += torch.randn(kept.shape, generator=torch.Generator().manual_seed(5))
        after = queries_and_keys(gpt, x)
        weight[rows] = kept
        pairs = zip(before, after, strict=True)
        return [[h for h in range(a.size(1)) if not torch.equal(a[:, h], b[:, h])] for a, b in pairs]

    if isinstance(attn, MultiHeadLatentAttention):
        for h in range(attn.n_head):
            d = attn.nope_dim + attn.rope_dim
            assert changed(attn.c_q.weight, slice(h * d, (h + 1) * d)) == [[h], []]
            assert changed(attn.c_kv_b.weight, slice(h * attn.nope_dim, (h + 1) * attn.nope_dim)) == [[], [h]]
            first = attn.n_head * attn.nope_dim + h * attn.v_dim
            assert changed(attn.c_kv_b.weight, slice(first, first + attn.v_dim)) == [[], []]
        # The RoPE key is shared by all heads. Blockwise it leaves their content as it is.
        assert changed(attn.c_kv_a.weight, slice(attn.kv_rank, None)) == [[], [0, 1, 2, 3]]
        return
    for i in range(attn.n_head + 2 * attn.n_kv_head):
        j = i - attn.n_head
        expected = [[i], []] if j < 0 else [[], [j] if j < attn.n_kv_head else []]
        assert changed(attn.c_attn.weight, slice(i * attn.head_dim, (i + 1) * attn.head_dim)) == expected


# -----------------------------------------------------------------------------
# KANI-QKN-001 and -002: proofs over real arithmetic, for every dimension up to 8. The formula is the code's: the
# modules' own forward runs on symbols.


@functools.cache
def root_of(a: z3.ArithRef) -> z3.ArithRef:
    """One symbol for one radicand: the square root is a function."""
    return z3.FreshReal("root")


class Reals:
    """Rows of z3 reals in a tensor's place: `facts` define the roots taken, `duties` are what made them defined."""

    dtype, is_cpu = torch.float64, False

    def __init__(self, rows: list[list[z3.ArithRef]], facts: list[z3.BoolRef], duties: list[z3.BoolRef]):
        self.rows, self.facts, self.duties = rows, facts, duties

    def each(self, f: Callable[[z3.ArithRef], z3.ArithRef]) -> "Reals":
        return Reals([[f(a) for a in row] for row in self.rows], self.facts, self.duties)

    def combine(self, other: Any, f: Callable[[z3.ArithRef, z3.ArithRef], z3.ArithRef]) -> "Reals":
        """Elementwise, with rows of one element and single rows stretched."""
        if not isinstance(other, Reals):
            return self.each(lambda a: f(a, other))
        a, b = self.rows, other.rows
        shape = max(len(a), len(b)), max(len(a[0]), len(b[0]))
        rows = [
            [f(a[i % len(a)][j % len(a[0])], b[i % len(b)][j % len(b[0])]) for j in range(shape[1])]
            for i in range(shape[0])
        ]
        return Reals(rows, self.facts, self.duties)

    def __add__(self, other: Any) -> "Reals":
        return self.combine(other, lambda a, b: a + b)

    def __sub__(self, other: Any) -> "Reals":
        return self.combine(other, lambda a, b: a - b)

    def __mul__(self, other: Any) -> "Reals":
        return self.combine(other, lambda a, b: a * b)

    def to(self, dtype: torch.dtype) -> "Reals":
        return self

    def square(self) -> "Reals":
        return self.each(lambda a: a * a)

    def mean(self, dim: int, keepdim: bool) -> "Reals":
        assert dim == -1 and keepdim
        return Reals([[z3.Sum(row) / len(row)] for row in self.rows], self.facts, self.duties)

    def sum(self, dim: int, keepdim: bool) -> "Reals":
        return self.mean(dim, keepdim) * len(self.rows[0])

    def sqrt(self) -> "Reals":
        def root(a: z3.ArithRef) -> z3.ArithRef:
            r = root_of(a)
            self.duties.append(a >= 0)
            self.facts += [r >= 0, r * r == a]
            return r

        return self.each(root)

    def reciprocal(self) -> "Reals":
        self.duties.extend(a != 0 for row in self.rows for a in row)
        return self.each(lambda a: 1 / a)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> "Reals":
        assert function is torch.rsqrt
        return args[0].sqrt().reciprocal()


class Symbolic:
    """A norm's forward on `heads` vectors of d symbols x, with symbols for the gain w and for eps > 0."""

    def __init__(self, norm_class: type[RMSNorm], d: int, heads: int = 1):
        self.eps = z3.Real("eps")
        self.facts, self.duties = [self.eps > 0], []  # type: list[Any], list[Any]
        self.x = [[z3.Real(f"x{h}_{i}") for i in range(d)] for h in range(heads)]
        self.w = [z3.Real(f"w{i}") for i in range(d)]
        self.norm = norm_class(RMSNormOptions(), d, heads)
        del self.norm.gain
        self.norm.eps = self.eps

    def forward(self, rows: list[list[z3.ArithRef]], gain: list[Any] | None = None) -> list[list[z3.ArithRef]]:
        gain = [z3.RealVal(1)] * len(self.w) if gain is None else gain
        object.__setattr__(self.norm, "gain", Reals([gain], self.facts, self.duties))
        return self.norm.forward(Reals(rows, self.facts, self.duties)).rows  # type: ignore[arg-type, attr-defined]

    def proves(self, *claims: Any) -> bool:
        """Whether no real x, w and eps > 0 contradict a claim, nor make a root or a quotient undefined."""
        return all(self.always(claim) for claim in (*self.duties, *claims))

    def always(self, claim: Any) -> bool:
        solver = z3.Solver()
        solver.set("timeout", 30_000)
        solver.add(*self.facts, z3.Not(claim))
        verdict = solver.check()
        assert verdict != z3.unknown, "z3 gave up"
        return verdict == z3.unsat


def mean_of_squares(row: list[z3.ArithRef]) -> z3.ArithRef:
    return z3.Sum([a * a for a in row]) / len(row)


def unit_rms(norm_class: type[RMSNorm], d: int) -> bool:
    s = Symbolic(norm_class, d)
    (y,) = s.forward(s.x)
    (x,) = s.x
    if norm_class is LayerNorm:
        x = [a - z3.Sum(x) / d for a in x]
    m = mean_of_squares(x)
    return s.proves(mean_of_squares(y) * (m + s.eps) == m)


def zero_stability(norm_class: type[RMSNorm], d: int) -> bool:
    s = Symbolic(norm_class, d)
    (y,) = s.forward([[z3.RealVal(0)] * d], s.w)
    return s.proves(*(a == 0 for a in y))


def bounded(norm_class: type[RMSNorm], d: int) -> bool:
    s = Symbolic(norm_class, d)
    (y,) = s.forward(s.x, s.w)
    return s.proves(*(a * a <= b * b * d for a, b in zip(y, s.w, strict=True)))


dimensions = pytest.mark.parametrize("d", range(1, 9))


@dimensions
def test_kani_qkn_001_unit_rms_is_proven(d: int) -> None:
    """KANI-QKN-001: QKN-INV-001 for all real x, eps > 0: RMS^2 = m / (m + eps), with nothing undefined."""
    assert unit_rms(RMSNorm, d)


@dimensions
def test_kani_qkn_002_zero_stability_is_proven(d: int) -> None:
    """KANI-QKN-002: QKN-INV-004 for all real w, eps > 0: RMSNorm(0, w) = 0, with nothing undefined."""
    assert zero_stability(RMSNorm, d)
    assert zero_stability(LayerNorm, d)


@dimensions
def test_the_tight_amplitude_bound_is_proven(d: int) -> None:
    """Obligation 2, for all real x, w, eps > 0: |y_i| <= |w_i| sqrt(d)."""
    assert bounded(RMSNorm, d)


@dimensions
def test_per_head_independence_is_proven(d: int) -> None:
    """Obligation 7: two heads at once are each alone."""
    s = Symbolic(RMSNorm, d, heads=2)
    together = s.forward(s.x, s.w)
    alone = [s.forward([row], s.w)[0] for row in s.x]
    for h in range(2):
        assert all(s.always(a == b) for a, b in zip(together[h], alone[h], strict=True))  # defined: proven above


class ByScale(RMSNorm):
    """RMSNorm whose output is that of its scale()."""

    forward = QKNorm.forward


class EpsOutsideTheRoot(ByScale):
    def scale(self, x: Tensor) -> Tensor:
        return (x.square().mean(-1, keepdim=True).sqrt() + self.eps).reciprocal()


class NoEps(ByScale):
    def scale(self, x: Tensor) -> Tensor:
        return torch.rsqrt(x.square().mean(-1, keepdim=True))


class SumForMean(ByScale):
    def scale(self, x: Tensor) -> Tensor:
        return torch.rsqrt(x.square().sum(-1, keepdim=True) + self.eps)


class NoRoot(ByScale):
    def scale(self, x: Tensor) -> Tensor:
        return (x.square().mean(-1, keepdim=True) + self.eps).reciprocal()


@pytest.mark.parametrize("wrong", [EpsOutsideTheRoot, NoEps, SumForMean, NoRoot])
def test_wrong_formulas_are_not_provable(wrong: type[RMSNorm]) -> None:
    """The proofs can fail: each of these has a counterexample."""
    assert not unit_rms(wrong, 2)
    assert zero_stability(wrong, 2) == (wrong is not NoEps)
    assert bounded(wrong, 2) == (wrong in (EpsOutsideTheRoot, SumForMean))


def test_the_assumptions_of_the_proofs_hold_for_some_numbers_and_the_symbols_are_the_modules() -> None:
    """From facts without a model everything follows: here they have one, in which y is the module's output."""
    for norm_class in (RMSNorm, LayerNorm):
        s = Symbolic(norm_class, 3)
        (y,) = s.forward(s.x, s.w)
        x, w = torch.tensor([1.5, -2.0, 0.25]).double(), torch.tensor([0.5, -3.0, 2.0]).double()
        s.facts += [a == b for a, b in zip([*s.x[0], *s.w, s.eps], [*x.tolist(), *w.tolist(), 0.125], strict=True)]
        assert not s.always(z3.BoolVal(False))
        norm = norm_class(RMSNormOptions(eps=0.125), 3, 1).double()
        norm.gain = torch.nn.Parameter(w)
        for a, b in zip(y, norm(x).tolist(), strict=True):
            assert s.proves(a - b < 1e-12, b - a < 1e-12) and not s.proves(a - b > 1e-12)


# -----------------------------------------------------------------------------
# Lp norms: what replaces RMSNorm's obligations

each_p = pytest.mark.parametrize("p", PS)
lp_variants = pytest.mark.parametrize("p", [*PS, "learned"])


def lp(p: Any, d: int, n_head: int = 1) -> Any:
    return new_norm(LpNormOptions(p=p), d, n_head).double()


def heads_of(n_head: int, d: int, seed: int) -> Tensor:
    return torch.randn(2, n_head, 2, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@lp_variants
@FEW
@given(d=st.integers(1, 64), seed=seeds, exponent=st.integers(-80, 200), sign=st.sampled_from([-1, 1]))
def test_lp_norm_has_unit_p_norm_and_is_scale_invariant(
    p: float | str, d: int, seed: int, exponent: int, sign: int
) -> None:
    norm, x = lp(p, d, 3), heads_of(3, d, seed)
    y = norm(x)
    torch.testing.assert_close(p_norm(y, p_of(norm, 3)), torch.ones(2, 3, 2).double(), rtol=1e-12, atol=0)
    torch.testing.assert_close(norm(x * (sign * 2.0**exponent)), sign * y, rtol=1e-12, atol=0)


@lp_variants
@FEW
@given(d=st.integers(2, 64), seed=seeds)
def test_lp_norms_gradient_is_orthogonal_to_x(p: float | str, d: int, seed: int) -> None:
    norm, x = lp(p, d, 3), heads_of(3, d, seed).requires_grad_()
    (gradient,) = torch.autograd.grad((norm(x) * heads_of(3, d, seed + 1)).sum(), x)
    size = torch.linalg.vector_norm(gradient, 2, -1) * torch.linalg.vector_norm(x, 2, -1)
    assert (size > 0).all()
    assert ((gradient * x).sum(-1).abs() <= 1e-12 * size.clamp(min=1)).all()


@lp_variants
@settings(PROPERTY, max_examples=2)
@given(d=st.integers(2, 6), seed=st.integers(0, 1000))
def test_lp_norm_passes_gradcheck_in_x_and_in_a_learned_p(p: float | str, d: int, seed: int) -> None:
    norm, x = lp(p, d, 3), heads_of(3, d, seed).requires_grad_()
    if p != "learned":
        assert torch.autograd.gradcheck(norm, (x,))
        return
    raw_p = norm.raw_p.detach().requires_grad_()

    def of_both(x: Tensor, raw_p: Tensor) -> Tensor:
        return torch.func.functional_call(norm, {"raw_p": raw_p}, (x,))

    assert torch.autograd.gradcheck(of_both, (x, raw_p))


@lp_variants
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@PROPERTY
@given(d=st.integers(1, 96), exponent=st.integers(-149, -90), seed=seeds)
def test_lp_norm_is_finite_at_zero_and_at_underflow(
    p: Any, dtype: torch.dtype, d: int, exponent: int, seed: int
) -> None:
    """From zero and the smallest subnormals (2^-133 in bf16) up: output at most 1, output and gradient finite."""
    norm = new_norm(LpNormOptions(p=p), d)
    x = torch.randn(1, 1, 3, d, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    x[:, :, 0] = 0
    x = x.to(dtype).requires_grad_()
    y = norm(x)
    y.float().sum().backward()
    assert y.isfinite().all() and (y.abs() <= 1).all() and (y[:, :, 0] == 0).all()
    assert all(t.grad is not None and t.grad.isfinite().all() for t in (x, *norm.parameters()))
    present = x.detach().float().abs().amax(-1) >= 1e-30
    sizes = p_norm(y.detach(), p_of(norm, 1))[present]
    torch.testing.assert_close(sizes, torch.ones_like(sizes), rtol=2 * torch.finfo(dtype).eps + 1e-5, atol=0)


@PROPERTY
@given(d=st.integers(1, 96), seed=seeds)
def test_l2_norm_times_root_d_is_rms_norm(d: int, seed: int) -> None:
    x = heads_of(1, d, seed)
    rms = new_norm(RMSNormOptions(eps=1e-30), d).double()
    torch.testing.assert_close(lp(2.0, d)(x) * math.sqrt(d), rms(x), rtol=1e-13, atol=0)


def test_tied_maxima_share_the_derivative_of_the_maximum_norm() -> None:
    x = torch.tensor([2.0, -2.0, 1.0], requires_grad=True)
    new_norm(LpNormOptions(p=math.inf), 3)(x)[0].backward()
    torch.testing.assert_close(x.grad, torch.tensor([0.25, 0.25, 0.0]), rtol=0, atol=0)


@each_norm
@pytest.mark.parametrize("gradients", [True, False])
def test_of_a_bf16_vector_the_result_is_rounded_once(name: str, gradients: bool) -> None:
    norm = new_norm(NORMS[name], 32, n_head=4, gain=True)
    x = torch.randn(2, 4, 9, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.set_grad_enabled(gradients):
        y = norm(x)
    exact = copy.deepcopy(norm).double()(x.double())
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), exact, rtol=1.001 * 2.0**-8, atol=1e-6)
