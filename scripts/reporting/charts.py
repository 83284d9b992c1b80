"""How a report draws a sweep: figures by matplotlib, for paper, and Vega-Lite charts by Altair, for the page."""

import io
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any

import altair as alt
import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter

from scripts.reporting.statistics import Comparison, Point, Replicate, mean_curve

LOSS = "validation loss (nats per token)"
OKABE_ITO = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
SYMBOLS = [("o", "circle"), ("s", "square"), ("^", "triangle-up"), ("D", "diamond"), ("v", "triangle-down"),
           ("P", "cross"), ("<", "triangle-left")]  # fmt: skip
DASHES = [[], [6, 2], [2, 2], [8, 2, 2, 2], [4, 1], [1, 2], [8, 2, 2, 2, 2, 2]]


@dataclass(frozen=True)
class Style:
    """How a setting is drawn: dark is its colour on a dark ground. Colour is never the only sign."""

    colour: str
    dark: str
    marker: str
    symbol: str
    dashes: list[int]


def styles(parts: Mapping[str, Mapping[str, str]]) -> dict[str, Style]:
    """parts: part -> {setting: its name in the part}. Names that differ in one number have ordered colours (viridis),
    the same for the same number in every part; others have Okabe and Ito's."""
    scales: dict[str, list[float]] = {}
    for names in parts.values():
        for key, value in filter(None, map(ordered_value, names.values())):
            scales[key] = sorted({*scales.get(key, []), value})
    found, viridis = {}, matplotlib.colormaps["viridis"]
    for names in parts.values():
        for i, (setting, name) in enumerate(names.items()):
            ordered = ordered_value(name)
            if ordered is not None and len(scales[ordered[0]]) > 2:
                i = scales[ordered[0]].index(ordered[1])
                place = i / (len(scales[ordered[0]]) - 1)
                colour, dark = (matplotlib.colors.to_hex(viridis(x)) for x in (0.88 * place, 0.3 + 0.7 * place))
            else:
                colour = OKABE_ITO[i % len(OKABE_ITO)]
                dark = "#DDDDDD" if colour == "#000000" else colour
            dashes = DASHES[(i + i // len(OKABE_ITO)) % len(DASHES)]  # past the colours, another pairing of the two
            found[setting] = Style(colour, dark, *SYMBOLS[i % len(SYMBOLS)], dashes)
    return found


def ordered_value(name: str) -> tuple[str, float] | None:
    """("p", 2.5) of "p=2.5"; None of any other name."""
    key, equals, text = name.partition("=")
    try:
        return (key, float(text)) if equals else None
    except ValueError:
        return None


@dataclass(frozen=True)
class Series:
    """A setting as a figure shows it. curves: of each run that is done, iteration -> val/loss; seconds: of each;
    diverged: the curves of runs that diverged, which are no part of the mean and set no axis."""

    name: str
    style: Style
    curves: Mapping[Replicate, Mapping[int, float]]
    seconds: Sequence[float]
    diverged: Mapping[Replicate, Mapping[int, float]] = field(default_factory=dict)

    @property
    def mean(self) -> dict[int, Point]:
        return mean_curve(self.curves.values())


def replicate_name(replicate: Replicate) -> str:
    seed, fold = replicate
    return f"seed {seed}" if fold is None else f"fold {fold}, seed {seed}"


# -----------------------------------------------------------------------------
# Figures for paper


def draw_part(series: Sequence[Series], title: str) -> Iterator[tuple[str, Figure, str]]:
    """The paper's three figures of a part: (kind, figure, caption)."""
    counts = sorted({len(s.curves) for s in series})
    timed = [s for s in series if s.seconds]
    n = f"n = {' to '.join(str(c) for c in dict.fromkeys([counts[0], counts[-1]]))} runs a setting"
    title = textwrap.fill(title, 70)
    yield "loss", *draw_loss(series, title, n)
    if timed:
        yield "time", *draw_time(timed, title, n)
    yield "folds", *draw_folds(series, title)


def draw_metrics(groups: Mapping[str, Sequence[Series]], key: str, title: str, point: str) -> tuple[Figure, str]:
    """Curves of other metrics than the loss, averaged over runs: a panel a metric (key -> series), as of the layers.
    point: what one of the curve's is."""
    columns = min(4, len(groups))
    rows = -(-len(groups) // columns)
    figure = new_figure(max(7, 1 + 2.5 * columns), 2.2 + 2.4 * rows)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    lines: dict[str, Line2D] = {}
    every = [s for series in groups.values() for s in series]
    values = [value for s in every for value in values_of(s)]
    steep = min(values, default=0) > 0 and max(values) > 50 * min(values)
    for axes, (name, series) in zip(grid.flat, groups.items(), strict=False):
        lines |= {s.name: draw_line(axes, s) for s in series}
        axes.set_title(name if len(groups) > 1 else "", fontsize="small")
        if steep:
            log_scale(axes, "y")
    for axes in grid.flat[len(groups) :]:
        axes.set_visible(False)
    figure.legend(list(lines.values()), list(lines), loc="outside right center", frameon=False, fontsize="small")
    figure.suptitle(textwrap.fill(title, 70), x=0.01, ha="left")
    figure.supxlabel("iteration", fontsize="medium")
    figure.supylabel(key, fontsize="medium")
    about = ABOUT_DIVERGED * any_diverged(every)
    if key.endswith("loss") and not steep:
        late = [p.mean for s in every for i, p in s.mean.items() if i > 0.1 * max(s.mean)]
        grid[0, 0].set_ylim(*padded(late or values))
        about = " The first tenth may lie above the axis." + about
    return figure, f"{key} by iteration, averaged over folds and seeds; {point}.{about}"


def log_scale(axes: Axes, which: str, base: float = 10, ticks: Mapping[float, str] | None = None) -> None:
    """A logarithmic x or y axis with plain numbers, or `ticks`. (matplotlib's own are TeX, and titles are no TeX.)"""
    (axes.set_xscale if which == "x" else axes.set_yscale)("log", base=base)
    axis = axes.xaxis if which == "x" else axes.yaxis
    if ticks is not None:
        axis.set_ticks(list(ticks), list(ticks.values()))
    else:
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def draw_loss(series: Sequence[Series], title: str, n: str) -> tuple[Figure, str]:
    figure = new_figure(7, 4.6)
    axes = figure.add_subplot()
    for s in series:
        draw_line(axes, s)
        ends = [(math.nan, math.nan) if p.low is None or p.high is None else (p.low, p.high) for p in s.mean.values()]
        low, high = [low for low, _ in ends], [high for _, high in ends]
        axes.fill_between(list(s.mean), low, high, color=s.style.colour, alpha=0.1, linewidth=0)
    limits = loss_limits(series)
    axes.set(xlabel="iteration", ylabel=LOSS, ylim=limits)
    axes.set_title(title, loc="left")
    axes.legend(frameon=False, fontsize="small")
    caption = f"Validation loss by iteration, averaged over folds and seeds ({n}); band: 95 % t interval of the mean."
    if any(loss > limits[1] for curve in all_curves(series) for loss in curve.values()):
        caption += " The first evaluations lie above the axis."
    return figure, caption + ABOUT_DIVERGED * any_diverged(series)


def draw_time(series: Sequence[Series], title: str, n: str) -> tuple[Figure, str]:
    figure = new_figure(7, 4.2)
    axes = figure.add_subplot()
    key, names = shared_key([s.name for s in series])
    boxes = axes.boxplot(
        [s.seconds for s in series], tick_labels=names, whis=1.5, patch_artist=True, widths=0.6,
        medianprops={"color": "black"}, flierprops={"marker": "o", "markersize": 4, "markerfacecolor": "none"},
        showmeans=True, meanprops={"marker": "D", "markerfacecolor": "white", "markeredgecolor": "black"},
    )  # fmt: skip
    for box, s in zip(boxes["boxes"], series, strict=True):
        box.set(facecolor=s.style.colour, alpha=0.6)
    axes.set(xlabel=key, ylabel="training time (s)")
    axes.set_title(title, loc="left")
    if sum(map(len, names)) > 70:
        axes.tick_params(axis="x", rotation=30)
    return figure, f"Training time ({n}): median, box to the quartiles, whiskers to 1.5 IQR, outliers; diamond: mean."


def draw_folds(series: Sequence[Series], title: str) -> tuple[Figure, str]:
    def panel_of(replicate: Replicate) -> tuple[str, int]:
        seed, fold = replicate
        return ("seed", seed) if fold is None else ("fold", fold)

    def of(panel: tuple[str, int], curves: Mapping[Replicate, Any]) -> dict[Replicate, Any]:
        return {replicate: curve for replicate, curve in curves.items() if panel_of(replicate) == panel}

    panels = sorted({panel_of(replicate) for s in series for replicate in [*s.curves, *s.diverged]})
    columns = min(5, len(panels))
    rows = -(-len(panels) // columns)
    figure = new_figure(max(7, 2 + 2 * columns), 1.4 + 1.9 * rows)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True)
    lines: dict[str, Line2D] = {}
    for axes, panel in zip(grid.flat, panels, strict=False):
        here = [replace(s, curves=of(panel, s.curves), diverged=of(panel, s.diverged)) for s in series]
        here = [s for s in here if s.curves or s.diverged]
        lines |= {s.name: draw_line(axes, s) for s in here}
        axes.set_title(f"{panel[0]} {panel[1]}", fontsize="small")
        axes.set_ylim(loss_limits(here))
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    names = [s.name for s in series]
    figure.legend([lines[n] for n in names], names, loc="outside right center", frameon=False, fontsize="small")
    figure.suptitle(title, x=0.01, ha="left")
    figure.supxlabel("iteration", fontsize="medium")
    figure.supylabel(LOSS, fontsize="medium")
    return figure, f"Validation loss by iteration for each {panels[0][0]}; every panel has its own vertical axis."


STABILITY_CAPTION = (
    "Final validation loss by learning rate: mean of the runs that are done, bars from lowest to highest."
)


def draw_stability(finals: Mapping[str, Mapping[float, Sequence[float]]], title: str) -> Figure:
    """finals: variant -> learning rate -> final losses."""
    figure = new_figure(7, 4.6)
    axes = figure.add_subplot()
    for i, (variant, of) in enumerate(finals.items()):
        known = {rate: losses for rate, losses in of.items() if losses}
        means = [fmean(losses) for losses in known.values()]
        bars = [[mean - min(losses) for mean, losses in zip(means, known.values(), strict=True)],
                [max(losses) - mean for mean, losses in zip(means, known.values(), strict=True)]]  # fmt: skip
        dashes = DASHES[i % len(DASHES)]
        axes.errorbar(
            list(known), means, bars, color=OKABE_ITO[i % len(OKABE_ITO)], marker=SYMBOLS[i % len(SYMBOLS)][0],
            markersize=4, linewidth=1.3, linestyle=(0, dashes) if dashes else "-", capsize=2, label=variant,
        )  # fmt: skip
    axes.set(xlabel="learning rate", ylabel="final " + LOSS)
    rates = sorted({rate for of in finals.values() for rate in of})
    log_scale(axes, "x", 2, {rate: f"{rate:g}" for rate in rates})
    axes.set_title(textwrap.fill(title, 70), loc="left")
    axes.legend(frameon=False, fontsize="small")
    return figure


def draw_line(axes: Axes, s: Series) -> Line2D:
    losses = [point.mean for point in s.mean.values()]
    line = axes.plot(
        list(s.mean), losses, label=s.name, linewidth=1.3, color=s.style.colour, marker=s.style.marker, markersize=4,
        linestyle=(0, s.style.dashes) if s.style.dashes else "-", markevery=max(1, len(losses) // 40),
    )  # fmt: skip
    for curve in s.diverged.values():
        axes.plot(list(curve), list(curve.values()), linewidth=0.7, color=s.style.colour, marker="x", markevery=[-1])
    return line[0]


ABOUT_DIVERGED = " A thin line that ends in a cross is a run that diverged."


def any_diverged(series: Sequence[Series]) -> bool:
    return any(s.diverged for s in series)


def all_curves(series: Sequence[Series]) -> list[Mapping[int, float]]:
    """Of the runs that are done; where there is none, of those that diverged."""
    done = [curve for s in series for curve in s.curves.values()]
    return done or [curve for s in series for curve in s.diverged.values()]


def values_of(s: Series) -> list[float]:
    """All that draw_line draws, where finite."""
    drawn = [point.mean for point in s.mean.values()] + [v for curve in s.diverged.values() for v in curve.values()]
    return [value for value in drawn if math.isfinite(value)]


def loss_limits(series: Sequence[Series]) -> tuple[float, float]:
    """The range of all curves past a tenth of the run: before it, the loss falls from ln V and would set the scale."""
    curves = all_curves(series)
    return padded([loss for curve in curves for i, loss in curve.items() if i > 0.1 * max(curve)] or [0.0, 1.0])


def full_range(series: Sequence[Series]) -> tuple[float, float]:
    return padded([value for curve in all_curves(series) for value in curve.values()])


def padded(values: Sequence[float]) -> tuple[float, float]:
    margin = 0.04 * (max(values) - min(values)) or 0.01
    return min(values) - margin, max(values) + margin


def shared_key(names: Sequence[str]) -> tuple[str, list[str]]:
    """("p", ["2", "3"]) of ["p=2", "p=3"]; ("", names) where the key differs."""
    keys = {name.partition("=")[0] for name in names if name.count("=") == 1}
    if len(keys) != 1 or not all(name.count("=") == 1 for name in names):
        return "", list(names)
    return keys.pop(), [name.partition("=")[2] for name in names]


def new_figure(width: float, height: float) -> Figure:
    rc = {"svg.hashsalt": "nanoqk", "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": "medium"}
    rc["text.parse_math"] = False
    matplotlib.rcParams.update({**matplotlib.rcParamsDefault, **rc, "figure.titlesize": "medium"})  # not the user's own
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)  # no display, no global state
    return figure


def image(figure: Figure, kind: str) -> bytes:
    """The file of a figure: the same bytes for the same figure."""
    file = io.BytesIO()
    figure.savefig(file, format=kind, dpi=160, metadata={"Date": None} if kind == "svg" else None)
    return file.getvalue()


# -----------------------------------------------------------------------------
# Charts for the page


def curve_chart(series: Sequence[Series], title: str = LOSS) -> alt.LayerChart:
    """Curves of the mean or of single folds, with a legend that switches settings off and on."""
    names = [s.name for s in series]
    rows: list[dict[str, Any]] = []
    for s in series:
        for i, point in s.mean.items():
            rows.append({"setting": s.name, "of": "mean", "iteration": i, "loss": point.mean, **asdict(point)})
        for replicate, curve in s.curves.items():
            of = replicate_name(replicate)
            rows += [{"setting": s.name, "of": of, "iteration": i, "loss": loss} for i, loss in curve.items()]
        for replicate, curve in s.diverged.items():
            of = f"{replicate_name(replicate)}, diverged"
            rows += [{"setting": s.name, "of": of, "iteration": i, "loss": loss} for i, loss in curve.items()]
    choices = ["mean", *dict.fromkeys(row["of"] for row in rows if row["of"] != "mean"), "every run"]
    band = alt.param(name="band", value=True, bind=alt.binding_checkbox(name="95 % interval of the mean "))
    which = alt.param(name="which", value="mean", bind=alt.binding_select(options=choices, name="Curves "))
    everything = [{"setting": name} for name in names]
    shown = alt.selection_point(
        name="shown", fields=["setting"], bind="legend", toggle="true", clear=False, empty=False, value=everything
    )
    zoom = alt.selection_interval(name="zoom", bind="scales")
    chosen = "which === 'every run' ? datum.of !== 'mean' : datum.of === which"
    low, high = loss_limits(series) if title == LOSS else full_range(series)
    ends = [min(row["iteration"] for row in rows), max(row["iteration"] for row in rows)]

    def scale(values: Sequence[Any]) -> alt.Scale:
        return alt.Scale(domain=names, range=list(values))

    base = (
        alt.Chart(alt.Data(values=rows))
        .transform_filter(shown)
        .transform_filter(chosen)
        .encode(
            x=alt.X("iteration:Q", title="iteration", axis=alt.Axis(tickCount=8), scale=alt.Scale(domain=ends)),
            color=alt.Color("setting:N", title=None, scale=alt.Scale(domain=names), legend=alt.Legend(symbolOpacity=1)),
        )
    )
    loss = alt.Y("loss:Q", title=title, scale=alt.Scale(domain=[low, high], nice=False, zero=False))
    dashes = [s.style.dashes or [1, 0] for s in series]
    bands = base.transform_filter("band && isValid(datum.low)").mark_area(opacity=0.1, clip=True)
    line = base.mark_line(clip=True).encode(
        y=loss, detail="of:N", strokeDash=alt.StrokeDash("setting:N", title=None, scale=scale(dashes))
    )
    tooltip = [
        alt.Tooltip("setting:N"), alt.Tooltip("of:N", title="curve"), alt.Tooltip("iteration:Q", format=","),
        alt.Tooltip("loss:Q", title="loss" if title == LOSS else title, format=".4f"),
        alt.Tooltip("low:Q", title="95 % from", format=".4f"), alt.Tooltip("high:Q", title="95 % to", format=".4f"),
        alt.Tooltip("n:Q", title="runs"),
    ]  # fmt: skip
    points = base.mark_point(size=45, filled=True, opacity=1, clip=True).encode(
        y=loss, tooltip=tooltip,
        shape=alt.Shape("setting:N", title=None, scale=scale([s.style.symbol for s in series])),
    )  # fmt: skip
    layers = alt.layer(bands.encode(y="low:Q", y2="high:Q"), line, points).add_params(which, band, shown, zoom)
    return layers.properties(width="container", height=360, usermeta=palette(series))


def time_chart(series: Sequence[Series]) -> alt.LayerChart:
    names = [s.name for s in series]
    rows = [{"setting": s.name, "seconds": value} for s in series for value in s.seconds]
    base = alt.Chart(alt.Data(values=rows)).encode(y=alt.Y("setting:N", sort=names, title=None))
    times = [value for s in series for value in s.seconds] or [0.0]
    x = alt.X(
        "seconds:Q", title="training time (s)", scale=alt.Scale(domain=[min(times), max(times)], nice=True, zero=False)
    )
    boxes = base.mark_boxplot(extent=1.5, size=14).encode(
        x=x, color=alt.Color("setting:N", scale=alt.Scale(domain=names), legend=None)
    )
    means = base.mark_point(shape="diamond", filled=True, size=70, color="white", stroke="black", opacity=1).encode(
        x="mean(seconds):Q", tooltip=[alt.Tooltip("setting:N"), alt.Tooltip("mean(seconds):Q", format=",.2f")]
    )
    return alt.layer(boxes, means).properties(width="container", height=26 * len(names), usermeta=palette(series))


def stability_chart(finals: Mapping[str, Mapping[float, Sequence[float]]]) -> alt.LayerChart:
    names = list(finals)
    rows = [
        {"variant": variant, "rate": rate, "loss": fmean(of), "low": min(of), "high": max(of), "n": len(of)}
        for variant, losses in finals.items()
        for rate, of in losses.items()
        if of
    ]  # fmt: skip
    every = range(len(names))
    base = alt.Chart(alt.Data(values=rows)).encode(
        x=alt.X("rate:Q", title="learning rate", scale=alt.Scale(type="log", base=2)),
        color=alt.Color("variant:N", title=None, scale=alt.Scale(domain=names)),
    )
    loss = alt.Y("loss:Q", title="final " + LOSS, scale=alt.Scale(zero=False))
    dashes = alt.Scale(domain=names, range=[DASHES[i % len(DASHES)] or [1, 0] for i in every])
    shapes = alt.Scale(domain=names, range=[SYMBOLS[i % len(SYMBOLS)][1] for i in every])
    line = base.mark_line().encode(y=loss, strokeDash=alt.StrokeDash("variant:N", title=None, scale=dashes))
    bars = base.mark_rule().encode(y=alt.Y("low:Q"), y2="high:Q")
    points = base.mark_point(size=45, filled=True, opacity=1).encode(
        y=loss, shape=alt.Shape("variant:N", title=None, scale=shapes),
        tooltip=["variant:N", "rate:Q", *(alt.Tooltip(f"{k}:Q", format=".4f") for k in ("loss", "low", "high")), "n:Q"],
    )  # fmt: skip
    colours = [OKABE_ITO[i % len(OKABE_ITO)] for i in every]
    shades = {"light": colours, "dark": ["#DDDDDD" if colour == "#000000" else colour for colour in colours]}
    return alt.layer(bars, line, points).properties(width="container", height=360, usermeta=shades)


def difference_chart(family: Sequence[Comparison]) -> alt.LayerChart:
    points, means, names = [], [], []
    for c in (c for c in family if c.point is not None):
        (part_a, _, a), (part_b, _, b) = c.a.rpartition("/"), c.b.rpartition("/")
        names.append(f"{a} − {b}" if part_a == part_b else f"{c.a} − {c.b}")
        for replicate, (x, y) in c.values.items():
            points.append({"pair": names[-1], "run": replicate_name(replicate), "difference": x - y, "A": x, "B": y})
        assert c.point is not None
        means.append({"pair": names[-1], **asdict(c.point)})
    y = alt.Y("pair:N", sort=names, title=None, axis=alt.Axis(labelLimit=420))
    x_title = "difference in lowest validation loss (A − B; left of 0: A is lower)"
    zero = alt.Chart(alt.Data(values=[{"zero": 0}])).mark_rule(strokeDash=[4, 3]).encode(x="zero:Q")
    dots = alt.Chart(alt.Data(values=points)).mark_point(filled=True, size=45, opacity=0.55).encode(
        y=y, x=alt.X("difference:Q", title=x_title, axis=alt.Axis(tickCount=8)),
        tooltip=["pair:N", "run:N", *(alt.Tooltip(f"{key}:Q", format=".4f") for key in ("difference", "A", "B"))],
    )  # fmt: skip
    base = alt.Chart(alt.Data(values=means)).encode(
        y=y, tooltip=["pair:N", *(alt.Tooltip(f"{key}:Q", format=".4f") for key in ("mean", "low", "high")), "n:Q"]
    )
    bars = base.transform_filter("isValid(datum.low)").mark_rule(strokeWidth=3).encode(x="low:Q", x2="high:Q")
    centres = base.mark_point(shape="diamond", filled=True, size=110, opacity=1).encode(x="mean:Q")
    intervals = [bars] if any(mean["low"] is not None for mean in means) else []  # of single pairs there are none
    return alt.layer(zero, dots, *intervals, centres).properties(width="container", height=34 * len(names))


def palette(series: Sequence[Series]) -> dict[str, list[str]]:
    """The page makes one of them the chart's `config.range.category`."""
    return {"light": [s.style.colour for s in series], "dark": [s.style.dark for s in series]}
