"""Two or three ranks over gloo on this machine, as forks of the test or by torchrun."""

import itertools
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, Trained
from helpers.runs import TORCHRUN, assert_same_run, lines, ranks, weights
from variants import FULL

import model.cross_entropy
import train
from core import dist
from core.schema import ConfigError
from sweeps.plan import compose
from training.config import load_config
from training.updates import seed_of_update

WORDS = ["model.dropout=0.0", "gradient_accumulation_steps=4", "max_iters=6", "schedule.lr_decay_iters=6"]


CHANGES = ["optim=adamw", "optim=muon", "qk_norm=ngpt output=affine", "model.activation_checkpointing=true"]


@pytest.mark.parametrize("changes", CHANGES)
def test_ranks_equal_one_and_resume_bit_for_bit(changes: str, tiny_run: list[str], tmp_path: Path) -> None:
    """The last, without logits, equals a run with logits and without checkpointing. Three ranks round by the order in
    which DDP exchanges gradients."""
    long, n = changes.startswith("model"), 3 if changes == "optim=adamw" else 2
    words = [*tiny_run, *WORDS, f"gradient_accumulation_steps={2 * n}"]
    alone = [*words, *([] if long else changes.split()), f"out_dir={tmp_path / 'alone'}"]
    assert train.run(load_config(compose(alone))) == 0
    prepare = partial(setattr, model.cross_entropy, "LOGITS_AT_ONCE", 100) if long else int
    halves = [["out_dir=halves", "max_iters=3"], ["out_dir=halves"]] if n == 3 else []
    for overrides in (["out_dir=two"], *halves):
        said = ranks(tmp_path, *words, *changes.split(), *overrides, n=n, prepare=prepare)
        assert said.count("done: val/loss") == 1  # one rank speaks
    if halves:
        assert_same_run(tmp_path / "two", tmp_path / "halves")
    ours, theirs = weights(tmp_path / "two"), weights(tmp_path / "alone")
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-5)
    for a, b in zip(lines(tmp_path / "two"), lines(tmp_path / "alone"), strict=True):
        assert a.keys() == b.keys()
        torch.testing.assert_close(list(a.values()), list(b.values()), rtol=1e-4, atol=1e-6)


DRAWS = """
import torch
from core.schema import options
from model.options import QKNormOptions
from model.slots import QKNorm, register

@options
class DrawsOptions(QKNormOptions):
    name: str = "draws"

class Draws(QKNorm):
    def __init__(self, *given):
        super().__init__(*given)
        self.register_buffer("mean", torch.ones(()))
        self.register_buffer("kinds", torch.ones(1, dtype=torch.int16))
        self.factor = self.new_parameter(1, 1.0)

    def scale(self, x):
        if self.training:
            self.mean = self.mean.lerp(x.detach().float().square().mean().sqrt(), 0.2)
        return self.factor.expand(*x.shape[:-1], 1) / 10

    def after_update(self):
        self.factor.copy_(self.mean + 0.1 * torch.randn(()))

register(DrawsOptions, Draws)
"""


def test_plugins_keep_the_ranks_one_model_or_are_refused(tiny_run: list[str], tmp_path: Path) -> None:
    """What they compute in a forward pass, and draw in an update, are those of one rank."""
    (tmp_path / "draws.py").write_text(DRAWS)
    words = [*tiny_run, *WORDS, "plugins=[draws]", "qk_norm=draws", "gradient_accumulation_steps=3"]
    for overrides in (["out_dir=straight"], ["out_dir=halves", "max_iters=3"], ["out_dir=halves"]):
        assert "warning" not in ranks(tmp_path, *words, *overrides, n=3)
    assert_same_run(tmp_path / "straight", tmp_path / "halves")
    assert "torch.randn(())" in DRAWS
    alone = DRAWS.replace("torch.randn(())", "int(os.environ['RANK'])").replace("import", "import os\nimport", 1)
    (tmp_path / "draws.py").write_text(alone)
    with pytest.raises(AssertionError, match=r"the ranks' weights differ after \d updates, as where a plugin"):
        ranks(tmp_path, *words, "out_dir=alone", n=3)


KILLS = 20 if FULL else 1


