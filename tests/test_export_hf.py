"""A run exported as a Hugging Face folder is the same model there, or is refused."""

import json
import random
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_config
from helpers.hugging_face import LLAMA, ROPE, TOLERANCE, VARIANTS, difference, dtype, take_tables
from helpers.runs import CHARS, random_model, random_tokens, save_run
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from variants import config_of

from core import checkpoint
from core.cli import compose
from data.corpora import load_python_docs
from data.options import PythonDocsOptions
from data.tokenizer import SEPARATOR, BPETokenizer, ByteTokenizer, CharTokenizer, GPT2Tokenizer, Tokenizer, learn_bpe
from model.generate import generate
from model.hf import architecture_of
from model.options import MHAOptions
from sample import load_run
from scripts.export_hf import export, main
from training.config import TrainConfig, load_config

__all__ = ["dtype"]  # a fixture


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model, with its eager attention, which shares no kernel with ours."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", output_loading_info=True, local_files_only=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    return model.eval()


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_transformers_computes_the_same_logits(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    architecture, config = VARIANTS[name]
    ours = random_model(config, dtype=dtype)
    export(ours, CHARS, tmp_path / "hf")
    theirs = loaded(tmp_path / "hf", dtype)
    assert type(theirs).__name__.startswith(architecture)
    idx = random_tokens(CHARS, 3, config.model.block_size)
    if dtype == torch.float64 and config.model.position == "rope":
        take_tables(ours, theirs)
    logits = ours(idx)[0]
    assert logits.std() > 0.1
    assert difference(logits, theirs(idx).logits) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", ["gpt2", "llama-mha", "qwen3-gqa", "deepseek_v3-q_rank-untied"])
def test_a_run_becomes_a_folder_that_generates_the_same_greedy_text(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = VARIANTS[name][1]
    config = replace(config, model=replace(config.model, tied=False))  # tied random weights repeat the last token
    run = save_run(random_model(config), CHARS, tmp_path / "run")
    assert main([f"run={run}", f"out={tmp_path / 'new' / 'hf'}"]) == 0
    assert VARIANTS[name][0] in capsys.readouterr().out
    files = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {file.name for file in (tmp_path / "new" / "hf").iterdir()} == files
    ours, tokenizer, *_ = load_run(run / "ckpt" / "best", torch.device("cpu"))
    hf_tokenizer = AutoTokenizer.from_pretrained(tmp_path / "new" / "hf", local_files_only=True)
    prompt = hf_tokenizer("a bad €", return_tensors="pt")
    assert prompt["input_ids"][0].tolist() == tokenizer.encode("a bad €").tolist()
    theirs = loaded(tmp_path / "new" / "hf").generate(
        prompt["input_ids"], attention_mask=prompt["attention_mask"], max_new_tokens=9, do_sample=False
    )
    mine = torch.stack(list(generate(ours, prompt["input_ids"], 9, temperature=0)), 1)[0].tolist()
    assert hf_tokenizer.decode(theirs[0]) == "a bad €" + tokenizer.decode(mine)
    assert len(set(mine)) >= 3  # it says more than one thing


TEXTS = ["", " ", "  two  spaces ,  and 'tis n't !", "tab\t\r\n\n\x00end ", "é e\u0301 € 😀 \u2028 ﬁ Ⅳ"]
TEXTS += ["<|endoftext|> [UNK]"]
DOCS = load_python_docs(PythonDocsOptions())
LEARNT = learn_bpe([DOCS[:200_000]], 1000)
TOKENIZERS: dict[str, Tokenizer] = {
    "char": CharTokenizer("".join(sorted({*DOCS, *"".join(TEXTS)}))),
    "byte": ByteTokenizer(),
    "bpe": BPETokenizer(LEARNT),
    "gpt2": GPT2Tokenizer(LEARNT, has_separator=True),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_tokenizer_is_ours(name: str, tmp_path: Path) -> None:
    tokenizer = TOKENIZERS[name]
    export(random_model(tiny_config(), tokenizer), tokenizer, tmp_path / "hf")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf", local_files_only=True)
    assert len(theirs) == tokenizer.vocab_size
    config = AutoConfig.from_pretrained(tmp_path / "hf", local_files_only=True)
    assert config.eos_token_id == theirs.eos_token_id == tokenizer.separator
    for text in [*TEXTS, DOCS[-50_000:]]:
        if tokenizer.separator is not None and SEPARATOR in text:  # a token there, text to ours
            assert theirs.encode(SEPARATOR) == [tokenizer.separator]
        else:
            assert theirs.encode(text) == tokenizer.encode(text).tolist()
        assert theirs.decode(theirs.encode(text)) == text
    picks = random.Random(0)
    for _ in range(300):  # most are not UTF-8
        tokens = picks.choices(range(tokenizer.vocab_size), k=20)
        assert theirs.decode(tokens) == tokenizer.decode(tokens)
    if name == "char":  # a character that the vocabulary lacks is refused by both
        for encode, error in ((tokenizer.encode, "U\\+4E00"), (theirs.encode, "UNK")):
            with pytest.raises(Exception, match=error):
                encode("一")


MISFITS: dict[str, tuple[TrainConfig, list[str]]] = {
    "lp": (config_of("mha", "lp3"), ["qk_norm=lp"]),
    "lp-qwen3": (config_of("gqa", "lp2", **LLAMA), ["qk_norm=lp"]),
    "layernorm": (config_of("gqa", "layernorm", **LLAMA), ["qk_norm=layernorm"]),
    "baby_gpt-rms": (config_of("mha", "rms"), ["GPT2", "qk_norm=rms"]),
    "qwen3-bias": (config_of("mha", "rms", **ROPE, bias=True), ["Qwen3", "model.bias=true"]),
    "mla-rms": (config_of("mla", "rms", **LLAMA), ["DeepseekV3", "qk_norm=rms"]),
    "mla-gelu": (config_of("mla", "none"), ["DeepseekV3", "model.mlp=gelu"]),
    "gqa-learned": (config_of("gqa", "none", norm="layernorm", position="learned", rope_theta=None), ["attention=gqa"]),
    "gpt2-head_dim": (config_of(MHAOptions(head_dim=12), "none"), ["attention.head_dim=12"]),
    "llama-width": (config_of(MHAOptions(head_dim=8), "none", **ROPE, n_head=3), ["model.n_embd=32", "model.n_head=3"]),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_variant_that_no_architecture_has_is_refused_by_name(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, words = MISFITS[name]
    run = save_run(random_model(config), CHARS, tmp_path / "run")
    assert main([f"run={run}", f"out={tmp_path / 'hf'}"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and all(word in error for word in words), error
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("words", "architecture"),
    [
        (["model=baby_gpt"], "GPT2"),
        (["model=gpt2_124m"], "GPT2"),
        (["model=qwen_134m", "qk_norm=rms"], "Qwen3"),
        (["model=gqa_nano", "qk_norm=none"], "Llama"),
        (["model=mla_400m", "qk_clip=clip"], "DeepseekV3"),
    ],
    ids=str,
)
def test_presets_have_the_architectures_that_they_are_named_for(words: list[str], architecture: str) -> None:
    assert architecture_of(load_config(compose(TrainConfig, [*words])).gpt) == architecture


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = save_run(random_model(tiny_config()), CHARS, tmp_path / "run")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("full", "file"):
        assert main([f"run={run}", f"out={tmp_path / name}"]) == 2
        assert f"{name} is not" in capsys.readouterr().err
    assert [(tmp_path / name).read_text() for name in ("full/mine", "file")] == ["mine", "mine"]
    assert len(list((tmp_path / "full").iterdir())) == 1
    (tmp_path / "empty").mkdir()
    assert main([f"run={run}", f"out={tmp_path / 'empty'}"]) == 0


def test_a_failed_export_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = save_run(random_model(tiny_config()), CHARS, tmp_path / "run")

    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert main([f"run={run}", f"out={tmp_path / 'hf'}"]) == 1
    assert "No space left" in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]
    monkeypatch.undo()
    checkpoint.temporary_name(tmp_path / "hf").mkdir()  # as a kill leaves it
    assert main([f"run={run}", f"out={tmp_path / 'hf'}"]) == 0
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["hf", "run"]


def test_the_weights_are_those_of_the_checkpoint_that_was_named(tmp_path: Path) -> None:
    first, second = random_model(tiny_config()), random_model(tiny_config())
    with torch.no_grad():
        second.transformer.wte.weight.add_(1)
    run = save_run(first, CHARS, tmp_path / "run")
    state = {"config": asdict(second.config), "tokenizer": CHARS.to_dict(), "step": 2}
    checkpoint.save(run / "ckpt", 2, {"model": second.state_dict()}, state, best=False)
    for which, model in (("best", first), ("latest", second)):
        assert main([f"run={run}", f"out={tmp_path / which}", f"checkpoint={which}"]) == 0
        assert torch.equal(loaded(tmp_path / which).transformer.wte.weight, model.transformer.wte.weight)
    settings = json.loads((tmp_path / "best" / "config.json").read_text())
    assert settings["dtype"] == "float32" and "fault" not in settings


def test_a_fault_is_in_the_folders_config(tmp_path: Path) -> None:
    export(random_model(tiny_config()), CHARS, tmp_path / "hf", fault="unshifted_labels")
    assert loaded(tmp_path / "hf").config.fault == "unshifted_labels"
