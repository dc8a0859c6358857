"""Findings, and the checks that every family of drafters shares."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from transformers import PretrainedConfig

from checkpoints.layout import Head, Shapes, map_is_absolute

Level = Literal["refused", "wrong", "note"]


@dataclass(frozen=True)
class Finding:
    """level: "refused" (the engine fails to load it), "wrong" (it loads and accepts less), "note"."""

    level: Level
    text: str


def missing(head: Head, names: Iterable[str]) -> list[Finding]:
    """Tensors that an engine has and the head does not."""
    text = "is missing and stays at its random or unit start"
    return [Finding("wrong", f"{name} {text}") for name in names if name not in head.tensors]


def misshapen(head: Head, wanted: Shapes) -> list[Finding]:
    """Tensors of another shape than an engine's own parameters."""
    there = {name: tuple(head.tensors[name].shape) for name in wanted if name in head.tensors}
    return [
        Finding("refused", f"{name} is {shape}, config.json gives {wanted[name]}")
        for name, shape in there.items()
        if shape != wanted[name]
    ]


def tensor_faults(head: Head, wanted: Shapes) -> list[Finding]:
    """Names and shapes of the tensors against an engine's own parameters."""
    return missing(head, wanted) + misshapen(head, wanted)


def vocabulary_map(d2t: torch.Tensor, t2d: torch.Tensor | None, rows: int, size: int) -> list[Finding]:
    """Faults of d2t, offsets [rows] into a vocabulary of `size`."""
    found = []
    if d2t.dtype != torch.int64:
        found.append(Finding("note", f"d2t is {d2t.dtype}, engines hold int64"))
    if d2t.shape != (rows,):
        return [*found, Finding("refused", f"d2t is {tuple(d2t.shape)}, draft_vocab_size is {rows}")]
    mapped = torch.arange(rows) + d2t.to(torch.int64)
    if map_is_absolute(d2t, size, t2d):
        found.append(Finding("wrong", "d2t holds absolute ids; engines add it to the draft id"))
    elif int(mapped.max()) >= size or int(mapped.min()) < 0:
        found.append(
            Finding("refused", f"d2t maps to {int(mapped.min())}..{int(mapped.max())}, the vocabulary is 0..{size - 1}")
        )
    elif len(mapped.unique()) != rows:
        found.append(Finding("wrong", "d2t maps two draft ids to one token"))
    if t2d is not None and t2d.shape != (size,):
        found.append(Finding("note", f"t2d is {tuple(t2d.shape)}, not ({size},); no engine reads it"))
    return found


def rope_spelling(head: Head) -> list[Finding]:
    """Whether rope is spelled in every way that engines read, and alike."""
    found: list[Finding] = []
    rope = head.body.get("rope_parameters") or {}
    scaling = head.body.get("rope_scaling") or {}
    theta = head.body.get("rope_theta")
    if theta is None or not rope:
        written = "rope_parameters" if rope else "rope_theta" if theta is not None else "neither"
        found.append(
            Finding(
                "note",
                f"rope is written in one spelling only ({written}); older and newer engines differ in what they read",
            )
        )
    elif rope.get("rope_theta", theta) != theta:
        found.append(Finding("wrong", f"rope_theta {theta} and rope_parameters.rope_theta {rope['rope_theta']} differ"))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if rope and scaling and rope.get("rope_type", "default") != kind:
        found.append(Finding("wrong", f"rope_scaling is {kind!r}, rope_parameters {rope.get('rope_type')!r}"))
    return found


def positions(head: Head, target: PretrainedConfig | None) -> list[Finding]:
    """Whether the rope table is as long as the target's texts."""
    own = head.body.get("max_position_embeddings")
    if own is None:
        return [Finding("wrong", "max_position_embeddings is missing: the default of 2048 sizes the rope table")]
    if target is not None and own < target.max_position_embeddings:
        text = f"max_position_embeddings is {own}, the target's {target.max_position_embeddings}: longer texts overflow"
        return [Finding("wrong", text)]
    return []


def dtypes(head: Head) -> list[Finding]:
    """Whether tensors and config.json agree on the dtype."""
    found = sorted({str(t.dtype) for name, t in head.tensors.items() if t.is_floating_point()})
    if len(found) > 1:
        return [Finding("note", f"tensors come in {', '.join(found)}; engines cast all to the target's dtype")]
    written = (
        head.config.get("dtype")
        or head.config.get("torch_dtype")
        or head.body.get("dtype")
        or head.body.get("torch_dtype")
    )
    if written is not None and found and f"torch.{written}" != found[0]:
        return [Finding("note", f"config.json says {written}, the tensors are {found[0]}")]
    return []
