"""A stranger's files: valid JSON of the wrong shape ends in a report or in one clean line."""

import json
from contextlib import suppress

import pytest
from test_report import Made, made, sweep_of, text_of

from core.cli import run_script
from core.schema import ConfigError
from sweeps import status

__all__ = ["made"]  # a fixture

TEXTS = [
    "[]", '"x"', "3", "null", "{}", "[[1]]", "nan", '{"iter": "x"}', '{"iter": null, "val/loss": 1}', '{"iter": {}}',
    '{"iter": 1e999}', '{"id": null}', "[" * 9000 + "]" * 9000, '{"a":' * 9000 + "1" + "}" * 9000,
    '{"state": ["done"]}', '{"state": {"a": 1}, "iter": "q"}', '{"sweep": 3}', '{"sweep": {"parts": [1]}}',
    '{"sweep": {"title": "\\ud800<script>x</script>"}}', '{"frozen": 3, "sweep": {}}',
]  # fmt: skip
FILES = ["plan.jsonl", "sweep.json", "status.json", "summary.json", "metrics.jsonl", "evaluation.json"]


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_json_of_the_wrong_shape_is_reported_or_refused_in_one_line(
    file: str, made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the file's whole content, as one more line, and as the value of each key in turn."""
    run = next(made.path.glob("*/status.json")).parent
    place = (made.path if file in ("plan.jsonl", "sweep.json") else run) / file
    whole = place.read_text() if place.exists() else "{}"
    contents = [one for text in TEXTS for one in (text, f"{whole}{text}")]
    if file.endswith(".json"):
        known = json.loads(whole)
        contents += [
            json.dumps(known | {key: json.loads(text)}) for text in (TEXTS[1], TEXTS[4], TEXTS[5]) for key in known
        ]
    for content in contents:
        place.write_text(content + "\n")
        with suppress(ConfigError):
            text_of(sweep_of(made.path)).encode()
        exit_status = run_script(status.SweepPlace, status.show, "", [f"sweep_dir={made.path}"])
        said = capsys.readouterr().err
        assert exit_status in (0, 2) and said.count("\n") == (exit_status == 2), (content[:200], said)


def test_a_name_with_tags_is_text_in_table_md(made: Made) -> None:
    about = json.loads((made.path / "sweep.json").read_text())
    about["sweep"]["title"] = "A <script>throw 1</script> <b>title</b> with p < 2"
    (made.path / "sweep.json").write_text(json.dumps(about))
    table = text_of(sweep_of(made.path))
    assert "# A &lt;script>throw 1&lt;/script> &lt;b>title&lt;/b> with p < 2" in table and "<script" not in table


def test_a_run_whose_curve_was_changed_after_its_end_is_left_out_of_comparisons(made: Made) -> None:
    run = next(made.path.glob("*/status.json")).parent
    summary = json.loads((run / "summary.json").read_text())
    for records, says in (({"metrics.jsonl": "0" * 64}, "has changed since"), ({}, "")):
        (run / "summary.json").write_text(json.dumps(summary | {"records": records}))
        (found,) = [one for one in sweep_of(made.path).runs if one.id == run.name]
        assert found.done == (not says) and says in found.state.reason
