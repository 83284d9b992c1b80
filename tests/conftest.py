"""Shared by the tests: small configs, real corpora, and programs run as a user runs them."""

import multiprocessing
import os
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile, mkdtemp
from types import SimpleNamespace
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: equal sums in this process and in the ones it starts
os.environ["WANDB_MODE"] = "disabled"  # the tests of W&B say otherwise
os.environ["XDG_CONFIG_HOME"] = mkdtemp(prefix="nanoqk-tests-")  # no test reads or writes the user's own
with suppress(OSError):  # no such folder
    memory = os.statvfs("/dev/shm")
    if memory.f_bavail * memory.f_frsize > 4 * 2**30 and not memory.f_flag & os.ST_NOEXEC:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")  # for tmp_path: no save waits for a disk

import pytest
import torch
from browser import CHROMIUM, Page
from helpers.fineweb import parquet, shards
from helpers.refusals import folder, outcome
from tqdm import tqdm
from variants import NORMS, config_of

from core.files import cache_folder
from core.modules import FINDER
from core.plugins import LOADED, NAMED
from model.kernels import operators
from model.options import AttentionOptions, LogitsOptions, LpNormOptions, QKNormOptions
from training.config import OptimizerOptions, ScheduleOptions, TrainConfig

__all__ = ["folder", "outcome", "parquet", "shards"]  # fixtures of every test file

ROOT = Path(__file__).resolve().parent.parent
FOLDER = os.environ["XDG_CONFIG_HOME"]  # until pytest ends, whatever a test does to TMPDIR
Program = Callable[..., subprocess.CompletedProcess[str]]  # what the fixture `program` gives
Trained = Callable[..., Path]  # what the fixture `trained` gives
CACHE = cache_folder().parent  # for $XDG_CACHE_HOME: programs then need not compile the kernels

torch.set_num_threads(1)

SLOW = {  # files whose tests train, start programs or load large libraries: make check leaves them out
    "test_audit", "test_bad_input", "test_bench", "test_bench_decode", "test_check_gpu", "test_checks",
    "test_compare", "test_corpora", "test_cuda", "test_damage", "test_ddp", "test_disk",
    "test_docs", "test_evaluate_lm", "test_export_hf", "test_fault_option", "test_faults", "test_fineweb",
    "test_fixture", "test_fuzz", "test_gpu", "test_hostile", "test_import", "test_init_from", "test_nanoqk",
    "test_kernels", "test_ledger", "test_live", "test_long_sequences",
    "test_mla_decode_triton", "test_plans", "test_plugins", "test_presets", "test_process", "test_report",
    "test_report_page", "test_report_rates", "test_report_shares", "test_resume", "test_sample", "test_shards",
    "test_slurm", "test_sweeps", "test_tokenizers", "test_track", "test_train", "test_wandb", "test_your_own_variant",
}  # fmt: skip


FIRST = ("test_an_entry_is_one_command", "test_a_signal_to_the_group_while", "test_a_run_may_be_of_several_ranks")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """make check does not import the slow files."""
    return True if collection_path.stem in SLOW and "not slow" in config.option.markexpr else None


def pytest_unconfigure() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        name, fixtures = item.path.stem, getattr(item, "fixturenames", ())
        if name in SLOW or {"program", "forked"} & {*fixtures}:
            item.add_marker("slow")
        if "browser" in fixtures:
            item.add_marker("browser")
        if name == "test_slurm":
            item.add_marker("slurm")
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
    items.sort(key=lambda item: not item.name.startswith(FIRST))  # the longest: no process waits for one at the end


QK_NORM_VARIANTS: dict[str, QKNormOptions] = {
    **NORMS,
    "lp1.5": LpNormOptions(p=1.5, alpha_per="head", alpha_init="matched"),
    "lp2": LpNormOptions(p=2.0, alpha_map="softplus", alpha_init="henry"),
    "lp3": LpNormOptions(p=3.0, alpha_map="linear", alpha_init=2.5),
    "lpinf": LpNormOptions(p=float("inf"), alpha_per="head"),
}


