"""How far an evaluation is: a bar on a terminal, a line now and then elsewhere."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

EVERY_SECONDS = 30.0


class Watch:
    """Counts ended prompts and new tokens. Call it with both as decoding goes; `pass_` names what is being decoded.

    console: where to show (None: the error stream). total: prompts over all passes. The bar repaints rarely, so that it
    takes no time from what is measured.
    """

    def __init__(self, total: int, console: Console | None = None, every: float = EVERY_SECONDS) -> None:
        self.total, self.every = total, every
        self.console = console or Console(stderr=True, force_jupyter=False)
        self.pass_, self.ended, self.tokens = "decoding", 0, 0
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("prompts"),
            TextColumn("{task.fields[rate]} tokens/s"), TextColumn("left"), TimeRemainingColumn(),
            console=self.console, transient=True, refresh_per_second=2, disable=not self.console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task(self.pass_, total=total, rate=0)

    def __enter__(self) -> Self:
        self._began = self._said = time.monotonic()
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._bar.stop()

    def __call__(self, ended: int, tokens: int) -> None:
        """Add prompts that ended and tokens that were written."""
        self.ended += ended
        self.tokens += tokens
        now = time.monotonic()
        rate = self.tokens / max(now - self._began, 1e-9)
        self._bar.update(self._task, description=self.pass_, completed=self.ended, rate=f"{rate:.0f}")
        if not self.console.is_terminal and now - self._said >= self.every:
            self._said = now
            left = (now - self._began) * (self.total - self.ended) / self.ended / 60 if self.ended else None
            remaining = "" if left is None else f", {left:.1f} minutes left"
            self.console.print(
                f"{self.pass_}: {self.ended} of {self.total} prompts, {rate:.0f} tokens/s{remaining}",
                highlight=False,
                soft_wrap=True,
            )
