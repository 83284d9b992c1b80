"""What a sweep is: parts x grid x folds x seeds -> runs, all composed, checked and frozen before one starts.

A sweep is a file configs/sweep/NAME.yaml; the sweep's directory (by default runs/NAME) holds, frozen, `plan.jsonl` (a
line a run, with its whole config), `sweep.json` (the definition; each commit of the code at which runs were planned,
with the words that were given), `code_COMMIT.diff` where the checkout had changes, and each run in a directory of its
own.
"""

import fcntl
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from core.cli import CONFIG_DIR, explain, parse_yaml
from core.files import read_json, write_atomic
from core.rundir import at_end, commit, short, uncommitted
from core.schema import ConfigError, build, convert, did_you_mean, flatten, require, show
from training.config import TrainConfig, load_config

GROUPS = {path.name for path in CONFIG_DIR.iterdir() if path.is_dir()} - {"sweep", "launcher"}


Grid = dict[str, dict[str, Any]]  # key -> {name of a value: value}


@dataclass(frozen=True)
class Part:
    """A named protocol of a sweep: its overrides x its grid. on_request: left out unless sweep.parts names it."""

    title: str = ""
    overrides: list[str] = field(default_factory=list)
    grid: Grid = field(default_factory=dict)
    on_request: bool = False


@dataclass(frozen=True)
class Sweep:
    """configs/sweep/NAME.yaml.

    extends: another sweep, of which this one changes what it names; overrides are added to that one's. overrides:
    train.py's words for every run. grid: values of a setting or of a group, for every part: a list, or {name: value};
    of `words`: {name: list of train.py's words}. parts: name -> Part; without any, the grid alone. folds: values of
    data.fold; null holds out the last 10 %. seeds: values of seed. compare, also, paper: what scripts/report.py makes
    of the runs; also: other metrics than the loss, key or pattern -> how a run's lines become one number (last, max,
    min, mean, sum, roughness: the mean distance of a line from the middle of its neighbours), or several such as
    [max, roughness], or summary: summary.json has it, or, as eval/TASK/METRIC, the evaluation.json of
    scripts/evaluate_lm.py.
    """

    title: str = ""
    overrides: list[str] = field(default_factory=list)
    folds: list[int] | None = None
    seeds: list[int] = field(default_factory=lambda: [1337])
    grid: Grid = field(default_factory=dict)
    parts: dict[str, Part] = field(default_factory=dict)
    compare: dict[str, Any] = field(default_factory=dict)
    also: dict[str, Any] = field(default_factory=dict)
    paper: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PlannedRun:
    """id: the run directory's name. settings: the points of the sweep that it belongs to, "part/p=3"; of several where
    they come to the same run. overrides: train.py's words for it. config: without out_dir, which is the sweep's."""

    id: str
    settings: list[str]
    seed: int
    fold: int | None
    overrides: list[str]
    config: TrainConfig


def roughness(values: Sequence[float]) -> list[float]:
    """How far each value lies from the middle of its neighbours: 0 along a straight line, however steep."""
    return [abs(b - (a + c) / 2) for a, b, c in zip(values, values[1:], values[2:], strict=False)]


REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {  # of Sweep.also
    "last": lambda values: values[-1], "max": max, "min": min, "mean": fmean, "sum": sum,
    "roughness": lambda values: fmean(roughness(values)) if len(values) > 2 else 0.0,
}  # fmt: skip
SWEEP_KEYS = [f.name for f in fields(Sweep)]

# -----------------------------------------------------------------------------
# The definition


