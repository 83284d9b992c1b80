"""The fused MLA decode kernel against a float64 formula, in Triton's interpreter, and compiled for GPUs without one.

The interpreter multiplies bf16 as integers (Triton 3.7): here fp32 and fp16 stand for it, bf16 runs where CUDA is.
"""

import contextlib
import math
import re
import subprocess
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import run_python
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

INTERPRETED = """
import sys
sys.path[:0] = ["tests", "."]
from test_mla_decode_triton import CASES, check, check_absorbed
for case in CASES:
    check(case, "cpu")
check_absorbed()
print("checked", len(CASES))
"""
COMPILED = """
import sys
sys.path[:0] = ["tests", "."]
from test_mla_decode_triton import check_compiled
check_compiled()
"""
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes of a program at most: A100, H100, B200

# dtype, B, nh, S, positions allocated, kr, dr, slices, norm: 0 none, 1 blockwise, 2 unified
CASES = [
    (torch.float32, 1, 16, 96, 96, 64, 16, 1, 1),
    (torch.float32, 2, 16, 77, 90, 64, 32, 3, 1),
    (torch.float32, 2, 16, 77, 90, 64, 32, 3, 2),
    (torch.float32, 3, 16, 33, 64, 128, 16, 2, 0),
    (torch.float32, 1, 16, 1, 8, 64, 16, 4, 1),  # more slices than tiles
    (torch.float32, 2, 5, 45, 45, 64, 16, 2, 2),  # fewer heads than a program's
    (torch.float32, 1, 20, 70, 70, 64, 16, 2, 1),  # and more
    (torch.float16, 2, 16, 130, 140, 512, 64, 5, 1),
    (torch.float16, 1, 16, 130, 140, 512, 64, 2, 2),
]  # fmt: skip


def random(*shape: int, seed: int, device: str) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(device)


def check(case: tuple[torch.dtype, int, int, int, int, int, int, int, int], device: str) -> None:
    from model.kernels.mla_decode_triton import attend_latents

    dtype, B, nh, S, room, kr, dr, slices, norm = case
    q, qr, cache, ropes = (
        random(*shape, seed=i, device=device).to(dtype)
        for i, shape in enumerate(((B, nh, kr), (B, nh, dr), (B, room, kr), (B, room, dr)))
    )
    s = (0.5 + random(B, room, nh, seed=5, device=device).abs()).to(dtype)
    cache[:, S:], ropes[:, S:], s[:, S:] = math.nan, math.nan, math.nan  # what stands past S is never read
    latent, k_rope, s = cache[:, :S], ropes[:, :S], s[:, :S]
    scale = 2 / math.sqrt(kr + dr)
    y = attend_latents(q, qr, latent, k_rope, s if norm else None, scale, norm == 2, slices)
    content, rope = q.double() @ latent.double().mT, qr.double() @ k_rope.double().mT  # (B, nh, S)
    factor = s.double().mT
    logits = {0: content + rope, 1: content * factor + rope, 2: (content + rope) * factor}[norm]
    exact = torch.softmax(scale * logits, -1) @ latent.double()
    error = ((y.double() - exact).norm() / exact.norm()).item()
    bound = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    assert y.dtype == dtype and y.shape == (B, nh, kr) and error <= bound, (case, error)


@torch.no_grad()
def check_absorbed() -> None:
    """A model decodes the same logits with the kernel as without."""
    from variants import build, config_of, random_tokens

    from model.kernels import mla_decode_triton, operators
    from model.options import MLAOptions

    patch = pytest.MonkeyPatch()
    patch.setattr(mla_decode_triton, "processors", lambda device: 2)  # a GPU's
    idx = random_tokens(2, 8)
    pairs: Any = (("blockwise", "none"), ("blockwise", "rms"), ("blockwise", "lp3"), ("unified", "rms"))
    for layout, norm in pairs:
        attention = MLAOptions(kv_rank=64, nope_dim=8, rope_dim=16, v_dim=6, qk_norm_layout=layout)
        model = build(config_of(attention, norm), dtype=torch.float32)
        logits = []
        for fits in (True, False):
            patch.setattr(operators, "can_use_triton", lambda *_, fits=fits: fits)
            caches = model.new_caches(2, 16, torch.float32)
            model(idx[:, :7], caches=caches)
            logits.append(model(idx[:, 7:], caches=caches, pos=7)[0])
        torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)
        assert not torch.equal(*logits)  # two ways, not one
    patch.undo()


