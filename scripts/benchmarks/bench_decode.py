"""MLA decode speed

python scripts/benchmarks/bench_decode.py [contexts=[4096,65536]] [batch=[1]] [rounds=25] [out=FOLDER]

Times one absorbed decoding step of one MLA layer of DeepSeek-V3's width, as one of 8 tensor-parallel shards has it
(QK-Normed MLA, 5.3 and Table 2). Sides:
absorbed    no QK norm
rms, lp     a QK norm: RMS, and Lp with p = 3. They cache one scalar per token and head more

contexts= are by default those of QK-Normed MLA on CUDA, elsewhere [4096,16384]. The process of the sides is started
starts=1 times. They share it, its weights and latents, and alternate step by step in random order, as the memory layout
of a process changes its times by several percent. After each start they have rounds=25 turns of seconds=0.2 each.
Further settings are train.py's: dtype=, device=, threads=, attention.kv_rank=512, ...
`attend` is attention and its write to the cache, without the projections; its bandwidth is the bytes of the cache over
its time. Beside it stands that of a copy, which takes turns with the sides. On CUDA steps are compiled, and ten of them
form a graph.
out= writes table.md and bench.json after every point. The last line is JSON.
"""

import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from core.device import resolve_device, resolve_dtype, synchronize
from core.files import write_atomic, write_json
from core.process import say
from core.schema import NOT_EMPTY, POSITIVE, AtLeast, Help, options, require, show
from model.generate import decoding_weights
from model.gpt import GPT, MultiHeadLatentAttention, Rope
from scripts.benchmarks.timing import (
    Side,
    Turn,
    Turns,
    Work,
    alternate,
    captured,
    machine,
    median,
    ratio,
    run_benchmark,
)
from sweeps.plan import compose
from training.config import TrainConfig, load_config

LAYER = [
    "model=mla_400m", "model.n_layer=1", "model.n_head=16", "model.n_embd=7168", "model.mlp_hidden=1",
    "attention.q_rank=1536", "attention.kv_rank=512", "attention.nope_dim=128", "attention.rope_dim=64",
    "attention.v_dim=128",
]  # fmt: skip
SIDES = {"absorbed": ["qk_norm=none"], "rms": ["qk_norm=rms"], "lp": ["qk_norm=lp", "qk_norm.p=3"]}  # their overrides
NAMES = {"absorbed": "MLA", "rms": "+ RMS", "lp": "+ Lp, p = 3"}
PAPER = {  # Table 2, as printed, H800, bf16. context: MLA, with QK norm (no unit: read as ms), overhead in percent
    4096: (1.715, 1.740, 1.41), 8192: (1.891, 1.909, 0.95), 16384: (2.082, 2.121, 1.87), 32768: (2.486, 2.511, 1.03),
    65536: (3.217, 3.253, 1.12), 131072: (5.427, 5.517, 1.66), 196608: (7.271, 7.392, 1.66),
    262144: (13.082, 13.274, 1.46),
}  # fmt: skip
Point = dict[str, Any]


@options
class DecodeOptions:
    contexts: Annotated[
        tuple[int, ...] | None, Help("positions in the cache; null: QK-Normed MLA's on CUDA, elsewhere [4096,16384]")
    ] = None
    batch: Annotated[tuple[int, ...], Help("sequences")] = (1,)
    rounds: Annotated[int, AtLeast(1), Help("turns of each side")] = 25
    starts: Annotated[int, AtLeast(1), Help("of the processes")] = 1
    seconds: Annotated[float, POSITIVE, Help("of a turn")] = 0.2
    out: Annotated[str | None, NOT_EMPTY, Help("folder for table.md and bench.json")] = None

    def check(self) -> None:
        for key, least in {"batch": 1, "contexts": 2}.items():
            numbers = getattr(self, key)
            good = numbers is None or (len(numbers) > 0 and min(numbers) >= least)
            require(good, f"{key}={show(numbers)} must be a list of integers >= {least}")


def settings(overrides: list[str], context: int) -> dict[str, TrainConfig]:
    """Side -> its config, with block_size = context."""
    common = [*LAYER, *overrides, f"model.block_size={context}"]
    configs = {name: load_config(compose([*common, *own])) for name, own in SIDES.items()}
    layout = configs["absorbed"].attention.name
    require(layout == "mla", f"attention={layout} must be mla")
    return configs


# -----------------------------------------------------------------------------
# The sides: one decoding step of an MLA layer, and a copy
# B batch, T context, nh heads, kr = kv_rank, dr = rope_dim