def tiny_config(qk_norm: QKNormOptions | None = None, **model: Any) -> TrainConfig:
    return config_of("mha", qk_norm or "none", **model)


@pytest.fixture(params=QK_NORM_VARIANTS)
def qk_norm(request: pytest.FixtureRequest) -> QKNormOptions:
    return QK_NORM_VARIANTS[request.param]


@pytest.fixture(scope="module", params=["compiled", "operations"])
def each_implementation(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a CPU has kernels for: compiled, as where there is a compiler, and as PyTorch's operations."""
    assert operators.loaded(), "a C++ compiler is needed"
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "operations":
            patch.setattr(operators, "loaded", lambda: False)
        yield


@pytest.fixture(scope="session", autouse=True)
def kernels_of_the_usual_cache() -> None:
    """Tests set caches of their own: in these the kernels would be compiled anew, which takes a minute."""
    operators.loaded()


@pytest.fixture
def compiled() -> None:
    assert operators.loaded(), "a C++ compiler is needed"


needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and not os.environ.get("CI"), reason="torch.compile on a CPU needs g++"
)


def eventually(what: Callable[[], Any], seconds: float = 180) -> Any:
    """What what() returns once that is true."""
    deadline = time.monotonic() + seconds
    while not (result := what()):
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)
    return result


def flip(file: Path, position: int = -1, mask: int = 1) -> None:
    """Change a byte of a file."""
    data = bytearray(file.read_bytes())
    data[position] ^= mask
    file.write_bytes(data)


def fork(work: Callable[[], int]) -> int:
    """Start work() in a process of its own, which has torch imported already, and return its pid."""
    pid = os.fork()
    if pid == 0:
        status = 99
        signal.alarm(600)  # seconds: it may wait for a process that died
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            torch.set_num_threads(1)  # OpenMP hangs in a fork of a process that has used more, as a library may
            tqdm.set_lock(threading.RLock())  # not the parent's: a child killed while it holds that blocks the next
            status = work()
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)
    return pid


def processes_with(wanted: dict[str, str]) -> list[int]:
    """The processes that began with these variables in their environment. A zombie has none."""
    found = []
    for path in Path("/proc").iterdir():
        with suppress(OSError):
            words = (path / "environ").read_bytes().split(b"\0") if path.name.isdecimal() else []
            if {f"{name}={text}".encode() for name, text in wanted.items()} <= {*words}:
                found.append(int(path.name))
    return found


def heed_ctrl_c() -> None:
    """A shell's background job ignores it, and so do its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def exit_status(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run_python(
    code: str, *words: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, which finds this repository's modules."""
    command, whole = [sys.executable, "-c", code, *words], {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
    done = subprocess.run(command, cwd=cwd, env=whole, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done


@pytest.fixture
def plugins_undone() -> Iterator[None]:
    """What plugins register in this process is undone when the test ends, and their modules are forgotten."""
    bases: tuple[Any, ...] = (AttentionOptions, QKNormOptions, LogitsOptions, OptimizerOptions, ScheduleOptions)
    yield
    for name in (modules := [*FINDER.folders]):
        sys.modules.pop(name, None)
    for table in (table for base in bases for table in (base.slot, base.slot.options)):
        for name in [name for name, cls in table.items() if cls.__module__ in modules]:  # ours may have come meanwhile
            del table[name]
    for known in (FINDER.folders, LOADED, NAMED):
        known.clear()


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """Run one of the programs in a scratch directory: program("train.py", "max_iters=3") -> the finished process.

    status: the exit status that it must have.
    """

    def call(script: str, *overrides: str, status: int = 0, **options: Any) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / script), *overrides]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, **options)
        assert done.returncode == status, done.stdout[-3000:] + done.stderr[-3000:]
        return done

    return call


