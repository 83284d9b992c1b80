"""scripts/check_gpu.py without a GPU: every part on a CPU and on the fake device; what fails, ends or goes on."""

import importlib
import json
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
from fake_cuda import fake_cuda, on_fake_cuda
from helpers.sweeps import use_mps
from torch.autograd import DeviceType
from torch.autograd.profiler_util import Interval

from core.schema import ConfigError
from scripts import check_gpu
from scripts.benchmarks import gpu, timing
from scripts.check_gpu import CheckOptions

pytestmark = pytest.mark.usefixtures("quick_processes")
PEER = """
import torch
class GPTConfig:
    def __init__(self, **sizes): self.__dict__.update(sizes)
class GPT(torch.nn.Module):
    def __init__(self, c):
        super().__init__()
        self.logits = torch.nn.Embedding(c.vocab_size, c.vocab_size, device="cpu")
    def configure_optimizers(self, decay, rate, betas, device): return torch.optim.AdamW(self.parameters(), rate)
    def forward(self, x, y):
        logits = self.logits(x)
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
"""


class Here:
    """A side in this process."""

    def __init__(self, name: str, build: Callable[..., Any], *arguments: Any) -> None:
        self.name, (self.work, self.info) = name, build(*arguments)

    def take_turn(self, n: int) -> dict[str, Any]:
        return {"seconds": 1.0, "peak_memory_mib": 1.0, **self.work(n)}

    def close(self) -> None:
        pass


