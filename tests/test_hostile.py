"""A stranger's files: none runs code, leads out of its folder or fills the memory; each ends in one clean line."""

import hashlib
import itertools
import json
import os
import pickle
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import fork
from helpers.refusals import NOT_FILES, TEXTS, Bomb
from helpers.reports import COMPARE, LOSSES, Made, falling, made, sweep_of, text_of
from helpers.runs import configured, fresh_copy
from helpers.sweeps import frozen, tiny_sweep
from variants import FULL

import train
from core import checkpoint
from core.cli import run_script
from core.files import file_sha256, sealed, write_json
from core.process import guarded
from core.schema import ConfigError
from core.wandb_follower import recordings
from sample import SampleConfig, sample
from scripts import report
from scripts.compare import CompareOptions, compare_runs
from scripts.export_hf import ExportOptions, export_run
from scripts.reporting import charts
from scripts.reporting.live import LivePage
from sweeps import status
from sweeps.launch import without_stored
from sweeps.plan import read_about
from training.config import TrainConfig

__all__ = ["made"]  # a fixture
STRIDE = 1 if FULL else 9  # of the hostile files of a run, each ninth

FILES = ["plan.jsonl", "sweep.json", "status.json", "summary.json", "metrics.jsonl", "evaluation.json", "lock"]


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_json_of_a_wrong_shape_is_one_line(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the file's whole content, as one more line, and as the value of each key in turn."""
    made = Made(tmp_path / "sweep", parts={"a": {}}, compare=COMPARE, paper={"name": "x", "val_loss": {"*/p=2": 1.4}})
    for p, fold in itertools.product((2, 3), (0, 1)):
        made.run(f"a/p={p}", fold, falling(LOSSES[p][fold]))
    run = next(made.path.glob("*/status.json")).parent
    place = (made.path if file in ("plan.jsonl", "sweep.json") else run) / file
    whole = place.read_text() if place.exists() else '{"about": {"metrics": {"cloze": {"acc": 0.5}}}}'
    contents: list[Any] = [*TEXTS, *(f"{whole}{text}" for text in (TEXTS if file.endswith(".jsonl") else TEXTS[:1]))]
    if file.endswith(".json"):
        known = json.loads(whole)
        values = [json.loads(TEXTS[i]) for i in (1, 4, 5)]
        contents += [json.dumps(known | {key: value}) for value in values for key in known]
        contents += ['{"about": {"metrics": 3}}', '{"about": {"metrics": {"cloze": 3}}}']
    for content in (*contents, *NOT_FILES):
        shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=True)
        if content in NOT_FILES:
            NOT_FILES[content](place)
        else:
            place.write_text(content + "\n")
        with suppress(ConfigError, OSError):
            text_of(sweep_of(made.path)).encode()
        with suppress(ConfigError, OSError):
            LivePage(made.path, None).answer("/data.json")
        exit_status = run_script(status.SweepPlace, status.print_status, "", [f"sweep_dir={made.path}"])
        said = capsys.readouterr().err
        assert exit_status in (0, 1, 2) and said.count("\n") == (exit_status > 0), (content[:200], said)


def test_a_report_deletes_no_file_that_no_report_writes(tmp_path: Path) -> None:
    for name in ("thesis.tex", "old.svg"):
        (tmp_path / name).write_text("mine")
    for drawn in (["thesis.tex", "old.svg", "../x.svg", 5, ["a"]], 5):
        (tmp_path / "provenance.json").write_text(json.dumps({"sha256": {"thesis.tex": "0"}, "drawn": drawn}))
        report.write_files(tmp_path, {}, {})
        assert {file.name for file in tmp_path.iterdir()} == {"thesis.tex", "provenance.json"}


def test_a_control_character_in_a_name_is_a_mark_in_the_figure() -> None:
    spec = {"data": {"values": [{"x": "r\x1bms\0"}]}, "mark": "text", "encoding": {"text": {"field": "x"}}}
    assert b"r?ms?" in charts.svg(charts.Figure("a", "title", spec, ""))


