"""The plan of a sweep: all of its runs, composed, checked and frozen before the first one starts.

A *point* is one choice of values from the grid of a *part* of the sweep, named "part/p=3". It has a run for each seed
and each *fold* (the share of the text that is held out). A sweep's directory, runs/NAME by default, has:
plan.jsonl   a line a run, with its whole config     sweep.json   the definition, and the commits that planned it
code_*.diff  uncommitted changes at such a commit    RUN_ID/      the directory of each run
"""

import itertools
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from typing import Any

from core import cli
from core.files import FileLock, is_intact, parse_object, read_json, read_regular, sealed, write_atomic, write_json
from core.git import commit, short, uncommitted
from core.process import say
from core.schema import FREE, ConfigError, convert, declared, differences, flatten, require, show, with_earlier_defaults
from sweeps.definition import Definition, Part, check_sweep, part_and_name, plain
from training.config import TrainConfig, load_config, stored_config

GROUPS = {*cli.options_of(TrainConfig)}
INSTEAD = {  # settings of train.py that a sweep sets itself -> what to write
    "seed": "write sweep.seeds=[...]",
    "data.fold": "write sweep.folds=[...]",
    "out_dir": "write sweep_dir=..., which holds every run's directory",
    "fresh": "write another sweep_dir=... to start a sweep anew",
    "eval_only": "a sweep trains; python train.py evaluates its runs one by one",
}
SAME_ALPHA = (
    "p differs and α starts from one value, so this comparison measures temperature as well; "
    "qk_norm.alpha_init=matched starts every p at the same temperature"
)
MOST_RUNS = 100_000  # planning so many takes ten minutes
REPLICATE = ("seed", "data.fold")  # what runs of one point may differ in
LENGTH = ("max_iters", "eval_interval", "dtype")  # FREE, since a run may be resumed with others, but they decide losses
PRESETS = ("model", "experiment", "init_from")  # each decides many settings
REPORT_KEYS = ("title", "compare", "also", "paper")  # of a definition: no run depends on them


@dataclass(frozen=True)
class PlannedRun:
    """id: the name of the run's directory. points: several where they come to the same config. overrides: those of
    train.py that compose `config`, which has no out_dir."""

    id: str
    points: list[str]
    seed: int
    fold: int | None
    overrides: list[str]
    config: TrainConfig


# -----------------------------------------------------------------------------
# Definition -> runs


def plan_runs(sweep: Definition, overrides: list[str]) -> list[PlannedRun]:
    """All runs of a sweep, composed and checked. `overrides` apply to all of them. The runs of one fold stand together,
    so that an unfinished sweep compares over whole folds."""
    check_overrides(sweep, overrides)
    composed = cache(compose)  # slow: once for each choice of options
    runs: dict[str, PlannedRun] = {}
    ids: dict[tuple[str, int | None, int], str] = {}  # of each point, fold and seed
    parts = {
        name: (part, [*itertools.product(part.folds or sweep.folds or (None,), part.seeds or sweep.seeds)])
        for name, part in (sweep.parts or {"": Part()}).items()
    }
    sizes = [len(pairs) * math.prod(map(len, {**sweep.grid, **part.grid}.values())) for part, pairs in parts.values()]
    require(sum(sizes) <= MOST_RUNS, f"the sweep has {sum(sizes):,} runs; more than {MOST_RUNS:,} are never planned")
    for fold, seed in dict.fromkeys(pair for _, pairs in parts.values() for pair in pairs):
        chosen_parts = {name: part for name, (part, pairs) in parts.items() if (fold, seed) in pairs}
        for point, chosen, values in points_of(sweep, chosen_parts, overrides):
            values |= {"seed": seed} if fold is None else {"seed": seed, "data.fold": fold}
            given = [*chosen, *(f"{key}={show(value)}" for key, value in values.items())]
            source = set_values(composed(tuple(chosen)), values)
            try:
                config = load_config(source)
                config = replace(config, out_dir=None, plot=config.plot is True)  # auto: not in a sweep
                if config.init_from is not None:
                    from training.init_from import with_init_sha256  # which loads torch

                    config = with_init_sha256(config)
            except ConfigError as error:
                raise ConfigError(f"{error} (in the run {' '.join(given)})") from error
            run = PlannedRun(config.run_id, [point], seed, fold, given, config)
            other = ids.setdefault((plain(point), fold, seed), run.id)
            require(other == run.id, f"two points of the grid have the name {point}: give them other labels")
            first = runs.setdefault(run.id, run)
            if first is not run:
                changed = all_changes(first, run)
                both = f"the points {first.points[0]} and {point}"
                require(
                    not changed, f"{both} have one run id, which does not depend on {', '.join(changed)}: leave one out"
                )
                first.points.append(point)
    return list(runs.values())


