"""The figures of a report: which of a sweep's runs each chart shows, and its caption."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from statistics import fmean

from scripts.reporting import charts
from scripts.reporting.charts import LOSS, Figure, Series, Style
from scripts.reporting.comparisons import Family, losses_along, shared_text, shares
from scripts.reporting.numbers import Estimate, within
from scripts.reporting.rates import by_rate, highest_stable, runs_by_rate
from scripts.reporting.runs import POINTS, Curve, Replicate, Sweep
from sweeps.definition import part_and_name
from training.metrics import in_words

FEW, MANY = 3, 30
FINAL = (
    "Final validation loss: mean over the {n} folds or seeds that all of these settings have; bar: its 95 % interval "
    "without what the settings of a fold or seed have in common, corrected where folds share training text."
)
SHARE = (
    "Mean difference here over the mean difference there, of the same folds or seeds; band: Fieller's 95 % interval, "
    "corrected where folds share training text. Where it has no ends, nothing is drawn."
)
ALONG = (
    "Difference in validation loss by iteration, paired; band: 95 % t interval of three values or more, over folds "
    "where there are several, but not corrected for the text that they share."
)
STABILITY = (
    "Final validation loss by learning rate: mean of the runs that are done ({n}), bars from lowest to highest. Ring: "
    "above the highest rate that is stable in all runs."
)
DIFFERENCE = (
    "A − B in the lowest validation loss: a point for each fold or seed; diamond: the mean, filled where A and B are "
    "told apart; bar: its 95 % interval, corrected where folds share training text. Grey: less than the least "
    "difference worth having."
)


def part_figures(sweep: Sweep) -> dict[str, list[Figure]]:
    """Part -> its figures: loss, and the metrics of the definition's `also`."""
    look, found, rates = charts.styles(sweep.parts), {}, by_rate(sweep)
    for part, names in sweep.parts.items():
        title, end = sweep.title_of(part), suffix(part)
        losses = series_of(sweep, names, look, "val/loss")
        found[part] = [loss_figure(losses, title, end)] if worth_drawing(losses, 0 if sweep.live else FEW) else []
        for key, panels in metric_panels(sweep, names, look).items():
            by_panels = bool(rates) and [*panels] == [key]  # rate_figures() has a panel for each rate
            if not by_panels and worth_drawing(s for series in panels.values() for s in series):
                found[part].append(metric_figure(sweep, key, panels, file_name(key) + end, title))
    return found


def loss_figure(series: Sequence[Series], title: str, end: str) -> Figure:
    """end: of the file's name."""
    n = counted(len(s.curves) for s in series)
    caption = (
        f"Validation loss by iteration, averaged over folds and seeds ({n}); band: 95 % t interval of the mean of "
        "three values or more, over the means of folds where there are several. It holds their spread: whether two "
        "settings differ, the paired figures show."
    )
    return Figure(f"loss{end}", title, charts.curve_chart(series, LOSS), caption + charts.remarks(series, LOSS))


def counted(numbers: Iterable[int]) -> str:
    """ "n = 3 to 10 runs a setting" """
    counts = sorted({*numbers})
    return f"n = {' to '.join(str(count) for count in dict.fromkeys([counts[0], counts[-1]]))} runs a setting"


def worth_drawing(series: Iterable[Series], few: int = FEW) -> bool:
    """Whether a chart says more than a table: at most MANY settings, some curve has more than `few` values, and they
    are not all equal."""
    series = [*series]
    curves = [curve for s in series for curve in [*s.curves.values(), *s.unfinished]]
    several = max(map(len, curves), default=0) > few and len({v for curve in curves for v in curve.values()}) > 1
    return several and len({s.name for s in series}) <= MANY


