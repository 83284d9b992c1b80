"""MLA decode speed

python scripts/benchmarks/bench_decode.py [contexts=[4096,65536]] [batch=[1]] [rounds=25] [out=FOLDER]

One step of one DeepSeek-V3-width MLA layer as one of 8 tensor-parallel shards has it (QK-Normed MLA, 5.3 and Table 2):
absorbed     the latent cache alone
rms, lp      absorbed with QK norm: RMS, and Lp with p = 3; one scalar a token and head beside the latents
full_keys    RMS; normalised keys and values of every token cached, on a CPU in fp32 (see model/generate.py)
reexpanded   RMS; latents cached, keys and values formed anew at every step

contexts= are by default the paper's on CUDA, elsewhere [4096,16384]. Sides take turns of seconds=0.2, rounds=25 times
after each of starts=1 starts of their processes. absorbed, rms and lp share a process, weights and latents, and take
turns step by step in random order: where a process lies in memory moves its times by several percent.
sides=absorbed,rms,lp leaves the others out. Other words are train.py's: dtype=, device=, threads=,
attention.kv_rank=512, ...
Weights and cache are in dtype, by default bfloat16 where the machine multiplies in it. A time is the median of rounds,
with the lowest and highest; an overhead is that of one round over `absorbed`, and of several starts the median over
those of each. `attend` is the step between the projections of the hidden state, with what it writes to the cache.
Bandwidth is the bytes that a step must read over its time, beside what copying reaches by turns with it. On CUDA steps
are compiled, and ten make a graph.
out= writes table.md, decode.svg, decode.png and bench.json after every point; with from=A.json,B.json it does so from
earlier results together, and measures nothing. The last line is JSON.
"""

import json
import math
import os
import random
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from core.schema import ConfigError, require
from model.options import MLAOptions
from scripts.benchmarks.timing import Side, Work, alternate, machine, median, ratio, run_benchmark, start
from sweeps.plan import compose
from training.config import TrainConfig, load_config

LAYER = [
    "model=mla_400m", "model.n_layer=1", "model.n_head=16", "model.n_embd=7168", "model.mlp_hidden=1",
    "attention.q_rank=1536", "attention.kv_rank=512", "attention.nope_dim=128", "attention.rope_dim=64",
    "attention.v_dim=128",
]  # fmt: skip
ABSORBED = ("absorbed", "rms", "lp")
NORMS = {"absorbed": "none", "rms": "rms", "lp": "lp", "full_keys": "rms", "reexpanded": "rms"}
PAPER = {  # Table 2, as printed. context: ms of MLA, ms with QK norm, overhead in percent, on an H800 in bf16
    4096: (1.715, 1.740, 1.41), 8192: (1.891, 1.909, 0.95), 16384: (2.082, 2.121, 1.87), 32768: (2.486, 2.511, 1.03),
    65536: (3.217, 3.253, 1.12), 131072: (5.427, 5.517, 1.66), 196608: (7.271, 7.392, 1.66),
    262144: (13.082, 13.274, 1.46),
}  # fmt: skip
KNOWN: dict[str, Any] = {
    "contexts": (str, ""), "batch": (str, "[1]"), "rounds": (int, 25), "starts": (int, 1),
    "seconds": (float, 0.2), "sides": (str, ",".join(NORMS)), "out": (str, ""), "from": (str, ""),
}  # fmt: skip
GRAPH = 10  # steps
CHUNK = 4096  # positions written at once
ROOM = 64  # positions that a cache of latents has left, as where a text goes on: sequences then lie apart in it


def settings(name: str, words: list[str], context: int) -> TrainConfig:
    norm = NORMS[name]
    own = [f"qk_norm={norm}", f"model.block_size={context}", *(["qk_norm.p=3"] if norm == "lp" else [])]
    return load_config(compose([*LAYER, *words, *own]))


