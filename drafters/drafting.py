"""What drafters share when they draft: choosing a token with its exact distribution, and a state's caches."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from drafters.branches import Branches
from drafters.contract import Proposal
from drafters.sampling import DRAFT_STREAM, Sampling, counter_uniform, draw
from drafters.vocabulary import DraftVocabulary

_PEAKS: ContextVar[list[Tensor] | None] = ContextVar("peaks", default=None)


@contextmanager
def peaks() -> Iterator[list[Tensor]]:
    """Note q_max of every `choose` inside: the largest probability [...] of the distribution it drew from, or, when
    greedy, of the softmax of its logits. It does not depend on the token that was drawn. What it costs is paid by those
    who ask."""
    found: list[Tensor] = []
    token = _PEAKS.set(found)
    try:
        yield found
    finally:
        _PEAKS.reset(token)


def slot_peaks(found: list[Tensor], tokens: Tensor) -> Tensor | None:
    """What `peaks` noted during a proposal of tokens [R, K], by slot [R, K]; None when the drafter did not choose every
    slot once by `choose`."""
    if len(found) == 1 and found[0].shape == tokens.shape:
        return found[0]
    if len(found) == tokens.shape[1] and all(one.shape == tokens.shape[:1] for one in found):
        return torch.stack(found, 1)
    return None


def choose(
    logits: Tensor,
    vocabulary: DraftVocabulary,
    sampling: Sampling,
    seeds: Tensor,
    positions: Tensor,
    stream: int = DRAFT_STREAM,
) -> tuple[Tensor, Tensor | None]:
    """Draft tokens of logits [..., W] over the draft vocabulary, for absolute positions and request seeds [...].

    Returns target ids [...] and the distribution over the target's vocabulary [..., V] they were drawn from; None when
    greedy, where the choice is deterministic. stream: of the random numbers.
    """
    ids = vocabulary.ids_on(logits.device)
    if (noted := _PEAKS.get()) is not None:
        noted.append((logits.float().softmax(-1) if sampling.greedy else sampling.probs(logits)).amax(-1))
    if sampling.greedy:
        return ids[logits.argmax(-1)], None
    narrow = sampling.probs(logits)
    wide = narrow
    if not vocabulary.is_full:
        wide = narrow.new_zeros(*narrow.shape[:-1], vocabulary.target_size)
        wide[..., ids] = narrow
    return ids[draw(narrow, counter_uniform(seeds, positions, stream))], wide


def at_once(
    logits: Tensor, vocabulary: DraftVocabulary, sampling: Sampling, seeds: Tensor, anchors: Tensor
) -> Proposal:
    """A chain whose slots do not read drafted tokens, by their logits [R, K, W]. anchors [R]: their positions."""
    places = anchors[:, None] + torch.arange(1, logits.shape[1] + 1, device=anchors.device)
    return Proposal(*choose(logits, vocabulary, sampling, seeds[:, None].expand_as(places), places))


def along(
    branches: Branches, num_slots: int, vocabulary: DraftVocabulary, sampling: Sampling, seeds: Tensor, anchors: Tensor
) -> Proposal:
    """A chain of num_slots tokens: one branch, each token chosen after the one before. anchors [R]: their positions."""
    logits, parent = branches.first, torch.zeros_like(anchors)[:, None]
    tokens: list[Tensor] = []
    probs: list[Tensor] = []
    for k in range(1, num_slots + 1):
        token, chosen = choose(logits, vocabulary, sampling, seeds, anchors + k)
        tokens.append(token)
        if chosen is not None:
            probs.append(chosen)
        if k < num_slots:
            logits = branches.read(token[:, None], parent)[:, 0]
    return Proposal(torch.stack(tokens, 1), torch.stack(probs, 1) if probs else None)


def write_at(cache: Tensor, columns: Tensor, states: Tensor) -> None:
    """Put states [R, G, N, d] at columns [R, N] of a cache [R, G, C, d]."""
    cache.scatter_(2, columns[:, None, :, None].expand_as(states), states)


def take_rows(values: Tensor, rows: Tensor) -> Tensor:
    """values [B, T, D] at rows [B, N] -> [B, N, D]."""
    return values.gather(1, rows[..., None].expand(-1, -1, values.shape[-1]))
