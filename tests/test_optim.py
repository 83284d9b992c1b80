import copy
import dataclasses
import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from conftest import tiny_config
from torch import Tensor, nn
from variants import CONTESTANTS, V, config_of, fresh, random_tokens

from core.checkpoint import CorruptCheckpoint
from core.dist import World
from core.plugins import register
from core.schema import ConfigError, options
from model.gpt import GPT
from model.kernels import operators as kernels
from model.options import LpNormOptions, MLAOptions, QKNormOptions, RMSNormOptions
from training import estimate, optim, updates
from training.config import AdamWOptions, MuonOptions, OptimizerOptions, TrainConfig
from training.optim import AdamW, Muon, Optimizer, check_optimizer, optimizer_bytes, parameter_groups
from training.session import Machine, checked_meta_model, read_data, setup
from training.updates import applying_weights_variant, step_optimizer, update_ratios


def with_optimizer(config: TrainConfig) -> tuple[GPT, Optimizer]:
    model = fresh(config)
    return model, Optimizer(model, config)


def train(model: GPT, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        model(random_tokens(4, 16, seed=step), random_tokens(4, 16, seed=step + 100))[1].backward()
        with applying_weights_variant(model):
            optimizer.step()
        optimizer.zero_grad()


def test_matrices_decay_and_vectors_do_not(qk_norm: QKNormOptions) -> None:
    model = fresh(tiny_config(qk_norm, bias=True))
    named = dict(model.named_parameters())
    decay, rest = parameter_groups(named, 0.1)
    assert decay["weight_decay"] == 0.1 and rest["weight_decay"] == 0.0
    assert all(p is named[name] for group in (decay, rest) for name, p in group["params"])
    decayed, kept = ({name for name, _ in group["params"]} for group in (decay, rest))
    assert decayed | kept == named.keys() and not decayed & kept
    assert all(name.endswith("weight") and "ln_" not in name for name in decayed)
    assert all(name.endswith(("bias", "gain", "raw", "raw_p")) or "ln_" in name for name in kept)


def test_updates_equal_adamw_written_out() -> None:
    """Decoupled weight decay, Loshchilov and Hutter, algorithm 2, in float64."""
    config = tiny_config()
    model = fresh(config).double()
    optimizer = Optimizer(model, config)
    o, name = AdamWOptions(), "transformer.h.0.mlp.c_fc.weight"
    w = model.get_parameter(name).detach().clone()
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for t in range(1, 6):
        model(random_tokens(4, 16, seed=t), random_tokens(4, 16, seed=t + 100))[1].backward()
        g = model.get_parameter(name).grad
        assert g is not None
        m, v = o.betas[0] * m + (1 - o.betas[0]) * g, o.betas[1] * v + (1 - o.betas[1]) * g * g
        m_hat, v_hat = m / (1 - o.betas[0] ** t), v / (1 - o.betas[1] ** t)
        w = w - o.learning_rate * (m_hat / (v_hat.sqrt() + 1e-8) + o.weight_decay * w)
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(model.get_parameter(name).detach(), w, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("limit", [1.0, 1e3, math.inf])
def test_a_kernel_clips_as_pytorch_does(limit: float) -> None:
    """Whatever the number of threads; inf only measures, and what is not finite is seen."""
    given = [random_tokens(*size, seed=i).float() for i, size in enumerate([(300, 50), (7, 1), (1, 4096), (1, 4097)])]
    if not kernels.available(given[0]):
        pytest.skip("there are no kernels")
    expected = [nn.Parameter(torch.zeros_like(x)) for x in given]
    for p, x in zip(expected, given, strict=True):
        p.grad = x.clone()
    norm, threads, found = nn.utils.clip_grad_norm_(expected, limit), torch.get_num_threads(), []
    for n in (1, 2):
        torch.set_num_threads(n)
        grads = [x.clone() for x in given]
        found.append([kernels.nanoqk.clip_grad_norm_(grads, limit), *grads])
    torch.set_num_threads(threads)
    for mine, again, theirs in zip(*found, [norm, *(p.grad for p in expected)], strict=True):
        assert torch.equal(mine, again)
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=0)
    for value in (math.nan, math.inf):
        assert not kernels.nanoqk.clip_grad_norm_([*given, torch.tensor([value])], limit).isfinite()


def test_a_parameter_may_lack_a_gradient_and_a_state_may_be_replaced() -> None:
    """AdamW keeps its lists of moments from step to step, and must see what changes."""
    a, b = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = AdamW([a, b], lr=0.1, weight_decay=0.0)
    for missing in (None, a, None, b, None):
        for p in (a, b):
            p.grad = None if p is missing else torch.ones(3)
        before = [p.detach().clone() for p in (a, b)]
        optimizer.step()
        moved = [not torch.equal(p, old) for p, old in zip((a, b), before, strict=True)]
        assert moved == [missing is not p for p in (a, b)]
    assert optimizer.state[a]["step"] == 4
    copy.deepcopy(optimizer).step()
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][1]["exp_avg"] = -1e6 * torch.ones(3)
    optimizer.load_state_dict(state)
    start, b.grad = b.detach().clone(), torch.ones(3)
    optimizer.step()
    assert (b > start).all()


