"""The compiled kernels of a CPU against the operations of model/gpt.py in float64, and what happens without them."""

import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY
from torch import Tensor
from torch.nn import functional as F
from variants import build, config_of, random_tokens

from core.device import cpu_flags
from model import cpu_kernels, gpt
from model.generate import decode_one_token
from model.options import MLAOptions
from sweeps.plan import compose
from training.config import load_config

NORMS = [0.0, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0]  # p, and 0 for RMS
NAMES = ["rms", *(f"lp{p:g}" for p in NORMS[1:])]
ULP = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7}


@pytest.fixture(autouse=True)
def compiled() -> None:
    assert cpu_kernels.library() is not None, "a C++ compiler is needed"


def compiled_norm(x: Tensor, p: float, factor: Tensor | None) -> Tensor:
    if p:
        return cpu_kernels.lp(x, p, factor)
    return cpu_kernels.rms(x, x.new_ones(x.size(-1)) if factor is None else factor, 1e-6)


def exact_norm(x: Tensor, p: float, factor: Tensor | None) -> Tensor:
    y = gpt.Normalise.apply(x, p) if p else gpt.DivideByRMS.apply(x, 1e-6)
    return y if factor is None else y * factor


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def leaves(*tensors: Tensor) -> Any:
    """The same values, of which derivatives are taken."""
    return [x.detach().requires_grad_() for x in tensors]


# qkv's heads as they lie, heads first, channels apart, fewer dimensions
LAYOUTS: dict[str, Callable[[int], Tensor]] = {
    "of qkv": lambda n: draw(2, 5, 4 * n).view(2, 5, 4, n).transpose(1, 2)[:, 1:],
    "dense": lambda n: draw(2, 3, 5, n),
    "channels apart": lambda n: draw(2, 3, n, 5).transpose(2, 3),
    "two dimensions": lambda n: draw(7, n),
    "one": lambda n: draw(n),
    "one for all heads": lambda n: draw(2, 1, 5, n).expand(2, 3, 5, n),
    "strides that tie": lambda n: draw(n, 1).t().unsqueeze(1).expand(1, 3, n),
    "none": lambda n: draw(2, 0, 5, n),
}


@pytest.mark.parametrize("dtype", ULP, ids=["fp32", "bf16"])
@pytest.mark.parametrize("n", [1, 7, 32, 40, 128, 2048])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("p", NORMS, ids=NAMES)
def test_norm_derivative_and_scale_are_the_operations(p: float, layout: str, n: int, dtype: torch.dtype) -> None:
    x = LAYOUTS[layout](n).to(dtype)
    factors: list[Tensor | None] = [0.5 + draw(n, seed=1).abs()] if p == 0 else [None]
    if p and x.ndim == 4:
        factors += [0.5 + draw(k, 1, 1, seed=1).abs() for k in (1, x.size(1))]
    for factor in factors:
        grad = draw(*x.shape, seed=2).to(dtype)
        a, b = x.detach().requires_grad_(), x.detach().double().requires_grad_()
        w = None if factor is None else factor.clone().requires_grad_()
        w64 = None if factor is None else factor.double().requires_grad_()
        y, exact = compiled_norm(a, p, w), exact_norm(b, p, w64)
        assert y.dtype == dtype and y.shape == x.shape
        assert_near(y, exact, ULP[dtype])
        with torch.no_grad():
            assert torch.equal(compiled_norm(x, p, factor), y)
        y.backward(grad)
        exact.backward(grad.double())
        assert a.grad is not None and b.grad is not None
        # a vector's derivative may cancel (one channel: to zero) from terms of the size that dy and the scale have
        size = (grad.double() * exact.detach()).abs().amax(-1, keepdim=True) / b.detach().abs().amax(-1, keepdim=True)
        assert ((a.grad.double() - b.grad).abs() <= ULP[dtype] * b.grad.abs() + 40 * 2.0**-23 * size * n**0.5).all()
        if w is not None and w64 is not None:
            assert w.grad is not None and w64.grad is not None
            torch.testing.assert_close(w.grad.double(), w64.grad, rtol=1e-5, atol=1e-5)
    s = cpu_kernels.lp_scale(x, p) if p else cpu_kernels.rms_scale(x, 1e-6)
    norm = torch.linalg.vector_norm(x.double(), p, -1, keepdim=True)
    exact_s = 1 / norm if p else gpt.inverse_rms(x.double(), 1e-6)
    assert s.shape == exact_s.shape and s.dtype == torch.float32
    torch.testing.assert_close(s.double(), exact_s, rtol=1e-6, atol=0)


