"""What training keeps: last.ckpt to resume from, the drafter with the best tau, and the rows of its curves."""

import os
import shutil
import signal
import threading
import zipfile
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import Timer
from omegaconf import DictConfig
from rich.console import Console
from torch import Tensor

from checkpoints.files import write_json
from checkpoints.folder import save_drafter
from training.acceptance import AcceptanceCallback
from training.marks import marked, refuse_other
from training.module import DrafterModule
from training.ranks import agree, all_gathered, launched_outside
from training.sharded import gathered

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # what schedulers send before they take the machine away
STOPPED = 128 + signal.SIGTERM


class Preempted(SystemExit):
    """A signal ended the run after a step that is in last.ckpt: exit code 143. A process that Lightning itself started
    exits with 0, for its parent would take anything else as a crash."""

    def __init__(self, last: Path, trainer: Trainer) -> None:
        child = trainer.local_rank > 0 and not launched_outside()
        super().__init__(0 if child else STOPPED)
        if trainer.is_global_zero:
            step = f"stopped by a signal after step {trainer.global_step}"
            Console().print(f"{step}; the same command goes on from {last}", soft_wrap=True, highlight=False)


class AtomicCheckpoints(TorchCheckpointIO):
    """Checkpoints that are whole or absent: written beside their name, flushed, then renamed. OSError when that fails,
    on a full disk as an example; the checkpoint before it stays."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        final = Path(path)
        temporary = final.with_name(f".tmp-{final.name}")
        try:
            super().save_checkpoint(checkpoint, temporary, storage_options)
            with open(temporary, "rb") as handle:
                os.fsync(handle.fileno())
            os.replace(temporary, final)
        except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError when a write fails
            temporary.unlink(missing_ok=True)
            kept = "the one before it is whole" if final.exists() else "there is none yet"
            raise OSError(f"checkpoint {final} could not be written, {kept}: {error}; free space, run again") from error


class WindowTimer(Timer):
    """Lightning's time limit, which is up only between optimizer steps: a checkpoint inside an accumulation window
    would lose the gradient of its first micro-steps."""

    def on_train_batch_end(self, trainer: Trainer, *rest: Any, **named: Any) -> None:
        if (trainer.fit_loop.total_batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            super().on_train_batch_end(trainer, *rest, **named)


class StepLog(Callback):
    """Logs every `every`-th optimizer step's row. It stands before the Keeper: Lightning's own logging comes after all
    callbacks, so a run killed between the two would go on from a checkpoint whose step no file holds."""

    def __init__(self, every: int) -> None:
        self.every = every

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        module = cast(DrafterModule, pl_module)
        row, module.row = module.row, {}  # empty inside an accumulation window
        if not row or trainer.global_step % self.every:
            return
        tensors = {name: value for name, value in row.items() if isinstance(value, Tensor)}
        values = row | dict(zip(tensors, torch.stack(list(tensors.values())).tolist() if tensors else (), strict=True))
        for logger in trainer.loggers:
            logger.log_metrics(cast(dict[str, float], values), step=trainer.global_step)


class Keeper(Callback):
    """Writes checkpoints/last.ckpt every `every` optimizer steps and at each measurement, and best-STEP/ whenever tau
    rises. Every rank knows the best; rank 0 writes it.

    run: fingerprints of what a resumed run must share (target weights, data, draft vocabulary, a stage's
    frozen half).
    """

    def __init__(
        self,
        out: Path,
        config: DictConfig,
        acceptance: AcceptanceCallback,
        target_identity: dict[str, Any],
        data: dict[str, Any],
        run: dict[str, str],
        every: int,
    ) -> None:
        self.out, self.acceptance, self.identity, self.data, self.every = out, acceptance, target_identity, data, every
        self.config = marked(config, run)
        self.best: dict[str, Any] | None = None
        self._written = self._now(-1)
        self._stale: list[Path] = []

    @property
    def last(self) -> Path:
        return self.out / "checkpoints" / "last.ckpt"

    def _now(self, step: int) -> tuple[int, int]:
        """What a checkpoint of this moment knows: the optimizer step and that of the newest measurement."""
        return step, self.acceptance.measured_at

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Ranks of torchrun and srun are started one by one: nothing else would notice two folders or two settings.
        agree({"run folder": str(self.out)} | self.config)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if threading.current_thread() is threading.main_thread():  # Lightning restores handlers when training ends
            for number in STOP_SIGNALS:
                signal.signal(number, partial(ask_to_stop, cast(DrafterModule, pl_module)))
        # The step resumed from is written already; writing it again inside a window would lose that window's gradient.
        self._written = self._now(trainer.global_step)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        step = trainer.global_step
        if cast(DrafterModule, pl_module).stopping and step != self._written[0]:
            self._keep(trainer, pl_module, step)
            trainer.should_stop = True
        elif step != self._written[0] and (self.acceptance.measured_at == step or step % self.every == 0):
            self._keep(trainer, pl_module, step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A run that its time limit stopped was measured at its last step, maybe after that step was written.
        if self._written != self._now(trainer.global_step):
            self._keep(trainer, pl_module, trainer.global_step)

    def _keep(self, trainer: Trainer, module: LightningModule, step: int) -> None:
        if self.acceptance.measured_at == step:
            self._keep_best(cast(DrafterModule, module), trainer.is_global_zero)
        self._written = self._now(step)
        for logger in trainer.loggers:  # what a checkpoint is past, a killed run must not have kept in memory alone
            logger.save()
        trainer.save_checkpoint(self.last, weights_only=False)
        # Only now does a checkpoint know the new best, so only now may the old one go.
        while self._stale and trainer.is_global_zero:
            shutil.rmtree(self._stale.pop(), ignore_errors=True)

    def _keep_best(self, module: DrafterModule, writes: bool) -> None:
        mine = self.acceptance.history[-1]
        # Ranks may measure a little differently, and gathering weights is work of all of them or none: rank 0 decides.
        found = next(iter(all_gathered(mine)), mine)
        if self.best is not None and found["tau"] <= self.best["tau"]:
            return
        folder = self.out / f"best-{found['step']:08d}"
        tensors = gathered(module.drafter)
        if writes:
            # Not the seconds: equal runs leave equal folders, on a busy machine too.
            measured = {name: value for name, value in found.items() if not name.endswith("seconds")}
            save_drafter(
                folder,
                module.drafter,
                target_identity=self.identity,
                data=self.data,
                measured=measured,
                tensors=tensors,
            )
        if self.best is not None and self.best["folder"] != folder.name:
            self._stale.append(self.out / self.best["folder"])
        self.best = found | {"folder": folder.name}

    def finish(self, trainer: Trainer) -> dict[str, Any]:
        """Copy the best drafter to drafter/, write learning_curve.json, and return the best measurement. RuntimeError
        when tau was never measured; Preempted when a signal ended the run."""
        if cast(DrafterModule, trainer.lightning_module).stopping:
            raise Preempted(self.last, trainer)
        if self.best is None:
            raise RuntimeError("tau was never measured: the run ended before its first measurement")
        final, staged = self.out / "drafter", self.out / ".tmp-drafter"
        if trainer.is_global_zero:
            shutil.rmtree(staged, ignore_errors=True)
            shutil.copytree(self.out / self.best["folder"], staged)
            shutil.rmtree(final, ignore_errors=True)
            os.replace(staged, final)
            write_json(self.out / "learning_curve.json", self.acceptance.history)
        return self.best | {"drafter": str(final)}

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        best = state_dict["best"]
        # A checkpoint of another folder brings no best drafter along: the next measurement begins anew.
        self.best = best if best and (self.out / best["folder"]).exists() else None

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["config"] = self.config

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        refuse_other(checkpoint["config"], self.config, "the checkpoint")


def ask_to_stop(module: DrafterModule, *_: Any) -> None:
    """A signal handler: the step that now runs is finished and agreed on by all ranks first."""
    module.stop_asked = True


def resume_point(resume: str | None, out: Path) -> str | None:
    """The checkpoint to go on from: null never, "auto" this folder's last.ckpt if there is one, else the path given.
    ValueError names one that is not there or not as it was written."""
    if resume is None:
        return None
    last = out / "checkpoints" / "last.ckpt"
    if resume == "auto" and not last.exists():
        return None
    path = last if resume == "auto" else Path(resume)
    if not path.exists():
        raise ValueError(f'resume must be null, "auto" or a checkpoint that exists, got {resume!r}')
    check_whole(path)
    return str(path)


def check_whole(path: Path) -> None:
    """ValueError unless every part of a checkpoint has the checksum that it was written with."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, OSError, EOFError) as error:
        damaged = str(error)
    if damaged is not None:
        raise ValueError(
            f"{path} is damaged ({damaged}): give resume=PATH of a whole checkpoint, or resume=null in another folder"
        )
