"""device=cuda on a machine without a GPU. Fake tensors have shapes, dtypes and devices, and no numbers.

Each check_…() runs in a process of its own: see fake_cuda.py.
"""

import os
import re
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ROOT, run_python
from fake_cuda import FakeGPT, Waits, fake_cuda, on_fake_cuda
from helpers.runs import assert_same_run, configured
from torch.overrides import TorchFunctionMode
from tqdm import tqdm
from variants import FORMS, FULL, LAYOUTS, PAIRS, V, config_of

import train
from core.device import resolve_device, seed_generator
from core.dist import AgreedStop, World
from core.process import StopSignal
from core.schema import ConfigError, build
from model import ops
from model.gpt import GPT
from scripts.benchmarks import bench_train
from sweeps.plan import compose
from training import checks
from training.config import TrainConfig, load_config
from training.meter import Meter
from training.session import Machine, Session, is_resident, set_up_machine, setup
from training.state import Facts, LowestLoss

MODEL = {"n_layer": 1, "n_head": 4, "n_embd": 32, "block_size": 16, "dropout": 0.1}
DATA = {"name": "random", "n_tokens": 2000, "val_tokens": 100}
FOLDERS = ("core", "data", "model", "training", "sweeps", "scripts")


def settings(**changes: Any) -> TrainConfig:
    """A run on the fake device. Nothing is compiled, where it does not say so."""
    plain = {"device": "cuda", "compile": False, "batch_size": 4, "model": MODEL, "data": DATA}
    return build(TrainConfig, {**plain, **changes})


class TwoLines:
    """A run directory that keeps nothing, and ends the run at the second line."""

    def __init__(self, waits: Waits) -> None:
        self.waits, self.lines, self.record = waits, 0, self

    def progress_bar(self, *_: Any) -> Any:
        return tqdm(disable=True)

    def log(self, *_: Any, **__: Any) -> None:
        pass

    def write(self, line: dict[str, Any]) -> None:
        self.waits.found.append(f"line {line['iter']}")
        self.lines += 1
        if self.lines == 2:
            raise EOFError


def train_two_lines(session: Session, waits: Waits) -> None:
    run_dir: Any = TwoLines(waits)
    with suppress(EOFError), StopSignal() as stop:
        train.train(train.Run(session, run_dir, Meter(session), LowestLoss(), Facts(), 1), AgreedStop(stop))


MLA = {"name": "mla", "kv_rank": 12, "nope_dim": 8, "rope_dim": 4, "v_dim": 6}
ROPE = {**MODEL, "position": "rope", "rope_theta": 100.0}
UPDATES: dict[str, dict[str, Any]] = {
    "adamw": {},
    "accumulated": {"gradient_accumulation_steps": 2, "dtype": "float32", "data": {**DATA, "on_device": False}},
    "muon": {"optim": {"name": "muon"}, "qk_norm": {"name": "rms"}},
    "clip": {"qk_clip": {"name": "clip"}},
    "mla": {"qk_clip": {"name": "clip"}, "model": ROPE, "attention": MLA},
    "log": {"qk_clip": {"name": "log"}, "qk_norm": {"name": "lp"}, "optim": {"name": "muon"}},
}  # fmt: skip


def check_updates() -> None:
    for name, changes in UPDATES.items():
        with fake_cuda() as waits:
            session = setup(settings(log_interval=2, **changes))
            assert all(p.is_cuda for p in session.model.parameters())
            waits.found.clear()
            train_two_lines(session, waits)
        reads = ["meter.read reads", *(["meter.read copies to cpu"] if "qk_clip" in changes else [])]
        assert waits.found == [*reads, "line 2", *reads, "line 4"], (name, waits.found)


def test_the_host_waits_for_the_device_at_log_lines_alone() -> None:
    """Of AdamW, Muon, QK-Clip, its log, and several micro-batches: the loop of train.py, four updates, two lines."""
    on_fake_cuda("test_cuda.check_updates")


def check_pairs(pairs: list[tuple[str, str]]) -> None:
    """Forward and backward of all, in fp32 with dropout and bf16 without (of MHA and at length; else of one); then
    decoding of two tokens."""
    both = ((torch.float32, 0.1), (torch.bfloat16, 0.0))
    turns = [(pair, both if FULL or pair[0] == "mha" else both[i % 2 :][:1]) for i, pair in enumerate(pairs)]
    for (layout, norm), dtype, dropout in [(pair, *one) for pair, some in turns for one in some]:
        with fake_cuda() as waits:
            model = FakeGPT(config_of(layout, norm, dropout=dropout, n_layer=1).gpt, V).to("cuda").train()
            idx = torch.zeros(2, 16, dtype=torch.int64, device="cuda")
            waits.found.clear()
            with torch.autocast("cuda", dtype) if dtype == torch.bfloat16 else nullcontext():
                logits, loss = model(idx, idx)
                loss.backward()
                assert logits is not None and logits.dtype == dtype and loss.is_cuda
                gradients = [(p, p.grad) for p in model.parameters()]
                assert all(g is not None and g.is_cuda and g.dtype == p.dtype for p, g in gradients)
                with torch.no_grad():
                    caches = model.eval().new_caches(2, 8, dtype)
                    model(idx[:, :3], caches=caches)
                    for pos in (3, 4):
                        assert model(idx[:, :1], caches=caches, pos=pos)[0].shape == (2, 1, V)
            assert waits.found == [], (layout, norm, waits.found)
    print(len(pairs))


