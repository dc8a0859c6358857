"""Muon and the schedules."""

import math

import pytest
import torch
from torch import nn

from training.optimizers import (
    Muon,
    OptimizerSettings,
    build_optimizer,
    iterate_gram,
    iterate_plain,
    orthogonalise,
    rate,
)


def test_orthogonalise_brings_singular_values_near_one():
    matrix = torch.randn(12, 20, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrix))
    assert values.min() > 0.6
    assert values.max() < 1.3
    assert orthogonalise(matrix.T).shape == (20, 12)


@pytest.mark.parametrize("decay", [0.0, 6.0])
def test_products_of_the_gram_matrix_equal_the_plain_iteration(decay):
    """Also for a spectrum that falls over six decades, as gradients' do."""
    generator = torch.Generator().manual_seed(0)
    left, _ = torch.linalg.qr(torch.randn(16, 16, generator=generator))
    right, _ = torch.linalg.qr(torch.randn(64, 16, generator=generator))
    matrix = left * torch.logspace(0, -decay, 16) @ right.T
    matrix = matrix / matrix.norm()
    assert torch.allclose(iterate_gram(matrix, 5), iterate_plain(matrix, 5), atol=2e-3)
    assert torch.allclose(iterate_gram(matrix.double(), 5), iterate_plain(matrix.double(), 5), atol=1e-9)
    assert torch.equal(orthogonalise(matrix), iterate_gram(matrix / (matrix.norm() + 1e-7), 5))


def test_adam_group_equals_torch():
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(5, generator=generator)
    mine, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    ours = Muon([{"params": [mine], "kind": "adamw", "lr": 0.01, "weight_decay": 0.1}], betas=(0.9, 0.95))
    reference = torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    for _ in range(5):
        gradient = torch.randn(5, generator=generator)
        mine.grad, theirs.grad = gradient.clone(), gradient.clone()
        ours.step()
        reference.step()
    assert torch.allclose(mine, theirs, atol=1e-6)


def test_heads_norms_and_embeddings_stay_with_adam():
    named = {
        "fc.weight": nn.Parameter(torch.zeros(2, 2)),
        "lm_head.weight": nn.Parameter(torch.zeros(2, 2)),
        "norm.weight": nn.Parameter(torch.zeros(2)),
    }
    groups = build_optimizer(named.items(), OptimizerSettings(name="muon")).param_groups
    assert [(g["kind"], len(g["params"])) for g in groups] == [("muon", 1), ("adamw", 2)]


def test_schedules_by_hand():
    constant = rate(OptimizerSettings(warmup=0.2, schedule="constant"), 10)
    assert [constant(s) for s in (0, 1, 2, 9)] == [0.5, 1.0, 1.0, 1.0]
    cosine = rate(OptimizerSettings(warmup=0.0, schedule="cosine"), 11)
    assert cosine(0) == 1.0
    assert cosine(6) == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.5)))
    wsd = rate(OptimizerSettings(warmup=0.0, schedule="wsd", decay=0.5, final=0.1), 11)
    assert wsd(6) == pytest.approx(1.0)
    assert wsd(11) == pytest.approx(0.1)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="sgd"):
        OptimizerSettings(name="sgd")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="warmup"):
        OptimizerSettings(warmup=2.0)


def test_tables_of_tokens_and_single_rows_stay_with_adam():
    named = {
        "selector.predecessor_codebook": nn.Parameter(torch.zeros(50, 4)),
        "mask_hidden": nn.Parameter(torch.zeros(1, 6)),
        "layers.0.mlp.up_proj.weight": nn.Parameter(torch.zeros(3, 4)),
    }
    matrices, rest = build_optimizer(named.items(), OptimizerSettings(name="muon")).param_groups
    assert [p.shape for p in matrices["params"]] == [(3, 4)]
    assert [p.shape for p in rest["params"]] == [(50, 4), (1, 6)]
