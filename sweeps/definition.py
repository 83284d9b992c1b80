"""The definition of a sweep: configs/sweep/NAME.yaml, read and checked.

A definition names the overrides, grid, folds and seeds of the runs, and the comparisons that scripts/report.py makes.
sweeps/plan.py turns it into runs.
"""

import json
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

from core.cli import CONFIG_DIR, parse_yaml
from core.schema import POSITIVE, ConfigError, Rule, convert, must_be_one_of, options, require, settings_of, show
from data.corpora import read_text
from training.config import TrainConfig
from training.metrics import REDUCTIONS

Grid = dict[str, dict[str, Any]]  # key -> {label: value}
Terms = tuple[tuple[str, float], ...]  # of a weighted sum: a setting, its weight


def pair(a: str, b: str) -> Terms:
    """A − B."""
    return ((a, 1), (b, -1))


def is_contrast(weights: Any) -> bool:
    """Whether it is {setting: weight}, with weights that sum to 0."""
    if not isinstance(weights, dict) or not all(isinstance(setting, str) for setting in weights):
        return False
    numbers = [weight for weight in weights.values() if type(weight) in (int, float) and weight != 0]
    return len(weights) == len(numbers) > 0 and abs(sum(numbers)) < 1e-9


OVERRIDES = Rule(lambda words: all("=" in word for word in words), "must be a list of overrides, as [max_iters=100]")
DISTINCT = Rule(lambda values: 0 < len(values) == len(set(values)), "must name at least one value, and none twice")
PAIRS = Rule(
    lambda pairs: all(isinstance(a, list) and [*map(type, a)] == [str, str] for a in pairs),
    "must be a list of pairs [A, B]",
)
CONTRASTS = Rule(
    lambda found: all(map(is_contrast, found)),
    "must be a list of {setting: weight}, with weights that are not 0 and sum to 0",
)
PLACES = Rule(lambda of: all(isinstance(x, int | float) and x > 0 for x in of.values()), "must be {word: number > 0}")


@options
class Part:
    """A named part of a sweep. on_request: only sweep.parts selects it."""

    title: str = ""
    overrides: Annotated[tuple[str, ...], OVERRIDES] = ()
    grid: Grid = field(default_factory=dict)
    folds: Annotated[tuple[int, ...] | None, DISTINCT] = None
    seeds: Annotated[tuple[int, ...] | None, DISTINCT] = None
    on_request: bool = False


@options
class Compare:
    """An entry of `compare`, tested together: the settings that match a pattern against a baseline, or pairs, or
    contrasts: weighted sums of settings, whose A has the positive weights and B the negative ones.

    metric: compares this metric alone; null: the lowest validation loss first, then every other metric.
    claim: the claimed direction of A − B. size: the claimed difference, only where the runs have the claim's own scale.
    least: the least difference worth having, registered before the first run.
    x, x_of: the title of an axis, and {word of a setting's name: its place on that axis}, for a figure of the final
    losses. share_of: another entry; the report says how much of its differences is left in those of this one.
    """

    title: str | None = None
    metric: Literal["iter_of_min", "seconds"] | None = None
    claim: Literal["lower", "higher"] | None = None
    size: Annotated[float | None, POSITIVE] = None
    least: Annotated[float | None, POSITIVE] = None
    baseline: str | None = None
    settings: tuple[str, ...] = ("*",)
    pairs: Annotated[list, PAIRS] = field(default_factory=list)
    contrast: Annotated[list, CONTRASTS] = field(default_factory=list)
    x: str | None = None
    x_of: Annotated[dict, PLACES] = field(default_factory=dict)
    share_of: str | None = None

    @property
    def named(self) -> list[Terms]:
        """The comparisons whose settings are all named, as A − B."""
        return [*(pair(a, b) for a, b in self.pairs), *(tuple(of.items()) for of in self.contrast)]

    def terms_of(self, points: Iterable[str]) -> list[Terms]:
        """The comparisons, as A − B, where a sweep has these points."""
        if self.baseline is None:
            return self.named
        chosen = [point for point in points if any(fnmatchcase(point, pattern) for pattern in self.settings)]
        return [pair(point, self.baseline) for point in chosen if point != self.baseline]


