"""RMS and Lp QK norms on a CPU in one pass over the vectors (qk_norm_cpu.cpp), forwards and backwards.

The first use compiles it, in about four seconds, with GCC ($CXX or g++), and keeps it in $XDG_CACHE_HOME/nanoqk, by
default ~/.cache/nanoqk. Where there is no compiler serves() is False, and the norms are the operations in gpt.py, which
are the reference as well.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

SOURCE = Path(__file__).with_suffix(".cpp")
MAX_CHANNELS, CHUNKS = 2048, 64
FLAGS = [
    "-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC",
    f"-DMAX_CHANNELS={MAX_CHANNELS}", f"-DCHUNKS={CHUNKS}",
]  # fmt: skip
CALL, FOLD = struct.Struct("=27qd"), struct.Struct("=10q")  # the structs there
NO_VECTORS = (0, 0, 0, 0)


@functools.lru_cache
def library() -> Any:
    """The compiled functions, or None."""
    program, *options = shlex.split(os.environ.get("CXX") or "g++")
    if sys.platform != "linux" or shutil.which(program) is None:
        return None
    try:
        with open("/proc/cpuinfo") as cpu:  # a folder of the user's may be shared by machines with other instructions
            instructions = next((line for line in cpu if line.startswith(("flags", "Features"))), "")
        made_of = SOURCE.read_text(), FLAGS, shutil.which(program), options, instructions
        kept = cache_folder() / f"qk_norm_cpu-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]}.so"
        with contextlib.suppress(OSError):  # that there is none yet, or a damaged one
            return ctypes.CDLL(str(kept))
        with contextlib.suppress(OSError):
            kept.parent.mkdir(parents=True, exist_ok=True)
        may_keep = os.access(kept.parent, os.W_OK)
        with tempfile.TemporaryDirectory(dir=kept.parent if may_keep else None) as scratch:
            compiled, linked = f"{scratch}/compiled.o", f"{scratch}/linked.so"
            # linked without OpenMP's library: that of PyTorch, already loaded, then serves, and its threads
            for words in ([*FLAGS, "-c", str(SOURCE), "-o", compiled], ["-shared", compiled, "-o", linked]):
                subprocess.run([program, *options, *words], check=True, capture_output=True)
            loaded = ctypes.CDLL(linked)
            if may_keep:
                with open(linked, "rb") as file:
                    os.fsync(file.fileno())
                os.replace(linked, kept)
            return loaded
    except (OSError, subprocess.CalledProcessError) as error:
        said = error.stderr.decode(errors="replace") if isinstance(error, subprocess.CalledProcessError) else ""
        warnings.warn(f"{SOURCE.name} cannot be used, QK norms are slower without it: {error}\n{said}", stacklevel=2)
        return None


def cache_folder() -> Path:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanoqk"
    except RuntimeError:  # a user without a home
        return Path("/nonexistent")


def serves(x: Tensor, p: float = 2.0) -> bool:
    """Whether vectors x (..., n) can be normalised here with this p."""
    return (
        type(x) in (Tensor, torch.nn.Parameter, FakeTensor)
        and x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.bfloat16)
        and x.ndim <= 4
        and 0 < x.size(-1) <= MAX_CHANNELS
        and p in (1, 1.5, 2, 2.5, 3, 3.5, 4)
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and library() is not None
    )


def rms(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """gain * x / sqrt(mean(x^2) + eps) for x (..., n) and gain (n,), differentiable in both, once."""
    return normalise(x, gain, 0, eps)


def lp(x: Tensor, p: float, alpha: Tensor | None = None) -> Tensor:
    """x / ||x||_p for x (..., n), times alpha (nh or 1, 1, 1) for x (B, nh, T, n); differentiable in both, once."""
    return normalise(x, alpha, int(2 * p), 0.0)


def rms_scale(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps), (..., n) -> (..., 1) in fp32, without a derivative."""
    return scale_of(x, 0, eps)


def lp_scale(x: Tensor, p: float) -> Tensor:
    """1 / ||x||_p, of a zero vector 0, (..., n) -> (..., 1) in fp32, without a derivative."""
    return scale_of(x, int(2 * p), 0.0)


