"""A track's board: python scripts/track.py [enter=FILE] [verify=NAME] [withdraw=NAME reason=TEXT]

Rebuilds from the committed files of its folder the tables of its README.md, board.csv and rates.svg, and the first rows
in the README of the repository.
enter=FILE     adds a row first: FILE.yaml names a contestant and its overrides, FILE.py is a plugin of one variant. It
               says what that costs, then trains what the rules ask for; killed at any moment, the same command goes on.
verify=NAME    checks an entry against the rules and board.csv. repeat=true trains two of its final runs again, with its
               own code, which you should have read, and two of RMS.
withdraw=NAME  keeps an entry, with the reason, and no longer counts it. An older one of that name counts again.
open=true      trains the grid and the final runs of a new board, that of sweep=.
"""

import contextlib
import datetime
import hashlib
import json
import math
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

from core.cli import parse_yaml, run_script
from core.files import (
    ROOT,
    FileLock,
    config_folder,
    expand,
    file_sha256,
    finish_replacing,
    read_json,
    read_regular,
    readable_json,
    remove_aside,
    write_atomic,
)
from core.plugins import LOADED, changed_plugins, load_plugins, plugin_hashes
from core.process import in_one_line, say
from core.schema import (
    NOT_EMPTY,
    ConfigError,
    Help,
    convert,
    deciding,
    declared,
    flatten,
    options,
    require,
    settings_of,
    show,
)
from data.corpora import read_text
from scripts.report import provenance, write_files
from scripts.reporting import track
from scripts.reporting.charts import svg
from scripts.reporting.page import END, with_block
from scripts.reporting.rates import best_rate
from scripts.reporting.runs import Sweep, read_sweep
from scripts.reporting.stored import curves_csv, runs_csv
from scripts.reporting.track import BASELINE, ENTRY, FINAL, LOSS_KEY, NAME, ONE_LINE, PLAIN, ROWS, SLOTS, TIMES, Entry
from sweeps import launch
from sweeps.definition import OVERRIDES, Definition, check_sweep, load_sweep, sweep_name
from sweeps.plan import key_of, plan_runs
from training.config import TrainConfig, to_yaml

BEGIN = "<!-- made by scripts/track.py -->\n"
DISPUTED = "<!-- made by scripts/track.py from disputes.yaml -->\n"
TRACK = "attention_track"
SEEDS = [*range(11, 19)]  # of the final runs
MORE_RATES = 3  # than the grid has, where the best one is at its edge
LENGTH = ("max_iters", "eval_interval", "eval_iters", "dtype")  # what the recipe says and no run id
LEFT = "|".join(map(re.escape, ("provenance.json", *TIMES)))  # what is written alone into the folder of an entry
QUIET = 0.3  # CPUs that other programs may use while times are measured
ROUNDS = (41, 21)  # of the times of updates, of decoding
Words = Mapping[str, Sequence[str]]  # the overrides of each contestant
Rates = Mapping[str, Sequence[float]]  # learning rates of the grid


@options
class Contestant:
    """The file of an entry."""

    name: Annotated[str, NAME]
    overrides: Annotated[tuple[str, ...], OVERRIDES]
    by: Annotated[str, ONE_LINE] = "–"


@options
class TrackOptions:
    enter: Annotated[str | None, NOT_EMPTY, Help("file of an entry: my_entry.yaml, or a plugin, my_variant.py")] = None
    by: Annotated[str | None, ONE_LINE, Help("who enters it")] = None
    dry_run: Annotated[bool, Help("with enter=: say what it costs, and end")] = False
    verify: Annotated[str | None, ENTRY, Help("name of an entry to check")] = None
    repeat: Annotated[bool, Help("with verify=: train some of its runs again, with its own code")] = False
    withdraw: Annotated[str | None, ENTRY, Help("name of an entry that counts no longer")] = None
    reason: Annotated[str | None, ONE_LINE, Help("of withdraw=")] = None
    open: Annotated[bool, Help("train all contestants of sweep=, which opens its board")] = False
    sweep: Annotated[str, NOT_EMPTY, Help("definition of the track")] = TRACK
    folder: Annotated[str | None, NOT_EMPTY, Help("of the board; null: results/SWEEP")] = None
    sweep_dir: Annotated[str | None, NOT_EMPTY, Help("of the runs; null: runs/entries/SWEEP/NAME")] = None

    def check(self) -> None:
        what = [self.enter is not None, self.verify is not None, self.withdraw is not None, self.open]
        require(sum(what) <= 1, "enter=, verify=, withdraw= and open= exclude one another")
        require((self.withdraw is None) == (self.reason is None), "withdraw= and reason= are given together")

    @property
    def board(self) -> Path:
        return expand(self.folder or ROOT / "results" / sweep_name(self.sweep)).resolve()


