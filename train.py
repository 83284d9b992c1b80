"""Train one model: python train.py qk_norm=lp qk_norm.p=3 data.fold=4

Stop a run at any moment, and start it again with the same command: on the same kind of machine and PyTorch it ends with
the same numbers. On CUDA this needs deterministic=true.
"""
# run() sets up, train() is the loop, finish() ends a run.

import math
import shlex
import signal
from contextlib import closing
from dataclasses import asdict
from typing import Any

import torch
from tqdm import tqdm

from core import checkpoint, dist
from core.cli import run_app
from core.device import seed_generator
from core.metrics import spike_score
from core.process import EXIT_DIVERGED, StopSignal
from core.rundir import RunDir
from core.schema import require
from core.wandb_run import wandb_mode
from model.diagnostics import diagnose
from training.checks import first_not_finite, future_seen_when_trained, start_up_checks
from training.config import TrainConfig, to_yaml
from training.estimate import dry_run
from training.evaluate import (
    LowestLoss,
    diagnosed_batch,
    find_lowest,
    sample_within_budget,
    sampled_losses,
    validation_loss,
)
from training.init_from import load_initial_weights, with_init_sha256
from training.meter import Diverged, Meter
from training.qk_clip import qk_clip
from training.resume import check_finished, find_damage, open_run_dir, resume
from training.schedule import learning_rate
from training.session import Session, describe, setup
from training.tracking import shows_media, wandb_settings
from training.updates import (
    accumulate_gradients,
    order_buckets,
    seed_of_update,
    set_learning_rate,
    step_optimizer,
    update_ratios,
)


def run(config: TrainConfig) -> int:
    """Train, resume or evaluate the run that `config` describes.

    Returns the exit status: 0, 1 (a finished run whose files are damaged), 3 (diverged: a loss, gradient or weight is
    not finite) or 128 + the signal that stopped it. Raises: ConfigError before anything of the run changes.
    """
    wandb_mode(config.wandb.mode)  # refuses an unknown $WANDB_MODE
    config = with_init_sha256(config)
    if config.dry_run:
        return dry_run(config)
    session = setup(config)
    session.join_ranks()
    warnings = start_up_checks(session)  # before init_from: they expect the loss of random weights
    warnings += load_initial_weights(config, session.model, session.data.corpus)
    with open_run_dir(session) as run_dir:  # ranks other than 0 only read it
        if run_dir.finished and not config.eval_only:
            return already_finished(session, run_dir)
        session.facts |= describe(session)
        saved = resume(session, run_dir)
        start = saved.get("step", 0)
        for warning in warnings:
            run_dir.log(f"warning: {warning}")
        if config.fault.name != "none":
            run_dir.log(f"warning: fault={config.fault.name}: the losses of this run are wrong on purpose")
            # recorded with the run: whoever reads its losses later must see that they are wrong
            session.facts |= {"fault": config.fault.name, "start_up_warnings": warnings}
        if config.eval_only:
            require(bool(saved), f"eval_only=true needs a checkpoint in {run_dir.path}")
            run_dir.log(in_words({"iter": start, **validation_loss(session), **sampled_losses(session)}))
            return 0
        wandb = wandb_settings(config, run_dir.path, session.facts)
        run_dir.begin(to_yaml(config), start, wandb, saved.get("records"))
        run_dir.log(f"{run_dir.path}: {headline(session)}" + (f", resumed at iteration {start}" if saved else ""))
        meter, lowest = Meter(session, saved), find_lowest(run_dir, saved)
        run_dir.restore_best(lowest.step)
        with StopSignal(hangup=True) as stop:  # after the last update a signal only sets the exit status
            try:
                line = train(session, run_dir, meter, lowest, saved, stop)
            except Diverged as end:
                found = dict.fromkeys(dist.gather(first_not_finite(session, end.step)))
                run_dir.log(f"first value that is not finite: {'; '.join(found)}")
                status = finish(session, run_dir, meter, lowest, end.line, f"{end.reason} at iteration {end.step}")
            else:
                if line["iter"] < config.max_iters:
                    number = stop.signal or signal.SIGTERM  # 0: another rank got it
                    status = record_stop(run_dir, config, line["iter"], number)
                else:
                    status = finish(session, run_dir, meter, lowest, line)
            dist.gather(None)  # wait for rank 0, which saves: torchrun ends the others soon after the first has gone
        return 128 + stop.signal if stop.signal else status


def already_finished(session: Session, run_dir: RunDir) -> int:
    """Say how the run ended. Returns the exit status; 1 where its files are damaged."""
    damage = find_damage(run_dir.path)
    if not damage:  # of a damaged summary.json neither dtype nor text can be trusted
        check_finished(session, run_dir)
    but = f", but {damage}" if damage else ""
    run_dir.log(f"{run_dir.path} is {run_dir.state}{but}; fresh=true starts it anew")
    return 1 if damage else EXIT_DIVERGED if run_dir.state == "diverged" else 0


