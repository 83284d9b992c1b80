"""Run directories: one owner at a time, never a user's folder, and never two trajectories in one."""

import errno
import fcntl
import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import eventually, exit_status, fork

from core import rundir, wandb_follower, wandb_run
from core.files import is_intact, read_json, write_json
from core.record import Metrics
from core.rundir import ReadOnlyRunDir, RunDir, RunRequest, is_open, open_run, read_status, read_summary
from core.schema import ConfigError, declared, differences
from data.options import BinOptions, TextFileOptions
from model.options import LpNormOptions, MLAOptions, ModelOptions
from training.config import CosineOptions, TrainConfig, WandbOptions, load_config, to_yaml
from training.resume import run_request


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run"


def opened(path: Path, **changes: Any) -> RunDir:
    return open_run(run_request(TrainConfig(out_dir=str(path), **changes)))


def saved_config(path: Path) -> TrainConfig:
    return load_config(yaml.safe_load((path / "config.yaml").read_text()))


def leave(path: Path, state: str, iteration: int | None = None, **changes: Any) -> dict[str, bytes]:
    """A run that ended in `state`, as train.py leaves it. Returns its files."""
    run = opened(path, **changes)
    if iteration is not None:
        write_json(path / "summary.json", {"iter": iteration})
    run.status(state, iter=iteration)
    run.close()
    return snapshot(path)


