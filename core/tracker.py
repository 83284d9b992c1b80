"""What a run records: metrics.jsonl always, W&B when asked, summary.json at the end.

metrics.jsonl is the record, and W&B only reads it: a process of its own tails the file (wandb_follower.py).
"""

import json
import os
import re
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from core.files import finite, write_json
from core.metrics import Metrics
from core.rundir import RunDir
from core.wandb_follower import LINGER, start
from training.config import TrainConfig

INIT_TIMEOUT = 20  # seconds that an online start may take before the run goes on offline
FINISH_TIMEOUT = 10  # seconds that W&B may upload after the last line
PATIENCE = 15  # seconds that finish() waits for all of W&B


class Tracker:
    """Records a run that goes on from iteration `step`: metrics.jsonl is cut back to it.

    The lines logged from there on are sent to W&B again after a resume. They are the same bit by bit, so points
    double on the curves but do not move. `info` (device, commit, …) joins the config in W&B.
    """

    def __init__(self, run: RunDir, config: TrainConfig, info: dict[str, Any], step: int = 0) -> None:
        self.run = run
        self.metrics = Metrics(run.path / "metrics.jsonl")
        self.metrics.cut(step)
        self._wandb: subprocess.Popen[bytes] | None = None
        mode = wandb_mode(config.wandb.mode)
        if mode != "disabled":
            try:
                self._wandb = start(wandb_job(run.path, config, info, mode))
            except OSError as error:
                run.log(f"W&B is off: {error}")
                return
            self._relay = threading.Thread(target=self._relay_lines, args=(self._wandb,), daemon=True)
            self._relay.start()

    def log(self, line: dict[str, Any]) -> None:
        """Record {"iter": …, key: value, …}."""
        self.metrics.write(line)

    def finish(self, summary: dict[str, Any] | None = None) -> None:
        """Write summary.json and end W&B, whose run counts as failed unless summary["status"] is "done".

        Waits at most PATIENCE seconds for W&B. Without a summary none is written.
        """
        self.metrics.sync()
        self.metrics.close()
        if summary is not None:
            write_json(self.run.path / "summary.json", summary)
        if self._wandb is None:
            return
        assert self._wandb.stdin is not None
        with suppress(OSError):  # it is gone, and said why
            self._wandb.stdin.write(json.dumps(finite(summary or {})).encode())
        self._wandb.stdin.close()
        self._relay.join(PATIENCE)
        if self._relay.is_alive():
            self.run.log(f"W&B takes long to finish: left behind, it ends by itself within {LINGER} s")
        self._wandb = None

    def _relay_lines(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:  # ends when the process, and the one that may take its place, has ended
            self.run.log(line.decode(errors="replace").rstrip())
        if process.wait() != 0:
            self.run.log(f"W&B stopped (exit status {process.returncode}); the run and metrics.jsonl go on")


# -----------------------------------------------------------------------------
# W&B: what it is told


def wandb_mode(mode: str) -> str:
    """auto: $WANDB_MODE; without it online with an API key, offline without. Never a prompt."""
    if mode == "auto":
        mode = os.environ.get("WANDB_MODE", mode)
    if mode in ("online", "offline", "disabled"):
        return mode
    return "online" if has_api_key() else "offline"


def has_api_key() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    import netrc

    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
    candidates = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    for path in map(os.path.expanduser, candidates):
        with suppress(OSError, netrc.NetrcParseError):
            entry = netrc.netrc(path).authenticators(host)
            return entry is not None and bool(entry[2])
    return False


def wandb_job(path: Path, config: TrainConfig, info: dict[str, Any], mode: str) -> dict[str, Any]:
    """The arguments of the W&B process, as JSON can hold them."""
    name = path.resolve().name
    digest = sha256(json.dumps(config.trajectory, sort_keys=True).encode()).hexdigest()[:8]
    init = {
        "project": config.wandb.project,
        "group": config.wandb.group or config.group,  # W&B then averages folds and seeds by itself
        "name": name,
        "id": re.sub(r"[^A-Za-z0-9_.-]", "-", name)[:100] + "-" + digest,
        "dir": str(path.resolve()),
        "config": {**asdict(config), "info": info},
        **({"tags": [f"fault={config.fault.name}"]} if config.fault.name != "none" else {}),
        "resume": "allow",
    }
    metrics = path.resolve() / "metrics.jsonl"
    timeouts = {"init_timeout": INIT_TIMEOUT, "finish_timeout": FINISH_TIMEOUT}
    where = {"metrics": str(metrics), "offset": metrics.stat().st_size}
    return {"init": init, "mode": mode, **where, "timeouts": timeouts, "argv": sys.argv}


# -----------------------------------------------------------------------------


def plot(metrics_path: Path, png_path: Path, title: str) -> None:
    """Draw the loss curves of a metrics.jsonl as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)  # no display, no global state
    axes = figure.add_subplot()
    lines = Metrics.read(metrics_path)
    for key, colour, marker in (("train/loss", "#0072B2", ""), ("val/loss", "#D55E00", "o")):  # Okabe and Ito's
        points = [(line["iter"], line[key]) for line in lines if line.get(key) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=4, label=key)
    axes.set(xlabel="iteration", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    figure.savefig(png_path, dpi=150)
