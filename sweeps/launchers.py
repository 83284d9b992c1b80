"""Where a sweep's workers run: processes of this machine, or tasks of a SLURM job array.

A launcher has start(n), which brings the number of live workers up to n, alive() and stop().
"""

import contextlib
import io
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from core.schema import ConfigError, at_least, require, show
from sweeps.worker import PATIENCE, RESTART

WORKER = Path(__file__).resolve().parent / "worker.py"
SQUEUE_EVERY = 5.0  # seconds between two questions to SLURM's controller
SBATCH_AGAIN = 60.0  # seconds after which tasks that SLURM refused are submitted again
USR2_AFTER_TERM = 60  # seconds; SLURM preempts with SIGTERM, then the signal that was asked for, then SIGKILL


@dataclass(frozen=True)
class LocalConfig:
    name: str = "local"
    workers: int | None = None
    threads: int | None = None
    runs_per_gpu: int = 1
    ranks: int = 1

    def check(self) -> None:
        for key in ("workers", "threads", "runs_per_gpu", "ranks"):
            if getattr(self, key) is not None:
                at_least(f"launcher.{key}", getattr(self, key), 1)
        if self.ranks > 1:
            require(self.runs_per_gpu == 1, f"launcher.runs_per_gpu={self.runs_per_gpu} must be 1 with launcher.ranks")
            wanted, gpus = self.ranks * (self.workers or 1), len(visible_gpus())
            require(
                gpus == 0 or wanted <= gpus,
                f"launcher.ranks={self.ranks} and launcher.workers={self.workers or 1} need {wanted} GPUs of {gpus}",
            )


@dataclass(frozen=True)
class SlurmConfig:
    name: str = "slurm"
    workers: int = 1
    threads: int = 1
    gpus: int = 0
    mem_gb: int | None = None
    partition: str | None = None
    timeout_min: int = 60
    save_s: int = 90
    max_requeues: int = 100
    options: dict = field(default_factory=dict)
    setup: list = field(default_factory=list)
    ranks = 1  # of a run; no setting here

    def check(self) -> None:
        for key in ("workers", "threads", "save_s"):
            at_least(f"launcher.{key}", getattr(self, key), 1)
        require(self.gpus in (0, 1), f"launcher.gpus={self.gpus} must be 0 or 1: a run uses one")
        at_least("launcher.max_requeues", self.max_requeues, 0)
        require(
            60 * self.timeout_min > self.save_s + 60,  # SLURM is up to a minute early
            f"launcher.timeout_min={self.timeout_min} must be more than launcher.save_s={self.save_s} and a minute",
        )
        require(self.mem_gb is None or self.mem_gb > 0, f"launcher.mem_gb={self.mem_gb} must be > 0")
        for key, value in self.options.items():
            good = isinstance(key, str) and isinstance(value, str | int)
            require(good, f"launcher.options={show(self.options)} must be names and values, as {{account: lab}}")
        good = all(isinstance(line, str) for line in self.setup)
        require(good, f"launcher.setup={show(self.setup)} must be a list of shell lines")
        require(shutil.which("sbatch") is not None, "launcher=slurm needs sbatch, which is not here")


class Launcher(Protocol):
    workers: int
    threads: int  # of a rank
    deaths: int  # workers that died one after the other, none of them having lived for a minute or taken a run

    def start(self, n: int) -> None: ...
    def alive(self) -> int: ...
    def stop(self) -> None: ...
    def failure(self) -> str | None: ...


