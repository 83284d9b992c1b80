"""Plugins: a norm or a layout in a file of one's own is found, recorded, found again, or named as missing."""

import hashlib
import importlib.util
import json
import math
import os
import py_compile
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import QK_NORM_VARIANTS, TINY, Program, exit_status, fork, write_corpus
from helpers.runs import assert_halves_equal_straight, configured, lines
from helpers.sweeps import tiny_sweep
from safetensors.torch import load_file
from variants import ALL_PAIRS, LAYOUTS, config_of, fresh

import nanoqk
import train
from core import checkpoint, cli, plugins
from core.schema import ConfigError, options
from model import slots
from model.diagnostics import logit_bound
from model.gpt import ATTENTIONS, GPT, QK_NORMS, CausalAttention, GroupedQueryAttention, QKNorm, QKRMSNorm
from model.options import QK_NORM_OPTIONS as OPTIONS
from model.options import QKNormOptions, RMSNormOptions, add_options
from scripts.reporting.live import LivePage
from sweeps.claims import read_claim
from sweeps.definition import load_sweep
from sweeps.launch import check_runs
from sweeps.plan import compose, plan_runs, read_plan
from sweeps.worker import RESTART, work
from training.config import TrainConfig, load_config, stored_config
from training.session import setup

PLUGIN = '''
from typing import Annotated
import torch
from core.schema import AtLeast, Help, options, require
from model.gpt import GroupedQueryAttention, register_attention, register_qk_norm
from model.seams import QKNorm  # the old name of model.slots
from model.options import MHAOptions, QKNormOptions

@options
class HalfOptions(QKNormOptions):
    """x / n"""
    name: str = "half"
    n: Annotated[int, AtLeast(1), Help("a divisor")] = 2

class Half(QKNorm):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.register_buffer("kept", torch.full((), 0.5))
        self.register_buffer("made", torch.full((), 2.0), persistent=False)

    def scale(self, x):
        assert self.kept * self.made == 1  # saved, and made again
        return x[..., :1] * 0 + 1 / self.options.n

@options
class ReversedOptions(MHAOptions):
    """Multi-head attention over the reversed heads"""
    name: str = "reversed"

    def check_fit(self, config):
        super().check_fit(config)
        require(config.model.n_head > 1, "attention=reversed needs two heads")

class Reversed(GroupedQueryAttention):
    def __init__(self, config):
        super().__init__(config)
        self.factor = torch.nn.Parameter(torch.empty(1))

    def init_weights(self):
        torch.nn.init.normal_(self.factor, mean=2 * (self.layer_idx == 0) - 1, std=0.1)

    def attend(self, q, k, v, scale):
        return self.factor * super().attend(q.flip(1), k.flip(1), v.flip(1), scale).flip(1)

register_qk_norm(HalfOptions, Half)
register_attention(ReversedOptions, Reversed)
'''


OTHER = """
@options
class Other(HalfOptions):
    pass

register_qk_norm(Other, Half)
"""


@pytest.fixture
def words(tmp_path: Path, corpus: Path) -> list[str]:
    (tmp_path / "halves.py").write_text(PLUGIN)
    tiny = [word for word in TINY if not word.startswith(("eval_interval", "checkpoint_interval"))]
    chosen = ["plugins=[halves]", "qk_norm=half", "wandb.mode=disabled", "max_iters=2"]
    return ["data=text", f"data.path={corpus}", *tiny, *chosen]


def test_a_run_is_named_after_its_plugins_and_needs_them(words: list[str], tmp_path: Path, forked: Program) -> None:
    both = [*words, "attention=reversed"]
    forked("train.py", *both)
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.startswith("baby_gpt-reversed-half_n2-text-s1337-")
    weights = load_file(run / "ckpt" / "latest" / "model.safetensors")
    factors = [float(weights[f"transformer.h.{layer}.attn.factor"]) for layer in (0, 1)]  # after two small updates
    drawn = torch.randn(2, generator=torch.Generator().manual_seed(1337 + 2**31))
    assert factors == pytest.approx([1 + 0.1 * float(drawn[0]), -1 + 0.1 * float(drawn[1])], abs=0.01)
    again = forked("train.py", *both, "qk_norm.n=3", f"out_dir={run}", status=2)
    assert "qk_norm.n 2 -> 3" in again.stderr
    alone = forked("train.py", *both, "model.n_head=1", "out_dir=alone", status=2)
    assert "attention=reversed needs two heads" in alone.stderr and not (tmp_path / "alone").exists()
    listed = forked("train.py", "plugins=[halves]", "--help").stdout
    assert "qk_norm.n=2" in listed and "attention=reversed" in listed and "also head_dim" in listed

    sample = ["sample.py", f"run={run}", "start=to", "num_samples=1", "max_new_tokens=2"]
    assert forked(*sample).stderr == ""  # this user has trained with it
    (tmp_path / "halves.py").write_text(PLUGIN + "# changed\n")
    refused = forked(*sample, status=2).stderr
    assert re.fullmatch(r"error: plugins=\[halves\] is the run's, .* then add plugins=\[halves\]\n", refused)
    for named in ({}, {"NANOQK_PLUGINS": "other, halves"}):
        said = forked(*sample, *([] if named else ["plugins=[halves]"]), env=named).stderr
        assert "the plugin halves has changed: its SHA-256 is" in said and said.count("\n") == 1
    forked("train.py", *both, "schedule=constant", "out_dir=c")
    (tmp_path / "halves.py").write_text(PLUGIN)
    resumed = forked("train.py", *both, "schedule=constant", "out_dir=c", "max_iters=3")
    assert "warning: the plugin halves has changed" in resumed.stdout
    versions = [hashlib.sha256(text.encode()).hexdigest() for text in (PLUGIN + "# changed\n", PLUGIN)]
    assert nanoqk.Run(tmp_path / "c").summary["plugins"] == {"halves": ", ".join(versions)}
    assert "has changed" in forked("sample.py", "run=c", *sample[2:]).stderr  # it was trained with another one, too

    (tmp_path / "halves.py").rename(tmp_path / "elsewhere.py")
    for command in (sample, ["train.py", *both], ["scripts/audit.py", f"run={run}"]):
        missing = forked(*command, status=2)
        assert missing.stderr.count("\n") == 1
        assert missing.stderr.startswith("error: plugins=[halves]: no module halves in ")


