"""Launch a sweep: python sweeps/launch.py sweep=NAME [launcher=local|slurm] [settings] [words for every train.py run]

Starting it again goes on: done runs are skipped, partial ones resumed, failed ones tried again. Settings:
  sweep_dir=PATH            where everything is kept, by default runs/NAME
  dry_run=true              list the runs with an estimate of time and disk; write nothing
  keep_going | fail_fast    after a failed run: go on (the default), or stop the others at a checkpoint
  retries=N                 more tries for a run that fails, by default 1
  launcher.KEY=VALUE        configs/launcher/ has them: workers, threads, runs_per_gpu, ranks, partition, ...
  sweep.KEY=VALUE           instead of what configs/sweep/NAME.yaml says: sweep.folds=[0,1] sweep.seeds=[1,2]
                            sweep.parts=[NAME] sweep.grid.qk_norm.p=[2,3]
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from tqdm import tqdm

from core.cli import CONFIG_DIR, leave_output, parse_yaml, read_words, refuse
from core.files import read_json, write_json
from core.rundir import at_end
from core.schema import ConfigError, at_least, build, require
from sweeps.launchers import LAUNCHERS, WORKER, Launcher
from sweeps.plan import PlannedRun, freeze, load_sweep, plan_runs
from sweeps.status import State, state_of, sweep_directory, tally
from sweeps.worker import FINAL

POLL = 0.5  # seconds between two looks at the runs


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    name: str
    sweep_dir: Path
    runs: list[PlannedRun]
    launcher: Any
    dry_run: bool = False
    fail_fast: bool = False
    retries: int = 1


def main(argv: list[str]) -> int:
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return 0
    try:
        request, freeze_plan = read_request(argv)
        if request.dry_run:
            try:
                list_runs(request)
                sys.stdout.flush()
            except BrokenPipeError:
                leave_output()
            return 0
        left = [run for run in request.runs if not at_end(request.sweep_dir / run.id)]
        configs = distinct(left, ("data", "device", "dtype", "model"))
        if request.launcher.name == "slurm":  # its devices are not this machine's
            configs = [{**config, "device": "cpu", "dtype": "float32"} for config in configs]
        ask_worker("check", configs)
        freeze_plan()
    except (ConfigError, OSError) as error:
        return refuse(str(error))
    except KeyboardInterrupt:
        return 130
    try:
        return launch(request)
    except ConfigError as error:  # SLURM refuses such tasks
        return refuse(str(error))
    except OSError as error:  # a full disk, say
        print(f"failed: {error}", file=sys.stderr)
        return 1


def read_request(argv: list[str]) -> tuple[Request, Callable[[], None]]:
    """The command line, with every run composed and checked, and what writes the plan to the sweep's directory."""
    argv = [{"keep_going": "fail_fast=false", "fail_fast": "fail_fast=true"}.get(word, word) for word in argv]
    known = {"sweep": str, "sweep_dir": str, "launcher": str, "dry_run": bool, "fail_fast": bool, "retries": int}
    values, others = read_words(argv, known)
    require("sweep" in values, "sweep= must be given")
    changes: dict[str, Any] = {}
    for prefix in ("sweep.", "launcher."):
        for word in [word for word in others if word.startswith(prefix) and "=" in word]:
            others.remove(word)
            key, _, text = word.partition("=")
            changes[key] = parse_yaml(text, f"{word} is not key=value")
    where = values.get("launcher", "local")
    require(where in LAUNCHERS, f"launcher={where} must be one of {', '.join(LAUNCHERS)}")
    source = parse_yaml((CONFIG_DIR / "launcher" / f"{where}.yaml").read_text(encoding="utf-8"), f"launcher={where}")
    source |= {k.removeprefix("launcher."): v for k, v in changes.items() if k.startswith("launcher.")}
    launcher = build(LAUNCHERS[where][0], source, "launcher.")
    launcher.check()
    at_least("retries", values.get("retries", 0), 0)
    sweep = load_sweep(
        values["sweep"], {k.removeprefix("sweep."): v for k, v in changes.items() if k.startswith("sweep.")}
    )
    runs = plan_runs(sweep, others)
    steps = {run.config.gradient_accumulation_steps for run in runs}
    require(
        all(n % launcher.ranks == 0 for n in steps),
        f"launcher.ranks={launcher.ranks} must divide gradient_accumulation_steps={min(steps)}",
    )
    sweep_dir = sweep_directory(values).resolve()
    settings = {key: values[key] for key in ("dry_run", "fail_fast", "retries") if key in values}
    name = Path(values["sweep"]).stem
    request = Request(name, sweep_dir, runs, launcher, **settings)
    return request, lambda: freeze(sweep_dir, name, sweep, others, runs)


