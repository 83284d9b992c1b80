"""A run directory is all that a run needs to go on.

config.yaml    the resolved settings           status.json   running, stopped, done, failed or diverged; pid, host
metrics.jsonl  every logged line               summary.json  the final numbers
train.log      what was printed                ckpt/         checkpoints
lock           held (flock) by the process that trains here: it goes with its owner, however that one dies
"""

import fcntl
import hashlib
import os
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import yaml

from core.cli import CONFIG_DIR, leave_output
from core.files import read_json, try_lock, write_atomic, write_json
from core.schema import ConfigError, require, show
from training.config import TrainConfig, load_config, to_yaml

# What a process that died between mkdir and config.yaml can have left behind: not a user's folder.
LEFTOVERS = {"lock", "config.yaml.tmp"}
LOCK_PATIENCE = 0.5  # seconds; is_locked() of another process holds a lock for microseconds


class RunDir:
    """An open, locked run directory.

    state: of status.json, as found and then as written; None for a new run. finished: nothing is left to train.
    print_line: what log() prints with; tqdm.write beside a progress bar.
    """

    def __init__(self, path: Path, lock: int | None, finished: bool = False) -> None:
        self.path = path
        self.state: str | None = read_status(path).get("state")
        self.finished = finished
        self.print_line: Callable[[str], Any] = print
        self._lock = lock

    def begin(self, config: TrainConfig) -> None:
        """Write config.yaml and the state "running": from here on the run is this config's."""
        write_atomic(self.path / "config.yaml", to_yaml(config).encode())
        self.status("running")

    def status(self, state: str, **extra: Any) -> None:
        """Write status.json. extra: iter (kept from the last status when not given), reason, …"""
        self.state = state
        known = {"state": state, "iter": read_status(self.path).get("iter"), "pid": os.getpid()}
        now = datetime.now(UTC).isoformat(timespec="seconds")
        write_json(self.path / "status.json", {**known, "host": socket.gethostname(), **extra, "time": now})

    def log(self, text: str, show: bool = True) -> None:
        """Append a line with the time to train.log, and print it unless not `show`."""
        if show:
            try:
                self.print_line(text)
            except BrokenPipeError:  # train.log has it
                leave_output()
        with open(self.path / "train.log", "a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Unlock; a run that an exception ended has failed. A refused setting is not the run's failure."""
        try:
            if error is not None and not isinstance(error, ConfigError) and self.state == "running":
                state = "stopped" if isinstance(error, SystemExit) else "failed"  # by SIGTERM, outside the loop
                self.status(state, reason=" ".join(f"{type(error).__name__}: {error}".split())[:500])
        finally:
            self.close()

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def open_run(config: TrainConfig) -> RunDir:
    """Create or reopen `config.run_dir`, and lock it. What is in an old one stays as it is until `begin`.

    Raises: ConfigError, before anything is written, where the directory is not writable, somebody else's folder, in
    use, or holds a run with another trajectory.
    """
    path = config.run_dir
    try:
        check_usable(path, config)
        lock = take_lock(path)
        try:
            if config.fresh and (path / "config.yaml").exists():
                lock = start_afresh(path, lock)
            return settle(path, config, lock)
        except BaseException:
            os.close(lock)
            raise
    except OSError as error:
        raise ConfigError(f"out_dir={path} cannot be used: {error.strerror or error}") from error


def check_usable(path: Path, config: TrainConfig) -> None:
    existing = path
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    require(existing.is_dir(), f"out_dir={path} cannot be made: {existing} is not a directory")
    require(os.access(existing, os.W_OK | os.X_OK), f"out_dir={path} is not writable")
    held = set(os.listdir(path)) if existing == path else set()
    require(
        "config.yaml" in held or held <= LEFTOVERS,
        f"out_dir={path} is neither empty nor a run directory (it has no config.yaml)",
    )
    require("config.yaml" in held or not config.eval_only, f"out_dir={path} holds no run: eval_only=true needs one")


def take_lock(path: Path) -> int:
    """Create the directory when absent, and lock it. Returns the descriptor of its lock."""
    patience = time.monotonic() + LOCK_PATIENCE
    while True:
        path.mkdir(parents=True, exist_ok=True)
        lock = try_lock(path, os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX)
        if lock is not None:
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), os.stat(path / "lock")):
                    return lock
            os.close(lock)  # fresh=true moved it aside since it was opened: this lock guards the old run
        elif time.monotonic() > patience:
            owner = read_status(path)
            who = f"process {owner['pid']} on {owner['host']}" if {"pid", "host"} <= owner.keys() else "another process"
            raise ConfigError(f"out_dir={path} is in use by {who}")
        time.sleep(0.02)


