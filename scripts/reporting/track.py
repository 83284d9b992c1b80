"""The board of a track: a row for each contestant, judged against the RMS QK norm, from stored runs.

A board opens with several contestants; each entry adds one. Both have a grid, every contestant at every learning rate,
and final runs at its best rate with fresh seeds, which alone decide. results/attention_track/README.md has the rules.
"""

import csv
import io
import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from core.files import read_json
from core.git import short
from core.record import is_number
from core.schema import ConfigError, Rule, one_line, require
from scripts.reporting.charts import OKABE_ITO, Figure, marks, quantity
from scripts.reporting.comparisons import Comparison, compare
from scripts.reporting.numbers import Estimate, interval, n_needed
from scripts.reporting.rates import best_rate, final_means, runs_by_rate
from scripts.reporting.runs import METRICS, Sweep
from scripts.reporting.stored import read_stored
from scripts.reporting.tables import Columns, Table, ends, filled, mean_and_ends, number
from sweeps.definition import pair

BASELINE, PLAIN = "rms", "none"  # the contestants that losses, and times, are compared with
ROWS = 40  # of a board at most, so that each row has a level of its own and no later one changes its verdict
LEVEL = 0.05 / ROWS
FINAL = "final"  # the part of an entry's sweep with the final runs; the others are its grid
SLOTS = ("qk_norm", "logits", "softmax", "output", "weights", "qk_clip", "attention")  # what an entry may set
UNUSED = ("none", "plain", "mha")  # in a slot
PLATEAU = 0.02  # nats: rates within this of a contestant's best one are good ones
TIMES = ("train.json", "decode.json")  # files of the times of updates, and of decoding
ONE_LINE = Rule(
    lambda t: t.isprintable() and t.strip() != "" and not re.search(r"[<>|]|\](?=\()", t),
    "must be a line without <, >, | and ](",
)
NAME = Rule(
    lambda name: re.fullmatch(r"[a-z][a-z0-9_]{0,31}", name) is not None and name not in (BASELINE, PLAIN, FINAL),
    f"must be a lower-case word, and not {BASELINE}, {PLAIN} or {FINAL}",
)
ENTRY = Rule(lambda name: NAME.holds(re.sub(r"\.\d+$", "", name)), "must be the name of an entry, as asinh or asinh.1")
LOSS_KEY, LOGIT_KEY = "val/loss_min", "max attn/max_logit"


@dataclass(frozen=True)
class Entry:
    """A row of the board."""

    name: str
    settings: Mapping[str, Any]  # of its first final run, flat, with the hashes of its plugins
    means: dict[float, float]  # learning rate -> mean loss over the seeds of the grid
    tried: Sequence[float]  # all learning rates
    loss: Estimate  # of the final runs
    lost: int  # how many final runs are not done
    against: Comparison | None  # its difference to BASELINE, of the same machine
    wide: Estimate | None  # the same with its interval at LEVEL
    logit: float | None  # the largest
    parameters: float | None
    ratios: tuple[Estimate | None, Estimate | None]  # time of an update, of a decoded token, over PLAIN
    about: Mapping[str, str]  # machine, date, commit, by
    status: str = ""  # why the row does not count any more

    @property
    def verdict(self) -> str:
        if self.lost:
            return f"{self.lost} of {self.lost + self.loss.n} runs are not done"
        return "–" if self.against is None else self.against.verdict("better", "worse")

    @property
    def slot(self) -> str:
        return " + ".join(group for group in SLOTS if self.settings.get(f"{group}.name", "none") not in UNUSED) or "–"


# -----------------------------------------------------------------------------
# Stored runs -> entries


def mean_losses(grid: Sweep) -> dict[str, dict[float, float]]:
    """Contestant -> learning rate -> mean loss, of the rates at which every run is done. Raises: ConfigError where a
    contestant has no such rate."""
    found = {name: final_means(runs_at, LOSS_KEY) for name, runs_at in runs_by_rate(grid).items()}
    require(bool(found), f"{grid.name} has no contestant with several learning rates")
    none = [name for name, means in found.items() if not means]
    require(not none, f"{grid.name} has no learning rate at which all runs of {', '.join(none)} are done")
    return found


