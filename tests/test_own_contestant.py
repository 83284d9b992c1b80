"""The contestant of docs/attention_track.md, one file and a line in a sweep: it trains, decodes and is reported."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from variants import LAYOUTS, build, random_tokens

from core.plugins import load_plugins
from core.schema import ConfigError
from sweeps.definition import load_sweep
from sweeps.plan import plan_runs
from training.config import load_config

PAGE = (ROOT / "docs" / "attention_track.md").read_text(encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plugins_undone: None) -> None:
    """The page's file and sweep, in the current folder."""
    for language, name in (("python", "my_asinh.py"), ("yaml", "my_track.yaml")):
        (tmp_path / name).write_text(PAGE.split(f"```{language}\n")[1].split("```")[0])
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("folder")
def test_it_takes_one_file_and_a_line_in_a_sweep() -> None:
    with pytest.raises(ConfigError, match="logits.name=asinh must be one of none, softcap, ssmax"):
        load_config({"logits": {"name": "asinh"}})
    runs = plan_runs(load_sweep("my_track.yaml", {}), [])
    own = [run for run in runs if run.points[0].startswith("asinh,")]
    assert len(runs) == 3 * 10 and len(own) == 10
    assert all(run.config.logits.label == "asinh_c10" and run.config.plugins == ("my_asinh",) for run in own)


@torch.no_grad()
@pytest.mark.parametrize("layout", ["mha", "gqa", "mla"])
@pytest.mark.usefixtures("folder")
def test_it_decodes_with_every_layout_to_the_logits_of_the_full_pass(layout: str) -> None:
    model = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 16, "dropout": 0.0, "position": "rope"}
    given: dict[str, Any] = {
        "plugins": ["my_asinh"], "model": {**model, "rope_theta": 100.0}, "attention": vars(LAYOUTS[layout]),
        "logits": {"name": "asinh", "c": 0.1},
    }  # fmt: skip
    load_plugins(["my_asinh"])
    gpt, plain = build(load_config(given)), build(load_config({**given, "logits": {"name": "none"}}))
    idx, caches, parts = random_tokens(2, 16), gpt.new_caches(2, 16, torch.float64), []
    for pos, end in ((0, 5), (5, 6), (6, 16)):
        parts.append(gpt(idx[:, pos:end], caches=caches, pos=pos)[0])
    full = gpt(idx)[0]
    torch.testing.assert_close(torch.cat(parts, 1), full, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(plain(idx)[0], full, rtol=1e-3)
