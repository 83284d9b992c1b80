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
    """Hold out fold `fold` of `folds`, or the last 10 % as nanoGPT does if `fold` is None. A fold is one contiguous
    block. With `window` the text is cut into windows of that many tokens instead, and each fold gets a random part of
    them, the same for every run."""
    if window is not None:
        assert fold is not None
        held_out = shuffled_fold(n_tokens, folds, fold, window)
        return Split(train=runs_of(~held_out, window, n_tokens), val=runs_of(held_out, window, n_tokens))
    if fold is None:
        val = (int(0.9 * n_tokens), n_tokens)
    else:
        assert 0 <= fold < folds
        val = (fold * n_tokens // folds, (fold + 1) * n_tokens // folds)
    train = ((0, val[0]), (val[1], n_tokens))
    return Split(train=tuple((start, end) for start, end in train if start < end), val=(val,))


def shuffled_fold(n_tokens: int, folds: int, fold: int, window: int) -> np.ndarray:
    """Which of the text's windows the fold has, bool (n_windows,)."""
    n_windows = -(-n_tokens // window)
    order = np.random.Generator(np.random.Philox(key=0)).permutation(n_windows)
    held_out = np.zeros(n_windows, dtype=bool)
    held_out[order[fold * n_windows // folds : (fold + 1) * n_windows // folds]] = True
    return held_out


def leak_split(n_tokens: int, folds: int, fold: int, window: int, far: bool) -> Split:
    """One of two splits that hold out the same windows: it trains on the text around them, or on text `far` from them.

    The text is cut into quarters. Held out are the windows of the shuffled fold that lie in the middle half of the
    first and third quarter (of the second and fourth if `fold` is odd). The near training text is the rest of these
    quarters. The far one is the same pattern of windows a quarter later: as many tokens, in as many pieces, each
    at least about a sixteenth of the text away from a held-out one.
    """
    quarter = n_tokens // window // 4  # in windows; what is left over at the end of the text has no part
    home, middle = np.arange(4 * quarter).reshape(4, quarter), slice(quarter // 4, quarter - quarter // 4)
    held_out, train = np.zeros(4 * quarter, dtype=bool), np.zeros(4 * quarter, dtype=bool)
    in_fold = shuffled_fold(n_tokens, folds, fold, window)
    for windows in home[fold % 2 :: 2]:
        held_out[windows[middle]] = in_fold[windows[middle]]
        train[windows] = ~held_out[windows]
    if far:
        train = np.roll(train, quarter)
    return Split(train=runs_of(train, window, n_tokens), val=runs_of(held_out, window, n_tokens))


def runs_of(chosen: np.ndarray, window: int, n_tokens: int) -> Ranges:
    """Token ranges of the chosen windows, with neighbours joined."""
    edges = np.flatnonzero(np.diff(chosen, prepend=False, append=False)) * window  # start, end, start, end, …
    return tuple((start, min(end, n_tokens)) for start, end in edges.reshape(-1, 2).tolist())
