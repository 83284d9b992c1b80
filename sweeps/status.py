"""The state of a sweep's runs: python sweeps/status.py sweep=NAME [sweep_dir=PATH] [watch=true]"""

import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.cli import run_script
from core.rundir import at_end, is_locked, read_status
from core.schema import require
from sweeps.plan import PlannedRun, read_plan
from sweeps.worker import FINAL, is_claimed, read_claim

NEVER = 10**9  # launch_tries of what no try mends
STATES = ("done", "diverged", "running", "stopped", "failed", "pending")


@dataclass(frozen=True)
class State:
    """state: one of STATES; stopped is a run that has begun and that nobody is at. iter: that is safe on disk."""

    state: str
    iter: int | None = None
    reason: str = ""
    launch_tries: int = 0


def state_of(sweep_dir: Path, run: PlannedRun, launch: str | None = None) -> State:
    """What a run is at, from its files and its locks. launch: whose tries to count."""
    path = sweep_dir / run.id
    held = not at_end(path) and (is_claimed(sweep_dir, run.id) or is_locked(path))
    status = read_status(path)  # after the locks: it may have come to its end since the first look
    state, step, reason = status.get("state"), status.get("iter"), str(status.get("reason", ""))
    if not held and at_end(path):
        metrics = path / "metrics.jsonl"
        if state == "done" and not (metrics.exists() and metrics.stat().st_size):
            return State("failed", step, f"done, but its metrics.jsonl is lost; without {path} it is made again", NEVER)
        return State(str(state), step, reason)
    if state == "done" and not held:
        reason = "done, but its summary.json is lost"
    claim = read_claim(sweep_dir, run.id)
    tries = claim["tries"].get(launch, 0)
    if held:
        return State("running", step, "", tries)
    if state == "failed" or claim["error"]:
        return State("failed", step, claim["error"] or reason, tries)
    if max(claim["tries"].values(), default=0) >= claim["limit"]:
        return State("failed", step, "its worker died", tries)
    return State("pending" if state is None else "stopped", step, reason, tries)


def tally(states: list[State]) -> str:
    """ "12 done, 2 running, 56 pending" """
    counts = Counter(state.state for state in states)
    return ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state]) or "no run"


def show_status(sweep_dir: Path, runs: list[PlannedRun]) -> bool:
    """Print a line a setting, and what runs and what failed. Returns whether every run is at its end."""
    states = {run.id: state_of(sweep_dir, run) for run in runs}
    print(f"{sweep_dir}: {len(runs)} runs, {tally(list(states.values()))}")
    width = max(len(setting) for run in runs for setting in run.settings)
    for setting in dict.fromkeys(setting for run in runs for setting in run.settings):
        print(f"  {setting:{width}s}  {tally([states[run.id] for run in runs if setting in run.settings])}")
    for run in runs:
        state = states[run.id]
        if state.state == "running":
            print(f"running: {run.id}: iteration {state.iter or 0} of {run.config.max_iters} is saved")
    for run in runs:
        state = states[run.id]
        if state.state in ("failed", "diverged"):
            print(f"{state.state}: {run.id}: {state.reason}; {sweep_dir / 'logs' / run.id}.log")
    return all(state.state in FINAL for state in states.values())


def sweep_directory(values: dict[str, Any]) -> Path:
    require("sweep" in values or "sweep_dir" in values, "sweep= must be given")
    return Path(values.get("sweep_dir") or Path("runs") / Path(values["sweep"]).stem).expanduser()


def show(values: dict[str, Any]) -> int:
    sweep_dir = sweep_directory(values)
    try:
        while True:
            runs = read_plan(sweep_dir)
            if values.get("watch") and sys.stdout.isatty():
                print("\033[H\033[2J", end="")
            if show_status(sweep_dir, runs) or not values.get("watch"):
                return 0
            time.sleep(2)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(run_script(sys.argv[1:], __doc__, {"sweep": str, "sweep_dir": str, "watch": bool}, show))
