"""What others keep comes in: nanoGPT's checkpoints and files, GPT-2 as the Hub has it."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TINY, Program
from helpers.runs import lines
from torch import Tensor
from torch.nn import functional as F
from variants import build

import train
from core.schema import ConfigError
from data.tokenizer import PRINTABLE
from model.gpt import GPT
from model.options import ModelOptions
from sample import load_asked_run
from scripts import import_checkpoint
from sweeps.plan import compose
from training.config import TrainConfig, load_config
from training.origin import read_origin

CHARS = "\n !abcdefgh"
SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 12, "bias": True, "dropout": 0.1}


def nanogpt_weights(rows: int, **settings: Any) -> dict[str, Tensor]:
    """Random, under nanoGPT's names, with what torch.compile and older versions add."""
    config = TrainConfig(model=ModelOptions(**SIZES | settings))
    state = {f"_orig_mod.{name}": w for name, w in build(config, 0, torch.float32, rows).state_dict().items()}
    masks = {"_orig_mod.transformer.h.0.attn.bias": torch.ones(1, 1, 12, 12).tril()}
    return state | masks | {"_orig_mod.lm_head.weight": state["_orig_mod.transformer.wte.weight"]}


def nanogpt_logits(state: dict[str, Tensor], idx: Tensor) -> Tensor:
    """The forward pass of nanoGPT's model.py, written out, in float64. idx: (B, T) -> (B, T, V)."""
    w = {k.removeprefix("_orig_mod.").removeprefix("transformer."): x.double() for k, x in state.items()}
    x = w["wte.weight"][idx] + w["wpe.weight"][: idx.size(1)]

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w.get(f"{name}.bias"))

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    for i in range(2):
        qkv = linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn")
        q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in qkv.chunk(3, -1))  # (B, nh, T, hs)
        att = (q @ k.mT / q.size(-1) ** 0.5).masked_fill(torch.ones(idx.size(1), idx.size(1)).triu(1) > 0, -torch.inf)
        x = x + linear((att.softmax(-1) @ v).transpose(1, 2).flatten(2), f"h.{i}.attn.c_proj")
        x = x + linear(F.gelu(linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")), f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ w["wte.weight"].T


def write_nanogpt(folder: Path, rows: int = len(CHARS), **settings: Any) -> Path:
    """A folder with ckpt.pt, as nanoGPT's train.py writes it, and meta.pkl."""
    folder.mkdir(exist_ok=True)
    saved = {"model": nanogpt_weights(rows, **settings), "model_args": {**SIZES, **settings, "vocab_size": rows}}
    progress = {
        "iter_num": 7,
        "best_val_loss": torch.tensor(2.5),
        "optimizer": {"state": {}},
        "config": {"dataset": "x"},
    }
    torch.save(saved | progress, folder / "ckpt.pt")
    meta = {"vocab_size": len(CHARS), "itos": dict(enumerate(CHARS)), "stoi": {c: i for i, c in enumerate(CHARS)}}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    return folder


@pytest.fixture
def nanogpt(tmp_path: Path) -> Path:
    return write_nanogpt(tmp_path / "nano")


def close(ours: Tensor, theirs: Tensor) -> bool:
    return float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-5


def test_a_nanogpt_checkpoint_becomes_a_run_with_its_logits(nanogpt: Path, tmp_path: Path, forked: Program) -> None:
    done = forked("scripts/import_checkpoint.py", "from=nano/ckpt.pt", "out=run", "meta=nano/meta.pkl")
    assert "next: python sample.py run=run" in done.stdout
    model, tokenizer, config, state = load_asked_run(str(tmp_path / "run"), "best", torch.device("cpu"))
    idx = torch.randint(len(CHARS), (3, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert close(model(idx)[0].double(), nanogpt_logits(nanogpt_weights(len(CHARS)), idx))
    assert tokenizer.decode(range(len(CHARS))) == CHARS and state["step"] == 7
    assert (config.model.bias, config.model.dropout, config.model.n_layer) == (True, 0.1, 2)
    assert forked("sample.py", "run=run", "start=a", "num_samples=1", "max_new_tokens=5").stdout.startswith("a")
    again = forked("scripts/import_checkpoint.py", "from=nano/ckpt.pt", "out=run", "meta=nano/meta.pkl", status=2)
    assert "out=run exists, and is not empty" in again.stderr


def free_of_model(words: list[str]) -> list[str]:
    return [word for word in words if not word.startswith("model.")]


def test_a_command_takes_the_model_and_the_tokens_of_what_it_begins_from(
    nanogpt: Path, tmp_path: Path, forked: Program
) -> None:
    forked("scripts/import_checkpoint.py", "from=nano/ckpt.pt", "out=run", "meta=nano/meta.pkl")
    (tmp_path / "own.txt").write_text("abc abd\n" * 200)  # fewer characters than the model has
    words = ["init_from=run", "data=text", "data.path=own.txt", *free_of_model(TINY), "max_iters=2"]
    forked("train.py", *words, "out_dir=own")
    config = load_asked_run(str(tmp_path / "own"), "latest", torch.device("cpu"))
    assert config.tokenizer.pieces == [c.encode() for c in CHARS] and config.config.model.n_embd == 16
    (tmp_path / "run").rename(tmp_path / "gone")  # it goes on without its origin
    forked("train.py", *words, "out_dir=own", "schedule.lr_decay_iters=2", "max_iters=3")
    assert lines(tmp_path / "own")[-1]["iter"] == 3
    (tmp_path / "gone").rename(tmp_path / "run")
    misfit = forked("train.py", *words, "model.n_layer=3", "out_dir=no", status=2)
    assert "model.n_layer 2 -> 3" in misfit.stderr and not (tmp_path / "no").exists()
    (tmp_path / "own.txt").write_text("xyz" * 500)
    assert "the character 'x'" in forked("train.py", *words, "out_dir=no", status=2).stderr


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch evil",)


def test_no_pickle_of_a_stranger_runs(nanogpt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (nanogpt / "meta.pkl").write_bytes(pickle.dumps({"itos": Evil()}))
    with pytest.raises(ConfigError, match=r"meta=nano/meta.pkl .*: holds (posix|os).system: only plain dicts"):
        read_origin("nano/ckpt.pt", "nano/meta.pkl")
    torch.save({"model": Evil(), "model_args": {}}, nanogpt / "ckpt.pt")
    with pytest.raises(ConfigError, match=r"init_from=nano/ckpt.pt .* is not what nanoGPT writes: .*[wW]eights.only"):
        read_origin("nano/ckpt.pt")
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("x.pt", {"weights": 1}, "it is not what nanoGPT writes: KeyError: 'model_args'"),
        ("x.pt", {"model": {}, "model_args": {}, "iter_num": 0}, "KeyError: 'transformer.wte.weight'"),
        ("x.bin", None, "cannot be read; what can be read: a run"),
        ("x.pt", b"text", "it is not what nanoGPT writes"),
    ],
)
def test_anything_else_gets_one_line_that_says_what_can_be_read(
    name: str, content: Any, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if isinstance(content, dict):
        torch.save(content, name)
    else:
        Path(name).write_bytes(content or b"")
    with pytest.raises(ConfigError) as error:
        read_origin(name)
    assert str(error.value).startswith(f"init_from={name}") and says in str(error.value)
    assert "nanoGPT's ckpt.pt, a Hugging Face folder" in str(error.value) and "\n" not in str(error.value)


def test_rows_past_the_tokenizer_are_cut_and_named(tmp_path: Path) -> None:
    for rows, notes in ((64, ["has 64 rows for 11 tokens: the last 53 are cut"]), (11, [])):
        folder = write_nanogpt(tmp_path / "nano", rows, bias=False)
        origin = read_origin(f"{folder}/ckpt.pt", f"{folder}/meta.pkl")
        assert origin.notes == notes and not origin.config.model.bias
        model = GPT(origin.config, 11)
        origin.load_into(model)
        theirs = nanogpt_weights(rows, bias=False)["_orig_mod.transformer.wte.weight"]
        assert torch.equal(model.transformer.wte.weight, theirs[:11])
    saved = torch.load(folder / "ckpt.pt")
    changed = saved["model"] | {"transformer.h.0.attn.q_norm.gain": torch.ones(8)}  # a model that is not nanoGPT's
    torch.save({**saved, "model": changed}, folder / "x.pt")
    with pytest.raises(ConfigError, match=r"not those of the checkpoint's settings: .*Unexpected key.*q_norm"):
        read_origin(f"{folder}/x.pt", f"{folder}/meta.pkl").load_into(model)
    for rows in (10, 300):
        write_nanogpt(tmp_path / "nano", rows)
        with pytest.raises(ConfigError, match=f"its embedding has {rows} rows, its tokenizer 11 tokens"):
            read_origin(f"{folder}/ckpt.pt", f"{folder}/meta.pkl")


def gpt2_folder(folder: Path, base: bool = False, **settings: Any) -> Any:
    """What the Hub has of GPT-2, in small: 300 tokens. Returns transformers' model."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=300, n_positions=16, n_embd=16, n_layer=2, n_head=2, **settings)
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn(p.shape))
    (model.transformer if base else model).save_pretrained(folder)
    letters = [PRINTABLE[b] for b in (*b" abcdefgh",)]
    pairs = [(a, b) for a in letters for b in letters][:43]
    vocab = {token: i for i, token in enumerate([*PRINTABLE.values(), *(a + b for a, b in pairs), "<|endoftext|>"])}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in pairs) + "\n")
    return model


@pytest.mark.parametrize("base", [False, True])
@pytest.mark.parametrize("settings", [{}, {"activation_function": "gelu", "n_inner": 24}])
def test_gpt2_as_the_hub_has_it_gives_its_logits(settings: dict[str, Any], base: bool, tmp_path: Path) -> None:
    theirs = gpt2_folder(tmp_path / "gpt2", base, **settings)
    content = json.loads((tmp_path / "gpt2" / "config.json").read_text())
    for key in ("activation_function", "layer_norm_epsilon", "resid_pdrop", "tie_word_embeddings"):
        if not settings:
            content.pop(key, None)  # absent: transformers' default
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(content))
    origin = read_origin(str(tmp_path / "gpt2"))
    assert origin.config.model.mlp == ("gelu" if settings else "gelu_tanh") and origin.config.model.bias
    assert origin.tokenizer is not None and origin.tokenizer.separator == 299
    model = GPT(origin.config, 300).eval()
    origin.load_into(model)
    idx = torch.randint(300, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert close(model(idx)[0], theirs(idx).logits)


def test_gpt2_is_trained_on_on_ones_own_text_by_one_command(tmp_path: Path, forked: Program) -> None:
    gpt2_folder(tmp_path / "gpt2")
    (tmp_path / "my.txt").write_text("a bad cab<|endoftext|> faced a dead bed\n" * 100)
    words = ["init_from=gpt2", "data=text", "data.path=my.txt", *free_of_model(TINY), "max_iters=2"]
    told = forked("train.py", *words, "out_dir=o", env={"XDG_CACHE_HOME": str(tmp_path)}).stderr
    assert told.count("<|endoftext|> in a text is ordinary text: it ends no document") == 1
    run = load_asked_run(str(tmp_path / "o"), "latest", torch.device("cpu"))
    assert run.config.model.mlp == "gelu_tanh" and run.tokenizer.vocab_size == 300
    refused = forked("train.py", "init_from=gpt2-medium", "out_dir=x", status=2, env={"HF_HUB_OFFLINE": "1"})
    assert "init_from=gpt2-medium is not in the Hub's cache, and the Hub is out of reach" in refused.stderr


@pytest.mark.parametrize(
    ("file", "change", "says"),
    [
        ("config.json", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx true -> false"),
        ("config.json", {"activation_function": "relu"}, "activation_function=relu must be gelu"),
        ("config.json", {"n_layer": 1}, "transformer.h.1"),
        ("config.json", {"model_type": "bert"}, "model_type=bert must be one of gpt2, llama"),
        ("vocab.json", {"<|endoftext|>": -1}, "neither GPT-2's nor one of"),
        ("vocab.json", {" a": 299, "<|endoftext|>": 300}, "neither GPT-2's nor one of"),
    ],
)
def test_a_folder_of_another_model_or_tokenizer_is_refused(
    file: str, change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    gpt2_folder(tmp_path / "gpt2")
    content = json.loads((tmp_path / "gpt2" / file).read_text())
    (tmp_path / "gpt2" / file).write_text(json.dumps(content | change))
    with pytest.raises(ConfigError) as error:
        read_origin(str(tmp_path / "gpt2"))
    assert says in str(error.value) and "\n" not in str(error.value)


# -----------------------------------------------------------------------------
# train.bin, val.bin; a validation file


def test_bins_are_read_as_nanogpt_wrote_them(nanogpt: Path, tmp_path: Path, forked: Program) -> None:
    tokens = np.random.default_rng(0).integers(len(CHARS), size=1000, dtype=np.uint16)
    for name, part in (("train.bin", tokens[:900]), ("val.bin", tokens[900:])):
        part.tofile(nanogpt / name)
    words = ["data=bin", "data.path=nano", *TINY, "max_iters=2"]
    forked("train.py", *words, "out_dir=run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["vocab_size"], summary["tokens"], summary["held_out_tokens"]) == (len(CHARS), 1000, 100)
    assert "data.fold=1 is unknown" in forked("train.py", *words, "data.fold=1", status=2).stderr
    tokens[5] = len(CHARS)
    tokens[:900].tofile(nanogpt / "train.bin")
    high = forked("train.py", *words, "out_dir=high", status=2).stderr
    assert "train.bin holds token 11, and its tokenizer, char, has 11" in high
    tokens[:5].tofile(nanogpt / "train.bin")
    (nanogpt / "val.bin").unlink()
    assert "has no val.bin" in forked("train.py", *words, "out_dir=high", status=2).stderr


def test_a_text_may_have_a_validation_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abab" * 100)
    (tmp_path / "b.txt").write_text("cd" * 40)
    words = ["data=text", f"data.path={tmp_path}/a.txt", f"data.val_path={tmp_path}/b.txt", *TINY, "max_iters=2"]
    assert train.run(load_config(compose([*words, f"out_dir={tmp_path / 'run'}"]))) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["vocab_size"], summary["tokens"], summary["held_out_tokens"]) == (4, 480, 80)
    with pytest.raises(ConfigError, match="is what is held out: there are no folds"):
        load_config(compose([*words, "data.fold=1"]))


def test_the_import_says_what_it_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nano = write_nanogpt(tmp_path / "nano")
    for words, said in (
        ([], "from= must be given"),
        ([f"from={nano}/ckpt.pt"], "has no tokens that are known: give meta=FILE"),
        ([f"from={nano}/no.pt"], "no.pt does not exist"),
    ):
        assert import_checkpoint.main([f"out={tmp_path / 'run'}", *words]) == 2
        assert said in capsys.readouterr().err and not (tmp_path / "run").exists()
