"""The report's statistics, against published numbers, scipy, and numbers worked out by hand."""

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from statistics import stdev
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.reports import Made, falling, finish, rows_of, sweep_of
from scipy import stats

from data.folds import leak_split, split
from data.options import PythonDocsOptions, TinyShakespeareOptions
from scripts.reporting.comparisons import Comparison, adjust, compared_families, shared_text
from scripts.reporting.figures import family_figures
from scripts.reporting.numbers import Estimate, holm, interval, judge, mean_curve, n_needed, paired_p, sources
from scripts.reporting.runs import METRICS, Replicate
from scripts.reporting.tables import comparison_table, conclusion_table, part_table

# Student's (1908) data of two sleeping drugs, and what R's t.test says of them.
DRUG_1 = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
DRUG_2 = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]


def paired(a: Sequence[float], b: Sequence[float], shared: float = 0.0) -> Comparison:
    values: dict[Replicate, tuple[float, float]] = {(1, fold): pair for fold, pair in enumerate(zip(a, b, strict=True))}
    return Comparison("a", "b", len(values), values, shared)


def test_p_values_and_intervals_are_students_and_scipys() -> None:
    rng = np.random.default_rng(0)
    samples = [(rng.normal(0, 1, n).tolist(), rng.normal(0.3, 1, n).tolist()) for n in (2, 3, 10, 40)]
    for a, b in [*samples, (DRUG_1, DRUG_2)]:
        c, t = paired(a, b), stats.ttest_rel(a, b)
        assert c.p == pytest.approx({"t": t.pvalue, "Wilcoxon": stats.wilcoxon(a, b).pvalue}) and c.estimate is not None
        assert [c.estimate.low, c.estimate.high] == pytest.approx(list(t.confidence_interval()))
    drugs = paired(DRUG_1, DRUG_2)
    assert drugs.estimate is not None and drugs.estimate.n == 10
    assert astuple(drugs.estimate)[:3] == pytest.approx((-1.58, -2.4598858, -0.7001142))
    assert drugs.p["t"] == pytest.approx(0.002833, abs=5e-7)
    exact = paired([1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 0, 0]).p
    assert exact["Wilcoxon"] == pytest.approx(2 / 2**6)  # Wilcoxon's of few folds, all of one sign


@pytest.mark.parametrize("which", ["contiguous", "near", "far"])
def test_the_correction_takes_the_amounts_of_text_that_the_split_has(which: str) -> None:
    config = {"data.folds": 10, "data.split": which}
    runs: Any = [SimpleNamespace(replicate=(1, fold), config=config) for fold in (0, 1)]
    one = split(10**6, 10, 1) if which == "contiguous" else leak_split(10**6, 10, 1, 64, which == "far")
    held_out, trained = (sum(end - start for start, end in ranges) for ranges in (one.val, one.train))
    assert shared_text(runs) == pytest.approx(held_out / trained, rel=0.05)
    assert shared_text(runs[:1]) == 0


def test_the_correction_for_folds_is_the_t_test_with_a_larger_variance() -> None:
    """Nadeau and Bengio's (2003) with ten folds, by hand: t shrinks by sqrt((1/10) / (1/10 + 1/9))."""
    plain, of_folds = paired(DRUG_1, DRUG_2), paired(DRUG_1, DRUG_2, 1 / 9)
    t = stats.ttest_rel(DRUG_1, DRUG_2).statistic * (0.1 / (0.1 + 1 / 9)) ** 0.5
    p = of_folds.p["corrected t"]
    assert of_folds.p == {**plain.p, "corrected t": pytest.approx(2 * stats.t.sf(abs(t), 9))}
    assert p == pytest.approx(0.0209, abs=5e-5)
    other = paired(DRUG_2, DRUG_2, 1 / 9)
    adjust([of_folds, other])
    assert of_folds.adjusted["corrected t"] == pytest.approx(2 * p) and other.adjusted["corrected t"] is None


