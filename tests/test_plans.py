"""Sweeps: what a plan is, what is planned once, and what is refused."""

import errno
import io
import json
import math
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT
from helpers.sweeps import frozen, launched, offer, tiny_sweep
from variants import FULL

import sweeps.plan
import sweeps.status
import train
from core.cli import CONFIG_DIR
from core.files import read_json, write_atomic
from core.schema import ConfigError, flatten
from model.gpt import mean_norm_ratio
from scripts.report import main as report
from scripts.reporting.runs import read_sweep
from sweeps import worker
from sweeps.claims import read_claim
from sweeps.definition import load_sweep, sweep_name
from sweeps.launch import LaunchOptions, check_runs, main, read_request
from sweeps.plan import compose, freeze, plan_runs, read_plan, temperature_note
from sweeps.status import SweepPlace, state_of
from training.config import TrainConfig, load_config

NAMES = sorted(path.stem for path in (CONFIG_DIR / "sweep").glob("*.yaml"))


def ends(values: tuple[int, ...] | None) -> Any:
    """The first and the last of a sweep's folds, or seeds: what a run has beside these depends on neither."""
    return values and values[:: max(1, len(values) - 1)]


@pytest.mark.parametrize("name", NAMES)
def test_a_planned_config_is_what_train_py_composes_from_its_words(name: str) -> None:
    sweep = load_sweep(name, {"parts": "all"})
    parts = {name: replace(part, folds=ends(part.folds), seeds=ends(part.seeds)) for name, part in sweep.parts.items()}
    sweep = replace(sweep, folds=ends(sweep.folds), seeds=ends(sweep.seeds), parts=parts)
    runs = plan_runs(sweep, [])
    assert len({run.id for run in runs}) == len(runs)
    points = {point for run in runs for point in run.points}
    for family in sweep.families.values():  # which name points that exist
        assert {setting for terms in family.terms_of(points) for setting, _ in terms} <= points
    for run in random.Random(0).sample(runs, min(12 if FULL else 2, len(runs))):
        assert replace(load_config(compose(run.overrides)), plot=False) == run.config  # auto: not in a sweep
        assert run.config.run_dir.name == run.id


@pytest.mark.parametrize("name", ["p_sweep", "p_sweep_cpu"])
def test_the_control_has_the_temperature_of_each_p(name: str) -> None:
    runs = plan_runs(load_sweep(name, {"parts": ["control"], "folds": [0]}), [])
    for run in runs:
        p = float(run.points[0].removeprefix("control/as_p"))
        head_dim = run.config.model.n_embd // run.config.model.n_head
        assert run.config.qk_norm.alpha_init == pytest.approx(mean_norm_ratio(p, head_dim) ** 2, rel=1e-3)  # type: ignore[attr-defined]
    assert len(runs) == 6


def test_a_sweep_that_extends_another_changes_what_it_names() -> None:
    base, small = load_sweep("p_sweep", {"parts": "all"}), load_sweep("p_sweep_cpu", {"parts": "all"})
    assert [*base.parts] == [*small.parts] and base.compare == small.compare and base.paper == small.paper
    assert small.overrides[: len(base.overrides)] == base.overrides
    assert small.parts["control"].overrides == base.parts["control"].overrides
    assert small.parts["control"].grid != base.parts["control"].grid


SEEDS = 20 if FULL else 2  # 10,000 or 1,000 runs


def test_runs_are_planned_and_frozen_in_six_milliseconds_each(tmp_path: Path) -> None:
    """The lowest of at most three times: what else runs on a core adds to the time of this process, too."""
    file = tmp_path / "big.yaml"
    grid = {"qk_norm.p": [1, 1.5, 2, 2.5, 3], "qk_norm.alpha_init": [1, 2, 3, 4, 5], "attention": ["mha", "gqa"]}
    words = ["data=python_docs", "model=gqa_nano", "qk_norm=lp"]
    file.write_text(yaml.safe_dump({"overrides": words, "folds": [*range(10)], "seeds": [*range(SEEDS)], "grid": grid}))
    lowest = math.inf
    for n in range(3):
        began = time.process_time()
        sweep = load_sweep(str(file), {})
        runs = plan_runs(sweep, [])
        freeze(tmp_path / f"sweep{n}", "big", sweep, [], runs, trains=True)
        assert len({run.id for run in runs}) == 500 * SEEDS
        assert read_plan(tmp_path / f"sweep{n}") == runs
        if (lowest := min(lowest, time.process_time() - began)) < 3 * SEEDS:
            return
    raise AssertionError(f"{lowest:.1f} s for {500 * SEEDS} runs")