class UnfinishedError(Exception):
    """Runs that have not ended: the exit status of the launcher."""


def make(asked: TrackOptions) -> int:
    sweep = load_sweep(asked.sweep, {})
    good = "words" in sweep.grid and "optim.learning_rate" in sweep.grid
    require(good, f"sweep={asked.sweep} is no track: its grid lacks words or optim.learning_rate")
    try:
        if asked.verify:
            return verify(asked, sweep)
        if asked.enter or asked.open:
            add(asked, sweep)
    except UnfinishedError as end:
        return int(end.args[0])
    if not asked.dry_run:
        change = withdrawn(asked) if asked.withdraw else contextlib.nullcontext()
        with FileLock(config_folder() / "board.lock"), change:  # of two commands at once each writes both rows
            write_board(asked.board, sweep)
    return 0


@contextlib.contextmanager
def withdrawn(asked: TrackOptions) -> Iterator[None]:
    """Withdraw an entry; an error within the block takes that back."""
    file = asked.board / "entries" / str(asked.withdraw) / "provenance.json"
    require(file.is_file(), f"withdraw={asked.withdraw} is no entry of {asked.board}")
    remove_aside(file.parent, LEFT)
    about, before = read_json(file), read_regular(file)
    require(len(about) > 0, f"{file} cannot be read")
    known = about.get("withdrawn", asked.reason)
    require(known == asked.reason, f"withdraw={asked.withdraw} is withdrawn already: {show(known)}")
    write_atomic(file, readable_json(about | {"withdrawn": asked.reason}))
    try:
        yield
    except BaseException:
        write_atomic(file, before)
        raise


def write_board(folder: Path, sweep: Definition) -> None:
    page, found = folder / "README.md", track.rows(folder)
    text = read_text(str(page), str(page)) if page.exists() else f"# {sweep.title}\n\n{BEGIN}{END}\n"
    text = with_block(text, BEGIN, track.board(found))
    if (file := folder / "disputes.yaml").is_file() and DISPUTED in text:
        said = convert(parse_yaml(read_text(str(file), str(file)), str(file)), dict, str(file))
        said = {one: convert(names, tuple[str, ...], f"{file}: {one[:50]}") for one, names in said.items()}
        text = with_block(text, DISPUTED, track.disputed(found, said))
    made = {
        page: text,
        folder / "board.csv": track.board_csv(found),
        folder / "rates.svg": svg(track.rates_figure([row for row in found if not row.status])).decode(),
    }
    if folder.resolve() == ROOT / "results" / TRACK:
        from scripts import docs  # which loads torch

        made[docs.README] = docs.readme()
    for file, content in made.items():
        write_atomic(file, content.encode())
    say(f"written: {', '.join(map(str, made))}")


# -----------------------------------------------------------------------------
# An entry: its file, the rules


def read_contestant(file: Path, by: str | None) -> Contestant:
    """The contestant of a .yaml, or that of a plugin: its one variant, with its defaults. Raises: ConfigError."""
    if file.suffix == ".yaml":
        source = convert(parse_yaml(read_text(str(file), f"enter={file}"), f"enter={file}"), dict, f"enter={file}")
    else:
        require(file.suffix == ".py", f"enter={file} must be a .yaml, or a plugin's .py")
        load_plugins([file.stem])
        found = Path(LOADED[file.stem].path)
        told = f"enter={file}: start in its folder, as plugins=[{file.stem}] is {found}"
        require(found.resolve() == file.resolve(), told)
        known = [(group, *one) for group in SLOTS for one in declared(TrainConfig)[group].options.items()]
        made = [(group, name) for group, name, cls in known if cls.__module__ == file.stem]
        require(len(made) == 1, f"enter={file} must register one variant, not {len(made)}: a .yaml can name one")
        ((group, name),) = made
        source = {"name": name, "overrides": [f"plugins=[{file.stem}]", f"{group}={name}"]}
    return settings_of(Contestant, source | ({"by": by} if by else {}))


