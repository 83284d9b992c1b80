"""Is a loss too good to be true? python scripts/audit.py run=RUN

Checks, each with a verdict. V is the vocabulary size, random tokens are uniform:
  future leakage      changing later tokens changes no earlier logit, in evaluation mode and in training mode
  step-0 loss         on random tokens a fresh model's loss is the cross-entropy of its logits with the next tokens,
                      about ln V; no single token dominates the targets
  random-token floor  a fresh model trained on random tokens keeps a loss above ln V; the trained weights do too
  cached decoding     a cache, filled and then read token by token, gives the logits of the full pass
A run keeps its fault, if it has one, and train.py trains it. Another model comes in by import_checkpoint.py.
The last line is JSON. A check is undecided where the model diverges, its own code fails or memory runs out. Exit
status: 0 nothing was caught, 1 something was, 2 a bad setting, 3 nothing was caught, but a check is undecided or the
program failed.
"""

import io
import json
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any

import numpy as np
import torch

import train
from core.cli import run_script
from core.device import TooLarge, resolve_device
from core.git import commit
from core.record import Metrics
from core.schema import REQUIRED, AtLeast, ConfigError, Help, one_line, options, require
from data.batches import Batches
from data.options import FLOOR_TOLERANCE, RandomOptions
from data.tokens import load_corpus
from model.diagnostics import LEAK_TOLERANCE, future_leak, logits_or_hidden
from sample import Plugins, RunPath, Which, load_asked_run
from training import faults
from training.checks import loss_warnings, target_warnings
from training.config import ConstantOptions, Device, WandbOptions
from training.session import setup

MAX_VOCAB_SIZE = 256  # different random tokens that a fresh model is trained on
MOST_MICRO_BATCHES = 64  # of an update: with more it would take for ever
CACHED, CACHE_TOLERANCE = 64, 1e-4  # tokens that are decoded with a cache; what round-off explains
SIGMAS = 5  # a loss on random tokens is caught if so many standard errors, and FLOOR_TOLERANCE, below ln V
SEED = 20251028  # of the random tokens: not the seed that a run with data=random is trained on


@dataclass(frozen=True)
class Finding:
    caught: bool | None  # None: undecided
    text: str
    numbers: dict[str, Any]


class Undecided(Exception):
    """A check cannot be made, and that is no evidence either way."""


