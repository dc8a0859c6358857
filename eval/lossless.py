"""Greedy output with and without a drafter: identical, or parting first at a proven near tie.

Matrix kernels round differently for one token and for K + 1, so the argmax of two nearly equal logits may flip. Such a
place is proven by reading the common text once more with float32 weights: both tokens must lie within what the running
dtype's rounding explains of the largest logit. After it the texts are different texts and are not compared.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from data.target import Target

# Mantissa bits that are stored; a unit in the last place at x is 2 ** (floor(log2 |x|) - bits).
MANTISSA = {torch.bfloat16: 7, torch.float16: 10}
ULPS = 2
FLOAT32_BOUND = 1e-3
ROWS_AT_ONCE = 16384


@dataclass(frozen=True)
class Difference:
    """Where two greedy answers part: prompt id, index of the first differing new token, the two tokens (None: ended).

    gap: how far the worse of the two lies below the largest float32 logit; bound: what rounding explains at its size.
    """

    prompt: str
    position: int
    baseline: int | None
    drafted: int | None
    gap: float
    bound: float

    @property
    def near_tie(self) -> bool:
        return self.gap <= self.bound


def compare(
    target: Target,
    ids: Sequence[str],
    prompts: Sequence[list[int]],
    baseline: Sequence[list[int]],
    drafted: Sequence[list[int]],
) -> list[Difference]:
    """One Difference for each prompt whose two answers (new tokens) part; empty when all are identical."""
    found, dtype = [], target.dtype
    with ExitStack() as held:  # the weights become float32 once, for all that part
        wide = False
        for name, prompt, plain, other in zip(ids, prompts, baseline, drafted, strict=True):
            if plain == other:
                continue
            place = first_difference(plain, other)
            pair = tuple(answer[place] if place < len(answer) else None for answer in (plain, other))
            gap, bound = math.inf, 0.0
            if pair[0] is not None and pair[1] is not None:
                if not wide:
                    held.enter_context(float32_weights(target))
                    wide = True
                gap, bound = margin(target, prompt + plain[:place], (pair[0], pair[1]), dtype)
            found.append(Difference(name, place, pair[0], pair[1], gap, bound))
    return found


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """Index of the first differing entry; the shorter length when one is a prefix of the other."""
    shared = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(shared) if a != b), min(len(one), len(other)))


@torch.no_grad()
def margin(target: Target, text: list[int], pair: tuple[int, int], dtype: torch.dtype) -> tuple[float, float]:
    """(gap, bound) of two tokens after `text`, by a target whose weights are held in float32: see Difference. dtype:
    that the target runs in."""
    last = target.forward(torch.tensor([text], device=target.device), ()).last[0, -1].float()
    parts = target.parts
    last = last.to(parts.head.device)
    pieces = []
    for start in range(0, len(parts.head), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        bias = None if parts.head_bias is None else parts.head_bias[rows].float()
        pieces.append(torch.nn.functional.linear(last, parts.head[rows].float(), bias))
    logits = parts.shape_logits(torch.cat(pieces))
    top = float(logits.max())
    return top - float(logits[list(pair)].min()), rounding_bound(top, dtype)


def rounding_bound(logit: float, dtype: torch.dtype) -> float:
    """Largest gap of two logits of this size that rounding explains: 2 units in the last place; 1e-3 in float32."""
    if dtype not in MANTISSA:
        return FLOAT32_BOUND
    return ULPS * 2.0 ** (math.floor(math.log2(max(abs(logit), 1e-6))) - MANTISSA[dtype])


@contextmanager
def float32_weights(target: Target) -> Iterator[None]:
    """Hold the target's 16-bit weights and buffers in float32 inside, and put the very same tensors back after."""
    held: list[tuple[Tensor, Tensor]] = []
    try:
        for tensor in [*target.model.parameters(), *target.model.buffers()]:
            if tensor.dtype in MANTISSA:
                held.append((tensor, tensor.data))
                tensor.data = tensor.data.float()
        yield
    finally:
        for tensor, data in held:
            tensor.data = data