def check_rules(entry: Contestant, folder: Path, config: TrainConfig) -> Sequence[str]:
    """The plugins of an entry. Raises: ConfigError where it breaks the rules of a board."""
    for override in entry.overrides:
        good = key_of(override).partition(".")[0] in (*SLOTS, "plugins")
        require(good, f"{entry.name}: {override} breaks the rules: an entry sets {', '.join(SLOTS)} and plugins alone")
        require(not {" ", ";"} & {*override}, f"{entry.name}: {override} must have no space and no ;")
    own = config.attention.name not in ("gqa", "mla") and getattr(config.attention, "head_dim", None) is None
    require(own, f"{entry.name}: attention={config.attention.name} of another size is another model, no contestant")
    several = next((name for name in config.plugins if len(LOADED[name].files) > 1 or "." in name), None)
    require(several is None, f"{entry.name}: plugins=[{several}] must be one file: it is stored with the entry")
    for row in track.rows(folder):
        same = row.settings["plugins"] == plugin_hashes(config.plugins) and not differing(config, row.settings, SLOTS)
        require(not same or row.status != "" or row.name == entry.name, f"{entry.name} has the settings of {row.name}")
    return config.plugins


def differing(config: TrainConfig, found: Mapping[str, Any], groups: Collection[str]) -> list[str]:
    """The settings of these groups that differ. One that `found` lacks, as it is older, had its value of that time."""
    known = {*deciding(config), *LENGTH, *found}
    asked = {key: value for key, value in flatten(asdict(config)).items() if key.partition(".")[0] in groups}
    unlike = {key for key, value in asked.items() if key in known and show(found.get(key)) != show(value)}
    return [f"{key}={show(found.get(key))}" for key in asked if key in unlike]


# -----------------------------------------------------------------------------
# Its runs


def add(asked: TrackOptions, sweep: Definition) -> None:
    """Train and store an entry, or what opens a board. Raises: ConfigError, UnfinishedError."""
    sweep, folder, name, known = here(sweep), asked.board, "opening", {}
    words, files, about = sweep.grid["words"], {}, {}
    if asked.enter:
        entry = read_contestant(expand(asked.enter), asked.by)
        name, about, known = entry.name, {"by": entry.by}, {BASELINE: opened(folder)[0]}
        if not asked.dry_run:
            finish_replacing(folder / f"entries/{name}")  # where this command was killed before
        full = f"{folder} has {ROWS} comparisons, the most of a board: a new one begins with open=true and its sweep="
        require(sum(row.against is not None for row in track.rows(folder)) < ROWS, full)
        words = {name: entry.overrides, BASELINE: words[BASELINE]}
    else:
        finish_replacing(folder)
        require({BASELINE, PLAIN} <= words.keys(), f"sweep={asked.sweep} needs the contestants {BASELINE} and {PLAIN}")
        require(not (folder / "grid").exists(), f"{folder} has a board already: another sweep= opens another one")
    first = {of: [*sweep.grid["optim.learning_rate"].values()] for of in words if of not in known}
    place = expand(asked.sweep_dir or f"runs/entries/{sweep_name(asked.sweep)}/{name}").resolve()
    begun = (place / "plan.jsonl").exists()  # maybe with final runs, at the best rates, which are not known here
    every = definition(sweep, words, first, {} if begun else dict.fromkeys(words, 1e-3))
    plugins = check_rules(entry, folder, plan_runs(every, [])[0].config) if asked.enter else ()
    launched(every, place, dry_run=True)
    dtype = ", in float32" if "dtype=float32" in sweep.overrides else ""
    say(f"The estimate comes from a short timing on this machine{dtype}.")
    final = "the final runs, " if begun else ""
    say(f"Not included: {final}2 runs for each extra rate, and some minutes to time updates.")
    if asked.enter:
        folder /= f"entries/{name}"
        files = {f"{plugin}.py": read_regular(Path(LOADED[plugin].path)) for plugin in plugins}
        files["entry.yaml"] = to_yaml(entry).encode()
    if not asked.dry_run:
        found = trained(sweep, words, first, known, place)
        with FileLock(place / "entry.lock"):  # two commands of one entry end together
            command = f"enter={Path(asked.enter).name}" if asked.enter else "open=true"  # no folder of this machine
            of_entry = (folder, found, files, command, about)
            store(*of_entry)
            measure(folder, sweep, words)
            store(*of_entry)  # with the SHA-256 of the times


