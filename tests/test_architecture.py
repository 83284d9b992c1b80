"""Imports go one way, and the sources keep to what the README says of them."""

import ast
import re
from pathlib import Path

import pytest
from conftest import ROOT, run_python

OURS = {"train", "sample", "nanoqk", "core", "model", "training", "data", "sweeps", "scripts"}
FILES = [p for room in sorted(OURS) for p in (ROOT / f"{room}.py", *(ROOT / room).rglob("*.py")) if p.is_file()]


def imports(file: Path) -> set[str]:
    """Full names of our modules that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return {name for name in found if name.split(".")[0] in OURS}


FLOORS = [
    {"core"},
    {"model", "data"},
    {"training"},
    {"train", "sample"},
    {"sweeps", "scripts"},
    {"nanoqk"},
]  # imports go down


def allowed(file: Path, name: str) -> bool:
    place, top = file.relative_to(ROOT).parts[0].removesuffix(".py"), name.split(".")[0]
    if place == top or (place, top) == ("scripts", "sweeps"):
        return True
    floor = {room: i for i, rooms in enumerate(FLOORS) for room in rooms}
    return floor[top] < floor[place]


def test_imports_go_one_way() -> None:
    up = [(f"{file.relative_to(ROOT)}", name) for file in FILES for name in imports(file) if not allowed(file, name)]
    assert up == [] and len(FILES) > 90
    rooms = {path.parent.name for path in ROOT.glob("*/*.py")} | {path.stem for path in ROOT.glob("*.py")}
    assert {room for room in rooms if not room.startswith((".", "build", "runs"))} == OURS | {"tests"}


def test_the_rule_forbids_something() -> None:
    assert not allowed(ROOT / "model" / "gpt.py", "data.folds.split")
    assert not allowed(ROOT / "core" / "rundir.py", "training.config")
    assert not allowed(ROOT / "model" / "gpt.py", "training.config")
    assert not allowed(ROOT / "data" / "folds.py", "training.optim")
    assert not allowed(ROOT / "sweeps" / "plan.py", "scripts.report")
    assert not allowed(ROOT / "train.py", "scripts.report")
    assert allowed(ROOT / "scripts" / "x.py", "sweeps.plan") and allowed(ROOT / "scripts" / "x.py", "train")
    assert not allowed(ROOT / "sweeps" / "plan.py", "nanoqk") and allowed(ROOT / "nanoqk.py", "sweeps.launch")


UPPER = ("val/loss", "train/loss", "plan.jsonl", "launcher")  # of the floors above


def test_no_floor_knows_an_upper_one_by_a_string() -> None:
    """What W&B's process needs of the metrics is handed down to it, in job.json."""
    below = [file for file in FILES if file.relative_to(ROOT).parts[0] in ("core", "model", "data")]
    named = [(file.name, word) for file in below for word in UPPER if word in file.read_text()]
    attention = [file.name for file in below if file.parent.name == "core" and "attn/" in file.read_text()]
    assert named == attention == [] and len(below) > 40


# what they open is the user's, the machine's or ours
OPEN_OTHER_FILES = {"cli.py", "device.py", "files.py", "process.py", "build.py", "docs.py", "ledger.py",
                    "page.py"}  # fmt: skip


def test_a_file_of_a_run_is_opened_in_one_place() -> None:
    """core/files.py: regular, bounded, not through a link out."""
    opening = re.compile(r"(?<![\w.])open\(|\)\.open\(|\.read_(text|bytes)\(")
    assert {file.name for file in FILES if opening.search(file.read_text())} == OPEN_OTHER_FILES


@pytest.mark.slow
def test_config_rundir_schedule_and_the_report_do_not_load_torch() -> None:
    code = "import training.config, core.rundir, training.schedule, scripts.report, sys"
    code += "; assert 'torch' not in sys.modules"
    run_python(code)


def test_no_test_file_imports_another() -> None:
    """What several share stands in a module of its own: conftest.py, helpers/, variants.py and the like."""
    files = {file.stem: file.read_text() for file in (ROOT / "tests").rglob("*.py")}
    found = {name: {*re.findall(r"^ *(?:from|import) (test_\w+)", text, re.M)} for name, text in files.items()}
    assert {name: others for name, others in found.items() if others - {name}} == {} and len(files) > 80


def is_trick(node: ast.AST) -> bool:
    """A text times a boolean, or a walrus inside a conditional expression."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        text = isinstance(node.left, ast.JoinedStr) or isinstance(getattr(node.left, "value", None), str)
        return text and isinstance(node.right, ast.Compare | ast.BoolOp)
    return isinstance(node, ast.IfExp) and any(isinstance(part, ast.NamedExpr) for part in ast.walk(node))


def test_no_line_is_saved_by_a_trick() -> None:
    parts = [(file.name, node) for file in FILES for node in ast.walk(ast.parse(file.read_text()))]
    assert [(name, ast.unparse(node)) for name, node in parts if is_trick(node)] == []
    for text in ("'s' * (n > 1)", "a if (b := c) else b"):
        assert is_trick(ast.parse(text, mode="eval").body)
