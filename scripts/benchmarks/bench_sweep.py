"""Sweep speed

python scripts/benchmarks/bench_sweep.py [sweep=p_sweep_cpu] [runs=8] [rounds=3] [workers=2] [words of train.py]

`runs` runs of a sweep (seeds of its first setting), each with one thread, by one worker and by `workers`, by turns.
speed_up: a turn's time with one worker over that with `workers`, median over rounds. Of a turn: start_and_end_s are the
seconds before the first run and after the last, paid once, however many runs there are; gap_s those between a run's end
and the next one's start; idle_end is the share of the workers' time in which one has no run left and another one has;
overhead that in which no run is under way, without idle_end. Runs are meant to take 20 s or more: max_iters= decides.
The last line is JSON.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from core.schema import at_least, require
from scripts.benchmarks.timing import machine, run_benchmark
from sweeps.definition import load_sweep
from sweeps.plan import read_plan

ROOT = Path(__file__).resolve().parent.parent.parent


def turn(sweep: str, seeds: int, workers: int, words: list[str]) -> dict[str, Any]:
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
    # the run that starts as number k + workers takes the place of the k-th that has ended
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


def bench(values: dict[str, Any], words: list[str]) -> dict[str, Any]:
    for key, least in {"rounds": 1, "workers": 2}.items():
        at_least(key, values[key], least)
    good = values["runs"] > values["workers"] and values["runs"] % values["workers"] == 0
    require(good, f"runs={values['runs']} must be a multiple of workers={values['workers']}, and more")
    sweep = load_sweep(values["sweep"], {})
    part = next(iter(sweep.parts.values()), sweep)
    first = [f"sweep.grid.{key}={[next(iter(grid.values()))]}" for key, grid in {**sweep.grid, **part.grid}.items()]
    words = [*first, *([] if sweep.folds is None else ["sweep.folds=[0]"]), *words]
    turns: dict[int, list[dict[str, Any]]] = {1: [], values["workers"]: []}
    for i in range(values["rounds"]):
        for workers in sorted(turns, reverse=i % 2 == 1):
            turns[workers].append(turn(values["sweep"], values["runs"], workers, words))
        both = ", ".join(f"{n} workers {t[-1]['seconds']:.1f} s" for n, t in turns.items())
        print(f"round {i + 1}: {both}", flush=True)
    rows = {
        f"{n}_workers": {key: round(statistics.median(t[key] for t in of), 4) for key in of[0]}
        for n, of in turns.items()
    }
    ratios = sorted(a["seconds"] / b["seconds"] for a, b in zip(turns[1], turns[values["workers"]], strict=True))
    speed_up = {"median": statistics.median(ratios), "lowest": ratios[0], "highest": ratios[-1]}
    return {
        **rows,
        "speed_up": speed_up,
        "runs": values["runs"],
        "rounds": values["rounds"],
        "words": words,
        **machine(threads=1),
    }


if __name__ == "__main__":
    known = {"sweep": (str, "p_sweep_cpu"), "runs": (int, 8), "rounds": (int, 3), "workers": (int, 2)}
    sys.exit(run_benchmark(__doc__, known, bench))
