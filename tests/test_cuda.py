"""device=cuda on a machine without a GPU. Fake tensors have shapes, dtypes and devices; what a GPU computes is not tested.

Each check_…() runs in a process of its own: see fake_cuda.py.
"""

from contextlib import nullcontext, suppress
from itertools import product
from typing import Any

import pytest
import torch
from fake_cuda import FakeGPT, Waits, fake_cuda, on_fake_cuda
from tqdm import tqdm
from variants import PAIRS, V, config_of

import train
from core.device import resolve_device, seed_generator
from core.schema import build
from training.config import TrainConfig
from training.evaluate import LowestLoss
from training.meter import Meter
from training.session import setup

DATA = {"name": "random", "n_tokens": 2000, "val_tokens": 100}
QUICK_PAIRS = [
    ("mha", "none"), ("mha", "rms"), ("mha", "layernorm"), ("mha", "lp3"), ("gqa", "none"), ("gqa", "lp_learned"),
    ("mqa", "rms"), ("mla", "none"), ("mla", "lp1.5"), ("mla_q_rank", "lpinf"), ("mla_unified", "layernorm"),
    ("mla_unified", "lp2"),
]  # fmt: skip


def settings(**changes: Any) -> TrainConfig:
    """A run on the fake device. Nothing is compiled, where it does not say so."""
    model = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 16, "dropout": 0.1}

    return build(
        TrainConfig, {"device": "cuda", "compile": False, "batch_size": 4, "model": model, "data": DATA, **changes}
    )


class TwoLines:
    """A run directory that keeps nothing, and ends the run at the second line."""

    def __init__(self, waits: Waits) -> None:
        self.waits, self.lines = waits, 0

    def progress_bar(self, *_: Any) -> Any:
        return tqdm(disable=True)

    def log(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, line: dict[str, Any]) -> None:
        self.waits.found.append(f"line {line['iter']}")
        self.lines += 1
        if self.lines == 2:
            raise EOFError


# -----------------------------------------------------------------------------
# What an update asks for

UPDATES: dict[str, dict[str, Any]] = {
    "adamw": {},
    "accumulated": {"gradient_accumulation_steps": 2, "dtype": "float32", "data": {**DATA, "on_device": False}},
    "muon": {"optim": {"name": "muon"}, "qk_norm": {"name": "rms"}},
    "clip": {"qk_clip": {"name": "clip"}},
    "mla": {"qk_clip": {"name": "clip"}, "attention": {"name": "mla", "kv_rank": 12, "nope_dim": 8, "rope_dim": 4, "v_dim": 6},
            "model": {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 16, "position": "rope", "rope_theta": 100.0}},
    "log": {"qk_clip": {"name": "log"}, "qk_norm": {"name": "lp"}, "optim": {"name": "muon"}},
}  # fmt: skip


def check_updates() -> None:
    for name, changes in UPDATES.items():
        with fake_cuda() as waits:
            session = setup(settings(log_interval=4, **changes))
            assert all(p.is_cuda for p in session.model.parameters())
            run_dir: Any = TwoLines(waits)
            waits.found.clear()
            with suppress(EOFError):
                train.train(session, run_dir, Meter(session, {}), LowestLoss(), 1)
        reads = ["meter.read reads", *(["meter.read copies to cpu"] if "qk_clip" in changes else [])]
        assert waits.found == [*reads, "line 4", *reads, "line 8"], (name, waits.found)


def test_the_host_waits_for_the_device_at_log_lines_alone() -> None:
    """Of AdamW, Muon, QK-Clip, its log, and several micro-batches: the loop of train.py, eight updates, two lines."""
    on_fake_cuda("test_cuda.check_updates")


# -----------------------------------------------------------------------------
# Every pair of layout and norm


def check_pairs(pairs: list[tuple[str, str]]) -> None:
    """Forward and backward of all, in fp32 and bf16, with and without dropout; then decoding of two tokens."""
    for (layout, norm), dtype, dropout in product(pairs, (torch.float32, torch.bfloat16), (0.0, 0.1)):
        with fake_cuda() as waits:
            model = FakeGPT(config_of(layout, norm, dropout=dropout).gpt, V).to("cuda").train()
            idx = torch.zeros(2, 16, dtype=torch.int64, device="cuda")
            waits.found.clear()
            with torch.autocast("cuda", dtype) if dtype == torch.bfloat16 else nullcontext():
                logits, loss = model(idx, idx)
                loss.backward()
                assert logits.dtype == dtype and loss.is_cuda
                assert all(p.grad.is_cuda and p.grad.dtype == p.dtype for p in model.parameters())
                if dropout == 0:
                    with torch.no_grad():
                        caches = model.eval().new_caches(2, 8, dtype)
                        model(idx[:, :3], caches=caches)
                        for pos in (3, 4):
                            assert model(idx[:, :1], caches=caches, pos=pos)[0].shape == (2, 1, V)
            assert waits.found == [], (layout, norm, waits.found)
    print(len(pairs))


def test_twelve_pairs_run_and_wait_for_nothing() -> None:
    assert on_fake_cuda("test_cuda.check_pairs", QUICK_PAIRS) == "12\n"


@pytest.mark.slow
def test_every_pair_runs_and_waits_for_nothing() -> None:
    assert on_fake_cuda("test_cuda.check_pairs", PAIRS) == f"{len(PAIRS)}\n"
