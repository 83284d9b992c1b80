"""Checkpoints on disk: saved whole or not at all, verified when loaded, and without pickle.

A run's `ckpt/` holds `step_000500/` directories, each with one `<group>.safetensors` a group of tensors, `state.json`
and `MANIFEST.json` (size and SHA-256 of the others), and the symlinks `latest` and `best`. A checkpoint is built in a
temporary directory, flushed to the disk and renamed: whenever a crash comes, what carries the name is complete.
One process at a time may save into a folder. Nothing here knows models or optimizers.
"""

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from core.schema import ConfigError

FORMAT = 1
KEEP = 2  # newest checkpoints that survive pruning, besides the best
MANIFEST, STATE = "MANIFEST.json", "state.json"
TENSOR_FILE = re.compile(r"(\w+)\.safetensors")
STEP_DIR = re.compile(r"step_(\d{6,})(_replaced)?")  # _replaced: set aside while a new one takes its name
TEMPORARY = re.compile(r"\.tmp-(\d{1,9})-.+")  # the number is the pid of the process that made it


class CorruptCheckpoint(ValueError):
    """A checkpoint that must not be used. The message is one line: the file, and what is wrong with it."""


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    step: int
    tensors: dict[str, dict[str, Tensor]]  # group -> name -> tensor, on the CPU
    state: dict[str, Any]


# -----------------------------------------------------------------------------
# Save


def save(
    folder: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    best: bool,
    spare: int | None = None,
) -> Path:
    """Write `folder/step_<step>`, point `latest` (and `best`) at it, remove old ones but `spare`. Returns its path.

    `state` is what JSON can hold, with text keys; NaN, infinities and integers of any size come back as they were.
    Raises: OSError (a full disk, say); then the earlier checkpoints stand and nothing half-written is left.
    """
    assert step >= 0 and all(TENSOR_FILE.fullmatch(f"{group}.safetensors") for group in tensors), (step, list(tensors))
    if not folder.is_dir():
        folder.mkdir(parents=True)
        sync(folder.parent)
    tidy(folder)
    final = folder / f"step_{step:06d}"
    temporary = temporary_name(final)
    try:
        temporary.mkdir()
        (temporary / STATE).write_text(json.dumps(dict(state), indent=1), encoding="utf-8")
        for group in tensors:
            write_tensors(temporary / f"{group}.safetensors", tensors[group])
        manifest = render(FORMAT, step, {file.name: measure(file) for file in sorted(temporary.iterdir())})
        (temporary / MANIFEST).write_text(manifest, encoding="utf-8")
        for entry in (*temporary.iterdir(), temporary):
            sync(entry)
        if not (is_valid(final) and (final / MANIFEST).read_text(encoding="utf-8") == manifest):
            if final.exists():
                os.rename(final, final.with_name(f"{final.name}_replaced"))
            os.rename(temporary, final)
            sync(folder)
        point(folder, "latest", step)
        if best:
            point(folder, "best", step)
    finally:
        tidy(folder)
    prune(folder, step, spare)
    return final


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    packed: dict[str, Tensor] = {}
    storages = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        packed[name] = tensor.clone() if storage in storages else tensor  # safetensors refuses tied weights
        storages.add(storage)
    try:
        save_file(packed, file)
    except SafetensorError as error:  # say "disk full" as Python does
        code = re.search(r"os error (\d+)", str(error))
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(file)) if code else error from None
    # safetensors lets only the owner read: give the file the mode that the umask gave its neighbour
    file.chmod(stat.S_IMODE((file.parent / STATE).stat().st_mode))


def point(folder: Path, name: str, step: int) -> None:
    """Make the symlink `folder/name` lead to the checkpoint of `step`, atomically.

    Raises: FileNotFoundError when there is no such checkpoint.
    """
    target = folder / f"step_{step:06d}"
    target.stat()
    link = folder / name
    if link.is_dir() and not link.is_symlink():  # the run was copied by a tool that follows links, such as scp -r
        discard(link)
    temporary = temporary_name(link)
    remove(temporary)
    temporary.symlink_to(target.name)
    os.replace(temporary, link)
    sync(folder)


def restore_best(folder: Path, step: int | None) -> None:
    """Point `best` at the checkpoint of `step`, where there is one; it may lead to one of a later evaluation, of which
    a run that goes on from there knows nothing."""
    if step is not None and (folder / f"step_{step:06d}").is_dir():
        point(folder, "best", step)


def prune(folder: Path, step: int, spare: int | None = None) -> None:
    """Keep the newest checkpoints up to `step`, the best one, `spare`, and those beyond `step` that are valid."""
    kept = [path for path in step_dirs(folder) if number(path) <= step][:KEEP]
    kept += [] if spare is None else [folder / f"step_{spare:06d}"]
    if (folder / "best").is_symlink():
        kept.append(folder / os.readlink(folder / "best"))
    for path in step_dirs(folder):
        if path not in kept and (number(path) <= step or not is_valid(path)):
            discard(path)


def tidy(folder: Path) -> None:
    """Clear what an interrupted save left: temporary entries of dead processes, checkpoints set aside."""
    for entry in folder.iterdir():
        match = TEMPORARY.fullmatch(entry.name)
        # our own pid: a save of ours that failed, or an earlier process with our number (in a container, often 1)
        if match and (int(match[1]) == os.getpid() or not is_alive(int(match[1]))):
            remove(entry)
    for aside in folder.glob("step_*_replaced"):
        original = aside.with_name(aside.name.removesuffix("_replaced"))
        if original.exists():  # complete, or it would not have the name
            discard(aside)
        else:
            os.rename(aside, original)


