"""What the target says of tokens that it never accepted: branches off a known text, read from one cache.

text      t0 t1 t2 t3 t4 t5
anchor 2        |
block           t2 d1 d2        last hidden states after t2, d1 and d2 predict slots 1, 2 and 3
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from data.structure import PLAIN_ATTENTION, layer_kinds
from data.target import Features, Target
from eval.cache import RowCache

ROWS, CACHED = 16, 1 << 14  # branches read at once: each holds a copy of the text's cache, so fewer of a long text


def check_branches(target: Target, setting: str) -> None:
    """ValueError, naming the setting that asks for it, for a target that cannot read branches."""
    if foreign := sorted(layer_kinds(target.model) - set(PLAIN_ATTENTION)):
        raise ValueError(
            f"{setting} makes the target read drafts off one cache of a text, but what its layers of "
            f"{', '.join(foreign)} keep cannot be taken back"
        )


@torch.no_grad()
def read_branches(
    target: Target, text: Tensor, anchors: Sequence[int], blocks: Tensor, layers: Sequence[int] = (), rows: int = ROWS
) -> Features:
    """Features of every branch of one text, each from its anchor's own token on.

    text [T] int64. anchors: N positions in it, each at least 1. blocks [N, n] int64: the anchor's token and what
    follows it in the branch. layers: captured. rows: at most so many branches at once, memory only. Returns aux [N, n,
    L, D] and last [N, n, D]. ValueError for a target without a plain KV cache.
    """
    device = target.device
    text, blocks = text.to(device), blocks.to(device)
    longest, steps = max(anchors), torch.arange(blocks.shape[1], device=device)
    cache = RowCache(target.model, torch.ones(1, longest, dtype=torch.int64, device=device))
    rows, found = max(1, min(rows, CACHED // longest)), []
    with torch.autocast(device.type, enabled=False):  # training may run the drafter in another precision
        target.forward(text[None, :longest], (), cache=cache.cache)
        for start in range(0, len(anchors), rows):
            chosen = list(anchors[start : start + rows])
            branch = cache.branches([0] * len(chosen), chosen)
            positions = torch.tensor(chosen, device=device)[:, None] + steps
            block, mask = blocks[start : start + rows], branch.mask(blocks.shape[1])
            found.append(target.forward(block, layers, mask, positions, branch.cache))
    return Features(torch.cat([one.aux for one in found]), torch.cat([one.last for one in found]))
