"""Training speed: python scripts/benchmarks/bench_train.py peer=PATH [rounds=5] [iters=N] [overrides of train.py]

peer=PATH     alternates our update and nanoGPT's: the model.py of a checkout and the update of its train.py
old=PATH      alternates our update and that of another checkout of this repository; also together with peer=
variants=A;B  alternates our own settings, each a list of overrides: "qk_norm=none;qk_norm=rms". together=true:
              in one process, update by update in random order, as the memory layout of a process changes its times by
              several percent
eval_iters=N  with peer=: an evaluation instead of updates. Ours is exact; nanoGPT's has N batches of each split, of
              which `iters` (default 2) are timed and the rest is computed
curves=N      with peer=: losses of N updates from the same weights on the same batches, for `rounds` seeds
start_up=true the seconds from the start of python train.py to its loop, and to the first logged update (between the
              two lies the first evaluation)

An update is: batch, forward, backward, clip, optimizer. Times and ratios are medians over rounds; a ratio is computed
within a round. peak_memory_mib is the resident memory of the process. The last line is JSON.
"""

import importlib
import itertools
import math
import random
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from core.schema import NOT_EMPTY, AtLeast, Help, options, require
from scripts.benchmarks.nanogpt import check_model, load_model, nanogpt
from scripts.benchmarks.timing import (
    ROOT,
    Side,
    Turn,
    Turns,
    Work,
    alternate,
    machine,
    median,
    program_of,
    ratio,
    run_benchmark,
    start,
    variants,
)
from sweeps.plan import compose
from training.config import AdamWOptions, load_config
from training.schedule import learning_rate

SECONDS = 5.0  # of a turn, where iters= is not given
PACKAGES = {"core", "data", "model", "sample", "scripts", "sweeps", "train", "training"}


def ours(words: list[str], evaluation: bool = False, warm_up: int = 2) -> tuple[Work, dict[str, Any]]:
    """The update of train.py, with its numbers kept and read as there, or its exact evaluation."""
    from torch.nn.utils import clip_grad_norm_

    from training.evaluate import validation_loss
    from training.meter import Meter
    from training.qk_clip import qk_clip
    from training.session import setup
    from training.updates import accumulate_gradients, seed_generator, seed_of_update

    config = load_config(compose(words))
    session = setup(config)
    machine, model, optimizer = session.machine, session.model.train(), session.optimizer
    parameters, n_micro_batches = [*model.parameters()], config.gradient_accumulation_steps
    batches = session.data.batches.prefetch((step, i) for step in itertools.count() for i in range(n_micro_batches))
    meter, steps = Meter(session, {}), itertools.count()

    def update(n: int) -> Turn:
        lines: list[dict[str, Any]] = [{"iter": step} for step in itertools.islice(steps, n)]
        for line in lines:
            meter.start()
            seed_generator(seed_of_update(config.seed, line["iter"], 0), machine.device)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(line["iter"] % config.max_iters, config)
            loss = accumulate_gradients(session.forward, batches, n_micro_batches, machine)
            norm = clip_grad_norm_(parameters, config.grad_clip or math.inf)
            optimizer.step()
            optimizer.zero_grad()
            meter.add(line, loss, norm, 0, qk_clip(model.attentions, config.qk_clip))
        meter.read()  # the host waits for the device
        return {"losses": [line["train/loss"] for line in lines]}

    if warm_up:
        update(warm_up)
    info = {
        "held_out_tokens": session.data.held_out_tokens, "parameters": model.num_params(),
        "tokens_per_iter": config.tokens_per_iter, "dtype": str(machine.dtype), "peak_flops": session.peak,
        "flops_per_iter": model.flops_per_token() * config.tokens_per_iter,
    }  # fmt: skip
    return (lambda _: validation_loss(session)) if evaluation else update, info


def old(checkout: Path, program: Path, words: list[str]) -> tuple[Work, dict[str, Any]]:
    """ours() of another checkout of this repository. It replaces our modules in this process."""
    for name in [name for name in sys.modules if name.split(".")[0] in PACKAGES]:
        del sys.modules[name]
    sys.path.insert(0, str(checkout))  # its packages have the names of ours
    module = importlib.import_module(".".join(program.relative_to(checkout).with_suffix("").parts))
    work: tuple[Work, dict[str, Any]] = module.ours(words)
    return work


def together(named: dict[str, list[str]]) -> tuple[Work, dict[str, Any]]:
    """Updates of several variants in one process: n of each a turn, with the seconds of each."""
    works = {name: ours(words) for name, words in named.items()}
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