def ruled_rates(first: Iterable[float], means: Mapping[float, float], more: int) -> list[float]:
    """The rates to try: the first ones and, as long as the best one is at an edge, the next one, at most `more`."""
    rates = sorted(first)
    for _ in range(more):
        best = best_rate({rate: means[rate] for rate in rates if rate in means})
        if best in (rates[0], rates[-1]):
            rates = sorted([*rates, best / 2 if best == rates[0] else best * 2])
    return rates


def plateau(means: Mapping[float, float], tried: Iterable[float]) -> float:
    """Octaves of neighbouring rates of those that were tried within PLATEAU of the best one."""
    best = best_rate(means)
    good = {rate for rate, mean in means.items() if mean <= means[best] + PLATEAU}
    blocks = [[*rates] for _, rates in groupby(sorted(tried), lambda rate: rate in good)]
    block = next(rates for rates in blocks if best in rates)
    return math.log2(block[-1] / block[0])


def grid_and_final(sweep: Sweep) -> tuple[Sweep, Sweep]:
    """The two parts of an entry's sweep, as sweeps of their own."""
    plain, prefix = replace(sweep.definition, parts={}), f"{FINAL}/"
    final = [run for run in sweep.runs if run.settings[0].startswith(prefix)]
    renamed = [replace(run, settings=[one.removeprefix(prefix) for one in run.settings]) for run in final]
    grid = [run for run in sweep.runs if run not in final]
    return replace(sweep, definition=plain, runs=grid), replace(sweep, definition=plain, runs=renamed)


def stored(folder: Path) -> tuple[Sweep, Sweep]:
    """The grid and the final runs of an entry, or of what opened a board. Raises: ConfigError."""
    if (folder / "grid").is_dir():
        return read_stored(folder / "grid", "grid"), read_stored(folder / FINAL, FINAL)
    return grid_and_final(read_stored(folder, folder.name))


def rows(folder: Path) -> list[Entry]:
    """Every row that a board ever had, those that count first, the lowest difference first. Raises: ConfigError."""
    found = by_folder(folder).values()
    return sorted(found, key=lambda row: (row.status != "", row.lost > 0, row.wide.mean if row.wide else 0.0))


def opened(folder: Path) -> list[Entry]:
    """The rows that opened a board."""
    return read_entries(folder, {"by": "nanoQK", "date": "–"})


def read_entries(path: Path, about: Mapping[str, str]) -> list[Entry]:
    """entries() of the files in a folder. Raises: ConfigError."""
    try:
        return entries(*stored(path), path, about)
    except ConfigError:
        raise
    except Exception as error:  # whatever numbers meet that somebody has edited
        raise ConfigError(f"{path} cannot be read: {one_line(error)}") from error


def by_folder(folder: Path) -> dict[Path, Entry]:
    """Folder of an entry -> its row; a row that opened the board has a key of that kind, and no folder. Of each name
    the latest row that is not withdrawn counts: NAME, before NAME.2, NAME.1, and the opening's."""
    every, counted = {folder / row.name: row for row in opened(folder)}, dict[str, Path]()
    paths = [file.parent for file in (folder / "entries").glob("*/entry.yaml")]
    for path in paths:
        require(ENTRY.holds(path.name), f"{path} {ENTRY.says}")
    for path in sorted(paths, key=lambda path: (path.stem, float(path.suffix[1:] or "inf"))):
        about = {"by": "–", "date": "–"} | read_json(path / "provenance.json")
        made = read_entries(path, {key: str(about[key]) for key in ("by", "date")})
        require(len(made) == 1, f"{path} cannot be read: it has {len(made)} contestants")
        (row,) = made
        shown = {**row.about, **({"withdrawn": str(about["withdrawn"])} if "withdrawn" in about else {})}
        for key, text in shown.items():
            file = "runs.csv" if key in ("machine", "commit") else "provenance.json"
            require(ONE_LINE.holds(text), f"{path}: {key} in {file} {ONE_LINE.says}")
        every[path] = replace(row, status=f"withdrawn: {about['withdrawn']}" if "withdrawn" in about else "")
    for path, row in every.items():
        if not row.status and row.name in counted:
            every[counted[row.name]] = replace(every[counted[row.name]], status="superseded")
        if not row.status:
            counted[row.name] = path
    return every


