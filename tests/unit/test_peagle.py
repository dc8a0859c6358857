"""P-EAGLE: its attention mask by hand, two forms of attention, nested dropping, a mask row that sees too much."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from drafters.contract import Batch
from drafters.decoder import PlainLayer
from drafters.peagle import PEagle, Rows, lay_out
from drafters.sampling import Sampling
from tests import checks
from tests.doubles import tiny_target
from training.objectives import Objective


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


def head(target, kind: type[PEagle] = PEagle, **model) -> PEagle:
    torch.manual_seed(0)
    chosen = {"num_slots": 3, "depth": 2, "layers": [0, 2, 3]} | model
    return kind(target.parts, None, **chosen).eval()


def two_documents(anchors: list[int]) -> Batch:
    """One packed row of two documents of three tokens each; both are answers."""
    tokens = torch.arange(6)[None] + 10
    return Batch(
        tokens=tokens,
        positions=torch.tensor([[0, 1, 2, 0, 1, 2]]),
        documents=torch.tensor([[0, 0, 0, 1, 1, 1]]),
        turns=torch.ones_like(tokens),
        aux=torch.zeros(1, 6, 3, 32),
        last=torch.zeros(1, 6, 32),
        top1=tokens,
        lse=torch.zeros(1, 6),
        anchors=torch.tensor([anchors]),
    )


def seen(rows: Rows) -> Tensor:
    """[B, N, N] bool: Rows.sees of every pair."""
    batch, count = rows.row.shape
    b = torch.arange(batch)[:, None, None].expand(batch, count, count)
    index = torch.arange(count)
    return rows.sees(b, index[:, None].expand_as(b), index[None, :].expand_as(b))


def test_attention_mask_by_hand():
    # Anchors at 1 and 4, so their rows are 0 and 3. Rows: five of depth 1, then depth 2 and depth 3 of both anchors.
    rows, _ = lay_out(two_documents([1, 4]), torch.ones(1, 2, 3, dtype=torch.bool), [1.0, 1.0, 1.0])
    expected = [
        [1, 0, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 1, 0, 0, 0, 0, 0],
        [0, 0, 0, 1, 1, 0, 0, 0, 0],
        [1, 0, 0, 0, 0, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0, 1, 0, 0],
        [1, 0, 0, 0, 0, 1, 0, 1, 0],
        [0, 0, 0, 1, 0, 0, 1, 0, 1],
    ]
    assert seen(rows)[0].long().tolist() == expected
    assert rows.position[0].tolist() == [0, 1, 2, 0, 1, 1, 1, 2, 2]
    assert rows.depth[0].tolist() == [1, 1, 1, 1, 1, 2, 2, 3, 3]


def test_a_later_anchor_sees_earlier_rows_but_no_other_anchors_masks():
    rows, _ = lay_out(two_documents([1, 2]), torch.ones(1, 2, 2, dtype=torch.bool), [1.0, 1.0])
    expected = [[1, 0, 0, 0, 0, 1, 0], [1, 1, 0, 0, 0, 0, 1]]
    assert seen(rows)[0, 5:].long().tolist() == expected


@pytest.mark.parametrize("shares", [[1.0, 1.0, 1.0], [1.0, 0.6, 0.3]])
def test_attention_is_softmax_under_the_mask_in_both_forms(target, shares):
    batch = checks.train_batch(target, head(target))
    mask = torch.ones(*batch.anchors.shape, 3, dtype=torch.bool)
    assert (batch.anchors < 0).any(), "a padding anchor is needed here"
    rows, _ = lay_out(batch, mask, shares)
    count = rows.row.shape[1]
    query, keys, values = torch.randn(2, 4, count, 16), torch.randn(2, 2, count, 16), torch.randn(2, 2, count, 16)
    plain = torch.nn.functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=seen(rows)[:, None], enable_gqa=True
    )
    real = (rows.document >= 0)[:, None, :, None]
    assert torch.allclose(rows.dense(query, keys, values) * real, plain * real, atol=1e-5)
    assert torch.allclose(rows.flex(query, keys, values, compiled=False), plain, atol=1e-5)


def test_rows_are_dropped_nested_and_change_no_kept_slot(target):
    drafter = head(target, num_slots=4, mask_rows={"keep": 0.6, "keep_min": 0.3})
    batch = checks.train_batch(target, drafter)
    full = drafter.slots(batch)
    drafter.train()
    rows, _ = drafter.rows(batch, full.mask)
    count = batch.anchors.shape[1]
    # ceil of 0.6, 0.36 and max(0.216, 0.3) of the anchors.
    assert [part.stop - part.start for part in rows.parts] == [-(-count * n // 100) for n in (60, 36, 30)]
    for row in range(2):
        kept = [set(place[row].tolist()) for place in rows.place]
        assert kept[0] > kept[1] >= kept[2]
    some = drafter.slots(batch)
    assert not (some.mask & ~full.mask).any()
    assert some.mask.sum() < full.mask.sum()
    assert torch.equal(some.mask, some.mask.cummin(-1).values), "a kept slot needs every slot before it"
    assert torch.equal(some.mask[:, :, 0], full.mask[:, :, 0])
    assert torch.allclose(some.hidden[some.mask], full.hidden[some.mask], atol=1e-5)
    again = drafter.slots(batch).mask
    assert torch.equal(again, some.mask), "equal seeds draw equal rows"
    assert not torch.equal(drafter.slots(replace(batch, seed=7)).mask, some.mask), "another step must draw other rows"


class SeesALaterAnchor(PEagle):
    """Mask rows see one depth-1 row beyond their anchor's."""

    def rows(self, batch: Batch, mask: Tensor) -> tuple[Rows, Tensor]:
        rows, mask = super().rows(batch, mask)
        wider = [seen | torch.roll(seen, 1, 2) for seen in rows.visible[1:]]
        return replace(rows, visible=[rows.visible[0], *wider]), mask


