"""A CUDA device that computes nothing: what an update asks for, and where it waits, on a machine without a GPU.

on_fake_cuda("module.function") runs a function of a test file in a process of its own, as the device must be loaded
before PyTorch. There `fake_cuda()` is the context in which device=cuda works.
"""

import contextlib
import functools
import os
import subprocess
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch
from conftest import FOLDER, ROOT, run_python
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from model.gpt import GPT
from model.options import GPTConfig
from training import session

HERE = Path(__file__).resolve().parent
aten = torch.ops.aten
PROPERTIES = SimpleNamespace(major=9, minor=0, multi_processor_count=132, total_memory=80 * 2**30)

QUEUE: dict[str, Callable[..., None]] = {"wait_stream": lambda stream: None, "replay": lambda: None}


@functools.cache
def library() -> Path:
    """The compiled device, for this process and those that it starts."""
    source, result, here = HERE / "fake_cuda.cpp", Path(FOLDER, "fake_cuda.so"), Path(torch.__file__).parent
    flags = ["-std=c++20", "-fPIC", "-shared", f"-I{here / 'include'}", f"-L{here / 'lib'}"]
    links = ["-ltorch_cpu", "-lc10", f"-Wl,-rpath,{here / 'lib'}"]
    subprocess.run([os.environ.get("CXX") or "g++", *flags, source, "-o", result, *links], check=True)
    return result


def on_fake_cuda(function: str, *arguments: Any) -> str:
    """Run MODULE.NAME of tests/ on the device, in a process of its own. Returns what it prints."""
    if torch.version.cuda is not None:  # it brings hooks of its own, so that there is no place for ours
        pytest.skip("PyTorch is built with CUDA")
    module, name = function.split(".")
    code = f"import ctypes; ctypes.CDLL({str(library())!r}); import {module}; {module}.{name}(*{arguments!r})"
    # end at once: a thread of the backward pass that then asks for Python's lock would abort the process
    code += "; import os, sys; sys.stdout.flush(); os._exit(0)"
    return run_python(code, env={"PYTHONPATH": f"{HERE}:{ROOT}"}).stdout


class Waits(TorchDispatchMode):
    """Records all operations in `asked`. Notes in `found` where the host would wait for the GPU: it reads a number, or
    copies without pinned memory. A number that is read is 1, so a truth is true.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.asked: list[str] = []  # all operations, each with the number of its tensors

    def note(self, what: str) -> None:
        """With the innermost function of this repository; what it does again at once is one wait."""
        frames = [f for f in traceback.extract_stack() if Path(f.filename).is_relative_to(ROOT) and f.name != "note"]
        ours = [f for f in frames if ".venv" not in f.filename and Path(f.filename) != Path(__file__)]
        at = f"{Path(ours[-1].filename).stem}.{ours[-1].name}" if ours else "?"
        if self.found[-1:] != [f"{at} {what}"]:
            self.found.append(f"{at} {what}")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        self.asked.append(f"{func.__name__.partition('.')[0]} of {len(tensors)}")
        if func is aten._local_scalar_dense.default:
            if args[0].is_cuda:
                self.note("reads")
            return 1.0 if args[0].is_floating_point() else 1
        if func is aten._to_copy.default:
            to = torch.device(kwargs.get("device") or args[0].device)
            self.copy(args[0], to, kwargs.get("non_blocking", False))
        elif func is aten.copy_.default:
            self.copy(args[1], args[0].device, (*args, *kwargs.values())[-1] is True)
        elif any(x.is_cuda for x in tensors) and any(x.is_cpu and x.dim() for x in tensors):
            self.note(f"copies for {func}")
        return func(*args, **kwargs)

    def copy(self, x: Tensor, to: torch.device, non_blocking: bool) -> None:
        if x.device.type != to.type and not (non_blocking and (x.is_cuda or hasattr(x, "pinned"))):
            self.note(f"copies to {to.type}")


class Hosts(TorchFunctionMode):
    """What fake tensors do not know: pinned memory."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.pin_memory:
            assert args[0].is_cpu, "only dense CPU tensors can be pinned"
            args[0].pinned = True
            return args[0]
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def fake_cuda(watch: bool = True) -> Iterator[Waits]:
    """device=cuda works, with two devices, and tensors are fake. Yields the waits; not if a compiler is to trace."""
    current, waits = [0], Waits()
    generators = tuple(torch.Generator() for _ in range(2))
    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "device_count": lambda: 2,
        "current_device": lambda: current[0],
        "set_device": lambda device: current.__setitem__(0, torch.device(device).index or 0),
        "get_device_name": lambda *_: "NVIDIA H100 80GB HBM3",
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: PROPERTIES,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8, device="cpu"),
        "set_rng_state": lambda *_: None,
        "synchronize": lambda *_: waits.note("synchronizes"),
        "max_memory_allocated": lambda *_: 2**30,
        **dict.fromkeys(("stream", "graph"), lambda *_, **__: contextlib.nullcontext()),  # what is captured runs once
        **dict.fromkeys(("Stream", "CUDAGraph", "current_stream"), lambda *_: SimpleNamespace(**QUEUE)),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, answer in answers.items():
            patch.setattr(torch.cuda, name, answer)
        patch.setattr(torch.cuda, "default_generators", generators)
        patch.setattr(session, "GPT", FakeGPT)
        with FakeTensorMode(allow_non_fake_inputs=True), contextlib.ExitStack() as watching:
            for mode in (waits, Hosts(waits)) if watch else ():
                watching.enter_context(mode)
            yield waits


class FakeGPT(GPT):
    """A GPT that is built on the device: fake parameters cannot move, and have no numbers to set."""

    def __init__(self, config: GPTConfig, vocab_size: int) -> None:
        with torch.device("cuda"):
            super().__init__(config, vocab_size)

    def init_weights(self, seed: int) -> None:
        pass

    def to(self, device: Any) -> Self:  # type: ignore[override]
        for module in self.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, torch.empty(buffer.shape, device=device))
        return self