# -----------------------------------------------------------------------------
# What it would be


def list_runs(request: Request) -> None:
    """Print every run, and what they take together."""
    states = {run.id: state_of(request.sweep_dir, run) for run in request.runs}
    launcher = LAUNCHERS[request.launcher.name][1](request.launcher, request.sweep_dir, "")
    costly = {cost_key(run): asdict(run.config) for run in reversed(request.runs)}
    for config in costly.values():
        config["threads"] = config["threads"] or launcher.threads
    cost = dict(zip(costly, ask_worker("estimate", list(costly.values())), strict=True))
    seconds, size = 0.0, 0
    for run in request.runs:
        state, (run_seconds, run_bytes) = states[run.id], cost[cost_key(run)]
        left = 0 if state.state in FINAL else run_seconds * (1 - (state.iter or 0) / run.config.max_iters)
        seconds, size = seconds + left, size + run_bytes
        print(f"{run.id}  {state.state:8s} {tqdm.format_interval(left)}  {' '.join(run.settings)}")
    workers, ranks = launcher.workers, request.launcher.ranks
    each = f" of {ranks} ranks" * (ranks > 1)
    print(
        f"{len(request.runs)} runs ({tally(list(states.values()))}) in {request.sweep_dir}: about "
        f"{tqdm.format_interval(seconds / workers / ranks)} on {workers} workers{each}, {size / 2**30:.1f} GiB of disk"
    )


def cost_key(run: PlannedRun) -> str:
    """Runs of one key cost the same: they differ in fold, seed, and the values of their QK norm."""
    config = {key: value for key, value in asdict(run.config).items() if key not in ("seed", "data", "qk_norm")}
    return json.dumps([config, run.config.data.name, run.config.qk_norm.name], sort_keys=True)


def distinct(runs: list[PlannedRun], keys: tuple[str, ...]) -> list[dict[str, Any]]:
    """One config for each value of the settings `keys`."""
    configs = [asdict(run.config) for run in runs]
    return list({json.dumps([config[key] for key in keys]): config for config in configs}.values())


def ask_worker(question: str, configs: list[dict[str, Any]]) -> list[Any]:
    """A worker's answers, who has torch and the corpus. Raises: ConfigError where a run could not start."""
    if not configs:
        return []
    command = [sys.executable, str(WORKER), question]
    asked = subprocess.run(command, input=json.dumps(configs).encode(), stdout=subprocess.PIPE)
    if asked.returncode != 0:
        raise OSError(f"a worker that should {question} the runs ended with exit status {asked.returncode}")
    reply = json.loads(asked.stdout.splitlines()[-1])
    if "error" in reply:
        raise ConfigError(reply["error"])
    answers: list[Any] = reply["answers"]
    return answers


# -----------------------------------------------------------------------------
# Running it


