"""Every setting of nanoQK: the dataclasses, their checks, and how a composed config becomes one.

Hydra composes YAML; `load_config` turns the result into frozen dataclasses and checks them. A group with variants
(qk_norm, data, …) has one dataclass a variant, so that an option which the chosen variant would ignore is an unknown
key. Checks never change a value: what follows from others is a property. Nothing here imports torch.
"""

import dataclasses
import difflib
import functools
import hashlib
import json
import math
import os
import re
import sys
import traceback
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

CONFIG_DIR = Path(__file__).resolve().parent.parent / "configs"


class ConfigError(ValueError):
    """A setting that cannot be used. The message is one line: key, value, rule. Programs exit with status 2."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


# -----------------------------------------------------------------------------
# The groups


@dataclass(frozen=True)
class ModelConfig:
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
class MHAConfig:
    """n_head queries, keys and values a layer. head_dim: null is n_embd / n_head."""

    name: str = "mha"
    head_dim: int | None = None

    def check(self, model: ModelConfig) -> None:
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
class GQAConfig(MHAConfig):
    """n_kv_head keys and values, each shared by n_head / n_kv_head queries; 1 is multi-query attention."""

    name: str = "gqa"
    n_kv_head: int = 1

    def check(self, model: ModelConfig) -> None:
        super().check(model)
        at_least("attention.n_kv_head", self.n_kv_head, 1)
        require(
            model.n_head % self.n_kv_head == 0,
            f"model.n_head={model.n_head} must be divisible by attention.n_kv_head={self.n_kv_head}",
        )


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2, V3). q_rank: null projects queries directly."""

    name: str = "mla"
    kv_rank: int = 512
    q_rank: int | None = None
    nope_dim: int = 128
    rope_dim: int = 64
    v_dim: int = 128
    qk_norm_layout: str = "blockwise"

    def check(self, model: ModelConfig) -> None:
        for key in ("kv_rank", "nope_dim", "rope_dim", "v_dim"):
            at_least(f"attention.{key}", getattr(self, key), 1)
        if self.q_rank is not None:
            at_least("attention.q_rank", self.q_rank, 1)
        require(self.rope_dim % 2 == 0, f"attention.rope_dim={self.rope_dim} must be even")
        require(model.position == "rope", f"model.position={model.position}: attention=mla needs rope")
        require(not model.bias, "model.bias=true: attention=mla has no biases")
        one_of("attention.qk_norm_layout", self.qk_norm_layout, ("blockwise", "unified"))


@dataclass(frozen=True)
class NoQKNormConfig:
    name: str = "none"

    def check(self) -> None:
        pass


@dataclass(frozen=True)
class LpQKNormConfig:
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
class RMSQKNormConfig:
    name: str = "rms"
    eps: float = 1e-6

    def check(self) -> None:
        require(0 < self.eps < math.inf, f"qk_norm.eps={self.eps} must be a finite number > 0")


@dataclass(frozen=True)
class LayerNormQKNormConfig(RMSQKNormConfig):
    name: str = "layernorm"


@dataclass(frozen=True)
class NoQKClipConfig:
    name: str = "none"

    def check(self) -> None:
        pass


@dataclass(frozen=True)
class LogQKClipConfig(NoQKClipConfig):
    """Log the exact maximal logits, of any attention and QK norm, and clip nothing."""

    name: str = "log"


@dataclass(frozen=True)
class QKClipConfig(NoQKClipConfig):
    """Kimi K2's QK-Clip: heads whose largest logit exceeds `threshold` have their weights scaled back to it."""

    name: str = "clip"
    threshold: float = 100.0
    balance: float = 0.5

    def check(self) -> None:
        require(0 < self.threshold < math.inf, f"qk_clip.threshold={self.threshold} must be a finite number > 0")
        require(0 <= self.balance <= 1, f"qk_clip.balance={self.balance} must be in [0, 1]")