def check_compiled() -> None:
    """attend_latents() itself, at DeepSeek-V3's width, with a driver that compiles what it asks for and launches
    nothing: so a kernel has the launcher's hints of what 16 divides, which decide its registers."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    from model.kernels import mla_decode_triton as m

    compiled: list[Any] = []
    current: list[Tensor] = []  # whose device is the current one
    compile_only, patch = JITFunction.run, pytest.MonkeyPatch()

    def run(*args: Any, **kw: Any) -> None:
        assert current[-1] is latent, "the kernel would be launched on another GPU than its tensors' one"
        compiled.append(compile_only(*args, **{**kw, "warmup": True}))

    @contextlib.contextmanager
    def device_of(x: Tensor) -> Iterator[None]:
        current.append(x)
        yield
        current.pop()

    patch.setattr(JITFunction, "run", run)
    patch.setattr(torch.cuda, "device_of", device_of)
    patch.setattr(m, "processors", lambda device: 132)
    for capability, limit in SHARED_MEMORY.items():
        driver = SimpleNamespace(
            get_current_device=lambda capability=capability: capability,
            get_current_stream=lambda device: 0,
            get_current_target=lambda capability=capability: GPUTarget("cuda", capability, 32),
        )
        triton.runtime.driver.set_active(driver)
        for norm, S in ((0, 4096), (1, 4097), (1, 4096), (2, 65535)):
            latent, k_rope, s = (torch.empty(1, S, n, dtype=torch.bfloat16) for n in (512, 64, 16))
            q, q_rope = (torch.empty(1, 16, n, dtype=torch.bfloat16) for n in (512, 64))
            m.attend_latents(q, q_rope, latent, k_rope, s if norm else None, 0.1, norm == 2)
            for kernel in compiled:
                use = resources(kernel.asm["cubin"])
                print(capability, norm, S, kernel.metadata.name, use)
                assert kernel.metadata.shared <= limit
                assert use["STACK"] == use["LOCAL"] == 0, "registers spill"  # both are of a thread's own memory
            attend, _ = compiled
            assert "mma" in attend.asm["ptx"] and "cp.async" in attend.asm["ptx"]
            compiled.clear()
    patch.undo()


def resources(cubin: bytes) -> dict[str, int]:
    """A kernel's registers (REG), and the bytes of a thread's memory that they did not suffice for (STACK, LOCAL)."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.check_output([knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name], text=True)
    return {name: int(n) for name, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}


@pytest.mark.skipif(version("triton").startswith("3.6."), reason="its interpreter needs NumPy before 2.4")
def test_the_interpreted_kernel_equals_the_float64_formula() -> None:
    assert run_python(INTERPRETED, env={"TRITON_INTERPRET": "1"}).stdout == f"checked {len(CASES)}\n"


def test_the_kernel_that_is_launched_spills_nothing_on_ampere_hopper_and_blackwell() -> None:
    """ptxas comes with Triton, so no GPU is needed."""
    assert run_python(COMPILED).stdout.count("attend_slice") == 12


@pytest.mark.gpu
@pytest.mark.parametrize("norm", [0, 1, 2])
@pytest.mark.parametrize("B, S, slices", [(1, 65536, 132), (3, 4097, 7), (128, 1000, 1)])
def test_the_kernel_on_cuda_equals_the_float64_formula_in_bf16(B: int, S: int, slices: int, norm: int) -> None:
    check((torch.bfloat16, B, 16, S, S + 9, 512, 64, slices, norm), "cuda")
