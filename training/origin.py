"""Weights that a run can begin with, read from where others keep them: init_from= and scripts/import_checkpoint.py."""

import functools
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from core import checkpoint
from core.device import total_memory
from core.files import ANYWHERE, expand, file_sha256, read_json
from core.schema import ConfigError, one_line, require, settings_of, show
from data.corpora import probe_hub
from data.hf_tokenizer import folder_tokenizer
from data.nanogpt import read_meta, require_flat
from data.tokenizer import GPT2Tokenizer, Tokenizer, fetch_gpt2, from_dict
from model.gpt import GPT
from model.hf import gpt2_names, renamed, settings_from
from model.options import GPTConfig
from training.config import load_config

HUB = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
READABLE = (
    "what can be read: a run or one of its checkpoints, nanoGPT's ckpt.pt, a Hugging Face folder (config.json and "
    f"model.safetensors) of GPT-2 or of scripts/export_hf.py, and {', '.join(HUB)}"
)
PICKLE_BYTES = 2**22  # of data.pkl; of GPT-2 XL with an optimizer it has 230 kB
PADDING = 128  # an embedding may have fewer rows than that past its tokenizer: nanoGPT has 50304 for 50257
GPT2_TOKENS = 50257
EMBEDDINGS = ("transformer.wte.weight", "lm_head.weight")


@dataclass(frozen=True)
class Origin:
    """A model that others keep, or a run of ours."""

    config: GPTConfig
    weights: Callable[[GPT], dict[str, Tensor]]  # for a model of ours, under our names
    rows: int  # of the embedding
    tokenizer: Tokenizer | None  # None where it is unknown
    notes: list[str] = field(default_factory=list)
    free: tuple[str, ...] = ()  # settings in which a model may differ
    state: dict[str, Any] = field(default_factory=dict)  # of a checkpoint of ours
    step: int = 0  # the updates that it had

    def weights_for(self, model: GPT) -> dict[str, Tensor]:
        """Rows past the tokenizer are cut. The model may be on the meta device. Raises: ConfigError where they are not
        those of the settings."""
        weights = {**self.weights(model)}
        for name in weights.keys() & EMBEDDINGS:
            weights[name] = weights[name][: model.vocab_size] if weights[name].dim() else weights[name]
        if not self.state:  # others keep half precision, too
            weights = {name: w.float() if w.is_floating_point() else w for name, w in weights.items()}
        try:
            checkpoint.check_weights(weights, model)
        except checkpoint.CorruptCheckpoint as error:
            raise ConfigError(f"the weights are not those of the checkpoint's settings: {error}") from error
        return weights


def read_origin(name: str, meta: str | None = None, key: str = "init_from") -> Origin:
    """What `key`=`name` holds. meta: nanoGPT's meta.pkl. Raises: ConfigError that names `key`."""
    file = weights_file(name, key)
    try:
        with checkpoint.errors_as_corrupt(file.parent):
            return read_file(file, meta, file.stat().st_mtime_ns)
    except (SafetensorError, checkpoint.CorruptCheckpoint, ConfigError) as error:
        raise ConfigError(f"{key}={name} cannot be loaded: {error}") from error


@functools.lru_cache(1)  # a command reads it for its settings, its tokens and its weights
def read_file(file: Path, meta: str | None, mtime: int) -> Origin:
    if file.suffix != ".safetensors":
        return read_nanogpt(file, meta)
    require(meta is None, f"meta={meta} is for nanoGPT's checkpoints")
    return read_folder(file) if (file.parent / "config.json").is_file() else read_run(file.parent)


def weights_file(name: str, key: str = "init_from") -> Path:
    """The file whose SHA-256 names the weights: of a nanoGPT checkpoint, a Hugging Face folder, a model of the Hub, a
    checkpoint of ours, or a run's best one. Raises: ConfigError."""
    path = expand(name)
    if name in HUB and not path.exists():
        path = fetch_folder(name, key)
    if path.is_file():
        require(path.suffix == ".pt", f"{key}={name} cannot be read; {READABLE}")
        return path
    ours = any((path / name).exists() for name in ("ckpt", "config.json", checkpoint.MANIFEST))
    if not ours and (path / "ckpt.pt").is_file():  # nanoGPT's out_dir
        return path / "ckpt.pt"
    folder = path if (path / "config.json").is_file() else checkpoint.resolve(path, "best", key)
    file = folder / "model.safetensors"
    require(file.is_file(), f"{key}={name} has no model.safetensors; {READABLE}")
    return file


def sha256_of(name: str) -> str:
    file = weights_file(name)
    return sha256_at(file, file.stat().st_mtime_ns)


@functools.cache
def sha256_at(file: Path, mtime: int) -> str:
    """Once for all runs of a sweep."""
    return file_sha256(file, total_memory(torch.device("cpu")))


