"""The settings of a training run: TrainConfig joins those of the model, the data and the optimizer. Free of torch."""

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from core.schema import at_least, build, digest, flatten, one_of, require
from data.options import CORPORA, CorpusOptions, FoldedTextOptions, TinyShakespeareOptions
from model.options import (
    ATTENTIONS,
    QK_NORMS,
    AttentionOptions,
    GQAOptions,
    LpNormOptions,
    MHAOptions,
    MLAOptions,
    ModelOptions,
    NoNormOptions,
    QKNormOptions,
)


@dataclass(frozen=True)
class NoClipOptions:
    name: str = "none"

    def check(self) -> None:
        pass


@dataclass(frozen=True)
class LogClipOptions(NoClipOptions):
    """Log the exact maximal logits, of any attention and QK norm, and clip nothing."""

    name: str = "log"


@dataclass(frozen=True)
class QKClipOptions(NoClipOptions):
    """Kimi K2's QK-Clip: heads whose largest logit exceeds `threshold` have their weights scaled back to it."""

    name: str = "clip"
    threshold: float = 100.0
    balance: float = 0.5

    def check(self) -> None:
        require(0 < self.threshold < math.inf, f"qk_clip.threshold={self.threshold} must be a finite number > 0")
        require(0 <= self.balance <= 1, f"qk_clip.balance={self.balance} must be in [0, 1]")


@dataclass(frozen=True)
class AdamWOptions:
    name: str = "adamw"
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.1

    def check(self) -> None:
        require(
            0 < self.learning_rate < math.inf,
            f"optim.learning_rate={self.learning_rate} must be a finite number > 0",
        )
        require(all(0 <= b < 1 for b in self.betas), f"optim.betas={list(self.betas)} must each be in [0, 1)")
        require(
            0 <= self.weight_decay < math.inf, f"optim.weight_decay={self.weight_decay} must be a finite number >= 0"
        )


@dataclass(frozen=True)
class MuonOptions(AdamWOptions):
    """Muon for the hidden matrices, AdamW for the rest: learning_rate and weight_decay are of both, betas AdamW's."""

    name: str = "muon"
    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5

    def check(self) -> None:
        super().check()
        require(0 <= self.momentum < 1, f"optim.momentum={self.momentum} must be in [0, 1)")
        require(1 <= self.ns_steps < 100, f"optim.ns_steps={self.ns_steps} must be in 1..99")


@dataclass(frozen=True)
class ScheduleOptions:
    name: str
    warmup_iters: int = 100

    def check(self) -> None:
        at_least("schedule.warmup_iters", self.warmup_iters, 0)


@dataclass(frozen=True)
class ConstantOptions(ScheduleOptions):
    """Warm-up, then learning_rate. Nothing in it depends on the length of the run."""

    name: str = "constant"


@dataclass(frozen=True)
class DecayOptions(ScheduleOptions):
    """A schedule that ends at min_lr, at iteration lr_decay_iters (null: max_iters)."""

    min_lr: float = 0.0
    lr_decay_iters: int | None = None

    def decay_start(self, end: int) -> float:
        """The iteration from which a decay that is over at `end` goes down."""
        return self.warmup_iters

    def decay_end(self, max_iters: int) -> int:
        return max_iters if self.lr_decay_iters is None else self.lr_decay_iters

    def check(self) -> None:
        super().check()
        require(0 <= self.min_lr < math.inf, f"schedule.min_lr={self.min_lr} must be a finite number >= 0")
        if self.lr_decay_iters is not None:
            at_least("schedule.lr_decay_iters", self.lr_decay_iters, 1)

    def check_decay(self, max_iters: int, learning_rate: float) -> None:
        end = self.decay_end(max_iters)
        require(
            self.min_lr <= learning_rate,
            f"schedule.min_lr={self.min_lr} must be <= optim.learning_rate={learning_rate}",
        )
        require(
            self.warmup_iters < end,
            f"schedule.warmup_iters={self.warmup_iters} must be < {end}"
            " (schedule.lr_decay_iters, by default max_iters); a short run may have schedule.warmup_iters=0",
        )


