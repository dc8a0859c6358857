"""Block drafters: masks written out by hand, layers, mask token, and the two forms of block attention."""

import re
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.flop_counter import FlopCounterMode

from data.collate import draw_anchors
from data.target import unused_token
from drafters import attention
from drafters.attention import block_block_mask, dense_block, flex_block, fused
from drafters.block import BlockLayer, View, spread_layers
from drafters.dflash import DFlash
from drafters.layers import Rotary
from drafters.vocabulary import DraftVocabulary
from tests import checks
from tests.doubles import VOCAB_SIZE, tiny_target, tiny_tokenizer
from training.train import construct


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
    assert one.inside(2, torch.device("cpu")).int().tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]


@pytest.mark.parametrize("window", [None, 3, 2])
def test_flex_equals_dense(target, window):
    one, generator = view(target, 3), torch.Generator().manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    query, context, block = noise(1, 4, 3, 3, 8), (noise(1, 2, 8, 8), noise(1, 2, 8, 8)), (noise(1, 2, 3, 3, 8),) * 2
    dense = dense_block(query, context, block, one.visible(window), one.inside(window, query.device))
    mask = block_block_mask(one.documents, one.anchors, 3, window, window is not None)
    assert torch.allclose(flex_block(query, context, block, mask, compiled=False), dense, atol=1e-5)


@pytest.mark.parametrize(("queries", "keys"), [(300, 520), (256, 512), (128, 100)])
def test_a_mask_by_groups_is_torchs_mask(queries, keys):
    """Ragged ends, tiles that are empty, partly and wholly seen, rows that differ."""
    first = torch.tensor([[0], [150]])

    def allowed(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return (kv >= first[b, 0]) & (kv <= q + 140) | (kv == 3 * q)

    made = attention.block_mask(allowed, (2, queries, keys), torch.device("cpu"), cells=1)
    wanted = create_block_mask(allowed, 2, None, queries, keys, device="cpu")
    assert made.shape == wanted.shape
    assert made.seq_lengths == wanted.seq_lengths
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
        assert torch.equal(getattr(made, name), getattr(wanted, name)), name
    for name in ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"):  # of the backward pass
        assert torch.equal(getattr(made, name), getattr(wanted, name)), name


def test_flex_gets_one_dtype_under_autocast(target, monkeypatch):
    """Norms over heads give queries and keys of 32 bits there, projections values of 16."""
    seen: list[set[torch.dtype]] = []

    def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **_: object) -> torch.Tensor:
        seen.append({query.dtype, keys.dtype, values.dtype})
        return query

    monkeypatch.setattr(attention, "flex_attention", attend)
    one, layer = view(target, 3), BlockLayer(DFlash(target.parts, None, num_slots=2, layers=[0, 2]).layer_config)
    mask = block_block_mask(one.documents, one.anchors, 3, None, False)
    monkeypatch.setattr(View, "attend", lambda self, q, c, b, window: flex_block(q, c, b, mask, compiled=False))
    with torch.autocast("cpu", torch.bfloat16):
        states = torch.randn(1, 8, 32)
        context = layer.self_attn.keys_values(states, one.rotary, torch.arange(8)[None])
        out = layer.attend(torch.randn(1, 3, 3, 32), one, context)
    assert context[0].dtype != context[1].dtype, "norms and projections agree: this shows nothing"
    assert seen == [{torch.bfloat16}]
    assert out.shape == (1, 3, 3, 32)


def test_fused_attention_is_left_to_operators_that_are_looked_at():
    wide, narrow = (cast(Any, SimpleNamespace(is_cuda=True, shape=(1, 1, 1, width))) for width in (16, 8))
    assert fused(wide)
    assert not fused(narrow)
    assert not fused(torch.zeros(1, 1, 1, 16))
    with FlopCounterMode(display=False):
        assert not fused(wide)


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
        ({"mask_token": "MASK"}, "mask token MASK is no row"),
        ({"mask_token": 1.5}, "mask token 1.5 is no row"),
        ({"depth": 0}, "depth must be at least 1"),
        ({"depth": None}, "depth must be at least 1 and whole, got None"),
        ({"anchors": 0}, "anchors must be at least 1 and whole, got 0"),
        ({"window": 2.5, "windowed": [0]}, r"window must be at least 1 and whole, got 2\.5"),
        ({"windowed": None}, "windowed must be a list of draft layers"),
        ({"width": 3}, "unknown key"),
        ({"window": 0, "windowed": [0]}, "window must be at least 1 and whole, got 0"),
        ({"window": 4}, "go together"),
        ({"window": 4, "windowed": [5]}, "go together"),
    ],
)
def test_bad_blocks_are_refused_by_name(target, block, message):
    with pytest.raises(ValueError, match=message):
        DFlash(target.parts, None, num_slots=3, layers=[0, 2], block=block)


