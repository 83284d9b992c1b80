"""Weights that a run can begin with, read from where others keep them: init_from= and scripts/import_checkpoint.py."""

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from core import checkpoint
from core.files import expand, file_sha256, read_json
from core.schema import ConfigError, one_line, require, settings_of, show
from data.corpora import probe_hub
from data.hf_tokenizer import folder_tokenizer
from data.nanogpt import read_meta
from data.tokenizer import GPT2Tokenizer, Tokenizer, fetch_gpt2, from_dict
from model.hf import from_hugging_face
from model.options import GPTConfig

HUB = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
READABLE = (
    "what can be read: a run or one of its checkpoints, nanoGPT's ckpt.pt, a Hugging Face folder (config.json and "
    f"model.safetensors) of GPT-2, Llama, Qwen3 or DeepSeek-V3, and {', '.join(HUB)}"
)
PADDING = 128  # an embedding may have fewer rows than that past its tokenizer: nanoGPT has 50304 for 50257


@dataclass(frozen=True)
class Origin:
    """weights: under our names. tokenizer: None where it is unknown. state: of a checkpoint of ours, else {}.

    step: the updates that it had. notes: what a person should know.
    """

    config: GPTConfig
    weights: dict[str, Tensor]
    tokenizer: Tokenizer | None
    state: dict[str, Any] = field(default_factory=dict)
    step: int = 0
    notes: tuple[str, ...] = ()


def read_origin(name: str, meta: str | None = None, key: str = "init_from") -> Origin:
    """What `key`=`name` holds. meta: nanoGPT's meta.pkl. Raises: ConfigError that names `key`."""
    file = weights_file(name, key)
    try:
        return read_file(file, meta, file.stat().st_mtime_ns)
    except (SafetensorError, checkpoint.CorruptCheckpoint) as error:
        raise ConfigError(f"{key}={name} cannot be loaded: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{key}={name}: {error}") from error


@functools.lru_cache(1)
def read_file(file: Path, meta: str | None, mtime: int) -> Origin:
    """mtime: so that a file that has changed is read again."""
    if (file.parent / checkpoint.MANIFEST).is_file() and file.name == "model.safetensors":
        require(meta is None, f"meta={meta} is for nanoGPT's checkpoints")
        return read_run(file.parent)
    if file.name == "model.safetensors":
        require(meta is None, f"meta={meta} is for nanoGPT's checkpoints")
        return read_folder(file)
    return read_nanogpt(file, meta)


def weights_file(name: str, key: str = "init_from") -> Path:
    """The file whose SHA-256 names the weights: of a nanoGPT checkpoint, a Hugging Face folder, a model of the Hub, a
    checkpoint of ours, or a run's best one. Raises: ConfigError."""
    path = expand(name)
    if name in HUB and not path.exists():
        path = fetch_folder(name, key)
    if path.is_file():
        require(path.suffix in (".pt", ".pth"), f"{key}={name} cannot be read; {READABLE}")
        return path
    try:
        folder = path if (path / "config.json").is_file() else checkpoint.resolve(path, "best", key)
    except ConfigError as error:
        raise ConfigError(f"{error}; {READABLE}" if path.is_dir() else str(error)) from error
    file = folder / "model.safetensors"
    require(file.is_file(), f"{key}={name} has no model.safetensors; {READABLE}")
    return file


def sha256_of(name: str) -> str:
    file = weights_file(name)
    return sha256_at(file, file.stat().st_mtime_ns)


@functools.cache
def sha256_at(file: Path, mtime: int) -> str:
    """Once for all runs of a sweep."""
    return file_sha256(file)


def fetch_folder(name: str, key: str) -> Path:
    """A model of the Hub, from its cache or the network. Raises: ConfigError."""
    from huggingface_hub import snapshot_download

    repo = f"openai-community/{name}"
    files = ["config.json", "model.safetensors", "vocab.json", "merges.txt"]
    try:
        return Path(snapshot_download(repo, allow_patterns=files, local_files_only=True))
    except Exception:  # noqa: S110  # not in the cache
        pass
    problem = probe_hub(repo, None, "model")
    told = f"{key}={name} is not in the Hub's cache, and the Hub is out of reach ({problem}): name a folder that has it"
    require(problem is None, told)
    try:
        return Path(snapshot_download(repo, allow_patterns=files))
    except Exception as error:  # of requests, the Hub and the file system
        raise ConfigError(f"{key}={name} cannot be fetched: {one_line(error)}") from error


