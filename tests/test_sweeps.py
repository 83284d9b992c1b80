"""Sweeps: killing anything at any moment changes nothing but the time."""

import fcntl
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, eventually, write_corpus
from helpers.runs import assert_same_run, lines
from helpers.sweeps import (
    assert_same_sweep,
    frozen,
    launched,
    offer,
    pending_signals,
    times_finished,
    tiny_sweep,
    use_mps,
    where,
)  # fmt: skip
from variants import FULL

import sweeps.plan
import sweeps.status
from core.files import file_sha256, read_json, write_json
from core.rundir import is_open, read_status
from scripts.report import report
from scripts.reporting.one_run import RunFiles
from scripts.reporting.runs import read_definition, read_sweep
from scripts.reporting.stored import joined, read_stored
from sweeps import launchers, worker
from sweeps.claims import claimed, read_claim
from sweeps.definition import load_sweep
from sweeps.launch import main
from sweeps.plan import PlannedRun, freeze, plan_runs, read_plan
from sweeps.status import SweepPlace, print_status, state_of
from training.config import to_yaml

SELDOM = ["eval_interval=6", "checkpoint_interval=6"]  # a save takes longer than an iteration
ONE = "launcher.workers=1"  # where two would only import twice


def break_run(folder: Path, run: PlannedRun, refused: bool) -> None:
    """Have every try at a run fail: its directory is somebody else's, or a file of it cannot be written."""
    (folder / run.id).mkdir(parents=True)
    if refused:
        (folder / run.id / "thesis.tex").touch()
    else:
        (folder / run.id / "config.yaml").write_text(to_yaml(run.config))
        (folder / run.id / "metrics.jsonl").mkdir()


def launcher(sweep: Path, *words: str, code: Path = ROOT, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, str(code / "sweeps" / "launch.py"), *where(sweep), *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, **{**pipes, **options})


