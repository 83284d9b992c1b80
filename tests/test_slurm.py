"""launcher=slurm, where sinfo answers on this machine. The tests of what a task does with signals need no SLURM."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, cast

import pytest
from conftest import eventually, exit_status, fork, write_corpus
from helpers.runs import assert_same_run
from helpers.sweeps import frozen, launched, offer, pending_signals, times_finished, tiny_sweep

import train
from core.files import is_locked
from core.plugins import find_plugin
from core.process import StopSignal
from core.rundir import read_status
from sweeps import launch
from sweeps.claims import read_claim
from sweeps.launchers import Launcher, Slurm, SlurmOptions, Task
from sweeps.plan import read_plan
from sweeps.status import State

TWO_RUNS = "sweep.folds=[0]"
PROGRAM = """
import sys
import sweeps.launchers
sweeps.launchers.SQUEUE_EVERY = 0.5
from sweeps.launch import main
sys.exit(main(sys.argv[1:]))
"""


def shell(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout


def answers() -> bool:
    """Whether there is a SLURM with a node that takes jobs."""
    try:
        return any(state in shell("sinfo", "--noheader", "--format=%T") for state in ("idle", "mixed", "allocated"))
    except (OSError, subprocess.SubprocessError):
        return False


def test_one_run_that_no_worker_has_taken_yet_gets_one_worker(tmp_path: Path, corpus: Path) -> None:
    """A worker that waits in SLURM's queue, or imports torch, has claimed nothing: it must not count as missing."""

    class Queue:
        sweep_dir, launch, workers, deaths = tmp_path / "sweep", "1", 16, 0
        submitted: ClassVar[list[int]] = []

        def alive(self) -> int:
            return max(self.submitted, default=0)

        def start(self, n: int) -> None:
            self.submitted.append(n)
            if len(self.submitted) == 5:
                stop.signal = signal.SIGTERM

        def failure(self) -> None:
            return None

        def stop(self) -> None:
            pass

    runs = frozen(tiny_sweep(tmp_path, corpus))[:1]
    (tmp_path / "sweep" / "claims").mkdir()
    stop, states = StopSignal(), {runs[0].id: State("pending")}
    stop.signal = 0
    launch.supervise(runs, states, cast(Launcher, Queue()), 1, False, stop)
    assert Queue.submitted == [1, 1, 1, 1, 1]


@pytest.fixture(scope="session")
def slurm() -> None:
    if not answers():
        pytest.skip("no SLURM here")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sweep file of four runs that the local launcher has made; their directory is beside it."""
    folder = tmp_path_factory.mktemp("undisturbed")
    sweep = tiny_sweep(folder, write_corpus(folder), "max_iters=80", grid={"qk_norm": ["none", "rms"]})
    launched(sweep, "launcher.threads=1")
    return sweep


class OnSlurm:
    """The same sweep with launcher=slurm, in a directory of its own."""

    def __init__(self, sweep: Path, sweep_dir: Path) -> None:
        self.sweep, self.path = sweep, sweep_dir
        self.launchers: list[subprocess.Popen[str]] = []

    def launch(self, *words: str) -> subprocess.Popen[str]:
        where = [f"sweep={self.sweep}", f"sweep_dir={self.path}", "launcher=slurm", "launcher.timeout_min=10"]
        command = [sys.executable, "-c", PROGRAM, *where, *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.launchers.append(subprocess.Popen(command, cwd=self.path.parent, **pipes))  # type: ignore[call-overload]
        return self.launchers[-1]

    def tasks(self) -> dict[str, str]:
        """Job id -> state of what is queued or running."""
        listed = shell("squeue", "--noheader", "--array", f"--name=nanoqk-{self.path.name}", "--format=%i %T")
        return dict(line.split() for line in listed.splitlines())

    def submissions(self) -> int:
        return len(list((self.path / "slurm").glob("*_submission.sh")))

    def at(self, step: int) -> int | None:
        """The process of a run that has come that far, and is not at its end."""
        runs = read_plan(self.path) if (self.path / "plan.jsonl").exists() else []
        states = [read_status(self.path / run.id) for run in runs]
        pids = [s["pid"] for s in states if s.get("state") == "running" and (s.get("iter") or 0) >= step]
        return pids[0] if pids else None

    def hold(self, step: int) -> int:
        """Stop that process, so that the run is not over before something is done to it."""
        pid: int = eventually(lambda: self.at(step))
        os.kill(pid, signal.SIGSTOP)
        return pid

    def assert_same_as(self, undisturbed: Path) -> None:
        """Every run equals the local launcher's bit for bit, and was finished exactly once."""
        for run in read_plan(self.path):
            assert_same_run(undisturbed.parent / "sweep" / run.id, self.path / run.id)
            assert times_finished(self.path / run.id) == 1

    def log(self) -> str:
        """What the runs, their workers and the tasks have logged."""
        files = [self.path / run.id / "train.log" for run in read_plan(self.path)]
        return "".join(file.read_text() for file in [*files, *self.path.glob("logs/*"), *self.path.glob("slurm/*.out")])


