"""Hugging Face's models beside ours: in float64, with equal tables, and the variants that they have, too."""

import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3
from variants import config_of

from model.gpt import GPT
from model.options import GQAOptions, MHAOptions, MLAOptions, RMSNormOptions
from training.config import TrainConfig


class Float64Torch(types.SimpleNamespace):
    """The torch module, but that float32 means float64."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture(params=[torch.float64, torch.float32], ids=["float64", "float32"])
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.dtype]:
    """In float64, Hugging Face's RMSNorm and softmax, which cast to float32 by name, get float64 instead."""
    if request.param == torch.float64:
        for module in (modeling_llama, modeling_qwen3, modeling_deepseek_v3):
            monkeypatch.setattr(module, "torch", Float64Torch())
    yield request.param


TOLERANCE = {torch.float64: 1e-13, torch.float32: 5e-6}


@torch.no_grad()
def take_tables(ours: GPT, hf: Any) -> None:
    """Both tables come from float32 angles, by formulas that differ in the last bit: ours takes theirs, in float64."""
    tables = hf.model.rotary_emb(torch.zeros(1).double(), torch.arange(ours.block_size)[None])  # (1, block_size, d)
    for mine, table in zip(ours.buffers(), tables, strict=True):
        torch.testing.assert_close(mine, table[0, :, : mine.size(1)], rtol=0, atol=4e-6)
        mine.copy_(table[0, :, : mine.size(1)])


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Largest, relative to the largest logit."""
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


LLAMA: dict[str, Any] = {"mlp": "swiglu", "mlp_hidden": 56, "norm_eps": 1e-3}
ROPE: dict[str, Any] = {**LLAMA, "norm": "rmsnorm", "position": "rope", "rope_theta": 100.0}
RMS = RMSNormOptions(eps=3e-2)  # not norm_eps
MLA = MLAOptions(kv_rank=12, nope_dim=8, rope_dim=4, v_dim=6)
VARIANTS: dict[str, tuple[str, TrainConfig]] = {
    "gpt2": ("GPT2", config_of("mha", "none")),
    "gpt2-bias-untied": ("GPT2", config_of("mha", "none", bias=True, tied=False, mlp_hidden=40, norm_eps=1e-2)),
    "llama-mha": ("Llama", config_of(MHAOptions(head_dim=12), "none", **ROPE)),
    "llama-gqa-bias": ("Llama", config_of(GQAOptions(n_kv_head=2), "none", **LLAMA, bias=True, tied=False)),
    "qwen3-mha": ("Qwen3", config_of("mha", RMS, **ROPE)),
    "qwen3-gqa": ("Qwen3", config_of(GQAOptions(n_kv_head=2, head_dim=12), RMS, **LLAMA)),
    "qwen3-mqa-untied": ("Qwen3", config_of("mqa", "rms", **LLAMA, tied=False)),
    "deepseek_v3": ("DeepseekV3", config_of(MLA, "none", **LLAMA)),
    "deepseek_v3-q_rank-untied": ("DeepseekV3", config_of(replace(MLA, q_rank=10), "none", **LLAMA, tied=False)),
}