def output_of(process: subprocess.Popen[str], status: int = 0) -> str:
    """Wait for a launcher. Returns what it printed."""
    output, _ = process.communicate(timeout=300)
    assert process.returncode == status, output
    return output


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
            if str(sweep_dir).encode() in words and any(word.endswith(b"/worker.py") for word in words):
                found[int(entry.name)] = parent
    return [pid for pid, parent in found.items() if parent not in found]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sweep file of a sweep of four runs that has run through; its directory is beside it."""
    folder = tmp_path_factory.mktemp("undisturbed")
    sweep = tiny_sweep(folder, write_corpus(folder), *SELDOM, "model.dropout=0.2", grid={"qk_norm": ["none", "rms"]})
    output = launched(sweep, ONE)
    assert "4 done" in output and "[4/4]" in output
    assert not [*(folder / "sweep").glob("*/curve.png")]  # plot=auto
    return sweep


@pytest.fixture
def sweep(undisturbed: Path, tmp_path: Path) -> Iterator[Path]:
    """The same sweep, not begun."""
    file = tmp_path / undisturbed.name
    shutil.copy(undisturbed, file)
    yield file
    for pid in workers_of(tmp_path / "sweep"):
        os.kill(pid, signal.SIGKILL)


def test_another_commit_is_said_and_kept_while_runs_are_left(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep, folder = load_sweep(str(undisturbed), {}), tmp_path / "sweep"
    runs = plan_runs(sweep, [])
    for commit, diff in (("a" * 40, b""), ("a" * 40, b""), ("b" * 40 + "+1234567", b"diff")):
        monkeypatch.setattr(sweeps.plan, "commit", lambda commit=commit: commit)
        monkeypatch.setattr(sweeps.plan, "uncommitted", lambda diff=diff: diff)
        freeze(folder, "tiny", sweep, [], runs, trains=True)
    warning = f"warning: the sweep was planned at commit {'a' * 40}; the runs that are left use {commit}\n"
    assert capsys.readouterr().out == warning
    assert [one["commit"] for one in read_json(folder / "sweep.json")["frozen"]] == ["a" * 40, commit]
    assert (folder / f"code_{'b' * 12}+1234567.diff").read_bytes() == b"diff"
    done = tmp_path / "done"
    shutil.copytree(undisturbed.parent / "sweep", done)
    before = read_json(done / "sweep.json")
    freeze(done, "tiny", sweep, [], runs, trains=False)
    assert read_json(done / "sweep.json") == before and capsys.readouterr().out == ""


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


def test_runs_that_a_report_stored_are_not_trained_again(
    undisturbed: Path, sweep: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for one that was stopped, and two that ended before or after the iterations that are asked for now."""
    monkeypatch.setattr("scripts.reporting.page.vega", lambda: "")  # which takes a second
    stored, folder = sweep.parent / "stored", sweep.parent / "sweep"
    report(read_sweep(undisturbed.parent / "sweep", "tiny"), stored, [])
    first, second, third, fourth, *_ = plan_runs(load_sweep(str(sweep), {}), [])
    csv_file = stored / "runs.csv"
    states = {first.id: ",stopped,60,", second.id: ",done,59,", third.id: ",diverged,30,", fourth.id: ",done,61,"}
    lines = csv_file.read_text().splitlines(keepends=True)
    for run_id, state in states.items():
        lines = [line.replace(",done,60,", state) if line.startswith(f"{run_id},") else line for line in lines]
    csv_file.write_text("".join(lines))
    about = read_json(stored / "provenance.json")
    about["sha256"]["runs.csv"] = file_sha256(csv_file)
    write_json(stored / "provenance.json", about)
    words = [f"sweep={sweep}", f"from={stored}"]
    assert main([*words, f"sweep_dir={folder}", "dry_run=true"]) == 0
    output = capsys.readouterr().out
    assert "1 of 4 runs are stored" in output and "3 pending" in output and third.id not in output
    assert "3 done" in launched(sweep, ONE, f"from={stored}")
    assert [run.id for run in read_plan(folder) if (folder / run.id).exists()] == [first.id, second.id, fourth.id]
    whole = joined(read_stored(stored, "tiny"), read_sweep(folder, "tiny"))
    assert [run.state.state for run in whole.runs] == ["done", "done", "diverged", "done"]
    report(whole, stored, [])
    assert main([*words, f"sweep_dir={sweep.parent / 'other'}"]) == 0
    assert "4 of 4 runs are stored" in capsys.readouterr().out and len(read_plan(sweep.parent / "other")) == 4
    monkeypatch.setattr(sweeps.plan, "commit", lambda: "b" * 40)
    assert main([*words, f"sweep_dir={sweep.parent / 'other'}"]) == 0
    assert "warning" not in capsys.readouterr().out  # nothing is left for another commit
    assert main([f"sweep={sweep}", "from=nowhere"]) == 2
    assert "from=nowhere has no runs.csv that can be read" in capsys.readouterr().err


