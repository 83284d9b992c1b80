"""torchrun with two processes over gloo on this machine."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from test_train import assert_same_run, lines, weights

from training.updates import seed_of_update

WORDS = ["model.dropout=0.0", "gradient_accumulation_steps=4", "max_iters=6", "schedule.lr_decay_iters=6"]


def torchrun(cwd: Path, *overrides: str, script: Path = ROOT / "train.py") -> subprocess.CompletedProcess[str]:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    return subprocess.run(
        [sys.executable, *launch, *overrides], cwd=cwd, capture_output=True, text=True, timeout=180, check=False
    )


LONG = """
import model.cross_entropy, train
model.cross_entropy.LOGITS_AT_ONCE = 100
train.main()
"""


@pytest.mark.parametrize("changes", ["optim=adamw", "optim=muon", "model.activation_checkpointing=true"])
def test_two_ranks_equal_one_and_resume_bit_for_bit(
    changes: str, program: Callable[..., Any], tiny_run: list[str], tmp_path: Path
) -> None:
    """The last, without logits, equals a run with logits and without checkpointing."""
    script, long = ROOT / "train.py", changes.startswith("model")
    if long:
        script = tmp_path / "long.py"
        script.write_text(LONG)
    words = [*tiny_run, *WORDS]
    alone = program("train.py", *words, *([] if long else [changes]), "out_dir=alone")
    assert alone.returncode == 0, alone.stderr
    for overrides in (["out_dir=two"], ["out_dir=halves", "max_iters=3"], ["out_dir=halves"]):
        done = torchrun(tmp_path, *words, changes, *overrides, script=script)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("done: val/loss") == 1  # one rank speaks
    assert_same_run(tmp_path / "two", tmp_path / "halves")
    ours, theirs = weights(tmp_path / "two"), weights(tmp_path / "alone")
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-5)
    for a, b in zip(lines(tmp_path / "two"), lines(tmp_path / "alone"), strict=True):
        assert a.keys() == b.keys()
        torch.testing.assert_close(list(a.values()), list(b.values()), rtol=1e-4, atol=1e-6)


KILLS = 20 if os.environ.get("NANOQK_FAULTS") == "full" else 1


def test_kills_of_one_rank_change_nothing(tiny_run: list[str], tmp_path: Path) -> None:
    """torchrun ends the other rank; the same command goes on."""
    words = [*tiny_run, *WORDS[:2], "max_iters=300", "schedule.lr_decay_iters=300", "checkpoint_interval=10"]
    assert torchrun(tmp_path, *words, "out_dir=straight").returncode == 0
    choose, kills, amid = random.Random(0), 0, 0
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    while kills < KILLS:
        process = subprocess.Popen(
            [*launch, str(ROOT / "train.py"), *words, "out_dir=killed"],
            cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        found: list[int] = []
        while process.poll() is None and len(found) < 2:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            found = [int(pid) for pid in children.read_text().split()] if children.exists() else []
            time.sleep(0.01)
        time.sleep(choose.uniform(0, 12))
        with suppress(ProcessLookupError):  # the run may have ended since
            os.kill(choose.choice(found), signal.SIGKILL)
        assert process.wait() == 1 or kills, "it ended before the first kill"
        if process.returncode == 0:  # the run is done: begin another
            assert_same_run(tmp_path / "straight", tmp_path / "killed")
            shutil.rmtree(tmp_path / "killed")
            continue
        kills += 1
        amid += (tmp_path / "killed" / "ckpt" / "latest").exists()
    assert torchrun(tmp_path, *words, "out_dir=killed").returncode == 0
    assert_same_run(tmp_path / "straight", tmp_path / "killed")
    print(f"kills of one of two ranks: {kills}, {amid} of them with a checkpoint to go on from")


SPY = """
import os, sys
import train
real = train.seed_generator
def spy(seed, device):
    with open("seeds-" + os.environ["RANK"], "a") as file:
        print(seed, file=file)
    real(seed, device)
train.seed_generator = spy
train.main()
"""


def test_each_rank_and_each_update_draws_from_a_seed_of_its_own(tiny_run: list[str], tmp_path: Path) -> None:
    (tmp_path / "spy.py").write_text(SPY)
    done = torchrun(tmp_path, *tiny_run, *WORDS, "model.dropout=0.5", script=tmp_path / "spy.py")
    assert done.returncode == 0, done.stderr
    seeds = [[int(s) for s in (tmp_path / f"seeds-{rank}").read_text().split() if s != "0"] for rank in (0, 1)]
    assert [len(s) for s in seeds] == [6, 6] and len({*seeds[0], *seeds[1]}) == 12
    assert seeds == [[seed_of_update(1337, step, rank) for step in range(6)] for rank in (0, 1)]


def test_a_bad_setting_is_one_line_from_one_rank(tiny_run: list[str], tmp_path: Path) -> None:
    done = torchrun(tmp_path, *tiny_run, "gradient_accumulation_steps=3")
    assert done.returncode != 0 and not (tmp_path / "runs").exists()
    assert done.stderr.count("error: gradient_accumulation_steps=3 must be divisible by 2 ranks") == 1
