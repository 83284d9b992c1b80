"""Linear layers and embeddings of a GPT.

PyTorch's compiler takes a second to load. On the meta device PyTorch's initialisation and its powers load it, and
torch.compiler.assume_constant_result() always does: so these layers have no values until init_weights(), RoPE's tables
are computed on the CPU, and operators.py marks its constants by hand.
"""

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn import functional as F

from model.kernels import operators as kernels
from model.kernels.operators import nanoqk
from model.ops import matmul_dtype


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias, (..., n_in) -> (..., n_out), of W (n_out, n_in)."""
    # F.linear refuses two dtypes without autocast: so must this
    allowed = weight.dtype == torch.bfloat16 or torch.is_autocast_enabled(x.device.type)
    if bias is None and allowed and matmul_dtype(x) == torch.bfloat16:
        if kernels.can_use_linear(x, weight):
            return nanoqk.linear(x, weight)
        if kernels.can_use_decoding_linear(x, weight):
            return nanoqk.decoding_linear(x.to(weight.dtype), weight)
    return F.linear(x, weight, bias)


class Linear(nn.Linear):
    """x W^T; `reparam` (weights=) may replace W. W has no values until init_weights() or a checkpoint sets them."""

    def __init__(self, n_in: int, n_out: int, bias: bool, device: str | None = None):
        super().__init__(n_in, n_out, bias=bias, device=device)
        self.split_sizes = [n_out]
        self.reparam: nn.Module | None = None

    def reset_parameters(self) -> None:
        pass

    def matrix(self) -> Tensor:
        return self.weight if self.reparam is None else self.reparam(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.matrix(), self.bias)


class Embedding(nn.Embedding):
    """Without values, as Linear."""

    def reset_parameters(self) -> None:
        pass


class FusedLinear(Linear):
    """Several projections of one input in one matrix. `split_sizes` are their row counts; a Linear has one."""

    def __init__(self, n_in: int, split_sizes: list[int], bias: bool):
        super().__init__(n_in, sum(split_sizes), bias=bias)
        self.split_sizes = split_sizes


def scale_rows(linear: nn.Linear, factors: Tensor) -> None:
    """Multiply each row's output by its factor, (n_out,)."""
    linear.weight.mul_(factors[:, None])
    if linear.bias is not None:
        linear.bias.mul_(factors)
