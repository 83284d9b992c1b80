"""Sweeps: what a plan is, and that killing anything at any moment changes nothing but the time."""

import csv
import io
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, TINY
from test_train import assert_same_run

import sweeps.plan
import sweeps.status
from core.cli import CONFIG_DIR
from core.files import read_json, write_atomic
from core.rundir import is_locked, read_status
from core.schema import ConfigError
from model.gpt import mean_norm_ratio
from scripts.reporting.runs import read_sweep
from scripts.reporting.stored import runs_csv
from sweeps import launchers, worker
from sweeps.claims import Launch, read_claim
from sweeps.definition import load_sweep
from sweeps.launch import LaunchOptions, main, read_request
from sweeps.plan import PlannedRun, compose, freeze, plan_runs, read_plan
from sweeps.status import state_of
from training.config import load_config, to_yaml

NAMES = sorted(path.stem for path in (CONFIG_DIR / "sweep").glob("*.yaml"))


def tiny_sweep(folder: Path, corpus: Path, *overrides: str, **changes: Any) -> Path:
    """The file of a sweep of eight runs of a second: two norms, dropout or not, two folds."""
    words = ["data=text", f"data.path={corpus}", *TINY, "max_iters=60", "wandb.mode=disabled", *overrides]
    grid = {"qk_norm": ["none", "rms"], "model.dropout": [0.0, 0.2]}
    file = folder / "tiny.yaml"
    definition = {"title": "a tiny sweep", "overrides": words, "folds": [0, 1], "grid": grid, **changes}
    file.write_text(yaml.safe_dump(definition))
    return file


def frozen(sweep: Path, changes: dict[str, Any] | None = None, *words: str) -> list[PlannedRun]:
    """Plan a sweep, freeze the plan in the directory beside its file, and read it back."""
    definition, folder = load_sweep(str(sweep), changes or {}), sweep.parent / "sweep"
    freeze(folder, "tiny", definition, [*words], plan_runs(definition, [*words]))
    return read_plan(folder)


def spoil(folder: Path, run: PlannedRun, refused: bool) -> None:
    """Have every try at a run fail: its directory is somebody else's, or a file of it cannot be written."""
    (folder / run.id).mkdir(parents=True)
    if refused:
        (folder / run.id / "thesis.tex").touch()
    else:
        (folder / run.id / "config.yaml").write_text(to_yaml(run.config))
        (folder / run.id / "metrics.jsonl").mkdir()


def launcher(sweep: Path, *words: str, code: Path = ROOT, **options: Any) -> subprocess.Popen[str]:
    where = [f"sweep={sweep}", f"sweep_dir={sweep.parent / 'sweep'}", "launcher.workers=2"]
    command = [sys.executable, str(code / "sweeps" / "launch.py"), *where, *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, **{**pipes, **options})


def output_of(process: subprocess.Popen[str], status: int = 0) -> str:
    """Wait for a launcher. Returns what it printed."""
    output, _ = process.communicate(timeout=300)
    assert process.returncode == status, output
    return output


def launched(sweep: Path, *words: str, status: int = 0, **options: Any) -> str:
    return output_of(launcher(sweep, *words, **options), status)


def begun(folder: Path) -> list[PlannedRun]:
    """The plan of a sweep that a launcher has just frozen."""
    return read_plan(eventually(lambda: (folder / "plan.jsonl").exists() and folder))


def workers_of(sweep_dir: Path) -> list[int]:
    """Process ids of the workers of a sweep; without what one of them starts, which looks like it for a moment."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if str(sweep_dir).encode() in words and b"work" in words:
                found[int(entry.name)] = parent
    return [pid for pid, parent in found.items() if parent not in found]


def eventually(what: Callable[[], Any], seconds: float = 180) -> Any:
    deadline = time.monotonic() + seconds
    while not (result := what()):
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)
    return result


def pending_signals(pid: int) -> int:
    """Those sent to a process that is stopped, as bits."""
    (line,) = (x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("ShdPnd:"))
    return int(line.split()[1], 16)


def times_finished(run: Path) -> int:
    return sum(" done: val/loss " in line for line in (run / "train.log").read_text().splitlines())


def untimed_csv(sweep_dir: Path) -> list[dict[str, str]]:
    """runs.csv without how long the runs took, and of which checkout."""
    rows = csv.DictReader(io.StringIO(runs_csv(read_sweep(sweep_dir, "tiny"))))
    other = ("seconds", "tok_per_sec", "commit")
    return [{key: value for key, value in row.items() if key not in other} for row in rows]


def assert_same_sweep(done: Path, other: Path, finished: Container[int] = (1,)) -> None:
    """Every run of `other` equals that of the undisturbed sweep bit for bit, and so does runs.csv; finished: how often
    a run may have said that it is done."""
    for run in read_plan(done):
        assert_same_run(done / run.id, other / run.id)
        assert times_finished(other / run.id) in finished
    assert untimed_csv(done) == untimed_csv(other)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sweep file of a sweep that has run through; its directory is beside it."""
    folder = tmp_path_factory.mktemp("undisturbed")
    words = random.Random(0).choices(["to", "be", "or", "not", "that", "is", "the", "question", "nobler"], k=1500)
    (folder / "corpus.txt").write_text(" ".join(words)[:6000])
    sweep = tiny_sweep(folder, folder / "corpus.txt")
    output = launched(sweep)
    assert "8 done" in output and "[8/8]" in output
    return sweep