def machine_of(words: list[str]) -> dict[str, Any]:
    config = load_config(compose(words))
    return machine(config.device, config.threads)


# -----------------------------------------------------------------------------
# Updates


@options
class BenchOptions:
    peer: Annotated[str | None, NOT_EMPTY, Help("a checkout of nanoGPT, to compare with")] = None
    old: Annotated[str | None, NOT_EMPTY, Help("another checkout of this repository, to compare with")] = None
    variants: Annotated[str, Help("our own settings to compare, lists of overrides: A;B")] = ""
    together: Annotated[bool, Help("variants in one process, update by update in random order")] = False
    rounds: Annotated[int, AtLeast(1), Help("turns of each side")] = 5
    iters: Annotated[int, AtLeast(0), Help("updates a turn; 0: as many as take 5 s")] = 0
    eval_iters: Annotated[int, AtLeast(0), Help("with peer: an evaluation, nanoGPT's of so many batches")] = 0
    curves: Annotated[int, AtLeast(0), Help("with peer: the losses of so many updates, for `rounds` seeds")] = 0
    start_up: Annotated[bool, Help("the start of train.py instead")] = False

    def check(self) -> None:
        asked = [bool(self.peer or self.old), bool(self.variants), self.start_up]
        require(sum(asked) == 1, "one of peer=, old=, variants= and start_up=true must be given")
        require(bool(self.variants) or not self.together, "together=true needs variants=")


def start_sides(values: BenchOptions, words: list[str]) -> list[Side]:
    if values.variants:
        named = variants(values.variants, words)
        if values.together:
            return [start("all", together, named)]
        return [start(name, ours, own) for name, own in named.items()]
    other = program_of(values.old, "bench_train.py") if values.old else None
    sides = [start("ours", ours, words)]
    if values.old:
        sides.append(start("old", old, Path(values.old).resolve(), other, words))
    if values.peer:
        sides.append(start("peer", nanogpt, values.peer, words))
    return sides


def bench_updates(values: BenchOptions, words: list[str]) -> dict[str, Any]:
    sides = start_sides(values, words)
    infos = sides[0].info["of"] if values.together else {side.name: side.info for side in sides}
    first, about = next(iter(infos.items()))
    n = values.iters
    if n == 0:
        slowest = max(side.take_turn(1)["seconds"] for side in sides)
        n = max(1, round(SECONDS / slowest))
    print(f"{n} iterations a turn, {about['tokens_per_iter']:,} tokens each; parameters: "
          + ", ".join(f"{name} {info['parameters']:,}" for name, info in infos.items()))  # fmt: skip
    began = time.time()
    turns = alternate({side.name: partial(side.take_turn, n) for side in sides}, values.rounds)
    if values.together:
        turns = {name: [{**turn, "seconds": turn["seconds_of"][name]} for turn in turns["all"]] for name in infos}
    rows = {name: summary(turns[name], n, {**about, **info}) for name, info in infos.items()}
    common = {
        "rounds": values.rounds, "iters": n, "words": words, "seconds": round(time.time() - began),
        "dtype": about["dtype"], "peak_tflops": round(about["peak_flops"] / 1e12, 3),
        **machine_of(next(iter(variants(values.variants, words).values()), words)),
    }  # fmt: skip
    return {**compared(turns, rows, bool(values.variants)), **common}


def summary(turns: list[Turn], n: int, about: dict[str, Any]) -> dict[str, Any]:
    ms = 1000 * median(turns, "seconds") / n
    return {
        "tok_per_sec": round(about["tokens_per_iter"] / ms * 1000),
        "ms_per_iter": round(ms, 2),
        "peak_memory_mib": round(median(turns, "peak_memory_mib")),
        "mfu": round(about["flops_per_iter"] / ms * 1000 / about["peak_flops"], 4),
    }


def compared(turns: Turns, rows: dict[str, Any], of_variants: bool) -> dict[str, Any]:
    """The rows with ratios of seconds: variants / the first one; other sides / ours."""
    first, *others = rows
    if of_variants:
        return {"variants": rows, "time_over_first": {name: ratio(turns, name, first) for name in others}}
    names = {"peer": "ratio", "old": "ratio_to_old"}
    return {**rows, **{names[name]: ratio(turns, name, "ours") for name in others}}


# -----------------------------------------------------------------------------
# Evaluation, curves, start-up


