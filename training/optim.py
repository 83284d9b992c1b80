"""Parameter groups, the optimizers, and their state as named tensors.

An optimizer of your own is a class derived from torch.optim.Optimizer, and options derived from OptimizerOptions:
register(ItsOptions, ItsClass). ItsClass(groups, lr=optim.learning_rate, ...) is called with all other options by name,
except weight_decay. That stands in the groups: the first has the matrices, the second the vectors, which do not decay.
Without an option weight_decay there is one group. group["param_names"] has the names of group["params"].
Before an update each group's "lr" is set. step() is called without arguments, and with finite gradients alone. All that
it remembers must stand in self.state[p], as tensors that are 0-d or have the shape of p. The class may declare:

    state_shapes = {"row": lambda shape: shape[:1]}    other shapes in its state, by key
    moments = 1                                        state tensors as large as a weight, for estimates; else 2
    hidden_only = True                                 it gets the matrices of the blocks, and AdamW the rest, as with
                                                       Muon; its options then derive from AdamWOptions
"""

import copy
import inspect
import itertools
import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn as nn
from torch import Tensor

from core.checkpoint import CorruptCheckpoint, layout
from core.device import resolve_dtype
from core.plugins import register
from core.schema import ConfigError, declared, one_line, require
from model.gpt import GPT
from model.linear import FusedLinear
from model.options import GPTConfig, ModelOptions
from training.config import AdamWOptions, MuonOptions, TrainConfig


