"""The parts of scripts/check_gpu.py that ask whether what a GPU computes is right. Each returns {row: what was found}.

The reference is the CPU: its formulas are tested against independent ones in tests/.
"""

import itertools
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import train as program
from core.dist import World
from model import ops
from model.diagnostics import sdpa_backend
from model.gpt import GPT
from model.kernels import operators
from scripts.benchmarks.gpu_part import (
    MLA,
    ROPE,
    CheckOptions,
    Row,
    Rows,
    command,
    curve,
    differences,
    needs_gpus,
    rows_of,
    scratch,
    tiny,
    tiny_config,
    train,
)
from sweeps.plan import compose
from training.config import TrainConfig, load_config
from training.meter import Meter
from training.session import Machine, compile_model, is_compiled
from training.updates import accumulate_gradients

# -----------------------------------------------------------------------------
# An update does not wait

UPDATES = {"adamw": [], "muon": ["optim=muon"], "qk_clip": [*MLA, "qk_clip=clip", "qk_clip.threshold=0.1"]}
WARM = 3  # updates before those that are watched: they compile


def update(asked: CheckOptions, overrides: list[str]) -> Rows:
    """Between two log lines the host never waits for the device: CUDA raises where it would."""
    needs_gpus(asked)
    return rows_of(watched_updates, {name: (asked, more) for name, more in UPDATES.items()})


def watched_updates(asked: CheckOptions, more: list[str]) -> Row:
    watched = 0
    begin, add = Meter.start, Meter.add

    def start(meter: Meter) -> None:
        begin(meter)
        if meter._updates >= WARM:  # since the last log line
            torch.cuda.set_sync_debug_mode("error")

    def end(meter: Meter, *numbers: Any) -> None:
        nonlocal watched
        add(meter, *numbers)
        watched += torch.cuda.get_sync_debug_mode() == 2
        torch.cuda.set_sync_debug_mode("default")

    with scratch() as folder, mock.patch.object(Meter, "start", start), mock.patch.object(Meter, "add", end):
        rare = [f"{key}=20" for key in ("max_iters", "log_interval", "eval_interval", "checkpoint_interval")]
        try:
            status = program.run(tiny_config(asked, *more, *rare, f"out_dir={folder / 'run'}"))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert status == 0 and watched > 10, f"exit status {status}, {watched} updates watched"
    return {"updates watched": watched}


# -----------------------------------------------------------------------------
# Every layout with every norm

LAYOUTS = {
    "mha": [], "gqa": [*ROPE, "attention=gqa", "attention.n_kv_head=2"],
    "mqa": [*ROPE, "attention=gqa", "attention.n_kv_head=1"], "mla": MLA, "mla_q_rank": [*MLA, "attention.q_rank=24"],
    "mla_unified": [*MLA, "attention.qk_norm_layout=unified"],
}  # fmt: skip
NORMS = {name: [f"qk_norm={name}"] for name in ("none", "rms", "layernorm")}
LP = ["qk_norm=lp", "qk_norm.alpha_init=sqrt_d"]
NORMS |= {f"lp{p}": [*LP, f"qk_norm.p={p}"] for p in ("1", "1.5", "2", "3", "inf", "learned")}
PAIRS = [(a, n) for a in LAYOUTS for n in NORMS if (a, n) != ("mla_unified", "none")]  # the config refuses that one
COMPILED = {
    ("mha", "none"), ("mha", "lp3"), ("mha", "lplearned"), ("gqa", "rms"), ("mqa", "layernorm"), ("mla", "none"),
    ("mla_q_rank", "lp3"), ("mla_unified", "rms"),
}  # fmt: skip
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # of loss and gradient, relative to the CPU's in float32
TIES = 0.5  # p = inf in bf16: rounding decides which entries are the largest, and these alone have a gradient
VOCAB = 65


def pairs(asked: CheckOptions, overrides: list[str]) -> Rows:
    """Loss and gradient of every layout with every norm against the CPU in float32: relative differences."""
    return rows_of(pair_row, {" ".join(pair): (asked, pair, asked.full or pair in COMPILED) for pair in PAIRS})