def check_overrides(sweep: Definition, overrides: list[str]) -> None:
    """Raise ConfigError for an override of a setting that the sweep varies, or has a key of its own for."""
    parts = [*sweep.parts.values()] or [Part()]
    grids = [sweep.grid, *(part.grid for part in parts)]
    swept = {key for grid in grids for key in grid}
    for key in swept:
        group, named = key.removesuffix(".name"), key.endswith(".name")
        require(not named or group not in GROUPS, f"grid.{key} keeps the old option's settings: write grid.{group}")
    for override in overrides:
        key = key_of(override)
        require(key not in swept, f"{override}: this sweep varies {key}; write sweep.grid.{key}=[...]")
    for full in ({**sweep.grid, **part.grid} for part in parts):
        words = [(label, word) for label, of in full.get("words", {}).items() for word in of]
        clash = next((f"{label}: {word}" for label, word in words if key_of(word) in full), None)
        require(clash is None, f"grid.words.{clash}: the grid varies this setting, too")
        for override in overrides:
            label = next((label for label, word in words if key_of(word) == key_of(override)), None)
            require(label is None, f"{override}: this sweep sets {key_of(override)} in grid.words.{label}")
    lists = [values for grid in grids for values in grid.get("words", {}).values()]
    lists += [overrides, sweep.overrides, *(part.overrides for part in parts)]
    given = {key: f"grid.{key}" for key in swept} | {key_of(override): override for of in lists for override in of}
    has_folds = bool(sweep.folds) or any(part.folds for part in parts)
    for key, override in given.items():
        good = key not in INSTEAD or (key == "data.fold" and not has_folds)
        require(good, f"{override}: {INSTEAD.get(key)}")


def key_of(override: str) -> str:
    return override.lstrip("+").split("=")[0]


def points_of(
    sweep: Definition, parts: Mapping[str, Part], overrides: list[str]
) -> Iterator[tuple[str, list[str], dict[str, Any]]]:
    """Each point of these parts: its name, its overrides with `overrides` among them, plain values to set on top."""
    for part_name, part in parts.items():
        grid = {**sweep.grid, **part.grid}
        for labels in itertools.product(*grid.values()):
            values = {key: grid[key][label] for key, label in zip(grid, labels, strict=True)}
            name = "/".join(filter(None, [part_name, ",".join(labels)])) or "all"
            chosen = [*values.pop("words", [])]
            chosen += [f"{key}={show(values.pop(key))}" for key in [*values] if key in GROUPS]
            yield name, [*sweep.overrides, *part.overrides, *overrides, *chosen], values


def temperature_note(sweep: Definition, configs: Mapping[str, Mapping[str, Any]]) -> str:
    """A line where points of a part, or A and B of a comparison, differ in p and start from one alpha; else "". An
    alpha that is matched to each p leaves no such difference in temperature. configs: of each point, flat."""
    starts = {}
    for point, config in configs.items():
        alpha, p = config.get("qk_norm.alpha_init"), config.get("qk_norm.p")
        if p is not None and alpha != "matched":
            starts[point] = (alpha, show(2.0 if p == "learned" else p))  # a learned p starts at 2

    def differ(points: Iterable[str]) -> bool:
        found = {starts[point] for point in points if point in starts}
        return len(found) > len({alpha for alpha, _ in found})

    parts: dict[str, list[str]] = {}
    for point in configs:
        part = part_and_name(point, sweep.parts)[0]
        parts.setdefault(f"part {part}" if part else "this sweep", []).append(point)
    every = {f"compare.{name}": family.terms_of(configs) for name, family in sweep.families.items()}
    where = [name for name, points in parts.items() if differ(points)]
    where += [name for name, of in every.items() if any(differ(dict(terms)) for terms in of)]
    return f"{', '.join(where)}: {SAME_ALPHA}" if where else ""


