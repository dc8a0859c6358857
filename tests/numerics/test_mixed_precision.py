"""The road of a GPU, on the CPU: a target of 16 bits, trained weights of 32, the step under bf16 autocast.

Drafting (rollouts, tau while training) happens outside autocast and keeps caches of 32 bits.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from data.target import Target
from drafters.contract import TargetParts
from drafters.layers import SharedHead
from drafters.vocabulary import DraftVocabulary
from tests import checks
from tests.doubles import tiny_model, tiny_target, tiny_tokenizer
from training.objectives import slot_terms
from training.self_forcing import SelfForcing, SelfForcingSettings


@pytest.fixture(scope="module")
def target() -> Target:
    """A tiny Llama in bf16, with a bias in its head."""
    model = tiny_model("llama").to(torch.bfloat16)
    head = torch.nn.Linear(model.lm_head.in_features, model.lm_head.out_features, dtype=torch.bfloat16)
    model.lm_head = head.requires_grad_(False)
    return Target(model, tiny_tokenizer(), name="tiny-bf16")


@contextmanager
def bf16() -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16):
        yield


@pytest.mark.parametrize("name", checks.DRAFTERS)
def test_a_step_and_the_drafting_around_it(name: str, target: Target) -> None:
    torch.manual_seed(0)
    drafter = checks.build(name, target, num_slots=3).float()
    batch = checks.train_batch(target, drafter)
    drafter.train()
    objective = checks.own_objective(name)
    with bf16():
        rolled = SelfForcing(target, SelfForcingSettings(share=1.0), lambda step: batch)(drafter, batch, 0)
        loss = torch.zeros(())
        for one in (batch, rolled):
            terms = slot_terms(drafter, drafter.slots(one), one, target.parts, objective)
            loss = loss + terms.loss
    loss.backward()
    trained = [p for p in drafter.parameters() if p.requires_grad]
    assert torch.isfinite(loss)
    assert any(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in trained)
    assert all(p.dtype == torch.float32 for p in trained)
    drafter.eval()
    checks.lossless(drafter, target)


def test_rollouts_do_not_depend_on_the_steps_precision(target: Target) -> None:
    torch.manual_seed(0)
    drafter = checks.build("eagle3", target, num_slots=3).float()
    batch = checks.train_batch(target, drafter)
    forcing = SelfForcing(target, SelfForcingSettings(share=1.0, rejected=0.5), lambda step: batch)
    alone = forcing.roll(drafter, batch)
    with bf16():
        mixed = forcing.roll(drafter, batch)
    assert torch.equal(alone[0], mixed[0])
    for key in ("tokens", "labels", "mask", "teacher", "last", "lse"):
        assert torch.equal(getattr(alone[1], key), getattr(mixed[1], key)), key


def test_a_recurrent_head_keeps_its_bits(target: Target) -> None:
    """cuDNN's GRU runs in float16 under any autocast, and no scaler looks after its gradients."""
    torch.manual_seed(0)
    drafter = checks.build("domino", target, num_slots=3).float().train()
    seen: list[bool] = []
    drafter.prefix_gru.register_forward_pre_hook(  # type: ignore[union-attr, operator]
        lambda *_: seen.append(torch.is_autocast_enabled("cpu"))
    )
    hidden, tokens = torch.randn(2, 3, 32), torch.randint(4, 60, (2, 3))
    with bf16():
        together = drafter.head_inputs(hidden, tokens)  # type: ignore[operator]
        apart, carry = [], None
        for k in range(3):
            made, carry = drafter.step(hidden[:, k], tokens[:, k], carry)  # type: ignore[operator]
            apart.append(made)
    assert seen == [False] * 4
    torch.testing.assert_close(torch.stack(apart, 1), together)


class Casts(TorchDispatchMode):
    """Sizes of tensors that were copied into another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):  # type: ignore[no-untyped-def]
        if function is torch.ops.aten._to_copy.default:
            self.sizes.append(arguments[0].numel())
        return function(*arguments, **(keywords or {}))


def test_a_shared_head_of_16_bits_is_not_copied(target: Target) -> None:
    parts: TargetParts = target.parts
    head, hidden = SharedHead(parts, DraftVocabulary.full(len(parts.head)).ids), torch.randn(3, parts.head.shape[1])
    with bf16(), Casts() as casts:
        head(hidden)
    assert casts.sizes
    assert max(casts.sizes) < parts.head.numel()
    outside = head(hidden)  # 32 bits: as exact as the trained weights
    assert outside.dtype == torch.float32
    wanted = hidden @ parts.head.float().T + parts.head_bias.float()  # type: ignore[union-attr]
    assert torch.allclose(outside, parts.shape_logits(wanted), atol=1e-5)


def test_the_teacher_moves_to_a_head_elsewhere() -> None:
    parts = tiny_target("llama").parts
    there = TargetParts(parts.config, parts.embedding, parts.norm, parts.head.to("meta"))
    assert there.logits(torch.randn(2, parts.head.shape[1])).device.type == "meta"
