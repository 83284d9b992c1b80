"""training/state.py: what a checkpoint has beside its tensors; and that a run is looked at before anything is built."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from helpers.runs import configured

import train
from core import checkpoint
from core.schema import ConfigError
from sample import load_asked_run
from training import resume, session
from training.state import Facts, LowestLoss, Readings, RunState

STATES = sorted((ROOT / "tests" / "fixtures" / "v0").glob("*/ckpt/step_*/state.json"))
STATE = RunState(
    7, {"seed": 1}, {"name": "char"}, Facts(commit="a, b", threads=2, start_up_warnings=["w"]), True,
    Readings(1.5, {"qk_clip/max_logit": 3.0}, 12.0, 9.0), (1.25, 5), {"metrics.jsonl": "5eed"},
)  # fmt: skip


def as_written(state: RunState) -> dict[str, Any]:
    """As core.checkpoint.save() writes it: with the records."""
    return json.loads(json.dumps({**state.to_json(), "records": state.records}))


def test_a_state_is_read_as_it_was_written() -> None:
    assert RunState.from_json(as_written(STATE)) == STATE
    assert STATE.facts.commits == ["a", "b"] and Facts().to_json() == {"commit": None}


@pytest.mark.parametrize("file", STATES, ids=lambda file: f"{file.parts[-4]}-{file.parent.name}")
def test_a_state_of_an_earlier_version_loses_nothing(file: Path) -> None:
    saved = json.loads(file.read_text())
    written = as_written(RunState.from_json(saved))
    assert {key: written[key] for key in saved} == saved
    assert written.keys() - saved.keys() <= {"evaluated", "records", "commit"}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"step": -5}, "state.json: step=-5 must be an integer >= 0"),
        ({"step": "7"}, "state.json: step=7 must be an integer"),
        ({"step": True}, "state.json: step=true must be an integer"),
        ({"qk_clip": 3}, "state.json: qk_clip=3 must be a group"),
        ({"qk_clip": {"a": "b"}}, "must be numbers"),
        ({"seconds": "a"}, "state.json: seconds=a must be a number"),
        ({"train_seconds": -1.0}, "state.json: train_seconds=-1.0 must be a finite number >= 0"),
        ({"lowest": [1.0]}, "state.json: lowest=[1.0] must be a list of 2 numbers"),
        ({"lowest": [1.0, -7]}, "state.json: lowest=(1.0, -7) must be a finite loss, and its iteration"),
        ({"threads": -5}, "state.json: threads=-5 must be >= 1"),
        ({"ranks": "two"}, "state.json: ranks=two must be an integer or null"),
        ({"config": []}, "state.json: config=[] must be a group"),
        ({"plugins": {"my_norm": 3}}, "state.json: plugins={'my_norm': 3} must hold text"),
        ({"records": {"a": [1]}}, "state.json: records={'a': [1]} must hold text"),
        ({"start_up_warnings": [None]}, "state.json: start_up_warnings=[None] must hold text"),
        ({"evaluated": 1}, "state.json: evaluated=1 must be true or false"),
    ],
)
def test_a_wrong_type_or_value_is_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        RunState.from_json({**as_written(STATE), **changes})
    assert says in str(error.value)


def test_a_sealed_state_of_a_wrong_type_is_refused_by_training_and_sampling(corpus: Path, tmp_path: Path) -> None:
    config = configured(corpus, tmp_path / "run", max_iters=2)
    assert train.run(config) == 0
    saved = checkpoint.load(tmp_path / "run" / "ckpt" / "latest")
    for changes in ({"tokenizer": 3}, {"step": -5}, {"train_seconds": 1e299}, {"plugins": {"a": 1}}, {"config": [1]}):
        state = {**saved.state, **changes}
        step = checkpoint.save(tmp_path / "run" / "ckpt", saved.step, saved.tensors, state, best=True)
        with pytest.raises(ConfigError, match=f"state.json: {next(iter(changes))}="):
            train.run(replace(config, max_iters=4))
        with pytest.raises(ConfigError, match=f"state.json: {next(iter(changes))}="):
            load_asked_run(str(step), "best", torch.device("cpu"))


def test_the_lowest_loss_before_a_step_is_that_of_an_earlier_evaluation() -> None:
    lowest = LowestLoss()
    assert lowest.before_step(0) is None
    lowest.update(0, 2.0, extra=False)
    assert lowest.before_step(0) is None and lowest.before_step(5) == (2.0, 0)
    lowest.update(10, 1.0, extra=False)
    assert lowest.before_step(10) == (2.0, 0) and lowest.before_step(11) == (1.0, 10)


# -----------------------------------------------------------------------------
# Look first


def never(*_: object, **__: object) -> Any:
    raise AssertionError("this was not needed")


def test_a_finished_run_reads_its_text_and_builds_no_model(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configured(corpus, tmp_path / "run")
    assert train.run(config) == 0
    monkeypatch.setattr(session, "GPT", never)
    assert train.run(config) == 0 and "is done; fresh=true starts it anew" in capsys.readouterr().out
    corpus.write_text(corpus.read_text() + "more")
    for dry_run in (False, True):
        with pytest.raises(ConfigError, match=r"is not the text that .*run was begun on: .*; use another out_dir"):
            train.run(replace(config, dry_run=dry_run))


def test_a_refusal_by_settings_reads_no_text(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured(corpus, tmp_path / "run")
    assert train.run(config) == 0
    monkeypatch.setattr(session, "load_corpus", never)
    for dry_run in (False, True):
        with pytest.raises(ConfigError, match="holds a run with other settings: seed 1337 -> 5"):
            train.run(replace(config, seed=5, dry_run=dry_run))
    with pytest.raises(ConfigError, match="out_dir=. cannot be moved aside for fresh=true"):
        monkeypatch.chdir(tmp_path / "run")
        train.run(replace(config, out_dir=".", fresh=True))
    (tmp_path / "run" / "status.json").unlink()  # so it has not ended
    with pytest.raises(ConfigError, match=f"max_iters=1 must be >= {config.max_iters}, the iteration that .*run has"):
        train.run(replace(config, max_iters=1))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="neither empty nor a run directory"):
        train.run(replace(config, out_dir=str(tmp_path / "mine")))


def test_of_two_starters_one_trains_one_is_told(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one looks before the first has the directory, and opens it after: the lock decides."""
    config = configured(corpus, tmp_path / "run")
    looked = resume.look(config, session.World())
    with resume.open_run_dir(config, session.World()):
        monkeypatch.setattr(train, "look", lambda *_: looked)
        with pytest.raises(ConfigError, match="is in use by process"):
            train.run(config)
        monkeypatch.undo()
        monkeypatch.setattr(session, "load_corpus", never)
        with pytest.raises(ConfigError, match="is in use by process"):  # told at the first look
            train.run(config)
