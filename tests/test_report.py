"""scripts/report.py: sweeps of every state, their tables and figures, the page in a browser."""

import fcntl
import hashlib
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import reports
from helpers.reports import Made, falling, finish, made, rows_of, state, sweep_of, text_of
from scipy import stats

from core.files import NEXT
from core.schema import ConfigError
from data.options import RandomOptions
from model.options import LpNormOptions
from scripts import report
from scripts.reporting import charts
from scripts.reporting.charts import LOSS, styles, value_axis
from scripts.reporting.comparisons import compared_families
from scripts.reporting.figures import metric_panels, series_of
from scripts.reporting.page import caveats
from scripts.reporting.runs import METRICS, kept, read_curves, read_sweep, thinned
from scripts.reporting.stored import joined, read_stored
from scripts.reporting.tables import comparison_table, facts, fault_table, missing_tables, part_table, readings_table
from sweeps.launch import without_stored
from sweeps.plan import read_plan
from training.config import FaultOptions

__all__ = ["made"]  # a fixture


def test_a_family_is_compared_fold_by_fold(made: Made) -> None:
    sweep = sweep_of(made.path)
    (family,) = compared_families(sweep)
    loss = family.comparisons[0]
    assert [(c.a, c.b) for c in loss] == [("a/p=3", "a/p=2"), ("a/p=4", "a/p=2")]
    expected = [stats.ttest_rel(reports.LOSSES[p], reports.LOSSES[2]) for p in (3, 4)]
    assert [c.p["t"] for c in loss] == pytest.approx([t.pvalue for t in expected])
    assert loss[0].adjusted["t"] == pytest.approx(2 * expected[0].pvalue)
    three, four = rows_of(comparison_table(sweep, loss, METRICS[0]))
    assert (three["verdict on A"], four["verdict on A"]) == ("lower loss", "not told apart")
    assert (three["pairs"], three["mean of A − B"]) == ("5 of 5", "−0.0500")
    assert (three["paper's A − B"], four["paper's A − B"]) == ("−0.0405", "–")
    t = expected[0].statistic * (0.2 / (0.2 + 1 / 9)) ** 0.5  # of data.folds=10
    assert three["corrected t: Holm p"] == f"{2 * 2 * stats.t.sf(abs(t), 4):.4f}"
    low, high = expected[0].confidence_interval()
    assert three["95 % interval"] == f"{low:+.4f} to {high:+.4f}".replace("-", "−")


def test_times_and_iterations_are_compared_too(made: Made) -> None:
    sweep = sweep_of(made.path)
    (family,) = compared_families(sweep)
    iterations = rows_of(comparison_table(sweep, family.comparisons[1], METRICS[1]))
    assert [row["verdict on A"] for row in iterations] == ["identical", "identical"]
    seconds = rows_of(comparison_table(sweep, family.comparisons[2], METRICS[2]))
    assert seconds[1]["mean of A − B"] == "+2.00" and seconds[1]["% of B"] == "+1.92"  # of 104 s
    rows = rows_of(part_table(sweep, sweep.parts["a"]))  # the paper's numbers, beside ours
    assert [row["paper, at its own scale"] for row in rows] == ["1.40506", "1.36454", "–"]
    assert [row["median seconds"] for row in rows] == ["104.0", "105.0", "106.0"]


