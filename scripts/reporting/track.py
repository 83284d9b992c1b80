"""The board of the attention track: a row for each contestant, from the stored reports of its two sweeps.

grid: every contestant at every learning rate. final: every contestant at its best rate, with fresh seeds, which alone
decide. results/attention_track/README.md has the rules.
"""

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from core.files import read_json
from core.schema import require
from scripts.reporting.charts import LOSS, OKABE_ITO, Figure, Spec, marks, nominal, quantity, where
from scripts.reporting.comparisons import Comparison, compare
from scripts.reporting.numbers import Estimate, interval, n_needed
from scripts.reporting.rates import best_rate, final_means, highest_stable, runs_by_rate
from scripts.reporting.runs import METRICS, Sweep
from scripts.reporting.tables import Columns, Table, ends, filled, mean_and_ends, number, p_value
from sweeps.definition import pair

BASELINE = "rms"  # the contestant that differences are to
NEAR = 0.06  # nats above the lowest: the figure of loss and time shows these contestants
PLATEAU = 0.02  # nats: rates within this of a contestant's best one are good ones
LOSS_KEY, LOGIT_KEY = "val/loss_min", "max attn/max_logit"


@dataclass(frozen=True)
class Entry:
    """A contestant. means: learning rate -> mean loss over the seeds of the grid; tried: all its rates. loss: of the
    final runs; lost: how many of these are not done.

    ratios: time of an update, and of a decoded token, over `none`, with their intervals. wide: the interval of the
    difference to BASELINE at the level of Holm's step.
    """

    name: str
    means: dict[float, float]
    stable: float | None
    loss: Estimate
    against: Comparison | None
    wide: Estimate | None
    logit: float | None
    cache: float | None
    parameters: float | None
    ratios: tuple[Mapping[str, float], Mapping[str, float]]
    tried: Sequence[float]
    lost: int

    @property
    def verdict(self) -> str:
        if self.lost:
            return f"{self.lost} of {self.lost + self.loss.n} runs are not done"
        return "–" if self.against is None else self.against.verdict("better", "worse")


# -----------------------------------------------------------------------------
# Stored runs -> entries


def mean_losses(grid: Sweep) -> dict[str, dict[float, float]]:
    """Contestant -> learning rate -> mean loss, of the rates at which every run is done.

    Raises: ConfigError where a contestant has no such rate.
    """
    found = {name: final_means(runs_at, LOSS_KEY) for name, runs_at in runs_by_rate(grid).items()}
    require(bool(found), f"{grid.name} has no contestant with several learning rates")
    none = [name for name, means in found.items() if not means]
    require(not none, f"{grid.name} has no learning rate at which all runs of {', '.join(none)} are done")
    return found


def at_the_edge(grid: Sweep) -> dict[str, float]:
    """Contestants whose best rate is the lowest or the highest one that was tried, with the rate to try next."""
    found = {}
    for name, means in mean_losses(grid).items():
        tried, best = sorted(runs_by_rate(grid)[name]), best_rate(means)
        if best in (tried[0], tried[-1]):
            found[name] = best / 2 if best == tried[0] else best * 2
    return found


def plateau(means: Mapping[float, float], tried: Iterable[float]) -> float:
    """Octaves of neighbouring rates of those that were tried within PLATEAU of the best one."""
    best = best_rate(means)
    good = {rate for rate, mean in means.items() if mean <= means[best] + PLATEAU}
    blocks = [[*rates] for _, rates in groupby(sorted(tried), lambda rate: rate in good)]
    block = next(rates for rates in blocks if best in rates)
    return math.log2(block[-1] / block[0])


