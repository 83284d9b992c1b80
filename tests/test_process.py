"""How programs end: with their children, without their output, and stopped where a signal came before an error."""

import errno
import logging
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, eventually, exit_status, fork, needs_compiler, processes_with
from helpers.fineweb import Parquet
from helpers.runs import TORCHRUN, configured, saved_json
from helpers.sweeps import tiny_sweep, where, with_mps
from tqdm import tqdm

import train
from core.process import guarded, say
from core.schema import ConfigError
from data.batches import Batches
from scripts import report
from sweeps import launch
from sweeps.plan import compose

# -----------------------------------------------------------------------------
# What is ended takes its children along


SMALL = ["model.n_layer=1", "model.n_head=2", "model.n_embd=16", "model.block_size=16", "batch_size=2", "threads=1"]
PROGRAMS = {  # its words, what the command lines of its children have, and how many of them there are at least
    "check_gpu": (["scripts/check_gpu.py", "device=cpu", "parts=[changes]", "rounds=9999", *SMALL], "spawn_main", 2),
    "bench": (
        ["scripts/benchmarks/bench_train.py", "variants=qk_norm=none;qk_norm=rms", "iters=10000000", "data=random",
         "data.n_tokens=1000", "data.vocab_size=9", "data.val_tokens=100", "device=cpu", *SMALL], "spawn_main", 1,
    ),
    "mps": (["sweeps/launch.py", "max_iters=100000", "launcher.workers=3", "launcher.mps=true"], "worker.py", 3),
    "torchrun": (["train.py", "max_iters=100000", "gradient_accumulation_steps=2"], "train.py", 2),
    "compilers": (["train.py"], "sleep", 2),  # of our kernels
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("check_gpu", signal.SIGKILL), ("bench", signal.SIGTERM),  # neither handles a signal: one watcher ends both's
        ("mps", signal.SIGHUP), ("torchrun", signal.SIGKILL),
        ("compilers", signal.SIGTERM), ("compilers", signal.SIGKILL),
    ],
)  # fmt: skip
def test_what_is_ended_takes_its_children_along(
    name: str, number: signal.Signals, tmp_path: Path, corpus: Path, tiny_run: list[str]
) -> None:
    (script, *words), part, least = PROGRAMS[name]
    of_script = {"sweeps/launch.py": where(tiny_sweep(tmp_path, corpus))[:2], "train.py": tiny_run}
    words += of_script.get(script, [])
    python = TORCHRUN if name == "torchrun" else [sys.executable]
    mark = {"TEST_MARK": str(tmp_path)}
    environment = {**(with_mps(tmp_path) if name == "mps" else os.environ), **mark}
    if name == "compilers":
        slow = tmp_path / "c++"
        slow.write_text("#!/bin/sh\nsleep 600 &\nwait\n")
        slow.chmod(0o755)
        environment |= {"CXX": str(slow), "XDG_CACHE_HOME": str(tmp_path)}

    def children() -> list[int]:
        found = []
        for pid in processes_with(mark):
            with suppress(FileNotFoundError):  # it has ended
                if pid != process.pid and part.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found

    options: Any = {"cwd": tmp_path, "env": environment, "start_new_session": True}
    options |= {"stdout": (tmp_path / "out").open("wb"), "stderr": subprocess.STDOUT}
    heed_hangup = partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)  # nohup has it ignored, and so do its children
    process = subprocess.Popen([*python, str(ROOT / script), *words], preexec_fn=heed_hangup, **options)
    try:
        eventually(lambda: len(children()) >= least, 600)
        if name == "torchrun":
            eventually((tmp_path / "runs").exists)
        if name == "bench":  # a side computes, and reads no pipe
            eventually(lambda: b" a turn, " in (tmp_path / "out").read_bytes(), 600)
        process.send_signal(number)
        assert process.wait() == -number
        eventually(lambda: processes_with(mark) == [])
        assert not [*tmp_path.glob("nanoqk_mps_*")]
    finally:
        for pid in processes_with(mark):
            os.kill(pid, signal.SIGKILL)


