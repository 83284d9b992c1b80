"""Metrics on disk and in W&B: real W&B processes, real dead servers, and a trainer that never waits for them."""

import json
import math
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib.font_manager  # noqa: F401  (here: its cache lies in the real HOME)
import numpy as np
import pytest
from core.tracker import Tracker, plot, wandb_mode
from matplotlib.image import imread

from core import tracker
from core.files import read_json
from core.metrics import Metrics, spike_score
from core.rundir import open_run
from model.options import LpNormOptions
from training.config import TrainConfig, WandbOptions

ROOT = Path(__file__).resolve().parent.parent
KEY = "0123456789" * 4


@pytest.fixture(autouse=True)
def no_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


@pytest.fixture
def metrics(tmp_path: Path) -> Metrics:
    return Metrics(tmp_path / "metrics.jsonl")


def until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.1)


# -----------------------------------------------------------------------------
# metrics.jsonl


def test_lines_start_with_iter_and_are_on_disk_at_once(metrics: Metrics) -> None:
    metrics.write({"train/loss": 1.5, "iter": 3, "val/loss": None, "grad_norm": math.nan, "lr": math.inf})
    assert metrics.path.read_text() == '{"iter": 3, "train/loss": 1.5, "grad_norm": null, "lr": null}\n'


def test_floats_survive_exactly(metrics: Metrics) -> None:
    values = [0.1, 1 / 3, 1e-300, 4.170000076293945, -0.0]
    for i, value in enumerate(values):
        metrics.write({"iter": i, "x": value})
    assert [line["x"] for line in Metrics.read(metrics.path)] == values


def test_cut_and_write_again_gives_the_uninterrupted_file(metrics: Metrics, tmp_path: Path) -> None:
    lines = [{"iter": i, "train/loss": 1 / (i + 1)} for i in range(0, 60, 10)]
    for line in lines:
        metrics.write(line)
    whole = metrics.path.read_bytes()
    for step in (0, 15, 20, 60, 1000):
        for torn in (b"", b'{"iter": 70, "tr', b'{"iter": 1}', b"\0" * 9):
            metrics.path.write_bytes(whole + torn)
            metrics.cut(step)
            assert metrics.path.read_bytes() == whole[: sum(len(json.dumps(x)) + 1 for x in lines if x["iter"] < step)]
            for line in lines:
                if line["iter"] >= step:
                    metrics.write(line)
            assert metrics.path.read_bytes() == whole


def test_cut_keeps_the_bytes_of_lines_that_others_wrote(metrics: Metrics) -> None:
    kept = b'{"iter":1,  "x": 1.50}\n{"x": 2e0, "iter": 2}\n{"iter": 2}\n'
    metrics.path.write_bytes(kept + b'{"iter": 3}\nnot json\n[1]\n{"x": 1}\n')
    metrics.cut(3)
    assert metrics.path.read_bytes() == kept


def test_reader_of_a_growing_file_does_not_see_half_a_line(metrics: Metrics) -> None:
    metrics.path.write_bytes(b'{"iter": 1}\n{"iter": 2')
    assert Metrics.read(metrics.path) == [{"iter": 1}]


# -----------------------------------------------------------------------------
# Loss spikes


def a_noisy_loss(n: int) -> list[float]:
    generator = np.random.default_rng(0)
    return (3 * np.exp(-np.arange(n) / 200) + 1 + 0.05 * generator.standard_normal(n)).tolist()


def scored(losses: list[float], window: int, sigmas: float, least: int) -> float:
    """The share of losses that far from the mean of those before, by the definition, in per cent."""
    spikes = []
    for i, loss in enumerate(losses):
        past = np.array(losses[:i][-window:])
        if i >= least:
            spikes.append(abs(loss - past.mean()) >= sigmas * np.sqrt(((past - past.mean()) ** 2).mean()))
    return 100 * float(np.mean(spikes))


def test_spike_score_is_its_definition() -> None:
    losses = a_noisy_loss(400)
    assert spike_score(losses) == 0.0
    for at, height in ((100, 40.0), (250, -30.0), (399, 9.0)):
        losses[at] += height
    assert spike_score(losses) == pytest.approx(100 * 2 / 370)  # the third is within 7 sigmas of what the first left
    for window, sigmas, least in ((1000, 7.0, 30), (50, 7.0, 30), (50, 2.5, 100), (20, 3.0, 5)):
        score = spike_score(losses, window, sigmas, least)
        assert score == pytest.approx(scored(losses, window, sigmas, least)) and score
    assert spike_score(losses, window=50) == pytest.approx(100 * 3 / 370)  # which no longer remembers it


def test_spike_score_needs_a_past_and_a_spread() -> None:
    assert spike_score([]) is None and spike_score([1.0] * 29 + [50.0]) is None
    assert spike_score([1.0, 1.1] * 15 + [50.0]) == 100
    assert spike_score([1.0] * 30 + [50.0]) == 0  # of a constant loss any change would be one


# -----------------------------------------------------------------------------
# Which mode


