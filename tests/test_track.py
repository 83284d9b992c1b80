"""The attention track's board: rows, verdicts and the noise floor, from runs with known losses; an entry, for real."""

import csv
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest
import yaml
from conftest import ROOT, TINY, Program, eventually
from helpers.refusals import Outcome, check, contents
from scipy import stats
from scipy.optimize import brentq

from core.cli import run_script
from core.files import NEXT, file_sha256, read_json, write_json
from core.schema import ConfigError, flatten
from scripts import track
from scripts.reporting.runs import Run, Sweep, read_sweep
from scripts.reporting.stored import common_config, curves_csv, read_stored, runs_csv
from scripts.reporting.track import LEVEL, Entry, entries, mean_losses, noise, plateau, rows, ruled_rates
from scripts.track import Contestant, TrackOptions, check_rules, here, make
from sweeps.definition import check_sweep, load_sweep
from sweeps.plan import plan_runs
from sweeps.status import State

ABOUT = {"by": "nanoQK", "date": "–"}
WORDS = {"none": ["qk_norm=none"], "rms": ["qk_norm=rms"], "sink": ["softmax=sink"]}
RATES = [0.001, 0.002, 0.004, 0.008]
GRID = {"none": [2.2, 2.0, 2.015, 2.5], "rms": [2.1, 1.95, 1.92, 1.93], "sink": [2.3, 2.1, 2.0, 1.97]}  # mean losses
SPREAD = [0.01, -0.02, 0.005, 0.0, 0.015, -0.01, -0.005, 0.005]  # of eight seeds, with mean 0
OFFSET = {"none": 0.05, "rms": 0.0, "sink": -0.002}
OWN = {  # of a contestant's own, on top
    "none": [0.001, -0.001] * 4, "rms": [0.0] * 8, "sink": [0.004, -0.004, 0.008, -0.008, 0.002, -0.002, 0.0, 0.0],
}  # fmt: skip


BEST = {"none": 0.002, "rms": 0.004, "sink": 0.008}


def run_of(point: str, seed: int, rate: float, loss: float) -> Run:
    summary = {
        "val/loss_min": loss, "val/loss": loss, "iter_of_min": 100, "worst_loss": loss, "seconds": 1.0, "iter": 100,
        "max attn/max_logit": 10.0 + seed, "cache_bytes_per_token": 2048, "parameters": 1000,
    }  # fmt: skip
    name = point.split(",")[0]
    slots = {"qk_norm.name": "rms" if name == "rms" else "none", "softmax.name": "sink" if name == "sink" else "plain"}
    config = {"optim.learning_rate": rate, "seed": seed, "model.name": "track_nano", "logits.name": "none", **slots}
    config |= {"attention.name": "mha", "attention.head_dim": None, "softmax.logit": "learned", "qk_clip.name": "none"}
    curves: Any = {"val/loss": {0: 7.0, 100: loss}}
    return Run(f"{point}-{seed}", [point], seed, None, config, State("done", 100), summary, curves)


def sweeps() -> tuple[Sweep, Sweep]:
    also = {"attn/max_logit": "max", "cache_bytes_per_token": "summary"}
    definitions: list[Any] = [{"grid": {"words": WORDS, "optim.learning_rate": RATES}, "also": also}, {"also": also}]
    grid = [
        run_of(f"{name},learning_rate={rate:g}", seed, rate, loss + noise)
        for name, losses in GRID.items()
        for rate, loss in zip(RATES, losses, strict=True)
        for seed, noise in ((1, 0.003), (2, -0.003))
    ]
    final = [
        run_of(name, seed, BEST[name], 1.92 + offset + shared + OWN[name][seed])
        for name, offset in OFFSET.items()
        for seed, shared in enumerate(SPREAD)
    ]
    of_grid, of_final = map(check_sweep, definitions)
    return Sweep("grid", {}, of_grid, grid), Sweep("final", {}, of_final, final)


