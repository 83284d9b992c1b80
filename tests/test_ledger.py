"""scripts/reporting/ledger.py: a claim's row from a stored study."""

from pathlib import Path

import pytest
from test_report import Made, falling, sweep_of

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


def claims(file: Path) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in ledger.ledger(file).splitlines()[4:]]


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(ledger, "RESULTS", tmp_path / "results")
    for known in (ledger.stored, ledger.families_of):
        known.cache_clear()
        monkeypatch.setattr(ledger, known.__name__, known.__wrapped__)  # the folder changes within a test
    return tmp_path / "results"


def test_each_part_is_a_paired_difference_with_its_interval_and_verdict(results: Path, tmp_path: Path) -> None:
    (tmp_path / "ledger.yaml").write_text(ROWS)
    made = Made(tmp_path / "leak")
    for fold in (0, 1, 2):
        made.run("split=near,p=2", fold, falling(1.5 - 0.001 * fold))
        made.run("split=far,p=2", fold, falling(1.6))
        made.run("split=near,p=4", fold, falling(1.4))
        made.run("split=far,p=4", fold, falling(1.6 + 0.001 * fold))
    report.report(sweep_of(made.path), results / "leak", [])
    (row,) = claims(tmp_path / "ledger.yaml")
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
    (tmp_path / "ledger.yaml").write_text(rows)
    made = Made(tmp_path / "leak")
    for fold, noise in enumerate((0.0, 0.02, -0.015)):
        made.run("split=near,p=2", fold, falling(1.5 + noise))  # p = 0.039 from the limit
        made.run("split=far,p=2", fold, falling(1.5 + 10 * noise))
    report.report(sweep_of(made.path), results / "leak", [])
    (row,) = claims(tmp_path / "ledger.yaml")
    assert "near: 1.50 (1.46 to 1.55)" in row[1] and row[2] == "no power"  # 1.545, below the limit
    (tmp_path / "ledger.yaml").write_text(rows.rpartition("    - {")[0])
    assert claims(tmp_path / "ledger.yaml")[0][2] == "reproduced"  # alone


def test_a_study_that_is_not_stored_is_refused(results: Path, tmp_path: Path) -> None:
    (tmp_path / "ledger.yaml").write_text(ROWS)
    with pytest.raises(ConfigError, match="leak"):
        claims(tmp_path / "ledger.yaml")
