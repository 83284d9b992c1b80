"""scripts/report.py as a program, and its page in a browser."""

import contextlib
import gzip
import itertools
import json
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import pytest
from browser import Page
from conftest import ROOT, Program
from helpers.refusals import check
from helpers.reports import COMPARE, LOSSES, Made, falling, made, state

from core.schema import ConfigError
from scripts import report
from scripts.reporting.page import END, with_block

__all__ = ["made"]  # a fixture


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs/made, two parts with runs of every state, and its report in results/made."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "runs").mkdir()
    pairs = [[f"b/</script>p={p}", f"a/p={p}"] for p in (2, 3)]
    compare = {**COMPARE, "parts": {"title": "<b>parts</b>", "pairs": pairs}}
    parts = {"a": {"title": "part a"}, "b": {"title": "part b"}, "c": {"title": "nothing done"}}
    made = Made(folder / "runs" / "made", title="A </script><script>throw 1</script> & title", parts=parts,
                compare=compare)  # fmt: skip
    made.run_part_a()
    for fold, p in itertools.product(range(5), (2, 3)):
        made.run(f"b/</script>p={p}", fold, falling(LOSSES[p][fold] + 0.01 * fold, 30), 90 + p * fold)
    state(made.plan("c/p=2", 1, 0), state="failed", reason="<img src=https://example.com/x.png onerror=alert(1)>")
    with contextlib.chdir(folder):
        assert report.main(["sweep=made"]) == 0
    return folder


def test_the_report_has_all_its_files(whole: Path) -> None:
    out = whole / "results" / "made"
    figures = {f"loss_{part}.svg" for part in "ab"}
    figures |= {f"{kind}_{family}.svg" for kind in ("difference", "along") for family in ("p", "parts")}
    files = figures | {"runs.csv", "curves.csv.gz", "table.md", "report.html", "provenance.json"}
    assert {path.name for path in out.iterdir()} == files
    text = (out / "table.md").read_text()
    assert "c-p=2-fold0-s1" in text and "svg" not in text
    known = json.loads((out / "provenance.json").read_text())
    assert {*known["sha256"]} == {"runs.csv", "curves.csv.gz", "table.md"}
    assert known["sha256"]["table.md"] == sha256((out / "table.md").read_bytes()).hexdigest()
    assert {*known["drawn"]} == figures | {"report.html"}
    assert known["runs"] == {"done": 25, "failed": 1} and known["commit"] == ["abc"]
    assert known["planned"][0]["commit"] == "c0ffee" and known["definition"]["compare"]["p"]["baseline"] == "a/p=2"
    assert known["corpus_sha256"] == ["5eed"] and known["command"] == "python scripts/report.py sweep=made"


def test_the_same_runs_give_the_same_bytes_without_torch(whole: Path, tmp_path: Path, program: Program) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('the report imports torch')")
    (tmp_path / "runs").symlink_to(whole / "runs")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "PYTHONHASHSEED": "7"}
    program("scripts/report.py", "sweep=made", env=environment)
    first, second = whole / "results" / "made", tmp_path / "results" / "made"
    assert {path.name for path in first.iterdir()} == {path.name for path in second.iterdir()}
    assert [path.name for path in first.iterdir() if path.read_bytes() != (second / path.name).read_bytes()] == []


@pytest.mark.parametrize("mine", ['{"creator": "me"}', "", None])
def test_files_of_another_origin_are_not_replaced(mine: str | None, tmp_path: Path) -> None:
    if mine is not None:
        (tmp_path / "provenance.json").write_text(mine)
    (tmp_path / "table.md").write_text("mine")
    with pytest.raises(ConfigError, match="table.md.*, which no report wrote"):
        report.write_files(tmp_path, {"table.md": b"x"}, {})
    assert (tmp_path / "table.md").read_text() == "mine"


def test_figures_that_are_gone_go_and_other_files_stay(tmp_path: Path) -> None:
    for names in (("loss_a.svg", "loss_b.svg"), ("loss_a.svg",)):
        report.write_files(tmp_path, dict.fromkeys(names, b"x"), {"sha256": {}, "drawn": [*names]})
        (tmp_path / "notes.md").write_text("mine")
    assert {path.name for path in tmp_path.iterdir()} == {"loss_a.svg", "notes.md", "provenance.json"}


def test_of_two_writers_at_once_the_last_one_counts(tmp_path: Path) -> None:
    names = ("runs.csv", "table.md")

    def write(by: str) -> None:
        for _ in range(50):
            report.write_files(tmp_path, dict.fromkeys(names, by.encode()), {"sha256": {}, "drawn": []})

    with ThreadPoolExecutor(2) as writers:
        assert [*writers.map(write, "ab")] == [None, None]
    assert len({(tmp_path / name).read_bytes() for name in names}) == 1 and len([*tmp_path.iterdir()]) == 3


