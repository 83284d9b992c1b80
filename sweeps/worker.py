"""A worker of a sweep: it trains one run after the other until none is left. sweeps/launchers.py starts it.

One process trains many runs, so that it imports and compiles once. If it dies, the run in hand goes on elsewhere, from
its checkpoint. Arguments: SWEEP_DIR LAUNCH
"""

import contextlib
import gc
import os
import signal
import sys
import traceback
from collections.abc import Collection, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Any

from core.files import open_regular
from core.plugins import in_environment, load_stored
from core.process import end_with_parent, guarded, may_follow_signal, say
from core.rundir import at_end, is_open
from core.schema import ConfigError, build, one_line
from sweeps.claims import Launch, claimed, write_claim
from sweeps.definition import part_and_name
from sweeps.plan import PlannedRun, read_about, read_plan
from sweeps.ranks import input_ends, train_on_ranks
from training.config import TrainConfig

WORKER = str(Path(__file__).resolve())
STOPPED = 128 + signal.SIGTERM
RESTART = 4  # exit status of a worker that asks for a new process in its place


def work(sweep_dir: Path, launch_name: str, received: Collection[int] = ()) -> int:
    """Train the runs of a launch that no other process has. Returns 0 when no run is left to try, 128 + n when signal
    n stopped a run, RESTART after a failed try: an error, as of CUDA, can make every later run of a process fail.
    received: signals that have come; with one no further run begins, and a try has not failed."""
    launch = Launch.read(sweep_dir, launch_name)
    runs = {run.id: run for run in read_plan(sweep_dir)}
    for run_id in launch.runs:
        status = STOPPED if received else take(runs[run_id], launch, received)
        if status > 128:
            return status
        if status == 1:
            return RESTART
    return 0


def take(run: PlannedRun, launch: Launch, received: Collection[int]) -> int:
    """Claim a run and try it. Returns the status of the try; 0 if the run has ended, is taken or has no try left."""
    path = launch.sweep_dir / run.id
    if at_end(path):
        return 0
    with claimed(launch.sweep_dir, run.id) as claim:
        if claim is None or is_open(path) or at_end(path):  # it may have ended since the first look
            return 0
        left = claim["tries"].get(launch.name, 0) < launch.tries
        return attempt(run, launch, claim, received) if left else 0


def attempt(run: PlannedRun, launch: Launch, claim: dict[str, Any], received: Collection[int]) -> int:
    """One try at a run, its output in logs/. Returns 0 done, 3 diverged, 1 failed, 128 + n stopped by signal n."""
    sweep_dir = launch.sweep_dir
    before = claim["tries"].get(launch.name, 0)
    claim |= {"tries": {**claim["tries"], launch.name: before + 1}, "error": None, "limit": launch.tries}
    write_claim(sweep_dir, run.id, claim)  # before the run, so that a death counts too
    with output_to(sweep_dir / "logs" / f"{run.id}.log"):
        try:
            config: TrainConfig = build(TrainConfig, asdict(config_in_sweep(run, sweep_dir)))  # imports its plugins
            if launch.ranks > 1:
                status = train_on_ranks(config, launch)
                if status == 1:
                    claim["error"] = "one of its ranks failed: its log has the reason"
            else:
                import train

                status = train.run(config)
            if status == 1 and received:  # ranks that had no handler yet
                claim["error"], status = None, STOPPED
        except ConfigError as error:  # every further try would be refused too
            say(f"error: {error}")
            claim["error"], status = str(error), 1
            claim["tries"][launch.name] = launch.tries
        except SystemExit as stopped:  # by SIGTERM, outside the training loop; by a plugin
            status = STOPPED if received else 1
            claim["error"] = None if received else one_line(stopped)
        except Exception as error:
            if received and may_follow_signal(error):
                say(f"stopped amid {one_line(error)}")
                status = STOPPED
            else:
                traceback.print_exc()
                claim["error"], status = one_line(error, 500), 1
    if status > 128:
        claim["tries"][launch.name] = before  # a stop is not a failed try
    write_claim(sweep_dir, run.id, claim)
    gc.collect()
    return status


def config_in_sweep(run: PlannedRun, sweep_dir: Path) -> TrainConfig:
    """The run's config with its directory in the sweep, and W&B's tags and group."""
    wandb = run.config.wandb
    about = read_about(sweep_dir)
    name = about.get("name", sweep_dir.name)
    parts = [part_and_name(point, about.get("sweep", {}).get("parts", {}))[0] for point in run.points]
    added = [f"sweep:{name}", *(f"part:{part}" for part in dict.fromkeys(parts) if part)]
    tags = (*wandb.tags, *(tag[:64] for tag in added))  # W&B's limit
    group = wandb.group or f"{name}: {run.points[0]}"[:128]
    media = "off" if wandb.media == "auto" else wandb.media
    wandb = replace(wandb, name=wandb.name or run.id, group=group, tags=tags, media=media)
    return replace(run.config, out_dir=str(sweep_dir / run.id), dry_run=False, wandb=wandb)


@contextlib.contextmanager
def output_to(file: Path) -> Iterator[None]:
    """Append this process's standard output and error, and its children's, to `file`."""
    with open_regular(file, "ab") as log:
        kept = {number: os.dup(number) for number in (1, 2)}
        try:
            sys.stdout.flush()
            sys.stderr.flush()
            for number in kept:
                os.dup2(log.fileno(), number)
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, descriptor in kept.items():
                os.dup2(descriptor, number)
                os.close(descriptor)


def start_worker(sweep_dir: str, launch_name: str) -> int:
    if Launch.read(Path(sweep_dir), launch_name).ranks == 1:
        import train  # noqa: F401  # before the handler: an import may swallow the SystemExit that it raises
    with contextlib.suppress(ConfigError):  # attempt() says which of its runs it concerns
        load_stored([name for name, sha256 in in_environment().items() if sha256])
    received = set[int]()

    def end(number: int, frame: FrameType | None) -> None:
        received.add(number)
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)
    end_with_parent(input_ends)
    return work(Path(sweep_dir), launch_name, received)


if __name__ == "__main__":
    sys.exit(guarded(lambda: start_worker(*sys.argv[1:])))
