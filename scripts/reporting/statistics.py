"""Means, intervals and paired comparisons: the statistics of a report, from the table of runs."""

import math
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum
from statistics import fmean, stdev
from types import MappingProxyType
from typing import Any, Literal

from scipy import stats

from scripts.reporting.runs import Curve, Metric, Replicate, Run, Sweep
from sweeps.definition import Compare, part_and_name

TESTS = ("t", "Wilcoxon", "corrected t")


@dataclass(frozen=True)
class Estimate:
    """A mean and the ends of its t interval (95 % where nothing else is said), None for a single value.

    grid: where the values are read off a grid, the mean of what they stand for is known to ± grid only.
    """

    mean: float
    low: float | None
    high: float | None
    n: int
    grid: float = 0.0


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
    """p of the paired t test against `limit`, shared, grid: as in interval(); None where the differences do not vary.

    grid counts against another limit than 0 alone: what is equal has equal readings, whatever the grid.
    """
    n, distance = len(differences), abs(fmean(differences) - limit)
    if n < 2 or not vary(differences):
        return None
    known = max(0.0, distance - grid) if limit else distance
    return 2 * float(stats.t.sf(known / (stdev(differences) * math.sqrt(1 / n + shared)), n - 1))


def vary(values: Sequence[float]) -> bool:
    """Whether two or more values differ by more than round-off."""
    return stdev(values) > 1e-12 * max(map(abs, values))


def ratio(pairs: Sequence[tuple[float, float]], shared: float = 0.0) -> Estimate | None:
    """The mean of the first numbers over that of the second, with Fieller's interval; shared: as in interval().

    None where the interval has no ends: below two pairs, and where the second mean cannot be told from 0.
    """
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


def of_several_folds(replicates: Iterable[Replicate]) -> bool:
    return len({fold for _, fold in replicates if fold is not None}) > 1


def by_number(replicate: Replicate) -> tuple[int, int]:
    """The order of replicates; those without a fold come first."""
    seed, fold = replicate
    return seed, -1 if fold is None else fold


def within(values: Mapping[str, Mapping[Replicate, float]], shared: float = 0.0) -> dict[str, Estimate]:
    """Name -> mean over the replicates that all names have, with an interval free of what these have in common.

    The mean of a replicate over the N names is taken out of its values, and N / (N - 1) makes up for the variance that
    goes with it (Morey 2008). Returns {} where no replicate has all names. shared: as in interval().
    """
    common = sorted(set.intersection(*map(set, values.values())), key=by_number) if values else []
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
    """Iteration -> mean over the curves, at the iterations that all of them have. Of several folds the seeds of each
    are averaged first."""
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


