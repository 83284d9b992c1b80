"""What a model does, measured without gradients and without drawing from the training generator."""

import torch

from model.gpt import GPT


@torch.no_grad()
def future_leak(model: GPT) -> float:
    """How much of a token's influence reaches earlier positions: 0 for a causal model.

    Changes one token of a random context of block_size, in the middle and at the end, and returns the largest change
    of a logit before it, relative to the largest change from it on.
    """
    T, V = model.block_size, model.vocab_size
    if T == 1 or V == 1:
        return 0.0
    device = next(model.parameters()).device
    idx = torch.randint(V, (1, T), generator=torch.Generator().manual_seed(0)).to(device)
    was_training = model.training
    model.eval()
    before = model(idx)[0]  # (1, T, V)
    leak = 0.0
    for t in {T // 2, T - 1}:
        changed = idx.clone()
        changed[0, t] = (changed[0, t] + 1) % V
        change = (model(changed)[0] - before).abs().amax(-1)[0]  # (T,)
        leak = max(leak, (change[:t].max() / change[t:].max().clamp_min(1e-30)).item())
    model.train(was_training)
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
