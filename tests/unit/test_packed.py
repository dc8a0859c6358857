"""Packed linear layers give the plain ones' numbers and leave the model's parts as they were."""

import pytest
import torch
from torch import nn

from data import packed
from data.packed import PackedLinear, pack_linears
from tests.doubles import tiny_target


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(3,), (1, 3), (2, 5, 3), (0, 3)])
def test_equals_the_plain_product(bias, shape):
    torch.manual_seed(0)
    linear = nn.Linear(3, 7, bias=bias).requires_grad_(False)
    states = torch.randn(*shape)
    assert torch.allclose(PackedLinear(linear.weight, linear.bias)(states), linear(states), atol=1e-6)


def test_gradients_and_other_dtypes_go_to_the_plain_product():
    linear = nn.Linear(3, 7).requires_grad_(False)
    states = torch.randn(2, 3, requires_grad=True)
    PackedLinear(linear.weight, linear.bias)(states).sum().backward()
    assert torch.allclose(states.grad, linear.weight.sum(0).expand(2, 3), atol=1e-6)


def test_a_target_is_packed_and_keeps_its_weights():
    target = tiny_target("llama")
    layer = target.model.model.layers[0].mlp.up_proj
    assert isinstance(layer.forward, PackedLinear)
    assert type(layer) is nn.Linear
    assert layer.weight.data_ptr() == layer.forward.weight.data_ptr()


def test_a_trainable_model_is_refused():
    with pytest.raises(ValueError, match="only a frozen model"):
        pack_linears(nn.Sequential(nn.Linear(3, 3)))


def test_a_large_model_is_left_alone(monkeypatch):
    monkeypatch.setattr(packed, "PACK_AT_MOST", 8)
    model = nn.Sequential(nn.Linear(3, 3)).requires_grad_(False)
    assert pack_linears(model) == 0
    assert "forward" not in vars(model[0])
