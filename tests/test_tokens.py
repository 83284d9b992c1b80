"""A corpus as tokens: cached, the same in every process, and counted to the byte."""

import hashlib
import math
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Program
from helpers.runs import configured, lines

import train
from core import checkpoint
from core.files import cache_folder
from core.schema import ConfigError
from data import tokens
from data.corpora import load_text
from data.options import PythonSourceOptions, TextFileOptions
from data.tokenizer import GPT2Tokenizer, build_tokenizer
from data.tokens import Corpus, load_corpus, size_of_text
from sweeps.plan import compose
from training.config import TrainConfig, load_config

GREEK = "μῆνιν ἄειδε θεὰ Πηληϊάδεω Ἀχιλῆος οὐλομένην, ἣ μυρί' Ἀχαιοῖς ἄλγε' ἔθηκε — "


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def greek(tmp_path: Path) -> Path:
    file = tmp_path / "greek.txt"
    words = GREEK.split()
    picks = np.random.default_rng(0).integers(len(words), size=1500)
    file.write_text(" ".join(words[i] for i in picks), encoding="utf-8")
    return file


def composed(*overrides: str) -> TrainConfig:
    return load_config(compose([*overrides]))


def bpe_of(greek: Path) -> TextFileOptions:
    return TextFileOptions(path=str(greek), tokenizer="bpe", vocab_size=300)


def text_of(found: Corpus) -> str:
    return found.tokenizer.decode(found.tokens[:])


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (
            "model=nano_cpu qk_norm=lp max_iters=500 schedule.warmup_iters=50 qk_norm.alpha_init=1 qk_norm.p=3 "
            "data.fold=0",
            "nano_cpu-mha-lp_p3_1.0-tiny_shakespeare-fold0-s1337-4f76cb67",
        ),
        ("", "baby_gpt-mha-none-tiny_shakespeare-s1337-75b99823"),
        ("experiment=quickstart", "nano_cpu-mha-none-python_docs-s1337-980e82d0"),
        ("data=text data.path=a.txt data.tokenizer=byte", "baby_gpt-mha-none-text-s1337-260d3a7f"),
    ],
)
def test_runs_that_were_made_before_a_setting_existed_keep_their_names(words: str, name: str) -> None:
    assert composed(*words.split()).run_dir == Path("runs") / name


def test_runs_with_other_tokens_have_other_names() -> None:
    sizes = ["", "data.vocab_size=512", "data.vocab_size=4096"]
    first, second, third = (composed("data.tokenizer=bpe", *filter(None, [size])).run_dir for size in sizes)
    assert first == third and len({first, second, composed().run_dir}) == 3  # null is 4096


# -----------------------------------------------------------------------------
# The cache


