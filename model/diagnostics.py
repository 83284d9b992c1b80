"""What a model does, measured without gradients and without drawing from the training generator."""

import math

import torch
from torch import Tensor, nn

from model.gpt import GPT


def future_leak(model: nn.Module, idx: Tensor) -> float:
    """How much of a token's influence reaches earlier positions: 0 for a causal model, inf where logits are not finite.

    Changes one token of idx (B, T), in the middle and at the end, and returns the largest change of a logit before it,
    relative to the largest change from it on. In the mode that the model is in; dropout draws the same masks each time.
    """
    T = idx.size(1)
    if T == 1 or model.vocab_size == 1:
        return 0.0

    def logits(idx: Tensor) -> Tensor:
        torch.manual_seed(0)
        return model(idx, idx)[0].detach()  # (B, T, V)

    before, leak = logits(idx), 0.0
    for t in {T // 2, T - 1}:
        changed = idx.clone()
        changed[:, t] = torch.where(idx[:, t] > 0, 0, 1)
        change = (logits(changed) - before).abs().amax((0, 2))  # (T,)
        leak = max(leak, (change[:t].max() / change[t:].max()).nan_to_num(nan=math.inf).item())
    return leak


def activation_bytes(model: GPT, batch_size: int) -> int:
    """Bytes a forward pass of (batch_size, block_size) keeps for the backward one. `model` is on the meta device."""
    idx = torch.empty(batch_size, model.block_size, dtype=torch.int64, device="meta")
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    kept: dict[int, int] = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage.nbytes()
        alive.append(storage)  # so that no address is used twice
        return tensor

    alive: list[torch.UntypedStorage] = []
    with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
        model.train()(idx, idx)
    return sum(kept.values())
