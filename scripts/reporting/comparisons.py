"""Comparisons of a sweep's settings: weighted sums of a metric, paired by seed and fold."""

import itertools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import NamedTuple

from scipy import stats

from scripts.reporting import numbers
from scripts.reporting.numbers import Estimate, Verdict
from scripts.reporting.runs import Metric, Replicate, Run, Sweep
from sweeps.definition import Compare, Terms, part_and_name

TESTS = ("t", "Wilcoxon", "corrected t")


@dataclass
class Comparison:
    """A - B, paired over the replicates that all of its settings have; of several folds the seeds are averaged
    first."""

    a: str  # the name of A
    b: str
    planned: int  # how many replicates all settings will have
    values: dict[Replicate, tuple[float, float]]  # (A, B)
    shared: float = 0.0  # amount of validation text over that of training text, where folds share training text
    diverged: int = 0  # in how many of the planned replicates a run has
    grid: float = 0.0  # as in Estimate, of A - B
    terms: Terms = ()  # of the weighted sum A - B: A has the positive weights, B the negative ones
    estimate: Estimate | None = None  # with the plain interval
    deciding: Estimate | None = None  # with the interval of the test that decides
    # of each of TESTS that can be made: "corrected t" takes (1/n + shared) sd^2 as the variance of the mean (Nadeau
    # and Bengio 2003)
    p: dict[str, float] = field(default_factory=dict)
    adjusted: dict[str, float | None] = field(default_factory=dict)  # p by Holm over the family
    # 0 or a claimed difference -> p of the test that decides against it, by Holm
    p_limits: dict[float, float | None] = field(default_factory=dict)
    n_needed: float | None = None  # pairs for 80 % power, for a difference of this size and spread

    def __post_init__(self) -> None:
        if not (differences := self.independent_differences):
            return
        self.estimate, self.deciding = numbers.interval(differences), self.deciding_interval()
        if (p := numbers.paired_p(differences)) is None:
            return
        self.p = {"t": p, "Wilcoxon": float(stats.wilcoxon(differences).pvalue)}
        if self.shared and (corrected := numbers.paired_p(differences, self.shared)) is not None:
            self.p["corrected t"] = corrected
        self.n_needed = numbers.n_needed(fmean(differences) / stdev(differences), self.shared)

    @property
    def differences(self) -> dict[Replicate, float]:
        return {replicate: a - b for replicate, (a, b) in self.values.items()}

    @property
    def independent_differences(self) -> list[float]:
        return numbers.independent(self.differences, self.shared > 0)

    def deciding_interval(self, alpha: float = 0.05) -> Estimate:
        """The interval of the test that decides, at the level 1 - alpha."""
        return numbers.interval(self.independent_differences, self.shared, alpha, self.grid)

    def p_against(self, limit: float) -> float | None:
        """p of the test that decides, against the difference `limit`; None where it cannot be made."""
        differences = self.independent_differences
        return numbers.paired_p(differences, self.shared, limit, self.grid) if differences else None

    @property
    def deciding_test(self) -> str:
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
        return numbers.judge(estimate, asked.claim, asked.size, asked.least, self.p_limits)


def adjust(family: Sequence[Comparison], limits: Sequence[float] = ()) -> None:
    """Set Holm's adjusted p of each comparison: of each test, of the test that decides, and of that against each
    limit."""
    for test in TESTS:
        for comparison, p in zip(family, numbers.holm([c.p.get(test) for c in family]), strict=True):
            comparison.adjusted[test] = p
    for limit in (0.0, *limits):
        for comparison, p in zip(family, numbers.holm([c.p_against(limit) for c in family]), strict=True):
            comparison.p_limits[limit] = p
    for c in family:  # last, so that it stays: the comparisons of one family may differ in the test that decides
        c.adjusted[c.deciding_test] = c.p_limits[0.0]


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

    def short_names(self, with_parts: bool = True) -> dict[str, str]:
        """Names of A and B -> the same without the words that all settings share. with_parts: if several."""
        every = [c.terms for c in self.comparisons[0]]
        parts = {setting: part_and_name(setting, self.parts) for terms in every for setting, _ in terms}
        words = [{*name.split(",")} for _, name in parts.values()]
        shared = set.intersection(*words) if words else set[str]()
        names = {s: ",".join(w for w in name.split(",") if w not in shared) for s, (_, name) in parts.items()}
        if not all(names.values()):
            names = {setting: name for setting, (_, name) in parts.items()}
        if with_parts and len({part for part, _ in parts.values()}) > 1:
            names = {setting: "/".join(filter(None, [parts[setting][0], name])) for setting, name in names.items()}
        found: dict[str, str] = {}
        for terms in every:
            shorter = [(names[setting], weight) for setting, weight in terms]
            found |= zip(sides_of(terms), sides_of(shorter), strict=True)
        return found

    def pair_name(self, c: Comparison) -> str:
        """A's name where all are compared with one B, else that of A and B."""
        names = self.short_names()
        a, b = names[c.a], f"({names[c.b]})" if " + " in names[c.b] else names[c.b]
        return a if self.against else f"{a} − {b}"

    @property
    def against(self) -> str | None:
        """The B of every comparison, if it is one."""
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
        metrics = [metric for metric in sweep.metrics if asked.metric in (None, metric.key)]
        limits = numbers.claimed_limits(asked.claim, asked.size, asked.least)
        comparisons = [compare(sweep, asked.terms_of(sweep.settings), metric, limits) for metric in metrics]
        found.append(Family(name, asked, metrics, comparisons, sweep.definition.parts))
    return found


