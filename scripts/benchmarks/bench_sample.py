"""Sampling speed: python scripts/benchmarks/bench_sample.py peer=PATH [rounds=5] [tokens=500] [overrides of train.py]

peer=PATH     alternates our generate() and that of nanoGPT, from a checkout
old=PATH      alternates our generate() and that of another checkout of this repository; also together with peer=
variants=A;B  alternates models of ours, each a list of overrides: "qk_norm=none;qk_norm=rms"

Untrained models continue one token: one sequence, then ten. tok_per_sec counts the tokens of all sequences. The last
line is JSON.
"""

import sys
from functools import partial
from typing import Annotated, Any

import torch

from core.schema import AtLeast, Help, options
from data.tokens import load_corpus
from model.generate import generate
from scripts.benchmarks import timing
from scripts.benchmarks.nanogpt import check_model, load_model, set_up
from scripts.benchmarks.timing import Built, Turn
from sweeps.plan import compose
from training.config import load_config
from training.session import setup

SAMPLING: dict[str, Any] = {"temperature": 0.8, "top_k": 200}


def ours(overrides: list[str], n_tokens: int) -> Built:
    """Sequences of n_tokens by generate()."""
    session = setup(load_config(compose(overrides)))
    model, machine = session.model.eval(), session.machine

    def sample(n: int) -> Turn:
        idx = torch.zeros(n, 1, dtype=torch.int64, device=machine.device)  # (B, T)
        tokens = list(generate(model, idx, n_tokens, dtype=machine.dtype, **SAMPLING))
        torch.stack(tokens, 1).tolist()  # the host waits for the device
        return {}

    return sample, {}


def nanogpt(peer: str, overrides: list[str], n_tokens: int) -> Built:
    """The same by nanoGPT, in one batch: its sample.py has a slower loop over sequences."""
    config = load_config(compose(overrides))
    vocab_size = load_corpus(config.data, config.model.block_size).tokenizer.vocab_size
    model, device, autocast = set_up(peer, config, vocab_size)
    model.eval()

    def sample(n: int) -> Turn:
        idx = torch.zeros(n, 1, dtype=torch.int64, device=device)  # (B, T)
        with torch.no_grad(), autocast:
            model.generate(idx, n_tokens, **SAMPLING).tolist()
        return {}

    return sample, {}


@options
class BenchOptions(timing.SidesOptions):
    tokens: Annotated[int, AtLeast(1), Help("of each sequence")] = 500


def bench(values: BenchOptions, overrides: list[str]) -> dict[str, Any]:
    if values.peer:
        check_model(load_config(compose(overrides)).gpt)
        load_model(values.peer)
    sides = timing.start_sides(values, overrides, "bench_sample.py", ours, nanogpt, values.tokens)
    for side in sides:
        side.take_turn(1)  # warm-up
    result: dict[str, Any] = {"rounds": values.rounds, "tokens": values.tokens, "words": overrides}
    for n in (1, 10):
        print("1 sequence" if n == 1 else f"{n} sequences")
        turns = timing.alternate({side.name: partial(side.take_turn, n) for side in sides}, values.rounds)
        seconds = {name: timing.median(of, "seconds") for name, of in turns.items()}
        rows = {name: {"tok_per_sec": round(n * values.tokens / s, 2), "seconds": s} for name, s in seconds.items()}
        result[f"{n}_sequences"] = timing.compared(values, rows, turns)
    return {**result, **timing.machine_of(values, overrides)}


if __name__ == "__main__":
    sys.exit(timing.run_benchmark(BenchOptions, bench, __doc__))
