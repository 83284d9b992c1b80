"""The operations of model/ops.py: their kernels against their references in float64."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from helpers.oracles import attention_reference, draw, heads, leaves, needs_bf16, operations_alone, splitmix
from torch import Tensor

from model import ops
from model.kernels.operators import nanoqk

pytestmark = pytest.mark.usefixtures("compiled")
NORMS = [0.0, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0]  # p, and 0 for RMS
NAMES = ["rms", *(f"lp{p:g}" for p in NORMS[1:])]
causal_attention: Callable[..., Tensor] = ops.causal_attention
dropout_add: Callable[..., Tensor] = ops.dropout_add
ULP = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7}
BOTH = pytest.mark.parametrize("dtype", ULP, ids=["fp32", "bf16"])


def assert_near(y: Tensor, exact: Tensor, ulp: float) -> None:
    """To half a unit of its dtype, and what fp32 loses on the way."""
    assert ((y.double() - exact).abs() <= (0.51 * ulp + 16 * 2.0**-24) * exact.abs() + 1e-30).all()


# -----------------------------------------------------------------------------
# Norms of vectors


def norm(x: Tensor, p: float, factor: Tensor | None) -> Tensor:
    """By ops; in float64 this is the reference."""
    if p:
        return ops.lp_norm(x, p, factor)
    return ops.rms_norm(x, x.new_ones(x.size(-1)) if factor is None else factor, 1e-6)


def compiled_norm(x: Tensor, p: float, factor: Tensor | None) -> Tensor:
    if p:
        return nanoqk.lp_norm(x, factor, p)
    return nanoqk.rms_norm(x, x.new_ones(x.size(-1)) if factor is None else factor, 1e-6)


# qkv's heads as they lie, heads first, channels apart, fewer dimensions
LAYOUTS: dict[str, Callable[[int], Tensor]] = {
    "of qkv": lambda n: draw(2, 5, 4 * n).view(2, 5, 4, n).transpose(1, 2)[:, 1:],
    "of qkv, several to a chunk": lambda n: draw(2, 50, 4 * n).view(2, 50, 4, n).transpose(1, 2)[:, 1:],
    "dense": lambda n: draw(2, 3, 5, n),
    "channels apart": lambda n: draw(2, 3, n, 5).transpose(2, 3),
    "two dimensions": lambda n: draw(7, n),
    "one": lambda n: draw(n),
    "one for all heads": lambda n: draw(2, 1, 5, n).expand(2, 3, 5, n),
    "strides that tie": lambda n: draw(n, 1).t().unsqueeze(1).expand(1, 3, n),
    "none": lambda n: draw(2, 0, 5, n),
}


@BOTH
@pytest.mark.parametrize("p, layout", [(p, a) for p in NORMS for a in LAYOUTS if p in (0, 3) or a == "of qkv"])
def test_norm_derivative_and_scale_are_the_reference(p: float, layout: str, dtype: torch.dtype) -> None:
    for n in (1, 7, 32, 40, 128, 2048):
        x = LAYOUTS[layout](n).to(dtype)
        factors: list[Tensor | None] = [0.5 + draw(n, seed=1).abs()] if p == 0 else [None]
        if p and x.ndim == 4:
            factors += [0.5 + draw(k, 1, 1, seed=1).abs() for k in (1, x.size(1))]
        for factor in factors:
            check_norm(x, p, factor)
        s = nanoqk.inverse_lp_norm(x, p) if p else nanoqk.inverse_rms(x, 1e-6)
        exact = ops.inverse_lp_norm(x.double(), p) if p else ops.inverse_rms(x.double(), 1e-6)
        assert s.shape == exact.shape and s.dtype == torch.float32
        torch.testing.assert_close(s.double(), exact, rtol=1e-6, atol=0)


def test_the_inverse_rms_is_0_where_squares_overflow() -> None:
    x = torch.tensor([1.8e19, 1.9e19])[:, None] * torch.eye(1, 32)
    for s in (nanoqk.inverse_rms(x, 1e-6), ops.inverse_rms_reference(x, 1e-6)):
        assert s[0] == pytest.approx(32**0.5 / 1.8e19) and s[1] == 0


def check_norm(x: Tensor, p: float, factor: Tensor | None, size_of_grad: float = 1.0) -> None:
    n, grad = x.size(-1), (draw(*x.shape, seed=2) * size_of_grad).to(x.dtype)
    a, b = x.detach().requires_grad_(), x.detach().double().requires_grad_()
    w = None if factor is None else factor.clone().requires_grad_()
    w64 = None if factor is None else factor.double().requires_grad_()
    y, exact = compiled_norm(a, p, w), norm(b, p, w64)
    assert y.dtype == x.dtype and y.shape == x.shape
    assert_near(y, exact, ULP[x.dtype])
    with torch.no_grad():
        assert torch.equal(compiled_norm(x, p, factor), y)
    y.backward(grad)
    exact.backward(grad.double())
    assert a.grad is not None and b.grad is not None
    # a vector's derivative may cancel (one channel: to zero) from terms of the size that dy and the scale have
    size = (grad.double() * exact.detach()).abs().amax(-1, keepdim=True) / b.detach().abs().amax(-1, keepdim=True)
    assert ((a.grad.double() - b.grad).abs() <= ULP[x.dtype] * b.grad.abs() + 40 * 2.0**-23 * size * n**0.5).all()
    if w is not None and w64 is not None:
        assert w.grad is not None and w64.grad is not None
        torch.testing.assert_close(w.grad.double(), w64.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("p", NORMS, ids=NAMES)
def test_zero_vectors_map_to_zero_and_no_power_overflows(p: float) -> None:
    """A vector at or below 1e-30 is a zero vector to Lp; no power over- or underflows; nan and inf spread over their
    vector alone; a vector has one result, whatever is beside it."""
    rows = [torch.zeros(64), draw(64) * 1e-31, draw(64) * 1e-20, draw(64) * 1e30, draw(64)]
    x = torch.stack([row if p else row * 1e-12 for row in rows]).requires_grad_()  # RMS squares fp32 as it is
    y = compiled_norm(x, p, None)
    y.backward(draw(5, 64, seed=1))
    assert x.grad is not None and x.grad.isfinite().all() and y.isfinite().all()
    assert_near(y[2:], norm(x.detach().double(), p, None)[2:], ULP[torch.float32])
    assert (y[0] == 0).all()
    if p:
        assert (y[:2] == 0).all() and (x.grad[:2] == 0).all()
        assert (nanoqk.inverse_lp_norm(x.detach(), p)[:2] == 0).all()
    bad = draw(3, 64)
    bad[0, 5], bad[2, 63] = torch.nan, torch.inf
    y = compiled_norm(bad, p, None)
    assert y[1].isfinite().all() and y[0].isnan().any() and y[2].isnan().any()
    x, factor = draw(3, 4, 150, 48), 0.5 + draw(48 if p == 0 else 4, seed=2).abs()
    whole = compiled_norm(x, p, factor.view(4, 1, 1) if p else factor)
    alone = compiled_norm(x[1:2, 2:3, 7:8], p, factor[2].view(1, 1, 1) if p else factor)
    assert torch.equal(alone, whole[1:2, 2:3, 7:8])


@pytest.mark.parametrize("p", NORMS[1:], ids=NAMES[1:])
def test_lp_norm_of_vectors_of_any_size(p: float) -> None:
    """The kernel takes powers of x itself where none over- or underflows, else of x / max|x|: 1e-29 to 1e35. Gradients
    of any size too."""
    check_norm(draw(1, 2, 65, 48) * 10 ** torch.arange(-29.0, 36.0)[:, None], p, torch.tensor([1.5]))
    x = draw(1, 2, 17, 48) * 10 ** torch.arange(-8.0, 9.0)[:, None]
    for size in (1e-25, 1e25):
        check_norm(x, p, None, size)


@BOTH
@pytest.mark.parametrize("p", NORMS, ids=NAMES)
def test_norms_do_not_depend_on_the_number_of_threads(p: float, dtype: torch.dtype) -> None:
    """With so many channels that two threads share them."""
    before, results = torch.get_num_threads(), []
    factor = 0.5 + draw(48 if p == 0 else 1, seed=2).abs()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        x, w = leaves(draw(3, 4, 150, 48).to(dtype), factor)
        y = compiled_norm(x, p, w)
        results.append([y, *torch.autograd.grad(y, (x, w), draw(3, 4, 150, 48, seed=1).to(dtype))])
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@BOTH
@pytest.mark.parametrize("gains", [None, "one", "each"])
@pytest.mark.parametrize("nh,n,rank", [(16, 128, 512), (3, 5, 7), (1, 1, 1)])
def test_absorb_is_its_reference(nh: int, n: int, rank: int, gains: str | None, dtype: torch.dtype) -> None:
    gain = {None: None, "one": draw(n, seed=3), "each": draw(nh, 1, n, seed=3)}[gains]
    w, q, latent = draw(nh, n, rank).to(dtype), draw(1, nh, 1, n, seed=1).to(dtype), draw(1, 1, rank, seed=2).to(dtype)
    with torch.no_grad():
        q_latent, k = ops.absorb(w, q, gain, latent, True)
        alone, none = ops.absorb(w.mT.contiguous().mT, q, gain, latent, False)
    assert none is None and torch.equal(alone, q_latent) and k is not None and k.dtype == torch.float32
    exact = None if gain is None else gain.double()
    exact_q, exact_k = ops.absorb(w.double(), q.double(), exact, latent.double(), True)
    assert exact_k is not None and q_latent.shape == exact_q.shape and q_latent.dtype == dtype
    torch.testing.assert_close(k.double(), exact_k, rtol=0, atol=1e-6 * rank)
    torch.testing.assert_close(q_latent.double(), exact_q, rtol=ULP[dtype], atol=1e-6 * n)


# -----------------------------------------------------------------------------
# Dropout


def test_random_bytes_are_those_of_splitmix64() -> None:
    known = splitmix(0, 3).view("<u8").tolist()
    assert known == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    for seed in (0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF):
        expected = splitmix(seed, 50)
        assert np.array_equal(ops.random_bytes(seed, 50).numpy(), expected)
        rows = ops.random_bytes(torch.tensor(seed), 8, torch.tensor([[0, 8], [3, 42]])).numpy()
        assert rows.shape == (2, 2, 64)
        for first, row in zip((0, 8, 3, 42), rows.reshape(4, 64), strict=True):
            assert np.array_equal(row, expected[8 * first : 8 * first + 64])


def test_a_seed_is_64_bits_of_the_generator() -> None:
    torch.manual_seed(5)
    seed, state = ops.draw_seed(), torch.get_rng_state()
    torch.manual_seed(5)
    assert seed == torch.empty((), dtype=torch.int64).random_(-(2**63), None)
    assert torch.equal(state, torch.get_rng_state())


@BOTH
@pytest.mark.parametrize("p,dropped", [(0.0, 0), (1 / 256, 1), (0.2, 51), (0.999, 255)])
def test_dropout_and_dropout_add_drop_what_the_reference_drops(p: float, dropped: int, dtype: torch.dtype) -> None:
    """From one state of the generator, forwards and backwards; the bytes are SplitMix64's. p=0 draws nothing."""
    x, y, grad = draw(5, 41, 100), draw(5, 41, 100, seed=1).to(dtype), draw(5, 41, 100, seed=2)
    results = []
    for context in (nullcontext, operations_alone):
        inputs = leaves(x, y)
        with context():
            torch.manual_seed(3)
            alone = ops.dropout(inputs[0], p)
            torch.manual_seed(3)
            out = dropout_add(*inputs, p)
        assert torch.equal(torch.get_rng_state(), torch.manual_seed(3).get_state()) == (p == 0)
        assert ("DropoutAdd" in repr(out)) == (context is nullcontext)
        grads = torch.autograd.grad(out, inputs, grad)
        results.append([alone, *torch.autograd.grad(alone, inputs[0], grad.mT.contiguous().mT), out.detach(), *grads])
    (alone, d_alone, out, dx, dy), (other_alone, d_other_alone, other, other_dx, other_dy) = results
    torch.manual_seed(3)
    drawn = splitmix(int(ops.draw_seed()), x.numel() // 8 + 1).astype(np.int64)[: x.numel()]
    kept, scale = torch.from_numpy(drawn).view(x.shape) >= dropped, 256 / (256 - dropped)
    torch.testing.assert_close(out.double(), x.double() + y.double() * kept * scale, rtol=1e-6, atol=1e-6 * scale)
    torch.testing.assert_close(out, other, rtol=0, atol=4 * scale * ULP[dtype])
    assert torch.equal(alone, other_alone) and torch.equal(d_alone, d_other_alone)
    assert torch.equal(dx, grad) and torch.equal(other_dx, grad)
    assert dy.dtype == dtype and torch.equal(dy == 0, other_dy == 0)
    torch.testing.assert_close(dy, other_dy, rtol=ULP[dtype], atol=0)


# -----------------------------------------------------------------------------
# Attention

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


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, *dropout: Any) -> Tensor:
    return nanoqk.attention(q, k, v, scale, 0.0, *dropout)[0]