def test_a_plan_may_have_an_infinite_p(tmp_path: Path, corpus: Path) -> None:
    file = tiny_sweep(tmp_path, corpus, "qk_norm=lp", grid={"qk_norm.p": [2.0, math.inf]}, folds=[0])
    assert [run.config.qk_norm.p for run in frozen(file)] == [2.0, math.inf] and len(frozen(file)) == 2  # type: ignore[attr-defined]


def test_a_comparison_with_a_setting_that_is_not_there_is_told_before_a_run(tmp_path: Path, corpus: Path) -> None:
    compare = {"a": {"baseline": "dropout=0,qk_norm=none"}, "b": {"pairs": [["dropout=0.0,qk_norm=rms", "p=2"]]}}
    compare |= {"c": {"baseline": "dropout=0.0,qk_norm=none"}, "d": {"baseline": "part/x", "settings": ["part/*"]}}
    said = launched(tiny_sweep(tmp_path, corpus, compare=compare), "dry_run=true")
    known = "is no setting of this sweep; it has dropout=0.0,qk_norm=none, dropout=0.0,qk_norm=rms, "
    warnings = [line.partition("is no")[0] for line in said.splitlines() if line.startswith("warning: ")]
    assert warnings == ["warning: compare.a: dropout=0,qk_norm=none ", "warning: compare.b: p=2 "]
    assert said.count(known) == 2


SAME = "p differs and α starts from one value, so this comparison measures temperature as well; "
APART = {f"p={p}": [f"qk_norm.p={p}", f"qk_norm.alpha_init={a}"] for p, a in ((2, 8), (4, 1.69))}
ONE_EACH = {f"p{p}": {"overrides": [f"qk_norm.p={p}", "qk_norm.alpha_init=1"]} for p in (2, 4)}
AT_ONE_ALPHA: list[tuple[str, dict[str, Any]]] = [  # where the note says that α is one, and a sweep's definition
    *(("this sweep", {"grid": {"qk_norm.p": [2, 4], "qk_norm.alpha_init": [a]}}) for a in (1, "sqrt_d", "henry")),
    ("", {"grid": {"qk_norm.p": [2, 4], "qk_norm.alpha_init": ["matched"]}}),
    ("", {"grid": {"qk_norm.p": [2, 4]}}),
    ("", {"grid": {"qk_norm.p": [3], "qk_norm.alpha_init": [1, 2, "sqrt_d"]}}),
    ("", {"grid": {"qk_norm.p": ["learned"], "qk_norm.alpha_init": [1], "qk_norm.alpha_per": ["layer", "head"]}}),
    ("", {"grid": {"qk_norm.p": [2, "learned"], "qk_norm.alpha_init": [1]}}),  # a learned p starts at 2
    ("this sweep", {"grid": {"qk_norm.p": [3, "learned"], "qk_norm.alpha_init": [1]}}),
    ("", {"grid": {"words": APART}}),
    ("", {"grid": {"words": {"rms": ["qk_norm=rms"], "p=3": ["qk_norm.p=3", "qk_norm.alpha_init=1"]}}}),
    ("", {"grid": {}, "parts": ONE_EACH}),
    ("compare.a, compare.b", {"grid": {}, "parts": ONE_EACH, "compare": {
        "a": {"pairs": [["p4", "p2"]]}, "b": {"baseline": "p2"}, "c": {"baseline": "p2", "settings": ["p3"]},
    }}),
    ("part b, compare.c", {
        "grid": {"qk_norm.p": [2, math.inf]}, "parts": {"a": {}, "b": {"overrides": ["qk_norm.alpha_init=1"]}},
        "compare": {"c": {"baseline": "b/p=2"}, "d": {"baseline": "a/p=2"}},
    }),
]  # fmt: skip


@pytest.mark.parametrize(("where", "definition"), AT_ONE_ALPHA)
def test_points_that_differ_in_p_and_start_from_one_alpha_are_named(
    where: str, definition: dict[str, Any], tmp_path: Path, corpus: Path
) -> None:
    sweep = load_sweep(str(tiny_sweep(tmp_path, corpus, "qk_norm=lp", **definition)), {})
    configs = {point: flatten(asdict(run.config)) for run in plan_runs(sweep, []) for point in run.points}
    told = f"{where}: {SAME}qk_norm.alpha_init=matched starts every p at the same temperature" if where else ""
    assert temperature_note(sweep, configs) == told