def stored(folder: Path, of: tuple[Sweep, Sweep] | None = None) -> Path:
    """The two sweeps as reports store them, and a page for the board."""
    for sweep in of or sweeps():
        place = folder / sweep.name
        place.mkdir(parents=True)
        files = {"runs.csv": runs_csv(sweep).encode(), "curves.csv.gz": curves_csv(sweep)}
        for name, content in files.items():
            (place / name).write_bytes(content)
        hashes = {name: sha256(content).hexdigest() for name, content in files.items()}
        definition = json.loads(json.dumps(vars(sweep.definition)))
        about = {"definition": definition, "planned": [], "config": common_config(sweep), "sha256": hashes}
        (place / "provenance.json").write_text(json.dumps(about))
    (folder / "README.md").write_text(f"# Board\n\n{track.END}\n{track.BEGIN}STALE{track.END}\nAfter.\n")
    times = {"time_over_first": {"rms": {"median": 1.1, "low": 1.0, "high": 1.2}}}
    decoding = {"time_over_first": {"rms": {"median": 1.25, "low": 1.0, "high": 2.0}}}
    (folder / "train.json").write_text(json.dumps({"variants": {"none": {}}, **times}))
    (folder / "decode.json").write_text(json.dumps({"1_sequences": {"variants": {"none": {}}, **decoding}}))
    return folder


def test_the_best_rate_is_that_of_the_lowest_mean_and_an_edge_is_named() -> None:
    grid, _ = sweeps()
    means = mean_losses(grid)
    assert {name: min(of, key=lambda rate: of[rate]) for name, of in means.items()} == BEST
    ruled = {name: ruled_rates(RATES, of, 1) for name, of in means.items()}
    assert ruled == {"none": RATES, "rms": RATES, "sink": [*RATES, 0.016]}
    falling = {rate: -rate for rate in [*RATES, 0.016, 0.032, 0.064, 0.128]}
    assert ruled_rates(RATES, falling, 3) == [*RATES, 0.016, 0.032, 0.064]
    found = [plateau(means[name], means[name]) for name in GRID]
    assert found == [1.0, 1.0, 0.0]  # 0.002 to 0.004; 0.004 to 0.008; alone
    assert plateau({0.001: 2.0, 0.004: 2.0, 0.008: 2.0}, [0.001, 0.002, 0.004, 0.008]) == 0.0  # 0.002 diverged


def by_name(grid: Sweep, final: Sweep, folder: Path) -> dict[str, Entry]:
    return {row.name: row for row in entries(grid, final, folder, ABOUT)}


def test_a_contestant_that_lost_runs_is_last_and_says_so(tmp_path: Path) -> None:
    grid, final = sweeps()
    runs = [replace(r, state=State("diverged")) if r.settings == ["sink"] and r.seed < 3 else r for r in final.runs]
    found = rows(stored(tmp_path / "board", (grid, replace(final, runs=runs))))
    assert [row.name for row in found] == ["rms", "none", "sink"]
    assert found[-1].verdict == "3 of 8 runs are not done"


@pytest.mark.parametrize("shift", [0.0, 0.002, 0.005, 0.01, 0.02])
def test_a_verdict_is_that_of_a_t_test_at_the_fixed_level_whatever_the_other_rows(shift: float, tmp_path: Path) -> None:
    grid, final = sweeps()
    losses = [r.summary["val/loss_min"] + shift * (r.settings == ["sink"]) for r in final.runs]
    moved = [
        replace(r, summary={**r.summary, "val/loss_min": loss}) for r, loss in zip(final.runs, losses, strict=True)
    ]
    row = by_name(grid, replace(final, runs=moved), tmp_path)["sink"]
    differences = [OFFSET["sink"] + shift + own for own in OWN["sink"]]
    p = float(stats.ttest_1samp(differences, 0).pvalue)
    half = stats.t.isf(LEVEL / 2, 7) * stdev(differences) / math.sqrt(8)
    assert row.wide and row.wide.low and row.wide.low == pytest.approx(OFFSET["sink"] + shift - half)
    assert row.verdict == ("worse" if p <= 0.05 / 40 else "not told apart")
    assert (row.verdict == "worse") == (row.wide.low > 0) == (shift == 0.02)
    alone = [run for run in moved if run.settings != ["none"]]
    assert by_name(grid, replace(final, runs=alone), tmp_path)["sink"].verdict == row.verdict


