"""The parts of scripts/check_gpu.py. Each returns {row: what was found}.

overrides: of train.py, for models that are smaller than the presets.
"""

import contextlib
import io
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import yaml

from core.device import resolve_device, total_memory
from core.record import Metrics
from core.rundir import at_end
from core.schema import NOT_EMPTY, POSITIVE, AtLeast, Help, one_line, options
from scripts.benchmarks import bench_decode, bench_train
from scripts.benchmarks.timing import Work, machine
from sweeps import launch
from sweeps.plan import compose, read_plan
from training.config import Device, load_config

Row = dict[str, Any]  # what was found of one thing; its key "failed" says what is wrong
Rows = dict[str, Row]


@options
class CheckOptions:
    parts: Annotated[tuple[str, ...], Help("which parts; []: all of them")] = ()
    device: Device = "auto"
    peer: Annotated[str | None, NOT_EMPTY, Help("a checkout of nanoGPT, to compare with")] = None
    rounds: Annotated[int, AtLeast(1), Help("turns of each side, where sides alternate")] = 6
    contexts: Annotated[tuple[int, ...] | None, Help("of part decode; null: the paper's")] = None
    minutes: Annotated[float, POSITIVE, Help("a part may take")] = 10.0
    out: Annotated[str, NOT_EMPTY, Help("folder for DEVICE.md and DEVICE.json")] = "results/gpu"

    @property
    def here(self) -> torch.device:
        return resolve_device(self.device)


class Skipped(Exception):
    """A part does not apply here. The message says why."""


def rows_of(found: Callable[..., Row], cases: Mapping[str, Sequence[Any]]) -> Rows:
    """Name -> found(*case). Where it raises, the row says so and the others follow."""
    rows: Rows = {}
    for name, case in cases.items():
        try:
            rows[name] = found(*case)
        except Exception as error:
            rows[name] = {"failed": one_line(error)}
        print(f"{name}: {rows[name]}", flush=True)
    return rows


def device(asked: CheckOptions, overrides: list[str]) -> Rows:
    """The machine."""
    here, found = asked.here, machine(asked.device)
    row: Row = {key: found[key] for key in ("torch", "python", "cpus")} | {"GiB": total_memory(here) / 2**30}
    if here.type == "cuda":
        about = torch.cuda.get_device_properties(here)
        row |= {
            "GPUs": torch.cuda.device_count(), "capability": f"{about.major}.{about.minor}",
            "processors": about.multi_processor_count, "CUDA": torch.version.cuda,
        }  # fmt: skip
    return {found["device"]: row}


# -----------------------------------------------------------------------------
# Training

MODELS = {  # random tokens: speed does not depend on them, and they need no network
    "baby_gpt": ["data=random", "data.n_tokens=1000000", "data.vocab_size=65", "data.val_tokens=1000"],
    "mla_400m": [
        "model=mla_400m", "batch_size=8", "data=random", "data.n_tokens=1000000", "data.vocab_size=50304",
        "data.val_tokens=10000",
    ],
}  # fmt: skip
UPDATES = 10  # of a measurement


def model_overrides(asked: CheckOptions, model: str, overrides: list[str]) -> list[str]:
    return [*MODELS[model], f"device={asked.device}", *overrides]


def profile(asked: CheckOptions, overrides: list[str]) -> Rows:
    """An update of train.py: speed, MFU, memory, time of compilation, kernel launches, and time without a kernel."""
    return rows_of(profile_row, {model: (asked, model_overrides(asked, model, overrides)) for model in MODELS})


def profile_row(asked: CheckOptions, overrides: list[str]) -> Row:
    began = time.perf_counter()
    work, info = bench_train.ours(overrides)
    built = time.perf_counter() - began
    work(UPDATES)
    began = time.perf_counter()
    memory = work(UPDATES).get("peak_memory_mib")
    seconds = (time.perf_counter() - began) / UPDATES
    row: Row = {
        "ms": 1000 * seconds, "tokens/s": info["tokens_per_iter"] / seconds,
        "MFU": info["flops_per_iter"] / seconds / info["peak_flops"], "set up and compile, s": built,
    }  # fmt: skip
    if memory is not None:
        row |= {"peak memory, GiB": memory / 1024, "of, GiB": total_memory(asked.here) / 2**30}
    return row | traced(work, asked.here.type == "cuda")


