"""Training speed: python scripts/benchmarks/bench_train.py peer=PATH [rounds=5] [iters=N] [words of train.py]

peer=PATH     a checkout of nanoGPT: its model.py and the update of its train.py take turns with ours, at our settings
variants=A;B  or: our own settings against one another, each a list of train.py's words: "qk_norm=none;qk_norm=rms".
              together=true: in one process, update by update in random order, as where a process lies in memory moves
              its times by several percent
eval_iters=N  with peer=: an evaluation instead of updates: ours, exact, against nanoGPT's of N batches of each split,
              of which it makes `iters` a turn (by default 2): the rest is reckoned
curves=N      with peer=: N updates of both from the same weights on the same batches, of `rounds` seeds: losses
start_up=true or: python train.py, from its start until the loop begins, and until the first update is logged (between
              the two lies the first evaluation)

An update is: batch, forward, backward, clip, optimizer. Times are medians over rounds in which the sides take turns; a
ratio is that of one round, median over rounds. peak_memory_mib is the process's resident memory. The last line is JSON.
"""

import itertools
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from core.schema import require
from scripts.benchmarks.timing import Work, alternate, machine, median, peer_model, ratio, run_benchmark, start
from sweeps.plan import compose
from training.config import AdamWOptions, TrainConfig, load_config
from training.schedule import learning_rate

ROOT = Path(__file__).resolve().parent.parent.parent
SECONDS = 5.0  # of a turn, where iters= does not say


def ours(words: list[str], evaluation: bool = False, warm_up: int = 2) -> tuple[Work, dict[str, Any]]:
    """Our update, as train.py makes it, or its exact evaluation."""
    import torch

    from core.device import synchronize
    from training.evaluate import validation_loss
    from training.qk_clip import qk_clip
    from training.session import setup
    from training.updates import accumulate_gradients, seed_generator, seed_of_update

    config = load_config(compose(words))
    session = setup(config)
    machine, model, optimizer = session.machine, session.model.train(), session.optimizer
    parameters, n = [*model.parameters()], config.gradient_accumulation_steps
    step = 0
    batches = session.data.batches.prefetch(divmod(i, n) for i in itertools.count())

    def evaluate(_: int) -> dict[str, Any]:
        return {"loss": validation_loss(session)["val/loss"]}

    def update(times: int) -> dict[str, Any]:
        nonlocal step
        losses = []
        for _ in range(times):
            seed_generator(seed_of_update(config.seed, step, 0), machine.device)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step % config.max_iters, config)
            loss = accumulate_gradients(session.forward, batches, n, machine)
            torch.nn.utils.clip_grad_norm_(parameters, config.grad_clip or math.inf)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            qk_clip(model.attentions, config.qk_clip)
            losses.append(loss)
            step += 1
        synchronize(machine.device)
        return {"losses": [loss.item() for loss in losses]}

    update(warm_up)
    info = {
        "held_out_tokens": session.data.held_out_tokens, "parameters": model.num_params(),
        "tokens_per_iter": config.tokens_per_iter, "dtype": str(machine.dtype),
        "flops_per_iter": model.flops_per_token() * config.tokens_per_iter, "peak_flops": session.peak,
    }  # fmt: skip
    return evaluate if evaluation else update, info


def together(named: dict[str, list[str]]) -> tuple[Work, dict[str, Any]]:
    """Our updates with several settings, by name, in one process: n of each a turn, and the seconds of each."""
    works = {name: ours(words) for name, words in named.items()}
    order = random.Random(0)

    def update(n: int) -> dict[str, Any]:
        seconds = dict.fromkeys(works, 0.0)
        for _ in range(n):
            for name in order.sample([*works], len(works)):
                began = time.perf_counter()
                works[name][0](1)
                seconds[name] += time.perf_counter() - began
        return {"seconds_of": seconds}

    return update, {"of": {name: info for name, (_, info) in works.items()}}


