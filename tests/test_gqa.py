"""GroupedQueryAttention in all its dimensions, the GQA paper's topic, against a plain loop in float64.

n heads, k key and value heads, d channels a head, s positions, in batches; odd sizes, k = 1 (multi-query) and k = n
(multi-head), inputs that are not contiguous, with and without a cache, eager and compiled; values and gradients.
"""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from conftest import QK_NORM_VARIANTS
from helpers.oracles import norm_by_hand
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from variants import config_of

from model.gpt import GroupedQueryAttention, Rope
from model.options import GQAOptions, LpNormOptions, MHAOptions

THETA = 100.0


@dataclass(frozen=True)
class Case:
    """Sizes; how attention is set up; how the input lies in memory; seed of weights and input."""

    n: int
    k: int
    d: int
    s: int
    batch: int = 2
    width: int = 5
    norm: str = "rms"
    rope: bool = True
    bias: bool = False
    layout: str = "contiguous"
    seed: int = 0

    @property
    def tables(self) -> Rope | None:
        if not self.rope:
            return None
        angles = [[t * THETA ** (-2 * i / self.d) for i in range(self.d // 2)] for t in range(self.s + 3)]
        table = torch.tensor(angles, dtype=torch.float64).view(self.s + 3, self.d // 2)
        return table.cos(), table.sin()

    def module(self) -> GroupedQueryAttention:
        layout = MHAOptions(head_dim=self.d) if self.k == self.n else GQAOptions(head_dim=self.d, n_kv_head=self.k)
        position = "rope" if self.rope else "learned"
        shape: dict[str, Any] = {"n_head": self.n, "n_embd": self.width, "block_size": self.s + 3, "bias": self.bias}
        shape |= {"position": position, "rope_theta": THETA if self.rope else None}
        config = config_of(layout, QK_NORM_VARIANTS[self.norm], **shape)
        attn, g = GroupedQueryAttention(config.gpt).double().eval(), torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            for parameter in attn.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=g))
        return attn

    def input(self) -> Tensor:
        """(batch, s, width)"""
        B, T, C = self.batch, self.s, self.width
        g = torch.Generator().manual_seed(self.seed + 1)
        x = torch.randn(B, T, C, generator=g, dtype=torch.float64)
        if self.layout == "transposed":
            return x.permute(2, 0, 1).contiguous().permute(1, 2, 0)
        if self.layout == "strided":
            return torch.stack([x, torch.full_like(x, math.nan)], -1).view(B, T, 2 * C)[..., ::2]
        if self.layout == "expanded":
            return x[:1].expand(B, T, C)
        return x


def by_hand(attn: GroupedQueryAttention, case: Case, x: Tensor) -> Tensor:
    """(batch, s, width): one head and query at a time, from the weights; autograd can follow it."""
    w = dict(attn.named_parameters())
    n, k, d = case.n, case.k, case.d
    config = QK_NORM_VARIANTS[case.norm]

    def project(head: int) -> Tensor:
        rows = slice(head * d, (head + 1) * d)
        return x @ w["c_attn.weight"][rows].T + (w["c_attn.bias"][rows] if case.bias else 0.0)  # (batch, s, d)

    def norm(vectors: Tensor, side: str, head: int) -> Tensor:
        return norm_by_hand(vectors, config, dict(getattr(attn, f"{side}_norm").named_parameters()), head)

    def turn(vectors: Tensor) -> Tensor:
        turned = [*vectors.unbind(-1)]  # d of (batch, s)
        for i in range(d // 2 if case.rope else 0):
            angles = torch.arange(case.s, dtype=torch.float64) * THETA ** (-2 * i / d)
            a, b = turned[i], turned[i + d // 2]
            turned[i] = a * angles.cos() - b * angles.sin()
            turned[i + d // 2] = b * angles.cos() + a * angles.sin()
        return torch.stack(turned, -1)

    heads = []
    for h in range(n):
        group = h // (n // k)
        queries = turn(norm(project(h), "q", h))
        keys, values = turn(norm(project(n + group), "k", group)), project(n + k + group)
        scale: Tensor | float = 1 / math.sqrt(d)
        if isinstance(config, LpNormOptions):
            raw = w["logit_scale.alpha.raw"][h if config.alpha_per == "head" else 0]
            scale = {"exp": raw.exp(), "softplus": raw.exp().log1p(), "linear": raw.abs()}[config.alpha_map]
        means = []
        for i in range(case.s):
            logits = scale * (queries[:, i, None] * keys[:, : i + 1]).sum(-1, True)  # (batch, i + 1, 1)
            weights = (logits - logits.amax(1, True)).exp()
            means.append((weights * values[:, : i + 1]).sum(1) / weights.sum(1))
        heads.append(torch.stack(means, 1))
    return torch.cat(heads, -1) @ w["c_proj.weight"].T + (w["c_proj.bias"] if case.bias else 0.0)


def assert_equal(found: Tensor, expected: Tensor, case: Case, name: str, tolerance: float = 1e-11) -> None:
    assert found.shape == expected.shape and found.dtype == torch.float64
    error = float((found - expected).detach().abs().max())
    assert error <= tolerance * max(1.0, float(expected.abs().max())), (name, case, error)


def assert_is_the_loop(y: Tensor, case: Case, attn: GroupedQueryAttention, x: Tensor) -> None:
    with torch.no_grad():
        assert_equal(y, by_hand(attn, case, x), case, "y")


@st.composite
def cases(draw: st.DrawFn) -> Case:
    k, group, rope = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.booleans())
    k, group = draw(st.sampled_from([(k, group), (1, group), (k, 1)]))
    return Case(
        n=k * group,
        k=k,
        d=2 * draw(st.integers(1, 4)) if rope else draw(st.integers(1, 9)),
        s=draw(st.integers(1, 9)),
        batch=draw(st.integers(1, 3)),
        width=draw(st.integers(1, 9)),
        norm=draw(st.sampled_from([*QK_NORM_VARIANTS])),
        rope=rope,
        bias=draw(st.booleans()),
        layout=draw(st.sampled_from(["contiguous", "transposed", "strided", "expanded"])),
        seed=draw(st.integers(0, 2**16)),
    )


@settings(deadline=None, max_examples=80)
@given(cases())
def test_attention_is_the_plain_loop_in_every_dimension(case: Case) -> None:
    attn, x = case.module(), case.input()
    before = x.clone()
    assert_is_the_loop(attn(x, case.tables), case, attn, x)
    assert torch.equal(x, before)


@settings(deadline=None, max_examples=40)
@given(cases())
def test_gradients_of_input_and_parameters_are_the_loops(case: Case) -> None:
    """In training mode, of a random weighting of the output."""
    attn, x = case.module().train(), case.input().requires_grad_()
    names, parameters = zip(*attn.named_parameters(), strict=True)
    weighting = torch.randn(x.shape, generator=torch.Generator().manual_seed(case.seed + 2), dtype=torch.float64)
    outputs = attn(x, case.tables), by_hand(attn, case, x)
    found, expected = (torch.autograd.grad(y, [x, *parameters], weighting) for y in outputs)
    for name, ours, theirs in zip(["x", *names], found, expected, strict=True):
        assert_equal(ours, theirs, case, name, tolerance=1e-9)  # a norm of nearly 0 amplifies rounding


@settings(deadline=None, max_examples=50)
@given(cases(), st.data())
def test_attention_with_a_cache_filled_in_any_steps_is_the_plain_loop(case: Case, data: st.DataObject) -> None:
    """The cache is longer than the sequence, and what lies in it beyond is not a number."""
    attn, x = case.module(), case.input()
    cache = attn.new_cache(case.batch, case.s + 3, torch.float64)
    for tensor in (cache.k, cache.v):
        tensor.fill_(math.nan)
    parts, pos = [], 0
    while pos < case.s:
        n = data.draw(st.integers(1, case.s - pos))
        parts.append(attn(x[:, pos : pos + n], case.tables, cache, pos))
        pos += n
    assert_is_the_loop(torch.cat(parts, 1), case, attn, x)


COMPILED = {
    "gqa": Case(n=6, k=3, d=4, s=7, norm="rms"),
    "multi_query": Case(n=3, k=1, d=5, s=9, norm="layernorm", rope=False, bias=True, layout="transposed"),
    "multi_head": Case(n=5, k=5, d=3, s=1, batch=1, norm="lp3", rope=False, layout="strided"),
}


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_attention_is_the_plain_loop_with_and_without_a_cache(name: str) -> None:
    """One graph each, without PyTorch's code generator, which test_qk_clip.py compares with eager code."""
    torch._dynamo.reset()
    case = COMPILED[name]
    attn, x = case.module(), case.input()
    compiled = torch.compile(attn, fullgraph=True, backend="aot_eager")
    assert_is_the_loop(compiled(x, case.tables), case, attn, x)
    cache, first = attn.new_cache(case.batch, case.s, torch.float64), case.s // 2
    chunks = [(0, first), (first, case.s)] if first else [(0, case.s)]
    parts = [compiled(x[:, start:end], case.tables, cache, start) for start, end in chunks]
    assert_is_the_loop(torch.cat(parts, 1), case, attn, x)