def test_merges_and_tokens_are_computed_once(greek: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_corpus(bpe_of(greek), 16)
    assert first.tokenizer.vocab_size == 300 and text_of(first) == greek.read_text(encoding="utf-8")
    monkeypatch.setattr(tokens, "build_tokenizer", None)
    monkeypatch.setattr("data.tokenizer.BPETokenizer.encode", None)
    again = load_corpus(bpe_of(greek), 16)
    assert isinstance(again.tokens, np.memmap) and again.tokens.dtype == first.tokens[:].dtype == np.uint16
    np.testing.assert_array_equal(again.tokens, first.tokens)
    assert again.tokenizer.to_dict() == first.tokenizer.to_dict() and again.split == first.split


def test_tokens_of_another_rule_or_library_are_made_anew(greek: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_corpus(bpe_of(greek), 16)
    made: list[str] = []
    monkeypatch.setattr(tokens, "write_cache", lambda path, content, cost: made.append(path.parent.name))
    load_corpus(bpe_of(greek), 16)
    assert made == []
    monkeypatch.setattr(tokens, "PRE_TOKENS", tokens.PRE_TOKENS + "|x")
    load_corpus(bpe_of(greek), 16)
    monkeypatch.setattr(tokens, "version", lambda name: "99")
    load_corpus(bpe_of(greek), 16)
    assert made == ["tokens", "bpe", "tokens"]


def test_a_cache_file_under_another_name_is_damaged(
    greek: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "other.txt").write_text(greek.read_text(encoding="utf-8")[::-1], encoding="utf-8")
    for text in (greek, tmp_path / "other.txt"):
        load_corpus(bpe_of(text), 16)
    for name in ("bpe", "tokens"):
        one, other = (file for file in (cache_folder() / name).iterdir() if file.suffix != ".lock")
        content = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(content)
    assert text_of(load_corpus(bpe_of(greek), 16)) == greek.read_text(encoding="utf-8")


def test_a_run_of_gpt2_tokens_goes_on_without_the_download(greek: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = greek.read_text(encoding="utf-8")
    learnt = build_tokenizer("bpe", text, 300)
    gpt2 = GPT2Tokenizer(learnt.learnt, has_separator=True)  # type: ignore[attr-defined]
    state = {"tokenizer": gpt2.to_dict(), "corpus_sha256": hashlib.sha256(text.encode()).hexdigest()}
    monkeypatch.setattr("data.tokenizer.fetch_gpt2", None)
    corpus = load_corpus(TextFileOptions(path=str(greek), tokenizer="gpt2"), 16, state)
    assert corpus.tokenizer.to_dict() == gpt2.to_dict() and text_of(corpus) == text


def test_an_unwritable_cache_costs_a_warning_only(greek: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a_file"))
    with pytest.warns(UserWarning, match="cannot be written, the next run computes it again"):
        assert text_of(load_corpus(bpe_of(greek), 16)) == greek.read_text(encoding="utf-8")


# -----------------------------------------------------------------------------
# Runs


def bpe_run(greek: Path, run: Path, **changes: Any) -> TrainConfig:
    data = {"name": "text", "path": str(greek), "tokenizer": "bpe", "vocab_size": 300}
    return configured(greek, run, data=data, **changes)


def test_a_resumed_run_keeps_its_merges_and_is_refused_where_they_are_lost(
    greek: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert train.run(bpe_run(greek, whole, max_iters=6)) == 0
    assert train.run(bpe_run(greek, halves, max_iters=3)) == 0
    other = build_tokenizer("bpe", greek.read_text(encoding="utf-8")[::-1], 300)
    monkeypatch.setattr(tokens, "learnt_tokenizer", lambda *args: other)  # as another version of the library would
    assert train.run(bpe_run(greek, halves, max_iters=6)) == 0
    assert lines(halves) == lines(whole)
    saved = [checkpoint.load(run / "ckpt" / "latest").state["tokenizer"] for run in (whole, halves)]
    assert saved[0] == saved[1] != other.to_dict()
    asked = TextFileOptions(path=str(greek), tokenizer="bpe", vocab_size=299)  # a dry run in the same directory
    found = load_corpus(asked, 16, checkpoint.load(whole / "ckpt" / "latest").state).tokenizer
    assert found.to_dict() == other.to_dict()
    monkeypatch.setattr(checkpoint, "peek", lambda folder: {})
    with pytest.raises(ConfigError, match="has other tokens here than .*halves was begun with; fresh=true"):
        train.run(bpe_run(greek, halves, max_iters=9))


def test_sampling_needs_neither_the_text_nor_the_cache(greek: Path, tmp_path: Path, program: Program) -> None:
    assert train.run(bpe_run(greek, tmp_path / "run")) == 0
    greek.unlink()
    words = ["run=run", "start=μῆνιν", "num_samples=1", "max_new_tokens=20"]
    done = program("sample.py", *words, env={"XDG_CACHE_HOME": "/nonexistent", "PATH": ""})
    assert done.stdout.startswith("μῆνιν")


@pytest.mark.parametrize("tokenizer", ["char", "byte", "bpe"])
def test_bits_per_byte_are_exact_for_every_tokenizer(tokenizer: str, greek: Path, tmp_path: Path) -> None:
    """Against the definition: the bits of all predicted tokens over the UTF-8 bytes that these tokens stand for."""
    data = {"name": "text", "path": str(greek), "tokenizer": tokenizer, "fold": 3}
    config = configured(greek, tmp_path / "run", data=data | ({"vocab_size": 300} if tokenizer == "bpe" else {}))
    assert train.run(config) == 0
    line = lines(tmp_path / "run")[-1]
    found = load_corpus(config.data, 16)
    ((start, end),) = found.split.val
    predicted = b"".join(found.tokenizer.pieces[token] for token in found.tokens[start + 1 : end])
    assert predicted in greek.read_bytes()
    nats = line["val/loss"] * (end - start - 1)
    assert line["val/bpb"] == pytest.approx(nats / math.log(2) / len(predicted), rel=1e-12)
    if tokenizer == "byte":
        assert line["val/bpb"] == pytest.approx(line["val/loss"] / math.log(2), rel=1e-12)
    if tokenizer == "char":
        assert line["val/bpc"] == pytest.approx(line["val/loss"] / math.log(2), rel=1e-12)


def test_the_size_of_a_text_is_counted_in_chunks(greek: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = load_corpus(bpe_of(greek), 16)
    text = greek.read_text(encoding="utf-8")
    monkeypatch.setattr(tokens, "CHUNK", 7)
    assert size_of_text(found.tokenizer, found.tokens, ((0, len(found.tokens)),)) == (len(text.encode()), len(text))


@pytest.mark.slow
def test_python_source_is_the_standard_library_in_the_order_of_its_paths() -> None:
    text = load_text(PythonSourceOptions())
    root = Path(sysconfig.get_path("stdlib"))
    assert len(text) > 5_000_000
    files = [root / name for name in ("abc.py", "json/decoder.py", "zipapp.py")]
    where = [text.index(file.read_text(encoding="utf-8")) for file in files]
    assert where == sorted(where)


def test_python_source_leaves_out_what_a_machine_adds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b.py", "a/z.py", "a.py", "site-packages/x.py", "_sysconfigdata__linux_.py", "config-3.11/y.py"):
        file = tmp_path / "lib" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(f"# {name} é\r\n".encode())
    (tmp_path / "lib" / "latin1.py").write_bytes("é".encode("latin-1"))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "lib"))
    assert load_text(PythonSourceOptions()) == "# a.py é\r\n\n# a/z.py é\r\n\n# b.py é\r\n"
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="^data=python_source needs the standard library's source files"):
        load_text(PythonSourceOptions())
