"""A sweep's worker: takes one run after the other until none is left. Started by sweeps/launchers.py.

It outlives a run, so that imports and compilation are paid once; if it dies, that costs the run in hand, which goes on
from its checkpoint. A run is claimed by a lock on its file in claims/, which goes with the process that holds it; the
file says how often each launch has tried the run, and what went wrong.
"""

import contextlib
import ctypes
import fcntl
import functools
import gc
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from core.cli import refuse
from core.files import read_json, write_json
from core.rundir import at_end, is_locked, read_status
from core.schema import ConfigError, build
from sweeps.plan import PlannedRun, read_plan
from training.config import TrainConfig

FINAL = ("done", "diverged")
PATIENCE = 600  # seconds that a run has to reach the end of its iteration and save
RESTART = 4  # exit status of a worker that another one should take the place of; its runs are no worse for it


def work(sweep_dir: Path, launch: str) -> int:
    """Run what the launch asks for and nobody else has. Returns 0 when nothing is left to take, RESTART after an error
    that this process should not outlive, 128 + n when signal n stopped a run."""
    asked = read_json(sweep_dir / "launches" / f"{launch}.json")
    runs = {run.id: run for run in read_plan(sweep_dir)}
    took_one = True
    while took_one:  # once more over all: failed runs are tried again last
        took_one = False
        for run_id in asked["runs"]:
            if asked["fail_fast"] and (sweep_dir / "launches" / f"{launch}.failed").exists():
                return 0
            if at_end(sweep_dir / run_id):
                continue
            with claimed(sweep_dir, run_id) as claim:
                if claim is None or is_locked(sweep_dir / run_id):
                    continue
                if claim["tries"].get(launch, 0) >= asked["tries"]:
                    continue
                if at_end(sweep_dir / run_id):  # since the last look
                    continue
                took_one = True
                status = attempt(runs[run_id], sweep_dir, launch, asked, claim)
                while status == 1 and asked["fail_fast"] and claim["tries"][launch] < asked["tries"] and not spoilt():
                    status = attempt(runs[run_id], sweep_dir, launch, asked, claim)
            if status > 128:
                return status
            if status == 1 and asked["fail_fast"] and claim["tries"][launch] >= asked["tries"]:
                (sweep_dir / "launches" / f"{launch}.failed").touch()
            if status == 1 and spoilt():
                return RESTART
    return 0


def spoilt() -> bool:
    """Whether an error may have left a device unusable to this process: a CUDA error does."""
    return "torch" in sys.modules and bool(sys.modules["torch"].cuda.is_initialized())


def attempt(run: PlannedRun, sweep_dir: Path, launch: str, asked: dict[str, Any], claim: dict[str, Any]) -> int:
    """One try at a run, its output in logs/. Returns 0 done, 3 diverged, 1 failed, 128 + n stopped by a signal."""
    before = claim["tries"].get(launch, 0)
    claim["tries"][launch] = before + 1
    claim["error"] = None
    claim["limit"] = asked["tries"]
    write_claim(sweep_dir, run.id, claim)  # before the run: a death counts too
    config = replace(
        run.config, out_dir=str(sweep_dir / run.id), threads=run.config.threads or asked.get("threads"), dry_run=False
    )
    with output_to(sweep_dir / "logs" / f"{run.id}.log"):
        try:
            if (ranks := asked.get("ranks", 1)) > 1:
                status = on_ranks(config, ranks, sweep_dir / "launches" / f"{run.id}.json")
                if status == 1:
                    claim["error"] = "a rank of it failed: its log says more"
            else:
                import train

                status = train.run(config)
        except ConfigError as error:  # it would be refused again
            print(f"error: {error}", flush=True)
            claim["error"], status = str(error), 1
            claim["tries"][launch] = asked["tries"]
        except SystemExit as stopped:  # by SIGTERM, outside train.py's loop
            status = int(stopped.code or 0)
        except Exception as error:
            traceback.print_exc()
            claim["error"], status = " ".join(f"{type(error).__name__}: {error}".split())[:500], 1
    if status > 128:
        claim["tries"][launch] = before  # a stop is nobody's failure
    write_claim(sweep_dir, run.id, claim)
    gc.collect()
    return status


