"""Launch a sweep: python sweeps/launch.py sweep=NAME [launcher=local|slurm] [settings] [overrides for every run]

The same command continues a sweep: it skips done runs, resumes partial ones and retries failed ones. from=results/NAME
also skips the runs that have ended in that report. keep_going and fail_fast are short for fail_fast=false and
fail_fast=true. sweep.KEY=VALUE replaces what configs/sweep/NAME.yaml says: sweep.folds=[0,1] sweep.seeds=[1,2]
sweep.parts=[NAME] sweep.grid.qk_norm.p=[2,3]
"""

import csv
import json
import os
import re
import shlex
import signal
import socket
import sys
import time
from dataclasses import asdict, field, replace
from pathlib import Path
from typing import Annotated

from tqdm import tqdm

from core.cli import parse_yaml, run_script
from core.files import expand, file_sha256, is_leftover, program, read_json
from core.plugins import changed_plugins, remember
from core.process import StopSignal, say
from core.record import is_number
from core.rundir import at_end, read_summary
from core.schema import NOT_EMPTY, AtLeast, ConfigError, Help, Variants, convert, declared, flatten, options, require
from core.wandb_run import wandb_options
from sweeps.claims import Launch
from sweeps.definition import Definition, load_sweep, read_definition, sweep_name
from sweeps.launchers import LAUNCHERS, Launcher, LocalOptions, SlurmOptions
from sweeps.plan import PlannedRun, freeze, frozen_runs, merge_plans, plan_runs, temperature_note, unknown_points
from sweeps.status import (
    FINAL,
    State,
    SweepPlace,
    another_run,
    failures,
    finished_in,
    progress,
    require_whole,
    state_of,
    stored_rows,
    tally,
)
from training.config import TrainConfig

POLL = 0.5  # seconds between two looks at the runs


@options
class LaunchOptions(SweepPlace):
    dry_run: Annotated[bool, Help("list the runs with an estimate of time and disk; write nothing")] = False
    fail_fast: Annotated[bool, Help("after a failed run stop the others at a checkpoint; false: go on")] = False
    retries: Annotated[int, AtLeast(0), Help("further tries of a run that fails")] = 1
    from_: Annotated[str | None, NOT_EMPTY, Help("folder of a report: what ended in it is not trained again")] = None
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


def run(asked: LaunchOptions, overrides: list[str], hint: bool = True) -> int:
    """Train what is left of a sweep. hint: say at the end how to report it. Returns the exit status."""
    sweep, runs, overrides = read_request(asked, overrides)
    for wandb in {run.config.wandb for run in runs}:
        wandb_options(wandb)  # refuses what W&B would refuse of its environment variables
    sweep_dir = asked.directory.resolve()
    convert(str(sweep_dir), str, "sweep_dir")  # a current folder may have a name that is no Unicode text
    check_usable(sweep_dir)
    unstored = without_stored(runs, asked.from_)
    for told in (another_run(sweep_dir / run.id, run) for run in unstored if at_end(sweep_dir / run.id)):
        require(not told, told)
    left_out = read_definition(str(asked.sweep))["parts"].keys() - sweep.parts.keys()
    for warning in unknown_points(sweep, {point for run in runs for point in run.points}, left_out):
        say(f"warning: {warning}")
    planned = {point: run.config for run in runs for point in run.points}
    if note := temperature_note(sweep, {point: flatten(asdict(config)) for point, config in planned.items()}):
        say(f"note: {note}")
    if asked.dry_run:
        merge_plans(sweep_dir, frozen_runs(sweep_dir), sweep, runs)  # refuses what freeze() would
        list_runs(asked, sweep_dir, unstored)
        return 0
    left = [run for run in unstored if not at_end(sweep_dir / run.id)]
    check_runs([replace(run, config=config_here(run.config, asked)) for run in left])
    freeze(sweep_dir, sweep_name(str(asked.sweep)), sweep, overrides, runs, trains=bool(left))
    if warning := remember(sorted({name for run in left for name in run.config.plugins})):
        say(f"warning: {warning}")
    ended = [run for run in runs if run.config.plugins and at_end(sweep_dir / run.id)]
    changed = {said for run in ended for said in changed_plugins(read_summary(sweep_dir / run.id).get("plugins") or {})}
    for said in sorted(changed):
        say(f"warning: {said}; runs that ended stay as they are, another sweep_dir= trains all anew")
    return launch(asked, sweep_dir, unstored, hint) if unstored else 0