@pytest.fixture
def sweep(undisturbed: Path, tmp_path: Path) -> Iterator[Path]:
    """The same sweep, not begun."""
    file = tmp_path / undisturbed.name
    shutil.copy(undisturbed, file)
    yield file
    for pid in workers_of(tmp_path / "sweep"):
        os.kill(pid, signal.SIGKILL)


# -----------------------------------------------------------------------------
# Plans


@pytest.mark.parametrize("name", NAMES)
def test_a_planned_config_is_what_train_py_composes_from_its_words(name: str) -> None:
    sweep = load_sweep(name, {"parts": "all"})
    runs = plan_runs(sweep, [])
    assert len({run.id for run in runs}) == len(runs)
    points = {point for run in runs for point in run.points}
    for family in sweep.families.values():  # which name points that exist
        assert {*sum(family.pairs, []), family.baseline} - points <= {None}
    for run in random.Random(0).sample(runs, min(12, len(runs))):
        assert load_config(compose(run.overrides)) == run.config
        assert run.config.run_dir.name == run.id


@pytest.mark.parametrize("name", ["p_sweep", "p_sweep_cpu"])
def test_the_control_has_the_temperature_of_each_p(name: str) -> None:
    runs = plan_runs(load_sweep(name, {"parts": ["control"], "folds": [0]}), [])
    for run in runs:
        p = float(run.points[0].removeprefix("control/as_p"))
        head_dim = run.config.model.n_embd // run.config.model.n_head
        assert run.config.qk_norm.alpha_init == pytest.approx(mean_norm_ratio(p, head_dim) ** 2, rel=1e-3)  # type: ignore[attr-defined]
    assert len(runs) == 6


def test_a_sweep_that_extends_another_changes_what_it_names() -> None:
    base, small = load_sweep("p_sweep", {"parts": "all"}), load_sweep("p_sweep_cpu", {"parts": "all"})
    assert [*base.parts] == [*small.parts] and base.compare == small.compare and base.paper == small.paper
    assert small.overrides[: len(base.overrides)] == base.overrides
    assert small.parts["control"].overrides == base.parts["control"].overrides
    assert small.parts["control"].grid != base.parts["control"].grid


def test_ten_thousand_runs_are_planned_and_frozen_in_under_a_minute(tmp_path: Path) -> None:
    began = time.process_time()
    file = tmp_path / "big.yaml"
    grid = {"qk_norm.p": [1, 1.5, 2, 2.5, 3], "qk_norm.alpha_init": [1, 2, 3, 4, 5], "attention": ["mha", "gqa"]}
    words = ["data=python_docs", "model=gqa_nano", "qk_norm=lp"]
    file.write_text(yaml.safe_dump({"overrides": words, "folds": [*range(10)], "seeds": [*range(20)], "grid": grid}))
    sweep = load_sweep(str(file), {})
    runs = plan_runs(sweep, [])
    freeze(tmp_path / "sweep", "big", sweep, [], runs)
    assert len({run.id for run in runs}) == 10_000
    assert read_plan(tmp_path / "sweep") == runs
    assert time.process_time() - began < 60


def test_runs_that_two_points_share_are_planned_once(tmp_path: Path, corpus: Path) -> None:
    parts: dict[str, Any] = {"a": {"grid": {"qk_norm": ["none", "rms"]}}, "b": {"overrides": ["qk_norm=rms"]}}
    runs = frozen(tiny_sweep(tmp_path, corpus, grid={}, parts=parts))
    assert [run.points for run in runs] == 2 * [["a/qk_norm=none"], ["a/qk_norm=rms", "b"]]


def test_the_command_line_changes_grid_folds_seeds_and_parts() -> None:
    words = "sweep.folds=[3] sweep.seeds=[1,2] sweep.parts=[sqrt_d] sweep.grid.qk_norm.p=[2,3.5] max_iters=700"
    asked = LaunchOptions("p_sweep_cpu")
    _, runs, _ = read_request(asked, [*words.split(), "sweep.grid.optim.learning_rate=[1e-3,2E-3]"])
    points = [f"sqrt_d/learning_rate={rate},p={p}" for rate in (0.001, 0.002) for p in (2, 3.5)]
    assert [(run.points, run.seed, run.fold) for run in runs] == [([p], seed, 3) for seed in (1, 2) for p in points]
    assert {run.config.max_iters for run in runs} == {700}
    assert {run.config.optim.learning_rate for run in runs} == {0.001, 0.002}
    assert load_sweep("gqa_nano", {"parts": "all"}) == load_sweep("gqa_nano", {})  # it has no parts