def bench_evaluation(values: BenchOptions, words: list[str]) -> dict[str, Any]:
    """Seconds of an evaluation: ours of every held-out token, nanoGPT's of 2 eval_iters sampled batches."""
    sides = [start("ours", ours, words, True), start("peer", nanogpt, values.peer, words, True)]
    n, batches, about = values.iters or 2, 2 * values.eval_iters, sides[0].info
    turns = alternate({side.name: partial(side.take_turn, n) for side in sides}, values.rounds)
    for turn in turns["peer"]:
        turn["seconds"] *= batches / n
    tokens = batches * sides[1].info["tokens_per_batch"]
    return {
        "ours": {"seconds": median(turns["ours"], "seconds"), "tokens": about["held_out_tokens"]},
        "peer": {"seconds": median(turns["peer"], "seconds"), "tokens": tokens, "batches_run": n},
        "ratio": ratio(turns, "peer", "ours"), "rounds": values.rounds, "words": words, "dtype": about["dtype"],
        **machine_of(words),
    }  # fmt: skip


def bench_curves(values: BenchOptions, words: list[str]) -> dict[str, Any]:
    """Training losses of both sides as means over tenths of the updates, their differences, the spread of seeds."""
    n, seeds = values.curves, range(1, values.rounds + 1)
    require(n >= 10 and len(seeds) >= 2, "curves= needs 10 updates, and rounds= 2 seeds")
    curves: dict[str, list[list[float]]] = {"ours": [], "peer": []}  # for each seed the loss of every update
    for seed in seeds:
        own = [*words, f"seed={seed}"]
        for name in curves:
            peer = (nanogpt, values.peer, own, False, True)
            side = start(name, ours, own, False, 0) if name == "ours" else start(name, *peer)
            curves[name].append(side.take_turn(n)["losses"])
            side.stop()
        a, b = (curves[name][-1] for name in curves)
        print(f"seed {seed}: first loss {a[0]:.6f} and {b[0]:.6f}, last {a[-1]:.4f} and {b[-1]:.4f}", flush=True)
    each = np.array([*curves.values()])  # (2, seeds, updates)
    ends = [n * i // 10 for i in range(11)]
    tenths = np.stack([each[..., a:b].mean(-1) for a, b in itertools.pairwise(ends)], -1)  # (2, seeds, 10)
    difference = tenths[0] - tenths[1]
    means, spreads = tenths.mean(1).round(5).tolist(), tenths[0].std(0, ddof=1)
    return {
        "updates": n, "seeds": [*seeds], "tenths_end_at": ends[1:], "ours": means[0], "peer": means[1],
        "difference": difference.mean(0).round(5).tolist(),
        "sd_of_difference": difference.std(0, ddof=1).round(5).tolist(), "sd_over_seeds": spreads.round(5).tolist(),
        "first_loss_difference": float(abs(each[0, :, 0] - each[1, :, 0]).max()),
        "words": words, **machine_of(words),
    }  # fmt: skip


def start_up(words: list[str]) -> Turn:
    """Seconds until train.py writes its log, as its loop begins, and its first metrics."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, str(ROOT / "train.py"), *words, f"out_dir={run}", "wandb.mode=disabled"]
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        turn = {}
        for key, file in {"loop_begins_s": run / "train.log", "first_update_s": run / "metrics.jsonl"}.items():
            while not (file.exists() and file.stat().st_size):
                require(process.poll() is None, f"python train.py {' '.join(words)} ended by itself")
                time.sleep(0.01)
            turn[key] = time.perf_counter() - began
        process.terminate()
        process.wait()
    return turn


def bench_start_up(values: BenchOptions, words: list[str]) -> dict[str, Any]:
    load_config(compose(words))
    (turns,) = alternate({"train.py": partial(start_up, words)}, values.rounds, "first_update_s").values()
    return {**{key: median(turns, key) for key in turns[0]}, "rounds": values.rounds, "words": words,
            **machine_of(words)}  # fmt: skip


def bench(values: BenchOptions, words: list[str]) -> dict[str, Any]:
    if values.start_up:
        return bench_start_up(values, words)
    if values.peer:
        config = load_config(compose(words))
        check_model(config.gpt, "peer=")
        require(type(config.optim) is AdamWOptions, "peer= needs nanoGPT's own settings: optim=adamw")
        load_model(values.peer)
        if values.eval_iters:
            return bench_evaluation(values, words)
        if values.curves:
            return bench_curves(values, words)
    return bench_updates(values, words)


if __name__ == "__main__":
    sys.exit(run_benchmark(BenchOptions, bench, __doc__))