def check_usable(sweep_dir: Path) -> None:
    """Refuse a folder that is not empty, nor that of a sweep, and links that lead out of it."""
    held = os.listdir(sweep_dir) if sweep_dir.is_dir() else []
    require("config.yaml" not in held, f"sweep_dir={sweep_dir} holds a run of train.py: write another sweep_dir=")
    begun = re.compile(r"plan\.lock|sweep\.json|code_.*")
    other = [one for one in held if not (begun.fullmatch(one) or is_leftover(one, r"plan\.jsonl|sweep\.json"))]
    told = f"sweep_dir={sweep_dir} is neither empty nor a sweep's directory (it has no plan.jsonl)"
    require("plan.jsonl" in held or not other, told)
    require(not held or os.access(sweep_dir, os.W_OK | os.X_OK), f"sweep_dir={sweep_dir} is not writable")
    links = [name for name in ("claims", "launches", "logs") if (sweep_dir / name).is_symlink()]
    require(not links, f"sweep_dir={sweep_dir} is not used: {', '.join(links)} in it is a link")


def read_request(asked: LaunchOptions, overrides: list[str]) -> tuple[Definition, list[PlannedRun], list[str]]:
    """The sweep with the changes of the command line, its runs, composed and checked, and the overrides of them all."""
    changes, rest = {}, []
    for override in overrides:
        key, equals, text = override.partition("=")
        require(key not in declared(Definition), f"{override} is unknown; did you mean sweep.{key}?")
        if key.startswith("sweep.") and equals:
            changes[key.removeprefix("sweep.")] = parse_yaml(text, f"{override} is not key=value")
        else:
            rest.append(override)
    sweep = load_sweep(str(asked.sweep), changes)
    runs, ranks = plan_runs(sweep, rest), asked.launcher.ranks
    bad = [n for run in runs if (n := run.config.gradient_accumulation_steps) % ranks]
    require(not bad, f"launcher.ranks={ranks} must divide gradient_accumulation_steps={min(bad, default=0)}")
    return sweep, runs, rest


# -----------------------------------------------------------------------------
# Before the launch


def without_stored(runs: list[PlannedRun], folder: str | None) -> list[PlannedRun]:
    """The runs without those that ended in the report in `folder`. Raises: ConfigError for a bad runs.csv."""
    if folder is None:
        return runs
    try:
        require_whole(expand(folder))
        about = read_json(expand(folder) / "provenance.json")
        common, sha256 = about.get("config", {}), about.get("sha256", {}).get("runs.csv")
        require(file_sha256(expand(folder) / "runs.csv") == sha256, "it was changed")
        rows = {row["id"]: {**common, **row} for row in stored_rows(expand(folder))}
        stored = {run_id: State(row["status"], int(row["iter"] or 0)) for run_id, row in rows.items()}
        enough = {run.id for run in runs if run.id in stored and stored[run.id].ended_as_one_of(run.config.max_iters)}
    except (OSError, LookupError, ValueError, TypeError, AttributeError, csv.Error) as error:
        raise ConfigError(f"from={folder} has no runs.csv that can be read: {error}") from error
    for run in (run for run in runs if run.id in enough):
        every, asked = rows[run.id].get("eval_interval"), run.config.eval_interval
        differ = f"was evaluated every {every} iterations; this sweep has eval_interval={asked}"
        require(str(every) == str(asked), f"from={folder}: {run.id} {differ}")
    say(f"{len(enough)} of {len(runs)} runs are stored in {folder}")
    return [run for run in runs if run.id not in enough]


def config_here(config: TrainConfig, asked: LaunchOptions) -> TrainConfig:
    """A run's config for this machine, which may lack the devices of SLURM's nodes."""
    if not isinstance(asked.launcher, SlurmOptions):
        return config
    threads = min(config.threads or asked.launcher.threads, os.cpu_count() or 1)
    return replace(config, device="cpu", dtype="float32", threads=threads)


