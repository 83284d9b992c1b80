"""Kernels for a CPU: QK norms (cpu_norms.cpp), causal attention (cpu_attention.cpp), and what a block does between its
matrix products (cpu_block.cpp), forwards and backwards.

The first use compiles them, in about four seconds, with GCC ($CXX or g++), and keeps them in $XDG_CACHE_HOME/nanoqk, by
default ~/.cache/nanoqk. Where there is no compiler every serves_...() is False, and the operations in gpt.py do the
same, which are the reference as well.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

SOURCES = [Path(__file__).with_name(f"cpu_{name}.cpp") for name in ("norms", "attention", "block")]
MAX_CHANNELS, CHUNKS = 2048, 64
SMALL = 2**14  # elements: PyTorch's own operation on fewer is done before a kernel is called
FLAGS = [
    "-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC",
    f"-DMAX_CHANNELS={MAX_CHANNELS}", f"-DCHUNKS={CHUNKS}",
]  # fmt: skip
# the structs there
NORM, FOLD, ATTENTION = struct.Struct("=27qd"), struct.Struct("=10q"), struct.Struct("=43qd")
BLOCK_NORM, POINTWISE = struct.Struct("=13qd"), struct.Struct("=9q")
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
        text = [path.read_text() for path in (*SOURCES, Path(__file__).with_suffix(".h"))]
        made_of = text, FLAGS, shutil.which(program), options, instructions
        kept = cache_folder() / f"cpu_kernels-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]}.so"
        with contextlib.suppress(OSError):  # that there is none yet, or a damaged one
            return ctypes.CDLL(str(kept))
        with contextlib.suppress(OSError):
            kept.parent.mkdir(parents=True, exist_ok=True)
        may_keep = os.access(kept.parent, os.W_OK)
        with tempfile.TemporaryDirectory(dir=kept.parent if may_keep else None) as scratch:
            compiled, linked = [f"{scratch}/{path.stem}.o" for path in SOURCES], f"{scratch}/linked.so"
            calls = [[*FLAGS, "-c", str(path), "-o", to] for path, to in zip(SOURCES, compiled, strict=True)]
            with ThreadPoolExecutor() as pool:
                for done in [pool.submit(call, [program, *options, *words]) for words in calls]:
                    done.result()
            # linked without OpenMP's library: that of PyTorch, already loaded, then serves, and its threads
            call([program, *options, "-shared", *compiled, "-o", linked])
            loaded = ctypes.CDLL(linked)
            if may_keep:
                with open(linked, "rb") as file:
                    os.fsync(file.fileno())
                os.replace(linked, kept)
            return loaded
    except (OSError, subprocess.CalledProcessError) as error:
        said = error.stderr.decode(errors="replace") if isinstance(error, subprocess.CalledProcessError) else ""
        warnings.warn(f"model/cpu_*.cpp cannot be used, training is slower without: {error}\n{said}", stacklevel=2)
        return None


def call(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True)


def cache_folder() -> Path:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanoqk"
    except RuntimeError:  # a user without a home
        return Path("/nonexistent")


def plain(*tensors: Tensor) -> bool:
    """Whether there are kernels, and these are tensors for them: on a CPU, in fp32 or bf16, not of a compiler's."""
    for x in tensors:
        if type(x) not in TENSORS or x.device.type != "cpu" or x.dtype not in DTYPES:
            return False
    return not torch.compiler.is_compiling() and not torch.jit.is_tracing() and library() is not None


TENSORS, DTYPES = (Tensor, torch.nn.Parameter, FakeTensor), (torch.float32, torch.bfloat16)

# -----------------------------------------------------------------------------
# QK norms


def serves_norm(x: Tensor, p: float = 2.0) -> bool:
    """Whether vectors x (..., n) can be normalised here with this p."""
    return plain(x) and x.ndim <= 4 and 0 < x.size(-1) <= MAX_CHANNELS and p in (1, 1.5, 2, 2.5, 3, 3.5, 4)


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
    fill_norm(side_by_side(x), None, twice_p, eps, scale)
    return scale


