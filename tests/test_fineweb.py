"""FineWeb's way: parquet files, through `datasets`' own streaming, into shards on disk, into batches and a run."""

import fcntl
import hashlib
import importlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from test_bad_input import Outcome, check, contents, outcome
from test_train import assert_same_run, configured, lines

import train
from core import cli
from core.schema import ConfigError
from data import prepare_fineweb
from data.batches import Batches
from data.folds import Split
from data.options import FineWebOptions, PrepareFineWebConfig
from data.prepare_fineweb import prepare
from data.shards import Shards, open_shards
from data.tokenizer import BYTES, BPETokenizer, Tokenizer, from_dict, learn_bpe
from data.tokens import load_corpus
from sweeps.definition import load_sweep
from sweeps.launch import LaunchOptions, read_request

__all__ = ["outcome"]  # a fixture

WORDS = "the naïve cat sat on a mat — of €5 and 😀, while other cats' mats lay there\n\n in 1999"
CHOICES = WORDS.split(" ")
Parquet = tuple[Path, list[str]]  # a folder of parquet files, and the texts in their order


def write_parquet(file: Path, **columns: Any) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), file, row_group_size=64)


@pytest.fixture(scope="module")
def parquet(tmp_path_factory: pytest.TempPathFactory) -> Parquet:
    """Three files laid out and typed like FineWeb's sample-10BT."""
    folder = tmp_path_factory.mktemp("fineweb")
    draw = random.Random(0)
    texts = [" ".join(draw.choices(CHOICES, k=draw.randrange(120))) for _ in range(600)]
    texts[10], texts[300] = texts[400], ""
    for i in range(3):
        part = texts[200 * i : 200 * (i + 1)]
        n = len(part)
        write_parquet(
            folder / "sample" / "10BT" / f"{i:03d}_00000.parquet",
            text=part, id=[f"<urn:uuid:{i}-{row}>" for row in range(n)], dump=["CC-MAIN-2013-20"] * n,
            url=["http://example.com"] * n, date=["2013-05-18T05:48:54Z"] * n,
            file_path=["s3://commoncrawl/x.warc.gz"] * n, language=["en"] * n, language_score=[0.9] * n,
            token_count=[len(text) for text in part],
        )  # fmt: skip
    return folder, texts


def settings_of(parquet: Parquet, out: Path, **changes: Any) -> PrepareFineWebConfig:
    defaults: dict[str, Any] = {
        "tokenizer": "bpe",
        "vocab_size": 300,
        "shard_tokens": 5000,
        "val_fraction": 0.1,
        "workers": 2,
    }
    return PrepareFineWebConfig(dataset=str(parquet[0]), out=str(out), **(defaults | changes))


@pytest.fixture(scope="module")
def shards(parquet: Parquet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("shards") / "out"
    assert prepare(settings_of(parquet, out)) == 0
    return out


def files(out: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in out.iterdir() if file.name != "lock"}


def index_of(out: Path) -> dict[str, Any]:
    index: dict[str, Any] = json.loads((out / "index.json").read_bytes())
    return index


def tokenizer_of(out: Path) -> Tokenizer:
    return from_dict(json.loads((out / "tokenizer.json").read_bytes()))


def held_out(text: str, fraction: float) -> bool:
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return int(digest, 16) / 2**64 < fraction


class Serial:
    """concurrent.futures.ProcessPoolExecutor without processes: starts in no time."""

    def __init__(self, workers: int, context: Any, start: Callable[..., None], args: tuple[Any, ...]) -> None:
        prepare_fineweb.worker.update(tokenizer=from_dict(args[0]), val_fraction=args[1])

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(function(*args))
        return done

    def shutdown(self, cancel_futures: bool = False) -> None:
        pass


@pytest.fixture
def serial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_fineweb, "ProcessPoolExecutor", Serial)


# -----------------------------------------------------------------------------
# What is written