@pytest.mark.parametrize("p", [0.0, 3.0])
def test_a_factor_that_does_not_fit_is_refused(p: float) -> None:
    for shape in ((7,), (2, 1, 1), (4, 1, 1), (3,)) if p else ((7,), (1,), (8, 1)):
        with pytest.raises(ValueError, match="does not fit"):
            compiled_norm(draw(2, 3, 5, 8), p, torch.ones(shape))
    with pytest.raises(ValueError, match="does not fit"):
        compiled_norm(draw(3, 8), p, torch.ones(3, 1, 1))


def assert_near(y: Tensor, exact: Tensor, ulp: float) -> None:
    """To half a unit of its type, and what fp32 loses on the way."""
    assert ((y.double() - exact).abs() <= (0.51 * ulp + 16 * 2.0**-24) * exact.abs() + 1e-30).all()


@pytest.mark.parametrize("p", NORMS, ids=NAMES)
def test_zeros_and_extremes(p: float) -> None:
    """A vector at or below 1e-30 is a zero vector to Lp; no power over- or underflows; a number that is none spreads
    over its vector alone."""
    rows = [torch.zeros(64), draw(64) * 1e-31, draw(64) * 1e-20, draw(64) * 1e30, draw(64)]
    x = torch.stack([row if p else row * 1e-12 for row in rows]).requires_grad_()  # RMS squares fp32 as it is
    y = compiled_norm(x, p, None)
    y.backward(draw(5, 64, seed=1))
    assert x.grad is not None and x.grad.isfinite().all() and y.isfinite().all()
    exact = exact_norm(x.detach().double(), p, None)
    assert_near(y[2:], exact[2:], ULP[torch.float32])
    assert (y[0] == 0).all()
    if p:
        assert (y[:2] == 0).all() and (x.grad[:2] == 0).all()
        assert (cpu_kernels.lp_scale(x.detach(), p)[:2] == 0).all()
    bad = draw(3, 64)
    bad[0, 5], bad[2, 63] = torch.nan, torch.inf
    y = compiled_norm(bad, p, None)
    assert y[1].isfinite().all() and y[0].isnan().any() and y[2].isnan().any()
    assert torch.equal(y[1:2], compiled_norm(bad[1:2], p, None))


@pytest.mark.parametrize("p", NORMS, ids=NAMES)
def test_a_vector_has_one_result_whatever_is_beside_it_and_however_many_threads(p: float) -> None:
    """Groups of vectors, chunks of groups, and threads must not show."""
    x, grad = draw(3, 4, 150, 48), draw(3, 4, 150, 48, seed=1)
    factor = 0.5 + draw(48 if p == 0 else 4, seed=2).abs()
    results = []
    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            a, w = x.clone().requires_grad_(), factor.clone().requires_grad_()
            y = compiled_norm(a, p, w.view(4, 1, 1) if p else w)
            y.backward(grad)
        finally:
            torch.set_num_threads(before)
        assert a.grad is not None and w.grad is not None
        results.append((y.detach(), a.grad, w.grad))
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))
    alone = compiled_norm(x[1:2, 2:3, 7:8], p, factor[2].view(1, 1, 1) if p else factor)
    assert torch.equal(alone, results[0][0][1:2, 2:3, 7:8])


