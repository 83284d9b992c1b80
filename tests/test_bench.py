"""The benchmarks run, and say what they promise; what they measure is results/benchmarks."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conftest import ROOT

from core.schema import ConfigError
from scripts.benchmarks import bench_sample, bench_train
from scripts.benchmarks.timing import by_name, run_benchmark

pytestmark = pytest.mark.usefixtures("quick_processes")
Benchmark = Callable[..., tuple[dict[str, Any], str]]


@pytest.fixture
def benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Benchmark:
    """Run a benchmark in this process. Returns its result, the last line, and all that it printed."""

    def run(program: ModuleType, *words: str) -> tuple[dict[str, Any], str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("sys.argv", ["benchmark", *words])
        assert run_benchmark(program.BenchOptions, program.bench, None) == 0
        said = capsys.readouterr().out
        return json.loads(said.splitlines()[-1]), said

    return run


@pytest.fixture
def peer() -> str:
    path = os.environ.get("NANOQK_NANOGPT")
    if not path:
        pytest.skip("NANOQK_NANOGPT names no checkout of nanoGPT")
    return f"peer={path}"


def test_updates_of_peers_alternate_with_ours(benchmark: Benchmark, tiny_run: list[str], peer: str) -> None:
    words = [peer, f"old={ROOT}", "rounds=3", "iters=2", *tiny_run]
    result, _ = benchmark(bench_train, *words)
    for side in ("ours", "old", "peer"):
        assert set(result[side]) == {"tok_per_sec", "ms_per_iter", "peak_memory_mib", "mfu"}
        assert result[side]["tok_per_sec"] == pytest.approx(4 * 16 / result[side]["ms_per_iter"] * 1000, rel=0.01)
        assert result[side]["peak_memory_mib"] > 50 and 0 < result[side]["mfu"] < 1
    for key in ("ratio", "ratio_to_old"):
        assert result[key]["lowest"] <= result[key]["median"] <= result[key]["highest"]
    assert result["rounds"] == 3 and result["device"].startswith("cpu")


def test_another_checkout_runs_its_own_modules(benchmark: Benchmark, tiny_run: list[str], tmp_path: Path) -> None:
    """One whose update does nothing."""
    ours = "def ours(words):\n    return lambda n: {}, {'parameters': MARK}\n"
    files = {"core/__init__.py": "", "core/schema.py": "MARK = 4242\n", "scripts/__init__.py": ""}
    for name, text in {**files, "scripts/bench_train.py": f"from core.schema import MARK\n{ours}"}.items():
        (tmp_path / "old" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "old" / name).write_text(text)
    result, said = benchmark(bench_train, "old=old", "rounds=1", "iters=1", *tiny_run)
    assert result["ratio_to_old"]["highest"] < 0.1 and "old 4,242" in said


@pytest.mark.parametrize("together", ["false", "true"])
def test_a_larger_variant_takes_longer(benchmark: Benchmark, tiny_run: list[str], together: str) -> None:
    """So much larger that it must."""
    large = "qk_norm=none model.n_layer=8 model.n_embd=256"
    words = [f"variants=qk_norm=none;large: {large}", f"together={together}", "rounds=2", "iters=3"]
    result, _ = benchmark(bench_train, *words, *tiny_run)
    assert [*result["variants"]] == ["qk_norm=none", "large"] and [*result["time_over_first"]] == ["large"]
    assert result["time_over_first"]["large"]["lowest"] > 1


def test_a_name_of_two_variants_is_refused() -> None:
    with pytest.raises(ConfigError, match="names a twice"):
        by_name("a: qk_norm=none;b: qk_norm=none;a: qk_norm=rms")


def test_sampling_of_peers_alternates_with_ours(benchmark: Benchmark, tiny_run: list[str], peer: str) -> None:
    words = [peer, f"old={ROOT}", "tokens=50", "rounds=1", *tiny_run]
    result, _ = benchmark(bench_sample, *words)
    for n in (1, 10):
        rows = result[f"{n}_sequences"]
        for side in ("ours", "old", "peer"):
            assert rows[side]["tok_per_sec"] == pytest.approx(n * 50 / rows[side]["seconds"], rel=0.01)
        for key, side in (("ratio", "peer"), ("ratio_to_old", "old")):
            assert rows[key]["median"] == pytest.approx(rows[side]["seconds"] / rows["ours"]["seconds"])


def test_sampling_times_of_variants_are_relative_to_the_first(benchmark: Benchmark, tiny_run: list[str]) -> None:
    words = ["variants=qk_norm=none;qk_norm=lp", "tokens=20", "rounds=1", *tiny_run]
    result, _ = benchmark(bench_sample, *words)
    for n in (1, 10):
        rows = result[f"{n}_sequences"]
        none, lp = (rows["variants"][name]["tok_per_sec"] for name in ("qk_norm=none", "qk_norm=lp"))
        assert rows["time_over_first"]["qk_norm=lp"]["median"] == pytest.approx(none / lp, rel=0.01)
