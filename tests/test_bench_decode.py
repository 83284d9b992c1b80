"""scripts/benchmarks/bench_decode.py as a user runs it, on a layer of a few channels."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from conftest import TINY_LAYER, Program
from scipy.stats import binom

from scripts.benchmarks import bench_decode
from scripts.benchmarks.bench_decode import PAPER, settings
from scripts.benchmarks.timing import Side, Turn, machine, ratio, run_benchmark, spread

pytestmark = pytest.mark.usefixtures("quick_processes")


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["bench_decode.py", *words])
    return run_benchmark(bench_decode.DecodeOptions, bench_decode.bench, None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_side_is_timed_and_ends_in_one_json_line_and_a_folder(
    dtype: str, program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["contexts=[48]", "batch=[2]", "rounds=6", "seconds=0.01", "out=it", f"dtype={dtype}"]
    words += [word for word in TINY_LAYER if not word.startswith("dtype")]
    monkeypatch.chdir(tmp_path)
    if dtype == "float32":  # as a user runs it
        said = program("scripts/benchmarks/bench_decode.py", *words).stdout
    else:
        assert run(monkeypatch, *words) == 0
        said = capsys.readouterr().out
    result = json.loads(said.splitlines()[-1])
    (point,) = result["points"]
    sides, heads, itemsize, tokens = point["sides"], 16, {"float32": 4, "bfloat16": 2}[dtype], 2 * 48
    latent = (32 + 8) * itemsize * tokens
    scalars = heads * itemsize * tokens
    assert {name: side["cache_bytes"] for name, side in sides.items()} == {
        "absorbed": latent, "rms": latent + scalars, "lp": latent + scalars,
    }  # fmt: skip
    for side in sides.values():
        assert 0 < side["ms_lowest"] <= side["ms"] <= side["ms_highest"] and side["attend_ms"] > 0
        assert side["attend_gb_per_s"] == pytest.approx(side["cache_bytes"] / side["attend_ms"] / 1e6)
        assert side["attend_of_copy"] == pytest.approx(side["attend_gb_per_s"] / point["copy_gb_per_s"])
    overhead, times = point["overhead_percent"], point["time_over_absorbed"]
    assert set(overhead) == {"rms", "lp"}
    assert overhead["rms"]["median"] == pytest.approx(100 * (times["rms"]["median"] - 1))
    assert {f.name for f in (tmp_path / "it").iterdir()} == {"table.md", "bench.json"}
    assert json.loads((tmp_path / "it" / "bench.json").read_text()) == result
    table = (tmp_path / "it" / "table.md").read_text()
    assert table in said and f"{sides['rms']['ms']:.3f} (" in table
    low, high = overhead["lp"]["low"], overhead["lp"]["high"]
    assert low <= overhead["lp"]["median"] <= high and f"({low:+.2f} to {high:+.2f})" in table
    (row,) = (row for row in table.splitlines() if row.startswith("| 2 |"))
    assert row.split("|")[2:4] == [" 48 ", " 1 × 6 "]
    assert "\npython scripts/benchmarks/bench_decode.py contexts=[48]" in table


def test_a_ratio_over_several_starts_is_of_the_median_of_each() -> None:
    turns = {"a": [{"ms": ms} for ms in (1, 2, 9, 4, 4, 40)], "b": [{"ms": 1}] * 6}
    assert ratio(turns, "a", "b", "ms", 2) == {"median": 3, "lowest": 2, "highest": 4}
    assert ratio(turns, "a", "b", "ms")["highest"] == 40
    point = bench_decode.bench_point(settings(TINY_LAYER, 16), 1, 1, 2, 0.01)
    assert point["starts"] == 2 and [*point["sides"]] == ["absorbed", "rms", "lp"]
    of_starts = point["time_over_absorbed"]["lp"]
    assert of_starts["lowest"] < of_starts["median"] < of_starts["highest"]


def test_the_interval_of_a_median_is_the_sign_tests() -> None:
    for n in range(1, 400):
        k = spread(range(1, n + 1)).get("low", 0)
        assert 2 * binom.cdf(k - 1, n, 0.5) <= 0.05 < 2 * binom.cdf(k, n, 0.5)


def test_points_before_a_side_dies_are_kept(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def deadly(side: Side, n: int) -> Turn:
        if (tmp_path / "bench.json").exists() and side.name == "MLA":
            os.kill(side.process.pid, signal.SIGKILL)  # as the kernel does where memory runs out
        return take_turn(side, n)

    take_turn = Side.take_turn
    monkeypatch.setattr(Side, "take_turn", deadly)
    words = ["contexts=[24,48]", "rounds=1", "seconds=0.01", f"out={tmp_path}", *TINY_LAYER]
    assert run(monkeypatch, *words) == 1
    assert capsys.readouterr().err == "failed: MLA died (exit status -9)\n"
    (point,) = json.loads((tmp_path / "bench.json").read_text())["points"]
    assert point["context"] == 24 and point["sides"]["rms"]["ms"] > 0
    assert "| 1 | 24 | 1 × 1 |" in (tmp_path / "table.md").read_text()
    (tmp_path / "bench.json").unlink()
    assert run(monkeypatch, *words) == 2 and "has a table.md that is none of this program" in capsys.readouterr().err


def test_a_cpu_is_named_with_the_threads_that_were_used() -> None:
    n = torch.get_num_threads() + 1
    assert machine("cpu", n)["device"].endswith(f"{n} threads)")


def test_the_papers_overheads_are_those_of_its_times() -> None:
    """Within what rounding the times to a microsecond allows."""
    for plain, normed, percent in PAPER.values():
        assert 100 * (normed / plain - 1) == pytest.approx(percent, abs=0.005 + 100 * 0.001 / plain)
