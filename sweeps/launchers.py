"""Where a sweep's workers run: processes of this machine, or tasks of a SLURM job array.

A launcher has start(n), which brings the number of live workers up to n, alive() and stop().
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from training.config import at_least, require

WORKER = Path(__file__).resolve().parent / "worker.py"
PATIENCE = 600  # seconds that a worker has to reach the end of its iteration and save


@dataclass(frozen=True)
class LocalConfig:
    name: str = "local"
    workers: int | None = None
    threads: int | None = None
    runs_per_gpu: int = 1

    def check(self) -> None:
        for key in ("workers", "threads", "runs_per_gpu"):
            if getattr(self, key) is not None:
                at_least(f"launcher.{key}", getattr(self, key), 1)


@dataclass(frozen=True)
class SlurmConfig:
    name: str = "slurm"
    workers: int = 1
    threads: int = 1
    gpus: int = 0
    partition: str | None = None
    mem_gb: int | None = None
    timeout_min: int = 60
    max_requeues: int = 100
    setup: list[str] = field(default_factory=list)

    def check(self) -> None:
        for key in ("workers", "threads", "timeout_min"):
            at_least(f"launcher.{key}", getattr(self, key), 1)
        at_least("launcher.gpus", self.gpus, 0)
        at_least("launcher.max_requeues", self.max_requeues, 0)
        require(shutil.which("sbatch") is not None, "launcher=slurm needs sbatch, which is not here")


class Launcher(Protocol):
    workers: int
    threads: int

    def start(self, n: int) -> None: ...
    def alive(self) -> int: ...
    def stop(self) -> None: ...
    def failure(self) -> str | None: ...


class Local:
    """Worker processes on this machine, each with a share of the CPUs, or of a GPU. They end with their launcher."""

    def __init__(self, config: LocalConfig, sweep_dir: Path, launch: str) -> None:
        self.sweep_dir, self.launch = sweep_dir, launch
        cpus, gpus = len(os.sched_getaffinity(0)), visible_gpus()
        self.workers = config.workers or (len(gpus) * config.runs_per_gpu if gpus else cpus)
        self.threads = config.threads or max(1, cpus // self.workers)
        self.slots: list[subprocess.Popen[bytes] | None] = [None] * self.workers
        self.gpus = [gpus[i % len(gpus)] if gpus else None for i in range(self.workers)]
        self.deaths = 0  # workers that died one after the other, none of them having lived for a minute
        self.started = [0.0] * self.workers

    def start(self, n: int) -> None:
        for i, process in enumerate(self.slots):
            if process is not None and process.poll() is not None:
                died_young = process.returncode != 0 and time.monotonic() - self.started[i] < 60
                self.deaths = self.deaths + 1 if died_young else 0
                self.slots[i] = None
        for i in range(self.workers):
            if self.slots[i] is None and self.alive() < n:
                environment = {**os.environ, "OMP_NUM_THREADS": str(self.threads)}
                if self.gpus[i] is not None:
                    environment["CUDA_VISIBLE_DEVICES"] = str(self.gpus[i])
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


LAUNCHERS: dict[str, tuple[type, Any]] = {"local": (LocalConfig, Local)}
