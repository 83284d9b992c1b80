"""MLA decode speed

python scripts/benchmarks/bench_decode.py [contexts=[4096,65536]] [batch=[1]] [rounds=25] [out=FOLDER]

Times one step of one MLA layer of DeepSeek-V3's width, as one of 8 tensor-parallel shards has it (QK-Normed MLA, 5.3
and Table 2). Sides:
absorbed    the latent cache alone
rms, lp     absorbed, with a QK norm: RMS, and Lp with p = 3. They cache one scalar per token and head more
full_keys   RMS; caches the normalised keys and the values of every token, on a CPU in fp32 (see model/generate.py)
reexpanded  RMS; caches latents and computes keys and values anew at every step

contexts= are by default those of QK-Normed MLA on CUDA, elsewhere [4096,16384]. The processes are started starts=1
times. After each start the sides alternate: rounds=25 turns of seconds=0.2 each. absorbed, rms and lp share a process,
weights and latents and alternate step by step in random order, as the memory layout of a process changes its times by
several percent. Further settings are train.py's: dtype=, device=, threads=, attention.kv_rank=512, ...
`attend` is attention and its write to the cache, without the projections. Bandwidth is the bytes that a step must read,
divided by its time; beside it stands that of a copy, which takes turns with the sides. On CUDA steps are compiled, and
ten of them form a graph.
out= writes table.md and bench.json after every point; with from=A.json,B.json it writes them from earlier results
and measures nothing. The last line is JSON.
"""

import json
import math
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from core.device import resolve_device, resolve_dtype, synchronize
from core.files import write_atomic, write_json
from core.process import say
from core.schema import NOT_EMPTY, POSITIVE, AtLeast, ConfigError, Help, options, require, show
from model.generate import decoding_weights, kv_cache_dtype
from model.gpt import GPT, LatentCache, MultiHeadLatentAttention, Rope
from model.ops import causal_attention
from scripts.benchmarks.timing import Side, Turn, Turns, Work, alternate, machine, median, ratio, run_benchmark
from sweeps.plan import compose
from training.config import TrainConfig, load_config

LAYER = [
    "model=mla_400m", "model.n_layer=1", "model.n_head=16", "model.n_embd=7168", "model.mlp_hidden=1",
    "attention.q_rank=1536", "attention.kv_rank=512", "attention.nope_dim=128", "attention.rope_dim=64",
    "attention.v_dim=128",
]  # fmt: skip
ABSORBED = ("absorbed", "rms", "lp")
NORMS = {"absorbed": "none", "rms": "rms", "lp": "lp", "full_keys": "rms", "reexpanded": "rms"}  # side -> its QK norm
NAMES = {
    "absorbed": "MLA", "rms": "+ RMS", "lp": "+ Lp, p = 3", "full_keys": "full keys", "reexpanded": "re-expanded",
}  # fmt: skip
PAPER = {  # Table 2, as printed, H800, bf16. context: MLA, with QK norm (no unit: read as ms), overhead in percent
    4096: (1.715, 1.740, 1.41), 8192: (1.891, 1.909, 0.95), 16384: (2.082, 2.121, 1.87), 32768: (2.486, 2.511, 1.03),
    65536: (3.217, 3.253, 1.12), 131072: (5.427, 5.517, 1.66), 196608: (7.271, 7.392, 1.66),
    262144: (13.082, 13.274, 1.46),
}  # fmt: skip
CACHED = [name for name in NORMS if name != "lp"]  # whose cache sizes are listed; Lp's is that of RMS

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
    sides: Annotated[str, Help("what is compared")] = ",".join(NORMS)
    out: Annotated[str | None, NOT_EMPTY, Help("folder for table.md and bench.json")] = None
    from_: Annotated[str | None, NOT_EMPTY, Help("earlier results, A.json,B.json: nothing is measured")] = None

    @property
    def names(self) -> list[str]:
        return [name for name in self.sides.split(",") if name]

    def check(self) -> None:
        for key, least in {"batch": 1, "contexts": 2}.items():
            numbers = getattr(self, key)
            good = numbers is None or (len(numbers) > 0 and min(numbers) >= least)
            require(good, f"{key}={show(numbers)} must be a list of integers >= {least}")
        good = bool(self.names) and set(self.names) <= NORMS.keys()
        require(good, f"sides={self.sides} must be a list of {', '.join(NORMS)}")
        require(self.from_ is None or self.out is not None, f"from={self.from_} needs out=")


