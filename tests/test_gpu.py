"""What must hold on a GPU: pytest -m gpu. Most of it is rehearsed on the CPU, in fewer cases.

The reference is the CPU, whose formulas are tested against independent ones in the other files.
"""

import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, exit_status, fork
from helpers.runs import TORCHRUN, assert_same_run, lines
from net import LAYOUTS, MLA, NORMS, TINY
from torch import Tensor
from variants import ALL_PAIRS, FULL

import train
from core.dist import World
from model import ops
from model.gpt import GPT
from sweeps.plan import compose
from training.config import TrainConfig, load_config
from training.meter import Meter
from training.session import Machine, compile_model
from training.updates import accumulate_gradients

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
on_each_device = pytest.mark.parametrize("device", ["cpu", CUDA])


def words(corpus: Path, device: str, more: str) -> list[str]:
    """Overrides of train.py for a model of some milliseconds an update."""
    chosen = dict(word.split("=", 1) for word in f"{TINY} {more} device={device}".split())
    return [f"data.path={corpus}", *(f"{key}={value}" for key, value in chosen.items())]


def trained(corpus: Path, device: str, out_dir: Path, more: str) -> Path:
    assert train.run(load_config(compose([*words(corpus, device, more), f"out_dir={out_dir}"]))) == 0
    return out_dir


# -----------------------------------------------------------------------------
# Loss and gradient

VOCAB = 65
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # of loss and gradient, relative to the CPU's in float32
TIES = 0.5  # p = inf in bf16: rounding decides which entries are the largest, and these alone have a gradient
COMPILED = {
    ("mha", "none"), ("mha", "lp3"), ("mha", "lp_learned"), ("gqa", "rms"), ("mqa", "layernorm"), ("mla", "none"),
    ("mla_q_rank", "lp3"), ("mla_unified", "rms"),
}  # fmt: skip
SOME = [("mla", "lp3"), ("gqa", "rms"), ("mla_unified", "lpinf")]


def outcome(config: TrainConfig, machine: Machine, batch: Tensor, compiled: bool = False) -> tuple[Tensor, Tensor]:
    """Loss, (1,), and gradient, (n,), of a model whose gains, alphas and learned p differ in every entry.

    float32 is not TF32 here. batch: inputs and targets, (2, B, T). The compiler must make one graph.
    """
    model = GPT(config.gpt, VOCAB)
    model.init_weights(config.seed)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator).to(parameter))
    model.to(machine.device)
    torch.set_float32_matmul_precision("highest")
    torch._dynamo.utils.counters.clear()
    forward = compile_model(model, config) if compiled else model
    loss = accumulate_gradients(forward, iter([(batch[0], batch[1])]), 1, machine)
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    breaks = torch._dynamo.utils.counters["graph_break"]  # why -> how often
    assert not breaks, f"{breaks.total()} graph_break"
    return loss[None].cpu(), gradient.cpu()


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def check_pair(layout: str, norm: str, device: str, compiled: bool) -> None:
    of_both = f"{LAYOUTS[layout]} {NORMS[norm.replace('_', '')]} model.dropout=0.0"
    config = load_config(compose(words(Path("unused"), device, of_both)))
    batch = torch.randint(VOCAB, (2, 4, config.model.block_size), generator=torch.Generator().manual_seed(0))
    exact = outcome(config, Machine(World(), torch.device("cpu"), torch.float32), batch)
    for dtype, usual in TOLERANCES.items():
        tolerance = TIES if norm == "lpinf" and dtype == torch.bfloat16 else usual
        for by_compiler in (False, True) if compiled else (False,):
            found = outcome(config, Machine(World(), torch.device(device), dtype), batch, by_compiler)
            error = max(relative(a, b) for a, b in zip(found, exact, strict=True))
            assert error <= tolerance, f"{dtype}, compiled={by_compiler}: differs by {error:.1e}"


@pytest.mark.parametrize("layout, norm", SOME)
def test_some_pairs_in_both_dtypes_equal_those_in_float32(layout: str, norm: str) -> None:
    check_pair(layout, norm, "cpu", compiled=False)


@pytest.mark.gpu
@pytest.mark.parametrize("layout, norm", ALL_PAIRS)
def test_loss_and_gradient_of_every_pair_equal_the_cpus(layout: str, norm: str) -> None:
    check_pair(layout, norm, "cuda", compiled=FULL or (layout, norm) in COMPILED)


def test_a_pair_that_computes_something_else_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(config: TrainConfig, machine: Machine, *rest: Any) -> tuple[Tensor, Tensor]:
        loss, gradient = computed(config, machine, *rest)
        return loss, gradient * (1.1 if machine.dtype == torch.bfloat16 else 1)

    computed = outcome
    monkeypatch.setattr(sys.modules[__name__], "outcome", spoiled)
    with pytest.raises(AssertionError, match="bfloat16, compiled=False: differs by"):
        check_pair("gqa", "rms", "cpu", compiled=False)


