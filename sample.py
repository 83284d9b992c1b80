"""Sample from a trained run: python sample.py run=runs/... start="ROMEO:" num_samples=3"""

import codecs
import itertools
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor

from core import checkpoint
from core.cli import run_script
from core.device import require_memory, resolve_device, resolve_dtype
from core.files import expand, program
from core.plugins import changed_plugins, load_plugins
from core.process import printable
from core.schema import NOT_EMPTY, NOT_NEGATIVE, REQUIRED, AtLeast, Between, ConfigError, Help, Loads, options, require
from data.corpora import read_text
from data.tokenizer import Tokenizer, from_dict
from model.generate import generate
from model.gpt import GPT
from training.config import Device, Dtype, Seed, TrainConfig, load_config
from training.session import idle_threads
from training.state import checked

RunPath = Annotated[str, NOT_EMPTY, Help("a run directory, or one checkpoint in it (runs/.../ckpt/step_000500)")]
Plugins = Annotated[
    tuple[str, ...],
    Loads(load_plugins, asked=load_plugins),
    Help("those of the run, as [my_norm], where you have not trained with them"),
]
Which = Annotated[Literal["best", "latest"], Help("the checkpoint of a run directory")]


@options
class SampleConfig:
    run: RunPath = REQUIRED
    checkpoint: Which = "best"
    plugins: Plugins = ()
    start: Annotated[
        str | None,
        Help("the prompt: text, FILE:path, or - for standard input; null: a line feed, or what the model has instead"),
    ] = None
    num_samples: Annotated[int, AtLeast(1), Help("sequences")] = 10
    max_new_tokens: Annotated[int, AtLeast(1), Help("tokens of each sample")] = 500
    temperature: Annotated[float, NOT_NEGATIVE, Help("0: greedy")] = 0.8
    top_k: Annotated[int | None, AtLeast(1), Help("sample from the k most likely tokens; null: from all")] = 200
    top_p: Annotated[
        float | None, Between(0, 1, "(]"), Help("sample from the fewest tokens with so much probability; null: off")
    ] = None
    stop: Annotated[str | None, NOT_EMPTY, Help("end a sample before this text; null: at max_new_tokens")] = None
    seed: Seed = 1337
    device: Device = "auto"
    dtype: Dtype = "auto"
    stream: Annotated[bool, Help("print each character as it comes")] = False


def sample(config: SampleConfig) -> int:
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    torch.set_num_threads(idle_threads(device))
    loaded = load_asked_run(config.run, config.checkpoint, device)
    prompt = default_prompt(loaded.tokenizer) if config.start is None else read_prompt(config.start)
    clean = on_terminal if sys.stdout.isatty() else str
    show = (lambda piece: print(clean(piece), end="", flush=True)) if config.stream else None
    for i, text in enumerate(continuations(config, loaded, prompt, dtype, show)):
        print("" if show and i == 0 else clean(text))
        print("---------------")
    return 0


def on_terminal(text: str) -> str:
    return printable(text.replace("\r", ""))


def continuations(
    config: SampleConfig,
    loaded: "LoadedRun",
    prompt: str,
    dtype: torch.dtype,
    show: Callable[[str], None] | None = None,
) -> list[str]:
    """num_samples texts that begin with the prompt. show: is given the pieces of the first one as they come."""
    model, tokenizer, *_ = loaded
    device = model.transformer.wte.weight.device
    idx = torch.tensor(tokenizer.encode(prompt).tolist(), device=device).expand(config.num_samples, -1)  # (B, T)
    tokens = generate(
        model, idx, config.max_new_tokens, config.temperature, config.top_k, config.top_p, config.seed, dtype
    )
    texts = [Text(tokenizer, config.stop or "") for _ in range(config.num_samples)]
    if show:
        show(prompt)
    for column in itertools.chain(map(Tensor.tolist, tokens), [[None] * config.num_samples]):
        for text, token in zip(texts, column, strict=True):
            text.add(token)
        if show:
            show(texts[0].new())
        if all(text.ended for text in texts):  # max_new_tokens are not needed
            break
    return [prompt + text.text for text in texts]


