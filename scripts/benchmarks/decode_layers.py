"""What bench_decode.py times: one decoding step of an MLA layer with each kind of cache, and a copy.

Shapes: B batch, T context, nh heads, kr = kv_rank, dn, dr and dv channels of a head: nope, RoPE, value.
"""

import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from core.device import resolve_device, resolve_dtype, synchronize
from model.generate import decoding_weights, kv_cache_dtype
from model.gpt import GPT, LatentCache, MultiHeadLatentAttention, Rope
from model.ops import causal_attention
from scripts.benchmarks.timing import Turn, Work
from training.config import TrainConfig

GRAPH = 10  # steps of a CUDA graph
CHUNK = 4096  # positions that are written together
ROOM = 64  # free positions of a cache of latents, as during generation: its sequences are then not contiguous

Step = Callable[[], Any]
Shared = dict[str, Tensor]  # weights and latents that sides of one process share


class Cached(NamedTuple):
    """A cache for `context` tokens. held: the tensors that a step must read. write() caches latent (B, n, kr) and
    k_rope (B, 1, n, dr) of the tokens from `pos` on. attend() caches the last token and returns the output
    (B, nh, 1, dv) of its queries (B, nh, 1, dn) and (B, nh, 1, dr)."""

    held: list[Tensor]
    write: Callable[[Tensor, Tensor, int], None]
    attend: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def full_keys(attn: Any, rope: Rope, batch: int, context: int) -> Cached:
    """Caches the normalised keys and the values of every token."""
    weight = attn.c_proj.weight
    shape, dtype = (batch, attn.n_head, context), kv_cache_dtype(weight.dtype, weight.device)
    k = torch.empty(*shape, attn.nope_dim + attn.rope_dim, dtype=dtype, device=weight.device)  # (B, nh, T, dn + dr)
    v = torch.empty(*shape, attn.v_dim, dtype=dtype, device=weight.device)  # (B, nh, T, dv)

    def write(latent: Tensor, k_rope: Tensor, pos: int) -> None:
        new = slice(pos, pos + latent.size(1))
        k[:, :, new], v[:, :, new] = attn.keys_and_values(latent, k_rope, rope, pos)

    def attend(q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor) -> Tensor:
        write(latent, k_rope, context - 1)
        return causal_attention(torch.cat([q_nope, q_rope], -1), k, v, attn.logit_scale.softmax_scale)

    return Cached([k, v], write, attend)


def reexpanded(attn: Any, rope: Rope, batch: int, context: int) -> Cached:
    """Caches latents; computes the keys and values of all tokens at every step."""
    latents = attn.c_proj.weight.new_empty(batch, context, attn.kv_rank)  # (B, T, kr)
    k_ropes = attn.c_proj.weight.new_empty(batch, 1, context, attn.rope_dim)  # (B, 1, T, dr)

    def write(latent: Tensor, k_rope: Tensor, pos: int) -> None:
        latents[:, pos : pos + latent.size(1)] = latent
        k_ropes[:, :, pos : pos + latent.size(1)] = k_rope

    def attend(q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor) -> Tensor:
        write(latent, k_rope, context - 1)
        return attn.explicit(q_nope, q_rope, latents, k_ropes, rope)

    return Cached([latents, k_ropes], write, attend)


def absorbed(attn: Any, rope: Rope, batch: int, context: int, shared: Shared) -> Cached:
    """Caches latents, and with a QK norm its scalar of every token and head; never forms keys or values."""
    cache: LatentCache = attn.new_cache(batch, context + ROOM, attn.c_proj.weight.dtype)
    cache.latent = shared.setdefault("latent", cache.latent)
    of_heads = [x[:, :, :context] for x in (cache.key_scale, cache.mean_term) if x is not None]

    def write(latent: Tensor, k_rope: Tensor, pos: int) -> None:
        attn.write_cache(latent, attn.content_keys(latent), k_rope, rope, cache, pos)

    def attend(q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor) -> Tensor:
        return attn.absorbed(q_nope, q_rope, latent, k_rope, rope, cache, context - 1)

    return Cached([cache.latent[:, :context], cache.k_rope[:, :context], *of_heads], write, attend)