def test_other_metrics_are_of_the_lines_or_of_the_summary(made: Made) -> None:
    made.definition["also"] = {
        "train/loss": ["last", "roughness"], "parameters": "summary", "eval/cloze/acc": "summary", "val/loss": "last"
    }  # fmt: skip
    for accuracy, p in ((0.5, 2), (0.75, 3)):
        run = made.run(f"a/p={p}", 5, {i: 2 - i / 100 for i in reports.STEPS})
        about = {"iter": 40, "metrics": {"cloze": {"acc": accuracy}}}
        (run / "evaluation.json").write_text(json.dumps({"about": about}))
    sweep = sweep_of(made.path)
    row = rows_of(part_table(sweep, ["a/p=2"]))[0]
    assert row["parameters"] == "4,242" and float(row["mean of last training loss"]) > 1
    names = [f"{metric.key} {metric.reduction}" for metric in sweep.metrics[3:]]
    assert names == [
        "train/loss last", "train/loss roughness", "parameters None", "eval/cloze/acc None", "val/loss last"
    ]  # fmt: skip
    _, roughness, parameters, accuracy_of, loss = (of[0].values for of in compared_families(sweep)[0].comparisons[3:])
    assert loss[1, 5] == (1.6, 1.6) and parameters[1, 0] == (4242, 4242) and accuracy_of == {(1, 5): (0.75, 0.5)}
    # train/loss is 1.9, 3.0, 1.8, 1.7, 1.6, 1.5
    assert roughness[1, 5][0] == pytest.approx((1.15 + 0.55 + 0 + 0) / 4)
    assert "parameters" not in sweep.runs[0].curves
    made.run("a/p=4", 5, falling(1.4))  # not evaluated
    shots = {"num_fewshot": {"cloze": 0}}
    before = made.path / made.lines[-3]["id"]
    for conditions in (shots, {"num_fewshot": {"cloze": 0, "more": 5}}, {"num_fewshot": {"cloze": 1}, "limit": 5}):
        of_before = about | shots | {"metrics": {"cloze": {"acc": 0.5}}}
        (before / "evaluation.json").write_text(json.dumps({"about": of_before}))
        (run / "evaluation.json").write_text(json.dumps({"about": about | conditions}))
        report.report(sweep_of(made.path), made.path / "stored", [])
        made_once = {file.name: file.read_bytes() for file in (made.path / "stored").iterdir()}
        stored = read_stored(made.path / "stored", "made")
        report.report(stored, made.path / "stored", [])
        assert {file.name: file.read_bytes() for file in (made.path / "stored").iterdir()} == made_once
        said = [said for said in caveats(stored, []) if "evaluated" in said]
        unlike = "the runs were evaluated by cloze in different ways: limit=5, num_fewshot=1; num_fewshot=0"
        assert said == ([unlike] if "limit" in conditions else [])
    (run / "evaluation.json").write_text(json.dumps({"about": about | {"iter": 20}}))  # the run went on after it
    assert [run.summary.get("eval/cloze/acc") for run in sweep_of(made.path).runs[-3:]] == [0.5, None, None]
    (run / "summary.json").write_text(json.dumps(json.loads((run / "summary.json").read_text()) | {"run_id": run.name}))
    (run / "evaluation.json").write_text(json.dumps({"about": about | {"run_id": "another"}}))
    (reason,) = (one.state.reason for one in sweep_of(made.path).runs if not one.done)
    assert reason == "done, but evaluation.json is of another run"


def test_a_bad_metric_is_named(made: Made) -> None:
    rule = "must be one of last, max, min, mean, sum, roughness"
    for how, message in (("summary", r": cpu \(test\) is not a number"), ("first", f"=first {rule}")):
        made.definition["also"] = {"device": how}
        made.run("a/p=2", len(how), falling(1.4))
        with pytest.raises(ConfigError, match=f"also.device{message}"):
            sweep_of(made.path)


def test_comparisons_without_a_run_are_named_once(tmp_path: Path) -> None:
    claim = {"title": "lower p", "baseline": "b/p=2", "settings": ["b/*"], "claim": "lower"}
    pairs = {"title": "of parts", "pairs": [["b/p=2", "a/p=2"]]}
    sweep = Made(tmp_path / "sweep", compare={"b": claim, "parts": pairs})
    sweep.run("a/p=2", 0, falling(1.4))
    text = text_of(sweep_of(sweep.path))
    assert text.count("Lower p") == text.count("Of parts") == 1
    assert "not in this sweep: Lower p; Of parts." in text and "## Conclusions" not in text


