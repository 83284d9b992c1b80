"""Sampling speed

python scripts/benchmarks/bench_sample.py peer=PATH [rounds=5] [tokens=500] [start=TEXT] [words of train.py]

peer=PATH     a checkout of nanoGPT: the generate() of its model.py takes turns with ours, with the same weights
variants=A;B  or: our own models against one another, each a list of train.py's words: "qk_norm=none;qk_norm=rms"
run=RUN       with peer=: the run to sample from; else fresh weights of the model that the words set are saved first

From a checkpoint on disk to text, each time in a new process, for one sequence and ten. Tokens a second count what is
generated in all sequences after the checkpoint is loaded; first_token_s is the time from the start of the program to
its first token, imports and loading included; seconds that to its end. The last line is JSON.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from core.schema import require
from scripts.benchmarks.timing import machine, median, peer_model, ratio, run_benchmark
from sweeps.plan import compose
from training.config import load_config

ROOT = Path(__file__).resolve().parent.parent.parent


def fresh_run(folder: Path, words: list[str]) -> Path:
    """A run directory of the model that `words` set, after one update."""
    short = ["max_iters=1", "schedule.warmup_iters=0", "batch_size=1", "wandb.mode=disabled", f"out_dir={folder}"]
    done = subprocess.run([sys.executable, str(ROOT / "train.py"), *words, *short], capture_output=True, text=True)
    require(done.returncode != 2, done.stderr.strip())
    done.check_returncode()
    return folder


def convert(run: Path, peer: Path, folder: Path, start: str) -> list[int]:
    """Save the weights of `run` as nanoGPT's ckpt.pt in `folder`. Returns the tokens of `start`."""
    import torch

    from core import checkpoint
    from sample import load_run

    model, tokenizer, _ = load_run(checkpoint.resolve(run, "best"), torch.device("cpu"))
    m = model.config.model
    plain = model.config.qk_norm.name == "none" and model.config.attention.name == "mha"
    plain = plain and (m.norm, m.mlp, m.position, m.tied) == ("layernorm", "gelu", "learned", True)
    require(plain, f"run={run} must be a model that nanoGPT has: MHA without a QK norm")
    module = peer_model(peer)
    sizes = {key: getattr(m, key) for key in ("n_layer", "n_head", "n_embd", "block_size", "bias", "dropout")}
    args = {**sizes, "vocab_size": tokenizer.vocab_size}
    theirs = module.GPT(module.GPTConfig(**args)).state_dict()
    weights = dict(model.state_dict())  # the names are nanoGPT's
    weights["lm_head.weight"] = weights["transformer.wte.weight"]  # tied
    missing = {key for key in theirs if key not in weights and not key.endswith("attn.bias")}  # a mask, not a weight
    assert not missing, missing
    torch.save({"model": {k: weights[k] for k in theirs if k in weights}, "model_args": args}, folder / "ckpt.pt")
    return tokenizer.encode(start).tolist()


# Each program prints when its weights are loaded, when its first token is there and when all are: seconds since the
# epoch. nanoGPT's sequences stand in one batch, which is faster than one after the other, as its sample.py has them.
OURS = """
import sys, time
from pathlib import Path
import torch
from model.generate import generate
from sample import load_run
from core import checkpoint
from core.device import resolve_device, resolve_dtype
device = resolve_device("auto")
model, tokenizer, _ = load_run(checkpoint.resolve(Path({run!r}), "best"), device)
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
PEERS = """
import sys, time
sys.path.insert(0, {peer!r})
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
idx = torch.tensor({prompt!r}, device=device)[None].repeat({n}, 1)
ctx = torch.autocast("cuda", torch.bfloat16) if device == "cuda" else torch.no_grad()
with torch.no_grad(), ctx:
    y = model.generate(idx, 1, temperature=0.8, top_k=200)
    y.tolist()
    first = time.time()
    y = model.generate(y, {tokens} - 1, temperature=0.8, top_k=200)
    rows = y.tolist()
print(loaded, first, time.time())
"""


def sample(script: str, n: int, tokens: int) -> dict[str, float]:
    began = time.time()
    command = [sys.executable, "-c", script]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ).stdout
    loaded, first, end = map(float, printed.split()[-3:])
    return {"tok_per_sec": n * tokens / (end - loaded), "first_token_s": first - began, "seconds": end - began}


def bench(values: dict[str, Any], words: list[str]) -> dict[str, Any]:
    require(bool(values["peer"]) != bool(values["variants"]), "one of peer= and variants= must be given")
    require(values["peer"] or not values["run"], "run= goes with peer=")
    require(not (values["run"] and words), f"{words[:1]} cannot be set for a run that is there")
    named = {part.strip(): [*words, *part.split()] for part in values["variants"].split(";") if part.strip()}
    for variant in named.values():
        load_config(compose(variant))
    about = {"root": str(ROOT), "start": values["start"], "tokens": values["tokens"]}
    result: dict[str, Any] = {"rounds": values["rounds"], "tokens": values["tokens"], "words": words, **machine()}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if values["peer"]:
            peer_model(Path(values["peer"]))
            run = Path(values["run"] or fresh_run(folder / "run", words)).resolve()
            peer = Path(values["peer"]).resolve()
            prompt = convert(run, peer, folder, values["start"])
            theirs = {"peer": str(peer), "ckpt": str(folder / "ckpt.pt"), "prompt": prompt}
            sides: dict[str, Any] = {"ours": (OURS, {"run": str(run)}), "peer": (PEERS, theirs)}
        else:
            sides = {
                name: (OURS, {"run": str(fresh_run(folder / f"run{i}", variant))})
                for i, (name, variant) in enumerate(named.items())
            }
        for n in (1, 10):
            scripts = {name: script.format(n=n, **about, **own) for name, (script, own) in sides.items()}
            turns = take_turns(scripts, n, values["tokens"], values["rounds"])
            rows = {name: {key: round(median(side, key), 2) for key in side[0]} for name, side in turns.items()}
            first, *others = turns
            speeds = {name: ratio(turns, name, first, "tok_per_sec") for name in others}
            result[f"{n}_sequences"] = (
                {**rows, "ratio": ratio(turns, "ours", "peer", "tok_per_sec")}
                if values["peer"]
                else {"variants": rows, "speed_over_first": speeds}
            )
    return result


def take_turns(scripts: dict[str, str], n: int, tokens: int, rounds: int) -> dict[str, list[dict[str, float]]]:
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in scripts}
    for i in range(rounds):
        for name in list(scripts)[:: 1 if i % 2 == 0 else -1]:
            turns[name].append(sample(scripts[name], n, tokens))
        speeds = ", ".join(f"{name} {side[-1]['tok_per_sec']:.0f} tokens/s" for name, side in turns.items())
        print(f"{n} sequences, round {i + 1}: {speeds}", flush=True)
    return turns


if __name__ == "__main__":
    known = {
        "peer": (str, ""),
        "variants": (str, ""),
        "run": (str, ""),
        "start": (str, "\n"),
        "rounds": (int, 5),
        "tokens": (int, 500),
    }
    sys.exit(run_benchmark(__doc__, known, bench))
