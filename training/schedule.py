"""Learning-rate schedules: pure functions of the step. No torch."""

import math

from training.config import DecayOptions, TrainConfig


def constant(step: int, config: TrainConfig) -> float:
    """Linear warm-up that is never 0, then 1."""
    warmup = config.warmup_iters
    return (step + 1) / (warmup + 1) if step < warmup else 1.0


def cosine(step: int, config: TrainConfig) -> float:
    """Linear warm-up, then half a cosine down to min_lr at lr_decay_iters, then min_lr (nanoGPT's get_lr)."""
    return between(0.5 * (1 + math.cos(math.pi * decayed(step, config))), step, config)


def linear(step: int, config: TrainConfig) -> float:
    """Linear warm-up, then a straight line down to min_lr at lr_decay_iters, then min_lr."""
    return between(1 - decayed(step, config), step, config)


def wsd(step: int, config: TrainConfig) -> float:
    """Warm-up, stable, decay: 1 - sqrt over the last decay_frac of lr_decay_iters (Haegele et al. 2024)."""
    return between(1 - math.sqrt(decayed(step, config)), step, config)


def decayed(step: int, config: TrainConfig) -> float:
    """How much of the decay is over: 0 until it starts, 1 from lr_decay_iters on."""
    end = config.lr_decay_iters
    assert isinstance(config.schedule, DecayOptions) and end is not None
    start = config.schedule.decay_start(end)
    if step <= start:
        return 0.0
    return 1.0 if step >= end else (step - start) / (end - start)


def between(height: float, step: int, config: TrainConfig) -> float:
    """The factor at `height`, 1 at learning_rate and 0 at min_lr; in the warm-up that of the warm-up."""
    assert isinstance(config.schedule, DecayOptions)
    if step < config.warmup_iters:
        return constant(step, config)
    floor = config.schedule.min_lr / config.optim.learning_rate
    return floor + (1 - floor) * height


SCHEDULES = {"cosine": cosine, "wsd": wsd, "linear": linear, "constant": constant}


def learning_rate(step: int, config: TrainConfig) -> float:
    """The learning rate of update `step`, 0 for the first."""
    return config.optim.learning_rate * SCHEDULES[config.schedule.name](step, config)