@dataclass
class Comparison:
    """A - B, paired over the replicates that both have; of several folds the seeds of each are averaged first.

    values: replicate -> (A, B). planned: how many replicates both will have. diverged: in how many of these a run has.
    shared: amount of validation text over that of training text, where the replicates are folds, which share training
    text; else 0. grid: as in Estimate, of A - B.
    p: of each of TESTS that can be made. "corrected t" takes (1/n + shared) sd^2 as the variance of the mean
    (Nadeau and Bengio 2003). adjusted: p by Holm over the family. p_limits: claimed difference -> p of the test that
    decides against it, by Holm. estimate: with the plain interval; deciding: with that of the test that decides.
    n_needed: pairs for 80 % power, for a difference of this size and spread.
    """

    a: str
    b: str
    planned: int
    values: dict[Replicate, tuple[float, float]]
    shared: float = 0.0
    diverged: int = 0
    grid: float = 0.0
    estimate: Estimate | None = None
    deciding: Estimate | None = None
    p: dict[str, float] = field(default_factory=dict)
    adjusted: dict[str, float | None] = field(default_factory=dict)
    p_limits: dict[float, float | None] = field(default_factory=dict)
    n_needed: float | None = None

    def __post_init__(self) -> None:
        if not (differences := self.independent_differences):
            return
        self.estimate, self.deciding = interval(differences), self.deciding_interval()
        if (p := paired_p(differences)) is None:
            return
        self.p = {"t": p, "Wilcoxon": float(stats.wilcoxon(differences).pvalue)}
        if self.shared and (corrected := paired_p(differences, self.shared)) is not None:
            self.p["corrected t"] = corrected
        self.n_needed = n_needed(fmean(differences) / stdev(differences), self.shared)

    @property
    def differences(self) -> dict[Replicate, float]:
        return {replicate: a - b for replicate, (a, b) in self.values.items()}

    @property
    def independent_differences(self) -> list[float]:
        return independent(self.differences, self.shared > 0)

    def deciding_interval(self, alpha: float = 0.05) -> Estimate:
        """The interval of the test that decides, at the level 1 - alpha."""
        return interval(self.independent_differences, self.shared, alpha, self.grid)

    def p_against(self, limit: float) -> float | None:
        """p of the test that decides, against the difference `limit`; None where it cannot be made."""
        differences = self.independent_differences
        return paired_p(differences, self.shared, limit, self.grid) if differences else None

    @property
    def deciding_test(self) -> str:
        """The test that decides."""
        return "corrected t" if self.shared else "t"

    def verdict(self, less: str, more: str) -> str:
        """`less` or `more` where the Holm p of the test that decides is at most 0.05."""
        if self.planned == 0:
            return "no pairs of one seed and one held-out text"
        if self.diverged:  # what is left would be the runs that went well
            return f"{self.diverged} of {self.planned} pairs diverged: no test"
        if self.estimate is None or self.estimate.n < 2:
            return "fewer than 2 complete pairs: no test"
        if not any(self.differences.values()):
            return "identical"
        p = self.adjusted[self.deciding_test]
        if p is None:
            return "the differences do not vary: no test"
        return "not told apart" if p > 0.05 else less if self.estimate.mean < 0 else more

    def judged(self, asked: Compare) -> "Verdict":
        """The verdict on the claim of its family."""
        assert asked.claim is not None
        estimate = None if self.diverged else self.deciding
        p = {0.0: self.adjusted[self.deciding_test], **self.p_limits}
        return judge(estimate, asked.claim, asked.size, asked.least, p)


Verdict = Literal["reproduced", "smaller", "excluded", "no power", "not tested"]


def judge(
    estimate: Estimate | None,
    direction: str,
    size: float | None = None,
    least: float | None = None,
    p: Mapping[float, float | None] = MappingProxyType({}),
) -> Verdict:
    """The verdict on the claim that a difference is lower or higher (`direction`), from its interval.

    size: the claim's, given only where the runs have the claim's own scale; without it the direction alone is judged.
    least: the least difference worth having. p: 0 or one of claimed_limits() -> p of the test against it, by Holm over
    the family: above 0.05 the interval counts as one that covers this difference.
    """
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


def adjust(family: Sequence[Comparison], limits: Sequence[float] = ()) -> None:
    """Set Holm's adjusted p in each comparison of the family: for each test separately, for those that decide, and for
    these against each of the limits."""
    for test in TESTS:
        for comparison, p in zip(family, holm([c.p.get(test) for c in family]), strict=True):
            comparison.adjusted[test] = p
    # last, so that it stays: the comparisons of one family may differ in the test that decides
    for comparison, p in zip(family, holm([c.p.get(c.deciding_test) for c in family]), strict=True):
        comparison.adjusted[comparison.deciding_test] = p
    for limit in limits:
        for comparison, p in zip(family, holm([c.p_against(limit) for c in family]), strict=True):
            comparison.p_limits[limit] = p


# -----------------------------------------------------------------------------
# Runs -> comparisons


