"""What the target says of drafted tokens that it never accepted: branches off a known text, read from one cache.

text      t0 t1 t2 t3 t4 t5
anchor 2        |
branch          t2 d1 d2        last hidden states after t2, d1 and d2 predict slots 1, 2 and 3
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from data.target import Target
from eval.cache import RowCache


@torch.no_grad()
def read_branches(target: Target, text: Tensor, anchors: Sequence[int], drafted: Tensor, rows: int = 16) -> Tensor:
    """Read every branch of one text: the anchor and the drafts after it, save the last.

    text [T] int64. anchors: N positions in it, each at least 1. drafted [N, K] int64. rows: branches read at once,
    memory only. Returns last hidden states [N, K, D]; entry k - 1 predicts slot k. ValueError for a target without a
    plain KV cache.
    """
    device = target.device
    text, drafted = text.to(device), drafted.to(device)
    longest, steps = max(anchors), torch.arange(drafted.shape[1], device=device)
    cache = RowCache(target.model, torch.ones(1, longest, dtype=torch.int64, device=device))
    target.forward(text[None, :longest], (), cache=cache.cache)
    found = []
    for start in range(0, len(anchors), rows):
        chosen = list(anchors[start : start + rows])
        branch = cache.branches([0] * len(chosen), chosen)
        first = torch.tensor(chosen, device=device)
        block = torch.cat([text[first][:, None], drafted[start : start + rows, :-1]], 1)
        mask = branch.mask(block.shape[1])
        found.append(target.forward(block, (), mask, first[:, None] + steps, branch.cache).last)
    return torch.cat(found)
