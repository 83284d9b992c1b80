"""What scripts/check_gpu.py measures. A part returns its rows as functions, by name; its docstring stands on the page.

On a CPU the models are tiny: a rehearsal.
"""

import contextlib
import functools
import io
import itertools
import os
import re
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import yaml
from torch import Tensor, nn

from core.device import move, resolve_device, resolve_dtype, synchronize, total_memory
from core.files import file_sha256
from core.schema import NOT_EMPTY, POSITIVE, AtLeast, Help, one_line, options, require, settings_of
from scripts.benchmarks import bench_decode, bench_train
from scripts.benchmarks.timing import Built, Side, alternate, captured, machine, median, ratio
from sweeps import launch
from sweeps.launchers import LocalOptions, MpsDaemon, visible_gpus
from sweeps.plan import compose, read_plan
from training import updates
from training.config import Device, load_config
from training.session import checked_meta_model, setup

Row = dict[str, Any]  # what was found of one thing; its key "failed" or "skipped" says why there is nothing
Rows = dict[str, Callable[[], Row]]


@options
class CheckOptions:
    parts: Annotated[
        tuple[str, ...], Help("which parts, and again; []: those that have not passed at this commit")
    ] = ()
    device: Device = "auto"
    budget: Annotated[float | None, POSITIVE, Help("minutes of the whole call; null: as long as it takes")] = None
    minutes: Annotated[float, POSITIVE, Help("a part may take")] = 10.0
    peer: Annotated[str | None, NOT_EMPTY, Help("a checkout of nanoGPT, to compare with")] = None
    rounds: Annotated[int, AtLeast(1), Help("turns of each side, where sides alternate")] = 6
    out: Annotated[str, NOT_EMPTY, Help("folder for DEVICE.md and DEVICE.json")] = "results/gpu"

    @property
    def on_cuda(self) -> bool:
        return torch.cuda.is_available() if self.device == "auto" else self.device.startswith("cuda")


RANDOM = ["data=random", "data.n_tokens=1000000", "data.val_tokens=2000"]  # speed does not depend on the tokens
MODELS = {
    "baby_gpt": [*RANDOM, "data.vocab_size=65"],
    "track_nano": ["model=track_nano", "dtype=bfloat16", *RANDOM, "data.vocab_size=1024"],
    "gpt2_124m": ["model=gpt2_124m", "batch_size=32", *RANDOM, "data.vocab_size=50257"],
}
TINY = ["model.n_layer=1", "model.n_head=2", "model.n_embd=16", "model.block_size=16", "batch_size=2", "threads=1"]
UPDATES = 20  # of a measurement
QUEUED = 0.2  # seconds of one step, many times
SECONDS = 2.0  # of one worker's turn
PROCESSES = (1, 2, 4, 8)  # workers of a GPU
STREAMS = 8


def model_words(asked: CheckOptions, model: str, overrides: list[str]) -> list[str]:
    return [*MODELS[model], *([] if asked.on_cuda else TINY), f"device={asked.device}", *overrides]


def seconds_of(step: Callable[[], Any], device: torch.device) -> float:
    """Of one call, of many that are queued."""

    def timed(n: int) -> float:
        began = time.perf_counter()
        for _ in range(n):
            step()
        synchronize(device)
        return time.perf_counter() - began

    timed(3)
    n = max(1, round(QUEUED / timed(1)))
    return timed(n) / n


# -----------------------------------------------------------------------------
# The card


def device(asked: CheckOptions, overrides: list[str]) -> Rows:
    """The machine. Copy: bytes read and written."""
    return {"machine": partial(device_row, asked.device)}


def device_row(name: str) -> Row:
    here, about = resolve_device(name), machine(name)
    row: Row = {key: about[key] for key in ("device", "torch", "python", "cpus")}
    row |= {"GiB": total_memory(here) / 2**30, "copy, GB/s": bench_decode.copying(name, None)[0](5)["gb_per_s"]}
    if here.type == "cuda":
        of = torch.cuda.get_device_properties(here)
        row |= {
            "GPUs": torch.cuda.device_count(), "capability": f"{of.major}.{of.minor}",
            "processors": of.multi_processor_count, "CUDA": torch.version.cuda,
        }  # fmt: skip
    return row