def parameter_groups(named: Mapping[str, Tensor], weight_decay: float | None) -> list[dict[str, Any]]:
    """Matrices decay; vectors (norm gains, biases, alpha) do not. None: one group, and the class decides."""
    if weight_decay is None:
        return [{"params": [*named.items()]}]
    matrices = [(name, p) for name, p in named.items() if p.dim() >= 2]
    vectors = [(name, p) for name, p in named.items() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def hidden_matrices(model: nn.Module, kind: Any) -> dict[str, tuple[nn.Parameter, list[int]]]:
    """Every trained matrix inside the blocks: {name: (weight, the row counts of its projections)}, for the class of an
    optimizer that is `hidden_only`; {} for another."""
    found: dict[str, tuple[nn.Parameter, list[int]]] = {}
    if not getattr(kind, "hidden_only", False):
        return found
    for module_name, module in model.named_modules():
        for name, p in module.named_parameters(module_name, recurse=False):
            if name.startswith("transformer.h.") and p.dim() == 2 and p.requires_grad:
                found[name] = (p, module.split_sizes if isinstance(module, FusedLinear) else [p.size(0)])
    return found


class LoadsNoCompiler(torch.optim.Optimizer):
    """The base of ours. PyTorch wraps this method to hide it from its compiler, and the wrapper loads the compiler.

    step(frozen): a tensor (); where it is 1 the weights stay, without a wait for the device."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)


class AdamW(LoadsNoCompiler, torch.optim.AdamW):
    """torch.optim.AdamW with fused=True, one kernel for all parameters of a group, which share one count of steps.
    torch's own counts each parameter's steps apart, which takes time where matrices are small."""

    state_shapes: ClassVar = {"exp_avg": tuple, "exp_avg_sq": tuple, "step": lambda shape: ()}

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.lists: dict[int, list[list[Tensor]]] = {}  # of each group, from state_lists(): to gather them takes time

    def __setstate__(self, state: dict[str, Any]) -> None:  # of load_state_dict(), pickle and deepcopy
        super().__setstate__(state)
        self.lists = {}

    def state_lists(self, weights: list[Tensor]) -> list[list[Tensor]]:
        """The weights, both moments of each, and their one count of steps once for each."""
        states = [self.state[p] for p in weights]
        for p, state in zip(weights, states, strict=True):
            if not state:
                state |= {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            fits = all(state[key].shape == p.shape for key in ("exp_avg", "exp_avg_sq"))
            assert fits, "the kernel would read and write past a moment that has another shape than its weight"
        before = next((state["step"] for state in states if "step" in state), None)  # a new weight has none
        count = torch.zeros((), device=weights[0].device) if before is None else before.clone()
        for state in states:
            state["step"] = count
        return [weights, *([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq", "step"))]

    @torch.no_grad()
    def step(self, frozen: Tensor | None = None) -> None:  # type: ignore[override]  # takes no closure
        for number, group in enumerate(self.param_groups):
            weights: list[Tensor] = group["params"]
            grads = [grad for p in weights if (grad := p.grad) is not None]
            if not grads:
                continue
            if len(grads) < len(weights):
                weights = [p for p in weights if p.grad is not None]
            held = self.lists.get(number)
            if held is None or held[0] is not weights:
                held = self.lists[number] = self.state_lists(weights)  # at first, or of other weights
            _, exp_avgs, exp_avg_sqs, counts = held
            counts[0] += 1
            torch._fused_adamw_(
                weights,
                grads,
                exp_avgs,
                exp_avg_sqs,
                max_exp_avg_sqs=[],
                state_steps=counts,
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
                found_inf=frozen,
            )


class Muon(LoadsNoCompiler, torch.optim.Muon):
    """torch.optim.Muon with adjust_lr_fn="match_rms_adamw", except that it orthogonalises all matrices of one shape
    together, and in fp32 where the hardware has no bf16 or where `in_fp32` is set. torch's own takes them one by one
    and in bf16, slow to emulate."""

    state_shapes: ClassVar = {"momentum_buffer": tuple}
    moments = 1
    hidden_only = True
    in_fp32 = False

    @torch.no_grad()
    def step(self, frozen: Tensor | None = None) -> None:  # type: ignore[override]  # takes no closure
        for group in self.param_groups:
            of_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    of_shape[p.shape].append(p)
            for shape, weights in of_shape.items():
                for p in weights:
                    if "momentum_buffer" not in self.state[p]:
                        self.state[p]["momentum_buffer"] = torch.zeros_like(p)
                gradients = [p.grad for p in weights if p.grad is not None]
                momenta = updates = [self.state[p]["momentum_buffer"] for p in weights]  # without nesterov the same
                torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
                if group["nesterov"]:
                    updates = [*torch._foreach_lerp(gradients, momenta, group["momentum"])]
                dtype = resolve_dtype("float32" if self.in_fp32 else "auto", weights[0].device)
                orthogonal = orthogonalise(
                    torch.stack(updates).to(dtype), group["ns_coefficients"], group["ns_steps"], group["eps"]
                )
                # its RMS is then AdamW's, so that both share one schedule (Moonlight)
                lr = group["lr"] * 0.2 * math.sqrt(max(shape))
                decay: Any = 1 - group["lr"] * group["weight_decay"]
                if frozen is not None:
                    decay = torch.where(frozen > 0, torch.ones_like(frozen), decay)
                    orthogonal = torch.where(frozen > 0, torch.zeros_like(frozen, dtype=dtype), orthogonal)
                torch._foreach_mul_(weights, decay)
                torch._foreach_add_(weights, orthogonal.to(weights[0].dtype).unbind(), alpha=-lr)


def orthogonalise(x: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Newton-Schulz iterations of Muon (Jordan et al.) on n matrices x = U S V^T, (n, rows, columns): about U V^T each.
    x is scaled to norm 1. Five steps then bring singular values in 0.005..1 into 0.68..1.16; smaller ones grow."""
    a, b, c = coefficients
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


register(AdamWOptions, AdamW)
register(MuonOptions, Muon)
OURS = (AdamW, Muon)


# -----------------------------------------------------------------------------
# The optimizers of a run


class Optimizer:
    """What training calls: the optimizer of optim= for all trained parameters. One that is `hidden_only` gets each
    projection of a fused matrix as a view: orthogonalised as one matrix, they would share singular vectors."""

    def __init__(self, model: nn.Module, config: TrainConfig):
        o, kind = config.optim, class_of(config)
        hidden = hidden_matrices(model, kind)
        self.weights: list[tuple[nn.Parameter, list[Tensor]]] = []  # each of `hidden` with its projections
        projections: dict[str, Tensor] = {}
        for name, (weight, rows) in hidden.items():
            views = list(weight.detach().split(rows))
            self.weights.append((weight, views))
            for view, end in zip(views, itertools.accumulate(rows), strict=True):
                projections[name if len(views) == 1 else f"{name}[{end - len(view)}:{end}]"] = view
        rest: dict[str, Tensor] = {n: p for n, p in model.named_parameters() if p.requires_grad and n not in hidden}
        given = {key: getattr(o, key) for key in declared(type(o)) if key not in ("name", "learning_rate")}
        lr, decay = o.learning_rate, given.pop("weight_decay", None)
        self.owned: list[tuple[Any, dict[str, Tensor]]] = []  # each optimizer with what it updates, by name
        if hidden:
            require(isinstance(o, AdamWOptions), "as it is hidden_only, its options must derive from AdamWOptions")
            betas = given.pop("betas")
            self.owned.append((kind(parameter_groups(projections, decay), lr=lr, **given), projections))
            self.owned[0][0].in_fp32 = config.dtype == "float32"
            kind, given = AdamW, {"betas": betas}
        self.owned.append((kind(parameter_groups(rest, decay), lr=lr, **given), rest))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for one, _ in self.owned for group in one.param_groups]

    def step(self, frozen: Tensor | None = None) -> None:
        """Make the update. No weight changes where `frozen`, (), is 1; ours do not wait for the device to know."""
        for weight, views in self.weights:
            same = views[0].untyped_storage()._cdata == weight.untyped_storage()._cdata
            assert same, "the weights have moved since the optimizer was built"
            if weight.grad is not None:
                for view, gradient in zip(views, weight.grad.split([len(v) for v in views]), strict=True):
                    view.grad = gradient
        for one, _ in self.owned:
            if isinstance(one, LoadsNoCompiler):
                one.step(frozen)  # type: ignore[arg-type]
            elif frozen is None or not frozen:
                one.step()

    def zero_grad(self) -> None:
        updated = [p for group in self.param_groups for p in group["params"]]
        for p in (*updated, *(weight for weight, _ in self.weights)):
            p.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """The state as {"exp_avg/transformer.wte.weight": tensor, …}; a projection of a fused matrix is
        NAME[first row:last + 1]. Raises: ConfigError for what a checkpoint cannot hold."""
        found = {}
        for one, named in self.owned:
            stray = [key for key in one.state if not isinstance(key, Tensor)]
            require(not stray, f"{type(one).__name__}.state has {stray}, which is no parameter")
            for name, p in named.items():
                for key, value in one.state[p].items():
                    told = misfit(one, key, value, p)
                    require(not told, told)
                    # all weights of a group may share one `step` tensor; a file cannot hold a shared tensor
                    found[f"{key}/{name}"] = value if value.dim() else value.clone()
        return found

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises: CorruptCheckpoint, before any is loaded, for a tensor that does not fit or that is missing. A weight
        without a gradient has none."""
        owners = {name: (p, one) for one, named in self.owned for name, p in named.items()}
        keys: dict[str, set[str]] = defaultdict(set)
        for full_name, value in tensors.items():
            key, _, name = full_name.partition("/")
            p, one = owners.get(name, (None, None))
            told = "it is of no weight of this run" if p is None else misfit(one, key, value, p)
            if told:
                raise CorruptCheckpoint(f"the optimizer's {full_name}: {told}")
            keys[name].add(key)
        for name, found in keys.items():
            p, one = owners[name]
            if type(one) in OURS and (lost := one.state_shapes.keys() - found - one.state[p].keys()):
                raise CorruptCheckpoint(f"the optimizer's {min(lost)}/{name} is absent")
        for full_name, value in tensors.items():
            key, _, name = full_name.partition("/")
            p, one = owners[name]
            # PyTorch's own keep `step` on the CPU unless they are fused or capturable
            with_p = isinstance(one, LoadsNoCompiler) or one.defaults.get("fused") or one.defaults.get("capturable")
            device = p.device if with_p or key != "step" else "cpu"
            one.state[p][key] = value.to(device, copy=True)
        for one, _ in self.owned:
            if isinstance(one, AdamW):
                one.lists.clear()


def class_of(config: TrainConfig) -> Any:
    return config.optim.slot[config.optim.name]


def misfit(one: Any, key: str, value: Any, p: Tensor) -> str:
    """Why a checkpoint cannot hold this state of the parameter p; "" where it can."""
    told = f"{type(one).__name__}.state: {key} of a parameter of shape {(*p.shape,)}"
    if not isinstance(value, Tensor):
        return f"{told} is {value!r:.40} and must be a tensor"
    shapes = getattr(one, "state_shapes", {})
    if type(one) in OURS:
        fits = key in shapes and value.dtype == p.dtype and tuple(value.shape) == tuple(shapes[key](p.shape))
        return "" if fits else f"{told} is {layout(value)}"
    scalar = value.dim() == 0 and (key == "step" or not one.defaults.get("fused"))  # which reads past a moment
    fits = scalar or tuple(value.shape) == tuple(shapes.get(key, tuple)(p.shape))
    return "" if fits else f"{told} has the shape {(*value.shape,)}, which state_shapes does not declare"


def check_optimizer(config: TrainConfig, device: torch.device) -> None:
    """Try a plugin's optimizer on a tiny GPT. Raises: ConfigError where it fails, or does not resume bit for bit."""
    if class_of(config) in OURS:
        return
    told = f"optim={config.optim.name}"
    tiny = GPTConfig(ModelOptions(n_layer=1, n_head=1, n_embd=4, block_size=2))

    def update(model: nn.Module, optimizer: Optimizer, step: int) -> None:
        g = torch.Generator().manual_seed(step)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=g).to(device)
        for group in optimizer.param_groups:
            group["lr"] = config.optim.learning_rate  # as before each update of a run
        torch.manual_seed(step)
        optimizer.step()
        optimizer.zero_grad()

    try:
        with torch.random.fork_rng([]):
            model = GPT(tiny, vocab_size=5)
            model.init_weights(0)
            optimizer = Optimizer(model.to(device), config)
            for step in range(5):
                update(model, optimizer, step)
            before = attributes(optimizer)
            resumed = copy.deepcopy(model)
            reloaded = Optimizer(resumed, config)
            reloaded.load(optimizer.tensors())
            for step in range(5, 10):
                update(model, optimizer, step)
                update(resumed, reloaded, step)
    except Exception as error:
        raise ConfigError(f"{told}: {error if isinstance(error, ConfigError) else one_line(error)}") from error
    rule = "all that it remembers must stand in self.state[p], as tensors"
    same = all(map(torch.equal, model.parameters(), resumed.parameters()))
    require(same, f"{told} does not resume bit for bit: {rule}")
    changed = [name for name, value in attributes(optimizer).items() if value != before.get(name)]
    require(not changed, f"{told} counts in self.{', self.'.join(changed)}, which no checkpoint has: {rule}")


def attributes(optimizer: Optimizer) -> dict[str, str]:
    """What a plugin's optimizer has beside its state: its own attributes, and what its groups hold but the rate."""
    found: dict[str, str] = {}
    for one in (one for one, _ in optimizer.owned if type(one) not in OURS):
        found |= {name: repr(value) for name, value in vars(one).items() if name not in ("state", "param_groups")}
        for n, group in enumerate(one.param_groups):
            found |= {f"param_groups[{n}][{k!r}]": repr(v) for k, v in group.items() if k not in ("params", "lr")}
    return found


def optimizer_bytes(model: nn.Module, config: TrainConfig) -> int:
    """Bytes of state once training has begun: AdamW keeps two moments of a weight, Muon one."""
    kind, n = class_of(config), sum(p.numel() for p in model.parameters() if p.requires_grad)
    own = sum(weight.numel() for weight, _ in hidden_matrices(model, kind).values()) or n
    return 4 * (getattr(kind, "moments", 2) * own + 2 * (n - own))