def check_runs(runs: list[PlannedRun]) -> None:
    """Raise ConfigError where a run cannot start."""
    configs = {}
    for config in (run.config for run in runs):
        values = asdict(config)
        # runs that agree in these can all start, or none of them; those of init_from must fit its weights
        key = [values[name] for name in ("data", "device", "dtype", "model", "threads")] + [config.optim.name]
        key += [asdict(config.gpt), config.init_sha256] if config.init_from else []
        configs[json.dumps(key)] = config
    if configs:
        from training import estimate, session  # which load torch

        models = {json.dumps([asdict(c.gpt), asdict(c.qk_clip)]): c for c in (run.config for run in runs)}
        for config in models.values():
            session.checked_meta_model(config, vocab_size=2)
        for config in configs.values():
            estimate.require_startable(config)


def list_runs(asked: LaunchOptions, sweep_dir: Path, runs: list[PlannedRun]) -> None:
    """Print every run with its state and the time that is left, and what all of them take together."""
    from core.device import busy_note  # which loads torch, as the next
    from training import estimate

    states = {run.id: state_of(sweep_dir, run) for run in runs}
    launcher = LAUNCHERS[asked.launcher.name][1](asked.launcher, sweep_dir, "")
    cost: dict[str, tuple[float, int]] = {}
    seconds, size = 0.0, 0
    for run in runs:
        # equal for runs that cost the same: they differ in fold, seed, and the values of their QK norm
        same = {name: value for name, value in asdict(run.config).items() if name not in ("seed", "data", "qk_norm")}
        key = json.dumps([same, run.config.data.name, run.config.qk_norm.name])
        if key not in cost:
            config = config_here(run.config, asked)
            cost[key] = estimate.estimate(replace(config, threads=config.threads or launcher.threads))
        state, (run_seconds, run_bytes) = states[run.id], cost[key]
        left = 0 if state.state in FINAL else run_seconds * (1 - (state.iter or 0) / run.config.max_iters)
        seconds, size = seconds + left, size + run_bytes
        say(f"{run.id}  {state.state:8s} {tqdm.format_interval(left)}  {' '.join(run.points)}")
    at_once = max(1, min(launcher.workers, sum(state.state not in FINAL for state in states.values())))
    about = tqdm.format_interval(seconds / at_once / asked.launcher.ranks)
    where = workers(asked, launcher) + (" with CPUs as here" if asked.launcher.name == "slurm" else "")
    said = f"{len(runs)} runs ({tally(states.values())}) in {sweep_dir}"
    say(f"{said}: about {about} on {where}, {size / 2**30:.1f} GiB of disk{busy_note()}")


def workers(asked: LaunchOptions, launcher: Launcher) -> str:
    ranks = f" of {asked.launcher.ranks} ranks" if asked.launcher.ranks > 1 else ""
    return f"{launcher.workers} worker{'s' if launcher.workers > 1 else ''}{ranks}"


# -----------------------------------------------------------------------------
# The launch