def test_the_seeds_of_a_fold_are_averaged_before_they_count() -> None:
    """Two folds that differ by 1, four seeds each that hardly vary: they say as little as two numbers do."""
    differences = {(seed, fold): -1.0 - fold + 0.01 * seed for fold in (0, 1) for seed in range(4)}
    values: dict[Replicate, tuple[float, float]] = {r: (d, 0.0) for r, d in differences.items()}
    pooled, two = Comparison("a", "b", 8, values, 1 / 9), paired([-0.985, -1.985], [0.0, 0.0], 1 / 9)
    assert pooled.p == pytest.approx(two.p) and pooled.deciding is not None and two.deciding is not None
    assert astuple(pooled.deciding) == pytest.approx(astuple(two.deciding))
    assert Comparison("a", "b", 8, values).p["t"] < 1e-3 < pooled.p["t"]  # of one text seeds are replicates
    same = Comparison("a", "b", 3, {(1, 0): (1.3, 1.2), (1, 1): (2.3, 2.2), (1, 2): (0.1, 0.0)}).estimate
    assert same is not None and judge(same, "higher") == "not tested"  # they differ by round-off alone


def test_the_seeds_of_the_first_fold_alone_are_no_replicates(tmp_path: Path) -> None:
    """Of three folds and three seeds that are planned."""
    made = Made(tmp_path / "made", compare={"p": {"baseline": "p=2"}})
    for fold, seed, p in itertools.product(range(3), range(3), (2, 3)):
        if fold == 0:
            made.run(f"p={p}", fold, falling(2.0 - 0.1 * p + 0.001 * seed * p), seed=seed)
        else:
            made.plan(f"p={p}", seed, fold)
    (comparison,) = compared_families(sweep_of(made.path))[0].comparisons[0]
    assert (len(comparison.values), comparison.planned) == (3, 9) and comparison.deciding is not None
    assert (comparison.deciding.n, comparison.p) == (1, {})
    assert comparison.verdict("lower", "higher") == "fewer than 2 complete pairs: no test"


def test_holms_correction_is_over_the_tests_that_decide() -> None:
    of_folds, of_seeds = paired(DRUG_1, DRUG_2, 1 / 9), paired([0.1, 0.2, 0.15], [0.0, 0.0, 0.0])
    adjust([of_folds, of_seeds])
    lower, higher = sorted((of_folds.p["corrected t"], of_seeds.p["t"]))
    assert [lower, higher] == [of_folds.p["corrected t"], of_seeds.p["t"]]
    assert of_folds.adjusted["corrected t"] == pytest.approx(2 * lower)
    assert of_seeds.adjusted["t"] == pytest.approx(max(2 * lower, higher))


@pytest.mark.parametrize(
    ("p", "adjusted"),
    [
        # 0.01 x 4, 0.02 x 3, 0.03 x 2 is less than the one before and takes its value, 0.9 x 1
        ([0.03, 0.9, 0.01, 0.02], [0.06, 0.9, 0.04, 0.06]),
        ([0.5, 0.6], [1.0, 1.0]),
        ([], []),
        ([0.01, None, 0.04], [0.03, None, 0.08]),  # a comparison without a test counts in the family
    ],
)
def test_holm_is_the_one_done_by_hand(p: list[float | None], adjusted: list[float | None]) -> None:
    assert holm(p) == [x if x is None else pytest.approx(x) for x in adjusted]


def test_verdicts_follow_the_adjusted_p() -> None:
    lower, noise = [x - 1 - 0.01 * i for i, x in enumerate(DRUG_1)], [x + 0.1 * (-1) ** i for i, x in enumerate(DRUG_1)]
    higher = [x + 1 + 0.01 * i for i, x in enumerate(DRUG_1)]
    family = [paired(other, DRUG_1) for other in (lower, noise, higher, DRUG_1, DRUG_2)]
    family += [paired([x + 0.5 for x in DRUG_2], DRUG_2), paired([1.0], [2.0])]
    adjust(family)
    verdicts = [c.verdict("lower", "higher") for c in family]
    assert verdicts[:5] == ["lower", "not told apart", "higher", "identical", "higher"]
    assert verdicts[5:] == ["the differences do not vary: no test", "fewer than 2 complete pairs: no test"]
    alone = paired(DRUG_2, DRUG_1)
    adjust([alone])
    assert alone.adjusted["t"] == alone.p["t"] and family[4].adjusted["t"] == pytest.approx(5 * alone.p["t"])
    many = [paired(DRUG_2, DRUG_1), *(paired([1.0], [2.0]) for _ in range(20))]
    adjust(many)
    assert many[0].verdict("lower", "higher") == "not told apart"  # 21 x 0.0028