def peers(path: str, words: list[str], evaluation: bool = False, alike: bool = False) -> tuple[Work, dict[str, Any]]:
    """nanoGPT's model.py at `path` and the update of its train.py, or n batches of its evaluation: fp32 on a CPU;
    compiled, bf16 autocast on CUDA. alike: from our first weights, on our batches, with our learning rates."""
    import numpy as np
    import torch

    from core.device import resolve_device, synchronize
    from data.batches import Batches
    from training.session import build_model, read_corpus

    config = load_config(compose(words))
    torch.set_num_threads(config.threads or torch.get_num_threads())
    device = resolve_device(config.device)
    module = peer_model(Path(path))
    _, tokenizer, tokens, folds = read_corpus(config)
    ((start_at, end),) = folds.train[:1]
    data = np.asarray(tokens[start_at:end], dtype=np.uint16)
    m, optim, T = config.model, config.optim, config.model.block_size
    sizes = {key: getattr(m, key) for key in ("n_layer", "n_head", "n_embd", "block_size", "bias", "dropout")}
    torch.manual_seed(config.seed)
    model = module.GPT(module.GPTConfig(**sizes, vocab_size=tokenizer.vocab_size)).to(device).train()
    optimizer = model.configure_optimizers(optim.weight_decay, optim.learning_rate, optim.betas, device.type)
    batches = Batches(tokens, folds, T, config.batch_size, config.seed)
    if alike:
        same = build_model(config, tokenizer.vocab_size)
        same.init_weights(config.seed)
        left_out, unknown = model.load_state_dict(same.state_dict(), strict=False)
        require(not unknown and set(left_out) <= {"lm_head.weight"}, f"peer={path} has other weights: {left_out}")
    forward = torch.compile(model) if device.type == "cuda" else model
    cuda = device.type == "cuda"
    ctx = torch.autocast("cuda", torch.bfloat16) if cuda else nullcontext()

    made = 0

    def get_batch() -> tuple[Any, Any]:
        nonlocal made
        if alike:
            made += 1
            return batches.get_batch(*divmod(made - 1, config.gradient_accumulation_steps))
        ix = torch.randint(len(data) - T, (config.batch_size,))
        x = torch.stack([torch.from_numpy(data[i : i + T].astype(np.int64)) for i in ix])
        y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + T].astype(np.int64)) for i in ix])
        if cuda:
            return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)
        return x, y

    batch = get_batch()

    def update(n: int) -> dict[str, Any]:
        nonlocal batch
        losses = []
        for step in range(n):
            total = 0.0
            for group in optimizer.param_groups if alike else ():
                group["lr"] = learning_rate(step, config)
            for _ in range(config.gradient_accumulation_steps):
                with ctx:
                    _, loss = forward(*(part.to(device) for part in batch))
                    loss = loss / config.gradient_accumulation_steps
                batch = get_batch()
                loss.backward()
                total = total + loss.detach()
            losses.append(total)
            if config.grad_clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        synchronize(device)
        return {"losses": [float(total) for total in losses]}

    @torch.no_grad()
    def evaluate(n: int) -> dict[str, Any]:
        model.eval()
        for _ in range(n):
            with ctx:
                _, loss = forward(*get_batch())
            value = loss.item()
        return {"loss": value}

    update(0 if alike else 2)
    return evaluate if evaluation else update, {
        "parameters": sum(p.numel() for p in model.parameters()), "tokens_per_batch": config.batch_size * T,
    }  # fmt: skip


def check_comparable(config: TrainConfig) -> None:
    """Raise ConfigError for a setting that nanoGPT does not have."""
    m = config.model
    plain = config.qk_norm.name == "none" and config.attention.name == "mha"
    plain = plain and (m.norm, m.mlp, m.position, m.tied) == ("layernorm", "gelu", "learned", True)
    require(plain and type(config.optim) is AdamWOptions, "peer= needs nanoGPT's own settings: MHA without a QK norm")