def test_a_part_has_its_own_folds_and_seeds_unless_the_command_line_names_them(tmp_path: Path, corpus: Path) -> None:
    own = {"grid": {"qk_norm": ["none"]}, "folds": [2], "seeds": [5, 6]}
    parts = {"all": {"grid": {"qk_norm": ["rms"]}}, "own": own}
    sweep = tiny_sweep(tmp_path, corpus, grid={}, parts=parts, folds=[0, 1], seeds=[1])
    planned = [(run.points[0].split("/")[0], run.fold, run.seed) for run in frozen(sweep)]
    assert planned == [("all", 0, 1), ("all", 1, 1), ("own", 2, 5), ("own", 2, 6)]
    _, runs, _ = read_request(LaunchOptions(str(sweep)), ["sweep.folds=[3]", "sweep.seeds=[9]"])
    assert [(run.points[0].split("/")[0], run.fold, run.seed) for run in runs] == [("all", 3, 9), ("own", 3, 9)]


BAD = {
    "": ["sweep="],
    "sweep=nosuch": ["sweep=nosuch", "p_sweep_cpu"],
    "sweep=p_sweep_cpu launcher=cloud": ["launcher=cloud", "local"],
    "sweep=p_sweep_cpu launcher.ranks=2": ["launcher.ranks=2", "gradient_accumulation_steps=1"],
    "sweep=p_sweep_cpu launcher.workers=0": ["launcher.workers=0", ">= 1"],
    "sweep=p_sweep_cpu launcher.worker=2": ["launcher.worker=2", "launcher.workers"],
    "sweep=p_sweep_cpu qk_norm.p=3": ["qk_norm.p=3", "sweep.grid.qk_norm.p"],
    "sweep=p_sweep_cpu seed=3": ["seed=3", "sweep.seeds"],
    "sweep=p_sweep_cpu out_dir=x": ["out_dir=x", "sweep_dir"],
    "sweep=p_sweep_cpu fresh=true": ["fresh=true", "another sweep_dir"],
    "sweep=p_sweep_cpu eval_only=true": ["eval_only=true", "trains"],
    "sweep=p_sweep_cpu sweep.overrides=[seed=3]": ["seed=3", "sweep.seeds"],
    "sweep=gqa_nano sweep.grid=3": ["sweep.grid=3", "a group"],
    "sweep=p_sweep_cpu sweep.overrides=qk_norm=lp": ["sweep.overrides=qk_norm=lp", "list"],
    'sweep=p_sweep_cpu sweep.grid={"data.fold":[0,1]}': ["data.fold", "sweep.folds"],
    'sweep=gqa_nano sweep.grid={"seed":[0,1]}': ["grid.seed", "sweep.seeds"],
    'sweep=gqa_nano sweep.grid={"words":{"a":["out_dir=x"]}}': ["out_dir=x", "sweep_dir"],
    "sweep=gqa_nano sweep.parts=[alpha_1]": ["sweep.parts", "gqa_nano", "no parts"],
    "sweep=p_sweep_cpu data=python_docs sweep_dir=/dev/null/x": ["sweep_dir=/dev/null/x", "Not a directory"],
    "sweep=p_sweep_cpu max_iter=3": ["max_iter=3", "max_iters"],
    "sweep=p_sweep_cpu sweep.folds=3": ["sweep.folds=3", "a list, as [1,2]"],
    "sweep=p_sweep_cpu sweep.folds=[10]": ["data.fold=10", "0..9"],
    "sweep=p_sweep_cpu sweep.fold=[1]": ["sweep.fold=[1]", "did you mean sweep.folds?"],
    "sweep=p_sweep_cpu sweep.seeds=[1,1]": ["sweep.seeds=[1, 1]", "none twice"],
    "sweep=p_sweep_cpu sweep.parts=[nosuch]": ["nosuch", "alpha_1"],
    "sweep=p_sweep_cpu sweep.grid.qk_norm.p=[0.5]": ["qk_norm.p=0.5", ">= 1"],
    "sweep=p_sweep_cpu sweep.grid.qk_norm.q=[2]": ["qk_norm.q=2", "unknown"],
    "sweep=p_sweep_cpu sweep.grid.qk_norm.p=[2,2]": ["twice"],
    'sweep=p_sweep_cpu sweep.compare={"a":{"base":p=2}}': ["compare.a.base=p=2", "did you mean compare.a.baseline?"],
    'sweep=p_sweep_cpu sweep.compare={"a":{"settings":["*"]}}': ["compare.a must have either baseline", "or pairs"],
    'sweep=p_sweep_cpu sweep.compare={"a":{"pairs":[["p=2"]]}}': ["compare.a.pairs=[['p=2']]", "list of pairs"],
    'sweep=p_sweep_cpu sweep.compare={"a":{"baseline":p=2,"settings":p=2}}': ["compare.a.settings=p=2", "a list"],
    'sweep=p_sweep_cpu sweep.compare={"a":{"baseline":p=2,"title":3}}': ["compare.a.title=3", "text"],
    'sweep=p_sweep_cpu sweep.also={"grad_norm":median}': ["also.grad_norm=median", "max"],
    'sweep=p_sweep_cpu sweep.paper={"val_loss":{"a":low}}': ["paper.val_loss"],
    "sweep=p_sweep_cpu retries=-1": ["retries=-1"],
    "sweep=p_sweep_cpu device=cuda:99": ["device=cuda:99"],
    "sweep=p_sweep_cpu data=text data.path=nosuch.txt": ["nosuch.txt"],
}


