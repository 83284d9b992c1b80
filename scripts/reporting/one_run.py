"""The page of one run, done or not: its curves, attention by layer and head, samples, the end of its log, settings."""

import html
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from core.files import open_regular
from core.record import Lines, is_number
from core.rundir import read_settings
from core.schema import declared, flatten, require, show, validate
from model.options import GPTConfig
from scripts.reporting.charts import Figure, Row, Series, curve_chart, head_chart, styles_of_names
from scripts.reporting.figures import file_name
from scripts.reporting.page import Markup, Section
from scripts.reporting.runs import Curve, Run, Sweep, kept, read_run, thinned
from scripts.reporting.tables import Table
from sweeps.plan import PlannedRun
from sweeps.status import FINAL, State, state_of
from training.config import stored_config
from training.metrics import METRICS, in_words, shown_in

SAMPLES = 20  # the last ones
LOG = 8192  # bytes of its end


class RunFiles:
    """A run's files, which grow. update() reads what is new."""

    def __init__(self, sweep_dir: Path, plan: PlannedRun) -> None:
        self.sweep_dir, self.plan, self.state = sweep_dir, plan, State("pending")
        folder = sweep_dir / plan.id
        self.metrics = Lines(folder / "metrics.jsonl")
        self.diagnostics = Lines(folder / "diagnostics.jsonl", keep=1)
        self.samples = Lines(folder / "samples.jsonl", keep=SAMPLES)
        self.version = 0
        self._row: tuple[int, Run] | None = None

    def update(self) -> int:
        """A number that grows where something has changed."""
        before, self.state = self.state, state_of(self.sweep_dir, self.plan)
        new = [lines.update() for lines in (self.metrics, self.diagnostics, self.samples)]
        self.version += self.version == 0 or self.state != before or any(new)
        return self.version

    def row(self, sweep: Sweep) -> Run:
        """The run in its sweep's report; one that is not at its end with its curves so far."""
        if self._row is None or self._row[0] != self.version:
            run = read_run(self.sweep_dir, self.plan, sweep)
            if self.state.state not in FINAL and not self.state.another:
                curves = {key: self.metrics.curve(key) for key in {key for line in self.metrics.lines for key in line}}
                drawn = {key: curve for key, curve in kept({}, curves, sweep)[1].items() if curve}
                run = Run(run.id, run.settings, run.seed, run.fold, run.config, run.state, {}, drawn)
            self._row = (self.version, run)
        return self._row[1]

    @property
    def imported(self) -> bool:
        """scripts/import_checkpoint.py wrote it: its config says nothing of how it was trained."""
        return self.state.state == "done" and not self.metrics.lines

    def curves(self) -> dict[str, Curve]:
        """What is shown of it, thinned."""
        found = {key: self.metrics.curve(key) for key in shown_in("live")}
        return {key: curve if key == "val/loss" else thinned(curve, METRICS[key].thins)
                for key, curve in found.items() if curve}  # fmt: skip

    def progress(self) -> tuple[int, float | None, tuple[float, int] | None]:
        """Iteration, seconds left, lowest loss and its iteration."""
        losses = self.metrics.curve("val/loss")
        step = max((line["iter"] for line in self.metrics.lines), default=0)
        speed = next(reversed(self.metrics.curve("tok_per_sec").values()), 0.0)
        tokens = (self.plan.config.max_iters - step) * self.plan.config.tokens_per_iter
        left = tokens / speed if self.state.state == "running" and speed > 0 else None
        return step, left, min(((loss, i) for i, loss in losses.items()), default=None)

    def heads(self) -> dict[str, list[Row]]:
        """The last line of diagnostics.jsonl, as rows of heat maps."""
        rows: dict[str, list[Row]] = {key: [] for key in shown_in("heads")}
        for name, value in self.diagnostics.lines[-1].items() if self.diagnostics.lines else ():
            found = re.fullmatch(r"(.+)/layer_(\d{1,5})/head_(\d{1,5})", name)
            if found and found[1] in rows and is_number(value):
                rows[found[1]].append({"layer": int(found[2]), "head": int(found[3]), "value": value})
        return {key: of for key, of in rows.items() if of}

    def log(self) -> str:
        """The end of the log of a run that did not end well."""
        if self.state.state not in ("failed", "diverged", "stopped"):
            return ""
        logs, run = self.sweep_dir / "logs", self.sweep_dir / self.plan.id
        for file, within in ((logs / f"{run.name}.log", self.sweep_dir), (run / "train.log", run)):
            with suppress(OSError), open_regular(file, within=within) as opened:
                opened.seek(max(0, file.stat().st_size - LOG))
                return opened.read().decode(errors="replace")
        return ""