@options
class Definition:
    """The keys of configs/sweep/NAME.yaml. `extends` names a sweep whose keys are the defaults of this one.

    overrides: for every run, as train.py takes them; they are added to those of the extended sweep.
    grid: the values of each setting or config group, a list or {label: value}; `words` has {label: [override, ...]}.
    parts: name -> Part; a sweep without parts runs its grid alone. seeds: values of seed.
    folds: values of data.fold, the fold of the text that is held out; null holds out its last 10 %.
    compare, also, paper: for scripts/report.py. `also` names further metrics, by key or pattern, with the reductions
    that make one number of a run's lines; `summary` reads summary.json, and for eval/TASK/METRIC evaluation.json.
    """

    title: str = ""
    overrides: Annotated[tuple[str, ...], OVERRIDES] = ()
    folds: Annotated[tuple[int, ...] | None, DISTINCT] = None
    seeds: Annotated[tuple[int, ...], DISTINCT] = (TrainConfig.seed,)
    grid: Grid = field(default_factory=dict)
    parts: dict[str, Part] = field(default_factory=dict)
    compare: dict[str, Any] = field(default_factory=dict)
    also: dict[str, Any] = field(default_factory=dict)
    paper: dict[str, Any] = field(default_factory=dict)

    @property
    def families(self) -> dict[str, Compare]:
        return {name: settings_of(Compare, family, f"compare.{name}.") for name, family in self.compare.items()}

    def check(self) -> None:
        """What scripts/report.py could not evaluate is an error before the first run starts."""
        for name, family in self.families.items():
            good = [family.baseline is not None, bool(family.pairs), bool(family.contrast)].count(True) == 1
            require(good, f"compare.{name} must have either baseline and settings, or pairs, or contrast")
            judged = family.claim is not None or (family.least is None and family.size is None)
            require(judged, f"compare.{name}: least and size need claim=lower or higher")
            require((family.x is None) == (not family.x_of), f"compare.{name}: x and x_of are given together")
            drawn = family.x_of or family.share_of
            require(not (family.metric and drawn), f"compare.{name}: x_of and share_of draw val/loss, not metric")
            other = family.share_of
            require(other in (None, *self.compare), f"compare.{name}.share_of={other} is no entry of compare")
        known = [*REDUCTIONS, "summary"]
        for key, how in self.also.items():
            good = all(one in known for one in (how if isinstance(how, list) and how else [how]))
            require(good, f"also.{key}={show(how)} must be one of {', '.join(known)}")
        for key, numbers in self.paper.items():
            good = isinstance(numbers, Mapping) and all(isinstance(number, int | float) for number in numbers.values())
            require(key == "name" or good, f"paper.{key}={show(numbers)} must be a group of numbers")


# -----------------------------------------------------------------------------
# YAML -> mapping


def sweep_name(text: str) -> str:
    """The name of a sweep from its name, its file or its directory: dots in it stay."""
    return Path(text).name.removesuffix(".yaml")


def load_sweep(name: str, changes: Mapping[str, Any]) -> Definition:
    """The sweep of configs/sweep/`name`.yaml, or of the file `name`. changes: {"folds": [0], "grid.qk_norm.p": [2]}."""
    source, changes = read_definition(name), dict(changes)
    parts: dict[str, Any] = source["parts"]
    if "parts" in changes:
        parts = select_parts(name, parts, changes.pop("parts"))
    source["parts"] = {part: values for part, values in parts.items() if values["on_request"] is not True}
    require(bool(source["parts"]) or not parts, f"sweep={name}: name some of {', '.join(parts)} with sweep.parts=")
    for key, value in changes.items():
        if key.startswith("grid."):
            varied = key.removeprefix("grid.")
            places = {"sweep": source, **{f"sweep.parts.{part}": values for part, values in source["parts"].items()}}
            grids = [convert(values["grid"], dict, f"{place}.grid") for place, values in places.items()]
            for grid in [grid for grid in grids if varied in grid] or grids[:1]:  # a new key: of the sweep's own grid
                grid[varied] = value
        else:
            source[key] = value
            if key in ("folds", "seeds"):  # also for the parts that have their own
                source["parts"] = {part: {**values, key: None} for part, values in source["parts"].items()}
    return check_sweep(source)


def select_parts(sweep: str, parts: dict[str, Any], value: Any) -> dict[str, Any]:
    """The parts that sweep.parts=`value` names: all, a name, or a list of names."""
    require(bool(parts) or value == "all", f"sweep.parts={show(value)}: sweep={sweep} has no parts")
    chosen = [*parts] if value == "all" else [value] if isinstance(value, str) else value
    names = [*parts]  # a list: what is looked for in it may be unhashable
    good = isinstance(chosen, list) and (len(chosen) > 0 or not parts) and all(part in names for part in chosen)
    example = next(iter(parts), "")
    require(good, f"sweep.parts={show(value)} must be all, or some of {', '.join(parts)}, as [{example}]")
    return {part: {**parts[part], "on_request": False} for part in chosen}


