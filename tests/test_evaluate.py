from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import tiny_config
from helpers.runs import FP32, configured
from variants import V, build

from data.batches import Batches
from data.folds import split
from training.evaluate import diagnosed_batch, mean_loss
from training.session import setup


@pytest.mark.parametrize("n_tokens", [200, 337, 340])
@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_exact_evaluation_predicts_each_held_out_token_once(n_tokens: int, batch_size: int) -> None:
    """Against one window, one token at a time: the last window is short, none of its tokens is lost or padded."""
    model = build(tiny_config(dropout=0.5))
    tokens = np.random.default_rng(0).integers(V, size=n_tokens)
    folds = split(n_tokens, 3, 1)
    ((start, end),) = folds.val
    losses = []
    for first in range(start, end - 1, 16):
        window = torch.tensor(tokens[first : min(first + 17, end)])
        log_probs = model(window[None, :-1])[0].log_softmax(-1)[0]
        losses += [-log_probs[i, target].item() for i, target in enumerate(window[1:])]
    assert len(losses) == end - start - 1
    batches = Batches(tokens, folds, 16, batch_size, seed=1)
    loss = mean_loss(model, batches.eval_batches(batch_size), FP32)
    assert loss == pytest.approx(np.mean(losses), rel=1e-12)


@pytest.mark.parametrize(("size", "shape"), [(59, (1, 5)), (400, (2, 16))])
def test_diagnostics_are_of_held_out_tokens_alone(size: int, shape: tuple[int, int], tmp_path: Path) -> None:
    """A tenth is held out: 6 tokens, of which 5 are inputs, or 40 in windows of 16, 16 and 7."""
    (tmp_path / "text").write_text(("abcdefg" * 99)[:size])
    session = setup(configured(tmp_path / "text", tmp_path / "run"))
    batch = diagnosed_batch(session)
    start = session.data.batches.split.val[0][0]
    assert batch.shape == shape
    assert batch.flatten().tolist() == session.data.batches.tokens[start : start + batch.numel()].tolist()


def test_evaluation_draws_nothing_and_leaves_the_mode_as_it_was() -> None:
    model = build(tiny_config(dropout=0.5)).train()
    batches = Batches(np.arange(300) % V, split(300, 10, None), 16, 4, seed=1)
    state = torch.get_rng_state()
    first = mean_loss(model, batches.eval_batches(4), FP32)
    assert model.training and torch.equal(state, torch.get_rng_state())
    assert first == mean_loss(model.eval(), batches.eval_batches(4), FP32)
    assert not model.training and all(p.grad is None for p in model.parameters())
