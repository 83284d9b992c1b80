"""The table of a sweep's runs, with the curves of each: what every number of a report is made from."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

from core.files import LINES_BYTES, file_sha256, is_intact, open_regular, parse_object, read_json
from core.process import printable
from core.record import LINE_BYTES, is_number
from core.rundir import KINDS, mistyped
from core.schema import ConfigError, flatten, require, show
from sweeps.definition import Definition, Part, check_sweep, part_and_name
from sweeps.plan import PlannedRun, decides, read_about, read_plan
from sweeps.status import State, state_of
from training.metrics import METRICS as METRIC_ROWS
from training.metrics import REDUCTIONS, in_words, shown_in

Replicate = tuple[int, int | None]  # (seed, fold): two runs with the same one are a pair
Curve = Mapping[int, float]  # iteration -> value


def replicate_name(replicate: Replicate) -> str:
    seed, fold = replicate
    return f"seed {seed}" if fold is None else f"fold {fold}, seed {seed}"


@dataclass(frozen=True)
class Metric:
    """A number of each run. less, more: how a verdict calls a difference; spec: the format of a difference. reduction:
    of the run's curve to the number (REDUCTIONS); None: train.py wrote it into the run's summary."""

    key: str
    name: str
    less: str
    more: str
    spec: str
    reduction: str | None = None

    @property
    def column(self) -> str:
        """Its name in Run.summary and in runs.csv."""
        return self.key if self.reduction is None else f"{self.reduction} {self.key}"


NUMBERS = [  # of a summary, that every report uses
    "val/loss_min", "iter_of_min", "val/loss", "train/loss", "worst_loss", "seconds", "tok_per_sec", "parameters",
    "cache_bytes_per_token", "vocab_size",
]  # fmt: skip

EVALUATED = "evaluated"  # in a summary: lm_eval's task -> how evaluation.json's values were measured

NUMBER_KINDS = {**dict.fromkeys([*NUMBERS, "ranks"], int | float), EVALUATED: dict}

METRICS = [
    Metric("val/loss_min", "lowest validation loss", "lower loss", "higher loss", "+.4f"),
    Metric("iter_of_min", "iteration of the lowest validation loss", "earlier", "later", "+,.1f"),
    Metric("seconds", "training seconds", "shorter", "longer", "+,.2f"),
]


@dataclass(frozen=True)
class Run:
    """A row of the table of runs. Only a run that is done or diverged has a summary and curves."""

    id: str
    settings: list[str]  # the points of the grid that come to this run
    seed: int
    fold: int | None
    config: dict[str, Any]  # what train.py was given, flat
    state: State
    summary: dict[str, Any] = field(default_factory=dict)  # final numbers, with those of the definition's `also`
    curves: dict[str, Curve] = field(default_factory=dict)  # of val/loss, and of what `also` names, thinned

    @property
    def losses(self) -> Curve:
        return self.curves.get("val/loss", {})

    @property
    def done(self) -> bool:
        return self.state.state == "done"

    @property
    def replicate(self) -> Replicate:
        return self.seed, self.fold


@dataclass(frozen=True)
class Sweep:
    """A sweep with its runs. name: of the folder in results/. live: for a page that shows runs while they train."""

    name: str
    about: dict[str, Any]  # sweep.json, which has the definition, and the commits that planned it
    definition: Definition
    runs: list[Run]
    live: bool = False

    @cached_property
    def by_setting(self) -> dict[str, dict[Replicate, Run]]:
        """Setting -> its runs, in the order of the plan."""
        found: dict[str, dict[Replicate, Run]] = {}
        for run in self.runs:
            for setting in run.settings:
                found.setdefault(setting, {})[run.replicate] = run
        return found

    @property
    def settings(self) -> list[str]:
        return list(self.by_setting)

    @property
    def parts(self) -> dict[str, dict[str, str]]:
        """Part -> setting -> its name in the part, in the definition's order. Without parts there is one, named ""."""
        found: dict[str, dict[str, str]] = {part: {} for part in self.definition.parts}
        for setting in self.settings:
            part, name = part_and_name(setting, self.definition.parts)
            found.setdefault(part, {})[setting] = name
        return {part: settings for part, settings in found.items() if settings}

    @property
    def title(self) -> str:
        return self.definition.title or self.name

    def title_of(self, part: str) -> str:
        about = self.definition.parts.get(part, Part()).title
        return ": ".join(filter(None, [part, about])) or self.title

    @property
    def configs(self) -> dict[str, dict[str, Any]]:
        """Setting -> the config of its first run."""
        return {setting: next(iter(runs.values())).config for setting, runs in self.by_setting.items()}

    def label(self, setting: str) -> str:
        """A setting's name within its part."""
        return part_and_name(setting, self.definition.parts)[1]

    def runs_of(self, setting: str) -> dict[Replicate, Run]:
        return self.by_setting.get(setting, {})

    def done(self, setting: str) -> list[Run]:
        return [run for run in self.runs_of(setting).values() if run.done]

    def seconds(self, setting: str) -> list[float]:
        """Training seconds of the runs that are done."""
        return [run.summary["seconds"] for run in self.done(setting) if run.summary.get("seconds") is not None]

    def distinct(self, key: str) -> list[Any]:
        """The values of a key in the runs' summaries."""
        return list(dict.fromkeys(run.summary[key] for run in self.runs if run.summary.get(key) is not None))

    @property
    def has_ranks(self) -> bool:
        """Whether several processes trained some run together."""
        return any((run.summary.get("ranks") or 1) > 1 for run in self.runs)

    @property
    def plugin_versions(self) -> Counter[str]:
        """Plugin -> how many different files of it the runs had."""
        recorded = [one for run in self.runs for one in (run.summary.get("plugins") or {}).items()]
        every = {(name, version) for name, of in recorded for version in str(of).split(", ")}
        return Counter(name for name, _ in sorted(every))

    @property
    def mixed(self) -> dict[str, list[str]]:
        """What runs of one setting differ in beside seed and fold, as "max_iters 100, 200" -> the settings."""
        found: dict[str, list[str]] = {}
        for setting, runs in self.by_setting.items():
            values: dict[str, set[str]] = {}
            for run in runs.values():
                known = {key: run.summary[key] for key in ("corpus_sha256", "ranks") if run.summary.get(key)}
                for key, value in (run.config | known).items():
                    values.setdefault(key, set()).add(show(value))
            for key in (key for key, of in values.items() if len(of) > 1 and decides(key)):
                found.setdefault(f"{key} {', '.join(sorted(values[key]))}", []).append(setting)
        return found

    @property
    def evaluations(self) -> dict[str, set[str]]:
        """lm_eval's task that is compared -> the ways in which runs were evaluated."""
        keys = [metric.key.removeprefix("eval/") for metric in self.metrics if metric.key.startswith("eval/")]
        compared = {key.rpartition("/")[0] for key in keys}
        found: dict[str, set[str]] = {task: set() for task in sorted(compared)}
        for run in self.runs:
            for task in found.keys() & run.summary.get(EVALUATED, {}).keys():
                found[task].add(str(run.summary[EVALUATED][task]))
        return found

    @property
    def metrics(self) -> list[Metric]:
        """What is compared: METRICS, and each key of the definition's `also` that is not a pattern."""
        found = list(METRICS)
        for key, how in ((key, how) for key, ways in self.also.items() if "*" not in key for how in ways):
            if how == "summary":
                found.append(Metric(key, in_words(key), "lower", "higher", "+,.6g"))
            else:
                name = f"{'last' if how == 'last' else f'{how} of'} {in_words(key)}"
                found.append(Metric(key, name, "lower", "higher", "+.4g", how))
        return found

    @property
    def also(self) -> dict[str, list[str]]:
        """The definition's `also`: key or pattern of keys -> how a run's curve is reduced to a number, in each way."""
        return {key: how if isinstance(how, list) else [how] for key, how in self.definition.also.items()}

    @property
    def logged(self) -> dict[str, str]:
        """The entries of `also` that metrics.jsonl has: key or pattern of keys -> the reduction that thins a curve."""
        found = {key: [one for one in how if one != "summary"] for key, how in self.also.items()}
        watched = {key: METRIC_ROWS[key].thins for key in shown_in("live")} if self.live else {}
        # the roughness of a span is no value of the metric
        return watched | {key: "last" if how[0] == "roughness" else how[0] for key, how in found.items() if how}

    def paper(self, setting: str, metric: str = "val_loss") -> float | None:
        """The paper's number for a setting: under its name, or under the first pattern that matches."""
        numbers = self.definition.paper.get(metric, {})
        return numbers.get(setting, next((v for key, v in numbers.items() if fnmatchcase(setting, key)), None))


