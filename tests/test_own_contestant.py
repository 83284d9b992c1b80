"""The contestant of docs/attention_track.md: one file is an entry of the board, and decodes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from variants import LAYOUTS, build, random_tokens

from core.plugins import load_plugins
from core.schema import ConfigError
from scripts.track import definition, read_contestant
from sweeps.definition import load_sweep
from sweeps.plan import plan_runs
from training.config import load_config

PAGE = (ROOT / "docs" / "attention_track.md").read_text(encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plugins_undone: None) -> None:
    """The page's plugin and entry, in the current folder."""
    for language, name in (("python", "my_asinh.py"), ("yaml", "my_asinh_30.yaml")):
        (tmp_path / name).write_text(PAGE.split(f"```{language}\n")[1].split("```")[0])
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("folder")
def test_it_takes_one_file() -> None:
    with pytest.raises(ConfigError, match="logits.name=asinh must be one of none, softcap, ssmax"):
        load_config({"logits": {"name": "asinh"}})
    entries = [read_contestant(Path(name), None) for name in ("my_asinh.py", "my_asinh_30.yaml")]
    assert [entry.name for entry in entries] == ["asinh", "asinh_30"] and entries[1].by == "Ada Lovelace"
    words = {entry.name: entry.overrides for entry in entries}
    runs = plan_runs(definition(load_sweep("attention_track", {}), words, {name: [0.004] for name in words}, {}), [])
    labels = {run.points[0]: (run.config.logits.label, run.config.qk_norm.name) for run in runs}
    assert [*labels.values()] == [("asinh_c10", "none"), ("asinh_c30", "rms")]
    assert all(run.config.plugins == ("my_asinh",) for run in runs)


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