def test_a_difference_is_drawn_with_its_verdict_and_the_least_worth_having(tmp_path: Path) -> None:
    asked = {"baseline": "a/p=2", "settings": ["a/*"], "claim": "lower", "least": 0.01}
    sweep = Made(tmp_path / "sweep", compare={"a": asked})
    for fold in range(4):
        sweep.run("a/p=2", fold, falling(1.4 + 0.1 * fold))
        sweep.run("a/p=3", fold, falling(1.2 + 0.1 * fold + 0.01 * (fold % 2)))  # lower
        sweep.run("a/p=4", fold, falling(1.4 + 0.1 * fold + 0.02 * (-1) ** fold))  # as low
    (family,) = compared_families(sweep_of(sweep.path))
    spec = charts.difference_chart(family)
    ground, *_, filled, hollow = spec["layer"]
    assert ground["data"]["values"] == [{"low": -0.01, "high": 0.01}]
    assert {row["pair"]: row["told"] for row in spec["datasets"]["means"]} == {"a/p=3": True, "a/p=4": False}
    assert [(of["transform"][-1]["filter"], of["mark"]["filled"]) for of in (filled, hollow)] == [
        ("datum.told", True), ("!datum.told", False)
    ]  # fmt: skip


def test_long_curves_of_other_metrics_are_drawn_with_few_points_and_their_peak() -> None:
    curve = {i: float(i % 7) for i in range(1001)} | {503: 50.0}
    drawn = thinned(curve, "max")
    assert len(drawn) == 91 and max(drawn) == 1000 and max(drawn.values()) == 50  # spans of 11 iterations
    assert drawn[10] == 6 and drawn[21] == max(i % 7 for i in range(11, 22))
    assert list(thinned(curve, "last").items())[1] == (21, 0.0)
    assert sum(thinned(curve, "sum").values()) == sum(curve.values())
    assert thinned({0: 1.0, 99: 2.0}, "mean") == {0: 1.0, 99: 2.0}


def test_a_metric_without_a_number_is_left_out_and_an_iteration_that_is_none_is_named(made: Made) -> None:
    made.definition["also"] = {"train/*": "last"}
    finish(made.plan("p=2", 1, 0), {0: 4.0, 10: 3.0})
    summary, drawn = kept({}, {"val/loss": {0: 4.0}, "train/loss": {}}, read_sweep(made.path, "made"))
    assert drawn == {"val/loss": {0: 4.0}} and summary == {"worst_loss": 4.0}
    for step in ("Infinity", "-1", "1.5", "true", str(2**60), '"1"'):
        (made.path / "metrics.jsonl").write_text(f'{{"iter": {step}, "val/loss": 1.0}}\n')
        with pytest.raises(ConfigError, match=r"metrics\.jsonl cannot be read: iter=.* is no iteration"):
            read_curves(made.path, ["val/loss"])
    for value in ("Infinity", "1e308", '"1"', "[]"):
        (made.path / "metrics.jsonl").write_text(f'{{"iter": 1, "val/loss": {value}}}\n')
        with pytest.raises(ConfigError, match=r"metrics\.jsonl cannot be read: val/loss=.* is no number"):
            read_curves(made.path, ["val/loss"])


def test_no_two_parts_share_a_figure(tmp_path: Path) -> None:
    made = Made(tmp_path / "sweep", parts={"α": {}, "β": {}})
    for part in ("α", "β"):
        made.run(f"{part}/p=2", 0, falling(1.0))
    report.report(read_sweep(made.path, "made"), tmp_path / "out", [])
    assert (tmp_path / "out" / "loss_α.svg").exists() and (tmp_path / "out" / "loss_β.svg").exists()
    for part in ("a b", "a_b"):
        made.run(f"{part}/p=2", 0, falling(1.0))
    with pytest.raises(ConfigError, match="2 figures would be loss_a_b.svg"):
        report.report(read_sweep(made.path, "made"), tmp_path / "out", [])