def test_a_board_that_does_not_fit_its_grid_is_refused(tmp_path: Path) -> None:
    grid, final = sweeps()
    at_another = [replace(run, config={**run.config, "optim.learning_rate": 0.016}) for run in final.runs]
    others = [run for run in grid.runs if "sink" not in run.settings[0]]
    diverged = [run if run in others else replace(run, state=State("diverged")) for run in grid.runs]
    for of_grid, of_final, says in (
        (others, final.runs, "grid lacks some of none, rms, sink"),
        (diverged, final.runs, "grid has no learning rate at which all runs of sink are done"),
        (grid.runs, at_another, "final has none at the learning rate 0.016; the grid's best is 0.002"),
    ):
        with pytest.raises(ConfigError, match=says):
            by_name(replace(grid, runs=of_grid), replace(final, runs=of_final), tmp_path)


def test_the_noise_floor_is_the_spread_over_seeds(tmp_path: Path) -> None:
    said = noise([*by_name(*sweeps(), tmp_path).values()])
    sds = [stdev([a + b for a, b in zip(SPREAD, OWN[name], strict=True)]) for name in ("none", "sink")]
    assert f"{math.sqrt(sum(sd**2 for sd in sds) / 2):.4f}" in said
    between = math.sqrt(sum(stdev(OWN[name]) ** 2 for name in ("none", "sink")) / 2)
    assert f"difference {between:.4f}. 8 pairs" in said


def test_the_least_difference_has_80_percent_power_to_the_last_digit(tmp_path: Path) -> None:
    grid, final = sweeps()
    apart = [  # 20 times the noise, so that four decimals show a third digit of the effect
        replace(run, summary={**run.summary, "val/loss_min": 20 * run.summary["val/loss_min"]}) for run in final.runs
    ]
    between = 20 * math.sqrt(sum(stdev(OWN[name]) ** 2 for name in ("none", "sink")) / 2)

    def power(effect: float) -> float:
        t, shift = float(stats.t.isf(0.025, 7)), effect * math.sqrt(8)
        return float(stats.nct.sf(t, 7, shift) + stats.nct.cdf(-t, 7, shift))

    least = brentq(lambda effect: power(effect) - 0.8, 0.1, 3)
    said = noise([*by_name(grid, replace(final, runs=apart), tmp_path).values()])
    assert float(said.split("difference of ")[1].split()[0]) == pytest.approx(least * between, abs=1.1e-4)


@pytest.mark.slow
def test_one_command_rebuilds_the_board_from_stored_files(board: Path) -> None:
    assert run_track() == 0
    made = contents(board)
    text = (board / "README.md").read_text()
    assert text.startswith("# Board\n") and text.endswith("\nAfter.\n") and "STALE" not in text
    cells = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    table = [[cell.strip() for cell in row] for row in cells]
    assert [row[0] for row in table if row[0] in WORDS] == ["sink", "rms", "none"]
    assert next(row for row in table if row[0] == "rms")[10:12] == ["1.10 (1.00 to 1.20)", "1.25 (1.00 to 2.00)"]
    lines = csv.DictReader((board / "board.csv").read_text().splitlines())
    (line,) = (row for row in lines if row["contestant"] == "none")
    assert float(line["difference"]) == pytest.approx(0.05)
    assert line["verdict"] == "worse" and line["decode_time"] == "1"
    assert "sink" in (board / "rates.svg").read_text()
    assert run_track() == 0 and contents(board) == made


@pytest.mark.slow
def test_the_committed_board_is_what_its_files_give(tmp_path: Path) -> None:
    """The rows of the README are compared in tests/test_docs.py."""
    folder = shutil.copytree(ROOT / "results" / "attention_track", tmp_path / "board")
    assert make(TrackOptions(folder=str(folder))) == 0
    for file in ("README.md", "board.csv", "rates.svg"):
        assert (folder / file).read_bytes() == (ROOT / "results" / "attention_track" / file).read_bytes(), file


def test_what_is_no_track_is_refused_in_one_line(outcome: Outcome) -> None:
    says = "sweep=leak is no track: its grid lacks words or optim.learning_rate"
    check(*outcome("scripts/track.py", "sweep=leak"), [says])


