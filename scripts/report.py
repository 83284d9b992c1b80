"""A sweep's report: python scripts/report.py sweep=NAME [sweep_dir=PATH] [out=PATH]

Reads the files of a sweep (by default runs/NAME), done or not, and writes to results/NAME: runs.csv (a line a run),
table.md (every number, with its spread and its test), figures as SVG and PNG, report.html (one page to explore, without
network) and provenance.json. The same runs give the same bytes. Neither torch nor a GPU is needed.
"""

import csv
import html
import io
import json
import math
import re
import shlex
import string
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import altair as alt
import matplotlib
import vl_convert
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from scipy import stats

from sweeps.plan import PlannedRun, read_plan
from sweeps.status import STATES, State, read_words, state_of, sweep_directory, tally
from training.config import ConfigError, did_you_mean, flatten, refuse, require, show
from training.rundir import read_json, write_atomic

Replicate = tuple[int, int | None]  # seed, fold: what pairs two runs
Definition = Mapping[str, Any]

# -----------------------------------------------------------------------------
# Runs


@dataclass(frozen=True)
class Run:
    """A planned run as it is on the disk. summary: {} unless done or diverged. curve, if done: iteration -> loss."""

    plan: PlannedRun
    state: State
    summary: dict[str, Any] = field(default_factory=dict)
    curve: dict[int, float] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        return self.state.state == "done"

    @property
    def replicate(self) -> Replicate:
        return self.plan.seed, self.plan.fold


@dataclass(frozen=True)
class Sweep:
    """name: of its results. about: sweep.json. definition: about["sweep"], as in configs/sweep/."""

    name: str
    about: dict[str, Any]
    definition: Definition
    runs: list[Run]

    @property
    def settings(self) -> list[str]:
        return list(dict.fromkeys(setting for run in self.runs for setting in run.plan.settings))

    @property
    def parts(self) -> dict[str, list[str]]:
        """Part -> its settings; the only part of a sweep without parts is ""."""
        found: dict[str, list[str]] = {}
        for setting in self.settings:
            found.setdefault(setting.split("/")[0] if self.definition.get("parts") else "", []).append(setting)
        return found

    @property
    def title(self) -> str:
        return str(self.definition.get("title") or self.name)

    def title_of(self, part: str) -> str:
        about = (self.definition.get("parts") or {}).get(part, {}).get("title")
        return ": ".join(filter(None, [part, about])) or "Settings"

    def of(self, setting: str) -> dict[Replicate, Run]:
        """The runs of a setting, in the order of the plan."""
        return {run.replicate: run for run in self.runs if setting in run.plan.settings}

    def done(self, setting: str) -> list[Run]:
        return [run for run in self.of(setting).values() if run.done]

    def paper(self, setting: str) -> float | None:
        """The paper's number for a setting: its own, or that of the first pattern that matches."""
        numbers = self.definition.get("paper", {}).get("val_loss", {})
        return numbers.get(setting, next((v for key, v in numbers.items() if fnmatchcase(setting, key)), None))


def read_sweep(sweep_dir: Path, name: str) -> Sweep:
    """Raises: ConfigError where there is no sweep, or its files cannot be read."""
    try:
        plan = read_plan(sweep_dir)
    except (ValueError, TypeError, KeyError) as error:  # ConfigError has its own message
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"sweep_dir={sweep_dir} has a plan.jsonl that cannot be read: {error}") from error
    about = read_json(sweep_dir / "sweep.json")
    require(isinstance(about.get("sweep"), dict), f"sweep_dir={sweep_dir} has no sweep.json that can be read")
    require(len(plan) > 0, f"sweep_dir={sweep_dir} has a plan.jsonl without a run")
    sweep = Sweep(name or str(about.get("name") or sweep_dir.name), about, about["sweep"], [])
    sweep.runs.extend(read_run(sweep_dir, run) for run in plan)
    places = Counter((setting, run.replicate) for run in sweep.runs for setting in run.plan.settings)
    (setting, (seed, fold)), n = places.most_common(1)[0]
    require(n == 1, f"sweep_dir={sweep_dir} has {n} runs of {setting} with seed {seed} and fold {show(fold)}")
    return sweep


def read_run(sweep_dir: Path, plan: PlannedRun) -> Run:
    """A run from its files. One that is said to be done, and lacks what a done run has, has failed."""
    state, path = state_of(sweep_dir, plan), sweep_dir / plan.id
    max_iters = plan.config.max_iters
    if state.state == "diverged":
        where = "" if "iteration" in state.reason else f" at iteration {show(state.iter)}"
        return Run(
            plan, State("diverged", state.iter, (state.reason or "diverged") + where), read_json(path / "summary.json")
        )
    if state.state != "done":
        saved = f"iteration {state.iter} of {max_iters} is saved" if state.iter else ""
        reason = "; ".join(filter(None, [state.reason, saved])) or "not started" * (state.state == "pending")
        return Run(plan, State(state.state, state.iter, reason))
    summary, curve, damage = read_json(path / "summary.json"), {}, ""
    missing = [key for key in ("iter", "val/loss", "val/loss_min", "iter_of_min") if summary.get(key) is None]
    if missing:
        damage = f"summary.json has no {', '.join(missing)}"
    elif summary["iter"] < max_iters:
        return Run(plan, State("stopped", summary["iter"], f"done at iteration {summary['iter']} of {max_iters}"))
    else:
        try:
            curve = read_curve(path / "metrics.jsonl")
        except (OSError, ValueError, KeyError) as error:
            damage = f"metrics.jsonl cannot be read: {error}"
        if not damage and curve.get(summary["iter_of_min"]) != summary["val/loss_min"]:
            damage = "the minimum of summary.json is not in metrics.jsonl"
    if damage:
        return Run(plan, State("failed", state.iter, f"done, but {damage}"))
    return Run(plan, state, summary, curve)


