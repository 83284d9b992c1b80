"""metrics.jsonl, and what is read off it."""

import json
import math
import os
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import Program, run_python
from matplotlib.image import imread

from core.record import Lines, Metrics
from core.rundir import read_status
from training.evaluate import spike_score
from training.metrics import ANY, ROWS, row_of
from training.tracking import draw_curve


@pytest.fixture
def metrics(tmp_path: Path) -> Metrics:
    return Metrics(tmp_path / "metrics.jsonl", 0)


def test_lines_start_with_iter_are_on_disk_at_once_and_hold_floats_exactly(metrics: Metrics) -> None:
    metrics.write({"train/loss": 1.5, "iter": 3, "val/loss": None, "grad_norm": math.nan, "lr": math.inf})
    assert metrics.path.read_text() == '{"iter": 3, "train/loss": 1.5, "grad_norm": null, "lr": null}\n'
    values = [0.1, 1 / 3, 1e-300, 4.170000076293945, -0.0]
    for i, value in enumerate(values):
        metrics.write({"iter": i, "x": value})
    assert [line["x"] for line in Metrics.read(metrics.path)[1:]] == values


def test_cut_and_write_again_gives_the_uninterrupted_file(metrics: Metrics) -> None:
    lines = [{"iter": i, "train/loss": 1 / (i + 1)} for i in range(0, 60, 10)]
    for line in lines:
        metrics.write(line)
    whole = metrics.path.read_bytes()
    for step in (0, 15, 20, 60, 1000):
        for torn in (b"", b'{"iter": 70, "tr', b'{"iter": 1}', b"\0" * 9):
            metrics.path.write_bytes(whole + torn)
            metrics = Metrics(metrics.path, step)
            assert metrics.path.read_bytes() == whole[: sum(len(json.dumps(x)) + 1 for x in lines if x["iter"] < step)]
            for line in lines:
                if line["iter"] >= step:
                    metrics.write(line)
            assert metrics.path.read_bytes() == whole


