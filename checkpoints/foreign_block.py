"""Block drafters of other tools (z-lab, SpecForge, DeepSpec, speculators, transformers) as our own.

Key by key, as checkpoints/foreign.py does it for EAGLE-3.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoints.folder import drafter_class
from checkpoints.foreign_parts import check_targets_own, check_tensors, layer_of, own_vocabulary, without_maps
from checkpoints.layout import Head, read_head
from checkpoints.layout_block import Block, describe, expected_shapes, mask_embedding, refusals
from drafters.block import spread_layers
from drafters.contract import Drafter, TargetParts
from drafters.vocabulary import DraftVocabulary


def import_block(folder: Path, target: TargetParts, *, num_slots: int | None = None) -> tuple[Drafter, list[str]]:
    """A foreign block drafter as ours on `target`, and one line for each thing that was decided.

    num_slots: tokens to draft, for a file that states no block_size; else its own. ValueError names every tensor left
    over or missing, every setting that ours do not have, and a target of other sizes.
    """
    head = read_head(folder)
    block = describe(head)
    _refuse(head, block, target)
    layers, place = _layers(head, block, target)
    slots = block.num_slots or num_slots
    if slots is None:
        raise ValueError(f"{head.folder} states no block_size; pass num_slots")
    if num_slots is not None and num_slots != slots:
        raise ValueError(f"{head.folder} was trained for {slots} slots, num_slots is {num_slots}")
    vocabulary = own_vocabulary(head)
    tensors, notes = _own_tensors(head, block, target, vocabulary)
    arguments: dict[str, Any] = {"head": block.head} if block.head else {}
    drafter = drafter_class(block.kind)(
        target,
        vocabulary,
        num_slots=slots,
        layers=layers,
        slot_convention=block.slot_convention,
        layer=layer_of(head),
        block=_block(block, "mask_embedding" in tensors),
        **arguments,
    )
    dtypes = {tensor.dtype for name, tensor in tensors.items() if not name.startswith("confidence_head.")}
    drafter.to(dtypes.pop() if len(dtypes) == 1 else torch.float32)
    drafter.load_state_dict(tensors)
    notes = [
        f"layout: {head.layout}, {block.kind}",
        f"target layers {layers} ({place})",
        f"{slots} slots, {block.slot_convention}; mask token {block.mask_token}",
        f"draft vocabulary: {len(drafter.vocabulary)} of {drafter.vocabulary.target_size} tokens",
        *notes,
    ]
    return drafter, notes


def _refuse(head: Head, block: Block, target: TargetParts) -> None:
    """What our drafters have no place for, all at once."""
    reasons = refusals(head, block)
    if head.body.get("model_type", "qwen3") not in ("qwen3", "muse_glimmer_assistant"):
        reasons.append(f"its layers are of type {head.body['model_type']!r}, not qwen3")
    sizes = {"hidden_size": target.config.hidden_size, "vocab_size": target.config.vocab_size}
    reasons += [
        f"{key} is {head.body.get(key)}, the target's {value}"
        for key, value in sizes.items()
        if head.body.get(key) not in (value, None if key == "vocab_size" else value)
    ]
    if block.mask_token is None:
        reasons.append("mask_token_id is missing")
    width = head.config.get("target_hidden_size") or head.body.get("target_hidden_size")
    if width not in (None, target.config.hidden_size):
        reasons.append(f"target_hidden_size is {width}, the target's hidden size {target.config.hidden_size}")
    if reasons:
        raise ValueError(f"cannot import {head.folder}: " + "; ".join(reasons))
    # transformers' own class has no vocabulary of its own; the map and the shapes need one.
    head.body.setdefault("vocab_size", target.config.vocab_size)


def _layers(head: Head, block: Block, target: TargetParts) -> tuple[list[int], str]:
    depth, fc = target.config.num_hidden_layers, head.tensors.get("fc.weight")
    if fc is None or fc.ndim != 2 or fc.shape[1] % target.config.hidden_size:
        raise ValueError(f"{head.folder} has no fc.weight that reads whole features")
    count, layers, place = fc.shape[1] // target.config.hidden_size, block.layers, "stated"
    if layers is None:
        layers, place = list(spread_layers(depth, count)), "spread evenly: none stated"
    if len(layers) != count:
        raise ValueError(f"{head.folder} states layers {layers}, but fc reads {count} features")
    if layers != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= depth:
        raise ValueError(f"{head.folder}: layer ids give outputs {layers}, not ascending ids in 0..{depth - 1}")
    return layers, place


def _own_tensors(
    head: Head, block: Block, target: TargetParts, vocabulary: DraftVocabulary | None
) -> tuple[dict[str, Tensor], list[str]]:
    """Tensors that our class holds. Maps, and copies of the target's embedding and head, are checked and left out."""
    tensors, notes = without_maps(head, vocabulary), []
    rows = slice(None) if vocabulary is None else vocabulary.ids
    shared = {"embed_tokens.weight": target.embedding, "lm_head.weight": target.head[rows]}
    for name, own in shared.items():
        found = tensors.pop(name, None)
        if found is None:
            continue
        check_targets_own(head, name, found, own)
        notes.append(f"{name}: equal to the target's, shared")
    check_tensors(head, tensors, expected_shapes(head, block))
    row = mask_embedding(head.folder, block.mask_token)
    if row is not None:
        tensors["mask_embedding"] = row.to(head.tensors["fc.weight"].dtype)
        notes.append("mask rows: an embedding of their own")
    return tensors, notes


def _block(block: Block, trained_mask: bool) -> dict[str, Any]:
    return {
        "depth": block.depth,
        "mask_token": block.mask_token,
        "trained_mask": trained_mask,
        "window": block.window,
        "windowed": block.windowed,
    }
