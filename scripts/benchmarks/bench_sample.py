"""Sampling speed

python scripts/benchmarks/bench_sample.py peer=PATH [rounds=5] [tokens=500] [start=TEXT] [overrides of train.py]

peer=PATH     alternates our generate() and that of nanoGPT, from a checkout, with the same weights
old=PATH      alternates our generate() and that of another checkout of this repository; also together with peer=
variants=A;B  alternates models of ours, each a list of overrides: "qk_norm=none;qk_norm=rms"
run=RUN       with peer= or old=: the run to sample from. By default the model that the overrides set, after one update

Each turn is a new process that reads a checkpoint and writes text: one sequence, then ten. tok_per_sec counts the
tokens of all sequences and starts when the checkpoint is loaded. first_token_s and seconds start with the process, so
they include imports. The last line is JSON.
"""

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from core.schema import NOT_EMPTY, AtLeast, Help, options, require
from scripts.benchmarks.nanogpt import check_model, load_model, model_args
from scripts.benchmarks.timing import ROOT, Turn, alternate, machine, median, program_of, ratio, run_benchmark, variants

# Each program runs in the folder of its checkout, whose modules it imports. It prints three times in seconds since the
# epoch: weights loaded, first token, all tokens. nanoGPT gets its sequences in one batch, which is faster than the loop
# over sequences in its sample.py.
OURS = """
import time
from pathlib import Path
import torch
from model.generate import generate
from sample import load_run
from core import checkpoint
from core.device import resolve_device, resolve_dtype
device = resolve_device("auto")
model, tokenizer, *_ = load_run(checkpoint.resolve(Path({run!r}), "best"), device)
loaded = time.time()
idx = torch.tensor(tokenizer.encode({start!r}).tolist(), device=device).expand({n}, -1)
tokens = generate(model, idx, {tokens}, 0.8, 200, None, 1337, resolve_dtype("auto", device))
first = None
out = []
for token in tokens:
    out.append(token)
    first = first or (token.tolist() and time.time())
texts = [tokenizer.decode(row) for row in torch.stack(out, 1).tolist()]
print(loaded, first, time.time())
"""
NANOGPT = """
import time
import torch
from torch.nn import functional as F
from model import GPT, GPTConfig
saved = torch.load({ckpt!r}, map_location="cpu")
model = GPT(GPTConfig(**saved["model_args"]))
model.load_state_dict(saved["model"], strict=False)
device = "cuda" if torch.cuda.is_available() else "cpu"
model.eval().to(device)
torch.manual_seed(1337)
loaded = time.time()
idx = torch.tensor(saved["prompt"], device=device)[None].repeat({n}, 1)
ctx = torch.autocast("cuda", torch.bfloat16) if device == "cuda" else torch.no_grad()
with torch.no_grad(), ctx:
    y = model.generate(idx, 1, temperature=0.8, top_k=200)
    y.tolist()
    first = time.time()
    y = model.generate(y, {tokens} - 1, temperature=0.8, top_k=200)
    rows = y.tolist()
print(loaded, first, time.time())
"""


def fresh_run(folder: Path, words: list[str], checkout: Path = ROOT) -> Path:
    """A run directory of the model that `words` set, after one update."""
    short = ["max_iters=1", "schedule.warmup_iters=0", "batch_size=1", "wandb.mode=disabled", f"out_dir={folder}"]
    done = subprocess.run([sys.executable, str(checkout / "train.py"), *words, *short], capture_output=True, text=True)
    require(done.returncode != 2, done.stderr.strip())
    done.check_returncode()
    return folder


def convert(run: Path, peer: str, file: Path, start: str) -> None:
    """Save the weights of `run` as nanoGPT's ckpt.pt, with the tokens of `start`."""
    import torch

    from core import checkpoint
    from sample import load_run

    model, tokenizer, *_ = load_run(checkpoint.resolve(run, "best"), torch.device("cpu"))
    check_model(model.config, f"run={run} with peer=")
    module, args = load_model(peer), model_args(model.config, tokenizer.vocab_size)
    theirs = module.GPT(module.GPTConfig(**args)).state_dict()
    weights = dict(model.state_dict())  # the names are nanoGPT's
    weights["lm_head.weight"] = weights["transformer.wte.weight"]  # tied
    missing = {key for key in theirs if key not in weights and not key.endswith("attn.bias")}  # a mask, not a weight
    assert not missing, missing
    state = {key: weights[key] for key in theirs if key in weights}
    torch.save({"model": state, "model_args": args, "prompt": tokenizer.encode(start).tolist()}, file)


