"""A corpus is one text: `load_text(config.data)`. A corpus of your own is one function and one entry in LOADERS, beside
its settings: one dataclass and one entry in training/config.py's CORPORA, and one file in configs/data/."""

import contextlib
import hashlib
import os
import queue
import re
import stat
import sysconfig
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from core.files import cache_folder
from core.schema import ConfigError, require
from data.options import (
    FoldedTextOptions,
    PythonDocsOptions,
    PythonSourceOptions,
    TextFileOptions,
    TinyShakespeareOptions,
)

HUB_REPO = "karpathy/tiny_shakespeare"
HUB_REVISION = "refs/convert/parquet"  # the main branch holds a loading script, which datasets >= 4 refuses to run
PROBE_SECONDS = 2.0  # with the start of the program it must stay under 5 s

TINY_SHAKESPEARE_BYTES = 1_115_394
TINY_SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


def load_text(config: FoldedTextOptions) -> str:
    """The whole corpus that `config` names.

    Raises: ConfigError of one line, when the text is missing, unreadable or not what it should be.
    """
    return LOADERS[config.name](config)


def corpus_sha256(text: str) -> str:
    """Hex SHA-256 of the text as UTF-8: recorded with a run, so that two runs on different texts are told apart."""
    return hashlib.sha256(text.encode()).hexdigest()


# -----------------------------------------------------------------------------
# What every CPython brings: its language reference, its own source; and any file


def load_python_docs(config: PythonDocsOptions) -> str:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ConfigError(
            f"data={config.name} needs the module pydoc_data.topics, which this Python lacks; "
            "data=text data.path=FILE takes any text"
        ) from error
    return "\n".join(topics[name] for name in sorted(topics))


def load_python_source(config: PythonSourceOptions) -> str:
    """The standard library's *.py files, its own tests included, in the order of their paths. What a machine adds is
    left out (installed packages, build settings), so that one version of Python is one text wherever it is whole."""
    root = Path(sysconfig.get_path("stdlib"))
    files = {file.relative_to(root).as_posix(): file for file in root.rglob("*.py")}
    added = re.compile(r"(.*/)?(site-packages|dist-packages|config-[^/]*)/.*|_sysconfigdata_[^/]*")
    texts = []
    for name in sorted(name for name in files if not added.fullmatch(name)):
        with contextlib.suppress(UnicodeDecodeError):  # some test other encodings
            texts.append(read_bytes(files[name], str(files[name])).decode())
    require(
        len(texts) > 0,
        f"data={config.name} needs the standard library's source files, and {root} has none; "
        "data=text data.path=FILE takes any text",
    )
    return "\n".join(texts)


def load_text_file(config: TextFileOptions) -> str:
    raw = read_bytes(expand(config.path), f"data.path={config.path}")
    require(len(raw) > 0, f"data.path={config.path} is empty")
    try:
        return raw.decode()  # bytes, not text mode: \r\n stays \r\n
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"data.path={config.path} must be UTF-8 text; "
            f"the byte 0x{raw[error.start]:02x} at offset {error.start} is not"
        ) from error


def data_folders() -> list[Path]:
    """Where corpora are looked for: $NANOQK_DATA when it is set, then the cache."""
    return [*([expand(os.environ["NANOQK_DATA"])] if os.environ.get("NANOQK_DATA") else []), cache_folder()]


def expand(path: str) -> Path:
    return Path(os.path.expanduser(path))  # Path.expanduser raises for an unknown ~user; this leaves it as it is


def read_bytes(path: Path, name: str) -> bytes:
    try:
        mode = path.stat().st_mode
        require(stat.S_ISREG(mode) or stat.S_ISDIR(mode), f"{name} must be a regular file")  # a pipe would block
        return path.read_bytes()
    except FileNotFoundError as error:
        raise ConfigError(f"{name} does not exist") from error
    except IsADirectoryError as error:
        raise ConfigError(f"{name} is a directory, it must be a file") from error
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}") from error


# -----------------------------------------------------------------------------
# Tiny Shakespeare: data.path, else $NANOQK_DATA, else the cache, else the Hugging Face Hub