def entries(grid: Sweep, final: Sweep, times: Path) -> list[Entry]:
    """The contestants, the lowest loss first, those with lost runs last. times: the folder of train.json and
    decode.json.

    Raises: ConfigError where the final sweep has a contestant that the grid lacks, or not at its best rate.
    """
    rates, means, names = runs_by_rate(grid), mean_losses(grid), final.settings
    require(all(name in means for name in names), f"{grid.name} lacks some of {', '.join(names)}")
    others = compare(final, [pair(name, BASELINE) for name in names if name != BASELINE], METRICS[0])
    against, wide = {c.a: c for c in others}, widened(others)
    update, decode = (ratios_of(times / file, means) for file in ("train.json", "decode.json"))
    found = []
    for name in names:
        runs = final.done(name)
        require(bool(runs), f"{final.name} has no run of {name} that is done")
        best, rate = best_rate(means[name]), runs[0].config["optim.learning_rate"]
        require(rate == best, f"{final.name} has {name} at the learning rate {rate:g}; the grid's best is {best:g}")
        first = runs[0].summary
        logits = [run.summary[LOGIT_KEY] for run in runs if LOGIT_KEY in run.summary]
        found.append(Entry(
            name=name, means=means[name], tried=[*rates[name]], stable=highest_stable(rates[name])[0],
            loss=interval([run.summary[LOSS_KEY] for run in runs]), lost=len(final.runs_of(name)) - len(runs),
            against=against.get(name), wide=wide.get(name), logit=max(logits, default=None),
            cache=first.get("cache_bytes_per_token"), parameters=first.get("parameters"),
            ratios=(update.get(name, {}), decode.get(name, {})),
        ))  # fmt: skip
    return sorted(found, key=lambda entry: (entry.lost > 0, entry.loss.mean))


def widened(family: Sequence[Comparison]) -> dict[str, Estimate]:
    """Each difference's interval at the level of Holm's step: of m comparisons the one with the k-th smallest p has
    1 - 0.05 / (m - k + 1), as the board's rules say. It excludes zero where that step's own p is small enough; Holm
    rejects no step after the first whose p is not."""
    tested = sorted((c for c in family if c.deciding_test in c.p), key=lambda c: c.p[c.deciding_test])
    return {c.a: c.deciding_interval(0.05 / (len(family) - k)) for k, c in enumerate(tested)}


def ratios_of(file: Path, contestants: Collection[str]) -> dict[str, Mapping[str, float]]:
    """Name of a contestant -> median, low and high of its time over that of the first; {} where there is no file.

    Raises: ConfigError where a benchmark of these contestants did not write it.
    """
    if not file.exists():
        return {}
    content: Any = read_json(file)
    content = content.get("1_sequences", content)  # bench_sample.py groups its results, and once wrote speeds
    timed = next(iter(content.get("variants", {})), None)
    require(timed in contestants, f"{file} does not time contestants: scripts/track.py times=true prints the command")
    ends = {"median": "median", "low": "high", "high": "low"}
    speeds = content.get("speed_over_first", {}).items()
    inverted = {name: {key: 1 / of[end] for key, end in ends.items() if end in of} for name, of in speeds}
    others = content.get("time_over_first", inverted)
    return {str(timed): {"median": 1.0}, **others}


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


DIFFERENCES: Columns[Entry] = {
    "contestant": lambda e: e.name,
    "verdict": lambda e: e.verdict,
    "loss": lambda e: number(e.loss.mean),
    f"minus {BASELINE}, 95 %": lambda e: mean_and_ends(e.against.deciding if e.against else None, "+.4f"),
    "corrected": lambda e: ends(e.wide, "+.4f"),
    "Holm p": lambda e: p_value(e.against.adjusted[e.against.deciding_test] if e.against and e.wide else None),
}
BOARD: Columns[Entry] = {
    "best rate": lambda e: number(best_rate(e.means), "g"),
    "good rates, octaves": lambda e: number(plateau(e.means, e.tried), "g"),
    "highest stable rate": lambda e: number(e.stable, "g"),
    "largest logit": lambda e: number(e.logit, ".1f"),
    "update time": lambda e: times(e.ratios[0]),
    "decode time": lambda e: times(e.ratios[1]),
    "cache, bytes a token": lambda e: number(e.cache, ",.0f"),
    "parameters": lambda e: number(e.parameters, ",.0f"),
}
SMALL = ("largest logit", "parameters")  # columns of runs at one rate, which were not timed