def unknown_points(
    sweep: Definition, points: Collection[str], left_out: Collection[str] | None = None
) -> Iterator[str]:
    """A line for each comparison of which one side is no point of the sweep, nor of a part that was left out. left_out:
    names of parts; None: those that `sweep` lacks, if it has any."""

    def is_left_out(point: str) -> bool:
        part = point.partition("/")[0]
        return part in left_out if left_out is not None else bool(sweep.parts) and part not in sweep.parts

    known = ", ".join(sorted(points)[:12]) + (", …" if len(points) > 12 else "")
    for name, family in sweep.families.items():
        matched = any(fnmatchcase(point, pattern) for point in points for pattern in family.settings)
        absent: list[Sequence[str]] = []
        if family.baseline is not None and (family.baseline in points) != matched:
            absent.append([family.baseline] if matched else family.settings)
        for terms in family.named:
            missing = [setting for setting, _ in terms if setting not in points]
            if 0 < len(missing) < len(terms):
                absent.append(missing)
        for settings in absent:
            if not all(map(is_left_out, settings)):
                yield f"compare.{name}: {', '.join(settings)} is no setting of this sweep; it has {known}"


def set_values(composed: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a composed config with these values: {"qk_norm.p": 3}."""
    changed: dict[str, Any] = {**composed}
    for key, value in values.items():
        *groups, leaf = key.split(".")
        node = changed
        for name in groups:
            require(isinstance(node.get(name), dict), f"{key}={show(value)} is unknown")
            node[name] = {**node[name]}  # a copy of what changes alone
            node = node[name]
        node[leaf] = value
    return changed


def compose(overrides: Sequence[str]) -> dict[str, Any]:
    """What `python train.py OVERRIDES` composes, as a nested dict."""
    return cli.compose(TrainConfig, [*overrides])


# -----------------------------------------------------------------------------
# Runs <-> the directory of the sweep


def freeze(
    sweep_dir: Path, name: str, sweep: Definition, overrides: list[str], runs: list[PlannedRun], trains: bool
) -> None:
    """Write the plan. One that exists may grow, and change what concerns the report alone (REPORT_KEYS, titles of
    parts); the configs of its runs never change. trains: whether one of these runs is left to train."""
    try:
        sweep_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"sweep_dir={sweep_dir} cannot be made: {error.strerror}") from error
    with FileLock(sweep_dir / "plan.lock"):  # two launchers at once freeze one plan
        frozen = frozen_runs(sweep_dir)
        merged = merge_plans(sweep_dir, frozen, sweep, runs)
        old = read_about(sweep_dir)
        history, grows = old.get("frozen", []), merged != frozen or "sweep" not in old
        entry = {"commit": commit(), "overrides": overrides, "runs": len(merged)}
        planned = history[-1].get("commit") if history else None
        other_commit = trains and planned != entry["commit"]
        if grows or other_commit:
            history = [*(one for one in history if one != entry), entry]  # an equal entry moves to the end
            if diff := uncommitted():
                write_atomic(sweep_dir / f"code_{short(str(entry['commit']))}.diff", diff)
        if other_commit and not grows:
            say(f"warning: the sweep was planned at commit {planned}; the runs that are left use {entry['commit']}")
        content = {"name": name, "frozen": history, "sweep": frozen_definition(old.get("sweep", {}), sweep, grows)}
        if content != {key: value for key, value in old.items() if key != "sha256"}:
            write_json(sweep_dir / "sweep.json", sealed(content))
        if merged != frozen:  # written last: a plan implies the other files
            write_atomic(sweep_dir / "plan.jsonl", "".join(map(to_line, merged.values())).encode())


def frozen_runs(sweep_dir: Path) -> dict[str, PlannedRun]:
    """The runs of plan.jsonl, by id; {} where there is no plan."""
    return {run.id: run for run in read_plan(sweep_dir)} if (sweep_dir / "plan.jsonl").exists() else {}


def frozen_definition(old: dict[str, Any], sweep: Definition, grows: bool) -> dict[str, Any]:
    """The definition for sweep.json: a plan that grows unites both; else the old one gets the new report keys."""
    new: dict[str, Any] = json.loads(json.dumps(asdict(sweep)))  # as the file has it: lists for tuples
    if grows:
        parts = {name: united(old.get("parts", {}).get(name, {}), part) for name, part in new["parts"].items()}
        return united(old, new) | {"parts": {**old.get("parts", {}), **parts}}
    titles = {name: part["title"] for name, part in new["parts"].items()}
    parts = {
        name: {**part, "title": titles.get(name, part.get("title", ""))} for name, part in old.get("parts", {}).items()
    }
    return new | {key: value for key, value in old.items() if key not in REPORT_KEYS} | {"parts": parts}


def united(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """A sweep's definition, or a part's, with the labels, folds and seeds of the one before."""
    grid = {key: {**old.get("grid", {}).get(key, {}), **labels} for key, labels in new["grid"].items()}
    lists = {key: [*dict.fromkeys((old.get(key) or []) + (new[key] or []))] or None for key in ("seeds", "folds")}
    return {**new, **lists, "grid": {**old.get("grid", {}), **grid}}


def merge_plans(
    sweep_dir: Path, frozen: Mapping[str, PlannedRun], sweep: Definition, runs: list[PlannedRun]
) -> dict[str, PlannedRun]:
    """The frozen runs and the new ones, by id. A frozen run keeps its config, and may gain points of a new part. A new
    run must equal those of its point but for seed and fold, and those of its part but for what a grid varies."""
    old = check_sweep(read_about(sweep_dir).get("sweep", {}))
    parts = {*old.parts, *sweep.parts}
    planned = {(plain(point), run.fold, run.seed): run for run in frozen.values() for point in run.points}
    of_point = {point: run for (point, _, _), run in planned.items()}
    of_part = {part_and_name(point, parts)[0]: run for point, run in of_point.items()}
    merged = dict(frozen)

    def refuse_change(run: PlannedRun, point: str) -> None:
        other = planned.get((plain(point), run.fold, run.seed), frozen.get(run.id))
        changed, new = all_changes, False
        if other is None:
            part = part_and_name(point, parts)[0]
            other, new = of_point.get(plain(point), of_part.get(part)), plain(point) not in of_point
            changed = partial(changed_numbers, varied_keys(part, old, sweep) if new else ())
        found = changed(other, run) if other is not None else []
        if other is None or not found:
            return
        there = point if plain(point) in map(plain, other.points) else other.points[0]
        told = f"holds {there} with other settings: {', '.join(found)}"
        advice = "use another sweep_dir"
        if new:
            told = f"holds {there}, from which {point} differs in more than the grid varies: {', '.join(found)}"
            advice = f"name that in grid.words or in a part of its own, else {advice}"
        earlier, words = with_earlier_defaults(run.config, other.config)
        if words and not changed(other, replace(run, id=other.id, config=earlier)):
            begun = f"add {' '.join(words)}, the default when it was planned"
            advice = f"{begun}, to the command or to the point's words, else {advice}"
        raise ConfigError(f"sweep_dir={sweep_dir} {told}; {advice}")

    for run in runs:
        for point in run.points:
            refuse_change(run, point)
        known = merged.setdefault(run.id, run)
        names = {plain(point) for point in known.points}
        merged[run.id] = replace(known, points=[*known.points, *(p for p in run.points if plain(p) not in names)])
    return merged


def all_changes(old: PlannedRun, new: PlannedRun) -> list[str]:
    """Every setting that differs between two plans of one run, whether or not it decides the numbers."""
    found = differences(*({**flatten(asdict(run.config)), **run.config.trajectory} for run in (old, new)))
    return found or ([f"id {old.id} -> {new.id}"] if old.id != new.id else [])


def changed_numbers(varied: Collection[str], old: PlannedRun, new: PlannedRun) -> list[str]:
    """The settings that differ and decide the losses, but for seed, fold and `varied` keys and groups."""
    flat = [flatten(asdict(run.config)) for run in (old, new)]
    found = [key for key in {**flat[0], **flat[1]} if decides(key) and not any(belongs(key, one) for one in varied)]
    return differences(*({key: of[key] for key in found if key in of} for of in flat))


def belongs(key: str, group: str) -> bool:
    """Whether a setting is `group` or of that group, or may follow from it, as anything may from PRESETS."""
    return group in PRESETS or f"{key}.".startswith(f"{group}.")


@cache
def free_keys() -> set[str]:
    """The FREE settings and groups, which do not decide the losses, but for LENGTH."""
    groups: list[tuple[str, Any]] = [("", TrainConfig)]
    for group, one in declared(TrainConfig).items():
        groups += [(f"{group}.", cls) for cls in one.options.values()]
    free = {prefix + name for prefix, cls in groups for name, one in declared(cls).items() if FREE in one.notes}
    return free - {*LENGTH}


def decides(key: str) -> bool:
    """Whether a setting decides the losses; seed and fold do not count."""
    return key not in REPLICATE and not {key, key.partition(".")[0]} & free_keys()


def varied_keys(part: str, *sweeps: Definition) -> set[str]:
    """The keys that the grids of a part vary, and those that their `words` set."""
    grids = [grid for sweep in sweeps for grid in (sweep.grid, sweep.parts.get(part, Part()).grid)]
    words = [word for grid in grids for of in grid.get("words", {}).values() for word in of]
    return {key for grid in grids for key in grid} | {*map(key_of, words)}


def to_line(run: PlannedRun) -> str:
    """A line of plan.jsonl, in which the points are called settings."""
    line = {"id": run.id, "settings": run.points, "seed": run.seed, "fold": run.fold, "overrides": run.overrides}
    return json.dumps(sealed({**line, "config": asdict(run.config)})) + "\n"


def read_plan(sweep_dir: Path) -> list[PlannedRun]:
    """The frozen runs; no plugin is imported. Raises: ConfigError where there is no plan, or it cannot be read."""
    try:
        lines = read_regular(sweep_dir / "plan.jsonl").splitlines()
    except OSError as error:
        run = f"; it is a run: run={sweep_dir}" if (sweep_dir / "config.yaml").is_file() else ""
        raise ConfigError(f"sweep_dir={sweep_dir} holds no sweep (it has no plan.jsonl){run}") from error
    require(len(lines) > 0, f"sweep_dir={sweep_dir} has a plan.jsonl without a run")
    try:
        found = [*map(parse_object, lines)]
        require(all(map(is_intact, found)), f"sweep_dir={sweep_dir} has a plan.jsonl that was changed")
        ids = [line["id"] for line in found]
        require(len({*ids}) == len(ids), f"sweep_dir={sweep_dir} has a plan.jsonl with a run twice")
        return [planned_run(line) for line in found]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"sweep_dir={sweep_dir} has a plan.jsonl that cannot be read: {error}") from error


def planned_run(line: Mapping[str, Any]) -> PlannedRun:
    """A run from a line of plan.jsonl. Raises: ConfigError, KeyError."""
    run_id, config = convert(line["id"], str, "id"), stored_config(line["config"])
    named = run_id.isprintable() and re.fullmatch(r"(?!\.\.?$)[^/]{1,255}", run_id) is not None
    require(named, f"id={run_id!r} is no folder's name")
    require(config.max_iters > 0, f"max_iters={config.max_iters} must be >= 1")
    points, words = (convert(line[key], tuple[str, ...], key) for key in ("settings", "overrides"))
    require(len(points) > 0, "settings=[] must name at least one")
    seed, fold = convert(line["seed"], int, "seed"), convert(line["fold"], int | None, "fold")
    return PlannedRun(run_id, [*points], seed, fold, [*words], config)


def read_about(sweep_dir: Path) -> dict[str, Any]:
    """sweep.json: the name, the definition as "sweep", as "frozen" the commits that planned it; {} where there is none.
    Raises: ConfigError where it was changed, or cannot be read."""
    about, file = read_json(sweep_dir / "sweep.json"), f"sweep_dir={sweep_dir} has a sweep.json"
    if not about and not (sweep_dir / "sweep.json").exists():
        return {}
    require(len(about) > 0 and is_intact(about), f"{file} that was changed")
    try:
        for one in convert(about.setdefault("frozen", []), list, "frozen"):
            convert(convert(one, dict, "frozen").get("overrides"), tuple[str, ...], "frozen.overrides")
        convert(about.get("name", ""), str, "name")
        check_sweep(convert(about.get("sweep", {}), dict, "sweep"))
    except ConfigError as error:
        raise ConfigError(f"{file} that cannot be read: {error}") from error
    return about
