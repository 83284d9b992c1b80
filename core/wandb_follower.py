"""The W&B process of a run: it tails metrics.jsonl and sends the lines to W&B.

A process, and not a thread of the trainer: an unreachable server blocks wandb's exit hook for its own time, a failed
online start keeps the run id in use until wandb's service process has died, and wandb replaces sys.exit and
sys.excepthook. Here none of it can touch the training, and a trainer that is killed still gets its last lines sent.

RUN/wandb/ holds job.json (what to tell W&B), `lock`, which the sending process holds, and W&B's recordings. A line is
sent once: online, the server says how far it is; offline, the recordings do. A recording whose lines the server has,
or gets from metrics.jsonl, has W&B's own mark, RECORDING.synced, so that `wandb sync` skips it.

python -m core.wandb_follower send RUN...       sends what the server lacks of runs that have ended
"""

import json
import math
import os
import select
import shlex
import signal
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from core.files import LINES_BYTES, ROOT, FileLock, open_regular, read_json, read_regular
from core.process import open_closed_streams, start_bound
from core.record import Metrics, line_at

POLL = 0.5  # seconds between two looks at metrics.jsonl
LINGER, LINGER_UPLOAD = 60, 1800  # seconds that the W&B process of an ended run has; the second with artifacts
AROUND_FINISH = 50  # seconds of LINGER for the work before and after run.finish()
EXIT_CODES = {"done": 0, "stopped": 255, "running": 255}  # W&B shows 255 as killed; any other status of a run as failed
UPLOAD = "to upload it: wandb sync"  # in the last line of an offline process
Say = Callable[[str], None]


def start(run_dir: Path, mode: str, stdin: int = subprocess.PIPE, stdout: int = subprocess.PIPE) -> Any:
    """Start the process (a Popen). It lives in its own session: Ctrl-C is for the training process alone."""
    env = {"WANDB_ERROR_REPORTING": "false", **os.environ}
    env.pop("WANDB_SERVICE", None)  # a service of its own, never a shared one
    return subprocess.Popen(
        [sys.executable, "-m", "core.wandb_follower", "follow", str(run_dir.resolve()), mode], cwd=ROOT, env=env,
        stdin=stdin, stdout=stdout, stderr=subprocess.DEVNULL, bufsize=0, start_new_session=True,
    )  # fmt: skip


def follow(run_dir: Path, mode: str) -> None:
    """Send the lines of metrics.jsonl to W&B until standard input closes, which it also does when the trainer dies.

    The summary is then left on standard input. Each line on standard output is for the run's log.
    mode: online (goes on offline where that fails), offline, or send (online; an error ends it).
    """
    # SLURM sends them to every process of a step
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    os.nice(10)  # the training goes first
    out = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # W&B and its service process have nothing to say on the terminal

    def say(text: str) -> None:
        with suppress(OSError):
            os.write(out, (" ".join(text.split()) + "\n").encode())

    ended = threading.Event()
    try:
        # p=inf: W&B's JSON has no infinity
        job = json.loads(read_regular(run_dir / "wandb" / "job.json"), parse_constant=str)
        job = {"evaluation": None, "layers": None, "artifacts": False, "diff": "", **job}  # it may lack any of them
        job["linger"] = 0 if mode == "send" else LINGER_UPLOAD if job["artifacts"] else LINGER  # 0: without limit
        threading.Thread(target=wait_for_end, args=(ended, job["linger"]), daemon=True).start()
        with FileLock(run_dir / "wandb" / "lock"):  # the process of a trainer that was killed may still send
            send(run_dir, mode, job, ended, say)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        if mode == "send":
            say(f"not sent: {run_dir} ({reason})")
            sys.exit(1)
        if mode != "online":
            return say(f"W&B is off ({reason}); the run and metrics.jsonl go on")
        say(f"W&B cannot be used now, the run is recorded offline for wandb sync ({reason})")
        # The failed start keeps its run id in W&B's service process, which only dies with this one: hand over.
        start(run_dir, "offline", stdin=0, stdout=out)
        os._exit(0)


def wait_for_end(ended: threading.Event, linger: int) -> None:
    select.select([0], [], [])  # until the trainer writes its summary, which stays in the pipe, or dies
    signal.alarm(linger)
    ended.set()


def file_lines(file: BinaryIO, ended: threading.Event) -> Iterator[dict[str, Any]]:
    """The complete lines of a growing file until its writer has ended."""
    rest, last = b"", False
    while not last:
        last = ended.wait(POLL)  # before reading: what was written before the end is read
        *lines, rest = (rest + file.read()).split(b"\n")
        yield from map(json.loads, lines)


