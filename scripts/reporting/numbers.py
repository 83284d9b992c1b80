"""Means, intervals and tests of the numbers of replicates: pure functions."""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum
from statistics import fmean, stdev
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from scipy import stats

from scripts.reporting.runs import Curve, Replicate


@dataclass(frozen=True)
class Estimate:
    """A mean and the ends of its t interval (95 % where nothing else is said), None for a single value. grid: where the
    values are read off a grid, the mean of what they stand for is known to ± grid only."""

    mean: float
    low: float | None
    high: float | None
    n: int
    grid: float = 0.0

    def minus(self, number: float) -> "Estimate":
        low, high = (None if end is None else end - number for end in (self.low, self.high))
        return replace(self, mean=self.mean - number, low=low, high=high)


def interval(values: Sequence[float], shared: float = 0.0, alpha: float = 0.05, grid: float = 0.0) -> Estimate:
    """The t interval at the level 1 - alpha. shared: shared_text() where the values are of folds that share training
    text, as in Comparison. grid: as in Estimate."""
    mean, n = fmean(values), len(values)
    if n < 2:
        return Estimate(mean, None, None, n, grid)
    sd = stdev(values) if vary(values) else 0.0
    half = float(stats.t.isf(alpha / 2, n - 1)) * sd * math.sqrt(1 / n + shared)
    return Estimate(mean, mean - half, mean + half, n, grid)


def paired_p(differences: Sequence[float], shared: float = 0.0, limit: float = 0.0, grid: float = 0.0) -> float | None:
    """p of the paired t test against `limit`; None where the differences do not vary. shared, grid: as in interval();
    grid counts against another limit than 0 alone: what is equal has equal readings, whatever the grid."""
    n, distance = len(differences), abs(fmean(differences) - limit)
    if n < 2 or not vary(differences):
        return None
    known = max(0.0, distance - grid) if limit else distance
    return 2 * float(stats.t.sf(known / (stdev(differences) * math.sqrt(1 / n + shared)), n - 1))


def vary(values: Sequence[float]) -> bool:
    """Whether two or more values differ by more than round-off."""
    return stdev(values) > 1e-12 * max(map(abs, values))


def ratio(pairs: Sequence[tuple[float, float]], shared: float = 0.0) -> Estimate | None:
    """The mean of the first numbers over that of the second, with Fieller's interval. None where it has no ends: below
    two pairs, and where the second mean cannot be told from 0. shared: as in interval()."""
    n = len(pairs)
    if n < 2:
        return None
    a, b = (fmean(of) for of in zip(*pairs, strict=True))
    aa, ab, bb = (fsum((x[i] - (a, b)[i]) * (x[j] - (a, b)[j]) for x in pairs) for i, j in ((0, 0), (0, 1), (1, 1)))
    q = float(stats.t.isf(0.025, n - 1)) ** 2 * (1 / n + shared) / (n - 1)
    # a - r b cannot be told from 0 for the r with u r^2 - 2 v r + w <= 0
    u, v, w = b * b - q * bb, a * b - q * ab, a * a - q * aa
    if u <= 0:
        return None
    half = math.sqrt(max(v * v - u * w, 0.0))
    return Estimate(a / b, (v - half) / u, (v + half) / u, n)


def independent(values: Mapping[Replicate, float], of_folds: bool) -> list[float]:
    """One value for each independent replicate. of_folds: the seeds of a fold share its held-out text, so a fold counts
    once, with the mean over its seeds."""
    groups: dict[Any, list[float]] = defaultdict(list)
    for replicate, value in values.items():
        groups[replicate[1] if of_folds else replicate].append(value)
    return [*map(fmean, groups.values())]


def sources(values: Mapping[Replicate, float]) -> tuple[float | None, float | None, float]:
    """Standard deviations between folds, between seeds, and of what is left of a single run: variance components of the
    two-way random-effects model, by mean squares; one below 0 counts as 0. None where there is one fold or one seed:
    what is left then has it, too. Every seed must have every fold."""
    seeds, folds = ([*dict.fromkeys(part)] for part in zip(*values, strict=True))
    x = np.array([[values[seed, fold] for fold in folds] for seed in seeds])
    if 1 in x.shape:
        return None, None, float(x.std(ddof=1))
    of_seeds, of_folds = x.mean(1, keepdims=True), x.mean(0, keepdims=True)
    rest = float(np.sum((x - of_seeds - of_folds + x.mean()) ** 2)) / ((len(seeds) - 1) * (len(folds) - 1))
    between = [(means.var(ddof=1) - rest / n).clip(0) for means, n in ((of_folds, len(seeds)), (of_seeds, len(folds)))]
    return float(between[0] ** 0.5), float(between[1] ** 0.5), rest**0.5


