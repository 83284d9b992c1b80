"""Reads a sweep for its report: its runs, from their directories, and the comparisons that its definition asks for."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from core.files import read_json
from core.schema import ConfigError, require, show
from data.options import FoldedTextOptions
from scripts.reporting.statistics import Comparison, Replicate, adjust
from sweeps.definition import REDUCTIONS, check_evaluation
from sweeps.plan import PlannedRun, read_plan
from sweeps.status import State, state_of

Definition = Mapping[str, Any]

# -----------------------------------------------------------------------------
# Runs


@dataclass(frozen=True)
class Run:
    """A planned run, as found on disk. Only a run that is done or diverged has a summary and curves.

    curve: iteration -> validation loss; curves: the same for each other metric that the definition's `also` names.
    """

    plan: PlannedRun
    state: State
    summary: dict[str, Any] = field(default_factory=dict)
    curve: dict[int, float] = field(default_factory=dict)
    curves: dict[str, dict[int, float]] = field(default_factory=dict)

    def value(self, metric: "Metric") -> float | None:
        """The run's value: read from its summary, or reduced from the metric's curve."""
        if metric.of is None:
            return self.summary.get(metric.key)
        values = list((self.curves | {"val/loss": self.curve}).get(metric.key, {}).values())
        return REDUCTIONS[metric.of](values) if values else None

    @property
    def done(self) -> bool:
        return self.state.state == "done"

    @property
    def replicate(self) -> Replicate:
        return self.plan.seed, self.plan.fold


@dataclass(frozen=True)
class Sweep:
    """name: of the folder in results/. about: sweep.json. definition: about["sweep"], as in configs/sweep/."""

    name: str
    about: dict[str, Any]
    definition: Definition
    runs: list[Run]

    @cached_property
    def by_setting(self) -> dict[str, dict[Replicate, Run]]:
        """Setting -> its runs, in the order of the plan."""
        found: dict[str, dict[Replicate, Run]] = {}
        for run in self.runs:
            for setting in run.plan.points:
                found.setdefault(setting, {})[run.replicate] = run
        return found

    @property
    def settings(self) -> list[str]:
        return list(self.by_setting)

    @property
    def parts(self) -> dict[str, list[str]]:
        """Part -> its settings. A sweep without parts has one, named ""."""
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

    def label(self, setting: str) -> str:
        """A setting's name within its part."""
        return setting.partition("/")[2] or setting if self.definition.get("parts") else setting

    def of(self, setting: str) -> dict[Replicate, Run]:
        return self.by_setting.get(setting, {})

    def done(self, setting: str) -> list[Run]:
        return [run for run in self.of(setting).values() if run.done]

    def diverged(self, setting: str) -> list[Run]:
        return [run for run in self.of(setting).values() if run.state.state == "diverged"]

    def distinct(self, key: str) -> list[Any]:
        """The values of a key in the runs' summaries."""
        return list(dict.fromkeys(run.summary[key] for run in self.runs if run.summary.get(key) is not None))

    @property
    def metrics(self) -> "list[Metric]":
        """What is compared: METRICS, and each key of the definition's `also` that is not a pattern."""
        found = list(METRICS)
        for key, several in self.also.items():
            for how in several if "*" not in key else []:
                if how == "summary":
                    found.append(Metric(key, key, "lower", "higher", "+,.6g"))
                else:
                    name = f"{'last logged' if how == 'last' else f'{how} of'} {key}"
                    found.append(Metric(key, name, "lower", "higher", "+.4g", how))
        return found

    @property
    def also(self) -> dict[str, list[str]]:
        """The definition's `also`: key or pattern of keys -> how a run's curve is reduced to a number, in each way."""
        also = self.definition.get("also") or {}
        return {key: how if isinstance(how, list) else [how] for key, how in also.items()}

    @property
    def logged(self) -> dict[str, list[str]]:
        """The entries of `also` that are in metrics.jsonl, and not in summary.json or evaluation.json."""
        found = {key: [one for one in how if one != "summary"] for key, how in self.also.items()}
        return {key: how for key, how in found.items() if how}

    def paper(self, setting: str, metric: str = "val_loss") -> float | None:
        """The paper's number for a setting: under its name, or under the first pattern that matches."""
        numbers = self.definition.get("paper", {}).get(metric, {})
        return numbers.get(setting, next((v for key, v in numbers.items() if fnmatchcase(setting, key)), None))


def read_sweep(sweep_dir: Path, name: str) -> Sweep:
    """Raises: ConfigError where there is no sweep, or its files cannot be read."""
    plan = read_plan(sweep_dir)
    about = read_json(sweep_dir / "sweep.json")
    require(isinstance(about.get("sweep"), dict), f"sweep_dir={sweep_dir} has no sweep.json that can be read")
    sweep = Sweep(name or str(about.get("name") or sweep_dir.name), about, about["sweep"], [])
    definition = sweep.definition
    check_evaluation(definition.get("compare") or {}, definition.get("also") or {}, definition.get("paper") or {})
    sweep.runs.extend(read_run(sweep_dir, run, list(sweep.logged)) for run in plan)
    places = Counter((setting, run.replicate) for run in sweep.runs for setting in run.plan.points)
    (setting, (seed, fold)), n = places.most_common(1)[0]
    require(n == 1, f"sweep_dir={sweep_dir} has {n} runs of {setting} with seed {seed} and fold {show(fold)}")
    for key, value in ((m.key, run.value(m)) for m in sweep.metrics for run in sweep.runs):
        require(value is None or isinstance(value, int | float), f"also.{key}: {show(value)} is not a number")
    return sweep


