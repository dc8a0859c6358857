"""Native MTP heads: out of a target's checkpoint as a drafter of ours, and back into it.

extract reads the head's tensors alone, never the whole model. stitch writes the target once more with the head's
tensors replaced in place: an untouched head gives the same bytes, a trained one differs in its own tensors only. A
target without a native head gets one in MiMo's layout (checkpoints/native_wrap.py).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from checkpoints.engine_entry import PROVENANCE
from checkpoints.files import write_json, write_text
from checkpoints.folder import CARD, Whole, drafter_class, save_drafter
from checkpoints.native_experts import fuse_experts, one_by_one, split_experts
from checkpoints.native_files import CONFIG, Checkpoint, companions, copy_file, replace_tensors, unquantised
from checkpoints.native_layouts import (
    BLOCK,
    MODEL_TYPES,
    Layout,
    State,
    declared_modules,
    layout_of,
    own_modules,
    own_prefix,
)
from checkpoints.target_files import INDEX
from drafters.contract import Drafter, TargetParts

ARCHITECTURE = "mtp"


@dataclass(frozen=True)
class Native:
    """A native head found in a checkpoint. modules: for each, native name to our name within the module, without
    copies of the target's embedding and head; copies: native name to "embedding" or "head"."""

    layout: Layout
    modules: list[dict[str, str]]
    copies: dict[str, str]

    @property
    def names(self) -> list[str]:
        return [name for module in self.modules for name in module]


def find_native(checkpoint: Checkpoint) -> Native | None:
    """The native head of a checkpoint, None when it has none. ValueError when config.json declares modules whose
    tensors are not there, or the layout's tensors are incomplete (each missing one is named)."""
    layout = layout_of(checkpoint.config)
    if layout is None:
        return None
    declared = declared_modules(layout, checkpoint.config)
    modules: list[dict[str, str]] = []
    copies: dict[str, str] = {}
    while declared is None or len(modules) < declared:
        root = layout.root(checkpoint.files, len(modules), checkpoint.depth)
        if root is None:
            break
        module: dict[str, str] = {}
        for name in sorted(checkpoint.files):
            if name.startswith(root):
                own = layout.own_name(name.removeprefix(root))
                if own is None:
                    copies[name] = layout.copies[name.removeprefix(root)]
                else:
                    module[name] = own
        _complete(checkpoint, layout, module, root)
        modules.append(module)
        if layout.one_module:
            break
    if declared is not None and len(modules) != declared:
        place = checkpoint.depth + len(modules) if layout.from_depth else len(modules)
        raise ValueError(
            f"{checkpoint.folder / CONFIG} declares {declared} MTP module(s), the tensors of {len(modules)} are there: "
            f"no {layout.roots[0].format(place=place)}*"
        )
    return Native(layout, modules, copies) if modules else None


def _complete(checkpoint: Checkpoint, layout: Layout, module: dict[str, str], root: str) -> None:
    """ValueError names every tensor that a module lacks: its own, and those that the target's last layer with
    self-attention has."""
    native = {own: name for name, own in layout.names.items()}
    missing = [root + native[own] for own in native if own not in module.values()]
    wanted = _layer_names(checkpoint)
    have = {own.removeprefix(BLOCK) for own in module.values() if own.startswith(BLOCK)}
    missing += [root + layout.block + name for name in sorted(wanted - have) if ".experts." not in name]
    if missing:
        raise ValueError(f"{checkpoint.folder}: the {layout.name} head lacks {', '.join(missing)}")


def _layer_names(checkpoint: Checkpoint) -> set[str]:
    """Tensor names inside the target's last decoder layer that has self-attention."""
    roots = ("model.layers.", "model.language_model.layers.", "language_model.model.layers.")
    layers: dict[int, set[str]] = {}
    for name in checkpoint.files:
        for root in roots:
            number, _, rest = name.removeprefix(root).partition(".")
            if name.startswith(root) and number.isdigit() and int(number) < checkpoint.depth:
                layers.setdefault(int(number), set()).add(rest)
    whole = [i for i, names in layers.items() if any(name.startswith("self_attn.") for name in names)]
    return layers[max(whole)] if whole else set()


