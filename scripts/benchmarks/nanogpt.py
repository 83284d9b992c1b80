"""nanoGPT as a side of a benchmark: its model.py, and the update of its train.py, at our settings."""

import importlib.util
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from core.device import move, resolve_device, synchronize
from core.schema import require
from data.batches import Batches
from data.tokens import load_corpus
from model.options import GPTConfig
from scripts.benchmarks.timing import Turn, Work
from sweeps.plan import compose
from training.config import load_config
from training.schedule import learning_rate


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


def check_model(config: GPTConfig, what: str) -> None:
    """Raise ConfigError for a model that nanoGPT does not have."""
    m = config.model
    plain = config.qk_norm.name == "none" and config.attention.name == "mha"
    plain = plain and (m.norm, m.mlp, m.position, m.tied) == ("layernorm", "gelu", "learned", True)
    require(plain, f"{what} needs nanoGPT's own settings: MHA without a QK norm")


def model_args(config: GPTConfig, vocab_size: int) -> dict[str, Any]:
    """The arguments of nanoGPT's GPTConfig."""
    keys = ("n_layer", "n_head", "n_embd", "block_size", "bias", "dropout")
    return {key: getattr(config.model, key) for key in keys} | {"vocab_size": vocab_size}


class NanoGPT:
    """Its training: fp32 on a CPU; compiled, in bf16 and TF32 on CUDA. `alike`: with our initial weights, batches and
    learning rates."""

    def __init__(self, peer: str, words: list[str], alike: bool) -> None:
        self.config = config = load_config(compose(words))
        self.alike, self.accumulation = alike, config.gradient_accumulation_steps
        torch.set_num_threads(config.threads or torch.get_num_threads())
        self.device = resolve_device(config.device)
        cuda = self.device.type == "cuda"
        if cuda:
            torch.set_float32_matmul_precision("high")
        _, tokenizer, tokens, folds = load_corpus(config.data, config.model.block_size)
        self.batches = Batches(tokens, folds, config.model.block_size, config.batch_size, config.seed)
        ((first, end),) = folds.train[:1]
        self.data = np.asarray(tokens[first:end], dtype=np.uint16)
        module = load_model(peer)
        torch.manual_seed(config.seed)
        self.model = (
            module.GPT(module.GPTConfig(**model_args(config.gpt, tokenizer.vocab_size))).to(self.device).train()
        )
        if alike:
            self.copy_our_weights(peer, tokenizer.vocab_size)
        o = config.optim
        self.optimizer = self.model.configure_optimizers(o.weight_decay, o.learning_rate, o.betas, self.device.type)
        self.forward: Any = torch.compile(self.model) if cuda else self.model
        self.autocast = torch.autocast("cuda", torch.bfloat16) if cuda else nullcontext()
        self.drawn = 0
        self.batch = self.get_batch()  # nanoGPT draws the next batch while the device computes

    def copy_our_weights(self, peer: str, vocab_size: int) -> None:
        from model.gpt import GPT  # not above: the process of old= must not load our operators

        ours = GPT(self.config.gpt, vocab_size)
        ours.init_weights(self.config.seed)
        missing, unknown = self.model.load_state_dict(ours.state_dict(), strict=False)
        require(not unknown and set(missing) <= {"lm_head.weight"}, f"peer={peer} has other weights: {missing}")

    def get_batch(self) -> tuple[Any, Any]:
        if self.alike:
            self.drawn += 1
            x, y = self.batches.get_batch(*divmod(self.drawn - 1, self.accumulation))
        else:
            data, T = self.data, self.config.model.block_size
            ix = torch.randint(len(data) - T, (self.config.batch_size,))
            x = torch.stack([torch.from_numpy(data[i : i + T].astype(np.int64)) for i in ix])
            y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + T].astype(np.int64)) for i in ix])
        return move(x, self.device), move(y, self.device)  # pinned and without waiting, as in nanoGPT

    def update(self, n: int) -> Turn:
        """n updates from the first one on."""
        losses = []
        for step in range(n):
            total = 0.0
            for group in self.optimizer.param_groups if self.alike else ():
                group["lr"] = learning_rate(step, self.config)
            for _ in range(self.accumulation):
                with self.autocast:
                    _, loss = self.forward(*self.batch)
                    loss = loss / self.accumulation
                self.batch = self.get_batch()
                loss.backward()
                total = total + loss.detach()
            losses.append(total)
            if self.config.grad_clip:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_clip)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        synchronize(self.device)
        return {"losses": [float(total) for total in losses]}

    def evaluate(self, n: int) -> Turn:
        """n batches of its sampled evaluation."""
        self.model.eval()
        with torch.no_grad():
            for _ in range(n):
                with self.autocast:
                    _, loss = self.forward(*self.get_batch())
                value = loss.item()
        return {"loss": value}


def nanogpt(peer: str, words: list[str], evaluation: bool = False, alike: bool = False) -> tuple[Work, dict[str, Any]]:
    """Its update, or n batches of its evaluation."""
    side = NanoGPT(peer, words, alike)
    if not alike:
        side.update(2)  # warm-up
    tokens_per_batch = side.config.batch_size * side.config.model.block_size
    info = {"parameters": sum(p.numel() for p in side.model.parameters()), "tokens_per_batch": tokens_per_batch}
    return side.evaluate if evaluation else side.update, info