class Readings(NamedTuple):
    """Of a setting: its runs, their numbers, and the step of the grid that these are read off."""

    runs: dict[Replicate, Run]
    values: dict[Replicate, float]
    step: float


def compare(sweep: Sweep, every: Sequence[Terms], metric: Metric, limits: Sequence[float] = ()) -> list[Comparison]:
    """A family of comparisons of a metric."""
    found = {}
    for setting in dict.fromkeys(setting for terms in every for setting, _ in terms):
        runs = sweep.runs_of(setting)
        values = {r: value for r, run in runs.items() if (value := run.summary.get(metric.column)) is not None}
        found[setting] = Readings(runs, values, grid_step([*runs.values()], metric.column))
    family = [compared(terms, found, found[terms[0][0]].step) for terms in every]
    adjust(family, limits)
    return family


def compared(terms: Terms, found: Mapping[str, Readings], step: float) -> Comparison:
    """A comparison, paired by seed and fold, over the folds that hold out the same text. found: of each setting. step:
    of the grid that each value is read off."""
    of_each = [found[setting].runs for setting, _ in terms]
    common = [r for r in of_each[0] if all(r in of for of in of_each) and len({held_out(of[r]) for of in of_each}) == 1]
    done = [r for r in common if all(of[r].done for of in of_each) and not text_changed([of[r] for of in of_each])]
    known = [r for r in done if all(r in found[setting].values for setting, _ in terms)]
    sides = {r: (side_of(terms, found, r, 1), side_of(terms, found, r, -1)) for r in known}
    diverged = sum(any(of[r].state.state == "diverged" for of in of_each) for r in common)
    shared, grid = shared_text([of_each[0][r] for r in common]), step * sum(abs(weight) for _, weight in terms)
    return Comparison(*sides_of(terms), len(common), sides, shared, diverged, grid, terms)


def side_of(terms: Terms, found: Mapping[str, Readings], replicate: Replicate, sign: int) -> float:
    return sum(sign * weight * found[setting].values[replicate] for setting, weight in terms if sign * weight > 0)


def sides_of(terms: Sequence[tuple[str, float]]) -> tuple[str, str]:
    """The names of A and B."""
    weighted = [(setting if abs(w) == 1 else f"{abs(w):g} × {setting}", w) for setting, w in terms]
    return " + ".join(name for name, w in weighted if w > 0), " + ".join(name for name, w in weighted if w < 0)


def grid_step(runs: Sequence[Run], column: str) -> float:
    """The iterations between evaluations, where a metric is read off these; else 0. A lowest loss that is read at one
    of them lies between the one before and the one after."""
    return max((run.config["eval_interval"] for run in runs), default=0) if column == "iter_of_min" else 0


def shares(sweep: Sweep, families: Sequence[Family], family: Family) -> dict[str, dict[int, Estimate]]:
    """Name of a pair -> iteration -> how much of the A − B in validation loss of the pair in the family `share_of` is
    left in `family`. {} without `share_of`."""
    whole = next((other for other in families if other.name == family.asked.share_of), None)
    if whole is None:
        return {}
    names, of_whole = (of.short_names(with_parts=False) for of in (family, whole))
    known = {(of_whole[c.a], of_whole[c.b]): losses_along(sweep, c) for c in whole.comparisons[0]}
    found = {}
    for c in family.comparisons[0]:
        left, all_of_it = losses_along(sweep, c), known.get((names[c.a], names[c.b]), {})
        if both := [r for r in left if r in all_of_it]:
            iterations = sorted(set.intersection(*(set(of[r]) for r in both for of in (left, all_of_it))))
            estimates = {}
            for i in filter(None, iterations):  # before the first update nothing is gained
                a, b = (numbers.independent({r: of[r][i] for r in both}, c.shared > 0) for of in (left, all_of_it))
                estimates[i] = numbers.ratio([*zip(a, b, strict=True)], c.shared)
            found[family.pair_name(c)] = {i: estimate for i, estimate in estimates.items() if estimate is not None}
    return {name: of for name, of in found.items() if of}


def losses_along(sweep: Sweep, c: Comparison) -> dict[Replicate, dict[int, float]]:
    """A − B in validation loss at the evaluations that all runs of a replicate have."""
    found = {}
    for r in c.values:
        curves = [(sweep.runs_of(setting)[r].losses, weight) for setting, weight in c.terms]
        common = [i for i in curves[0][0] if all(i in curve for curve, _ in curves)]
        found[r] = {i: sum(weight * curve[i] for curve, weight in curves) for i in common}
    return found


def held_out(run: Run) -> object:
    """What decides the text that the run holds out."""
    name, fold = run.config.get("data.name"), run.config.get("data.fold")
    if fold is None:
        return name
    split = {"far": "near"}.get(run.config["data.split"], run.config["data.split"])
    window = None if split == "contiguous" else run.config["model.block_size"]
    return name, fold, run.config["data.folds"], split, window


def text_changed(runs: Sequence[Run]) -> bool:
    """Whether some of the runs had different texts. An old runs.csv has those of all runs, "A, B", for each."""
    known = [{*sha256.split(", ")} for run in runs if (sha256 := run.summary.get("corpus_sha256"))]
    return any(one.isdisjoint(other) for one, other in itertools.combinations(known, 2))


def shared_text(runs: Sequence[Run]) -> float:
    """The amount of validation text over that of training text; 0 unless the runs are of several folds."""
    if not numbers.of_several_folds(run.replicate for run in runs):
        return 0.0
    config = runs[0].config
    halved = config.get("data.split") in ("near", "far")  # they hold out a quarter of a fold, and use half of the text
    return 1 / ((2 if halved else 1) * config["data.folds"] - 1)