def snapshot(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


@contextmanager
def held_elsewhere(path: Path) -> Iterator[int]:
    """The id of a process that has the directory open: killed at the end, if it still lives."""

    def hold() -> int:
        with open_run(RunRequest(path, "", lambda old: "", 1)):
            (path.parent / "held").touch()
            time.sleep(60)
        return 0

    pid = fork(hold)
    try:
        eventually((path.parent / "held").exists)
        (path.parent / "held").unlink()
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        exit_status(pid)


def test_new_run_has_its_config_and_is_running(path: Path) -> None:
    run = opened(path / "deep" / "down", seed=3)
    assert not run.finished
    assert saved_config(run.path) == TrainConfig(out_dir=str(run.path), seed=3)
    status = read_status(run.path)
    assert (status["state"], status["pid"]) == ("running", os.getpid())
    assert is_open(run.path)
    run.close()
    assert not is_open(run.path)


WRONG = ['{"state": ["done"]}', '{"iter": "4"}', '{"iter": 1.5}', '{"records": []}', '{"iter": ' + "9" * 5000 + "}"]
WRONG += [f'{{"seconds": {value}}}' for value in ('"x"', "[1]", "Infinity", "NaN", 10**299)]  # what cannot be drawn


@pytest.mark.parametrize("content", WRONG)
def test_a_status_or_summary_with_a_value_of_another_type_counts_as_lost(path: Path, content: str) -> None:
    path.mkdir(parents=True)
    for file, read in {"status.json": read_status, "summary.json": read_summary}.items():
        (path / file).write_text('{"state": "done", "iter": 4, "val/loss": null, "seconds": 2.5, "of_a_plugin": [1]}')
        assert read(path)["iter"] == 4
        (path / file).write_text(content)
        assert read(path) == {}


GROUPS = {group: setting.options for group, setting in declared(TrainConfig).items() if group != "fault"}
VARIANTS = [
    {group: cls()}
    for group, variants in GROUPS.items()
    for name, cls in variants.items()
    if name not in ("text", "bin")
]
ODD_NUMBERS = [{"qk_norm": LpNormOptions(p=p, alpha_init=1e-5)} for p in (1.0, 2.5, 1e22, math.inf)]
ODD_NAMES = [
    {"data": of_path(path=text), "wandb": WandbOptions(group=text)}
    for of_path in (TextFileOptions, BinOptions)
    for text in ("a: b #c ${x}", "é\u2028\U0001f600", "1e-3", "null", "~", "'\"\\")
]


@pytest.mark.parametrize("changes", [*VARIANTS, *ODD_NUMBERS, *ODD_NAMES], ids=str)
def test_config_yaml_holds_every_variant_odd_numbers_and_names(path: Path, changes: dict[str, Any]) -> None:
    rope = isinstance(changes.get("attention"), MLAOptions)
    changes = {"model": ModelOptions(position="rope", rope_theta=1e4)} | changes if rope else changes
    opened(path, **changes).close()
    assert saved_config(path) == TrainConfig(out_dir=str(path), **changes)
    assert opened(path, **changes).finished is False  # and it is the same trajectory
    numbers = yaml.safe_load((path / "config.yaml").read_text())["optim"]  # plain YAML, any program's
    assert type(numbers["learning_rate"]) is float and type(numbers["betas"]) is list


# -----------------------------------------------------------------------------
# Directories that cannot be used


@pytest.mark.parametrize(
    ("file", "says"),
    [("thesis.tex", "is neither empty nor a run directory"), ("plan.jsonl", "holds a sweep: write another out_dir")],
)
def test_the_folder_of_a_user_or_a_sweep_is_refused_untouched(file: str, says: str, path: Path) -> None:
    path.mkdir()
    (path / file).write_text("years of work")
    for fresh in (False, True):
        with pytest.raises(ConfigError, match=f"out_dir={path} {says}"):
            opened(path, fresh=fresh)
        assert snapshot(path.parent) == {f"run/{file}": b"years of work"}


@pytest.mark.parametrize("names", [[], ["lock", "config.yaml.tmp"]])
def test_a_directory_that_is_empty_or_whose_creation_was_cut_short_is_used(names: list[str], path: Path) -> None:
    path.mkdir()
    for name in names:
        (path / name).write_text("see")
    assert not opened(path).finished


def test_eval_only_changes_nothing(path: Path) -> None:
    before = leave(path, "stopped", 7)
    run = opened(path, eval_only=True, log_interval=3)
    assert snapshot(path) == before
    run.close()


def test_other_ranks_read_the_directory_and_write_nothing(path: Path) -> None:
    before = leave(path, "stopped", 7)
    with ReadOnlyRunDir(path, finished=False) as run, run.progress_bar(3, 0) as bar:
        run.begin("seed: 2", 0, {"mode": "offline"})
        run.status("failed")
        run.log("a warning")
        for write in (run.record.write, run.record.write_diagnostics):
            write({"iter": 1})
        run.save(1, {}, {}, True, None)
        run.restore_best(1)
        run.finish({"status": "done"})
        assert run.state == "stopped" and run.record.curve("val/loss") == {} and bar.disable
    assert snapshot(path) == before


# -----------------------------------------------------------------------------
# The lock


def test_a_run_in_use_names_its_owner_and_the_lock_dies_with_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rundir, "LOCK_TIMEOUT", 0.05)
    with held_elsewhere(path) as owner:
        before = snapshot(path)
        changed: list[dict[str, Any]] = [{}, {"fresh": True}, {"eval_only": True}, {"seed": 2}]
        for changes in changed:
            with pytest.raises(ConfigError, match=f"out_dir={path} is in use by process {owner} on "):
                opened(path, **changes)
        assert snapshot(path) == before and is_open(path)
        (path / "config.yaml").write_text(to_yaml(TrainConfig(out_dir=str(path))))
        os.kill(owner, signal.SIGKILL)
        eventually(lambda: not is_open(path))
        assert read_status(path)["state"] == "running" and not is_open(path)
        run = opened(path)
        run.begin("")
        assert read_status(path)["pid"] == os.getpid() and not run.finished
        run.close()


