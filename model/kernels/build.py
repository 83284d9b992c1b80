"""Compile the C++ kernels, keep them in the user's cache, and load them as operators of PyTorch."""

import contextlib
import hashlib
import itertools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from core.device import cpu_flags
from core.files import FileLock, cache_folder, write_atomic
from core.process import start_bound

HERE = Path(__file__).parent
SOURCES = sorted(HERE.glob("*.cpp"))
TORCH = Path(torch.__file__).parent
FLAGS = [
    "-std=c++20", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC",
    f"-I{TORCH / 'include'}",
]  # fmt: skip
# No OpenMP library of their own: the kernels run in the threads of PyTorch's, which is loaded already
LINKS = ["-shared", f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-lc10"]
SECONDS = 300  # after which a compiler counts as hanging
SCRATCH = "compiling-"  # the name of a scratch folder begins so
DIGEST = hashlib.sha256().digest_size


def load() -> bool:
    """Load the operators torch.ops.nanoqk, which the first use compiles in some 20 seconds. False without a compiler,
    and after a warning where the compiler fails."""
    try:
        command = shlex.split(os.environ.get("CXX") or "g++")
        if not program_of(command):
            raise ValueError("CXX names no program")
        if sys.platform != "linux" or shutil.which(command[0]) is None:
            return False
        folder, name = private_folder(), f"kernels-{key(command)}.so"
        with contextlib.ExitStack() as stack:
            if folder is not None and not intact(folder / name):
                with contextlib.suppress(OSError):  # a file system without locks: then several compile at once
                    stack.enter_context(FileLock(folder / f"{name}.lock", timeout=SECONDS))
            if folder is not None and intact(folder / name):
                torch.ops.load_library(folder / name)
                return True
            if sys.stderr is not None and sys.stderr.isatty():
                print("compiling the CPU kernels, once for this machine: half a minute or more", file=sys.stderr)
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=SCRATCH, dir=folder)))
            signed, library = scratch / "signed.so", (folder or scratch) / name
            write_atomic(signed, with_digest(compile_library(command, scratch).read_bytes()))
            os.replace(signed, library)
            torch.ops.load_library(library)
        if folder is not None:
            remove_leftovers(folder)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or b""
        line = " ".join(f"{error} {said.decode(errors='replace')[-500:]}".split())
        print(f"warning: training is slower, the CPU kernels of {HERE} cannot be used: {line}", file=sys.stderr)
        return False
    return True


def compile_library(command: list[str], scratch: Path) -> Path:
    """Raises subprocess.SubprocessError where the compiler fails or hangs."""
    objects, library = [scratch / f"{source.stem}.o" for source in SOURCES], scratch / "linked.so"
    run_at_once(command, [[*FLAGS, "-c", a, "-o", b] for a, b in zip(SOURCES, objects, strict=True)])
    run_at_once(command, [[*objects, "-o", library, *LINKS]])
    return library


def run_at_once(command: list[str], calls: list[list[str | Path]]) -> None:
    """Call the compiler with each of these arguments. One that fails or hangs ends the others."""
    program = program_of(command)
    with contextlib.ExitStack() as stack:
        running = []
        for arguments in calls:
            full = [*program, *map(str, arguments), *command[len(program) :]]  # options of CXX come last: they count
            process = stack.enter_context(start_bound(full, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
            stack.callback(end, process)  # Ctrl-C does not reach processes of another session
            running.append((full, process))
        for full, process in running:
            _, said = process.communicate(timeout=SECONDS)
            if process.returncode:
                raise subprocess.CalledProcessError(process.returncode, full, stderr=said)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a compiler and what it started."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def program_of(command: list[str]) -> list[str]:
    """The words of CXX before its options: `g++`, `ccache g++`."""
    return [*itertools.takewhile(lambda word: not word.startswith("-"), command)]


def key(command: list[str]) -> str:
    """A hash of all that decides what is compiled; machines with different instructions may share a home."""
    sources = [path.read_text() for path in (*SOURCES, *sorted(HERE.glob("*.h")))]
    compiler = shutil.which(program_of(command)[-1])
    inputs = sources, FLAGS, LINKS, compiler, command, sorted(cpu_flags()), torch.__version__
    return hashlib.sha256(repr(inputs).encode()).hexdigest()[:16]


def private_folder() -> Path | None:
    """The folder of compiled kernels; None where it cannot be used, or others may write there: what it holds is run."""
    folder = cache_folder() / "kernels"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        own, parent = folder.stat(), folder.parent.stat()
    except OSError:
        return None
    shared = own.st_uid != os.geteuid() or own.st_mode & 0o022
    # whoever may write to the parent can replace the folder; its group may, as umask 002 gives each user a group
    if shared or parent.st_uid not in (0, os.geteuid()) or parent.st_mode & 0o002:
        print(f"warning: {folder} is not used, others can write there: compiling for this process", file=sys.stderr)
        return None
    return folder if os.access(folder, os.W_OK) else None


def remove_leftovers(folder: Path) -> None:
    """Remove the scratch folders of processes that were killed."""
    for scratch in folder.glob(f"{SCRATCH}*"):
        with contextlib.suppress(OSError):  # another process has removed its own
            if time.time() - scratch.stat().st_mtime > 2 * SECONDS:
                shutil.rmtree(scratch, ignore_errors=True)


def with_digest(library: bytes) -> bytes:
    """The loader does not read what stands behind a library."""
    return library + hashlib.sha256(library).digest()


def intact(path: Path) -> bool:
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return content == with_digest(content[:-DIGEST])
