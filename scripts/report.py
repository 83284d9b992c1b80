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
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import vl_convert

from scripts.paired import Comparison, Replicate, adjust, lowest, mean_curve
from scripts.report_figures import (
    Series,
    Style,
    curve_chart,
    difference_chart,
    draw_metrics,
    draw_part,
    image,
    replicate_name,
    styles,
    time_chart,
)
from sweeps.plan import REDUCTIONS, PlannedRun, check_evaluation, read_plan
from sweeps.status import STATES, State, state_of, sweep_directory, tally
from training.config import ConfigError, FaultConfig, flatten, require, run_script, show
from training.rundir import read_json, write_atomic

Definition = Mapping[str, Any]
HONEST = FaultConfig()
FLOOR_TOLERANCE = 0.01  # nats; as in scripts/audit.py
POINTS = 100  # of a curve that figures and the page show of a metric other than the loss

# -----------------------------------------------------------------------------
# Runs


@dataclass(frozen=True)
class Run:
    """A planned run as it is on the disk. summary: {} unless done or diverged; so curve, iteration -> loss, and curves,
    of every other metric that the definition names, iteration -> value."""

    plan: PlannedRun
    state: State
    summary: dict[str, Any] = field(default_factory=dict)
    curve: dict[int, float] = field(default_factory=dict)
    curves: dict[str, dict[int, float]] = field(default_factory=dict)

    def value(self, metric: "Metric") -> float | None:
        """The run's number: of its summary, or made of the metric's lines."""
        if metric.of is None:
            return self.summary.get(metric.key)
        values = list(self.curves.get(metric.key, {}).values())
        return REDUCTIONS[metric.of](values) if values else None

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

    @cached_property
    def by_setting(self) -> dict[str, dict[Replicate, Run]]:
        """Setting -> its runs, in the order of the plan."""
        found: dict[str, dict[Replicate, Run]] = {}
        for run in self.runs:
            for setting in run.plan.settings:
                found.setdefault(setting, {})[run.replicate] = run
        return found

    @property
    def settings(self) -> list[str]:
        return list(self.by_setting)

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
        return self.by_setting.get(setting, {})

    def done(self, setting: str) -> list[Run]:
        return [run for run in self.of(setting).values() if run.done]

    def diverged(self, setting: str) -> list[Run]:
        return [run for run in self.of(setting).values() if run.state.state == "diverged"]

    @property
    def metrics(self) -> "list[Metric]":
        """What is compared: METRICS, and each of the definition's `also` that is no pattern."""
        more = {key: how for key, how in (self.definition.get("also") or {}).items() if "*" not in key}
        return [
            *METRICS,
            *(
                Metric(key, key, "lower", "higher", "+,.6g")
                if how == "summary"
                else Metric(key, f"{how} of {key}", "lower", "higher", "+.4g", how)
                for key, how in more.items()
            ),
        ]

    def paper(self, setting: str, metric: str = "val_loss") -> float | None:
        """The paper's number for a setting: its own, or that of the first pattern that matches."""
        numbers = self.definition.get("paper", {}).get(metric, {})
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
    also = sweep.definition.get("also") or {}
    check_evaluation(sweep.definition.get("compare") or {}, also, sweep.definition.get("paper") or {})
    logged = [key for key, how in also.items() if how != "summary"]
    sweep.runs.extend(read_run(sweep_dir, run, logged) for run in plan)
    places = Counter((setting, run.replicate) for run in sweep.runs for setting in run.plan.settings)
    (setting, (seed, fold)), n = places.most_common(1)[0]
    require(n == 1, f"sweep_dir={sweep_dir} has {n} runs of {setting} with seed {seed} and fold {show(fold)}")
    return sweep


