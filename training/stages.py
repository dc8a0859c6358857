"""Stages of progressive self-forcing in order, each an ordinary training run.

    python -m training.stages prepared=outputs/prepare/... drafter=NAME +windows=[1,2,4] hydra.run.dir=outputs/mine

Leaves window-K/ for every window K, each a run's folder with its drafter/; the stage of K slots learns from the
drafter of K / 2 (training.progressive). +share, +start and +exact are the stages' own. The same command goes on where
it was stopped.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from checkpoints.errors import run_module
from checkpoints.run import known_groups
from training.train import GROUPS, run


def run_stages(config: DictConfig, out: Path, windows: Sequence[int], **stage: Any) -> list[dict[str, Any]]:
    """Train windows in order, each twice the one before. stage: share, start and exact of training.progressive.Stage.
    Returns what each run found. ValueError when windows do not double."""
    if not windows or any(b != 2 * a for a, b in zip(windows, windows[1:], strict=False)):
        raise ValueError(f"windows must double from stage to stage, as in [1,2,4], got {list(windows)}")
    found: list[dict[str, Any]] = []
    for window in windows:
        own = OmegaConf.create(OmegaConf.to_container(config, resolve=False))
        assert isinstance(own, DictConfig)
        own.drafter.model.num_slots = window
        if found:
            own.drafter.stage = {"half": found[-1]["drafter"], **stage}
        folder = out / f"window-{window}"
        folder.mkdir(parents=True, exist_ok=True)
        found.append({"window": window} | run(own, folder))
    return found


@hydra.main(version_base="1.3", config_path="pkg://conf", config_name="train")
def main(config: DictConfig) -> None:
    """All stages; prints where each drafter lies."""
    OmegaConf.set_struct(config, False)
    windows = config.pop("windows", [1, 2, 4])
    stage = {name: config.pop(name) for name in ("share", "start", "exact") if name in config}
    known_groups(config, *GROUPS)
    for one in run_stages(config, Path(HydraConfig.get().runtime.output_dir), list(windows), **stage):
        Console().print(f"window {one['window']}: greedy tau {one['tau']:.3f}: {one['drafter']}", soft_wrap=True)


if __name__ == "__main__":
    run_module("train", "training.stages")