@pytest.mark.slow
def test_every_contestant_of_the_track_has_the_same_recipe() -> None:
    """At one rate and one seed; tests/test_plans.py plans all runs."""
    sweep = load_sweep("attention_track", {})
    assert len(sweep.grid["optim.learning_rate"]) == 5 and len(sweep.seeds) == 2
    runs = plan_runs(replace(sweep, seeds=(1,), grid={"words": sweep.grid["words"]}), [])
    assert len(runs) == len(sweep.grid["words"]) >= 16
    slots = ("qk_norm", "logits", "softmax", "output", "weights", "qk_clip")
    first, *others = (flatten(run.config.trajectory).items() for run in runs)
    assert all(key.startswith(slots) for other in others for key, _ in first ^ other)


# -----------------------------------------------------------------------------
# An entry, for real at tiny scale


def tiny_track(tmp_path: Path) -> tuple[Path, Path]:
    """A track of tiny models, and its board, which the runs with known losses open."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {i} says that a quick brown fox is {i % 7} years old\n" for i in range(500)))
    tiny = [*TINY, "model.n_layer=1", "model.dropout=0.0", "max_iters=4", "wandb.mode=disabled"]
    words = ["data=text", f"data.path={text}", *tiny]
    rates = {"words": WORDS, "optim.learning_rate": [0.064, 0.128, 0.256]}
    sweep = tmp_path / "tiny.yaml"
    sweep.write_text(json.dumps({"overrides": words, "seeds": [1], "also": {"attn/max_logit": "max"}, "grid": rates}))
    return sweep, stored(tmp_path / "results" / "tiny")


PLACE = ["sweep=tiny.yaml", "folder=results/tiny"]


def run_track(*words: str) -> int:
    return run_script(TrackOptions, make, "", [*words, *PLACE])


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That of tiny_track(), in the current folder; soft.yaml is an entry."""
    (tmp_path / "soft.yaml").write_text("{name: soft, overrides: [logits=softcap]}")
    monkeypatch.chdir(tmp_path)
    return tiny_track(tmp_path)[1]


PLUGIN = (ROOT / "docs" / "attention_track.md").read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
REFUSED = {
    "overrides: [logits=softcap, data.fold=1]": "soft: data.fold=1 breaks the rules: an entry sets qk_norm, logits,",
    "overrides: [logits=softcap, max_iters=9]": "soft: max_iters=9 breaks the rules",
    "overrides: [model.n_embd=32]": "soft: model.n_embd=32 breaks the rules",
    "overrides: [attention=gqa]": "soft: attention=gqa of another size is another model",
    "overrides: [attention.head_dim=16]": "soft: attention=mha of another size is another model",
    "overrides: [softmax=sink]": "soft has the settings of sink",
    "overrides: [logits=softcop]": "logits=softcop must be one of",
    "overrides: logits": "overrides=logits must be a list",
    "name: Soft": "name=Soft must be a lower-case word, and not rms, none or final",
    "name: rms": "name=rms must be a lower-case word, and not rms, none or final",
    "seeds: [1]": "seeds=[1] is unknown",
    "overrides: ['plugins=[gone]', logits=gone]": "no module gone",
    'by: "Ada\\nBob"': "must be a line without <, >, | and ](",
    "by: <!-- end -->": "by=<!-- end --> must be a line without <, >, | and ](",
    'by: "![](https://a.b/c.png)"': "by=![](https://a.b/c.png) must be a line without <, >, | and ](",
}


@pytest.mark.parametrize("line", REFUSED)
def test_an_entry_that_breaks_the_rules_is_refused_in_one_line(line: str, board: Path, outcome: Outcome) -> None:
    entry = {"name": "soft", "overrides": ["logits=softcap"]} | yaml.safe_load(line)
    Path("soft.yaml").write_text(yaml.safe_dump(entry))
    check(*outcome("scripts/track.py", "enter=soft.yaml", *PLACE), [REFUSED[line]])
    assert not Path("runs").exists()


def test_a_dry_run_writes_nothing_beside_its_runs(board: Path) -> None:
    before = contents(Path())
    assert run_track("enter=soft.yaml", "dry_run=true", "sweep_dir=soft") == 0
    assert contents(Path()) == before


