"""scripts/report.py where learning rates are swept: the highest stable one, how the next one fails."""

from pathlib import Path

from helpers.reports import Curve, Made, at_rates, charts_of, falling, rows_of, sweep_of, words_of

from scripts import report
from scripts.reporting.rates import runs_by_rate, stable_by_replicate
from scripts.reporting.runs import read_sweep
from scripts.reporting.tables import part_table, stability_table


def test_the_highest_stable_rate_and_how_the_next_one_fails(tmp_path: Path) -> None:
    sweep = Made(tmp_path / "sweep", also={"train/loss": "last"})
    for seed in (1, 2):
        finals = {0.1: 2.0, 0.2: 1.8 + seed / 10, 0.4: 2.5, 0.8: 3.1, 1.6: 2.0}
        at_rates(sweep, 2, seed, {rate: {0: 4.0, 10: 3.5, 20: 3.2, 40: final} for rate, final in finals.items()})
        good: Curve = {0: 4.0, 40: 2.0}
        at_rates(sweep, 3, seed, {0.1: good, 0.2: good, 0.4: {0: 4.0} if seed == 2 else good})
    at_rates(sweep, 4, 1, {0.1: falling(2.0), 0.2: {0: 4.0, 20: 4.6, 40: 1.8}})
    table = stability_table(sweep_of(sweep.path))
    report.report(read_sweep(sweep.path, "made"), tmp_path / "out", [])
    panels = (tmp_path / "out" / "stability_train_loss.svg").read_text()
    text = (tmp_path / "out" / "table.md").read_text()
    assert {"learning rate 0.1", "learning rate 1.6", "p=2", "p=3"} <= {*words_of(panels)}
    drawn = charts_of(tmp_path / "out")["stability"]["datasets"]["rows"]
    assert [(row["x"], row["n"]) for row in drawn if row["setting"] == "p=3"] == [(0.1, 2), (0.2, 2), (0.4, 1)]
    ringed = {(row["setting"], row["x"]) for row in drawn if row["ringed"]}
    assert ringed == {("p=2", 0.8), ("p=2", 1.6), ("p=3", 0.4), ("p=4", 0.2)}
    assert table is not None
    two, three, four = rows_of(table)
    assert (four["best rate"], four["highest stable rate"]) == ("0.2", "0.1")
    assert four["how the next one fails"] == "0.2: a loss of 4.6; the first was 4.0000"
    assert (two["best rate"], two["its final loss"]) == ("0.2", "1.9500")
    assert (two["highest stable rate"], two["how the next one fails"]) == ("0.4", "0.8: final loss 3.1000")
    assert three["highest stable rate"] == "0.2" and three["of each run alone"] == "seed 1: 0.4, seed 2: 0.2"
    assert three["how the next one fails"] == "0.4: 1 of 2 diverged (train/loss nan at iteration 7)"
    assert "Highest stable learning rate" in text


def test_a_seed_that_lacks_a_rate_is_judged_by_those_that_it_has(tmp_path: Path) -> None:
    sweep = Made(tmp_path / "sweep")
    at_rates(sweep, 2, 1, {rate: falling(2.0) for rate in (0.1, 0.2)})
    at_rates(sweep, 2, 2, {0.1: falling(2.0)})
    assert stable_by_replicate(runs_by_rate(sweep_of(sweep.path))["p=2"]) == {(1, None): 0.2, (2, None): 0.1}


def test_a_diverged_run_with_a_damaged_summary_stops_no_report(tmp_path: Path) -> None:
    sweep = Made(tmp_path / "sweep")
    at_rates(sweep, 2, 1, {0.1: falling(2.0), 0.2: {0: 4.0}})
    (damaged,) = [run for run in sweep_of(sweep.path).runs if not run.done]
    (sweep.path / damaged.id / "summary.json").write_text('{"val/loss": 1.0, "sha256": "0"}')
    (run,) = [run for run in sweep_of(sweep.path).runs if not run.done]
    assert run.state == damaged.state and "val/loss" not in run.summary and run.losses == {0: 4.0}


def test_two_metrics_of_one_name_have_a_column_each(tmp_path: Path) -> None:
    sweep = Made(tmp_path / "sweep", also={"attn/max_logit": "max", "qk_clip/max_logit": "max"})
    at_rates(sweep, 2, 1, {0.1: falling(2.0)})
    found = sweep_of(sweep.path)
    assert sum("max of largest attention logit" in name for name in part_table(found, found.settings).columns) == 2


def test_three_learning_rates_get_no_figure_of_final_losses(tmp_path: Path) -> None:
    sweep = Made(tmp_path / "sweep")
    at_rates(sweep, 2, 1, {rate: {0: 4.0, 20: 3.0, 40: 2.0 + rate} for rate in (0.1, 0.2, 0.4)})
    report.report(read_sweep(sweep.path, "made"), tmp_path / "out", [])
    text = (tmp_path / "out" / "table.md").read_text()
    assert "Highest stable learning rate" in text and "stability" not in charts_of(tmp_path / "out")
    assert not (tmp_path / "out" / "stability.svg").exists()


def test_the_run_that_rises_most_decides_and_not_the_one_with_the_highest_loss(tmp_path: Path) -> None:
    sweep = Made(tmp_path / "sweep")
    for seed, (first, peak) in {1: (4.30, 4.85), 2: (4.45, 4.90)}.items():
        at_rates(sweep, 2, seed, {0.1: falling(2.0), 0.2: {0: first, 20: peak, 40: 2.0}})
    table = stability_table(sweep_of(sweep.path))
    assert table is not None
    (row,) = rows_of(table)
    assert row["highest stable rate"] == "0.1" and row["of each run alone"] == "seed 1: 0.1, seed 2: 0.2"
    assert row["how the next one fails"] == "0.2: a loss of 4.85; the first was 4.3000"
