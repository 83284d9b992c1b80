"""The charts of a report in Vega-Lite, by Altair: report.html draws them, and vl-convert saves the same ones as SVG."""

import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import altair as alt
import vl_convert

from scripts.reporting.comparisons import Family
from scripts.reporting.numbers import Estimate, mean_curve
from scripts.reporting.runs import Curve, Replicate, replicate_name
from training.metrics import METRICS

VEGA_LITE = "6.4"  # the version that Altair writes
LOSS = METRICS["val/loss"].title
OKABE_ITO = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
VIRIDIS = ["#440154", "#472D7B", "#3B528B", "#2C728E", "#21918C", "#28AE80", "#5EC962", "#ADDC30", "#FDE725"]
SYMBOLS = ["circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "triangle-left"]
DASHES = [[1, 0], [6, 2], [2, 2], [8, 2, 2, 2], [4, 1], [1, 2], [8, 2, 2, 2, 2, 2]]
CROWD = 9  # more curves cannot be told apart in one chart
COLUMNS, SPACING = 4, alt.RowColnumber(row=64, column=52)  # of panels
CROSS = "M-1,-1L1,1M-1,1L1,-1"

Row = dict[str, Any]  # of the data that Vega-Lite draws


@dataclass(frozen=True)
class Style:
    """How a setting is drawn; `dark` is its colour on a dark ground. Dashes and symbol repeat what the colour says."""

    colour: str
    dark: str
    symbol: str
    dashes: list[int]


@dataclass(frozen=True)
class Series:
    """The runs of one setting. `curves` are those of runs that are done; only these set the mean and the axes.

    estimates: iteration -> what to draw, where it is not the mean of curves.
    """

    name: str
    style: Style
    curves: Mapping[Replicate, Curve]
    diverged: Mapping[Replicate, Curve] = field(default_factory=dict)
    estimates: Mapping[int, Estimate] = field(default_factory=dict)

    @cached_property
    def mean(self) -> Mapping[int, Estimate]:
        return self.estimates or mean_curve(self.curves)


@dataclass(frozen=True)
class Figure:
    """A chart, with the name of its SVG file (without ending), which is also its id in the page."""

    name: str
    title: str
    chart: alt.LayerChart | alt.ConcatChart
    caption: str


# -----------------------------------------------------------------------------
# Colours, dashes, symbols, themes


def styles(parts: Mapping[str, Mapping[str, str]]) -> dict[str, Style]:
    """A style for each setting of parts = {part: {setting: its name in the part}}.

    Names that differ in one number have ordered colours (viridis), the same for a number in every part; others have
    the colours of Okabe and Ito. Names of two words, as "rms,n_kv_head=4", have a colour for the first word, and dashes
    and a symbol for the second.
    """
    found = {}
    everywhere = [word for names in parts.values() for name in names.values() for word in name.split(",")]
    for names in parts.values():
        words = [name.split(",") for name in names.values()]
        both = all(len(pair) == 2 for pair in words)
        hues = ranks([pair[0] for pair in words] if both else [*names.values()], everywhere)
        looks = ranks([pair[1] for pair in words], everywhere) if both else hues
        for setting, name in names.items():
            hue, look = name.split(",") if both else (name, name)
            i, _ = looks[look]
            j = (i + i // len(OKABE_ITO)) % len(OKABE_ITO)  # colours repeat out of step with dashes and symbols
            found[setting] = Style(*colours_of(*hues[hue]), SYMBOLS[j], DASHES[j])
    return found


def styles_of_names(names: Iterable[str]) -> dict[str, Style]:
    return styles({"": {name: name for name in names}})


def ranks(names: Sequence[str], everywhere: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Name -> (place, n). A name like p=3 has its place among the n values of p in `everywhere`, where these are more
    than two. Any other has n = 0, and a running number as its place."""
    scales: dict[str, list[float]] = {}
    for key, value in filter(None, map(ordered_value, everywhere)):
        scales[key] = sorted({*scales.get(key, []), value})
    found = {}
    for i, name in enumerate(dict.fromkeys(names)):
        key, value = ordered_value(name) or ("", 0.0)
        scale = scales.get(key, [])
        found[name] = (scale.index(value), len(scale)) if len(scale) > 2 else (i, 0)
    return found


def colours_of(rank: int, numbers: int) -> tuple[str, str]:
    """The colours on a light and on a dark page: viridis for this rank among so many numbers; Okabe and Ito's where
    numbers is 0."""
    if numbers:
        place = rank / (numbers - 1)
        return viridis(0.78 * place), viridis(0.4 + 0.6 * place)
    colour = OKABE_ITO[rank % len(OKABE_ITO)]
    return colour, "#DDDDDD" if colour == "#000000" else colour


def ordered_value(name: str) -> tuple[str, float] | None:
    """("p", 2.5) for "p=2.5"; None for any other name."""
    key, equals, text = name.partition("=")
    try:
        value = float(text)
    except ValueError:
        return None
    return (key, value) if equals and not math.isnan(value) else None


def viridis(place: float) -> str:
    """The colour at `place`, 0 to 1."""
    left, share = divmod(min(place, 0.9999) * (len(VIRIDIS) - 1), 1)
    a, b = (bytes.fromhex(colour[1:]) for colour in VIRIDIS[int(left) : int(left) + 2])
    return "#" + bytes(round(x + share * (y - x)) for x, y in zip(a, b, strict=True)).hex()


def theme(dark: bool) -> dict[str, Any]:
    """Vega-Lite's config for a light or a dark ground."""
    ink, soft, rule = ("#e6e8eb", "#a2a9b4", "#343941") if dark else ("#1a1c20", "#5c626c", "#e3e6ea")
    return {
        "aria": False, "background": None, "font": "system-ui, -apple-system, 'Segoe UI', Arial, sans-serif",
        "view": {"stroke": None}, "rule": {"color": soft}, "point": {"color": "#6cb6f5" if dark else "#0b5fa5"},
        "axis": {"labelColor": soft, "titleColor": soft, "gridColor": rule, "domainColor": rule, "tickColor": rule,
                 "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal", "titlePadding": 10,
                 "labelFlush": False, "labelLimit": 420},
        "legend": {"labelColor": ink, "titleColor": ink, "labelFontSize": 13, "labelLimit": 400, "symbolSize": 90,
                   "rowPadding": 5},
        "title": {"color": ink, "fontSize": 12, "fontWeight": "normal"},
    }  # fmt: skip


def palette(series: Iterable[Series]) -> dict[str, list[str]]:
    """A chart's colours in either theme, as its `usermeta`: they become `config.range.category` when it is drawn."""
    look = {s.name: s.style for s in series}.values()
    return {"light": [style.colour for style in look], "dark": [style.dark for style in look]}


def svg(figure: Figure) -> bytes:
    """The figure in the light theme on white. The same figure gives the same bytes."""
    title = {"text": textwrap.wrap(figure.title, 66), "fontSize": 14, "anchor": "start", "offset": 12}
    spec = {**figure.chart.to_dict(), "background": "white", "title": title}
    if spec.get("width") == "container":
        spec["width"] = 560
    colours = spec.get("usermeta", {}).get("light", OKABE_ITO)
    config = theme(dark=False) | {"font": wide_font(), "padding": 12, "range": {"category": colours}}
    text = vl_convert.vegalite_to_svg(spec, vl_version=VEGA_LITE, config=config)
    text = text.replace(f'font-family="{wide_font()}"', 'font-family="sans-serif"')
    ids = {name: f"clip{i}" for i, name in enumerate(dict.fromkeys(re.findall(r'id="(clip\d+)"', text)))}
    text = re.sub(r"\bclip\d+\b", lambda match: ids.get(match[0], match[0]), text)  # vl-convert counts on and on
    text = re.sub(r' (d|transform)="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), text)
    return text.encode()


@cache
def wide_font() -> str:
    """The font that pictures are laid out for: a reader's sans-serif is hardly wider. matplotlib has its file."""
    import matplotlib

    vl_convert.register_font_directory(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf"))
    return "DejaVu Sans"


# -----------------------------------------------------------------------------
# Curves


def curves_chart(series: Sequence[Series], key: str, zero: bool = False) -> alt.LayerChart | alt.ConcatChart:
    """Curves of a metric in one chart, or of more than CROWD settings in a panel each."""
    return (crowd_chart if len(series) > CROWD else curve_chart)(series, key, zero)


def curve_chart(series: Sequence[Series], key: str, zero: bool = False) -> alt.LayerChart:
    """Means with their intervals, or single runs by choice, with a legend that switches settings off and on.

    zero: of differences or shares, with a line at 0.
    """
    rows, axis = curve_rows(series), value_axis(series, key, zero)
    names = [s.name for s in series]
    choices = list(dict.fromkeys(["mean", *(row["run"] for row in rows), "every run"]))
    which = alt.param(name="which", value="mean", bind=alt.binding_select(options=choices, name="Curves "))
    checkbox = alt.binding_checkbox(name="95 % interval of the mean ")
    band = alt.param(name="band", value=not is_log(axis), bind=checkbox)  # a t interval looks lopsided there
    shown = legend_selection(names)
    chosen = "which === 'every run' ? datum.run !== 'mean' : datum.run === which || which === 'mean' && datum.diverged"
    base = (
        encoded(rows, series, axis)
        .encode(color=colours(series, outline=0))
        .transform_filter(shown)
        .transform_filter(chosen)
    )
    bands = base.transform_filter("band && isValid(datum.low) && datum.n > 2").mark_area(opacity=0.1, clip=True)
    bands = bands.transform_calculate(low=f"max(datum.low, {axis['scale']['domain'][0]})")  # a logarithm has no 0
    named = {"run": "curve", "value": key, "low": "95 % from", "high": "95 % to", "n": "values"}
    tooltip = tooltips("setting:N", "run:N", "iteration:Q", "value:.4f", "low:.4f", "high:.4f", "n:Q", **named)
    symbols = alt.Scale(domain=names, range=[s.style.symbol for s in series])
    size = 45 if max((len(s.mean) for s in series), default=0) <= 30 else 16
    points = base.transform_filter("!datum.diverged").mark_point(size=size, filled=True, opacity=1, clip=True)
    points = points.encode(tooltip=tooltip, shape=alt.Shape("setting:N", title=None, scale=symbols))
    layers = alt.layer(bands.encode(y="low:Q", y2="high:Q"), *lines(base, series), points)
    layers = layers.add_params(which, band, shown, zoom())
    layers.layer = [*zero_line(zero), *layers.layer]
    return layers.properties(width="container", height=360, usermeta=palette(series))


def zero_line(zero: bool) -> list[alt.Chart]:
    line = alt.Chart(alt.Data(values=[{"zero": 0}])).mark_rule(strokeDash=[4, 3]).encode(y="zero:Q")
    return [line] * zero


def legend_selection(names: Sequence[str]) -> alt.Parameter:
    """The settings that the legend has not switched off."""
    every = [{"setting": name} for name in names]
    return alt.selection_point(
        name="shown", fields=["setting"], bind="legend", toggle="true", clear=False, empty=False, value=every
    )


def zoom() -> alt.Parameter:
    """Drag to move; the wheel zooms with Ctrl alone, as without it the page scrolls."""
    return alt.selection_interval(name="zoom", bind="scales", zoom="wheel![event.ctrlKey]")


def crowd_chart(series: Sequence[Series], key: str, zero: bool = False) -> alt.ConcatChart:
    """A panel for each setting: its mean with the interval, and in grey the means of all settings."""
    rows = [row for row in curve_rows(series) if row["run"] == "mean" or "diverged" in row]
    iterations = sorted({row["iteration"] for row in rows})
    coarse = {*iterations[:: 1 + len(iterations) // 25], *iterations[-1:]}
    axis = value_axis(series, key, zero)
    axis["title"] = textwrap.wrap(axis["title"], 16)  # as high as a panel
    panels = []
    for i, s in enumerate(series):
        titles = {"title_x": i + COLUMNS >= len(series), "title_y": i % COLUMNS == 0}
        others = encoded([row for row in rows if row["iteration"] in coarse], series, axis, **titles)
        colour = alt.Color("setting:N", scale=alt.Scale(domain=[s.name]), legend=None)
        own = encoded(rows, series, axis, **titles).encode(color=colour).transform_filter(alt.datum.setting == s.name)
        band = own.transform_filter("datum.n > 2").mark_area(opacity=0.25, clip=True).encode(y="low:Q", y2="high:Q")
        grey = others.encode(color=alt.value("#b4bac4"), detail=["setting:N", "run:N"])
        line = own.encode(detail="run:N").mark_line(clip=True)
        layers = [grey.mark_line(strokeWidth=0.7, clip=True), band, line, *crosses(own, [s])]
        panels.append(alt.layer(*zero_line(zero), *layers).properties(title=panel_title(s.name), width=170, height=110))
    grid = alt.concat(*panels, columns=COLUMNS, usermeta=palette(series[:1]), bounds="flush", spacing=SPACING)
    return grid.resolve_scale(color="independent")


def panel_chart(panels: Mapping[str, Sequence[Series]], key: str) -> alt.ConcatChart:
    """A small chart of means for each panel, without intervals, with one legend and one axis."""
    every = list({s.name: s for series in panels.values() for s in series}.values())
    axis = value_axis([s for series in panels.values() for s in series], key)
    axis["title"] = textwrap.wrap(axis["title"], 20)  # as high as a panel
    charts = []
    for i, (name, series) in enumerate(panels.items()):
        rows = [row for row in curve_rows(series) if row["run"] == "mean" or "diverged" in row]
        base = encoded(rows, every, axis, title_x=i + COLUMNS >= len(panels), title_y=i % COLUMNS == 0)
        charts.append(alt.layer(*lines(base, every)).properties(title=panel_title(name), width=170, height=140))
    return alt.concat(*charts, columns=COLUMNS, usermeta=palette(every), bounds="flush", spacing=SPACING)


def panel_title(name: str) -> alt.Title:
    """A name in lines that end before the next panel's begin."""
    return alt.Title(textwrap.wrap(name, 33), limit=216)


def curve_rows(series: Sequence[Series]) -> list[Row]:
    """A row for each value of each mean and of each run, where finite."""
    rows: list[Row] = []

    def add(s: Series, run: str, curve: Curve, **more: Any) -> None:
        named = {"setting": s.name, "run": run, **more}
        rows.extend({**named, "iteration": i, "value": value} for i, value in curve.items() if math.isfinite(value))

    for s in series:
        for i, point in s.mean.items():
            ends = {} if point.low is None else {"low": point.low, "high": point.high}
            add(s, "mean", {i: point.mean}, **ends, n=point.n)
        for replicate, curve in s.curves.items():
            add(s, replicate_name(replicate), curve)
        for replicate, curve in s.diverged.items():
            add(s, f"{replicate_name(replicate)}, diverged", curve, diverged=True)
    return rows


def row_of(estimate: Estimate) -> Row:
    """value, low, high, n: of a row of final_chart(). A single value has a bar of no length."""
    low, high = (estimate.mean if end is None else end for end in (estimate.low, estimate.high))
    return {"value": estimate.mean, "low": low, "high": high, "n": estimate.n}


def encoded(
    rows: list[Row], series: Sequence[Series], axis: Mapping[str, Any], title_x: bool = True, title_y: bool = True
) -> alt.Chart:
    """A chart of curves without a mark: axes and colours. axis: of the values."""
    iterations = [row["iteration"] for row in rows] or [0]
    scale = alt.Scale(domain=[min(iterations), max(iterations)], nice=False, padding=6)
    labels = alt.Axis(tickCount=5, labelOverlap=True, labelSeparation=6)
    x = alt.X("iteration:Q", title="iteration" if title_x else None, scale=scale, axis=labels)
    return alt.Chart(alt.InlineData(values=rows)).encode(  # a chart holds equal InlineData once
        x=x, y=alt.Y("value:Q", **axis if title_y else {**axis, "title": None}), color=colours(series)
    )


def colours(series: Sequence[Series], outline: float = 1.5) -> alt.Color:
    """outline: of the legend's symbols; it is dashed as the lines are, which filled symbols must not be."""
    names, legend = [s.name for s in series], alt.Legend(symbolOpacity=1, symbolStrokeWidth=outline)
    if max(map(len, names), default=0) > 60:  # the end tells them apart, which labelLimit would cut
        legend.labelExpr = (
            "length(datum.label) > 60 ? slice(datum.label, 0, 28) + '…' + slice(datum.label, -30) : datum.label"
        )
    return alt.Color("setting:N", title=None, scale=alt.Scale(domain=names), legend=legend)


def lines(base: alt.Chart, series: Sequence[Series]) -> list[alt.Chart]:
    """A line for each curve; that of a diverged run is thin and ends in a cross."""
    scale = alt.Scale(domain=[s.name for s in series], range=[s.style.dashes for s in series])
    width = alt.condition("datum.diverged", alt.value(0.7), alt.value(1.6))
    dashes = alt.StrokeDash("setting:N", title=None, scale=scale)
    line = base.mark_line(clip=True).encode(detail="run:N", strokeDash=dashes, strokeWidth=width)
    return [line, *crosses(base, series)]


def crosses(base: alt.Chart, series: Iterable[Series]) -> list[alt.Chart]:
    """The ends of diverged runs."""
    if not any(s.diverged for s in series):
        return []
    ends = base.transform_filter("datum.diverged")
    ends = ends.transform_joinaggregate(end="max(iteration)", groupby=["setting", "run"])
    return [ends.transform_filter("datum.iteration === datum.end").mark_point(shape=CROSS, size=30, clip=True)]


def value_axis(series: Sequence[Series], key: str, zero: bool = False) -> dict[str, Any]:
    """The y axis of a metric: logarithmic where it spans more than a factor of 50, but never for the validation loss,
    nor around a line at zero.

    Its range is that of the means and of the intervals of three values or more; of a loss, past a tenth of the run:
    before it, the loss falls from ln V and would set the scale.
    """
    drawn = [point.mean for s in series for point in s.mean.values()]
    drawn += [value for s in series for curve in s.diverged.values() for value in curve.values()]
    drawn = [value for value in drawn if math.isfinite(value)]
    if key != LOSS and not zero and min(drawn, default=0) > 0 and max(drawn) > 50 * min(drawn):
        low, high = 0.9 * min(drawn), 1.1 * max(drawn)
        steps = (1, 2, 5) if high < 500 * low else (1,)
        ticks = [m * 10.0**k for k in range(-12, 13) for m in steps if low <= m * 10.0**k <= high]
        scale = alt.Scale(type="log", domain=[low, high], nice=False)
        return {"title": f"{key}, log scale", "scale": scale, "axis": alt.Axis(values=ticks, format="~g")}
    start = 0.1 if is_loss(key) else -1  # the share of the run that does not set the range
    points = [point for s in series for i, point in s.mean.items() if i > start * max(s.mean)]
    floor = 0.0 if not zero and min(drawn, default=0) >= 0 else -math.inf  # what is never negative has no such axis
    ends = [max(end, floor) for point in points if point.n > 2 for end in (point.low, point.high) if end is not None]
    values = [*(point.mean for point in points), *ends, *[0.0] * zero]
    if not values:
        of_diverged = [curve for s in series for curve in s.diverged.values()]
        values = [value for curve in of_diverged for i, value in curve.items() if i > start * max(curve)] or [0.0, 1.0]
    margin = 0.04 * (max(values) - min(values)) or 0.01
    scale = alt.Scale(domain=[min(values) - margin, max(values) + margin], nice=False, zero=False)
    return {"title": key, "scale": scale, "axis": alt.Axis(tickCount=5, format="%" if key.startswith("share") else "")}


def is_log(axis: Mapping[str, Any]) -> bool:
    return axis["scale"]["type"] == "log"


def is_loss(key: str) -> bool:
    return key == LOSS or key.endswith("loss")


def remarks(series: Sequence[Series], key: str) -> str:
    """What a caption adds: that a part lies above the axis, what a cross is, and what is grey."""
    top = value_axis(series, key)["scale"]["domain"][1]
    above = is_loss(key) and any(point.mean > top for s in series for point in s.mean.values())
    crosses = " A thin line that ends in a cross is a run that diverged." * any(s.diverged for s in series)
    grey = " Grey: the means of all panels." * (len(series) > CROWD)
    return " The start of the run lies above the axis." * above + crosses + grey


def tooltips(*shown: str, **titles: str) -> list[alt.Tooltip]:
    """shown: "name:N", "name:Q", or "name:FORMAT" for a number."""
    found = []
    for name, how in (text.split(":") for text in shown):
        kind = {"type": "nominal"} if how == "N" else {"type": "quantitative", "format": how.replace("Q", ",")}
        found.append(alt.Tooltip(name, title=titles.get(name, name), **kind))
    return found


# -----------------------------------------------------------------------------
# Learning rates, differences


def final_chart(rows: list[Row], series: Sequence[Series], title: str) -> alt.LayerChart:
    """Final losses over doublings of x, a line for each series, with a bar at each value.

    rows: setting, x, value, low, high, n, and ringed where the value has a ring. title: of the x axis.
    """
    y = alt.Y("value:Q", title="final " + LOSS, scale=alt.Scale(zero=False))
    ticks = sorted({row["x"] for row in rows})
    axis = alt.Axis(values=ticks, labelExpr="format(datum.value, '~g')", labelOverlap=True)
    x = alt.X("drawn:Q", title=title, scale=alt.Scale(type="log", base=2, nice=False, padding=12), axis=axis)
    place = {s.name: i - (len(series) - 1) / 2 for i, s in enumerate(series)}  # bars at one x stand side by side
    step = min(1.03, 1.12 ** (1 / len(series)))
    rows = [{**row, "drawn": row["x"] * step ** place[row["setting"]]} for row in rows]
    base = alt.Chart(alt.Data(values=rows)).encode(x=x, y=y, color=colours(series, outline=0))
    bars = base.mark_rule().encode(y="low:Q", y2="high:Q")
    symbols = alt.Scale(domain=[s.name for s in series], range=[s.style.symbol for s in series])
    tooltip = tooltips("setting:N", "x:~g", "value:.4f", "low:.4f", "high:.4f", "n:Q", x=title)
    points = base.mark_point(size=45, filled=True, opacity=1)
    points = points.encode(shape=alt.Shape("setting:N", title=None, scale=symbols), tooltip=tooltip)
    ringed = base.transform_filter("datum.ringed").mark_point(size=160, filled=False, opacity=1)
    rings = [ringed] if any(row.get("ringed") for row in rows) else []  # Vega warns of a layer without rows
    chart = alt.layer(bars, *lines(base, series), points, *rings)
    return chart.properties(width="container", height=360, usermeta=palette(series))


def stability_chart(
    finals: Mapping[str, Mapping[float, Sequence[float]]], stable: Mapping[str, float]
) -> alt.LayerChart:
    """Mean of the final losses by learning rate, a line a variant; a ring: above its highest stable rate.

    finals: variant -> learning rate -> final losses.
    """
    look = styles_of_names(finals)
    rows = [
        {
            "setting": variant,
            "x": rate,
            "value": fmean(losses),
            "low": min(losses),
            "high": max(losses),
            "n": len(losses),
            "ringed": rate > stable[variant],
        }
        for variant, losses_at in finals.items()
        for rate, losses in losses_at.items()
        if losses
    ]
    return final_chart(rows, [Series(variant, look[variant], {}) for variant in finals], "learning rate")


def difference_chart(family: Family) -> alt.LayerChart:
    """A point for each fold or seed of each comparison; a bar for the mean's 95 % interval; a diamond for the mean,
    filled where the verdict tells A and B apart. Differences below `least` lie on a grey ground."""
    points, means, names, metric = [], [], family.short_names(), family.metrics[0]
    for c in family.ranked():
        if c.deciding is not None:
            pair = family.pair_name(c)
            verdict = c.verdict(metric.less, metric.more)
            told = verdict in (metric.less, metric.more)
            means.append({"pair": pair, "verdict on A": verdict, "told": told, **asdict(c.deciding)})
            for replicate, (x, y) in c.values.items():
                points.append({"pair": pair, "run": replicate_name(replicate), "difference": x - y, "A": x, "B": y})
    y = alt.Y("pair:N", sort=[mean["pair"] for mean in means], title=None)
    pair = f"A − {names[family.against]}" if family.against else "A − B"
    title = ["difference in lowest validation loss", f"({pair}, nats per token; left of 0: A is lower)"]
    x = alt.X("difference:Q", title=title, axis=alt.Axis(tickCount=8, titleAnchor="end"))  # a narrow page cuts it else
    zero = alt.Chart(alt.Data(values=[{"zero": 0}])).mark_rule(strokeDash=[4, 3]).encode(x="zero:Q")
    dots = alt.Chart(alt.Data(values=points)).mark_point(filled=True, size=45, opacity=0.55).encode(
        y=y, x=x, tooltip=tooltips("pair:N", "run:N", "difference:.4f", "A:.4f", "B:.4f"),
    )  # fmt: skip
    tooltip = tooltips("pair:N", "verdict on A:N", "mean:.4f", "low:.4f", "high:.4f", "n:Q")
    base = alt.Chart(alt.Data(values=means)).encode(y=y, tooltip=tooltip)
    bars = base.transform_filter("isValid(datum.low)").mark_rule(strokeWidth=3).encode(x="low:Q", x2="high:Q")
    intervals = [bars] if any(mean["low"] is not None for mean in means) else []  # a single pair has none
    diamonds = []
    for told in sorted({mean["told"] for mean in means}, reverse=True):  # Vega warns of a layer without rows
        which = base.transform_filter("datum.told" if told else "!datum.told").encode(x="mean:Q")
        diamonds.append(which.mark_point(shape="diamond", filled=told, size=110, opacity=1))
    ground = []
    if (least := family.asked.least) is not None:
        of_no_worth = alt.Chart(alt.Data(values=[{"low": -least, "high": least}]))
        ground = [of_no_worth.mark_rect(color="#888888", opacity=0.12).encode(x="low:Q", x2="high:Q")]
    layers = alt.layer(*ground, zero, dots, *intervals, *diamonds)
    return layers.properties(width="container", height=34 * len(means))
