"""nanoGPT as a side of a benchmark: its model.py, and the update of its train.py, at our settings."""

import importlib.util
import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from core.device import move, resolve_device, synchronize
from core.schema import differences, require
from data.tokens import load_corpus
from model.options import GPTConfig, ModelOptions
from scripts.benchmarks.timing import Built, Turn, gpu_memory
from sweeps.plan import compose
from training.config import AdamWOptions, TrainConfig, load_config

SIZES = ("n_layer", "n_head", "n_embd", "block_size", "bias", "dropout")  # what nanoGPT's model takes


def load_model(peer: str) -> Any:
    """The module model.py of a checkout of nanoGPT. Raises: ConfigError where there is none."""
    file = Path(peer) / "model.py"
    require(file.exists(), f"peer={peer} must be a checkout of nanoGPT: it has no model.py")
    spec = importlib.util.spec_from_file_location("peer_model", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["peer_model"] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def check_model(config: GPTConfig) -> None:
    """Raise ConfigError for a model that nanoGPT does not have: one with other settings than sizes."""
    theirs = GPTConfig(ModelOptions(name=config.model.name, **{key: getattr(config.model, key) for key in SIZES}))
    changed = differences(asdict(theirs), asdict(config))
    require(not changed, f"peer= needs nanoGPT's own model (its value -> ours): {', '.join(changed)}")


def set_up(peer: str, config: TrainConfig, vocab_size: int) -> tuple[Any, torch.device, Any]:
    """nanoGPT's model at our settings, the device, and the autocast that it uses there: fp32 on a CPU, bf16 on CUDA."""
    torch.set_num_threads(config.threads or torch.get_num_threads())
    device = resolve_device(config.device)
    autocast: Any = nullcontext()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32
        autocast = torch.autocast("cuda", torch.bfloat16)
    module = load_model(peer)
    torch.manual_seed(config.seed)
    sizes = {key: getattr(config.model, key) for key in SIZES}
    return module.GPT(module.GPTConfig(**sizes, vocab_size=vocab_size)).to(device), device, autocast


def nanogpt(peer: str, overrides: list[str]) -> Built:
    """The update of its train.py; compiled on CUDA."""
    config = load_config(compose(overrides))
    T, accumulation, o = config.model.block_size, config.gradient_accumulation_steps, config.optim
    assert isinstance(o, AdamWOptions)
    _, tokenizer, tokens, split = load_corpus(config.data, T)
    first, end = split.train[0]
    data = np.asarray(tokens[first:end], dtype=np.uint16)
    model, device, autocast = set_up(peer, config, tokenizer.vocab_size)
    forward: Any = torch.compile(model.train()) if device.type == "cuda" else model.train()
    optimizer = model.configure_optimizers(o.weight_decay, o.learning_rate, o.betas, device.type)

    def get_batch() -> tuple[Any, Any]:
        ix = torch.randint(len(data) - T, (config.batch_size,))
        x = torch.stack([torch.from_numpy(data[i : i + T].astype(np.int64)) for i in ix])
        y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + T].astype(np.int64)) for i in ix])
        return move(x, device), move(y, device)  # pinned and without waiting, as in nanoGPT

    batch = get_batch()

    def update(n: int) -> Turn:
        nonlocal batch
        for _ in range(n):
            for _ in range(accumulation):
                with autocast:
                    _, loss = forward(*batch)
                    loss = loss / accumulation
                batch = get_batch()  # while the device computes
                loss.backward()
            if config.grad_clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        synchronize(device)
        return gpu_memory(device)

    update(2)  # warm-up
    return update, {"parameters": sum(p.numel() for p in model.parameters())}
