"""scripts/check_gpu.py on a CPU: what needs CUDA says so, and a part that fails leaves the others alone."""

import importlib
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY_LAYER, exit_status, fork
from torch import Tensor

import train
from core.cli import run_script
from model import ops
from scripts import check_gpu
from scripts.benchmarks import gpu_checks, gpu_part, gpu_speed
from scripts.benchmarks.gpu_part import CheckOptions, Row, tiny_config

pytestmark = pytest.mark.usefixtures("quick_processes")
ON_CPU = CheckOptions(device="cpu", rounds=1)
SMALL = [
    "model.n_layer=1", "model.n_head=2", "model.n_embd=16", "model.block_size=16", "batch_size=2", "threads=1",
]  # fmt: skip


def test_parts_run_on_a_cpu_or_say_why_not_and_earlier_results_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def check(parts: str) -> dict[str, Any]:
        words = ["device=cpu", "out=it", f"parts=[{parts}]", *SMALL]
        assert run_script(CheckOptions, check_gpu.check, "", words, passes_on=True) == 0
        data, page = sorted((tmp_path / "it").iterdir())
        assert page.suffix == ".md" and capsys.readouterr().out.endswith(f"it/{page.name}\n")
        found: dict[str, Any] = json.loads(data.read_text())["parts"]
        for name, part in found.items():
            assert f"| {name} | {part['state']}" in page.read_text()
        return found

    found = check("profile,turns")
    assert [*found] == ["device", "profile", "turns"]
    assert found["turns"]["reason"].startswith("needs peer=PATH")
    for row in found["profile"]["rows"].values():
        assert row["ms"] > 0 and row["operators"] > 100 and 0 < row["MFU"] < 1
    found = check("triton")
    assert [*found] == ["device", "triton", "profile", "turns"]
    assert (found["triton"]["state"], found["triton"]["reason"]) == ("skipped", "needs CUDA")


def test_every_part_is_a_function_that_says_what_it_asks() -> None:
    for name, module in check_gpu.PARTS.items():
        assert getattr(importlib.import_module(module), name).__doc__, name


def test_the_part_sdpa_runs_on_a_cpu() -> None:
    rows = gpu_checks.sdpa(ON_CPU, [])
    assert rows["qwen_134m"]["float32"] in ("flash", None) and len(rows) == 4


SPOILED = """
import os, sys, time
def raises(asked, words):
    "It raises."
    raise ValueError("no such kernel")
def dies(asked, words):
    "It dies."
    os._exit(7)
def wrong(asked, words):
    "It is wrong."
    return {"a": {"error": 0.1}, "b": {"error": 0.5, "failed": "differs | by 0.5"}}
def waits(asked, words):
    "It never ends."
    time.sleep(1000)
def good(asked, words):
    "It is right."
    return {"a": {"error": 0.1}}
"""


def test_a_part_that_fails_dies_or_never_ends_leaves_the_others_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "spoiled.py").write_text(SPOILED)
    monkeypatch.syspath_prepend(tmp_path)
    names = ("raises", "dies", "wrong", "good")
    parts = {"device": check_gpu.PARTS["device"], **dict.fromkeys((*names, "waits"), "spoiled")}
    monkeypatch.setattr(check_gpu, "PARTS", parts)
    asked = replace(ON_CPU, out=str(tmp_path / "out"), parts=names)
    assert check_gpu.check(asked, []) == 1
    found = json.loads(next((tmp_path / "out").glob("*.json")).read_text())["parts"]
    assert {name: (found[name]["state"], found[name]["reason"]) for name in names} == {
        "raises": ("failed", "ValueError: no such kernel"),
        "dies": ("failed", "died with exit status 7"),
        "wrong": ("failed", "1 of 2, the first b: differs | by 0.5"),
        "good": ("passed", ""),
    }
    assert r"differs \| by 0.5" in next((tmp_path / "out").glob("*.md")).read_text()
    late = check_gpu.run_part("waits", replace(asked, minutes=0.05), [])
    assert (late["state"], late["reason"]) == ("failed", "took more than 0.05 minutes")


# -----------------------------------------------------------------------------
# Parts