def launch(request: Request) -> int:
    """Have workers run what is left. Returns 0, 1 where a run failed, or 128 + the signal that stopped it."""
    sweep_dir, runs = request.sweep_dir, {run.id: run for run in request.runs}
    for folder in ("claims", "launches", "logs"):
        (sweep_dir / folder).mkdir(exist_ok=True)
    name = f"{socket.gethostname()}-{os.getpid()}-{time.time_ns()}"
    launcher: Launcher = LAUNCHERS[request.launcher.name][1](request.launcher, sweep_dir, name)
    tries = 1 + request.retries
    write_json(
        sweep_dir / "launches" / f"{name}.json",
        {
            "runs": list(runs),
            "tries": tries,
            "threads": launcher.threads,
            "fail_fast": request.fail_fast,
            "ranks": request.launcher.ranks,
        },
    )
    states = {run_id: state_of(sweep_dir, run, name) for run_id, run in runs.items()}
    first = sum(state.state in FINAL for state in states.values())
    each = f" of {request.launcher.ranks} ranks" * (request.launcher.ranks > 1)
    print(f"{sweep_dir}: {len(runs)} runs ({tally(list(states.values()))}), {launcher.workers} workers{each}")
    stop = Stop()
    began, trouble = time.monotonic(), None
    with tqdm(total=len(runs), initial=first, unit="run", disable=None, dynamic_ncols=True) as bar:
        while True:
            taken, tried = set(os.listdir(sweep_dir / "claims")), sum(s.launch_tries for s in states.values())
            for run_id, state in states.items():
                # to look at 10,000 runs takes a second; without a claim only others change them
                if state.state not in FINAL and (run_id in taken or not launcher.alive()):
                    states[run_id] = state_of(sweep_dir, runs[run_id], name)
                    if states[run_id].state in FINAL:
                        bar.update()
                        say(bar, runs[run_id], states, sweep_dir, began, first)
            if tried != sum(s.launch_tries for s in states.values()):
                launcher.deaths = 0  # a worker that took a run has not died as soon as it started
            left = [s for s in states.values() if s.state not in FINAL and s.launch_tries < tries]
            failed = any(s.state == "failed" and s.launch_tries >= tries for s in states.values())
            running = any(s.state == "running" for s in states.values())
            trouble = launcher.failure()
            if stop.signal or trouble or (failed and request.fail_fast) or (not left and not running):
                break
            waiting = [s for s in left if s.state != "running"]
            launcher.start(min(launcher.workers, launcher.alive() + len(waiting)))
            bar.set_postfix_str(tally(list(states.values())), refresh=True)
            stop.wait(POLL)
        launcher.stop()
    states = {run_id: state_of(sweep_dir, run, name) for run_id, run in runs.items()}
    counts = tally(list(states.values()))
    if stop.signal:
        print(f"stopped by {signal.Signals(stop.signal).name}: {counts}; the same command goes on from there")
        return 128 + stop.signal
    print(f"{sweep_dir}: {counts} in {tqdm.format_interval(time.monotonic() - began)}")
    ends = [(run_id, state) for run_id, state in states.items() if state.state in ("failed", "diverged")]
    for run_id, state in ends:
        print(f"{state.state}: {run_id}: {state.reason}; {sweep_dir / 'logs' / run_id}.log")
    if trouble:
        print(f"error: {trouble}", file=sys.stderr)
    return 0 if all(state.state in FINAL for state in states.values()) else 1


def say(bar: Any, run: PlannedRun, states: dict[str, State], sweep_dir: Path, began: float, first: int) -> None:
    """A line for a run that has ended, where no bar is drawn."""
    if bar.disable:
        ended = sum(state.state in FINAL for state in states.values())
        left = (time.monotonic() - began) / (ended - first) * (len(states) - ended)
        summary = read_json(sweep_dir / run.id / "summary.json")
        loss = summary.get("val/loss")  # null where it is not finite
        loss = "" if loss is None else f"val/loss {loss:.4f}, "
        print(
            f"[{ended}/{len(states)}] {run.id} {states[run.id].state}: {loss}{summary.get('seconds', 0):.0f} s; "
            f"{tqdm.format_interval(left)} left",
            flush=True,
        )


class Stop:
    """SIGINT and SIGTERM ask for the end; a second one raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.signal = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.receive)

    def receive(self, number: int, frame: FrameType | None) -> None:
        if self.signal:
            raise KeyboardInterrupt
        self.signal = number

    def wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self.signal and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, 0.1))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
