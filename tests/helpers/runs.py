"""Runs of a few milliseconds an iteration, alone and as ranks; what they leave behind, and whether two are equal."""

import importlib
import json
import os
import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import exit_status, fork
from torch import Tensor
from variants import build

import train
from core import checkpoint
from core.device import peak_flops
from core.dist import World
from core.process import guarded
from core.record import Metrics
from data.tokenizer import CharTokenizer, Tokenizer
from model.gpt import GPT
from sweeps.plan import compose
from training.config import TrainConfig, load_config
from training.session import Machine

FP32 = Machine(World(), torch.device("cpu"), torch.float32)
QK_CLIP = {"name": "clip", "threshold": 0.02, "balance": 0.5}
TIMED = {"tok_per_sec", "mfu"}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
SETTINGS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "threads": 1, "batch_size": 4, "max_iters": 6, "log_interval": 1,
    "eval_interval": 2, "checkpoint_interval": 2, "plot": False,
    "model": {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 16, "dropout": 0.2},
    "schedule": {"name": "cosine", "warmup_iters": 1, "lr_decay_iters": 6}, "wandb": {"mode": "disabled"},
}  # fmt: skip


def configured(corpus: Path, out_dir: Path, **changes: Any) -> TrainConfig:
    data = {"name": "text", "path": str(corpus)}
    return load_config({**SETTINGS, "data": data, "out_dir": str(out_dir), **changes})


def weights(run: Path) -> dict[str, Tensor]:
    saved = checkpoint.load(run / "ckpt" / "latest")
    return {f"{group}/{name}": t for group, tensors in saved.tensors.items() for name, t in tensors.items()}


def saved_json(run: Path, name: str) -> dict[str, Any]:
    return json.loads((run / f"{name}.json").read_text())


def lines(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what the clock decides."""
    return [{k: v for k, v in line.items() if k not in TIMED} for line in Metrics.read(run / "metrics.jsonl")]


def assert_same_run(a: Path, b: Path) -> None:
    """Bit for bit: weights, optimizer state, every metric line; and the same best checkpoint and minimum."""
    tensors, others = weights(a), weights(b)
    assert tensors.keys() == others.keys()
    assert [name for name in tensors if not torch.equal(tensors[name], others[name])] == []
    assert lines(a) == lines(b)
    assert (a / "diagnostics.jsonl").read_bytes() == (b / "diagnostics.jsonl").read_bytes()
    assert (a / "ckpt" / "best").readlink() == (b / "ckpt" / "best").readlink()
    ours, theirs = saved_json(a, "summary"), saved_json(b, "summary")
    for key in ("status", "iter", "val/loss", "val/loss_min", "iter_of_min", "train/loss"):
        assert ours[key] == theirs[key], key


def assert_halves_equal_straight(corpus: Path, folder: Path, **changes: Any) -> None:
    """Train six iterations in folder/straight, and three and three in folder/halves."""
    assert train.run(configured(corpus, folder / "straight", **changes)) == 0
    assert train.run(configured(corpus, folder / "halves", **{"max_iters": 3, **changes})) == 0
    assert checkpoint.load(folder / "halves" / "ckpt" / "latest").step == 3
    assert train.run(configured(corpus, folder / "halves", **changes)) == 0
    assert_same_run(folder / "straight", folder / "halves")


def fresh_copy(folder: Path, copy: Path) -> Path:
    """Of a folder with its links, in place of what is there."""
    shutil.rmtree(copy, ignore_errors=True)
    return shutil.copytree(folder, copy, symlinks=True)


CHARS = CharTokenizer("\n !,.abcdefgé€😀")


def random_model(config: TrainConfig, tokenizer: Tokenizer = CHARS, dtype: torch.dtype = torch.float32) -> GPT:
    return build(config, dtype=dtype, vocab_size=tokenizer.vocab_size)


def save_run(model: GPT, tokenizer: Tokenizer, folder: Path, config: TrainConfig | None = None) -> Path:
    state = {"config": asdict(config or model.config), "tokenizer": tokenizer.to_dict(), "step": 1}
    checkpoint.save(folder / "ckpt", 1, {"model": model.state_dict()}, state, best=True)
    return folder


def random_tokens(tokenizer: Tokenizer, *shape: int) -> torch.Tensor:
    return torch.randint(tokenizer.vocab_size, shape, generator=torch.Generator().manual_seed(2))


def ranks(cwd: Path, *overrides: str, n: int = 2, prepare: Callable[[], object] = int) -> str:
    """Train in n forks of this process, each a rank with the environment that torchrun sets. Returns what they print.

    prepare: called in each of them before.
    """
    if torch.cuda.is_available():
        pytest.skip("CUDA does not survive a fork")
    importlib.import_module("torch._dynamo")  # which DDP loads: here once

    peak_flops(torch.device("cpu"), torch.float32)  # kept for the forks, too
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "WORLD_SIZE": f"{n}", "LOCAL_WORLD_SIZE": f"{n}"}

    def train_as(rank: int) -> int:
        os.environ |= {**common, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"}
        os.chdir(cwd)
        sys.stdout = sys.stderr = Path(f"rank{rank}.txt").open("w", buffering=1)  # noqa: SIM115
        prepare()
        status = guarded(lambda: train.run(load_config(compose([*overrides]))))
        Path(f"left-{rank}").touch()
        torch.distributed.destroy_process_group()
        return status

    found = [exit_status(pid) for pid in [fork(partial(train_as, rank)) for rank in range(n)]]
    said = "".join((cwd / f"rank{rank}.txt").read_text() for rank in range(n))
    assert found in ([0] * n, [143] * n), said
    return said
