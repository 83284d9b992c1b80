"""Long sequences: the loss without the logits, activation checkpointing, and what they leave of a step's memory."""

from dataclasses import replace
from itertools import accumulate, product
from pathlib import Path

import pytest
import torch
from conftest import needs_compiler
from helpers.runs import SETTINGS, assert_same_run, configured
from torch import Tensor, nn
from torch.nn import functional as F
from variants import LAYOUTS, V, build, config_of, fresh, random_tokens, seeing

import train
from core.dist import World
from model import cross_entropy, ops
from model.cross_entropy import LinearCrossEntropy
from model.diagnostics import LEAK_TOLERANCE, activation_bytes, future_leak
from model.gpt import GPT
from model.kernels import operators
from model.ops import at_least_fp32
from sweeps.plan import compose
from training.config import load_config
from training.evaluate import EVAL_TOKENS
from training.session import Machine
from training.updates import accumulate_gradients


def targets_of(*shape: int) -> Tensor:
    """Some of them ignored, a whole row of 16 among them."""
    targets = random_tokens(*shape, seed=3)
    targets[0, 5:] = targets[1, :16] = -1
    return targets


def step(gpt: GPT, idx: Tensor, targets: Tensor, autocast: bool = False) -> dict[str, Tensor]:
    """The loss and the gradients of a third of it."""
    gpt.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = gpt(idx, targets)[1]
    assert loss is not None
    (loss / 3).backward()
    gradients = {name: p.grad for name, p in gpt.named_parameters()}
    return {"loss": loss.detach(), **{name: g.clone() for name, g in gradients.items() if g is not None}}