# -----------------------------------------------------------------------------
# Run directories -> runs


def read_sweep(sweep_dir: Path, name: str) -> Sweep:
    """Raises: ConfigError where there is no sweep, or its files cannot be read."""
    plan, sweep = read_plan(sweep_dir), read_definition(sweep_dir, name)
    sweep.runs.extend(read_run(sweep_dir, run, sweep) for run in plan)
    for key, value in ((m.key, run.summary.get(m.column)) for m in sweep.metrics for run in sweep.runs):
        require(value is None or is_number(value), f"also.{key}: {show(value)} is not a number")
    return sweep


def read_definition(sweep_dir: Path, name: str, live: bool = False) -> Sweep:
    """A sweep without its runs. Raises: ConfigError."""
    about = read_about(sweep_dir)
    require("sweep" in about, f"sweep_dir={sweep_dir} has no sweep.json that can be read")
    return Sweep(name, about, check_sweep(about["sweep"]), [], live)


def read_run(sweep_dir: Path, plan: PlannedRun, sweep: Sweep) -> Run:
    """A run from its files. One whose status is "done" is failed where its files are damaged, and stopped where its
    length is not the plan's."""
    path, state, max_iters = sweep_dir / plan.id, state_of(sweep_dir, plan), plan.config.max_iters
    row = partial(Run, plan.id, plan.points, plan.seed, plan.fold, flatten(asdict(plan.config)))
    keys = ["val/loss", "train/loss", *sweep.logged]
    if state.state == "diverged":
        summary, curves = {}, {}
        with suppress(ConfigError):
            summary = read_summary(path)
        try:
            curves = own_curves(path, keys, summary)
        except ConfigError as damage:
            state = replace(state, reason=f"{state.reason}; {damage}")
        return row(state, *kept(summary, curves, sweep))
    if state.state != "done":
        saved = f"iteration {state.iter} of {max_iters} is saved" if state.iter else ""
        not_started = "not started" if state.state == "pending" else ""
        reason = "; ".join(filter(None, [state.reason, saved])) or not_started
        return row(State(state.state, state.iter, reason))
    try:
        summary, curves = read_done(path, keys)
    except ConfigError as damage:
        return row(State("failed", state.iter, f"done, but {damage}"))
    if leak := summary.get("sees_future"):
        return row(State("failed", summary["iter"], f"done, but when trained, {leak}"))
    if summary["iter"] != max_iters:
        return row(State("stopped", summary["iter"], f"done at iteration {summary['iter']} of {max_iters}"))
    return row(state, *kept(summary, curves, sweep))