def read_run(sweep_dir: Path, plan: PlannedRun, also: Sequence[str] = ()) -> Run:
    """A run from its files. also: keys, or patterns of keys, of other metrics to read."""
    state, path = state_of(sweep_dir, plan), sweep_dir / plan.id
    if state.state == "done":
        return read_done(path, plan, state, also)
    if state.state == "diverged":
        where = "" if "iteration" in state.reason else f" at iteration {show(state.iter)}"
        state = State("diverged", state.iter, (state.reason or "diverged") + where)
        curves: dict[str, dict[int, float]] = {}
        with suppress(ConfigError):
            curves = read_curves(path / "metrics.jsonl", ["val/loss", *also])
        return Run(plan, state, read_json(path / "summary.json"), curves.pop("val/loss", {}), curves)
    saved = f"iteration {state.iter} of {plan.config.max_iters} is saved" if state.iter else ""
    reason = "; ".join(filter(None, [state.reason, saved])) or "not started" * (state.state == "pending")
    return Run(plan, State(state.state, state.iter, reason))


def read_done(path: Path, plan: PlannedRun, state: State, also: Sequence[str]) -> Run:
    """A run whose status is "done": as failed where its files are damaged, as stopped where the plan asks for more."""
    summary, max_iters = {**evaluation(path), **read_json(path / "summary.json")}, plan.config.max_iters
    try:
        missing = [key for key in ("iter", "val/loss", "val/loss_min", "iter_of_min") if summary.get(key) is None]
        require(not missing, f"summary.json has no {', '.join(missing)}")
        if summary["iter"] < max_iters:
            return Run(plan, State("stopped", summary["iter"], f"done at iteration {summary['iter']} of {max_iters}"))
        curves = read_curves(path / "metrics.jsonl", ["val/loss", *also])
        known = curves.get("val/loss", {}).get(summary["iter_of_min"]) == summary["val/loss_min"]
        require(known, "the minimum of summary.json is not in metrics.jsonl")
    except ConfigError as damage:
        return Run(plan, State("failed", state.iter, f"done, but {damage}"))
    return Run(plan, state, summary, curves.pop("val/loss"), curves)


def evaluation(run: Path) -> dict[str, float]:
    """What scripts/evaluate_lm.py wrote into a run directory: eval/TASK/METRIC -> value."""
    about = read_json(run / "evaluation.json").get("about", {})
    try:
        found = about.get("metrics", {}).items()
        return {f"eval/{task}/{name}": value for task, values in found for name, value in values.items()}
    except AttributeError as error:
        raise ConfigError(f"{run}/evaluation.json cannot be read: {error}") from error


def read_curves(file: Path, patterns: Sequence[str]) -> dict[str, dict[int, float]]:
    """Key -> iteration -> value, for the keys that match one of the patterns. Raises: ConfigError."""
    curves: dict[str, dict[int, float]] = {}
    wanted = cache(lambda key: any(fnmatchcase(key, pattern) for pattern in patterns))
    try:
        for values in map(json.loads, file.read_bytes().splitlines()):
            for key, value in values.items():
                if value is not None and wanted(key):
                    curves.setdefault(key, {})[values["iter"]] = value
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"metrics.jsonl cannot be read: {error}") from error
    return curves


# -----------------------------------------------------------------------------
# Comparisons


@dataclass(frozen=True)
class Metric:
    """A number of each run. less, more: how a verdict calls a difference; spec: the format of a difference.

    of: the reduction of the run's curve to the number (REDUCTIONS); None: summary.json or evaluation.json has it.
    """

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
    """Comparisons that share Holm's correction. metrics: the comparisons in each of the sweep's metrics."""

    name: str
    title: str
    metrics: list[list[Comparison]]

    @property
    def heading(self) -> str:
        return f"Comparison {': '.join(filter(None, [self.name, self.title]))}"


def compare(sweep: Sweep, pairs: Sequence[tuple[str, str]], metric: Metric) -> list[Comparison]:
    """A family of comparisons of a metric, paired by seed and fold."""
    family = []
    for a, b in pairs:
        runs_a, runs_b = sweep.of(a), sweep.of(b)
        common = [r for r in runs_a if r in runs_b]
        done = [r for r in common if runs_a[r].done and runs_b[r].done]
        both = {r: (runs_a[r].value(metric), runs_b[r].value(metric)) for r in done}
        known = {r: (x, y) for r, (x, y) in both.items() if x is not None and y is not None}
        family.append(Comparison(a, b, len(common), known, test_over_train([runs_a[r] for r in known])))
    adjust(family)
    return family


def test_over_train(runs: Sequence[Run]) -> float | None:
    """The amount of validation text over that of training text, where the runs are of several folds."""
    data = [run.plan.config.data for run in runs]
    several = len({run.plan.fold for run in runs if run.plan.fold is not None}) > 1
    return 1 / (data[0].folds - 1) if several and isinstance(data[0], FoldedTextOptions) else None


def compared_families(sweep: Sweep) -> list[Family]:
    """The comparisons that the definition's `compare` asks for."""
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
