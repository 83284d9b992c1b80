"""A GPT as Hugging Face's GPT-2, Llama, Qwen3 or DeepSeek-V3, and back: config.json, and their names of the weights.

Settings that no architecture has, such as an Lp QK norm, are refused.
"""

import math
import re
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from core.schema import differences, flatten, require, settings_of, show
from model.gpt import GPT
from model.options import GPTConfig

Config = dict[str, Any]
State = dict[str, Tensor]

LLAMA = {"model.norm": ("rmsnorm",), "model.mlp": ("swiglu",), "model.position": ("rope",)}
ARCHITECTURES: dict[str, dict[str, tuple[Any, ...]]] = {  # setting -> the values that it supports
    "GPT2": {
        "attention.name": ("mha",), "qk_norm.name": ("none",), "model.norm": ("layernorm",),
        "model.mlp": ("gelu", "gelu_tanh"), "model.position": ("learned",),
    },
    "DeepseekV3": {"attention.name": ("mla",), "qk_norm.name": ("none",), **LLAMA},
    "Qwen3": {"attention.name": ("mha", "gqa"), "qk_norm.name": ("rms",), **LLAMA, "model.bias": (False,)},
    "Llama": {"attention.name": ("mha", "gqa"), "qk_norm.name": ("none",), **LLAMA},
}  # fmt: skip
SLOTS = {"logits.name": ("none",), "softmax.name": ("plain",), "output.name": ("none",), "weights.name": ("none",)}
LATENT_EPS = 1e-6  # of DeepSeek-V3's two latent norms; they ignore rms_norm_eps


def architecture_of(config: GPTConfig) -> str:
    """The architecture that computes the same as the run's model. Raises: ConfigError naming what does not fit."""
    if config.attention.name == "mla":
        closest = "DeepseekV3"
    elif config.model.norm == "layernorm":
        closest = "GPT2"
    else:
        closest = "Llama" if config.qk_norm.name == "none" else "Qwen3"
    wrong, settings = misfits(config, closest), flatten(asdict(config))
    reasons = ", ".join(
        f"{key}={show(settings.get(key, settings.get(f'{key}.name')))} (only {only})"
        for key, (only, _) in wrong.items()
    )
    better = {key: value for key, (_, value) in wrong.items()}
    if "model.position" in better:
        better["model.rope_theta"] = 1e4 if better["model.position"] == "rope" else None
    if "qk_norm" in better and "attention.qk_norm_layout" in settings:
        better["attention.qk_norm_layout"] = "blockwise"  # unified needs a QK norm
    nearest = " ".join(f"{key}={show(value)}" for key, value in {"model": config.model.name, **better}.items())
    keeps = ", or with a QK norm model=gqa_nano qk_norm=rms" if better.get("qk_norm") == "none" else ""
    told = f"no Hugging Face architecture fits this run; the closest, {closest}, does not have {reasons}"
    require(not wrong, f"{told}; the nearest settings that can be exported: {nearest}{keeps}")
    return closest


def misfits(config: GPTConfig, architecture: str) -> dict[str, tuple[str, Any]]:
    """The settings of the run that an architecture does not support -> what it supports, and one such value."""
    settings = flatten(asdict(config))
    found: dict[str, tuple[str, Any]] = {
        key.removesuffix(".name"): (" or ".join(map(show, values)), values[0])
        for key, values in {**ARCHITECTURES[architecture], **SLOTS}.items()
        if settings[key] not in values
    }
    m, head_dim = config.model, settings.get("attention.head_dim")
    if architecture in ("GPT2", "Llama") and m.n_embd % m.n_head:
        found["model.n_embd"] = f"multiples of model.n_head={m.n_head}", m.n_embd + -m.n_embd % m.n_head
    if architecture == "GPT2" and head_dim not in (None, m.n_embd / m.n_head):
        found["attention.head_dim"] = "model.n_embd / model.n_head", None
    return found


# -----------------------------------------------------------------------------
# Settings: ours -> those of config.json

MODEL_TYPES = {"gpt2": "GPT2", "llama": "Llama", "qwen3": "Qwen3", "deepseek_v3": "DeepseekV3"}
GPT2_KEYS = {
    "n_embd": "n_embd", "n_layer": "n_layer", "n_head": "n_head", "block_size": "n_positions", "mlp_hidden": "n_inner",
    "norm_eps": "layer_norm_epsilon", "dropout": "resid_pdrop", "tied": "tie_word_embeddings",
}  # fmt: skip
LLAMA_KEYS = {
    "n_embd": "hidden_size", "mlp_hidden": "intermediate_size", "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads", "block_size": "max_position_embeddings", "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta", "bias": "attention_bias", "tied": "tie_word_embeddings",
}  # fmt: skip
MLA_KEYS = {
    "q_rank": "q_lora_rank", "kv_rank": "kv_lora_rank", "nope_dim": "qk_nope_head_dim", "rope_dim": "qk_rope_head_dim",
    "v_dim": "v_head_dim",
}  # fmt: skip
GQA_KEYS = {"head_dim": "head_dim", "n_kv_head": "num_key_value_heads"}
# transformers' values for keys that a GPT-2's config.json leaves out; of the last three it must have these
GPT2_DEFAULTS: Config = {
    "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "n_inner": None, "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new", "resid_pdrop": 0.1, "tie_word_embeddings": True, "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False,
}  # fmt: skip
ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
# keys that change no logits, or are there a second time
FREE = (
    "activation_function", "architectures", "bos_token_id", "eos_token_id", "dtype", "embd_pdrop", "attn_pdrop",
    "rope_theta",
)  # fmt: skip


