"""Compile the C++ kernels, keep them in the user's cache, and load them as operators of PyTorch."""

import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from core.device import cpu_flags
from core.files import cache_folder, write_atomic

HERE = Path(__file__).parent
SOURCES = [HERE / f"{name}.cpp" for name in ("norms", "attention", "block", "mla_decode")]
TORCH = Path(torch.__file__).parent
FLAGS = [
    "-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC",
    "-DTORCH_TARGET_VERSION=0x020a000000000000", f"-I{TORCH / 'include'}",
]  # fmt: skip
# No OpenMP library of their own: the kernels run in the threads of PyTorch's, which is loaded already
LINKS = ["-shared", f"-L{TORCH / 'lib'}", "-ltorch_cpu"]
SECONDS = 300  # after which a compiler counts as hanging
DIGEST = hashlib.sha256().digest_size


@functools.cache
def load() -> bool:
    """Load the operators torch.ops.nanoqk, which the first use compiles in about six seconds; False without a compiler.

    A compiler that fails costs a warning line.
    """
    try:
        command = shlex.split(os.environ.get("CXX") or "g++")
        if not command:
            raise ValueError("CXX names no program")
        if sys.platform != "linux" or shutil.which(command[0]) is None:
            return False
        folder = private_folder()
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            library = (folder or Path(scratch)) / f"kernels-{key(command)}.so"
            if not intact(library):
                signed = Path(scratch) / "signed.so"
                write_atomic(signed, with_digest(compile_library(command, Path(scratch)).read_bytes()))
                os.replace(signed, library)
            torch.ops.load_library(library)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or b""
        line = " ".join(f"{error} {said.decode(errors='replace')[-500:]}".split())
        print(f"warning: training is slower, the CPU kernels of {HERE} cannot be used: {line}", file=sys.stderr)
        return False
    return True


def compile_library(command: list[str], scratch: Path) -> Path:
    """Raises subprocess.SubprocessError where the compiler fails or hangs."""
    objects = [scratch / f"{source.stem}.o" for source in SOURCES]

    def call(*arguments: str | Path) -> None:
        # options of CXX come last: they count
        full = [command[0], *map(str, arguments), *command[1:]]
        subprocess.run(full, check=True, capture_output=True, timeout=SECONDS, stdin=subprocess.DEVNULL)

    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(call, *FLAGS, "-c", a, "-o", b) for a, b in zip(SOURCES, objects, strict=True)]:
            done.result()
    call(*objects, "-o", scratch / "linked.so", *LINKS)
    return scratch / "linked.so"


def key(command: list[str]) -> str:
    """Of all that decides what is compiled; machines with different instructions may share a home."""
    sources = [path.read_text() for path in (*SOURCES, *sorted(HERE.glob("*.h")))]
    inputs = sources, FLAGS, LINKS, shutil.which(command[0]), command, sorted(cpu_flags()), torch.__version__
    return hashlib.sha256(repr(inputs).encode()).hexdigest()[:16]


def private_folder() -> Path | None:
    """Where compiled kernels are kept: nobody but the user may write there, or what it holds is not to be loaded."""
    folder = cache_folder() / "kernels"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError:
        return None
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        print(f"warning: {folder} is not used, others can write there: compiling for this process", file=sys.stderr)
        return None
    return folder if os.access(folder, os.W_OK) else None


def with_digest(library: bytes) -> bytes:
    """The loader does not read what stands behind a library."""
    return library + hashlib.sha256(library).digest()


def intact(path: Path) -> bool:
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return content == with_digest(content[:-DIGEST])
