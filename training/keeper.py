"""What training keeps: last.ckpt to resume from, and the drafter with the best tau."""

import os
import shutil
from pathlib import Path
from typing import Any, cast

from lightning import Callback, LightningModule, Trainer
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from omegaconf import DictConfig, OmegaConf

from checkpoints.files import write_json
from checkpoints.folder import save_drafter
from drafters.contract import Drafter
from training.acceptance import AcceptanceCallback

FREE_TO_CHANGE = (
    "resume",
    "logger",
    "trainer.progress",
    "trainer.log_every",
    "trainer.max_minutes",
    "trainer.checkpoint_every",
)


class AtomicCheckpoints(TorchCheckpointIO):
    """Checkpoints that are whole or absent: written beside their name, flushed, then renamed."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        final = Path(path)
        temporary = final.with_name(f".tmp-{final.name}")
        super().save_checkpoint(checkpoint, temporary, storage_options)
        with open(temporary, "rb") as handle:
            os.fsync(handle.fileno())
        os.replace(temporary, final)


class Keeper(Callback):
    """Writes checkpoints/last.ckpt every `every` optimizer steps and at each measurement, and best-STEP/ whenever tau
    rises. Every rank knows the best; rank 0 writes it.

    run: fingerprints of what a resumed run must share (target weights, data, draft vocabulary).
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
        self.config = plain(config) | {f"fingerprint.{name}": value for name, value in run.items()}
        self.best: dict[str, Any] | None = None
        self._written = self._now(-1)
        self._stale: list[Path] = []

    @property
    def last(self) -> Path:
        return self.out / "checkpoints" / "last.ckpt"

    def _now(self, step: int) -> tuple[int, int]:
        """What a checkpoint of this moment knows: the optimizer step and that of the newest measurement."""
        return step, self.acceptance.measured_at

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The step resumed from is written already; writing it again inside a window would lose that window's gradient.
        self._written = self._now(trainer.global_step)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        step = trainer.global_step
        if step != self._written[0] and (self.acceptance.measured_at == step or step % self.every == 0):
            self._keep(trainer, pl_module, step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A run that its time limit stopped was measured at its last step, maybe after that step was written.
        if self._written != self._now(trainer.global_step):
            self._keep(trainer, pl_module, trainer.global_step)

    def _keep(self, trainer: Trainer, module: LightningModule, step: int) -> None:
        if self.acceptance.measured_at == step:
            self._keep_best(module, trainer.is_global_zero)
        self._written = self._now(step)
        trainer.save_checkpoint(self.last)
        # Only now does a checkpoint know the new best, so only now may the old one go.
        while self._stale and trainer.is_global_zero:
            shutil.rmtree(self._stale.pop(), ignore_errors=True)

    def _keep_best(self, module: LightningModule, writes: bool) -> None:
        found = self.acceptance.history[-1]
        if self.best is not None and found["tau"] <= self.best["tau"]:
            return
        folder = self.out / f"best-{found['step']:08d}"
        if writes:
            drafter = cast(Drafter, module.drafter)
            # Not the seconds: equal runs leave equal folders, on a busy machine too.
            measured = {name: value for name, value in found.items() if not name.endswith("seconds")}
            save_drafter(folder, drafter, target_identity=self.identity, data=self.data, measured=measured)
        if self.best is not None and self.best["folder"] != folder.name:
            self._stale.append(self.out / self.best["folder"])
        self.best = found | {"folder": folder.name}

    def finish(self, trainer: Trainer) -> dict[str, Any]:
        """Copy the best drafter to drafter/, write learning_curve.json, and return the best measurement. RuntimeError
        when tau was never measured."""
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
        if lines := difference(checkpoint["config"], self.config):
            raise ValueError(f"the checkpoint was made with other settings: {'; '.join(lines)}; use another run folder")


def resume_point(resume: str | None, out: Path) -> str | None:
    """The checkpoint to go on from: null never, "auto" this folder's last.ckpt if there is one, else the path given."""
    if resume is None:
        return None
    last = out / "checkpoints" / "last.ckpt"
    if resume == "auto":
        return str(last) if last.exists() else None
    if not Path(resume).exists():
        raise ValueError(f'resume must be null, "auto" or a checkpoint that exists, got {resume!r}')
    return str(resume)


def plain(config: DictConfig) -> dict[str, Any]:
    """The resolved config as {dotted key: value}."""

    def walk(value: Any, path: str) -> dict[str, Any]:
        if isinstance(value, dict) and value:
            return {
                k: v
                for name, inner in value.items()
                for k, v in walk(inner, f"{path}.{name}" if path else name).items()
            }
        return {path: value}

    return walk(OmegaConf.to_container(config, resolve=True), "")


def difference(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Settings that changed and may not, one line each."""
    keys = [key for key in sorted(old.keys() | new.keys()) if not key.startswith(FREE_TO_CHANGE)]
    return [f"{key} {old.get(key)!r} is now {new.get(key)!r}" for key in keys if old.get(key) != new.get(key)]
