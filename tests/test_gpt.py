import importlib.util
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import QK_NORM_VARIANTS, tiny_config
from helpers.oracles import attention_reference
from torch import Tensor
from variants import PAIRS, V, build, config_of, random_tokens

from core.schema import ConfigError
from model import ops
from model.gpt import GPT, QK_NORMS, Alpha, LpNorm, initial_alpha, mean_norm_ratio
from model.kernels import operators
from model.ops import causal_attention, dropout_mask
from model.options import GPTConfig, LpNormOptions, ModelOptions, QKNormOptions
from training.config import TrainConfig

PS = [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 7.3, math.inf]


# -----------------------------------------------------------------------------
# The model against others: test_export_hf.py has Hugging Face's, test_gqa.py attention by hand


def test_the_loss_is_the_mean_over_the_targets_that_are_not_ignored() -> None:
    model, idx, targets = build(tiny_config(bias=True)), random_tokens(2, 16), random_tokens(2, 16, seed=3)
    targets[0, 5:] = -1
    logits, loss = model(idx, targets)
    log_probs = logits - logits.exp().sum(-1, keepdim=True).log()
    picked = [-log_probs[b, t, targets[b, t]] for b in range(2) for t in range(16) if targets[b, t] >= 0]
    torch.testing.assert_close(loss, torch.stack(picked).mean(), rtol=1e-11, atol=1e-11)


def test_single_precision_is_the_reference_to_round_off(qk_norm: QKNormOptions) -> None:
    config = tiny_config(qk_norm)
    exact, idx = build(config), random_tokens(2, 16)
    single = build(config, dtype=torch.float32)
    torch.testing.assert_close(single(idx)[0].double(), exact(idx)[0], rtol=1e-4, atol=1e-4)


@pytest.fixture
def nanogpt() -> Any:
    """nanoGPT's own model.py, from the checkout that NANOQK_NANOGPT names."""
    folder = os.environ.get("NANOQK_NANOGPT")
    if not folder:
        pytest.skip("NANOQK_NANOGPT does not name a checkout of nanoGPT")
    spec = importlib.util.spec_from_file_location("nanogpt_model", Path(folder) / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("bias", [False, True])
def test_nanogpts_weights_give_nanogpts_logits_loss_gradients_and_flops(nanogpt: Any, bias: bool) -> None:
    sizes: dict[str, Any] = {"n_layer": 3, "n_head": 4, "n_embd": 64, "block_size": 32, "dropout": 0.0, "bias": bias}
    peer = nanogpt.GPT(nanogpt.GPTConfig(vocab_size=V, **sizes))
    ours = GPT(TrainConfig(model=ModelOptions(**sizes)).gpt, V)
    weights = {name: value for name, value in peer.state_dict().items() if name != "lm_head.weight"}  # tied to wte
    ours.load_state_dict(weights)
    idx, targets = random_tokens(3, 32), random_tokens(3, 32, seed=3)
    (peer_logits, peer_loss), (logits, loss) = peer(idx, targets), ours(idx, targets)
    torch.testing.assert_close(logits, peer_logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loss, peer_loss, rtol=1e-6, atol=1e-6)
    peer_loss.backward(), loss.backward()
    peer_gradients = {name: p.grad for name, p in peer.named_parameters()}
    for name, p in ours.named_parameters():
        torch.testing.assert_close(p.grad, peer_gradients[name], rtol=1e-4, atol=1e-6)
    assert ours.num_params(non_embedding=True) == peer.get_num_params()
    # estimate_mfu returns FLOP/s over an A100's 312e12, for fwdbwd_per_iter sequences in dt seconds
    assert ours.flops_per_token() * 32 == pytest.approx(peer.estimate_mfu(fwdbwd_per_iter=1, dt=1.0) * 312e12)


def test_last_only_gives_the_last_positions_logits() -> None:
    model, idx = build(tiny_config()), random_tokens(2, 16)
    torch.testing.assert_close(model(idx, last_only=True)[0], model(idx)[0][:, -1:])


def test_every_parameter_is_initialised_from_the_seed_and_trained(qk_norm: QKNormOptions) -> None:
    config = tiny_config(qk_norm, bias=True)
    models = [GPT(config.gpt, V) for _ in range(3)]
    for model, seed in zip(models, (1, 1, 2), strict=True):
        model.init_weights(seed)
    states = [model.state_dict() for model in models]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["transformer.wte.weight"], states[2]["transformer.wte.weight"])
    models[0](random_tokens(4, 16), random_tokens(4, 16, seed=3))[1].backward()
    for name, p in models[0].named_parameters():
        assert p.grad is not None and p.grad.abs().sum() > 0, name


