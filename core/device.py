"""The machine: choice of device and dtype, peak FLOP/s, memory."""

import contextlib
import ctypes
import functools
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from core.dist import World
from core.schema import ConfigError, require

# Dense bf16 tensor-core peaks in TFLOP/s, from the vendors' data sheets. The first name within the device's name wins.
GPU_BF16_TFLOPS = {
    "B200": 2250, "GH200": 989, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "A100": 312, "A800": 312,
    "L40S": 362, "L40": 181, "L4": 121, "A10G": 70, "A10": 125, "A40": 150, "A6000": 155, "RTX 4090": 165,
    "RTX 3090": 71, "MI300X": 1307, "MI250X": 383,
}  # fmt: skip
ALONE = World()
PEAK_SECONDS = 0.2  # for which the peak is measured


def autocast(device: str, dtype: torch.dtype) -> torch.autocast:
    """Matmuls in `dtype`; the weights stay in float32."""
    return torch.autocast(device, dtype, enabled=dtype == torch.bfloat16)


def resolve_device(name: str, world: World = ALONE) -> torch.device:
    """`auto` is CUDA, else MPS, else the CPU. Each rank of torchrun has its own CUDA device. A CUDA device becomes the
    process's current one, on which Triton launches. Raises: ConfigError."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    one_each = name == "cuda" and world.size > 1
    if name == "cuda" and torch.cuda.is_available():
        name = f"cuda:{world.local_rank if one_each else torch.cuda.current_device()}"
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count()
        none = f"torch {torch.__version__} sees no CUDA device; device=auto takes what there is"
        require(count > 0, f"device={name} is absent: {none}")
        n = world.local_size  # not local_rank: every rank must raise, since rank 0 alone prints
        require(one_each or n == 1, f"device={name} is the same GPU for every rank of torchrun: write device=cuda")
        require(n <= count, f"device=cuda: {n} ranks of torchrun need a GPU each, of {count} here")
        require((device.index or 0) < count, f"device={name} is absent: there are {count} CUDA devices")
        torch.cuda.set_device(device)
    if device.type == "mps":
        require(torch.backends.mps.is_available(), f"device={name} is absent: torch sees no MPS device")
    return device


def cpu_seconds(stat: Path = Path("/proc/stat"), niced: bool = False) -> tuple[float, float, float]:
    """Seconds of the clock, of CPU time of this process, and of CPU time of all processes on the CPUs that it may use.
    Niced processes do not count, one that is niced itself has 0; unless `niced`."""
    used = 0.0
    with contextlib.suppress(OSError):  # Linux alone has it
        lines = stat.read_text().splitlines()
        ours = {f"cpu{n}" for n in os.sched_getaffinity(0)}
        for name, *ticks in map(str.split, lines):
            if name in ours:
                user, nice, system, _, _, interrupts, soft_interrupts = map(int, ticks[:7])  # without idle, iowait
                used += (user + nice * niced + system + interrupts + soft_interrupts) / os.sysconf("SC_CLK_TCK")
    return time.monotonic(), time.process_time() if niced or os.nice(0) == 0 else 0.0, used


AT_IMPORT = cpu_seconds()


@functools.cache
def idle_cpus() -> float | None:
    """How many of this process's CPUs other programs leave idle; None where that cannot be told. Their use is the mean
    since this module was imported, or that of the last minute where that is less: what has just begun may end soon."""
    seconds, own, used = (now - then for now, then in zip(cpu_seconds(), AT_IMPORT, strict=True))
    if not used or has_quota():
        return None
    return len(os.sched_getaffinity(0)) - max(0.0, min((used - own) / max(seconds, 1e-9), os.getloadavg()[0]))


def busy_note() -> str:
    """For an estimate by a short timing: that other programs use the CPUs; "" where they leave all but half of one."""
    idle = idle_cpus()
    busy = idle is not None and idle < len(os.sched_getaffinity(0)) - 0.5
    return "; other programs use the CPUs: on idle ones it takes less" if busy else ""


def has_quota(file: Path = Path("/sys/fs/cgroup/cpu.max")) -> bool:
    """Whether a cgroup limits this process's CPU time (docker --cpus=4). How busy its CPUs are then says little."""
    with contextlib.suppress(OSError):
        return not file.read_text().startswith("max")
    return False


def move(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """x on the device. A copy to CUDA does not wait for the work that is queued there."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" and x.is_cpu else x.to(device)


def seed_generator(seed: int, device: torch.device) -> None:
    """Seed the generators of the CPU and of `device`. torch.manual_seed() would seed those of all GPUs."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        current = torch.cuda.current_device()  # prepares CUDA, which makes the generators
        torch.cuda.default_generators[current].manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)


