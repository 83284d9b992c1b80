"""A run that begins with the weights of another run, or of a Hugging Face folder."""

import hashlib
import math
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY, write_corpus
from helpers import runs
from helpers.hugging_face import VARIANTS
from helpers.runs import CHARS, SETTINGS, assert_same_run, configured, lines, random_model, random_tokens, weights

import train
from core import checkpoint
from core.schema import ConfigError
from data.folds import Split
from data.tokenizer import CharTokenizer
from data.tokens import Corpus
from model.gpt import GPT
from sample import load_asked_run, load_run
from scripts import audit
from scripts.export_hf import export
from sweeps.launch import main as launch
from sweeps.plan import read_plan
from training.config import load_config
from training.init_from import load_initial_weights, with_init_sha256
from training.session import setup

OTHER = {"optim": {"name": "adamw", "learning_rate": 2e-2}}  # of the new run: a recipe of its own
ROPE = {**SETTINGS["model"], "position": "rope", "rope_theta": 100.0}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    config = configured(write_corpus(folder), folder / "origin", eval_interval=1, checkpoint_interval=1)
    assert train.run(config) == 0
    return folder / "origin"


@pytest.fixture
def origin(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "origin", symlinks=True)


def sha256(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize("place", ["", "ckpt/latest", "ckpt/best"])
def test_the_first_validation_loss_is_the_origins(place: str, origin: Path, corpus: Path, tmp_path: Path) -> None:
    checkpoint.link(origin / "ckpt", "best", 5)  # as if iteration 5 were the lowest
    named = origin / "ckpt" / (place.removeprefix("ckpt/") or "best")
    assert train.run(configured(corpus, tmp_path / "new", init_from=str(origin / place), **OTHER)) == 0
    loss = next(line["val/loss"] for line in lines(origin) if line["iter"] == checkpoint.load(named).step)
    began = lines(tmp_path / "new")[0]
    assert began["val/loss"] == loss and began["lr"] != lines(origin)[0]["lr"]
    assert runs.saved_json(tmp_path / "new", "summary")["init_from"] == {str(origin / place): sha256(named)}
    config = load_run(tmp_path / "new" / "ckpt" / "latest", torch.device("cpu")).config
    assert config.init_sha256 == sha256(named)
    name = replace(config, out_dir=None).run_dir.name
    assert f"-from_{sha256(named)[:8]}-" in name != replace(config, out_dir=None, init_sha256="0" * 64).run_dir.name
    counts = [w for key, w in weights(tmp_path / "new").items() if key.startswith("optimizer/step/")]
    assert counts and all(count == 6 for count in counts)  # AdamW counts from 0


def test_a_best_checkpoint_that_is_the_origins_is_named(
    origin: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rate = {"name": "adamw", "learning_rate": 1.0}
    assert train.run(configured(corpus, tmp_path / "new", init_from=str(origin), max_iters=2, optim=rate)) == 0
    for which, said in (("best", "iteration 0, the weights that it began with"), ("latest", "")):
        capsys.readouterr()
        load_asked_run(str(tmp_path / "new"), which, torch.device("cpu"))
        err = capsys.readouterr().err
        assert said in err and bool(said) == bool(err)


def test_fresh_moves_no_origin_away(corpus: Path, tmp_path: Path) -> None:
    assert train.run(configured(corpus, tmp_path / "run")) == 0
    for place in (tmp_path / "run", tmp_path / "run" / "ckpt" / "best"):
        config = configured(corpus, tmp_path / "run", init_from=str(place), fresh=True)
        with pytest.raises(ConfigError, match="lies in the run directory, which fresh=true moves aside"):
            train.run(config)
    assert not (tmp_path / "run.old-1").exists()


def test_quack_compares_with_the_weights_that_the_run_begins_with(corpus: Path, tmp_path: Path) -> None:
    quack = {"weights": {"name": "quack", "tau": 1.0}}
    assert train.run(configured(corpus, tmp_path / "origin", **quack, **OTHER)) == 0
    config = with_init_sha256(configured(corpus, tmp_path / "new", init_from=str(tmp_path / "origin"), **quack))
    session = setup(config)
    load_initial_weights(config, session.model, session.data.corpus)
    blocks: list[Any] = [*session.model.transformer.h]
    for block in blocks:
        for _, factors in block.weights.update_factors():
            torch.testing.assert_close(factors, torch.ones_like(factors))


def test_it_resumes_bit_for_bit_without_its_origin(origin: Path, corpus: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"init_from": str(origin), **OTHER}
    assert train.run(configured(corpus, tmp_path / "straight", **settings)) == 0
    assert train.run(configured(corpus, tmp_path / "halves", max_iters=3, **settings)) == 0
    shutil.rmtree(origin)
    with pytest.raises(ConfigError, match=r"init_from=.*origin does not exist"):
        train.run(configured(corpus, tmp_path / "new", **settings))
    assert train.run(configured(corpus, tmp_path / "halves", **settings)) == 0
    assert "origin has changed or is gone: the run goes on from its" in (tmp_path / "halves" / "train.log").read_text()
    assert_same_run(tmp_path / "straight", tmp_path / "halves")
    assert not (tmp_path / "new").exists()


def test_other_weights_are_another_run(origin: Path, corpus: Path, tmp_path: Path) -> None:
    run, kept = tmp_path / "run", str(origin / "ckpt" / "latest")
    assert train.run(configured(corpus, run, init_from=kept, max_iters=3)) == 0
    planned = with_init_sha256(replace(configured(corpus, run, init_from=kept, max_iters=3), out_dir=None))
    shutil.copytree(origin / "ckpt" / "latest", tmp_path / "moved")
    assert train.run(configured(corpus, run, init_from=str(tmp_path / "moved"), max_iters=3)) == 0  # the same weights
    for path in (None, str(origin / "ckpt" / "step_000005")):
        with pytest.raises(ConfigError, match=r"init_from \(SHA-256 of its weights\) \w{64} -> (unset|\w{64});"):
            train.run(configured(corpus, run, init_from=path))
    checkpoint.link(origin / "ckpt", "latest", 5)
    shutil.rmtree(origin / "ckpt" / "step_000006")
    assert with_init_sha256(replace(planned, init_sha256=None)).run_dir != planned.run_dir
    with pytest.raises(ConfigError, match=r"latest has changed: its SHA-256 is .*, not init_sha256="):
        train.run(replace(planned, out_dir=str(tmp_path / "late")))
    assert train.run(configured(corpus, run, init_from=kept, max_iters=6, schedule=SETTINGS["schedule"])) == 0
    assert not (tmp_path / "late").exists() and lines(run)[-1]["iter"] == 6


MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "size": ({"model": {**SETTINGS["model"], "n_layer": 3}}, r"model.n_layer 2 -> 3$"),
    "heads": ({"model": {**SETTINGS["model"], "n_head": 4}}, r"model.n_head 2 -> 4$"),
    "positions": ({"model": {**SETTINGS["model"], "block_size": 8}}, r"model.block_size 16 -> 8$"),
    "layout": ({"model": ROPE, "attention": {"name": "gqa", "n_kv_head": 1}}, "attention.name mha -> gqa"),
    "norm": ({"qk_norm": {"name": "lp", "p": 3.0}}, r"qk_norm.name none -> lp.*qk_norm.p unset -> 3.0"),
    "tokenizer": (
        {"data": "byte"},
        r"the tokens of char -> the 256 of data.tokenizer=byte: the text must have its tokens",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_run_that_does_not_fit_is_refused_by_name(name: str, origin: Path, corpus: Path, tmp_path: Path) -> None:
    changes, words = MISFITS[name]
    if isinstance(changes.get("data"), str):
        other = tmp_path / "other.txt"
        other.write_text(corpus.read_text() + "XYZ")
        changes = {"data": {"name": "text", "path": str(other), "tokenizer": changes["data"]}}
    with pytest.raises(ConfigError, match=words) as error:
        train.run(configured(corpus, tmp_path / "new", init_from=str(origin), **changes))
    assert str(error.value).startswith(f"init_from={origin} does not fit") and "\n" not in str(error.value)
    assert not (tmp_path / "new").exists()


def test_dropout_may_differ_with_rope_the_context_and_a_text_seen_before_is_told(corpus: Path, tmp_path: Path) -> None:
    assert train.run(configured(corpus, tmp_path / "rope", model=ROPE)) == 0
    longer = {**ROPE, "block_size": 32, "dropout": 0.0}
    data = {"name": "text", "path": str(corpus), "fold": 0}
    config = configured(corpus, tmp_path / "new", model=longer, init_from=str(tmp_path / "rope"))
    assert train.run(load_config({**asdict(config), "data": data})) == 0
    assert "rope was trained on text that this run holds out" in (tmp_path / "new" / "train.log").read_text()
    third = asdict(config) | {"data": data, "init_from": str(tmp_path / "new"), "out_dir": str(tmp_path / "third")}
    assert train.run(load_config(third)) == 0
    said = f"was itself begun from {tmp_path / 'rope'}, which may have seen"
    assert said in (tmp_path / "third" / "train.log").read_text()


def test_an_origin_of_more_tokens_or_of_an_older_text_is_warned_of(origin: Path, corpus: Path, tmp_path: Path) -> None:
    def new(name: str, init_from: Path | None, data: dict[str, Any]) -> str:
        settings = asdict(configured(corpus, tmp_path / name, init_from=init_from and str(init_from)))
        assert train.run(load_config({**settings, "data": data})) == 0
        return (tmp_path / name / "train.log").read_text()

    random = {"name": "random", "n_tokens": 2000, "vocab_size": 11}
    new("random", None, {**random, "val_tokens": 100})
    assert "was trained on" not in new("fewer", tmp_path / "random", {**random, "val_tokens": 90})
    more = new("more", tmp_path / "random", {**random, "val_tokens": 200})
    assert "was trained on text that this run holds out" in more
    own = tmp_path / "own.txt"
    own.write_text(corpus.read_text()[:-1])
    assert "was trained on" not in new("text", origin, {"name": "text", "path": str(own)})
    own.write_text(corpus.read_text())
    changed = "was trained on a text that has changed since: it may have had what this run holds out"
    assert changed in new("changed", tmp_path / "text", {"name": "text", "path": str(own)})


def test_sizes_may_be_written_out_or_left_to_their_default(origin: Path, corpus: Path, tmp_path: Path) -> None:
    m = SETTINGS["model"]
    heads = {"name": "mha", "head_dim": m["n_embd"] // m["n_head"]}
    written = {"model": {**m, "mlp_hidden": 4 * m["n_embd"]}, "attention": heads}
    assert train.run(configured(corpus, tmp_path / "new", init_from=str(origin), **written)) == 0
    with pytest.raises(ConfigError, match="attention.head_dim null -> 2$"):
        wrong = {"attention": {"name": "mha", "head_dim": 2}}
        train.run(configured(corpus, tmp_path / "wrong", init_from=str(origin), **wrong))
    plain = VARIANTS["gpt2"][1]
    export(random_model(plain), CHARS, tmp_path / "hf")
    sizes = replace(plain.model, mlp_hidden=4 * plain.model.n_embd)
    config = with_init_sha256(replace(plain, model=sizes, init_from=str(tmp_path / "hf")))
    assert load_initial_weights(config, GPT(config.gpt, CHARS.vocab_size), corpus_of(CHARS)) == []


@pytest.mark.parametrize(("block_size", "warned"), [(16, False), (32, True)])
def test_shuffled_windows_of_another_length_hold_out_other_text(
    block_size: int, warned: bool, corpus: Path, tmp_path: Path
) -> None:
    data = {"name": "text", "path": str(corpus), "fold": 0, "split": "shuffled"}
    base = asdict(configured(corpus, tmp_path / "rope", model=ROPE)) | {"data": data}
    assert train.run(load_config(base)) == 0
    new = base | {"out_dir": str(tmp_path / "new"), "init_from": str(tmp_path / "rope")}
    assert train.run(load_config(new | {"model": {**base["model"], "block_size": block_size}})) == 0
    assert ("on text that this run holds out" in (tmp_path / "new" / "train.log").read_text()) == warned


def corpus_of(tokenizer: CharTokenizer) -> Corpus:
    return Corpus("0", tokenizer, random_tokens(tokenizer, 99).numpy(), Split(train=((0, 50),), val=((50, 99),)))


@pytest.mark.parametrize("name", VARIANTS)
def test_an_exported_folder_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    """Exactly where one eps serves all norms, else to the round-off of a factor."""
    ours = random_model(VARIANTS[name][1])
    export(ours, CHARS, tmp_path / "hf")
    config = replace(VARIANTS[name][1], init_from=str(tmp_path / "hf"), out_dir=str(tmp_path / "new"))
    new = GPT(config.gpt, CHARS.vocab_size)
    new.init_weights(7)
    assert load_initial_weights(with_init_sha256(config), new, corpus_of(CHARS)) == []
    idx = random_tokens(CHARS, 3, config.model.block_size)
    exact = VARIANTS[name][0] in ("GPT2", "Llama")
    with torch.no_grad():
        torch.testing.assert_close(new.eval()(idx)[0], ours(idx)[0], rtol=0, atol=0 if exact else 2e-5)


def test_a_folder_that_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    bias, plain = VARIANTS["gpt2-bias-untied"][1], VARIANTS["gpt2"][1]
    export(random_model(bias), CHARS, tmp_path / "bias")
    export(random_model(plain), CHARS, tmp_path / "plain")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text("{}")
    no_bias = replace(bias, model=replace(bias.model, bias=False))
    shorter = replace(plain, model=replace(plain.model, n_layer=1))
    others = CharTokenizer("".join(reversed(CHARS.chars)))
    for folder, config, tokens, words in (
        ("plain", shorter, CHARS, r"n_layer 2 -> 1$"),
        (
            "plain",
            plain,
            others,
            "the tokens of char -> the 15 of data.tokenizer=char: the text must have its tokens",
        ),
        ("plain", VARIANTS["qwen3-gqa"][1], CHARS, "attention.name mha -> gqa"),
        ("bias", no_bias, CHARS, "model.bias true -> false"),
        ("bare", plain, CHARS, "bare has no model.safetensors"),
        ("nowhere", plain, CHARS, "nowhere does not exist"),
    ):
        config = replace(config, init_from=str(tmp_path / folder))
        with pytest.raises(ConfigError, match=words):
            load_initial_weights(with_init_sha256(config), GPT(config.gpt, tokens.vocab_size), corpus_of(tokens))


def test_a_sweep_freezes_the_weights_that_its_runs_begin_with_and_an_audit_trains_fresh_ones(
    origin: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = [*TINY, f"data=text data.path={corpus}".replace(" ", "\n"), "max_iters=2", "wandb.mode=disabled"]
    words = "\n".join([*tiny, "init_from=origin", "model.dropout=0.2"]).split("\n")
    (tmp_path / "tiny.yaml").write_text(f"overrides: {words}\ngrid: {{optim.learning_rate: [1e-3, 1e-2]}}\n")
    monkeypatch.chdir(tmp_path)
    assert launch(["sweep=tiny.yaml", "launcher.workers=1"]) == 0
    plan = read_plan(tmp_path / "runs" / "tiny")
    assert {run.config.init_sha256 for run in plan} == {sha256(origin / "ckpt" / "best")}
    began = [lines(tmp_path / "runs" / "tiny" / run.id)[0]["val/loss"] for run in plan]
    assert began == [min(line["val/loss"] for line in lines(origin) if "val/loss" in line)] * 2
    run = audit.Run(str(tmp_path / "runs" / "tiny" / plan[0].id), "best", torch.device("cpu"))
    assert run.train(2, 64)[0][0] == pytest.approx(math.log(64), abs=0.3)