GRAPH = 10  # steps of a CUDA graph
CHUNK = 4096  # positions that are written together
ROOM = 64  # free positions of a cache of latents, as during generation: its sequences are then not contiguous

Step = Callable[[], Any]
Shared = dict[str, Tensor]  # weights and latents that the sides share


def layers(configs: dict[str, TrainConfig], batch: int) -> tuple[Work, dict[str, Any]]:
    """The sides in one process. A turn is n steps of each. Info: the bytes of the cache of each."""
    shared: Shared = {}
    built = {name: layer(config, batch, shared) for name, config in configs.items()}
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
    return work, {name: cache_bytes for name, (_, cache_bytes) in built.items()}


def layer(config: TrainConfig, batch: int, shared: Shared) -> tuple[dict[str, Step], int]:
    """Steps at position T - 1 of a full cache, which they do not change: "ms", a step (on CUDA a graph of GRAPH of
    them), and "attend_ms", its attention alone. Also returns the bytes of the cache."""
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

    cache = attn.new_cache(batch, context + ROOM, attn.c_proj.weight.dtype)
    cache.latent = shared.setdefault("latent", cache.latent)
    x = draw(batch, 1, config.model.n_embd)
    for pos in range(0, context, CHUNK):
        n = min(CHUNK, context - pos)
        k_rope = draw(batch, 1, n, attn.rope_dim)
        latent = attn.kv_a_norm(draw(batch, n, attn.kv_rank))  # (B, n, kr)
        k_rope = k_rope if attn.unified else attn.k_rope_norm(k_rope)  # (B, 1, n, dr)
        attn.write_cache(latent, attn.content_keys(latent), k_rope, rope, cache, pos)
    inputs = attn.project(x, rope, context - 1)
    steps: dict[str, Step] = {
        "ms": lambda: attn(x, rope, cache, context - 1),
        "attend_ms": lambda: attn.absorbed(*inputs, rope, cache, context - 1),
    }
    if device.type == "cuda":
        steps = {key: graph_of(one) for key, one in steps.items()}
    return steps, batch * context * gpt.cache_bytes_per_token(cache.latent.dtype)


def graph_of(step: Step) -> Step:
    """GRAPH compiled steps as one CUDA graph. Its result must be that of the step."""
    expected = step().float()
    replay = captured(torch.compile(step), GRAPH)
    error = float((replay().float() - expected).norm() / expected.norm())
    assert error < 5e-2, f"the CUDA graph differs from the step by {error}"
    return replay


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


# -----------------------------------------------------------------------------
# A point: one batch size and context


def bench_point(configs: dict[str, TrainConfig], batch: int, rounds: int, starts: int, seconds: float) -> Point:
    """The results of the sides; a turn is `seconds` long."""
    config = configs["absorbed"]
    context = config.model.block_size
    say(f"batch {batch}, context {context}")
    turns: Turns = {name: [] for name in [*configs, "copy"]}
    cache_bytes: dict[str, int] = {}
    for _ in range(starts):
        sides = [Side("MLA", layers, configs, batch), Side("copy", copying, config.device, config.threads)]
        once = {side.name: side.take_turn(1)["seconds"] for side in sides}
        n = {name: max(5 if taken < 1 else 1, round(seconds / taken)) for name, taken in once.items()}
        of_start = alternate({side.name: partial(side.take_turn, n[side.name]) for side in sides}, rounds)
        for side in sides:
            side.close()
        cache_bytes = sides[0].info
        for name in configs:
            turns[name] += [turn[name] for turn in of_start["MLA"]]
        turns["copy"] += of_start["copy"]
    copy = median(turns["copy"], "gb_per_s")
    rows = {name: row(cache_bytes[name], turns[name], copy) for name in configs}
    point: Point = {
        "batch": batch, "context": context, "rounds": rounds, "starts": starts, "copy_gb_per_s": copy, "sides": rows,
    }  # fmt: skip
    against = {name: ratio(turns, name, "absorbed", "ms", starts) for name in rows if name != "absorbed"}
    percent = {name: {key: 100 * (x - 1) for key, x in found.items()} for name, found in against.items()}
    return {**point, "time_over_absorbed": against, "overhead_percent": percent}


