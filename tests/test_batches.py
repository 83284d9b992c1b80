import itertools
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from core.schema import ConfigError
from data.batches import BATCHES_PER_TASK, PREFETCHED_TASKS, THREADS, Batches
from data.folds import Split, split
from data.shards import Shards

# Most tests use tokens that are their own positions: what a batch holds says where it was taken from.


def positions(n_tokens: int = 1000, fold: int | None = 4, block_size: int = 16, batch_size: int = 32) -> Batches:
    return Batches(np.arange(n_tokens, dtype=np.uint16), split(n_tokens, 10, fold), block_size, batch_size, seed=1337)


def same(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> bool:
    return torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


@given(data=st.data(), n_tokens=st.integers(20, 300), folds=st.integers(2, 10), block_size=st.integers(1, 40))
@settings(deadline=None)
def test_train_windows_are_neighbours_within_one_training_range_and_targets_the_next_tokens(
    data: st.DataObject, n_tokens: int, folds: int, block_size: int
) -> None:
    fold = data.draw(st.none() | st.integers(0, folds - 1))
    window = data.draw(st.none() | st.integers(1, 40)) if fold is not None else None
    one = split(n_tokens, folds, fold, window)
    assume(max((end - start for start, end in one.train), default=0) > block_size)
    assume(max((end - start for start, end in one.val), default=0) > 1)
    batches = Batches(np.arange(n_tokens), one, block_size, 64, seed=data.draw(st.integers(0, 2**63 - 1)))
    for x, y in (batches.get_batch(data.draw(st.integers(0, 10**9)), 3), batches.sampled_batch("train", 0)):
        assert x.dtype == y.dtype == torch.int64 and x.is_contiguous() and y.is_contiguous()
        assert torch.equal(x, x[:, :1] + torch.arange(block_size)) and torch.equal(y, x + 1) and len(x) == 64
        for first, last in zip(x[:, 0].tolist(), y[:, -1].tolist(), strict=True):
            assert any(start <= first and last < end for start, end in one.train)


@pytest.mark.parametrize("fold", [None, 0, 4, 9])
def test_train_windows_are_uniform_over_all_starts(fold: int | None) -> None:
    batches = positions(n_tokens=100, fold=fold, block_size=8, batch_size=1000)
    n_steps = 50
    drawn = Counter(s for step in range(n_steps) for s in batches.get_batch(step)[0][:, 0].tolist())
    expected = {s for start, end in split(100, 10, fold).train for s in range(start, end - 8)}
    assert set(drawn) == expected
    mean = n_steps * 1000 / len(expected)
    assert max(abs(count - mean) for count in drawn.values()) < 5 * mean**0.5


def test_a_batch_depends_on_seed_step_and_micro_step_only() -> None:
    batches, again = positions(), positions()
    later = [batches.get_batch(step, micro) for step in range(3) for micro in range(2)]
    list(again.eval_batches(4))
    again.sampled_batch("val", 0)
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 (the global generator must not matter)
    for i in (5, 0, 3, 1, 4, 2):  # out of order, as after a resume
        assert same(again.get_batch(*divmod(i, 2)), later[i])
    other_seed = Batches(batches.tokens, batches.split, 16, 32, seed=1338)
    others = [*later, other_seed.get_batch(0), batches.sampled_batch("train", 0), batches.sampled_batch("train", 1)]
    assert len({tuple(x[:, 0].tolist()) for x, _ in others}) == len(others)


@pytest.mark.parametrize("per_task", [1, BATCHES_PER_TASK])
def test_prefetched_batches_are_the_same_ones_in_order_and_few(per_task: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batches, steps = positions(), [(step, micro) for step in range(21) for micro in range(2)]
    monkeypatch.setattr("data.batches.SMALL_BATCH", batches.batch_size * batches.block_size - (per_task == 1))
    expected, get_batch = [batches.get_batch(*at) for at in steps], batches.get_batch
    asked: list[tuple[int, ...]] = []

    def spy(*at: int) -> Any:
        asked.append(at)
        return get_batch(*at)

    monkeypatch.setattr(batches, "get_batch", spy)
    for i, found in enumerate(batches.prefetch(iter(steps))):
        assert same(found, expected[i]) and i < len(asked) <= i + per_task * (1 + PREFETCHED_TASKS)
    assert sorted(asked) == steps
    before = set(threading.enumerate())
    stream = batches.prefetch((step, 0) for step in itertools.count())
    assert same(next(stream), expected[0])
    stream.close()  # must end its threads
    assert set(threading.enumerate()) <= before
    asked.clear()
    gate = threading.Event()
    monkeypatch.setattr(batches, "get_batch", lambda *at: (at[0] < per_task or gate.wait(), spy(*at))[1])
    stream = batches.prefetch((step, 0) for step in itertools.count())
    next(stream)
    threading.Timer(0.5, gate.set).start()
    stream.close()  # makes what is begun, not what has been asked for as well
    assert len(asked) <= per_task * (1 + THREADS) < per_task * (1 + PREFETCHED_TASKS)
    monkeypatch.setattr(batches, "get_batch", lambda *at: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        next(batches.prefetch(iter(steps)))


def test_streams_of_neighbouring_steps_do_not_overlap() -> None:
    batches = positions(n_tokens=60_000)
    starts = [set(batches.get_batch(*at)[0][:, 0].tolist()) for at in ((0, 0), (0, 1), (1, 0), (1, 1))]
    assert len(set.union(*starts)) > 4 * 32 - 4  # but for the odd coincidence


@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=3).filter(lambda lengths: max(lengths) > 1),
    start=st.integers(0, 50),
    block_size=st.integers(1, 40),
    max_batch=st.integers(1, 9),
)
@pytest.mark.slow
@settings(deadline=None)
def test_every_held_out_token_but_each_ranges_first_is_predicted_exactly_once(
    lengths: list[int], start: int, block_size: int, max_batch: int
) -> None:
    starts = [start + sum(lengths[:i]) + 9 * i for i in range(len(lengths))]
    val = tuple((first, first + length) for first, length in zip(starts, lengths, strict=True))
    end = val[-1][1]
    one = Split(train=((end, end + 100),), val=val)
    found = list(Batches(np.arange(end + 100, dtype=np.uint16), one, block_size, 1, 0).eval_batches(max_batch))
    targets: list[int] = []
    for x, y in found:
        assert x.dtype == y.dtype == torch.int64
        assert x.shape == y.shape == found[0][0].shape
        assert x.shape[0] <= max_batch and x.shape[1] == block_size
        real = y != -1
        assert real.any()
        assert torch.equal(x[real], y[real] - 1)
        assert (x[~real] == 0).all()
        assert not (real[:, 1:] & ~real[:, :-1]).any()  # padding only after the tokens: it is nobody's context
        targets += y[real].tolist()
    assert targets == [token for first, last in val for token in range(first + 1, last)]


def test_eval_batches_fill_up_to_max_batch() -> None:
    batches = positions(fold=4, block_size=10)  # 99 targets: 10 windows
    assert [tuple(x.shape) for x, _ in batches.eval_batches(64)] == [(10, 10)]
    assert [tuple(x.shape) for x, _ in batches.eval_batches(4)] == [(4, 10)] * 3


def test_sampled_batches_of_val_lie_in_the_held_out_block() -> None:
    batches = positions(fold=4, block_size=16, batch_size=2000)
    x, y = batches.sampled_batch("val", 7)
    assert [int(x.min()), int(y.max())] == [400, 499]
    assert torch.equal(y, x + 1)
    assert same(batches.sampled_batch("val", 7), positions(fold=4, batch_size=2000).sampled_batch("val", 7))
    assert not same(batches.sampled_batch("val", 7), batches.sampled_batch("val", 8))


@pytest.mark.parametrize("cuts", [[], [10, 700, 701, 1900]], ids=["memmap", "shards"])
@pytest.mark.parametrize("dtype, highest", [(np.uint8, 255), (np.uint16, 65535), (np.uint32, 2**20), (np.int64, 70000)])
def test_a_memmap_shards_and_a_copy_of_their_tokens_give_the_batches_of_the_array(
    dtype: Any, highest: int, cuts: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data.batches.TOKENS_PER_COPY", 100)
    tokens = np.random.default_rng(0).integers(highest + 1, size=3000).astype(dtype)
    tokens[::7] = highest
    arrays = []
    for i, part in enumerate(np.split(tokens, cuts)):
        part.tofile(tmp_path / f"{i}.bin")
        arrays.append(np.memmap(tmp_path / f"{i}.bin", dtype=dtype, mode="r"))
    on_disk: Any = Shards(arrays) if cuts else arrays[0]
    settings = (split(3000, 5, 2), 32, 100, 3)
    plain, copied = Batches(tokens, *settings), Batches(on_disk, *settings, device=torch.device("cpu"))
    assert copied.resident is not None and copied.resident.element_size() == tokens.itemsize
    places = [(step, micro) for step in range(5) for micro in range(2)]
    for batches in (Batches(on_disk, *settings), copied):
        for place, found in zip(places, batches.prefetch(places), strict=True):
            assert same(found, plain.get_batch(*place)) and all(x.is_contiguous() for x in found)
        assert same(batches.sampled_batch("val", 3), plain.sampled_batch("val", 3))
        pairs = list(zip(batches.eval_batches(3), plain.eval_batches(3), strict=True))
        assert all(same(one, other) for one, other in pairs)
        assert torch.cat([y for (_, y), _ in pairs]).flatten()[:599].tolist() == tokens[1201:1800].tolist()


def test_too_few_tokens_are_a_config_error() -> None:
    tokens = np.zeros(200, dtype=np.uint8)
    with pytest.raises(ConfigError, match="^model.block_size=100 needs a training range of more than 100 .* has 100$"):
        Batches(tokens, split(200, 2, 0), block_size=100, batch_size=1, seed=0)
    Batches(tokens, split(200, 2, 0), block_size=99, batch_size=1, seed=0)
    with pytest.raises(ConfigError, match="^data.folds leaves .* of 1 of 10 tokens; it must have at least 2$"):
        Batches(tokens[:10], split(10, 10, None), block_size=4, batch_size=1, seed=0)
    with pytest.raises(ConfigError, match="longest has 0$"):
        Batches(tokens[:0], split(0, 10, None), block_size=4, batch_size=1, seed=0)
    held_out_is_short = Batches(tokens, split(200, 10, 0), block_size=20, batch_size=1, seed=0)
    with pytest.raises(ConfigError, match=r"^model.block_size=20 needs a held-out block of more than 20 tokens"):
        held_out_is_short.sampled_batch("val", 0)


def test_batches_from_shards_in_the_page_cache_come_at_several_million_tokens_a_second(tmp_path: Path) -> None:
    arrays = []
    for i in range(4):
        np.random.default_rng(i).integers(50257, size=5_000_000).astype(np.uint16).tofile(tmp_path / f"{i}.bin")
        arrays.append(np.memmap(tmp_path / f"{i}.bin", dtype=np.uint16, mode="r"))
    batches = Batches(Shards(arrays), Split(train=((0, 19_000_000),), val=((19_000_000, 20_000_000),)), 1024, 32, 0)
    seconds = []
    for step in range(60):
        start = time.perf_counter()
        batches.get_batch(step)
        seconds.append(time.perf_counter() - start)
    assert 32 * 1024 / float(np.median(seconds)) > 3e6


@pytest.mark.slow
def test_slow_batches_are_made_while_the_ones_before_are_worked_on(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = Batches(np.arange(1000), Split(train=((0, 900),), val=((900, 1000),)), 16, 4, seed=0)
    get_batch = batches.get_batch

    def slow(*place: int) -> Any:
        time.sleep(0.1)
        return get_batch(*place)

    monkeypatch.setattr(batches, "get_batch", slow)
    start = time.perf_counter()
    for _ in batches.prefetch((step, 0) for step in range(16)):
        time.sleep(0.1)
    assert time.perf_counter() - start < 2.6  # one after the other: 3.2 at least