@pytest.mark.parametrize(("effect", "n"), [(0.2, 199), (0.5, 34), (0.8, 15), (1.0, 10), (0.0, math.inf), (1000.0, 2)])
def test_pairs_needed_are_those_of_power_tables(effect: float, n: int) -> None:
    assert n_needed(effect) == n_needed(-effect) == n  # G*Power 3, "difference between two dependent means"


@pytest.mark.parametrize("effect", [1.5, 2.0])
def test_folds_that_share_text_need_more_pairs(effect: float) -> None:
    """Their test has the power of one whose differences vary by the root of 1 + n * shared more."""
    shared = 1 / 9  # of ten folds
    n = int(n_needed(effect, shared))
    assert n_needed(effect) < n <= 10
    assert n_needed(effect / math.sqrt(1 + n * shared)) <= n
    assert n_needed(effect / math.sqrt(1 + (n - 1) * shared)) > n - 1
    assert n_needed(1.0, shared) == math.inf  # of ten folds there is no eleventh


def test_what_folds_and_seeds_tell_is_the_published_example() -> None:
    # Shrout and Fleiss (1979), six targets (folds) and four judges (seeds): mean squares 11.24, 32.49 and 1.02
    ratings = ["9 2 5 8", "6 1 3 2", "8 4 6 8", "7 1 2 6", "10 5 6 9", "6 2 4 7"]
    values: dict[Replicate, float] = {
        (seed, fold): float(x) for fold, row in enumerate(ratings) for seed, x in enumerate(row.split())
    }
    variances = [(11.2417 - 1.0194) / 4, (32.4861 - 1.0194) / 6, 1.0194]
    assert sources(values) == pytest.approx([x**0.5 for x in variances], rel=1e-4)
    of_one_seed = {r: value for r, value in values.items() if r[0] == 0}
    assert sources(of_one_seed) == (None, None, pytest.approx(stdev(of_one_seed.values())))
    assert sources({(0, 0): 1.0, (0, 1): 0.0, (1, 0): 0.0, (1, 1): 1.0})[:2] == (0.0, 0.0)  # below 0 by mean squares


