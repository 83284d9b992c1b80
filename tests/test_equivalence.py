"""Two ways to one result: MLA's explicit and absorbed paths, caches and full forwards, GQA and MHA. And causality.

The first is the MLA paper's appendix E. Shapes: B batch, nh heads, T queries, S keys.
"""

import contextlib
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import variants
from helpers.oracles import norm_by_hand
from torch import Tensor
from torch.nn import functional as F
from variants import ENTRIES, NORMS, PAIRS, V, attended, build, config_of, random_tokens, rope_of

from core.schema import validate
from model import ops
from model.generate import generate
from model.gpt import GPT, MultiHeadLatentAttention
from model.options import GQAOptions, MHAOptions, MLAOptions, ModelOptions
from training.config import TrainConfig

each_entry = pytest.mark.parametrize("layout, name", ENTRIES)
each_norm = pytest.mark.parametrize("name", NORMS)
each_mla_pair = pytest.mark.parametrize("layout, name", [pair for pair in PAIRS if pair[0].startswith("mla")])


def relative(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def visible(logits: Tensor) -> Tensor:
    """(B, nh, T, S) -> those that the causal mask leaves, flat. The T queries stand last."""
    T, S = logits.shape[-2:]
    return logits[..., torch.ones(T, S, dtype=torch.bool).tril(S - T)]


# -----------------------------------------------------------------------------
# MLA's two paths


def explicit_logits(gpt: GPT, x: Tensor) -> Tensor:
    """scale q k^T of the queries and keys that attention gets, (B, nh, T, T), the product itself in float64."""
    q, k, _, scale = attended(gpt, x)
    return scale * (q.double() @ k.double().transpose(-2, -1))


def absorbed_logits(gpt: GPT, x: Tensor, dtype: torch.dtype) -> Tensor:
    """What decoding's softmax gets for all positions but the first, which is the prefill: (B, nh, T - 1, T)."""
    got: list[Tensor] = []

    class Spy:
        def __getattr__(self, name: str) -> Any:
            return getattr(F, name)

        def softmax(self, logits: Tensor, dim: int) -> Tensor:
            got.append(logits)
            return F.softmax(logits, dim)

    attn, rope = gpt.attentions[0], rope_of(gpt)
    cache = attn.new_cache(x.size(0), x.size(1), dtype)
    attn(x[:, :1], rope, cache, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "F", Spy())
        attn(x[:, 1:], rope, cache, 1)
    (logits,) = got
    return logits


def hidden(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).to(dtype)


def defined_logits(gpt: GPT, x: Tensor, name: str) -> Tensor:
    """The logits (B, nh, T, T) from the weights and the definitions, one head at a time."""
    attn, dn, T = gpt.attentions[0], gpt.attentions[0].nope_dim, x.size(1)
    alpha = dict(attn.named_parameters()).get("logit_scale.alpha.raw")

    def norm(y: Tensor, which: str, head: int) -> Tensor:
        return norm_by_hand(y, NORMS[name], dict(getattr(attn, which).named_parameters()), head)

    def turn(y: Tensor) -> Tensor:
        z = torch.view_as_complex(torch.stack(y.chunk(2, -1), -1).contiguous())
        z = z * torch.complex(gpt.cos[:T], gpt.sin[:T])  # type: ignore[index]
        return torch.cat([z.real, z.imag], -1)

    def key_or_query(y: Tensor, side: str, head: int) -> Tensor:
        if attn.unified:
            y = norm(y, f"{side}_norm", head)
        else:
            y = torch.cat([norm(y[..., :dn], f"{side}_norm", head), norm(y[..., dn:], f"{side}_rope_norm", head)], -1)
        return torch.cat([y[..., :dn], turn(y[..., dn:])], -1)

    heads = []
    for h, (q, k) in enumerate(zip(*(part.unbind(1) for part in variants.raw_queries_and_keys(attn, x)), strict=True)):
        scale = 1 / math.sqrt(q.size(-1)) if alpha is None else alpha[h % len(alpha)].exp()
        heads.append(scale * key_or_query(q, "q", h) @ key_or_query(k, "k", h).mT)
    return torch.stack(heads, 1)


@torch.no_grad()
@each_mla_pair
def test_explicit_and_absorbed_logits_agree_in_float64(layout: str, name: str) -> None:
    gpt, x = build(config_of(layout, name)), hidden(3, 12)
    explicit = explicit_logits(gpt, x)
    assert relative(visible(absorbed_logits(gpt, x, torch.float64)), visible(explicit[..., 1:, :])) <= 1e-12
    assert relative(explicit, defined_logits(gpt, x, name)) <= 1e-12


@torch.no_grad()
@each_mla_pair
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_absorbed_logits_round_as_the_explicit_ones(layout: str, name: str, dtype: torch.dtype, bound: float) -> None:
    """bf16 as generation has it: weights in fp32, autocast, and a bf16 cache.

    Measured: explicit 2e-7 and 6e-3, absorbed at most 1.11 and 1.24 times that.
    """
    gpt, x = build(config_of(layout, name), dtype=torch.float32), hidden(3, 12, dtype=torch.float32)
    exact = visible(explicit_logits(build(config_of(layout, name)), x.double())[..., 1:, :])
    with torch.autocast("cpu", torch.bfloat16) if dtype == torch.bfloat16 else contextlib.nullcontext():
        x = x.to(dtype)
        explicit = relative(visible(explicit_logits(gpt, x)[..., 1:, :]), exact)
        absorbed = relative(visible(absorbed_logits(gpt, x, dtype)), exact)
    assert explicit <= bound and absorbed <= 2 * explicit


# -----------------------------------------------------------------------------
# Caches


@torch.no_grad()
@each_entry
def test_prefill_and_cached_steps_equal_full_forwards(layout: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpt, idx = build(config_of(layout, name)), random_tokens(3, 16)
    full = gpt(idx)[0]
    for chunks in ((16,), (1,) * 16, (5, 1, 1, 4, 5)):
        caches, pos, parts = gpt.new_caches(3, 16, torch.float64), 0, []
        for n in chunks:
            with monkeypatch.context() as patch:
                if pos:  # MLA has the absorbed path alone
                    patch.delattr(MultiHeadLatentAttention, "explicit")
                parts.append(gpt(idx[:, pos : pos + n], caches=caches, pos=pos)[0])
            pos += n
        torch.testing.assert_close(torch.cat(parts, 1), full, rtol=1e-12, atol=1e-12 * full.abs().max().item())


@torch.no_grad()
@each_mla_pair
def test_latents_of_long_sequences_are_read_one_by_one(layout: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attend, read = ops.latent_attention_reference, list[int]()

    def spied(q_latent: Tensor, *others: Any) -> Any:
        read.append(len(q_latent))
        return attend(q_latent, *others)

    monkeypatch.setattr(ops, "latent_attention_reference", spied)
    monkeypatch.setattr(ops, "MAX_COPIED", 14 * 12)  # which 14 positions are
    gpt, idx = build(config_of(layout, name)), random_tokens(3, 16)
    caches, parts = gpt.new_caches(3, 20, torch.float64), []
    for pos, end in ((0, 13), (13, 14), (14, 16)):
        parts.append(gpt(idx[:, pos:end], caches=caches, pos=pos)[0])
    torch.testing.assert_close(torch.cat(parts, 1), gpt(idx)[0], rtol=1e-12, atol=1e-12)
    layers = len(gpt.attentions)  # together for the first token, one by one for the last two
    assert read == [3] * layers + [1, 1, 1] * layers


@pytest.mark.parametrize(
    "qk_norm_layout, name", [(a, n) for a in ("blockwise", "unified") for n in NORMS if (a, n) != ("unified", "none")]
)
def test_deepseek_v3_caches_1152_bytes_a_token_and_layer_and_32_with_a_qk_norm(name: str, qk_norm_layout: Any) -> None:
    shape = ModelOptions(n_layer=1, n_head=16, n_embd=1536, position="rope", rope_theta=1e4, norm="rmsnorm")
    attention = MLAOptions(kv_rank=512, q_rank=1536, nope_dim=128, rope_dim=64, v_dim=128)
    attention = replace(attention, qk_norm_layout=qk_norm_layout)
    config = TrainConfig(model=shape, attention=attention, qk_norm=NORMS[name])
    validate(config)
    with torch.device("meta"):
        gpt = GPT(config.gpt, V)
        (cache,) = gpt.new_caches(1, 64, torch.bfloat16)
    # unified LayerNorm takes the mean off content and RoPE key together: a second scalar a head, s * mean
    scalars = 0 if name == "none" else 64 if (qk_norm_layout, name) == ("unified", "layernorm") else 32
    assert gpt.cache_bytes_per_token(torch.bfloat16) == 1152 + scalars
    assert sum(t.nbytes for t in vars(cache).values() if t is not None) == 64 * (1152 + scalars)


@torch.no_grad()
@pytest.mark.parametrize("name, bias", [("none", True), ("lp_learned", False), ("rms_whole", True), ("all", False)])
def test_gqa_with_as_many_key_heads_as_heads_is_mha(name: str, bias: bool) -> None:
    settings: dict[str, Any] = {"norm": "rmsnorm", "position": "rope", "rope_theta": 100.0, "bias": bias}
    gqa, mha = (build(config_of(layout, name, **settings)) for layout in (GQAOptions(n_kv_head=4), MHAOptions()))
    assert torch.equal(gqa(random_tokens(3, 16))[0], mha(random_tokens(3, 16))[0])


# -----------------------------------------------------------------------------
# Causality


@each_entry
@pytest.mark.parametrize("cached", [False, True])
def test_no_token_receives_gradient_from_earlier_logits(layout: str, name: str, cached: bool) -> None:
    """cached: the second half of the positions is one step over a cache, MLA's absorbed path."""
    gpt, idx = build(config_of(layout, name)), random_tokens(1, 16)
    start, caches = 0, None
    if cached:
        start, caches = 8, gpt.new_caches(1, 16, torch.float64)
        with torch.no_grad():
            gpt(idx[:, :8], caches=caches)
    embedded: list[Tensor] = []

    def keep(module: Any, inputs: Any, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]

    gpt.transformer.wte.register_forward_hook(keep)
    logits = gpt(idx[:, start:], caches=caches, pos=start)[0]
    for t in {0, (16 - start) // 2, 15 - start}:
        (gradient,) = torch.autograd.grad(logits[0, t].sum(), embedded[0], retain_graph=True)
        assert gradient[0, t + 1 :].abs().sum() == 0
        assert (gradient[0, : t + 1].abs().sum(-1) > 0).all()


@pytest.mark.parametrize("layout", ["mha", "mla"])
def test_a_cache_of_another_dtype_takes_the_queries_to_its_own(layout: str) -> None:
    model = build(config_of(layout, "rms")).double().eval()
    assert len([*generate(model, random_tokens(1, 4), 3)]) == 3  # with a cache in fp32
