"""A run that was stopped and started again ends as if nothing had happened, bit for bit."""

import fcntl
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import QK_NORM_VARIANTS, ROOT, Program, flip, needs_compiler
from helpers.runs import SETTINGS, assert_halves_equal_straight, assert_same_run, configured, lines, saved_json, weights
from variants import CONTESTANTS

import train
from core import checkpoint, device
from core.files import read_json
from core.record import Metrics
from core.rundir import RunDir
from core.schema import ConfigError
from model.gpt import GPT
from sample import load_asked_run
from training import evaluate, session
from training.meter import Diverged
from training.run import Run

ROPE = {**SETTINGS["model"], "norm": "rmsnorm", "position": "rope", "rope_theta": 100.0}
GQA = {"model": ROPE, "attention": {"name": "gqa", "n_kv_head": 1}}
MUON = {"optim": {"name": "muon"}}
LINEAR, WSD = ({"schedule": {"name": name, "warmup_iters": 1, "lr_decay_iters": 6}} for name in ("linear", "wsd"))
# The other contestants have parameters alone: test_optim.py
WITH_BUFFERS = ("quack", "sigma_reparam", "all", "affine+spectral_cap")
RECIPES: dict[str, dict[str, Any]] = {
    **{name: {"qk_norm": asdict(QK_NORM_VARIANTS[name])} for name in ("none", "rms", "lp_learned")},
    "wsd": WSD,
    "muon, linear": MUON | LINEAR,
    "bf16, constant": {"dtype": "bfloat16", "schedule": {"name": "constant", "warmup_iters": 1}},  # knows no end
    "bf16, muon, wsd": {"dtype": "bfloat16"} | MUON | WSD,
    **{name: GQA | {group: asdict(of) for group, of in CONTESTANTS[name].items()} for name in WITH_BUFFERS},
    **{fault: {"fault": {"name": fault}} for fault in ("no_mask", "unshifted_labels")},
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_resumes_bit_for_bit(recipe: str, corpus: Path, tmp_path: Path) -> None:
    """With dropout; the two accumulated micro-batches draw from the same generator."""
    assert_halves_equal_straight(corpus, tmp_path, gradient_accumulation_steps=2, **RECIPES[recipe])
    momenta = [name for name in weights(tmp_path / "halves") if name.startswith("optimizer/momentum_buffer")]
    assert bool(momenta) == ("muon" in recipe)


def test_the_seed_decides_so_that_equality_is_not_an_accident(corpus: Path, tmp_path: Path) -> None:
    for seed in (1, 2):
        assert train.run(configured(corpus, tmp_path / f"{seed}", seed=seed)) == 0
    assert lines(tmp_path / "1") != lines(tmp_path / "2")


@pytest.mark.parametrize("first", [2, 5])
def test_a_changed_eval_interval_does_not_change_the_training(first: int, corpus: Path, tmp_path: Path) -> None:
    assert train.run(configured(corpus, tmp_path / "straight", eval_interval=1)) == 0
    intervals = {"log_interval": 1, "checkpoint_interval": 1}
    assert train.run(configured(corpus, tmp_path / "halves", max_iters=3, eval_interval=first, **intervals)) == 0
    assert train.run(configured(corpus, tmp_path / "halves", eval_interval=1)) == 0
    ours, theirs = weights(tmp_path / "straight"), weights(tmp_path / "halves")
    assert all((ours[name] == theirs[name]).all() for name in ours)
    straight, halves = lines(tmp_path / "straight"), lines(tmp_path / "halves")
    assert straight[3:] == halves[3:]
    for a, b in zip(straight, halves, strict=True):
        assert {k: a[k] for k in b} == b  # fewer evaluations, equal where there are any


def test_a_new_eval_interval_loses_no_evaluation(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the run dies before its next checkpoint, and goes on from that of the evaluation again."""
    intervals = {"log_interval": 100, "checkpoint_interval": 100}
    assert train.run(configured(corpus, tmp_path / "straight", eval_interval=2, **intervals)) == 0
    assert train.run(configured(corpus, tmp_path / "halves", max_iters=4, eval_interval=2, **intervals)) == 0
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(train, "learning_rate", lambda step, config: 0.01 / (step < 5))
        train.run(configured(corpus, tmp_path / "halves", eval_interval=100, **intervals))
    assert train.run(configured(corpus, tmp_path / "halves", eval_interval=100, **intervals)) == 0
    assert [line["iter"] for line in lines(tmp_path / "halves") if "val/loss" in line] == [0, 2, 4, 6]
    assert_same_run(tmp_path / "straight", tmp_path / "halves")


@needs_compiler
def test_a_resumed_compiled_run_is_bit_exact(corpus: Path, tmp_path: Path) -> None:
    one_layer = {**SETTINGS["model"], "n_layer": 1}  # half the time
    assert_halves_equal_straight(corpus, tmp_path, compile=True, model=one_layer)
    assert train.run(configured(corpus, tmp_path / "eager", model=one_layer)) == 0
    compiled, eager = (lines(tmp_path / name)[0]["val/loss"] for name in ("straight", "eager"))
    assert compiled == pytest.approx(eager, rel=1e-5)


def test_other_code_is_told_and_commits_are_kept(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    for max_iters, commit in ((2, "a"), (4, "b+12"), (5, "b+12"), (6, "a")):
        monkeypatch.setattr(session, "commit", lambda commit=commit: commit)
        assert train.run(configured(corpus, run, max_iters=max_iters)) == 0
    assert saved_json(run, "summary")["commit"] == "a, b+12" == checkpoint.load(run / "ckpt" / "latest").state["commit"]
    log = (run / "train.log").read_text()
    assert log.count("warning: commit") == log.count("warning: commit a -> b+12: other code trains the rest") == 1


def test_a_machine_that_rounds_otherwise_is_told(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    for max_iters in (2, 3):
        assert train.run(configured(corpus, run, max_iters=max_iters)) == 0
    assert "will not be equal" not in (run / "train.log").read_text()
    old, here = checkpoint.load(run / "ckpt" / "latest").state, vars(session.Session)["facts"].func
    elsewhere: dict[str, Any] = {"device": "cpu (2 threads)", "torch": "9.0", "kernels": not old["kernels"]}
    monkeypatch.setattr(session.Session, "facts", property(lambda of: replace(here(of), **elsewhere)))
    assert train.run(configured(corpus, run)) == 0
    changes = ", ".join(f"{key} {old[key]} -> {value}" for key, value in elsewhere.items())
    assert f"warning: {changes}: the rest of the run will not be equal" in (run / "train.log").read_text()


def test_a_run_leaves_busy_cpus_to_other_programs_and_keeps_its_threads_when_it_goes_on(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "DEFAULT_THREADS", 4)
    monkeypatch.setattr(torch, "set_num_threads", lambda n: monkeypatch.setattr(torch, "get_num_threads", lambda: n))

    def threads(idle: float | None, **changes: Any) -> tuple[int, str]:
        monkeypatch.setattr(session, "idle_cpus", lambda: idle)
        assert train.run(configured(corpus, tmp_path / "run", threads=None, **changes)) == 0
        log = (tmp_path / "run" / "train.log").read_text().splitlines()
        line = [line for line in log if "tokens an iteration" in line][-1]
        return read_json(tmp_path / "run" / "summary.json")["threads"], line

    assert threads(1.0, fresh=True)[0] == 4  # OMP_NUM_THREADS is set here: asked for
    monkeypatch.delenv("OMP_NUM_THREADS")
    for idle, used in ((None, 4), (3.6, 4), (3.4, 3), (1.6, 2), (9.0, 4), (0.2, 1)):
        n, line = threads(idle, fresh=True, max_iters=2)
        assert n == used and (f"{n} of 4 threads, other programs use the CPUs" in line) == (used < 4)
    n, line = threads(4.0, max_iters=4)  # goes on
    assert n == 1 and "1 of 4 threads, as it began" in line
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert threads(2.0, max_iters=2, fresh=True)[0] == 2
    monkeypatch.setattr(session, "DEFAULT_THREADS", 1)  # as under a launch with more workers
    assert threads(4.0, max_iters=4)[0] == 2
    assert "will not be equal" not in (tmp_path / "run" / "train.log").read_text()


def test_idle_cpus_are_those_that_no_other_program_used_and_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "AT_IMPORT", (10.0, 1.0, 100.0))
    monkeypatch.setattr(device, "has_quota", lambda: False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    cases = [(2.0, 103.0, 9.0, 3.0), (3.0, 102.0, 9.0, 4.0), (1.0, 104.0, 0.2, 3.8), (1.0, 100.0, 9.0, None)]
    for own, used, load, idle in cases:
        monkeypatch.setattr(device, "cpu_seconds", lambda own=own, used=used: (12.0, own, used))
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert device.idle_cpus.__wrapped__() == (None if idle is None else pytest.approx(idle))
        with monkeypatch.context() as patch:
            patch.setattr(device, "idle_cpus", lambda idle=idle: idle)
            assert ("other programs" in device.busy_note()) == (idle == 3.0), idle
    monkeypatch.setattr(device, "has_quota", lambda: True)
    assert device.idle_cpus.__wrapped__() is None


def test_cpu_time_is_of_our_cpus_without_idle_and_low_priority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat, quota = tmp_path / "stat", tmp_path / "cpu.max"
    stat.write_text("cpu 9 9 9 9 9 9 9\ncpu0 1 50 2 900 70 3 4 0\ncpu1 10 50 20 900 70 30 40 0\ncpu2 7 7 7 7 7 7 7\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(os, "nice", lambda _: 0)
    before = device.cpu_seconds(stat)
    assert before[2] == 110 / os.sysconf("SC_CLK_TCK") and device.cpu_seconds(stat)[1] >= before[1] > 0
    monkeypatch.setattr(os, "nice", lambda _: 5)
    assert device.cpu_seconds(stat)[1] == 0
    monkeypatch.delattr(os, "sched_getaffinity")
    assert device.cpu_seconds(tmp_path / "absent")[2] == 0 and not device.has_quota(quota)
    for content, limited in (("max 100000", False), ("400000 100000", True)):
        quota.write_text(content)
        assert device.has_quota(quota) == limited


def test_a_finished_run_is_not_handed_back_for_another_dtype(corpus: Path, tmp_path: Path) -> None:
    assert train.run(configured(corpus, tmp_path / "run")) == 0
    with pytest.raises(ConfigError, match=r"dtype=bfloat16: .*run is done in torch.float32; .*fresh=true"):
        train.run(configured(corpus, tmp_path / "run", dtype="bfloat16"))
    for dtype in ("float32", "auto"):
        assert train.run(configured(corpus, tmp_path / "run", dtype=dtype)) == 0


def test_what_changes_the_numbers_is_refused_and_named_and_a_moved_corpus_is_not(corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train.run(configured(corpus, run, max_iters=3)) == 0
    with pytest.raises(ConfigError, match=r"seed 1337 -> 7.*batch_size 4 -> 8|batch_size 4 -> 8.*seed 1337 -> 7"):
        train.run(configured(corpus, run, seed=7, batch_size=8))
    with pytest.raises(ConfigError, match=r"dtype=bfloat16 is torch.bfloat16 here.*set dtype=float32"):
        train.run(configured(corpus, run, dtype="bfloat16"))
    (run / "summary.json").unlink()  # as if killed at the very end
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    with pytest.raises(ConfigError, match="max_iters=2 must be >= 3"):
        train.run(configured(corpus, run, max_iters=2))
    text = corpus.read_text()
    corpus.write_text(text + "!")
    with pytest.raises(ConfigError, match="not the text"):
        train.run(configured(corpus, run))
    assert all(p.read_bytes() == before[p] for p in before)  # a refusal writes nothing
    corpus.write_text(text)
    assert train.run(configured(corpus, run, max_iters=3)) == 0 and (run / "summary.json").exists()
    assert train.run(configured(corpus.rename(tmp_path / "moved.txt"), run)) == 0


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "a digit": lambda raw: raw.replace(b"3", b"4", 1),
    "a line in the middle": lambda raw: raw.replace(b"{", b"[", 2).replace(b"[", b"{", 1),
    "truncated": lambda raw: raw[: len(raw) // 2],
    "empty": lambda raw: b"",
    "doubled": lambda raw: raw + raw,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", ["metrics.jsonl", "diagnostics.jsonl"])
def test_a_damaged_record_is_noticed_on_any_next_start(corpus: Path, tmp_path: Path, file: str, damage: str) -> None:
    run = tmp_path / "run"
    assert train.run(configured(corpus, run, max_iters=3, eval_interval=1, log_interval=1)) == 0
    raw = (run / file).read_bytes()
    (run / file).write_bytes(DAMAGES[damage](raw))
    assert train.run(configured(corpus, run, max_iters=3, eval_interval=1, log_interval=1)) == 1
    assert f"is done, but {run / file} has changed since" in (run / "train.log").read_text()
    assert train.run(configured(corpus, run, max_iters=5, eval_interval=1, log_interval=1)) == 0
    said = f"warning: {file} was damaged after iteration 3 was saved" in (run / "train.log").read_text()
    assert said == (damage != "doubled")  # the second copy is dropped, and nothing is lost
    assert [line["iter"] for line in Metrics.read(run / file)] == sorted({x["iter"] for x in Metrics.read(run / file)})
    log = (run / "train.log").read_text()
    assert train.run(configured(corpus, run, max_iters=7, eval_interval=1, log_interval=1)) == 0
    assert "was damaged" not in (run / "train.log").read_text().removeprefix(log)


def test_a_finished_run_with_damaged_files_says_so_and_without_its_last_weights_is_done(
    corpus: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert train.run(configured(corpus, run, max_iters=3)) == 0
    whole = (run / "summary.json").read_bytes()
    summary = json.loads(whole)
    for key in ("corpus_sha256", "dtype", "val/loss"):
        (run / "summary.json").write_text(json.dumps(summary | {key: "0" * 64}))
        assert train.run(configured(corpus, run, max_iters=3)) == 1
        assert f"is done, but {run / 'summary.json'} has changed since" in (run / "train.log").read_text(), key
        (run / "train.log").unlink()
    (run / "summary.json").write_bytes(whole)
    weights = (run / "ckpt" / "latest").resolve() / "model.safetensors"
    flip(weights)
    assert train.run(configured(corpus, run, max_iters=3)) == 1
    assert f"is done, but {weights}: checksum is wrong" in (run / "train.log").read_text()
    shutil.rmtree(weights.parent)
    assert [*(run / "ckpt").glob("step_*")] and train.run(configured(corpus, run, max_iters=3)) == 0
    assert "is done; fresh=true starts it anew" in (run / "train.log").read_text()


def test_a_run_that_failed_before_its_first_checkpoint_says_that_it_begins_anew(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(TypeError):
        patch.setattr(Run, "save", None)
        train.run(configured(corpus, tmp_path / "run", max_iters=3))
    assert train.run(configured(corpus, tmp_path / "run", max_iters=3)) == 0
    said = "the run was stopped before its first checkpoint: it starts again at iteration 0"
    assert said in (tmp_path / "run" / "train.log").read_text()


def test_a_run_whose_checkpoints_are_lost_or_corrupt_is_not_begun_anew_unasked(corpus: Path, tmp_path: Path) -> None:
    assert train.run(configured(corpus, tmp_path / "run", max_iters=3)) == 0
    for file in (tmp_path / "run" / "ckpt").glob("step_*/model.safetensors"):
        file.write_bytes(b"")
    with pytest.raises(ConfigError, match="cannot go on.*fresh=true"):
        train.run(configured(corpus, tmp_path / "run"))
    shutil.rmtree(tmp_path / "run" / "ckpt")
    for max_iters in (6, 3):  # unfinished, and finished
        with pytest.raises(ConfigError, match="reached iteration 3 but holds no checkpoint; fresh=true"):
            train.run(configured(corpus, tmp_path / "run", max_iters=max_iters))
        (tmp_path / "run" / "status.json").write_text("")
    assert train.run(configured(corpus, tmp_path / "run", fresh=True)) == 0


def test_a_corrupt_checkpoint_is_replaced_by_the_one_before_it_and_the_numbers_stay(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"eval_interval": 1, "checkpoint_interval": 1}
    assert train.run(configured(corpus, tmp_path / "straight", **changes)) == 0
    assert train.run(configured(corpus, tmp_path / "broken", max_iters=4, **changes)) == 0
    file = tmp_path / "broken" / "ckpt" / "latest" / "optimizer.safetensors"
    flip(file, file.stat().st_size // 2)
    assert train.run(configured(corpus, tmp_path / "broken", **changes)) == 0
    assert "optimizer.safetensors" in capsys.readouterr().out
    assert_same_run(tmp_path / "straight", tmp_path / "broken")


WRONG: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "of one element": lambda t: t.new_ones(() if t.dim() else 1), "of none": lambda t: t.new_empty(0),
    "short": lambda t: t.flatten()[1:], "doubled": lambda t: torch.cat([t.flatten()] * 2),
    "float64": torch.Tensor.double, "complex": lambda t: t.to(torch.complex64), "whole": torch.Tensor.long,
}  # fmt: skip


def test_a_tensor_that_does_not_fit_is_named_and_nothing_is_loaded(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(corpus, tmp_path / "run", max_iters=3, **MUON)
    assert train.run(config) == 0
    saved, copy = checkpoint.load(tmp_path / "run" / "ckpt" / "latest"), tmp_path / "copy"
    shutil.copytree(tmp_path / "run", copy, symlinks=True)
    moment = "exp_avg/transformer.wte.weight"
    names = [("optimizer", moment), ("optimizer", "step/transformer.ln_f.weight"), ("model", "transformer.wte.weight"),
             ("optimizer", "momentum_buffer/transformer.h.0.mlp.c_fc.weight")]  # fmt: skip
    wrong = [
        (group, name, kind, {name: WRONG[kind](saved.tensors[group][name])}) for group, name in names for kind in WRONG
    ]
    weight = saved.tensors["model"]["transformer.wte.weight"]
    wrong += [("model", "transformer.wte.weight", "NaN", {"transformer.wte.weight": weight * torch.nan})]
    wrong += [(group, "nothing", "more", {"nothing": weight.clone()}) for group in ("optimizer", "model")]
    monkeypatch.setattr(GPT, "load_state_dict", None)
    for group, name, kind, changed in wrong:
        tensors = {**saved.tensors, group: {**saved.tensors[group], **changed}}
        checkpoint.save(copy / "ckpt", 3, tensors, saved.state, best=True)
        with pytest.raises(ConfigError, match=f"(the weight|the optimizer's) {name}") as error:
            train.run(replace(config, out_dir=str(copy), max_iters=6))
        assert "\n" not in str(error.value), (name, kind)
        if group == "model":
            with pytest.raises(ConfigError, match=f"the weight {name}"):
                load_asked_run(str(copy), "latest", torch.device("cpu"))
    lost = {name: t for name, t in saved.tensors["optimizer"].items() if name != moment}
    checkpoint.save(copy / "ckpt", 3, {**saved.tensors, "optimizer": lost}, saved.state, best=True)
    with pytest.raises(ConfigError, match=f"the optimizer's {moment} is absent"):
        train.run(replace(config, out_dir=str(copy), max_iters=6))


def test_a_signal_saves_stops_and_says_how_to_go_on(tiny_run: list[str], tmp_path: Path, forked: Program) -> None:
    words = [*tiny_run, "max_iters=250", "eval_interval=125", "checkpoint_interval=250"]
    forked("train.py", *words, "out_dir=straight")
    for number, status in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        run = tmp_path / number.name
        command = [sys.executable, str(ROOT / "train.py"), *words, f"out_dir={number.name}"]
        metrics = run / "metrics.jsonl"
        with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
            while process.poll() is None and (not metrics.exists() or len(metrics.read_bytes().splitlines()) < 20):
                time.sleep(0.01)
            process.send_signal(number)
            out = process.communicate(timeout=180)[0]
        assert process.returncode == status
        assert f"stopped by {number.name}" in out and "the same command goes on from there" in out
        state = saved_json(run, "status")
        assert state["state"] == "stopped" and state["reason"] == number.name
        assert checkpoint.load(run / "ckpt" / "latest").step == state["iter"]
        assert [line["iter"] for line in Metrics.read(metrics)] == list(range(state["iter"]))
        forked("train.py", *words, f"out_dir={number.name}")
        assert_same_run(tmp_path / "straight", run)


def test_a_run_whose_terminal_is_gone_is_saved(tiny_run: list[str], tmp_path: Path) -> None:
    ours, its = pty.openpty()

    def in_its_terminal() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as it is without nohup
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    command = [sys.executable, str(ROOT / "train.py"), *tiny_run, "max_iters=100000", "out_dir=run"]
    pipes: Any = {"stdin": its, "stdout": its, "stderr": its}
    process = subprocess.Popen(command, cwd=tmp_path, **pipes, start_new_session=True, preexec_fn=in_its_terminal)
    os.close(its)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while process.poll() is None and (not metrics.exists() or len(metrics.read_bytes().splitlines()) < 20):
        os.read(ours, 4096)
    os.close(ours)  # as when a connection is lost
    process.send_signal(signal.SIGHUP)  # a shell between would send it, too
    assert process.wait(timeout=180) == 128 + signal.SIGHUP
    state = saved_json(tmp_path / "run", "status")
    assert (state["state"], state["reason"]) == ("stopped", "SIGHUP")
    assert checkpoint.load(tmp_path / "run" / "ckpt" / "latest").step == state["iter"] >= 19


def test_a_stopped_run_evaluates_as_it_resumes(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert train.run(configured(corpus, tmp_path / "straight", max_iters=6, eval_interval=2)) == 0
    whole, evaluated = train.evaluate, []

    def noted(run: train.Run, step: int, stop: Any) -> dict[str, Any]:
        evaluated.append(step)
        return whole(run, step, stop)

    def interrupted(*args: Any) -> Any:
        if len(evaluated) == 2 and args[0] == 3:
            signal.raise_signal(signal.SIGTERM)
        return learning_rate(*args)

    learning_rate = train.learning_rate
    monkeypatch.setattr(train, "evaluate", noted)
    monkeypatch.setattr(train, "learning_rate", interrupted)
    run = tmp_path / "run"
    assert train.run(configured(corpus, run, max_iters=6, eval_interval=2)) == 143
    assert evaluated == [0, 2] and checkpoint.load(run / "ckpt" / "latest").step == 4
    assert train.run(configured(corpus, run, max_iters=6, eval_interval=2)) == 0
    assert evaluated == [0, 2, 4, 6]
    assert_same_run(tmp_path / "straight", run)


@pytest.mark.parametrize("call", [4, 6])  # of its three, amid the second evaluation
def test_a_signal_amid_an_evaluation_saves_at_once_and_leaves_nothing_of_it(
    call: int, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train.run(configured(corpus, tmp_path / "straight", eval_iters=2)) == 0
    mean_loss, calls = evaluate.mean_loss, list[Any]()

    def signalled(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == call:
            signal.raise_signal(signal.SIGTERM)
        return mean_loss(*given)

    monkeypatch.setattr(evaluate, "mean_loss", signalled)
    run = tmp_path / "run"
    assert train.run(configured(corpus, run, eval_iters=2)) == 143
    assert checkpoint.load(run / "ckpt" / "latest").step == saved_json(run, "status")["iter"] == 2
    assert [line["iter"] for line in lines(run) if "val/loss" in line] == [0]
    assert train.run(configured(corpus, run, eval_iters=2)) == 0
    assert_same_run(tmp_path / "straight", run)


def test_a_signal_while_a_run_ends_cuts_nothing_off_and_stops_what_comes_after(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = RunDir.finish

    def interrupted(self: RunDir, summary: dict[str, Any] | None = None) -> None:
        whole(self, summary)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(RunDir, "finish", interrupted)
    assert train.run(configured(corpus, tmp_path / "run", plot=True)) == 130
    assert "done: val/loss" in (tmp_path / "run" / "train.log").read_text()
    assert (tmp_path / "run" / "curve.png").exists() and saved_json(tmp_path / "run", "status")["state"] == "done"


@pytest.mark.parametrize("diverges", [False, True])
def test_a_signal_in_the_last_evaluation_stops_what_comes_after(
    diverges: bool, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train.evaluate

    def interrupted(run: train.Run, step: int, stop: Any) -> dict[str, Any]:
        line = whole(run, step, stop)
        if step == run.session.config.max_iters:
            signal.raise_signal(signal.SIGINT)
            if diverges:
                raise Diverged({"iter": step, **line}, "val/loss nan")
        return line

    monkeypatch.setattr(train, "evaluate", interrupted)
    assert train.run(configured(corpus, tmp_path / "run")) == 130
    assert saved_json(tmp_path / "run", "status")["state"] == ("diverged" if diverges else "done")
