"""A start for block drafters: the first layer carries the newest feature into the block's rows.

A block's rows begin as embeddings, and all that the target knows reaches them through attention. Finding it, above all
the feature right before the anchor, is what random or copied weights learn last. So the first layer starts as a copier:

    queries   of every block row are one direction u; keys of features are u, keys of block rows are -u
    rotary    turns u . u into sum cos(theta_i distance) over the fast pairs: largest for the newest feature
    values    hold the features' main directions, and the output projection writes the feature back

The layers after it start silent, the last one as the target's last block: slot 1 begins as that block reading the
newest captured feature, which is where EAGLE-3 heads begin. Solved from a batch of features by ridge regression:
features of a language model share a large mean, so one linear function is positive on them and negative on embeddings.
"""

import torch
from torch import Tensor

from drafters.decoder import HeadNormAttention

FAST = 0.03  # radians a position: rotary pairs that tell neighbours apart
SHARPNESS = 24.0  # attention logit of the newest feature, before its neighbours' share is taken off
RIDGE = 1e-2


def ridge(inputs: Tensor, wanted: Tensor) -> Tensor:
    """W [D, ...] with inputs [N, D] @ W close to wanted [N, ...], regularised by the inputs' own size."""
    gram = inputs.T @ inputs
    size = RIDGE * gram.diagonal().mean()
    return torch.linalg.solve(gram + size * torch.eye(len(gram), device=gram.device), inputs.T @ wanted)


def recent(frequencies: Tensor) -> Tensor:
    """A direction u [d] of root mean square 1 in the fast rotary pairs; frequencies [d / 2] radians a position."""
    fast = (frequencies > FAST).float()
    if not fast.any():
        fast = (frequencies >= frequencies.max()).float()
    direction = torch.cat([fast, torch.zeros_like(fast)])
    return direction / direction.pow(2).mean().sqrt()


@torch.no_grad()
def carry_newest(
    attention: HeadNormAttention, frequencies: Tensor, features: Tensor, rows: Tensor, states: Tensor
) -> tuple[float, float]:
    """Make an attention of head norms copy the newest feature.

    features [N, D]: what its key and value projections read of the context; states [N, D]: what to write for each.
    rows [M, D]: what its projections read of block rows. Returns the share of features and rows whose keys stand on
    their side, and the share of the states' squares that the values let through.
    """
    direction = recent(frequencies)
    width, heads = len(direction), attention.q_proj.out_features // len(direction)
    groups = attention.k_proj.out_features // width
    share = (len(features) / len(rows)) ** 0.5
    both = torch.cat([features, share * rows])
    sides = torch.cat([features.new_ones(len(features)), features.new_full((len(rows),), -share)])
    key = ridge(both, sides)
    attention.k_proj.weight.copy_(torch.outer(direction.repeat(groups), key))
    attention.q_proj.weight.copy_(torch.outer(direction.repeat(heads), ridge(rows, rows.new_ones(len(rows)))))
    for norm in (attention.q_norm, attention.k_norm):
        norm.weight.fill_((SHARPNESS / width**0.5) ** 0.5)
    main = torch.linalg.eigh(features.T @ features)[1][:, -groups * width :].T
    back = ridge(features @ main.T, states)
    attention.v_proj.weight[: len(main)].copy_(main)
    attention.v_proj.weight[len(main) :].zero_()
    # Query heads of a group read one value: each writes an equal part of it back.
    whole = back.new_zeros(groups * width, back.shape[1])
    whole[: len(back)] = back
    written = whole.unflatten(0, (groups, width)).repeat_interleave(heads // groups, 0).flatten(0, 1)
    attention.o_proj.weight.copy_(written.T / (heads // groups))
    apart = ((both @ key) * sides > 0).float().mean()
    return float(apart), float(1 - (features @ main.T @ back - states).pow(2).sum() / states.pow(2).sum())