@pytest.mark.parametrize("name", ["runs.csv", "curves.csv.gz", "provenance.json"])
def test_a_stored_report_that_is_damaged_is_refused_in_one_line(
    name: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(whole / "results" / "made", tmp_path / "made")
    file = tmp_path / "made" / name
    content = file.read_bytes()
    half = len(content) // 2
    flipped = content[:half] + bytes(b ^ 255 for b in content[half : half + 60]) + content[half + 60 :]
    head, *lines = content.splitlines(keepends=True)
    reordered = head + b"".join(reversed(lines))  # curves.csv.gz counts them
    for damaged in (content[:half], content[: -len(content) // 50], flipped, reordered):
        file.write_bytes(damaged)
        check(report.main([f"from={tmp_path / 'made'}"]), capsys.readouterr().err, ["from="])
        assert file.read_bytes() == damaged


FAR = b"run,metric,iter,value\n0,val/loss," + b"9" * 400 + b",1\n"
FORGED = {  # file, what is in it -> what a stranger writes there, and the line's reason
    "a short row": ("runs.csv", b"\n", b"\nx,y\n", "line 2 has too many or too few values"),
    "no run": ("runs.csv", b"\n", b"\0", "cannot be read"),
    "commas": ("curves.csv.gz", b"", gzip.compress(b"," * (2**26 + 9)), "holds more than 67,108,864 bytes"),
    "a plan": ("provenance.json", b'"planned": [', b'"planned": [1, ', "must name overrides"),
    "an object": ("provenance.json", b'"fault.name": "none"', b'"x": {"a": 1}', "the setting x is an object"),
    "a fault": ("provenance.json", b'"fault.name": "none"', b'"fault.name": 7', "has fault.name=7"),
    "a far iteration": ("curves.csv.gz", b"", gzip.compress(FAR), "has the iteration 999"),
    "no value": ("curves.csv.gz", b"", gzip.compress(FAR.replace(b"9" * 400 + b",1", b"0,inf")), "has the value inf"),
    "no loss": ("runs.csv", b"val/loss_min", b"val/loss_max", "done without val/loss_min"),
    "no rate": ("provenance.json", b'"optim.learning_rate": ', b'"optim.learning_rate": 0, "x": ', "learning_rate=0"),
    "a setting": ("provenance.json", b'"max_iters": ', b'"max_iters": [], "x": ', "has max_iters=[]"),
}


@pytest.mark.parametrize("kind", FORGED)
def test_a_stored_report_of_a_stranger_is_refused_in_one_line(
    kind: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, old, new, says = FORGED[kind]
    folder = tmp_path / "made"
    shutil.copytree(whole / "results" / "made", folder)
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content.replace(old, new, 1) if old else new)
    about = json.loads((folder / "provenance.json").read_text())
    about["sha256"] = {file: sha256((folder / file).read_bytes()).hexdigest() for file in about["sha256"]}
    (folder / "provenance.json").write_text(json.dumps(about))
    check(report.main([f"from={folder}"]), capsys.readouterr().err, ["from=", says])


def kept() -> list[Path]:
    """The files of results/ that Git keeps."""
    listed = subprocess.check_output(["git", "ls-files", "-z", "results"], cwd=ROOT, text=True)
    return [ROOT / name for name in listed.split("\0") if name]


def test_a_study_is_drawn_from_what_git_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = ROOT / "results" / "leak"
    shutil.copytree(study, tmp_path / "results" / "leak", ignore=shutil.ignore_patterns("*.svg", "*.html", "table.md"))
    monkeypatch.chdir(tmp_path)
    assert report.main(["from=results/leak"]) == 0
    made = {path.name: path.read_bytes() for path in Path("results/leak").iterdir()}
    drawn = json.loads(made["provenance.json"])["drawn"]
    assert "report.html" in drawn and len(drawn) > 10 and {*drawn} <= {*made}
    assert [p.name for p in kept() if p.parent == study and p.read_bytes() != made[p.name]] == []


def test_git_keeps_the_figures_that_a_page_shows_and_no_other() -> None:
    """git add -f adds a figure that a page shows: results/.gitignore ignores all."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(p for p in kept() if p.name == "README.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)\s]+\.svg)\)", page.read_text())]
    shown = {(page.parent / link).resolve() for page, link in links}
    assert {p.resolve() for p in kept() if p.suffix in (".svg", ".html")} == shown != set()
    assert sum(p.stat().st_size for p in kept()) <= 8 * 2**20


# -----------------------------------------------------------------------------
# The page


MARKS = "document.querySelectorAll('#loss_a .mark-line.role-mark path').length"
TOOLTIP = "document.querySelector('#vg-tooltip-element.visible')?.innerText ?? ''"


def centre(page: Page, expression: str) -> tuple[float, float]:
    """Where an element of the page is, in the viewport."""
    script = f"(() => {{ const e = {expression}; e.scrollIntoView({{block: 'center'}}); const r ="
    x, y = page.evaluate(f"{script} e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2] }})()")
    return float(x), float(y)


def legend(name: str) -> str:
    return f"[...document.querySelectorAll('#loss_a .role-legend-label text')].find(e => e.textContent === '{name}')"


def test_the_page_draws_its_charts_without_an_error_or_a_request(whole: Path, browser: Page) -> None:
    file = whole / "results" / "made" / "report.html"
    for dark, ink in ((True, "rgb(230, 232, 235)"), (False, "rgb(26, 28, 32)")):
        browser.dark(dark)
        browser.open(file)
        assert browser.evaluate("getComputedStyle(document.body).color") == ink
    assert browser.problems == []
    assert {*browser.requests} == {file.resolve().as_uri()}
    charts = browser.evaluate("[...document.querySelectorAll('.chart')].map(e => e.id)")
    assert charts == ["difference_p", "difference_parts", "loss_a", "loss_b", "along_p", "along_parts"]
    for chart in charts:
        assert browser.evaluate(f"document.querySelectorAll('#{chart} svg .role-mark path').length") >= 3, chart
    assert browser.evaluate(MARKS) == 3
    assert browser.evaluate("document.title") == "A </script><script>throw 1</script> & title"
    assert browser.evaluate("document.images.length") == 0  # what a run says is text
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("font", ["DejaVu Sans", "Liberation Sans", "Open Sans"])
def test_no_text_of_a_picture_is_cut_or_lies_on_another(font: str, whole: Path, browser: Page, tmp_path: Path) -> None:
    """In any common sans-serif: Linux's widest, one with the widths of Arial and Helvetica, one with Noto's."""
    wrong = """[...document.querySelectorAll('svg')].flatMap(svg => {
        const whole = svg.getBoundingClientRect()
        const shown = [...svg.querySelectorAll('text:not([opacity="0"])')]
        const texts = shown.map(text => [text.textContent, text.getBoundingClientRect()])
        const cut = ([, box]) => box.left < whole.left || box.right > whole.right
        const over = (a, b) => Math.min(a.right, b.right) > Math.max(a.left, b.left) + 1  // slanted labels
            && Math.min(a.bottom, b.bottom) > Math.max(a.top, b.top) + 6  // a line is higher than its letters
        const covered = ([, box], i) => texts.slice(i + 1).some(([, other]) => over(box, other))
        const found = texts.filter((text, i) => cut(text) || covered(text, i))
        return found.map(([text]) => svg.parentNode.title + ': ' + text)
    })"""
    pictures = [path for path in [*kept(), *(whole / "results").rglob("*")] if path.suffix == ".svg"]
    assert len(pictures) > 30
    page = tmp_path / "pictures.html"
    style = f"@font-face {{ font-family: tried; src: local('{font}') }} svg text {{ font-family: tried }}"
    shown = [f"<div title='{path.parent.name}/{path.name}'>{path.read_text()}</div>" for path in pictures]
    shown += ["<script>document.documentElement.dataset.ready = true</script>"]
    page.write_text(f"<!doctype html><meta charset=utf-8><style>{style}</style>{''.join(shown)}")
    browser.open(page)
    if not browser.evaluate("document.fonts.load('12px tried').then(() => true, () => false)"):
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"{font} is not installed")
    assert browser.evaluate("document.querySelectorAll('svg').length") == len(pictures)
    assert browser.evaluate(wrong) == []


def test_a_reader_explores_a_chart(whole: Path, browser: Page) -> None:
    """A click in the legend switches a setting off and on; hovering shows values; single runs; zoom."""
    browser.open(whole / "results" / "made" / "report.html")
    points = "document.querySelectorAll('#loss_a .mark-symbol.role-mark path')"
    browser.hover(*centre(browser, f"[...{points}].at(-1)"))
    browser.wait(f"({TOOLTIP}) !== ''")
    text = browser.evaluate(TOOLTIP)
    assert all(word in text for word in ("p=4", "mean", "1.6", "values"))
    shown = []
    for name in ("p=3", "p=2", "p=3", "p=2"):
        browser.click(*centre(browser, legend(name)))
        shown.append(browser.evaluate(f"{MARKS} + ' ' + views.loss_a.data('shown_store').length"))
    assert shown == ["2 2", "1 1", "2 2", "3 3"]
    browser.evaluate("views.loss_a.signal('which', 'every run').runAsync().then(() => 0)")
    assert browser.evaluate(MARKS) == 15
    before = browser.evaluate("views.loss_a.scale('x').domain()")
    x, y = centre(browser, "document.querySelector('#loss_a .mark-line.role-mark path')")
    top = browser.evaluate("window.scrollY")
    browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=-300)
    browser.wait(f"window.scrollY === Math.max(0, {top} - 300)")
    x, y = centre(browser, "document.querySelector('#loss_a .mark-line.role-mark path')")
    assert browser.evaluate("views.loss_a.scale('x').domain()") == before
    browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=-300, modifiers=2)  # with Ctrl
    browser.wait(f"views.loss_a.scale('x').domain()[1] < {before[1]}")
    assert browser.problems == []


def test_what_is_written_between_two_marks_holds_neither() -> None:
    assert with_block(f"a <!-- b -->old{END}c", "<!-- b -->", "new") == f"a <!-- b -->\nnew\n{END}c"
    for text, block in ((f"a <!-- b -->{END}", f"| {END} |"), (f"a {END}", ""), ("a <!-- b -->", "")):
        with pytest.raises(ConfigError, match="<!-- b --> and <!-- end -->"):
            with_block(text, "<!-- b -->", block)