def test_a_model_that_the_compiler_breaks_into_graphs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a fork: the compiler remembers the functions at which it broke."""

    def broken(*arguments: Any) -> Tensor:
        torch._dynamo.graph_break()
        return residual_norm(*arguments)

    def check() -> int:
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
        check_pair("mha", "none", "cpu", compiled=True)
        monkeypatch.setattr(ops, "residual_norm", broken)
        with pytest.raises(AssertionError, match="graph_break"):
            check_pair("mha", "none", "cpu", compiled=True)
        return 0

    residual_norm = ops.residual_norm
    assert exit_status(fork(check)) == 0


# -----------------------------------------------------------------------------
# Runs


@pytest.mark.gpu
@pytest.mark.parametrize("chosen", ["", "optim=muon", f"{MLA} qk_clip=clip qk_clip.threshold=0.1"])
def test_between_two_log_lines_the_host_never_waits(
    chosen: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA raises where it would, from the fourth update on: the first compile."""
    watched = 0
    begin, add = Meter.start, Meter.add

    def start(meter: Meter) -> None:
        begin(meter)
        if meter._updates >= 3:  # since the last log line
            torch.cuda.set_sync_debug_mode("error")

    def end(meter: Meter, *numbers: Any) -> None:
        nonlocal watched
        add(meter, *numbers)
        watched += torch.cuda.get_sync_debug_mode() == 2
        torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Meter, "start", start)
    monkeypatch.setattr(Meter, "add", end)
    rare = "log_interval=20 eval_interval=20 checkpoint_interval=20 compile=auto dtype=auto"
    try:
        trained(corpus, "cuda", tmp_path / "run", f"{rare} {chosen}")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert watched > 10


ALL = ("", "optim=muon", LAYOUTS["mla"])
BITS = "eval_interval=20 checkpoint_interval=10 dtype=auto compile=auto deterministic=true"


@on_each_device
def test_a_killed_run_goes_on_with_the_same_bits(device: str, corpus: Path, tmp_path: Path) -> None:
    n_iters = {"cpu": 80, "cuda": 120}[device]
    chosen = f"qk_norm=rms {BITS} max_iters={n_iters}"
    straight = trained(corpus, device, tmp_path / "straight", chosen)
    killed = tmp_path / "killed"
    command = [sys.executable, str(ROOT / "train.py"), *words(corpus, device, f"{chosen} out_dir={killed}")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None and not ((killed / "metrics.jsonl").exists() and len(lines(killed)) > n_iters // 8):
        time.sleep(0.01)
    process.kill()
    assert process.wait() != 0, "the run ended before it was killed"
    trained(corpus, device, killed, chosen)
    assert_same_run(straight, killed)


@on_each_device
@pytest.mark.parametrize("layout", ["mha", "mla"])
def test_a_run_has_the_same_bits_alone_and_in_a_process(layout: str, device: str, corpus: Path, tmp_path: Path) -> None:
    chosen = f"{LAYOUTS[layout]} {BITS} max_iters=10"
    alone = words(corpus, device, f"{chosen} qk_norm=rms out_dir={tmp_path / 'alone'}")
    subprocess.run([sys.executable, str(ROOT / "train.py"), *alone], check=True, stdout=subprocess.DEVNULL)
    for norm in ("lp", "layernorm", "rms"):
        trained(corpus, device, tmp_path / norm, f"{chosen} qk_norm={norm}")
    assert_same_run(tmp_path / "alone", tmp_path / "rms")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_two_ranks_on_two_gpus_compute_what_one_does(optim: str, corpus: Path, tmp_path: Path) -> None:
    same = f"optim={optim} gradient_accumulation_steps=2 dtype=float32"
    one = trained(corpus, "cuda", tmp_path / "one", same)
    two = words(corpus, "cuda", f"{same} out_dir={tmp_path / 'two'}")
    subprocess.run([*TORCHRUN, str(ROOT / "train.py"), *two], check=True, stdout=subprocess.DEVNULL)
    losses = [[line["val/loss"] for line in lines(run) if "val/loss" in line] for run in (one, tmp_path / "two")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.parametrize(
    ("device", "chosen"), [("cpu", LAYOUTS["mla"]), *(pytest.param("cuda", of, marks=pytest.mark.gpu) for of in ALL)]
)
def test_a_checkpoint_goes_on_on_the_cpu(chosen: str, device: str, corpus: Path, tmp_path: Path) -> None:
    """The first line there has the val/loss of the device, whose checkpoint's evaluation is made again."""
    same = f"{chosen} dtype=float32 schedule=constant checkpoint_interval=10"
    run = trained(corpus, device, tmp_path / "run", f"{same} max_iters=10")
    there = lines(run)[-1]
    trained(corpus, "cpu", run, f"{same} max_iters=20")
    again = next(line for line in lines(run) if line["iter"] == there["iter"])
    assert again["val/loss"] == pytest.approx(there["val/loss"], rel=1e-3) and lines(run)[-1]["iter"] == 20
