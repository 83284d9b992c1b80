import math
from typing import Any

import pytest
import torch
from conftest import tiny_config
from torch import Tensor
from variants import V, build, config_of, random_tokens

from model.generate import decode_one_token, decoding, decoding_weights, generate, prefill, sample_token
from model.gpt import GPT, Alpha
from model.linear import FusedLinear
from model.variants.sigma_reparam import Reparam


def greedy_without_cache(model: GPT, idx: Tensor, n: int) -> Tensor:
    """(B, n): each token by a full forward of the window that the cache holds: see generate's docstring."""
    window, out, held = idx[:, -model.block_size :], [], min(idx.size(1), model.block_size)
    for _ in range(n):
        token = model(window[:, -held:])[0][:, -1].argmax(-1)
        out.append(token)
        window = torch.cat([window, token[:, None]], 1)
        held = held + 1 if held < model.block_size else max(1, model.block_size // 2)
    return torch.stack(out, 1)


@pytest.mark.parametrize("layout", ["mha", "mla"])
def test_a_full_cache_is_refused(layout: str) -> None:
    model, idx = build(config_of(layout, "rms")), random_tokens(1, 8)
    caches = model.new_caches(1, 8, torch.float64)
    prefill(model, idx, caches)
    with pytest.raises(AssertionError, match="the cache is full"):
        decode_one_token(model, idx[:, 0], caches, 8)


GREEDY: list[tuple[str, str, int, dict[str, Any]]] = [
    *((layout, norm, n, {}) for layout, norm in (("mha", "lp3"), ("mla", "layernorm")) for n in (1, 5, 16, 40)),
    ("mha", "none", 1, {"block_size": 1}),
    ("gqa", "rms", 3, {"activation_checkpointing": True}),
]


@pytest.mark.parametrize(("layout", "norm", "prompt", "settings"), GREEDY)
def test_greedy_decoding_equals_full_forwards(layout: str, norm: str, prompt: int, settings: dict[str, Any]) -> None:
    """Also past block_size, and of a model in training mode, which decodes with its cache."""
    model, idx = build(config_of(layout, norm, **settings)), random_tokens(3, prompt)
    model.train("activation_checkpointing" in settings)
    tokens = torch.stack(list(generate(model, idx, 30, temperature=0, dtype=torch.float64)), 1)
    assert torch.equal(tokens, greedy_without_cache(model.eval(), idx, 30))


def test_sampling_follows_the_seed_alone() -> None:
    model, idx = build(tiny_config()), random_tokens(2, 3)

    def draw(seed: int) -> Tensor:
        torch.rand(seed)  # what the global generator did before does not matter
        return torch.stack(list(generate(model, idx, 20, seed=seed, dtype=torch.float64)), 1)

    assert torch.equal(draw(5), draw(5))
    assert not torch.equal(draw(5), draw(6))


def frequencies(logits: Tensor, **settings: float) -> Tensor:
    g = torch.Generator().manual_seed(0)
    tokens = sample_token(logits.expand(40_000, -1), generator=g, **settings)  # type: ignore[arg-type]
    return torch.bincount(tokens, minlength=logits.numel()) / 40_000


LOGITS = torch.tensor([2.0, 0.0, 1.0, 1.5, -1.0])  # softmax: .43 .06 .16 .26 .02 … in this order


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_sampled_frequencies_are_the_softmax_at_the_temperature(temperature: float) -> None:
    expected = (LOGITS.double() / temperature).softmax(-1).float()
    torch.testing.assert_close(frequencies(LOGITS, temperature=temperature), expected, rtol=0, atol=0.01)


def test_top_k_keeps_the_k_likeliest_and_renormalises() -> None:
    kept = torch.tensor([2.0, -math.inf, -math.inf, 1.5, -math.inf]).softmax(-1)
    torch.testing.assert_close(frequencies(LOGITS, top_k=2), kept, rtol=0, atol=0.01)
    assert torch.equal(frequencies(LOGITS, top_k=99), frequencies(LOGITS))


@pytest.mark.parametrize("top_p, n", [(1e-46, 1), (1e-9, 1), (0.4, 1), (0.5, 2), (0.7, 2), (0.9, 3), (0.95, 4), (1, 5)])
def test_top_p_keeps_the_smallest_set_that_reaches_p(top_p: float, n: int) -> None:
    probs = LOGITS.softmax(-1)
    order = probs.argsort(descending=True)
    assert probs[order[:n]].sum() >= top_p - 1e-6 and (n == 1 or probs[order[: n - 1]].sum() < top_p)
    seen = frequencies(LOGITS, top_p=top_p).nonzero().flatten().tolist()
    assert sorted(seen) == sorted(order[:n].tolist())


def test_top_k_1_is_greedy_and_ties_keep_one_token_at_least() -> None:
    assert (sample_token(LOGITS.expand(50, -1), top_k=1) == 0).all()
    assert (sample_token(LOGITS.expand(50, -1), temperature=0) == 0).all()
    even = torch.zeros(100, V)
    assert len({*sample_token(even, top_k=1).tolist()}) == 1
    assert sample_token(even, top_p=0.01).shape == (100,)
    assert sample_token(torch.full((3, V), -1e30), top_p=0.5, temperature=1e-3).shape == (3,)


CAST: list[tuple[str, str, dict[str, bool]]] = [
    ("mha", "rms", {}), ("mha", "rms", {"bias": True}), ("mha", "rms", {"tied": False}), ("gqa", "lp_learned", {}),
    ("mqa", "none", {}), ("mla", "none", {}), ("mla", "layernorm", {}), ("mla", "rms", {"tied": False}),
    ("mla_q_rank", "rms", {}), ("mla_unified", "layernorm", {}), ("mla_unified", "lp_learned", {}),
    ("gqa", "sigma_reparam", {}), ("mla", "all", {}),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "norm", "settings"), CAST)
