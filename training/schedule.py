"""Learning-rate schedules: pure functions of the step. No torch."""

import math

from training.config import TrainConfig


def cosine(step: int, config: TrainConfig) -> float:
    """Linear warm-up, then half a cosine down to min_lr at lr_decay_iters, then min_lr (nanoGPT's get_lr)."""
    warmup, end = config.schedule.warmup_iters, config.lr_decay_iters
    floor = config.schedule.min_lr / config.optim.learning_rate
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if step >= end:
        return floor
    progress = (step - warmup) / (end - warmup)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


SCHEDULES = {"cosine": cosine}


def learning_rate(step: int, config: TrainConfig) -> float:
    """The learning rate of update `step`, 0 for the first."""
    return config.optim.learning_rate * SCHEDULES[config.schedule.name](step, config)
