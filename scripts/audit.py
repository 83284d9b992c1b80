"""Is a loss too good to be true? python scripts/audit.py run=RUN, or model=FOLDER of a causal Hugging Face model

Four checks, each with a verdict; V is the size of the vocabulary:
  future leakage      other tokens from some position on leave the logits before it alone, in evaluation and in training
  step-0 loss         on uniformly random tokens a fresh model's loss is the cross-entropy of its logits with the next
                      tokens, and that of a guess, about ln V; the targets are no one token's
  random-token floor  trained on uniformly random tokens, a fresh model's loss stays above ln V; so it is of the weights
  accumulation        loss and gradient (of a run its norm, on one window) are the same in 1, 2 and 4 micro-batches
A run is checked with its fault, if it has one, and trained by train.py itself; a Hugging Face model is checked with its
own loss, and trained with AdamW. Settings: steps=200 and vocab_size=256 of the training on random tokens,
checkpoint=best|latest, device=auto, trust_remote_code=true to run a folder's own code.
Ends with one JSON line. A check that cannot be made, as the model diverges, its own code fails or memory runs out, is
undecided. Exit status: 0 nothing was caught, 1 something was, 2 a bad setting, 3 nothing was, but a check is undecided
or the program failed. model= needs transformers.
"""

import contextlib
import io
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import train
from core.cli import run_script
from core.device import resolve_device
from core.metrics import Metrics
from core.rundir import commit
from core.schema import ConfigError, at_least, one_of, require
from data.batches import Batches
from data.corpora import one_line
from data.options import RandomOptions
from data.tokens import load_corpus
from model.diagnostics import LEAK_TOLERANCE, future_leaks
from model.gpt import positions_with_logits
from sample import open_run
from training import faults
from training.checks import CROSS_ENTROPY_TOLERANCE, INITIAL_LOSS_TOLERANCE, crowding
from training.config import ConstantOptions, WandbOptions, check_common
from training.session import build_model

T = 64  # positions of a Hugging Face model that are looked at, where it has as many
CONTEXT = 512  # for future leakage
SIGMAS, LEAST = 5, 0.01  # how far below the floor a loss is no chance: standard errors, and nats
AGREE = 1e-3  # relative difference that round-off explains
SEED = 20251028  # of the random tokens: not those that a run with data=random was trained on


@dataclass(frozen=True)
class Finding:
    check: str
    caught: bool | None  # None: undecided
    text: str
    numbers: dict[str, Any]


class Undecided(Exception):
    """A check cannot be made, and that is no evidence either way."""


class Subject(Protocol):
    """What is audited. Models are forward(idx, targets), both (B, T) -> logits (B, T, V), mean loss."""

    about: dict[str, Any]
    trained: nn.Module
    vocab_size: int
    block_size: int
    context: int  # that the model can have, at least block_size

    def fresh(self) -> nn.Module: ...
    def batches(self, vocab_size: int) -> Batches:
        """Of uniformly random tokens."""

    def train(self, steps: int, vocab_size: int) -> tuple[list[float], int]:
        """The losses of a fresh model's training on random tokens, as reported, and the tokens of each."""

    def update(self, micro_batches: int) -> tuple[float, Tensor]:
        """Loss and gradient, or its norm, of the same four sequences in as many micro-batches."""


