"""What the parts of scripts/check_gpu.py share: their settings, their rows, and small runs."""

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch

from core.device import resolve_device, total_memory
from core.files import ROOT
from core.record import Metrics
from core.schema import NOT_EMPTY, POSITIVE, AtLeast, Help, one_line, options
from scripts.benchmarks.timing import machine
from sweeps.plan import compose
from training.config import Device, TrainConfig, load_config

Row = dict[str, Any]  # what was found of one thing; its key "failed" says what is wrong
Rows = dict[str, Row]


@options
class CheckOptions:
    parts: Annotated[tuple[str, ...], Help("which parts; []: all of them")] = ()
    device: Device = "auto"
    peer: Annotated[str | None, NOT_EMPTY, Help("a checkout of nanoGPT, to compare with")] = None
    full: Annotated[bool, Help("compile every pair of layout and norm, not eight; takes an hour")] = False
    rounds: Annotated[int, AtLeast(1), Help("turns of each side, where sides alternate")] = 6
    contexts: Annotated[tuple[int, ...] | None, Help("of part decode; null: the paper's")] = None
    minutes: Annotated[float, POSITIVE, Help("a part may take; with full=true six times as long")] = 10.0
    out: Annotated[str, NOT_EMPTY, Help("folder for DEVICE.md and DEVICE.json")] = "results/gpu"

    @property
    def here(self) -> torch.device:
        return resolve_device(self.device)


class Skipped(Exception):
    """A part does not apply here. The message says why."""


def needs_gpus(asked: CheckOptions, n: int = 1) -> None:
    """Raise Skipped where there are fewer than n CUDA devices."""
    if asked.here.type != "cuda":
        raise Skipped("needs CUDA")
    if torch.cuda.device_count() < n:
        raise Skipped(f"needs {n} GPUs")


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
# Small runs

TINY = [
    "data=python_docs", "model.n_layer=2", "model.n_head=4", "model.n_embd=64", "model.block_size=64", "batch_size=4",
    "schedule.warmup_iters=5", "log_interval=1", "wandb.mode=disabled",
]  # fmt: skip
ROPE = ["model.norm=rmsnorm", "model.position=rope", "model.rope_theta=100"]
MLA = [
    *ROPE, "attention=mla", "attention.kv_rank=32", "attention.nope_dim=16", "attention.rope_dim=16",
    "attention.v_dim=16",
]  # fmt: skip


def tiny(asked: CheckOptions, *overrides: str) -> list[str]:
    """Overrides of a run of a few milliseconds an update."""
    return [*TINY, f"device={asked.device}", *overrides]


def tiny_config(asked: CheckOptions, *overrides: str) -> TrainConfig:
    return load_config(compose(tiny(asked, *overrides)))


@contextmanager
def scratch() -> Iterator[Path]:
    with TemporaryDirectory(prefix="check_gpu_") as folder:
        yield Path(folder)


def command(overrides: list[str], ranks: int = 1) -> list[str]:
    """train.py in processes of its own."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return [sys.executable, *(torchrun if ranks > 1 else []), str(ROOT / "train.py"), *overrides]


def train(overrides: list[str], ranks: int = 1) -> None:
    """Raises: RuntimeError with the last line of its errors."""
    done = subprocess.run(command(overrides, ranks), capture_output=True, text=True)
    if done.returncode:
        print(done.stdout, done.stderr, flush=True)
        said = done.stderr.strip().splitlines() or ["no output"]
        raise RuntimeError(f"train.py ends with exit status {done.returncode}: {said[-1]}")


def curve(run: Path, key: str) -> dict[int, float]:
    """iter -> a metric of a run."""
    return {line["iter"]: line[key] for line in Metrics.read(run / "metrics.jsonl") if key in line}


def differences(a: Path, b: Path) -> Row:
    """In what two runs differ: tensors of the last checkpoint, their largest difference, and lines of losses."""
    from safetensors.torch import load_file

    tensors = [
        {f"{group}/{name}": x for group in ("model", "optimizer") for name, x in load_file(file(run, group)).items()}
        for run in (a, b)
    ]
    differing = [name for name, x in tensors[0].items() if not torch.equal(x, tensors[1][name])]
    largest = max((float((tensors[0][n].double() - tensors[1][n].double()).abs().max()) for n in differing), default=0)
    curves = [(curve(a, key), curve(b, key)) for key in ("train/loss", "val/loss")]
    lines = sum(x.get(step) != y.get(step) for x, y in curves for step in x | y)
    return {"tensors that differ": len(differing), "by at most": largest, "losses that differ": lines}


def file(run: Path, group: str) -> Path:
    return run / "ckpt" / "latest" / f"{group}.safetensors"