def layers(names: list[str], words: list[str], batch: int, context: int) -> tuple[Work, dict[str, Any]]:
    """Sides in one process: what they do and are, by name. What they can, they share."""
    from core.device import resolve_device, synchronize

    shared: dict[str, Any] = {}
    built = {name: layer(name, words, batch, context, shared) for name in names}
    device = resolve_device(settings(names[0], words, context).device)
    order, steps = random.Random(0), GRAPH if device.type == "cuda" else 1

    def work(n: int) -> dict[str, Any]:
        ms = {name: {"ms": 0.0, "attend_ms": 0.0} for name in names}
        for key in ("ms", "attend_ms"):
            for timed in [False, *[True] * n]:  # first once untimed: the side before has filled the processor's cache
                for name in order.sample(names, len(names)):
                    began = time.perf_counter()
                    built[name][0][key]()
                    synchronize(device)
                    if timed:
                        ms[name][key] += 1000 * (time.perf_counter() - began) / (n * steps)
        return ms

    work(1)  # warm-up
    return work, {name: info for name, (_, info) in built.items()}


def layer(
    name: str, words: list[str], batch: int, context: int, shared: dict[str, Any]
) -> tuple[dict[str, Callable[[], Any]], dict[str, Any]]:
    """Steps of the token at position context - 1, again and again: all that they write stays the same. Returns "ms", a
    step (on CUDA GRAPH of them), "attend_ms", the middle of one, and what is known of the side. shared: tensors of the
    sides that were built before."""
    import torch
    from torch import Tensor

    from core.device import resolve_device, resolve_dtype
    from model.generate import keys_dtype
    from model.gpt import GPT, LatentCache, MultiHeadLatentAttention, Rope
    from model.ops import causal_attention

    torch.set_grad_enabled(False)
    config = settings(name, words, context)
    torch.set_num_threads(config.threads or torch.get_num_threads())
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    gpt = GPT(config, vocab_size=1)
    gpt.init_weights(config.seed)
    attn: MultiHeadLatentAttention = gpt.attentions[0].to(device, dtype).eval()
    for key, weight in attn.named_parameters():
        weight.data = shared.setdefault(key, weight.data)
    rope: Rope = (gpt.cos.to(device), gpt.sin.to(device))  # type: ignore[assignment]
    kr, dr, nh = attn.kv_rank, attn.rope_dim, attn.n_head
    g = torch.Generator(device).manual_seed(config.seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, device=device).to(dtype)

    def empty(*shape: int) -> Tensor:
        return torch.empty(batch, *shape, dtype=dtype, device=device)

    held: list[Tensor | None]
    if name == "full_keys":
        k, v = (
            torch.empty(batch, nh, context, n, dtype=keys_dtype(dtype, device), device=device)
            for n in (attn.nope_dim + dr, attn.v_dim)
        )
        held = [k, v]

        def write(latent: Tensor, k_rope: Tensor, pos: int) -> None:
            new = slice(pos, pos + latent.size(1))
            k[:, :, new], v[:, :, new] = attn.keys_and_values(latent, k_rope, rope, pos)

        def attend(q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor) -> Tensor:
            write(latent, k_rope, context - 1)
            return causal_attention(torch.cat([q_nope, q_rope], -1), k, v, attn.logit_scale.left)

    elif name == "reexpanded":
        latents, k_ropes = empty(context, kr), empty(1, context, dr)
        held = [latents, k_ropes]

        def write(latent: Tensor, k_rope: Tensor, pos: int) -> None:
            latents[:, pos : pos + latent.size(1)] = latent
            k_ropes[:, :, pos : pos + latent.size(1)] = k_rope

        def attend(q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor) -> Tensor:
            write(latent, k_rope, context - 1)
            return attn.explicit(q_nope, q_rope, latents, k_ropes, rope)

    else:
        cache: LatentCache = attn.new_cache(batch, context + ROOM, dtype)
        cache.latent = shared.setdefault("latent", cache.latent)
        held = [t if t is None else t[:, :context] for t in (cache.latent, cache.k_rope, cache.s, cache.shift)]

        def write(latent: Tensor, k_rope: Tensor, pos: int) -> None:
            attn.extend(cache, latent, attn.contents(latent), k_rope, rope, pos)

        def attend(q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor) -> Tensor:
            return attn.absorbed(q_nope, q_rope, latent, k_rope, cache, context - 1, rope)

    x = random(batch, 1, config.model.n_embd)
    for pos in range(0, context, CHUNK):
        n = min(CHUNK, context - pos)
        k_rope = random(batch, 1, n, dr)
        write(attn.kv_a_norm(random(batch, n, kr)), k_rope if attn.unified else attn.k_rope_norm(k_rope), pos)
    inputs = attn.inputs(x, rope, context - 1)

    def step() -> Tensor:  # MultiHeadLatentAttention.forward, with this side's cache
        y = attend(*attn.inputs(x, rope, context - 1))
        return attn.c_proj(y.transpose(1, 2).reshape(batch, 1, -1))

    y = step()
    parts: dict[str, Callable[[], Any]] = {"ms": step, "attend_ms": lambda: attend(*inputs)}
    if device.type == "cuda":
        parts = {key: graph_of(part) for key, part in parts.items()}
    cache_bytes = sum(t.nbytes for t in held if t is not None)
    weights = sum(p.nbytes for p in attn.parameters())
    info = {"cache_bytes": cache_bytes, "weight_bytes": weights, "dtype": str(dtype), "y": y.flatten().tolist()}
    return parts, info