# -----------------------------------------------------------------------------
# W&B


def send(run_dir: Path, mode: str, job: Mapping[str, Any], ended: threading.Event, say: Say) -> None:
    before = [file for file in recordings(run_dir) if file.stem == f"run-{job['init']['id']}"]
    for recording in before:
        cut_incomplete_record(recording)
    sent = max(map(last_recorded, before), default=-1) if mode == "offline" else -1
    sys.argv = [*job["argv"]]  # the command that W&B shows
    import wandb

    settings = wandb.Settings(
        silent=True, console="off", save_code=False, program=job["argv"][0], x_save_requirements=False,
        init_timeout=job["init_timeout"], x_stats_pid=job["pid"],
        finish_timeout=max(0, job["linger"] - AROUND_FINISH), finish_timeout_raises=True,
        x_transaction_log_flush_interval=2, x_file_stream_retry_max=2**31 - 1, x_file_stream_retry_wait_max_seconds=10,
    )  # fmt: skip
    how: Any = "offline" if mode == "offline" else "online"
    run = wandb.init(**arguments(job["init"]), dir=str(run_dir.resolve()), mode=how, settings=settings)
    if mode != "offline":
        say(f"W&B: {run.url}")
        sent = run.starting_step - 1  # the last line that the server has; the iteration in its summary may be one more
        mark_synced(before)
    run.define_metric("iter")
    run.define_metric("*", step_metric="iter")
    if job["evaluation"]:
        run.define_metric(job["evaluation"], step_metric="iter", summary="min,last")
    if job["diff"]:
        Path(run.dir, "diff.patch").write_text(job["diff"], encoding="utf-8")
        run.save(f"{run.dir}/diff.patch", base_path=run.dir, policy="now")
    with open_regular(run_dir / "metrics.jsonl", limit=LINES_BYTES) as file:
        for line in file_lines(file, ended):
            if line["iter"] > sent:
                values = {k: v for k, v in line.items() if v is not None}
                more = media(run_dir, line["iter"], job["layers"]) if job["evaluation"] in line else {}
                run.log(values | more, step=line["iter"], commit=True)
    finish(run, run_dir, mode, job, say)


