"""A run directory holds all that a run needs to go on.

config.yaml    the resolved settings           status.json        running, stopped, done, failed or diverged; pid, host
metrics.jsonl  every logged line               diagnostics.jsonl  values of each layer and head, at each evaluation
train.log      what was printed                samples.jsonl      samples of text, at evaluations
ckpt/          checkpoints                     summary.json       the final numbers, and curve.png a plot of the losses
wandb/         W&B's files                     lock               lock file of the process that trains here
"""

import errno
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import yaml
from tqdm import tqdm

from core import files
from core.files import FOLDERS, FileLock, finite, is_locked, load_yaml, read_json, sealed, write_atomic, write_json
from core.process import say
from core.record import Record, is_number
from core.schema import ConfigError, convert, one_line, require, show
from core.wandb_run import WandbRun

LOCK_TIMEOUT = 0.5  # seconds; a process that ends may hold it so long
# errors that say nothing of the directory: a later try may succeed
PASSING = (
    errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ETIMEDOUT, errno.ENOSPC, errno.EDQUOT, errno.EFBIG,
)  # fmt: skip


@dataclass(frozen=True)
class RunRequest:
    """What open_run() must know of a program's settings."""

    path: Path
    config_yaml: str
    refusal: Callable[[Any], str]  # content of an older config.yaml -> what differs, and what to do; "" if nothing does
    max_iters: int
    fresh: bool = False
    must_exist: bool = False