def traced(work: Work, on_cuda: bool) -> Row:
    """What PyTorch's profiler counts in an update; "idle" is the time in which no kernel runs."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity

    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if on_cuda else [ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as found:
        began = time.perf_counter()
        work(UPDATES)
        seconds = time.perf_counter() - began
    events: Any = found.events()
    operators = sum(e.device_type == DeviceType.CPU and e.name.startswith(("aten::", "nanoqk::")) for e in events)
    row: Row = {"operators": operators / UPDATES}
    if on_cuda:
        on_gpu = (e for e in events if e.device_type == DeviceType.CUDA and not e.is_user_annotation)
        kernels = [(e.time_range.start, e.time_range.end) for e in on_gpu]  # annotations cover the gaps
        launches = sum(e.name.startswith(("cudaLaunchKernel", "cuLaunchKernel")) for e in events)
        busy = covered(kernels) / 1e6
        row |= {"launches": launches / UPDATES, "busy, ms": 1000 * busy / UPDATES, "idle": 1 - busy / seconds}
    return row


def covered(ranges: Iterable[tuple[float, float]]) -> float:
    """The length of the union of ranges."""
    total, last = 0.0, float("-inf")
    for start, end in sorted(ranges):
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total


def turns(asked: CheckOptions, overrides: list[str]) -> Rows:
    """Alternating updates of baby_gpt and of compiled nanoGPT. Ratios: times as long as ours."""
    if asked.peer is None:
        raise Skipped("needs peer=PATH, a checkout of nanoGPT")
    options = bench_train.BenchOptions(peer=asked.peer, rounds=asked.rounds)
    found = bench_train.bench(options, model_overrides(asked, "baby_gpt", overrides))
    return {name: found[name] for name in ("ours", "peer")} | {"peer / ours": found["ratio"]}


def norms(asked: CheckOptions, overrides: list[str]) -> Rows:
    """An update of baby_gpt with every p of Lp QK-norm: times as long as with p = 2. The Lp paper says within 1 %."""
    named = {f"p={p}": f"qk_norm=lp qk_norm.p={p}" for p in ("2", "1", "1.5", "2.5", "3", "3.5", "4")}
    named |= {"none": "qk_norm=none", "rms": "qk_norm=rms"}
    variants = ";".join(f"{name}: {words}" for name, words in named.items())
    options = bench_train.BenchOptions(variants=variants, together=True, rounds=asked.rounds, iters=UPDATES)
    found = bench_train.bench(options, model_overrides(asked, "baby_gpt", overrides))
    return {
        name: {"ms": row["ms_per_iter"], **found["time_over_first"].get(name, {})}
        for name, row in found["variants"].items()
    }


# -----------------------------------------------------------------------------
# Decoding


def decode(asked: CheckOptions, overrides: list[str]) -> Rows:
    """One step of one MLA layer, beside Table 2 of QK-Normed MLA (H800). GB/s: bytes of the cache over attention."""
    options = bench_decode.DecodeOptions(asked.contexts, rounds=asked.rounds, seconds=0.05, sides="absorbed,rms,lp")
    found = bench_decode.bench(options, [f"device={asked.device}", *overrides])
    rows: Rows = {}
    heads = ("paper: MLA, ms", "paper: norm, ms", "paper: %")
    for point in found["points"]:
        sides, percent, context = point["sides"], point["overhead_percent"], point["context"]
        rows[bench_decode.short(context)] = {
            "MLA, ms": sides["absorbed"]["ms"], "RMS, ms": sides["rms"]["ms"],
            "RMS, %": percent["rms"]["median"], "Lp, %": percent["lp"]["median"],
            "GB/s": sides["rms"]["attend_gb_per_s"], "of copying": sides["rms"]["attend_of_copy"],
            **dict(zip(heads, bench_decode.PAPER.get(context, ()), strict=False)),
        }  # fmt: skip
    return rows


# -----------------------------------------------------------------------------
# Sweeps


def sweep(asked: CheckOptions, overrides: list[str]) -> Rows:
    """Runs of baby_gpt by 1, 2 and 3 workers of a sweep on each GPU: tokens/s of all of them together."""
    gpus = max(1, torch.cuda.device_count()) if asked.here.type == "cuda" else 1
    overrides = model_overrides(asked, "baby_gpt", overrides)
    rows = rows_of(workers, {f"{per_gpu} a GPU": (per_gpu * gpus, overrides) for per_gpu in (1, 2, 3)})
    if first := rows["1 a GPU"].get("tokens/s"):
        for row in rows.values():
            row["of one"] = row.get("tokens/s", float("nan")) / first
    return rows


def workers(n: int, overrides: list[str]) -> Row:
    with TemporaryDirectory(prefix="check_gpu_") as name:
        folder = Path(name)
        rare = [f"{key}=300" for key in ("max_iters", "eval_interval", "checkpoint_interval")]
        common = [*rare, "log_interval=25", "wandb.mode=disabled", *overrides]
        definition = {"overrides": common, "seeds": [*range(n)]}
        (folder / "speed.yaml").write_text(yaml.safe_dump(definition))
        where = [f"sweep={folder / 'speed.yaml'}", f"sweep_dir={folder / 'sweep'}"]
        with contextlib.redirect_stdout(io.StringIO()) as said:
            status = launch.main([*where, f"launcher.workers={n}", "retries=0"])
        runs = [folder / "sweep" / run.id for run in read_plan(folder / "sweep")]
        assert status == 0 and all(map(at_end, runs)), f"the sweep ends with status {status}: {said.getvalue()[-300:]}"
        lines = [Metrics.read(run / "metrics.jsonl") for run in runs]
        speeds = [[line["tok_per_sec"] for line in of_run if "tok_per_sec" in line] for of_run in lines]
        rate = sum(median(of_run[2:]) for of_run in speeds)  # the first lines are of compilation
        hourly = 3600 * rate / load_config(compose(common)).tokens_per_iter
        return {"workers": n, "tokens/s": rate, "runs of 5,000 iterations an hour": hourly / 5000}