@dataclass(frozen=True)
class CosineOptions(DecayOptions):
    name: str = "cosine"
    min_lr: float = 1e-4


@dataclass(frozen=True)
class LinearOptions(DecayOptions):
    name: str = "linear"


@dataclass(frozen=True)
class WSDOptions(DecayOptions):
    """Warm-up, stable, decay over the last decay_frac of lr_decay_iters."""

    name: str = "wsd"
    decay_frac: float = 0.2

    def decay_start(self, end: int) -> float:
        return end - self.decay_frac * end

    def check(self) -> None:
        super().check()
        require(0 < self.decay_frac <= 1, f"schedule.decay_frac={self.decay_frac} must be in (0, 1]")

    def check_decay(self, max_iters: int, learning_rate: float) -> None:
        super().check_decay(max_iters, learning_rate)
        end = self.decay_end(max_iters)
        require(
            self.warmup_iters <= self.decay_start(end),
            f"schedule.warmup_iters={self.warmup_iters} must be <= {self.decay_start(end):g}, where the decay begins:"
            f" schedule.decay_frac={self.decay_frac} of {end} (schedule.lr_decay_iters, by default max_iters)",
        )


@dataclass(frozen=True)
class WandbOptions:
    mode: str = "auto"
    project: str = "nanoqk"
    group: str | None = None

    def check(self) -> None:
        one_of("wandb.mode", self.mode, ("auto", "online", "offline", "disabled"))
        require(
            re.fullmatch(r"[^/\\#?%:]{1,128}", self.project) is not None,
            f"wandb.project={self.project!r} must be 1 to 128 characters, none of / \\ # ? % :",
        )


FAULTS = (
    "none",
    "no_mask",
    "unshifted_labels",
    "loss_over_accumulation",
    "repeated_batches",
    "padding_in_mean",
)


@dataclass(frozen=True)
class FaultOptions:
    """A fault that makes the loss too good to be true, on purpose: training/faults.py."""

    name: str = "none"

    def check(self) -> None:
        one_of("fault.name", self.name, FAULTS)


QK_CLIPS = {"none": NoClipOptions, "log": LogClipOptions, "clip": QKClipOptions}


OPTIMS = {"adamw": AdamWOptions, "muon": MuonOptions}


SCHEDULES = {"cosine": CosineOptions, "wsd": WSDOptions, "linear": LinearOptions, "constant": ConstantOptions}


OptimOptions = AdamWOptions


# Settings that may change when a run is resumed: they do not decide the weights or the logged losses. `device`,
# `compile` and `threads` may change too, but then the rest of the run is not equal bit for bit, nor, with dropout, to
# round-off; the dtype that `dtype` comes to may not, which train.py sees to.
FREE_KEYS = {"out_dir", "max_iters", "eval_interval", "eval_iters", "log_interval", "checkpoint_interval", "plot"}
FREE_KEYS |= {"dry_run", "eval_only", "fresh", "wandb", "device", "dtype", "compile", "threads"}
FREE_KEYS |= {"model.activation_checkpointing"}


# Settings that came after runs had been named, with what those runs had: it leaves their names and hashes alone.
LATER_KEYS = {"data.vocab_size": None, "fault.name": "none"}


