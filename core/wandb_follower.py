"""The W&B process of a run: it tails metrics.jsonl and sends the lines to W&B.

A process, and not a thread of the trainer: an unreachable server blocks wandb's exit hook for its own time, a failed
online start keeps the run id in use until wandb's service process has died, and wandb replaces sys.exit and
sys.excepthook. Here none of it can touch the training, and a trainer that is killed still gets its last lines sent.
"""

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

POLL = 0.5  # seconds between two looks at metrics.jsonl
LINGER = 60  # seconds after which the W&B process of an ended run is killed


def start(job: dict[str, Any], stdin: int = subprocess.PIPE, stdout: int = subprocess.PIPE) -> subprocess.Popen[bytes]:
    """Start the process. It lives in its own session: Ctrl-C is for the training process alone."""
    env = {"WANDB_ERROR_REPORTING": "false", **os.environ}
    env.pop("WANDB_SERVICE", None)  # a service of its own, never a shared one
    return subprocess.Popen(
        [sys.executable, "-m", "core.wandb_follower", json.dumps(job)],
        cwd=Path(__file__).resolve().parent.parent,
        env=env,
        stdin=stdin,
        stdout=stdout,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        start_new_session=True,
    )


def follow(job: dict[str, Any]) -> None:
    """Send the lines of metrics.jsonl to W&B until standard input closes, which it also does when the trainer dies.

    The summary is then left on standard input. Each line on standard output is for the run's log.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    out = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # W&B and its service process have nothing to say on the terminal

    def say(text: str) -> None:
        with suppress(OSError):
            os.write(out, (" ".join(text.split()) + "\n").encode())

    ended = threading.Event()
    threading.Thread(target=wait_for_end, args=(ended,), daemon=True).start()
    online = job["mode"] == "online"
    try:
        with open(job["metrics"], "rb") as file:
            file.seek(job["offset"])
            send(file_lines(file, ended), job, say)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        if not online:
            return say(f"W&B is off ({reason}); the run and metrics.jsonl go on")
        say(f"W&B cannot be reached, the run is recorded offline for wandb sync ({reason})")
        # The failed start keeps its run id in W&B's service process, which only dies with this one: hand over.
        start({**job, "mode": "offline"}, stdin=0, stdout=out)
        os._exit(0)


def wait_for_end(ended: threading.Event) -> None:
    select.select([0], [], [])  # until the trainer writes its summary, which stays in the pipe, or dies
    signal.alarm(LINGER)
    ended.set()


def file_lines(file: BinaryIO, ended: threading.Event) -> Iterator[dict[str, Any]]:
    """The complete lines of a growing file until its writer has ended."""
    rest, last = b"", False
    while not last:
        last = ended.wait(POLL)  # before reading: what was written before the end is read
        *lines, rest = (rest + file.read()).split(b"\n")
        yield from map(json.loads, lines)


def send(lines: Iterator[dict[str, Any]], job: dict[str, Any], say: Callable[[str], None]) -> None:
    sys.argv = job["argv"]  # the command that W&B shows is the trainer's
    import wandb

    settings = wandb.Settings(
        **job["timeouts"],
        silent=True,
        console="off",
        save_code=False,
        disable_code=True,
        disable_git=True,
        program=sys.argv[0],
        x_disable_stats=True,  # the machine's statistics: not about the model
        x_save_requirements=False,
        x_transaction_log_flush_interval=2,
    )
    run = wandb.init(**job["init"], mode=job["mode"], settings=settings)
    if job["mode"] == "online":
        say(f"W&B: {run.url}")
    run.define_metric("iter")
    run.define_metric("*", step_metric="iter")
    for line in lines:
        run.log({k: v for k, v in line.items() if v is not None})
    summary = json.loads(sys.stdin.buffer.read() or "{}")
    run.summary.update(summary)
    run.finish(exit_code=0 if summary.get("status") == "done" else 1)


if __name__ == "__main__":
    follow(json.loads(sys.argv[1], parse_constant=str))  # p=inf: W&B's JSON has no infinity