def entries(grid: Sweep, final: Sweep, times: Path, about: Mapping[str, str]) -> list[Entry]:
    """The contestants of the grid. times: the folder of train.json and decode.json. about: as in Entry. Raises:
    ConfigError where the final sweep has a contestant that the grid lacks, or not at its best rate."""
    rates, means = runs_by_rate(grid), mean_losses(grid)
    names = [name for name in final.settings if name in means or name != BASELINE]
    require(all(name in means for name in names), f"{grid.name} lacks some of {', '.join(names)}")
    update, decode = (ratios_of(times / file, [*means, PLAIN]) for file in TIMES)
    where = [*final.distinct("device"), *(["float32"] if "torch.float32" in final.distinct("dtype") else [])]
    about = {"machine": ", ".join(where), "commit": ", ".join(map(short, final.distinct("commit"))), **about}
    found = []
    for name in names:
        runs = final.done(name)
        require(bool(runs), f"{final.name} has no run of {name} that is done")
        best, rate = best_rate(means[name]), runs[0].config["optim.learning_rate"]
        require(rate == best, f"{final.name} has {name} at the learning rate {rate:g}; the grid's best is {best:g}")
        against = None if name == BASELINE else compare(final, [pair(name, BASELINE)], METRICS[0])[0]
        if against:  # its p counts ROWS times, whatever the other rows
            against.adjusted = {test: p and min(1.0, ROWS * p) for test, p in against.adjusted.items()}
        logits = [run.summary[LOGIT_KEY] for run in runs if LOGIT_KEY in run.summary]
        found.append(Entry(
            name=name, settings=runs[0].config | {"plugins": runs[0].summary.get("plugins", {})},
            means=means[name], tried=[*rates[name]], loss=interval([run.summary[LOSS_KEY] for run in runs]),
            lost=len(final.runs_of(name)) - len(runs), against=against,
            wide=against.deciding_interval(LEVEL) if against and against.estimate else None,
            logit=max(logits, default=None), parameters=runs[0].summary.get("parameters"),
            ratios=(update.get(name), decode.get(name)), about=about,
        ))  # fmt: skip
    return found


def ratios_of(file: Path, contestants: Collection[str]) -> dict[str, Estimate]:
    """Name of a contestant -> median of its time over that of the first, with its interval; {} where there is no file.
    Raises: ConfigError where a benchmark of these contestants did not write it."""
    if not file.exists():
        return {}
    told = f"{file} does not time contestants: scripts/track.py enter= writes it"
    try:
        content: Any = read_json(file)
        content = content.get("1_sequences", content)  # bench_sample.py groups its results
        timed = next(iter(content["variants"]))
        ratios = {timed: {"median": 1.0}, **content["time_over_first"]}
        found = {name: Estimate(of["median"], of.get("low"), of.get("high"), 1) for name, of in ratios.items()}
    except (KeyError, TypeError, AttributeError, StopIteration) as error:
        raise ConfigError(told) from error
    numbers = [x for one in found.values() for x in (one.mean, one.low, one.high) if x is not None]
    require(timed in contestants and all(map(is_number, numbers)), told)
    return found


# -----------------------------------------------------------------------------
# Entries -> table, figures