def load_tiny_shakespeare(config: TinyShakespeareOptions) -> str:
    if config.path is not None:
        return check_tiny_shakespeare(read_tiny_shakespeare(config.path), f"data.path={config.path}")
    files = [folder / "tiny_shakespeare" / "input.txt" for folder in data_folders()]
    for file in files:
        if os.path.exists(file):
            return check_tiny_shakespeare(read_bytes(file, str(file)), str(file))
    problem = probe_hub()
    require(
        problem is None,
        f"data={config.name} is not at {' or '.join(map(str, files))}, and the Hugging Face Hub is out of reach "
        f"({problem}): set data.path or NANOQK_DATA to a folder with tiny_shakespeare/input.txt, "
        "or use data=python_docs",
    )
    raw = join_rows(HUB_REPO, f"data={config.name} from the Hugging Face Hub")
    text = check_tiny_shakespeare(raw, f"{HUB_REPO} on the Hugging Face Hub")
    try:
        write_atomically(files[-1], raw)
    except OSError as error:  # a read-only home costs a download a run, not the run
        warnings.warn(f"{files[-1]} cannot be written, the next run downloads again: {error}", stacklevel=2)
    return text


def read_tiny_shakespeare(path: str) -> bytes:
    """The bytes at an explicit data.path: the file, a folder that holds it, or a copy of the Hub's repository."""
    name, place = f"data.path={path}", expand(path)
    if not place.is_dir():
        return read_bytes(place, name)
    for file in (place / "input.txt", place / "tiny_shakespeare" / "input.txt"):
        if os.path.exists(file):
            return read_bytes(file, str(file))
    require(
        any(place.rglob("*.parquet")),
        f"{name} holds neither input.txt nor tiny_shakespeare/input.txt nor parquet files of {HUB_REPO}",
    )
    return join_rows(str(place), name)


def check_tiny_shakespeare(raw: bytes, source: str) -> str:
    digest = hashlib.sha256(raw).hexdigest()
    require(
        digest == TINY_SHAKESPEARE_SHA256,
        f"{source} is not Tiny Shakespeare: it has {len(raw)} bytes and SHA-256 {digest}, not {TINY_SHAKESPEARE_BYTES} "
        f"and {TINY_SHAKESPEARE_SHA256}; data=text data.path=FILE takes any text",
    )
    return raw.decode()


def join_rows(path: str, name: str) -> bytes:
    """The column `text` of train, validation and test, joined; `path`: a repository on the Hub or a folder like it."""
    try:
        import datasets

        datasets.disable_progress_bars()
        with tempfile.TemporaryDirectory() as folder:  # the text is kept, an Arrow copy of it under ~/.cache is not
            splits = datasets.load_dataset(path, revision=HUB_REVISION, cache_dir=folder)
            return "".join(row for split in ("train", "validation", "test") for row in splits[split]["text"]).encode()
    except Exception as error:  # datasets, its network stack and pyarrow share no base class
        raise ConfigError(f"{name} cannot be loaded: {one_line(error)}") from error


def probe_hub(repo: str = HUB_REPO, revision: str | None = HUB_REVISION) -> str | None:
    """Why the Hub cannot be used, or None: one request of the Hub's own client, which knows HF_ENDPOINT,
    HF_HUB_OFFLINE, proxies and certificates. load_dataset would retry for minutes where a server accepts and never
    answers."""
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        return one_line(error)
    # Without `expand` the answer lists every file: of FineWeb that takes too long.
    return probe(lambda: HfApi().dataset_info(repo, revision=revision, expand=["sha"], timeout=PROBE_SECONDS))


def probe(ask: Callable[[], object]) -> str | None:
    """Why `ask()`, a request, fails or has no answer within PROBE_SECONDS; None when it has one. Resolving a name can
    outlast every timeout, so the request is given a thread, and abandoned."""
    answer: queue.Queue[str | None] = queue.Queue()

    def run() -> None:
        try:
            ask()
            answer.put(None)
        except Exception as error:
            answer.put(one_line(error))

    threading.Thread(target=run, daemon=True).start()
    try:
        return answer.get(timeout=PROBE_SECONDS)
    except queue.Empty:
        return f"no answer in {PROBE_SECONDS:g} s"


def one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def write_atomically(path: Path, raw: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
        try:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())  # a power cut must not leave a full-named empty file: it would fail every later run
            os.replace(file.name, path)
        except OSError:
            os.unlink(file.name)
            raise


LOADERS: dict[str, Callable[[Any], str]] = {
    "tiny_shakespeare": load_tiny_shakespeare,
    "python_docs": load_python_docs,
    "python_source": load_python_source,
    "text": load_text_file,
}
