"""Where a round's time goes: calls of target and drafter, and everything else.

    headstart bench rounds target=smollm2 drafter_dir=... rows=[8] slots=[5] context=64 new_tokens=32

Decodes random prompts and times every call of the models inside the rounds (prefill left out): the target's passes and
head, the drafter's reading and proposing. The remainder is the host's: verification, masks, positions, results,
bookkeeping. On a GPU calls return before they are done, so there the clock's own stages, measured by events, stand for
the models' calls.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from data.target import Target
from drafters.contract import Drafter
from eval.decoder import Clock, DecodeSettings, generate
from eval.steady import Loop


@dataclass(frozen=True)
class RoundTimes:
    """Milliseconds a round of a group of requests. loop: of eval.steady.LOOPS. rows, slots: at its start, and K.
    rounds: that were run, a late one included. draft: in the drafter; target: in the target; host: everything else."""

    loop: str
    rows: int
    slots: int
    rounds: int
    draft: float
    target: float
    host: float

    @property
    def host_share(self) -> float:
        """Share of the rounds' time outside the models."""
        whole = self.draft + self.target + self.host
        return self.host / whole if whole else 0.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"host_share": self.host_share}


class _Calls:
    """Seconds inside calls of the models while counting. clock: of the decoding, filled before counting too. loop:
    whose captures count nowhere."""

    def __init__(self, target: Target, drafter: Drafter | None, clock: Clock, loop: Loop) -> None:
        self.seconds, self.counts = {"draft": 0.0, "target": 0.0}, {"draft": 0, "target": 0}
        self.whole, self.counting = 0.0, False
        self.clock, self.before, self.loop = clock, dict[str, float](), loop
        self._watched: list[tuple[Any, str, str]] = [(target, "forward", "target"), (target, "logits", "target")]
        if drafter is not None:
            self._watched += [(drafter, "observe", "draft"), (drafter, "propose", "draft")]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Time the models' methods inside."""
        for owner, name, kind in self._watched:
            setattr(owner, name, self._timed(getattr(owner, name), kind, name))
        try:
            yield
        finally:
            for owner, name, _ in self._watched:
                delattr(owner, name)

    def _timed(self, run: Callable[..., Any], kind: str, name: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return run(*args, **kwargs)
            finally:
                if self.counting:
                    self.seconds[kind] += time.perf_counter() - started
                    self.counts[kind] += name == "forward"

        return timed

    def around(self, rounds: Callable[[], Any]) -> Callable[[], Any]:
        """Count while `rounds` runs."""

        def counted() -> Any:
            self.before = self.before or dict(self.clock.seconds)
            started, self.counting, captured = time.perf_counter(), True, self.loop.captured
            try:
                return rounds()
            finally:
                self.counting = False
                self.whole += time.perf_counter() - started - (self.loop.captured - captured)

        return counted

    def staged(self) -> dict[str, float]:
        """The clock's seconds since counting began: reading the prompts is left out, the drafter's reading too."""
        stages = {"draft": "draft", "target": "verify"}
        now = self.clock.seconds
        return {kind: now[stage] - self.before.get(stage, now[stage]) for kind, stage in stages.items()}


def profile_rounds(
    target: Target, drafter: Drafter | None, prompts: Sequence[list[int]], settings: DecodeSettings, loop: Loop
) -> RoundTimes:
    """Decode the prompts as one group and time its rounds, after a warm-up of a few tokens."""
    clock = Clock(target.device)
    calls = _Calls(target, drafter, clock, loop)

    def made(*given: Any) -> Any:
        group = loop.group(*given)
        for one in getattr(group, "halves", [group]):
            for name in ("rounds", "step"):
                if hasattr(one, name) and (name == "rounds") == (loop.kind != "halves"):
                    setattr(one, name, calls.around(getattr(one, name)))
        return group

    warm = DecodeSettings(settings.num_slots, min(4, settings.max_new_tokens), settings.batch_size)
    generate(target, drafter, prompts, warm, group=loop.group)
    with calls.watching():
        results = generate(target, drafter, prompts, settings, clock, group=made)
    rounds = calls.counts["target"] or max(len(one.emitted) for one in results)
    seconds, whole = dict(calls.seconds), calls.whole
    if target.device.type == "cuda":
        rounds = max(len(one.emitted) for one in results)
        seconds = calls.staged()
    host = max(0.0, whole - sum(seconds.values()))
    draft, own, rest = (1000 * value / max(rounds, 1) for value in (seconds["draft"], seconds["target"], host))
    return RoundTimes(loop.kind, len(prompts), settings.num_slots if drafter else 0, rounds, draft, own, rest)


def random_prompts(target: Target, rows: int, tokens: int, seed: int) -> list[list[int]]:
    """Random token ids, `rows` prompts of `tokens` each."""
    made = torch.Generator().manual_seed(seed)
    return torch.randint(0, target.identity["vocab_size"], (rows, tokens), generator=made).tolist()


def show_rounds(found: Sequence[RoundTimes], console: Console) -> None:
    """Print the times."""
    table = Table(title="a round, ms", title_justify="left")
    for name in ("loop", "requests", "slots", "rounds", "draft", "target", "host", "host share"):
        table.add_column(name, justify="left" if name == "loop" else "right")
    for one in found:
        figures = [f"{value:.2f}" for value in (one.draft, one.target, one.host)]
        table.add_row(one.loop, str(one.rows), str(one.slots), str(one.rounds), *figures, f"{one.host_share:.1%}")
    console.print(table)
