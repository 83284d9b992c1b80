"""The variants of ours that Hugging Face's architectures have, too."""

from dataclasses import replace
from typing import Any

from variants import config_of

from model.options import GQAOptions, MHAOptions, MLAOptions, RMSNormOptions
from training.config import TrainConfig

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
