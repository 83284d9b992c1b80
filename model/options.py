"""The settings of a model, its attention and its QK norm. Free of torch."""

import math
import re
from typing import Annotated, ClassVar, Literal

from core.plugins import Slot, add_options
from core.schema import (
    FREE,
    LARGEST,
    POSITIVE,
    AtLeast,
    BeforeItExisted,
    Between,
    DefaultWas,
    Help,
    Rule,
    declared,
    options,
    require,
    show,
)


@options
class ModelOptions:
    name: Annotated[str, Rule(lambda name: re.fullmatch(r"[\w.-]{1,64}", name) is not None, "must be a plain word")] = (
        "baby_gpt"
    )
    n_layer: Annotated[int, Between(1, 1000), Help("blocks")] = 6
    n_head: Annotated[int, Between(1, 2**16), Help("query heads of a block")] = 6
    n_embd: Annotated[int, Between(1, 2**20), Help("channels of the residual stream")] = 384
    block_size: Annotated[int, AtLeast(1), Help("context length in tokens")] = 256
    dropout: Annotated[float, Between(0, 1, "[)"), Help("probability; on a CPU a multiple of 1/256")] = 0.2
    bias: Annotated[bool, Help("biases in linear layers and LayerNorms")] = False
    norm: Annotated[Literal["layernorm", "rmsnorm"], Help("before attention, the MLP and the output")] = "layernorm"
    norm_eps: Annotated[float, POSITIVE, Help("added to the variance by that norm, and by MLA's norms of latents")] = (
        1e-5
    )
    mlp: Annotated[Literal["gelu", "gelu_tanh", "swiglu"], Help("activation of the MLP; gelu_tanh: GPT-2's")] = "gelu"
    mlp_hidden: Annotated[int | None, AtLeast(1), Help("channels inside the MLP; null: 4 n_embd")] = None
    position: Annotated[Literal["learned", "rope"], Help("embeddings of positions")] = "learned"
    rope_theta: Annotated[float | None, Help("base of RoPE's wavelengths, with position=rope")] = None
    tied: Annotated[bool, Help("the output layer shares the token embedding's weights")] = True
    activation_checkpointing: Annotated[
        bool, FREE, Help("keep only each block's input, recompute the rest in the backward pass: less memory")
    ] = False

    def check(self) -> None:
        if self.position == "rope":
            require(
                self.rope_theta is not None and 1 < self.rope_theta < math.inf,
                f"model.rope_theta={show(self.rope_theta)} must be a finite number > 1 where model.position=rope",
            )
        else:
            require(self.rope_theta is None, f"model.rope_theta={self.rope_theta} needs model.position=rope")


@options
class VariantOptions:
    """What every attention layout and every variant of a slot has."""

    slot: ClassVar[Slot]
    labelled_by_name: ClassVar[bool] = False  # a run's name says the variant's name, and what came later and is in use
    name: str

    def check_fit(self, config: "GPTConfig") -> None:
        """Raise ConfigError where it does not go with the rest of the model."""

    @property
    def label(self) -> str:
        """What a run's name says of it. Unless a class says it shorter, every option with its value: power_q0.5."""
        values = {}
        for key, setting in declared(type(self)).items():
            value, before = getattr(self, key), setting.one(BeforeItExisted)
            if key != "name" and (not self.labelled_by_name if before is None else value != before.value):
                values[key] = value
        shown = {key: format(v, "g") if isinstance(v, float) else show(v) for key, v in values.items()}
        return "_".join([self.name, *(re.sub(r"[^\w.+-]", "", key + text) for key, text in shown.items())])


@options
class AttentionOptions(VariantOptions):
    """The base of attention layouts. One of your own, of this or another slot: register() of core/plugins.py."""

    slot = Slot("model.gpt:CausalAttention", "model.variants")


@options
class MHAOptions(AttentionOptions):
    """Multi-head attention: n_head queries, keys and values"""

    labelled_by_name = True
    name: str = "mha"
    head_dim: Annotated[int | None, AtLeast(1), Help("channels of a head; null: n_embd / n_head")] = None

    def check_fit(self, config: "GPTConfig") -> None:
        model = config.model
        require(
            self.head_dim is not None or model.n_embd % model.n_head == 0,
            f"model.n_embd={model.n_embd} must be divisible by model.n_head={model.n_head}",
        )
        d = self.head_dim or model.n_embd // model.n_head
        require(model.position != "rope" or d % 2 == 0, f"model.position=rope needs an even head_dim, not {d}")