@needs_bf16
@pytest.mark.parametrize("dropped", [0, 51])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_attention_and_its_derivative_are_the_definition(shape: tuple[int, ...], dropped: int) -> None:
    """Also the mask: an element's byte is that of its place in (B, nh, T, T rounded up to 64)."""
    B, nh, nkv, T, dk, dv = shape
    q, k, v = heads(B, nh, T, dk, 0, 3), heads(B, nkv, T, dk, 1), heads(B, nkv, T, dv, 2, 1)
    grad, scale, seed = heads(B, nh, T, dv, 3), 1.7 / dk**0.5, -(2**62) + 5
    inputs, exact_inputs = leaves(q, k, v), leaves(q.double(), k.double(), v.double())
    padded = -(-T // 64) * 64
    drawn = torch.from_numpy(splitmix(seed, B * nh * T * padded // 8).astype(np.int64)) if dropped else torch.zeros(1)
    factor = (drawn >= dropped).double() * 256 / (256 - dropped)
    factor = factor.view(B, nh, T, padded)[..., :T] if dropped else factor
    settings = scale, dropped, torch.tensor(seed)
    y, exact = attention(*inputs, *settings), attention_reference(exact_inputs, scale, factor)
    assert y.shape == exact.shape and y.dtype == torch.bfloat16 and y.transpose(1, 2).is_contiguous()
    y.backward(grad)
    exact.backward(grad.double())
    gradients = [(a.grad, b.grad) for a, b in zip(inputs, exact_inputs, strict=True)]
    for mine, theirs in ((y, exact), *gradients):
        assert mine is not None and theirs is not None
        error, size = (mine.double() - theirs).norm(), theirs.norm()
        assert error < 3.5e-3 * size + 1e-6 * T  # roundings to bf16 of 2^-9 each; of one position dq and dk are 0
    with torch.no_grad():
        assert torch.equal(attention(q, k, v, *settings), y)
    assert torch.equal(attention(q.mT.contiguous().mT, k, v, *settings), y)


@needs_bf16
@pytest.mark.parametrize("dropped", [0, 51])
def test_attention_with_the_operations_masks_is_the_operations(dropped: int) -> None:
    """From one state of the generator: kernel and reference, in bf16, forwards and backwards."""
    q, k, v, grad = (heads(2, 3, 150, 32, i) for i in range(4))
    results = []
    for context in (nullcontext, operations_alone):
        torch.manual_seed(5)
        inputs = leaves(q, k, v)
        with context():
            y = causal_attention(*inputs, 0.3, dropped / 256)
        assert ("Blocked" in str(y.grad_fn)) == (context is operations_alone)
        results.append([y, *torch.autograd.grad(y, inputs, grad), torch.get_rng_state()])
    (*compiled, state), (*operations, other_state) = results
    assert torch.equal(state, other_state)
    for a, b in zip(compiled, operations, strict=True):
        assert (a - b).float().norm() < 6e-3 * b.float().norm()


@needs_bf16
def test_attention_has_one_result_whatever_is_beside_it_or_comes_later() -> None:
    q, k, v = heads(3, 4, 150, 32, 0), heads(3, 2, 150, 32, 1), heads(3, 2, 150, 32, 2)
    whole = ops.causal_attention(q, k, v, 0.2)
    assert torch.equal(ops.causal_attention(q[1:2, 2:4], k[1:2, 1:], v[1:2, 1:], 0.2), whole[1:2, 2:4])
    for T in (1, 20, 64, 100):
        assert torch.equal(ops.causal_attention(q[:, :, :T], k[:, :, :T], v[:, :, :T], 0.2), whole[:, :, :T])
    later = k.clone()
    later[:, :, 77:] *= -3
    assert torch.equal(ops.causal_attention(q, later, v, 0.2)[:, :, :77], whole[:, :, :77])


@needs_bf16
def test_logits_that_exp_cannot_take_and_nan() -> None:
    q, k, v = (heads(1, 1, 70, 16, i) for i in range(3))
    for factor in (100.0, 1e7):
        large = leaves(q * factor, k * factor, v)
        y = causal_attention(*large, 10.0)
        expected = attention_reference([x.double() for x in large], 10.0)
        torch.testing.assert_close(y.double(), expected, rtol=2.0**-8, atol=1e-2)
        y.sum().backward()
        assert all(x.grad.isfinite().all() for x in large)
    q = q.clone()
    q[0, 0, 40, 3] = torch.nan
    y = ops.causal_attention(q, k, v, 0.25)
    assert y[0, 0, 40].isnan().all() and y[0, 0, :40].isfinite().all() and y[0, 0, 41:].isfinite().all()


@needs_bf16
@pytest.mark.parametrize("dropped", [0, 1, 255])
def test_what_a_call_leaves_behind_does_not_show_in_the_next(dropped: int) -> None:
    """The memory in which a thread works is kept from call to call."""

    def outcome(*given: Tensor) -> list[Tensor]:
        inputs = leaves(*given[:3])
        y = attention(*inputs, 0.3, dropped, torch.tensor(3))
        return [y.detach(), *torch.autograd.grad(y, inputs, given[3])]

    small = [heads(2, 2, 37, 48, i) for i in range(4)]
    before = outcome(*small)
    assert all(x.isnan().all() for x in outcome(*(torch.full((2, 2, 500, 96), torch.nan).bfloat16() for _ in range(4))))
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(outcome(*small), before, strict=True))


LATENTS = {  # B, nh, S, kr, dr
    "one position": (2, 16, 1, 64, 16), "an odd number": (1, 4, 37, 32, 2), "three parts": (2, 12, 2500, 64, 16),
    "two groups of heads": (1, 20, 1030, 96, 32), "DeepSeek-V3's shard": (1, 16, 300, 512, 64),
    "one head": (2, 1, 70, 32, 2),
}  # fmt: skip


@needs_bf16
@pytest.mark.parametrize("norm", ["none", "blockwise", "unified"])
@pytest.mark.parametrize("shape", LATENTS.values(), ids=LATENTS)
def test_attention_over_latents_matches_its_reference(shape: tuple[int, ...], norm: str) -> None:
    """On one thread and on two, with a cache that holds more; later positions, NaN here, are not read."""
    B, nh, S, kr, dr = shape
    q, q_rope = draw(B, nh, 1, kr, seed=1).bfloat16(), draw(B, nh, 1, dr, seed=2).bfloat16()
    cached = [draw(B, S + 3, n, seed=n).bfloat16() for n in (kr, dr, nh)]
    for x in cached:
        x[:, S:] = torch.nan
    latent, k_rope, s = (x[:, :S] for x in cached)
    key_scale = None if norm == "none" else s.mT[..., None]
    given = (q, q_rope, latent, k_rope, key_scale)
    y, lse = nanoqk.latent_attention(*given, 0.3, norm == "unified")
    exact = [None if x is None else x.double() for x in given]
    reference: Any = ops.latent_attention_reference
    expected, sums = reference(*exact, None, 0.3, norm == "unified", None, True)
    assert sums is not None and y.shape == expected.shape and y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), expected, rtol=2.0**-8, atol=2.0**-8 * expected.std().item())
    torch.testing.assert_close(lse.double(), sums, rtol=1e-5, atol=1e-5)
    threads = torch.get_num_threads()
    torch.set_num_threads(2 if threads == 1 else 1)
    try:
        again = nanoqk.latent_attention(*given, 0.3, norm == "unified")
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(again[0], y) and torch.equal(again[1], lse)