@dataclass(frozen=True)
class AdamWConfig:
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
class MuonConfig(AdamWConfig):
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
class ScheduleConfig:
    name: str
    warmup_iters: int = 100

    def check(self) -> None:
        at_least("schedule.warmup_iters", self.warmup_iters, 0)


@dataclass(frozen=True)
class ConstantConfig(ScheduleConfig):
    """Warm-up, then learning_rate. Nothing in it depends on the length of the run."""

    name: str = "constant"


@dataclass(frozen=True)
class DecayConfig(ScheduleConfig):
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
class CosineConfig(DecayConfig):
    name: str = "cosine"
    min_lr: float = 1e-4


@dataclass(frozen=True)
class LinearConfig(DecayConfig):
    name: str = "linear"


@dataclass(frozen=True)
class WSDConfig(DecayConfig):
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


BPE_VOCAB_SIZE = 4096


@dataclass(frozen=True)
class DataConfig:
    """A corpus that is one text, cut into folds."""

    name: str
    tokenizer: str = "char"
    folds: int = 10
    fold: int | None = None
    split: str = "contiguous"
    vocab_size: int | None = None

    @property
    def bpe_vocab_size(self) -> int:
        """The number of tokens of data.tokenizer=bpe."""
        return BPE_VOCAB_SIZE if self.vocab_size is None else self.vocab_size

    def check(self) -> None:
        one_of("data.tokenizer", self.tokenizer, ("char", "byte", "bpe", "gpt2"))
        check_vocab_size("data.", self.tokenizer, self.vocab_size)
        one_of("data.split", self.split, ("contiguous", "shuffled"))
        require(
            self.split == "contiguous" or self.fold is not None,
            f"data.split={self.split} needs data.fold: without one the last 10 % are held out",
        )
        at_least("data.folds", self.folds, 2)
        if self.fold is None:
            require(
                self.folds == DataConfig.folds,
                f"data.folds={self.folds} needs data.fold: without one the last 10 % are held out",
            )
        else:
            require(
                0 <= self.fold < self.folds,
                f"data.fold={self.fold} must be in 0..{self.folds - 1} (data.folds={self.folds})",
            )


@dataclass(frozen=True)
class TinyShakespeareConfig(DataConfig):
    name: str = "tiny_shakespeare"
    path: str | None = None


@dataclass(frozen=True)
class PythonDocsConfig(DataConfig):
    name: str = "python_docs"


@dataclass(frozen=True)
class PythonSourceConfig(DataConfig):
    name: str = "python_source"
    tokenizer: str = "bpe"


@dataclass(frozen=True)
class TextConfig(DataConfig):
    name: str = "text"
    path: str = ""

    def check(self) -> None:
        super().check()
        require(self.path != "", "data.path= must name a UTF-8 text file")


@dataclass(frozen=True)
class WandbConfig:
    mode: str = "auto"
    project: str = "nanoqk"
    group: str | None = None

    def check(self) -> None:
        one_of("wandb.mode", self.mode, ("auto", "online", "offline", "disabled"))
        require(
            re.fullmatch(r"[^/\\#?%:]{1,128}", self.project) is not None,
            f"wandb.project={self.project!r} must be 1 to 128 characters, none of / \\ # ? % :",
        )


@dataclass(frozen=True)
class FineWebConfig:
    """Token shards that data/prepare_fineweb.py has written: they have a validation part, and no folds."""

    name: str = "fineweb"
    path: str | None = None
    val_tokens: int | None = None

    def check(self) -> None:
        require(self.path != "", "data.path= must name a folder, or be null")
        if self.val_tokens is not None:
            at_least("data.val_tokens", self.val_tokens, 2)


