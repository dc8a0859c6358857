"""A head as far as it can be read, for `headstart doctor`: ours or another tool's, however broken.

Loading refuses what is wrong and stops at the first thing; here everything that still can be read is, and what could
not is written down under the check that it belongs to.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoints.engines import PROVENANCE
from checkpoints.files import read_json, read_tensors
from checkpoints.folder import CONFIG, FORMAT, MAPS, TENSORS, Declared, Whole, build, read_drafter
from checkpoints.foreign import import_head
from checkpoints.layout import map_is_absolute
from checkpoints.lint_common import vocabulary_map
from drafters.contract import Drafter, TargetParts
from drafters.vocabulary import DraftVocabulary

HEAD = "lm_head.weight"
ROWS_AT_ONCE = 1024
# What an importer's refusal is about, by its words; "files" when none of them stands there.
ABOUT = (
    (r"\bd2t\b|\bt2d\b|draft_vocab_size", "vocabulary_map"),
    (r"hidden_size|vocab_size|of its own that is not the target", "target_weights"),
    (r"layer ids|states layers|past the target", "layers"),
    (r"mask_token", "mask_token"),
)


@dataclass(frozen=True)
class Trouble:
    """Something that could not be read or does not fit. check: the check it belongs to."""

    check: str
    text: str


@dataclass(frozen=True)
class Patient:
    """drafter: None when it cannot be built. target, data: what the files declare of the target and of the training
    data, empty when nothing. vocabularies: readings of the vocabulary map by where they come from, the one that the
    drafter was built with first. notes: decisions of an importer."""

    folder: Path
    ours: bool
    drafter: Drafter | None
    target: dict[str, Any]
    data: dict[str, Any]
    troubles: tuple[Trouble, ...] = ()
    vocabularies: dict[str, DraftVocabulary] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def about(self, check: str) -> list[str]:
        """What could not be read that belongs to a check."""
        return [trouble.text for trouble in self.troubles if trouble.check == check]

    @property
    def thinking(self) -> bool | None:
        """The thinking mode of the training data, None where it is not declared."""
        return declared_thinking(self.data)


def declared_thinking(data: dict[str, Any]) -> bool | None:
    """The thinking mode of a drafter's training data, as training or an import declared it; None where unknown."""
    found = data.get("prepared", data).get("thinking")
    return found if isinstance(found, bool) else None


def admit(folder: Path, parts: TargetParts, num_slots: int | None = None) -> Patient:
    """Read a head's folder. num_slots: of a foreign head whose files do not say. ValueError when there is no head at
    all: no config.json, or no readable tensors."""
    folder = Path(folder)
    if not (folder / CONFIG).exists():
        raise ValueError(f"{folder} holds no head: it has no {CONFIG}")
    values = read_json(folder / CONFIG)
    if isinstance(values, dict) and values.get("format") == FORMAT:
        return _ours(folder, values, parts)
    return _foreign(folder, parts, num_slots)


def _ours(folder: Path, values: dict[str, Any], parts: TargetParts) -> Patient:
    whole, troubles, vocabularies = _read_loosely(folder, values, parts)
    target, data = dict(values.get("target") or {}), dict(values.get("data") or {})
    drafter = None
    if whole is not None:
        try:
            drafter = build(whole, parts).to(device=parts.embedding.device, dtype=parts.embedding.dtype).eval()
        except (ValueError, RuntimeError) as error:
            troubles.append(Trouble(_check_of(str(error)), str(error)))
    return Patient(folder, True, drafter, target, data, tuple(troubles), vocabularies)


def _read_loosely(
    folder: Path, values: dict[str, Any], parts: TargetParts
) -> tuple[Whole | None, list[Trouble], dict[str, DraftVocabulary]]:
    """As read_drafter where that succeeds; else the same with the maps mended and everything that is wrong named."""
    try:
        whole = read_drafter(folder)
        return whole, [], {"d2t": whole.vocabulary}
    except ValueError as error:
        refusal = str(error)
    try:
        declared = Declared(**values)
    except TypeError:
        return None, [Trouble("files", refusal)], {}
    tensors = read_tensors(folder / TENSORS)
    d2t, t2d = (tensors.pop(name, None) for name in MAPS)
    rows, size = int(declared.vocabulary["size"]), int(declared.vocabulary["target_size"])
    troubles = [Trouble("vocabulary_map", text) for text in map_faults(d2t, t2d, rows, size)]
    vocabularies = readings(d2t, t2d, rows, size, tensors.get(HEAD), parts)
    if not troubles:
        troubles = [Trouble("vocabulary_map" if "the maps hold" in refusal else "files", refusal)]
    chosen = next(iter(vocabularies.values()))
    return Whole(folder, declared, tensors, chosen), troubles, vocabularies