@needs_bf16
def test_attention_over_latents_stays_finite_with_huge_logits_and_passes_nan_on() -> None:
    q, q_rope = 1e4 * draw(1, 3, 1, 32, seed=1).bfloat16(), torch.zeros(1, 3, 1, 2).bfloat16()
    latent, k_rope = draw(1, 1500, 32, seed=2).bfloat16(), torch.zeros(1, 1500, 2).bfloat16()
    y, lse = nanoqk.latent_attention(q, q_rope, latent, k_rope, None, 10.0, False)
    best = (q[0, :, 0].double() @ latent[0].double().T).argmax(-1)
    assert torch.equal(y[0, :, 0], latent[0, best]) and lse.isfinite().all()
    k_rope[0, :200], q_rope[:] = -torch.inf, 1  # no weight for the first 200
    y, lse = nanoqk.latent_attention(q / 1e5, q_rope, latent, k_rope, None, 1.0, False)
    left, sums = nanoqk.latent_attention(q / 1e5, q_rope, latent[:, 200:], k_rope[:, 200:], None, 1.0, False)
    torch.testing.assert_close(y, left, rtol=2.0**-7, atol=1e-3)
    torch.testing.assert_close(lse, sums, rtol=1e-6, atol=1e-6)
    q[0, 1, 0, 7] = torch.nan
    y, lse = nanoqk.latent_attention(q, q_rope, latent, k_rope[:, 200:201].expand(-1, 1500, -1), None, 0.2, False)
    assert y[0, 1].isnan().all() and lse[0, 1].isnan().all() and y[0, ::2].isfinite().all()


