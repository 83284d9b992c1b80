"""Runs of an earlier commit (tests/fixtures/v0) load, resume, sample, report and audit as they did then.

Only command lines and files are used, so that these tests stand whatever moves inside. Other kernels, another CPU and
another PyTorch round differently: a resumed run agrees with the uninterrupted one to TOLERANCE, forty times what
was measured between the compiled kernels and PyTorch's operations.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Program
from safetensors.numpy import load_file

TOLERANCE = 1e-4  # relative
STOPPED_AT = 36


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A copy of the earlier commit's runs, in the folder that `program` runs in."""
    shutil.copytree(ROOT / "tests" / "fixtures" / "v0", tmp_path, symlinks=True, dirs_exist_ok=True)
    return tmp_path


def numbers(run: Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl, then those of diagnostics.jsonl, without what a clock measures and the gains, which
    the earlier commit did not record."""
    files = [run / name for name in ("metrics.jsonl", "diagnostics.jsonl")]
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("tok_per_sec", "mfu") and "_gain" not in k} for line in lines]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a run's or a sweep's folder but its logs."""
    files = [p for p in folder.rglob("*") if p.is_file() and not {".log", "launches"} & {p.suffix, *p.parts}]
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


@pytest.mark.parametrize("run", ["gqa", "mla"])
def test_a_stopped_run_resumes_to_the_numbers_of_the_uninterrupted_one(run: str, old: Path, forked: Program) -> None:
    """Bit for bit where a new run equals the uninterrupted one, so that the machine computes as that one did."""
    words = (old / f"{run}.txt").read_text().split()
    done = forked("train.py", *words, f"out_dir={run}_stopped,new", "-m")
    assert f"{run}_stopped: " in done.stdout and f"resumed at iteration {STOPPED_AT}" in done.stdout
    stored, resumed, new = numbers(old / run), numbers(old / f"{run}_stopped"), numbers(old / "new")
    assert len(resumed) == len(stored)
    for before, after in zip(stored, resumed, strict=True):
        assert after == pytest.approx(before, rel=TOLERANCE)
    files = {name: old / name / "ckpt" / "latest" / "model.safetensors" for name in (run, f"{run}_stopped")}
    weights = {name: load_file(file) for name, file in files.items()}
    for name, tensor in weights[run].items():
        assert weights[f"{run}_stopped"][name] == pytest.approx(tensor, rel=TOLERANCE, abs=TOLERANCE), name
    if new == stored:
        assert resumed == stored
        assert all((weights[f"{run}_stopped"][name] == tensor).all() for name, tensor in weights[run].items())
    states = [json.loads((old / f / "summary.json").read_text()) for f in (run, f"{run}_stopped")]
    for key in ("status", "iter", "iter_of_min", "parameters", "corpus_sha256", "held_out_tokens"):
        assert states[0][key] == states[1][key], key


def test_a_finished_run_says_that_it_is_done_and_stays_as_it_is(old: Path, forked: Program) -> None:
    before = contents(old / "gqa")
    done = forked("train.py", *(old / "gqa.txt").read_text().split(), "out_dir=gqa")
    assert "gqa is done" in done.stdout, done.stderr
    assert contents(old / "gqa") == before


@pytest.mark.parametrize(("run", "how"), [
    ("gqa", "num_samples=4 temperature=1"),
    ("mla/ckpt/step_000060", "num_samples=1 temperature=0"),  # two logits are never closer than 0.007
])  # fmt: skip
def test_a_run_and_a_checkpoint_give_the_same_text(run: str, how: str, old: Path, forked: Program) -> None:
    words = [f"run={run}", "start=to", "max_new_tokens=40", "device=cpu", "dtype=float32"]
    done = forked("sample.py", *words, *how.split())
    assert done.stdout == (old / "expected" / f"{run[:3]}_sample.txt").read_text()


def rows(text: str) -> list[dict[str, str]]:
    """Every row of every table, by the names of its columns."""
    found: list[dict[str, str]] = []
    header: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if cells and header and not set("".join(cells)) <= set("-:"):
            found.append(dict(zip(header, cells, strict=True)))
        header = header or cells if cells else []
    return found


def test_a_sweep_is_reported_with_the_same_numbers(old: Path, program: Program) -> None:
    done = program("scripts/report.py", "sweep=grid.yaml", "sweep_dir=sweep", "out=report")
    assert "4 runs, 4 done" in done.stdout, done.stderr
    expected = rows((old / "expected" / "sweep_table.md").read_text())
    found = rows(re.sub(r"\| (PyTorch|Python) \|.*\n", "", (old / "report" / "table.md").read_text()))
    found = [row for row in found if "A − B (95 % interval)" not in row]  # the conclusions had no table
    readings = {row["setting"]: row for row in found if "minimum of the mean curve" in row}  # now a table of their own
    found = [
        row | readings[row["setting"]] if "runs done" in row else row for row in found if row not in readings.values()
    ]
    assert len(found) == len(expected) > 10
    for before, now in zip(expected, found, strict=True):  # there are new columns, and "not resolved" is gone
        other = ("verdict on A", "pairs for 80 % power")  # the second is of the test that decides
        known = {key: value for key, value in now.items() if key in before and key not in other}
        assert known == {key: value for key, value in before.items() if key not in other}


def test_the_status_of_a_sweep_is_what_it_was(old: Path, forked: Program) -> None:
    done = forked("sweeps/status.py", "sweep_dir=sweep")
    first, _, *points = [line.split() for line in done.stdout.splitlines()]
    assert first == ["sweep:", "4", "runs,", "4", "done"]
    assert [(point[0], *point[-2:]) for point in points] == [("p=2", "2", "done"), ("p=3", "2", "done")]


def test_a_finished_sweep_that_is_launched_again_trains_nothing(old: Path, forked: Program) -> None:
    before = contents(old / "sweep")
    done = forked("sweeps/launch.py", "sweep=grid.yaml", "sweep_dir=sweep", "launcher.workers=1", "launcher.threads=1")
    assert "4 runs (4 done)" in done.stdout, done.stderr
    assert contents(old / "sweep") == before


ADDED = "qk_norm.alpha_init=sqrt_d"  # the default of the earlier commit


def test_a_run_and_a_sweep_of_the_earlier_default_name_the_word_to_add(old: Path, forked: Program) -> None:
    grid = old / "grid.yaml"
    grid.write_text(grid.read_text().replace(f"{ADDED}, ", ""))
    words = (old / "gqa.txt").read_text().replace(ADDED, "").split()
    before = contents(old)
    sweep = ["sweep=grid.yaml", "sweep_dir=sweep", "launcher.workers=1", "launcher.threads=1"]
    for command, was in (
        (["train.py", *words, "out_dir=gqa"], "begun"),
        (["train.py", *words, "out_dir=gqa_stopped"], "begun"),
        (["sweeps/launch.py", *sweep], "planned"),
    ):
        refused = forked(*command, status=2).stderr
        assert refused.count("\n") == 1 and f"; add {ADDED}, the default when it was {was}, " in refused
    assert contents(old) == before
    assert "4 runs (4 done)" in forked("sweeps/launch.py", *sweep, ADDED).stdout


def test_a_directory_that_the_earlier_default_named_is_told_of_once(old: Path, forked: Program) -> None:
    name = "runs/baby_gpt-mha-lp_p2_sqrt_d-constant-text-fold0-s1337-640a118a"
    shutil.copytree(old / "sweep" / Path(name).name, old / name, symlinks=True)
    shown = re.search(r"overrides: \[(.*?)\]", (old / "grid.yaml").read_text(), re.DOTALL)
    assert shown is not None
    words = [word for word in shown[1].replace(",", " ").split() if word != ADDED] + ["data.fold=0"]
    note = f"note: {name} was begun when {ADDED} was the default: add it to go on there\n"
    said = [forked("train.py", *of).stdout for of in ([*words, ADDED], words, words)]
    assert f"{name} is done" in said[0] and [text.count(note) for text in said] == [0, 1, 0]
    assert said[1].count("note: ") == 1


def test_an_audit_finds_the_same(old: Path, forked: Program) -> None:
    done = forked("scripts/audit.py", "run=mla", "steps=20", "device=cpu")
    expected = json.loads((old / "expected" / "mla_audit.json").read_text())
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["caught"] == expected["caught"] == []
    assert found["checks"].pop("cached decoding")["relative_difference"] < 1e-5  # is new
    before, now = leaves(expected["checks"]), leaves(found["checks"])
    both = before.keys() & now.keys()  # the earlier audit had more numbers of some checks
    assert {key: now[key] for key in both} == pytest.approx({key: before[key] for key in both}, rel=TOLERANCE, abs=1e-6)
    assert {name.split("/")[1] for name in both} == found["checks"].keys()
    assert {name.split("/")[1] for name in before.keys() - both} == {"future leakage", "step-0 loss", "accumulation"}


def leaves(content: Any, key: str = "") -> dict[str, float]:
    """The numbers in nested objects, by their path."""
    if isinstance(content, dict):
        return {path: x for part, of in content.items() for path, x in leaves(of, f"{key}/{part}").items()}
    return {key: content} if isinstance(content, int | float) else {}
