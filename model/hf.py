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
        "attention.name": ("mha",), "qk_norm.name": ("none",), "model.norm": ("layernorm",), "model.mlp": ("gelu",),
        "model.position": ("learned",),
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
        "n_inner": m.mlp_hidden, "layer_norm_epsilon": m.norm_eps, "activation_function": "gelu",
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
# The other way


def load_hugging_face(model: GPT, theirs: State) -> list[str]:
    """Load a state with the names and shapes of hugging_face(model). Returns the names of what the model cannot hold:
    biases that it lacks and that are not zero.

    hugging_face() moves each weight x to another place, and scales it by some c. Its transpose, by autograd, moves
    entries back: y = c x becomes c^2 x, and c, the image of 1, becomes c^2. Their quotient is x.
    """
    parameters = [*model.parameters()]
    with torch.no_grad():
        for parameter in parameters:
            parameter.fill_(1)
    of_ones = hugging_face(model)[1]
    theirs = {name: theirs[name].to(w) for name, w in of_ones.items()}
    used = [name for name, w in of_ones.items() if w.requires_grad]
    outputs = [of_ones[name] for name in used]
    values, squares = (
        torch.autograd.grad(outputs, parameters, [y[name] for name in used], retain_graph=True)
        for y in (theirs, {name: w.detach() for name, w in of_ones.items()})
    )
    with torch.no_grad():
        for parameter, value, square in zip(parameters, values, squares, strict=True):
            parameter.copy_(value / square)
    return [name for name, w in of_ones.items() if not w.requires_grad and not torch.equal(w, theirs[name])]