def test_shards_hold_every_document_once_in_order_with_its_separator(parquet: Parquet, shards: Path) -> None:
    index = index_of(shards)
    tokenizer = tokenizer_of(shards)
    assert tokenizer.vocab_size == index["vocab_size"] == 300 and tokenizer.separator == 299
    for split in ("train", "val"):
        texts = [text for text in parquet[1] if held_out(text, 0.1) == (split == "val")]
        found: list[str] = []
        for shard in index[split]["shards"]:
            tokens = np.fromfile(shards / shard["file"], dtype=index["dtype"])
            offsets = json.loads((shards / shard["offsets"]).read_bytes())["offsets"]
            assert len(tokens) == shard["tokens"] <= 5000 and len(offsets) == shard["documents"]
            documents = [tokens[a:b] for a, b in zip(offsets, [*offsets[1:], len(tokens)], strict=True)]
            assert all(document[-1] == 299 and 299 not in document[:-1] for document in documents)
            found += [tokenizer.decode(document[:-1]) for document in documents]
            assert shard["sha256"] == hashlib.sha256((shards / shard["file"]).read_bytes()).hexdigest()
        assert found == texts
        assert index[split]["documents"] == len(texts) > 40
        assert index[split]["bytes"] == sum(len(text.encode()) for text in texts)
        assert index[split]["tokens"] == sum(shard["tokens"] for shard in index[split]["shards"])
    assert len(index["train"]["shards"]) > 3
    assert set(files(shards)) == {"index.json", "tokenizer.json"} | {
        shard[key] for split in ("train", "val") for shard in index[split]["shards"] for key in ("file", "offsets")
    }


def test_the_number_of_workers_and_the_size_of_batches_change_nothing(
    parquet: Parquet, shards: Path, tmp_path: Path, serial: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_fineweb, "BATCH_DOCUMENTS", 3)
    assert prepare(settings_of(parquet, tmp_path / "out", workers=1)) == 0
    assert files(tmp_path / "out") == files(shards)


def test_a_token_budget_stops_after_the_document_that_reaches_it(
    parquet: Parquet, shards: Path, tmp_path: Path, serial: None
) -> None:
    assert prepare(settings_of(parquet, tmp_path / "out", max_tokens=9000)) == 0
    index = index_of(tmp_path / "out")
    tokenizer = tokenizer_of(shards)
    lengths = np.cumsum([len(tokenizer.encode(text)) + 1 for text in parquet[1]])
    n = int(np.searchsorted(lengths, 9000)) + 1
    assert index["train"]["documents"] + index["val"]["documents"] == n
    assert index["train"]["tokens"] + index["val"]["tokens"] == lengths[n - 1] >= 9000


