"""Heads of other tools as our own drafters. Here EAGLE-3 (SpecForge, speculators, the EAGLE repository, ModelOpt,
AngelSlim), EAGLE-1 and HASS (the EAGLE repository) and P-EAGLE (speculators, vLLM's plain folders);
checkpoints/foreign_block.py has the block drafters.

Key by key: every tensor and every setting that changes what the head computes is taken, checked or refused by name.
"""

from pathlib import Path

from torch import Tensor

from checkpoints.files import read_json
from checkpoints.folder import CONFIG, FORMAT, drafter_class, load_drafter
from checkpoints.foreign_block import import_block
from checkpoints.foreign_parts import check_targets_own, check_tensors, layer_of, own_vocabulary, without_maps
from checkpoints.layout import KNOWN, Convention, Head, num_features, read_head, stated_layers, stated_slots
from drafters.contract import Drafter, TargetParts, default_layers
from drafters.vocabulary import DraftVocabulary

NO_PARALLEL = ("norm_before_residual", "norm_before_fc", "attention_bias", "mlp_bias", "bias", "use_sliding_window")
MUST_BE_OFF = ("norm_before_fc", "attention_bias", "mlp_bias", "bias", "use_sliding_window", "parallel_drafting")


def open_head(folder: Path, target: TargetParts) -> Drafter:
    """A head as training or an export left it: a folder of ours, or one of the layouts that `import_head` reads.
    ValueError as `load_drafter` and `import_head`."""
    if read_json(folder / CONFIG).get("format") == FORMAT:
        return load_drafter(folder, target)
    drafter = import_head(folder, target)[0]
    return drafter.to(device=target.embedding.device, dtype=target.embedding.dtype).eval()


def import_head(
    folder: Path, target: TargetParts, *, num_slots: int | None = None, layer_convention: Convention | None = None
) -> tuple[Drafter, list[str]]:
    """A foreign head of any family that is read here, and one line for each thing that was decided. ValueError as the
    family's importer, and for a family without one."""
    family = read_head(folder).family
    if family == "eagle3":
        return import_eagle3(folder, target, num_slots=num_slots, layer_convention=layer_convention)
    if layer_convention is not None:
        raise ValueError(f"{folder}: layer_convention is for EAGLE-3; other layouts have one convention a key")
    if family == "block":
        return import_block(folder, target, num_slots=num_slots)
    if family == "peagle":
        return import_peagle(folder, target, num_slots=num_slots)
    if family == "eagle1":
        return import_eagle1(folder, target, num_slots=num_slots)
    if family == "model":
        raise ValueError(f"{folder} is an ordinary model: use it as drafter=independent drafter.model.path={folder}")
    raise ValueError(f"{folder} is a {family} head; import reads EAGLE, P-EAGLE and block drafters")


def import_eagle3(
    folder: Path, target: TargetParts, *, num_slots: int | None = None, layer_convention: Convention | None = None
) -> tuple[Drafter, list[str]]:
    """A foreign EAGLE-3 head as our drafter on `target`, and one line for each thing that was decided.

    num_slots: tokens to draft; None takes the file's own (speculators) or 3. layer_convention: how the file's layer ids
    count when it breaks its key's rule ("outputs" or "blocks_applied"). ValueError names every tensor left over or
    missing, every setting that our EAGLE-3 does not have, and a target of other sizes.
    """
    head = read_head(folder)
    _refuse(head, target)
    layers, place = _layers(head, target, layer_convention)
    vocabulary = own_vocabulary(head)
    tensors, notes = _own_tensors(head, target, vocabulary)
    slots = num_slots or stated_slots(head) or 3
    own_head = "lm_head.weight" in tensors
    drafter = drafter_class("eagle3")(
        target,
        vocabulary,
        num_slots=slots,
        layers=layers,
        head="own" if own_head else "target",
        switches=_switches(head),
        layer=layer_of(head),
    )
    _load(head, drafter, tensors)
    notes = [
        f"layout: {head.layout}",
        f"target layers {layers} ({place})",
        f"num_slots: {slots}",
        f"draft vocabulary: {len(drafter.vocabulary)} of {drafter.vocabulary.target_size} tokens",
        f"head: {'its own' if own_head else 'the target' + chr(39) + 's'}",
        *notes,
    ]
    return drafter, notes


