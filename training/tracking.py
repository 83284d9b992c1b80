"""What W&B is told of a run, and its loss curve."""

import contextlib
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from core.files import ROOT, read_json
from core.git import uncommitted
from core.process import printable, say
from core.record import Metrics, is_number
from core.schema import one_line
from core.wandb_run import wandb_mode, wandb_options
from training.config import TrainConfig
from training.metrics import EVALUATION, shown_in
from training.state import Facts

CURVES = {"train/loss": ("#0072B2", ""), "val/loss": ("#D55E00", "o")}  # what curve.png has: colour, marker


def draw_curve(path: Path) -> bool:
    """Draw the losses of the run in `path` into its curve.png. Whether that went well: a picture fails no run."""
    try:
        draw(path)
    except Exception as error:  # a full disk, matplotlib's settings
        say(f"warning: curve.png is not drawn: {one_line(error)}")
        return False
    return True


def draw(path: Path) -> None:
    with contextlib.chdir(ROOT):  # it reads a matplotlibrc of the current folder
        from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")  # without pyplot: no display, no global state
    axes = figure.add_subplot()
    lines = Metrics.read(path / "metrics.jsonl")
    for key, (colour, marker) in CURVES.items():
        points = [(line["iter"], line[key]) for line in lines if is_number(line.get(key))]
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=4, label=key)
    axes.set(xlabel="iteration", ylabel="loss (nats per token)")
    axes.set_title(path.name, parse_math=False)  # a "$" in it is a dollar
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    figure.savefig(path / "curve.png", dpi=150)


def copied_from(path: Path) -> str:
    """The run directory that the one in `path` is a copy of, with the same run at W&B; "" if of none that is there."""
    job = read_json(path / "wandb" / "job.json")
    origin, known = job.get("path"), job.get("init")
    if not isinstance(origin, str) or not isinstance(known, Mapping) or os.environ.get("WANDB_SWEEP_ID"):
        return ""  # an agent gives an id of its own
    there: Any = {}
    with contextlib.suppress(OSError, ValueError):
        if not os.path.samefile(origin, path):
            there = read_json(Path(origin) / "wandb" / "job.json").get("init")
    same = isinstance(there, Mapping) and there.get("id") == known.get("id")
    return printable(origin) if same else ""


def wandb_settings(config: TrainConfig, path: Path, facts: Facts) -> dict[str, Any]:
    """The mode, the arguments of wandb.init(), and what else the process that sends needs."""
    wandb, name, settings = wandb_options(config.wandb), path.resolve().name, asdict(config)
    known = read_json(path / "wandb" / "job.json").get("init")  # a run that goes on is the same run at W&B
    known_id = known.get("id") if isinstance(known, Mapping) else None
    columns = {"layout": config.attention.name, "norm": config.qk_norm.name, "fold": settings["data"].get("fold")}
    columns |= {key: settings["qk_norm"].get(key) for key in ("p", "alpha_init")}
    tags = columns | {"precision": str(facts.dtype).removeprefix("torch."), "fault": config.fault.name}
    shown = ("layout", "norm", "p", "fold", "precision", "fault")
    init = {
        "project": wandb.project,
        "entity": wandb.entity,
        "group": wandb.group or config.group,  # W&B then averages folds and seeds by itself
        "job_type": "train",
        "name": wandb.name or name,
        "notes": wandb.notes,
        "tags": [*wandb.tags, *(f"{key}:{tags[key]}" for key in shown if tags[key] not in (None, "none"))],
        "id": known_id or f"{re.sub(r'[^A-Za-z0-9_.-]', '-', name)[:100]}-{secrets.token_hex(4)}",
        "config": {**settings, **columns, "info": facts.to_json()},
        "resume": "allow",
    }
    return {
        "mode": wandb.mode, "init": init, "path": str(path.resolve()),
        "layers": shown_in("layers") if shows_media(config) else None,
        "evaluation": EVALUATION, "artifacts": wandb.artifacts, "diff": uncommitted().decode(errors="replace"),
    }  # fmt: skip


def shows_media(config: TrainConfig) -> bool:
    """Whether evaluations record a sample of text, and W&B gets it, and values by layer."""
    chosen = config.wandb.media
    return chosen == "on" or (chosen == "auto" and wandb_mode(config.wandb.mode) != "disabled")