@dataclass(frozen=True)
class Extracted:
    """A drafter folder made of a native head, what was read to make it, and notes."""

    folder: Path
    layout: str
    modules: int
    notes: list[str]


def extract(
    target: Path,
    out: Path,
    config: PretrainedConfig,
    identity: dict[str, Any],
    *,
    engine: str = "vllm",
    num_slots: int | None = None,
) -> Extracted:
    """Write the native head of the checkpoint in folder `target` as a drafter folder `out`.

    config: the target's text config. identity: of the target, for the drafter's config.json. engine: whose served
    states the drafter reads and recycles. num_slots: None for 3 with one module; with several it is their number.
    ValueError when there is no head, it is incomplete or quantised, or its copies of the target's embedding or head
    are not the target's.
    """
    checkpoint = Checkpoint.open(target)
    native = find_native(checkpoint)
    if native is None:
        raise ValueError(
            f"{target} has no native MTP head (model type {checkpoint.config.get('model_type')!r}, known with one: "
            f"{', '.join(MODEL_TYPES)}); train a fresh one and stitch it in"
        )
    unquantised(checkpoint, native.names, "extract")
    for name, own, what in other_copies(checkpoint, native):
        raise ValueError(
            f"{checkpoint.folder}: {name} differs from {own}; our drafter shares the target's {what}, as engines do"
        )
    state = served(native.layout, engine)
    count = len(native.modules)
    settings = {
        "num_slots": num_slots or (count if count > 1 else 3),
        "modules": count,
        "reads": state.reads,
        "recycles": state.recycles,
        "zero_first": state.zero_first,
        "concat": native.layout.concat,
        "sharing": {"share": shared_keys(checkpoint, native)},
    }
    tensors = read_own(checkpoint, native)
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    drafter = _build(config, settings, tensors, dtype)
    data = {"extracted_from": str(target), "layout": native.layout.name, "engine": engine}
    save_drafter(out, drafter, target_identity=identity, data=data)
    notes = [f"{native.layout.name}: {count} module(s), {len(tensors)} tensors, as {engine} serves them ({state})"]
    if native.copies:
        notes.append(f"left out as equal to the target's own: {', '.join(sorted(native.copies))}")
    return Extracted(Path(out), native.layout.name, count, notes)


def served(layout: Layout, engine: str) -> State:
    """What an engine hands a head of this layout; ValueError names the engines that are known."""
    if engine not in layout.serves:
        raise ValueError(f"{engine} is not known to run {layout.name} heads; known: {', '.join(layout.serves)}")
    return layout.serves[engine]


def shared_keys(checkpoint: Checkpoint, native: Native) -> str:
    """The drafter's sharing.share as engines run this head: kv where its own indexer chooses positions at the first
    step and config.json lets the later ones keep to that choice (GLM-5.2)."""
    indexed = any(".indexer." in own for module in native.modules for own in module.values())
    return "kv" if indexed and checkpoint.text.get("index_share_for_mtp_iteration") else "none"


def other_copies(checkpoint: Checkpoint, native: Native) -> Iterator[tuple[str, str, str]]:
    """(name, the target's own name, embedding or head) of the head's copies that differ from the target's."""
    for name, what in sorted(native.copies.items()):
        own = checkpoint.embedding() if what == "embedding" else checkpoint.head()
        if not torch.equal(checkpoint.tensor(name), checkpoint.tensor(own)):
            yield name, own, what


def read_own(checkpoint: Checkpoint, native: Native) -> dict[str, Tensor]:
    """The head's tensors under our names: experts in one tensor, norms as they are multiplied."""
    found: dict[str, Tensor] = {}
    for k, module in enumerate(native.modules):
        tensors = {}
        for name, own in module.items():
            tensor = checkpoint.tensor(name)
            tensors[own] = tensor.float() + 1.0 if native.layout.is_offset(own) else tensor
        found |= {own_prefix(k) + own: tensor for own, tensor in fuse_experts(tensors).items()}
    return found


