"""scripts/reporting/ledger.py: a claim's row from a stored study."""

import itertools
import math
from pathlib import Path

import pytest
from helpers.reports import Made, at_rates, falling, sweep_of

from core.schema import ConfigError
from scripts import report
from scripts.reporting import ledger

ROWS = """
A paper:
- claim: near text is lower
  direction: lower
  parts:
    - {label: "p = 2:", study: leak, weights: {"split=near,p=2": 1, "split=far,p=2": -1}}
    - {label: "p = 4:", study: leak, weights: {"split=near,p=4": 1, "split=far,p=4": -1}}
"""


def claim(rows: str, folder: Path) -> list[str]:
    """The cells of the only claim of a ledger with these rows."""
    (folder / "ledger.yaml").write_text(rows)
    (line,) = ledger.ledger(folder / "ledger.yaml").splitlines()[4:]
    return [cell.strip() for cell in line.split("|")[1:-1]]


def first_part(rows: str) -> str:
    """The rows without the second part of their claim."""
    return rows.rpartition("    - {")[0]


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(ledger, "RESULTS", tmp_path / "results")
    for known in (ledger.stored, ledger.families_of):
        known.cache_clear()
        monkeypatch.setattr(ledger, known.__name__, known.__wrapped__)  # the folder changes within a test
    return tmp_path / "results"


def test_each_part_is_a_paired_difference_with_its_interval_and_verdict(results: Path, tmp_path: Path) -> None:
    made = Made(tmp_path / "leak")
    for fold in (0, 1, 2):
        made.run("split=near,p=2", fold, falling(1.5 - 0.001 * fold))
        made.run("split=far,p=2", fold, falling(1.6))
        made.run("split=near,p=4", fold, falling(1.4))
        made.run("split=far,p=4", fold, falling(1.6 + 0.001 * fold))
    report.report(sweep_of(made.path), results / "leak", [])
    row = claim(ROWS, tmp_path)
    assert row[1].startswith("p = 2: −0.1010 (−0.10") and "p = 4: −0.20" in row[1]
    assert row[2] == "reproduced" and row[4].startswith("3 folds")


def test_a_limit_is_corrected_over_the_row(results: Path, tmp_path: Path) -> None:
    rows = """
A paper:
- claim: below
  limit: 1.55
  parts:
    - {label: "near:", study: leak, weights: {"split=near,p=2": 1}}
    - {label: "far:", study: leak, weights: {"split=far,p=2": 1}}
"""
    made = Made(tmp_path / "leak")
    for fold, noise in enumerate((0.0, 0.02, -0.015)):
        made.run("split=near,p=2", fold, falling(1.5 + noise))  # p = 0.039 from the limit
        made.run("split=far,p=2", fold, falling(1.5 + 10 * noise))
    report.report(sweep_of(made.path), results / "leak", [])
    row = claim(rows, tmp_path)
    assert "near: 1.50 (1.46 to 1.55)" in row[1] and row[2] == "no power"  # 1.545, below the limit
    assert claim(first_part(rows), tmp_path)[2] == "reproduced"  # alone


STABLE_ROW = """
A paper:
- claim: stable at a higher rate
  direction: higher
  least: 1.0
  parts: [{study: rates, metric: highest stable rate, weights: {p=3: 1, p=2: -1}}]
"""


def test_a_stable_rate_is_known_to_the_step_of_its_grid(results: Path, tmp_path: Path) -> None:
    """Readings that differ by 0.2 doublings on average leave room for a whole one, where the grid's step is one; not
    where it is half of one; and for anything where the highest rate of the grid is stable."""
    for step, top, verdict in ((2.0, False, "no power"), (2**0.5, False, "excluded"), (2**0.5, True, "no power")):
        made = Made(tmp_path / f"rates_{step}_{top}")
        for seed, p in itertools.product(range(1, 11), (2, 3)):
            last = 2 if p == 3 and seed == 1 else 1  # the highest rate of the grid that this run stands
            curves = {0.1 * step**i: falling(2.0) if i <= last else {0: 4.0} for i in range(3 if top else 4)}
            at_rates(made, p, seed, curves)
        report.report(sweep_of(made.path), results / "rates", [])
        row = claim(STABLE_ROW, tmp_path)
        assert row[2] == verdict, (row, step)
        assert f"grid ± {'inf' if top else format(math.log2(step), '.3g')})" in row[1]


def test_an_exclusion_is_corrected_over_the_row(results: Path, tmp_path: Path) -> None:
    """Of one part the least difference is excluded (p = 0.036), of two that say the same it is not."""
    made = Made(tmp_path / "leak")
    for fold, noise in enumerate((0.0, 0.0117, -0.0117)):
        for p in (2, 4):
            made.run(f"split=near,p={p}", fold, falling(1.5 + noise))
            made.run(f"split=far,p={p}", fold, falling(1.5))
    report.report(sweep_of(made.path), results / "leak", [])
    rows = ROWS.replace("  parts:", "  least: 0.04\n  parts:")
    assert [claim(of, tmp_path)[2] for of in (rows, first_part(rows))] == ["no power", "excluded"]


def test_a_study_that_is_not_stored_is_refused(results: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leak"):
        claim(ROWS, tmp_path)
