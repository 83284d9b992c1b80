"""What the documentation takes from elsewhere: python scripts/docs.py

Writes docs/configuration.md, from the declarations of the settings, and the README's figure: how far p = 3 and p = 4
are below p = 2 along the runs of results/p_sweep_cpu_5000, from the curves that its report.html holds.
"""

import base64
import gzip
import json
import re
import sys
from collections.abc import Iterator, Mapping
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

Curves = dict[str, dict[str, dict[int, float]]]  # setting -> fold and seed -> iteration -> value


def curves_of(page: Path, chart: str) -> Curves:
    """The single runs of a curve chart of report.html, in which each row of data is a value of one run."""
    packed = re.findall(r'<script type="text/plain" id="charts">([^<]*)</script>', page.read_text(encoding="utf-8"))
    charts = json.loads(gzip.decompress(base64.b64decode(packed[0])))
    found: Curves = {}
    for row in rows_of(charts[chart]):
        if row["run"] != "mean":
            found.setdefault(row["setting"], {}).setdefault(row["run"], {})[row["iteration"]] = row["value"]
    return found


def rows_of(spec: Any) -> Iterator[dict[str, Any]]:
    """The rows of each data set in a Vega-Lite specification; some sets are there once a layer."""
    if isinstance(spec, Mapping):
        rows = spec.get("values")
        yield from (row for row in rows if "run" in row) if isinstance(rows, list) and "name" not in spec else ()
    for part in spec.values() if isinstance(spec, Mapping) else spec if isinstance(spec, list) else ():
        if isinstance(part, Mapping | list):
            yield from rows_of(part)


def minus(a: Mapping[str, Curve], b: Mapping[str, Curve]) -> dict[Any, Curve]:
    """a - b, run by run, at the iterations that both have."""
    return {run: {i: a[run][i] - b[run][i] for i in a[run] if i in b[run]} for run in a if run in b}


def figure(page: Path = STUDY / "report.html") -> Figure:
    series = []
    for (part, p), (colour, symbol, dashes) in LOOK.items():
        curves = curves_of(page, f"loss_{part}")
        runs: dict[Replicate, Curve] = {
            (0, n): curve for n, curve in enumerate(minus(curves[f"p={p}"], curves["p=2"]).values())
        }
        series.append(Series(f"p = {p}, {STARTS[part]}", Style(colour, colour, symbol, dashes), runs))
    return Figure("along", TITLE, along_chart(series, "p = 2"), "")


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
