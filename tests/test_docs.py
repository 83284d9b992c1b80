"""README.md and docs/: links lead somewhere, commands compose, numbers and generated parts are up to date."""

import csv
import itertools
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, TINY, run_python

import core.cli
import scripts.benchmarks.timing as timing
from core.schema import validate
from scripts.reporting.numbers import interval
from scripts.reporting.tables import number
from sweeps.launch import LaunchOptions, read_request
from sweeps.plan import PlannedRun
from training.config import TrainConfig, load_config

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
LEDGER = ROOT / "results" / "README.md"
RESULTS = [LEDGER, *sorted((ROOT / "results").glob("*/*.md"))]
LISTED = [ROOT / "docs" / "configuration.md"]  # written by scripts/docs.py
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return [text for kind, text in parts(page) if kind == language]


def prose(page: Path) -> str:
    return "\n".join(text for kind, text in parts(page) if kind is None)


def parts(page: Path) -> list[tuple[str | None, str]]:
    """(language, text) of each fenced block; (None, text) of what is between."""
    found: list[tuple[str | None, list[str]]] = [(None, [])]
    for line in text_of(page).splitlines():
        if not line.startswith("```"):
            found[-1][1].append(line)
        else:
            found.append((line[3:] if found[-1][0] is None else None, []))
    return [(kind, "\n".join(lines) + "\n") for kind, lines in found]


# -----------------------------------------------------------------------------
# Links, files, length


def anchors(page: Path) -> set[str]:
    """GitHub's, of the headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if "://" not in link and not (target.exists() and (not anchor or anchor in anchors(target))):
            found.append(link)
    return found


@pytest.mark.parametrize("page", [*PAGES, *RESULTS], ids=lambda page: f"{page.parent.name}/{page.name}")
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(r"`((?:configs|core|data|docs|model|scripts|sweeps|tests|training)/[\w/.]+)`", text_of(page))
    assert [name for name in named if not (ROOT / name).exists()] == []


@each_page
def test_a_page_is_short(page: Path) -> None:
    assert len(text_of(page).splitlines()) <= (120 if page.name == "README.md" else 150) or page in LISTED


def test_every_page_can_be_reached_from_the_readme() -> None:
    linked = re.findall(r"\]\((docs/\w+\.md)", text_of(ROOT / "README.md"))
    assert {ROOT / name for name in linked} == {*(ROOT / "docs").glob("*.md")}


# -----------------------------------------------------------------------------
# Commands


def commands(page: Path) -> list[str]:
    """The lines of fenced blocks without a language, and code that begins with python within the text."""
    lines = [line for block in blocks(page, "") for line in block.replace("\\\n", " ").splitlines()]
    return lines + re.findall(r"`((?:python|torchrun|make) [^`]+)`", prose(page))


def programs(line: str) -> Iterator[tuple[str, list[str]]]:
    """(script, words) of each program in a shell line."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    for operator, part in itertools.groupby(lexer, lambda token: set(token) <= set("();<>|&")):
        tokens = list(part)
        scripts = [i for i, token in enumerate(tokens) if token.endswith(".py")]
        if "pytest" in tokens:
            yield "pytest", [tokens[i] for i in scripts]
        elif not operator and scripts:
            yield tokens[scripts[0]], tokens[scripts[0] + 1 :]
        elif not operator and "make" in tokens:
            yield "make", tokens[tokens.index("make") + 1 :]