def read_curve(file: Path) -> dict[int, float]:
    """Iteration -> val/loss of a metrics.jsonl."""
    lines = (json.loads(line) for line in file.read_bytes().splitlines() if b'"val/loss"' in line)
    return {line["iter"]: line["val/loss"] for line in lines if line["val/loss"] is not None}


# -----------------------------------------------------------------------------
# Statistics


@dataclass(frozen=True)
class Point:
    """A mean and the ends of its 95 % t interval, None for a single value."""

    mean: float
    low: float | None
    high: float | None
    n: int


def interval(values: Sequence[float]) -> Point:
    mean, n = fmean(values), len(values)
    if n < 2:
        return Point(mean, None, None, n)
    half = float(stats.t.isf(0.025, n - 1)) * stdev(values) / math.sqrt(n)
    return Point(mean, mean - half, mean + half, n)


def mean_curve(runs: Sequence[Run]) -> dict[int, Point]:
    """Iteration -> mean over the runs, at the iterations that all of them have."""
    if not runs:
        return {}
    common = set.intersection(*(set(run.curve) for run in runs))
    return {i: interval([run.curve[i] for run in runs]) for i in sorted(common)}


def lowest(curve: Mapping[int, Point]) -> tuple[float | None, int | None]:
    """The minimum of a mean curve and its first iteration."""
    return min(((point.mean, i) for i, point in curve.items()), default=(None, None))


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down adjustment. The family is all of them: a test that could not be made counts as p = 1."""
    adjusted: list[float | None] = [None] * len(p_values)
    known = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    highest = 0.0
    for rank, (p, i) in enumerate(known):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p))
        adjusted[i] = highest
    return adjusted


def n_needed(effect: float, power: float = 0.8, alpha: float = 0.05, limit: int = 1_000_000) -> float:
    """The least number of pairs with which a two-sided paired t test at `alpha` finds a mean difference of `effect`
    standard deviations with probability `power`: exact, from the noncentral t distribution. Infinity past `limit`."""
    effect = min(abs(effect), 30.0)  # two pairs do by then, and past it scipy's tails are lost

    def reached(n: int) -> bool:
        t, shift = stats.t.isf(alpha / 2, n - 1), effect * math.sqrt(n)
        other_side = stats.nct.cdf(-t, n - 1, shift)  # nan where it is nothing
        return (
            float(stats.nct.sf(t, n - 1, shift)) + float(max(other_side, 0.0) if other_side == other_side else 0.0)
            >= power
        )

    low, high = 1, 2
    while not reached(high):
        if high >= limit:
            return math.inf
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


@dataclass(frozen=True)
class Metric:
    key: str
    name: str
    less: str
    more: str
    spec: str


METRICS = [
    Metric("val/loss_min", "lowest validation loss", "lower", "higher", "+.4f"),
    Metric("iter_of_min", "iteration of the lowest validation loss", "earlier", "later", "+,.1f"),
    Metric("seconds", "training seconds", "shorter", "longer", "+,.2f"),
]


@dataclass
class Comparison:
    """A - B over the replicates done in both. p: of the t and of Wilcoxon's test; adjusted: by Holm over the family."""

    a: str
    b: str
    planned: int
    differences: dict[Replicate, float]
    values: dict[Replicate, tuple[float, float]]
    point: Point | None = None
    p: tuple[float | None, float | None] = (None, None)
    adjusted: tuple[float | None, float | None] = (None, None)
    n_needed: float | None = None

    def verdict(self, less: str, more: str) -> str:
        if self.planned == 0:
            return "no such pair in the plan"
        if self.point is None or self.point.n < 2:
            return "fewer than 2 complete pairs: no test"
        if not any(self.differences.values()):
            return "identical"
        if self.adjusted[0] is None:
            return "the differences do not vary: no test"
        return "not resolved" if self.adjusted[0] > 0.05 else less if self.point.mean < 0 else more


