"""The corpora that are one text: `load_text(config.data)`.

To add a corpus: a function and its entry in LOADERS; its settings and their entry in CORPORA, in data/options.py.
"""

import contextlib
import hashlib
import math
import os
import re
import shlex
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from core.files import ANYWHERE, WHOLE_BYTES, FileLock, cache_folder, expand, program, read_regular, write_atomic
from core.process import in_thread
from core.schema import ConfigError, one_line, require
from data import options

HUB_REPO = "karpathy/tiny_shakespeare"
HUB_REVISION = "refs/convert/parquet"  # the main branch holds a loading script, which datasets >= 4 refuses to run
PROBE_SECONDS = 2.0  # together with the start of the program it must stay under 5 s

TINY_SHAKESPEARE_BYTES = 1_115_394
TINY_SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
ANY_TEXT = "data=text data.path=FILE takes any text"


def load_text(config: options.FoldedTextOptions) -> str:
    """The whole text of a corpus. Raises: ConfigError where it is missing, unreadable or not the expected one."""
    return LOADERS[config.name](config)


# -----------------------------------------------------------------------------
# Texts that need no download: the language reference and the source of every CPython, and any file


def load_python_docs(config: options.PythonDocsOptions) -> str:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        need = "the module pydoc_data.topics, which this Python lacks"
        raise ConfigError(f"data={config.name} needs {need}; {ANY_TEXT}") from error
    return "\n".join(topics[name] for name in sorted(topics))


def load_python_source(config: options.PythonSourceOptions) -> str:
    """The standard library's *.py files with its tests, in the order of their paths. Installed packages and build
    settings are left out: they differ between machines with the same Python."""
    root = Path(sysconfig.get_path("stdlib"))
    files = {file.relative_to(root).as_posix(): file for file in root.rglob("*.py")}
    added = re.compile(r"(.*/)?(site-packages|dist-packages|config-[^/]*)/.*|_sysconfigdata_[^/]*")
    texts = []
    for name in sorted(name for name in files if not added.fullmatch(name)):
        with contextlib.suppress(UnicodeDecodeError):  # a few files test other encodings
            texts.append(read_bytes(files[name], str(files[name])).decode())
    need = f"the standard library's source files, and {root} has none"
    require(len(texts) > 0, f"data={config.name} needs {need}; {ANY_TEXT}")
    return "\n".join(texts)


def load_text_file(config: options.TextFileOptions) -> str:
    shards = f"{program('data/prepare_fineweb.py')} {shlex.quote(f'dataset={config.path}')} makes shards of its texts"
    require(not expand(config.path).is_dir(), f"data.path={config.path} is a directory, it must be a file; {shards}")
    text = read_text(config.path, f"data.path={config.path}", math.inf)
    require(text != "", f"data.path={config.path} is empty")
    return text


def read_text(path: str, name: str, limit: float = WHOLE_BYTES) -> str:
    """The UTF-8 text of a regular file. Raises: ConfigError, which begins with `name`."""
    return decoded(read_bytes(expand(path), name, limit), name)


def decoded(raw: bytes, name: str) -> str:
    """UTF-8 text, with its line ends and its byte order mark. Raises: ConfigError, which begins with `name`."""
    try:
        return raw.decode()  # text mode would change \r\n to \n
    except UnicodeDecodeError as error:
        at = f"the byte 0x{raw[error.start]:02x} at offset {error.start} is not"
        raise ConfigError(f"{name} must be UTF-8 text; {at}") from error


def data_folders() -> list[Path]:
    """The folders that are searched for corpora: $NANOQK_DATA if it is set, then the cache."""
    chosen = os.environ.get("NANOQK_DATA")
    return [expand(chosen), cache_folder()] if chosen else [cache_folder()]


def read_bytes(path: Path, name: str, limit: float = math.inf) -> bytes:
    """The content of a file. Raises: ConfigError that begins with `name` and says why it cannot be read."""
    try:
        return read_regular(path, limit, ANYWHERE)
    except FileNotFoundError as error:
        raise ConfigError(f"{name} does not exist") from error
    except IsADirectoryError as error:
        raise ConfigError(f"{name} is a directory, it must be a file") from error
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}") from error


# -----------------------------------------------------------------------------
# Tiny Shakespeare, from data.path, else the first of: $NANOQK_DATA, the cache, the Hugging Face Hub


