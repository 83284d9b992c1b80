"""Token shards: as one sequence, with bad settings, and in a run."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import flip
from helpers.fineweb import index_of, tokenizer_of
from helpers.runs import assert_halves_equal_straight, configured, lines, saved_json
from hypothesis import given, settings
from hypothesis import strategies as st

import sweeps.launch
import train
from core import cli
from core.schema import ConfigError
from data.folds import Split
from data.options import FineWebOptions, PrepareFineWebConfig
from data.shards import Shards, open_shards
from data.tokens import load_corpus
from sweeps.definition import load_sweep
from sweeps.launch import LaunchOptions, read_request
from sweeps.launch import main as launch


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6), data=st.data())
@settings(deadline=None)
def test_shards_are_sliced_like_one_array(lengths: list[int], data: st.DataObject) -> None:
    whole = np.arange(sum(lengths))
    shards = Shards(np.split(whole, np.cumsum(lengths)[:-1]))
    assert len(shards) == len(whole)
    start, end = data.draw(st.integers(0, 60)), data.draw(st.integers(0, 60))
    np.testing.assert_array_equal(shards[start:end], whole[start:end])


def edited(change: str) -> Callable[[Path], None]:
    """Runs `change`, a statement about `index`, on a folder's index.json."""

    def edit(folder: Path) -> None:
        index = json.loads((folder / "index.json").read_text())
        exec(change, {"index": index, "shard": index["train"]["shards"][0]})
        (folder / "index.json").write_text(json.dumps(index))

    return edit