def normalise(x: Tensor, factor: Tensor | None, twice_p: int, eps: float) -> Tensor:
    if factor is not None:
        if twice_p == 0:
            good = factor.shape == x.shape[-1:]
        else:
            good = factor.numel() == 1 or (x.ndim > 2 and factor.shape == (x.size(-3), 1, 1))
        if not good:
            raise ValueError(f"a factor of shape {tuple(factor.shape)} does not fit x of {tuple(x.shape)}")
    x = side_by_side(x)
    return CompiledNorm.apply(x, factor, twice_p, eps) if torch.is_grad_enabled() else run(x, factor, twice_p, eps)


def scale_of(x: Tensor, twice_p: int, eps: float) -> Tensor:
    scale = x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
    call(side_by_side(x), None, twice_p, eps, scale)
    return scale


def run(x: Tensor, factor: Tensor | None, twice_p: int, eps: float) -> Tensor:
    y = empty_side_by_side(x)
    call(x, factor, twice_p, eps, None, y)
    return y


class CompiledNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor | None, twice_p: int, eps: float) -> Tensor:
        ctx.save_for_backward(x, factor)  # x, in its own type, is all that is kept of the vectors
        ctx.twice_p, ctx.eps = twice_p, eps
        return run(x, factor, twice_p, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, factor = ctx.saved_tensors
        grad_x, grad = empty_side_by_side(x), side_by_side(grad.to(x.dtype))
        parts = None if factor is None else x.new_zeros(CHUNKS, *factor.shape, dtype=torch.float32)
        call(x, factor, ctx.twice_p, ctx.eps, None, None, grad, grad_x, parts)
        return grad_x, None if parts is None else parts.sum(0), None, None


def call(
    x: Tensor, factor: Tensor | None, twice_p: int, eps: float, scale: Tensor | None = None, y: Tensor | None = None,
    grad: Tensor | None = None, grad_x: Tensor | None = None, grad_factor: Tensor | None = None,
) -> None:  # fmt: skip
    """Fill those of scale (..., 1), y, grad_x (..., n) and grad_factor (CHUNKS, *factor.shape) that are there, from
    vectors x and grad (..., n) and a factor. All vectors lie side_by_side; the scalars are fp32."""
    if isinstance(x, FakeTensor):
        return
    factor = None if factor is None else factor.float().contiguous()
    words = [*(1,) * (4 - x.ndim), *x.shape, x.itemsize, twice_p]
    for vectors in (x, y, grad, grad_x):
        words += NO_VECTORS if vectors is None else (vectors.data_ptr(), *(0,) * (4 - x.ndim), *vectors.stride()[:-1])
    words += [0, 0, 0] if factor is None else [factor.data_ptr(), pointer(grad_factor), factor.numel()]
    library().qk_norm(CALL.pack(*words, pointer(scale), torch.get_num_threads(), eps))


def pointer(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def side_by_side(x: Tensor) -> Tensor:
    """x (..., n) with the channels of each vector next to one another."""
    return x if x.stride(-1) == 1 else x.contiguous()


def empty_side_by_side(x: Tensor) -> Tensor:
    """Room for as many vectors, in the order of those of x (..., n) where that has one."""
    y = torch.empty_like(x)
    return y if y.stride(-1) == 1 else x.new_empty(x.shape)


def fold(w: Tensor, q: Tensor, latent: Tensor, with_keys: bool) -> tuple[Tensor, Tensor | None]:
    """What a token of absorbed MLA decoding is multiplied with an up-projection w (nh, n, kr) for, in one pass over it:
    queries q (1, nh, 1, n) -> (1, nh, 1, kr), and with_keys its latent (1, 1, kr) -> (1, nh, 1, n), in fp32."""
    nh, n, rank = w.shape
    w, q, latent = w.contiguous(), q.contiguous(), latent.contiguous()
    q_latent = q.new_empty(1, nh, 1, rank)
    k = q.new_empty(1, nh, 1, n, dtype=torch.float32) if with_keys else None
    if not isinstance(q, FakeTensor):
        tensors = map(pointer, (w, q, latent, q_latent, k))
        library().fold(FOLD.pack(nh, n, rank, w.itemsize, torch.get_num_threads(), *tensors))
    return q_latent, k
