"""The state of a run after some updates: what a checkpoint has beside its tensors, in its state.json."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, get_type_hints

from core.schema import convert, require, show


@dataclass
class LowestLoss:
    """The lowest val/loss so far, and its iteration. Where max_iters is no multiple of eval_interval, the run ends with
    an extra evaluation. `keep_step` is then the best checkpoint before it, which a longer run would need."""

    loss: float = math.inf
    step: int | None = None
    keep_step: int | None = None
    before: tuple[float, int | None] = (math.inf, None)  # loss and step before the last evaluation

    def update(self, step: int, loss: float, extra: bool) -> None:
        """Take the loss of an evaluation."""
        self.keep_step = self.step if extra else None
        self.before = (self.loss, self.step)
        if loss < self.loss:
            self.loss, self.step = loss, step

    def before_step(self, step: int) -> tuple[float, int] | None:
        """Loss and iteration of the lowest val/loss before iteration `step`, the current one; None without any."""
        loss, found = self.before if self.step == step else (self.loss, self.step)
        return None if found is None else (loss, found)


@dataclass(frozen=True)
class Readings:
    """What the meter has read."""

    train_loss: float | None = None  # of the last finite update
    clip_metrics: dict[str, float] = field(default_factory=dict)  # QK-Clip's, since the last line
    seconds: float = 0.0  # of the whole run, over all resumes
    train_seconds: float = 0.0  # of its updates alone


UNKNOWN = "unknown"  # corpus_sha256 of imported weights


@dataclass(frozen=True)
class Facts:
    """What is recorded with a run besides its settings: in its summary, its checkpoints and W&B. A checkpoint of an
    earlier version lacks some; None is "not known", or "there is none"."""

    sdpa: str | None = None  # on a GPU, the backend of attention
    plugins: dict[str, str] | None = None
    init_from: dict[str, str] | None = None  # path -> SHA-256 of its weights
    dtype: str | None = None
    corpus_sha256: str | None = None
    device: str | None = None
    compile: bool | None = None
    deterministic: bool | None = None
    ranks: int | None = None
    commit: str | None = None
    kernels: bool | None = None
    parameters: int | None = None
    vocab_size: int | None = None
    tokens: int | None = None
    held_out_tokens: int | None = None
    cache_bytes_per_token: int | None = None
    torch: str | None = None
    python: str | None = None
    threads: int | None = None
    fault: str | None = None  # the losses are wrong on purpose
    start_up_warnings: list[str] | None = None  # of a run with a fault
    sees_future: str | None = None  # how a trained model does

    def to_json(self) -> dict[str, Any]:
        """None is left out, but that of the commit: outside a checkout there is none."""
        return {key: value for key, value in asdict(self).items() if value is not None or key == "commit"}

    @property
    def commits(self) -> list[str]:
        """Of the code that trained the run, the oldest first."""
        return self.commit.split(", ") if self.commit else []


KINDS = {**get_type_hints(Facts), "start_up_warnings": list | None}


@dataclass(frozen=True)
class RunState:
    """What state.json has. The tensors of model and optimizer are those of Session.tensors()."""

    step: int  # updates made
    config: dict[str, Any]
    tokenizer: dict[str, Any]
    facts: Facts
    evaluation_due: bool = False  # at this step: a resume makes it (again), as the records are cut back to before it
    readings: Readings = Readings()
    lowest: tuple[float, int] | None = None  # the lowest val/loss before this step, and its iteration
    records: dict[str, str] = field(default_factory=dict)  # file -> SHA-256 of what it then had

    def to_json(self) -> dict[str, Any]:
        """state.json but its records, which are known when the checkpoint is written."""
        meter = self.readings
        lowest = {} if self.lowest is None else {"lowest": self.lowest}
        return {
            "step": self.step, "evaluated": self.evaluation_due, "train/loss": meter.train_loss,
            "qk_clip": meter.clip_metrics, "seconds": meter.seconds, "train_seconds": meter.train_seconds,
            "config": self.config, "tokenizer": self.tokenizer, **self.facts.to_json(), **lowest,
        }  # fmt: skip

    @classmethod
    def from_json(cls, saved: Mapping[str, Any], file: str = "state.json") -> "RunState":
        """Raises: ConfigError that names the file and the key of a wrong type or value. Unknown keys are ignored."""

        def read(key: str, kind: Any, default: Any = None) -> Any:
            return convert(saved[key], kind, f"{file}: {key}") if key in saved else default

        step, clip = read("step", int, -1), read("qk_clip", dict, {})
        require(step >= 0, f"{file}: step={show(saved.get('step'))} must be an integer >= 0")
        numbers = all(isinstance(value, int | float) for value in clip.values())
        require(numbers, f"{file}: qk_clip={show(clip)} must be numbers")
        facts = {key: read(key, kind) for key, kind in KINDS.items()}
        lowest, records = read("lowest", tuple[float, int]), read("records", dict, {})
        named = {key: facts[key] or {} for key in ("plugins", "init_from", "start_up_warnings")} | {"records": records}
        for key, found in named.items():
            texts = found.values() if isinstance(found, dict) else found
            require(all(isinstance(text, str) for text in texts), f"{file}: {key}={show(found)} must hold text")
        least = [f"{key}={facts[key]}" for key in ("threads", "ranks") if facts[key] is not None and facts[key] < 1]
        require(not least, f"{file}: {', '.join(least)} must be >= 1")
        reached = lowest is None or (math.isfinite(lowest[0]) and lowest[1] >= 0)
        require(reached, f"{file}: lowest={lowest} must be a finite loss, and its iteration")
        seconds = {key: read(key, float, 0.0) for key in ("seconds", "train_seconds")}
        for key, value in seconds.items():
            require(0 <= value < 1e10, f"{file}: {key}={value} must be a finite number >= 0 and < 1e10")
        return cls(
            step=step,
            config=read("config", dict, {}),
            tokenizer=read("tokenizer", dict, {}),
            facts=Facts(**facts),
            evaluation_due=read("evaluated", bool, False),
            readings=Readings(read("train/loss", float | None), clip, **seconds),
            lowest=lowest,
            records=records,
        )


def checked(saved: dict[str, Any], file: str = "state.json") -> dict[str, Any]:
    """The content of a state.json as it was saved, {} where there is none. Raises: ConfigError, as from_json() does."""
    if saved:
        RunState.from_json(saved, file)
    return saved