def test_a_board_whose_opening_has_no_pairs_takes_no_entry(board: Path, outcome: Outcome) -> None:
    runs, about = board / "final" / "runs.csv", read_json(board / "final" / "provenance.json")
    head, *rows = runs.read_text().splitlines(keepends=True)
    seed = head.split(",").index("seed")
    runs.write_text(head + "".join(row for row in rows if row.split(",")[seed] == rows[0].split(",")[seed]))
    about["sha256"]["runs.csv"] = file_sha256(runs)
    write_json(board / "final" / "provenance.json", about)
    check(*outcome("scripts/track.py", "enter=soft.yaml", "dry_run=true", *PLACE), ["no two pairs"])


NO_TIMES = "train.json does not time contestants"
RATIOS = {"rms": {"median": 1.1, "low": "", "high": []}}
STRANGE: dict[str, tuple[Callable[[Path], object], str]] = {  # what is done to a board -> the line's reason
    "name": (lambda board: enter(board, "x.bar"), "x.bar must be the name of an entry"),
    "two boards": (lambda board: [shutil.copytree(board / of, enter(board) / of) for of in ("grid", "final")], "read:"),
    "no runs": (lambda board: enter(board), "holds no report"),
    "times of nothing": (lambda board: timed(board, {}), NO_TIMES),
    "times without ratios": (lambda board: timed(board, {"variants": {"none": 1}}), NO_TIMES),
    "times of words": (lambda board: timed(board, {"variants": {"qk_norm=none": {}}, "time_over_first": {}}), NO_TIMES),
    "times of no number": (lambda board: timed(board, {"variants": {"none": {}}, "time_over_first": RATIOS}), NO_TIMES),
    "page": (lambda board: (board / "README.md").write_bytes(b"\xff\xfe"), "README.md must be UTF-8 text"),
    "pipe": (lambda board: piped(board / "README.md"), "README.md cannot be read"),
}


def timed(board: Path, content: dict[str, Any]) -> None:
    (board / "train.json").write_text(json.dumps(content))


def piped(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def enter(board: Path, name: str = "x") -> Path:
    path = board / "entries" / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "entry.yaml").touch()
    return path


@pytest.mark.parametrize("kind", STRANGE)
def test_a_strangers_board_is_refused_in_one_line(kind: str, board: Path, outcome: Outcome) -> None:
    do, says = STRANGE[kind]
    do(board)
    check(*outcome("scripts/track.py", *PLACE), [says])


def test_an_entry_whose_provenance_is_damaged_is_not_withdrawn(board: Path, outcome: Outcome) -> None:
    file = enter(board) / "provenance.json"
    # with the second one the board could not be made
    for content, says in (('{"sweep": ', "provenance.json cannot be read"), ('{"sweep": 1}', "holds no report")):
        file.write_text(content)
        check(*outcome("scripts/track.py", "withdraw=x", "reason=bad", *PLACE), [says])
        assert file.read_text() == content