def kept(summary: dict[str, Any], curves: Mapping[str, Curve], sweep: Sweep) -> tuple[dict[str, Any], dict[str, Curve]]:
    """What a report keeps of a run: its summary with the reductions of `also`, and its curves, thinned."""
    numbers = {
        metric.column: REDUCTIONS[metric.reduction]([*curves[metric.key].values()])
        for metric in sweep.metrics
        if metric.reduction is not None and curves.get(metric.key)
    }
    if losses := curves.get("val/loss"):
        later = [*losses.items(), *curves.get("train/loss", {}).items()]
        numbers["worst_loss"] = max((v for i, v in later if i > min(losses)), default=losses[min(losses)])
    drawn = {"val/loss": curves["val/loss"]} if "val/loss" in curves else {}
    for pattern, how in sweep.logged.items():
        found = sorted(key for key in curves.keys() - {"val/loss"} if fnmatchcase(key, pattern))
        drawn |= {key: thinned(curves[key], how) for key in found if curves[key]}
    return summary | numbers, drawn


POINTS = 100  # how many of each curve are kept of a metric other than the validation loss


def thinned(curve: Curve, how: str) -> dict[int, float]:
    """A curve of at most POINTS values: one for each of as many equal spans, at the span's last iteration. how: the
    metric's own reduction (REDUCTIONS), so that a maximum keeps its peaks."""
    width = math.ceil((max(curve) + 1) / POINTS)
    spans: dict[int, dict[int, float]] = {}
    for i, value in curve.items():
        spans.setdefault(i // width, {})[i] = value
    return {max(span): float(f"{REDUCTIONS[how](list(span.values())):.6g}") for span in spans.values()}


def read_done(path: Path, keys: Sequence[str]) -> tuple[dict[str, Any], dict[str, Curve]]:
    """The summary and the curves of a run that is done. Raises: ConfigError where they are damaged."""
    summary = read_summary(path)
    missing = [key for key in ("iter", "val/loss", "val/loss_min", "iter_of_min") if summary.get(key) is None]
    require(not missing, f"summary.json has no {', '.join(missing)}")
    summary |= evaluation(path, summary)
    curves = own_curves(path, keys, summary)
    known = curves.get("val/loss", {}).get(summary["iter_of_min"]) == summary["val/loss_min"]
    require(known, "the minimum of summary.json is not in metrics.jsonl")
    return summary, curves


def own_curves(path: Path, keys: Sequence[str], summary: dict[str, Any]) -> dict[str, Curve]:
    """The curves of a run at its end, whose summary loses the SHA-256 of its records. Raises: ConfigError where that of
    metrics.jsonl is another."""
    curves, records = read_curves(path, keys), summary.pop("records", None) or {}
    same = records.get("metrics.jsonl") in (None, file_sha256(path / "metrics.jsonl"))
    require(same, "metrics.jsonl has changed since the run ended")
    return curves


def read_summary(path: Path) -> dict[str, Any]:
    """A run's summary.json. Raises: ConfigError where a value has the wrong type."""
    summary = read_json(path / "summary.json")
    require(is_intact(summary), "summary.json has changed since the run ended")
    wrong = mistyped(summary, {**KINDS, **NUMBER_KINDS})
    require(not wrong, f"summary.json has {wrong}")
    return summary


def evaluation(path: Path, summary: Mapping[str, Any]) -> dict[str, Any]:
    """What scripts/evaluate_lm.py wrote into a run directory: eval/TASK/METRIC -> value, and EVALUATED. {} if the
    checkpoint that it evaluated is neither the best nor the last one: the run has gone on since."""
    iters = [summary["iter_of_min"], summary["iter"]]
    evaluated = read_json(path / "evaluation.json")
    require(is_intact(evaluated), "evaluation.json has changed since it was written")
    try:
        about = evaluated.get("about", {})
        ids = {one["run_id"] for one in (about, summary) if "run_id" in one}
        require(len(ids) <= 1, "evaluation.json is of another run")
        found = about.get("metrics", {}) if about.get("iter", iters[0]) in iters else {}
        named = {f"eval/{task}/{name}": value for task, values in found.items() for name, value in values.items()}
        numbers: dict[str, Any] = {name: value for name, value in named.items() if math.isfinite(value)}
        return numbers | {EVALUATED: {task: how_evaluated(task, about) for task in found}} if found else {}
    except (AttributeError, TypeError) as error:
        raise ConfigError("evaluation.json has no metrics that can be read") from error


def how_evaluated(task: str, about: Mapping[str, Any]) -> str:
    """The conditions of one task: "limit=100, num_fewshot=0, dtype=float32"."""
    shots = about.get("num_fewshot")
    asked = {**about, "num_fewshot": shots.get(task) if isinstance(shots, Mapping) else shots}
    keys = ("limit", "num_fewshot", "dtype", "checkpoint", "lm_eval")
    return ", ".join(f"{key}={printable(show(asked[key]))[:60]}" for key in keys if asked.get(key) is not None)


def read_curves(path: Path, keys: Sequence[str]) -> dict[str, Curve]:
    """The curves of the metrics that match one of `keys`. Raises: ConfigError."""
    curves: dict[str, Any] = {}
    wanted = cache(lambda key: any(fnmatchcase(key, pattern) for pattern in keys))
    try:
        with open_regular(path / "metrics.jsonl", limit=LINES_BYTES) as file:
            for line in file:
                require(len(line) <= LINE_BYTES, f"a line has more than {LINE_BYTES:,} bytes")
                values = parse_object(line)
                step = values["iter"]
                require(type(step) is int and 0 <= step < 2**53, f"iter={show(step)} is no iteration")
                for key, value in values.items():
                    if value is not None and wanted(key):
                        require(is_number(value), f"{key}={show(value)} is no number")
                        curves.setdefault(key, {})[step] = 1.0 * value
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"metrics.jsonl cannot be read: {error}") from error
    return curves