def test_a_process_that_heeds_no_signal_is_killed_once_its_parent_is_gone() -> None:
    """As a rank that waits for another one, which does not answer."""
    program = (
        "import signal, time\n"
        "from core import process\n"
        "process.PATIENCE = 0.5\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "process.end_with_parent(lambda: None)\n"
        "time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", program], env=environment, timeout=60).returncode == -signal.SIGKILL


def test_a_forked_sibling_keeps_no_child_alive(tmp_path: Path) -> None:
    mark = {"TEST_MARK": str(tmp_path)}
    program = (
        "import os, time\n"
        "from core.process import start_bound\n"
        "start_bound(['sleep', '600'])\n"
        "if sibling := os.fork():\n"
        "    print(sibling, flush=True)\n"
        "time.sleep(600)\n"
    )
    environment = {**os.environ, **mark, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment)
    assert parent.stdout is not None
    sibling = int(parent.stdout.readline())
    try:
        eventually(lambda: len(processes_with(mark)) >= 5)  # they, the shells, sleep
        parent.kill()
        parent.wait()
        eventually(lambda: processes_with(mark) == [sibling])
    finally:
        for pid in processes_with(mark):
            os.kill(pid, signal.SIGKILL)


# -----------------------------------------------------------------------------
# What cannot be printed ends nothing


def prints_in_every_way() -> int:
    """More than a stream holds."""
    for text in ("a line", "x" * 100_000):
        say(text)
        warnings.warn(text, stacklevel=1)
        logging.error(text)
        print(text, file=sys.stderr)
        with tqdm(range(3), desc=text, file=sys.stderr, mininterval=0) as bar:
            for _ in bar:
                say(text, bar.write)
    return 7


def without_output(work: Callable[[], int], place: str = "/dev/full") -> int:
    """The exit status of a program that prints to a place which takes nothing."""

    def call() -> int:
        read, write = os.pipe()
        os.close(read)
        number = write if place == "a closed pipe" else os.open(place, os.O_WRONLY)
        sys.stdout, sys.stderr = (open(os.dup(number), "w", buffering=1) for _ in range(2))  # noqa: SIM115
        status = guarded(work)
        sys.stdout.flush()  # as Python does at exit
        sys.stderr.flush()
        return status

    return exit_status(fork(call))


@pytest.mark.parametrize("place", ["/dev/full", "a closed pipe"])
def test_a_line_that_nobody_takes_ends_no_program(place: str, corpus: Path, tmp_path: Path) -> None:
    assert without_output(prints_in_every_way, place) == 7
    assert without_output(lambda: train.run(configured(corpus, tmp_path / "run")), place) == 0
    assert saved_json(tmp_path / "run", "status")["state"] == "done"
    assert "done: val/loss" in (tmp_path / "run" / "train.log").read_text()
    assert without_output(lambda: print("what was asked for") or 0, place) == (place == "/dev/full")