def arguments(init: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of wandb.init() that train.py writes. Raises: ValueError: another's job.json may name files."""
    known = {key: init.get(key) for key in ("id", "project", "entity", "name", "group", "job_type", "notes", "resume")}
    tags, config = init.get("tags", []), init.get("config", {})
    texts = [*(text for text in known.values() if text is not None), *tags]
    if not (isinstance(tags, list) and isinstance(config, dict) and all(isinstance(text, str) for text in texts)):
        raise ValueError("wandb/job.json is not what a run writes")
    return {**known, "tags": tags, "config": config}


def finish(run: Any, run_dir: Path, mode: str, job: Mapping[str, Any], say: Say) -> None:
    """Send the summary, without the keys that lines or config have, and end the run. Then say what is not uploaded."""
    status = read_json(run_dir / "status.json")
    at_end = read_json(run_dir / "summary.json") if status.get("state") in ("done", "diverged") else {}
    summary = json.loads(sys.stdin.buffer.read() or "{}") or at_end
    summary = {"status": status.get("state"), "reason": status.get("reason")} | summary
    lines = Metrics.read(run_dir / "metrics.jsonl")
    known = {"records", "sha256", *job["init"].get("config", {}).get("info", {})}
    known |= {key for line in lines for key in line}
    run.summary.update({key: value for key, value in summary.items() if key not in known and value is not None})
    evaluation = job["evaluation"]
    if losses := [line[evaluation] for line in lines if line.get(evaluation) is not None]:
        run.summary.update({evaluation: {"min": min(losses), "last": losses[-1]}})  # W&B's min begins at a resume
    try:  # it asks the server
        if job["artifacts"]:
            log_artifacts(run, run_dir)
    except Exception as error:
        say(f"W&B has not got the artifacts ({type(error).__name__}: {error})")
    file = Path(run.settings.sync_file)
    with suppress(TimeoutError):
        run.finish(exit_code=EXIT_CODES.get(summary["status"], 1))
        if mode != "offline":
            mark_synced([file])
            return
    unsent = [file for file in recordings(run_dir) if not Path(f"{file}.synced").exists()]
    if any(file.parent.name.startswith("run-") and last_recorded(file) >= 0 for file in unsent):
        say(f"W&B has not got all of this run; later: python -m core.wandb_follower send {shlex.quote(str(run_dir))}")
    else:
        folders = [str(file.parent) for file in unsent if file.parent.name.startswith("offline-")]
        say(f"W&B is offline; {UPLOAD} {shlex.join(folders) if len(folders) < 2 else offline_recordings(run_dir)}")


def recordings(run_dir: Path) -> list[Path]:
    """W&B's files of a run. What is reached by a link is skipped."""
    found = sorted((run_dir / "wandb").glob("*run-*/*.wandb"))
    real = run_dir.resolve()
    return [file for file in found if file.is_file() and file.resolve() == real / file.relative_to(run_dir)]


def offline_recordings(run_dir: Path) -> str:
    """What `wandb sync` takes to send them all."""
    return f"{shlex.quote(str(run_dir / 'wandb'))}/offline-run-*"


def mark_synced(files: Sequence[Path]) -> None:
    for file in files:
        Path(f"{file}.synced").touch()


def cut_incomplete_record(file: Path) -> None:
    """Shorten a recording whose process was killed to what is whole from its beginning: `wandb sync` skips a run's
    later recordings after one that ends within a record, and the rest of a block after a part that is damaged.

    It is a log of LevelDB after 7 bytes: blocks of 32 KiB, of parts of records with a header each (checksum of what
    comes after the size, size, kind), kind 1 for a whole record and 4 for its last part.
    """
    if file.stat().st_size > LINES_BYTES:
        return
    content = read_regular(file, LINES_BYTES)
    at = whole = 7
    while at < len(content):
        left = 2**15 - at % 2**15  # of the block
        if left < 7:  # too few for a header: unused
            at += left
            continue
        checksum, size, kind = struct.unpack("<LHB", content[at : at + 7].ljust(7, b"\0"))
        if zlib.crc32(content[at + 6 : at + 7 + size]) != checksum:
            break
        at += 7 + size
        if kind in (1, 4):
            whole = at
    if whole < len(content):
        os.truncate(file, whole)


def last_recorded(file: Path) -> int:
    """The last iteration in a recording; -1 where it has none."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    last = -1
    with start_bound(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as inspect:
        for line in inspect.stdout or ():
            if b'"type":"history"' in line:
                last = json.loads(line)["history"]["item"]["iter"]
    return last


# -----------------------------------------------------------------------------
# Media and artifacts: from samples.jsonl, diagnostics.jsonl and metrics.jsonl


def media(run_dir: Path, step: int, layers: Sequence[str] | None) -> dict[str, Any]:
    """What W&B gets of an evaluation: a sample of text, and means over heads by layer. layers: the names of such values
    in diagnostics.jsonl; None for no media."""
    if layers is None:
        return {}
    import html

    import wandb

    found: dict[str, Any] = {}
    if sample := line_at(run_dir / "samples.jsonl", step):
        text = f'<pre style="white-space: pre-wrap">{html.escape(sample["text"])}</pre>'
        found["sample"] = wandb.Html(text, inject=False)
    heads: dict[str, list[float]] = {}
    for name, value in line_at(run_dir / "diagnostics.jsonl", step).items():
        if name.partition("/layer_")[0] in layers and "/head_" in name:
            heads.setdefault(name.rpartition("/head_")[0], []).append(math.nan if value is None else value)
    return found | {key: sum(values) / len(values) for key, values in heads.items()}


def log_artifacts(run: Any, run_dir: Path) -> None:
    """Raises: OSError for a link out of the run, before anything is uploaded."""
    import wandb

    best = run_dir / "ckpt" / "best"
    metrics, model = wandb.Artifact(f"{run.id}-metrics", "metrics"), wandb.Artifact(f"{run.id}-checkpoint", "model")
    files = sorted(best.iterdir()) if best.exists() else []
    for artifact, file in [(metrics, run_dir / "metrics.jsonl"), *((model, file) for file in files)]:
        with open_regular(file, within=run_dir):
            artifact.add_file(str(file), file.name)
    run.log_artifact(metrics)
    if files:
        run.log_artifact(model, aliases=["best"])


if __name__ == "__main__":
    command, *words = sys.argv[1:] or [""]
    if command not in ("follow", "send") or not words:
        print("error: usage: python -m core.wandb_follower send RUN ...", file=sys.stderr)
        sys.exit(2)
    if command == "follow":
        follow(Path(words[0]), words[1])
    unsent = False
    open_closed_streams()
    for folder in map(Path, words if command == "send" else []):
        if (folder / "wandb" / "job.json").is_file():
            unsent |= start(folder, "send", stdin=subprocess.DEVNULL, stdout=sys.stdout.fileno()).wait() != 0
        else:
            print(f"not sent: {folder} is no run that W&B was told of", flush=True)
    sys.exit(1 if unsent else 0)