def test_a_gradient_of_a_gradient_is_refused() -> None:
    x = draw(3, 8).requires_grad_()
    (grad,) = torch.autograd.grad(cpu_kernels.lp(x, 3.0).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("dtype", ULP, ids=["fp32", "bf16"])
@pytest.mark.parametrize("nh,n,rank", [(16, 128, 512), (3, 5, 7), (1, 1, 1)])
def test_both_products_of_a_token_with_the_up_projection(nh: int, n: int, rank: int, dtype: torch.dtype) -> None:
    w, q, latent = draw(nh, n, rank).to(dtype), draw(1, nh, 1, n, seed=1).to(dtype), draw(1, 1, rank, seed=2).to(dtype)
    q_latent, k = cpu_kernels.fold(w, q, latent, True)
    alone, none = cpu_kernels.fold(w, q, latent, False)
    assert none is None and torch.equal(alone, q_latent) and k is not None and k.dtype == torch.float32
    exact_q, exact_k = q.double().transpose(0, 1)[..., 0, :] @ w.double(), w.double() @ latent.double()[0, 0]
    assert q_latent.shape == (1, nh, 1, rank) and q_latent.dtype == dtype and k.shape == (1, nh, 1, n)
    torch.testing.assert_close(k[0, :, 0].double(), exact_k, rtol=0, atol=1e-6 * rank)
    torch.testing.assert_close(q_latent[0, :, 0].double(), exact_q[:, 0], rtol=ULP[dtype], atol=1e-6 * n)
    apart = w.flatten(0, 1).t().contiguous().t().view(nh, n, rank)
    assert torch.equal(cpu_kernels.fold(apart, q, latent, False)[0], q_latent)


@pytest.mark.parametrize("norm,calls", [("none", 0), ("rms", 4), ("lp", 4), ("layernorm", 4)])
def test_decoding_takes_them(norm: str, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [
        "attention=mla",
        "model.position=rope",
        "attention.kv_rank=8",
        "attention.nope_dim=4",
        "attention.rope_dim=4",
    ]
    config = load_config(compose([*TINY, *words, "attention.v_dim=4", "model.rope_theta=10000", f"qk_norm={norm}"]))
    model = gpt.GPT(config, vocab_size=11)
    model.init_weights(0)
    seen: list[str] = []

    def spied(name: str) -> Callable[..., Any]:
        real = getattr(cpu_kernels, name)

        def spy(*args: Any) -> Any:
            seen.append(name)
            return real(*args)

        return spy

    for name in ("fill_norm", "fold"):
        monkeypatch.setattr(cpu_kernels, name, spied(name))
    with torch.no_grad():
        model.eval()
        caches = model.new_caches(1, 8, torch.float32)
        model(torch.tensor([[1, 2, 3]]), caches=caches)
        seen.clear()
        decode_one_token(model, torch.tensor([4]), caches, 3)
    assert seen.count("fold") == config.model.n_layer
    # the latent's own norm; those of queries and keys, each in two blocks
    assert seen.count("fill_norm") == config.model.n_layer * (1 + calls)


# -----------------------------------------------------------------------------
# Dropout


def splitmix(seed: int, words: int) -> np.ndarray:
    """The generator as it is published, a loop over its state: (8 words,) bytes."""
    state, mask, drawn = seed % 2**64, 2**64 - 1, []
    for _ in range(words):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        drawn.append(z ^ (z >> 31))
    return np.array(drawn, dtype="<u8").view(np.uint8)


def test_random_bytes_are_those_of_splitmix64() -> None:
    known = splitmix(0, 3).view("<u8").tolist()
    assert known == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    for seed in (0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF):
        expected = splitmix(seed, 50)
        assert np.array_equal(gpt.random_bytes(seed, 50).numpy(), expected)
        rows = gpt.random_bytes(seed, 8, torch.tensor([[0, 8], [3, 42]])).numpy()
        assert rows.shape == (2, 2, 64)
        for first, row in zip((0, 8, 3, 42), rows.reshape(4, 64), strict=True):
            assert np.array_equal(row, expected[8 * first : 8 * first + 64])


# -----------------------------------------------------------------------------
# Attention

needs_bf16 = pytest.mark.skipif(
    "avx512_bf16" not in cpu_flags() or not cpu_kernels.library().has_attention(),
    reason="attention is compiled for AVX-512 bf16; elsewhere the operations serve",
)
SHAPES = {  # B, nh, nkv, T, dk, dv
    "one": (1, 1, 1, 1, 16, 16),
    "short": (2, 3, 3, 17, 48, 16),
    "nano": (2, 4, 4, 64, 32, 32),
    "baby": (2, 6, 6, 256, 64, 64),
    "gqa": (2, 4, 2, 100, 32, 80),
    "mqa": (1, 4, 1, 333, 64, 128),
    "mla": (1, 2, 2, 130, 192, 128),
    "long": (1, 2, 1, 1100, 16, 32),  # products in parts
}


def heads(B: int, n: int, T: int, d: int, seed: int, pad: int = 0) -> Tensor:
    """(B, n, T, d) in bf16 as projections leave it: heads side by side, other channels between them."""
    x = draw(B, T, n * d + pad, seed=seed).bfloat16()[..., pad:]
    return x.unflatten(-1, (n, d)).transpose(1, 2)


def exact_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, factor: Tensor | float = 1.0) -> Tensor:
    """By the definition, with what dropout multiplies the probabilities with."""
    k, v = (x.repeat_interleave(q.size(1) // k.size(1), 1) for x in (k, v))
    hidden = torch.ones(q.size(2), q.size(2), dtype=torch.bool).triu(1)
    return ((q @ k.transpose(-2, -1) * scale).masked_fill(hidden, -torch.inf).softmax(-1) * factor) @ v


attention: Callable[..., Tensor] = cpu_kernels.attention
by_definition: Callable[..., Tensor] = exact_attention
residual: Callable[..., Tensor] = gpt.residual


@needs_bf16
@pytest.mark.parametrize("dropped", [0, 51])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_attention_and_its_derivative_are_the_definition(shape: tuple[int, ...], dropped: int) -> None:
    """Also the mask: an element's byte is that of its place in (B, nh, T, T rounded up to 64)."""
    B, nh, nkv, T, dk, dv = shape
    q, k, v = heads(B, nh, T, dk, 0, 3), heads(B, nkv, T, dk, 1), heads(B, nkv, T, dv, 2, 1)
    grad, scale, seed = heads(B, nh, T, dv, 3), 1.7 / dk**0.5, -(2**62) + 5
    assert cpu_kernels.serves_attention(q, k, v)
    inputs, exact_inputs = leaves(q, k, v), leaves(q.double(), k.double(), v.double())
    padded = -(-T // 64) * 64
    drawn = torch.from_numpy(splitmix(seed, B * nh * T * padded // 8).astype(np.int64)) if dropped else torch.zeros(1)
    factor = (drawn >= dropped).double() * 256 / (256 - dropped)
    factor = factor.view(B, nh, T, padded)[..., :T] if dropped else factor
    y, exact = attention(*inputs, scale, dropped, seed), by_definition(*exact_inputs, scale, factor)
    assert y.shape == exact.shape and y.dtype == torch.bfloat16 and y.transpose(1, 2).is_contiguous()
    y.backward(grad)
    exact.backward(grad.double())
    gradients = [(a.grad, b.grad) for a, b in zip(inputs, exact_inputs, strict=True)]
    for mine, theirs in ((y, exact), *gradients):
        assert mine is not None and theirs is not None
        error, size = (mine.double() - theirs).norm(), theirs.norm()
        assert error < 3.5e-3 * size + 1e-6 * T  # roundings to bf16 of 2^-9 each; of one position dq and dk are 0
    with torch.no_grad():
        assert torch.equal(cpu_kernels.attention(q, k, v, scale, dropped, seed), y)
    for other in (grad.transpose(2, 3).contiguous().transpose(2, 3), grad.contiguous(), grad[:, :1].expand_as(grad)):
        however_it_lies = (
            torch.autograd.grad(attention(*inputs, scale, dropped, seed), inputs, g)
            for g in (other, other.clone(memory_format=torch.contiguous_format))
        )
        assert all(torch.equal(a, b) for a, b in zip(*however_it_lies, strict=True))


@needs_bf16
@pytest.mark.parametrize("dropped", [0, 51])
def test_attention_with_the_operations_masks_is_the_operations(dropped: int) -> None:
    """From one state of the generator: compiled and as operations, in bf16, forwards and backwards."""
    q, k, v, grad = (heads(2, 3, 150, 32, i) for i in range(4))
    results = []
    attends: list[Callable[..., Tensor]] = [gpt.causal_attention, gpt.CPUAttention.apply]
    for attend in attends:
        torch.manual_seed(5)
        inputs = leaves(q, k, v)
        y = attend(*inputs, 0.3, dropped / 256)
        results.append([y, *torch.autograd.grad(y, inputs, grad), torch.get_rng_state()])
    *compiled, state = results[0]
    *operations, other_state = results[1]
    assert torch.equal(state, other_state)
    for a, b in zip(compiled, operations, strict=True):
        assert (a - b).float().norm() < 6e-3 * b.float().norm()


@needs_bf16
def test_attention_has_one_result_whatever_is_beside_it_and_however_many_threads() -> None:
    q, k, v, grad = heads(3, 4, 150, 32, 0), heads(3, 2, 150, 32, 1), heads(3, 2, 150, 32, 2), heads(3, 4, 150, 32, 3)
    results = []
    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            inputs = leaves(q, k, v)
            y = attention(*inputs, 0.2, 51, 7)
            results.append([y.detach(), *torch.autograd.grad(y, inputs, grad)])
        finally:
            torch.set_num_threads(before)
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))
    whole = cpu_kernels.attention(q, k, v, 0.2, 0, 0)
    assert torch.equal(cpu_kernels.attention(q[1:2, 2:4], k[1:2, 1:], v[1:2, 1:], 0.2, 0, 0), whole[1:2, 2:4])
    for T in (1, 20, 64, 100):  # what comes later does not show
        part = cpu_kernels.attention(q[:, :, :T], k[:, :, :T], v[:, :, :T], 0.2, 0, 0)
        assert torch.equal(part, whole[:, :, :T])
    later = k.clone()
    later[:, :, 77:] *= -3
    assert torch.equal(cpu_kernels.attention(q, later, v, 0.2, 0, 0)[:, :, :77], whole[:, :, :77])


@needs_bf16
def test_logits_that_exp_cannot_take_and_numbers_that_are_none() -> None:
    q, k, v = (heads(1, 1, 70, 16, i) for i in range(3))
    for factor in (100.0, 1e7):
        large = leaves(q * factor, k * factor, v)
        y = attention(*large, 10.0, 0, 0)
        expected = exact_attention(large[0].double(), large[1].double(), v.double(), 10.0)
        torch.testing.assert_close(y.double(), expected, rtol=2.0**-8, atol=1e-2)
        y.sum().backward()
        assert all(x.grad.isfinite().all() for x in large)
    q = q.clone()
    q[0, 0, 40, 3] = torch.nan
    y = cpu_kernels.attention(q, k, v, 0.25, 0, 0)
    assert y[0, 0, 40].isnan().all() and y[0, 0, :40].isfinite().all() and y[0, 0, 41:].isfinite().all()


@needs_bf16
@pytest.mark.parametrize("dropped", [0, 1, 255])
def test_what_a_call_leaves_behind_does_not_show_in_the_next(dropped: int) -> None:
    """The memory in which a thread works is kept from call to call."""
    small = [heads(2, 2, 37, 48, i) for i in range(4)]
    spoilt = [torch.full((2, 2, 500, 96), torch.nan).bfloat16() for _ in range(4)]

    def outcome(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
        inputs = leaves(q, k, v)
        y = attention(*inputs, 0.3, dropped, 3)
        return [y.detach(), *torch.autograd.grad(y, inputs, grad)]

    before = outcome(*small)
    assert all(x.isnan().all() for x in outcome(*spoilt))
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(outcome(*small), before, strict=True))


@needs_bf16
def test_what_attention_is_not_compiled_for_is_left_to_the_operations() -> None:
    q = heads(1, 2, 8, 16, 0)
    assert cpu_kernels.serves_attention(q, q, q)
    odd = heads(1, 2, 8, 24, 0)
    assert not cpu_kernels.serves_attention(odd, odd, q)
    assert not cpu_kernels.serves_attention(q.float(), q, q)
    assert not cpu_kernels.serves_attention(q.transpose(2, 3).contiguous().transpose(2, 3), q, q)
    assert not cpu_kernels.serves_attention(q, q[:, :, :7], q[:, :, :7])
    assert not cpu_kernels.serves_attention(q, heads(1, 2, 8, 32, 0), q)
    assert not cpu_kernels.serves_attention(q[:, :, :0], q[:, :, :0], q[:, :, :0])


# -----------------------------------------------------------------------------
# Between a block's matrix products


@pytest.mark.parametrize("dtype", ULP, ids=["fp32", "bf16"])
@pytest.mark.parametrize("n", [1, 48, 64, 100, 384, 3000])
@pytest.mark.parametrize("norm", ["layernorm", "layernorm without a bias", "rmsnorm"])
def test_norm_of_a_block_and_its_derivative(norm: str, n: int, dtype: torch.dtype) -> None:
    x, grad = 3 * draw(3, 37, n) + 1, draw(3, 37, n, seed=1).to(dtype)
    weight, bias = draw(n, seed=2), draw(n, seed=3)
    inputs = [x, weight, *([bias] if norm == "layernorm" else [])]
    mine, exact = ([t.detach().to(to).requires_grad_() for t in inputs] for to in (torch.float32, torch.float64))
    y = cpu_kernels.layer_norm(mine[0], mine[1], mine[2] if len(mine) == 3 else None, 1e-5, norm != "rmsnorm", dtype)
    if norm == "rmsnorm":
        expected = F.rms_norm(exact[0], (n,), exact[1], 1e-5)
    else:
        expected = F.layer_norm(exact[0], (n,), exact[1], exact[2] if len(exact) == 3 else None, 1e-5)
    assert y.dtype == dtype and y.shape == x.shape
    torch.testing.assert_close(y.double(), expected, rtol=0.51 * ULP[dtype], atol=5e-6)
    y.backward(grad)
    expected.backward(grad.double())
    for a, b in zip(mine, exact, strict=True):
        assert a.grad is not None and b.grad is not None
        if n > 1 or a is not mine[0]:  # one channel's x does not matter: its derivative is the round-off of its terms
            size = max(1, b.grad.abs().amax().item())
            torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-4, atol=2e-5 * size)


@pytest.mark.parametrize("dtype", ULP, ids=["fp32", "bf16"])
@pytest.mark.parametrize("p", [0.0, 0.2])
def test_the_residual_sum_is_the_operations(p: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """From one state of the generator the same elements are dropped, and backwards the same."""
    x, y, grad = draw(5, 41, 100), draw(5, 41, 100, seed=1).to(dtype), draw(5, 41, 100, seed=2)
    results = []
    for operations in (False, True):
        if operations:
            monkeypatch.setattr(cpu_kernels, "library", lambda: None)
        torch.manual_seed(3)
        inputs = leaves(x, y)
        out = residual(*inputs, p)
        results.append([out.detach(), *torch.autograd.grad(out, inputs, grad)])
        assert ("Residual" in str(out.grad_fn)) != operations
    (out, dx, dy), (other, other_dx, other_dy) = results
    exact = x.double() + y.double() * (dy != 0) * (256 / 205 if p else 1)
    torch.testing.assert_close(out.double(), exact, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out, other, rtol=0, atol=4 * ULP[dtype])
    assert torch.equal(dx, grad) and torch.equal(other_dx, grad)
    assert dy.dtype == dtype and torch.equal(dy == 0, other_dy == 0)
    torch.testing.assert_close(dy, other_dy, rtol=ULP[dtype], atol=0)
    assert (dy == 0).float().mean().item() == pytest.approx(51 / 256 if p else 0, abs=0.01)


def test_dropout_is_the_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit; gradients may lie anyhow."""
    x, grad = draw(5, 41, 100), draw(5, 100, 41, seed=1).mT
    results = []
    for operations in (False, True):
        if operations:
            monkeypatch.setattr(cpu_kernels, "library", lambda: None)
        torch.manual_seed(3)
        (leaf,) = leaves(x)
        out = gpt.dropout(leaf, 0.2)
        assert ("Dropout" in str(out.grad_fn)) != operations
        results.append([out, *torch.autograd.grad(out, leaf, grad)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert (results[0][0] == 0).float().mean().item() == pytest.approx(51 / 256, abs=0.01)


def test_gelu_of_every_bf16_number() -> None:
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    x = x[x.isfinite() & (x.abs() < 1e30)].requires_grad_()
    exact_x = x.detach().double().requires_grad_()
    y, exact = cpu_kernels.gelu(x), F.gelu(exact_x)
    torch.testing.assert_close(y.double(), exact, rtol=0.51 * ULP[torch.bfloat16], atol=3e-6)
    y.sum().backward()
    exact.sum().backward()
    assert x.grad is not None and exact_x.grad is not None
    torch.testing.assert_close(x.grad.double(), exact_x.grad, rtol=0.51 * ULP[torch.bfloat16], atol=6e-7)
    assert cpu_kernels.gelu(torch.tensor([torch.nan]).bfloat16()).isnan().all()


def test_gradients_that_do_not_lie_densely() -> None:
    x, y = leaves(draw(50, 64), draw(50, 64, seed=1).bfloat16())
    for grad in (torch.ones(1, 1).expand(50, 64), draw(64, 50).t()):
        for out in (
            cpu_kernels.residual(x, y, 51, 0),
            cpu_kernels.layer_norm(x, torch.ones(64), None, 1e-5, True, torch.float32),
        ):
            one, two = (
                torch.autograd.grad(out, x, g, retain_graph=True)[0]
                for g in (grad, grad.clone(memory_format=torch.contiguous_format))
            )
            assert torch.equal(one, two)


def test_what_a_block_is_not_compiled_for_is_left_to_the_operations() -> None:
    x, weight, bias = draw(300, 64), torch.ones(64), torch.zeros(64)
    half = torch.bfloat16
    assert cpu_kernels.serves_layer_norm(x, (weight, bias), half) and cpu_kernels.serves_block(x, x.bfloat16())
    assert cpu_kernels.serves_layer_norm(x, (weight, None), torch.float32)
    for parameters in ((weight.bfloat16(),), (weight.double(),), (weight[:63],), (weight, bias[:1]), (bias[None],)):
        assert not cpu_kernels.serves_layer_norm(x, parameters, half)
    assert not cpu_kernels.serves_layer_norm(x, (torch.ones(128)[::2],), half)
    assert not cpu_kernels.serves_layer_norm(x, (weight.to("meta"),), half)
    assert not cpu_kernels.serves_layer_norm(x, (weight,), torch.float16)
    assert not cpu_kernels.serves_layer_norm(x.bfloat16(), (weight,), half)
    assert not cpu_kernels.serves_block(x, x[:1]) and not cpu_kernels.serves_block(x.t())
    assert not cpu_kernels.serves_block(x.half(), x.half()) and not cpu_kernels.serves_block(x[:2])
    torch.testing.assert_close(gpt.residual(x, x[:1], 0.0), x + x[:1])
    norm = gpt.BlockLayerNorm(64)
    with torch.autocast("cpu", torch.float16):
        torch.testing.assert_close(norm(x).float(), F.layer_norm(x, (64,)), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("dropped", [1, 255])
def test_extreme_dropout(dropped: int) -> None:
    x, y = draw(300, 64), 1 + draw(300, 64, seed=1).abs()
    kept = torch.from_numpy(splitmix(8, 300 * 8).astype(np.int64)).view(300, 64) >= dropped
    out = cpu_kernels.residual(x, y, dropped, 8)
    torch.testing.assert_close(out, x + kept * y * 256 / (256 - dropped), rtol=1e-6, atol=1e-6)
    assert 0 < kept.sum() < kept.numel()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_block_has_one_result_however_many_threads(threads: int) -> None:
    x, y, grad = draw(300, 128), draw(300, 128, seed=1).bfloat16(), draw(300, 128, seed=2)
    before = torch.get_num_threads()

    def outcome() -> list[Tensor]:
        inputs = leaves(x, y, torch.ones(128))
        out = cpu_kernels.residual(inputs[0], cpu_kernels.gelu(inputs[1]), 51, 9)
        out = cpu_kernels.layer_norm(out, inputs[2], None, 1e-5, True, torch.float32)
        return [out.detach(), *torch.autograd.grad(out, inputs, grad)]

    expected = outcome()
    torch.set_num_threads(threads)
    try:
        assert all(torch.equal(a, b) for a, b in zip(outcome(), expected, strict=True))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("layout", ["mha", "gqa", "mqa", "mla"])  # LayerNorm with mha, RMSNorm with the others
def test_a_model_learns_alike_with_and_without(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five updates in bf16 with dropout: every kernel is used, the masks are the same, the losses agree."""
    monkeypatch.setattr(cpu_kernels, "SMALL", 0)
    attention = MLAOptions(kv_rank=16, nope_dim=16, rope_dim=16, v_dim=16) if layout == "mla" else layout
    config = config_of(attention, "rms", dropout=0.2, n_embd=64)
    idx = random_tokens(4, 17)
    losses = []
    used: set[str] = set()
    kernels = {"fill_block_norm", "fill_pointwise", "fill_norm"}
    kernels |= {"fill_attention"} if "avx512_bf16" in cpu_flags() else set()
    for name in kernels:
        monkeypatch.setattr(cpu_kernels, name, spy_on(cpu_kernels, name, used))
    for operations in (False, True):
        if operations:
            monkeypatch.setattr(cpu_kernels, "library", lambda: None)
        model = build(config, dtype=torch.float32).train()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        of_run = []
        for step in range(5):
            torch.manual_seed(step)
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(idx[:, :-1], idx[:, 1:])[1]
            loss.backward()
            sgd.step()
            sgd.zero_grad()
            of_run.append(loss.item())
        losses.append(of_run)
        assert used == (set() if operations else kernels)
        used.clear()
    assert losses[0] == pytest.approx(losses[1], abs=0.01) and losses[0][0] - losses[0][-1] > 0.05


def test_checkpointing_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16 with dropout: what is made anew has the same masks."""
    monkeypatch.setattr(cpu_kernels, "SMALL", 0)
    idx, results = random_tokens(4, 17), []
    for checkpointing in (False, True):
        config = config_of("mha", "rms", dropout=0.2, n_embd=64, activation_checkpointing=checkpointing)
        model = build(config, dtype=torch.float32).train()
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(idx[:, :-1], idx[:, 1:])[1]
        assert loss is not None
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def spy_on(module: Any, name: str, used: set[str]) -> Callable[..., Any]:
    real = getattr(module, name)

    def spy(*args: Any) -> Any:
        used.add(name)
        return real(*args)

    return spy


@pytest.mark.parametrize("kernel", ["gelu", "residual", "dropout", "layer_norm", "attention"])
def test_no_kernel_has_a_second_derivative(kernel: str) -> None:
    x = draw(1, 2, 16, 16).requires_grad_()
    half = x.bfloat16()
    if kernel == "attention" and not cpu_kernels.serves_attention(half, half, half):
        pytest.skip("attention is compiled for AVX-512 bf16")
    y = {
        "gelu": lambda: cpu_kernels.gelu(half),
        "residual": lambda: cpu_kernels.residual(x, half, 51, 0),
        "dropout": lambda: cpu_kernels.dropout(x, 51, 0),
        "layer_norm": lambda: cpu_kernels.layer_norm(x, torch.ones(16), None, 1e-5, True, torch.float32),
        "attention": lambda: cpu_kernels.attention(half, half, half, 0.25, 0, 0),
    }[kernel]()
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


# -----------------------------------------------------------------------------
# The library


@pytest.mark.skipif(platform.machine() != "x86_64", reason="compiled for an older x86")
def test_the_kernels_without_avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled for a CPU with AVX2 alone they are the same, but for attention, which the operations serve."""
    flags = ["-march=x86-64-v3" if flag == "-march=native" else flag for flag in cpu_kernels.FLAGS]
    monkeypatch.setattr(cpu_kernels, "FLAGS", flags)
    older = cpu_kernels.library.__wrapped__()
    assert older is not None and not older.has_attention()
    monkeypatch.setattr(cpu_kernels, "library", lambda: older)
    q = heads(1, 2, 8, 16, 0)
    assert not cpu_kernels.serves_attention(q, q, q)
    test_gelu_of_every_bf16_number()
    for dtype in ULP:
        for n in (1, 100, 384):
            for norm in ("layernorm", "rmsnorm"):
                test_norm_of_a_block_and_its_derivative(norm, n, dtype)
            for p in NORMS:
                test_norm_derivative_and_scale_are_the_operations(p, "of qkv", n, dtype)
        with monkeypatch.context() as patch:
            test_the_residual_sum_is_the_operations(0.2, dtype, patch)
        test_both_products_of_a_token_with_the_up_projection(3, 5, 7, dtype)


LEARNS = """
import sys, torch
from model import gpt, cpu_kernels
from sweeps.plan import compose
from training.config import load_config
torch.set_num_threads(1)
norm, *words = sys.argv[1:]
config = load_config(compose([*words, "model.dropout=0", "qk_norm=" + norm]))
model = gpt.GPT(config, vocab_size=11)
model.init_weights(0)
idx = torch.randint(11, (4, 17), generator=torch.Generator().manual_seed(0))
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    loss = model(idx[:, :-1], idx[:, 1:])[1]
    loss.backward()
    sgd.step()
    sgd.zero_grad()
print(cpu_kernels.library() is not None, loss.item())
"""


def learn(norm: str, **environment: str) -> tuple[bool, float, str]:
    """Whether the norms are compiled, the loss of five updates, and what was said."""
    done = subprocess.run([sys.executable, "-c", LEARNS, norm, *TINY], cwd=ROOT, env={**os.environ, **environment},
                          check=True, capture_output=True, text=True)  # fmt: skip
    compiled, loss = done.stdout.split()
    return compiled == "True", float(loss), done.stderr


@pytest.mark.parametrize("norm", ["rms", "lp"])
def test_without_a_compiler_the_operations_learn_the_same(norm: str) -> None:
    compiled, loss, said = learn(norm)
    without, same, nothing = learn(norm, CXX="no-such-compiler")
    assert compiled and not without and not said and not nothing
    assert loss == pytest.approx(same, rel=1e-5)


def test_a_compiler_that_fails_is_named_once_and_the_operations_serve(tmp_path: Path) -> None:
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho no space left >&2\nexit 1\n")
    broken.chmod(0o755)
    compiled, loss, said = learn("lp", CXX=str(broken))
    assert not compiled and loss == pytest.approx(learn("lp")[1], rel=1e-5)
    assert said.count("model/cpu_*.cpp cannot be used") == 1 and "no space left" in said


def test_processes_that_compile_at_once_keep_one_library(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from model import cpu_kernels; assert cpu_kernels.library() is not None"]
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    running = [subprocess.Popen(command, cwd=ROOT, env=env) for _ in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    (library,) = (tmp_path / "nanoqk").iterdir()
    began = library.stat().st_mtime_ns
    subprocess.run(command, cwd=ROOT, env=env, check=True)
    assert library.stat().st_mtime_ns == began  # it was taken as it is


def test_where_nothing_can_be_kept_it_is_compiled_for_the_process(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    compiled, _, said = learn("lp", XDG_CACHE_HOME=str(tmp_path / "file"))
    assert compiled and not said


def test_a_damaged_library_is_replaced(tmp_path: Path) -> None:
    assert learn("lp", XDG_CACHE_HOME=str(tmp_path))[0]
    (library,) = (tmp_path / "nanoqk").iterdir()
    library.write_bytes(b"")
    compiled, _, said = learn("lp", XDG_CACHE_HOME=str(tmp_path))
    assert compiled and not said and library.stat().st_size > 0


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert not os.access(cpu_kernels.cache_folder(), os.W_OK)
