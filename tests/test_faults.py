"""kill -9 at any moment: the resumed run ends bit-identical, and no metric line is lost or doubled."""

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from conftest import exit_status, fork
from helpers.runs import assert_same_run, configured, lines
from variants import FULL

import train
from core.device import peak_flops
from training.config import TrainConfig

ITERATIONS = 60
KILLS = 100 if FULL else 6  # for each optimizer


@pytest.fixture(params=["adamw", "muon"] if FULL else ["muon"])
def configs(request: pytest.FixtureRequest, corpus: Path, tmp_path: Path) -> tuple[TrainConfig, TrainConfig]:
    """An undisturbed run, made here, and one to be killed: with dropout, and saves at every other iteration."""
    peak_flops(torch.device("cpu"), torch.float32)  # measured before any fork, which then need not
    schedule = {"name": "cosine", "warmup_iters": 5}
    changes = {"max_iters": ITERATIONS, "schedule": schedule, "eval_interval": 7, "checkpoint_interval": 2}
    changes["optim"] = {"name": request.param}
    straight, killed = (configured(corpus, tmp_path / name, **changes) for name in ("straight", "killed"))
    assert train.run(straight) == 0
    return straight, killed


def test_kills_at_random_moments_change_nothing(configs: tuple[TrainConfig, TrainConfig]) -> None:
    straight, killed = configs
    started = time.monotonic()
    assert exit_status(fork(lambda: train.run(straight))) == 0  # finished already: the price of starting
    longest = 3 * (time.monotonic() - started) + 0.3
    choose, kills = random.Random(0), 0
    reached = []
    while kills < KILLS:
        pid = fork(lambda: train.run(killed))
        time.sleep(choose.uniform(0, longest))
        os.kill(pid, signal.SIGKILL)
        if exit_status(pid) != -signal.SIGKILL:  # it was faster: the rest is killed from the beginning again
            assert_same_run(straight.run_dir, killed.run_dir)
            shutil.rmtree(killed.run_dir)
            continue
        kills += 1
        reached.append(len(lines(killed.run_dir)) if (killed.run_dir / "metrics.jsonl").exists() else 0)
    assert any(0 < n < ITERATIONS for n in reached), reached
    print(f"kills at random moments: {kills}, of them {sum(0 < n < ITERATIONS for n in reached)} amid the run")
    assert exit_status(fork(lambda: train.run(killed))) == 0
    assert [line["iter"] for line in lines(killed.run_dir)] == list(range(ITERATIONS + 1))
    assert_same_run(straight.run_dir, killed.run_dir)


@pytest.mark.parametrize("configs", ["adamw"], indirect=True)
@pytest.mark.parametrize("operation", ["fsync", "replace", "rename"] if FULL else ["fsync"])  # an fsync precedes each
def test_a_kill_within_a_save_changes_nothing(operation: str, configs: tuple[TrainConfig, TrainConfig]) -> None:
    """The process kills itself at its n-th file operation, in a save as a rule; n grows from start to start."""
    straight, killed = configs
    real, n, kills = getattr(os, operation), 0, 0

    def die_at_the_nth() -> int:
        calls = 0

        def deadly(*args: object) -> object:
            nonlocal calls
            calls += 1
            if calls == n:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args)

        setattr(os, operation, deadly)
        return train.run(killed)

    while True:
        n += 1
        status = exit_status(fork(die_at_the_nth))
        if status == 0:
            break
        assert status == -signal.SIGKILL
        kills += 1
    assert kills >= 8
    print(f"kills at {operation}: {kills}")
    assert [line["iter"] for line in lines(killed.run_dir)] == list(range(ITERATIONS + 1))
    assert_same_run(straight.run_dir, killed.run_dir)
