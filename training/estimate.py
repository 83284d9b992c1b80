"""What a run would be and what it would cost, without training it: dry_run=true, and a sweep's estimate."""

import time
from typing import NamedTuple

import torch
from tqdm import tqdm

from core import checkpoint
from core.device import busy_note, device_name, peak_flops
from model.cross_entropy import loss_bytes
from model.diagnostics import activation_bytes
from model.gpt import GPT
from training.config import TrainConfig, to_yaml
from training.init_from import load_initial_weights
from training.optim import Optimizer, check_optimizer, optimizer_bytes
from training.resume import has_ended, refuse_other_text
from training.schedule import n_evaluations
from training.session import Data, Machine, Session, checked_meta_model, read_data, set_up_machine
from training.updates import accumulate_gradients, rows_at_once, step_optimizer

GUESSED_MFU = 0.4  # where a few updates would take long


class Cost(NamedTuple):
    seconds: float  # of the whole run
    tokens_per_sec: float  # of an update
    how: str  # the source of tokens_per_sec: timed, or a share of the peak
    checkpoint_bytes: int


def dry_run(config: TrainConfig) -> int:
    """Print the settings and what the run would be. Returns the exit status. Raises: ConfigError where it would not
    start, or its directory holds another run."""
    has_ended(config)  # refuses a run of other settings before a text is read
    machine, data = require_startable(config)
    refuse_other_text(config, data.corpus.sha256)
    if machine.world.rank == 0:
        print(to_yaml(config), end="")
        for key, value in report(config, machine, data).items():
            print(f"{key + ':':15s}{value}")
    return 0


def require_startable(config: TrainConfig) -> tuple[Machine, Data]:
    """What a run starts with. Raises: ConfigError for no such device, no corpus, too little text, unfit weights."""
    machine, data = set_up_machine(config), read_data(config)
    check_optimizer(config, machine.device)
    if config.init_from is not None:
        load_initial_weights(config, GPT(config.gpt, data.corpus.tokenizer.vocab_size), data.corpus)
    return machine, data


def estimate(config: TrainConfig) -> tuple[float, int]:
    """Seconds and bytes on disk that a run would take."""
    machine, data = set_up_machine(config), read_data(config)
    found = cost(config, machine, data, checked_meta_model(config, data.corpus.tokenizer.vocab_size))
    return found.seconds, (checkpoint.KEEP + 1) * found.checkpoint_bytes


def report(config: TrainConfig, machine: Machine, data: Data) -> dict[str, str]:
    """The lines that a dry run prints, as {label: text}."""
    corpus, dtype = data.corpus, machine.dtype
    model = checked_meta_model(config, corpus.tokenizer.vocab_size)
    n, flops = model.num_params(), model.flops_per_token()
    rows = rows_at_once(config.batch_size, config.model.block_size, machine.device)
    activations = activation_bytes(model, rows, machine.device, dtype)
    activations += loss_bytes(rows * model.block_size * model.vocab_size)
    found = cost(config, machine, data, model)
    return {
        "run directory": f"{config.run_dir}",
        "corpus": f"{len(corpus.tokens):,} tokens, {data.held_out_tokens:,} of them held out, "
        f"vocabulary {corpus.tokenizer.vocab_size}",
        "parameters": f"{n:,}",
        "FLOPs": f"{flops:,} a token, {flops * config.tokens_per_iter:.3g} an iteration",
        "iteration": f"{config.tokens_per_iter:,} tokens",
        "memory": f"{(found.checkpoint_bytes + 4 * n) / 2**20:,.0f} MiB for weights, gradients and optimizer, "
        f"{activations / 2**20:,.0f} MiB for activations and gradients of logits of {rows} sequences",
        "KV cache": f"{model.cache_bytes_per_token(dtype):,} bytes a token if cached in {dtype}",
        "checkpoint": f"{found.checkpoint_bytes / 2**20:,.0f} MiB",
        "device": f"{device_name(machine.device)}, peak {peak_flops(machine.device, dtype) / 1e12:.2f} TFLOP/s "
        f"in {machine.dtype_in_words}",
        "estimate": f"{tqdm.format_interval(found.seconds)} for {config.max_iters:,} iterations and "
        f"{n_evaluations(config)} evaluations at {found.tokens_per_sec:,.0f} tokens/s ({found.how})",
    }


def cost(config: TrainConfig, machine: Machine, data: Data, model: GPT) -> Cost:
    """model: on the meta device."""
    rate, how = training_rate(model, config, machine, data)
    rate *= machine.world.size
    # an evaluation is a forward pass, a third of the work
    evaluated = data.held_out_tokens + 2 * config.eval_iters * config.batch_size * config.model.block_size
    tokens = config.max_iters * config.tokens_per_iter + n_evaluations(config) * evaluated / 3
    return Cost(tokens / rate, rate, how, 4 * model.num_params() + optimizer_bytes(model, config))


def training_rate(meta_model: GPT, config: TrainConfig, machine: Machine, data: Data) -> tuple[float, str]:
    """Tokens a second of an update, and the source: timed on a few sequences where that takes only seconds."""
    T, device = config.model.block_size, machine.device
    flops = meta_model.flops_per_token() * T  # a sequence
    peak = peak_flops(device, machine.dtype)
    rows = min(rows_at_once(config.batch_size, T, device), int(peak / flops))  # at most a second's work at the peak
    if rows < 1 or device.type != "cpu":
        return GUESSED_MFU * peak / flops * T, f"{100 * GUESSED_MFU:g} % of the peak"
    model = GPT(config.gpt, meta_model.vocab_size)
    model.init_weights(config.seed)
    session = Session(config, machine, data, model, model, Optimizer(model, config), peak)
    idx = torch.randint(model.vocab_size, (rows, T))
    times = []
    for _ in range(3):
        start = time.perf_counter()
        loss = accumulate_gradients(model, iter([(idx, idx)]), 1, machine)
        between = time.perf_counter()
        step_optimizer(session, loss, frozen=torch.zeros(()))
        times.append((between - start, time.perf_counter() - between))
    backward_seconds, step_seconds = (min(seconds) for seconds in zip(*times, strict=True))
    tokens = config.tokens_per_iter / machine.world.size  # of an update, on this rank
    return tokens / (tokens / (rows * T) * backward_seconds + step_seconds), f"timed on {rows} sequences{busy_note()}"
