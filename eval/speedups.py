"""Predicted against measured speedups on the running machine, for every number of requests and of slots.

    headstart bench speedup target=smollm2 drafter_dir=... rows=[1,4,16] slots=[1,2,3,4,5,6,7] context=96 seconds=8

Step times are profiled first (eval.bench); they and tau of the measured rounds predict a speedup (eval.hardware):

    predicted   tau * plain round / (draft + verify + rest), all of the step times
    measured    tokens/s of rounds with the drafter / tokens/s of rounds without, greedy, the waiting loop

Reading prompts counts on neither side. Groups write on behind an end of turn and stop when their first request has its
tokens, so each round serves all rows. All loops of a number of requests, the one without drafter among them, take
turns, so that a machine that grows slower for a while does so for all.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from typing import Any

from rich.console import Console
from rich.table import Table

from data.target import Target
from drafters.contract import Drafter
from eval.decoder import DecodeSettings, Generation, Group, generate
from eval.hardware import Cost, speedup

TURNS = 3


@dataclass(frozen=True)
class Measuring:
    """rows, slots: every pair is measured. new_tokens: of a group. seconds: of measured rounds a pair. context:
    positions at which costs are asked."""

    rows: Sequence[int]
    slots: Sequence[int]
    new_tokens: int
    seconds: float
    context: int


@dataclass(frozen=True)
class Rounds:
    """Rounds of full groups: how many, the tokens that all rows wrote in them, seconds."""

    rounds: int
    tokens: int
    seconds: float

    def __add__(self, other: "Rounds") -> "Rounds":
        return Rounds(self.rounds + other.rounds, self.tokens + other.tokens, self.seconds + other.seconds)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Point:
    """One number of requests and slots. rounds, tau: of the measured rounds. predicted, measured: speedups."""

    rows: int
    slots: int
    rounds: int
    tau: float
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"name": f"{self.rows} x {self.slots}", "error": self.error}


class _Full(Group):
    """A group whose rounds all serve every request: no end of turn, and over when the first has its tokens."""

    def open(
        self, prompts: list[list[int]], seeds: list[int], results: list[Generation], began: float | None = None
    ) -> None:
        self.ends = set()
        super().open(prompts, seeds, results, began)

    def rounds(self) -> None:
        started, written = time.perf_counter(), self._written()
        while len(self.alive) == len(self.results):
            self._round()
        seconds = time.perf_counter() - started
        self.done = Rounds(len(self.results[0].emitted), self._written() - written, seconds)

    def _written(self) -> int:
        return sum(len(result.tokens) for result in self.results)


def measure_rounds(
    target: Target, drafter: Drafter | None, settings: DecodeSettings, seconds: float, prompts: Iterator[list[int]]
) -> Rounds:
    """Decode groups of settings.batch_size of the prompts until their rounds took `seconds`; at least one."""
    done = Rounds(0, 0, 0.0)
    while not done.rounds or done.seconds < seconds:
        groups: list[_Full] = []

        def made(*given: Any, groups: list[_Full] = groups) -> _Full:
            groups.append(_Full(*given))
            return groups[-1]

        generate(target, drafter, list(islice(prompts, settings.batch_size)), settings, group=made)
        done = sum((one.done for one in groups), done)
    return done


def measure_speedups(
    target: Target,
    drafter: Drafter,
    cost: Cost,
    prompts: Sequence[list[int]],
    how: Measuring,
) -> list[Point]:
    """A point for every number of rows and slots. cost: predicts. ValueError without prompts, or for fewer than two new
    tokens (the first needs no round)."""
    if not prompts or how.new_tokens < 2:
        raise ValueError(f"speedups need a prompt and two new tokens, got {len(prompts)} and {how.new_tokens}")
    found = []
    for count in how.rows:
        order, nothing = cycle(prompts), Rounds(0, 0, 0.0)
        ways: list[tuple[Drafter | None, DecodeSettings]] = [(None, DecodeSettings(1, how.new_tokens, count))]
        ways += [(drafter, DecodeSettings(k, how.new_tokens, count)) for k in how.slots]
        measure_rounds(target, drafter, DecodeSettings(how.slots[-1], 2, count), 0.0, order)  # warm
        turns = [[measure_rounds(target, *way, how.seconds / TURNS, order) for way in ways] for _ in range(TURNS)]
        without, *drafted = (sum(column, nothing) for column in zip(*turns, strict=True))
        for k, done in zip(how.slots, drafted, strict=True):
            tau = done.tokens / (done.rounds * count)
            predicted = speedup(cost, tau, count, k, how.context)
            found.append(Point(count, k, done.rounds, tau, predicted, done.tokens_per_s / without.tokens_per_s))
    return found


def show_speedups(points: Sequence[Point], console: Console) -> None:
    """Print the points."""
    table = Table(title="speedup, predicted from step times against measured", title_justify="left")
    for name in ("requests", "slots", "rounds", "tau", "predicted", "measured", "error"):
        table.add_column(name, justify="right")
    for one in points:
        figures = (f"{one.tau:.2f}", f"{one.predicted:.3f}", f"{one.measured:.3f}", f"{one.error:+.1%}")
        table.add_row(str(one.rows), str(one.slots), str(one.rounds), *figures)
    console.print(table)
    worst = max(points, key=lambda one: abs(one.error))
    console.print(f"largest error  {worst.error:+.1%} at {worst.rows} requests, {worst.slots} slots")
