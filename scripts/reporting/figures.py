"""The figures of a report: which of a sweep's runs each chart shows, and its caption."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import chain, count

from scripts.reporting import charts
from scripts.reporting.charts import LOSS, Curve, Figure, Series, Style
from scripts.reporting.runs import Family, Run, Sweep
from scripts.reporting.statistics import Replicate
from scripts.reporting.tables import by_rate, final_losses, seconds
from sweeps.definition import REDUCTIONS

POINTS = 100  # how many of each curve are drawn for a metric other than the validation loss
TIMES = "median, box to the quartiles, whiskers to 1.5 IQR, outliers; diamond: mean."
STABILITY = "Final validation loss by learning rate: mean of the runs that are done, bars from lowest to highest."
DIFFERENCE = (
    "A − B in validation loss: a point for each fold or seed; bar: the mean's 95 % interval, diamond: the mean."
)


def part_figures(sweep: Sweep) -> dict[str, list[Figure]]:
    """Part -> its figures: loss, training time, a panel for each fold, and the metrics of the definition's `also`."""
    look = charts.styles({part: labels(sweep, settings) for part, settings in sweep.parts.items()})
    suffixes = unique_names(sweep.parts)
    found = {}
    for part, settings in sweep.parts.items():
        title, end = sweep.title_of(part), suffixes[part]
        series = loss_series(sweep, settings, look)
        found[part] = list(loss_figures(series, title, end)) if series else []
        for key, groups in metric_series(sweep, labels(sweep, settings), look).items():
            found[part].append(metric_figure(sweep, key, groups, file_name(key) + end, title))
    return found


def loss_figures(series: Sequence[Series], title: str, end: str) -> Iterable[Figure]:
    """end: of the files' names."""
    counts = sorted({len(s.curves) for s in series})
    n = f"n = {' to '.join(str(count) for count in dict.fromkeys([counts[0], counts[-1]]))} runs a setting"
    caption = f"Validation loss by iteration, averaged over folds and seeds ({n}); band: 95 % t interval of the mean."
    yield Figure(f"loss{end}", title, charts.curve_chart(series, LOSS), caption + charts.remarks(series, LOSS))
    if timed := [s for s in series if s.seconds]:
        yield Figure(f"time{end}", title, charts.time_chart(timed), f"Training time ({n}): {TIMES}")
    panels = by_fold(series)
    each = next(iter(panels)).split()[0]
    caption = f"Validation loss by iteration for each {each}; every panel has its own vertical axis."
    yield Figure(f"folds{end}", title, charts.panel_chart(panels, LOSS, own_axes=True), caption)


def metric_figure(sweep: Sweep, key: str, groups: Mapping[str, Sequence[Series]], name: str, title: str) -> Figure:
    """Curves of a metric; where `key` is a pattern, a panel for each key that matches it."""
    every = [s for series in groups.values() for s in series]
    chart = charts.panel_chart(groups, key) if len(groups) > 1 else charts.curve_chart(every, key)
    span = f"a point is the {reductions(sweep)[key]} over a {POINTS}th of the run"
    caption = f"{key} by iteration, averaged over folds and seeds; {span}.{charts.remarks(every, key)}"
    return Figure(name, title, chart, caption)


def family_figures(families: Sequence[Family]) -> dict[str, list[Figure]]:
    """Family -> the differences in its first metric, the lowest validation loss."""
    suffixes = unique_names(family.name for family in families)
    found: dict[str, list[Figure]] = {family.name: [] for family in families}
    for family in families:
        if any(c.differences for c in family.metrics[0]):
            chart = charts.difference_chart(family.metrics[0])
            found[family.name].append(Figure(f"difference{suffixes[family.name]}", family.heading, chart, DIFFERENCE))
    return found


def rate_figures(sweep: Sweep) -> list[Figure]:
    """Where learning rates are swept: the final losses, and each metric with a panel a rate; [] where they are not."""
    finals = final_losses(sweep)
    if not any(losses for of in finals.values() for losses in of.values()):
        return []
    found = [Figure("stability", sweep.title, charts.stability_chart(finals), STABILITY)]
    variants = by_rate(sweep)
    panels: dict[str, dict[str, list[Series]]] = {}
    for rate in sorted({rate for of in variants.values() for rate in of}):
        settings = {of[rate]: variant for variant, of in variants.items() if rate in of}
        for key, groups in metric_series(sweep, settings, charts.styles({"": settings})).items():
            if [*groups] == [key]:  # no pattern: its panels are the rates
                panels.setdefault(key, {})[f"learning rate {rate:g}"] = groups[key]
    return found + [
        metric_figure(sweep, key, groups, f"stability_{file_name(key)}", sweep.title) for key, groups in panels.items()
    ]


