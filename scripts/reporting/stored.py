"""What a report stores of its runs, runs.csv and curves.csv.gz, and how it reads them again.

Tables, figures and the page are made from these two files and provenance.json alone.
"""

import csv
import gzip
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from core.files import file_sha256, parse_object, read_json, unpacked
from core.record import is_number
from core.rundir import TEXTS, mistyped
from core.schema import ConfigError, require, show
from scripts.reporting.runs import EVALUATED, NUMBER_KINDS, NUMBERS, Curve, Run, Sweep
from sweeps.definition import check_sweep
from sweeps.status import FINAL, State, require_whole, stored_rows

PLUGINS = "plugins_sha256"  # the column of a summary's `plugins`, where some run has any
CONFIG_KINDS = {
    "eval_interval": int, "max_iters": int, "fault.name": str, "optim.learning_rate": int | float,
    "data.fold": int, "data.folds": int, "model.block_size": int,
}  # fmt: skip
CURVES = ["run", "metric", "iter", "value"]
ROW = ["id", "settings", "seed", "fold", "status", "iter", "reason"]


def common_config(sweep: Sweep) -> dict[str, Any]:
    """The settings that are equal in all runs."""
    first = sweep.runs[0].config
    return {key: value for key, value in first.items() if all(run.config.get(key) == value for run in sweep.runs)}


def columns_of(sweep: Sweep) -> list[str]:
    """What runs.csv takes from the runs' summaries."""
    return list(dict.fromkeys([*NUMBERS, *(metric.column for metric in sweep.metrics), *TEXTS, "start_up_warnings"]))


def runs_csv(sweep: Sweep) -> str:
    """A line a run: its settings where they differ between runs, and its numbers."""
    common = common_config(sweep)
    also = {"ranks": sweep.has_ranks, EVALUATED: any(sweep.evaluations.values())}
    measured = [*dict.fromkeys([*columns_of(sweep), *(column for column, there in also.items() if there)])]
    plugins = [PLUGINS] if any(run.summary.get("plugins") for run in sweep.runs) else []
    keys = dict.fromkeys(key for run in sweep.runs for key in run.config)
    of_row = {"seed"} if all(run.fold is None for run in sweep.runs) else {"seed", "data.fold"}
    varied = [key for key in keys if key not in {*common, *of_row}]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    settings = [f"config.{key}" if key in measured else key for key in varied]
    writer.writerow([*ROW, *settings, *measured, *plugins])
    for run in sweep.runs:
        row = [run.id, ";".join(run.settings), run.seed, run.fold, run.state.state, run.state.iter, run.state.reason]
        given = [show(run.config[key]) if key in run.config else None for key in varied]
        found = [run.summary.get(key) for key in measured]
        found += [run.summary.get("plugins") or {} for _ in plugins]
        writer.writerow([*row, *given, *(json.dumps(x) if isinstance(x, list | dict) else x for x in found)])
    return text.getvalue()