def test_a_plugin_that_changed_since_it_was_imported_trains_no_further_run_of_the_process(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "of_python.py").write_text("# no variant\n")
    given = [word.replace("[halves]", "[of_python]").replace("=half", "=none") for word in words]
    run = nanoqk.train(*given, "out_dir=run")
    assert nanoqk.Run("run", plugins=["of_python"]).config == run.config
    (tmp_path / "of_python.py").write_text("# another one\n")
    with pytest.raises(ConfigError, match="of_python. has changed since it was imported"):
        nanoqk.train(*given, "out_dir=other")


def test_an_experiments_file_may_name_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(plugins, "find_plugin", loaded.append)
    monkeypatch.setattr(plugins, "import_plugin", lambda *_: None)
    monkeypatch.setattr(cli, "CONFIG_DIR", tmp_path)
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nplugins: [not_there]\n")
    for overrides in (["experiment=mine"], ["+experiment=mine", "seed=2"], ["plugins=[nor_this]", "experiment=mine"]):
        cli.load_early(TrainConfig, overrides)
    assert loaded == ["not_there", "not_there", "nor_this"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("nowhere", "", "plugins=[nowhere]: no module nowhere in "),
        ("../up", "", "plugins=[../up] must be names of modules"),
        ("long" * 99, "", f"plugins=[{'long' * 99}] cannot be read: File name too long"),
        ("half.py", "", "plugins=[half.py] must be names of modules: plugins=[half]"),
        ("broken", "1 / 0", "plugins=[broken] cannot be imported: ZeroDivisionError: division by zero"),
        ("garbled", "1 /", "plugins=[garbled] cannot be imported: SyntaxError: invalid syntax"),
        ("ends", "raise SystemExit(0)", "plugins=[ends] cannot be imported: SystemExit: 0"),
        ("own", "class Own(BaseException): pass\nraise Own", "plugins=[own] cannot be imported: Own:"),
        ("venv.__main__", "", "plugins=[venv.__main__] registers no variant"),
        ("random", PLUGIN, "plugins=[random] registers no variant: the name is that of a module of Python itself"),
        ("my_norms.__main__", "", "plugins=[my_norms.__main__] registers no variant"),
        ("torch", PLUGIN, "plugins=[torch]: {}/torch.py has the name of a module that is loaded already: rename it"),
        ("again", PLUGIN.replace('"half"', '"rms"'), "HalfOptions.name=rms is taken by model.options.RMSNormOptions"),
        ("twice", PLUGIN + OTHER, "Other.name=half is taken by twice.HalfOptions"),
        ("bare", PLUGIN.replace("@options\n", ""), "HalfOptions needs @options (core.schema) above its class"),
        ("baseless", PLUGIN.replace("(QKNormOptions)", ""), "HalfOptions must derive from the options of its group"),
        ("untyped", PLUGIN.replace("name: str =", "name ="), "HalfOptions needs a name: write name: str"),
        ("nameless", PLUGIN.replace('name: str = "half"', ""), "HalfOptions needs a name: write name: str"),
        ("spaced", PLUGIN.replace('"half"', '"a b"'), "HalfOptions.name=a b must be a lower-case word"),
    ],
)
def test_a_plugin_that_cannot_be_used_is_named(
    name: str, text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plugins_undone: None
) -> None:
    monkeypatch.chdir(tmp_path)
    if text:
        (tmp_path / f"{name}.py").write_text(text)
    with pytest.raises(ConfigError) as error:
        plugins.load_plugins([name])
    assert str(error.value).startswith(message.format(tmp_path))


def test_a_plugin_that_is_recorded_and_not_loaded_counts_as_changed() -> None:
    (said,) = plugins.changed_plugins({"not_loaded": "0" * 64})
    assert said == f"the plugin not_loaded has changed: its SHA-256 is unknown, the run's {'0' * 12}"


