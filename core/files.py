"""How files of a run are opened, written and locked; JSON objects; the folders of cache and configuration."""

import errno
import fcntl
import gzip
import hashlib
import json
import math
import os
import re
import secrets
import shlex
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parent.parent  # the checkout: the folder of train.py and configs/
POLL_SECONDS = 0.01
LOOK_SECONDS = 30.0  # that is_locked() of another process may last on busy cores
MOST_DIGITS = 300  # of an integer that is read: a float holds it, and every message can show it
# bytes, at most, of config.yaml, of a file that is read whole, and of one that is read line by line
MOST_NESTED = 200  # levels of a YAML file
CONFIG_BYTES, WHOLE_BYTES, LINES_BYTES = 2**20, 2**26, 2**30
NEXT = ".nanoqk_next"  # in a folder: files that replace_files() was ended amid
ANYWHERE = Path("/")
FOLDERS: dict[str, str] = {}  # what a folder with a file of this name is; whoever makes such folders adds it


def program(name: str) -> str:
    """How a shell calls a program of ours from the current folder, as "python sample.py"."""
    with suppress(OSError):  # the folder may be gone
        if Path.cwd() == ROOT:
            return f"python {name}"
    return f"python {shlex.quote(str(ROOT / name))}"


def expand(path: str | Path) -> Path:
    """The path with ~ expanded. An unknown ~user stays as it is, where Path.expanduser would raise."""
    return Path(os.path.expanduser(path))


def open_regular(
    path: Path, mode: str = "rb", limit: float = math.inf, within: Path | None = None, buffering: int = -1
) -> Any:
    """Open a regular file of at most `limit` bytes, binary: a pipe would block, and a device has no end. A link must
    lead to a file in the folder `within`, by default that of `path`: a stranger's leads anywhere. Raises: OSError."""
    if "\0" in str(path):
        raise OSError(errno.EINVAL, "a name cannot hold a NUL", str(path))
    if not os.path.realpath(path).startswith(os.path.join(os.path.realpath(within or path.parent), "")):
        raise OSError(errno.EBADMSG, f"{path.name} is a link out of its folder", str(path))
    file = open(path, mode, buffering, opener=lambda name, how: os.open(name, how | os.O_NONBLOCK, 0o666))  # noqa: SIM115
    about = os.fstat(file.fileno())
    if stat.S_ISREG(about.st_mode) and about.st_size <= limit:
        return file
    file.close()
    kind = f"has more than {limit:,} bytes" if stat.S_ISREG(about.st_mode) else "is not a regular file"
    raise OSError(errno.EBADMSG, f"{path.name} {kind}", str(path))


def read_regular(path: Path, limit: float = WHOLE_BYTES, within: Path | None = None) -> bytes:
    """The content of a file that open_regular() opens."""
    with open_regular(path, limit=limit, within=within) as file:
        return bytes(file.read())


def unpacked(path: Path, within: Path | None = None) -> bytes:
    """The content of a .gz file, of at most WHOLE_BYTES. Raises: OSError, EOFError, zlib.error."""
    with open_regular(path, within=within) as packed, gzip.open(packed) as file:
        content = bytes(file.read(WHOLE_BYTES + 1))
    if len(content) > WHOLE_BYTES:
        raise OSError(errno.EFBIG, f"{path.name} holds more than {WHOLE_BYTES:,} bytes", str(path))
    return content


def read_config(path: Path) -> str:
    """The text of a run's config.yaml. Raises: OSError, UnicodeDecodeError."""
    return read_regular(path / "config.yaml", CONFIG_BYTES).decode()


