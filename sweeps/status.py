"""The state of a sweep's runs: python sweeps/status.py sweep=NAME [sweep_dir=PATH]"""

import csv
import io
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated

from core.cli import run_script
from core.files import NEXT, expand, is_locked, read_regular
from core.process import printable, say
from core.record import Lines
from core.rundir import at_end, is_open, read_settings, read_status, read_summary
from core.schema import NOT_EMPTY, ConfigError, Help, differences, options, require
from sweeps.claims import read_claim
from sweeps.definition import sweep_name
from sweeps.plan import PlannedRun, read_plan
from training.config import stored_config

STATES = ("done", "diverged", "running", "stopped", "failed", "pending")
FINAL = ("done", "diverged")


@dataclass(frozen=True)
class State:
    """state: one of STATES; a stopped run has begun, and no process trains it now. iter: of its last checkpoint.
    launch_tries: how often the launch in question has tried it. another: its folder holds another run."""

    state: str
    iter: int | None = None
    reason: str = ""
    launch_tries: int = 0
    another: bool = False

    def ended_as_one_of(self, max_iters: int) -> bool:
        """Whether this counts as the end of a run of max_iters: it is done at that iteration, or diverged by then. With
        a constant learning rate, runs of any length share an id."""
        reached = self.iter or 0
        return reached == max_iters if self.state == "done" else self.state == "diverged" and reached <= max_iters


def another_run(path: Path, run: PlannedRun) -> str:
    """Why the run in `path`, which is at its end, is not `run` of the plan: somebody exchanged or copied folders. ""
    where it is, or was trained by a version that did not record which run it is."""
    if read_summary(path).get("run_id", run.id) == run.id:
        return ""
    try:
        changes = ", ".join(differences(run.config.trajectory, stored_config(read_settings(path)).trajectory))
    except ConfigError as error:
        changes = str(error)
    return changes and printable(f"{path} holds another run: {changes}; put it back, or remove the folder")


def state_of(sweep_dir: Path, run: PlannedRun, launch: str | None = None) -> State:
    """The state of a run, from its files and locks. launch: the one whose tries are counted."""
    path = sweep_dir / run.id
    held = not at_end(path) and (is_locked(sweep_dir / "claims" / run.id) or is_open(path))
    status = read_status(path)  # after the locks: the run may have ended since the first look
    state, step, reason = status.get("state"), status.get("iter"), printable(str(status.get("reason", "")))
    if not held and at_end(path):
        told = another_run(path, run)
        return State("failed", None, told, sys.maxsize, True) if told else State(str(state), step, reason)
    claim = read_claim(sweep_dir, run.id)
    tries = claim["tries"].get(launch, 0)
    if held:
        return State("running", step, "", tries)
    if state == "done":
        reason = "done, but summary.json is lost"
    if state == "failed" or claim["error"]:
        return State("failed", step, printable(str(claim["error"] or reason)), tries)
    if next(reversed(claim["tries"].values()), 0) >= claim["limit"]:  # of the last launch
        return State("failed", step, "its worker died", tries)
    return State("pending" if state is None else "stopped", step, reason, tries)


def progress(sweep_dir: Path, run: PlannedRun, state: State) -> tuple[float, tuple[float, int, str] | None]:
    """The share of a run's iterations that is behind it; its lowest val/loss, with the iteration and the run's id."""
    if state.another:
        return 0.0, None
    metrics = Lines(sweep_dir / run.id / "metrics.jsonl")
    metrics.update()
    reached = max((line["iter"] for line in metrics.lines), default=0)
    done = 1.0 if state.state in FINAL else min(1.0, reached / run.config.max_iters)
    return done, min(((loss, i, run.id) for i, loss in metrics.curve("val/loss").items()), default=None)


def bar(shares: Sequence[float], width: int = 20) -> str:
    """A bar of the mean share, full only where all are 1."""
    share = fmean(shares)
    return f"[{'#' * int(width * share):.<{width}}] {int(100 * share + 1e-9):3d} %"


def require_whole(report: Path) -> None:
    """Raises: ConfigError where a kill ended the writing of a report amid its moves. Who only reads makes none of them:
    in a stranger's folder they would put other files in place of those that were read."""
    told = f"{report} was ended while it was written ({NEXT} is there): the command that writes it goes on"
    require(not os.path.lexists(report / NEXT), told)


def stored_rows(report: Path) -> list[dict[str, str]]:
    """The rows of a report's runs.csv. Raises: OSError, csv.Error, and ValueError where a row has not as many values as
    the first line has names."""
    rows = [*csv.DictReader(io.StringIO(read_regular(report / "runs.csv").decode(), newline=""))]
    if bad := next((n for n, row in enumerate(rows, 2) if None in {*row, *row.values()}), None):
        raise ValueError(f"line {bad} has too many or too few values")
    return rows


def finished_in(report: Path) -> set[str]:
    """The ids of the runs at their end that a stored report has. Raises: as stored_rows(), and KeyError."""
    return {row["id"] for row in stored_rows(report) if row["status"] in FINAL}


def tally(states: Iterable[State]) -> str:
    """ "12 done, 2 running, 56 pending" """
    counts = Counter(state.state for state in states)
    return ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state]) or "no run"


def failures(sweep_dir: Path, states: Mapping[str, State]) -> Iterator[str]:
    """A line for each run that failed or diverged: the reason, and where its log is."""
    for run_id, state in states.items():
        if state.state in ("failed", "diverged"):
            yield f"{state.state}: {run_id}: {state.reason}; {sweep_dir / 'logs' / run_id}.log"


@options
class SweepPlace:
    """Which sweep a program reads."""

    sweep: Annotated[str | None, NOT_EMPTY, Help("its name, or its file")] = None
    sweep_dir: Annotated[str | None, NOT_EMPTY, Help("its directory; null: runs/NAME")] = None

    @property
    def directory(self) -> Path:
        return expand(self.sweep_dir or Path("runs") / sweep_name(self.sweep or ""))

    def check(self) -> None:
        require(bool(self.sweep or self.sweep_dir), "sweep= must be given")


def print_status(asked: SweepPlace) -> int:
    """Print a bar, a line a point with its lowest val/loss, then what runs and what failed."""
    sweep_dir, runs = asked.directory, read_plan(asked.directory)
    states = {run.id: state_of(sweep_dir, run) for run in runs}
    found = {run.id: progress(sweep_dir, run, states[run.id]) for run in runs}
    say(f"{sweep_dir}: {len(runs)} runs, {tally(states.values())}")
    points: dict[str, list[str]] = {}
    for run in runs:
        for point in run.points:
            points.setdefault(point, []).append(run.id)
    for point, ids in {"": [*found], **points}.items():  # the first row: the whole sweep
        best = min(filter(None, (found[run_id][1] for run_id in ids)), default=None)
        if point:
            said = f"{'' if best is None else f'lowest {best[0]:.4f}':15s}{tally(states[run_id] for run_id in ids)}"
        else:
            said = "" if best is None else "lowest val/loss {:.4f} at iteration {} of {}".format(*best)
        say(f"  {point:{max(map(len, points))}s}  {bar([found[run_id][0] for run_id in ids])}  {said}".rstrip())
    for run in runs:
        if states[run.id].state == "running":
            say(f"running: {run.id}: iteration {states[run.id].iter or 0} of {run.config.max_iters} is saved")
    for line in failures(sweep_dir, states):
        say(line)
    return 0


if __name__ == "__main__":
    sys.exit(run_script(SweepPlace, print_status, __doc__))
