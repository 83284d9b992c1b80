"""A sweep of eight runs of a second, launched in this process; whether two sweeps are equal."""

import csv
import io
import os
import tempfile
from collections.abc import Container
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import TINY

from helpers.runs import assert_same_run
from scripts.reporting.runs import read_sweep
from scripts.reporting.stored import runs_csv
from sweeps.claims import Launch
from sweeps.definition import load_sweep
from sweeps.launch import main
from sweeps.plan import PlannedRun, freeze, plan_runs, read_plan


def tiny_sweep(folder: Path, corpus: Path, *overrides: str, **changes: Any) -> Path:
    """The file of a sweep of eight runs of a second: two norms, dropout or not, two folds."""
    words = ["data=text", f"data.path={corpus}", *TINY, "plot=auto", "max_iters=60", "wandb.mode=disabled", *overrides]
    grid = {"qk_norm": ["none", "rms"], "model.dropout": [0.0, 0.2]}
    file = folder / "tiny.yaml"
    definition = {"title": "a tiny sweep", "overrides": words, "folds": [0, 1], "grid": grid, **changes}
    file.write_text(yaml.safe_dump(definition))
    return file


def frozen(sweep: Path, changes: dict[str, Any] | None = None, *words: str) -> list[PlannedRun]:
    """Plan a sweep, freeze the plan in the directory beside its file, and read it back."""
    definition, folder = load_sweep(str(sweep), changes or {}), sweep.parent / "sweep"
    freeze(folder, "tiny", definition, [*words], plan_runs(definition, [*words]), trains=True)
    return read_plan(folder)


def offer(folder: Path, launch: str, runs: list[PlannedRun], tries: int = 1, ranks: int = 1) -> None:
    """What a launcher writes before its workers start."""
    for name in ("claims", "launches", "logs"):
        (folder / name).mkdir(exist_ok=True)
    Launch(folder, launch, [run.id for run in runs], tries, ranks).write()


MPS = """#!/bin/sh
cd "$CUDA_MPS_PIPE_DIRECTORY" || exit 1
case $1 in
-f) echo $$ >pid; echo "$CUDA_VISIBLE_DEVICES" >"$CUDA_MPS_LOG_DIRECTORY/gpus"; {daemon};;
*) read -r word; [ -s pid ] || exit 1; [ "$word" != quit ] || kill "$(cat pid)";;
esac
"""


def with_mps(folder: Path, daemon: str = "exec sleep 600") -> dict[str, str]:
    """The environment of a machine with two GPUs and a stand-in for MPS, a shell's command that can be told to quit."""
    file = folder / "bin" / "nvidia-cuda-mps-control"
    file.parent.mkdir()
    file.write_text(MPS.format(daemon=daemon))
    file.chmod(0o755)
    gpus = {"CUDA_VISIBLE_DEVICES": "3,5", "TMPDIR": str(folder)}
    return {**os.environ, **gpus, "PATH": f"{file.parent}:{os.environ['PATH']}"}


def use_mps(folder: Path, monkeypatch: pytest.MonkeyPatch, daemon: str = "exec sleep 600") -> None:
    """This process is on that machine."""
    for name, value in with_mps(folder, daemon).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(tempfile, "tempdir", None)  # TMPDIR is read anew


def where(sweep: Path) -> list[str]:
    return [f"sweep={sweep}", f"sweep_dir={sweep.parent / 'sweep'}", "launcher.workers=2"]


def launched(sweep: Path, *words: str, status: int = 0) -> str:
    """What a launcher in this process prints."""
    with redirect_stdout(io.StringIO()) as said, redirect_stderr(said):
        assert main([*where(sweep), *words]) == status, said.getvalue()
    return said.getvalue()


def pending_signals(pid: int) -> int:
    """Those sent to a process that is stopped, as bits."""
    (line,) = (x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("ShdPnd:"))
    return int(line.split()[1], 16)


def times_finished(run: Path) -> int:
    return sum(" done: val/loss " in line for line in (run / "train.log").read_text().splitlines())


def untimed_csv(sweep_dir: Path) -> list[dict[str, str]]:
    """runs.csv without how long the runs took, and of which checkout."""
    rows = csv.DictReader(io.StringIO(runs_csv(read_sweep(sweep_dir, "tiny"))))
    other = ("seconds", "tok_per_sec", "commit")
    return [{key: value for key, value in row.items() if key not in other} for row in rows]


def assert_same_sweep(done: Path, other: Path, finished: Container[int] = (1,)) -> None:
    """Every run of `other` equals that of the undisturbed sweep bit for bit, and so does runs.csv; finished: how often
    a run may have said that it is done."""
    for run in read_plan(done):
        assert_same_run(done / run.id, other / run.id)
        assert times_finished(other / run.id) in finished
    assert untimed_csv(done) == untimed_csv(other)
