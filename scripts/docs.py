"""What the documentation takes from elsewhere: python scripts/docs.py

Writes docs/configuration.md, from the declarations of the settings; the README's figure, how far p = 3 and p = 4 are
below p = 2 along the runs of results/p_nano; and the tables of results/README.md, from results/ledger.yaml
and the studies' files.
"""

import sys

from core.cli import presets, run_script
from core.files import ROOT, write_atomic
from core.help import describe
from core.schema import options
from data.options import PrepareFineWebConfig
from sample import SampleConfig
from scripts.reporting.charts import Figure, Series, Style, curve_chart, svg
from scripts.reporting.ledger import ledger
from scripts.reporting.page import with_block
from scripts.reporting.statistics import minus
from scripts.reporting.stored import read_stored
from training.config import TrainConfig

# -----------------------------------------------------------------------------
# docs/configuration.md

PROGRAMS = {"train.py": TrainConfig, "sample.py": SampleConfig, "data/prepare_fineweb.py": PrepareFineWebConfig}
SAYS = """# Configuration

Written by `python scripts/docs.py` from the declarations of the settings; `--help` of each program prints the same.
Settings are written `key=value`. A group, as `qk_norm`, is one of several options, each with settings of its own. A
setting that the chosen option does not have is an error. `also` names those that an option shares with one above it.
"""


def configuration() -> str:
    pages = [SAYS]
    for program, settings in PROGRAMS.items():
        lines = "\n".join(describe(settings, presets(settings) if settings is TrainConfig else {}))
        pages.append(f"## {program}\n\n```text\n{lines}\n```\n")
    return "\n".join(pages)


# -----------------------------------------------------------------------------
# The README's figure

STUDY = ROOT / "results" / "p_nano"
STARTS = {"alpha_1": "α from 1", "matched": "matched temperature"}  # part of the sweep -> its words in the legend
TITLE = "Validation loss of p = 3 and p = 4 minus that of p = 2, paired over 10 folds"
# hue says p, lightness and symbol say the start; (start, p) -> colour, symbol, dashes
LOOK = {
    ("alpha_1", 3): ("#0072B2", "circle", [1, 0]), ("alpha_1", 4): ("#D55E00", "square", [1, 0]),
    ("matched", 3): ("#56B4E9", "triangle-up", [4, 3]), ("matched", 4): ("#E69F00", "diamond", [4, 3]),
}  # fmt: skip


def figure() -> Figure:
    sweep, series = read_stored(STUDY, STUDY.name), []
    for (part, p), (colour, symbol, dashes) in LOOK.items():
        runs, base = sweep.runs_of(f"{part}/p={p}"), sweep.runs_of(f"{part}/p=2")
        curves = {r: minus(run.losses, base[r].losses) for r, run in runs.items()}
        series.append(Series(f"p = {p}, {STARTS[part]}", Style(colour, colour, symbol, dashes), curves))
    chart = curve_chart(series, "validation loss minus that of p = 2 (nats per token)", zero=True)
    return Figure("along", TITLE, chart, "")


# -----------------------------------------------------------------------------
# The ledger

LEDGER = ROOT / "results" / "README.md"
BEGIN, END = "<!-- made by scripts/docs.py from ledger.yaml -->\n", "<!-- end -->"


@options
class NoSettings:
    pass


def write(_: NoSettings) -> int:
    made = {
        ROOT / "docs" / "configuration.md": configuration().encode(),
        STUDY / "along.svg": svg(figure()),
        LEDGER: with_block(LEDGER.read_text(encoding="utf-8"), BEGIN, END, f"\n{ledger()}\n").encode(),
    }
    for file, content in made.items():
        write_atomic(file, content)
        print(file)
    return 0


if __name__ == "__main__":
    sys.exit(run_script(NoSettings, write, __doc__))