@options
class BenchOptions:
    peer: Annotated[str | None, NOT_EMPTY, Help("a checkout of nanoGPT, to compare with")] = None
    old: Annotated[str | None, NOT_EMPTY, Help("another checkout of this repository, to compare with")] = None
    variants: Annotated[str, Help("our own settings to compare, lists of overrides: A;B")] = ""
    run: Annotated[str | None, NOT_EMPTY, Help("to sample from; null: the model after one update")] = None
    start: Annotated[str, Help("the prompt")] = "\n"
    rounds: Annotated[int, AtLeast(1), Help("turns of each side")] = 5
    tokens: Annotated[int, AtLeast(1), Help("of each sequence")] = 500

    def check(self) -> None:
        pair = bool(self.peer or self.old)
        require(pair != bool(self.variants), "one of peer=, old= and variants= must be given")
        require(pair or not self.run, "run= goes with peer= or old=")


Program = Callable[..., str]  # program(n=number of sequences) is its source


def sides_of(values: BenchOptions, words: list[str], folder: Path) -> dict[str, tuple[Path, Program]]:
    """Side -> its checkout and its program. Writes runs and weights to `folder`."""
    about = {"start": values.start, "tokens": values.tokens}
    if values.variants:
        named = variants(values.variants, words).items()
        runs = {name: fresh_run(folder / f"run{i}", variant) for i, (name, variant) in enumerate(named)}
        return {name: (ROOT, partial(OURS.format, run=str(run), **about)) for name, run in runs.items()}
    old = Path(values.old or ROOT).resolve()
    source = program_of(values.old or str(ROOT), "bench_sample.py").read_text()
    if values.peer:
        load_model(values.peer)  # refuses a wrong path before a run is trained
    run = str(Path(values.run or fresh_run(folder / "run", words, old)).resolve())  # old code cannot read new runs
    sides: dict[str, tuple[Path, Program]] = {"ours": (ROOT, partial(OURS.format, run=run, **about))}
    if values.old:
        # its modules cannot be imported beside ours
        program = re.findall(r'^OURS = """(.*?)"""', source, re.DOTALL | re.MULTILINE)[0]
        sides["old"] = (old, partial(program.format, run=run, root=str(old), **about))
    if values.peer:
        convert(Path(run), values.peer, folder / "ckpt.pt", values.start)
        sides["peer"] = (Path(values.peer).resolve(), partial(NANOGPT.format, ckpt=str(folder / "ckpt.pt"), **about))
    return sides


def sample(checkout: Path, program: Program, n: int, tokens: int) -> Turn:
    began = time.time()
    command = [sys.executable, "-c", program(n=n)]
    printed = subprocess.run(command, cwd=checkout, check=True, capture_output=True, text=True).stdout
    loaded, first, end = map(float, printed.split()[-3:])
    return {"tok_per_sec": n * tokens / (end - loaded), "first_token_s": first - began, "seconds": end - began}


def bench(values: BenchOptions, words: list[str]) -> dict[str, Any]:
    require(not (values.run and words), f"{words[:1]} cannot be set for a run that is there")
    result: dict[str, Any] = {"rounds": values.rounds, "tokens": values.tokens, "words": words, **machine()}
    with tempfile.TemporaryDirectory() as folder:
        sides = sides_of(values, words, Path(folder))
        for n in (1, 10):
            print(f"{n} sequence{'s' * (n > 1)}")
            named = {name: partial(sample, *side, n, values.tokens) for name, side in sides.items()}
            turns = alternate(named, values.rounds, "tok_per_sec", "tokens/s")
            rows = {name: {key: round(median(side, key), 2) for key in side[0]} for name, side in turns.items()}
            first, *others = turns
            if values.variants:
                speeds = {name: ratio(turns, name, first, "tok_per_sec") for name in others}
                result[f"{n}_sequences"] = {"variants": rows, "speed_over_first": speeds}
                continue
            names = {"peer": "ratio", "old": "ratio_to_old"}
            ratios = {names[name]: ratio(turns, "ours", name, "tok_per_sec") for name in others}
            result[f"{n}_sequences"] = {**rows, **ratios}
    return result


if __name__ == "__main__":
    sys.exit(run_benchmark(BenchOptions, bench, __doc__))
