"""torchrun with two or three processes over gloo on this machine."""

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from conftest import FULL, ROOT, Program
from test_train import assert_same_run, lines, weights

from training.updates import seed_of_update

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
WORDS = ["model.dropout=0.0", "gradient_accumulation_steps=4", "max_iters=6", "schedule.lr_decay_iters=6"]


def torchrun(cwd: Path, *overrides: str, script: Path = ROOT / "train.py") -> subprocess.CompletedProcess[str]:
    command = [*TORCHRUN, str(script), *overrides]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600, check=False)


def two_ranks(cwd: Path, *overrides: str, script: Path = ROOT / "train.py", n: int = 2) -> str:
    """Two processes, or n, with the environment that torchrun sets, without torchrun. Returns what they print."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "WORLD_SIZE": f"{n}", "LOCAL_WORLD_SIZE": f"{n}"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), *overrides], cwd=cwd, text=True,
            env={**os.environ, **common, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(n)
    ]  # fmt: skip
    said = [process.communicate(timeout=600)[0] for process in processes]
    assert [process.returncode for process in processes] in ([0] * n, [143] * n), said
    return "".join(said)


LONG = """
import model.cross_entropy, train
model.cross_entropy.LOGITS_AT_ONCE = 100
train.main()
"""


@pytest.mark.parametrize(
    "changes", ["optim=adamw", "optim=muon", "qk_norm=ngpt", "model.activation_checkpointing=true"]
)
def test_ranks_equal_one_and_resume_bit_for_bit(
    changes: str, program: Program, tiny_run: list[str], tmp_path: Path
) -> None:
    """The last, without logits, equals a run with logits and without checkpointing. Three ranks round by the order in
    which DDP exchanges gradients."""
    script, long, n = ROOT / "train.py", changes.startswith("model"), 3 if changes == "optim=adamw" else 2
    if long:
        script = tmp_path / "long.py"
        script.write_text(LONG)
    words = [*tiny_run, *WORDS, f"gradient_accumulation_steps={2 * n}"]
    program("train.py", *words, *([] if long else [changes]), "out_dir=alone")
    halves = [["out_dir=halves", "max_iters=3"], ["out_dir=halves"]] if n == 3 else []
    for overrides in (["out_dir=two"], *halves):
        said = two_ranks(tmp_path, *words, changes, *overrides, script=script, n=n)
        assert said.count("done: val/loss") == 1  # one rank speaks
    if halves:
        assert_same_run(tmp_path / "two", tmp_path / "halves")
    ours, theirs = weights(tmp_path / "two"), weights(tmp_path / "alone")
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-5)
    for a, b in zip(lines(tmp_path / "two"), lines(tmp_path / "alone"), strict=True):
        assert a.keys() == b.keys()
        torch.testing.assert_close(list(a.values()), list(b.values()), rtol=1e-4, atol=1e-6)


KILLS = 20 if FULL else 1


def test_kills_of_one_rank_change_nothing(tiny_run: list[str], tmp_path: Path) -> None:
    """torchrun ends the other rank; the same command goes on."""
    words = [*tiny_run, *WORDS[:2], "max_iters=120", "schedule.lr_decay_iters=120", "checkpoint_interval=10"]
    two_ranks(tmp_path, *words, "out_dir=straight")
    choose, kills, amid = random.Random(0), 0, 0
    metrics = tmp_path / "killed" / "metrics.jsonl"
    while kills < KILLS:
        process = subprocess.Popen([*TORCHRUN, str(ROOT / "train.py"), *words, "out_dir=killed"], cwd=tmp_path)
        found: list[int] = []
        least, n = choose.randrange(120), 0  # lines that it then has; after a kill it may have so many at its start
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
    two_ranks(tmp_path, *words, "out_dir=killed")
    assert_same_run(tmp_path / "straight", tmp_path / "killed")
    print(f"kills of one of two ranks: {kills}, {amid} of them with a checkpoint to go on from")


COMPILES = """
import os, sys, torch, train
real = torch.compile
def backend(graph, inputs):
    with open("compiled-" + os.environ["RANK"], "a") as file:
        print("compiled", file=file)
    return graph.forward
torch.compile = lambda model, **options: real(model, backend=backend, **options)
train.main()
"""


def test_ranks_compile_once_and_the_checks_run_what_trains(tiny_run: list[str], tmp_path: Path) -> None:
    (tmp_path / "compiles.py").write_text(COMPILES)
    words = [*tiny_run, *WORDS, "compile=true", "qk_norm=rms"]
    two_ranks(tmp_path, *words, script=tmp_path / "compiles.py")
    for rank, n in enumerate((2, 1)):  # to train; rank 0 evaluates the only batch of held-out text
        assert len((tmp_path / f"compiled-{rank}").read_text().splitlines()) == n


STOPS = """
import os, signal, sys, train
real = train.accumulate_gradients
updates = 0
def stop_one(*args):
    global updates
    updates += 1
    if updates == 5 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGTERM)
    return real(*args)
train.accumulate_gradients = stop_one
train.main()
"""


def test_all_ranks_stop_after_the_same_update_and_go_on_from_there(tiny_run: list[str], tmp_path: Path) -> None:
    """One rank is asked in update 4; all know it two updates later, before the next log line."""
    (tmp_path / "stops.py").write_text(STOPS)
    words = [*tiny_run, *WORDS[:2], "max_iters=40", "log_interval=30", "eval_interval=30", "checkpoint_interval=30"]
    two_ranks(tmp_path, *words, "out_dir=straight")
    said = two_ranks(tmp_path, *words, "out_dir=stopped", script=tmp_path / "stops.py")
    assert "stopped by SIGTERM at iteration 7" in said, said
    two_ranks(tmp_path, *words, "out_dir=stopped")
    assert_same_run(tmp_path / "straight", tmp_path / "stopped")


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
    two_ranks(tmp_path, *tiny_run, *WORDS, "model.dropout=0.5", script=tmp_path / "spy.py")
    seeds = [[int(s) for s in (tmp_path / f"seeds-{rank}").read_text().split() if s != "0"] for rank in (0, 1)]
    assert [len(s) for s in seeds] == [6, 6] and len({*seeds[0], *seeds[1]}) == 12
    assert seeds == [[seed_of_update(1337, step, rank) for step in range(6)] for rank in (0, 1)]


def test_a_bad_setting_is_one_line_from_one_rank(tiny_run: list[str], tmp_path: Path) -> None:
    done = torchrun(tmp_path, *tiny_run, "gradient_accumulation_steps=3")
    assert done.returncode != 0 and not (tmp_path / "runs").exists()
    assert done.stderr.count("error: gradient_accumulation_steps=3 must be divisible by 2 ranks") == 1