def start_afresh(path: Path, lock: int) -> int:
    """Move the locked run aside to `path`.old-N, and lock a new directory."""
    require(path.name != "", f"out_dir={path} cannot be moved aside for fresh=true")
    n = 1
    while (aside := path.with_name(f"{path.name}.old-{n}")).exists():
        n += 1
    path.rename(aside)
    new = take_lock(path)
    os.close(lock)
    return new


def settle(path: Path, config: TrainConfig, lock: int) -> RunDir:
    """What a locked directory is: new, partial or finished."""
    run = RunDir(path, lock)
    if (path / "config.yaml").exists():
        changes = differences(read_config(path), config)
        require(
            not changes,
            f"out_dir={path} holds a run with other settings: {', '.join(changes)}; use another out_dir or fresh=true",
        )
        last = read_json(path / "summary.json").get("iter", -1)
        run.finished = run.state == "diverged" or (run.state == "done" and last >= config.max_iters)
    else:
        run.begin(config)
    return run


def differences(old: TrainConfig, new: TrainConfig) -> list[str]:
    """ "key old -> new" for every setting that decides the numbers and differs."""
    before, after = ({key: show(value) for key, value in c.trajectory.items()} for c in (old, new))
    changes = []
    for key in {**before, **after}:
        if before.get(key) != after.get(key):
            note = " (by default max_iters)" if key == "schedule.lr_decay_iters" else ""
            changes.append(f"{key}{note} {before.get(key, 'unset')} -> {after.get(key, 'unset')}")
    return changes


def at_end(path: Path) -> bool:
    """Whether a run is done or has diverged. A done one whose summary is lost is not: it goes on, to write it."""
    state = read_status(path).get("state")
    return state == "diverged" or (state == "done" and "iter" in read_json(path / "summary.json"))


def is_locked(path: Path) -> bool:
    """Whether a live process has the run open. A run "running" without a lock died."""
    if not (path / "lock").exists():
        return False
    lock = try_lock(path, os.O_RDONLY, fcntl.LOCK_SH)
    if lock is not None:
        os.close(lock)
    return lock is None


def read_status(path: Path) -> dict[str, Any]:
    """status.json; {} where there is none."""
    return read_json(path / "status.json")


def read_config(path: Path) -> TrainConfig:
    try:
        return load_config(yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8")))
    except (yaml.YAMLError, UnicodeDecodeError, ConfigError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"out_dir={path} has a config.yaml that cannot be read: {reason}; use fresh=true") from error


def commit() -> str | None:
    """The code's git commit, with + and a hash of the changes when the tree has some; None outside a checkout."""
    head, changes = git("rev-parse", "HEAD"), uncommitted()
    if head is None:
        return None
    return head.decode().strip() + (f"+{hashlib.sha256(changes).hexdigest()[:7]}" if changes else "")


def short(commit: str) -> str:
    """Of a commit its first 12 digits, with the mark of changes."""
    head, plus, changes = commit.partition("+")
    return head[:12] + plus + changes


def uncommitted() -> bytes:
    """The checkout's changes since that commit, as a diff."""
    return git("diff", "HEAD") or b""


def git(*words: str) -> bytes | None:
    try:
        command = ["git", "-C", str(CONFIG_DIR.parent), *words]
        return subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
