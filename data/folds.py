"""Which tokens are held out. Folds are contiguous by default: shuffled windows leak a validation token's neighbours."""

from dataclasses import dataclass

import numpy as np

Ranges = tuple[tuple[int, int], ...]  # half-open, in order, not empty, with a gap between neighbours


@dataclass(frozen=True)
class Split:
    """Half-open token ranges: `val` is held out, `train` is the rest."""

    train: Ranges
    val: Ranges


def split(n_tokens: int, folds: int, fold: int | None, window: int | None = None) -> Split:
    """Hold out fold `fold` of `folds`, or the last 10 % as nanoGPT does if `fold` is None.

    A fold is one contiguous block; block sizes differ by at most one token. With `window` the text is cut into windows
    of that many tokens instead, and each fold gets a random part of them, the same for every run; sizes differ by at
    most one window.
    """
    if window is not None:
        assert fold is not None
        n_windows = -(-n_tokens // window)
        order = np.random.Generator(np.random.Philox(key=0)).permutation(n_windows)
        held_out = np.zeros(n_windows, dtype=bool)
        held_out[order[fold * n_windows // folds : (fold + 1) * n_windows // folds]] = True
        return Split(train=runs_of(~held_out, window, n_tokens), val=runs_of(held_out, window, n_tokens))
    if fold is None:
        val = (int(0.9 * n_tokens), n_tokens)
    else:
        assert 0 <= fold < folds
        val = (fold * n_tokens // folds, (fold + 1) * n_tokens // folds)
    train = ((0, val[0]), (val[1], n_tokens))
    return Split(train=tuple((start, end) for start, end in train if start < end), val=(val,))


def runs_of(chosen: np.ndarray, window: int, n_tokens: int) -> Ranges:
    """Token ranges of the chosen windows, with neighbours joined."""
    edges = np.flatnonzero(np.diff(chosen, prepend=False, append=False)) * window  # start, end, start, end, …
    return tuple((start, min(end, n_tokens)) for start, end in edges.reshape(-1, 2).tolist())