def test_a_launch_says_it_before_the_runs_and_not_where_alpha_is_matched(tmp_path: Path, corpus: Path) -> None:
    grid = {"qk_norm.p": [2, 3]}
    file = tiny_sweep(tmp_path, corpus, "qk_norm=lp", "max_iters=2", grid=grid, folds=[0])
    dry, trained = (launched(file, "qk_norm.alpha_init=1", more) for more in ("dry_run=true", "launcher.workers=1"))
    assert dry.startswith(f"note: this sweep: {SAME}") and trained.startswith(f"note: this sweep: {SAME}")
    assert "note: " not in launched(file, "dry_run=true", f"sweep_dir={tmp_path / 'other'}")


def test_a_comparison_with_a_part_that_was_left_out_is_no_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep=p_sweep_cpu", "dry_run=true"]) == 0
    assert "warning" not in capsys.readouterr().out


def test_the_next_command_runs_where_results_has_a_report_of_other_runs(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("scripts.reporting.page.vega", lambda: "")  # which takes a second
    sweep = tiny_sweep(tmp_path, corpus, "max_iters=2", folds=[0], grid={})
    stored = tmp_path / "results" / "tiny" / "runs.csv"
    stored.parent.mkdir(parents=True)
    stored.write_text("id,status\nanother,done\n")

    def hinted(*words: str) -> list[str]:
        with redirect_stdout(io.StringIO()) as said:
            assert main([f"sweep={sweep}", "launcher.workers=1", *words]) == 0
        return shlex.split(said.getvalue().rpartition(f"next: python {ROOT / 'scripts' / 'report.py'} ")[2])

    assert report(hinted("sweep_dir=trial")) == 0 and (tmp_path / "trial" / "report" / "report.html").is_file()
    assert [word for word in hinted() if word.startswith("out=")] == [f"out={tmp_path / 'runs' / 'tiny' / 'report'}"]
    stored.write_text("id\nx\n")
    assert any(word.startswith("out=") for word in hinted())
    stored.unlink()
    assert report(hinted()) == 0 and stored.is_file()


def twice(file: Path) -> None:
    file.write_text(file.read_text() * 2)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda folder: (folder.mkdir(), (folder / "thesis.tmp").touch()), "is neither empty nor a sweep's directory"),
        (lambda folder: (folder.mkdir(), (folder / "logs").symlink_to("/tmp")), "is neither empty"),
        (lambda folder: (folder.mkdir(), (folder / "config.yaml").touch()), "holds a run of train.py: write another"),
        (lambda folder: (folder / "logs").symlink_to(folder.parent), "logs in it is a link"),
        (lambda folder: (folder / "sweep.json").write_text(""), "has a sweep.json that was changed"),
        (lambda folder: twice(folder / "plan.jsonl"), "has a plan.jsonl with a run twice"),
    ],
)
def test_another_folder_is_left_alone(change: Callable[[Path], Any], says: str, tmp_path: Path, corpus: Path) -> None:
    file, folder = tiny_sweep(tmp_path, corpus), tmp_path / "sweep"
    if says.startswith(("logs", "has a")):
        frozen(file)
    change(folder)
    before = sorted(folder.iterdir())
    assert says in launched(file, status=2) and sorted(folder.iterdir()) == before


def test_a_launch_goes_on_that_was_killed_as_it_wrote_its_plan(tmp_path: Path, corpus: Path) -> None:
    frozen(file := tiny_sweep(tmp_path, corpus))
    (tmp_path / "sweep" / "plan.jsonl").rename(tmp_path / "sweep" / "plan.jsonl.4711.tmp")
    assert "8 pending" in launched(file, "dry_run=true")


@pytest.mark.parametrize("claim", ['{"tries": 5}', '{"limit": "2"}', '{"tries": {"a": null}}', "[]"])
def test_a_damaged_claim_has_no_tries(claim: str, tmp_path: Path) -> None:
    (tmp_path / "claims").mkdir()
    (tmp_path / "claims" / "a").write_text(claim)
    assert read_claim(tmp_path, "a") == {"tries": {}, "limit": 1, "error": None}


def test_a_link_in_the_place_of_a_log_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("kept")
    (tmp_path / "sweep").mkdir()
    log = tmp_path / "sweep" / "log"
    log.symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="is a link out of its folder"), worker.output_to(log):
        print("written")
    assert (tmp_path / "victim").read_text() == "kept"