def pair_row(asked: CheckOptions, pair: tuple[str, str], compiled: bool) -> Row:
    layout, norm = pair
    config = tiny_config(asked, *LAYOUTS[layout], *NORMS[norm], "model.dropout=0.0")
    generator = torch.Generator().manual_seed(0)
    batch = torch.randint(VOCAB, (2, 4, config.model.block_size), generator=generator)
    exact = outcome(config, Machine(World(), torch.device("cpu"), torch.float32), batch, compiled=False)
    row: Row = {}
    for dtype, usual in TOLERANCES.items():
        tolerance = TIES if norm == "lpinf" and dtype == torch.bfloat16 else usual
        for by_compiler in (False, True) if compiled and is_compiled(config, asked.here) else (False,):
            found = outcome(config, Machine(World(), asked.here, dtype), batch, by_compiler)
            name = str(dtype).removeprefix("torch.") + (", compiled" if by_compiler else "")
            row[name] = max(relative(a, b) for a, b in zip(found, exact, strict=True))
            if not row[name] <= tolerance:
                row["failed"] = f"{name} differs by {row[name]:.1e}, more than {tolerance:.0e}"
    return row


def outcome(config: TrainConfig, machine: Machine, batch: Tensor, compiled: bool) -> tuple[Tensor, Tensor]:
    """Loss, (1,), and gradient, (n,), of a model whose gains, alphas and learned p differ in every entry.

    float32 is not TF32 here. batch: inputs and targets, (2, B, T). Raises where the compiler makes several graphs.
    """
    model = GPT(config.gpt, VOCAB)
    model.init_weights(config.seed)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator).to(parameter))
    model.to(machine.device)
    torch.set_float32_matmul_precision("highest")
    if compiled:
        torch._dynamo.utils.counters.clear()
    forward = compile_model(model, config) if compiled else model
    loss = accumulate_gradients(forward, iter([(batch[0], batch[1])]), 1, machine)
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    if compiled:
        breaks = torch._dynamo.utils.counters["graph_break"]  # why -> how often
        assert not breaks, f"{breaks.total()} graph breaks, the first: {next(iter(breaks)).splitlines()[0]}"
    return loss[None].cpu(), gradient.cpu()


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


# -----------------------------------------------------------------------------
# Attention's kernels

PRESETS = ("baby_gpt", "gpt2_124m", "qwen_134m", "mla_400m")


def sdpa(asked: CheckOptions, overrides: list[str]) -> Rows:
    """Which backend of PyTorch's attention computes each preset's; math holds T x T; a dash is a kernel of ours."""
    return rows_of(backends, {preset: (asked, preset) for preset in PRESETS})


def backends(asked: CheckOptions, preset: str) -> Row:
    config = load_config(compose([f"model={preset}", "model.n_layer=1", "model.block_size=256"]))
    model = GPT(config.gpt, VOCAB).to(asked.here)
    row: Row = {"dropout": config.model.dropout}
    for dtype in TOLERANCES:
        with Machine(World(), asked.here, dtype).autocast():
            row[str(dtype).removeprefix("torch.")] = sdpa_backend(model, 2)
    return row


def triton(asked: CheckOptions, overrides: list[str]) -> Rows:
    """The fused decoding kernel of MLA in bf16 on every GPU, against PyTorch's operations in float64."""
    needs_gpus(asked)
    devices = [torch.device(f"cuda:{i}") for i in range(torch.cuda.device_count())]  # the first stays the current one
    both = itertools.product(devices, ("none", "blockwise", "unified"))
    return rows_of(kernel_error, {f"{device} {norm}": (device, norm) for device, norm in both})


def kernel_error(device: torch.device, norm: str) -> Row:
    row: Row = {}
    reference: Any = ops.latent_attention_reference
    torch.manual_seed(0)
    for B, S in ((1, 65536), (3, 4097), (128, 1000)):
        shapes = ((B, 16, 1, 512), (B, 16, 1, 64), (B, S, 512), (B, S, 64), (B, S, 16))
        q, q_rope, latent, k_rope, s = (torch.randn(shape, device=device).bfloat16() for shape in shapes)
        scalars = None if norm == "none" else (0.5 + s.abs()).mT[..., None]
        assert operators.can_use_triton(q, latent, k_rope, scalars), "the kernel does not take these shapes"
        rest = (None, 0.08, norm == "unified")  # shift, scale, unified
        y, _ = ops.latent_attention(q, q_rope, latent, k_rope, scalars, *rest)
        exact = (x if x is None else x.double() for x in (q, q_rope, latent, k_rope, scalars))
        row[f"{B} x {S}"] = error = relative(y, reference(*exact, *rest)[0])
        if not error <= 1e-2:
            row["failed"] = f"{B} x {S} differs by {error:.1e}, more than 1e-02"
    return row