@pytest.mark.parametrize("replaced", [False, True])
def test_lock_of_a_run_that_was_just_moved_aside_is_not_taken_for_the_new_ones(
    path: Path, monkeypatch: pytest.MonkeyPatch, replaced: bool
) -> None:
    leave(path, "stopped")
    aside, flock = path.with_name("run.old-1"), fcntl.flock

    def move_first(lock: int, how: int) -> None:  # what another process's fresh=true does between open and flock
        if not aside.exists():
            path.rename(aside)
            if replaced:
                leave(path, "stopped")
        flock(lock, how)

    monkeypatch.setattr(fcntl, "flock", move_first)
    run = opened(path)
    assert is_open(path) and not is_open(aside)
    run.close()


@pytest.mark.slow
def test_looking_at_a_run_never_keeps_it_from_starting(path: Path) -> None:
    leave(path, "stopped")
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            is_open(path)

    onlookers = [threading.Thread(target=look) for _ in range(2)]
    for thread in onlookers:
        thread.start()
    try:
        for _ in range(30):
            opened(path).close()
    finally:
        over.set()
        for thread in onlookers:
            thread.join()


# -----------------------------------------------------------------------------
# Coming back to a run


def test_every_differing_setting_is_named(path: Path) -> None:
    before = leave(path, "stopped", 7, qk_norm=LpNormOptions(p=3.0))
    with pytest.raises(ConfigError) as refusal:
        opened(path, seed=1, model=ModelOptions(n_embd=192), max_iters=6000, device="cpu")
    message = str(refusal.value)
    assert message.startswith(f"out_dir={path} holds a run with other settings: ")
    assert message.endswith("; use another out_dir or fresh=true")
    changes = message.split("settings: ")[1].split("; use")[0].split(", ")
    assert set(changes) == {
        "seed 1337 -> 1",
        "model.n_embd 384 -> 192",
        "qk_norm.name lp -> none",
        "qk_norm.p 3.0 -> unset",
        "qk_norm.alpha_init matched -> unset",
        "qk_norm.alpha_per layer -> unset",
        "qk_norm.alpha_map exp -> unset",
        "schedule.lr_decay_iters (by default max_iters) 5000 -> 6000",
    }
    assert snapshot(path) == before and not is_open(path)
    assert differences({"a": True, "b": None}, {"b": None, "c": 1.5}) == ["a true -> unset", "c unset -> 1.5"]


def test_a_run_of_an_earlier_default_is_told_what_to_add(path: Path) -> None:
    leave(path, "stopped", 7, qk_norm=LpNormOptions(p=3.0, alpha_init="sqrt_d"))
    change, other = "qk_norm.alpha_init sqrt_d -> {}; ", "use another out_dir or fresh=true"
    added = "add qk_norm.alpha_init=sqrt_d, the default when it was begun, else "
    with pytest.raises(ConfigError, match=re.escape(change.format("matched") + added + other)):
        opened(path, qk_norm=LpNormOptions(p=3.0))
    with pytest.raises(ConfigError, match=re.escape(change.format("henry") + other)):
        opened(path, qk_norm=LpNormOptions(p=3.0, alpha_init="henry"))
    with pytest.raises(ConfigError, match=re.escape(change.format("matched") + other)):  # it would not be enough
        opened(path, qk_norm=LpNormOptions(p=3.0), seed=2)


def test_a_run_that_decays_to_its_end_is_told_how_to_train_on(path: Path) -> None:
    schedule = CosineOptions(warmup_iters=10)
    leave(path, "done", 100, max_iters=100, schedule=schedule)
    with pytest.raises(ConfigError, match="; add schedule.lr_decay_iters=100 to train on at the schedule's last rate"):
        opened(path, max_iters=200, schedule=schedule)
    with pytest.raises(ConfigError, match="; use another out_dir or fresh=true"):  # it would not be enough
        opened(path, max_iters=200, schedule=schedule, seed=2)
    assert not opened(path, max_iters=200, schedule=CosineOptions(warmup_iters=10, lr_decay_iters=100)).finished
    text, of_a_text = path.with_name("text"), TextFileOptions(path="a.txt")
    leave(text, "done", 100, max_iters=100, schedule=schedule, data=of_a_text)
    told = "settings: data.path a.txt -> b.txt, .*schedule.lr_decay_iters .* 100 -> 200; use another out_dir"
    with pytest.raises(ConfigError, match=told):  # another text, as it seems: longer training would not be enough
        opened(text, max_iters=200, schedule=schedule, data=TextFileOptions(path="b.txt"))
    long = path.with_name("long")
    leave(long, "done", 1_234_567, max_iters=1_234_567, schedule=schedule)
    with pytest.raises(ConfigError, match="schedule.lr_decay_iters=1234567 to"):
        opened(long, max_iters=2_000_000, schedule=schedule)


