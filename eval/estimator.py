"""Confidences for heads that give none: a_k = sigmoid(w * logit(q_max) + b_k), fitted on which drafts were accepted.

q_max is the largest probability of the distribution that slot k was drawn from. Only verified slots count: the accepted
prefix and the first rejection. vLLM estimates acceptance in the same form, from w = 0.5 and b = -0.2 on.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

EDGE = 1e-6  # probabilities are kept this far from 0 and 1, where a logit is infinite
WEIGHT, BIAS = 0.5, -0.2
# Strength of a pull towards the start, in events: decides where events do not (a slot never met, all accepted).
PULL = 0.05
DAMPING, STEPS, TOLERANCE = 1e-3, 100, 1e-8


@dataclass(frozen=True)
class Estimator:
    """weight, biases [K]: see above. Call it with peaks [..., K'], K' <= K, for confidences of the same shape."""

    weight: float
    biases: list[float]

    def __call__(self, peaks: Tensor) -> Tensor:
        if peaks.shape[-1] > len(self.biases):
            raise ValueError(f"the estimator was fitted for {len(self.biases)} slots, got {peaks.shape[-1]}")
        biases = _placed(tuple(self.biases), peaks.dtype, peaks.device)[: peaks.shape[-1]]
        return torch.sigmoid(self.weight * torch.logit(peaks, eps=EDGE) + biases)


@dataclass(frozen=True)
class Calibrated:
    """What calibration found for a head. temperatures [K]: sigmoid(logit(c_k) / T_k); slots beyond K keep theirs.
    estimator: of a head without confidences, else None. Call it with q_max where there is an estimator."""

    temperatures: list[float]
    estimator: Estimator | None = None

    def __call__(self, peaks: Tensor) -> Tensor:
        if self.estimator is None:
            raise ValueError("this head was calibrated by its own confidences: q_max says nothing of them")
        return self.scaled(self.estimator(peaks))

    def scaled(self, confidences: Tensor) -> Tensor:
        """Confidences [..., K'] made honest, of the same shape."""
        slots = confidences.shape[-1]
        chosen = (*self.temperatures[:slots], *[1.0] * (slots - len(self.temperatures)))
        return torch.sigmoid(
            torch.logit(confidences, eps=EDGE) / _placed(chosen, confidences.dtype, confidences.device)
        )


@cache
def _placed(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers on a device, sent there once: sending them in every round would wait. Never given up: CUDA graphs read
    them where they lay when they were captured."""
    return torch.tensor(values, dtype=dtype, device=device)


def fit_estimator(peaks: Tensor, accepted: Tensor, proposed: Tensor) -> Estimator:
    """Maximum likelihood by damped Newton steps, halved while they do not help.

    peaks [N, K] of N rounds; accepted [N]: drafts kept; proposed [N]: slots that were scored. A slot that was never
    verified keeps the bias it started with.
    """
    num_slots = peaks.shape[1]
    slots = torch.arange(1, num_slots + 1)
    counts = (accepted[:, None] >= slots - 1) & (proposed[:, None] >= slots)
    rows, columns = counts.nonzero(as_tuple=True)
    x = torch.logit(peaks.double(), eps=EDGE)[rows, columns]
    y = (accepted[:, None] >= slots)[rows, columns].double()
    start = torch.tensor([WEIGHT, *[BIAS] * num_slots], dtype=torch.float64)
    found, cost = start.clone(), _cost(start, start, x, y, columns)
    for _ in range(STEPS):
        gradient, hessian = _derivatives(found, start, x, y, columns)
        step = torch.linalg.solve(hessian + DAMPING * torch.eye(len(found), dtype=torch.float64), gradient)
        size, best = 1.0, cost
        while size > TOLERANCE:
            best = _cost(found - size * step, start, x, y, columns)
            if best <= cost:
                break
            size /= 2
        if best > cost:
            break
        found, gained, cost = found - size * step, cost - best, best
        if gained < TOLERANCE:
            break
    return Estimator(float(found[0]), found[1:].tolist())


def _cost(theta: Tensor, start: Tensor, x: Tensor, y: Tensor, slot: Tensor) -> float:
    """Negative log-likelihood of the accept bits, and the pull."""
    logits = theta[0] * x + theta[1:][slot]
    fit = torch.nn.functional.binary_cross_entropy_with_logits(logits, y, reduction="sum")
    return float(fit + PULL / 2 * (theta - start).square().sum())


def _derivatives(theta: Tensor, start: Tensor, x: Tensor, y: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient [K+1] and Hessian [K+1, K+1] of `_cost`; the biases' part of the Hessian is diagonal."""
    chance = torch.sigmoid(theta[0] * x + theta[1:][slot])
    error, curve = chance - y, chance * (1 - chance)
    size = len(theta)

    def by_slot(values: Tensor) -> Tensor:
        return torch.zeros(size - 1, dtype=torch.float64).index_add_(0, slot, values)

    gradient = torch.cat([(error * x).sum()[None], by_slot(error)]) + PULL * (theta - start)
    hessian = torch.diag(torch.cat([(curve * x * x).sum()[None], by_slot(curve)]) + PULL)
    hessian[0, 1:] = hessian[1:, 0] = by_slot(curve * x)
    return gradient, hessian