def on_ranks(config: TrainConfig, ranks: int, file: Path) -> int:
    """train.run(config) in `ranks` processes, by torchrun; `file` is the config's for as long. torchrun's own exit
    status does not tell: a run that it leaves neither done nor diverged has failed."""
    write_json(file, asdict(config))
    command = ["--standalone", f"--nproc_per_node={ranks}", str(Path(__file__).resolve()), "run", str(file)]
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *command], preexec_fn=functools.partial(die_with, os.getpid()),
        env={**os.environ, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(PATIENCE)},
    )  # fmt: skip
    try:
        process.wait()
    except SystemExit:  # SIGTERM
        process.terminate()
        process.wait()
        raise
    finally:
        file.unlink(missing_ok=True)
    return {"done": 0, "diverged": 3}.get(str(read_status(config.run_dir).get("state")), 1)


# -----------------------------------------------------------------------------
# Claims and logs


@contextlib.contextmanager
def claimed(sweep_dir: Path, run_id: str) -> Iterator[dict[str, Any] | None]:
    """The content of a run's claim while this process holds it; None when another one does."""
    file = os.open(sweep_dir / "claims" / run_id, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        yield read_claim(sweep_dir, run_id) if locks(file) else None
    finally:
        os.close(file)


def locks(file: int) -> bool:
    """Whether nobody else holds the lock; whoever looks if it is held has it for a moment."""
    for _ in range(3):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.01)
        else:
            return True
    return False


def is_claimed(sweep_dir: Path, run_id: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        file = os.open(sweep_dir / "claims" / run_id, os.O_RDONLY)
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(file)
    return False


def read_claim(sweep_dir: Path, run_id: str) -> dict[str, Any]:
    """tries: launch -> number; limit: of tries; error: the last try's, or None."""
    return {"tries": {}, "limit": 1, "error": None, **read_json(sweep_dir / "claims" / run_id)}


def write_claim(sweep_dir: Path, run_id: str, claim: dict[str, Any]) -> None:
    """In place: the lock is on the file itself. What a crash leaves half written reads as no tries."""
    with open(sweep_dir / "claims" / run_id, "r+") as file:  # written over, not emptied: a full disk takes that
        file.write(json.dumps(claim))
        file.truncate()


@contextlib.contextmanager
def output_to(file: Path) -> Iterator[None]:
    """Send this process's standard output and error to the end of `file`."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    log = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        os.dup2(log, 1)
        os.dup2(log, 2)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(kept[0], 1)
        os.dup2(kept[1], 2)
        for descriptor in (*kept, log):
            os.close(descriptor)


# -----------------------------------------------------------------------------
# python sweeps/worker.py work SWEEP_DIR LAUNCH PARENT | run FILE | check | estimate (configs on standard input)


def die_with(parent: int) -> None:
    """Have the kernel send SIGTERM, which saves and stops, when the launcher is gone, kill -9 included (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        sys.exit(0)


def answer(question: str) -> int:
    """Read a JSON list of configs; print {"error": text}, or {"answers": [[seconds, bytes], …]}; check answers null."""
    from training import estimate

    ask = {"check": estimate.check, "estimate": estimate.estimate}[question]
    try:
        reply: dict[str, Any] = {"answers": [ask(build(TrainConfig, config)) for config in json.load(sys.stdin)]}
    except ConfigError as error:
        reply = {"error": str(error)}
    print(json.dumps(reply))
    return 0


def run_rank(file: Path) -> int:
    """What torchrun starts. Returns train.py's exit status."""
    import train

    try:
        return train.run(build(TrainConfig, read_json(file)))
    except ConfigError as error:
        return refuse(str(error))


if __name__ == "__main__":
    if sys.argv[1] == "run":
        sys.exit(run_rank(Path(sys.argv[2])))
    if sys.argv[1] == "work":
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        die_with(int(sys.argv[4]))
        sys.exit(work(Path(sys.argv[2]), sys.argv[3]))
    sys.exit(answer(sys.argv[1]))