def test_runs_that_two_points_share_are_planned_once(tmp_path: Path, corpus: Path) -> None:
    parts: dict[str, Any] = {"a": {"grid": {"qk_norm": ["none", "rms"]}}, "b": {"overrides": ["qk_norm=rms"]}}
    runs = frozen(tiny_sweep(tmp_path, corpus, grid={}, parts=parts))
    assert [run.points for run in runs] == 2 * [["a/qk_norm=none"], ["a/qk_norm=rms", "b"]]


def test_every_model_of_a_sweep_must_fit_the_weights_that_it_starts_from(tmp_path: Path, corpus: Path) -> None:
    (first,) = frozen(tiny_sweep(tmp_path, corpus, grid={}, folds=[0]))
    origin = str(tmp_path / "origin")
    assert train.run(replace(first.config, out_dir=origin)) == 0
    file = tiny_sweep(tmp_path, corpus, f"init_from={origin}", grid={"output": ["gate", "none"]}, folds=[0])
    gate, none = plan_runs(load_sweep(str(file), {}), [])
    check_runs([none])
    with pytest.raises(ConfigError, match="output"):
        check_runs([gate, none])


def test_the_command_line_changes_grid_folds_seeds_and_parts() -> None:
    words = "sweep.folds=[3] sweep.seeds=[1,2] sweep.parts=[sqrt_d] sweep.grid.qk_norm.p=[2,3.5] max_iters=700"
    asked = LaunchOptions("p_sweep_cpu")
    _, runs, _ = read_request(asked, [*words.split(), "sweep.grid.optim.learning_rate=[1e-3,2E-3]"])
    points = [f"sqrt_d/learning_rate={rate},p={p}" for rate in (0.001, 0.002) for p in (2, 3.5)]
    assert [(run.points, run.seed, run.fold) for run in runs] == [([p], seed, 3) for seed in (1, 2) for p in points]
    assert {run.config.max_iters for run in runs} == {700}
    assert {run.config.optim.learning_rate for run in runs} == {0.001, 0.002}
    assert load_sweep("gqa_nano", {"parts": "all"}) == load_sweep("gqa_nano", {})  # it has no parts


def test_a_part_has_its_own_folds_and_seeds_unless_the_command_line_names_them(tmp_path: Path, corpus: Path) -> None:
    own = {"grid": {"qk_norm": ["none"]}, "folds": [2], "seeds": [5, 6]}
    parts = {"all": {"grid": {"qk_norm": ["rms"]}}, "own": own}
    sweep = tiny_sweep(tmp_path, corpus, grid={}, parts=parts, folds=[0, 1], seeds=[1])
    planned = [(run.points[0].split("/")[0], run.fold, run.seed) for run in frozen(sweep)]
    assert planned == [("all", 0, 1), ("all", 1, 1), ("own", 2, 5), ("own", 2, 6)]
    _, runs, _ = read_request(LaunchOptions(str(sweep)), ["sweep.folds=[3]", "sweep.seeds=[9]"])
    assert [(run.points[0].split("/")[0], run.fold, run.seed) for run in runs] == [("all", 3, 9), ("own", 3, 9)]


