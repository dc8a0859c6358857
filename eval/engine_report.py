"""What an evaluation on servers leaves: the report of `headstart eval`, with figures by concurrency under `engine`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from eval.engine_client import Answered
from eval.engine_figures import Level, Timed, counted, side, told
from eval.metrics import Speed
from eval.report import Part, Report
from eval.sections import alphas
from eval.turns import Request


@dataclass(frozen=True)
class EngineReport(Report):
    """levels: figures by concurrency; the first one's are the report's own. engine: its name, version and commands."""

    levels: list[Level] = field(default_factory=list)
    engine: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The keys of report.json."""
        return super().as_dict() | {"engine": {**self.engine, "levels": [one.as_dict() for one in self.levels]}}

    def show(self, console: Console | None = None) -> None:
        """Print acceptance, and speed by concurrency with its interval."""
        console = console or Console()
        title = f"{self.engine['name']} {self.engine['version']}: {self.num_slots} slots, {self.whole.prompts} prompts"
        table = Table(title=title, title_justify="left")
        for name in ("in flight", "tokens/s", "without", "speedup", "tau", "first ms", "token ms"):
            table.add_column(name, justify="right")
        for one in self.levels:
            table.add_row(str(one.concurrency), *cells(one))
        console.print(table)
        console.print(f"alpha by slot  {' '.join(alphas(self.whole.as_dict()))}", soft_wrap=True)
        domains = "  ".join(f"{name} {part.acceptance.tau:.2f}" for name, part in self.parts.items())
        console.print(f"tau by domain  {domains}", soft_wrap=True)
        console.print(self._lossless_line())
        for line in self.failures():
            console.print(line, style="red", soft_wrap=True)


def cells(one: Level) -> list[str]:
    """A level's row: speeds and speedup with intervals, tau, P50 of the first token and of a token, with / without."""
    own, other = one.drafter, one.baseline
    tau = own.tau.words() if own.tau else f"{own.tau_counted:.2f}" if own.tau_counted else "-"
    first = [f"{x.latency.first_ms['p50']:.0f}" if x else "-" for x in (own, other)]
    tokens = [f"{x.latency.token_ms['p50']:.1f}" if x and x.latency.token_ms else "-" for x in (own, other)]
    return [
        own.tokens_per_s.words(1),
        other.tokens_per_s.words(1) if other else "-",
        one.speedup.words() if one.speedup else "-",
        tau,
        " / ".join(first),
        " / ".join(tokens),
    ]


Named = list[tuple[str, Answered]]


def parts(
    drafted: dict[int, Timed], plain: dict[int, Timed], requests: Sequence[Request], num_slots: int
) -> tuple[Part, dict[str, Part]]:
    """Figures over all prompts, and by domain (none where requests do not tell their rounds).

    drafted, plain: passes by concurrency. requests: that were asked, once each. Acceptance counts every answer at every
    concurrency; speed and latency are those of the first. A domain's tokens/s are one user's: tokens / seconds of its
    own requests.
    """
    first = next(iter(drafted))
    own, other = drafted[first], plain.get(first)
    every = [pair for timed in drafted.values() for pair in timed.pairs]
    known = all(answer.rounds is not None for _, answer in every)
    passes = [one for timed in drafted.values() for one in timed.passes]
    timed = {"drafter": own, "baseline": other}
    whole = Part(
        prompts=len({one.prompt for one in requests}),
        turns=len(requests),
        acceptance=told([answer for _, answer in every], num_slots) if known else counted(passes, num_slots),
        speed=_speed((own.pairs, own.wall), None if other is None else (other.pairs, other.wall)),
        latency={who: side(one, None).latency for who, one in timed.items() if one is not None},
    )
    by_domain = {}
    for domain in sorted({one.domain for one in requests}) if known else []:
        names = {one.id for one in requests if one.domain == domain}
        by_domain[domain] = Part(
            prompts=len({one.prompt for one in requests if one.id in names}),
            turns=len(names),
            acceptance=told([answer for name, answer in every if name in names], num_slots),
            speed=_speed(_requests(own.pairs, names), None if other is None else _requests(other.pairs, names)),
        )
    return whole, by_domain


def _requests(pairs: Named, names: set[str]) -> tuple[Named, float]:
    kept = [(name, answer) for name, answer in pairs if name in names]
    return kept, sum(answer.seconds for _, answer in kept)


def _speed(own: tuple[Named, float], other: tuple[Named, float] | None) -> Speed:
    """From answers and the seconds that they took."""
    mine, base = (None if one is None else _rate(*one) for one in (own, other))
    return Speed(mine or 0.0, {}, base, (mine or 0.0) / base if base else None)


def _rate(pairs: Named, seconds: float) -> float:
    return sum(len(answer.tokens) for _, answer in pairs) / seconds if seconds else 0.0
