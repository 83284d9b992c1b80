"""The learning rate of an update, and how often a run is evaluated. No torch."""

import math

from training.config import DecayOptions, TrainConfig


def learning_rate(step: int, config: TrainConfig) -> float:
    """The learning rate of update `step`, counted from 0: a linear warm-up that starts above 0, then the schedule."""
    highest, schedule = config.optim.learning_rate, config.schedule
    if step < config.warmup_iters:
        return highest * ((step + 1) / (config.warmup_iters + 1))
    floor = schedule.min_lr / highest if isinstance(schedule, DecayOptions) else 0.0
    return highest * (floor + (1 - floor) * schedule.height(step, config.lr_decay_iters))


def evaluates_or_saves(step: int, config: TrainConfig) -> bool:
    """Whether the model is evaluated or saved after `step` updates: the losses before it must have been read."""
    return 0 in (step % config.eval_interval, step % config.checkpoint_interval) or step == config.max_iters


def n_evaluations(config: TrainConfig) -> int:
    """One before the first update, then every eval_interval, and one at the end."""
    return math.ceil(config.max_iters / config.eval_interval) + 1