@pytest.mark.parametrize("layout, name", PAIRS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_at_first_every_row_gain_alpha_and_learned_p_has_a_gradient(dtype: torch.dtype, layout: str, name: str) -> None:
    gpt = GPT(config_of(layout, QK_NORM_VARIANTS[name], dropout=0.1).gpt, V)
    gpt.init_weights(0)
    idx, targets = random_tokens(8, 16), random_tokens(8, 16, seed=3)
    with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
        loss = gpt.train()(idx, targets)[1]
    loss.backward()
    assert loss.item() == pytest.approx(math.log(V), abs=0.1)
    for key, p in gpt.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all() and p.grad.view(len(p.grad), -1).any(1).all(), key


def test_initialisation_is_gpt2s() -> None:
    model = GPT(GPTConfig(ModelOptions(n_layer=2, n_head=4, n_embd=256, bias=True)), 500)
    model.init_weights(0)
    for name, p in model.named_parameters():
        if p.dim() == 2:
            std = 0.02 / math.sqrt(2 * 2) if name.endswith("c_proj.weight") else 0.02
            assert p.std().item() == pytest.approx(std, rel=0.02) and abs(p.mean().item()) < std / 50, name
        else:
            assert torch.equal(p, torch.full_like(p, 0.0 if name.endswith("bias") else 1.0)), name


def test_init_weights_notices_a_parameter_that_it_left_out() -> None:
    model = GPT(tiny_config().gpt, V)
    model.plain = torch.nn.RMSNorm(4, elementwise_affine=False)  # as a variant may have it: nothing to set
    model.init_weights(0)
    model.extra = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ConfigError, match="sets no values of extra"):
        model.init_weights(0)


def test_initial_loss_is_the_expected_one() -> None:
    for n_embd, vocab in ((32, V), (384, 65), (768, 5000)):
        model = GPT(tiny_config(n_embd=n_embd).gpt, vocab)
        model.init_weights(0)
        idx = torch.randint(vocab, (8, 17), generator=torch.Generator().manual_seed(0))
        loss = model.eval()(idx[:, :-1], idx[:, 1:])[1].item()
        assert loss == pytest.approx(model.expected_initial_loss, abs=0.1)


# -----------------------------------------------------------------------------
# QK norms


each_p = pytest.mark.parametrize("p", [*PS, "learned"])


def lp_norm(p: Any, d: int, n_head: int) -> LpNorm:
    """In float64; learned p differ from head to head."""
    norm = LpNorm(LpNormOptions(p=p), d, n_head).double()
    norm.init_weights()
    with torch.no_grad():
        for raw_p in norm.parameters():
            raw_p.add_(torch.linspace(-1, 2, n_head))
    return norm


