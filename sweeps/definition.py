"""The definition of a sweep: configs/sweep/NAME.yaml, read and checked.

A definition names the overrides, grid, folds and seeds of the runs, and the comparisons that scripts/report.py makes.
sweeps/plan.py turns it into runs.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import fmean
from typing import Any

from core.cli import CONFIG_DIR, parse_yaml
from core.schema import ConfigError, convert, did_you_mean, require, show
from training.config import TrainConfig

Grid = dict[str, dict[str, Any]]  # key -> {label: value}


@dataclass(frozen=True)
class Part:
    """A named protocol of a sweep, with overrides and a grid of its own. on_request: only sweep.parts selects it."""

    title: str = ""
    overrides: list[str] = field(default_factory=list)
    grid: Grid = field(default_factory=dict)
    on_request: bool = False


@dataclass(frozen=True)
class Sweep:
    """The keys of configs/sweep/NAME.yaml. `extends` names a sweep whose keys are the defaults of this one.

    overrides: for every run, as train.py takes them; they are added to those of the extended sweep.
    grid: the values of each setting or config group, a list or {label: value}; `words` has {label: [override, ...]}.
    parts: name -> Part; a sweep without parts runs its grid alone. seeds: values of seed.
    folds: values of data.fold, the fold of the text that is held out; null holds out its last 10 %.
    compare, also, paper: for scripts/report.py. `also` names further metrics, by key or pattern, with the reductions
    that make one number of a run's lines; `summary` reads summary.json, and for eval/TASK/METRIC evaluation.json.
    """

    title: str = ""
    overrides: list[str] = field(default_factory=list)
    folds: list[int] | None = None
    seeds: list[int] = field(default_factory=lambda: [TrainConfig.seed])
    grid: Grid = field(default_factory=dict)
    parts: dict[str, Part] = field(default_factory=dict)
    compare: dict[str, Any] = field(default_factory=dict)
    also: dict[str, Any] = field(default_factory=dict)
    paper: dict[str, Any] = field(default_factory=dict)


SWEEP_KEYS = [f.name for f in fields(Sweep)]
PART_KEYS = [f.name for f in fields(Part)]
REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {  # of Sweep.also
    "last": lambda v: v[-1], "max": max, "min": min, "mean": fmean, "sum": sum,
    # the mean distance of a value from the middle of its two neighbours: 0 on a straight line, however steep
    "roughness": lambda v: fmean(abs(v[i] - (v[i - 1] + v[i + 1]) / 2) for i in range(1, len(v) - 1)) if v[2:] else 0.0,
}  # fmt: skip

# -----------------------------------------------------------------------------
# YAML -> mapping


def load_sweep(name: str, changes: Mapping[str, Any]) -> Sweep:
    """The sweep of configs/sweep/`name`.yaml, or of the file `name`. changes: {"folds": [0], "grid.qk_norm.p": [2, 3]}.

    Raises: ConfigError naming key, value and rule.
    """
    source = read_definition(name)
    for key, value in changes.items():
        if key.startswith("grid."):
            swept = key.removeprefix("grid.")
            grids = [source["grid"], *(part["grid"] for part in source["parts"].values())]
            for grid in [grid for grid in grids if swept in grid] or grids[:1]:
                grid[swept] = value
        elif key == "parts":
            source["parts"] = select_parts(name, source["parts"], value)
        else:
            require(key in SWEEP_KEYS, f"sweep.{key}={show(value)} is unknown{did_you_mean(key, SWEEP_KEYS, 'sweep.')}")
            source[key] = value
    source["parts"] = {name: part for name, part in source["parts"].items() if not part["on_request"]}
    return check_sweep(source)


def select_parts(sweep: str, parts: dict[str, Any], value: Any) -> dict[str, Any]:
    """The parts that sweep.parts=`value` names: all, a name, or a list of names."""
    require(bool(parts) or value == "all", f"sweep.parts={show(value)}: sweep={sweep} has no parts")
    chosen = [*parts] if value == "all" else [value] if isinstance(value, str) else value
    good = isinstance(chosen, list) and (len(chosen) > 0 or not parts) and all(part in parts for part in chosen)
    example = "".join([*parts][:1])
    require(good, f"sweep.parts={show(value)} must be all, or some of {', '.join(parts)}, as [{example}]")
    return {part: {**parts[part], "on_request": False} for part in chosen}


def read_definition(name: str, extending: tuple[str, ...] = ()) -> dict[str, Any]:
    """The content of a sweep's YAML file, merged into that of the sweep it extends. Its keys are known, not its values.

    extending: the chain of sweeps that led here through `extends`.
    """
    chain = (*extending, name)
    require(name not in extending, f"sweep={chain[0]} extends itself: {' -> '.join(chain)}")
    known = {path.stem: path for path in sorted((CONFIG_DIR / "sweep").glob("*.yaml"))}
    file = Path(name) if name.endswith(".yaml") else known.get(name)
    if file is None:
        raise ConfigError(f"sweep={name} must be one of {', '.join(known)}, or a file that ends in .yaml")
    require(file.is_file(), f"sweep={name} is no file")
    try:
        source = parse_yaml(file.read_text(encoding="utf-8"), f"sweep={name}")
    except UnicodeDecodeError as error:
        raise ConfigError(f"sweep={name}: {error}") from error
    source = group("sweep", source, [*SWEEP_KEYS, "extends"])
    base = asdict(Sweep())
    if extended := str(source.pop("extends", "")):
        if extended.endswith(".yaml"):  # relative to this file
            extended = os.path.normpath(file.parent / extended)
        base = read_definition(extended, chain)
    merged = {**base, **source, "parts": dict(base["parts"])}
    merged["overrides"] = [*base["overrides"], *list_of_overrides("overrides", source.get("overrides", []))]
    for key in ("compare", "also", "paper"):
        both = {**base[key], **group(f"sweep.{key}", source.get(key) or {})}
        merged[key] = {name: value for name, value in both.items() if value is not None}  # null removes an entry
    merged["grid"] = group("sweep.grid", merged["grid"])
    for part, content in group("sweep.parts", source.get("parts") or {}).items():
        key = f"sweep.parts.{part}"
        new = {**asdict(Part()), **merged["parts"].get(part, {}), **group(key, content or {}, PART_KEYS)}
        merged["parts"][part] = {**new, "grid": group(f"{key}.grid", new["grid"])}
    return merged


# -----------------------------------------------------------------------------
# Mapping -> Sweep


def check_sweep(source: Mapping[str, Any]) -> Sweep:
    """`source` as a Sweep, with every type checked."""
    check_evaluation(source["compare"], source["also"], source["paper"])
    parts = {
        name: Part(
            title=convert(part["title"], str, f"sweep.parts.{name}.title"),
            overrides=list_of_overrides(f"parts.{name}.overrides", part["overrides"]),
            grid=checked_grid(f"parts.{name}.grid", part["grid"]),
        )
        for name, part in source["parts"].items()
    }
    checked = {
        "title": convert(source["title"], str, "sweep.title"),
        "overrides": list_of_overrides("overrides", source["overrides"]),
        "folds": None if source["folds"] is None else integers("folds", source["folds"]),
        "seeds": integers("seeds", source["seeds"]),
        "grid": checked_grid("grid", source["grid"]),
        "parts": parts,
    }
    return Sweep(**{**source, **checked})


def checked_grid(key: str, swept: Any) -> Grid:
    """A grid in which every value has a label, "p=3" where the definition gives none."""
    grid: Grid = {}
    for setting, values in group(f"sweep.{key}", swept).items():
        name = f"sweep.{key}.{setting}"
        full = isinstance(values, list | dict) and len(values) > 0
        require(full, f"{name}={show(values)} must be a list of values, as [2,3]")
        if isinstance(values, list):
            labels = [f"{setting.rpartition('.')[2]}={show(value)}" for value in values]
            require(len(set(map(plain, labels))) == len(labels), f"{name}={values} names a value twice")
            values = dict(zip(labels, values, strict=True))
        if setting == "words":
            for label, overrides in values.items():
                list_of_overrides(f"{key}.words.{label}", overrides)
        grid[setting] = {str(label): value for label, value in values.items()}
    return grid


def plain(point: str) -> str:
    """The name of a point with p=2 for p=2.0, since both are one value."""
    return re.sub(r"(=-?\d+)\.0(?=[,/]|$)", r"\1", point)


def list_of_overrides(key: str, overrides: Any) -> list[str]:
    good = isinstance(overrides, list) and all(isinstance(one, str) and "=" in one for one in overrides)
    require(good, f"sweep.{key}={show(overrides)} must be a list of overrides, as [max_iters=100]")
    return list(overrides)


def integers(key: str, values: Any) -> list[int]:
    good = isinstance(values, list) and len(values) > 0 and all(type(value) is int for value in values)
    require(good, f"sweep.{key}={show(values)} must be a list of integers, as [0,1]")
    require(len(set(values)) == len(values), f"sweep.{key}={values} names a value twice")
    return list(values)


def group(key: str, value: Any, known: list[str] | None = None) -> dict[str, Any]:
    """`value` if it is a mapping with known keys only."""
    require(isinstance(value, dict), f"{key}={show(value)} must be a group of settings")
    for leaf in value:
        require(known is None or leaf in known, f"{key}.{leaf} is unknown{did_you_mean(str(leaf), known or [])}")
    return {str(leaf): content for leaf, content in value.items()}


def check_evaluation(compare: Any, also: Any, paper: Any) -> None:
    """Raise ConfigError, naming key, value and rule, for what scripts/report.py could not evaluate."""
    for name, family in group("compare", compare).items():
        key = f"compare.{name}"
        group(key, family, ["title", "baseline", "settings", "pairs"])
        pairs, patterns = family.get("pairs") or [], family.get("settings") or ["*"]
        title = family.get("title")
        require(title is None or isinstance(title, str), f"{key}.title={show(title)} must be text")
        require(("baseline" in family) != bool(pairs), f"{key} must have either baseline and settings, or pairs")
        good = isinstance(pairs, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in pairs)
        require(good, f"{key}.pairs={pairs} must be a list of pairs [A, B]")
        require(isinstance(patterns, list), f"{key}.settings={patterns} must be a list of patterns")
    known = [*REDUCTIONS, "summary"]
    for key, reductions in group("also", also).items():
        several = reductions if isinstance(reductions, list) and reductions else [reductions]
        require(
            all(one in known for one in several), f"also.{key}={show(reductions)} must be one of {', '.join(known)}"
        )
    for key, numbers in group("paper", paper).items():
        good = isinstance(numbers, Mapping) and all(isinstance(number, int | float) for number in numbers.values())
        require(key == "name" or good, f"paper.{key}={show(numbers)} must be a group of numbers")
