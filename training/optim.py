"""Parameter groups, the optimizers, and their state as named tensors."""

import inspect
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from core.device import resolve_dtype
from core.schema import require
from model.linear import FusedLinear
from training.config import AdamWOptions, MuonOptions, TrainConfig


def parameter_groups(parameters: Iterable[Tensor], weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; vectors (norm gains, biases, alpha) do not."""
    parameters = list(parameters)
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def hidden_matrices(model: nn.Module) -> dict[str, tuple[nn.Parameter, list[int]]]:
    """Every trained matrix inside the blocks: {name: (weight, the row counts of its projections)}."""
    found = {}
    for module_name, module in model.named_modules():
        for name, p in module.named_parameters(module_name, recurse=False):
            if name.startswith("transformer.h.") and p.dim() == 2 and p.requires_grad:
                found[name] = (p, module.split_sizes if isinstance(module, FusedLinear) else [p.size(0)])
    return found


class LoadsNoCompiler(torch.optim.Optimizer):
    """PyTorch wraps these methods to hide them from its compiler, and the wrapper loads the compiler; its
    zero_grad() is slower, too."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)

    def zero_grad(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None


class AdamW(LoadsNoCompiler, torch.optim.AdamW):
    """torch.optim.AdamW with fused=True, one kernel for all parameters of a group, which share one count of steps.
    torch's own counts each parameter's steps apart, which takes time where matrices are small.

    step(frozen): a tensor (); where it is 1 the weights stay, without a wait for the device. Muon's step too."""

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


class MuonAndAdamW:
    """Muon for the hidden matrices and AdamW for all else, with the optimizer methods that training uses.

    Muon gets each projection of a fused matrix as a view of the weight's rows. Orthogonalised as one matrix, they would
    share singular vectors.
    """

    def __init__(self, model: nn.Module, o: MuonOptions, in_fp32: bool):
        self.weights: list[tuple[nn.Parameter, list[Tensor]]] = []  # each with its projections
        self.projections: dict[str, Tensor] = {}
        for name, (weight, rows) in hidden_matrices(model).items():
            views = list(weight.detach().split(rows))
            self.weights.append((weight, views))
            for view, end in zip(views, itertools.accumulate(rows), strict=True):
                self.projections[name if len(views) == 1 else f"{name}[{end - len(view)}:{end}]"] = view
        self.muon = Muon(
            self.projections.values(),
            lr=o.learning_rate,
            weight_decay=o.weight_decay,
            momentum=o.momentum,
            nesterov=o.nesterov,
            ns_steps=o.ns_steps,
        )
        self.muon.in_fp32 = in_fp32
        hidden = {id(weight) for weight, _ in self.weights}
        self.rest = {n: p for n, p in model.named_parameters() if p.requires_grad and id(p) not in hidden}
        self.adamw = new_adamw(self.rest.values(), o)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.muon.param_groups + self.adamw.param_groups

    def step(self, frozen: Tensor | None = None) -> None:
        for weight, views in self.weights:
            same = views[0].untyped_storage()._cdata == weight.untyped_storage()._cdata
            assert same, "the weights have moved since build_optimizer"
            if weight.grad is not None:
                for view, gradient in zip(views, weight.grad.split([len(v) for v in views]), strict=True):
                    view.grad = gradient
        self.muon.step(frozen)
        self.muon.zero_grad()  # drops the views' gradients; zero_grad() below drops the weights'
        self.adamw.step(frozen)

    def zero_grad(self) -> None:
        self.adamw.zero_grad()
        for weight, _ in self.weights:
            weight.grad = None


Optimizer = AdamW | MuonAndAdamW


def new_adamw(parameters: Iterable[Tensor], o: AdamWOptions) -> AdamW:
    return AdamW(parameter_groups(parameters, o.weight_decay), lr=o.learning_rate, betas=o.betas)


def build_optimizer(model: nn.Module, config: TrainConfig) -> Optimizer:
    """The optimizer of config.optim over all parameters; each is in exactly one group."""
    o = config.optim
    if isinstance(o, MuonOptions):
        return MuonAndAdamW(model, o, in_fp32=config.dtype == "float32")
    require(o.name == "adamw", f"optim={o.name} is not implemented: build_optimizer() knows adamw and muon")
    return new_adamw([p for p in model.parameters() if p.requires_grad], o)


def optimizer_bytes(model: nn.Module, config: TrainConfig) -> int:
    """Bytes of state once training has begun: AdamW keeps two moments of a weight, Muon one."""
    count = 2 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    if isinstance(config.optim, MuonOptions):
        count -= sum(weight.numel() for weight, _ in hidden_matrices(model).values())
    return 4 * count


# -----------------------------------------------------------------------------
# State by name


def owners(optimizer: Optimizer, model: nn.Module) -> dict[str, tuple[Tensor, torch.optim.Optimizer]]:
    """{name: (tensor, the optimizer that updates it)}; a projection of a fused matrix is NAME[first row:last + 1]."""
    if isinstance(optimizer, MuonAndAdamW):
        hidden = {name: (p, optimizer.muon) for name, p in optimizer.projections.items()}
        return {**hidden, **{name: (p, optimizer.adamw) for name, p in optimizer.rest.items()}}
    return {name: (p, optimizer) for name, p in model.named_parameters()}


def optimizer_tensors(optimizer: Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The optimizer's state as {"exp_avg/transformer.wte.weight": tensor, …}."""
    return {
        # all weights of a group share one `step` tensor; a file cannot hold a shared tensor
        f"{key}/{name}": value.clone() if key == "step" else value
        for name, (parameter, owner) in owners(optimizer, model).items()
        for key, value in owner.state[parameter].items()
    }


def load_optimizer_tensors(optimizer: Optimizer, model: nn.Module, tensors: dict[str, Tensor]) -> None:
    known = owners(optimizer, model)
    adamw = optimizer.adamw if isinstance(optimizer, MuonAndAdamW) else optimizer
    adamw.lists.clear()
    for full_name, value in tensors.items():
        key, _, name = full_name.partition("/")
        parameter, owner = known[name]
        owner.state[parameter][key] = value.to(parameter.device, copy=True)
