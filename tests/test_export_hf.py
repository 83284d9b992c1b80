"""A run exported as a Hugging Face folder is the same model there, or is refused: ours and theirs have equal logits.

Theirs run their eager attention, which shares no kernel with ours. Nothing is downloaded.
"""

import functools
import json
import random
import types
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_config
from helpers.hugging_face import LLAMA, ROPE, VARIANTS
from helpers.runs import CHARS, random_model, random_tokens, save_run
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen3Config
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3
from variants import config_of

from core import checkpoint
from core.cli import compose, parse_yaml, run_script
from data.corpora import load_python_docs
from data.options import PythonDocsOptions
from data.tokenizer import SEPARATOR, BPETokenizer, ByteTokenizer, CharTokenizer, GPT2Tokenizer, Tokenizer, learn_bpe
from model.generate import generate
from model.gpt import GPT, rope_table, rotate
from model.hf import architecture_of
from model.options import MHAOptions
from sample import load_run
from scripts.export_hf import ExportOptions, export, export_run
from training.config import TrainConfig, load_config

main = functools.partial(run_script, ExportOptions, export_run, "")


class Float64Torch(types.SimpleNamespace):
    """The torch module, but that float32 means float64."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture(params=[torch.float64, torch.float32], ids=["float64", "float32"])
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.dtype]:
    """In float64, Hugging Face's RMSNorm and softmax, which cast to float32 by name, get float64 instead."""
    if request.param == torch.float64:
        for module in (modeling_llama, modeling_qwen3, modeling_deepseek_v3):
            monkeypatch.setattr(module, "torch", Float64Torch())
    yield request.param


TOLERANCE = {torch.float64: 1e-13, torch.float32: 5e-6}


@torch.no_grad()
def take_tables(ours: GPT, hf: Any) -> None:
    """Both tables come from float32 angles, by formulas that differ in the last bit: ours takes theirs, in float64."""
    tables = hf.model.rotary_emb(torch.zeros(1).double(), torch.arange(ours.block_size)[None])  # (1, block_size, d)
    for mine, table in zip(ours.buffers(), tables, strict=True):
        torch.testing.assert_close(mine, table[0, :, : mine.size(1)], rtol=0, atol=4e-6)
        mine.copy_(table[0, :, : mine.size(1)])


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
    logits, expected = ours(idx)[0], theirs(idx).logits
    assert logits.std() > 0.1 and (logits - expected).abs().max() < TOLERANCE[dtype] * expected.abs().max()


@pytest.mark.parametrize("module", [modeling_qwen3, modeling_deepseek_v3], ids=["qwen3", "deepseek_v3"])
def test_rotation_is_hugging_faces_rotate_half(module: Any) -> None:
    g = torch.Generator().manual_seed(2)
    q, k = (torch.randn(2, 3, 7, 10, generator=g, dtype=torch.float64) for _ in range(2))
    cos, sin = (table.double() for table in rope_table(20, 10, 123.0))  # (20, 5)
    doubled = [torch.cat([table, table], -1)[None, 4:11] for table in (cos, sin)]
    for mine, theirs in zip((q, k), module.apply_rotary_pos_emb(q, k, *doubled), strict=True):
        torch.testing.assert_close(rotate(mine, (cos, sin), pos=4), theirs, rtol=0, atol=1e-14)


def test_the_angles_are_hugging_faces_to_the_last_bits() -> None:
    config = Qwen3Config(head_dim=64, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    cos, sin = modeling_qwen3.Qwen3RotaryEmbedding(config)(torch.zeros(1), torch.arange(2048)[None])
    exact = torch.arange(2048.0).double()[:, None] / 10000 ** (torch.arange(0, 64, 2).double() / 64)
    for mine, theirs, true in zip(rope_table(2048, 64, 1e4), (cos, sin), (exact.cos(), exact.sin()), strict=True):
        assert (mine - true).abs().max() < 3e-4  # half a last bit of an angle of 2047 is 6e-5
        assert (mine - theirs[0, :, :32]).abs().max() < 3e-4


@pytest.mark.parametrize("name", ["gpt2", "llama-mha", "qwen3-gqa", "deepseek_v3-q_rank-untied"])
def test_an_exported_run_generates_the_same_text(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


@functools.cache
def learnt() -> list[bytes]:
    return learn_bpe([DOCS[:200_000]], 1000)


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "char": lambda: CharTokenizer("".join(sorted({*DOCS, *"".join(TEXTS)}))),
    "byte": ByteTokenizer,
    "bpe": lambda: BPETokenizer(learnt()),
    "gpt2": lambda: GPT2Tokenizer(learnt(), has_separator=True),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_tokenizer_is_ours(name: str, tmp_path: Path) -> None:
    tokenizer = TOKENIZERS[name]()
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
def test_a_variant_of_no_architecture_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, words = MISFITS[name]
    run = save_run(random_model(config), CHARS, tmp_path / "run")
    assert main([f"run={run}", f"out={tmp_path / 'hf'}"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and all(word in error for word in words), error
    settings = {group: asdict(getattr(config, group)) for group in ("model", "attention", "qk_norm")}
    nearest, _, with_norm = error.split("can be exported: ")[1].partition(", or with a QK norm ")
    assert with_norm.strip() == ("model=gqa_nano qk_norm=rms" if " qk_norm=none" in nearest else "")
    for word in nearest.split():
        key, value = word.split("=")
        group, _, leaf = key.partition(".")
        if leaf:
            settings[group][leaf] = parse_yaml(value, word)
        elif group != "model":
            settings[group] = {"name": value}
    assert architecture_of(load_config(settings).gpt)
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
    checkpoint.temporary_name(tmp_path / "hf").mkdir()  # somebody's
    assert main([f"run={run}", f"out={tmp_path / 'hf'}"]) == 0
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".tmp-hf", "hf", "run"]


def test_the_weights_are_those_of_the_checkpoint_that_was_named_and_a_fault_is_in_the_config(tmp_path: Path) -> None:
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
    export(first, CHARS, tmp_path / "hf", fault="unshifted_labels")
    assert loaded(tmp_path / "hf").config.fault == "unshifted_labels"
