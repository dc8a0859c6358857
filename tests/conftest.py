"""Session-wide rules: this checkout is what is tested, no network hub, few threads, no tracking service."""

import importlib
import importlib.metadata
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("drafters", "checkpoints", "data", "eval", "training", "conf")


def pytest_configure(config: pytest.Config) -> None:
    """The folders have common names: refuse to test another distribution's `data` or `eval` by accident."""
    owners = importlib.metadata.packages_distributions()
    for name in PACKAGES:
        found = Path(importlib.import_module(name).__file__ or "").resolve().parent
        if found != ROOT / name:
            raise pytest.UsageError(f"`import {name}` finds {found}, not this checkout's {ROOT / name}")
        foreign = sorted(set(owners.get(name, [])) - {"headstart"})
        if foreign:
            raise pytest.UsageError(f"the package {name!r} is also installed by {', '.join(foreign)}; uninstall it")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
