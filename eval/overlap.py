"""Clocks for the host, the drafting and the verifying stream: what overlap saves, checked against its arithmetic.

    sync         host and device take turns               T_d + T_v + T_cpu + T_sync   a round
    overlapped   the host prepares the next round meanwhile   max(T_d + T_v, T_cpu)
    halves       two half batches, one drafts while the other is verified   2 max(T_d, T_v), T of a half batch

Tasks are issued in order; a task starts when its stream is free and everything it waits for has ended.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """name: unique. stream: where it runs. seconds: how long. after: names of tasks that must have ended."""

    name: str
    stream: str
    seconds: float
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class Span:
    """When a task ran, in seconds from the start."""

    task: Task
    start: float
    end: float


@dataclass(frozen=True)
class Times:
    """Seconds of one round's parts: drafting, verification, host work, waiting for a result to reach the host."""

    draft: float
    verify: float
    host: float
    sync: float = 0.0

    def __post_init__(self) -> None:
        if min(self.draft, self.verify, self.host, self.sync) < 0:
            raise ValueError(f"times must not be negative, got {self}")


def run(tasks: Iterable[Task]) -> dict[str, Span]:
    """Run tasks in the order given. ValueError for a name used twice, or a task that waits for one not issued yet."""
    free: dict[str, float] = {}
    spans: dict[str, Span] = {}
    for task in tasks:
        unknown = [name for name in task.after if name not in spans]
        if unknown or task.name in spans:
            raise ValueError(
                f"task {task.name!r} waits for {', '.join(unknown) or 'itself'}, which was not issued before"
            )
        start = max([free.get(task.stream, 0.0), *(spans[name].end for name in task.after)])
        spans[task.name] = Span(task, start, start + task.seconds)
        free[task.stream] = start + task.seconds
    return spans


def sync_rounds(times: Times, rounds: int) -> list[Task]:
    """The host waits for the verdict, works, and only then starts the next round. Drafting and verification share the
    device, so both are on one stream in effect: each waits for the other."""
    tasks: list[Task] = []
    for i in range(rounds):
        tasks += [
            Task(f"draft{i}", "draft", times.draft, (f"host{i - 1}",) if i else ()),
            Task(f"verify{i}", "verify", times.verify, (f"draft{i}",)),
            Task(f"host{i}", "host", times.host + times.sync, (f"verify{i}",)),
        ]
    return tasks


def overlapped_rounds(times: Times, rounds: int) -> list[Task]:
    """The device goes from round to round by itself; the host prepares round i + 1 while round i runs, and reads
    results a round late."""
    tasks: list[Task] = []
    for i in range(rounds):
        prepared = [f"host{i}", *([f"verify{i - 1}"] if i else [])]
        before = (f"verify{i - 2}",) if i > 1 else ()
        tasks += [
            Task(f"host{i}", "host", times.host, before),
            Task(f"draft{i}", "draft", times.draft, tuple(prepared)),
            Task(f"verify{i}", "verify", times.verify, (f"draft{i}",)),
        ]
    return tasks


def half_rounds(times: Times, rounds: int) -> list[Task]:
    """Two half batches a and b: a drafts while b is verified. times: of a half batch; the host keeps up."""
    tasks: list[Task] = []
    for i in range(rounds):
        for half in "ab":
            before = (f"verify{half}{i - 1}",) if i else ()
            tasks += [
                Task(f"draft{half}{i}", "draft", times.draft, before),
                Task(f"verify{half}{i}", "verify", times.verify, (f"draft{half}{i}",)),
            ]
    return tasks


PLANS: dict[str, Callable[[Times, int], list[Task]]] = {
    "sync": sync_rounds,
    "overlapped": overlapped_rounds,
    "halves": half_rounds,
}


def round_period(plan: str, times: Times, rounds: int = 40) -> float:
    """Seconds from one round to the next in the steady state, by simulation. ValueError for an unknown plan.

    halves: of both half batches together.
    """
    if plan not in PLANS:
        raise ValueError(f"plan must be one of {', '.join(PLANS)}, got {plan!r}")
    spans = run(PLANS[plan](times, rounds))
    last = "verifyb" if plan == "halves" else "verify"
    half = rounds // 2
    return (spans[f"{last}{rounds - 1}"].end - spans[f"{last}{half}"].end) / (rounds - 1 - half)


def expected_period(plan: str, times: Times) -> float:
    """The same by arithmetic. ValueError for an unknown plan."""
    if plan not in PLANS:
        raise ValueError(f"plan must be one of {', '.join(PLANS)}, got {plan!r}")
    if plan == "sync":
        return times.draft + times.verify + times.host + times.sync
    if plan == "overlapped":
        return max(times.draft + times.verify, times.host)
    return 2 * max(times.draft, times.verify)
