"""The Lightning module: one training step for every drafter. The frozen target's parts are held, never saved."""

import time
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor

from drafters.contract import Batch, Drafter, TargetParts
from training.objectives import Objective, slot_terms
from training.optimizers import OptimizerSettings, build_optimizer, rate
from training.reduce import Window, divide_gradients
from training.self_forcing import SelfForcing


class DrafterModule(LightningModule):
    """Trains a drafter on packed batches.

    Losses are sums over supervised slots; `on_before_optimizer_step` divides gradients by the denominator of the whole
    accumulation window over all ranks. total_steps: optimizer steps of the whole run, for the schedule.
    self_forcing: puts the drafter's own drafts in the place of some batches (None: never).
    """

    def __init__(
        self,
        drafter: Drafter,
        target: TargetParts,
        objective: Objective,
        optimizer: OptimizerSettings,
        total_steps: int,
        self_forcing: SelfForcing | None = None,
    ) -> None:
        super().__init__()
        self.drafter, self.objective, self.settings, self.total_steps = drafter, objective, optimizer, total_steps
        objective.measures(drafter)  # an unknown measure is an error before the first step
        self._held = (target,)  # a tuple, so that Lightning neither saves nor moves it
        self.self_forcing = self_forcing
        self.window = Window()
        self.tokens_seen = 0
        self._started: tuple[float, int] | None = None

    @property
    def target(self) -> TargetParts:
        return self._held[0]

    def training_step(self, batch: Batch, step: int) -> Tensor:
        if self.self_forcing is not None:
            batch = self.self_forcing(self.drafter, batch, batch.seed // self.trainer.world_size)
        terms = slot_terms(self.drafter, self.drafter.slots(batch), batch, self.target, self.objective)
        self.window.add(
            loss=terms.loss,
            denominator=terms.denominator,
            offered=terms.offered,
            kept=terms.kept,
            overlap=terms.overlap,
            supervised=terms.supervised,
            tokens=(batch.turns > 0).sum(),
            **{f"part/{name}": value for name, value in terms.parts.items()},
        )
        return terms.loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        sums = self.window.close()
        averaged = self.trainer.world_size * self.trainer.accumulate_grad_batches
        divide_gradients(self.parameters(), sums["denominator"], averaged)
        self._report(sums)

    def _report(self, sums: dict[str, Tensor]) -> None:
        """Log what the window summed; names carry no reduction because sums were divided here, once."""
        self.tokens_seen += int(sums["tokens"])
        slots = int(sums["supervised"].sum())
        now = time.perf_counter()
        started, before = self._started or (now, 0)
        self._started = (started, before + slots) if self._started else (now, 0)
        alpha = sums["kept"] / sums["offered"].clamp_min(1)
        denominator = sums["denominator"].clamp_min(1e-12)
        shown: dict[str, Tensor | float] = {
            "loss": sums["loss"] / denominator,
            "tau_proxy": 1 + alpha.cumprod(0).sum(),
            "alpha_1": alpha[0],
            "slots_per_s": (before + slots) / (now - started) if now > started else 0.0,
        }
        kept = {f"alpha_train/{k + 1}": value for k, value in enumerate(alpha)}
        kept |= {f"overlap/{k + 1}": v for k, v in enumerate(sums["overlap"] / sums["supervised"].clamp_min(1))}
        kept |= {f"loss/{n[5:]}": v / denominator for n, v in sums.items() if n.startswith("part/")}
        kept |= {"tokens": float(self.tokens_seen), "lr": self.optimizers().param_groups[-1]["lr"]}  # type: ignore[union-attr]
        self.log_dict(shown, prog_bar=True)
        self.log_dict(kept)

    def configure_optimizers(self) -> Any:
        optimizer = build_optimizer(self.named_parameters(), self.settings)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate(self.settings, self.total_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        return batch.to(device)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["tokens_seen"] = self.tokens_seen
        if self.self_forcing is not None:
            checkpoint["self_forcing"] = self.self_forcing.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.tokens_seen = checkpoint["tokens_seen"]
        if self.self_forcing is not None:
            self.self_forcing.load_state_dict(checkpoint["self_forcing"])