def metric_figure(sweep: Sweep, key: str, panels: Mapping[str, Sequence[Series]], name: str, title: str) -> Figure:
    """Curves of a metric; where `key` is a pattern, a panel for each key that matches it."""
    every = [s for series in panels.values() for s in series]
    words = in_words(key) + (" per update" if sweep.logged[key] == "sum" else "")
    panels = {in_words(panel): series for panel, series in panels.items()}
    chart = charts.panel_chart(panels, words) if len(panels) > 1 else charts.curve_chart(every, words)
    how = sweep.logged[key].replace("sum", "mean")
    span = f"; at most {POINTS} points, each the {how} of what was logged in its span"
    first = words[0].upper() if words[0].isascii() else words[0]  # α stays small
    banded = len(panels) == 1 and not charts.is_log(charts.value_axis(every, words))
    band = "; band: 95 % t interval of the mean of three values or more" if banded else ""
    n = counted(len(s.curves) for s in every)
    caption = f"{first}{words[1:]} by iteration, averaged over folds and seeds ({n}){span}{band}."
    return Figure(name, title, chart, caption + charts.remarks(every, words))


def difference_figure(family: Family) -> Figure | None:
    """The differences in the lowest validation loss; None for a family of another metric, or without a pair."""
    if family.asked.metric is not None or not any(c.differences for c in family.comparisons[0]):
        return None
    return Figure(f"difference{suffix(family.name)}", family.heading, charts.difference_chart(family), DIFFERENCE)


def family_figures(sweep: Sweep, families: Sequence[Family]) -> dict[str, list[Figure]]:
    """Family -> the differences in validation loss along the runs, and what its `x` and `share_of` ask for."""
    found: dict[str, list[Figure]] = {family.name: [] for family in families}
    for family in families:
        if family.asked.metric is not None:
            continue
        figures = found[family.name]
        if worth_drawing(series := along(sweep, family)):
            names, what = family.short_names(), "A − B in validation loss"
            if family.against:
                what = f"validation loss minus that of {names[family.against]}"
            title = f"{what} (nats per token)"
            caption = ALONG + charts.remarks(series, title)
            chart = charts.curve_chart(series, title, zero=True)
            figures.append(Figure(f"along{suffix(family.name)}", family.heading, chart, caption))
        if family.asked.x_of and (figure := range_figure(sweep, family)):
            figures.append(figure)
        if left := shares(sweep, families, family):
            styles = charts.styles(sweep.parts)
            look = {family.pair_name(c): styles[c.terms[0][0]] for c in family.comparisons[0] if c.values}
            series = [Series(name, look[name], {}, estimates=of) for name, of in left.items()]
            title = f"share of the difference in {family.asked.share_of} that is left"
            chart = charts.curve_chart(series, title, zero=True)
            figures.append(Figure(f"share{suffix(family.name)}", family.heading, chart, SHARE))
    return found


def along(sweep: Sweep, family: Family) -> list[Series]:
    """A − B in validation loss at the evaluations that both runs of a pair have. A pair has the style of its first
    setting; where pairs would then look the same, or all have one colour, each has a style of its own."""
    pairs = [c for c in family.comparisons[0] if c.values]
    names = [family.pair_name(c) for c in pairs]
    of_settings, of_names = charts.styles(sweep.parts), charts.styles_of_names(names)
    look = [of_settings[c.terms[0][0]] for c in pairs]
    colours, symbols = ({style.colour for style in look}, {(style.colour, style.symbol) for style in look})
    if len(colours) == 1 or len(symbols) < len(look):
        look = [of_names[name] for name in names]
    return [Series(names[i], look[i], losses_along(sweep, c)) for i, c in enumerate(pairs)]


def range_figure(sweep: Sweep, family: Family) -> Figure | None:
    """The final losses of a family's settings over its `x`: a line for each name without its word in `x_of`."""
    settings = dict.fromkeys(s for c in family.comparisons[0] for s, _ in reversed(c.terms))
    several = len({part_and_name(s, family.parts)[0] for s in settings}) > 1
    losses: dict[str, dict[Replicate, float]] = {}
    places: dict[str, tuple[str, float]] = {}  # setting -> its line, x
    for setting in settings:
        part, name = part_and_name(setting, family.parts)
        words = name.split(",")
        at = [x for word, x in family.asked.x_of.items() if word in words]
        done = {r: run.summary["val/loss"] for r, run in sweep.runs_of(setting).items() if run.done}
        if at and done:
            line = ",".join(word for word in words if word not in family.asked.x_of)
            places[setting] = "/".join(filter(None, [part * several, line])), at[0]
            losses[setting] = done
    points = within(losses, shared_text([run for setting in losses for run in sweep.done(setting)]))
    if not points:
        return None
    rows = [{"setting": line, "x": x, **charts.row_of(points[setting])} for setting, (line, x) in places.items()]
    chart = charts.final_chart(rows, [line for line, _ in places.values()], family.asked.x or "")
    return Figure(f"final{suffix(family.name)}", family.heading, chart, FINAL.format(n=rows[0]["n"]))


