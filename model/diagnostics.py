"""Separate passes over a model that return numbers: attention heads, leaks from the future, memory of activations.

Shapes: B batch, T positions, nh query heads, nkv key heads, hs channels a head, V vocabulary.
"""

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode

from core.device import autocast, seed_generator
from core.schema import require
from model import cross_entropy
from model.gpt import GPT, LpNorm, NoNorm, QKNorm
from model.ops import Bend, visible_logits

LEAK_TOLERANCE = 1e-4  # a smaller future_leak is round-off, also in bfloat16
LEAK_PREFIX = 1024  # positions: a longer sequence is tested at three places of this prefix, and once as a whole


@torch.no_grad()
def diagnose(model: GPT, idx: Tensor) -> dict[str, float]:
    """Values of every attention head on the sequences idx (B, T), in evaluation mode; docs/tracking.md says what each
    is. Draws no random numbers.

    Keys are attn/VALUE/layer_I/head_J; a value of the whole layer has head_0 alone. attn/VALUE is the mean over layers
    and heads, of max_logit the maximum. max_logit is what the softmax gets, scaled or capped by logits=; entropy and
    effective_keys are those of the plain softmax, means over the queries.
    """
    tables: list[dict[str, Tensor]] = [{} for _ in model.attentions]
    hooks = []
    for attn, table in zip(model.attentions, tables, strict=True):
        for side, norm in qk_norms(attn).items():
            if norm.gain is not None:
                table[f"{side}_gain"] = norm.gain.abs().mean().flatten()
            hooks.append(norm.register_forward_hook(functools.partial(measure_vectors, table, side)))
    try:
        observe(model, idx, [functools.partial(measure_logits, table) for table in tables])
    finally:
        for hook in hooks:
            hook.remove()
    values: dict[str, float] = {}
    for layer, (attn, table) in enumerate(zip(model.attentions, tables, strict=True)):
        if getattr(getattr(attn, "logit_scale", None), "alpha", None) is not None:
            table["alpha"] = attn.logit_scale.alpha().flatten()
            for side, norm in qk_norms(attn).items():
                if isinstance(norm, LpNorm):
                    table[f"{side}_p"] = torch.as_tensor(norm.p).flatten()
        for name, heads in table.items():
            values |= {f"attn/{name}/layer_{layer}/head_{head}": v for head, v in enumerate(heads.tolist())}
    for name in dict.fromkeys(name for table in tables for name in table):
        every = torch.cat([table[name].flatten() for table in tables])
        values[f"attn/{name}"] = (every.max() if name == "max_logit" else every.mean()).item()
    return values


@torch.no_grad()
def attention_weights(model: GPT, idx: Tensor) -> list[Tensor]:
    """The weights (B, nh, T, T) of each layer on the sequences idx (B, T), in evaluation mode: row i is how position i
    weighs positions 0 to i. Raises: ConfigError for a layout that shows no queries and keys."""
    layers: list[list[Tensor]] = [[] for _ in model.attentions]

    def add(attn: Any, rows: list[Tensor], q: Tensor, k: Tensor, scale: float, bend: Bend | None) -> None:
        weigh = getattr(attn, "weigh", lambda logits: logits.softmax(-1))  # softpick
        softmax = getattr(attn, "softmax", lambda att, _: att)  # a sink takes a share
        for logits in visible_logits(q, k, scale, bend):  # (B, nh, rows, S)
            att = softmax(weigh(logits), logits.logsumexp(-1))
            rows.append(nn.functional.pad(att, (0, idx.size(1) - att.size(-1))))

    observe(model, idx, [functools.partial(add, *each) for each in zip(model.attentions, layers, strict=True)])
    require(all(layers), "its layout does not call observe(), so that it has no attention maps")
    return [torch.cat(rows, 2) for rows in layers]


def observe(model: GPT, idx: Tensor, probes: Iterable[Callable[..., None]]) -> None:
    """Forward idx (B, T) in evaluation mode; each layer calls its probe(q, k, scale, bend=...)."""
    for attn, probe in zip(model.attentions, probes, strict=True):
        attn.probe = functools.partial(probe, bend=attn.bend)
    was_training = model.training
    model.eval()
    try:
        model(idx, last_only=True)  # all measurements are in the layers: one position's logits are enough
    finally:
        model.train(was_training)
        for attn in model.attentions:
            attn.probe = None