# -----------------------------------------------------------------------------
# Between a block's matmuls


@BOTH
@pytest.mark.parametrize("n", [1, 7, 31, 48, 64, 100, 384, 3000])
@pytest.mark.parametrize("norm", ["layernorm", "layernorm without a bias", "rmsnorm"])
def test_layer_norm_and_its_derivative_are_the_reference(norm: str, n: int, dtype: torch.dtype) -> None:
    x, grad = 3 * draw(3, 37, n) + 1, draw(3, 37, n, seed=1).to(dtype)
    inputs = [x, draw(n, seed=2), *([draw(n, seed=3)] if norm == "layernorm" else [])]
    mine, exact = ([t.detach().to(to).requires_grad_() for t in inputs] for to in (torch.float32, torch.float64))
    bias, exact_bias = (t[2] if len(t) == 3 else None for t in (mine, exact))
    y = nanoqk.layer_norm(mine[0], mine[1], bias, 1e-5, norm != "rmsnorm", dtype)
    expected = ops.residual_norm(exact[0], exact[1], exact_bias, 1e-5, norm != "rmsnorm")
    assert y.dtype == dtype and y.shape == x.shape
    torch.testing.assert_close(y.double(), expected, rtol=0.51 * ULP[dtype], atol=5e-6)
    y.backward(grad)
    expected.backward(grad.double())
    for a, b in zip(mine, exact, strict=True):
        assert a.grad is not None and b.grad is not None
        if n > 1 or a is not mine[0]:  # one channel's x does not matter: its derivative is the round-off of its terms
            size = max(1, b.grad.abs().amax().item())
            torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-4, atol=2e-5 * size)


