"""What a checkpoint remembers of its run's settings, and what a run that goes on from it may not have changed."""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from checkpoints.redact import HIDDEN, without_secrets
from data.embedded import EMBEDDED

# How a run is carried out, not what it computes.
FREE_TO_CHANGE = (
    "resume",
    "logger",
    "trainer.devices",
    "trainer.num_nodes",
    "trainer.strategy",
    "trainer.accelerator",
    "trainer.max_skipped",
    "trainer.activations",
    "target.device_map",
    "target.tp_plan",
    "batch.workers",
    "trainer.progress",
    "trainer.log_every",
    "trainer.max_minutes",
    "trainer.checkpoint_every",
)
# Settings that name a file or folder: two spellings of one place are equal.
PLACES = ("prepared", "init", "target.name", "heldout.path", "heldout.eval_path", "drafter.stage.half")
# Settings that a fingerprint says better, where both runs have it: weights that moved are the same weights.
SETTLED = {
    "target.name": "fingerprint.target",
    "target.revision": "fingerprint.target",
    "drafter.stage.half": "fingerprint.stage.half",
}
BARE = re.compile(r"[\w/.@+-]+")  # text that Hydra's command line takes without quotes,
READS_OTHERWISE = re.compile(r"null|true|false|nan|[+-]?(inf|[\d.][\d._]*(e[+-]?\d+)?)", re.IGNORECASE)  # unless so


def check_resumed(path: str | None, config: DictConfig, run: Mapping[str, str] | None = None) -> None:
    """ValueError when the checkpoint to go on from (None: there is none) was made with other settings. run:
    fingerprints of what a resumed run must share; while they are not known (None), what they settle is not compared."""
    if path is None:
        return
    old: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)["config"]
    new = marked(config, run or {})
    if run is None:
        waiting = {*SETTLED, *(key for key in old if key.startswith("fingerprint."))}
        old, new = ({key: value for key, value in one.items() if key not in waiting} for one in (old, new))
    refuse_other(old, new, path)


def refuse_other(old: dict[str, Any], new: dict[str, Any], where: str) -> None:
    """ValueError when a checkpoint's settings are not this run's: which differ, and what to type to go on."""
    if lines := difference(old, new):
        words = " ".join(overrides(old, new))
        onward = f"{words} goes on with them, another run folder starts anew" if words else "use another run folder"
        raise ValueError(f"{where} was made with other settings: {'; '.join(lines)}; {onward}")


def marked(config: DictConfig, run: Mapping[str, str]) -> dict[str, Any]:
    """Settings as a checkpoint keeps them, and the fingerprints of what a resumed run must share."""
    return without_secrets(plain(config)) | {f"fingerprint.{name}": value for name, value in run.items()}


def plain(config: DictConfig) -> dict[str, Any]:
    """The resolved config as {dotted key: value}; places that exist as whole paths."""

    def walk(value: Any, path: str) -> dict[str, Any]:
        if isinstance(value, dict) and value:
            return {
                k: v
                for name, inner in value.items()
                for k, v in walk(inner, f"{path}.{name}" if path else name).items()
            }
        return {path: place(path, value)}

    return walk(OmegaConf.to_container(config, resolve=True), "")


def place(key: str, value: Any) -> Any:
    """The one spelling of a setting that names an existing file or folder; any other value as it is."""
    if key not in PLACES or not isinstance(value, str) or value == EMBEDDED:
        return value
    path = Path(value).expanduser()
    return str(path.resolve()) if path.exists() else value


def difference(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Settings that changed and may not, one line each."""
    return [f"{key} {old.get(key)!r} is now {new.get(key)!r}" for key in changed(old, new)]


def changed(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Keys of settings that changed and may not. A fingerprint that a checkpoint is too old to have has no say."""
    unknown = {key for key in new.keys() - old.keys() if key.startswith("fingerprint.")}
    keys = [key for key in sorted((old.keys() | new.keys()) - unknown) if not key.startswith(FREE_TO_CHANGE)]
    settled = {key for key, mark in SETTLED.items() if mark in old and old[mark] == new.get(mark)}
    return [key for key in keys if key not in settled and place(key, old.get(key)) != place(key, new.get(key))]


def overrides(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What to type so that `new` has the values of `old`; nothing for fingerprints and hidden values."""
    words = []
    for key in changed(old, new):
        if key.startswith("fingerprint.") or old.get(key) == HIDDEN:
            continue
        if key in old and key in new:
            words.append(shlex.quote(f"{key}={in_hydra(old[key])}"))
        elif not any(other.startswith(f"{key}.") for other in old.keys() | new.keys()):  # an emptied or filled mapping
            words.append(shlex.quote(f"+{key}={in_hydra(old[key])}" if key in old else f"~{key}"))
    return words


def in_hydra(value: Any) -> str:
    """A value as Hydra's command line reads it."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{in_hydra(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(in_hydra, value)) + "]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if not isinstance(value, str) or (BARE.fullmatch(value) and not READS_OTHERWISE.fullmatch(value)):
        return str(value)
    return '"' + value.replace('"', '\\"') + '"'
