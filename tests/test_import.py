"""What others keep comes in: nanoGPT's checkpoints and files, GPT-2 as the Hub has it."""

import errno
import json
import os
import pickle
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, Program
from helpers.runs import lines
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel
from variants import build

import train
from core.process import guarded
from core.schema import ConfigError
from data import shards
from data.tokenizer import PRINTABLE
from model.gpt import GPT
from model.options import ModelOptions
from sample import load_asked_run, load_run
from scripts.import_checkpoint import ImportOptions, import_run
from sweeps.plan import compose
from training.config import TrainConfig, load_config
from training.origin import read_file, read_origin

CHARS = "\n !abcdefgh"
NO_MODEL = [word for word in TINY if not word.startswith("model.")]
SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 12, "bias": True, "dropout": 0.1}


def nanogpt_weights(rows: int, **settings: Any) -> dict[str, Tensor]:
    """Random, under nanoGPT's names, with what torch.compile and older versions add."""
    config = TrainConfig(model=ModelOptions(**SIZES | settings))
    state = {f"_orig_mod.{name}": w for name, w in build(config, 0, torch.float32, rows).state_dict().items()}
    masks = {"_orig_mod.transformer.h.0.attn.bias": torch.ones(1, 1, 12, 12).tril()}
    return state | masks | {"_orig_mod.lm_head.weight": state["_orig_mod.transformer.wte.weight"]}


def nanogpt_logits(state: dict[str, Tensor], idx: Tensor) -> Tensor:
    """By transformers: GPT-2 with the exact GELU is nanoGPT's model.py, with linear weights transposed."""
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 12, "vocab_size": len(CHARS)}
    theirs = GPT2LMHeadModel(GPT2Config(activation_function="gelu", **sizes)).eval()
    named = {name.removeprefix("_orig_mod."): w for name, w in state.items()}
    linear = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    theirs.load_state_dict({name: w.T if name.endswith(linear) else w for name, w in named.items()}, strict=False)
    return theirs(idx).logits