def matmuls(asked: CheckOptions, overrides: list[str]) -> Rows:
    """The matmuls of an update of baby_gpt, alone and repeated: TFLOP/s of the forward pass and of both gradients."""
    config = load_config(compose(model_words(asked, "baby_gpt", overrides)))
    model = checked_meta_model(config, vocab_size=65)
    n_tokens = config.batch_size * config.model.block_size
    shapes = {(n_tokens, *reversed(module.weight.shape)) for module in model.modules() if isinstance(module, nn.Linear)}
    shapes.add((n_tokens, *reversed(model.transformer.wte.weight.shape)))  # the head: its weights are tied
    return {
        " × ".join(map(str, shape)): partial(matmul_row, asked.device, config.dtype, *shape) for shape in sorted(shapes)
    }


def matmul_row(device_word: str, dtype_word: str, m: int, k: int, n: int) -> Row:
    """Of x, (m, k), by a weight, (n, k)."""
    device = resolve_device(device_word)
    dtype = resolve_dtype(dtype_word, device)
    x, weight, grad = (torch.randn(shape, device=device, dtype=dtype) for shape in ((m, k), (n, k), (m, n)))
    row: Row = {}
    for name, a, b in (("forward", x, weight.t()), ("to inputs", grad, weight), ("to weights", grad.t(), x)):
        seconds = seconds_of(partial(torch.mm, a, b), device)
        row |= {f"{name}, TFLOP/s": 2 * m * k * n / seconds / 1e12, f"{name}, ms": 1000 * seconds}
    return row


# -----------------------------------------------------------------------------
# An update

KINDS = {  # of kernels, by what their names have; the first that fits
    "attention": r"sdpa|flash|fmha|attention|cudnn",
    "matmul": r"gemm|nvjet|cutlass|cublas|splitk|::(add|b|badd)?mm$",
    "AdamW and clipping": r"multi_tensor|adam|foreach",
    "dropout": r"dropout|bernoulli|rand|seed",
    "reductions, as norms": r"triton_(per|red)|reduce|norm|softmax",
    "elementwise": r"triton|elementwise|vectorized",
    "copies and fills": r"^mem|copy|fill",
    "other": "",
}


def update(asked: CheckOptions, overrides: list[str]) -> Rows:
    """An update of baby_gpt by qk_norm. Busy: time in which a kernel runs, and its share of an update's."""
    words = model_words(asked, "baby_gpt", overrides)
    return {norm: partial(update_row, [*words, f"qk_norm={norm}"]) for norm in ("none", "rms", "lp")}


def gpt2(asked: CheckOptions, overrides: list[str]) -> Rows:
    """An update of gpt2_124m, in windows of 1,024 tokens, beside what others state for an H100."""
    words = model_words(asked, "gpt2_124m", overrides)
    public = {"llm.c, tokens/s": 463_000, "modded-nanogpt, tokens/s": 560_000}
    cases = {"16 windows": ["batch_size=16"], "32 windows": ["batch_size=32"]}
    cases["32 windows, vocabulary 50304"] = [*cases["32 windows"], "data.vocab_size=50304"]
    return {name: partial(update_row, [*words, *own], public) for name, own in cases.items()}


def update_row(overrides: list[str], beside: Row | None = None) -> Row:
    began = time.perf_counter()
    work, info = bench_train.ours(overrides)
    built = time.perf_counter() - began
    work(UPDATES)
    began = time.perf_counter()
    memory = work(UPDATES).get("peak_memory_mib")
    seconds = (time.perf_counter() - began) / UPDATES
    row: Row = {
        "ms": 1000 * seconds, "tokens/s": info["tokens_per_iter"] / seconds, **(beside or {}),
        "MFU": info["flops_per_iter"] / seconds / info["peak_flops"], "set up and compile, s": built,
        "peak memory, GiB": memory and memory / 1024,
    }  # fmt: skip
    found = traced(partial(work, UPDATES), resolve_device(load_config(compose(overrides)).device).type == "cuda")
    return row | found | {"busy": found["busy, ms"] / row["ms"]}


