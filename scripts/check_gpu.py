"""How fast this GPU is: python scripts/check_gpu.py [parts=[profile,turns]] [peer=PATH] [overrides]

  profile     an update of baby_gpt and mla_400m: tokens/s, MFU, memory, compilation, launches, idle time
  turns       baby_gpt and compiled nanoGPT, alternating (peer=PATH)
  norms       every p of Lp QK-norm against p = 2
  decode      a step of MLA with 4k to 256k positions, beside the paper's Table 2
  sweep       1, 2 and 3 workers on a GPU
Whether what it computes is right, `python -m pytest -m gpu` tests.
Each part has a process of its own: one that fails, dies or takes too long leaves the others alone. Overrides of
train.py change the models. out= gets one page and one JSON file, named after the device; parts that
are not run again keep their results. Exit status: 0, 1 where a part failed.
"""

import importlib
import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from core.cli import run_script
from core.files import read_json, write_atomic, write_json
from core.git import commit
from core.schema import ConfigError, one_line, require
from scripts.benchmarks.gpu_speed import CheckOptions, Skipped
from sweeps.plan import compose
from training.config import load_config

NAMES = ("device", "profile", "turns", "norms", "decode", "sweep")
PARTS = dict.fromkeys(NAMES, "scripts.benchmarks.gpu_speed")  # name of a part and its function -> module
Result = dict[str, Any]  # of a part: state (passed, failed, skipped, refused), reason, seconds, about, rows


# -----------------------------------------------------------------------------
# A part and its process


def serve(pipe: Connection, module: str, name: str, asked: CheckOptions, overrides: list[str]) -> None:
    """The process of a part: send its result. It leads a group, so that its children can be ended with it."""
    os.setpgid(0, 0)
    part = getattr(importlib.import_module(module), name)
    result: Result = {"about": " ".join(part.__doc__.split()), "rows": {}, "reason": ""}
    try:
        rows = part(asked, overrides)
        failures = [f"{row}: {found['failed']}" for row, found in rows.items() if "failed" in found]
        result |= {"state": "passed", "rows": rows}
        if failures:
            result |= {"state": "failed", "reason": f"{len(failures)} of {len(rows)}, the first {failures[0]}"}
    except Skipped as why:
        result |= {"state": "skipped", "reason": str(why)}
    except ConfigError as error:
        result |= {"state": "refused", "reason": str(error)}
    except Exception as error:
        traceback.print_exc()
        result |= {"state": "failed", "reason": one_line(error, 500)}
    pipe.send(result)


def run_part(name: str, asked: CheckOptions, overrides: list[str]) -> Result:
    """The part's result. Raises: ConfigError where a setting cannot be used."""
    began = time.monotonic()
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=serve, args=(there, PARTS[name], name, asked, overrides))
    process.start()
    there.close()
    result: Result = {"state": "failed", "reason": f"took more than {asked.minutes:g} minutes", "rows": {}}
    try:
        if here.poll(60 * asked.minutes):
            result = here.recv()
            process.join(60)
    except EOFError:
        process.join()
        result["reason"] = f"died with exit status {process.exitcode}"
    finally:
        with suppress(ProcessLookupError):
            assert process.pid is not None
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()  # where it leads no group yet
        process.join()
    if result["state"] == "refused":
        raise ConfigError(result["reason"])
    said = " ".join(["python scripts/check_gpu.py", *sys.argv[1:]])
    return {**result, "seconds": round(time.monotonic() - began), "commit": commit(), "command": said}


# -----------------------------------------------------------------------------
# The results: a page and a JSON file


def page(device: str, parts: dict[str, Result]) -> str:
    lines = [f"# {device}", "", "Written by `python scripts/check_gpu.py`.", "", "| part | | s | what it asks |"]
    lines += ["| --- | --- | ---: | --- |"]
    for name, part in parts.items():
        lines.append(f"| {name} | {cell(outcome(part))} | {part['seconds']} | {part.get('about', '')} |")
    for name, part in parts.items():
        if part["rows"]:
            made = f"`{part['command']}` at commit {(part['commit'] or 'unknown')[:12]}"
            lines += ["", f"## {name}", "", *table(part["rows"]), "", made]
    return "\n".join(lines) + "\n"


def outcome(part: Result) -> str:
    return f"{part['state']}: {part['reason']}" if part["reason"] else part["state"]


def table(rows: dict[str, dict[str, Any]]) -> list[str]:
    keys = list(dict.fromkeys(key for row in rows.values() for key in row))
    lines = ["| | " + " | ".join(keys) + " |", "| --- |" + " ---: |" * len(keys)]
    cells = {name: [cell(row.get(key)) for key in keys] for name, row in rows.items()}
    return lines + [f"| {' | '.join([name, *of])} |" for name, of in cells.items()]


def cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"  # inf and nan as well
    return str(value).replace("|", "\\|")


# -----------------------------------------------------------------------------
# The command line


def check(asked: CheckOptions, overrides: list[str]) -> int:
    known = set(asked.parts) <= PARTS.keys()
    require(known, f"parts=[{','.join(asked.parts)}] must be of {', '.join(PARTS)}")
    load_config(compose([f"device={asked.device}", *overrides]))
    found, results = {}, {}
    for name in [name for name in PARTS if name in {"device", *(asked.parts or PARTS)}]:
        found[name] = part = run_part(name, asked, overrides)
        print(f"{name}: {outcome(part)} ({part['seconds']} s)", flush=True)
        if name == "device":  # the first one
            if part["state"] != "passed":
                return 1
            device = next(iter(part["rows"]))
            stem = re.sub(r"[^a-z0-9]+", "_", device.lower().split(" (")[0]).strip("_")
            json_file, page_file = Path(asked.out, f"{stem}.json"), Path(asked.out, f"{stem}.md")
            json_file.parent.mkdir(parents=True, exist_ok=True)
            results = read_json(json_file).get("parts", {})
        results |= {name: part}
        results = {one: results[one] for one in {**PARTS, **results} if one in results}
        write_json(json_file, {"device": device, "parts": results}, indent=1)
        write_atomic(page_file, page(device, results).encode())
    print(page_file)
    return int(any(part["state"] == "failed" for part in found.values()))


if __name__ == "__main__":
    sys.exit(run_script(CheckOptions, check, __doc__, passes_on=True))
