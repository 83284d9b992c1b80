"""How fast this GPU is: python scripts/check_gpu.py [parts=[profile,turns]] [peer=PATH] [overrides]

  profile     an update of baby_gpt and mla_400m: tokens/s, MFU, memory, compilation, launches, idle time
  turns       baby_gpt and compiled nanoGPT, alternating (peer=PATH)
  norms       every p of Lp QK-norm against p = 2
  decode      a step of MLA with 4k to 256k positions, beside the paper's Table 2
  sweep       1, 2 and 3 workers on a GPU
Whether what it computes is right, `python -m pytest -m gpu` tests.
Each part has a process of its own: one that fails, dies or takes too long leaves the others alone. Overrides of
train.py change the models. out= gets one page and one JSON file, named after the device; parts that
are not run again keep their results. Exit status: 0, 1 where a part failed.
"""

import contextlib
import io
import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import yaml

from core.cli import run_script
from core.device import resolve_device, total_memory
from core.files import read_json, write_atomic, write_json
from core.git import commit
from core.process import end_with_parent, say
from core.record import Metrics
from core.rundir import at_end
from core.schema import NOT_EMPTY, POSITIVE, AtLeast, ConfigError, Help, one_line, options, require
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
        say(f"{name}: {rows[name]}")
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


def decode(asked: CheckOptions, overrides: list[str]) -> Rows:
    """One step of one MLA layer, beside Table 2 of QK-Normed MLA (H800). GB/s: bytes of the cache over attention."""
    options = bench_decode.DecodeOptions(asked.contexts, rounds=asked.rounds, seconds=0.05)
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


# -----------------------------------------------------------------------------
# A part and its process

Part = Callable[[CheckOptions, list[str]], Rows]  # asked, overrides of train.py for models smaller than the presets
PARTS: dict[str, Part] = {part.__name__: part for part in (device, profile, turns, norms, decode, sweep)}
Result = dict[str, Any]  # of a part: state (passed, failed, skipped, refused), reason, seconds, about, rows


def serve(pipe: Connection, part: Part, asked: CheckOptions, overrides: list[str]) -> None:
    """The process of a part: send its result. It leads a group, so that its children can be ended with it."""
    os.setpgid(0, 0)
    end_with_parent(multiprocessing.parent_process().join, signal.SIGKILL)  # type: ignore[union-attr]
    result: Result = {"about": " ".join(str(part.__doc__).split()), "rows": {}, "reason": ""}
    try:
        rows = part(asked, overrides)
        failures = [f"{row}: {found['failed']}" for row, found in rows.items() if "failed" in found]
        result |= {"state": "passed", "rows": rows}
        if failures:
            result |= {"state": "failed", "reason": f"{len(failures)} of {len(rows)}, the first {failures[0]}"}
    except (Skipped, ConfigError) as why:
        result |= {"state": "skipped" if isinstance(why, Skipped) else "refused", "reason": str(why)}
    except Exception as error:
        traceback.print_exc()
        result |= {"state": "failed", "reason": one_line(error, 500)}
    pipe.send(result)


def run_part(name: str, asked: CheckOptions, overrides: list[str]) -> Result:
    """The part's result. Raises: ConfigError where a setting cannot be used."""
    began = time.monotonic()
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=serve, args=(there, PARTS[name], asked, overrides))
    process.start()
    there.close()
    result: Result = {"state": "failed", "reason": f"took more than {asked.minutes:g} minutes", "rows": {}}
    try:
        if here.poll(60 * asked.minutes):
            result = here.recv()
            process.join(60)
    except EOFError:
        process.join()
        result["reason"] = f"died with exit status {process.exitcode}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            assert process.pid is not None
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()  # where it leads no group yet
        process.join()
    if result["state"] == "refused":
        raise ConfigError(result["reason"])
    said = " ".join(["python scripts/check_gpu.py", *sys.argv[1:]])
    return {**result, "seconds": round(time.monotonic() - began), "commit": commit(), "command": said}


# -----------------------------------------------------------------------------
# The results: a page and a JSON file


def page(device: str, parts: dict[str, Result]) -> str:
    lines = [f"# {device}", "", "Written by `python scripts/check_gpu.py`.", "", "| part | | s | what it asks |"]
    lines += ["| --- | --- | ---: | --- |"]
    for name, part in parts.items():
        lines.append(f"| {name} | {cell(outcome(part))} | {part['seconds']} | {part.get('about', '')} |")
    for name, part in parts.items():
        if part["rows"]:
            made = f"`{part['command']}` at commit {(part['commit'] or 'unknown')[:12]}"
            lines += ["", f"## {name}", "", *table(part["rows"]), "", made]
    return "\n".join(lines) + "\n"


def outcome(part: Result) -> str:
    return f"{part['state']}: {part['reason']}" if part["reason"] else part["state"]


def table(rows: dict[str, dict[str, Any]]) -> list[str]:
    keys = list(dict.fromkeys(key for row in rows.values() for key in row))
    lines = ["| | " + " | ".join(keys) + " |", "| --- |" + " ---: |" * len(keys)]
    cells = {name: [cell(row.get(key)) for key in keys] for name, row in rows.items()}
    return lines + [f"| {' | '.join([name, *of])} |" for name, of in cells.items()]


def cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"  # inf and nan as well
    return str(value).replace("|", "\\|")


def check(asked: CheckOptions, overrides: list[str]) -> int:
    known = set(asked.parts) <= PARTS.keys()
    require(known, f"parts=[{','.join(asked.parts)}] must be of {', '.join(PARTS)}")
    load_config(compose([f"device={asked.device}", *overrides]))
    found, results = {}, {}
    for name in [name for name in PARTS if name in {"device", *(asked.parts or PARTS)}]:
        found[name] = part = run_part(name, asked, overrides)
        say(f"{name}: {outcome(part)} ({part['seconds']} s)")
        if name == "device":  # the first one
            if part["state"] != "passed":
                return 1
            device = next(iter(part["rows"]))
            stem = re.sub(r"[^a-z0-9]+", "_", device.lower().split(" (")[0]).strip("_")
            json_file, page_file = Path(asked.out, f"{stem}.json"), Path(asked.out, f"{stem}.md")
            json_file.parent.mkdir(parents=True, exist_ok=True)
            results = read_json(json_file).get("parts", {})
        results |= {name: part}
        results = {one: results[one] for one in {**PARTS, **results} if one in results}
        write_json(json_file, {"device": device, "parts": results}, indent=1)
        write_atomic(page_file, page(device, results).encode())
    say(str(page_file))
    return int(any(part["state"] == "failed" for part in found.values()))


if __name__ == "__main__":
    sys.exit(run_script(CheckOptions, check, __doc__, passes_on=True))