def check(script: str, words: list[str], patch: pytest.MonkeyPatch) -> None:
    """Raise, or exit with a status that is not 0, where a program refuses its words. Nothing is run."""
    if script == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert all("=" in word or word in targets for word in words), words
    elif script == "pytest":
        assert all((ROOT / word).exists() for word in words), words
    elif script == "train.py" and "--help" in words:
        core.cli.load_early(TrainConfig, [word for word in words if "=" in word])
    elif script == "train.py":
        many = "-m" in words
        split = [word.split("=", 1) for word in words if word != "-m"]
        choices = [[f"{key}={one}" for one in (value.split(",") if many else [value])] for key, value in split]
        for chosen in itertools.product(*choices):
            load_config(core.cli.compose(TrainConfig, list(chosen)))
    elif script == "sweeps/launch.py":
        patch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if name == "sbatch" else None)
        planned(words)
    else:
        parse_only(patch)
        patch.setattr(sys, "argv", [script, *words])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        assert not end.value.code, f"{script} {words} ends with {end.value.code}"


def planned(words: list[str]) -> list[PlannedRun]:
    values, overrides = core.cli.read_settings(words, LaunchOptions)
    return read_request(core.cli.settings_of(LaunchOptions, values), overrides)[1]


def parse_only(patch: pytest.MonkeyPatch) -> None:
    """Programs read their words and check their settings, then end."""

    def without_program(run: Callable[..., int], stub: Callable[..., int]) -> Callable[..., int]:
        return lambda *given, **named: run(
            *(stub if callable(one) and not isinstance(one, type) else one for one in given), **named
        )

    def bench(asked: Any, overrides: Sequence[str] = ()) -> int:
        if getattr(asked, "variants", None):
            timing.variants(asked.variants, [*overrides])
        elif overrides:
            load_config(core.cli.compose(TrainConfig, [*overrides]))
        return 0

    patch.setattr(core.cli, "run_script", without_program(core.cli.run_script, lambda *_: 0))
    patch.setattr(timing, "run_benchmark", without_program(timing.run_benchmark, bench))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plugins_undone: None) -> Path:
    """A current folder with the files that the pages tell a user to write."""
    docs = ROOT / "docs"
    (tmp_path / "my_norm.py").write_text(blocks(docs / "your_own_variant.md", "python")[0])
    (tmp_path / "my_sign.py").write_text(blocks(docs / "your_own_variant.md", "python")[1])
    (tmp_path / "my_asinh.py").write_text(blocks(docs / "attention_track.md", "python")[0])
    (tmp_path / "my_sweep.yaml").write_text(blocks(docs / "sweeps.md", "yaml")[0])
    (tmp_path / "RUN").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("part", ["kills", "damage", "input", "disk", "hostile", "sweep", "pairs"])
def test_each_part_of_the_faults_is_one_command(part: str) -> None:
    make = ["make", "--no-print-directory", "--old-file=.venv/setup-test", "test-faults"]
    said = subprocess.run([*make, "--dry-run", f"part={part}"], cwd=ROOT, capture_output=True, text=True).stdout
    (line,) = said.splitlines()
    assert "pytest" in line and re.findall(r"tests/test_\w+\.py", line)


def test_another_part_of_the_faults_is_refused() -> None:
    make = ["make", "--no-print-directory", "--old-file=.venv/setup-test", "test-faults", "part=none"]
    refused = subprocess.run(make, cwd=ROOT, capture_output=True, text=True)
    assert refused.returncode == 2 and "part=kills|damage" in refused.stdout