@dataclass(frozen=True)
class RandomConfig:
    """n_tokens uniformly random tokens, of which the last val_tokens are held out: no text, and no folds."""

    name: str = "random"
    n_tokens: int = 10_000_000
    vocab_size: int = 256
    val_tokens: int = 100_000
    seed: int = 0

    def check(self) -> None:
        at_least("data.n_tokens", self.n_tokens, 4)
        at_least("data.vocab_size", self.vocab_size, 2)
        at_least("data.val_tokens", self.val_tokens, 2)
        require(
            self.val_tokens < self.n_tokens,
            f"data.val_tokens={self.val_tokens} must be < data.n_tokens={self.n_tokens}",
        )
        require(0 <= self.seed < 2**63, f"data.seed={self.seed} must be >= 0 and < 2**63")


FAULTS = (
    "none",
    "no_mask",
    "unshifted_labels",
    "loss_over_accumulation",
    "repeated_batches",
    "padding_in_mean",
)


@dataclass(frozen=True)
class FaultConfig:
    """A fault that makes the loss too good to be true, on purpose: training/faults.py."""

    name: str = "none"

    def check(self) -> None:
        one_of("fault.name", self.name, FAULTS)


# A variant is one dataclass and one entry here, one YAML file, and what makes it: of attention and QK norms a class and
# an entry in model/gpt.py, of corpora a function and an entry in data/corpora.py, of the others a branch in qk_clip(),
# build_optimizer() or learning_rate().
ATTENTIONS = {"mha": MHAConfig, "gqa": GQAConfig, "mla": MLAConfig}
QK_NORMS = {"none": NoQKNormConfig, "lp": LpQKNormConfig, "rms": RMSQKNormConfig, "layernorm": LayerNormQKNormConfig}
QK_CLIPS = {"none": NoQKClipConfig, "log": LogQKClipConfig, "clip": QKClipConfig}
OPTIMS = {"adamw": AdamWConfig, "muon": MuonConfig}
SCHEDULES = {"cosine": CosineConfig, "wsd": WSDConfig, "linear": LinearConfig, "constant": ConstantConfig}
CORPORA = {
    "tiny_shakespeare": TinyShakespeareConfig,
    "python_docs": PythonDocsConfig,
    "python_source": PythonSourceConfig,
    "text": TextConfig,
    "fineweb": FineWebConfig,
    "random": RandomConfig,
}

CorpusConfig = DataConfig | FineWebConfig | RandomConfig
AttentionConfig = MHAConfig | MLAConfig
QKNormConfig = NoQKNormConfig | LpQKNormConfig | RMSQKNormConfig
OptimConfig = AdamWConfig