def rate_figures(sweep: Sweep) -> list[Figure]:
    """Where learning rates are swept: the final losses by rate, and each metric with a panel a rate."""
    variants, runs, found, rows = by_rate(sweep), runs_by_rate(sweep), [], []
    for variant, runs_at in runs.items():
        stable = highest_stable(runs_at)[0] or 0.0
        for rate, at_rate in runs_at.items():
            if losses := [run.summary["val/loss"] for run in at_rate if run.done]:
                bar = charts.row_of(Estimate(fmean(losses), min(losses), max(losses), len(losses)))
                rows.append({"setting": variant, "x": rate, **bar, "ringed": rate > stable})
    rates_of = Counter(row["setting"] for row in rows)
    if max(rates_of.values(), default=0) > FEW:
        caption = STABILITY.format(n=counted(row["n"] for row in rows))
        found.append(Figure("stability", sweep.title, charts.final_chart(rows, runs, "learning rate"), caption))
    styles = charts.styles_of_names(variants)
    by_key: dict[str, dict[str, list[Series]]] = {}
    for rate in sorted({rate for of in variants.values() for rate in of}):
        names = {of[rate]: variant for variant, of in variants.items() if rate in of}
        for key, panels in metric_panels(sweep, names, {of: styles[variant] for of, variant in names.items()}).items():
            if [*panels] == [key]:  # no pattern: its panels are the rates
                by_key.setdefault(key, {})[f"learning rate {rate:g}"] = panels[key]
    return found + [
        metric_figure(sweep, key, panels, f"stability_{file_name(key)}", sweep.title)
        for key, panels in by_key.items()
        if worth_drawing(s for series in panels.values() for s in series)
    ]


# -----------------------------------------------------------------------------
# Runs -> series


def series_of(
    sweep: Sweep, names: Mapping[str, str], look: Mapping[str, Style], key: str, sums: bool = False
) -> list[Series]:
    """A metric's curves of the settings that have some. names: setting -> its name in the chart. sums: draw counts over
    several updates per update."""
    found = []
    for setting, name in names.items():
        of_state: dict[str, dict[Replicate, Curve]] = {"done": {}, "diverged": {}, "running": {}}
        for run in sweep.runs_of(setting).values():
            if key in run.curves:
                curve = per_update(run.curves[key], run.config["max_iters"]) if sums else run.curves[key]
                state = run.state.state if run.state.state in of_state else "running"
                of_state[state][run.replicate] = curve
        found.append(Series(name, look[setting], of_state["done"], of_state["diverged"], of_state["running"]))
    return [s for s in found if s.curves or s.unfinished]


def metric_panels(
    sweep: Sweep, names: Mapping[str, str], look: Mapping[str, Style]
) -> dict[str, dict[str, list[Series]]]:
    """Key or pattern of the definition's `also` -> metric that matches it -> series; none for what no run has."""
    logged = {key for setting in names for run in sweep.runs_of(setting).values() for key in run.curves} - {"val/loss"}
    found: dict[str, dict[str, list[Series]]] = {}
    for pattern in sweep.logged:
        for key in sorted(key for key in logged if fnmatchcase(key, pattern)):
            series = series_of(sweep, names, look, key, sums=sweep.logged[pattern] == "sum")
            found.setdefault(pattern, {})[key] = series
    return found


def per_update(sums: Curve, max_iters: int) -> Curve:
    """Counts over spans that end at the iterations, divided by the updates of each. At max_iters there is no update."""
    spans = {i: min(i, max_iters - 1) - before for i, before in zip(sums, [-1, *sums], strict=False)}
    return {i: value / spans[i] for i, value in sums.items() if spans[i] > 0}


# -----------------------------------------------------------------------------
# File names


def suffix(part: str) -> str:
    """What a part or a comparison adds to the names of its files."""
    plain = re.sub(r"[^\w.-]+", "_", part)
    return f"_{plain}" if part else ""


def file_name(key: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "_", key).strip("_")