def relative(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest relative difference of any tensor."""
    assert a.keys() == b.keys()
    return max(((a[name].double() - b[name].double()).norm() / b[name].double().norm()).item() for name in b)


# -----------------------------------------------------------------------------
# The loss without the logits


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("rows", [1, 7, 16, 47])
def test_loss_and_gradients_are_those_of_whole_logits(rows: int, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    gpt, idx, targets = build(config_of("gqa", "rms", tied=tied)).train(), random_tokens(3, 16), targets_of(3, 16)
    whole, expected = gpt(idx, targets)[0], step(gpt, idx, targets)
    monkeypatch.setattr(cross_entropy, "LOGITS_AT_ONCE", rows * V)
    assert whole is not None and gpt(idx, targets)[0] is None
    assert relative(step(gpt, idx, targets), expected) <= 1e-14
    with torch.no_grad():
        assert relative({"loss": gpt.eval()(idx, targets)[1]}, {"loss": expected["loss"]}) <= 1e-14


def test_under_autocast_the_loss_without_logits_is_as_exact_as_with_them() -> None:
    """In bf16 the products of many positions round at random; the weight's gradient, summed in fp32, a little less."""
    g = torch.Generator().manual_seed(0)
    inputs = [torch.randn(n, 64, generator=g, dtype=torch.float64) for n in (400, 100)]
    targets = torch.randint(-1, 100, (400,), generator=g)

    def whole(x: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(at_least_fp32(F.linear(x, weight)), targets, ignore_index=-1)

    def chunked(x: Tensor, weight: Tensor) -> Tensor:
        return LinearCrossEntropy.apply(x, weight, targets, 30, True)

    found = []
    for function, dtype in ((whole, torch.float64), (whole, torch.float32), (chunked, torch.float32)):
        x, weight = (t.detach().to(dtype).requires_grad_() for t in inputs)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            loss = function(x, weight)
        loss.backward()
        assert x.grad is not None and weight.grad is not None and weight.grad.dtype == dtype
        found.append([loss.detach(), x.grad, weight.grad])
    exact, *low = found
    for of_whole, of_chunked, reference in zip(*low, exact, strict=True):
        errors = [((t - reference).norm() / reference.norm()).item() for t in (of_whole, of_chunked)]
        assert errors[1] <= 1.05 * errors[0] + 1e-6 and errors[0] < 0.02


def test_only_more_logits_than_the_limit_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    gpt, idx = build(config_of("gqa", "rms")), random_tokens(3, 16)
    monkeypatch.setattr(cross_entropy, "LOGITS_AT_ONCE", 3 * 16 * V)
    assert gpt(idx, idx)[0] is not None
    monkeypatch.setattr(cross_entropy, "LOGITS_AT_ONCE", 3 * 16 * V - 1)
    assert gpt(idx, idx)[0] is None and gpt(idx)[0] is not None


def test_presets_on_characters_keep_their_logits() -> None:
    """Their runs are older than LinearCrossEntropy, and stay the same bit by bit."""
    for name in ("baby_gpt", "nano_cpu", "gqa_nano", "mla_nano"):
        config = load_config(compose([f"model={name}"]))
        sequences = max(config.batch_size, EVAL_TOKENS["cuda"] // config.model.block_size)
        assert sequences * config.model.block_size * 65 <= cross_entropy.LOGITS_AT_ONCE
        assert config.tokens_per_iter * 4096 <= cross_entropy.LOGITS_AT_ONCE  # nor with data.tokenizer=bpe


def test_without_a_target_the_loss_is_that_of_whole_logits_too() -> None:
    x, weight, none = torch.randn(4, 8), torch.randn(V, 8), torch.full((4,), -1)
    assert LinearCrossEntropy.apply(x, weight, none, 2, False).isnan()
    assert F.cross_entropy(x @ weight.T, none, ignore_index=-1).isnan()


SEEN = {
    "next": lambda i, j: j == i + 1, "all": lambda i, j: j >= 0, "distant": lambda i, j: j >= i + 150,
    "blocks": lambda i, j: j // 64 == i // 64, "borders": lambda i, j: (j == i + 1) & (j % 64 == 0),
    "last": lambda i, j: j == len(j) - 1, "first sees": lambda i, j: i == 0,
}  # fmt: skip


class LossAlone(nn.Module):
    """A model that returns no logits."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.gpt = gpt

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[None, Tensor]:
        return None, self.gpt(idx, targets)[1]


@pytest.mark.parametrize(("T", "seen"), [*product([2, 3], ["next", "all"]), *product([384], SEEN), (640, "last")])
def test_a_model_seeing_the_future_is_found_at_any_length(T: int, seen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it starts, in bf16, where one of 640 tokens hardly moves the others: with logits, by the last block's output
    and from the loss alone, whether the first 128 tokens are tried or all."""
    gpt = fresh(config_of("gqa", "rms", block_size=T, n_layer=1)).train()
    idx = random_tokens(1, T)
    calls: list[int] = []
    gpt.register_forward_pre_hook(lambda _, inputs: calls.append(inputs[0].size(1)))
    models: list[tuple[nn.Module, int]] = [(gpt, 2**26), (gpt, 5 * V)]
    if seen != "borders":  # a mean loss hides one position in 64
        models.append((LossAlone(gpt), 5 * V))
    for (model, limit), long in product(models, [128, T]):
        monkeypatch.setattr(cross_entropy, "LOGITS_AT_ONCE", limit)
        with torch.autocast("cpu", torch.bfloat16):
            calls.clear()
            assert future_leak(model, idx, long) == 0
            assert model is not gpt or calls.count(T) == (2 if long < T else 1 + len({1, T // 2, T - 1}))
            with monkeypatch.context() as patch:
                patch.setattr(ops, "causal_attention", seeing(SEEN[seen]))
                leak = future_leak(model, idx, long)
        assert leak > 10 * LEAK_TOLERANCE, (limit, long, leak)


# -----------------------------------------------------------------------------
# Activation checkpointing


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_checkpointing_changes_no_bit(layout: str, dropout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss, gradients, the maxima that QK-Clip tracks, and the generator; over two micro-batches, with the kernels."""
    monkeypatch.setattr(operators, "SMALL", 0)
    found: list[list[Tensor]] = []
    for checkpointing in (False, True):
        config = config_of(layout, "lp_learned", dropout=dropout, activation_checkpointing=checkpointing)
        gpt = build(config, dtype=torch.float32).train()
        for attention in gpt.attentions:
            attention.track_max_logits()
        torch.manual_seed(0)
        losses = []
        for seed in (4, 5):
            with torch.autocast("cpu", torch.bfloat16):
                losses.append(gpt(random_tokens(3, 16, seed=seed), targets_of(3, 16))[1])
            losses[-1].backward()
        gradients = [p.grad for p in gpt.parameters() if p.grad is not None]
        assert len(gradients) == len(list(gpt.parameters()))
        found.append([*losses, *gradients, *(a.pop_max_logits() for a in gpt.attentions), torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_activation_checkpointing_neither_names_a_run_nor_stops_its_resume(corpus: Path, tmp_path: Path) -> None:
    config = configured(corpus, tmp_path / "straight")
    checkpointed = {**SETTINGS["model"], "activation_checkpointing": True}
    assert train.run(config) == 0
    assert train.run(configured(corpus, tmp_path / "halves", max_iters=3, model=checkpointed)) == 0
    assert train.run(configured(corpus, tmp_path / "halves")) == 0
    assert_same_run(tmp_path / "straight", tmp_path / "halves")
    other = replace(config, model=replace(config.model, activation_checkpointing=True))
    assert other.trajectory == config.trajectory
    assert replace(other, out_dir=None).run_dir == replace(config, out_dir=None).run_dir


@needs_compiler
def test_generated_code_has_the_loss_and_gradients_of_eager_code() -> None:
    """torch.compile's own backend, under autocast."""
    torch._dynamo.reset()
    found = []
    for function in (LinearCrossEntropy.apply, torch.compile(LinearCrossEntropy.apply, fullgraph=True)):
        g = torch.Generator().manual_seed(0)
        x, weight = (torch.randn(n, 8, generator=g).requires_grad_() for n in (10, V))
        with torch.autocast("cpu", torch.bfloat16):
            loss = function(x, weight, random_tokens(10), 4, True)
        loss.backward()
        found.append({"loss": loss.detach(), "x": x.grad, "weight": weight.grad})
    assert relative(*found) <= 5e-3


# -----------------------------------------------------------------------------
# Memory


def kept_bytes(gpt: GPT, idx: Tensor, dtype: torch.dtype) -> int:
    """Of the tensors that autograd saves in a forward pass, the weights' own left out."""
    storages = {}
    own = {t.untyped_storage().data_ptr() for t in [*gpt.parameters(), *gpt.buffers()]}

    def count(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()  # alive: no address is used twice
        return tensor

    low = torch.autocast("cpu", dtype, enabled=dtype != torch.float32)
    with low, torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        gpt(idx, idx)
    return sum(storage.nbytes() for address, storage in storages.items() if address not in own)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("limit", [2**26, 20 * V])
@pytest.mark.parametrize("layout, dropout", [("mha", 0.2), ("gqa", 0.0), ("mla", 0.0)])
def test_the_estimate_of_the_activations_is_what_autograd_keeps(
    layout: str, dropout: float, limit: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_entropy, "LOGITS_AT_ONCE", limit)
    config = config_of(layout, "lp3", dropout=dropout, n_layer=3, block_size=64)
    plain = kept_bytes(build(config, dtype=torch.float32).train(), random_tokens(2, 64), dtype)
    estimates = []
    for checkpointing in (False, True):
        changed = replace(config, model=replace(config.model, activation_checkpointing=checkpointing))
        with torch.device("meta"):
            estimates.append(activation_bytes(GPT(changed.gpt, V), 2, torch.device("cpu"), dtype))
    kept = kept_bytes(build(changed, dtype=torch.float32).train(), random_tokens(2, 64), dtype)
    assert estimates[0] == plain
    assert estimates[1] == kept + (plain - kept) // 3 < plain  # a block more, that is made again


@pytest.mark.parametrize(("limit", "checkpointing"), [(2**26, False), (2**19, False), (2**19, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_and_gradients_of_logits_are_the_most_that_an_update_holds(
    dtype: torch.dtype, limit: int, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_entropy, "LOGITS_AT_ONCE", limit)
    config = config_of("mha", "rms", n_layer=2, block_size=128, activation_checkpointing=checkpointing)
    gpt = fresh(config, vocab_size=4096).train()
    machine, idx = Machine(World(), torch.device("cpu"), dtype), torch.randint(4096, (2, 128))
    accumulate_gradients(gpt, iter([(idx, idx)]), 1, machine)  # the weights' gradients stay, as between micro-batches
    with torch.profiler.profile(profile_memory=True) as profiler:
        accumulate_gradients(gpt, iter([(idx, idx)]), 1, machine)
    changes = [event.nbytes() for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    expected = activation_bytes(gpt, 2, machine.device, dtype) + cross_entropy.loss_bytes(idx.numel() * 4096)
    least = 0.75 if checkpointing else 0.94  # the block that is made again is not whole when the most is held
    assert least * expected < max(accumulate(changes)) < 1.06 * expected


def test_a_sequence_of_32768_tokens_fits_in_memory_at_the_papers_size() -> None:
    """sweep=gqa, part per_sequence: 134.5M parameters, bf16. By the estimate that the test above compares."""
    words = ["model=qwen_134m", "model.block_size=32768", "qk_norm=rms"]
    sizes = []
    for checkpointing in ("true", "false"):
        config = load_config(compose([*words, f"model.activation_checkpointing={checkpointing}"]))
        with torch.device("meta"):
            sizes.append(activation_bytes(GPT(config.gpt, 49152), 1, torch.device("cpu"), torch.bfloat16))
    assert sizes[0] < 4 * 2**30 < 22 * 2**30 < sizes[1]
