"""A scheduler inside the decoding loop: how deep to draft, which prefixes to verify, what came of it.

Every request verifies its own prefix: at its end the target's own token is drawn as after an accepted proposal, from
the noise of that position, so cutting changes no distribution as long as the cut does not look ahead (eval.scheduler).

What is looked at: confidences of a slot read the drafted tokens before it. Confidences of older rounds read drafts at
places that are drafted again later, so no place is drafted twice from the same random number: the drafter's seeds
change with the round (drafters.sampling.round_seeds).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafters.contract import Proposal
from eval.hardware import Cost
from eval.hardware_measured import measured_times
from eval.scheduler import ENDED, NAMES, Load, Scheduler, build
from eval.verification import Verdict

VERIFIED_BY = ("rejection", "same_noise", "same_noise_ranked")


def cut_short(verdict: Verdict, limits: Tensor, own: Tensor) -> Verdict:
    """The verdict when no more than limits [R] drafts were verified. own [R]: the target's own token after that many.

    A prefix that ends before its limit ended for reasons that lie before it, and stays as it is.
    """
    accepted = torch.minimum(verdict.accepted, limits)
    last = torch.where(verdict.accepted < limits, _at(verdict.tokens, accepted), own)
    steps = torch.arange(verdict.tokens.shape[1], device=limits.device)
    kept = torch.where(steps < accepted[:, None], verdict.tokens, -1)
    return Verdict(accepted, torch.where(steps == accepted[:, None], last[:, None], kept))


def _at(values: Tensor, index: Tensor) -> Tensor:
    return values.gather(1, index[:, None])[:, 0]


class Scheduled:
    """One group's view of a scheduler. num_slots: most slots that may be drafted."""

    def __init__(self, scheduler: Scheduler, num_slots: int) -> None:
        self.scheduler, self.num_slots = scheduler, num_slots
        self.load = Load(0, 0.0)

    @property
    def reads_confidences(self) -> bool:
        return self.scheduler.reads_confidences

    def check(self, verification: str, settings: Any) -> None:
        """ValueError for a verification that cannot be cut short at each request's own length."""
        if verification not in VERIFIED_BY or settings.lossy is not None:
            named = settings.lossy.rule if settings.lossy is not None else verification
            raise ValueError(f"a schedule cuts {', '.join(VERIFIED_BY)} verification, got {named}")

    def depth(self, held: Sequence[int], alive: Sequence[int], known: Mapping[int, int]) -> int:
        """Slots to draft in the next round, from what the host has heard."""
        self.load = Load(len(alive), sum(known[row] for row in alive) / max(len(alive), 1))
        return max(0, min(self.scheduler.depth(self.load), self.num_slots))

    def limits(self, proposal: Proposal, alive: Tensor) -> Tensor:
        """Slots to verify [R]: of the proposal's confidences, else of its q_max; those that have ended are marked.

        ValueError when the scheduler reads confidences and the drafter gives neither.
        """
        rows, slots = proposal.tokens.shape
        if slots == 0 or not self.reads_confidences:
            return torch.full_like(alive, slots, dtype=torch.int64)
        sure = proposal.confidences if proposal.confidences is not None else proposal.peaks
        if sure is None:
            raise ValueError("this schedule reads confidences, and the drafter gives neither confidences nor q_max")
        sure = torch.where(alive.to(sure.device)[:, None], sure, ENDED)
        return self.scheduler.decide(sure, self.load).to(alive.device)


@dataclass(frozen=True)
class ScheduleSettings:
    """A file of conf/schedule. name: of eval.scheduler.NAMES, static-K, or null for no schedule. least: threshold's
    least survival. adaptive: whether prefix chooses its depth, too. fall_back: plain rounds where drafting does not
    pay. steps: measured step times (`headstart bench profile`) in place of the hardware's, be those a roofline's or a
    table's. ValueError on an unknown name."""

    name: str | None = None
    least: float = 0.3
    adaptive: bool = True
    fall_back: bool = False
    steps: str | None = None

    def __post_init__(self) -> None:
        if self.name is not None and self.name.partition("-")[0] not in NAMES:
            raise ValueError(f"schedule.name must be null, {', '.join(NAMES)} or static-K, got {self.name!r}")

    @property
    def needs_cost(self) -> bool:
        """Whether the scheduler asks a cost model."""
        return self.name is not None and (self.fall_back or self.name.startswith(("prefix", "goodput")))

    def measured(self) -> Cost | None:
        """The measured step times, if any were named. ValueError for a file without the drafter's."""
        return None if self.steps is None else measured_times(self.steps)

    def make(self, num_slots: int, cost: Cost) -> Scheduler:
        """A scheduler that has learnt nothing. ValueError without a name."""
        if self.name is None:
            raise ValueError("no schedule was named")
        return build(self.name, cost, num_slots, self.fall_back, self.least, self.adaptive)


class NoCost:
    """Stands in where no scheduler asks for costs."""

    def target_seconds(self, rows: float, tokens: float, context: float) -> float:
        raise ValueError("this schedule needs a cost model")

    def draft_seconds(self, rows: float, num_slots: int, context: float) -> float:
        raise ValueError("this schedule needs a cost model")

    def rest_seconds(self, rows: float, num_slots: int) -> float:
        raise ValueError("this schedule needs a cost model")