def heads(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@each_p
def test_lp_norm_is_x_over_its_p_norm_whatever_the_length_of_x(p: Any) -> None:
    norm, x = lp_norm(p, 64, 3), heads(2, 3, 5, 64)
    if isinstance(norm.p, float):
        size = torch.linalg.vector_norm(x, norm.p, -1, keepdim=True)
    else:
        size = (x.abs() ** norm.p).sum(-1, keepdim=True) ** (1 / norm.p)
    torch.testing.assert_close(norm(x), x / size, rtol=1e-12, atol=0)
    for factor in (1e-20, -1e-3, 1e25):
        torch.testing.assert_close(norm(x * factor), math.copysign(1, factor) * norm(x), rtol=1e-12, atol=0)


@each_p
def test_the_gradient_of_an_lp_norm_is_orthogonal_to_x(p: Any) -> None:
    norm, x = lp_norm(p, 32, 3), heads(2, 3, 7, 32).requires_grad_()
    (gradient,) = torch.autograd.grad((norm(x) * heads(2, 3, 7, 32, seed=1)).sum(), x)
    assert (gradient.abs().sum(-1) > 0).all()
    torch.testing.assert_close((gradient * x).sum(-1), torch.zeros(2, 3, 7).double(), rtol=0, atol=1e-12)


@each_p
def test_lp_norm_passes_gradcheck_in_x_and_in_a_learned_p(p: Any) -> None:
    norm, x = lp_norm(p, 8, 2), heads(2, 2, 2, 8).requires_grad_()
    names, parameters = [*dict(norm.named_parameters())], [*norm.parameters()]

    def of_all(x: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(norm, dict(zip(names, parameters, strict=True)), (x,))

    assert torch.autograd.gradcheck(of_all, (x, *parameters))


@pytest.mark.parametrize("p", [1.2, *PS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # operations in both
def test_an_lp_norms_scale_has_its_derivative(p: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "loaded", lambda: False)
    x = torch.randn(6, 16, dtype=dtype, generator=torch.Generator().manual_seed(0))
    x[1, ::3], x[2, 1:], x[3] = 0, 0, 0
    x[4, :4] = torch.tensor([1e-8, 1e-20, 1e-26, 1e-37])
    x.requires_grad_()
    s = LpNorm(LpNormOptions(p=p), 16, 1).scale(x)
    s.sum().backward()
    with torch.no_grad():  # of 1 / ||x||: -sgn(x) |x|^(p - 1) / ||x||^(p + 1), of a zero vector 0
        if math.isinf(p):
            expected = torch.zeros_like(x)
            expected.scatter_(-1, x.abs().argmax(-1, keepdim=True), -s.square())
        else:
            expected = -x.abs().pow(p - 1) * s.pow(p + 1)
        expected = expected * torch.sgn(x)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, expected)


def test_infinity_norm_shares_the_gradient_among_ties() -> None:
    x = torch.tensor([[1.0, -1.0, 0.5]], dtype=torch.float64, requires_grad=True)
    y = LpNorm(LpNormOptions(p=math.inf), 3, 1)(x)
    (gradient,) = torch.autograd.grad(y[0, 2], x)  # of 0.5 / max|x|
    torch.testing.assert_close(gradient, torch.tensor([[-0.25, 0.25, 1.0]], dtype=torch.float64))


@each_p
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lp_norm_is_finite_at_zero_and_at_the_ends_of_the_number_format(p: Any, dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    zeros, one_hot, sparse = torch.zeros(3, 64)
    one_hot[5] = 1
    sparse[::7] = -3
    rows = [zeros, one_hot, sparse, one_hot * info.tiny, torch.full((64,), info.tiny / 2)]
    rows += [torch.full((64,), info.max), one_hot * info.max, torch.full((64,), info.smallest_normal)]
    x = torch.stack(rows).to(dtype)[None, None].requires_grad_()
    norm = lp_norm(p, 64, 1).float()
    y = norm(x)
    (0.5 * y.float().square()).sum().backward()
    assert y.dtype == dtype and y.isfinite().all() and (y[0, 0, 0] == 0).all()
    assert all(t.grad is not None and t.grad.isfinite().all() for t in (x, *norm.parameters()))
    assert x.grad is not None and (x.grad[0, 0, 0] == 0).all()
    with torch.no_grad():
        assert torch.equal(norm(x), y)
    exponent = norm.p if isinstance(norm.p, float) else norm.p.item()
    norms = torch.linalg.vector_norm(y[0, 0, [1, 2, 5, 6]].double(), exponent, -1)
    torch.testing.assert_close(norms, torch.ones(4).double(), rtol=2 * info.eps + 1e-6, atol=0)


@pytest.mark.parametrize("name", QK_NORM_VARIANTS)
def test_every_norm_is_gain_times_x_times_one_scalar(name: str) -> None:
    config = QK_NORM_VARIANTS[name]
    norm = QK_NORMS[config.name](config, 16, 3).double()
    norm.init_weights()
    if norm.gain is not None:
        torch.nn.init.uniform_(norm.gain, generator=torch.Generator().manual_seed(1))
    x = torch.randn(2, 3, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert norm.scale(x).shape == (2, 3, 5, 1)
    gain = 1.0 if norm.gain is None else norm.gain
    if norm.centred:
        x = x - x.mean(-1, keepdim=True)
    y = norm(x)
    torch.testing.assert_close(y, gain * x * norm.scale(x), rtol=1e-13, atol=0)
    with torch.no_grad():  # without the derivatives that are written out
        assert torch.equal(norm(x), y)


def test_alpha_init_henry_is_log2_of_L_squared_minus_L_and_sqrt_d_and_a_number_what_they_say() -> None:
    for alpha_init, alpha in (("henry", pytest.approx(15.994, abs=1e-3)), ("sqrt_d", 8), (3.25, 3.25)):
        assert initial_alpha(LpNormOptions(alpha_init=alpha_init), (64,), 256) == alpha  # type: ignore[arg-type]


@pytest.mark.parametrize("p", PS)
def test_alpha_init_matched_equalises_the_spread_of_the_initial_logits(p: float) -> None:
    alpha = initial_alpha(LpNormOptions(p=p, alpha_init="matched"), (64,), 256)
    q, k = torch.randn(2, 50_000, 64, generator=torch.Generator().manual_seed(7))
    q, k = (x / torch.linalg.vector_norm(x, p, -1, keepdim=True) for x in (q, k))
    assert (alpha * (q * k).sum(-1)).std().item() == pytest.approx(1.0, rel=0.02)  # 8 cos: 8 / sqrt(64)


def test_the_matched_start_is_right_for_any_p() -> None:
    assert mean_norm_ratio(1000, 64) == pytest.approx(mean_norm_ratio(math.inf, 64), rel=0.01)
    assert mean_norm_ratio(1e30, 2) == pytest.approx(mean_norm_ratio(math.inf, 2), rel=1e-6)


def test_mean_norm_ratio_does_not_touch_the_global_generator() -> None:
    before = torch.get_rng_state()
    mean_norm_ratio.__wrapped__(2.25, 48)  # else it may be cached
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("alpha_map", ["exp", "softplus", "linear"])
@pytest.mark.parametrize("initial", [0.01, 1.0, 15.99])
def test_alpha_starts_at_its_init_and_stays_positive(alpha_map: Any, initial: float) -> None:
    config = LpNormOptions(alpha_map=alpha_map, alpha_init=initial, alpha_per="head")
    alpha = Alpha(config, n_head=3, block_dims=(16,), block_size=32)
    alpha.init_weights()
    torch.testing.assert_close(alpha(), torch.full((3, 1, 1), initial), rtol=1e-5, atol=0)
    with torch.no_grad():
        alpha.raw.sub_(2 * initial + 1)
    assert (alpha() > 0).all()


# -----------------------------------------------------------------------------
# Dropout, attention product


@pytest.mark.parametrize("p_dropout", [0.0, 0.25])
@pytest.mark.parametrize(
    ("T", "n_kv_head", "dv"),
    [(16, 4, 8), (64, 2, 8), (150, 4, 5), (65, 1, 8), pytest.param(1100, 2, 4, marks=pytest.mark.slow)],
)
def test_attention_and_its_gradient_against_the_definition(
    T: int, n_kv_head: int, dv: int, p_dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    masks = []

    def drawn(*args: Any) -> tuple[Tensor, float]:
        masks.append(dropout_mask(*args))
        return masks[-1]

    monkeypatch.setattr("model.ops.dropout_mask", drawn)
    sizes = [(3, T, 4, 8), (3, T, n_kv_head, 8), (3, T, n_kv_head, dv)]
    q, k, v = (torch.randn(*size, dtype=torch.float64).transpose(1, 2) for size in sizes)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    y = causal_attention(q, k, v, 0.3, p_dropout=p_dropout)
    keep, i = torch.full((12, T, T), 0.0 if p_dropout else 1.0, dtype=torch.float64), 0
    for mask, scale in masks:  # some queries, the keys up to the last of them
        keep[:, i : i + mask.size(1), : mask.size(2)] = scale * mask
        i += mask.size(1)
        assert scale == pytest.approx(4 / 3)
    assert i == (T if p_dropout else 0)
    expected = attention_reference((q, k, v), 0.3, keep.view(3, 4, T, T))
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-13)
    grad = torch.randn_like(y)
    for ours, theirs in zip(*(torch.autograd.grad(out, inputs, grad) for out in (y, expected)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("T", "S"), [(1, 9), (9, 9), (4, 9)])
def test_bf16_queries_meet_keys_of_an_fp32_cache_in_fp32(T: int, S: int) -> None:
    """Under autocast too, which would cast the cache to bf16: that moves logits as large as these by some 0.1."""
    g = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, T, 8, generator=g).bfloat16()
    k, v = (torch.randn(2, 2, S, 8, generator=g) for _ in range(2))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y = causal_attention(q, k, v, 8.0)
    assert y.dtype == torch.bfloat16
    expected = causal_attention(q.double(), k.double(), v.double(), 8.0)
    torch.testing.assert_close(y.double(), expected, rtol=1.001 * 2.0**-8, atol=1e-4)


def test_only_the_logits_of_attention_in_bf16_may_be_multiplied_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    mkldnn: Any = torch.backends.mkldnn
    exact, settings = ops.at_least_fp32, set[tuple[torch.dtype, str]]()

    def spied(x: Tensor) -> Tensor:
        settings.add((x.dtype, mkldnn.matmul.fp32_precision))
        return exact(x)

    monkeypatch.setattr(ops, "at_least_fp32", spied)
    monkeypatch.setattr(operators, "loaded", lambda: False)
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    setting, product = mkldnn.matmul.fp32_precision, x @ x
    for dtype in (torch.float32, torch.bfloat16):
        q = torch.zeros(1, 1, 8, 16, dtype=dtype, requires_grad=True)
        causal_attention(q, q, q, 0.25).sum().backward()
    assert settings == {(torch.float32, setting), (torch.bfloat16, "bf16")}
    with pytest.raises(RuntimeError):
        causal_attention(q, q[..., :3], q, 0.25)
    assert mkldnn.matmul.fp32_precision == setting
    assert torch.equal(x @ x, product)


@pytest.mark.parametrize("alpha_init", ["sqrt_d", "matched", "henry", 2.0])
def test_a_model_is_built_on_the_meta_device_whatever_alpha_starts_from(alpha_init: Any) -> None:
    mean_norm_ratio.cache_clear()
    with torch.device("meta"):
        gpt = GPT(tiny_config(LpNormOptions(p=3.0, alpha_init=alpha_init)).gpt, 11)
    assert all(parameter.is_meta for parameter in gpt.parameters())
