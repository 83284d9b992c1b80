"""Every QK norm and every attention layout, tiny, for the tests that run over all pairs; and what attention multiplies.

Shapes: B batch, T positions, C = n_embd, nh and nkv heads, hs channels a head.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from core.schema import validate
from model import ops, options
from model.gpt import GPT, MultiHeadLatentAttention
from model.options import AttentionOptions, QKNormOptions
from training.config import TrainConfig

FULL = os.environ.get("NANOQK_FAULTS") == "full"  # make test-faults: at length
V = 11
NORMS: dict[str, QKNormOptions] = {
    "none": options.NoNormOptions(),
    "rms": options.RMSNormOptions(),
    "layernorm": options.LayerNormOptions(),
    "lp1": options.LpNormOptions(p=1.0),
    "lp1.5": options.LpNormOptions(p=1.5),
    "lp2": options.LpNormOptions(p=2.0),
    "lp3": options.LpNormOptions(p=3.0, alpha_per="head"),
    "lpinf": options.LpNormOptions(p=float("inf")),
    "lp_learned": options.LpNormOptions(p="learned"),
}
BLOCKWISE = options.MLAOptions(kv_rank=12, nope_dim=8, rope_dim=4, v_dim=6)
LAYOUTS: dict[str, AttentionOptions] = {
    "mha": options.MHAOptions(),
    "gqa": options.GQAOptions(n_kv_head=2),
    "mqa": options.GQAOptions(n_kv_head=1),
    "mla": BLOCKWISE,
    "mla_q_rank": replace(BLOCKWISE, q_rank=10),
    "mla_unified": replace(BLOCKWISE, qk_norm_layout="unified"),
}
CONTESTANTS: dict[str, dict[str, Any]] = {  # groups of settings beside the layout; a cap that bends these tests' logits
    "rms_scaled": {"qk_norm": options.ScaledRMSNormOptions()},
    "rms_whole": {"qk_norm": options.WholeRMSNormOptions()},
    "ngpt": {"qk_norm": options.NGPTNormOptions()},
    "softcap": {"logits": options.SoftcapOptions(cap=1.0)},
    "ssmax": {"logits": options.SSMaxOptions()},
    "sink": {"softmax": options.SinkOptions()},
    "off_by_one": {"softmax": options.SinkOptions(logit=0.0)},
    "gate_head": {"output": options.GateOptions()},
    "gate_channel": {"output": options.GateOptions(per="channel")},
    "value_norm": {"output": options.ValueNormOptions()},
    "value_norm_untouched": {"output": options.ValueNormOptions(gain="untouched")},
    "value_norm_head": {"output": options.ValueNormOptions(gain="learned_head")},
    "xsa": {"output": options.XSAOptions()},
    "affine+spectral_cap": {"output": options.AffineOptions(), "weights": options.SpectralCapOptions(c=0.5)},
    "gain": {"logits": options.GainOptions(), "qk_norm": options.RMSNormOptions()},
    "gain_head+output_norm": {"logits": options.GainOptions(learned="head"), "output": options.OutputNormOptions()},
    "gain_layer+value_norm_learned": {
        "logits": options.GainOptions(learned="layer"), "output": options.ValueNormOptions(gain="learned"),
    },
    "ssmax_half+rms_whole_layer": {
        "logits": options.SSMaxOptions(power=0.5), "qk_norm": options.WholeRMSNormOptions(gain="layer"),
    },
    "rms_scaled+sink+output_norm_plain": {  # the first two: DeepSeek-V4
        "qk_norm": options.ScaledRMSNormOptions(gain=1.0), "softmax": options.SinkOptions(),
        "output": options.OutputNormOptions(gain=False),
    },
    "softpick": {"attention": options.SoftpickOptions()},
    "sigma_reparam": {"weights": options.SigmaReparamOptions()},
    "quack": {"weights": options.QuackOptions()},
    "softcap+rms": {"logits": options.SoftcapOptions(cap=1.0), "qk_norm": options.RMSNormOptions()},
    "gate+sink": {"output": options.GateOptions(per="channel"), "softmax": options.SinkOptions()},
    "all": {
        "qk_norm": options.RMSNormOptions(), "logits": options.SoftcapOptions(cap=1.0),
        "softmax": options.SinkOptions(), "output": options.GateOptions(), "weights": options.SigmaReparamOptions(),
    },
}  # fmt: skip
ALL_PAIRS = [(a, n) for a in LAYOUTS for n in NORMS if (a, n) != ("mla_unified", "none")]  # which the config refuses
# How a norm takes p does not depend on the layout; MQA is GQA with one key head, q_rank changes MLA's queries alone
FORMS = ("none", "rms", "layernorm", "lp3", "lp_learned")
FEW = {"mqa": ("rms", "lp_learned"), "mla_q_rank": ("none", "layernorm")}
PAIRS = ALL_PAIRS if FULL else [(a, n) for a, n in ALL_PAIRS if a == "mha" or n in FEW.get(a, FORMS)]


def refused(layout: str, name: str) -> bool:
    """Whether the config refuses a contestant with a layout."""
    unified = layout == "mla_unified" and (name == "rms_whole" or "qk_norm" not in CONTESTANTS[name])
    reads_values = getattr(CONTESTANTS[name].get("output"), "name", "") in ("value_norm", "xsa", "affine")
    return unified or (reads_values and layout.startswith("mla")) or (name == "softpick" and layout != "mha")


ALL_ENTRIES = [*PAIRS, *((a, n) for a in LAYOUTS for n in CONTESTANTS if not refused(a, n))]
SOME = {  # of CONTESTANTS
    "mha": ("rms_whole", "ngpt", "softpick", "all"), "mqa": ("rms_whole",), "mla_q_rank": ("quack", "all"),
}  # fmt: skip
ENTRIES = [(a, n) for a, n in ALL_ENTRIES if FULL or n in (*NORMS, *SOME.get(a, CONTESTANTS))]


def config_of(attention: str | AttentionOptions, qk_norm: str | QKNormOptions, **settings: Any) -> TrainConfig:
    """Two layers of four heads; plain MHA with learned positions and LayerNorm, all else with RoPE and RMSNorm.

    qk_norm: options, or a name of NORMS or CONTESTANTS.
    """
    layout = LAYOUTS[attention] if isinstance(attention, str) else attention
    of_name = {**{name: {"qk_norm": norm} for name, norm in NORMS.items()}, **CONTESTANTS}
    chosen: dict[str, Any] = {**of_name[qk_norm]} if isinstance(qk_norm, str) else {"qk_norm": qk_norm}
    layout = chosen.pop("attention", layout)
    settings = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 16, "dropout": 0.0, **settings}
    if type(layout) is not options.MHAOptions:
        settings = {"norm": "rmsnorm", "position": "rope", "rope_theta": 100.0, **settings}
    config = TrainConfig(model=options.ModelOptions(**settings), attention=layout, **chosen)
    validate(config)
    return config


def fresh(config: TrainConfig, seed: int = 0, vocab_size: int = V) -> GPT:
    """A model as training begins with it, in fp32."""
    gpt = GPT(config.gpt, vocab_size)
    gpt.init_weights(seed)
    return gpt


def build(config: TrainConfig, seed: int = 0, dtype: torch.dtype = torch.float64, vocab_size: int = V) -> GPT:
    """A model away from the special values of initialisation: gains, alphas and learned p differ in every entry."""
    gpt = fresh(config, seed, vocab_size)
    g = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in filter(lambda p: p.requires_grad, gpt.parameters()):
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=g))
    return gpt.to(dtype).eval()


def random_tokens(*shape: int, seed: int = 2) -> Tensor:
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(seed))


def rope_of(gpt: GPT) -> tuple[Tensor, Tensor] | None:
    return None if gpt.transformer.wpe is not None else (gpt.cos, gpt.sin)  # type: ignore[return-value]


@contextmanager
def attention_products() -> Iterator[list[tuple[Tensor, Tensor, Tensor, float]]]:
    """What the attention products within it get: q (B, nh, T, dk), k (B, nkv, T, dk), v and the scale of each."""
    got: list[Any] = []

    def capture(q: Tensor, k: Tensor, v: Tensor, scale: float, p_dropout: float = 0.0) -> Tensor:
        got.append((q, k, v, scale))
        return causal_attention(q, k, v, scale, p_dropout)

    causal_attention = ops.causal_attention
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "causal_attention", capture)
        yield got


def seeing(more: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """An attention product in which query i (T, 1) also meets the keys j (T,) where more(i, j)."""

    def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, p_dropout: float = 0.0) -> Tensor:
        k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
        j = torch.arange(q.size(-2))
        i = j[:, None]
        hidden = (j > i) & ~more(i, j)
        return torch.softmax((scale * q @ k.transpose(-2, -1)).masked_fill(hidden, -torch.inf), -1) @ v

    return attention


def looking_ahead(n: int) -> Callable[..., Tensor]:
    """An attention product whose mask leaves each query n keys too many."""
    return seeing(lambda i, j: j <= i + n)


def attended(gpt: GPT, x: Tensor) -> tuple[Tensor, Tensor, Tensor, float]:
    """What layer 0's attention product gets for x (B, T, C): q (B, nh, T, dk), k (B, nkv, T, dk), v, and the scale."""
    with attention_products() as got:
        gpt.attentions[0](x, rope_of(gpt))
    (only,) = got
    return only


