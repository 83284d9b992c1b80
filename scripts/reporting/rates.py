"""Learning rates: the runs at each, the best one, and the highest that is stable."""

import math
import re
from collections.abc import Mapping, Sequence
from statistics import fmean

from scripts.reporting.runs import Replicate, Run, Sweep

WORSE = 0.5  # nats above an untrained model


def by_rate(sweep: Sweep) -> dict[str, dict[float, str]]:
    """Variant -> learning rate, from the lowest on -> setting; {} where no variant has several rates."""
    variants: dict[str, dict[float, str]] = {}
    for setting, config in sweep.configs.items():
        variant = re.sub(r"(^|[,/])learning_rate=[^,]*", "", setting).strip(",/") or "all"
        variants.setdefault(variant, {})[config["optim.learning_rate"]] = setting
    if all(len(settings) < 2 for settings in variants.values()):
        return {}
    return {variant: dict(sorted(settings.items())) for variant, settings in variants.items()}


def runs_by_rate(sweep: Sweep) -> dict[str, dict[float, list[Run]]]:
    """Variant -> learning rate, from the lowest on -> its runs, as by_rate()."""
    return {
        variant: {rate: [*sweep.runs_of(setting).values()] for rate, setting in settings.items()}
        for variant, settings in by_rate(sweep).items()
    }


def best_rate(means: Mapping[float, float]) -> float:
    """The learning rate with the lowest mean loss."""
    return min(means, key=lambda rate: means[rate])


def final_means(runs_at: Mapping[float, Sequence[Run]], key: str = "val/loss") -> dict[float, float]:
    """The mean of a summary's number, the final validation loss, at the rates whose runs are all done."""
    made = {rate: runs for rate, runs in runs_at.items() if runs and all(run.done for run in runs)}
    return {rate: fmean(run.summary[key] for run in runs) for rate, runs in made.items()}


def stable_by_replicate(runs_at: Mapping[float, Sequence[Run]]) -> dict[Replicate, float | None]:
    """The highest stable rate of each seed and fold alone, over the rates at which it has a run."""
    found = {}
    every = {run.replicate for runs in runs_at.values() for run in runs}
    for replicate in sorted(every, key=lambda of: (of[0], -1 if of[1] is None else of[1])):
        alone = {rate: [run for run in runs if run.replicate == replicate] for rate, runs in runs_at.items()}
        found[replicate] = highest_stable({rate: runs for rate, runs in alone.items() if runs})[0]
    return found


def highest_stable(runs_at: Mapping[float, Sequence[Run]]) -> tuple[float | None, str]:
    """The highest rate up to which all are stable (notes.md says when one is), and how the next one fails."""
    known = final_means(runs_at)
    best = min(known.values(), default=math.inf)
    firsts = [run.losses[min(run.losses)] for runs in runs_at.values() for run in runs if run.losses]
    highest = None
    for rate, runs in runs_at.items():
        if not all(run.state.state in ("done", "diverged") for run in runs):
            return highest, f"{rate:g}: not all runs are made"
        broken = [run.state.reason for run in runs if not run.done]
        if broken:
            return highest, f"{rate:g}: {len(broken)} of {len(runs)} diverged ({broken[0]})"
        risen = ((run.summary["worst_loss"], run.losses[min(run.losses)]) for run in runs if run.losses)
        peak, first = max(risen, key=lambda of_run: of_run[0] - of_run[1], default=(0.0, 0.0))
        if peak > first + WORSE:
            return highest, f"{rate:g}: a loss of {peak:.4g}; the first was {first:.4f}"
        if fmean(firsts) - known[rate] < (fmean(firsts) - best) / 2:
            return highest, f"{rate:g}: final loss {known[rate]:.4f}"
        highest = rate
    return highest, "–"
