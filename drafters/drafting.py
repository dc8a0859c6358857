"""What drafters share when they draft: choosing a token with its exact distribution, and a state's caches."""

from torch import Tensor

from drafters.sampling import DRAFT_STREAM, Sampling, counter_uniform, draw
from drafters.vocabulary import DraftVocabulary


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
    if sampling.greedy:
        return ids[logits.argmax(-1)], None
    narrow = sampling.probs(logits)
    wide = narrow
    if not vocabulary.is_full:
        wide = narrow.new_zeros(*narrow.shape[:-1], vocabulary.target_size)
        wide[..., ids] = narrow
    return ids[draw(narrow, counter_uniform(seeds, positions, stream))], wide


def write_at(cache: Tensor, columns: Tensor, states: Tensor) -> None:
    """Put states [R, G, N, d] at columns [R, N] of a cache [R, G, C, d]."""
    cache.scatter_(2, columns[:, None, :, None].expand_as(states), states)


def take_rows(values: Tensor, rows: Tensor) -> Tensor:
    """values [B, T, D] at rows [B, N] -> [B, N, D]."""
    return values.gather(1, rows[..., None].expand(-1, -1, values.shape[-1]))