def import_peagle(folder: Path, target: TargetParts, *, num_slots: int | None = None) -> tuple[Drafter, list[str]]:
    """A foreign P-EAGLE head as our drafter on `target`, as `import_eagle3` does it.

    ValueError also on an embedding that is not the target's, and on norm_before_residual: our P-EAGLE has neither.
    """
    head = read_head(folder)
    reasons = [f"{key} is on" for key in (*NO_PARALLEL, "fc_norm", "norm_output") if head.setting(key)]
    reasons += _other_sizes(head, target)
    mask = head.setting("mask_token_id", head.setting("pard_token"))
    if mask is None:
        reasons.append("mask_token_id is missing")
    if reasons:
        raise ValueError(f"cannot import {head.folder}: " + "; ".join(reasons))
    layers, place = _layers(head, target, None)
    vocabulary = own_vocabulary(head)
    tensors, notes = _own_tensors(head, target, vocabulary)
    if "mask_hidden" in tensors:
        tensors["mask_hidden"] = tensors["mask_hidden"].reshape(1, -1)  # SpecForge writes [1, 1, n]
    slots = num_slots or stated_slots(head) or 7
    drafter = drafter_class("peagle")(
        target,
        vocabulary,
        num_slots=slots,
        depth=head.body.get("num_hidden_layers", 4),
        layers=layers,
        head="own" if "lm_head.weight" in tensors else "target",
        layer=layer_of(head),
        mask_rows={"token": int(mask)},
    )
    _load(head, drafter, tensors)
    return drafter, [f"layout: {head.layout}, P-EAGLE", f"target layers {layers} ({place})", f"{slots} slots", *notes]


def import_eagle1(folder: Path, target: TargetParts, *, num_slots: int | None = None) -> tuple[Drafter, list[str]]:
    """A foreign EAGLE-1 (EAGLE-2, HASS) head as our drafter on `target`, and one line for each thing that was decided.

    num_slots: tokens to draft, None for 5. ValueError names every tensor left over or missing, every setting that our
    EAGLE-1 does not have, a target of other sizes, and an embedding or a head that is not the target's.
    """
    head = read_head(folder)
    reasons = [f"{key} is on" for key in ("attention_bias", "mlp_bias", "use_sliding_window") if head.setting(key)]
    if head.body.get("model_type", "llama") != "llama":
        reasons.append(f"the layer is of type {head.body['model_type']!r}, not llama")
    reasons += _other_sizes(head, target)
    if reasons:
        raise ValueError(f"cannot import {head.folder}: " + "; ".join(reasons))
    tensors, notes = _own_tensors(head, target, None)
    for name in [name for name in tensors if name.endswith("rotary_emb.inv_freq")]:
        del tensors[name]  # older files carry what rope gives
    lm_head = tensors.pop("lm_head.weight", None)
    if lm_head is not None:
        check_targets_own(head, "a head", lm_head, target.head)
        notes.append("lm_head: equal to the target's, shared")
    slots, bias = num_slots or 5, "fc.bias" in tensors
    drafter = drafter_class("eagle")(
        target,
        num_slots=slots,
        train_steps=1,
        depth=head.body.get("num_hidden_layers", 1),
        bias=bias,
        layer=layer_of(head),
    )
    _load(head, drafter, tensors)
    return drafter, ["layout: plain, EAGLE-1", f"{slots} slots", f"fc {'has a' if bias else 'without'} bias", *notes]