@pytest.mark.parametrize("words", BAD)
def test_bad_input_gets_one_line_and_status_2_before_anything_is_written(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    for part in BAD[words]:
        assert part in error
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_file_that_cannot_be_is_refused(tmp_path: Path) -> None:
    circle = tmp_path / "a.yaml", tmp_path / "b.yaml"
    for file, other in zip(circle, circle[::-1], strict=True):
        file.write_text(f"extends: {other}\n")
    with pytest.raises(ConfigError, match=r"a\.yaml extends itself: .*a\.yaml -> .*b\.yaml -> .*a\.yaml"):
        load_sweep(str(circle[0]), {})
    circle[0].write_text("extends: nosuch.yaml\n")
    with pytest.raises(ConfigError, match=rf"sweep={tmp_path}/nosuch.yaml is no file"):
        load_sweep(str(circle[0]), {})
    circle[0].write_text("extends: b.yaml\n")  # beside it
    circle[1].write_text("extends: p_sweep_cpu\nseeds: [5]\n")
    assert load_sweep(str(circle[0]), {}).seeds == (5,)
    circle[0].write_text("overrides: model=nano_cpu\n")
    with pytest.raises(ConfigError, match="sweep.overrides=model=nano_cpu must be a list"):
        load_sweep(str(circle[0]), {})


def test_settings_that_do_not_tell_runs_apart_cannot_be_swept(tmp_path: Path, corpus: Path) -> None:
    file = tiny_sweep(tmp_path, corpus, grid={"dtype": ["float32", "bfloat16"]})
    with pytest.raises(ConfigError, match="the same run to a sweep, .* by dtype float32 -> bfloat16"):
        frozen(file)


def test_one_value_is_one_point_however_it_is_written(tmp_path: Path, corpus: Path) -> None:
    file = tiny_sweep(tmp_path, corpus, "qk_norm=lp", grid={"batch_size": [2], "qk_norm.p": [2, 3]})
    for values in ([2, 3], [2.0, 3.0], [3.0, 2]):
        plan = frozen(file, {"grid.qk_norm.p": values})
        assert [run.points for run in plan] == 2 * [["batch_size=2,p=2"], ["batch_size=2,p=3"]]
    with pytest.raises(ConfigError, match="max_iters 60 -> 61"):
        frozen(file, {"grid.qk_norm.p": [2.0]}, "max_iters=61")
    with pytest.raises(ConfigError, match="twice"):
        load_sweep(str(file), {"grid.qk_norm.p": [2, 2.0]})


def test_a_frozen_plan_may_grow_but_not_change(tmp_path: Path, corpus: Path) -> None:
    file, folder = tiny_sweep(tmp_path, corpus), tmp_path / "sweep"
    assert len(frozen(file, {"folds": [0]})) == 4
    assert len(frozen(file)) == 8
    before = (folder / "plan.jsonl").read_bytes(), (folder / "sweep.json").read_bytes()
    assert len(frozen(file, {"folds": [1], "grid.qk_norm": ["rms"]})) == 8  # fewer: they alone are launched
    for key, old, new in (("max_iters", 60, 61), ("optim.learning_rate", "0.001", 0.01), ("eval_interval", 2, 3)):
        with pytest.raises(ConfigError, match=f"{key} {old} -> {new}"):
            frozen(file, {}, f"{key}={new}")
    assert before == ((folder / "plan.jsonl").read_bytes(), (folder / "sweep.json").read_bytes())
    about = read_json(folder / "sweep.json")
    assert about["name"] == "tiny"
    assert about["sweep"]["grid"]["qk_norm"] == {"qk_norm=none": "none", "qk_norm=rms": "rms"}
    assert [(one["overrides"], one["runs"]) for one in about["frozen"]] == [([], 4), ([], 8)]
    compare = {"norm": {"baseline": "dropout=0.0,qk_norm=none"}}
    assert len(frozen(file, {"folds": [1], "compare": compare})) == 8  # what the report compares is as last asked for
    after = read_json(folder / "sweep.json")
    assert (after["sweep"]["compare"], after["sweep"]["folds"]) == (compare, [0, 1])
    assert after["frozen"] == about["frozen"]


def test_a_plan_that_grows_by_a_part_keeps_the_others_definition(tmp_path: Path, corpus: Path) -> None:
    parts = {name: {"title": name.upper(), "overrides": [f"qk_norm={name}"]} for name in ("none", "rms")}
    file = tiny_sweep(tmp_path, corpus, grid={}, parts=parts)
    frozen(file, {"parts": "none"}, "max_iters=5")
    frozen(file, {"parts": "rms"})
    about = read_json(tmp_path / "sweep" / "sweep.json")
    assert {name: part["title"] for name, part in about["sweep"]["parts"].items()} == {"none": "NONE", "rms": "RMS"}
    assert [(one["overrides"], one["runs"]) for one in about["frozen"]] == [(["max_iters=5"], 2), ([], 4)]


@pytest.mark.parametrize("left", [1, 2, 3])
def test_a_crash_while_a_plan_is_frozen_is_mended_by_the_next_launch(
    left: int, tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """left: files that are written before the disk is full."""
    file, folder = tiny_sweep(tmp_path, corpus), tmp_path / "sweep"
    written: list[Path] = []

    def write(path: Path, content: bytes) -> None:
        if len(written) == left:
            raise OSError("no space")
        written.append(path)
        write_atomic(path, content)

    with monkeypatch.context() as patch, suppress(OSError):
        patch.setattr(sweeps.plan, "write_atomic", write)
        frozen(file)
    assert not (folder / "plan.jsonl").exists() or (folder / "sweep.json").exists()  # what has a plan has the rest
    assert len(frozen(file)) == len(read_sweep(folder, "tiny").runs) == 8
    assert len(read_json(folder / "sweep.json")["frozen"]) == 1


def test_the_checkouts_commit_and_changes_are_frozen_with_the_plan(tmp_path: Path, corpus: Path) -> None:
    code = tmp_path / "code"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(code)], check=True)
    shutil.copytree(ROOT / "sweeps", code / "sweeps", dirs_exist_ok=True)
    (code / "README.md").write_text("changed\n")
    file = tiny_sweep(tmp_path, corpus)
    script = f"""
from pathlib import Path
from sweeps.definition import load_sweep
from sweeps.plan import freeze, plan_runs
sweep = load_sweep("{file}", {{}})
freeze(Path("{tmp_path}/sweep"), "tiny", sweep, [], plan_runs(sweep, []))
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=code)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=code, capture_output=True, text=True, check=True).stdout
    (frozen,) = read_json(tmp_path / "sweep" / "sweep.json")["frozen"]
    commit, _, changes = frozen.pop("commit").partition("+")
    assert commit == head.strip() and len(changes) == 7 and frozen == {"overrides": [], "runs": 8}
    assert "+changed" in (tmp_path / "sweep" / f"code_{head[:12]}+{changes}.diff").read_text()


def test_another_commit_is_said_and_kept_while_runs_are_left(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep, folder = load_sweep(str(undisturbed), {}), tmp_path / "sweep"
    runs = plan_runs(sweep, [])
    for commit in ("a" * 40, "a" * 40, "b" * 40 + "+1234567"):
        monkeypatch.setattr(sweeps.plan, "commit", lambda commit=commit: commit)
        monkeypatch.setattr(sweeps.plan, "uncommitted", lambda commit=commit: b"diff" * ("+" in commit))
        freeze(folder, "tiny", sweep, [], runs)
    warning = f"warning: the sweep was planned at commit {'a' * 40}; the runs that are left use {commit}\n"
    assert capsys.readouterr().out == warning
    assert [one["commit"] for one in read_json(folder / "sweep.json")["frozen"]] == ["a" * 40, commit]
    assert (folder / f"code_{'b' * 12}+1234567.diff").read_bytes() == b"diff"
    done = tmp_path / "done"
    shutil.copytree(undisturbed.parent / "sweep", done)
    before = read_json(done / "sweep.json")
    freeze(done, "tiny", sweep, [], runs)  # nothing is left
    assert read_json(done / "sweep.json") == before and capsys.readouterr().out == ""


# -----------------------------------------------------------------------------
# Launching


def test_a_dry_run_lists_every_run_and_writes_nothing(sweep: Path) -> None:
    output = launched(sweep, "dry_run=true")
    for run in plan_runs(load_sweep(str(sweep), {}), []):
        assert f"{run.id}  pending" in output
    assert "GiB of disk" in output and "on 2 workers" in output
    assert list(sweep.parent.iterdir()) == [sweep]
    unread = launcher(sweep, "dry_run=true", stderr=subprocess.PIPE)
    assert unread.stdout is not None and unread.stderr is not None
    unread.stdout.close()  # a reader that leaves, as head does
    assert unread.stderr.read() == "" and unread.wait() == 0


def test_a_done_run_whose_summary_is_lost_is_mended(undisturbed: Path, tmp_path: Path) -> None:
    file, folder = tmp_path / undisturbed.name, tmp_path / "sweep"
    shutil.copy(undisturbed, file)
    shutil.copytree(undisturbed.parent / "sweep", folder, symlinks=True)
    first, second = (folder / run.id for run in read_plan(folder)[:2])
    (first / "summary.json").write_text("")
    (second / "summary.json").unlink()
    assert "6 done, 2 stopped" in launched(file, "dry_run=true")
    assert "8 done" in launched(file)
    assert_same_sweep(undisturbed.parent / "sweep", folder, (1, 2))


def test_kills_at_random_moments_change_nothing(undisturbed: Path, sweep: Path) -> None:
    choose, folder = random.Random(1), sweep.parent / "sweep"
    kills = {"launcher": 0, "workers": 0, "all": 0}
    process = launcher(sweep, "retries=100")
    while process.poll() is None and sum(kills.values()) < 12:
        what = list(kills)[sum(kills.values()) % 3]
        if choose.random() < 0.8:  # else wherever the launcher is
            eventually(lambda running=process: workers_of(folder) or running.poll() is not None)  # type: ignore[misc]
        time.sleep(choose.uniform(0, 4))
        victims = [] if what == "launcher" else workers_of(folder)
        if what != "workers":
            victims.append(process.pid)
        if process.poll() is None and victims:
            for pid in victims:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            kills[what] += 1
            if what != "workers":
                process.communicate()
                process = launcher(sweep, "retries=100")
    output_of(process)
    assert sum(kills.values()) >= 6, kills
    # none: killed after its status was written, before it said so
    assert_same_sweep(undisturbed.parent / "sweep", folder, finished=(0, 1))


RUNS = 2000 if os.environ.get("NANOQK_FAULTS") == "full" else 20


def test_a_sweep_of_many_runs_with_kills_is_complete_and_its_launcher_stays_small(corpus: Path, tmp_path: Path) -> None:
    """At most a fifth as many kills as runs: of one worker, or of each eighth time the launcher. Each run is trained
    once."""
    seeds, choose = [*range(RUNS)], random.Random(2)
    sweep = tiny_sweep(tmp_path, corpus, "max_iters=2", "model.n_layer=1", grid={}, folds=None, seeds=seeds)
    folder, kills, sizes = tmp_path / "sweep", 0, []
    process = launcher(sweep, "retries=1000", stdout=subprocess.DEVNULL)
    while process.poll() is None:
        if workers := workers_of(folder):
            files = len(os.listdir(f"/proc/{process.pid}/fd"))
            pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
            sizes.append((pages * 4096 / 2**20, files))
            if kills < RUNS // 5:
                victim = process.pid if kills % 8 == 7 else choose.choice(workers)
                with suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
                kills += 1
                if victim == process.pid:
                    process.wait()
                    process = launcher(sweep, "retries=1000", stdout=subprocess.DEVNULL)
        time.sleep(choose.uniform(0.5, 8))
    assert process.returncode == 0
    plan = read_plan(folder)
    assert len(plan) == RUNS and all(state_of(folder, run).state == "done" for run in plan)
    assert sum(times_finished(folder / run.id) not in (0, 1) for run in plan) == 0
    (first, files), (last, files_at_end) = sizes[len(sizes) // 4], sizes[-1]
    print(f"{RUNS} runs, {kills} kills; launcher {first:.0f} and {last:.0f} MiB, {files} and {files_at_end} open files")
    assert last < first + 50 and files_at_end <= files + 4


def test_two_launchers_at_once_run_nothing_twice(undisturbed: Path, sweep: Path) -> None:
    folder = sweep.parent / "sweep"
    first = launcher(sweep, "launcher.workers=1")
    run = begun(folder)[0]
    eventually(lambda: (folder / run.id / "config.yaml").exists())
    (slow,) = workers_of(folder)
    os.kill(slow, signal.SIGSTOP)  # until the other launcher has taken a run
    second = launcher(sweep)
    plan = read_plan(folder)
    eventually(lambda: any(f"-{second.pid}-" in name for run in plan for name in read_claim(folder, run.id)["tries"]))
    os.kill(slow, signal.SIGCONT)
    assert all("8 done" in output_of(process) for process in (first, second))
    assert_same_sweep(undisturbed.parent / "sweep", folder)
    assert [(folder / run.id / "train.log").read_text().count(" parameters, ") for run in plan] == 8 * [1]
    assert len({tuple(read_claim(folder, run.id)["tries"]) for run in plan}) == 2  # both took some


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_launcher_that_ends_stops_its_runs_at_a_checkpoint_and_the_same_command_goes_on(
    number: signal.Signals, undisturbed: Path, sweep: Path
) -> None:
    folder, killed = sweep.parent / "sweep", number == signal.SIGKILL
    process = launcher(sweep)
    run = begun(folder)[0]
    eventually(lambda: (read_status(folder / run.id).get("iter") or 0) > 0)
    workers = workers_of(folder)
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)  # so that the run is not over before they are told
    process.send_signal(number)
    if killed:
        process.wait()
    for pid in workers:
        eventually(lambda: killed or pending_signals(pid))  # noqa: B023
        os.kill(pid, signal.SIGCONT)
    output = output_of(process, -number if killed else 128 + number)
    assert killed or (f"stopped by {number.name}" in output and "the same command goes on" in output)
    eventually(lambda: workers_of(folder) == [], 60 * killed)
    states = {state_of(folder, run).state for run in read_plan(folder)}
    assert "stopped" in states and "running" not in states
    assert "8 done" in launched(sweep)
    assert_same_sweep(undisturbed.parent / "sweep", folder)


def test_a_run_may_be_of_several_ranks(tmp_path: Path, corpus: Path) -> None:
    """By torchrun. A stopped launcher stops it at a checkpoint, and so does the death of its worker."""
    ends, ranks = [], ["launcher.workers=1", "launcher.ranks=2"]
    words = ["max_iters=200", "gradient_accumulation_steps=2", "checkpoint_interval=10"]
    for name in ("straight", "stopped"):
        (tmp_path / name).mkdir()
        sweep = tiny_sweep(tmp_path / name, corpus, *words, grid={}, folds=None)
        (run,) = plan_runs(load_sweep(str(sweep), {}), [])
        folder = tmp_path / name / "sweep" / run.id
        process = launcher(sweep, *ranks)
        if name == "stopped":
            eventually(lambda: (folder / "ckpt" / "latest").exists())  # noqa: B023
            process.terminate()
            assert "1 stopped" in output_of(process, 143)
            first = read_status(folder)
            assert first["state"] == "stopped" and 0 < first["iter"] < 200
            process = launcher(sweep, *ranks)
            eventually(lambda: read_status(folder)["iter"] > first["iter"])  # noqa: B023
            (pid,) = workers_of(folder.parent)
            os.kill(pid, signal.SIGKILL)  # and the launcher starts another worker
            log = folder / "train.log"
            eventually(lambda: log.read_text().count("resumed at iteration") == 2)  # noqa: B023
            assert log.read_text().count("SIGTERM") == 2
        output = output_of(process)
        assert "1 workers of 2 ranks" in output and "1 done" in output
        ends.append(read_json(folder / "summary.json"))
    assert ends[0]["ranks"] == ends[1]["ranks"] == 2 and ends[0]["val/loss"] == ends[1]["val/loss"]


def test_a_run_of_several_ranks_that_fails_says_so(tmp_path: Path, corpus: Path) -> None:
    sweep = tiny_sweep(tmp_path, corpus, "gradient_accumulation_steps=2", grid={}, folds=None)
    (run,) = plan_runs(load_sweep(str(sweep), {}), [])
    spoil(tmp_path / "sweep", run, refused=True)
    output = launched(sweep, "launcher.workers=1", "launcher.ranks=2", "retries=0", status=1)
    assert f"failed: {run.id}: one of its ranks failed" in output
    assert "neither empty nor a run directory" in (tmp_path / "sweep" / "logs" / f"{run.id}.log").read_text()


def test_workers_share_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four workers on two GPUs, each of which sees one; here they only say which."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "worker.py").write_text("import os; print('GPU', os.environ['CUDA_VISIBLE_DEVICES'])")
    monkeypatch.setattr(launchers, "WORKER", str(tmp_path / "worker.py"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5ee")
    assert launchers.Local(launchers.LocalOptions(), tmp_path, "launch").workers == 2
    local = launchers.Local(launchers.LocalOptions(workers=4), tmp_path, "launch")
    assert local.threads == max(1, len(os.sched_getaffinity(0)) // 4)
    local.start(4)
    eventually(lambda: local.alive() == 0)
    said = [(tmp_path / "logs" / f"worker_{i}.log").read_text().split()[-1] for i in range(4)]
    assert sorted(said) == ["3", "3", "GPU-5ee", "GPU-5ee"]


def test_a_run_that_always_fails_is_tried_again_named_and_does_not_stop_the_others(sweep: Path) -> None:
    folder = sweep.parent / "sweep"
    broken, foreign = frozen(sweep)[1:3]
    spoil(folder, broken, refused=False)
    spoil(folder, foreign, refused=True)  # no second try would help
    output = launched(sweep, "retries=2", status=1)
    assert "6 done, 2 failed" in output
    assert f"failed: {broken.id}: IsADirectoryError" in output
    assert f"failed: {foreign.id}: out_dir=" in output and "neither empty nor a run directory" in output
    assert [*read_claim(folder, broken.id)["tries"].values()] == [3]
    assert (folder / "logs" / f"{broken.id}.log").read_text().count("Traceback") == 3
    assert (folder / "logs" / f"{foreign.id}.log").read_text().count("error: ") == 1
    (folder / broken.id / "metrics.jsonl").rmdir()
    (folder / foreign.id / "thesis.tex").unlink()
    assert "8 done" in launched(sweep)


@pytest.mark.parametrize("refused", [True, False])
def test_fail_fast_stops_the_other_runs(refused: bool, sweep: Path) -> None:
    folder, run = sweep.parent / "sweep", frozen(sweep)[0]
    spoil(folder, run, refused)
    output = launched(sweep, "fail_fast", "launcher.workers=1", status=1)
    assert "1 failed, 7 pending" in output
    assert [*read_claim(folder, run.id)["tries"].values()] == [2]
    assert (folder / "logs" / f"{run.id}.log").read_text().count("Error: ") == (0 if refused else 2)
    assert workers_of(folder) == []


def test_a_run_whose_worker_always_dies_is_given_up_and_the_others_are_not(undisturbed: Path, tmp_path: Path) -> None:
    grid = {"max_iters": [300, 60]}  # the first lasts long enough to be killed twice on a busy machine
    sweep = tiny_sweep(tmp_path, undisturbed.parent / "corpus.txt", grid=grid, folds=[0])
    folder = tmp_path / "sweep"
    process = launcher(sweep, "launcher.workers=1")
    run, other = begun(folder)
    for tries in (1, 2):
        (worker,) = eventually(lambda: is_locked(folder / run.id) and workers_of(folder))
        os.kill(worker, signal.SIGKILL)
        eventually(lambda: worker not in workers_of(folder))  # noqa: B023
        assert [*read_claim(folder, run.id)["tries"].values()] >= [tries]  # it may be at it again
    output = output_of(process, 1)
    assert "1 done, 1 failed" in output and f"failed: {run.id}: its worker died" in output
    assert "2 done" in launched(sweep)
    assert times_finished(folder / run.id) == times_finished(folder / other.id) == 1


def test_a_worker_ends_after_a_failed_try_which_counts_as_no_death(
    sweep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a CUDA error, every later run of the process would fail too."""
    folder, broken = sweep.parent / "sweep", frozen(sweep)[0]
    spoil(folder, broken, refused=False)
    for name in ("claims", "launches", "logs"):
        (folder / name).mkdir()
    Launch(folder, "one", [broken.id], tries=2, threads=1).write()
    assert [worker.work(folder, "one") for _ in range(3)] == [worker.RESTART, worker.RESTART, 0]
    assert read_claim(folder, broken.id)["tries"] == {"one": 2}

    deaths = []
    for status in (worker.RESTART, 1):
        (folder / "worker.py").write_text(f"raise SystemExit({status})")
        monkeypatch.setattr(launchers, "WORKER", str(folder / "worker.py"))
        local = launchers.Local(launchers.LocalOptions(workers=1), folder, "one")
        for _ in range(4):
            local.start(1)
            eventually(lambda: local.alive() == 0)  # noqa: B023
        deaths.append((local.deaths, local.failure() is None))
    assert deaths == [(0, True), (3, False)]