def load_sweep(name: str, changes: Mapping[str, Any]) -> Sweep:
    """The sweep of configs/sweep/`name`.yaml, or of the file `name`, with `changes` to it: {"folds": [0],
    "grid.qk_norm.p": [2, 3]}.

    Raises: ConfigError naming key, value and rule.
    """
    source = read_definition(name)
    parts = source["parts"]
    for key, value in changes.items():
        if key.startswith("grid."):
            swept = key.removeprefix("grid.")
            grids = [source["grid"], *(part["grid"] for part in parts.values())]
            for grid in [grid for grid in grids if swept in grid] or grids[:1]:
                grid[swept] = value
        elif key == "parts":
            chosen = [*parts] if value == "all" else [value] if isinstance(value, str) else value
            require(bool(parts) or value == "all", f"sweep.parts={show(value)}: sweep={name} has no parts")
            good = isinstance(chosen, list) and (len(chosen) > 0 or not parts) and all(part in parts for part in chosen)
            example = "".join([*parts][:1])
            require(good, f"sweep.parts={show(value)} must be all, or some of {', '.join(parts)}, as [{example}]")
            source["parts"] = {part: {**parts[part], "on_request": False} for part in chosen}
        else:
            require(key in SWEEP_KEYS, f"sweep.{key}={show(value)} is unknown{did_you_mean(key, SWEEP_KEYS, 'sweep.')}")
            source[key] = value
    source["parts"] = {name: part for name, part in source["parts"].items() if not part["on_request"]}
    return check_sweep(source)


def read_definition(name: str, extending: tuple[str, ...] = ()) -> dict[str, Any]:
    """A sweep's YAML file on top of the one that it extends; its parts are whole, its keys are known.

    extending: the sweeps that this one is read for.
    """
    chain = (*extending, name)
    require(name not in extending, f"sweep={chain[0]} extends itself: {' -> '.join(chain)}")
    known = sorted(path.stem for path in (CONFIG_DIR / "sweep").glob("*.yaml"))
    file = Path(name) if name.endswith(".yaml") else CONFIG_DIR / "sweep" / f"{name}.yaml"
    require(file.is_file() or file.suffix != ".yaml" or file.parent == CONFIG_DIR / "sweep", f"sweep={name} is no file")
    require(file.is_file(), f"sweep={name} must be one of {', '.join(known)}, or a file that ends in .yaml")
    try:
        source = parse_yaml(file.read_text(encoding="utf-8"), f"sweep={name}")
    except UnicodeDecodeError as error:
        raise ConfigError(f"sweep={name}: {error}") from error

    def group(key: str, value: Any, known: list[str] | None = None) -> dict[str, Any]:
        require(isinstance(value, dict), f"{key}={show(value)} must be a group of settings")
        for leaf in value:
            require(known is None or leaf in known, f"{key}.{leaf} is unknown{did_you_mean(str(leaf), known or [])}")
        return {str(leaf): content for leaf, content in value.items()}

    source = group("sweep", source, [*SWEEP_KEYS, "extends"])
    empty: dict[str, Any] = {"overrides": [], "grid": {}, "parts": {}, "compare": {}, "also": {}, "paper": {}}
    extended = str(source.pop("extends", ""))
    if extended.endswith(".yaml"):  # beside this file
        extended = os.path.normpath(file.parent / extended)
    base = read_definition(extended, chain) if extended else empty
    merged = {**base, **source, "parts": dict(base["parts"])}
    merged["overrides"] = [*base["overrides"], *list_of_words("overrides", source.get("overrides", []))]
    for key in ("compare", "also", "paper"):
        both = {**base[key], **group(f"sweep.{key}", source.get(key) or {})}
        merged[key] = {name: value for name, value in both.items() if value is not None}  # null takes an entry away
    merged["grid"] = group("sweep.grid", merged["grid"])
    for part, content in group("sweep.parts", source.get("parts") or {}).items():
        new = group(f"sweep.parts.{part}", content or {}, [f.name for f in fields(Part)])
        merged["parts"][part] = {**asdict(Part()), **merged["parts"].get(part, {}), **new}
        merged["parts"][part]["grid"] = group(f"sweep.parts.{part}.grid", merged["parts"][part]["grid"])
    return merged


def plain(name: str) -> str:
    """A setting's name with p=2 for p=2.0, which are one."""
    return re.sub(r"(=-?\d+)\.0(?=[,/]|$)", r"\1", name)


def list_of_words(key: str, words: Any) -> list[str]:
    good = isinstance(words, list) and all(isinstance(word, str) and "=" in word for word in words)
    require(good, f"sweep.{key}={show(words)} must be a list of key=value words")
    return list(words)


