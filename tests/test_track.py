"""The attention track's board: best rates, plateaus, verdicts and the noise floor, from runs with known losses."""

import json
import math
import shutil
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest
from scipy import stats
from scipy.optimize import brentq

from core.cli import run_script
from core.schema import ConfigError, flatten
from scripts import track
from scripts.reporting.comparisons import Comparison, adjust, compare
from scripts.reporting.runs import METRICS, Replicate, Run, Sweep
from scripts.reporting.stored import common_config, curves_csv, runs_csv
from scripts.reporting.track import at_the_edge, entries, label_sides, mean_losses, noise, plateau, widened
from scripts.track import TrackOptions, final_definition, make
from sweeps.definition import check_sweep, load_sweep, pair
from sweeps.plan import plan_runs
from sweeps.status import State

WORDS = {"none": ["qk_norm=none"], "rms": ["qk_norm=rms"], "sink": ["softmax=sink"]}
RATES = [0.001, 0.002, 0.004, 0.008]
GRID = {"none": [2.2, 2.0, 2.015, 2.5], "rms": [2.1, 1.95, 1.92, 1.93], "sink": [2.3, 2.1, 2.0, 1.97]}  # mean losses
SPREAD = [0.01, -0.02, 0.005, 0.0, 0.015, -0.01, -0.005, 0.005]  # of eight seeds, with mean 0
OFFSET = {"none": 0.05, "rms": 0.0, "sink": -0.002}
OWN = {  # of a contestant's own, on top
    "none": [0.001, -0.001] * 4, "rms": [0.0] * 8, "sink": [0.004, -0.004, 0.008, -0.008, 0.002, -0.002, 0.0, 0.0],
}  # fmt: skip


BEST = {"none": 0.002, "rms": 0.004, "sink": 0.008}


def run_of(point: str, seed: int, rate: float, loss: float) -> Run:
    summary = {
        "val/loss_min": loss, "val/loss": loss, "iter_of_min": 100, "worst_loss": loss, "seconds": 1.0, "iter": 100,
        "max attn/max_logit": 10.0 + seed, "cache_bytes_per_token": 2048, "parameters": 1000,
    }  # fmt: skip
    config = {"optim.learning_rate": rate, "seed": seed, "model.name": "track_nano"}
    curves: Any = {"val/loss": {0: 7.0, 100: loss}}
    return Run(f"{point}-{seed}", [point], seed, None, config, State("done", 100), summary, curves)


def sweeps() -> tuple[Sweep, Sweep]:
    also = {"attn/max_logit": "max", "cache_bytes_per_token": "summary"}
    definitions: list[Any] = [{"grid": {"words": WORDS, "optim.learning_rate": RATES}, "also": also}, {"also": also}]
    grid = [
        run_of(f"{name},learning_rate={rate:g}", seed, rate, loss + noise)
        for name, losses in GRID.items()
        for rate, loss in zip(RATES, losses, strict=True)
        for seed, noise in ((1, 0.003), (2, -0.003))
    ]
    final = [
        run_of(name, seed, BEST[name], 1.92 + offset + shared + OWN[name][seed])
        for name, offset in OFFSET.items()
        for seed, shared in enumerate(SPREAD)
    ]
    of_grid, of_final = map(check_sweep, definitions)
    return Sweep("grid", {}, of_grid, grid), Sweep("final", {}, of_final, final)