def load_tiny_shakespeare(config: options.TinyShakespeareOptions) -> str:
    if config.path is not None:
        return check_tiny_shakespeare(read_tiny_shakespeare(config.path), f"data.path={config.path}")
    files = [folder / "tiny_shakespeare" / "input.txt" for folder in data_folders()]
    if (text := find_tiny_shakespeare(files)) is not None:
        return text
    problem = probe_hub()
    places = " or ".join(map(str, files))
    absent = f"data={config.name} is not at {places}, and the Hugging Face Hub is out of reach ({problem})"
    advice = "set data.path or NANOQK_DATA to a folder with tiny_shakespeare/input.txt, or use data=python_docs"
    require(problem is None, f"{absent}: {advice}")
    with creating(files[-1]):
        if (text := find_tiny_shakespeare(files)) is not None:  # another process downloaded it
            return text
        raw = download_tiny_shakespeare()
        text = check_tiny_shakespeare(raw, f"{HUB_REPO} on the Hugging Face Hub")
        write_cache(files[-1], raw, "downloads again")
    return text


def find_tiny_shakespeare(files: list[Path]) -> str | None:
    file = next((file for file in files if os.path.exists(file)), None)
    return None if file is None else check_tiny_shakespeare(read_bytes(file, str(file)), str(file))


def read_tiny_shakespeare(path: str) -> bytes:
    """The bytes at data.path: the file itself, or a folder that holds it."""
    name, place = f"data.path={path}", expand(path)
    if not place.is_dir():
        return read_bytes(place, name)
    for file in (place / "input.txt", place / "tiny_shakespeare" / "input.txt"):
        if os.path.exists(file):
            return read_bytes(file, str(file))
    raise ConfigError(f"{name} holds neither input.txt nor tiny_shakespeare/input.txt")


def check_tiny_shakespeare(raw: bytes, source: str) -> str:
    digest = hashlib.sha256(raw).hexdigest()
    expected = f"{TINY_SHAKESPEARE_BYTES} and {TINY_SHAKESPEARE_SHA256}"
    found = f"it has {len(raw)} bytes and SHA-256 {digest}, not {expected}"
    require(digest == TINY_SHAKESPEARE_SHA256, f"{source} is not Tiny Shakespeare: {found}; {ANY_TEXT}")
    return raw.decode()


def download_tiny_shakespeare() -> bytes:
    """The rows of train, validation and test, joined."""
    try:
        import datasets

        datasets.disable_progress_bars()
        with tempfile.TemporaryDirectory() as folder:  # datasets would keep a second copy under ~/.cache
            splits = datasets.load_dataset(HUB_REPO, revision=HUB_REVISION, cache_dir=folder)
            return "".join(row for split in ("train", "validation", "test") for row in splits[split]["text"]).encode()
    except Exception as error:  # the errors of datasets, its network stack and pyarrow share no base class
        what = "data=tiny_shakespeare from the Hugging Face Hub"
        raise ConfigError(f"{what} cannot be loaded: {one_line(error)}") from error


def probe_hub(repo: str = HUB_REPO, revision: str | None = HUB_REVISION, kind: str = "dataset") -> str | None:
    """Why the Hub cannot be used, or None if it can. kind: of the repository, dataset or model. load_dataset is not
    asked: it retries for minutes if a server accepts and never answers."""
    from huggingface_hub import HfApi

    # without `expand` the answer lists every file, which takes too long for FineWeb
    wanted: Any = {"revision": revision, "repo_type": kind, "expand": ["sha"], "timeout": PROBE_SECONDS}
    return probe(lambda: HfApi().repo_info(repo, **wanted))


def probe(ask: Callable[[], object]) -> str | None:
    """Why the request `ask()` fails, or takes longer than PROBE_SECONDS; None if it succeeds. Name resolution can take
    longer than every timeout."""
    try:
        in_thread(ask, PROBE_SECONDS)
    except TimeoutError:
        return f"no answer in {PROBE_SECONDS:g} s"
    except Exception as error:
        return one_line(error)
    return None


# -----------------------------------------------------------------------------
# Files in the cache


@contextlib.contextmanager
def creating(path: Path) -> Iterator[None]:
    """Use it around the creation of a cache file: of the processes that start together one works, the others wait."""
    lock = contextlib.ExitStack()
    with contextlib.suppress(OSError):  # a read-only folder has no lock, and nothing is written to it
        lock.enter_context(FileLock(path.with_name(f"{path.name}.lock")))
    with lock:
        yield


def write_cache(path: Path, content: bytes, cost: str) -> None:
    """Write a cache file, or warn what it costs the next run: a read-only home must not stop this one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, content)
    except OSError as error:
        warnings.warn(f"{path} cannot be written, the next run {cost}: {error}", stacklevel=3)


LOADERS: dict[str, Callable[[Any], str]] = {
    "tiny_shakespeare": load_tiny_shakespeare,
    "python_docs": load_python_docs,
    "python_source": load_python_source,
    "text": load_text_file,
}
