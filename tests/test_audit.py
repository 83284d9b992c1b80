"""scripts/audit.py: what catches a loss that is too good to be true."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import runs
from torch import nn
from torch.nn import functional as F
from variants import ALL_PAIRS, FULL, V, config_of, looking_ahead

from core.cli import run_script
from data.tokenizer import NoText
from model import cross_entropy, ops
from model.diagnostics import future_leak
from model.gpt import GPT
from scripts import audit
from training import session
from training.config import FAULTS, FaultOptions, TrainConfig

main = partial(run_script, audit.AuditOptions, audit.audit_run, "")
Audited = Callable[..., tuple[int, dict[str, Any]]]


def save_run(config: TrainConfig, folder: Path) -> Path:
    """A run directory with fresh weights, V tokens."""
    model = GPT(config.gpt, V)
    model.init_weights(0)
    return runs.save_run(model, NoText(V), folder, config)


@pytest.fixture
def audited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Audited:
    """Audit a run of this config, with fresh weights: the exit status, and what the last line holds."""

    def call(config: TrainConfig, steps: int = 20) -> tuple[int, dict[str, Any]]:
        status = main([f"run={save_run(config, tmp_path / 'run')}", f"steps={steps}"])
        out = capsys.readouterr().out.splitlines()
        assert [line.split(":")[0] for line in out[1:-1]] == CHECKS
        found = json.loads(out[-1])
        assert [line.split(":")[0] for line in out if ": " in line and "CAUGHT" in line[:30]] == found["caught"]
        return status, found

    return call


CHECKS = ["future leakage", "step-0 loss", "random-token floor", "cached decoding"]
CAUGHT = {
    "none": [],
    "no_mask": ["future leakage", "random-token floor", "cached decoding"],
    "heads_as_time": ["future leakage", "random-token floor", "cached decoding"],
    "repeated_in_time": ["future leakage", "random-token floor", "cached decoding"],
    "small_sample": ["random-token floor"],
    "unshifted_labels": ["step-0 loss", "random-token floor"],
    "loss_over_accumulation": ["step-0 loss", "random-token floor"],
    "repeated_batches": ["random-token floor"],
    "padding_in_mean": ["step-0 loss", "random-token floor"],
}


def small(attention: str, qk_norm: str, fault: str = "none") -> TrainConfig:
    config = config_of(attention, qk_norm)
    return replace(
        config, fault=FaultOptions(fault), device="cpu", threads=1, batch_size=16, gradient_accumulation_steps=2,
        optim=replace(config.optim, learning_rate=1e-2),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "tied"), [*((fault, True) for fault in FAULTS), ("unshifted_labels", False), ("padding_in_mean", False)]
)
def test_each_fault_is_caught(fault: str, tied: bool, audited: Audited, tmp_path: Path) -> None:
    config = small("gqa", "rms", fault)
    status, found = audited(replace(config, model=replace(config.model, tied=tied)), steps=40)
    assert (status, found["caught"], found["fault"]) == (int(fault != "none"), CAUGHT[fault], fault)
    floor = found["checks"]["random-token floor"]["fresh"]
    assert floor["tokens"] == 5 * 16 * 2 * 16 and floor["floor"] == pytest.approx(math.log(V))
    assert floor["threshold"] <= math.log(V) - max(0.01, 4.99 * floor["standard_error"])
    assert found["checks"]["random-token floor"]["trained"]["standard_error"] > 0  # 16 different batches
    assert [path.name for path in (*tmp_path.iterdir(), *(tmp_path / "run").iterdir())] == ["run", "ckpt"]


@pytest.mark.parametrize(
    ("layout", "name"), ALL_PAIRS if FULL else [("mha", "lp3"), ("mla_q_rank", "rms"), ("mla_unified", "layernorm")]
)
def test_an_honest_model_passes(
    layout: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "MOST_MICRO_BATCHES", 1)  # of the two that the run has
    subject = audit.Run(str(save_run(small(layout, name), tmp_path / "run")), "best", torch.device("cpu"))
    findings = audit.audit(subject, 20)
    assert [*findings] == CHECKS and not any(f.caught for f in findings.values()), capsys.readouterr().out
    assert findings["random-token floor"].numbers["fresh"]["tokens"] == 5 * 16 * 16


def test_a_mask_that_is_missing_without_a_fault_is_caught_though_train_py_refuses_it(
    audited: Audited, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "causal_attention", looking_ahead(64))
    status, found = audited(small("mha", "none"))
    assert status == 1 and found["caught"] == ["future leakage", *CHECKS[2:]]
    assert "sees the future" in found["checks"]["random-token floor"]["refused"]


class Leaky(nn.Module):
    """logits(idx) (B, T, 7) as a model."""

    def __init__(self, logits: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.logits(idx)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


def one_back(idx: torch.Tensor, first: int = 0) -> torch.Tensor:
    """From position `first` on each token reaches one position back."""
    x = F.one_hot(idx, 7).double()  # (B, T, 7)
    return x + 0.25 * x.roll(-1, 1) * (torch.arange(idx.size(1)) >= first)[:, None]


def last_to_first(idx: torch.Tensor, weight: float) -> torch.Tensor:
    logits = torch.zeros(*idx.shape, 7)
    logits[:, 0, 0] = weight * idx[:, -1]
    return logits


def test_a_leak_is_measured_where_it_is() -> None:
    """Against changes made by hand."""
    idx = torch.randint(1, 7, (1, 8), generator=torch.Generator().manual_seed(0))
    # the last token becomes 0: a logit just before it moves by 0.25, one at it by 1
    assert future_leak(Leaky(one_back), idx) == 0.25
    # where nothing moves, as with an output layer that is zero, nothing leaks; where nothing later moves, a leak counts
    for weight, leak in ((0.0, 0.0), (1.0, torch.inf)):
        assert future_leak(Leaky(partial(last_to_first, weight=weight)), idx) == leak


@pytest.mark.parametrize(
    ("context", "first", "caught"), [(200, 90, True), (80, 90, False), (1024, 600, True), (3000, 1100, True)]
)
def test_a_leak_between_distant_positions_is_found_in_the_whole_context(context: int, first: int, caught: bool) -> None:
    trained = Leaky(lambda idx: one_back(idx, first=first))
    subject: Any = SimpleNamespace(trained=trained, vocab_size=7, block_size=context, device="cpu")
    assert audit.future_leakage(subject).caught == caught


@pytest.mark.parametrize("training", [True, False])
def test_a_leak_in_one_mode_alone_is_found(training: bool) -> None:
    trained = Leaky(lambda idx: one_back(idx, first=0 if trained.training == training else 99))
    subject: Any = SimpleNamespace(trained=trained, vocab_size=7, block_size=40, device="cpu")
    assert audit.future_leakage(subject).caught


@pytest.mark.parametrize("fault", ["none", "no_mask"])
def test_a_leak_is_told_without_whole_logits(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "LOGITS_AT_ONCE", 4 * V)
    run = save_run(small("mha", "none", fault), tmp_path / "run")
    finding = audit.future_leakage(audit.Run(str(run), "best", torch.device("cpu")))
    assert finding.caught == (fault == "no_mask")


def test_a_model_that_diverges_is_no_evidence(audited: Audited) -> None:
    config = small("mha", "none")
    status, found = audited(replace(config, optim=replace(config.optim, learning_rate=1e30), grad_clip=0.0))
    assert status == 3 and found["caught"] == []
    floor = found["checks"]["random-token floor"]
    assert floor["caught"] is None and "training on random tokens diverges at iteration" in floor["undecided"]


def test_a_machine_that_is_too_small_is_no_evidence(audited: Audited, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "optimizer_bytes", lambda *_: 2**60)
    status, found = audited(small("mha", "none"))
    assert status == 3 and [found["checks"][name]["caught"] for name in CHECKS] == [False, None, None, False]
    assert "need more than" in found["checks"]["random-token floor"]["undecided"]


def test_logits_that_are_all_zero_decode_alike() -> None:
    model = GPT(config_of("mha", "rms").gpt, V)
    model.init_weights(0)
    with torch.no_grad():
        model.transformer.wte.weight.zero_()  # tied to the output layer
    subject: Any = SimpleNamespace(trained=model, block_size=16, vocab_size=V, device=torch.device("cpu"))
    assert not audit.cached_decoding(subject).caught


def test_weights_that_are_not_finite_are_no_leak(tmp_path: Path) -> None:
    subject = audit.Run(str(save_run(small("mha", "none"), tmp_path / "run")), "best", torch.device("cpu"))
    next(subject.trained.parameters()).data.fill_(math.nan)
    with pytest.raises(audit.Undecided, match="the logits of the trained weights are not finite"):
        audit.future_leakage(subject)


@pytest.mark.parametrize(
    ("broken", "error", "caught", "why"),
    [
        ("setup", ZeroDivisionError("by\nzero"), [False, None, False, False], "ZeroDivisionError: by zero"),
        ("train.run", torch.OutOfMemoryError("no\nmemory"), [False, False, None, False], "no memory"),
    ],
)
def test_a_check_is_undecided_where_its_code_fails(
    broken: str, error: Exception, caught: list[Any], why: str, audited: Audited, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(f"scripts.audit.{broken}", fails)
    status, found = audited(small("mha", "none"))
    assert status == 3 and found["caught"] == [] and [of["caught"] for of in found["checks"].values()] == caught
    assert all(why in of["undecided"] for of in found["checks"].values() if of["caught"] is None)


@pytest.mark.parametrize("error", [OSError("disk\nfull"), torch.OutOfMemoryError("disk\nfull")])
def test_a_failure_of_the_program_does_not_read_as_caught(
    error: Exception, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise error

    monkeypatch.setattr(audit, "load_asked_run", fail)
    assert main([f"run={tmp_path}", "device=cpu"]) == 3
    assert capsys.readouterr().err == f"failed: {type(error).__name__}: disk full\n"