class Text:
    """The text of a sample while its tokens come: up to `stop`, or to the separator, with which its document ends."""

    def __init__(self, tokenizer: Tokenizer, stop: str) -> None:
        self.tokenizer, self.stop = tokenizer, stop
        self.text, self.shown, self.ended = "", 0, False
        self.utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token: int | None) -> None:
        """token: None after the last one."""
        if self.ended:
            return
        last = token is None or token == self.tokenizer.separator
        before = len(self.text)
        self.text += self.utf8.decode(b"" if last else self.tokenizer.pieces[token or 0], final=last)
        at = self.text.find(self.stop, max(0, before - len(self.stop))) if self.stop else -1
        self.text = self.text if at < 0 else self.text[:at]
        self.ended = last or at >= 0

    def new(self) -> str:
        """What was added since the last call, but for an end in which `stop` may begin."""
        begin, held = self.shown, 0 if self.ended else len(self.stop) - 1
        self.shown = max(begin, len(self.text) - max(0, held))
        return self.text[begin : self.shown]


class LoadedRun(NamedTuple):
    """A checkpoint's model in evaluation mode, its tokenizer, its settings, and all else that was saved."""

    model: GPT
    tokenizer: Tokenizer
    config: TrainConfig
    state: dict[str, Any]


def load_asked_run(run: str, which: str, device: torch.device, key: str = "run") -> LoadedRun:
    """load_run() for the settings run= (or `key`) and checkpoint=. Raises: ConfigError where nothing can be loaded."""
    file = expand(run) / "ckpt.pt"
    command = f"{program('scripts/import_checkpoint.py')} {shlex.quote(f'from={file}')} out=RUN"
    theirs = os.path.isfile(file) and not {"ckpt", "config.yaml", checkpoint.MANIFEST} & {*os.listdir(file.parent)}
    require(not theirs, f"{key}={run} is nanoGPT's: {command} makes a run of it")
    try:
        loaded = load_run(checkpoint.resolve(expand(run), which, key), device)
    except checkpoint.CorruptCheckpoint as error:
        raise ConfigError(f"{key}={run} cannot be loaded: {error}") from error
    if loaded.config.fault.name != "none":
        print(f"warning: {key}={run} was trained with fault={loaded.config.fault.name}", file=sys.stderr)
    if loaded.config.init_from is not None and loaded.state["step"] == 0:
        told = "the weights that it began with, as training has not lowered val/loss; its latest checkpoint is trained"
        print(f"warning: {key}={run}: iteration 0, {told}", file=sys.stderr)
    for change in changed_plugins(loaded.state.get("plugins") or {}):
        print(f"warning: {key}={run}: {printable(change)}", file=sys.stderr)
    return loaded


def load_run(path: Path, device: torch.device) -> LoadedRun:
    """What a checkpoint directory holds. Raises: CorruptCheckpoint."""
    saved = checkpoint.load(path, only="model")
    with checkpoint.errors_as_corrupt(path):
        config = load_config(checked(saved.state, f"{path}/{checkpoint.STATE}")["config"])
        tokenizer = from_dict(saved.state["tokenizer"])
        with torch.device("meta"):
            model = GPT(config.gpt, tokenizer.vocab_size)
        checkpoint.check_weights(saved.tensors["model"], model)
        told = f"{path}: the weights and model.block_size={config.model.block_size} positions"
        require_memory(model.nbytes, device, told)
        if config.plugins:  # a plugin may compute buffers
            model = GPT(config.gpt, tokenizer.vocab_size)
        model.load_state_dict(saved.tensors["model"], assign=True)
    model.init_rope()
    return LoadedRun(model.to(device).eval(), tokenizer, config, saved.state)


def default_prompt(tokenizer: Tokenizer) -> str:
    """A line feed; of a vocabulary of characters without one, the first of them. Raises: ConfigError without text."""
    try:
        tokenizer.encode("\n")
    except ConfigError:
        if not tokenizer.pieces[0]:
            raise
        return tokenizer.pieces[0].decode()
    return "\n"


def read_prompt(start: str) -> str:
    """`start` itself, the text of FILE:path, or standard input for -. Raises: ConfigError."""
    if start == "-":
        require(sys.stdin is not None, "start=- needs standard input, which is closed")
        try:
            start = sys.stdin.read()
        except UnicodeDecodeError as error:
            raise ConfigError(f"start=- cannot be read: {error}") from error
    elif start.startswith("FILE:"):
        start = read_text(start.removeprefix("FILE:"), f"start={start}")
    require(start != "", "start= must hold at least one character")
    return start


def main() -> None:
    sys.exit(run_script(SampleConfig, sample, __doc__))


if __name__ == "__main__":
    main()