def opened(folder: Path) -> tuple[float, float]:
    """Of the runs that opened a board: the best rate of BASELINE, and σ of a loss over seeds."""
    rows = {row.name: row for row in track.opened(folder)}
    floor = track.noise_floor([*rows.values()])
    if floor is None or BASELINE not in rows:
        raise ConfigError(f"{folder}/final has no runs of {BASELINE}, or no two pairs with {PLAIN}")
    return best_rate(rows[BASELINE].means), floor[0]


def here(sweep: Definition) -> Definition:
    """The track on this machine: in float32 where it has no bf16 hardware."""
    from core.device import has_bfloat16, resolve_device  # which load torch

    fits = has_bfloat16(resolve_device("auto"))
    return sweep if fits else replace(sweep, overrides=(*sweep.overrides, "dtype=float32"))


def definition(
    sweep: Definition, words: Words, rates: Rates, best: Mapping[str, float], seeds: Sequence[int] = SEEDS
) -> Definition:
    """The sweep of contestants: a part for the grid of each that has `rates`, and FINAL at the `best` rates."""
    grid = {
        name: {"overrides": [*words[name]], "grid": {"optim.learning_rate": sorted(of)}} for name, of in rates.items()
    }
    chosen = {name: [*words[name], f"optim.learning_rate={rate}"] for name, rate in best.items()}
    final = {FINAL: {"grid": {"words": chosen}, "seeds": seeds}} if best else {}
    return check_sweep({**asdict(sweep), "grid": {}, "compare": {}, "parts": {**grid, **final}})


def trained(sweep: Definition, words: Words, rates: Rates, known: Mapping[str, float], place: Path) -> Sweep:
    """The grid and the final runs of contestants, trained as far as they are not. rates: those of the grid. known: best
    rates of those that have none. Raises: UnfinishedError."""
    first = rates
    while True:
        launched(definition(sweep, words, rates, {}), place)
        means = track.mean_losses(track.grid_and_final(read_runs(place))[0])
        ruled = {name: track.ruled_rates(first[name], of, MORE_RATES) for name, of in means.items()}
        more = [f"{name} {rate:g}" for name, of in ruled.items() for rate in of if rate not in rates[name]]
        if not more:
            break
        say(f"best at the grid's edge, so one more rate: {', '.join(more)}")
        rates = ruled
    best = {name: best_rate(of) for name, of in means.items()}
    launched(definition(sweep, words, rates, {**best, **known}), place)
    return read_runs(place)


def launched(planned: Definition, place: Path, dry_run: bool = False) -> None:
    """Train what is left of a sweep, or only say what that takes. Raises: UnfinishedError."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, f"{place.name}.yaml")
        file.write_text(to_yaml(planned), encoding="utf-8")
        asked = {"sweep": str(file), "sweep_dir": str(place), "dry_run": dry_run}
        if status := launch.run(settings_of(launch.LaunchOptions, asked), [], hint=False):
            raise UnfinishedError(status)


def read_runs(place: Path) -> Sweep:
    """Raises: ConfigError where they are of other plugins than now, or of several machines."""
    found = read_sweep(place, place.name)
    changed = [line for run in found.runs for line in changed_plugins(run.summary.get("plugins") or {})]
    changed += [f"runs of several machines: {', '.join(of)}" for of in [found.distinct("device")] if len(of) > 1]
    require(not changed, f"{place}: {'; '.join(changed[:1])}: another sweep_dir= trains anew")
    return found


def store(folder: Path, found: Sweep, files: Mapping[str, bytes], command: str, about: Mapping[str, str]) -> None:
    """Write runs, curves and provenance. An entry of other runs in that folder is kept beside it."""
    every = {**files, "runs.csv": runs_csv(found).encode(), "curves.csv.gz": curves_csv(found)}
    old, kept = read_json(folder / "provenance.json"), {"date": datetime.date.today().isoformat()}
    if old.get("sha256", {}).get("runs.csv") == hashlib.sha256(every["runs.csv"]).hexdigest():
        kept = {key: old[key] for key in ("date", "withdrawn") if key in old}
        every |= {name: read_regular(folder / name) for name in TIMES if (folder / name).exists()}
    elif old.get("sha256"):
        require("entry.yaml" in old["sha256"], f"{folder} has a board already: another sweep= opens another one")
        older = [path.suffix[1:] for path in folder.parent.glob(f"{folder.name}.*")]
        n = 1 + max((int(number) for number in older if number.isdecimal()), default=0)
        folder.rename(folder.with_name(f"{folder.name}.{n}"))
    remove_aside(folder, LEFT)
    made = {"command": shlex.join(["python", "scripts/track.py", command]), **about, **kept}
    write_files(folder, every, provenance(found, every, [], []) | made)


# -----------------------------------------------------------------------------
# Its times


def busy_cpus() -> float:
    """How many of this process's CPUs others use."""
    from core.device import cpu_seconds  # which loads torch

    before = cpu_seconds(niced=True)
    time.sleep(2)
    passed, own, used = (now - then for now, then in zip(cpu_seconds(niced=True), before, strict=True))
    return (used - own) / passed


