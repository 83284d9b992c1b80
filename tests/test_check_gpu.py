"""scripts/check_gpu.py on a CPU: a part that fails leaves the others alone."""

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY_LAYER

from core.cli import run_script
from scripts import check_gpu
from scripts.check_gpu import CheckOptions

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
    assert [*check("turns")] == ["device", "profile", "turns"]


def test_every_part_is_a_function_that_says_what_it_asks() -> None:
    assert all(part.__doc__ for part in check_gpu.PARTS.values())


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


def test_a_part_that_fails_dies_or_hangs_leaves_others_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "spoiled.py").write_text(SPOILED)
    monkeypatch.syspath_prepend(tmp_path)
    names = ("raises", "dies", "wrong", "good")
    spoiled = importlib.import_module("spoiled")
    parts = {"device": check_gpu.device, **{name: getattr(spoiled, name) for name in (*names, "waits")}}
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


def test_overlapping_kernels_are_busy_once() -> None:
    assert check_gpu.covered([(0, 2), (1, 3), (5, 6), (5.5, 5.7)]) == 4
    assert check_gpu.covered([]) == 0


def test_decoding_norms_and_workers_are_measured() -> None:
    layer = [word for word in TINY_LAYER if not word.startswith("device")]
    (row,) = check_gpu.decode(replace(ON_CPU, contexts=(48,)), layer).values()
    assert row["MLA, ms"] > 0 and row["GB/s"] > 0 and "paper: %" not in row
    norms = check_gpu.norms(ON_CPU, SMALL)
    assert len(norms) == 9 and "median" not in norms["p=2"] and all(row["ms"] > 0 for row in norms.values())
    row = check_gpu.workers(2, check_gpu.model_overrides(ON_CPU, "baby_gpt", SMALL))
    assert row["workers"] == 2 and row["tokens/s"] > 0
