"""The operators torch.ops.nanoqk: their contract with PyTorch, wrong arguments, and how they are compiled and kept."""

import ctypes
import errno
import io
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CACHE, ROOT, eventually, exit_status, fork, run_python
from helpers.oracles import draw, needs_bf16
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from core.device import cpu_flags
from model import ops
from model.kernels import build, operators

fp32, bf16 = torch.float32, torch.bfloat16
nanoqk: Any = torch.ops.nanoqk
pytestmark = pytest.mark.usefixtures("compiled")
x, y, weight, seed = draw(2, 3, 40, 32), draw(2, 3, 40, 32, seed=1), draw(32, seed=2), torch.tensor(7)
alpha, half, stats = draw(3, 1, 1).abs(), draw(2, 3, 40, 32, seed=3).to(bf16), torch.zeros(2, 2, 3, 40)
bias, keys, values = draw(32, seed=4), draw(2, 3, 40, 32, seed=5).to(bf16), draw(2, 3, 40, 32, seed=6).to(bf16)
matrix, to_matrix = draw(80, 32, seed=7), draw(2, 3, 40, 80, seed=8).to(bf16)
w, q, latent = draw(4, 5, 6), draw(1, 4, 1, 5), draw(1, 1, 6)
strided = draw(2, 3, 32, 40).mT
one, one_rope = draw(2, 3, 1, 32, seed=7).to(bf16), draw(2, 3, 1, 16, seed=8).to(bf16)
latents, k_ropes = draw(2, 9, 32, seed=9).to(bf16)[:, :8], draw(2, 8, 16, seed=10).to(bf16)
key_scale = draw(2, 8, 3, 1, seed=11).to(bf16).transpose(1, 2)
odd, shifted = draw(2, 8, 33).to(bf16)[..., :32], draw(513).to(bf16)[1:].view(2, 8, 32)
CALLS: dict[str, list[tuple[Any, ...]]] = {
    "rms_norm": [(x, weight, 1e-6), (half, weight, 1e-6), (strided, weight, 1e-6), (draw(1, 40)[:, :32], weight, 1e-6)],
    "rms_norm_backward": [(y, x, weight, 1e-6), (half, strided, weight, 1e-6)],
    "inverse_rms": [(x, 1e-6)],
    "lp_norm": [(x, None, 3.0), (half, alpha, 1.5), (x[:, :1].expand_as(x), alpha[:1], 2.0)],
    "lp_norm_backward": [(y, x, alpha, 3.0), (y, x, None, 4.0)],
    "inverse_lp_norm": [(half, 1.0)],
    "absorb": [(w, q, None, latent, True), (w, q, draw(5), latent, False), (w, q, draw(4, 1, 5), latent, True)],
    "decoding_linear": [(one, matrix.to(bf16)), (one.mT.contiguous().mT, matrix.to(bf16))],
    "linear": [(half, matrix), (values.mT.contiguous().mT, matrix[:16])],
    "linear_backward": [(to_matrix, half, matrix), (to_matrix.mT.contiguous().mT, half, matrix)],
    "layer_norm": [(x, weight, weight, 1e-5, True, bf16), (x, weight, None, 1e-5, False, fp32)],
    "layer_norm_backward": [(half, x, weight, True, 1e-5, True), (y.mT.contiguous().mT, x, weight, False, 1e-5, False)],
    "dropout_add": [(x, half, 51, seed), (x, y, 0, None)],
    "dropout": [(x, 51, seed, bf16), (strided, 1, seed, fp32)],
    "clip_grad_norm_": [([draw(5000), draw(33, 7)], 1.0), ([draw(8)], 100.0)],
    "gelu": [(half,)],
    "gelu_backward": [(half, half)],
    "attention": [(half, half, half, 0.2, 0.0, 0, None), (half, half[:, :1], half[:, :1], 0.2, 1.5, 51, seed)],
    "attention_backward": [
        (half, half, half, half, stats, None, 0.2, 0.0, 51, seed),
        (half, half, half, half, stats, stats[0].clone(), 0.2, 1.5, 51, seed),
    ],
    "latent_attention": [
        (one, one_rope, latents, k_ropes, None, 0.2, False), (one, one_rope, latents, k_ropes, key_scale, 0.2, True),
    ],
}  # fmt: skip
WRONG: dict[str, list[tuple[Any, ...]]] = {
    "rms_norm": [
        (x.double(), weight, 1e-6), (x, weight[:31], 1e-6), (x, weight[:, None], 1e-6), (draw(2049), draw(2049), 1e-6),
        (x[None], weight, 1e-6), (torch.tensor(1.0), weight, 1e-6), (draw(2, 0), draw(0), 1e-6),
    ],
    "rms_norm_backward": [(y[:1], x, weight, 1e-6), (y.double(), x, weight, 1e-6)],
    "lp_norm": [
        (x, None, 2.2), (x, None, 0.5), (x, None, 4.5), (x, alpha[:2], 3.0), (x[0, 0], alpha, 3.0), (x, weight, 3.0),
    ],
    "absorb": [
        (w, q[:, :3], None, latent, True), (w, q, None, latent[..., 1:], True), (w, q.to(bf16), None, latent, True),
        (w[0], q, None, latent, True), (w, q, draw(4), latent, True), (w, q, draw(5, 5), latent, True),
    ],
    "decoding_linear": [
        (one, matrix), (one.float(), matrix.to(bf16)), (one[..., :16], matrix.to(bf16)), (one, matrix.to(bf16)[:, :16]),
        (one[..., :16], matrix.to(bf16)[:, :16].contiguous()), (one, matrix.to(bf16)[0]),
    ],
    "linear": [
        (x, matrix), (half, matrix.to(bf16)), (half, matrix.mT), (half, matrix[:, :16]), (half, matrix[0]),
        (half, matrix[:40]), (half[..., :24], draw(16, 24)), (half[:0], matrix), (half, matrix[:0]),
    ],
    "linear_backward": [
        (to_matrix[..., :64], half, matrix), (to_matrix[:1], half, matrix), (to_matrix.float(), half, matrix),
    ],
    "layer_norm": [
        (half, weight, None, 1e-5, True, fp32), (x, weight.to(bf16), None, 1e-5, True, fp32),
        (x, draw(64)[::2], None, 1e-5, True, fp32), (x, weight[1:], None, 1e-5, True, fp32),
        (x, weight, weight[:1], 1e-5, True, fp32), (x, weight, weight[None], 1e-5, True, fp32),
        (x, weight, None, 1e-5, True, torch.float16),
    ],
    "layer_norm_backward": [(y[:1], x, weight, False, 1e-5, True)],
    "dropout_add": [(x, y[:1], 0, None), (x, y, 51, None), (x, y, 256, seed), (x, y, -1, seed), (x, y, 51, seed.int()),
                    (half, half, 0, None), (x, y.half(), 0, None)],
    "dropout": [(half, 51, seed, bf16), (x, 51, seed, torch.float64)],
    "clip_grad_norm_": [([x, half], 1.0), ([x, strided], 1.0)],
    "gelu": [(x,)],
    "gelu_backward": [(half[:1], half), (y, half)],
    "attention": [
        (*three, 0.2, 0.0, 0, None)
        for three in (
            (x, x, x), (half[..., :24], half[..., :24], half), (half, half[:, :, :9], half),
            (half, half[..., :16], half), (half, half[:, :2], half[:, :2]), (half, half[:1], half[:1]),
            (half[0], half, half), (half, half, half[:, :, :, 0]),
        )
    ] + [
        (half, half, half, 0.0, 0.0, 0, None), (half, half, half, 0.2, -1.0, 0, None),
        (half, half, half, 0.2, 0.0, 51, None),
    ],
    "attention_backward": [
        (half, half, half, half, stats[:1], None, 0.2, 0.0, 0, None),
        (half, half, half, half, stats, stats, 0.2, 0.0, 0, None),
        (half[..., :16], half, half, half, stats, None, 0.2, 0.0, 0, None),
    ],
    "latent_attention": [
        (*given, 0.2, False)
        for given in (
            (one.float(), one_rope, latents, k_ropes, None), (half, one_rope, latents, k_ropes, None),
            (one, one_rope[:, :2], latents, k_ropes, None), (one, one_rope, latents[..., :16], k_ropes, None),
            (one, one_rope, latents[:1], k_ropes, None), (one, one_rope, latents[:, :0], k_ropes[:, :0], None),
            (one, one_rope, latents, k_ropes[..., :15], None), (one, one_rope, latents, k_ropes[:, :7], None),
            (one[..., :16], one_rope, latents[..., :16], k_ropes, None), (one, one_rope, latents[0], k_ropes, None),
            (one, one_rope, latents, k_ropes, key_scale.float()),
            (one, one_rope, latents, k_ropes, key_scale[:, :, :7]),
            (one, one_rope, latents, k_ropes, key_scale[:, :2]), (one, one_rope, latents, k_ropes, key_scale[:1]),
            (one, one_rope, latents, k_ropes, key_scale[..., 0]),
            (one, one_rope, latents, k_ropes, key_scale.contiguous()),
            (one, one_rope[..., :15], latents, k_ropes[..., :15], None), (one, one_rope, odd, k_ropes, None),
            (one, one_rope, shifted, k_ropes, None),
        )
    ],
}  # fmt: skip
DIFFERENTIABLE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "rms_norm": lambda x, half: nanoqk.rms_norm(x, weight, 1e-6),
    "lp_norm": lambda x, half: nanoqk.lp_norm(x, alpha, 3.0),
    "linear": lambda x, half: nanoqk.linear(half, matrix[:32]) + 0 * x,
    "layer_norm": lambda x, half: nanoqk.layer_norm(x, weight, bias, 1e-5, True, fp32),
    "dropout_add": lambda x, half: nanoqk.dropout_add(x, half, 51, seed),
    "dropout": lambda x, half: nanoqk.dropout(x, 51, seed, fp32),
    "gelu": lambda x, half: nanoqk.gelu(half) + 0 * x,
    "attention": lambda x, half: nanoqk.attention(half, keys, values, 0.25, 0.0, 51, seed)[0] + 0 * x,
}