# -----------------------------------------------------------------------------
# Ours, Hugging Face's, nanoGPT's


def read_run(folder: Path) -> Origin:
    from training.config import load_config

    saved = checkpoint.load(folder)
    with checkpoint.errors_as_corrupt(folder):
        config, tokenizer = load_config(saved.state["config"]), from_dict(saved.state["tokenizer"])
    return Origin(config.gpt, saved.tensors["model"], tokenizer, saved.state, saved.step)


def read_folder(file: Path) -> Origin:
    config, tokenizer = read_json(file.parent / "config.json"), folder_tokenizer(file.parent)
    try:
        settings, weights = from_hugging_face(config, load_file(file))
    except KeyError as error:
        raise ConfigError(f"it has no {error.args[0]}") from error
    fault = config.get("fault")
    notes = [f"was trained with fault={fault}"] if fault is not None else []
    return joined(settings, weights, tokenizer, 0, notes)


def read_nanogpt(file: Path, meta: str | None) -> Origin:
    try:
        saved = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # of pickle, zipfile, torch
        raise ConfigError(f"it is no checkpoint of plain tensors: {one_line(error)[:150]}; {READABLE}") from error
    known = (
        isinstance(saved, dict) and {"model", "model_args"} <= saved.keys() and isinstance(saved["model_args"], dict)
    )
    require(known, f"it has no model and model_args, as nanoGPT writes them; {READABLE}")
    weights = {name.removeprefix("module.").removeprefix("_orig_mod."): w for name, w in saved["model"].items()}
    weights = {name: w for name, w in weights.items() if not name.endswith((".attn.bias", ".attn.masked_bias"))}
    args = saved["model_args"]
    good = "transformer.wte.weight" in weights and all(isinstance(w, Tensor) for w in weights.values())
    require(good, f"it has no transformer.wte.weight, or what is no tensor; {READABLE}")
    embedding = weights["transformer.wte.weight"]
    tied = torch.equal(weights.get("lm_head.weight", embedding), embedding)
    if tied:
        weights.pop("lm_head.weight", None)
    model = {key: args.get(key) for key in ("n_layer", "n_head", "n_embd", "block_size")}
    model |= {"bias": args.get("bias", True), "dropout": float(args.get("dropout", 0.0)), "tied": tied}
    n, notes = len(embedding), []
    if meta is not None:
        tokenizer: Tokenizer = read_meta(expand(meta), f"meta={meta}")
    else:
        told = f"it has {n} tokens, and no meta=FILE names nanoGPT's meta.pkl, which says what they are"
        require(0 <= n - 50257 < PADDING, told)
        tokenizer = GPT2Tokenizer(fetch_gpt2("tokenizer"), has_separator=True)
        notes.append("has no meta=: its tokens are taken for GPT-2's")
    return joined({"model": model}, weights, tokenizer, saved.get("iter_num", 0), notes)


def joined(
    settings: dict[str, Any], weights: dict[str, Tensor], tokenizer: Tokenizer | None, step: Any, notes: list[str]
) -> Origin:
    """Checked settings, with rows past the tokenizer cut. Raises: ConfigError."""
    config: GPTConfig = settings_of(GPTConfig, settings)
    rows = len(weights["transformer.wte.weight"])
    if tokenizer is not None and rows != tokenizer.vocab_size:
        V = tokenizer.vocab_size
        require(V < rows < V + PADDING, f"its embedding has {rows} rows, its tokenizer {V} tokens")
        for name in weights.keys() & {"transformer.wte.weight", "lm_head.weight"}:
            weights[name] = weights[name][:V].clone()
        notes.append(f"has {rows} rows for {V} tokens: the last {rows - V} are cut")
    good = isinstance(step, int) and step >= 0
    require(good, f"its iteration {show(step)} is no count")
    return Origin(config, weights, tokenizer, {}, step, tuple(notes))