def single_run(path: Path) -> RunFiles:
    """A run directory. Raises: ConfigError."""
    require(not (path / "plan.jsonl").is_file(), f"run={path} is a sweep's directory: write sweep_dir={path}")
    config = stored_config(read_settings(path))
    validate(config)
    return RunFiles(path.parent, PlannedRun(path.name, [path.name], config.seed, None, [], config))


def headline(run: RunFiles) -> str:
    step, left, best = run.progress()
    parts = [run.state.state + (f": {run.state.reason}" if run.state.reason else "")]
    if run.imported:
        parts.append("imported weights")
    else:
        parts.append(f"iteration {step:,} of {run.plan.config.max_iters:,}")
    if left is not None:
        parts.append(f"{duration(left)} left")
    if best is not None:
        parts.append(f"lowest validation loss {best[0]:.4f} at iteration {best[1]:,}")
    return "; ".join(parts)


def duration(seconds: float) -> str:
    minutes = math.ceil(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def run_outline(run: RunFiles) -> list[Section]:
    """What the page says, in order."""
    curves, sections = run.curves(), []
    losses = {name: curves.pop(key) for name, key in NAMES.items() if key in curves}
    goes_on = run.state.state not in FINAL
    if losses:
        sections.append(Section("Loss", [curves_figure("loss", losses, "loss", goes_on, LOSSES)]))
    if curves:
        figures = [curves_figure(file_name(key), {key: of}, in_words(key), goes_on) for key, of in curves.items()]
        sections.append(Section("Other metrics", figures, grid=True))
    if heads := run.heads():
        title = f"Attention heads at iteration {run.diagnostics.lines[-1]['iter']:,}"
        maps = [Figure(f"heads_{file_name(key)}", key, head_chart(rows, in_words(key)), "")
                for key, rows in heads.items()]  # fmt: skip
        sections.append(Section(title, maps, grid=True))
    if run.samples.lines:
        sections.append(Section("Samples", [*map(sample, reversed(run.samples.lines))]))
    if log := run.log():
        sections.append(Section("The end of its log", [Markup(f"<pre>{html.escape(log)}</pre>")]))
    settings = flatten(asdict(run.plan.config))
    if run.imported:
        settings = {key: value for key, value in settings.items() if key.split(".")[0] in declared(GPTConfig)}
    table = Table(["setting", "value"], [[key, show(value)] for key, value in settings.items()], text_columns=2)
    return [*sections, Section("Settings", [table])]


NAMES = {"validation": "val/loss", "training": "train/loss"}
LOSSES = "In nats per token: validation loss over every held-out token, training loss of the updates' own batches."


def curves_figure(name: str, curves: Mapping[str, Curve], title: str, goes_on: bool, caption: str = "") -> Figure:
    look = styles_of_names(curves)
    series = [Series(key, look[key], {(0, None): curve}, goes_on=goes_on) for key, curve in curves.items()]
    spec = curve_chart(series, title)
    if len(series) == 1:
        spec |= {"height": 220, "config": {"legend": {"disable": True}}}
    return Figure(name, title, spec, caption)


def sample(line: Mapping[str, object]) -> Markup:
    text = html.escape(str(line.get("text")).encode(errors="replace").decode())  # lone surrogates are no text
    return Markup(f"<details><summary>Iteration {line['iter']}</summary><pre>{text}</pre></details>")
