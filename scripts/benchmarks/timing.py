"""What the benchmarks share: sides that take turns, ratios with their intervals, and the command line.

A side is one of the things that are compared. The speed of a machine drifts, so single times mean little. We alternate
the sides on the same machine and report the median over rounds of the ratio within a round.
"""

import json
import math
import multiprocessing
import os
import platform
import resource
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Annotated, Any

import torch

from core.cli import run_script
from core.device import device_name, resolve_device
from core.git import commit
from core.process import end_with_parent, say
from core.schema import NOT_EMPTY, AtLeast, ConfigError, Help, options, require
from sweeps.plan import compose
from training.config import load_config

Turn = dict[str, Any]  # what one turn measured: seconds, and more
Turns = dict[str, list[Turn]]  # side -> its turn in each round
Work = Callable[[int], Turn]  # does n units of work and reports on them
Built = tuple[Work, dict[str, Any]]  # the work of a side, and facts about it
Build = Callable[..., Built]


@options
class SidesOptions:
    """What bench_train.py and bench_sample.py compare."""

    peer: Annotated[str | None, NOT_EMPTY, Help("a checkout of nanoGPT, to compare with")] = None
    variants: Annotated[str, Help("our own settings to compare, lists of overrides: A;B, or NAME: A;NAME: B")] = ""
    rounds: Annotated[int, AtLeast(1), Help("turns of each side")] = 5

    def check(self) -> None:
        require(bool(self.peer) != bool(self.variants), "one of peer= and variants= must be given")
        several = not self.variants or len(by_name(self.variants)) > 1
        require(several, f"variants={self.variants} must be two different lists of overrides or more: A;B")


# -----------------------------------------------------------------------------
# Sides


class Side:
    """A process in which `build(*arguments)` returns the work and the side's info; each turn does n units of it."""

    def __init__(self, name: str, build: Build, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name
        self.pipe, there = context.Pipe()
        self.process: Any = context.Process(target=serve, args=(name, there, build, arguments), daemon=True)
        self.process.start()
        there.close()
        self.info = self.receive()

    def take_turn(self, n: int) -> Turn:
        with suppress(BrokenPipeError):  # receive() reports how it died
            self.pipe.send(n)
        return self.receive()

    def close(self) -> None:
        self.pipe.close()
        self.process.join()

    def receive(self) -> Any:
        try:
            result = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            raise RuntimeError(f"{self.name} died (exit status {self.process.exitcode})") from None
        if isinstance(result, Exception):
            raise result
        return result


def serve(name: str, pipe: Connection, build: Build, arguments: tuple[Any, ...]) -> None:
    """The process of a side: build the work, then do as much of it as each message asks for."""
    end_with_parent(multiprocessing.parent_process().join, signal.SIGKILL)  # type: ignore[union-attr]
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))  # no side chooses its threads by the load
    try:
        work, info = build(*arguments)
        pipe.send(info)
        while True:
            n = pipe.recv()
            began = time.perf_counter()
            reported = work(n)
            seconds = time.perf_counter() - began
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            pipe.send({"seconds": seconds, "peak_memory_mib": memory, **reported})
    except ConfigError as error:
        pipe.send(error)
    except EOFError:
        pass
    except Exception as error:
        pipe.send(RuntimeError(f"{name}: {type(error).__name__}: {error}"))
        raise


def start_sides(asked: SidesOptions, overrides: list[str], ours: Build, peer: Build, *more: Any) -> list[Side]:
    """A side for each of variants=, or else ours and that of peer=. ours(overrides, *more) and peer(path, overrides,
    *more) build them."""
    if asked.variants:
        return [Side(name, ours, own, *more) for name, own in variants(asked.variants, overrides).items()]
    return [Side("ours", ours, overrides, *more), Side("peer", peer, asked.peer, overrides, *more)]


def by_name(variants: str) -> dict[str, str]:
    """variants=A;NAME: B -> {"A": "A", "NAME": "B"}. Raises: ConfigError where two lists have one name."""
    named: dict[str, str] = {}
    for part in filter(None, map(str.strip, variants.split(";"))):
        name, _, own = part.partition(": ")
        require(named.setdefault(name, own or part) == (own or part), f"variants={variants} names {name} twice")
    return named