class RunDir:
    """An open, locked run directory. begin() starts the record: before it, save() and finish() do not work.

    state: of status.json, as found and then as written; None for a new run. finished: nothing is left to train.
    print_line: what log() prints with.
    """

    def __init__(self, path: Path, lock: FileLock | None = None, finished: bool = False) -> None:
        self.path = path
        self.state: str | None = read_status(path).get("state")
        self.finished = finished
        self.print_line: Callable[[str], Any] = print
        self._lock = lock
        self._held = ExitStack()  # what close() closes
        if lock is not None:
            self._held.callback(lock.release)
        self._wandb: WandbRun | None = None

    def claim(self, config_yaml: str) -> None:
        """Write config.yaml and the state "running": from here on the run has these settings."""
        write_atomic(self.path / "config.yaml", config_yaml.encode())
        self.status("running")

    def begin(
        self,
        config_yaml: str,
        step: int = 0,
        wandb: Mapping[str, Any] | None = None,
        hashes: Mapping[str, str] | None = None,
    ) -> None:
        """Claim the run from iteration `step` on. hashes: those of its Record then; wandb: the settings of WandbRun."""
        self.claim(config_yaml)
        self.record = Record(self.path, step, hashes or {}, self.log)
        self._held.callback(self.record.close)
        if wandb is not None and wandb["mode"] != "disabled":
            try:
                self._wandb = WandbRun(self.path, wandb, self.log)
            except OSError as error:
                self.log(f"W&B is off: {error}")
            else:
                self._held.callback(self._wandb.close)

    def require_place(self) -> None:
        """Raise OSError where the directory was moved: another run may stand in its place."""
        if self._lock is not None and self._lock.has_moved(self.path / "lock"):
            self.state = None  # __exit__() writes nothing, either
            raise OSError(f"out_dir={self.path} was moved while its run trained; nothing more is written")

    def status(self, state: str, **extra: Any) -> None:
        """Write status.json. extra: iter (kept from the last status when not given), reason, …"""
        self.require_place()
        self.state = state
        known = {"state": state, "iter": read_status(self.path).get("iter"), "pid": os.getpid()}
        now = datetime.now(UTC).isoformat(timespec="seconds")
        write_json(self.path / "status.json", finite({**known, "host": socket.gethostname(), **extra, "time": now}))

    def log(self, text: str, show: bool = True) -> None:
        """Append a line with the time to train.log, and print it unless not `show`."""
        if show:
            say(text, self.print_line)  # if nobody reads it, train.log has it
        self.require_place()
        with files.open_regular(self.path / "train.log", "ab") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n".encode())

    def write_sample(self, line: dict[str, Any]) -> None:
        """Append {"iter": …, "text": …} to samples.jsonl."""
        self.require_place()
        self.record.write_sample(line)

    def save(
        self, step: int, tensors: dict[str, Any], state: dict[str, Any], best: bool, keep_step: int | None
    ) -> None:
        """Write a checkpoint, as core.checkpoint.save() does."""
        from core import checkpoint  # which loads torch

        self.require_place()
        self.record.sync()
        state = {**state, "records": self.record.hashes(step)}
        checkpoint.save(self.path / "ckpt", step, tensors, state, best, keep_step)
        self.status("running", iter=step)

    def restore_best(self, step: int | None) -> None:
        """Point ckpt/best at the checkpoint of `step` if it exists. After a resume from an earlier one, it may still
        point at that of an evaluation that is now repeated."""
        from core import checkpoint

        if step is not None:
            with suppress(FileNotFoundError):
                checkpoint.link(self.path / "ckpt", "best", step)

    def finish(self, summary: dict[str, Any] | None = None) -> None:
        """Write summary.json and end W&B's run: as failed unless summary["status"] is "done". Without a summary the run
        will be resumed: no summary.json is written, and W&B's run counts as killed."""
        self.require_place()
        self.record.sync()
        if summary is not None:
            content = finite(summary) | {"records": self.record.hashes()}  # a NaN is null in it
            write_json(self.path / "summary.json", sealed(content))
        if self._wandb is not None:
            self._wandb.finish(summary)

    @contextmanager
    def progress_bar(self, total: int, initial: int) -> Iterator[tqdm]:
        """A bar on a terminal, for the rank that holds the lock; log() prints above it."""
        disable = True if self._lock is None or not sys.stderr else None  # None: tqdm looks for a terminal
        with tqdm(total=total, initial=initial, unit="it", disable=disable, dynamic_ncols=True) as bar:
            self.print_line = bar.write
            try:
                yield bar
            finally:
                self.print_line = print

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Unlock; a run that an exception ended has failed, but one that a signal ended at once is stopped. What is
        refused before it begins is not its failure."""
        try:
            if error is not None and self.state == "running":
                if isinstance(error, KeyboardInterrupt):
                    self.status("stopped", reason="SIGINT")
                else:
                    self.status("stopped" if isinstance(error, SystemExit) else "failed", reason=one_line(error, 500))
        finally:
            self.close()

    def close(self) -> None:
        self._held.close()


class ReadOnlyRunDir(RunDir):
    """The run directory as ranks other than 0 see it: they read it, and what they write goes nowhere."""

    def _skip(*_: Any, **__: Any) -> None:
        """Rank 0 does it."""

    begin = status = log = write_sample = save = restore_best = finish = _skip
    record: Any = SimpleNamespace(write=_skip, write_diagnostics=_skip, curve=lambda key: {})


# -----------------------------------------------------------------------------
# Looking and opening


def look(request: RunRequest) -> bool:
    """Whether the directory holds a run at whose end nothing is left to train. Writes nothing. Raises: ConfigError
    where open_run() would, as far as one can tell without the lock."""
    with refusing_unusable(request.path):
        check_usable(request)
        if is_open(request.path):
            raise in_use(request.path)
        return not request.fresh and has_ended(request)


def open_run(request: RunRequest) -> RunDir:
    """Create or reopen a run directory, and lock it. What is in an old one stays as it is until begin(). Raises:
    ConfigError, before anything is written, where the directory is not writable, somebody else's folder, in use, or
    holds a run with another trajectory."""
    path = request.path
    with refusing_unusable(path):
        check_usable(request)
        lock = take_lock(path)
        try:
            if request.fresh and (path / "config.yaml").exists():
                lock = start_afresh(path, lock)
            run = RunDir(path, lock, finished=has_ended(request))
            if not (path / "config.yaml").exists():
                run.claim(request.config_yaml)
            return run
        except BaseException:
            lock.release()
            raise


@contextmanager
def refusing_unusable(path: Path) -> Iterator[None]:
    """Errors of the file system that say something of the directory become a ConfigError."""
    try:
        yield
    except OSError as error:
        if error.errno in PASSING:
            raise
        raise ConfigError(f"out_dir={path} cannot be used: {error.strerror or error}") from error


def check_usable(request: RunRequest) -> None:
    path = existing = request.path
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    require(existing.is_dir(), f"out_dir={path} cannot be made: {existing} is not a directory")
    require(os.access(existing, os.W_OK | os.X_OK), f"out_dir={path} is not writable")
    if request.fresh and existing == path:
        require(path.name != "", f"out_dir={path} cannot be moved aside for fresh=true")
        require(os.access(path.parent, os.W_OK | os.X_OK), f"out_dir={path}: fresh=true cannot move it in its folder")
    held = set(os.listdir(path)) if existing == path else set()
    for name in FOLDERS.keys() & held:
        raise ConfigError(f"out_dir={path} holds {FOLDERS[name]}: write another out_dir")
    # what a process that died between mkdir and config.yaml can have left behind
    usable = "config.yaml" in held or all(name == "lock" or files.is_leftover(name, r"config\.yaml") for name in held)
    require(usable, f"out_dir={path} is neither empty nor a run directory (it has no config.yaml)")
    for name in sorted(held):  # a stranger's link would have us write over a file elsewhere, a pipe would block
        entry = path / name
        require(not entry.is_symlink(), f"out_dir={path} is not used: {name} in it is a link")
        require(entry.is_file() or entry.is_dir(), f"out_dir={path} is not used: {name} is not a regular file")
    require("config.yaml" in held or not request.must_exist, f"out_dir={path} holds no run: eval_only=true needs one")


def take_lock(path: Path) -> FileLock:
    lock = FileLock(path / "lock", LOCK_TIMEOUT)
    if not lock.held:
        raise in_use(path)
    return lock


def in_use(path: Path) -> ConfigError:
    owner = read_status(path)
    who = f"process {owner['pid']} on {owner['host']}" if {"pid", "host"} <= owner.keys() else "another process"
    return ConfigError(f"out_dir={path} is in use by {who}")


def start_afresh(path: Path, lock: FileLock) -> FileLock:
    """Move the locked run aside to `path`.old-N, and lock a new directory."""
    n = 1
    while (aside := path.with_name(f"{path.name}.old-{n}")).exists():
        n += 1
    path.rename(aside)
    try:
        new = take_lock(path)
    except OSError:  # a full disk: the run gets its name back
        with suppress(OSError):
            path.rmdir()
        aside.rename(path)
        raise
    say(f"fresh=true: the run that was in {path} is now in {aside}")
    lock.release()
    return new


def has_ended(request: RunRequest) -> bool:
    """Whether the run in the directory is at its end. Raises: ConfigError where it is a run with other settings."""
    path = request.path
    if not (path / "config.yaml").exists():
        return False
    try:
        old = load_yaml(files.read_config(path))
        refusal = request.refusal(old)
    except (yaml.YAMLError, UnicodeDecodeError, ConfigError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"out_dir={path} has a config.yaml that cannot be read: {reason}; use fresh=true") from error
    require(not refusal, f"out_dir={path} holds a run with other settings: {refusal}")
    last, state = read_summary(path).get("iter"), read_status(path).get("state")
    return state == "diverged" or (state == "done" and last is not None and last >= request.max_iters)


# -----------------------------------------------------------------------------
# What state a run is in

TEXTS = ["device", "dtype", "torch", "python", "commit", "corpus_sha256"]
KINDS: dict[str, Any] = {  # of values of status.json and summary.json
    "iter": int, "pid": int, "ranks": int, "records": dict, "start_up_warnings": list, "plugins": dict,
    **dict.fromkeys(["state", "host", "reason", "status", "run_id", "sees_future", *TEXTS], str),
    "seconds": int | float,
}  # fmt: skip


def mistyped(content: Mapping[str, Any], kinds: Mapping[str, Any] = KINDS) -> str:
    """The first value that is neither null nor of its kind, as "key=value"; "" where there is none. A number must be
    one that can be drawn."""
    for key, value in content.items():
        number = isinstance(value, int | float)
        good = value is None or key not in kinds or (isinstance(value, kinds[key]) and (is_number(value) or not number))
        if not good:
            return f"{key}={show(value)}"
    return ""


def at_end(path: Path) -> bool:
    """Whether a run is done or has diverged. A done one whose summary is lost is not: it goes on, to write it."""
    state = read_status(path).get("state")
    return state == "diverged" or (state == "done" and read_summary(path).get("iter") is not None)


def is_open(path: Path) -> bool:
    """Whether a live process has the run open. A run "running" without a lock died."""
    return is_locked(path / "lock")


def state_of_run(path: Path) -> str:
    """The state in status.json; "stopped" where it says "running" and no live process has the run open."""
    state = str(read_status(path).get("state"))
    with suppress(OSError):  # a stranger's lock may be no file
        return "stopped" if state == "running" and not is_open(path) else state
    return state


def require_run(path: Path, asked: str | Path) -> None:
    """Raise ConfigError where `path`, which the user wrote as `asked`, holds no run."""
    require(os.path.exists(path), f"run={asked} does not exist")
    require(os.path.isfile(path / "config.yaml"), f"run={asked} holds no run (it has no config.yaml)")


def read_settings(path: Path) -> dict[str, Any]:
    """The content of a run's config.yaml. Raises: ConfigError."""
    require_run(path, path)
    told = f"run={path} has a config.yaml that cannot be read"
    try:
        return convert(load_yaml(files.read_config(path)), dict, told)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{told}: {one_line(error)}") from error


def read_status(path: Path) -> dict[str, Any]:
    """status.json; {} where there is none, or a value has another type."""
    status = read_json(path / "status.json")
    return {} if mistyped(status) else status


def read_summary(path: Path) -> dict[str, Any]:
    """summary.json; {} where there is none, or a value has another type."""
    summary = read_json(path / "summary.json")
    return {} if mistyped(summary) else summary
