"""What training needs: machine, data, model, optimizer. train.py, benchmarks and audits set up the same Session."""

import os
import platform
import sys
import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from core import checkpoint, dist
from core.device import (
    autocast,
    device_name,
    has_bfloat16,
    idle_cpus,
    keep_freed_memory,
    peak_flops,
    require_memory,
    resolve_device,
    resolve_dtype,
    total_memory,
)
from core.dist import World
from core.git import commit
from core.plugins import plugin_hashes
from core.process import available_cpus
from core.schema import require
from data.batches import Batches
from data.tokens import Corpus, load_corpus, size_of_text
from model.diagnostics import sdpa_backend
from model.gpt import GPT
from model.kernels import operators
from training import faults
from training.config import TrainConfig
from training.optim import Optimizer, check_optimizer, optimizer_bytes
from training.origin import read_origin
from training.state import Facts, checked

Batch = tuple[Tensor, Tensor]  # inputs and targets, (B, T) each

DEFAULT_THREADS = torch.get_num_threads()
RESIDENT = 16  # data.on_device=auto keeps the corpus on a GPU whose memory is at least so many times its size


@dataclass(frozen=True)
class Machine:
    """Where a run trains. dtype: of matmuls. about_threads: for the log, why there are fewer threads than usual."""

    world: World
    device: torch.device
    dtype: torch.dtype
    about_threads: str = ""

    def autocast(self) -> torch.autocast:
        return autocast(self.device.type, self.dtype)

    @property
    def dtype_in_words(self) -> str:
        """For the log, with a warning where it is emulated."""
        emulated = self.dtype == torch.bfloat16 and self.device.type == "cpu" and not has_bfloat16(self.device)
        return f"{self.dtype}" + (" that this CPU only emulates: dtype=float32 is far faster" if emulated else "")


@dataclass(frozen=True)
class Data:
    corpus: Corpus
    batches: Batches

    @property
    def held_out_tokens(self) -> int:
        return sum(end - start for start, end in self.corpus.split.val)

    @cached_property
    def text_per_target(self) -> tuple[float, float]:
        """Bytes and characters that a held-out target stands for; 0 where tokens are no text."""
        targets = tuple((start + 1, end) for start, end in self.corpus.split.val)
        sizes = size_of_text(self.corpus.tokenizer, self.corpus.tokens, targets)
        n_bytes, n_chars = (size / sum(end - start for start, end in targets) for size in sizes)
        return n_bytes, n_chars


@dataclass
class Session:
    """What trains. forward: the model, compiled where asked, and wrapped in DDP where there are several ranks. peak:
    FLOP/s of all ranks at best."""

    config: TrainConfig
    machine: Machine
    data: Data
    model: GPT
    forward: nn.Module
    optimizer: Optimizer
    peak: float
    began: float = field(default_factory=time.perf_counter)
    text_seconds: float = 0.0  # spent on samples of text since `began`

    def join_ranks(self) -> None:
        """Average gradients over the ranks. It comes before the first forward pass: DDP has the compiler split the
        graph, so that communication overlaps."""
        if self.machine.world.size > 1:
            devices = [self.machine.device] if self.machine.device.type == "cuda" else None
            ddp = DistributedDataParallel(self.forward, devices, broadcast_buffers=False)
            ddp.require_backward_grad_sync = False  # accumulate_gradients() says when
            self.forward = ddp

    @cached_property
    def attention_backend(self) -> str | None:
        """Which of SDPA's backends computes attention on a GPU; None where it is none of them."""
        if self.machine.device.type != "cuda":
            return None  # what a CPU computes with is in model/ops.py
        with self.machine.autocast():
            return sdpa_backend(self.model, self.config.batch_size)

    @cached_property
    def facts(self) -> Facts:
        """What is recorded with a run."""
        config, machine, corpus, model = self.config, self.machine, self.data.corpus, self.model
        return Facts(
            sdpa=self.attention_backend,
            plugins=plugin_hashes(config.plugins) if config.plugins else None,
            init_from={config.init_from: config.init_sha256 or ""} if config.init_from else None,
            dtype=str(machine.dtype),
            corpus_sha256=corpus.sha256,
            device=device_name(machine.device),
            compile=is_compiled(config, machine.device),
            deterministic=config.deterministic,
            ranks=machine.world.size,
            commit=commit(),
            kernels=machine.device.type == "cpu" and operators.loaded(),
            parameters=model.num_params(),
            vocab_size=corpus.tokenizer.vocab_size,
            tokens=len(corpus.tokens),
            held_out_tokens=self.data.held_out_tokens,
            cache_bytes_per_token=model.cache_bytes_per_token(machine.dtype),
            torch=torch.__version__,
            python=platform.python_version(),
            threads=torch.get_num_threads(),
        )

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        return [*self.model.parameters()]

    @cached_property
    def has_clipping_kernel(self) -> bool:
        return all(operators.available(p) and p.dtype == torch.float32 and p.is_contiguous() for p in self.parameters)

    @property
    def micro_steps(self) -> range:
        """The micro-batches of an update that this rank computes."""
        world = self.machine.world
        return range(world.rank, self.config.gradient_accumulation_steps, world.size)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint holds, by group and name: the model's weights, with the buffers that a plugin has saved."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.tensors()}

    def load_tensors(self, tensors: dict[str, dict[str, Tensor]]) -> None:
        """Raises: CorruptCheckpoint or KeyError, before anything is loaded, where one is not as in tensors()."""
        checkpoint.check_weights(tensors["model"], self.model)
        self.optimizer.load(tensors["optimizer"])
        self.model.load_state_dict(tensors["model"])