def launch(asked: LaunchOptions, sweep_dir: Path, runs: list[PlannedRun], hint: bool) -> int:
    """Have workers train what is left. Returns 0 where all are done or diverged, 128 + n on signal n, else 1."""
    for folder in ("claims", "launches", "logs"):
        (sweep_dir / folder).mkdir(exist_ok=True)
    name = f"{socket.gethostname()}-{os.getpid()}-{time.time_ns()}"
    launcher: Launcher = LAUNCHERS[asked.launcher.name][1](asked.launcher, sweep_dir, name)
    ids, tries = [run.id for run in runs], 1 + asked.retries
    Launch(sweep_dir, name, ids, tries, asked.launcher.ranks, asked.launcher.name == "slurm").write()
    states = {run.id: state_of(sweep_dir, run, name) for run in runs}
    say(f"{sweep_dir}: {len(runs)} runs ({tally(states.values())}), {workers(asked, launcher)}")
    began = time.monotonic()
    with StopSignal() as stop:
        try:
            trouble = supervise(runs, states, launcher, tries, asked.fail_fast, stop)
        except BaseException:
            launcher.abandon()  # a notebook lives on, and so would its workers
            raise
    states = {run.id: state_of(sweep_dir, run, name) for run in runs}
    counts = tally(states.values())
    if stop.signal:
        say(f"stopped by {signal.Signals(stop.signal).name}: {counts}; the same command goes on from there")
        return 128 + stop.signal
    say(f"{sweep_dir}: {counts} in {tqdm.format_interval(time.monotonic() - began)}")
    for line in failures(sweep_dir, states):
        say(line)
    if trouble:
        print(f"error: {trouble}", file=sys.stderr)
    complete = all(state.state in FINAL for state in states.values())
    if complete and hint:
        place = [f"{key}={value}" for key, value in (("sweep_dir", asked.sweep_dir), ("from", asked.from_)) if value]
        try:  # whether results/NAME has runs that a report of these would lose
            lost = bool(finished_in(Path("results") / sweep_name(str(asked.sweep))) - states.keys())
        except (OSError, ValueError, KeyError, csv.Error) as error:
            lost = not isinstance(error, FileNotFoundError)
        if not asked.from_ and (asked.sweep_dir or lost):
            place.append(f"out={sweep_dir / 'report'}")
        say(f"next: {program('scripts/report.py')} {shlex.join([f'sweep={asked.sweep}', *place])}")
    return 0 if complete else 1


def supervise(
    runs: list[PlannedRun], states: dict[str, State], launcher: Launcher, tries: int, fail_fast: bool, stop: StopSignal
) -> str | None:
    """Keep workers alive while there are runs for them, and `states` up to date. Returns why none can live, or None."""
    sweep_dir = launcher.sweep_dir
    began, before = time.monotonic(), trained(runs, states, sweep_dir)
    while True:
        tried = {run_id: s.launch_tries for run_id, s in states.items()}
        claimed, idle = set(os.listdir(sweep_dir / "claims")), launcher.alive() == 0
        for run in runs:
            # state_of() is slow for 10,000 runs, and without a claim a run changes only through our workers
            if states[run.id].state not in FINAL and (run.id in claimed or idle):
                states[run.id] = state_of(sweep_dir, run, launcher.launch)
                if states[run.id].state in FINAL:
                    now = trained(runs, states, sweep_dir)
                    seconds_each = (time.monotonic() - began) / max(now - before, 0.01)
                    say(line_of(run, states, sweep_dir, seconds_each * (len(runs) - now)))
        if any(s.launch_tries > tried[run_id] for run_id, s in states.items()):
            launcher.deaths = 0  # a worker that took a run did not die at its start
        left = [s for s in states.values() if s.state not in FINAL and s.launch_tries < tries]
        failed = any(s.state == "failed" and s.launch_tries >= tries for s in states.values())
        running = [s for s in states.values() if s.state == "running"]
        trouble = launcher.failure()
        if stop.signal or trouble or (failed and fail_fast) or not (left or running):
            launcher.stop()
            return trouble
        waiting = sum(s.state != "running" for s in left)
        ours = sum(s.launch_tries > 0 for s in running)  # other launchers' runs need none of our workers
        launcher.start(min(launcher.workers, ours + waiting))  # not alive() + waiting: some are still starting
        time.sleep(POLL)


def trained(runs: list[PlannedRun], states: dict[str, State], sweep_dir: Path) -> float:
    """How many runs' worth of iterations is done."""
    begun = [run for run in runs if states[run.id].state not in (*FINAL, "pending")]
    ended = sum(state.state in FINAL for state in states.values())
    return ended + sum(progress(sweep_dir, run, states[run.id])[0] for run in begun)


def line_of(run: PlannedRun, states: dict[str, State], sweep_dir: Path, left: float) -> str:
    """What is printed for a run that has ended. left: seconds for the others."""
    ended = sum(state.state in FINAL for state in states.values())
    summary = read_summary(sweep_dir / run.id)
    loss = summary.get("val/loss")  # null where it is not finite
    loss = f"val/loss {loss:.4f}, " if is_number(loss) else ""
    seconds = f"{summary.get('seconds') or 0:.0f} s; {tqdm.format_interval(left)} left"
    return f"[{ended}/{len(states)}] {' '.join(run.points)}: {run.id} {states[run.id].state}: {loss}{seconds}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
