"""Launchers, which start the workers of a sweep: as processes of this machine, or as tasks of a SLURM job array."""

import contextlib
import io
import itertools
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any

from core.files import ROOT, open_regular
from core.plugins import handed_on
from core.process import PATIENCE, available_cpus, input_for_life, start_bound
from core.schema import AtLeast, ConfigError, Help, options, require, show
from sweeps.ranks import stop_once
from sweeps.worker import RESTART, WORKER

SQUEUE_EVERY = 5.0  # seconds between two calls of squeue
SBATCH_AGAIN = 60.0  # seconds after which tasks that SLURM refused are submitted again
MAX_REQUEUES = 100  # of one task; a launcher that still runs then submits a new one
MPS = "nvidia-cuda-mps-control"
MPS_STARTS = 30.0  # seconds within which it answers
USR2_AFTER_TERM = 60  # seconds; SLURM preempts with SIGTERM, then with the signal that submitit asks for, then SIGKILL


@options
class LocalOptions:
    """Processes of this machine"""

    name: str = "local"
    workers: Annotated[int | None, AtLeast(1), Help("processes; null: one a GPU, or one a CPU without GPUs")] = None
    threads: Annotated[int | None, AtLeast(1), Help("CPU threads of each; null: an equal share")] = None
    ranks: Annotated[int, AtLeast(1), Help("processes that train one run together, by torchrun")] = 1
    mps: Annotated[bool, Help("workers compute on a GPU at the same time, by NVIDIA's MPS, not by turns")] = False

    def check(self) -> None:
        cpus = os.cpu_count() or 1
        require((self.threads or 1) <= cpus, f"launcher.threads={self.threads} must be <= {cpus}, the CPUs here")
        if not self.mps and self.ranks == 1:
            return
        workers, gpus = self.workers or 1, len(visible_gpus())  # asks nvidia-smi
        told = f"launcher.mps=true needs GPUs that workers share, and launcher.workers={workers} have {gpus}"
        require(not self.mps or workers > gpus > 0, told)
        require(not self.mps or shutil.which(MPS) is not None, f"launcher.mps=true needs {MPS}, which is not here")
        need = f"need {self.ranks * workers} GPUs of {gpus}"
        fit = self.ranks == 1 or gpus == 0 or self.ranks * workers <= gpus
        require(fit, f"launcher.ranks={self.ranks} and launcher.workers={workers} {need}")


@options
class SlurmOptions:
    """Tasks of a SLURM job array"""

    name: str = "slurm"
    workers: Annotated[int, AtLeast(1), Help("tasks, each of which trains one run after the other")] = 1
    gpus: Annotated[int, AtLeast(0), Help("GPUs of a node; a run uses them all, with a process for each")] = 0
    threads: Annotated[int, AtLeast(1), Help("CPUs of a process")] = 1
    partition: Annotated[str | None, Help("--partition; null: SLURM's default")] = None
    timeout_min: Annotated[int, Help("--time; a task that is out of time saves, and is requeued")] = 60
    save_s: Annotated[int, AtLeast(1), Help("seconds before that end at which a task is told to save")] = 90
    options: Annotated[dict, Help("other options of sbatch, as {account: lab}")] = field(default_factory=dict)
    setup: Annotated[list, Help('shell lines before python, as ["module load cuda"]')] = field(default_factory=list)

    @property
    def ranks(self) -> int:
        """Processes that train one run."""
        return max(1, self.gpus)

    def check(self) -> None:
        rule = f"must be more than launcher.save_s={self.save_s} and a minute"  # SLURM can be so early
        require(60 * self.timeout_min > self.save_s + 60, f"launcher.timeout_min={self.timeout_min} {rule}")
        good = all(isinstance(key, str) and isinstance(value, str | int) for key, value in self.options.items())
        require(good, f"launcher.options={show(self.options)} must be names and values, as {{account: lab}}")
        good = all(isinstance(line, str) for line in self.setup)
        require(good, f"launcher.setup={show(self.setup)} must be a list of shell lines")
        require(shutil.which("sbatch") is not None, "launcher=slurm needs sbatch, which is not here")


