"""The record of a run: metrics.jsonl, diagnostics.jsonl, samples.jsonl; how they are cut back, and read."""

import hashlib
import io
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from core.files import LINES_BYTES, finite, open_regular, parse_object, read_regular, write_atomic

DAMAGED = 1000  # lines of a file; a crash leaves one
LINE_BYTES = 2**22  # of a line; one of diagnostics.jsonl, of 48 layers with 25 heads, has some 300 KB


class Metrics:
    """metrics.jsonl, diagnostics.jsonl or samples.jsonl: one JSON object a line, "iter" first.

    It is opened to go on from iteration `step`: the lines before it stay, byte by byte; later,
    torn, doubled and damaged ones are dropped. kept: the number of lines at that point.
    """

    def __init__(self, path: Path, step: int) -> None:
        self.path, self._last = path, -math.inf
        self._digest = hashlib.sha256()  # of the lines so far
        good, size = list[bytes](), 0
        with suppress(FileNotFoundError), open_regular(path, limit=LINES_BYTES) as file:
            size = os.fstat(file.fileno()).st_size
            for raw, line in whole_lines(file):
                if self._last < line["iter"] < step:
                    good.append(raw)
                    self._add(raw, line["iter"])
        if sum(map(len, good)) != size:
            write_atomic(path, b"".join(good))
        self.kept = len(good)
        self._file = open_regular(path, "ab", buffering=0)

    def _add(self, line: bytes, step: float) -> None:
        self._last, self._digest_before_last = step, self._digest.copy()
        self._digest.update(line)

    def sha256(self, before: float = math.inf) -> str:
        """SHA-256 of the lines before iteration `before`. Only the last line may have that iteration or a later one."""
        return (self._digest if self._last < before else self._digest_before_last).hexdigest()

    def write(self, line: dict[str, Any]) -> None:
        """Append a line, handed to the OS on return. `None` values are dropped; nan and inf become null."""
        data = (json.dumps(finite({"iter": line["iter"], **line}), allow_nan=False) + "\n").encode()
        if self._file.write(data) != len(data):  # one write call: a line cannot be torn by a kill
            raise OSError(f"{self.path}: disk full")
        self._add(data, line["iter"])

    def sync(self) -> None:
        """Wait until the lines are on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    @staticmethod
    def read(path: Path) -> list[dict[str, Any]]:
        """The whole, undamaged lines of a metrics.jsonl, which may be growing. Raises: OSError."""
        lines = Lines(path, strict=True)
        lines.update()
        return lines.lines


class Record:
    """The files that a run in `path` writes its lines to, opened to go on from iteration `step`.

    hashes: hashes(step) when the checkpoint was saved; `warn` is told of a file that has changed since.
    """

    def __init__(self, path: Path, step: int, hashes: Mapping[str, str], warn: Callable[[str], None]) -> None:
        self.path = path
        self._metrics = Metrics(path / "metrics.jsonl", step)
        self._diagnostics = Metrics(path / "diagnostics.jsonl", step)
        if (path / "samples.jsonl").exists():
            Metrics(path / "samples.jsonl", step).close()
        self._lines = Lines(path / "metrics.jsonl", strict=True)
        for file in (self._metrics, self._diagnostics):
            if hashes.get(file.path.name, file.sha256()) != file.sha256():
                good = f"its {file.kept} good lines are kept"
                warn(f"warning: {file.path.name} was damaged after iteration {step} was saved; {good}")
        self.write = self._metrics.write  # of {"iter": …, key: value, …}
        self.write_diagnostics = self._diagnostics.write

    def write_sample(self, line: dict[str, Any]) -> None:
        """Append {"iter": …, "text": …} to samples.jsonl, cut back to that iteration."""
        with closing(Metrics(self.path / "samples.jsonl", line["iter"])) as samples:
            samples.write(line)

    def curve(self, key: str) -> dict[int, float]:
        """{iteration: value} of a key of metrics.jsonl, where it has a finite value."""
        self._lines.update()
        return self._lines.curve(key)

    def hashes(self, before: float = math.inf) -> dict[str, str]:
        """The SHA-256 of what metrics.jsonl and diagnostics.jsonl have before an iteration, by their names."""
        return {file.path.name: file.sha256(before) for file in (self._metrics, self._diagnostics)}

    def sync(self) -> None:
        self._metrics.sync()
        self._diagnostics.sync()

    def close(self) -> None:
        self._metrics.close()
        self._diagnostics.close()


def whole_lines(file: Iterable[bytes]) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The lines that are neither torn nor damaged, and have an iteration, each with its object. Those after DAMAGED
    others count as lost: a stranger's file of nothing but line feeds would take minutes."""
    damaged = 0
    for raw in file:
        try:
            line = parse_object(raw) if len(raw) <= LINE_BYTES else {}
        except ValueError:
            line = {}
        if type(line.get("iter")) is int and 0 <= line["iter"] < 2**53 and raw.endswith(b"\n"):
            yield raw, line
        else:
            damaged += 1
            if damaged > DAMAGED:
                return


class Lines:
    """The lines of a JSONL file that may be growing. update() reads only what is new.

    Lines that are torn, damaged or without an iteration are dropped. strict: a file that cannot be read raises OSError;
    else it has no lines. keep: only so many of the last lines stay.
    """

    def __init__(self, path: Path, strict: bool = False, keep: int | None = None) -> None:
        self.path, self.strict, self.keep = path, strict, keep
        self.lines: list[dict[str, Any]] = []
        self._inode = self._offset = 0

    def update(self) -> bool:
        """Whether something has changed. A file that was replaced, as a resumed run does, is read from its start."""
        try:
            with open_regular(self.path, limit=LINES_BYTES) as file:
                about = os.fstat(file.fileno())
                replaced = about.st_ino != self._inode or about.st_size < self._offset
                if replaced:
                    self.lines, self._inode, self._offset = [], about.st_ino, 0
                file.seek(self._offset)
                text = file.read()
        except OSError:
            if self.strict:
                raise
            gone = self._inode != 0
            self.lines, self._inode = [], 0
            return gone
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        self.lines += (line for _, line in whole_lines(io.BytesIO(whole)))
        if self.keep is not None:
            del self.lines[: -self.keep]
        return replaced or bool(whole)

    def curve(self, key: str) -> dict[int, float]:
        return {line["iter"]: line[key] for line in self.lines if is_number(line.get(key))}


def is_number(value: Any) -> bool:
    """Whether a chart can draw it."""
    return isinstance(value, int | float) and abs(value) < 1e100


def line_at(path: Path, step: int) -> dict[str, Any]:
    """The line of iteration `step` in a file that Metrics wrote; {} where it has none."""
    lines = io.BytesIO(read_regular(path, LINES_BYTES)) if path.exists() else ()
    return next((parse_object(line) for line in lines if line.startswith(b'{"iter": %d,' % step)), {})