def check_sweep(source: Mapping[str, Any]) -> Sweep:
    """`source` as a Sweep with the right types."""

    def grid(key: str, swept: Mapping[str, Any]) -> Grid:
        named: Grid = {}
        for setting, options in swept.items():
            full = isinstance(options, list | dict) and len(options) > 0
            require(full, f"sweep.{key}.{setting}={show(options)} must be a list of values, as [2,3]")
            if isinstance(options, list):
                leaf = setting.rpartition(".")[2]
                names = [f"{leaf}={show(option)}" for option in options]
                require(
                    len(set(map(plain, names))) == len(names), f"sweep.{key}.{setting}={options} names a value twice"
                )
                options = dict(zip(names, options, strict=True))
            for name, words in options.items() if setting == "words" else ():
                list_of_words(f"{key}.words.{name}", words)
            named[setting] = {str(name): value for name, value in options.items()}
        return named

    def integers(key: str, values: Any) -> list[int]:
        good = isinstance(values, list) and len(values) > 0 and all(type(value) is int for value in values)
        require(good, f"sweep.{key}={show(values)} must be a list of integers, as [0,1]")
        require(len(set(values)) == len(values), f"sweep.{key}={values} names a value twice")
        return list(values)

    check_evaluation(source["compare"], source["also"], source["paper"])
    folds = source.get("folds")
    parts = {
        name: Part(
            title=convert(part["title"], str, f"sweep.parts.{name}.title"),
            overrides=list_of_words(f"parts.{name}.overrides", part["overrides"]),
            grid=grid(f"parts.{name}.grid", part["grid"]),
        )
        for name, part in source["parts"].items()
    }
    return Sweep(
        title=convert(source.get("title", ""), str, "sweep.title"),
        overrides=list_of_words("overrides", source["overrides"]),
        folds=None if folds is None else integers("folds", folds),
        seeds=integers("seeds", source.get("seeds", [TrainConfig.seed])),
        grid=grid("grid", source["grid"]),
        parts=parts,
        compare=source["compare"],
        also=source["also"],
        paper=source["paper"],
    )


def check_evaluation(compare: Mapping[str, Any], also: Mapping[str, Any], paper: Mapping[str, Any]) -> None:
    """Raise ConfigError, naming key, value and rule, for what scripts/report.py could not make of the runs."""
    for key, group in {"compare": compare, "also": also, "paper": paper}.items():
        require(isinstance(group, Mapping), f"{key}={show(group)} must be a group of settings")
    for name, family in compare.items():
        key, known = f"compare.{name}", ["title", "baseline", "settings", "pairs"]
        require(isinstance(family, dict), f"{key}={show(family)} must be a group of settings")
        for leaf in family:
            require(leaf in known, f"{key}.{leaf} is unknown{did_you_mean(leaf, known)}")
        pairs, patterns = family.get("pairs") or [], family.get("settings") or ["*"]
        title = family.get("title")
        require(title is None or isinstance(title, str), f"{key}.title={show(title)} must be text")
        require(("baseline" in family) != bool(pairs), f"{key} must have either baseline and settings, or pairs")
        good = isinstance(pairs, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in pairs)
        require(good, f"{key}.pairs={pairs} must be a list of pairs [A, B]")
        require(isinstance(patterns, list), f"{key}.settings={patterns} must be a list of patterns")
    for key, how in also.items():
        known = [*REDUCTIONS, "summary"]
        several = how if isinstance(how, list) and how else [how]
        require(all(one in known for one in several), f"also.{key}={show(how)} must be one of {', '.join(known)}")
    for key, numbers in paper.items():
        good = isinstance(numbers, Mapping) and all(isinstance(number, int | float) for number in numbers.values())
        require(key == "name" or good, f"paper.{key}={show(numbers)} must be a group of numbers")


# -----------------------------------------------------------------------------
# Definition -> runs