class Run:
    """A run directory's model, with the run's fault."""

    def __init__(self, run: str, which: str, device: torch.device):
        model, _, state = open_run(run, which, device)
        self.config, self.device = replace(model.config, device=str(device)), device
        self.vocab_size, self.block_size, self.context = model.vocab_size, model.block_size, model.block_size
        self.about = {"run": run, "iter": state["step"], "fault": self.config.fault.name}
        require(self.block_size > 1, f"run={run} has model.block_size=1: no token is before another")
        self.trained: nn.Module = model
        faults.inject_into_model(self.config, model)

    def fresh(self) -> nn.Module:
        model = build_model(self.config, self.vocab_size)
        model.init_weights(self.config.seed)
        faults.inject_into_model(self.config, model)
        return model.to(self.device)

    def batches(self, vocab_size: int) -> Batches:
        found = random_batches(vocab_size, self.block_size, max(1, 512 // self.block_size))
        faults.inject_into_batches(self.config, found)
        return found

    def train(self, steps: int, vocab_size: int) -> tuple[list[float], int]:
        n, val = steps * self.config.tokens_per_iter, 2 * self.block_size
        # ten times as many as are drawn, or it could learn them by heart
        data = RandomOptions("random", min(max(10 * n, 10**6), 10**9), vocab_size, val, SEED)
        # of the run's own warm-up as large a part
        warmup = max(steps // 20, round(steps * self.config.schedule.warmup_iters / self.config.max_iters))
        lines = self.metrics(data=data, max_iters=steps, schedule=ConstantOptions(warmup_iters=min(warmup, steps)))
        losses = [line["train/loss"] for line in lines if line.get("train/loss") is not None]  # null: not finite
        if len(losses) < steps:
            raise Undecided(f"its training on random tokens diverges at iteration {len(losses)}")
        return losses, self.config.tokens_per_iter

    def update(self, micro_batches: int) -> tuple[float, Tensor]:
        # one window of training tokens: all sequences are equal, however they are dealt out
        n, val = self.block_size + 1, 2 * self.block_size
        line = self.metrics(
            data=RandomOptions(n_tokens=n + val, vocab_size=self.vocab_size, val_tokens=val), max_iters=1,
            schedule=ConstantOptions(warmup_iters=0), model=replace(self.config.model, dropout=0.0),
            batch_size=4 // micro_batches, gradient_accumulation_steps=micro_batches,
        )[0]  # fmt: skip
        if line.get("train/loss") is None or line.get("grad_norm") is None:  # null: not finite
            raise Undecided("its first loss or gradient is not finite")
        return line["train/loss"], torch.tensor(line["grad_norm"])

    def metrics(self, **changes: Any) -> list[dict[str, Any]]:
        """metrics.jsonl of a run of train.py with the run's settings, but for `changes`."""
        end: int = changes["max_iters"]
        plain: dict[str, Any] = {
            "log_interval": 1, "eval_interval": end, "checkpoint_interval": end, "eval_iters": 0, "plot": False,
            "dry_run": False, "eval_only": False, "fresh": False, "dtype": "float32",
            "wandb": WandbOptions(mode="disabled"),
        }  # fmt: skip
        said = io.StringIO()
        with (
            tempfile.TemporaryDirectory() as folder,
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(said),
        ):
            status = train.run(replace(self.config, **(plain | changes), out_dir=f"{folder}/run"))
            if status > 128:
                sys.exit(status)
            return Metrics.read(Path(folder) / "run" / "metrics.jsonl")


class WithLabels(nn.Module):
    """A Hugging Face model called as ours are: its own loss shifts the labels, so it is given whole windows."""

    def __init__(self, model: Any):
        super().__init__()
        self.model, self.vocab_size = model, model.config.get_text_config().vocab_size

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        window = torch.cat([idx, targets[:, -1:]], 1)  # (B, T + 1)
        out = self.model(input_ids=window, labels=window, use_cache=False)
        return out.logits[:, :-1], out.loss + 0.0


class HuggingFace:
    """A folder that AutoModelForCausalLM loads."""

    def __init__(self, folder: str, trust_remote_code: bool, device: torch.device):
        try:
            import transformers
        except ImportError as error:
            raise ConfigError(f"model= needs transformers ({error}): pip install 'transformers>=5'") from error
        require((Path(folder).expanduser() / "config.json").is_file(), f"model={folder} holds no config.json")
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.auto, self.device = transformers.AutoModelForCausalLM, device
        self.options = {"dtype": torch.float32, "trust_remote_code": trust_remote_code}
        try:
            place = str(Path(folder).expanduser())
            model = self.auto.from_pretrained(place, local_files_only=True, **self.options)
            self.trained: nn.Module = WithLabels(model).to(device)
        except Exception as error:  # transformers, safetensors and a folder's own code share no base class
            raise ConfigError(f"model={folder} cannot be loaded: {one_line(error)}") from error
        self.config, self.vocab_size = model.config, model.config.get_text_config().vocab_size
        self.context = (getattr(model.config.get_text_config(), "max_position_embeddings", None) or T + 1) - 1
        self.block_size = min(self.context, T)
        self.about = {"model": folder, "architecture": type(model).__name__}

    def fresh(self) -> nn.Module:
        torch.manual_seed(0)
        return WithLabels(self.auto.from_config(self.config, **self.options)).to(self.device)

    def batches(self, vocab_size: int) -> Batches:
        return random_batches(vocab_size, self.block_size, 8)

    def train(self, steps: int, vocab_size: int) -> tuple[list[float], int]:
        model, losses = self.fresh().train(), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
        batches = self.batches(vocab_size)
        for step in range(steps):
            loss = model(*(part.to(self.device) for part in batches.get_batch(step)))[1]
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
            if not math.isfinite(losses[-1]):
                raise Undecided(f"its training on random tokens diverges at iteration {step}")
        return losses, 8 * self.block_size

    def update(self, micro_batches: int) -> tuple[float, Tensor]:
        model, total = self.fresh().eval(), 0.0  # without dropout
        x, y = (part[:4].to(self.device) for part in self.batches(self.vocab_size).get_batch(0))
        for part in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True):
            loss = model(*part)[1] / micro_batches
            loss.backward()
            total += loss.item()
        return total, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def random_batches(vocab_size: int, block_size: int, batch_size: int) -> Batches:
    found = load_corpus(RandomOptions(vocab_size=vocab_size, seed=SEED), block_size)
    return Batches(found.tokens, found.split, block_size, batch_size, seed=0)


# -----------------------------------------------------------------------------
# The checks


@torch.no_grad()
def future_leakage(subject: Subject) -> Finding:
    model, n = subject.trained, min(CONTEXT, subject.context)
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    idx = torch.randint(subject.vocab_size, (2, n), generator=generator).to(device)
    positions = sorted({max(1, n * i // 4) for i in range(4)} | {n - 1})
    modes = {"evaluation": model.eval(), "training": model.train()}
    leaks = {}
    for mode in modes:
        model.train(mode == "training")
        leaks[mode] = future_leaks(model, idx, positions)
    model.eval()
    mode, t = max(((mode, t) for mode in leaks for t in positions), key=lambda at: leaks[at[0]][at[1]][0])
    largest, first = leaks[mode][t]
    what = "the loss before" if first is None else f"logits from position {first} on"  # None: logits not held whole
    text = (
        f"other tokens from {', '.join(map(str, positions))} of {n} on move no logit before ({largest:.0e} of theirs)"
        if largest < LEAK_TOLERANCE
        else f"other tokens from {t} of {n} on, in {mode} mode, move {what}: by {largest:.2g} of the most that they "
        "move later"
    )
    numbers = {
        mode: {t: {"leak": leak, "from": first} for t, (leak, first) in of.items()} for mode, of in leaks.items()
    }
    return Finding("future leakage", not largest < LEAK_TOLERANCE, text, numbers)


@torch.no_grad()
def step_0_loss(subject: Subject) -> Finding:
    model = subject.fresh()
    device = next(model.parameters()).device
    x, y = subject.batches(subject.vocab_size).get_batch(0)
    crowded = crowding(y, np.arange(subject.vocab_size))
    few = positions_with_logits(len(x), subject.vocab_size)
    x, y = x[:, :few].to(device), y[:, :few].to(device)
    numbers: dict[str, Any] = {"ln_vocab_size": math.log(subject.vocab_size), "one_token": crowded}
    off, wrong = {}, {}
    for mode in ("evaluation", "training"):
        logits, loss = model.train(mode == "training")(x, y)
        own = F.cross_entropy(logits.float().flatten(0, 1), y.flatten())
        guess = (logits.logsumexp(-1) - logits.mean(-1)).mean()  # the loss of these logits if no target were known
        numbers[mode] = {"loss": loss.item(), "cross_entropy": own.item(), "guess": guess.item()}
        off[mode], wrong[mode] = abs(loss - guess).item(), abs(loss - own).item()
    mode = max(off, key=lambda mode: off[mode] + wrong[mode])
    found = numbers[mode]
    text = (
        f"{found['loss']:.3f} in {mode} mode; the logits' cross-entropy with the next tokens is "
        f"{found['cross_entropy']:.3f}, a guess with them has {found['guess']:.3f}, ln {subject.vocab_size} is "
        f"{math.log(subject.vocab_size):.3f}{'; of the targets ' * bool(crowded)}{crowded}"
    )
    caught = bool(crowded) or not off[mode] <= INITIAL_LOSS_TOLERANCE or not wrong[mode] <= CROSS_ENTROPY_TOLERANCE
    return Finding("step-0 loss", caught, text, numbers)


def random_token_floor(subject: Subject, steps: int, vocab_size: int) -> Finding:
    losses, tokens = subject.train(steps, vocab_size)
    last = losses[-max(5, steps // 10) :]
    trained = against_floor(last, len(last) * tokens, vocab_size)
    batches = subject.batches(subject.vocab_size)
    device = next(subject.trained.parameters()).device
    found = []
    with torch.no_grad():
        for i in range(16):
            # not get_batch: where a fault repeats batches, the 16 would be one
            x, y = (part.to(device) for part in batches.sampled_batch("train", i))
            found.append(subject.trained.eval()(x, y)[1].item())
            if not math.isfinite(found[-1]):
                raise Undecided(f"the loss of the trained weights on random tokens is {found[-1]}")
    weights = against_floor(found, 16 * x.numel(), subject.vocab_size)
    text = "; ".join(
        f"{what}: loss {of['loss']:.3f} ± {of['standard_error']:.3f} (n = {of['tokens']:,} tokens), "
        f"floor ln {of['vocab_size']} = {of['floor']:.3f}, caught below {of['threshold']:.3f}"
        for what, of in ((f"fresh model after {len(losses)} steps", trained), ("trained weights", weights))
    )
    numbers = {"fresh": trained, "trained": weights}
    return Finding(
        "random-token floor", any(not of["loss"] >= of["threshold"] for of in numbers.values()), text, numbers
    )


def against_floor(losses: Sequence[float], tokens: int, vocab_size: int) -> dict[str, Any]:
    """The mean of losses of equally many tokens each, and below what it cannot be by chance."""
    error, floor = stdev(losses) / math.sqrt(len(losses)), math.log(vocab_size)
    return {
        "loss": fmean(losses), "standard_error": error, "tokens": tokens, "vocab_size": vocab_size, "floor": floor,
        "threshold": floor - max(SIGMAS * error, LEAST),
    }  # fmt: skip


def accumulation(subject: Subject) -> Finding:
    found = {n: subject.update(n) for n in (1, 2, 4)}
    loss, gradient = found[1]
    apart = {
        n: max(abs(other / loss - 1), ((g - gradient).norm() / gradient.norm()).item())
        for n, (other, g) in found.items()
    }
    losses = {n: other for n, (other, _) in found.items()}
    norms = {n: g.norm().item() for n, (_, g) in found.items()}
    text = (
        f"in 1, 2 and 4 micro-batches the loss is {', '.join(f'{v:.4f}' for v in losses.values())}, "
        f"the gradient's norm {', '.join(f'{v:.4f}' for v in norms.values())}"
    )
    numbers = {"loss": losses, "grad_norm": norms, "relative_difference": apart}
    return Finding("accumulation", not max(apart.values()) <= AGREE, text, numbers)


# -----------------------------------------------------------------------------


def audit(subject: Subject, steps: int, vocab_size: int) -> list[Finding]:
    """All checks, each printed as it is made. Where train.py refuses the model, it counts as caught."""
    findings = []
    for name, check in (
        ("future leakage", lambda: future_leakage(subject)),
        ("step-0 loss", lambda: step_0_loss(subject)),
        ("random-token floor", lambda: random_token_floor(subject, steps, vocab_size)),
        ("accumulation", lambda: accumulation(subject)),
    ):
        try:
            finding = check()
        except ConfigError as error:
            finding = Finding(name, True, f"it cannot be trained: {error}", {"refused": str(error)})
        except Undecided as error:
            finding = Finding(name, None, str(error), {"undecided": str(error)})
        except Exception as error:  # a folder's own code, no memory
            why = f"the check fails: {one_line(error)}"
            finding = Finding(name, None, why, {"undecided": why})
        verdict = {True: "CAUGHT", False: "ok", None: "undecided"}[finding.caught]
        print(f"{name + ':':20s}{verdict:11s}{finding.text}", flush=True)
        findings.append(finding)
    return findings


def audit_model(words: dict[str, Any]) -> int:
    require(bool(words.get("run")) != bool(words.get("model")), "either run= or model= must be given")
    for key, other in (("checkpoint", "run"), ("trust_remote_code", "model")):
        require(key not in words or other in words, f"{key}={words.get(key)} needs {other}=")
    which, steps = words.get("checkpoint", "best"), words.get("steps", 200)
    one_of("checkpoint", which, ("best", "latest"))
    at_least("steps", steps, 20)
    check_common(0, words.get("device", "auto"), "float32")
    device = resolve_device(words.get("device", "auto"))
    subject: Subject = (
        Run(words["run"], which, device)
        if "run" in words
        else HuggingFace(words["model"], words.get("trust_remote_code", False), device)
    )
    vocab_size = words.get("vocab_size", min(subject.vocab_size, 256))
    require(
        2 <= vocab_size <= subject.vocab_size,
        f"vocab_size={vocab_size} must be in 2..{subject.vocab_size}, the model's",
    )
    print(", ".join(f"{key} {value}" for key, value in subject.about.items()), flush=True)
    findings = audit(subject, steps, vocab_size)
    caught = [finding.check for finding in findings if finding.caught]
    checks = {finding.check: {"caught": finding.caught, **finding.numbers} for finding in findings}
    about = {**subject.about, "caught": caught, "steps": steps, "checks": checks, "commit": commit()}
    print(json.dumps(about))
    return 1 if caught else 3 if any(finding.caught is None for finding in findings) else 0


def main(argv: list[str]) -> int:
    known = {**dict.fromkeys(("run", "model", "checkpoint", "device"), str), "steps": int, "vocab_size": int}

    def program(words: dict[str, Any]) -> int:
        try:
            return audit_model(words)
        except (OSError, RuntimeError) as error:  # torch's are RuntimeErrors
            print(f"failed: {one_line(error)}", file=sys.stderr)
            return 3  # not 1, that of run_script

    return run_script(argv, __doc__, {**known, "trust_remote_code": bool}, program)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