def settings(names: list[str], overrides: list[str], context: int) -> dict[str, TrainConfig]:
    """Side -> its config, with block_size = context."""
    configs = {}
    for name in names:
        own = [f"qk_norm={NORMS[name]}", f"model.block_size={context}", *(["qk_norm.p=3"] if name == "lp" else [])]
        configs[name] = load_config(compose([*LAYER, *overrides, *own]))
        layout = configs[name].attention.name
        require(layout == "mla", f"attention={layout} must be mla")
    return configs


# -----------------------------------------------------------------------------
# The sides: one decoding step of an MLA layer with each kind of cache, and a copy
# B batch, T context, nh heads, kr = kv_rank, dn, dr and dv channels of a head: nope, RoPE, value

GRAPH = 10  # steps of a CUDA graph
CHUNK = 4096  # positions that are written together
ROOM = 64  # free positions of a cache of latents, as during generation: its sequences are then not contiguous

Step = Callable[[], Any]
Shared = dict[str, Tensor]  # weights and latents that sides of one process share


class SideCache(NamedTuple):
    """A cache for `context` tokens. held: the tensors that a step must read. write() caches latent (B, n, kr) and
    k_rope (B, 1, n, dr) of the tokens from `pos` on. attend() caches the last token and returns the output
    (B, nh, 1, dv) of its queries (B, nh, 1, dn) and (B, nh, 1, dr)."""

    held: list[Tensor]
    write: Callable[[Tensor, Tensor, int], None]
    attend: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def full_keys(attn: Any, rope: Rope, batch: int, context: int) -> SideCache:
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

    return SideCache([k, v], write, attend)


def reexpanded(attn: Any, rope: Rope, batch: int, context: int) -> SideCache:
    """Caches latents; computes the keys and values of all tokens at every step."""
    latents = attn.c_proj.weight.new_empty(batch, context, attn.kv_rank)  # (B, T, kr)
    k_ropes = attn.c_proj.weight.new_empty(batch, 1, context, attn.rope_dim)  # (B, 1, T, dr)

    def write(latent: Tensor, k_rope: Tensor, pos: int) -> None:
        latents[:, pos : pos + latent.size(1)] = latent
        k_ropes[:, :, pos : pos + latent.size(1)] = k_rope

    def attend(q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor) -> Tensor:
        write(latent, k_rope, context - 1)
        return attn.explicit(q_nope, q_rope, latents, k_ropes, rope)

    return SideCache([latents, k_ropes], write, attend)


def absorbed(attn: Any, rope: Rope, batch: int, context: int, shared: Shared) -> SideCache:
    """Caches latents, and with a QK norm its scalar of every token and head; never forms keys or values."""
    cache: LatentCache = attn.new_cache(batch, context + ROOM, attn.c_proj.weight.dtype)
    cache.latent = shared.setdefault("latent", cache.latent)
    of_heads = [x[:, :, :context] for x in (cache.key_scale, cache.mean_term) if x is not None]

    def write(latent: Tensor, k_rope: Tensor, pos: int) -> None:
        attn.write_cache(latent, attn.content_keys(latent), k_rope, rope, cache, pos)

    def attend(q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor) -> Tensor:
        return attn.absorbed(q_nope, q_rope, latent, k_rope, rope, cache, context - 1)

    return SideCache([cache.latent[:, :context], cache.k_rope[:, :context], *of_heads], write, attend)


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


# -----------------------------------------------------------------------------
# A point: one batch size and context


