"""Tau while training: the drafter really drafts on held-out prompts, against the target's recorded greedy answers."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from lightning import Callback, LightningModule, Trainer
from rich.console import Console

from eval.replay import Acceptance, Trajectory, replay
from training.module import DrafterModule


@dataclass(frozen=True)
class AcceptanceSettings:
    """every: optimizer steps between measurements (0: only at the end). prompts: held-out prompts, spread over domains.
    max_new_tokens: of each greedy answer. num_slots: K drafted (0: the drafter's own)."""

    every: int = 100
    prompts: int = 40
    max_new_tokens: int = 96
    num_slots: int = 0


class Stopwatch:
    """Seconds of training by the wall and of the process's CPU time; it stands while tau is measured."""

    def __init__(self) -> None:
        self._kept = (0.0, 0.0)
        self._began: tuple[float, float] | None = None  # None: it stands

    def start(self) -> None:
        """Go on."""
        self._began = self._now()

    def stop(self) -> tuple[float, float]:
        """Stand still; what it shows."""
        self._kept, self._began = self.shown, None
        return self._kept

    @property
    def shown(self) -> tuple[float, float]:
        """Wall and CPU seconds so far, resumed runs' earlier ones included."""
        wall, cpu = self._kept
        if self._began is None:
            return wall, cpu
        now = self._now()
        return wall + now[0] - self._began[0], cpu + now[1] - self._began[1]

    def set(self, wall: float, cpu: float) -> None:
        """Start from what an earlier run showed."""
        self._kept = (wall, cpu)

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()


class AcceptanceCallback(Callback):
    """Measures tau every `every` optimizer steps and at the end; logs tau, tau by domain and alpha_k.

    It stands before the Keeper in the trainer's callbacks, so the best drafter is the one that drafts best.
    """

    def __init__(self, trajectories: Sequence[Trajectory], settings: AcceptanceSettings) -> None:
        self.trajectories, self.settings = trajectories, settings
        self.history: list[dict[str, Any]] = []
        self.watch = Stopwatch()

    def measure(self, module: DrafterModule) -> Acceptance:
        """Replay all trajectories with the module's drafter."""
        with module.whole_drafter() as drafter:
            return replay(drafter, self.trajectories, self.settings.num_slots or drafter.num_slots)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.watch.start()

    @property
    def measured_at(self) -> int:
        """Optimizer step of the newest measurement, -1 before the first."""
        return self.history[-1]["step"] if self.history else -1

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        step, every = trainer.global_step, self.settings.every
        last = step >= trainer.max_steps > 0
        # There may be seconds left, and the run that goes on measures; from the last step none goes on.
        if cast(DrafterModule, pl_module).stopping and not last:
            return
        if step and step != self.measured_at and (last or (every and step % every == 0)):
            self._note(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A run that its time limit stopped is measured where it stopped.
        stopping = cast(DrafterModule, pl_module).stopping
        if not stopping and trainer.global_step and trainer.global_step != self.measured_at:
            self._note(trainer, pl_module)
        self.watch.stop()

    def _note(self, trainer: Trainer, module: LightningModule) -> None:
        """Measure, and log straight to the loggers: Lightning's own logging drops values between its logging steps."""
        seconds, cpu_seconds = self.watch.stop()
        module = cast(DrafterModule, module)
        found = self.measure(module)
        self.watch.start()
        step, seen = trainer.global_step, module.tokens_seen
        values = {"tau": found.tau} | {f"tau/{domain}": tau for domain, tau in found.domains.items()}
        values |= {f"alpha/{k + 1}": alpha for k, alpha in enumerate(found.alpha)}
        for logger in trainer.loggers:
            logger.log_metrics(values | {"tokens": float(seen)}, step=step)
        reached = {"step": step, "tokens": seen, "seconds": round(seconds, 3), "cpu_seconds": round(cpu_seconds, 3)}
        self.history.append(reached | {"tau": found.tau, "domains": found.domains, "alpha": found.alpha})
        if trainer.is_global_zero:
            Console().print(f"step {step}: tau {found.tau:.3f} after {seen} answer tokens", highlight=False)

    def state_dict(self) -> dict[str, Any]:
        return {"history": self.history, "seconds": self.watch.shown}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history = state_dict["history"]
        self.watch.set(*state_dict["seconds"])