def test_layer_norm_of_equal_channels_is_zero() -> None:
    x, one = torch.full((64, 768), 1000.3), torch.ones(768)
    assert nanoqk.layer_norm(x, one, None, 1e-5, True, torch.float32).abs().max() < 1e-6


def test_gelu_of_every_bf16_number() -> None:
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    x = x[x.isfinite() & (x.abs() < 1e30)].requires_grad_()
    exact_x = x.detach().double().requires_grad_()
    y, exact = ops.gelu(x), torch.nn.functional.gelu(exact_x)
    assert "GELU" in repr(y)
    torch.testing.assert_close(y.double(), exact, rtol=0.51 * ULP[torch.bfloat16], atol=3e-6)
    y.sum().backward()
    exact.sum().backward()
    assert x.grad is not None and exact_x.grad is not None
    torch.testing.assert_close(x.grad.double(), exact_x.grad, rtol=0.51 * ULP[torch.bfloat16], atol=6e-7)
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf]).repeat(64).bfloat16().requires_grad_()
    y = nanoqk.gelu(odd)
    y.sum().backward()
    assert y[::3].isnan().all() and y[1::3].isinf().all() and y[2::3].abs().max() < 1e-6
    assert odd.grad is not None
    assert odd.grad[::3].isnan().all() and (odd.grad[1::3] == 1).all() and odd.grad[2::3].abs().max() < 1e-6