def bench_point(configs: dict[str, TrainConfig], batch: int, rounds: int, starts: int, seconds: float) -> Point:
    """The results of the sides in `configs`; a turn is `seconds` long."""
    context = next(iter(configs.values())).model.block_size
    say(f"batch {batch}, context {context}")
    turns: Turns = {name: [] for name in [*configs, "copy"]}
    infos: dict[str, Any] = {}
    for _ in range(starts):
        infos, of_start = take_turns(configs, batch, rounds, seconds)
        for name in turns:
            turns[name] += of_start[name]
    copy = median(turns["copy"], "gb_per_s")
    rows = {name: row(infos[name], turns[name], copy) for name in configs}
    for name, error in differences(infos).items():
        rows[name]["difference_from_full_keys"] = error
    point: Point = {
        "batch": batch, "context": context, "rounds": rounds, "starts": starts, "copy_gb_per_s": copy, "sides": rows,
    }  # fmt: skip
    if "absorbed" in rows:
        against = {name: ratio(turns, name, "absorbed", "ms", starts) for name in rows if name != "absorbed"}
        percent = {name: {key: 100 * (x - 1) for key, x in found.items()} for name, found in against.items()}
        point["time_over_absorbed"] = against
        point["overhead_percent"] = {name: percent[name] for name in ABSORBED if name in percent}
    return point


def take_turns(
    configs: dict[str, TrainConfig], batch: int, rounds: int, seconds: float
) -> tuple[dict[str, Any], Turns]:
    """One start of the processes, one for the absorbed sides and one for each other side: infos of the sides, and turns
    of them and of "copy"."""
    config = next(iter(configs.values()))
    groups = [[name for name in configs if name in ABSORBED], *([name] for name in configs if name not in ABSORBED)]
    asked = [{name: configs[name] for name in group} for group in groups if group]
    sides = [Side(", ".join(group), layers, group, batch) for group in asked]
    running = [*sides, Side("copy", copying, config.device, config.threads)]
    once = {side.name: side.take_turn(1)["seconds"] for side in running}
    n = {name: max(5 if taken < 1 else 1, round(seconds / taken)) for name, taken in once.items()}
    turns = alternate({side.name: partial(side.take_turn, n[side.name]) for side in running}, rounds)
    for side in running:
        side.stop()
    infos = {name: info for side in sides for name, info in side.info.items()}
    by_name = {name: [turn[name] for turn in turns[side.name]] for side in sides for name in side.info}
    return infos, {**by_name, "copy": turns["copy"]}


def differences(infos: dict[str, Any]) -> dict[str, float]:
    """Relative differences of the sides with RMS, which compute the same, from full_keys. Fails for a large one."""
    found: dict[str, float] = {}
    if full := infos.get("full_keys"):
        tolerance = 1e-4 if full["dtype"] == "torch.float32" else 5e-2
        for name in infos.keys() & {name for name, norm in NORMS.items() if norm == "rms"}:
            found[name] = math.dist(infos[name]["y"], full["y"]) / math.hypot(*full["y"])
            assert found[name] < tolerance, f"{name} differs from full_keys by {found[name]}"
    return found


def row(info: dict[str, Any], turns: list[dict[str, Any]], copy: float) -> dict[str, Any]:
    ms, attend_ms = median(turns, "ms"), median(turns, "attend_ms")
    step_rate = (info["cache_bytes"] + info["weight_bytes"]) / ms / 1e6
    attend_rate = info["cache_bytes"] / attend_ms / 1e6
    return {
        "ms": ms, "ms_lowest": min(t["ms"] for t in turns), "ms_highest": max(t["ms"] for t in turns),
        "attend_ms": attend_ms, "cache_bytes": info["cache_bytes"], "weight_bytes": info["weight_bytes"],
        "gb_per_s": step_rate, "of_copy": step_rate / copy,
        "attend_gb_per_s": attend_rate, "attend_of_copy": attend_rate / copy,
    }  # fmt: skip


# -----------------------------------------------------------------------------
# The results as a folder: bench.json and a table


def write_results(result: dict[str, Any], folder: Path) -> None:
    write_json(folder / "bench.json", result, indent=1)
    write_atomic(folder / "table.md", table(result).encode())


def read_results(files: str) -> dict[str, Any]:
    """The points and commands of several bench.json, which must come from one machine."""
    found: list[dict[str, Any]] = []
    names = files.split(",")
    for file in names:
        try:
            result = json.loads(Path(file).read_text())
            table(result)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"from={file} must be a bench.json of this benchmark: {error}") from error
        for key in ("device", "dtype", "torch"):
            require(not found or result[key] == found[0][key], f"from={file} has another {key} than {names[0]}")
        found.append(result)
    points = sorted((p for result in found for p in result["points"]), key=lambda p: (p["batch"], p["context"]))
    return {**found[0], "points": points, "command": "; ".join(result["command"] for result in found)}


