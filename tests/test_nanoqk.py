"""nanoqk.py: from Python everything is as on the command line, and the process that calls it stays as it was."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pandas
import pytest
import torch
from conftest import ROOT, Program, eventually, exit_status, fork
from helpers.runs import assert_same_run
from helpers.sweeps import tiny_sweep
from torch import Tensor

import nanoqk
from model import ops
from model.gpt import CausalAttention


@pytest.fixture
def words(tiny_run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    return [*tiny_run, "qk_norm=rms", "attention=gqa", "attention.n_kv_head=1", "max_iters=6", "out_dir=run"]


def test_a_run_is_that_of_the_command_line(words: list[str], tmp_path: Path, forked: Program) -> None:
    run = nanoqk.train(*words)
    forked("train.py", *words, "out_dir=other")
    assert_same_run(tmp_path / "run", tmp_path / "other")
    assert run.config.qk_norm.name == "rms" and run.config.model.dropout == 0.2
    frame, lowest = pandas.DataFrame(run.metrics), run.summary["val/loss_min"]
    assert [*frame["iter"]] == [*range(7)] and frame["val/loss"].count() == 4 and frame["val/loss"].min() == lowest
    assert [line["iter"] for line in run.diagnostics] == [0, 2, 4, 6]
    assert repr(run) == f"Run('run'): done, lowest val/loss {lowest}"
    (tmp_path / "elsewhere").mkdir()
    with contextlib.chdir("elsewhere"):
        assert run.state == "done" and run.summary["val/loss_min"] == lowest and len(run.diagnostics) == 4
    asked: dict[str, Any] = {"num_samples": 2, "max_new_tokens": 30, "temperature": 0.7, "stop": "e"}
    said = forked("sample.py", "run=run", "start=to be", *(f"{key}={value}" for key, value in asked.items())).stdout
    assert "".join(f"{text}\n---------------\n" for text in run.sample("to be", **asked)) == said


def test_logits_and_attention_are_the_models_own(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run = nanoqk.train(*words, "softmax=sink", "logits=softcap", "logits.cap=2")
    text = "to be or not t"
    for end in (1, len(text)):  # by a forward of the text up to its token
        idx = torch.tensor([run.tokenizer.encode(text[:end]).tolist()])
        assert run.logits(text)[end - 1].allclose(run.model(idx)[0][0, -1], atol=1e-5)
    monkeypatch.setattr(ops, "queries_at_once", lambda *_: 4)  # maps in parts, as of a long text
    maps = run.attention(text)
    assert [weights.shape for weights in maps] == [(2, 14, 14)] * 2 and run.model.attentions[0].probe is None
    seen: list[tuple[Tensor, Tensor]] = []

    def attend(self: CausalAttention, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        seen.append((v[0], of_class(self, q, k, v, scale)[0]))
        return seen[-1][1][None]

    of_class = CausalAttention.attend
    monkeypatch.setattr(CausalAttention, "attend", attend)
    run.logits(text)
    for weights, (v, y) in zip(maps, seen, strict=True):  # v (1, T, hs), y (2, T, hs)
        assert (weights @ v).allclose(y, atol=1e-5) and not weights.triu(1).any()


def test_a_divergence_is_a_run_that_says_so(words: list[str]) -> None:
    run = nanoqk.train(*words, "optim.learning_rate=1e30", "grad_clip=0")
    assert run.state == "diverged" and "train/loss nan" in run.summary["reason"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_and_then_raises(words: list[str], number: int) -> None:
    before = signal.signal(number, signal.default_int_handler)

    def stop() -> None:
        eventually(lambda: Path("run/metrics.jsonl").exists() and nanoqk.Run("run").metrics)
        signal.pthread_kill(threading.main_thread().ident or 0, number)

    thread = threading.Thread(target=stop)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt) as error:
            nanoqk.train(*words, "max_iters=2000", "eval_interval=2000", "checkpoint_interval=2000")
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        thread.join()
        signal.signal(number, before)
    assert str(error.value) == ("stopped by SIGHUP" if number == signal.SIGHUP else "")  # else by the handler
    run = nanoqk.Run("run", checkpoint="latest")
    assert run.state == "stopped" and run.summary == {} and 0 < run.metrics[-1]["iter"] < 2000
    assert len(run.sample("to", num_samples=1, max_new_tokens=2)[0]) == 4


def test_an_interrupt_that_is_repeated_ends_a_sweeps_workers(tmp_path: Path, corpus: Path) -> None:
    sweep, folder = tiny_sweep(tmp_path, corpus, "max_iters=100000", "checkpoint_interval=100000"), tmp_path / "sweep"
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def stop() -> None:
        eventually(lambda: any(file.stat().st_size for file in folder.glob("*/metrics.jsonl")))
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        eventually(lambda: signal.getsignal(signal.SIGINT) is signal.default_int_handler)  # the first was received
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=stop)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            nanoqk.sweep(f"sweep={sweep}", f"sweep_dir={folder}", "launcher.workers=1")
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)
    eventually(lambda: [run.state for run in nanoqk.runs(folder)] == ["stopped"])


def test_errors_are_the_command_lines(words: list[str], tmp_path: Path, corpus: Path, forked: Program) -> None:
    for script, *given in (
        ["train.py", *words, "model.n_embd=15"],
        ["train.py", "max_iters=[1\n2"],
        ["sweeps/launch.py", f"sweep={tiny_sweep(tmp_path, corpus)}", "sweep.fold=[0]"],
    ):
        with pytest.raises(nanoqk.ConfigError) as error:
            (nanoqk.train if script == "train.py" else nanoqk.sweep)(*given)
        assert forked(script, *given, status=2).stderr == f"error: {error.value}\n"
    run = nanoqk.train(*words)
    with pytest.raises(nanoqk.ConfigError, match="17 tokens: give 1 to 16"):
        run.attention("to be or not to b")
    for settings in ({"temprature": 1}, {"device": "cpu"}, {"num_samples": 0}, {"start": ""}, {"start": "é"}):
        with pytest.raises(nanoqk.ConfigError, match="temperature|takes the run's|must be|at least one|'é'"):
            run.sample(**settings)


def test_a_strangers_run_raises_what_the_module_says(words: list[str], tmp_path: Path) -> None:
    run, folder = nanoqk.train(*words), tmp_path / "run"
    (folder / "status.json").write_text(json.dumps({"state": "\x1b]0;owned\x07"}))
    assert "\x1b" not in repr(run) and "owned" in repr(run)
    (folder / "status.json").write_text(json.dumps({"state": "running"}))
    (folder / "lock").unlink()
    (folder / "lock").mkdir()
    assert "running" in repr(run)
    bad: list[Callable[[], object]] = [lambda: nanoqk.Run("a\0"), lambda: nanoqk.Run("x" * 5000)]
    bad += [lambda: nanoqk.Run(folder, device="x"), lambda: nanoqk.runs("a\0")]
    for content in (b"\xff", b"[1", b"a: " + b"x" * 2_000_000):
        (folder / "config.yaml").write_bytes(content)
        with pytest.raises(nanoqk.ConfigError, match="has a config.yaml that cannot be read"):
            _ = nanoqk.Run(folder).config
    for call in bad:
        with pytest.raises(nanoqk.ConfigError):
            call()
    with pytest.raises(nanoqk.ConfigError, match="run=nowhere does not exist"):
        nanoqk.Run("nowhere")


def test_threads_take_turns_and_the_process_stays_as_it_was(words: list[str], tmp_path: Path) -> None:
    nanoqk.train(*words)
    before = torch.get_rng_state()
    torch.set_num_threads(2)
    with ThreadPoolExecutor(3) as threads:
        runs = [*threads.map(lambda name: nanoqk.train(*words, f"out_dir={name}"), "abc")]
    assert torch.get_num_threads() == 2 and torch.get_rng_state().equal(before)
    torch.set_num_threads(1)
    for run in runs:
        assert_same_run(tmp_path / "run", run.path)


def test_a_forked_process_does_not_compute(words: list[str]) -> None:
    run = nanoqk.train(*words)

    def compute() -> int:
        for call in (lambda: nanoqk.train(*words), run.sample, lambda: run.logits("to be")):
            with pytest.raises(nanoqk.ConfigError, match="a forked process cannot compute: start it by .*spawn"):
                call()
        return 0

    run.sample(num_samples=1, max_new_tokens=1)
    assert exit_status(fork(compute)) == 0


def test_it_works_in_a_folder_with_modules_of_our_names(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for file in ("data/__init__.py", "model.py", "train.py"):
        (tmp_path / file).write_text("mine = 1\n")
    here = {**os.environ, "PYTHONPATH": str(ROOT)}
    python = partial(subprocess.run, cwd=tmp_path, env=here, capture_output=True, text=True)
    ours = python([sys.executable, "-c", "import nanoqk, sys; print(nanoqk.train_run, sys.path[0])"])
    assert ours.stdout.startswith("<function run at") and ours.stdout.endswith("> \n"), ours.stderr
    theirs = python([sys.executable, "-c", "import model, nanoqk"]).stderr.splitlines()[-1]
    assert theirs.startswith("ImportError: nanoqk needs its own module model, but has got") and "model.py" in theirs


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{os.environ.get('PYTHONPATH', '')}")
    small = '"max_iters=4", "eval_interval=4", "model.n_layer=2", "model.n_embd=16", "wandb.mode=disabled"'
    notebook = nbformat.read(ROOT / "docs" / "first_steps.ipynb", 4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for cell in cells:
        cell.source = cell.source.replace('"wandb.mode=disabled"', small).replace('"max_iters=300", ', "")
        cell.source = cell.source.replace('"sweep=two_norms"', '"sweep=two_norms", "launcher.workers=1"')
    assert len(cells) == 7 and not any(cell.outputs for cell in cells)  # committed without outputs
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert sum("image/png" in str(cell.outputs) for cell in cells) == 2  # the curve and the map
    assert "rms minus none" in str(cells[5].outputs)
    assert {run.state for run in nanoqk.runs(tmp_path / "runs" / "two_norms")} == {"done"}