class Run:
    """The model of a run directory, with the run's fault."""

    def __init__(self, run: str, which: str, device: torch.device):
        model, _, config, state = load_asked_run(run, which, device)
        self.config, self.device = replace(config, device=str(device)), device
        self.vocab_size, self.block_size = model.vocab_size, model.block_size
        self.facts = {"run": run, "iter": state["step"], "fault": self.config.fault.name}
        require(self.block_size > 1, f"run={run} has model.block_size=1: there are no earlier tokens")
        require(self.vocab_size > 1, f"run={run} has a vocabulary of one token: there is nothing to predict")
        self.batch_size = max(1, 512 // self.block_size)
        self.trained = model
        faults.inject_into_model(self.config, model)

    def train(self, steps: int, vocab_size: int) -> tuple[list[float], int]:
        """Train a fresh model on random tokens. Returns the losses that it reports and the tokens of each."""
        drawn, val = steps * self.config.tokens_per_iter, 2 * self.block_size
        # ten times as many tokens as are drawn: too many to memorise
        data = RandomOptions("random", min(max(10 * drawn, 10**6), 10**9), vocab_size, val, SEED)
        # the same share of warm-up as in the run
        warmup = max(steps // 20, round(steps * self.config.warmup_iters / self.config.max_iters))
        schedule = ConstantOptions(warmup_iters=min(warmup, steps))
        changes: dict[str, Any] = {
            "data": data, "max_iters": steps, "schedule": schedule, "log_interval": 1, "eval_interval": steps,
            "checkpoint_interval": steps, "eval_iters": 0, "plot": False, "dry_run": False, "eval_only": False,
            "fresh": False, "dtype": "float32", "init_from": None, "init_sha256": None, "threads": None,
            "wandb": WandbOptions(mode="disabled"),
            "gradient_accumulation_steps": min(self.config.gradient_accumulation_steps, MOST_MICRO_BATCHES),
        }  # fmt: skip
        config, said = replace(self.config, **changes), io.StringIO()
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(said), redirect_stderr(said):
            status = train.run(replace(config, out_dir=f"{folder}/run"))
            if status > 128:
                sys.exit(status)
            lines = Metrics.read(Path(folder) / "run" / "metrics.jsonl")
        losses = [line["train/loss"] for line in lines if line.get("train/loss") is not None]  # null: not finite
        if len(losses) < steps:
            raise Undecided(f"its training on random tokens diverges at iteration {len(losses)}")
        return losses, config.tokens_per_iter


# -----------------------------------------------------------------------------
# The checks. They ask "not x <= limit", so that a NaN is caught


@torch.no_grad()
def future_leakage(subject: Run) -> Finding:
    model, T = subject.trained, subject.block_size
    idx = torch.randint(subject.vocab_size, (1, T), generator=torch.Generator().manual_seed(0)).to(subject.device)
    before = logits_or_hidden(model, idx)
    if before is not None and not before.isfinite().all():
        raise Undecided("the logits of the trained weights are not finite")
    leaks = {mode: future_leak(model.train(mode == "training"), idx) for mode in ("evaluation", "training")}
    model.eval()
    told = ", ".join(f"{leak:.1e} in {mode} mode" for mode, leak in leaks.items())
    text = f"changing tokens moves logits before them by {told}, of the largest change after them"
    return Finding(any(not leak < LEAK_TOLERANCE for leak in leaks.values()), text, leaks)


def step_0_loss(subject: Run) -> Finding:
    data = RandomOptions(vocab_size=subject.vocab_size, seed=SEED)
    session = setup(replace(subject.config, data=data, compile=False, dtype="float32", init_from=None, fresh=True))
    (x, y), tokens = session.data.batches.get_batch(0), np.arange(subject.vocab_size)
    warnings = [*target_warnings(x, y, tokens), *loss_warnings(session, x, y, tokens)]
    ln_v = f"ln {subject.vocab_size} = {math.log(subject.vocab_size):.3f}"
    text = "; ".join(warnings) or f"that of the next tokens, and near {ln_v}"
    return Finding(bool(warnings), text, {"warnings": warnings})


def random_token_floor(subject: Run, steps: int) -> Finding:
    vocab_size = min(subject.vocab_size, MAX_VOCAB_SIZE)
    losses, tokens = subject.train(steps, vocab_size)
    last = losses[-max(5, steps // 10) :]
    numbers = {
        "fresh": against_floor(last, len(last) * tokens, vocab_size),
        "trained": against_floor(*losses_on_random_tokens(subject), subject.vocab_size),
    }
    names = (f"fresh model after {len(losses)} steps", "trained weights")
    text = "; ".join(
        f"{name}: loss {found['loss']:.3f} ± {found['standard_error']:.3f} (n = {found['tokens']:,} tokens), "
        f"floor ln {found['vocab_size']} = {found['floor']:.3f}, caught below {found['threshold']:.3f}"
        for name, found in zip(names, numbers.values(), strict=True)
    )
    caught = any(not found["loss"] >= found["threshold"] for found in numbers.values())
    return Finding(caught, text, numbers)


@torch.no_grad()
def losses_on_random_tokens(subject: Run) -> tuple[list[float], int]:
    """Losses of the trained weights on 16 batches, and the tokens of all."""
    corpus = load_corpus(RandomOptions(vocab_size=subject.vocab_size, seed=SEED), subject.block_size)
    batches = Batches(corpus.tokens, corpus.split, subject.block_size, subject.batch_size, seed=0)
    faults.inject_into_batches(subject.config, batches)
    model, losses, tokens = subject.trained.eval(), [], 0
    for i in range(16):
        # not get_batch: a fault that repeats batches would give one batch 16 times
        x, y = (part.to(subject.device) for part in batches.sampled_batch("train", i))
        losses.append(model(x, y)[1].item())
        tokens += x.numel()
        if not math.isfinite(losses[-1]):
            raise Undecided(f"the loss of the trained weights on random tokens is {losses[-1]}")
    return losses, tokens


def against_floor(losses: Sequence[float], tokens: int, vocab_size: int) -> dict[str, Any]:
    """The mean of the losses of batches of equal size, and the threshold that chance does not explain."""
    error, floor = stdev(losses) / math.sqrt(len(losses)), math.log(vocab_size)
    return {
        "loss": fmean(losses), "standard_error": error, "tokens": tokens, "vocab_size": vocab_size, "floor": floor,
        "threshold": floor - max(SIGMAS * error, FLOOR_TOLERANCE),
    }  # fmt: skip


@torch.no_grad()
def cached_decoding(subject: Run) -> Finding:
    model, n = subject.trained.eval(), min(CACHED, subject.block_size)
    idx = torch.randint(subject.vocab_size, (2, n), generator=torch.Generator().manual_seed(0)).to(subject.device)
    full, caches = model(idx)[0], model.new_caches(2, n, torch.float32)
    starts = [0, *range(max(1, n // 2), n), n]  # the first half at once
    parts = [model(idx[:, a:b], caches=caches, pos=a)[0] for a, b in pairwise(starts)]
    apart = ((torch.cat(parts, 1) - full).norm() / full.norm().clamp(min=1e-30)).item()  # all logits may be 0
    text = f"with a cache the logits of {n} tokens are those of the full pass but for {apart:.0e} of their norm"
    return Finding(not apart <= CACHE_TOLERANCE, text, {"relative_difference": apart})


def audit(subject: Run, steps: int) -> dict[str, Finding]:
    """All checks by name, each printed as it ends. A model that train.py refuses counts as caught."""
    findings = {}
    checks: dict[str, Callable[[Run], Finding]] = {
        "future leakage": future_leakage,
        "step-0 loss": step_0_loss,
        "random-token floor": partial(random_token_floor, steps=steps),
        "cached decoding": cached_decoding,
    }
    for name, check in checks.items():
        try:
            finding = check(subject)
        except (TooLarge, Undecided) as error:
            finding = Finding(None, str(error), {"undecided": str(error)})
        except ConfigError as error:
            finding = Finding(True, f"it cannot be trained: {error}", {"refused": str(error)})
        except Exception as error:  # the folder's own code, memory
            why = f"the check fails: {one_line(error)}"
            finding = Finding(None, why, {"undecided": why})
        verdict = {True: "CAUGHT", False: "ok", None: "undecided"}[finding.caught]
        print(f"{name + ':':20s}{verdict:11s}{finding.text}", flush=True)
        findings[name] = finding
    return findings


@options
class AuditOptions:
    run: RunPath = REQUIRED
    checkpoint: Which = "best"
    plugins: Plugins = ()
    steps: Annotated[int, AtLeast(20), Help("updates of the training on random tokens")] = 200
    device: Device = "auto"


def audit_model(asked: AuditOptions) -> int:
    subject, steps = Run(asked.run, asked.checkpoint, resolve_device(asked.device)), asked.steps
    print(", ".join(f"{key} {value}" for key, value in subject.facts.items()), flush=True)
    findings = audit(subject, steps)
    caught = [name for name, finding in findings.items() if finding.caught]
    checks = {name: {"caught": finding.caught, **finding.numbers} for name, finding in findings.items()}
    print(json.dumps({**subject.facts, "caught": caught, "steps": steps, "checks": checks, "commit": commit()}))
    return 1 if caught else 3 if any(finding.caught is None for finding in findings.values()) else 0


def audit_run(asked: AuditOptions) -> int:
    try:
        return audit_model(asked)
    except ConfigError:
        raise
    except Exception as error:
        print(f"failed: {one_line(error)}", file=sys.stderr)
        return 3  # run_script's 1 means here that something was caught


if __name__ == "__main__":
    sys.exit(run_script(AuditOptions, audit_run, __doc__))