def compare(sweep: Sweep, pairs: Sequence[tuple[str, str]], key: str) -> list[Comparison]:
    """A family of comparisons of summary.json's `key`, paired by seed and fold."""
    family = []
    for a, b in pairs:
        runs_a, runs_b = sweep.of(a), sweep.of(b)
        common = [r for r in runs_a if r in runs_b]
        done = [r for r in common if runs_a[r].done and runs_b[r].done]
        values = {r: (runs_a[r].summary.get(key), runs_b[r].summary.get(key)) for r in done}
        known = {r: (x, y) for r, (x, y) in values.items() if x is not None and y is not None}
        comparison = Comparison(a, b, len(common), {r: x - y for r, (x, y) in known.items()}, known)
        differences = list(comparison.differences.values())
        if differences:
            comparison.point = interval(differences)
        if len(differences) > 1 and (sd := stdev(differences)) > 1e-12 * max(map(abs, differences)):
            t, wilcoxon = stats.ttest_1samp(differences, 0), stats.wilcoxon(differences)
            comparison.p = float(t.pvalue), float(wilcoxon.pvalue)
            comparison.n_needed = n_needed(fmean(differences) / sd)
        family.append(comparison)
    adjusted = [holm([comparison.p[test] for comparison in family]) for test in (0, 1)]
    for comparison, *both in zip(family, *adjusted, strict=True):
        comparison.adjusted = both[0], both[1]
    return family


@dataclass(frozen=True)
class Family:
    """Comparisons that are read together. metrics: for each of METRICS, the comparisons in it."""

    name: str
    title: str
    metrics: list[list[Comparison]]


def families(sweep: Sweep) -> list[Family]:
    """What the definition's `compare` asks for. Raises: ConfigError naming key, value and rule."""
    found = []
    for name, family in (sweep.definition.get("compare") or {}).items():
        key, known = f"compare.{name}", ["title", "baseline", "settings", "pairs"]
        require(isinstance(family, dict), f"{key}={family} must be a group of settings")
        for leaf in family:
            require(leaf in known, f"{key}.{leaf} is unknown{did_you_mean(leaf, known)}")
        pairs, patterns = family.get("pairs") or [], family.get("settings") or ["*"]
        require(("baseline" in family) != bool(pairs), f"{key} must have either baseline and settings, or pairs")
        good = isinstance(pairs, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in pairs)
        require(good, f"{key}.pairs={pairs} must be a list of pairs [A, B]")
        require(isinstance(patterns, list), f"{key}.settings={patterns} must be a list of patterns")
        if "baseline" in family:
            chosen = [s for s in sweep.settings if any(fnmatchcase(s, str(pattern)) for pattern in patterns)]
            pairs = [[setting, family["baseline"]] for setting in chosen if setting != family["baseline"]]
        pairs = [(str(a), str(b)) for a, b in pairs]
        metrics = [compare(sweep, pairs, metric.key) for metric in METRICS]
        found.append(Family(name, family.get("title") or "", metrics))
    return found


# -----------------------------------------------------------------------------
# Tables: each once, for table.md and for the page


@dataclass(frozen=True)
class Table:
    columns: list[str]
    rows: list[list[str]]
    words: int = 1  # columns of text, from the left; the others are numbers

    def markdown(self) -> str:
        def line(cells: Sequence[str]) -> str:
            return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"

        rule = ["---" if i < self.words else "---:" for i in range(len(self.columns))]
        return "\n".join(map(line, [self.columns, rule, *self.rows])) + "\n"

    def html(self) -> str:
        def line(cells: Sequence[str], tag: str) -> str:
            kinds = ["" if i < self.words else ' class="number"' for i in range(len(cells))]
            return "".join(f"<{tag}{kind}>{html.escape(c)}</{tag}>" for kind, c in zip(kinds, cells, strict=True))

        body = "".join(f"<tr>{line(row, 'td')}</tr>\n" for row in self.rows)
        return f'<div class="table"><table><thead><tr>{line(self.columns, "th")}</tr></thead>\n{body}</table></div>'


def number(value: float | None, spec: str = ".4f") -> str:
    """For a reader: a dash where there is no value, a true minus sign."""
    return "–" if value is None else "> 1,000,000" if math.isinf(value) else format(value, spec).replace("-", "−")


def p_value(p: float | None) -> str:
    return "–" if p is None else "< 0.0001" if p < 0.0001 else f"{p:.4f}"


def mean_of(runs: Sequence[Run], key: str) -> float | None:
    values = [run.summary[key] for run in runs if run.summary.get(key) is not None]
    return fmean(values) if values else None


def seconds(runs: Sequence[Run]) -> list[float]:
    return [run.summary["seconds"] for run in runs if run.summary.get("seconds") is not None]


