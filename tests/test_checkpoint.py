"""Checkpoints: bitwise round trips, damage that is always noticed, and saves cut short at any moment."""

import errno
import itertools
import math
import os
import re
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from conftest import exit_status, flip, fork
from torch import Tensor

from core import checkpoint
from core.checkpoint import CorruptCheckpoint, errors_as_corrupt, link, load, load_latest, peek, resolve, save
from core.schema import ConfigError


def small(step: int) -> dict[str, dict[str, Tensor]]:
    return {"model": {"w": torch.full((8, 8), float(step))}, "optimizer": {"m": torch.full((64,), step)}}


def no_warning(message: str) -> NoReturn:
    raise AssertionError(message)


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def latest_step(folder: Path, warn: Callable[[str], None] = no_warning) -> int:
    """Step of load_latest's answer, whose contents must be those of that step."""
    found = load_latest(folder, warn)
    assert found is not None and found.tensors["model"]["w"].eq(found.step).all() and found.state["step"] == found.step
    return found.step


def save_steps(folder: Path, *steps: int, best: int | None = None) -> None:
    for step in steps:
        save(folder, step, small(step), {"step": step}, best=step == best)


# -----------------------------------------------------------------------------
# What is saved comes back


def raw_bytes(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64]
DTYPES += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bitwise(tmp_path: Path, dtype: torch.dtype) -> None:
    noise = torch.randint(0, 256, (4 * 6 * 16,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    noise = noise % 2 if dtype is torch.bool else noise  # any bits: NaNs, infinities and -0.0 among them
    matrix = noise.view(dtype).reshape(4, -1)
    saved = {"plain": matrix, "transposed": matrix.T, "strided": matrix[::2, 1::2], "scalar": matrix[1, 1].clone()}
    saved |= {"expanded": matrix[:1].expand(3, -1), "empty": matrix[:0].clone()}
    back = load(path := save(tmp_path, 7, {"model": saved, "nothing": {}}, {}, best=False))
    assert load(path, only="nothing").tensors == {"nothing": {}}
    assert back.step == 7 and back.tensors["nothing"] == {} and back.tensors["model"].keys() == saved.keys()
    for name, tensor in saved.items():
        loaded = back.tensors["model"][name]
        assert (loaded.shape, loaded.dtype) == (tensor.shape, dtype), name
        assert raw_bytes(loaded) == raw_bytes(tensor), name


def test_loaded_tensors_outlive_their_files(tmp_path: Path) -> None:
    tensor = torch.randn(1000, requires_grad=True)
    path = save(tmp_path, 1, {"model": {"w": tensor}}, {}, best=False)
    loaded = load(path).tensors["model"]["w"]
    (path / "model.safetensors").write_bytes(bytes((path / "model.safetensors").stat().st_size))
    assert torch.equal(loaded, tensor)


@pytest.mark.gpu
def test_cuda_tensors_come_back_bitwise(tmp_path: Path) -> None:
    tensor = torch.randn(33, 5, device="cuda").T
    loaded = load(save(tmp_path, 1, {"model": {"w": tensor}}, {}, best=False)).tensors["model"]["w"]
    assert loaded.device.type == "cpu" and raw_bytes(loaded) == raw_bytes(tensor.cpu())


def test_state_comes_back_with_nan_infinities_and_big_integers(tmp_path: Path) -> None:
    state = {"inf": [math.inf, -math.inf], "big": 2**900 + 1, "tiny": 5e-324, "text": "naïve\n\ud800", "none": None}
    back = load(save(tmp_path, 0, {}, state | {"nan": math.nan}, best=False)).state
    assert math.isnan(back.pop("nan")) and back == state


def test_a_path_may_be_no_utf8(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"d\xff")
    folder.mkdir()
    assert load(save(folder, 1, small(1), {}, best=False)).tensors.keys() == small(1).keys()


def test_files_have_the_mode_that_the_umask_asks_for(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        path = save(tmp_path / "run" / "ckpt", 1, small(1), {}, best=False)
    finally:
        os.umask(before)
    assert {entry.name: entry.stat().st_mode & 0o777 for entry in path.iterdir()} == dict.fromkeys(names(path), 0o640)


# -----------------------------------------------------------------------------
# Damage is noticed

FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "MANIFEST.json")


@pytest.mark.parametrize("file", FILES)
def test_a_flipped_bit_a_shortened_and_a_missing_file_are_caught(tmp_path: Path, file: str) -> None:
    path = save(tmp_path, 1, small(1), {"step": 1, "text": "a" * 50}, best=True)
    data = (path / file).read_bytes()

    def caught(rule: str) -> None:
        with pytest.raises(CorruptCheckpoint, match=rf"^{path / file}: {rule}[^\n]*$"):
            load(path)

    for where in (0.0, 0.1, 0.35, 0.5, 0.8, 1.0):
        position = round(where * (len(data) - 1))
        flip(path / file, position, 1 << position % 8)
        caught("checksum is")
        (path / file).write_bytes(data)
    for wrong in (data[:-1], b"", data + b"\0"):
        (path / file).write_bytes(wrong)
        caught("checksum is")
    (path / file).unlink()
    caught("No such file")


def test_no_byte_of_the_manifest_can_change(tmp_path: Path) -> None:
    path = save(tmp_path, 1, small(1), {}, best=False)
    manifest = (path / "MANIFEST.json").read_bytes()
    for position in range(len(manifest)):
        mask = {10: 0x03, 32: 0x29}.get(manifest[position], 1 << position % 6)  # space to tab to line break: still JSON
        flip(path / "MANIFEST.json", position, mask)
        with pytest.raises(CorruptCheckpoint, match=r"MANIFEST.json: checksum is wrong"):
            load(path)
        flip(path / "MANIFEST.json", position, mask)
    assert load(path).step == 1


def test_a_checkpoint_under_the_name_of_another_step_is_caught(tmp_path: Path) -> None:
    save(tmp_path, 1, small(1), {}, best=False).rename(tmp_path / "step_000002")
    with pytest.raises(CorruptCheckpoint, match="step_000002: holds step 1"):
        load(tmp_path / "step_000002")
    (tmp_path / "step_000002").rename(tmp_path / "copy")
    assert load(tmp_path / "copy").step == 1


def test_a_sealed_manifest_of_another_form_is_corrupt(tmp_path: Path) -> None:
    path = save(tmp_path, 1, small(1), {"step": 1}, best=True)
    for files in ([], ["state.json"], 1, None):
        (path / "MANIFEST.json").write_text(checkpoint.render(1, 1, files))  # type: ignore[arg-type]
        with pytest.raises(CorruptCheckpoint, match="MANIFEST.json: checksum is wrong"):
            load(path)


# -----------------------------------------------------------------------------
# Which checkpoint is used


def test_the_previous_one_is_used_when_the_newest_is_corrupt_and_it_says_so(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20, 30, best=10)
    flip(tmp_path / "step_000030" / "optimizer.safetensors", -1)
    (tmp_path / "step_000020" / "state.json").unlink()
    said: list[str] = []
    assert latest_step(tmp_path, said.append) == 10
    assert len(said) == 2 and all(line.endswith("using step_000010 instead") for line in said)
    assert "step_000030/optimizer.safetensors: checksum" in said[0] and "step_000020/state.json: No such" in said[1]


def test_no_valid_checkpoint_is_an_error_and_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert load_latest(tmp_path / "ckpt", no_warning) is None
    (tmp_path / ".tmp-1-step_000001").mkdir()
    assert load_latest(tmp_path, no_warning) is None
    save_steps(tmp_path, 10, 20)
    for step in (10, 20):
        flip(tmp_path / f"step_0000{step}" / "MANIFEST.json", 5)
    with pytest.raises(CorruptCheckpoint, match=r"no valid checkpoint in .*step_000020.*step_000010.*") as caught:
        load_latest(tmp_path, no_warning)
    assert "\n" not in str(caught.value)


def test_the_newest_counts_whatever_the_symlink_says(tmp_path: Path) -> None:
    save_steps(tmp_path, 999_999, 1_000_000)
    link(tmp_path, "latest", 999_999)
    assert latest_step(tmp_path) == 1_000_000


def test_pruning_keeps_the_newest_two_and_the_best(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20, 30, 40, 50, best=20)
    assert names(tmp_path) == ["best", "latest", "step_000020", "step_000040", "step_000050"]
    assert (os.readlink(tmp_path / "best"), os.readlink(tmp_path / "latest")) == ("step_000020", "step_000050")
    save_steps(tmp_path, 60, best=60)
    assert names(tmp_path) == ["best", "latest", "step_000050", "step_000060"]


def test_pruning_drops_a_later_corrupt_checkpoint_and_keeps_the_step_that_it_is_told_to(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20, 30, best=10)
    flip(tmp_path / "step_000030" / "state.json", 0)
    save_steps(tmp_path, 25)  # resumed from 20
    assert names(tmp_path) == ["best", "latest", "step_000010", "step_000020", "step_000025"]
    save(tmp_path, 40, small(40), {"step": 40}, best=True, keep_step=10)
    assert names(tmp_path) == ["best", "latest", "step_000010", "step_000025", "step_000040"]


def test_a_step_that_is_saved_again_is_replaced(tmp_path: Path) -> None:
    for attempt in (1, 2):
        path = save(tmp_path, 1, small(1), {"try": attempt}, best=True)
        assert load(path).state == {"try": attempt} and names(tmp_path) == ["best", "latest", "step_000001"]
        flip(path / "model.safetensors", -1)


def test_resolve_finds_a_checkpoint_or_names_those_there_are(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(ConfigError, match=rf"^run={run} does not exist$"):
        resolve(run, "best")
    run.mkdir()
    with pytest.raises(ConfigError, match=rf"^run={run} is not a checkpoint and has none: name a run's directory$"):
        resolve(run, "best")
    save_steps(run / "ckpt", 10, 20, 30, best=10)
    newest = run / "ckpt" / "step_000030"
    assert resolve(run, "best").name == "step_000010" and resolve(run, "latest") == newest
    assert resolve(newest, "best") == newest and resolve(run / "ckpt" / "latest", "best") == newest
    with pytest.raises(ConfigError, match=rf"holds checkpoints; name the run, {run}, or"):
        resolve(run / "ckpt", "best")
    (tmp_path / "plan.jsonl").touch()
    with pytest.raises(ConfigError, match="is a sweep's directory"):
        resolve(tmp_path, "best")
    (run / "ckpt" / "latest").unlink()
    assert resolve(run, "latest") == newest
    shutil.rmtree(run / "ckpt" / "step_000010")
    with pytest.raises(ConfigError, match=rf"^run={run} .*best.*: step_000020, step_000030$"):
        resolve(run, "best")


def test_point_moves_a_link_and_refuses_what_is_not_there(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20, best=10)
    link(tmp_path, "best", 20)
    with pytest.raises(FileNotFoundError, match="step_000030"):
        link(tmp_path, "best", 30)
    assert os.readlink(tmp_path / "best") == "step_000020"


def test_a_run_copied_without_its_symlinks_goes_on(tmp_path: Path) -> None:
    save_steps(tmp_path / "a" / "ckpt", 10, 20, best=10)
    shutil.copytree(tmp_path / "a", tmp_path / "b")  # follows links, as scp -r does
    assert load(resolve(tmp_path / "b", "best")).step == 10
    save_steps(tmp_path / "b" / "ckpt", 30)
    assert load(resolve(tmp_path / "b", "best")).step == 10
    save_steps(tmp_path / "b" / "ckpt", 40, best=40)
    assert names(tmp_path / "b" / "ckpt") == ["best", "latest", "step_000030", "step_000040"]


# -----------------------------------------------------------------------------
# Saves cut short

CRASHED, RAISED, SURVIVED, UNTOUCHED = range(4)
EVENTS = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.symlink", "os.chmod", "os.scandir", "shutil.rmtree"}


def sabotaged(folder: Path, do: str, step: int, at: int) -> int:
    """Save in a fork, in which the operation number `at` on a file crashes the process or fails. Returns what became
    of the save: it survives an error in what comes after it."""

    def work() -> int:
        count = 0

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal count
            if event in EVENTS or (event == "open" and str(arguments[0]).startswith(str(folder))):
                count += 1
                if count == at:
                    if do == "crash":
                        os._exit(CRASHED)
                    raise OSError(errno.ENOSPC, "sabotage")

        sys.addaudithook(hook)
        try:
            save(folder, step, small(step), {"step": step, "attempt": 1}, best=step % 3 == 0)
        except OSError as error:
            assert error.errno == errno.ENOSPC
            return RAISED
        return SURVIVED if count >= at else UNTOUCHED

    status = exit_status(fork(work))
    assert status in range(4)
    return status


def prepare(folder: Path, case: str) -> tuple[int, set[int]]:
    """A folder in some state: the step that is saved next, and the steps that may be found after it was cut short."""
    if case == "next":
        save_steps(folder, 1, 2, 3, best=1)
        return 6, {3, 6}  # 6: the best too
    if case == "over_only":
        save_steps(folder, 3)
        return 3, {3}
    save_steps(folder, 2, 3, best=2)
    if case == "over_corrupt":
        flip(folder / "step_000003" / "model.safetensors", -1)
        return 3, {2, 3}
    return 3, {3}


CASES = ("next", "over_valid", "over_only")
CUTS = [*itertools.product(CASES, ("crash", "fail")), ("over_corrupt", "crash")]


def test_a_passing_error_costs_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network disk that is away for a moment is no damage; the file that is gone is."""
    save_steps(tmp_path, 1, 2)

    def fail(number: int) -> None:
        def measure(file: Path) -> Any:
            raise OSError(number, os.strerror(number), str(file))

        monkeypatch.setattr(checkpoint, "measure", measure)

    for number in (errno.ESTALE, errno.EACCES, errno.EMFILE):
        fail(number)
        with pytest.raises(OSError, match=re.escape(os.strerror(number))) as raised:
            checkpoint.load_latest(tmp_path, print)
        assert not isinstance(raised.value, ConfigError)
    fail(errno.EIO)
    with pytest.raises(CorruptCheckpoint, match="no valid checkpoint"):
        checkpoint.load_latest(tmp_path, print)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "do"), CUTS)
def test_a_save_cut_short_at_any_file_operation_leaves_a_valid_checkpoint(tmp_path: Path, case: str, do: str) -> None:
    step, allowed = prepare(tmp_path / "template", case)
    outcomes: list[int] = []
    while outcomes[-1:] != [UNTOUCHED]:  # until the operation to sabotage lies after the save's last
        folder = tmp_path / f"{len(outcomes)}"
        shutil.copytree(tmp_path / "template", folder, symlinks=True)
        outcomes.append(sabotaged(folder, do, step, len(outcomes) + 1))
        warnings: list[str] = []
        found = latest_step(folder, warnings.append)
        assert found in allowed and (case == "over_corrupt" or not warnings)
        if case == "next":
            assert load(folder / "best").step in (1, step)
        if outcomes[-1] in (SURVIVED, UNTOUCHED):
            assert found == step and load(folder / "latest").state["attempt"] == 1
        if outcomes[-1] == RAISED:  # it cleaned up after itself; what cannot be deleted (old) waits for the next
            assert not [entry for entry in names(folder) if re.match(r"\.tmp-(?!old-|gone-)", entry)]
        save_steps(folder, step + 1, best=step + 1)  # the next save cleans up
        assert latest_step(folder) == step + 1 and load(folder / "best").step == step + 1
        assert not list(folder.glob(".tmp*"))
    assert len(outcomes) > 20
    assert (CRASHED if do == "crash" else RAISED) in outcomes


@pytest.mark.parametrize("floats", [0, 50_000], ids=["in state.json", "in the tensors"])
def test_a_file_that_cannot_grow_fails_the_save_and_nothing_else(tmp_path: Path, floats: int) -> None:
    def work() -> int:
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
        try:
            save(tmp_path, 3, {"model": {"w": torch.zeros(floats)}}, {"text": "a" * (200_000 - 4 * floats)}, best=True)
        except OSError as error:
            return error.errno or 0
        return 0

    save_steps(tmp_path, 1, 2, best=1)
    before = names(tmp_path)
    assert exit_status(fork(work)) == errno.EFBIG
    assert names(tmp_path) == before and latest_step(tmp_path) == 2
    assert (os.readlink(tmp_path / "best"), os.readlink(tmp_path / "latest")) == ("step_000001", "step_000002")


def test_everything_is_on_the_disk_before_the_name_and_the_name_before_anything_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill does not lose what the kernel holds, a power cut does: watch the order of the real calls."""
    save_steps(tmp_path, 1, 2)
    log: list[tuple[str, Any]] = []

    def watch(name: str, subject: Callable[..., Any]) -> None:
        call = getattr(os, name)

        def logged(*args: Any) -> None:
            call(*args)
            log.append((name, subject(*args)))

        monkeypatch.setattr(os, name, logged)

    watch("fsync", lambda descriptor: os.fstat(descriptor).st_ino)
    watch("rename", lambda source, target: Path(target).name)
    watch("replace", lambda source, target: Path(target).name)
    path = save(tmp_path, 3, small(3), {"step": 3}, best=True)
    named, linked = log.index(("rename", "step_000003")), log.index(("replace", "latest"))
    best, gone = log.index(("replace", "best")), log.index(("rename", ".tmp-gone-step_000001"))
    for entry in (path, *path.iterdir()):
        assert ("fsync", entry.stat().st_ino) in log[:named], entry
    assert ("fsync", tmp_path.stat().st_ino) in log[named:linked]
    assert ("fsync", tmp_path.stat().st_ino) in log[best:gone]


def test_peek_passes_over_a_state_that_was_changed(tmp_path: Path) -> None:
    for step in (10, 20):
        save(tmp_path, step, small(step), {"step": step, "threads": step}, best=False)
    assert peek(tmp_path)["threads"] == 20
    state = tmp_path / "step_000020" / "state.json"
    state.write_text(state.read_text().replace("20", "21"))
    assert peek(tmp_path)["threads"] == 10
    assert peek(tmp_path / "absent") == {}


def test_too_little_memory_is_no_damage(tmp_path: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError), errors_as_corrupt(tmp_path):
        raise torch.OutOfMemoryError
    with pytest.raises(CorruptCheckpoint), errors_as_corrupt(tmp_path):
        raise RuntimeError
