"""A full, read-only or vanished disk: nothing that was saved is lost, and with space again all goes on."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import eventually, exit_status, fork
from helpers.runs import assert_same_run, configured
from helpers.sweeps import assert_same_sweep, frozen, launched, tiny_sweep
from variants import FULL

import train
from core import checkpoint
from core.process import guarded
from scripts import report
from training.config import TrainConfig

NOBODY = 65534
Disk = tuple[Path, Callable[[int], None]]  # a folder, and what sets its size in KiB


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """A folder on a disk of its own in memory, and a function that sets its size in KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", folder], capture_output=True).returncode:
        pytest.skip("only root mounts a disk")

    def resize(kibibytes: int) -> None:
        subprocess.run(["mount", "-o", f"remount,size={kibibytes}k", folder], check=True)

    yield folder, resize
    subprocess.run(["umount", "-l", folder], check=True)


def trained(config: TrainConfig) -> int:
    """The exit status of a process that trains this run."""
    return exit_status(fork(lambda: guarded(lambda: train.run(config))))


def used(folder: Path) -> int:
    return sum(-(-path.stat().st_size // 4096) * 4 for path in folder.rglob("*") if path.is_file())  # KiB


def test_that_fills_up_during_a_run(corpus: Path, tmp_path: Path, disk: Disk) -> None:
    """Sizes from hardly anything to almost enough, so that each kind of file is the one that does not fit."""
    folder, resize = disk
    schedule = {"name": "cosine", "warmup_iters": 1}
    config = configured(corpus, tmp_path / "straight", max_iters=12, schedule=schedule, plot=True)
    assert trained(config) == 0
    most = used(tmp_path / "straight")
    full = 0
    sizes = [4 + most * i // n for n in [60 if FULL else 7] for i in range(n)]
    for size in sizes:
        run = folder / "run"
        resize(size)
        status = trained(replace(config, out_dir=str(run)))
        assert status in (0, 1, 2), size
        full += status != 0
        saved = checkpoint.step_dirs(run / "ckpt")
        if saved:
            checkpoint.load(saved[0])  # the newest, whole
        resize(8192)
        assert trained(replace(config, out_dir=str(run))) == 0, size
        assert_same_run(tmp_path / "straight", run)
        shutil.rmtree(run)
    assert full >= len(sizes) // 2
    print(f"{len(sizes)} sizes of disk, {full} of them too small")


def test_that_fills_up_during_a_sweep_and_its_report(
    corpus: Path, tmp_path: Path, disk: Disk, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, resize = disk
    resize(8192)
    for place in (tmp_path, folder):
        sweep = tiny_sweep(place, corpus, "max_iters=6", folds=[0], grid={"qk_norm": ["none", "rms"]})
        frozen(sweep)
        if place == folder:
            resize(used(folder) + 150)  # one run has room
            output = launched(sweep, "launcher.workers=1", "retries=0", status=1)
            assert "failed" in output and "No space left" in output
            resize(8192)
        assert "2 done" in launched(sweep, "launcher.workers=1")
    assert_same_sweep(tmp_path / "sweep", folder / "sweep")
    monkeypatch.setattr("scripts.reporting.page.vega", lambda: "")  # which takes a second
    words = [f"sweep_dir={folder / 'sweep'}", f"out={folder / 'out'}"]
    assert report.main(words) == 0
    before = {path.name: path.read_bytes() for path in (folder / "out").iterdir()}
    resize(used(folder) + 8)
    assert report.main(words) in (0, 1)
    assert {path.name: path.read_bytes() for path in (folder / "out").iterdir()} == before
    shutil.rmtree(folder / "out")
    resize(used(folder) + 8)
    capsys.readouterr()
    assert report.main(words) == 1
    assert capsys.readouterr().err.count("\n") == 1
    resize(8192)
    assert report.main(words) == 0
    assert {path.name: path.read_bytes() for path in (folder / "out").iterdir()} == before


def as_nobody(work: Callable[[], int]) -> int:
    """Start work() in a process of an ordinary user, and return its pid."""

    def call() -> int:
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        return work()

    return fork(call)


@pytest.fixture
def readable(corpus: Path, tmp_path: Path) -> None:
    """What a process of nobody needs: folders that it may pass, and imports that it may not be able to read."""
    for path in [tmp_path, *tmp_path.parents]:
        with suppress(PermissionError):
            path.chmod(path.stat().st_mode | 0o055)
    corpus.chmod(0o644)
    assert train.run(configured(corpus, tmp_path / "before")) == 0


@pytest.mark.usefixtures("readable")
def test_a_folder_that_may_not_be_written_is_refused(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o555)
    config = configured(corpus, tmp_path / "locked" / "run")
    assert exit_status(as_nobody(lambda: guarded(lambda: train.run(config)))) == 2
    assert list((tmp_path / "locked").iterdir()) == []


@pytest.mark.usefixtures("readable")
def test_checkpoints_that_may_not_be_listed_are_not_none(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = configured(corpus, tmp_path / "run", max_iters=4, checkpoint_interval=2)
    tmp_path.chmod(0o777)
    assert exit_status(as_nobody(lambda: guarded(lambda: train.run(replace(config, max_iters=2))))) == 0
    (tmp_path / "run" / "ckpt").chmod(0o300)
    assert exit_status(as_nobody(lambda: guarded(lambda: train.run(config)))) == 1
    assert capfd.readouterr().err == f"failed: [Errno 13] Permission denied: '{tmp_path}/run/ckpt'\n"


@pytest.mark.usefixtures("readable")
def test_a_folder_that_vanishes_fails_the_run(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "place").mkdir(mode=0o777)
    (tmp_path / "place").chmod(0o777)
    config = configured(corpus, tmp_path / "place" / "run", max_iters=100_000, checkpoint_interval=20)
    pid = as_nobody(lambda: guarded(lambda: train.run(config)))
    eventually((tmp_path / "place" / "run" / "ckpt" / "latest").exists)
    (tmp_path / "place" / "run").rename(tmp_path / "gone")
    assert exit_status(pid) == 1
    checkpoint.load(checkpoint.step_dirs(tmp_path / "gone" / "ckpt")[0])
