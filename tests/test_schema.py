"""How settings are declared, built, checked and listed: core/schema.py and core/help.py, with settings of their own."""

import shlex
import subprocess
import sys
from dataclasses import FrozenInstanceError
from typing import Annotated, Any, Literal

import pytest
from conftest import ROOT, Program

from core import schema
from core.cli import read_value, run_script
from core.help import help_text
from core.schema import FREE, AtLeast, ConfigError, DefaultWas, Help, Loads, Variants, options, settings_of
from sample import SampleConfig
from training.config import load_config


@options
class Circle:
    """A round one"""

    name: str = "circle"
    radius: Annotated[float, schema.POSITIVE, Help("in metres")] = 1.0


@options
class Ring(Circle):
    """A circle with a hole"""

    name: str = "ring"
    hole: Annotated[float | Literal["half"], DefaultWas(0.5), Help("its radius, or half")] = "half"

    def check(self) -> None:
        schema.require(
            self.hole == "half" or float(self.hole) < self.radius, f"shape.hole={self.hole} must be < shape.radius"
        )


@options
class Drawing:
    title: Annotated[str, schema.NOT_EMPTY, Help("above it")] = schema.REQUIRED
    files: Annotated[tuple[str, ...], FREE, Loads(print, asked=print), Help("read first")] = ()
    copies: Annotated[int, AtLeast(1), DefaultWas(3), Help("sheets")] = 1
    size: Annotated[tuple[float, float], Help("width and height")] = (2.0, 3.0)
    grey: Annotated[float | None, schema.Between(0, 1, "[)"), schema.BeforeItExisted(None), Help("null: none")] = None
    paper: Annotated[Literal["thin", "thick"], FREE, Help("of the sheets")] = "thin"
    draft: Annotated[bool, FREE, Help("fast")] = False
    shape: Annotated[Circle, Variants({"circle": Circle, "ring": Ring}), Help("what is drawn")] = Circle()


def test_what_loads_is_converted_first_wherever_it_is_declared_and_stands_in_the_source() -> None:
    table: dict[str, type] = {"circle": Circle}

    def register_rings(names: tuple[str, ...]) -> None:
        table.update(dict.fromkeys(names, Ring))

    @options
    class Late:
        shape: Annotated[Circle, Variants(table), Help("what is drawn")] = Circle()
        files: Annotated[tuple[str, ...], Loads(register_rings, asked=register_rings)] = ()

    assert settings_of(Late, {"shape": "ring", "files": ["ring"]}).shape == Ring()


def load(**source: Any) -> Drawing:
    drawing: Drawing = settings_of(Drawing, {"title": "A", **source})
    return drawing


BAD: dict[str, dict[str, Any]] = {
    "title= must be given": {"title": schema.REQUIRED},
    "title= must not be empty": {"title": ""},
    "copies=0 must be >= 1 and < 2**31": {"copies": 0},
    "copies=true must be an integer": {"copies": True},
    "copies=1.5 must be an integer": {"copies": 1.5},
    "copie=1 is unknown; did you mean copies?": {"copie": 1},
    "size=[1] must be a list of 2 numbers": {"size": [1]},
    "size=x must be a number": {"size": [1, "x"]},
    "files=a must be a list, as [a]": {"files": "a"},
    "grey=1.0 must be in [0, 1)": {"grey": 1},
    "grey=nan must be in [0, 1)": {"grey": float("nan")},
    "grey=x must be a number or null": {"grey": "x"},
    "paper=Thin must be one of thin, thick; did you mean thin?": {"paper": "Thin"},
    "draft=yes must be true or false": {"draft": "yes"},
    "draft=null must be true or false": {"draft": None},
    "shape.name=cube must be one of circle, ring": {"shape": {"name": "cube"}},
    "shape.hole=1 is unknown: hole belongs to shape=ring": {"shape": {"name": "circle", "hole": 1}},
    "shape.hull=1 is unknown; known here: shape.name, shape.radius": {"shape": {"name": "circle", "hull": 1}},
    "shape.radius=-1.0 must be > 0 and at most 1e+30": {"shape": {"name": "ring", "radius": -1}},
    "shape.hole=big must be a number or half": {"shape": {"name": "ring", "hole": "big"}},
    "shape.hole=2.0 must be < shape.radius": {"shape": {"name": "ring", "hole": 2}},
}


