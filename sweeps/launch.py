"""Launch a sweep: python sweeps/launch.py sweep=NAME [launcher=local|slurm] [settings] [overrides for every run]

The same command continues a sweep: it skips done runs, resumes partial ones and retries failed ones. keep_going and
fail_fast are short for fail_fast=false and fail_fast=true. sweep.KEY=VALUE replaces what configs/sweep/NAME.yaml says:
sweep.folds=[0,1] sweep.seeds=[1,2] sweep.parts=[NAME] sweep.grid.qk_norm.p=[2,3]
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

from tqdm import tqdm

from core.cli import parse_yaml, run_script
from core.files import read_json
from core.rundir import at_end
from core.schema import AtLeast, ConfigError, Help, Variants, options, require
from sweeps.claims import Launch
from sweeps.definition import load_sweep
from sweeps.launchers import LAUNCHERS, Launcher, LocalOptions, SlurmOptions
from sweeps.plan import PlannedRun, freeze, plan_runs
from sweeps.status import FINAL, State, SweepPlace, failures, state_of, tally
from sweeps.worker import WORKER
from training.config import TrainConfig

POLL = 0.5  # seconds between two looks at the runs


@dataclass(frozen=True)
class Request:
    """What the command line asks for. launcher: the options of one of LAUNCHERS."""

    name: str
    sweep_dir: Path
    runs: list[PlannedRun]
    launcher: Any
    dry_run: bool = False
    fail_fast: bool = False
    retries: int = 1


@options
class LaunchOptions(SweepPlace):
    dry_run: Annotated[bool, Help("list the runs with an estimate of time and disk; write nothing")] = False
    fail_fast: Annotated[bool, Help("after a failed run stop the others at a checkpoint; false: go on")] = False
    retries: Annotated[int, AtLeast(0), Help("further tries of a run that fails")] = 1
    launcher: Annotated[
        LocalOptions | SlurmOptions,
        Variants({name: chosen for name, (chosen, _) in LAUNCHERS.items()}),
        Help("where the runs are trained"),
    ] = field(default_factory=LocalOptions)

    def check(self) -> None:
        require(self.sweep is not None, "sweep= must be given")


SHORT = {"keep_going": "fail_fast=false", "fail_fast": "fail_fast=true"}


def main(argv: list[str]) -> int:
    return run_script(LaunchOptions, run, __doc__, [SHORT.get(word, word) for word in argv], passes_on=True)


def run(asked: LaunchOptions, overrides: list[str]) -> int:
    """Check everything, then write: an OSError before the plan is written is a bad setting."""
    try:
        request, freeze_plan = read_request(asked, overrides)
        if request.dry_run:
            list_runs(request)
            return 0
        left = [run for run in request.runs if not at_end(request.sweep_dir / run.id)]
        if request.launcher.name == "slurm":  # this machine may lack the devices of its nodes
            left = [replace(run, config=replace(run.config, device="cpu", dtype="float32")) for run in left]
        keys = ("data", "device", "dtype", "model")  # runs that agree in these can all start, or none of them
        ask("check", {json.dumps([asdict(run.config)[key] for key in keys]): run.config for run in left})
        freeze_plan()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ConfigError(str(error)) from error
    return launch(request)


def read_request(asked: LaunchOptions, overrides: list[str]) -> tuple[Request, Callable[[], None]]:
    """What is to be launched, with every run composed and checked, and a function that writes the plan."""
    changes = {}
    for word in [word for word in overrides if word.startswith("sweep.") and "=" in word]:
        key, _, text = word.removeprefix("sweep.").partition("=")
        changes[key] = parse_yaml(text, f"{word} is not key=value")
        overrides = [other for other in overrides if other != word]
    sweep = load_sweep(str(asked.sweep), changes)
    runs, launcher = plan_runs(sweep, overrides), asked.launcher
    steps = {run.config.gradient_accumulation_steps for run in runs}
    require(
        all(n % launcher.ranks == 0 for n in steps),
        f"launcher.ranks={launcher.ranks} must divide gradient_accumulation_steps={min(steps)}",
    )
    sweep_dir, name = asked.directory.resolve(), Path(str(asked.sweep)).stem
    request = Request(name, sweep_dir, runs, launcher, asked.dry_run, asked.fail_fast, asked.retries)
    return request, lambda: freeze(sweep_dir, name, sweep, overrides, runs)


# -----------------------------------------------------------------------------
# Before the launch


def list_runs(request: Request) -> None:
    """Print every run with its state and the time that is left, and what all of them take together."""
    states = {run.id: state_of(request.sweep_dir, run) for run in request.runs}
    launcher = LAUNCHERS[request.launcher.name][1](request.launcher, request.sweep_dir, "")
    configs = {cost_key(run): run.config for run in reversed(request.runs)}
    cost = ask("estimate", {key: replace(c, threads=c.threads or launcher.threads) for key, c in configs.items()})
    seconds, size = 0.0, 0
    for run in request.runs:
        state, (run_seconds, run_bytes) = states[run.id], cost[cost_key(run)]
        left = 0 if state.state in FINAL else run_seconds * (1 - (state.iter or 0) / run.config.max_iters)
        seconds, size = seconds + left, size + run_bytes
        print(f"{run.id}  {state.state:8s} {tqdm.format_interval(left)}  {' '.join(run.points)}")
    print(
        f"{len(request.runs)} runs ({tally(states.values())}) in {request.sweep_dir}: about "
        f"{tqdm.format_interval(seconds / launcher.workers / request.launcher.ranks)} on "
        f"{workers(request, launcher)}, {size / 2**30:.1f} GiB of disk"
    )


def workers(request: Request, launcher: Launcher) -> str:
    ranks = request.launcher.ranks
    return f"{launcher.workers} workers" + f" of {ranks} ranks" * (ranks > 1)


def cost_key(run: PlannedRun) -> str:
    """Equal for runs that cost the same: they differ in fold, seed, and the values of their QK norm."""
    config = {key: value for key, value in asdict(run.config).items() if key not in ("seed", "data", "qk_norm")}
    return json.dumps([config, run.config.data.name, run.config.qk_norm.name], sort_keys=True)


def ask(question: str, configs: dict[str, TrainConfig]) -> dict[str, Any]:
    """The results of training.estimate's `question`, check or estimate, for each config. Raises: ConfigError where a
    run cannot start. A worker computes them, so that the launcher holds neither torch nor the corpus."""
    if not configs:
        return {}
    text = json.dumps([asdict(config) for config in configs.values()])
    asked = subprocess.run([sys.executable, WORKER, "answer", question], input=text, stdout=subprocess.PIPE, text=True)
    if asked.returncode != 0:
        raise OSError(f"the worker that should {question} the runs ended with exit status {asked.returncode}")
    reply = json.loads(asked.stdout)
    if "error" in reply:
        raise ConfigError(reply["error"])
    return dict(zip(configs, reply["answers"], strict=True))


# -----------------------------------------------------------------------------
# The launch


def launch(request: Request) -> int:
    """Have workers train what is left. Returns 0, 1 where a run failed, or 128 + the signal that stopped it."""
    sweep_dir = request.sweep_dir
    for folder in ("claims", "launches", "logs"):
        (sweep_dir / folder).mkdir(exist_ok=True)
    name = f"{socket.gethostname()}-{os.getpid()}-{time.time_ns()}"
    launcher: Launcher = LAUNCHERS[request.launcher.name][1](request.launcher, sweep_dir, name)
    ids, ranks = [run.id for run in request.runs], request.launcher.ranks
    asked = Launch(sweep_dir, name, ids, 1 + request.retries, launcher.threads, request.fail_fast, ranks)
    asked.write()
    states = {run.id: state_of(sweep_dir, run, name) for run in request.runs}
    print(f"{sweep_dir}: {len(ids)} runs ({tally(states.values())}), {workers(request, launcher)}")
    stop, began = Stop(), time.monotonic()
    trouble = follow(request.runs, states, asked, launcher, stop)
    states = {run.id: state_of(sweep_dir, run, name) for run in request.runs}
    counts = tally(states.values())
    if stop.signal:
        print(f"stopped by {signal.Signals(stop.signal).name}: {counts}; the same command goes on from there")
        return 128 + stop.signal
    print(f"{sweep_dir}: {counts} in {tqdm.format_interval(time.monotonic() - began)}")
    for line in failures(sweep_dir, states):
        print(line)
    if trouble:
        print(f"error: {trouble}", file=sys.stderr)
    return 0 if all(state.state in FINAL for state in states.values()) else 1


def follow(
    runs: list[PlannedRun], states: dict[str, State], asked: Launch, launcher: Launcher, stop: "Stop"
) -> str | None:
    """Keep workers alive while there are runs for them, and `states` up to date; then stop the workers.

    Returns why no further worker can live, or None.
    """
    began, ended = time.monotonic(), [state.state in FINAL for state in states.values()].count(True)
    with tqdm(total=len(runs), initial=ended, unit="run", disable=None, dynamic_ncols=True) as bar:
        while True:
            claimed, tries = set(os.listdir(asked.sweep_dir / "claims")), sum(s.launch_tries for s in states.values())
            for run in runs:
                # to look at 10,000 runs takes a second, and a run that has no claim changes without our workers only
                if states[run.id].state not in FINAL and (run.id in claimed or not launcher.alive()):
                    states[run.id] = state_of(asked.sweep_dir, run, asked.name)
                    if states[run.id].state in FINAL:
                        bar.update()
                        if bar.disable:
                            print(line_of(run.id, states, asked.sweep_dir, began, ended), flush=True)
            if tries != sum(s.launch_tries for s in states.values()):
                launcher.deaths = 0  # a worker that took a run did not die at its start
            left = [s for s in states.values() if s.state not in FINAL and s.launch_tries < asked.tries]
            failed = any(s.state == "failed" and s.launch_tries >= asked.tries for s in states.values())
            running = any(s.state == "running" for s in states.values())
            trouble = launcher.failure()
            if stop.signal or trouble or (failed and asked.fail_fast) or not (left or running):
                break
            waiting = sum(s.state != "running" for s in left)
            launcher.start(min(launcher.workers, launcher.alive() + waiting))
            bar.set_postfix_str(tally(states.values()), refresh=True)
            time.sleep(POLL)
        launcher.stop()
    return trouble


def line_of(run_id: str, states: dict[str, State], sweep_dir: Path, began: float, ended_before: int) -> str:
    """What is printed for a run that has ended, where no bar is drawn."""
    ended = sum(state.state in FINAL for state in states.values())
    left = (time.monotonic() - began) / (ended - ended_before) * (len(states) - ended)
    summary = read_json(sweep_dir / run_id / "summary.json")
    loss = summary.get("val/loss")  # null where it is not finite
    loss = "" if loss is None else f"val/loss {loss:.4f}, "
    seconds = f"{summary.get('seconds', 0):.0f} s; {tqdm.format_interval(left)} left"
    return f"[{ended}/{len(states)}] {run_id} {states[run_id].state}: {loss}{seconds}"


class Stop:
    """The first SIGINT or SIGTERM sets `signal`; the second one raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.signal = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.receive)

    def receive(self, number: int, frame: FrameType | None) -> None:
        if self.signal:
            raise KeyboardInterrupt
        self.signal = number


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
