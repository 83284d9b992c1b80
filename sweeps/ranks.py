"""One run in several processes: torchrun on this machine, or on every node of a SLURM task.

On SLURM node 0 has the worker. For each run it writes an order, which the other nodes follow: launches/NAME.TASK.json.
Commands: launch TORCHRUN_ARGUMENTS CONFIG | rank CONFIG
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from core.files import read_json, write_atomic
from core.process import EXIT_DIVERGED, TORCHRUN, end_with_parent, guarded
from core.rundir import read_status
from core.schema import build
from sweeps.claims import Launch
from training.config import TrainConfig

RANKS = str(Path(__file__).resolve())
PATIENCE = 600  # seconds that a run has to finish its iteration and save
ON_SLURM = "NANOQK_SLURM_RANKS"  # set for the ranks of a SLURM task
LOOK = 0.5  # seconds between two looks at the order of node 0, or at standard input
ORDER_PATIENCE = 120  # seconds that a node whose ranks have died waits for the next order
NODE_PATIENCE = 30  # seconds that torchrun gives the ranks of a node when another node's have died

# -----------------------------------------------------------------------------
# The worker's side


def train_on_ranks(config: TrainConfig, launch: Launch) -> int:
    """train.run(config) in launch.ranks processes. Returns 0 done, 3 diverged, 1 failed, 128 + n stopped by signal n:
    by status.json, since torchrun's own exit status does not tell how the run ended."""
    arguments = ["--standalone", f"--nproc_per_node={launch.ranks}"]
    if launch.nodes:
        with socket.socket() as probe:
            probe.bind(("", 0))  # at a free port
            order = {"host": socket.gethostname(), "port": probe.getsockname()[1], "config": asdict(config)}
        give_order(launch, order)
        arguments = meeting(launch, order, node=0)
    before = read_status(config.run_dir)
    with torchrun(arguments, asdict(config), on_slurm=launch.nodes > 0) as process:
        try:
            process.wait()
        except SystemExit:  # SIGTERM
            process.terminate()
            process.wait()
            raise
    status = read_status(config.run_dir)
    if launch.nodes and status != before and status.get("state") == "stopped":  # SLURM signals the ranks itself
        return 128 + signal.SIGTERM
    return {"done": 0, "diverged": EXIT_DIVERGED}.get(str(status.get("state")), 1)


def torchrun(arguments: list[str], config: dict[str, Any], on_slurm: bool) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(NODE_PATIENCE if on_slurm else PATIENCE)}
    environment |= {ON_SLURM: "1"} if on_slurm else {}
    command = [sys.executable, RANKS, "launch", json.dumps(arguments), json.dumps(config)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)


# -----------------------------------------------------------------------------
# The nodes of a SLURM task


def order_file(launch: Launch) -> Path:
    """The order file of this task since it was last requeued: an older order must not be followed."""
    task, requeued = os.environ.get("SLURM_JOB_ID", "0"), os.environ.get("SLURM_RESTART_COUNT", "0")
    return launch.sweep_dir / "launches" / f"{launch.name}.{task}.{requeued}.json"


def give_order(launch: Launch, order: dict[str, Any]) -> None:
    """Tell the other nodes what to start; config=None: there is nothing more to do."""
    number = read_json(order_file(launch)).get("number", 0) + 1
    write_atomic(order_file(launch), json.dumps({"number": number, **order}).encode())


def meeting(launch: Launch, order: dict[str, Any], node: int) -> list[str]:
    """torchrun's arguments on a node: where the torchruns of all nodes meet."""
    return [
        f"--nnodes={launch.nodes}", f"--node_rank={node}", f"--nproc_per_node={launch.ranks // launch.nodes}",
        f"--master_addr={order['host']}", f"--master_port={order['port']}", "--signals-to-handle=SIGINT",
    ]  # fmt: skip


def follow_orders(launch: Launch, node: int) -> int:
    """On a node other than 0: start the ranks of each order, until there is nothing more to do. Raises: RuntimeError
    where its ranks have died and node 0 does not notice; SLURM then ends the whole task."""
    done, process, alive = 0, None, time.monotonic()
    while True:
        if process is None or process.poll() in (None, 0):
            alive = time.monotonic()
        if time.monotonic() - alive > ORDER_PATIENCE:
            raise RuntimeError(f"the ranks of node {node} died, and node 0 waits for them")
        order = read_json(order_file(launch))
        if order.get("number", 0) > done:
            if process is not None and process.poll() is None:  # its ranks wait for those of node 0, which are gone
                process.send_signal(signal.SIGINT)
            if process is not None:
                process.wait()
            if order["config"] is None:
                return 0
            done, process = order["number"], torchrun(meeting(launch, order, node), order["config"], on_slurm=True)
        time.sleep(LOOK)


def stop_once(*numbers: int) -> set[int]:
    """Handle these signals: the first stops the run, which saves; later ones are only recorded. Returns the set of
    those received so far.

    The run may have no handler of SIGTERM yet, as while torch is imported: a timer looks for it every second.
    """
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
        time.sleep(LOOK)


def launch_ranks(arguments: str, config: str) -> int:
    """torchrun, which stops with the worker that started it.

    SLURM signals every process of a task. torchrun would pass that on, and a rank that is told twice ends at once; so
    it ignores what SLURM sends. SLURM ends the task where a process of it dies.
    """
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
