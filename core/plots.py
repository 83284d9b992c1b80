"""Pictures of a record, as PNG."""

import io
from collections.abc import Mapping
from pathlib import Path

from core.record import Metrics

COLOURS = ("#0072B2", "#D55E00", "#009E73")  # Okabe and Ito's


def heat_maps(tables: Mapping[str, list[list[float]]]) -> bytes:
    """Rows of layers and columns of heads, side by side, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(tables), 3.5), layout="constrained")
    for axes, (title, rows) in zip(figure.subplots(1, len(tables), squeeze=False)[0], tables.items(), strict=True):
        figure.colorbar(axes.imshow(rows, aspect="auto"), ax=axes)
        axes.set(title=title, xlabel="head", ylabel="layer")
        axes.locator_params(integer=True)
    png = io.BytesIO()
    figure.savefig(png, dpi=100)
    return png.getvalue()


def plot(metrics_path: Path, png_path: Path, title: str, curves: Mapping[str, str]) -> None:
    """Draw losses of a metrics.jsonl as a PNG. curves: key -> the marker of its points."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")  # without pyplot: no display, no global state
    axes = figure.add_subplot()
    lines = Metrics.read(metrics_path)
    for (key, marker), colour in zip(curves.items(), COLOURS, strict=False):
        points = [(line["iter"], line[key]) for line in lines if line.get(key) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=4, label=key)
    axes.set(xlabel="iteration", ylabel="loss (nats per token)")
    axes.set_title(title, parse_math=False)  # a "$" in it is a dollar
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    figure.savefig(png_path, dpi=150)
