"""A damaged file is noticed or without effect. Each damage is one flipped bit, or the file cut at a byte: random ones,
or the first."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Trained
from helpers.runs import TIMED, configured, fresh_copy, lines, saved_json, weights
from helpers.sweeps import launched, tiny_sweep
from variants import FULL

import train
from core import checkpoint
from core.schema import ConfigError
from data.options import FineWebOptions, TextFileOptions
from data.shards import open_shards
from data.tokens import load_corpus
from scripts.reporting.runs import read_done, read_sweep

SHARE = 10 if FULL else 1  # of the damages below
HARMLESS = {"curve.png", "lock", "train.log", "samples.jsonl"}  # nothing reads a number from them


def damages(pristine: Path, copy: Path, n: int) -> Iterator[tuple[str, Path]]:
    """n times a fresh copy of a folder, with one damaged file: what was done, and the file."""
    choose = random.Random(0)
    files = sorted(p.relative_to(pristine) for p in pristine.rglob("*") if p.is_file() and not p.is_symlink())
    files = [file for file in files if file.name not in HARMLESS and (pristine / file).stat().st_size]
    kinds: Counter[str] = Counter()
    for i in range(n):
        fresh_copy(pristine, copy)
        file = files[i % len(files)]
        kinds[file.name] += 1
        content = bytearray((copy / file).read_bytes())
        at, bit = choose.choice([0, choose.randrange(len(content))]), choose.randrange(8)
        if choose.random() < 0.4:
            del content[at:]
            what = f"{file} cut at {at}"
        else:
            content[at] ^= 1 << bit
            what = f"{file}: bit {bit} of byte {at}"
        (copy / file).write_bytes(content)
        yield what, copy / file
    print(f"{n} damages: {dict(kinds)}")


def outcome(work: Callable[[], Any]) -> Any:
    """What work() returns, or "noticed"."""
    try:
        return work()
    except (ConfigError, checkpoint.CorruptCheckpoint):
        return "noticed"


def numbers(run: Path) -> dict[str, Any]:
    """What a report keeps of a run, but for times."""
    summary, curves = read_done(run, ["val/loss", "train/loss", "grad_norm"])
    return {**{key: value for key, value in summary.items() if key not in TIMED | {"seconds", "sha256"}}, **curves}


def log(run: Path) -> str:
    return (run / "train.log").read_text() if (run / "train.log").exists() else ""


def test_a_damaged_file_of_a_finished_run_is_noticed_or_without_effect(corpus: Path, tmp_path: Path) -> None:
    pristine, copy = tmp_path / "pristine", tmp_path / "copy"
    config = configured(corpus, pristine)
    assert train.run(config) == 0
    before = numbers(pristine)
    tensors = {name: checkpoint.load(pristine / "ckpt" / name).tensors for name in ("latest", "best")}
    for what, _ in damages(pristine, copy, 20 * SHARE):
        assert outcome(lambda: numbers(copy)) in ("noticed", before), what
        for name in ("latest", "best"):
            found = outcome(lambda name=name: checkpoint.load(copy / "ckpt" / name))  # type: ignore[misc]
            good = found == "noticed" or all(
                t.equal(tensors[name][group][key]) for group, named in found.tensors.items() for key, t in named.items()
            )
            assert good, what
        status = outcome(lambda: train.run(replace(config, out_dir=str(copy))))
        if status == 0 and "has changed since" not in log(copy):
            assert numbers(copy) == before, what


def test_a_damaged_file_of_a_run_that_goes_on_is_noticed_or_without_effect(corpus: Path, tmp_path: Path) -> None:
    straight, pristine, copy = tmp_path / "straight", tmp_path / "pristine", tmp_path / "copy"
    schedule = {"name": "cosine", "warmup_iters": 1, "lr_decay_iters": 9}
    config = configured(corpus, straight, max_iters=9, schedule=schedule)
    assert train.run(config) == 0
    assert train.run(replace(config, max_iters=5, out_dir=str(pristine))) == 0
    expected = weights(straight)
    said = log(pristine)
    for what, _ in damages(pristine, copy, 20 * SHARE):
        status = outcome(lambda: train.run(replace(config, out_dir=str(copy))))
        warned = any(word in log(copy).removeprefix(said) for word in ("damaged", "corrupt"))
        if status == 0 and not warned:
            assert lines(copy) == lines(straight), what
            diagnostics = [(run / "diagnostics.jsonl").read_bytes() for run in (copy, straight)]
            assert diagnostics[0] == diagnostics[1], what
        if status == 0:
            found = weights(copy)
            assert all(found[name].equal(t) for name, t in expected.items()), what


def test_a_lost_record_loses_neither_the_best_checkpoint_nor_its_loss(trained: Trained) -> None:
    changes = {"schedule": {"name": "constant", "warmup_iters": 1}, "optim": {"name": "adamw", "learning_rate": 2.0}}
    straight, broken = trained("straight", max_iters=8, **changes), trained("broken", max_iters=4, **changes)
    (broken / "metrics.jsonl").write_text("")
    trained("broken", max_iters=8, **changes)
    assert "metrics.jsonl was damaged" in log(broken)
    a, b = (saved_json(run, "summary") for run in (straight, broken))
    assert a["iter_of_min"] <= 4 and (a["val/loss_min"], a["iter_of_min"]) == (b["val/loss_min"], b["iter_of_min"])
    assert (broken / "ckpt" / "best").resolve().name == f"step_{a['iter_of_min']:06d}"


def test_a_config_that_was_edited_by_hand_is_not_believed(trained: Trained) -> None:
    schedule = {"name": "constant", "warmup_iters": 1}
    file = trained(max_iters=2, seed=1, schedule=schedule) / "config.yaml"
    file.write_text(file.read_text().replace("\nseed: 1\n", "\nseed: 2\n"))
    with pytest.raises(ConfigError, match="has a checkpoint of other settings: seed 1 -> 2"):
        trained(max_iters=4, seed=2, schedule=schedule)


def test_a_damaged_file_of_a_sweep_is_noticed_or_without_effect(corpus: Path, tmp_path: Path) -> None:
    pristine, copy = tmp_path / "sweep", tmp_path / "copy"
    compare = {"a": {"baseline": "qk_norm=none", "claim": "lower"}}
    changes = {"grid": {"qk_norm": ["none", "rms"]}, "folds": None, "seeds": [1, 2], "compare": compare}
    launched(tiny_sweep(tmp_path, corpus, "max_iters=4", **changes), "launcher.workers=1")

    def look(path: Path) -> Any:
        sweep = read_sweep(path, "tiny")
        runs = [(r.id, r.seed, r.fold, r.settings, r.config, r.summary, r.curves) for r in sweep.runs if r.done]
        return sweep.definition, runs

    definition_before, before = look(pristine)
    for what, _ in damages(pristine, copy, 20 * SHARE):
        found = outcome(lambda: look(copy))
        if found != "noticed":
            assert found[0] == definition_before, what
            assert all(run in before for run in found[1]), what  # a damaged run is not done


def test_a_damaged_shard_is_noticed_or_harmless(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "copy"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def look(path: Path) -> Any:
        _, tokenizer, tokens, n_train = open_shards(FineWebOptions(path=str(path)))
        return tokenizer.to_dict(), tokens[0 : len(tokens)].tolist(), n_train

    before = look(shards)
    for what, _ in damages(shards, copy, 10 * SHARE):
        assert outcome(lambda: look(copy)) in ("noticed", before), what


def test_damaged_cached_tokens_are_made_again(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "pristine"))
    options = TextFileOptions(path=str(corpus), tokenizer="bpe", vocab_size=280)
    before = load_corpus(options, 16)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "copy"))
    for what, file in damages(tmp_path / "pristine", tmp_path / "copy", 10 * SHARE):
        after = load_corpus(options, 16)
        assert after.tokenizer.to_dict() == before.tokenizer.to_dict(), what
        assert np.array_equal(after.tokens[:], before.tokens[:]), what
        whole = tmp_path / "pristine" / file.relative_to(tmp_path / "copy")
        assert file.suffix == ".lock" or file.read_bytes() == whole.read_bytes(), what