def row(cache_bytes: int, turns: list[Turn], copy: float) -> dict[str, Any]:
    attend_ms = median(turns, "attend_ms")
    rate = cache_bytes / attend_ms / 1e6
    return {
        "ms": median(turns, "ms"), "ms_lowest": min(t["ms"] for t in turns), "ms_highest": max(t["ms"] for t in turns),
        "attend_ms": attend_ms, "cache_bytes": cache_bytes, "attend_gb_per_s": rate, "attend_of_copy": rate / copy,
    }  # fmt: skip


# -----------------------------------------------------------------------------
# The results: bench.json and a table


def table(result: dict[str, Any]) -> str:
    """The points as Markdown, beside Table 2 of QK-Normed MLA."""
    heads = ["batch", "context", "starts × rounds", NAMES["absorbed"], NAMES["rms"], "overhead", NAMES["lp"],
             "overhead", "cache MiB", "attend with RMS, GB/s (of copying)", "paper: MLA", "paper: + QK norm",
             "overhead"]  # fmt: skip
    rows = [heads, ["---:"] * len(heads), *map(cells, result["points"])]
    lines = [
        "# Decode speed of MLA with a QK norm", "", "```", result["command"], "```", "",
        f"{result['device']}, {result['dtype']}, torch {result['torch']}. One layer, one token. Times are ms a step,",
        "median (lowest–highest) over rounds in which the sides alternate; the paper's are on an H800 in bf16. It",
        "states neither unit nor batch: read as ms of one sequence.",
        "An overhead is the median of the ratios within rounds with its 95 % interval, not the ratio of the medians.",
        "With several starts it is the median over starts of their medians. Each start has new processes.",
        "Fewer than six values have no interval: bench.json has their lowest and highest.",
        "",
        *("| " + " | ".join(r) + " |" for r in rows), "",
        f"Cache: {NAMES['absorbed']} / {NAMES['rms']}; Lp's is that of RMS.",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def cells(point: Point) -> list[str]:
    """A row of the table."""
    sides, context = point["sides"], point["context"]
    published = PAPER.get(context) if point["batch"] == 1 else None
    short = f"{context // 1024}k" if context % 1024 == 0 else str(context)
    times = {name: f"{s['ms']:.3f} ({s['ms_lowest']:.3f}–{s['ms_highest']:.3f})" for name, s in sides.items()}
    rms = sides["rms"]
    return [
        str(point["batch"]), short, f"{point['starts']} × {point['rounds']}",
        times["absorbed"], times["rms"], overhead_of(point, "rms"), times["lp"], overhead_of(point, "lp"),
        "/".join(f"{sides[name]['cache_bytes'] / 2**20:.1f}" for name in ("absorbed", "rms")),
        f"{rms['attend_gb_per_s']:.1f} ({100 * rms['attend_of_copy']:.0f} %)",
        *([f"{published[0]:.3f}", f"{published[1]:.3f}", f"{published[2]:.2f} %"] if published else ["–"] * 3),
    ]  # fmt: skip


def overhead_of(point: Point, name: str) -> str:
    found = point["overhead_percent"][name]
    return f"{found['median']:+.2f} %" + (f" ({found['low']:+.2f} to {found['high']:+.2f})" if "low" in found else "")


def bench(values: DecodeOptions, overrides: list[str]) -> dict[str, Any]:
    config = settings(overrides, 2)["absorbed"]
    device = resolve_device(config.device)
    usual = list(PAPER) if device.type == "cuda" else [4096, 16384]
    configs = {context: settings(overrides, context) for context in values.contexts or usual}
    folder = Path(values.out) if values.out else None
    if folder is not None:
        other = (folder / "table.md").exists() and not (folder / "bench.json").exists()
        require(not other, f"out={folder} has a table.md that is none of this program: write another out=")
        folder.mkdir(parents=True, exist_ok=True)
    points: list[Point] = []
    result = {
        "points": points, "dtype": str(resolve_dtype(config.dtype, device)).removeprefix("torch."), "words": overrides,
        "command": " ".join(["python scripts/benchmarks/bench_decode.py", *sys.argv[1:]]),
        **machine(config.device, config.threads),
    }  # fmt: skip
    for batch in values.batch:
        for of_context in configs.values():
            points.append(bench_point(of_context, batch, values.rounds, values.starts, values.seconds))
            if folder is not None:
                # after each point, as a later one may not fit the memory
                write_json(folder / "bench.json", result, indent=1)
                write_atomic(folder / "table.md", table(result).encode())
    print(table(result))
    return result


if __name__ == "__main__":
    sys.exit(run_benchmark(DecodeOptions, bench, __doc__))