def measure(folder: Path, sweep: Definition, words: Words) -> None:
    """Write TIMES where the cores are quiet and they are not there yet."""
    if all((folder / name).exists() for name in TIMES):
        return
    if busy_cpus() > QUIET:
        say("cores are busy: the time columns stay empty; the same command, on quiet cores, measures them alone")
        return
    from scripts.benchmarks import bench_sample, bench_train  # which load torch

    timed = {PLAIN: sweep.grid["words"][PLAIN], **words}
    variants = {"variants": ";".join(f"{name}: {' '.join(of)}" for name, of in timed.items())}
    update = settings_of(bench_train.BenchOptions, variants | {"together": True, "rounds": ROUNDS[0], "iters": 10})
    decode = settings_of(bench_sample.BenchOptions, variants | {"rounds": ROUNDS[1], "tokens": 120})
    found = [bench_train.bench(update, [*sweep.overrides]), bench_sample.bench(decode, [*sweep.overrides])]
    for name, content in zip(TIMES, found, strict=True):
        write_atomic(folder / name, (json.dumps(content) + "\n").encode())


# -----------------------------------------------------------------------------
# Checks of an entry


def verify(asked: TrackOptions, sweep: Definition) -> int:
    """Say what is wrong with an entry, in one line. Returns the exit status."""
    path = asked.board / "entries" / str(asked.verify)
    require((path / "entry.yaml").is_file(), f"verify={asked.verify} is no entry: {path} has no entry.yaml")
    try:
        row = verified(path, asked.board)
        say(f"{path.name}: board.csv has the row that its runs give")
        if asked.repeat:
            say(f"{path.name}: {repeated(path, row, asked, sweep)}")
    except ConfigError as error:
        print(f"failed: {in_one_line(f'{path.name}: {error}')}", file=sys.stderr)
        return 1
    return 0