# -----------------------------------------------------------------------------
# Runs

STEPS = ["max_iters=120", "eval_interval=20", "checkpoint_interval=10"]


def resume(asked: CheckOptions, overrides: list[str]) -> Rows:
    """A run that is killed and started again ends with the bits of one that is not, with deterministic=true. Without it
    the row says what differs."""
    return rows_of(killed, {f"deterministic={given}": (asked, given) for given in ("true", "false")})


def killed(asked: CheckOptions, deterministic: str) -> Row:
    with scratch() as folder:
        common = tiny(asked, *STEPS, "qk_norm=rms", f"deterministic={deterministic}")
        train([*common, f"out_dir={folder / 'straight'}"])
        torn = [*common, f"out_dir={folder / 'killed'}"]
        process = subprocess.Popen(command(torn), stdout=subprocess.DEVNULL)
        while process.poll() is None and not reached(folder / "killed", 30):
            time.sleep(0.01)
        process.kill()
        assert process.wait() != 0, "the run ended before it was killed"
        train(torn)
        compare = equal if deterministic == "true" else differences
        return compare(folder / "straight", folder / "killed")


def reached(run: Path, step: int) -> bool:
    return (run / "metrics.jsonl").exists() and max(curve(run, "train/loss"), default=0) >= step


def equal(a: Path, b: Path) -> Row:
    row = differences(a, b)
    return row | ({"failed": "not equal bit for bit"} if any(row.values()) else {})


def worker(asked: CheckOptions, overrides: list[str]) -> Rows:
    """A run alone in its process, and third in a sweep's worker after runs with other norms: the same bits."""
    return rows_of(first_and_third, {"mha": (asked, []), "mla": (asked, MLA)})


def first_and_third(asked: CheckOptions, more: list[str]) -> Row:
    with scratch() as folder:
        common = tiny(asked, *STEPS, *more, "deterministic=true")
        norms = {"first": "lp", "second": "layernorm", "third": "rms"}
        train([*common, "qk_norm=rms", f"out_dir={folder / 'alone'}"])
        for name, norm in norms.items():
            config = load_config(compose([*common, f"qk_norm={norm}"]))
            status = program.run(replace(config, out_dir=str(folder / name)))
            assert status == 0, f"the {name} run of a worker ends with status {status}"
        return equal(folder / "alone", folder / "third")


def ddp(asked: CheckOptions, overrides: list[str]) -> Rows:
    """Two ranks, on two GPUs, against one: the losses in float32 within rounding."""
    if asked.here.type == "cuda":
        needs_gpus(asked, 2)
    return rows_of(two_ranks, {"adamw": (asked, []), "muon": (asked, ["optim=muon"])})


def two_ranks(asked: CheckOptions, more: list[str]) -> Row:
    with scratch() as folder:
        same = ["gradient_accumulation_steps=2", "dtype=float32", "model.dropout=0.0", *STEPS, *more]
        for ranks in (1, 2):
            train([*tiny(asked, *same), f"out_dir={folder / str(ranks)}"], ranks)
        one, two = (curve(folder / str(ranks), "val/loss") for ranks in (1, 2))
        return within(max(abs(one[step] - two[step]) / one[step] for step in one), 1e-3)


def within(difference: float, tolerance: float) -> Row:
    row: Row = {"relative difference of val/loss": difference}
    return row if difference <= tolerance else {**row, "failed": f"more than {tolerance:.0e}"}


def checkpoint(asked: CheckOptions, overrides: list[str]) -> Rows:
    """A checkpoint of the device, evaluated and trained further on the CPU."""
    return rows_of(moved_to_cpu, {"adamw": (asked, []), "muon": (asked, ["optim=muon"]), "mla": (asked, MLA)})


def moved_to_cpu(asked: CheckOptions, more: list[str]) -> Row:
    with scratch() as folder:
        run = folder / "run"
        common = tiny(asked, "dtype=float32", "schedule=constant", *more, f"out_dir={run}")
        every = [f"{key}=20" for key in ("eval_interval", "checkpoint_interval")]
        assert program.run(load_config(compose([*common, *every, "max_iters=20"]))) == 0
        there = curve(run, "val/loss")[20]
        assert program.run(load_config(compose([*common, *every, "max_iters=40", "device=cpu"]))) == 0
        after = curve(run, "val/loss")
        return within(abs(after[20] - there) / there, 1e-3) | {"iterations on the CPU": max(after) - 20}