def curves_csv(sweep: Sweep) -> bytes:
    """curves.csv.gz: a line for each value of each curve; `run` is the row of runs.csv, from 0 on."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CURVES)
    for n, run in enumerate(sweep.runs):
        writer.writerows([n, key, i, value] for key, curve in run.curves.items() for i, value in curve.items())
    return gzip.compress(text.getvalue().encode(), mtime=0)


def read_stored(folder: Path, name: str) -> Sweep:
    """The sweep that a report was made of. Raises: ConfigError where the files of `folder` do not hold one."""
    require_whole(folder)
    about = read_json(folder / "provenance.json")
    kinds = {"definition": dict, "config": dict, "sha256": dict, "planned": list}
    missing = [key for key, kind in kinds.items() if not isinstance(about.get(key), kind)]
    require(not missing, f"from={folder} holds no report (its provenance.json has no {', '.join(missing)})")
    asked = [one.get("overrides") if isinstance(one, dict) else None for one in about["planned"]]
    good = all(isinstance(words, list) and all(isinstance(word, str) for word in words) for words in asked)
    require(good, f"from={folder}: planned in its provenance.json must name overrides")
    definition = about["definition"]
    sweep = Sweep(name, {"sweep": definition, "frozen": about["planned"]}, check_sweep(definition), [])
    measured = [*columns_of(sweep), "ranks", EVALUATED]
    try:
        for file in ("runs.csv", "curves.csv.gz"):  # the second counts the lines of the first
            require(file_sha256(folder / file) == about["sha256"].get(file), f"{file} was changed")
        curves = read_curves(folder / "curves.csv.gz")
        for n, row in enumerate(stored_rows(folder)):
            run = read_row(row, measured, about["config"], curves.get(n, {}))
            found = {metric.column: run.summary.get(metric.column) for metric in sweep.metrics}
            bad = [f"{key}={show(value)}" for key, value in found.items() if not (value is None or is_number(value))]
            require(not bad, f"runs.csv has {', '.join(bad[:1])}")
            sweep.runs.append(run)
    except Exception as error:  # whatever files meet that somebody has edited
        raise ConfigError(f"from={folder} cannot be read: {' '.join(str(error).split())[:300]}") from error
    require(len(sweep.runs) > 0, f"from={folder} holds no run")
    return sweep


def read_row(row: dict[str, str], measured: Sequence[str], common: dict[str, Any], curves: dict[str, Curve]) -> Run:
    seed, fold = int(row["seed"]), int(row["fold"]) if row["fold"] else None
    state = State(row["status"], int(row["iter"]) if row["iter"] else None, row["reason"])
    varied = {key: text for key, text in row.items() if key not in (*ROW, *measured, PLUGINS) and text}
    config = common | {key.removeprefix("config."): number_or_text(text) for key, text in varied.items()}
    config |= {"seed": seed} if fold is None else {"seed": seed, "data.fold": fold}
    found = {key: row[key] for key in measured if row.get(key)}
    summary = {key: text if key in TEXTS else number_or_text(text) for key, text in found.items()}
    summary |= {"plugins": parse_object(row[PLUGINS].encode())} if row.get(PLUGINS) else {}
    summary |= {"iter": state.iter} if state.state in FINAL else {}
    config["fault.name"] = config.get("fault.name") or "none"
    for content, kinds in ((summary, NUMBER_KINDS), (config, CONFIG_KINDS)):
        wrong = mistyped(content, kinds)
        require(not wrong, f"runs.csv has {wrong}")
    rate = config.get("optim.learning_rate")
    require(rate is not None and is_number(rate) and rate > 0, f"runs.csv has optim.learning_rate={show(rate)}")
    nested = [key for key, value in config.items() if isinstance(value, dict)]
    require(not nested, f"the setting {', '.join(nested)} is an object")
    missing = [key for key in ("val/loss_min", "val/loss", "iter_of_min") if summary.get(key) is None]
    require(state.state != "done" or not missing, f"runs.csv has a run that is done without {', '.join(missing)}")
    return Run(row["id"], row["settings"].split(";"), seed, fold, config, state, summary, curves)


def number_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def read_curves(file: Path) -> dict[int, dict[str, Curve]]:
    """Line of runs.csv -> metric -> curve."""
    found: dict[int, dict[str, Any]] = {}
    lines = csv.reader(io.StringIO(unpacked(file).decode(), newline=""))
    require(next(lines, None) == CURVES, f"{file.name} does not begin with {','.join(CURVES)}")
    for run, metric, step, value in lines:
        require(len(step) < 16, f"{file.name} has the iteration {step[:20]}")
        require(is_number(float(value)), f"{file.name} has the value {value[:20]}")
        found.setdefault(int(run), {}).setdefault(metric, {})[int(step)] = float(value)
    return found


def joined(stored: Sweep, sweep: Sweep) -> Sweep:
    """`sweep`, and the stored runs that it lacks. A stored run that has ended replaces one that has not, at the points
    of both. Raises: ConfigError where a point has a stored run with other settings, or of another eval_interval."""
    runs = {run.id: run for run in sweep.runs}
    here = {(point, run.replicate): run.id for run in sweep.runs for point in run.settings}
    for run in stored.runs:
        planned = runs.get(run.id)
        if planned is None:
            others = [here[point, run.replicate] for point in run.settings if (point, run.replicate) in here]
            require(not others, f"from= has {run.id} where the sweep has {', '.join(others)}, of other settings")
            runs[run.id] = run
            continue
        stored_every, every = (one.config.get("eval_interval") for one in (run, planned))
        require(stored_every == every, f"from= has {run.id} with eval_interval={stored_every}, the sweep with {every}")
        if planned.state.state not in FINAL and run.state.ended_as_one_of(planned.config.get("max_iters", 0)):
            runs[run.id] = replace(run, settings=[*dict.fromkeys(planned.settings + run.settings)])
    return replace(sweep, runs=sorted(runs.values(), key=lambda run: (run.fold or 0, run.seed)))