def test_state_that_is_loaded_later_counts_at_once() -> None:
    model = nn.ParameterDict({"b": nn.Parameter(torch.ones(3))})
    optimizer, b = Optimizer(model, TrainConfig()), model["b"]
    for grows in (False, True):
        if grows:
            optimizer.load({"exp_avg/b": -1e6 * torch.ones(3)})
        b.grad, start = torch.ones(3), b.detach().clone()
        optimizer.step()
        assert ((b > start) == grows).all()


def continued(config: TrainConfig) -> tuple[GPT, dict[str, Tensor]]:
    """Assert that six steps are three and, by the state of the optimizer as named tensors, three; which leave that
    state, a checkpoint's, as it is. Returns a model and the state."""
    straight, first, second = (fresh(config) for _ in range(3))
    train(straight, Optimizer(straight, config), range(6))
    before = Optimizer(first, config)
    train(first, before, range(3))
    saved = before.tensors()
    kept = {name: t.clone() for name, t in saved.items()}
    second.load_state_dict(first.state_dict())
    after = Optimizer(second, config)
    after.load(saved)
    train(second, after, range(3, 6))
    for name, p in straight.named_parameters():
        assert torch.equal(p, second.get_parameter(name)), name
    assert all(torch.equal(saved[name], kept[name]) for name in kept)
    return first, saved


@pytest.mark.parametrize("name", CONTESTANTS)
def test_a_contestant_continues_bit_for_bit(name: str) -> None:
    continued(config_of("gqa", name))


# -----------------------------------------------------------------------------
# Muon. Three stacks, and by hand the rows of each projection of their hidden matrices.

STACKS: dict[str, tuple[TrainConfig, dict[str, list[int]]]] = {
    "mha": (
        config_of("mha", LpNormOptions(p=3.0), bias=True),
        {"attn.c_attn": [32, 32, 32], "attn.c_proj": [32], "mlp.c_fc": [128], "mlp.c_proj": [32]},
    ),
    "gqa": (
        config_of("gqa", RMSNormOptions(), mlp="swiglu", mlp_hidden=48),
        {"attn.c_attn": [32, 16, 16], "attn.c_proj": [32], "mlp.c_fc": [48, 48], "mlp.c_proj": [32]},
    ),
    "mla": (
        config_of(
            MLAOptions(kv_rank=16, q_rank=24, nope_dim=8, rope_dim=4, v_dim=6),
            LpNormOptions(p="learned", alpha_per="head"),
        ),
        {
            "attn.c_q_a": [24], "attn.c_q": [48], "attn.c_kv_a": [16, 4], "attn.c_kv_b": [32, 24], "attn.c_proj": [32],
            "mlp.c_fc": [128], "mlp.c_proj": [32],
        },
    ),
}  # fmt: skip


