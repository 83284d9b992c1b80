"""The ledger of results/README.md: a table for each group of claims in results/ledger.yaml, a row for each claim,
computed from the committed studies."""

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

from core.cli import parse_yaml
from core.files import ROOT
from core.schema import NOT_EMPTY, POSITIVE, options, require, settings_of, show
from scripts.reporting.comparisons import Family, Readings, compared, compared_families, grid_step
from scripts.reporting.numbers import Estimate, claimed_limits, holm, interval, judge, paired_p
from scripts.reporting.rates import runs_by_rate, stable_by_replicate
from scripts.reporting.runs import Curve, Sweep
from scripts.reporting.stored import read_stored
from scripts.reporting.tables import Table, mean_and_ends

RESULTS = ROOT / "results"
STABLE = "highest stable rate"  # a number of a variant, over all its learning rates
# GROWTH + "KEY, FROM to TO": the mean of KEY over the last eighth of these iterations, over that of the first, minus 1
GROWTH = "growth of "


@options
class Part:
    """A number of a row: sum of weight * (mean of a metric over the runs of a setting), paired by fold and seed. Of
    several folds the seeds of each are averaged. Or a ratio in a JSON file, shown as a share over 1."""

    label: str = ""
    study: str = ""
    weights: dict[str, Any] = field(default_factory=dict)  # setting -> weight; with metric=STABLE, variant -> weight
    metric: str = "val/loss_min"  # one of runs.csv, STABLE, or GROWTH's
    file: str = ""  # in results/
    key: tuple[str, ...] = ()  # in it, of {"median": …, "low": …, "high": …}


@options
class Row:
    """A claim. Each of its parts is tested, with Holm's correction over the row; benchmarks store intervals alone,
    which are not corrected. Without direction, size, least and limit nobody claimed it, and the row has no verdict."""

    claim: Annotated[str, NOT_EMPTY]
    paper: str = "–"  # its number there
    parts: tuple[dict, ...] = ()  # our numbers
    direction: Literal["lower", "higher"] | None = None  # direction, size, least: what is claimed, as in judge()
    size: Annotated[float | None, POSITIVE] = None
    least: Annotated[float | None, POSITIVE] = None
    limit: float | None = None  # what is claimed: that a number is below it
    verdict: Literal["not tested", "reproduced", "excluded"] | None = None  # one that is judged by hand
    says: str = ""  # what words add
    scale: str = ""
    figure: str = ""


@dataclass(frozen=True)
class Found:
    """A part's number: its interval, what it was computed from, and p of the test that decides."""

    estimate: Estimate
    scale: str
    p: Mapping[float, float | None]  # what it is tested against -> p; {} for a ratio of a benchmark
    p_in_study: Mapping[float, float]  # the same by Holm over the study's own comparison, where it has these settings


def ledger(file: Path = RESULTS / "ledger.yaml") -> str:
    """The tables, each under its heading, as Markdown. Raises: ConfigError for a row that cannot be computed."""
    source = parse_yaml(file.read_text(encoding="utf-8"), str(file))
    return "\n".join(f"## {heading}\n\n{table(rows).markdown()}" for heading, rows in source.items())


def table(given: Sequence[dict[str, Any]]) -> Table:
    lines = []
    for one in given:
        row = settings_of(Row, one, f"{one.get('claim')}: ")
        parts = [settings_of(Part, part, f"{row.claim}: ") for part in row.parts]
        lines.append([row.claim, *(cell.replace("; ", "<br>") for cell in cells(row, parts))])
    return Table(["claim", "ours, with 95 % interval", "verdict", "claimed number", "n and scale", "figure"], lines, 6)


def cells(row: Row, parts: Sequence[Part]) -> list[str]:
    """All but the claim's. A cell of several numbers has one a line."""
    found = [measured(part, tested_against(row)) for part in parts]
    ours = [f"{part.label} {written(part, one.estimate)}".strip() for part, one in zip(parts, found, strict=True)]
    scales = dict.fromkeys(one.scale for one in found)
    link = f"[{Path(row.figure).stem}]({row.figure})" if row.figure else "–"
    said = "; ".join([*ours, *filter(None, [row.says])]) or "–"
    return [said, verdicts(row, parts, found), row.paper, row.scale or "; ".join(scales) or "–", link]


def tested_against(row: Row) -> list[float]:
    """The numbers that each part of a row is tested against."""
    return [0.0, *claimed_limits(row.direction, row.size, row.least)] if row.limit is None else [row.limit]


def verdicts(row: Row, parts: Sequence[Part], found: Sequence[Found]) -> str:
    """The verdict on each part, named where they differ; by Holm over the row, and over the study's own comparison."""
    if row.verdict is not None or not found or (row.direction is None and row.limit is None):
        return row.verdict or "–"
    direction, origin = row.direction or "lower", row.limit or 0.0  # below a limit: lower than it
    adjusted: list[dict[float, float | None]] = [{} for _ in found]
    for limit in tested_against(row):
        for one, of_one, p in zip(found, adjusted, holm([one.p.get(limit) for one in found]), strict=True):
            of_one[limit - origin] = None if p is None else max(p, one.p_in_study.get(limit, 0.0))
    judged = [(one.estimate.minus(origin), p) for one, p in zip(found, adjusted, strict=True)]
    words = [judge(estimate, direction, row.size, row.least, p) for estimate, p in judged]
    if len(set(words)) == 1:
        return words[0]
    return "; ".join(f"{part.label} {word}" for part, word in zip(parts, words, strict=True))