def table(result: dict[str, Any]) -> str:
    """The points as Markdown, beside Table 2 of QK-Normed MLA."""
    heads = ["batch", "context", "starts × rounds", NAMES["absorbed"], NAMES["rms"], "overhead", NAMES["lp"],
             "overhead", NAMES["full_keys"], NAMES["reexpanded"], "cache MiB", "attend with RMS, GB/s (of copying)",
             "paper: MLA", "paper: + QK norm", "overhead"]  # fmt: skip
    rows = [heads, ["---:"] * len(heads), *map(cells, result["points"])]
    lines = [
        "# Decode speed of MLA with a QK norm", "", "```", *result["command"].split("; "), "```", "",
        f"{result['device']}, {result['dtype']}, torch {result['torch']}. One layer, one token. Times are ms a step,",
        "median (lowest–highest) over rounds in which the sides alternate; the paper's are on an H800 in bf16. It",
        "states neither unit nor batch: read as ms of one sequence.",
        "An overhead is the median of the ratios within rounds with its 95 % interval, not the ratio of the medians.",
        "With several starts it is the median over starts of their medians. Each start has new processes.",
        "Fewer than six values have no interval: bench.json has their lowest and highest.",
        "",
        *("| " + " | ".join(r) + " |" for r in rows), "",
        f"Cache: {' / '.join(NAMES[n] for n in CACHED)}; Lp's is that of RMS. On a CPU full keys are in fp32.",
        "– marks a side that was not measured.",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def cells(point: Point) -> list[str]:
    """A row of the table."""
    sides, published = point["sides"], PAPER.get(point["context"]) if point["batch"] == 1 else None
    times, overheads = ({name: of(point, name) for name in NORMS} for of in (time_of, overhead_of))
    rms = sides.get("rms")
    return [
        str(point["batch"]), short(point["context"]), f"{point['starts']} × {point['rounds']}",
        times["absorbed"], times["rms"], overheads["rms"], times["lp"], overheads["lp"], times["full_keys"],
        times["reexpanded"],
        "/".join(f"{sides[n]['cache_bytes'] / 2**20:.1f}" if n in sides else "–" for n in CACHED),
        f"{rms['attend_gb_per_s']:.1f} ({100 * rms['attend_of_copy']:.0f} %)" if rms else "–",
        *([f"{published[0]:.3f}", f"{published[1]:.3f}", f"{published[2]:.2f} %"] if published else ["–"] * 3),
    ]  # fmt: skip


def time_of(point: Point, name: str) -> str:
    side = point["sides"].get(name)
    return f"{side['ms']:.3f} ({side['ms_lowest']:.3f}–{side['ms_highest']:.3f})" if side else "–"


def overhead_of(point: Point, name: str) -> str:
    found = point.get("overhead_percent", {}).get(name)
    if found is None:
        return "–"
    return f"{found['median']:+.2f} %" + (f" ({found['low']:+.2f} to {found['high']:+.2f})" if "low" in found else "")


def short(context: int) -> str:
    return f"{context // 1024}k" if context % 1024 == 0 else str(context)


def bench(values: DecodeOptions, overrides: list[str]) -> dict[str, Any]:
    folder = Path(values.out) if values.out else None
    if values.from_ and folder is not None:
        earlier = read_results(values.from_)
        folder.mkdir(parents=True, exist_ok=True)
        write_results(earlier, folder)
        return earlier
    config = settings(values.names[:1], overrides, 2)[values.names[0]]
    device = resolve_device(config.device)
    usual = list(PAPER) if device.type == "cuda" else [4096, 16384]
    configs = {context: settings(values.names, overrides, context) for context in values.contexts or usual}
    if folder is not None:
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
                write_results(result, folder)  # after each point, as a later one may not fit the memory
    print(table(result))
    return result


if __name__ == "__main__":
    sys.exit(run_benchmark(DecodeOptions, bench, __doc__))