def verified(path: Path, folder: Path) -> Entry:
    """The row of an entry; none of its code is run. Raises: ConfigError where its files do not fit, or board.csv."""
    row, (grid, final), about = track.by_folder(folder)[path], track.stored(path), read_json(path / "provenance.json")
    recorded = {f"{plugin}.py": sha256 for plugin, sha256 in row.settings["plugins"].items()}
    known = convert(about.get("sha256"), dict, "provenance.json: sha256")
    for name, sha256 in {**dict.fromkeys(os.listdir(path)), **known, **recorded}.items():
        good = Path(name).name == name and file_sha256(path / name, within=path) == sha256
        require(good or name == "provenance.json", f"{name} was changed, or is not what its runs had")
    entry = read_contestant(path / "entry.yaml", None)
    same = (entry.name, entry.name, entry.by) == (row.name, path.stem, about.get("by"))
    require(same, "its folder, its runs and provenance.json have another name or by= than entry.yaml")
    runs = [*grid.runs, *final.runs]
    for run in runs:
        same = not run.done or min(run.losses.values(), default=None) == run.summary.get(LOSS_KEY)
        require(same, f"{run.id} has another lowest loss in its curve")
        ours = not run.done or run in final.done(BASELINE) or run.summary.get("plugins", {}) == row.settings["plugins"]
        require(ours, f"{run.id} had other plugins")
    several = [key for key in ("device", "dtype") if len({run.summary.get(key) for run in runs if run.done}) > 1]
    require(not several, f"its runs differ in {', '.join(several)}")
    own, board = final.done(BASELINE), track.stored(folder)[1].done(BASELINE)
    if own and own[0].config.get("dtype") == board[0].config.get("dtype"):
        of_own, of_board = (fmean(run.summary[LOSS_KEY] for run in of) for of in (own, board))
        most = 3 * opened(folder)[1] * math.sqrt(1 / len(own) + 1 / len(board))
        said = (
            f"its {BASELINE} runs end at {of_own:.4f}, the board's at {of_board:.4f}; 3 standard errors are {most:.4f}"
        )
        require(abs(of_own - of_board) <= most, said)
    file = folder / "board.csv"
    (_, line), lines = (text.splitlines() for text in (track.board_csv([row]), read_text(str(file), str(file))))
    require(line in lines, f"board.csv has another row: its runs give {line}")
    return row


def repeated(path: Path, row: Entry, asked: TrackOptions, sweep: Definition) -> str:
    """Plan an entry's runs again with the stored copy of its code; train two final ones, and those of BASELINE. Returns
    what there is to say. Raises: ConfigError where they are other runs, or their mean is not within 3 σ."""
    board = asked.board  # it may be relative, and the folder changes below
    (grid, final), (rate, sigma) = track.stored(path), opened(board)
    entry, known = read_contestant(path / "entry.yaml", None), {one.id: one for one in (*grid.runs, *final.runs)}
    exact = all(run.config.get("dtype") == "float32" for run in known.values())
    sweep = replace(sweep, overrides=(*sweep.overrides, "dtype=float32")) if exact else sweep
    words = {row.name: entry.overrides, BASELINE: sweep.grid["words"][BASELINE]}
    rates = track.ruled_rates(sweep.grid["optim.learning_rate"].values(), row.means, MORE_RATES)
    best = {row.name: best_rate(row.means), BASELINE: rate}
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        for plugin in row.settings["plugins"]:
            write_atomic(Path(place) / f"{plugin}.py", read_regular(path / f"{plugin}.py"))
        planned = {one.id: one for one in plan_runs(definition(sweep, words, {row.name: rates}, best), [])}
        check_rules(entry, board, next(iter(planned.values())).config)
        require(planned.keys() == known.keys(), "its runs are not those that entry.yaml and the rules give")
        for one in known:
            wrong = differing(planned[one].config, known[one].config, LENGTH)
            require(not wrong, f"{one} breaks the rules: {', '.join(wrong)}")
        if not exact and here(sweep) is not sweep:
            return "no run is repeated: this machine has no bf16 hardware"
        seeds = sorted({run.seed for run in final.done(row.name)} & {run.seed for run in final.done(BASELINE)})
        require(bool(seeds), f"at no seed both it and {BASELINE} are done")
        n = int(hashlib.sha256(read_regular(path / "runs.csv")).hexdigest(), 16) % len(seeds)
        seeds = sorted({seeds[n], seeds[n - len(seeds) // 2]})
        launched(definition(sweep, words, {}, best, seeds), Path(place) / "sweep")
        _, again = track.grid_and_final(read_runs(Path(place) / "sweep"))
    said, most = [], 3 * sigma / math.sqrt(len(seeds))
    for name in words:
        require(len(again.done(name)) == len(seeds), f"{name} does not end as it did, at the seeds {seeds}")
        before, now = (
            fmean(run.summary[LOSS_KEY] for run in of.done(name) if run.seed in seeds) for of in (final, again)
        )
        said.append(f"{name} ended at {before:.4f}, and now at {now:.4f}")
        require(abs(now - before) <= most, f"{said[-1]}: the mean of the seeds {seeds}; 3 σ over seeds are {most:.4f}")
    return f"{'; '.join(said)}: means of the seeds {seeds}; 3 σ over seeds are {most:.4f}"


if __name__ == "__main__":
    sys.exit(run_script(TrackOptions, make, __doc__))
