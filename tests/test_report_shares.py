"""scripts/report.py: final losses over an axis of one's own, and what is left of a difference."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.reports import Made, charts_of, falling, finish, rows_of, sweep_of, text_of
from scipy import optimize, stats

from core.schema import ConfigError
from scripts import report
from scripts.reporting.charts import Series, styles, value_axis
from scripts.reporting.comparisons import compared_families, shares
from scripts.reporting.figures import family_figures, per_update
from scripts.reporting.numbers import interval, ratio, within
from scripts.reporting.page import caveats, outline
from scripts.reporting.runs import Replicate
from scripts.reporting.stored import read_stored
from scripts.reporting.tables import Table, facts
from sweeps.definition import Definition, load_sweep

SHARED = 1 / 9


def limit(pairs: np.ndarray, start: float, shared: float) -> float:
    """The ratio r, from `start` outwards, at which the t test of a - r b has p = 0.05."""
    n = len(pairs)

    def excess(r: float) -> float:
        d = pairs[:, 0] - r * pairs[:, 1]
        return float(abs(d.mean()) / (d.std(ddof=1) * np.sqrt(1 / n + shared)) - stats.t.isf(0.025, n - 1))

    middle = pairs[:, 0].mean() / pairs[:, 1].mean()
    return float(optimize.brentq(excess, middle, start))


@pytest.mark.parametrize("shared", [0.0, SHARED])
def test_a_ratios_interval_has_the_ratios_that_a_t_test_does_not_refuse(shared: float) -> None:
    pairs = np.random.default_rng(1).normal([0.1, 1.0], [0.05, 0.1], size=(10, 2))
    found = ratio([(float(a), float(b)) for a, b in pairs], shared)
    assert found is not None and found.low is not None and found.high is not None
    assert found.mean == pytest.approx(pairs[:, 0].mean() / pairs[:, 1].mean())
    ends = limit(pairs, -3.0, shared), limit(pairs, 3.0, shared)
    assert (found.low, found.high) == pytest.approx(ends)


def test_a_ratio_to_what_cannot_be_told_from_zero_has_no_interval() -> None:
    assert ratio([(1.0, 1.0), (1.0, -1.1), (2.0, 0.3)]) is None
    assert ratio([(1.0, 1.0)]) is None and ratio([(0.0, 0.0), (0.0, 0.0)]) is None


def test_a_setting_alone_has_its_own_interval() -> None:
    found = within({"a": {(1, k): x for k, x in enumerate([2.0, 2.1, 2.2])}})["a"]
    assert found == interval([2.0, 2.1, 2.2]) and found.low is not None and found.low < 1.9


def test_what_all_settings_have_in_common_is_no_part_of_their_intervals() -> None:
    """For two settings the interval of each is that of half their paired difference, times the root of two."""
    rng = np.random.default_rng(2)
    folds: list[Replicate] = [(1, k) for k in range(6)]
    level, a, b = rng.normal(0, 10, 6), rng.normal(0, 0.1, 6), rng.normal(0, 0.1, 6)
    offsets = {"a": 1.5 + a, "b": 1.2 + b}
    values = {name: dict(zip(folds, level + of, strict=True)) for name, of in offsets.items()}
    found = within({"a": values["a"], "b": {**values["b"], (1, 9): 50.0}})  # b alone has fold 9
    difference = np.array([values["a"][r] - values["b"][r] for r in folds])
    half = stats.t.isf(0.025, 5) * difference.std(ddof=1) / 2 * np.sqrt(2) / np.sqrt(6)
    for name, point in found.items():
        assert point.mean == pytest.approx(np.mean([values[name][r] for r in folds])) and point.n == 6
        assert point.low is not None and point.mean - point.low == pytest.approx(half)
    assert within({"a": values["a"], "b": {(1, 9): 50.0}}) == {} == within({})


# -----------------------------------------------------------------------------
# In a report

PLACES = {"low": 0.5, "high": 2}
SWEEP = {
    "parts": {"a": {}, "b": {}},
    "compare": {
        "a": {"baseline": "a/p=2", "settings": ["a/p=3"]},
        "b": {"baseline": "b/p=2", "settings": ["b/p=3"], "share_of": "a"},
    },
}


def test_the_share_that_is_left_is_of_the_same_folds_by_iteration(tmp_path: Path) -> None:
    made = Made(tmp_path / "sweep", **SWEEP)
    rng, differences = np.random.default_rng(3), {}
    for fold, part in itertools.product(range(5), "ab"):
        if (fold, part) == (4, "b"):
            made.plan("b/p=3", 1, 4)  # not begun
            continue
        effect = {"a": 0.2, "b": 0.05}[part] + float(rng.normal(0, 0.01))
        differences[fold, part] = -effect
        made.run(f"{part}/p=2", fold, falling(1.5 + 0.1 * fold))
        made.run(f"{part}/p=3", fold, falling(1.5 + 0.1 * fold - effect))
    sweep = sweep_of(made.path)
    families = compared_families(sweep)
    found = shares(sweep, families, families[1])
    wanted = ratio([(differences[fold, "b"], differences[fold, "a"]) for fold in range(4)], SHARED)
    assert wanted is not None and list(found) == ["p=3"] and list(found["p=3"]) == [10, 20, 30, 40]
    for point in found["p=3"].values():
        assert (point.mean, point.low, point.high) == pytest.approx((wanted.mean, wanted.low, wanted.high))
    assert shares(sweep, families, families[0]) == {}
    assert "Interval and p are corrected for the text that folds share" in text_of(sweep)
    tables = [item for section in outline(sweep, families) for item in section.items if isinstance(item, Table)]
    (row, *_) = rows_of(next(table for table in tables if "that is left" in table.title))
    assert row["iteration"] == "10" and row["p=3"].startswith(f"{wanted.mean:.0%} ({wanted.low:.0%} to ")
    report.report(sweep, tmp_path / "out", [])
    drawn = charts_of(tmp_path / "out")["share_b"]
    assert (tmp_path / "out" / "share_b.svg").is_file() and "share_a" not in charts_of(tmp_path / "out")
    ends = [row for rows in drawn["datasets"].values() for row in rows if "low" in row]
    assert ends and all(row["value"] == pytest.approx(wanted.mean) for row in ends)


def test_pairs_of_a_share_are_those_of_one_name(tmp_path: Path) -> None:
    """Without parts, names leave out what the settings of a family share; several pairs keep their parts apart."""
    leak = Made(tmp_path / "leak", compare={
        "near": {"pairs": [["split=near,p=4", "split=near,p=2"]]},
        "far": {"pairs": [["split=far,p=4", "split=far,p=2"]], "share_of": "near"},
    })  # fmt: skip
    parts = Made(tmp_path / "parts", parts={"a": {}, "m": {}, "n": {}}, compare={
        "a": {"pairs": [["a/p=3", "a/p=2"]]},
        "both": {"pairs": [["m/p=3", "m/p=2"], ["n/p=3", "n/p=2"], ["n/p=4", "n/p=2"]], "share_of": "a"},
    })  # fmt: skip
    for fold in range(4):
        for split, gain in (("near", 0.2), ("far", 0.1)):
            leak.run(f"split={split},p=2", fold, falling(1.5 + 0.1 * fold))
            leak.run(f"split={split},p=4", fold, falling(1.5 + 0.1 * fold - gain - 0.001 * fold))
        for part, gain in (("a", 0.2), ("m", 0.1), ("n", 0.02)):
            parts.run(f"{part}/p=2", fold, falling(1.5 + 0.1 * fold))
            parts.run(f"{part}/p=3", fold, falling(1.5 + 0.1 * fold - gain - 0.001 * fold))
    left: dict[str, float] = {}
    for made in (leak, parts):
        families = compared_families(sweep_of(made.path))
        left |= {name: of[40].mean for name, of in shares(sweep_of(made.path), families, families[1]).items()}
        assert family_figures(sweep_of(made.path), families)["far" if made is leak else "both"]  # n/p=4 was not planned
    made = Made(tmp_path / "one", parts={"m": {}}, compare={"x": {"pairs": [["m/p=3", "m/p=2"], ["n/p=3", "n/p=2"]]}})
    made.run("m/p=2", 0, falling(1.5))  # part n was not asked for
    (family,) = compared_families(sweep_of(made.path))
    assert [*family.short_names().values()] == ["m/p=3", "m/p=2", "n/p=3", "n/p=2"]
    assert left == {"p=4": pytest.approx(0.5, abs=0.01), "m/p=3 − m/p=2": pytest.approx(0.5, abs=0.01),
                    "n/p=3 − n/p=2": pytest.approx(0.1, abs=0.01)}  # fmt: skip


def test_final_losses_stand_over_the_words_of_the_settings(tmp_path: Path) -> None:
    """A line for each rest of a name; folds that a setting has not are no part of it, and are named."""
    names = [f"{word},p={p}" for p in (2, 3) for word in PLACES]
    compare = {"x": {"pairs": [[names[2], names[0]], [names[3], names[1]]], "x": "a start", "x_of": PLACES}}
    made = Made(tmp_path / "sweep", compare=compare)
    finals = {}
    for fold, (i, name) in itertools.product(range(3), enumerate(names)):
        finals[name, fold] = 1.5 + fold + 0.01 * i + 0.001 * fold * i
        path = made.plan(name, 1, fold)
        if (name, fold) != (names[3], 2):
            finish(path, {0: 4.0, 40: finals[name, fold]})
    sweep = sweep_of(made.path)
    report.report(sweep, tmp_path / "out", [])
    chart = charts_of(tmp_path / "out")["final_x"]
    rows = {(row["setting"], row["x"]): row for row in chart["datasets"]["rows"]}
    assert list(rows) == [("p=2", 0.5), ("p=3", 0.5), ("p=2", 2), ("p=3", 2)]
    for (line, x), row in rows.items():
        word = next(word for word, place in PLACES.items() if place == x)
        assert row["value"] == pytest.approx(np.mean([finals[f"{word},{line}", k] for k in (0, 1)])) and row["n"] == 2
        assert row["high"] - row["low"] < 0.2  # the folds are 1 apart
    assert "high,p=3" in text_of(sweep).partition("Runs that are not done")[2]


def test_final_losses_of_two_parts_have_a_line_each(tmp_path: Path) -> None:
    pairs = [["a/high,p=2", "a/low,p=2"], ["b/high,p=2", "b/low,p=2"]]
    made = Made(tmp_path / "sweep", parts={"a": {}, "b": {}}, compare={
        "x": {"pairs": pairs, "x": "a start", "x_of": PLACES}
    })  # fmt: skip
    for name in (name for pair in pairs for name in pair):
        finish(made.plan(name, 1, 0), {0: 4.0, 40: 1.5})
    figures = family_figures(sweep_of(made.path), compared_families(sweep_of(made.path)))["x"]
    rows = next(figure for figure in figures if figure.name == "final_x").spec["datasets"]["rows"]
    assert {(row["setting"], row["x"]) for row in rows} == {(f"{part}/p=2", x) for part in "ab" for x in (0.5, 2)}


def test_a_report_made_again_still_says_that_a_plugin_changed(tmp_path: Path) -> None:
    made = Made(tmp_path / "sweep")
    for fold, sha256 in enumerate(("5eed", "f00d")):
        file = made.run("p=2", fold, falling(1.5)) / "summary.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "plugins": {"mine": sha256}}))
    sweep = sweep_of(made.path)
    report.report(sweep, tmp_path / "out", [])
    again = read_stored(tmp_path / "out", sweep.name)
    assert facts(again) == facts(sweep)
    assert facts(again)["plugins"] == "mine (2 versions)"
    (said,) = caveats(again, [])
    assert said == "the plugin mine changed between runs: 2 versions of it are compared"
    assert f"**{said}.**" in text_of(again)


def test_a_report_names_what_the_runs_of_one_setting_differ_in(tmp_path: Path) -> None:
    """Sweeps of an earlier version may have such runs, and stored runs may be joined by those of other settings."""
    made = Made(tmp_path / "sweep")
    changes: list[dict[str, Any]] = [{}, {"batch_size": 2, "log_interval": 7}]
    for fold, changed in enumerate(changes):
        finish(made.plan("p=2", 1, fold, **changed), {0: 4.0, 40: 1.5})
        finish(made.plan("p=3", 1, fold), {0: 4.0, 40: 1.5})
    (said,) = caveats(sweep_of(made.path), [])
    assert said == "the runs of p=2 differ in batch_size 2, 64: their mean mixes several settings"
    assert f"**{said}.**" in text_of(sweep_of(made.path))


def test_a_report_names_runs_of_several_ranks(tmp_path: Path) -> None:
    made = Made(tmp_path / "sweep")
    for fold in (0, 1):
        path = made.plan("p=2", 1, fold)
        finish(path, {0: 4.0, 40: 1.5})
        summary = json.loads((path / "summary.json").read_text())
        (path / "summary.json").write_text(json.dumps({**summary, "ranks": 1 + fold}))
    sweep = sweep_of(made.path)
    report.report(sweep, tmp_path / "out", [])
    for one in (sweep, read_stored(tmp_path / "out", sweep.name)):
        assert facts(one)["ranks"] == "1, 2"
        assert caveats(one, []) == ["the runs of p=2 differ in ranks 1, 2: their mean mixes several settings"]


def test_a_report_names_a_comparison_whose_baseline_is_no_setting(tmp_path: Path) -> None:
    compare = {"p": {"baseline": "p=2.0"}, "q": {"baseline": "p=2"}, "r": {"pairs": [["p=2", "p=5"]]}}
    made = Made(tmp_path / "sweep", compare=compare)
    for p in (2, 3):
        made.run(f"p={p}", 0, falling(1.5))
    said = [f"compare.{name} is no setting of this sweep; it has p=2, p=3" for name in ("p: p=2.0", "r: p=5")]
    assert caveats(sweep_of(made.path), compared_families(sweep_of(made.path))) == said


def test_a_claim_may_be_about_where_the_minimum_is(tmp_path: Path) -> None:
    """p = 3 has its minimum ten to twenty iterations earlier, and the same one."""
    compare = {"where": {"baseline": "p=2", "metric": "iter_of_min", "claim": "lower", "least": 5}}
    made = Made(tmp_path / "sweep", compare=compare)
    for fold in range(5):
        made.run("p=2", fold, falling(1.5, 40))
        made.run("p=3", fold, falling(1.5, 30 if fold else 20))
    sweep = sweep_of(made.path)
    ((family,), text) = compared_families(sweep), text_of(sweep)
    assert [metric.key for metric in family.metrics] == ["iter_of_min"]
    assert [*family.comparisons[0][0].differences.values()] == [-20, -10, -10, -10, -10]
    column = r"\| A − B in iteration of the lowest validation loss \(95 % interval\) \|"
    assert re.search(rf"\| claim: earlier.* {column}", text)
    step = sweep.runs[0].config["eval_interval"]
    assert f"| p=3 | earlier | reproduced | −12.0 (−18.9 to −5.1, grid ± {2 * step}) |" in text
    (one,), asked = family.comparisons[0], family.asked
    assert one.judged(asked) == "reproduced" and one.judged(replace(asked, claim="higher")) == "excluded"
    assert (one.grid, one.judged(replace(asked, claim="higher", least=1.0))) == (2 * step, "excluded")
    assert "difference_where" not in text and "### Iteration of the lowest" in text and "### Lowest" not in text


def test_a_report_says_that_no_run_has_turned_up_yet(tmp_path: Path) -> None:
    made = Made(tmp_path / "sweep", compare={"p": {"baseline": "p=2"}})
    for p in (2, 3):
        made.run(f"p={p}", 0, falling(1.5))
    said = "**All {} runs that are done have their lowest validation loss at their last evaluation**"
    assert said.format(2) in text_of(sweep_of(made.path))
    made.plan("p=3", 1, 1)  # of one that is not done nothing is known
    assert said.format(2) in text_of(sweep_of(made.path))
    made.run("p=2", 1, falling(1.5, 30))
    assert "at their last evaluation" not in text_of(sweep_of(made.path))


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"share_of": "z"}, "compare.a.share_of=z is no entry of compare"),
        ({"least": 5}, "compare.a: least and size need claim=lower or higher"),
        ({"x": "a start"}, "x and x_of are given together"),
        ({"x": "a start", "x_of": {"half": -1}}, "must be {word: number > 0}"),
        ({"metric": "seconds", "share_of": "a"}, "x_of and share_of draw val/loss, not metric"),
    ],
)
def test_what_a_report_could_not_draw_is_refused_before_a_run(more: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Definition(compare={"a": {"baseline": "p=2", **more}}).check()


def test_the_temperatures_of_p_nano_are_the_multiples_that_their_names_say() -> None:
    """Of the matched alpha, which has at every p the logit spread that the square root of d has at p = 2."""
    from model.gpt import mean_norm_ratio

    sweep = load_sweep("p_nano", {})
    places = sweep.families["temperature"].x_of
    for name, words in sweep.parts["temperature"].grid["words"].items():
        settings = dict(word.split("=") for word in words)
        p, alpha = float(settings["qk_norm.p"]), settings["qk_norm.alpha_init"]
        matched = np.sqrt(32) / mean_norm_ratio(p, 32) ** 2
        if alpha != "matched":
            assert float(alpha) / matched == pytest.approx(places[name.split(",")[1]], rel=1e-3)


def test_short_names_leave_out_what_all_compared_settings_share(tmp_path: Path) -> None:
    """And the conclusions rank those whose names are no numbers."""
    names = ["a/none,p=2", "a/rms,p=2", "a/clip,p=2"]
    made = Made(tmp_path / "sweep", parts={"a": {}}, compare={"x": {"baseline": names[0], "settings": ["a/*"]}})
    for (i, name), fold in itertools.product(enumerate(names), range(3)):
        finish(made.plan(name, 1, fold, batch_size=4 + i), falling(1.5 - 0.1 * i + 0.01 * i * fold))
    (family,) = compared_families(sweep_of(made.path))
    assert family.short_names() == dict(zip(names, ["none", "rms", "clip"], strict=True))
    assert [c.a for c in family.ranked()] == [names[2], names[1]]
    text = text_of(sweep_of(made.path))
    assert "### Comparison x (B: none)\n\n| A | verdict on A | A − B (95 % interval) |" in text
    assert "| a/clip,p=2 | batch_size=6 |" in text  # what each setting is


def test_a_line_at_zero_is_on_the_axis_and_sums_are_drawn_per_update() -> None:
    series = [Series("a", styles({"": {"a": "a"}})["a"], {(1, None): {0: 100.0, 10: 10_000.0}})]
    assert value_axis(series, "x")["scale"]["type"] == "log"
    scale = value_axis(series, "x", zero=True)["scale"]
    assert scale["domain"][0] < 0 < 10_000 < scale["domain"][1] and "type" not in scale
    never_negative: Any = {(seed, None): {10: value} for seed, value in enumerate((0.0, 0.1, 2.0))}
    scale = value_axis([Series("a", styles({"": {"a": "a"}})["a"], never_negative)], "x")["scale"]
    assert 0.6 < scale["domain"][0] < 0.7 < scale["domain"][1] < 0.8  # the mean's, not that of the interval to 3.5
    sums = {0: 3.0, 10: 20.0, 15: 20.0}
    assert per_update(sums, 15) == {0: 3.0, 10: 2.0, 15: 5.0}  # updates 11 to 14
    assert per_update(sums, 16) == {0: 3.0, 10: 2.0, 15: 4.0}
