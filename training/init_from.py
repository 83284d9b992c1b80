"""init_from=: a new run begins with the weights of another run, or of a folder that scripts/export_hf.py writes."""

import functools
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from core import checkpoint
from core.files import expand, file_sha256, read_json
from core.schema import ConfigError, differences, flatten, require
from data.hf_tokenizer import tokenizer_json
from data.options import FineWebOptions
from data.tokenizer import Tokenizer
from data.tokens import Corpus, split_of
from model.gpt import GPT
from model.hf import hugging_face, load_hugging_face
from model.options import ModelOptions
from training.config import TrainConfig, load_config
from training.session import saved_state

# config.json's keys that change neither the logits of given weights nor their tokens
HF_FREE = (
    "architectures", "bos_token_id", "eos_token_id", "dtype", "resid_pdrop", "embd_pdrop", "attn_pdrop", "rope_theta",
    "n_inner",
)  # fmt: skip
# setting -> the value that its null means
DERIVED: dict[str, Callable[[ModelOptions], int]] = {
    "model.mlp_hidden": lambda model: 4 * model.n_embd,
    "attention.head_dim": lambda model: model.n_embd // model.n_head,
}


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


def weights_file(init_from: str) -> Path:
    """The weights of a Hugging Face folder, of a checkpoint, or of a run's best one. Raises: ConfigError."""
    path = expand(init_from)
    folder = path if (path / "config.json").is_file() else checkpoint.resolve(path, "best", "init_from")
    file = folder / "model.safetensors"
    require(file.is_file(), f"init_from={init_from} has no model.safetensors")
    return file


def sha256_of(init_from: str) -> str:
    file = weights_file(init_from)
    return sha256_at(file, file.stat().st_mtime_ns)


@functools.cache
def sha256_at(file: Path, mtime: int) -> str:
    """Once for all runs of a sweep."""
    return file_sha256(file)


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
    file = weights_file(config.init_from)
    load = load_folder if (file.parent / "config.json").is_file() else load_initial_checkpoint
    try:
        with checkpoint.errors_as_corrupt(file.parent):
            misfits, warnings = load(file, config, model, corpus)
    except (SafetensorError, checkpoint.CorruptCheckpoint) as error:
        raise ConfigError(f"init_from={config.init_from} cannot be loaded: {error}") from error
    require(not misfits, f"init_from={config.init_from} does not fit (its value -> this run's): {', '.join(misfits)}")
    blocks: list[Any] = [*model.transformer.h]
    for block in blocks:
        block.weights.restart()
    return [f"init_from={config.init_from} {warning}" for warning in warnings]


def load_initial_checkpoint(file: Path, config: TrainConfig, model: GPT, corpus: Corpus) -> tuple[list[str], list[str]]:
    """Returns what does not fit, and warnings."""
    saved = checkpoint.load(file.parent)
    origin = load_config(saved.state["config"])
    free = ["model.name", "model.dropout", "model.activation_checkpointing"]
    if config.model.position == "rope":  # nothing is learned for each position
        free.append("model.block_size")
    theirs, ours = flatten(asdict(origin.gpt)), flatten(asdict(config.gpt))
    for key, derive in DERIVED.items():
        if (theirs.get(key) or derive(origin.model)) == (ours.get(key) or derive(config.model)):
            free.append(key)
    misfits = differences(*({key: one[key] for key in one if key not in free} for one in (theirs, ours)))
    if saved.state["tokenizer"] != corpus.tokenizer.to_dict():
        misfits.append(other_tokens(saved.state["tokenizer"]["name"], corpus.tokenizer))
    if not misfits:
        model.load_state_dict(saved.tensors["model"])
    warnings = [] if origin.fault.name == "none" else [f"was trained with fault={origin.fault.name}"]
    if saved.state.get("corpus_sha256") == corpus.sha256:
        if trained_on_held_out(origin, corpus):
            warnings.append("was trained on text that this run holds out: the validation loss is too low")
    elif place_of(origin) == place_of(config):
        warnings.append("was trained on a text that has changed since: it may have had what this run holds out")
    if origin.init_from is not None:
        warnings.append(
            f"was itself begun from {origin.init_from}, which may have seen the text that this run holds out"
        )
    return misfits, warnings


def place_of(config: TrainConfig) -> tuple[str, str | None]:
    return config.data.name, getattr(config.data, "path", None)


def trained_on_held_out(origin: TrainConfig, corpus: Corpus) -> bool:
    """Whether the run `origin`, on the text of `corpus`, was trained on a part that `corpus` holds out."""
    if isinstance(origin.data, FineWebOptions):  # always holds the same tokens out
        return False
    trained = split_of(origin.data, len(corpus.tokens), origin.model.block_size).train
    return any(start < end and first < last for first, end in trained for start, last in corpus.split.val)


def load_folder(file: Path, config: TrainConfig, model: GPT, corpus: Corpus) -> tuple[list[str], list[str]]:
    """Returns what does not fit, and warnings."""
    theirs, tokenizer = (read_json(file.parent / name) for name in ("config.json", "tokenizer.json"))
    ours, our_weights = hugging_face(model)
    free = [*HF_FREE, "max_position_embeddings"] if config.model.position == "rope" else HF_FREE
    keys = [key for key, value in ours.items() if key not in free and theirs.get(key) != value]
    misfits = differences({key: theirs.get(key) for key in keys}, {key: ours[key] for key in keys})
    their_vocab, our_vocab = (
        content.get("model", {}).get("vocab") for content in (tokenizer, tokenizer_json(corpus.tokenizer) or {})
    )
    if not misfits and None not in (their_vocab, our_vocab) and their_vocab != our_vocab:
        misfits.append(other_tokens("tokenizer.json", corpus.tokenizer))
    weights = load_file(file)
    shapes = ({name: [*w.shape] for name, w in named.items()} for named in (weights, our_weights))
    misfits = misfits or differences(*shapes)[:3]  # the first kind of misfit is enough
    misfits = misfits or [f"{name} is not zero" for name in load_hugging_face(model, weights)]
    warnings = [f"was trained with fault={theirs['fault']}"] if "fault" in theirs else []
    if None in (their_vocab, our_vocab):
        warnings.append("has no vocabulary to compare with this run's")
    return misfits, warnings


def other_tokens(theirs: str, ours: Tokenizer) -> str:
    return f"the tokens of {theirs} -> the {ours.vocab_size} of data.tokenizer={ours.name}"