def layers(configs: dict[str, TrainConfig], batch: int) -> tuple[Work, dict[str, Any]]:
    """Sides that share a process, weights and latents. A turn is n steps of each; the info is by name as well."""
    shared: Shared = {}
    built = {name: layer(name, config, batch, shared) for name, config in configs.items()}
    device = resolve_device(next(iter(configs.values())).device)
    order, steps = random.Random(0), GRAPH if device.type == "cuda" else 1

    @torch.inference_mode()  # as generate() decodes
    def work(n: int) -> Turn:
        ms = {name: {"ms": 0.0, "attend_ms": 0.0} for name in built}
        for key in ("ms", "attend_ms"):
            for timed in [False, *[True] * n]:  # first once untimed: the processor's cache holds other data
                for name in order.sample([*built], len(built)):
                    began = time.perf_counter()
                    built[name][0][key]()
                    synchronize(device)
                    if timed:
                        ms[name][key] += 1000 * (time.perf_counter() - began) / (n * steps)
        return ms

    work(1)  # warm-up
    return work, {name: info for name, (_, info) in built.items()}


def layer(name: str, config: TrainConfig, batch: int, shared: Shared) -> tuple[dict[str, Step], dict[str, Any]]:
    """Steps at position T - 1 of a full cache, which they do not change. Returns "ms", a step (on CUDA a graph of GRAPH
    of them), "attend_ms", its attention alone, and the side's info."""
    torch.set_grad_enabled(False)
    torch.set_num_threads(config.threads or torch.get_num_threads())
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    gpt = GPT(config.gpt, vocab_size=1)
    gpt.init_weights(config.seed)
    gpt.to(device).eval()
    for attributes, values in decoding_weights(gpt, dtype):  # as in generate()
        attributes.update(values)
    attn: MultiHeadLatentAttention = gpt.attentions[0]
    for key, weight in attn.named_parameters():
        weight.data = shared.setdefault(key, weight.data)
    rope: Rope = (gpt.cos, gpt.sin)  # type: ignore[assignment]
    context, generator = config.model.block_size, torch.Generator(device).manual_seed(config.seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    kinds = {"full_keys": full_keys, "reexpanded": reexpanded}
    kind = kinds.get(name, partial(absorbed, shared=shared))
    side = kind(attn, rope, batch, context)
    x = draw(batch, 1, config.model.n_embd)
    for pos in range(0, context, CHUNK):
        n = min(CHUNK, context - pos)
        k_rope = draw(batch, 1, n, attn.rope_dim)
        latent = attn.kv_a_norm(draw(batch, n, attn.kv_rank))
        side.write(latent, k_rope if attn.unified else attn.k_rope_norm(k_rope), pos)
    inputs = attn.project(x, rope, context - 1)

    def step() -> Tensor:  # MultiHeadLatentAttention.forward, with this side's cache
        y = side.attend(*attn.project(x, rope, context - 1))
        return attn.c_proj(y.transpose(1, 2).reshape(batch, 1, -1))

    y = step()
    steps: dict[str, Step] = {"ms": step, "attend_ms": lambda: side.attend(*inputs)}
    if device.type == "cuda":
        steps = {key: graph_of(one) for key, one in steps.items()}
    cached, weights = (sum(tensor.nbytes for tensor in tensors) for tensors in (side.held, attn.parameters()))
    return steps, {
        "cache_bytes": cached, "weight_bytes": weights, "dtype": str(dtype), "y": y.flatten().tolist(),
    }  # fmt: skip


def graph_of(step: Step) -> Step:
    """GRAPH compiled steps as one CUDA graph. Its result must be that of the step."""
    expected = step().float()
    compiled = torch.compile(step)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # compilation and the first calls of kernels cannot be captured
        for _ in range(3):
            compiled()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(GRAPH):
            y = compiled()
    graph.replay()
    error = float((y.float() - expected).norm() / expected.norm())
    assert error < 5e-2, f"the CUDA graph differs from the step by {error}"
    return graph.replay


def copying(device_word: str, threads: int | None) -> tuple[Work, dict[str, Any]]:
    """The bandwidth of a copy that is larger than any cache: bytes read and written a second."""
    torch.set_num_threads(threads or torch.get_num_threads())
    device = resolve_device(device_word)
    source = torch.ones(2**30 if device.type == "cuda" else 2**28, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def work(n: int) -> Turn:
        began = time.perf_counter()
        for _ in range(n):
            target.copy_(source)
        synchronize(device)
        return {"gb_per_s": 2 * n * source.nbytes / (time.perf_counter() - began) / 1e9}

    work(1)
    return work, {}
