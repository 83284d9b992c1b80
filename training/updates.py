"""One update: its random numbers, the gradients of its micro-batches, its learning rate, its size."""

import contextlib
import hashlib
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from core import dist
from core.device import move, seed_generator
from core.schema import require
from model.kernels.operators import nanoqk
from model.slots import LateInit
from training.optim import Optimizer
from training.session import Batch, Machine, Session

# Tokens that go through the model together on a CPU. They are few, so that activations fit the CPU's cache and the
# allocator reuses their memory. Memory from the system would cost a page fault for every 4 KiB.
CPU_TOKENS = 2**11


def accumulate_gradients(forward: nn.Module, batches: Iterator[Batch], n_micro_steps: int, machine: Machine) -> Tensor:
    """Add the gradients of the mean loss over the next n_micro_steps batches. Returns that loss, ()."""
    device = machine.device
    total = torch.zeros((), device=device)
    with machine.autocast():  # around all of them: it casts a weight once
        for i in range(n_micro_steps):
            x, y = next(batches)  # (B, T)
            rows = rows_at_once(len(x), x.size(1), device)
            for first in range(0, len(x), rows):
                if isinstance(forward, DistributedDataParallel):  # one exchange of gradients, after the last backward
                    forward.require_backward_grad_sync = i == n_micro_steps - 1 and first + rows >= len(x)
                part = slice(first, first + rows)
                loss = forward(move(x[part], device), move(y[part], device))[1]  # the logits go before backward
                loss = loss / (n_micro_steps * len(x) / len(x[part]))  # the part's share of the mean over all
                with torch.autocast(device.type, enabled=False):  # backward uses the dtypes of the forward
                    loss.backward()
                total += loss.detach()
    return total


def order_buckets(session: Session) -> None:
    """Have DDP order its buckets of gradients: it does so by its first backward pass, and the order decides how three
    or more ranks round. Without this pass, whose gradients are dropped, a run would not resume bit for bit."""
    config = session.config
    if session.machine.world.size > 2:
        before = {name: tensor.clone() for name, tensor in untrained(session.model).items()}
        tokens = torch.zeros(config.batch_size, config.model.block_size, dtype=torch.int64)
        accumulate_gradients(session.forward, iter([(tokens, tokens)]), 1, session.machine)
        session.optimizer.zero_grad()
        drop_max_logits(session)
        for name, tensor in untrained(session.model).items():
            tensor.copy_(before[name])


def drop_max_logits(session: Session) -> None:
    """Reset QK-Clip's maxima after forward passes that belong to no update."""
    if session.config.qk_clip.name != "none":
        for attention in session.model.attentions:
            attention.pop_max_logits()


def rows_at_once(batch_size: int, block_size: int, device: torch.device) -> int:
    """Windows of a micro-batch that go through the model together."""
    if device.type != "cpu":
        return batch_size
    parts = -(-batch_size * block_size // CPU_TOKENS)
    return -(-batch_size // parts)


def seed_of_update(seed: int, step: int, rank: int) -> int:
    """The seed of every random number of an update: a checkpoint need not save a generator."""
    return int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0])


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def step_optimizer(session: Session, loss: Tensor, frozen: Tensor) -> tuple[Tensor, Tensor]:
    """Make the update and drop the gradients; no weight changes where `frozen`, (), is 1 or the update is not finite.
    Returns the norm of the gradients before clipping, and the new `frozen`."""
    norm = clip_gradients(session)
    frozen = frozen.masked_fill(~(loss + norm).isfinite(), 1)
    if session.config.plugins and session.machine.world.size > 1:
        agree_on_state(session)
    with applying_weights_variant(session.model):
        session.optimizer.step(frozen)
    session.optimizer.zero_grad()
    return norm, frozen


def agree_on_state(session: Session) -> None:
    """Give all ranks the last one's buffers, which follow its micro-batches, and random numbers: what plugins compute
    with them in an update is then the same on each."""
    seed_generator(int(dist.of_last_rank(torch.randint(2**62, ()))), session.machine.device)
    for tensor in untrained(session.model).values():
        numbers = dist.of_last_rank(tensor.reshape(-1).view(torch.uint8).clone())  # bytes: gloo lacks some types
        tensor.copy_(numbers.view(tensor.dtype).view(tensor.shape))


def untrained(model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint has of a model beside what is trained, by name: buffers, frozen parameters."""
    return {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if not tensor.requires_grad}


def weights_sha256(model: nn.Module) -> str:
    total = hashlib.sha256()
    for p in model.parameters():
        total.update(p.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def clip_gradients(session: Session) -> Tensor:
    """Scale the gradients to the norm grad_clip if theirs is larger. Returns their norm before, ()."""
    limit = session.config.grad_clip or math.inf  # inf: measure only
    grads = [grad for p in session.parameters if (grad := p.grad) is not None]
    if grads and session.has_clipping_kernel:
        return nanoqk.clip_grad_norm_(grads, limit)
    return clip_grad_norm_(session.parameters, limit)


@contextlib.contextmanager
def applying_weights_variant(model: Any) -> Iterator[None]:
    """Wraps optimizer.step(). Rows of a block's update_factors() (weights=quack) move by that factor of the step. Then
    every LateInit module's after_update() is called, also where the step was skipped."""
    with torch.no_grad():
        found = [factors for block in model.transformer.h for factors in block.weights.update_factors()]
        held = {p.untyped_storage().data_ptr() for p in model.parameters()} if found else set()
        shared = all(rows.untyped_storage().data_ptr() in held for rows, _ in found)
        require(shared, "update_factors() must return views of weights, not copies")
        before = [rows.clone() for rows, _ in found]
        yield
        for (rows, factor), old in zip(found, before, strict=True):
            rows.copy_(torch.lerp(old, rows, factor))
        for part in model.modules():
            if isinstance(part, LateInit):
                part.after_update()


# -----------------------------------------------------------------------------
# The size of an update


def parameter_kind(name: str, p: Tensor) -> str:
    if name.endswith("raw_p"):
        return "p"
    if name.endswith("alpha.raw"):
        return "alpha"
    if p.dim() < 2:
        return "norm"  # every other vector: gains, biases, sinks, SSMax's s, σReparam's γ
    return "attention" if ".attn." in name else "mlp" if ".mlp." in name else "embedding"


@torch.no_grad()
def copied_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def update_ratios(model: nn.Module, old_weights: dict[str, Tensor]) -> dict[str, float]:
    """update/KIND: 2-norm of an update over that of the weights before it, for each kind of parameter."""
    squares: dict[str, list[Tensor]] = defaultdict(list)
    parameters = dict(model.named_parameters())
    for name, old in old_weights.items():
        p = parameters[name]
        squares[parameter_kind(name, p)].append(torch.stack([(p - old).square().sum(), old.square().sum()]))
    sums = {kind: torch.stack(values).sum(0).tolist() for kind, values in squares.items()}
    return {f"update/{kind}": (change / size) ** 0.5 for kind, (change, size) in sums.items() if size > 0}
