"""What the documentation takes from elsewhere: python scripts/docs.py

Writes docs/configuration.md, from the declarations of the settings, and the README's figure: how far p = 3 and p = 4
are below p = 2 along the runs of results/p_sweep_cpu_5000, from the curves that its report.html holds.
"""

import base64
import gzip
import json
import re
import sys
from pathlib import Path
from typing import Any

from core.cli import presets, run_script
from core.files import ROOT, write_atomic
from core.help import describe
from core.schema import options
from data.options import PrepareFineWebConfig
from sample import SampleConfig
from scripts.reporting.charts import Figure, Series, Style, along_chart, svg
from scripts.reporting.runs import Curve, Replicate
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

STUDY = ROOT / "results" / "p_sweep_cpu_5000"
STARTS = {"alpha_1": "α from 1", "matched": "matched temperature"}  # part of the sweep -> its words in the legend
TITLE = "Validation loss of p = 3 and p = 4 minus that of p = 2, paired over 10 folds"
# hue says p, lightness and symbol say the start; (start, p) -> colour, symbol, dashes
LOOK = {
    ("alpha_1", 3): ("#0072B2", "circle", [1, 0]), ("alpha_1", 4): ("#D55E00", "square", [1, 0]),
    ("matched", 3): ("#56B4E9", "triangle-up", [4, 3]), ("matched", 4): ("#E69F00", "diamond", [4, 3]),
}  # fmt: skip


def figure() -> Figure:
    charts, series = charts_of(STUDY / "report.html"), []
    for (part, p), (colour, symbol, dashes) in LOOK.items():
        curves: dict[str, dict[str, dict[int, float]]] = {}  # setting -> fold and seed -> iteration -> loss
        for row in charts[f"loss_{part}"]["data"]["values"]:
            if row["run"] != "mean":
                curves.setdefault(row["setting"], {}).setdefault(row["run"], {})[row["iteration"]] = row["value"]
        runs: dict[Replicate, Curve] = {}
        for n, (run, curve) in enumerate(curves[f"p={p}"].items()):
            base = curves["p=2"][run]
            runs[0, n] = {i: value - base[i] for i, value in curve.items()}
        series.append(Series(f"p = {p}, {STARTS[part]}", Style(colour, colour, symbol, dashes), runs))
    return Figure("along", TITLE, along_chart(series, "p = 2"), "")


def charts_of(page: Path) -> dict[str, Any]:
    """The charts that a report.html holds, by name."""
    packed = re.findall(r'<script type="text/plain" id="charts">([^<]*)</script>', page.read_text(encoding="utf-8"))
    charts: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(packed[0])))
    return charts


@options
class DocsConfig:
    pass


def write(_: DocsConfig) -> int:
    made = {ROOT / "docs" / "configuration.md": configuration().encode(), STUDY / "along.svg": svg(figure())}
    for file, content in made.items():
        write_atomic(file, content)
        print(file)
    return 0


if __name__ == "__main__":
    sys.exit(run_script(DocsConfig, write, __doc__))
