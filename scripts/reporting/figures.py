"""The figures of a report: which of a sweep's runs each chart shows, and its caption."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from scripts.reporting import charts
from scripts.reporting.charts import LOSS, Figure, Series, Style
from scripts.reporting.runs import Curve, Replicate, Sweep
from scripts.reporting.statistics import Family, by_rate, final_losses
from sweeps.definition import REDUCTIONS

POINTS = 100  # how many of each curve are drawn for a metric other than the validation loss
TIMES = "median, box to the quartiles, whiskers to 1.5 IQR, outliers; diamond: mean."
STABILITY = "Final validation loss by learning rate: mean of the runs that are done, bars from lowest to highest."
DIFFERENCE = (
    "A − B in validation loss: a point for each fold or seed; bar: the mean's 95 % interval, diamond: the mean."
)


def part_figures(sweep: Sweep) -> dict[str, list[Figure]]:
    """Part -> its figures: loss, training time, a panel for each fold, and the metrics of the definition's `also`."""
    parts = {part: {s: sweep.label(s) for s in settings} for part, settings in sweep.parts.items()}
    look = charts.styles(parts)
    found = {}
    for part, names in parts.items():
        title, end = sweep.title_of(part), suffix(part)
        losses = series_of(sweep, names, look, "val/loss")
        found[part] = list(loss_figures(losses, title, end)) if losses else []
        for key, panels in metric_panels(sweep, names, look).items():
            found[part].append(metric_figure(sweep, key, panels, file_name(key) + end, title))
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


def metric_figure(sweep: Sweep, key: str, panels: Mapping[str, Sequence[Series]], name: str, title: str) -> Figure:
    """Curves of a metric; where `key` is a pattern, a panel for each key that matches it."""
    every = [s for series in panels.values() for s in series]
    chart = charts.panel_chart(panels, key) if len(panels) > 1 else charts.curve_chart(every, key)
    span = f"a point is the {sweep.logged[key]} over a {POINTS}th of the run"
    caption = f"{key} by iteration, averaged over folds and seeds; {span}.{charts.remarks(every, key)}"
    return Figure(name, title, chart, caption)


def family_figures(families: Sequence[Family]) -> dict[str, list[Figure]]:
    """Family -> the differences in its first metric, the lowest validation loss."""
    found: dict[str, list[Figure]] = {family.name: [] for family in families}
    for family in families:
        if any(c.differences for c in family.metrics[0]):
            chart = charts.difference_chart(family.metrics[0])
            found[family.name].append(Figure(f"difference{suffix(family.name)}", family.heading, chart, DIFFERENCE))
    return found


def rate_figures(sweep: Sweep) -> list[Figure]:
    """Where learning rates are swept: the final losses, and each metric with a panel a rate; [] where they are not."""
    finals = final_losses(sweep)
    if not any(losses for of in finals.values() for losses in of.values()):
        return []
    found = [Figure("stability", sweep.title, charts.stability_chart(finals), STABILITY)]
    variants = by_rate(sweep)
    by_key: dict[str, dict[str, list[Series]]] = {}
    for rate in sorted({rate for of in variants.values() for rate in of}):
        names = {of[rate]: variant for variant, of in variants.items() if rate in of}
        for key, panels in metric_panels(sweep, names, charts.styles({"": names})).items():
            if [*panels] == [key]:  # no pattern: its panels are the rates
                by_key.setdefault(key, {})[f"learning rate {rate:g}"] = panels[key]
    return found + [
        metric_figure(sweep, key, panels, f"stability_{file_name(key)}", sweep.title) for key, panels in by_key.items()
    ]


# -----------------------------------------------------------------------------
# Runs -> series


def series_of(
    sweep: Sweep, names: Mapping[str, str], look: Mapping[str, Style], key: str, how: str | None = None
) -> list[Series]:
    """A metric's curves of the settings that have some. names: setting -> its name in the chart.

    how: the reduction that thins a curve; None: each value is drawn.
    """
    found = []
    for setting, name in names.items():
        done: dict[Replicate, Curve] = {}
        diverged: dict[Replicate, Curve] = {}
        for run in sweep.of(setting).values():
            if key in run.curves:
                curve = run.curves[key] if how is None else thinned(run.curves[key], how)
                (done if run.done else diverged)[run.replicate] = curve
        found.append(Series(name, look[setting], done, diverged, sweep.seconds(setting)))
    return [s for s in found if s.curves or s.diverged]


def metric_panels(
    sweep: Sweep, names: Mapping[str, str], look: Mapping[str, Style]
) -> dict[str, dict[str, list[Series]]]:
    """Key or pattern of the definition's `also` -> metric that matches it -> series; none for what no run has."""
    logged = {key for setting in names for run in sweep.of(setting).values() for key in run.curves} - {"val/loss"}
    found: dict[str, dict[str, list[Series]]] = {}
    for pattern, how in sweep.logged.items():
        for key in sorted(key for key in logged if fnmatchcase(key, pattern)):
            found.setdefault(pattern, {})[key] = series_of(sweep, names, look, key, how)
    return found


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
        f"{kind} {n}": [
            replace(s, curves=only(s.curves, (kind, n)), diverged=only(s.diverged, (kind, n))) for s in series
        ]
        for kind, n in panels
    }


# -----------------------------------------------------------------------------
# File names


def suffix(part: str) -> str:
    """What a part or a comparison adds to the names of its files."""
    plain = re.sub(r"[^\w.-]+", "_", part)
    return f"_{plain}" if part else ""


def file_name(key: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "_", key).strip("_")
