"""Packing: whole conversations, isolated documents, an order that only (seed, step) decides."""

import pytest
import torch

from data.collate import Collate, Plan, pack
from data.features import Sample


def sample(name: str, tokens: list[int], turns: list[int]) -> Sample:
    n = len(tokens)
    first = torch.tensor(tokens)
    return Sample(name, first, torch.tensor(turns), torch.ones(n, 2, 3), torch.ones(n, 3), first + 1, torch.ones(n))


def test_first_fit_in_order():
    assert pack([4, 3, 2, 5, 1], 6, range(5)) == [[0, 2], [1, 4], [3]]


def test_a_conversation_longer_than_a_row_is_refused():
    with pytest.raises(ValueError, match="conversation 1 has 9 tokens, a row holds 8"):
        pack([4, 9], 8, range(2))


def test_batch_by_hand():
    batch = Collate(8, anchor_multiple=2)([[sample("a", [5, 6, 7], [0, 1, 1]), sample("b", [8, 9, 10], [0, 1, 1])]])
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 9, 10, 0, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 2, 0, 0]]
    assert batch.documents.tolist() == [[0, 0, 0, 1, 1, 1, -1, -1]]
    assert batch.turns.tolist() == [[0, 1, 1, 0, 1, 1, 0, 0]]
    assert batch.anchors.tolist() == [[1, 4]]
    assert batch.aux.shape == (1, 8, 2, 3)
    assert not batch.aux[0, 6:].any()


def test_every_conversation_once_an_epoch_and_another_order_in_the_next():
    lengths = [3, 5, 2, 4, 6, 1, 3]
    plan = Plan(lengths, 8, 2, seed=1)
    first = plan.steps(1)
    epochs = [
        [i for step in steps for row in plan.batch(step) for i in row]
        for steps in (range(first), range(first, plan.steps(2)))
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(7))
    assert epochs[0] != epochs[1]


def test_any_step_without_the_ones_before():
    lengths = [3, 5, 2, 4, 6, 1, 3]
    walked = Plan(lengths, 8, 2, seed=4)
    for step in range(9):
        walked.batch(step)
    assert Plan(lengths, 8, 2, seed=4).batch(9) == walked.batch(9)
    assert Plan(lengths, 8, 2, seed=5).batch(0) != walked.batch(0)


def test_an_empty_store_is_refused():
    with pytest.raises(ValueError, match="nothing to train on"):
        Plan([], 8, 2, seed=0)
