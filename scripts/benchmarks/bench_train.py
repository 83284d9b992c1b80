"""Training speed: python scripts/benchmarks/bench_train.py peer=PATH [rounds=5] [iters=N] [overrides of train.py]

peer=PATH     alternates our update and nanoGPT's: the model.py of a checkout and the update of its train.py
old=PATH      alternates our update and that of another checkout of this repository; also together with peer=
variants=A;B  alternates our own settings, each a list of overrides: "qk_norm=none;qk_norm=rms". together=true:
              in one process, update by update in random order, as the memory layout of a process changes its times by
              several percent

An update is: batch, forward, backward, clip, optimizer. Times and ratios are medians over rounds; a ratio is computed
within a round. peak_memory_mib is the resident memory of the process, on CUDA that of its tensors. The last line is
JSON.
"""

import itertools
import random
import sys
import time
from functools import partial
from typing import Annotated, Any

import torch

from core.device import seed_generator
from core.process import say
from core.schema import AtLeast, Help, options, require
from scripts.benchmarks import timing
from scripts.benchmarks.nanogpt import check_model, load_model, nanogpt
from scripts.benchmarks.timing import Built, Turn, gpu_memory
from sweeps.plan import compose
from training.config import AdamWOptions, load_config
from training.meter import Meter
from training.qk_clip import qk_clip
from training.schedule import learning_rate
from training.session import setup
from training.updates import accumulate_gradients, seed_of_update, set_learning_rate, step_optimizer

SECONDS = 5.0  # of a turn, where iters= is not given


def ours(overrides: list[str]) -> Built:
    """The update of train.py, with its numbers kept and read as there."""
    config = load_config(compose(overrides))
    session = setup(config)
    machine, model, optimizer = session.machine, session.model.train(), session.optimizer
    n_micro_batches = config.gradient_accumulation_steps
    batches = session.data.batches.prefetch((step, i) for step in itertools.count() for i in range(n_micro_batches))
    meter, steps, frozen = Meter(session), itertools.count(), torch.zeros((), device=machine.device)

    def update(n: int) -> Turn:
        nonlocal frozen
        for step in itertools.islice(steps, n):
            meter.start()
            seed_generator(seed_of_update(config.seed, step, 0), machine.device)
            set_learning_rate(optimizer, learning_rate(step % config.max_iters, config))
            loss = accumulate_gradients(session.forward, batches, n_micro_batches, machine)
            norm, frozen = step_optimizer(session, loss, frozen)
            meter.add(step, loss, norm, qk_clip(model.attentions, config.qk_clip, frozen))
        meter.read({"iter": step})  # the host waits for the device
        return gpu_memory(machine.device)

    update(2)  # warm-up
    info = {
        "parameters": model.num_params(), "tokens_per_iter": config.tokens_per_iter, "dtype": str(machine.dtype),
        "peak_flops": session.peak, "flops_per_iter": model.flops_per_token() * config.tokens_per_iter,
    }  # fmt: skip
    return update, info


def together(named: dict[str, list[str]]) -> Built:
    """Updates of several variants in one process: n of each a turn, with the seconds of each."""
    works = {name: ours(overrides) for name, overrides in named.items()}
    order = random.Random(0)

    def update(n: int) -> Turn:
        seconds = dict.fromkeys(works, 0.0)
        for _ in range(n):
            for name in order.sample([*works], len(works)):
                began = time.perf_counter()
                works[name][0](1)
                seconds[name] += time.perf_counter() - began
        return {"seconds_of": seconds}

    return update, {"of": {name: info for name, (_, info) in works.items()}}


@options
class BenchOptions(timing.SidesOptions):
    together: Annotated[bool, Help("variants in one process, update by update in random order")] = False
    iters: Annotated[int, AtLeast(0), Help("updates a turn; 0: as many as take 5 s")] = 0

    def check(self) -> None:
        super().check()
        require(bool(self.variants) or not self.together, "together=true needs variants=")


def bench(values: BenchOptions, overrides: list[str]) -> dict[str, Any]:
    if values.peer:
        config = load_config(compose(overrides))
        check_model(config.gpt)
        require(type(config.optim) is AdamWOptions, "peer= needs nanoGPT's own settings: optim=adamw")
        load_model(values.peer)
    if values.together:
        sides = [timing.Side("all", together, timing.variants(values.variants, overrides))]
    else:
        sides = timing.start_sides(values, overrides, "bench_train.py", ours, nanogpt)
    infos = sides[0].info["of"] if values.together else {side.name: side.info for side in sides}
    about = next(iter(infos.values()))
    n = values.iters
    if n == 0:
        slowest = max(side.take_turn(1)["seconds"] for side in sides)
        n = max(1, round(SECONDS / slowest))
    sizes = ", ".join(f"{name} {info['parameters']:,}" for name, info in infos.items())
    say(f"{n} iterations a turn, {about['tokens_per_iter']:,} tokens each; parameters: {sizes}")
    began = time.time()
    turns = timing.alternate({side.name: partial(side.take_turn, n) for side in sides}, values.rounds)
    if values.together:
        turns = {name: [{**turn, "seconds": turn["seconds_of"][name]} for turn in turns["all"]] for name in infos}
    rows = {name: summary(turns[name], n, {**about, **info}) for name, info in infos.items()}
    common = {
        "rounds": values.rounds, "iters": n, "words": overrides, "seconds": round(time.time() - began),
        "dtype": about["dtype"], "peak_tflops": round(about["peak_flops"] / 1e12, 3),
        **timing.machine_of(values, overrides),
    }  # fmt: skip
    return {**timing.compared(values, rows, turns), **common}


def summary(turns: list[Turn], n: int, about: dict[str, Any]) -> dict[str, Any]:
    ms = 1000 * timing.median(turns, "seconds") / n
    return {
        "tok_per_sec": round(about["tokens_per_iter"] / ms * 1000),
        "ms_per_iter": round(ms, 2),
        "peak_memory_mib": round(timing.median(turns, "peak_memory_mib")),
        "mfu": round(about["flops_per_iter"] / ms * 1000 / about["peak_flops"], 4),
    }


if __name__ == "__main__":
    sys.exit(timing.run_benchmark(BenchOptions, bench, __doc__))
