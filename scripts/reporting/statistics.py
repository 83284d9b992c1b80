"""Means, intervals and paired comparisons: the statistics of a report, over plain numbers."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from scipy import stats

Replicate = tuple[int, int | None]  # (seed, fold): two runs with the same one are a pair


def replicate_name(replicate: Replicate) -> str:
    seed, fold = replicate
    return f"seed {seed}" if fold is None else f"fold {fold}, seed {seed}"


@dataclass(frozen=True)
class Point:
    """A mean and the ends of its 95 % t interval, None for a single value."""

    mean: float
    low: float | None
    high: float | None
    n: int


def interval(values: Sequence[float]) -> Point:
    mean, n = fmean(values), len(values)
    if n < 2:
        return Point(mean, None, None, n)
    half = float(stats.t.isf(0.025, n - 1)) * stdev(values) / math.sqrt(n)
    return Point(mean, mean - half, mean + half, n)


def mean_curve(curves: Iterable[Mapping[int, float]]) -> dict[int, Point]:
    """Iteration -> mean over the curves, at the iterations that all of them have."""
    curves = list(curves)
    common = set.intersection(*map(set, curves)) if curves else set[int]()
    return {i: interval([curve[i] for curve in curves]) for i in sorted(common)}


def lowest(curve: Mapping[int, Point]) -> tuple[float | None, int | None]:
    """The minimum of a mean curve and its first iteration."""
    return min(((point.mean, i) for i, point in curve.items()), default=(None, None))


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down adjustment. The family is all of them: a test that could not be made counts as p = 1."""
    adjusted: list[float | None] = [None] * len(p_values)
    known = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    highest = 0.0
    for rank, (p, i) in enumerate(known):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p))
        adjusted[i] = highest
    return adjusted


def n_needed(effect: float, power: float = 0.8, alpha: float = 0.05) -> float:
    """The least number of pairs with which a two-sided paired t test at `alpha` finds a mean difference of `effect`
    standard deviations with probability `power`: exact, from the noncentral t distribution; infinite past 2^20."""
    effect = min(abs(effect), 30.0)  # two pairs are enough by then, and scipy loses the tails of larger effects

    def reached(n: int) -> bool:
        t, shift = stats.t.isf(alpha / 2, n - 1), effect * math.sqrt(n)
        other_side = float(stats.nct.cdf(-t, n - 1, shift))  # nan where it is 0
        return float(stats.nct.sf(t, n - 1, shift)) + (other_side if other_side > 0 else 0.0) >= power

    high = next((2**k for k in range(1, 21) if reached(2**k)), None)
    return math.inf if high is None else bisect_left(range(high), True, lo=high // 2 + 1, key=reached)


@dataclass
class Comparison:
    """A - B, paired over the replicates that both have. planned: how many replicates both will have.

    p: of the paired t test and of Wilcoxon's signed-rank test, None where there is no test; adjusted: by Holm over the
    family. n_needed: pairs for 80 % power, for a difference of this size and spread.
    test_over_train: amount of validation text over that of training text, where the replicates are folds, which share
    training text. corrected: p of the t test with the variance (1/n + test_over_train) sd^2 of the mean difference
    (Nadeau and Bengio 2003), and by Holm.
    """

    a: str
    b: str
    planned: int
    values: dict[Replicate, tuple[float, float]]
    test_over_train: float | None = None
    point: Point | None = None
    p: tuple[float | None, float | None] = (None, None)
    adjusted: tuple[float | None, float | None] = (None, None)
    corrected: tuple[float | None, float | None] = (None, None)
    n_needed: float | None = None

    def __post_init__(self) -> None:
        differences = list(self.differences.values())
        if differences:
            self.point = interval(differences)
        if len(differences) > 1 and (sd := stdev(differences)) > 1e-12 * max(map(abs, differences)):
            t, wilcoxon = stats.ttest_1samp(differences, 0), stats.wilcoxon(differences)
            self.p = float(t.pvalue), float(wilcoxon.pvalue)
            self.n_needed = n_needed(fmean(differences) / sd)
            if self.test_over_train is not None:
                n = len(differences)
                corrected_t = fmean(differences) / (sd * math.sqrt(1 / n + self.test_over_train))
                self.corrected = 2 * float(stats.t.sf(abs(corrected_t), n - 1)), None

    @property
    def differences(self) -> dict[Replicate, float]:
        return {replicate: a - b for replicate, (a, b) in self.values.items()}

    def verdict(self, less: str, more: str) -> str:
        """`less` or `more` where the paired t test's Holm p is at most 0.05."""
        if self.planned == 0:
            return "no such pair in the plan"
        if self.point is None or self.point.n < 2:
            return "fewer than 2 complete pairs: no test"
        if not any(self.differences.values()):
            return "identical"
        if self.adjusted[0] is None:
            return "the differences do not vary: no test"
        return "not resolved" if self.adjusted[0] > 0.05 else less if self.point.mean < 0 else more


def adjust(family: Sequence[Comparison]) -> None:
    """Set Holm's adjusted p in each comparison of the family."""
    t, wilcoxon = (holm([comparison.p[test] for comparison in family]) for test in (0, 1))
    corrected = holm([comparison.corrected[0] for comparison in family])
    for comparison, *adjusted, of_corrected in zip(family, t, wilcoxon, corrected, strict=True):
        comparison.adjusted = adjusted[0], adjusted[1]
        comparison.corrected = comparison.corrected[0], of_corrected
