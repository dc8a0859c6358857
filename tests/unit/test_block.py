"""Block drafters: masks written out by hand, layers, mask token, and the two forms of block attention."""

import pytest
import torch

from data.collate import draw_anchors
from data.target import unused_token
from drafters.attention import block_block_mask, dense_block, flex_block
from drafters.block import View, spread_layers
from drafters.dflash import DFlash
from drafters.layers import Rotary
from tests import checks
from tests.doubles import tiny_target, tiny_tokenizer


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


def view(target, slots: int) -> View:
    """One row: documents 0 0 0 0 1 1 1 1, anchors at columns 2 and 6, and padding."""
    rotary = Rotary(DFlash(target.parts, None, num_slots=2, layers=[0, 2]).layer_config)
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]])
    anchors = torch.tensor([[2, 6, -1]])
    return View(rotary, documents, anchors, torch.zeros(1, 3 * slots, dtype=torch.int64), slots)


def test_context_is_strictly_before_the_anchor_in_its_document(target):
    expected = [[1, 1, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0]]
    assert view(target, 3).visible(None)[0, :, 0].int().tolist() == expected


def test_a_window_moves_with_the_row(target):
    """Window 3: the row at position a + j sees a + j - 2 .. a - 1."""
    seen = view(target, 3).visible(3)[0].int().tolist()
    assert seen[0] == [[1, 1, 0, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0]]
    assert seen[1] == [[0, 0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0]]


def test_blocks_are_bidirectional_and_windowed_ones_causal(target):
    one = view(target, 3)
    assert one.inside(None, torch.device("cpu")).int().tolist() == [[1, 1, 1], [1, 1, 1], [1, 1, 1]]
    assert one.inside(3, torch.device("cpu")).int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


@pytest.mark.parametrize("window", [None, 3])
def test_flex_equals_dense(target, window):
    one, generator = view(target, 3), torch.Generator().manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    query, context, block = noise(1, 4, 3, 3, 8), (noise(1, 2, 8, 8), noise(1, 2, 8, 8)), (noise(1, 2, 3, 3, 8),) * 2
    dense = dense_block(query, context, block, one.visible(window), one.inside(window, query.device))
    mask = block_block_mask(one.documents, one.anchors, 3, window, window is not None)
    assert torch.allclose(flex_block(query, context, block, mask, compiled=False), dense, atol=1e-5)


def test_spread_layers_are_those_of_the_released_drafters():
    assert spread_layers(36) == (1, 9, 17, 25, 33)
    assert spread_layers(30) == (1, 8, 14, 20, 27)
    assert spread_layers(28, 1) == (14,)
    with pytest.raises(ValueError, match="no 5 spread capture layers"):
        spread_layers(6)


def test_input_rows_of_both_conventions(target):
    anchors = torch.tensor([[7, 9]])
    for convention, rows in (("fill_in", 4), ("anchor_first", 3)):
        drafter = DFlash(target.parts, None, num_slots=3, layers=[0, 2], slot_convention=convention)
        made, table = drafter.rows(anchors, 3), target.parts.embedding
        assert made.shape == (1, 2, rows, 32)
        assert torch.equal(made[0, 1, 0], table[9])
        assert all(torch.equal(row, table[drafter.mask_token]) for row in made[0, 1, 1:])


def test_a_trained_mask_starts_from_the_targets_row(target):
    drafter = DFlash(target.parts, None, num_slots=3, layers=[0, 2], block={"trained_mask": True})
    plain = DFlash(target.parts, None, num_slots=3, layers=[0, 2])
    anchors = torch.tensor([[7]])
    assert torch.equal(drafter.rows(anchors, 3), plain.rows(anchors, 3))
    assert "mask_embedding" in drafter.state_dict()


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"mask_token": 64}, "mask token 64 is no row"),
        ({"depth": 0}, "depth must be at least 1"),
        ({"width": 3}, "unknown key"),
        ({"window": 4}, "go together"),
        ({"window": 4, "windowed": [5]}, "go together"),
    ],
)
def test_bad_blocks_are_refused_by_name(target, block, message):
    with pytest.raises(ValueError, match=message):
        DFlash(target.parts, None, num_slots=3, layers=[0, 2], block=block)


def test_drafting_more_slots_than_trained_is_refused(target):
    drafter = checks.build("dflash", target, 3)
    with pytest.raises(ValueError, match="at most 3 slots"):
        drafter.propose(drafter.begin(1, 8), 4, checks.Sampling(), torch.tensor([0]))


def test_the_unused_token_is_never_written():
    tokenizer = tiny_tokenizer()
    assert unused_token(tokenizer, 64) == len(tokenizer)
    assert unused_token(tokenizer, len(tokenizer)) is None  # every special token has a role
    tokenizer.add_special_tokens({"mask_token": "<|mask|>"})
    assert unused_token(tokenizer, 64) == tokenizer.mask_token_id


def test_anchors_are_drawn_by_the_seed_and_only_where_allowed():
    allowed = torch.tensor([[True, False] * 8, [False] * 14 + [True] * 2])
    one, again, other = draw_anchors(allowed, 3, 5), draw_anchors(allowed, 3, 5), draw_anchors(allowed, 3, 6)
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert one.sum(1).tolist() == [3, 2]
    assert not (one & ~allowed).any()
    assert torch.equal(draw_anchors(allowed, 99, 5), allowed)
    with pytest.raises(ValueError, match="at least 1"):
        draw_anchors(allowed, 0, 5)