def traced(work: Callable[[], Any], on_cuda: bool) -> Row:
    """What PyTorch's profiler sees of UPDATES updates, for one: kernels, on a CPU operators."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with torch.profiler.profile(activities=activities) as found:
        work()
    events: Any = found.events()
    kind = DeviceType.CUDA if on_cuda else DeviceType.CPU
    kernels = [e for e in events if e.device_type == kind and not e.is_user_annotation]  # annotations cover the gaps
    launches = sum(e.name.startswith(("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")) for e in events)
    of_kind, of_name, calls = Counter[str](), Counter[str](), Counter[str](e.name for e in kernels)
    for e in kernels:
        ms = e.time_range.elapsed_us() / 1000 / UPDATES
        of_kind[next(kind for kind, has in KINDS.items() if re.search(has, e.name, re.IGNORECASE))] += ms
        of_name[f"{e.name[:80]} × {calls[e.name] / UPDATES:g}"] += ms
    busy = covered((e.time_range.start, e.time_range.end) for e in kernels) / 1000 / UPDATES
    row: Row = {"busy, ms": busy, "kernels": len(kernels) / UPDATES, "launches": launches / UPDATES}
    return row | {"ms by kind": dict(of_kind.most_common()), "ms of the ten longest": dict(of_name.most_common(10))}


def covered(ranges: Iterable[tuple[float, float]]) -> float:
    """The length of the union of ranges."""
    total, last = 0.0, float("-inf")
    for start, end in sorted(ranges):
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total


# -----------------------------------------------------------------------------
# One change at a time

AUTOTUNE = {"TORCHINDUCTOR_MAX_AUTOTUNE": "1"}  # without CUDA graphs
CHANGES: dict[str, tuple[list[str], dict[str, str]]] = {  # overrides, and the compiler's environment
    "dropout 0": (["model.dropout=0.0"], {}),
    "vocabulary 128": (["data.vocab_size=128"], {}),
    "no clipping": (["grad_clip=0"], {}),
    "no compiler": (["compile=false"], {}),
    "max-autotune": ([], AUTOTUNE),
    "max-autotune, decompose-k from 8": ([], AUTOTUNE | {"TORCHINDUCTOR_DECOMPOSE_K_THRESHOLD": "8"}),
    "batch 128": (["batch_size=128"], {}),
    "qk_norm=rms": (["qk_norm=rms"], {}),
    "qk_norm=lp": (["qk_norm=lp"], {}),
}


def changes(asked: CheckOptions, overrides: list[str]) -> Rows:
    """baby_gpt with one change, and without, by turns. Speed: tokens/s over those without, with a 95 % interval."""
    words = model_words(asked, "baby_gpt", overrides)
    return {
        name: partial(change_row, asked.rounds, tuple(words), [*words, *own], environment)
        for name, (own, environment) in CHANGES.items()
    }


def change_row(rounds: int, words: tuple[str, ...], changed: list[str], environment: dict[str, str]) -> Row:
    base, side = base_side(words), Side("changed", worker, environment, changed)
    with contextlib.closing(side):
        turns = alternate({s.name: partial(s.take_turn, UPDATES) for s in (base, side)}, rounds)
    for s in (base, side):
        for turn in turns[s.name]:
            turn["per_token"] = turn["seconds"] / s.info["tokens_per_iter"]
    speed = ratio(turns, "base", "changed", "per_token")
    times = {f"{name}, ms": 1000 * median(of, "seconds") / UPDATES for name, of in turns.items()}
    return {**times, "speed": speed.pop("median"), **speed}


@functools.cache
def base_side(words: tuple[str, ...]) -> Side:
    """For all rows of a process: it need not be compiled again."""
    return Side("base", worker, {}, [*words])


def worker(environment: dict[str, str], overrides: list[str]) -> Built:
    """A side's update, in an environment that the compiler or CUDA reads when it is loaded."""
    os.environ.update(environment)
    if "grad_clip=0" in overrides:  # train.py would compute the norm all the same
        updates.clip_gradients = lambda session: torch.zeros((), device=session.machine.device)
    return bench_train.ours(overrides)


