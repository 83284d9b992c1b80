"""The contestants of the attention track against other people's code, or their papers' formulas in float64.

Hugging Face's attention layers run eagerly, with the same weights, rotations and mask.
Shapes: B batch, T positions, C = n_embd, nh heads, nkv key heads, hs channels a head.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.oracles import causal_logits
from torch import Tensor
from variants import CONTESTANTS, build, config_of, fresh, random_tokens, refused, rope_of

from core.schema import ConfigError
from data.options import TextFileOptions
from model import ops
from model.diagnostics import attention_weights
from model.gpt import GPT, rotate
from model.hf import architecture_of
from model.linear import Linear
from model.options import RMSNormOptions, SinkOptions, SpectralCapOptions
from model.variants.spectral_cap import spectral_norm_bound
from training.checks import start_up_checks
from training.config import AdamWOptions, MuonOptions, TrainConfig, load_config
from training.optim import Optimizer
from training.session import setup
from training.updates import applying_weights_variant

B, T, C, nh, nkv, hs = 2, 16, 32, 4, 2, 8
CAUSAL = torch.full((1, 1, T, T), -math.inf).triu(1)
HF: dict[str, Any] = {
    "hidden_size": C, "num_attention_heads": nh, "num_key_value_heads": nkv, "head_dim": hs, "attention_bias": False,
    "attention_dropout": 0.0, "attn_implementation": "eager", "rms_norm_eps": 1e-6,
}  # fmt: skip
ROPE: dict[str, Any] = {"norm": "rmsnorm", "position": "rope", "rope_theta": 100.0}


def hidden(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(B, T, C, dtype=dtype, generator=torch.Generator().manual_seed(3))


def rms(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def hugging_faces(kind: str) -> Any:
    """An attention layer with random weights."""
    import transformers.models as m
    from transformers import Gemma2Config, GptOssConfig, Olmo2Config, Qwen3NextConfig

    if kind == "softcap":
        gemma = Gemma2Config(**HF, attn_logit_softcapping=1.0, query_pre_attn_scalar=hs)
        layer: Any = m.gemma2.modeling_gemma2.Gemma2Attention(gemma, 0)
    elif kind == "rms_whole":
        olmo = Olmo2Config(**{k: v for k, v in HF.items() if k != "head_dim"})
        layer = m.olmo2.modeling_olmo2.Olmo2Attention(olmo, 0)
    elif kind == "sink":
        layer = m.gpt_oss.modeling_gpt_oss.GptOssAttention(GptOssConfig(**HF), 0)
    else:
        layer = m.qwen3_next.modeling_qwen3_next.Qwen3NextAttention(Qwen3NextConfig(**HF), 0)
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(0.4 * torch.randn(p.shape, generator=g))
    return layer.eval()


def with_weights_of(layer: Any, gpt: GPT, gated: bool) -> Any:
    """Our first layer with theirs."""
    attn, q = gpt.attentions[0], layer.q_proj.weight
    if gated:  # each head's query rows, then its gate's
        q, gate = (part.flatten(0, 1) for part in q.view(nh, 2 * hs, C).split(hs, 1))
        attn.output.w.weight.copy_(gate)
    attn.c_attn.weight.copy_(torch.cat([q, layer.k_proj.weight, layer.v_proj.weight]))
    attn.c_proj.weight.copy_(layer.o_proj.weight)
    return attn


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["softcap", "rms_whole", "sink", "gate_channel"])
def test_a_layer_computes_what_hugging_faces_does(kind: str) -> None:
    """Gemma 2, OLMo 2, gpt-oss, Qwen3-Next."""
    layer = hugging_faces(kind)
    gated = kind == "gate_channel"
    normed: dict[str, Any] = {"qk_norm": RMSNormOptions()} if gated else {}
    gpt = build(replace(config_of("gqa", "none", **ROPE), **CONTESTANTS[kind], **normed), dtype=torch.float32)
    attn = with_weights_of(layer, gpt, gated)
    if kind in ("rms_whole", "gate_channel"):  # Qwen3-Next's weights are gains less 1
        for ours, theirs in ((attn.q_norm, layer.q_norm), (attn.k_norm, layer.k_norm)):
            ours.gain.copy_(theirs.weight + gated)
    if kind == "sink":
        attn.softmax.logit.copy_(layer.sinks)
    rope: Any = rope_of(gpt)
    cos, sin = (table[None, :T] if kind == "sink" else torch.cat([table, table], -1)[None, :T] for table in rope)
    x = hidden(torch.float32)
    theirs = layer(x, position_embeddings=(cos, sin), attention_mask=CAUSAL)[0]
    torch.testing.assert_close(attn(x, rope), theirs, rtol=2e-5, atol=2e-5)
    assert theirs.std() > 0.1


# -----------------------------------------------------------------------------
# Formulas


def expected(config: Any, attn: Any, x: Tensor, rope: Any) -> Tensor:
    """The layer's output by the papers of its variants."""
    parts = (x @ attn.c_attn.weight.T).split(attn.c_attn.split_sizes, -1)
    q, k, v = (part.unflatten(-1, (-1, hs)).transpose(1, 2) for part in parts)  # (B, nh or nkv, T, hs), as projected
    if config.qk_norm.name == "rms":
        q, k = attn.q_norm.gain * rms(q), attn.k_norm.gain * rms(k)
    if config.qk_norm.name == "rms_whole":  # one gain for the layer
        q, k = (rms(part.transpose(1, 2).flatten(2)).view(B, T, -1, hs).transpose(1, 2) for part in (q, k))
        q = attn.q_norm.gain * q
    q, k, v = rotate(q, rope), *(part.repeat_interleave(nh // k.size(1), 1) for part in (rotate(k, rope), v))
    if config.qk_norm.name == "rms_scaled":
        q, k = config.qk_norm.gain * rms(q), config.qk_norm.gain * rms(k)
    if config.qk_norm.name == "ngpt":  # both sides times s_qk, logits times sqrt(hs)
        s = 32 * attn.q_norm.raw.view(nh, 1, hs)
        q, k = hs * s * q / q.norm(dim=-1, keepdim=True), s * k / k.norm(dim=-1, keepdim=True)
    logits, n = q @ k.mT / math.sqrt(hs), torch.arange(1, T + 1)[:, None]
    if config.logits.name == "ssmax":
        logits = attn.logits.s.view(nh, 1, 1) * n.log() ** config.logits.power * logits
    if config.logits.name == "softcap":
        logits = torch.tanh(logits)
    if config.logits.name == "gain":
        logits = logits * (2 if config.logits.learned is None else attn.logits.g.view(-1, 1, 1))
    weights, extra = (logits + CAUSAL).exp(), torch.tensor(0.0)
    if config.softmax.name == "sink":  # a further logit of each head's denominator
        extra = torch.ones(nh, 1, 1) if attn.softmax.logit is None else attn.softmax.logit.view(nh, 1, 1).exp()
    weights = weights / (weights.sum(-1, keepdim=True) + extra)
    if config.attention.name == "softpick":
        risen, largest = logits.tril().expm1(), (logits + CAUSAL).amax(-1, keepdim=True).clamp(min=0)
        weights = risen.relu() / (risen.abs().sum(-1, keepdim=True) + 1e-6 * largest.exp())
    if config.output.name == "affine":
        alpha = (0.1 * x @ attn.output.w.weight.T + 0.5).clamp(0, 1).mT[..., None]
        weights = (alpha * weights + (attn.output.average.view(nh, 1, 1) - alpha) / n).tril()
    if config.output.name == "value_norm":
        gain = {None: 1, "untouched": 0.02 * math.sqrt(C)}.get(config.output.gain, attn.output.gain)
        if config.output.gain == "learned_head":
            gain = gain.repeat_interleave(nh // len(gain)).view(nh, 1, 1)
        v = gain * rms(v)
    y = weights @ v
    if config.output.name == "xsa":
        y = y - (y * v).sum(-1, keepdim=True) * v / v.square().sum(-1, keepdim=True)
    if config.output.name == "output_norm":
        y = rms(y) * (attn.output.gain.view(nh, 1, hs) if config.output.gain else 1)
    if config.output.name == "gate":
        y = y * torch.sigmoid(x @ attn.output.w.weight.T).unflatten(-1, (nh, -1)).transpose(1, 2)
    return y.transpose(1, 2).flatten(2) @ attn.c_proj.weight.T


@pytest.mark.parametrize("block_size", [1, 2, 3, 5, 6, 64])
@pytest.mark.parametrize("name", ["ssmax", "ssmax_half+rms_whole_layer"])
def test_ssmax_starts_as_the_plain_softmax_on_average_over_the_context(name: str, block_size: int) -> None:
    ssmax = build(config_of("mha", name, block_size=block_size)).attentions[0].logits
    ssmax.init_weights()
    factors = ssmax.scale_queries(torch.ones(1, nh, block_size, 1, dtype=torch.float64), 0)  # s (log n)^power
    assert factors.mean().item() == pytest.approx(0 if block_size == 1 else 1)


@torch.no_grad()
@pytest.mark.parametrize("name", ["value_norm_untouched", "value_norm_head", "gain_layer+value_norm_learned"])
def test_values_with_a_gain_start_at_the_size_that_they_have_without_a_norm(name: str) -> None:
    for width in (64, 256):
        gpt = fresh(config_of("gqa", name, n_embd=width))
        x = torch.nn.functional.layer_norm(torch.randn(4, 16, width), (width,))
        v = gpt.attentions[0].c_attn(x)[..., -2 * width // 4 :].unflatten(-1, (2, -1)).transpose(1, 2)
        assert (gpt.attentions[0].output.transform_values(v).norm() / v.norm()).item() == pytest.approx(1, abs=0.05)


WITHOUT_FORMULA = ("rms_whole", "sigma_reparam", "quack", "all")


@torch.no_grad()
@pytest.mark.parametrize(
    ("layout", "name"),
    [(a, n) for a in ("mha", "gqa", "mqa") for n in CONTESTANTS if n not in WITHOUT_FORMULA and not refused(a, n)],
)
def test_a_layer_computes_its_papers_formula(layout: str, name: str) -> None:
    config = config_of(layout, name, **ROPE)
    gpt, x = build(config), hidden()
    attn, rope = gpt.attentions[0], rope_of(gpt)
    for state in (p for p in attn.output.parameters() if not p.requires_grad):  # affine's moving average
        state.uniform_(generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(attn(x, rope), expected(config, attn, x, rope), rtol=1e-5, atol=1e-7)


@torch.no_grad()
def test_softpicks_maps_are_its_weights() -> None:
    gpt, idx = build(config_of("mha", "softpick")), random_tokens(B, T)
    parts: Any = gpt.transformer
    attn, x = gpt.attentions[0], parts.h[0].ln_1(parts.wte(idx))
    att = attention_weights(gpt, idx)[0].double()  # (B, nh, T, T)
    v = attn.c_attn(x)[..., -C:].unflatten(-1, (nh, hs)).transpose(1, 2)
    torch.testing.assert_close(
        attn.c_proj((att @ v).transpose(1, 2).flatten(2)), attn(x, rope_of(gpt)), rtol=1e-5, atol=1e-6
    )
    assert (att == 0).tril().any() and (att.sum(-1) < 0.99).any()


@pytest.mark.usefixtures("each_implementation")
@pytest.mark.parametrize("cap", [None, 2.0, 50.0])
@pytest.mark.parametrize(("length", "n_kv_head", "spread"), [(64, 4, 1.0), (150, 2, 3.0), (256, 1, 10.0)])
def test_attention_its_log_sum_exp_and_gradients_are_as_exact_as_bf16_allows(
    length: int, n_kv_head: int, spread: float, cap: float | None
) -> None:
    g = torch.Generator().manual_seed(0)
    sizes = [(2, n, length, 16) for n in (4, n_kv_head, n_kv_head)]
    inputs = [torch.randn(size, generator=g).bfloat16() for size in sizes]
    grad, grad_lse = torch.randn(sizes[0], generator=g).bfloat16(), torch.randn(sizes[0][:3], generator=g)

    def exact(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        logits = causal_logits(q, k, spread / 4, cap)
        return logits.softmax(-1) @ v.repeat_interleave(4 // n_kv_head, 1), logits.logsumexp(-1)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return ops.attention_and_lse(q, k, v, spread / 4, 0.0, None if cap is None else ops.Softcap(cap))

    def outcome(dtype: torch.dtype, attend: Any, n: int) -> list[Tensor]:
        """The first n results, and the gradients by them."""
        qkv = [x.to(dtype).requires_grad_() for x in inputs]
        out = attend(*qkv)[:n]
        grads = [g.to(y.dtype) for g, y in zip((grad, grad_lse), out, strict=False)]
        return [*out, *torch.autograd.grad(out, qkv, grads)]

    def errors(attend: Any, n: int) -> list[float]:
        pairs = zip(outcome(torch.bfloat16, attend, n), outcome(torch.float64, exact, n), strict=True)
        return [((a.double() - b).norm() / b.norm()).item() for a, b in pairs]

    with_lse = errors(ours, 2)
    assert with_lse[1] < 1e-6 and max(with_lse) < 5e-3, with_lse
    if cap is None:  # as exact as SDPA, at most: logits of up to 50 are not rounded to bf16, where steps are 0.25
        assert max(errors(lambda q, k, v: [ops.causal_attention(q, k, v, spread / 4)], 1)) < 4e-3 + 2e-4 * spread


def test_dropout_acts_on_the_weights_and_not_on_the_log_sum_exp() -> None:
    q, k, v = torch.randn(3, 2, 4, 64, 16, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    y, lse = ops.attention_and_lse(q, k, v, 0.25, 0.5)
    whole, same = ops.attention_and_lse(q, k, v, 0.25)
    assert torch.equal(lse, same) and not torch.allclose(y, whole)
    torch.testing.assert_close(whole, ops.causal_attention(q, k, v, 0.25))


@pytest.mark.parametrize("bend", [None, ops.Softcap(2.0)])
def test_dropout_drops_what_the_reference_drops(bend: ops.Bend | None) -> None:
    q, v = torch.randn(2, 2, 4, 100, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    k = q[:, :2]
    found = []
    for attend in (ops.attention_and_lse, ops.attention_and_lse_reference):
        torch.manual_seed(1)
        found.append(attend(q, k, v[:, :2], 0.25, 0.5, bend)[0])
    torch.testing.assert_close(*found, rtol=0.02, atol=0.05)


# -----------------------------------------------------------------------------
# Weights


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("layout", ["gqa", "mla_q_rank"])
def test_sigma_reparam_gives_every_projection_the_largest_singular_value_gamma(layout: str) -> None:
    gpt = fresh(config_of(layout, "sigma_reparam", n_layer=1))
    linears: list[Any] = [m for m in gpt.transformer.h.modules() if isinstance(m, torch.nn.Linear)]
    torch.manual_seed(0)
    assert len(linears) == (4 if layout == "gqa" else 7)
    for linear in linears:
        torch.testing.assert_close(linear.matrix(), linear.weight, rtol=1e-5, atol=1e-7)  # gamma starts at sigma(W)
        linear.weight.add_(0.02 * torch.randn_like(linear.weight))
        linear.reparam.gamma.uniform_(0.5, 2)
        for _ in range(1000):
            linear.reparam.after_update()
        for part, gamma in zip(linear.matrix().split(linear.split_sizes), linear.reparam.gamma, strict=True):
            assert torch.linalg.matrix_norm(part, 2).item() == pytest.approx(gamma.item(), rel=1e-3)


def test_sigma_reparam_has_the_gradient_of_gamma_w_over_its_norm() -> None:
    gpt = fresh(config_of("mha", "sigma_reparam"))
    linear = gpt.double().attentions[0].c_proj
    grad = torch.randn_like(linear.weight)
    found = torch.autograd.grad(linear.reparam(linear.weight), [linear.weight, linear.reparam.gamma], grad)
    norm = torch.linalg.matrix_norm(linear.weight, 2)
    scaled = linear.reparam.gamma / norm * linear.weight
    right = torch.autograd.grad(scaled, [linear.weight, linear.reparam.gamma], grad)
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def update(model: GPT, config: TrainConfig) -> None:
    optimizer = Optimizer(model, config)
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    idx = random_tokens(4, 16)
    model.train()(idx, idx)[1].backward()
    with applying_weights_variant(model):
        optimizer.step()


@pytest.mark.parametrize("optim", [AdamWOptions(), MuonOptions()])
@pytest.mark.parametrize("layout", ["gqa", "mla_q_rank"])
def test_a_spectral_cap_divides_each_projection_by_what_it_exceeds_the_cap_by(layout: str, optim: Any) -> None:
    """Against exact singular values; our bound of the largest of n is at most n^(1/256) times it."""
    plain = replace(config_of(layout, "none", **ROPE), optim=optim)
    capped = replace(plain, weights=SpectralCapOptions(c=2.0))
    models = [build(config, dtype=torch.float32) for config in (plain, capped)]
    for model in models:
        update(model, capped)
    linears = [[m for m in gpt.transformer.h.modules() if isinstance(m, Linear)] for gpt in models]
    above = []
    for before, after in zip(*linears, strict=True):
        for w, found in zip(*(m.weight.detach().split(m.split_sizes) for m in (before, after)), strict=True):
            cap = 2.0 * math.sqrt(len(w) / w.size(1))
            above.append(bool(torch.linalg.matrix_norm(w, 2) > 1.03 * cap))
            assert torch.linalg.matrix_norm(found, 2) <= cap * (1 + 1e-5)
            torch.testing.assert_close(found, w / max(1, torch.linalg.matrix_norm(w, 2) / cap), rtol=0.03, atol=0)
            assert above[-1] or torch.equal(found, w) or torch.linalg.matrix_norm(w, 2) > 0.97 * cap
    assert 0 < sum(above) < len(above)


@pytest.mark.parametrize("size", [1e-8, 1.0, 1e8])
def test_the_bound_of_a_spectral_norm_holds(size: float) -> None:
    w, flat = torch.randn(64, 32), torch.linalg.qr(torch.randn(128, 128))[0]
    for matrix, most in ((flat, 1.02), (w, 1.014), (torch.ones(3, 700), 1.0)):
        bound = spectral_norm_bound(size * matrix) / torch.linalg.matrix_norm(size * matrix, 2)
        assert 1 - 1e-5 <= bound <= most + 1e-5
    assert spectral_norm_bound(0 * w) < 1e-18


def test_affines_moving_average_is_that_of_the_updates_before() -> None:
    gpt = build(config_of("gqa", "affine+spectral_cap", **ROPE))
    output, seen, average = gpt.attentions[0].output, [], torch.zeros(nh, dtype=torch.float64)
    output.register_forward_hook(lambda module, given, y: seen.append((given[1] @ module.w.weight.T).detach()))
    for _ in range(3):
        torch.testing.assert_close(output.average.detach(), average)
        update(gpt, config_of("gqa", "affine+spectral_cap", **ROPE))
        average = 0.9 * average + 0.1 * (0.1 * seen[-1] + 0.5).clamp(0, 1).mean((0, 1))
    with torch.no_grad():
        gpt.eval()(random_tokens(2, 16))
    torch.testing.assert_close(output.average.detach(), average)


def norm(w: Tensor) -> float:
    return w.square().sum().sqrt().item()


def rates_of_mha(attn: Any, first: Any) -> dict[str, list[float]]:
    """Algorithm 1: the rate of each row of c_attn, over the base rate; first: the layer at the start."""
    group = attn.n_head // attn.n_kv_head
    now, start = ([*a.c_attn.weight.split(hs)] for a in (attn, first))
    keys = range(nh, nh + attn.n_kv_head)
    of_q = [norm(start[nh + h // group]) / norm(now[nh + h // group]) for h in range(nh)]
    largest = [[max(norm(w[h]) for h in range(nh) if h // group == k - nh) for k in keys] for w in (start, now)]
    of_k = [a / b for a, b in zip(*largest, strict=True)]
    return {"c_attn": [rate for of in (of_q, of_k, [1.0] * len(keys)) for rate in of for _ in range(hs)]}


def rates_of_mla(attn: Any, first: Any) -> dict[str, list[float]]:
    """Algorithm 2, as it is printed."""
    dn, dr, kr = attn.nope_dim, attn.rope_dim, attn.kv_rank

    def factors(a: Any) -> dict[str, list[float]]:
        heads = a.c_q.weight.split(dn + dr)
        uq, qr = [norm(w[:dn]) for w in heads], [norm(w[dn:]) for w in heads]
        uk = [norm(w) for w in a.c_kv_b.weight[: nh * dn].split(dn)]
        dq, dkv, k = norm(a.c_q_a.weight), norm(a.c_kv_a.weight[:kr]), norm(a.c_kv_a.weight[kr:])
        of_q = [f for h in range(nh) for f in [1 / (dq * uk[h] * dkv)] * dn + [1 / (dq * k)] * dr]
        of_dq = min(1 / max(uq[h] * uk[h] * dkv for h in range(nh)), 1 / max(w * k for w in qr))
        return {
            "c_q": of_q,
            "c_kv_b": [f for h in range(nh) for f in [1 / (uq[h] * dq * dkv)] * dn],
            "c_q_a": [of_dq] * a.c_q_a.weight.size(0),
            "c_kv_a": [1 / max(uq[h] * dq * uk[h] for h in range(nh))] * kr + [1 / max(w * dq for w in qr)] * dr,
        }

    now, start = factors(attn), factors(first)
    found = {name: [a / b for a, b in zip(now[name], start[name], strict=True)] for name in now}
    found["c_kv_b"] += [1.0] * (nh * attn.v_dim)
    return found


@pytest.mark.parametrize("optim", ["adamw", "muon"])
@pytest.mark.parametrize("layout", ["mha", "gqa", "mla_q_rank"])
def test_quack_scales_the_learning_rates_by_its_papers_algorithms(layout: str, optim: str) -> None:
    settings = config_of(layout, "quack", **ROPE)
    config = load_config({
        "model": vars(settings.model), "attention": vars(settings.attention), "weights": {"name": "quack"},
        "optim": {"name": optim},
    })  # fmt: skip
    first, gpt = fresh(config), fresh(config)
    plain = GPT(replace(config, weights=TrainConfig().weights).gpt, 11)
    with torch.no_grad():
        for p in gpt.parameters():
            if p.requires_grad:
                of_rows = p.shape[:1] + (1,) * (p.dim() - 1)
                p.mul_(1 + torch.rand(of_rows, generator=torch.Generator().manual_seed(p.numel())))
    plain.load_state_dict({k: v for k, v in gpt.state_dict().items() if not k.endswith("weights.start")})
    before = {k: v.clone() for k, v in gpt.state_dict().items()}
    rates_of = rates_of_mla if layout.startswith("mla") else rates_of_mha
    rates = [rates_of(*pair) for pair in zip(gpt.attentions, first.attentions, strict=True)]
    for model in (gpt, plain):
        update(model, config)
    for name, w in plain.state_dict().items():
        factor = torch.ones(1)
        known = rates[int(name.split(".")[2])].get(name.split(".")[-2]) if ".attn.c_" in name else None
        if known is not None:
            factor = torch.tensor(known)[:, None]
            assert (factor - 1).abs().max() > 0.05
        step = (w - before[name]) * factor
        torch.testing.assert_close(gpt.state_dict()[name] - before[name], step, rtol=1e-3, atol=2e-6)


def test_quack_gives_the_biases_of_queries_and_keys_the_rates_of_their_rows() -> None:
    gpt = fresh(config_of("gqa", "quack", bias=True), seed=1)
    attn: Any = gpt.attentions[0]
    with torch.no_grad():
        attn.c_attn.weight.mul_(3)
    block: Any = gpt.transformer.h[0]
    factors = {rows.data_ptr(): (rows, factor) for rows, factor in block.weights.update_factors()}
    q, k, v = attn.c_attn.bias.split(attn.c_attn.split_sizes)
    for bias, rows in zip((q, k), attn.c_attn.weight.split(attn.c_attn.split_sizes)[:2], strict=True):
        torch.testing.assert_close(factors[bias.data_ptr()][1], factors[rows.data_ptr()][1][:, 0])
        assert (factors[bias.data_ptr()][1] < 1).all()
    assert v.data_ptr() not in factors


def test_quack_changes_no_rate_at_the_start_but_by_tau() -> None:
    shape = {"n_layer": 1, "n_embd": 48, "n_head": 6}
    config = load_config({"weights": {"name": "quack", "tau": 0.25}, "model": shape})
    gpt = fresh(config)
    block: Any = gpt.transformer.h[0]
    factors = block.weights.update_factors()
    assert len(factors) == 2 and all(torch.allclose(f, torch.tensor(0.25)) for _, f in factors)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTESTANTS)
def test_a_contestant_passes_the_start_up_checks(name: str, corpus: Path, tmp_path: Path) -> None:
    """None of them sees the future; their first loss is that of a uniform guess."""
    for layout, dtype in (("gqa", "bfloat16"), ("mla", "float32")):
        if not refused(layout, name):
            config = replace(config_of(layout, name, dropout=0.1, **ROPE), data=TextFileOptions(path=str(corpus)))
            here: dict[str, Any] = {"device": "cpu", "dtype": dtype, "out_dir": str(tmp_path / "run")}
            config = replace(config, batch_size=4, threads=1, **here)
            assert start_up_checks(setup(config)) == []


def test_whatever_fills_the_slots_the_other_weights_start_the_same() -> None:
    def weights(layout: str, name: str) -> dict[str, Tensor]:
        return fresh(config_of(layout, name, **ROPE), seed=5).state_dict()

    plain = {layout: weights(layout, "none") for layout in ("mha", "gqa")}
    for name in CONTESTANTS:
        layout = "mha" if refused("gqa", name) else "gqa"
        other = weights(layout, name)
        assert all(torch.equal(w, other[key]) for key, w in plain[layout].items()), name


@pytest.mark.parametrize("name", CONTESTANTS)
def test_a_contestant_is_not_exported_as_an_architecture_that_lacks_it(name: str) -> None:
    with pytest.raises(ConfigError, match="no Hugging Face architecture fits this run"):
        architecture_of(config_of("gqa", name, mlp="swiglu").gpt)


def test_settings_that_are_at_their_defaults_are_in_no_name_and_no_hash() -> None:
    sink = replace(TrainConfig(), softmax=SinkOptions())
    assert sink.run_dir.name.startswith("baby_gpt-mha-none-sink_logitlearned-tiny_shakespeare-s1337-")
    assert not {"logits", "softmax", "output", "weights"} & {key.split(".")[0] for key in TrainConfig().trajectory}
