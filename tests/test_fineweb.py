"""FineWeb's way: parquet files, through `datasets`' own streaming, into shards on disk, into batches and a run."""

import contextlib
import errno
import fcntl
import gzip
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import flip
from helpers.fineweb import Parquet, files, held_out, index_of, settings_of, tokenizer_of, write_parquet
from variants import FULL

from core.schema import ConfigError
from data import prepare_fineweb
from data.options import FineWebOptions, PrepareFineWebConfig
from data.prepare_fineweb import prepare
from data.shards import open_shards
from data.tokenizer import BYTES, BPETokenizer, learn_bpe


def test_shards_hold_every_document_once_in_order_with_its_separator(parquet: Parquet, shards: Path) -> None:
    index = index_of(shards)
    tokenizer = tokenizer_of(shards)
    assert tokenizer.vocab_size == index["vocab_size"] == 300 and tokenizer.separator == 299
    for split in ("train", "val"):
        texts = [text for text in parquet[1] if held_out(text, 0.1) == (split == "val")]
        found: list[str] = []
        for shard in index[split]["shards"]:
            tokens = np.fromfile(shards / shard["file"], dtype=index["dtype"])
            *documents, rest = np.split(tokens, np.flatnonzero(tokens == 299) + 1)
            assert len(tokens) == shard["tokens"] <= 5000 and len(documents) == shard["documents"] and len(rest) == 0
            found += [tokenizer.decode(document[:-1]) for document in documents]
            assert shard["sha256"] == hashlib.sha256((shards / shard["file"]).read_bytes()).hexdigest()
        assert found == texts
        assert index[split]["documents"] == len(texts) > 40
        assert index[split]["bytes"] == sum(len(text.encode()) for text in texts)
        assert index[split]["tokens"] == sum(shard["tokens"] for shard in index[split]["shards"])
    assert len(index["train"]["shards"]) > 3
    named = {shard["file"] for split in ("train", "val") for shard in index[split]["shards"]}
    assert set(files(shards)) == {"index.json", "tokenizer.json"} | named


def test_the_number_of_workers_and_the_size_of_batches_change_nothing(
    parquet: Parquet, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_fineweb, "BATCH_DOCUMENTS", 3)
    assert prepare(settings_of(parquet, tmp_path / "out", workers=1)) == 0
    assert files(tmp_path / "out") == files(shards)


def test_a_token_budget_stops_after_the_document_reaching_it(parquet: Parquet, shards: Path, tmp_path: Path) -> None:
    assert prepare(settings_of(parquet, tmp_path / "out", max_tokens=9000)) == 0
    index = index_of(tmp_path / "out")
    tokenizer = tokenizer_of(shards)
    lengths = np.cumsum([len(tokenizer.encode(text)) + 1 for text in parquet[1]])
    n = int(np.searchsorted(lengths, 9000)) + 1
    assert index["train"]["documents"] + index["val"]["documents"] == n
    assert index["train"]["tokens"] + index["val"]["tokens"] == lengths[n - 1] >= 9000


