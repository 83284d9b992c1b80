"""Decoding with a KV cache, as plain functions: prefill, decode_one_token, generate."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from model.gpt import GPT, Cache, GroupedQueryAttention, Linear


def sample_token(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """One token a row from logits (B, V) -> (B,).

    Temperature 0 is greedy. top_k keeps the k likeliest tokens; then top_p keeps the smallest set of them whose
    probability, at this temperature, reaches p: never fewer than one.
    """
    if temperature == 0:
        return logits.argmax(-1)
    # the largest becomes 0, and a tiny temperature sends the others to -inf, never to nan
    logits = (logits - logits.amax(-1, keepdim=True)).float() / max(temperature, 1e-30)
    if top_k is not None and top_k < logits.size(-1):
        kth = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    probs = logits.softmax(-1)
    if top_p is not None:
        ordered, order = probs.sort(dim=-1, descending=True)
        ahead = ordered.cumsum(-1) - ordered  # probability of the likelier tokens: 0 for the first
        left_out = ahead >= top_p
        left_out[:, 0] = False  # a tiny top_p is 0 in fp32
        ordered = ordered.masked_fill(left_out, 0.0)
        probs = torch.zeros_like(probs).scatter_(-1, order, ordered)
    return torch.multinomial(probs, 1, generator=generator).squeeze(-1)


def prefill(model: GPT, idx: Tensor, caches: list[Cache]) -> Tensor:
    """Fill the caches with idx (B, T) from position 0 and return the next token's logits (B, V)."""
    return model(idx, caches=caches, last_only=True)[0][:, -1]


def decode_one_token(model: GPT, token: Tensor, caches: list[Cache], pos: int) -> Tensor:
    """The logits (B, V) that follow `token` (B,), which stands at position `pos`."""
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
    """Continue the prompts idx (B, T), T >= 1, yielding one new token a row, (B,), max_new_tokens times.

    Past block_size the window moves on by half a block at a time (the cache is filled anew from the last half), so a
    token is predicted from block_size / 2 to block_size tokens. `dtype` is the type of the matrix products and, but for
    keys and values on a CPU, of the cache.
    """
    generator = torch.Generator(idx.device).manual_seed(seed)
    max_len = min(model.block_size, idx.size(1) + max_new_tokens)
    keys = isinstance(model.attentions[0], GroupedQueryAttention)
    caches = model.new_caches(idx.size(0), max_len, keys_dtype(dtype, idx.device) if keys else dtype)
    window = idx[:, -model.block_size :]  # what the cache holds
    casts = cast_linears(model, dtype) if dtype == torch.bfloat16 else []
    with decoding(casts, dtype, idx.device):
        logits = prefill(model, window, caches)
    for i in range(max_new_tokens):
        token = sample_token(logits, temperature, top_k, top_p, generator)
        yield token
        if i + 1 == max_new_tokens:
            return
        pos = window.size(1)
        window = torch.cat([window, token[:, None]], 1)
        with decoding(casts, dtype, idx.device):
            if pos < model.block_size:
                logits = decode_one_token(model, token, caches, pos)
            else:
                window = window[:, -max(1, model.block_size // 2) :]
                logits = prefill(model, window, caches)


def keys_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The type of cached keys and values. On a CPU it is fp32 at least: SDPA of one query takes 2 to 8 times as long on
    bf16 ones."""
    return torch.promote_types(dtype, torch.float32) if device.type == "cpu" else dtype


Casts = list[tuple[dict[str, Any], dict[str, Any]]]


def cast_linears(model: GPT, dtype: torch.dtype) -> Casts:
    """The weights of linear layers, the output layer's among them, in `dtype`, which decoding() puts in their places:
    where, and what."""
    casts: Casts = []
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weights: dict[str, Any] = module._parameters
            casts.append((weights, {name: p.to(dtype) for name, p in weights.items() if p is not None}))
    if model.lm_head is None:  # tied; tokens are still looked up in what the model has
        weight = model.transformer.wte.weight.to(dtype)  # (V, C)
        output = Linear(weight.size(1), weight.size(0), bias=False, device="meta")
        output.weight = nn.Parameter(weight, requires_grad=False)
        casts.append((vars(model), {"lm_head": output}))
    return casts


@contextmanager
def decoding(casts: Casts, dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Inference mode, and autocast that finds the weights cast: it would do so anew for every token."""
    with torch.inference_mode(), torch.autocast(device.type, dtype, enabled=dtype == torch.bfloat16):
        own = [(where, {name: where[name] for name in cast}) for where, cast in casts]
        try:
            for where, cast in casts:
                where.update(cast)
            yield
        finally:
            for where, weights in own:
                where.update(weights)
