"""Decoding with a KV cache, as plain functions: prefill, decode_one_token, generate."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from core.device import autocast
from core.schema import ConfigError, require
from model.gpt import GPT, Cache, LogitScale
from model.linear import Linear

NOT_FINITE = "the model's logits are not finite: no token can be drawn"


def sample_token(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw one token per row, (B, V) -> (B,). Temperature 0 is greedy. top_k keeps the k likeliest tokens. top_p then
    keeps the fewest of them whose probability at this temperature reaches p, at least one."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.float()
    # with the largest logit at 0 a tiny temperature gives -inf for the others, never nan
    logits = (logits - logits.amax(-1, keepdim=True)) / max(temperature, 1e-30)
    if top_k is not None and top_k < logits.size(-1):
        top = logits.topk(top_k, dim=-1)
        logits = torch.full_like(logits, -torch.inf).scatter(-1, top.indices, top.values)
    probs = logits.softmax(-1)
    if top_p is not None:
        ordered, order = probs.sort(dim=-1, descending=True)
        dropped = ordered.cumsum(-1) - ordered >= top_p  # the likelier tokens reach p without this one
        dropped[:, 0] = False  # a tiny top_p is 0 in fp32
        probs = torch.zeros_like(probs).scatter_(-1, order, ordered.masked_fill(dropped, 0.0))
    try:
        return torch.multinomial(probs, 1, generator=generator).squeeze(-1)
    except RuntimeError as error:  # raised on a CPU alone
        raise ConfigError(NOT_FINITE) from error


def prefill(model: GPT, idx: Tensor, caches: list[Cache]) -> Tensor:
    """Fill the caches with idx (B, T) from position 0. Returns the next token's logits (B, V)."""
    return model(idx, caches=caches, last_only=True)[0][:, -1]


def decode_one_token(model: GPT, token: Tensor, caches: list[Cache], pos: int) -> Tensor:
    """Append `token` (B,) at position `pos` to the caches. Returns the next token's logits (B, V)."""
    return model(token[:, None], caches=caches, pos=pos)[0][:, -1]


@torch.no_grad()
def generate(
    model: GPT,
    idx: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 1337,
    dtype: torch.dtype = torch.float32,
) -> Iterator[Tensor]:
    """Continue the prompts idx (B, T), T >= 1: yields the next token of each row, (B,), max_new_tokens times.

    A full cache is filled again with the last half of its tokens, so that past block_size a token is predicted from
    block_size / 2 to block_size tokens. Matmuls and the cache have `dtype`, but keys and values on a CPU at least fp32.
    Raises: ConfigError where logits are not finite.
    """
    generator = torch.Generator(idx.device).manual_seed(seed)
    max_len = min(model.block_size, idx.size(1) + max_new_tokens)
    cache_dtype = dtype
    if idx.is_cpu and model.attentions[0].caches_keys:  # in fp32 SDPA of one query is several times faster
        cache_dtype = torch.promote_types(dtype, torch.float32)
    caches = model.new_caches(idx.size(0), max_len, cache_dtype)
    window = idx[:, -model.block_size :]  # the tokens that the next one follows
    swaps = decoding_weights(model, dtype)
    for i in range(max_new_tokens):
        full = window.size(1) > model.block_size
        if full:
            window = window[:, -max(1, model.block_size // 2) :]
        with decoding(swaps, dtype, idx.device):
            if i == 0 or full:
                logits = prefill(model, window, caches)
                require(bool(logits.isfinite().all()), NOT_FINITE)
            else:
                logits = decode_one_token(model, window[:, -1], caches, window.size(1) - 1)
        token = sample_token(logits, temperature, top_k, top_p, generator)
        yield token
        window = torch.cat([window, token[:, None]], 1)


Swaps = list[tuple[dict[str, Any], dict[str, Any]]]  # an attribute dictionary of a module, and the values to put there


class Constant(nn.Module):
    """A module without inputs that returns the same tensor each time."""

    def __init__(self, value: Tensor):
        super().__init__()
        self.value = value

    def forward(self) -> Tensor:
        return self.value


@torch.no_grad()
def decoding_weights(model: GPT, dtype: torch.dtype) -> Swaps:
    """What a forward pass would compute again for every token: alpha of Lp norms, and the weights of linear layers, the
    output layer's included, reparametrised (weights=), and cast if `dtype` is bf16. decoding() swaps them in."""
    to_bf16 = dtype == torch.bfloat16
    swaps: Swaps = []
    for module in model.modules():
        if isinstance(module, LogitScale) and module.alpha is not None:
            swaps.append((module._modules, {"alpha": Constant(module.alpha())}))
        reparam = module.reparam if isinstance(module, Linear) else None
        if isinstance(module, nn.Linear) and (to_bf16 or reparam is not None):
            weights: dict[str, Any] = {name: p for name, p in module._parameters.items() if p is not None}
            if reparam is not None:
                with autocast(module.weight.device.type, dtype):
                    weights["weight"] = reparam(module.weight)
                swaps.append((module._modules, {"reparam": None}))
            if to_bf16:
                weights = {name: p.to(dtype) for name, p in weights.items()}
            swaps.append((module._parameters, weights))
    if to_bf16 and model.lm_head is None:  # tied: the embedding keeps the model's own weight
        weight = model.transformer.wte.weight.to(dtype)  # (V, C)
        output = Linear(weight.size(1), weight.size(0), bias=False, device="meta")
        output.weight = nn.Parameter(weight, requires_grad=False)
        swaps.append((vars(model), {"lm_head": output}))
    return swaps


@contextmanager
def decoding(swaps: Swaps, dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Inference mode and autocast, with decoding_weights() in place of the model's own."""
    with torch.inference_mode(), autocast(device.type, dtype):
        own = [(attributes, {name: attributes[name] for name in values}) for attributes, values in swaps]
        try:
            for attributes, values in swaps:
                attributes.update(values)
            yield
        finally:
            for attributes, values in own:
                attributes.update(values)