# -----------------------------------------------------------------------------
# The two programs

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
    model: ModelConfig = field(default_factory=ModelConfig)
    attention: AttentionConfig = field(default_factory=MHAConfig, metadata={"variants": ATTENTIONS})
    qk_norm: QKNormConfig = field(default_factory=NoQKNormConfig, metadata={"variants": QK_NORMS})
    qk_clip: NoQKClipConfig = field(default_factory=NoQKClipConfig, metadata={"variants": QK_CLIPS})
    optim: OptimConfig = field(default_factory=AdamWConfig, metadata={"variants": OPTIMS})
    schedule: ScheduleConfig = field(default_factory=CosineConfig, metadata={"variants": SCHEDULES})
    data: CorpusConfig = field(default_factory=TinyShakespeareConfig, metadata={"variants": CORPORA})
    fault: FaultConfig = field(default_factory=FaultConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)

    @property
    def lr_decay_iters(self) -> int | None:
        """The iteration at which the learning rate's decay is over; None for a schedule without one."""
        return self.schedule.decay_end(self.max_iters) if isinstance(self.schedule, DecayConfig) else None

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
        if isinstance(self.data, DataConfig) and self.data.tokenizer == "bpe":
            config["data"]["vocab_size"] = self.data.bpe_vocab_size
        flat = {key: value for key, value in flatten(config).items() if key not in FREE_KEYS}
        return {key: value for key, value in flat.items() if key not in LATER_KEYS or value != LATER_KEYS[key]}

    @property
    def label(self) -> str:
        """Readable name of the setting, without fold and seed."""
        parts = [self.model.name, self.attention.name]
        if isinstance(self.attention, GQAConfig):
            parts[1] += f"{self.attention.n_kv_head}"
        if isinstance(self.qk_clip, QKClipConfig):
            parts.append(f"clip{self.qk_clip.threshold:g}")
        if isinstance(self.qk_norm, LpQKNormConfig):
            p = self.qk_norm.p
            parts.append(f"lp_p{p if isinstance(p, str) else format(p, 'g')}_{self.qk_norm.alpha_init}")
        else:
            parts.append(self.qk_norm.name)
        recipe = [
            f"FAULT_{self.fault.name}" if self.fault.name != FaultConfig.name else "",
            self.optim.name if self.optim.name != AdamWConfig.name else "",
            self.schedule.name if self.schedule.name != CosineConfig.name else "",
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
        number = self.data.fold if isinstance(self.data, DataConfig) else None
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
            not (isinstance(self.attention, MLAConfig) and self.attention.qk_norm_layout == "unified")
            or self.qk_norm.name != "none",
            "attention.qk_norm_layout=unified needs a QK norm, not qk_norm=none",
        )
        require(
            not isinstance(self.qk_clip, QKClipConfig) or self.qk_norm.name == "none",
            f"qk_clip=clip needs qk_norm=none: with qk_norm={self.qk_norm.name} the weights' scale does not reach the"
            " logits",
        )
        require(
            self.fault.name != "loss_over_accumulation" or self.gradient_accumulation_steps > 1,
            "fault=loss_over_accumulation needs gradient_accumulation_steps > 1",
        )
        if isinstance(self.schedule, DecayConfig):
            self.schedule.check_decay(self.max_iters, self.optim.learning_rate)
        if isinstance(self.qk_norm, LpQKNormConfig) and self.qk_norm.alpha_init == "henry":
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


@dataclass(frozen=True)
class PrepareFineWebConfig:
    """data/prepare_fineweb.py. name: null is sample-10BT of FineWeb, and a data set's only configuration elsewhere."""

    dataset: str = "HuggingFaceFW/fineweb"
    name: str | None = None
    split: str = "train"
    column: str = "text"
    out: str | None = None
    tokenizer: str = "gpt2"
    vocab_size: int | None = None
    learn_bytes: int | None = None
    max_tokens: int | None = None
    shard_tokens: int = 100_000_000
    val_fraction: float = 0.001
    workers: int | None = None
    verify: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the shards, resolved."""
        resolved = asdict(self)
        for key in ("out", "workers", "verify"):
            del resolved[key]
        if self.name is None and self.dataset == PrepareFineWebConfig.dataset:
            resolved["name"] = "sample-10BT"
        if self.tokenizer == "bpe":
            resolved["vocab_size"] = 2**15 if self.vocab_size is None else self.vocab_size
            resolved["learn_bytes"] = 100_000_000 if self.learn_bytes is None else self.learn_bytes
        return resolved

    def check(self) -> None:
        for key in ("dataset", "split", "column"):
            require(getattr(self, key) != "", f"{key}= must not be empty")
        require(self.out != "", "out= must name a folder, or be null")
        one_of("tokenizer", self.tokenizer, ("gpt2", "bpe"))
        check_vocab_size("", self.tokenizer, self.vocab_size)
        require(
            self.learn_bytes is None or self.tokenizer == "bpe",
            f"learn_bytes={self.learn_bytes} needs tokenizer=bpe: tokenizer={self.tokenizer} learns nothing",
        )
        for key in ("learn_bytes", "max_tokens", "shard_tokens"):
            value = getattr(self, key)
            require(value is None or 1 <= value < 2**53, f"{key}={value} must be >= 1 and < 2**53")
        require(0 < self.val_fraction < 1, f"val_fraction={self.val_fraction} must be in (0, 1)")
        if self.workers is not None:
            at_least("workers", self.workers, 1)


def at_least(key: str, value: int, least: int) -> None:
    require(least <= value < 2**31, f"{key}={value} must be >= {least} and < 2**31")


def one_of(key: str, value: str, allowed: tuple[str, ...], otherwise: str = "") -> None:
    require(value in allowed, f"{key}={value} must be one of {', '.join(allowed)} {otherwise}".rstrip())


def check_vocab_size(prefix: str, tokenizer: str, vocab_size: int | None) -> None:
    if vocab_size is not None:
        require(
            tokenizer == "bpe",
            f"{prefix}vocab_size={vocab_size} needs {prefix}tokenizer=bpe: {prefix}tokenizer={tokenizer} has its own",
        )
        at_least(f"{prefix}vocab_size", vocab_size, 257)


def check_common(seed: int, device: str, dtype: str) -> None:
    require(0 <= seed < 2**63, f"seed={seed} must be >= 0 and < 2**63")
    require(
        re.fullmatch(r"auto|cpu|mps|cuda(:\d{1,3})?", device) is not None,
        f"device={device} must be auto, cpu, mps, cuda or cuda:N",
    )
    one_of("dtype", dtype, ("auto", "float32", "bfloat16"))


def digest(settings: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}"""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = list(value) if isinstance(value, tuple) else value
    return flat


