"""Medusa: its equation and alignment by hand, a leaked state, targets without captured layers."""

import pytest
import torch
from torch import Tensor

from data.conversations import Conversation
from data.features import FeatureStore, capture
from drafters.contract import Batch, SlotBatch
from drafters.medusa import Medusa
from drafters.sampling import Sampling
from drafters.vocabulary import DraftVocabulary
from tests import checks
from tests.doubles import tiny_target
from training.objectives import Objective


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


def head(target, kind: type[Medusa] = Medusa, **model) -> Medusa:
    torch.manual_seed(0)
    made = kind(target.parts, None, **({"num_slots": 3} | model)).eval()
    with torch.no_grad():
        for parameter in made.blocks.parameters():
            parameter.normal_(0, 0.3)
    return made


class ReadsTheAnchorsState(Medusa):
    """last[a] instead of last[a - 1]: when drafting, the target has not read the anchor yet."""

    def slots(self, batch: Batch) -> SlotBatch:
        return super().slots(Batch(**{**batch.__dict__, "last": torch.roll(batch.last, -1, 1)}))


def test_heads_by_hand(target):
    drafter = head(target, num_slots=2, num_layers=2, bias=True)
    batch = checks.train_batch(target, drafter)
    slots = drafter.slots(batch)
    anchor = int(batch.anchors[0, 1])
    for k in (0, 1):
        x = batch.last[0, anchor - 1]
        for layer in drafter.blocks[k].layers:
            inner = layer.weight @ x + layer.bias
            x = x + inner * torch.sigmoid(inner)
        assert torch.allclose(slots.hidden[0, 1, k], x, atol=1e-5)
        assert int(slots.target_ids[0, 1, k]) == int(batch.tokens[0, anchor + 1 + k])
        logits = drafter.logits(slots.hidden[0, 1, k][None], slots.prev_ids[0, 1, k][None])[0]
        assert torch.allclose(logits, drafter.lm_head.weight @ x, atol=1e-5)


def test_names_are_the_engines(target):
    assert set(Medusa(target.parts, num_slots=2, num_layers=2, bias=True).state_dict()) == {
        *(f"blocks.{i}.layers.{j}.{kind}" for i in (0, 1) for j in (0, 1) for kind in ("weight", "bias")),
        "lm_head.weight",
    }
    assert set(Medusa(target.parts, num_slots=1, head="target").state_dict()) == {"blocks.0.layers.0.weight"}


@pytest.mark.parametrize("kind", ["own", "target"])
def test_starts_as_the_targets_own_head(target, kind):
    some = DraftVocabulary(torch.arange(1, 64, 3), 64)
    drafter = Medusa(target.parts, some, num_slots=2, head=kind)
    assert len(drafter.warm_start(target.parts)) == (kind == "own")
    last = torch.randn(4, 32)
    state = drafter.begin(4, 8)
    drafter.observe(
        state, torch.ones(4, 1, dtype=torch.int64), torch.empty(4, 1, 0, 32), last[:, None], torch.ones(4).long()
    )
    made = drafter.propose(state, 2, Sampling(temperature=1.0), torch.arange(4))
    wanted = target.parts.logits(last, some.ids).softmax(-1)
    for k in (0, 1):
        assert torch.allclose(made.probs[:, k, some.ids], wanted, atol=1e-5)


def test_state_keeps_the_newest_position(target):
    drafter, last = head(target), torch.randn(2, 3, 32)
    state = drafter.begin(2, 16)
    empty, ids = torch.empty(2, 3, 0, 32), torch.zeros(2, 3, dtype=torch.int64)
    drafter.observe(state, ids, empty, last, torch.tensor([3, 1]))
    drafter.observe(state, ids, empty, last + 1, torch.tensor([0, 2]))
    assert torch.equal(state.last, torch.stack([last[0, 2], last[1, 1] + 1]))
    assert state.length.tolist() == [3, 3]


def test_a_state_of_the_anchor_is_found(target):
    checks.frontier(head(target), checks.train_batch(target, head(target)))
    faulty = head(target, ReadsTheAnchorsState)
    with pytest.raises(AssertionError, match="frontier"):
        checks.frontier(faulty, checks.train_batch(target, faulty))
    with pytest.raises(AssertionError, match="differ"):
        checks.draft_equals_train(faulty, target)


@pytest.mark.parametrize(("kind", "num_slots", "num_layers"), [("own", 7, 1), ("target", 3, 2)])
def test_overfits_one_sample(target, kind, num_slots, num_layers):
    # A frozen head leaves a body of 32 x 32 weights a slot: too few for seven slots of a random target.
    drafter = Medusa(target.parts, num_slots=num_slots, num_layers=num_layers, head=kind)
    drafter.warm_start(target.parts)
    checks.overfit_one(drafter, target, Objective({"hard_ce": 1.0}, {"kind": "geometric", "beta": 0.8}))


def conversations(target) -> list[Conversation]:
    return [Conversation(str(n), "test", checks.random_text(target, n, n), [0] * 3 + [1] * (n - 3)) for n in (7, 5)]


def aux_of(store: FeatureStore) -> list[Tensor]:
    return [store[i].aux for i in range(len(store))]


@pytest.mark.parametrize("stored", [(), (0, 2)])
def test_a_store_gives_no_layers_when_none_are_needed(target, tmp_path, stored):
    whole = capture(target, conversations(target), stored, tmp_path, dtype="float32")
    assert [aux.shape for aux in aux_of(whole)] == [(7, len(stored), 32), (5, len(stored), 32)]
    none = FeatureStore.open(tmp_path, target.identity, layers=(), parts=target.parts)
    assert none.layers == ()
    assert [aux.shape for aux in aux_of(none)] == [(7, 0, 32), (5, 0, 32)]
    assert torch.equal(none[0].last, whole[0].last)
    batch = checks.row_batch([[none[0], none[1]]], 12)
    assert batch.aux.shape == (1, 12, 0, 32)
    assert head(target).slots(batch).mask.any()


@pytest.mark.parametrize(
    ("model", "words"), [({"num_slots": 0}, "num_slots"), ({"num_layers": 0}, "num_layers"), ({"head": "mine"}, "own")]
)
def test_bad_settings_are_refused(target, model, words):
    with pytest.raises(ValueError, match=words):
        Medusa(target.parts, **model)


def test_more_slots_than_heads_are_refused(target):
    drafter = head(target)
    with pytest.raises(ValueError, match="3 heads"):
        drafter.propose(drafter.begin(1, 8), 4, Sampling(), torch.tensor([0]))
