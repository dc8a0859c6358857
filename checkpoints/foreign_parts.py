"""What the importers of foreign heads share: the vocabulary map, the target's own tensors, names and shapes, layer
sizes."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from checkpoints.layout import Head, rope_of, target_vocabulary, vocabulary_offsets
from drafters.vocabulary import DraftVocabulary

LAYER = ("hidden_size", "intermediate_size", "num_attention_heads", "rms_norm_eps", "max_position_embeddings")


def own_vocabulary(head: Head) -> DraftVocabulary | None:
    """The head's draft vocabulary, None for the whole one. ValueError as vocabulary_offsets."""
    offsets = vocabulary_offsets(head)
    return None if offsets is None else DraftVocabulary.from_offsets(offsets, target_vocabulary(head))


def without_maps(head: Head, vocabulary: DraftVocabulary | None) -> dict[str, Tensor]:
    """The head's tensors but d2t and t2d; ValueError when those name different tokens."""
    tensors = {name: tensor for name, tensor in head.tensors.items() if name not in ("d2t", "t2d")}
    t2d = head.tensors.get("t2d")
    if t2d is not None and vocabulary is not None and not torch.equal(vocabulary.t2d, t2d.bool()):
        raise ValueError(f"{head.folder}: d2t and t2d name different tokens")
    return tensors


def check_targets_own(head: Head, what: str, found: Tensor, wanted: Tensor) -> None:
    """ValueError unless a tensor of the head is the target's, up to a 16-bit rounding."""
    shared = wanted.detach().to("cpu", torch.float32)
    if found.shape != shared.shape or not torch.allclose(found.float(), shared, rtol=1e-2, atol=1e-4):
        raise ValueError(f"{head.folder} has {what} of its own that is not the target's")


def check_tensors(head: Head, tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """ValueError names every tensor that is missing, left over or of another shape than our class has."""
    missing, left = sorted(set(shapes) - set(tensors)), sorted(set(tensors) - set(shapes))
    if missing or left:
        raise ValueError(
            f"{head.folder}: tensor(s) missing: {', '.join(missing) or 'none'}; left over: {', '.join(left) or 'none'}"
        )
    found = {name: tuple(tensors[name].shape) for name in shapes}
    wrong = [f"{name} {found[name]} for {shape}" for name, shape in shapes.items() if found[name] != shape]
    if wrong:
        raise ValueError(f"{head.folder}: wrong shape: {', '.join(wrong)}")


def layer_of(head: Head) -> dict[str, Any]:
    """Our layer settings; ValueError names a size that the config leaves out."""
    body = head.body
    missing = [key for key in LAYER if body.get(key) is None]
    if missing:
        raise ValueError(f"{head.folder / 'config.json'} lacks {', '.join(missing)}")
    heads = body["num_attention_heads"]
    return {key: body[key] for key in LAYER} | {
        "num_key_value_heads": body.get("num_key_value_heads") or heads,
        "head_dim": body.get("head_dim") or body["hidden_size"] // heads,
        "hidden_act": body.get("hidden_act", "silu"),
        "rope_parameters": rope_of(body),
    }