def test_a_name_with_tags_is_text_in_table_md(made: Made) -> None:
    about = json.loads((made.path / "sweep.json").read_text())
    about["sweep"]["title"] = "A <script>throw 1</script> <b>title</b> with p < 2"
    (made.path / "sweep.json").write_text(json.dumps(about))
    table = text_of(sweep_of(made.path))
    assert "# A &lt;script>throw 1&lt;/script> &lt;b>title&lt;/b> with p < 2" in table and "<script" not in table


# -----------------------------------------------------------------------------
# A stranger's run


SHAPE = b'{"transformer.wte.weight":{"dtype":"F32","shape":[0,9223372036854775807],"data_offsets":[0,0]}}'


def hostile_texts(exploded: Path) -> dict[str, bytes]:
    """What a stranger may put in place of a file of a run, by kind."""
    touch = f"touch {exploded}"
    aliases = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30))
    return {
        "pickle": pickle.dumps(Bomb(exploded)),
        "target": f"_target_: os.system\n_args_: ['{touch}']\nmodel: {{_target_: os.system}}\n".encode(),
        "target in JSON": json.dumps({"_target_": "os.system", "_args_": [touch], "model": {"_target_": "x"}}).encode(),
        "tag": f"!!python/object/apply:os.system ['{touch}']\n".encode(),
        "tag inside": f"model: !!python/object/apply:os.system ['{touch}']\n".encode(),
        "resolver": b"out_dir: ${oc.env:HOME}\nmodel: ${oc.create:{}}\n",
        "YAML bomb": b"a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + aliases.encode(),
        "JSON bomb": b'{"a":' * 200_000 + b"1" + b"}" * 200_000,
        "long number": b'{"iter": ' + b"9" * 1_000_000 + b"}",
        "oversized header": (2**62).to_bytes(8, "little") + b"{}",
        "header of a gigabyte": (2**30).to_bytes(8, "little") + b"{}",
        "shape": len(SHAPE).to_bytes(8, "little") + SHAPE,
        "nothing": b"",
    }


