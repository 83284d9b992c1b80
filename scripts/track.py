"""The attention track's board: python scripts/track.py [rates=true] [times=true]

Reads results/attention_track/grid, final and, where it is complete, small: the reports of the sweeps attention_track,
attention_track_final and attention_track_small; and the benchmarks train.json and decode.json beside them. Writes the
tables and the noise floors into the README of that folder, and the figures rates.svg and overhead.svg.
docs/attention_track.md has the commands that come before.
"""

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from core.cli import CONFIG_DIR, run_script
from core.files import ROOT, expand, write_atomic
from core.process import say
from core.schema import NOT_EMPTY, Help, options, require
from scripts.reporting import track
from scripts.reporting.charts import svg
from scripts.reporting.page import with_block
from scripts.reporting.rates import best_rate
from scripts.reporting.runs import Sweep
from scripts.reporting.stored import read_stored
from scripts.reporting.track import BASELINE, SMALL, Entry, board, entries, mean_losses
from sweeps.definition import load_sweep, sweep_name
from sweeps.status import FINAL

BEGIN, END = "<!-- made by scripts/track.py -->\n", "<!-- end -->"
SWEEP = "attention_track"
Overrides = Mapping[str, Sequence[str]]  # of each contestant


@options
class TrackOptions:
    folder: Annotated[str, NOT_EMPTY, Help("of the board")] = str(ROOT / "results" / SWEEP)
    sweep: Annotated[str, NOT_EMPTY, Help("the grid's definition, which has each contestant's overrides")] = SWEEP
    rates: Annotated[bool, Help("write SWEEP_final beside SWEEP, at the grid's best rates, and no board")] = False
    times: Annotated[bool, Help("print the commands whose last lines are train.json and decode.json")] = False

    def check(self) -> None:
        require(not (self.rates and self.times), "rates= and times= exclude one another")

    @property
    def final(self) -> Path:
        """Where the final sweep's definition is written."""
        own = expand(self.sweep)
        beside = own if own.suffix == ".yaml" else CONFIG_DIR / "sweep" / f"{self.sweep}.yaml"
        return beside.with_stem(f"{beside.stem}_final")


def make(asked: TrackOptions) -> int:
    folder, sweep = expand(asked.folder), load_sweep(asked.sweep, {})
    require("words" in sweep.grid, f"sweep={asked.sweep} is no track: its grid has no words")
    overrides = sweep.grid["words"]
    if asked.times:
        variants = shlex.quote("variants=" + ";".join(f"{name}: {' '.join(of)}" for name, of in overrides.items()))
        for program, how in (("train", "together=true rounds=41 iters=10"), ("sample", "tokens=120 rounds=21")):
            print(f"python scripts/benchmarks/bench_{program}.py {variants} {' '.join(sweep.overrides)} {how}")
        return 0
    grid = read_stored(folder / "grid", asked.sweep)
    unknown = [name for name in mean_losses(grid) if name not in overrides]
    require(not unknown, f"sweep={asked.sweep} has no {', '.join(unknown)}, which {folder / 'grid'} has")
    if asked.rates:
        n_open = sum(run.state.state not in FINAL for run in grid.runs)
        require(n_open == 0, f"{n_open} runs of {folder / 'grid'} have not ended: the best rates are not known yet")
        print_edges(asked.sweep, overrides, track.at_the_edge(grid))
        made = {asked.final: final_definition(Path(asked.sweep).name, overrides, mean_losses(grid)).encode()}
    else:
        name = sweep_name(asked.sweep)
        found = entries(grid, read_stored(folder / "final", f"{name}_final"), folder)
        made = board_files(folder, sweep.title, found, small_entries(folder, name, grid))
    for file, content in made.items():
        write_atomic(file, content)
        say(str(file))
    return 0


def print_edges(sweep: str, overrides: Overrides, rates: Mapping[str, float]) -> None:
    """The command that tries one more rate, for each contestant whose best one is at the grid's edge."""
    for name, rate in rates.items():
        more = f"'sweep.grid.words={{{name}: {json.dumps(overrides[name])}}}' sweep.grid.optim.learning_rate=[{rate}]"
        print(f"{name} is best at the grid's edge; try one more: python sweeps/launch.py sweep={sweep} {more}")


def small_entries(folder: Path, name: str, grid: Sweep) -> list[Entry]:
    """The contestants at track_small scale, once all their runs are done."""
    if not (folder / "small").exists():
        return []
    small = read_stored(folder / "small", f"{name}_small")
    return entries(grid, small, folder) if all(run.done for run in small.runs) else []


def board_files(folder: Path, title: str, found: Sequence[Entry], small: Sequence[Entry]) -> dict[Path, bytes]:
    """The page with the tables between its marks, and the figures. small: the contestants at track_small scale.

    Raises: ConfigError where the page has no marks.
    """
    page = folder / "README.md"
    text = page.read_text(encoding="utf-8") if page.exists() else f"# {title}\n\n{BEGIN}{END}"
    tables = f"\n{track.noise(found)}\n\n{board(found).markdown()}\n"
    if small:
        tables += f"### At `track_small` scale\n\n{track.noise(small)}\n\n{board(small, SMALL).markdown()}\n"
    made = {page: with_block(text, BEGIN, END, tables).encode()}
    return made | {folder / f"{figure.name}.svg": svg(figure) for figure in track.figures(found)}


def final_definition(grid: str, overrides: Overrides, means: Mapping[str, Mapping[float, float]]) -> str:
    """The file of the sweep in which every contestant has its best rate and the fresh seeds."""
    lines = [
        'title: "The attention track: each contestant at its best rate, eight fresh seeds, which alone decide"',
        "# Written by scripts/track.py", f"extends: {grid}", "seeds: [11, 12, 13, 14, 15, 16, 17, 18]",
        "grid:", "  words:",
    ]  # fmt: skip
    for name, of in means.items():
        words = [*overrides[name], f"optim.learning_rate={best_rate(of)}"]
        lines.append(f"    {name}: [{', '.join(map(json.dumps, words))}]")
    compare = f'title: "each contestant against {BASELINE}", baseline: {BASELINE}, settings: ["*"]'
    return "\n".join([*lines, "compare:", "  none: null", f"  {BASELINE}: {{{compare}}}", ""])


if __name__ == "__main__":
    sys.exit(run_script(TrackOptions, make, __doc__))
