"""The proofs of the QK normalisation contract, KANI-QKN-001 and -002, over real arithmetic, for up to 8 dimensions.

The formula is the code's: the modules' own forward runs on symbols of z3.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import z3
from torch import Tensor

from model.gpt import QKLayerNorm, QKNorm, QKRMSNorm
from model.options import RMSNormOptions

Row = list[z3.ArithRef]


@functools.cache
def root_of(a: z3.ArithRef) -> z3.ArithRef:
    """One symbol for one radicand: the square root is a function."""
    return z3.FreshReal("root")


class Reals:
    """An array of z3 reals in a tensor's place: `facts` define the roots taken, `duties` are what made them defined."""

    dtype, is_cpu = torch.float64, False

    def __init__(self, values: Any, facts: list[z3.BoolRef], duties: list[z3.BoolRef]):
        self.values, self.facts, self.duties = np.array(values, dtype=object), facts, duties

    def like(self, values: Any) -> "Reals":
        return Reals(values, self.facts, self.duties)

    def each(self, f: Callable[[z3.ArithRef], z3.ArithRef]) -> "Reals":
        return self.like(np.vectorize(f, otypes=[object])(self.values))

    def __add__(self, other: Any) -> "Reals":
        return self.like(self.values + getattr(other, "values", other))

    def __sub__(self, other: Any) -> "Reals":
        return self.like(self.values - getattr(other, "values", other))

    def __mul__(self, other: Any) -> "Reals":
        return self.like(self.values * getattr(other, "values", other))

    def to(self, dtype: torch.dtype) -> "Reals":
        return self

    def numel(self) -> int:
        return self.values.size

    def square(self) -> "Reals":
        return self * self

    def sum(self, dim: int, keepdim: bool) -> "Reals":
        return self.like(self.values.sum(dim, keepdims=keepdim))

    def mean(self, dim: int, keepdim: bool) -> "Reals":
        return self.like(self.values.sum(dim, keepdims=keepdim) / self.values.shape[dim])

    def sqrt(self) -> "Reals":
        def root(a: z3.ArithRef) -> z3.ArithRef:
            r = root_of(a)
            self.duties.append(a >= 0)
            self.facts += [r >= 0, r * r == a]
            return r

        return self.each(root)

    def reciprocal(self) -> "Reals":
        self.duties.extend(a != 0 for a in self.values.flat)
        return self.each(lambda a: 1 / a)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> "Reals":
        assert function is torch.rsqrt
        return args[0].sqrt().reciprocal()


class Symbolic:
    """A norm's forward on `heads` vectors of d symbols x, with symbols for the gain w and for eps > 0."""

    def __init__(self, norm_class: type[QKRMSNorm], d: int, heads: int = 1):
        self.eps = z3.Real("eps")
        self.facts, self.duties = [self.eps > 0], []  # type: list[Any], list[Any]
        self.x = [[z3.Real(f"x{h}_{i}") for i in range(d)] for h in range(heads)]
        self.w = [z3.Real(f"w{i}") for i in range(d)]
        self.norm = norm_class(RMSNormOptions(), d, heads)
        del self.norm.gain
        self.norm.eps = self.eps

    def forward(self, rows: list[Row], gain: Row | None = None) -> list[Row]:
        gain = [z3.RealVal(1)] * len(self.w) if gain is None else gain
        object.__setattr__(self.norm, "gain", Reals(gain, self.facts, self.duties))
        x: Any = Reals(rows, self.facts, self.duties)
        y: Any = self.norm.forward(x)
        return y.values.tolist()

    def proves(self, *claims: Any) -> bool:
        """Whether no real x, w and eps > 0 contradict a claim, nor make a root or a quotient undefined."""
        return all(self.always(claim) for claim in (*self.duties, *claims))

    def always(self, claim: Any) -> bool:
        solver = z3.Solver()
        solver.set("timeout", 30_000)
        solver.add(*self.facts, z3.Not(claim))
        verdict = solver.check()
        assert verdict != z3.unknown, "z3 gave up"
        return verdict == z3.unsat


def mean_of_squares(row: Row) -> z3.ArithRef:
    return z3.Sum([a * a for a in row]) / len(row)


def unit_rms(norm_class: type[QKRMSNorm], d: int) -> bool:
    s = Symbolic(norm_class, d)
    (y,) = s.forward(s.x)
    (x,) = s.x
    if norm_class is QKLayerNorm:
        x = [a - z3.Sum(x) / d for a in x]
    m = mean_of_squares(x)
    return s.proves(mean_of_squares(y) * (m + s.eps) == m)


