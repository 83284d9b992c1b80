"""Atomic writes, JSON objects, file locks, the cache and configuration folders. It imports nothing of this project."""

import fcntl
import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parent.parent  # the checkout: the folder of train.py and configs/
POLL_SECONDS = 0.01
FOLDERS: dict[str, str] = {}  # what a folder with a file of this name is; whoever makes such folders adds it


def expand(path: str | Path) -> Path:
    """The path with ~ expanded. An unknown ~user stays as it is, where Path.expanduser would raise."""
    return Path(os.path.expanduser(path))


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cache_folder() -> Path:
    """The folder of downloads, tokens and compiled kernels: $XDG_CACHE_HOME/nanoqk, by default ~/.cache/nanoqk.

    A user without a home folder, as in some containers, gets one in the temporary folder. It may be read-only:
    callers must handle OSError.
    """
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "nanoqk"
    home = os.path.expanduser("~")
    return Path(tempfile.gettempdir(), f"nanoqk-{os.getuid()}") if home == "~" else Path(home, ".cache", "nanoqk")


def config_folder() -> Path:
    """The folder of what a user has decided: $XDG_CONFIG_HOME/nanoqk, by default ~/.config/nanoqk. Without a home it is
    one that cannot exist, never one in the current folder."""
    bases = (os.environ.get("XDG_CONFIG_HOME", ""), os.path.expanduser("~/.config"), os.devnull)
    return Path(next(filter(os.path.isabs, bases)), "nanoqk")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} where the file is absent or damaged."""
    with suppress(OSError, ValueError):
        return parse_object(path.read_bytes())
    return {}


def parse_object(raw: bytes) -> dict[str, Any]:
    """A JSON object. Raises: ValueError, for other JSON too."""
    try:
        content = json.loads(raw)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(content, dict):
        raise ValueError(f"it is a {type(content).__name__}, not an object")
    return content


def load_yaml(text: str, loader: Any = None) -> Any:
    """Parse YAML. Raises: yaml.YAMLError, also for an alias of something that holds an alias, since a few lines of them
    can expand beyond memory, and for more than 100 aliases."""
    import yaml

    try:
        aliases, anchored = 0, [False]  # whether each open list and mapping is within one that has a name
        for event in yaml.parse(text, yaml.SafeLoader):
            if isinstance(event, yaml.CollectionStartEvent):
                anchored.append(anchored[-1] or event.anchor is not None)
            elif isinstance(event, yaml.CollectionEndEvent):
                anchored.pop()
            elif isinstance(event, yaml.AliasEvent):
                aliases += 1
                if anchored[-1] or aliases > 100:
                    raise yaml.YAMLError("aliases of aliases, and more than 100 aliases, are not read")
        return yaml.load(text, loader or yaml.SafeLoader)
    except RecursionError as error:
        raise yaml.YAMLError("it is nested too deeply") from error
    except ValueError as error:  # a number or a date that is none
        raise yaml.YAMLError(str(error)) from error


def write_json(path: Path, content: Mapping[str, Any], indent: int = 2) -> None:
    """Write an object atomically. NaN and infinities are written as Python's json does; finite() makes them null."""
    write_atomic(path, (json.dumps(content, indent=indent) + "\n").encode())


def sealed(content: dict[str, Any]) -> dict[str, Any]:
    """A copy of JSON content with its SHA-256, by which is_intact() tells whether it was changed."""
    return {**content, "sha256": hashlib.sha256(json.dumps(content).encode()).hexdigest()}


def is_intact(content: dict[str, Any]) -> bool:
    """Whether sealed() content is as it was written. What has no SHA-256, from earlier versions, counts as intact."""
    rest = {key: value for key, value in content.items() if key != "sha256"}
    return "sha256" not in content or sealed(rest)["sha256"] == content["sha256"]


def finite(values: dict[str, Any]) -> dict[str, Any]:
    """A copy in which `None` values are dropped, and NaN and infinities are None, since JSON lacks them."""
    return {k: v if not isinstance(v, float) or math.isfinite(v) else None for k, v in values.items() if v is not None}


def write_atomic(path: Path, content: bytes) -> None:
    """Replace a file so that a crash leaves the old or the new content, never a part of it.

    The folder must exist. Two processes must not write one file at a time: hold a FileLock where they could.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # it may be a stranger's link to another file
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # without it a power cut can leave an empty file under the final name
        os.replace(temporary, path)
    except OSError as error:  # a full disk, say: give the space back, and name the file, which write() does not
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


# -----------------------------------------------------------------------------
# Locks


class FileLock:
    """An exclusive lock on a file. Ends with release(), with the `with` block, or with the process, however it dies.

        with FileLock(folder / "plan.lock"):                    # waits for the process that holds it
        with FileLock(folder / "lock", timeout=0.5) as lock:    # waits for half a second
            if not lock.held: ...                               # another process holds it

    The file and its folder are created where absent. The file stays, since removing it would let two processes lock
    two files of one name. If a process moves the folder away while another one waits, the latter locks a new file.
    Give a timeout above 0 where another process may call is_locked(), which holds the lock for a moment.
    Raises: OSError where the file cannot be opened, is a link, or the file system has no locks.
    """

    def __init__(self, file: Path, timeout: float = math.inf) -> None:
        self._descriptor: int | None = None
        deadline = time.monotonic() + timeout
        while not self._acquire(file) and time.monotonic() <= deadline:
            time.sleep(POLL_SECONDS)

    def _acquire(self, file: Path) -> bool:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        with suppress(FileNotFoundError):  # its folder may have been moved since it was opened
            if flock(descriptor, fcntl.LOCK_EX) and os.path.samestat(os.fstat(descriptor), os.stat(file)):
                self._descriptor = descriptor
                return True
        os.close(descriptor)
        return False

    @property
    def held(self) -> bool:
        return self._descriptor is not None

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


def is_locked(file: Path) -> bool:
    """Whether a process holds the FileLock of `file`. Needs no right to write; False where there is no file."""
    with suppress(FileNotFoundError), open(file) as opened:
        return not flock(opened.fileno(), fcntl.LOCK_SH)
    return False


def flock(descriptor: int, how: int) -> bool:
    """Lock an open file without waiting. False if another process holds it."""
    with suppress(BlockingIOError):
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
        return True
    return False