def of_several_folds(replicates: Iterable[Replicate]) -> bool:
    return len({fold for _, fold in replicates if fold is not None}) > 1


def within(values: Mapping[str, Mapping[Replicate, float]], shared: float = 0.0) -> dict[str, Estimate]:
    """Name -> mean over the replicates that all names have, with an interval free of what these have in common: the
    mean of a replicate over the N names is taken out of its values, and N / (N - 1) makes up for the variance that goes
    with it (Morey 2008). {} where no replicate has all names. shared: as in interval()."""
    common = [r for r in next(iter(values.values()), {}) if all(r in of for of in values.values())]
    if not common:
        return {}
    rows = {name: independent({r: of[r] for r in common}, shared > 0) for name, of in values.items()}
    if len(rows) == 1:  # nothing in common to take out
        return {name: interval(row, shared) for name, row in rows.items()}
    level = [fmean(column) for column in zip(*rows.values(), strict=True)]
    wider = math.sqrt(len(rows) / (len(rows) - 1))
    found = {}
    for name, row in rows.items():
        mean = fmean(row)
        away = mean - fmean(level)
        found[name] = interval([mean + wider * (x - y - away) for x, y in zip(row, level, strict=True)], shared)
    return found


def mean_curve(curves: Mapping[Replicate, Curve]) -> dict[int, Estimate]:
    """Iteration -> mean over the curves, where all of them have it; of several folds the seeds are averaged first."""
    common = set.intersection(*map(set, curves.values())) if curves else set[int]()
    folds = of_several_folds(curves)
    return {i: interval(independent({r: of[i] for r, of in curves.items()}, folds)) for i in sorted(common)}


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down adjustment. The family is all of them: a test that could not be made counts as p = 1."""
    adjusted: list[float | None] = [None] * len(p_values)
    known = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    highest = 0.0
    for rank, (p, i) in enumerate(known):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p))
        adjusted[i] = highest
    return adjusted


def n_needed(effect: float, shared: float = 0.0) -> float:
    """The least number of pairs with which a two-sided paired t test at 0.05 finds a mean difference of `effect`
    standard deviations with probability 0.8: exact, from the noncentral t distribution; infinite past 2^20, and for
    folds past 1 / shared + 1, of which there are no more. shared: as in interval()."""
    effect = min(abs(effect), 30.0)  # two pairs are enough by then, and scipy loses the tails of larger effects

    def reached(n: int) -> bool:
        t, shift = stats.t.isf(0.025, n - 1), effect / math.sqrt(1 / n + shared)
        other_side = float(stats.nct.cdf(-t, n - 1, shift))  # nan where it is 0
        return float(stats.nct.sf(t, n - 1, shift)) + (other_side if other_side > 0 else 0.0) >= 0.8

    high = next((2**k for k in range(1, 21) if reached(2**k)), None)
    n = math.inf if high is None else bisect_left(range(high), True, lo=high // 2 + 1, key=reached)
    return n if shared == 0 or n <= round(1 / shared) + 1 else math.inf


Verdict = Literal["reproduced", "smaller", "excluded", "no power", "not tested"]


def judge(
    estimate: Estimate | None,
    direction: str,
    size: float | None = None,
    least: float | None = None,
    p: Mapping[float, float | None] = MappingProxyType({}),
) -> Verdict:
    """The verdict on the claim that a difference is lower or higher (`direction`), from its interval. size: the
    claim's, given only where the runs have the claim's own scale; without it the direction alone is judged. least: the
    least difference worth having. p: 0 or one of claimed_limits() -> p of the test against it, by Holm over the family:
    above 0.05 the interval counts as one that covers this difference."""
    if estimate is None or estimate.low is None or estimate.high is None or estimate.low == estimate.high:
        return "not tested"  # no spread: no test
    sign = 1 if direction == "higher" else -1
    low, high = (estimate.low, estimate.high) if sign > 0 else (-estimate.high, -estimate.low)

    def told_from(difference: float) -> bool:
        known = p.get(sign * difference)
        return known is None or known <= 0.05

    def below(limit: float | None) -> bool:
        return limit is not None and high + estimate.grid < limit and told_from(limit)

    if low > 0 and told_from(0):
        return "smaller" if below(size) else "reproduced"
    return "excluded" if high < 0 and told_from(0) or below(size) or below(least) else "no power"


def claimed_limits(direction: str | None, size: float | None, least: float | None) -> list[float]:
    """The differences other than 0 that a claim is tested against, with their sign."""
    sign = 1 if direction == "higher" else -1
    return [sign * limit for limit in (size, least) if limit is not None]
