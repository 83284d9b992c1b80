"""Decoding with a KV cache, as plain functions: prefill, decode_one_token, generate."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from model.gpt import GPT, Cache


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
        ordered = ordered.masked_fill(ahead >= top_p, 0.0)
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
    token is predicted from block_size / 2 to block_size tokens. `dtype` is the autocast and cache type.
    """
    generator = torch.Generator(idx.device).manual_seed(seed)
    autocast = torch.autocast(idx.device.type, dtype, enabled=dtype == torch.bfloat16)
    max_len = min(model.block_size, idx.size(1) + max_new_tokens)
    caches = model.new_caches(idx.size(0), max_len, dtype)
    window = idx[:, -model.block_size :]  # what the cache holds
    with kept_casts():
        with autocast:
            logits = prefill(model, window, caches)
        for i in range(max_new_tokens):
            token = sample_token(logits, temperature, top_k, top_p, generator)
            yield token
            if i + 1 == max_new_tokens:
                return
            pos = window.size(1)
            window = torch.cat([window, token[:, None]], 1)
            with autocast:
                if pos < model.block_size:
                    logits = decode_one_token(model, token, caches, pos)
                else:
                    window = window[:, -max(1, model.block_size // 2) :]
                    logits = prefill(model, window, caches)


@contextmanager
def kept_casts() -> Iterator[None]:
    """Have autocast keep the weights that it has cast: at the end of each use it would forget them, and cast all of
    them for every token. (In inference mode it keeps none.)"""
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