# -----------------------------------------------------------------------------
# Several runs on a GPU


def workers(asked: CheckOptions, overrides: list[str]) -> Rows:
    """1, 2, 4 and 8 processes on a GPU, by turns and with MPS: tokens/s of all together, and the most watts."""
    at_once = PROCESSES if asked.on_cuda else (1, 2)
    return {
        f"{model}{', MPS' if mps else ''}": partial(workers_row, mps, at_once, model_words(asked, model, overrides))
        for model in ("baby_gpt", "track_nano")
        for mps in (False, True)
    }


def workers_row(mps: bool, at_once: tuple[int, ...], words: list[str]) -> Row:
    n_most, environment, row, gpus = max(at_once), dict[str, str](), Row(), one_gpu()
    with contextlib.ExitStack() as stack:
        if mps:
            LocalOptions(workers=n_most, mps=True).check()  # refused where there is none
            daemon = MpsDaemon(gpus, Path(stack.enter_context(tempfile.TemporaryDirectory()), "logs"))
            stack.callback(daemon.stop)
            environment = daemon.environment | {"CUDA_VISIBLE_DEVICES": "0"}  # which the daemon calls it
        pool = stack.enter_context(ThreadPoolExecutor(n_most))

        def start(i: int) -> Side:
            side = Side(f"worker {i}", worker, environment, words)
            stack.callback(side.close)  # also where another cannot start: MPS waits for its end
            return side

        sides = [*pool.map(start, range(n_most))]
        n_updates = max(1, round(UPDATES * SECONDS / sides[0].take_turn(UPDATES)["seconds"]))
        for n in at_once:
            if mps and (failure := daemon.failure()):
                raise RuntimeError(failure)
            turns = [pool.submit(side.take_turn, n_updates) for side in sides[:n]]
            watts = [power(*gpus)]
            while not all(turn.done() for turn in turns):
                time.sleep(0.2)
                watts.append(power(*gpus))
            seconds = max(turn.result()["seconds"] for turn in turns)
            known = [number for number in watts if isinstance(number, float)]
            rate = n * n_updates * sides[0].info["tokens_per_iter"] / seconds
            row |= {f"{n}, tokens/s": rate, f"{n}, W": max(known, default=watts[0])}
    return row


def one_gpu() -> list[str]:
    """The first GPU, the only one that this process and its children see from here on; [] where there is none."""
    gpus = visible_gpus()[:1]
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[0]
    return gpus


def power(gpu: str = "0") -> float | str:
    """Watts, on new GPUs of the last second; or why nvidia-smi does not say."""
    query = ["nvidia-smi", f"--id={gpu}", "--query-gpu=power.draw", "--format=csv,noheader,nounits"]
    try:
        return float(subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.split()[0])
    except (OSError, IndexError, ValueError, subprocess.TimeoutExpired) as error:
        return one_line(error)


# -----------------------------------------------------------------------------
# CUDA graphs


def graphs(asked: CheckOptions, overrides: list[str]) -> Rows:
    """A whole update, with batch and learning rate constant, as the host launches it and as one CUDA graph; then eight
    graphs of eight models on eight streams."""
    return {
        f"{model}{f', {n} streams' if n > 1 else ''}": partial(graph_row, n, model_words(asked, model, overrides))
        for model in ("baby_gpt", "track_nano")
        for n in (1, STREAMS)
    }


def graph_row(n: int, words: list[str]) -> Row:
    here = resolve_device(load_config(compose(words)).device)
    steps = [constant_update(words) for _ in range(n)]
    before, launched = float(steps[0]()), seconds_of(steps[0], here)
    streams: list[Any] = [contextlib.nullcontext()] * n
    if here.type == "cuda":
        steps = [captured(step) for step in steps]
        streams = [torch.cuda.stream(torch.cuda.Stream()) for _ in steps]

    def together() -> None:
        for stream, step in zip(streams, steps, strict=True):
            with stream:
                step()

    seconds = seconds_of(together, here) / n
    after = float(steps[0]())
    assert after <= before, f"the loss of a batch grows from {before} to {after}"
    form = "as a graph" if here.type == "cuda" else "not captured"
    return {"launched, ms": 1000 * launched, f"{form}, ms": 1000 * seconds, "speed": launched / seconds}


