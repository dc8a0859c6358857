"""EAGLE-1 trained as its paper trains it: one step deep, drafted four slots deep."""

import pytest
import torch

from tests import checks
from tests.doubles import tiny_target
from training.objectives import Objective


def one_step(target):
    torch.manual_seed(0)
    return checks.build("eagle", target, train_steps=1)


def test_regression_of_one_step_carries_all_slots():
    target = tiny_target("llama")
    drafter = one_step(target)
    checks.overfit_one(drafter, target, checks.own_objective("eagle"))
    assert drafter.train().trained_slots == 1


def test_without_regression_later_slots_are_lost():
    """The planted fault: the right tokens at slot 1, but no feature that slot 2 could read."""
    target = tiny_target("llama")
    with pytest.raises(AssertionError, match="overfitting"):
        checks.overfit_one(one_step(target), target, Objective({"hard_ce": 1.0}, {"kind": "uniform"}, chunk=16))
