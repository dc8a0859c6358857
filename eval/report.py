"""What an evaluation leaves: report.json, a page, a Markdown table and pictures, and a table on the screen."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from checkpoints.files import write_json
from eval.calibration import Calibration
from eval.decoder import Generation
from eval.latency import Latency
from eval.lossless import Difference
from eval.lossy import Agreement, Lossy
from eval.metrics import Acceptance, Speed
from eval.page import write_page
from eval.plots import draw_plots, write_plots
from eval.replayed import calibration_line

FILE = "report.json"


@dataclass(frozen=True)
class Part:
    """Figures of one domain, or of all. prompts: how many; turns: answers to them. latency: by who decoded, drafter or
    baseline."""

    prompts: int
    turns: int
    acceptance: Acceptance
    speed: Speed
    latency: dict[str, Latency] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """All figures under the names that eval.metrics defines."""
        own, pace = self.acceptance, self.speed
        return {
            "prompts": self.prompts,
            "turns": self.turns,
            "tau": own.tau,
            "accepted": own.accepted,
            "tau_verified": own.tau_verified,
            "alpha": own.alpha,
            "survival": own.survival,
            "trials": own.trials,
            "rounds": own.rounds,
            "tokens": own.tokens,
            "efficiency": own.efficiency,
            "verified_slots": own.verified_slots,
            **asdict(pace),
            "latency": {who: asdict(one) for who, one in self.latency.items()},
        }


@dataclass(frozen=True)
class Report:
    """A whole evaluation.

    whole: figures over all prompts; parts: by domain. differences: where greedy answers with and without drafter part
    (None when not compared: no baseline, or sampled). seconds: by stage of the evaluation. example: one prompt as
    rendered and its answer. settings, target, drafter, machine: what was measured, where. calibration: of the drafter's
    confidences, None when it gives none. noise_identical: share of sampled answers that are the target's own from the
    same noises, token by token (None when greedy, not compared, or verified by another rule). sizes: bytes by name.
    lossy: the rule, when drafts stood that the target would not have written, and how far the text moved by it.
    command: as typed. predicted: speedups by a cost model beside the measured ones (see `beside`). pareto: {name:
    [{"user_tokens_per_s", "tokens_per_s"}, ...]}. answers: with the drafter, for traces; not in report.json.
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
    sizes: dict[str, int] = field(default_factory=dict)
    lossy: tuple[Lossy, Agreement] | None = None
    command: str | None = None
    predicted: list[dict[str, Any]] | None = None
    pareto: dict[str, list[dict[str, float]]] | None = None
    drafter_dir: str | None = None
    export_dirs: dict[str, str] = field(default_factory=dict)
    answers: list[Generation] = field(default_factory=list)

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
            "sizes": self.sizes,
            "lossy": self._lossy(),
            "predicted": self.predicted,
            "pareto": self.pareto,
            "command": self.command,
            "settings": self.settings,
            "target": self.target,
            "drafter": self.drafter,
            "machine": self.machine,
            "example": self.example,
        }

    def _lossy(self) -> dict[str, Any] | None:
        if self.lossy is None:
            return None
        rule, found = self.lossy
        return {"label": "LOSSY", "words": rule.words, **asdict(rule), "agreement": asdict(found)}

    def write(self, folder: Path) -> Path:
        """Write the pictures, report.md, report.html and, last, report.json into folder, each atomically. Returns the
        path of report.json."""
        folder = Path(folder)
        write_page(folder, self.as_dict())
        write_json(folder / FILE, self.as_dict())
        return folder / FILE

    def plot(self, folder: Path) -> list[Path]:
        """Write the pictures alone: PNG files, their paths."""
        return write_plots(Path(folder), draw_plots(self.as_dict()))

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
        for who, found in self.whole.latency.items():
            if found.token_ms is not None:
                shown = "  ".join(f"{name.upper()} {value:.1f} ms" for name, value in found.token_ms.items())
                console.print(f"a token        {shown}  ({who})", highlight=False)
        if self.calibration is not None:
            console.print(calibration_line(self.calibration))
        if self.lossy is None:
            console.print(self._lossless_line())
        else:
            console.print(lossy_line(*self.lossy), style="bold red", soft_wrap=True)
        for line in self.failures():
            console.print(line, style="red", soft_wrap=True)

    def _lossless_line(self) -> str:
        if self.noise_identical is not None:
            return f"sampled output {self.noise_identical:.0%} of answers are the target's own from the same noise"
        if self.differences is None:
            return "greedy output  not compared (sampled, or no baseline)"
        word = "identical" if self.greedy_identical else "NOT identical"
        return f"greedy output  {word} with and without drafter, {self.near_ties} near tie(s) proven"


def beside(predicted: dict[str, Any], measured: dict[str, float | None]) -> list[dict[str, Any]]:
    """Predicted speedups beside measured ones, as a report keeps them: {"name", "predicted", "measured"}.

    predicted: by name, a number, whose measured value this report has under that name (a domain, or all), or both as
    {"predicted", "measured"}. ValueError names one that was not measured.
    """
    points = []
    for name, value in predicted.items():
        both = value if isinstance(value, dict) else {"predicted": value, "measured": measured.get(name)}
        if set(both) != {"predicted", "measured"} or not all(isinstance(one, int | float) for one in both.values()):
            known = ", ".join(key for key, one in measured.items() if one is not None) or "nothing"
            raise ValueError(f"predicted speedup {name!r}: got {value!r}; this report measured {known}")
        points.append({"name": name, **both})
    return points


def lossy_line(rule: Lossy, found: Agreement) -> str:
    """The label, the rule, and the agreement with the target."""
    same = "" if found.same_answers is None else f", {found.same_answers:.0%} of answers as the target's greedy ones"
    return (
        f"LOSSY          {rule.words}{same}; target's log-probability a token {found.log_prob:.3f}, of its own text "
        f"{found.target_log_prob:.3f}"
    )


def _difference(one: Difference) -> dict[str, Any]:
    values = asdict(one) | {"near_tie": one.near_tie}
    # JSON has no infinity: an answer that merely ends earlier has no gap.
    return values | {"gap": one.gap if one.gap != float("inf") else None}