# -----------------------------------------------------------------------------
# From a mapping to dataclasses


def load_config(source: Mapping[str, Any]) -> TrainConfig:
    """A nested mapping (a composed config, or a run's config.yaml) as a checked TrainConfig.

    Raises: ConfigError naming key, value and rule.
    """
    config = build(TrainConfig, source)
    config.check()
    return config


def build(cls: type, source: Any, prefix: str = "") -> Any:
    """An instance of the dataclass `cls` from a mapping, with exact types and no unknown key."""
    name = prefix.rstrip(".") or "the config"
    require(isinstance(source, Mapping), f"{name}={show(source)} must be a group of settings")
    hints = type_hints(cls)
    known = {f.name: f for f in fields(cls)}
    for key, value in source.items():
        if key not in known:
            raise ConfigError(f"{prefix}{key}={show(value)} is unknown{did_you_mean(str(key), known, prefix)}")
    values = {}
    for key, spec in known.items():
        if key not in source:
            continue
        value = source[key]
        require(value != "???", f"{prefix}{key} must be given")
        if "variants" in spec.metadata:
            variants = spec.metadata["variants"]
            variant = value.get("name") if isinstance(value, Mapping) else value
            known_name = isinstance(variant, str) and variant in variants
            require(known_name, f"{prefix}{key}.name={show(variant)} must be one of {', '.join(variants)}")
            values[key] = build(variants[variant], value, f"{prefix}{key}.")
        elif dataclasses.is_dataclass(hints[key]):
            values[key] = build(typing.cast(type, hints[key]), value, f"{prefix}{key}.")
        else:
            values[key] = convert(value, hints[key], prefix + key)
    return cls(**values)


type_hints = functools.cache(typing.get_type_hints)  # of a dataclass: name -> type

TYPE_NAMES = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    list: "a list",
    dict: "a group",
    type(None): "null",
}


def convert(value: Any, hint: Any, key: str) -> Any:
    """`value` as the type `hint`: exact, but for an integer where a float is asked for."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for option in options:
        if typing.get_origin(option) is tuple:
            items = typing.get_args(option)
            if isinstance(value, list | tuple) and len(value) == len(items):
                return tuple(convert(v, t, key) for v, t in zip(value, items, strict=True))
        elif type(value) is option or (option is type(None) and value is None):
            return value
        elif option is float and type(value) is int:
            return float(value)
    if value != value:
        raise ConfigError(f"{key}=nan must be a number")
    wanted = [TYPE_NAMES.get(o) or f"a list of {len(typing.get_args(o))} numbers" for o in options]
    raise ConfigError(f"{key}={show(value)} must be {' or '.join(wanted)}")


def show(value: Any) -> str:
    return {True: "true", False: "false", None: "null"}[value] if isinstance(value, bool | None) else str(value)


def word(key: str, value: str) -> str:
    """key=value for a command line: in quotes where Hydra would take something in the value for syntax."""
    quoted = value.replace("'", "\\'")
    return f"{key}={value}" if re.fullmatch(r"[A-Za-z0-9_./:@%+~ -]+", value) else f"{key}='{quoted}'"


def did_you_mean(key: str, known: typing.Iterable[str], prefix: str = "") -> str:
    known = list(known)
    close = difflib.get_close_matches(key, known, 1, cutoff=0.5)
    if close:
        return f"; did you mean {prefix}{close[0]}?"
    return f"; known here: {', '.join(prefix + k for k in known)}" if known else ""


def to_yaml(config: TrainConfig) -> str:
    """A config.yaml's text; load_config of it is an equal TrainConfig."""
    import yaml

    settings = json.loads(json.dumps(asdict(config)))  # tuples as lists; inf stays inf
    return yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)


