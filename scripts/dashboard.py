"""A sweep's workspace in W&B: python scripts/dashboard.py sweep=NAME entity=TEAM

Its charts are of the runs that carry the sweep's tag. dry_run=true prints what would be sent.
Needs wandb-workspaces: pip install -e '.[dashboard]'.
"""

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any

from core.cli import run_script
from core.schema import NOT_EMPTY, REQUIRED, ConfigError, Help, one_line, options, require
from core.wandb_run import wandb_options
from scripts.reporting.figures import suffix
from sweeps.definition import Definition, load_sweep, sweep_name, sweep_tag
from sweeps.plan import plan_runs
from training.config import WandbOptions
from training.metrics import HEAT_MAPS, METRICS, in_words


@options
class DashboardOptions:
    sweep: Annotated[str, NOT_EMPTY, Help("its name, or its file")] = REQUIRED
    entity: Annotated[str | None, NOT_EMPTY, Help("the user or team in W&B; null: $WANDB_ENTITY")] = None
    project: Annotated[str, NOT_EMPTY, Help("of the runs")] = WandbOptions.project
    dry_run: Annotated[bool, Help("print what would be sent, as JSON")] = False


def sections(definition: Definition) -> Iterator[tuple[str, list[Any]]]:
    """The panels of each section. Runs are grouped by point; bands are the SD over folds and seeds."""
    import wandb_workspaces.reports.v2 as wr

    over = {"groupby": "Group", "groupby_aggfunc": "mean", "groupby_rangefunc": "stddev"}

    def curve(key: str) -> Any:
        return wr.LinePlot(title=f"{in_words(key)}; band: ± 1 SD over folds and seeds", x="iter", y=[key], **over)

    loss = [curve("val/loss"), wr.BarPlot(title="lowest validation loss", metrics=["val/loss.min"], **over)]
    figures = []
    for name, family in definition.families.items():
        if family.metric is None:
            kinds = {"difference": True, "along": True, "share": family.share_of, "final": family.x_of}
            figures += [f"figures/{kind}{suffix(name)}" for kind, wanted in kinds.items() if wanted]
    top, below = (wr.Layout(y=y, w=24, h=12) for y in (0, 12))
    conclusions = [
        wr.WeavePanelSummaryTable(table_name="conclusions", layout=top),
        wr.MediaBrowser(title="of the sweep's own run", num_columns=2, media_keys=figures, layout=below),
    ]
    configs = [run.config for run in plan_runs(definition, [])]
    logs_maxima = any(config.qk_clip.name != "none" for config in configs)
    keys = [key for key in METRICS if logs_maxima or not key.startswith("qk_clip/")]
    curves = {of: [key for key in keys if METRICS[key].dashboard == of] for of in ("Attention", "Training")}
    drawn = {"val/loss", *(key for keys in curves.values() for key in keys)}
    also = [key for key, how in definition.also.items() if how != "summary" and "*" not in key and key not in drawn]
    yield "Loss", loss
    if figures:  # scripts/report.py wandb=true sends them
        yield "Conclusions of the last report", conclusions
    for name, keys in curves.items():
        yield name, [curve(key) for key in keys + also * (name == "Training")]
    media = {"samples": "sample", "by layer and head": HEAT_MAPS}
    if any(config.wandb.media == "on" for config in configs):  # a sweep's workers have it off otherwise
        yield "Media", [wr.MediaBrowser(title=title, media_keys=[key]) for title, key in media.items()]


def workspace(asked: DashboardOptions, definition: Definition) -> Any:
    import wandb_workspaces.workspaces as ws

    drawn = sections(definition)
    return ws.Workspace(
        entity=asked.entity,
        project=asked.project,
        name=f"nanoQK {asked.sweep}",
        sections=[ws.Section(name=name, panels=panels, is_open=True) for name, panels in drawn],
        settings=ws.WorkspaceSettings(x_axis="iter", max_runs=100),
        runset_settings=ws.RunsetSettings(
            filters=ws.And(ws.Tags().isin([sweep_tag(sweep_name(asked.sweep))])), groupby=[ws.Metric("Group")]
        ),
    )


def show(asked: DashboardOptions) -> int:
    found = wandb_options(WandbOptions(mode="online", project=asked.project, entity=asked.entity))
    require(asked.dry_run or found.entity is not None, "entity= must be given")
    asked = replace(asked, project=found.project, entity=found.entity or "ENTITY")
    definition = load_sweep(asked.sweep, {"parts": "all"})
    if asked.dry_run:
        os.environ.setdefault("WANDB_API_KEY", "0" * 40)  # the library asks for one when it is imported
    try:
        view = workspace(asked, definition)
        if asked.dry_run:
            print(view._to_model().spec.model_dump_json(by_alias=True, exclude_none=True))
            return 0
        view.save()
    except ConfigError:
        raise
    except ImportError as error:
        raise ConfigError("scripts/dashboard.py needs wandb-workspaces: pip install -e '.[dashboard]'") from error
    except Exception as error:  # W&B's have no common class
        raise ConfigError(f"W&B cannot be used: {one_line(error)}") from error
    print(f"workspace: {view.url}")
    return 0


if __name__ == "__main__":
    sys.exit(run_script(DashboardOptions, show, __doc__))