def test_a_board_is_full_after_40_comparisons(board: Path, outcome: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.reporting.track.ROWS", 2)  # as many as opened it
    says = "has 2 comparisons, the most of a board: a new one begins with"
    check(*outcome("scripts/track.py", "enter=soft.yaml", "dry_run=true", *PLACE), [says])


def test_a_machine_without_bf16_hardware_trains_an_entry_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = load_sweep("attention_track", {})
    for has in (True, False):
        monkeypatch.setattr("core.device.has_bfloat16", lambda device, has=has: has)
        planned = plan_runs(replace(here(sweep), grid={"words": {"rms": ["qk_norm=rms"]}}), [])
        assert {run.config.dtype for run in planned} == {"bfloat16" if has else "float32"}


@pytest.mark.slow
def test_a_setting_that_older_rows_lack_had_its_value_of_that_time(tmp_path: Path) -> None:
    board, sweep = ROOT / "results" / "attention_track", load_sweep("attention_track", {})
    folder = shutil.copytree(board, tmp_path / "board", ignore=shutil.ignore_patterns("entries", "small"))
    cases = {
        ("logits=ssmax", "logits.power=2"): "", ("logits=ssmax", "logits.power=1"): "ssmax",
        ("output=value_norm", "output.gain=learned"): "", ("output=value_norm",): "value_norm",
        ("qk_norm=rms_whole", "qk_norm.gain=layer"): "", ("qk_norm=rms_whole",): "rms_whole",
    }  # fmt: skip
    for words, same in cases.items():
        (planned, *_) = plan_runs(replace(sweep, grid={"words": {"new": [*words]}}), [])
        entry = Contestant(name="new", overrides=words)
        with pytest.raises(ConfigError, match=f"has the settings of {same}$") if same else nullcontext():
            check_rules(entry, folder, planned.config)


def edited(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def hashed(entry: Path, *names: str) -> None:
    """The hashes of files in provenance.json, as somebody falsifies them, too."""
    about = json.loads((entry / "provenance.json").read_text())
    about["sha256"] |= {name: sha256((entry / name).read_bytes()).hexdigest() for name in names}
    (entry / "provenance.json").write_text(json.dumps(about))


def falsify(entry: Path, where: str, curve: float = 0.0, **numbers: Any) -> None:
    """Other numbers of the runs whose setting begins with `where`. curve: added to all their losses."""
    found, changed = read_stored(entry, "asinh"), []
    for run in found.runs:
        if run.settings[0].startswith(where):
            summary = {**run.summary, "val/loss_min": run.summary["val/loss_min"] + curve, **numbers}
            losses: Any = {i: loss + curve for i, loss in run.losses.items()}
            run = replace(run, summary=summary, curves={**run.curves, "val/loss": losses})
        changed.append(run)
    (entry / "runs.csv").write_text(runs_csv(replace(found, runs=changed)))
    (entry / "curves.csv.gz").write_bytes(curves_csv(replace(found, runs=changed)))
    hashed(entry, "runs.csv", "curves.csv.gz")


def other_words(entry: Path) -> None:
    edited(entry / "entry.yaml", "logits=asinh", "logits=asinh\n- max_iters=9")
    hashed(entry, "entry.yaml")


FALSIFIED: dict[str, Callable[[Path], None]] = {
    "runs.csv was changed": lambda entry: edited(entry / "runs.csv", "text-s11", "text-s19"),
    "has another lowest loss in its curve": lambda entry: falsify(entry, "final/asinh", **{"val/loss_min": 1.5}),
    "board.csv has another row: its runs give asinh,": lambda entry: falsify(entry, "final/asinh", parameters=600),
    "my_asinh.py was changed": lambda entry: edited(entry / "my_asinh.py", "asinh(", "sinh("),
    "entry.yaml was changed": lambda entry: edited(entry / "entry.yaml", "Ada", "Bob"),
    "train.json was changed": lambda entry: edited(entry / "train.json", "1", "2"),
    "was ended while it was written": lambda entry: (entry / NEXT).mkdir(),  # in it there may be another my_asinh.py
    "more.txt was changed, or is not": lambda entry: (entry / "more.txt").touch(),
    r"\x1b[2J was changed, or is not": lambda entry: (entry / "\x1b[2J").touch(),  # would clear the terminal
    "had other plugins": lambda entry: falsify(entry, "asinh/", plugins={"my_asinh": "0"}),
    "its runs differ in device": lambda entry: falsify(entry, "asinh/", device="another"),
    "have another name or by= than": lambda entry: edited(entry / "provenance.json", "Ada", "Bob"),
    "by in provenance.json must be a line": lambda entry: edited(entry / "provenance.json", "Ada", "<!-- end -->"),
    "its rms runs end at 3.": lambda entry: edited(
        entry.parents[1] / "final" / "provenance.json", '"config": {', '"config": {"dtype": "float32", '
    ),
}
OTHER_RUNS: dict[str, Callable[[Path], None]] = {  # than those that are planned again
    "asinh: max_iters=9 breaks the rules": other_words,
    "breaks the rules: eval_interval=2": lambda entry: edited(
        entry.parents[3] / "tiny.yaml", "l_interval=2", "l_interval=4"
    ),
    "its runs are not those that entry.yaml and": lambda entry: edited(entry.parents[3] / "tiny.yaml", "0.128, ", ""),
}


ENTER = """if __name__ == "__main__":
    import multiprocessing, sys
    from types import SimpleNamespace
    from scripts import track
    from scripts.benchmarks import timing
    from sweeps import launchers
    track.busy_cpus, track.ROUNDS = lambda: 0.0, (6, 6)  # of the times; five have no interval
    launchers.available_cpus = lambda: 1  # one worker for so few runs: another would import PyTorch, too
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["scripts.benchmarks.timing"])  # the processes that are timed need not import it
    timing.multiprocessing = SimpleNamespace(get_context=lambda _: context)
    sys.exit(track.run_script(track.TrackOptions, track.make, "", sys.argv[1:]))
"""


@pytest.mark.slow
def test_an_entry_is_one_command_killed_or_not_and_is_verified(
    tmp_path: Path, forked: Program, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    sweep, folder = tiny_track(tmp_path)
    entry, board = folder / "entries" / "asinh", (f"sweep={sweep}", f"folder={folder}")
    monkeypatch.chdir(tmp_path)

    def verified(status: int) -> str:
        """By training runs again, in a process of its own, which alone imports the plugin."""
        place = board[0], f"folder={folder.relative_to(tmp_path)}"
        done = forked("scripts/track.py", "verify=asinh", "repeat=true", *place, status=status)
        return done.stdout + done.stderr

    def told(*words: str, status: int = 0) -> str:
        capfd.readouterr()
        assert run_script(TrackOptions, make, "", [*words, *board]) == status
        return "".join(capfd.readouterr())

    def git(*words: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def requested(status: int, *also: str) -> str:
        """What the workflow's script says of the results as they are now. They stay where it finds no fault."""
        base = git("rev-parse", "HEAD")
        git("add", "-A", "results", *also)
        git("commit", "-q", "-m", "a request")
        merged = git("rev-parse", "HEAD")
        git("checkout", "-q", "--detach", base)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        script = [str(ROOT / ".github" / "verify_entries.sh"), merged, *board]
        done = subprocess.run(script, capture_output=True, text=True, env={**os.environ, "PATH": path})
        assert done.returncode == status, done.stdout + done.stderr
        git("reset", "-q", "--hard", base if status else merged)
        return done.stdout + done.stderr

    told()
    git("init", "-q")
    git("add", "results")
    git("commit", "-q", "-m", "a board")
    (tmp_path / "my_asinh.py").write_text(PLUGIN)
    command = [sys.executable, "-c", ENTER, "enter=my_asinh.py", "by=Ada", *board]
    with (tmp_path / "out").open("w") as out:
        killed = subprocess.Popen(command, stdout=out)
    eventually(lambda: [*tmp_path.glob("runs/entries/*/asinh/*/summary.json")])  # one of three runs is done
    killed.kill()
    assert killed.wait() == -9 and "19 runs (19 pending)" in (tmp_path / "out").read_text() and not entry.exists()
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    assert re.search(r": 3 runs \([1-2] done", done) and "19 done in" in done and "next:" not in done
    subprocess.run([*command, "dry_run=true"], check=True)  # its final runs are not at another rate now
    made = {"runs.csv", "curves.csv.gz", "entry.yaml", "my_asinh.py", "train.json", "decode.json"}
    assert {*os.listdir(entry)} == {*made, "provenance.json"}
    found = {row.name: row for row in rows(folder)}
    assert found["asinh"].loss.n == 8 and found["asinh"].about["by"] == "Ada" and found["asinh"].slot == "logits"
    assert all(ratio and ratio.low for ratio in found["asinh"].ratios)
    assert "| asinh | logits |" in (folder / "README.md").read_text()

    (tmp_path / "my_asinh.py").unlink()  # it trains with the stored copy
    kept = shutil.copytree(tmp_path / "results", tmp_path / "kept")
    definition = sweep.read_text()

    def restored() -> None:
        shutil.rmtree(tmp_path / "results")
        shutil.copytree(kept, tmp_path / "results")
        sweep.write_text(definition)

    for says, change in {**FALSIFIED, **OTHER_RUNS}.items():
        change(entry)
        said = told("verify=asinh", status=1) if says in FALSIFIED else verified(1)
        line = said.strip().splitlines()[-1]
        assert says in line and line.startswith("failed: asinh: "), line
        restored()
    falsify(entry, "final/asinh", curve=0.04)
    told()
    assert re.search("failed: asinh: asinh ended at .*, and now at .*", requested(1))
    restored()
    said = requested(0)
    assert "board.csv has the row that its runs give" in said and "3 σ over seeds are" in said
    edited(folder / "board.csv", "asinh,,logits,", "asinh,,logits,better")
    assert "-asinh,,logits,better" in requested(1)
    shutil.rmtree(entry)
    assert "failed: the runs.csv of an entry is gone, or was changed" in requested(1)
    (entry / "more.txt").touch()
    (tmp_path / "track.py").touch()
    assert "failed: a board changes in a pull request of its own, without track.py" in requested(1, "track.py")

    whole = read_sweep(tmp_path / "runs" / "entries" / "tiny" / "asinh", "asinh")
    files = {name: (entry / name).read_bytes() for name in ("entry.yaml", "my_asinh.py")}
    for runs, folders in ((whole.runs, {"asinh"}), (whole.runs[:-1], {"asinh", "asinh.1"})):
        track.store(entry, replace(whole, runs=runs), files, "again", {"by": "Ada"})
        assert {*os.listdir(folder / "entries")} == folders, "the same runs supersede nothing"
    assert made <= {*json.loads((folder / "entries" / "asinh.1" / "provenance.json").read_text())["sha256"]}
    for words, of in (
        ([], ["", "superseded"]), (["withdraw=asinh", "reason=wrong c"], ["", "withdrawn: wrong c"]),
        (["withdraw=asinh.1", "reason=so is this"], ["withdrawn: so is this", "withdrawn: wrong c"]),
    ):  # fmt: skip
        told(*words)
        assert sorted(row.status for row in rows(folder) if row.name == "asinh") == of
        assert "board.csv has the row that its runs give" in told("verify=asinh.1")
    assert "### Superseded and withdrawn" in (folder / "README.md").read_text()
    assert len((folder / "board.csv").read_text().splitlines()) == 1 + 3 + 2
    assert "is withdrawn already: wrong c" in told("withdraw=asinh", "reason=another", status=2)
    for words in (["withdraw=../final", "reason=none"], [f"verify={entry}"]):
        assert "must be the name of an entry" in told(*words, status=2)


@pytest.mark.slow
def test_a_board_is_opened_by_one_command_whose_rates_go_on_past_an_edge(
    board: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    content = json.loads(Path("tiny.yaml").read_text())
    content["grid"] = {"words": {name: WORDS[name] for name in ("none", "rms")}, "optim.learning_rate": [0.001, 0.002]}
    Path("tiny.yaml").write_text(json.dumps(content | {"seeds": [1]}))
    monkeypatch.setattr(track, "MORE_RATES", 2)
    monkeypatch.setattr(track, "busy_cpus", lambda: 99.0)  # so that no times are measured
    monkeypatch.setattr("sweeps.launchers.available_cpus", lambda: 1)
    assert run_script(TrackOptions, make, "", ["open=true", PLACE[0], "folder=opened"]) == 0
    said = capfd.readouterr().out
    assert said.count("best at the grid's edge, so one more rate: none 0.004, rms 0.004") == 1
    found = rows(tmp_path / "opened")
    assert {row.name: (row.loss.n, len(row.tried)) for row in found} == {"none": (8, 4), "rms": (8, 4)}


def test_what_github_reads_is_what_the_programs_take() -> None:
    folder = ROOT / ".github"
    files = {file.name: yaml.safe_load(file.read_text()) for file in folder.rglob("*.yml")}
    flows = {name: content for name, content in files.items() if "jobs" in content}
    assert {*flows} == {"check.yml", "entries.yml"} and {*files} - {*flows} == {"bug.yml", "entry.yml"}
    assert all(flow["permissions"] == {"contents": "read"} for flow in flows.values())
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    steps = [step for flow in flows.values() for job in flow["jobs"].values() for step in job["steps"]]
    lines = [step["run"] for step in steps if "run" in step]
    made = [line.removeprefix("make ") for line in lines if line.startswith("make ")]
    assert {*made} <= {*targets} and "pull_request" in flows["entries.yml"][True]  # YAML reads on: as true
    (script,) = (word for line in lines for word in line.split() if word.endswith(".sh"))
    assert os.access(ROOT / script, os.X_OK)
    for name in ("bug.yml", "entry.yml"):
        assert {"name", "description", "body"} <= files[name].keys()
        assert all({"type", "attributes"} <= part.keys() for part in files[name]["body"])
