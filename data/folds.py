"""Which tokens are held out. Folds are contiguous: shuffled windows would leak a validation token's neighbours."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Split:
    """Half-open token ranges. `train` is all but the held-out block `val`: none, one or two ranges, none empty."""

    train: tuple[tuple[int, int], ...]
    val: tuple[int, int]


def split(n_tokens: int, folds: int, fold: int | None) -> Split:
    """Hold out block `fold` of `folds`, whose sizes differ by one token at most; None: the last 10 %, as nanoGPT."""
    if fold is None:
        val = (int(0.9 * n_tokens), n_tokens)
    else:
        assert 0 <= fold < folds
        val = (fold * n_tokens // folds, (fold + 1) * n_tokens // folds)
    sides = ((0, val[0]), (val[1], n_tokens))
    return Split(train=tuple((start, end) for start, end in sides if start < end), val=val)