def test_a_diverged_run_is_drawn_up_to_its_end_and_is_no_part_of_the_mean(made: Made, tmp_path: Path) -> None:
    made.definition["also"] = {"train/loss": "last"}
    for p, fold in ((2, 5), (9, 5)):  # p = 9 has no other run
        curve = {0: 4.0, 10: 3.5, 20: 3000.0}
        finish(made.plan(f"a/p={p}", 1, fold), curve, status="diverged", reason="train/loss nan at iteration 25")
    sweep = sweep_of(made.path)
    names = {s: sweep.label(s) for s in sweep.settings}
    look = styles({"a": names})
    series = {s.name: s for s in series_of(sweep, names, look, "val/loss")}
    assert series["p=2"].diverged == {(1, 5): curve} and len(series["p=2"].curves) == 5 and not series["p=9"].curves
    assert max(point.mean for point in series["p=2"].mean.values()) < 10
    assert value_axis([*series.values()], LOSS)["scale"]["domain"][1] < 10  # the axis is that of the others
    found = metric_panels(sweep, names, look)["train/loss"]["train/loss"]
    assert [s.diverged[1, 5][20] for s in found if s.diverged] == [2999.9, 2999.9]
    out = tmp_path / "out"
    report.report(read_sweep(made.path, "made"), out, [])
    text = (out / "report.html").read_text()
    assert text.count("ends in a cross is a run that diverged") == 2  # loss and train/loss
    assert "fold 5, seed 1, diverged" in json.dumps(reports.charts_of(out)["loss_a"])


def test_deliberate_faults_stand_in_a_table_of_their_own(made: Made, tmp_path: Path) -> None:
    text = text_of(sweep_of(made.path))
    assert "Deliberate faults" not in text and "Highest stable" not in text  # of a sweep without a fault, at one rate
    sweep = Made(tmp_path / "faults")
    for setting, fault, random, last in (
        ("p=1", "none", False, [2.0, 2.2]),
        ("p=2", "none", True, [4.16, 4.20]),  # ln 64 = 4.1589
        ("p=3", "no_mask", False, [0.5, 0.7]),
        ("p=4", "no_mask", True, [4.148, 4.150]),
    ):
        changes: dict[str, Any] = {"fault": FaultOptions(fault), **({"data": RandomOptions()} if random else {})}
        for seed, loss in enumerate(last):
            path = sweep.plan(setting, seed, None, **changes)
            finish(path, falling(1.4))
            summary = json.loads((path / "summary.json").read_text()) | {"train/loss": loss, "vocab_size": 64}
            if fault == "no_mask":
                summary["start_up_warnings"] = [f"the model sees the future: by {seed}"]
            (path / "summary.json").write_text(json.dumps(summary))
    read = sweep_of(sweep.path)
    caught = "the model sees the future (2 of 2)"
    assert [list(row.values()) for row in rows_of(fault_table(read))] == [
        ["p=2", "none", "not recorded", "4.1800", "4.1589", "0 of 2"],
        ["p=3", "no_mask", caught, "0.6000", "–", "–"],
        ["p=4", "no_mask", caught, "4.1490", "4.1589", "1 of 2"],
    ]
    assert "## Deliberate faults" in text_of(read) and facts(read)["deliberate faults"] == "no_mask"


def test_both_readings_of_an_averaged_minimum_are_given(tmp_path: Path) -> None:
    made = Made(tmp_path / "sweep")
    made.run("p=2", 0, {0: 4.0, 10: 1.0, 20: 2.0, 40: 3.0})
    made.run("p=2", 1, {0: 4.0, 10: 2.6, 20: 1.2, 40: 1.1})
    (row,) = rows_of(part_table(sweep_of(made.path), ["p=2"]))
    (other,) = rows_of(readings_table(sweep_of(made.path), ["p=2"]))
    assert (other["minimum of the mean curve"], other["at iteration"]) == ("1.6000", "20")
    assert (row["mean of the runs' minima"], row["SD"]) == ("1.0500", f"{0.1 / math.sqrt(2):.4f}")
    assert (row["mean iteration of the minimum"], other["final loss"]) == ("25", "2.0500")
    assert ("α starts", "matched") in row.items()


