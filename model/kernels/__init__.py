"""Kernels of a CPU as operators of PyTorch (C++), and one of MLA's decoding on CUDA (Triton)."""

from model.kernels.operators import (
    DTYPES,
    LP,
    attention,
    available,
    can_attend,
    can_normalize,
    dropout,
    dropout_add,
    fold,
    gelu,
    inverse_lp_norm,
    inverse_rms,
    layer_norm,
    lp_norm,
    rms_norm,
)

__all__ = [
    "DTYPES",
    "LP",
    "attention",
    "available",
    "can_attend",
    "can_normalize",
    "dropout",
    "dropout_add",
    "fold",
    "gelu",
    "inverse_lp_norm",
    "inverse_rms",
    "layer_norm",
    "lp_norm",
    "rms_norm",
]
