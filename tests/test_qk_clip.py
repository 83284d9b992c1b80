"""QK-Clip: exact maxima, exact scaling, nothing where there is nothing to clip."""

import math
from typing import Any

import pytest
import torch
from test_gpt import build, random_tokens
from torch import Tensor

from model.gpt import GPT, max_logits
from training.config import AttentionConfig, GQAConfig, MHAConfig, MLAConfig, ModelConfig, TrainConfig

LAYOUTS: dict[str, AttentionConfig] = {
    "mha": MHAConfig(),
    "gqa": GQAConfig(n_kv_head=2),
    "mqa": GQAConfig(n_kv_head=1),
    "mla": MLAConfig(kv_rank=12, nope_dim=8, rope_dim=4, v_dim=6),
    "mla_q_rank": MLAConfig(kv_rank=12, q_rank=10, nope_dim=8, rope_dim=4, v_dim=6),
}


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> AttentionConfig:
    return LAYOUTS[request.param]


def config_of(layout: AttentionConfig, **changes: Any) -> TrainConfig:
    rope: dict[str, Any] = {"position": "rope", "rope_theta": 1e4}
    bias = not isinstance(layout, MLAConfig)
    model = ModelConfig(n_layer=2, n_head=4, n_embd=32, block_size=16, dropout=0.0, bias=bias, **rope)
    config = TrainConfig(model=model, attention=layout, **changes)
    config.check()
    return config


def logits_of(model: GPT, idx: Tensor) -> list[Tensor]:
    """Every layer's logits (B, nh, T, T), hidden pairs -inf, by a plain product of what enters the attention."""
    found: list[Tensor] = []

    def look(q: Tensor, k: Tensor, scale: float) -> None:
        k = k.repeat_interleave(q.size(1) // k.size(1), 1)
        hidden = torch.ones(q.size(2), q.size(2)).triu(1).bool()
        found.append((scale * q @ k.transpose(-2, -1)).masked_fill(hidden, -math.inf))

    for attn in model.attentions:
        attn.probe = look
    with torch.no_grad():
        model(idx)
    for attn in model.attentions:
        attn.probe = None
    return found


def test_maxima_are_exact_and_signed() -> None:
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 3, 16, 8, generator=g), torch.randn(2, 3, 16, 8, generator=g)
    q[:, 1] = -k[:, 1].mean((0, 1))  # a head of mostly negative logits
    expected = (0.3 * q @ k.transpose(-2, -1)).masked_fill(torch.ones(16, 16).triu(1).bool(), -math.inf)
    torch.testing.assert_close(max_logits(q, k, 0.3), expected.amax((0, 2, 3)))
    long_q, long_k = q.repeat(40, 1, 10, 1), k.repeat(40, 1, 10, 1)  # several blocks of queries
    longer = (0.3 * long_q @ long_k.transpose(-2, -1)).masked_fill(torch.ones(160, 160).triu(1).bool(), -math.inf)
    torch.testing.assert_close(max_logits(long_q, long_k, 0.3), longer.amax((0, 2, 3)))


def test_training_forwards_count_until_popped_and_evaluation_does_not(layout: AttentionConfig) -> None:
    model = build(config_of(layout)).train()
    for attn in model.attentions:
        attn.track_max_logits = True
    first, second, other = (random_tokens(3, 16, seed=s) for s in (5, 6, 7))
    model(first), model(second)
    model.eval()
    model(other)
    expected = [torch.maximum(*pair) for pair in zip(*(logits_of(model, x) for x in (first, second)), strict=True)]
    for attn, logits in zip(model.attentions, expected, strict=True):
        torch.testing.assert_close(attn.pop_max_logits(), logits.amax((0, 2, 3)).float())
        with pytest.raises(AssertionError, match="no training forward"):
            attn.pop_max_logits()


@pytest.mark.parametrize("balance", [0.0, 0.3, 0.5, 1.0])
def test_logits_are_scaled_by_exactly_gamma(layout: AttentionConfig, balance: float) -> None:
    model, idx = build(config_of(layout)), random_tokens(3, 16)
    before = logits_of(model, idx)[0]  # the first layer: the second one's input changes
    n_groups = model.attentions[0].n_kv_head if not isinstance(layout, MLAConfig) else 4
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
    kv_a, values = attn.c_kv_a.weight.clone(), attn.up()[1].clone()
    attn.scale_logits(torch.full((4,), 0.5, dtype=torch.float64), 0.5)
    assert torch.equal(attn.c_kv_a.weight, kv_a) and torch.equal(attn.up()[1], values)
    model = build(config_of(LAYOUTS["gqa"]))
    attn = model.attentions[0]
    values = attn.c_attn.weight[-16:].clone()
    attn.scale_logits(torch.full((4,), 0.5, dtype=torch.float64), 0.5)
    assert torch.equal(attn.c_attn.weight[-16:], values)
