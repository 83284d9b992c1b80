import ast
import math
from pathlib import Path

import pytest
from conftest import ROOT

from training.config import CosineConfig, TrainConfig
from training.schedule import learning_rate


def test_cosine_is_linear_then_half_a_cosine_then_flat() -> None:
    config = TrainConfig(max_iters=1000, schedule=CosineConfig(warmup_iters=100, min_lr=1e-4))
    lr = [learning_rate(step, config) for step in range(1201)]
    assert lr[0] == pytest.approx(1e-3 / 101) and lr[49] == pytest.approx(1e-3 * 50 / 101)  # never zero
    assert lr[100] == max(lr) == pytest.approx(1e-3)
    assert lr[550] == pytest.approx((1e-3 + 1e-4) / 2)  # half-way down
    assert lr[325] == pytest.approx(1e-4 + 9e-4 * (2 + math.sqrt(2)) / 4)
    assert lr[1000] == lr[1200] == pytest.approx(1e-4)
    assert all(a >= b for a, b in zip(lr[100:], lr[101:], strict=False))


def test_lr_decay_iters_frees_the_schedule_from_max_iters() -> None:
    schedule = CosineConfig(lr_decay_iters=5000)
    short, long = TrainConfig(max_iters=10, schedule=schedule), TrainConfig(max_iters=5000, schedule=schedule)
    assert [learning_rate(s, short) for s in range(200)] == [learning_rate(s, long) for s in range(200)]


def test_the_schedule_needs_no_torch() -> None:
    tree = ast.parse((Path(ROOT) / "training" / "schedule.py").read_text())
    imported = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    imported |= {alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}
    assert imported == {"math", "training.config"}