def temporary_name(path: Path) -> Path:
    return path.with_name(f".tmp-{os.getpid()}-{path.name}")


def discard(directory: Path) -> None:
    """Remove a directory so that a crash cannot leave a part of it under its name."""
    moved = temporary_name(directory.with_name(f"old-{directory.name}"))
    os.rename(directory, moved)
    remove(moved)


def remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=True)  # what a network disk still holds goes with the next save
    else:
        entry.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush a file or a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return True


def measure(file: Path) -> dict[str, Any]:
    with open(file, "rb") as stream:
        return {"size": file.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


def render(form: int, step: int, files: Mapping[str, Any]) -> str:
    """The manifest's text. It carries its own SHA-256 and is compared whole, so no byte of it changes unseen."""
    body = {"format": form, "step": step, "files": files}
    return json.dumps(body | {"sha256": hashlib.sha256(json.dumps(body).encode()).hexdigest()}, indent=1) + "\n"


# -----------------------------------------------------------------------------
# Load


def load(path: Path) -> Checkpoint:
    """The checkpoint in the directory `path`, every file of it verified. Nothing is unpickled.

    Raises: CorruptCheckpoint naming the file and what is wrong with it.
    """
    path = path.resolve()
    step, files = verify(path)
    tensors: dict[str, dict[str, Tensor]] = {}
    for name in files:
        if match := TENSOR_FILE.fullmatch(name):
            try:  # clone: load_file maps the file, which may be pruned while the tensors live
                tensors[match[1]] = {key: tensor.clone() for key, tensor in load_file(path / name).items()}
            except SafetensorError as error:
                raise CorruptCheckpoint(f"{path / name}: {error}") from error
    return Checkpoint(path, step, tensors, json.loads((path / STATE).read_text(encoding="utf-8")))


def verify(path: Path) -> tuple[int, list[str]]:
    """Step and file names of a checkpoint that is as it was saved; files beside it are ignored."""
    try:
        raw = (path / MANIFEST).read_bytes()
        manifest = json.loads(raw)
        form, step, files = (manifest[key] for key in ("format", "step", "files"))
        intact = render(form, step, files).encode() == raw
    except OSError as error:
        raise CorruptCheckpoint(f"{path / MANIFEST}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError):
        intact = False
    if not intact:
        raise CorruptCheckpoint(f"{path / MANIFEST}: checksum is wrong")
    if form != FORMAT:
        raise CorruptCheckpoint(f"{path / MANIFEST}: format is {form}, not {FORMAT}")
    if STEP_DIR.fullmatch(path.name) and number(path) != step:
        raise CorruptCheckpoint(f"{path}: holds step {step}")
    for name, expected in files.items():
        try:
            actual = measure(path / name)
        except OSError as error:
            raise CorruptCheckpoint(f"{path / name}: {error.strerror}") from error
        for key in ("size", "sha256"):
            if actual[key] != expected[key]:
                raise CorruptCheckpoint(f"{path / name}: {key} is {actual[key]}, not {expected[key]}")
    return step, list(files)


def is_valid(path: Path) -> bool:
    try:
        verify(path)
    except CorruptCheckpoint:
        return False
    return True


def number(path: Path) -> int:
    return int(path.name.split("_")[1])


def step_dirs(folder: Path) -> list[Path]:
    """The checkpoint directories of a folder, newest step first."""
    found = [path for path in folder.glob("step_*") if STEP_DIR.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: (-number(path), path.name))


def load_latest(folder: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest valid checkpoint, or None when there is none at all. `warn` gets a line for each one passed over.

    The symlink `latest` is for people: a crash just before its update must not lose the newer checkpoint.
    Raises: CorruptCheckpoint when none of those there is valid: a run must not start again from nothing unasked.
    """
    reasons: list[str] = []
    for path in step_dirs(folder):
        try:
            checkpoint = load(path)
        except CorruptCheckpoint as error:
            reasons.append(str(error))
            continue
        for reason in reasons:
            warn(f"corrupt checkpoint {reason}; using {checkpoint.path.name} instead")
        return checkpoint
    if reasons:
        raise CorruptCheckpoint(f"no valid checkpoint in {folder}: {'; '.join(reasons)}")
    return None


def peek(folder: Path) -> dict[str, Any]:
    """The state of the newest checkpoint, not verified; {} where there is none that can be read."""
    for path in step_dirs(folder)[:1]:
        try:
            state = json.loads((path / STATE).read_bytes())
            return state if isinstance(state, dict) else {}
        except (OSError, ValueError):
            pass
    return {}


def resolve(run: Path, which: str) -> Path:
    """The checkpoint directory that `run` means: itself, or the `best` or `latest` one of a run directory.

    Raises: ConfigError naming run, what was not found, and which checkpoints there are.
    """
    if (run / MANIFEST).is_file():
        return run.resolve()
    found = step_dirs(run / "ckpt")
    chosen = found[0] if which == "latest" and found else run / "ckpt" / which
    if not chosen.is_dir():
        names = ", ".join(path.name for path in reversed(found)) or "none"
        raise ConfigError(f"run={run} is not a checkpoint and has no ckpt/{which}; checkpoints there: {names}")
    return chosen.resolve()