@pytest.mark.parametrize("held", [["config.yaml", "status.json"], ["config.yaml", "ckpt"], ["plan.jsonl"]])
def test_nothing_is_imported_from_a_run_dir(held: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "runs" / "xyz"
    inside = run / "ckpt_copy"
    inside.mkdir(parents=True)
    for name in held:
        (run / name).touch()
    for folder in (run, inside):
        (folder / "evil.py").write_text("raise SystemExit('imported')")
        monkeypatch.chdir(folder)
        with pytest.raises(ConfigError, match="is in the run directory .*, from which nothing is imported"):
            plugins.load_plugins(["evil"])
    monkeypatch.chdir(tmp_path)
    for name in ("runs.xyz.evil", "runs.xyz.ckpt_copy.evil"):  # by way of folders without code
        with pytest.raises(ConfigError, match="is in the run directory .*, from which nothing is imported"):
            plugins.load_plugins([name])


def test_no_norm_of_ours_is_said_to_keep_attention_uniform() -> None:
    for attention, norm in ALL_PAIRS:
        gpt = fresh(config_of(attention, norm))
        assert all(logit_bound(layer) >= 1 for layer in gpt.attentions), (attention, norm)
    for chosen in QK_NORM_VARIANTS.values():
        gpt = fresh(config_of("mha", chosen, n_embd=4))  # one channel a head
        assert logit_bound(gpt.attentions[0]) >= 0.99 or chosen.name == "layernorm"  # which maps one channel to 0
    for norm, bound in (("none", math.inf), ("rms_whole", 16.0)):  # one head of four has all the length: 8 * 8 / 4
        gpt = fresh(config_of("mha", norm, n_embd=64))
        assert logit_bound(gpt.attentions[0]) == pytest.approx(bound, rel=1e-4)
    del gpt.attentions[0].k_norm
    assert logit_bound(gpt.attentions[0]) == math.inf  # keys without a norm


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_bound_is_reached_by_a_key_that_equals_the_query(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Unit(QKNorm):
        def scale(self, x: torch.Tensor) -> torch.Tensor:
            return 1 / torch.linalg.vector_norm(x, dim=-1, keepdim=True)

    monkeypatch.setitem(QK_NORMS, "rms", Unit)
    gpt = fresh(config_of(layout, "rms"))
    blocks = 2 if layout.startswith("mla") and layout != "mla_unified" else 1
    for layer in gpt.attentions:
        assert logit_bound(layer) == pytest.approx(blocks * layer.logit_scale.softmax_scale, rel=1e-5)


def test_a_layout_without_a_place_for_a_variant_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class OwnAttend(GroupedQueryAttention):
        def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)

    class Wrapping(OwnAttend):
        wraps_attend = True

    class Bare(CausalAttention):
        def __init__(self, config: Any):
            super().__init__()
            self.n_head, self.p_dropout = config.model.n_head, 0.0

    def built(layout: Any, contestant: str) -> GPT:
        monkeypatch.setitem(ATTENTIONS, "mha", layout)
        return GPT(config_of("mha", contestant).gpt, 11)

    assert Bare.fill_seams is Bare.fill_slots  # a layout that exists calls the old name
    for layout, contestant in ((OwnAttend, "gate_head"), (Wrapping, "softcap"), (Wrapping, "sink"), (Bare, "none")):
        built(layout, contestant)
    for layout, contestant, says in (
        (OwnAttend, "softcap", "attention=mha replaces attend(), which logits= and softmax= change"),
        (OwnAttend, "sink", "attention=mha replaces attend(), which logits= and softmax= change"),
        (Bare, "rms", "qk_norm=rms: attention=mha has no q_norm"),
        (Bare, "softcap", "logits=softcap: attention=mha does not call fill_slots()"),
        (Bare, "gate_head", "output=gate: attention=mha does not call fill_slots()"),
        (Bare, "quack", "weights=quack: Bare has neither c_attn nor c_kv_b"),
    ):
        with pytest.raises(ConfigError, match=re.escape(says)):
            built(layout, contestant)


def test_a_shared_parameter_is_refused(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Shared(GroupedQueryAttention):
        def __init__(self, config: Any):
            super().__init__(config)
            self.k_norm.gain = self.q_norm.gain

    monkeypatch.setitem(ATTENTIONS, "mha", Shared)
    chosen = [word for word in words if not word.startswith(("plugins", "qk_norm"))]
    with pytest.raises(ConfigError, match="attention=mha shares .*k_norm.gain: a checkpoint cannot hold it"):
        setup(load_config(compose([*chosen, "qk_norm=rms", f"out_dir={tmp_path / 'run'}"])))


def test_qk_clip_needs_a_layout_that_scales(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = tiny_sweep(tmp_path, corpus, "qk_norm=none", grid={"qk_clip": ["clip", "none"]}, folds=[0])
    clip, none = plan_runs(load_sweep(str(sweep), {}), [])
    monkeypatch.delattr(GroupedQueryAttention, "scale_logits")
    check_runs([none])
    with pytest.raises(ConfigError, match=re.escape("qk_clip=clip: attention=mha has no scale_logits()")):
        check_runs([clip, none])
    with pytest.raises(ConfigError, match=re.escape("qk_clip=clip: attention=mha has no scale_logits()")):
        setup(clip.config)


COUNTS = PLUGIN.replace(
    "    def scale(self, x):",
    """        self.updates, self.seen, self.longest = 0, None, 0
        self.register_buffer("steps", torch.zeros(()))
        self.log = lambda: None

    def after_update(self):
        self.steps += 1  # COUNT

    def scale(self, x):
        self.seen, self.longest = x.mean(), max(self.longest, x.size(-2))""",
)


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (
            "self.updates += 1",
            "transformer.h.0.attn.q_norm.updates changes in training, but checkpoints do not save it",
        ),
        ("self.mean = getattr(self, 'mean', 0) * 0.9 + self.seen", "q_norm.mean changes in training"),
        (  # a tensor of a buffer that goes may leave its id to another one
            "self.steps = self.steps + 1; self.late = 1 + getattr(self, 'late', torch.zeros(()))",
            "q_norm.late changes in training",
        ),
        ("", ""),
    ],
)
def test_what_a_norm_remembers_outside_of_its_buffers_is_told(
    count: str, said: str, words: list[str], tmp_path: Path, forked: Program
) -> None:
    assert "COUNT" in COUNTS
    (tmp_path / "halves.py").write_text(COUNTS.replace("# COUNT", f"; {count}"))
    lines = [line for line in forked("train.py", *words, "out_dir=run").stdout.splitlines() if "warning" in line]
    assert [said in line for line in lines] == ([True] if said else [])


def test_what_mla_cannot_decode_is_refused(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class HeadGains(QKRMSNorm):
        def __init__(self, options: Any, head_dim: int, n_head: int):
            super().__init__(options, head_dim, n_head)
            self.gain = torch.nn.Parameter(torch.empty(n_head * head_dim))

    class HalfValues(slots.Output):
        def transform_values(self, v: torch.Tensor) -> torch.Tensor:
            return v / 2

    monkeypatch.setitem(QK_NORMS, "rms", HeadGains)
    GPT(config_of("mla", "rms").gpt, 11)
    with pytest.raises(ConfigError, match="qk_norm=rms needs attention.qk_norm_layout=blockwise: its gains differ"):
        GPT(config_of("mla_unified", "rms").gpt, 11)
    monkeypatch.setitem(slots.OUTPUTS, "none", HalfValues)
    GPT(config_of("gqa", "none").gpt, 11)
    with pytest.raises(ConfigError, match="output=none needs attention=mha or gqa"):
        GPT(config_of("mla", "none").gpt, 11)
    words = ["qk_norm=none", "model.position=rope", "model.rope_theta=10000"]
    sweep = tiny_sweep(tmp_path, corpus, *words, grid={"attention": ["gqa", "mla"]}, folds=[0])
    gqa, mla = plan_runs(load_sweep(str(sweep), {}), [])
    check_runs([gqa])
    with pytest.raises(ConfigError, match="output=none needs attention=mha or gqa"):  # before the first run starts
        check_runs([gqa, mla])
    with pytest.raises(ConfigError, match="RMSNormOptions needs a class that derives from QKNorm, not GPT"):
        slots.register(RMSNormOptions, GPT)


def test_a_label_has_every_value_in_letters_that_a_path_can_have() -> None:
    @options
    class OddOptions(QKNormOptions):
        name: str = "odd"
        q: float = 0.5
        way: str = "a/b c"
        flag: bool = True

    table: dict[str, Any] = dict(OPTIONS)
    assert add_options(table, OddOptions) == "odd" and table["odd"] is OddOptions
    assert OddOptions().label == "odd_q0.5_wayabc_flagtrue"
    label = replace(load_config({}), qk_norm=OddOptions()).label
    assert label == "baby_gpt-mha-odd_q0.5_wayabc_flagtrue-tiny_shakespeare"


PARTS = """
import torch
from torch import nn
from core.schema import options
from model import options as given, slots
from model.linear import Linear
from model.slots import register

@options
class PeekOptions(given.OutputOptions):
    name: str = "peek"

class Peek(slots.Output):
    "Sees the next token, with a weight that begins at 0."
    def __init__(self, o, config, v_dim):
        super().__init__(o, config, v_dim)
        self.n_head, self.weight = config.model.n_head, nn.Parameter(torch.empty(1))
        self.linear = Linear(config.model.n_embd, config.model.n_head * v_dim, bias=False)
    def init_weights(self):
        nn.init.zeros_(self.weight)
    def forward(self, y, x):
        later = self.linear(nn.functional.pad(x, (0, 0, 0, 1))[:, 1:]).unflatten(-1, (self.n_head, -1))
        return y + self.weight * later.transpose(1, 2)

@options
class MixOptions(given.OutputOptions):
    name: str = "mix"

class Mix(slots.Output):
    def forward(self, y, x):
        return y + y.mean(0, keepdim=True)

@options
class WideOptions(given.QKNormOptions):
    name: str = "wide"

class Wide(slots.QKNorm):
    def scale(self, x):
        return torch.ones_like(x)

@options
class BareOptions(given.QKNormOptions):
    name: str = "bare"

class Bare(slots.QKNorm):
    pass

@options
class MatrixOptions(given.QKNormOptions):
    name: str = "matrix"

class Matrix(slots.QKNorm):
    def __init__(self, o, head_dim, n_head):
        super().__init__(o, head_dim, n_head)
        self.gain = nn.Parameter(torch.empty(n_head, head_dim))
    def scale(self, x):
        return torch.ones_like(x[..., :1])

@options
class UnsetOptions(MatrixOptions):
    name: str = "unset"

class Unset(Wide):
    def __init__(self, o, head_dim, n_head):
        super().__init__(o, head_dim, n_head)
        self.factor = nn.Parameter(torch.empty(1))
    def scale(self, x):
        return self.factor * torch.ones_like(x[..., :1])

@options
class SpreadOptions(MatrixOptions):
    name: str = "spread"

class Spread(Unset):
    def __init__(self, o, head_dim, n_head):
        super().__init__(o, head_dim, n_head)
        self.factor = self.new_parameter(1, 1.0)
        self.register_buffer("same", torch.ones(1).expand(4))

@options
class CopyOptions(given.WeightsOptions):
    name: str = "copy"

class Copy(slots.Weights):
    def __init__(self, o, block):
        super().__init__(o, block)
        self.of = [block.mlp.c_proj]
    def update_factors(self):
        return [(linear.weight.clone(), torch.ones(())) for linear in self.of]

@options
class UnitRowsOptions(given.WeightsOptions):
    name: str = "unit_rows"

class UnitRows(slots.Weights):
    def __init__(self, o, block):
        super().__init__(o, block)
        block.attn.c_attn.reparam = UnitRow()

class UnitRow(nn.Module):
    def forward(self, weight):
        return weight / weight.norm(dim=1, keepdim=True)

for one, its in ((PeekOptions, Peek), (MixOptions, Mix), (WideOptions, Wide), (BareOptions, Bare),
                 (MatrixOptions, Matrix), (UnsetOptions, Unset), (SpreadOptions, Spread), (CopyOptions, Copy),
                 (UnitRowsOptions, UnitRows)):
    register(one, its)
"""


@pytest.fixture
def parts(words: list[str], tmp_path: Path) -> list[str]:
    (tmp_path / "parts.py").write_text(PARTS)
    return ["plugins=[parts]", *(word for word in words if not word.startswith(("plugins", "qk_norm")))]


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ("output=mix", "attention=mha output=mix: a window moves the logits of another"),
        ("qk_norm=wide", "qk_norm=wide: scale() of (1, 2, 1, 8) is (1, 2, 1, 8): its last"),
        ("qk_norm=bare", "qk_norm=bare: the class Bare defines no scale(x)"),
        ("qk_norm=matrix", "qk_norm=matrix: the gain must be a vector"),
        ("qk_norm=unset", "init_weights() sets no values of transformer.h.0.attn.q_norm.factor"),
        ("qk_norm=spread", "transformer.h.0.attn.q_norm.same has one number in several places"),
        ("weights=copy", "update_factors() must return views of weights"),
        ("weights=unit_rows qk_clip=clip", "qk_clip=clip: weights=unit_rows undoes the scaling"),
    ],
)
def test_a_variant_breaking_its_slot_is_refused(
    chosen: str, message: str, parts: list[str], tmp_path: Path, forked: Program
) -> None:
    refused = forked("train.py", *parts, *chosen.split(), "out_dir=o", status=2)
    assert refused.stderr.splitlines()[-1].startswith(f"error: {message}") and not (tmp_path / "o").exists()