def qk_norms(attn: nn.Module) -> dict[str, Any]:
    """The QK norms of a layer by side: "q" and "k", in MLA's blockwise layout also "q_rope" and "k_rope"."""
    return {name.removesuffix("_norm"): norm for name, norm in attn.named_children() if isinstance(norm, QKNorm)}


@torch.no_grad()
def logit_bound(attn: nn.Module) -> float:
    """The largest |logit| that the QK norms of a layer allow with equal gains, as at the start, for any weights;
    infinite where alpha is learned, where queries or keys have no norm, and where logits= scales the logits."""
    norms, scale, logits = qk_norms(attn), getattr(attn, "logit_scale", None), getattr(attn, "logits", None)
    scaled = logits is not None and logits.options.name != "none"
    bounded = norms and not any(isinstance(norm, NoNorm) for norm in norms.values())
    if not bounded or scale is None or scale.alpha is not None or scaled:
        return math.inf
    queries = {side: f"k{side[1:]}" for side in norms if side.startswith("q")}  # each with its keys
    if not all(keys in norms for keys in queries.values()):
        return math.inf
    return scale.softmax_scale * sum(longest_output(norms[q]) * longest_output(norms[k]) for q, k in queries.items())


def longest_output(norm: QKNorm) -> float:
    """The largest 2-norm that a QK norm gives to vectors of length 1000: one-hot, constant and random ones. The other
    heads have the same vectors, or tiny ones: a norm may be over all heads."""
    g, hs = torch.Generator().manual_seed(0), norm.head_dim
    x = torch.cat([torch.eye(1, hs), torch.ones(1, hs), torch.randn(16, hs, generator=g)])
    x = 1000 * nn.functional.normalize(x, dim=-1).expand(2, norm.n_head, -1, -1).clone()  # (2, nh, 18, hs)
    x[1, 1:] *= 1e-6
    device = next((p.device for p in norm.parameters()), torch.device("cpu"))
    return torch.linalg.vector_norm(norm(x.to(device)), dim=-1).max().item()


def measure_logits(table: dict[str, Tensor], q: Tensor, k: Tensor, scale: float, bend: Bend | None) -> None:
    """Put the values (nh,) of the logits of q (B, nh, T, hs) and k (B, nkv, T, hs) into `table`."""
    B, nh, T, _ = q.shape
    largest = torch.full((nh,), -math.inf, device=q.device)
    entropy, keys = torch.zeros(2, nh, device=q.device)
    for logits in visible_logits(q, k, scale, bend):  # (B, nh, rows, S)
        log_att = logits.log_softmax(-1)
        h = -(log_att.exp() * log_att.masked_fill(logits == -math.inf, 0.0)).sum(-1)  # (B, nh, rows)
        largest = torch.maximum(largest, logits.amax((0, 2, 3)))
        entropy += h.sum((0, 2)) / (B * T)
        keys += h.exp().sum((0, 2)) / (B * T)
    table |= {"max_logit": largest, "entropy": entropy, "effective_keys": keys}


def measure_vectors(table: dict[str, Tensor], side: str, norm: nn.Module, inputs: Any, output: Tensor) -> None:
    """A forward hook: put the values (n,) of a QK norm's input (B, n, T, hs) into `table`, n query or key heads."""
    x = inputs[0].float()
    length = torch.linalg.vector_norm(x, 2, -1)  # (B, n, T)
    table[f"{side}_norm"] = length.mean((0, 2))
    if isinstance(norm, LpNorm):
        g = length * norm.scale(x)[..., 0]
        table |= {f"{side}_g_mean": g.mean((0, 2)), f"{side}_g_std": g.std((0, 2), correction=0)}