def read_definition(name: str, extending: tuple[str, ...] = ()) -> dict[str, Any]:
    """The content of a sweep's YAML file, merged into that of the sweep it extends. extending: the chain so far."""
    chain = (*extending, name)
    require(name not in extending, f"sweep={chain[0]} extends itself: {' -> '.join(chain)}")
    known = {path.stem: path for path in sorted((CONFIG_DIR / "sweep").glob("*.yaml"))}
    file = Path(name) if name.endswith(".yaml") else known.get(name)
    if file is None:
        require(not Path(f"{name}.yaml").is_file(), f"sweep={name} lacks the file's ending: write sweep={name}.yaml")
        raise ConfigError(f"sweep={name} is no file that ends in .yaml, and {must_be_one_of(name, known, 'sweep=')}")
    require(file.is_file(), f"sweep={name} is no file")
    source = convert(parse_yaml(read_text(str(file), f"sweep={name}"), f"sweep={name}"), dict, "sweep")
    base = asdict(Definition())
    if extended := convert(source.pop("extends", ""), str, "sweep.extends"):
        if extended.endswith(".yaml"):  # relative to this file
            extended = os.path.normpath(file.parent / extended)
        base = read_definition(extended, chain)
    merged = {**base, **source, "parts": dict(base["parts"])}
    added = convert(source.get("overrides", []), tuple[str, ...], "sweep.overrides")
    merged["overrides"] = [*base["overrides"], *added]
    for key in ("compare", "also", "paper"):
        both = {**base[key], **convert(source.get(key) or {}, dict, f"sweep.{key}")}
        merged[key] = {name: value for name, value in both.items() if value is not None}  # null removes an entry
    for part, content in convert(source.get("parts") or {}, dict, "sweep.parts").items():
        require(not {"/", ";"} & {*part}, f"sweep.parts.{part}: a part's name has no / and no ;")
        changed = convert(content or {}, dict, f"sweep.parts.{part}")
        merged["parts"][part] = {**asdict(Part()), **merged["parts"].get(part, {}), **changed}
    return merged


# -----------------------------------------------------------------------------
# Mapping -> definition


def check_sweep(source: Mapping[str, Any]) -> Definition:
    """`source` as a definition, with every type and rule checked."""
    try:
        json.dumps(source, ensure_ascii=False, default=str).encode()
    except ValueError as error:
        raise ConfigError(f"a sweep's definition is not Unicode text: {error}") from error
    parts = {}
    for name, part in convert(source.get("parts", {}), dict, "sweep.parts").items():
        part = convert(part, dict, f"sweep.parts.{name}")
        key = f"sweep.parts.{name}."
        parts[name] = settings_of(Part, {**part, "grid": checked_grid(f"{key}grid", part.get("grid", {}))}, key)
    grid = checked_grid("sweep.grid", source.get("grid", {}))
    return settings_of(Definition, {**source, "grid": grid, "parts": parts}, "sweep.")


def checked_grid(key: str, swept: Any) -> Grid:
    """A grid in which every value has a label, "p=3" where the definition gives none."""
    grid: Grid = {}
    for setting, values in convert(swept, dict, key).items():
        name = f"{key}.{setting}"
        full = isinstance(values, list | dict) and len(values) > 0
        require(full, f"{name}={show(values)} must be a list of values, as [2,3]")
        if isinstance(values, list):
            labels = [f"{setting.rpartition('.')[2]}={show(value)}" for value in values]
            require(len(set(map(plain, labels))) == len(labels), f"{name}={values} names a value twice")
            values = dict(zip(labels, values, strict=True))
        if setting == "words":
            for label, overrides in values.items():
                words = convert(overrides, tuple[str, ...], f"{name}.{label}")
                require(OVERRIDES.holds(words), f"{name}.{label}={show(words)} {OVERRIDES.says}")
        grid[setting] = {str(label): value for label, value in values.items()}
        for label in grid[setting]:
            require(";" not in label, f"{name}.{label}: a label has no ;")
    return grid


def part_and_name(point: str, parts: Collection[str]) -> tuple[str, str]:
    """The part of a point, "" where the sweep has no `parts`, and its name within the part. A part's name has no /."""
    part, _, name = point.partition("/")
    return (part, name or part) if parts else ("", point)


def plain(point: str) -> str:
    """The name of a point with p=2 for p=2.0, since both are one value."""
    return re.sub(r"(=-?\d+)\.0(?=[,/]|$)", r"\1", point)
