"""Any words and any YAML end in success or in one clean line, with nothing written."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.refusals import Outcome, contents
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from variants import FULL

import sample
import train
from core.cli import run_script
from core.schema import flatten
from scripts import compare, report
from sweeps import launch, status
from training.config import TrainConfig, to_yaml

EXAMPLES = 2000 if FULL else 40
fuzzed = settings(
    max_examples=EXAMPLES, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip

KEYS = sorted({*flatten(yaml.safe_load(to_yaml(TrainConfig()))), "model", "qk_norm", "attention", "data", "optim"})
KEYS = [key for key in KEYS if key != "plugins"]  # which are there to be imported
ODD = [
    "", "null", "nan", "inf", "-inf", "1e999", "-0", "0", "1", "2", "3.5", "true", "yes", "[]", "{}", "[1,2]", "{a:1}",
    "'", '"', "${a}", "${oc.env:HOME}", "${", "\\", "a b", "é", "𝒳", "\t", "=", "a=b", "9" * 40, "9" * 5000, "../..",
    "/", "/dev/null", "~", "~x", "*", "?", "lp", "rms", "mla", "muon", "<script>", "$\\foo$", "{}[]", "a,b", "1,2",
    "range(3)", "!!python/name:os.system",
]  # fmt: skip
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
VALUES = st.one_of(st.sampled_from(ODD), TEXT, st.integers().map(str), st.floats().map(repr))
WORDS = st.one_of(st.tuples(st.sampled_from(KEYS), VALUES).map("=".join), st.tuples(TEXT, VALUES).map("=".join), TEXT)
PLAIN = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.sampled_from(ODD), TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=6,
)


def check_clean(folder: Path, call: Callable[[], tuple[int, str]], given: Any) -> None:
    """call() gives the exit status and standard error of a program with these words."""
    before = contents(folder)
    status, said = call()
    assert status in (0, 2), (given, status, said)
    if status == 2:
        assert said.startswith("error: ") and said.count("\n") == 1 and len(said) < 2000, (given, said)
    assert contents(folder) == before


@fuzzed
@given(words=st.lists(WORDS, min_size=1, max_size=4))
def test_any_overrides_of_train_end_in_success_or_one_line(words: list[str], folder: Path, outcome: Outcome) -> None:
    base = ["data=text", "data.path=corpus.txt", "device=cpu"]
    check_clean(folder, lambda: outcome(train.main, *base, *words, "dry_run=true"), words)


OTHERS: dict[str, tuple[Callable[[list[str]], int], list[str]]] = {
    "launch": (lambda words: launch.main([*words, "dry_run=true"]), ["sweep", "sweep_dir", "sweep.parts", "launcher"]),
    "sample": (partial(run_script, sample.SampleConfig, sample.sample, ""), ["run"]),
    "status": (partial(run_script, status.SweepPlace, status.print_status, ""), ["sweep", "sweep_dir"]),
    "report": (report.main, ["sweep", "sweep_dir", "from", "run", "out", "watch", "wandb"]),
    "compare": (partial(run_script, compare.CompareOptions, compare.compare_runs, ""), ["a", "b", "data", "path"]),
}


@pytest.mark.parametrize("program", OTHERS)
@fuzzed
@given(data=st.data())
def test_any_words_of_other_programs_end_in_success_or_one_line(
    program: str, data: st.DataObject, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main, keys = OTHERS[program]
    asked = st.tuples(st.sampled_from(keys), VALUES).map("=".join)
    words = data.draw(st.lists(st.one_of(asked, WORDS), min_size=1, max_size=4))
    check_clean(folder, lambda: (main(words), capsys.readouterr().err), words)


@settings(fuzzed, max_examples=EXAMPLES if FULL else 25)  # 0.2 s each
@given(data=st.data())
def test_any_yaml_of_a_sweep_ends_in_success_or_one_line(
    data: st.DataObject, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good: dict[str, Any] = {
        "title": "t", "overrides": ["data=text", "data.path=corpus.txt"], "folds": [0], "seeds": [1],
        "grid": {"qk_norm": ["rms"]}, "parts": {"a": {"overrides": []}}, "compare": {"x": {"baseline": "a/rms"}},
        "also": {"grad_norm": "max"}, "paper": {},
    }  # fmt: skip
    keys = data.draw(st.lists(st.sampled_from([*good]), max_size=2, unique=True))
    changed = {**good, **{key: data.draw(PLAIN) for key in keys}, **data.draw(st.dictionaries(TEXT, PLAIN, max_size=1))}
    text = yaml.safe_dump(changed, allow_unicode=True)
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(text)))
        text = text[:at] + data.draw(TEXT) + text[at + data.draw(st.integers(0, 5)) :]
    file = folder / "fuzz.yaml"
    file.write_text(text)
    words = [f"sweep={file}", "sweep_dir=sweep", "dry_run=true"]
    check_clean(folder, lambda: (launch.main(words), capsys.readouterr().err), text)
