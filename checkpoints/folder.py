"""Our own drafter folder: model.safetensors (trained tensors and the vocabulary maps), README.md, and config.json last.

config.json declares everything a reader would otherwise guess, and the checksum of the tensors. Saving removes an old
config.json first and writes the new one last, so a folder without it, or whose checksum differs, was never whole.
"""

import importlib
import re
import warnings
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoints.card import card
from checkpoints.files import read_json, read_tensors, sha256_file, write_json, write_tensors, write_text
from checkpoints.weights import round_weights
from drafters.contract import Drafter, TargetParts
from drafters.vocabulary import DraftVocabulary

FORMAT, VERSION = "headstart-drafter", 1
LAYER_CONVENTION = "0 is the first decoder layer's output"
CONFIG, TENSORS, CARD = "config.json", "model.safetensors", "README.md"
SLOT_CONVENTIONS = ("anchor_first", "fill_in")
MAPS = ("d2t", "t2d")
MUST_AGREE = ("weights", "tokenizer", "num_layers", "hidden_size", "vocab_size")


@dataclass(frozen=True)
class Declared:
    """config.json of a drafter folder, all of it.

    architecture: module of the class in drafters/. settings: the class's plain arguments. target: identity of the
    target. layers: captured target layers. slots: num_slots and how a slot is laid out. vocabulary: size, target_size,
    fingerprint. rope: null for a drafter without rotary positions. data: chat template and thinking mode of the
    training data, and its fingerprint. measured: tau and the like at export. tensors: sha256 of model.safetensors.
    """

    format: str
    version: int
    architecture: str
    settings: dict[str, Any]
    target: dict[str, Any]
    layers: list[int]
    layer_convention: str
    last_hidden: bool
    num_slots: int
    slot_convention: str
    mask_token: int | None
    vocabulary: dict[str, Any]
    rope: dict[str, Any] | None
    dtype: str
    tensors: str
    data: dict[str, Any] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Whole:
    """A drafter folder as read: what it declares, its trained tensors, and its draft vocabulary."""

    folder: Path
    declared: Declared
    tensors: dict[str, Tensor]
    vocabulary: DraftVocabulary


def save_drafter(
    folder: Path,
    drafter: Drafter,
    *,
    target_identity: dict[str, Any],
    data: dict[str, Any] | None = None,
    measured: dict[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    tensors: dict[str, Tensor] | None = None,
) -> Path:
    """Write a drafter's folder; returns it. Tensors are the drafter's state dict (cast to `dtype` when given) and
    d2t, t2d.

    data: chat template, thinking mode, source of the training data. measured: tau and conditions. tensors: the state
    dict to write (None: the drafter's own), for one whose weights lie on several ranks. ValueError when the
    target's identity lacks a key, or the drafter's class does not live in a module of `drafters`.
    """
    folder = Path(folder)
    missing = [key for key in MUST_AGREE if target_identity.get(key) is None]
    if missing:
        raise ValueError(f"the target's identity lacks {', '.join(missing)}: a drafter must say which target it is for")
    trained = {name: tensor.detach() for name, tensor in (tensors or drafter.state_dict()).items()}
    clash = sorted(set(trained) & set(MAPS))
    if clash:
        raise ValueError(f"{type(drafter).__name__} names a tensor {clash[0]!r}, which is kept for the vocabulary maps")
    if dtype is not None:
        trained = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in trained.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).unlink(missing_ok=True)
    vocabulary = drafter.vocabulary
    write_tensors(folder / TENSORS, trained | {"d2t": vocabulary.d2t, "t2d": vocabulary.t2d}, {"format": "pt"})
    declared = _declare(drafter, trained, target_identity, sha256_file(folder / TENSORS), data or {}, measured or {})
    write_text(folder / CARD, card(declared))
    write_json(folder / CONFIG, asdict(declared))
    return folder