def stored(folder: Path, of: tuple[Sweep, Sweep] | None = None) -> Path:
    """The two sweeps as reports store them, and a page for the board."""
    for sweep in of or sweeps():
        place = folder / sweep.name
        place.mkdir(parents=True)
        files = {"runs.csv": runs_csv(sweep).encode(), "curves.csv.gz": curves_csv(sweep)}
        for name, content in files.items():
            (place / name).write_bytes(content)
        hashes = {name: sha256(content).hexdigest() for name, content in files.items()}
        definition = json.loads(json.dumps(vars(sweep.definition)))
        about = {"definition": definition, "planned": [], "config": common_config(sweep), "sha256": hashes}
        (place / "provenance.json").write_text(json.dumps(about))
    (folder / "README.md").write_text(f"# Board\n\n{track.END}\n{track.BEGIN}STALE{track.END}\nAfter.\n")
    times = {"time_over_first": {"rms": {"median": 1.1, "low": 1.0, "high": 1.2}}}
    speeds = {"speed_over_first": {"rms": {"median": 0.8, "low": 0.5, "high": 1.0}}}
    (folder / "train.json").write_text(json.dumps({"variants": {"none": {}}, **times}))
    (folder / "decode.json").write_text(json.dumps({"1_sequences": {"variants": {"none": {}}, **speeds}}))
    return folder


def test_the_best_rate_is_that_of_the_lowest_mean_and_an_edge_is_named() -> None:
    grid, _ = sweeps()
    means = mean_losses(grid)
    assert {name: min(of, key=lambda rate: of[rate]) for name, of in means.items()} == BEST
    assert at_the_edge(grid) == {"sink": 0.016}
    found = [plateau(means[name], means[name]) for name in GRID]
    assert found == [1.0, 1.0, 0.0]  # 0.002 to 0.004; 0.004 to 0.008; alone
    assert plateau({0.001: 2.0, 0.004: 2.0, 0.008: 2.0}, [0.001, 0.002, 0.004, 0.008]) == 0.0  # 0.002 diverged


def test_a_contestant_that_lost_runs_is_last_and_says_so(tmp_path: Path) -> None:
    grid, final = sweeps()
    runs = [replace(r, state=State("diverged")) if r.settings == ["rms"] and r.seed < 3 else r for r in final.runs]
    found = entries(grid, replace(final, runs=runs), tmp_path)
    assert found[-1].name == "rms" and found[-1].verdict == "3 of 8 runs are not done"


def test_best_rates_are_not_read_off_a_grid_with_runs_to_come(tmp_path: Path) -> None:
    grid, final = sweeps()
    grid.runs[0] = replace(grid.runs[0], state=State("pending"))
    folder = stored(tmp_path / "board", (grid, final))
    with pytest.raises(ConfigError, match="1 runs of .*grid have not ended"):
        make(TrackOptions(folder=str(folder), rates=True))


def test_a_verdict_is_holms_and_its_interval_excludes_zero_with_it(tmp_path: Path) -> None:
    found = {e.name: e for e in entries(*sweeps(), tmp_path)}
    assert [found[name].verdict for name in ("none", "rms", "sink")] == ["worse", "–", "not told apart"]
    differences = {name: [offset + own for own in OWN[name]] for name, offset in OFFSET.items()}
    p = {name: float(stats.ttest_1samp(differences[name], 0).pvalue) for name in ("none", "sink")}
    assert p["none"] < 0.025 and p["sink"] > 0.05  # ranks 1 and 2
    for name, level in (("none", 0.025), ("sink", 0.05)):
        half = stats.t.isf(level / 2, 7) * stdev(differences[name]) / math.sqrt(8)
        wide, against = found[name].wide, found[name].against
        assert wide is not None and against is not None and against.estimate is not None
        assert wide.low == pytest.approx(OFFSET[name] - half) and wide.high == pytest.approx(OFFSET[name] + half)
        assert against.p["t"] == pytest.approx(p[name])
    assert found["none"].stable == 0.008 and found["rms"].logit == 17.0