def part_table(sweep: Sweep, settings: Sequence[str]) -> Table:
    """A row a setting, with both readings of "averaged minimum"."""
    papers = any(sweep.paper(setting) is not None for setting in settings)
    columns = [
        "setting", "runs done", *["paper"] * papers, "minimum of the mean curve", "at iteration",
        "mean of the runs' minima", "SD", "mean iteration of the minimum", "final loss", "median seconds",
    ]  # fmt: skip
    rows = []
    for setting in settings:
        planned, done = sweep.of(setting), sweep.done(setting)
        lost = Counter(run.state.state for run in planned.values() if not run.done)
        runs = f"{len(done)} of {len(planned)}" + "".join(f", {lost[s]} {s}" for s in STATES if lost[s])
        minimum, iteration = lowest(mean_curve(done))
        minima = [run.summary["val/loss_min"] for run in done]
        rows.append([
            label(setting, sweep), runs, *[number(sweep.paper(setting), ".5f")] * papers, number(minimum),
            number(iteration, ",d"), number(mean_of(done, "val/loss_min")),
            number(stdev(minima) if len(minima) > 1 else None), number(mean_of(done, "iter_of_min"), ",.0f"),
            number(mean_of(done, "val/loss")), number(median(times) if (times := seconds(done)) else None, ",.1f"),
        ])  # fmt: skip
    return Table(columns, rows, words=2)


def comparison_table(sweep: Sweep, family: Sequence[Comparison], metric: Metric) -> Table:
    papers = metric.key == "val/loss_min" and any(paper_difference(sweep, c) is not None for c in family)
    share = metric.key == "seconds"
    columns = [
        "A", "B", "verdict on A", "pairs", "mean of A − B", "95 % interval", *["% of B"] * share,
        *["paper's A − B"] * papers, "t: p", "Wilcoxon: p", "t: Holm p", "Wilcoxon: Holm p", "pairs for 80 % power",
    ]  # fmt: skip
    rows = []
    for c in family:
        mean, low, high = (c.point.mean, c.point.low, c.point.high) if c.point else (None, None, None)
        of_b = 100 * mean / fmean(b for _, b in c.values.values()) if share and mean is not None else None
        rows.append([
            c.a, c.b, c.verdict(metric.less, metric.more), f"{len(c.differences)} of {c.planned}",
            number(mean, metric.spec),
            "–" if low is None else f"{number(low, metric.spec)} to {number(high, metric.spec)}",
            *[number(of_b, "+.2f")] * share, *[number(paper_difference(sweep, c), "+.4f")] * papers,
            *map(p_value, [*c.p, *c.adjusted]), number(c.n_needed, ",.0f"),
        ])  # fmt: skip
    return Table(columns, rows, words=3)


def paper_difference(sweep: Sweep, comparison: Comparison) -> float | None:
    a, b = sweep.paper(comparison.a), sweep.paper(comparison.b)
    return None if a is None or b is None or comparison.a == comparison.b else a - b


def missing_table(sweep: Sweep) -> Table:
    """Every run that is not done, with the reason."""
    rows = [
        [run.plan.id, ", ".join(run.plan.settings), replicate_name(run.replicate), run.state.state, run.state.reason]
        for state in STATES
        for run in sweep.runs
        if run.state.state == state != "done"
    ]
    return Table(["run", "settings", "fold or seed", "state", "reason"], rows, words=5)


def replicate_name(replicate: Replicate) -> str:
    seed, fold = replicate
    return f"seed {seed}" if fold is None else f"fold {fold}, seed {seed}"


def label(setting: str, sweep: Sweep) -> str:
    """A setting's name within its part."""
    return setting.partition("/")[2] or setting if sweep.definition.get("parts") else setting


NOTES = """\
**Two readings of an averaged minimum.** A paper's "averaged minimum" may be the minimum of the curve averaged over \
folds, or the mean of each fold's own minimum, which is never larger. Both are given. Comparisons use each run's own \
minimum.

**Comparisons** are A − B, paired by seed and fold, over the pairs whose two runs are done: a run that diverged has no \
minimum to compare, and is named below its sweep. The interval is the paired t test's. Holm's correction is over the \
whole family, for t and for Wilcoxon's signed-rank test separately; a test that cannot be made yet counts as p = 1. A \
verdict is the paired t test's at Holm p ≤ 0.05. "Pairs for 80 % power" is how many folds or seeds a paired t test \
(two-sided, 0.05, uncorrected) needs to find a difference of the observed size and spread with probability 0.8: exact, \
from the noncentral t distribution.

**Folds share training text**, and seeds share all of it, so that differences are not quite independent, as these \
tests take them to be: near the threshold a verdict is worth less than its p says (Nadeau and Bengio, 2003).
"""


def facts(sweep: Sweep) -> dict[str, str]:
    """What was compared, for a reader."""
    definition, plans = sweep.definition, [run.plan for run in sweep.runs]
    folds = sorted({plan.fold for plan in plans if plan.fold is not None})
    seeds = sorted({plan.seed for plan in plans})
    words = [*definition.get("overrides", []), *sweep.about.get("overrides", [])]
    found = {
        "runs": f"{len(plans)} planned: {tally([run.state for run in sweep.runs])}",
        "settings": f"{len(sweep.settings)}, in {len(sweep.parts)} part{'s' * (len(sweep.parts) > 1)}",
        "folds": ", ".join(map(str, folds)) or "none: the last 10 % are held out",
        "seeds": ", ".join(map(str, seeds)),
        "every run": " ".join(words),
        "parameters": ", ".join(f"{n:,}" for n in distinct(sweep, "parameters")),
        "device": "; ".join(map(str, distinct(sweep, "device"))),
        "dtype": ", ".join(map(str, distinct(sweep, "dtype"))),
        "commit": ", ".join(str(c)[:12] + "+" * str(c).endswith("+") for c in distinct(sweep, "commit")),
        "corpus SHA-256": ", ".join(map(str, distinct(sweep, "corpus_sha256"))),
        "paper": (definition.get("paper") or {}).get("name", ""),
    }
    return {key: value for key, value in found.items() if value}