def test_commands_are_found() -> None:
    found = [one for page in PAGES for line in commands(page) for one in programs(line)]
    assert len(found) > 60 and {"train.py", "sweeps/launch.py", "sample.py", "make", "pytest"} <= dict(found).keys()


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if page not in LISTED], ids=lambda page: page.name)
def test_commands_compose(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for script, words in [one for line in commands(page) for one in programs(line)]:
        with monkeypatch.context() as patch:
            check(script, words, patch)


@pytest.mark.parametrize(
    "line",
    [
        "python train.py model=nano_cpu qk_norm=rms qk_norm.p=3",
        "python train.py -m qk_norm=none,rns",
        "torchrun --standalone train.py batchsize=3",
        "python sweeps/launch.py sweep=p_sweep_cpu sweep.fold=[0]",
        "python sample.py run=RUN temprature=0.5",
        "python scripts/report.py sweep=p_sweep plots=true",
        "python scripts/benchmarks/bench_train.py variants=qk_norm=rns",
        "python scripts/gone.py",
        "echo a | python scripts/audit.py run=RUN step=3",
        "make quick",
    ],
)
def test_a_stale_command_is_found(line: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ((script, words),) = programs(line)
    with pytest.raises((Exception, AssertionError)), monkeypatch.context() as patch:
        check(script, words, patch)


def test_the_sweep_of_first_steps_is_the_one_in_configs() -> None:
    shown = blocks(ROOT / "docs" / "first_steps.md", "yaml")
    assert shown == [text_of(ROOT / "configs" / "sweep" / "two_norms.yaml")]


def test_the_sweep_of_docs_sweeps_is_what_it_says(folder: Path) -> None:
    runs = planned(["sweep=my_sweep.yaml"])
    assert {run.points[0] for run in runs} == {"alpha_1/p=2", "alpha_1/p=3"} and len(runs) == 6
    for run in runs:
        validate(run.config)


# -----------------------------------------------------------------------------
# What is stated, and what is generated


def test_every_sweep_is_listed() -> None:
    page = text_of(ROOT / "docs" / "sweeps.md")
    names = [file.stem for file in (ROOT / "configs" / "sweep").glob("*.yaml")]
    assert len(names) > 9 and [name for name in names if f"`{name}`" not in page] == []


@pytest.mark.parametrize("page", ["README.md", "docs/from_python.md"])
def test_the_lines_from_python_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tiny run. The notebook has the line of the sweep, too (tests/test_nanoqk.py)."""
    monkeypatch.chdir(tmp_path)
    (code,) = (block for block in blocks(ROOT / page, "python") if "import nanoqk" in block)
    tiny = "".join(f", {word!r}" for word in [*TINY, "max_iters=2", "wandb.mode=disabled"])
    names: dict[str, Any] = {}
    exec(re.sub("runs = .*", "", code).replace('"qk_norm=rms"', '"qk_norm=rms"' + tiny), names)
    assert [weights.shape for weights in names["maps"]] == [(2, 12, 12)] * 2


def test_the_headline_is_that_of_the_runs() -> None:
    for study, values in (("p_nano", (3, 4)), ("p_baby", (4,))):
        with open(ROOT / "results" / study / "runs.csv", newline="") as file:
            rows = [*csv.DictReader(file)]
        losses = {(s, row["fold"]): float(row["val/loss_min"]) for row in rows for s in row["settings"].split(";")}
        for part, p in itertools.product(("alpha_1", "matched"), values):
            differences = [losses[f"{part}/p={p}", f"{k}"] - losses[f"{part}/p=2", f"{k}"] for k in range(10)]
            point = interval(differences, shared=1 / 9)
            mean, low, high = (number(x, "+.4f").replace("+", r"\+") for x in (point.mean, point.low, point.high))
            said = rf"{mean} \((?:95 % interval )?{low} to {high}\)"
            assert re.search(said, text_of(LEDGER)), f"{study}, {part}, p = {p}: {mean} ({low} to {high})"


@pytest.mark.slow
def test_generated_parts_are_fresh() -> None:
    """In a process of its own: other tests register variants. After a change of a setting: python scripts/docs.py"""
    code = (
        "from scripts import docs; stale = []\n"
        "docs.write_atomic = lambda file, content: stale.append(file) if file.read_bytes() != content else None\n"
        "assert docs.write(docs.NoSettings()) == 0 and not stale, stale"
    )
    assert run_python(code).stdout.count(".md\n") == 5
    _, _, block = text_of(LEDGER).partition("<!-- made by scripts/docs.py from ledger.yaml -->\n")
    assert 0 < block.partition("<!-- end -->")[0].count("\n| ") <= 4 * 2 + 25
