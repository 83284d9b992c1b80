"""The model against Hugging Face's own GPT-2, Qwen3 and DeepSeek-V3 with the same random weights.

Theirs run their eager attention, which shares no kernel with ours. Nothing is downloaded.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.hugging_face import TOLERANCE, difference, dtype, take_tables
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.qwen3 import modeling_qwen3

from model.generate import generate
from model.gpt import GPT, MultiHeadLatentAttention, rope_table, rotate
from model.options import GQAOptions, MHAOptions, MLAOptions, ModelOptions, RMSNormOptions
from training.config import TrainConfig

__all__ = ["dtype"]  # a fixture

V, T = 61, 24
SHAPE: dict[str, Any] = {"n_layer": 3, "n_head": 4, "n_embd": 40, "block_size": 32, "dropout": 0.0, "mlp_hidden": 56}
LLAMA: dict[str, Any] = {**SHAPE, "norm": "rmsnorm", "mlp": "swiglu", "position": "rope", "rope_theta": 500.0}
HF: dict[str, Any] = {"vocab_size": V, "bos_token_id": None, "eos_token_id": None, "attn_implementation": "eager"}
HF_LLAMA: dict[str, Any] = {
    **HF,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Weights that keep activations near 1, and gains and biases away from 1 and 0."""
    g = torch.Generator().manual_seed(0)
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=g)
        if p.dim() == 1:
            p.copy_(0.3 * noise if name.endswith("bias") else 1 + 0.3 * noise)
        else:
            p.copy_(noise * 40**-0.5)


# -----------------------------------------------------------------------------
# Theirs into ours. Every parameter of ours is named once; load_state_dict refuses anything left out or left over.

State = dict[str, Tensor]
Pair = tuple[Any, TrainConfig, Callable[[Any], State]]  # theirs, our settings, the copy


def gpt2(hf: Any) -> State:
    """Conv1D keeps its weight as (in, out)."""
    conv1d = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    state = {k: v.T if k.endswith(conv1d) else v for k, v in hf.state_dict().items()}
    del state["lm_head.weight"]  # tied
    return state


def llama(hf: Any, attention: Callable[[State], State]) -> State:
    """What Qwen3 and DeepSeek-V3 share; `attention` maps one layer's self_attn."""
    theirs = hf.state_dict()
    ours = {"transformer.wte.weight": theirs["model.embed_tokens.weight"]}
    ours["transformer.ln_f.weight"] = theirs["model.norm.weight"]
    if not hf.config.tie_word_embeddings:
        ours["lm_head.weight"] = theirs["lm_head.weight"]
    for i in range(hf.config.num_hidden_layers):
        prefix = f"model.layers.{i}."
        layer = {k.removeprefix(prefix): v for k, v in theirs.items() if k.startswith(prefix)}
        self_attn = {k.removeprefix("self_attn."): v for k, v in layer.items() if k.startswith("self_attn.")}
        block = {
            "ln_1.weight": layer["input_layernorm.weight"],
            "ln_2.weight": layer["post_attention_layernorm.weight"],
            "mlp.c_fc.weight": torch.cat([layer["mlp.gate_proj.weight"], layer["mlp.up_proj.weight"]]),
            "mlp.c_proj.weight": layer["mlp.down_proj.weight"],
            **{f"attn.{k}": v for k, v in attention(self_attn).items()},
        }
        ours |= {f"transformer.h.{i}.{k}": v for k, v in block.items()}
    return ours


def qwen3(hf: Any) -> State:
    def attention(w: State) -> State:
        return {
            "c_attn.weight": torch.cat([w["q_proj.weight"], w["k_proj.weight"], w["v_proj.weight"]]),
            "c_proj.weight": w["o_proj.weight"],
            "q_norm.gain": w["q_norm.weight"],
            "k_norm.gain": w["k_norm.weight"],
        }

    return llama(hf, attention)