def test_auto_is_online_with_a_key_for_the_server_and_offline_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert wandb_mode("auto") == "offline"
    (tmp_path / "netrc").write_text(f"machine api.wandb.ai\n  login user\n  password {KEY}\n")
    assert wandb_mode("auto") == "online"
    monkeypatch.setenv("WANDB_BASE_URL", "http://wandb.local:8080")
    assert wandb_mode("auto") == "offline"
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    assert wandb_mode("auto") == "online"
    (tmp_path / "netrc").write_text("machine, what")
    monkeypatch.delenv("WANDB_API_KEY")
    assert wandb_mode("auto") == "offline"


def test_wandb_mode_variable_decides_for_auto_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert [wandb_mode(mode) for mode in ("auto", "online", "offline")] == ["disabled", "online", "offline"]


# -----------------------------------------------------------------------------
# W&B for real


def inspect(run_dir: Path) -> list[list[dict[str, Any]]]:
    """The records of every offline recording in the run directory, oldest first."""
    recordings = []
    for folder in sorted((run_dir / "wandb").glob("offline-run-*")):
        command = [str(Path(sys.executable).with_name("wandb")), "leet", "inspect", "--json", str(folder)]
        out = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        recordings.append([json.loads(line) for line in out.splitlines()])
    return recordings


