"""QK-Clip: exact maxima, exact scaling, nothing where there is nothing to clip."""

import functools
import json
import os
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
import variants
from conftest import needs_compiler
from helpers.oracles import causal_logits
from helpers.runs import QK_CLIP, assert_halves_equal_straight, configured, lines, ranks, weights
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager
from variants import build, random_tokens

import model.cross_entropy
import train
from model.gpt import GPT
from model.ops import max_logits, queries_at_once
from model.options import AttentionOptions, MLAOptions
from training.config import LogClipOptions, NoClipOptions, QKClipOptions, TrainConfig, load_config
from training.qk_clip import qk_clip, qk_clip_line
from training.session import Session

LAYOUTS = {name: variants.LAYOUTS[name] for name in ("mha", "gqa", "mqa", "mla", "mla_q_rank")}


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> AttentionOptions:
    return LAYOUTS[request.param]


def config_of(layout: AttentionOptions) -> TrainConfig:
    rope: dict[str, Any] = {"position": "rope", "rope_theta": 1e4}
    return variants.config_of(layout, "none", bias=not isinstance(layout, MLAOptions), **rope)


def logits_of(model: GPT, idx: Tensor) -> list[Tensor]:
    """Every layer's logits (B, nh, T, T), hidden pairs -inf, by a plain product of what enters the attention."""
    found: list[Tensor] = []

    def look(q: Tensor, k: Tensor, scale: float) -> None:
        found.append(causal_logits(q, k, scale))

    for attn in model.attentions:
        attn.probe = look
    with torch.no_grad():
        model(idx)
    for attn in model.attentions:
        attn.probe = None
    return found


def clip_line(attentions: Any, options: NoClipOptions) -> dict[str, float]:
    maxima = qk_clip(attentions, options, torch.zeros(()))
    assert maxima is not None
    return qk_clip_line(maxima, options)


def test_maxima_are_exact_and_signed() -> None:
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 3, 16, 8, generator=g), torch.randn(2, 3, 16, 8, generator=g)
    q[:, 1] = -k[:, 1].mean((0, 1))  # a head of mostly negative logits
    for rows, times in ((1, 1), (40, 10)):  # of several blocks of queries
        q, k = (x.repeat(rows, 1, times, 1) for x in (q, k))
        torch.testing.assert_close(max_logits(q, k, 0.3), causal_logits(q, k, 0.3).amax((0, 2, 3)))


def test_a_compiler_unrolls_few_parts_at_the_papers_scale() -> None:
    """mla_400m, 32 sequences of 2,048 tokens."""
    assert 2048 / queries_at_once(32, 16, 2048, "cuda") <= 8 and queries_at_once(32, 16, 2048, "cpu") == 4
    assert queries_at_once(1, 16, 2**20, "cuda") == 16 and queries_at_once(64, 16, 2**20, "cuda") == 1


def test_training_forwards_count_until_popped_and_evaluation_does_not(layout: AttentionOptions) -> None:
    model = build(config_of(layout)).train()
    for attn in model.attentions:
        attn.track_max_logits()
    first, second, other = (random_tokens(3, 16, seed=s) for s in (5, 6, 7))
    model(first), model(second)
    model.eval()
    model(other)
    expected = [torch.maximum(*pair) for pair in zip(*(logits_of(model, x) for x in (first, second)), strict=True)]
    for attn, logits in zip(model.attentions, expected, strict=True):
        torch.testing.assert_close(attn.pop_max_logits(), logits.amax((0, 2, 3)).float())
    with pytest.raises(AssertionError, match="no training forward"):
        clip_line(model.attentions, LogClipOptions())


