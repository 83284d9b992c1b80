"""What a model does, measured without gradients and without drawing from the training generator."""

import functools
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from model.gpt import GPT, LpNorm, QKNorm
from model.ops import visible_logits

LEAK_TOLERANCE = 1e-4  # of future_leak: round-off, in bfloat16 too


@torch.no_grad()
def diagnose(model: GPT, idx: Tensor) -> dict[str, float]:
    """What the attention heads do on the sequences idx (B, T), in evaluation mode.

    Values a head: max_logit; entropy of the attention in nats and effective_keys, its exponential, both means over
    the queries; q_norm and k_norm, mean 2-norms before the QK norm; with Lp QK-norm alpha (one a layer or a head), q_p
    and k_p, and mean and spread of g = ||x||_2 / ||x||_p, which is what p changes beside the direction: q_g_mean,
    q_g_std, k_g_mean, k_g_std. MLA's RoPE blocks, where they have norms of their own, are q_rope_norm, k_rope_p, …
    Keys are attn/VALUE/layer_I/head_J; attn/VALUE is the maximum over layers and heads for max_logit, else the mean.
    """
    tables: list[dict[str, Tensor]] = [{} for _ in model.attentions]
    hooks = []
    for attn, table in zip(model.attentions, tables, strict=True):
        attn.probe = functools.partial(look_at_logits, table)
        for side, norm in qk_norms(attn).items():
            hooks.append(norm.register_forward_hook(functools.partial(look_at_vectors, table, side)))
    was_training = model.training
    model.eval()
    try:
        model(idx, last_only=True)  # what is looked at comes before the logits
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
        for attn in model.attentions:
            attn.probe = None
    values: dict[str, float] = {}
    for layer, (attn, table) in enumerate(zip(model.attentions, tables, strict=True)):
        if attn.logit_scale.alpha is not None:
            table["alpha"] = attn.logit_scale.alpha().flatten()
            for side, norm in qk_norms(attn).items():
                table[f"{side}_p"] = torch.as_tensor(norm.p).flatten()
        for name, heads in table.items():
            values |= {f"attn/{name}/layer_{layer}/head_{head}": v for head, v in enumerate(heads.tolist())}
    for name in dict.fromkeys(name for table in tables for name in table):
        every = torch.cat([table[name].flatten() for table in tables])
        values[f"attn/{name}"] = (every.max() if name == "max_logit" else every.mean()).item()
    return values


def qk_norms(attn: nn.Module) -> dict[str, Any]:
    """{"q": its norm, "k": …}, and in MLA's blockwise layout "q_rope" and "k_rope"."""
    return {name.removesuffix("_norm"): norm for name, norm in attn.named_children() if isinstance(norm, QKNorm)}


def look_at_logits(table: dict[str, Tensor], q: Tensor, k: Tensor, scale: float) -> None:
    """Logits and attention of q (B, nh, T, dk) on k (B, nkv, T, dk) -> values (nh,)."""
    B, nh, T, _ = q.shape
    largest = torch.full((nh,), -math.inf, device=q.device)
    entropy, keys = torch.zeros(2, nh, device=q.device)
    for logits in visible_logits(q, k, scale):  # (B, nh, rows, S)
        log_att = logits.log_softmax(-1)
        h = -(log_att.exp() * log_att.masked_fill(logits == -math.inf, 0.0)).sum(-1)  # (B, nh, rows)
        largest = torch.maximum(largest, logits.amax((0, 2, 3)))
        entropy += h.sum((0, 2)) / (B * T)
        keys += h.exp().sum((0, 2)) / (B * T)
    table |= {"max_logit": largest, "entropy": entropy, "effective_keys": keys}


def look_at_vectors(table: dict[str, Tensor], side: str, norm: nn.Module, inputs: Any, output: Tensor) -> None:
    """Vectors (B, n, T, hs) on their way into a QK norm -> values (n,), n query or key heads."""
    x = inputs[0].float()
    length = torch.linalg.vector_norm(x, 2, -1)  # (B, n, T)
    table[f"{side}_norm"] = length.mean((0, 2))
    if isinstance(norm, LpNorm):
        g = length * norm.scale(x)[..., 0]
        table |= {f"{side}_g_mean": g.mean((0, 2)), f"{side}_g_std": g.std((0, 2), correction=0)}