def test_rows_without_a_text_are_left_out(
    parquet: Parquet, tmp_path: Path, serial: None, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [None, *parquet[1][:40], None, *parquet[1][40:80], None]
    write_parquet(tmp_path / "in" / "0.parquet", text=texts)
    config = settings_of((tmp_path / "in", []), tmp_path / "out")
    assert prepare(config) == 0
    index = index_of(tmp_path / "out")
    assert index["train"]["documents"] + index["val"]["documents"] == 80
    assert "warning" not in capsys.readouterr().out
    assert prepare(settings_of((tmp_path / "in", []), tmp_path / "all", val_fraction=1e-9)) == 0
    assert "warning: val is empty: data=fineweb refuses these shards" in capsys.readouterr().out


class Killed(BaseException):
    pass


def interrupted(config: PrepareFineWebConfig) -> None:
    """Prepare, saving after every batch of 29 documents, and be killed after 100 of them."""
    add, left = prepare_fineweb.ShardWriter.add, 100

    def killed(*args: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed
        add(*args)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(prepare_fineweb, "SAVE_SECONDS", 0.0)
        patch.setattr(prepare_fineweb, "BATCH_DOCUMENTS", 29)
        patch.setattr(prepare_fineweb.ShardWriter, "add", killed)
        prepare(config)


def test_a_crash_at_any_write_neither_doubles_nor_loses_a_document(
    parquet: Parquet, tmp_path: Path, serial: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved after every batch; stopped before the n-th replacement of a file, then before the n-th of the rest, …"""
    monkeypatch.setattr(prepare_fineweb, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(prepare_fineweb, "BATCH_DOCUMENTS", 29)
    config = settings_of(parquet, tmp_path / "whole", max_tokens=12_000, shard_tokens=2500)
    assert prepare(config) == 0
    expected = files(tmp_path / "whole")
    places = [(os, "replace", (1, 2, 3, 7)), (prepare_fineweb.ShardWriter, "add", (3, 40, 100))]
    for owner, name, gap in [(owner, name, gap) for owner, name, gaps in places for gap in gaps]:
        call, left, crashes, out = getattr(owner, name), gap, 0, tmp_path / f"{name}{gap}"

        def counted(*args: Any, call: Callable[..., None] = call, first: bool = name == "add") -> None:
            nonlocal left
            left -= 1
            if first or left >= 0:
                call(*args)  # with something of the document in the file
            if left < 0:
                raise Killed

        for _ in range(60):
            left = gap + crashes * gap  # a little further each time
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, counted)
                try:
                    assert prepare(replace(config, out=str(out))) == 0
                    break
                except Killed:
                    crashes += 1
        assert crashes >= 1 and files(out) == expected, (name, gap)


SLOWLY = """
import sys
from data import prepare_fineweb
prepare_fineweb.SAVE_SECONDS = 0.0
prepare_fineweb.BATCH_DOCUMENTS = 2
if __name__ == "__main__":
    prepare_fineweb.main()
"""


def test_kill_9_at_random_moments_neither_doubles_nor_loses_a_document(
    parquet: Parquet, shards: Path, tmp_path: Path
) -> None:
    (tmp_path / "slowly.py").write_text(SLOWLY)
    out = tmp_path / "out"
    words = [f"dataset={parquet[0]}", f"out={out}", "tokenizer=bpe", "vocab_size=300", "shard_tokens=5000"]
    command = [sys.executable, str(tmp_path / "slowly.py"), *words, "val_fraction=0.1", "workers=1"]
    draw, stops = random.Random(1), []

    def reached() -> int:
        try:
            return int(json.loads((out / "progress.json").read_bytes())["documents"])
        except FileNotFoundError:
            return 0

    for _ in range(5):
        before = reached()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        while reached() == before and process.poll() is None:
            time.sleep(0.005)
        time.sleep(draw.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        process.communicate()  # its workers hold the pipes: they end with it
        if (out / "index.json").exists():
            break
        stops.append(reached())
    assert len(stops) >= 2 and stops == sorted(set(stops)), stops
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert files(out) == files(shards)


def test_a_data_set_that_changes_between_a_kill_and_the_next_start_is_refused(
    parquet: Parquet, tmp_path: Path, serial: None
) -> None:
    """A position in the stream counts files: one more that sorts first would make it another document's."""
    folder, out = tmp_path / "growing", tmp_path / "out"
    shutil.copytree(parquet[0], folder)
    config = settings_of((folder, parquet[1]), out)
    interrupted(config)
    parts = folder / "sample" / "10BT"
    shutil.copy(parts / "002_00000.parquet", parts / "000_0.parquet")
    before = files(out)
    with pytest.raises(ConfigError, match="is not what .* was begun on: its files have changed"):
        prepare(config)
    assert files(out) == before
    (parts / "000_0.parquet").unlink()
    assert prepare(config) == 0
    index = index_of(out)
    assert sum(index[split]["documents"] for split in ("train", "val")) == 600 and index["source"]["files"] == 3


@pytest.fixture
def hub(parquet: Parquet, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The Hub played by a local folder. sha: its newest revision; asked, loaded: what it was asked for."""
    import datasets
    import huggingface_hub

    state: dict[str, Any] = {"sha": "old", "asked": [], "loaded": []}
    load = datasets.load_dataset

    class Api:
        def dataset_info(self, repo: str, **options: Any) -> Any:
            state["asked"].append((repo, options))
            return types.SimpleNamespace(sha=state["sha"])

    def load_dataset(path: str, name: str | None, split: str, streaming: bool, revision: str | None) -> Any:
        state["loaded"].append((path, name, split, revision))
        return load(str(parquet[0]), split="train", streaming=streaming)

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return state


def test_a_resumed_preparation_keeps_the_revision_of_the_hub_that_it_was_begun_on(
    parquet: Parquet, hub: dict[str, Any], shards: Path, tmp_path: Path, serial: None
) -> None:
    fineweb, out = "HuggingFaceFW/fineweb", tmp_path / "out"
    config = replace(settings_of(parquet, out, split="test"), dataset=fineweb)
    interrupted(config)
    hub["sha"] = "new"
    assert prepare(config) == 0
    assert hub["loaded"] == [(fineweb, "sample-10BT", "test", "old")] * 2
    index = index_of(out)
    assert index["source"] == {"revision": "old"} and index["settings"]["name"] == "sample-10BT"
    assert {**files(out), "index.json": b""} == {**files(shards), "index.json": b""}
    assert prepare(replace(config, out=str(tmp_path / "later"), max_tokens=1)) == 0
    assert hub["loaded"][2:] == [(fineweb, "sample-10BT", "test", "new")]
    for repo, options in hub["asked"]:  # the list of FineWeb's files is long
        assert repo == fineweb and options["expand"] == ["sha"] and options["timeout"] <= 10


@pytest.mark.parametrize("shard_tokens", [5000, 6000])
def test_a_process_that_comes_late_leaves_finished_shards_alone(
    shard_tokens: int, parquet: Parquet, tmp_path: Path, serial: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one, with the same or other settings, finishes between its look at the folder and its lock."""
    config, out, flock = settings_of(parquet, tmp_path / "out"), tmp_path / "out", fcntl.flock
    before: dict[str, tuple[int, bytes]] = {}

    def state() -> dict[str, tuple[int, bytes]]:
        return {file.name: (file.stat().st_mtime_ns, file.read_bytes()) for file in out.iterdir()}

    def late(file: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        assert prepare(replace(config, shard_tokens=shard_tokens)) == 0
        before.update(state())
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    if shard_tokens == config.shard_tokens:
        assert prepare(config) == 0
    else:
        with pytest.raises(ConfigError, match="was begun with other settings: shard_tokens 6000 -> 5000"):
            prepare(config)
    assert state() == before != {}


def test_a_worker_that_dies_is_one_line(parquet: Parquet, tmp_path: Path) -> None:
    (tmp_path / "dying.py").write_text(DYING)
    words = [f"dataset={parquet[0]}", f"out={tmp_path / 'out'}", "tokenizer=bpe", "vocab_size=300", "workers=1"]
    command = [sys.executable, str(tmp_path / "dying.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "failed: a worker died" in done.stderr and "the same command goes on" in done.stderr


DYING = """
import os, signal, sys
from data import prepare_fineweb
if __name__ == "__main__":
    prepare_fineweb.main()
else:
    prepare_fineweb.encode = lambda texts: os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_finished_folder_is_left_alone_and_can_be_verified(
    parquet: Parquet, tmp_path: Path, serial: None, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert prepare(settings_of(parquet, out)) == 0
    before = files(out)
    (out / "progress.json").write_text("{}")  # as a kill just after the index was written leaves it
    assert prepare(settings_of(parquet, out, verify=True)) == 0
    assert "is complete and intact" in capsys.readouterr().out and files(out) == before
    with pytest.raises(ConfigError, match="was begun with other settings: shard_tokens 5000 -> 6000; use another"):
        prepare(settings_of(parquet, out, shard_tokens=6000))


def test_verify_reads_every_byte_whatever_settings_the_shards_were_made_with(
    shards: Path, tmp_path: Path, outcome: Outcome
) -> None:
    out = tmp_path / "out"
    shutil.copytree(shards, out)
    status, stderr = outcome(prepare_fineweb.main, f"out={out}", "verify=true")
    assert status == 0, stderr
    for name in ("train_000001.bin", "val_000000.json"):
        intact = (out / name).read_bytes()
        (out / name).write_bytes(intact[:-1] + bytes([intact[-1] ^ 1]))
        status, stderr = outcome(prepare_fineweb.main, f"out={out}", "verify=true")
        check(status, stderr, [f"{name} is not what index.json says"])
        (out / name).write_bytes(intact)


def test_nothing_is_learnt_from_held_out_documents(parquet: Parquet, shards: Path, tmp_path: Path) -> None:

    tokenizer = tokenizer_of(shards)
    texts = [text for text in parquet[1] if not held_out(text, 0.1)]
    assert tokenizer.pieces[:-1] == learn_bpe(texts, 299)


# -----------------------------------------------------------------------------
# Bad input

BAD: dict[str, list[str]] = {
    "foo=1": ["foo=1", "unknown"],
    "column=": ["column=", "empty"],
    "column=body": ["column=body", "text, id, dump, url"],
    "column=token_count": ["column=token_count", "text, not int"],
    "split=validation": ["split=validation", "cannot be loaded"],
    "dataset=nowhere": ["dataset=nowhere", "no folder here"],
    "dataset=empty": ["dataset=empty", "cannot be loaded"],
    "tokenizer=char": ["tokenizer=char", "gpt2, bpe"],
    "tokenizer=gpt2 vocab_size=300": ["vocab_size=300", "tokenizer=bpe"],
    "tokenizer=gpt2 learn_bytes=300": ["learn_bytes=300", "tokenizer=bpe"],
    "tokenizer=gpt2": ["tokenizer=gpt2", "tiktoken's cache"],
    "tokenizer=bpe vocab_size=100": ["vocab_size=100", ">= 257"],
    "tokenizer=bpe vocab_size=90000": ["vocab_size=90000", "too large"],
    "max_tokens=0": ["max_tokens=0", ">= 1"],
    "val_fraction=1.5": ["val_fraction=1.5", "(0, 1)"],
    "workers=0": ["workers=0", ">= 1"],
    "verify=true": ["verify=true", "no finished shards"],
    "out=corpus.txt": ["out=corpus.txt"],
    "out=theirs": ["out=theirs", "neither empty nor"],
    "out=/proc/shards": ["out=/proc/shards"],
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    importlib.import_module("datasets")  # takes its folders from the environment once, at its import: not from below
    (tmp_path / "theirs").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "theirs" / "thesis.tex").write_text("do not trample on me")
    (tmp_path / "corpus.txt").write_text("to be or not to be " * 500)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "NANOQK_DATA"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{server.getsockname()[1]}")
    return tmp_path


@pytest.mark.parametrize("overrides", BAD)
def test_bad_setting_of_prepare(overrides: str, folder: Path, outcome: Outcome, parquet: Parquet) -> None:
    before = contents(folder)
    given = overrides.split()
    base = [f"dataset={parquet[0]}", "out=out", "tokenizer=bpe", "vocab_size=300"]
    if "tokenizer=gpt2" in given:
        base.remove("vocab_size=300")
    words = [word for word in base if not any(word.split("=")[0] == other.split("=")[0] for other in given)]
    status, stderr = outcome(prepare_fineweb.main, *words, *given)
    check(status, stderr, BAD[overrides])
    assert contents(folder) == before


def test_the_program_is_found_and_helps(program: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = program("data/prepare_fineweb.py", "--help")
    assert done.returncode == 0 and "max_tokens=null" in done.stdout and "HuggingFaceFW/fineweb" in done.stdout
    bad = program("data/prepare_fineweb.py", "max_tokens=none")
    assert bad.returncode == 2 and bad.stderr.startswith("error: max_tokens=none must be an integer or null")


BAD_DATA: dict[str, list[str]] = {
    "data.path=nowhere": ["data.path=nowhere", "prepare_fineweb.py out=nowhere max_tokens=1000000000 makes it"],
    "data.path=null": ["data=fineweb has no", "prepare_fineweb.py"],
    "data.path=begun": ["not complete in begun", "prepare_fineweb.py out=begun 'dataset=my texts' name=null goes on"],
    "data.path=unclear": ["not complete in unclear", "prepare_fineweb.py out=unclear goes on"],
    "data.path=short": ["train_000000.bin is", "bytes"],
    "data.path=damaged": ["damaged/index.json", "not an index"],
    "data.path=other": ["tokenizer.json", "not the one"],
    "data.path=whole data.val_tokens=1": ["data.val_tokens=1", ">= 2"],
    "data.path=whole data.val_tokens=10000000": ["data.val_tokens=10000000", "<="],
    "data.path=whole data.fold=0": ["data.fold=0", "unknown"],
    "data.path=whole data.folds=5": ["data.folds=5", "unknown"],
    "data.path=whole +data.split=shuffled": ["data.split=shuffled", "unknown"],
    "data.path=whole data.tokenizer=bpe": ["data.tokenizer=bpe", "unknown"],
}


@pytest.mark.parametrize("overrides", BAD_DATA)
def test_bad_setting_of_fineweb(overrides: str, folder: Path, outcome: Outcome, shards: Path) -> None:
    for name in ("whole", "short", "damaged", "other"):
        shutil.copytree(shards, folder / name)
    begun = PrepareFineWebConfig(dataset="my texts").settings
    for name, progress in (("begun", {"settings": begun}), ("unclear", {})):
        (folder / name).mkdir()
        (folder / name / "progress.json").write_text(json.dumps(progress))
    os.truncate(folder / "short" / "train_000000.bin", 100)
    (folder / "damaged" / "index.json").write_text("[]")
    (folder / "other" / "tokenizer.json").write_text(json.dumps(BPETokenizer(BYTES).to_dict()))
    before = contents(folder)
    status, stderr = outcome(train.main, "data=fineweb", "model=nano_cpu", "max_iters=200", *overrides.split())
    check(status, stderr, BAD_DATA[overrides])
    assert contents(folder) == before


# -----------------------------------------------------------------------------
# Shards as one sequence


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6), data=st.data())
@settings(deadline=None)
def test_shards_are_sliced_like_one_array(lengths: list[int], data: st.DataObject) -> None:
    whole = np.arange(sum(lengths))
    shards = Shards(np.split(whole, np.cumsum(lengths)[:-1]))
    assert len(shards) == len(whole)
    start, end = data.draw(st.integers(0, 60)), data.draw(st.integers(0, 60))
    np.testing.assert_array_equal(shards[start:end], whole[start:end])


def test_a_large_vocabulary_makes_shards_of_four_bytes_a_token(
    parquet: Parquet, tmp_path: Path, serial: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = BPETokenizer([*BYTES, *(a + b for a in BYTES for b in BYTES)], has_separator=True)
    monkeypatch.setattr(prepare_fineweb, "load_tokenizer", lambda *args: large)
    assert prepare(settings_of(parquet, tmp_path / "out")) == 0
    _, tokenizer, tokens, n_train = open_shards(FineWebOptions(path=str(tmp_path / "out")))
    assert tokenizer.vocab_size > 2**16 and tokens[:10].dtype == np.uint32
    texts = [text for text in parquet[1] if not held_out(text, 0.1)]
    assert tokenizer.decode(tokens[:n_train].tolist()) == "".join(text + "<|endoftext|>" for text in texts)


# -----------------------------------------------------------------------------
# A run


def fineweb_run(shards: Path, run: Path, **changes: Any) -> Any:
    data = {"name": "fineweb", "path": str(shards), **changes.pop("data", {})}
    return configured(shards, run, **{"eval_interval": 3, "checkpoint_interval": 3, **changes, "data": data})


def test_a_run_on_shards_trains_evaluates_exactly_and_resumes_bit_for_bit(shards: Path, tmp_path: Path) -> None:
    assert train.run(fineweb_run(shards, tmp_path / "whole")) == 0
    assert train.run(fineweb_run(shards, tmp_path / "halves", max_iters=3)) == 0
    assert train.run(fineweb_run(shards, tmp_path / "halves")) == 0
    assert_same_run(tmp_path / "whole", tmp_path / "halves")
    index = index_of(shards)
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert summary["held_out_tokens"] == index["val"]["tokens"]
    assert summary["corpus_sha256"] == hashlib.sha256((shards / "index.json").read_bytes()).hexdigest()
    assert "tokenizer" not in summary
    line = lines(tmp_path / "whole")[-1]
    first = tokenizer_of(shards).pieces[int(np.fromfile(shards / "val_000000.bin", dtype=np.uint16, count=1)[0])]
    nats = line["val/loss"] * (index["val"]["tokens"] - 1)
    assert line["val/bpb"] == pytest.approx(nats / np.log(2) / (index["val"]["bytes"] - len(first)), rel=1e-12)


@pytest.mark.parametrize(
    ("words", "runs", "step"),
    [
        ("sweep=mla_comparison", 35, 2**20),
        ("sweep=mla_stress_400m", 90, 2**20),
        ("sweep=gqa", 27, 2**15),
        ("sweep=gqa sweep.parts=[per_sequence]", 15, 2**20),
    ],
)
def test_the_papers_sweeps_pass_a_dry_run(words: str, runs: int, step: int, shards: Path, tmp_path: Path) -> None:
    size = "null" if "per_sequence" in words else "4096"  # a window of 32,768 needs all that is held out
    asked = [*words.split(), f"data.path={shards}", f"data.val_tokens={size}", f"sweep_dir={tmp_path / 'sweep'}"]
    values, overrides = cli.read_settings(asked, LaunchOptions)
    options = cli.settings_of(LaunchOptions, values)
    _, planned, _ = read_request(options, overrides)
    assert [run.config.tokens_per_iter for run in planned] == [step] * runs
    committed = load_sweep(options.sweep, {}).overrides
    (asked_for,) = (int(word.partition("=")[2]) for word in committed if word.startswith("data.val_tokens="))
    held_out_of = 10**9 if options.sweep == "gqa" else 10**11  # the tokens that its file says to prepare
    assert asked_for < 0.7 * held_out_of * PrepareFineWebConfig.val_fraction
    command = [sys.executable, str(ROOT / "sweeps" / "launch.py"), *asked, "dry_run=true"]
    listed = subprocess.run(command, capture_output=True, text=True)
    assert listed.returncode == 0, listed.stderr
    assert f"{runs} runs ({runs} pending)" in listed.stdout and "GiB of disk" in listed.stdout
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


def test_batches_from_shards_in_the_page_cache_come_at_several_million_tokens_a_second(tmp_path: Path) -> None:
    arrays = []
    for i in range(4):
        np.random.default_rng(i).integers(50257, size=5_000_000).astype(np.uint16).tofile(tmp_path / f"{i}.bin")
        arrays.append(np.memmap(tmp_path / f"{i}.bin", dtype=np.uint16, mode="r"))
    batches = Batches(Shards(arrays), Split(train=((0, 19_000_000),), val=((19_000_000, 20_000_000),)), 1024, 32, 0)
    seconds = []
    for step in range(60):
        start = time.perf_counter()
        batches.get_batch(step)
        seconds.append(time.perf_counter() - start)
    assert 32 * 1024 / float(np.median(seconds)) > 3e6


def test_slow_batches_are_made_while_the_ones_before_are_worked_on(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = Batches(np.arange(1000), Split(train=((0, 900),), val=((900, 1000),)), 16, 4, seed=0)
    get_batch = batches.get_batch

    def slow(*place: int) -> Any:
        time.sleep(0.1)
        return get_batch(*place)

    monkeypatch.setattr(batches, "get_batch", slow)
    start = time.perf_counter()
    for _ in batches.prefetch((step, 0) for step in range(16)):
        time.sleep(0.1)
    assert time.perf_counter() - start < 2.6  # one after the other: 3.2 at least


def test_the_benchmark_of_the_loader_ends_with_one_json_line(
    shards: Path, program: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    done = program("scripts/benchmarks/bench_data.py", "shard_tokens=100000", "steps=5")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["tokens"] == 400_000 and found["cold"].keys() == found["warm"].keys() >= {"tok_per_sec", "stall"}
    done = program("scripts/benchmarks/bench_data.py", f"path={shards}", "block_size=64", "steps=5")
    assert json.loads(done.stdout)["as_found"]["tok_per_sec"] > 0, done.stderr
    done = program("scripts/benchmarks/bench_data.py", "step=5")
    assert done.returncode == 2 and done.stderr == "error: step=5 is unknown; did you mean steps?\n"
