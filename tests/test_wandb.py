"""W&B: real W&B processes, real dead servers, and a trainer that never waits for them."""

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

import pytest
from conftest import ROOT

from core import wandb_follower
from core.files import read_json
from core.metrics import Metrics
from core.rundir import RunRequest, open_run
from core.wandb_run import wandb_mode
from model.options import LpNormOptions
from training.config import TrainConfig, WandbOptions
from training.resume import run_request, wandb_settings

KEY = "0123456789" * 4


@pytest.fixture(autouse=True)
def no_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.1)


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
    run, settings = open_run(run_request(config)), wandb_settings(config, config.run_dir, {"commit": "abc"})
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    run.begin("", 0, settings)
    for i in range(30):
        run.record({"iter": i, "train/loss": 1 / (i + 1), "val/loss": None if i % 10 else 0.1 * i, "mfu": math.nan})
    run.finish({"status": "stopped", "iter": 25})
    assert handlers == [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    before = Metrics.read(run.path / "metrics.jsonl")
    run.begin("", 25, settings)
    until(lambda: len(list((run.path / "wandb").glob("offline-run-*/*.wandb"))) == 2, 180)
    for i in range(25, 40):  # while W&B follows
        run.record({"iter": i, "train/loss": 1 / (i + 1)})
        time.sleep(0.05)
    run.finish({"status": "done", "iter": 40, "val/loss": 2.5})
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
from pathlib import Path
from core import wandb_run
from core.rundir import RunRequest, open_run
out_dir, mode, init_timeout, patience, end = sys.argv[1:]
wandb_run.INIT_TIMEOUT, wandb_run.PATIENCE = float(init_timeout), float(patience)
asked = []
signal.signal(signal.SIGINT, lambda *_: asked.append(1))
run = open_run(RunRequest(Path(out_dir), "", lambda old: [], 1000))
init = {"project": "nanoqk", "id": "run-1", "dir": out_dir, "resume": "allow"}
run.begin("", 0, {"mode": wandb_run.wandb_mode(mode), "init": init})
began = time.perf_counter()
for i in range(1000):
    run.record({"iter": i, "train/loss": i / 7})
print(f"logged in {time.perf_counter() - began:.3f} s", flush=True)
print("W&B process", run._wandb and run._wandb.process.pid, flush=True)
if end == "killed":
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
while end == "interrupted" and not asked:
    time.sleep(0.01)
run.finish({"status": "done", "iter": 1000})
print("modules", [name for name in ("wandb", "torch", "matplotlib") if name in sys.modules])
"""


def trainer(out_dir: Path, mode: str, init_timeout: float = 2, patience: float = 120, end: str = "done") -> list[str]:
    return [sys.executable, "-c", TRAINER, str(out_dir), mode, str(init_timeout), str(patience), end]


def finished(*args: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(trainer(*args, **options), cwd=ROOT, capture_output=True, text=True, timeout=180)


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
    done = finished(tmp_path / "run", "auto", 30 if patience == 1 else 1, patience)
    seconds = time.monotonic() - began
    assert float(done.stdout.split("logged in ")[1].split()[0]) < 5  # of 30 that W&B is given to answer
    if patience == 1:
        assert seconds < 25 and "left behind" in done.stdout
    else:
        assert done.stdout.count("recorded offline") == 1
    assert (done.returncode, done.stderr) == (0, "")
    assert read_json(tmp_path / "run" / "summary.json")["iter"] == 1000
    until(lambda: recorded(tmp_path / "run") == 1000, 180)


def test_no_key_and_a_terminal_never_prompts(tmp_path: Path) -> None:
    master, slave = pty.openpty()  # a person could answer, so W&B would ask
    command = trainer(tmp_path / "run", "online")
    subprocess.run(command, cwd=ROOT, stdin=slave, stdout=slave, stderr=slave, timeout=180, check=True)
    os.close(slave)
    printed = os.read(master, 65536).decode()
    os.close(master)
    assert "wandb:" not in printed and printed.count("recorded offline") == 1
    assert recorded(tmp_path / "run") == 1000


def test_disabled_starts_and_imports_nothing_of_wandb(tmp_path: Path) -> None:
    done = finished(tmp_path / "run", "disabled")
    assert "modules []" in done.stdout and "W&B process None" in done.stdout
    assert not (tmp_path / "run" / "wandb").exists()
    assert len(Metrics.read(tmp_path / "run" / "metrics.jsonl")) == 1000


def alive(pid: int) -> bool:
    """Whether the W&B process `pid`, or the service that it started for itself, lives (not as a zombie)."""
    listed = subprocess.run(["ps", "-eo", "pid,stat,args"], capture_output=True, text=True, check=True).stdout
    rows = [row for row in listed.splitlines()[1:] if row.split()[0] == str(pid) or f"--pid {pid}" in row]
    return any(not row.split()[1].startswith("Z") for row in rows)


def test_killed_trainer_has_its_lines_sent_and_leaves_no_process(tmp_path: Path) -> None:
    done = finished(tmp_path / "run", "offline", end="killed")
    assert done.returncode == -signal.SIGKILL
    pid = int(done.stdout.split("W&B process ")[1])
    until(lambda: not alive(pid), 180)
    (records,) = inspect(tmp_path / "run")
    assert history(records) == Metrics.read(tmp_path / "run" / "metrics.jsonl")
    assert [r["exit"]["exit_code"] for r in records if r["type"] == "exit"] == [1]


def test_interrupted_trainer_without_terminal_or_key_is_recorded_offline_in_full(tmp_path: Path) -> None:
    process = subprocess.Popen(
        trainer(tmp_path / "run", "auto", end="interrupted"),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("W&B process"):
            break
    os.killpg(process.pid, signal.SIGINT)  # Ctrl-C reaches the whole process group
    printed, _ = process.communicate(timeout=180)
    assert (process.returncode, printed) == (0, "modules []\n")
    assert recorded(tmp_path / "run") == 1000


def test_wandb_that_cannot_start_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = open_run(RunRequest(tmp_path / "run", "", lambda old: [], 1))
    printed: list[str] = []
    run.print_line = printed.append
    monkeypatch.setattr(wandb_follower.sys, "executable", "/bin/false")
    run.begin("", 0, {"mode": "offline", "init": {}})
    run.record({"iter": 0})
    run.finish({"iter": 1})
    assert printed == ["W&B stopped (exit status 1); the run and metrics.jsonl go on"]
    monkeypatch.setattr(wandb_follower.sys, "executable", "/nowhere/python")
    run.begin("", 1, {"mode": "offline", "init": {}})
    run.close()
    assert len(printed) == 2 and printed[1].startswith("W&B is off: ")
