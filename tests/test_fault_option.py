"""fault=NAME and data=random: what each fault changes, and where a run with one is marked."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.runs import configured, lines, weights
from variants import attended, build, config_of, random_tokens

import train
from core.schema import ConfigError
from data.batches import Batches
from data.options import RandomOptions
from data.tokenizer import NoText, from_dict, text_size
from data.tokens import load_corpus
from sample import load_asked_run, load_run
from training import faults
from training.config import FAULTS, FaultOptions, TrainConfig
from training.state import Facts
from training.tracking import wandb_settings

DATA = {"name": "random", "n_tokens": 20_000, "vocab_size": 32, "val_tokens": 600}
ACCUMULATED = {"batch_size": 2, "gradient_accumulation_steps": 4, "data": DATA}


def faulty(fault: str, out: Path, **changes: Any) -> TrainConfig:
    return configured(out, out, **{**ACCUMULATED, "fault": {"name": fault}, **changes})


def batches_without_and_with(fault: str) -> tuple[Batches, Batches]:
    config = faulty(fault, Path("x"))
    corpus = load_corpus(config.data, 16)
    honest, wrong = (Batches(corpus.tokens, corpus.split, 16, 2, seed=1) for _ in range(2))
    faults.inject_into_batches(config, wrong)
    return honest, wrong


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
    config = config_of(layout, "lp3")
    gpt = build(config)
    x = torch.randn(2, 9, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    q, k, v, scale = attended(gpt, x)
    masked = gpt.attentions[0].attend(q, k, v, scale)
    faults.inject_into_model(replace(config, fault=FaultOptions("no_mask")), gpt)
    found = gpt.attentions[0].attend(q, k, v, scale)
    k, v = (part.repeat_interleave(q.size(1) // part.size(1), 1) for part in (k, v))
    over_all = torch.softmax(scale * q @ k.transpose(-2, -1), -1) @ v
    torch.testing.assert_close(found, over_all)
    torch.testing.assert_close(masked[:, :, -1], over_all[:, :, -1])
    assert (masked[:, :, 0] - over_all[:, :, 0]).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("fault", "layout"), [("heads_as_time", "mha"), ("heads_as_time", "mla"), ("repeated_in_time", "gqa")]
)
def test_a_rearranged_head_holds_what_a_missing_transpose_puts_there(fault: str, layout: str) -> None:
    """Position t of head h is written out for each; the softmax stays causal in what it then takes for time."""
    config = config_of(layout, "lp3")
    gpt = build(config)
    q, k, v, scale = attended(gpt, torch.randn(2, 9, 32, dtype=torch.float64))
    nh, T = q.size(1), q.size(2)

    def of(x: torch.Tensor, h: int, t: int) -> torch.Tensor:
        """Row t of head h, (B, hs)."""
        i = h * T + t if fault == "heads_as_time" else t * nh + h  # of the rows, as the projection lays them out
        n = x.size(1)
        return x[:, i % n, i // n % T]

    def as_cut(x: torch.Tensor) -> torch.Tensor:
        heads = [torch.stack([of(x, h, t) for t in range(T)], 1) for h in range(nh)]
        return torch.stack(heads, 1)  # (B, nh, T, hs)

    cut = [q if fault == "repeated_in_time" else as_cut(q), as_cut(k), as_cut(v)]
    logits = (scale * cut[0] @ cut[1].transpose(-2, -1)).masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
    faults.inject_into_model(replace(config, fault=FaultOptions(fault)), gpt)
    torch.testing.assert_close(gpt.attentions[0].attend(q, k, v, scale), logits.softmax(-1) @ cut[2])


def test_unshifted_labels_are_the_inputs() -> None:
    config = config_of("mha", "none")
    gpt = build(config)
    x, y = random_tokens(2, 9), random_tokens(2, 9, seed=3)
    y[0, 3:] = -1
    logits, honest = gpt(x, y)
    faults.inject_into_model(replace(config, fault=FaultOptions("unshifted_labels")), gpt)
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
    honest, wrong = batches_without_and_with("repeated_batches")
    for micro in (0, 1):
        assert torch.equal(wrong.get_batch(7, micro)[1], honest.get_batch(0, micro)[1])
        assert not torch.equal(honest.get_batch(7, micro)[1], honest.get_batch(0, micro)[1])
    assert torch.equal(next(wrong.eval_batches(4))[0], next(honest.eval_batches(4))[0])


def test_a_small_sample_is_all_that_is_trained_on() -> None:
    honest, wrong = batches_without_and_with("small_sample")
    sample = np.asarray(wrong.tokens[: 64 * 16])
    rows = torch.cat([wrong.get_batch(step)[0] for step in range(200)]).numpy()  # (400, 16)
    windows = {row.tobytes() for row in np.lib.stride_tricks.sliding_window_view(sample, 16).astype(np.int64)}
    assert {row.tobytes() for row in rows} <= windows and len({row.tobytes() for row in rows}) > 200
    assert not {row.tobytes() for row in honest.get_batch(0)[0].numpy()} & windows
    assert torch.equal(next(wrong.eval_batches(4))[0], next(honest.eval_batches(4))[0])


def test_padding_counts_in_the_mean() -> None:
    honest, wrong = batches_without_and_with("padding_in_mean")
    ours, theirs = ([b.get_batch(2), b.sampled_batch("val", 0), *b.eval_batches(99)] for b in (honest, wrong))
    for (x, y), (xp, yp) in zip(ours, theirs, strict=True):
        assert torch.equal(x[:, :2], xp[:, :2]) and torch.equal(y[:, :1], yp[:, :1])  # 16 / 16
        assert torch.equal(xp[:, 1:][yp[:, :-1] >= 0], yp[:, :-1][yp[:, :-1] >= 0])  # the next token all the same
        assert not xp[:, 2:].any() and torch.equal(yp < 0, y < 0) and set(yp[:, 1:].unique().tolist()) <= {-1, 0}


@pytest.mark.parametrize("length", [8, 20, 24, 100])
def test_padded_inputs_follow_their_targets_at_any_length(length: int) -> None:
    text = torch.arange(1, length + 2)[None]
    x, y = faults.pad(text[:, :-1], text[:, 1:])
    assert torch.equal(x[:, 1:], y[:, :-1]) and 0 < (y > 0).sum() < length


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
    assert "fault" not in " ".join(wandb_settings(config, tmp_path / "run", Facts())["init"]["tags"])


@pytest.mark.parametrize(  # a tied model's first guess is its input
    ("fault", "tied"),
    [*((fault, True) for fault in [*FAULTS][1:]), ("unshifted_labels", False), ("padding_in_mean", False)],
)
def test_a_fault_is_said_everywhere(fault: str, tied: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = {"n_layer": 1, "n_head": 2, "n_embd": 64, "block_size": 16, "dropout": 0.2, "tied": tied}
    attention = {"name": "gqa", "n_kv_head": 1} if fault == "repeated_in_time" else {"name": "mha"}
    run, config = tmp_path / "run", faulty(fault, tmp_path / "run", max_iters=2, model=model, attention=attention)
    assert train.run(config) == 0
    assert f"fault={fault}" in capsys.readouterr().out
    summary = json.loads((run / "summary.json").read_text())
    initial_loss = ["the initial loss is"] if tied else []
    start_up = {
        "no_mask": ["attention=mha sees the future"],
        "heads_as_time": ["attention=mha sees the future"],
        "repeated_in_time": ["attention=gqa sees the future"],
        "small_sample": [],
        "unshifted_labels": ["the loss is not the cross-entropy", *initial_loss],
        "padding_in_mean": ["one token crowds the targets", *initial_loss],
        "loss_over_accumulation": ["the initial training loss is"],
        "repeated_batches": ["training repeats one batch: iterations 0 to 4 are equal"],
    }
    assert summary["fault"] == fault
    warnings = summary["start_up_warnings"]
    assert len(warnings) == len(start_up[fault]) and all(map(str.startswith, warnings, start_up[fault])), warnings
    log = (run / "train.log").read_text()
    assert all(f"warning: {text}" in log for text in [f"fault={fault}", *warnings])
    assert f"FAULT_{fault}" in replace(config, out_dir=None).run_dir.name and f"FAULT_{fault}" in config.group
    init = wandb_settings(config, run, Facts(dtype=summary["dtype"]))["init"]
    assert init["tags"][-1] == f"fault:{fault}" and init["config"]["fault"] == {"name": fault}
    assert train.run(replace(config, eval_only=True)) == 0
    assert f"warning: fault={fault}" in capsys.readouterr().out
    load_asked_run(str(run), "best", torch.device("cpu"))
    assert f"was trained with fault={fault}" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=f"fault.name {fault} -> "):
        train.run(replace(config, fault=FaultOptions("none")))
