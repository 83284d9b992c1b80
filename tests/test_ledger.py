"""scripts/reporting/ledger.py: rows of studies that are yet to come."""

from pathlib import Path

import pytest
from test_report import Made, falling, sweep_of

from core.schema import ConfigError
from scripts import report
from scripts.reporting import ledger

ROWS = """
A paper:
- claim: old
  verdict: not tested
  until: leak
- claim: new
  direction: lower
  parts:
    - {label: "p = 2:", study: leak, weights: {"split=near,p=2": 1, "split=far,p=2": -1}, waits: true}
    - {label: "p = 4:", study: leak, weights: {"split=near,p=4": 1, "split=far,p=4": -1}, waits: true}
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


@pytest.mark.slow
def test_a_row_waits_for_its_study_which_then_replaces_another_row(results: Path, tmp_path: Path) -> None:
    (tmp_path / "ledger.yaml").write_text(ROWS)
    assert [row[0] for row in claims(tmp_path / "ledger.yaml")] == ["old"]
    made = Made(tmp_path / "leak")
    for fold in (0, 1, 2):
        made.run("split=near,p=2", fold, falling(1.5 - 0.001 * fold))
        made.run("split=far,p=2", fold, falling(1.6))
        made.plan("split=near,p=4", 1, fold)  # p = 4 is not begun
    report.report(sweep_of(made.path), results / "leak", [])
    assert [row[0] for row in claims(tmp_path / "ledger.yaml")] == ["old"]
    for fold in (0, 1, 2):
        made.run("split=near,p=4", fold, falling(1.4))
        made.run("split=far,p=4", fold, falling(1.6 + 0.001 * fold))
    report.report(sweep_of(made.path), results / "leak", [])
    (row,) = claims(tmp_path / "ledger.yaml")
    assert row[0] == "new" and row[1].startswith("p = 2: −0.1010 (−0.10") and "reproduced" in row[2]
    assert row[4].startswith("3 folds") and "p = 4: −0.20" in row[1]


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


def test_a_row_that_waits_for_what_is_no_sweep_is_refused(results: Path, tmp_path: Path) -> None:
    (tmp_path / "ledger.yaml").write_text(ROWS.replace("leak", "leek"))
    with pytest.raises(ConfigError, match="study=leek is no sweep"):
        claims(tmp_path / "ledger.yaml")