def deepseek_v3(hf: Any) -> State:
    c = hf.config
    nh, dn, dr, dv = c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim

    def rope_rows(w: Tensor) -> Tensor:
        """(..., dr, in): interleaved pairs (2i, 2i+1) become (i, i + dr/2)."""
        return torch.cat([w[..., ::2, :], w[..., 1::2, :]], -2) if c.rope_interleave else w

    def attention(w: State) -> State:
        q = w["q_proj.weight" if c.q_lora_rank is None else "q_b_proj.weight"].unflatten(0, (nh, dn + dr))
        kv_a = w["kv_a_proj_with_mqa.weight"]
        kv_b = w["kv_b_proj.weight"].unflatten(0, (nh, dn + dv))  # a head's keys, then its values
        ours = {
            "c_q.weight": torch.cat([q[:, :dn], rope_rows(q[:, dn:])], 1).flatten(0, 1),
            "c_kv_a.weight": torch.cat([kv_a[:-dr], rope_rows(kv_a[-dr:])]),
            "kv_a_norm.weight": w["kv_a_layernorm.weight"],
            "c_kv_b.weight": torch.cat([kv_b[:, :dn].flatten(0, 1), kv_b[:, dn:].flatten(0, 1)]),
            "c_proj.weight": w["o_proj.weight"],
        }
        if c.q_lora_rank is not None:
            ours |= {"c_q_a.weight": w["q_a_proj.weight"], "q_a_norm.weight": w["q_a_layernorm.weight"]}
        return ours

    return llama(hf, attention)


# -----------------------------------------------------------------------------
# The pairs


def gpt2_pair() -> Pair:
    # GPT-2's own activation, gelu_new, is the tanh approximation; ours is exact
    config = GPT2Config(
        **HF, n_embd=40, n_layer=3, n_head=4, n_positions=32, n_inner=56, activation_function="gelu",
        layer_norm_epsilon=1e-4,
    )  # fmt: skip
    ours = TrainConfig(model=ModelOptions(**SHAPE, bias=True, norm_eps=1e-4))
    return GPT2LMHeadModel(config), ours, gpt2


def qwen3_pair(n_kv_head: int, tied: bool) -> Pair:
    config = Qwen3Config(
        **HF_LLAMA, head_dim=12, num_key_value_heads=n_kv_head, rms_norm_eps=1e-3, tie_word_embeddings=tied
    )
    attention = MHAOptions(head_dim=12) if n_kv_head == 4 else GQAOptions(head_dim=12, n_kv_head=n_kv_head)
    model = ModelOptions(**LLAMA, norm_eps=1e-3, tied=tied)
    ours = TrainConfig(model=model, attention=attention, qk_norm=RMSNormOptions(eps=1e-3))
    return Qwen3ForCausalLM(config), ours, qwen3


def deepseek_v3_pair(q_rank: int | None, interleave: bool, tied: bool = False) -> Pair:
    config = DeepseekV3Config(
        **HF_LLAMA, num_key_value_heads=4, first_k_dense_replace=3, num_mtp_layers=0, q_lora_rank=q_rank,
        kv_lora_rank=20, qk_nope_head_dim=10, qk_rope_head_dim=6, v_head_dim=14, rope_interleave=interleave,
        rms_norm_eps=1e-6, tie_word_embeddings=tied,
    )  # fmt: skip
    # theirs ignores rms_norm_eps in the two latents' norms, 1e-6 there; ours takes norm_eps everywhere
    model = ModelOptions(**LLAMA, norm_eps=1e-6, tied=tied)
    attention = MLAOptions(kv_rank=20, q_rank=q_rank, nope_dim=10, rope_dim=6, v_dim=14)
    return DeepseekV3ForCausalLM(config), TrainConfig(model=model, attention=attention), deepseek_v3


PAIRS: dict[str, Callable[[], Pair]] = {
    "gpt2": gpt2_pair,
    "qwen3": lambda: qwen3_pair(2, tied=True),
    "qwen3-mqa-untied": lambda: qwen3_pair(1, tied=False),
    "qwen3-mha": lambda: qwen3_pair(4, tied=True),
    "deepseek_v3": lambda: deepseek_v3_pair(16, interleave=True),
    "deepseek_v3-half": lambda: deepseek_v3_pair(16, interleave=False),
    "deepseek_v3-no-q-lora": lambda: deepseek_v3_pair(None, interleave=True),
    "deepseek_v3-no-q-lora-half-tied": lambda: deepseek_v3_pair(None, interleave=False, tied=True),
}