def test_a_sweep_file_that_cannot_be_is_refused(tmp_path: Path) -> None:
    circle = tmp_path / "a.yaml", tmp_path / "b.yaml"
    for file, other in zip(circle, circle[::-1], strict=True):
        file.write_text(f"extends: {other}\n")
    with pytest.raises(ConfigError, match=r"a\.yaml extends itself: .*a\.yaml -> .*b\.yaml -> .*a\.yaml"):
        load_sweep(str(circle[0]), {})
    circle[0].write_text("extends: nosuch.yaml\n")
    with pytest.raises(ConfigError, match=rf"sweep={tmp_path}/nosuch.yaml is no file"):
        load_sweep(str(circle[0]), {})
    with pytest.raises(ConfigError, match=f"sweep={tmp_path}/a lacks the file's ending: write sweep={tmp_path}/a.yaml"):
        load_sweep(f"{tmp_path}/a", {})
    circle[0].write_text("extends: b.yaml\n")  # beside it
    circle[1].write_text("extends: p_sweep_cpu\nseeds: [5]\n")
    assert load_sweep(str(circle[0]), {}).seeds == (5,)
    circle[0].write_bytes(b"title: p\xe9")
    with pytest.raises(ConfigError, match=r"sweep=.*a\.yaml must be UTF-8 text; the byte 0xe9 at offset 8 is not"):
        load_sweep(str(circle[0]), {})
    for text, changes, says in (
        ("parts: {a: {on_request: maybe}}", {}, "sweep.parts.a.on_request=maybe must be true or false"),
        ("overrides: model=nano_cpu", {}, "sweep.overrides=model=nano_cpu must be a list"),
        ("parts: {a/b: {}}", {}, "sweep.parts.a/b: a part's name has no / and no ;"),
        ("parts: {a;b: {}}", {}, "sweep.parts.a;b: a part's name has no / and no ;"),
        ("parts: {a: {grid: null}}", {"grid.seed": [2]}, "sweep.parts.a.grid=null must be a group"),
        ("grid: {1: [2, 3]}", {}, "sweep.grid={1: [2, 3]} must be a group, {name: value}, with text"),
        ("parts: {1: {}}", {}, "sweep.parts={1: {}} must be a group, {name: value}, with text"),
        ("grid: {words: {a;b: [seed=1]}}", {}, "sweep.grid.words.a;b: a label has no ;"),
        ("grid: null", {"grid.qk_norm.p": [2]}, "sweep.grid=null must be a group"),
        ("parts: {a: {}}", {"parts": [["a"]]}, "sweep.parts=[['a']] must be all, or some of a"),
    ):
        circle[0].write_text(text)
        with pytest.raises(ConfigError, match=re.escape(says)):
            load_sweep(str(circle[0]), changes)


def test_settings_that_do_not_tell_runs_apart_cannot_be_swept(tmp_path: Path, corpus: Path) -> None:
    file = tiny_sweep(tmp_path, corpus, grid={"dtype": ["float32", "bfloat16"]})
    with pytest.raises(ConfigError, match="have one run id, which does not depend on dtype float32 -> bfloat16"):
        frozen(file)
    words = {"b,c": ["batch_size=2"], "c": ["batch_size=3"]}
    file = tiny_sweep(tmp_path, corpus, grid={"grad_clip": {"a": 1.0, "a,b": 2.0}, "words": words})
    with pytest.raises(ConfigError, match="two points of the grid have the name a,b,c: give them other labels"):
        frozen(file)


def test_one_value_is_one_point_however_it_is_written(tmp_path: Path, corpus: Path) -> None:
    file = tiny_sweep(tmp_path, corpus, "qk_norm=lp", grid={"batch_size": [2], "qk_norm.p": [2, 3]})
    for values in ([2, 3], [2.0, 3.0], [3.0, 2]):
        plan = frozen(file, {"grid.qk_norm.p": values})
        assert [run.points for run in plan] == 2 * [["batch_size=2,p=2"], ["batch_size=2,p=3"]]
    with pytest.raises(ConfigError, match="max_iters 60 -> 61"):
        frozen(file, {"grid.qk_norm.p": [2.0]}, "max_iters=61")
    with pytest.raises(ConfigError, match="twice"):
        load_sweep(str(file), {"grid.qk_norm.p": [2, 2.0]})


def test_a_frozen_plan_may_grow_but_not_change(tmp_path: Path, corpus: Path) -> None:
    file, folder = tiny_sweep(tmp_path, corpus), tmp_path / "sweep"
    assert len(frozen(file, {"folds": [0]})) == 4
    assert len(frozen(file)) == 8
    before = (folder / "plan.jsonl").read_bytes(), (folder / "sweep.json").read_bytes()
    assert len(frozen(file, {"folds": [1], "grid.qk_norm": ["rms"]})) == 8  # fewer: they alone are launched
    for key, old, new in (("max_iters", 60, 61), ("optim.learning_rate", "0.001", 0.01), ("eval_interval", 2, 3)):
        with pytest.raises(ConfigError, match=f"{key} {old} -> {new}"):
            frozen(file, {}, f"{key}={new}")
    assert before == ((folder / "plan.jsonl").read_bytes(), (folder / "sweep.json").read_bytes())
    about = read_json(folder / "sweep.json")
    assert about["name"] == "tiny"
    assert about["sweep"]["grid"]["qk_norm"] == {"qk_norm=none": "none", "qk_norm=rms": "rms"}
    assert [(one["overrides"], one["runs"]) for one in about["frozen"]] == [([], 4), ([], 8)]
    compare = {"norm": {"baseline": "dropout=0.0,qk_norm=none"}}
    assert len(frozen(file, {"folds": [1], "compare": compare})) == 8  # what the report compares is as last asked for
    after = read_json(folder / "sweep.json")
    assert (after["sweep"]["compare"], after["sweep"]["folds"]) == (compare, [0, 1])
    assert after["frozen"] == about["frozen"]