def variants(named: str, overrides: list[str]) -> dict[str, list[str]]:
    """variants=A;NAME: B -> {"A": the common `overrides` and those of A, "NAME": …}. Raises: ConfigError."""
    chosen = {name: [*overrides, *own.split()] for name, own in by_name(named).items()}
    for variant in chosen.values():
        load_config(compose(variant))
    return chosen


# -----------------------------------------------------------------------------
# Turns and their ratios


def alternate(sides: Mapping[str, Callable[[], Turn]], rounds: int) -> Turns:
    """`rounds` turns of each side. Every other round has the reverse order."""
    turns: Turns = {name: [] for name in sides}
    for i in range(rounds):
        for name in sides if i % 2 == 0 else reversed([*sides]):
            turns[name].append(sides[name]())
        took = ", ".join(f"{name} {turns[name][-1]['seconds']:.2f} s" for name in sides)
        say(f"round {i + 1}: {took}")
    return turns


def median(turns: list[Turn], key: str) -> float:
    return statistics.median(turn[key] for turn in turns)


def ratio(turns: Turns, a: str, b: str, key: str = "seconds", starts: int = 1) -> dict[str, float]:
    """spread() over rounds of a's `key` / b's. With rounds from several starts of the processes, one start after the
    other: spread() over starts of the median ratio of each."""
    ratios = [x[key] / y[key] for x, y in zip(turns[a], turns[b], strict=True)]
    n = len(ratios) // starts
    return spread([statistics.median(ratios[i * n : (i + 1) * n]) for i in range(starts)] if starts > 1 else ratios)


def compared(asked: SidesOptions, rows: Mapping[str, Any], turns: Turns) -> dict[str, Any]:
    """A row for each side, and how many times as long they take: nanoGPT as ours, variants as the first one."""
    if not asked.variants:
        return {**rows, "ratio": ratio(turns, "peer", "ours")}
    first, *others = rows
    return {"variants": rows, "time_over_first": {name: ratio(turns, name, first) for name in others}}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, lowest and highest, and with 6 values or more the 95 % interval of the median (sign test): low, high."""
    from scipy.stats import quantile_test

    found = {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}
    low, high = quantile_test(values, p=0.5).confidence_interval()
    return found if math.isnan(low) else found | {"low": float(low), "high": float(high)}


def captured(step: Callable[[], Any], times: int = 1) -> Callable[[], Any]:
    """step(), so many times, as one CUDA graph. It returns what the last one does, in the same memory each time."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compilation and the first calls of kernels cannot be captured
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(times):
            result = step()

    def replay() -> Any:
        graph.replay()
        return result

    return replay


# -----------------------------------------------------------------------------
# The machine and the command line


def machine(device: str = "auto", threads: int | None = None) -> dict[str, Any]:
    """The conditions of a measurement. device, threads: as in train.py's settings."""
    return {
        "commit": commit(),
        "device": device_name(resolve_device(device), threads),
        "cpus": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def gpu_memory(device: Any) -> Turn:
    """What a turn reports of a GPU: the most that tensors have taken there, in place of the resident memory."""
    return {"peak_memory_mib": torch.cuda.max_memory_allocated(device) / 2**20} if device.type == "cuda" else {}


def machine_of(asked: SidesOptions, overrides: list[str]) -> dict[str, Any]:
    """machine() with the settings of the first side."""
    config = load_config(compose(next(iter(variants(asked.variants, overrides).values()), overrides)))
    return machine(config.device, config.threads)


def run_benchmark(settings: type, program: Callable[..., Any], doc: str | None) -> int:
    """run_script() of program(asked, overrides of train.py), which returns JSON, the last line, and raises RuntimeError
    for a failed side."""

    def run(*asked: Any) -> int:
        try:
            print(json.dumps(program(*asked)))
        except RuntimeError as error:
            print(f"failed: {' '.join(str(error).split())}", file=sys.stderr)
            return 1
        return 0

    return run_script(settings, run, doc, passes_on=True)