def test_runs_csv_has_a_line_a_run_and_the_varied_settings(made: Made) -> None:
    rows = reports.csv_of(sweep_of(made.path))
    assert len(rows) == 15
    assert [row["qk_norm.p"] for row in rows[:3]] == ["2.0", "3.0", "4.0"]
    first = rows[0]
    assert (first["settings"], first["seed"], first["fold"], first["status"]) == ("a/p=2", "1", "0", "done")
    assert (float(first["val/loss_min"]), first["iter_of_min"], first["seconds"]) == (1.5, "30", "102")
    assert (first["device"], first["commit"], first["torch"]) == ("cpu (test)", "abc", "")
    assert "qk_norm.alpha_init" not in first and "max_iters" not in first


def test_a_report_is_made_anew_from_what_it_stored(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the runs; with a run that diverged and one that never began, metrics of every kind, and an odd name."""
    made.definition["also"] = {"train/loss": ["last", "mean"], "parameters": "summary"}
    finish(made.plan("a/p=3", 1, 5), {0: 4.0, 10: 3.0}, status="diverged", reason='a "quoted", reason')
    made.plan("a/p=2", 1, 6)
    monkeypatch.chdir(tmp_path)
    assert report.main([f"sweep_dir={made.path}", "out=one"]) == 0
    assert report.main(["from=one", "out=two"]) == 0
    names = sorted(file.name for file in Path("one").iterdir())
    assert names == sorted(file.name for file in Path("two").iterdir()) and "along_p.svg" in names
    assert [name for name in names if Path("one", name).read_bytes() != Path("two", name).read_bytes()] == [
        "provenance.json"  # which has the command
    ]
    assert report.main(["from=nowhere"]) == 2 and report.main([]) == 2
    Path("two").rename("study")
    assert report.main(["from=study"]) == 0 and not Path("results").exists()  # in its own folder
    assert json.loads(Path("study", "provenance.json").read_text())["command"].endswith("report.py from=study")


@pytest.mark.parametrize(
    ("alpha", "compare", "n"), [(1.0, {}, 1), (1.0, {"p": {"baseline": "p=2"}}, 1), ("matched", {}, 0)]
)
def test_a_report_says_where_p_changes_temperature(alpha: Any, compare: dict[str, Any], n: int, tmp_path: Path) -> None:
    made = Made(tmp_path / "sweep", compare=compare)
    for p in (2.0, math.inf):
        made.plan(f"p={p:g}", 1, 0, qk_norm=LpNormOptions(p=p, alpha_init=alpha))
    one, two = tmp_path / "one", tmp_path / "two"
    assert report.main([f"sweep_dir={made.path}", f"out={one}"]) == report.main([f"from={one}", f"out={two}"]) == 0
    for file in (one / "table.md", two / "table.md", one / "report.html"):
        assert file.read_text().count("p differs and α starts from one value") == n


def test_runs_whose_directories_are_gone_count_as_they_were_stored(made: Made, tmp_path: Path) -> None:
    report.report(sweep_of(made.path), tmp_path / "out", [])
    later = Made(tmp_path / "later", parts={"a": {"title": "part a"}}, compare=reports.COMPARE)
    later.run("a/p=2", 7, falling(1.0))
    later.plan("a/p=2", 1, 0)  # done before, not here
    sweep = joined(read_stored(tmp_path / "out", "made"), sweep_of(later.path))
    assert [run.fold for run in sweep.done("a/p=2")] == [0, 1, 2, 3, 4, 7]
    assert sweep.runs_of("a/p=2")[1, 0].summary["val/loss_min"] == 1.5


def test_a_stored_run_of_other_settings_stands_in_for_none(made: Made, tmp_path: Path) -> None:
    report.report(sweep_of(made.path), tmp_path / "out", [])
    later = Made(tmp_path / "later", parts={"a": {"title": "part a"}}, compare=reports.COMPARE)
    later.plan("a/p=2", 1, 0)
    plan = later.path / "plan.jsonl"
    plan.write_text(plan.read_text().replace('"id": "', '"id": "other-'))
    stored = read_stored(tmp_path / "out", "made")
    with pytest.raises(ConfigError, match="from= has .* where the sweep has other-.*, of other settings"):
        joined(stored, sweep_of(later.path))
    sparse = [replace(run, config={**run.config, "eval_interval": 7}) for run in stored.runs]
    with pytest.raises(ConfigError, match="with eval_interval=7, the sweep with"):
        joined(replace(stored, runs=sparse), stored)


def test_a_report_of_fewer_runs_replaces_none_unless_out_says_so(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    place = f"sweep_dir={made.path}"
    assert report.main([place]) == report.main([place]) == 0
    before = Path("results/sweep/runs.csv").read_bytes()
    shutil.rmtree(made.path / read_plan(made.path)[0].id)
    assert report.main([place]) == 2
    lacks = "results/sweep has finished runs that this report lacks (1): from=results/sweep adds them"
    assert lacks in capsys.readouterr().err
    assert report.main([place, "from=results/sweep"]) == 0
    assert Path("results/sweep/runs.csv").read_bytes() == before
    Path("results/sweep/runs.csv").write_bytes(b"id,status\n\xff")
    assert report.main([place]) == 2 and "runs.csv cannot be read" in capsys.readouterr().err
    assert report.main([place, "out=results/sweep"]) == 0
    assert Path("results/sweep/runs.csv").read_bytes() != before


def test_runs_that_are_not_done_are_named_with_their_reason(made: Made) -> None:
    state(made.plan("a/p=2", 1, 5), state="failed", iter=10, reason="OSError: disk | full")
    finish(made.plan("a/p=3", 1, 5), {0: 4.0, 10: 3.0}, status="diverged", reason="val/loss nan at iteration 20")
    state(made.plan("a/p=4", 1, 5), state="stopped", iter=30, reason="SIGTERM")
    made.plan("a/p=2", 1, 6)
    running = made.plan("a/p=3", 1, 6)
    state(running, state="running", iter=20)
    with open(running / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sweep = sweep_of(made.path)
    reasons = {row["run"]: (row["state"], row["reason"]) for table in missing_tables(sweep) for row in rows_of(table)}
    assert reasons == {
        "a-p=2-fold5-s1": ("failed", "OSError: disk | full; iteration 10 of 40 is saved"),
        "a-p=3-fold5-s1": ("diverged", "val/loss nan at iteration 20"),
        "a-p=4-fold5-s1": ("stopped", "SIGTERM; iteration 30 of 40 is saved"),
        "a-p=2-fold6-s1": ("pending", "not started"),
        "a-p=3-fold6-s1": ("running", "iteration 20 of 40 is saved"),
    }
    text = text_of(sweep)
    assert all(run in text for run in reasons) and "disk \\| full" in text
    assert "| 5 of 7, 1 failed, 1 pending |" in text and "| 5 of 7, 1 diverged, 1 running |" in text
    statuses = {row["id"]: (row["status"], row["reason"]) for row in reports.csv_of(sweep)}
    assert {run: statuses[run] for run in reasons} == reasons
    diverged = next(row for row in reports.csv_of(sweep) if row["id"] == "a-p=3-fold5-s1")
    assert (diverged["val/loss_min"], diverged["iter"]) == ("3.0", "10")
    loss = compared_families(sweep)[0].comparisons[0]
    assert [f"{len(c.differences)} of {c.planned}" for c in loss] == ["5 of 7", "5 of 6"]


DAMAGES = ["no summary", "no curve", "torn curve", "another curve", "another hash", "no minimum", 20, 60]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_done_run_with_damaged_files_or_another_length_is_not_done(made: Made, damage: str | int) -> None:
    path = made.run("a/p=2", 5, {0: 4.0, damage: 1.0} if isinstance(damage, int) else falling(1.0))
    if damage == "no summary":
        (path / "summary.json").unlink()
    elif damage == "no curve":
        (path / "metrics.jsonl").unlink()
    elif damage == "torn curve":
        (path / "metrics.jsonl").write_text('{"iter": 0, "val/loss": 4.0}\n{"iter": 40, "val/loss": 1')
    elif damage == "another curve":
        shutil.copy(made.path / "a-p=2-fold0-s1" / "metrics.jsonl", path)
    elif damage == "another hash":
        summary = json.loads((path / "summary.json").read_text())
        (path / "summary.json").write_text(json.dumps(summary | {"records": {"metrics.jsonl": "0" * 64}}))
        assert "has changed since" in sweep_of(made.path).runs_of("a/p=2")[1, 5].state.reason
    elif damage == "no minimum":
        (path / "summary.json").write_text(json.dumps({"status": "done", "iter": 40, "val/loss": 1.0}))
    sweep = sweep_of(made.path)
    (row,) = rows_of(missing_tables(sweep)[0])
    state = "stopped" if damage in ("no summary", 20, 60) else "failed"
    reason = f"done at iteration {damage} of 40" if isinstance(damage, int) else "done, but "
    assert (row["run"], row["state"]) == (path.name, state) and row["reason"].startswith(reason)
    assert rows_of(part_table(sweep, ["a/p=2"]))[0]["mean of the runs' minima"] == "1.5100"


def test_a_damaged_curve_of_a_diverged_run_is_left_out(made: Made) -> None:
    path = made.plan("a/p=2", 1, 5)
    finish(path, {0: 4.0, 20: 3.0}, status="diverged")
    text, summary = (path / "metrics.jsonl").read_bytes(), json.loads((path / "summary.json").read_text())
    records = {"metrics.jsonl": hashlib.sha256(text).hexdigest()}
    (path / "summary.json").write_text(json.dumps(summary | {"records": records}))
    assert sweep_of(made.path).runs_of("a/p=2")[1, 5].losses == {0: 4.0, 20: 3.0}
    (path / "metrics.jsonl").write_bytes(text.replace(b"3.0", b"2.0"))
    row = sweep_of(made.path).runs_of("a/p=2")[1, 5]
    assert (row.state.state, row.losses) == ("diverged", {}) and "; metrics.jsonl has changed" in row.state.reason


@pytest.mark.parametrize("read", [lambda out: read_stored(out, "made"), lambda out: without_stored([], str(out))])
def test_who_only_reads_a_report_moves_nothing_over_it(read: Callable[[Path], Any], made: Made, tmp_path: Path) -> None:
    report.report(sweep_of(made.path), tmp_path / "out", [])
    read(tmp_path / "out")
    hidden = tmp_path / "out" / NEXT / "runs.csv"
    hidden.parent.mkdir()
    hidden.write_text("a stranger's")
    with pytest.raises(ConfigError, match="was ended while it was written"):
        read(tmp_path / "out")
    assert hidden.exists() and "stranger" not in (tmp_path / "out" / "runs.csv").read_text()


def test_means_count_the_seeds_of_a_fold_as_one_value(tmp_path: Path) -> None:
    made = Made(tmp_path / "sweep")
    for seed, fold, loss in ((1, 0, 1.0), (2, 0, 1.0), (3, 0, 1.0), (1, 1, 2.0)):
        made.run("p=2", fold, falling(loss), seed=seed)
    made_sweep = sweep_of(made.path)
    row = rows_of(part_table(made_sweep, ["p=2"]))[0] | rows_of(readings_table(made_sweep, ["p=2"]))[0]
    assert {row[name] for name in ("minimum of the mean curve", "mean of the runs' minima", "final loss")} == {"1.5000"}


def test_a_run_may_belong_to_several_settings(made: Made) -> None:
    for line in made.lines:
        if line["settings"] == ["a/p=2"]:
            line["settings"] = ["a/p=2", "b/p=2"]
    made.run("b/p=3", 0, falling(1.2))
    sweep = sweep_of(made.path)
    assert list(sweep.parts) == ["a", "b"] and len(sweep.done("b/p=2")) == 5
    assert reports.csv_of(sweep)[0]["settings"] == "a/p=2;b/p=2"