def test_every_layout_and_every_norm_runs_and_waits_for_nothing() -> None:
    assert on_fake_cuda("test_cuda.check_pairs", PAIRS) == f"{len(PAIRS)}\n"


# -----------------------------------------------------------------------------
# The device, its generator, determinism, precision


def check_devices() -> None:
    with fake_cuda() as waits:
        assert resolve_device("auto") == torch.device("cuda:0")
        first, second = (torch.cuda.default_generators[i] for i in (0, 1))
        first.manual_seed(1)
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
        set_up_machine(settings())
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"  # read once a process: a later run may need it
        assert not torch.are_deterministic_algorithms_enabled()
        machine = set_up_machine(settings(device="cuda:1", deterministic=True))
        assert machine.device == torch.device("cuda:1") and torch.cuda.current_device() == 1
        seed_generator(7, machine.device)
        assert (first.initial_seed(), second.initial_seed(), torch.initial_seed()) == (1, 7, 7)
        with pytest.raises(ConfigError, match="device=cuda:2 is absent: there are 2 CUDA devices"):
            resolve_device("cuda:2")
        assert resolve_device("cuda", World(1, 2, 1, 2)) == torch.device("cuda:1")
        assert resolve_device("cuda:1", World(1, 2, 0, 1)) == torch.device("cuda:1")  # a rank on each of two nodes
        with pytest.raises(ConfigError, match="device=cuda:0 is the same GPU for every rank"):
            resolve_device("cuda:0", World(0, 2, 0, 2))
        with pytest.raises(ConfigError, match="device=cuda: 4 ranks of torchrun need a GPU each, of 2 here"):
            resolve_device("cuda", World(0, 4, 0, 4))

        assert torch.are_deterministic_algorithms_enabled()

        q = torch.empty(1, 2, 8, 16, device="cuda")
        waits.asked.clear()
        ops.max_logits(q, q, 1.0)
        assert waits.asked.count("bmm of 2") == 3  # of parts that TF32 holds
        for dtype, keys in ((torch.float32, 4), (torch.bfloat16, 2), (torch.float32, 1)):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(ops.F, "scaled_dot_product_attention", lambda q, k, v, **_: k)
                x = torch.empty(1, 4, 8, 16, device="cuda", dtype=dtype)
                got = ops.causal_attention(x, x[:, :keys], x[:, :keys], 1.0)
            assert got.size(1) == (4 if dtype == torch.float32 else keys)  # SDPA's fp32 kernel takes no groups

        for on_device, n, resident in (("auto", 2**20, True), ("auto", 6 * 2**30, False), (False, 2**20, False)):
            corpus: Any = SimpleNamespace(tokens=SimpleNamespace(nbytes=n))
            config = settings(data={**DATA, "on_device": on_device})
            assert is_resident(config, corpus, torch.device("cuda:0")) == resident
            assert not is_resident(config, corpus, torch.device("cpu"))


def test_a_device_is_made_current_and_its_generator_alone_is_seeded() -> None:
    """Also what a process must set for deterministic=true, which products are
    exact where TF32 is allowed, and which corpora a GPU keeps."""
    on_fake_cuda("test_cuda.check_devices")


def test_a_gpu_is_warned_of_attention_that_holds_t_x_t(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend, plain, warned in (("math", True, 1), ("flash", True, 0), (None, True, 0), (None, False, 1)):
        machine = Machine(World(), torch.device("cuda"), torch.float32)
        model = SimpleNamespace(attentions=[SimpleNamespace(plain_softmax=plain)])
        session: Any = SimpleNamespace(machine=machine, config=settings(), model=model, attention_backend=backend)
        warnings = checks.attention_warnings(session)
        assert len(warnings) == warned
    session.machine = replace(machine, device=torch.device("cpu"))
    assert checks.attention_warnings(session) == []


def test_no_program_makes_a_device_of_its_own() -> None:
    """resolve_device() makes it current. diagnostics.py names one for fake tensors."""
    files = [*ROOT.glob("*.py"), *(f for folder in FOLDERS for f in (ROOT / folder).rglob("*.py"))]
    found = {str(file.relative_to(ROOT)) for file in files if re.search(r"torch\.device\((?!f?\")", file.read_text())}
    assert found == {"core/device.py", "model/diagnostics.py"}


def test_three_products_of_tf32_are_as_exact_as_fp32() -> None:
    class TF32(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.__name__ in ("matmul", "__matmul__"):
                args = [((x.view(torch.int32) + 2**12) & -(2**13)).view(torch.float32) for x in args]
            return func(*args, **(kwargs or {}))

    a, b = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0))
    exact = a.double() @ b.double()
    with TF32():
        products = a @ b, ops.matmul_3xtf32(a, b)
    errors = [((y - exact).norm() / exact.norm()).item() for y in (*products, a @ b)]
    assert errors[0] > 1e-4 > 1e-6 > errors[1] < 4 * errors[2]


