"""Sample from a trained run: python sample.py run=runs/... start="ROMEO:" num_samples=3

configs/sample.yaml lists the settings. `load_run` and `open_run` are what scripts share.
"""

import codecs
import io
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core import checkpoint
from core.cli import run_app
from core.device import resolve_device, resolve_dtype
from core.schema import ConfigError, require
from data.tokenizer import Tokenizer, from_dict
from model.generate import generate
from model.gpt import GPT
from training.config import SampleConfig, load_config
from training.session import build_model


def sample(config: SampleConfig) -> int:
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    model, tokenizer, _ = open_run(config.run, config.checkpoint, device)
    prompt = read_prompt(config.start)
    idx = torch.tensor(tokenizer.encode(prompt).tolist(), device=device).expand(config.num_samples, -1)  # (B, T)
    tokens = generate(
        model, idx, config.max_new_tokens, config.temperature, config.top_k, config.top_p, config.seed, dtype
    )
    columns = list(print_first(prompt, tokens, tokenizer) if config.stream else tokens)
    rows = torch.stack(columns, 1).tolist()  # (B, max_new_tokens)
    for i, row in enumerate(rows):
        print("" if config.stream and i == 0 else prompt + tokenizer.decode(row))
        print("---------------")
    return 0


def open_run(run: str, which: str, device: torch.device) -> tuple[GPT, Tokenizer, dict[str, Any]]:
    """load_run() for the settings run= and checkpoint=. Raises: ConfigError where nothing can be loaded."""
    try:
        model, tokenizer, state = load_run(checkpoint.resolve(Path(os.path.expanduser(run)), which), device)
    except checkpoint.CorruptCheckpoint as error:
        raise ConfigError(f"run={run} cannot be loaded: {error}") from error
    if model.config.fault.name != "none":
        print(f"warning: run={run} was trained with fault={model.config.fault.name}", file=sys.stderr)
    return model, tokenizer, state


def load_run(path: Path, device: torch.device) -> tuple[GPT, Tokenizer, dict[str, Any]]:
    """The model in evaluation mode, the tokenizer and the saved state of a checkpoint directory."""
    saved = checkpoint.load(path)
    config = load_config(saved.state["config"])
    tokenizer = from_dict(saved.state["tokenizer"])
    with torch.device("meta"):
        model = build_model(config, tokenizer.vocab_size)
    model.load_state_dict(saved.tensors["model"], assign=True)
    model.init_rope()
    return model.to(device).eval(), tokenizer, saved.state


def read_prompt(start: str) -> str:
    """`start` itself, the text of FILE:path, or standard input for -. Raises: ConfigError."""
    if start == "-":
        start = sys.stdin.read()
    elif start.startswith("FILE:"):
        path = Path(os.path.expanduser(start.removeprefix("FILE:")))
        try:
            start = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"start=FILE:{path} cannot be read: {error}") from error
    require(start != "", "start= must hold at least one character")
    return start


def print_first(prompt: str, tokens: Iterable[Tensor], tokenizer: Tokenizer) -> Iterator[Tensor]:
    """Yield the tokens (B,), and print the first row while they come, a character as soon as its last byte is there."""
    print(prompt, end="", flush=True)
    utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in tokens:
        print(utf8.decode(tokenizer.pieces[int(token[0])]), end="", flush=True)
        yield token
    print(utf8.decode(b"", final=True), end="", flush=True)


def main() -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack a character of the text
    # Hydra never sees the prompt: commas, braces and quotes are its syntax.
    prompts = [a.removeprefix("start=") for a in sys.argv[1:] if a.startswith("start=")]
    sys.argv[1:] = [a for a in sys.argv[1:] if not a.startswith("start=")]
    run_app("sample", SampleConfig, lambda config: sample(replace(config, start=prompts[-1]) if prompts else config))


if __name__ == "__main__":
    main()