def test_a_rejected_step_is_one_whose_interval_excludes_zero() -> None:
    """Of Holm's steps, whatever the differences are."""
    _, final = sweeps()
    for shift in (0.0, 0.002, 0.004, 0.006, 0.01):
        losses = [run.summary["val/loss_min"] + shift * (run.settings == ["sink"]) for run in final.runs]
        moved = [run_of(r.settings[0], r.seed, 0, loss) for r, loss in zip(final.runs, losses, strict=True)]
        pairs = [pair("none", "rms"), pair("sink", "rms")]
        family = compare(Sweep("final", {}, final.definition, moved), pairs, METRICS[0])
        for c in family:
            wide = widened(family)[c.a]
            assert wide.low is not None and wide.high is not None and c.adjusted["t"] is not None
            assert (c.adjusted["t"] <= 0.05) == (wide.low > 0 or wide.high < 0)


def test_of_folds_the_boards_interval_is_that_of_the_test_that_decides() -> None:
    values: dict[Replicate, tuple[float, float]] = {(1, fold): (1.0 + x, 1.0) for fold, x in enumerate(SPREAD)}
    family = [Comparison("sink", "rms", 8, values, shared=1 / 9)]
    adjust(family)
    assert widened(family)["sink"] == family[0].deciding != family[0].estimate


def test_a_board_that_does_not_fit_its_grid_is_refused(tmp_path: Path) -> None:
    grid, final = sweeps()
    at_another = [replace(run, config={**run.config, "optim.learning_rate": 0.016}) for run in final.runs]
    others = [run for run in grid.runs if "sink" not in run.settings[0]]
    diverged = [run if run in others else replace(run, state=State("diverged")) for run in grid.runs]
    for of_grid, of_final, says in (
        (others, final.runs, "grid lacks some of none, rms, sink"),
        (diverged, final.runs, "grid has no learning rate at which all runs of sink are done"),
        (grid.runs, at_another, "final has none at the learning rate 0.016; the grid's best is 0.002"),
    ):
        with pytest.raises(ConfigError, match=says):
            entries(replace(grid, runs=of_grid), replace(final, runs=of_final), tmp_path)


def test_the_noise_floor_is_the_spread_over_seeds(tmp_path: Path) -> None:
    said = noise(entries(*sweeps(), tmp_path))
    sds = [stdev([a + b for a, b in zip(SPREAD, OWN[name], strict=True)]) for name in ("none", "sink")]
    assert f"{math.sqrt(sum(sd**2 for sd in sds) / 2):.4f}" in said
    between = math.sqrt(sum(stdev(OWN[name]) ** 2 for name in ("none", "sink")) / 2)
    assert f"difference {between:.4f}. 8 pairs" in said


def test_the_least_difference_has_80_percent_power_to_the_last_digit(tmp_path: Path) -> None:
    grid, final = sweeps()
    apart = [  # 20 times the noise, so that four decimals show a third digit of the effect
        replace(run, summary={**run.summary, "val/loss_min": 20 * run.summary["val/loss_min"]}) for run in final.runs
    ]
    between = 20 * math.sqrt(sum(stdev(OWN[name]) ** 2 for name in ("none", "sink")) / 2)

    def power(effect: float) -> float:
        t, shift = float(stats.t.isf(0.025, 7)), effect * math.sqrt(8)
        return float(stats.nct.sf(t, 7, shift) + stats.nct.cdf(-t, 7, shift))

    least = brentq(lambda effect: power(effect) - 0.8, 0.1, 3)
    said = noise(entries(grid, replace(final, runs=apart), tmp_path))
    assert float(said.split("difference of ")[1].split()[0]) == pytest.approx(least * between, abs=1.1e-4)