def _refuse(head: Head, target: TargetParts) -> None:
    """What our EAGLE-3 has no place for, all at once."""
    reasons = [f"{key} is on" for key in MUST_BE_OFF if head.setting(key)]
    kind = head.config.get("speculators_model_type", "eagle3")
    if kind != "eagle3":
        reasons.append(f"speculators_model_type is {kind!r}")
    if head.body.get("model_type", "llama") != "llama":
        reasons.append(f"the layer is of type {head.body['model_type']!r}, not llama")
    if head.body.get("num_hidden_layers", 1) != 1:
        reasons.append(f"it has {head.body['num_hidden_layers']} layers, not 1")
    if head.setting("logit_scale", 1) != 1:
        reasons.append(f"logit_scale is {head.setting('logit_scale')}")
    if (head.config.get("eagle_config") or {}).get("use_aux_hidden_state", True) is False:
        reasons.append("use_aux_hidden_state is false: it reads the last hidden state alone")
    types = head.body.get("layer_types") or []
    if any(kind != "full_attention" for kind in types):
        reasons.append(f"its attention is {types[0]}")
    reasons += _other_sizes(head, target)
    unknown = sorted(name for name in head.tensors if not KNOWN.fullmatch(name))
    if unknown:
        reasons.append(f"unknown tensor(s) {', '.join(unknown)}")
    if reasons:
        raise ValueError(f"cannot import {head.folder}: " + "; ".join(reasons))


def _other_sizes(head: Head, target: TargetParts) -> list[str]:
    sizes = {"hidden_size": target.config.hidden_size, "vocab_size": target.config.vocab_size}
    reasons = [
        f"{key} is {head.body.get(key)}, the target's {value}"
        for key, value in sizes.items()
        if head.body.get(key) != value
    ]
    width = head.setting("target_hidden_size")
    if width not in (None, target.config.hidden_size):
        reasons.append(f"target_hidden_size is {width}, the target's hidden size {target.config.hidden_size}")
    return reasons


def _layers(head: Head, target: TargetParts, convention: Convention | None) -> tuple[list[int], str]:
    layers, place = stated_layers(head, convention)
    count = num_features(head)
    if layers is None:
        layers, place = (
            list(default_layers(target.config.num_hidden_layers, count)),
            "the engines' default: none stated",
        )
    if len(layers) != count:
        raise ValueError(f"{head.folder} states layers {layers}, but fc reads {count} features")
    if layers[-1] >= target.config.num_hidden_layers:
        raise ValueError(
            f"{head.folder}: output {layers[-1]} is past the target's {target.config.num_hidden_layers} layers"
        )
    return layers, place


def _own_tensors(
    head: Head, target: TargetParts, vocabulary: DraftVocabulary | None
) -> tuple[dict[str, Tensor], list[str]]:
    """Tensors that our class holds. The maps and an embedding equal to the target's are checked and left out."""
    tensors, notes = without_maps(head, vocabulary), []
    embedding = tensors.pop("embed_tokens.weight", None)
    if embedding is not None:
        check_targets_own(head, "an embedding", embedding, target.embedding)
        notes.append("embed_tokens: equal to the target's, shared")
    tied = bool(head.body.get("tie_word_embeddings")) and "lm_head.weight" not in tensors
    if tied and embedding is None and not target.config.tie_word_embeddings:
        raise ValueError(f"{head.folder} ties its head to an embedding that it does not ship")
    return tensors, notes


def _switches(head: Head) -> dict[str, bool]:
    # speculators' class has norm_before_residual on unless its config says otherwise.
    return {
        "fc_norm": bool(head.setting("fc_norm", False) or head.setting("use_aux_norm", False)),
        "norm_output": bool(head.setting("norm_output", False) or head.setting("return_hidden_post_norm", False)),
        "norm_before_residual": bool(head.setting("norm_before_residual", head.layout == "speculators")),
    }


def _load(head: Head, drafter: Drafter, tensors: dict[str, Tensor]) -> None:
    check_tensors(head, tensors, {name: tuple(own.shape) for name, own in drafter.state_dict().items()})
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if len(dtypes) == 1:
        drafter.to(dtypes.pop())
    drafter.load_state_dict(tensors)