def setup(config: TrainConfig, machine: Machine | None = None) -> Session:
    """Everything a run needs but its directory. machine: of set_up_machine(). Raises: ConfigError."""
    machine = machine or set_up_machine(config)
    data = read_data(config, machine.device)
    vocab_size = data.corpus.tokenizer.vocab_size
    meta_model = checked_meta_model(config, vocab_size)
    refuse_too_large(config, meta_model, machine)
    check_optimizer(config, machine.device)
    model = GPT(config.gpt, vocab_size)
    model.init_weights(config.seed)
    model.to(machine.device)
    if config.fault.name != "none":
        faults.inject_into_model(config, model)
        faults.inject_into_batches(config, data.batches)
    forward = compile_model(model, config) if is_compiled(config, machine.device) else model
    if config.qk_clip.name != "none":
        for attention in model.attentions:
            attention.track_max_logits()  # before the first forward pass: else it recompiles
    peak = peak_flops(machine.device, machine.dtype) * machine.world.size
    return Session(config, machine, data, model, forward, Optimizer(model, config), peak)


def set_up_machine(config: TrainConfig) -> Machine:
    """Resolve ranks, device and dtype. Sets threads, the CUDA device, TF32 and the allocator for the whole process."""
    world = dist.read_world()
    device = resolve_device(config.device, world)
    threads, about_threads = choose_threads(config, world, device)
    torch.set_num_threads(threads)
    set_deterministic(config.deterministic, is_compiled(config, device), device)
    dtype = resolve_dtype(config.dtype, device)  # by a matmul: cuBLAS reads the settings above at its first one
    require(
        config.gradient_accumulation_steps % world.size == 0,
        f"gradient_accumulation_steps={config.gradient_accumulation_steps} must be divisible by {world.size} ranks",
    )
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32 where float32 is left
    elif device.type == "cpu":
        keep_freed_memory()
    return Machine(world, device, dtype, about_threads)


def saved_state(config: TrainConfig) -> dict[str, Any]:
    """The state of the checkpoint that the run goes on from; {} where it begins."""
    return {} if config.fresh else checked(checkpoint.peek(config.run_dir / "ckpt"), f"{config.run_dir}: state.json")