def test_a_leak_that_training_learns_is_found_at_the_end_and_no_result(
    parts: list[str], tmp_path: Path, program: Program, forked: Program
) -> None:
    sweep = {"overrides": [*parts, "max_iters=20"], "grid": {"output": ["none", "peek"]}}
    (tmp_path / "peeks.yaml").write_text(json.dumps(sweep))
    launch = ["sweeps/launch.py", "sweep=peeks.yaml", "launcher.workers=1"]
    said = forked(*launch, env={"XDG_CONFIG_HOME": "/dev/null"}).stdout
    assert "2 done" in said and said.count("warning: /dev/null/nanoqk/plugins.json cannot be written (Not a direc") == 1
    logs = "".join(file.read_text() for file in (tmp_path / "runs" / "peeks" / "logs").iterdir())
    assert logs.count("warning: when trained, attention=mha output=peek sees the future") == 1
    (tmp_path / "parts.py").write_text("raise SystemExit(7)")  # for who only reads it may as well be a stranger's
    forked("sweeps/status.py", "sweep=peeks.yaml")
    plan = {run.id: run for run in read_plan(tmp_path / "runs" / "peeks")}
    (peek,) = (name for name in plan if "peek" in name)
    assert asdict(plan[peek].config.output) == {"name": "peek"} and "parts" not in sys.modules
    live = LivePage(tmp_path / "runs" / "peeks", None)
    for page in (live.content(peek), LivePage(tmp_path, tmp_path / "runs" / "peeks" / peek).content("")):
        assert "<td>output.name</td><td>peek</td>" in str(page.shown())
    said = program("scripts/report.py", "sweep=peeks.yaml", "out=results").stdout
    table = (tmp_path / "results" / "table.md").read_text()
    assert "1 failed" in said + table and "done, but when trained, attention=mha output=peek sees the future" in table