def machine_of(words: list[str]) -> dict[str, Any]:
    config = load_config(compose(words))
    return machine(config.device, config.threads)


def summary(turns: list[dict[str, Any]], n: int, about: dict[str, Any]) -> dict[str, Any]:
    ms = 1000 * median(turns, "seconds") / n
    return {
        "tok_per_sec": round(about["tokens_per_iter"] / ms * 1000),
        "ms_per_iter": round(ms, 2),
        "peak_memory_mib": round(median(turns, "peak_memory_mib")),
        "mfu": round(about["flops_per_iter"] / ms * 1000 / about["peak_flops"], 4),
    }


def bench_evaluation(values: dict[str, Any], words: list[str]) -> dict[str, Any]:
    """Seconds of an evaluation: every held-out token once, against nanoGPT's 2 eval_iters sampled batches."""
    sides = [start("ours", ours, words, True), start("peer", peers, values["peer"], words, True)]
    n = values["iters"] or 2
    about = sides[0].info
    turns = alternate(sides, values["rounds"], n)
    batches = 2 * values["eval_iters"]
    for turn in turns["peer"]:
        turn["seconds"] *= batches / n
    return {
        "ours": {"seconds": median(turns["ours"], "seconds"), "tokens": about["held_out_tokens"]},
        "peer": {
            "seconds": median(turns["peer"], "seconds"), "tokens": batches * sides[1].info["tokens_per_batch"],
            "batches_run": n,
        },
        "ratio": ratio(turns, "peer", "ours"), "rounds": values["rounds"], "words": words, "dtype": about["dtype"],
        **machine_of(words),
    }  # fmt: skip


