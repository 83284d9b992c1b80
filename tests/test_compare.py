"""scripts/compare.py: the numbers are the models' own, over the same text, on one page that runs nothing of it."""

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from browser import Page
from conftest import Trained
from helpers.runs import CHARS, random_model, save_run
from variants import attention_products, config_of

import scripts.compare
from core.cli import run_script
from core.schema import ConfigError
from data.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer, Tokenizer, build_tokenizer, learn_bpe
from data.tokens import Corpus, Split
from model.gpt import GPT
from model.options import SinkOptions
from sample import LoadedRun
from scripts.compare import CompareOptions, Side, chosen_text, compare, compare_runs, held_out_tokens, tokens_of
from training.config import load_config

main = partial(run_script, CompareOptions, compare_runs, "")
TEXT = "a bad egg, a fad!\nfade\na cafe face a dead bee faced a gaffe\n" * 2
PAIRS = [("mha", "none"), ("gqa", "lp3"), ("mqa", "rms"), ("mla", "layernorm"), ("mla_unified", "lp1.5")]


def side(name: str, model: GPT, tokenizer: Tokenizer, text: str) -> Side:
    config = load_config(asdict(model.config))
    return Side(name, f"run {name}", LoadedRun(model, tokenizer, config, {"step": 1}), tokenizer.encode(text))


