"""Sweep speed

python scripts/benchmarks/bench_sweep.py [sweep=p_sweep_cpu] [runs=8] [rounds=3] [workers=2] [overrides of train.py]

Alternates one worker and `workers` workers on `runs` runs of a sweep (seeds of its first point), one thread a run.
speed_up: time with one worker / time with `workers`, median over rounds. Of each:
start_and_end_s  seconds before the first run and after the last; they do not grow with the number of runs
gap_s            seconds from the end of a run to the start of the next one
idle_end         share of the workers' time in which a worker has no run left and another one has
overhead         share of the workers' time without a run, idle_end excluded
Runs should take 20 s or more: max_iters= decides. The last line is JSON.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from core.schema import NOT_EMPTY, AtLeast, Help, options, require
from scripts.benchmarks.timing import ROOT, Turn, alternate, machine, median, ratio, run_benchmark
from sweeps.definition import load_sweep
from sweeps.plan import read_plan


def launch(sweep: str, seeds: int, words: list[str], workers: int) -> Turn:
    """One launch in a new directory."""
    with tempfile.TemporaryDirectory() as folder:
        sweep_dir = Path(folder) / "sweep"
        command = [
            sys.executable, str(ROOT / "sweeps" / "launch.py"), f"sweep={sweep}", f"sweep_dir={sweep_dir}", "threads=1",
            f"launcher.workers={workers}", f"sweep.seeds={[*range(seeds)]}".replace(" ", ""), "wandb.mode=disabled",
            *words,
        ]  # fmt: skip
        began = time.time()
        ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        seconds = time.time() - began
        require(ended.returncode == 0, f"the sweep ended with {ended.returncode}: {ended.stdout[-500:]}")
        folders = [sweep_dir / run.id for run in read_plan(sweep_dir)]
        starts = sorted((run / "config.yaml").stat().st_mtime for run in folders)  # written as a run starts
        ends = sorted((run / "summary.json").stat().st_mtime for run in folders)
    # the k-th run that ends makes room for start number k + workers
    gaps = [start - end for start, end in zip(starts[workers:], ends, strict=False)]
    busy, idle_end = sum(ends) - sum(starts), sum(ends[-1] - end for end in ends[-workers:])
    return {
        "seconds": seconds,
        "run_seconds": busy / len(folders),
        "start_and_end_s": seconds - (ends[-1] - starts[0]),
        "gap_s": statistics.fmean(gaps),
        "overhead": 1 - (busy + idle_end) / (seconds * workers),
        "idle_end": idle_end / (seconds * workers),
    }


@options
class SweepOptions:
    sweep: Annotated[str, NOT_EMPTY, Help("its first point is run")] = "p_sweep_cpu"
    runs: Annotated[int, Help("seeds of that point, a multiple of workers")] = 8
    rounds: Annotated[int, AtLeast(1), Help("turns of each side")] = 3
    workers: Annotated[int, AtLeast(2), Help("compared with one")] = 2

    def check(self) -> None:
        good = self.runs > self.workers and self.runs % self.workers == 0
        require(good, f"runs={self.runs} must be a multiple of workers={self.workers}, and more")


def bench(values: SweepOptions, words: list[str]) -> dict[str, Any]:
    rounds, runs, workers = values.rounds, values.runs, values.workers
    sweep = load_sweep(values.sweep, {})
    part = next(iter(sweep.parts.values()), sweep)
    first = [f"sweep.grid.{key}={[next(iter(grid.values()))]}" for key, grid in {**sweep.grid, **part.grid}.items()]
    words = [*first, *([] if sweep.folds is None else ["sweep.folds=[0]"]), *words]
    sides = {f"{n}_workers": partial(launch, values.sweep, runs, words, n) for n in (1, workers)}
    turns = alternate(sides, rounds)
    rows = {name: {key: round(median(side, key), 4) for key in side[0]} for name, side in turns.items()}
    one, several = sides
    speed_up = ratio(turns, one, several)
    return {**rows, "speed_up": speed_up, "runs": runs, "rounds": rounds, "words": words, **machine(threads=1)}


if __name__ == "__main__":
    sys.exit(run_benchmark(SweepOptions, bench, __doc__))