def long_token(file: Path) -> None:
    tokenizer = json.loads(file.read_text())
    file.write_text(json.dumps({**tokenizer, "tokens": f"{tokenizer['tokens']} {'a' * 10**6}"}))


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "moved tokens": (edited("index['train']['tokens'] += 5; index['val']['tokens'] -= 5"), "contradicts itself"),
    "moved shard": (edited("index['val']['shards'].append(index['train']['shards'].pop())"), "contradicts itself"),
    "no key": (edited("del index['train']['shards']"), "not an index"),
    "no tokenizer": (edited("del index['tokenizer_sha256']"), "not an index"),
    "a list": (edited("index['train'] = []"), "not an index"),
    "wrong type": (edited("shard['tokens'] = str(shard['tokens'])"), "not an index|contradicts itself"),
    "negative": (edited("shard['tokens'] = -1"), "contradicts itself"),
    "no digest": (edited("shard['sha256'] = None"), "contradicts itself"),
    "bogus dtype": (edited("index['dtype'] = 'float7'"), "contradicts itself"),
    "object dtype": (edited("index['dtype'] = 'object'"), "contradicts itself"),
    "vocabulary": (edited("index['vocab_size'] = 3"), "holds token [0-9]+, its tokenizer has 3"),
    "path": (edited("shard['file'] = '../train_000000.bin'"), "contradicts itself"),
    "format": (edited("index['format'] = [1]"), "has format"),
    "endless index": (lambda folder: os.truncate(folder / "index.json", 2**27), "has more than 67,108,864 bytes"),
    "endless tokenizer": (lambda folder: os.truncate(folder / "tokenizer.json", 2**27), "has more than"),
    "long token": (lambda folder: long_token(folder / "tokenizer.json"), "is not a tokenizer"),
    "flipped bit": (lambda folder: flip(folder / "train_000000.bin", 0), "another SHA-256"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_changed_shards_are_refused(damage: str, tmp_path: Path, shards: Path) -> None:
    shutil.copytree(shards, tmp_path / "shards")
    options = FineWebOptions(path=str(tmp_path / "shards"))
    open_shards(options)
    change, says = DAMAGE[damage]
    change(tmp_path / "shards")
    with pytest.raises(ConfigError, match=says):
        open_shards(options)


def test_a_good_shard_is_read_once_a_machine_or_always(tmp_path: Path, shards: Path) -> None:
    shutil.copytree(shards, tmp_path / "shards")
    options = FineWebOptions(path=str(tmp_path / "shards"))
    open_shards(options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data.shards.hashlib.file_digest", None)  # reading again would raise
        open_shards(options)
        with pytest.raises(TypeError):
            open_shards(replace(options, verify=True))


# -----------------------------------------------------------------------------
# A run


def fineweb_run(shards: Path, run: Path, **changes: Any) -> Any:
    data = {"name": "fineweb", "path": str(shards), **changes.pop("data", {})}
    return configured(shards, run, **{"eval_interval": 3, "checkpoint_interval": 3, **changes, "data": data})


def test_a_damaged_record_of_a_shard_is_made_anew(
    tmp_path: Path, shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    open_shards(FineWebOptions(path=str(shards)))
    records = [*tmp_path.glob("nanoqk/verified/*.json")]
    for damage in ('{"sha256": "a", "highest": 3}', '{"found": [1, 2]}', "[]", ""):
        for record in records:
            whole = record.read_bytes()
            record.write_text(damage)
        open_shards(FineWebOptions(path=str(shards)))
        assert records[-1].read_bytes() == whole


def test_a_run_on_shards_trains_evaluates_exactly_and_resumes_bit_for_bit(shards: Path, tmp_path: Path) -> None:
    assert_halves_equal_straight(shards, tmp_path, data={"name": "fineweb", "path": str(shards)})
    index = index_of(shards)
    summary = saved_json(tmp_path / "straight", "summary")
    assert summary["held_out_tokens"] == index["val"]["tokens"]
    assert summary["corpus_sha256"] == hashlib.sha256((shards / "index.json").read_bytes()).hexdigest()
    assert "tokenizer" not in summary
    line = lines(tmp_path / "straight")[-1]
    first = tokenizer_of(shards).pieces[int(np.fromfile(shards / "val_000000.bin", dtype=np.uint16, count=1)[0])]
    nats = line["val/loss"] * (index["val"]["tokens"] - 1)
    assert line["val/bpb"] == pytest.approx(nats / np.log(2) / (index["val"]["bytes"] - len(first)), rel=1e-12)


@pytest.mark.parametrize(
    ("words", "runs", "step"),
    [
        ("sweep=mla_comparison launcher.ranks=8", 35, 2**20),
        ("sweep=mla_stress_400m launcher.ranks=8", 90, 2**20),
        ("sweep=gqa", 27, 2**15),
        ("sweep=gqa sweep.parts=[per_sequence]", 15, 2**20),
    ],
)
def test_the_papers_sweeps_pass_a_dry_run(
    words: str, runs: int, step: int, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = "null" if "per_sequence" in words else "4096"  # a window of 32,768 needs all that is held out
    asked = [*words.split(), f"data.path={shards}", f"data.val_tokens={size}", f"sweep_dir={tmp_path / 'sweep'}"]
    values, overrides = cli.read_settings(asked, LaunchOptions)
    options = cli.settings_of(LaunchOptions, values)
    request = read_request(options, overrides)  # which takes seconds
    assert [run.config.tokens_per_iter for run in request[1]] == [step] * runs
    committed = load_sweep(str(options.sweep), {}).overrides
    (asked_for,) = (int(word.partition("=")[2]) for word in committed if word.startswith("data.val_tokens="))
    held_out_of = 10**9 if options.sweep == "gqa" else 10**11  # the tokens that its file says to prepare
    assert asked_for < 0.7 * held_out_of * PrepareFineWebConfig.val_fraction
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweeps.launch, "read_request", lambda *_: request)
        assert launch([*asked, "dry_run=true", "launcher.threads=1"]) == 0
    listed = capsys.readouterr().out
    assert f"{runs} runs ({runs} pending)" in listed and "GiB of disk" in listed
    assert not (tmp_path / "sweep").exists()


def test_val_tokens_is_a_fixed_prefix_of_the_held_out_ones(shards: Path) -> None:
    corpus = load_corpus(FineWebOptions(path=str(shards), val_tokens=100), 16)
    whole = load_corpus(FineWebOptions(path=str(shards)), 16)
    ((start, end),) = whole.split.val
    assert corpus.split == Split(train=whole.split.train, val=((start, start + 100),)) and end > start + 100
    np.testing.assert_array_equal(whole.tokens[start:end][:50], np.fromfile(shards / "val_000000.bin", np.uint16, 50))


def test_a_run_on_other_shards_is_refused(shards: Path, tmp_path: Path) -> None:
    assert train.run(fineweb_run(shards, tmp_path / "run", max_iters=3)) == 0
    shutil.copytree(shards, tmp_path / "moved")
    assert train.run(fineweb_run(tmp_path / "moved", tmp_path / "run", max_iters=4)) == 0  # the same elsewhere
    with open(tmp_path / "moved" / "index.json", "a") as file:
        file.write("\n")
    with pytest.raises(ConfigError, match="is not the text that .*run was begun on"):
        train.run(fineweb_run(tmp_path / "moved", tmp_path / "run"))
    with pytest.raises(ConfigError, match="data.val_tokens null -> 50"):
        train.run(fineweb_run(shards, tmp_path / "run", data={"val_tokens": 50}))
