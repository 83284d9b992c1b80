"""Evaluation: the exact validation loss, nanoGPT's sampled estimate for comparison, the lowest loss; spikes."""

import math
import time
from collections.abc import Iterable

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor

from core import dist
from core.device import move
from core.rundir import RunDir
from model.generate import generate
from training.session import Batch, Machine, Session
from training.state import LowestLoss, RunState
from training.updates import CPU_TOKENS

EVAL_TOKENS = {"cpu": CPU_TOKENS, "cuda": 2**14, "mps": 2**14}  # that go through the model together
TEXT_CHARACTERS = 200
TEXT_SHARE = 0.02  # of the time since setup()
DIAGNOSED_TOKENS = 2**13  # the diagnostics compute every logit of these windows


@torch.no_grad()
def mean_loss(
    model: nn.Module, batches: Iterable[Batch], machine: Machine, stop: dist.AgreedStop | None = None
) -> float:
    """Nats a token over `batches` of (B, T) inputs and targets, which the ranks share out. Targets of -1 do not count.
    The model is put into evaluation mode and back; nothing random is drawn. After `stop` no more batches are computed,
    and the mean counts for nothing."""
    world, device = machine.world, machine.device
    losses, counts = [], []
    was_training = model.training
    model.eval()
    with machine.autocast():  # around all of them: it casts a weight once
        for i, (x, y) in enumerate(batches):
            if stop is not None and stop.at_once():
                break
            if i % world.size == world.rank:
                losses.append(model(move(x, device), move(y, device))[1])
                counts.append(int((y >= 0).sum()))
    model.train(was_training)
    total = torch.zeros(2, dtype=torch.float64)  # sum of the targets' losses, number of targets
    # One tolist() for all batches: the host waits for the device once. A rank may have no batch.
    for loss, n in zip(torch.stack(losses).tolist() if losses else [], counts, strict=True):
        total += torch.tensor([loss * n, n], dtype=torch.float64)
    loss_sum, n_targets = dist.all_reduce(total)
    return (loss_sum / n_targets).item()


def validation_loss(session: Session, stop: dist.AgreedStop | None = None) -> dict[str, float]:
    """val/loss, over every held-out token once (but the first of a range, which nothing predicts); in bits a character
    and a byte as well, where the tokens are text."""
    windows = max(1, EVAL_TOKENS[session.machine.device.type] // session.config.model.block_size)
    loss = mean_loss(session.forward, session.data.batches.eval_batches(windows), session.machine, stop)
    n_bytes, n_chars = session.data.text_per_target
    if not n_chars:
        return {"val/loss": loss}
    bits = loss / math.log(2)
    return {"val/loss": loss, "val/bpc": bits / n_chars, "val/bpb": bits / n_bytes}


def sampled_losses(session: Session, stop: dist.AgreedStop | None = None) -> dict[str, float]:
    """nanoGPT's estimate: the mean over eval_iters random batches of each part; {} for eval_iters=0."""
    n, batches = session.config.eval_iters, session.data.batches
    if n == 0:
        return {}
    losses = {}
    for part in ("train", "val"):
        drawn = (batches.sampled_batch(part, i) for i in range(n))
        losses[f"{part}/loss_sampled"] = mean_loss(session.forward, drawn, session.machine, stop)
    return losses


def diagnosed_batch(session: Session) -> Tensor:
    """The inputs that diagnostics are computed on, (B, T): the first held-out windows, at most 4 and at least 1."""
    windows = max(1, DIAGNOSED_TOKENS // session.config.model.block_size)
    x, y = (part[:windows] for part in next(session.data.batches.eval_batches(4)))
    lengths = (y >= 0).sum(1)  # without padding; windows shorter than the first are dropped
    return x[lengths == lengths[0], : int(lengths[0])].to(session.machine.device)


def sample_within_budget(session: Session, step: int) -> str | None:
    """sample_text(); None where samples have taken more than TEXT_SHARE of the time so far, unless the run is at its
    end; where tokens are no text; and on ranks other than 0."""
    began = time.perf_counter()
    over = session.text_seconds > TEXT_SHARE * (began - session.began)
    if session.machine.world.rank or not session.data.text_per_target[1] or (over and step < session.config.max_iters):
        return None
    text = sample_text(session)
    session.text_seconds += time.perf_counter() - began
    return text


def sample_text(session: Session) -> str:
    """The first held-out token and what the model writes after it. The generators of training are not used."""
    model, tokenizer = session.model, session.data.corpus.tokenizer
    start = diagnosed_batch(session)[:1, :1]
    tokens, was_training = start[0].tolist(), model.training
    model.eval()
    for token in generate(model, start, TEXT_CHARACTERS, 0.8, top_k=200, dtype=session.machine.dtype):
        tokens.append(int(token))
        if len(tokenizer.decode(tokens)) >= TEXT_CHARACTERS:
            break
    model.train(was_training)
    return tokenizer.decode(tokens)


def find_lowest(run_dir: RunDir, saved: RunState | None) -> LowestLoss:
    """The lowest val/loss before the iteration that a run resumes from. The checkpoint has it, too: metrics.jsonl may
    have been damaged since."""
    losses = run_dir.record.curve("val/loss")
    if saved is not None and saved.lowest is not None:
        loss, before = saved.lowest
        losses[before] = loss
    step = min(losses, key=lambda i: (losses[i], i), default=None)
    # rank 0 alone has the record
    return dist.gather(LowestLoss() if step is None else LowestLoss(losses[step], step))[0]


def spike_score(losses: list[float], window: int = 1000, sigmas: float = 7.0, least: int = 30) -> float | None:
    """Percentage of losses at least `sigmas` standard deviations from the mean of the `window` before them (OLMo 2);
    None while no loss has `least` others before it. From running sums: exact to round-off for losses below 1e6."""
    if len(losses) <= least:
        return None
    values = np.array(losses) - np.mean(losses)  # small numbers: their squares round less
    i = np.arange(least, len(values))
    start = np.maximum(0, i - window)
    sums, squares = (np.concatenate([[0.0], np.cumsum(x)]) for x in (values, values**2))
    mean = (sums[i] - sums[start]) / (i - start)
    deviation = np.sqrt(np.maximum((squares[i] - squares[start]) / (i - start) - mean**2, 0))
    return 100 * float(np.mean((np.abs(values[i] - mean) >= sigmas * deviation) & (deviation > 1e-7)))