def config_json(model: Any) -> Config:
    architecture, m = architecture_of(model.config), model.config.model
    gpt2 = architecture == "GPT2"
    config: Config = {theirs: getattr(m, ours) for ours, theirs in (GPT2_KEYS if gpt2 else LLAMA_KEYS).items()}
    if gpt2:
        activation = next(theirs for theirs, ours in ACTIVATIONS.items() if ours == m.mlp)
        config |= {"activation_function": activation, "embd_pdrop": m.dropout, "attn_pdrop": m.dropout}
    else:
        config |= {
            "intermediate_size": m.mlp_hidden or 4 * m.n_embd, "hidden_act": "silu",
            "rope_parameters": {"rope_type": "default", "rope_theta": m.rope_theta},  # transformers 4: rope_theta
        }  # fmt: skip
    if architecture == "DeepseekV3":
        config |= {theirs: getattr(model.config.attention, ours) for ours, theirs in MLA_KEYS.items()}
        config |= {
            "num_key_value_heads": m.n_head, "rope_interleave": False,
            "first_k_dense_replace": m.n_layer, "num_nextn_predict_layers": 0,  # no experts, no prediction of more
        }  # fmt: skip
    elif not gpt2:
        config |= {theirs: getattr(model.attentions[0], ours) for ours, theirs in GQA_KEYS.items()}
        config |= {"mlp_bias": m.bias} if architecture == "Llama" else {}
    return config | {
        "architectures": [f"{architecture}{'LMHeadModel' if gpt2 else 'ForCausalLM'}"],
        "model_type": next(name for name, one in MODEL_TYPES.items() if one == architecture),
        "vocab_size": model.vocab_size, "bos_token_id": None, "eos_token_id": None,
        "dtype": str(model.transformer.wte.weight.dtype).removeprefix("torch."),
    }  # fmt: skip


def settings_from(config: Config, weights: State) -> GPTConfig:
    """The settings of the model in a folder: GPT-2 as the Hub has it (the names by gpt2_names()), or what
    config_json() gives. Raises: ConfigError for a model that is not ours, KeyError for a missing key."""
    kind = config.get("model_type")
    require(kind in MODEL_TYPES, f"model_type={show(kind)} must be one of {', '.join(MODEL_TYPES)}")
    gpt2 = kind == "gpt2"
    config = {**GPT2_DEFAULTS, **config} if gpt2 else config
    model = {ours: config[theirs] for ours, theirs in (GPT2_KEYS if gpt2 else LLAMA_KEYS).items()}
    settings: dict[str, Any] = {"model": model}
    if gpt2:
        activation = config["activation_function"]
        require(activation in ACTIVATIONS, f"activation_function={activation} must be {' or '.join(ACTIVATIONS)}")
        # an exported model without biases has zeros
        bias = any(bool(w.any()) for name, w in weights.items() if name.endswith(".bias"))
        model |= {"mlp": ACTIVATIONS[activation], "bias": bias}
    else:
        model |= {"norm": "rmsnorm", "mlp": "swiglu", "position": "rope", "dropout": 0.0}
        mla, keys = kind == "deepseek_v3", MLA_KEYS if kind == "deepseek_v3" else GQA_KEYS
        settings["attention"] = {"name": "mla" if mla else "gqa"} | {
            ours: config[theirs] for ours, theirs in keys.items()
        }
        if not mla and config["num_key_value_heads"] == config["num_attention_heads"]:
            settings["attention"] = {"name": "mha", "head_dim": config["head_dim"]}
    if kind == "qwen3":
        settings["qk_norm"] = {"name": "rms", "eps": model["norm_eps"]}  # theirs has one eps
    found: GPTConfig = settings_of(GPTConfig, settings)
    with torch.device("meta"):
        same = GPT(found, config["vocab_size"])
    expected = (GPT2_DEFAULTS if gpt2 else {}) | config_json(same)
    wrong = differences(*({key: one.get(key) for key in expected if key not in FREE} for one in (config, expected)))
    theirs, ours = (
        {name: [*w.shape] for name, w in one.items()} for one in (weights, renamed(same, same.state_dict()))
    )
    wrong = wrong or differences(theirs, ours)[:3]
    require(not wrong, f"is not such a model of ours (its value -> ours): {', '.join(wrong)}")
    return found


