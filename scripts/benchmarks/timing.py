"""What the benchmarks share: sides that are timed by turns, each in a process of its own, and the words they take.

Timings of one machine drift; what holds is the ratio of two sides that took turns in one run, as a median over rounds.
"""

import importlib.util
import json
import math
import multiprocessing
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from core.cli import read_words, refuse
from core.schema import ConfigError, require

Work = Callable[[int], dict[str, Any]]  # does n units of work; returns what it wants reported of them


@dataclass
class Side:
    """A process that builds its work once, and does some of it when told to."""

    name: str
    process: Any
    pipe: Connection
    info: dict[str, Any]

    def take_turn(self, n: int) -> dict[str, Any]:
        with suppress(BrokenPipeError):  # receive says how it died
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
    """Start a side: `build(*arguments)`, called in the new process, returns its work and what is known of it."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, build, arguments), daemon=True)
    process.start()
    there.close()
    side = Side(name, process, here, {})
    side.info = side.receive()
    return side


def serve(pipe: Connection, build: Callable[..., tuple[Work, dict[str, Any]]], arguments: tuple[Any, ...]) -> None:
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


def alternate(sides: list[Side], rounds: int, n: int | dict[str, int]) -> dict[str, list[dict[str, Any]]]:
    """`rounds` turns of n units for each side (or of its own n), in an order that turns round with every round."""
    units = n if isinstance(n, dict) else {side.name: n for side in sides}
    turns: dict[str, list[dict[str, Any]]] = {side.name: [] for side in sides}
    for i in range(rounds):
        for side in sides if i % 2 == 0 else sides[::-1]:
            turns[side.name].append(side.take_turn(units[side.name]))
        print(
            f"round {i + 1}: " + ", ".join(f"{s.name} {turns[s.name][-1]['seconds']:.2f} s" for s in sides), flush=True
        )
    return turns


def median(turns: list[dict[str, Any]], key: str) -> float:
    return statistics.median(turn[key] for turn in turns)


def ratio(
    turns: dict[str, list[dict[str, Any]]], a: str, b: str, key: str = "seconds", starts: int = 1
) -> dict[str, float]:
    """Seconds of a over seconds of b, round by round: the median, from 6 rounds on its 95 % interval (low, high), the
    lowest and the highest. Of rounds from several starts, one after the other, the same of the starts' medians."""
    ratios = [x[key] / y[key] for x, y in zip(turns[a], turns[b], strict=True)]
    if starts > 1:
        n = len(ratios) // starts
        ratios = [statistics.median(ratios[i * n : (i + 1) * n]) for i in range(starts)]
    ratios.sort()
    found = {"median": statistics.median(ratios), "lowest": ratios[0], "highest": ratios[-1]}
    if (k := rank_of_interval(len(ratios))) > 0:
        found |= {"low": ratios[k - 1], "high": ratios[-k]}
    return found


def rank_of_interval(n: int) -> int:
    """k such that the k-th lowest and the k-th highest of n values hold the median between them in at least 95 % of
    samples, whatever the distribution (the sign test's interval: binomial, 1/2); 0 where n is too small."""
    k, below = 0, math.comb(n, 0)  # of 2^n samples, those with at most k values below the median
    while 40 * below <= 2**n:
        k += 1
        below += math.comb(n, k)
    return k


def peer_model(peer: Path) -> Any:
    """The module model.py of a checkout of nanoGPT. Raises: ConfigError where there is none."""
    spec = importlib.util.spec_from_file_location("peer_model", peer / "model.py")
    require((peer / "model.py").exists(), f"peer={peer} must be a checkout of nanoGPT: it has no model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["peer_model"] = module
    spec.loader.exec_module(module)
    return module


def machine(device: str = "auto", threads: int | None = None) -> dict[str, Any]:
    """What a figure depends on. device, threads: the words of train.py that it was measured with."""
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


def run_benchmark(doc: str | None, known: dict[str, Any], program: Callable[[dict[str, Any], list[str]], Any]) -> int:
    """Call program(values, other words) with the command line's words; print its JSON as the last line.

    known: word -> (type, default). Exit status 2 for a word that cannot be used, 1 for a side that failed.
    """
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(doc)
        return 0
    try:
        values, others = read_words(sys.argv[1:], {key: kind for key, (kind, _) in known.items()})
        print(json.dumps(program({key: default for key, (_, default) in known.items()} | values, others)))
    except ConfigError as error:
        return refuse(str(error))
    except RuntimeError as error:
        print(f"failed: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0
