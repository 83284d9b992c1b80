"""What the documentation takes from elsewhere: python scripts/docs.py

Writes docs/configuration.md, from the declarations of the settings; the tables of results/README.md, from
results/ledger.yaml and the studies' files; from the same files, the three answers and the first rows of the board in
README.md, and the table of docs/folds_and_seeds.md; and the metrics of docs/tracking.md, from their rows.
"""

import math
import sys
import textwrap

from core.cli import presets, run_script
from core.files import ROOT, write_atomic
from core.help import describe
from core.schema import options
from data.options import PrepareFineWebConfig
from sample import SampleConfig
from scripts.reporting.ledger import Part, ledger, measured, stored, written
from scripts.reporting.numbers import n_needed, sources
from scripts.reporting.page import with_block
from scripts.reporting.runs import Replicate
from scripts.reporting.tables import Columns, filled, number
from scripts.reporting.track import first_rows, rows
from training.config import TrainConfig
from training.metrics import table

# -----------------------------------------------------------------------------
# docs/configuration.md

PROGRAMS = {"train.py": TrainConfig, "sample.py": SampleConfig, "data/prepare_fineweb.py": PrepareFineWebConfig}
SAYS = """# Configuration

Written by `python scripts/docs.py` from the declarations of the settings; `--help` of each program prints the same.
Settings are written `key=value`. A group, as `qk_norm`, is one of several options, each with settings of its own. A
setting that the chosen option does not have is an error. `also` names those that an option shares with one above it.

A value of a setting that takes text (a path, a name, notes) needs the shell's quotes alone, as in
`data.path='input (1).txt'`. What Hydra reads as text (`"..."`, `a\\,b`, `${...}`) or `null` keeps that meaning in
`train.py` and in a sweep's overrides, and with `-m` `a,b` is two values. All else is taken as it is. The other
programs take every text as it is, but for `null`.
"""


def configuration() -> str:
    pages = [SAYS]
    for program, settings in PROGRAMS.items():
        lines = "\n".join(describe(settings, presets(settings) if settings is TrainConfig else {}))
        pages.append(f"## {program}\n\n```text\n{lines}\n```\n")
    return "\n".join(pages)


TRACKING, METRICS = ROOT / "docs" / "tracking.md", "<!-- made by scripts/docs.py from training/metrics.py -->\n"
LEDGER = ROOT / "results" / "README.md"
BEGIN = "<!-- made by scripts/docs.py from ledger.yaml -->\n"

# -----------------------------------------------------------------------------
# README.md: three answers, the first rows of the board

README = ROOT / "README.md"
ANSWERS, BOARD = (f"<!-- made by scripts/docs.py: {block} -->\n" for block in ("answers", "board"))
SAID = [
    "**Does a QK norm help?** With multi-head attention no gain is shown, each at its best learning rate: "
    "RMS minus no norm is {rms} nats of validation loss (95 % interval, 8 seeds; "
    "[study](results/attention_track/README.md)). With MLA one is, after 500 iterations: {unified} for unified RMS, "
    "{blockwise} for blockwise ([study](results/mla_rates/README.md)).",
    "**Is p = 4 better than p = 2?** An Lp norm divides by the p-norm; α, a learned number, multiplies the logits. "
    "Where both p start with the same spread of logits, no gain is shown: p = 4 minus p = 2 is {matched} nats (ten "
    "folds, one seed, 10.7M; [study](results/p_baby/README.md)). Where both start from α = 1 it is {alpha_1}. "
    "[*Enhanced QKNorm*](https://arxiv.org/abs/2602.05006) reports −0.048 and does not say where α starts.",
    "**Can MLA use a QK norm without caching keys?** Yes. It caches one more number a token, head and layer, and gives "
    "the logits of the full keys. RMS changes the time of a decoding step by {decode} (16k tokens, two cores; "
    "[study](results/mla_decode/README.md)).",
]
NUMBERS = {
    "rms": Part(study="attention_track/final", weights={"rms": 1, "none": -1}),
    "unified": Part(study="mla_rates", weights={"rms_unified,learning_rate=0.008": 1, "none,learning_rate=0.004": -1}),
    "blockwise": Part(
        study="mla_rates", weights={"rms_blockwise,learning_rate=0.008": 1, "none,learning_rate=0.004": -1}
    ),
    "matched": Part(study="p_baby", weights={"matched/p=4": 1, "matched/p=2": -1}),
    "alpha_1": Part(study="p_baby", weights={"alpha_1/p=4": 1, "alpha_1/p=2": -1}),
    "decode": Part(file="benchmarks/mla_kernel_879fa91.json", key=("points", "0", "time_over_absorbed", "rms")),
}