def test_gradients_with_a_log_sum_exp_keep_large_logits() -> None:
    """Every key occurs twice, so that a query's derivative by its own size is a small difference of large terms."""
    q, k, v, grad = 1e4 * draw(1, 1, 64, 16), draw(1, 1, 32, 16, seed=1), draw(1, 1, 64, 16, seed=2), draw(1, 1, 64, 16)
    k = k.repeat_interleave(2, 2)
    found = []
    for dtype in (torch.float32, torch.float64):
        size = torch.ones((), dtype=dtype, requires_grad=True)
        y, _ = ops.attention_and_lse_reference(q.to(dtype) * size, k.to(dtype), v.to(dtype), 0.25, 0.0, None)
        y.backward(grad.to(dtype))
        assert size.grad is not None
        found.append(size.grad.item())
    assert abs(found[0] - found[1]) < 0.1


def test_logits_of_latents_in_bf16_are_summed_in_fp32() -> None:
    def attended(q: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        y, lse = ops.latent_attention_reference(q, q_rope, latent, k_rope, None, None, 1.0, False, with_lse=True)
        assert lse is not None
        return y, lse

    shapes = [(1, 4, 1, 64), (1, 4, 1, 16), (1, 300, 64), (1, 300, 16)]
    q, q_rope, latent, k_rope = (draw(*shape, seed=i).bfloat16() for i, shape in enumerate(shapes))
    y, lse = attended(2 * q, q_rope, latent, k_rope)
    exact, exact_lse = attended(2 * q.double(), q_rope.double(), latent.double(), k_rope.double())
    assert lse.max() > 40
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-4)
    assert (y.double() - exact).norm() / exact.norm() < 0.005
