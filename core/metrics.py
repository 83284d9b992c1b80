"""metrics.jsonl: the record of a run. What is read off it: the spike score, plots."""

import hashlib
import io
import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from core.files import finite, parse_object, write_atomic


class Metrics:
    """metrics.jsonl, diagnostics.jsonl or samples.jsonl: one JSON object a line, "iter" first.

    It is opened to go on from iteration `step`: the lines before it stay, byte by byte; later,
    torn, doubled and damaged ones are dropped. kept: the number of lines at that point.
    """

    def __init__(self, path: Path, step: int) -> None:
        self.path, self._last = path, -math.inf
        self._digest = hashlib.sha256()  # of the lines so far
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        good = []
        for line in lines:
            if line.endswith(b"\n") and self._last < iter_of(line) < step:
                good.append(line)
                self._add(line, iter_of(line))
        if good != lines:
            write_atomic(path, b"".join(good))
        self.kept = len(good)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115

    def _add(self, line: bytes, step: float) -> None:
        self._last, self._digest_before_last = step, self._digest.copy()
        self._digest.update(line)

    def sha256(self, before: float = math.inf) -> str:
        """SHA-256 of the lines before iteration `before`. Only the last line may have that iteration or a later one."""
        return (self._digest if self._last < before else self._digest_before_last).hexdigest()

    def write(self, line: dict[str, Any]) -> None:
        """Append a line, handed to the OS on return. `None` values are dropped; nan and inf become null."""
        data = (json.dumps(finite({"iter": line["iter"], **line}), allow_nan=False) + "\n").encode()
        if self._file.write(data) != len(data):  # one write call: a line cannot be torn by a kill
            raise OSError(f"{self.path}: disk full")
        self._add(data, line["iter"])

    def sync(self) -> None:
        """Wait until the lines are on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    @staticmethod
    def read(path: Path) -> list[dict[str, Any]]:
        """The whole, undamaged lines of a metrics.jsonl, which may be growing. Raises: OSError."""
        lines = Lines(path, strict=True)
        lines.update()
        return lines.lines


def iter_of(line: bytes) -> float:
    try:
        return float(parse_object(line)["iter"])
    except (ValueError, TypeError, KeyError, OverflowError):
        return float("inf")


class Lines:
    """The lines of a JSONL file that may be growing. update() reads only what is new.

    Lines that are torn, damaged or without an iteration are dropped. strict: a file that cannot be read raises OSError;
    else it has no lines. keep: only so many of the last lines stay.
    """

    def __init__(self, path: Path, strict: bool = False, keep: int | None = None) -> None:
        self.path, self.strict, self.keep = path, strict, keep
        self.lines: list[dict[str, Any]] = []
        self._inode = self._offset = 0

    def update(self) -> bool:
        """Whether something has changed. A file that was replaced, as a resumed run does, is read from its start."""
        try:
            with open(self.path, "rb") as file:
                about = os.fstat(file.fileno())
                replaced = about.st_ino != self._inode or about.st_size < self._offset
                if replaced:
                    self.lines, self._inode, self._offset = [], about.st_ino, 0
                file.seek(self._offset)
                text = file.read()
        except OSError:
            if self.strict:
                raise
            gone = self._inode != 0
            self.lines, self._inode = [], 0
            return gone
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        for raw in whole.splitlines():
            with suppress(ValueError):
                line = parse_object(raw)
                if isinstance(line.get("iter"), int) and 0 <= line["iter"] < 2**53:
                    self.lines.append(line)
        if self.keep is not None:
            del self.lines[: -self.keep]
        return replaced or bool(whole)

    def curve(self, key: str) -> dict[int, float]:
        return {line["iter"]: line[key] for line in self.lines if is_number(line.get(key))}


def is_number(value: Any) -> bool:
    """Whether a chart can draw it."""
    return isinstance(value, int | float) and abs(value) < 1e100


def spike_score(losses: list[float], window: int = 1000, sigmas: float = 7.0, least: int = 30) -> float | None:
    """Percentage of losses at least `sigmas` standard deviations from the mean of the `window` before them (OLMo 2).

    None while no loss has `least` others before it. From running sums: exact to round-off for losses below 1e6.
    """
    import numpy as np

    if len(losses) <= least:
        return None
    values = np.array(losses) - np.mean(losses)  # small numbers: their squares round less
    i = np.arange(least, len(values))
    start = np.maximum(0, i - window)
    sums, squares = (np.concatenate([[0.0], np.cumsum(x)]) for x in (values, values**2))
    mean = (sums[i] - sums[start]) / (i - start)
    deviation = np.sqrt(np.maximum((squares[i] - squares[start]) / (i - start) - mean**2, 0))
    return 100 * float(np.mean((np.abs(values[i] - mean) >= sigmas * deviation) & (deviation > 1e-7)))


def line_at(path: Path, step: int) -> dict[str, Any]:
    """The line of iteration `step` in a file that Metrics wrote; {} where it has none."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return next((parse_object(line) for line in lines if line.startswith(b'{"iter": %d,' % step)), {})


def table_of(values: Mapping[str, Any], key: str) -> list[list[float]]:
    """The values KEY/layer_I/head_J of a line of diagnostics.jsonl, as rows of layers; [] where it has none."""
    rows: dict[str, list[float]] = {}
    for name, value in values.items():
        if name.startswith(f"{key}/layer_"):
            rows.setdefault(name.split("/")[-2], []).append(math.nan if value is None else value)
    return [*rows.values()]


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


def plot(metrics_path: Path, png_path: Path, title: str) -> None:
    """Draw the loss curves of a metrics.jsonl as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")  # without pyplot: no display, no global state
    axes = figure.add_subplot()
    lines = Metrics.read(metrics_path)
    for key, colour, marker in (("train/loss", "#0072B2", ""), ("val/loss", "#D55E00", "o")):  # Okabe and Ito's
        points = [(line["iter"], line[key]) for line in lines if line.get(key) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=4, label=key)
    axes.set(xlabel="iteration", ylabel="loss (nats per token)")
    axes.set_title(title, parse_math=False)  # a "$" in it is a dollar
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    figure.savefig(png_path, dpi=150)
