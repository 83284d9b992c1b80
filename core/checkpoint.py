"""Checkpoints on disk: saved whole or not at all, verified when loaded, and without pickle.

A run's `ckpt/` holds directories `step_000500/` and the symlinks `latest` and `best`. Each directory has one
`<group>.safetensors` per group of tensors, `state.json`, and `MANIFEST.json` with the size and SHA-256 of the others.
A checkpoint is written to a temporary directory, flushed to the disk and renamed, so that a directory with the final
name is complete whenever a crash comes. One process at a time may save into a folder.
"""

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as serialize
from torch import Tensor, nn

from core.device import total_memory
from core.files import ANYWHERE, FOLDERS, file_sha256, open_regular, parse_object, read_json, read_regular, sealed
from core.process import is_out_of_memory
from core.schema import ConfigError, one_line, require

FORMAT = 1
KEEP = 2  # the newest checkpoints that pruning keeps, besides the best
MANIFEST, STATE = "MANIFEST.json", "state.json"
REPLACED = ".tmp-old-"  # prefix of the old checkpoint while the new one takes its name
# errors of a missing or damaged file: to try again does not help
DAMAGE = (
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.ENODATA,
)  # fmt: skip
TENSOR_FILE = re.compile(r"(\w+)\.safetensors")
STEP_DIR = re.compile(r"step_\d{6,}")


class CorruptCheckpoint(ValueError):
    """A checkpoint that must not be used. The message is one line that names the file and its damage."""


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
    keep_step: int | None = None,
) -> Path:
    """Write `folder/step_<step>`, point `latest` (and `best`) at it, and prune old ones but that of `keep_step`.

    state: JSON values under text keys; NaN, infinities and integers of up to 300 digits are loaded as saved.
    Returns: the new directory. Raises: OSError (a full disk, say); the earlier checkpoints then stay as they were.
    """
    assert step >= 0 and all(TENSOR_FILE.fullmatch(f"{group}.safetensors") for group in tensors), (step, list(tensors))
    if not folder.is_dir():
        folder.mkdir(parents=True)
        sync(folder.parent)
    remove_leftovers(folder)
    final = folder / f"step_{step:06d}"
    temporary = temporary_name(final)
    try:
        temporary.mkdir()
        (temporary / STATE).write_text(json.dumps(dict(state), indent=1), encoding="utf-8")
        for group, named in tensors.items():
            on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}
            (temporary / f"{group}.safetensors").write_bytes(serialize(on_cpu))
        manifest = render(FORMAT, step, {file.name: measure(file) for file in sorted(temporary.iterdir())})
        (temporary / MANIFEST).write_text(manifest, encoding="utf-8")
        for entry in (*temporary.iterdir(), temporary):
            sync(entry)
        if final.exists():  # a corrupt one, or that of a run that died before it wrote its summary
            os.rename(final, final.with_name(REPLACED + final.name))  # until the new one has its name
        os.rename(temporary, final)
        sync(folder)
        link(folder, "latest", step)
        if best:
            link(folder, "best", step)
    finally:
        remove_leftovers(folder)
    prune(folder, step, keep_step)
    return final


def link(folder: Path, name: str, step: int) -> None:
    """Point the symlink `folder/name` at the checkpoint of `step`, atomically. Raises: FileNotFoundError."""
    target, path = folder / f"step_{step:06d}", folder / name
    target.stat()
    if path.is_dir() and not path.is_symlink():  # a copy by scp -r, which follows links
        remove_atomically(path)
    temporary = temporary_name(path)
    remove(temporary)
    temporary.symlink_to(target.name)
    os.replace(temporary, path)
    sync(folder)


def prune(folder: Path, step: int, keep_step: int | None) -> None:
    """Keep the newest checkpoints up to `step`, the best, and that of `keep_step`. Those beyond `step` go, too: a run
    resumes from its newest valid checkpoint, so later ones are corrupt."""
    kept = [path for path in step_dirs(folder) if number(path) <= step][:KEEP]
    kept += [] if keep_step is None else [folder / f"step_{keep_step:06d}"]
    if (folder / "best").is_symlink():
        kept.append(folder / os.readlink(folder / "best"))
    for path in step_dirs(folder):
        if path not in kept:
            remove_atomically(path)