@pytest.fixture
def forked(tmp_path: Path, program: Program) -> Program:
    """As `program`, in a fork of this process, which has imported PyTorch already. Not for what draws charts, whose
    threads a fork lacks. Where there is a GPU `program` itself, as CUDA does not survive a fork."""
    if torch.cuda.is_available():
        return lambda *words, env=None, **more: program(*words, env={**os.environ, **(env or {})}, **more)

    def call(script: str, *overrides: str, status: int = 0, env: Mapping[str, str] | None = None) -> Any:
        def run() -> Any:
            for number, file in ((1, out), (2, err)):
                os.dup2(file.fileno(), number)
            sys.stdout, sys.stderr = (open(n, "w", closefd=False, buffering=1) for n in (1, 2))  # noqa: SIM115
            os.environ |= env or {}
            os.chdir(tmp_path)
            sys.argv = [script, *overrides]
            warnings.resetwarnings()  # not pytest's, which collects them
            for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
                warnings.simplefilter("ignore", kind)
            warnings.showwarning = lambda *given: print(warnings.formatwarning(*given[:4]), file=sys.stderr)
            try:
                runpy.run_path(str(ROOT / script), run_name="__main__")
            except SystemExit as end:
                return end.code if isinstance(end.code, int) else int(end.code is not None)
            return 0

        with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
            code = exit_status(fork(run))
            texts = [(file.seek(0), file.read())[1] for file in (out, err)]
        assert code == status, texts[0][-3000:] + texts[1][-3000:]
        return subprocess.CompletedProcess([script, *overrides], code, *texts)

    return call


@pytest.fixture(scope="module")
def quick_processes() -> Iterator[None]:
    """Processes of benchmarks come from a server that has imported PyTorch: a moment each, not two seconds."""
    from scripts import check_gpu
    from scripts.benchmarks import timing

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["scripts.check_gpu"])
    with pytest.MonkeyPatch.context() as patch:
        for module in (timing, check_gpu):
            patch.setattr(module, "multiprocessing", SimpleNamespace(get_context={"spawn": context}.__getitem__))
        yield


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Page]:
    if CHROMIUM is None:
        if os.environ.get("CI") == "true":
            pytest.fail("CI=true, but there is no Chromium to test the page in")
        pytest.skip("no Chromium")
    with Page(tmp_path / "profile") as page:
        yield page


def write_corpus(folder: Path) -> Path:
    """6,000 characters of a small language: a file of its own, so that no test depends on the network."""
    generator = torch.Generator().manual_seed(0)
    words = ["to", "be", "or", "not", "that", "is", "the", "question", "whether", "'tis", "nobler"]
    picks = torch.randint(len(words), (1500,), generator=generator).tolist()
    file = folder / "corpus.txt"
    file.write_text(" ".join(words[i] for i in picks)[:6000])
    return file


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path)


TINY = [
    "model.n_layer=2", "model.n_head=2", "model.n_embd=16", "model.block_size=16", "batch_size=4", "threads=1",
    "schedule.warmup_iters=1", "log_interval=1", "eval_interval=2", "checkpoint_interval=2", "device=cpu",
    "dtype=float32", "plot=false",
]  # fmt: skip


TINY_LAYER = [  # of MLA, of a few channels
    "model.n_embd=64", "attention.q_rank=32", "attention.kv_rank=32", "attention.nope_dim=16", "attention.rope_dim=8",
    "attention.v_dim=16", "device=cpu", "dtype=float32", "threads=1",
]  # fmt: skip
HANGING_DNS = "import socket, time\nsocket.getaddrinfo = lambda *args, **kwargs: time.sleep(60)\n"


@pytest.fixture
def trained(corpus: Path, tmp_path: Path) -> Trained:
    """Train on `corpus` in a folder of tmp_path: trained("a", max_iters=3) -> the folder.

    status: the exit status that the run must end with.
    """
    from helpers.runs import configured

    import train

    def call(name: str = "run", status: int = 0, **changes: Any) -> Path:
        assert train.run(configured(corpus, tmp_path / name, **changes)) == status
        return tmp_path / name

    return call


@pytest.fixture
def tiny_run(corpus: Path) -> list[str]:
    """Overrides of a run of a few milliseconds an iteration, with dropout, on `corpus`."""
    return ["data=text", f"data.path={corpus}", *TINY]
