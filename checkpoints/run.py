"""What a run writes beside its outputs, and how its settings are read: strictly.

Hydra composes; a dataclass per component validates. After that no code sees a DictConfig.
"""

import dataclasses
import importlib.metadata
import os
import platform
import subprocess
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from checkpoints.files import write_json
from checkpoints.redact import without_secrets

T = TypeVar("T")
# What a setting of a type is called where it is refused, and what it may be; a bool is no number.
KINDS: dict[Any, tuple[str, tuple[type, ...]]] = {
    bool: ("true or false", (bool,)),
    int: ("a whole number", (int,)),
    float: ("a number", (int, float)),
    str: ("text", (str,)),
    list: ("a list", (list, tuple)),
    dict: ("a mapping", (Mapping,)),
    types.NoneType: ("null", (types.NoneType,)),
}
PACKAGES = ("torch", "lightning", "transformers", "datasets", "accelerate", "hydra-core", "safetensors", "wandb")
ROOT = Path(__file__).resolve().parent.parent


def settings(cls: type[T], config: DictConfig | dict[str, Any], where: str) -> T:
    """Build dataclass `cls` from one config group. ValueError names unknown and missing keys, values of another type
    than the field's, and where they stand."""
    if isinstance(config, DictConfig):
        complete(config)
    elif not isinstance(config, Mapping):
        raise ValueError(f"{where} must be a mapping of keys, got {config!r}{_as_option(where, config)}")
    values = {
        str(name): OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        for name, value in config.items()
    }
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
    hints = get_type_hints(cls)
    for name, value in values.items():
        if not fits(value, hints[name]):
            raise ValueError(f"{where}.{name} must be {in_words(hints[name])}, got {value!r}")
    return cls(**values)


def complete(config: DictConfig) -> None:
    """ValueError names every value that only the user can give, and how."""
    if missing := sorted(OmegaConf.missing_keys(config)):
        verb = "needs a value" if len(missing) == 1 else "need values"
        raise ValueError(f"{', '.join(missing)} {verb}: {' '.join(f'{key}=...' for key in missing)}")


def fits(value: Any, hint: Any) -> bool:
    """Whether a plain value may stand in a field of this type; types that no yaml can hold are left to their class."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, types.UnionType):
        return any(fits(value, one) for one in inner)
    if kind is Literal:
        return value in inner
    if kind not in KINDS:
        return True
    if not isinstance(value, KINDS[kind][1]) or (isinstance(value, bool) and kind in (int, float)):
        return False
    held: Any = value.values() if kind is dict else value if kind is list else ()  # type: ignore[attr-defined]
    return all(fits(one, inner[-1]) for one in held) if inner else True


def in_words(hint: Any) -> str:
    """A field's type for a user."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, types.UnionType):
        return " or ".join(map(in_words, inner))
    if kind is Literal:
        return " or ".join(map(str, inner))
    named = KINDS[kind][0] if kind in KINDS else str(hint)
    return f"{named} (each {in_words(inner[-1])})" if kind is list and inner and inner[0] is not Any else named


def _as_option(where: str, value: Any) -> str:
    """How to choose an option of a group that stands under another name, as data does under heldout."""
    choices = HydraConfig.get().runtime.choices if HydraConfig.initialized() else {}
    groups = [group for group in choices if str(group).endswith(f"@{where}")]
    return "".join(f"; {group}={value} chooses an option" for group in groups)


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
