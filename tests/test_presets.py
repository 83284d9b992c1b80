"""The YAML files: every preset has the size that it is named for, and every choice of groups composes or says why not.

The sizes are counted on the meta device, for the vocabulary that the preset's shape is known with.
"""

import functools
import json
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from core import cli
from core.cli import CONFIG_DIR, compose, options_of, parse_yaml, presets
from core.schema import ConfigError, declared, flatten
from model.gpt import GPT
from model.options import ATTENTION_OPTIONS, GQAOptions, MHAOptions, MLAOptions, ModelOptions
from training.config import TrainConfig, load_config

CHAR = 65  # Tiny Shakespeare's characters


OPTIONS = options_of(TrainConfig)


@functools.cache
def composed(*overrides: str) -> dict[str, Any]:
    return compose(TrainConfig, [*overrides])


def load(*overrides: str) -> TrainConfig:
    return load_config(composed(*overrides))


def on_meta(config: TrainConfig, vocab_size: int) -> GPT:
    with torch.device("meta"):
        return GPT(config.gpt, vocab_size)


# Vocabulary, parameters without a QK norm, parameters that qk_norm=rms adds: a gain a channel, for queries and for keys
SIZES = {
    "baby_gpt": (CHAR, 10_745_088, 6 * 2 * 64),
    "nano_cpu": (CHAR, 804_096, 4 * 2 * 32),
    "gqa_nano": (CHAR, 795_904, 4 * 2 * 32),
    "mla_nano": (CHAR, 804_224, 4 * 2 * (24 + 8)),
    "track_nano": (1024, 918_656, 4 * 2 * 32),
    "track_small": (4096, 12_194_688, 6 * 2 * 64),
    "gpt2_124m": (50257, 124_439_808, 12 * 2 * 64),
    "qwen_134m": (49152, 134_515_008, 30 * 2 * 64),  # 134.519M with the norm
    "mla_400m": (50304, 405_652_992, 12 * 2 * (128 + 64)),  # 405.7M
}


def test_every_preset_has_a_size() -> None:
    assert sorted(SIZES) == OPTIONS["model"]


@pytest.mark.parametrize("model", SIZES)
def test_parameter_counts(model: str) -> None:
    vocab_size, count, gains = SIZES[model]
    assert on_meta(load(f"model={model}"), vocab_size).num_params() == count
    assert on_meta(load(f"model={model}", "qk_norm=rms"), vocab_size).num_params() == count + gains


def test_a_preset_sets_the_recipe_only_where_it_is_for_small_computers() -> None:
    for model in OPTIONS["model"]:
        recipe = replace(load(f"model={model}"), model=ModelOptions(), attention=MHAOptions())
        batch_size = {"nano_cpu": 12, "gqa_nano": 12, "mla_nano": 12, "track_nano": 8}.get(model)
        small = None if batch_size is None else TrainConfig(batch_size=batch_size, max_iters=2000)
        assert recipe == (small or TrainConfig())


def test_size_and_flops_of_the_default_model_are_those_of_nanogpts_formulas() -> None:
    model = on_meta(load(), CHAR)
    assert round(model.num_params(non_embedding=True) / 1e6, 2) == 10.65  # what nanoGPT prints
    assert model.flops_per_token() == 6 * (10_745_088 - 256 * 384) + 12 * 6 * 384 * 256 == 70_958_592


# -----------------------------------------------------------------------------
# Composition


@pytest.mark.parametrize("group", OPTIONS)
def test_every_option_of_every_group_composes(group: str) -> None:
    needs = {
        "attention=mla": ["model.position=rope", "model.rope_theta=1e4"],
        "data=text": ["data.path=a.txt"],
        "data=bin": ["data.path=folder"],
        "fault=loss_over_accumulation": ["gradient_accumulation_steps=2"],
        "fault=repeated_in_time": ["attention=gqa"],
    }
    for option in OPTIONS[group]:
        choice = f"{group}={option}"
        value = getattr(load(choice, *needs.get(choice, [])), group, None)  # an experiment is no setting
        assert value is None or value.name == option


def test_what_hydra_composes_are_the_defaults_of_the_dataclasses() -> None:
    assert load() == TrainConfig()
    for group, setting in declared(TrainConfig).items():
        assert {*setting.options} <= {*OPTIONS.get(group, [])}
        for name, cls in setting.options.items():
            assert composed(f"{group}={name}")[group] == json.loads(json.dumps(asdict(cls(name=name))))


