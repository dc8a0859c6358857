"""The Lightning module: one training step for every drafter. The frozen target's parts are held, never saved."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from lightning import LightningModule
from rich.console import Console
from torch import Tensor

from data.module import PackedData
from drafters.contract import Batch, Drafter, TargetParts
from training.activations import Kept, waiting
from training.objectives import Objective, slot_terms
from training.optimizers import OptimizerSettings, build_optimizer, rate
from training.reduce import Window, divide_gradients, gradient_norm
from training.self_forcing import SelfForcing
from training.sharded import shard, whole


class DrafterModule(LightningModule):
    """Trains a drafter on packed batches.

    Losses are sums over supervised slots; `on_before_optimizer_step` divides gradients by the denominator of the whole
    accumulation window over all ranks. total_steps: optimizer steps of the whole run, for the schedule.
    self_forcing: puts the drafter's own drafts in the place of some batches (None: never). max_skipped: steps in a row
    whose loss or gradient is not finite that are skipped and counted; one more ends the run.

    row: what the last optimizer step has to log (`StepLog` takes it). stop_asked: set by a signal on any rank;
    stopping: all ranks know it, after the same step. autocast: compute in bfloat16 inside the step, where the strategy
    leaves that to the module. activations: what a step keeps of its forward pass (training.activations).
    """

    def __init__(
        self,
        drafter: Drafter,
        target: TargetParts,
        objective: Objective,
        optimizer: OptimizerSettings,
        total_steps: int,
        self_forcing: SelfForcing | None = None,
        max_skipped: int = 20,
    ) -> None:
        super().__init__()
        self.drafter, self.objective, self.settings, self.total_steps = drafter, objective, optimizer, total_steps
        objective.measures(drafter)  # an unknown measure is an error before the first step
        if self_forcing is not None:
            self_forcing.check(drafter)
        self._held = (target,)  # a tuple, so that Lightning neither saves nor moves it
        self.self_forcing = self_forcing
        self.window = Window()
        self.tokens_seen = self.skipped = self._in_a_row = 0
        self.max_skipped, self.autocast = max_skipped, False
        self.activations: Kept = "keep"
        self.row: dict[str, Tensor | float] = {}
        self.stop_asked = self.stopping = False
        self._started: tuple[float, int] | None = None

    @property
    def target(self) -> TargetParts:
        return self._held[0]

    def configure_model(self) -> None:
        if self.device_mesh is not None:
            shard(self, self.device_mesh)

    @contextmanager
    def whole_drafter(self) -> Iterator[Drafter]:
        """The drafter with all of its weights on this rank, outside a training step. Every rank must call it."""
        with whole(self):
            yield self.drafter

    def training_step(self, batch: Batch, step: int) -> Tensor:
        with torch.autocast(batch.tokens.device.type, torch.bfloat16) if self.autocast else nullcontext():
            if self.self_forcing is not None:
                batch = self.self_forcing(self.drafter, batch, batch.seed)
            with waiting(self.activations, batch.tokens.device):
                slots = self.drafter.slots(batch)
            terms = slot_terms(self.drafter, slots, batch, self.target, self.objective)
        self.window.add(
            loss=terms.loss,
            denominator=terms.denominator,
            offered=terms.offered,
            kept=terms.kept,
            overlap=terms.overlap,
            supervised=terms.supervised,
            tokens=(batch.turns > 0).sum(),
            stop=torch.full((), float(self.stop_asked), device=terms.loss.device),
            **{f"part/{name}": value for name, value in terms.parts.items()},
        )
        return terms.loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        sums = self.window.close()
        averaged = self.trainer.world_size * self.trainer.accumulate_grad_batches
        divide_gradients(self.parameters(), sums["denominator"], averaged)
        norm = gradient_norm(self.parameters())
        known = [sums["tokens"], sums["supervised"].sum(), sums["stop"], norm.to(sums["loss"]), sums["loss"]]
        tokens, slots, stop, size, loss = torch.stack(known).tolist()  # what the step tells the host, in one go
        self.stopping = stop > 0
        self.tokens_seen += int(tokens)
        if not math.isfinite(size) or not math.isfinite(loss):
            self._skip(loss, size)
            return
        self._in_a_row = 0
        self._report(sums, int(slots), size)

    def _skip(self, loss: float, norm: float) -> None:
        """Leave weights and optimizer as they are: both pass over parameters without a gradient. FloatingPointError
        after too many in a row."""
        for parameter in self.parameters():
            parameter.grad = None
        self.skipped, self._in_a_row = self.skipped + 1, self._in_a_row + 1
        window, data = self.trainer.accumulate_grad_batches, self.trainer.datamodule  # type: ignore[attr-defined]
        steps = range(self.global_step * window, (self.global_step + 1) * window)
        names = [name for step in steps for name in data.ids_at(step)] if isinstance(data, PackedData) else []
        what = f"loss {loss}, gradient norm {norm}"
        line = f"step {self.global_step} skipped, not finite: {what}; conversations {', '.join(names[:8])}"
        if self._in_a_row > self.max_skipped:
            raise FloatingPointError(
                f"{line}; {self._in_a_row} steps in a row, more than trainer.max_skipped {self.max_skipped}. The last "
                f"checkpoint holds finite weights: lower optimizer.lr, or look at these conversations"
            )
        self.row = {"loss": loss, "skipped": float(self.skipped), "grad_norm": norm}
        self.log("loss", loss, prog_bar=True, logger=False)
        if self.trainer.is_global_zero:
            Console().print(line, style="yellow", soft_wrap=True, highlight=False)

    def _report(self, sums: dict[str, Tensor], slots: int, norm: float) -> None:
        """Make the row of what the window summed; names carry no reduction because sums were divided here, once."""
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
        kept |= {"grad_norm": norm, "skipped": float(self.skipped)}
        kept |= {"tokens": float(self.tokens_seen), "lr": self.optimizers().param_groups[-1]["lr"]}  # type: ignore[union-attr]
        self.row = shown | kept
        self.log_dict(shown, prog_bar=True, logger=False)

    def configure_optimizers(self) -> Any:
        optimizer = build_optimizer(self.named_parameters(), self.settings)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate(self.settings, self.total_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        return batch.to(device, torch.float32)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint |= {"tokens_seen": self.tokens_seen, "skipped": self.skipped}
        if self.self_forcing is not None:
            checkpoint["self_forcing"] = self.self_forcing.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.tokens_seen, self.skipped = checkpoint["tokens_seen"], checkpoint.get("skipped", 0)
        if self.self_forcing is not None:
            self.self_forcing.load_state_dict(checkpoint["self_forcing"])