def file_sha256(path: Path, limit: float = LINES_BYTES, within: Path = ANYWHERE) -> str:
    with open_regular(path, limit=limit, within=within) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cache_folder() -> Path:
    """The folder of downloads, tokens and compiled kernels: $XDG_CACHE_HOME/nanoqk, by default ~/.cache/nanoqk; without
    a home, as in some containers, in the temporary folder. It may be read-only: callers must handle OSError."""
    bases = (os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache"))
    base = next(filter(os.path.isabs, bases), None)  # never one in the current folder: compiled kernels are code
    return Path(base, "nanoqk") if base else Path(tempfile.gettempdir(), f"nanoqk-{os.getuid()}")


def config_folder() -> Path:
    """The folder of what a user has decided: $XDG_CONFIG_HOME/nanoqk, by default ~/.config/nanoqk. Without a home it is
    one that cannot exist, never one in the current folder."""
    bases = (os.environ.get("XDG_CONFIG_HOME", ""), os.path.expanduser("~/.config"), os.devnull)
    return Path(next(filter(os.path.isabs, bases)), "nanoqk")


def read_json(path: Path, within: Path | None = None) -> dict[str, Any]:
    """The object in a JSON file; {} where the file is absent or damaged, or open_regular() refuses it."""
    with suppress(OSError, ValueError):
        return parse_object(read_regular(path, within=within))
    return {}


def parse_int(text: str) -> int:
    """An integer in decimal digits. Raises: ValueError, also for one of more than MOST_DIGITS."""
    if len(text) > MOST_DIGITS:
        raise ValueError(f"an integer of more than {MOST_DIGITS} digits is not read")
    return int(text)


def parse_object(raw: bytes) -> dict[str, Any]:
    """A JSON object. Raises: ValueError, for other JSON too."""
    try:
        content = json.loads(raw, parse_int=parse_int)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(content, dict):
        raise ValueError(f"it is a {type(content).__name__}, not an object")
    return content


def load_yaml(text: str, exponents: bool = False) -> Any:
    """Parse YAML. exponents: 1e-3 is a number, as it is to Hydra; PyYAML alone takes it for text. Raises: YAMLError,
    also for long integers, deep nesting, many aliases, and aliases of aliases: a few lines can expand beyond memory."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
            parse_int("0" * len(node.value))  # refuses a long one, in any base
            return super().construct_yaml_int(node)

    Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_yaml_int)
    if exponents:
        number = re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+")
        Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))
    try:
        aliases, anchored = 0, [False]  # whether each open list and mapping is within one that has a name
        for event in yaml.parse(text, yaml.SafeLoader):
            if isinstance(event, yaml.CollectionStartEvent):
                anchored.append(anchored[-1] or event.anchor is not None)
                if len(anchored) > MOST_NESTED:  # before the parser, whose time grows with the square of the depth
                    raise yaml.YAMLError("it is nested too deeply")
            elif isinstance(event, yaml.CollectionEndEvent):
                anchored.pop()
            elif isinstance(event, yaml.AliasEvent):
                aliases += 1
                if anchored[-1] or aliases > 100:
                    raise yaml.YAMLError("aliases of aliases, and more than 100 aliases, are not read")
        return yaml.load(text, Loader)
    except yaml.YAMLError:
        raise
    except Exception as error:  # PyYAML's of a number, a date or a truth value that is none, by its tag
        raise yaml.YAMLError(f"{type(error).__name__}: {error}") from error


def write_json(path: Path, content: Mapping[str, Any], indent: int = 2) -> None:
    """Write an object atomically. NaN and infinities are written as Python's json does; finite() makes them null."""
    write_atomic(path, (json.dumps(content, indent=indent) + "\n").encode())


def readable_json(content: Mapping[str, Any]) -> bytes:
    """JSON whose letters are not escaped, but lone surrogates, which have no UTF-8."""
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode(errors="backslashreplace")


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
    """Replace a file so that a crash leaves the old or the new content, never a part of it. The folder must exist. Of
    two processes that write it at a time the last one counts."""
    temporary = path.with_name(f"{path.name}.{threading.get_native_id()}.tmp")
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


def is_leftover(name: str, files: str) -> bool:
    """Whether a file is what write_atomic() leaves behind when it is killed. files: a pattern of what it wrote."""
    return re.fullmatch(rf"({files})(\.\d+)?\.tmp", name) is not None


@contextmanager
def written_aside(out: Path) -> Iterator[Path]:
    """A new folder that replaces `out`, absent or empty, when the block ends; after an error it is gone."""
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = out.with_name(f".{out.name}-{secrets.token_hex(8)}")
    aside.mkdir()
    try:
        yield aside
        os.rename(aside, out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def replace_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Replace files of a folder together: a crash leaves the old ones, or what finish_replacing() goes on with."""
    with written_aside(folder / NEXT) as aside:
        for name, content in files.items():
            write_atomic(aside / name, content)
    finish_replacing(folder)


def finish_replacing(folder: Path) -> None:
    """For whoever writes by replace_files() there: go on where a kill ended it."""
    if (folder / NEXT).is_dir() and not (folder / NEXT).is_symlink():
        for file in (folder / NEXT).iterdir():
            os.replace(file, folder / file.name)
        (folder / NEXT).rmdir()


def remove_aside(folder: Path, files: str) -> None:
    """Remove what replace_files(), and write_atomic() of `files`, leave behind when they are killed. files: a pattern.
    No other process may write there."""
    for left in folder.glob(f".{NEXT}-*"):
        remove = shutil.rmtree if left.is_dir() and not left.is_symlink() else os.unlink
        remove(left)
    for name in os.listdir(folder) if folder.is_dir() else ():
        if is_leftover(name, files):
            (folder / name).unlink()


# -----------------------------------------------------------------------------
# Locks


class FileLock:
    """An exclusive lock on a file. Ends with release(), with the `with` block, or with the process, however it dies.

        with FileLock(folder / "plan.lock"):                    # waits for the process that holds it
        with FileLock(folder / "lock", timeout=0.5) as lock:    # waits for half a second
            if not lock.held: ...                               # another process holds it

    The file and its folder are created where absent. The file stays, since removing it would let two processes lock
    two files of one name. If a process moves the folder away while another one waits, the latter locks a new file.
    A process that is in is_locked() is waited for beyond the timeout, for LOOK_SECONDS at most.
    Raises: OSError where open_regular() refuses the file, or the file system has no locks.
    """

    def __init__(self, file: Path, timeout: float = math.inf) -> None:
        self._file: Any = None
        deadline = time.monotonic() + timeout
        while not self._acquire(file) and time.monotonic() <= deadline + (0 if is_locked(file) else LOOK_SECONDS):
            time.sleep(POLL_SECONDS)

    def _acquire(self, file: Path) -> bool:
        file.parent.mkdir(parents=True, exist_ok=True)
        opened = open_regular(file, "a+b", buffering=0)
        with suppress(FileNotFoundError):  # its folder may have been moved since it was opened
            if flock(opened.fileno(), fcntl.LOCK_EX) and os.path.samestat(os.fstat(opened.fileno()), os.stat(file)):
                self._file = opened
                return True
        opened.close()
        return False

    @property
    def held(self) -> bool:
        return self._file is not None

    def has_moved(self, file: Path) -> bool:
        """Whether it is held, and no longer by the name `file`: its folder was moved."""
        if not self.held:
            return False
        with suppress(FileNotFoundError):
            return not os.path.samestat(os.fstat(self._file.fileno()), os.stat(file))
        return True

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


def is_locked(file: Path) -> bool:
    """Whether a process holds the FileLock of `file`. Needs no right to write; False where there is no file."""
    with suppress(FileNotFoundError), open_regular(file) as opened:
        return not flock(opened.fileno(), fcntl.LOCK_SH)
    return False


@contextmanager
def folder_locked(folder: Path) -> Iterator[None]:
    """Wait for the process that has the folder locked, and lock it; nothing where the file system has no locks."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def flock(descriptor: int, how: int) -> bool:
    """Lock an open file without waiting. False if another process holds it."""
    with suppress(BlockingIOError):
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
        return True
    return False