# -----------------------------------------------------------------------------
# What a run names

BOMB = "open('exploded', 'w')\nraise ValueError\n"
NAMED = {  # by a stranger's run -> files in the folder of the command, the line
    "cProfile": ({"profile.py": BOMB}, "registers no variant: the name is that of a module of Python itself"),
    "antigravity": ({}, "registers no variant: the name is that of a module of Python itself"),
    "tqdm.__main__": ({}, "registers no variant: the name is that of a module of Python itself"),
    "tqdm.contrib.bells": ({}, "is the run's, and you have not trained with"),  # an installed one
    "scripts.report": ({}, "is the run's, and you have not trained with"),  # one of ours
    "yaml": ({}, "is the run's, and you have not trained with"),  # a loaded one
    "evil": ({"evil.py": BOMB}, "is the run's, and you have not trained with"),
    "evils.evil": ({"evils/__init__.py": BOMB, "evils/evil.py": BOMB}, "is the run's, and you have not trained with"),
    "link": ({"../outside.py": BOMB}, "is in the run directory"),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    assert train.run(configured(write_corpus(folder), folder / "run", max_iters=2)) == 0
    return folder / "run"


Strange = Callable[[str], Path]


@pytest.fixture
def strange(trained: Path, tmp_path: Path) -> Strange:
    """A run whose config.yaml and checkpoint name a plugin, under a manifest that fits."""

    def named(plugin: str) -> Path:
        run = shutil.copytree(trained, tmp_path / "run", symlinks=True)
        config = yaml.safe_load((run / "config.yaml").read_text()) | {"plugins": [plugin]}
        (run / "config.yaml").write_text(json.dumps(config))
        for saved in [checkpoint.load(step) for step in sorted(run.glob("ckpt/step_*"))]:
            state = saved.state | {"config": saved.state["config"] | {"plugins": [plugin]}}
            checkpoint.save(run / "ckpt", saved.step, saved.tensors, state, best=True)
        return run

    return named


@pytest.mark.parametrize("plugin", NAMED)
def test_what_a_strangers_run_names_is_not_imported(
    plugin: str, strange: Strange, tmp_path: Path, program: Program, forked: Program
) -> None:
    files, line = NAMED[plugin]
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    run = strange(plugin)
    within = plugin in ("cProfile", "link")
    if within:
        (run / "link.py").symlink_to("../outside.py")
        for file in [*run.iterdir()]:  # the folder of the command is the run directory
            file.rename(tmp_path / file.name)
    refused = (program if within else forked)("sample.py", f"run={'.' if within else 'run'}", status=2).stderr
    assert refused.startswith(f"error: plugins=[{plugin}]") and line in refused and refused.count("\n") == 1
    assert not (tmp_path / "exploded").exists()


def test_no_program_imports_what_only_a_run_names(
    tiny_run: list[str], strange: Strange, tmp_path: Path, forked: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evil.py").write_text(BOMB)
    strange("evil")
    commands = [
        "sample.py run=run", "scripts/audit.py run=run", "scripts/export_hf.py run=run out=hf",
        "scripts/compare.py a=run b=run/ckpt/step_000000 out=page.html", "scripts/evaluate_lm.py run=run tasks=cloze",
        "scripts/import_checkpoint.py from=run out=other",
    ]  # fmt: skip
    trainings = [["train.py", *tiny_run, *more] for more in (["init_from=run", "out_dir=other"], ["out_dir=run"])]
    for command in [*map(str.split, commands), *trainings]:
        refused = forked(*command, status=2).stderr
        assert "plugins=[evil] is the run's" in refused and refused.count("\n") == 1, (command, refused)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="evil. is the run's, and you have not trained with .*evil.py"):
        nanoqk.Run("run").config  # noqa: B018
    assert not (tmp_path / "exploded").exists() and not (tmp_path / "other").exists()
    for line in commands[:5]:
        assert "cannot be imported: ValueError" in forked(*line.split(), "plugins=[evil]", status=2).stderr
        (tmp_path / "exploded").unlink()


@pytest.mark.parametrize("key", ["slot", "a b", 5, "class", "\ufb01", "__dict__"])
def test_what_can_be_no_setting_of_an_unknown_variant_is_refused(key: Any) -> None:
    assert asdict(stored_config({"qk_norm": {"name": "x", "α": [1]}}).qk_norm) == {"name": "x", "α": [1]}
    with pytest.raises(ConfigError, match="qk_norm.* is unknown|qk_norm=.* cannot be settings"):
        stored_config({"qk_norm": {"name": "x", key: 1}})


def test_a_plugin_counts_with_what_it_imports_from_its_folder(
    words: list[str], tmp_path: Path, forked: Program
) -> None:
    """And with the bytes that were hashed, not with those of a __pycache__. Python's own modules are Python's."""
    files = {
        "halves": "import profile, yaml, divisors, lab.inner\nfrom mine import more\ntry:\n    import faster\n"
        "except ImportError:\n    pass\n" + PLUGIN,
        "divisors": "", "lab/inner": "", "mine/__init__": "", "mine/more": "from . import most", "mine/most": "",
        "profile": BOMB, "yaml": BOMB,
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_text(text)
    forked("train.py", *words, "out_dir=run")
    sample = ["sample.py", "run=run", "start=to", "num_samples=1", "max_new_tokens=2"]
    (tmp_path / "bomb.py").write_text(BOMB)
    for name in ("halves", "divisors"):
        unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
        cached = importlib.util.cache_from_source(str(tmp_path / f"{name}.py"))
        py_compile.compile(str(tmp_path / "bomb.py"), cached, invalidation_mode=unchecked)
    assert forked(*sample).stderr == ""
    for name in ("divisors", "lab/inner", "lab/__init__", "mine/most", "mine/new", "faster"):  # changed, or new
        file = tmp_path / f"{name}.py"
        before = file.read_text() if file.exists() else None
        file.write_text(BOMB)
        refused = forked(*sample, status=2).stderr
        assert "halves.py and what it imports as they are now: look at it" in refused and refused.count("\n") == 1
        file.unlink() if before is None else file.write_text(before)
    assert forked(*sample).stderr == "" and not (tmp_path / "exploded").exists()
    (tmp_path / "divisors.py").write_text("# changed\n")
    told = "the plugin halves has changed: its SHA-256 is "
    assert told in forked("train.py", *words, "out_dir=new", "init_from=run").stdout
    (tmp_path / "divisors.py").write_text("")
    shutil.copytree(os.environ["XDG_CONFIG_HOME"], tmp_path / "relative")  # a stranger's, in the folder of the command
    for place in ("relative", str(tmp_path / "of_another_user")):
        forked(*sample, status=2, env={"XDG_CONFIG_HOME": place, "HOME": str(tmp_path / "home")})


def test_a_worker_refuses_another_plugin_than_its_launcher_had(
    words: list[str], tmp_path: Path, forked: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.yaml").write_text(json.dumps({"overrides": words}))
    assert "1 done" in forked("sweeps/launch.py", "sweep=mine.yaml").stdout
    (run,), sweep_dir = read_plan(tmp_path / "runs" / "mine"), tmp_path / "runs" / "mine"
    (launch,) = (sweep_dir / "launches").glob("*.json")
    monkeypatch.chdir(tmp_path)
    for handed, says in ((f"halves={'0' * 64}", "is not as it was when the sweep was launched"), ("", None)):
        shutil.rmtree(sweep_dir / run.id, ignore_errors=True)
        monkeypatch.setenv("NANOQK_PLUGINS", handed)
        assert exit_status(fork(partial(work, sweep_dir, launch.stem))) == (RESTART if says else 0)
        error = read_claim(sweep_dir, run.id)["error"]
        assert error is None if says is None else says in error
        (sweep_dir / "claims" / run.id).unlink()
    with (tmp_path / "halves.py").open("a") as file:
        file.write("# changed\n")
    said = forked("sweeps/launch.py", "sweep=mine.yaml").stdout
    assert "warning: the plugin halves has changed: its SHA-256 is " in said and "another sweep_dir= trains all" in said


@pytest.mark.parametrize("command", ["train.py", "sweeps/launch.py sweep=mine.yaml retries=0"])
def test_a_plugin_that_ends_the_program_is_named(
    command: str, words: list[str], tmp_path: Path, forked: Program
) -> None:
    (tmp_path / "mine.yaml").write_text(json.dumps({"overrides": words}))
    script, *asked = command.split()
    at_import, in_a_forward_pass = "raise SystemExit(0)\n" + PLUGIN, PLUGIN.replace("return x[", "exit(); x[")
    for text, status in ((at_import, 2), (in_a_forward_pass, 1)):
        (tmp_path / "halves.py").write_text(text)
        ended = forked(script, *(asked or [*words, "out_dir=o"]), status=status)
        assert "SystemExit: " in ended.stderr + ended.stdout and "Traceback" not in ended.stderr


# -----------------------------------------------------------------------------
# An optimizer and a schedule in one file


RECIPE = """
import torch
from core.plugins import register
from core.schema import options
from training.config import DecayOptions, MuonOptions, OptimizerOptions, ScheduleOptions
from training.optim import Muon

@options
class NoisyOptions(OptimizerOptions):
    name: str = "noisy"
    momentum: float = 0.9

class Noisy(torch.optim.SGD):
    def step(self):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(torch.randn_like(p), alpha=1e-3 * group["lr"])

@options
class OwnMuonOptions(MuonOptions):
    name: str = "own_muon"

class OwnMuon(Muon):
    pass

@options
class RootOptions(ScheduleOptions):
    name: str = "root"
    timescale: int = 2
    def height(self, step, end):
        return (self.timescale / max(self.timescale, step)) ** 0.5

@options
class SquareOptions(DecayOptions):
    name: str = "square"
    def remaining(self, x):
        return (1 - x) ** 2

register(NoisyOptions, Noisy)
register(OwnMuonOptions, OwnMuon)
register(RootOptions)
register(SquareOptions)
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plugins_undone: None) -> Path:
    """The folder of the file, which is the current one."""
    (tmp_path / "recipe.py").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("optim", "name"), [("noisy", "root"), ("own_muon", "square")])
def test_a_recipe_of_ones_own_resumes_bit_for_bit(optim: str, name: str, corpus: Path, recipe: Path) -> None:
    schedule = {"name": name, "warmup_iters": 1} | ({"lr_decay_iters": 6} if name == "square" else {})
    plugin = {"plugins": ["recipe"], "optim": {"name": optim}, "schedule": schedule}
    plugins.load_plugins(["recipe"])
    assert_halves_equal_straight(corpus, recipe, **plugin)
    rates = {line["iter"]: line.get("lr") for line in lines(recipe / "straight")}
    heights = {"root": [0.5, 1, 1, (2 / 3) ** 0.5, 0.5**0.5, 0.4**0.5], "square": [0.5, 1, 0.64, 0.36, 0.16, 0.04]}
    assert [rates[step] for step in range(6)] == pytest.approx([1e-3 * height for height in heights[name]])
    assert f"-{optim}-{name}-" in configured(corpus, recipe / "straight", **plugin).label


def test_a_recipe_of_ones_own_is_listed_swept_or_refused_in_a_line(recipe: Path, corpus: Path, forked: Program) -> None:
    tiny = [*TINY, "data=text", f"data.path={corpus}", "plugins=[recipe]", "wandb.mode=disabled"]
    listed = forked("train.py", "plugins=[recipe]", "--help").stdout
    assert all(word in listed for word in ("optim=noisy", "schedule=root", "schedule.timescale=2"))
    for chosen, message in (
        ("optim=noisy optim.momentm=1", "optim.momentm=1 is unknown; did you mean optim.momentum?"),
        ("optim=noisi", "optim=noisi must be one of adamw, muon, noisy, own_muon; did you mean optim=noisy?"),
        ("optim=mine", "optim=mine must be one of adamw, muon, noisy, own_muon; the plugins register no such option\n"),
        ("optim=noisy optim.learning_rate=0", "optim.learning_rate=0.0 must be > 0"),
    ):
        refused = forked("train.py", *tiny, *chosen.split(), "out_dir=o", status=2).stderr
        assert refused.startswith(f"error: {message}") and refused.count("\n") == 1 and not (recipe / "o").exists()
    sweep = {"overrides": tiny, "grid": {"optim": ["adamw", "noisy"], "optim.learning_rate": [0.001, 0.002]}}
    (recipe / "recipes.yaml").write_text(json.dumps(sweep))
    counts = "super().step(); self.state[self.param_groups[0]['params'][0]]['n'] = 3"
    (recipe / "recipe.py").write_text(RECIPE.replace("super().step()", counts, 1))
    for words in (["train.py", *tiny, "optim=noisy", "out_dir=o"], ["sweeps/launch.py", "sweep=recipes.yaml"]):
        refused = forked(*words, status=2).stderr.splitlines()[-1]
        assert refused.startswith("error: optim=noisy: Noisy.state: n of a parameter of shape (5, 4) is 3")
        assert not (recipe / "o").exists() and not (recipe / "runs").exists()
    for later, said in (  # each acts on the weights at iteration 1,000
        ("self.n = getattr(self, 'n', 0) + 1", "optim=noisy counts in self.n, which no checkpoint has: all that"),
        ("self.n = [*getattr(self, 'n', []), 1]", "optim=noisy counts in self.n, which"),
        (
            "g = self.param_groups[0]; g['k'] = g.get('k', 0) + 1",
            "optim=noisy counts in self.param_groups[0]['k'], which",
        ),
        ("self.state['all'] = {'n': 1}", "optim=noisy: Noisy.state has ['all'], which is no parameter"),
    ):
        (recipe / "recipe.py").write_text(RECIPE.replace("super().step()", f"super().step(); {later}", 1))
        refused = forked("train.py", *tiny, "optim=noisy", "out_dir=o", status=2).stderr
        assert refused.startswith(f"error: {said}") and not (recipe / "o").exists(), refused
    (recipe / "recipe.py").write_text(RECIPE)
    optims = [run.config.optim for run in plan_runs(load_sweep("recipes.yaml", {}), [])]
    found = {(optim.name, optim.learning_rate) for optim in optims}
    assert found == {(name, rate) for name in ("adamw", "noisy") for rate in (0.001, 0.002)}
