"""W&B: real W&B processes, real dead servers, and a trainer that never waits for them."""

import json
import math
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import CACHE, ROOT, Program, eventually
from helpers.runs import configured
from wandb_server import Server

import train
from core import wandb_follower
from core.files import read_json, sealed
from core.record import Metrics
from core.rundir import RunDir, RunRequest, open_run
from core.schema import ConfigError, flatten
from core.wandb_run import wandb_mode, wandb_options
from model.options import LpNormOptions
from sweeps.plan import compose
from training.config import TrainConfig, WandbOptions, load_config
from training.resume import run_request
from training.state import Facts
from training.tracking import copied_from, wandb_settings

KEY = "0123456789" * 4
CLOCK = ("tok_per_sec", "mfu")
WANDB_CORE = str(Path(find_spec("wandb").origin).parent / "bin" / "wandb-core")  # type: ignore[union-attr, arg-type]


@pytest.fixture(autouse=True)
def no_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(CACHE))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def test_auto_is_online_with_a_key_of_the_server_else_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wandb_mode("auto") == "offline"
    (tmp_path / "netrc").write_text(f"machine api.wandb.ai\n  login user\n  password {KEY}\n")
    assert wandb_mode("auto") == "online"
    monkeypatch.setenv("WANDB_BASE_URL", "http://wandb.local:8080")
    assert wandb_mode("auto") == "offline"
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    assert wandb_mode("auto") == "online"
    monkeypatch.delenv("WANDB_API_KEY")
    for damaged in (b"machine, what", b"\x00\xff\xfe machine"):
        (tmp_path / "netrc").write_bytes(damaged)
        assert wandb_mode("auto") == "offline"
    monkeypatch.setenv("WANDB_BASE_URL", "http://[::1")
    assert wandb_mode("auto") == "offline"


def test_wandb_mode_variable_decides_for_auto_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert [wandb_mode(mode) for mode in ("auto", "online", "offline")] == ["disabled", "online", "offline"]
    for word, mode in {"dryrun": "offline", "run": "online"}.items():
        monkeypatch.setenv("WANDB_MODE", word)
        assert wandb_mode("auto") == mode