def bench_curves(values: dict[str, Any], words: list[str]) -> dict[str, Any]:
    """Training losses of both, averaged over tenths of the updates, with the differences and the spread of seeds."""
    n, seeds = values["curves"], range(1, values["rounds"] + 1)
    curves: dict[str, list[list[float]]] = {"ours": [], "peer": []}  # of each seed: the loss of every update
    for seed in seeds:
        of_seed = [*words, f"seed={seed}"]
        for name in curves:
            side = (
                start(name, ours, of_seed, False, 0)
                if name == "ours"
                else start(name, peers, values["peer"], of_seed, False, True)
            )
            curves[name].append(side.take_turn(n)["losses"])
            side.stop()
        a, b = (curves[name][-1] for name in ("ours", "peer"))
        print(f"seed {seed}: first loss {a[0]:.6f} and {b[0]:.6f}, last {a[-1]:.4f} and {b[-1]:.4f}", flush=True)
    ends = [n * i // 10 for i in range(11)]

    def tenths(curve: list[float]) -> list[float]:
        return [statistics.fmean(curve[first:last]) for first, last in itertools.pairwise(ends)]

    def over_seeds(what: Callable[[list[float]], float], of: list[list[float]]) -> list[float]:
        return [round(what(column), 5) for column in map(list, zip(*of, strict=True))]

    means = {name: [tenths(curve) for curve in of] for name, of in curves.items()}
    pairs = [[a - b for a, b in zip(x, y, strict=True)] for x, y in zip(means["ours"], means["peer"], strict=True)]
    first = max(abs(a[0] - b[0]) for a, b in zip(curves["ours"], curves["peer"], strict=True))
    return {
        "updates": n, "seeds": [*seeds], "tenths_end_at": ends[1:],
        **{name: over_seeds(statistics.fmean, of) for name, of in means.items()},
        "difference": over_seeds(statistics.fmean, pairs), "sd_of_difference": over_seeds(statistics.stdev, pairs),
        "sd_over_seeds": over_seeds(statistics.stdev, means["ours"]), "first_loss_difference": first,
        "words": words, **machine_of(words),
    }  # fmt: skip


def bench_start_up(values: dict[str, Any], words: list[str]) -> dict[str, Any]:
    rounds: list[dict[str, float]] = []
    for _ in range(values["rounds"]):
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            command = [sys.executable, str(ROOT / "train.py"), *words, f"out_dir={run}", "wandb.mode=disabled"]
            began = time.perf_counter()
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            turn = {}
            for key, file in {"loop_begins_s": "train.log", "first_update_s": "metrics.jsonl"}.items():
                while not ((run / file).exists() and (run / file).stat().st_size):
                    require(process.poll() is None, f"python train.py {' '.join(words)} ended by itself")
                    time.sleep(0.01)
                turn[key] = time.perf_counter() - began
            process.terminate()
            process.wait()
        rounds.append(turn)
        print(", ".join(f"{key} {value:.2f}" for key, value in turn.items()), flush=True)
    medians = {key: statistics.median(turn[key] for turn in rounds) for key in rounds[0]}
    return {**medians, "rounds": values["rounds"], "words": words, **machine_of(words)}


def bench(values: dict[str, Any], words: list[str]) -> dict[str, Any]:
    asked = sum(map(bool, (values["peer"], values["variants"], values["start_up"])))
    require(asked == 1, "one of peer=, variants= and start_up=true must be given")
    require(bool(values["variants"]) or not values["together"], "together=true needs variants=")
    if values["start_up"]:
        load_config(compose(words))
        return bench_start_up(values, words)
    named = {part.strip(): [*words, *part.split()] for part in values["variants"].split(";") if part.strip()}
    if values["peer"]:
        check_comparable(load_config(compose(words)))
        peer_model(Path(values["peer"]))
        if values["eval_iters"]:
            return bench_evaluation(values, words)
        if values["curves"]:
            require(values["curves"] >= 10 and values["rounds"] >= 2, "curves= needs 10 updates, and rounds= 2 seeds")
            return bench_curves(values, words)
        named = {"ours": words}
    else:
        for variant in named.values():
            load_config(compose(variant))
    if values["together"]:
        sides = [start("all", together, named)]
    else:
        sides = [start(name, ours, variant) for name, variant in named.items()]
    if values["peer"]:
        sides.append(start("peer", peers, values["peer"], words))
    infos = sides[0].info["of"] if values["together"] else {side.name: side.info for side in sides}
    first, about = next(iter(infos.items()))
    n = values["iters"]
    if n == 0:
        slowest = max(side.take_turn(1)["seconds"] for side in sides)
        n = max(1, round(SECONDS / slowest))
    print(f"{n} iterations a turn, {about['tokens_per_iter']:,} tokens each; parameters: "
          + ", ".join(f"{name} {info['parameters']:,}" for name, info in infos.items()))  # fmt: skip
    began = time.time()
    turns = alternate(sides, values["rounds"], n)
    if values["together"]:
        turns = {name: [{**turn, "seconds": turn["seconds_of"][name]} for turn in turns["all"]] for name in infos}
    rows = {name: summary(turns[name], n, {**about, **info}) for name, info in infos.items()}
    common = {
        "rounds": values["rounds"], "iters": n, "words": words, "seconds": round(time.time() - began),
        "dtype": about["dtype"], "peak_tflops": round(about["peak_flops"] / 1e12, 3),
        **machine_of(next(iter(named.values()))),
    }  # fmt: skip
    if values["peer"]:
        return {**rows, "ratio": ratio(turns, "peer", "ours"), **common}
    over_first = {name: ratio(turns, name, first) for name in infos if name != first}
    return {"variants": rows, "time_over_first": over_first, **common}


if __name__ == "__main__":
    known = {"peer": (str, ""), "variants": (str, ""), "rounds": (int, 5), "iters": (int, 0), "eval_iters": (int, 0)}
    known |= {"start_up": (bool, False), "curves": (int, 0), "together": (bool, False)}
    sys.exit(run_benchmark(__doc__, known, bench))