def zero_stability(norm_class: type[QKRMSNorm], d: int) -> bool:
    s = Symbolic(norm_class, d)
    (y,) = s.forward([[z3.RealVal(0)] * d], s.w)
    return s.proves(*(a == 0 for a in y))


def bounded(norm_class: type[QKRMSNorm], d: int) -> bool:
    s = Symbolic(norm_class, d)
    (y,) = s.forward(s.x, s.w)
    return s.proves(*(a * a <= b * b * d for a, b in zip(y, s.w, strict=True)))


dimensions = pytest.mark.parametrize("d", range(1, 9))


@dimensions
def test_kani_qkn_001_unit_rms_is_proven(d: int) -> None:
    """KANI-QKN-001: QKN-INV-001 for all real x, eps > 0: RMS^2 = m / (m + eps), with nothing undefined."""
    assert unit_rms(QKRMSNorm, d)


@dimensions
def test_kani_qkn_002_zero_stability_is_proven(d: int) -> None:
    """KANI-QKN-002: QKN-INV-004 for all real w, eps > 0: RMSNorm(0, w) = 0, with nothing undefined."""
    assert zero_stability(QKRMSNorm, d)
    assert zero_stability(QKLayerNorm, d)


@dimensions
def test_the_tight_amplitude_bound_is_proven(d: int) -> None:
    """Obligation 2, for all real x, w, eps > 0: |y_i| <= |w_i| sqrt(d)."""
    assert bounded(QKRMSNorm, d)


@dimensions
def test_per_head_independence_is_proven(d: int) -> None:
    """Obligation 7: two heads at once are each alone."""
    s = Symbolic(QKRMSNorm, d, heads=2)
    together = s.forward(s.x, s.w)
    alone = [s.forward([row], s.w)[0] for row in s.x]
    for h in range(2):
        assert all(s.always(a == b) for a, b in zip(together[h], alone[h], strict=True))  # defined: proven above


class ByScale(QKRMSNorm):
    """RMSNorm whose output is that of its scale()."""

    forward = QKNorm.forward


class EpsOutsideTheRoot(ByScale):
    def scale(self, x: Tensor) -> Tensor:
        return (x.square().mean(-1, keepdim=True).sqrt() + self.eps).reciprocal()


class NoEps(ByScale):
    def scale(self, x: Tensor) -> Tensor:
        return torch.rsqrt(x.square().mean(-1, keepdim=True))


class SumForMean(ByScale):
    def scale(self, x: Tensor) -> Tensor:
        return torch.rsqrt(x.square().sum(-1, keepdim=True) + self.eps)


class NoRoot(ByScale):
    def scale(self, x: Tensor) -> Tensor:
        return (x.square().mean(-1, keepdim=True) + self.eps).reciprocal()


@pytest.mark.parametrize("wrong", [EpsOutsideTheRoot, NoEps, SumForMean, NoRoot])
def test_wrong_formulas_are_not_provable(wrong: type[QKRMSNorm]) -> None:
    """The proofs can fail: each of these has a counterexample."""
    assert not unit_rms(wrong, 2)
    assert zero_stability(wrong, 2) == (wrong is not NoEps)
    assert bounded(wrong, 2) == (wrong in (EpsOutsideTheRoot, SumForMean))


def test_the_assumptions_of_the_proofs_hold_for_some_numbers_and_the_symbols_are_the_modules() -> None:
    """From facts without a model everything follows: here they have one, in which y is the module's output."""
    for norm_class in (QKRMSNorm, QKLayerNorm):
        s = Symbolic(norm_class, 3)
        (y,) = s.forward(s.x, s.w)
        x, w = torch.tensor([1.5, -2.0, 0.25]).double(), torch.tensor([0.5, -3.0, 2.0]).double()
        s.facts += [a == b for a, b in zip([*s.x[0], *s.w, s.eps], [*x.tolist(), *w.tolist(), 0.125], strict=True)]
        assert not s.always(z3.BoolVal(False))
        norm = norm_class(RMSNormOptions(eps=0.125), 3, 1).double()
        norm.gain = torch.nn.Parameter(w)
        for a, b in zip(y, norm(x).tolist(), strict=True):
            assert s.proves(a - b < 1e-12, b - a < 1e-12) and not s.proves(a - b > 1e-12)