def test_a_mask_row_that_sees_a_later_anchor_is_found(target):
    batch = checks.train_batch(target, head(target))
    checks.frontier(head(target), batch)
    with pytest.raises(AssertionError, match="slot 2 sees past its frontier"):
        checks.frontier(head(target, SeesALaterAnchor), batch)


def test_mask_rows_by_hand(target):
    """Slot 2 of one layer, from its own equation: features of the mask, embedding of the mask token, position a."""
    drafter = head(target, depth=1, num_slots=2)
    batch = checks.train_batch(target, drafter)
    anchor, layer = int(batch.anchors[0, 0]), drafter.layers[0]
    embedded = drafter.embedding(torch.cat([batch.tokens[0, 1 : anchor + 1], torch.tensor([drafter.mask_token])]))
    fused = torch.cat([batch.aux[0, :anchor].flatten(1), drafter.mask_hidden]) @ drafter.fc.weight.T
    joined, residual = layer.join(fused[None], embedded[None])
    positions = torch.arange(anchor + 1)[None]
    query = layer.self_attn.query(joined, drafter.rotary, positions)
    keys, values = layer.self_attn.keys_values(joined, drafter.rotary, positions)
    attended = torch.nn.functional.scaled_dot_product_attention(
        query[:, :, -1:], keys, values, is_causal=False, enable_gqa=True
    )
    expected = drafter.norm(layer.finish(residual[:, -1:], attended))[0, 0]
    assert torch.allclose(drafter.slots(batch).hidden[0, 0, 1], expected, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_warm_start_begins_as_the_targets_last_block(family):
    target = tiny_target(family)
    drafter = head(target, depth=3)
    taken = drafter.warm_start(target.parts)
    states, zero = torch.randn(1, 5, 32), torch.zeros(1, 4, 5, 8)
    assert torch.allclose(drafter.norm(states), target.parts.norm(states), atol=1e-4)
    assert torch.allclose(drafter.fuse(torch.stack([states] * 3, 2)), states)
    for layer in list(drafter.layers)[1:]:
        assert isinstance(layer, PlainLayer)
        assert torch.equal(layer.finish(states, torch.randn_like(zero)), states), "a later layer changes its input"
    assert ("layers.1.self_attn.q_proj.weight <- target's last block" in taken) == (family != "qwen3")
    assert "layers.2.mlp.gate_proj.weight <- target's last block" in taken


def test_names_are_the_engines(target):
    names = set(head(target).state_dict())
    plain = {f"self_attn.{part}_proj" for part in "qkvo"} | {f"mlp.{part}_proj" for part in ("gate", "up", "down")}
    plain |= {"input_layernorm", "post_attention_layernorm"}
    assert names == {
        *(f"layers.0.{name}.weight" for name in plain | {"hidden_norm"}),
        *(f"layers.1.{name}.weight" for name in plain),
        *("fc.weight", "norm.weight", "lm_head.weight", "mask_hidden"),
    }
    assert head(target).mask_hidden.shape == (1, 3 * 32)


def test_overfits_one_sample_at_seven_slots(target):
    drafter = head(target, num_slots=7)
    drafter.warm_start(target.parts)
    checks.overfit_one(drafter, target, Objective({"hard_ce": 1.0}, {"kind": "uniform"}))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"num_slots": 1}, "num_slots"),
        ({"depth": 0}, "depth"),
        ({"layers": [3, 1]}, "ascending"),
        ({"head": "mine"}, "own"),
        ({"mask_rows": {"token": 64}}, "mask token 64"),
        ({"mask_rows": {"keep": 0.0}}, "keep"),
        ({"mask_rows": {"keep_min": 2}}, "keep_min"),
        ({"mask_rows": {"share": 0.5}}, "share"),
    ],
)
def test_bad_settings_are_refused(target, model, words):
    with pytest.raises(ValueError, match=words):
        head(target, **model)


def test_a_target_without_an_unused_token_needs_one_named(target):
    without = replace(target.parts, mask_token=None)
    with pytest.raises(ValueError, match=r"mask_rows\.token"):
        PEagle(without, num_slots=3, layers=[0, 2, 3])
    named = PEagle(without, num_slots=3, layers=[0, 2, 3], mask_rows={"token": 63})
    assert named.mask_token == named.settings()["mask_rows"]["token"] == 63


def test_more_slots_than_trained_are_refused(target):
    drafter = head(target)
    with pytest.raises(ValueError, match="at most 3"):
        drafter.propose(drafter.begin(1, 8), 4, Sampling(), torch.tensor([0]))
