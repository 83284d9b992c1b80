"""The only atomic write, JSON read, lock and cache folder."""

import fcntl
import json
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any


def cache_folder() -> Path:
    """Where downloads, tokens and compiled kernels are kept: $XDG_CACHE_HOME/nanoqk, by default ~/.cache/nanoqk."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "nanoqk"


def try_lock(path: Path, flags: int, how: int) -> int | None:
    """The descriptor of `path`/lock, locked; None when somebody else holds it."""
    lock = os.open(path / "lock", flags, 0o666)
    try:
        fcntl.flock(lock, how | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return lock


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} where the file is absent or damaged."""
    with suppress(OSError, ValueError):
        content = json.loads(path.read_bytes())
        return content if isinstance(content, dict) else {}
    return {}


def write_json(path: Path, content: dict[str, Any]) -> None:
    write_atomic(path, (json.dumps(finite(content), indent=2, allow_nan=False) + "\n").encode())


def write_atomic(path: Path, content: bytes) -> None:
    """Replace a file so that a crash leaves the old or the new content, never a part. One writer a file."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def finite(values: dict[str, Any]) -> dict[str, Any]:
    """A copy without missing (None) values, and with null for nan and inf, which JSON lacks."""
    return {k: v if not isinstance(v, float) or math.isfinite(v) else None for k, v in values.items() if v is not None}