def _declare(
    drafter: Drafter,
    trained: dict[str, Tensor],
    identity: dict[str, Any],
    checksum: str,
    data: dict[str, Any],
    measured: dict[str, Any],
) -> Declared:
    settings = drafter.settings()
    convention = getattr(drafter, "slot_convention", "anchor_first")
    if convention not in SLOT_CONVENTIONS:
        raise ValueError(f"slot convention must be one of {', '.join(SLOT_CONVENTIONS)}, got {convention!r}")
    layer = getattr(drafter, "layer_config", None)
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in trained.values() if tensor.is_floating_point()}
    if len(dtypes) != 1:
        raise ValueError(f"a drafter's tensors must share one dtype, got {', '.join(sorted(dtypes)) or 'no tensor'}")
    return Declared(
        format=FORMAT,
        version=VERSION,
        architecture=architecture_of(type(drafter)),
        settings=settings,
        target=dict(identity),
        layers=list(drafter.needs.layers),
        layer_convention=LAYER_CONVENTION,
        last_hidden=drafter.needs.last_hidden,
        num_slots=drafter.num_slots,
        slot_convention=convention,
        mask_token=getattr(drafter, "mask_token", None),
        vocabulary={
            "size": len(drafter.vocabulary),
            "target_size": drafter.vocabulary.target_size,
            "fingerprint": drafter.vocabulary.fingerprint,
        },
        rope=None if layer is None else dict(layer.rope_parameters),
        dtype=dtypes.pop(),
        tensors=checksum,
        data=data,
        measured=measured,
    )


def read_drafter(folder: Path) -> Whole:
    """Read a drafter folder without its target. ValueError on a half-written folder, unknown or missing key, a
    changed or missing map, or another format version."""
    folder = Path(folder)
    if not (folder / CONFIG).exists():
        raise ValueError(f"{folder} is no drafter folder, or was never written whole: it has no {CONFIG}")
    values = read_json(folder / CONFIG)
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        found = values.get("format") if isinstance(values, dict) else type(values).__name__
        raise ValueError(f"{folder / CONFIG} has format {found!r}, not {FORMAT!r}; `action=import` reads foreign heads")
    if values.get("version") != VERSION:
        raise ValueError(f"{folder / CONFIG} has version {values.get('version')!r}; this code reads version {VERSION}")
    known = [f.name for f in fields(Declared)]
    unknown, missing = sorted(set(values) - set(known)), sorted(set(known) - set(values))
    if unknown or missing:
        raise ValueError(
            f"{folder / CONFIG}: unknown key(s) {', '.join(unknown) or 'none'}; "
            f"missing key(s) {', '.join(missing) or 'none'}"
        )
    declared = Declared(**values)
    if declared.layer_convention != LAYER_CONVENTION:
        raise ValueError(
            f"{folder}: layer convention {declared.layer_convention!r}, this code knows {LAYER_CONVENTION!r}"
        )
    tensors = read_tensors(folder / TENSORS)
    found = sha256_file(folder / TENSORS)
    if found != declared.tensors:
        raise ValueError(f"{folder / TENSORS} has checksum {found[:16]}, {CONFIG} declares {declared.tensors[:16]}")
    return Whole(folder, declared, tensors, _vocabulary(folder, declared, tensors))


def _vocabulary(folder: Path, declared: Declared, tensors: dict[str, Tensor]) -> DraftVocabulary:
    """Take the two maps out of `tensors` and check them against each other and against the declared fingerprint."""
    missing = [name for name in MAPS if name not in tensors]
    if missing:
        raise ValueError(f"{folder / TENSORS} lacks the vocabulary map(s) {', '.join(missing)}")
    d2t, t2d = (tensors.pop(name) for name in MAPS)
    vocabulary = DraftVocabulary.from_offsets(d2t, int(declared.vocabulary["target_size"]))
    if not torch.equal(vocabulary.t2d, t2d):
        raise ValueError(f"{folder / TENSORS}: d2t and t2d name different tokens")
    if vocabulary.fingerprint != declared.vocabulary["fingerprint"] or len(vocabulary) != declared.vocabulary["size"]:
        raise ValueError(
            f"{folder}: the maps hold vocabulary {vocabulary.fingerprint} of {len(vocabulary)} tokens, "
            f"{CONFIG} declares {declared.vocabulary['fingerprint']} of {declared.vocabulary['size']}"
        )
    return vocabulary


