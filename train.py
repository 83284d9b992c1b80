"""Train one model: python train.py qk_norm=lp qk_norm.p=3 data.fold=4 (configs/train.yaml has every setting)

A run directory is the resume state: stop a run at any moment, start it again with the same words, and it ends with
the same numbers. `run(config)` is the whole program; it reads top to bottom.
"""

import math
import platform
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from core import checkpoint, dist
from core.cli import run_app
from core.device import device_name, keep_freed_memory, move, peak_flops, resolve_device, resolve_dtype
from core.dist import World
from core.files import read_json
from core.metrics import Metrics, spike_score
from core.rundir import RunDir, commit, open_run, read_status
from core.schema import ConfigError, require, word
from core.tracker import Tracker, plot
from data.batches import Batches
from data.tokens import Corpus, load_corpus, size_of_text
from model.diagnostics import LEAK_TOLERANCE, activation_bytes, diagnose, future_leak
from model.gpt import GPT, positions_with_logits
from training import faults
from training.config import NoClipOptions, TrainConfig, to_yaml
from training.evaluate import Batch, mean_loss
from training.optim import (
    build_optimizer,
    load_optimizer_tensors,
    optimizer_bytes,
    optimizer_tensors,
    over_updates,
    qk_clip,
    qk_clip_line,
    update_ratios,
)
from training.schedule import learning_rate

DEFAULT_THREADS = torch.get_num_threads()
# Tokens that go through the model at a time. On a CPU few, in training as well: activations then stay in cache, and
# the allocator does not give their memory back and take it again, a page fault for every 4 KiB.
CPU_TOKENS = 2**12
EVAL_TOKENS = {"cpu": 2**11, "cuda": 2**14, "mps": 2**14}
EXIT_DIVERGED = 3  # done, stopped and failed are the shell's own: 0, 128 + signal, 1 (2 is a bad setting)