class Local:
    """Worker processes on this machine, each with a share of the CPUs, or of a GPU, or with a GPU a rank. They end with
    their launcher."""

    def __init__(self, config: LocalConfig, sweep_dir: Path, launch: str) -> None:
        self.sweep_dir, self.launch = sweep_dir, launch
        cpus, gpus, ranks = len(os.sched_getaffinity(0)), visible_gpus(), config.ranks
        self.workers = config.workers or max(1, (len(gpus) * config.runs_per_gpu if gpus else cpus) // ranks)
        self.threads = config.threads or max(1, cpus // (self.workers * ranks))
        self.slots: list[subprocess.Popen[bytes] | None] = [None] * self.workers
        places = range(0, self.workers * ranks, ranks)
        self.gpus = [
            ",".join(gpus[(first + i) % len(gpus)] for i in range(ranks)) if gpus else None for first in places
        ]
        self.deaths = 0
        self.started = [0.0] * self.workers

    def start(self, n: int) -> None:
        for i, process in enumerate(self.slots):
            if process is not None and process.poll() is not None:
                died_young = process.returncode not in (0, RESTART) and time.monotonic() - self.started[i] < 60
                self.deaths = self.deaths + 1 if died_young else 0
                self.slots[i] = None
        for i in range(self.workers):
            if self.slots[i] is None and self.alive() < n:
                environment = {**os.environ, "OMP_NUM_THREADS": str(self.threads)}
                if (gpus := self.gpus[i]) is not None:
                    environment["CUDA_VISIBLE_DEVICES"] = gpus
                command = [sys.executable, str(WORKER), "work", str(self.sweep_dir), self.launch, str(os.getpid())]
                with open(self.sweep_dir / "logs" / f"worker_{i}.log", "ab") as log:
                    self.slots[i] = subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
                        start_new_session=True,  # Ctrl-C is the launcher's, which tells them once
                    )  # fmt: skip
                self.started[i] = time.monotonic()

    def alive(self) -> int:
        return sum(process is not None and process.poll() is None for process in self.slots)

    def failure(self) -> str | None:
        """Why it makes no sense to start another worker, or None."""
        if self.deaths >= 3 * self.workers:
            return f"workers die as soon as they start: see {self.sweep_dir / 'logs' / 'worker_0.log'}"
        return None

    def stop(self) -> None:
        """Have each worker save its run and end; KeyboardInterrupt during that ends them at once."""
        live = [process for process in self.slots if process is not None and process.poll() is None]
        try:
            for process in live:
                process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + PATIENCE
            for process in live:
                process.wait(max(0.1, deadline - time.monotonic()))
        except (KeyboardInterrupt, subprocess.TimeoutExpired):
            for process in live:
                process.kill()


def visible_gpus() -> list[str]:
    """The GPUs that CUDA would show, as values of CUDA_VISIBLE_DEVICES."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [gpu for gpu in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if gpu]
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return [str(i) for i, line in enumerate(listed.stdout.splitlines()) if line.startswith("GPU ")]


# -----------------------------------------------------------------------------
# SLURM


class Slurm:
    """Tasks of SLURM job arrays, submitted by submitit, each a worker. They outlive a launcher that is killed.

    squeue alone tells which of them live: what it does not list is gone, however it ended; no accounting is needed.
    """

    def __init__(self, config: SlurmConfig, sweep_dir: Path, launch: str) -> None:
        self.config, self.sweep_dir, self.launch = config, sweep_dir, launch
        self.workers, self.threads = config.workers, config.threads
        self.name = "nanoqk-" + re.sub(r"[^\w.-]", "_", sweep_dir.name)
        self.tasks: dict[str, Any] = {}  # those queued or running: job id -> submitit's job
        self.ran_from: dict[str, float] = {}  # job id -> when it was first seen to run
        self.deaths, self.log = 0, sweep_dir  # as in Local; the last one's log
        self.asked = self.submitted = -math.inf
        self.refusals, self.refusal = 0, ""

    def start(self, n: int) -> None:
        """Raises: ConfigError where SLURM refuses the first tasks; later it is asked again."""
        import submitit

        missing = n - self.alive()
        if missing <= 0 or self.failure() or (self.refusals and time.monotonic() - self.submitted < SBATCH_AGAIN):
            return
        first, self.submitted = self.submitted == -math.inf, time.monotonic()
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # submitit prints what sbatch says, then raises it
                jobs = self.executor().map_array(Task(), [self.sweep_dir] * missing, [self.launch] * missing)
        except (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError) as error:
            lines = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in str(error).splitlines()]
            self.refusal = f"launcher=slurm: sbatch refuses: {'; '.join(lines) or 'it does not say why'}"
            if first:
                raise ConfigError(self.refusal) from error
            self.refusals += 1
        else:
            self.refusals = 0
            self.tasks |= {job.job_id: job for job in jobs}

    def executor(self) -> Any:
        """submitit's, with the settings of the tasks."""
        import submitit

        c = self.config
        executor = submitit.SlurmExecutor(self.sweep_dir / "slurm", max_num_timeout=c.max_requeues)
        executor.update_parameters(
            job_name=self.name,
            partition=c.partition,
            time=c.timeout_min,
            signal_delay_s=c.save_s,
            cpus_per_task=c.threads,
            gpus_per_node=c.gpus or None,
            mem=None if c.mem_gb is None else f"{c.mem_gb}GB",
            array_parallelism=c.workers,
            stderr_to_stdout=True,
            srun_args=[f"--cpus-per-task={c.threads}"],  # which srun does not take over from sbatch
            setup=[
                *c.setup,
                f"export PYTHONPATH={shlex.quote(str(WORKER.parent.parent))}${{PYTHONPATH:+:$PYTHONPATH}}",
                f"export OMP_NUM_THREADS={c.threads}",
            ],
            additional_parameters={"requeue": True, **c.options},
        )
        return executor

    def alive(self) -> int:
        """The number of tasks queued or running, by a look at the queue that is at most SQUEUE_EVERY old."""
        if not self.tasks or time.monotonic() - self.asked < SQUEUE_EVERY:
            return len(self.tasks)
        queue, self.asked = self.queue(), time.monotonic()
        if queue is None:
            return len(self.tasks)
        for job_id, task in list(self.tasks.items()):
            state = queue.get(job_id)
            if state == "RUNNING":
                self.ran_from.setdefault(job_id, self.asked)
            elif state is None:
                del self.tasks[job_id]
                died = not task.paths.result_pickle.exists() or task.exception() is not None
                died_young = died and self.asked - self.ran_from.get(job_id, self.asked) < 60
                self.deaths = self.deaths + 1 if died_young else 0
                self.log = task.paths.stdout
        return len(self.tasks)

    def queue(self) -> dict[str, str] | None:
        """Job id -> state, of what is queued or running under this sweep's name; None when SLURM does not answer."""
        command = ["squeue", "--noheader", "--array", f"--user={os.getuid()}", f"--name={self.name}", "--format=%i %T"]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("SQUEUE_")}
        try:
            asked = subprocess.run(command, capture_output=True, text=True, timeout=30, env=environment)
        except subprocess.TimeoutExpired:
            return None
        return dict(line.split() for line in asked.stdout.splitlines()) if asked.returncode == 0 else None

    def failure(self) -> str | None:
        """Why it makes no sense to submit another task, or None."""
        if self.refusals >= 3 and not self.tasks:
            return self.refusal
        if self.deaths >= 3 * self.workers:
            shared = "" if self.log.exists() else ", which is not there: is it on a file system that all nodes share?"
            return f"SLURM tasks die as soon as they start: see {self.log}{shared}"
        return None

    def stop(self) -> None:
        """Have each task save its run and end; KeyboardInterrupt during that ends them at once."""
        (self.sweep_dir / "launches" / f"{self.launch}.stop").touch()  # for those that are about to start
        deadline = time.monotonic() + PATIENCE
        try:
            while self.tasks and time.monotonic() < deadline:
                self.scancel("--state=PENDING")
                self.scancel("--state=RUNNING", "--signal=TERM")  # to the worker, not to the shell around it
                time.sleep(SQUEUE_EVERY)
                self.alive()
        except KeyboardInterrupt:
            pass
        if self.tasks:
            self.scancel()

    def scancel(self, *options: str) -> None:
        subprocess.run(["scancel", *options, *self.tasks], capture_output=True)