@options
class GQAOptions(MHAOptions):
    """Grouped-query attention: n_head / n_kv_head queries share a key and a value"""

    name: str = "gqa"
    n_kv_head: Annotated[int, AtLeast(1), Help("key and value heads, a divisor of n_head; 1: multi-query")] = 2

    def check_fit(self, config: "GPTConfig") -> None:
        super().check_fit(config)
        n_head = config.model.n_head
        require(
            n_head % self.n_kv_head == 0,
            f"model.n_head={n_head} must be divisible by attention.n_kv_head={self.n_kv_head}",
        )

    @property
    def label(self) -> str:
        return f"{self.name}{self.n_kv_head}"


@options
class SoftpickOptions(MHAOptions):
    """Multi-head attention with softpick instead of the softmax: relu(e^l - 1) / sum |e^l - 1|"""

    name: str = "softpick"

    def check_fit(self, config: "GPTConfig") -> None:
        super().check_fit(config)
        for group, one in (("logits", config.logits), ("softmax", config.softmax)):
            good = one.name in ("none", "plain", "ssmax", "gain")  # the last two scale queries
            require(good, f"{group}={one.name} acts on the softmax, which attention=softpick does not have")


@options
class MLAOptions(AttentionOptions):
    """Multi-head latent attention (DeepSeek-V2, V3); needs model.position=rope"""

    labelled_by_name = True
    name: str = "mla"
    kv_rank: Annotated[int, AtLeast(1), Help("channels of the latent that keys and values are projected from")] = 512
    q_rank: Annotated[int | None, AtLeast(1), Help("the same for queries; null: project them from the input")] = None
    nope_dim: Annotated[int, AtLeast(1), Help("channels of a head's query and key that are not rotated")] = 128
    rope_dim: Annotated[int, AtLeast(1), Help("channels that are rotated: one key, shared by all heads")] = 64
    v_dim: Annotated[int, AtLeast(1), Help("channels of a head's value")] = 128
    qk_norm_layout: Annotated[
        Literal["blockwise", "unified"], Help("normalises the two parts of a query or key separately, or the whole")
    ] = "blockwise"

    def check_fit(self, config: "GPTConfig") -> None:
        model = config.model
        require(self.rope_dim % 2 == 0, f"attention.rope_dim={self.rope_dim} must be even")
        need = "attention=mla needs rope, as model=mla_nano has it"
        require(model.position == "rope", f"model.position={model.position}: {need}")
        require(not model.bias, "model.bias=true: attention=mla has no biases")
        good = self.qk_norm_layout == "blockwise" or config.qk_norm.name != "none"
        require(good, "attention.qk_norm_layout=unified needs a QK norm, not qk_norm=none")


@options
class QKNormOptions(VariantOptions):
    """The base of QK norms."""

    slot = Slot("model.slots:QKNorm", "model.variants")


@options
class NoNormOptions(QKNormOptions):
    """No QK norm"""

    name: str = "none"


@options
class LpNormOptions(QKNormOptions):
    """x / ||x||_p over each head, with a learned logit scale alpha"""

    name: str = "lp"
    p: Annotated[
        float | Literal["learned"],
        Rule(lambda p: p == "learned" or 1 <= p <= 1e30 or p == math.inf, "must be >= 1 and <= 1e30, inf or learned"),
        Help("any number >= 1, inf, or learned: one a head, from 2"),
    ] = 2.0
    alpha_init: Annotated[
        float | Literal["henry", "sqrt_d", "matched"],
        Rule(lambda a: isinstance(a, str) or 1e-6 <= a <= 1e6, "must be in [1e-6, 1e6], or henry, sqrt_d, matched"),
        DefaultWas("sqrt_d"),
        Help("a number; henry: log2(L^2 - L); sqrt_d; matched: sqrt_d's logit spread for every p"),
    ] = "matched"
    alpha_per: Annotated[Literal["layer", "head"], Help("one alpha a layer, or a head")] = "layer"
    alpha_map: Annotated[
        Literal["exp", "softplus", "linear"], Help("alpha from the trained number a: exp(a), softplus(a), linear: |a|")
    ] = "exp"

    def check_fit(self, config: "GPTConfig") -> None:
        T = config.model.block_size
        good = self.alpha_init != "henry" or T >= 3
        require(good, f"qk_norm.alpha_init=henry needs model.block_size={T} >= 3: log2(L^2 - L)")

    @property
    def label(self) -> str:
        p = self.p if isinstance(self.p, str) else format(self.p, "g")
        return f"{self.name}_p{p}_{self.alpha_init}"


