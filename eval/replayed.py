"""A drafter's greedy tau by replay: what `headstart eval replay=true` and `headstart compare` report of it.

It is no measurement of speed: the target does not run.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from checkpoints.files import write_json
from drafters.contract import Drafter
from eval.calibration import Calibration, calibrate
from eval.page import write_page
from eval.recording import Recording
from eval.replay import Acceptance, replay
from eval.sections import alphas

FILE = "report.json"


@dataclass(frozen=True)
class Replayed:
    """acceptance over all rounds. prompts (one a turn), tokens: of the recording. seconds: that the replay took.
    calibration: None when the drafter gives no confidences. owner: whose answers they are. about: what else the report
    says."""

    acceptance: Acceptance
    num_slots: int
    prompts: int
    tokens: int
    seconds: float
    calibration: Calibration | None
    owner: dict[str, Any]
    about: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Keys of report.json; those of speed are null, as nothing was timed against the target."""
        found = self.acceptance
        return {
            "replay": True,
            "tau": found.tau,
            "accepted": found.accepted,
            "alpha": found.alpha,
            "trials": found.trials,
            "domains": found.domains,
            "tokens_per_s": None,
            "baseline_tokens_per_s": None,
            "speedup": None,
            "seconds": {"replay": round(self.seconds, 3)},
            "prompts": self.prompts,
            "num_slots": self.num_slots,
            "efficiency": found.tau / (self.num_slots + 1),
            "rounds": found.rounds,
            "tokens": self.tokens,
            "calibration": None if self.calibration is None else self.calibration.as_dict(),
            "recording": self.owner,
            **self.about,
        }

    def write(self, folder: Path) -> Path:
        """Write pictures, report.md, report.html and, last, report.json; returns the path of report.json."""
        write_page(Path(folder), self.as_dict())
        write_json(Path(folder) / FILE, self.as_dict())
        return Path(folder) / FILE

    def show(self, console: Console | None = None) -> None:
        """Print tau by domain and alpha_k."""
        console, found = console or Console(), self.acceptance
        title = f"{self.num_slots} slots, {self.prompts} prompts: replay of the target's greedy answers, no speed"
        table = Table("domain", title=title, title_justify="left")
        for name in ("tau", "accepted"):
            table.add_column(name, justify="right")
        for name, tau in found.domains.items():
            table.add_row(name, f"{tau:.2f}", f"{max(0.0, tau - 1):.2f}")
        table.add_row("all", f"{found.tau:.2f}", f"{found.accepted:.2f}", style="bold")
        console.print(table)
        console.print("alpha by slot  " + "  ".join(alphas({"alpha": found.alpha, "trials": found.trials})))
        if self.calibration is not None:
            console.print(calibration_line(self.calibration))


def measure_replay(
    drafter: Drafter,
    recording: Recording,
    num_slots: int,
    about: dict[str, Any] | None = None,
    peaks: bool = False,
) -> Replayed:
    """Replay a drafter through a recording with features of the layers it needs (ValueError otherwise).

    about: further keys of the report. peaks: fit an estimator for a drafter without confidences, from q_max.
    """
    started = time.perf_counter()
    found = replay(drafter, recording.trajectories(drafter.needs.layers), num_slots, peaks=peaks)
    seconds = time.perf_counter() - started
    fitted = None if found.confident is None else calibrate(found.confident)
    if fitted is None and found.peaked is not None:
        fitted = calibrate(found.peaked, estimate=True)
    tokens = sum(map(len, recording.answers))
    return Replayed(found, num_slots, len(recording.answers), tokens, seconds, fitted, recording.owner, about or {})


def calibration_line(found: Calibration) -> str:
    """ECE, Brier score and AUC before and after, in words."""
    how = "temperature scaling" if found.estimator is None else "the estimator and temperature scaling"
    ranking = (found.before.auc, found.after.auc)
    shown = "" if None in ranking else f"; AUC {ranking[0]:.3f}, {ranking[1]:.3f}"
    return (
        f"confidences    ECE {found.before.ece:.3f}, {found.after.ece:.3f} after {how}; "
        f"Brier {found.before.brier:.3f}, {found.after.brier:.3f}{shown}"
    )