class Local:
    """Worker processes on this machine, each with a share of the CPUs and of a GPU, or with one GPU a rank.

    They stop when their launcher dies, since it holds the other end of their standard input. workers: the most that
    live at a time. threads: of a rank. deaths: how many workers died one after the other; sweeps/launch.py sets it to 0
    when one takes a run.
    """

    def __init__(self, options: LocalOptions, sweep_dir: Path, launch: str) -> None:
        self.sweep_dir, self.launch = sweep_dir, launch
        cpus = available_cpus()
        gpus, ranks = visible_gpus(), options.ranks
        self.shared = gpus if options.mps else []
        self.daemon: MpsDaemon | None = None
        if options.mps:
            gpus = [str(i) for i in range(len(gpus))]  # the daemon counts those that it was given
        self.workers = options.workers or max(1, (len(gpus) or cpus) // ranks)
        self.threads = options.threads or max(1, cpus // (self.workers * ranks))
        endless = itertools.cycle(gpus)
        self.gpus = [",".join(itertools.islice(endless, ranks)) for _ in range(self.workers)]
        self.slots: list[subprocess.Popen[bytes] | None] = [None] * self.workers
        self.deaths, self.died = 0, 0  # died: slot of the worker that died last

    def start(self, n: int) -> None:
        """Start workers until n are alive."""
        for i, process in enumerate(self.slots):
            if process is not None and process.poll() is not None:
                self.slots[i] = None
                if process.returncode in (0, RESTART):
                    self.deaths = 0
                else:
                    self.deaths, self.died = self.deaths + 1, i
        if self.shared and self.daemon is None:
            self.daemon = MpsDaemon(self.shared, self.sweep_dir / "logs" / f"mps_{self.launch}")
        if self.failure():
            return
        for i, gpus in enumerate(self.gpus):
            if self.slots[i] is None and self.alive() < n:
                environment = {**os.environ, "OMP_NUM_THREADS": str(self.threads)}
                environment |= self.daemon.environment if self.daemon else {}
                environment |= handed_on() | ({"CUDA_VISIBLE_DEVICES": gpus} if gpus else {})
                command = [sys.executable, WORKER, str(self.sweep_dir), self.launch]
                with open_regular(self.log(i), "ab") as log:
                    self.slots[i] = subprocess.Popen(
                        command, stdin=input_for_life(os.getpid()), stdout=log, stderr=log, env=environment,
                        start_new_session=True,  # Ctrl-C reaches the launcher alone, which sends one SIGTERM
                    )  # fmt: skip

    def log(self, slot: int) -> Path:
        return self.sweep_dir / "logs" / f"worker_{slot}.log"

    def alive(self) -> int:
        return len(self.processes())

    def processes(self) -> list[subprocess.Popen[bytes]]:
        """Those that live."""
        return [process for process in self.slots if process is not None and process.poll() is None]

    def failure(self) -> str | None:
        """Why a further worker would die too, or None."""
        if self.daemon and (failure := self.daemon.failure()):
            return failure
        if self.deaths >= 3 * self.workers:
            return f"workers die as soon as they start: see {self.log(self.died)}"
        return None

    def abandon(self) -> None:
        """Tell the workers to save and end, without waiting for them."""
        for process in self.processes():
            process.terminate()

    def stop(self) -> None:
        """Have each worker save its run and end. KeyboardInterrupt during that kills them."""
        processes = self.processes()
        try:
            self.abandon()
            deadline = time.monotonic() + PATIENCE
            for process in processes:
                process.wait(max(0.1, deadline - time.monotonic()))
        except (KeyboardInterrupt, subprocess.TimeoutExpired):
            for process in processes:
                process.kill()
        if self.daemon:
            self.daemon.stop()


class MpsDaemon:
    """NVIDIA's MPS, by which processes compute on the GPUs at the same time. It ends once this process and those that
    were started with `environment` have ended. No setting of a GPU is changed."""

    def __init__(self, gpus: list[str], logs: Path) -> None:
        self.logs = logs
        logs.mkdir(parents=True, exist_ok=True)
        folders = {"PIPE": tempfile.mkdtemp(prefix="nanoqk_mps_"), "LOG": str(logs)}  # a socket's path must be short
        self.environment = {f"CUDA_MPS_{name}_DIRECTORY": folder for name, folder in folders.items()}
        self.process_environment = {**os.environ, **self.environment, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        ends = 'rm -rf "$CUDA_MPS_PIPE_DIRECTORY"'
        runs = ["sh", "-c", f"{MPS} -f; status=$?; {ends}; exit $status"]
        last = f"echo quit | timeout {PATIENCE} {MPS}; {ends}"  # it waits for the workers, which save
        with open_regular(logs / "output.log", "ab") as log:
            self.process = start_bound(
                runs, last, stdin=subprocess.PIPE, stdout=log, stderr=log, env=self.process_environment
            )
        deadline = time.monotonic() + MPS_STARTS
        while self.failure() is None and not self.answers():  # without it a worker would compute as if MPS were off
            if time.monotonic() > deadline:
                os.killpg(self.process.pid, signal.SIGKILL)
            time.sleep(0.1)

    def answers(self) -> bool:
        asked: dict[str, Any] = {"env": self.process_environment, "capture_output": True, "timeout": MPS_STARTS}
        with contextlib.suppress(subprocess.TimeoutExpired):
            return subprocess.run([MPS], input=b"get_server_list\n", **asked).returncode == 0
        return False

    def failure(self) -> str | None:
        """Why there is none any more, or None."""
        status = self.process.poll()
        return None if status is None else f"launcher.mps=true: {MPS} ended with status {status}: see {self.logs}"

    def stop(self) -> None:
        with self.process:  # which closes its input, and waits
            pass


def visible_gpus() -> list[str]:
    """The GPUs that CUDA would use, as values of CUDA_VISIBLE_DEVICES."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        named = [gpu.strip() for gpu in os.environ["CUDA_VISIBLE_DEVICES"].split(",")]
        good = re.compile(r"\d+|(GPU|MIG)-.+")
        return [*itertools.takewhile(good.fullmatch, named)]  # CUDA reads no further; SLURM may write NoDevFiles
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return [str(i) for i, line in enumerate(listed.stdout.splitlines()) if line.startswith("GPU ")]


# -----------------------------------------------------------------------------
# SLURM


# what a job, srun, submitit or torchrun hands on, and a new task would take for its own; SBATCH_* is the user's
OF_JOBS = re.compile(
    r"SLURM_(?!CONF$)|SRUN_|SUBMITIT_|TORCHELASTIC_|((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_ADDR|MASTER_PORT)$"
)


@contextlib.contextmanager
def outside_of_jobs() -> Iterator[None]:
    """The environment without OF_JOBS: tasks that are submitted from within a job begin as those of a shell do."""
    handed_on = {name: os.environ.pop(name) for name in [*os.environ] if OF_JOBS.match(name)}
    try:
        yield
    finally:
        os.environ.update(handed_on)


class Slurm:
    """Tasks of SLURM job arrays, submitted by submitit, each a worker. They outlive a launcher that is killed. A task
    that squeue does not list has ended; SLURM's accounting is not needed."""

    def __init__(self, options: SlurmOptions, sweep_dir: Path, launch: str) -> None:
        self.options, self.sweep_dir, self.launch = options, sweep_dir, launch
        self.workers, self.threads = options.workers, options.threads
        self.name = "nanoqk-" + re.sub(r"[^\w.-]", "_", sweep_dir.name)
        self.tasks: dict[str, Any] = {}  # queued or running: job id -> submitit's job
        self.deaths, self.log = 0, sweep_dir  # log: of the task that ended last
        self.asked = self.submitted = -math.inf  # when squeue and sbatch were last called
        self.refusals, self.refusal = 0, ""  # by sbatch, in a row; what it said

    def start(self, n: int) -> None:
        """Submit tasks until n are queued or running. Raises: ConfigError where SLURM refuses the first ones."""
        import submitit

        missing = n - len(self.tasks)  # as alive() last said: what squeue says now is newer than n
        if missing <= 0 or self.failure() or (self.refusals and time.monotonic() - self.submitted < SBATCH_AGAIN):
            return
        first, self.submitted = self.submitted == -math.inf, time.monotonic()
        try:
            # submitit prints sbatch's message, then raises it
            with contextlib.redirect_stderr(io.StringIO()), outside_of_jobs():
                jobs = self.executor().map_array(Task(), [self.sweep_dir] * missing, [self.launch] * missing)
        except (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError) as error:
            lines = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in str(error).splitlines()]
            self.refusal = f"launcher=slurm: sbatch refuses: {'; '.join(lines) or 'it does not say why'}"
            if first:
                raise ConfigError(self.refusal) from error
            self.refusals += 1
        else:
            self.refusals = 0
            self.tasks |= {job.job_id: job.task(0) for job in jobs}  # task(0): of node 0

    def executor(self) -> Any:
        """submitit's executor, with the options of the tasks."""
        import submitit

        c = self.options
        cpus = c.threads * c.ranks
        executor = submitit.SlurmExecutor(self.sweep_dir / "slurm", max_num_timeout=MAX_REQUEUES)
        executor.update_parameters(
            job_name=self.name,
            partition=c.partition,
            time=c.timeout_min,
            signal_delay_s=c.save_s,
            nodes=1,
            ntasks_per_node=1,
            cpus_per_task=cpus,
            gpus_per_node=c.gpus or None,
            array_parallelism=c.workers,
            stderr_to_stdout=True,
            # srun does not inherit the first from sbatch; without the second a task outlives its dead processes
            srun_args=[f"--cpus-per-task={cpus}", "--kill-on-bad-exit=1"],
            setup=[
                *c.setup,
                f"export PYTHONPATH={shlex.quote(str(ROOT))}${{PYTHONPATH:+:$PYTHONPATH}}",
                f"export OMP_NUM_THREADS={c.threads} PYTHONSAFEPATH=1",  # -m: not the current folder before all others
                *(f"export {name}={shlex.quote(plugins)}" for name, plugins in handed_on().items()),
            ],
            additional_parameters={"requeue": True, **c.options},
        )
        return executor

    def alive(self) -> int:
        """The number of tasks queued or running. squeue is called at most once in SQUEUE_EVERY seconds."""
        if not self.tasks or time.monotonic() - self.asked < SQUEUE_EVERY:
            return len(self.tasks)
        queue, self.asked = self.queue(), time.monotonic()
        for job_id in [job_id for job_id in self.tasks if job_id not in queue]:
            task = self.tasks.pop(job_id)
            died = not task.paths.result_pickle.exists() or task.exception() is not None
            self.deaths = self.deaths + 1 if died else 0
            self.log = task.paths.stdout
        return len(self.tasks)

    def queue(self) -> set[str]:
        """The ids of the jobs that have this sweep's name; those known before where SLURM does not answer."""
        command = ["squeue", "--noheader", "--array", f"--user={os.getuid()}", f"--name={self.name}", "--format=%i"]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("SQUEUE_")}
        try:
            asked = subprocess.run(command, capture_output=True, text=True, timeout=30, env=environment)
        except subprocess.TimeoutExpired:
            return {*self.tasks}
        return {*(asked.stdout.split() if asked.returncode == 0 else self.tasks)}

    def failure(self) -> str | None:
        if self.refusals >= 3 and not self.tasks:
            return self.refusal
        if self.deaths >= 3 * self.workers:
            shared = "" if self.log.exists() else ", which does not exist: do all nodes share its file system?"
            return f"SLURM tasks die as soon as they start: see {self.log}{shared}"
        return None

    def abandon(self) -> None:
        """The tasks go on, as they do where the launcher is killed."""

    def stop(self) -> None:
        (self.sweep_dir / "launches" / f"{self.launch}.stop").touch()  # for tasks that are about to start
        deadline = time.monotonic() + PATIENCE
        with contextlib.suppress(KeyboardInterrupt):
            while self.tasks and time.monotonic() < deadline:
                self.scancel("--state=PENDING")
                self.scancel("--state=RUNNING", "--signal=TERM")  # to the worker, not to its shell
                time.sleep(SQUEUE_EVERY)
                self.alive()
        if self.tasks:
            self.scancel()

    def scancel(self, *options: str) -> None:
        subprocess.run(["scancel", *options, *self.tasks], capture_output=True)


class Task:
    """What a SLURM task runs: a worker. It saves its run and is requeued when its time is nearly up, or is preempted.

    SLURM then sends USR2, after SIGTERM when it preempts. submitit's handler of USR2 has the task requeued and ends the
    process at once; so here both signals first stop the run at a checkpoint, and that handler is called afterwards.
    """

    def __call__(self, sweep_dir: Path, launch: str) -> int:
        from sweeps.worker import work

        requeue: Any = signal.getsignal(signal.SIGUSR2)
        received = stop_once(signal.SIGUSR2, signal.SIGTERM)
        stopped = sweep_dir / "launches" / f"{launch}.stop"
        status = 0 if stopped.exists() else work(sweep_dir, launch, received)
        for number in (signal.SIGALRM, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # from here on the task ends by itself
        if status > 128 and not stopped.exists():
            deadline = time.monotonic() + USR2_AFTER_TERM
            while signal.SIGUSR2 not in received and time.monotonic() < deadline:
                time.sleep(0.1)
            if signal.SIGUSR2 in received:
                requeue(signal.SIGUSR2, None)
        return status

    def checkpoint(self, sweep_dir: Path, launch: str) -> Any:
        """What submitit requeues: the same task, since the directories of the runs hold the rest."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, sweep_dir, launch)


Launcher = Local | Slurm
LAUNCHERS: dict[str, tuple[type, Any]] = {"local": (LocalOptions, Local), "slurm": (SlurmOptions, Slurm)}