# -----------------------------------------------------------------------------
# Programs


HYDRA_OPTIONS = {
    "-h", "--help", "--hydra-help", "--version", "-c", "--cfg", "--resolve", "-p", "--package", "-r", "--run", "-m",
    "--multirun", "-sc", "--shell-completion", "-cp", "--config-path", "-cn", "--config-name", "-cd", "--config-dir",
    "--experimental-rerun", "-i", "--info",
}  # fmt: skip


def run_app(config_name: str, schema: type, program: Callable[[Any], int]) -> None:
    """Run `program(config)`, config an instance of `schema`, as a Hydra application (overrides, -m, --cfg, --help).

    Exits with the program's status. Whatever is wrong with the settings ends as one line on standard error and status
    2. In a multirun the other runs go on, and the highest status is the last word.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"  # hydra then raises, instead of printing and leaving with status 1
    import hydra
    from hydra.errors import HydraException
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    statuses = [0]

    def task(composed: DictConfig) -> None:
        try:
            config = build(schema, OmegaConf.to_container(composed, resolve=True))
            config.check()
            statuses.append(program(config))
            if statuses[-1] > 128:  # a signal stops a multirun too
                sys.exit(statuses[-1])
            sys.stdout.flush()
        except (ConfigError, OmegaConfBaseException) as error:
            statuses.append(refuse(str(error)))
        except BrokenPipeError:
            leave_output()
        except OSError as error:  # a full disk, say
            print(f"failed: {' '.join(str(error).split())}", file=sys.stderr)
            statuses.append(1)
        except Exception as error:
            if is_out_of_memory(error):
                said = " ".join(str(error).split())[:300]
                print(f"failed: out of memory ({said}); dry_run=true says what a run takes", file=sys.stderr)
            else:  # printed here: hydra would add its own lines to it
                traceback.print_exc()
            statuses.append(1)

    # hydra's parser takes no settings after an option that stands between them
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda word: word in ("-m", "--multirun"))
    for word in sys.argv[1:]:
        if re.fullmatch(r"--?[A-Za-z][\w-]*", word) and word not in HYDRA_OPTIONS:
            sys.exit(refuse(f"{word} is unknown: settings are written key=value, and --help lists them"))
        if word.startswith("--") and "=" in word and not word.startswith("--config") or word.startswith("~"):
            plain = word.lstrip("-~")
            sys.exit(refuse(f"{word} is not a setting: write {plain if '=' in plain else plain + '=...'}"))
    try:
        hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name=config_name)(task)()
    except KeyboardInterrupt:
        statuses.append(130)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        statuses.append(refuse(explain(error, schema, sys.argv[1:])))
    sys.exit(max(statuses))


def run_script(
    argv: list[str], doc: str | None, known: dict[str, Any], program: Callable[[dict[str, Any]], int]
) -> int:
    """Call program(values) with the values of key=value words, `known` as in read_words; --help prints `doc`.

    Returns the exit status: the program's, 2 for a word that cannot be used, 1 where a file cannot be written.
    """
    if {"-h", "--help"} & set(argv):
        print(doc)
        return 0
    try:
        values, others = read_words(argv, known)
        require(not others, f"{others[:1]} is unknown{did_you_mean(''.join(others[:1]), known)}")
        status = program(values)
        sys.stdout.flush()
        return status
    except ConfigError as error:
        return refuse(str(error))
    except BrokenPipeError:
        leave_output()
        return 0
    except OSError as error:  # a full disk, say
        print(f"failed: {' '.join(str(error).split())}", file=sys.stderr)
        return 1


def leave_output() -> None:
    """Whoever read our output has left, as head does: what else is printed goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def is_out_of_memory(error: Exception) -> bool:
    """PyTorch has a class of its own for a GPU's memory alone."""
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))