def board(found: Sequence[Entry], columns: Collection[str] = BOARD.keys()) -> Table:
    """columns: those of BOARD that follow DIFFERENCES."""
    more = {head: cell for head, cell in BOARD.items() if head in columns}
    return filled(DIFFERENCES | more, found, text_columns=2)


def times(ratio: Mapping[str, float]) -> str:
    if "low" not in ratio:
        return number(ratio.get("median"), ".2f")
    return f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"


def figures(found: Sequence[Entry]) -> list[Figure]:
    title = "Validation loss by learning rate, mean over the grid's seeds; grey: rms; in the order of the board"
    made = [Figure("rates", title, rates_chart(found), "")]
    if timed := [e for e in found if e.ratios[0]]:
        near = [e for e in timed if e.loss.mean <= timed[0].loss.mean + NEAR]
        far = ", ".join(f"{e.name} ({e.loss.mean:.2f})" for e in timed if e not in near)
        title = "Validation loss at the best rate against the time of an update; bars: 95 % of the mean over seeds"
        made.append(Figure("overhead", f"{title}; above the figure: {far}" if far else title, overhead_chart(near), ""))
    return made


def overhead_chart(found: Sequence[Entry]) -> Spec:
    ends = [end for e in found for end in (e.loss.mean, e.loss.low, e.loss.high) if end is not None]
    times = [100 * (e.ratios[0]["median"] - 1) for e in found]
    domain_x, domain_y = [min(times) - 2, max(times) + 3], [min(ends) - 0.002, max(ends) + 0.002]
    width, height = 560, 400
    points = [
        (width * (time - domain_x[0]) / (domain_x[1] - domain_x[0]),
         height * (domain_y[1] - e.loss.mean) / (domain_y[1] - domain_y[0]))
        for time, e in zip(times, found, strict=True)
    ]  # fmt: skip
    rows = [
        {"name": e.name, "loss": e.loss.mean, "low": e.loss.low, "high": e.loss.high, "time": time, "side": side}
        for e, time, side in zip(found, times, label_sides(points, [e.name for e in found]), strict=True)
    ]
    scale = {"domain": domain_y, "nice": False, "zero": False}
    x = quantity("time", title="time of an update over none (%)", scale={"domain": domain_x, "nice": False})
    base = {"x": x, "y": quantity("loss", title=LOSS, scale=scale)}
    bar = {"y": quantity("low", title=LOSS, scale=scale), "y2": {"field": "high"}}
    layers = [marks("rule", base | bar, color="#b4bac4"), marks("point", base, filled=True, size=50, opacity=1)]
    for side, align, dx in (("right", "left", 7), ("left", "right", -7)):
        of_side = where(f"datum.side === '{side}'")
        layers.append(marks("text", base | {"text": nominal("name")}, of_side, align=align, dx=dx, fontSize=11))
    return {"layer": layers, "data": {"values": rows}, "width": width, "height": height}


def label_sides(points: Sequence[tuple[float, float]], names: Sequence[str]) -> list[str]:
    """On which side of each point, in pixels, its name covers no other point and no name: right or, else, left."""
    boxes, found = [(x - 4, y - 4, x + 4, y + 4) for x, y in points], []
    for (x, y), name in zip(points, names, strict=True):
        wide = 6.5 * len(name)
        sides = {"right": (x + 6, y - 6, x + 6 + wide, y + 6), "left": (x - 6 - wide, y - 6, x - 6, y + 6)}
        free = [
            side
            for side, (x0, y0, x1, y1) in sides.items()
            if all(x1 <= u0 or u1 <= x0 or y1 <= v0 or v1 <= y0 for u0, v0, u1, v1 in boxes)
        ]
        found.append(free[0] if free else "right")
        boxes.append(sides[found[-1]])
    return found


def rates_chart(found: Sequence[Entry]) -> Spec:
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
    return {"concat": panels, "columns": columns, "spacing": 24}