def test_a_reader_may_keep_only_the_last_lines(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("".join(f'{{"iter": {i}}}\n' for i in range(9)))
    lines = Lines(tmp_path / "x.jsonl", keep=2)
    assert lines.update() and [line["iter"] for line in lines.lines] == [7, 8] and not lines.update()


def test_cut_keeps_the_bytes_of_lines_that_others_wrote_and_a_reader_sees_no_half_line(metrics: Metrics) -> None:
    kept = b'{"iter":1,  "x": 1.50}\n{"x": 2e0, "iter": 2}\n'
    metrics.path.write_bytes(kept + b'{"iter": 2}\n{"iter": 3}\nnot json\n[1]\n{"x": 1}\n')
    Metrics(metrics.path, 3)
    assert metrics.path.read_bytes() == kept
    metrics.path.write_bytes(b'{"iter": 1}\n{"iter": 2')
    assert Metrics.read(metrics.path) == [{"iter": 1}]


def test_a_file_of_nothing_but_line_feeds_is_given_up_at_once(metrics: Metrics) -> None:
    """55 MB of them took a report minutes. A crash damages one line, and a thousand are passed over."""
    good = b'{"iter": 1}\n'
    large = b'{"iter": 0, "x": [' + b"0," * 2**21 + b"0]}\n"
    for damage, kept in ((b"\n" * 999 + large, good), (b"{\n" * 2000, b""), (b"\n" * 20_000_000, b"")):
        metrics.path.write_bytes(damage + good)
        began = time.monotonic()
        assert Metrics.read(metrics.path) == ([{"iter": 1}] if kept else [])
        assert Metrics(metrics.path, 3).path.read_bytes() == kept and time.monotonic() - began < 5


def scored(losses: list[float], window: int, sigmas: float, least: int) -> float:
    """The share of losses that far from the mean of those before, by the definition, in per cent."""
    spikes = []
    for i, loss in enumerate(losses):
        past = np.array(losses[:i][-window:])
        if i >= least:
            spikes.append(abs(loss - past.mean()) >= sigmas * np.sqrt(((past - past.mean()) ** 2).mean()))
    return 100 * float(np.mean(spikes))


def test_spike_score_is_its_definition() -> None:
    noise = 0.05 * np.random.default_rng(0).standard_normal(400)
    losses = (3 * np.exp(-np.arange(400) / 200) + 1 + noise).tolist()
    assert spike_score(losses) == 0.0
    for at, height in ((100, 40.0), (250, -30.0), (399, 9.0)):
        losses[at] += height
    assert spike_score(losses) == pytest.approx(100 * 2 / 370)  # the third is within 7 sigmas of what the first left
    for window, sigmas, least in ((1000, 7.0, 30), (50, 7.0, 30), (50, 2.5, 100), (20, 3.0, 5)):
        score = spike_score(losses, window, sigmas, least)
        assert score == pytest.approx(scored(losses, window, sigmas, least)) and score
    assert spike_score(losses, window=50) == pytest.approx(100 * 3 / 370)  # which no longer remembers it


def test_spike_score_needs_a_past_and_a_spread() -> None:
    assert spike_score([]) is None and spike_score([1.0] * 29 + [50.0]) is None
    assert spike_score([1.0, 1.1] * 15 + [50.0]) == 100
    assert spike_score([1.0] * 30 + [50.0]) == 0  # of a constant loss any change would be one


def test_a_curve_shows_both_losses_and_an_empty_run(tmp_path: Path) -> None:
    (run := tmp_path / "run$\\foo$").mkdir()  # which is no mathematics
    metrics = Metrics(run / "metrics.jsonl", 0)
    draw_curve(run)
    assert (run / "curve.png").stat().st_size > 1000
    for i in range(50):
        metrics.write({"iter": i, "train/loss": 4 / (i + 1), "val/loss": None if i % 10 else 5 / (i + 1)})
    metrics.write({"iter": 50, "train/loss": math.nan, "val/loss": {"a": []}})  # the second is a stranger's
    draw_curve(run)
    pixels = (imread(run / "curve.png")[:, :, :3] * 255).round()
    for colour in ((0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)):
        assert (pixels == colour).all(axis=2).sum() > 100


def test_settings_of_pictures_in_the_current_folder_are_not_read(tmp_path: Path) -> None:
    """matplotlib reads a matplotlibrc there, waits for ever where it is a pipe, and once ran what it held."""
    os.mkfifo(tmp_path / "matplotlibrc")
    code = """if True:
        from pathlib import Path
        from scripts.reporting.charts import wide_font
        from training.tracking import draw_curve
        Path("metrics.jsonl").touch()
        assert draw_curve(Path("."))
        wide_font()"""
    run_python(code, cwd=tmp_path)


def test_a_picture_fails_no_run(tiny_run: list[str], program: Program, tmp_path: Path) -> None:
    words = [*tiny_run, "max_iters=2", "plot=true", "out_dir=run"]
    done = program("train.py", *words, env={**os.environ, "MPLBACKEND": "nonsense"})
    assert "warning: curve.png is not drawn: ValueError: " in done.stdout and ", curve.png" not in done.stdout
    assert read_status(tmp_path / "run")["state"] == "done"


@pytest.mark.parametrize(
    "words",
    [
        ["attention=mla", "model.position=rope", "model.rope_theta=10000", "qk_norm=lp", "qk_clip=log"],
        ["qk_norm=rms"],
        ["qk_clip=clip"],
    ],
)
def test_what_a_run_records_has_a_row(words: list[str], tiny_run: list[str], forked: Program, tmp_path: Path) -> None:
    """And no key has two."""
    forked("train.py", *tiny_run, *words, "eval_iters=2", "max_iters=4", "out_dir=run")
    keys = {key for line in Metrics.read(tmp_path / "run" / "metrics.jsonl") for key in line}
    assert len(keys) > 15 and [key for key in keys if row_of(key) is ANY] == []
    assert all(row_of(row.key) is row for row in ROWS)