def restore_replaced(folder: Path) -> None:
    """Give a checkpoint its name back that an interrupted save was about to replace."""
    for entry in folder.glob(f"{REPLACED}*"):
        final = folder / entry.name.removeprefix(REPLACED)
        if not final.exists():
            with contextlib.suppress(FileNotFoundError):  # another rank was first
                os.rename(entry, final)


def remove_leftovers(folder: Path) -> None:
    """Remove what an interrupted save left behind."""
    restore_replaced(folder)
    for entry in folder.glob(".tmp-*"):
        remove(entry)


def temporary_name(path: Path) -> Path:
    return path.with_name(f".tmp-{path.name}")


def remove_atomically(directory: Path) -> None:
    """Remove a directory. A crash leaves the whole of it, or a part under a temporary name."""
    remove(directory.rename(temporary_name(directory.with_name(f"gone-{directory.name}"))))


def remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=True)  # a network disk may keep files: the next save retries
    else:
        entry.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush a file or a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def measure(file: Path) -> dict[str, Any]:
    sha256 = file_sha256(file, limit=total_memory(torch.device("cpu")), within=file.parent)
    return {"size": file.stat().st_size, "sha256": sha256}


def render(version: int, step: int, files: Mapping[str, Any]) -> str:
    """The manifest's text, sealed. verify() compares the whole text, so any changed byte is noticed."""
    return json.dumps(sealed({"format": version, "step": step, "files": files}), indent=1) + "\n"


# -----------------------------------------------------------------------------
# Load


def check_weights(saved: Mapping[str, Tensor], model: nn.Module) -> None:
    """Raise CorruptCheckpoint for a tensor that the model has not in this name, shape and dtype, and for a weight that
    is not finite, as no run saves one. The model may be on the meta device."""
    expected = model.state_dict()
    for name in {**expected, **saved}:
        theirs, ours = (layout(named.get(name)) for named in (saved, expected))
        if theirs != ours:
            raise CorruptCheckpoint(f"the weight {name} is {theirs}, not {ours}")
    for name in saved.keys() & {name for name, _ in model.named_parameters()}:
        if not saved[name].sum().isfinite() and not saved[name].isfinite().all():  # a sum alone may overflow
            raise CorruptCheckpoint(f"the weight {name} has a value that is not finite")


def layout(x: Tensor | None) -> str:
    return "absent" if x is None else f"{x.dtype} {(*x.shape,)}".removeprefix("torch.")


@contextlib.contextmanager
def errors_as_corrupt(path: Path) -> Iterator[None]:
    """Raise CorruptCheckpoint for a missing value or one of a wrong type. It can be there though the manifest fits:
    someone may have changed both."""
    try:
        yield
    except (ConfigError, CorruptCheckpoint):
        raise
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError, AssertionError) as error:
        if is_out_of_memory(error) or type(error).__name__ == "AcceleratorError":  # a GPU's, not the file's
            raise
        raise CorruptCheckpoint(f"{path}: does not hold what a run saves: {one_line(error)}") from error


@contextlib.contextmanager
def damage_as_corrupt(file: Path) -> Iterator[None]:
    """Raise CorruptCheckpoint for an error that proves damage. Others (network disk, permissions, too many open files)
    pass: taken for damage, they would lose a good checkpoint."""
    try:
        yield
    except OSError as error:
        if error.errno not in DAMAGE:
            raise
        raise CorruptCheckpoint(f"{file}: {error.strerror}") from error


def load(path: Path, only: str | None = None) -> Checkpoint:
    """The checkpoint in the directory `path`, every file of it verified. only: the group of tensors to read, as an
    optimizer's may take twice the memory of the model's. Raises: CorruptCheckpoint."""
    path = path.resolve()
    step, files = verify(path)
    tensors: dict[str, dict[str, Tensor]] = {}
    for name in files:
        match = TENSOR_FILE.fullmatch(name)
        if match and only in (None, match[1]):
            try:  # clone: the file may be pruned while the tensors are in use
                with errors_as_corrupt(path / name):
                    tensors[match[1]] = {key: tensor.clone() for key, tensor in mapped_tensors(path / name).items()}
            except SafetensorError as error:
                raise CorruptCheckpoint(f"{path / name}: {error}") from error
    with damage_as_corrupt(path / STATE), errors_as_corrupt(path / STATE):
        state = parse_object(read_regular(path / STATE))
    return Checkpoint(path, step, tensors, state)


