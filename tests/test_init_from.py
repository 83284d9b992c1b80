"""A run that begins with the weights of another run, or of a Hugging Face folder."""

import hashlib
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY, Trained, write_corpus
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
from scripts.import_checkpoint import ImportOptions, import_run
from sweeps.launch import main as launch
from sweeps.plan import read_plan
from training.init_from import begun_with, load_initial_weights, with_init_sha256
from training.session import setup

OTHER = {"optim": {"name": "adamw", "learning_rate": 2e-2}}  # of the new run: a recipe of its own
ROPE = {**SETTINGS["model"], "position": "rope", "rope_theta": 100.0}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("template")
    config = configured(write_corpus(folder), folder / "origin", eval_interval=1, checkpoint_interval=1)
    assert train.run(config) == 0
    return folder / "origin"


@pytest.fixture
def origin(template: Path, tmp_path: Path) -> Path:
    return shutil.copytree(template, tmp_path / "origin", symlinks=True)


def sha256(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize("place", ["", "ckpt/latest", "ckpt/best"])
def test_the_first_validation_loss_is_the_origins(place: str, origin: Path, trained: Trained) -> None:
    checkpoint.link(origin / "ckpt", "best", 5)  # as if iteration 5 were the lowest
    named = origin / "ckpt" / (place.removeprefix("ckpt/") or "best")
    new = trained("new", init_from=str(origin / place), **OTHER)
    loss = next(line["val/loss"] for line in lines(origin) if line["iter"] == checkpoint.load(named).step)
    began = lines(new)[0]
    assert began["val/loss"] == loss and began["lr"] != lines(origin)[0]["lr"]
    assert runs.saved_json(new, "summary")["init_from"] == {str(origin / place): sha256(named)}
    config = load_run(new / "ckpt" / "latest", torch.device("cpu")).config
    assert config.init_sha256 == sha256(named)
    name = replace(config, out_dir=None).run_dir.name
    assert f"-from_{sha256(named)[:8]}-" in name != replace(config, out_dir=None, init_sha256="0" * 64).run_dir.name
    counts = [w for key, w in weights(new).items() if key.startswith("optimizer/step/")]
    assert counts and all(count == 6 for count in counts)  # AdamW counts from 0


def test_a_best_checkpoint_that_is_the_origins_is_named(
    origin: Path, trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    new = trained("new", init_from=str(origin), max_iters=2, optim={"name": "adamw", "learning_rate": 1.0})
    for which, said in (("best", "iteration 0, the weights that it began with"), ("latest", "")):
        capsys.readouterr()
        load_asked_run(str(new), which, torch.device("cpu"))
        err = capsys.readouterr().err
        assert said in err and bool(said) == bool(err)


def test_fresh_moves_no_origin_away(trained: Trained, tmp_path: Path) -> None:
    run = trained()
    for place in (run, run / "ckpt" / "best"):
        with pytest.raises(ConfigError, match="lies in the run directory, which fresh=true moves aside"):
            trained(init_from=str(place), fresh=True)
    assert not (tmp_path / "run.old-1").exists()


def test_quack_compares_with_the_weights_that_the_run_begins_with(
    trained: Trained, corpus: Path, tmp_path: Path
) -> None:
    quack = {"weights": {"name": "quack", "tau": 1.0}}
    origin = trained("origin", **quack, **OTHER)
    config = with_init_sha256(configured(corpus, tmp_path / "new", init_from=str(origin), **quack))
    session = setup(config)
    load_initial_weights(config, session.model, session.data.corpus)
    blocks: list[Any] = [*session.model.transformer.h]
    for block in blocks:
        for _, factors in block.weights.update_factors():
            torch.testing.assert_close(factors, torch.ones_like(factors))


def test_it_resumes_bit_for_bit_without_its_origin(origin: Path, trained: Trained, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"init_from": str(origin), **OTHER}
    straight = trained("straight", **settings)
    trained("halves", max_iters=3, **settings)
    shutil.rmtree(origin)
    with pytest.raises(ConfigError, match=r"init_from=.*origin does not exist"):
        trained("new", **settings)
    halves = trained("halves", **settings)
    assert "origin has changed or is gone: the run goes on from its" in (halves / "train.log").read_text()
    assert_same_run(straight, halves)
    assert not (tmp_path / "new").exists()


def test_other_weights_are_another_run(origin: Path, trained: Trained, corpus: Path, tmp_path: Path) -> None:
    kept = str(origin / "ckpt" / "latest")
    run = trained(init_from=kept, max_iters=3)
    planned = with_init_sha256(replace(configured(corpus, run, init_from=kept, max_iters=3), out_dir=None))
    shutil.copytree(origin / "ckpt" / "latest", tmp_path / "moved")
    trained(init_from=str(tmp_path / "moved"), max_iters=3)  # the same weights
    for path in (None, str(origin / "ckpt" / "step_000005")):
        with pytest.raises(ConfigError, match=r"init_from \(SHA-256 of its weights\) \w{64} -> (unset|\w{64});"):
            trained(init_from=path)
    checkpoint.link(origin / "ckpt", "latest", 5)
    shutil.rmtree(origin / "ckpt" / "step_000006")
    assert with_init_sha256(replace(planned, init_sha256=None)).run_dir != planned.run_dir
    with pytest.raises(ConfigError, match=r"latest has changed: its SHA-256 is .*, not init_sha256="):
        train.run(replace(planned, out_dir=str(tmp_path / "late")))
    trained(init_from=kept, max_iters=6, schedule=SETTINGS["schedule"])
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
def test_a_run_that_does_not_fit_is_refused_by_name(
    name: str, origin: Path, trained: Trained, corpus: Path, tmp_path: Path
) -> None:
    changes, words = MISFITS[name]
    if isinstance(changes.get("data"), str):
        other = tmp_path / "other.txt"
        other.write_text(corpus.read_text() + "XYZ")
        changes = {"data": {"name": "text", "path": str(other), "tokenizer": changes["data"]}}
    with pytest.raises(ConfigError, match=words) as error:
        trained("new", init_from=str(origin), **changes)
    assert str(error.value).startswith(f"init_from={origin} does not fit") and "\n" not in str(error.value)
    assert not (tmp_path / "new").exists()


def test_dropout_may_differ_with_rope_the_context_and_a_text_seen_before_is_told(
    trained: Trained, corpus: Path
) -> None:
    rope = trained("rope", model=ROPE)
    longer = {"model": {**ROPE, "block_size": 32, "dropout": 0.0}}
    longer["data"] = {"name": "text", "path": str(corpus), "fold": 0}
    new = trained("new", init_from=str(rope), **longer)
    assert "rope was trained on text that this run holds out" in (new / "train.log").read_text()
    third = trained("third", init_from=str(new), **longer)
    assert f"was itself begun from {rope}, which may have seen" in (third / "train.log").read_text()


def test_an_origin_of_more_tokens_or_of_an_older_text_is_warned_of(
    origin: Path, trained: Trained, corpus: Path, tmp_path: Path
) -> None:
    def new(name: str, init_from: Path | None, data: dict[str, Any]) -> str:
        return (trained(name, init_from=init_from and str(init_from), data=data) / "train.log").read_text()

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


def test_sizes_may_be_written_out_or_left_to_their_default(origin: Path, trained: Trained, tmp_path: Path) -> None:
    m = SETTINGS["model"]
    heads = {"name": "mha", "head_dim": m["n_embd"] // m["n_head"]}
    trained("new", init_from=str(origin), model={**m, "mlp_hidden": 4 * m["n_embd"]}, attention=heads)
    with pytest.raises(ConfigError, match="attention.head_dim null -> 2$"):
        trained("wrong", init_from=str(origin), attention={"name": "mha", "head_dim": 2})
    plain = VARIANTS["gpt2"][1]
    export(random_model(plain), CHARS, tmp_path / "hf")
    sizes = replace(plain.model, mlp_hidden=4 * plain.model.n_embd)
    config = with_init_sha256(replace(plain, model=sizes, init_from=str(tmp_path / "hf")))
    assert load_initial_weights(config, GPT(config.gpt, CHARS.vocab_size), corpus_of(CHARS)) == []


@pytest.mark.parametrize(("block_size", "warned"), [(16, False), (32, True)])
def test_shuffled_windows_of_another_length_hold_out_other_text(
    block_size: int, warned: bool, trained: Trained, corpus: Path
) -> None:
    data = {"name": "text", "path": str(corpus), "fold": 0, "split": "shuffled"}
    rope = trained("rope", model=ROPE, data=data)
    new = trained("new", model={**ROPE, "block_size": block_size}, data=data, init_from=str(rope))
    assert ("on text that this run holds out" in (new / "train.log").read_text()) == warned


def corpus_of(tokenizer: CharTokenizer) -> Corpus:
    return Corpus("0", tokenizer, random_tokens(tokenizer, 99).numpy(), Split(train=((0, 50),), val=((50, 99),)))


def test_a_tokenizer_that_the_command_names_has_no_size_of_the_origins(trained: Trained, corpus: Path) -> None:
    data = {"name": "text", "path": str(corpus), "tokenizer": "bpe", "vocab_size": 260}
    origin = trained("bpe", data=data, max_iters=1)
    size = {"tokenizer": "bpe", "vocab_size": 260}
    for named, begun in (({}, size), ({"data.tokenizer": "bpe"}, size), ({"data.tokenizer": "char"}, None)):
        assert begun_with({"init_from": origin, **named}).get("data") == begun


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_an_exported_folder_gives_a_new_run_and_an_imported_one_the_same_logits(name: str, tmp_path: Path) -> None:
    """Exactly where one eps serves all norms, else to the round-off of a factor."""
    ours = random_model(VARIANTS[name][1])
    export(ours, CHARS, tmp_path / "hf")
    config = replace(VARIANTS[name][1], init_from=str(tmp_path / "hf"), out_dir=str(tmp_path / "new"))
    new = GPT(config.gpt, CHARS.vocab_size)
    new.init_weights(7)
    assert load_initial_weights(with_init_sha256(config), new, corpus_of(CHARS)) == []
    assert import_run(ImportOptions(str(tmp_path / "hf"), str(tmp_path / "run"))) == 0
    imported = load_run(tmp_path / "run" / "ckpt" / "best", torch.device("cpu")).model
    idx = random_tokens(CHARS, 3, config.model.block_size)
    expected, exact = ours(idx)[0], VARIANTS[name][0] in ("GPT2", "Llama")
    bound = 0 if exact else min(2e-5, 5e-6 * expected.abs().max().item())
    for model in (new.eval(), imported):
        torch.testing.assert_close(model(idx)[0], expected, rtol=0, atol=bound)
    assert expected.std() > 0.1


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
