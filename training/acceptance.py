"""Tau while training: the drafter really drafts on held-out prompts, against the target's recorded greedy answers."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from lightning import Callback, LightningModule, Trainer
from rich.console import Console

from drafters.contract import Drafter
from eval.replay import Acceptance, Trajectory, replay


@dataclass(frozen=True)
class AcceptanceSettings:
    """every: optimizer steps between measurements (0: only at the end). prompts: held-out prompts, spread over domains.
    max_new_tokens: of each greedy answer. num_slots: K drafted (0: the drafter's own)."""

    every: int = 100
    prompts: int = 40
    max_new_tokens: int = 96
    num_slots: int = 0


class AcceptanceCallback(Callback):
    """Measures tau every `every` optimizer steps and at the end; logs tau, tau by domain and alpha_k.

    It stands before the Keeper in the trainer's callbacks, so the best drafter is the one that drafts best.
    """

    def __init__(self, trajectories: Sequence[Trajectory], settings: AcceptanceSettings) -> None:
        self.trajectories, self.settings = trajectories, settings
        self.history: list[dict[str, Any]] = []
        self._seconds = 0.0  # of training up to `_began`, the moment from which the clock runs (None: it stands)
        self._began: float | None = None

    def measure(self, module: LightningModule) -> Acceptance:
        """Replay all trajectories with the module's drafter."""
        drafter = cast(Drafter, module.drafter)
        return replay(drafter, self.trajectories, self.settings.num_slots or drafter.num_slots)

    @property
    def seconds(self) -> float:
        """Seconds of training so far, resumed runs' earlier ones included, measurements of tau left out."""
        return self._seconds + (0.0 if self._began is None else time.perf_counter() - self._began)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began = time.perf_counter()

    @property
    def measured_at(self) -> int:
        """Optimizer step of the newest measurement, -1 before the first."""
        return self.history[-1]["step"] if self.history else -1

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        step, every = trainer.global_step, self.settings.every
        last = step >= trainer.max_steps > 0
        if step and step != self.measured_at and (last or (every and step % every == 0)):
            self._note(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A run that its time limit stopped is measured where it stopped.
        if trainer.global_step and trainer.global_step != self.measured_at:
            self._note(trainer, pl_module)
        self._seconds, self._began = self.seconds, None

    def _note(self, trainer: Trainer, module: LightningModule) -> None:
        """Measure, and log straight to the loggers: Lightning's own logging drops values between its logging steps."""
        seconds = self._seconds = self.seconds
        found = self.measure(module)
        self._began = time.perf_counter()
        step, seen = trainer.global_step, cast(int, module.tokens_seen)
        values = {"tau": found.tau} | {f"tau/{domain}": tau for domain, tau in found.domains.items()}
        values |= {f"alpha/{k + 1}": alpha for k, alpha in enumerate(found.alpha)}
        for logger in trainer.loggers:
            logger.log_metrics(values | {"tokens": float(seen)}, step=step)
        reached = {"step": step, "tokens": seen, "seconds": round(seconds, 3)}
        self.history.append(reached | {"tau": found.tau, "domains": found.domains, "alpha": found.alpha})
        if trainer.is_global_zero:
            Console().print(f"step {step}: tau {found.tau:.3f} after {seen} answer tokens", highlight=False)

    def state_dict(self) -> dict[str, Any]:
        return {"history": self.history, "seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history = state_dict["history"]
        self._seconds = state_dict.get("seconds", 0.0)
