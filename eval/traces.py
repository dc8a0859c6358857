"""What drafting did in a real evaluation, round by round, for the serving simulation to draw from.

A trace is a set of answers; each has rounds with the confidences that the drafter gave and the drafts that verification
kept of all K. Verifying fewer slots keeps min(kept, length): a prefix of what was kept is what would have been kept.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from checkpoints.files import read_json, write_json
from eval.decoder import Generation

FORMAT = "headstart-traces"


@dataclass(frozen=True)
class Traces:
    """kept [N] int64 in 0..K and confidences [N, K] float64 of N rounds; answers [N]: which answer each belongs to,
    ascending from 0. ValueError unless shapes agree."""

    kept: Tensor
    confidences: Tensor
    answers: Tensor

    def __post_init__(self) -> None:
        rounds, slots = self.confidences.shape
        if rounds == 0 or self.kept.shape != (rounds,) or self.answers.shape != (rounds,):
            raise ValueError(f"traces need as many counts and answers as confidences, got {self.confidences.shape}")
        if int(self.kept.min()) < 0 or int(self.kept.max()) > slots:
            raise ValueError(f"accepted drafts must lie in 0..{slots}")

    @property
    def num_slots(self) -> int:
        return self.confidences.shape[1]

    @property
    def alpha(self) -> list[float]:
        """Conditional acceptance by slot; 0 where a slot was never reached."""
        found = []
        for k in range(1, self.num_slots + 1):
            reached = int((self.kept >= k - 1).sum())
            found.append(int((self.kept >= k).sum()) / reached if reached else 0.0)
        return found

    @property
    def tau(self) -> float:
        return 1 + float(self.kept.double().mean())

    def rounds_of(self, answer: int) -> tuple[Tensor, Tensor]:
        """(kept, confidences) of one answer's rounds; answers repeat beyond the last."""
        own = self.answers == answer % (int(self.answers[-1]) + 1)
        return self.kept[own], self.confidences[own]

    @classmethod
    def of(cls, generations: Iterable[Generation], num_slots: int) -> Self:
        """Recorded answers. A round that an answer's end cut counts what verification kept before the cut: leaving it
        out would leave out the rounds that kept most. Rounds with fewer than num_slots drafts are left out.

        Where the drafter gave no confidences, each slot's own acceptance over all rounds stands in. ValueError when no
        whole round is there, or when a schedule chose how many slots were verified.
        """
        kept: list[int] = []
        owners: list[int] = []
        given: list[list[float]] = []
        answers = 0
        for one in generations:
            if one.lengths:
                raise ValueError("traces need all slots of every round verified: a schedule chose how many of these")
            ends = zip(one.proposed, one.emitted, one.verified, strict=True)
            whole = [i for i, (given, emitted, uncut) in enumerate(ends) if given == num_slots or emitted <= uncut]
            kept += [one.verified[i] for i in whole]
            given += [one.confidences[i] for i in whole] if one.confidences else []
            owners += [answers] * len(whole)
            answers += bool(whole)
        if not kept:
            raise ValueError(f"no whole round of {num_slots} slots was recorded")
        counts, places = torch.tensor(kept), torch.tensor(owners)
        if len(given) == len(kept):
            return cls(counts, torch.tensor(given, dtype=torch.float64), places)
        blank = cls(counts, torch.zeros(len(kept), num_slots, dtype=torch.float64), places)
        alpha = torch.tensor(blank.alpha, dtype=torch.float64)
        return cls(counts, alpha.expand(len(kept), -1).clone(), places)

    @classmethod
    def synthetic(
        cls, alpha: Sequence[float], rounds: int = 2048, spread: float = 4.0, answers: int = 32, seed: int = 0
    ) -> Self:
        """Rounds whose confidences are honest and whose mean acceptance is alpha_k.

        spread: how far confidences reach around alpha_k: Beta(spread * alpha, spread * (1 - alpha)); a large one makes
        them all equal. All slots of a round share one quantile, so good rounds are good all along. ValueError on values
        outside (0, 1).
        """
        if not alpha or min(alpha) <= 0 or max(alpha) >= 1:
            raise ValueError(f"alpha must hold values inside (0, 1), got {list(alpha)}")
        state = torch.random.get_rng_state()
        torch.manual_seed(seed)
        try:
            means = torch.tensor(alpha, dtype=torch.float64)
            beta = torch.distributions.Beta(spread * means, spread * (1 - means))
            # Sorting each slot's draws and shuffling rounds together gives every slot the same quantile of a round.
            drawn = beta.sample((rounds,)).sort(0).values[torch.randperm(rounds)]
            accepted = (torch.rand(rounds, len(alpha), dtype=torch.float64) < drawn).long().cumprod(1).sum(1)
        finally:
            torch.random.set_rng_state(state)
        owners = torch.arange(rounds) * answers // rounds
        return cls(accepted, drawn, owners)

    @classmethod
    def from_report(cls, path: Path, rounds: int = 2048, seed: int = 0) -> Self:
        """Synthetic rounds with the alpha of a report.json, for evaluations whose rounds were not kept."""
        report = read_json(path)
        alpha = [value for value, trials in zip(report["alpha"], report["trials"], strict=True) if trials]
        if not alpha:
            raise ValueError(f"{path} has no acceptance by slot")
        return cls.synthetic([min(max(value, 1e-3), 1 - 1e-3) for value in alpha], rounds, seed=seed)

    def save(self, path: Path) -> Path:
        """Write the file, atomically; returns its path."""
        values = {name: getattr(self, name).tolist() for name in ("kept", "answers", "confidences")}
        write_json(path, {"format": FORMAT, "num_slots": self.num_slots, **values})
        return path

    @classmethod
    def load(cls, path: Path) -> Self:
        """A file that `save` wrote, or an evaluation's report.json; ValueError for any other."""
        found = read_json(path)
        if isinstance(found, dict) and found.get("format") == FORMAT:
            confidences = torch.tensor(found["confidences"], dtype=torch.float64)
            return cls(torch.tensor(found["kept"]), confidences, torch.tensor(found["answers"]))
        if isinstance(found, dict) and {"alpha", "trials"} <= set(found):
            return cls.from_report(path)
        raise ValueError(f"{path} holds neither traces nor an evaluation's report")