def run(config: TrainConfig) -> int:
    """Train, resume or evaluate the run that `config` describes. Returns the exit status: 0, 3 (the loss became
    non-finite) or 128 + the signal that stopped it. Raises ConfigError before anything is written."""
    # -----------------------------------------------------------------------------
    # Where: ranks, device, number format
    world = dist.read_world()
    torch.set_num_threads(config.threads or DEFAULT_THREADS)
    device = resolve_device(config.device, world.local_rank if world.size > 1 else None)
    dtype = resolve_dtype(config.dtype, device)
    require(
        config.gradient_accumulation_steps % world.size == 0,
        f"gradient_accumulation_steps={config.gradient_accumulation_steps} must be divisible by {world.size} ranks",
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32 where float32 is left
    elif device.type == "cpu":
        keep_freed_memory()

    def autocast() -> AbstractContextManager[None]:
        return torch.autocast(device.type, dtype) if dtype != torch.float32 else nullcontext()

    # -----------------------------------------------------------------------------
    # What: text, tokens, folds, batches, model
    corpus, tokenizer, tokens, folds = read_corpus(config)
    batches = Batches(tokens, folds, config.model.block_size, config.batch_size, config.seed)
    if config.eval_iters:
        batches.sampled_batch("val", 0)  # refuses a held-out block without a window
    n_held_out = sum(end - start for start, end in folds.val)
    targets = tuple((start + 1, end) for start, end in folds.val)
    n_targets = n_held_out - len(targets)
    bytes_per_token, chars_per_token = (size / n_targets for size in size_of_text(tokenizer, tokens, targets))
    if config.dry_run:
        print(to_yaml(config), end="")
        for key, value in describe(config, tokenizer.vocab_size, device, dtype, len(tokens), n_held_out).items():
            print(f"{key + ':':15s}{value}")
        return 0
    model = GPT(config, tokenizer.vocab_size)
    model.init_weights(config.seed)
    model.to(device)
    if config.fault.name != "none":
        faults.spoil_model(config, model)
        faults.spoil_batches(config, batches)
    compiled = device.type == "cuda" if config.compile == "auto" else bool(config.compile)
    if compiled:
        torch._dynamo.config.recompile_limit = 100  # a sweep's worker trains many models; by default it compiles four
        if config.model.activation_checkpointing:
            # QK-Clip's maxima are tracked by the forward pass alone, not again where the backward pass repeats it
            torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    forward: nn.Module = torch.compile(model) if compiled else model  # type: ignore[assignment]
    tracked = model.attentions if config.qk_clip.name != "none" else []
    for attention in tracked:
        attention.track_max_logits()  # now, so that what the checks compile is what trains
    caught = start_up_checks(model, forward, batches, autocast)
    for attention in tracked:
        attention.pop_max_logits()
    peak = peak_flops(device, dtype) * world.size
    dist.init(world, device)
    if world.size > 1:
        if compiled:
            torch.compiler.reset()  # so that DDP has it compiled in parts, whose gradients travel while others are made
        devices = [device] if device.type == "cuda" else None
        forward = DistributedDataParallel(forward, devices, broadcast_buffers=False)  # which are constants
    optimizer = build_optimizer(model, config)
    parameters = [*model.parameters()]

    # -----------------------------------------------------------------------------
    # The run directory: new, resumed, or already finished
    with open_run_on_rank_0(config, world) as run_dir, ExitStack() as loop:
        if run_dir.finished and not config.eval_only:
            check_same(config, run_dir, read_json(run_dir.path / "summary.json"), str(dtype), corpus)
            run_dir.log(f"{run_dir.path} is {run_dir.state}; fresh=true starts it anew")
            return EXIT_DIVERGED if run_dir.state == "diverged" else 0
        resumed = load_checkpoint(run_dir)
        here = {
            "dtype": str(dtype), "corpus_sha256": corpus, "device": device_name(device),
            "compile": compiled, "ranks": world.size, "commit": commit(),
        }  # fmt: skip
        state: dict[str, Any] = {"step": 0, "train/loss": None, "qk_clip": {}, "seconds": 0.0, "train_seconds": 0.0}
        if resumed is not None:
            check_resumable(config, run_dir, resumed.state, {**here, "tokenizer": tokenizer.to_dict()})
            model.load_state_dict(resumed.tensors["model"])
            load_optimizer_tensors(optimizer, model, resumed.tensors["optimizer"])
            state |= {key: resumed.state[key] for key in state.keys() & resumed.state.keys()}
        start: int = state["step"]

        def validate() -> dict[str, float]:
            windows = max(1, EVAL_TOKENS[device.type] // config.model.block_size)
            loss = mean_loss(forward, batches.eval_batches(windows), autocast, world)
            bits = loss / math.log(2)  # a token
            if not chars_per_token:  # the tokens are no text
                return {"val/loss": loss}
            return {"val/loss": loss, "val/bpc": bits / chars_per_token, "val/bpb": bits / bytes_per_token}

        if config.fault.name != "none":
            run_dir.log(f"warning: fault={config.fault.name}: the losses of this run are wrong on purpose")
        if config.eval_only:
            require(resumed is not None, f"eval_only=true needs a checkpoint in {run_dir.path}")
            run_dir.log(report({"iter": start, **validate()}))
            return 0
        run_dir.begin(config)
        info = {
            **here, "parameters": model.num_params(), "vocab_size": tokenizer.vocab_size, "tokens": len(tokens),
            "held_out_tokens": n_held_out, "cache_bytes_per_token": model.cache_bytes_per_token(dtype),
            "torch": torch.__version__, "python": platform.python_version(),
        }  # fmt: skip
        if resumed is not None:  # all that have trained it
            info["commit"] = ", ".join(dict.fromkeys([*commits(resumed.state), *commits(here)])) or None
        if config.fault.name != "none":
            info |= {"fault": config.fault.name, "start_up_warnings": caught}
        tracker = Tracker(run_dir, config, info, start) if world.main else None
        if tracker is not None:
            tables = Metrics(run_dir.path / "diagnostics.jsonl")  # values of each layer and head, at each evaluation
            tables.cut(start)
        looked_at = max(1, 2**13 // config.model.block_size)  # diagnostics form T x T logits, head by head
        fixed_batch = next(batches.eval_batches(4))[0][:looked_at].to(device)  # (<= 4, T)
        run_dir.log(
            f"{run_dir.path}: {model.num_params() / 1e6:.2f}M parameters, {config.tokens_per_iter:,} tokens a step, "
            f"{info['device']}, {dtype}" + (f", resumed at iteration {start}" if start else "")
        )
        val_loss_min, iter_of_min = dist.broadcast_object(lowest_val_loss(run_dir))  # before iteration `start`
        if tracker is not None:
            checkpoint.restore_best(run_dir.path / "ckpt", iter_of_min)
        loop_began = time.perf_counter()
        began = loop_began - state["seconds"]

        def save(best: bool, spare: int | None) -> None:
            state["seconds"] = time.perf_counter() - began
            if tracker is not None:
                tracker.metrics.sync()
                weights: dict[str, Tensor] = dict(model.named_parameters())
                tensors = {"model": weights, "optimizer": optimizer_tensors(optimizer, model)}
                extra = {"config": asdict(config), "tokenizer": tokenizer.to_dict(), **info}
                checkpoint.save(run_dir.path / "ckpt", state["step"], tensors, {**state, **extra}, best, spare)
                run_dir.status("running", iter=state["step"])

        def log(line: dict[str, Any]) -> None:
            if tracker is not None:
                tracker.log(line)

        # -----------------------------------------------------------------------------
        # The loop. Iteration k: evaluate and save what k updates have made, then make update k.
        micro_steps = range(world.rank, config.gradient_accumulation_steps, world.size)
        places = ((s, micro_step) for s in range(start, config.max_iters) for micro_step in micro_steps)
        fed = loop.enter_context(closing(batches.prefetch(places)))
        bar = tqdm(
            total=config.max_iters, initial=start, unit="it", disable=None if world.main else True, dynamic_ncols=True
        )
        loop.enter_context(bar)
        run_dir.print_line = bar.write
        loop.callback(setattr, run_dir, "print_line", print)
        stop = StopSignal()
        loop.callback(stop.restore)
        status, logged_at, logged_seconds = "running", start, state["train_seconds"]
        # What updates leave on the device is read when it is needed: to read it, the host waits for the device.
        numbers: list[tuple[int, Tensor]] = []  # iteration; loss, requests to stop, norm of the gradient: (3,)
        maxima: list[tuple[int, Tensor]] = []  # iteration; largest logits (n_layer, n_head)
        model.train()
        for step in range(start, config.max_iters + 1):
            state["step"] = step
            line: dict[str, Any] = {"iter": step}
            best, spare = False, None
            if step % config.eval_interval == 0 or step == config.max_iters:
                line |= validate()
                best = line["val/loss"] < val_loss_min
                if step % config.eval_interval != 0:  # where max_iters grows, this evaluation will not have been
                    spare = iter_of_min
                if best:
                    val_loss_min, iter_of_min = line["val/loss"], step
                for part in ("train", "val") if config.eval_iters else ():
                    sampled = (batches.sampled_batch(part, i) for i in range(config.eval_iters))
                    line[f"{part}/loss_sampled"] = mean_loss(forward, sampled, autocast, world)
                run_dir.log(report(line))
                if tracker is not None:
                    values = diagnose(model, fixed_batch)
                    tables.write({"iter": step, **values})
                    line |= {key: value for key, value in values.items() if "/layer_" not in key}
                    line["train/spike_score"] = spike_score(logged_losses(run_dir))
            if not math.isfinite(line.get("val/loss", 0.0)):
                status, reason = "diverged", f"val/loss {line['val/loss']}"
                break
            if step == config.max_iters or stop.agreed:
                status = "done" if step == config.max_iters else "stopped"
            if best or status != "running" or (step % config.checkpoint_interval == 0 and step > start):
                if not all(p.isfinite().all() for p in parameters):
                    status, reason = "diverged", "a weight is not finite"
                    break
                save(best, spare)
            if status != "running":
                break

            # Every random number of this update follows from (seed, step, rank): there is no generator to save.
            seed_generator(seed_of_update(config.seed, step, world.rank), device)
            t0 = time.perf_counter()
            lr = learning_rate(step, config)
            for group in optimizer.param_groups:
                group["lr"] = lr
            totals = torch.zeros(2, device=device)  # over all ranks: mean loss, requests to stop
            totals[0] = accumulate_gradients(forward, fed, len(micro_steps), autocast, device) / world.size
            totals[1] = stop.signal
            norm = torch.nn.utils.clip_grad_norm_(parameters, config.grad_clip or math.inf)
            numbers.append((step, torch.stack([*dist.all_reduce(totals), norm])))
            logs = step % config.log_interval == 0 or "val/loss" in line
            last = any((step + 1) % n == 0 for n in (config.eval_interval, config.checkpoint_interval))
            last = last or step + 1 == config.max_iters  # before what needs the numbers
            waits = logs or last or bool(stop.signal) or world.size > 1  # ranks agree to stop after the same update
            if waits:
                for at, three in read(numbers):
                    train_loss, stop.agreed, grad_norm = three.tolist()
                    of_update = {"train/loss": train_loss, "lr": learning_rate(at, config), "grad_norm": grad_norm}
                    if not (math.isfinite(train_loss) and math.isfinite(grad_norm)):
                        status, reason = "diverged", f"train/loss {train_loss}, grad_norm {grad_norm}"
                        break
                    state["train/loss"] = train_loss
                if status == "diverged" and tracked:
                    maxima.append((step, qk_clip(model.attentions, NoClipOptions())))
                    clips = [
                        qk_clip_line(m, config.qk_clip if i < at else NoClipOptions())  # what failed clips nothing
                        for i, m in read(maxima)
                        if i <= at
                    ]
                    state["qk_clip"] = over_updates(state["qk_clip"], *clips)
                if at < step:  # diverged: updates since then do not count
                    step, line = at, {"iter": at}
                line |= of_update
                if status == "diverged":
                    break  # before the update
            before = {name: p.detach().clone() for name, p in model.named_parameters()} if "val/loss" in line else {}
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if tracked:
                maxima.append((step, qk_clip(model.attentions, config.qk_clip)))
                if waits:
                    clips = [qk_clip_line(m, config.qk_clip) for _, m in read(maxima)]
                    state["qk_clip"] = over_updates(state["qk_clip"], *clips)
            if before:
                line |= update_ratios(model, before)

            state["train_seconds"] += time.perf_counter() - t0
            bar.update()
            if logs:
                line["tok_per_sec"] = (
                    (step + 1 - logged_at) * config.tokens_per_iter / (state["train_seconds"] - logged_seconds)
                )
                line["mfu"] = line["tok_per_sec"] * model.flops_per_token() / peak
                logged_at, logged_seconds = step + 1, state["train_seconds"]
                log(line | state["qk_clip"])
                state["qk_clip"] = {}  # of the updates since the last line
                bar.set_postfix_str(f"loss {train_loss:.4f}, {line['tok_per_sec']:,.0f} tok/s", refresh=False)
                left = (config.max_iters - step - 1) * (time.perf_counter() - loop_began) / (step + 1 - start)
                train_part = {key: line[key] for key in ("iter", "train/loss", "lr", "grad_norm", "tok_per_sec", "mfu")}
                run_dir.log(f"{report(train_part)}, {tqdm.format_interval(left)} left", show=bool(bar.disable))

        # -----------------------------------------------------------------------------
        # The end: done, stopped by a signal, or diverged
        loop.close()
        state["seconds"] = time.perf_counter() - began
        if status == "stopped":
            name = signal.Signals(stop.signal or signal.SIGTERM).name  # a signal to another rank reaches all of them
            run_dir.status(status, iter=step, reason=name)
            run_dir.log(
                f"stopped by {name} at iteration {step}, everything is saved: the same command goes on from there"
            )
            if tracker is not None:
                tracker.finish()
            return 128 + signal.Signals[name]
        log(line | state["qk_clip"])
        summary = {
            "status": status, "iter": step, "val/loss": line.get("val/loss"), "val/loss_min": val_loss_min,
            "iter_of_min": iter_of_min, "train/loss": state["train/loss"], "seconds": state["seconds"],
            "tok_per_sec": step * config.tokens_per_iter / max(state["train_seconds"], 1e-9), **info,
        }  # fmt: skip
        if tracker is not None:
            tracker.finish(summary)
            if config.plot:
                plot(run_dir.path / "metrics.jsonl", run_dir.path / "curve.png", run_dir.path.name)
        if status == "diverged":
            run_dir.status(status, iter=step, reason=f"{reason} at iteration {step}")
            kept = [path.name for path in checkpoint.step_dirs(run_dir.path / "ckpt")]
            run_dir.log(f"diverged: {reason} at iteration {step}; checkpoints from before: {', '.join(kept) or 'none'}")
            return EXIT_DIVERGED
        run_dir.status(status, iter=step)
        run_dir.log(
            f"done: val/loss {line['val/loss']:.4f}, lowest {val_loss_min:.4f} at iteration {iter_of_min}; "
            f"python sample.py {shlex.quote(word('run', str(run_dir.path)))}"
        )
        return 0


# -----------------------------------------------------------------------------
# What run() is made of


def read_corpus(config: TrainConfig) -> Corpus:
    saved = None if config.fresh else checkpoint.peek(config.run_dir / "ckpt")
    return load_corpus(config.data, config.model.block_size, saved)


def start_up_checks(
    model: GPT, forward: nn.Module, batches: Batches, autocast: Callable[[], AbstractContextManager[None]]
) -> list[str]:
    """Refuse a model that sees the future and a batch that comes again and again, warn of them in a run with a `fault`;
    warn of targets that are not the next tokens or mostly one token, of a loss that is not the logits' cross-entropy
    with the targets, and of an initial loss, in evaluation or as training would report it, that is not a guess's among
    V tokens. Returns the warnings.

    `forward`, the model as it will be trained, is checked in training mode as well.
    """
    x, y = batches.get_batch(0)  # (B, T)
    device = next(model.parameters()).device
    rows = rows_at_once(len(x), x.size(1), device)
    first = x[:rows] if forward is not model else x[:1]  # a compiled model for the shape that it will train on
    with autocast():
        with torch.no_grad():  # as evaluation is
            leak = future_leak(model.eval(), x[:1].to(device))
        leak = max(leak, future_leak(forward.train(), first.to(device)))
    warnings = []
    if not leak < LEAK_TOLERANCE:
        attention = model.config.attention.name
        warnings.append(f"attention={attention} sees the future: a token moves the logits before it ({leak:.1e})")
    text = batches.some_tokens()
    if repeated := repetition(batches, text):
        warnings.append(f"training repeats one batch: {repeated}")
    require(model.config.fault.name != "none" or not warnings, "; ".join(warnings))
    if not torch.equal(x[:, 1:], y[:, :-1]):
        warnings.append("the targets of the first batch are not its next tokens")
    if crowded := crowding(y, text):
        warnings.append(f"one token crowds the targets: {crowded}")

    x, y = x[:4, :1024].to(device), y[:4, :1024].to(device)
    few = positions_with_logits(1, model.vocab_size)
    with torch.no_grad(), autocast():
        logits, loss = model.eval()(x[:1, :few], y[:1, :few])
        own = F.cross_entropy(logits[0].float(), y[0, :few]).item()
    if not abs(loss.item() - own) <= 0.01:
        warnings.append(
            f"the loss is not the cross-entropy of the logits with the next tokens: {loss:.3f}, not {own:.3f}"
        )
    losses = {"loss": mean_loss(model, [(x, y)], autocast, World())}
    model.train()
    micro_batches = iter([(x[:, :128], y[:, :128])] * 2)
    losses["training loss"] = accumulate_gradients(model, micro_batches, 2, autocast, device).item()
    model.zero_grad(set_to_none=True)
    for name, value in losses.items():
        if not abs(value - model.expected_initial_loss) <= 0.3:
            warnings.append(
                f"the initial {name} is not a guess's: {value:.3f} instead of {model.expected_initial_loss:.3f} "
                f"(a uniform guess among {model.vocab_size} tokens has {math.log(model.vocab_size):.3f})"
            )
            break
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return warnings


def repetition(batches: Batches, tokens: np.ndarray) -> str:
    """What there is to say of the first iterations, or the first one's micro-batches, if they all get the same batch;
    else "". So many are compared that the first tokens of their windows, drawn from `tokens` (n,), would not agree by
    chance; where `tokens` can only agree, none."""
    starts = tokens[: max(1, len(tokens) - batches.block_size)]
    alike = float(np.square(np.unique(starts, return_counts=True)[1] / len(starts)).sum())  # two windows' first tokens
    if alike == 1:
        return ""
    n = math.ceil(math.log(1e-9) / (batches.batch_size * math.log(alike)))
    x, _ = batches.get_batch(0)
    for what, places in (
        ("iterations", ((i, 0) for i in range(1, n + 1))),
        ("micro-batches", ((0, i) for i in range(1, n + 1))),
    ):
        if all(torch.equal(batches.get_batch(*place)[0], x) for place in places):
            return f"{what} 0 to {n} are equal"
    return ""


def crowding(y: Tensor, tokens: np.ndarray) -> str:
    """What there is to say of targets y (B, T) that are one token far more often than `tokens` (n,) are; else ""."""
    values, counts = y.unique(return_counts=True)
    token, share = int(values[counts.argmax()]), counts.max().item() / y.numel()
    expected = float((tokens == token).mean())
    by_chance = 5 * math.sqrt(expected * (1 - expected) / y.numel())
    if share <= expected + by_chance + 0.25:
        return ""
    return f"{share:.0%} are token {token}, of the text {expected:.0%}"


def load_checkpoint(run_dir: RunDir) -> checkpoint.Checkpoint | None:
    """The newest valid checkpoint. Raises ConfigError when there should be one: nothing is begun anew unasked."""
    try:
        resumed = checkpoint.load_latest(run_dir.path / "ckpt", run_dir.log)
    except checkpoint.CorruptCheckpoint as error:
        raise ConfigError(f"out_dir={run_dir.path} cannot go on: {error}; fresh=true starts it anew") from error
    reached = read_status(run_dir.path).get("iter")
    require(
        resumed is not None or not reached,
        f"out_dir={run_dir.path} has reached iteration {reached} but holds no checkpoint; fresh=true starts it anew",
    )
    return resumed


def check_resumable(config: TrainConfig, run_dir: RunDir, saved: dict[str, Any], here: dict[str, Any]) -> None:
    """Refuse what would change the run; warn of what makes the rest of it unequal bit for bit."""
    path = run_dir.path
    require(
        saved["dtype"] == here["dtype"],
        f"dtype={config.dtype} is {here['dtype']} here, but {path} was begun in {saved['dtype']}: "
        f"set dtype={saved['dtype'].removeprefix('torch.')}",
    )
    require(
        saved["corpus_sha256"] == here["corpus_sha256"],
        other_text(config, path, saved["corpus_sha256"], here["corpus_sha256"]),
    )
    require(
        saved["tokenizer"] == here["tokenizer"],
        f"data={config.data.name} has other tokens here than {path} was begun with; fresh=true starts it anew",
    )
    require(
        saved["step"] <= config.max_iters,
        f"max_iters={config.max_iters} must be >= {saved['step']}, the iteration that {path} has reached",
    )
    changed = [
        f"{key} {saved[key]} -> {here[key]}" for key in ("device", "compile", "ranks") if saved[key] != here[key]
    ]
    if changed:
        run_dir.log(f"warning: {', '.join(changed)}: the rest of the run will not be equal bit for bit")
    new = set(commits(here)) - set(commits(saved))
    if new and saved["step"] < config.max_iters and not config.eval_only:
        run_dir.log(f"warning: commit {saved.get('commit')} -> {here['commit']}: other code trains the rest of the run")


def check_same(config: TrainConfig, run_dir: RunDir, summary: dict[str, Any], dtype: str, corpus: str) -> None:
    """Refuse to hand a finished run back for one with another dtype or text."""
    made, path = {"dtype": dtype, "corpus_sha256": corpus, **summary}, run_dir.path
    require(
        config.dtype == "auto" or made["dtype"] == dtype,
        f"dtype={config.dtype}: {path} is {run_dir.state} in {made['dtype']}; use another out_dir or fresh=true",
    )
    require(made["corpus_sha256"] == corpus, other_text(config, path, made["corpus_sha256"], corpus))


def other_text(config: TrainConfig, path: Path, made: str, here: str) -> str:
    return (
        f"data={config.data.name} data.path={getattr(config.data, 'path', None)} is not the text that {path} was begun "
        f"on: its SHA-256 is {here[:12]}..., not {made[:12]}...; use another out_dir or fresh=true"
    )


def commits(about: dict[str, Any]) -> list[str]:
    """The commits of the code that a checkpoint or a process names."""
    return about["commit"].split(", ") if about.get("commit") else []


def lowest_val_loss(run_dir: RunDir) -> tuple[float, int | None]:
    """The lowest val/loss of metrics.jsonl and its iteration; infinity and None where there is none."""
    file = run_dir.path / "metrics.jsonl"
    lines = Metrics.read(file) if file.exists() else []
    evaluated = ((line["val/loss"], line["iter"]) for line in lines if line.get("val/loss") is not None)
    return min(evaluated, default=(math.inf, None))


def logged_losses(run_dir: RunDir) -> list[float]:
    lines = Metrics.read(run_dir.path / "metrics.jsonl")
    return [line["train/loss"] for line in lines if line.get("train/loss") is not None]


class Spectator(RunDir):
    """What the ranks other than 0 have of the run directory: they read it, and say and write nothing."""

    def __init__(self, path: Path, finished: bool):
        super().__init__(path, None, finished)

    def begin(self, config: TrainConfig) -> None:
        pass

    def status(self, state: str, **extra: Any) -> None:
        pass

    def log(self, text: str, show: bool = True) -> None:
        pass


def open_run_on_rank_0(config: TrainConfig, world: World) -> RunDir:
    """Rank 0 opens and locks the run directory and tells the others. Raises ConfigError on every rank."""
    run_dir, error = None, None
    if world.main:
        try:
            run_dir = open_run(config)
        except ConfigError as refusal:
            error = str(refusal)
    finished, error = dist.broadcast_object((run_dir is not None and run_dir.finished, error))
    if error is not None:
        raise ConfigError(error)
    return run_dir or Spectator(config.run_dir, finished)


class StopSignal:
    """SIGINT and SIGTERM ask the loop to save and stop; a second one ends the process at once.

    `signal` is the number received here, 0 before. `agreed` is what all ranks know after the same update.
    """

    def __init__(self) -> None:
        self.signal, self.agreed = 0, 0.0
        self.previous = {}
        if threading.current_thread() is threading.main_thread():
            self.previous = {n: signal.signal(n, self.receive) for n in (signal.SIGINT, signal.SIGTERM)}

    def receive(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self.restore()

    def restore(self) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)


def accumulate_gradients(
    forward: nn.Module,
    fed: Iterator[Batch],
    n_micro_batches: int,
    autocast: Callable[[], AbstractContextManager[None]],
    device: torch.device,
) -> Tensor:
    """Add the gradients of the mean loss over the next micro-batches that are `fed`. Returns that loss, ()."""
    total = torch.zeros((), device=device)
    with autocast():  # around all of them: it casts a weight once
        for i in range(n_micro_batches):
            x, y = next(fed)  # (B, T)
            rows = rows_at_once(len(x), x.size(1), device)
            for first in range(0, len(x), rows):
                if isinstance(forward, DistributedDataParallel):  # one exchange of gradients, after the last backward
                    forward.require_backward_grad_sync = i == n_micro_batches - 1 and first + rows >= len(x)
                part = slice(first, first + rows)
                _, loss = forward(move(x[part], device), move(y[part], device))
                loss = loss / (n_micro_batches * len(x) / len(x[part]))
                with torch.autocast(device.type, enabled=False):
                    loss.backward()
                total += loss.detach()
    return total


def read(left: list[tuple[int, Tensor]]) -> list[tuple[int, Tensor]]:
    """Iterations and the tensors of one shape that they left on a device, fetched together: on the CPU, and no longer
    `left`."""
    steps, values = [step for step, _ in left], torch.stack([value for _, value in left]).cpu()
    left.clear()
    return [*zip(steps, values, strict=True)]


def rows_at_once(batch_size: int, block_size: int, device: torch.device) -> int:
    """Windows of a micro-batch that go through the model together."""
    if device.type != "cpu":
        return batch_size
    parts = -(-batch_size * block_size // CPU_TOKENS)
    return -(-batch_size // parts)


def seed_generator(seed: int, device: torch.device) -> None:
    """torch.manual_seed, which takes half a millisecond where no CUDA is in use, to be ready for it."""
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def seed_of_update(seed: int, step: int, rank: int) -> int:
    return int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0])


def report(line: dict[str, Any]) -> str:
    """One line for a person: iter 250: train/loss 1.9034, …"""
    shown = {"lr": ".2e", "tok_per_sec": ",.0f", "mfu": ".1%"}
    values = ", ".join(f"{key} {value:{shown.get(key, '.4f')}}" for key, value in line.items() if key != "iter")
    return f"iter {line['iter']}: {values}"


def describe(
    config: TrainConfig, vocab_size: int, device: torch.device, dtype: torch.dtype, n_tokens: int, n_held_out: int
) -> dict[str, str]:
    """What a run would be and what it would cost; for dry_run=true."""
    with torch.device("meta"):
        model = GPT(config, vocab_size)
    n, flops = model.num_params(), model.flops_per_token()
    peak = peak_flops(device, dtype)
    rows = rows_at_once(config.batch_size, config.model.block_size, device)
    activations = activation_bytes(model, rows, device, dtype)
    seconds, rate, how, n_bytes = cost(config, vocab_size, device, dtype, n_held_out)
    return {
        "run directory": f"{config.run_dir}",
        "corpus": f"{n_tokens:,} tokens, {n_held_out:,} of them held out, vocabulary {vocab_size}",
        "parameters": f"{n:,}",
        "FLOPs": f"{flops:,} a token, {flops * config.tokens_per_iter:.3g} an iteration",
        "iteration": f"{config.tokens_per_iter:,} tokens",
        "memory": f"{(n_bytes + 4 * n) / 2**20:,.0f} MiB for weights, gradients and optimizer, "
        f"{activations / 2**20:,.0f} MiB for activations of {rows} sequences",
        "KV cache": f"{model.cache_bytes_per_token(dtype):,} bytes a token in {dtype}",
        "checkpoint": f"{n_bytes / 2**20:,.0f} MiB",
        "device": f"{device_name(device)}, {dtype}, peak {peak / 1e12:.2f} TFLOP/s",
        "estimate": f"{tqdm.format_interval(seconds)} for {config.max_iters:,} iterations and "
        f"{n_evaluations(config)} evaluations at {rate:,.0f} tokens/s ({how})",
    }


def cost(
    config: TrainConfig, vocab_size: int, device: torch.device, dtype: torch.dtype, n_held_out: int
) -> tuple[float, float, str, int]:
    """Seconds of a run, tokens a second of its training steps and how they are known, bytes of a checkpoint."""
    with torch.device("meta"):
        model = GPT(config, vocab_size)
    rate, how = training_rate(config, vocab_size, device, dtype, peak_flops(device, dtype))
    # an evaluation is a forward pass, a third of the work
    seconds = (config.max_iters * config.tokens_per_iter + n_evaluations(config) * n_held_out / 3) / rate
    return seconds, rate, how, 4 * model.num_params() + optimizer_bytes(model, config)


def n_evaluations(config: TrainConfig) -> int:
    return -(-config.max_iters // config.eval_interval) + 1


def check(config: TrainConfig) -> None:
    """Raise ConfigError where the run cannot start: no such device, no corpus, too little text."""
    resolve_dtype(config.dtype, resolve_device(config.device))
    _, _, tokens, folds = read_corpus(config)
    Batches(tokens, folds, config.model.block_size, config.batch_size, config.seed)


def estimate(config: TrainConfig) -> tuple[float, int]:
    """Seconds and bytes on disk that a run would take."""
    torch.set_num_threads(config.threads or DEFAULT_THREADS)
    device = resolve_device(config.device)
    _, tokenizer, _, folds = read_corpus(config)
    n_held_out = sum(end - start for start, end in folds.val)
    dtype = resolve_dtype(config.dtype, device)
    seconds, _, _, n_bytes = cost(config, tokenizer.vocab_size, device, dtype, n_held_out)
    return seconds, (checkpoint.KEEP + 1) * n_bytes


def training_rate(
    config: TrainConfig, vocab_size: int, device: torch.device, dtype: torch.dtype, peak: float
) -> tuple[float, str]:
    """Tokens a second of a training step, and how it is known: timed on a few sequences where that takes seconds."""
    T = config.model.block_size
    with torch.device("meta"):
        flops = GPT(config, vocab_size).flops_per_token() * T  # a sequence
    rows = min(rows_at_once(config.batch_size, T, device), int(peak / flops))
    if rows < 1 or device.type != "cpu":
        return 0.4 * peak / flops * T, "40 % of the peak"
    model = GPT(config, vocab_size)
    model.init_weights(config.seed)
    idx = torch.randint(vocab_size, (rows, T))
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = model(idx, idx)[1]
        loss.backward()
        seconds.append(time.perf_counter() - start)
    return rows * T / min(seconds), f"timed on {rows} sequences"


def main() -> None:
    run_app("train", TrainConfig, run)


if __name__ == "__main__":
    main()
