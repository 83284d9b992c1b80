import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.batches import Batches
from data.folds import Ranges, leak_split, split
from data.options import TextFileOptions
from data.tokens import split_of


def tokens_of(ranges: Ranges) -> list[int]:
    return [token for start, end in ranges for token in range(start, end)]


@given(n_tokens=st.integers(0, 200), folds=st.integers(2, 20))
def test_folds_hold_out_every_token_exactly_once_in_blocks_of_equal_size(n_tokens: int, folds: int) -> None:
    splits = [split(n_tokens, folds, fold) for fold in range(folds)]
    assert [token for one in splits for token in tokens_of(one.val)] == list(range(n_tokens))
    sizes = [end - start for one in splits for start, end in one.val]
    assert len(sizes) == folds and max(sizes) - min(sizes) <= 1
    for one in (*splits, split(n_tokens, folds, None)):  # train is the rest
        held_out = set(tokens_of(one.val))
        assert all(start < end for start, end in one.train)
        assert tokens_of(one.train) == [token for token in range(n_tokens) if token not in held_out]


# The sizes that nanoGPT's data/shakespeare_char/prepare.py prints: 1,003,854 and 111,540.
@pytest.mark.parametrize(("n_tokens", "n_train", "n_val"), [(1_115_394, 1_003_854, 111_540), (10, 9, 1)])
def test_without_a_fold_the_split_is_nanogpts(n_tokens: int, n_train: int, n_val: int) -> None:
    one = split(n_tokens, 10, None)
    assert one.train == ((0, n_train),)
    assert one.val == ((n_train, n_train + n_val),)


def test_token_counts_past_32_bits_are_exact() -> None:
    n_tokens = 10_000_000_000_000
    assert split(n_tokens, 10, 9).val == ((9_000_000_000_000, n_tokens),)


@given(n_tokens=st.integers(0, 300), folds=st.integers(2, 10), window=st.integers(1, 20))
def test_shuffled_folds_are_whole_windows_and_hold_out_every_token_once(n_tokens: int, folds: int, window: int) -> None:
    splits = [split(n_tokens, folds, fold, window) for fold in range(folds)]
    held_out = [tokens_of(one.val) for one in splits]
    assert sorted(token for tokens in held_out for token in tokens) == list(range(n_tokens))
    for one, tokens in zip(splits, held_out, strict=True):
        assert sorted(tokens_of(one.train) + tokens) == list(range(n_tokens))
        for (_, end), (start, _) in zip(one.val, one.val[1:], strict=False):
            assert end < start  # neighbours are joined
        assert all(start % window == 0 and (end % window == 0 or end == n_tokens) for start, end in one.val)
    sizes = [len({token // window for token in tokens}) for tokens in held_out]
    assert max(sizes) - min(sizes) <= 1


@given(n_tokens=st.integers(0, 4000), folds=st.integers(2, 10), window=st.integers(1, 20), data=st.data())
def test_near_and_far_hold_out_the_same_windows_and_train_on_none_of_them(
    n_tokens: int, folds: int, window: int, data: st.DataObject
) -> None:
    fold = data.draw(st.integers(0, folds - 1))
    near, far = (leak_split(n_tokens, folds, fold, window, far) for far in (False, True))
    held_out, around, away = (set(tokens_of(ranges)) for ranges in (near.val, near.train, far.train))
    assert near.val == far.val and held_out <= set(tokens_of(split(n_tokens, folds, fold, window).val))
    assert not held_out & around and not held_out & away and not around & away
    sizes = [sorted(end - start for start, end in one.train) for one in (near, far)]
    assert sizes[0] == sizes[1]  # equally many tokens, and equally many windows to draw
    assert max(held_out | around | away, default=-1) < n_tokens
    gap = n_tokens // window // 4 // 4 * window
    for start, end in near.val:
        assert not away & set(range(start - gap, end + gap))
        outside = {token for token in (start - 1, end) if 0 <= token < n_tokens}
        assert outside <= around or gap == 0


def test_no_batch_of_near_or_far_has_a_held_out_token() -> None:
    """Tokens that are their own places: one evaluation, and many batches of both arms."""
    n_tokens, places = 100_000, {}
    for split_name in ("near", "far"):
        one = split_of(TextFileOptions(path="x", split=split_name, fold=3), n_tokens, 16)
        batches = Batches(np.arange(n_tokens), one, 16, 64, seed=1)
        drawn = {i for step in range(300) for part in batches.get_batch(step) for i in part.flatten().tolist()}
        evaluated = [int(i) for x, y in batches.eval_batches(64) for i in x[y >= 0].tolist() + y[y >= 0].tolist()]
        assert not drawn & set(evaluated) and len(drawn) > 20_000
        places[split_name] = evaluated
    assert places["near"] == places["far"] and len(places["near"]) > 1000


def test_shuffled_windows_are_scattered_over_the_text() -> None:
    one = split(64_000, 10, 3, window=64)
    assert len(one.val) > 70  # 100 windows, few of them neighbours
    assert one.val[0][0] < 6400 and one.val[-1][1] > 57_600
