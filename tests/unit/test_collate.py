"""Packing: whole conversations, isolated documents, an order that only (seed, step) decides."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data._utils.pin_memory import pin_memory

from data.collate import Collate, Plan, pack
from data.features import Sample
from data.module import BatchSettings, PackedData
from drafters.contract import Batch
from training.module import DrafterModule


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


def narrow_sample(name: str) -> Sample:
    """Features as a store of 16 bits gives them."""
    one = sample(name, [5, 6, 7, 8], [0, 1, 1, 1])
    return replace(one, aux=torch.randn(4, 2, 3).bfloat16(), last=torch.randn(4, 3).half())


class Two:
    """A source of two conversations."""

    lengths, ids = [4, 4], ["a", "b"]

    def samples(self, indices: Sequence[int]) -> list[Sample]:
        torch.manual_seed(0)
        both = [narrow_sample(name) for name in self.ids]
        return [both[i] for i in indices]


class Copies(TorchDispatchMode):
    """dtype and non_blocking of every tensor that is sent to another device."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[torch.dtype, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        goal = (kwargs or {}).get("device")
        if func is torch.ops.aten._to_copy.default and goal is not None and torch.device(goal) != args[0].device:
            self.sent.append((args[0].dtype, bool((kwargs or {}).get("non_blocking", False))))
        return func(*args, **(kwargs or {}))


def test_features_travel_as_they_were_stored_and_are_widened_where_they_arrive():
    packed = PackedData(Two(), BatchSettings(row_tokens=8, rows=1))
    batch = packed.first
    assert (batch.aux.dtype, batch.last.dtype) == (torch.bfloat16, torch.float16)
    with Copies() as copies:
        there = DrafterModule.transfer_batch_to_device(cast(Any, None), batch, torch.device("meta"), 0)
    assert there.aux.dtype == there.last.dtype == torch.float32
    assert {dtype for dtype, _ in copies.sent} == {torch.bfloat16, torch.float16, torch.float32, torch.int64}
    assert [dtype for dtype, _ in copies.sent].count(torch.float32) == 1, "lse alone was 32 bits wide before"
    assert all(later for _, later in copies.sent), "a copy that blocks"
    here = DrafterModule.transfer_batch_to_device(cast(Any, None), batch, torch.device("cpu"), 0)
    wide = Collate(8)([[Two().samples([i])[0] for i in packed.plan.batch(0)[0]]])
    assert torch.equal(here.aux, wide.aux)
    assert torch.equal(here.last, wide.last)


def test_the_loader_pins_every_tensor_of_a_batch(monkeypatch: pytest.MonkeyPatch):
    seen: list[Tensor] = []
    monkeypatch.setattr(Tensor, "pin_memory", lambda self, *_: seen.append(self) or self)
    batch = Collate(8)([[narrow_sample("a")]])
    pinned = pin_memory(batch, None)
    assert isinstance(pinned, Batch)
    tensors = [getattr(batch, one.name) for one in fields(Batch) if isinstance(getattr(batch, one.name), Tensor)]
    assert [id(one) for one in seen] == [id(one) for one in tensors]


def test_what_the_target_in_this_process_cannot_do_is_refused():
    with pytest.raises(ValueError, match="batch.workers must be 0, got 2"):
        BatchSettings(features="online", workers=2)
    with pytest.raises(ValueError, match="batch.precision must be null or one of .*float32.*got 'int8'"):
        BatchSettings(features="online", precision="int8")
    assert BatchSettings(features="store", workers=2, precision="int8").workers == 2