def test_in_bf16_logits_are_those_of_autocast(layout: str, norm: str, settings: dict[str, bool]) -> None:
    """The same bits with the weights cast in advance, of the same tensors afterwards."""
    model = build(config_of(layout, norm, **settings), dtype=torch.float32)
    idx, parameters = random_tokens(2, 9), dict(model.named_parameters())
    swaps = decoding_weights(model, torch.bfloat16)
    outcomes = []
    for weights in ([], swaps):
        caches = model.new_caches(2, 9, torch.bfloat16)
        with decoding(weights, torch.bfloat16, idx.device):
            logits = [prefill(model, idx[:, :6], caches)]
            logits += [decode_one_token(model, idx[:, i], caches, i) for i in range(6, 9)]
        outcomes.append(torch.stack(logits))
    assert torch.equal(*outcomes)
    after = dict(model.named_parameters())
    assert after.keys() == parameters.keys() and all(after[name] is parameters[name] for name in after)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("norm", "kind"), [("sigma_reparam", Reparam), ("lp3", Alpha)])
def test_reparametrised_weights_and_alpha_are_computed_once_for_all_tokens(
    norm: str, kind: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, compute = build(config_of("mla", norm), dtype=torch.float32), kind.forward
    calls = []

    def counted(self: Any, *args: Tensor) -> Tensor:
        calls.append(self)
        return compute(self, *args)

    monkeypatch.setattr(kind, "forward", counted)
    assert len(list(generate(model, random_tokens(2, 3), 40, dtype=dtype))) == 40  # with a cache that is filled again
    assert len(calls) == len({*calls}) == sum(isinstance(m, kind) for m in model.modules()) > 0
    model(random_tokens(2, 3))  # as in training: of the weights of now
    assert len(calls) == 2 * len({*calls})


def test_a_layer_of_ones_own_and_a_reparametrisation_with_a_matmul_decode_as_they_train() -> None:
    class Doubled(FusedLinear):
        def matrix(self) -> Tensor:
            return 2 * super().matrix()

    class Squared(torch.nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight @ weight.mT @ weight  # under autocast in bf16

    model = build(config_of("gqa", "rms"), dtype=torch.float32)
    blocks: Any = model.transformer.h
    for block in blocks:
        own = Doubled(32, block.attn.c_attn.split_sizes, bias=False)
        own.weight = block.attn.c_attn.weight
        own.reparam, block.attn.c_attn = Squared(), own
    idx = random_tokens(2, 9)
    for dtype in (torch.float32, torch.bfloat16):
        logits = []
        for swaps in ([], decoding_weights(model, dtype)):
            with decoding(swaps, dtype, idx.device):
                logits.append(prefill(model, idx, model.new_caches(2, 9, dtype)))
        assert torch.equal(*logits)


def test_a_model_whose_decoding_fails_or_waits_has_its_own_weights() -> None:
    model = build(tiny_config(), dtype=torch.float32)
    weights = {name: p.clone() for name, p in model.named_parameters()}
    tokens = generate(model, random_tokens(1, 4), 9, dtype=torch.bfloat16)
    token = next(tokens)
    logits = model(random_tokens(1, 4))[0][:, -1]
    torch.nn.functional.cross_entropy(logits, token).backward()  # of the model's weights; the token is a plain tensor
    assert all(p.grad is not None and p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
    del tokens
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(type(model.transformer.h[1].mlp), "forward", lambda self, x: 1 / 0)
        next(generate(model, random_tokens(1, 4), 9, dtype=torch.bfloat16))
    torch.testing.assert_close(dict(model.named_parameters()), weights, rtol=0, atol=0)
    assert model.lm_head is None and torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


@pytest.mark.parametrize("layout", ["gqa", "mla"])
def test_on_a_cpu_keys_and_values_are_cached_in_fp32(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, made = build(config_of(layout, "rms"), dtype=torch.float32), []
    new_caches = GPT.new_caches

    def spy(*args: Any) -> Any:
        made.append(new_caches(*args))
        return made[0]

    monkeypatch.setattr(GPT, "new_caches", spy)
    list(generate(model, random_tokens(2, 3), 4, dtype=torch.bfloat16))
    held = {t.dtype for cache in made[0] for t in vars(cache).values() if t is not None}
    assert held == {torch.float32 if layout == "gqa" else torch.bfloat16}


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_cast_once_and_anew_for_the_next_text(tied: bool) -> None:
    network = build(tiny_config(tied=tied), dtype=torch.float32)
    prompt = random_tokens(1, 4)

    def decoded(n: int) -> tuple[list[int], int]:
        """The tokens, and how many matrices were cast: weights have two dimensions, activations three."""
        with torch.profiler.profile(record_shapes=True) as profile:
            tokens = [int(token) for token in generate(network, prompt, n, temperature=0, dtype=torch.bfloat16)]
        casts = [e for e in profile.events() or [] if e.name == "aten::_to_copy" and len(e.input_shapes[0]) == 2]
        return tokens, len(casts)

    tokens, few = decoded(2)
    _, many = decoded(8)
    n_weights = sum(isinstance(module, torch.nn.Linear) for module in network.modules()) + tied
    assert few == many == n_weights
    with torch.no_grad():  # stale weights would not notice
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)))
    assert decoded(2)[0] != tokens
