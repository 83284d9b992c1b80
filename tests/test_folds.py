import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.folds import split


@given(n_tokens=st.integers(0, 200), folds=st.integers(2, 20))
def test_folds_hold_out_every_token_exactly_once_in_blocks_of_equal_size(n_tokens: int, folds: int) -> None:
    blocks = [split(n_tokens, folds, fold).val[0] for fold in range(folds)]
    assert [token for start, end in blocks for token in range(start, end)] == list(range(n_tokens))
    sizes = [end - start for start, end in blocks]
    assert max(sizes) - min(sizes) <= 1


@given(n_tokens=st.integers(0, 200), folds=st.integers(2, 20), data=st.data())
def test_train_is_everything_but_the_held_out_block(n_tokens: int, folds: int, data: st.DataObject) -> None:
    one = split(n_tokens, folds, data.draw(st.none() | st.integers(0, folds - 1)))
    assert all(start < end for start, end in one.train)
    train = [token for start, end in one.train for token in range(start, end)]
    assert train == [token for token in range(n_tokens) if not one.val[0][0] <= token < one.val[0][1]]


def test_ranges_of_the_first_a_middle_and_the_last_fold() -> None:
    assert (split(100, 10, 0).train, split(100, 10, 0).val) == (((10, 100),), ((0, 10),))
    assert (split(100, 10, 4).train, split(100, 10, 4).val) == (((0, 40), (50, 100)), ((40, 50),))
    assert (split(100, 10, 9).train, split(100, 10, 9).val) == (((0, 90),), ((90, 100),))


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
def test_shuffled_folds_are_whole_windows_and_hold_out_every_token_exactly_once(
    n_tokens: int, folds: int, window: int
) -> None:
    splits = [split(n_tokens, folds, fold, window) for fold in range(folds)]
    held_out = [[token for start, end in one.val for token in range(start, end)] for one in splits]
    assert sorted(token for tokens in held_out for token in tokens) == list(range(n_tokens))
    for one, tokens in zip(splits, held_out, strict=True):
        train = [token for start, end in one.train for token in range(start, end)]
        assert sorted(train + tokens) == list(range(n_tokens))
        for (_, end), (start, _) in zip(one.val, one.val[1:], strict=False):
            assert end < start  # neighbours are joined
        assert all(start % window == 0 and (end % window == 0 or end == n_tokens) for start, end in one.val)
    sizes = [len({token // window for token in tokens}) for tokens in held_out]
    assert max(sizes) - min(sizes) <= 1


def test_shuffled_windows_are_scattered_over_the_text() -> None:
    one = split(64_000, 10, 3, window=64)
    assert len(one.val) > 70  # 100 windows, few of them neighbours
    assert one.val[0][0] < 6400 and one.val[-1][1] > 57_600