def graph_of(step: Callable[[], Any]) -> Callable[[], Any]:
    """GRAPH compiled steps as one CUDA graph, whose result must be that of the step itself."""
    import torch

    expected = step().float()
    compiled = torch.compile(step)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # compilation and the kernels' first calls cannot be captured
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
    """The bandwidth of a copy that no cache holds: bytes read and written."""
    import torch

    from core.device import resolve_device, synchronize

    torch.set_num_threads(threads or torch.get_num_threads())
    device = resolve_device(device_word)
    source = torch.ones(2**30 if device.type == "cuda" else 2**28, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def work(n: int) -> dict[str, Any]:
        began = time.perf_counter()
        for _ in range(n):
            target.copy_(source)
        synchronize(device)
        return {"gb_per_s": 2 * n * source.nbytes / (time.perf_counter() - began) / 1e9}

    work(1)
    return work, {}


def needed_bytes(name: str, config: TrainConfig, batch: int, itemsize: int, of_keys: int) -> int:
    """About what a side holds at its largest: cache, logits, and what is formed from the latents. `of_keys` is the item
    size of cached keys and values."""
    m, a = config.model, config.attention
    assert isinstance(a, MLAOptions)
    latents = (a.kv_rank + a.rope_dim + m.n_head) * itemsize + 12 * m.n_head
    keys = m.n_head * (a.nope_dim + a.rope_dim + a.v_dim)
    formed = keys * itemsize + 2 * m.n_head * a.nope_dim * (itemsize + 4)
    each = {"full_keys": keys * of_keys, "reexpanded": latents + formed}.get(name, latents)
    return batch * (config.model.block_size * each + CHUNK * formed) + 2**29


def free_bytes(device_word: str) -> int:
    import torch

    from core.device import resolve_device

    device = resolve_device(device_word)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    assert available is not None
    return 1024 * int(available[1])


def bench_point(
    names: list[str], words: list[str], batch: int, context: int, rounds: int, starts: int, seconds: float
) -> dict[str, Any]:
    point: dict[str, Any] = {"batch": batch, "context": context, "rounds": rounds, "starts": starts}
    print(f"batch {batch}, context {context}", flush=True)
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in [*names, "copy"]}
    skipped: dict[str, str] = {}
    for _ in range(starts):
        if not (names := [name for name in names if name not in skipped]):
            break
        infos, of_start, why = take_turns(names, words, batch, context, rounds, seconds)
        skipped |= why
        for name in of_start:
            turns[name] += of_start[name]
    names = [name for name in names if name not in skipped]
    if not names:
        return {**point, "sides": {}, "skipped": skipped}
    copy = median(turns["copy"], "gb_per_s")
    rows = {name: row(infos[name], turns[name], copy) for name in names}
    if "full_keys" in names:
        expected, close = infos["full_keys"]["y"], 1e-4 if infos["full_keys"]["dtype"] == "torch.float32" else 5e-2
        for name in names:
            if NORMS[name] == "rms":
                error = math.dist(infos[name]["y"], expected) / math.hypot(*expected)
                assert error < close, f"{name} differs from full_keys by {error}"
                rows[name]["difference_from_full_keys"] = error
    point |= {"copy_gb_per_s": copy, "sides": rows}
    if "absorbed" in rows:
        against = {name: ratio(turns, name, "absorbed", "ms", starts) for name in rows if name != "absorbed"}
        point["time_over_absorbed"] = against
        point["overhead_percent"] = {
            name: {key: 100 * (value - 1) for key, value in against[name].items()}
            for name in ("rms", "lp")
            if name in rows
        }
    return {**point, "skipped": skipped}