def written(part: Part, estimate: Estimate) -> str:
    ends = [abs(end) for end in (estimate.low, estimate.high) if end is not None]
    size, sign = max(abs(estimate.mean), *ends, 0.0), "" if [*part.weights.values()] == [1] else "+"
    digits = 1 if size >= 10 else 2 if size >= 1 else 4
    return mean_and_ends(estimate, f"{sign}.2%" if part.file else f"{sign}.{digits}f")


# -----------------------------------------------------------------------------
# Numbers


def measured(part: Part, limits: Sequence[float]) -> Found:
    """limits: the numbers that it is tested against."""
    if part.file:
        return from_json(part)
    read = stable_rates if part.metric == STABLE else values_of
    found = {setting: read(stored(part.study), setting, part.metric) for setting in part.weights}
    c = compared(tuple(part.weights.items()), found, max(of.step for of in found.values()))
    require(len(c.values) > 0, f"{part.study} has no pairs of {', '.join(part.weights)}")
    sums, shared = c.independent_differences, c.shared if len(part.weights) > 1 else 0.0  # it is of differences
    estimate = interval(sums, shared, grid=c.grid)
    seeds, folds = (len(set(of)) for of in zip(*c.values, strict=True))
    kind = "seeds" if folds == 1 else "folds" if seeds == 1 else f"folds of {seeds} seeds"
    every = [run for of in found.values() for run in of.runs.values()]
    sizes = {run.summary["parameters"] / 1e6 for run in every}
    millions = sorted({round(n, 1) if n >= 10 else float(f"{n:.2g}") for n in sizes})
    size = f"{' and '.join(f'{n:g}M' for n in millions)}, {every[0].config['max_iters']:,} iterations"
    p = {limit: paired_p(sums, shared, limit, c.grid) for limit in limits}
    return Found(estimate, f"{estimate.n} {kind}, {size}", p, {limit: p_in_study(part, limit) for limit in limits})


@functools.cache
def families_of(study: str) -> list[Family]:
    return compared_families(stored(study))


@functools.cache
def stored(study: str) -> Sweep:
    return read_stored(RESULTS / study, study)


def values_of(sweep: Sweep, setting: str, metric: str) -> Readings:
    """A metric of the runs of a setting that are done. Raises: ConfigError where the study has no such number."""
    runs = {run.replicate: run for run in sweep.done(setting)}
    require(len(runs) > 0, f"{sweep.name} has no run of {setting} that is done")
    if metric.startswith(GROWTH):
        key, _, span = metric.removeprefix(GROWTH).partition(", ")
        known = {r: growth(run.curves.get(key, {}), *map(int, span.split(" to "))) for r, run in runs.items()}
    else:
        known = {r: run.summary.get(metric) for r, run in runs.items()}
    require(None not in known.values(), f"{sweep.name} has no {metric} of {setting}")
    values = {r: float(value) for r, value in known.items() if value is not None}
    return Readings(runs, values, grid_step([*runs.values()], metric))


def growth(curve: Curve, first: int, last: int) -> float | None:
    eighth = (last - first) / 8
    start = [value for i, value in curve.items() if first <= i <= first + eighth]
    end = [value for i, value in curve.items() if last - eighth <= i <= last]
    return fmean(end) / fmean(start) - 1 if start and end else None


def stable_rates(sweep: Sweep, variant: str, _: str) -> Readings:
    """The highest stable learning rate of each seed and fold, as a power of two. It lies between the one that is read
    and the grid's next one, if there is any."""
    runs_at = runs_by_rate(sweep)[variant]
    found = stable_by_replicate(runs_at)
    require(None not in found.values(), f"{sweep.name} has no stable rate of {variant}")
    stable, rates = {r: math.log2(rate or 1) for r, rate in found.items()}, [*map(math.log2, runs_at)]
    step = max(above - below for below, above in pairwise(rates))
    runs = {run.replicate: run for of in runs_at.values() for run in of if run.done}
    return Readings(runs, stable, math.inf if max(stable.values()) >= rates[-1] else step / 2)


def p_in_study(part: Part, limit: float) -> float:
    """The largest p against `limit`, by Holm, of the comparisons of these two settings and this metric in the study's
    report; 0 where it has none."""
    found: list[float | None] = []
    for family in families_of(part.study):
        for metric, comparisons in zip(family.metrics, family.comparisons, strict=True):
            for sign in (1, -1) if metric.column == part.metric else ():  # A − B or B − A
                adjusted = holm([c.p_against(sign * limit) for c in comparisons])
                asked = {setting: sign * weight for setting, weight in part.weights.items()}
                found += [p for c, p in zip(comparisons, adjusted, strict=True) if dict(c.terms) == asked]
    return max((p for p in found if p is not None), default=0.0)


def from_json(part: Part) -> Found:
    """A ratio that a benchmark wrote, {"median": …}, as a share over 1, with its interval where there is one."""
    content: Any = json.loads((RESULTS / part.file).read_text(encoding="utf-8"))
    for key in part.key:
        content = content[int(key) if isinstance(content, list) else key]
    require(isinstance(content, Mapping), f"{part.file}: {show(part.key)} is no group with a median")
    low, high = (content[key] - 1 if key in content else None for key in ("low", "high"))
    return Found(Estimate(content["median"] - 1, low, high, 0), "", {}, {})