def _build(
    config: PretrainedConfig, settings: dict[str, Any], tensors: Mapping[str, Tensor], dtype: torch.dtype
) -> Drafter:
    """The drafter with these tensors; the target's embedding and head, which it shares, stay unread. ValueError when
    names or shapes are not those of the target's own layer in transformers."""
    shared = torch.empty(config.vocab_size, config.hidden_size, device="meta")
    parts = TargetParts(config=config, embedding=shared, norm=nn.Identity(), head=shared)
    drafter = drafter_class(ARCHITECTURE)(parts, None, **settings)
    try:
        drafter.load_state_dict({name: tensor.to(dtype) for name, tensor in tensors.items()}, assign=True)
    except RuntimeError as error:
        raise ValueError(f"the head does not fit {type(config).__name__}'s decoder layer: {error}") from error
    return drafter


def stitch(
    whole: Whole,
    target: Path,
    out: Path,
    *,
    engine: str = "vllm",
    link: bool = False,
    provenance: dict[str, Any] | None = None,
    card: str | None = None,
) -> list[str]:
    """Write folder `target` with the drafter's tensors as its native head into folder `out`; returns notes.

    engine: which one must run it. link: put symbolic links to files that do not change. provenance: written to
    headstart.json first; config.json comes last, so a folder without it was never whole. card: README.md in place of
    the target's, None to keep that one. ValueError when `out` holds
    something else, when the drafter is trained for other states, another order or other sharing than the engine
    serves, on tensors missing, left over or of other shapes, and on quantised heads.
    """
    from checkpoints.native_wrap import wrap  # it builds on this module

    checkpoint, out = Checkpoint.open(target), Path(out)
    native = find_native(checkpoint)
    _fits_target(whole, checkpoint)
    if native is None:
        return wrap(whole, checkpoint, out, engine=engine, link=link, provenance=provenance, card=card)
    agree(whole, native.layout, engine, len(native.modules), shared_keys(checkpoint, native))
    unquantised(checkpoint, native.names, "stitch")
    changed = changed_tensors(checkpoint, native, whole.tensors)
    claim(out, [checkpoint.folder, whole.folder], provenance)
    for file in sorted(set(checkpoint.files.values())):
        mine = {name: tensor for name, tensor in changed.items() if checkpoint.files[name] == file}
        if mine:
            replace_tensors(checkpoint.folder / file, out / file, mine)
        else:
            copy_file(checkpoint.folder / file, out / file, link)
    for path in companions(checkpoint.folder):
        copy_file(path, out / path.name, link)
    write_card(out, card)
    copy_file(checkpoint.folder / CONFIG, out / CONFIG, link=False)
    notes = [f"{native.layout.name}: {len(changed)} of {len(native.names)} MTP tensors changed, nothing else"]
    if len(native.modules) > 1 and engine == "vllm":
        notes.append("vLLM's V1 runner (CPU) uses the first module for every slot; its V2 runner uses all")
    return notes


def _fits_target(whole: Whole, checkpoint: Checkpoint) -> None:
    """ValueError when the drafter is no MTP drafter of a target of these sizes."""
    declared = whole.declared
    if declared.architecture != ARCHITECTURE:
        raise ValueError(f"{whole.folder} is a drafter of kind {declared.architecture!r}, not {ARCHITECTURE!r}")
    own, text = declared.target, checkpoint.text
    sizes = {"num_layers": checkpoint.depth} | {key: text.get(key) for key in ("hidden_size", "vocab_size")}
    wrong = [f"{key} {own.get(key)} against {size}" for key, size in sizes.items() if own.get(key) != size]
    if wrong:
        raise ValueError(
            f"{whole.folder} is for target {own.get('name')!r}, not for {checkpoint.folder}: {'; '.join(wrong)}"
        )


