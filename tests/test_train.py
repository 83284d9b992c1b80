import ctypes
import functools
import math
import os
import resource
import shlex
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import QK_NORM_VARIANTS, Program, needs_compiler, run_python, tiny_config
from helpers.runs import FP32, SETTINGS, configured, lines, saved_json, weights
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from variants import ALL_PAIRS, FULL, LAYOUTS, NORMS, fresh

import train
from core import checkpoint
from core.dist import World
from core.record import Metrics
from data.batches import Batches
from data.folds import split
from data.tokenizer import build_tokenizer
from model.diagnostics import diagnose
from model.gpt import GPT
from model.options import LpNormOptions
from training import estimate, optim, updates
from training.evaluate import mean_loss, spike_score
from training.meter import Meter
from training.optim import Optimizer
from training.session import Machine, read_data
from training.state import Readings
from training.updates import accumulate_gradients, update_ratios


def test_a_run_learns_and_leaves_what_the_design_promises(corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    schedule = {"name": "cosine", "warmup_iters": 10, "min_lr": 1e-3}
    optim = {"name": "adamw", "learning_rate": 1e-2}
    asked: dict[str, Any] = {"max_iters": 150, "schedule": schedule, "optim": optim}
    config = configured(corpus, run, eval_interval=50, log_interval=10, plot="auto", **asked)
    assert train.run(config) == 0
    names = "ckpt config.yaml curve.png diagnostics.jsonl lock metrics.jsonl status.json summary.json train.log"
    assert sorted(p.name for p in run.iterdir()) == names.split()
    curve = (run / "curve.png").read_bytes()
    assert curve[:8] == b"\x89PNG\r\n\x1a\n"
    for plot in ("auto", True):  # of a finished run it is drawn where it is asked for
        (run / "curve.png").write_bytes(b"old")
        assert train.run(configured(corpus, run, plot=plot, **asked)) == 0
        assert (run / "curve.png").read_bytes() == (curve if plot is True else b"old")
    logged = Metrics.read(run / "metrics.jsonl")
    assert [line["iter"] for line in logged] == list(range(0, 151, 10))
    evaluated = [line for line in logged if "val/loss" in line]
    assert [line["iter"] for line in evaluated] == [0, 50, 100, 150]
    assert evaluated[0]["val/loss"] == pytest.approx(math.log(20), abs=0.3)
    assert evaluated[-1]["val/loss"] < unigram_entropy(corpus) - 0.5
    assert evaluated[-1]["val/bpc"] == pytest.approx(evaluated[-1]["val/loss"] / math.log(2))
    for line in logged[:-1]:
        assert {"train/loss", "lr", "grad_norm", "tok_per_sec", "mfu"} <= line.keys() and 0 < line["mfu"] < 2
    summary = saved_json(run, "summary")
    best = min(evaluated, key=lambda line: line["val/loss"])
    assert summary["status"] == "done" and summary["iter"] == 150
    assert (summary["val/loss_min"], summary["iter_of_min"]) == (best["val/loss"], best["iter"])
    assert summary["val/loss"] == evaluated[-1]["val/loss"]
    assert {"train/loss", "seconds", "tok_per_sec", "parameters", "device"} <= summary.keys()
    assert (run / "ckpt" / "best").resolve().name == f"step_{best['iter']:06d}"
    assert saved_json(run, "status")["state"] == "done"


def unigram_entropy(corpus: Path) -> float:
    """Nats a character: the loss of the best guess that looks at no context."""
    text = corpus.read_text()
    counts = np.array([text.count(c) for c in set(text)]) / len(text)
    return -(counts * np.log(counts)).sum()


FAST: dict[str, Any] = {
    "max_iters": 50, "batch_size": 16, "eval_interval": 50, "log_interval": 50, "checkpoint_interval": 50,
    "model": {**SETTINGS["model"], "n_layer": 1, "n_head": 4, "n_embd": 32, "dropout": 0.1},
    "optim": {"name": "adamw", "learning_rate": 2e-2},
    "schedule": {"name": "cosine", "warmup_iters": 5, "min_lr": 1e-3},
}  # fmt: skip


COVERING = [  # each layout and each norm at least once
    ("mha", "none"), ("gqa", "rms"), ("mla_unified", "layernorm"), ("mqa", "lp1"), ("mla_q_rank", "lp1.5"),
    ("mha", "lp2"), ("mla_unified", "lp3"), ("gqa", "lpinf"), ("mla", "lp_learned"),
]  # fmt: skip
assert {layout for layout, _ in COVERING} == {*LAYOUTS} and {name for _, name in COVERING} == {*NORMS}


MUON = {"optim": {"name": "muon", "learning_rate": 2e-2}, "schedule": {"name": "wsd", "warmup_iters": 5}}


@pytest.mark.parametrize(
    ("layout", "name", "recipe"), [("mha", "none", MUON), *((*pair, {}) for pair in (ALL_PAIRS if FULL else COVERING))]
)
def test_every_layout_and_every_norm_trains_below_the_entropy_of_single_characters(
    layout: str, name: str, recipe: dict[str, Any], corpus: Path, tmp_path: Path
) -> None:
    norm, run = QK_NORM_VARIANTS[name], tmp_path / "run"
    model = FAST["model"] | ({} if layout == "mha" else {"position": "rope", "rope_theta": 100.0})
    groups = {"attention": asdict(LAYOUTS[layout]), "qk_norm": asdict(norm), "model": model}
    assert train.run(configured(corpus, run, **{**FAST, **groups, **recipe})) == 0
    assert lines(run)[-1]["val/loss"] < unigram_entropy(corpus)
    squares = {key: t for key, t in weights(run).items() if key.startswith("optimizer/exp_avg_sq/")}
    assert recipe or len(squares) == sum(key.startswith("model/") for key in weights(run))
    for key, of_gradients in squares.items():
        assert of_gradients.view(len(of_gradients), -1).any(1).all(), key


@pytest.mark.parametrize(("tokens", "rows"), [(10**9, [7, 7]), (48, [3, 3, 1] * 2), (1, [1] * 14)])
def test_on_a_cpu_few_windows_go_through_at_once(tokens: int, rows: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two micro-batches of seven windows of 16 tokens: the loss and the gradient are those of all 14 together."""
    network = fresh(tiny_config()).double()
    text = np.random.default_rng(0).integers(11, size=500)
    batches = Batches(text, split(len(text), 10, 0, 16), 16, batch_size=7, seed=1)
    x, y = (torch.cat(parts) for parts in zip(*(batches.get_batch(3, i) for i in range(2)), strict=True))
    loss = network(x, y)[1]
    expected = torch.autograd.grad(loss, [*network.parameters()])
    seen: list[int] = []
    network.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    monkeypatch.setattr(updates, "CPU_TOKENS", tokens)
    total = accumulate_gradients(network, batches.prefetch([(3, 0), (3, 1)]), 2, FP32)
    assert seen == rows
    torch.testing.assert_close(total.double(), loss.detach(), rtol=1e-6, atol=0)
    for parameter, gradient in zip(network.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_weights_are_cast_once_for_all_of_a_batch(checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16, two micro-batches in seven parts each and nine batches of held-out text; the gradients are those of the
    parts one by one, bit for bit, and no weight stays cast for the next update."""
    network = fresh(tiny_config(activation_checkpointing=checkpointing))
    batches = Batches(np.arange(500) % 11, split(500, 10, 0, 16), 16, batch_size=7, seed=1)
    bf16, parameters = replace(FP32, dtype=torch.bfloat16), list(network.parameters())
    multiplied = [*(m for m in network.modules() if isinstance(m, torch.nn.Linear)), network.transformer.wte]
    cast: list[str] = []

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names = [name for name, p in network.named_parameters() if args and args[0] is p]
            cast.extend(names if func is torch.ops.aten._to_copy.default else [])
            return func(*args, **kwargs or {})

    gradients = [torch.zeros_like(p) for p in parameters]
    for micro_step in range(2):
        for x, y in zip(*(t.split(1) for t in batches.get_batch(3, micro_step)), strict=True):
            with bf16.autocast():
                loss = network(x, y)[1] / 14
            for total, gradient in zip(gradients, torch.autograd.grad(loss, parameters), strict=True):
                total += gradient
    monkeypatch.setattr(updates, "CPU_TOKENS", 16)
    for _ in range(2):
        with Casts():
            accumulate_gradients(network, batches.prefetch([(3, 0), (3, 1)]), 2, bf16)
        assert len(cast) == len(set(cast)) == len(multiplied)
        cast.clear()
        for parameter, expected in zip(parameters, gradients, strict=True):
            assert parameter.grad is not None and torch.equal(parameter.grad, expected)
            parameter.grad = None
    with Casts():
        mean_loss(network, [batches.get_batch(i) for i in range(9)], bf16)
    assert len(cast) == len(set(cast)) == len(multiplied)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """How many graphs torch.compile has made; a model that is not one graph as a whole raises."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, fullgraph=True))
    before = counters["stats"]["unique_graphs"]
    with torch._dynamo.config.patch(recompile_limit=8):  # PyTorch's, and again afterwards
        yield lambda: counters["stats"]["unique_graphs"] - before
    torch.compiler.reset()


@needs_compiler
def test_one_compilation_serves_every_p_fold_and_seed(graphs: Callable[[], int], corpus: Path, tmp_path: Path) -> None:
    """In one process, as in a sweep's worker; what is learned is what is learned without a compiler."""
    made = []
    for p, fold, seed in ((2.0, 0, 1), (3.0, 1, 1), (1.0, 0, 2), (1.5, 2, 3), (7.25, 1, 4)):
        changes = {
            "data": {"name": "text", "path": str(corpus), "fold": fold}, "seed": seed,
            "qk_norm": asdict(LpNormOptions(p=p)), "model": {**SETTINGS["model"], "n_layer": 1, "dropout": 0.0},
        }  # fmt: skip
        compiled, eager = tmp_path / f"{p}", tmp_path / f"{p} eager"
        assert train.run(configured(corpus, compiled, compile=True, **changes)) == 0
        made.append(graphs())
        assert train.run(configured(corpus, eager, **changes)) == 0
        for a, b in zip(lines(compiled), lines(eager), strict=True):
            for key in a.keys() & {"train/loss", "val/loss", "grad_norm"}:
                assert a[key] == pytest.approx(b[key], rel=1e-5), (p, key)
    assert made == [2] * 5  # with and without a derivative


def test_a_process_compiles_every_model_that_it_trains(
    graphs: Callable[[], int], monkeypatch: pytest.MonkeyPatch, corpus: Path, tmp_path: Path
) -> None:
    """PyTorch's own limit would stop at four models."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    names = ["none", "rms", "layernorm", "lp2", "lp_learned"]
    for n, name in enumerate(names, 1):
        norm = asdict(QK_NORM_VARIANTS[name])
        model = {**SETTINGS["model"], "n_layer": 1, "dropout": 0.0}
        assert train.run(configured(corpus, tmp_path / name, compile=True, qk_norm=norm, model=model)) == 0
        assert graphs() == 2 * n, name


def test_gradient_accumulation_changes_neither_loss_nor_gradient_nor_data(corpus: Path, tmp_path: Path) -> None:
    """Four micro-batches of 4 against one forward pass of the same 16 sequences, in the test's own loop."""
    no_dropout = {**SETTINGS["model"], "dropout": 0.0}
    config = configured(corpus, tmp_path / "run", gradient_accumulation_steps=4, model=no_dropout, grad_clip=0.0)
    assert train.run(config) == 0
    text = corpus.read_text()
    tokenizer = build_tokenizer("char", text)
    tokens = tokenizer.encode(text)
    batches = Batches(tokens, split(len(tokens), 10, None), 16, 4, config.seed)
    gpt = fresh(config, config.seed, tokenizer.vocab_size)
    optimizer = Optimizer(gpt, config)
    for step, line in zip(range(6), lines(tmp_path / "run"), strict=False):
        parts = [batches.get_batch(step, micro_step) for micro_step in range(4)]
        x, y = (torch.cat(part) for part in zip(*parts, strict=True))
        for group in optimizer.param_groups:
            group["lr"] = train.learning_rate(step, config)
        loss: Tensor = gpt(x, y)[1]
        loss.backward()
        norm = torch.stack([p.grad.square().sum() for p in gpt.parameters() if p.grad is not None]).sum().sqrt()
        assert line["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert line["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        assert line["lr"] == train.learning_rate(step, config)
        before = {name: p.detach().clone() for name, p in gpt.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        updates = {key: value for key, value in line.items() if key.startswith("update/")}
        evaluated = step % config.eval_interval == 0
        assert updates == (pytest.approx(update_ratios(gpt, before), rel=1e-3) if evaluated else {})


def test_grad_clip_bounds_the_update_but_not_the_logged_norm(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    norms: list[float] = []
    step = optim.AdamW.step

    def spy(self: optim.AdamW, *skip: Tensor) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        norms.append(torch.stack([g.square().sum() for g in gradients]).sum().sqrt().item())
        step(self, *skip)

    monkeypatch.setattr(optim.AdamW, "step", spy)
    assert train.run(configured(corpus, tmp_path / "run", grad_clip=0.01)) == 0
    assert norms == pytest.approx([0.01] * 6, rel=1e-3)
    assert all(line["grad_norm"] > 0.1 for line in lines(tmp_path / "run")[:-1])


def test_sampled_evaluation_is_logged_beside_the_exact_one_and_changes_nothing(corpus: Path, tmp_path: Path) -> None:
    assert train.run(configured(corpus, tmp_path / "a")) == 0
    assert train.run(configured(corpus, tmp_path / "b", eval_iters=3)) == 0
    sampled = [{k: v for k, v in line.items() if k.endswith("_sampled")} for line in lines(tmp_path / "b")]
    assert [len(s) for s in sampled] == [2, 0, 2, 0, 2, 0, 2]
    rest = [{k: v for k, v in line.items() if not k.endswith("_sampled")} for line in lines(tmp_path / "b")]
    assert rest == lines(tmp_path / "a")
    assert sampled[0]["val/loss_sampled"] == pytest.approx(rest[0]["val/loss"], abs=0.1)


def test_each_evaluation_has_diagnostics_of_the_same_held_out_sequences(corpus: Path, tmp_path: Path) -> None:
    config = configured(corpus, tmp_path / "run", qk_norm={"name": "lp", "p": 3.0}, max_iters=40, eval_interval=20)
    assert train.run(config) == 0
    logged = lines(tmp_path / "run")
    evaluated = [line for line in logged if "val/loss" in line]
    tables = Metrics.read(tmp_path / "run" / "diagnostics.jsonl")
    assert [line["iter"] for line in evaluated] == [line["iter"] for line in tables] == [0, 20, 40]
    for line, table in zip(evaluated, tables, strict=True):
        summary = {key: value for key, value in table.items() if key.startswith("attn/") and "/layer_" not in key}
        assert summary == {key: value for key, value in line.items() if key.startswith("attn/")} and len(table) > 30
    corpus_read = read_data(config).corpus
    held_out = torch.from_numpy(corpus_read.tokens[5400:6000].astype(np.int64))  # the last tenth
    gpt = GPT(config.gpt, corpus_read.tokenizer.vocab_size)
    gpt.load_state_dict(checkpoint.load(tmp_path / "run" / "ckpt" / "latest").tensors["model"])
    values = diagnose(gpt, held_out[: 4 * 16].view(4, 16))
    assert tables[-1] == {"iter": 40, **values}
    assert "train/spike_score" not in evaluated[0]  # of no past
    losses = [line["train/loss"] for line in logged[:40]]
    assert evaluated[-1]["train/spike_score"] == spike_score(losses)


# -----------------------------------------------------------------------------
# The program


@pytest.mark.skipif(torch.version.cuda is not None, reason="its libraries may take the 4 GiB")
def test_too_little_memory_is_one_line(program: Program, tiny_run: list[str], tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))

    words = [*tiny_run, "model.n_embd=4096", "model.n_layer=6", "out_dir=run"]
    done = program("train.py", *words, preexec_fn=limit, status=1)
    assert done.stderr.startswith("failed: out of memory")
    assert done.stderr.count("\n") == 1 and not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["é dir", "it's {x}=1"])
def test_how_to_sample_is_said_in_words_of_a_shell(name: str, corpus: Path, tmp_path: Path, forked: Program) -> None:
    assert train.run(configured(corpus, tmp_path / name, max_iters=2)) == 0
    log = (tmp_path / name / "train.log").read_text()
    table = [line.split()[2] for line in log.splitlines()[-6:]]
    assert table == ["done:", "best:", "time:", "kept:", "next:", "next:"]
    said, page = log.rpartition("python sample.py ")[2].splitlines()
    assert name != "é dir" or said == f"'run={tmp_path / name}'"
    assert page.endswith(f"python scripts/report.py {said} watch=true")
    done = forked("sample.py", *shlex.split(said), "num_samples=1", "max_new_tokens=1", "start=to")
    assert done.stdout.startswith("to")


def files(run: Path) -> dict[Path, bytes]:
    """The files of a run but for its log."""
    return {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name != "train.log"}


def test_the_program_trains_evaluates_and_starts_afresh(forked: Program, tiny_run: list[str], tmp_path: Path) -> None:
    words, run = [*tiny_run, "max_iters=4", "out_dir=run"], tmp_path / "run"
    done = forked("train.py", *words)
    assert "done: val/loss" in done.stdout
    before = files(run)
    again = forked("train.py", *words)
    assert "run is done" in again.stdout
    again = forked("train.py", *words, "eval_only=true")  # of the latest checkpoint
    assert f"iter 4: val/loss {lines(run)[-1]['val/loss']:.4f}" in again.stdout
    assert files(run) == before
    forked("train.py", *words, "fresh=true")
    assert (tmp_path / "run.old-1" / "metrics.jsonl").read_bytes() == before[run / "metrics.jsonl"]
    assert lines(run) == lines(tmp_path / "run.old-1")


def test_dry_run_prints_costs_and_writes_nothing(forked: Program, tiny_run: list[str], tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    done = forked("train.py", *tiny_run, "dry_run=true", "qk_norm=lp", "qk_norm.p=inf")
    for part in ("p: .inf", "parameters:", "FLOPs:", "memory:", "KV cache:     ", "256 bytes", "estimate:", "runs/"):
        assert part in done.stdout, part
    assert sorted(tmp_path.rglob("*")) == before


def test_a_bf16_that_a_cpu_emulates_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(World(), torch.device("cpu"), torch.bfloat16)
    for has in (False, True):
        monkeypatch.setattr("training.session.has_bfloat16", lambda device, has=has: has)
        assert ("dtype=float32 is far faster" in machine.dtype_in_words) == (not has)
        assert replace(machine, dtype=torch.float32).dtype_in_words == "torch.float32"


def test_the_estimate_counts_sampled_evaluations(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "training_rate", lambda *_: (1000.0, "fixed"))
    seconds = []
    for eval_iters in (0, 30):
        config = configured(corpus, tmp_path, max_iters=2, eval_interval=1, eval_iters=eval_iters)
        seconds.append(estimate.estimate(config)[0])
    tokens = 3 * 2 * 30 * config.batch_size * config.model.block_size  # 3 evaluations, of both halves of the text
    assert seconds[1] - seconds[0] == pytest.approx(tokens / 3 / 1000)


def test_a_multirun_is_a_run_each_wherever_m_stands(forked: Program, tiny_run: list[str], tmp_path: Path) -> None:
    forked("train.py", *tiny_run, "max_iters=2", "-m", "seed=1,2", "qk_norm=none,rms")
    assert len(list((tmp_path / "runs").glob("*/summary.json"))) == 4


def test_imports_are_lazy(program: Program, tiny_run: list[str]) -> None:
    done = program("train.py", *tiny_run, "max_iters=2", env={**os.environ, "PYTHONPROFILEIMPORTTIME": "1"})
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "torch" in imported
    assert not imported & {"wandb", "datasets", "matplotlib", "pandas", "transformers", "tokenizers", "tiktoken"}
    assert not imported & {"torch._dynamo", "torch._inductor", "sympy"}  # PyTorch's compiler, 2 s


def test_bf16_trains_with_fp32_weights(corpus: Path, tmp_path: Path) -> None:
    assert train.run(configured(corpus, tmp_path / "a", dtype="bfloat16")) == 0
    assert train.run(configured(corpus, tmp_path / "b", dtype="float32")) == 0
    assert {t.dtype for name, t in weights(tmp_path / "a").items() if name.startswith("model/")} == {torch.float32}
    a, b = (lines(tmp_path / name)[-1]["val/loss"] for name in "ab")
    assert a != b and a == pytest.approx(b, abs=0.02)


PAGE_FAULTS = """
import resource, sys, torch
from core.device import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
for i in range(41):
    if i == 1:  # what comes first is new memory either way
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(5 * 2**20) for _ in range(4)]  # of 20 MiB
    del tensors
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_memory_that_is_freed_is_used_again_without_page_faults() -> None:
    if not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
        pytest.skip("the setting is glibc's")

    def page_faults(word: str) -> int:
        limit = {"MALLOC_MMAP_THRESHOLD_": f"{2**20}"}  # else it grows with what a process frees
        return int(run_python(PAGE_FAULTS, word, env=limit).stdout)

    assert 20 * page_faults("keep") < page_faults("give back")


def test_the_time_left_counts_updates_at_their_speed_and_evaluations_apart() -> None:
    """The evaluation at the start of a run says nothing of its updates."""
    config = SimpleNamespace(max_iters=100, eval_interval=40, tokens_per_iter=10)
    meter = Meter(SimpleNamespace(config=config, peak=1.0), Readings(seconds=30.0, train_seconds=10.0))  # type: ignore[arg-type]
    left = meter.seconds_left({"iter": 9, "tok_per_sec": 20.0})
    assert left == pytest.approx(90 / 2 + 3 * 20, rel=0.01)  # evaluations at 40, 80 and 100, each as long as that at 0
    left = meter.seconds_left({"iter": 99, "tok_per_sec": 20.0})
    assert left == pytest.approx(20 / 3, rel=0.01)