def noise_floor(found: Sequence[Entry]) -> tuple[float, float, float] | None:
    """σ of a loss over seeds, σ of a paired difference, and the least difference that the final runs find with 80 %
    power, in nats; None where there are no pairs."""
    compared = [e.against for e in found if e.against and len(e.against.values) > 1]
    if not compared:
        return None
    losses = [stdev(a for a, _ in c.values.values()) for c in compared]
    differences = [stdev(c.differences.values()) for c in compared]
    pooled, between = (math.sqrt(fmean(sd**2 for sd in of)) for of in (losses, differences))
    n, steps = max(e.loss.n for e in found), range(300_000)  # of 0.0001 standard deviations
    effect = 0.0001 * bisect_left(steps, True, lo=1, key=lambda step: n_needed(0.0001 * step) <= n)
    return pooled, between, effect * between


def noise(found: Sequence[Entry]) -> str:
    """The noise floor in a sentence."""
    if (floor := noise_floor(found)) is None:
        return "There are no pairs yet."
    pooled, between, least = floor
    return (
        f"σ over seeds: {pooled:.4f} nats, of a paired difference {between:.4f}. {max(e.loss.n for e in found)} pairs"
        f" find a single difference of {least:.4f} with 80 % power."
    )


DIFFERENCE = f"loss minus {BASELINE}, 95 %"
COUNTED: Columns[Entry] = {
    "contestant": lambda e: e.name,
    "slot": lambda e: e.slot,
    "verdict": lambda e: e.verdict,
    DIFFERENCE: lambda e: mean_and_ends(e.against.deciding if e.against else None, "+.4f"),
    f"{100 - 100 * LEVEL:g} %": lambda e: ends(e.wide, "+.4f"),
    "n": lambda e: f"{e.loss.n}",
    "loss": lambda e: number(e.loss.mean),
    "best rate": lambda e: number(best_rate(e.means), "g"),
    "good rates, octaves": lambda e: number(plateau(e.means, e.tried), "g"),
    "largest logit": lambda e: number(e.logit, ".1f"),
    "update time": lambda e: mean_and_ends(e.ratios[0], ".2f"),
    "decode time": lambda e: mean_and_ends(e.ratios[1], ".2f"),
    "parameters": lambda e: number(e.parameters, ",.0f"),
    "machine": lambda e: e.about["machine"],
    "date": lambda e: e.about["date"],
    "commit": lambda e: e.about["commit"],
    "entered by": lambda e: e.about["by"],
}
OTHERS = COUNTED | {"why": lambda e: e.status}
FIRST = 4  # rows of the README's table, and that of PLAIN
SHOWN = ("contestant", "slot", "verdict", DIFFERENCE, "n", "update time", "entered by")  # there


def board(found: Sequence[Entry]) -> str:
    """The tables: the rows that count, and those that do not any more."""
    counted, others = ([row for row in found if bool(row.status) == gone] for gone in (False, True))
    text = f"{noise(counted)}\n\n{filled(COUNTED, counted, text_columns=3).markdown()}"
    if others:
        text += f"\n### Superseded and withdrawn\n\n{filled(OTHERS, others, text_columns=3).markdown()}"
    return text


def first_rows(found: Sequence[Entry]) -> tuple[str, str]:
    """What the README says of a board, and its table."""
    counted = [row for row in found if not row.status]
    floor, verdicts = noise_floor(counted), Counter(row.verdict for row in counted)
    assert floor is not None
    told = [f"{verdicts[one] or 'none'} {'is' if verdicts[one] < 2 else 'are'} {one}" for one in ("better", "worse")]
    said = (
        f"{len(counted)} controls of attention logits, plain attention (`{PLAIN}`) among them, each at its own best "
        f"learning rate, compared with the {BASELINE.upper()} QK norm. {', '.join(told).capitalize()}; for "
        f"{verdicts['not told apart']} the test finds no difference (p below 0.05/{ROWS} is needed: a board has {ROWS} "
        f"rows at most). "
        f"{counted[0].loss.n} seeds find a single difference of {floor[2]:.3f} nats with 80\u00a0% power. Rows are "
        f"sorted by mean loss minus that of {BASELINE.upper()}. Time: over that of `{PLAIN}`."
    )
    rank = {row.name: i for i, row in enumerate(counted, 1)}
    columns = {"rank": lambda row: f"{rank[row.name]}", **{head: COUNTED[head] for head in SHOWN}}
    table = filled(columns, [row for row in counted if rank[row.name] <= FIRST or row.name == PLAIN], text_columns=4)
    gap = ["…", *[""] * (len(table.columns) - 1)]
    return said, replace(table, rows=[*table.rows[:FIRST], gap, *table.rows[FIRST:]]).markdown()