@options
class RMSNormOptions(QKNormOptions):
    """RMSNorm over each head, one gain for all heads (Qwen3)"""

    labelled_by_name = True
    name: str = "rms"
    eps: Annotated[float, POSITIVE, Help("added to the mean square")] = 1e-6


@options
class LayerNormOptions(RMSNormOptions):
    """LayerNorm over each head, without bias (ViT-22B)"""

    name: str = "layernorm"


@options
class ScaledRMSNormOptions(RMSNormOptions):
    """gain * RMSNorm over each head, the same gain everywhere and not learned (nanochat)"""

    name: str = "rms_scaled"
    gain: Annotated[float, POSITIVE, Help("multiplies queries, and keys, too")] = 1.2

    @property
    def label(self) -> str:
        return f"{self.name}_{self.gain:g}"


@options
class WholeRMSNormOptions(RMSNormOptions):
    """RMSNorm over all heads together, a gain for each channel of each (OLMo 2)"""

    name: str = "rms_whole"
    gain: Annotated[
        Literal["channel", "layer"], BeforeItExisted("channel"), Help("one a channel of each head, or one a layer")
    ] = "channel"


@options
class NGPTNormOptions(RMSNormOptions):
    """Unit length, then a learned scale for each channel of each head, after RoPE (nGPT)"""

    name: str = "ngpt"
    eps: Annotated[float, POSITIVE, Help("added to the mean square")] = 1e-12


@options
class LogitsOptions(VariantOptions):
    """The logits stay as they are"""

    slot = Slot("model.slots:Logits", "model.variants")
    name: str = "none"


@options
class SoftcapOptions(LogitsOptions):
    """cap * tanh(logit / cap) (Gemma 2)"""

    name: str = "softcap"
    cap: Annotated[float, POSITIVE, Help("no logit exceeds it")] = 50.0


@options
class SSMaxOptions(LogitsOptions):
    """Scalable softmax: logits times s (log n)^power for n visible keys, s learned, one a head"""

    name: str = "ssmax"
    s_init: Annotated[
        float | None, POSITIVE, Help("where s starts; null: s (log n)^power is 1 on average over the context")
    ] = None
    power: Annotated[float, Between(0, 8, "(]"), BeforeItExisted(1.0), Help("of log n")] = 1.0

    @property
    def label(self) -> str:
        start = "" if self.s_init is None else f"_s{self.s_init:g}"
        return f"{self.name}{start}" if self.power == 1 else f"{self.name}{start}_power{self.power:g}"


@options
class GainOptions(LogitsOptions):
    """QK gain: logits times g, usually over a QK norm (marin 5373; parameter-golf)"""

    name: str = "gain"
    g: Annotated[float, POSITIVE, Help("the factor, or where a learned one starts")] = 2.0
    learned: Annotated[Literal["head", "layer"] | None, Help("one a head, or a layer; null: g is fixed")] = None


@options
class SoftmaxOptions(VariantOptions):
    """The softmax over the visible keys"""

    slot = Slot("model.slots:Softmax", "model.variants")
    name: str = "plain"


@options
class SinkOptions(SoftmaxOptions):
    """One more logit in the denominator, without a value: attention may go nowhere (gpt-oss)"""

    name: str = "sink"
    logit: Annotated[
        float | Literal["learned"],
        Rule(lambda x: x == "learned" or abs(x) < math.inf, "must be a finite number or learned"),
        Help("learned: one a head, from 0; or a number; 0: the off-by-one softmax"),
    ] = "learned"


@options
class OutputOptions(VariantOptions):
    """Values and the output of attention stay as they are"""

    slot = Slot("model.slots:Output", "model.variants")
    name: str = "none"


@options
class GateOptions(OutputOptions):
    """output * sigmoid(W x) of the block's normalised input x (Qwen's gated attention)"""

    name: str = "gate"
    per: Annotated[Literal["head", "channel"], Help("a number for each head, or for each channel of each")] = "head"