def plan_runs(sweep: Sweep, overrides: list[str]) -> list[PlannedRun]:
    """Every run of a sweep, composed and checked; `overrides` are words for all of them.

    All settings of a fold stand together, so that a sweep that is part done compares over whole folds.
    Raises: ConfigError for the first run that cannot be.
    """
    grids = [sweep.grid, *(part.grid for part in sweep.parts.values())]
    swept = {key for grid in grids for key in grid}
    for word in overrides:
        key = key_of(word)
        require(key not in swept, f"{word}: this sweep varies {key}; write sweep.grid.{key}=[...]")
    lists = [options for grid in grids for options in grid.get("words", {}).values()]
    lists += [overrides, sweep.overrides, *(part.overrides for part in sweep.parts.values())]
    given = {**{key: f"grid.{key}" for key in swept}, **{key_of(word): word for words in lists for word in words}}
    for key, word in given.items():
        good = key not in INSTEAD or (key == "data.fold" and sweep.folds is None)
        require(good, f"{word}: {INSTEAD.get(key)}")
    runs: dict[str, PlannedRun] = {}
    compose = Composer()
    folds: list[int | None] = [None] if sweep.folds is None else [*sweep.folds]
    for fold, seed in itertools.product(folds, sweep.seeds):
        for name, part in (sweep.parts or {"": Part()}).items():
            grid = {**sweep.grid, **part.grid}
            for names in itertools.product(*grid.values()):
                point = {key: grid[key][value] for key, value in zip(grid, names, strict=True)}
                setting = "/".join(filter(None, [name, ",".join(names)])) or "all"
                chosen = [*point.pop("words", [])]
                chosen += [f"{key}={show(value)}" for key, value in point.items() if key in GROUPS]
                rest = {key: value for key, value in point.items() if key not in GROUPS}
                rest |= {"seed": seed} if fold is None else {"seed": seed, "data.fold": fold}
                words = [*sweep.overrides, *part.overrides, *overrides, *chosen]
                config = replace(compose(words, rest), out_dir=None)
                run_id = config.run_dir.name
                if run_id in runs:
                    changed = ", ".join(differences(runs[run_id].config, config))
                    same = f"{setting} and {runs[run_id].settings[0]} are the same run to a sweep"
                    require(not changed, f"{same}, which does not tell runs apart by {changed}")
                    runs[run_id].settings.append(setting)
                else:
                    added = [f"{key}={show(value)}" for key, value in rest.items()]
                    runs[run_id] = PlannedRun(run_id, [setting], seed, fold, [*words, *added], config)
    return list(runs.values())


INSTEAD = {  # of these settings of a run, in a sweep
    "seed": "write sweep.seeds=[...]",
    "data.fold": "write sweep.folds=[...]",
    "out_dir": "write sweep_dir=..., which holds every run's directory",
    "fresh": "write another sweep_dir=... to start a sweep anew",
    "eval_only": "a sweep trains; python train.py evaluates its runs one by one",
}


def key_of(word: str) -> str:
    return word.lstrip("+").split("=")[0]


class Composer:
    """Hydra composes each list of words once; plain values are then put in and checked, which is 100 times faster."""

    def __init__(self) -> None:
        self.composed: dict[tuple[str, ...], dict[str, Any]] = {}

    def __call__(self, words: list[str], values: Mapping[str, Any]) -> TrainConfig:
        source = self.composed.get(tuple(words))
        if source is None:
            source = self.composed[tuple(words)] = compose(words)
        changed = dict(source)
        for key, value in values.items():
            *groups, leaf = key.split(".")
            node = changed
            for group in groups:
                require(isinstance(node.get(group), dict), f"{key}={show(value)} is unknown")
                node[group] = dict(node[group])  # the composed one stays as it is
                node = node[group]
            node[leaf] = value
        try:
            return load_config(changed)
        except ConfigError as error:
            plain = [f"{key}={show(value)}" for key, value in values.items()]
            raise ConfigError(f"{error} (in the run {' '.join([*words, *plain])})") from error