def run(x: Tensor, factor: Tensor | None, twice_p: int, eps: float) -> Tensor:
    y = empty_side_by_side(x)
    fill_norm(x, factor, twice_p, eps, None, y)
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
        fill_norm(x, factor, ctx.twice_p, ctx.eps, None, None, grad, grad_x, parts)
        return grad_x, None if parts is None else parts.sum(0), None, None


def fill_norm(
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
    library().qk_norm(NORM.pack(*words, pointer(scale), torch.get_num_threads(), eps))


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


# -----------------------------------------------------------------------------
# Causal attention


def serves_attention(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether queries and keys of the same positions can be multiplied here, times a scale > 0: bf16 on a CPU that
    multiplies in it."""
    for x in (q, k, v):
        if x.dtype != torch.bfloat16 or x.size(-1) % 16 or x.stride(-1) != 1:
            return False
    (B, nh, T, dk), nkv = q.shape, k.size(1)
    fit = k.shape == (B, nkv, T, dk) and v.shape[:3] == (B, nkv, T) and nh % nkv == 0
    return fit and q.numel() > 0 and plain(q, k, v) and bool(library().has_attention())


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, dropped: int, seed: int) -> Tensor:
    """softmax(scale q k^T) v, causal: q (B, nh, T, dk), k (B, nkv, T, dk), v (B, nkv, T, dv) -> (B, nh, T, dv), whose
    heads lie side by side; differentiable, once. What has a random byte below `dropped` becomes 0."""
    return CompiledAttention.apply(q, k, v, scale, dropped, seed)


class CompiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, dropped: int, seed: int) -> Tensor:
        y, of_softmax = heads_beside(q, v.size(-1)), q.new_empty(2, *q.shape[:3], dtype=torch.float32)
        ctx.settings = scale, dropped, seed
        fill_attention((q, k, v, y, None, None, None, None), of_softmax, *ctx.settings)
        ctx.save_for_backward(q, k, v, of_softmax)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, of_softmax = ctx.saved_tensors
        grad_q, *of_heads = (heads_beside(q, x.size(-1)) for x in (q, k, v))  # (B, nh, T, dk), dk and dv
        fill_attention((q, k, v, None, side_by_side(grad), grad_q, *of_heads), of_softmax, *ctx.settings)
        group = q.size(1) // k.size(1)
        grad_k, grad_v = (x if group == 1 else x.unflatten(1, (-1, group)).sum(2) for x in of_heads)
        return grad_q, grad_k, grad_v, None, None, None


def heads_beside(x: Tensor, n: int) -> Tensor:
    """Room for (B, nh, T, n), shaped as x but for n, that lies as (B, T, nh, n)."""
    B, nh, T, _ = x.shape
    return x.new_empty(B, T, nh, n).transpose(1, 2)


def fill_attention(heads: tuple[Tensor | None, ...], of_softmax: Tensor, scale: float, dropped: int, seed: int) -> None:
    """From q, k, v fill y and of_softmax (2, B, nh, T); or with that and y's gradient those of q, and of k and v as
    each query head has them: `heads`, in this order."""
    q, k, v = heads[:3]
    assert q is not None and k is not None and v is not None
    if isinstance(q, FakeTensor):
        return
    B, nh, T, dk = q.shape
    words = [B, nh, nh // k.size(1), T, dk, v.size(-1), dropped, seed, torch.get_num_threads()]
    for x in heads:
        words += NO_VECTORS if x is None else (x.data_ptr(), *x.stride()[:3])
    library().attention(ATTENTION.pack(*words, *(x.data_ptr() for x in of_softmax), scale))


# -----------------------------------------------------------------------------
# Between a block's matrix products


def serves_block(*tensors: Tensor) -> bool:
    """Whether these, if dense and of one shape, are worth a call."""
    shape = tensors[0].shape
    if not plain(*tensors) or any(x.shape != shape or not x.is_contiguous() for x in tensors):
        return False
    return tensors[0].numel() >= SMALL


def serves_layer_norm(x: Tensor, parameters: tuple[Tensor | None, ...], dtype: torch.dtype) -> bool:
    """Whether x (..., n) is normalised here with weight and bias (n,) to `dtype`."""
    given = [p for p in parameters if p is not None]
    fit = all(p.shape == x.shape[-1:] and p.is_contiguous() for p in given) and plain(*given)
    return fit and dtype in DTYPES and {p.dtype for p in (x, *given)} == {torch.float32} and serves_block(x)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool, dtype: torch.dtype) -> Tensor:
    """weight * (x - mean) / sqrt(var + eps) + bias along the last dimension of x (..., n), fp32 -> (..., n) in `dtype`;
    not centred: weight * x / sqrt(mean(x^2) + eps). Differentiable, once."""
    return BlockNorm.apply(x, weight, bias, eps, centred, dtype)


class BlockNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool, dtype: torch.dtype
    ) -> Tensor:
        y = torch.empty_like(x, dtype=dtype)
        ctx.save_for_backward(x, weight)
        ctx.settings, ctx.biased = (eps, centred), bias is not None
        fill_block_norm(x, weight, bias, y, None, (None, None, None), *ctx.settings)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x, grad = torch.empty_like(x), grad.contiguous()
        sums = weight.new_zeros(1 + ctx.biased, CHUNKS, weight.numel())
        fill_block_norm(x, weight, None, None, grad, (grad_x, sums[0], sums[1] if ctx.biased else None), *ctx.settings)
        grad_weight, *grad_bias = sums.sum(1)
        return grad_x, grad_weight, *(grad_bias or [None]), None, None, None


def fill_block_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor | None, grad: Tensor | None,
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None], eps: float, centred: bool,
) -> None:  # fmt: skip
    """From x, weight and bias fill y; or with y's gradient those of x, weight and bias, the last two a row a chunk."""
    given = y if grad is None else grad
    if given is None or isinstance(x, FakeTensor):
        return
    words = x.numel() // x.size(-1), x.size(-1), given.itemsize, centred, torch.get_num_threads()
    library().block_norm(BLOCK_NORM.pack(*words, *map(pointer, (x, weight, bias, y, grad, *gradients)), eps))


def residual(x: Tensor, y: Tensor, dropped: int, seed: int) -> Tensor:
    """x + dropout(y) of one shape, x fp32, differentiable, once. Dropped is what has a random byte below `dropped`."""
    return Residual.apply(x, y, dropped, seed)


class Residual(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, dropped: int, seed: int) -> Tensor:
        out, ctx.settings = torch.empty_like(x), (dropped, seed, y.dtype)
        fill_pointwise("residual", y, x, y, None, out, dropped, seed)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, masked(grad, *ctx.settings), None, None


def dropout(x: Tensor, dropped: int, seed: int) -> Tensor:
    """As in residual(), of x in fp32 alone; differentiable, once."""
    return Dropout.apply(x, dropped, seed)


class Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dropped: int, seed: int) -> Tensor:
        ctx.settings = dropped, seed, x.dtype
        return masked(x, *ctx.settings)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return masked(grad, *ctx.settings), None, None


def masked(x: Tensor, dropped: int, seed: int, dtype: torch.dtype) -> Tensor:
    """x in fp32 times dropout's mask and scale, in `dtype`."""
    out = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    fill_pointwise("residual", out, None, None, x.contiguous(), out, dropped, seed)
    return out


def gelu(x: Tensor) -> Tensor:
    """x Phi(x) for x in bf16, differentiable, once."""
    return GELU.apply(x)


class GELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        y = torch.empty_like(x)
        fill_pointwise("gelu", x, x, None, None, y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        fill_pointwise("gelu", x, x, None, grad.contiguous(), grad_x)
        return grad_x


def fill_pointwise(
    name: str, like: Tensor, x: Tensor | None, y: Tensor | None, grad: Tensor | None, out: Tensor,
    dropped: int = 0, seed: int = 0,
) -> None:  # fmt: skip
    """Fill `out` from x and y, or, where it is given, from the gradient; `like` has the type that may be bf16."""
    if isinstance(out, FakeTensor):
        return
    tensors = map(pointer, (x, y, grad, out))
    words = out.numel(), like.itemsize, dropped, seed, torch.get_num_threads()
    getattr(library(), name)(POINTWISE.pack(*words, *tensors))
