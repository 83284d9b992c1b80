"""core/files.py: locks between processes, writes that fail, and a user without a home."""

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import yaml
from helpers.refusals import NOT_FILES

from core import files
from core.files import (
    FileLock,
    cache_folder,
    finite,
    is_locked,
    load_yaml,
    open_regular,
    read_json,
    read_regular,
    write_atomic,
    write_json,
)

HOLD = """
import sys
from pathlib import Path
from core.files import FileLock
lock = FileLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_lock_excludes_other_processes_until_its_owner_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "a" / "lock"
    assert not is_locked(file)
    command = [sys.executable, "-c", HOLD, str(file)]
    with subprocess.Popen(command, cwd=files.ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == b"held\n"
        assert is_locked(file)
        with FileLock(file, timeout=0) as lock, FileLock(file, timeout=0.05) as patient:
            assert not lock.held and not patient.held
        owner.kill()
    with FileLock(file) as lock:
        assert lock.held and is_locked(file)
    assert not lock.held and file.exists()
    with open(file) as other:
        fcntl.flock(other, fcntl.LOCK_SH)  # is_locked() of another process
        assert not is_locked(file)


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_content(function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    write_json(tmp_path / "x.json", finite({"a": 1, "b": float("nan"), "c": None}))
    monkeypatch.setattr(os, function, full)
    with pytest.raises(OSError, match="no space left: .*x.json"):
        write_atomic(tmp_path / "x.json", b"{}")
    assert read_json(tmp_path / "x.json") == {"a": 1, "b": None} and len(list(tmp_path.iterdir())) == 1


def test_a_write_follows_no_link_that_waits_for_it(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / f"x.json.{threading.get_native_id()}.tmp").symlink_to(tmp_path / "victim")
    write_atomic(tmp_path / "x.json", b"{}")
    assert (tmp_path / "victim").read_text() == "mine" and (tmp_path / "x.json").read_bytes() == b"{}"


def test_of_two_writers_at_once_the_last_one_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, fsync, other = tmp_path / "x", os.fsync, threading.Thread(target=lambda: write_atomic(tmp_path / "x", b"b"))

    def meanwhile(descriptor: int) -> None:
        if not other.ident:  # amid our own write
            other.start()
            other.join()
            assert file.read_bytes() == b"b"
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", meanwhile)
    write_atomic(file, b"a")
    assert file.read_bytes() == b"a" and os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("kind", NOT_FILES)
def test_what_is_no_file_of_a_folder_is_neither_read_nor_locked(kind: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    file = tmp_path / "run" / "x"
    NOT_FILES[kind](file)
    assert read_json(file) == {}
    calls: list[Callable[[], object]] = [lambda: read_regular(file)]
    if kind != "endless":
        calls += [lambda: FileLock(file, timeout=0), lambda: is_locked(file), lambda: open_regular(file, "ab")]
    for call in calls:
        with pytest.raises(OSError):
            call()


def test_a_link_within_the_folder_and_a_folder_behind_a_link_are_followed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "a").write_text("mine")
    (tmp_path / "run" / "b").symlink_to("a")
    (tmp_path / "link").symlink_to("run")
    assert read_regular(tmp_path / "link" / "a") == read_regular(tmp_path / "link" / "b") == b"mine"


@pytest.mark.parametrize("moves", range(1, 10))
def test_a_crash_leaves_all_files_as_they_were_or_all_as_they_are_to_be(
    moves: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = (dict.fromkeys(("a", "b", "c"), content) for content in (b"old", b"new"))
    files.replace_files(tmp_path, old)
    left = moves

    def killed(move: Callable[..., None], *paths: Path) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        move(*paths)

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        for name in ("replace", "rename"):
            patch.setattr(os, name, partial(killed, getattr(os, name)))
        files.replace_files(tmp_path, new)
    (tmp_path / f".{files.NEXT}-0a").mkdir()  # of a kill -9
    (tmp_path / "a.77.tmp").touch()
    (tmp_path / "mine.77.tmp").write_bytes(b"mine")
    files.finish_replacing(tmp_path)
    files.remove_aside(tmp_path, "a|b")
    assert (tmp_path / "mine.77.tmp").read_bytes() == b"mine"
    (tmp_path / "mine.77.tmp").unlink()
    found = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert found == (old if moves < 4 else new)  # three files are written, and their folder is renamed


def test_what_a_link_leads_to_replaces_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis").touch()
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / files.NEXT).symlink_to(tmp_path / "mine")
    files.finish_replacing(tmp_path / "strange")
    assert (tmp_path / "mine" / "thesis").exists()


@pytest.mark.parametrize("home", ["~", "."])
def test_a_user_without_a_home_has_a_cache_in_the_temporary_folder(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never in the current folder, which may hold a stranger's compiled kernels."""
    monkeypatch.setenv("XDG_CACHE_HOME", "" if home == "~" else ".cache")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path.replace("~", home))
    assert cache_folder() == Path(tempfile.gettempdir(), f"nanoqk-{os.getuid()}")


@pytest.mark.parametrize(
    "text",
    [
        "!!bool maybe",
        "!!float ''",
        "!!int '-'",
        "!!timestamp x",
        "1:" + "0:" * 190 + "0.5",
        50_000 * "[",
        50_000 * "- ",
    ],
)
def test_yaml_of_any_kind_is_read_or_named_in_time(text: str) -> None:
    with pytest.raises(yaml.YAMLError):
        load_yaml(f"a: {text}" if text[0] != "-" else text)
