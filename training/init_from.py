"""init_from=: a new run begins with weights of another one, or of what others keep (training/origin.py)."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
import yaml
from torch import Tensor

from core import checkpoint
from core.files import expand, load_yaml
from core.schema import ConfigError, differences, flatten, require
from data.options import CORPORA, BinOptions, FineWebOptions, FoldedTextOptions, TextFileOptions
from data.tokenizer import Tokenizer
from data.tokens import Corpus, split_of
from model.gpt import GPT
from model.options import GPTConfig, RMSNormOptions
from training.config import TrainConfig, load_config
from training.origin import Origin, read_origin, sha256_of
from training.session import saved_state


def with_init_sha256(config: TrainConfig) -> TrainConfig:
    """The settings with init_sha256, which decides the run's name and trajectory. A run that resumes in out_dir keeps
    the one that it began with, whatever became of init_from. Raises: ConfigError."""
    if config.init_from is None:
        return config
    moved = config.fresh and expand(config.init_from).resolve().is_relative_to(config.run_dir.resolve())
    require(not moved, f"init_from={config.init_from} lies in the run directory, which fresh=true moves aside")
    if config.init_sha256 is not None:
        return config
    begun = {} if config.out_dir is None else saved_state(config).get("config", {})
    kept = begun.get("init_sha256") if begun.get("init_from") == config.init_from else None
    return replace(config, init_sha256=kept or sha256_of(config.init_from))


def load_initial_weights(config: TrainConfig, model: GPT, corpus: Corpus) -> list[str]:
    """Load the weights of init_from into the model of a run that has no checkpoint of its own. Returns warnings.

    Raises: ConfigError naming what does not fit.
    """
    if config.init_from is None:
        return []
    begun = not config.fresh and bool(checkpoint.step_dirs(config.run_dir / "ckpt"))
    try:
        here = sha256_of(config.init_from)
    except ConfigError:
        if not begun:
            raise
        here = "none"
    if begun:
        changed = f"init_from={config.init_from} has changed or is gone: the run goes on from its own checkpoint"
        return [] if here == config.init_sha256 else [changed]
    require(
        here == config.init_sha256,
        f"init_from={config.init_from} has changed: its SHA-256 is {here[:12]}, not init_sha256={config.init_sha256}",
    )
    origin = read_origin(config.init_from)
    misfits = misfits_of(origin, config, model, corpus.tokenizer)
    require(not misfits, f"init_from={config.init_from} does not fit (its value -> this run's): {', '.join(misfits)}")
    model.load_state_dict(fitted(origin, config.gpt, model))
    blocks: list[Any] = [*model.transformer.h]
    for block in blocks:
        block.weights.restart()
    return [f"init_from={config.init_from} {warning}" for warning in warnings_of(origin, config, corpus)]


def misfits_of(origin: Origin, config: TrainConfig, model: GPT, tokenizer: Tokenizer) -> list[str]:
    """The settings in which the origin's model is another function than this run's."""
    free = ["model.name", "model.dropout", "model.activation_checkpointing"]
    if config.model.position == "rope":  # nothing is learned for each position
        free.append("model.block_size")
    if not origin.state and None not in (eps_of(origin.config), eps_of(config.gpt)):
        free.append("qk_norm.eps")
    if not origin.state and config.model.bias and origin.config.model.norm == "layernorm":
        free.append("model.bias")  # a folder that lacks them has zeros
    theirs, ours = flatten(asdict(origin.config)), flatten(asdict(config.gpt))
    derived = {
        "model.mlp_hidden": 4 * config.model.n_embd,
        "attention.head_dim": config.model.n_embd // config.model.n_head,
    }
    for key, default in derived.items():
        if (theirs.get(key) or default) == (ours.get(key) or default):
            free.append(key)
    misfits = differences(*({key: one[key] for key in one if key not in free} for one in (theirs, ours)))
    if origin.tokenizer is not None and not same_tokens(origin.tokenizer, tokenizer):
        misfits.append(
            f"the tokens of {origin.tokenizer.name} -> the {tokenizer.vocab_size} of data.tokenizer={tokenizer.name}"
        )
    if not misfits:  # a vocabulary that is unknown has a size
        shapes = ({name: [*w.shape] for name, w in named.items()} for named in (origin.weights, model.state_dict()))
        theirs, ours = shapes
        misfits = differences(theirs, {name: ours.get(name) for name in theirs})[:3]
    return misfits


def same_tokens(a: Tokenizer, b: Tokenizer) -> bool:
    return a.pieces == b.pieces and a.separator == b.separator and (a.name == "none") == (b.name == "none")


def eps_of(config: GPTConfig) -> float | None:
    """Of the QK norm, where the rows of queries and keys can be scaled instead: see fitted()."""
    return config.qk_norm.eps if isinstance(config.qk_norm, RMSNormOptions) else None


def fitted(origin: Origin, config: GPTConfig, model: GPT) -> Mapping[str, Tensor]:
    """The origin's weights for a model of `config`. RMSNorm of c x with c^2 eps is that of x with eps: where the eps of
    QK norms differ, the rows of queries and keys are scaled. Biases that a folder lacks are zero."""
    weights = dict(origin.weights)
    theirs, ours = eps_of(origin.config), eps_of(config)
    if theirs is not None and ours is not None and theirs != ours:
        c = math.sqrt(ours / theirs)
        for i, attention in enumerate(model.attentions):
            name = f"transformer.h.{i}.attn.c_attn.weight"
            q, k, v = weights[name].split(attention.c_attn.split_sizes)
            weights[name] = torch.cat([q * c, k * c, v])
    return {name: weights.get(name, torch.zeros_like(w)) for name, w in model.state_dict().items()}


def warnings_of(origin: Origin, config: TrainConfig, corpus: Corpus) -> list[str]:
    warnings = list(origin.notes)
    if origin.tokenizer is None:
        warnings.append("has no vocabulary to compare with this run's")
    if not origin.state:
        return warnings
    theirs = load_config(origin.state["config"])
    if theirs.fault.name != "none":
        warnings.append(f"was trained with fault={theirs.fault.name}")
    if origin.state.get("corpus_sha256") == corpus.sha256:
        if trained_on_held_out(theirs, corpus):
            warnings.append("was trained on text that this run holds out: the validation loss is too low")
    elif place_of(theirs) == place_of(config):
        warnings.append("was trained on a text that has changed since: it may have had what this run holds out")
    if theirs.init_from is not None:
        began = f"was itself begun from {theirs.init_from}"
        warnings.append(f"{began}, which may have seen the text that this run holds out")
    return warnings


def place_of(config: TrainConfig) -> tuple[str, str | None]:
    return config.data.name, getattr(config.data, "path", None)


def trained_on_held_out(origin: TrainConfig, corpus: Corpus) -> bool:
    """Whether the run `origin`, on the text of `corpus`, was trained on a part that `corpus` holds out."""
    own_files = isinstance(origin.data, TextFileOptions) and origin.data.val_path is not None
    if own_files or isinstance(origin.data, FineWebOptions | BinOptions):  # always holds the same tokens out
        return False
    trained = split_of(origin.data, len(corpus.tokens), origin.model.block_size).train
    return any(start < end and first < last for first, end in trained for start, last in corpus.split.val)


# -----------------------------------------------------------------------------
# What a command leaves open


def left_open(named: Mapping[str, Any]) -> list[str]:
    """Overrides for what a command with init_from= does not name: the settings of the origin's model and, where the
    corpus is a text, its kind of tokens. named: the keys that the command and its presets give, with their values.

    Raises: ConfigError where init_from cannot be read, unless the run in out_dir began from it: that has them.
    """
    init_from = str(named["init_from"])
    try:
        origin = read_origin(init_from)
        config, tokenizer = origin.config, origin.tokenizer
        tokens = {} if tokenizer is None else {"tokenizer": tokenizer.name, "vocab_size": tokenizer.vocab_size}
    except ConfigError:
        begun = config_in(named.get("out_dir"))
        if begun is None or begun.init_from != init_from:
            raise
        config, tokens = begun.gpt, {key: getattr(begun.data, key, None) for key in ("tokenizer", "vocab_size")}
    words = []
    for group, options in asdict(config).items():
        if group not in named:  # what is named, a preset or another variant, must fit
            values = {f"{group}.{key}": value for key, value in options.items() if (group, key) != ("model", "name")}
            name = values.pop(f"{group}.name", None)
            words += [] if name is None else [f"{group}={name}"]
            words += [f"{key}={json.dumps(value)}" for key, value in values.items()]
    kind = CORPORA.get(named.get("data", TrainConfig.data.name), object)
    if issubclass(kind, FoldedTextOptions) and tokens.get("tokenizer") is not None:
        words.append(f"data.tokenizer={tokens['tokenizer']}")
        words += [f"data.vocab_size={tokens['vocab_size']}"] if tokens["tokenizer"] == "bpe" else []
    return [word for word in words if word.partition("=")[0] not in named]


def config_in(out_dir: Any) -> TrainConfig | None:
    """The settings of the run in a directory; None where there is none."""
    try:
        return load_config(load_yaml((expand(str(out_dir)) / "config.yaml").read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ConfigError):
        return None
