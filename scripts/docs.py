"""What the documentation takes from elsewhere: python scripts/docs.py

Writes docs/configuration.md, from the declarations of the settings; the README's figure, how far p = 3 and p = 4 are
below p = 2 along the runs of results/p_sweep_cpu_5000; and the table of results/README.md, from results/ledger.yaml and
the studies' files. run=RUN other=RUN writes the pictures of docs/tracking.md, too, with Chromium: the live page of the
first run, and both runs compared.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

from core.cli import presets, run_script
from core.files import ROOT, write_atomic
from core.help import describe
from core.schema import NOT_EMPTY, Help, options, require
from data.options import PrepareFineWebConfig
from sample import SampleConfig
from scripts.reporting.charts import Figure, Series, Style, along_chart, svg
from scripts.reporting.ledger import ledger
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

STUDY = ROOT / "results" / "p_sweep_cpu_5000"
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
        runs, base = sweep.of(f"{part}/p={p}"), sweep.of(f"{part}/p=2")
        curves = {r: minus(run.losses, base[r].losses) for r, run in runs.items()}
        series.append(Series(f"p = {p}, {STARTS[part]}", Style(colour, colour, symbol, dashes), curves))
    return Figure("along", TITLE, along_chart(series, "p = 2"), "")


# -----------------------------------------------------------------------------
# The ledger

LEDGER = ROOT / "results" / "README.md"
BEGIN, END = "<!-- made by scripts/docs.py from ledger.yaml -->\n", "<!-- end -->"


def with_ledger(page: str) -> str:
    """The page, with the table between its marks made anew."""
    before, after = page.partition(BEGIN)[0], page.partition(END)[2]
    return f"{before}{BEGIN}\n{ledger()}\n{END}{after}"


# -----------------------------------------------------------------------------
# Pictures


SONNET = """Shall I compare thee to a summer's day?
Thou art more lovely and more temperate:
Rough winds do shake the darling buds of May,
And summer's lease hath all too short a date;
"""


def screenshot(address: str, file: Path, height: int) -> None:
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    require(chromium is not None, "run= needs Chromium")
    with tempfile.TemporaryDirectory() as profile:
        options = ["--headless", "--no-sandbox", "--hide-scrollbars", "--virtual-time-budget=10000"]
        size = [f"--window-size=1100,{height}", f"--user-data-dir={profile}", f"--screenshot={file}"]
        subprocess.run([str(chromium), *options, *size, address], check=True, capture_output=True, timeout=120)


def pictures(run: str, other: str) -> list[Path]:
    live, compared = ROOT / "docs" / "live.png", ROOT / "docs" / "compare.png"
    command = [sys.executable, str(ROOT / "scripts" / "report.py"), f"run={run}", "watch=true"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        screenshot(next(word for word in server.stdout.readline().split() if word.startswith("http")), live, 2100)
        server.terminate()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sonnet_18.txt").write_text(SONNET)
        for path in (run, other):
            (Path(folder) / Path(path).name).symlink_to(Path(path).absolute())
        words = [f"a={Path(run).name}", f"b={Path(other).name}", "text=sonnet_18.txt", "out=compare.html"]
        subprocess.run([sys.executable, str(ROOT / "scripts" / "compare.py"), *words], cwd=folder, check=True)
        screenshot(f"{Path(folder).as_uri()}/compare.html", compared, 2200)
    return [live, compared]


@options
class DocsConfig:
    run: Annotated[str | None, NOT_EMPTY, Help("a run for the pictures of docs/tracking.md")] = None
    other: Annotated[str | None, NOT_EMPTY, Help("another one, which it is compared with")] = None

    def check(self) -> None:
        require((self.run is None) == (self.other is None), "run= and other= are given together")


def write(asked: DocsConfig) -> int:
    made = {
        ROOT / "docs" / "configuration.md": configuration().encode(),
        STUDY / "along.svg": svg(figure()),
        LEDGER: with_ledger(LEDGER.read_text(encoding="utf-8")).encode(),
    }
    for file, content in made.items():
        write_atomic(file, content)
        print(file)
    if asked.run is not None and asked.other is not None:
        print(*pictures(asked.run, asked.other), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_script(DocsConfig, write, __doc__))
