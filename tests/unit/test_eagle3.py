"""EAGLE-3: warm starts by family, the two attention forms, thinning of chains."""

import pytest
import torch

from drafters.attention import chain_block_mask, dense_chain, flex_chain
from drafters.eagle3 import Eagle3
from tests import checks
from tests.doubles import tiny_target


def head(family: str, **model) -> Eagle3:
    target = tiny_target(family)
    return Eagle3(target.parts, None, num_slots=3, layers=[0, 2, 3], **model)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma", "gemma2", "mistral", "deepseek_v3"])
def test_warm_start_takes_what_means_the_same(family):
    target = tiny_target(family)
    drafter = Eagle3(target.parts, None, num_slots=3, layers=[0, 2, 3])
    taken = " ".join(drafter.warm_start(target.parts))
    states = torch.randn(5, 32)
    assert torch.allclose(drafter.norm(states), target.parts.norm(states), atol=1e-4)
    assert torch.allclose(drafter.fuse(torch.stack([states] * 3, 1)), states)
    assert ("q_proj" in taken) == (family in ("llama", "gemma", "gemma2", "mistral"))
    block = target.model.model.layers[-1]
    assert torch.allclose(drafter.midlayer.hidden_norm(states), block.input_layernorm(states), atol=1e-4)
    before_mlp = getattr(block, "pre_feedforward_layernorm", None) or block.post_attention_layernorm
    assert torch.allclose(drafter.midlayer.post_attention_layernorm(states), before_mlp(states), atol=1e-4)


def test_flex_equals_dense():
    visible = torch.tensor([[[True, False, False], [True, True, False], [False, False, True]]])
    query, keys, values = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 3, 16), torch.randn(1, 2, 3, 16)
    chain = [(torch.randn(1, 2, 3, 16), torch.randn(1, 2, 3, 16)) for _ in range(2)]
    dense = dense_chain(query, (keys, values), chain, visible)
    flex = flex_chain(query, (keys, values), chain, chain_block_mask(visible, 2), compiled=False)
    assert torch.allclose(dense, flex, atol=1e-5)


def test_chain_attention_by_hand():
    # One head of width 1, equal scores: the output is the mean of the visible values.
    query, zero = torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 2, 1)
    values, own = torch.tensor([[[[1.0], [3.0]]]]), torch.tensor([[[[5.0], [7.0]]]])
    visible = torch.tensor([[[True, False], [True, True]]])
    made = dense_chain(query, (zero, values), [(zero, own)], visible)
    assert made[0, 0, :, 0].tolist() == pytest.approx([(1 + 5) / 2, (1 + 3 + 7) / 3])


def test_thinning_keeps_whole_prefixes_and_changes_no_kept_slot():
    target = tiny_target("llama")
    torch.manual_seed(0)
    whole = Eagle3(target.parts, None, num_slots=3, layers=[0, 2, 3])
    thin = Eagle3(target.parts, None, num_slots=3, layers=[0, 2, 3], keep=0.5)
    thin.load_state_dict(whole.state_dict())
    batch = checks.train_batch(target, whole)
    full, some = whole.slots(batch), thin.slots(batch)
    assert not (some.mask & ~full.mask).any()
    assert some.mask.sum() < full.mask.sum()
    assert torch.equal(some.mask, some.mask.cummin(-1).values), "a kept slot needs every slot before it"
    assert torch.allclose(some.hidden[some.mask], full.hidden[some.mask], atol=1e-5)
    first = some.mask.clone()
    batch.seed = 7
    assert not torch.equal(thin.slots(batch).mask, first), "another step must draw other chains"


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"num_slots": 0}, "num_slots"),
        ({"layers": [3, 1]}, "ascending"),
        ({"layers": [0, 9]}, "0..4"),
        ({"head": "mine"}, "own"),
        ({"keep": 0.0}, "keep"),
        ({"switches": {"norm": True}}, "norm"),
        ({"layer": {"hidden_size": 64}}, "hidden_size"),
        ({"layer": {"width": 64}}, "width"),
    ],
)
def test_bad_settings_are_refused(model, words):
    target = tiny_target("llama")
    with pytest.raises(ValueError, match=words):
        Eagle3(target.parts, None, **({"num_slots": 3, "layers": [0, 2, 3]} | model))