@pytest.fixture(params=STACKS)
def stack(request: pytest.FixtureRequest) -> tuple[TrainConfig, dict[str, list[int]]]:
    config, rows = STACKS[request.param]
    matrices = {f"transformer.h.{i}.{name}.weight": r for i in range(2) for name, r in rows.items()}
    return dataclasses.replace(config, optim=MuonOptions(learning_rate=1e-2)), matrices


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
def test_muon_orthogonalises_in_bf16_where_there_is_hardware_unless_all_is_to_be_fp32(
    dtype: Any, stack: tuple[TrainConfig, dict[str, list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("core.device.has_bfloat16", lambda device: True)
    found, orthogonalise = set(), optim.orthogonalise

    def spy(x: Tensor, *options: Any) -> Tensor:
        found.add(x.dtype)
        return orthogonalise(x, *options)

    monkeypatch.setattr(optim, "orthogonalise", spy)
    config = dataclasses.replace(stack[0], dtype=dtype)
    model = fresh(config)
    train(model, Optimizer(model, config), range(1))
    assert found == {torch.float32 if dtype == "float32" else torch.bfloat16}


@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_equals_torchs_own_on_a_copy_with_separate_projections(
    nesterov: bool, stack: tuple[TrainConfig, dict[str, list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, as torch's is on any hardware."""
    monkeypatch.setattr(optim, "resolve_dtype", lambda name, device: torch.bfloat16)
    config, matrices = stack
    assert isinstance(config.optim, MuonOptions)
    o = dataclasses.replace(config.optim, momentum=0.8, nesterov=nesterov, ns_steps=4)
    config = dataclasses.replace(config, optim=o)
    model, optimizer = with_optimizer(config)
    copy = {name: p.detach().clone() for name, p in model.named_parameters()}
    apart = {name: [nn.Parameter(t.clone()) for t in copy.pop(name).split(rows)] for name, rows in matrices.items()}
    rest = {name: nn.Parameter(t) for name, t in copy.items()}
    muon = torch.optim.Muon(
        [p for parts in apart.values() for p in parts],
        lr=o.learning_rate, weight_decay=0.1, momentum=0.8, nesterov=nesterov, ns_steps=4,
        adjust_lr_fn="match_rms_adamw",
    )  # fmt: skip
    decay = [{"params": [p], "weight_decay": 0.1 if p.dim() > 1 else 0.0} for p in rest.values()]
    adamw = torch.optim.AdamW(decay, lr=o.learning_rate, betas=(0.9, 0.99))
    for step in range(4):
        for group in [*optimizer.param_groups, *muon.param_groups, *adamw.param_groups]:
            group["lr"] = 1e-2 / (step + 1)
        model(random_tokens(4, 16, seed=step), random_tokens(4, 16, seed=step + 100))[1].backward()
        for name, p in model.named_parameters():
            assert p.grad is not None
            if name in rest:
                rest[name].grad = p.grad.clone()
            else:
                for part, g in zip(apart[name], p.grad.split(matrices[name]), strict=True):
                    part.grad = g.clone()
        for one in (optimizer, muon, adamw):
            one.step()
            one.zero_grad()
        for name, p in model.named_parameters():
            if name in rest:
                torch.testing.assert_close(p, rest[name], rtol=1e-4, atol=1e-6)
            else:  # bfloat16 products of an update of about 0.2 lr
                torch.testing.assert_close(p.detach(), torch.cat([*apart[name]]).detach(), rtol=0, atol=2e-5)


@pytest.mark.parametrize("shape", [(1, 1), (8, 8), (8, 30), (30, 8), (1, 16)])
def test_orthogonalise_in_fp32_is_the_polynomial_of_the_singular_values(shape: tuple[int, int]) -> None:
    a, b, c = 3.4445, -4.7750, 2.0315
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    x *= torch.tensor([1.0, 1e-3, 1e4])[:, None, None]
    found = optim.orthogonalise(x, (a, b, c), 5, 1e-7)
    for one, of in zip(x.double(), found, strict=True):
        u, s, v = torch.linalg.svd(one, full_matrices=False)
        s = s / s.square().sum().sqrt()
        for _ in range(5):
            s = a * s + b * s**3 + c * s**5
        torch.testing.assert_close(of.double(), u * s @ v, rtol=0, atol=2e-5)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("variant", [AdamWOptions, MuonOptions])
def test_every_row_is_in_exactly_one_group_and_only_hidden_matrices_are_muons(
    variant: type[AdamWOptions], tied: bool, stack: tuple[TrainConfig, dict[str, list[int]]]
) -> None:
    config, matrices = stack
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, tied=tied), optim=variant())
    model, optimizer = with_optimizer(config)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.add_(1)
        for name, p in model.named_parameters():
            assert (p == 1).all(), name
        if variant is MuonOptions:
            (muon, projections), (adamw, _) = optimizer.owned
            assert type(muon) is Muon and type(adamw) is AdamW
            for projection in projections.values():
                projection.zero_()
            assert {name for name, p in model.named_parameters() if (p == 0).all()} == matrices.keys()
            assert [len(p) for p in muon.param_groups[0]["params"]] == [len(p) for p in projections.values()]
            assert sorted(map(len, projections.values())) == sorted(r for rows in matrices.values() for r in rows)
            decays = [[group["weight_decay"] for group in one.param_groups] for one in (muon, adamw)]
            assert decays == [[0.1], [0.1, 0.0]]


def test_muon_by_name_continues_bit_for_bit(stack: tuple[TrainConfig, dict[str, list[int]]]) -> None:
    config, matrices = stack
    model, saved = continued(config)
    momenta = {re.sub(r"\[\d+:\d+\]$", "", n.split("/")[1]) for n in saved if n.startswith("momentum_buffer/")}
    assert momenta == matrices.keys()
    assert {n.split("/")[1] for n in saved if n.startswith("exp_avg/")} == model.state_dict().keys() - momenta


@pytest.mark.parametrize("variant", [AdamWOptions, MuonOptions])
def test_the_announced_bytes_of_state_are_those_in_use(variant: type[AdamWOptions]) -> None:
    config = dataclasses.replace(STACKS["mla"][0], optim=variant())
    model, optimizer = with_optimizer(config)
    train(model, optimizer, range(1))
    tensors = optimizer.tensors()
    assert optimizer_bytes(model, config) == sum(t.nbytes for name, t in tensors.items() if not name.startswith("step"))


def test_gradients_are_freed_and_a_step_without_moves_nothing(stack: tuple[TrainConfig, dict[str, list[int]]]) -> None:
    config, _ = stack
    model, optimizer = with_optimizer(config)
    train(model, optimizer, range(1))
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is None for group in optimizer.param_groups for p in group["params"])
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.step()
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())


def test_weights_that_were_moved_after_the_optimizer_was_built_are_noticed() -> None:
    config = dataclasses.replace(tiny_config(), optim=MuonOptions())
    model, optimizer = with_optimizer(config)
    with pytest.raises(AssertionError, match="moved"):
        train(model.double(), optimizer, range(1))


# -----------------------------------------------------------------------------
# What is logged of an update


KINDS = {
    "embedding": ["wte.weight", "wpe.weight", "lm_head.weight"],
    "attention": [f"{name}.weight" for name in ("c_attn", "attn.c_proj", "c_q", "c_q_a", "c_kv_a", "c_kv_b")],
    "mlp": ["c_fc.weight", "mlp.c_proj.weight"],
    "norm": [".bias", "ln_1.weight", "ln_2.weight", "ln_f.weight", "a_norm.weight", ".gain"],
    "alpha": ["alpha.raw"],
    "p": ["raw_p"],
}


@pytest.mark.parametrize("variant", [AdamWOptions, MuonOptions])
def test_update_ratios_are_norms_of_what_moved_over_norms_of_what_was_there(
    variant: type[AdamWOptions], stack: tuple[TrainConfig, dict[str, list[int]]]
) -> None:
    config, _ = stack
    config = dataclasses.replace(config, optim=variant(), model=dataclasses.replace(config.model, tied=False))
    model = fresh(config)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model, Optimizer(model, config), range(1))
    ratios, left = update_ratios(model, before), set(before)
    for kind, endings in KINDS.items():
        names = [name for name in before if name.endswith(tuple(endings))]
        left -= set(names)
        moved = sum(float(x) ** 2 for n in names for x in (model.get_parameter(n) - before[n]).flatten().tolist())
        there = sum(float(x) ** 2 for n in names for x in before[n].flatten().tolist())
        assert (f"update/{kind}" in ratios) == (there > 0)
        if there > 0:
            assert ratios.pop(f"update/{kind}") == pytest.approx((moved / there) ** 0.5, rel=1e-5) and moved > 0
    assert not ratios and not left


def test_the_ratio_to_weights_that_are_all_zero_is_missing() -> None:
    model = fresh(tiny_config(LpNormOptions(alpha_init=1.0)))  # log(1) = 0
    ratios = update_ratios(model, {name: p.detach().clone() for name, p in model.named_parameters()})
    assert "update/alpha" not in ratios and ratios["update/mlp"] == 0


def test_an_optimizer_that_nobody_makes_is_refused_and_is_not_adamw() -> None:
    @dataclasses.dataclass(frozen=True)
    class LionConfig(AdamWOptions):
        name: str = "lion"

    model = GPT(tiny_config().gpt, V)
    with pytest.raises(ConfigError, match="lion: no class is registered for its options"):
        Optimizer(model, dataclasses.replace(tiny_config(), optim=LionConfig()))


def test_the_estimated_rate_counts_clipping_and_the_optimizers_step(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [0]

    def takes(n: int, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            seconds[0] += n
            return call(*args, **options)

        return timed

    for n, owner, name in ((1, GPT, "forward"), (3, updates, "clip_gradients"), (5, optim.AdamW, "step")):
        monkeypatch.setattr(owner, name, takes(n, getattr(owner, name)))
    monkeypatch.setattr(estimate, "time", SimpleNamespace(perf_counter=lambda: seconds[0]))
    config = dataclasses.replace(tiny_config(), batch_size=4, gradient_accumulation_steps=2)
    machine = Machine(World(), torch.device("cpu"), torch.float32)
    rate, _ = estimate.training_rate(checked_meta_model(config, V), config, machine, read_data(config))
    assert rate == config.tokens_per_iter / (2 * 1 + 3 + 5)


# -----------------------------------------------------------------------------
# An optimizer of one's own


class InSelf(torch.optim.SGD):
    """Its momentum sets in after seven steps, which only the object knows."""

    steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            group["momentum"] = 0.9 if self.steps > 7 else 0.1
        super().step()


class CountsInAGroup(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            group["momentum"] += 0.1


class CountsInNumbers(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p]["count"] = self.state[p].get("count", 0) + 1


class Factored(torch.optim.Adafactor):
    state_shapes: ClassVar = {"row_var": lambda s: (*s[:-1], 1), "col_var": lambda s: (*s[:-2], 1, s[-1])}
    moments = 0


class Fused(torch.optim.Adam):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options, fused=True)


class HalfMuon(Muon):
    def step(self, frozen: Tensor | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["lr"] /= 2
        super().step(frozen)
        for group in self.param_groups:
            group["lr"] *= 2


@options
class SGDOptions(OptimizerOptions):
    name: str = "sgd"
    momentum: float = 0.9
    weight_decay: float = 0.1


@options
class PlainOptions(OptimizerOptions):
    name: str = "plain"


@options
class HalfOptions(MuonOptions):
    name: str = "half_muon"


Own = Callable[..., TrainConfig]


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Own:
    """A config with an optimizer that is registered until the test ends."""

    def configured(o: OptimizerOptions, kind: type[torch.optim.Optimizer]) -> TrainConfig:
        slot = OptimizerOptions.slot
        monkeypatch.setitem(slot.options, o.name, type(o))
        monkeypatch.setitem(slot, o.name, kind)
        register(type(o), kind)
        return dataclasses.replace(STACKS["gqa"][0], optim=o)

    return configured


def check(config: TrainConfig) -> None:
    check_optimizer(config, torch.device("cpu"))


@pytest.mark.parametrize(
    ("o", "kind"),
    [
        (SGDOptions(), torch.optim.SGD), (SGDOptions(), torch.optim.RMSprop), (PlainOptions(), torch.optim.Adam),
        (PlainOptions(), Factored), (HalfOptions(), HalfMuon),
    ],
)  # fmt: skip
def test_an_own_optimizer_goes_on_bit_for_bit(o: OptimizerOptions, kind: type[torch.optim.Optimizer], own: Own) -> None:
    config = own(o, kind)
    check(config)
    saved = continued(config)[1]
    assert saved and any("attn.c_attn.weight" in name for name in saved)


@pytest.mark.parametrize(
    ("o", "kind", "message"),
    [
        (SGDOptions(), InSelf, "does not resume bit for bit: all that it remembers must stand in self.state"),
        (SGDOptions(), CountsInAGroup, "does not resume bit for bit: all that it remembers must stand in self.state"),
        (SGDOptions(), CountsInNumbers, "state: count of a parameter of shape (5, 4) is 5 and must be a tensor"),
        (PlainOptions(), torch.optim.Adafactor, "has the shape (5, 1), which state_shapes does not declare"),
        (PlainOptions(), torch.optim.LBFGS, "optim=plain: TypeError: LBFGS.step() missing"),
        (SGDOptions(), torch.optim.Adam, "Adam.__init__() got an unexpected keyword argument 'momentum'"),
        (SGDOptions(), HalfMuon, "optim=sgd: as it is hidden_only, its options must derive from AdamWOptions"),
    ],
)
def test_an_optimizer_that_would_not_resume_is_refused_in_one_line(
    o: OptimizerOptions, kind: type[torch.optim.Optimizer], message: str, own: Own
) -> None:
    config = own(o, kind)
    for refuse in (check, estimate.require_startable, setup):  # a start, a sweep's start, a run's
        with pytest.raises(ConfigError, match=re.escape(message)) as error:
            refuse(config)
        assert "\n" not in str(error.value) and str(error.value).startswith(f"optim={o.name}")


def test_state_of_another_shape_is_not_loaded(own: Own) -> None:
    config = own(SGDOptions(), torch.optim.SGD)
    model = fresh(config)
    with pytest.raises(CorruptCheckpoint, match="momentum_buffer of a parameter of shape .* has the shape"):
        Optimizer(model, config).load({"momentum_buffer/transformer.ln_f.weight": torch.ones(3)})
    with pytest.raises(CorruptCheckpoint, match="exp_avg of a parameter of shape .* has the shape"):
        Optimizer(model, own(PlainOptions(), Fused)).load({"exp_avg/transformer.ln_f.weight": torch.ones(())})


def test_it_gets_groups_as_ours_and_the_names(own: Own) -> None:
    config = own(SGDOptions(), torch.optim.SGD)
    model = fresh(config)
    matrices, vectors = Optimizer(model, config).param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"], matrices["momentum"]) == (0.1, 0.0, 0.9)
    for group in (matrices, vectors):
        assert all(model.get_parameter(n) is p for n, p in zip(group["param_names"], group["params"], strict=True))
    config = own(PlainOptions(), torch.optim.SGD)
    (group,) = Optimizer(model, config).param_groups
    assert len(group["params"]) == len([*model.parameters()]) and group["lr"] == 1e-3


@pytest.mark.parametrize(("o", "kind"), [(SGDOptions(), torch.optim.SGD), (HalfOptions(), HalfMuon)])
def test_an_update_of_nan_leaves_the_weights(o: OptimizerOptions, kind: type[torch.optim.Optimizer], own: Own) -> None:
    config = own(o, kind)
    model = fresh(config)
    session: Any = SimpleNamespace(
        model=model, config=config, optimizer=Optimizer(model, config), parameters=[*model.parameters()],
        has_clipping_kernel=False,
    )  # fmt: skip
    before, frozen = copy.deepcopy(model.state_dict()), torch.zeros(())
    for value in (math.nan, 1.0):  # it stays frozen
        for p in model.parameters():
            p.grad = torch.full_like(p, value)
        _, frozen = step_optimizer(session, torch.zeros(()), frozen)
        assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    step_optimizer(session, torch.zeros(()), torch.zeros(()))
    moved = [name for name, p in model.named_parameters() if not torch.equal(p, before[name])]
    assert moved == [name for name, _ in model.named_parameters()]
