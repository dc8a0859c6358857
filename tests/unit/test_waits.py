"""A training step waits for the device where the objective counts its slots, before the first logits, nowhere else.

On a GPU the host is to stay ahead: each wait leaves the device idle while the next kernels are launched. A dispatch
mode finds waits on the CPU too, by the names of operators (eval.sentinel).
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from data.target import Target
from eval.sentinel import fault
from tests import checks
from tests.doubles import tiny_target
from training.objectives import MEASURES, Objective, slot_terms

ROOMS = [checks.ROOT / room for room in ("drafters", "training")]
# Drafters whose labels are the target's own picks ask the target where slots are supervised, and transformers looks for
# several documents in a row: once each, before anything runs.
ALSO = {name: {"_trajectory"} for name in checks.DRAFTERS if name.startswith("kforcing")} | {"independent": {"slots"}}


class Waits(TorchDispatchMode):
    """(operator, innermost function of the project) of everything that a GPU would be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if fault(name, args, kwargs or {}) is not None:
            frame: Any = sys._getframe()
            while frame is not None and not set(ROOMS) & set(Path(frame.f_code.co_filename).parents):
                frame = frame.f_back
            self.found.append((name, "" if frame is None else frame.f_code.co_name))
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("llama")


@pytest.mark.parametrize("name", checks.DRAFTERS)
def test_a_step_waits_where_slots_are_counted(name: str, target: Target) -> None:
    drafter = checks.build(name, target, num_slots=3).train()
    batch = checks.train_batch(target, drafter)
    objective = replace(checks.own_objective(name), chunk=12)
    with Waits() as waits:
        terms = slot_terms(drafter, drafter.slots(batch), batch, target.parts, objective)
        terms.loss.backward()
    assert ("nonzero", "groups_of") in waits.found, "a wait that is there was not found"
    stray = [one for one in waits.found if one[1] not in {"groups_of"} | ALSO.get(name, set())]
    assert not stray


@pytest.mark.parametrize("name", MEASURES)
def test_no_measure_waits(name: str, target: Target) -> None:
    drafter = checks.build("medusa", target, num_slots=3).train()
    batch = checks.train_batch(target, drafter)
    with Waits() as waits:
        terms = slot_terms(drafter, drafter.slots(batch), batch, target.parts, Objective({name: 1.0}, chunk=12))
        terms.loss.backward()
    assert {place for _, place in waits.found} == {"groups_of"}
