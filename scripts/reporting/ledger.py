"""The ledger of results/README.md: a table for each group of claims in results/ledger.yaml, a row for each claim,
computed from the committed studies."""

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

from core.cli import parse_yaml
from core.files import ROOT
from core.schema import NOT_EMPTY, POSITIVE, options, require, settings_of, show
from scripts.reporting.runs import Curve, Replicate, Sweep
from scripts.reporting.statistics import (
    Estimate,
    Family,
    compared_families,
    holm,
    independent,
    interval,
    judge,
    paired_p,
    runs_by_rate,
    shared_text,
    stable_by_replicate,
)
from scripts.reporting.stored import read_stored
from scripts.reporting.tables import Table, mean_and_ends

RESULTS = ROOT / "results"
STABLE = "highest stable rate"  # a number of a variant, over all its learning rates
# GROWTH + "KEY, FROM to TO": the mean of KEY over the last eighth of these iterations, over that of the first, minus 1
GROWTH = "growth of "


@options
class Part:
    """A number of a row: sum of weight * (mean of a metric over the runs of a setting), paired by fold and seed.

    weights: setting -> weight; with metric=STABLE, variant -> weight. metric: one of runs.csv, STABLE, or GROWTH's.
    Of several folds the seeds of each are averaged.
    file, key: a ratio in a JSON file of results/ instead, {"median": …, "low": …, "high": …}, shown as a share over 1.
    """

    label: str = ""
    study: str = ""
    weights: dict[str, Any] = field(default_factory=dict)
    metric: str = "val/loss_min"
    file: str = ""
    key: tuple[str, ...] = ()


@options
class Row:
    """A claim. paper: its number there. parts: ours; each is tested, with Holm's correction over the row.

    direction, size, least, limit: what is claimed, as in judge(); limit: that a number is below it. Without any of them
    nobody claimed it, and the row has no verdict. verdict: one that is judged by hand. says: what words add.
    Benchmarks store intervals alone: they are not corrected.
    """

    claim: Annotated[str, NOT_EMPTY]
    paper: str = "–"
    parts: tuple[dict, ...] = ()
    direction: Literal["lower", "higher"] | None = None
    size: Annotated[float | None, POSITIVE] = None
    least: Annotated[float | None, POSITIVE] = None
    limit: float | None = None
    verdict: Literal["not tested", "reproduced", "excluded"] | None = None
    says: str = ""
    scale: str = ""
    figure: str = ""


@dataclass(frozen=True)
class Found:
    """A part's number: its interval, the p of the test that decides, and what it was computed from.

    p: of a difference from zero, or from the row's limit. p_in_study: by Holm over the study's own comparison, where it
    compares these two settings.
    """

    estimate: Estimate
    p: float | None
    scale: str
    p_in_study: float | None = None


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
    found = [measured(part, row.limit or 0.0) for part in parts]
    ours = [f"{part.label} {written(part, one.estimate)}".strip() for part, one in zip(parts, found, strict=True)]
    scales = dict.fromkeys(one.scale for one in found)
    link = f"[{Path(row.figure).stem}]({row.figure})" if row.figure else "–"
    said = "; ".join([*ours, *filter(None, [row.says])]) or "–"
    return [said, verdicts(row, parts, found), row.paper, row.scale or "; ".join(scales) or "–", link]


def verdicts(row: Row, parts: Sequence[Part], found: Sequence[Found]) -> str:
    """The verdict on each part, named where they differ. One that Holm's correction does not bear out has no power."""
    if row.verdict is not None or not found or (row.direction is None and row.limit is None):
        return row.verdict or "–"
    words: list[str] = []
    for one, p in zip(found, holm([one.p for one in found]), strict=True):
        if row.limit is not None:
            words.append(against_limit(one.estimate, row.limit, p))
            continue
        assert row.direction is not None
        words.append(judge(one.estimate, row.direction, row.size, row.least, max(p or 0.0, one.p_in_study or 0.0)))
    if len(set(words)) == 1:
        return words[0]
    return "; ".join(f"{part.label} {word}" for part, word in zip(parts, words, strict=True))


def against_limit(estimate: Estimate, limit: float, p: float | None) -> str:
    if estimate.low is None or estimate.high is None or estimate.low == estimate.high:
        return "not tested"
    if p is not None and p > 0.05:
        return "no power"
    return "reproduced" if estimate.high < limit else "excluded" if estimate.low > limit else "no power"


def written(part: Part, estimate: Estimate) -> str:
    ends = [abs(end) for end in (estimate.low, estimate.high) if end is not None]
    size, sign = max(abs(estimate.mean), *ends, 0.0), "" if [*part.weights.values()] == [1] else "+"
    digits = 1 if size >= 10 else 2 if size >= 1 else 4
    return mean_and_ends(estimate, f"{sign}.2%" if part.file else f"{sign}.{digits}f")