@contextlib.contextmanager
def settings_restored() -> Iterator[None]:
    """Restore what a run sets in PyTorch: threads, determinism, the precision of matmuls, the CPU's random numbers."""
    threads, mode = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    precision = torch.get_float32_matmul_precision()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            torch.set_deterministic_debug_mode(mode)
            torch.set_float32_matmul_precision(precision)


def keep_freed_memory() -> None:
    """Make glibc keep the memory of freed CPU tensors for the next ones: blocks from the system cost a page fault per
    4 KiB. Without glibc nothing happens."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: never return memory
        mallopt(-3, 2**25)  # M_MMAP_THRESHOLD: the maximum; larger blocks still come from the system each time


def total_memory(device: torch.device) -> int:
    """Bytes of memory of a GPU, or of the machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class TooLarge(ConfigError):
    """The memory cannot hold a model or a run, which says nothing of the model."""


def require_memory(needed: int, device: torch.device, told: str) -> None:
    """Raise TooLarge where what is `told` of needs more bytes than there are."""
    memory = total_memory(device)
    if needed > memory:
        raise TooLarge(f"{told} need more than {needed / 2**30:,.0f} GiB; {device} has {memory / 2**30:,.0f} GiB")


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the hardware has it, else float32. Weights are float32 either way."""
    if name == "auto":
        name = "bfloat16" if has_bfloat16(device) and bfloat16_works(device) else "float32"
    if name == "bfloat16" and device.type == "cuda" and not has_bfloat16(device):
        raise ConfigError(f"dtype=bfloat16 is not supported by {torch.cuda.get_device_name(device)}; use float32")
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def has_bfloat16(device: torch.device) -> bool:
    """Hardware bf16, not emulation: CUDA capability 8.0, or a CPU with AMX or AVX-512 bf16 (x86), or bf16 (Arm)."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type == "mps":
        return False  # autocast on MPS is young: float32 unless it is asked for
    return bool({"amx_bf16", "avx512_bf16", "bf16"} & cpu_flags())


@functools.lru_cache
def cpu_info() -> str:
    """The system's description of its CPUs; empty where there is none."""
    with contextlib.suppress(OSError):
        return Path("/proc/cpuinfo").read_text()
    return ""


def cpu_flags() -> set[str]:
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", cpu_info(), re.MULTILINE)
    return set(flags[1].split()) if flags else set()


@functools.lru_cache
def bfloat16_works(device: torch.device) -> bool:
    """Whether a bf16 matmul agrees with fp32: some virtual machines announce bf16 instructions that they lack."""
    try:
        a = torch.linspace(-1, 1, 64 * 64, device=device).view(64, 64).bfloat16()
        exact = a.float() @ a.float()
        return torch.allclose((a @ a).float(), exact, rtol=2e-2, atol=2e-2)
    except RuntimeError:
        return False


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Peak FLOP/s of matmuls: from the data sheet for a known GPU in bf16, else measured."""
    if device.type == "cuda" and dtype == torch.bfloat16:
        name = torch.cuda.get_device_name(device)
        for key, tflops in GPU_BF16_TFLOPS.items():
            if re.search(rf"\b{key}\b", name) and "MIG" not in name:  # a slice of a GPU is measured
                return tflops * 1e12
    return measured_peak_flops(device, dtype, torch.get_num_threads())


@functools.lru_cache
def measured_peak_flops(device: torch.device, dtype: torch.dtype, threads: int) -> float:
    """The best FLOP/s of repeated square matmuls. `threads` is only a key of the cache: the number of CPU threads."""
    n = 1024 if device.type == "cpu" else 4096
    a = torch.full((n, n), 0.5, device=device, dtype=dtype)
    b = torch.full((n, n), 0.5, device=device, dtype=dtype)
    a @ b  # warm-up
    synchronize(device)
    best, deadline = float("inf"), time.perf_counter() + PEAK_SECONDS
    while best == float("inf") or time.perf_counter() < deadline:
        start = time.perf_counter()
        a @ b
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * n**3 / best


def synchronize(device: torch.device) -> None:
    torch.get_device_module(device).synchronize()


def device_name(device: torch.device, threads: int | None = None) -> str:
    """A name for people: "NVIDIA H200", or "cpu (AMD EPYC, 2 threads)"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    model = re.search(r"model name\s*: (.*)", cpu_info())
    n = threads or torch.get_num_threads()
    return f"cpu ({model[1].strip() + ', ' if model else ''}{n} thread{'s' if n > 1 else ''})"