def raw_queries_and_keys(attn: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """q (B, nh, T, dk) and k (B, nkv, T, dk) of x (B, T, C) before any QK norm, head by head from rows of the weights;
    of layouts without biases."""
    if not isinstance(attn, MultiHeadLatentAttention):
        rows = attn.c_attn.weight.split(attn.head_dim)  # one head's each
        heads = [x @ w.T for w in rows]
        return torch.stack(heads[: attn.n_head], 1), torch.stack(heads[attn.n_head :][: attn.n_kv_head], 1)

    def latent_norm(c: Tensor, norm: Any) -> Tensor:
        return c / (c.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight

    low = latent_norm(x @ attn.c_q_a.weight.T, attn.q_a_norm) if isinstance(attn.c_q_a, torch.nn.Linear) else x
    q = torch.stack([low @ w.T for w in attn.c_q.weight.split(attn.nope_dim + attn.rope_dim)], 1)
    latent = latent_norm(x @ attn.c_kv_a.weight[: attn.kv_rank].T, attn.kv_a_norm)
    shared = x @ attn.c_kv_a.weight[attn.kv_rank :].T
    content = attn.c_kv_b.weight[: attn.n_head * attn.nope_dim].split(attn.nope_dim)
    return q, torch.stack([torch.cat([latent @ w.T, shared], -1) for w in content], 1)