def each(table: dict[str, Any]) -> Any:
    marked = ("attention", "latent", "linear", "decoding")
    return [pytest.param(name, marks=needs_bf16) if name.startswith(marked) else name for name in table]


@pytest.mark.slow
@pytest.mark.parametrize("name", each(CALLS))
def test_every_operator_passes_opcheck(name: str) -> None:
    """Schema, no aliases, the shape and strides that the fake implementation says, tracing; the derivative too."""
    assert operators.FAKES.keys() == CALLS.keys()
    operator = getattr(nanoqk, name).default
    for args in CALLS[name]:
        torch.library.opcheck(operator, args)
        with FakeTensorMode() as mode:  # opcheck compares no strides
            expected = tree_leaves(operator(*tree_map_only(Tensor, mode.from_tensor, args)))
        for fake, y in zip(expected, tree_leaves(operator(*args)), strict=True):
            assert (fake.shape, fake.stride(), fake.dtype) == (y.shape, y.stride(), y.dtype), args
        if name in DIFFERENTIABLE:
            torch.library.opcheck(operator, tuple(leaf(x) if isinstance(x, Tensor) else x for x in args))


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(x.is_floating_point())


@needs_bf16
@torch.no_grad()
def test_scales_whose_heads_lie_apart_are_left_to_pytorch() -> None:
    given = (one, one_rope, latents, k_ropes)
    apart = key_scale.contiguous()
    assert operators.can_use_latent_attention(one, latents, k_ropes, key_scale)
    assert not operators.can_use_latent_attention(one, latents, k_ropes, apart)
    y, by_pytorch = (ops.latent_attention(*given, s, None, 0.2, True)[0] for s in (key_scale, apart))
    torch.testing.assert_close(y, by_pytorch, rtol=2.0**-7, atol=2.0**-7)