@dataclass(frozen=True)
class Family:
    """The comparisons of an entry of the definition's `compare`, a list for each metric. parts: of the sweep."""

    name: str
    asked: Compare
    metrics: list[Metric]
    comparisons: list[list[Comparison]]
    parts: Collection[str] = ()

    @property
    def heading(self) -> str:
        title = self.asked.title or f"Comparison {self.name}"
        return title[0].upper() + title[1:] if title[:2].isalpha() else title  # p = 2 keeps its small letter

    def names_in_parts(self) -> dict[str, str]:
        """Setting -> its name without the part and the words that all compared settings share."""
        names = {s: part_and_name(s, self.parts)[1] for c in self.comparisons[0] for s in (c.a, c.b)}
        shared = set.intersection(*(set(name.split(",")) for name in names.values())) if names else set[str]()
        found = {s: ",".join(word for word in name.split(",") if word not in shared) for s, name in names.items()}
        return found if all(found.values()) else names

    def short_names(self) -> dict[str, str]:
        """The same, with their parts where these are several."""
        names = self.names_in_parts()
        parts = {s: part_and_name(s, self.parts)[0] for s in names}
        several = len({*parts.values()}) > 1
        return {s: "/".join(filter(None, [parts[s] * several, name])) for s, name in names.items()}

    def pair_name(self, c: Comparison) -> str:
        """A's name where all are compared with one setting, else that of A and B."""
        names = self.short_names()
        return names[c.a] if self.against else f"{names[c.a]} − {names[c.b]}"

    @property
    def against(self) -> str | None:
        """What every setting is compared with, if it is one."""
        baselines = {c.b for c in self.comparisons[0]}
        return baselines.pop() if len(baselines) == 1 else None

    def ranked(self) -> list[Comparison]:
        """The first metric's comparisons, the lowest difference first; in their order where names are of numbers."""
        compared, names = self.comparisons[0], self.short_names()
        if all(re.search(r"=-?(inf|[\d.]+(e[+-]?\d+)?)$", names[c.a]) for c in compared):
            return compared
        return sorted(compared, key=lambda c: c.deciding.mean if c.deciding else math.inf)


def compared_families(sweep: Sweep) -> list[Family]:
    """The comparisons that the definition's `compare` asks for."""
    found = []
    for name, asked in sweep.definition.families.items():
        pairs = asked.pairs_of(sweep.settings)
        metrics = [metric for metric in sweep.metrics if asked.metric in (None, metric.key)]
        limits = claimed_limits(asked.claim, asked.size, asked.least)
        comparisons = [compare(sweep, pairs, metric, limits) for metric in metrics]
        found.append(Family(name, asked, metrics, comparisons, sweep.definition.parts))
    return found


def paired(family: Family, whole: Family) -> list[tuple[Comparison, Comparison | None]]:
    """Each comparison of a family with that of `whole` whose settings have the same names in their parts."""
    names, of_whole = family.names_in_parts(), whole.names_in_parts()
    known = {(of_whole[c.a], of_whole[c.b]): c for c in whole.comparisons[0]}
    return [(c, known.get((names[c.a], names[c.b]))) for c in family.comparisons[0]]


def compare(
    sweep: Sweep, pairs: Sequence[tuple[str, str]], metric: Metric, limits: Sequence[float] = ()
) -> list[Comparison]:
    """A family of comparisons of a metric, paired by seed and fold, over the folds that hold out the same text."""
    family = []
    for a, b in pairs:
        runs_a, runs_b = sweep.runs_of(a), sweep.runs_of(b)
        common = [r for r in runs_a if r in runs_b and held_out(runs_a[r]) == held_out(runs_b[r])]
        done = [r for r in common if runs_a[r].done and runs_b[r].done and not text_changed(runs_a[r], runs_b[r])]
        both = {r: (runs_a[r].value(metric), runs_b[r].value(metric)) for r in done}
        known = {r: (x, y) for r, (x, y) in both.items() if x is not None and y is not None}
        diverged = sum("diverged" in (runs_a[r].state.state, runs_b[r].state.state) for r in common)
        shared = shared_text([runs_a[r] for r in common])
        grid = 2 * grid_step([runs_a[r] for r in common], metric.column)  # each of A and B is known to ± a step
        family.append(Comparison(a, b, len(common), known, shared, diverged, grid))
    adjust(family, limits)
    return family