class Task:
    """What a SLURM task runs: a worker that saves and is requeued when its time is nearly up, or when it is preempted.

    SLURM then sends USR2 (after SIGTERM, when it preempts). submitit's handler of USR2 has the task requeued and ends
    the process; here the run that is on stops at a checkpoint first.
    """

    def __call__(self, sweep_dir: Path, launch: str) -> int:
        from sweeps.worker import work

        requeue: Any = signal.getsignal(signal.SIGUSR2)
        received = set()

        def receive(number: int, frame: FrameType | None) -> None:
            received.add(number)
            signal.setitimer(signal.ITIMER_REAL, 0.01, 1.0)

        def tell_the_run(number: int, frame: FrameType | None) -> None:
            """A run listens to SIGTERM once its loop has begun: until then, every second, look whether it has."""
            if signal.getsignal(signal.SIGTERM) is not receive:
                signal.raise_signal(signal.SIGTERM)

        for number in (signal.SIGUSR2, signal.SIGTERM):
            signal.signal(number, receive)
        signal.signal(signal.SIGALRM, tell_the_run)
        stopped = sweep_dir / "launches" / f"{launch}.stop"
        status = 0 if stopped.exists() else work(sweep_dir, launch)
        for number in (signal.SIGALRM, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # from here on it ends by itself
        if status > 128 and not stopped.exists():
            deadline = time.monotonic() + USR2_AFTER_TERM
            while signal.SIGUSR2 not in received and time.monotonic() < deadline:
                time.sleep(0.1)
            if signal.SIGUSR2 in received:
                requeue(signal.SIGUSR2, None)
        return status

    def checkpoint(self, sweep_dir: Path, launch: str) -> Any:
        """What submitit requeues: the same again, as the runs' directories hold all else."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, sweep_dir, launch)


LAUNCHERS: dict[str, tuple[type, Any]] = {"local": (LocalConfig, Local), "slurm": (SlurmConfig, Slurm)}