@pytest.mark.parametrize(
    ("name", "model", "message"),
    [
        ("dflash", {"num_slots": 2.5}, r"num_slots must be at least 1 and whole, got 2\.5"),
        ("dspark", {"head": {"rank": 0}}, r"head\.rank must be at least 1 and whole, got 0"),
        ("domino", {"head": {"state": 0}}, r"head\.state must be at least 1"),
        ("domino", {"head": {"base_share": None}}, r"head\.base_share must be in \(0, 1\], got None"),
        ("dflash2", {"head": {"rank": 0}}, r"head\.rank must be at least 1"),
        ("dflash2", {"head": {"group": 0}}, r"head\.group must be at least 1"),
        ("peagle", {"mask_rows": {"token": "MASK"}}, "mask token MASK is no row"),
        ("peagle", {"mask_rows": {"keep": None}}, "keep and keep_min must be in"),
        ("medusa", {"num_slots": None}, "num_slots must be at least 1 and whole, got None"),
        ("eagle3", {"layer": {"head_dim": 7}}, "head_dim must be even"),
        ("eagle3", {"layer": {"num_attention_heads": 0}}, "layer: num_attention_heads must be at least 1"),
        ("dflash", {"layer": {"num_key_value_heads": 3}}, "num_key_value_heads divide num_attention_heads"),
    ],
)
def test_bad_numbers_are_refused_by_name(target, name, model, message):
    with pytest.raises(ValueError, match=message):
        checks.build(name, target, **model)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"foo": 1}, "drafter.model: .*unexpected keyword argument 'foo'"),
        ({"layers": 3}, "drafter.model.layers must be a list of target layers, or null, got 3"),
    ],
)
def test_arguments_that_a_drafter_does_not_take_are_refused(target, more, message):
    with pytest.raises(ValueError, match=message):
        construct(
            {"_target_": "drafters.dflash.DFlash", "num_slots": 3} | more,
            target.parts,
            DraftVocabulary.full(VOCAB_SIZE),
        )


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


@pytest.mark.parametrize(("groups", "depth"), [(4, 2), (4, 1), (1, 3)])
@pytest.mark.parametrize("name", ["dflash", "dspark", "dflash2"])
@torch.no_grad()
def test_the_warm_start_carries_the_newest_feature(name, groups, depth, target):
    """The first layer's attention writes the feature right before the anchor into the block's first row; layers between
    add nothing. One key-value head of 16 holds half of the 32 directions."""
    drafter = checks.build(name, target, layer={"num_key_value_heads": groups, "head_dim": 16}, block={"depth": depth})
    text = checks.random_text(target, 60, 1)
    batch = checks.row_batch([[checks.sample(target, drafter, text, [0] * 5 + [1] * 55)]], 60)
    batch.aux += 2.0  # the features of a random model have no mean, those of trained ones do
    drafter.warm_start(target.parts)
    kept, apart = (float(share) for share in re.findall(r"([\d.]+)%", drafter.warm_start_on(batch)[0]))
    assert kept > (95 if groups == 4 else 50)
    assert apart > 95
    first, place = drafter.layers[0], batch.anchors
    fused = drafter.fuse(batch.aux)
    rows = drafter.rows(batch.tokens.gather(1, place), 4)
    positions = batch.positions.gather(1, place)[..., None] + torch.arange(rows.shape[2])
    view = View(drafter.rotary, batch.documents, place, positions.flatten(1), rows.shape[2])
    context = first.self_attn.keys_values(fused, drafter.rotary, batch.positions)
    written = BlockLayer.attend(first, first.input_layernorm(rows), view, context)[:, :, 0]
    states = drafter.fc(batch.aux.flatten(-2))

    def likeness(back: int) -> float:
        wanted = states.gather(1, (place - back)[..., None].expand(-1, -1, 32))
        return float(torch.nn.functional.cosine_similarity(written, wanted, dim=-1).mean())

    assert likeness(1) > 0.8
    assert likeness(1) > likeness(2) + 0.1
    between = drafter.layers[1:-1]
    assert all(not layer.self_attn.o_proj.weight.any() and not layer.mlp.down_proj.weight.any() for layer in between)
    assert depth == 1 or not first.mlp.down_proj.weight.any()


def test_too_few_features_carry_nothing(target):
    drafter = checks.build("dflash", target)
    before = {name: value.clone() for name, value in drafter.state_dict().items()}
    batch = checks.row_batch(
        [[checks.sample(target, drafter, checks.random_text(target, 20, 1), [0] * 5 + [1] * 15)]], 20
    )
    line = drafter.warm_start_on(batch)
    assert "do not tell 32 directions" in line[0]
    assert all(torch.equal(value, before[name]) for name, value in drafter.state_dict().items())
