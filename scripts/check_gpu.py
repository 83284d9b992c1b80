"""How fast this GPU is: python scripts/check_gpu.py [budget=9] [parts=[update,turns]] [peer=PATH] [overrides]

  device      the machine; bandwidth of a copy
  matmuls     those of an update of baby_gpt, forward and both gradients
  update      an update of baby_gpt without a norm, with RMS and Lp: time, busy time, launches, kernels
  changes     baby_gpt with one change at a time, by turns
  workers     1, 2, 4 and 8 processes on a GPU, without and with MPS: tokens/s, watts
  graphs      a whole update as one CUDA graph; eight graphs on eight streams
  turns       baby_gpt and compiled nanoGPT, by turns (peer=PATH)
  gpt2        gpt2_124m beside public figures
  bits        the same bits alone and under MPS
Whether what it computes is right, `python -m pytest -m gpu` tests. docs/speed.md says what the numbers decide.
Parts have processes of their own: what fails, dies or takes too long leaves the others alone. Each row is written to
out= when it is found, one page and one JSON file named after the device. The next call goes on with what has not passed
at this commit. Overrides of train.py change the models; without a GPU they are tiny. Exit status: 0, 1 where a part
failed.
"""

import contextlib
import math
import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from core.cli import run_script
from core.files import read_json, write_atomic, write_json
from core.git import commit, short
from core.process import end_with_parent, say
from core.schema import ConfigError, one_line, require
from scripts.benchmarks.gpu import PARTS, CheckOptions, Row, Rows
from scripts.benchmarks.nanogpt import load_model
from sweeps.plan import compose
from training.config import load_config

Found = dict[str, Row]
Result = dict[str, Any]  # of a part: state (passed, failed, skipped, stopped), reason, seconds, rows, and of which call
MISSING = ("failed", "skipped")  # keys of a row without numbers

# -----------------------------------------------------------------------------
# The processes of a part


def serve(pipe: Connection, rows: Rows) -> None:
    """Send each row. The process leads a group, so that its children can be ended with it. It ends after a row that
    fails: an error of CUDA can make all later ones fail, too."""
    os.setpgid(0, 0)
    end_with_parent(multiprocessing.parent_process().join, signal.SIGKILL)  # type: ignore[union-attr]
    for measure in rows.values():
        try:
            row = measure()
        except ConfigError as why:  # it does not apply here
            row = {"skipped": str(why)}
        except Exception as error:
            traceback.print_exc()
            row = {"failed": one_line(error, 500)}
        pipe.send(row)
        if "failed" in row:
            return


def find(rows: Rows, minutes: float, end: float, keep: Callable[[str, Row], None]) -> None:
    """Measure the rows, keep() each, and stop after so many minutes, or at `end`: a row that took more fails."""
    limit = time.monotonic() + 60 * minutes
    context = multiprocessing.get_context("spawn")
    left = [*rows]
    while left and time.monotonic() < min(limit, end):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=serve, args=(there, {name: rows[name] for name in left}))
        process.start()
        there.close()
        row: Row = {}
        try:
            while left and "failed" not in row:
                if here.poll(max(0.0, min(limit, end) - time.monotonic())):
                    row = here.recv()
                elif limit < end:
                    row = {"failed": f"the part took more than {minutes:g} minutes"}
                else:
                    return
                keep(left.pop(0), row)
        except EOFError:
            process.join()
            keep(left.pop(0), {"failed": f"died with exit status {process.exitcode}"})
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
            process.kill()  # where it leads no group yet
            process.join()


def summary(rows: Rows, found: Found) -> Result:
    """State and reason of a part of which so much is found."""
    failed, skipped = ([f"{name}: {row[key]}" for name, row in found.items() if key in row] for key in MISSING)
    if failed:
        return {"state": "failed", "reason": f"{len(failed)} of {len(rows)}, the first {failed[0]}"}
    if len(found) < len(rows):
        return {"state": "stopped", "reason": f"after {len(found)} of {len(rows)} rows"}
    return {"state": "skipped" if len(skipped) == len(rows) else "passed", "reason": "; ".join(skipped)}


# -----------------------------------------------------------------------------
# A call, and its results: a page and a JSON file


