"""scripts/dashboard.py: what it would send is what W&B's own library reads, and shows what runs record."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT

from core import cli
from scripts import dashboard
from sweeps.definition import load_sweep

STUDIES = ["p_nano", "mla_comparison_nano", "gqa_nano"]
MEDIA = {"sample", "attn/by_layer_and_head"}


@pytest.mark.parametrize("sweep", STUDIES)
def test_a_study_has_a_workspace(
    sweep: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert cli.run_script(dashboard.DashboardOptions, dashboard.show, "", [f"sweep={sweep}", "dry_run=true"]) == 0
    view = json.loads(capsys.readouterr().out)
    from wandb_workspaces.workspaces.internal import WorkspaceViewspec

    WorkspaceViewspec.model_validate(view)
    sections = view["section"]["panelBankConfig"]["sections"]
    panels = [panel for section in sections for panel in section["panels"]]
    (chosen,) = view["section"]["runSets"][0]["filters"]["filters"]
    assert (chosen["key"]["name"], chosen["op"], chosen["value"]) == ("tags", "IN", [f"sweep:{sweep}"])
    drawn = {key for panel in panels for key in panel["config"].get("metrics", [])}
    assert {"val/loss", "val/loss.min", "attn/alpha", "attn/max_logit", "grad_norm", "tok_per_sec"} <= drawn
    recorded = set((ROOT / "docs" / "tracking.md").read_text().replace("`", " ").replace(",", " ").split())
    assert drawn - {"val/loss.min"} <= recorded
    assert ("qk_clip/max_logit" in drawn) == (sweep != "p_nano")
    shown = {key for panel in panels for key in panel["config"].get("mediaKeys", [])}
    assert shown.isdisjoint(MEDIA) and any(key.startswith("figures/difference") for key in shown)
    assert "conclusions" in json.dumps([panel for panel in panels if panel["viewType"] == "Weave"])
    assert {"figures/share_matched", "figures/final_temperature"} <= shown or sweep != "p_nano"


def test_a_mistake_in_the_sweep_is_not_said_to_be_wandbs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("wandb_workspaces")
    (tmp_path / "mine.yaml").write_text("overrides: [max_iter=3]\n")
    words = [f"sweep={tmp_path / 'mine.yaml'}", "dry_run=true"]
    assert cli.run_script(dashboard.DashboardOptions, dashboard.show, "", words) == 2
    assert capsys.readouterr().err.startswith("error: max_iter=3 is unknown; did you mean max_iters?")


def test_samples_have_a_panel_where_the_sweep_records_them() -> None:
    pytest.importorskip("wandb_workspaces")
    definition = load_sweep("gqa_nano", {})
    with_media = replace(definition, overrides=(*definition.overrides, "wandb.media=on"))
    for asked, has in ((definition, False), (with_media, True)):
        assert ("Media" in dict(dashboard.sections(asked))) == has


def test_a_server_that_is_gone_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("wandb.apis.public.api.Api._HTTP_TIMEOUT", 1)  # seconds; W&B's own is 20
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    words = ["sweep=gqa_nano"]
    assert cli.run_script(dashboard.DashboardOptions, dashboard.show, "", words) == 2
    assert capsys.readouterr().err == "error: entity= must be given\n"
    monkeypatch.setenv("WANDB_ENTITY", "me")
    assert cli.run_script(dashboard.DashboardOptions, dashboard.show, "", words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: W&B cannot be used: ") and error.count("\n") == 1
