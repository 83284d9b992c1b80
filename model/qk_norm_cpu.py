"""RMS and Lp QK norms on a CPU in one pass over the vectors (qk_norm_cpu.cpp), forwards and backwards.

The first use compiles it, in about four seconds, with $CXX or c++, and keeps it in $XDG_CACHE_HOME/nanoqk, by default
~/.cache/nanoqk. Where there is no compiler serves() is False, and the norms are the operations in gpt.py, which are
the reference as well.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
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

from training.device import cpu_flags

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = ["-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC"]
# as there:
MOST, CHUNKS = 2048, 64
CALL, FOLD, NO_VECTORS = struct.Struct("=26qd"), struct.Struct("=9q"), (0, 0, 0, 0)


@functools.lru_cache
def library() -> Any:
    """The compiled functions, or None."""
    compiler = shutil.which(os.environ.get("CXX", "c++")) if sys.platform == "linux" else None
    if compiler is None:
        return None
    # of this machine's instructions: a folder of the user's may be shared by several
    key = hashlib.sha256(repr((SOURCE.read_text(), FLAGS, compiler, sorted(cpu_flags()))).encode()).hexdigest()[:16]
    kept = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanoqk" / f"qk_norm_cpu-{key}.so"
    with contextlib.suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
    folder = kept.parent if os.access(kept.parent, os.W_OK) else None
    try:
        if os.access(kept, os.R_OK):
            return ctypes.CDLL(str(kept))
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            compiled, linked = f"{scratch}/compiled.o", f"{scratch}/linked.so"
            # linked without OpenMP's library: that of PyTorch, already loaded, then serves, and its threads
            for words in ([*FLAGS, "-c", str(SOURCE), "-o", compiled], ["-shared", compiled, "-o", linked]):
                subprocess.run([compiler, *words], check=True, capture_output=True)
            loaded = ctypes.CDLL(linked)
            if folder is not None:
                os.replace(linked, kept)
            return loaded
    except (OSError, subprocess.CalledProcessError) as error:
        said = error.stderr.decode(errors="replace") if isinstance(error, subprocess.CalledProcessError) else ""
        warnings.warn(f"{SOURCE.name} cannot be used, QK norms are slower without it: {error}\n{said}", stacklevel=2)
        return None


def serves(x: Tensor, p: float = 2.0) -> bool:
    """Whether vectors x (..., n) can be normalised here with this p."""
    return (
        type(x) in (Tensor, torch.nn.Parameter, FakeTensor)
        and x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.bfloat16)
        and x.ndim <= 4
        and 0 < x.size(-1) <= MOST
        and p in (1, 1.5, 2, 2.5, 3, 3.5, 4)
        and not torch.compiler.is_compiling()
        and library() is not None
    )


def rms(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """gain * x / sqrt(mean(x^2) + eps) for x (..., n) and gain (n,), differentiable in both, once."""
    return CompiledNorm.apply(x, gain, 0, eps) if torch.is_grad_enabled() else normalise(x, gain, 0, eps)


def lp(x: Tensor, p: float, alpha: Tensor | None = None) -> Tensor:
    """alpha * x / ||x||_p for x (B, nh, T, n) and alpha (nh or 1, 1, 1), differentiable in both, once."""
    twice_p = int(2 * p)
    return CompiledNorm.apply(x, alpha, twice_p, 0.0) if torch.is_grad_enabled() else normalise(x, alpha, twice_p, 0.0)


def rms_scale(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps), (..., n) -> (..., 1) in fp32, without a derivative."""
    call(side_by_side(x), None, 0, eps, scale := x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
    return scale


def lp_scale(x: Tensor, p: float) -> Tensor:
    """1 / ||x||_p, of a zero vector 0, (..., n) -> (..., 1) in fp32, without a derivative."""
    call(side_by_side(x), None, int(2 * p), 0.0, scale := x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
    return scale


def normalise(x: Tensor, factor: Tensor | None, twice_p: int, eps: float) -> Tensor:
    x = side_by_side(x)
    call(x, factor, twice_p, eps, None, y := torch.empty_like(x))
    return y


class CompiledNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor | None, twice_p: int, eps: float) -> Tensor:
        x = side_by_side(x)
        ctx.save_for_backward(x, factor)  # x, in its own type, is all that is kept of the vectors
        ctx.twice_p, ctx.eps = twice_p, eps
        return normalise(x, factor, twice_p, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, factor = ctx.saved_tensors
        parts = None if factor is None else x.new_zeros(CHUNKS, *factor.shape, dtype=torch.float32)
        call(x, factor, ctx.twice_p, ctx.eps, None, None, grad, grad_x := torch.empty_like(x), parts)
        return grad_x, None if parts is None else parts.sum(0), None, None


def call(
    x: Tensor, factor: Tensor | None, twice_p: int, eps: float, scale: Tensor | None = None, y: Tensor | None = None,
    grad: Tensor | None = None, grad_x: Tensor | None = None, grad_factor: Tensor | None = None,
) -> None:  # fmt: skip
    """Fill those of scale, y, grad_x and grad_factor that are there. Those of the vectors x must be side_by_side."""
    if isinstance(x, FakeTensor):
        return
    grad = None if grad is None else side_by_side(grad.to(x.dtype))
    factor = None if factor is None else factor.float().contiguous()
    words = [*(1,) * (4 - x.ndim), *x.shape, x.itemsize, twice_p]
    for vectors in (x, y, grad, grad_x):
        words += NO_VECTORS if vectors is None else (vectors.data_ptr(), *(0,) * (4 - x.ndim), *vectors.stride()[:-1])
    words += [0, 0, 0] if factor is None else [factor.data_ptr(), pointer(grad_factor), factor.numel()]
    library().qk_norm(CALL.pack(*words, pointer(scale), eps))


def pointer(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def fold(w: Tensor, q: Tensor, latent: Tensor, with_keys: bool) -> tuple[Tensor, Tensor | None]:
    """What a token of absorbed MLA decoding is multiplied with an up-projection w (nh, n, kr) for, in one pass over it:
    queries q (1, nh, 1, n) -> (1, nh, 1, kr), and with_keys its latent (1, 1, kr) -> (1, nh, 1, n), in fp32."""
    nh, n, rank = w.shape
    q, latent = q.contiguous(), latent.contiguous()
    q_latent = q.new_empty(1, nh, 1, rank)
    k = q.new_empty(1, nh, 1, n, dtype=torch.float32) if with_keys else None
    library().fold(FOLD.pack(nh, n, rank, w.itemsize, *map(pointer, (w, q, latent, q_latent, k))))
    return q_latent, k


def side_by_side(x: Tensor) -> Tensor:
    """x with the channels of a vector next to each other."""
    return x if x.stride(-1) == 1 else x.contiguous()
