"""When tokens arrive: what a reader of the answer waits for.

A round's tokens arrive together. Two definitions of inter-token latency are in use, and both are reported:

gap    milliseconds from one arrival to the next: what vLLM's clients and counters show. Gaps inside a round, which are
       nothing, are not counted, so a drafter makes gaps longer and fewer
token  a gap divided by the tokens that it brought, once for each of them: what SGLang's client shows. Its mean is
       decoding time / tokens, which is what a drafter lowers

first  milliseconds from a group's start to a request's first token, the reading of all its group's prompts included

Percentiles interpolate linearly between ranks, as NumPy's default does.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from eval.decoder import Generation

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Latency:
    """Milliseconds by percentile ("p50", "p90", "p99"), definitions above. gap_ms and token_ms are None without
    rounds."""

    first_ms: dict[str, float]
    gap_ms: dict[str, float] | None
    token_ms: dict[str, float] | None


def latency(generations: Iterable[Generation]) -> Latency | None:
    """Latency of answers; None when nothing was timed."""
    timed = [one for one in generations if one.arrivals]
    if not timed:
        return None
    gaps: list[float] = []
    tokens: list[float] = []
    for one in timed:
        for before, after, emitted in zip(one.arrivals, one.arrivals[1:], one.emitted, strict=False):
            gaps.append(after - before)
            tokens += [(after - before) / emitted] * emitted
    first = percentiles([one.arrivals[0] for one in timed])
    return Latency(first, percentiles(gaps) if gaps else None, percentiles(tokens) if tokens else None)


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Milliseconds by percentile of at least one value in seconds."""
    values = np.percentile(np.asarray(seconds), PERCENTILES) * 1000
    return {f"p{name}": float(value) for name, value in zip(PERCENTILES, values, strict=True)}