# -----------------------------------------------------------------------------
# Weights: ours -> theirs

CONV1D = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # GPT-2 keeps them as (in, out)
OUTER = {
    "transformer.wte.weight": "model.embed_tokens.weight", "transformer.ln_f.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}  # fmt: skip
LAYER = {  # several: ours has their rows, one after the other
    "ln_1": ["input_layernorm"], "ln_2": ["post_attention_layernorm"],
    "mlp.c_fc": ["mlp.gate_proj", "mlp.up_proj"], "mlp.c_proj": ["mlp.down_proj"],
    "attn.c_attn": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], "attn.c_proj": ["self_attn.o_proj"],
    "attn.q_norm": ["self_attn.q_norm"], "attn.k_norm": ["self_attn.k_norm"],
    "attn.c_kv_a": ["self_attn.kv_a_proj_with_mqa"], "attn.kv_a_norm": ["self_attn.kv_a_layernorm"],
    "attn.c_kv_b": ["self_attn.kv_b_proj"], "attn.c_q": ["self_attn.q_proj"],
    "attn.c_q_a": ["self_attn.q_a_proj"], "attn.q_a_norm": ["self_attn.q_a_layernorm"],
}  # fmt: skip


def renamed(model: Any, state: State, back: bool = False) -> State:
    """Weights of ours under Hugging Face's names; back: theirs under ours. model: its settings and shapes decide."""
    ours, found = model.state_dict(), {}
    if architecture_of(model.config) == "GPT2":
        for name in ours:
            found[name] = state[name].T if name.endswith(CONV1D) else state[name]
            if not back and not model.config.model.bias and name.startswith(("transformer.h.", "transformer.ln_f.")):
                found[name.removesuffix("weight") + "bias"] = state[name].new_zeros(state[name].size(0))
        return found
    for name in ours:
        match = re.fullmatch(r"transformer\.h\.(\d+)\.(.+)\.(\w+)", name)
        part, kind = (match[2], match[3].replace("gain", "weight")) if match else ("", "")
        theirs = [f"model.layers.{match[1]}.{one}.{kind}" for one in LAYER[part]] if match else [OUTER[name]]
        if part == "attn.c_q" and model.config.attention.q_rank is not None:
            theirs = [theirs[0].replace("q_proj", "q_b_proj")]
        w = torch.cat([state[one] for one in theirs]) if back else state[name]
        order = by_head(model.config) if part == "attn.c_kv_b" else torch.arange(len(w), device=w.device)
        sizes = getattr(model.get_submodule(name.rpartition(".")[0]), "split_sizes", [len(w)])
        factors = factors_of(model.config, part, len(sizes))
        order = order.to(w.device)
        if back:
            pieces = w[order.argsort()].split(sizes)
            found[name] = torch.cat([piece / c for piece, c in zip(pieces, factors, strict=True)])
        else:
            pieces = torch.cat([piece * c for piece, c in zip(w.split(sizes), factors, strict=True)])[order]
            found |= zip(theirs, pieces.split(sizes if len(theirs) > 1 else [len(w)]), strict=True)
    return found


def factors_of(config: Any, part: str, n: int) -> list[float]:
    """What each of the n pieces of a projection is multiplied by: Hugging Face's models have one eps where ours have
    several. Normalising c x with eps is normalising x with eps / c^2, so c = sqrt(their eps / our eps)."""
    eps = config.model.norm_eps
    if part == "attn.c_attn" and config.qk_norm.name == "rms":  # queries and keys: theirs is rms_norm_eps
        return [math.sqrt(eps / config.qk_norm.eps)] * 2 + [1.0]
    if part in ("attn.c_kv_a", "attn.c_q_a"):  # the latent
        return [math.sqrt(LATENT_EPS / eps), 1.0][:n]
    return [1.0] * n


def by_head(config: Any) -> Tensor:
    """The rows of MLA's c_kv_b as theirs has them: a head's keys, then its values; ours has all heads' keys first."""
    heads, a = config.model.n_head, config.attention
    keys, values = (torch.arange(heads * n, device="cpu").view(heads, n) for n in (a.nope_dim, a.v_dim))
    return torch.cat([keys, keys.numel() + values], 1).flatten()


def gpt2_names(weights: State, tied: bool) -> State:
    """The weights of GPT-2 as nanoGPT and the Hub have them, under one set of names, without copies and masks. Raises:
    ConfigError where two of them have one name, with other numbers."""
    found: State = {}
    for name, w in weights.items():
        name = re.sub(r"^(module\.|_orig_mod\.)+", "", name)
        name = name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"
        if not name.endswith((".attn.bias", ".attn.masked_bias")) and not (tied and name.endswith("lm_head.weight")):
            one = name not in found or torch.equal(found[name], w)
            require(one, f"its weights have {name} several times, by names that differ in a prefix, with other numbers")
            found[name] = w
    return found
