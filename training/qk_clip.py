"""QK-Clip (Kimi K2): after an update, heads with too large a logit have their query and key weights scaled back."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from core import dist
from training.config import NoClipOptions, QKClipOptions
from training.metrics import REDUCTIONS, row_of


@torch.no_grad()
def qk_clip(attentions: Sequence[Any], options: NoClipOptions, frozen: Tensor) -> Tensor | None:
    """Clip every layer by the maximal logits of this update's forwards, over all ranks and micro-batches. qk_clip=log
    changes no weight, nor does a `frozen`, (), of 1. Returns the maxima before the clip, (n_layer, n_head), without
    waiting for a GPU; None for qk_clip=none."""
    if options.name == "none":
        return None
    maxima = torch.stack([attention.pop_max_logits() for attention in attentions])
    maxima = dist.all_reduce(maxima, maximum=True)
    if isinstance(options, QKClipOptions):
        for attention, gamma in zip(attentions, gammas(maxima, options), strict=True):
            gamma = torch.where(frozen > 0, torch.ones_like(gamma), gamma)
            if maxima.device.type != "cpu" or (gamma < 1).any():  # a GPU always scales: to look at gamma would wait
                attention.scale_logits(gamma, options.balance)
    return maxima


def gammas(maxima: Tensor, options: QKClipOptions) -> Tensor:
    """threshold / S where the largest logit S exceeds the threshold, else 1. Large negative logits do not count."""
    return torch.where(maxima > options.threshold, options.threshold / maxima, 1.0)


def qk_clip_line(maxima: Tensor, options: NoClipOptions) -> dict[str, float]:
    """The metrics of maxima (n_layer, n_head); with qk_clip=clip also the heads over the threshold, the least gamma."""
    line = {"qk_clip/max_logit": maxima.max().item()}
    assert line["qk_clip/max_logit"] != -math.inf, "no training forward since the last update"
    line |= {f"qk_clip/max_logit/layer_{i}": m for i, m in enumerate(maxima.amax(1).tolist())}
    if isinstance(options, QKClipOptions):
        gamma = gammas(maxima, options)
        line |= {"qk_clip/clipped": (gamma < 1).sum().item(), "qk_clip/gamma_min": gamma.min().item()}
    return line


def over_updates(*lines: dict[str, float]) -> dict[str, float]:
    """qk_clip_line() of several updates as one. Empty lines are skipped."""
    values_of = {key: [line[key] for line in lines if key in line] for line in lines for key in line}
    return {key: REDUCTIONS[row_of(key).thins](values) for key, values in values_of.items()}
