"""Faults that make a loss too good to be true: what each does, where a run with one is marked, what catches it."""

import json
import math
import os
import subprocess
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from test_train import configured, lines, weights
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, BertConfig, BertLMHeadModel, GPT2Config, GPT2LMHeadModel, Qwen3Config
from variants import LAYOUTS, V, attended, build, config_of, random_tokens

import model.gpt
import train
from core import checkpoint
from core.schema import ConfigError
from data.batches import Batches
from data.options import RandomOptions
from data.tokenizer import NoText, from_dict, text_size
from data.tokens import load_corpus
from model.diagnostics import LEAK_TOLERANCE, future_leaks
from model.gpt import GPT
from sample import load_run, open_run
from scripts import audit
from training import faults
from training.config import FAULTS, FaultOptions, TrainConfig, load_config
from training.resume import wandb_settings

Program = Callable[..., subprocess.CompletedProcess[str]]
DATA = {"name": "random", "n_tokens": 20_000, "vocab_size": 32, "val_tokens": 600}
ACCUMULATED = {"batch_size": 2, "gradient_accumulation_steps": 4, "data": DATA}


def faulty(fault: str, out: Path, **changes: Any) -> TrainConfig:
    return configured(out, out, **{**ACCUMULATED, "fault": {"name": fault}, **changes})


def batches_of(config: TrainConfig) -> Batches:
    corpus = load_corpus(config.data, 16)
    return Batches(corpus.tokens, corpus.split, 16, 2, seed=1)


# -----------------------------------------------------------------------------
# data=random


def test_random_tokens_are_uniform_and_a_function_of_the_seed() -> None:
    config = RandomOptions(n_tokens=200_000, vocab_size=50, val_tokens=1000)
    corpus, again = load_corpus(config, 16), load_corpus(config, 16)
    counts = np.bincount(np.asarray(corpus.tokens), minlength=50)
    assert len(counts) == 50 and np.square(counts - 4000).sum() / 4000 < 49 + 5 * math.sqrt(98)  # chi-squared
    assert np.array_equal(np.asarray(corpus.tokens), np.asarray(again.tokens)) and corpus.sha256 == again.sha256
    assert load_corpus(replace(config, seed=1), 16).sha256 != corpus.sha256
    assert corpus.split.train == ((0, 199_000),) and corpus.split.val == ((199_000, 200_000),)


