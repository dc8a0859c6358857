"""Do confidences mean what they say? Reliability, calibration error, AUC, Brier score, and what makes them honest.

A confidence c_k estimates that slot k is accepted, given that slots 1..k-1 were; its running product c_1 * .. * c_k is
then the chance that the whole prefix survives, which is what a scheduler cuts proposals by. Sequential temperature
scaling (arXiv 2607.05147) gives each slot a temperature T_k, left to right: sigmoid(logit(c_k) / T_k) makes the
calibration error of the running product least, earlier slots' temperatures fixed. Heads without confidences get an
estimator from q_max first (eval.estimator); both are kept in calibration.json beside the head.

Letters in shapes: N rounds, K slots.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor

from checkpoints.files import read_json, write_json
from drafters.contract import Drafter
from eval.decoder import Generation
from eval.estimator import EDGE, Calibrated, Estimator, fit_estimator

FILE = "calibration.json"
BINS = 15
# T = 0.05 .. 20, the same number of steps on either side of 1.
GRID = tuple(20 ** (step / 80) for step in range(-80, 81))


def expected_calibration_error(confidences: Tensor, happened: Tensor, bins: int = BINS) -> float:
    """Sum over equal-width bins of (share of the events) * |share that happened - mean confidence|; 0 without events.

    confidences [N] in [0, 1]; happened [N], bool. ValueError when a confidence lies outside.
    """
    if confidences.numel() == 0:
        return 0.0
    confidences = confidences.double()
    # (n_b / N) * |mean of happened - mean of confidence| is |sum of the differences| / N.
    gaps = torch.zeros(bins, dtype=torch.float64)
    gaps = gaps.index_add_(0, _places(confidences, bins), happened.double() - confidences)
    return float(gaps.abs().sum()) / confidences.numel()


def reliability(confidences: Tensor, happened: Tensor, bins: int = BINS) -> list[dict[str, float]]:
    """The reliability diagram: {"confidence": mean, "happened": share, "count"} of every equal-width bin that holds
    events, in ascending order. Arguments as in `expected_calibration_error`."""
    confidences = confidences.double()
    place = _places(confidences, bins)
    rows = []
    for index in place.unique().tolist():  # ascending
        own = place == index
        mean, share = float(confidences[own].mean()), float(happened[own].double().mean())
        rows.append({"confidence": mean, "happened": share, "count": int(own.sum())})
    return rows


def auc(confidences: Tensor, happened: Tensor) -> float | None:
    """Chance that an event that happened has a higher confidence than one that did not; ties count one half. Both [N].

    None unless both kinds are there.
    """
    happened = happened.bool()
    yes, no = int(happened.sum()), int((~happened).sum())
    if yes == 0 or no == 0:
        return None
    # Rank sum (Mann and Whitney): equal confidences share the mean of their ranks.
    _, place, counts = confidences.double().unique(sorted=True, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    ranks = (last - (counts.double() - 1) / 2)[place]
    return float((ranks[happened].sum() - yes * (yes + 1) / 2) / (yes * no))


def _places(confidences: Tensor, bins: int) -> Tensor:
    """Which bin [N]; ValueError when a confidence lies outside [0, 1]."""
    if not bool(((confidences >= 0) & (confidences <= 1)).all()):
        low, high = float(confidences.min()), float(confidences.max())
        raise ValueError(f"confidences must lie in [0, 1], got {low:g}..{high:g}")
    return (confidences * bins).long().clamp_max(bins - 1)


def brier(confidences: Tensor, happened: Tensor) -> float:
    """Mean squared difference of confidence and event (0 or 1); 0 without events. Both [N]."""
    if confidences.numel() == 0:
        return 0.0
    return float((happened.double() - confidences.double()).square().mean())


@dataclass(frozen=True)
class Rounds:
    """confidences [N, K] float64. accepted [N]: drafts kept. proposed [N]: slots that were scored (fewer than K where
    an answer ended). answer [N]: which answer a round belongs to."""

    confidences: Tensor
    accepted: Tensor
    proposed: Tensor
    answer: Tensor

    @classmethod
    def of(
        cls, generations: Iterable[Generation], what: Literal["confidences", "peaks"] = "confidences"
    ) -> Self | None:
        """Rounds of drafted answers; None when the drafter gave no confidences. what: peaks takes q_max for them."""
        rows, counts = [], []
        for index, one in enumerate(generations):
            given = getattr(one, what)
            rows += given
            counts += [
                (a, p, index) for a, p, _ in zip(one.accepted, one.proposed, given, strict=False)
            ]  # a drafter that gives none leaves the third list empty
        if not rows:
            return None
        accepted, proposed, answer = torch.tensor(counts).T
        return cls(torch.tensor(rows, dtype=torch.float64), accepted, proposed, answer)

    def __len__(self) -> int:
        return len(self.accepted)

    @property
    def num_slots(self) -> int:
        return self.confidences.shape[1]

    def where(self, chosen: Tensor) -> Self:
        """The rounds that a bool mask [N] chooses."""
        return type(self)(*(values[chosen] for values in (self.confidences, self.accepted, self.proposed, self.answer)))

    def conditional(self) -> tuple[Tensor, Tensor]:
        """(confidence, accepted) of every slot that alpha_k counts: proposed, and slots 1..k-1 accepted. [M], [M]."""
        slots = torch.arange(1, self.num_slots + 1)
        counts = (self.accepted[:, None] >= slots - 1) & (self.proposed[:, None] >= slots)
        return self.confidences[counts], (self.accepted[:, None] >= slots)[counts]

    def prefix(self, slot: int) -> tuple[Tensor, Tensor]:
        """(running product, whole prefix accepted) of slot 1..K in rounds that proposed it. [M], [M]."""
        counts = self.proposed >= slot
        return self.confidences[counts, :slot].prod(-1), self.accepted[counts] >= slot

    def scaled(self, temperatures: Sequence[float]) -> Self:
        """The same rounds with calibrated confidences."""
        return replace(self, confidences=calibrated(self.confidences, temperatures))

    def estimated(self, estimator: Estimator) -> Self:
        """Rounds whose confidences were q_max, with the estimator's instead."""
        return replace(self, confidences=estimator(self.confidences))


