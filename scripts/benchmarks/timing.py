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
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from core.cli import run_script
from core.schema import ConfigError, require

ROOT = Path(__file__).resolve().parent.parent.parent
Turn = dict[str, Any]  # what one turn measured: seconds, and more
Turns = dict[str, list[Turn]]  # side -> its turn in each round
Work = Callable[[int], Turn]  # does n units of work and reports on them


@dataclass
class Side:
    """A process that builds its work once and does n units of it in each turn."""

    name: str
    process: Any
    pipe: Connection
    info: dict[str, Any]

    def take_turn(self, n: int) -> Turn:
        with suppress(BrokenPipeError):  # receive() reports how it died
            self.pipe.send(n)
        return self.receive()

    def stop(self) -> None:
        self.pipe.close()
        self.process.join()

    def receive(self) -> dict[str, Any]:
        try:
            kind, content = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            raise RuntimeError(f"{self.name} died (exit status {self.process.exitcode})") from None
        if kind == "refused":
            raise ConfigError(content)
        if kind == "failed":
            raise RuntimeError(f"{self.name}: {content}")
        result: dict[str, Any] = content
        return result


def start(name: str, build: Callable[..., tuple[Work, dict[str, Any]]], *arguments: Any) -> Side:
    """Start a side. `build(*arguments)` runs in the new process and returns the work and the side's info."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, build, arguments), daemon=True)
    process.start()
    there.close()
    side = Side(name, process, here, {})
    side.info = side.receive()
    return side


def serve(pipe: Connection, build: Callable[..., tuple[Work, dict[str, Any]]], arguments: tuple[Any, ...]) -> None:
    """The process of a side: build the work, then do as much of it as each message asks for."""
    try:
        work, info = build(*arguments)
        pipe.send(("ready", info))
        while True:
            n = pipe.recv()
            began = time.perf_counter()
            reported = work(n)
            seconds = time.perf_counter() - began
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            pipe.send(("done", {"seconds": seconds, "peak_memory_mib": memory, **reported}))
    except ConfigError as error:
        pipe.send(("refused", str(error)))
    except EOFError:
        pass
    except Exception as error:
        pipe.send(("failed", f"{type(error).__name__}: {error}"))
        raise


def alternate(sides: Mapping[str, Callable[[], Turn]], rounds: int, key: str = "seconds", unit: str = "s") -> Turns:
    """`rounds` turns of each side. Every other round has the reverse order. Prints `key` of each turn."""
    turns: Turns = {name: [] for name in sides}
    for i in range(rounds):
        for name in list(sides)[:: 1 if i % 2 == 0 else -1]:
            turns[name].append(sides[name]())
        print(f"round {i + 1}: " + ", ".join(f"{name} {turns[name][-1][key]:.2f} {unit}" for name in sides), flush=True)
    return turns


def median(turns: list[Turn], key: str) -> float:
    return statistics.median(turn[key] for turn in turns)


def ratio(turns: Turns, a: str, b: str, key: str = "seconds", starts: int = 1) -> dict[str, float]:
    """spread() over rounds of a's `key` / b's. With rounds from several starts of the processes, one start after the
    other: spread() over starts of the median ratio of each."""
    ratios = [x[key] / y[key] for x, y in zip(turns[a], turns[b], strict=True)]
    n = len(ratios) // starts
    return spread([statistics.median(ratios[i * n : (i + 1) * n]) for i in range(starts)] if starts > 1 else ratios)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, lowest and highest, and with 6 values or more the 95 % interval of the median: low, high."""
    values = sorted(values)
    found = {"median": statistics.median(values), "lowest": values[0], "highest": values[-1]}
    if (k := rank_of_interval(len(values))) > 0:
        found |= {"low": values[k - 1], "high": values[-k]}
    return found


def rank_of_interval(n: int) -> int:
    """The largest k such that the k-th lowest and the k-th highest of n values enclose the median with a probability of
    at least 95 %, for any distribution (sign test: binomial with 1/2); 0 where n is too small."""
    k, below = 0, math.comb(n, 0)  # of 2^n equally likely samples, those with at most k values below the median
    while 40 * below <= 2**n:
        k += 1
        below += math.comb(n, k)
    return k


def variants(named: str, words: list[str]) -> dict[str, list[str]]:
    """variants=A;B -> {"A": words of A, "B": words of B}, each after the common `words`. Raises: ConfigError."""
    from sweeps.plan import compose
    from training.config import load_config

    chosen = {part.strip(): [*words, *part.split()] for part in named.split(";") if part.strip()}
    for variant in chosen.values():
        load_config(compose(variant))
    return chosen


def program_of(checkout: str, name: str) -> Path:
    """The file of the benchmark `name` in another checkout of this repository. Raises: ConfigError."""
    files = [*Path(checkout).resolve().glob(f"scripts/**/{name}")]  # it has not always been in scripts/benchmarks/
    require(len(files) == 1, f"old={checkout} must be a checkout of this repository: it has no {name}")
    return files[0]


def machine(device: str = "auto", threads: int | None = None) -> dict[str, Any]:
    """The conditions of a measurement. device, threads: as in train.py's settings."""
    import torch

    from core.device import device_name, resolve_device
    from core.rundir import commit

    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    name = device_name(resolve_device(device))
    torch.set_num_threads(before)
    return {
        "commit": commit(),
        "device": name,
        "cpus": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def run_benchmark(settings: type, program: Callable[..., Any], doc: str | None, passes_on: bool = True) -> int:
    """run_script() of a program that returns JSON, which is the last line, and raises RuntimeError for a failed side.
    passes_on: its second argument are train.py's overrides."""

    def run(*asked: Any) -> int:
        try:
            print(json.dumps(program(*asked)))
        except RuntimeError as error:
            print(f"failed: {' '.join(str(error).split())}", file=sys.stderr)
            return 1
        return 0

    return run_script(settings, run, doc, passes_on=passes_on)