def take_turns(
    names: list[str], words: list[str], batch: int, context: int, rounds: int, seconds: float
) -> tuple[dict[str, dict[str, Any]], dict[str, list[dict[str, Any]]], dict[str, str]]:
    """One start: what the sides say of themselves, the turns of each and of "copy", and why sides were left out."""
    from core.device import resolve_device, resolve_dtype
    from model.generate import keys_dtype

    configs = {name: settings(name, words, context) for name in names}
    any_config = configs[names[0]]
    word = any_config.device
    dtype = resolve_dtype(any_config.dtype, resolve_device(word))
    sizes = dtype.itemsize, keys_dtype(dtype, resolve_device(word)).itemsize
    sides: list[Side] = []
    skipped: dict[str, str] = {}
    left = 0.9 * free_bytes(word)
    together = [name for name in names if name in ABSORBED]
    for group in [*([together] if together else []), *([name] for name in names if name not in ABSORBED)]:
        who = ", ".join(group)
        need = sum(needed_bytes(name, configs[name], batch, *sizes) for name in group)
        why = f"needs about {need / 2**30:.1f} GiB, {max(left, 0) / 2**30:.1f} are free" if need > left else ""
        if not why:
            try:
                sides.append(start(who, layers, group, words, batch, context))
                left -= need
            except RuntimeError as failure:
                if not out_of_memory(failure):
                    raise
                why = str(failure)
        if why:
            skipped |= dict.fromkeys(group, why)
            print(*(f"{name} is skipped: {why}" for name in group), sep="\n", flush=True)
    if not sides:
        return {}, {}, skipped
    try:
        sides.append(start("copy", copying, word, any_config.threads))
        once = {side.name: side.take_turn(1)["seconds"] for side in sides}
        units = {name: max(5 if taken < 1 else 1, round(seconds / taken)) for name, taken in once.items()}
        turns = alternate(sides, rounds, units)
        copies = turns.pop("copy")
    except RuntimeError as failure:
        if not out_of_memory(failure):
            raise
        print(f"the point is skipped: {failure}", flush=True)
        return {}, {}, {**dict.fromkeys(names, str(failure)), **skipped}
    finally:
        for side in sides:
            side.stop()
    infos = {name: info for side in sides[:-1] for name, info in side.info.items()}
    by_name = {name: [turn[name] for turn in turns[side.name]] for side in sides[:-1] for name in side.info}
    return infos, {**by_name, "copy": copies}, skipped


def out_of_memory(failure: RuntimeError) -> bool:
    return bool(re.search(r"memory|exit status -9", str(failure)))


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


