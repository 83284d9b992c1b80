"""Which operations take a kernel, and that a model learns and decodes the same with and without."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers.oracles import draw, heads, needs_bf16, operations_alone
from torch.nn import functional as F
from variants import build, config_of, random_tokens

from core.device import cpu_flags
from model import gpt, ops
from model.kernels import operators as kernels
from model.linear import linear
from model.options import MLAOptions


def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that are called from now on."""
    names: list[str] = []

    def spy(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            names.append(name)
            return real(*args)

        return call

    assert kernels.loaded(), "a C++ compiler is needed"
    for name in kernels.FAKES:
        monkeypatch.setattr(kernels.nanoqk, name, spy(name, getattr(kernels.nanoqk, name)))
    return names


def with_bf16(name: str) -> str:
    return name if "avx512_bf16" in cpu_flags() else ""


def without_matrix_units(name: str) -> str:
    return "" if "amx_bf16" in cpu_flags() else with_bf16(name)


def in_bf16(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.autocast("cpu", torch.bfloat16)(function)


def test_a_kernel_is_taken_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """All else goes to the reference: other dtypes, devices and sizes, p as data, fp16 autocast, too few elements."""
    names, x, weight, q = called(monkeypatch), draw(300, 64), torch.ones(64), heads(1, 2, 8, 16, 0)
    half, double, odd, weights = x.bfloat16(), x.double(), heads(1, 2, 8, 24, 0), draw(48, 64)

    def decoding(T: int, kr: int, row: int) -> tuple[torch.Tensor, ...]:
        sizes = (1, 2, T, kr), (1, 2, T, 2), (1, 8, row), (1, 8, 2)
        q_latent, q_rope, latent, k_rope = (draw(*size).bfloat16() for size in sizes)
        return q_latent, q_rope, latent[..., :kr], k_rope

    latents, two, narrow, uneven = decoding(1, 32, 32), decoding(2, 32, 32), decoding(1, 48, 48), decoding(1, 32, 33)
    takes: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
        ("rms_norm", ops.rms_norm, (half, weight, 1e-6)),
        ("", ops.rms_norm, (double, weight, 1e-6)),
        ("", ops.rms_norm, (draw(3, 2049), torch.ones(2049), 1e-6)),
        ("", ops.rms_norm, (draw(1, 1, 1, 3, 64), weight, 1e-6)),
        ("lp_norm", ops.lp_norm, (x, 3.0)),
        *(("", ops.lp_norm, (x, p)) for p in (7.25, torch.inf, torch.tensor(3.0))),
        ("", ops.lp_norm, (x.to("meta"), 3.0)),
        ("layer_norm", ops.residual_norm, (x, weight, None, 1e-5)),
        ("", ops.residual_norm, (x[:2], weight, None, 1e-5)),
        ("", ops.residual_norm, (double, weight.double(), None, 1e-5)),
        (without_matrix_units("linear"), in_bf16(linear), (half, weights)),
        *(("", linear, given) for given in ((half[:2].float(), weights), (half.half(), weights.half()))),
        *(("", linear, given) for given in ((x, weights), (half, weights.bfloat16()), (x, weights, draw(48)))),
        (with_bf16("decoding_linear"), linear, (half[:16], weights.bfloat16())),
        (with_bf16("decoding_linear"), in_bf16(linear), (x[:16], weights.bfloat16())),
        *(("", linear, (half[:n], weights.bfloat16(), *b)) for n, b in ((17, ()), (1, (draw(48).bfloat16(),)))),
        ("gelu", ops.gelu, (half,)),
        *(("", ops.gelu, (y,)) for y in (x, half[:2])),
        ("dropout_add", ops.dropout_add, (x, half, 0.1)),
        ("dropout_add", ops.dropout_add, (x, x, 0.0)),
        ("", ops.dropout_add, (double, double, 0.1)),
        ("dropout", ops.dropout, (x, 0.1)),
        ("", ops.dropout, (x, 0.0)),
        (with_bf16("attention"), ops.causal_attention, (q, q, q, 1.0)),
        ("", ops.causal_attention, (q, q, q, -1.0)),
        *(("", ops.causal_attention, (*qkv, 1.0)) for qkv in ((3 * (q.float(),)), 3 * (odd,), (q[:, :, :2], q, q))),
        (with_bf16("latent_attention"), ops.latent_attention, (*latents, None, None, 1.0, False)),
        ("", ops.latent_attention, (*latents, None, torch.ones(1, 2, 1, 8), 1.0, False)),
        ("", ops.latent_attention, (*latents, None, None, 1.0, False, ops.Softcap(2.0))),
        ("", ops.latent_attention, (*(x.float() for x in latents), None, None, 1.0, False)),
        *(("", ops.latent_attention, (*given, None, None, 1.0, False)) for given in (two, narrow, uneven)),
    ]
    with torch.no_grad():
        for name, function, args in takes:
            function(*args)
            assert names == ([name] if name else []), (function, args)
            names.clear()
    with torch.autocast("cpu", torch.float16):
        assert linear(half, weights).dtype == linear(x[:9], weights).dtype == torch.float16
        torch.testing.assert_close(gpt.LayerNorm(64)(x).float(), F.layer_norm(x, (64,)), rtol=2e-3, atol=2e-3)
    assert not names
    for given in ((half, weights), (x[:9], weights.bfloat16())):
        with pytest.raises(RuntimeError, match="dtype"), torch.no_grad():
            linear(*given)  # without autocast


@pytest.mark.parametrize("layout", ["mha", "gqa", "mqa", "mla"])  # LayerNorm with mha, RMSNorm with the others
def test_a_model_learns_alike_with_and_without(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five updates in bf16 with dropout: every kernel is used, the masks are the same, the losses agree."""
    monkeypatch.setattr(kernels, "SMALL", 0)
    attention = MLAOptions(kv_rank=16, nope_dim=16, rope_dim=16, v_dim=16) if layout == "mla" else layout
    idx, names, losses = random_tokens(4, 17), called(monkeypatch), []
    for context in (nullcontext, operations_alone):
        model = build(config_of(attention, "rms", dropout=0.2, n_embd=64), dtype=torch.float32).train()
        sgd, of_run = torch.optim.SGD(model.parameters(), lr=0.1), []
        for step in range(5):
            torch.manual_seed(step)
            with torch.autocast("cpu", torch.bfloat16), context():
                loss = model(idx[:, :-1], idx[:, 1:])[1]
            loss.backward()
            sgd.step()
            sgd.zero_grad()
            of_run.append(loss.item())
        losses.append(of_run)
        used = {"rms_norm", "layer_norm", "gelu", "dropout", "dropout_add"}
        used |= {with_bf16("attention"), without_matrix_units("linear")} - {""}
        assert set(names) == (set() if context is operations_alone else used)
        names.clear()
    assert losses[0] == pytest.approx(losses[1], abs=0.01) and losses[0][0] - losses[0][-1] > 0.05


@pytest.mark.parametrize(
    "norm,scales",
    [("none", []), ("rms", ["inverse_rms"]), ("layernorm", ["inverse_rms"]), ("lp3", ["inverse_lp_norm"])],
)
def test_decoding_takes_them(norm: str, scales: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A token of absorbed MLA in a layer: the latent's norm, both products with the up-projection, the keys' scale."""
    model = build(config_of("mla", norm), dtype=torch.float32)
    with torch.no_grad():
        caches = model.new_caches(1, 8, torch.float32)
        model(torch.tensor([[1, 2, 3]]), caches=caches)
        names = called(monkeypatch)
        model(torch.tensor([[4]]), caches=caches, pos=3)
    of_norm = [] if norm == "none" else 3 * ["lp_norm" if norm == "lp3" else "rms_norm"]  # queries, shared RoPE key
    assert sorted(names) == sorted(2 * (["rms_norm", "absorb", *scales] + of_norm))


@needs_bf16
@torch.no_grad()
@pytest.mark.parametrize(
    "layout,name",
    [("blockwise", "none"), ("blockwise", "rms"), ("blockwise", "sink"), ("unified", "rms"), ("unified", "lp3")],
)
def test_absorbed_decoding_in_bf16_attends_by_a_kernel(layout: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mla = MLAOptions(kv_rank=32, nope_dim=16, rope_dim=16, v_dim=16, qk_norm_layout=layout)
    model = build(config_of(mla, name), dtype=torch.float32)
    idx, names, logits = random_tokens(3, 9), called(monkeypatch), []
    for context in (nullcontext, operations_alone):
        with torch.autocast("cpu", torch.bfloat16), context():
            caches = model.new_caches(3, 12, torch.bfloat16)
            model(idx[:, :8], caches=caches)
            names.clear()
            logits.append(model(idx[:, 8:], caches=caches, pos=8)[0])
        assert ("latent_attention" in names) == (context is nullcontext)
    torch.testing.assert_close(*logits, rtol=0.02, atol=0.02 * logits[1].float().std().item())
