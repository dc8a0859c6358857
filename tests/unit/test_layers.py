"""Layers that drafters share."""

import pytest
import torch
from transformers import LlamaConfig

from drafters.layers import Rotary

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 100000.0}, YARN])
@pytest.mark.parametrize("move", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.to("cpu")])
def test_a_cast_drafter_keeps_its_rotary_angles(rope, move):
    """A drafter loaded in the target's bf16 must turn position 1000 as it did in training."""
    config = LlamaConfig(hidden_size=64, num_attention_heads=1, head_dim=64, rope_parameters=rope, vocab_size=8)
    holder = torch.nn.ModuleDict({"rotary": Rotary(config)})
    states, positions = torch.ones(1, 1, 2, 64), torch.tensor([[10, 1000]])
    before = holder["rotary"](states, positions)
    move(holder)
    assert torch.equal(holder["rotary"](states, positions), before)
    assert {buffer.dtype for buffer in holder["rotary"].buffers()} == {torch.float32}