def table(result: dict[str, Any]) -> str:
    """The points as Markdown, beside the paper's Table 2."""
    names = {
        "absorbed": "MLA",
        "rms": "+ RMS",
        "lp": "+ Lp, p = 3",
        "full_keys": "full keys",
        "reexpanded": "re-expanded",
    }

    cached = [name for name in NORMS if name != "lp"]  # as much as RMS

    def time_of(point: dict[str, Any], name: str) -> str:
        if name not in point["sides"]:
            return "–"
        r = point["sides"][name]
        return f"{r['ms']:.3f} ({r['ms_lowest']:.3f}–{r['ms_highest']:.3f})"

    def overhead(point: dict[str, Any], name: str) -> str:
        o = point.get("overhead_percent", {}).get(name)
        if o is None:
            return "–"
        return f"{o['median']:+.2f} %" + (f" ({o['low']:+.2f} to {o['high']:+.2f})" if "low" in o else "")

    def cells(point: dict[str, Any]) -> list[str]:
        best = point["sides"].get("rms")
        context = point["context"]
        published = PAPER.get(context)
        rate = f"{best['attend_gb_per_s']:.1f} ({100 * best['attend_of_copy']:.0f} %)" if best else "–"
        paper = ["–"] * 3
        if published:
            paper = [*(f"{ms:.3f}" for ms in published[:2]), f"{published[2]:.2f} %"]
        return [
            str(point["batch"]), short(context), f"{point['starts']} × {point['rounds']}",
            time_of(point, "absorbed"), time_of(point, "rms"), overhead(point, "rms"),
            time_of(point, "lp"), overhead(point, "lp"), time_of(point, "full_keys"), time_of(point, "reexpanded"),
            "/".join(f"{point['sides'][n]['cache_bytes'] / 2**20:.1f}" if n in point["sides"] else "–" for n in cached),
            rate, *paper,
        ]  # fmt: skip

    heads = ["batch", "context", "starts × rounds", names["absorbed"], names["rms"], "overhead", names["lp"],
             "overhead", names["full_keys"], names["reexpanded"], "cache MiB", "attend with RMS, GB/s (of copying)",
             "paper: MLA", "paper: + QK norm", "overhead"]  # fmt: skip
    rows = [heads, ["---:"] * len(heads), *map(cells, result["points"])]
    skipped = [f"- batch {p['batch']}, context {p['context']}: {name}: {why}"
               for p in result["points"] for name, why in p["skipped"].items()]  # fmt: skip
    lines = [
        "# Decode speed of MLA with a QK norm", "", "```", *result["command"].split("; "), "```", "",
        f"{result['device']}, {result['dtype']}, torch {result['torch']}. One layer, one token;",
        "ms a step, median (lowest–highest) of rounds by turns; the paper's on an H800 in bf16.",
        "Overhead: the median of the rounds' own ratios and its 95 % interval, not the ratio of the medians beside it;",
        "of several starts, each with processes of its own, the median over those of each, and its interval.",
        "Fewer than six have no interval: their lowest and highest are in bench.json.",
        "",
        *("| " + " | ".join(r) + " |" for r in rows), "",
        f"Cache: {' / '.join(names[n] for n in cached)}; Lp's is that of RMS. On a CPU full keys are in fp32.",
        "– stands where a side was left out or did not fit.",
        *(["", "Skipped for memory:", "", *skipped] if skipped else []),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def short(context: int) -> str:
    return f"{context // 1024}k" if context % 1024 == 0 else str(context)


def write_results(result: dict[str, Any], folder: Path) -> None:
    from core.files import write_atomic
    from scripts.reporting.charts import DASHES, OKABE_ITO, SYMBOLS, image, log_scale, new_figure

    write_atomic(folder / "bench.json", (json.dumps(result, indent=1) + "\n").encode())
    batches = sorted({p["batch"] for p in result["points"]})
    figure = new_figure(1 + 4 * len(batches), 4)
    for axes, batch in zip(figure.subplots(1, len(batches), squeeze=False, sharey=True)[0], batches, strict=True):
        for i, name in enumerate(NORMS):
            here = [p for p in result["points"] if p["batch"] == batch and name in p["sides"]]
            # of one context the one with the most rounds
            here.sort(key=lambda p: (p["context"], p["starts"] * p["rounds"]))
            points = [*{p["context"]: p for p in here}.values()]
            rows = [p["sides"][name] for p in points]
            spread = [[r["ms"] - r["ms_lowest"] for r in rows], [r["ms_highest"] - r["ms"] for r in rows]]
            axes.errorbar([p["context"] for p in points], [r["ms"] for r in rows], spread, color=OKABE_ITO[i],
                          marker=SYMBOLS[i][0], dashes=DASHES[i] or (None, None), label=name)  # fmt: skip
        axes.set(title=f"batch {batch}", xlabel="context (tokens)", ylabel="ms a step")
        contexts = sorted({p["context"] for p in result["points"] if p["batch"] == batch})
        log_scale(axes, "x", 2, {context: short(context) for context in contexts})
        log_scale(axes, "y")
    axes.legend(frameon=False)
    for kind in ("svg", "png"):
        (folder / f"decode.{kind}").write_bytes(image(figure, kind))
    (folder / "table.md").write_text(table(result))


def read_results(files: str) -> dict[str, Any]:
    """The points and commands of all of them; the machine must be one."""
    found: list[dict[str, Any]] = []
    first, *_ = names = files.split(",")
    for file in names:
        try:
            result = json.loads(Path(file).read_text())
            table(result)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"from={file} must be a bench.json of this benchmark: {error}") from error
        for key in ("device", "dtype", "torch"):
            require(not found or result[key] == found[0][key], f"from={file} has another {key} than {first}")
        found.append(result)
    points = sorted((p for result in found for p in result["points"]), key=lambda p: (p["batch"], p["context"]))
    return {**found[0], "points": points, "command": "; ".join(result["command"] for result in found)}