def disputed(found: Sequence[Entry], disputes: Mapping[str, Sequence[str]]) -> str:
    """A table of what is said in public -> the contestants that it concerns, and what the rows that count say of it."""
    rows = {row.name: row for row in found if not row.status}
    lines = []
    for said, names in disputes.items():
        for name in names:
            row = rows.get(name)
            cells = [COUNTED[head](row) for head in ("verdict", DIFFERENCE, "n")] if row else ["not entered", "–", "–"]
            lines.append([said if name == names[0] else "", f"`{name}`", *cells])
    return Table(["what is said", "contestant", "verdict", DIFFERENCE, "n"], lines, 3).markdown()


def board_csv(found: Sequence[Entry]) -> str:
    """A line a row, with numbers to six decimals, so that every machine writes the same."""
    text, lines = io.StringIO(), [*map(csv_line, found)]
    csv.writer(text, lineterminator="\n").writerows([[*lines[0]], *(line.values() for line in lines)])
    return text.getvalue()


def csv_line(e: Entry) -> dict[str, str]:
    wide, of_95, (update, decode) = e.wide, e.against and e.against.deciding, e.ratios
    numbers: dict[str, Any] = {
        "difference": wide and wide.mean, "low": wide and wide.low, "high": wide and wide.high,
        "low_95": of_95 and of_95.low, "high_95": of_95 and of_95.high, "loss": e.loss.mean,
        "best_rate": best_rate(e.means), "good_octaves": plateau(e.means, e.tried), "largest_logit": e.logit,
        "update_time": update and update.mean,
        "update_low": update and update.low, "update_high": update and update.high,
        "decode_time": decode and decode.mean,
        "decode_low": decode and decode.low, "decode_high": decode and decode.high,
        "parameters": e.parameters,
    }  # fmt: skip
    text = {"contestant": e.name, "status": e.status, "slot": e.slot, "verdict": e.verdict, "n": f"{e.loss.n}"}
    return text | {key: "" if x is None else f"{round(x, 6):.12g}" for key, x in numbers.items()} | dict(e.about)


def rates_figure(found: Sequence[Entry]) -> Figure:
    """A panel for each contestant: its mean losses and, in grey, those of BASELINE. Losses far above are cut off."""
    lowest = min(min(e.means.values()) for e in found)
    ticks = sorted({rate for e in found for rate in e.means})
    baseline = next((e.means for e in found if e.name == BASELINE), {})
    columns, panels = 4, []
    for i, e in enumerate(found):
        axis = {"values": ticks, "labelAngle": -45}
        title = "learning rate" if i + columns >= len(found) else None
        log2 = {"type": "log", "base": 2, "nice": False, "padding": 8}
        x = quantity("rate", title=title, scale=log2, axis=axis)
        scale = {"domain": [lowest - 0.01, lowest + 0.3], "nice": False}
        y = quantity("loss", title="loss (nats)" if i % columns == 0 else None, scale=scale, axis={"tickCount": 4})
        lines = []
        for means, colour in ((baseline, "#b4bac4"), (e.means, OKABE_ITO[0])):
            rows = [{"rate": rate, "loss": loss} for rate, loss in sorted(means.items())]
            points = {"size": 24, "color": colour, "filled": True, "clip": True}
            line = marks("line", {"x": x, "y": y}, color=colour, clip=True, point=points)
            lines.append(line | {"data": {"values": rows}})
        panels.append({"layer": lines, "title": e.name, "width": 150, "height": 110})
    title = "Validation loss by learning rate, mean over the grid's seeds; grey: rms; in the order of the board"
    return Figure("rates", title, {"concat": panels, "columns": columns, "spacing": 24}, "")