def headline(session: Session) -> str:
    """Size and machine, in one line for a person."""
    facts = [
        f"{session.model.num_params() / 1e6:.2f}M parameters",
        f"{session.config.tokens_per_iter:,} tokens an iteration",
        session.facts["device"],
        str(session.machine.dtype),
    ]
    if "sdpa" in session.facts:
        facts.append(f"{session.facts['sdpa']} attention")
    return ", ".join(filter(None, [*facts, session.machine.about_threads]))


def train(
    session: Session, run_dir: RunDir, meter: Meter, lowest: LowestLoss, saved: dict[str, Any], stop: StopSignal
) -> dict[str, Any]:
    """Make the updates from the `saved` state to max_iters, or until `stop` has a signal. Returns the last iteration's
    metrics. Raises: Diverged."""
    start, eval_was_due = saved.get("step", 0), saved.get("evaluated", False)
    config, machine, model, optimizer = session.config, session.machine, session.model, session.optimizer
    skip = torch.zeros((), device=machine.device)  # 1 once an update was not finite: the weights then stay
    agreement, stopping = dist.Agreement(), False
    batch_ids = ((step, micro_step) for step in range(start, config.max_iters) for micro_step in session.micro_steps)
    with (
        closing(session.data.batches.prefetch(batch_ids)) as train_batches,
        run_dir.progress_bar(config.max_iters, start) as bar,
    ):
        model.train()
        order_buckets(session)
        for step in range(start, config.max_iters + 1):  # + 1: the last pass only evaluates and saves
            # Evaluate and save the model after `step` updates. Both raise Diverged, as does meter.read().
            line: dict[str, Any] = {"iter": step}  # what metrics.jsonl gets of this iteration
            is_last = stopping or step == config.max_iters
            # eval_interval may have changed since the run was stopped
            eval_due = step % config.eval_interval == 0 or (step == start and eval_was_due)
            evaluating = (eval_due and not stopping) or step == config.max_iters
            if evaluating:
                evaluate(session, run_dir, line)
                lowest.update(step, line["val/loss"], extra=not eval_due)  # extra: only because the run ends here
            if lowest.step == step or is_last or (step % config.checkpoint_interval == 0 and step > start):
                save(session, run_dir, meter, lowest, line, eval_due)
            if is_last:
                break

            # One update. Its random numbers follow from (seed, step, rank): there is no generator to save.
            old_weights = {name: p.detach().clone() for name, p in model.named_parameters()} if evaluating else {}
            meter.start()  # cloning is not timed
            seed_generator(seed_of_update(config.seed, step, machine.world.rank), machine.device)
            line["lr"] = learning_rate(step, config)
            set_learning_rate(optimizer, line["lr"])
            loss = accumulate_gradients(session.forward, train_batches, len(session.micro_steps), machine)
            norm, skip = step_optimizer(session, loss, skip)  # clips, steps, drops the gradients
            maxima = qk_clip(model.attentions, config.qk_clip, skip)  # before the clip, (n_layer, n_head)
            meter.add(line, loss, norm, maxima)  # meter.read() adds loss and norm to `line`
            bar.update()

            # Read the losses and norms since the last read (a wait): at log lines, before an evaluation or a save.
            stopping = agreement.any_rank(stop.signal > 0)  # all ranks stop after the same update
            log_due = step % config.log_interval == 0 or evaluating
            if log_due or stopping or evaluates_or_saves(step + 1, config):
                meter.read()
            if evaluating:
                line |= update_ratios(model, old_weights)
            if log_due:
                line |= meter.take_interval()
                run_dir.record(line)
                show_progress(run_dir, bar, line, meter.seconds_left(line) if step > start else None)
    return line


def evaluates_or_saves(step: int, config: TrainConfig) -> bool:
    """Whether the model is evaluated or saved after `step` updates: the losses before it must have been read."""
    return 0 in (step % config.eval_interval, step % config.checkpoint_interval) or step == config.max_iters


def evaluate(session: Session, run_dir: RunDir, line: dict[str, Any]) -> None:
    """Add the validation losses, the diagnostics and the spike score to `line`. Raises: Diverged.

    Per-layer values go to diagnostics.jsonl alone, a sample of text to samples.jsonl.
    """
    line |= validation_loss(session) | sampled_losses(session)
    run_dir.log(in_words(line))
    values = diagnose(session.model, diagnosed_batch(session))
    run_dir.record_diagnostics({"iter": line["iter"], **values})
    line |= {key: value for key, value in values.items() if "/layer_" not in key}
    line["train/spike_score"] = spike_score([*run_dir.recorded("train/loss").values()])
    if not math.isfinite(line["val/loss"]):
        raise Diverged(line, f"val/loss {line['val/loss']}")
    if shows_media(session.config) and (text := sample_within_budget(session, line["iter"])):
        run_dir.record_sample({"iter": line["iter"], "text": text})