@pytest.mark.parametrize("name", each(WRONG))
def test_wrong_arguments_are_refused(name: str) -> None:
    """Dtypes, shapes, strides and settings that would corrupt memory or give wrong numbers."""
    for args in WRONG[name]:
        with pytest.raises(RuntimeError, match=r"must|shape|fit|needs|takes|as many|other"):
            getattr(nanoqk, name)(*args)


@needs_bf16
@pytest.mark.parametrize("sizes", [(1, 16, 16), (33, 48, 80), (100, 64, 1040), (129, 2064, 64), (1100, 128, 384)])
def test_linear_and_its_derivative_are_the_reference(sizes: tuple[int, int, int]) -> None:
    """The weight is rounded to bf16, its derivative is not."""
    rows, n_in, n_out = sizes
    x, weight, grad = draw(rows, n_in).to(bf16), draw(n_out, n_in, seed=1), draw(rows, n_out, seed=2).to(bf16)
    mine, exact = (leaf(x), leaf(weight)), (leaf(x.double()), leaf(weight.to(bf16).double()))
    y, expected = nanoqk.linear(*mine), exact[0] @ exact[1].mT
    y.backward(grad)
    expected.backward(grad.double())
    grads, exact_grads = ([t.grad for t in inputs if t.grad is not None] for inputs in (mine, exact))
    for a, b, terms in zip((y, *grads), (expected, *exact_grads), (n_in, n_out, rows), strict=True):
        assert a.dtype == (fp32 if a is grads[1] else bf16)
        torch.testing.assert_close(a.double(), b, rtol=2e-6 if a is grads[1] else 2.0**-8, atol=1e-6 * terms)


