"""The live page of scripts/report.py watch=true: its server, its data while files grow, the page in a browser."""

import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from browser import Page
from conftest import ROOT, eventually, heed_ctrl_c
from helpers.refusals import TEXTS
from helpers.reports import Made, falling, state
from helpers.sweeps import frozen, tiny_sweep

from core.files import FileLock
from scripts.report import main
from scripts.reporting.live import CLIENTS, LivePage, run_content
from scripts.reporting.one_run import RunFiles
from sweeps import status
from sweeps.launch import trained
from sweeps.plan import read_plan
from sweeps.status import State
from training.config import to_yaml

HOSTILE = "<img src=x onerror=throw-1>"


@contextmanager
def served(folder: Path, *words: str) -> Iterator[int]:
    """The port of a live page. Ctrl-C ends it quietly."""
    command = [sys.executable, str(ROOT / "scripts" / "report.py"), "watch=true", *words]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=folder, preexec_fn=heed_ctrl_c, **pipes)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("http://127.0.0.1:"), process.communicate()
        yield int(line.split("/")[2].partition(":")[2])
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=20) == ("", "") and process.returncode == 0
    finally:
        process.kill()
        process.wait()


def append(path: Path, **line: Any) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def running(sweep: Made, setting: str, fold: int = 0, max_iters: int = 40) -> Path:
    path = sweep.plan(setting, 1, fold, max_iters=max_iters)
    state(path, state="running", iter=0)
    return path


@pytest.fixture
def sweep(tmp_path: Path) -> Made:
    (tmp_path / "runs").mkdir()
    return Made(tmp_path / "runs" / "made")


def test_the_server_answers_two_paths_to_its_own_host_alone(sweep: Made, tmp_path: Path) -> None:
    sweep.run("p=2", 0, falling(1.5))
    path = running(sweep, "p=3")
    with served(tmp_path, "sweep=made") as port:

        def answer(path: str, host: str | None = None, method: str = "GET") -> int:
            connection = HTTPConnection("127.0.0.1", port, timeout=60)
            connection.putrequest(method, path, skip_host=True)
            if host != "":
                connection.putheader("Host", host or f"127.0.0.1:{port}")
            connection.endheaders()
            response = connection.getresponse()
            response.read()
            return response.status

        assert answer("/") == answer("/data.json") == answer("/data.json", f"localhost:{port}") == 200
        assert answer("/p%3D2-fold0-s1/") == answer("/p=2-fold0-s1/data.json") == 200  # a run of the sweep
        paths = ["/../../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/plan.jsonl", "/data.json/", "/data.json?x=1",
                 "/.", "/page.html", "*", f"http://127.0.0.1:{port}/", "/\\..\\x", "/p=9/", "/p=2-fold0-s1", "/%2F",
                 "/p=2-fold0-s1/metrics.jsonl", "/p=2-fold0-s1/../data.json"]  # fmt: skip
        assert {path: answer(path) for path in paths} == dict.fromkeys(paths, 404)
        hosts = ["", "evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port}.evil.example", "127.0.0.2"]
        assert {(host, path): answer(path, host) for host in hosts for path in ("/", "/data.json")} == {
            (host, path): 403 for host in hosts for path in ("/", "/data.json")
        }
        assert answer("/", method="POST") == answer("/data.json", method="PUT") == 501
        with socket.socket() as other:
            assert other.connect_ex(("127.0.0.2", port)) != 0  # 0.0.0.0 would take it
        with socket.create_connection(("127.0.0.1", port)):
            assert answer("/data.json") == 200  # a browser's idle connection is in nobody's way
        for asked in (b"GET / HT", f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode()):
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # leaves by a reset
                client.sendall(asked)
        with contextlib.ExitStack() as clients:
            for _ in range(CLIENTS + 20):
                last = clients.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
            assert last.recv(1) == b""  # of more than CLIENTS it is closed
        eventually(lambda: answer("/data.json") == 200)
        shutil.rmtree(path)
        path.touch()
        assert answer("/p=3-fold0-s1/") == 503 and answer("/data.json") == 200


