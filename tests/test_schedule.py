import math
from collections.abc import Callable

import pytest

from core.schema import validate
from training.config import ConstantOptions, CosineOptions, DecayOptions, LinearOptions, TrainConfig, WSDOptions
from training.schedule import learning_rate


@pytest.mark.parametrize("min_lr", [0.0, 1e-4])
@pytest.mark.parametrize(
    ("options", "last", "remaining"),
    [
        (CosineOptions, 100, {325: (2 + math.sqrt(2)) / 4, 550: 0.5}),  # half a cosine
        (LinearOptions, 100, {325: 0.75, 550: 0.5}),
        (WSDOptions, 800, {850: 0.5, 900: 1 - math.sqrt(0.5), 999: 1 - math.sqrt(199 / 200)}),  # 1 - sqrt(1/4), …
    ],
)
def test_a_rate_rises_by_a_line_falls_by_its_formula_and_is_flat_then(
    options: Callable[..., DecayOptions], last: int, remaining: dict[int, float], min_lr: float
) -> None:
    """last: the last iteration at the full rate; WSD decays over the last fifth. remaining: iteration -> the share of
    the way from min_lr to the full rate."""
    config = TrainConfig(max_iters=1000, schedule=options(warmup_iters=100, min_lr=min_lr))
    lr = [learning_rate(step, config) for step in range(1201)]
    assert lr[0] == pytest.approx(1e-3 / 101) and lr[49] == pytest.approx(1e-3 * 50 / 101)  # never zero
    assert set(lr[100 : last + 1]) == {max(lr)} == {1e-3}
    for step, share in remaining.items():
        assert lr[step] == pytest.approx(min_lr + (1e-3 - min_lr) * share)
    assert lr[1000] == lr[1200] == pytest.approx(min_lr)
    assert all(a >= b for a, b in zip(lr[100:], lr[101:], strict=False))


def test_lr_decay_iters_frees_the_schedule_from_max_iters() -> None:
    schedule = CosineOptions(lr_decay_iters=5000)
    short, long = TrainConfig(max_iters=10, schedule=schedule), TrainConfig(max_iters=5000, schedule=schedule)
    assert [learning_rate(s, short) for s in range(200)] == [learning_rate(s, long) for s in range(200)]


def test_a_warm_up_may_last_until_wsd_decays() -> None:
    validate(TrainConfig(max_iters=1000, schedule=WSDOptions(warmup_iters=800)))  # as late: test_bad_input.py


@pytest.mark.parametrize("decay_frac", [0.05, 0.9, 1.0])
def test_wsds_decay_takes_its_fraction_of_lr_decay_iters(decay_frac: float) -> None:
    schedule = WSDOptions(warmup_iters=0, decay_frac=decay_frac, lr_decay_iters=400)
    config = TrainConfig(max_iters=50, schedule=schedule)
    lr = [learning_rate(step, config) for step in range(401)]
    start = round(400 * (1 - decay_frac))
    assert set(lr[: start + 1]) == {1e-3} and lr[start + 1] < 1e-3 and lr[400] == 0 < lr[399]


def test_constant_is_flat_after_its_warm_up_and_knows_no_end() -> None:
    short, long = (TrainConfig(max_iters=n, schedule=ConstantOptions(warmup_iters=10)) for n in (5, 5000))
    lr = [learning_rate(step, short) for step in range(6000)]
    assert lr[0] == pytest.approx(1e-3 / 11) and lr[9] == pytest.approx(1e-3 * 10 / 11)
    assert set(lr[10:]) == {1e-3}
    assert lr == [learning_rate(step, long) for step in range(6000)]
    assert short.trajectory == long.trajectory  # so that max_iters may grow


@pytest.mark.parametrize("schedule", [CosineOptions(), LinearOptions(), WSDOptions()])
def test_max_iters_is_part_of_the_trajectory_where_the_decay_ends_there(schedule: DecayOptions) -> None:
    short, long = (TrainConfig(max_iters=n, schedule=schedule) for n in (1000, 5000))
    assert short.trajectory != long.trajectory


def test_a_vanishing_decay_is_a_step_to_min_lr() -> None:
    config = TrainConfig(max_iters=1000, schedule=WSDOptions(decay_frac=1e-20))
    assert [learning_rate(step, config) for step in (999, 1000, 1001)] == [1e-3, 1e-3, 0.0]
