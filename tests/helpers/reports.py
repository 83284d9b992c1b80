"""Sweeps made by hand, of every state, and what a report says of them."""

import base64
import csv
import gzip
import io
import itertools
import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny_config

from data.options import TinyShakespeareOptions
from model.options import LpNormOptions
from scripts.reporting.comparisons import compared_families
from scripts.reporting.page import markdown, outline
from scripts.reporting.runs import Sweep, read_sweep
from scripts.reporting.stored import runs_csv
from scripts.reporting.tables import Table, facts
from training.config import AdamWOptions

STEPS = [0, 10, 20, 30, 40]
Curve = dict[int, float]


class Made:
    """A sweep's directory with the files that the report reads. Settings are "part/p=3" or "p=3"."""

    def __init__(self, path: Path, **definition: Any) -> None:
        self.path = path
        path.mkdir()
        self.definition = {"title": "A sweep", "overrides": ["max_iters=40"], "parts": {}, **definition}
        self.lines: list[dict[str, Any]] = []

    def plan(self, setting: str, seed: int, fold: int | None, **changes: Any) -> Path:
        """Plan a run, with `changes` to its config. Returns its directory, which is not there."""
        config = tiny_config(LpNormOptions(p=float(setting.partition("p=")[2])))
        config = replace(config, seed=seed, max_iters=40, data=TinyShakespeareOptions(fold=fold), threads=1)
        config = replace(config, **changes)
        run_id = f"{setting.replace('/', '-')}-fold{fold}-s{seed}"
        line = {"id": run_id, "settings": [setting], "seed": seed, "fold": fold, "overrides": []}
        self.lines.append({**line, "config": asdict(config)})
        frozen = [{"commit": "c0ffee", "overrides": [], "runs": 1}]
        about = {"name": "made", "title": "A sweep", "frozen": frozen, "sweep": self.definition}
        (self.path / "sweep.json").write_text(json.dumps(about))
        (self.path / "plan.jsonl").write_text("".join(json.dumps(line) + "\n" for line in self.lines))
        return self.path / run_id

    def run(self, setting: str, fold: int | None, curve: Curve, seconds: float = 10.0, seed: int = 1) -> Path:
        """A run that is done."""
        path = self.plan(setting, seed, fold)
        finish(path, curve, seconds)
        return path

    def run_part_a(self) -> None:
        """p = 2, 3, 4 over five folds, all done."""
        for fold, (p, losses) in itertools.product(range(5), LOSSES.items()):
            self.run(f"a/p={p}", fold, falling(losses[fold], 40 if fold else 30), 100 + p + fold)


def finish(path: Path, curve: Curve, seconds: float = 10.0, status: str = "done", **extra: Any) -> None:
    path.mkdir()
    loss, step = min((loss, step) for step, loss in curve.items())
    lines = [{"iter": i, "val/loss": x, "train/loss": x - 0.1} for i, x in curve.items()]
    lines.insert(1, {"iter": 5, "train/loss": 3.0})
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    last = max(curve)
    summary = {
        "status": status, "iter": last, "val/loss": curve[last], "val/loss_min": loss, "iter_of_min": step,
        "train/loss": 0.5, "seconds": seconds, "tok_per_sec": 1000.0, "dtype": "torch.float32", "parameters": 4242,
        "device": "cpu (test)", "commit": "abc", "corpus_sha256": "5eed",
    }  # fmt: skip
    (path / "summary.json").write_text(json.dumps(summary))
    (path / "status.json").write_text(json.dumps({"state": status, "iter": last, **extra}))


def state(path: Path, **status: Any) -> None:
    path.mkdir()
    (path / "status.json").write_text(json.dumps(status))


def falling(to: float, at: int = 40) -> Curve:
    """A curve with its minimum `to` at iteration `at`."""
    return {i: to + 0.05 * abs(i - at) for i in STEPS}


def sweep_of(path: Path) -> Sweep:
    return read_sweep(path, "made")


def text_of(sweep: Sweep) -> str:
    return markdown(sweep.title, facts(sweep), outline(sweep, compared_families(sweep)))


def charts_of(out: Path) -> dict[str, Any]:
    """The Vega-Lite specifications of a page."""
    packed = re.search(r'id="charts">([^<]*)<', (out / "report.html").read_text())
    assert packed is not None
    return dict(json.loads(gzip.decompress(base64.b64decode(packed[1]))))


def rows_of(table: Table) -> list[dict[str, str]]:
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def csv_of(sweep: Sweep) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(runs_csv(sweep))))


LOSSES = {2: [1.50, 1.62, 1.41, 1.55, 1.47], 3: [1.44, 1.57, 1.36, 1.53, 1.40], 4: [1.51, 1.60, 1.42, 1.54, 1.50]}
COMPARE = {"p": {"title": "each p against p = 2", "baseline": "a/p=2", "settings": ["a/*"]}}


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """p = 2, 3, 4 over five folds, all done, with a paper to compare with."""
    paper = {"name": "the paper", "val_loss": {"*/p=2": 1.40506, "a/p=3": 1.364543}}
    sweep = Made(tmp_path / "sweep", parts={"a": {"title": "part a"}}, compare=COMPARE, paper=paper)
    sweep.run_part_a()
    return sweep


def at_rates(sweep: Made, p: int, seed: int, curves: dict[float, Curve]) -> None:
    """Runs at each learning rate; one whose curve ends at its beginning has diverged."""
    for rate, curve in curves.items():
        path = sweep.plan(f"learning_rate={rate},p={p}", seed, None, optim=AdamWOptions(learning_rate=rate))
        if len(curve) == 1:
            finish(path, curve, status="diverged", reason="train/loss nan at iteration 7")
        else:
            finish(path, curve)


def words_of(picture: str) -> list[str]:
    return re.findall(r">([^<>]+)</text>", picture)