def test_folders_that_somebody_exchanged_are_no_runs_of_the_sweep(
    undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are refused, and neither counted nor drawn; with the right names again they are whole."""
    file, folder = tmp_path / undisturbed.name, tmp_path / "sweep"
    shutil.copy(undisturbed, file)
    shutil.copytree(undisturbed.parent / "sweep", folder, symlinks=True)
    first, second, third, *_ = (folder / run.id for run in read_plan(folder))

    def exchange(*paths: Path) -> None:
        for path, other in zip((tmp_path / "away", *paths), (*paths, tmp_path / "away"), strict=True):
            other.rename(path)

    exchange(first, second)
    shutil.rmtree(third)
    shutil.copytree(second, third, symlinks=True)
    found = read_sweep(folder, "tiny").runs
    assert [run.state.state for run in found] == ["failed", "failed", "failed", "done"]
    told = [run.state.reason for run in found[:3]]
    assert all("holds another run: " in reason and "put it back" in reason for reason in told)
    assert "qk_norm.name none -> rms" in told[0] and "qk_norm.name rms -> none" in told[1] and "data.fold" in told[2]
    for words in ([ONE], ["dry_run=true"]):
        assert f"error: {first} holds another run: qk_norm.name none -> rms" in launched(file, *words, status=2)
    assert print_status(SweepPlace(sweep_dir=str(folder))) == 0
    assert "1 done, 3 failed" in capsys.readouterr().out
    live = [RunFiles(folder, run) for run in read_plan(folder)]
    assert all(run.update() for run in live)
    drawn = [run.row(read_definition(folder, "tiny", live=True)).curves for run in live]
    assert [*map(bool, drawn)] == [False, False, False, True]
    exchange(first, second)
    shutil.rmtree(third)
    assert "4 done" in launched(file, ONE)
    assert_same_sweep(undisturbed.parent / "sweep", folder, (1, 2))


def test_a_done_run_whose_summary_is_lost_is_mended(undisturbed: Path, tmp_path: Path) -> None:
    file, folder = tmp_path / undisturbed.name, tmp_path / "sweep"
    shutil.copy(undisturbed, file)
    shutil.copytree(undisturbed.parent / "sweep", folder, symlinks=True)
    first, second = (folder / run.id for run in read_plan(folder)[:2])
    (first / "summary.json").write_text("")
    (second / "summary.json").unlink()
    assert "2 done, 2 stopped" in launched(file, "dry_run=true")
    assert "4 done" in launched(file, ONE)
    assert_same_sweep(undisturbed.parent / "sweep", folder, (1, 2))


KILLS = 12 if FULL else 3  # of the launcher, of the workers, of all


def test_kills_at_random_moments_change_nothing(undisturbed: Path, sweep: Path) -> None:
    choose, folder = random.Random(1), sweep.parent / "sweep"
    kills = {"launcher": 0, "workers": 0, "all": 0}
    process = launcher(sweep, "retries=100")
    while process.poll() is None and sum(kills.values()) < KILLS:
        what = list(kills)[sum(kills.values()) % 3]
        if choose.random() < 0.8:  # else wherever the launcher is
            eventually(lambda running=process: workers_of(folder) or running.poll() is not None)  # type: ignore[misc]
        time.sleep(choose.uniform(0, 2))
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
    assert sum(kills.values()) >= KILLS // 2, kills
    # none: killed after its status was written, before it said so
    assert_same_sweep(undisturbed.parent / "sweep", folder, finished=(0, 1))


RUNS = 2000


@pytest.mark.skipif(not FULL, reason="an hour: make test-faults part=sweep")
def test_a_sweep_of_many_runs_with_kills_is_complete_and_its_launcher_stays_small(corpus: Path, tmp_path: Path) -> None:
    """About a fifth as many kills as runs: of a worker or, each eighth time in the first half, the launcher: the last
    one lives long. A run is trained once."""
    seeds, choose = [*range(RUNS)], random.Random(2)
    sweep = tiny_sweep(tmp_path, corpus, "max_iters=2", "model.n_layer=1", grid={}, folds=None, seeds=seeds)
    folder, kills, sizes = tmp_path / "sweep", 0, []
    process = launcher(sweep, "retries=1000", stdout=subprocess.DEVNULL)
    while process.poll() is None:
        if workers := workers_of(folder):
            files = len(os.listdir(f"/proc/{process.pid}/fd"))
            pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
            sizes.append((pages * 4096 / 2**20, files))
            ended = len([*folder.glob("*/summary.json")])
            if 5 * kills <= ended:
                victim = process.pid if kills % 8 == 7 and ended < RUNS // 2 else choose.choice(workers)
                with suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
                kills += 1
                if victim == process.pid:
                    process.wait()
                    process = launcher(sweep, "retries=1000", stdout=subprocess.DEVNULL)
                    sizes.clear()
        time.sleep(choose.uniform(0.1, 1))
    assert process.returncode == 0 and kills >= RUNS // 6
    plan = read_plan(folder)
    assert len(plan) == RUNS and all(state_of(folder, run).state == "done" for run in plan)
    assert sum(times_finished(folder / run.id) not in (0, 1) for run in plan) == 0
    (first, files), (last, files_at_end) = sizes[len(sizes) // 10], sizes[-1]
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
    assert first.stdout is not None
    first.stdout.close()  # its reader leaves: it goes on
    os.kill(slow, signal.SIGCONT)
    assert "4 done" in output_of(second) and first.wait(300) == 0
    assert_same_sweep(undisturbed.parent / "sweep", folder)
    assert [(folder / run.id / "train.log").read_text().count(" parameters, ") for run in plan] == 4 * [1]
    assert len({tuple(read_claim(folder, run.id)["tries"]) for run in plan}) == 2  # both took some


def test_a_launcher_that_ends_stops_its_runs_at_a_checkpoint_and_the_same_command_goes_on(
    undisturbed: Path, sweep: Path
) -> None:
    """By Ctrl-C; then the same command goes on, and is killed."""
    folder = sweep.parent / "sweep"

    def held() -> list[int]:
        """The workers, stopped, once a run is past a checkpoint and has half of its iterations before it."""
        workers = workers_of(folder)
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
        found = [read_status(folder / run.id) for run in plan]
        if any(one.get("state") == "running" and 0 < (one.get("iter") or 0) <= 30 for one in found):
            return workers
        for pid in workers:
            os.kill(pid, signal.SIGCONT)
        return []

    for number in (signal.SIGINT, signal.SIGKILL):
        process, killed = launcher(sweep), number == signal.SIGKILL
        plan = begun(folder)
        workers = eventually(held)
        process.send_signal(number)
        if killed:
            process.wait()
        for pid in workers:
            eventually(lambda: killed or pending_signals(pid))  # noqa: B023
            os.kill(pid, signal.SIGCONT)
        output = output_of(process, -number if killed else 128 + number)
        assert killed or (f"stopped by {number.name}" in output and "the same command goes on" in output)
        eventually(lambda: workers_of(folder) == [], 60 * killed)  # noqa: B023
        states = {state_of(folder, run).state for run in plan}
        assert "stopped" in states and "running" not in states
    assert "4 done" in launched(sweep, ONE)
    assert_same_sweep(undisturbed.parent / "sweep", folder)


def test_a_run_may_be_of_several_ranks(tmp_path: Path, corpus: Path) -> None:
    """By torchrun. The death of its worker stops it at a checkpoint, and so does a stopped launcher."""
    ranks = ["launcher.workers=1", "launcher.ranks=2"]
    words = ["max_iters=200", "gradient_accumulation_steps=2", "eval_interval=50", "checkpoint_interval=10"]
    sweep = tiny_sweep(tmp_path, corpus, *words, grid={}, folds=None)
    (run,) = plan_runs(load_sweep(str(sweep), {}), [])
    folder = tmp_path / "sweep" / run.id
    process, log = launcher(sweep, *ranks), folder / "train.log"
    eventually(lambda: (folder / "ckpt" / "latest").exists())
    (pid,) = workers_of(folder.parent)
    os.kill(pid, signal.SIGKILL)  # and the launcher starts another worker
    eventually(lambda: "resumed at iteration" in log.read_text())
    before = read_status(folder)["iter"]
    eventually(lambda: read_status(folder)["iter"] > before)
    process.terminate()
    output = output_of(process, 143)
    assert "1 stopped" in output and "stopped by SIGTERM" in output
    last = read_status(folder)
    assert last["state"] == "stopped" and before < last["iter"] < 200
    output = launched(sweep, *ranks)
    assert "1 worker of 2 ranks" in output and "1 done" in output
    assert log.read_text().count("resumed at iteration") == log.read_text().count("SIGTERM") == 2
    assert read_json(folder / "summary.json")["ranks"] == 2
    assert [line["iter"] for line in lines(folder)] == [*range(201)]


def test_a_run_of_several_ranks_that_fails_says_so(tmp_path: Path, corpus: Path) -> None:
    sweep = tiny_sweep(tmp_path, corpus, "gradient_accumulation_steps=2", grid={}, folds=None)
    (run,), folder = frozen(sweep), tmp_path / "sweep"
    break_run(folder, run, refused=True)
    offer(folder, "one", [run], ranks=2)
    assert worker.work(folder, "one") == worker.RESTART
    failed = state_of(folder, run)
    assert failed.state == "failed" and failed.reason.startswith("one of its ranks failed")
    assert "neither empty nor a run directory" in (folder / "logs" / f"{run.id}.log").read_text()


def test_workers_share_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four workers on two GPUs, each of which sees one; here they only say which."""
    (tmp_path / "logs").mkdir()
    code = "import os; print(os.environ.get('CUDA_MPS_PIPE_DIRECTORY'), os.environ['CUDA_VISIBLE_DEVICES'])"
    (tmp_path / "worker.py").write_text(code)
    monkeypatch.setattr(launchers, "WORKER", str(tmp_path / "worker.py"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5ee")
    assert launchers.Local(launchers.LocalOptions(), tmp_path, "launch").workers == 2
    for value, seen in (("-1", []), ("1,-1,2", ["1"]), ("NoDevFiles", []), ("0, MIG-7", ["0", "MIG-7"])):
        with monkeypatch.context() as patch:
            patch.setenv("CUDA_VISIBLE_DEVICES", value)
            assert launchers.visible_gpus() == seen
    local = launchers.Local(launchers.LocalOptions(workers=4), tmp_path, "launch")
    assert local.threads == max(1, len(os.sched_getaffinity(0)) // 4)
    local.start(4)
    eventually(lambda: local.alive() == 0)
    said = [(tmp_path / "logs" / f"worker_{i}.log").read_text().split()[-1] for i in range(4)]
    assert sorted(said) == ["3", "3", "GPU-5ee", "GPU-5ee"]

    use_mps(tmp_path, monkeypatch)
    local = launchers.Local(launchers.LocalOptions(workers=4, mps=True), tmp_path, "shared")
    local.start(4)
    (pipes,) = tmp_path.glob("nanoqk_mps_*")
    assert (tmp_path / "logs" / "mps_shared" / "gpus").read_text() == "3,5\n" and local.failure() is None
    eventually(lambda: local.alive() == 0)
    local.stop()
    said = [(tmp_path / "logs" / f"worker_{i}.log").read_text().splitlines()[-1] for i in range(4)]
    assert said == [f"{pipes} {gpu}" for gpu in (0, 1, 0, 1)] and not pipes.exists()


def test_a_run_that_always_fails_is_tried_again_and_named_and_stops_the_others_only_if_asked(sweep: Path) -> None:
    folder = sweep.parent / "sweep"
    broken, foreign, *_ = frozen(sweep)
    break_run(folder, broken, refused=False)
    output = launched(sweep, "fail_fast", ONE, status=1)
    assert "1 failed, 3 pending" in output and f"failed: {broken.id}: IsADirectoryError" in output
    assert [*read_claim(folder, broken.id)["tries"].values()] == [2]
    assert (folder / "logs" / f"{broken.id}.log").read_text().count("Traceback") == 2
    assert workers_of(folder) == []
    (folder / broken.id / "metrics.jsonl").rmdir()
    break_run(folder, foreign, refused=True)  # no second try would help
    output = launched(sweep, ONE, "retries=1", status=1)
    assert "3 done, 1 failed" in output
    assert f"failed: {foreign.id}: out_dir=" in output and "neither empty nor a run directory" in output
    assert (folder / "logs" / f"{foreign.id}.log").read_text().count("error: ") == 1


@pytest.mark.parametrize(("daemon", "status"), [("exit 7", 7), ("sleep 4; exit 8", 8)])
def test_a_daemon_of_mps_that_dies_stops_the_launch_in_one_line(
    daemon: str, status: int, sweep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, or while workers train."""
    use_mps(sweep.parent, monkeypatch, daemon)
    output = launched(sweep, "launcher.workers=3", "launcher.mps=true", "max_iters=100000", status=1)
    error = f"error: launcher.mps=true: nvidia-cuda-mps-control ended with status {status}: see "
    assert [line.startswith(error) for line in output.splitlines()].count(True) == 1
    assert workers_of(sweep.parent / "sweep") == []


def test_a_run_whose_worker_always_dies_is_given_up_and_the_others_are_not(undisturbed: Path, tmp_path: Path) -> None:
    grid = {"max_iters": [300, 60]}  # the first lasts long enough to be killed twice on a busy machine
    sweep = tiny_sweep(tmp_path, undisturbed.parent / "corpus.txt", *SELDOM, grid=grid, folds=[0])
    folder = tmp_path / "sweep"
    process = launcher(sweep, "launcher.workers=1")
    run, other = begun(folder)
    for tries in (1, 2):
        (worker,) = eventually(lambda: is_open(folder / run.id) and workers_of(folder))
        os.kill(worker, signal.SIGKILL)
        eventually(lambda: worker not in workers_of(folder))  # noqa: B023
        assert [*read_claim(folder, run.id)["tries"].values()] >= [tries]  # it may be at it again
    output = output_of(process, 1)
    assert "1 done, 1 failed" in output and f"failed: {run.id}: its worker died" in output
    assert "2 done" in launched(sweep, ONE)
    assert times_finished(folder / run.id) == times_finished(folder / other.id) == 1


def test_a_worker_ends_after_a_failed_try_which_is_no_death(sweep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a CUDA error, every later run of the process would fail too."""
    folder, broken = sweep.parent / "sweep", frozen(sweep)[0]
    break_run(folder, broken, refused=False)
    offer(folder, "one", [broken], tries=2)
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


def test_a_worker_does_not_pass_over_a_run_that_a_launcher_is_looking_at(tmp_path: Path) -> None:
    """On busy cores a look, which holds the claim, may last a second."""
    (tmp_path / "claims").mkdir()
    (tmp_path / "claims" / "run").touch()
    with open(tmp_path / "claims" / "run") as look:
        fcntl.flock(look, fcntl.LOCK_SH)
        timer = threading.Timer(1.0, lambda: fcntl.flock(look, fcntl.LOCK_UN))
        timer.start()
        with claimed(tmp_path, "run") as claim:
            assert claim is not None
        timer.join()


def test_a_run_that_ends_between_two_looks_is_done_not_dead(undisturbed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = undisturbed.parent / "sweep"
    run = read_plan(folder)[0]
    looks = [False, True]  # and in between its worker has let go of it
    monkeypatch.setattr(sweeps.status, "at_end", lambda path: looks.pop(0))
    assert state_of(folder, run).state == "done"


def test_a_checkout_edited_while_a_sweep_runs_does_not_change_later_configs(undisturbed: Path, tmp_path: Path) -> None:
    words, grid = [*SELDOM, "model.dropout=0.2"], {"qk_norm": ["none", "rms"]}
    sweep = tiny_sweep(tmp_path, undisturbed.parent / "corpus.txt", *words, grid=grid, folds=[1])  # two of its runs
    code, folder = tmp_path / "code", tmp_path / "sweep"
    shutil.copytree(ROOT, code, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "results", "*.egg-info"))
    process = launcher(sweep, "launcher.workers=1", code=code, env={**os.environ, "PYTHONPATH": str(code)})
    first = begun(folder)[0]
    eventually(lambda: (folder / first.id / "config.yaml").exists())
    for file in [sweep, *(code / "configs").rglob("*.yaml")]:
        file.write_text("name: edited\n")
    assert "2 done" in output_of(process)
    for run in read_plan(folder):
        assert_same_run(undisturbed.parent / "sweep" / run.id, folder / run.id)