def save(
    session: Session, run_dir: RunDir, meter: Meter, lowest: LowestLoss, line: dict[str, Any], eval_due: bool
) -> None:
    """Write a checkpoint. eval_due: whether an evaluation is due here; a run that stops skips it, and makes it
    when it is resumed. Raises: Diverged instead where a weight is not finite."""
    if not all(p.isfinite().all() for p in session.model.parameters()):
        raise Diverged(line, "a weight is not finite")
    settings = {"config": asdict(session.config), "tokenizer": session.data.corpus.tokenizer.to_dict()}
    state = {"step": line["iter"], "evaluated": eval_due, **meter.state(), **settings, **session.facts}
    # before this step: a resumed run evaluates it again
    best, loss_and_step = lowest.step == line["iter"], lowest.before_step(line["iter"])
    state |= {} if loss_and_step[1] is None else {"lowest": loss_and_step}
    run_dir.save(line["iter"], session.tensors(), state, best, lowest.keep_step)


def record_stop(run_dir: RunDir, config: TrainConfig, step: int, number: int) -> int:
    """Record that signal `number` stopped the run. Returns the exit status."""
    name, same = signal.Signals(number).name, "the same command" + " without fresh=true" * config.fresh
    run_dir.status("stopped", iter=step, reason=name)
    run_dir.log(f"stopped by {name} at iteration {step}, everything is saved: {same} goes on from there")
    run_dir.finish()
    return 128 + number


def finish(
    session: Session, run_dir: RunDir, meter: Meter, lowest: LowestLoss, line: dict[str, Any], failure: str = ""
) -> int:
    """Record the last `line` and the summary of a run that is done, or that diverged: `failure`."""
    status, step, seconds = "diverged" if failure else "done", line["iter"], meter.seconds
    if leak := [] if failure or session.config.fault.name != "none" else future_seen_when_trained(session):
        run_dir.log(f"warning: when trained, {leak[0]}: the losses of this run are wrong")
        session.facts |= {"sees_future": leak[0]}
    tok_per_sec = step * session.config.tokens_per_iter / max(meter.train_seconds, 1e-9)
    run_dir.record(line | meter.clip_metrics)  # QK-Clip's since the last line
    run_dir.finish({
        "status": status, "iter": step, "val/loss": line.get("val/loss"), "val/loss_min": lowest.loss,
        "iter_of_min": lowest.step, "train/loss": meter.train_loss, "seconds": seconds,
        "tok_per_sec": tok_per_sec, "reason": failure or None, **session.facts,
    })  # fmt: skip
    if session.config.plot:
        run_dir.plot()
    if failure:
        run_dir.status(status, iter=step, reason=failure)
        kept = [path.name for path in checkpoint.step_dirs(run_dir.path / "ckpt")]
        run_dir.log(f"diverged: {failure}; checkpoints from before: {', '.join(kept) or 'none'}")
        return EXIT_DIVERGED
    run_dir.status(status, iter=step)
    rows = {
        "done": f"val/loss {line['val/loss']:.4f} at iteration {step}",
        "best": f"val/loss {lowest.loss:.4f} at iteration {lowest.step}",
        "time": f"{tqdm.format_interval(seconds)}, {tok_per_sec:,.0f} tokens/s",
        "kept": f"{run_dir.path}: metrics.jsonl, ckpt/best, ckpt/latest" + ", curve.png" * session.config.plot,
        "next": f"python sample.py {shlex.quote(f'run={run_dir.path}')}",
    }
    for name, text in rows.items():
        run_dir.log(f"{name}: {text}")
    return 0


def show_progress(run_dir: RunDir, bar: tqdm, line: dict[str, Any], seconds_left: float | None) -> None:
    """seconds_left: None where it is not known yet, as the first update of a process is slow."""
    bar.set_postfix_str(f"loss {line['train/loss']:.4f}, {line['tok_per_sec']:,.0f} tok/s", refresh=False)
    shown = {key: line[key] for key in ("iter", "train/loss", "lr", "grad_norm", "tok_per_sec", "mfu")}
    left = "" if seconds_left is None else f", {tqdm.format_interval(seconds_left)} left"
    run_dir.log(f"{in_words(shown)}{left}", show=bool(bar.disable))  # the bar shows it already


def in_words(line: dict[str, Any]) -> str:
    """One line for a person: iter 250: train/loss 1.9034, …"""
    formats = {"lr": ".2e", "tok_per_sec": ",.0f", "mfu": ".1%"}
    values = ", ".join(f"{key} {value:{formats.get(key, '.4f')}}" for key, value in line.items() if key != "iter")
    return f"iter {line['iter']}: {values}"


def main() -> None:
    run_app(TrainConfig, run, __doc__)


if __name__ == "__main__":
    main()
