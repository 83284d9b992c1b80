"""The settings of a training run: TrainConfig joins those of the model, the data and the optimizer. Free of torch."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from core.files import FOLDERS, expand
from core.plugins import Slot, add_options, load_plugins, load_stored
from core.schema import (
    FREE,
    NOT_EMPTY,
    NOT_NEGATIVE,
    POSITIVE,
    AtLeast,
    BeforeItExisted,
    Between,
    Help,
    Loads,
    Rule,
    Variants,
    build,
    deciding,
    declared,
    digest,
    options,
    require,
    settings_of,
)
from data.options import CORPORA, CorpusOptions, FoldedTextOptions, TinyShakespeareOptions
from model.options import GPTConfig, GQAOptions

FOLDERS["plan.jsonl"] = "a sweep"  # as sweeps/plan.py writes one


@options
class NoClipOptions:
    """Nothing is clipped or recorded"""

    name: str = "none"


@options
class LogClipOptions(NoClipOptions):
    """Log the exact maximal logits, of any attention and QK norm, and clip nothing"""

    name: str = "log"


@options
class QKClipOptions(NoClipOptions):
    """QK-Clip (Kimi K2): scale the weights of a head back whose largest logit exceeds threshold; needs qk_norm=none"""

    name: str = "clip"
    threshold: Annotated[float, POSITIVE, Help("heads with a larger logit are clipped")] = 100.0
    balance: Annotated[float, Between(0, 1), Help("gamma^balance scales queries, gamma^(1 - balance) keys")] = 0.5


@options
class OptimizerOptions:
    """The base of optimizers. One of your own: training/optim.py says what its class receives."""

    slot = Slot("torch.optim:Optimizer", "training.optim")
    name: str
    learning_rate: Annotated[float, POSITIVE, Help("the highest one of the schedule")] = 1e-3


@options
class AdamWOptions(OptimizerOptions):
    """AdamW"""

    name: str = "adamw"
    betas: Annotated[
        tuple[float, float],
        Rule(lambda betas: all(0 <= b < 1 for b in betas), "must each be in [0, 1)"),
        Help("AdamW's"),
    ] = (0.9, 0.99)
    weight_decay: Annotated[float, NOT_NEGATIVE, Help("weight decay of matrices")] = 0.1


@options
class MuonOptions(AdamWOptions):
    """Muon for the matrices of the blocks, AdamW for the rest"""

    name: str = "muon"
    momentum: Annotated[float, Between(0, 1, "[)"), Help("Muon's")] = 0.95
    nesterov: Annotated[bool, Help("Muon's")] = True
    ns_steps: Annotated[int, Between(1, 99), Help("Newton-Schulz iterations of Muon")] = 5


WARMUP = 100  # iterations
MinLR = Annotated[float, NOT_NEGATIVE, Help("the learning rate at the end")]


@options
class ScheduleOptions:
    """The base of schedules. One of your own overrides height(): register(ItsOptions), there is no other class."""

    slot = Slot()
    name: str
    warmup_iters: Annotated[
        int | None,
        AtLeast(0),
        Help(f"null: {WARMUP}, but not more than a tenth of the iterations until the decay ends"),
    ] = None

    def warmup(self, end: int | None) -> int:
        """Iterations of warm-up. end: of the decay; None for a schedule without one."""
        if self.warmup_iters is not None:
            return self.warmup_iters
        return WARMUP if end is None else min(WARMUP, end // 10)

    def height(self, step: int, end: int | None) -> float:
        """The learning rate of update `step`, after the warm-up: 1 is learning_rate, 0 is min_lr or without one 0."""
        return 1.0


@options
class ConstantOptions(ScheduleOptions):
    """Warm-up, then learning_rate: nothing depends on the length of the run"""

    name: str = "constant"


@options
class DecayOptions(ScheduleOptions):
    """The base of schedules that end at min_lr. One of your own overrides remaining()."""

    min_lr: MinLR = 0.0
    lr_decay_iters: Annotated[int | None, AtLeast(1), Help("the iteration of that end; null: max_iters")] = None

    def decay_start(self, end: int) -> float:
        """The iteration from which a decay that is over at `end` goes down."""
        return self.warmup(end)

    def decay_end(self, max_iters: int) -> int:
        return max_iters if self.lr_decay_iters is None else self.lr_decay_iters

    def height(self, step: int, end: int | None) -> float:
        assert end is not None
        start = self.decay_start(end)
        return self.remaining(0.0 if step <= start else 1.0 if step >= end else (step - start) / (end - start))

    def remaining(self, x: float) -> float:
        """The height after a share x of the decay."""
        return 1 - x

    def check_decay(self, max_iters: int, learning_rate: float) -> None:
        end = self.decay_end(max_iters)
        allowed = self.min_lr <= learning_rate
        require(allowed, f"schedule.min_lr={self.min_lr} must be <= optim.learning_rate={learning_rate}")
        require(
            self.warmup(end) < end,
            f"schedule.warmup_iters={self.warmup_iters} must be < {end}"
            " (schedule.lr_decay_iters, by default max_iters); schedule.warmup_iters=null suits a short run",
        )


@options
class CosineOptions(DecayOptions):
    """Warm-up, then half a cosine down to min_lr (nanoGPT's)"""

    name: str = "cosine"
    min_lr: MinLR = 1e-4

    def remaining(self, x: float) -> float:
        return 0.5 * (1 + math.cos(math.pi * x))


@options
class LinearOptions(DecayOptions):
    """Warm-up, then a straight line down to min_lr"""

    name: str = "linear"


@options
class WSDOptions(DecayOptions):
    """Warm-up, stable, decay with 1 - sqrt"""  # Haegele et al. 2024

    name: str = "wsd"
    decay_frac: Annotated[float, Between(0, 1, "(]"), Help("the decay's share of lr_decay_iters")] = 0.2

    def decay_start(self, end: int) -> float:
        return end - self.decay_frac * end

    def remaining(self, x: float) -> float:
        return 1 - math.sqrt(x)

    def check_decay(self, max_iters: int, learning_rate: float) -> None:
        super().check_decay(max_iters, learning_rate)
        end = self.decay_end(max_iters)
        require(
            self.warmup(end) <= self.decay_start(end),
            f"schedule.warmup_iters={self.warmup(end)} must be <= {self.decay_start(end):g}, where the decay begins:"
            f" schedule.decay_frac={self.decay_frac} of {end} (schedule.lr_decay_iters, by default max_iters)",
        )


FAULTS = {  # name -> what it does
    "none": "no fault",
    "no_mask": "attention over all keys, as in equation 8 of Robust GQA",
    "heads_as_time": "queries, keys and values become heads by a view without a transpose: heads and time mix",
    "repeated_in_time": "GQA's keys and values are repeated along time, not along heads",
    "unshifted_labels": "the target of a token is the token itself",
    "loss_over_accumulation": "the reported training loss is divided by the number of micro-batches once too often",
    "repeated_batches": "every iteration gets the micro-batches of the first one",
    "small_sample": "training draws from 64 times block_size tokens alone",
    "padding_in_mean": "a window is 1/16 text and 15/16 padding, whose prediction counts in the mean",
}


@options
class FaultOptions:
    """A fault that makes the loss too good to be true, on purpose: training/faults.py."""

    name: Annotated[str, BeforeItExisted("none")] = "none"


@options
class WandbOptions:
    mode: Annotated[
        Literal["auto", "online", "offline", "disabled"],
        Help("auto: online with an API key, else offline"),
    ] = "auto"
    project: Annotated[
        str,
        Rule(
            lambda name: re.fullmatch(r"[^/\\#?%:]{1,128}", name) is not None,
            "must be 1 to 128 characters, none of / \\ # ? % :",
        ),
        Help("name of the W&B project"),
    ] = "nanoqk"
    entity: Annotated[str | None, NOT_EMPTY, Help("user or team; null: the account's own choice")] = None
    name: Annotated[str | None, NOT_EMPTY, Help("of the run; null: the directory's name")] = None
    group: Annotated[str | None, Help("null: one group for all folds and seeds of the same settings")] = None
    tags: Annotated[
        tuple[str, ...],
        Rule(lambda tags: all(0 < len(tag) <= 64 for tag in tags), "must each have 1 to 64 characters"),
        Help("further tags, as [night,retry]"),
    ] = ()
    notes: Annotated[str | None, Help("a text about the run")] = None
    media: Annotated[
        Literal["auto", "on", "off"],
        Help("samples of text (samples.jsonl, too), values by layer; auto: off in sweeps and without W&B"),
    ] = "auto"
    artifacts: Annotated[bool, Help("upload the best checkpoint and metrics.jsonl at the end")] = False


QK_CLIPS: dict[str, type[NoClipOptions]] = {"none": NoClipOptions, "log": LogClipOptions, "clip": QKClipOptions}
for ours in (AdamWOptions, MuonOptions, CosineOptions, WSDOptions, LinearOptions, ConstantOptions):
    add_options(ours.slot.options, ours)

Seed = Annotated[int, AtLeast(0, bits=63), Help("seed of every random number")]
Device = Annotated[
    str,
    Rule(
        lambda name: re.fullmatch(r"auto|cpu|mps|cuda(:(0|[1-9]\d{0,2}))?", name) is not None,
        "must be auto, cpu, mps, cuda or cuda:N",
    ),
    Help("auto: cuda, mps or cpu; or cpu, cuda, cuda:1, mps"),
]
Dtype = Annotated[Literal["auto", "float32", "bfloat16"], Help("auto: bfloat16 where there is hardware for it")]


# A FREE setting may change when a run is resumed. Some still change the numbers from there on: another `device`,
# `compile`, `threads` or `deterministic` rounds differently, and another `device` or `compile` draws other dropout
# masks; the run warns.
# If dtype=auto means another dtype, check_resumable() refuses. `init_from` is free as `init_sha256` decides.
@options
class RootOptions:
    """The settings that stand in no group."""

    out_dir: Annotated[
        str | None, FREE, NOT_EMPTY,
        Help("null: runs/ + a readable name + a hash of what decides the numbers"),
    ] = None  # fmt: skip
    init_from: Annotated[
        str | None,
        FREE,
        NOT_EMPTY,
        Rule(
            lambda name: name not in ("resume", "scratch"),
            "is not needed: a command goes on with what it began, or begins",
        ),
        Help(
            "begin with the weights of RUN (its best), RUN/ckpt/latest, nanoGPT's ckpt.pt, a Hugging Face folder, gpt2"
        ),
    ] = None
    init_sha256: Annotated[
        str | None,
        BeforeItExisted(None),
        Rule(lambda sha256: re.fullmatch(r"[0-9a-f]{64}", sha256) is not None, "must be 64 hexadecimal digits"),
        Help("the SHA-256 of init_from's weights; null: taken from them at the start"),
    ] = None
    seed: Seed = 1337
    device: Annotated[Device, FREE] = "auto"
    dtype: Annotated[Dtype, FREE] = "auto"
    compile: Annotated[bool | Literal["auto"], FREE, Help("torch.compile; auto: on CUDA only")] = "auto"
    deterministic: Annotated[
        bool, FREE, Help("a GPU computes the same bits each time, and slower; a CPU does so in any case")
    ] = False
    threads: Annotated[
        int | None,
        FREE,
        AtLeast(1),
        Help("CPU threads; null: torch's choice, but CPUs that other programs have kept busy are left to them"),
    ] = None
    batch_size: Annotated[int, AtLeast(1), Help("sequences a micro-batch")] = 64
    gradient_accumulation_steps: Annotated[
        int,
        AtLeast(1),
        Help("micro-batches an iteration, divided among the ranks of torchrun"),
    ] = 1
    max_iters: Annotated[int, FREE, AtLeast(1), Help("updates of the weights")] = 5000
    grad_clip: Annotated[float, NOT_NEGATIVE, Help("largest norm of the gradient; 0: off")] = 1.0
    eval_interval: Annotated[int, FREE, AtLeast(1), Help("iterations between exact evaluations")] = 250
    eval_iters: Annotated[
        int, FREE, AtLeast(0), Help("> 0: nanoGPT's sampled estimate of that many batches as well, for comparison")
    ] = 0
    log_interval: Annotated[int, FREE, AtLeast(1), Help("iterations between lines of metrics.jsonl")] = 10
    checkpoint_interval: Annotated[int, FREE, AtLeast(1), Help("iterations between checkpoints")] = 250
    plot: Annotated[
        bool | Literal["auto"], FREE, Help("draw the loss curve into the run directory at the end; auto: not in sweeps")
    ] = "auto"
    dry_run: Annotated[bool, FREE, Help("print what the run would be and cost; write nothing")] = False
    eval_only: Annotated[bool, FREE, Help("evaluate the latest checkpoint, then stop")] = False
    plugins: Annotated[
        tuple[str, ...],
        FREE,
        Loads(load_stored, asked=load_plugins),
        Help("modules that register variants of a group, as [my_norm]"),
    ] = ()
    fresh: Annotated[bool, FREE, Help("move an older run in the same directory aside and start anew")] = False


@options
class TrainConfig(GPTConfig, RootOptions):
    """All settings. Those of the last base class come first: RootOptions, the groups of the model, these groups."""

    qk_clip: Annotated[NoClipOptions, Variants(QK_CLIPS), Help("a bound on the largest logits")] = NoClipOptions()
    optim: Annotated[OptimizerOptions, Help("the optimizer")] = AdamWOptions()
    schedule: Annotated[ScheduleOptions, Help("the learning rate over the run")] = CosineOptions()
    data: Annotated[CorpusOptions, Variants(CORPORA), Help("the corpus")] = TinyShakespeareOptions()
    fault: Annotated[
        FaultOptions, Variants(dict.fromkeys(FAULTS, FaultOptions), FAULTS), Help("train wrongly on purpose")
    ] = FaultOptions()
    wandb: Annotated[WandbOptions, FREE, Help("Weights & Biases")] = WandbOptions()
    elsewhere: ClassVar = dict.fromkeys(("sweep", "sweep_dir", "launcher"), "sweeps/launch.py")  # who takes these
    # what nanoGPT's users, and others, write -> what to write here; {} is the value
    foreign: ClassVar = {
        "lr": "optim.learning_rate={}", "beta1": "optim.betas=[{},0.99]", "beta2": "optim.betas=[0.9,{}]",
        "decay_lr": "schedule=cosine", "decay_lr=false": "schedule=constant",
        "grad_accum": "gradient_accumulation_steps={}",
        "dataset": "data=bin data.path=data/{}", "dataset=shakespeare_char": "data=tiny_shakespeare",
        "always_save_checkpoint": "checkpoint_interval=250", "run": "out_dir={}", "wandb_run_name": "wandb.name={}",
        "wandb_log": "wandb.mode=online", "wandb_log=false": "wandb.mode=disabled", "enabled": "wandb.mode=auto",
        "wandb_project": "wandb.project={}",
        ".py": "model=baby_gpt", "config/train_gpt2.py": "model=gpt2_124m data=fineweb",
        "config/finetune_shakespeare.py": "init_from=gpt2-xl data.tokenizer=gpt2",
    }  # fmt: skip

    @staticmethod
    def begun_with(given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """group -> values that replace its defaults: those of init_from. given: what the command line names."""
        if given.get("init_from") is None:
            return {}
        from training.init_from import begun_with  # which loads torch

        return begun_with(given)

    @property
    def gpt(self) -> GPTConfig:
        """The groups of the model alone."""
        return GPTConfig(**{name: getattr(self, name) for name in declared(GPTConfig)})

    @property
    def lr_decay_iters(self) -> int | None:
        """The iteration at which the learning rate's decay is over; None for a schedule without one."""
        return self.schedule.decay_end(self.max_iters) if isinstance(self.schedule, DecayOptions) else None

    @property
    def warmup_iters(self) -> int:
        return self.schedule.warmup(self.lr_decay_iters)

    @property
    def tokens_per_iter(self) -> int:
        return self.batch_size * self.gradient_accumulation_steps * self.model.block_size

    @property
    def trajectory(self) -> dict[str, Any]:
        """Flat {key: value} of the settings that decide the weights and the losses, resolved."""
        schedule, data = replace(self.schedule, warmup_iters=self.warmup_iters), self.data
        if isinstance(schedule, DecayOptions):
            schedule = replace(schedule, lr_decay_iters=self.lr_decay_iters)
        if isinstance(data, FoldedTextOptions) and data.tokenizer == "bpe":
            data = replace(data, vocab_size=data.bpe_vocab_size)
        return deciding(replace(self, schedule=schedule, data=data))

    @property
    def label(self) -> str:
        """Readable name of the setting, without fold and seed."""
        clip = f"clip{self.qk_clip.threshold:g}" if isinstance(self.qk_clip, QKClipOptions) else ""
        recipe = [
            f"from_{self.init_sha256[:8]}" if self.init_sha256 is not None else "",
            f"FAULT_{self.fault.name}" if self.fault.name != FaultOptions.name else "",
            self.optim.name if self.optim.name != AdamWOptions.name else "",
            self.schedule.name if self.schedule.name != CosineOptions.name else "",
        ]
        slots = [one.label for one in self.variants.values()]
        parts = [self.model.name, self.attention.label, clip, self.qk_norm.label, *slots, *recipe, self.data.name]
        return "-".join(filter(None, parts))

    @property
    def group(self) -> str:
        """Name of the setting, one for all its folds and seeds: W&B averages over it."""
        return f"{self.label}-{digest({k: v for k, v in self.trajectory.items() if k not in ('seed', 'data.fold')})}"

    @property
    def run_dir(self) -> Path:
        return Path("runs") / self.run_id if self.out_dir is None else expand(self.out_dir)

    @property
    def run_id(self) -> str:
        """A name that all runs with these numbers have, wherever they stand."""
        fold_number = self.data.fold if isinstance(self.data, FoldedTextOptions) else None
        fold = "" if fold_number is None else f"-fold{fold_number}"
        files = (getattr(self.data, key, None) or "" for key in ("path", "val_path"))
        file = " ".join(Path(file).name for file in files).rstrip()
        return f"{self.label}{fold}-s{self.seed}-{digest({**self.trajectory, 'data.path': file})}"

    def check(self) -> None:
        both = self.eval_only and self.fresh
        require(not both, "eval_only=true needs a checkpoint, and fresh=true starts without one")
        require(
            self.init_sha256 is None or self.init_from is not None, f"init_sha256={self.init_sha256} needs init_from"
        )
        super().check()
        require(
            not isinstance(self.qk_clip, QKClipOptions) or self.qk_norm.name == "none",
            f"qk_clip=clip needs qk_norm=none: with qk_norm={self.qk_norm.name} the weights' scale does not reach the"
            " logits",
        )
        for group in ("logits", "softmax"):
            allowed = self.fault.name != "no_mask" or group not in self.variants
            require(allowed, f"fault=no_mask replaces the whole softmax: remove {group}=")
        own = self.fault.name == "no_mask" and self.attention.name == "softpick"
        require(not own, "fault=no_mask replaces the whole softmax, which attention=softpick does not have")
        require(
            self.fault.name != "loss_over_accumulation" or self.gradient_accumulation_steps > 1,
            "fault=loss_over_accumulation needs gradient_accumulation_steps > 1",
        )
        groups = isinstance(self.attention, GQAOptions) and self.attention.n_kv_head < self.model.n_head
        require(self.fault.name != "repeated_in_time" or groups, "fault=repeated_in_time needs attention=gqa")
        if isinstance(self.schedule, DecayOptions):
            self.schedule.check_decay(self.max_iters, self.optim.learning_rate)


def load_config(source: Mapping[str, Any]) -> TrainConfig:
    """A nested mapping (a composed config, or a run's config.yaml) as a checked TrainConfig. Raises: ConfigError."""
    return settings_of(TrainConfig, source)


def stored_config(source: Mapping[str, Any]) -> TrainConfig:
    """A config.yaml, or a config of a plan, for programs that only read: nothing is imported, no rule is checked."""
    return build(TrainConfig, source, reads=True)


def to_yaml(config: Any) -> str:
    """A settings class as YAML. Of a TrainConfig it is config.yaml's text: load_config of it is an equal one."""
    import yaml

    settings = json.loads(json.dumps(asdict(config)))  # tuples as lists; inf stays inf
    return yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