def test_a_new_point_joins_no_frozen_run_of_other_settings(tmp_path: Path, corpus: Path) -> None:
    """Though the run's id does not tell them apart."""
    parts = {name: {"overrides": [f"max_iters={n}"]} for name, n in (("short", 4), ("long", 8))}
    file = tiny_sweep(tmp_path, corpus, "schedule=constant", grid={}, parts=parts)
    assert len({run.id for run in frozen(file, {"parts": "short"})}) == 2
    with pytest.raises(ConfigError, match="holds short with other settings: max_iters 4 -> 8"):
        frozen(file, {"parts": "long"})
    assert "holds short with other settings" in launched(file, "sweep.parts=long", "dry_run=true", status=2)


NONE, RMS = {"grid.qk_norm": ["none"]}, {"grid.qk_norm": ["rms"]}
RATES = {"rates": {"grid": {"optim.learning_rate": [1e-3]}}, "norms": {"grid": {"qk_norm": ["none"]}}}
Grown = tuple[dict[str, Any], list[str], dict[str, Any], list[str], str]
GROWN: dict[str, Grown] = {  # two launches, each with its changes of the sweep and its words; what the second is told
    "seed": ({"seeds": [1]}, [], {"seeds": [2]}, ["optim.learning_rate=0.05"], "optim.learning_rate 0.001 -> 0.05"),
    "fold": ({"folds": [0]}, [], {"folds": [1]}, ["max_iters=90"], "max_iters 60 -> 90"),
    "value": (NONE, [], RMS, ["max_iters=90"], "max_iters 60 -> 90"),
    "group": (NONE, [], RMS, ["data.tokenizer=byte"], "data.tokenizer char -> byte"),
    "label": (
        {"grid": {"words": {"a": ["grad_clip=1.0"]}}, "seeds": [1]}, [],
        {"grid": {"words": {"a": ["grad_clip=2.0"]}}, "seeds": [2]}, [], "grad_clip 1.0 -> 2.0",
    ),
    "part": (
        {}, [], {"parts": ["norms"], **RMS}, ["optim.learning_rate=0.05"], "optim.learning_rate 0.001 -> 0.05",
    ),
    "seed, with what decides nothing": (
        {"seeds": [1]}, [], {"seeds": [2]}, ["log_interval=5", "threads=1", "optim=adamw"], "",
    ),
    "words": (
        {"grid": {"words": {"a": ["grad_clip=1.0"]}}}, [],
        {"grid": {"words": {"b": ["grad_clip=2.0", "max_iters=90"]}}}, [], "",
    ),
    "option": ({"grid.qk_norm": ["lp"]}, ["qk_norm.p=3"], RMS, [], ""),
    "length": ({"grid": {"max_iters": [60]}}, [], {"grid": {"max_iters": [90]}}, ["schedule=cosine"], ""),
}  # fmt: skip


@pytest.mark.parametrize("kind", GROWN)
def test_a_run_of_a_new_seed_fold_or_point_has_the_settings_of_its_sweep(
    kind: str, tmp_path: Path, corpus: Path
) -> None:
    """Else a report would average, or pair, runs that differ in more than what the sweep varies."""
    first, begun, then, words, says = GROWN[kind]
    file = tiny_sweep(tmp_path, corpus, **({"grid": {}, "parts": RATES} if kind == "part" else {}))
    frozen(file, first, *begun)
    before = (tmp_path / "sweep" / "plan.jsonl").read_bytes()
    if says:
        with pytest.raises(ConfigError, match=f": {says}; .*use another sweep_dir"):
            frozen(file, then, *words)
        assert (tmp_path / "sweep" / "plan.jsonl").read_bytes() == before
    else:
        assert len(frozen(file, then, *words)) > before.count(b"\n")


def test_a_sweep_of_more_runs_than_can_be_planned_is_refused_at_once(tmp_path: Path, corpus: Path) -> None:
    grid = {key: [i + 1 for i in range(50)] for key in ("seed_of", "batch_size", "max_iters")}
    with pytest.raises(ConfigError, match="the sweep has 250,000 runs; more than 100,000 are never planned"):
        plan_runs(load_sweep(str(tiny_sweep(tmp_path, corpus, grid=grid)), {}), [])