@pytest.mark.parametrize("file", sorted(CONFIG_DIR.glob("*/**/*.yaml")), ids=lambda file: file.stem)
def test_a_preset_names_only_what_differs_from_the_defaults(file: Path) -> None:
    group, *of_option, _ = file.relative_to(CONFIG_DIR).parts
    if group in TrainConfig.elsewhere:
        return
    content = parse_yaml(file.read_text(), str(file))
    default = asdict(ATTENTION_OPTIONS[of_option[0]](name=of_option[0])) if of_option else asdict(TrainConfig())
    named = flatten(content if of_option or "@package _global_" in file.read_text() else {group: content})
    same = [key for key, value in flatten(default).items() if key in named and named[key] == value]
    assert [key for key in same if key != "model.name"] == []


def test_numbers_without_a_point_are_numbers() -> None:
    assert composed("model=qwen_134m")["model"]["norm_eps"] == 1e-5
    assert composed("model=mla_400m", "qk_norm=layernorm")["qk_norm"]["eps"] == 1e-6


LAYOUTS: dict[str, MHAOptions | MLAOptions] = {
    "gqa_nano": GQAOptions(n_kv_head=2),
    "qwen_134m": GQAOptions(n_kv_head=3),
    "mla_nano": MLAOptions(kv_rank=32, nope_dim=24, rope_dim=8, v_dim=32),
    "mla_400m": MLAOptions(kv_rank=512, q_rank=512, nope_dim=128, rope_dim=64, v_dim=128),
}


@pytest.mark.parametrize("model", OPTIONS["model"])
def test_a_preset_chooses_its_layout_and_naming_it_changes_nothing(model: str) -> None:
    config = load(f"model={model}")
    assert config.attention == LAYOUTS.get(model, MHAOptions())
    assert config == load(f"attention={config.attention.name}", f"model={model}")
    rms = [f"model={model}", "qk_norm=rms"]
    assert load(*rms) == load(*rms, f"attention={config.attention.name}")


def test_attention_on_the_command_line_wins_over_the_preset() -> None:
    for model in LAYOUTS:
        assert load(f"model={model}", "attention=mha").attention == MHAOptions()
    assert load("model=mla_nano", "attention=gqa").attention == GQAOptions(n_kv_head=2)
    assert load("model=gqa_nano", "attention.n_kv_head=1").attention == GQAOptions(n_kv_head=1)
    smaller = MLAOptions(kv_rank=16, nope_dim=24, rope_dim=8, v_dim=32)
    assert load("model=mla_nano", "attention.kv_rank=16").attention == smaller
    assert load("model=gqa_nano", "attention=mla", "attention.kv_rank=16").attention == MLAOptions(kv_rank=16)


@pytest.mark.parametrize("head", ["", "# mine\n# @package _global_\n", "# @package experiment\n"])
@pytest.mark.parametrize("body", ["max_iters: 7\n", "defaults:\n  - override /model: nano_cpu\n"])
def test_an_experiments_file_without_the_line_that_hydra_needs_is_refused(
    head: str, body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(CONFIG_DIR, tmp_path / "configs")
    monkeypatch.setattr(cli, "CONFIG_DIR", tmp_path / "configs")
    file = tmp_path / "configs" / "experiment" / "mine.yaml"
    file.write_text(head + body)
    says = f"experiment=mine: the first line of {file} must be # @package _global_"
    with pytest.raises(ConfigError, match=re.escape(says)):
        compose(TrainConfig, ["experiment=mine"])
    file.write_text(f"# @package _global_\n# mine\n{body}")
    config = load_config(compose(TrainConfig, ["experiment=mine"]))
    assert config.max_iters == 7 or config.model.name == "nano_cpu"
    file.write_text("# @package _global_\n# nothing yet\n")
    assert presets(TrainConfig)["experiment"]["mine"] == "nothing yet"


def test_an_experiment_may_name_a_preset_and_the_command_line_another() -> None:
    assert load("experiment=quickstart").model.name == "nano_cpu"
    config = load("experiment=quickstart", "model=mla_nano")
    assert (config.model.name, config.attention, config.max_iters) == ("mla_nano", LAYOUTS["mla_nano"], 900)
