"""Programs in this process that refuse their settings: one line, status 2, and nothing written."""

import os
import runpy
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra

from core.files import ROOT


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with good and bad files, as the current one, where no hub can be reached."""
    (tmp_path / "corpus.txt").write_text("to be or not to be, that is the question. " * 60)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "one.txt").write_text("a")
    (tmp_path / "short.txt").write_text("to be or not to be")
    (tmp_path / "latin1.txt").write_bytes("café ".encode("latin-1") * 500)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.tex").write_text("do not trample on me")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop.txt").symlink_to("loop.txt")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("XDG_CACHE_HOME", "TIKTOKEN_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path.parent / "cache"))
    with socket.create_server(("127.0.0.1", 0)) as closed:
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{closed.getsockname()[1]}")
    for name in ("RANK", "NANOQK_DATA", "http_proxy", "https_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


Outcome = Callable[..., tuple[int, str]]


@pytest.fixture
def outcome(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Outcome:
    """A program, or its main(), in this process: exit status and standard error."""

    def call(program: str | Callable[[], None], *overrides: str) -> tuple[int, str]:
        GlobalHydra.instance().clear()
        script = program if isinstance(program, str) else f"{program.__module__}.py"
        monkeypatch.setattr(sys, "argv", [script, *overrides])
        with pytest.raises(SystemExit) as exit_:
            if isinstance(program, str):
                runpy.run_path(str(ROOT / script), run_name="__main__")
            else:
                program()
        assert isinstance(exit_.value.code, int)
        return exit_.value.code, capsys.readouterr().err

    return call


def check(status: int, stderr: str, expected: list[str]) -> None:
    assert status == 2, stderr
    assert stderr.startswith("error: ") and stderr.count("\n") == 1 and len(stderr) < 600, stderr
    for part in expected:
        assert part in stderr


def endless(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**42)


NOT_FILES: dict[str, Callable[[Path], object]] = {  # what a stranger may put in place of a file
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "link": lambda path: path.symlink_to(__file__),
    "folder": Path.mkdir,
    "endless": endless,
}


class Bomb:
    """Unpickling it makes a folder."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.target),))


TEXTS = [
    "[]", '"x"', "3", "null", "{}", "[[1]]", "nan", '{"iter": "x"}', '{"iter": null, "val/loss": 1}', '{"iter": {}}',
    '{"iter": 1e999}', '{"id": null}', "[" * 9000 + "]" * 9000, '{"a":' * 9000 + "1" + "}" * 9000,
    '{"state": ["done"]}', '{"state": {"a": 1}, "iter": "q"}', '{"sweep": 3}', '{"sweep": {"parts": [1]}}',
    '{"sweep": {"title": "\\ud800<script>x</script>"}}', '{"frozen": 3, "sweep": {}}',
    f'{{"iter": {"9" * 350}, "seconds": {"9" * 350}}}', f'{{"iter": {"9" * 250}, "seconds": {"9" * 250}}}',
]  # fmt: skip
