"""torchrun with two processes over gloo on this machine."""

import subprocess
import sys
from collections.abc import Callable
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
import model.ops, train
model.ops.LOGITS_AT_ONCE = 100
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