@dataclass(frozen=True)
class TrainConfig:
    out_dir: str | None = None
    seed: int = 1337
    device: str = "auto"
    dtype: str = "auto"
    compile: bool | str = "auto"
    threads: int | None = None
    batch_size: int = 64
    gradient_accumulation_steps: int = 1
    max_iters: int = 5000
    grad_clip: float = 1.0
    eval_interval: int = 250
    eval_iters: int = 0
    log_interval: int = 10
    checkpoint_interval: int = 250
    plot: bool = False
    dry_run: bool = False
    eval_only: bool = False
    fresh: bool = False
    model: ModelOptions = field(default_factory=ModelOptions)
    attention: AttentionOptions = field(default_factory=MHAOptions, metadata={"variants": ATTENTIONS})
    qk_norm: QKNormOptions = field(default_factory=NoNormOptions, metadata={"variants": QK_NORMS})
    qk_clip: NoClipOptions = field(default_factory=NoClipOptions, metadata={"variants": QK_CLIPS})
    optim: OptimOptions = field(default_factory=AdamWOptions, metadata={"variants": OPTIMS})
    schedule: ScheduleOptions = field(default_factory=CosineOptions, metadata={"variants": SCHEDULES})
    data: CorpusOptions = field(default_factory=TinyShakespeareOptions, metadata={"variants": CORPORA})
    fault: FaultOptions = field(default_factory=FaultOptions)
    wandb: WandbOptions = field(default_factory=WandbOptions)

    @property
    def lr_decay_iters(self) -> int | None:
        """The iteration at which the learning rate's decay is over; None for a schedule without one."""
        return self.schedule.decay_end(self.max_iters) if isinstance(self.schedule, DecayOptions) else None

    @property
    def tokens_per_iter(self) -> int:
        return self.batch_size * self.gradient_accumulation_steps * self.model.block_size

    @property
    def trajectory(self) -> dict[str, Any]:
        """Flat {key: value} of the settings that decide the weights and the losses, resolved."""
        config = {k: v for k, v in asdict(self).items() if k not in FREE_KEYS}
        if self.lr_decay_iters is not None:
            config["schedule"]["lr_decay_iters"] = self.lr_decay_iters
        config["data"].pop("path", None)  # a corpus may move: its SHA-256 is compared
        if isinstance(self.data, FoldedTextOptions) and self.data.tokenizer == "bpe":
            config["data"]["vocab_size"] = self.data.bpe_vocab_size
        flat = {key: value for key, value in flatten(config).items() if key not in FREE_KEYS}
        return {key: value for key, value in flat.items() if key not in LATER_KEYS or value != LATER_KEYS[key]}

    @property
    def label(self) -> str:
        """Readable name of the setting, without fold and seed."""
        parts = [self.model.name, self.attention.name]
        if isinstance(self.attention, GQAOptions):
            parts[1] += f"{self.attention.n_kv_head}"
        if isinstance(self.qk_clip, QKClipOptions):
            parts.append(f"clip{self.qk_clip.threshold:g}")
        if isinstance(self.qk_norm, LpNormOptions):
            p = self.qk_norm.p
            parts.append(f"lp_p{p if isinstance(p, str) else format(p, 'g')}_{self.qk_norm.alpha_init}")
        else:
            parts.append(self.qk_norm.name)
        recipe = [
            f"FAULT_{self.fault.name}" if self.fault.name != FaultOptions.name else "",
            self.optim.name if self.optim.name != AdamWOptions.name else "",
            self.schedule.name if self.schedule.name != CosineOptions.name else "",
        ]
        return "-".join([*parts, *filter(None, recipe), self.data.name])

    @property
    def group(self) -> str:
        """Name of the setting, one for all its folds and seeds: W&B averages over it."""
        return f"{self.label}-{digest({k: v for k, v in self.trajectory.items() if k not in ('seed', 'data.fold')})}"

    @property
    def run_dir(self) -> Path:
        if self.out_dir is not None:
            return Path(os.path.expanduser(self.out_dir))
        number = self.data.fold if isinstance(self.data, FoldedTextOptions) else None
        fold = "" if number is None else f"-fold{number}"
        file = Path(getattr(self.data, "path", None) or "").name
        return Path("runs") / f"{self.label}{fold}-s{self.seed}-{digest({**self.trajectory, 'data.path': file})}"

    def check(self) -> None:
        check_common(self.seed, self.device, self.dtype)
        require(
            isinstance(self.compile, bool) or self.compile == "auto",
            f"compile={self.compile} must be true, false or auto",
        )
        if self.threads is not None:
            cpus = os.cpu_count() or 1
            require(1 <= self.threads <= cpus, f"threads={self.threads} must be >= 1 and <= {cpus}, the CPUs here")
        for key in ("batch_size", "gradient_accumulation_steps", "max_iters", "eval_interval", "log_interval"):
            at_least(key, getattr(self, key), 1)
        at_least("checkpoint_interval", self.checkpoint_interval, 1)
        at_least("eval_iters", self.eval_iters, 0)
        require(0 <= self.grad_clip < math.inf, f"grad_clip={self.grad_clip} must be a finite number >= 0 (0: off)")
        require(self.out_dir != "", "out_dir= must not be empty")
        require(not (self.eval_only and self.fresh), "fresh=true leaves eval_only=true nothing to evaluate")
        require(not (self.eval_only and self.dry_run), "dry_run=true and eval_only=true exclude each other")
        for group in (self.model, self.qk_norm, self.qk_clip, self.optim, self.schedule, self.data, self.fault):
            group.check()
        self.wandb.check()
        self.attention.check(self.model)
        require(
            not (isinstance(self.attention, MLAOptions) and self.attention.qk_norm_layout == "unified")
            or self.qk_norm.name != "none",
            "attention.qk_norm_layout=unified needs a QK norm, not qk_norm=none",
        )
        require(
            not isinstance(self.qk_clip, QKClipOptions) or self.qk_norm.name == "none",
            f"qk_clip=clip needs qk_norm=none: with qk_norm={self.qk_norm.name} the weights' scale does not reach the"
            " logits",
        )
        require(
            self.fault.name != "loss_over_accumulation" or self.gradient_accumulation_steps > 1,
            "fault=loss_over_accumulation needs gradient_accumulation_steps > 1",
        )
        if isinstance(self.schedule, DecayOptions):
            self.schedule.check_decay(self.max_iters, self.optim.learning_rate)
        if isinstance(self.qk_norm, LpNormOptions) and self.qk_norm.alpha_init == "henry":
            require(
                self.model.block_size >= 3,
                f"qk_norm.alpha_init=henry needs model.block_size={self.model.block_size} >= 3: log2(L^2 - L)",
            )