def test_programs_over_many_runs_go_on_without_their_output(
    corpus: Path, tmp_path: Path, parquet: Parquet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scripts.reporting.page.vega", lambda: "")  # which takes a second
    sweep = tiny_sweep(tmp_path, corpus, "max_iters=4", grid={}, folds=[0])
    words = [f"sweep_dir={tmp_path / 'sweep'}", f"out={tmp_path / 'out'}"]
    assert without_output(lambda: launch.main(where(sweep))) == 0
    assert without_output(lambda: report.main(words)) == 0 and (tmp_path / "out" / "report.html").exists()
    given = [f"dataset={parquet[0]}", f"out={tmp_path / 'shards'}", "tokenizer=bpe", "vocab_size=300", "workers=2"]
    with open("/dev/full", "w") as full:  # no fork: that lacks the threads of datasets, where this process has used it
        prepare = [sys.executable, str(ROOT / "data" / "prepare_fineweb.py"), *given]
        assert subprocess.run(prepare, stdout=full, stderr=full).returncode == 0
    assert (tmp_path / "shards" / "index.json").exists()


def test_ctrl_c_amid_a_librarys_clean_up_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """OmegaConf's ends in an AttributeError. An error of whoever handles an earlier Ctrl-C is not one."""

    def interrupted(*_: Any, **__: Any) -> None:
        try:
            raise KeyboardInterrupt
        finally:
            raise AttributeError

    for place in ("hydra.compose", "hydra.core.config_store.ConfigStore.store"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(place, interrupted)
            compose(["seed=2"])
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        with pytest.raises(ConfigError, match="nonsense"):
            compose(["nonsense=1"])


# -----------------------------------------------------------------------------
# An error after a stop signal is a stop


@needs_compiler
def test_a_signal_to_the_group_while_pytorch_compiles_is_a_stop(tiny_run: list[str], tmp_path: Path) -> None:
    """Once the run has begun, a compiler waits, and dies of the signal."""
    compiler, run = tmp_path / "bin" / "g++", tmp_path / "run"
    compiler.parent.mkdir()
    waits = f"#!/bin/sh\ngrep -qs parameters {run}/train.log && mkdir {tmp_path}/waits && exec sleep 600\n"
    compiler.write_text(waits + 'case "$*" in *model/kernels*) exit 1;; esac\nexec /usr/bin/g++ "$@" -O0\n')
    compiler.chmod(0o755)
    caches = {"XDG_CACHE_HOME": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    environment = {**os.environ, **caches, "CXX": str(compiler)}
    words = [*tiny_run, "model.n_layer=1", "compile=true", f"out_dir={run}"]
    command = [sys.executable, str(ROOT / "train.py"), *words]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, start_new_session=True, **pipes) as process:
        try:
            eventually((tmp_path / "waits").exists, seconds=600)
            time.sleep(1)
            os.killpg(process.pid, signal.SIGTERM)
            out, err = process.communicate(timeout=180)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 143, err
    assert "stopped by SIGTERM amid" in out.splitlines()[-1] and err.count("\n") == 1  # of the kernels
    assert saved_json(run, "status")["state"] == "stopped"


DEAD = RuntimeError("a process of the pool died")


@pytest.mark.parametrize(
    ("owner", "name", "error", "comes", "status", "state"),
    [
        (train, "evaluate", DEAD, True, 143, "stopped"),
        (Batches, "prefetch", DEAD, True, 143, "stopped"),  # in a data worker
        (train, "step_optimizer", ConnectionResetError("by peer"), True, 143, "stopped"),
        (train, "step_optimizer", DEAD, False, 1, "failed"),
        (train, "evaluate", OSError(errno.ENOSPC, "No space left on device"), True, 1, "failed"),
        (train, "step_optimizer", MemoryError("too large"), True, 1, "failed"),
    ],
)
def test_an_error_after_a_stop_signal_is_a_stop(
    owner: Any, name: str, error: Exception, comes: bool, status: int, state: str, corpus: Path, tmp_path: Path
) -> None:
    def fail(*args: Any, **more: Any) -> None:
        if signals:
            os.kill(os.getpid(), signals.pop())
        raise error

    def fail_in_a_worker(self: Batches, steps: Any) -> Any:
        Batches._read = fail  # type: ignore[assignment, method-assign]
        yield from prefetch(self, steps)

    signals, prefetch = [signal.SIGTERM] if comes else [], Batches.prefetch

    def trains() -> int:  # in a process of its own, where nothing has to be undone
        setattr(owner, name, fail_in_a_worker if owner is Batches else fail)
        return guarded(lambda: train.run(configured(corpus, tmp_path / "run")))

    assert exit_status(fork(trains)) == status
    assert saved_json(tmp_path / "run", "status")["state"] == state
    said = (tmp_path / "run" / "train.log").read_text()
    assert said.count("stopped by SIGTERM amid") == (status == 143)
    assert train.run(configured(corpus, tmp_path / "run")) == 0
    assert saved_json(tmp_path / "run", "summary")["status"] == "done"