@needs_bf16
@pytest.mark.parametrize("sizes", [(1, 32, 1), (3, 64, 70), (4, 1536, 384), (16, 384, 1153)])
def test_linear_of_a_few_rows_is_the_reference(sizes: tuple[int, int, int]) -> None:
    rows, n_in, n_out = sizes
    x, weight = draw(rows, n_in).to(bf16), draw(n_out, n_in, seed=1).to(bf16)
    y = nanoqk.decoding_linear(x, weight)
    torch.testing.assert_close(y.double(), x.double() @ weight.double().mT, rtol=2.0**-8, atol=1e-6 * n_in)


def outcome(name: str, function: Callable[..., Tensor] | None = None, grad: Tensor = y) -> list[Tensor]:
    a, b = x.clone().requires_grad_(), half.clone().requires_grad_()
    out = (function or DIFFERENTIABLE[name])(a, b)
    return [out.detach(), *torch.autograd.grad(out, (a, b), grad, allow_unused=True, materialize_grads=True)]


@pytest.mark.parametrize("name", each(DIFFERENTIABLE))
def test_results_depend_neither_on_threads_nor_on_how_gradients_lie(name: str) -> None:
    before, expected = torch.get_num_threads(), outcome(name)
    torch.set_num_threads(2)
    try:
        assert all(torch.equal(a, b) for a, b in zip(outcome(name), expected, strict=True))
    finally:
        torch.set_num_threads(before)
    for grad in (y.mT.contiguous().mT, y[:, :1, :1].expand_as(y)):
        dense = outcome(name, grad=grad.contiguous())
        assert all(torch.equal(a, b) for a, b in zip(outcome(name, grad=grad), dense, strict=True))


def compiled_into(graphs: list[torch.fx.GraphModule], function: Callable[..., Tensor], **options: Any) -> Any:
    """The function, compiled as a whole; its graphs, forwards and backwards, are kept and run as they are."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    def collect(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=collect, bw_compiler=collect)
    return torch.compile(function, fullgraph=True, backend=backend, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", each(DIFFERENTIABLE))
def test_a_compiler_keeps_the_kernels(name: str) -> None:
    """One graph, the operators in it, forwards and backwards, and the same bits."""
    graphs: list[torch.fx.GraphModule] = []
    function = compiled_into(graphs, DIFFERENTIABLE[name])
    assert all(torch.equal(a, b) for a, b in zip(outcome(name, function), outcome(name), strict=True))
    backward = "dropout" if name.startswith("dropout") else f"{name}_backward"
    targets = {str(node.target) for graph in graphs for node in graph.graph.nodes}
    seen = {target for target in targets if "nanoqk" in target}
    assert seen == {f"nanoqk.{name}.default", f"nanoqk.{backward}.default"}


@pytest.mark.slow
@needs_bf16
def test_attention_compiled_for_any_length_is_one_graph() -> None:
    """Forwards and backwards, with two queries a key head."""
    graphs: list[torch.fx.GraphModule] = []
    function = compiled_into(graphs, lambda q, k: nanoqk.attention(q, k, k, 0.25, 0.0, 0, None)[0], dynamic=True)
    for length in (48, 64, 80):
        q, k = leaf(draw(2, 4, length, 32).to(bf16)), leaf(draw(2, 2, length, 32, seed=1).to(bf16))
        function(q, k).sum().backward()
        assert k.grad is not None and k.grad.shape == k.shape
    assert len(graphs) == 2


@pytest.mark.parametrize("name", each(DIFFERENTIABLE))
def test_no_kernel_has_a_second_derivative(name: str) -> None:
    a, b = x.clone().requires_grad_(), half.clone().requires_grad_()
    out = DIFFERENTIABLE[name](a, b)
    with pytest.raises(RuntimeError, match="the derivative of a kernel has no derivative"):
        torch.autograd.grad(out.square().sum(), b if name in ("gelu", "attention", "linear") else a, create_graph=True)


# -----------------------------------------------------------------------------
# Compiling and keeping them

LOADS = """
import sys, torch
from pathlib import Path
from model import ops
from model.kernels import build, operators
if len(sys.argv) > 1:  # compiled before
    build.compile_library = lambda command, scratch: Path(sys.argv[1])