def test_parts_are_chosen_before_their_grids_change(tmp_path: Path, corpus: Path) -> None:
    parts: dict[str, Any] = {"a": {"grid": {"qk_norm": ["rms"]}}}
    parts["b"] = {"grid": {"optim.learning_rate": [0.1]}, "on_request": True}
    file = str(tiny_sweep(tmp_path, corpus, grid={}, parts=parts))
    words = {"grid.optim.learning_rate": [0.2], "parts": ["a"]}
    for changes in (words, dict(reversed(words.items())), {"grid.optim.learning_rate": [0.2]}):
        assert load_sweep(file, changes).grid == {"optim.learning_rate": {"learning_rate=0.2": 0.2}}
    parts["a"]["on_request"] = True
    with pytest.raises(ConfigError, match="name some of a, b with sweep.parts="):
        load_sweep(str(tiny_sweep(tmp_path, corpus, grid={}, parts=parts)), {})


def test_a_plan_that_grows_by_a_value_and_a_fold_keeps_the_others_definition(tmp_path: Path, corpus: Path) -> None:
    file = tiny_sweep(tmp_path, corpus)
    frozen(file, {"folds": [0], "grid.qk_norm": ["none"]})
    frozen(file, {"folds": [1], "grid.qk_norm": ["rms"]})
    about = read_json(tmp_path / "sweep" / "sweep.json")["sweep"]
    assert about["grid"]["qk_norm"] == {"qk_norm=none": "none", "qk_norm=rms": "rms"} and about["folds"] == [0, 1]
    part = {"grid": {"qk_norm": ["none"]}, "seeds": [1]}
    (tmp_path / "parts").mkdir()
    file = tiny_sweep(tmp_path / "parts", corpus, grid={}, parts={"a": part})
    frozen(file)
    frozen(file, {"grid.qk_norm": ["rms"], "seeds": [2]})
    about = read_json(tmp_path / "parts" / "sweep" / "sweep.json")["sweep"]
    assert about["parts"]["a"]["grid"]["qk_norm"] == {"qk_norm=none": "none", "qk_norm=rms": "rms"}


def test_a_sweeps_name_keeps_its_dots() -> None:
    assert [sweep_name(text) for text in ("lr.2", "my/lr.2.yaml", "runs/v0.1")] == ["lr.2", "lr.2", "v0.1"]
    assert SweepPlace(sweep="my/lr.2.yaml").directory == Path("runs/lr.2")


def test_a_plan_that_grows_by_a_part_keeps_the_others_definition(tmp_path: Path, corpus: Path) -> None:
    names = "none", "rms"
    parts: Any = {name: {"title": name.upper(), "overrides": [f"qk_norm={name}"]} for name in names}
    file = tiny_sweep(tmp_path, corpus, grid={}, parts=parts)
    frozen(file, {"parts": "none"}, "max_iters=5")
    frozen(file, {"parts": "rms"})
    parts["rms"]["title"] = "last"
    frozen(tiny_sweep(tmp_path, corpus, grid={}, parts=parts), {"parts": "rms"})
    about = read_json(tmp_path / "sweep" / "sweep.json")
    assert {name: part["title"] for name, part in about["sweep"]["parts"].items()} == {"none": "NONE", "rms": "last"}
    assert [(one["overrides"], one["runs"]) for one in about["frozen"]] == [(["max_iters=5"], 2), ([], 4)]


