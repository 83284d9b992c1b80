"""A run that was stopped and started again ends as if nothing had happened, bit for bit."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from conftest import QK_NORM_VARIANTS, ROOT
from test_train import assert_same_run, configured, lines, weights

import train
from core import checkpoint
from core.metrics import Metrics
from core.schema import ConfigError
from training import session


@pytest.mark.parametrize("name", QK_NORM_VARIANTS)
def test_six_iterations_equal_three_and_three(name: str, corpus: Path, tmp_path: Path) -> None:
    """With dropout; the two accumulated micro-batches draw from the same generator."""
    changes = {"qk_norm": asdict(QK_NORM_VARIANTS[name]), "gradient_accumulation_steps": 2}
    assert train.run(configured(corpus, tmp_path / "straight", **changes)) == 0
    assert train.run(configured(corpus, tmp_path / "halves", max_iters=3, **changes)) == 0
    assert checkpoint.load(tmp_path / "halves" / "ckpt" / "latest").step == 3
    assert train.run(configured(corpus, tmp_path / "halves", **changes)) == 0
    assert_same_run(tmp_path / "straight", tmp_path / "halves")


@pytest.mark.parametrize("optim", ["adamw", "muon"])
@pytest.mark.parametrize("schedule", ["wsd", "linear", "constant"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_recipe_resumes_bit_for_bit(dtype: str, optim: str, schedule: str, corpus: Path, tmp_path: Path) -> None:
    """The constant schedule does not depend on max_iters, and so need not be told where the run will end."""
    end = {} if schedule == "constant" else {"lr_decay_iters": 6}
    changes: dict[str, Any] = {
        "dtype": dtype,
        "optim": {"name": optim},
        "schedule": {"name": schedule, "warmup_iters": 1, **end},
    }
    assert train.run(configured(corpus, tmp_path / "straight", **changes)) == 0
    assert train.run(configured(corpus, tmp_path / "halves", max_iters=3, **changes)) == 0
    assert train.run(configured(corpus, tmp_path / "halves", **changes)) == 0
    assert_same_run(tmp_path / "straight", tmp_path / "halves")
    assert any(name.startswith("optimizer/momentum_buffer") for name in weights(tmp_path / "halves")) == (
        optim == "muon"
    )


def test_the_seed_decides_so_that_equality_is_not_an_accident(corpus: Path, tmp_path: Path) -> None:
    for seed in (1, 2):
        assert train.run(configured(corpus, tmp_path / f"{seed}", seed=seed)) == 0
    assert lines(tmp_path / "1") != lines(tmp_path / "2")


@pytest.mark.parametrize("first", [1, 4, 5])
def test_a_changed_eval_interval_does_not_change_the_training(first: int, corpus: Path, tmp_path: Path) -> None:
    assert train.run(configured(corpus, tmp_path / "straight", eval_interval=1)) == 0
    intervals = {"log_interval": 1, "checkpoint_interval": 1}
    assert train.run(configured(corpus, tmp_path / "halves", max_iters=3, eval_interval=first, **intervals)) == 0
    assert train.run(configured(corpus, tmp_path / "halves", eval_interval=1)) == 0
    ours, theirs = weights(tmp_path / "straight"), weights(tmp_path / "halves")
    assert all((ours[name] == theirs[name]).all() for name in ours)
    straight, halves = lines(tmp_path / "straight"), lines(tmp_path / "halves")
    assert straight[3:] == halves[3:]
    for a, b in zip(straight, halves, strict=True):
        assert {k: a[k] for k in b} == b  # fewer evaluations, equal where there are any


def test_a_resumed_compiled_run_is_bit_exact(corpus: Path, tmp_path: Path) -> None:
    if shutil.which("g++") is None and not os.environ.get("CI"):
        pytest.skip("torch.compile on a CPU needs g++")
    assert train.run(configured(corpus, tmp_path / "straight", compile=True)) == 0
    assert train.run(configured(corpus, tmp_path / "halves", max_iters=3, compile=True)) == 0
    assert train.run(configured(corpus, tmp_path / "halves", compile=True)) == 0
    assert_same_run(tmp_path / "straight", tmp_path / "halves")
    assert train.run(configured(corpus, tmp_path / "eager")) == 0
    compiled, eager = (lines(tmp_path / name)[0]["val/loss"] for name in ("straight", "eager"))
    assert compiled == pytest.approx(eager, rel=1e-5)


def test_other_code_is_warned_of_and_every_commit_is_kept(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    for max_iters, commit in ((2, "a"), (4, "b+12"), (5, "b+12"), (6, "a")):
        monkeypatch.setattr(session, "commit", lambda commit=commit: commit)
        assert train.run(configured(corpus, run, max_iters=max_iters)) == 0
    summary = json.loads((run / "summary.json").read_text())
    assert summary["commit"] == "a, b+12" == checkpoint.load(run / "ckpt" / "latest").state["commit"]
    log = (run / "train.log").read_text()
    assert log.count("warning: commit") == log.count("warning: commit a -> b+12: other code trains the rest") == 1


def test_a_finished_run_is_not_handed_back_for_another_dtype(corpus: Path, tmp_path: Path) -> None:
    assert train.run(configured(corpus, tmp_path / "run")) == 0
    with pytest.raises(ConfigError, match=r"dtype=bfloat16: .*run is done in torch.float32; .*fresh=true"):
        train.run(configured(corpus, tmp_path / "run", dtype="bfloat16"))
    for dtype in ("float32", "auto"):
        assert train.run(configured(corpus, tmp_path / "run", dtype=dtype)) == 0


def test_a_finished_run_is_not_handed_back_for_another_text(corpus: Path, tmp_path: Path) -> None:
    assert train.run(configured(corpus, tmp_path / "run")) == 0
    other = tmp_path / corpus.name
    other.write_text(corpus.read_text()[::-1])
    with pytest.raises(ConfigError, match=r"is not the text that .*run was begun on: .*; use another out_dir"):
        train.run(configured(other, tmp_path / "run"))


def test_what_would_change_the_numbers_is_refused_and_named(corpus: Path, tmp_path: Path) -> None:
    assert train.run(configured(corpus, tmp_path / "run", max_iters=3)) == 0
    with pytest.raises(ConfigError, match=r"seed 1337 -> 7.*batch_size 4 -> 8|batch_size 4 -> 8.*seed 1337 -> 7"):
        train.run(configured(corpus, tmp_path / "run", seed=7, batch_size=8))
    with pytest.raises(ConfigError, match=r"dtype=bfloat16 is torch.bfloat16 here.*set dtype=float32"):
        train.run(configured(corpus, tmp_path / "run", dtype="bfloat16"))
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    with pytest.raises(ConfigError, match="max_iters=2"):
        (tmp_path / "run" / "summary.json").unlink()
        train.run(configured(corpus, tmp_path / "run", max_iters=2))
    corpus.write_text(corpus.read_text() + "!")
    with pytest.raises(ConfigError, match="not the text"):
        train.run(configured(corpus, tmp_path / "run"))
    assert all(p.read_bytes() == before[p] for p in before if p.exists())  # a refusal writes nothing


def test_a_moved_corpus_goes_on(corpus: Path, tmp_path: Path) -> None:
    assert train.run(configured(corpus, tmp_path / "run", max_iters=3)) == 0
    moved = corpus.rename(tmp_path / "moved.txt")
    assert train.run(configured(moved, tmp_path / "run")) == 0


def test_a_run_that_lost_its_checkpoints_is_not_begun_anew_unasked(corpus: Path, tmp_path: Path) -> None:
    assert train.run(configured(corpus, tmp_path / "run", max_iters=3)) == 0
    shutil.rmtree(tmp_path / "run" / "ckpt")
    with pytest.raises(ConfigError, match="reached iteration 3 but holds no checkpoint; fresh=true"):
        train.run(configured(corpus, tmp_path / "run"))
    assert train.run(configured(corpus, tmp_path / "run", fresh=True)) == 0


def test_a_run_whose_checkpoints_are_all_corrupt_is_refused_in_one_line(corpus: Path, tmp_path: Path) -> None:
    assert train.run(configured(corpus, tmp_path / "run", max_iters=3)) == 0
    for file in (tmp_path / "run" / "ckpt").glob("step_*/model.safetensors"):
        file.write_bytes(b"")
    with pytest.raises(ConfigError, match="cannot go on.*fresh=true"):
        train.run(configured(corpus, tmp_path / "run"))


def test_fewer_iterations_than_are_made_are_refused(corpus: Path, tmp_path: Path) -> None:
    assert train.run(configured(corpus, tmp_path / "run", max_iters=4)) == 0
    (tmp_path / "run" / "summary.json").unlink()  # as if killed at the very end
    with pytest.raises(ConfigError, match="max_iters=2"):
        train.run(configured(corpus, tmp_path / "run", max_iters=2))
    assert train.run(configured(corpus, tmp_path / "run", max_iters=4)) == 0
    assert (tmp_path / "run" / "summary.json").exists()


def test_a_corrupt_checkpoint_is_replaced_by_the_one_before_it_and_the_numbers_stay(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"eval_interval": 1, "checkpoint_interval": 1}
    assert train.run(configured(corpus, tmp_path / "straight", **changes)) == 0
    assert train.run(configured(corpus, tmp_path / "broken", max_iters=4, **changes)) == 0
    file = tmp_path / "broken" / "ckpt" / "latest" / "optimizer.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert train.run(configured(corpus, tmp_path / "broken", **changes)) == 0
    assert "optimizer.safetensors" in capsys.readouterr().out
    assert_same_run(tmp_path / "straight", tmp_path / "broken")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_stops_and_says_how_to_go_on(
    number: signal.Signals, status: int, tiny_run: list[str], tmp_path: Path, program: Callable[..., Any]
) -> None:
    words = [*tiny_run, "max_iters=1000", "eval_interval=500", "checkpoint_interval=1000"]
    straight = program("train.py", *words, "out_dir=straight")
    assert straight.returncode == 0, straight.stderr
    command = [sys.executable, str(ROOT / "train.py"), *words, "out_dir=stopped"]
    metrics = tmp_path / "stopped" / "metrics.jsonl"
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None and (not metrics.exists() or len(metrics.read_bytes().splitlines()) < 20):
            time.sleep(0.01)
        process.send_signal(number)
        out = process.communicate(timeout=180)[0]
    assert process.returncode == status
    assert f"stopped by {number.name}" in out and "the same command goes on from there" in out
    state = json.loads((tmp_path / "stopped" / "status.json").read_text())
    assert state["state"] == "stopped" and state["reason"] == number.name
    assert checkpoint.load(tmp_path / "stopped" / "ckpt" / "latest").step == state["iter"]
    assert [line["iter"] for line in Metrics.read(metrics)] == list(range(state["iter"]))
    assert program("train.py", *words, "out_dir=stopped").returncode == 0
    assert_same_run(tmp_path / "straight", tmp_path / "stopped")
