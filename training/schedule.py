"""The learning rate of an update, and how often a run is evaluated. No torch."""

import math

from training.config import DecayOptions, TrainConfig

HEIGHTS = {  # after a share x of the decay: 1 is learning_rate, 0 is min_lr
    "cosine": lambda x: 0.5 * (1 + math.cos(math.pi * x)),  # nanoGPT's
    "linear": lambda x: 1 - x,
    "wsd": lambda x: 1 - math.sqrt(x),  # Haegele et al. 2024
}


def learning_rate(step: int, config: TrainConfig) -> float:
    """The learning rate of update `step`, counted from 0: a linear warm-up that starts above 0, then the schedule."""
    highest, schedule, end = config.optim.learning_rate, config.schedule, config.lr_decay_iters
    if step < config.warmup_iters:
        return highest * ((step + 1) / (config.warmup_iters + 1))
    if not isinstance(schedule, DecayOptions) or end is None:
        return highest
    start, floor = schedule.decay_start(end), schedule.min_lr / highest
    progress = 0.0 if step <= start else 1.0 if step >= end else (step - start) / (end - start)
    return highest * (floor + (1 - floor) * HEIGHTS[schedule.name](progress))


def evaluates_or_saves(step: int, config: TrainConfig) -> bool:
    """Whether the model is evaluated or saved after `step` updates: the losses before it must have been read."""
    return 0 in (step % config.eval_interval, step % config.checkpoint_interval) or step == config.max_iters


def n_evaluations(config: TrainConfig) -> int:
    """One before the first update, then every eval_interval, and one at the end."""
    return math.ceil(config.max_iters / config.eval_interval) + 1