def test_on_a_cpu_neither_deterministic_nor_on_device_changes_a_bit(corpus: Path, tmp_path: Path) -> None:
    data = {"name": "text", "path": str(corpus), "on_device": True}
    for name, changes in (("other", {"deterministic": True, "data": data}), ("plain", {})):  # the last turns it off
        assert train.run(configured(corpus, tmp_path / name, eval_iters=2, max_iters=5, **changes)) == 0
        assert torch.are_deterministic_algorithms_enabled() == (name == "other")
    assert_same_run(tmp_path / "plain", tmp_path / "other")


# -----------------------------------------------------------------------------
# The benchmark and the compiler


def check_benchmark(words: list[str]) -> None:
    updates: list[list[str]] = []
    start, add = Meter.start, Meter.add
    with fake_cuda() as waits, pytest.MonkeyPatch.context() as patch:

        def spied_start(meter: Meter) -> None:
            waits.asked.clear()
            start(meter)

        def spied_add(*args: Any) -> None:
            add(*args)
            updates.append([*waits.asked])

        patch.setattr(Meter, "start", spied_start)
        patch.setattr(Meter, "add", spied_add)
        bench_train.ours(words)[0](2)
        timed = updates[-1]
        train_two_lines(setup(load_config(compose(words))), waits)
    assert timed == updates[-1] and "bmm of 2" in timed


def test_the_benchmark_times_the_operations_of_an_update_of_train() -> None:
    sizes = ["model.n_layer=1", "model.n_head=2", "model.n_embd=16", "model.block_size=16", "model.dropout=0.1"]
    data = ["data=random", "data.n_tokens=2000", "data.val_tokens=100", "batch_size=4", "log_interval=2"]
    on_fake_cuda("test_cuda.check_benchmark", [*sizes, *data, "device=cuda", "compile=false", "qk_clip=clip"])


def check_graph(pairs: list[tuple[str, str]]) -> None:
    """Of layouts with a QK norm, in bf16 with dropout and with QK-Clip's maxima: forward alone, as Dynamo traces it."""
    for layout, norm in pairs:
        torch._dynamo.reset()
        config = config_of(layout, norm, dropout=0.1, n_layer=1).gpt
        with torch.device("meta"):
            GPT(config, V)  # measures E[g], where alpha starts from, once: a fake device has no numbers
        with fake_cuda(watch=False), torch.autocast("cuda", torch.bfloat16):
            model = FakeGPT(config, V).to("cuda").train()
            for attention in model.attentions:
                attention.track_max_logits()
            idx = torch.zeros(2, 16, dtype=torch.int64, device="cuda")
            compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
            assert compiled(idx, idx)[1].is_cuda
    print(len(pairs))


def test_a_forward_pass_of_every_layout_and_every_norm_is_one_graph() -> None:
    """Of every form of norm with one layout, and every layout with two."""
    layouts = [(a, n) for a in LAYOUTS if a not in ("mha", "mqa") for n in ("layernorm", "lp_learned")]
    pairs = PAIRS if FULL else [*(("mha", n) for n in (*FORMS, "lpinf")), *layouts]
    assert on_fake_cuda("test_cuda.check_graph", pairs) == f"{len(pairs)}\n"


GRAPHS = """
import hashlib, sys, torch, train
from sweeps.plan import compose
from training.config import load_config
real, ran = torch.compile, []
def backend(graph, inputs):
    name = hashlib.sha256((graph.code + repr(inputs and [getattr(x, "shape", x) for x in inputs])).encode()).hexdigest()
    def run(*inputs):
        ran.append(name[:8])
        return graph.forward(*inputs)
    return run
torch.compile = lambda model, **options: real(model, backend=backend, **options)
for words in sys.argv[1:]:
    ran.clear()
    assert train.run(load_config(compose(words.split()))) == 0
print("ran", *ran)
"""


def test_a_run_executes_the_same_graphs_alone_and_third_in_a_worker(tiny_run: list[str], tmp_path: Path) -> None:
    """An evaluation's batch has another size than training's."""
    words = [*tiny_run, "compile=true", "max_iters=3", "model.n_layer=1"]
    changes = ("qk_norm=rms", "", "seed=5")
    runs = [" ".join([*words, f"out_dir=run{i}", change]) for i, change in enumerate(changes)]
    both = ([f"{runs[2]} out_dir=alone"], runs)
    alone, third = (run_python(GRAPHS, *of, cwd=tmp_path).stdout.splitlines()[-1] for of in both)
    assert alone == third and len(set(alone.split())) == 3  # "ran", training's and evaluation's