def test_only_new_lines_are_read_and_damaged_ones_are_dropped(sweep: Made) -> None:
    path = running(sweep, "p=2")
    run = RunFiles(sweep.path, read_plan(sweep.path)[0])
    append(path / "metrics.jsonl", **{"iter": 0, "val/loss": 4.0})
    assert run.update() == run.update() == 1
    first = (path / "metrics.jsonl").read_bytes()
    with (path / "metrics.jsonl").open("r+b") as file:
        file.write(first.replace(b"4.0", b"9.0"))  # not read again
        file.seek(0, os.SEEK_END)
        file.write("".join(f"{text}\n" for text in [*TEXTS, '{"iter": 5, "val/loss": 1e999}', '{"iter": -1}']).encode())
        file.write(b'{"iter": 10, "val/loss": 3.0, "train/loss": NaN, "grad_norm": "x"}\n{"iter": 20, "val/')
    for name, line in {
        "diagnostics": {"iter": 7, "attn/entropy/layer_0/head_1": 2.5, "attn/entropy": 2},
        "samples": {"iter": 7, "text": "\ud800 and"},
    }.items():
        (path / f"{name}.jsonl").write_text("".join(f"{text}\n" for text in [*TEXTS, json.dumps(line)]))
    assert run.update() == 2
    assert run.curves() == {"val/loss": {0: 4.0, 10: 3.0}} and run.progress()[2] == (3.0, 10)
    assert run.heads() == {"attn/entropy": [{"layer": 0, "head": 1, "value": 2.5}]}
    content = run_content(run).shown()
    assert "Iteration 7</summary><pre>? and</pre>" in content["body"]
    assert {*content["charts"]} == {"loss", "heads_attn_entropy"}
    json.loads(json.dumps(content), parse_constant=pytest.fail)
    with (path / "metrics.jsonl").open("ab") as file:
        file.write(b'loss": 2.0}\n')
    assert run.update() == 3 and run.progress()[2] == (2.0, 20)  # the torn line is whole
    (path / "new").write_bytes(first)
    (path / "new").replace(path / "metrics.jsonl")  # as a resumed run cuts it back
    assert run.update() == 4 and run.curves() == {"val/loss": {0: 4.0}}


def test_runs_that_the_plan_gains_later_are_shown(sweep: Made) -> None:
    sweep.plan("p=2", 1, 0)
    page = LivePage(sweep.path, None)
    sweep.plan("p=3", 1, 0)
    for path, said in (("/", "p=3"), ("/data.json", "2 pending")):
        assert said.encode() in page.answer(path)[1]  # type: ignore[index]