@pytest.fixture
def sweep(slurm: None, undisturbed: Path, tmp_path: Path) -> Iterator[OnSlurm]:
    sweep = OnSlurm(undisturbed, tmp_path / f"sweep-{os.getpid()}-{time.time_ns()}")
    yield sweep
    for launcher in sweep.launchers:
        launcher.kill()
        launcher.communicate()
    if tasks := sweep.tasks():
        shell("scancel", "--signal=KILL", *tasks)


def ended(launcher: subprocess.Popen[str], status: int = 0) -> tuple[str, str]:
    output, errors = launcher.communicate(timeout=300)
    assert launcher.returncode == status, output + errors
    return output, errors


# -----------------------------------------------------------------------------
# On SLURM


def test_a_sweep_on_slurm_equals_one_of_this_machine(sweep: OnSlurm, undisturbed: Path) -> None:
    output, errors = ended(sweep.launch("launcher.workers=2"))
    assert "4 done" in output and errors == ""
    sweep.assert_same_as(undisturbed)
    assert sweep.submissions() == 1 and sweep.tasks() == {}, sweep.log()


def test_a_task_that_receives_usr2_saves_and_is_requeued(sweep: OnSlurm, undisturbed: Path) -> None:
    launcher = sweep.launch(TWO_RUNS)
    pid = sweep.hold(10)
    [task] = sweep.tasks()
    shell("scancel", "--signal=USR2", task)
    eventually(lambda: pending_signals(pid))
    os.kill(pid, signal.SIGCONT)
    eventually(lambda: sweep.tasks().get(task) == "PENDING")
    [reason] = [read_status(sweep.path / run.id) for run in read_plan(sweep.path)[:1]]
    assert (reason["state"], reason["reason"]) == ("stopped", "SIGTERM") and 10 <= reason["iter"] < 80
    assert not is_locked(sweep.path / "claims" / read_plan(sweep.path)[0].id)
    time.sleep(2)  # enough for a launcher that would take it for dead
    assert sweep.tasks() == {task: "PENDING"}
    shell("scontrol", "update", f"JobId={task}", "StartTime=now")  # by itself it waits two minutes
    ended(launcher)
    assert sweep.submissions() == 1, sweep.log()
    assert f"resumed at iteration {reason['iter']}" in sweep.log()
    sweep.assert_same_as(undisturbed)


def test_a_task_that_dies_is_replaced(sweep: OnSlurm, undisturbed: Path) -> None:
    launcher = sweep.launch(TWO_RUNS)
    os.kill(sweep.hold(10), signal.SIGKILL)
    output, errors = ended(launcher)
    assert "2 done" in output and errors == ""
    assert sweep.submissions() == 2 and "resumed at iteration" in sweep.log(), sweep.log()
    sweep.assert_same_as(undisturbed)


def test_ctrl_c_stops_the_tasks_at_a_checkpoint_and_the_same_command_goes_on(sweep: OnSlurm, undisturbed: Path) -> None:
    launcher = sweep.launch(TWO_RUNS, "launcher.workers=3")  # more than there is room for: one stays in the queue
    pid = sweep.hold(10)
    launcher.send_signal(signal.SIGINT)
    eventually(lambda: pending_signals(pid))
    os.kill(pid, signal.SIGCONT)
    output, _ = ended(launcher, 128 + signal.SIGINT)
    assert sweep.tasks() == {}
    assert "stopped by SIGINT" in output and "the same command goes on" in output
    begun = [state for run in read_plan(sweep.path) if (state := read_status(sweep.path / run.id))]
    assert all(state["state"] in ("stopped", "done") for state in begun) and max(state["iter"] for state in begun) >= 10
    ended(sweep.launch(TWO_RUNS))
    steps = [state["iter"] for state in begun if state["state"] == "stopped" and state["iter"]]
    assert steps and all(f"resumed at iteration {step}" in sweep.log() for step in steps)
    sweep.assert_same_as(undisturbed)