@options
class ValueNormOptions(OutputOptions):
    """RMSNorm of the values of each head (Gemma 3n: without a gain; HybridNorm: with a learned one)"""

    labelled_by_name = True
    name: str = "value_norm"
    eps: Annotated[float, POSITIVE, Help("added to the mean square")] = 1e-6
    gain: Annotated[
        float | Literal["untouched", "learned", "learned_head"] | None,
        Rule(lambda g: isinstance(g, str) or 0 < g <= LARGEST, f"must be > 0 and at most {LARGEST:g}, or a word"),
        BeforeItExisted(None),
        Help("untouched: fixed at the size that values start with; learned, learned_head: trained from it; null: none"),
    ] = None


@options
class OutputNormOptions(OutputOptions):
    """RMSNorm of each head's output (marin 5854)"""

    labelled_by_name = True
    name: str = "output_norm"
    eps: Annotated[float, POSITIVE, Help("added to the mean square")] = 1e-6
    gain: Annotated[bool, BeforeItExisted(True), Help("learned, a number for each channel of each head")] = True


@options
class XSAOptions(OutputOptions):
    """Exclusive self attention: each token's output without its part along the token's own value"""

    name: str = "xsa"


@options
class AffineOptions(OutputOptions):
    """Affine-scaled attention: (a(x) softmax + b(x)) v, a and b of each head and token"""

    name: str = "affine"


@options
class WeightsOptions(VariantOptions):
    """The weights are trained as they are"""

    slot = Slot("model.slots:Weights", "model.variants")
    name: str = "none"


@options
class SigmaReparamOptions(WeightsOptions):
    """gamma / sigma(W) * W for every matrix of a block: sigma its largest singular value, gamma learned"""

    name: str = "sigma_reparam"


@options
class QuackOptions(WeightsOptions):
    """The learning rates of W_q and W_k follow the other's norm: tau |W at the start| / |W|"""

    name: str = "quack"
    tau: Annotated[float, POSITIVE, Help("their learning rate at the start, over that of the other weights")] = 1.0


@options
class SpectralCapOptions(WeightsOptions):
    """After each update the largest singular value of a block's matrices is at most c sqrt(rows / columns)"""

    name: str = "spectral_cap"
    c: Annotated[float, POSITIVE, Help("of queries, keys and values each; a matrix above it is scaled down")] = 1.0


@options
class GPTConfig:
    """All that a GPT is made from, but the size of its vocabulary."""

    model: Annotated[ModelOptions, Help("a preset, and its sizes")] = ModelOptions()
    attention: Annotated[AttentionOptions, Help("the attention layout")] = MHAOptions()
    qk_norm: Annotated[QKNormOptions, Help("the norm of queries and keys")] = NoNormOptions()
    logits: Annotated[LogitsOptions, BeforeItExisted(LogitsOptions()), Help("before the softmax")] = LogitsOptions()
    softmax: Annotated[SoftmaxOptions, BeforeItExisted(SoftmaxOptions()), Help("its denominator")] = SoftmaxOptions()
    output: Annotated[OutputOptions, BeforeItExisted(OutputOptions()), Help("attention's, before its projection")] = (
        OutputOptions()
    )
    weights: Annotated[WeightsOptions, BeforeItExisted(WeightsOptions()), Help("how a block's are used or updated")] = (
        WeightsOptions()
    )

    @property
    def variants(self) -> dict[str, VariantOptions]:
        """The variant of each slot that has one, by group; qk_norm is not among them."""
        every = {"logits": self.logits, "softmax": self.softmax, "output": self.output, "weights": self.weights}
        return {group: one for group, one in every.items() if one.name not in ("none", "plain")}

    def check(self) -> None:
        for one in (self.attention, self.qk_norm, *self.variants.values()):
            one.check_fit(self)


for ours in (
    MHAOptions, GQAOptions, SoftpickOptions, MLAOptions,
    NoNormOptions, LpNormOptions, RMSNormOptions, LayerNormOptions,
    ScaledRMSNormOptions, WholeRMSNormOptions, NGPTNormOptions,
    LogitsOptions, SoftcapOptions, SSMaxOptions, GainOptions,
    SoftmaxOptions, SinkOptions,
    OutputOptions, GateOptions, ValueNormOptions, OutputNormOptions, XSAOptions, AffineOptions,
    WeightsOptions, SigmaReparamOptions, QuackOptions, SpectralCapOptions,
):  # fmt: skip
    add_options(ours.slot.options, ours)

ATTENTION_OPTIONS = AttentionOptions.slot.options  # the old names
QK_NORM_OPTIONS = QKNormOptions.slot.options