@pytest.mark.parametrize("balance", [0.0, 0.3, 0.5, 1.0])
def test_logits_are_scaled_by_exactly_gamma(layout: AttentionOptions, balance: float) -> None:
    model, idx = build(config_of(layout)), random_tokens(3, 16)
    before = logits_of(model, idx)[0]  # the first layer: the second one's input changes
    n_groups = model.attentions[0].n_kv_head if not isinstance(layout, MLAOptions) else 4
    gamma = torch.tensor([0.25, 0.5, 0.9, 1.0], dtype=torch.float64)
    model.attentions[0].scale_logits(gamma, balance)
    after = logits_of(model, idx)[0]
    per_head = gamma.view(n_groups, -1).amin(1).repeat_interleave(4 // n_groups)
    visible = before.isfinite()
    expected = before * per_head[:, None, None]
    torch.testing.assert_close(after[visible], expected[visible], rtol=1e-12, atol=1e-12)


def test_values_and_the_shared_rope_key_stay_untouched() -> None:
    model = build(config_of(LAYOUTS["mla"]))
    attn = model.attentions[0]
    kv_a, values = attn.c_kv_a.weight.clone(), attn.up_projections()[1].clone()
    attn.scale_logits(torch.full((4,), 0.5, dtype=torch.float64), 0.5)
    assert torch.equal(attn.c_kv_a.weight, kv_a) and torch.equal(attn.up_projections()[1], values)
    model = build(config_of(LAYOUTS["gqa"]))
    attn = model.attentions[0]
    values = attn.c_attn.weight[-16:].clone()
    attn.scale_logits(torch.full((4,), 0.5, dtype=torch.float64), 0.5)
    assert torch.equal(attn.c_attn.weight[-16:], values)


def test_only_heads_above_the_threshold_are_clipped_and_to_exactly_it(layout: AttentionOptions) -> None:
    model, idx = build(config_of(layout)).train(), random_tokens(3, 16)
    for attn in model.attentions:
        attn.track_max_logits()
    model(idx)
    maxima = logits_of(model.eval(), idx)[0].amax((0, 2, 3))
    threshold = maxima.sort().values[1].item() + 1e-9  # two of four heads are above
    config = QKClipOptions(threshold=threshold)
    line = clip_line(model.attentions, config)
    after = logits_of(model, idx)[0].amax((0, 2, 3))
    n_groups = 4 if isinstance(layout, MLAOptions) else model.attentions[0].n_kv_head
    of_group = maxima.view(n_groups, -1).amax(1).repeat_interleave(4 // n_groups)
    gamma = torch.where(of_group > threshold, threshold / of_group, 1.0)
    torch.testing.assert_close(after, maxima * gamma, rtol=1e-6, atol=1e-6)
    assert line["qk_clip/clipped"] >= 2 and 0 < line["qk_clip/gamma_min"] < 1
    assert line["qk_clip/max_logit/layer_0"] == pytest.approx(maxima.max().item())


def test_heads_of_negative_logits_are_left_alone_and_stay_finite() -> None:
    class Head:
        def pop_max_logits(self) -> Tensor:
            return torch.tensor([-500.0, -1e-30, 99.0])

        def scale_logits(self, gamma: Tensor, balance: float) -> None:
            raise AssertionError("nothing to clip")

    config = QKClipOptions(threshold=100.0)
    assert clip_line([Head()], config)["qk_clip/gamma_min"] == 1


@pytest.mark.slow
def test_a_clipped_run_logs_its_clips_keeps_below_the_threshold_and_resumes(corpus: Path, tmp_path: Path) -> None:
    """A threshold that binds from the first update on; the logged maximum is the one before the clip."""
    optim = {"name": "adamw", "learning_rate": 1e-2}
    changes: dict[str, Any] = {"qk_clip": QK_CLIP, "optim": optim, "gradient_accumulation_steps": 2}
    assert_halves_equal_straight(corpus, tmp_path, **changes)
    logged = lines(tmp_path / "straight")[:-1]
    assert sum(line["qk_clip/clipped"] for line in logged) > 0
    norm = {"qk_norm": {"name": "lp", "p": 3.0}, "qk_clip": {"name": "log"}, "max_iters": 1}
    assert train.run(configured(corpus, tmp_path / "norm", **norm)) == 0
    assert lines(tmp_path / "norm")[0]["qk_clip/max_logit"] > 0  # of any norm
    unclipped = {**changes, "qk_clip": {"name": "log"}}
    assert train.run(configured(corpus, tmp_path / "log", **unclipped)) == 0
    free = lines(tmp_path / "log")[:-1]
    assert free[-1]["qk_clip/max_logit"] > logged[-1]["qk_clip/max_logit"]
    assert "qk_clip/clipped" not in free[-1]
    none = {k: v for k, v in changes.items() if k != "qk_clip"}
    assert train.run(configured(corpus, tmp_path / "none", **none)) == 0
    logging = weights(tmp_path / "log")  # which changes nothing
    assert all(torch.equal(w, logging[name]) for name, w in weights(tmp_path / "none").items())


@pytest.mark.slow
def test_a_line_tells_of_all_updates_since_the_one_before_and_no_clip_is_unlogged(corpus: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"qk_clip": QK_CLIP, "optim": {"name": "adamw", "learning_rate": 1e-2}}
    often = {**changes, "eval_interval": 100, "checkpoint_interval": 1}
    assert train.run(configured(corpus, tmp_path / "each", **often)) == 0
    every = lines(tmp_path / "each")
    assert train.run(configured(corpus, tmp_path / "few", **often, log_interval=4)) == 0
    assert train.run(configured(corpus, tmp_path / "halves", **often, log_interval=4, max_iters=3)) == 0
    assert train.run(configured(corpus, tmp_path / "halves", **often, log_interval=4)) == 0
    few = lines(tmp_path / "few")
    assert few == lines(tmp_path / "halves") and [line["iter"] for line in few] == [0, 4, 6]
    for line, updates in zip(few, (every[:1], every[1:5], every[5:6]), strict=True):
        assert line["qk_clip/clipped"] == sum(update["qk_clip/clipped"] for update in updates) > 0
        assert line["qk_clip/gamma_min"] == min(update["qk_clip/gamma_min"] for update in updates)
        for key in ("max_logit", "max_logit/layer_0", "max_logit/layer_1"):
            assert line[f"qk_clip/{key}"] == max(update[f"qk_clip/{key}"] for update in updates)


@pytest.mark.slow
@pytest.mark.parametrize("attention, optim, long", [("gqa", "adamw", False), ("mla", "muon", True)])
def test_compiled_runs_clip_as_eager_ones(
    attention: str, optim: str, long: bool, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole program without PyTorch's code generator, which the next test has: maxima are neither lost nor left
    over between micro-batches, updates, evaluations and the start-up checks, and one graph trains. long: compiled with
    activation checkpointing, and without the logits."""
    graphs = 0

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return aot_eager(graph, inputs)

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, fullgraph=True, backend=backend))
    shape = {"n_layer": 1, "n_head": 4, "n_embd": 32, "block_size": 16, "dropout": 0.0, "position": "rope"}
    changes = {
        "attention": asdict(LAYOUTS[attention]), "qk_clip": QK_CLIP, "dtype": "float32", "max_iters": 4,
        "optim": {"name": optim, "learning_rate": 1e-2}, "gradient_accumulation_steps": 2,
    }  # fmt: skip
    for name in ("eager", "compiled"):
        compiled = name == "compiled"
        with monkeypatch.context() as patch:
            if compiled and long:
                patch.setattr(model.cross_entropy, "LOGITS_AT_ONCE", 300)
            sizes = {**shape, "rope_theta": 1e4, "activation_checkpointing": compiled and long}
            assert train.run(configured(corpus, tmp_path / name, compile=compiled, model=sizes, **changes)) == 0
    eager, logged = lines(tmp_path / "eager"), lines(tmp_path / "compiled")
    assert sum(line["qk_clip/clipped"] for line in eager[:-1]) > 0
    for a, b in zip(eager, logged, strict=True):
        assert b == pytest.approx(a, rel=1e-5)
    assert graphs == 2  # training and evaluation


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["gqa", "mla"])
@needs_compiler
def test_generated_code_has_the_outputs_and_maxima_of_eager_code(attention: str) -> None:
    """torch.compile's own backend, over two micro-batches, a clip, and one more."""
    torch._dynamo.reset()
    g = torch.Generator().manual_seed(0)
    inputs = torch.randn(3, 4, 16, 32, generator=g)
    found: list[list[Tensor]] = []
    for compiled in (False, True):
        model = build(config_of(LAYOUTS[attention]), dtype=torch.float32).train()
        attn, found = model.attentions[0], [*found, []]
        attn.track_max_logits()
        forward = torch.compile(attn) if compiled else attn
        for i, x in enumerate(inputs):
            y = forward(x, (model.cos, model.sin))
            if i > 0:
                found[-1] += [attn.max_logits, y.detach()]
                qk_clip([attn], QKClipOptions(threshold=1.0), torch.zeros(()))
    assert found[0][0].min() > 1 and not torch.equal(*found[0][::2])
    for eager, generated in zip(*found, strict=True):
        torch.testing.assert_close(generated, eager)


def note_weights_and_clips() -> None:
    """After each update of a rank: a digest of its weights, and how many heads were clipped."""
    setup, models = train.setup, []

    def keep(config: TrainConfig, *machine: Any) -> Session:
        session = setup(config, *machine)
        models.append(session.model)
        return session

    def noted(attentions: Any, config: Any, *skip: Any) -> Tensor:
        maxima = qk_clip(attentions, config, *skip)
        assert maxima is not None
        state = b"".join(t.numpy().tobytes() for t in models[0].state_dict().values())
        with open(f"digests-{os.environ['RANK']}", "a") as file:
            print(sha256(state).hexdigest(), qk_clip_line(maxima, config)["qk_clip/clipped"], file=file)
        return maxima

    train.setup, train.qk_clip = keep, noted  # type: ignore[assignment]


@pytest.mark.slow
def test_two_ranks_clip_alike_and_keep_identical_weights(tiny_run: list[str], tmp_path: Path) -> None:
    """The maximum is taken over the ranks: each rank alone would scale by another gamma and drift apart."""
    words = [*tiny_run, "model.dropout=0.0", "gradient_accumulation_steps=4", "max_iters=4", "optim.learning_rate=0.01"]
    clip = ["qk_clip=clip", "qk_clip.threshold=0.02"]
    ranks(tmp_path, *words, *clip, "out_dir=two", prepare=note_weights_and_clips)
    digests = [(tmp_path / f"digests-{rank}").read_text().splitlines() for rank in (0, 1)]
    assert digests[0] == digests[1] and len(set(digests[0])) == 4
    settings = json.loads((tmp_path / "two" / "ckpt" / "latest" / "state.json").read_text())["config"]
    assert train.run(load_config({**settings, "out_dir": str(tmp_path / "alone")})) == 0
    both = [lines(tmp_path / name)[:-1] for name in ("two", "alone")]  # the last line is an evaluation's
    assert [line["qk_clip/clipped"] for line in both[0]] == [line["qk_clip/clipped"] for line in both[1]]
    assert sum(line["qk_clip/clipped"] for line in both[0]) > 0
    maxima = [[line["qk_clip/max_logit"] for line in logged] for logged in both]
    assert maxima[0] == pytest.approx(maxima[1], rel=1e-3)
    ours, theirs = weights(tmp_path / "two"), weights(tmp_path / "alone")
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-5)