def test_a_run_that_ends_between_two_looks_is_done_and_not_dead(
    undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = undisturbed.parent / "sweep"
    run = read_plan(folder)[0]
    looks = [False, True]  # and in between its worker has let go of it
    monkeypatch.setattr(sweeps.status, "at_end", lambda path: looks.pop(0))
    assert state_of(folder, run).state == "done"


def test_a_full_disk_fails_the_runs_and_loses_nothing(undisturbed: Path, sweep: Path) -> None:
    """Files may not grow past what a checkpoint needs: what write() then raises is what a full disk's does."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    frozen(sweep)  # before the limit: the changes of a checkout may be large
    output = launched(sweep, "retries=0", status=1, preexec_fn=limit)
    assert "8 failed" in output and "File too large" in output
    assert "8 done" in launched(sweep)
    assert_same_sweep(undisturbed.parent / "sweep", sweep.parent / "sweep")


def test_a_checkout_edited_while_the_sweep_runs_does_not_change_later_configs(undisturbed: Path, sweep: Path) -> None:
    code, folder = sweep.parent / "code", sweep.parent / "sweep"
    shutil.copytree(ROOT, code, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "results", "*.egg-info"))
    process = launcher(sweep, "launcher.workers=1", code=code, env={**os.environ, "PYTHONPATH": str(code)})
    first = begun(folder)[0]
    eventually(lambda: (folder / first.id / "config.yaml").exists())
    for file in [sweep, *(code / "configs").rglob("*.yaml")]:
        file.write_text("name: edited\n")
    output_of(process)
    assert_same_sweep(undisturbed.parent / "sweep", folder)


@pytest.mark.parametrize(("eval_interval", "reason"), [(30, "train/loss"), (1, "val/loss")])
def test_a_diverged_run_is_a_result_and_not_a_failure(
    tmp_path: Path, corpus: Path, eval_interval: int, reason: str
) -> None:
    words = ["max_iters=30", "grad_clip=0", f"eval_interval={eval_interval}"]
    grid = {"optim.learning_rate": [1e-3, 1e30]}
    sweep = tiny_sweep(tmp_path, corpus, *words, grid=grid, folds=None, parts={"hot": {}})
    output = launched(sweep)
    assert "1 done, 1 diverged" in output
    for run in read_plan(tmp_path / "sweep"):  # W&B's tags, and no media
        wandb = load_config(yaml.safe_load((tmp_path / "sweep" / run.id / "config.yaml").read_text())).wandb
        assert wandb.tags == (f"sweep:{sweep.stem}", "part:hot") and wandb.media == "off"
        summary = read_json(tmp_path / "sweep" / run.id / "summary.json")
        assert ("reason" in summary) == (summary["status"] == "diverged")
    (line,) = (line for line in output.splitlines() if line.startswith("diverged: "))
    assert reason in line and "nan" in line
    assert "1 done, 1 diverged" in launched(sweep)