# -----------------------------------------------------------------------------
# Runs -> series


def labels(sweep: Sweep, settings: Sequence[str]) -> dict[str, str]:
    return {setting: sweep.label(setting) for setting in settings}


def loss_series(sweep: Sweep, settings: Sequence[str], look: Mapping[str, Style]) -> list[Series]:
    """The validation loss of the settings that have a run that is done or diverged."""
    series = []
    for setting in settings:
        done = sweep.done(setting)
        diverged = {run.replicate: run.curve for run in sweep.diverged(setting) if run.curve}
        curves = {run.replicate: run.curve for run in done}
        series.append(Series(sweep.label(setting), look[setting], curves, diverged, seconds(done)))
    return [s for s in series if s.curves or s.diverged]


def metric_series(
    sweep: Sweep, settings: Mapping[str, str], look: Mapping[str, Style]
) -> dict[str, dict[str, list[Series]]]:
    """Pattern of the definition's `also` -> key that matches it -> series. settings: setting -> its name in the chart.
    What no run has is dropped."""
    found: dict[str, dict[str, list[Series]]] = {}
    runs = {setting: (sweep.done(setting), sweep.diverged(setting)) for setting in settings}
    logged = sorted({key for both in runs.values() for some in both for run in some for key in run.curves})
    for pattern, how in reductions(sweep).items():
        for key in (key for key in logged if fnmatchcase(key, pattern)):

            def curves(some: Iterable[Run], key: str = key, how: str = how) -> dict[Replicate, Curve]:
                return {run.replicate: thinned(run.curves[key], how) for run in some if key in run.curves}

            series = [Series(settings[s], look[s], curves(done), curves(lost)) for s, (done, lost) in runs.items()]
            found.setdefault(pattern, {})[key] = [s for s in series if s.curves or s.diverged]
    return found


def reductions(sweep: Sweep) -> dict[str, str]:
    """Pattern of the definition's `also` -> the reduction that thins its curves."""
    return {pattern: how[0].replace("roughness", "last") for pattern, how in sweep.logged.items()}


def thinned(curve: Curve, how: str) -> dict[int, float]:
    """A curve of at most POINTS values: one for each of as many equal spans, at the span's last iteration.

    how: the metric's own reduction (REDUCTIONS), so that a maximum keeps its peaks.
    """
    width = math.ceil((max(curve) + 1) / POINTS)
    spans: dict[int, dict[int, float]] = {}
    for i, value in curve.items():
        spans.setdefault(i // width, {})[i] = value
    return {max(of): REDUCTIONS[how](list(of.values())) for of in spans.values()}


def by_fold(series: Sequence[Series]) -> dict[str, list[Series]]:
    """ "fold 3" -> the series with that fold's runs alone; "seed 3" where there are no folds."""

    def panel(replicate: Replicate) -> tuple[str, int]:
        seed, fold = replicate
        return ("seed", seed) if fold is None else ("fold", fold)

    def only(curves: Mapping[Replicate, Curve], chosen: tuple[str, int]) -> dict[Replicate, Curve]:
        return {replicate: curve for replicate, curve in curves.items() if panel(replicate) == chosen}

    panels = sorted({panel(replicate) for s in series for replicate in [*s.curves, *s.diverged]})
    return {
        f"{kind} {n}": [Series(s.name, s.style, only(s.curves, (kind, n)), only(s.diverged, (kind, n))) for s in series]
        for kind, n in panels
    }


# -----------------------------------------------------------------------------
# File names


def unique_names(parts: Iterable[str]) -> dict[str, str]:
    """What each part adds to the names of its files; no two add the same."""
    suffixes: dict[str, str] = {}
    for part in parts:
        plain = f"_{re.sub(r'[^A-Za-z0-9.-]+', '_', part)}" if part else ""
        numbered = chain([plain], (f"{plain}_{n}" for n in count(2)))
        suffixes[part] = next(suffix for suffix in numbered if suffix not in suffixes.values())
    return suffixes


def file_name(key: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "_", key).strip("_")