def agree(whole: Whole, layout: Layout, engine: str, modules: int, share: str = "none") -> None:
    """ValueError names every point in which the drafter was trained otherwise than the engine runs this layout. share:
    see shared_keys."""
    state, settings = served(layout, engine), whole.declared.settings
    wanted = {
        "concat": layout.concat,
        "reads": state.reads,
        "recycles": state.recycles,
        "zero_first": state.zero_first,
        "modules": modules,
    }
    reasons = [
        f"{key}: the drafter has {settings.get(key)!r}, {engine} serves {value!r}"
        for key, value in wanted.items()
        if settings.get(key) != value
    ]
    sharing = settings.get("sharing") or {}
    if sharing.get("share", "none") != share or sharing.get("top") is not None:
        seen = "the keys of all before it" if share == "none" else "what the head's indexer chose at the first (kv)"
        reasons.append(f"sharing: the drafter has {sharing}, {engine} lets every step see {seen}")
    if not whole.vocabulary.is_full:
        size = whole.vocabulary.target_size
        reasons.append(f"vocabulary: the drafter has {len(whole.vocabulary)} tokens, {engine} drafts all {size}")
    if reasons:
        raise ValueError(f"{whole.folder} cannot be a {layout.name} head in {engine}: " + "; ".join(reasons))


def changed_tensors(checkpoint: Checkpoint, native: Native, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Native name and new value of every tensor that is not what the checkpoint holds.

    A tensor of ours counts as unchanged when reading the checkpoint's gives it, in our dtype. ValueError on tensors
    missing or left over.
    """
    places = own_modules(tensors)
    changed: dict[str, Tensor] = {}
    for k, module in enumerate(native.modules):
        mine = {own: tensors[name] for name, (number, own) in places.items() if number == k}
        if one_by_one(module.values()):
            mine = split_experts(mine)
        missing, unknown = sorted(set(module.values()) - set(mine)), sorted(set(mine) - set(module.values()))
        if missing or unknown:
            raise ValueError(
                f"module {k} of the drafter and the {native.layout.name} head of {checkpoint.folder} differ: the "
                f"drafter lacks {', '.join(missing) or 'none'}; it has besides {', '.join(unknown) or 'none'}"
            )
        for name, own in module.items():
            old, new, offset = checkpoint.tensor(name), mine[own], native.layout.is_offset(own)
            if new.shape != old.shape:
                raise ValueError(f"{own} is {tuple(new.shape)}, {name} of the target is {tuple(old.shape)}")
            if not torch.equal((old.float() + 1.0 if offset else old).to(new.dtype), new):
                changed[name] = (new.float() - 1.0 if offset else new).to(old.dtype)
    beyond = sorted(name for name, (number, _) in places.items() if number >= len(native.modules))
    if beyond:
        raise ValueError(f"the target has {len(native.modules)} module(s), the drafter also has {', '.join(beyond)}")
    return changed


def claim(out: Path, sources: list[Path], provenance: dict[str, Any] | None) -> None:
    """Make `out` ready: new, empty, or an earlier folder of ours, which is emptied. ValueError when it is anything
    else, or one of the sources."""
    for source in sources:
        if out.resolve() == source.resolve():
            raise ValueError(f"{out} would be overwritten by what is made from it")
    if out.exists():
        if not out.is_dir() or (any(out.iterdir()) and not (out / PROVENANCE).exists()):
            raise ValueError(f"{out} is there already and not written by headstart; choose another folder")
        (out / CONFIG).unlink(missing_ok=True)
        for path in [*out.glob("*.safetensors"), out / INDEX]:
            path.unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / PROVENANCE, provenance or {"stitched": True})


def write_card(out: Path, card: str | None) -> None:
    """README.md of a stitched folder, over the target's copy or link; None leaves what is there."""
    if card is not None:
        write_text(out / CARD, card)