def test_a_killed_launcher_leaves_its_tasks_and_the_next_goes_on_beside_them(sweep: OnSlurm, undisturbed: Path) -> None:
    launcher = sweep.launch(TWO_RUNS)
    first = sweep.hold(4)  # its run lasts until the second launcher is there
    launcher.kill()
    [task] = sweep.tasks()
    second = sweep.launch(TWO_RUNS)
    eventually(lambda: len(sweep.tasks()) == 2)
    os.kill(first, signal.SIGCONT)
    assert sweep.tasks()[task] == "RUNNING"
    output, _ = ended(second)
    assert "1 running" in output and "2 done" in output
    assert "resumed" not in sweep.log()  # the first task has ended what it had begun
    sweep.assert_same_as(undisturbed)


def test_a_refused_submission_is_one_line_and_blocks_nothing(sweep: OnSlurm) -> None:
    one = [TWO_RUNS, "sweep.grid.qk_norm=[none]", "max_iters=5"]
    output, errors = ended(sweep.launch("launcher.partition=nowhere", *one), 2)
    assert errors.count("\n") == 1 and errors.startswith("error: launcher=slurm: sbatch refuses: "), errors
    assert "partition" in errors and "Traceback" not in output
    assert "1 done" in ended(sweep.launch(*one))[0]


def test_tasks_that_die_at_once_are_one_line_with_their_log(sweep: OnSlurm) -> None:
    _, errors = ended(sweep.launch("launcher.setup=[echo this node is broken, exit 3]"), 1)
    assert errors.count("\n") == 1 and "SLURM tasks die as soon as they start" in errors, errors
    assert "this node is broken" in Path(errors.split(" see ")[1].strip()).read_text()
    assert sweep.submissions() == 3


# -----------------------------------------------------------------------------
# A run of several ranks

TWO_RANKS = ["launcher.gpus=2", "launcher.options={gpus_per_node: 0}", "gradient_accumulation_steps=2"]