def write_nanogpt(folder: Path, rows: int = len(CHARS), **settings: Any) -> Path:
    """A folder with ckpt.pt, as nanoGPT's train.py writes it, and meta.pkl."""
    folder.mkdir(exist_ok=True)
    saved = {"model": nanogpt_weights(rows, **settings), "model_args": {**SIZES, **settings, "vocab_size": rows}}
    torch.save(saved | {"iter_num": 7, "best_val_loss": torch.tensor(2.5), "optimizer": {}}, folder / "ckpt.pt")
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
    assert f"next: python {ROOT / 'sample.py'} run=run" in done.stdout
    model, tokenizer, config, state = load_asked_run(str(tmp_path / "run"), "best", torch.device("cpu"))
    idx = torch.randint(len(CHARS), (3, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert close(model(idx)[0], nanogpt_logits(nanogpt_weights(len(CHARS)), idx))
    assert tokenizer.decode(range(len(CHARS))) == CHARS and state["step"] == 7
    assert (config.model.bias, config.model.dropout, config.model.n_layer) == (True, 0.1, 2)
    assert forked("sample.py", "run=run", "start=a", "num_samples=1", "max_new_tokens=5").stdout.startswith("a")
    forked("scripts/report.py", "run=run")
    page = (tmp_path / "run" / "report.html").read_text()
    assert "done; imported weights" in page and "n_head" in page and "learning_rate" not in page  # which nobody knows
    shutil.copytree(tmp_path / "run", tmp_path / "twin", symlinks=True)
    assert "its weights were imported" in forked("scripts/compare.py", "a=run", "b=twin", status=2).stderr
    (tmp_path / "text.txt").write_text(CHARS)
    assert "| imported-mha-none | 7 |" in forked("scripts/compare.py", "a=run", "b=twin", "text=text.txt").stdout
    for words, says in (
        (["from=nano/ckpt.pt", "meta=nano/meta.pkl", "out=run"], "out=run exists, and is not empty"),
        (["out=new"], "from= must be given"),
        (["from=nano/ckpt.pt", "out=new"], "has no tokens that are known: give meta=FILE"),
    ):
        assert (
            says in forked("scripts/import_checkpoint.py", *words, status=2).stderr and not (tmp_path / "new").exists()
        )


def test_a_command_takes_the_model_and_the_tokens_of_what_it_begins_from(
    nanogpt: Path, tmp_path: Path, forked: Program
) -> None:
    forked("scripts/import_checkpoint.py", "from=nano/ckpt.pt", "out=run", "meta=nano/meta.pkl")
    (tmp_path / "own.txt").write_text("abc abd\n" * 200)  # fewer characters than the model has
    words = ["init_from=run", "data=text", "data.path=own.txt", *NO_MODEL, "max_iters=2"]
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
    twice = b"".join(b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86q" + bytes([i + 1]) for i in range(60))  # t = (t, t)
    bomb, deep = (b"\x80\x02})" + of + b"K\x01s." for of in (b"q\x00" + twice, b"\x85" * 300_000))  # as a dict's key
    sparse = b"\x80\x02}r\x00\x00\x00\x08."
    half = pickle.dumps({"itos": {0: "a", 1: "\ud83d"}})
    for content, says in (
        (bomb, "holds EMPTY_TUPLE"), (sparse, "numbers an object 134217728, in 9 bytes"),
        (half, "is not nanoGPT's meta.pkl: .*surrogates not allowed"),
    ):  # fmt: skip
        (nanogpt / "meta.pkl").write_bytes(content)
        with pytest.raises(ConfigError, match=says):
            read_origin("nano/ckpt.pt", "nano/meta.pkl")
    for content in (bomb, deep):
        with zipfile.ZipFile(nanogpt / "ckpt.pt") as parts, zipfile.ZipFile(nanogpt / "bomb.pt", "w") as made:
            for part in parts.infolist():
                made.writestr(part.filename, content if part.filename.endswith("/data.pkl") else parts.read(part))
        with pytest.raises(ConfigError, match="holds tuples within tuples without end"):
            read_origin("nano/bomb.pt")
    with zipfile.ZipFile(nanogpt / "long.pt", "w") as made:
        made.writestr("archive/data.pkl", b"\x80\x02" + b"N0" * 2**21 + b"N.")
    with pytest.raises(ConfigError, match="archive/data.pkl has more than 4,194,304 bytes"):
        read_origin("nano/long.pt")
    modulus = sys.hash_info.modulus
    (nanogpt / "meta.pkl").write_bytes(pickle.dumps({"itos": {modulus * i: "a" for i in range(9)}}))  # of one hash
    with pytest.raises(ConfigError, match="holds an integer too large for a token"):
        read_origin("nano/ckpt.pt", "nano/meta.pkl")
    torch.save({"model": {}, "model_args": {(i, modulus * i): 1 for i in range(20_000)}}, nanogpt / "keys.pt")
    with pytest.raises(ConfigError, match="holds more than 10,000 keys"):
        read_origin("nano/keys.pt")
    torch.save({"model": Evil(), "model_args": {}}, nanogpt / "ckpt.pt")
    with pytest.raises(ConfigError, match=r"init_from=nano/ckpt.pt .* is not what nanoGPT writes: .*[wW]eights.only"):
        read_origin("nano/ckpt.pt")
    assert not (tmp_path / "evil").exists()


def test_an_import_is_there_as_a_whole_or_not_at_all(
    nanogpt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ImportOptions(f"{nanogpt}/ckpt.pt", str(tmp_path / "run"), f"{nanogpt}/meta.pkl")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr("core.checkpoint.save", full)
        import_run(asked)
    assert {*os.listdir(tmp_path)} == {"nano"}
    assert import_run(asked) == 0 and {*os.listdir(tmp_path)} == {"nano", "run"}
    assert load_run(tmp_path / "run" / "ckpt" / "best", torch.device("cpu")).state["step"] == 7


def test_anything_else_gets_one_line_that_says_what_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"weights": 1}, "a.pt")
    torch.save({"model": {}, "model_args": {}, "iter_num": 0}, "b.pt")
    for name in ("c.pt", "d.bin"):
        Path(name).write_bytes(b"text")
    saved = {"model": {}, "model_args": {}, "iter_num": -5}
    torch.save(saved, "e.pt")
    for name, weight in (
        ("f.pt", torch.zeros(1).expand(2**40)), ("g.pt", torch.empty(3, device="meta")), ("h.pt", "text"),
        ("i.pt", torch.zeros(2, 2).to_sparse()),
    ):  # fmt: skip
        torch.save({**saved, "model": {"x": weight}}, name)
    torch.save({**saved, "iter_num": 5, "model": {"x": torch.ones(2), "_orig_mod.x": torch.zeros(2)}}, "k.pt")
    with zipfile.ZipFile("e.pt") as whole, zipfile.ZipFile("j.pt", "w", zipfile.ZIP_DEFLATED) as small:
        for part in whole.namelist():
            small.writestr(part, whole.read(part))
    for name, says in (
        ("e.pt", "iter_num=-5"), ("j.pt", "j.pt is compressed"), ("k.pt", "have transformer.x several times"),
        *((f"{letter}.pt", "its weights are no plain tensors") for letter in "fghi"),
        ("a.pt", "is not what nanoGPT writes: KeyError: 'model_args'"), ("b.pt", "KeyError: 'transformer.wte.weight'"),
        ("c.pt", "is not what nanoGPT writes"), ("d.bin", "cannot be read; what can be read: a run"),
    ):  # fmt: skip
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
        model.load_state_dict(origin.weights_for(model))
        theirs = nanogpt_weights(rows, bias=False)["_orig_mod.transformer.wte.weight"]
        assert torch.equal(model.transformer.wte.weight, theirs[:11])
    saved = torch.load(folder / "ckpt.pt")
    changed = saved["model"] | {"transformer.h.0.attn.q_norm.gain": torch.ones(8)}  # a model that is not nanoGPT's
    torch.save({**saved, "model": changed}, folder / "x.pt")
    with pytest.raises(
        ConfigError, match=r"of the checkpoint's settings: the weight .*q_norm.gain is float32 .*, not absent"
    ):
        read_origin(f"{folder}/x.pt", f"{folder}/meta.pkl").weights_for(model)
    torch.save({**saved, "model": saved["model"] | {"_orig_mod.lm_head.weight": torch.tensor(1.0)}}, folder / "y.pt")
    with pytest.raises(ConfigError, match=r"the weight lm_head.weight is float32 \(\)"):
        read_origin(f"{folder}/y.pt", f"{folder}/meta.pkl").weights_for(model)
    for rows in (10, 300):
        write_nanogpt(tmp_path / "nano", rows)
        with pytest.raises(ConfigError, match=f"its embedding has {rows} rows, its tokenizer 11 tokens"):
            read_origin(f"{folder}/ckpt.pt", f"{folder}/meta.pkl")


def gpt2_folder(folder: Path, base: bool = False, **settings: Any) -> Any:
    """What the Hub has of GPT-2, in small: 300 tokens. Returns transformers' model."""
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
    model.load_state_dict(origin.weights_for(model))
    idx = torch.randint(300, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert close(model(idx)[0], theirs(idx).logits)


def test_gpt2_is_trained_on_on_ones_own_text_by_one_command(tmp_path: Path, forked: Program) -> None:
    gpt2_folder(tmp_path / "gpt2")
    (tmp_path / "my.txt").write_text("a bad cab<|endoftext|> faced a dead bed\n" * 100)
    words = ["init_from=gpt2", "data=text", "data.path=my.txt", *NO_MODEL, "max_iters=2"]
    told = forked("train.py", *words, "out_dir=o", env={"XDG_CACHE_HOME": str(tmp_path)}).stderr
    assert told.count("<|endoftext|> in a text is ordinary text: it ends no document") == 1
    run = load_asked_run(str(tmp_path / "o"), "latest", torch.device("cpu"))
    assert run.config.model.mlp == "gelu_tanh" and run.tokenizer.vocab_size == 300
    refused = forked("train.py", "init_from=gpt2-medium", "out_dir=x", status=2, env={"HF_HUB_OFFLINE": "1"})
    assert "init_from=gpt2-medium is not in the Hub's cache, and the Hub is out of reach" in refused.stderr


def test_a_folder_of_another_model_or_tokenizer_is_refused(tmp_path: Path) -> None:
    gpt2_folder(tmp_path)
    for name, change, says in (
        ("config.json", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx true -> false"),
        ("config.json", {"activation_function": "relu"}, "activation_function=relu must be gelu"),
        ("config.json", {"n_layer": 1}, "transformer.h.1"),
        ("config.json", {"model_type": "bert"}, "model_type=bert must be one of gpt2, llama"),
        ("vocab.json", {"<|endoftext|>": -1}, "neither GPT-2's nor one of"),
        ("vocab.json", {" a": 299, "<|endoftext|>": 300}, "neither GPT-2's nor one of"),
    ):
        content = (tmp_path / name).read_text()
        (tmp_path / name).write_text(json.dumps(json.loads(content) | change))
        with pytest.raises(ConfigError) as error:
            read_origin(str(tmp_path))
        assert says in str(error.value) and "\n" not in str(error.value)
        (tmp_path / name).write_text(content)
        read_file.cache_clear()


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


@pytest.mark.parametrize(
    ("amid", "token"), [(train.update_ratios, 0), (train.update_ratios, 999), (shards.file_sha256, 5)]
)
def test_bins_that_are_written_to_while_a_run_reads_them_end_it(
    amid: Callable[..., Any], token: int, nanogpt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """By nanoGPT's prepare.py, say: after an update, or when their SHA-256 has been computed. 999 is no token of the
    model: its embedding raises an IndexError."""
    for name, size in (("train.bin", 900), ("val.bin", 100)):
        np.zeros(size, np.uint16).tofile(nanogpt / name)

    def write_tokens(*arguments: Any) -> Any:
        found = amid(*arguments)
        with (nanogpt / "train.bin").open("r+b") as file:
            np.full(900, token, np.uint16).tofile(file)
        return found

    module, saved = (train, ["step_000000"]) if amid is train.update_ratios else (shards, [])
    monkeypatch.setattr(module, amid.__name__, write_tokens)
    words = ["data=bin", f"data.path={nanogpt}", *TINY, "max_iters=40", "eval_interval=40", "checkpoint_interval=40"]
    config = load_config(compose([*words, f"out_dir={tmp_path / 'run'}"]))
    assert guarded(lambda: train.run(config)) == 1
    assert "train.bin was changed while the run trained on it; its last" in capsys.readouterr().err.splitlines()[-1]
    assert [file.name for file in (tmp_path / "run" / "ckpt").glob("step_*")] == saved


def test_a_text_may_have_a_validation_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abab" * 100)
    (tmp_path / "b.txt").write_text("cd" * 40)
    words = ["data=text", f"data.path={tmp_path}/a.txt", f"data.val_path={tmp_path}/b.txt", *TINY, "max_iters=2"]
    assert train.run(load_config(compose([*words, f"out_dir={tmp_path / 'run'}"]))) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["vocab_size"], summary["tokens"], summary["held_out_tokens"]) == (4, 480, 80)
    with pytest.raises(ConfigError, match="is what is held out: there are no folds"):
        load_config(compose([*words, "data.fold=1"]))