@dataclass(frozen=True)
class SampleConfig:
    run: str = ""
    checkpoint: str = "best"
    start: str = "\n"
    num_samples: int = 10
    max_new_tokens: int = 500
    temperature: float = 0.8
    top_k: int | None = 200
    top_p: float | None = None
    seed: int = 1337
    device: str = "auto"
    dtype: str = "auto"
    stream: bool = False

    def check(self) -> None:
        require(self.run != "", "run= must name a run directory or a checkpoint")
        one_of("checkpoint", self.checkpoint, ("best", "latest"))
        at_least("num_samples", self.num_samples, 1)
        at_least("max_new_tokens", self.max_new_tokens, 1)
        require(
            0 <= self.temperature < math.inf, f"temperature={self.temperature} must be a finite number >= 0 (0: greedy)"
        )
        if self.top_k is not None:
            at_least("top_k", self.top_k, 1)
        if self.top_p is not None:
            require(0 < self.top_p <= 1, f"top_p={self.top_p} must be in (0, 1]")
        check_common(self.seed, self.device, self.dtype)


def check_common(seed: int, device: str, dtype: str) -> None:
    require(0 <= seed < 2**63, f"seed={seed} must be >= 0 and < 2**63")
    require(
        re.fullmatch(r"auto|cpu|mps|cuda(:\d{1,3})?", device) is not None,
        f"device={device} must be auto, cpu, mps, cuda or cuda:N",
    )
    one_of("dtype", dtype, ("auto", "float32", "bfloat16"))


def load_config(source: Mapping[str, Any]) -> TrainConfig:
    """A nested mapping (a composed config, or a run's config.yaml) as a checked TrainConfig.

    Raises: ConfigError naming key, value and rule.
    """
    config = build(TrainConfig, source)
    config.check()
    return config


def to_yaml(config: TrainConfig) -> str:
    """A config.yaml's text; load_config of it is an equal TrainConfig."""
    import yaml

    settings = json.loads(json.dumps(asdict(config)))  # tuples as lists; inf stays inf
    return yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
