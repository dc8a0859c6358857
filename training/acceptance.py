"""Tau while training: the drafter really drafts on held-out prompts, against the target's recorded greedy answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from lightning import Callback, LightningModule, Trainer

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

    `tau` is logged before checkpoints are considered, so the best checkpoint is the one that drafts best.
    """

    def __init__(self, trajectories: Sequence[Trajectory], settings: AcceptanceSettings) -> None:
        self.trajectories, self.settings = trajectories, settings
        self.history: list[dict[str, Any]] = []

    def measure(self, module: LightningModule) -> Acceptance:
        """Replay all trajectories with the module's drafter."""
        drafter = cast(Drafter, module.drafter)
        return replay(drafter, self.trajectories, self.settings.num_slots or drafter.num_slots)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        step, every = trainer.global_step, self.settings.every
        fresh = not self.history or self.history[-1]["step"] != step
        last = step >= trainer.max_steps > 0
        if step and fresh and (last or (every and step % every == 0)):
            self._log(self.measure(pl_module), step, pl_module)

    def _log(self, found: Acceptance, step: int, module: LightningModule) -> None:
        module.log("tau", found.tau, prog_bar=True)
        module.log_dict({f"tau/{domain}": tau for domain, tau in found.domains.items()})
        module.log_dict({f"alpha/{k + 1}": alpha for k, alpha in enumerate(found.alpha)})
        seen = module.tokens_seen
        self.history.append(
            {"step": step, "tokens": seen, "tau": found.tau, "domains": found.domains, "alpha": found.alpha}
        )

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
