"""One run in several processes of this machine, which may be a node of SLURM: torchrun.

Commands: launch TORCHRUN_ARGUMENTS CONFIG | rank CONFIG
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from core.process import EXIT_DIVERGED, PATIENCE, TORCHRUN, end_with_parent, guarded
from core.rundir import read_status
from core.schema import build
from sweeps.claims import Launch
from training.config import TrainConfig

RANKS = str(Path(__file__).resolve())
ON_SLURM = "NANOQK_SLURM_RANKS"  # set for the ranks of a SLURM task

# -----------------------------------------------------------------------------
# The worker's side


def train_on_ranks(config: TrainConfig, launch: Launch) -> int:
    """train.run(config) in launch.ranks processes. Returns 0 done, 3 diverged, 1 failed, 128 + n stopped by signal n:
    by status.json, since torchrun's own exit status does not tell how the run ended."""
    arguments = ["--standalone", f"--nproc_per_node={launch.ranks}"]
    environment = {**os.environ, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(PATIENCE - 60)}  # before torchrun is killed, too
    if launch.slurm:
        arguments.append("--signals-to-handle=SIGINT")
        environment[ON_SLURM] = "1"
    command = [sys.executable, RANKS, "launch", json.dumps(arguments), json.dumps(asdict(config))]
    before = read_status(config.run_dir)
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment) as process:
        try:
            process.wait()
        except SystemExit:  # SIGTERM
            process.terminate()
            process.wait()
            raise
    status = read_status(config.run_dir)
    if launch.slurm and status != before and status.get("state") == "stopped":  # SLURM signals the ranks itself
        return 128 + signal.SIGTERM
    return {"done": 0, "diverged": EXIT_DIVERGED}.get(str(status.get("state")), 1)


def stop_once(*numbers: int) -> set[int]:
    """Handle these signals: the first stops the run, which saves. Returns the set of those that have come, which grows.
    The run may have no handler of SIGTERM yet, as while torch is imported: a timer looks for it every second."""
    received: set[int] = set()

    def receive(number: int, frame: FrameType | None) -> None:
        received.add(number)
        signal.setitimer(signal.ITIMER_REAL, 0.01, 1.0)

    def tell_the_run(number: int, frame: FrameType | None) -> None:
        if signal.getsignal(signal.SIGTERM) is not receive:
            signal.raise_signal(signal.SIGTERM)

    for number in numbers:
        signal.signal(number, receive)
    signal.signal(signal.SIGALRM, tell_the_run)
    return received


# -----------------------------------------------------------------------------
# Processes


def input_ends() -> None:
    """Waits for the end of the parent, which has the other end of standard input, and writes nothing."""
    while os.read(0, 1):
        pass


def launch_ranks(arguments: str, config: str) -> int:
    """torchrun, which stops with the worker that started it. It ignores what SLURM sends to every process of a task: it
    would pass that on, and a rank that is told twice ends at once. SLURM ends the task where a process of it dies."""
    if ON_SLURM in os.environ:
        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
    else:
        end_with_parent(input_ends)
    from torch.distributed.run import main

    os.environ[TORCHRUN] = str(os.getpid())
    main([*json.loads(arguments), RANKS, "rank", config])
    return 0


def train_rank(config: str) -> int:
    """What torchrun starts. Returns train.py's exit status."""
    if ON_SLURM in os.environ:
        stop_once(signal.SIGTERM, signal.SIGUSR2)
    import train

    return train.run(build(TrainConfig, json.loads(config)))


if __name__ == "__main__":
    commands: dict[str, Callable[..., int]] = {"launch": launch_ranks, "rank": train_rank}
    sys.exit(guarded(lambda: commands[sys.argv[1]](*sys.argv[2:])))