x = torch.linspace(-3, 3, 2**15).bfloat16()
print(operators.loaded(), ((ops.gelu(x).double() - ops.gelu(x.double())).abs().max() < 0.02).item())
"""


FAST = "env g++ -O0"  # options in CXX count


def compiled_before(folder: Path) -> Path:
    """The library of g++: that of the cache, or else compiled into the folder."""
    kept = CACHE / "nanoqk" / "kernels" / f"kernels-{build.key(['g++'])}.so"
    return kept if build.intact(kept) else build.compile_library(["g++"], folder)


def load(*library: Path, **environment: str) -> tuple[bool, str]:
    """Whether a new process has kernels, and what it says; GELU is right with and without. library: in place of a
    compiler's output."""
    done = run_python(LOADS, *map(str, library), env={"CXX": FAST, **environment})
    loaded, right = done.stdout.split()
    assert right == "True"
    return loaded == "True", done.stderr


def kept(cache: Path) -> Path:
    (library,) = (cache / "nanoqk" / "kernels").glob("*.so")
    return library


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def pass_tests_of_ops(which: str, **environment: str) -> None:
    """Raises AssertionError unless these pass with kernels compiled in this environment."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "tests/test_ops.py", "-k", which]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout[-3000:]


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="compiled for an older x86")
@pytest.mark.skipif("avx512f" not in cpu_flags(), reason="here all tests have kernels compiled for AVX2")
def test_kernels_compiled_for_avx2_pass_the_tests_of_ops(tmp_path: Path) -> None:
    """Compiled for AVX2 alone the kernels pass the same tests, but for attention, which they leave to the reference."""
    env = {"CXX": "g++ -march=x86-64-v3", "XDG_CACHE_HOME": str(tmp_path)}
    pass_tests_of_ops("norm or absorb or gelu or dropout", **env)
    run_python("from model.kernels import operators; assert operators.loaded() and not operators.attends()", env=env)


@pytest.mark.slow
@pytest.mark.skipif("avx512_bf16" not in cpu_flags(), reason="attention has no kernel here")
@pytest.mark.skipif("amx_bf16" in cpu_flags(), reason="here all tests have attention in tiles")
def test_attention_with_emulated_tiles_passes_its_tests(tmp_path: Path) -> None:
    env = {"CXX": "g++ -DEMULATE_TILES", "XDG_CACHE_HOME": str(tmp_path)}
    pass_tests_of_ops("attention_and or attention_with or attention_has or logits_that or leaves_behind", **env)


@pytest.mark.slow
def test_a_compiler_that_cannot_be_used_costs_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where there is no compiler, nothing is said."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    broken = script(tmp_path / "c++", "echo no space left >&2\nexit 1")
    for cxx, reason in (
        ("no-such-compiler", ""), (" ", "CXX names no program"), ("g++ '", "No closing quotation"),
        (broken, "no space left"),
    ):  # fmt: skip
        monkeypatch.setenv("CXX", cxx)
        assert not build.load()
        said = capsys.readouterr().err
        assert said == "" if not reason else said.startswith("warning:") and said.count("\n") == 1 and reason in said
    assert load(CXX=broken, XDG_CACHE_HOME=str(tmp_path))[0] is False


def ended(pids: Path) -> bool:
    """Whether the processes whose ids a file has are gone, or zombies."""
    statuses = [Path(f"/proc/{pid}/status") for pid in pids.read_text().split()]
    return not any(status.exists() and "\tZ" not in status.read_text() for status in statuses)


def test_a_compiler_that_hangs_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", script(tmp_path / "c++", f"sleep 60 & echo $! >>{tmp_path}/pids\nwait"))
    monkeypatch.setattr(build, "SECONDS", 0.2)
    assert not build.load()
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "timed out" in said
    eventually(lambda: ended(tmp_path / "pids"), 20)  # what the compiler started, too, which would take a minute


def test_ctrl_c_ends_the_compilers(tmp_path: Path) -> None:
    slow = script(tmp_path / "c++", f"echo $$ >>{tmp_path}/pids\nsleep 60")

    def compile_slowly() -> int:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
        with pytest.raises(KeyboardInterrupt):
            build.compile_library([slow], tmp_path)
        return 0

    pid, at_once = fork(compile_slowly), len(build.SOURCES)
    eventually(lambda: (tmp_path / "pids").exists() and len((tmp_path / "pids").read_text().split()) >= at_once)
    os.kill(pid, signal.SIGINT)
    began = time.monotonic()
    assert exit_status(pid) == 0 and time.monotonic() - began < 20
    assert ended(tmp_path / "pids")


def test_the_program_of_cxx_may_have_several_words() -> None:
    assert build.program_of(["ccache", "g++", "-O2", "-g"]) == ["ccache", "g++"]
    assert build.key(["env", "g++"]) != build.key(["g++"])


def test_scratch_folders_of_killed_processes_go(tmp_path: Path) -> None:
    for age, name in ((3 * build.SECONDS, "old"), (0, "new")):
        folder = tmp_path / f"{build.SCRATCH}{name}"
        folder.mkdir()
        os.utime(folder, (time.time() - age,) * 2)
    build.remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f"{build.SCRATCH}new"]


@pytest.mark.slow
@pytest.mark.parametrize("locks", [True, False])
def test_of_processes_that_start_at_once_one_compiles_and_a_damaged_library_is_replaced(
    locks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one small source in place of ours. On a file system without locks two compilers wait for each other here."""
    (tmp_path / "small.cpp").write_text('extern "C" int seven() { return 7; }')
    wait = "sleep 1" if locks else f"until [ $(wc -l <{tmp_path}/begun) -ge 2 ]; do sleep 0.05; done"
    both = f'echo >>{tmp_path}/begun\n{wait}\nexec g++ "$@"'

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    if not locks:
        monkeypatch.setattr(build, "FileLock", refuse)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", script(tmp_path / "c++", both))
    monkeypatch.setattr(build, "SOURCES", [tmp_path / "small.cpp"])

    def load_small(compiles: bool = True) -> int:
        (terminal := io.StringIO()).isatty = lambda: True  # type: ignore[method-assign]
        with redirect_stderr(terminal):
            return 1 - (build.load() and ("compiling the CPU kernels, once" in terminal.getvalue()) == compiles)

    statuses = sorted(exit_status(pid) for pid in [fork(load_small), fork(load_small)])
    assert statuses == ([0, 1] if locks else [0, 0])  # 1: it says nothing of compiling
    assert (tmp_path / "begun").read_text().count("\n") == (2 if locks else 4)  # compiled and linked
    library = kept(tmp_path)
    loaded = shutil.copy(library, tmp_path / "loaded.so")  # which is not cut off while it is loaded
    assert ctypes.CDLL(str(loaded)).seven() == 7
    began, whole = library.stat().st_mtime_ns, library.read_bytes()
    assert library.parent.stat().st_mode & 0o777 == 0o700
    assert exit_status(fork(lambda: load_small(compiles=False))) == 0
    assert library.stat().st_mtime_ns == began  # it was taken as it is
    library.write_bytes(whole[: len(whole) // 2])
    assert exit_status(fork(load_small)) == 0
    assert kept(tmp_path).read_bytes() == whole


def test_a_library_is_checked_before_it_is_loaded(tmp_path: Path) -> None:
    signed, library = build.with_digest(bytes(range(256)) * 20), tmp_path / "library.so"
    library.write_bytes(signed)
    assert build.intact(library) and not build.intact(tmp_path / "none.so")
    flipped = signed[:2000] + bytes([signed[2000] ^ 1]) + signed[2001:]
    for damaged in (b"", signed[:10], signed[:2000], flipped, signed[: -build.DIGEST], signed + b"\0"):
        library.write_bytes(damaged)
        assert not build.intact(library)


@pytest.mark.slow
def test_a_folder_in_which_others_write_or_that_cannot_be_made_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "nanoqk" / "kernels"
    folder.mkdir(parents=True)
    folder.chmod(0o770)
    loaded, said = load(compiled_before(tmp_path), XDG_CACHE_HOME=str(tmp_path))
    assert loaded and said.count("\n") == 1 and f"{folder} is not used" in said and [*folder.iterdir()] == []
    (tmp_path / "file").write_text("")
    assert load(compiled_before(tmp_path), XDG_CACHE_HOME=str(tmp_path / "file")) == (True, "")


def test_a_folder_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.private_folder() == tmp_path / "nanoqk" / "kernels"
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert build.private_folder() is None and "others can write there" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "nanoqk").chmod(0o777)  # whoever can replace the folder
    assert build.private_folder() is None and "others can write there" in capsys.readouterr().err
    (tmp_path / "nanoqk").chmod(0o775)  # as with umask 002
    assert build.private_folder() is not None