def grid_step(runs: Sequence[Run], column: str) -> float:
    """The iterations between evaluations, where a metric is read off these; else 0. A lowest loss that is read at one
    of them lies between the one before and the one after."""
    return max((run.config["eval_interval"] for run in runs), default=0) if column == "iter_of_min" else 0


def shares(sweep: Sweep, families: Sequence[Family], family: Family) -> dict[str, dict[int, Estimate]]:
    """Name of a pair -> iteration -> how much of the A − B in validation loss of the pair in the family `share_of` is
    left in `family`. {} without `share_of`."""
    whole = next((other for other in families if other.name == family.asked.share_of), None)
    found = {}
    for c, of_whole in paired(family, whole) if whole else []:
        left, all_of_it = losses_along(sweep, c), losses_along(sweep, of_whole) if of_whole else {}
        if both := [r for r in left if r in all_of_it]:
            iterations = sorted(set.intersection(*(set(of[r]) for r in both for of in (left, all_of_it))))
            estimates = {}
            for i in filter(None, iterations):  # before the first update nothing is gained
                a, b = (independent({r: of[r][i] for r in both}, c.shared > 0) for of in (left, all_of_it))
                estimates[i] = ratio([*zip(a, b, strict=True)], c.shared)
            found[family.pair_name(c)] = {i: estimate for i, estimate in estimates.items() if estimate is not None}
    return {name: of for name, of in found.items() if of}


def losses_along(sweep: Sweep, c: Comparison) -> dict[Replicate, dict[int, float]]:
    """A − B in validation loss at the evaluations that both runs of a pair have."""
    return {r: minus(sweep.runs_of(c.a)[r].losses, sweep.runs_of(c.b)[r].losses) for r in c.values}


def minus(a: Curve, b: Curve) -> dict[int, float]:
    return {i: a[i] - b[i] for i in a if i in b}


def held_out(run: Run) -> object:
    """What decides the text that the run holds out."""
    name, fold = run.config.get("data.name"), run.config.get("data.fold")
    if fold is None:
        return name
    split = {"far": "near"}.get(run.config["data.split"], run.config["data.split"])
    window = None if split == "contiguous" else run.config["model.block_size"]
    return name, fold, run.config["data.folds"], split, window


def text_changed(a: Run, b: Run) -> bool:
    """Whether two runs had different texts. An old runs.csv has those of all runs, "A, B", for each."""
    known = [{*sha256.split(", ")} for run in (a, b) if (sha256 := run.summary.get("corpus_sha256"))]
    return len(known) == 2 and known[0].isdisjoint(known[1])


def shared_text(runs: Sequence[Run]) -> float:
    """The amount of validation text over that of training text; 0 unless the runs are of several folds."""
    if not of_several_folds(run.replicate for run in runs):
        return 0.0
    config = runs[0].config
    halved = config.get("data.split") in ("near", "far")  # they hold out a quarter of a fold, and use half of the text
    return 1 / ((2 if halved else 1) * config["data.folds"] - 1)


# -----------------------------------------------------------------------------
# Learning rates

WORSE = 0.5  # nats above an untrained model


def by_rate(sweep: Sweep) -> dict[str, dict[float, str]]:
    """Variant -> learning rate, from the lowest on -> setting; {} where no variant has several rates."""
    variants: dict[str, dict[float, str]] = {}
    for setting in sweep.settings:
        first = next(iter(sweep.runs_of(setting).values()))
        variant = re.sub(r"(^|[,/])learning_rate=[^,]*", "", setting).strip(",/") or "all"
        variants.setdefault(variant, {})[first.config["optim.learning_rate"]] = setting
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
    for replicate in sorted({run.replicate for runs in runs_at.values() for run in runs}, key=by_number):
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