def future_leak(model: nn.Module, idx: Tensor) -> float:
    """How much of later tokens' influence reaches earlier positions of idx (B, T): 0 for a causal model, inf where it
    is not finite."""
    T = idx.size(1)
    if T == 1 or model.vocab_size == 1:
        return 0.0
    return max(leak for leak, _ in future_leaks(model, idx, {1, T // 2, T - 1}).values())


def future_leaks(model: nn.Module, idx: Tensor, positions: Iterable[int]) -> dict[int, tuple[float, int | None]]:
    """What changing the tokens of idx (B, T) from some t > 0 on does: t -> the largest change of a logit before t,
    relative to the largest one from it on, and the first position before t where that is more than round-off.

    Where the logits are never held whole, of the loss, and no position. In the mode that the model is in; dropout draws
    the same masks each time.
    """

    def outcome(idx: Tensor, part: slice) -> tuple[Tensor | None, Tensor]:
        """Logits (B, T, V) and the loss of the positions `part`."""
        torch.manual_seed(0)
        targets = torch.full_like(idx, -1)
        targets[:, part] = idx[:, part]
        logits, loss = model(idx, targets)
        return None if logits is None else logits.detach(), loss.detach()

    before = outcome(idx, slice(None))[0]
    leaks: dict[int, tuple[float, int | None]] = {}
    for t in positions:
        changed = idx.clone()
        changed[:, t:] = torch.where(idx[:, t:] > 0, 0, 1)
        if before is None:
            earlier, later = (
                (outcome(changed, part)[1] - outcome(idx, part)[1]).abs() for part in (slice(t), slice(t, None))
            )
            leaks[t] = share_of(earlier, later).item(), None
            continue
        after = outcome(changed, slice(None))[0]
        assert after is not None
        change = (after - before).abs().amax((0, 2))  # (T,)
        share = share_of(change[:t], change[t:].max())  # (t,)
        moved = (share >= LEAK_TOLERANCE).nonzero()
        leaks[t] = share.max().item(), int(moved[0]) if len(moved) else None
    return leaks


def share_of(earlier: Tensor, later: Tensor) -> Tensor:
    """earlier / later: 0 where nothing moves earlier, though nothing may move later either, inf where not finite."""
    return torch.where(earlier == 0, 0.0, earlier / later).nan_to_num(nan=math.inf, posinf=math.inf)


def activation_bytes(model: GPT, batch_size: int, device: torch.device, dtype: torch.dtype) -> int:
    """Bytes that a forward pass of (batch_size, block_size) on `device` in `dtype` keeps for the backward one; with
    activation checkpointing also those of a block that the backward pass makes again. Nothing of it is allocated."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    kept: dict[int, int] = {}
    alive: list[torch.UntypedStorage] = []

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage.nbytes()
        alive.append(storage)  # so that no address is used twice
        return tensor

    where = "cuda" if device.type == "cuda" else "cpu"
    with FakeTensorMode(), torch.device(where):  # which takes the branches and kernels of that device
        idx = torch.empty(batch_size, model.block_size, dtype=torch.int64)
        tensors = [*model.named_parameters(), *model.named_buffers()]
        state = {name: torch.empty(t.shape, requires_grad=t.requires_grad) for name, t in tensors}
        own = {tensor.untyped_storage()._cdata for tensor in state.values()}
        low = torch.autocast(where, dtype, enabled=dtype != torch.float32)
        with low, torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            torch.func.functional_call(model.train(), state, (idx, idx))
    total, m = sum(kept.values()), model.config.model
    if m.activation_checkpointing:
        with torch.device("meta"):
            plain = GPT(replace(model.config, model=replace(m, activation_checkpointing=False)), model.vocab_size)
        total += (activation_bytes(plain, batch_size, device, dtype) - total) // m.n_layer
    return total
