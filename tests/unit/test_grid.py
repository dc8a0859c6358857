"""Labels, slot masks and anchors of the slot grid, written out by hand."""

import torch

from data.collate import gather_anchors
from drafters.contract import Batch, answer_anchors, grid


def batch(tokens, turns, documents, anchors) -> Batch:
    t = torch.tensor(tokens)
    rows, length = t.shape
    zero = torch.zeros(rows, length, dtype=torch.int64)
    return Batch(
        tokens=t,
        positions=torch.arange(length).expand(rows, length),
        documents=torch.tensor(documents),
        turns=torch.tensor(turns),
        aux=torch.zeros(rows, length, 1, 2),
        last=torch.zeros(rows, length, 2),
        top1=zero,
        lse=torch.zeros(rows, length),
        anchors=torch.tensor(anchors),
    )


def test_first_answer_token_is_the_first_anchor_and_the_end_of_turn_the_last_label():
    # position      0   1   2   3   4   5   6
    # token         p   p   x   y   e   q   q       e ends the turn
    one = batch([[10, 11, 20, 21, 2, 12, 13]], [[0, 0, 1, 1, 1, 0, 0]], [[0] * 7], [[2, 3]])
    made = grid(one, 3)
    assert answer_anchors(one.turns, one.documents).tolist() == [[False, False, True, True, False, False, False]]
    assert made.mask.tolist() == [[[True, True, False], [True, False, False]]]
    assert made.target_ids[0].tolist() == [[21, 2, 12], [2, 12, 13]]
    assert made.prev_ids[0].tolist() == [[20, 21, 2], [21, 2, 12]]
    assert made.teacher[0].tolist() == [[2, 3, 4], [3, 4, 5]]


def test_two_turns_never_share_a_chain_even_when_they_touch():
    one = batch([[5, 6, 7, 8, 9, 10]], [[0, 1, 1, 2, 2, 2]], [[0] * 6], [[1, 3, 4]])
    assert answer_anchors(one.turns, one.documents).tolist() == [[False, True, False, True, True, False]]
    assert grid(one, 2).mask.tolist() == [[[True, False], [True, True], [True, False]]]


def test_documents_and_the_row_end_cut_chains():
    # two documents whose answers touch: the first ends at 2, the second begins at 3 with an answer at once
    one = batch([[5, 6, 7, 8, 9, 10]], [[0, 1, 1, 1, 1, 1]], [[0, 0, 0, 1, 1, 1]], [[1, 4, -1]])
    # 3 starts its document: no feature lies before it, so it is no anchor
    assert answer_anchors(one.turns, one.documents).tolist() == [[False, True, False, False, True, False]]
    assert grid(one, 3).mask.tolist() == [[[True, False, False], [True, False, False], [False, False, False]]]


def test_an_off_by_one_mask_is_seen():
    """The peers' fault: the row whose label is the second answer token is gated by the last prompt token, and lost."""
    turns, documents = torch.tensor([[0, 0, 1, 1, 1, 0]]), torch.zeros(1, 6, dtype=torch.int64)
    right = answer_anchors(turns, documents)
    unshifted = torch.zeros_like(right)
    unshifted[:, 1:] = right[:, :-1]
    assert right[0, 2]
    assert not unshifted[0, 2]


def test_gather_anchors_pads_and_rounds_up():
    allowed = torch.tensor([[False, True, True, False], [True, False, False, False]])
    assert gather_anchors(allowed, 1).tolist() == [[1, 2], [0, -1]]
    assert gather_anchors(allowed, 3).tolist() == [[1, 2, -1], [0, -1, -1]]
    assert gather_anchors(torch.zeros(1, 4, dtype=torch.bool), 2).tolist() == [[-1, -1]]