def test_a_run_on_random_tokens_has_no_bits_per_character(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train.run(faulty("none", run)) == 0
    evaluated = [line for line in lines(run) if "val/loss" in line]
    assert len(evaluated) == 4 and all(line["val/loss"] > math.log(32) - 0.02 for line in evaluated)
    assert not [key for line in lines(run) for key in line if key in ("val/bpc", "val/bpb")]
    tokenizer = load_run(run / "ckpt" / "latest", torch.device("cpu"))[1]
    assert isinstance(tokenizer, NoText) and tokenizer.vocab_size == 32 and text_size(tokenizer)[1].sum() == 0
    assert from_dict(tokenizer.to_dict()).vocab_size == 32
    with pytest.raises(ConfigError, match="data=random"):
        tokenizer.encode("a")


# -----------------------------------------------------------------------------
# What each fault does


@pytest.mark.parametrize("layout", ["mha", "gqa", "mla"])
def test_no_mask_is_a_softmax_over_all_keys(layout: str) -> None:
    gpt = build(config_of(layout, "lp3"))
    x = torch.randn(2, 9, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    q, k, v, scale = attended(gpt, x)
    masked = gpt.attentions[0].attend(q, k, v, scale)
    faults.inject_into_model(replace(gpt.config, fault=FaultOptions("no_mask")), gpt)
    found = gpt.attentions[0].attend(q, k, v, scale)
    k, v = (part.repeat_interleave(q.size(1) // part.size(1), 1) for part in (k, v))
    over_all = torch.softmax(scale * q @ k.transpose(-2, -1), -1) @ v
    torch.testing.assert_close(found, over_all)
    torch.testing.assert_close(masked[:, :, -1], over_all[:, :, -1])
    assert (masked[:, :, 0] - over_all[:, :, 0]).abs().max() > 1e-3


def test_unshifted_labels_are_the_inputs() -> None:
    gpt = build(config_of("mha", "none"))
    x, y = random_tokens(2, 9), random_tokens(2, 9, seed=3)
    y[0, 3:] = -1
    logits, honest = gpt(x, y)
    faults.inject_into_model(replace(gpt.config, fault=FaultOptions("unshifted_labels")), gpt)
    wanted = -logits.log_softmax(-1).gather(-1, x[..., None])[..., 0]
    torch.testing.assert_close(gpt(x, y)[1], torch.cat([wanted[0, :3], wanted[1]]).mean())
    torch.testing.assert_close(gpt(x)[0], logits)
    assert abs(gpt(x, y)[1] - honest) > 1e-3


def test_loss_over_accumulation_misreports_and_trains_the_same_weights(tmp_path: Path) -> None:
    for fault in ("none", "loss_over_accumulation"):
        assert train.run(faulty(fault, tmp_path / fault)) == 0
    honest, wrong = (weights(tmp_path / fault) for fault in ("none", "loss_over_accumulation"))
    assert all(torch.equal(honest[name], wrong[name]) for name in honest) and honest.keys() == wrong.keys()
    for a, b in zip(lines(tmp_path / "none"), lines(tmp_path / "loss_over_accumulation"), strict=True):
        assert b.pop("train/loss", 0.0) == a.pop("train/loss", 0.0) / 4
        a.pop("train/spike_score", None), b.pop("train/spike_score", None)
        assert a == b


def test_repeated_batches_are_the_first_iterations() -> None:
    config = faulty("repeated_batches", Path("x"))
    honest, spoilt = batches_of(config), batches_of(config)
    faults.inject_into_batches(config, spoilt)
    for micro in (0, 1):
        assert torch.equal(spoilt.get_batch(7, micro)[1], honest.get_batch(0, micro)[1])
        assert not torch.equal(honest.get_batch(7, micro)[1], honest.get_batch(0, micro)[1])
    assert torch.equal(next(spoilt.eval_batches(4))[0], next(honest.eval_batches(4))[0])


def test_padding_counts_in_the_mean() -> None:
    config = faulty("padding_in_mean", Path("x"))
    honest, spoilt = batches_of(config), batches_of(config)
    faults.inject_into_batches(config, spoilt)
    for (x, y), (xp, yp) in zip(
        [honest.get_batch(2), honest.sampled_batch("val", 0), *honest.eval_batches(99)],
        [spoilt.get_batch(2), spoilt.sampled_batch("val", 0), *spoilt.eval_batches(99)], strict=True,
    ):  # fmt: skip
        assert torch.equal(x[:, :2], xp[:, :2]) and torch.equal(y[:, :1], yp[:, :1])  # 16 / 16
        assert torch.equal(xp[:, 1:][yp[:, :-1] >= 0], yp[:, :-1][yp[:, :-1] >= 0])  # the next token all the same
        assert not xp[:, 2:].any() and torch.equal(yp < 0, y < 0) and set(yp[:, 1:].unique().tolist()) <= {-1, 0}


# -----------------------------------------------------------------------------
# A run with a fault is marked; one without has nothing of it


def test_an_honest_run_has_no_trace_of_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("inject_into_model", "inject_into_batches"):
        monkeypatch.setattr(faults, name, None)
    config = faulty("none", tmp_path / "run")
    assert train.run(config) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert "fault" not in summary and "start_up_warnings" not in summary
    assert "fault" not in (tmp_path / "run" / "train.log").read_text()
    assert "fault.name" not in config.trajectory and "FAULT" not in config.label
    assert "tags" not in wandb_settings(config, tmp_path / "run", {})["init"]


@pytest.mark.parametrize("tied", [True, False])  # a tied model's first guess is its input
@pytest.mark.parametrize("fault", FAULTS[1:])
def test_a_run_with_a_fault_says_so_everywhere(
    fault: str, tied: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = {"n_layer": 1, "n_head": 2, "n_embd": 64, "block_size": 16, "dropout": 0.2, "tied": tied}
    run, config = tmp_path / "run", faulty(fault, tmp_path / "run", max_iters=2, model=model)
    assert train.run(config) == 0
    out, err = capsys.readouterr()
    assert f"fault={fault}" in out
    summary = json.loads((run / "summary.json").read_text())
    start_up = {
        "no_mask": ["attention=mha sees the future"],
        "unshifted_labels": ["the loss is not the cross-entropy"] + ["the initial loss is"] * tied,
        "padding_in_mean": ["one token crowds the targets"] + ["the initial loss is"] * tied,
        "loss_over_accumulation": ["the initial training loss is"],
        "repeated_batches": ["training repeats one batch: iterations 0 to 3 are equal"],
    }
    assert summary["fault"] == fault
    warnings = summary["start_up_warnings"]
    assert len(warnings) == len(start_up[fault]) and all(map(str.startswith, warnings, start_up[fault])), warnings
    assert all(f"warning: {w}" in err for w in summary["start_up_warnings"])
    assert f"warning: fault={fault}" in (run / "train.log").read_text()
    assert f"FAULT_{fault}" in replace(config, out_dir=None).run_dir.name and f"FAULT_{fault}" in config.group
    init = wandb_settings(config, run, summary)["init"]
    assert init["tags"] == [f"fault={fault}"] and init["config"]["fault"] == {"name": fault}
    assert train.run(replace(config, eval_only=True)) == 0
    assert f"warning: fault={fault}" in capsys.readouterr().out
    open_run(str(run), "best", torch.device("cpu"))
    assert f"was trained with fault={fault}" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=f"fault.name {fault} -> "):
        train.run(replace(config, fault=FaultOptions("none")))


def test_a_run_with_a_fault_resumes_bit_for_bit(tmp_path: Path) -> None:
    schedule = {"name": "constant", "warmup_iters": 1}
    for fault in ("no_mask", "unshifted_labels"):
        straight, resumed = tmp_path / fault, tmp_path / f"{fault}-2"
        assert train.run(faulty(fault, straight, max_iters=4, schedule=schedule)) == 0
        for end in (2, 4):
            assert train.run(faulty(fault, resumed, max_iters=end, schedule=schedule)) == 0
        ours, theirs = weights(straight), weights(resumed)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_fault_needs_what_it_divides_by() -> None:
    with pytest.raises(ConfigError, match="fault=loss_over_accumulation needs gradient_accumulation_steps > 1"):
        load_config({"fault": {"name": "loss_over_accumulation"}})
    with pytest.raises(ConfigError, match="fault.name=no_loss must be one of none, no_mask"):
        load_config({"fault": {"name": "no_loss"}})


# -----------------------------------------------------------------------------
# scripts/audit.py


def save_run(config: TrainConfig, folder: Path) -> Path:
    """A run directory with fresh weights, V tokens."""
    model = GPT(config, V)
    model.init_weights(0)
    state = {"config": asdict(config), "tokenizer": NoText(V).to_dict(), "step": 1}
    checkpoint.save(folder / "ckpt", 1, {"model": model.state_dict()}, state, best=True)
    return folder


def audited(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    status = audit.main(list(words))
    out = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in out[1:-1]] == CHECKS
    found = json.loads(out[-1])
    assert [line.split(":")[0] for line in out if ": " in line and "CAUGHT" in line[:30]] == found["caught"]
    return status, found


CHECKS = ["future leakage", "step-0 loss", "random-token floor", "accumulation"]
CAUGHT = {
    "none": [],
    "no_mask": ["future leakage", "random-token floor"],
    "unshifted_labels": ["step-0 loss", "random-token floor"],
    "loss_over_accumulation": ["step-0 loss", "random-token floor", "accumulation"],
    "repeated_batches": ["random-token floor"],
    "padding_in_mean": ["step-0 loss", "random-token floor"],
}


def small(attention: str, qk_norm: str, fault: str = "none") -> TrainConfig:
    config = config_of(attention, qk_norm)
    return replace(
        config, fault=FaultOptions(fault), device="cpu", threads=1, batch_size=16, gradient_accumulation_steps=2,
        optim=replace(config.optim, learning_rate=1e-2),
    )  # fmt: skip


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_audit_catches_each_fault_by_what_it_breaks(
    fault: str, tied: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small("gqa", "rms", fault)
    run = save_run(replace(config, model=replace(config.model, tied=tied)), tmp_path / "run")
    status, found = audited(capsys, f"run={run}", "steps=40")
    assert (status, found["caught"], found["fault"]) == (int(fault != "none"), CAUGHT[fault], fault)
    floor = found["checks"]["random-token floor"]["fresh"]
    assert floor["tokens"] == 5 * 16 * 2 * 16 and floor["floor"] == pytest.approx(math.log(V))
    assert floor["threshold"] <= math.log(V) - max(0.01, 4.99 * floor["standard_error"])
    assert {p.name for p in tmp_path.iterdir()} == {"run"} and {p.name for p in run.iterdir()} == {"ckpt"}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["none", "rms", "lp3"])
def test_the_audit_finds_nothing_in_an_honest_model(
    layout: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if (layout, name) == ("mla_unified", "none"):
        pytest.skip("not a layout")
    subject = audit.Run(str(save_run(small(layout, name), tmp_path / "run")), "best", torch.device("cpu"))
    findings = audit.audit(subject, 20, V)
    assert [f.check for f in findings] == CHECKS and not any(f.caught for f in findings), capsys.readouterr().out


def test_a_mask_that_is_missing_without_a_fault_is_caught_though_train_py_refuses_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GPT, "__init__", breaking(GPT.__init__))
    status, found = audited(capsys, f"run={save_run(small('mha', 'none'), tmp_path / 'run')}", "steps=20")
    assert status == 1 and found["caught"] == ["future leakage", "random-token floor", "accumulation"]
    assert "sees the future" in found["checks"]["accumulation"]["refused"]


def breaking(init: Any) -> Any:
    def broken(self: Any, *args: Any) -> None:
        init(self, *args)
        for attention in self.attentions:
            attention.attend = lambda q, k, v, scale: F.scaled_dot_product_attention(q, k, v, scale=scale)

    return broken


def test_a_leak_is_measured_where_it_is() -> None:
    """Against changes made by hand, for a model in which a token reaches one position back."""

    class OneBack(nn.Module):
        def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = F.one_hot(idx, 7).double()  # (B, T, 7)
            logits = x + 0.25 * x.roll(-1, 1)
            return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    leaks = future_leaks(OneBack(), torch.randint(7, (1, 8), generator=torch.Generator().manual_seed(0)), [1, 5])
    # tokens become 0: the logit of 0 moves by 0.25 just before t and by 1 + 0.25 from t on
    assert leaks == {1: (0.25 / 1.25, 0), 5: (0.25 / 1.25, 4)}


def test_where_no_logit_moves_nothing_leaks() -> None:
    """As of an output layer that starts from zero; a leak is none the smaller where nothing moves later."""

    class First(nn.Module):
        def __init__(self, weight: float) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logits = torch.zeros(*idx.shape, 7)
            logits[:, 0, 0] = self.weight * idx[:, -1]
            return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    idx = torch.randint(1, 7, (1, 8), generator=torch.Generator().manual_seed(0))
    assert future_leaks(First(0.0), idx, [1, 5]) == {1: (0.0, None), 5: (0.0, None)}
    assert future_leaks(First(1.0), idx, [1, 5]) == {1: (torch.inf, 0), 5: (torch.inf, 0)}


def test_a_leak_between_distant_positions_is_found_in_the_whole_context() -> None:
    class LeakFrom90(nn.Module):
        def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = F.one_hot(idx, 7).double()
            late = (torch.arange(idx.size(1)) >= 90)[:, None]
            logits = x + 0.25 * x.roll(-1, 1) * late
            return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    def finding(context: int) -> audit.Finding:
        subject: Any = SimpleNamespace(trained=LeakFrom90(), vocab_size=7, context=context, device="cpu")
        return audit.future_leakage(subject)

    assert finding(200).caught and not finding(80).caught


@pytest.mark.parametrize("fault", ["none", "no_mask"])
def test_a_leak_is_told_from_none_where_the_logits_are_not_held(
    fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.gpt, "LOGITS_AT_ONCE", 4 * V)
    run = save_run(small("mha", "none", fault), tmp_path / "run")
    finding = audit.future_leakage(audit.Run(str(run), "best", torch.device("cpu")))
    assert {of["from"] for mode in finding.numbers.values() for of in mode.values()} == {None}
    assert finding.caught == (fault == "no_mask")
    assert ("changes the earlier loss in" in finding.text, "no earlier logit" in finding.text) == (
        (True, False) if finding.caught else (False, True)
    )


def test_a_model_that_diverges_is_no_evidence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small("mha", "none")
    config = replace(config, optim=replace(config.optim, learning_rate=1e30), grad_clip=0.0)
    status, found = audited(capsys, f"run={save_run(config, tmp_path / 'run')}", "steps=20")
    assert status == 3 and found["caught"] == []
    floor = found["checks"]["random-token floor"]
    assert floor["caught"] is None and "training on random tokens diverges at iteration" in floor["undecided"]


def test_code_of_a_model_that_fails_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    AutoModelForCausalLM.from_config(THEIRS["GPT2LMHeadModel"]).save_pretrained(tmp_path / "hf")
    forward = GPT2LMHeadModel.forward

    def without_a_loss(self: Any, *args: Any, **options: Any) -> Any:
        out = forward(self, *args, **options)
        out.loss = None
        return out

    monkeypatch.setattr(GPT2LMHeadModel, "forward", without_a_loss)
    status, found = audited(capsys, f"model={tmp_path / 'hf'}", "steps=20")
    assert status == 3 and found["caught"] == []
    assert all("the check fails: TypeError" in check["undecided"] for check in found["checks"].values())


def test_a_model_that_cannot_be_built_anew_or_differentiated_leaves_those_checks_undecided(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoMemory(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise torch.OutOfMemoryError("no\nmemory")

    AutoModelForCausalLM.from_config(THEIRS["GPT2LMHeadModel"]).save_pretrained(tmp_path / "hf")
    words = (f"model={tmp_path / 'hf'}", "steps=20")
    forward = GPT2LMHeadModel.forward

    def no_memory(self: Any, *args: Any, **options: Any) -> Any:
        out = forward(self, *args, **options)
        out.loss = NoMemory.apply(out.loss)
        return out

    monkeypatch.setattr(GPT2LMHeadModel, "forward", no_memory)
    status, found = audited(capsys, *words)
    assert status == 3 and [found["checks"][name]["caught"] for name in CHECKS] == [False, False, None, None]
    assert found["checks"]["accumulation"]["undecided"] == "the check fails: OutOfMemoryError: no memory"

    monkeypatch.setattr(GPT2LMHeadModel, "forward", forward)
    monkeypatch.setattr(audit.HuggingFace, "fresh", lambda self: 1 / 0)
    status, found = audited(capsys, *words)
    assert status == 3 and [found["checks"][name]["caught"] for name in CHECKS] == [False, None, None, None]


@pytest.mark.parametrize("error", [OSError("disk\nfull"), torch.OutOfMemoryError("disk\nfull")])
def test_a_failure_of_the_program_does_not_read_as_caught(
    error: Exception, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise error

    monkeypatch.setattr(audit, "open_run", fail)
    assert audit.main([f"run={tmp_path}", "device=cpu"]) == 3
    assert capsys.readouterr().err == f"failed: {type(error).__name__}: disk full\n"


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 48}
THEIRS: dict[str, Any] = {
    "GPT2LMHeadModel": GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=48),
    "Qwen3ForCausalLM": Qwen3Config(vocab_size=64, intermediate_size=48, num_key_value_heads=2, head_dim=8, **SIZES),
    "BertLMHeadModel": BertConfig(vocab_size=64, intermediate_size=48, is_decoder=False, **SIZES),
}


@pytest.mark.parametrize("name", THEIRS)
def test_hugging_face_models_are_audited_from_their_folder(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """BERT is one without a causal mask."""
    torch.manual_seed(0)
    model = BertLMHeadModel(THEIRS[name]) if name[0] == "B" else AutoModelForCausalLM.from_config(THEIRS[name])
    model.save_pretrained(tmp_path / "hf")
    status, found = audited(capsys, f"model={tmp_path / 'hf'}", "steps=60", "vocab_size=16")
    assert found["architecture"] == name
    leaky = name.startswith("Bert")
    assert (status, found["caught"][:1]) == ((1, ["future leakage"]) if leaky else (0, []))
    first = found["checks"]["future leakage"]["evaluation"]["23"]
    assert (first["leak"] >= LEAK_TOLERANCE, first["from"]) == ((True, 0) if leaky else (False, None))


CUSTOM = {
    "configuration_tiny.py": """
from transformers import PretrainedConfig


class TinyConfig(PretrainedConfig):
    model_type = "tiny_custom"

    def __init__(self, vocab_size=64, hidden_size=32, max_position_embeddings=48, masked=True, **options):
        self.vocab_size, self.hidden_size, self.masked = vocab_size, hidden_size, masked
        self.max_position_embeddings = max_position_embeddings
        super().__init__(**options)
""",
    "modeling_tiny.py": """
import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .configuration_tiny import TinyConfig


class TinyForCausalLM(PreTrainedModel):
    config_class = TinyConfig

    def __init__(self, config):
        super().__init__(config)
        n = config.hidden_size
        self.wte = nn.Embedding(config.vocab_size, n)
        self.wpe = nn.Embedding(config.max_position_embeddings, n)
        self.qkv, self.lm_head = nn.Linear(n, 3 * n), nn.Linear(n, config.vocab_size, bias=False)
        self.post_init()

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(0.0, 0.1)

    def forward(self, input_ids, labels=None, **options):
        x = self.wte(input_ids) + self.wpe(torch.arange(input_ids.size(1), device=input_ids.device))
        q, k, v = self.qkv(x).chunk(3, -1)
        logits = self.lm_head(x + F.scaled_dot_product_attention(q, k, v, is_causal=self.config.masked))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)
""",
}


def test_a_folder_with_code_of_its_own_is_audited_when_it_is_trusted(program: Program, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    for name, text in CUSTOM.items():
        (folder / name).write_text(text)
    shapes = {"wte.weight": (64, 32), "wpe.weight": (48, 32), "qkv.weight": (96, 32), "qkv.bias": (96,)}
    generator = torch.Generator().manual_seed(0)
    save_file(
        {k: 0.1 * torch.randn(*s, generator=generator) for k, s in {**shapes, "lm_head.weight": (64, 32)}.items()},
        folder / "model.safetensors", metadata={"format": "pt"},
    )  # fmt: skip
    classes = {"AutoConfig": "configuration_tiny.TinyConfig", "AutoModelForCausalLM": "modeling_tiny.TinyForCausalLM"}
    env = {**os.environ, "HF_HOME": str(tmp_path / "cache")}
    words = ("model=hf", "steps=20", "device=cpu")
    for masked in (True, False):
        config = {"model_type": "tiny_custom", "architectures": ["TinyForCausalLM"], "masked": masked}
        (folder / "config.json").write_text(json.dumps({**config, "auto_map": classes}))
        done = program("scripts/audit.py", *words, "trust_remote_code=true", env=env)
        found = json.loads(done.stdout.splitlines()[-1])
        assert found["architecture"] == "TinyForCausalLM"
        assert (done.returncode, found["caught"][:1]) == ((0, []) if masked else (1, ["future leakage"])), done
        assert None not in [check["caught"] for check in found["checks"].values()]
    refused = program("scripts/audit.py", *words, env=env)
    assert refused.returncode == 2 and "custom code" in refused.stderr


def test_a_loss_that_does_not_shift_its_labels_or_sums_them_is_caught(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(THEIRS["GPT2LMHeadModel"]).save_pretrained(tmp_path / "hf")
    for reduction, unshifted, caught in (("mean", 1, CAUGHT["unshifted_labels"]), ("sum", 0, CHECKS[1::2])):
        subject = audit.HuggingFace(str(tmp_path / "hf"), False, torch.device("cpu"))
        fresh = subject.fresh

        def broken(fresh: Any = fresh, reduction: str = reduction, unshifted: int = unshifted) -> nn.Module:
            model = fresh()
            forward = model.model.forward

            def without_shift(input_ids: Any, labels: Any, **options: Any) -> Any:
                out = forward(input_ids=input_ids, **options)
                logits = out.logits[:, 1:] if unshifted else out.logits[:, :-1]
                out.loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction=reduction)
                return out

            model.model.forward = without_shift
            return model

        subject.fresh = broken  # type: ignore[method-assign]
        findings = audit.audit(subject, 60, 16)
        assert [f.check for f in findings if f.caught] == caught


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", "either run= or model="),
        ("run=a model=b", "either run= or model="),
        ("run=nowhere", "run=nowhere"),
        ("model=nowhere", "model=nowhere holds no config.json"),
        ("model=empty", "model=empty cannot be loaded"),
        ("run=run steps=3", "steps=3 must be >= 20"),
        ("run=run steps=many", "steps=many must be an integer"),
        ("run=run checkpoint=newest", "best, latest"),
        ("run=run vocab_size=1", "vocab_size=1 must be in 2..11"),
        ("run=run vocab_size=12", "vocab_size=12 must be in 2..11"),
        ("run=run step=30", "did you mean steps"),
        ("run=run trust_remote_code=true", "needs model="),
        ("model=empty checkpoint=best", "needs run="),
        ("run=run device=gpu", "device=gpu"),
    ],
)
def test_bad_words_are_one_line(
    words: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_run(small("mha", "none"), Path("run"))
    Path("empty").mkdir()
    Path("empty/config.json").write_text("{}")
    capsys.readouterr()
    assert audit.main(words.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and expected in err