def history(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    items = [r["history"]["item"] for r in records if r["type"] == "history"]
    return [{k: v for k, v in item.items() if not k.startswith("_")} for item in items]


def test_wandb_offline_holds_what_metrics_jsonl_holds_across_a_resume(tmp_path: Path) -> None:
    config = TrainConfig(
        out_dir=str(tmp_path / "a run: #1"), qk_norm=LpNormOptions(p=math.inf), wandb=WandbOptions(mode="offline")
    )
    run = open_run(config)
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    first = Tracker(run, config, {"commit": "abc"})
    for i in range(30):
        first.log({"iter": i, "train/loss": 1 / (i + 1), "val/loss": None if i % 10 else 0.1 * i, "mfu": math.nan})
    first.finish({"status": "stopped", "iter": 25})
    assert handlers == [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    before = Metrics.read(run.path / "metrics.jsonl")
    second = Tracker(run, config, {"commit": "abc"}, step=25)
    until(lambda: len(list((run.path / "wandb").glob("offline-run-*/*.wandb"))) == 2, 180)
    for i in range(25, 40):  # while W&B follows
        second.log({"iter": i, "train/loss": 1 / (i + 1)})
        time.sleep(0.05)
    second.finish({"status": "done", "iter": 40, "val/loss": 2.5})
    assert "wandb" not in sys.modules

    def sent(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{k: v for k, v in line.items() if v is not None} for line in lines]

    recordings = inspect(run.path)
    assert [len(history(records)) for records in recordings] == [30, 15]
    assert history(recordings[0]) == sent(before)
    assert history(recordings[1]) == sent(Metrics.read(run.path / "metrics.jsonl"))[25:]
    runs = [next(r["run"] for r in records if r["type"] == "run") for records in recordings]
    assert runs[0]["run_id"] == runs[1]["run_id"] and not set(runs[0]["run_id"]) & set(":;,#?/' ")
    assert (runs[0]["display_name"], runs[0]["run_group"]) == ("a run: #1", config.group)
    assert runs[0]["config"]["update"]["info"] == {"commit": "abc"}
    assert [r["exit"].get("exit_code", 0) for records in recordings for r in records if r["type"] == "exit"] == [1, 0]
    assert read_json(run.path / "summary.json") == {"status": "done", "iter": 40, "val/loss": 2.5}


TRAINER = """
import os, signal, sys, time
out_dir, mode, init_timeout, patience, end = sys.argv[1:]
from training.config import TrainConfig, WandbOptions
from core.rundir import open_run
from training import tracker
tracker.INIT_TIMEOUT, tracker.PATIENCE = float(init_timeout), float(patience)
asked = []
signal.signal(signal.SIGINT, lambda *_: asked.append(1))
config = TrainConfig(out_dir=out_dir, wandb=WandbOptions(mode=mode))
run = open_run(config)
recorder = tracker.Tracker(run, config, {})
began = time.perf_counter()
for i in range(1000):
    recorder.log({"iter": i, "train/loss": i / 7})
print(f"logged in {time.perf_counter() - began:.3f} s", flush=True)
print("W&B process", recorder._wandb and recorder._wandb.pid, flush=True)
if end == "killed":
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
while end == "interrupted" and not asked:
    time.sleep(0.01)
recorder.finish({"status": "done", "iter": 1000})
print("modules", [name for name in ("wandb", "torch", "matplotlib") if name in sys.modules])
"""


def train(out_dir: Path, mode: str, init_timeout: float = 2, patience: float = 120, end: str = "done") -> list[str]:
    return [sys.executable, "-c", TRAINER, str(out_dir), mode, str(init_timeout), str(patience), end]


def recorded(run_dir: Path) -> int:
    return len(history((inspect(run_dir) or [[]])[-1]))


@pytest.fixture(params=["black hole", "closed port"])
def dead_server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server that takes connections and never answers, or a port where nobody listens."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{listener.getsockname()[1]}")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    if request.param == "black hole":
        listener.listen(100)
    yield request.param
    listener.close()


def test_dead_server_neither_slows_nor_holds_the_trainer_and_loses_nothing(tmp_path: Path, dead_server: str) -> None:
    patience = 1 if dead_server == "black hole" else 120  # left behind, and waited for
    began = time.monotonic()
    done = subprocess.run(
        train(tmp_path / "run", "auto", 30 if patience == 1 else 1, patience),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )
    seconds = time.monotonic() - began
    assert float(done.stdout.split("logged in ")[1].split()[0]) < 5  # of 30 that W&B is given to answer
    if patience == 1:
        assert seconds < 25 and "left behind" in done.stdout
    else:
        assert done.stdout.count("recorded offline") == 1
    assert done.stderr == ""
    assert read_json(tmp_path / "run" / "summary.json")["iter"] == 1000
    until(lambda: recorded(tmp_path / "run") == 1000, 180)


def test_no_key_and_a_terminal_never_prompts(tmp_path: Path) -> None:
    master, slave = pty.openpty()  # a person could answer, so W&B would ask
    subprocess.run(
        train(tmp_path / "run", "online"), cwd=ROOT, stdin=slave, stdout=slave, stderr=slave, timeout=180, check=True
    )
    os.close(slave)
    printed = os.read(master, 65536).decode()
    os.close(master)
    assert "wandb:" not in printed and printed.count("recorded offline") == 1
    assert recorded(tmp_path / "run") == 1000


def test_disabled_starts_and_imports_nothing_of_wandb(tmp_path: Path) -> None:
    done = subprocess.run(
        train(tmp_path / "run", "disabled"), cwd=ROOT, capture_output=True, text=True, timeout=180, check=True
    )
    assert "modules []" in done.stdout and "W&B process None" in done.stdout
    assert not (tmp_path / "run" / "wandb").exists()
    assert len(Metrics.read(tmp_path / "run" / "metrics.jsonl")) == 1000


def alive(pid: int) -> bool:
    """Whether the W&B process `pid`, or the service that it started for itself, lives (not as a zombie)."""
    rows = subprocess.run(
        ["ps", "-eo", "pid,stat,args"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return any(
        (row.split()[0] == str(pid) or f"--pid {pid}" in row) and not row.split()[1].startswith("Z") for row in rows[1:]
    )


def test_killed_trainer_has_its_lines_sent_and_leaves_no_process(tmp_path: Path) -> None:
    done = subprocess.run(
        train(tmp_path / "run", "offline", end="killed"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    pid = int(done.stdout.split("W&B process ")[1])
    until(lambda: not alive(pid), 180)
    (records,) = inspect(tmp_path / "run")
    assert history(records) == Metrics.read(tmp_path / "run" / "metrics.jsonl")
    assert [r["exit"]["exit_code"] for r in records if r["type"] == "exit"] == [1]


def test_interrupted_trainer_without_terminal_or_key_is_recorded_offline_in_full(tmp_path: Path) -> None:
    trainer = subprocess.Popen(
        train(tmp_path / "run", "auto", end="interrupted"),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
    )
    assert trainer.stdout is not None
    for line in trainer.stdout:
        if line.startswith("W&B process"):
            break
    os.killpg(trainer.pid, signal.SIGINT)  # Ctrl-C reaches the whole process group
    printed, _ = trainer.communicate(timeout=180)
    assert (trainer.returncode, printed) == (0, "modules []\n")
    assert recorded(tmp_path / "run") == 1000


def test_wandb_that_cannot_start_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainConfig(out_dir=str(tmp_path / "run"), wandb=WandbOptions(mode="offline"))
    run = open_run(config)
    printed: list[str] = []
    run.print_line = printed.append
    (run.path / "wandb").write_text("in the way")
    monkeypatch.setattr(tracker.sys, "executable", "/bin/false")
    recorder = Tracker(run, config, {})
    recorder.log({"iter": 0})
    recorder.finish({"iter": 1})
    assert printed == ["W&B stopped (exit status 1); the run and metrics.jsonl go on"]
    monkeypatch.setattr(tracker.sys, "executable", "/nowhere/python")
    Tracker(run, config, {}).finish()
    assert len(printed) == 2 and printed[1].startswith("W&B is off: ")


# -----------------------------------------------------------------------------


def test_plot_shows_both_losses(metrics: Metrics, tmp_path: Path) -> None:
    for i in range(50):
        metrics.write({"iter": i, "train/loss": 4 / (i + 1), "val/loss": None if i % 10 else 5 / (i + 1)})
    metrics.write({"iter": 50, "train/loss": math.nan})
    plot(metrics.path, tmp_path / "curve.png", "a run")
    pixels = (imread(tmp_path / "curve.png")[:, :, :3] * 255).round()
    for colour in ((0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)):
        assert (pixels == colour).all(axis=2).sum() > 100


def test_plot_of_an_empty_run_is_an_empty_plot(metrics: Metrics, tmp_path: Path) -> None:
    plot(metrics.path, tmp_path / "curve.png", "a run")
    assert (tmp_path / "curve.png").stat().st_size > 1000
