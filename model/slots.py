"""The five slots of a block, each with its base class: four places where a variant changes attention, and the weights.

    queries and keys          QKNorm    qk_norm=   (none, rms, layernorm and lp are in gpt.py)
    logits                    Logits    logits=
    the softmax's denominator Softmax   softmax=
    values and output         Output    output=
    weights of the block      Weights   weights=

A variant is a subclass that overrides a method or sets `bend`; model/variants/NAME.py has the one called NAME. Your own
is registered in the same way, from any file: register(ItsOptions, ItsClass).

Shapes: B batch, T positions, S keys, C = n_embd, nh heads, nkv key and value heads, hs channels a head, dv those of its
output.
"""

from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from core.plugins import register
from core.schema import ConfigError, require
from model import options as settings
from model.ops import Bend, at_least_fp32
from model.options import GPTConfig, QKNormOptions


class LateInit(nn.Module):
    """A module that sets its own parameters, after all others are set, so that the others get the same random
    numbers, whatever fills the slots."""

    def __init__(self) -> None:
        super().__init__()
        self.starts: list[tuple[nn.Parameter, float]] = []

    def new_parameter(self, n: int, start: float) -> nn.Parameter:
        """A vector of n numbers that begin at `start`."""
        self.starts.append((nn.Parameter(torch.empty(n)), start))
        return self.starts[-1][0]

    def init_weights(self) -> None:
        for parameter, start in self.starts:
            nn.init.constant_(parameter, start)

    def after_update(self) -> None:
        """Called without gradients after every update, also after one that was skipped because it was not finite."""


class Variant(LateInit):
    """What fills a slot, built from its options and, by slot: head_dim, n_head (QKNorm); the GPTConfig (Logits,
    Softmax); the GPTConfig, v_dim (Output); the block (Weights)."""

    def __init__(self, options: Any, *_: Any):
        super().__init__()
        self.options = options


class QKNorm(Variant):
    """gain * (x - mean) * scale(x) for vectors x (..., hs). One instance normalises queries, another one keys. Your own
    norm defines scale(x), and may have a `gain` and be `centred`: docs/your_own_variant.md.

    scale() exists beside forward(), which applies all of this, because absorbed MLA decoding computes no normalised
    key: it multiplies the query by the gain, and caches scale() of each key.
    """

    centred = False

    def __init__(self, options: QKNormOptions, head_dim: int, n_head: int):
        super().__init__(options)
        self.head_dim, self.n_head = head_dim, n_head
        self.gain: nn.Parameter | None = None

    def init_weights(self) -> None:
        super().init_weights()
        if self.gain is not None:
            nn.init.ones_(self.gain)

    def scale(self, x: Tensor) -> Tensor:
        """(..., hs) -> (..., 1), in fp32 at least. x is as it was before its mean is subtracted."""
        raise ConfigError(f"qk_norm={self.options.name}: the class {type(self).__name__} defines no scale(x)")

    @property
    def head_gain(self) -> Tensor | None:
        """(hs,), or (nh, 1, hs) where each head has its own, or (1,)."""
        gain = self.gain
        if gain is None or gain.numel() in (1, self.head_dim):
            return gain
        return gain.view(self.n_head, 1, self.head_dim)

    def forward(self, x: Tensor, alpha: Tensor | None = None) -> Tensor:
        """(..., hs) -> (..., hs), times alpha (nh or 1, 1, 1): the learned logit scale, for queries."""
        y = at_least_fp32(x)
        y = (y - y.mean(-1, keepdim=True) if self.centred else y) * self.scale(x)
        gain = self.head_gain
        y = y if gain is None else y * gain
        return (y if alpha is None else y * alpha).to(x.dtype)

    def after_rope(self, q: Tensor) -> Tensor:
        """What else is done to rotated queries (B, nh, T, hs)."""
        return q

    def for_keys(self) -> "QKNorm":
        """This norm, without parameters that only after_rope() uses."""
        return self


class Logits(Variant):
    """What is done to the logits: to all of a query's by scale_queries(), to each one by `bend`.

    bend: a soft cap, or another increasing elementwise function of the logits, in fp32 at least; None: none.
    """

    bend: Bend | None = None

    def scale_queries(self, q: Tensor, pos: int) -> Tensor:
        """Queries (B, nh, T, any channels) of positions pos .. pos+T-1, normalised and rotated, times a number for each
        head and position."""
        return q