def distinct(sweep: Sweep, key: str) -> list[Any]:
    """The values of a key in the runs' summaries."""
    return list(dict.fromkeys(run.summary[key] for run in sweep.runs if run.summary.get(key) is not None))


def table_md(sweep: Sweep, compared: Sequence[Family], figures: Sequence[tuple[str, str, str]]) -> str:
    """figures: (part, file, caption)"""
    text = [f"# {sweep.title}\n"]
    text += [Table(["", ""], [[key, value] for key, value in facts(sweep).items()], words=2).markdown()]
    for part, settings in sweep.parts.items():
        text += [f"## {sweep.title_of(part)}\n", part_table(sweep, settings).markdown()]
        text += [f"![{file}]({file})\n\n{caption}\n" for of, file, caption in figures if of == part]
    for family in compared:
        text += [f"## Comparison {': '.join(filter(None, [family.name, family.title]))}\n"]
        for metric, comparisons in zip(METRICS, family.metrics, strict=True):
            table = comparison_table(sweep, comparisons, metric)
            text += [f"### {metric.name.capitalize()}\n", table.markdown() if table.rows else "Nothing to compare.\n"]
    missing = missing_table(sweep)
    text += ["## Runs that are not done\n", missing.markdown() if missing.rows else "None.\n"]
    return "\n".join([*text, "## How to read this\n", NOTES])