class Serial(ThreadPoolExecutor):
    """A pool without threads: they would lack the fake device, and share Hydra."""

    def submit(self, call: Any, /, *arguments: Any, **more: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(call(*arguments, **more))
        return future


class Profile:
    """PyTorch's profiler on a GPU: what it sees of an update of 3 ms, for 2 ms of which a kernel runs."""

    def __init__(self, activities: list[Any]) -> None:
        self.asked = activities

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def events(self) -> list[Any]:
        names = {"nvjet_tst_128x64": (0, 1500), "triton_per_fused_layer_norm": (1000, 2000), "annotation": (0, 3000)}
        kernels = [(name, DeviceType.CUDA, start, end) for name, (start, end) in names.items()]
        found = [*kernels, ("cudaLaunchKernelExC", DeviceType.CPU, 0, 10), ("aten::mm", DeviceType.CPU, 0, 10)]
        return [
            SimpleNamespace(
                name=name, device_type=kind, is_user_annotation=name == "annotation", time_range=Interval(a, b)
            )
            for name, kind, a, b in found
            for _ in range(gpu.UPDATES)
        ]


def check_parts(asked: CheckOptions, parts: Iterable[str], overrides: list[str], patch: pytest.MonkeyPatch) -> None:
    """Every row of these parts, in few updates and with sides of this process."""
    for name, few in {"UPDATES": 1, "SECONDS": 0.0, "QUEUED": 0.0, "PROCESSES": (1, 2), "STREAMS": 2}.items():
        patch.setattr(gpu, name, few)
    for module in (gpu, timing):
        patch.setattr(module, "Side", Here)
    patch.setattr(gpu, "ThreadPoolExecutor", Serial)
    patch.setattr(gpu.updates, "clip_gradients", gpu.updates.clip_gradients)  # a side replaces it
    patch.setattr(os, "environ", {**os.environ})
    found = {(part, name): row() for part in parts for name, row in gpu.PARTS[part](asked, overrides).items()}
    for at, row in found.items():
        numbers = [value for value in row.values() if isinstance(value, int | float)]
        assert len(numbers) > 1 and min(numbers) >= 0, (at, row)
        assert all(row["ms by kind"].values()) and row["tokens/s"] > 0 if at[0] in ("update", "gpt2") else True
    assert len(check_gpu.tables({" ".join(at): row for at, row in found.items()})) > len(found)
    print(len(found))


def test_every_part_runs_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a stand-in for MPS, for nvidia-smi and for nanoGPT."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for part, name in (("workers", "baby_gpt, MPS"), ("bits", "baby_gpt")):
        with pytest.raises(ConfigError, match="launcher.mps=true needs GPUs"):
            gpu.PARTS[part](CheckOptions(device="cpu"), [])[name]()
    use_mps(tmp_path, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    (tmp_path / "bin" / "nvidia-smi").write_text("#!/bin/sh\necho 312.5\n")
    (tmp_path / "bin" / "nvidia-smi").chmod(0o755)
    (tmp_path / "model.py").write_text(PEER)
    asked = CheckOptions(device="cpu", rounds=1, peer=str(tmp_path))
    assert gpu.power() == 312.5
    check_parts(asked, gpu.PARTS, [], monkeypatch)
    assert capsys.readouterr().out.endswith("\n31\n")


def check_on_fake_cuda() -> None:
    with fake_cuda(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.compile", lambda model, **_: model)
        patch.setattr("torch.profiler.profile", Profile)
        machine = gpu.device_row("cuda")
        assert [machine[key] for key in ("GPUs", "capability", "processors", "GiB")] == [2, "9.0", 132, 80]
        row = gpu.traced(lambda: None, on_cuda=True)
        assert (row["kernels"], row["launches"], row["busy, ms"]) == (2, 1, 2 / gpu.UPDATES)
        assert row["ms by kind"] == pytest.approx({"matmul": 1.5, "reductions, as norms": 1.0})
        parts = [part for part in gpu.PARTS if part not in ("turns", "bits")]
        check_parts(CheckOptions(device="cuda", rounds=1), parts, [*gpu.TINY, "compile=false"], patch)


def test_every_part_runs_on_the_fake_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But `bits`, which starts a sweep, and `turns`, whose nanoGPT builds its model on the CPU."""
    use_mps(tmp_path, monkeypatch)
    assert on_fake_cuda("test_check_gpu.check_on_fake_cuda").endswith("\n29\n")


SPOILED = """
import os, time
from functools import partial
from pathlib import Path
def raises(): raise ValueError("no such kernel")
def dies(): os._exit(7)
def waits(): time.sleep(1000)
def good(error=0.1): return {"error": error, "by name": {"a | b": 1.0}}
def counted(file):
    with Path(file).open("a") as log: log.write("x")
    return good()
def device(asked, words): return {"machine": partial(dict, device="cpu (two)")}
def broken(asked, words):
    "It | fails."
    return {"first": good, "raises": raises, "dies": dies, "last": good}
def late(asked, words):
    "It never ends."
    return {"first": partial(counted, f"{asked.out}/counted"), "waits": waits, "last": good}
"""


def test_what_fails_dies_or_hangs_leaves_other_rows_alone_and_the_next_call_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "spoiled.py").write_text(SPOILED)
    monkeypatch.syspath_prepend(tmp_path)
    spoiled, out = importlib.import_module("spoiled"), tmp_path / "out"
    out.mkdir()
    monkeypatch.setattr(check_gpu, "PARTS", {name: getattr(spoiled, name) for name in ("device", "broken", "late")})

    def call(status: int, **changes: Any) -> tuple[dict[str, Any], str]:
        assert check_gpu.check(replace(CheckOptions(device="cpu", out=str(out)), **changes), []) == status
        data, page = sorted(file for file in out.iterdir() if file.stem != "counted")
        return {**json.loads(data.read_text())["parts"], "page": page.read_text()}, capsys.readouterr().out

    found, _ = call(1, parts=("broken",))
    rows = found["broken"]["rows"]
    assert [*rows] == ["first", "raises", "dies", "last"] and rows["last"]["error"] == 0.1
    assert (rows["raises"]["failed"], rows["dies"]["failed"]) == (
        "ValueError: no such kernel",
        "died with exit status 7",
    )
    assert found["broken"]["reason"] == "2 of 4, the first raises: ValueError: no such kernel"
    assert r"| a \| b | 1 | – | – | 1 |" in found["page"] and r"It \| fails." in found["page"]

    monkeypatch.setattr(time, "process_time", lambda: 0.0)  # this process has run tests before
    found, said = call(0, budget=0.2)  # what failed comes last, and without its good rows
    assert (found["late"]["state"], found["late"]["reason"]) == ("stopped", "after 1 of 3 rows")
    assert "broken: kept from an earlier call: first, last" in said and "broken: not begun: the budget is spent" in said
    found, said = call(1, minutes=0.15)
    assert "late: kept from an earlier call: first" in said and (out / "counted").read_text() == "x"
    assert found["late"]["rows"]["waits"]["failed"] == "the part took more than 0.15 minutes"
    call(1, parts=("late",), minutes=0.15)
    assert (out / "counted").read_text() == "xx"


def test_overlapping_kernels_are_busy_once() -> None:
    assert gpu.covered([(0, 2), (1, 3), (5, 6), (5.5, 5.7)]) == 4
    assert gpu.covered([]) == 0