def constant_update(words: list[str]) -> Callable[[], Tensor]:
    """The update of train.py on one batch, at one learning rate. It returns the loss, (), and never waits."""
    config = load_config(compose(words))
    session = setup(config)
    machine, n = session.machine, config.gradient_accumulation_steps
    x, y = session.data.batches.get_batch(0, 0)
    batches = itertools.repeat((move(x, machine.device), move(y, machine.device)))
    session.model.train()
    frozen = torch.zeros((), device=machine.device)

    def step() -> Tensor:
        loss = updates.accumulate_gradients(session.forward, batches, n, machine)
        updates.step_optimizer(session, loss, frozen)
        return loss

    return step


# -----------------------------------------------------------------------------
# Beside nanoGPT, the same bits


def turns(asked: CheckOptions, overrides: list[str]) -> Rows:
    """Updates of baby_gpt and of nanoGPT, compiled, by turns. Ratio: nanoGPT's time over ours, with a 95 % interval."""
    return {"baby_gpt": partial(turns_row, asked.peer, asked.rounds, model_words(asked, "baby_gpt", overrides))}


def turns_row(peer: str | None, rounds: int, words: list[str]) -> Row:
    require(peer is not None, "needs peer=PATH, a checkout of nanoGPT")
    found = bench_train.bench(bench_train.BenchOptions(peer=peer, rounds=rounds), words)
    times = {f"{name}, {key}": found[name][key] for key in ("ms_per_iter", "tok_per_sec") for name in ("ours", "peer")}
    return {**times, "ratio": found["ratio"].pop("median"), **found["ratio"]}


def bits(asked: CheckOptions, overrides: list[str]) -> Rows:
    """Short runs that share a GPU by MPS against the same runs alone: how many have the same weights, bit for bit."""
    return {"baby_gpt": partial(bits_row, model_words(asked, "baby_gpt", overrides))}


def bits_row(words: list[str]) -> Row:
    workers = len(one_gpu()) + 1
    with tempfile.TemporaryDirectory(prefix="check_gpu_") as name:
        rare = [f"{key}=30" for key in ("max_iters", "eval_interval", "checkpoint_interval")]
        common = [*words, *rare, "deterministic=true", "wandb.mode=disabled", "plot=false"]
        Path(name, "bits.yaml").write_text(yaml.safe_dump({"overrides": common, "seeds": [*range(workers)]}))
        found: list[list[list[str]]] = []  # of each sweep and run
        for launcher in ({"workers": workers, "mps": True}, {"workers": 1}):
            where = {"sweep": f"{name}/bits.yaml", "sweep_dir": f"{name}/{len(found)}", "retries": 0}
            asked = settings_of(launch.LaunchOptions, {**where, "launcher": {"name": "local", **launcher}})
            with contextlib.redirect_stdout(io.StringIO()) as said:
                status = launch.run(asked, [])
            assert status == 0, f"the sweep ends with status {status}: {said.getvalue()[-300:]}"
            runs = [asked.directory / run.id for run in read_plan(asked.directory)]
            found.append(
                [[file_sha256(file) for file in sorted(run.glob("ckpt/step_*/*.safetensors"))] for run in runs]
            )
    same = sum(a == b for a, b in zip(*found, strict=True))
    assert same == workers and all(found[0]), f"{same} of {workers} runs have the same bits"
    return {"runs": workers, "the same": same}


PARTS: dict[str, Callable[[CheckOptions, list[str]], Rows]] = {  # in the order of what they decide
    part.__name__: part
    for part in (device, matmuls, update, changes, workers, graphs, turns, gpt2, bits)
}  # fmt: skip