def test_a_mean_curve_has_the_iterations_that_all_runs_have_and_the_seeds_of_a_fold_as_one_value() -> None:
    curve = mean_curve({(1, None): {0: 4.0, 100: 2.0, 200: 1.0}, (2, None): {0: 4.0, 50: 3.0, 200: 2.0}})
    assert {i: estimate.mean for i, estimate in curve.items()} == {0: 4.0, 200: 1.5}
    assert curve[200] == interval([1.0, 2.0]) and mean_curve({}) == {}
    curves: Any = {(seed, fold): {0: 10.0 * fold + seed} for seed in (1, 2, 3) for fold in (0, 1)}
    assert mean_curve(curves)[0] == interval([2.0, 12.0])
    assert mean_curve({r: curve for r, curve in curves.items() if r[1] == 0})[0] == interval([1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    ("ends", "size", "least", "verdict"),
    [
        ((-0.03, -0.01), None, None, "reproduced"),
        ((-0.03, -0.01), 0.02, None, "reproduced"),
        ((-0.03, -0.01), 0.05, None, "smaller"),
        ((-0.03, 0.01), None, None, "no power"),
        ((-0.03, 0.01), 0.05, None, "excluded"),
        ((-0.03, 0.01), 0.02, 0.02, "no power"),
        ((-0.003, 0.01), None, 0.005, "excluded"),
        ((0.01, 0.03), None, None, "excluded"),
        ((None, None), 0.02, 0.01, "not tested"),
        ((-250.0, -250.0), None, 250.0, "not tested"),  # no spread
    ],
)
def test_a_claim_is_judged_by_its_interval(
    ends: tuple[float | None, float | None], size: float | None, least: float | None, verdict: str
) -> None:
    low, high = ends
    assert judge(Estimate(0.0, low, high, 5), "lower", size, least) == verdict
    assert judge(None, "lower", size, least) == "not tested"
    if verdict in ("reproduced", "smaller"):  # what Holm's correction does not bear out
        assert judge(Estimate(0.0, low, high, 5), "lower", p={0: 0.06}) == "no power"
        assert judge(Estimate(0.0, low, high, 5), "lower", size, least, p={0: 0.04}) == verdict
    mirrored = Estimate(0.0, None if high is None else -high, None if low is None else -low, 5)
    assert judge(mirrored, "higher", size, least) == verdict


def holm_by_hand(p: Sequence[float]) -> list[float]:
    """Independent of holm(): each p is compared with every subset of the family that has it (a closed test)."""
    subsets = [c for k in range(1, len(p) + 1) for c in itertools.combinations(range(len(p)), k)]
    return [min(1.0, max(len(c) * min(p[j] for j in c) for c in subsets if i in c)) for i in range(len(p))]


@pytest.mark.parametrize("claim", ["lower", "higher"])
def test_an_exclusion_is_corrected_over_its_family_as_a_reproduction_is(claim: str, tmp_path: Path) -> None:
    """Four settings that differ from p = 2 by noise around 0, claimed to be worth 0.01: for p = 3 alone the claim would
    be excluded, in the family of four it is not."""
    noise = 0.0062 * np.array([-1.3, -0.4, 0.1, 0.5, 1.1])
    sign = 1 if claim == "higher" else -1
    asked: dict[str, Any] = {"baseline": "p=2", "settings": ["*"], "claim": claim, "least": 0.01}
    made = Made(tmp_path / "sweep", compare={"all": asked, "alone": {**asked, "settings": ["p=3"]}})
    for fold in range(5):
        made.run("p=2", fold, falling(1.5))
        for i, p in enumerate((3, 4, 5, 6)):
            made.run(f"p={p}", fold, falling(1.5 + sign * (0.0002 * i + noise[fold])))
    every, alone = compared_families(sweep_of(made.path))
    shared = 1 / 9  # of ten folds, five of which have runs

    def p_of(differences: Sequence[float]) -> float:
        t = stats.ttest_1samp(differences, sign * 0.01)
        return float(2 * stats.t.sf(abs(t.statistic) * (0.2 / (0.2 + shared)) ** 0.5, t.df))

    by_hand = [p_of([*c.differences.values()]) for c in every.comparisons[0]]
    adjusted = [c.p_limits[sign * 0.01] for c in every.comparisons[0]]
    assert adjusted == pytest.approx(holm_by_hand(by_hand)) and by_hand[0] < 0.05 < min(holm_by_hand(by_hand))
    assert [c.judged(every.asked) for c in every.comparisons[0]] == ["no power"] * 4
    assert alone.comparisons[0][0].judged(alone.asked) == "excluded"


def test_a_size_that_holds_is_not_ruled_out_by_the_grid_that_it_is_read_off() -> None:
    """Thresholds that differ by one step on average, as is claimed. A grid whose first points lie close below the lower
    ones reads half a step: readings alone rule the claim out in most of 200 studies of twelve seeds."""
    rng, excluded = np.random.default_rng(0), {0.0: 0, 1.0: 0}
    for _ in range(200):
        b = rng.uniform(0.01, 0.03, 12)
        a = b + 1 + rng.normal(0, 0.3, 12)
        readings = [*map(float, np.floor(a) - np.floor(b))]
        for grid in excluded:
            p = paired_p(readings, limit=1.0, grid=grid)
            excluded[grid] += p is not None and p <= 0.05
    assert excluded[1.0] == 0 and excluded[0.0] > 100, excluded


def test_equal_values_have_equal_readings_so_a_grid_leaves_the_test_against_zero() -> None:
    readings, moved = [1.0, 0.0, 1.0, 2.0, 1.0], [1.0, 0.0, 1.0, 2.0, 3.0]
    plain = stats.ttest_1samp(readings, 0).pvalue
    assert paired_p(readings, 0.0, 0.0, 5.0) == paired_p(readings) == pytest.approx(plain)
    for values, grid in ((readings, 0.25), (moved, 0.5)):
        shifted = stats.ttest_1samp(values, 4.0 - grid).pvalue  # the nearest that the grid leaves open
        assert paired_p(values, 0.0, 4.0, grid) == pytest.approx(shifted)
    assert paired_p(readings, 0.0, 1.2, 0.5) == 1.0
    wide = Estimate(-0.01, -0.03, 0.01, 5, grid=0.03)
    assert judge(wide, "lower", size=0.05) == "no power" and judge(wide, "lower", size=0.07) == "excluded"


def test_a_contrast_is_the_test_of_its_weighted_sums(tmp_path: Path) -> None:
    """A difference of differences, and a sum with other weights, against scipy's test of the sums of each fold."""
    sums: list[Any] = [{"b/p=3": 1, "b/p=2": -1, "a/p=3": -1, "a/p=2": 1}, {"a/p=2": 0.5, "b/p=2": 0.5, "a/p=3": -1}]
    asked = {"contrast": sums, "claim": "lower", "least": 0.01}
    made = Made(tmp_path / "sweep", parts={"a": {}, "b": {}}, compare={"gain": asked})
    losses = {s: 1.5 + 0.02 * np.random.default_rng(i).normal(size=5) for i, s in enumerate(sums[0])}
    losses["b/p=3"] = losses["b/p=2"] + losses["a/p=3"] - losses["a/p=2"] - 0.1 - 0.01 * np.arange(5)
    for fold, setting in itertools.product(range(5), losses):
        made.run(setting, fold, falling(float(losses[setting][fold])))
    sweep = sweep_of(made.path)
    (family,) = compared_families(sweep)
    by_hand = []
    for c, weights in zip(family.comparisons[0], sums, strict=True):
        of_fold = np.sum([weight * losses[setting] for setting, weight in weights.items()], axis=0)
        assert [*c.differences.values()] == pytest.approx(of_fold.tolist())
        t = stats.ttest_1samp(of_fold, 0)  # of ten folds, five of which have runs
        by_hand.append(float(2 * stats.t.sf(abs(t.statistic) * (0.2 / (0.2 + 1 / 9)) ** 0.5, t.df)))
        assert c.p["corrected t"] == pytest.approx(by_hand[-1])
    assert [c.adjusted["corrected t"] for c in family.comparisons[0]] == pytest.approx(holm_by_hand(by_hand))
    first, second = rows_of(conclusion_table(family))
    assert (first["A"], first["B"]) == ("b/p=3 + a/p=2", "b/p=2 + a/p=3") and first["pairs"] == "5 of 5"
    assert (second["A"], second["B"]) == ("0.5 × a/p=2 + 0.5 × b/p=2", "a/p=3")
    assert first["claim: lower loss (least worth having: 0.01)"] == "reproduced"
    title = {figure.title: figure.spec for figure in family_figures(sweep, [family])["gain"]}
    assert "b/p=3 + a/p=2 − (b/p=2 + a/p=3)" in json.dumps(title, ensure_ascii=False)


def test_pairs_are_matched_by_seed_and_fold(tmp_path: Path) -> None:
    made = Made(tmp_path / "sweep", compare={"x": {"pairs": [["p=3", "p=2"]]}})
    for fold in (4, 1, 0, 2):  # in another order
        made.run("p=3", fold, falling(1.0 + fold))
    for fold in (0, 1, 3, 4):
        made.run("p=2", fold, falling(1.1 + fold + 0.01 * fold))
    made.run("p=2", 2, falling(9.0), seed=2)  # fold 2 of another seed is no partner
    for p, seed in ((2, 3), (3, 3)):
        made.run(f"p={p}", None, falling(1.5 - p / 10), seed=seed)  # seeds pair where there are no folds
    ((comparison,), *_) = compared_families(sweep_of(made.path))[0].comparisons
    differences = {(1, 4): -0.14, (1, 1): -0.11, (1, 0): -0.1, (3, None): -0.1}
    assert comparison.differences == pytest.approx(differences) and comparison.planned == 4


def test_a_sweep_with_fewer_than_two_pairs_says_so(tmp_path: Path) -> None:
    pairs = [["p=3", "p=2"], ["p=3", "p=9"], ["p=4", "p=2"]]
    made = Made(tmp_path / "sweep", compare={"x": {"pairs": pairs}})
    made.run("p=2", None, falling(1.5))
    made.run("p=3", None, falling(1.4))
    made.plan("p=4", 1, None)
    sweep = sweep_of(made.path)
    rows = rows_of(comparison_table(sweep, compared_families(sweep)[0].comparisons[0], METRICS[0]))
    few, none = "fewer than 2 complete pairs: no test", "no pairs of one seed and one held-out text"
    assert [row["verdict on A"] for row in rows] == [few, none, few]
    assert rows[0]["mean of A − B"] == "−0.1000" and rows[0]["t: p"] == "–"
    (row,) = rows_of(part_table(sweep, ["p=2"]))
    assert (row["mean of the runs' minima"], row["SD"]) == ("1.5000", "–")


def test_folds_of_other_text_are_no_pairs(tmp_path: Path) -> None:
    made = Made(tmp_path / "sweep", compare={"x": {"baseline": "p=2", "settings": ["*"]}})
    for fold in range(3):
        made.run("p=2", fold, falling(1.5))
        for p, changes in ((3, {"folds": 5}), (4, {"split": "shuffled"})):
            path = made.plan(f"p={p}", 1, fold, data=TinyShakespeareOptions(fold=fold, **changes))
            finish(path, falling(1.4 - fold / 100))
    for seed in range(3):  # runs without a fold of the sweep: of another corpus, of another fold by an override
        made.run("p=2", None, falling(1.5), seed=seed)
        for p, data in ((5, PythonDocsOptions()), (6, TinyShakespeareOptions(fold=5))):
            finish(made.plan(f"p={p}", seed, None, data=data), falling(1.4 - seed / 100))
    found = compared_families(sweep_of(made.path))[0].comparisons[0]
    assert [c.a for c in found] == ["p=3", "p=4", "p=5", "p=6"]
    for c in found:
        assert (c.planned, c.verdict("lower", "higher")) == (0, "no pairs of one seed and one held-out text")


def test_runs_of_a_text_that_changed_between_them_are_no_pair(tmp_path: Path) -> None:
    made = Made(tmp_path / "sweep", compare={"x": {"baseline": "p=2", "settings": ["*"]}})
    for seed in (1, 2, 3):
        made.run("p=2", None, falling(1.5), seed=seed)
        path = made.run("p=3", None, falling(1.4 - seed / 100), seed=seed)
        file, other = path / "summary.json", ("5eed", "f00d", "5eed, f00d")[seed - 1]  # the third: one of the two
        file.write_text(file.read_text().replace("5eed", other))
    c = compared_families(sweep_of(made.path))[0].comparisons[0][0]
    assert [*c.differences] == [(1, None), (3, None)] and c.planned == 3


def test_what_is_left_where_runs_diverged_is_no_test(tmp_path: Path) -> None:
    made = Made(tmp_path / "sweep", compare={"x": {"baseline": "p=2", "settings": ["*"], "claim": "lower"}})
    for fold in range(10):
        made.run("p=2", fold, falling(1.5 + fold / 100))
        finish(made.plan("p=3", 1, fold), falling(1.4), status="diverged" if fold % 2 else "done", reason="nan")
    (family,) = compared_families(sweep_of(made.path))
    c = family.comparisons[0][0]
    assert c.p["t"] < 0.001 and c.verdict("lower", "higher") == "5 of 10 pairs diverged: no test"
    assert c.judged(family.asked) == "not tested"
