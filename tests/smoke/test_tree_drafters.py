"""Every drafter that drafts along branches gives, at every node, what training computes for that node's path; the
others refuse."""

import pytest
import torch

from drafters.block import BlockDrafter
from drafters.contract import Drafter
from tests import checks
from tests.doubles import tiny_target

PROMPT = 9


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


@torch.no_grad()
def branches_equal_train(drafter: Drafter, target) -> None:
    """Two prompts of different lengths, three nodes in level 1, four in level 2 of which one is fed out of order."""
    lengths = torch.tensor([PROMPT, PROMPT - 3])
    texts = [checks.random_text(target, int(n) + 1, seed) for seed, n in enumerate(lengths)]
    state = drafter.begin(2, 40)
    drafter.start(state, torch.tensor([text[0] for text in texts]))
    known = [checks.sample(target, drafter, text, [0] * (len(text) - 1) + [1]) for text in texts]
    aux, last = (torch.zeros(2, PROMPT, *getattr(known[0], name).shape[1:]) for name in ("aux", "last"))
    next_ids = torch.zeros(2, PROMPT, dtype=torch.long)
    for r, one in enumerate(known):
        count = int(lengths[r])
        aux[r, :count], last[r, :count] = one.aux[:count], one.last[:count]
        next_ids[r, :count] = torch.tensor(texts[r][1:])
    drafter.observe(state, next_ids, aux, last, lengths)
    # Node 1 of level 1 has no children; level 2 names its parents among nodes 0, 2 that were read.
    levels = [torch.tensor([[11, 12, 13], [21, 22, 23]]), torch.tensor([[31, 32, 33, 34], [41, 42, 43, 44]])]
    parents = [torch.zeros(2, 3, dtype=torch.long), torch.tensor([[2, 0, 0, 1], [0, 1, 2, 2]])]
    branches = drafter.branch(state, drafter.num_slots)
    found = [branches.first[:, None]] + [branches.read(*one) for one in zip(levels, parents, strict=True)]
    again = drafter.branch(state, drafter.num_slots)
    assert torch.equal(again.first, branches.first), "branching changed the state"
    fewer = again.read(levels[0][:, 1:], parents[0][:, 1:])
    assert torch.allclose(fewer, found[1][:, 1:], atol=1e-4), "differs from training, and by what its siblings are"
    for r, node in ((0, 3), (1, 0)):
        above = int(parents[1][r, node])
        path = [int(levels[0][r, above]), int(levels[1][r, node])]
        text = texts[r] + path + [5]
        full = checks.sample(target, drafter, text, [0] * int(lengths[r]) + [1] * 4)
        batch = checks.row_batch([[full]], len(text))
        batch.anchors = lengths[r].view(1, 1)
        slots = drafter.slots(batch)
        wanted = drafter.logits(slots.hidden[0, 0], slots.prev_ids[0, 0]).softmax(-1)
        for k, place in enumerate((0, above, node)):
            error = (found[k][r, place].softmax(-1) - wanted[k]).abs().max()
            assert error < 1e-4, f"node {place} of level {k} differs from training by {error:.2e}"


@pytest.mark.parametrize("name", checks.DRAFTERS)
def test_nodes_are_what_training_computes(name, target):
    torch.manual_seed(0)
    drafter = checks.build(name, target)
    if drafter.branching is None:
        with pytest.raises(ValueError, match="drafts chains only"):
            drafter.branch(drafter.begin(1, 8), 2)
        return
    assert drafter.branching in ("slots", "steps")
    # Heads that start silent would hide what they read.
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.requires_grad and float(parameter.abs().max()) == 0:
                parameter.normal_(std=0.1)
    branches_equal_train(drafter, target)


def test_one_module_a_slot_drafts_chains(target):
    drafter = checks.build("mtp", target, modules=4)
    with pytest.raises(ValueError, match="drafts chains only"):
        drafter.branch(drafter.begin(1, 8), 2)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("dspark", {"head": {"kind": "rnn", "rank": 8}}),
        ("mtp", {"sharing": {"share": "kv"}}),
        ("independent", {"config": {"model_type": "mistral", "sliding_window": 4, "vocab_size": 64, "hidden_size": 32,
                                    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
                                    "num_key_value_heads": 2, "head_dim": 8}}),
    ],
)  # fmt: skip
def test_carries_shared_keys_and_windows(name, changes, target):
    torch.manual_seed(0)
    drafter = checks.build(name, target, **changes)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.requires_grad and float(parameter.abs().max()) == 0:
                parameter.normal_(std=0.1)
    branches_equal_train(drafter, target)


def test_a_carry_of_another_branch_is_seen(target, monkeypatch):
    torch.manual_seed(0)
    drafter = checks.build("domino", target)
    assert isinstance(drafter, BlockDrafter)
    torch.nn.init.normal_(drafter.embed_proj[2].weight, std=0.5)
    branches_equal_train(drafter, target)
    monkeypatch.setattr(drafter, "pick_carry", lambda carry, rows: carry[:, rows.flip(0)])
    with pytest.raises(AssertionError, match="differs from training"):
        branches_equal_train(drafter, target)


def test_nodes_that_see_their_siblings_are_seen(target, monkeypatch):
    from drafters.branches import NodeColumns

    place = NodeColumns.place

    def together(self, parents):
        columns, visible = place(self, parents)
        return columns, visible | visible.any(1, keepdim=True)

    torch.manual_seed(0)
    drafter = checks.build("eagle3", target)
    monkeypatch.setattr(NodeColumns, "place", together)
    with pytest.raises(AssertionError, match="differs from training"):
        branches_equal_train(drafter, target)