def mapped_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, memory-mapped. Raises: OSError, SafetensorError."""
    with open_regular(file, within=ANYWHERE) as opened:  # safetensors refuses a path that is no UTF-8
        return load_file(f"/proc/self/fd/{opened.fileno()}")


def verify(path: Path) -> tuple[int, list[str]]:
    """Step and file names of an unchanged checkpoint; other files in its directory are ignored."""
    with damage_as_corrupt(path / MANIFEST):
        raw = read_regular(path / MANIFEST)
    try:
        manifest = parse_object(raw)
        version, step, files = manifest["format"], manifest["step"], dict(manifest["files"])
        intact = render(version, step, files).encode() == raw
    except (ValueError, KeyError, TypeError, RecursionError):
        intact = False
    if not intact:
        raise CorruptCheckpoint(f"{path / MANIFEST}: checksum is wrong")
    if version != FORMAT:
        raise CorruptCheckpoint(f"{path / MANIFEST}: format is {version}, not {FORMAT}")
    if strange := [name for name in files if name != STATE and not TENSOR_FILE.fullmatch(name)]:
        raise CorruptCheckpoint(f"{path / MANIFEST}: names {strange[0]!r}, which is no file of a checkpoint")
    if STEP_DIR.fullmatch(path.name) and number(path) != step:
        raise CorruptCheckpoint(f"{path}: holds step {step}")
    for name, expected in files.items():
        with damage_as_corrupt(path / name):
            actual = measure(path / name)
        if actual != expected:
            raise CorruptCheckpoint(f"{path / name}: checksum is wrong")
    return step, list(files)


def number(path: Path) -> int:
    return int(path.name.split("_")[1])


def step_dirs(folder: Path) -> list[Path]:
    """The checkpoint directories of a folder, newest step first. Raises: OSError where it cannot be listed."""
    names = os.listdir(folder) if folder.is_dir() else []  # Path.glob() would find nothing in one that is unreadable
    found = [folder / name for name in names if STEP_DIR.fullmatch(name) and (folder / name).is_dir()]
    return sorted(found, key=lambda path: (-number(path), path.name))


def load_latest(folder: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest valid checkpoint, or None where there is none at all. `warn` gets a line for each one skipped.

    The symlink `latest` is not used: a crash just before its update must not lose the newer checkpoint.
    Raises: CorruptCheckpoint where all are corrupt: a run must not silently start again from step 0.
    """
    restore_replaced(folder)
    reasons: list[str] = []
    for path in step_dirs(folder):
        try:
            checkpoint = load(path)
        except CorruptCheckpoint as error:
            reasons.append(str(error))
        else:
            for reason in reasons:
                warn(f"corrupt checkpoint {reason}; using {checkpoint.path.name} instead")
            return checkpoint
    if reasons:
        raise CorruptCheckpoint(f"no valid checkpoint in {folder}: {'; '.join(reasons)}")
    return None


def peek(folder: Path) -> dict[str, Any]:
    """The state of the newest checkpoint whose state is as it was written; {} without one. No tensor is read."""
    with contextlib.suppress(PermissionError):  # open_run() says so
        for path in [*step_dirs(folder), *folder.glob(f"{REPLACED}*")]:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                if parse_object(read_regular(path / MANIFEST))["files"][STATE] == measure(path / STATE):
                    return read_json(path / STATE)
    return {}


def resolve(run: Path, which: str, key: str = "run") -> Path:
    """The checkpoint directory that `run` names: itself, or the `best` or `latest` one of a run directory. key: the
    setting that names it. Raises: ConfigError naming what was not found, and the checkpoints that exist."""
    require(os.path.exists(run), f"{key}={run} does not exist")
    if (run / MANIFEST).is_file():
        return run.resolve()
    for name, what in FOLDERS.items():
        require(not (run / name).is_file(), f"{key}={run} is {what}'s directory; name one of the runs in it")
    require(not step_dirs(run), f"{key}={run} holds checkpoints; name the run, {run.resolve().parent}, or one of them")
    found = step_dirs(run / "ckpt")
    chosen = found[0] if which == "latest" and found else run / "ckpt" / which
    if not chosen.is_dir():
        names = ", ".join(path.name for path in reversed(found))
        advice = f"no ckpt/{which}: name one of {run}/ckpt/: {names}" if found else "none: name a run's directory"
        raise ConfigError(f"{key}={run} is not a checkpoint and has {advice}")
    return chosen.resolve()