@torch.no_grad()
def by_hand(model: GPT, tokens: Sequence[int], window: int) -> list[float]:
    """-ln p of each token but the first: a forward pass for each, over the tokens before it in its window."""
    found = []
    for i in range(1, len(tokens)):
        start = (i - 1) // window * window
        logits = model(torch.tensor([tokens[start:i]]), last_only=True)[0]
        assert logits is not None
        found.append(-logits[0, -1].double().log_softmax(-1)[tokens[i]].item())
    return found


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_nats_and_attention_maps_are_those_of_a_computation_by_hand(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scripts.compare.CPU_TOKENS", 40)  # two windows of 16 tokens go through the model together
    models = [random_model(config_of(*pair)), random_model(config_of("mha", "rms", block_size=24))]
    a, b = (side(name, model, CHARS, TEXT) for name, model in zip("ab", models, strict=True))
    passes: list[int] = []
    models[0].register_forward_hook(lambda _, args, __: passes.append(len(args[0])))
    spans = compare(TEXT, a, b)
    assert passes == [2, 2, 2, 2]
    assert spans.first == TEXT[0] and "".join(spans.texts) == TEXT[1:]
    assert spans.n_tokens == (len(TEXT) - 1, len(TEXT) - 1)
    for model, nats in zip(models, spans.nats, strict=True):
        assert nats.tolist() == pytest.approx(by_hand(model, CHARS.encode(TEXT).tolist(), 16), rel=1e-4, abs=1e-5)

    with attention_products() as seen:
        texts, rows = scripts.compare.attention_map(a, layer=1, head=2)
    q, k, _, scale = seen[1]
    key_head = 2 * k.size(1) // q.size(1)
    assert texts[:4] == list("a␣ba") and len(rows) == 16 <= scripts.compare.MAPPED
    for i, row in enumerate(rows):
        weights = [math.exp(scale * (q[0, 2, i] @ k[0, key_head, j]).item()) for j in range(i + 1)]
        assert row[: i + 1] == pytest.approx([w / sum(weights) for w in weights], rel=1e-3, abs=1e-6)


def test_a_sink_takes_its_share_of_the_attention() -> None:
    model = random_model(replace(config_of("gqa", "rms"), softmax=SinkOptions(logit=0.0)))
    _, rows = scripts.compare.attention_map(side("a", model, CHARS, TEXT), layer=1, head=2)
    assert all(0 < sum(row) < 0.99 for row in rows) and sum(rows[-1]) > sum(rows[0])


def test_the_text_is_the_files_own_and_documents_end_with_their_token(tmp_path: Path) -> None:
    (tmp_path / "dos").write_bytes(b"a\r\nb")
    assert chosen_text(CompareOptions(a="a", b="b", text=str(tmp_path / "dos")), {}) == "a\r\nb"
    bpe = BPETokenizer(learn_bpe([TEXT * 9], 260), has_separator=True)
    tokens = [*bpe.encode("a bad"), bpe.separator, *bpe.encode("egg"), bpe.separator]
    text = bpe.decode(tokens)
    assert tokens_of(text, bpe, separated=True).tolist() == tokens
    assert bpe.separator not in tokens_of(text, bpe, separated=False)
    windows = Split(train=((0, 2), (5, 7)), val=((2, 5), (7, 9)))
    assert held_out_tokens(Corpus("0", CHARS, np.arange(10), windows)) == [2, 3, 4, 7, 8]
    cut = np.frombuffer("a中bé文".encode(), np.uint8)  # windows begin and end within characters
    assert held_out_tokens(Corpus("0", ByteTokenizer(), cut, windows)) == [*b"b"]
    windows = Split(train=((0, 1),), val=((1, len(cut)),))
    assert bytes(held_out_tokens(Corpus("0", ByteTokenizer(), cut, windows))).decode() == "中bé文"


def test_other_tokenizers_are_compared_over_the_pieces_where_tokens_of_both_end() -> None:
    text = "né né né, a café 😀 fade fade fade né"
    bpe = BPETokenizer(learn_bpe([text * 9], 268))
    sides = []
    for name, tokenizer in (("a", bpe), ("b", ByteTokenizer())):
        config = config_of("gqa", "rms", block_size=12)
        sides.append(side(name, random_model(config, tokenizer), tokenizer, text))
    spans = compare(text, *sides)
    assert any(len(piece) > 1 for piece in spans.texts) and "é" in "".join(spans.texts)
    assert spans.first + "".join(spans.texts) == text
    dropped = spans.first.encode()
    for one, nats, n in zip(sides, spans.nats, spans.n_tokens, strict=True):
        each = by_hand(one.loaded.model, one.tokens.tolist(), 12)
        ends, total = 0, 0.0
        for token, value in zip(one.tokens.tolist(), [0.0, *each], strict=True):
            ends += len(one.loaded.tokenizer.pieces[token])
            total += value * (ends > len(dropped))
        assert nats.sum() == pytest.approx(total, rel=1e-5) and n > len(spans.texts) - 1
    lengths = [len(piece.encode()) for piece in spans.texts]
    last = by_hand(sides[1].loaded.model, sides[1].tokens.tolist(), 12)[-lengths[-1] :]
    assert spans.nats[1][-1] == pytest.approx(sum(last), rel=1e-5)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of two runs on bytes, a and <i>b, and two on characters."""
    monkeypatch.chdir(tmp_path)
    for name, pair in (("a", ("mla", "rms")), ("<i>b", ("gqa", "lp3"))):
        save_run(random_model(config_of(*pair), ByteTokenizer()), ByteTokenizer(), tmp_path / name)
    save_run(random_model(config_of("mha", "none")), CHARS, tmp_path / "chars")
    save_run(random_model(config_of("mha", "none", n_layer=1)), CHARS, tmp_path / "shallow")
    return tmp_path


HOSTILE = "<script>throw 1</script>\n<img src=x onerror=alert(1)> & \"quotes\" 'é'\n</pre><b>bold</b>\n" * 3


def test_the_page_opens_without_an_error_and_shows_a_hostile_text_as_text(
    runs: Path, browser: Page, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("hostile.txt").write_text(HOSTILE)
    assert main(["a=a", "b=<i>b", "text=hostile.txt", "layer=1", "head=3", "out=page.html"]) == 0
    said = capsys.readouterr().out
    assert said.count("\n| a |") == 1 and said.endswith("page.html\n")
    source = Path("page.html").read_text()
    assert source.count("&lt;</span>") == 2 * HOSTILE[1:].count("<")  # a byte is a token here
    assert HOSTILE not in source and "<script>throw" not in source and "<i>b" not in source
    for dark in (True, False):
        browser.dark(dark)
        browser.open(Path("page.html"))
    assert browser.problems == [] and {*browser.requests} == {Path("page.html").resolve().as_uri()}
    assert browser.evaluate("document.title") == "a and <i>b"
    assert browser.evaluate("document.querySelectorAll('main img, main i, main b, main script').length") == 0
    for column in (1, 2):
        shown = browser.evaluate(f"document.querySelector('.pair > div:nth-child({column}) pre').textContent")
        assert shown.replace("⏎", "") == HOSTILE  # with the first byte, which is not predicted
    spans = "[...document.querySelectorAll('.pair span')]"
    assert len({*browser.evaluate(f"{spans}.map(e => getComputedStyle(e).backgroundColor)")}) > 20
    assert browser.evaluate("document.querySelectorAll('#attention .role-mark path').length") == 2 * 16 * 17 // 2
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    listed = source.partition("Where they differ most</h2>")[2].partition("</section>")[0]
    gaps = [abs(float(value.replace("−", "-"))) for value in re.findall(r">([−+][\d.]+)</td></tr>", listed)]
    assert gaps == sorted(gaps, reverse=True) and len(gaps) == 20


def test_samples_of_equal_runs_are_equal_text_and_settings_that_differ_are_listed(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[int] = []
    monkeypatch.setattr("training.session.DEFAULT_THREADS", 4)
    monkeypatch.setattr("training.session.idle_cpus", lambda: 2.6)
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    monkeypatch.delenv("OMP_NUM_THREADS")
    tags = CharTokenizer("<>bi")
    for name, dropout in (("tags", 0.0), ("other", 0.1)):
        save_run(random_model(config_of("mha", "none", dropout=dropout), tags), tags, runs / name)
    Path("text.txt").write_text("<b><i>" * 9)
    assert main(["a=tags", "b=other", "text=text.txt"]) == 0
    source = Path("compare.html").read_text()
    samples = re.findall(r"<pre>([^<]*)</pre>", source)
    assert len(samples) == 2 and samples[0] == samples[1] and "&lt;" in samples[0]
    assert "<td>model.dropout 0.0 -&gt; 0.1</td>" in source
    assert source.count("+0.0000") == 2  # nats a token, bits a byte
    assert used == [3]  # other programs keep a core busy


def test_no_file_but_a_page_of_ours_is_replaced(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("my.txt").write_text("to be or not to be" * 9)
    for name in ("my.txt", "a/ckpt/best/state.json", "a"):
        assert main(["a=a", "b=<i>b", "text=my.txt", f"out={name}"]) == 2
        assert f"out={name} must be a file in a folder that can be written: a new one, or" in capsys.readouterr().err
    assert Path("my.txt").read_text().startswith("to be")
    Path("page.html").touch()
    assert main(["a=a", "b=<i>b", "text=my.txt", "out=page.html"]) == 0
    assert main(["a=a", "b=<i>b", "text=my.txt", "out=page.html"]) == 0


def test_without_a_text_it_is_what_both_hold_out(
    trained: Trained, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = {"name": "text", "path": str(corpus)}
    for seed, (name, fold) in enumerate({"a": 1, "b": 1, "c": 2}.items()):
        trained(name, seed=seed, data={**text, "fold": fold})
    capsys.readouterr()
    assert main(["a=a", "b=b", "checkpoint=latest"]) == 0
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith(("| a |", "| b |"))]
    logs = [(tmp_path / name / "train.log").read_text() for name in "ab"]
    last = [float(re.findall(r"iter 6: val/loss ([\d.]+)", log)[0]) for log in logs]
    assert [float(row[6]) for row in rows] == pytest.approx(last, abs=2e-4)  # the fold is one block, all of it compared
    assert main(["a=a", "b=c"]) == 2
    assert "a and b hold out different text" in capsys.readouterr().err
    for name, tokenizer in {"d": {}, "e": {"tokenizer": "bpe", "vocab_size": 270}}.items():  # no fold: the last tenth
        trained(name, data={**text, **tokenizer})
    assert main(["a=d", "b=e", "checkpoint=latest"]) == 2  # of characters, and of tokens
    assert "a and b hold out different text" in capsys.readouterr().err
    corpus.write_text("other" * 1000)
    assert main(["a=a", "b=b"]) == 2
    assert "data=text is not the run's text any more" in capsys.readouterr().err
    corpus.unlink()
    assert main(["a=a", "b=b"]) == 2
    says = f"a: what it holds out cannot be read: data.path={corpus} does not exist; give text=FILE"
    assert says in capsys.readouterr().err


def test_a_literal_separator_in_the_held_out_text_is_refused() -> None:
    text = "ab ab<|endoftext|>ab" * 30
    learnt = build_tokenizer("bpe", text, 265)
    tokenizer = BPETokenizer(learnt.learnt, has_separator=True)  # type: ignore[attr-defined]
    tokens = tokenizer.encode(text)
    corpus = Corpus("", tokenizer, tokens, Split(((0, 10),), ((10, len(tokens)),)))
    with pytest.raises(ConfigError, match=re.escape("the held-out text has the characters <|endoftext|>")):
        scripts.compare.held_out_text(corpus)