@pytest.mark.parametrize("message", BAD)
def test_a_bad_value_is_named_with_its_key_and_its_rule(message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(**BAD[message])
    assert str(error.value) == message


def test_good_values_keep_their_types_and_integers_become_floats_where_those_are_asked_for() -> None:
    drawing = load(size=[1, 2.5], grey=0, shape={"name": "ring", "radius": 2, "hole": 1})
    assert drawing == Drawing("A", size=(1.0, 2.5), grey=0.0, shape=Ring(radius=2.0, hole=1.0))
    with pytest.raises(FrozenInstanceError):
        drawing.copies = 2  # type: ignore[misc]


def test_what_decides_the_numbers_leaves_out_free_settings_and_what_others_were_named_without() -> None:
    assert schema.deciding(Drawing("A", files=("x",), paper="thick")) == {
        "title": "A", "copies": 1, "size": [2.0, 3.0], "shape.name": "circle", "shape.radius": 1.0,
    }  # fmt: skip
    assert schema.deciding(Drawing("A", grey=0.5))["grey"] == 0.5


def test_earlier_defaults_replace_todays_and_the_words_name_them() -> None:
    drawing, earlier = load(shape={"name": "ring"}), Drawing("A", copies=3, shape=Ring(hole=0.5))
    assert schema.with_earlier_defaults(drawing) == (earlier, ["copies=3", "shape.hole=0.5"])
    only_copies = schema.with_earlier_defaults(drawing, Drawing("B", copies=3, shape=Ring(radius=2.0)))
    assert only_copies == (Drawing("A", copies=3, shape=Ring()), ["copies=3"])
    given = load(copies=2, shape={"name": "ring", "hole": 0.1})
    assert schema.with_earlier_defaults(given) == (given, [])


def test_help_lists_every_setting_once_with_its_default_and_a_line() -> None:
    lines = help_text("Draws.", Drawing).splitlines()
    assert lines[0] == "Draws."
    for start, end in {
        "title=": "must be given: above it",
        "copies=1": "sheets",
        "paper=thin": "thin, thick: of the sheets",
        "shape=circle": "A round one (the default)",
        "shape.radius=1.0": "in metres",
        "shape=ring": "A circle with a hole; also radius",
        "shape.hole=half": "its radius, or half",
    }.items():
        (line,) = [line for line in lines if line.split()[:1] == [start]]
        assert line.endswith(end)


@pytest.mark.parametrize(
    ("argv", "status", "said"),
    [
        (["title=a b=c, {d}", "copies=2", "grey=1e-1"], 0, "Drawing(title='a b=c, {d}', files=(), copies=2"),
        (["title=a", "copies=x"], 2, "error: copies=x must be an integer\n"),
        (["title=a", "cpies=1"], 2, "error: cpies=1 is unknown; did you mean copies?\n"),
        (["title=a", "draft"], 2, "error: draft is unknown: settings are written key=value\n"),
        (["runs/a"], 2, "error: runs/a is unknown: settings are written key=value, as title=runs/a\n"),
        (["--title=a"], 2, "error: --title=a is unknown: settings are written key=value, as title=a\n"),
        (["title=a", "size=[1"], 2, "error: size=[1 is not key=value"),
        (["--help"], 0, "Settings, written key=value:"),
    ],
)
def test_a_script_gets_settings(argv: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_script(Drawing, lambda drawing: print(drawing) or 0, "Draws.", argv) == status
    out, err = capsys.readouterr()
    assert said in out + err and err.count("\n") == (status == 2)


@pytest.mark.parametrize("name", ["train.py", "sample.py", "data/prepare_fineweb.py"])
def test_help_of_a_program_has_a_line_for_each_setting(name: str, forked: Program) -> None:
    done = forked(name, "--help")
    lines = [line for line in done.stdout.splitlines() if line.startswith("  ")]
    assert done.stderr == "" and len(lines) > 10
    assert all(len(line) < 160 and len(line.split()) > 1 for line in lines)
    if name == "train.py":
        assert "also sets batch_size=12 max_iters=2000" in done.stdout
        assert all(f"fault={fault}" in done.stdout for fault in ("none", "no_mask", "padding_in_mean"))


@pytest.mark.slow
def test_a_reader_of_the_help_may_leave() -> None:
    command = shlex.join([sys.executable, str(ROOT / "train.py"), "--help"])
    done = subprocess.run(["bash", "-c", f"{command} | head -3"], capture_output=True, text=True)
    assert done.stderr == "" and done.stdout.count("\n") == 3


@pytest.mark.parametrize(("changes", "warmup"), [({}, 100), ({"max_iters": 1000}, 100), ({"max_iters": 645}, 64)])
def test_a_short_runs_warm_up_is_a_tenth_of_it(changes: dict[str, Any], warmup: int) -> None:
    config = load_config(changes)
    assert config.warmup_iters == config.trajectory["schedule.warmup_iters"] == warmup
    assert load_config({**changes, "schedule": {"name": "cosine", "warmup_iters": warmup}}).run_dir == config.run_dir
    assert load_config({**changes, "schedule": {"name": "constant"}}).warmup_iters == 100
    decays = {"name": "cosine", "lr_decay_iters": 300}
    assert load_config({**changes, "schedule": decays}).warmup_iters == 30


def test_text_that_no_file_could_hold_is_refused() -> None:
    """Python's own reading of bytes that are not UTF-8, as in out_dir='"\\xe9"'."""
    with pytest.raises(ConfigError, match=r"out_dir='\\udce9' must be Unicode text"):
        schema.convert("\udce9", str, "out_dir")


def test_an_integer_of_a_script_is_read_in_decimal() -> None:
    """To YAML 010 is 8, and 1:30 is 90."""
    seed = schema.declared(SampleConfig)["seed"]
    found = {text: read_value("seed", text, seed) for text in ("7", "-7", "010", "1_000")}
    assert found == {"7": 7, "-7": -7, "010": 10, "1_000": 1000}
    for text in ("1:30", "_1", "1__0"):
        with pytest.raises(ConfigError, match=f"seed={text} must be an integer"):
            read_value("seed", text, seed)