@pytest.fixture(scope="module")
def two_ranks(undisturbed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same sweep file, beside the directory of two runs that the local launcher has made on two ranks each."""
    sweep = tmp_path_factory.mktemp("two_ranks") / "tiny.yaml"
    sweep.write_text(undisturbed.read_text())
    launched(sweep, "launcher.threads=1", "launcher.workers=1", "launcher.ranks=2", TWO_RUNS, TWO_RANKS[-1])
    return sweep


def test_two_ranks_that_receive_usr2_save_once_and_are_requeued(sweep: OnSlurm, two_ranks: Path) -> None:
    launcher = sweep.launch(TWO_RUNS, *TWO_RANKS)
    pid = sweep.hold(10)
    [task] = sweep.tasks()
    shell("scancel", "--signal=TERM", task)
    shell("scancel", "--signal=USR2", task)  # as SLURM does when it preempts
    eventually(lambda: pending_signals(pid))
    os.kill(pid, signal.SIGCONT)
    eventually(lambda: sweep.tasks().get(task) == "PENDING")
    [status] = [read_status(sweep.path / run.id) for run in read_plan(sweep.path)[:1]]
    assert status["state"] == "stopped" and 10 <= status["iter"] < 80
    # else the task may end as FAILED: SLURM seems to take the exit status of the first start, 255, for the second's
    eventually(lambda: f"slurmstepd: [{task}." not in shell("ps", "-eo", "args"))
    time.sleep(2)  # in the second of the first start's end slurmd refuses another one ("Job credential revoked")
    shell("scontrol", "update", f"JobId={task}", "StartTime=now")
    output, errors = ended(launcher)
    assert "1 worker of 2 ranks" in output and "2 done" in output and errors == ""
    assert sweep.submissions() == 1 and f"resumed at iteration {status['iter']}" in sweep.log(), sweep.log()
    assert sweep.tasks() == {}
    sweep.assert_same_as(two_ranks)


# -----------------------------------------------------------------------------
# A task and signals, without SLURM


@pytest.fixture
def endless(tmp_path: Path, corpus: Path) -> Path:
    """The directory of a sweep of one long run, and of the launch "here" of it."""
    runs = frozen(tiny_sweep(tmp_path, corpus, "max_iters=1000", grid={}, folds=[0]))
    offer(tmp_path / "sweep", "here", runs)
    return tmp_path / "sweep"


REQUEUED = 77


def task(sweep_dir: Path) -> int:
    """A task with something in the place of submitit's handler, which has it requeued and ends the process."""
    signal.signal(signal.SIGUSR2, lambda number, frame: os._exit(REQUEUED))
    return Task()(sweep_dir, "here")


def assert_saved(sweep_dir: Path) -> None:
    [run] = read_plan(sweep_dir)
    status = read_status(sweep_dir / run.id)
    assert status["state"] == "stopped"
    assert (sweep_dir / run.id / "ckpt" / f"step_{status['iter']:06d}" / "MANIFEST.json").exists()
    assert read_claim(sweep_dir, run.id)["tries"] == {"here": 0}  # a stop is nobody's failure


@pytest.mark.parametrize("signals", [[signal.SIGUSR2], [signal.SIGTERM, signal.SIGUSR2]])
def test_a_task_that_is_preempted_saves_before_it_is_requeued(signals: list[signal.Signals], endless: Path) -> None:
    [run] = read_plan(endless)
    pid = fork(lambda: task(endless))
    eventually(lambda: (read_status(endless / run.id).get("iter") or 0) >= 4)
    os.kill(pid, signals[0])
    eventually(lambda: read_status(endless / run.id)["state"] == "stopped")
    for number in signals[1:]:
        time.sleep(1)  # long enough to end, had it not to wait
        os.kill(pid, number)
    assert exit_status(pid) == REQUEUED
    assert_saved(endless)


def test_a_signal_before_the_loop_begins_is_not_lost(endless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = train.setup

    def interrupted(*args: object) -> object:
        os.kill(os.getpid(), signal.SIGUSR2)
        time.sleep(0.2)  # until the first look whether the loop has begun is over
        return setup(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(train, "setup", interrupted)
    assert exit_status(fork(lambda: task(endless))) == REQUEUED
    assert_saved(endless)


def test_a_task_stopped_by_its_launcher_is_not_requeued(endless: Path) -> None:
    [run] = read_plan(endless)
    pid = fork(lambda: task(endless))
    eventually(lambda: (read_status(endless / run.id).get("iter") or 0) >= 4)
    (endless / "launches" / "here.stop").touch()
    os.kill(pid, signal.SIGUSR2)
    assert exit_status(pid) == 128 + signal.SIGTERM
    assert_saved(endless)
    assert exit_status(fork(lambda: task(endless))) == 0  # one that starts later begins nothing
    assert_saved(endless)


# -----------------------------------------------------------------------------
# The queue, without SLURM


def test_tasks_stay_alive_while_slurm_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    monkeypatch.setenv("PATH", f"{bin_dir}:{os.environ['PATH']}")
    monkeypatch.setattr("sweeps.launchers.SQUEUE_EVERY", 0.0)
    (bin_dir / "squeue").write_text("#!/bin/sh\necho Unable to contact slurm controller >&2\nexit 1\n")
    (bin_dir / "squeue").chmod(0o755)
    launcher = Slurm(SlurmOptions(workers=2), tmp_path / "sweep", "here")
    launcher.tasks = {"7_0": None, "7_1": None}
    assert launcher.alive() == 2
    (bin_dir / "squeue").write_text("#!/bin/sh\necho 7_0\necho 7_1\necho 9\n")
    assert launcher.alive() == 2


def test_a_task_submitted_from_within_a_job_gets_nothing_of_that_job_and_its_plugins(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, plugins_undone: None
) -> None:
    (tmp_path / "my_plugin.py").touch()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    for name in ("sbatch", "srun"):  # submitit looks for srun
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\nenv > {tmp_path}/environment\nexit 1\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    of_the_job = ["SLURM_ARRAY_JOB_ID", "SLURM_JOB_ID", "SRUN_CPUS_PER_TASK", "SUBMITIT_EXECUTOR", "RANK", "LOCAL_RANK",
                  "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"]  # fmt: skip
    of_the_user = ["SLURM_CONF", "SBATCH_ACCOUNT", "SBATCH_PARTITION", "RANKS", "MY_SLURM_JOB_ID"]
    for name in [*of_the_job, *of_the_user]:
        monkeypatch.setenv(name, "1" if name.endswith("WORLD_SIZE") else "0")
    launched(tiny_sweep(tmp_path, corpus, "plugins=[my_plugin]"), "launcher=slurm", status=2)
    (script,) = (tmp_path / "sweep" / "slurm").glob(".submission_file_*.sh")
    export = f"export NANOQK_PLUGINS=my_plugin={find_plugin('my_plugin').sha256}"
    assert export in script.read_text().splitlines() and "PYTHONSAFEPATH=1" in script.read_text()
    got = {line.partition("=")[0] for line in (tmp_path / "environment").read_text().splitlines()}
    assert not {*of_the_job} & got and {*of_the_user} <= got
    assert {*of_the_job} <= {*os.environ}


def test_a_dry_run_needs_nothing_of_the_nodes(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/sh\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    sweep = tiny_sweep(tmp_path, corpus, "device=cuda:7", "threads=null", grid={}, folds=[0])
    said = launched(sweep, "launcher=slurm", "launcher.threads=4096", "dry_run=true")
    assert "1 runs (1 pending)" in said and "on 2 workers with CPUs as here, " in said