@pytest.mark.slow
def test_one_command_rebuilds_the_board_from_stored_files(tmp_path: Path) -> None:
    sweep = tmp_path / "grid.yaml"
    sweep.write_text(json.dumps({"grid": {"words": WORDS}}))
    folder = stored(tmp_path / "board")
    for _ in range(2):
        assert make(TrackOptions(folder=str(folder), sweep=str(sweep))) == 0
        made = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    text = made["README.md"].decode()
    assert text.startswith("# Board\n") and text.endswith("\nAfter.\n") and "STALE" not in text
    cells = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in row] for row in cells]
    assert [row[0] for row in rows if row[0] in WORDS] == ["sink", "rms", "none"]
    assert next(row for row in rows if row[0] == "rms")[10:12] == ["1.10 (1.00 to 1.20)", "1.25 (1.00 to 2.00)"]
    assert b"rms" in made["overhead.svg"] and made["rates.svg"].count(b"sink") >= 1
    assert make(TrackOptions(folder=str(folder), sweep=str(sweep))) == 0
    assert {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()} == made
    shutil.copytree(folder / "final", folder / "small")
    assert make(TrackOptions(folder=str(folder), sweep=str(sweep))) == 0
    both = (folder / "README.md").read_text()
    assert both.count("| sink |") == both.count("σ over seeds") == 2 and "### At `track_small` scale" in both
    for content in ("{}", '{"variants": {"qk_norm=none": {}}}'):  # the second has the words of a contestant
        (folder / "train.json").write_text(content)
        with pytest.raises(ConfigError, match=r"train\.json does not time contestants"):
            make(TrackOptions(folder=str(folder), sweep=str(sweep)))


def test_the_final_sweep_takes_each_contestants_best_rate(tmp_path: Path) -> None:
    grid, _ = sweeps()
    file = tmp_path / "final.yaml"
    (tmp_path / "grid.yaml").write_text(json.dumps({"grid": {"words": WORDS, "optim.learning_rate": RATES}}))
    file.write_text(final_definition("grid.yaml", WORDS, mean_losses(grid)))
    runs = plan_runs(load_sweep(str(file), {}), [])
    assert len(runs) == 3 * 8 and {run.seed for run in runs} == {*range(11, 19)}
    assert {run.points[0]: run.config.optim.learning_rate for run in runs} == BEST


def test_what_is_no_track_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_script(TrackOptions, make, "", ["sweep=leak", "times=true"]) == 2
    assert "sweep=leak is no track: its grid has no words" in capsys.readouterr().err


def test_a_track_of_ones_own_writes_its_final_sweep_beside_it(tmp_path: Path) -> None:
    board, sweep = stored(tmp_path / "board"), tmp_path / "tracks" / "my.yaml"
    sweep.parent.mkdir()
    sweep.write_text(json.dumps({"grid": {"words": WORDS, "optim.learning_rate": RATES}}))
    assert make(TrackOptions(folder=str(board), sweep=str(sweep), rates=True)) == 0
    assert len(plan_runs(load_sweep(str(sweep.with_name("my_final.yaml")), {}), [])) == 24
    sweep.write_text(json.dumps({"grid": {"words": {"none": WORDS["none"]}, "optim.learning_rate": RATES}}))
    with pytest.raises(ConfigError, match="has no rms, sink, which .*grid has"):
        make(TrackOptions(folder=str(board), sweep=str(sweep)))


@pytest.mark.slow
def test_every_run_of_the_track_composes_with_the_same_recipe() -> None:
    sweep = load_sweep("attention_track", {})
    runs = plan_runs(sweep, [])
    assert len(runs) == len(sweep.grid["words"]) * 5 * 2 >= 16 * 10
    slots = ("qk_norm", "logits", "softmax", "output", "weights", "qk_clip", "optim.learning_rate", "seed")
    first, *others = (flatten(run.config.trajectory).items() for run in runs)
    assert all(key.startswith(slots) for other in others for key, _ in first ^ other)


def test_a_name_in_the_figure_covers_no_point_and_no_other_name() -> None:
    assert label_sides([(0, 0), (200, 0)], ["first", "second"]) == ["right", "right"]
    assert label_sides([(100, 0), (120, 0)], ["first", "second"]) == ["left", "right"]  # the second is in its way
    assert label_sides([(100, 0), (90, 8)], ["first", "second"]) == ["right", "left"]  # the first's name is
