"""Tau while training: the drafter really drafts on held-out prompts, against the target's recorded greedy answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from lightning import Callback, LightningModule, Trainer
from rich.console import Console

from data.target import Target
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

    def measure(self, module: LightningModule) -> Acceptance:
        """Replay all trajectories with the module's drafter."""
        drafter = cast(Drafter, module.drafter)
        return replay(drafter, self.trajectories, self.settings.num_slots or drafter.num_slots)

    @property
    def measured_at(self) -> int:
        """Optimizer step of the newest measurement, -1 before the first."""
        return self.history[-1]["step"] if self.history else -1

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        step, every = trainer.global_step, self.settings.every
        last = step >= trainer.max_steps > 0
        if step and step != self.measured_at and (last or (every and step % every == 0)):
            self._note(self.measure(pl_module), trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A run that its time limit stopped is measured where it stopped.
        if trainer.global_step and trainer.global_step != self.measured_at:
            self._note(self.measure(pl_module), trainer, pl_module)

    def _note(self, found: Acceptance, trainer: Trainer, module: LightningModule) -> None:
        """Log straight to the loggers: Lightning's own logging drops values between its logging steps."""
        step, seen = trainer.global_step, cast(int, module.tokens_seen)
        values = {"tau": found.tau} | {f"tau/{domain}": tau for domain, tau in found.domains.items()}
        values |= {f"alpha/{k + 1}": alpha for k, alpha in enumerate(found.alpha)}
        for logger in trainer.loggers:
            logger.log_metrics(values | {"tokens": float(seen)}, step=step)
        self.history.append(
            {"step": step, "tokens": seen, "tau": found.tau, "domains": found.domains, "alpha": found.alpha}
        )
        if trainer.is_global_zero:
            Console().print(f"step {step}: tau {found.tau:.3f} after {seen} answer tokens", highlight=False)

    def state_dict(self) -> dict[str, Any]:
        return {"history": self.history}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history = state_dict["history"]


@torch.inference_mode()
def trajectory(
    target: Target, prompt_ids: list[int], answer_ids: list[int], domain: str, layers: Sequence[int]
) -> Trajectory:
    """Features of a prompt and the target's greedy answer to it, in one forward."""
    tokens = torch.tensor([prompt_ids + answer_ids], device=target.device)
    features = target.forward(tokens, layers)
    return Trajectory(domain, tokens[0].clone(), len(prompt_ids), features.aux[0].clone(), features.last[0].clone())