def test_wandbs_variables_count_where_a_setting_is_at_its_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(wandb: WandbOptions) -> list[Any]:
        init = wandb_settings(TrainConfig(wandb=wandb), tmp_path, Facts())["init"]
        tags = [tag for tag in init["tags"] if ":" not in tag]
        return [init[key] for key in ("project", "entity", "name", "group", "notes")] + tags

    for name in ("PROJECT", "ENTITY", "NAME", "RUN_GROUP", "NOTES", "TAGS"):
        monkeypatch.setenv(f"WANDB_{name}", f"{name},b")
    assert told(WandbOptions()) == ["PROJECT,b", "ENTITY,b", "NAME,b", "RUN_GROUP,b", "NOTES,b", "TAGS", "b"]
    given = WandbOptions("offline", "p", "e", "n", "g", ("t",), "why")
    assert told(given) == ["p", "e", "n", "g", "why", "t"]
    monkeypatch.setenv("WANDB_PROJECT", "a/b")
    with pytest.raises(ConfigError, match="WANDB_PROJECT=a/b must be 1 to 128 characters"):
        train.run(TrainConfig(out_dir=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists() and wandb_options(WandbOptions("disabled")).project == "nanoqk"


# -----------------------------------------------------------------------------
# W&B for real


def inspect(run_dir: Path, kind: str = "offline-run-*") -> list[list[dict[str, Any]]]:
    """The records of every recording in the run directory, oldest first. As `wandb leet inspect --json` prints them,
    which imports wandb first."""
    recordings = []
    command = [WANDB_CORE, "leet", "inspect", "--no-observability", "--json", "--run-file"]
    for folder in sorted((run_dir / "wandb").glob(kind)):
        records = b"".join(
            subprocess.run([*command, file, folder.parent], capture_output=True, timeout=60, check=False).stdout
            for file in folder.glob("*.wandb")
        )
        recordings.append([json.loads(line) for line in records.splitlines()])
    return recordings


def ended_recordings(run: Path, n: int) -> list[list[dict[str, Any]]]:
    """inspect(run), once there are n recordings and W&B has ended the last one; else []."""
    found = inspect(run)
    return found if len(found) == n and any(record["type"] == "exit" for record in found[-1]) else []


def history(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    items = [r["history"]["item"] for r in records if r["type"] == "history"]
    return [{k: v for k, v in item.items() if not k.startswith("_")} for item in items]


def test_wandb_offline_holds_what_metrics_jsonl_holds_across_a_resume(tmp_path: Path) -> None:
    out_dir, offline = str(tmp_path / "a run: #1"), WandbOptions(mode="offline")
    config = TrainConfig(out_dir=out_dir, qk_norm=LpNormOptions(p=math.inf), wandb=offline)
    run, settings = open_run(run_request(config)), wandb_settings(config, config.run_dir, Facts(commit="abc"))
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    run.begin("", 0, settings)
    for i in range(30):
        loss = None if i % 10 else 0.1 * i
        run.record.write({"iter": i, "train/loss": 1 / (i + 1), "val/loss": loss, "mfu": math.nan})
    run.finish({"status": "stopped", "iter": 25})
    assert handlers == [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    before = Metrics.read(run.path / "metrics.jsonl")
    run.begin("", 25, settings)
    eventually(lambda: len(list((run.path / "wandb").glob("offline-run-*/*.wandb"))) == 2)
    for i in range(25, 40):  # while W&B follows
        run.record.write({"iter": i, "train/loss": 1 / (i + 1)})
        time.sleep(0.05)
    run.finish({"status": "done", "iter": 40, "val/loss": 2.5})

    def sent(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{k: v for k, v in line.items() if v is not None} for line in lines]

    recordings = inspect(run.path)
    assert history(recordings[0]) == sent(before)
    assert history(recordings[1]) == sent(Metrics.read(run.path / "metrics.jsonl"))[30:]  # 25 to 29 are the first's
    runs = [next(r["run"] for r in records if r["type"] == "run") for records in recordings]
    begun_anew = wandb_settings(config, tmp_path / "another" / config.run_dir.name, Facts())["init"]["id"]
    resumed = wandb_settings(config, config.run_dir, Facts())["init"]["id"]
    assert runs[0]["run_id"] == resumed != begun_anew
    assert runs[0]["run_id"] == runs[1]["run_id"] and not set(runs[0]["run_id"]) & set(":;,#?/' ")
    assert (runs[0]["display_name"], runs[0]["run_group"]) == ("a run: #1", config.group)
    assert runs[0]["config"]["update"]["info"] == {"commit": "abc"}
    assert [r["exit"].get("exit_code", 0) for records in recordings for r in records if r["type"] == "exit"] == [255, 0]
    summary = {"status": "done", "iter": 40, "val/loss": 2.5, "records": run.record.hashes()}
    assert read_json(run.path / "summary.json") == sealed(summary)
    first = wandb_follower.recordings(run.path)[0]
    os.mkfifo(first.with_name("run-a.wandb"))  # a stranger's
    first.with_name("latest-run").symlink_to(".")
    assert wandb_follower.last_recorded(first) == 29


def test_a_copy_that_goes_on_in_the_runs_of_its_original_says_so(tmp_path: Path, corpus: Path) -> None:
    """Once. A run that was moved is no copy."""
    run, copy, wandb = tmp_path / "run", tmp_path / "copy", {"mode": "offline"}
    assert train.run(configured(corpus, run, max_iters=2, wandb=wandb)) == 0
    shutil.copytree(run, copy, symlinks=True)
    assert copied_from(copy) == str(run) and not copied_from(run)
    for n in (4, 6):
        assert train.run(configured(corpus, copy, max_iters=n, wandb=wandb)) == 0
        said = (copy / "train.log").read_text()
        assert said.count(f"warning: this is a copy of {run}, and goes on in the same run at W&B") == 1
    assert train.run(configured(corpus, run, max_iters=4, wandb=wandb)) == 0
    run.rename(tmp_path / "moved")
    assert not copied_from(tmp_path / "moved") and "a copy" not in (tmp_path / "moved" / "train.log").read_text()
    job = read_json(copy / "wandb" / "job.json")
    moved = str(tmp_path / "moved")
    for strange in ({"path": "\0"}, {"path": 3}, {"init": None}, {"path": moved, "init": {"id": None}}):
        (copy / "wandb" / "job.json").write_text(json.dumps(job | strange))
        assert not copied_from(copy)


def test_a_run_that_is_killed_and_goes_on_is_in_w_and_b_with_all_that_was_asked_for(
    tmp_path: Path, tiny_run: list[str], forked: Program
) -> None:
    words = [*tiny_run, "data.folds=3", "data.fold=1", "qk_norm=lp", "qk_norm.p=3", "wandb.mode=offline"]
    words += ["wandb.tags=[night]", "wandb.notes=a look", "wandb.artifacts=true", "max_iters=2000", "out_dir=run"]
    words += ["schedule.lr_decay_iters=60", "eval_interval=20", "checkpoint_interval=20", "qk_clip=log"]
    run = tmp_path / "run"
    with subprocess.Popen([sys.executable, str(ROOT / "train.py"), *words], cwd=tmp_path) as process:
        eventually(lambda: (run / "ckpt" / "step_000020").exists(), 120)
        process.kill()
    done = forked("train.py", *words, "max_iters=60")
    # "then" where the machine is slow: W&B goes on for longer than a run waits
    assert re.search(r"to upload it( then)?: wandb sync", done.stdout), done.stdout
    first, last = eventually(lambda: ended_recordings(run, 2))
    items = [*history(first), *history(last)]
    lines, kept = Metrics.read(run / "metrics.jsonl"), {item["iter"]: item for item in items}
    assert len(items) == len(kept) and kept.keys() >= {line["iter"] for line in lines if line["iter"] > 20}
    for line in lines:  # to the last digit, whichever process sent it
        assert line["iter"] not in kept or {k: kept[line["iter"]].get(k) for k in line if k not in CLOCK} == {
            k: v for k, v in line.items() if k not in CLOCK
        }
    assert {"sample._type", "attn/entropy/layer_0", "attn/alpha/layer_1"} <= kept[60].keys()
    samples = {line["iter"]: line["text"] for line in Metrics.read(run / "samples.jsonl")}
    assert {0, 60} <= samples.keys() and len(samples[60]) >= 200
    (sent,) = [r["run"] for r in last if r["type"] == "run"]
    tags = ["night", "layout:mha", "norm:lp", "p:3.0", "fold:1", "precision:float32"]
    assert (sent["job_type"], sent["notes"], sent["tags"]) == ("train", "a look", tags)
    config = sent["config"]["update"]
    assert config["model"]["n_layer"] == 2 and config["info"]["commit"]
    columns = {key: config[key] for key in ("p", "norm", "layout", "fold", "alpha_init")}
    assert columns == {"p": 3, "norm": "lp", "layout": "mha", "fold": 1, "alpha_init": "matched"}
    summary: dict[str, Any] = {}
    for record in last:
        summary |= record.get("summary", {}).get("update", {})
    losses = {line["iter"]: line["val/loss"] for line in lines if "val/loss" in line}
    assert summary["val/loss"] == {"last": losses[60], "min": min(losses.values())}
    assert summary["status"] == "done" and "commit" not in summary
    early = next(r["summary"]["update"] for r in first if "val/loss" in r.get("summary", {}).get("update", {}))
    assert early["val/loss"] == {"last": losses[0], "min": losses[0]}
    artifacts = {r["artifact"]["type"]: r["artifact"]["manifest"]["contents"] for r in last if r["type"] == "artifact"}
    assert "model.safetensors" in [file["path"] for file in artifacts["model"]]
    assert [file["path"] for file in artifacts["metrics"]] == ["metrics.jsonl"]
    about = next(r["environment"] for r in last if r["type"] == "environment")
    assert about["args"][: len(words)] == words and about["program"].endswith("train.py") and about["git"]["commit"]
    assert any(r["type"] == "stats" for r in first)


def test_a_run_that_diverges_has_failed_with_its_reason(tmp_path: Path, tiny_run: list[str], forked: Program) -> None:
    words = ["optim.learning_rate=1e30", "grad_clip=0", "max_iters=20", "wandb.mode=offline", "out_dir=run"]
    forked("train.py", *tiny_run, *words, status=3)
    (records,) = eventually(lambda: ended_recordings(tmp_path / "run", 1))  # W&B may end after train.py
    summary: dict[str, Any] = {}
    for record in records:
        summary |= record.get("summary", {}).get("update", {})
    assert summary["status"] == "diverged" and "at iteration" in summary["reason"]
    assert [r["exit"]["exit_code"] for r in records if r["type"] == "exit"] == [1]  # W&B shows it as failed


def test_samples_and_media_change_no_number(tmp_path: Path, tiny_run: list[str]) -> None:
    kept = {}
    for media in ("on", "off"):
        words = [*tiny_run, "attention=mla", "model.position=rope", "model.rope_theta=10000", "qk_norm=rms"]
        words += ["max_iters=6", "model.dropout=0.2", "wandb.mode=disabled"]
        config = load_config(compose([*words, f"wandb.media={media}"]))
        assert train.run(replace(config, out_dir=str(tmp_path / media))) == 0
        lines = Metrics.read(tmp_path / media / "metrics.jsonl")
        weights = (tmp_path / media / "ckpt" / "latest" / "model.safetensors").read_bytes()
        kept[media] = weights, [{k: v for k, v in line.items() if k not in CLOCK} for line in lines]
        assert (tmp_path / media / "samples.jsonl").exists() == (media == "on")
    assert kept["on"] == kept["off"]


TRAINER = """
import os, signal, sys, time
from pathlib import Path
from core import wandb_run
from core.rundir import RunRequest, open_run
out_dir, mode, init_timeout, patience, end, pause = sys.argv[1:]
wandb_run.INIT_TIMEOUT, wandb_run.PATIENCE = float(init_timeout), float(patience)
asked = []
signal.signal(signal.SIGINT, lambda *_: asked.append(1))
run = open_run(RunRequest(Path(out_dir), "", lambda old: "", 1000))
init = {"project": "nanoqk", "id": "run-1", "dir": out_dir, "resume": "allow"}
run.begin("", 0, {"mode": wandb_run.wandb_mode(mode), "init": init})
print("W&B process", run._wandb and run._wandb.process.pid, flush=True)
began = time.perf_counter()
for i in range(1000):
    run.record.write({"iter": i, "train/loss": i / 7})
    time.sleep(float(pause))
print(f"logged in {time.perf_counter() - began:.3f} s", flush=True)
if end == "killed":
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
while end == "interrupted" and not asked:
    time.sleep(0.01)
run.finish({"status": "done", "iter": 1000})
print("modules", [name for name in ("wandb", "torch", "matplotlib") if name in sys.modules])
"""


def trainer(
    out_dir: Path, mode: str, init_timeout: float = 2, patience: float = 120, end: str = "done", pause: float = 0
) -> list[str]:
    return [sys.executable, "-c", TRAINER, *map(str, (out_dir, mode, init_timeout, patience, end, pause))]


def call(*command: str, cwd: Path = ROOT, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == status, done.stdout + done.stderr
    return done


def finished(*args: Any, status: int = 0, **options: Any) -> subprocess.CompletedProcess[str]:
    return call(*trainer(*args, **options), status=status)


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
    done = finished(tmp_path / "run", "auto", 12 if patience == 1 else 1, patience)
    seconds = time.monotonic() - began
    assert float(done.stdout.split("logged in ")[1].split()[0]) < 5  # of 12 that W&B is given to answer
    if patience == 1:
        later = f"if no server answers, to upload it then: wandb sync {tmp_path}/run/wandb/offline-run-*"
        assert seconds < 10 and f"goes on in the background; {later}\n" in done.stdout
    else:
        assert done.stdout.count("recorded offline") == 1
    assert done.stderr == ""
    assert read_json(tmp_path / "run" / "summary.json")["iter"] == 1000
    eventually(lambda: recorded(tmp_path / "run") == 1000)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server()
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB__FILE_STREAM_TRANSMIT_INTERVAL", "1")  # seconds; W&B's own is 15
    yield server
    server.shutdown()


def arrived(server: Server, run: str = "run-1") -> list[int]:
    return [json.loads(line)["iter"] for line in server.history[run]]


def sent_later(*folders: Path, status: int = 0) -> str:
    return call(sys.executable, "-m", "core.wandb_follower", "send", *map(str, folders), status=status).stdout


@pytest.mark.parametrize("words", [[], ["send"], ["snd", "runs/x"]], ids=str)
def test_a_misspelt_upload_is_refused(words: list[str]) -> None:
    done = call(sys.executable, "-m", "core.wandb_follower", *words, status=2)
    assert "usage" in done.stderr and not done.stdout


def test_a_server_that_dies_gets_each_line_once_when_it_is_back(tmp_path: Path, server: Server) -> None:
    server.dies_after = 1
    run = tmp_path / "run"
    done = finished(run, "auto", 5, pause=0.008)
    assert float(done.stdout.split("logged in ")[1].split()[0]) < 13, done.stdout
    assert f"has not got all of this run; later: python -m core.wandb_follower send {run}" in done.stdout
    assert 0 < len(arrived(server)) < 1000 == len(history(inspect(run, "run-*")[0]))
    assert f"not sent: {run} (" in sent_later(run, status=1) and 0 < len(arrived(server)) < 1000  # not back yet
    assert sent_later(tmp_path) == f"not sent: {tmp_path} is no run that W&B was told of\n"
    server.down, server.dies_after = False, 10**9
    server.runs["run-1"]["summary"] = json.dumps({"iter": len(arrived(server))})  # it came a line before its line
    RunDir(run).status("done", iter=1000)
    assert f"W&B: {server.url}" in sent_later(run) and arrived(server) == [*range(1000)]
    assert f"W&B: {server.url}" in sent_later(run) and arrived(server) == [*range(1000)]
    assert server.exits["run-1"] == [0, 0] and json.loads(server.runs["run-1"]["summary"])["status"] == "done"


def alive(pid: int) -> list[int]:
    """Which of the W&B process `pid`, and the service that it started for itself, live (not as a zombie)."""
    rows = call("ps", "-eo", "pid,stat,args").stdout.splitlines()[1:]
    of_run = [row for row in rows if row.split()[0] == str(pid) or f"--pid {pid}" in row]
    return [int(row.split()[0]) for row in of_run if not row.split()[1].startswith("Z")]


def kill_with_wandb(command: list[str], begun: Callable[[], bool]) -> None:
    """Start a trainer, and when W&B has begun kill it, its W&B process and that one's service."""
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(next(line for line in process.stdout if line.startswith("W&B process")).split()[-1])
        eventually(begun, 120)
        for number in (process.pid, *alive(pid)):
            os.kill(number, signal.SIGKILL)
        eventually(lambda: not alive(pid))


def sync(run_dir: Path) -> None:
    folders = sorted(map(str, (run_dir / "wandb").glob("offline-run-*")))
    done = call(str(Path(sys.executable).with_name("wandb")), "sync", *folders, cwd=run_dir)
    print(done.stdout, done.stderr)  # shown by a test that fails


def test_recordings_that_a_link_leads_to_are_left_alone(tmp_path: Path) -> None:
    for folder in ("other/run-2", "run/wandb/run-1"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "run-a.wandb").touch()
    (tmp_path / "run" / "wandb" / "run-2").symlink_to(tmp_path / "other" / "run-2")
    (tmp_path / "run" / "wandb" / "run-1" / "run-b.wandb").symlink_to("run-a.wandb")
    (tmp_path / "alias").symlink_to(tmp_path / "run")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "wandb").symlink_to(tmp_path / "run" / "wandb")
    found = {name: [file.name for file in wandb_follower.recordings(tmp_path / name)] for name in ("run", "alias")}
    assert found == {"run": ["run-a.wandb"], "alias": ["run-a.wandb"]}
    assert wandb_follower.recordings(tmp_path / "linked") == []


@pytest.mark.parametrize("link", ["ckpt/best", "ckpt", "ckpt/step_000005/model.safetensors", "metrics.jsonl"])
def test_no_link_out_of_a_run_is_uploaded(link: str, tmp_path: Path) -> None:
    class Uploads:
        id, names = "x", list[str]()

        def log_artifact(self, artifact: Any, **_: Any) -> None:
            self.names += artifact.manifest.entries

    run_dir, secret = tmp_path / "run", tmp_path / "secret"
    for folder in (run_dir / "ckpt" / "step_000005", secret / "best"):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_text("x")
    (run_dir / "ckpt" / "best").symlink_to("step_000005")
    (run_dir / "metrics.jsonl").write_text("{}\n")
    wandb_follower.log_artifacts(run := Uploads(), run_dir)
    assert run.names == ["metrics.jsonl", "model.safetensors"]
    run.names.clear()
    (run_dir / link).rename(tmp_path / "before")
    (run_dir / link).symlink_to(secret / "best" / "model.safetensors" if link.count(".") else secret)
    if link == "ckpt/best":
        (secret / "key").write_text("x")
    with pytest.raises(OSError, match="is a link out of its folder"):
        wandb_follower.log_artifacts(run, run_dir)
    assert run.names == []


@pytest.mark.parametrize("strange", [{"config": "/etc/passwd"}, {"tags": "ab"}, {"tags": [1]}, {"name": ["x"]}])
def test_a_strangers_job_names_no_file_and_no_other_argument(strange: dict[str, Any]) -> None:
    good = {"id": "a", "project": "p", "config": {"x": 1}, "tags": ["t"]}
    told = wandb_follower.arguments({**good, "dir": "/elsewhere", "settings": {"program": "x"}})
    assert {key: value for key, value in told.items() if value is not None} == good
    with pytest.raises(ValueError, match="is not what a run writes"):
        wandb_follower.arguments(good | strange)


def assert_cuts_are_mended(recording: Path) -> None:
    content = recording.read_bytes()
    cut, ends, sizes = recording.parents[3] / "cut.wandb", range(len(content) - 400, len(content)), []
    for end in ends:  # within a record or between two
        cut.write_bytes(content[:end])
        wandb_follower.cut_incomplete_record(cut)
        sizes.append(len(cut.read_bytes()))
        assert content.startswith(cut.read_bytes())
    whole = {*sizes}  # ends of records: all of those before the cut are kept
    assert len(whole) > 2 and sizes == [max(size for size in whole if size <= end) for end in ends]
    assert all(0 < end - size < 400 for end, size in zip(ends, sizes, strict=True) if end not in whole)


def test_a_killed_run_of_an_agent_has_the_agents_id_and_each_line_once(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, agents = tmp_path / "run", {"SWEEP_ID": "s-1", "RUN_ID": "agents-1", "PROJECT": "theirs", "ENTITY": "team"}
    with monkeypatch.context() as under_the_agent:
        for name, value in agents.items():
            under_the_agent.setenv(f"WANDB_{name}", value)
        kill_with_wandb(trainer(run, "offline", pause=0.02), lambda: recorded(run) > 0)
        (recording,) = (run / "wandb").glob("offline-run-*/*.wandb")
        assert_cuts_are_mended(recording)
        with open(recording, "r+b") as file:
            file.seek(-3000, os.SEEK_END)
            file.write(bytes(3))
        finished(run, "offline", end="killed", status=-signal.SIGKILL)  # it begins at 0 again
        finished(run, "offline")  # waits for the W&B process of the one before
    lines = [[line["iter"] for line in history(records)] for records in inspect(run)]
    assert sum(lines, []) == [*range(1000)] and 0 < len(lines[0]) < 1000
    sync(run)
    sent_later(run)
    assert arrived(server, "agents-1") == [*range(1000)] and [*server.runs] == ["agents-1"]
    assert [server.runs["agents-1"][key] for key in ("project", "entity", "sweep")] == ["theirs", "team", "s-1"]


def test_a_run_killed_online_that_goes_on_offline_and_online_doubles_no_point(tmp_path: Path, server: Server) -> None:
    run = tmp_path / "run"
    # more lines than W&B's recording holds back in memory
    kill_with_wandb(trainer(run, "online", 20, pause=0.008), lambda: len(arrived(server)) > 300)
    assert 300 < len(arrived(server)) < 1000
    assert "later: python -m core.wandb_follower send" in finished(run, "offline").stdout
    finished(run, "online", 20)
    assert arrived(server) == [*range(1000)]
    sync(run)  # what is recorded offline counts as sent
    assert arrived(server) == [*range(1000)]


def test_an_agent_trains_runs_of_the_sweep_in_configs(
    tmp_path: Path, tiny_run: list[str], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = yaml.safe_load((ROOT / "configs" / "wandb_sweep.yaml").read_text())
    at = sweep["command"].index("model=nano_cpu")
    sweep["command"][at : at + 1] = [*tiny_run, "max_iters=4", "wandb.media=off", f"out_dir={tmp_path / 'run'}"]
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    values = {name: {"value": options["values"][-1]} for name, options in sweep["parameters"].items()}
    server.commands = [{"type": "run", "run_id": "agents-1", "program": "train.py", "args": values}]
    for words in (["sweep", str(tmp_path / "sweep.yaml")], ["agent", "--count", "1", "me/nanoqk/sweep-1"]):
        call("wandb", *words)
    config = load_config(yaml.safe_load((tmp_path / "run" / "config.yaml").read_text()))
    assert {name: {"value": flatten(asdict(config))[name]} for name in values} == values
    eventually(lambda: arrived(server, "agents-1") == [*range(5)], 120)
    assert server.runs["agents-1"]["sweep"] == "sweep-1"


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


def test_killed_trainer_has_its_lines_sent_and_leaves_no_process(tmp_path: Path) -> None:
    done = finished(tmp_path / "run", "offline", end="killed", status=-signal.SIGKILL)
    pid = int(done.stdout.split("W&B process ")[1].split()[0])
    eventually(lambda: not alive(pid))
    (records,) = inspect(tmp_path / "run")
    assert history(records) == Metrics.read(tmp_path / "run" / "metrics.jsonl")
    assert [r["exit"]["exit_code"] for r in records if r["type"] == "exit"] == [255]  # W&B shows it as killed


def test_interrupted_trainer_without_terminal_or_key_is_recorded_offline_in_full(tmp_path: Path) -> None:
    command = trainer(tmp_path / "run", "auto", end="interrupted")
    pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, **pipes)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("logged"):
            break
    os.killpg(process.pid, signal.SIGINT)  # Ctrl-C reaches the whole process group
    printed, _ = process.communicate(timeout=180)
    assert process.returncode == 0 and printed.endswith("modules []\n")
    (folder,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    assert f"to upload it: wandb sync {folder}\n" in printed
    assert recorded(tmp_path / "run") == 1000


def test_wandb_that_cannot_start_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = open_run(RunRequest(tmp_path / "run", "", lambda old: "", 1))
    printed: list[str] = []
    run.print_line = printed.append
    monkeypatch.setattr(wandb_follower.sys, "executable", "/bin/false")
    run.begin("", 0, {"mode": "offline", "init": {}})
    run.record.write({"iter": 0})
    run.finish({"iter": 1})
    assert printed == ["W&B stopped (exit status 1); the run and metrics.jsonl go on"]
    monkeypatch.setattr(wandb_follower.sys, "executable", "/nowhere/python")
    run.begin("", 1, {"mode": "offline", "init": {}})
    run.close()
    assert len(printed) == 2 and printed[1].startswith("W&B is off: ")
