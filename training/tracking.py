"""What W&B is told of a run, and its loss curve."""

import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from core.files import read_json
from core.git import uncommitted
from core.plots import plot
from core.wandb_run import wandb_mode, wandb_options
from training.config import TrainConfig
from training.metrics import EVALUATION, HEAT_MAPS, shown_in
from training.state import Facts

CURVES = {"train/loss": "", "val/loss": "o"}  # what curve.png has, with the marker of each


def draw_curve(path: Path) -> None:
    """Draw the losses of the run in `path` into its curve.png."""
    plot(path / "metrics.jsonl", path / "curve.png", path.name, CURVES)


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
        "dir": str(path.resolve()),
        "config": {**settings, **columns, "info": facts.to_json()},
        "resume": "allow",
    }
    media = {"title": HEAT_MAPS, "maps": shown_in("heads"), "layers": shown_in("layers")}
    return {
        "mode": wandb.mode, "init": init, "media": media if shows_media(config) else None,
        "evaluation": EVALUATION, "artifacts": wandb.artifacts, "diff": uncommitted().decode(errors="replace"),
    }  # fmt: skip


def shows_media(config: TrainConfig) -> bool:
    """Whether evaluations record a sample of text, and W&B gets it, heat maps and values by layer."""
    chosen = config.wandb.media
    return chosen == "on" or (chosen == "auto" and wandb_mode(config.wandb.mode) != "disabled")
