"""A GPT as Hugging Face's GPT-2, Llama, Qwen3 or DeepSeek-V3: their config.json and their names of the weights.

Settings that no architecture has, such as an Lp QK norm, are refused.
"""

import math
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from core.schema import flatten, require, show
from model.gpt import GPT
from model.options import GPTConfig

Config = dict[str, Any]
State = dict[str, Tensor]

LLAMA = {"model.norm": ("rmsnorm",), "model.mlp": ("swiglu",), "model.position": ("rope",)}
ARCHITECTURES: dict[str, dict[str, tuple[Any, ...]]] = {  # setting -> the values that it supports
    "GPT2": {
        "attention.name": ("mha",), "qk_norm.name": ("none",), "model.norm": ("layernorm",),
        "model.mlp": ("gelu", "gelu_tanh"),        "model.position": ("learned",),
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
    reasons = misfits(config, closest)
    require(
        not reasons,
        f"no Hugging Face architecture fits this run; the closest, {closest}, does not have {', '.join(reasons)}",
    )
    return closest


def misfits(config: GPTConfig, architecture: str) -> list[str]:
    """The settings of the run that an architecture does not support."""
    settings = flatten(asdict(config))
    found = [
        f"{key.removesuffix('.name')}={show(settings[key])} (only {' or '.join(map(show, values))})"
        for key, values in {**ARCHITECTURES[architecture], **SLOTS}.items()
        if settings[key] not in values
    ]
    m, head_dim = config.model, settings.get("attention.head_dim")
    if architecture in ("GPT2", "Llama") and m.n_embd % m.n_head:
        found.append(f"model.n_embd={m.n_embd} (only multiples of model.n_head={m.n_head})")
    elif architecture == "GPT2" and head_dim not in (None, m.n_embd // m.n_head):
        found.append(f"attention.head_dim={head_dim} (only model.n_embd / model.n_head)")
    return found


# -----------------------------------------------------------------------------
# config.json, and the weights under Hugging Face's names


def hugging_face(model: GPT) -> tuple[Config, State]:
    """Raises: ConfigError where no architecture fits."""
    architecture = architecture_of(model.config)
    config, state = gpt2(model) if architecture == "GPT2" else llama(model, architecture)
    m = model.config.model
    config |= {
        "architectures": [f"{architecture}{'LMHeadModel' if architecture == 'GPT2' else 'ForCausalLM'}"],
        "model_type": {"DeepseekV3": "deepseek_v3"}.get(architecture, architecture.lower()),
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": m.tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": str(model.transformer.wte.weight.dtype).removeprefix("torch."),
    }
    return config, state


def gpt2(model: GPT) -> tuple[Config, State]:
    m = model.config.model
    config = {
        "n_embd": m.n_embd, "n_layer": m.n_layer, "n_head": m.n_head, "n_positions": m.block_size,
        "n_inner": m.mlp_hidden, "layer_norm_epsilon": m.norm_eps,
        "activation_function": {"gelu_tanh": "gelu_new"}.get(m.mlp, m.mlp),
        "resid_pdrop": m.dropout, "embd_pdrop": m.dropout, "attn_pdrop": m.dropout,
    }  # fmt: skip
    state = {}
    for name, w in model.state_dict(keep_vars=True).items():
        linear = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
        state[name] = w.T if linear else w  # Conv1D keeps (in, out)
        if not m.bias and name.startswith(("transformer.h.", "transformer.ln_f.")):
            state[name.removesuffix("weight") + "bias"] = w.new_zeros(w.size(0))
    return config, state


def llama(model: Any, architecture: str) -> tuple[Config, State]:
    """Llama, Qwen3 and DeepSeek-V3."""
    m = model.config.model
    config: Config = {
        "hidden_size": m.n_embd, "intermediate_size": m.mlp_hidden or 4 * m.n_embd, "num_hidden_layers": m.n_layer,
        "num_attention_heads": m.n_head, "max_position_embeddings": m.block_size, "rms_norm_eps": m.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": m.rope_theta}, "hidden_act": "silu",
        "rope_theta": m.rope_theta,  # for transformers 4
        "attention_bias": m.bias,
    }  # fmt: skip
    attention = model.attentions[0]
    if architecture == "DeepseekV3":
        config |= {
            "num_key_value_heads": m.n_head, "q_lora_rank": model.config.attention.q_rank,
            "kv_lora_rank": attention.kv_rank, "qk_nope_head_dim": attention.nope_dim,
            "qk_rope_head_dim": attention.rope_dim, "v_head_dim": attention.v_dim, "rope_interleave": False,
            "first_k_dense_replace": m.n_layer, "num_nextn_predict_layers": 0,  # no experts, no prediction of more
        }  # fmt: skip
    else:
        config |= {"head_dim": attention.head_dim, "num_key_value_heads": attention.n_kv_head}
        config |= {"mlp_bias": m.bias} if architecture == "Llama" else {}
    outer = model.transformer
    state = {"model.embed_tokens.weight": outer.wte.weight, "model.norm.weight": outer.ln_f.weight}
    if model.lm_head is not None:
        state["lm_head.weight"] = model.lm_head.weight
    for i, block in enumerate(outer.h):
        layer = {"input_layernorm.weight": block.ln_1.weight, "post_attention_layernorm.weight": block.ln_2.weight}
        attn = mla(block.attn, m.norm_eps) if architecture == "DeepseekV3" else gqa(block.attn, m.norm_eps)
        layer |= {f"self_attn.{key}": w for key, w in attn.items()}
        for kind, w in block.mlp.c_fc.named_parameters():
            layer |= dict(zip([f"mlp.gate_proj.{kind}", f"mlp.up_proj.{kind}"], w.chunk(2), strict=True))
        layer |= {f"mlp.down_proj.{kind}": w for kind, w in block.mlp.c_proj.named_parameters()}
        state |= {f"model.layers.{i}.{key}": w for key, w in layer.items()}
    return config, state


# Hugging Face's models have one eps where ours have several. Normalising c x with eps is normalising x with eps / c^2,
# so the rows of the projection that computes x are scaled by c = sqrt(their eps / our eps).


def gqa(attn: Any, norm_eps: float) -> State:
    state = {f"o_proj.{kind}": w for kind, w in attn.c_proj.named_parameters()}
    c = 1.0
    if attn.q_norm.gain is not None:  # ours uses qk_norm.eps, Qwen3 uses rms_norm_eps
        c = math.sqrt(norm_eps / attn.q_norm.eps)
        state |= {"q_norm.weight": attn.q_norm.gain, "k_norm.weight": attn.k_norm.gain}
    for kind, w in attn.c_attn.named_parameters():
        q, k, v = w.split(attn.c_attn.split_sizes)
        state |= {f"q_proj.{kind}": q * c, f"k_proj.{kind}": k * c, f"v_proj.{kind}": v}
    return state


def mla(attn: Any, norm_eps: float) -> State:
    c = math.sqrt(LATENT_EPS / norm_eps)
    latent, k_rope = attn.c_kv_a.weight.split(attn.c_kv_a.split_sizes)
    keys, values = attn.up_projections()  # (nh, dn, kr), (nh, dv, kr)
    state = {
        "kv_a_proj_with_mqa.weight": torch.cat([latent * c, k_rope]), "kv_a_layernorm.weight": attn.kv_a_norm.weight,
        "kv_b_proj.weight": torch.cat([keys, values], 1).flatten(0, 1), "o_proj.weight": attn.c_proj.weight,
    }  # fmt: skip
    if not isinstance(attn.c_q_a, torch.nn.Linear):
        return {**state, "q_proj.weight": attn.c_q.weight}
    q_a = {"q_a_proj.weight": attn.c_q_a.weight * c, "q_a_layernorm.weight": attn.q_a_norm.weight}
    return {**state, **q_a, "q_b_proj.weight": attn.c_q.weight}


# -----------------------------------------------------------------------------
# The other way: settings and weights of ours

GPT2_DEFAULTS: Config = {  # of transformers' GPT2Config, for keys that a config.json leaves out
    "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None, "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new", "resid_pdrop": 0.1, "tie_word_embeddings": True, "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False,
}  # fmt: skip
ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
CONV1D = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # kept as (in, out)


def from_hugging_face(config: Config, theirs: State) -> tuple[dict[str, Any], State]:
    """The settings of the model's groups, and the weights under our names, of a folder's config.json and weights: GPT-2
    as the Hub has it, and what hugging_face() gives. Raises: ConfigError, KeyError for what is missing."""
    readers = {"gpt2": from_gpt2, "llama": from_llama, "qwen3": from_llama, "deepseek_v3": from_llama}
    kind = config.get("model_type")
    require(kind in readers, f"model_type={show(kind)} must be one of {', '.join(readers)}")
    return readers[str(kind)](config, theirs)


def supported(config: Config, **values: Any) -> None:
    """Raise ConfigError where a key of config.json has another value than the one that our model computes."""
    for key, value in values.items():
        require(config.get(key, value) == value, f"config.json: {key}={show(config.get(key))} must be {show(value)}")


def from_gpt2(config: Config, theirs: State) -> tuple[dict[str, Any], State]:
    c = {**GPT2_DEFAULTS, **config}
    supported(c, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    activation, known = c["activation_function"], " or ".join(ACTIVATIONS)
    require(activation in ACTIVATIONS, f"config.json: activation_function={show(activation)} must be {known}")
    state = {}
    for name, w in theirs.items():
        name = name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"
        if not name.endswith((".attn.bias", ".attn.masked_bias")):  # masks
            state[name] = w.T if name.endswith(CONV1D) else w
    biases = [name for name in state if name.endswith(".bias")]
    bias = any(bool(state[name].any()) for name in biases)  # an exported model without biases has zeros
    state = {name: w for name, w in state.items() if bias or name not in biases}
    if c["tie_word_embeddings"]:
        state.pop("lm_head.weight", None)
    model = {
        "n_layer": c["n_layer"], "n_head": c["n_head"], "n_embd": c["n_embd"], "block_size": c["n_positions"],
        "dropout": c["resid_pdrop"], "bias": bias, "norm_eps": c["layer_norm_epsilon"], "mlp": ACTIVATIONS[activation],
        "mlp_hidden": c["n_inner"], "tied": c["tie_word_embeddings"],
    }  # fmt: skip
    return {"model": model}, state


def from_llama(config: Config, theirs: State) -> tuple[dict[str, Any], State]:
    """Llama, Qwen3 and DeepSeek-V3, whose latent norms and QK norms then have the eps of the other norms."""
    kind, bias = config["model_type"], config["attention_bias"]
    supported(config, hidden_act="silu", mlp_bias=bias, rope_scaling=None)
    rope = config.get("rope_parameters") or {"rope_theta": config["rope_theta"]}
    supported(rope, rope_type="default")
    model = {
        "n_layer": config["num_hidden_layers"], "n_head": config["num_attention_heads"],
        "n_embd": config["hidden_size"], "block_size": config["max_position_embeddings"], "dropout": 0.0, "bias": bias,
        "norm": "rmsnorm", "norm_eps": config["rms_norm_eps"], "mlp": "swiglu",
        "mlp_hidden": config["intermediate_size"], "position": "rope", "rope_theta": float(rope["rope_theta"]),
        "tied": config["tie_word_embeddings"],
    }  # fmt: skip
    settings: dict[str, Any] = {"model": model}
    if kind == "deepseek_v3":
        supported(config, first_k_dense_replace=model["n_layer"], rope_interleave=False)
        names = {"kv_rank": "kv_lora_rank", "q_rank": "q_lora_rank", "nope_dim": "qk_nope_head_dim",
                 "rope_dim": "qk_rope_head_dim", "v_dim": "v_head_dim"}  # fmt: skip
        settings["attention"] = {"name": "mla", **{ours: config[key] for ours, key in names.items()}}
    else:
        heads, kv_heads = model["n_head"], config["num_key_value_heads"]
        shared = {"name": "gqa", "n_kv_head": kv_heads} if kv_heads < heads else {"name": "mha"}
        settings["attention"] = {**shared, "head_dim": config["head_dim"]}
    if kind == "qwen3":
        settings["qk_norm"] = {"name": "rms", "eps": model["norm_eps"]}
    state = {"transformer.wte.weight": theirs["model.embed_tokens.weight"]}
    state["transformer.ln_f.weight"] = theirs["model.norm.weight"]
    if not model["tied"]:
        state["lm_head.weight"] = theirs["lm_head.weight"]
    for i in range(model["n_layer"]):
        prefix = f"model.layers.{i}."
        layer = {key.removeprefix(prefix): w for key, w in theirs.items() if key.startswith(prefix)}
        attn = {key.removeprefix("self_attn."): w for key, w in layer.items() if key.startswith("self_attn.")}
        block = from_mla(attn, settings) if kind == "deepseek_v3" else from_gqa(attn)
        block = {f"attn.{key}": w for key, w in block.items()}
        for ours, norm in (("ln_1", "input_layernorm"), ("ln_2", "post_attention_layernorm")):
            block[f"{ours}.weight"] = layer[f"{norm}.weight"]
        for of in ("weight", "bias") if bias else ("weight",):
            block[f"mlp.c_fc.{of}"] = torch.cat([layer[f"mlp.gate_proj.{of}"], layer[f"mlp.up_proj.{of}"]])
            block[f"mlp.c_proj.{of}"] = layer[f"mlp.down_proj.{of}"]
        state |= {f"transformer.h.{i}.{key}": w for key, w in block.items()}
    return settings, state


def from_gqa(attn: State) -> State:
    kinds = {key.rpartition(".")[2] for key in attn if key.startswith("o_proj.")}  # weight, bias
    state = {f"c_proj.{of}": attn[f"o_proj.{of}"] for of in kinds}
    state |= {f"c_attn.{of}": torch.cat([attn[f"{x}_proj.{of}"] for x in "qkv"]) for of in kinds}
    return state | {f"{x}_norm.gain": attn[f"{x}_norm.weight"] for x in "qk" if f"{x}_norm.weight" in attn}


def from_mla(attn: State, settings: dict[str, Any]) -> State:
    a = settings["attention"]
    c = math.sqrt(LATENT_EPS / settings["model"]["norm_eps"])
    latent, k_rope = attn["kv_a_proj_with_mqa.weight"].split([a["kv_rank"], a["rope_dim"]])
    up = attn["kv_b_proj.weight"].unflatten(0, (-1, a["nope_dim"] + a["v_dim"]))  # a head's keys, then its values
    state = {
        "c_kv_a.weight": torch.cat([latent / c, k_rope]), "kv_a_norm.weight": attn["kv_a_layernorm.weight"],
        "c_kv_b.weight": torch.cat([part.flatten(0, 1) for part in up.split([a["nope_dim"], a["v_dim"]], 1)]),
        "c_proj.weight": attn["o_proj.weight"],
    }  # fmt: skip
    if a["q_rank"] is None:
        return {**state, "c_q.weight": attn["q_proj.weight"]}
    q_a = {"c_q_a.weight": attn["q_a_proj.weight"] / c, "q_a_norm.weight": attn["q_a_layernorm.weight"]}
    return {**state, **q_a, "c_q.weight": attn["q_b_proj.weight"]}
