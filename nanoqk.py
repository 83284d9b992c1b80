"""nanoQK from Python and in notebooks: nanoqk.train("model=nano_cpu", "qk_norm=rms") returns a Run.
What is wrong with a setting raises ConfigError, with the line that the command line prints. Ctrl-C saves a checkpoint,
then raises KeyboardInterrupt, in the main thread. One thread at a time trains; others wait.
"""
# ruff: noqa: E402

import importlib
import sys
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

# Our modules have common names: they come from this folder, whatever the current one holds.
ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))
try:
    for _name in ("core", "data", "model", "training", "train", "sample", "sweeps"):
        _found = importlib.import_module(_name)
        if ROOT not in Path(_found.__file__ or [*_found.__path__][0]).resolve().parents:
            raise ImportError(f"nanoqk needs its own module {_name}, but has got {_found}: rename that one")
finally:
    sys.path.remove(str(ROOT))

import torch
from torch import Tensor

from core.cli import read_arguments
from core.device import resolve_device, resolve_dtype, settings_restored
from core.files import expand
from core.plugins import load_plugins
from core.process import one_at_a_time, pass_signal_on, printable, raising_one_line, refuse_fork
from core.record import Metrics
from core.rundir import read_settings, read_summary, require_run, state_of_run
from core.schema import ConfigError, require, settings_of
from data.tokenizer import Tokenizer
from model.diagnostics import attention_weights
from model.gpt import GPT
from sample import LoadedRun, SampleConfig, continuations, default_prompt, load_asked_run
from sweeps import launch
from sweeps.plan import compose, read_plan
from train import run as train_run
from training.config import TrainConfig, load_config
from training.init_from import with_init_sha256


class Run:
    """A run directory. plugins: modules to import first. checkpoint: best, latest or step_000500."""

    def __init__(self, path: str | Path, plugins: Iterable[str] = (), checkpoint: str = "best", device: str = "auto"):
        load_plugins(plugins)
        asked = settings_of(SampleConfig, {"run": str(path), "device": device})
        self.name, self.path = str(expand(path)), expand(path).absolute()  # os.chdir() changes nothing
        self.checkpoint, self.device = checkpoint, resolve_device(asked.device)
        require_run(self.path, path)

    def __repr__(self) -> str:
        loss, reason = self.summary.get("val/loss_min"), self.summary.get("reason")
        return printable(f"Run({self.name!r}): {self.state}, " + (reason or f"lowest val/loss {loss}"))

    @property
    def state(self) -> str:
        """done, diverged, stopped, failed or running."""
        return state_of_run(self.path)

    @property
    def summary(self) -> dict[str, Any]:
        """The final numbers, as "val/loss_min", and the "reason" of a run that diverged; {} before the end."""
        return read_summary(self.path)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The logged lines, for pandas.DataFrame; those of evaluations have "val/loss"."""
        return Metrics.read(self.path / "metrics.jsonl")

    @property
    def diagnostics(self) -> list[dict[str, Any]]:
        """A line an evaluation, with values of each layer and head, as "attn/entropy/layer_0/head_1"."""
        return Metrics.read(self.path / "diagnostics.jsonl")

    @cached_property
    def config(self) -> TrainConfig:
        return load_config(read_settings(self.path))

    @cached_property
    def _loaded(self) -> LoadedRun:
        return load_asked_run(str(self.path), self.checkpoint, self.device)

    @property
    def model(self) -> GPT:
        return self._loaded.model

    @property
    def tokenizer(self) -> Tokenizer:
        return self._loaded.tokenizer

    def sample(self, start: str | None = None, **settings: Any) -> list[str]:
        """Texts that begin with `start` (None: line feed). settings: sample.py's, as num_samples=3, temperature=0.5."""
        for key in settings.keys() & {"run", "checkpoint", "device", "stream"}:
            raise ConfigError(f"{key}={settings[key]} is no setting of one sample: nanoqk.Run() takes the run's")
        refuse_fork()
        require(start != "", "start= must hold at least one character")
        prompt = start or default_prompt(self.tokenizer)
        asked = settings_of(SampleConfig, {"run": str(self.path), "start": prompt, **settings})
        return continuations(asked, self._loaded, prompt, resolve_dtype(asked.dtype, self.device))

    @torch.no_grad()
    def logits(self, text: str) -> Tensor:
        """The logits (T, V) of the token after each token of the text."""
        return self.model(self._idx(text))[0][0].cpu()

    def attention(self, text: str) -> list[Tensor]:
        """The weights (n_head, T, T) of each layer: row i is how token i weighs tokens 0 to i."""
        return [weights[0].cpu() for weights in attention_weights(self.model, self._idx(text))]

    def _idx(self, text: str) -> Tensor:
        refuse_fork()
        tokens, most = self.tokenizer.encode(text).tolist(), self.model.block_size
        require(0 < len(tokens) <= most, f"the text has {len(tokens)} tokens: give 1 to {most} (model.block_size)")
        return torch.tensor([tokens], device=self.device)  # (1, T)


def train(*overrides: str) -> Run:
    """Train a run, or go on with it, as train.py does. One that diverges is returned as well: its state says so."""
    with one_at_a_time(), settings_restored(), raising_one_line():
        config = with_init_sha256(load_config(compose(overrides)))
        require(not config.dry_run, "dry_run=true trains nothing: it is for the command line")
        status = pass_signal_on(train_run(config))
    if status == 1:
        raise RuntimeError(f"{config.run_dir} is damaged, as its train.log says; fresh=true starts it anew")
    return Run(config.run_dir)


def sweep(*words: str) -> list[Run]:
    """Train what is left of a sweep, as sweeps/launch.py does: nanoqk.sweep("sweep=two_norms"). Returns its runs."""
    with one_at_a_time(), settings_restored(), raising_one_line():
        asked, overrides = read_arguments(launch.LaunchOptions, [*words], passes_on=True)
        require(not asked.dry_run, "dry_run=true trains nothing: it is for the command line")
        status = pass_signal_on(launch.run(asked, overrides))
    if status != 0:
        raise RuntimeError(f"{asked.directory}: some runs have not ended: python sweeps/status.py says why")
    return runs(asked.directory)


def runs(sweep_dir: str | Path, plugins: Iterable[str] = ()) -> list[Run]:
    """The runs of a sweep that have begun: nanoqk.runs("runs/two_norms")."""
    load_plugins(plugins)
    folders = [expand(sweep_dir) / run.id for run in read_plan(expand(sweep_dir))]
    return [Run(folder) for folder in folders if (folder / "config.yaml").exists()]