def fetch_folder(name: str, key: str) -> Path:
    """A model of the Hub, from its cache or the network. Raises: ConfigError."""
    from huggingface_hub import snapshot_download

    repo, files = f"openai-community/{name}", ["config.json", "model.safetensors", "vocab.json", "merges.txt"]
    fetch = functools.partial(snapshot_download, repo, allow_patterns=files)
    with suppress(Exception):  # not in the cache
        return Path(fetch(local_files_only=True))
    problem = probe_hub(repo, None, "model")
    absent = f"{key}={name} is not in the Hub's cache, and the Hub is out of reach ({problem})"
    require(problem is None, f"{absent}: name a folder that has it")
    try:
        return Path(fetch())
    except Exception as error:  # of requests, the Hub and the file system
        raise ConfigError(f"{key}={name} cannot be fetched: {one_line(error)}") from error


# -----------------------------------------------------------------------------
# Ours, Hugging Face's, nanoGPT's


def read_run(folder: Path) -> Origin:
    saved = checkpoint.load(folder, only="model")
    weights, tokenizer = saved.tensors["model"], from_dict(saved.state["tokenizer"])
    config = load_config(saved.state["config"]).gpt
    return Origin(config, lambda _: weights, tokenizer.vocab_size, tokenizer, state=saved.state, step=saved.step)


def read_folder(file: Path) -> Origin:
    theirs, weights = read_json(file.parent / "config.json", ANYWHERE), checkpoint.mapped_tensors(file)
    if theirs.get("model_type") == "gpt2":
        weights = gpt2_names(weights, tied=theirs.get("tie_word_embeddings", True))
    config = settings_from(theirs, weights)
    free = ("qk_norm.eps",) if config.model.bias or config.model.norm == "rmsnorm" else ("model.bias",)
    notes = [f"was trained with fault={show(theirs['fault'])[:50]}"] if "fault" in theirs else []
    return with_tokens(
        Origin(
            config, lambda model: renamed(model, weights, back=True), theirs["vocab_size"],
            folder_tokenizer(file.parent), notes, free,
        )
    )  # fmt: skip


def read_nanogpt(file: Path, meta: str | None) -> Origin:
    """Without `meta` its tokens are GPT-2's if it has so many, else unknown."""
    try:
        require_plain(file)
        saved = torch.load(file, map_location="cpu", weights_only=True)
        args = {"bias": True, "dropout": 0.0, **saved["model_args"]}
        require(all(map(is_plain, saved["model"].values())), "its weights are no plain tensors")
        require(saved["iter_num"] >= 0, f"iter_num={saved['iter_num']}")
        weights, step = gpt2_names(saved["model"], tied=False), int(saved["iter_num"])
        embedding = weights[EMBEDDINGS[0]]
        tied = torch.equal(weights.get(EMBEDDINGS[1], embedding), embedding)
        model = {key: args[key] for key in ("n_layer", "n_head", "n_embd", "block_size", "bias", "dropout")}
        config: GPTConfig = settings_of(GPTConfig, {"model": model | {"tied": tied}})
    except Exception as error:  # of pickle, zipfile, torch; another program's content
        raise ConfigError(f"it is not what nanoGPT writes: {one_line(error)[:150]}; {READABLE}") from error
    tokenizer: Tokenizer | None = None
    if meta is not None:
        tokenizer = read_meta(expand(meta), f"meta={meta}")
    elif 0 <= len(embedding) - GPT2_TOKENS < PADDING:
        tokenizer = GPT2Tokenizer(fetch_gpt2("tokenizer"), has_separator=True)
    weights = gpt2_names(weights, tied)
    return with_tokens(Origin(config, lambda _: weights, len(embedding), tokenizer, step=step))


def require_plain(file: Path) -> None:
    """Refuse what torch.save() does not write: a file of a few bytes may unpack to any size."""
    with zipfile.ZipFile(file) as parts:
        packed = [part.filename for part in parts.infolist() if part.compress_type != zipfile.ZIP_STORED]
        require(not packed, f"{file.name} is compressed")
        for part in (part for part in parts.infolist() if part.filename.endswith("/data.pkl")):
            require(part.file_size <= PICKLE_BYTES, f"{part.filename} has more than {PICKLE_BYTES:,} bytes")
            require_flat(parts.read(part))


def is_plain(value: Any) -> bool:
    """Whether it is a tensor in memory as large as its shape says."""
    dense = isinstance(value, Tensor) and value.layout == torch.strided and value.device.type == "cpu"
    return dense and value.nbytes <= value.untyped_storage().nbytes()


def with_tokens(origin: Origin) -> Origin:
    """The origin, with a note of rows that are cut. Raises: ConfigError where they are not of its tokenizer."""
    if origin.tokenizer is None:
        origin.notes.append(
            "has no vocabulary, so that of this run's data is taken (import_checkpoint.py meta= gives it one)"
        )
        return origin
    V, rows = origin.tokenizer.vocab_size, origin.rows
    require(V <= rows < V + PADDING, f"its embedding has {rows} rows, its tokenizer {V} tokens")
    if rows > V:
        origin.notes.append(f"has {rows} rows for {V} tokens: the last {rows - V} are cut")
    return origin
