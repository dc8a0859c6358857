"""Sampling settings shared by target and drafter, and random numbers that depend on (seed, position) alone.

Lossless verification needs p and q after the *same* transform, and a request must draw the same tokens alone and in
any batch, so randomness is a counter, not a stream.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# What a random number is for: no two purposes share one.
DRAFT_STREAM, ACCEPT_STREAM, RESIDUAL_STREAM, TRAIN_STREAM, ANSWER_STREAM, ANCHOR_STREAM = 1, 2, 3, 4, 5, 6
FORCING_STREAM, ROUND_STREAM = 7, 8
# What the target's own sampler draws the token at a position from. A drafter that reads it is verified by the same
# noise, never by rejection: there the corrected token would be drawn from a number that the proposal depends on.
NOISE_STREAM = RESIDUAL_STREAM


@dataclass(frozen=True)
class Sampling:
    """temperature >= 0 (0 = greedy); top_k >= 1 or None; top_p in (0, 1] or None. ValueError otherwise."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature must be >= 0, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be >= 1 or null, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1] or null, got {self.top_p}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def probs(self, logits: Tensor) -> Tensor:
        """Next-token distribution after temperature, then top-k, then top-p. logits [..., V] -> float32 [..., V],
        sums to 1.

        Greedy gives a one-hot at the argmax. Ties at the top-k and top-p edges are all kept, so the result does not
        depend on sort order.
        """
        if self.greedy:
            return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        scaled = logits.float() / self.temperature
        if self.top_k is not None and self.top_k < scaled.shape[-1]:
            edge = scaled.topk(self.top_k, dim=-1).values[..., -1:]
            scaled = scaled.masked_fill(scaled < edge, -torch.inf)
        probs = scaled.softmax(-1)
        if self.top_p is not None and self.top_p < 1:
            ranked = probs.sort(-1, descending=True).values
            before = ranked.cumsum(-1) - ranked
            edge = ranked.masked_fill(before >= self.top_p, torch.inf).amin(-1, keepdim=True)
            probs = probs.masked_fill(probs < edge, 0.0)
            probs = probs / probs.sum(-1, keepdim=True)
        return probs


def counter_uniform(seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
    """Uniform numbers in [0, 1) that depend on (seed, position, stream) only (splitmix64). int64 [...] -> float64
    [...].

    Sync-free and equal on every device and in every batch composition.
    """

    def wrap(value: int) -> int:
        return value - (1 << 64) if value >= 1 << 63 else value

    def shift(x: Tensor, bits: int) -> Tensor:
        return (x >> bits) & ((1 << (64 - bits)) - 1)

    def mix(x: Tensor) -> Tensor:
        x = (x ^ shift(x, 30)) * wrap(0xBF58476D1CE4E5B9)
        x = (x ^ shift(x, 27)) * wrap(0x94D049BB133111EB)
        return x ^ shift(x, 31)

    golden = wrap(0x9E3779B97F4A7C15)
    state = mix(seeds * golden + stream)
    state = mix(state ^ (positions * golden + golden))
    return shift(state, 11).double() * 2.0**-53


def round_seeds(seeds: Tensor, anchors: Tensor) -> Tensor:
    """Seeds [R] of one round's own, of requests' seeds [R] and their anchors' positions [R].

    Where a round's outcome depends on numbers of positions behind its end (block verification), the next round must not
    read those numbers again: they are no longer uniform, given the outcome.
    """
    return (counter_uniform(seeds, anchors, ROUND_STREAM) * 2.0**53).long()


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse-CDF sample in token-id order. probs [..., V] (any non-negative weights), uniforms [...] -> int64 [...].

    Never returns a token of probability zero: the first index whose cumulative weight exceeds u * total.
    """
    cumulative = probs.double().cumsum(-1)
    threshold = uniforms.double().unsqueeze(-1) * cumulative[..., -1:]
    return (cumulative <= threshold).sum(-1).clamp_max(probs.shape[-1] - 1)
