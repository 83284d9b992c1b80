"""What ends or warns a run: start-up checks, a loss that is not finite, signals, waits."""

import math
import signal
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Trained
from helpers.runs import QK_CLIP, assert_same_run, configured, lines, saved_json
from torch import Tensor, nn
from variants import config_of, looking_ahead

import model.gpt
import train
from core import checkpoint
from core.record import Metrics
from core.schema import ConfigError
from data.batches import Batches
from data.folds import Split
from model import ops
from model.gpt import GPT
from training import checks, evaluate
from training.checks import repetition
from training.config import TrainConfig
from training.session import setup


@pytest.mark.parametrize("wrong", ["unmasked", "one_ahead", "training", "evaluation", "nan"])
def test_a_model_that_sees_the_future_is_refused_at_start(
    wrong: str, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In both modes or in one, with a mask that is off by one, or with logits that are not numbers."""
    causal_attention = ops.causal_attention
    forward: Any = GPT.forward

    def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, p_dropout: float = 0.0) -> Tensor:
        # evaluation has no gradients: there it takes another attention product
        if wrong in ("training", "evaluation") and torch.is_grad_enabled() == (wrong == "evaluation"):
            return causal_attention(q, k, v, scale, p_dropout)
        return looking_ahead(1 if wrong == "one_ahead" else q.size(-2))(q, k, v, scale)

    def nan(self: GPT, *args: Any, **options: Any) -> Any:
        logits, loss = forward(self, *args, **options)
        return logits * math.nan, loss

    monkeypatch.setattr(*((GPT, "forward", nan) if wrong == "nan" else (ops, "causal_attention", attention)))
    says = "the first logits are not finite" if wrong == "nan" else "attention=mha sees the future"
    with pytest.raises(ConfigError, match=says):
        trained()
    assert not (tmp_path / "run").exists()


def scripted_losses(monkeypatch: pytest.MonkeyPatch, losses: list[float]) -> None:
    """Evaluations return these."""
    left = iter(losses)
    monkeypatch.setattr(evaluate, "mean_loss", lambda *args: next(left))


@pytest.mark.parametrize("cut", [1, 3, 4])
def test_the_minimum_and_the_best_checkpoint_survive_a_rising_loss_and_a_resume(
    cut: int, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = [3.0, 2.0, 1.5, 1.5, 1.8, 1.6, 1.9]
    changes = {"eval_interval": 1, "checkpoint_interval": 1}
    scripted_losses(monkeypatch, losses)
    straight = trained("straight", **changes)
    scripted_losses(monkeypatch, [*losses[: cut + 1], *losses[cut:]])
    trained("halves", max_iters=cut, **changes)
    halves = trained("halves", **changes)
    assert_same_run(straight, halves)
    assert (straight / "ckpt" / "best").readlink().name == "step_000002"
    assert saved_json(halves, "summary")["val/loss_min"] == 1.5


@pytest.mark.parametrize("last", [2.0, 3.5])
def test_an_evaluation_at_an_earlier_end_does_not_stay_the_minimum(
    last: float, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    often = {"eval_interval": 100, "checkpoint_interval": 1}
    scripted_losses(monkeypatch, [3.0, last])
    straight = trained("straight", **often)
    scripted_losses(monkeypatch, [3.0, 1.0, last])  # 0, 3 (the end, off the interval); then 6
    run = trained(max_iters=3, **often)
    assert saved_json(run, "summary")["iter_of_min"] == 3
    assert (run / "ckpt" / "best").readlink().name == "step_000003"
    assert_same_run(straight, trained(**often))
    summary = saved_json(run, "summary")
    assert (summary["iter_of_min"], summary["val/loss_min"]) == ((6, 2.0) if last < 3.0 else (0, 3.0))


def test_a_validation_loss_of_zero_is_a_loss(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted_losses(monkeypatch, [0.0, 1.0, 1.0, 1.0])
    trained(max_iters=2)
    assert saved_json(trained(max_iters=4), "summary")["iter_of_min"] == 0


def test_a_validation_loss_of_nan_ends_the_run(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted_losses(monkeypatch, [3.0, math.nan])
    run = trained(status=3, eval_interval=2)
    assert saved_json(run, "summary")["reason"] == "val/loss nan at iteration 2"


def test_throughput_is_tokens_over_seconds(trained: Trained) -> None:
    run = trained(max_iters=30, eval_interval=10)
    logged = Metrics.read(run / "metrics.jsonl")[:-1]
    seconds = sum(4 * 16 / line["tok_per_sec"] for line in logged)
    state = checkpoint.load(run / "ckpt" / "latest").state
    assert seconds == pytest.approx(state["train_seconds"], rel=1e-6) and seconds < state["seconds"]
    ratios = {round(line["mfu"] / line["tok_per_sec"], 15) for line in logged}
    assert len(ratios) == 1  # flops a token over the peak


def test_bits_per_character_count_characters_and_not_bytes(corpus: Path, trained: Trained) -> None:
    text = "μῆνιν ἄειδε θεὰ Πηληϊάδεω Ἀχιλῆος " * 60
    corpus.write_text(text, encoding="utf-8")
    line = lines(trained(data={"name": "text", "path": str(corpus), "tokenizer": "byte"}))[-1]
    bytes_per_char = len(text.encode()) / len(text)
    assert line["val/bpc"] == pytest.approx(line["val/loss"] / math.log(2) * bytes_per_char, rel=0.01)
    assert bytes_per_char > 1.5


def test_weights_of_nan_or_inf_are_never_saved(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "learning_rate", lambda step, config: 1e38 if step == 2 else 1e-3)
    run = trained(status=3, checkpoint_interval=1, eval_interval=100)
    saved = checkpoint.load(run / "ckpt" / "latest")
    assert saved.step <= 3 and all(t.isfinite().all() for t in saved.tensors["model"].values())
    assert saved_json(run, "status")["state"] == "diverged"


@pytest.mark.parametrize(("ignored", "what"), [("step", "iterations"), ("micro_step", "micro-batches")])
def test_a_batch_that_comes_again_and_again_is_refused(
    ignored: str, what: str, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    get_batch = Batches.get_batch

    def same(self: Batches, step: int, micro_step: int = 0) -> tuple[Tensor, Tensor]:
        return get_batch(self, 0, micro_step) if ignored == "step" else get_batch(self, step, 0)

    monkeypatch.setattr(Batches, "get_batch", same)
    with pytest.raises(ConfigError, match=f"training repeats one batch: {what} 0 to 4 are equal"):
        trained()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("batch_size", [1, 2, 64])
@pytest.mark.parametrize("text", [range(17), range(18), [5] * 300, [0, 1] * 150, [0] * 290 + [1] + [0] * 9])
def test_a_text_with_few_different_windows_does_not_repeat_batches(text: Sequence[int], batch_size: int) -> None:
    tokens = np.array([*text, 0, 0])
    of = Split(train=((0, len(text)),), val=((len(text), len(tokens)),))
    for seed in range(20):
        assert not [*repetition(Batches(tokens, of, 16, batch_size, seed), tokens[: len(text)])]


def test_a_long_stretch_of_one_token_does_not_repeat_batches() -> None:
    """Though the text begins otherwise."""
    rng = np.random.default_rng(0)
    parts = rng.integers(26, size=80_000), np.zeros(8_000_000, int), rng.integers(26, size=900_000)
    tokens = np.concatenate(parts).astype(np.uint16)
    batches = Batches(tokens, Split(((0, len(tokens) - 1000),), ((len(tokens) - 1000, len(tokens)),)), 16, 8, 1337)
    assert not [*repetition(batches, batches.some_tokens())]


def test_an_initial_loss_far_from_a_guess_is_warned_of(
    trained: Trained, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained("a")
    assert "warning" not in capsys.readouterr().out
    monkeypatch.setattr(model.gpt, "INIT_STD", 1.0)
    run = trained("b", max_iters=1)
    for said in (capsys.readouterr().out, (run / "train.log").read_text()):
        assert "warning: the initial loss is " in said


WORDS = np.random.default_rng(0).choice(["ok", "no", "maybe", "3.14", "x", "1024"], (400, 4))
TABLES = {
    "narrow": "aaaa bbbb\n" * 600,
    "padded": "".join("".join(word.ljust(16) for word in row) + "\n" for row in WORDS),
    "csv": "".join(f"{','.join(row)}\n" for row in WORDS),
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("text", TABLES)
def test_a_table_as_the_text_is_no_wrong_initial_loss_and_a_fault_in_it_is_one(
    text: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "table.txt").write_text(TABLES[text])
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 128, "block_size": 64, "tied": tied}
    for seed in range(4):
        session = setup(configured(tmp_path / "table.txt", tmp_path / "run", model=sizes, seed=seed))
        assert checks.start_up_checks(session) == []
    accumulate = checks.accumulate_gradients
    monkeypatch.setattr(checks, "accumulate_gradients", lambda *args: accumulate(*args) / 4)
    (said,) = checks.start_up_checks(session)
    assert said.startswith("the initial training loss is")


@pytest.mark.parametrize("length, folds, targets", [(24, 10, 2), (6000, 100, 59), (4000, 10, 399), (4010, 10, 400)])
def test_too_few_held_out_targets_are_warned_of(length: int, folds: int, targets: int, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text(("to be or not to be, that is the question. " * 200)[:length])
    data = {"name": "text", "path": str(file), "folds": folds, "fold": folds - 1}
    said = checks.start_up_checks(setup(configured(file, tmp_path / "run", data=data)))
    start = f"only {targets} held-out tokens are predicted, so that val/loss says little"
    assert len(said) == (1 if targets < 400 else 0) and all(text.startswith(start) for text in said)


@pytest.mark.parametrize(("fails", "seen"), [(3, 4), (4, 4), (6, 8), (9, 9)])
def test_a_run_that_diverged_between_two_lines_ends_where_it_did(
    fails: int, seen: int, trained: Trained, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Read at iterations 0, 4, 8 and 9, before a checkpoint; told as if every one had been read. Then all is over."""
    learning_rate, forward, asked = train.learning_rate, GPT.forward, []

    def spy(step: int, config: TrainConfig) -> float:
        asked.append(step)
        return learning_rate(step, config)

    def explode(self: GPT, *args: Any, **options: Any) -> Any:
        logits, loss = forward(self, *args, **options)
        return logits, loss * math.nan if loss is not None and self.training and asked[-1:] == [fails] else loss

    monkeypatch.setattr(train, "learning_rate", spy)
    monkeypatch.setattr(GPT, "forward", explode)
    settings = {"max_iters": 12, "eval_interval": 100, "checkpoint_interval": 10, "qk_clip": QK_CLIP}
    ends = []
    for name, log_interval in (("each", 1), ("few", 4)):
        asked.clear()
        run = trained(name, status=3, log_interval=log_interval, **settings)
        assert asked == [*range((fails if name == "each" else seen) + 1)]
        status, summary = saved_json(run, "status"), saved_json(run, "summary")
        assert status["state"] == summary["status"] == "diverged"
        assert status["iter"] == summary["iter"] == fails and "nan" in status["reason"]
        assert [path.name for path in (run / "ckpt").glob("step*")] == ["step_000000"]
        assert len((run / "diagnostics.jsonl").read_text().splitlines()) == 1  # nothing is evaluated after it
        ends.append((status["reason"], summary["train/loss"], [line["iter"] for line in lines(run)], lines(run)))
        asked.clear()
        trained(name, status=3, log_interval=log_interval, **settings)  # says so, and trains no more
        assert asked == [] and "is diverged" in capsys.readouterr().out
    (reason, loss, _, each), (reason_of_few, loss_of_few, iterations, few) = ends
    assert reason == reason_of_few and loss == loss_of_few == each[-2]["train/loss"]
    assert iterations == [*range(0, fails, 4), fails] and few[-1]["train/loss"] is None
    since = each[iterations[-2] + 1 :]  # of which the last line tells
    assert few[-1].get("qk_clip/clipped", 0) == sum(line.get("qk_clip/clipped", 0) for line in since)
    assert few[-1]["qk_clip/max_logit"] == max(line["qk_clip/max_logit"] for line in since)
    for key in ("train/loss", "lr", "grad_norm"):
        assert few[-1][key] == each[-1][key]


@pytest.mark.parametrize("optim", ["adamw", "muon"])
@pytest.mark.parametrize("attention", ["mha", "mla"])
def test_after_an_update_that_is_not_finite_weights_stay_and_its_origin_is_named(
    attention: str, optim: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At update 5 the logits of layer 1, head 2 overflow, by large queries and keys. The host reads at 10."""
    accumulate, clip = train.accumulate_gradients, train.qk_clip
    damaged: list[Tensor] = []
    weights: list[list[Tensor]] = []

    def copied(attentions: Any) -> list[Tensor]:
        return [p.detach().clone() for layer in attentions for p in layer.parameters()]

    def damage(forward: Any, *args: Any) -> Tensor:
        if len(weights) == 5:
            attn = forward.attentions[1]
            d = attn.head_dim if attention == "mha" else attn.nope_dim
            fused, n = (attn.c_attn, 4 * d) if attention == "mha" else (attn.c_kv_b, 0)  # keys begin in row n
            queries, start = (fused, 2 * d) if attention == "mha" else (attn.c_q, 2 * (d + attn.rope_dim))
            with torch.no_grad():
                queries.weight[start : start + d] *= 1e25
                fused.weight[n + 2 * d : n + 3 * d] *= 1e25
            damaged.extend(copied(forward.attentions))
        return accumulate(forward, *args)

    def keep(attentions: Any, *args: Any) -> Tensor | None:
        maxima = clip(attentions, *args)
        weights.append(copied(attentions))
        return maxima

    monkeypatch.setattr(train, "accumulate_gradients", damage)
    monkeypatch.setattr(train, "qk_clip", keep)
    layout, rare = config_of(attention, "none"), {"max_iters": 12, "eval_interval": 100, "checkpoint_interval": 100}
    settings = {"optim": {"name": optim}, "log_interval": 10, "qk_clip": QK_CLIP, **rare}
    config = configured(corpus, tmp_path / "run", **settings)
    assert train.run(replace(config, model=layout.model, attention=layout.attention)) == 3
    assert len(weights) == 11 and saved_json(tmp_path / "run", "status")["iter"] == 5
    for later in weights[5:]:
        assert all(map(torch.equal, later, damaged))
    assert not all(map(torch.equal, weights[3], weights[4]))
    log = (tmp_path / "run" / "train.log").read_text()
    assert "first value that is not finite: the attention of transformer.h.1.attn, head 2\n" in log


@pytest.mark.parametrize(
    "first",
    ["the weight transformer.h.0.mlp.c_proj.weight", "the output of transformer.h.1.mlp.c_fc", "the loss",
     "the gradient of transformer.h.1.mlp.c_fc.weight"],
)  # fmt: skip
def test_the_first_value_that_is_not_finite_is_named(
    first: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = setup(configured(corpus, tmp_path / "run"))
    assert checks.first_not_finite(session, 0) == "nothing: the repeated update is finite"
    parameters = dict(session.model.named_parameters())
    name = first.rpartition(" ")[2]
    if first.startswith("the weight"):
        parameters[name].data[0, 0] = math.inf
    elif first.startswith("the output"):
        session.model.get_submodule(name).register_forward_hook(lambda module, x, y: y / 0)
    elif first.startswith("the gradient"):
        parameters[name].register_hook(lambda grad: grad / 0)
    else:
        accumulate = checks.accumulate_gradients
        monkeypatch.setattr(checks, "accumulate_gradients", lambda *of: infinite(of[0], accumulate(*of)))
    assert checks.first_not_finite(session, 0) == first


def infinite(model: nn.Module, loss: Tensor) -> Tensor:
    """A loss that overflows, with its gradients."""
    for p in model.parameters():
        p.grad = torch.full_like(p, math.inf)
    return loss * math.inf


def test_a_sample_of_a_run_that_was_moved_is_written_nowhere(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def move(*_: Any) -> str:
        (tmp_path / "run").rename(tmp_path / "aside")
        (tmp_path / "run").mkdir()
        return "text"

    monkeypatch.setattr(train, "sample_within_budget", move)
    monkeypatch.setattr(train, "shows_media", lambda config: True)
    with pytest.raises(OSError, match="was moved while its run trained"):
        trained()
    assert not [*(tmp_path / "run").iterdir()]


def test_a_divergence_stays_one_where_its_update_cannot_be_repeated(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Tensor:
        raise torch.OutOfMemoryError("no room")

    def diverge(*_: Any) -> Tensor:
        monkeypatch.setattr(checks, "accumulate_gradients", full)
        return torch.tensor(math.nan)

    monkeypatch.setattr("training.updates.clip_gradients", diverge)
    log = (trained(status=3) / "train.log").read_text()
    assert "unknown: the update cannot be repeated (OutOfMemoryError: no room)" in log


def test_a_failure_is_recorded_with_its_reason(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(step: int, config: TrainConfig) -> float:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(train, "learning_rate", fail)
    handlers, threads = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)], set(threading.enumerate())
    with pytest.raises(RuntimeError):
        trained()
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers  # this process can be ended
    assert not {t for t in threading.enumerate() if t.name.startswith("ThreadPoolExecutor")} - threads
    status = saved_json(tmp_path / "run", "status")
    assert status["state"] == "failed" and status["reason"] == "RuntimeError: out of luck"
