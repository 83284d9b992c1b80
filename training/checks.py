"""The checks before a run trains: the model cannot see the future, batches differ, the losses are plausible. And what
was not finite first, after it diverged."""

import contextlib
import io
import math
import pickle
from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from core.device import seed_generator
from core.dist import World
from core.schema import one_line, require
from data.batches import Batches
from model.cross_entropy import max_positions_with_logits
from model.diagnostics import (
    LEAK_PREFIX,
    LEAK_TOLERANCE,
    future_leak,
    logit_bound,
    logits_or_hidden,
    relative_change,
)
from model.gpt import GPT
from training.evaluate import mean_loss
from training.session import Batch, Session, is_compiled
from training.updates import (
    accumulate_gradients,
    applying_weights_variant,
    drop_max_logits,
    rows_at_once,
    seed_of_update,
)

LEAST_LOGIT_BOUND = 0.5  # |logits| up to 0.5: no key can get more than e times the weight of another one
LEAST_TARGETS = 400  # held out: a token's loss has an SD of about 2 nats, so the mean of 400 is known to 2 / 20 = 0.1
OURS = ("model", "torch")  # packages whose modules need no check
INITIAL_LOSS_TOLERANCE, CROSS_ENTROPY_TOLERANCE = 0.3, 0.01  # nats


def first_not_finite(session: Session, step: int) -> str:
    """What is not finite first in update `step`, whose weights the model still has: a weight, else an activation of the
    repeated forward passes, with its head where it has heads, else a gradient, from the output back."""
    config, machine, model = session.config, session.machine, session.model
    for name, p in model.named_parameters():
        if not p.isfinite().all():
            return f"the weight {name}"
    found: list[str] = []

    def look(what: str, n_head: int, x: Any) -> None:
        """x (B, T, C), its channels those of n_head heads if n_head > 0, or (B, nh, T, hs)."""
        if not found and isinstance(x, Tensor) and not x.isfinite().all():
            by_head = x.transpose(1, 2) if x.dim() == 4 else x.unflatten(-1, (n_head or 1, -1))  # (B, T, nh, hs)
            bad = (~by_head.isfinite()).any(-1).flatten(0, 1).any(0).nonzero().flatten().tolist()
            found.append(what + (f", head {', '.join(map(str, bad))}" if x.dim() == 4 or n_head else ""))

    hooks, n_head = [], model.attentions[0].n_head
    for name, module in model.named_modules():
        if name.endswith(("attn.output", "attn.c_proj")):  # their inputs: attention's output before and after output=
            what = f"the attention of {name.rpartition('.')[0]}"
            hooks.append(module.register_forward_pre_hook(lambda _, x, what=what: look(what, n_head, x[0])))
        elif name:
            what = f"the output of {name}"
            hooks.append(module.register_forward_hook(lambda _, x, y, what=what: look(what, 0, y)))
    model.train()
    model.zero_grad()
    seed_generator(seed_of_update(config.seed, step, machine.world.rank), machine.device)
    batch_ids = ((step, micro_step) for micro_step in session.micro_steps)
    try:
        with closing(session.data.batches.prefetch(batch_ids)) as batches:
            loss = accumulate_gradients(model, batches, len(session.micro_steps), machine)
    except (RuntimeError, MemoryError) as error:  # not compiled, it takes more memory
        return f"unknown: the update cannot be repeated ({one_line(error)})"
    finally:
        for hook in hooks:
            hook.remove()
    for name, p in reversed([*model.named_parameters()]):
        if not found and p.grad is not None and not p.grad.isfinite().all():
            found.append(f"the {'loss' if not loss.isfinite() else f'gradient of {name}'}")
    return found[0] if found else "nothing: the repeated update is finite"


def start_up_checks(session: Session) -> list[str]:
    """A warning for each check that fails. Raises: ConfigError where the model sees the future or another window, its
    logits are not finite, or batches repeat; not with a `fault`."""
    batches = session.data.batches
    text = batches.some_tokens()
    x, y = batches.get_batch(0)  # (B, T)
    fatal = [*future_seen(session), *windows_mixed(session, x), *repetition(batches, text)]
    require(session.config.fault.name != "none" or not fatal, "; ".join(fatal))
    warnings = [*fatal, *target_warnings(x, y, text), *loss_warnings(session, x, y, text), *norm_warnings(session)]
    warnings += [*attention_warnings(session), *held_out_warnings(session), *unsaved_warnings(session, x, y)]
    drop_max_logits(session)
    return warnings


