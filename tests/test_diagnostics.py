"""diagnose() against its definitions: float64, a head, a query and a key at a time.

Shapes: B batch, nh and nkv heads, T positions, hs channels a head.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from variants import PAIRS, attention_products, build, config_of, random_tokens, raw_queries_and_keys

from model import ops
from model.diagnostics import diagnose, sdpa_backend
from model.gpt import GPT, MultiHeadLatentAttention
from model.options import LpNormOptions

each_pair = pytest.mark.parametrize("layout, name", PAIRS)
B, T = 2, 9


def passed(gpt: GPT, idx: Tensor) -> list[dict[str, Any]]:
    """What each layer multiplies in a forward of idx, q (B, nh, T, hs), k (B, nkv, T, hs) and the scale, and what its
    raw queries and keys are: {side: (B, heads, T, hs)}, a side for each block of channels that is normalised."""
    layers: list[dict[str, Any]] = []

    def array(x: Tensor) -> np.ndarray:
        return x.detach().double().numpy()

    def look_at_input(attn: Any, inputs: Any) -> None:
        q, k = raw_queries_and_keys(attn, inputs[0])
        raw = {"q": q, "k": k}
        if isinstance(attn, MultiHeadLatentAttention) and not attn.unified:
            raw = {side: x[..., : attn.nope_dim] for side, x in (("q", q), ("k", k))}
            raw |= {"q_rope": q[..., attn.nope_dim :], "k_rope": k[:, :1, :, attn.nope_dim :]}
        layers.append({"raw": {side: array(x) for side, x in raw.items()}})

    hooks = [attn.register_forward_pre_hook(look_at_input) for attn in gpt.attentions]
    with attention_products() as products:
        gpt(idx)
    for hook in hooks:
        hook.remove()
    for layer, (q, k, _, scale) in zip(layers, products, strict=True):
        layer |= {"q": array(q), "k": array(k), "scale": scale}
    return layers


def p_of(gpt: GPT, layer: int, side: str, head: int) -> float:
    config = gpt.config.qk_norm
    assert isinstance(config, LpNormOptions)
    if isinstance(config.p, float):
        return config.p
    raw = gpt.state_dict()[f"transformer.h.{layer}.attn.{side}_norm.raw_p"].tolist()
    return 1 + math.log(1 + math.exp(raw[head]))


def of_logits(got: dict[str, Any]) -> list[dict[str, float]]:
    """max_logit, entropy and effective_keys of each head of a layer of passed()."""
    q, k, scale = got["q"], got["k"], got["scale"]
    values = []
    for h in range(q.shape[1]):
        largest, entropies = -math.inf, []
        for b in range(B):
            for i in range(T):
                keys = k[b, h // (q.shape[1] // k.shape[1])]
                logits = [scale * float(np.dot(q[b, h, i], keys[j])) for j in range(i + 1)]
                largest = max([largest, *logits])
                weights = [math.exp(logit) for logit in logits]
                att = [w / sum(weights) for w in weights]
                entropies.append(-sum(a * math.log(a) for a in att))
        keys_seen = [math.exp(entropy) for entropy in entropies]
        mean = sum(entropies) / len(entropies)
        values.append({"max_logit": largest, "entropy": mean, "effective_keys": sum(keys_seen) / len(keys_seen)})
    return values


def of_vectors(gpt: GPT, layer: int, side: str, raw: np.ndarray) -> list[dict[str, float]]:
    """The mean 2-norm, and for Lp norms p, mean and standard deviation of g, of each head."""
    values = []
    for h in range(raw.shape[1]):
        vectors = [raw[b, h, t] for b in range(B) for t in range(T)]
        lengths = [math.sqrt(sum(c * c for c in x)) for x in vectors]
        values.append({f"{side}_norm": sum(lengths) / len(lengths)})
        if isinstance(gpt.config.qk_norm, LpNormOptions):
            p = p_of(gpt, layer, side, h)
            p_norms = [max(abs(x)) if p == math.inf else sum(abs(c) ** p for c in x) ** (1 / p) for x in vectors]
            g = [length / p_norm for length, p_norm in zip(lengths, p_norms, strict=True)]
            mean = sum(g) / len(g)
            spread = math.sqrt(sum((y - mean) ** 2 for y in g) / len(g))
            values[-1] |= {f"{side}_g_mean": mean, f"{side}_g_std": spread}
    return values


def expected(gpt: GPT, idx: Tensor) -> dict[str, float]:
    config, values = gpt.config.qk_norm, dict[str, float]()

    def put(layer: int, heads: list[dict[str, float]]) -> None:
        for h, head in enumerate(heads):
            values.update({f"attn/{name}/layer_{layer}/head_{h}": value for name, value in head.items()})

    for layer, got in enumerate(passed(gpt, idx)):
        put(layer, of_logits(got))
        for side, raw in got["raw"].items():
            put(layer, of_vectors(gpt, layer, side, raw))
            gain = gpt.state_dict().get(f"transformer.h.{layer}.attn.{side}_norm.gain")
            if gain is not None:  # one for all heads
                put(layer, [{f"{side}_gain": sum(abs(g) for g in gain.tolist()) / len(gain)}])
            if isinstance(config, LpNormOptions):  # one for all heads unless it is learned
                n = raw.shape[1] if config.p == "learned" else 1
                put(layer, [{f"{side}_p": p_of(gpt, layer, side, h)} for h in range(n)])
        if isinstance(config, LpNormOptions):
            raw_alpha = gpt.state_dict()[f"transformer.h.{layer}.attn.logit_scale.alpha.raw"].tolist()
            put(layer, [{"alpha": math.exp(a)} for a in raw_alpha])
    for name in {key.split("/")[1] for key in values}:
        every = [value for key, value in values.items() if key.split("/")[1] == name]
        values[f"attn/{name}"] = max(every) if name == "max_logit" else sum(every) / len(every)
    return values


@each_pair
def test_every_value_is_its_definition(layout: str, name: str) -> None:
    gpt, idx = build(config_of(layout, name)), random_tokens(B, T)
    actual, reference = diagnose(gpt, idx), expected(gpt, idx)
    assert actual.keys() == reference.keys()
    for key, value in reference.items():
        assert actual[key] == pytest.approx(value, rel=1e-5, abs=1e-6), key


def test_no_two_heads_layers_or_sides_have_a_value_in_common() -> None:
    """Or one in another's place would go unseen."""
    values = diagnose(build(config_of("mla", "lp_learned")), random_tokens(B, T))
    heads = [value for key, value in values.items() if "/head_" in key]
    assert len(set(heads)) == len(heads) > 0


