"""The charts of a report in Vega-Lite: report.html draws them, and vl-convert saves the same ones as SVG."""

import contextlib
import json
import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import vl_convert

from core.files import ROOT
from scripts.reporting.comparisons import Family
from scripts.reporting.numbers import Estimate, mean_curve
from scripts.reporting.runs import Curve, Replicate, replicate_name
from training.metrics import METRICS

VEGA_LITE = "6.4"
LOSS = METRICS["val/loss"].title
OKABE_ITO = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
VIRIDIS = ["#440154", "#472D7B", "#3B528B", "#2C728E", "#21918C", "#28AE80", "#5EC962", "#ADDC30", "#FDE725"]
SYMBOLS = ["circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "triangle-left"]
DASHES = [[1, 0], [6, 2], [2, 2], [8, 2, 2, 2], [4, 1], [1, 2], [8, 2, 2, 2, 2, 2]]
CROWD = 9  # more curves cannot be told apart in one chart
COLUMNS = 4  # of panels
FEW_LATE = 5
ENDS = {"y": {"field": "low", "type": "quantitative"}, "y2": {"field": "high"}}  # of bands and bars
# drag to move; the wheel zooms with Ctrl alone, as without it the page scrolls
ZOOM = {"name": "zoom", "select": {"type": "interval", "zoom": "wheel![event.ctrlKey]"}, "bind": "scales"}
CROSS = "M-1,-1L1,1M-1,1L1,-1"

Row = dict[str, Any]  # of the data that Vega-Lite draws
Spec = dict[str, Any]  # a chart in Vega-Lite's JSON


@dataclass(frozen=True)
class Style:
    """How a setting is drawn; `dark` is its colour on a dark ground. Dashes and symbol repeat what the colour says."""

    colour: str
    dark: str
    symbol: str
    dashes: list[int]


@dataclass(frozen=True)
class Series:
    """The runs of one setting. Only `curves`, those of runs that are done, set the mean and the axes. running: of runs
    that are not done, on a live page. estimates: iteration -> what to draw in place of the mean."""

    name: str
    style: Style
    curves: Mapping[Replicate, Curve]
    diverged: Mapping[Replicate, Curve] = field(default_factory=dict)
    running: Mapping[Replicate, Curve] = field(default_factory=dict)
    estimates: Mapping[int, Estimate] = field(default_factory=dict)
    goes_on: bool = False  # curves holds that of a run that is not done

    @cached_property
    def mean(self) -> Mapping[int, Estimate]:
        return self.estimates or mean_curve(self.curves)

    @property
    def unfinished(self) -> list[Curve]:
        return [*self.diverged.values(), *self.running.values()]


@dataclass(frozen=True)
class Figure:
    """A chart, with the name of its SVG file (without ending), which is also its id in the page."""

    name: str
    title: str
    spec: Spec
    caption: str


# -----------------------------------------------------------------------------
# Colours, dashes, symbols, themes


def styles(parts: Mapping[str, Mapping[str, str]]) -> dict[str, Style]:
    """A style for each setting of parts = {part: {setting: its name in the part}}. Names that differ in one number have
    ordered colours (viridis), the same for a number in every part; others have the colours of Okabe and Ito. Names of
    two words, as "rms,n_kv_head=4", have a colour for the first word, and dashes and a symbol for the second."""
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
    """Colours on a light and on a dark page: viridis by rank; Okabe and Ito's where numbers is 0."""
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
    spec = {**figure.spec, "background": "white", "title": title}
    if spec.get("width") == "container":
        spec["width"] = 560
    colours = spec.get("usermeta", {}).get("light", OKABE_ITO)
    config = theme(dark=False) | {"font": wide_font(), "padding": 12, "range": {"category": colours}}
    plain = re.sub(r"\\u00[01][0-9a-f]", "?", json.dumps(spec))  # no XML may hold a control character
    text = vl_convert.vegalite_to_svg(plain, vl_version=VEGA_LITE, config=config)
    text = text.replace(f'font-family="{wide_font()}"', 'font-family="sans-serif"')
    ids = {name: f"clip{i}" for i, name in enumerate(dict.fromkeys(re.findall(r'id="(clip\d+)"', text)))}
    text = re.sub(r"\bclip\d+\b", lambda match: ids.get(match[0], match[0]), text)  # vl-convert counts on and on
    text = re.sub(r' (d|transform)="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), text)
    return text.encode()


@cache
def wide_font() -> str:
    """The font that pictures are laid out for: a reader's sans-serif is hardly wider. matplotlib has its file."""
    with contextlib.chdir(ROOT):  # it reads a matplotlibrc of the current folder
        import matplotlib

    vl_convert.register_font_directory(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf"))
    return "DejaVu Sans"


# -----------------------------------------------------------------------------
# Words of Vega-Lite


def quantity(field: str, **how: Any) -> Spec:
    """A channel of numbers. how: its title, scale, axis, format."""
    return {"field": field, "type": "quantitative", **how}


def nominal(field: str, **how: Any) -> Spec:
    """A channel of names."""
    return {"field": field, "type": "nominal", **how}


def marks(kind: str, encoding: Spec, *transform: Spec, **how: Any) -> Spec:
    """A layer: marks of one kind."""
    return {"mark": {"type": kind, **how}, "encoding": encoding, "transform": transform}


def where(predicate: str | Spec) -> Spec:
    return {"filter": predicate}


def tooltips(*shown: str, **titles: str) -> list[Spec]:
    """shown: "name:N", "name:Q", or "name:FORMAT" for a number."""
    found = []
    for name, how in (text.split(":") for text in shown):
        title = titles.get(name, name)
        number = quantity(name, title=title, format=how.replace("Q", ","))
        found.append(nominal(name, title=title) if how == "N" else number)
    return found


# -----------------------------------------------------------------------------
# Curves


def curve_chart(series: Sequence[Series], key: str, zero: bool = False) -> Spec:
    """Means with their intervals, or single runs by choice, with a legend that switches settings off and on. More than
    CROWD settings have a panel each. zero: of differences or shares, with a line at 0."""
    if len(series) > CROWD:
        return panel_chart({s.name: [s] for s in series}, key, zero, crowd=True)
    rows, axis = curve_rows(series), value_axis(series, key, zero)
    switched_on = [{"setting": s.name} for s in series]
    legend = {"type": "point", "fields": ["setting"], "toggle": "true", "clear": False}
    choices = list(dict.fromkeys(["mean", *(row["run"] for row in rows), "every run"]))
    which: Spec = {"name": "which", "value": "mean"}
    band: Spec = {"name": "band", "value": not is_log(axis)}  # a t interval looks lopsided there
    if any(row.get("n", 1) > 1 or "thin" in row for row in rows):
        which["bind"] = {"input": "select", "options": choices, "name": "Curves "}
        band["bind"] = {"input": "checkbox", "name": "95 % interval of the mean "}
    chosen = "which === 'every run' ? datum.run !== 'mean' : datum.run === which || which === 'mean' && datum.thin"
    shown = [where({"param": "shown", "empty": False}), where(chosen)]
    base = encoded(rows, series, axis) | {"color": colours(series, outline=0)}
    in_band = where("band && isValid(datum.low) && datum.n > 2")
    low = {"calculate": f"max(datum.low, {axis['scale']['domain'][0]})", "as": "low"}  # a logarithm has no 0
    bands = marks("area", base | ENDS, *shown, in_band, low, opacity=0.1, clip=True)
    named = {"run": "curve", "value": key, "low": "95 % from", "high": "95 % to", "n": "values"}
    tooltip = tooltips("setting:N", "run:N", "iteration:Q", "value:.4f", "low:.4f", "high:.4f", "n:Q", **named)
    of_points = base | {"tooltip": tooltip, "shape": symbols(series)}
    size = 45 if max((len(s.mean) for s in series), default=0) <= 30 else 16
    points = marks("point", of_points, *shown, where("!datum.thin"), size=size, filled=True, opacity=1, clip=True)
    params = [{"name": "shown", "select": legend, "bind": "legend", "value": switched_on}, ZOOM]
    layers = [line_at_zero("y")] if zero else []
    layers += [{**bands, "params": params}, *lines(base, series, *shown), points]
    return {
        "layer": layers, "params": [which, band], "data": {"name": "curves"}, "datasets": {"curves": rows},
        "width": "container", "height": 360, "usermeta": palette(series),
    }  # fmt: skip


def line_at_zero(axis: str) -> Spec:
    return marks("rule", {axis: quantity("zero")}, strokeDash=[4, 3]) | {"data": {"values": [{"zero": 0}]}}


def panel_chart(panels: Mapping[str, Sequence[Series]], key: str, zero: bool = False, crowd: bool = False) -> Spec:
    """A small chart of means for each panel, with one legend and one axis; of a crowd with intervals for a legend."""
    every = list({s.name: s for series in panels.values() for s in series}.values())
    axis = value_axis([s for series in panels.values() for s in series], key, zero)
    axis["title"] = textwrap.wrap(axis["title"], 20)  # as high as a panel
    charts = []
    data: dict[str, list[Row]] = {}
    for i, (name, series) in enumerate(panels.items()):
        rows = data[f"panel{i}"] = [row for row in curve_rows(series) if row["run"] == "mean" or "thin" in row]
        base = encoded(rows, every, axis, title_x=i + COLUMNS >= len(panels), title_y=i % COLUMNS == 0)
        layers = [line_at_zero("y")] if zero else []
        if crowd:
            base["color"]["legend"] = None
            layers.append(marks("area", base | ENDS, where("datum.n > 2"), opacity=0.25, clip=True))
        layers += lines(base, every)
        title = {"text": textwrap.wrap(name, 33), "limit": 216}  # lines that end before the next panel's begin
        charts.append({"layer": layers, "data": {"name": f"panel{i}"}, "title": title, "width": 170, "height": 140})
    layout = {"columns": COLUMNS, "spacing": {"row": 64, "column": 52}, "bounds": "flush"}
    return {"concat": charts, **layout, "datasets": data, "usermeta": palette(every)}


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
            add(s, f"{replicate_name(replicate)}, diverged", curve, thin=True, diverged=True)
        for replicate, curve in s.running.items():
            add(s, f"{replicate_name(replicate)}, not done", curve, thin=True)
    return rows


def row_of(estimate: Estimate) -> Row:
    """value, low, high, n: of a row of final_chart(). A single value has a bar of no length."""
    low, high = (estimate.mean if end is None else end for end in (estimate.low, estimate.high))
    return {"value": estimate.mean, "low": low, "high": high, "n": estimate.n}


def encoded(
    rows: Sequence[Row], series: Sequence[Series], axis: Spec, title_x: bool = True, title_y: bool = True
) -> Spec:
    """The axes and colours of curves. axis: of the values."""
    iterations = [row["iteration"] for row in rows] or [0]
    scale = {"domain": [min(iterations), max(iterations)], "nice": False, "padding": 6}
    labels = {"tickCount": 5, "labelOverlap": True, "labelSeparation": 6}
    x = quantity("iteration", title="iteration" if title_x else None, scale=scale, axis=labels)
    y = quantity("value", **axis if title_y else {**axis, "title": None})
    return {"x": x, "y": y, "color": colours(series)}


def colours(series: Sequence[Series], outline: float = 1.5) -> Spec:
    """outline: of the legend's symbols; it is dashed as the lines are, which filled symbols must not be."""
    names = [s.name for s in series]
    legend: Spec = {"symbolOpacity": 1, "symbolStrokeWidth": outline}
    if max(map(len, names), default=0) > 60:  # the end tells them apart, which labelLimit would cut
        legend["labelExpr"] = (
            "length(datum.label) > 60 ? slice(datum.label, 0, 28) + '…' + slice(datum.label, -30) : datum.label"
        )
    return nominal("setting", title=None, scale={"domain": names}, legend=legend)


def symbols(series: Sequence[Series]) -> Spec:
    look = {"domain": [s.name for s in series], "range": [s.style.symbol for s in series]}
    return nominal("setting", title=None, scale=look)


def lines(base: Spec, series: Sequence[Series], *transform: Spec) -> list[Spec]:
    """A line for each curve; that of a run that is not done is thin, and ends in a cross where it diverged."""
    look = {"domain": [s.name for s in series], "range": [s.style.dashes for s in series]}
    width = {"condition": {"test": "datum.thin", "value": 0.7}, "value": 1.6}
    dashes = nominal("setting", title=None, scale=look)
    line = marks(
        "line", base | {"detail": nominal("run"), "strokeDash": dashes, "strokeWidth": width}, *transform, clip=True
    )
    if not any(s.diverged for s in series):
        return [line]
    end = {"joinaggregate": [{"op": "max", "field": "iteration", "as": "end"}], "groupby": ["setting", "run"]}
    last = [where("datum.diverged"), end, where("datum.iteration === datum.end")]
    return [line, marks("point", base, *transform, *last, shape=CROSS, size=30, clip=True)]


def value_axis(series: Sequence[Series], key: str, zero: bool = False) -> Spec:
    """The y axis of a metric: logarithmic where it spans more than a factor of 50, but never for the validation loss,
    nor around a line at zero. Its range is that of the means; around a line at zero also that of the intervals of more
    than three values. That of a loss is of what comes after a tenth of the run, since it falls from ln V at first;
    while a run goes on, once there are FEW_LATE such values."""
    drawn = [point.mean for s in series for point in s.mean.values()]
    drawn += [value for s in series for curve in s.unfinished for value in curve.values()]
    drawn = [value for value in drawn if math.isfinite(value)]
    if key != LOSS and not zero and min(drawn, default=0) > 0 and max(drawn) > 50 * min(drawn):
        low, high = 0.9 * min(drawn), 1.1 * max(drawn)
        steps = (1, 2, 5) if high < 500 * low else (1,)
        ticks = [m * 10.0**k for k in range(-12, 13) for m in steps if low <= m * 10.0**k <= high]
        scale = {"type": "log", "domain": [low, high], "nice": False}
        return {"title": f"{key}, log scale", "scale": scale, "axis": {"values": ticks, "format": "~g"}}
    means: list[Curve] = [{i: point.mean for i, point in s.mean.items()} for s in series]
    few = math.inf
    if is_loss(key):
        few = FEW_LATE if any(s.goes_on or s.running for s in series) else 0
    values = late_values(means, few) or late_values([curve for s in series for curve in s.unfinished], few) or [0, 1]
    if zero:
        points = [point for s in series for point in s.mean.values() if point.n > 3]
        values += [0.0, *(end for point in points for end in (point.low, point.high) if end is not None)]
    margin = 0.04 * (max(values) - min(values)) or 0.01
    scale = {"domain": [min(values) - margin, max(values) + margin], "nice": False, "zero": False}
    return {"title": key, "scale": scale, "axis": {"tickCount": 5, "format": "%" if key.startswith("share") else ""}}


def late_values(curves: Iterable[Curve], few: float) -> list[float]:
    """The values after a tenth of each curve; all of them where a curve has fewer than `few` after it."""
    curves = [curve for curve in curves if curve]
    late = [[value for i, value in curve.items() if i > 0.1 * max(curve)] for curve in curves]
    if min(map(len, late), default=0) < few:
        late = [[*curve.values()] for curve in curves]
    return [value for values in late for value in values]


def is_log(axis: Mapping[str, Any]) -> bool:
    return bool(axis["scale"].get("type") == "log")


def is_loss(key: str) -> bool:
    return key == LOSS or key.endswith("loss")


def remarks(series: Sequence[Series], key: str) -> str:
    """What a caption adds: that a part lies above the axis, and what a cross is."""
    top = value_axis(series, key)["scale"]["domain"][1]
    above = is_loss(key) and any(point.mean > top for s in series for point in s.mean.values())
    start = " The start of the run lies above the axis." if above else ""
    diverged = any(s.diverged for s in series)
    return start + (" A thin line that ends in a cross is a run that diverged." if diverged else "")


# -----------------------------------------------------------------------------
# Learning rates, differences


def final_chart(rows: list[Row], names: Iterable[str], title: str) -> Spec:
    """Final losses over doublings of x: a line for each of `names`, with a bar at each value. rows: setting, x, value,
    low, high, n, and ringed where the value has a ring. title: of the x axis."""
    series = [Series(name, style, {}) for name, style in styles_of_names(names).items()]
    ticks = sorted({row["x"] for row in rows})
    axis = {"values": ticks, "labelExpr": "format(datum.value, '~g')", "labelOverlap": True}
    place = {s.name: i - (len(series) - 1) / 2 for i, s in enumerate(series)}  # bars at one x stand side by side
    step = min(1.03, 1.12 ** (1 / len(series)))
    rows = [{**row, "drawn": row["x"] * step ** place[row["setting"]]} for row in rows]
    base = {
        "x": quantity("drawn", title=title, scale={"type": "log", "base": 2, "nice": False, "padding": 12}, axis=axis),
        "y": quantity("value", title="final " + LOSS, scale={"zero": False}),
        "color": colours(series, outline=0),
    }
    tooltip = tooltips("setting:N", "x:~g", "value:.4f", "low:.4f", "high:.4f", "n:Q", x=title)
    of_points = base | {"shape": symbols(series), "tooltip": tooltip}
    layers = [
        marks("rule", base | ENDS),
        *lines(base, series),
        marks("point", of_points, size=45, filled=True, opacity=1),
    ]
    if any(row.get("ringed") for row in rows):  # Vega warns of a layer without rows
        layers.append(marks("point", base, where("datum.ringed"), size=160, filled=False, opacity=1))
    return {
        "layer": layers, "data": {"name": "rows"}, "datasets": {"rows": rows}, "width": "container", "height": 360,
        "usermeta": palette(series),
    }  # fmt: skip


def difference_chart(family: Family) -> Spec:
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
    pair = f"A − {names[family.against]}" if family.against else "A − B"
    title = ["difference in lowest validation loss", f"({pair}, nats per token; left of 0: A is lower)"]
    axis = {"tickCount": 8, "titleAnchor": "end"}  # a narrow page cuts it else
    of_pair = {"y": nominal("pair", sort=[mean["pair"] for mean in means], title=None)}
    difference = {"x": quantity("difference", title=title, axis=axis)}
    tooltip = {"tooltip": tooltips("pair:N", "run:N", "difference:.4f", "A:.4f", "B:.4f")}
    dots = marks("point", of_pair | difference | tooltip, filled=True, size=45, opacity=0.55)
    layers = [line_at_zero("x"), dots | {"data": {"name": "pairs"}}]
    ends = {"x": quantity("low"), "x2": {"field": "high"}}
    if (least := family.asked.least) is not None:
        ground = marks("rect", ends, color="#888888", opacity=0.12)
        layers.insert(0, ground | {"data": {"values": [{"low": -least, "high": least}]}})
    base = of_pair | {"tooltip": tooltips("pair:N", "verdict on A:N", "mean:.4f", "low:.4f", "high:.4f", "n:Q")}
    if any(mean["low"] is not None for mean in means):  # a single pair has no interval
        layers.append(marks("rule", base | ends, where("isValid(datum.low)"), strokeWidth=3))
    for told in sorted({mean["told"] for mean in means}, reverse=True):  # Vega warns of a layer without rows
        which = where("datum.told" if told else "!datum.told")
        at_mean = base | {"x": quantity("mean")}
        layers.append(marks("point", at_mean, which, shape="diamond", filled=told, size=110, opacity=1))
    return {
        "layer": layers, "data": {"name": "means"}, "datasets": {"pairs": points, "means": means},
        "width": "container", "height": 34 * len(means),
    }  # fmt: skip


def head_chart(rows: list[Row], key: str) -> Spec:
    """A heat map by layer and head. rows: layer, head, value."""
    colour = quantity("value", title=None, scale={"scheme": "viridis"}, legend={"format": "~g"})
    x = {"field": "head", "type": "ordinal", "axis": {"labelAngle": 0}}
    y = {"field": "layer", "type": "ordinal"}
    cells = {"x": x, "y": y, "color": colour, "tooltip": tooltips("layer:Q", "head:Q", "value:.5g", value=key)}
    about = {"data": {"name": "heads"}, "datasets": {"heads": rows}, "title": key}
    return {**marks("rect", cells), **about, "width": "container", "height": 200}