# -----------------------------------------------------------------------------
# Numbers


def measured(part: Part, against: float) -> Found:
    """against: the number that the test compares it with."""
    if part.file:
        return from_json(part)
    sweep = stored(part.study)
    if part.metric == STABLE:
        values = {variant: stable_rates(sweep, variant) for variant in part.weights}
        by_rate = [runs for variant in part.weights for runs in runs_by_rate(sweep)[variant].values()]
        runs = [run for of_rate in by_rate for run in of_rate if run.done]
    else:
        values = {setting: values_of(sweep, setting, part.metric) for setting in part.weights}
        runs = [run for setting in part.weights for run in sweep.done(setting)]
    common = [r for r in next(iter(values.values())) if all(r in of_setting for of_setting in values.values())]
    shared = shared_text([run for run in runs if run.replicate in common])
    require(len(common) > 0, f"{part.study} has no pairs of {', '.join(part.weights)}")
    of_each = {r: sum(weight * values[s][r] for s, weight in part.weights.items()) for r in common}
    sums = independent(of_each, shared > 0)
    shared = shared if len(part.weights) > 1 else 0.0  # the correction is for differences
    estimate = interval(sums, shared)
    seeds, folds = (len(set(of)) for of in zip(*common, strict=True))
    kind = "seeds" if folds == 1 else "folds" if seeds == 1 else f"folds of {seeds} seeds"
    sizes = {run.summary["parameters"] / 1e6 for run in runs}
    millions = sorted({round(n, 1) if n >= 10 else float(f"{n:.2g}") for n in sizes})
    size = f"{' and '.join(f'{n:g}M' for n in millions)}, {runs[0].config['max_iters']:,} iterations"
    p = paired_p([x - against for x in sums], shared)
    return Found(estimate, p, f"{estimate.n} {kind}, {size}", p_in_study(sweep, part))


@functools.cache
def families_of(study: str) -> list[Family]:
    return compared_families(stored(study))


@functools.cache
def stored(study: str) -> Sweep:
    return read_stored(RESULTS / study, study)


def values_of(sweep: Sweep, setting: str, metric: str) -> dict[Replicate, float]:
    """A metric of the runs of a setting that are done. Raises: ConfigError where the study has no such number."""
    runs = sweep.done(setting)
    require(len(runs) > 0, f"{sweep.name} has no run of {setting} that is done")
    if metric.startswith(GROWTH):
        key, _, span = metric.removeprefix(GROWTH).partition(", ")
        known = {run.replicate: growth(run.curves.get(key, {}), *map(int, span.split(" to "))) for run in runs}
    else:
        known = {run.replicate: run.summary.get(metric) for run in runs}
    require(None not in known.values(), f"{sweep.name} has no {metric} of {setting}")
    return {replicate: float(value) for replicate, value in known.items() if value is not None}


def growth(curve: Curve, first: int, last: int) -> float | None:
    eighth = (last - first) / 8
    start = [value for i, value in curve.items() if first <= i <= first + eighth]
    end = [value for i, value in curve.items() if last - eighth <= i <= last]
    return fmean(end) / fmean(start) - 1 if start and end else None


def stable_rates(sweep: Sweep, variant: str) -> dict[Replicate, float]:
    """The highest stable learning rate of each seed and fold, as a power of two."""
    found = stable_by_replicate(runs_by_rate(sweep)[variant])
    require(None not in found.values(), f"{sweep.name} has no stable rate of {variant}")
    return {replicate: math.log2(rate or 1) for replicate, rate in found.items()}


def p_in_study(sweep: Sweep, part: Part) -> float | None:
    """The largest p, by Holm, of the comparisons of these two settings and this metric in the study's report."""
    found: list[float | None] = []
    asked = (part.weights, {setting: -weight for setting, weight in part.weights.items()})  # A − B or B − A
    for family in families_of(part.study):
        for metric, comparisons in zip(family.metrics, family.comparisons, strict=True):
            if metric.column == part.metric:
                found += [c.adjusted[c.deciding_test] for c in comparisons if {c.a: 1, c.b: -1} in asked]
    return max((p for p in found if p is not None), default=None)


def from_json(part: Part) -> Found:
    """A ratio that a benchmark wrote, {"median": …}, as a share over 1, with its interval where there is one."""
    content: Any = json.loads((RESULTS / part.file).read_text(encoding="utf-8"))
    for key in part.key:
        content = content[int(key) if isinstance(content, list) else key]
    require(isinstance(content, Mapping), f"{part.file}: {show(part.key)} is no group with a median")
    low, high = (content[key] - 1 if key in content else None for key in ("low", "high"))
    return Found(Estimate(content["median"] - 1, low, high, 0), None, "")