def test_a_pair_that_computes_something_else_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(config: Any, machine: Any, *rest: Any, **named: Any) -> Any:
        loss, gradient = outcome(config, machine, *rest, **named)
        wrong = config.qk_norm.name == "rms" and machine.dtype == torch.bfloat16
        return loss, gradient * (1.1 if wrong else 1)

    monkeypatch.setattr(gpu_checks, "PAIRS", [("mla", "lp3"), ("gqa", "rms"), ("mla_unified", "lpinf")])
    assert not [row for row in gpu_checks.pairs(ON_CPU, []).values() if "failed" in row]
    outcome = gpu_checks.outcome
    monkeypatch.setattr(gpu_checks, "outcome", spoiled)
    assert ["failed" in row for row in gpu_checks.pairs(ON_CPU, []).values()] == [False, True, False]


def test_a_model_that_the_compiler_breaks_into_graphs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a fork: the compiler remembers the functions at which it broke."""

    def broken(*arguments: Any) -> Tensor:
        torch._dynamo.graph_break()
        return residual_norm(*arguments)

    def check() -> int:
        monkeypatch.setattr(gpu_checks, "PAIRS", [("mha", "none")])
        monkeypatch.setattr(gpu_checks, "is_compiled", lambda *_: True)
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
        assert "failed" not in gpu_checks.pairs(ON_CPU, [])["mha none"]
        monkeypatch.setattr(ops, "residual_norm", broken)
        assert "graph breaks" in gpu_checks.pairs(ON_CPU, [])["mha none"]["failed"]
        return 0

    residual_norm = ops.residual_norm
    assert exit_status(fork(check)) == 0


FEW = ["max_iters=20", "eval_interval=10", "checkpoint_interval=10"]


@pytest.mark.parametrize(
    "row, steps",
    [
        (lambda: gpu_checks.killed(ON_CPU, "true"), gpu_checks.STEPS),  # until it is killed at iteration 30
        (lambda: gpu_checks.first_and_third(ON_CPU, gpu_checks.MLA), FEW),
        (lambda: gpu_checks.two_ranks(ON_CPU, []), FEW),
        (lambda: gpu_checks.moved_to_cpu(ON_CPU, []), FEW),
    ],
    ids=["killed", "first and third", "two ranks", "moved to the CPU"],
)
def test_runs_hold_their_promises_on_a_cpu(
    row: Callable[[], Row], steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_checks, "STEPS", steps)
    monkeypatch.setattr(gpu_part, "TINY", [*gpu_part.TINY, "data.fold=0", "data.folds=100"])  # less to evaluate
    found = row()
    assert "failed" not in found and found, found


def test_runs_that_differ_are_told_apart(tmp_path: Path) -> None:
    for seed in ("1", "2"):
        words = ["max_iters=2", "schedule.warmup_iters=1", f"seed={seed}", f"out_dir={tmp_path / seed}"]
        assert train.run(tiny_config(ON_CPU, *words)) == 0
    row = gpu_checks.equal(tmp_path / "1", tmp_path / "2")
    assert row["failed"] == "not equal bit for bit" and row["tensors that differ"] > 5 and row["by at most"] > 1e-4
    assert row["losses that differ"] == 4  # train/loss 0 and 1, val/loss 0 and 2
    assert not any(gpu_checks.equal(tmp_path / "1", tmp_path / "1").values())


def test_overlapping_kernels_are_busy_once() -> None:
    assert gpu_speed.covered([(0, 2), (1, 3), (5, 6), (5.5, 5.7)]) == 4
    assert gpu_speed.covered([]) == 0


def test_decoding_norms_and_workers_are_measured() -> None:
    layer = [word for word in TINY_LAYER if not word.startswith("device")]
    (row,) = gpu_speed.decode(replace(ON_CPU, contexts=(48,)), layer).values()
    assert row["MLA, ms"] > 0 and row["GB/s"] > 0 and "paper: %" not in row
    norms = gpu_speed.norms(ON_CPU, SMALL)
    assert len(norms) == 9 and "median" not in norms["p=2"] and all(row["ms"] > 0 for row in norms.values())
    row = gpu_speed.workers(2, gpu_speed.model_overrides(ON_CPU, "baby_gpt", SMALL))
    assert row["workers"] == 2 and row["tokens/s"] > 0