def test_a_page_of_70_runs_shows_a_new_line_within_5_seconds(sweep: Made, tmp_path: Path, browser: Page) -> None:
    lines = [{"iter": i, "train/loss": 4 - i / 5000, "grad_norm": 1.0, "tok_per_sec": 900.0} for i in range(5000)]
    for line in lines[::500]:
        line["val/loss"] = line["train/loss"] + 0.1
    metrics = "".join(json.dumps(line) + "\n" for line in lines)
    for n in range(68):
        path = running(sweep, f"{HOSTILE}/p={1 + n % 14}", n // 14, 5000)
        (path / "metrics.jsonl").write_text(metrics)
    append(path / "diagnostics.jsonl", iter=4500, **{f"attn/max_logit/layer_{i}/head_0": 3.0 + i for i in range(4)})
    append(path / "samples.jsonl", iter=4000, text="first")
    append(path / "samples.jsonl", iter=4500, text=f"To be {HOSTILE}")
    state(sweep.plan("p=4", 1, 9), state="failed", reason=f"out of memory {HOSTILE}")
    sweep.plan("p=5", 1, 9)
    failed = sweep.lines[-2]["id"]
    (sweep.path / "logs").mkdir()
    (sweep.path / "logs" / f"{failed}.log").write_text(f"Traceback {HOSTILE}\n")
    ready, text = "document.documentElement?.dataset.ready === 'true'", "document.body.innerText"
    browser.dark(False)
    with served(tmp_path, "sweep=made") as port, FileLock(path / "lock"):
        browser.send("Page.navigate", url=f"http://127.0.0.1:{port}/")
        browser.wait(ready)
        assert browser.evaluate("document.querySelectorAll('#runs tbody tr').length") == 70
        assert "1 running, 67 stopped, 1 failed, 1 pending" in browser.evaluate(text)
        first = browser.evaluate("document.querySelector('#runs tbody tr').innerText").split()
        assert "running" in first and first[-1] == "min" and f"{HOSTILE}/p=12".split()[-1] in first
        browser.evaluate("document.querySelector('details').open = true")

        append(path / "metrics.jsonl", **{"iter": 4900, "val/loss": 400.0})
        append(path / "metrics.jsonl", **{"iter": 5000, "val/loss": 0.5, "train/loss": 0.4})
        new = "some(row => row.value === 0.5)"  # in the panel of p = 12
        drawn = f"Object.entries(charts.loss.datasets).some(([n, rows]) => rows.{new} && views.loss.data(n).{new})"
        browser.wait(drawn, seconds=5)
        assert "0.5000" in browser.evaluate(text) and browser.evaluate("document.querySelector('details').open")
        browser.dark(True)  # while the page is open
        browser.wait("getComputedStyle(document.body).color === 'rgb(230, 232, 235)'")
        browser.wait(drawn)

        browser.evaluate("document.querySelector('#runs a').click()")  # the page of the run that trains
        browser.wait(f"{ready} && {text}.includes('Attention heads at iteration 4,500')")
        assert browser.evaluate("views['heads_attn_max_logit'].data('heads').length") == 4
        of_training = browser.evaluate("views['loss'].data('curves').filter(row => row.setting === 'training')")
        assert len(of_training) == 198  # 99 spans, as a mean and as a run
        assert browser.evaluate("[...document.querySelectorAll('pre')].map(one => one.textContent)") == [
            f"To be {HOSTILE}", "first"
        ]  # fmt: skip
        browser.send("Page.navigate", url=f"http://127.0.0.1:{port}/{failed}/")
        browser.wait(f"{ready} && {text}.includes('Traceback {HOSTILE}')")
        assert f"out of memory {HOSTILE}" in browser.evaluate(text)
        assert "qk_norm.p4" in browser.evaluate("document.querySelector('section:last-child').textContent")
        assert browser.evaluate("document.images.length") == 0  # names are text
        assert browser.problems == [] and {url.split("/")[2] for url in browser.requests} == {f"127.0.0.1:{port}"}


def test_what_a_reader_chose_in_a_chart_stays_when_new_lines_come(sweep: Made, tmp_path: Path, browser: Page) -> None:
    for fold, p in itertools.product(range(3), (2, 3)):
        sweep.run(f"p={p}", fold, falling(1.5 + 0.1 * fold))
    path = running(sweep, "p=2", 3)
    append(path / "metrics.jsonl", **{"iter": 0, "val/loss": 99.0})
    with served(tmp_path, "sweep=made") as port:
        browser.send("Page.navigate", url=f"http://127.0.0.1:{port}/")
        browser.wait("document.documentElement?.dataset.ready === 'true'")
        domain = "views['loss'].scale('y').domain()"
        assert browser.evaluate(domain)[1] < 4  # a run that begins does not set the axis
        choices = {"which": "every run", "band": False, "zoom_iteration": [5, 40], "zoom_low": [1, 3]}
        for name, value in choices.items():
            browser.evaluate(f"views.loss.signal('{name}', {json.dumps(value)}).run() && 1")
        click = "dispatchEvent(new MouseEvent('click', {bubbles: true}))"
        browser.evaluate(f"document.querySelector('.role-legend-symbol path').{click}")
        of_loss = ("signal('which')", "signal('band')", "data('shown_store').length", "scale('x').domain()[0]")
        chosen = f"[{', '.join(f'views.loss.{one}' for one in of_loss)}]"
        browser.wait(f"{chosen}[2] === 1")
        append(path / "metrics.jsonl", **{"iter": 20, "val/loss": 1.25})
        browser.wait("views['loss'].data('curves').some(row => row.value === 1.25)", seconds=10)
        assert browser.evaluate(chosen) == ["every run", False, 1, 5]
        assert browser.evaluate("document.querySelector('select').value") == "every run"
        assert browser.problems == []


def test_a_run_is_watched_or_refused_in_a_line(sweep: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = sweep.run("p=2", 0, falling(1.5))
    (path / "config.yaml").write_text(to_yaml(read_plan(sweep.path)[0].config))
    append(path / "samples.jsonl", iter=0, text="\ud800")
    assert main([f"run={path}"]) == 0 and "1.5000 at iteration 40" in (path / "report.html").read_text()
    capsys.readouterr()
    with served(tmp_path, f"run={path}") as port:
        with urlopen(f"http://127.0.0.1:{port}/data.json") as answer:
            data = json.load(answer)
        assert "lowest validation loss 1.5000 at iteration 40" in data["state"] and "loss" in data["charts"]
        refused = {
            f"port={port} run={path} watch=true": "is in use", "watch=true": "either sweep= or run=",
            f"run={path} port={port}": "setting of watch=true", f"run={tmp_path} watch=true": "holds no run",
            f"run={path} watch=true port=70000": "must be a port", f"run={path} sweep=x watch=true": "without sweep=",
        }  # fmt: skip
        for words, says in refused.items():
            assert main(words.split()) == 2
            error = capsys.readouterr().err
            assert (says in error or "already in use" in error) and error.count("\n") == 1, (words, error)


def test_a_log_that_is_a_link_is_not_shown(sweep: Made, tmp_path: Path) -> None:
    path, secrets = running(sweep, "p=2"), tmp_path / "secrets"
    secrets.mkdir()
    (secrets / f"{path.name}.log").write_text("a secret")
    (path / "status.json").write_text(json.dumps({"state": "failed", "iter": 0}))
    (path / "train.log").symlink_to(secrets / f"{path.name}.log")
    (sweep.path / "logs").symlink_to(secrets)
    run = RunFiles(sweep.path, read_plan(sweep.path)[0])
    run.update()
    assert run.state.state == "failed" and run.log() == ""
    (sweep.path / "logs").unlink()
    secrets.rename(sweep.path / "logs")
    assert run.log() == "a secret"


def test_status_draws_bars_and_the_best_loss_of_each_point(sweep: Made, capsys: pytest.CaptureFixture[str]) -> None:
    done = sweep.run("a/p=2", 0, falling(1.5, 30))
    append(running(sweep, "a/p=3", max_iters=100) / "metrics.jsonl", **{"iter": 40, "val/loss": 1.75})
    sweep.plan("a/p=3", 1, 1, max_iters=100)
    assert status.print_status(status.SweepPlace(sweep_dir=str(sweep.path))) == 0
    lines = capsys.readouterr().out.splitlines()
    (done / "status.json").write_text(json.dumps({"state": "diverged", "iter": 40, "reason": "\x1b[2J\r\ud800"}))
    status.print_status(status.SweepPlace(sweep_dir=str(sweep.path)))
    assert f"diverged: {done.name}: \\x1b[2J\\r\\ud800; " in capsys.readouterr().out
    assert lines == [
        f"{sweep.path}: 3 runs, 1 done, 1 stopped, 1 pending",
        f"         [#########...........]  46 %  lowest val/loss 1.5000 at iteration 30 of {done.name}",
        "  a/p=2  [####################] 100 %  lowest 1.5000  1 done",
        "  a/p=3  [####................]  20 %  lowest 1.7500  1 stopped, 1 pending",
    ]


def test_the_time_that_is_left_counts_iterations_of_runs_under_way(tmp_path: Path, corpus: Path) -> None:
    """Of four runs of 60 iterations one is done, one at iteration 30, one planned; the fourth was stopped at 45."""
    runs, folder = frozen(tiny_sweep(tmp_path, corpus, folds=[0])), tmp_path / "sweep"
    for run, reached in zip(runs[1:3], (30, 45), strict=True):
        (folder / run.id).mkdir()
        (folder / run.id / "metrics.jsonl").write_text(f'{{"iter": {reached}, "train/loss": 1.0}}\n')
    states = dict(zip([run.id for run in runs], map(State, ("done", "running", "stopped", "pending")), strict=True))
    assert trained(runs, states, folder) == 1 + 30 / 60 + 45 / 60
