"""What a run writes beside its outputs, and how its settings are read: strictly.

Hydra composes; a dataclass per component validates. After that no code sees a DictConfig.
"""

import dataclasses
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from omegaconf import DictConfig, OmegaConf

from checkpoints.files import write_json
from checkpoints.redact import without_secrets

T = TypeVar("T")
PACKAGES = ("torch", "lightning", "transformers", "datasets", "accelerate", "hydra-core", "safetensors", "wandb")
ROOT = Path(__file__).resolve().parent.parent


def settings(cls: type[T], config: DictConfig | dict[str, Any], where: str) -> T:
    """Build dataclass `cls` from one config group. ValueError names unknown and missing keys, and where they stand."""
    plain = OmegaConf.to_container(config, resolve=True) if isinstance(config, DictConfig) else dict(config)
    values = cast(dict[str, Any], plain)
    known = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ValueError(f"unknown key(s) in {where}: {', '.join(unknown)}; allowed: {', '.join(known)}")
    required = [
        name
        for name, field in known.items()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    missing = sorted(set(required) - set(values))
    if missing:
        raise ValueError(f"missing key(s) in {where}: {', '.join(missing)}")
    return cls(**values)


def known_groups(config: DictConfig, *names: str) -> None:
    """Refuse top-level groups that this command does not read."""
    unknown = sorted(set(map(str, config)) - set(names))
    if unknown:
        raise ValueError(f"unknown top-level key(s): {', '.join(unknown)}; this command reads {', '.join(names)}")


def record(folder: Path, config: DictConfig, **fingerprints: Any) -> None:
    """Write run.json: resolved config, command, git revision, package versions, machine, data and target
    fingerprints. Secrets are hidden."""
    found = without_secrets(
        {
            "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            "config": OmegaConf.to_container(config, resolve=True),
            "git": git_state(),
            "packages": {name: _version(name) for name in PACKAGES},
            "machine": machine(),
            "fingerprints": fingerprints,
        }
    )
    write_json(Path(folder) / "run.json", found)


def machine() -> dict[str, Any]:
    """Python, processor and device in words, for every figure's caption."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {
        "python": platform.python_version(),
        "device": device,
        "cpus": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "native_bf16": native_bf16(),
    }


def native_bf16() -> bool:
    """Whether this machine multiplies bf16 matrices in hardware (CUDA 8.0+, AMX or AVX512-BF16); emulation is ~8x
    slower."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("amx_bf16") or capabilities.get("avx512_bf16"))


def git_state() -> dict[str, Any]:
    """Revision and whether tracked files differ from it; nulls outside a git checkout."""

    def git(*arguments: str) -> str | None:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    status = git("status", "--porcelain", "--untracked-files=no")
    return {"revision": git("rev-parse", "HEAD"), "dirty": bool(status) if status is not None else None}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