def map_faults(d2t: Tensor | None, t2d: Tensor | None, rows: int, size: int) -> list[str]:
    """What is wrong with the maps of a draft vocabulary of `rows` of `size` tokens, in words."""
    if d2t is None:
        beside = "" if t2d is not None else " and no t2d"
        return [f"there is no d2t{beside}: {rows} draft ids of {size} pass as the target ids 0..{rows - 1}"]
    found = [one.text for one in vocabulary_map(d2t, t2d, rows, size) if one.level != "note"]
    if not found and t2d is not None and len(t2d) == size:
        ids = torch.arange(rows) + d2t.to(torch.int64)
        other = int((~t2d.bool()[ids]).sum()) + int(t2d.sum()) - rows
        if other:
            found.append(f"d2t and t2d name different tokens ({other} of {rows})")
    return found


def readings(
    d2t: Tensor | None, t2d: Tensor | None, rows: int, size: int, head: Tensor | None, parts: TargetParts
) -> dict[str, DraftVocabulary]:
    """Every reading of the maps that gives `rows` distinct tokens, the most trustworthy first; the last is what an
    engine without a map does: ids 0..rows - 1."""
    given: dict[str, Tensor] = {}
    if d2t is not None and d2t.shape == (rows,):
        absolute = map_is_absolute(d2t, size, t2d)
        given["d2t, read as ids" if absolute else "d2t"] = d2t.long() if absolute else torch.arange(rows) + d2t.long()
    if t2d is not None and t2d.shape == (size,):
        given["t2d"] = t2d.nonzero()[:, 0]
    if head is not None and len(head) == rows < size == len(parts.head):
        given["the target's rows nearest to the head's"] = nearest_rows(head, parts.head)
    given["ids 0, 1, 2, ..."] = torch.arange(rows)
    found = {}
    for how, ids in given.items():
        ascending = len(ids) == rows and bool((ids[1:] > ids[:-1]).all())
        if ascending and int(ids[0]) >= 0 and int(ids[-1]) < size:
            found[how] = DraftVocabulary(ids, size)
    return found


def nearest_rows(rows: Tensor, table: Tensor) -> Tensor:
    """For each row [W, D] the index of the most similar (cosine) row of table [V, D]: int64 [W] on the CPU.

    Heads start from the target's rows and stay near them, so a lost map can be read off the weights.
    """
    table = torch.nn.functional.normalize(table.float(), dim=-1)
    pieces = rows.to(table.device).float().split(ROWS_AT_ONCE)
    return torch.cat([(torch.nn.functional.normalize(piece, dim=-1) @ table.T).argmax(-1).cpu() for piece in pieces])


def _foreign(folder: Path, parts: TargetParts, num_slots: int | None) -> Patient:
    """A head of another tool, or an export of ours, whose provenance says which target it is for."""
    beside = folder / PROVENANCE
    known = read_json(beside) if beside.exists() else {}
    target, data = dict(known.get("target") or {}), dict(known.get("data") or {})
    try:
        drafter, notes = import_head(folder, parts, num_slots=num_slots or known.get("num_slots"))
    except ValueError as error:
        trouble = Trouble(_check_of(str(error)), str(error))
        return Patient(folder, False, None, target, data, (trouble,))
    drafter.to(device=parts.embedding.device, dtype=parts.embedding.dtype).eval()
    found = {"d2t": drafter.vocabulary}
    return Patient(folder, False, drafter, target, data, vocabularies=found, notes=tuple(notes))


def _check_of(text: str) -> str:
    return next((check for pattern, check in ABOUT if re.search(pattern, text)), "files")


def rebuilt(drafter: Drafter, parts: TargetParts, changes: dict[str, Any], vocabulary: DraftVocabulary) -> Drafter:
    """The same tensors in a drafter with other settings. changes: by key, wherever it stands in the settings.

    ValueError when the class refuses the settings, or a key stands nowhere.
    """
    values = drafter.settings()
    for key, value in changes.items():
        values, found = _changed(values, (key,), value)
        if not found:
            raise ValueError(f"{type(drafter).__name__} has no setting {key}")
    made = type(drafter)(parts, vocabulary, **values)
    made.load_state_dict(drafter.state_dict())
    like = next(drafter.parameters(), None)
    return made.eval() if like is None else made.to(device=like.device, dtype=like.dtype).eval()


def setting(values: dict[str, Any], keys: Sequence[str]) -> str | None:
    """The first of the keys that stands somewhere in nested settings."""
    for key in keys:
        if key in values or any(isinstance(one, dict) and setting(one, (key,)) for one in values.values()):
            return key
    return None


def _changed(values: dict[str, Any], keys: Sequence[str], value: Any) -> tuple[dict[str, Any], bool]:
    made, found = {}, False
    for name, old in values.items():
        if name in keys:
            made[name], found = value, True
        elif isinstance(old, dict):
            made[name], inside = _changed(old, keys, value)
            found |= inside
        else:
            made[name] = old
    return made, found


def with_vocabulary(patient: Patient, how: str, parts: TargetParts) -> Drafter:
    """The patient's drafter with another reading of its map."""
    assert patient.drafter is not None
    return rebuilt(patient.drafter, parts, {}, patient.vocabularies[how])
