"""Step times measured on the running machine, in place of a roofline's.

A table holds seconds by (rows, tokens of a row). It is made monotone (a larger pass never takes less time; noise
would invite a scheduler to verify more because of it), read with straight lines between its points and the last line
beyond them. Times belong to the context they were measured at; `context` is not modelled.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from checkpoints.files import read_json, write_json
from eval.hardware import Cost

FORMAT = "headstart-steps"


@dataclass(frozen=True)
class StepTable:
    """seconds[i][j] of rows[i] requests and counts[j] tokens (or slots) each. Both axes ascending, at least one entry.

    ValueError for a table that is ragged, unsorted or not positive.
    """

    rows: list[int]
    counts: list[int]
    seconds: list[list[float]]

    def __post_init__(self) -> None:
        for name, axis in (("rows", self.rows), ("counts", self.counts)):
            if not axis or list(axis) != sorted(set(axis)) or axis[0] < 1:
                raise ValueError(f"{name} of a step table must be ascending and at least 1, got {axis}")
        if [len(line) for line in self.seconds] != [len(self.counts)] * len(self.rows):
            raise ValueError(f"a step table of {len(self.rows)} x {len(self.counts)} needs as many times")
        if min(min(line) for line in self.seconds) <= 0:
            raise ValueError("times of a step table must be positive")

    def monotone(self) -> Self:
        """A table that never falls along either axis: halfway between the least one above and the greatest one below,
        so that a single slow or fast outlier moves its neighbours by half."""
        above = _running(self.seconds, max)
        turned = [line[::-1] for line in self.seconds[::-1]]
        below = [line[::-1] for line in _running(turned, min)[::-1]]
        middle = [[(x + y) / 2 for x, y in zip(*lines, strict=True)] for lines in zip(above, below, strict=True)]
        return type(self)(self.rows, self.counts, middle)

    def at(self, rows: float, count: float) -> float:
        """Seconds between and beyond the measured points, straight in either direction; never below the smallest."""
        line = [_straight(self.counts, own, count) for own in self.seconds]
        return max(_straight(self.rows, line, rows), min(map(min, self.seconds)))


def _running(table: Sequence[Sequence[float]], pick: Callable[[list[float]], float]) -> list[list[float]]:
    """pick (max or min) over everything up to each entry in both axes."""
    lines: list[list[float]] = []
    for line in table:
        done: list[float] = []
        for j, value in enumerate(line):
            done.append(pick([value, *done[-1:], *([lines[-1][j]] if lines else [])]))
        lines.append(done)
    return lines


def _straight(axis: Sequence[int], values: Sequence[float], at: float) -> float:
    """Linear interpolation; beyond the ends the nearest segment goes on, below the first point it stays flat."""
    if len(axis) == 1:
        return values[0]
    if at <= axis[0]:
        return values[0]
    i = min(bisect_right(axis, at), len(axis) - 1)
    share = (at - axis[i - 1]) / (axis[i] - axis[i - 1])
    return values[i - 1] + share * (values[i] - values[i - 1])


@dataclass(frozen=True)
class Measured:
    """Measured cost of a target and a drafter. Satisfies eval.hardware.Cost.

    target: by (rows, tokens a row). draft: by (rows, slots), None without a drafter; reading what verification kept is
    part of it. rest: seconds of everything else in a round with a drafter, by rows (one column). context: positions in
    the cache. about: machine, target, drafter, dtype. Tables are made monotone.
    """

    target: StepTable
    draft: StepTable | None = None
    rest: StepTable | None = None
    context: int = 0
    about: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("target", "draft", "rest"):
            table = getattr(self, name)
            if table is not None:
                object.__setattr__(self, name, table.monotone())

    def target_seconds(self, rows: float, tokens: float, context: float) -> float:
        return self.target.at(rows, tokens / rows)

    def draft_seconds(self, rows: float, num_slots: int, context: float) -> float:
        return self.draft.at(rows, num_slots) if self.draft is not None and num_slots else 0.0

    def rest_seconds(self, rows: float, num_slots: int) -> float:
        return self.rest.at(rows, 1) if self.rest is not None and num_slots else 0.0

    def save(self, path: Path) -> Path:
        """Write the file, atomically; returns its path."""
        write_json(path, {"format": FORMAT, **asdict(self)})
        return path

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file that `save` wrote; ValueError names any other."""
        found = read_json(path)
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise ValueError(f"{path} is no table of step times ({FORMAT})")
        tables = {
            name: None if found[name] is None else StepTable(**found[name]) for name in ("target", "draft", "rest")
        }
        if tables["target"] is None:
            raise ValueError(f"{path} has no times of the target")
        return cls(tables["target"], tables["draft"], tables["rest"], found["context"], found["about"])


def measured_times(path: str) -> Measured:
    """Step times of a target and a drafter. ValueError for a file without the drafter's."""
    found = Measured.load(Path(path).expanduser())
    if found.draft is None:
        raise ValueError(f"{path} has no times of a drafter; profile with drafter_dir")
    return found


@dataclass(frozen=True)
class Miss:
    """How far a model is from one measured time. kind: target or draft; count: tokens or slots of a row."""

    kind: str
    rows: int
    count: int
    measured: float
    modelled: float

    @property
    def error(self) -> float:
        return self.modelled / self.measured - 1


def misses(measured: Measured, model: Cost) -> list[Miss]:
    """The model's error at every measured point."""
    found = []
    for kind, table in (("target", measured.target), ("draft", measured.draft)):
        for i, rows in enumerate(table.rows if table is not None else ()):
            assert table is not None
            for j, count in enumerate(table.counts):
                said = (
                    model.target_seconds(rows, rows * count, measured.context)
                    if kind == "target"
                    else model.draft_seconds(rows, count, measured.context)
                )
                found.append(Miss(kind, rows, count, table.seconds[i][j], said))
    return found
