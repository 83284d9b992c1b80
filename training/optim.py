"""Parameter groups, the optimizer, and its state as named tensors."""

import torch
import torch.nn as nn
from torch import Tensor

from training.config import TrainConfig


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Matrices decay; vectors (norm gains, biases, alpha) do not. Each parameter is in exactly one group."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    grouped = [id(p) for group in groups for p in group["params"]]  # type: ignore[attr-defined]
    assert sorted(grouped) == sorted(map(id, parameters)), "a parameter is in no optimizer group, or in two"
    return groups


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    o = config.optim
    # fused: one kernel for all parameters, on CUDA and on CPU alike
    return torch.optim.AdamW(parameter_groups(model, o.weight_decay), lr=o.learning_rate, betas=o.betas, fused=True)


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The optimizer's state as {"exp_avg/transformer.wte.weight": tensor, …}."""
    return {
        f"{key}/{name}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }


def load_optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: dict[str, Tensor]) -> None:
    parameters = dict(model.named_parameters())
    for full_name, value in tensors.items():
        key, _, name = full_name.partition("/")
        device = "cpu" if value.dim() == 0 and not parameters[name].is_cuda else parameters[name].device
        optimizer.state[parameters[name]][key] = value.to(device, copy=True)