def read_run(sweep_dir: Path, plan: PlannedRun, also: Sequence[str] = ()) -> Run:
    """A run from its files; `also`: other metrics to read, or patterns of their keys.

    One that is said to be done, and lacks what a done run has, has failed.
    """
    state, path = state_of(sweep_dir, plan), sweep_dir / plan.id
    max_iters = plan.config.max_iters
    if state.state == "diverged":
        where = "" if "iteration" in state.reason else f" at iteration {show(state.iter)}"
        try:
            curves = read_curves(path / "metrics.jsonl", ["val/loss", *also])
        except (OSError, ValueError, KeyError):
            curves = {}
        state = State("diverged", state.iter, (state.reason or "diverged") + where)
        return Run(plan, state, read_json(path / "summary.json"), curves.pop("val/loss", {}), curves)
    if state.state != "done":
        saved = f"iteration {state.iter} of {max_iters} is saved" if state.iter else ""
        reason = "; ".join(filter(None, [state.reason, saved])) or "not started" * (state.state == "pending")
        return Run(plan, State(state.state, state.iter, reason))
    summary, damage = read_json(path / "summary.json"), ""
    curves = {}
    missing = [key for key in ("iter", "val/loss", "val/loss_min", "iter_of_min") if summary.get(key) is None]
    if missing:
        damage = f"summary.json has no {', '.join(missing)}"
    elif summary["iter"] < max_iters:
        return Run(plan, State("stopped", summary["iter"], f"done at iteration {summary['iter']} of {max_iters}"))
    else:
        try:
            curves = read_curves(path / "metrics.jsonl", ["val/loss", *also])
        except (OSError, ValueError, KeyError) as error:
            damage = f"metrics.jsonl cannot be read: {error}"
        if not damage and curves.get("val/loss", {}).get(summary["iter_of_min"]) != summary["val/loss_min"]:
            damage = "the minimum of summary.json is not in metrics.jsonl"
    if damage:
        return Run(plan, State("failed", state.iter, f"done, but {damage}"))
    return Run(plan, state, summary, curves.pop("val/loss"), curves)


def read_curves(file: Path, patterns: Sequence[str]) -> dict[str, dict[int, float]]:
    """Key -> iteration -> value, of the keys of a metrics.jsonl that match one of the patterns."""
    curves: dict[str, dict[int, float]] = {}
    wanted: dict[str, bool] = {}
    for line in file.read_bytes().splitlines():
        values = json.loads(line)
        for key, value in values.items():
            if key not in wanted:
                wanted[key] = any(fnmatchcase(key, pattern) for pattern in patterns)
            if wanted[key] and value is not None:
                curves.setdefault(key, {})[values["iter"]] = value
    return curves


# -----------------------------------------------------------------------------
# Comparisons


@dataclass(frozen=True)
class Metric:
    """of: how a run's lines become its number, one of REDUCTIONS; None: summary.json has it."""

    key: str
    name: str
    less: str
    more: str
    spec: str
    of: str | None = None


METRICS = [
    Metric("val/loss_min", "lowest validation loss", "lower", "higher", "+.4f"),
    Metric("iter_of_min", "iteration of the lowest validation loss", "earlier", "later", "+,.1f"),
    Metric("seconds", "training seconds", "shorter", "longer", "+,.2f"),
]


@dataclass(frozen=True)
class Family:
    """Comparisons that are read together. metrics: for each of the sweep's, the comparisons in it."""

    name: str
    title: str
    metrics: list[list[Comparison]]


def compare(sweep: Sweep, pairs: Sequence[tuple[str, str]], metric: Metric) -> list[Comparison]:
    """A family of comparisons of a metric, paired by seed and fold."""
    family = []
    for a, b in pairs:
        runs_a, runs_b = sweep.of(a), sweep.of(b)
        common = [r for r in runs_a if r in runs_b]
        done = [r for r in common if runs_a[r].done and runs_b[r].done]
        both = {r: (runs_a[r].value(metric), runs_b[r].value(metric)) for r in done}
        known = {r: (x, y) for r, (x, y) in both.items() if x is not None and y is not None}
        family.append(Comparison(a, b, len(common), known))
    adjust(family)
    return family


def families(sweep: Sweep) -> list[Family]:
    """What the definition's `compare` asks for."""
    found = []
    for name, family in (sweep.definition.get("compare") or {}).items():
        pairs, patterns = family.get("pairs") or [], family.get("settings") or ["*"]
        if "baseline" in family:
            chosen = [s for s in sweep.settings if any(fnmatchcase(s, str(pattern)) for pattern in patterns)]
            pairs = [[setting, family["baseline"]] for setting in chosen if setting != family["baseline"]]
        pairs = [(str(a), str(b)) for a, b in pairs]
        metrics = [compare(sweep, pairs, metric) for metric in sweep.metrics]
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


def mean_value(runs: Sequence[Run], metric: Metric) -> float | None:
    values = [value for run in runs if (value := run.value(metric)) is not None]
    return fmean(values) if values else None


def seconds(runs: Sequence[Run]) -> list[float]:
    return [run.summary["seconds"] for run in runs if run.summary.get("seconds") is not None]