def parse_yaml(text: str, where: str) -> Any:
    """The content of YAML in which 1e-3 is a number, as it is to Hydra; PyYAML alone takes it for text.

    Raises: ConfigError that begins with `where`.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    exponent = re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", exponent, list("-+0123456789"))
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: {' '.join(str(error).split())}") from error


def read_words(argv: list[str], known: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """key=value words: those of `known` (key -> type) with the types it asks for, and the others as they are."""
    values: dict[str, Any] = {}
    others = []
    for word in argv:
        key, equals, text = word.partition("=")
        if key in known and equals:
            value = text if known[key] is str else parse_yaml(text, f"{word} is not key=value")
            values[key] = convert(value, known[key], key)
        else:
            others.append(word)
    return values, others


def refuse(message: str) -> int:
    """Say in one line what is wrong with the settings. Returns the exit status for that."""
    if os.environ.get("RANK", "0") == "0":  # under torchrun one rank speaks for all
        print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return 2


def explain(error: BaseException, schema: type, argv: list[str]) -> str:
    """One line for an error of Hydra's: the override that caused it and the rule."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    overrides = [a for a in argv if not a.startswith("-")]
    for override in overrides:
        try:
            OverridesParser.create().parse_override(override)
        except HydraException as syntax:
            reason = str(syntax).split("See https")[0]
            return f"{override} is not key=value: {reason}; quote what is not plain text, as in 'key=\"...\"'"
    text = str(error)
    unknown = re.search(r"Could not override '([^']+)'", text) or re.search(r"Key '([^']+)' is not in struct", text)
    if unknown:
        key = unknown[1]
        override = next((o for o in overrides if o.lstrip("+~").split("=")[0] == key), key)
        if key.split(".")[0] in ("sweep", "sweep_dir", "launcher"):
            return f"{override} is a word for sweeps/launch.py"
        group, _, leaf = key.rpartition(".")
        settings = list(flatten(asdict(schema())))
        variants = {f.name: f.metadata.get("variants", {}) for f in fields(schema)}.get(group, {})
        owners = [name for name, variant in variants.items() if leaf in {f.name for f in fields(variant)}]
        if owners:
            return f"{override} is unknown: {leaf} belongs to {' and '.join(f'{group}={name}' for name in owners)}"
        chosen = dict(o.lstrip("+").partition("=")[::2] for o in overrides).get(group)
        if chosen in variants:
            return f"{override} is unknown{did_you_mean(leaf, [f.name for f in fields(variants[chosen])], group + '.')}"
        elsewhere = [k for k in settings if k.rpartition(".")[2] == leaf]  # nanoGPT's flat names
        siblings = elsewhere or [k for k in settings if k.rpartition(".")[0] == group]
        return f"{override} is unknown{did_you_mean(key, siblings)}"
    missing = re.search(r"Could not find '([^']+)'", text)
    groups = [p.name for p in CONFIG_DIR.iterdir() if p.is_dir()]
    for override in overrides:
        group, _, option = override.lstrip("+").partition("=")
        if group in groups and (missing is None or missing[1] == f"{group}/{option}"):
            options = sorted(p.stem for p in (CONFIG_DIR / group).glob("*.yaml"))
            if option not in options:
                return f"{override} must be one of {', '.join(options)}"
    return text
