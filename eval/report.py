"""What an evaluation leaves: report.json, two plots, and a table on the screen."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from checkpoints.files import atomic, write_json
from eval.calibration import Calibration
from eval.lossless import Difference
from eval.metrics import Acceptance, Speed
from eval.replayed import calibration_line

FILE = "report.json"
PLOTS = ("alpha.png", "tau_by_domain.png")


@dataclass(frozen=True)
class Part:
    """Figures of one domain, or of all. prompts: how many."""

    prompts: int
    acceptance: Acceptance
    speed: Speed

    def as_dict(self) -> dict[str, Any]:
        """All figures under the names that eval.metrics defines."""
        own, pace = self.acceptance, self.speed
        return {
            "prompts": self.prompts,
            "tau": own.tau,
            "accepted": own.accepted,
            "tau_verified": own.tau_verified,
            "alpha": own.alpha,
            "survival": own.survival,
            "trials": own.trials,
            "rounds": own.rounds,
            "tokens": own.tokens,
            **asdict(pace),
        }


@dataclass(frozen=True)
class Report:
    """A whole evaluation.

    whole: figures over all prompts; parts: by domain. differences: where greedy answers with and without drafter part
    (None when not compared: no baseline, or sampled). seconds: by stage of the evaluation. example: one prompt as
    rendered and its answer. settings, target, drafter, machine: what was measured, where. calibration: of the drafter's
    confidences, None when it gives none. noise_identical: share of sampled answers that are the target's own from the
    same noises, token by token (None when greedy, not compared, or verified by another rule).
    """

    whole: Part
    parts: dict[str, Part]
    num_slots: int
    differences: list[Difference] | None
    seconds: dict[str, float]
    example: dict[str, Any]
    settings: dict[str, Any]
    target: dict[str, Any]
    drafter: dict[str, Any]
    machine: dict[str, Any]
    calibration: Calibration | None = None
    noise_identical: float | None = None
    drafter_dir: str | None = None
    export_dirs: dict[str, str] = field(default_factory=dict)

    @property
    def greedy_identical(self) -> bool | None:
        """Every greedy answer identical, or parting first at a proven near tie; None when not compared."""
        return None if self.differences is None else all(one.near_tie for one in self.differences)

    @property
    def near_ties(self) -> int | None:
        """Answers that part at a proven near tie; None when not compared."""
        return None if self.differences is None else sum(one.near_tie for one in self.differences)

    def failures(self) -> list[str]:
        """One line for each answer that the drafter changed."""
        return [
            f"prompt {one.prompt}, new token {one.position}: {one.baseline} without drafter, {one.drafted} with it; "
            f"float32 gap {one.gap:.3g}, rounding explains {one.bound:.3g}"
            for one in self.differences or []
            if not one.near_tie
        ]

    def as_dict(self) -> dict[str, Any]:
        """The keys of report.json."""
        whole = self.whole.as_dict()
        return {
            "tau": whole.pop("tau"),
            "accepted": whole.pop("accepted"),
            "alpha": whole.pop("alpha"),
            "domains": {name: part.acceptance.tau for name, part in self.parts.items()},
            "greedy_identical": self.greedy_identical,
            "near_ties": self.near_ties,
            "tokens_per_s": whole.pop("tokens_per_s"),
            "baseline_tokens_per_s": whole.pop("baseline_tokens_per_s"),
            "speedup": whole.pop("speedup"),
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
            "drafter_dir": self.drafter_dir,
            "export_dirs": self.export_dirs,
            "prompts": whole.pop("prompts"),
            "num_slots": self.num_slots,
            **whole,
            "by_domain": {name: part.as_dict() for name, part in self.parts.items()},
            "differences": None if self.differences is None else [_difference(one) for one in self.differences],
            "failures": self.failures(),
            "noise_identical": self.noise_identical,
            "calibration": None if self.calibration is None else self.calibration.as_dict(),
            "settings": self.settings,
            "target": self.target,
            "drafter": self.drafter,
            "machine": self.machine,
            "example": self.example,
        }

    def write(self, folder: Path) -> Path:
        """Write report.json and the plots into folder, each atomically, report.json last. Returns its path."""
        folder = Path(folder)
        self.plot(folder)
        write_json(folder / FILE, self.as_dict())
        return folder / FILE

    def plot(self, folder: Path) -> list[Path]:
        """alpha_k by slot and tau by domain as PNG files."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # heavy, and needed here alone
        from matplotlib.figure import Figure

        paths = [Path(folder) / name for name in PLOTS]
        for path, draw in zip(paths, (self._plot_alpha, self._plot_tau), strict=True):
            figure = Figure(figsize=(6.4, 4), layout="constrained")
            FigureCanvasAgg(figure)
            draw(figure.add_subplot())
            with atomic(path) as temporary:
                figure.savefig(temporary, format="png", dpi=120)
        return paths

    def _plot_alpha(self, axes: Any) -> None:
        slots = range(1, self.num_slots + 1)
        for name, part in self.parts.items():
            axes.plot(slots, part.acceptance.alpha, marker="o", linewidth=1, alpha=0.7, label=name)
        axes.plot(slots, self.whole.acceptance.alpha, marker="o", color="black", linewidth=2, label="all")
        axes.set(xlabel="slot k", ylabel="alpha_k (conditional acceptance)", ylim=(0, 1.02), xticks=list(slots))
        axes.legend(fontsize="small")

    def _plot_tau(self, axes: Any) -> None:
        names = [*self.parts, "all"]
        taus = [part.acceptance.tau for part in (*self.parts.values(), self.whole)]
        bars = axes.bar(names, taus, color=["tab:blue"] * len(self.parts) + ["black"])
        axes.bar_label(bars, fmt="%.2f")
        threshold = self.whole.speed.break_even_tau
        if threshold:
            axes.axhline(threshold, linestyle="--", color="tab:red", label=f"break-even {threshold:.2f}")
            axes.legend(fontsize="small")
        axes.set(ylabel="tau (tokens per round, bonus included)")
        axes.tick_params(axis="x", rotation=30)

    def show(self, console: Console | None = None) -> None:
        """Print the table, the time split and the verdict on losslessness."""
        console = console or Console()
        table = Table(title=f"{self.num_slots} slots, {self.whole.prompts} prompts", title_justify="left")
        for name in ("domain", "tau", "accepted", "tokens/s", "without", "speedup", "break-even"):
            table.add_column(name, justify="left" if name == "domain" else "right")
        alpha: list[str] = []
        for name, part in [*self.parts.items(), ("all", self.whole)]:
            own, pace = part.acceptance, part.speed
            alpha = [f"{value:.2f}" if trials else "-" for value, trials in zip(own.alpha, own.trials, strict=True)]
            speeds = (pace.tokens_per_s, pace.baseline_tokens_per_s, pace.speedup, pace.break_even_tau)
            figures = ["-" if value is None else f"{value:.2f}" for value in (own.tau, own.accepted, *speeds)]
            table.add_row(name, *figures, style="bold" if name == "all" else None)
        console.print(table)
        console.print(f"alpha by slot  {' '.join(alpha)}", soft_wrap=True)
        split = "  ".join(f"{name} {share:.0%}" for name, share in self.whole.speed.split.items())
        console.print(f"time split     {split}")
        if self.calibration is not None:
            console.print(calibration_line(self.calibration))
        console.print(self._lossless_line())
        for line in self.failures():
            console.print(line, style="red", soft_wrap=True)

    def _lossless_line(self) -> str:
        if self.noise_identical is not None:
            return f"sampled output {self.noise_identical:.0%} of answers are the target's own from the same noise"
        if self.differences is None:
            return "greedy output  not compared (sampled, or no baseline)"
        word = "identical" if self.greedy_identical else "NOT identical"
        return f"greedy output  {word} with and without drafter, {self.near_ties} near tie(s) proven"


def _difference(one: Difference) -> dict[str, Any]:
    values = asdict(one) | {"near_tie": one.near_tie}
    # JSON has no infinity: an answer that merely ends earlier has no gap.
    return values | {"gap": one.gap if one.gap != float("inf") else None}
