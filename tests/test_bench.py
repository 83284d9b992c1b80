"""The benchmarks run, and say what they promise; what they measure is results/benchmarks."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from conftest import ROOT

Program = Callable[..., CompletedProcess[str]]


def last_line(ended: CompletedProcess[str]) -> dict[str, Any]:
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return result


@pytest.fixture
def peer() -> str:
    path = os.environ.get("NANOQK_NANOGPT")
    if not path:
        pytest.skip("NANOQK_NANOGPT names no checkout of nanoGPT")
    return f"peer={path}"


def test_updates_of_nanogpt_and_of_another_checkout_alternate_with_ours(
    program: Program, tiny_run: list[str], peer: str
) -> None:
    words = [peer, f"old={ROOT}", "rounds=3", "iters=2", *tiny_run]
    result = last_line(program("scripts/benchmarks/bench_train.py", *words))
    for side in ("ours", "old", "peer"):
        assert set(result[side]) == {"tok_per_sec", "ms_per_iter", "peak_memory_mib", "mfu"}
        assert result[side]["tok_per_sec"] == pytest.approx(4 * 16 / result[side]["ms_per_iter"] * 1000, rel=0.01)
        assert result[side]["peak_memory_mib"] > 50 and 0 < result[side]["mfu"] < 1
    for key in ("ratio", "ratio_to_old"):
        assert result[key]["lowest"] <= result[key]["median"] <= result[key]["highest"]
    assert result["rounds"] == 3 and result["device"].startswith("cpu")


def test_another_checkout_runs_its_own_modules(program: Program, tiny_run: list[str], tmp_path: Path) -> None:
    """One whose update does nothing."""
    ours = "def ours(words):\n    return lambda n: {}, {'parameters': MARK}\n"
    files = {"core/__init__.py": "", "core/schema.py": "MARK = 4242\n", "scripts/__init__.py": ""}
    for name, text in {**files, "scripts/bench_train.py": f"from core.schema import MARK\n{ours}"}.items():
        (tmp_path / "old" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "old" / name).write_text(text)
    done = program("scripts/benchmarks/bench_train.py", "old=old", "rounds=1", "iters=1", *tiny_run)
    assert last_line(done)["ratio_to_old"]["highest"] < 0.1 and "old 4,242" in done.stdout


def test_evaluation_beside_nanogpts_sampled_one(program: Program, tiny_run: list[str], peer: str) -> None:
    words = [peer, "eval_iters=50", "rounds=1", "iters=1", *tiny_run]
    result = last_line(program("scripts/benchmarks/bench_train.py", *words))
    assert result["ours"]["tokens"] == 600  # the last 10 % of 6,000 characters
    assert result["peer"]["tokens"] == 2 * 50 * 4 * 16 and result["peer"]["batches_run"] == 1
    assert result["ratio"]["median"] == pytest.approx(result["peer"]["seconds"] / result["ours"]["seconds"])


def test_curves_beside_nanogpts_from_the_same_weights_on_the_same_batches(
    program: Program, tiny_run: list[str], peer: str
) -> None:
    words = [peer, "curves=30", "rounds=2", *tiny_run, "gradient_accumulation_steps=2", "model.dropout=0"]
    result = last_line(program("scripts/benchmarks/bench_train.py", *words))
    assert result["first_loss_difference"] < 1e-5 and result["tenths_end_at"] == [*range(3, 31, 3)]
    assert result["ours"][-1] < result["ours"][0] - 0.2  # it learns
    assert max(map(abs, result["difference"])) < 1e-3 < max(result["sd_over_seeds"])


@pytest.mark.parametrize("together", ["false", "true"])
def test_variants_against_one_another(program: Program, tiny_run: list[str], together: str) -> None:
    """The third is so much more work than the others that it must take longer."""
    large = "qk_norm=none model.n_layer=8 model.n_embd=256"
    words = [f"variants=qk_norm=none;qk_norm=lp qk_norm.p=3;{large}", f"together={together}", "rounds=2", "iters=3"]
    result = last_line(program("scripts/benchmarks/bench_train.py", *words, *tiny_run))
    assert [*result["variants"]] == ["qk_norm=none", "qk_norm=lp qk_norm.p=3", large]
    assert [*result["time_over_first"]] == ["qk_norm=lp qk_norm.p=3", large]
    assert result["time_over_first"][large]["lowest"] > 1


def test_start_up(program: Program, tiny_run: list[str]) -> None:
    result = last_line(program("scripts/benchmarks/bench_train.py", "start_up=true", "rounds=1", *tiny_run))
    assert 0 < result["loop_begins_s"] <= result["first_update_s"]


def test_sampling_of_nanogpt_and_of_another_checkout_alternates_with_ours(
    program: Program, tiny_run: list[str], peer: str
) -> None:
    assert program("train.py", *tiny_run, "max_iters=2", "out_dir=run").returncode == 0
    words = [peer, f"old={ROOT}", "run=run", "start=to be", "tokens=200", "rounds=1"]  # more than times are rounded to
    result = last_line(program("scripts/benchmarks/bench_sample.py", *words))
    for n in (1, 10):
        rows = result[f"{n}_sequences"]
        for side in ("ours", "old", "peer"):
            assert rows[side]["tok_per_sec"] > 0 and rows[side]["first_token_s"] < rows[side]["seconds"]
        for key, side in (("ratio", "peer"), ("ratio_to_old", "old")):
            speeds = rows["ours"]["tok_per_sec"] / rows[side]["tok_per_sec"]
            assert rows[key]["median"] == pytest.approx(speeds, rel=0.01)


def test_sampling_of_variants(program: Program, tiny_run: list[str]) -> None:
    words = ["variants=qk_norm=none;qk_norm=lp", "start=to be", "tokens=20", "rounds=1", *tiny_run]
    result = last_line(program("scripts/benchmarks/bench_sample.py", *words))
    for n in (1, 10):
        rows = result[f"{n}_sequences"]
        none, lp = (rows["variants"][name]["tok_per_sec"] for name in ("qk_norm=none", "qk_norm=lp"))
        assert rows["speed_over_first"]["qk_norm=lp"]["median"] == pytest.approx(lp / none, rel=0.01)


def test_a_sweep_by_one_worker_and_by_two(program: Program, tiny_run: list[str]) -> None:
    words = [*tiny_run, "max_iters=4", "sweep.overrides=[qk_norm=lp]", "runs=4", "rounds=1"]
    result = last_line(program("scripts/benchmarks/bench_sweep.py", *words))
    for row in (result["1_workers"], result["2_workers"]):
        assert 0 < row["run_seconds"] < row["seconds"] and 0 < row["overhead"] < 1
        assert 0 < row["start_and_end_s"] < row["seconds"] and 0 < row["gap_s"] < row["seconds"]
    assert result["1_workers"]["idle_end"] == 0 <= result["2_workers"]["idle_end"] < 1
    one = result["1_workers"]
    in_a_row = one["start_and_end_s"] + 4 * one["run_seconds"] + 3 * one["gap_s"]
    assert in_a_row == pytest.approx(one["seconds"], abs=0.01)
    assert one["overhead"] == pytest.approx(1 - 4 * one["run_seconds"] / one["seconds"], abs=1e-3)
    assert result["speed_up"]["median"] == pytest.approx(one["seconds"] / result["2_workers"]["seconds"], rel=0.01)


@pytest.mark.parametrize(
    ("script", "words", "message"),
    [
        ("bench_train.py", [], "one of peer=, old=, variants= and start_up=true"),
        ("bench_train.py", ["start_up=true", "together=true"], "together=true needs variants="),
        ("bench_train.py", ["old=nosuch"], "old=nosuch must be a checkout of this repository"),
        ("bench_train.py", ["peer=nosuch"], "peer=nosuch must be a checkout of nanoGPT"),
        ("bench_train.py", ["peer=.", "qk_norm=rms"], "nanoGPT's own settings"),
        ("bench_train.py", ["variants=qk_norm=none", "rounds=x"], "rounds=x must be an integer"),
        ("bench_sample.py", [], "one of peer=, old= and variants="),
        ("bench_sample.py", ["old=nosuch"], "old=nosuch must be a checkout of this repository"),
        ("bench_sample.py", ["variants=qk_norm=none", "run=x"], "run= goes with peer= or old="),
        ("bench_sample.py", ["variants=qk_norm=non"], "qk_norm=non"),
        ("bench_sample.py", ["peer=nosuch"], "peer=nosuch must be a checkout of nanoGPT"),
        ("bench_sweep.py", ["runs=3"], "runs=3 must be a multiple of workers=2"),
        ("bench_sweep.py", ["sweep=nosuch"], "sweep=nosuch must be one of"),
    ],
)
def test_bad_input_gets_one_line_and_status_2(program: Program, script: str, words: list[str], message: str) -> None:
    ended = program(f"scripts/benchmarks/{script}", *words)
    assert ended.returncode == 2 and message in ended.stderr
    assert ended.stderr.startswith("error: ") and ended.stderr.count("\n") == 1