def whole_numbers(key: str, text: str, least: int) -> list[int]:
    try:
        values = json.loads(text)
    except json.JSONDecodeError:
        values = None
    good = isinstance(values, list) and values and all(type(v) is int and v >= least for v in values)
    require(bool(good), f"{key}={text} must be a list of integers >= {least}, as in {key}=[{least},{2 * least}]")
    assert isinstance(values, list)
    return values


def bench(values: dict[str, Any], words: list[str]) -> dict[str, Any]:
    from core.device import resolve_device, resolve_dtype

    batches = whole_numbers("batch", values["batch"], 1)
    for key in ("rounds", "starts"):
        require(values[key] >= 1, f"{key}={values[key]} must be at least 1")
    require(values["seconds"] > 0, f"seconds={values['seconds']} must be positive")
    names = [name for name in values["sides"].split(",") if name]
    for name in names:
        require(name in NORMS, f"sides={values['sides']}: {name} must be one of {', '.join(NORMS)}")
    require(bool(names), f"sides={values['sides']} must name one of {', '.join(NORMS)}")
    folder = Path(values["out"]) if values["out"] else None
    require(not values["from"] or folder is not None, f"from={values['from']} needs out=")
    earlier = read_results(values["from"]) if values["from"] else None
    config = settings(names[0], words, 2)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    usual = list(PAPER) if device.type == "cuda" else [4096, 16384]
    contexts = whole_numbers("contexts", values["contexts"] or json.dumps(usual), 2)
    for name in names:
        for context in contexts:
            config = settings(name, words, context)
            require(config.attention.name == "mla", f"attention={config.attention.name} must be mla")
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"out={folder} must be a folder that can be written: {error.strerror}") from error
        require(os.access(folder, os.W_OK), f"out={folder} must be a folder that can be written")
        if earlier is not None:
            write_results(earlier, folder)
            return earlier

    points: list[dict[str, Any]] = []
    result = {
        "points": points, "dtype": str(dtype).removeprefix("torch."), "words": words,
        "command": " ".join(["python scripts/benchmarks/bench_decode.py", *sys.argv[1:]]),
        **machine(config.device, config.threads),
    }  # fmt: skip
    for batch in batches:
        for context in contexts:
            n = (values["rounds"], values["starts"])
            points.append(bench_point(names, words, batch, context, *n, values["seconds"]))
            if folder is not None and any(p["sides"] for p in points):
                write_results(result, folder)  # at once: what comes later may fail
    require(any(p["sides"] for p in points), f"contexts={contexts} batch={batches}: none fits the memory")
    print(table(result))
    return result


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__, KNOWN, bench))