def test_a_run_that_is_moved_while_it_trains_writes_nothing_into_the_next_one(path: Path) -> None:
    run = opened(path)
    run.begin(to_yaml(TrainConfig(out_dir=str(path))))
    path.rename(path.with_name("aside"))
    writes: list[Callable[[], None]] = [
        lambda: run.status("running"),
        lambda: run.log("text"),
        lambda: run.finish({}),
        lambda: run.save(5, {}, {}, True, None),
    ]
    for of in ("nothing", "another run"):
        for write in writes:
            with pytest.raises(OSError, match="was moved while its run trained"):
                write()
        if of == "nothing":
            assert not path.exists()
            opened(path).claim("seed: 2")
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    run.state = "running"
    with pytest.raises(OSError, match="was moved"), run:
        run.log("text")
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    assert read_status(path.with_name("aside"))["state"] == "running"


def test_samples_are_cut_back_with_the_metrics(path: Path) -> None:
    """Else a resumed run that skips its sample would show that of the updates it drops."""
    run, config = opened(path), to_yaml(TrainConfig(out_dir=str(path)))
    run.begin(config)
    for i in (0, 250, 500):
        run.record.write_sample({"iter": i, "text": f"old {i}"})
    run.close()
    opened(path).begin(config, step=250)
    assert [line["iter"] for line in Metrics.read(path / "samples.jsonl")] == [0]


def test_partial_run_goes_on_with_the_new_free_settings(path: Path) -> None:
    before = leave(path, "stopped", 7)
    free: dict[str, Any] = {"log_interval": 3, "wandb": WandbOptions(mode="disabled"), "device": "cpu"}
    run = opened(path, **free)
    assert not run.finished and snapshot(path) == before  # the caller may still refuse it
    run.begin(to_yaml(TrainConfig(out_dir=str(path), **free)))
    assert saved_config(path).log_interval == 3
    assert read_status(path)["state"] == "running" and read_status(path)["iter"] == 7


@pytest.mark.parametrize(
    ("state", "iteration", "max_iters", "finished"),
    [
        ("done", 100, 100, True),
        ("done", 100, 60, True),
        ("done", 100, 200, False),
        ("done", None, 100, False),
        ("diverged", 40, 100, True),
        ("stopped", 100, 100, False),
        ("failed", 40, 100, False),
        ("running", 40, 100, False),
    ],
)
def test_a_finished_run_is_known(path: Path, state: str, iteration: int | None, max_iters: int, finished: bool) -> None:
    schedule = CosineOptions(warmup_iters=10, lr_decay_iters=100)
    before = leave(path, state, iteration, max_iters=100, schedule=schedule)
    with pytest.raises(ConfigError, match="seed 1337 -> 2"):  # finished or not
        opened(path, seed=2, schedule=schedule)
    run = opened(path, max_iters=max_iters, schedule=schedule)
    assert run.finished is finished
    assert snapshot(path) == before and run.state == state