def compose(words: list[str]) -> dict[str, Any]:
    """What `python train.py WORDS` composes, as a nested dict."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
            composed = OmegaConf.to_container(hydra_compose("train", words), resolve=True)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(explain(error, TrainConfig, words)) from error
    assert isinstance(composed, dict)
    return {str(key): value for key, value in composed.items()}


# -----------------------------------------------------------------------------
# Runs <-> the sweep's directory


def freeze(sweep_dir: Path, name: str, sweep: Sweep, overrides: list[str], runs: list[PlannedRun]) -> None:
    """Write the plan, or find it written: from here on the runs' configs do not change.

    A plan already there may hold more runs than these, or fewer; then it grows. What the report makes of the runs
    (title, compare, also, paper) is as last asked for. Raises: ConfigError where it holds runs with the settings, fold
    and seed of these, but other configs.
    """
    try:
        sweep_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"sweep_dir={sweep_dir} cannot be made: {error.strerror}") from error
    with locked(sweep_dir):
        frozen = {run.id: run for run in read_plan(sweep_dir)} if (sweep_dir / "plan.jsonl").exists() else {}
        places = {(plain(s), run.fold, run.seed): run for run in frozen.values() for s in run.settings}
        for run in runs:
            for setting in run.settings:
                other = places.get((plain(setting), run.fold, run.seed), run)
                if other.id != run.id or other.config != run.config:
                    changed = ", ".join(differences(other.config, run.config))
                    raise ConfigError(
                        f"sweep_dir={sweep_dir} holds {setting} with other settings: {changed}; use another sweep_dir"
                    )
        merged = {**frozen, **{run.id: run for run in runs if run.id not in frozen}}
        for run in runs:  # a new part may share a run with an old one
            settings = merged[run.id].settings
            known = {plain(setting) for setting in settings}
            merged[run.id] = replace(
                merged[run.id], settings=[*settings, *(s for s in run.settings if plain(s) not in known)]
            )
        before = read_json(sweep_dir / "sweep.json")
        definition, old = asdict(sweep), before.get("sweep", {})
        about: dict[str, Any] = {"name": name, "frozen": before.get("frozen", []), "sweep": definition}
        this, grows = {"commit": commit(), "overrides": overrides, "runs": len(merged)}, merged != frozen or not old
        if grows:
            definition["parts"] = {**old.get("parts", {}), **definition["parts"]}
        else:  # what the report makes of the runs may change
            definition |= {key: value for key, value in old.items() if key not in ("title", "compare", "also", "paper")}
        at = about["frozen"][-1]["commit"] if about["frozen"] else None
        moved = at != this["commit"] and any(not at_end(sweep_dir / run.id) for run in runs)
        if grows or moved:
            about["frozen"] = [*(one for one in about["frozen"] if one != this), this]
            if changes := uncommitted():
                write_atomic(sweep_dir / f"code_{short(str(this['commit']))}.diff", changes)
        if moved and not grows:
            print(f"warning: planned at commit {at}, and what is left is made by {this['commit']}")
        if about != before:
            write_atomic(sweep_dir / "sweep.json", (json.dumps(about, indent=2) + "\n").encode())
        if merged != frozen:
            content = "".join(json.dumps({**asdict(r), "config": asdict(r.config)}) + "\n" for r in merged.values())
            write_atomic(sweep_dir / "plan.jsonl", content.encode())  # last: what has a plan has the rest


def read_plan(sweep_dir: Path) -> list[PlannedRun]:
    """The frozen runs. Raises: ConfigError where there is no plan, or none that can be read."""
    try:
        lines = (sweep_dir / "plan.jsonl").read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"sweep_dir={sweep_dir} holds no sweep (it has no plan.jsonl)") from error
    require(len(lines) > 0, f"sweep_dir={sweep_dir} has a plan.jsonl without a run")
    try:
        plans = [json.loads(line) for line in lines]
        return [PlannedRun(**{**plan, "config": build(TrainConfig, plan["config"])}) for plan in plans]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"sweep_dir={sweep_dir} has a plan.jsonl that cannot be read: {error}") from error


def differences(old: TrainConfig, new: TrainConfig) -> list[str]:
    flat, other = ({**flatten(asdict(config)), **config.trajectory} for config in (old, new))
    keys = [key for key in {**flat, **other} if flat.get(key) != other.get(key)]
    return [f"{key} {show(flat.get(key))} -> {show(other.get(key))}" for key in keys]


@contextmanager
def locked(sweep_dir: Path) -> Iterator[None]:
    """Held while a plan is read and written, so that two launchers freeze one plan."""
    file = os.open(sweep_dir / "plan.lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)
