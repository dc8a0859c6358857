"""A toy target and drafter whose next token depends on the last one alone: tables p, q [V, V], float64, and rounds of
drafting on them until a text is long enough, so that what one round leaves to the next is seen."""

from collections.abc import Callable

import torch
from torch import Tensor

V, K, LENGTH, ANCHOR = 3, 3, 4, 10

# (p, q [V, V], anchor tokens [R], seeds [R], anchor positions [R]) -> accepted [R], tokens [R, n] with -1 behind
Round = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def table(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(V, V, generator=generator, dtype=torch.float64) * 1.5).softmax(-1)


def texts(one_round: Round, rows: int, p: Tensor, q: Tensor) -> tuple[Tensor, float]:
    """First LENGTH tokens [rows, LENGTH] after token 0, and the mean of accepted drafts a round."""
    seeds, out = torch.arange(rows), torch.full((rows, LENGTH + 8), -1)
    length, anchor, kept, rounds = torch.zeros(rows, dtype=torch.long), torch.zeros(rows, dtype=torch.long), 0, 0
    while int(length.min()) < LENGTH:
        accepted, tokens = one_round(p, q, anchor, seeds, ANCHOR + length)
        for n in range(tokens.shape[1]):
            place, taken = (length + n).clamp_max(LENGTH + 7)[:, None], n <= accepted
            out.scatter_(1, place, torch.where(taken[:, None], tokens[:, n, None], out.gather(1, place)))
        anchor = tokens.gather(1, accepted[:, None])[:, 0]
        length = (length + accepted + 1).clamp_max(LENGTH)  # those that are done draft on, unread
        kept, rounds = kept + int(accepted.sum()), rounds + rows
    return out[:, :LENGTH], kept / rounds


def chi_square(found: Tensor, p: Tensor) -> float:
    """p-value of texts [rows, LENGTH] against the target's own distribution over them."""
    rows, joint = len(found), torch.ones(V**LENGTH, dtype=torch.float64)
    for code in range(V**LENGTH):
        last = 0
        for n in range(LENGTH):
            token = code // V ** (LENGTH - 1 - n) % V
            joint[code], last = joint[code] * p[last, token], token
    code = (found * V ** torch.arange(LENGTH - 1, -1, -1)).sum(1)
    got, want = torch.bincount(code, minlength=V**LENGTH).double(), joint * rows
    small = want < 5
    got = torch.cat([got[~small], got[small].sum()[None]])
    want = torch.cat([want[~small], want[small].sum()[None]])
    got, want = got[want > 0], want[want > 0]
    statistic = ((got - want) ** 2 / want).sum()
    return float(torch.special.gammaincc(torch.tensor((len(want) - 1) / 2).double(), statistic / 2))
