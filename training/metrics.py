"""What can be measured of a run, a row for each metric. The log line, the live page, reports, W&B and docs/tracking.md
read these rows; a new metric is a row and the one place that computes it."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Literal

REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {  # how several values become one
    "last": lambda v: v[-1], "max": max, "min": min, "mean": fmean, "sum": sum,
    # the mean distance of a value from the middle of its two neighbours: 0 on a line of equal steps, however steep
    "roughness": lambda v: fmean(abs(v[i] - (v[i - 1] + v[i + 1]) / 2) for i in range(1, len(v) - 1)) if v[2:] else 0.0,
}  # fmt: skip
# log: the line for a person. live: a curve of the live page. heads: heat maps by layer and head, there. layers: W&B's
# means over heads, by layer.
Place = Literal["log", "live", "heads", "layers"]
EVALUATION = "val/loss"  # the lines of evaluations have it; W&B's summary has its lowest and its last value


@dataclass(frozen=True)
class Metric:
    """A key of metrics.jsonl, and what docs/tracking.md says of it."""

    key: str
    says: str
    words: str = ""  # what titles and axes call it; "": its key
    unit: str = ""  # what they add in brackets
    thins: str = "mean"  # the reduction of the values of several updates, or of a span of a drawn curve
    spec: str = ".4f"  # its format in the log
    shown: tuple[Place, ...] = ()

    @property
    def title(self) -> str:
        return f"{self.words} ({self.unit})" if self.unit else self.words


ROWS = (
    Metric("iter", "the iteration: the updates before it", shown=("log",)),
    Metric("val/loss", "every held-out token is predicted once", "validation loss", "nats per token", "min",
           shown=("live",)),
    Metric("val/bpc", "the same in bits a character"),
    Metric("val/bpb", "the same in bits a byte", "validation loss", "bits per byte"),
    Metric("train/loss", "of the iteration's update, in nats a token", "training loss", shown=("log", "live")),
    Metric("train/loss_sampled", "nanoGPT's sampled estimate, with `eval_iters=200`"),
    Metric("val/loss_sampled", "the same of held-out text"),
    Metric("train/spike_score", "percentage of losses that lie 7 standard deviations or more from those before them "
           "(OLMo 2)", "loss spike score"),
    Metric("lr", "learning rate of the update", spec=".2e", shown=("log",)),
    Metric("grad_norm", "of the update, before clipping", "gradient norm", thins="max", shown=("log", "live")),
    Metric("attn/max_logit", "of one batch, in evaluation mode, as all of `attn/`; maximum over layers and heads",
           "largest attention logit", thins="max", shown=("live", "heads", "layers")),
    Metric("attn/entropy", "mean over layers and heads, as the following", "entropy of attention", "nats",
           shown=("live", "heads", "layers")),
    Metric("attn/effective_keys", "exponential of the entropy"),
    Metric("attn/alpha", "with Lp: the learned scale of the logits", "α", shown=("live", "layers")),
    Metric("attn/SIDE_p", "with Lp: p of SIDE: q, k, in MLA's RoPE part q_rope, k_rope"),
    Metric("attn/SIDE_g_mean", "with Lp: mean of g = ‖x‖₂ / ‖x‖ₚ ([why](qk_norms.md#temperature-against-geometry))"),
    Metric("attn/SIDE_g_std", "with Lp: standard deviation of g"),
    Metric("attn/SIDE_norm", "mean length of queries or keys before the QK norm"),
    Metric("attn/q_gain", "mean absolute gain of a QK norm that has gains", shown=("layers",)),
    Metric("attn/k_gain", "the same of keys", shown=("layers",)),
    Metric("qk_clip/max_logit", "with `qk_clip=log` or `clip`: exact, in all updates since the last line, before a "
           "soft cap; `/layer_i` too", "largest attention logit in training", thins="max"),
    Metric("qk_clip/clipped", "with `clip`: over the threshold, summed over these updates (in GQA their whole group is "
           "scaled)", "heads clipped", thins="sum"),
    Metric("qk_clip/gamma_min", "with `clip`: the smallest factor γ of these updates", thins="min"),
    Metric("update/KIND", "2-norm of an update over 2-norm of the weights, for each kind of parameter: embedding, "
           "attention, mlp; alpha and p (of Lp); norm (all other vectors: gains, biases, sinks)"),
    Metric("tok_per_sec", "since the last line", "tokens a second", spec=",.0f", shown=("log", "live")),
    Metric("mfu", "the same as a share of the fastest that this device was measured at ([speed](speed.md))",
           spec=".1%", shown=("log",)),
    Metric("cache_bytes_per_token", "of `summary.json`: of keys and values, when decoding", "cache", "bytes a token"),
    Metric("eval/cloze/acc", "of `evaluation.json` ([evaluation](evaluation_and_export.md))", "cloze accuracy"),
)  # fmt: skip
METRICS = {row.key: row for row in ROWS}
ANY = Metric("", "")  # of a metric without a row, as a plugin's


def shown_in(place: Place) -> list[str]:
    """The keys that a place shows, in its order."""
    return [row.key for row in ROWS if place in row.shown]


@cache
def row_of(key: str) -> Metric:
    """The row of a metric, or of its value in a layer. Capitals of a row's key match any word."""
    whole = key.partition("/layer_")[0]
    return next((row for row in ROWS if re.fullmatch(re.sub("[A-Z]+", r"\\w+", row.key), whole)), ANY)


def in_words(key: str) -> str:
    """A metric, or a pattern of metrics, as titles and axes name it."""
    whole, _, layer = key.partition("/layer_")
    row = row_of(whole)
    name = row.title if row.words else whole
    return name + (f", layer {layer}" if layer and layer != "*" else ", each layer" if layer else "")


def table() -> str:
    """The table of docs/tracking.md."""
    lines = [f"| `{row.key}` | {row.title} | {row.says} |" for row in ROWS]
    return "\n".join(["| key | in titles | what it is |", "| --- | --- | --- |", *lines, ""])