def answers() -> str:
    numbers = {name: written(part, measured(part, []).estimate) for name, part in NUMBERS.items()}
    return "\n\n".join(paragraph(said.format(**numbers)) for said in SAID)


def paragraph(text: str) -> str:
    return textwrap.fill(text, 140, break_long_words=False, break_on_hyphens=False)


def board() -> str:
    said, table = first_rows(rows(ROOT / "results" / "attention_track"))
    return f"{paragraph(said)}\n\n{table}"


# -----------------------------------------------------------------------------
# docs/folds_and_seeds.md

COUNTED, SOURCES = ROOT / "docs" / "folds_and_seeds.md", "<!-- made by scripts/docs.py: folds and seeds -->\n"
MEASURED = {  # study -> runs of A and of B: settings whose seeds add up
    "p_nano": (["matched/p=3", "seeds/p=3"], ["matched/p=2", "seeds/p=2"]),
    "p_baby": (["matched/p=4"], ["matched/p=2"]),
    "gqa_norms": (["rms,n_kv_head=4"], ["none,n_kv_head=4"]),
    "attention_track/final": (["none"], ["rms"]),
}
WORTH = 0.01  # nats per token: a difference that one would want to find
Spread = tuple[str, list[dict[Replicate, float]]]  # study; A, B, A - B
SPREADS: Columns[Spread] = {
    "study: A − B": lambda of: of[0],
    "folds × seeds": lambda of: " × ".join(str(len({r[part] for r in of[1][2]})) for part in (1, 0)),
    "loss of B: folds; seeds; rest": lambda of: "; ".join(number(sd) for sd in sources(of[1][1])),
    "A − B: folds; seeds; rest": lambda of: "; ".join(number(sd) for sd in sources(of[1][2])),
    "seeds needed": lambda of: needed(of, 0),
    "folds of ten needed": lambda of: needed(of, 1 / 9),
}


def needed(of: Spread, shared: float) -> str:
    pairs = n_needed(WORTH / sources(of[1][2])[2], shared)
    return f"{pairs}" if pairs < math.inf else "more than there are"


def folds_and_seeds() -> str:
    rows = []
    for study, sides in MEASURED.items():
        sweep = stored(study)
        a, b = ({r: run.summary["val/loss_min"] for s in of for r, run in sweep.runs_of(s).items()} for of in sides)
        rows.append((f"{study}: {sides[0][0]} − {sides[1][0]}", [a, b, {r: a[r] - b[r] for r in a}]))
    return filled(SPREADS, rows, text_columns=2).markdown()


@options
class NoSettings:
    pass


def readme() -> str:
    text = with_block(README.read_text(encoding="utf-8"), ANSWERS, f"{answers()}\n")
    return with_block(text, BOARD, board())


def write(_: NoSettings) -> int:
    made = {
        ROOT / "docs" / "configuration.md": configuration(),
        LEDGER: with_block(LEDGER.read_text(encoding="utf-8"), BEGIN, ledger()),
        TRACKING: with_block(TRACKING.read_text(encoding="utf-8"), METRICS, table()),
        COUNTED: with_block(COUNTED.read_text(encoding="utf-8"), SOURCES, folds_and_seeds()),
        README: readme(),
    }
    for file, content in made.items():
        write_atomic(file, content.encode())
        print(file)
    return 0


if __name__ == "__main__":
    sys.exit(run_script(NoSettings, write, __doc__))