def part_table(sweep: Sweep, settings: Sequence[str]) -> Table:
    """A row a setting, with both readings of "averaged minimum"."""
    papers = any(sweep.paper(setting) is not None for setting in settings)
    more = sweep.metrics[len(METRICS) :]
    in_paper = [metric for metric in more if any(sweep.paper(s, metric.key) is not None for s in settings)]
    columns = [
        "setting", "runs done", *["paper"] * papers, "minimum of the mean curve", "at iteration",
        "mean of the runs' minima", "SD", "mean iteration of the minimum", "final loss", "median seconds",
        *(f"mean of {metric.name}" if metric.of == "last" else metric.name for metric in more),
        *(f"paper's {metric.key}" for metric in in_paper),
    ]  # fmt: skip
    rows = []
    for setting in settings:
        planned, done = sweep.of(setting), sweep.done(setting)
        lost = Counter(run.state.state for run in planned.values() if not run.done)
        runs = f"{len(done)} of {len(planned)}" + "".join(f", {lost[s]} {s}" for s in STATES if lost[s])
        minimum, iteration = lowest(mean_curve(run.curve for run in done))
        minima = [run.summary["val/loss_min"] for run in done]
        rows.append([
            label(setting, sweep), runs, *[number(sweep.paper(setting), ".5f")] * papers, number(minimum),
            number(iteration, ",d"), number(mean_of(done, "val/loss_min")),
            number(stdev(minima) if len(minima) > 1 else None), number(mean_of(done, "iter_of_min"), ",.0f"),
            number(mean_of(done, "val/loss")), number(median(times) if (times := seconds(done)) else None, ",.1f"),
            *(number(mean_value(done, metric), metric.spec.lstrip("+")) for metric in more),
            *(number(sweep.paper(setting, metric.key), ".5g") for metric in in_paper),
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
    return None if a is None or b is None or a == b else a - b  # equal: one number of the paper for both


def fault_table(sweep: Sweep) -> Table:
    """Every setting with a deliberate fault, and what catches it: train.py's warnings, and on uniformly random tokens a
    last training loss below ln V, by more than chance explains."""
    rows = []
    for setting, done in ((setting, sweep.done(setting)) for setting in sweep.settings):
        fault = next((run.plan.config.fault.name for run in sweep.of(setting).values()), "none")
        on_random = [run.summary for run in done if run.plan.config.data.name == "random"]
        if fault == "none" and not on_random:
            continue
        warned = Counter(w.split(":")[0] for run in done for w in run.summary.get("start_up_warnings", []))
        floors = [math.log(summary["vocab_size"]) for summary in on_random]
        below = sum(
            summary["train/loss"] < floor - FLOOR_TOLERANCE for summary, floor in zip(on_random, floors, strict=True)
        )
        rows.append([
            setting, fault, "; ".join(f"{warning} ({n} of {len(done)})" for warning, n in warned.items()) or "–",
            number(mean_of(done, "train/loss")), number(fmean(floors) if floors else None),
            f"{below} of {len(floors)}" if floors else "–",
        ])  # fmt: skip
    columns = ["setting", "fault", "start-up warnings", "last train/loss", "ln V, the floor on random tokens"]
    return Table([*columns, f"runs more than {FLOOR_TOLERANCE} below it"], rows, words=3)


STABILITY_NOTE = """\
A learning rate counts as stable for a variant where every run is done and the final validation loss, averaged over \
folds and seeds, has come down from the first one by at least half of what it comes down at the variant's best rate. \
Beside the highest rate up to which all are stable stands how the next one fails."""


def stability_table(sweep: Sweep) -> Table | None:
    """For each variant the highest stable learning rate, where several are swept; None where they are not."""
    variants: dict[str, dict[float, list[Run]]] = {}
    for setting in sweep.settings:
        runs = list(sweep.of(setting).values())
        variant = re.sub(r"(^|[,/])learning_rate=[^,]*", "", setting).strip(",")
        variants.setdefault(variant, {})[runs[0].plan.config.optim.learning_rate] = runs
    if all(len(of) < 2 for of in variants.values()):
        return None
    rows = []
    for variant, unsorted in variants.items():
        of = dict(sorted(unsorted.items()))
        finals = {rate: mean_of(runs, "val/loss") for rate, runs in of.items() if all(run.done for run in runs)}
        known = {rate: final for rate, final in finals.items() if final is not None}
        best = min(known, key=lambda rate: known[rate], default=None)
        firsts = [run.curve[min(run.curve)] for runs in of.values() for run in runs if run.curve]
        highest, failure = None, "–"
        for rate, runs in of.items():
            if not all(run.state.state in ("done", "diverged") for run in runs):
                failure = f"{rate:g}: not all runs are made"
                break
            broken = [run.state.reason for run in runs if not run.done]
            if broken:
                failure = f"{rate:g}: {len(broken)} of {len(runs)} diverged ({broken[0]})"
                break
            assert best is not None
            if fmean(firsts) - known[rate] < (fmean(firsts) - known[best]) / 2:
                failure = f"{rate:g}: final loss {known[rate]:.4f}"
                break
            highest = rate
        rows.append([
            variant or "all", number(best, "g"), number(known.get(best or 0.0)), number(highest, "g"), failure,
            ", ".join(f"{rate:g}: {number(known.get(rate), '.3f')}" for rate in of),
        ])  # fmt: skip
    columns = ["variant", "best rate", "its final loss", "highest stable rate", "how the next one fails"]
    return Table([*columns, "final loss by rate"], rows)


def missing_table(sweep: Sweep) -> Table:
    """Every run that is not done, with the reason."""
    rows = [
        [run.plan.id, ", ".join(run.plan.settings), replicate_name(run.replicate), run.state.state, run.state.reason]
        for state in STATES
        for run in sweep.runs
        if run.state.state == state != "done"
    ]
    return Table(["run", "settings", "fold or seed", "state", "reason"], rows, words=5)


def label(setting: str, sweep: Sweep) -> str:
    """A setting's name within its part."""
    return setting.partition("/")[2] or setting if sweep.definition.get("parts") else setting


FAULT_NOTE = "The losses of these runs are wrong on purpose (training/faults.py); beside them, honest ones."
NOTES = """\
**Two readings of an averaged minimum.** A paper's "averaged minimum" may be the minimum of the curve averaged over \
folds, or the mean of each fold's own minimum, which is never larger. Both are given. Comparisons use each run's own \
minimum. Where settings have different numbers of runs done, their means are over different folds: only the paired \
comparisons compare like with like.

**Comparisons** are A − B, paired by seed and fold, over the pairs whose two runs are done: a run that diverged has no \
minimum to compare, and is named among the runs that are not done. The interval is the paired t test's. Holm's \
correction is over the whole family, for t and for Wilcoxon's signed-rank test separately; a test that cannot be made \
yet counts as p = 1. A verdict is the paired t test's at Holm p ≤ 0.05. "Pairs for 80 % power" is how many folds or \
seeds a paired t test (two-sided, 0.05, uncorrected) needs to find a difference of the observed size and spread with \
probability 0.8: exact, from the noncentral t distribution.

**Folds share training text**, and seeds share all of it, so that differences are not quite independent, as these \
tests take them to be: near the threshold a verdict is worth less than its p says (Nadeau and Bengio, 2003).

**Seconds and tokens a second** measure training only where nothing else ran on the device: runs side by side slow one \
another.
"""


def facts(sweep: Sweep) -> dict[str, str]:
    """What was compared, for a reader."""
    definition, plans = sweep.definition, [run.plan for run in sweep.runs]
    found_folds = {getattr(plan.config.data, "fold", None) for plan in plans}
    folds = sorted(fold for fold in found_folds if fold is not None)
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
        "deliberate faults": ", ".join(dict.fromkeys(p.config.fault.name for p in plans if p.config.fault != HONEST)),
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
        for metric, comparisons in zip(sweep.metrics, family.metrics, strict=True):
            table = comparison_table(sweep, comparisons, metric)
            text += [f"### {metric.name.capitalize()}\n", table.markdown() if table.rows else "Nothing to compare.\n"]
    if any(run.plan.config.fault != HONEST for run in sweep.runs):
        text += [f"## Deliberate faults\n\n{FAULT_NOTE}\n", fault_table(sweep).markdown()]
    if stability := stability_table(sweep):
        text += [f"## Highest stable learning rate\n\n{STABILITY_NOTE}\n", stability.markdown()]
    missing = missing_table(sweep)
    text += ["## Runs that are not done\n", missing.markdown() if missing.rows else "None.\n"]
    return "\n".join([*text, "## How to read this\n", NOTES])


def runs_csv(sweep: Sweep) -> str:
    """A line a run; the settings that differ between runs are columns of their own."""
    configs = [flatten(asdict(run.plan.config)) for run in sweep.runs]
    keys = dict.fromkeys(key for config in configs for key in config if key not in ("seed", "data.fold"))
    varied = [key for key in keys if len({json.dumps(config.get(key)) for config in configs}) > 1]
    numbers = ["val/loss_min", "iter_of_min", "val/loss", "train/loss", "seconds", "tok_per_sec", "parameters"]
    measured = [*numbers, "cache_bytes_per_token", "device", "dtype", "torch", "commit"]
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
# The page: report_page.html with the tables, and charts that are Vega-Lite (by Altair) and its runtime


def series_of(sweep: Sweep, settings: Sequence[str], look: Mapping[str, Style]) -> list[Series]:
    """What figures draw of some settings: those with a run that is done or diverged."""
    series = []
    for setting in settings:
        done = sweep.done(setting)
        curves = {run.replicate: run.curve for run in done}
        diverged = {run.replicate: run.curve for run in sweep.diverged(setting) if run.curve}
        series.append(Series(label(setting, sweep), look[setting], curves, seconds(done), diverged))
    return [s for s in series if s.curves or s.diverged]


def other_series(
    sweep: Sweep, settings: Sequence[str], look: Mapping[str, Style]
) -> dict[str, dict[str, list[Series]]]:
    """Of the definition's `also`: pattern -> {key that matches it: series}; without what no run has."""
    found: dict[str, dict[str, list[Series]]] = {}
    logged = {key: how for key, how in (sweep.definition.get("also") or {}).items() if how != "summary"}
    for pattern, how in logged.items():
        runs = {setting: (sweep.done(setting), sweep.diverged(setting)) for setting in settings}
        every = [run for both in runs.values() for some in both for run in some]
        for key in sorted({key for run in every for key in run.curves if fnmatchcase(key, pattern)}):

            def of(some: list[Run], key: str = key, how: str = how) -> dict[Replicate, dict[int, float]]:
                return {r.replicate: thinned(r.curves[key], how) for r in some if key in r.curves}

            series = [Series(label(s, sweep), look[s], of(a), [], of(b)) for s, (a, b) in runs.items()]
            found.setdefault(pattern, {})[key] = [s for s in series if s.curves or s.diverged]
    return found


def thinned(curve: Mapping[int, float], how: str) -> dict[int, float]:
    """A curve of at most POINTS values: of each of so many equal spans one, by the metric's own reduction (REDUCTIONS),
    so that no peak is lost of a maximum. The value stands at the span's last iteration."""
    width = math.ceil((max(curve) + 1) / POINTS)
    spans: dict[int, dict[int, float]] = {}
    for i, value in curve.items():
        spans.setdefault(i // width, {})[i] = value
    return {max(of): REDUCTIONS[how](list(of.values())) for of in spans.values()}


def page(sweep: Sweep, compared: Sequence[Family], look: Mapping[str, Style]) -> str:
    charts: dict[str, dict[str, Any]] = {}
    body: list[str] = []

    def section(title: str, *content: str) -> None:
        heading = f'<section id="section-{len(body)}">\n<h2>{html.escape(title)}</h2>'
        body.append("\n".join([heading, *content, "</section>"]))

    def figure(name: str, chart: Any, caption: str) -> str:
        charts[name] = chart.to_dict()  # Altair
        return f'<figure><div class="chart" id="{name}"></div><figcaption>{html.escape(caption)}</figcaption></figure>'

    for i, (part, settings) in enumerate(sweep.parts.items()):
        series = series_of(sweep, settings, look)
        content = [part_table(sweep, settings).html()]
        hint = "Click a name to switch it off or on; hover for values; drag and scroll to move and zoom."
        if series:
            caption = f"Mean of the runs with the 95 % t interval of the mean, or single folds. {hint}"
            content.insert(0, figure(f"loss-{i}", curve_chart(series), caption))
            caption = "Training time: median, quartiles, whiskers to 1.5 IQR; the diamond is the mean."
            content.append(figure(f"time-{i}", time_chart(series), caption))
        for j, (key, groups) in enumerate(other_series(sweep, settings, look).items()):
            if len(groups) == 1:  # of more, the figures have the panels
                content.append(figure(f"metric-{i}-{j}", curve_chart(groups[key], key), f"{key}. {hint}"))
        section(sweep.title_of(part), *content)
    for i, family in enumerate(compared):
        content = []
        for metric, comparisons in zip(sweep.metrics, family.metrics, strict=True):
            table = comparison_table(sweep, comparisons, metric).html() if comparisons else "<p>Nothing to compare.</p>"
            if metric is not METRICS[0]:
                table = f"<details><summary>{metric.name.capitalize()}</summary>{table}</details>"
            elif any(c.differences for c in comparisons):
                caption = "A − B in validation loss: a point a fold or seed; the bar is the mean's 95 % interval."
                content.append(figure(f"difference-{i}", difference_chart(comparisons), caption))
            content.append(table)
        section(f"Comparison {': '.join(filter(None, [family.name, family.title]))}", *content)
    if any(run.plan.config.fault != HONEST for run in sweep.runs):
        section("Deliberate faults", f"<p>{FAULT_NOTE}</p>", fault_table(sweep).html())
    if stability := stability_table(sweep):
        section("Highest stable learning rate", f"<p>{STABILITY_NOTE}</p>", stability.html())
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
        body="\n".join(body), charts=json.dumps(charts).replace("<", "\\u003c"),
        runtime=bundle.replace("</script", "<\\/script"),
    )  # fmt: skip


# -----------------------------------------------------------------------------
# The files


def report(sweep_dir: Path, out: Path, name: str, argv: Sequence[str]) -> Sweep:
    """Read a sweep and write its report. Raises: ConfigError before anything is written."""
    require(not out.exists() or out.is_dir(), f"out={out} is not a directory")
    sweep = read_sweep(sweep_dir, name)
    compared = families(sweep)
    look = styles({part: {s: label(s, sweep) for s in settings} for part, settings in sweep.parts.items()})
    files: dict[str, bytes] = {"runs.csv": runs_csv(sweep).encode()}
    figures = []
    for part, settings in sweep.parts.items():
        suffix = f"_{re.sub(r'[^A-Za-z0-9.-]+', '_', part)}" if part else ""
        series = series_of(sweep, settings, look)
        for kind, figure, caption in draw_part(series, sweep.title_of(part)) if series else ():
            figures.append((part, f"{kind}{suffix}.svg", caption))
            files |= {f"{kind}{suffix}.{ending}": image(figure, ending) for ending in ("svg", "png")}
        for key, groups in other_series(sweep, settings, look).items():
            kind = re.sub(r"[^A-Za-z0-9.]+", "_", key).strip("_")
            figure, caption = draw_metrics(groups, key, sweep.title_of(part))
            figures.append((part, f"{kind}{suffix}.svg", caption))
            files |= {f"{kind}{suffix}.{ending}": image(figure, ending) for ending in ("svg", "png")}
    files["table.md"] = table_md(sweep, compared, figures).encode()
    files["report.html"] = page(sweep, compared, look).encode()
    provenance = {
        "sweep": sweep.name,
        "command": shlex.join(["python", "scripts/report.py", *argv]),
        "runs": dict(Counter(run.state.state for run in sweep.runs)),
        "planned at commit": sweep.about.get("commit"),
        **{key: distinct(sweep, key) for key in ("commit", "device", "torch", "python", "dtype", "corpus_sha256")},
        "overrides": sweep.about.get("overrides", []),
        "definition": sweep.definition,
        "sha256": {name: sha256(content).hexdigest() for name, content in files.items()},
    }
    out.mkdir(parents=True, exist_ok=True)
    before = read_json(out / "provenance.json").get("sha256", {})
    for name, content in files.items():
        write_atomic(out / name, content)
    for name in set(before) - set(files):  # a figure of a part that is gone
        if Path(name).name == name:
            (out / name).unlink(missing_ok=True)
    write_atomic(out / "provenance.json", (json.dumps(provenance, indent=2, ensure_ascii=False) + "\n").encode())
    return sweep


def write_report(values: dict[str, Any], argv: list[str]) -> int:
    sweep_dir = sweep_directory(values)
    name = Path(values.get("sweep") or sweep_dir.resolve().name).stem
    out = Path(values.get("out") or Path("results") / name).expanduser()
    sweep = report(sweep_dir, out, name, argv)
    print(f"{out}: {len(sweep.runs)} runs, {tally([run.state for run in sweep.runs])}; open {out / 'report.html'}")
    return 0


def main(argv: list[str]) -> int:
    known = {"sweep": str, "sweep_dir": str, "out": str}
    return run_script(argv, __doc__, known, lambda values: write_report(values, argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
