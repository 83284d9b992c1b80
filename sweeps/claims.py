"""What a launcher and its workers tell each other, in files of the sweep's directory.

launches/NAME.json    what one start of sweeps/launch.py asks of its workers
launches/NAME.stop    tells the tasks of a launch on SLURM to end
claims/RUN_ID         locked by the process that has the run; counts the tries of each launch
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from core.files import FileLock, open_regular, read_json, write_json
from core.rundir import LOCK_TIMEOUT


@dataclass(frozen=True)
class Launch:
    """What one start of sweeps/launch.py asks of its workers. runs: the ids of those to train. tries: the most of each
    run. ranks: processes that train one run together. slurm: whether the workers are tasks of SLURM."""

    sweep_dir: Path
    name: str
    runs: list[str]
    tries: int
    ranks: int = 1
    slurm: bool = False

    @classmethod
    def read(cls, sweep_dir: Path, name: str) -> Self:
        return cls(sweep_dir, name, **read_json(sweep_dir / "launches" / f"{name}.json"))

    def write(self) -> None:
        content = {key: value for key, value in vars(self).items() if key not in ("sweep_dir", "name")}
        write_json(self.sweep_dir / "launches" / f"{self.name}.json", content)


@contextmanager
def claimed(sweep_dir: Path, run_id: str) -> Iterator[dict[str, Any] | None]:
    """The content of a run's claim while this process holds it; None if another process does."""
    with FileLock(sweep_dir / "claims" / run_id, LOCK_TIMEOUT) as lock:
        yield read_claim(sweep_dir, run_id) if lock.held else None


def read_claim(sweep_dir: Path, run_id: str) -> dict[str, Any]:
    """The content of a run's claim. tries: launch -> how many it has made. limit: the most tries of the last launch
    that tried. error: of the last try, or None. A damaged claim counts as one without tries."""
    claim = {"tries": {}, "limit": 1, "error": None, **read_json(sweep_dir / "claims" / run_id)}
    good = isinstance(claim["tries"], dict) and all(type(n) is int for n in (*claim["tries"].values(), claim["limit"]))
    return claim if good else {"tries": {}, "limit": 1, "error": None}


def write_claim(sweep_dir: Path, run_id: str, claim: dict[str, Any]) -> None:
    """Write in place, since the lock is on the file itself. What a crash leaves half written reads as no tries."""
    with open_regular(sweep_dir / "claims" / run_id, "r+b") as file:  # overwritten, not emptied first: for full disks
        file.write(json.dumps(claim).encode())
        file.truncate()