class Softmax(Variant):
    """What is done to the softmax's denominator: forward(y, lse) multiplies the output of each query.

    y (B, nh, T, dv) is the output with the plain softmax, lse (B, nh, T) the log-sum-exp of a query's logits.
    """

    def forward(self, y: Tensor, lse: Tensor) -> Tensor:
        return y


class Output(Variant):
    """What is done to values (B, nkv, T, hs; not in MLA, which decodes without them), and by forward(y, x) to
    attention's output y (B, nh, T, dv).

    x (B, T, C) is the layer's input. With takes_values = True it is forward(y, x, v): v (B, nkv, S, hs) are the values
    of all S visible positions, transformed, x's own last. Only layouts whose cache holds values have them.
    """

    takes_values = False

    def transform_values(self, v: Tensor) -> Tensor:
        return v

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        return y


class Weights(Variant):
    """What is done to the weights of a block: to how its Linears use them, by a `reparam`, or to their updates."""

    def update_factors(self) -> list[tuple[Tensor, Tensor]]:
        """Rows of weights (a view), each with the factor of their learning rate in the next update."""
        return []

    def restart(self) -> None:
        """The block begins a run with weights that were loaded (init_from=)."""


def require_fit(attention: Any, config: GPTConfig) -> None:
    """Raise ConfigError where a layout has no place for a chosen variant, or a norm's gain or scale() is misshapen."""
    layout = f"attention={config.attention.name}"
    if not getattr(attention, "plain_softmax", True) and not attention.wraps_attend:
        base: Any = next(cls for cls in reversed(type(attention).__mro__) if hasattr(cls, "fill_slots"))
        told = "replaces attend(), which logits= and softmax= change; if it calls ours, set wraps_attend = True"
        require(type(attention).attend is base.attend, f"{layout} {told}")
    if hasattr(attention, "unified"):
        require_fit_for_mla(attention, config)
    for norm in (part for part in attention.modules() if isinstance(part, QKNorm)):
        vector = norm.gain is None or norm.gain.dim() == 1  # a matrix would decay, and Muon would orthogonalise it
        told = f"qk_norm={config.qk_norm.name}: the gain must be a vector, of head_dim or n_head * head_dim numbers"
        require(vector, told)
        x = torch.ones(1, norm.n_head, 1, norm.head_dim, dtype=torch.float64)  # which no kernel takes: none is built
        if not x.is_meta:
            with torch.no_grad():
                shape = (*norm.scale(x).shape,)
            told = f"qk_norm={config.qk_norm.name}: scale() of {(*x.shape,)} is {shape}: its last dimension must be 1"
            require(len(shape) == 4 and shape[-1] == 1, told)
    normed = config.qk_norm.name == "none" or hasattr(attention, "q_norm")
    require(normed, f"qk_norm={config.qk_norm.name}: {layout} has no q_norm")
    reads = getattr(getattr(attention, "output", None), "takes_values", False)
    told = f"output={config.output.name} needs attention=mha or gqa: {layout} caches no values"
    require(not reads or attention.caches_keys, told)
    for group, one in config.variants.items():
        has = group == "weights" or hasattr(attention, group)
        require(has, f"{group}={one.name}: {layout} does not call fill_slots()")


def require_fit_for_mla(attention: Any, config: GPTConfig) -> None:
    gain = attention.k_norm.head_gain
    told = "its gains differ between heads, and MLA's RoPE key is shared by them"
    one_gain = not attention.unified or gain is None or gain.dim() == 1
    require(one_gain, f"qk_norm={config.qk_norm.name} needs attention.qk_norm_layout=blockwise: {told}")
    own_values = type(attention.output).transform_values is not Output.transform_values
    require(not own_values, f"output={config.output.name} needs attention=mha or gqa: MLA decodes without values")


ATTENTIONS = settings.AttentionOptions.slot  # gpt.py has their classes
QK_NORMS = settings.QKNormOptions.slot
LOGITS = settings.LogitsOptions.slot
SOFTMAXES = settings.SoftmaxOptions.slot
OUTPUTS = settings.OutputOptions.slot
WEIGHTS = settings.WeightsOptions.slot
register(settings.LogitsOptions, Logits)
register(settings.SoftmaxOptions, Softmax)
register(settings.OutputOptions, Output)
register(settings.WeightsOptions, Weights)
