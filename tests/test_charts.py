"""The charts of a report, each drawn without a sweep."""

import re
from collections import Counter
from dataclasses import replace

import pytest
from helpers.reports import words_of

from scripts.reporting import charts
from scripts.reporting.charts import LOSS, Figure, Series, curve_chart, styles, svg, value_axis
from scripts.reporting.runs import Curve


def series_with(curve: Curve) -> list[Series]:
    return [Series("a", styles({"": {"a": "a"}})["a"], {(1, None): curve})]


@pytest.mark.parametrize("panels", [False, True])
def test_log_axes_have_plain_numbers(panels: bool) -> None:
    series = series_with({i: 10.0 ** (i / 10) for i in range(0, 50, 10)})
    two = {"one": series, "two": series}
    chart = charts.panel_chart(two, "grad_norm") if panels else curve_chart(series, "grad_norm")
    words = words_of(svg(Figure("x", "steep", chart, "")).decode())
    assert {"steep", "grad_norm, log scale", "iteration", "a"} <= {*words} and {"1", "100", "10000"} <= {*words}


@pytest.mark.parametrize("key", [LOSS, "train/loss"])
def test_the_axis_of_a_loss_is_that_of_its_later_part(key: str) -> None:
    more: dict[int, float] = {40: 1.9, 60: 1.9, 80: 1.9, 100: 1.8}
    early = {0: 9.0, 5: 5.0, 20: 2.0, 40: 1.9, 60: 1.8}  # so far: four evaluations after a tenth of it
    for curve, above in (
        ({0: 9.0, 5: 5.0, 20: 2.0, **more}, True),
        ({0: 2.0, 20: 60.0, **more}, False),
        (early, False),
    ):
        series = [replace(s, goes_on=curve is early) for s in series_with(curve)]
        low, high = value_axis(series, key)["scale"]["domain"]
        late = [value for i, value in curve.items() if i > 10 or curve is early]
        assert low < min(late) < low + 3 and max(late) < high < max(late) + 3
        assert ("above the axis" in charts.remarks(series, key)) == above


def test_the_same_chart_has_the_same_bytes_whatever_was_drawn_before() -> None:
    figures = [Figure("x", "t", curve_chart(series_with({0: 2.0, 9: level}), LOSS), "") for level in (1.0, 1.5)]
    first, other, again = (svg(figures[i]) for i in (0, 1, 0))
    assert first == again != other and b"clip0" in first


@pytest.mark.slow
def test_many_settings_have_a_panel_each() -> None:
    curves = {f"m{i}": {0: 4.0, 10: 3.0 - i / 20, 20: 2.0 - i / 20, 30: 1.9 - i / 20} for i in range(10)}
    look = styles({"": {name: name for name in curves}})
    series = [Series(name, look[name], {(1, None): curve}) for name, curve in curves.items()]
    last = replace(series[-1], diverged={(2, None): {0: 4.0, 10: 2.5}})
    picture = svg(Figure("x", "many", curve_chart([*series[:-1], last], LOSS), "")).decode()
    assert {*curves} <= {*words_of(picture)}
    assert Counter(re.findall(r'stroke-width="(1\.6|0\.7)"', picture)) == {"1.6": 10, "0.7": 1}  # one diverged
    assert "layer" in curve_chart(series[:9], LOSS)
    dashed = [svg(Figure("x", "t", curve_chart(series, "A − B", zero), "")).count(b"4,3") for zero in (False, True)]
    assert dashed[1] - dashed[0] == 10  # a line at 0 in each panel


def test_a_number_has_one_colour_in_every_part_and_a_second_sign() -> None:
    parts = {"a": {f"a/p={p}": f"p={p}" for p in (1, 1.5, 2, 4)}, "b": {"b/p=2": "p=2", "b/p=4": "p=4"}}
    look = styles(parts)
    assert look["a/p=2"] == look["b/p=2"] and look["a/p=4"] == look["b/p=4"]
    names = {"": {name: name for name in ("rms", "none", "lp", *"abcdefgh")}}
    assert len({(s.colour, tuple(s.dashes)) for s in styles(names).values()}) == 11