@dataclass(frozen=True)
class Quality:
    """How far confidences are from what happened.

    ece, brier, auc, reliability: of single slots, given that the slots before were accepted (auc None when all were, or
    none). ece_prefix [K]: of the running product up to each slot. rounds: how many were looked at.
    """

    ece: float
    brier: float
    ece_prefix: list[float]
    rounds: int
    auc: float | None = None
    reliability: list[dict[str, float]] = field(default_factory=list)

    @classmethod
    def of(cls, rounds: Rounds) -> Self:
        confidence, happened = rounds.conditional()
        prefixes = [expected_calibration_error(*rounds.prefix(k)) for k in range(1, rounds.num_slots + 1)]
        ece, score = expected_calibration_error(confidence, happened), brier(confidence, happened)
        ranking, diagram = auc(confidence, happened), reliability(confidence, happened)
        return cls(ece, score, prefixes, len(rounds), ranking, diagram)


@dataclass(frozen=True)
class Calibration:
    """temperatures [K] and what they do. before, after: on answers that took no part in the fit when `held_out`; a
    single answer serves both. estimator: of a head without confidences, whose `before` takes q_max for them and whose
    temperatures come after the estimator."""

    temperatures: list[float]
    before: Quality
    after: Quality
    held_out: bool
    estimator: Estimator | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def fit_temperatures(rounds: Rounds) -> list[float]:
    """Sequential temperature scaling: one T_k a slot, by a grid of 161 from 0.05 to 20. [K].

    A slot leaves T = 1 only where that error falls by more than three standard errors of the share of rounds that kept
    the prefix: a few hundred rounds cannot tell less, and late slots, which hardly any reach, would run to the grid's
    ends.
    """
    grid = sorted(GRID, key=lambda t: max(t, 1 / t))
    logits = to_logits(rounds.confidences)
    chance = torch.ones(len(rounds), dtype=torch.float64)
    chosen: list[float] = []
    for slot in range(rounds.num_slots):
        scored = rounds.proposed > slot
        happened = rounds.accepted[scored] > slot
        before, own = chance[scored], logits[scored, slot]
        errors = [expected_calibration_error(before * torch.sigmoid(own / t), happened) for t in grid]
        share = (float(happened.sum()) + 1) / (len(happened) + 2)  # never 0 or 1, as the error of few rounds is not 0
        noise = math.sqrt(share * (1 - share) / max(1, len(happened)))
        best = grid[errors.index(min(errors))] if errors[0] - min(errors) > 3 * noise else grid[0]
        chosen.append(best)
        chance = chance * torch.sigmoid(logits[:, slot] / best)
    return chosen


