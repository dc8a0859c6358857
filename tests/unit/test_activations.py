"""Keeping less of the forward pass changes nothing but memory."""

import pytest
import torch
from torch import nn

from tests import checks
from tests.doubles import tiny_target
from training.activations import KINDS, spare_activations, waiting
from training.objectives import slot_terms


def kept_bytes(make) -> int:
    """Bytes that autograd keeps for the backward pass, parameters aside."""
    sizes: dict[int, int] = {}

    def note(tensor):
        if not isinstance(tensor, nn.Parameter):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        make()
    return sum(sizes.values())


@pytest.mark.parametrize("name", ["eagle3", "dflash", "eagle"])
@pytest.mark.parametrize("kept", KINDS[1:])
def test_gradients_are_the_same(name, kept):
    target = tiny_target()
    gradients = []
    for how in ("keep", kept):
        torch.manual_seed(0)
        drafter = checks.build(name, target, num_slots=3).train()
        batch = checks.train_batch(target, drafter)
        spare_activations(drafter, how)
        with waiting(how, torch.device("cpu")):
            slots = drafter.slots(batch)
        slot_terms(drafter, slots, batch, target.parts, checks.own_objective(name)).loss.backward()
        gradients.append({n: p.grad.clone() for n, p in drafter.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradients[0][n], gradients[1][n]) for n in gradients[0])


def test_recomputing_keeps_less():
    target = tiny_target()
    sizes = []
    for how in ("keep", "recompute"):
        drafter = checks.build("eagle3", target, num_slots=3).train()
        batch = checks.train_batch(target, drafter)
        spare_activations(drafter, how)
        sizes.append(kept_bytes(lambda drafter=drafter, batch=batch: drafter.slots(batch)))
    assert sizes[1] < 0.8 * sizes[0], sizes


def test_words_and_drafters_that_do_not_fit_are_refused():
    target = tiny_target()
    with pytest.raises(ValueError, match="keep, recompute, offload"):
        spare_activations(checks.build("eagle3", target), "forget")
    with pytest.raises(ValueError, match="no MLP to recompute"):
        spare_activations(checks.build("medusa", target), "recompute")
