"""The commit of the code."""

import hashlib
import subprocess

from core.files import ROOT


def commit() -> str | None:
    """The code's git commit, with + and a hash of the changes to tracked files, if any; None outside a checkout."""
    head, changes = git("rev-parse", "HEAD"), uncommitted()
    if head is None:
        return None
    return head.decode().strip() + (f"+{hashlib.sha256(changes).hexdigest()[:7]}" if changes else "")


def short(commit: str) -> str:
    """The first 12 digits of a commit, with the mark of changes."""
    head, plus, changes = commit.partition("+")
    return head[:12] + plus + changes


def uncommitted() -> bytes:
    """The checkout's changes since that commit, as a diff."""
    return git("diff", "HEAD") or b""


def git(*words: str) -> bytes | None:
    try:
        command = ["git", "-C", str(ROOT), *words]
        return subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
