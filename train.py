"""Train one model: python train.py qk_norm=lp qk_norm.p=3 data.fold=4

Stop a run at any moment, and start it again with the same command: on the same kind of machine and PyTorch it ends with
the same numbers. On CUDA this needs deterministic=true.
"""
# Its state: training/state.py. A metric: training/metrics.py. An optimizer: training/optim.py. A norm: model/variants/

import math
import signal
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch

from core import checkpoint, dist
from core.cli import run_app
from core.device import seed_generator
from core.process import EXIT_DIVERGED, StopSignal
from core.schema import ConfigError, one_line
from core.wandb_run import wandb_options
from model.diagnostics import diagnose
from training.checks import first_not_finite, future_seen, start_up_checks
from training.config import TrainConfig
from training.estimate import dry_run
from training.evaluate import diagnosed_batch, sample_within_budget, sampled_losses, spike_score, validation_loss
from training.init_from import load_initial_weights, with_init_sha256
from training.meter import Diverged
from training.progress import closing_rows, line_in_words, show_progress
from training.qk_clip import qk_clip
from training.resume import look, open_run_dir, resume, say_how_it_ended
from training.run import Run, begin
from training.schedule import evaluates_or_saves, learning_rate
from training.session import drop_compilations, set_up_machine, setup
from training.tracking import draw_curve, shows_media
from training.updates import (
    accumulate_gradients,
    copied_weights,
    order_buckets,
    seed_of_update,
    set_learning_rate,
    step_optimizer,
    update_ratios,
)


def run(config: TrainConfig) -> int:
    """Train, resume or evaluate the run that `config` describes.

    Returns the exit status: 0, 1 (a finished run whose files are damaged), 3 (diverged: a loss, gradient or weight is
    not finite) or 128 + the signal that came. Raises: ConfigError (status 2) before anything of the run changes.
    """
    wandb_options(config.wandb)  # refuses what W&B would refuse of its environment variables
    config = with_init_sha256(config)
    if config.dry_run:
        return dry_run(config)
    machine = set_up_machine(config)
    dist.init(machine.world, machine.device)
    at_end = look(config, machine.world)  # before a model is built. Refuses a run in use, or of other settings
    if at_end and not config.eval_only:
        with open_run_dir(config, machine.world) as run_dir:
            if run_dir.finished:
                return say_how_it_ended(config, machine, run_dir)
    session = setup(config, machine)
    session.join_ranks()
    warnings = start_up_checks(session)  # before init_from: they expect the loss of random weights
    warnings += load_initial_weights(config, session.model, session.data.corpus)  # unless the run has a checkpoint
    with open_run_dir(config, machine.world) as run_dir:  # looks again: another process may have had it
        if run_dir.finished and not config.eval_only:
            return say_how_it_ended(config, machine, run_dir)
        saved = resume(session, run_dir)
        for warning in warnings:
            run_dir.log(f"warning: {warning}")
        if config.fault.name != "none":
            run_dir.log(f"warning: fault={config.fault.name}: the losses of this run are wrong on purpose")
        if config.eval_only:
            if saved is None:
                raise ConfigError(f"eval_only=true needs a checkpoint in {run_dir.path}")
            run_dir.log(line_in_words({"iter": saved.step, **validation_loss(session), **sampled_losses(session)}))
            return 0
        return train_to_the_end(begin(session, run_dir, saved, warnings))


def train_to_the_end(run: Run) -> int:
    """Train, and record how it ended. Returns the exit status. A first signal stops the run at a checkpoint (after the
    last update it only sets the status), a second one ends the process at once."""
    with StopSignal(hangup=True) as received:
        try:
            line = train(run, dist.AgreedStop(received))
        except Diverged as end:
            found = dict.fromkeys(dist.gather(first_not_finite(run.session, end.step)))  # the ranks' different answers
            run.dir.log(f"first value that is not finite: {'; '.join(found)}")
            status = finish(run, end.line, f"{end.reason} at iteration {end.step}")
        except Exception as error:
            if not received.explains(error):  # the signal also ends compilers and other ranks, which is an error here
                run.session.data.batches.require_unchanged()  # a file of tokens that was changed explains it, too
                raise
            drop_compilations()  # else the exit waits for them. No barrier: another rank may be gone
            return record_stop(run, received.signal, f"amid {one_line(error, 100)}; what was saved last stays")
        else:
            if line["iter"] < run.session.config.max_iters:  # stopped: the line has "iter" alone
                number = received.signal or signal.SIGTERM  # 0 where another rank got one
                status = record_stop(run, number, f"at iteration {line['iter']}, everything is saved")
            else:
                status = finish(run, line)
        dist.barrier()  # rank 0 saves: torchrun ends the others soon after the first has gone
    return 128 + received.signal if received.signal else status  # a signal counts, however the run ended


