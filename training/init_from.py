"""init_from=: a new run begins with weights of another one, or of what others keep (training/origin.py)."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from core import checkpoint
from core.files import expand
from core.plugins import changed_plugins
from core.schema import ConfigError, differences, flatten, require
from data.options import BinOptions, FineWebOptions, TextFileOptions
from data.tokenizer import TOKENIZERS, Tokenizer, from_dict
from data.tokens import Corpus, split_of
from model.gpt import GPT
from model.options import ModelOptions
from training.config import TrainConfig, load_config
from training.origin import Origin, read_origin, sha256_of
from training.session import saved_state
from training.state import checked

NEW_TOKENS = "the text must have its tokens, as any has byte's and gpt2's"
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


def load_initial_weights(config: TrainConfig, model: GPT, corpus: Corpus) -> list[str]:
    """Load the weights of init_from into the model of a run that has no checkpoint of its own. Returns warnings.
    Raises: ConfigError naming what does not fit."""
    if config.init_from is None:
        return []
    begun = not config.fresh and bool(checkpoint.step_dirs(config.run_dir / "ckpt"))
    if begun:
        with suppress(ConfigError):  # it may be gone
            if sha256_of(config.init_from) == config.init_sha256:
                return []
        return [f"init_from={config.init_from} has changed or is gone: the run goes on from its own checkpoint"]
    here = sha256_of(config.init_from)
    told = f"has changed: its SHA-256 is {here[:12]}, not init_sha256={config.init_sha256}"
    advice = "of a run that trains now, name one checkpoint, as RUN/ckpt/step_000500"
    require(here == config.init_sha256, f"init_from={config.init_from} {told}; {advice}")
    origin = read_origin(config.init_from)
    misfits = misfits_of(origin, config, corpus.tokenizer)
    require(not misfits, f"init_from={config.init_from} does not fit (its value -> this run's): {', '.join(misfits)}")
    model.load_state_dict(origin.weights_for(model))
    blocks: list[Any] = [*model.transformer.h]
    for block in blocks:
        block.weights.restart()
    return [f"init_from={config.init_from} {warning}" for warning in warnings_of(origin, config, corpus)]


def misfits_of(origin: Origin, config: TrainConfig, tokenizer: Tokenizer) -> list[str]:
    """The settings in which the origin's model is another function than this run's."""
    free = ["model.name", "model.dropout", "model.activation_checkpointing", *origin.free]
    if config.model.position == "rope":  # nothing is learned for each position
        free.append("model.block_size")
    both = flatten(asdict(origin.config)), flatten(asdict(config.gpt))
    for key, derive in DERIVED.items():
        if (both[0].get(key) or derive(origin.config.model)) == (both[1].get(key) or derive(config.model)):
            free.append(key)
    misfits = differences(*({key: one[key] for key in one if key not in free} for one in both))
    known, ours = origin.tokenizer, f"the {tokenizer.vocab_size} of data.tokenizer={tokenizer.name}: {NEW_TOKENS}"
    if known is None and origin.rows != tokenizer.vocab_size:
        misfits.append(f"its {origin.rows} tokens -> {ours}")
    if known is not None and (known.pieces, known.separator) != (tokenizer.pieces, tokenizer.separator):
        misfits.append(f"the tokens of {known.name} -> {ours}")
    return misfits


def warnings_of(origin: Origin, config: TrainConfig, corpus: Corpus) -> Iterator[str]:
    yield from origin.notes
    if not origin.state:
        return
    theirs = load_config(origin.state["config"])
    if theirs.fault.name != "none":
        yield f"was trained with fault={theirs.fault.name}"
    for said in changed_plugins(origin.state.get("plugins") or {}):
        yield f"may compute something else here: {said}"
    if origin.state.get("corpus_sha256") == corpus.sha256:
        if trained_on_held_out(theirs, corpus):
            yield "was trained on text that this run holds out: the validation loss is too low"
    elif place_of(theirs) == place_of(config):
        yield "was trained on a text that has changed since: it may have had what this run holds out"
    if theirs.init_from is not None:
        yield f"was itself begun from {theirs.init_from}, which may have seen the text that this run holds out"


def place_of(config: TrainConfig) -> tuple[str, str | None]:
    return config.data.name, getattr(config.data, "path", None)


def trained_on_held_out(origin: TrainConfig, corpus: Corpus) -> bool:
    """Whether the run `origin`, on the text of `corpus`, was trained on a part that `corpus` holds out."""
    own_files = isinstance(origin.data, TextFileOptions) and origin.data.val_path is not None
    if own_files or isinstance(origin.data, FineWebOptions | BinOptions):  # always holds the same tokens out
        return False
    trained = split_of(origin.data, len(corpus.tokens), origin.model.block_size).train
    return any(start < end and first < last for first, end in trained for start, last in corpus.split.val)


def begun_with(given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """group -> the origin's settings of it, and of the data its kind of tokens. Where the origin is gone they are those
    of the run in out_dir, which goes on; {} without one: sha256_of() raises. given: what the command line names."""
    try:
        origin = read_origin(str(given["init_from"]))
        config, tokenizer = origin.config, origin.tokenizer
    except ConfigError:
        saved = checked(checkpoint.peek(expand(str(given.get("out_dir"))) / "ckpt"))
        if saved.get("config", {}).get("init_from") != given["init_from"]:
            return {}
        config, tokenizer = load_config(saved["config"]).gpt, from_dict(saved["tokenizer"])
    begun = asdict(config)
    if tokenizer is not None and tokenizer.name in TOKENIZERS and given.get("data.tokenizer") in (None, tokenizer.name):
        size = tokenizer.vocab_size if tokenizer.name == "bpe" else None
        begun["data"] = {"tokenizer": tokenizer.name, "vocab_size": size}
    return begun