GIBIBYTE = 2**30
PROGRAMS: dict[str, Callable[[Path, TrainConfig], int]] = {
    "train": lambda run, config: guarded(lambda: train.run(replace(config, out_dir=str(run), max_iters=6))),
    "sample": lambda run, _: run_script(SampleConfig, sample, "", [f"run={run}", "start=to", "max_new_tokens=2"]),
    "export": lambda run, _: run_script(ExportOptions, export_run, "", [f"run={run}", f"out={run.parent}/exported"]),
    "compare": lambda run, _: run_script(
        CompareOptions, compare_runs, "", [f"a={run}", f"b={run.parent}/intact", f"out={run.parent}/compare.html"]
    ),
    "report": lambda run, _: report.main([f"run={run}"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_no_file_of_a_run_runs_code_or_fills_memory(
    program: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file of a run in turn, and each file of its checkpoint under a manifest that fits it."""
    config = configured(corpus, tmp_path / "run", max_iters=4)
    assert train.run(config) == 0
    shutil.copytree(tmp_path / "run", tmp_path / "intact")  # compare.py's b
    # compare.py's page holds 800 kB of our own JavaScript, and 200 tokens of each side, which take most of its time
    monkeypatch.setattr("scripts.reporting.page.vega", lambda: "")
    monkeypatch.setattr("scripts.compare.NEW_TOKENS", 2)
    assert limited(lambda: PROGRAMS[program](tmp_path / "run", config), tmp_path / "stderr")[0] == 0
    exploded, copy = tmp_path / "exploded", tmp_path / "copy"
    files = [p for p in (tmp_path / "run").rglob("*") if p.is_file() and not p.is_symlink()]
    files = [p.relative_to(tmp_path / "run") for p in files]
    assert {file.suffix for file in files if file.parent.parent.name == "ckpt"} == {".safetensors", ".json"}
    tried = 0
    hostile: dict[str, Any] = {**hostile_texts(exploded), **NOT_FILES}
    for file, (kind, content) in itertools.product(files, hostile.items()):
        if tried % STRIDE and kind not in ("pickle", "pipe"):
            tried += 1
            continue
        tried += 1
        shutil.rmtree(tmp_path / "exported", ignore_errors=True)
        fresh_copy(tmp_path / "run", copy)
        if kind in NOT_FILES:
            (copy / file).unlink()
            content(copy / file)
        else:
            (copy / file).write_bytes(content)
        in_step = kind not in NOT_FILES and file.parent.name.startswith("step_")
        if in_step and file.name != "MANIFEST.json":  # sealed anew, as a stranger can
            step = copy / file.parent
            manifest = json.loads((step / "MANIFEST.json").read_text())
            found = {name: checkpoint.measure(step / name) for name in manifest["files"]}
            (step / "MANIFEST.json").write_text(checkpoint.render(manifest["format"], manifest["step"], found))
        status, peak, said = limited(lambda: PROGRAMS[program](copy, config), tmp_path / "stderr")
        assert status in (0, 1, 2) and peak < 2 * GIBIBYTE, (str(file), kind, status, peak)
        assert "Traceback" not in said, (str(file), kind, said)
        assert not exploded.exists(), (str(file), kind)
    pickle.loads(hostile_texts(exploded)["pickle"])
    assert exploded.exists()  # the bomb was live
    print(f"{tried} hostile files read by {program}")


def limited(work: Callable[[], int], stderr: Path) -> tuple[int, int, str]:
    """work() in a process of its own, for at most a minute: exit status, peak memory in bytes, standard error."""

    def call() -> int:
        sys.stderr = stderr.open("w", buffering=1)
        os.dup2(sys.stderr.fileno(), 2)  # of libraries
        return work()

    pid = fork(call)
    timer = threading.Timer(60, os.kill, (pid, signal.SIGKILL))
    timer.start()
    _, status, used = os.wait4(pid, 0)
    timer.cancel()
    return os.waitstatus_to_exitcode(status), used.ru_maxrss * 1024, stderr.read_text(errors="replace")


@pytest.mark.slow
def test_links_and_paths_out_of_a_run_are_not_followed(corpus: Path, tmp_path: Path) -> None:
    config = configured(corpus, tmp_path / "run", max_iters=4)
    assert train.run(config) == 0
    victim, copy = tmp_path / "victim", tmp_path / "copy"
    secret = b'{"iter": 0, "secret": "do not trample on me"}\n'
    written = ("config.yaml", "status.json", "summary.json", "metrics.jsonl")
    names = [f"{name}.{threading.get_native_id()}.tmp" for name in written]
    names += ["curve.png", "samples.jsonl", *(p.name for p in (tmp_path / "run").iterdir() if p.is_file())]
    for name in names:
        fresh_copy(tmp_path / "run", copy)
        victim.write_bytes(secret)
        (copy / name).unlink(missing_ok=True)
        (copy / name).symlink_to(victim)
        with pytest.raises(ConfigError, match="is a link"):
            train.run(replace(config, out_dir=str(copy), max_iters=4, fresh=name.startswith("summary.json.")))
        assert victim.read_bytes() == secret, name
    recording = tmp_path / "run" / "wandb" / "offline-run-1" / "run-x.wandb"
    recording.parent.mkdir(parents=True)
    recording.symlink_to(victim)
    assert recordings(tmp_path / "run") == []
    shutil.rmtree(tmp_path / "run" / "wandb")
    fresh_copy(tmp_path / "run", copy)
    step = checkpoint.step_dirs(copy / "ckpt")[0]
    for name in ("../../../victim", "/dev/zero", "../state.json"):
        manifest = json.loads((step / "MANIFEST.json").read_text())
        listed = {name: {"size": len(secret), "sha256": hashlib.sha256(secret).hexdigest()}}
        (step / "MANIFEST.json").write_text(checkpoint.render(manifest["format"], manifest["step"], listed))
        with pytest.raises(checkpoint.CorruptCheckpoint, match="no file of a checkpoint"):
            checkpoint.load(step)
    fresh_copy(checkpoint.step_dirs(tmp_path / "run" / "ckpt")[0], step)
    (step / "model.safetensors").unlink()
    (step / "model.safetensors").symlink_to("/dev/zero")
    with pytest.raises(checkpoint.CorruptCheckpoint, match="model.safetensors is a link out of its folder"):
        checkpoint.load(step)


def test_a_stored_run_of_another_eval_interval_is_refused(tmp_path: Path, corpus: Path) -> None:
    (run, *_) = frozen(tiny_sweep(tmp_path, corpus, grid={}))
    rows = f"id,status,iter,eval_interval\n{run.id},done,{run.config.max_iters},7\n"
    (tmp_path / "runs.csv").write_text(rows)
    write_json(tmp_path / "provenance.json", {"sha256": {"runs.csv": file_sha256(tmp_path / "runs.csv")}})
    with pytest.raises(ConfigError, match=f"{run.id} was evaluated every 7 iterations; this sweep has eval_interval=2"):
        without_stored([run], str(tmp_path))
    (tmp_path / "runs.csv").write_text(rows.replace("7", "2"))
    with pytest.raises(ConfigError, match="it was changed"):
        without_stored([run], str(tmp_path))
    abouts: list[Any] = [{"sha256": []}, {"sha256": {"runs.csv": file_sha256(tmp_path / "runs.csv")}, "config": []}]
    for about in abouts:
        write_json(tmp_path / "provenance.json", about)
        with pytest.raises(ConfigError, match="has no runs.csv that can be read"):
            without_stored([run], str(tmp_path))


LINES: list[dict[str, Any]] = [
    *({"id": outside} for outside in ("../../outside", "/etc", "..", ".", "a/b", "")),
    *({"id": value} for value in ("a\0b", "a\x1b[2J", "a" * 256, ["a"], 3)),
    {"settings": []}, {"settings": [5]}, {"settings": "a"}, {"seed": "1"}, {"fold": [0]}, {"overrides": [1]},
    {"config": []}, {"config": {"max_iters": 0}}, {"seed": "LONG"},
]  # fmt: skip


def test_a_strange_line_of_a_plan_is_refused_by_every_program_that_reads_it(
    made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (made.path / "plan.jsonl").read_text().splitlines()
    for strange in LINES:
        changed = json.dumps(json.loads(lines[0]) | strange).replace('"LONG"', "9" * 5000)
        (made.path / "plan.jsonl").write_text("\n".join([changed, *lines[1:]]) + "\n")
        with pytest.raises(ConfigError, match=r"plan\.jsonl that cannot be read"):
            sweep_of(made.path)
        with pytest.raises(ConfigError, match=r"plan\.jsonl that cannot be read"):
            LivePage(made.path, None)
        assert run_script(status.SweepPlace, status.print_status, "", [f"sweep_dir={made.path}"]) == 2
        assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "about",
    [
        {"sweep": {"title": 3}}, {"sweep": {"parts": {"a": {"title": [1]}}}}, {"sweep": []}, {"sweep": {"parts": 3}},
        {"frozen": 3}, {"frozen": [1]}, {"frozen": [{}]}, {"frozen": [{"overrides": [5]}]}, {"name": ["x"]},
        {"frozen": [{"overrides": {"a": "b"}}]},
    ],
)  # fmt: skip
def test_a_strange_sweep_json_is_refused_by_reports_and_launches(about: dict[str, Any], made: Made) -> None:
    file = made.path / "sweep.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | about))
    for read in (sweep_of, read_about):
        with pytest.raises(ConfigError, match=r"sweep\.json that cannot be read: "):
            read(made.path)


def test_a_lone_surrogate_ends_no_report(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in made.path.glob("*/summary.json"):
        content = {key: value for key, value in json.loads(file.read_text()).items() if key != "sha256"}
        write_json(file, sealed(content | {"commit": "\ud800"}))
    monkeypatch.chdir(tmp_path)
    assert report.main([f"sweep_dir={made.path}", "out=out"]) == 0
    assert "\\ud800" in (tmp_path / "out" / "provenance.json").read_text()


@pytest.mark.slow
def test_no_key_is_in_any_file_that_a_run_writes(tiny_run: list[str], tmp_path: Path, forked: Any) -> None:
    keys = {"WANDB_API_KEY": "a1b2c3d4" * 5, "HF_TOKEN": "hf_" + "q" * 34, "AWS_SECRET_ACCESS_KEY": "s3cr3t" * 6}
    forked("train.py", *tiny_run, "max_iters=4", "wandb.mode=offline", "out_dir=run", env=keys)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    for path, key in itertools.product(files, keys.values()):
        assert key.encode() not in path.read_bytes(), path