def train(run: Run, stop: dist.AgreedStop) -> dict[str, Any]:
    """Make the updates up to max_iters, or until the ranks agree to stop. Returns the metrics of the last iteration: of
    a stop "iter" alone. Raises: Diverged."""
    session, meter, lowest = run.session, run.meter, run.lowest
    config, machine, model = session.config, session.machine, session.model
    frozen = torch.zeros((), device=machine.device)  # 1 from the first update on that is not finite: no weight moves
    steps = range(run.start, config.max_iters + 1)  # + 1: the last pass only evaluates and saves
    batch_ids = ((step, micro_step) for step in steps[:-1] for micro_step in session.micro_steps)
    with (
        closing(session.data.batches.prefetch(batch_ids)) as train_batches,
        run.dir.progress_bar(config.max_iters, run.start) as bar,
    ):
        model.train()
        order_buckets(session)  # of DDP, so that a resumed run rounds as before
        for step in steps:
            # Evaluate and save the model after `step` updates. Both raise Diverged, as does meter.read().
            line: dict[str, Any] = {"iter": step}  # what metrics.jsonl gets of this iteration
            # the checkpoint knows whether one was due at its step: eval_interval may have changed since
            due = step % config.eval_interval == 0 or (step == run.start and run.evaluation_due)
            # a stop saves at once, but at the end: what is due is evaluated after a resume
            if step == config.max_iters or (due and not stop.agreed):
                line |= evaluate(run, step, None if step == config.max_iters else stop)
            ends = step == config.max_iters or stop.agreed
            if "val/loss" in line:
                lowest.update(step, line["val/loss"], extra=not due)  # extra: a longer run would not make it
            if lowest.step == step or ends or (step % config.checkpoint_interval == 0 and step > run.start):
                run.save(line, due)
            if ends:
                break

            # One update. Its random numbers follow from (seed, step, rank): there is no generator to save.
            old_weights = copied_weights(model) if "val/loss" in line else {}
            meter.start()  # copying is not timed
            seed_generator(seed_of_update(config.seed, step, machine.world.rank), machine.device)
            line["lr"] = learning_rate(step, config)
            set_learning_rate(session.optimizer, line["lr"])
            loss = accumulate_gradients(session.forward, train_batches, len(session.micro_steps), machine)
            norm, frozen = step_optimizer(session, loss, frozen)  # clips, steps, drops the gradients
            maxima = qk_clip(model.attentions, config.qk_clip, frozen)  # (n_layer, n_head) largest logits; or None
            meter.add(step, loss, norm, maxima)
            bar.update()
            stop.agree()  # all ranks stop after the same update, two later than the signal where there are several

            # Read the losses and norms since the last read (a wait): at log lines, and where the next pass evaluates or
            # saves, so that nothing is saved after an update that was not finite.
            logs = "val/loss" in line or step % config.log_interval == 0
            if logs or stop.agreed or evaluates_or_saves(step + 1, config):
                line |= meter.read(line)  # Diverged shows the line
            if logs:
                line |= update_ratios(model, old_weights) | meter.take_interval()
                run.dir.record.write(line)
                show_progress(run.dir, bar, line, meter.seconds_left(line) if step > run.start else None)
    return line


def evaluate(run: Run, step: int, stop: dist.AgreedStop | None) -> dict[str, Any]:
    """The validation losses, the diagnostics and the spike score after `step` updates; {} where `stop` came amid them.
    Values of a layer go to diagnostics.jsonl alone, a sample of text to samples.jsonl. Raises: Diverged."""
    session = run.session
    losses: dict[str, Any] = validation_loss(session, stop) | sampled_losses(session, stop)
    if stop and stop.agreed:
        return {}
    run.dir.log(line_in_words({"iter": step, **losses}))
    values = diagnose(session.model, diagnosed_batch(session))
    run.dir.record.write_diagnostics({"iter": step, **values})
    shown = {key: value for key, value in values.items() if "/layer_" not in key}
    spikes = {"train/spike_score": spike_score([*run.dir.record.curve("train/loss").values()])}
    line: dict[str, Any] = losses | shown | spikes
    if not math.isfinite(line["val/loss"]):
        raise Diverged({"iter": step, **line}, f"val/loss {line['val/loss']}")
    if shows_media(session.config):
        text = sample_within_budget(session, step)
        if text:
            run.dir.write_sample({"iter": step, "text": text})
    return line


def record_stop(run: Run, number: int, how: str) -> int:
    """Record that signal `number` stopped the run. Returns the exit status."""
    name, fresh = signal.Signals(number).name, run.session.config.fresh
    same = "the same command without fresh=true" if fresh else "the same command"
    run.dir.status("stopped", reason=name)
    run.dir.log(f"stopped by {name} {how}: {same} goes on from there")
    run.dir.finish()
    return 128 + number


def finish(run: Run, line: dict[str, Any], failure: str = "") -> int:
    """Record the last `line` and the summary of a run that is done, or that diverged: `failure`."""
    config, meter, facts, step = run.session.config, run.meter, run.facts, line["iter"]
    status, seconds = "diverged" if failure else "done", meter.seconds
    leaks = [] if failure or config.fault.name != "none" else future_seen(run.session)
    if leaks:
        run.dir.log(f"warning: when trained, {leaks[0]}: the losses of this run are wrong")
        facts = replace(facts, sees_future=leaks[0])
    run.dir.record.write(line | meter.clip_metrics)  # QK-Clip's since the last line
    summary = {
        "status": status, "iter": step, "val/loss": line.get("val/loss"), "val/loss_min": run.lowest.loss,
        "iter_of_min": run.lowest.step, "train/loss": meter.train_loss, "seconds": seconds, "run_id": config.run_id,
        "tok_per_sec": step * config.tokens_per_iter / max(meter.train_seconds, 1e-9), "reason": failure or None,
        **facts.to_json(),
    }  # fmt: skip
    run.dir.finish(summary)
    drawn = bool(config.plot) and run.session.machine.world.rank == 0 and draw_curve(run.dir.path)
    if failure:
        run.dir.status(status, iter=step, reason=failure)
        kept = [path.name for path in checkpoint.step_dirs(run.dir.path / "ckpt")]
        run.dir.log(f"diverged: {failure}; checkpoints from before: {', '.join(kept) or 'none'}")
        return EXIT_DIVERGED
    run.dir.status(status, iter=step)
    for row in closing_rows(run.dir, summary, drawn):
        run.dir.log(row)
    return 0


def main() -> None:
    run_app(TrainConfig, run, __doc__)


if __name__ == "__main__":
    main()
