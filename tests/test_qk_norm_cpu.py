"""The compiled QK norms of a CPU against the operations of model/gpt.py in float64, and what happens without them."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, TINY
from torch import Tensor

from model import gpt, qk_norm_cpu
from model.generate import decode_one_token
from sweeps.plan import compose
from training.config import load_config

NORMS = [0.0, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0]  # p, and 0 for RMS
NAMES = ["rms", *(f"lp{p:g}" for p in NORMS[1:])]
ULP = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7}


@pytest.fixture(autouse=True)
def compiled() -> None:
    assert qk_norm_cpu.library() is not None, "a C++ compiler is needed"


def compiled_norm(x: Tensor, p: float, factor: Tensor | None) -> Tensor:
    if p:
        return qk_norm_cpu.lp(x, p, factor)
    return qk_norm_cpu.rms(x, x.new_ones(x.size(-1)) if factor is None else factor, 1e-6)


def exact_norm(x: Tensor, p: float, factor: Tensor | None) -> Tensor:
    y = gpt.Normalise.apply(x, p) if p else gpt.DivideByRMS.apply(x, 1e-6)
    return y if factor is None else y * factor


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


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
    s = qk_norm_cpu.lp_scale(x, p) if p else qk_norm_cpu.rms_scale(x, 1e-6)
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
        assert (qk_norm_cpu.lp_scale(x.detach(), p)[:2] == 0).all()
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
    (grad,) = torch.autograd.grad(qk_norm_cpu.lp(x, 3.0).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("dtype", ULP, ids=["fp32", "bf16"])
@pytest.mark.parametrize("nh,n,rank", [(16, 128, 512), (3, 5, 7), (1, 1, 1)])
def test_both_products_of_a_token_with_the_up_projection(nh: int, n: int, rank: int, dtype: torch.dtype) -> None:
    w, q, latent = draw(nh, n, rank).to(dtype), draw(1, nh, 1, n, seed=1).to(dtype), draw(1, 1, rank, seed=2).to(dtype)
    q_latent, k = qk_norm_cpu.fold(w, q, latent, True)
    alone, none = qk_norm_cpu.fold(w, q, latent, False)
    assert none is None and torch.equal(alone, q_latent) and k is not None and k.dtype == torch.float32
    exact_q, exact_k = q.double().transpose(0, 1)[..., 0, :] @ w.double(), w.double() @ latent.double()[0, 0]
    assert q_latent.shape == (1, nh, 1, rank) and q_latent.dtype == dtype and k.shape == (1, nh, 1, n)
    torch.testing.assert_close(k[0, :, 0].double(), exact_k, rtol=0, atol=1e-6 * rank)
    torch.testing.assert_close(q_latent[0, :, 0].double(), exact_q[:, 0], rtol=ULP[dtype], atol=1e-6 * n)
    apart = w.flatten(0, 1).t().contiguous().t().view(nh, n, rank)
    assert torch.equal(qk_norm_cpu.fold(apart, q, latent, False)[0], q_latent)


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
        real = getattr(qk_norm_cpu, name)

        def spy(*args: Any) -> Any:
            seen.append(name)
            return real(*args)

        return spy

    for name in ("call", "fold"):
        monkeypatch.setattr(qk_norm_cpu, name, spied(name))
    with torch.no_grad():
        model.eval()
        caches = model.new_caches(1, 8, torch.float32)
        model(torch.tensor([[1, 2, 3]]), caches=caches)
        seen.clear()
        decode_one_token(model, torch.tensor([4]), caches, 3)
    assert seen.count("fold") == config.model.n_layer
    # the latent's own norm; those of queries and keys, each in two blocks
    assert seen.count("call") == config.model.n_layer * (1 + calls)


LEARNS = """
import sys, torch
from model import gpt, qk_norm_cpu
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
print(qk_norm_cpu.library() is not None, loss.item())
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
    assert said.count("qk_norm_cpu.cpp cannot be used") == 1 and "no space left" in said


def test_processes_that_compile_at_once_keep_one_library(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from model import qk_norm_cpu; assert qk_norm_cpu.library() is not None"]
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
    assert not os.access(qk_norm_cpu.cache_folder(), os.W_OK)