def future_seen(session: Session) -> list[str]:
    """A warning if a token of the first batch moves an earlier logit, in evaluation or in training mode. Trained
    weights are checked again: a part that begins at zero hides a leak at the start."""
    model, device = session.model, session.machine.device
    x, _ = session.data.batches.get_batch(0)  # (B, T)
    if x.size(1) == 1 or model.vocab_size == 1:
        return []
    forward: nn.Module = model
    rows, long = 1, LEAK_PREFIX
    if is_compiled(session.config, device):  # only in the shape of training: so it is compiled before update 0
        forward, rows, long = session.forward, rows_at_once(len(x), x.size(1), device), x.size(1)
    with session.machine.autocast():
        with torch.no_grad():  # as evaluation is
            leak = future_leak(model.eval(), x[:1].to(device))
        leak = max(leak, future_leak(forward.train(), x[:rows].to(device), long))
    drop_max_logits(session)
    if leak < LEAK_TOLERANCE:
        return []
    if not math.isfinite(leak):
        return ["the first logits are not finite: a setting is too large, or the attention layout is wrong"]
    return [f"{variants_of(session)} sees the future: a token moves the logits before it ({leak:.1e})"]


def windows_mixed(session: Session, x: Tensor) -> Iterator[str]:
    """A warning if one window of x (B, T) moves the logits of another in evaluation mode."""
    if len(x) < 2 or session.model.vocab_size == 1:
        return
    pair = x[:2, :LEAK_PREFIX].to(session.machine.device)
    other = torch.stack([pair[0], torch.where(pair[1] > 0, 0, 1)])
    with session.machine.autocast(), torch.no_grad():
        before, after = (logits_or_hidden(session.model.eval(), windows) for windows in (pair, other))
    session.model.train()
    assert before is not None and after is not None
    change = (after - before).abs().amax((1, 2))  # (2,)
    leak = relative_change(change[0], change[1]).item()
    if leak >= LEAK_TOLERANCE:
        yield f"{variants_of(session)}: a window moves the logits of another ({leak:.1e})"


def variants_of(session: Session) -> str:
    """The settings that may be to blame: attention=, qk_norm= where there are plugins, and the variants."""
    config = session.config
    norm = f"qk_norm={config.qk_norm.name}" if config.qk_norm.name != "none" and config.plugins else ""
    chosen = [f"{group}={one.name}" for group, one in config.variants.items()]
    return " ".join(filter(None, [f"attention={config.attention.name}", norm, *chosen]))


def repetition(batches: Batches, tokens: np.ndarray) -> Iterator[str]:
    """A warning if iterations 0 to n, or micro-batches 0 to n of iteration 0, all get the same batch. n is such that
    this has a probability of at most 1e-9 by chance. tokens: pieces of the training text."""
    starts = tokens[: max(1, len(tokens) - batches.block_size)]
    same = np.unique(starts, return_counts=True)[1].max() / len(starts)  # P(a first token is equal to the one before)
    if same == 1:  # a text of one repeated token
        return
    n = math.ceil(math.log(1e-9) / (batches.batch_size * math.log(same)))
    x, _ = batches.get_batch(0)
    others = {"iterations": [(i, 0) for i in range(1, n + 1)], "micro-batches": [(0, i) for i in range(1, n + 1)]}
    for what, steps in others.items():
        if all(torch.equal(batches.get_batch(*step)[0], x) for step in steps):
            yield f"training repeats one batch: {what} 0 to {n} are equal"
            return


def norm_warnings(session: Session) -> Iterator[str]:
    """A warning of a QK norm with which the logits cannot spread."""
    bound, name = max(map(logit_bound, session.model.attentions)), session.config.qk_norm.name
    if bound < LEAST_LOGIT_BOUND:
        told = f"qk_norm={name} bounds every |logit| by {bound:.2g}, whatever the weights"
        yield f"{told}: attention stays nearly uniform"


def unsaved_warnings(session: Session, x: Tensor, y: Tensor) -> Iterator[str]:
    """A warning of what plugins' modules change from update to update and no checkpoint has. x, y (B, T)."""
    every = session.model.named_modules()
    names = [name for name, part in every if type(part).__module__.split(".")[0] not in OURS]
    if not names:
        return
    model = GPT(session.config.gpt, session.model.vocab_size)  # a copy might fail, as of a tensor with its graph
    model.init_weights(session.config.seed)
    model.to(session.machine.device).train()
    batch, alone = (x[:1, :16], y[:1, :16]), replace(session.machine, world=World())
    seen: list[dict[str, bytes]] = []
    for _ in range(3):  # the first may fill a cache
        seed_generator(0, alone.device)  # so that equal updates leave equal values of the last one, which are no state
        accumulate_gradients(model, iter([batch]), 1, alone)
        with applying_weights_variant(model):  # calls after_update()
            model.zero_grad()
        saved = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}  # others may replace them
        parts = [(name, model.get_submodule(name)) for name in names]
        seen.append({f"{name}.{key}": value for name, part in parts for key, value in unsaved(part, saved).items()})
    changed = [key for key, value in seen[2].items() if seen[1].get(key) != value]
    if changed:
        told = (
            f"{changed[0]} changes in training, but checkpoints do not save it: a resumed run starts with another value"
        )
        yield f"{told} (save a tensor by register_buffer())"