def calibrate(rounds: Rounds, estimate: bool = False) -> Calibration:
    """Fit on every second answer, look at the others: an honest `after`. A lone answer serves both. estimate: the
    rounds hold q_max in place of confidences, and an estimator is fitted first."""
    odd = rounds.answer % 2 == 1
    held_out = bool(odd.any()) and not bool(odd.all())
    fitted, seen = (rounds.where(~odd), rounds.where(odd)) if held_out else (rounds, rounds)
    estimator, better = None, seen
    if estimate:
        estimator = fit_estimator(fitted.confidences, fitted.accepted, fitted.proposed)
        fitted, better = fitted.estimated(estimator), seen.estimated(estimator)
    temperatures = fit_temperatures(fitted)
    return Calibration(temperatures, Quality.of(seen), Quality.of(better.scaled(temperatures)), held_out, estimator)


def calibrate_generations(generations: Iterable[Generation]) -> Calibration | None:
    """Of drafted answers: of the drafter's own confidences, else of q_max; None when neither was recorded."""
    generations = list(generations)
    if (own := Rounds.of(generations)) is not None:
        return calibrate(own)
    noted = Rounds.of(generations, "peaks")
    return None if noted is None else calibrate(noted, estimate=True)


def calibrated(confidences: Tensor, temperatures: Sequence[float]) -> Tensor:
    """sigmoid(logit(c_k) / T_k). confidences [..., K]; ValueError unless there is one temperature a slot."""
    if confidences.shape[-1] != len(temperatures):
        raise ValueError(f"{confidences.shape[-1]} slots need as many temperatures, got {len(temperatures)}")
    return torch.sigmoid(to_logits(confidences) / confidences.new_tensor(list(temperatures)))


def to_logits(confidences: Tensor) -> Tensor:
    """log(c / (1 - c)), finite also at 0 and 1. Any shape."""
    return torch.logit(confidences, eps=EDGE)


def save_calibration(folder: Path, found: Calibration, sampling: dict[str, Any]) -> Path:
    """Write calibration.json beside a head: one entry for each way of sampling, of which this one is replaced.

    sampling: temperature, top_k, top_p of the rounds. Returns the file's path.
    """
    path = Path(folder) / FILE
    entries = read_json(path) if path.exists() else []
    kept = [entry for entry in entries if entry["sampling"] != sampling]
    write_json(path, [*kept, {"sampling": sampling, "bins": BINS, **found.as_dict()}])
    return path


def load_calibrated(folder: Path, sampling: dict[str, Any]) -> Calibrated | None:
    """What was saved beside a head for this way of sampling; None when nothing was."""
    path = Path(folder) / FILE
    for entry in read_json(path) if path.exists() else ():
        if entry["sampling"] == sampling:
            saved = entry.get("estimator")
            return Calibrated(list(entry["temperatures"]), None if saved is None else Estimator(**saved))
    return None


def attach_estimator(drafter: Drafter, folder: Path, sampling: dict[str, Any]) -> bool:
    """Give a head what calibration saved beside it for this way of sampling: its temperatures, and the estimator of one
    without confidences. Proposals then carry calibrated confidences. False when nothing was saved."""
    found = load_calibrated(folder, sampling)
    if found is not None:
        drafter.estimator = found
    return found is not None