def test_kills_of_one_rank_change_nothing(tiny_run: list[str], tmp_path: Path) -> None:
    """torchrun ends the other rank; the same command goes on."""
    n_iters = 120 if FULL else 60
    words = [*tiny_run, *WORDS[:2], f"max_iters={n_iters}", f"schedule.lr_decay_iters={n_iters}"]
    words += ["eval_interval=20", "checkpoint_interval=10"]
    ranks(tmp_path, *words, "out_dir=straight")
    choose, kills, amid = random.Random(0), 0, 0
    metrics = tmp_path / "killed" / "metrics.jsonl"
    while kills < KILLS:
        process = subprocess.Popen([*TORCHRUN, str(ROOT / "train.py"), *words, "out_dir=killed"], cwd=tmp_path)
        found: list[int] = []
        least, n = choose.randrange(n_iters), 0  # lines that it then has; after a kill it may have so many at its start
        while process.poll() is None and (len(found) < 2 or n < least):
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            found = [int(pid) for pid in children.read_text().split()] if children.exists() else []
            n = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            time.sleep(0.01)
        time.sleep(choose.uniform(0, 0.1))
        with suppress(ProcessLookupError):  # the run may have ended since
            os.kill(choose.choice(found), signal.SIGKILL)
        if process.wait() == 0:  # the run ended before the kill: begin another
            assert_same_run(tmp_path / "straight", tmp_path / "killed")
            shutil.rmtree(tmp_path / "killed")
            continue
        assert process.returncode == 1
        kills += 1
        amid += (tmp_path / "killed" / "ckpt" / "latest").exists()
    ranks(tmp_path, *words, "out_dir=killed")
    assert_same_run(tmp_path / "straight", tmp_path / "killed")
    print(f"kills of one of two ranks: {kills}, {amid} of them with a checkpoint to go on from")


def count_compilations() -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        with open(f"compiled-{os.environ['RANK']}", "a") as file:
            print("compiled", file=file)
        return graph.forward

    torch.compile = partial(torch.compile, backend=backend)


def test_ranks_compile_once_and_the_checks_run_what_trains(tiny_run: list[str], tmp_path: Path) -> None:
    ranks(tmp_path, *tiny_run, *WORDS, "compile=true", "qk_norm=rms", prepare=count_compilations)
    for rank, n in enumerate((2, 1)):  # to train; rank 0 evaluates the only batch of held-out text
        assert len((tmp_path / f"compiled-{rank}").read_text().splitlines()) == n


def stop_rank_1() -> None:
    """In update 4."""
    real, updates = train.accumulate_gradients, itertools.count()

    def stopping(*args: Any) -> Any:
        if next(updates) == 4 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*args)

    train.accumulate_gradients = stopping  # type: ignore[assignment]
    train.record_stop = partial(slowly, train.record_stop)


def slowly(end: Callable[..., int], *args: Any) -> int:
    """Rank 0 takes a second to save."""
    if os.environ["RANK"] == "0":
        time.sleep(1)
        Path("saved").touch()
    return end(*args)


def test_all_ranks_stop_after_the_same_update_and_go_on_from_there(tiny_run: list[str], tmp_path: Path) -> None:
    """One rank is asked in update 4; all know it two updates later, before the next log line."""
    words = [*tiny_run, *WORDS[:2], "max_iters=40", "log_interval=30", "eval_interval=30", "checkpoint_interval=30"]
    ranks(tmp_path, *words, "out_dir=straight")
    said = ranks(tmp_path, *words, "out_dir=stopped", prepare=stop_rank_1)
    assert "stopped by SIGTERM at iteration 7" in said, said
    saved, left = ((tmp_path / name).stat().st_mtime for name in ("saved", "left-1"))
    assert saved <= left  # rank 1 waits: torchrun would end rank 0 soon after it
    ranks(tmp_path, *words, "out_dir=stopped")
    assert_same_run(tmp_path / "straight", tmp_path / "stopped")


def note_seeds() -> None:
    real = train.seed_generator

    def noted(seed: int, device: torch.device) -> None:
        with open(f"seeds-{os.environ['RANK']}", "a") as file:
            print(seed, file=file)
        real(seed, device)

    train.seed_generator = noted


def test_each_rank_and_each_update_draws_from_a_seed_of_its_own(tiny_run: list[str], tmp_path: Path) -> None:
    ranks(tmp_path, *tiny_run, *WORDS, "model.dropout=0.5", prepare=note_seeds)
    seeds = [[int(s) for s in (tmp_path / f"seeds-{rank}").read_text().split() if s != "0"] for rank in (0, 1)]
    assert [len(s) for s in seeds] == [6, 6] and len({*seeds[0], *seeds[1]}) == 12
    assert seeds == [[seed_of_update(1337, step, rank) for step in range(6)] for rank in (0, 1)]


def test_a_bad_setting_is_one_line_from_one_rank(tiny_run: list[str], tmp_path: Path) -> None:
    command = [*TORCHRUN, str(ROOT / "train.py"), *tiny_run, "gradient_accumulation_steps=3"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode != 0 and not (tmp_path / "runs").exists()
    assert done.stderr.count("error: gradient_accumulation_steps=3 must be divisible by 2 ranks") == 1


def test_ranks_of_two_checkpoints_are_refused(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    (trained(max_iters=4) / "summary.json").unlink()  # it goes on
    monkeypatch.setattr(dist, "gather", lambda value: [value, -1] if type(value) is int else [value])
    with pytest.raises(ConfigError, match=r"the ranks found checkpoints of iterations \[4, -1\] \(-1: none\)"):
        trained(max_iters=4)