def unsaved(part: nn.Module, saved: Collection[int]) -> dict[str, bytes]:
    """What a module has beside parameters, saved buffers and modules, by name. saved: ids of tensors."""
    usual = vars(nn.Module()).keys()
    own = {name: value for name, value in vars(part).items() if name not in usual}
    own |= {name: part.get_buffer(name) for name in part._non_persistent_buffers_set}
    found = {}
    for name, value in own.items():
        content = io.BytesIO()
        with contextlib.suppress(Exception):  # a lambda or an open file cannot be compared
            Pickler(content, saved).dump(value)
            found[name] = content.getvalue()
    return found


class Pickler(pickle.Pickler):
    """Equal tensors give equal bytes, which PyTorch's own way does not promise. saved: ids of those that give none."""

    def __init__(self, file: io.BytesIO, saved: Collection[int]):
        super().__init__(file)
        self.saved = saved

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        if id(value) in self.saved:
            return bytes, ()
        return bytes, (value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes(),)


def attention_warnings(session: Session) -> list[str]:
    """A warning of attention that holds T x T on a GPU."""
    machine, config = session.machine, session.config
    attention = session.model.attentions[0]  # no kernel of a GPU takes another softmax
    plain = attention.plain_softmax and not hasattr(attention, "weigh")
    if machine.device.type != "cuda" or (session.attention_backend != "math" and plain):
        return []
    T = config.model.block_size
    name = f"attention={config.attention.name} in {machine.dtype}"
    return [f"{name} holds {T} x {T} numbers a head in memory: no fused kernel supports it"]


def held_out_warnings(session: Session) -> Iterator[str]:
    """A warning of a held-out text whose loss says little."""
    n = sum(end - start - 1 for start, end in session.data.corpus.split.val)
    if n < LEAST_TARGETS:
        yield f"only {n} held-out tokens are predicted, so that val/loss says little: take a longer text or fewer folds"


def target_warnings(x: Tensor, y: Tensor, text: np.ndarray) -> Iterator[str]:
    """Warnings of targets y (B, T) that do not follow x, and of one token that they are far more often than `text`."""
    if not torch.equal(x[:, 1:], y[:, :-1]):
        yield "the targets of the first batch are not its next tokens"
    values, counts = y.unique(return_counts=True)
    token, share = int(values[counts.argmax()]), counts.max().item() / y.numel()
    expected = float((text == token).mean())
    by_chance = 5 * math.sqrt(expected * (1 - expected) / y.numel())
    if share > expected + by_chance + 0.25:
        yield f"one token crowds the targets: {share:.0%} are token {token}, of the text {expected:.0%}"


def initial_loss_margins(model: GPT, text: np.ndarray, lead: float) -> tuple[float, float]:
    """How far the initial loss may be below and above model.expected_initial_loss, in nats. lead: the logit of the
    current token over the mean of all. Tied weights prefer it, which lowers the loss where a text repeats tokens."""
    # of a logit at the start; at most 1, so that a larger one is warned of
    variance = min(1.0, 2 * (model.expected_initial_loss - math.log(model.vocab_size)))
    shares = np.unique(text, return_counts=True)[1] / len(text)
    # three SDs of the mean target's logit, sqrt(variance * sum of shares^2): large where few tokens fill the text
    above = max(INITIAL_LOSS_TOLERANCE, 3 * math.sqrt(variance * float((shares**2).sum())))
    return above + max(0.0, lead) * float((text[1:] == text[:-1]).mean()), above


def loss_warnings(session: Session, x: Tensor, y: Tensor, text: np.ndarray) -> Iterator[str]:
    """Warnings of a loss that is not the logits' cross-entropy with the targets, and of an initial loss that is not
    model.expected_initial_loss, in evaluation or in training. text: pieces of the training text."""
    model, machine = session.model, session.machine
    alone = replace(machine, world=World())  # every rank computes all of it
    x, y = x[:4, :1024].to(machine.device), y[:4, :1024].to(machine.device)
    few = max_positions_with_logits(model.vocab_size)
    with torch.no_grad(), machine.autocast():
        logits, loss = model.eval()(x[:1, :few], y[:1, :few])
        own = F.cross_entropy(logits[0].float(), y[0, :few]).item()
    if not abs(loss.item() - own) <= CROSS_ENTROPY_TOLERANCE:
        yield f"the loss is not the cross-entropy of the logits with the next tokens: {loss:.3f}, not {own:.3f}"
    losses = {"loss": mean_loss(model, [(x, y)], alone)}
    micro_batches: list[Batch] = [(x[:, :128], y[:, :128])] * 2
    losses["training loss"] = accumulate_gradients(model.train(), iter(micro_batches), 2, alone).item()
    model.zero_grad(set_to_none=True)
    lead = (logits[0].float().gather(-1, x[0, :few, None]).mean() - logits[0].float().mean()).item()
    below, above = initial_loss_margins(model, text, lead)
    expected, guess = model.expected_initial_loss, math.log(model.vocab_size)
    about = f"instead of {expected:.3f} (a uniform guess among {model.vocab_size} tokens has ln V = {guess:.3f})"
    wrong = [name for name, value in losses.items() if not -below <= value - expected <= above]
    yield from (f"the initial {name} is {losses[name]:.3f} {about}" for name in wrong[:1])