def runs_csv(sweep: Sweep) -> str:
    """A line a run; the settings that differ between runs are columns of their own."""
    configs = [flatten(asdict(run.plan.config)) for run in sweep.runs]
    keys = dict.fromkeys(key for config in configs for key in config if key not in ("seed", "data.fold"))
    varied = [key for key in keys if len({json.dumps(config.get(key)) for config in configs}) > 1]
    numbers = ["val/loss_min", "iter_of_min", "val/loss", "train/loss", "seconds", "tok_per_sec", "parameters"]
    measured = [*numbers, "device", "dtype", "torch", "commit"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [key.replace("/", "_") for key in measured]
    writer.writerow(["id", "settings", *varied, "seed", "fold", "status", *names, "iter", "reason"])
    for run, config in zip(sweep.runs, configs, strict=True):
        plan, state = run.plan, run.state
        values = [show(config[key]) if key in config else None for key in varied]
        found = [run.summary.get(key) for key in measured]
        row = [plan.id, ";".join(plan.settings), *values, plan.seed, plan.fold, state.state, *found]
        writer.writerow([*row, run.summary.get("iter", state.iter), state.reason])
    return text.getvalue()


# -----------------------------------------------------------------------------
# Figures

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


def styles(sweep: Sweep) -> dict[str, Style]:
    """Settings that differ in one number have ordered colours (viridis), the same for the same value in every part;
    others have Okabe and Ito's."""
    values = {setting: ordered_value(label(setting, sweep)) for setting in sweep.settings}
    scales: dict[str, list[float]] = {}
    for value in values.values():
        if value is not None:
            scales[value[0]] = sorted({*scales.get(value[0], []), value[1]})
    found, viridis = {}, matplotlib.colormaps["viridis"]
    for settings in sweep.parts.values():
        for i, setting in enumerate(settings):
            value = values[setting]
            if value is not None and len(scales[value[0]]) > 2:
                i = scales[value[0]].index(value[1])
                place = i / (len(scales[value[0]]) - 1)
                colour, dark = (matplotlib.colors.to_hex(viridis(x)) for x in (0.88 * place, 0.3 + 0.7 * place))
            else:
                colour = OKABE_ITO[i % len(OKABE_ITO)]
                dark = "#DDDDDD" if colour == "#000000" else colour
            found[setting] = Style(colour, dark, *SYMBOLS[i % len(SYMBOLS)], DASHES[i % len(DASHES)])
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
    """A setting as a figure shows it: some of its runs that are done."""

    name: str
    style: Style
    runs: Sequence[Run]


def series_of(sweep: Sweep, settings: Sequence[str], look: Mapping[str, Style]) -> list[Series]:
    drawn = [Series(label(setting, sweep), look[setting], sweep.done(setting)) for setting in settings]
    return [series for series in drawn if series.runs]


def draw_part(series: Sequence[Series], title: str) -> Iterator[tuple[str, Figure, str]]:
    """The paper's three figures of a part: (kind, figure, caption)."""
    counts = sorted({len(s.runs) for s in series})
    n = f"n = {' to '.join(str(c) for c in dict.fromkeys([counts[0], counts[-1]]))} runs a setting"
    title = textwrap.fill(title, 70)
    yield "loss", *draw_loss(series, title, n)
    yield "time", *draw_time(series, title, n)
    yield "folds", *draw_folds(series, title)


def draw_loss(series: Sequence[Series], title: str, n: str) -> tuple[Figure, str]:
    figure = new_figure(7, 4.6)
    axes = figure.add_subplot()
    for s in series:
        curve = mean_curve(s.runs)
        draw_line(axes, curve, s)
        low, high = ([end if end is not None else math.nan for end in ends] for ends in bounds(curve))
        axes.fill_between(list(curve), low, high, color=s.style.colour, alpha=0.1, linewidth=0)
    axes.set(xlabel="iteration", ylabel="validation loss (nats per token)", ylim=loss_limits(series))
    axes.set_title(title, loc="left")
    axes.legend(frameon=False, fontsize="small")
    caption = f"Validation loss by iteration, averaged over folds and seeds ({n}); band: 95 % t interval of the mean."
    return figure, f"{caption} The first evaluations lie above the axis."


def draw_time(series: Sequence[Series], title: str, n: str) -> tuple[Figure, str]:
    figure = new_figure(7, 4.2)
    axes = figure.add_subplot()
    key, names = shared_key([s.name for s in series])
    boxes = axes.boxplot(
        [seconds(s.runs) for s in series], tick_labels=names, whis=1.5, patch_artist=True, widths=0.6,
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
    def panel_of(run: Run) -> tuple[str, int]:
        return ("seed", run.plan.seed) if run.plan.fold is None else ("fold", run.plan.fold)

    panels = sorted({panel_of(run) for s in series for run in s.runs})
    columns = min(5, len(panels))
    rows = -(-len(panels) // columns)
    figure = new_figure(2 + 2 * columns, 1.2 + 1.9 * rows)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True)
    lines: dict[str, Line2D] = {}
    for axes, panel in zip(grid.flat, panels, strict=False):
        here = [replace(s, runs=[run for run in s.runs if panel_of(run) == panel]) for s in series]
        here = [s for s in here if s.runs]
        lines |= {s.name: draw_line(axes, mean_curve(s.runs), s) for s in here}
        axes.set_title(f"{panel[0]} {panel[1]}", fontsize="small")
        axes.set_ylim(loss_limits(here))
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    names = [s.name for s in series]
    figure.legend([lines[n] for n in names], names, loc="outside right upper", frameon=False, fontsize="small")
    figure.suptitle(title, x=0.01, ha="left")
    figure.supxlabel("iteration", fontsize="medium")
    figure.supylabel("validation loss (nats per token)", fontsize="medium")
    return figure, f"Validation loss by iteration for each {panels[0][0]}; every panel has its own vertical axis."


def draw_line(axes: Axes, curve: Mapping[int, Point], s: Series) -> Line2D:
    line = axes.plot(
        list(curve), [point.mean for point in curve.values()], label=s.name, linewidth=1.3, color=s.style.colour,
        linestyle=(0, s.style.dashes) if s.style.dashes else "-", marker=s.style.marker, markersize=4,
        markevery=max(1, len(curve) // 40),
    )  # fmt: skip
    return line[0]


def bounds(curve: Mapping[int, Point]) -> tuple[list[float | None], list[float | None]]:
    return [point.low for point in curve.values()], [point.high for point in curve.values()]


def loss_limits(series: Sequence[Series]) -> tuple[float, float]:
    """The range of all curves past a tenth of the run: before it, the loss falls from ln V and would set the scale."""
    curves = [run.curve for s in series for run in s.runs]
    losses = [loss for curve in curves for i, loss in curve.items() if i > 0.1 * max(curve)] or [0.0, 1.0]
    margin = 0.04 * (max(losses) - min(losses)) or 0.01
    return min(losses) - margin, max(losses) + margin


def shared_key(names: Sequence[str]) -> tuple[str, list[str]]:
    """("p", ["2", "3"]) of ["p=2", "p=3"]; ("", names) where the key differs."""
    keys = {name.partition("=")[0] for name in names if name.count("=") == 1}
    if len(keys) != 1 or not all(name.count("=") == 1 for name in names):
        return "", list(names)
    return keys.pop(), [name.partition("=")[2] for name in names]


def new_figure(width: float, height: float) -> Figure:
    rc = {"svg.hashsalt": "nanoqk", "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": "medium"}
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
# The page: report_page.html with the tables, and charts that are Vega-Lite (by Altair) and its runtime


def page(sweep: Sweep, compared: Sequence[Family], look: Mapping[str, Style]) -> str:
    charts: dict[str, dict[str, Any]] = {}
    body: list[str] = []

    def section(title: str, *content: str) -> None:
        heading = f'<section id="section-{len(body)}">\n<h2>{html.escape(title)}</h2>'
        body.append("\n".join([heading, *content, "</section>"]))

    def figure(name: str, chart: alt.LayerChart, caption: str) -> str:
        charts[name] = chart.to_dict()
        return f'<figure><div class="chart" id="{name}"></div><figcaption>{html.escape(caption)}</figcaption></figure>'

    for i, (part, settings) in enumerate(sweep.parts.items()):
        series = series_of(sweep, settings, look)
        content = [part_table(sweep, settings).html()]
        if series:
            hint = "Click a name to switch it off or on; hover for values; drag and scroll to move and zoom."
            caption = f"Mean of the runs with the 95 % t interval of the mean, or single folds. {hint}"
            content.insert(0, figure(f"loss-{i}", loss_chart(series), caption))
            caption = "Training time: median, quartiles, whiskers to 1.5 IQR; the diamond is the mean."
            content.append(figure(f"time-{i}", time_chart(series), caption))
        section(sweep.title_of(part), *content)
    for i, family in enumerate(compared):
        content = []
        for metric, comparisons in zip(METRICS, family.metrics, strict=True):
            table = comparison_table(sweep, comparisons, metric).html() if comparisons else "<p>Nothing to compare.</p>"
            if metric is not METRICS[0]:
                table = f"<details><summary>{metric.name.capitalize()}</summary>{table}</details>"
            elif any(c.differences for c in comparisons):
                caption = "A − B in validation loss: a point a fold or seed; the bar is the mean's 95 % interval."
                content.append(figure(f"difference-{i}", difference_chart(comparisons), caption))
            content.append(table)
        section(f"Comparison {': '.join(filter(None, [family.name, family.title]))}", *content)
    missing = missing_table(sweep)
    states = tally([run.state for run in sweep.runs if not run.done])
    opened = " open" * (len(missing.rows) <= 20)
    listed = f"<details{opened}><summary>{states}</summary>{missing.html()}</details>"
    section("Runs that are not done", listed if missing.rows else "<p>None.</p>")
    notes = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", html.escape(NOTES, quote=False))
    section("How to read this", *(f"<p>{paragraph}</p>" for paragraph in notes.split("\n\n")))
    rows = "".join(f"<dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>" for k, v in facts(sweep).items())
    done = sum(run.done for run in sweep.runs)
    template = string.Template(Path(__file__).with_name("report_page.html").read_text(encoding="utf-8"))
    bundle = vl_convert.javascript_bundle(vl_version="6.4")  # type: ignore[call-arg]  # its stub asks for more
    return template.substitute(
        title=html.escape(sweep.title), state=f"{done} of {len(sweep.runs)} runs done", facts=rows,
        body="\n".join(body), charts=json.dumps(charts).replace("</", "<\\/"),
        runtime=bundle.replace("</script", "<\\/script"),
    )  # fmt: skip


def loss_chart(series: Sequence[Series]) -> alt.LayerChart:
    """Curves of the mean or of single folds, with a legend that switches settings off and on."""
    names = [s.name for s in series]
    rows: list[dict[str, Any]] = []
    for s in series:
        for i, point in mean_curve(s.runs).items():
            rows.append({"setting": s.name, "of": "mean", "iteration": i, "loss": point.mean, **asdict(point)})
        for run in s.runs:
            of = replicate_name(run.replicate)
            rows += [{"setting": s.name, "of": of, "iteration": i, "loss": loss} for i, loss in run.curve.items()]
    choices = ["mean", *dict.fromkeys(row["of"] for row in rows if row["of"] != "mean"), "every run"]
    which = alt.param(name="which", value="mean", bind=alt.binding_select(options=choices, name="Curves: "))
    everything = [{"setting": name} for name in names]
    shown = alt.selection_point(
        name="shown", fields=["setting"], bind="legend", toggle="true", clear=False, empty=False, value=everything
    )
    zoom = alt.selection_interval(name="zoom", bind="scales")
    chosen = "which === 'every run' ? datum.of !== 'mean' : datum.of === which"
    low, high = loss_limits(series)

    def scale(values: Sequence[Any]) -> alt.Scale:
        return alt.Scale(domain=names, range=list(values))

    base = (
        alt.Chart(alt.Data(values=rows))
        .transform_filter(shown)
        .transform_filter(chosen)
        .encode(
            x=alt.X("iteration:Q", title="iteration", axis=alt.Axis(tickCount=8), scale=alt.Scale(nice=False)),
            color=alt.Color("setting:N", title=None, scale=alt.Scale(domain=names), legend=alt.Legend(symbolOpacity=1)),
        )
    )
    loss = alt.Y(
        "loss:Q", title="validation loss (nats per token)", scale=alt.Scale(domain=[low, high], nice=False, zero=False)
    )
    dashes = [s.style.dashes or [1, 0] for s in series]
    band = base.transform_filter("isValid(datum.low)").mark_area(opacity=0.1, clip=True).encode(y="low:Q", y2="high:Q")
    line = base.mark_line(clip=True).encode(
        y=loss, detail="of:N", strokeDash=alt.StrokeDash("setting:N", title=None, scale=scale(dashes))
    )
    tooltip = [
        alt.Tooltip("setting:N"), alt.Tooltip("of:N", title="curve"), alt.Tooltip("iteration:Q", format=","),
        alt.Tooltip("loss:Q", format=".4f"), alt.Tooltip("low:Q", title="95 % from", format=".4f"),
        alt.Tooltip("high:Q", title="95 % to", format=".4f"), alt.Tooltip("n:Q", title="runs"),
    ]  # fmt: skip
    points = base.mark_point(size=45, filled=True, opacity=1, clip=True).encode(
        y=loss, tooltip=tooltip,
        shape=alt.Shape("setting:N", title=None, scale=scale([s.style.symbol for s in series])),
    )  # fmt: skip
    layers = alt.layer(band, line, points).add_params(which, shown, zoom)
    return layers.properties(width="container", height=360, usermeta=palette(series))


def time_chart(series: Sequence[Series]) -> alt.LayerChart:
    names = [s.name for s in series]
    rows = [{"setting": s.name, "seconds": value} for s in series for value in seconds(s.runs)]
    base = alt.Chart(alt.Data(values=rows)).encode(y=alt.Y("setting:N", sort=names, title=None))
    times = [row["seconds"] for row in rows] or [0.0]
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
        y=y, x=alt.X("difference:Q", title=x_title),
        tooltip=["pair:N", "run:N", *(alt.Tooltip(f"{key}:Q", format=".4f") for key in ("difference", "A", "B"))],
    )  # fmt: skip
    base = alt.Chart(alt.Data(values=means)).encode(
        y=y, tooltip=["pair:N", *(alt.Tooltip(f"{key}:Q", format=".4f") for key in ("mean", "low", "high")), "n:Q"]
    )
    bars = base.transform_filter("isValid(datum.low)").mark_rule(strokeWidth=3).encode(x="low:Q", x2="high:Q")
    centres = base.mark_point(shape="diamond", filled=True, size=110, opacity=1).encode(x="mean:Q")
    return alt.layer(zero, dots, bars, centres).properties(width="container", height=34 * len(names))


def palette(series: Sequence[Series]) -> dict[str, list[str]]:
    """The page makes one of them the chart's `config.range.category`."""
    return {"light": [s.style.colour for s in series], "dark": [s.style.dark for s in series]}


# -----------------------------------------------------------------------------
# The files


def report(sweep_dir: Path, out: Path, name: str, argv: Sequence[str]) -> Sweep:
    """Read a sweep and write its report. Raises: ConfigError before anything is written."""
    sweep = read_sweep(sweep_dir, name)
    compared, look = families(sweep), styles(sweep)
    files: dict[str, bytes] = {"runs.csv": runs_csv(sweep).encode()}
    figures = []
    for part, settings in sweep.parts.items():
        suffix = f"_{re.sub(r'[^A-Za-z0-9.-]+', '_', part)}" if part else ""
        series = series_of(sweep, settings, look)
        for kind, figure, caption in draw_part(series, sweep.title_of(part)) if series else ():
            figures.append((part, f"{kind}{suffix}.svg", caption))
            files |= {f"{kind}{suffix}.{ending}": image(figure, ending) for ending in ("svg", "png")}
    files["table.md"] = table_md(sweep, compared, figures).encode()
    files["report.html"] = page(sweep, compared, look).encode()
    provenance = {
        "sweep": sweep.name,
        "command": shlex.join(["python", "scripts/report.py", *argv]),
        "runs": dict(Counter(run.state.state for run in sweep.runs)),
        "planned at commit": sweep.about.get("commit"),
        **{key: distinct(sweep, key) for key in ("commit", "device", "torch", "dtype", "corpus_sha256")},
        "overrides": sweep.about.get("overrides", []),
        "definition": sweep.definition,
        "sha256": {name: sha256(content).hexdigest() for name, content in files.items()},
    }
    require(not out.exists() or out.is_dir(), f"out={out} is not a directory")
    out.mkdir(parents=True, exist_ok=True)
    before = read_json(out / "provenance.json").get("sha256", {})
    for name, content in files.items():
        write_atomic(out / name, content)
    for name in set(before) - set(files):  # a figure of a part that is gone
        if Path(name).name == name:
            (out / name).unlink(missing_ok=True)
    write_atomic(out / "provenance.json", (json.dumps(provenance, indent=2, ensure_ascii=False) + "\n").encode())
    return sweep


def main(argv: list[str]) -> int:
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return 0
    try:
        known = {"sweep": str, "sweep_dir": str, "out": str}
        values, others = read_words(argv, known)
        require(not others, f"{others[:1]} is unknown{did_you_mean(''.join(others[:1]), known)}")
        sweep_dir = sweep_directory(values)
        name = Path(values.get("sweep") or sweep_dir.resolve().name).stem
        out = Path(values.get("out") or Path("results") / name).expanduser()
        sweep = report(sweep_dir, out, name, argv)
    except ConfigError as error:
        return refuse(str(error))
    except OSError as error:  # a full disk, say
        print(f"failed: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    print(f"{out}: {len(sweep.runs)} runs, {tally([run.state for run in sweep.runs])}; open {out / 'report.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