def future_leak(model: nn.Module, idx: Tensor, long: int = LEAK_PREFIX) -> float:
    """Whether the model sees the future: 0 for a causal one, inf where a change is not finite. idx is (B, T), T > 1.

    For some t the tokens idx[:, t:] are changed. Returns the largest of max |change of a logit before t| / max |change
    from t on|: of three t in the first `long` tokens, and where T exceeds these, of the middle of all. A GPT too large
    to hold logits is compared by its last block's output; another model that returns none by its loss. The model stays
    in its mode, and dropout draws the same masks each time.
    """
    T = idx.size(1)
    n = min(T, long)
    leaks = []
    for part, places in ((idx[:, :n], {1, n // 2, n - 1}), *([(idx, {T // 2})] if long < T else [])):
        before = logits_or_hidden(model, part)
        leaks += [leak_at(model, part, before, t) for t in places]
    return max(leaks)


def leak_at(model: nn.Module, idx: Tensor, before: Tensor | None, t: int) -> float:
    changed = idx.clone()
    changed[:, t:] = torch.where(idx[:, t:] > 0, 0, 1)
    after = logits_or_hidden(model, changed)
    if before is None or after is None:
        earlier, later = (
            (logits_and_loss_at(model, changed, part)[1] - logits_and_loss_at(model, idx, part)[1]).abs()
            for part in (slice(t), slice(t, None))
        )
        return relative_change(earlier, later).item()
    change = (after - before).abs().amax((0, 2))  # (T,)
    return relative_change(change[:t], change[t:].max()).max().item()


def logits_or_hidden(model: nn.Module, idx: Tensor) -> Tensor | None:
    """The logits (B, T, V) for idx (B, T); of a GPT that holds none, the last block's output (B, T, C); else None."""
    if not isinstance(model, GPT) or idx.numel() * model.vocab_size <= cross_entropy.LOGITS_AT_ONCE:
        return logits_and_loss_at(model, idx, slice(None))[0]
    found: list[Tensor] = []
    hook = model.transformer.h[-1].register_forward_hook(lambda _, __, output: found.append(output.detach()))
    try:
        seed_generator(0, idx.device)
        model(idx, last_only=True)
    finally:
        hook.remove()
    return found[0]


def logits_and_loss_at(model: nn.Module, idx: Tensor, part: slice) -> tuple[Tensor | None, Tensor]:
    """The logits (B, T, V), or None, and the loss of predicting the positions `part` of idx (B, T) itself."""
    seed_generator(0, idx.device)
    targets = torch.full_like(idx, -1)
    targets[:, part] = idx[:, part]
    logits, loss = model(idx, targets)
    return None if logits is None else logits.detach(), loss.detach()


def relative_change(earlier: Tensor, later: Tensor) -> Tensor:
    """earlier / later: 0 where nothing changes earlier, even if nothing changes later; inf where it is not finite."""
    return torch.where(earlier == 0, 0.0, earlier / later).nan_to_num(nan=math.inf, posinf=math.inf)


def sdpa_backend(model: GPT, batch_size: int) -> str | None:
    """What PyTorch's SDPA computes a training batch with: flash, efficient, cudnn, or math, which holds T x T; None
    where a layer calls no SDPA. The caller sets autocast as training does. The model is left in training mode."""
    weight, found = model.transformer.wte.weight, SDPABackendRecorder()
    x = torch.zeros(batch_size, model.block_size, weight.size(1), device=weight.device, requires_grad=True)  # (B, T, C)
    with found:
        model.train().attentions[0](x, (model.cos, model.sin) if model.transformer.wpe is None else None)
    return found.backend


class SDPABackendRecorder(TorchFunctionMode):
    """Asks PyTorch, for each call of SDPA, which backend it takes."""

    backend: str | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            chosen = SDPBackend(torch._fused_sdp_choice(*args, **(kwargs or {})))
            self.backend = chosen.name.lower().removesuffix("_attention")
        return func(*args, **(kwargs or {}))


def activation_bytes(model: GPT, batch_size: int, device: torch.device, dtype: torch.dtype) -> int:
    """Bytes that a training forward of (batch_size, block_size) on `device` in `dtype` saves for the backward pass, and
    with activation checkpointing those of one recomputed block. Nothing is allocated: fake tensors have shapes only."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    kept: dict[int, int] = {}
    alive: list[torch.UntypedStorage] = []

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage.nbytes()
        alive.append(storage)  # a freed storage's address could be used again
        return tensor

    where = "cuda" if device.type == "cuda" else "cpu"
    with FakeTensorMode(), torch.device(where):  # takes the branches and kernels of that device
        idx = torch.empty(batch_size, model.block_size, dtype=torch.int64)
        tensors = [*model.named_parameters(), *model.named_buffers()]
        state = {name: torch.empty(t.shape, requires_grad=t.requires_grad) for name, t in tensors}
        own = {tensor.untyped_storage()._cdata for tensor in state.values()}
        with autocast(where, dtype), torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            torch.func.functional_call(model.train(), state, (idx, idx))
    total, m = sum(kept.values()), model.config.model
    if m.activation_checkpointing:
        with torch.device("meta"):
            plain = GPT(replace(model.config, model=replace(m, activation_checkpointing=False)), model.vocab_size)
        total += (activation_bytes(plain, batch_size, device, dtype) - total) // m.n_layer
    return total
