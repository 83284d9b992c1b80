"""What the documentation takes from elsewhere: python scripts/docs.py

Writes docs/configuration.md, from the declarations of the settings; the figures along.svg of results/p_baby, which
is the README's, and results/p_nano; and the tables of results/README.md, from results/ledger.yaml and the studies'
files.
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
# The README's figure, and the same of p_nano

# study -> title, and the lines: name -> setting, what is subtracted from it, colour, symbol, dashes
FIGURES: dict[str, tuple[str, dict[str, tuple[str, str, str, str, list[int]]]]] = {
    "p_baby": ("Validation loss minus that of p = 2 with α from 1, paired over 10 folds", {
        "p = 4, α from 1": ("alpha_1/p=4", "alpha_1/p=2", "#D55E00", "square", [1, 0]),
        "p = 4, matched temperature": ("matched/p=4", "alpha_1/p=2", "#E69F00", "diamond", [4, 3]),
        "p = 2, matched temperature": ("matched/p=2", "alpha_1/p=2", "#0072B2", "circle", [1, 0]),
    }),
    "p_nano": ("Validation loss of p = 3 and p = 4 minus that of p = 2, paired over 10 folds", {
        "p = 3, α from 1": ("alpha_1/p=3", "alpha_1/p=2", "#0072B2", "circle", [1, 0]),
        "p = 4, α from 1": ("alpha_1/p=4", "alpha_1/p=2", "#D55E00", "square", [1, 0]),
        "p = 3, matched temperature": ("matched/p=3", "matched/p=2", "#56B4E9", "triangle-up", [4, 3]),
        "p = 4, matched temperature": ("matched/p=4", "matched/p=2", "#E69F00", "diamond", [4, 3]),
    }),
}  # fmt: skip


def figure(study: str) -> Figure:
    sweep, series = read_stored(ROOT / "results" / study, study), []
    title, lines = FIGURES[study]
    for name, (setting, baseline, colour, symbol, dashes) in lines.items():
        base = sweep.runs_of(baseline)
        curves = {r: minus(run.losses, base[r].losses) for r, run in sweep.runs_of(setting).items()}
        series.append(Series(name, Style(colour, colour, symbol, dashes), curves))
    return Figure("along", title, curve_chart(series, "difference in validation loss (nats per token)", zero=True), "")


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
        **{ROOT / "results" / study / "along.svg": svg(figure(study)) for study in FIGURES},
        LEDGER: with_block(LEDGER.read_text(encoding="utf-8"), BEGIN, END, f"\n{ledger()}\n").encode(),
    }
    for file, content in made.items():
        write_atomic(file, content)
        print(file)
    return 0


if __name__ == "__main__":
    sys.exit(run_script(NoSettings, write, __doc__))
