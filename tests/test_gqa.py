"""GroupedQueryAttention in all its dimensions, the GQA paper's topic, against a plain loop in float64.

n heads, k key and value heads, d channels a head, s positions, in batches; odd sizes, k = 1 (multi-query) and k = n
(multi-head), inputs that are not contiguous, with and without a cache, eager and compiled.
"""

import math
import os
import shutil
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from variants import NORMS, config_of

from model.gpt import GroupedQueryAttention, Rope
from training.config import GQAConfig, LpQKNormConfig, MHAConfig

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
        layout = MHAConfig(head_dim=self.d) if self.k == self.n else GQAConfig(head_dim=self.d, n_kv_head=self.k)
        position = "rope" if self.rope else "learned"
        shape: dict[str, Any] = {"n_head": self.n, "n_embd": self.width, "block_size": self.s + 3, "bias": self.bias}
        shape |= {"position": position, "rope_theta": THETA if self.rope else None}
        config = config_of(layout, self.norm, **shape)
        attn, g = GroupedQueryAttention(config).double().eval(), torch.Generator().manual_seed(self.seed)
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


def by_hand(attn: GroupedQueryAttention, case: Case, x: Tensor) -> np.ndarray:
    """(batch, s, width): one sequence, head, query and key at a time, from the weights."""
    w = {name: p.detach().numpy() for name, p in attn.named_parameters()}
    n, k, d = case.n, case.k, case.d
    config = NORMS[case.norm]

    def project(token: np.ndarray, head: int) -> np.ndarray:
        rows = slice(head * d, (head + 1) * d)
        return w["c_attn.weight"][rows] @ token + (w["c_attn.bias"][rows] if case.bias else 0.0)

    def norm(vector: np.ndarray, side: str, head: int) -> np.ndarray:
        if isinstance(config, LpQKNormConfig):
            p = config.p if isinstance(config.p, float) else 1 + math.log1p(math.exp(w[f"{side}_norm.raw_p"][head]))
            return vector / (max(abs(vector)) if p == math.inf else sum(abs(c) ** p for c in vector) ** (1 / p))
        if case.norm == "none":
            return vector
        if case.norm == "layernorm":
            vector = vector - sum(vector) / d
        return vector / math.sqrt(sum(c * c for c in vector) / d + 1e-6) * w[f"{side}_norm.gain"]

    def turn(vector: np.ndarray, t: int) -> np.ndarray:
        turned = vector.copy()
        for i in range(d // 2 if case.rope else 0):
            angle = t * THETA ** (-2 * i / d)
            a, b = vector[i], vector[i + d // 2]
            turned[i] = a * math.cos(angle) - b * math.sin(angle)
            turned[i + d // 2] = b * math.cos(angle) + a * math.sin(angle)
        return turned

    result = np.zeros((case.batch, case.s, case.width))
    for b, sequence in enumerate(x.numpy()):
        heads = np.zeros((case.s, n * d))
        for h in range(n):
            group = h // (n // k)
            keys = [turn(norm(project(token, n + group), "k", group), t) for t, token in enumerate(sequence)]
            values = [project(token, n + k + group) for token in sequence]
            scale = 1 / math.sqrt(d)
            if isinstance(config, LpQKNormConfig):
                alpha = w["logit_scale.alpha.raw"]
                scale = math.exp(alpha[h if config.alpha_per == "head" else 0])
            for i, token in enumerate(sequence):
                query = turn(norm(project(token, h), "q", h), i)
                logits = [scale * float(query @ keys[j]) for j in range(i + 1)]
                weights = [math.exp(logit - max(logits)) for logit in logits]
                mean = sum(a * v for a, v in zip(weights, values[: i + 1], strict=True)) / sum(weights)
                heads[i, h * d : (h + 1) * d] = mean
        result[b] = heads @ w["c_proj.weight"].T + (w["c_proj.bias"] if case.bias else 0.0)
    return result


def assert_is_the_loop(y: Tensor, case: Case, attn: GroupedQueryAttention, x: Tensor) -> None:
    expected = by_hand(attn, case, x)
    assert y.shape == expected.shape and y.dtype == torch.float64
    error = np.abs(y.detach().numpy() - expected).max()
    assert error <= 1e-11 * max(1.0, np.abs(expected).max()), (case, error)


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
        norm=draw(st.sampled_from([*NORMS])),
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


@settings(deadline=None, max_examples=50)
@given(cases(), st.data())
def test_with_a_cache_filled_in_any_steps_too(case: Case, data: st.DataObject) -> None:
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


@torch.no_grad()
@settings(deadline=None, max_examples=8)
@given(cases())
@example(COMPILED["gqa"])
@example(COMPILED["multi_query"])
@example(COMPILED["multi_head"])
def test_compiled_with_and_without_a_cache_too(case: Case) -> None:
    """One graph each, but for the code generator, whose turn is next."""
    torch._dynamo.reset()
    attn, x = case.module(), case.input()
    compiled = torch.compile(attn, fullgraph=True, backend="aot_eager")
    assert_is_the_loop(compiled(x, case.tables), case, attn, x)
    cache, first = attn.new_cache(case.batch, case.s, torch.float64), case.s // 2
    chunks = [(0, first), (first, case.s)] if first else [(0, case.s)]
    parts = [compiled(x[:, start:end], case.tables, cache, start) for start, end in chunks]
    assert_is_the_loop(torch.cat(parts, 1), case, attn, x)


@torch.no_grad()
def test_generated_code_too() -> None:
    """torch.compile's own backend."""
    if shutil.which("g++") is None and not os.environ.get("CI"):
        pytest.skip("torch.compile needs g++")
    torch._dynamo.reset()
    case = COMPILED["gqa"]
    attn, x = case.module(), case.input()
    assert_is_the_loop(torch.compile(attn, fullgraph=True)(x, case.tables), case, attn, x)