@pytest.mark.parametrize(
    ("error", "state"),
    [(KeyboardInterrupt(), "stopped"), (SystemExit(143), "stopped"), (OSError(), "failed"), (ConfigError(), "failed")],
)
def test_a_run_that_a_signal_ends_is_stopped_and_has_not_failed(path: Path, error: BaseException, state: str) -> None:
    with pytest.raises(type(error)), opened(path) as run:
        run.begin(to_yaml(TrainConfig(out_dir=str(path))))
        raise error
    assert read_status(path)["state"] == state


def test_a_summary_with_a_loss_that_is_not_finite_is_intact(path: Path) -> None:
    run = opened(path)
    run.begin(to_yaml(TrainConfig(out_dir=str(path))))
    run.finish({"status": "diverged", "iter": 3, "val/loss": math.nan, "val/loss_min": math.inf, "reason": None})
    summary = read_json(path / "summary.json")
    assert is_intact(summary) and summary["val/loss"] is None is summary["val/loss_min"] and "reason" not in summary


def test_a_disk_that_is_full_at_fresh_leaves_the_run_its_name(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(path, "stopped")
    lock, calls = rundir.take_lock, []

    def full(path: Path) -> Any:
        calls.append(path)
        if len(calls) == 2:  # of the new directory
            path.mkdir()
            raise OSError(errno.ENOSPC, "no space left")
        return lock(path)

    monkeypatch.setattr(rundir, "take_lock", full)
    with pytest.raises(OSError, match="no space left"):  # no bad setting: a later try may succeed
        opened(path, fresh=True)
    assert (path / "config.yaml").exists() and not path.with_name(f"{path.name}.old-1").exists()


def test_fresh_moves_the_old_run_aside(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for n in (1, 2):
        leave(path, "done", 5000, seed=n, fresh=True)
    run = opened(path, seed=3, fresh=True)
    assert f"is now in {path}.old-2\n" in capsys.readouterr().out
    assert not run.finished and saved_config(path).seed == 3
    assert [saved_config(path.with_name(f"run.old-{n}")).seed for n in (1, 2)] == [1, 2]
    assert read_json(path.with_name("run.old-2") / "summary.json") == {"iter": 5000}
    assert is_open(path) and not is_open(path.with_name("run.old-2"))


@pytest.mark.parametrize("content", ["", "[1]", "seed: {", "seed: one", "sneed: 1", "\x00", "a" * 10])
def test_damaged_config_yaml_is_refused_in_one_line(path: Path, content: str) -> None:
    leave(path, "stopped")
    (path / "config.yaml").write_text(content)
    with pytest.raises(ConfigError, match="config.yaml that cannot be read.*fresh=true") as refusal:
        opened(path)
    assert "\n" not in str(refusal.value) and not is_open(path)
    assert not opened(path, fresh=True).finished


def test_log_prints_and_appends(path: Path) -> None:
    run = opened(path)
    printed: list[str] = []
    run.print_line = printed.append
    run.log("iter 0: loss 4.17")
    run.log("µ")
    assert printed == ["iter 0: loss 4.17", "µ"]
    lines = (path / "train.log").read_text(encoding="utf-8").splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == printed


@pytest.mark.slow
@pytest.mark.parametrize("first", ["the wait ends", "the line comes"])
def test_how_to_upload_an_offline_run_is_said_once(first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, line = tmp_path / "python", "W&B is offline; to upload it: wandb sync x"
    steps = ["sleep 1", f"echo '{line}'"] if first == "the wait ends" else [f"echo '{line}'", "sleep 1"]
    script.write_text("\n".join(["#!/bin/sh", *steps]))
    script.chmod(0o700)
    monkeypatch.setattr(wandb_follower.sys, "executable", str(script))
    monkeypatch.setattr(wandb_run, "PATIENCE", 0.5)
    printed: list[str] = []
    wandb = wandb_run.WandbRun(tmp_path, {"mode": "offline", "init": {}}, printed.append)
    wandb.finish({"status": "done"})
    wandb._relay.join()
    assert len(printed) == 1 and printed[0].count("wandb sync") == 1