def state_of(gpt: GPT) -> dict[str, Any]:
    return {
        "weights": {name: p.detach().clone() for name, p in gpt.named_parameters()},
        "gradients": {name: None if p.grad is None else p.grad.clone() for name, p in gpt.named_parameters()},
        "trainable": [p.requires_grad for p in gpt.parameters()],
        "modes": {name: module.training for name, module in gpt.named_modules()},
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in gpt.modules()],
        "maxima": [None if attn.max_logits is None else attn.max_logits.clone() for attn in gpt.attentions],
        "probes": [attn.probe for attn in gpt.attentions],
        "generator": torch.get_rng_state(),
    }


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("layout", ["mha", "gqa", "mla"])
def test_the_model_the_generator_and_what_qk_clip_tracks_stay(layout: str, fails: bool, training: bool) -> None:
    """Also where the pass breaks off half-way."""
    gpt = build(config_of(layout, "lp_learned", dropout=0.3)).train()
    for attn in gpt.attentions:
        attn.track_max_logits()
    loss = gpt(random_tokens(B, T), random_tokens(B, T, seed=3))[1]
    assert loss is not None
    loss.backward()
    gpt.train(training)
    before = state_of(gpt)
    idx = random_tokens(B, T, seed=4)
    if fails:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr(type(gpt.transformer.h[1].mlp), "forward", lambda self, x: 1 / 0)
            diagnose(gpt, idx)
    else:
        first = diagnose(gpt, idx)
        assert first == diagnose(gpt, idx) and all(type(value) is float for value in first.values())
    torch.testing.assert_close(state_of(gpt), before, rtol=0, atol=0)


@pytest.mark.parametrize("layout", ["gqa", "mla"])
def test_under_autocast_the_logits_are_exact_products_of_what_attention_multiplies(layout: str) -> None:
    """bf16 queries and keys, but no rounding of their products to bf16."""
    gpt, idx = build(config_of(layout, "none"), dtype=torch.float32).train(), random_tokens(B, T)
    for attn in gpt.attentions:
        attn.track_max_logits()
    with torch.autocast("cpu", torch.bfloat16):
        trained = passed(gpt, idx)  # in training mode, with gradients: another attention product than diagnose()'s
        with torch.no_grad():
            values, looked_at = diagnose(gpt, idx), passed(gpt.eval(), idx)
    for layer, attn in enumerate(gpt.attentions):
        tracked = attn.pop_max_logits().tolist()
        for h, head in enumerate(of_logits(trained[layer])):
            assert tracked[h] == pytest.approx(head["max_logit"], rel=1e-6)
        for h, head in enumerate(of_logits(looked_at[layer])):
            for name, value in head.items():
                assert values[f"attn/{name}/layer_{layer}/head_{h}"] == pytest.approx(value, rel=1e-5), name


def test_sdpas_backend_is_the_one_that_a_training_batch_gets() -> None:
    """On a CPU: SDPA takes long sequences alone; its flash kernel needs values as wide as keys."""
    long = 1 + ops.BlockedAttention.POSITIONS
    expected = {("mha", long): "flash", ("mla", long): "math", ("mha", T): None}
    for (layout, block_size), backend in expected.items():
        config = config_of(layout, "none", block_size=block_size, n_layer=1)
        assert sdpa_backend(build(config, dtype=torch.float32), 1) == backend, layout
