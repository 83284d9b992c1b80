"""A track's board: python scripts/track.py

Rebuilds from the committed files of its folder the tables of its README.md, board.csv and rates.svg, and the first rows
in the README of the repository.
"""

import sys
from typing import Annotated

from core.cli import run_script
from core.files import ROOT, expand, write_atomic
from core.process import say
from core.schema import NOT_EMPTY, Help, options
from scripts.reporting import track
from scripts.reporting.charts import svg
from scripts.reporting.page import with_block

BEGIN, END = "<!-- made by scripts/track.py -->\n", "<!-- end -->"
SWEEP = "attention_track"


@options
class TrackOptions:
    folder: Annotated[str, NOT_EMPTY, Help("of the board")] = str(ROOT / "results" / SWEEP)


def make(asked: TrackOptions) -> int:
    folder = expand(asked.folder)
    page, found = folder / "README.md", track.rows(folder)
    text = page.read_text(encoding="utf-8") if page.exists() else f"# {folder.name}\n\n{BEGIN}{END}\n"
    made = {
        page: with_block(text, BEGIN, END, f"\n{track.board(found)}\n"),
        folder / "board.csv": track.board_csv(found),
        folder / "rates.svg": svg(track.rates_figure([row for row in found if not row.status])).decode(),
    }
    for file, content in made.items():
        write_atomic(file, content.encode())
        say(str(file))
    return 0


if __name__ == "__main__":
    sys.exit(run_script(TrackOptions, make, __doc__))
