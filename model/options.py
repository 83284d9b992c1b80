"""The settings of a model, its attention and its QK norm. Free of torch."""

import math
import re
from dataclasses import dataclass

from core.schema import at_least, one_of, require, show


@dataclass(frozen=True)
class ModelOptions:
    name: str = "baby_gpt"
    n_layer: int = 6
    n_head: int = 6
    n_embd: int = 384
    block_size: int = 256
    dropout: float = 0.2
    bias: bool = False
    norm: str = "layernorm"
    norm_eps: float = 1e-5
    mlp: str = "gelu"
    mlp_hidden: int | None = None
    position: str = "learned"
    rope_theta: float | None = None
    tied: bool = True
    activation_checkpointing: bool = False

    def check(self) -> None:
        require(re.fullmatch(r"[\w.-]{1,64}", self.name) is not None, f"model.name={self.name} must be a plain word")
        for key in ("n_layer", "n_head", "n_embd", "block_size"):
            at_least(f"model.{key}", getattr(self, key), 1)
        require(0 <= self.dropout < 1, f"model.dropout={self.dropout} must be in [0, 1)")
        one_of("model.norm", self.norm, ("layernorm", "rmsnorm"))
        require(0 < self.norm_eps < math.inf, f"model.norm_eps={self.norm_eps} must be a finite number > 0")
        one_of("model.mlp", self.mlp, ("gelu", "swiglu"))
        if self.mlp_hidden is not None:
            at_least("model.mlp_hidden", self.mlp_hidden, 1)
        one_of("model.position", self.position, ("learned", "rope"))
        if self.position == "rope":
            require(
                self.rope_theta is not None and 1 < self.rope_theta < math.inf,
                f"model.rope_theta={show(self.rope_theta)} must be a finite number > 1 where model.position=rope",
            )
        else:
            require(self.rope_theta is None, f"model.rope_theta={self.rope_theta} needs model.position=rope")


@dataclass(frozen=True)
class MHAOptions:
    """n_head queries, keys and values a layer. head_dim: null is n_embd / n_head."""

    name: str = "mha"
    head_dim: int | None = None

    def check(self, model: ModelOptions) -> None:
        if self.head_dim is not None:
            at_least("attention.head_dim", self.head_dim, 1)
        else:
            require(
                model.n_embd % model.n_head == 0,
                f"model.n_embd={model.n_embd} must be divisible by model.n_head={model.n_head}",
            )
        d = self.head_dim or model.n_embd // model.n_head
        require(model.position != "rope" or d % 2 == 0, f"model.position=rope needs an even head_dim, not {d}")


@dataclass(frozen=True)
class GQAOptions(MHAOptions):
    """n_kv_head keys and values, each shared by n_head / n_kv_head queries; 1 is multi-query attention."""

    name: str = "gqa"
    n_kv_head: int = 1

    def check(self, model: ModelOptions) -> None:
        super().check(model)
        at_least("attention.n_kv_head", self.n_kv_head, 1)
        require(
            model.n_head % self.n_kv_head == 0,
            f"model.n_head={model.n_head} must be divisible by attention.n_kv_head={self.n_kv_head}",
        )


@dataclass(frozen=True)
class MLAOptions:
    """Multi-head latent attention (DeepSeek-V2, V3). q_rank: null projects queries directly."""

    name: str = "mla"
    kv_rank: int = 512
    q_rank: int | None = None
    nope_dim: int = 128
    rope_dim: int = 64
    v_dim: int = 128
    qk_norm_layout: str = "blockwise"

    def check(self, model: ModelOptions) -> None:
        for key in ("kv_rank", "nope_dim", "rope_dim", "v_dim"):
            at_least(f"attention.{key}", getattr(self, key), 1)
        if self.q_rank is not None:
            at_least("attention.q_rank", self.q_rank, 1)
        require(self.rope_dim % 2 == 0, f"attention.rope_dim={self.rope_dim} must be even")
        require(model.position == "rope", f"model.position={model.position}: attention=mla needs rope")
        require(not model.bias, "model.bias=true: attention=mla has no biases")
        one_of("attention.qk_norm_layout", self.qk_norm_layout, ("blockwise", "unified"))


@dataclass(frozen=True)
class NoNormOptions:
    name: str = "none"

    def check(self) -> None:
        pass


@dataclass(frozen=True)
class LpNormOptions:
    name: str = "lp"
    p: float | str = 2.0
    alpha_init: float | str = "sqrt_d"
    alpha_per: str = "layer"
    alpha_map: str = "exp"

    def check(self) -> None:
        require(
            self.p == "learned" or (isinstance(self.p, float) and self.p >= 1),
            f"qk_norm.p={self.p} must be a number >= 1, inf or learned",
        )
        if isinstance(self.alpha_init, str):
            one_of("qk_norm.alpha_init", self.alpha_init, ("henry", "sqrt_d", "matched"), "or a number > 0")
        else:
            require(
                1e-6 <= self.alpha_init <= 1e6,
                f"qk_norm.alpha_init={self.alpha_init} must be in [1e-6, 1e6], or henry, sqrt_d, matched",
            )
        one_of("qk_norm.alpha_per", self.alpha_per, ("layer", "head"))
        one_of("qk_norm.alpha_map", self.alpha_map, ("exp", "softplus", "linear"))


@dataclass(frozen=True)
class RMSNormOptions:
    name: str = "rms"
    eps: float = 1e-6

    def check(self) -> None:
        require(0 < self.eps < math.inf, f"qk_norm.eps={self.eps} must be a finite number > 0")


@dataclass(frozen=True)
class LayerNormOptions(RMSNormOptions):
    name: str = "layernorm"


# A variant is one dataclass and one entry here, one YAML file, and what makes it: of attention and QK norms a class and
# an entry in model/gpt.py, of corpora a function and an entry in data/corpora.py, of the others a branch in qk_clip(),
# build_optimizer() or learning_rate().
ATTENTIONS = {"mha": MHAOptions, "gqa": GQAOptions, "mla": MLAOptions}


QK_NORMS = {"none": NoNormOptions, "lp": LpNormOptions, "rms": RMSNormOptions, "layernorm": LayerNormOptions}


AttentionOptions = MHAOptions | MLAOptions


QKNormOptions = NoNormOptions | LpNormOptions | RMSNormOptions
