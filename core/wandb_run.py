"""W&B from the trainer's side: the mode, and the process that follows metrics.jsonl (core/wandb_follower.py).

metrics.jsonl is the record, and W&B only reads it.
"""

import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from core.files import finite, write_atomic
from core.schema import Rule, declared, must_be_one_of, require
from core.wandb_follower import UPLOAD, offline_recordings, start

INIT_TIMEOUT = 20  # seconds that an online start may take before the run goes on offline
PATIENCE, PATIENCE_AT_STOP = 15, 3  # seconds that finish() waits for all of W&B
VARIABLES = {  # setting -> W&B's environment variable, which counts where the setting is at its default
    "project": "WANDB_PROJECT", "entity": "WANDB_ENTITY", "name": "WANDB_NAME", "group": "WANDB_RUN_GROUP",
    "tags": "WANDB_TAGS", "notes": "WANDB_NOTES",
}  # fmt: skip
CHOSEN_BY_AGENT = {"id": "WANDB_RUN_ID", "project": "WANDB_PROJECT", "entity": "WANDB_ENTITY"}
WANDB_MODES = {  # what $WANDB_MODE can be -> what it means here; dryrun and run are W&B's older words
    "online": "online", "offline": "offline", "disabled": "disabled", "dryrun": "offline", "run": "online",
}  # fmt: skip


class WandbRun:
    """The process that sends the lines of a run directory's metrics.jsonl to W&B, each once.

    settings: "mode"; "init", the arguments of wandb.init(); and what else core/wandb_follower.py reads in job.json.
    log: gets the process's lines, from another thread. Raises: OSError where the process cannot be started.
    """

    def __init__(self, run_dir: Path, settings: Mapping[str, Any], log: Callable[[str], None]) -> None:
        job = {"init_timeout": INIT_TIMEOUT, "argv": sys.argv, "pid": os.getpid(), **settings}
        if os.environ.get("WANDB_SWEEP_ID"):  # under `wandb agent` W&B ignores ours: so recordings carry this id
            agents = {key: os.environ[name] for key, name in CHOSEN_BY_AGENT.items() if name in os.environ}
            job["init"] = {**settings["init"], **agents}
        (run_dir / "wandb").mkdir(exist_ok=True)
        write_atomic(run_dir / "wandb" / "job.json", json.dumps(job).encode())
        self.log, self._run_dir, self._is_offline = log, run_dir, settings["mode"] == "offline"
        self._reached = self._told_upload = False  # a server; whoever reads the log
        self.process = start(run_dir, settings["mode"])
        self._relay = threading.Thread(target=self._relay_lines, daemon=True)
        self._relay.start()

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Hand W&B the summary and end it. Waits at most PATIENCE seconds, PATIENCE_AT_STOP without a summary: whoever
        stops a run may kill it soon."""
        with suppress(OSError):  # the process has ended, and the log says why
            self.process.stdin.write(json.dumps(finite(dict(summary or {}))).encode())
        self.close()
        self._relay.join(PATIENCE if summary else PATIENCE_AT_STOP)
        if self._relay.is_alive() and not self._told_upload:
            self._told_upload = not self._reached
            unless = "" if self._is_offline else "if no server answers, "
            later = f"; {unless}to upload it then: wandb sync {offline_recordings(self._run_dir)}"
            self.log(f"W&B is not done yet; its process goes on in the background{'' if self._reached else later}")

    def close(self) -> None:
        """Let the process end by itself."""
        self.process.stdin.close()

    def _relay_lines(self) -> None:
        for line in self.process.stdout:  # ends when the process has ended, and the offline one that may replace it
            text = line.decode(errors="replace").rstrip()
            self._reached |= text.startswith("W&B: ")
            if UPLOAD not in text or not self._told_upload:  # finish() may have said it
                self._told_upload |= UPLOAD in text
                self.log(text)
        if self.process.wait() != 0:
            self.log(f"W&B stopped (exit status {self.process.returncode}); the run and metrics.jsonl go on")


def wandb_options(settings: Any) -> Any:
    """W&B's settings with the mode that is meant, and its own environment variables where they are at their default.
    Raises: ConfigError where W&B would refuse a variable."""
    mode, found = wandb_mode(settings.mode), {}
    for key, name in VARIABLES.items():
        setting, text = declared(type(settings))[key], os.environ.get(name)
        if text and mode != "disabled" and getattr(settings, key) == setting.default:
            found[key] = tuple(text.split(",")) if key == "tags" else text
            for rule in setting.all(Rule):
                require(rule.holds(found[key]), f"{name}={text} {rule.says}")
    return replace(settings, mode=mode, **found)


def wandb_mode(mode: str) -> str:
    """auto: $WANDB_MODE; without it online with an API key, offline without. Never a prompt. Raises: ConfigError where
    $WANDB_MODE is another word, which W&B refuses whatever the mode."""
    word = os.environ.get("WANDB_MODE")
    known = mode == "disabled" or word is None or word in WANDB_MODES
    require(known, f"WANDB_MODE={word} {must_be_one_of(str(word), WANDB_MODES, 'WANDB_MODE=')}")
    if mode != "auto":
        return mode
    if word is not None:
        return WANDB_MODES[word]
    return "online" if has_api_key() else "offline"


def has_api_key() -> bool:
    """In W&B's variables, or in ~/.netrc, where `wandb login` writes it."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    import netrc

    with suppress(OSError, ValueError, netrc.NetrcParseError):  # ValueError: no URL, or a file that is not text
        host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    return False