@pytest.mark.parametrize("left", [1, 2, 3])
def test_a_crash_while_a_plan_is_frozen_is_mended_by_the_next_launch(
    left: int, tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """left: files that are written before the disk is full."""
    file, folder = tiny_sweep(tmp_path, corpus), tmp_path / "sweep"
    written: list[Path] = []

    def write(path: Path, content: bytes) -> None:
        if len(written) == left:
            raise OSError("no space")
        written.append(path)
        write_atomic(path, content)

    with monkeypatch.context() as patch, suppress(OSError):
        patch.setattr(sweeps.plan, "write_atomic", write)
        frozen(file)
    assert not (folder / "plan.jsonl").exists() or (folder / "sweep.json").exists()  # what has a plan has the rest
    assert len(frozen(file)) == len(read_sweep(folder, "tiny").runs) == 8
    assert len(read_json(folder / "sweep.json")["frozen"]) == 1


def test_the_checkouts_commit_and_changes_are_frozen_with_the_plan(tmp_path: Path, corpus: Path) -> None:
    code = tmp_path / "code"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(code)], check=True)
    shutil.copytree(ROOT / "sweeps", code / "sweeps", dirs_exist_ok=True)
    (code / "README.md").write_text("changed\n")
    file = tiny_sweep(tmp_path, corpus)
    script = f"""
from pathlib import Path
from sweeps.definition import load_sweep
from sweeps.plan import freeze, plan_runs
sweep = load_sweep("{file}", {{}})
freeze(Path("{tmp_path}/sweep"), "tiny", sweep, [], plan_runs(sweep, []), trains=True)
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=code)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=code, capture_output=True, text=True, check=True).stdout
    (frozen,) = read_json(tmp_path / "sweep" / "sweep.json")["frozen"]
    commit, _, changes = frozen.pop("commit").partition("+")
    assert commit == head.strip() and len(changes) == 7 and frozen == {"overrides": [], "runs": 8}
    assert "+changed" in (tmp_path / "sweep" / f"code_{head[:12]}+{changes}.diff").read_text()


def test_a_diverged_run_is_a_result_and_not_a_failure(tmp_path: Path, corpus: Path) -> None:
    words = ["max_iters=30", "grad_clip=0", "eval_interval=30"]
    grid = {"optim.learning_rate": [1e-3, 1e30]}
    sweep = tiny_sweep(tmp_path, corpus, *words, grid=grid, folds=None, parts={"hot": {}})
    output = launched(sweep, "launcher.workers=1")
    assert "1 done, 1 diverged" in output
    for run in read_plan(tmp_path / "sweep"):  # W&B's tags, and no media
        wandb = load_config(yaml.safe_load((tmp_path / "sweep" / run.id / "config.yaml").read_text())).wandb
        assert wandb.tags == (f"sweep:{sweep.stem}", "part:hot") and wandb.media == "off"
        assert (wandb.name, wandb.group) == (run.id, f"{sweep.stem}: {run.points[0]}")  # whatever W&B's variables say
        summary = read_json(tmp_path / "sweep" / run.id / "summary.json")
        assert ("reason" in summary) == (summary["status"] == "diverged")
    (line,) = (line for line in output.splitlines() if line.startswith("diverged: "))
    assert "train/loss" in line and "nan" in line
    assert "1 done, 1 diverged" in launched(sweep)


def test_a_run_that_a_later_launch_left_is_stopped_and_not_failed(tmp_path: Path, corpus: Path) -> None:
    run, *_ = frozen(tiny_sweep(tmp_path, corpus))
    folder = tmp_path / "sweep"
    (folder / run.id).mkdir()
    (folder / "claims").mkdir()
    (folder / run.id / "status.json").write_text('{"state": "stopped", "iter": 20}')
    for last, state in ((0, "stopped"), (2, "failed")):
        (folder / "claims" / run.id).write_text(json.dumps({"tries": {"first": 2, "last": last}, "limit": 2}))
        assert state_of(folder, run).state == state


def test_a_slurm_task_that_got_a_signal_begins_no_other_run_and_takes_back_the_try(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, *_ = frozen(tiny_sweep(tmp_path, corpus))
    folder = tmp_path / "sweep"
    offer(folder, "one", [run])
    assert worker.work(folder, "one", {signal.SIGUSR2}) == 128 + signal.SIGTERM  # it is requeued
    assert not (folder / run.id).exists()

    def killed(config: TrainConfig) -> int:
        received.add(signal.SIGUSR2)
        if errors:
            raise errors.pop()
        return 1  # as of ranks that had no handler yet

    monkeypatch.setattr(train, "run", killed)
    errors: list[Exception] = [RuntimeError("a compiler died")]  # by the same signal
    for _ in range(2):
        received: set[int] = set()
        assert worker.work(folder, "one", received) == 128 + signal.SIGTERM
        assert read_claim(folder, run.id) == {"tries": {"one": 0}, "limit": 1, "error": None}
    assert capsys.readouterr().out == "stopped amid RuntimeError: a compiler died\n"
    for error in (OSError(errno.ENOSPC, "No space left"), MemoryError("too large"), ConfigError("a setting")):
        errors.append(error)
        offer(folder, "two", [run])
        (folder / "claims" / run.id).unlink()
        received = set()
        assert worker.work(folder, "two", received) == worker.RESTART and received
        claim = read_claim(folder, run.id)
        assert claim["tries"] == {"two": 1} and claim["error"]