def load_drafter(
    folder: Path, target: TargetParts, dtype: torch.dtype | None = None, weights: str | None = None
) -> Drafter:
    """Rebuild a drafter on its target, in eval mode, on the device of the target's embedding.

    dtype: of the parameters; None follows the target's embedding, as engines do. weights: round the projections to what
    this form holds (checkpoints.weights). ValueError when the target is another
    one (both sides named), or when tensors are unknown, missing or of another shape.
    """
    whole = read_drafter(folder)
    check_target(whole, target.identity)
    if weights is not None:
        whole = replace(whole, tensors=round_weights(whole.tensors, weights))
    drafter = build(whole, target)
    return drafter.to(device=target.embedding.device, dtype=dtype or target.embedding.dtype).eval()


def build(whole: Whole, target: TargetParts) -> Drafter:
    """The drafter that `whole` declares, with its tensors, strictly."""
    declared = whole.declared
    cls = drafter_class(declared.architecture)
    try:
        drafter = cls(target, whole.vocabulary, **declared.settings)
    except TypeError as error:
        raise ValueError(f"{whole.folder}: settings do not fit {cls.__name__}: {error}") from error
    if list(drafter.needs.layers) != declared.layers or drafter.num_slots != declared.num_slots:
        raise ValueError(
            f"{whole.folder}: settings give layers {list(drafter.needs.layers)} and {drafter.num_slots} slots, "
            f"{CONFIG} declares {declared.layers} and {declared.num_slots}"
        )
    own = drafter.state_dict()
    missing, unknown = sorted(set(own) - set(whole.tensors)), sorted(set(whole.tensors) - set(own))
    if missing or unknown:
        raise ValueError(
            f"{whole.folder}: tensor(s) missing for {cls.__name__}: {', '.join(missing) or 'none'}; "
            f"unknown: {', '.join(unknown) or 'none'}"
        )
    for name, tensor in whole.tensors.items():
        if tensor.shape != own[name].shape:
            raise ValueError(
                f"{whole.folder}: {name} is {tuple(tensor.shape)}, "
                f"{cls.__name__} on this target wants {tuple(own[name].shape)}"
            )
    drafter.load_state_dict(whole.tensors)
    return drafter


def check_target(whole: Whole, identity: dict[str, Any] | None) -> None:
    """ValueError when `identity` is not the declared target; a different chat template only warns."""
    declared = whole.declared.target
    if identity is None:
        raise ValueError(f"{whole.folder} is for {declared.get('name')!r}, the target given has no identity to compare")
    different = [
        f"{key}: the drafter has {declared.get(key)!r}, the target {identity.get(key)!r}"
        for key in MUST_AGREE
        if declared.get(key) != identity.get(key)
    ]
    if different:
        raise ValueError(
            f"{whole.folder} was trained for target {declared.get('name')!r}, got {identity.get('name')!r}; "
            + "; ".join(different)
        )
    if declared.get("chat_template") != identity.get("chat_template"):
        warnings.warn(
            f"{whole.folder} was trained with chat template {declared.get('chat_template')}, this target has "
            f"{identity.get('chat_template')}: acceptance may differ",
            stacklevel=3,
        )


def architecture_of(cls: type[Drafter]) -> str:
    """Module name of a drafter's class; ValueError when it does not live directly in `drafters`."""
    package, _, module = cls.__module__.rpartition(".")
    if package != "drafters":
        raise ValueError(
            f"{cls.__name__} lives in {cls.__module__!r}; a saved drafter's class lives in drafters/<name>.py"
        )
    return module


def drafter_class(architecture: str) -> type[Drafter]:
    """The one Drafter subclass defined in drafters/<architecture>.py; ValueError when there is none or several."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", architecture):
        raise ValueError(f"architecture must be a module name of drafters/, got {architecture!r}")
    name = f"drafters.{architecture}"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ValueError(f"no drafter architecture {architecture!r}: there is no drafters/{architecture}.py") from error
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Drafter) and value.__module__ == name
    ]
    if len(found) != 1:
        raise ValueError(f"{name} must define exactly one Drafter, it defines {len(found)}")
    return found[0]