class Call:
    """end: by the clock. parts: the results of earlier calls on this device, and of this one."""

    def __init__(self, asked: CheckOptions, overrides: list[str]) -> None:
        self.asked, self.overrides = asked, overrides
        self.end = time.monotonic() - time.process_time() + 60 * (asked.budget or math.inf)  # imports took time, too
        command = " ".join(["python scripts/check_gpu.py", *sys.argv[1:]])
        self.about = {"commit": commit(), "overrides": overrides, "command": command}
        self.file, self.device, self.parts = Path(), "", dict[str, Result]()

    def run(self, name: str, again: bool) -> str:
        """Find the rows of a part, unless they passed in an earlier call like this one. Returns the part's state."""
        part, before = PARTS[name], self.parts.get(name, {})
        rows, began = part(self.asked, self.overrides), time.monotonic()
        like = all(before.get(key) == self.about[key] for key in ("commit", "overrides")) and not again
        found = {row: of for row, of in before.get("rows", {}).items() if like and not of.keys() & MISSING}
        left = {row: measure for row, measure in rows.items() if row not in found}
        if found:
            say(f"{name}: kept from an earlier call: {', '.join(found)}")
        if not left or time.monotonic() > self.end:
            say(f"{name}: {'not begun: the budget is spent' if left else 'passed'}")
            return "stopped" if left else "passed"
        earlier = before["seconds"] if found else 0

        def keep(row: str, of: Row) -> None:
            found[row] = of
            numbers = (f"{key} {cell(value)}" for key, value in of.items() if not isinstance(value, dict))
            say(f"{name}: {row}: {', '.join(numbers)}")
            if name == "device":
                self.find_file(of)
            about = {"about": " ".join(str(part.__doc__).split()), "seconds": earlier + round(time.monotonic() - began)}
            self.write(name, {**summary(rows, found), **about, **self.about, "rows": found})

        find(left, self.asked.minutes, self.end, keep)
        said = {**summary(rows, found), "seconds": round(time.monotonic() - began)}
        say(f"{name}: {outcome(said)} ({said['seconds']} s)")
        return str(said["state"])

    def find_file(self, machine: Row) -> None:
        """Read what is known of the device. Raises: ConfigError where there is none."""
        require("device" in machine, str(machine.get("skipped", machine.get("failed"))))
        self.device = machine["device"]
        stem = re.sub(r"[^a-z0-9]+", "_", self.device.lower().split(" (")[0]).strip("_")
        self.file = Path(self.asked.out, f"{stem}.json")
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.parts = read_json(self.file).get("parts", {})

    def write(self, name: str, result: Result) -> None:
        self.parts[name] = result
        self.parts = {one: self.parts[one] for one in {**PARTS, **self.parts} if one in self.parts}
        write_json(self.file, {"device": self.device, "parts": self.parts}, indent=1)
        write_atomic(self.file.with_suffix(".md"), page(self.device, self.parts).encode())


def page(device: str, parts: dict[str, Result]) -> str:
    heads = {
        name: {"": outcome(part), "s": part["seconds"], "what it asks": part.get("about")}
        for name, part in parts.items()
    }
    lines = [f"# {device}", "", "Written by `python scripts/check_gpu.py`.", "", *tables(heads)]
    for name, part in parts.items():
        made = f"`{part['command']}` at commit {short(part['commit'] or 'unknown')}"
        lines += ["", f"## {name}", "", *tables(part["rows"]), "", made]
    return "\n".join(lines) + "\n"


def tables(rows: Found) -> list[str]:
    """A table of the rows, then one for each of their keys that has numbers by name: a column for each row."""
    from scripts.reporting.tables import Table  # slow to import

    keys = dict.fromkeys(key for row in rows.values() for key in row)
    nested = [key for key in keys if any(isinstance(row.get(key), dict) for row in rows.values())]
    plain = [key for key in keys if key not in nested]
    cells = [[name, *(cell(row.get(key)) for key in plain)] for name, row in rows.items()]
    lines = Table(["", *plain], cells).markdown().splitlines()
    for key in nested:
        columns = {name: row.get(key) or {} for name, row in rows.items()}
        names = dict.fromkeys(name for of in columns.values() for name in of)
        inner = {name: {column: of.get(name) for column, of in columns.items()} for name in names}
        lines += ["", f"{key}:", "", *tables(inner)]
    return lines


def outcome(part: Result) -> str:
    return f"{part['state']}: {part['reason']}" if part["reason"] else part["state"]


def cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"  # inf and nan as well
    return "–" if value is None else str(value)


def check(asked: CheckOptions, overrides: list[str]) -> int:
    known = set(asked.parts) <= PARTS.keys()
    require(known, f"parts=[{','.join(asked.parts)}] must be of {', '.join(PARTS)}")
    load_config(compose([f"device={asked.device}", *overrides]))
    if asked.peer is not None:
        load_model(asked.peer)  # refused now, not after minutes
    call = Call(asked, overrides)
    states = [call.run("device", again=True)]
    if not call.device:
        say("the budget is spent before the machine is known")
        return 1
    names = [name for name in asked.parts or PARTS if name != "device"]
    for name in sorted(names, key=lambda name: call.parts.get(name, {}).get("state") == "failed"):  # others come first
        states.append(call.run(name, again=name in asked.parts))
    say(str(call.file.with_suffix(".md")))
    return int("failed" in states)


if __name__ == "__main__":
    sys.exit(run_script(CheckOptions, check, __doc__, passes_on=True))