def test_rows_without_a_text_are_left_out(parquet: Parquet, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [None, *parquet[1][:40], None, *parquet[1][40:80], None]
    write_parquet(tmp_path / "in" / "0.parquet", text=texts)
    config = settings_of((tmp_path / "in", []), tmp_path / "out")
    assert prepare(config) == 0
    index = index_of(tmp_path / "out")
    assert index["train"]["documents"] + index["val"]["documents"] == 80
    assert "warning" not in capsys.readouterr().out
    assert prepare(settings_of((tmp_path / "in", []), tmp_path / "all", val_fraction=1e-9)) == 0
    assert "warning: val is empty: data=fineweb refuses these shards" in capsys.readouterr().out


def test_a_large_vocabulary_takes_four_bytes(parquet: Parquet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = BPETokenizer([*BYTES, *(a + b for a in BYTES for b in BYTES)], has_separator=True)
    monkeypatch.setattr(prepare_fineweb, "open_or_learn_tokenizer", lambda *args: large)
    assert prepare(settings_of(parquet, tmp_path / "out")) == 0
    _, tokenizer, tokens, n_train = open_shards(FineWebOptions(path=str(tmp_path / "out")))
    assert tokenizer.vocab_size > 2**16 and tokens[:10].dtype == np.uint32
    texts = [text for text in parquet[1] if not held_out(text, 0.1)]
    assert tokenizer.decode(tokens[:n_train].tolist()) == "".join(text + "<|endoftext|>" for text in texts)


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
    parquet: Parquet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved after every batch; stopped before the n-th replacement of a file, then before the n-th of the rest, …"""
    monkeypatch.setattr(prepare_fineweb, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(prepare_fineweb, "BATCH_DOCUMENTS", 29)
    config = settings_of(parquet, tmp_path / "whole", max_tokens=12_000, shard_tokens=2500)
    assert prepare(config) == 0
    expected = files(tmp_path / "whole")
    places = [(os, "replace", (1, 2, 3, 5)), (prepare_fineweb.ShardWriter, "add", (3, 40, 100))]
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
import sys, time
from core.cli import run_script
from data import prepare_fineweb
def encode(*arguments, at_once=prepare_fineweb.encode):
    time.sleep(0.02)
    return at_once(*arguments)
prepare_fineweb.encode = encode
prepare_fineweb.SAVE_SECONDS = 0.0
prepare_fineweb.BATCH_DOCUMENTS = 2
if __name__ == "__main__":
    sys.exit(run_script(prepare_fineweb.PrepareFineWebConfig, prepare_fineweb.prepare, None))
"""


def test_kills_at_random_moments_double_and_lose_no_document(parquet: Parquet, shards: Path, tmp_path: Path) -> None:
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

    for _ in range(5 if FULL else 3):
        before = reached()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        while reached() == before and process.poll() is None:
            time.sleep(0.005)
        time.sleep(draw.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if (out / "index.json").exists():
            break
        stops.append(reached())
    assert len(stops) >= 2 and stops == sorted(set(stops)), stops
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert files(out) == files(shards)


def test_a_data_set_that_changes_between_a_kill_and_the_next_start_is_refused(parquet: Parquet, tmp_path: Path) -> None:
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
        def repo_info(self, repo: str, **options: Any) -> Any:
            state["asked"].append((repo, options))
            return types.SimpleNamespace(sha=state["sha"])

        dataset_info = repo_info

    def load_dataset(path: str, name: str | None, split: str, streaming: bool, revision: str | None) -> Any:
        state["loaded"].append((path, name, split, revision))
        return load(str(parquet[0]), split="train", streaming=streaming)

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return state


def test_a_resumed_preparation_keeps_the_revision_of_the_hub_that_it_was_begun_on(
    parquet: Parquet, hub: dict[str, Any], shards: Path, tmp_path: Path
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
    shard_tokens: int, parquet: Parquet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


def test_a_finished_folder_is_left_alone(parquet: Parquet, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert prepare(settings_of(parquet, out)) == 0
    before = files(out)
    (out / "progress.json").write_text("{}")  # as a kill just after the index was written leaves it
    assert prepare(settings_of(parquet, out)) == 0
    assert "is complete: train" in capsys.readouterr().out and files(out) == before
    with pytest.raises(ConfigError, match="was begun with other settings: shard_tokens 5000 -> 6000; use another"):
        prepare(settings_of(parquet, out, shard_tokens=6000))


def test_a_strangers_folder_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("one " * 300)
    out = tmp_path / "out"
    config = PrepareFineWebConfig(dataset=str(tmp_path / "in"), tokenizer="bpe", vocab_size=260, out=str(out))
    assert prepare(config) == 0
    begun = {**json.loads((out / "index.json").read_text()), "documents": 0, "stream": None}
    (out / "index.json").unlink()
    damages: list[dict[str, Any]] = [
        {"stream": "x"}, {"stream": {"files": "x"}}, {"documents": "x"}, {"train": None}, {"val": {}},
        {"train": {**begun["train"], "tokens": -7}}, {"train": {**begun["train"], "shards": [1]}},
    ]  # fmt: skip
    for damage in damages:
        (out / "progress.json").write_text(json.dumps({**begun, **damage}))
        with pytest.raises(ConfigError, match=r"holds a damaged progress\.json"):
            prepare(config)
    part = {"shards": [], "tokens": 1, "documents": 1, "bytes": 1}
    (out / "progress.json").write_text(json.dumps({**begun, "train": part, "val": part}))
    (tmp_path / "victim").write_text("precious")
    for split in ("train", "val"):
        (out / f"{split}_000000.bin").unlink(missing_ok=True)
        (out / f"{split}_000000.bin").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="is a link out of its folder"):
        prepare(config)
    assert (tmp_path / "victim").read_text() == "precious"
    (tmp_path / "in" / "a.txt").rename(tmp_path / "in" / "a.jsonl")
    (tmp_path / "in" / "a.jsonl").write_text(json.dumps({"text": "mine " * 300}) + "\n")
    (tmp_path / "secret.jsonl").write_text(json.dumps({"text": "secret " * 300}) + "\n")
    for name in ("README.md", ".huggingface.yaml"):
        for key, refused in (("data_files", True), ("'data_files'", True), ('"data\\x5ffiles"', False)):
            said = f"configs:\n- config_name: default\n  {key}: {tmp_path}/secret.jsonl\n"
            (tmp_path / "in" / name).write_text(f"---\n{said}---\n" if name == "README.md" else said)
            elsewhere = tmp_path / f"{name}-{key[:6]}"
            if refused:
                with pytest.raises(ConfigError, match=f"it holds a {name} that names files"):
                    prepare(replace(config, out=str(elsewhere)))
            else:  # whatever it says, the folder's own rows are read
                assert prepare(replace(config, out=str(elsewhere))) == 0
                text = b"".join(file.read_bytes() for file in elsewhere.glob("*.bin"))
                mine = tokenizer_of(elsewhere).encode("mine").tobytes()
                assert index_of(elsewhere)["train"]["bytes"] == 1500 and mine in text
        (tmp_path / "in" / name).unlink()


def test_damage_to_what_is_begun_is_noticed(parquet: Parquet, tmp_path: Path) -> None:
    """Half of a shard is the user's work, whose SHA-256 is written when it is whole; so is the tokenizer."""
    config = settings_of(parquet, tmp_path / "begun", shard_tokens=100_000)
    interrupted(config)
    shutil.copytree(tmp_path / "begun", tmp_path / "other")
    flip(tmp_path / "begun" / "train_000000.bin", 40)
    with pytest.raises(ConfigError, match=r"train_000000\.bin was changed since progress\.json was written"):
        prepare(config)
    tokenizer = json.loads((tmp_path / "other" / "tokenizer.json").read_text())
    *first, last = tokenizer["tokens"].split(" ")
    (tmp_path / "other" / "tokenizer.json").write_text(
        json.dumps({**tokenizer, "tokens": " ".join([*first, last * 2])})
    )
    with pytest.raises(ConfigError, match=r"tokenizer\.json was changed since progress\.json was written"):
        prepare(replace(config, out=str(tmp_path / "other")))


def test_nothing_of_a_user_is_deleted(parquet: Parquet, tmp_path: Path) -> None:
    out, left = tmp_path / "out", ("progress.json.tmp", "train_000000.bin.4711.tmp")
    assert prepare(settings_of(parquet, out)) == 0
    for name in ("notes.tmp", *left):
        (out / name).touch()
    whole = (out / "index.json").read_text()
    (out / "index.json").write_text(json.dumps({"settings": json.loads(whole)["settings"]}))
    with pytest.raises(ConfigError, match=r"holds a damaged progress\.json or index\.json"):
        prepare(settings_of(parquet, out))
    assert {"notes.tmp", *left} <= {*os.listdir(out)}
    (out / "index.json").write_text(whole)
    assert prepare(settings_of(parquet, out)) == 0
    assert {"notes.tmp", *left} & {*os.listdir(out)} == {"notes.tmp"}


def test_nothing_is_learnt_from_held_out_documents(parquet: Parquet, shards: Path, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(shards)
    texts = [text for text in parquet[1] if not held_out(text, 0.1)]
    assert tokenizer.pieces[:-1] == learn_bpe(texts, 299)


def test_a_folder_of_texts_is_a_document_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stories = {f"{i:03d}.txt": f"Story {i}\nis of {i % 7} lines\n\n" * (i % 5) for i in range(140)}  # some are empty
    texts = {**stories, "a.TXT": "one\r\ntwo\r", "sub/b.md": "\ufeff# a BOM\n", "sub/c.txt": "one line " * 9000}
    texts["z.txt.gz"] = "packed\n\n"
    for name, text in {**texts, ".hidden.pdf": "no"}.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        raw = text.encode()
        (tmp_path / "in" / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    config = settings_of((tmp_path / "in", []), tmp_path / "out")
    assert prepare(config) == 0 and "; 144 files, each a document\n" in capsys.readouterr().out
    index, tokenizer = index_of(tmp_path / "out"), tokenizer_of(tmp_path / "out")
    for split in ("train", "val"):
        parts = [np.fromfile(tmp_path / "out" / shard["file"], index["dtype"]) for shard in index[split]["shards"]]
        tokens = np.concatenate(parts)
        found = [tokenizer.decode(one[:-1]) for one in np.split(tokens, np.flatnonzero(tokens == 299) + 1)[:-1]]
        assert found == [texts[name] for name in sorted(texts) if held_out(texts[name], 0.1) == (split == "val")] != []
    resumed = replace(config, out=str(tmp_path / "resumed"))
    interrupted(resumed)
    assert prepare(resumed) == 0 and "continues after 87 documents" in capsys.readouterr().out
    assert files(tmp_path / "resumed") == files(tmp_path / "out")


def test_a_folder_of_texts_that_has_changed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").mkdir()
    for i in range(140):
        (tmp_path / "in" / f"{i:03d}.txt").write_text(f"Story {i}\nis of {i % 7} lines\n" * (i % 5))
    config = settings_of((tmp_path / "in", []), tmp_path / "out")
    assert prepare(config) == 0
    begun = replace(config, out=str(tmp_path / "begun"))
    interrupted(begun)
    first = tmp_path / "in" / "001.txt"
    first.write_text(first.read_text().swapcase())  # of the same size
    for changed in (begun, config):
        with pytest.raises(ConfigError, match=f"is not what {changed.out} was begun on: its files have changed"):
            prepare(changed)

    def edited(*given: Any) -> None:
        write_documents(*given)
        first.write_text(first.read_text().swapcase())

    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "in", copy)  # with its times
    os.utime(copy / "002.txt", (4e9, 4e9))  # in the future
    made = settings_of((copy, []), tmp_path / "made")
    for _ in range(2):
        assert prepare(made) == 0
    (copy / "002.txt").write_text((copy / "002.txt").read_text().swapcase())
    os.utime(copy / "002.txt", (1e9, 1e9))  # older than the shards, as a file that is moved there
    with pytest.raises(ConfigError, match="made was begun on: its files have changed"):
        prepare(made)

    write_documents, amid = prepare_fineweb.write_documents, tmp_path / "amid"
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match="its files have changed"):
        patch.setattr(prepare_fineweb, "write_documents", edited)
        prepare(replace(config, out=str(amid)))
    assert not (amid / "index.json").exists()
    (tmp_path / "in" / "more.txt").write_text("more")
    with pytest.raises(ConfigError, match="is not what .*out was begun on: its files have changed"):
        prepare(config)
    (tmp_path / "in" / "linked").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="in holds linked, a link to a folder, which is not read"):
        prepare(replace(config, out=str(tmp_path / "new")))
    shutil.rmtree(tmp_path / "in")
    assert prepare(config) == 0  # the shards need it no longer


@pytest.mark.parametrize("name", ["sub", "sub/deeper"])
def test_a_folder_in_it_that_cannot_be_read_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("in", "in/sub", "in/sub/deeper", "in/.git"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text(f"{folder} " * 300)
    listed, closed = os.scandir, [tmp_path / "in" / name, tmp_path / "in/.git"]

    def scandir(path: Any) -> Any:  # chmod keeps root out of nothing
        if Path(path) in closed:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return listed(path)

    config = PrepareFineWebConfig(
        dataset=str(tmp_path / "in"), tokenizer="bpe", vocab_size=260, out=str(tmp_path / "out")
    )
    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(ConfigError, match=f"in/{name} cannot be read: Permission denied$"):
        prepare(config)
    assert not (tmp_path / "out").exists()
    closed.pop(0)  # hidden files are not read
    assert prepare(config) == 0


def test_files_of_rows_that_a_split_leaves_out_are_counted(
    parquet: Parquet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows").mkdir()
    for name in ("a.jsonl", "train-b.jsonl", "README.md"):
        (tmp_path / "rows" / name).write_text("\n".join(json.dumps({"text": text}) for text in parquet[1][:100]))
    assert prepare(settings_of((tmp_path / "rows", []), tmp_path / "out")) == 0
    assert f"note: split=train is 1 of the 2 files in {tmp_path / 'rows'}" in capsys.readouterr().out
    with open("/dev/full", "w") as full, contextlib.redirect_stdout(full):  # output that nobody needs
        assert prepare(settings_of((tmp_path / "rows", []), tmp_path / "again")) == 0


def write_rows(file: Path, *texts: Any) -> None:
    file.parent.mkdir(exist_ok=True)
    rows = [{"text": text, "url": "a"} for text in texts]
    said = json.dumps(rows) if file.suffix == ".json" else "\n".join(map(json.dumps, rows))
    file.write_bytes(gzip.compress(said.encode()) if file.suffix == ".gz" else said.encode())


@pytest.mark.parametrize("place", ["rows/a[1].parquet", "rows/a*.jsonl", "rows/a.jsonl::b.jsonl", "r[o]ws/a.json"])
def test_a_name_that_reads_as_a_pattern_is_refused(place: str, tmp_path: Path) -> None:
    write_rows(tmp_path / place, "of this file")
    (tmp_path / "rows").mkdir(exist_ok=True)
    write_rows(tmp_path / "rows" / f"a1{Path(place).suffix}", "of another one")
    with pytest.raises(
        ConfigError, match=r"cannot be loaded: .* has \*, \?, \[ or ::, which reads as a pattern: rename it"
    ):
        prepare(settings_of(((tmp_path / place).parent, []), tmp_path / "out"))


def test_texts_that_could_be_dates_or_numbers_stay_texts(tmp_path: Path) -> None:
    texts = {f"a{i}.jsonl": [f"line {i}\n" * (3 + i % 5) + str(i)] for i in range(140)}
    texts |= {"b.jsonl": ["2020-01-02T03:04:05Z", "2020-01-02"], "c.json": ["007", "1e5"], "d.jsonl.gz": ["1.50"]}
    for name, some in texts.items():
        write_rows(tmp_path / "rows" / name, *some)
    assert prepare(config := settings_of((tmp_path / "rows", []), tmp_path / "out")) == 0
    index, tokenizer, found = index_of(tmp_path / "out"), tokenizer_of(tmp_path / "out"), []
    for split in ("train", "val"):
        parts = [np.fromfile(tmp_path / "out" / shard["file"], index["dtype"]) for shard in index[split]["shards"]]
        tokens = np.concatenate(parts)
        found += [tokenizer.decode(one[:-1]) for one in np.split(tokens, np.flatnonzero(tokens == 299) + 1)[:-1]]
    assert sorted(found) == sorted(text for some in texts.values() for text in some)
    resumed = replace(config, out=str(tmp_path / "resumed"))
    interrupted(resumed)
    assert prepare(resumed) == 0 and files(tmp_path / "resumed") == files(tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("b.jsonl", b'{"text": 5}', "^column=text must hold text, not 5"),
        ("b.json", b'[{"text": "a"}, 5]', "^[^ ]*b.json holds row 1, which is no object"),
        ("b.jsonl", b'{"body": "a"}', "^column=text must be one of body, as in .*b.jsonl"),
        ("b.jsonl", b'{"text": "\xff"}', "b.jsonl cannot be read: .*0xff"),
        ("b.jsonl", b'{"text": ', "b.jsonl cannot be read: "),
        ("b.jsonl", b'{"text": "a", "id": 1, "text": "b"}', "b.jsonl cannot be read: .* several values of text"),
        ("b.jsonl.zst", b"(\xb5/\xfd", "holds b.jsonl.zst; read are"),
        ("b.jsonl", b'{"text": "cut in \\ud83d two"}', r"a document holds '\\ud83d', .* in 'cut in \\ud83d two'"),
        ("b.jsonl.gz", gzip.compress(b'{"text": "a"}', mtime=0)[:-9], "b.jsonl.gz cannot be read: "),
        ("b.jsonl.gz", gzip.compress(b'{"text": "' + b" " * 2**26 + b'"}', mtime=0), "b.jsonl.gz cannot be read: "),
    ],
)
def test_a_later_row_that_is_no_text_is_named(name: str, content: bytes, says: str, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows" / "a.jsonl", "to be " * 500, "or not " * 500)
    (tmp_path / "rows" / name).write_bytes(content)
    with pytest.raises(ConfigError, match=says):
        prepare(settings_of((tmp_path / "rows", []), tmp_path / "out"))


def test_numbers_of_a_later_parquet_file_are_no_texts(parquet: Parquet, tmp_path: Path) -> None:
    shutil.copytree(parquet[0], tmp_path / "rows")
    write_parquet(tmp_path / "rows" / "z.parquet", text=[1, 2])
    with pytest.raises(ConfigError, match="column=text of .*z.parquet must hold text"):
        prepare(settings_of((tmp_path / "rows", []), tmp_path / "out"))
