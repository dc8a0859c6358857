"""What each serving engine reads: one table an engine, keyed by drafter architecture.

An entry is pure functions of a saved drafter: `refuse` names what the engine cannot serve, `write` gives its
config.json, its tensors and its serve command. A later drafter adds one entry to each engine that serves it.

Layer ids: ours are outputs (0 = first decoder layer's output). vLLM and speculators count blocks applied (ours + 1) for
EAGLE-3 and P-EAGLE; SGLang's explicit ids and every `target_layer_ids` of block drafters are outputs.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from checkpoints.card import Shown, card
from checkpoints.engine_block import DFLASH, DFLASH2, DOMINO, DSPARK
from checkpoints.engine_eagle import EAGLE3, PEAGLE
from checkpoints.engine_eagle1 import EAGLE1
from checkpoints.engine_entry import PROVENANCE as PROVENANCE
from checkpoints.engine_entry import Entry, Files, Source
from checkpoints.engine_medusa import MEDUSA
from checkpoints.engine_model import MODEL
from checkpoints.files import atomic, write_json, write_tensors, write_text
from checkpoints.folder import CARD, CONFIG, TENSORS
from checkpoints.layout_block import MASK_FILE
from checkpoints.native_engine import MTP
from checkpoints.weights import pack_weights

WITH_TARGET = "this folder holds the target itself with the head in it; the target's own card and terms hold for it too"
NAMES = ("vllm", "vllm_speculators", "sglang", "transformers")
ARCHITECTURES: dict[str, dict[str, Entry]] = {
    "eagle3": EAGLE3,
    "peagle": PEAGLE,
    "medusa": MEDUSA,
    "mtp": MTP,
    "dflash": DFLASH,
    "dspark": DSPARK,
    "domino": DOMINO,
    "dflash2": DFLASH2,
    "eagle": EAGLE1,
    "independent": MODEL,
}
ENGINES: dict[str, dict[str, Entry]] = {
    name: {architecture: table[name] for architecture, table in ARCHITECTURES.items() if name in table}
    for name in NAMES
}


@dataclass(frozen=True)
class Exported:
    """A written export: its folder, the command that serves it, notes."""

    engine: str
    folder: Path
    command: str
    notes: list[str]


def export_engine(source: Source, engine: str, folder: Path, terms: str | None = None) -> Exported:
    """Write `source` for an engine into `folder`, its model card too, config.json last. terms: license of the card.

    ValueError on an unknown engine, an architecture the engine does not serve, or a combination it cannot serve (every
    reason is named)."""
    entry = entry_for(engine, source.whole.declared.architecture)
    reasons = entry.refuse(source)
    if source.weights is not None and not entry.weights:
        reasons = [*reasons, f"weights={source.weights} is not among what it reads for this architecture"]
    if reasons:
        raise ValueError(f"{engine} cannot serve {source.whole.folder}: " + "; ".join(reasons))
    folder = Path(folder)
    if folder.resolve() == source.whole.folder.resolve():
        raise ValueError(f"the export would overwrite the drafter it is made from: {folder}")
    needs, command = entry.needs(source), entry.command(str(folder), source)
    provenance = _provenance(source, engine, entry, command)
    served = serve_commands(source, engine, folder.name)
    if entry.whole is not None:
        shown = Shown(served, terms, [WITH_TARGET])
        notes = entry.whole(source, folder, provenance, card(source.whole.declared, shown))
    else:
        files = _packed(entry.write(source), source.weights)
        _write(folder, files, provenance, card(source.whole.declared, Shown(served, terms, files.notes)))
        notes = files.notes
    return Exported(engine, folder, command, notes + ([] if needs is None else [f"needs {needs}"]))


def serve_commands(source: Source, engine: str, folder: str) -> dict[str, str]:
    """How this export is served, and how the exports for other engines are made: commands by engine."""
    name, architecture = str(source.whole.declared.target.get("name")), source.whole.declared.architecture
    local = Path(source.target_path).is_absolute()
    mine = entry_for(engine, architecture).command(folder, replace(source, target_path=name) if local else source)
    others = [other for other, table in ENGINES.items() if other != engine and architecture in table]
    able = [other for other in others if not ENGINES[other][architecture].refuse(source)]
    return {engine: mine} | {other: f"headstart export drafter_dir=DRAFTER engine={other}" for other in able}


def _packed(files: Files, weights: str | None) -> Files:
    """The files with packed weights; as they are for None."""
    if weights is None:
        return files
    tensors, described = pack_weights(files.tensors, weights)
    sizes = [sum(tensor.nbytes for tensor in each.values()) for each in (files.tensors, tensors)]
    note = f"weights={weights}: {sizes[1] / 2**20:.1f} MiB of tensors in place of {sizes[0] / 2**20:.1f} MiB"
    config = files.config | {"quantization_config": described}
    return replace(files, config=config, tensors=tensors, notes=[*files.notes, note])


def _write(folder: Path, files: Files, provenance: dict[str, Any], readme: str) -> None:
    """A drafter's folder, config.json last."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in (CONFIG, MASK_FILE):  # an engine would read a mask file left by another export
        (folder / old).unlink(missing_ok=True)
    write_tensors(folder / TENSORS, files.tensors, {"format": "pt"})
    for name, content in files.torch_files.items():
        with atomic(folder / name) as temporary:
            torch.save(content, temporary)
    write_text(folder / CARD, readme)
    write_json(folder / PROVENANCE, provenance)
    write_json(folder / CONFIG, files.config)


def _provenance(source: Source, engine: str, entry: Entry, command: str) -> dict[str, Any]:
    """headstart.json: what was exported, how it is served, what it was trained on and measured at. whole: whether the
    folder holds the target too."""
    declared = source.whole.declared
    return {
        "engine": engine,
        "command": command,
        "architecture": declared.architecture,
        "num_slots": declared.num_slots,
        "speculative": entry.speculative,
        "whole": entry.whole is not None,
        "needs": entry.needs(source),
        "target": declared.target,
        "data": declared.data,
        "tensors": declared.tensors,
        "weights": source.weights,
        "measured": declared.measured,
    }


def entry_for(engine: str, architecture: str) -> Entry:
    """The table's entry; ValueError names the engines, or the architectures this engine serves."""
    if engine not in ENGINES:
        raise ValueError(f"unknown engine {engine!r}; allowed: {', '.join(ENGINES)}")
    table = ENGINES[engine]
    if architecture not in table:
        raise ValueError(f"{engine} does not serve {architecture!r}; from here it gets {', '.join(table)}")
    return table[architecture]