def choose_threads(config: TrainConfig, world: World, device: torch.device) -> tuple[int, str]:
    """The number of CPU threads, and for the log why it is below torch's default. A resumed run keeps its number, as
    another one may round differently. Raises: ConfigError."""
    if config.threads:
        cpus = os.cpu_count() or 1
        require(config.threads <= cpus, f"threads={config.threads} must be <= {cpus}, the CPUs here")
        return config.threads, ""
    saved, why = saved_state(config), ""
    if saved.get("threads") and saved.get("ranks") == world.size:  # before $OMP_NUM_THREADS, which launches set
        threads, why = min(saved["threads"], max(1, available_cpus() // world.local_size)), "as it began"
    elif saved or world.size > 1:  # a run of an earlier version does not say its threads
        threads = DEFAULT_THREADS
    else:
        threads, why = idle_threads(device), "other programs use the CPUs"
    return threads, f"{threads} of {DEFAULT_THREADS} threads, {why} (threads=N)" if threads < DEFAULT_THREADS else ""


def idle_threads(device: torch.device) -> int:
    """Torch's number of CPU threads, but on a CPU none for CPUs that other programs keep busy: a thread that shares its
    CPU holds up all others."""
    asked = "OMP_NUM_THREADS" in os.environ  # sweeps and torchrun set it
    idle = None if asked or device.type != "cpu" else idle_cpus()
    return DEFAULT_THREADS if idle is None else max(1, min(DEFAULT_THREADS, round(idle)))


def set_deterministic(wanted: bool, compiled: bool, device: torch.device) -> None:
    """Turn PyTorch's deterministic algorithms on or off, for the whole process."""
    if device.type == "cuda":  # wanted or not: it is read once, at the first matmul, and a later run may want it
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # not use_deterministic_algorithms(), which loads inductor
    torch.set_deterministic_debug_mode("error" if wanted else "default")
    if compiled:
        from torch._inductor import config as inductor  # slow to import

        inductor.deterministic = wanted  # it then chooses no kernel by timing


def read_corpus(config: TrainConfig) -> Corpus:
    """The tokens are those of the run that goes on, or those of init_from where a run begins."""
    known = saved_state(config)
    if not known and config.init_from is not None:
        tokenizer = read_origin(config.init_from).tokenizer
        known = {} if tokenizer is None else {"tokenizer": tokenizer.to_dict()}
    return load_corpus(config.data, config.model.block_size, known)


def read_data(config: TrainConfig, device: torch.device | None = None) -> Data:
    """The corpus and its batches. device: of training; None where nothing is trained."""
    corpus = read_corpus(config)
    where = device if device is not None and is_resident(config, corpus, device) else None
    batches = Batches(corpus.tokens, corpus.split, config.model.block_size, config.batch_size, config.seed, where)
    if config.eval_iters:
        batches.sampled_batch("val", 0)  # raises where the held-out block is shorter than a window
    return Data(corpus, batches)


def is_resident(config: TrainConfig, corpus: Corpus, device: torch.device) -> bool:
    """Whether the tokens lie on the device: auto takes a GPU with RESIDENT times their size."""
    fits = device.type == "cuda" and RESIDENT * corpus.tokens.nbytes <= total_memory(device)
    return fits if config.data.on_device == "auto" else bool(config.data.on_device)


def checked_meta_model(config: TrainConfig, vocab_size: int) -> GPT:
    """The model on PyTorch's meta device, shapes alone. Raises: ConfigError where its parts do not fit each other."""
    with torch.device("meta"):
        model = GPT(config.gpt, vocab_size)
    once = dict(model.named_parameters())
    shared = [name for name, _ in model.named_parameters(remove_duplicate=False) if name not in once]
    require(not shared, f"attention={config.attention.name} shares {', '.join(shared)}: a checkpoint cannot hold it")
    clips = config.qk_clip.name == "clip"
    can = all(hasattr(attention, "scale_logits") for attention in model.attentions)
    require(can or not clips, f"qk_clip=clip: attention={config.attention.name} has no scale_logits()")
    rescaled = any(getattr(part, "reparam", None) for attention in model.attentions for part in attention.modules())
    require(not (clips and rescaled), f"qk_clip=clip: weights={config.weights.name} undoes the scaling of the weights")
    return model


def refuse_too_large(config: TrainConfig, meta_model: GPT, machine: Machine) -> None:
    """Raise TooLarge where model, gradients, the optimizer's state and a batch's token ids exceed the memory."""
    n, n_tokens = meta_model.num_params(), config.batch_size * config.model.block_size
    needed = meta_model.nbytes + 4 * n + optimizer_bytes(meta_model, config) + 16 * n_tokens  # token ids are int64
    told = f"model.name={config.model.name} with {n:,} parameters and batch_size={config.batch_size} windows"
    require_memory(needed, machine.device, f"{told} of model.block_size={config.model.block_size}")


def is_compiled(config: TrainConfig, device: torch.device) -> bool:
    return device.type == "cuda" if config.compile == "auto" else bool(config.compile)


def compile_model(model: GPT, config: TrainConfig) -> nn.Module:
    torch._dynamo.config.recompile_limit = 100  # a sweep's worker trains many models; PyTorch's limit is 8
    if config.model.activation_checkpointing:
        # The backward pass repeats the forward pass. The repetition does not track QK-Clip's maxima again.
        torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    # dynamic=False: after an evaluation's batch, of another size, the compiler would take every size as unknown, in a
    # sweep's next runs too
    return torch.compile(model, dynamic=False)  # type: ignore[return-value]


def drop_compilations() -> None:
    """Cancel what waits for a compiler on a CPU: else the process compiles it all before it ends."""
    pool = getattr(getattr(sys.modules.get("torch._inductor.async_compile"), "AsyncCompile", None), "pool", None)
    if pool is not None and pool.cache_info().currsize:
        pool().shutdown(wait=False, cancel_futures=True)
        pool.cache_clear()  # PyTorch makes a new one