def both(name: str, dtype: torch.dtype) -> tuple[Any, GPT]:
    hf, config, state = PAIRS[name]()
    randomise(hf)
    ours = GPT(config.gpt, V)
    ours.load_state_dict(state(hf))
    hf, ours = hf.to(dtype).eval(), ours.to(dtype).eval()
    if dtype == torch.float64 and config.model.position == "rope":
        take_tables(ours, hf)
    return hf, ours


def tokens(batch: int = 2, n: int = T) -> Tensor:
    return torch.randint(V, (batch, n), generator=torch.Generator().manual_seed(1))


# -----------------------------------------------------------------------------
# The claims


@pytest.mark.parametrize("name", PAIRS)
@torch.no_grad()
def test_logits_are_hugging_faces(name: str, dtype: torch.dtype) -> None:
    hf, ours = both(name, dtype)
    theirs = hf(tokens()).logits
    assert theirs.dtype == dtype and theirs.std() > 0.5
    assert difference(ours(tokens())[0], theirs) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", PAIRS)
@torch.no_grad()
def test_cached_decoding_gives_hugging_faces_full_logits(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf, ours = both(name, dtype)
    idx, caches = tokens(), ours.new_caches(2, T, dtype)
    steps = [slice(0, 9), *(slice(t, t + 1) for t in range(9, 18)), slice(18, T)]  # prefill, tokens, a block of tokens
    logits = [ours(idx[:, steps[0]], caches=caches)[0]]
    monkeypatch.delattr(MultiHeadLatentAttention, "explicit")  # from here on MLA has the absorbed path alone
    logits += [ours(idx[:, s], caches=caches, pos=s.start)[0] for s in steps[1:]]
    assert difference(torch.cat(logits, 1), hf(idx).logits) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "deepseek_v3"])
def test_greedy_continuations_are_hugging_faces(name: str) -> None:
    hf, ours = both(name, torch.float32)
    prompt = tokens(n=5)
    theirs = hf.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False)
    assert torch.equal(torch.stack(list(generate(ours, prompt, 12, temperature=0)), 1), theirs[:, 5:])
    assert theirs[:, 5:].unique().numel() >= 3  # it says more than one thing


@pytest.mark.parametrize("module", [modeling_qwen3, modeling_deepseek_v3], ids=["qwen3", "deepseek_v3"])
def test_rotation_is_hugging_faces_rotate_half(module: Any) -> None:
    g = torch.Generator().manual_seed(2)
    q, k = (torch.randn(2, 3, 7, 10, generator=g, dtype=torch.float64) for _ in range(2))
    cos, sin = (table.double() for table in rope_table(20, 10, 123.0))  # (20, 5)
    doubled = [torch.cat([table, table], -1)[None, 4:11] for table in (cos, sin)]
    for mine, theirs in zip((q, k), module.apply_rotary_pos_emb(q, k, *doubled), strict=True):
        torch.testing.assert_close(rotate(mine, (cos, sin), pos=4), theirs, rtol=0, atol=1e-14)


def test_the_angles_are_hugging_faces_to_the_last_bits() -> None:
    config = Qwen3Config(head_dim=64, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    cos, sin = modeling_qwen3.Qwen3RotaryEmbedding(config)(torch.zeros(1), torch.arange(2048)[None])
    exact = torch.arange(2048.0).double()[:, None] / 10000 ** (torch.arange(0, 64, 2).double() / 64)
    for mine, theirs, true in zip(rope_table(2048, 64, 1e4), (cos, sin), (exact.cos(), exact.sin()), strict=True):
        assert (mine - true).abs().max() < 3e-4  # half a last bit of an angle of 2047 is 6e-5
        assert (mine - theirs[0, :, :32]).abs().max() < 3e-4
