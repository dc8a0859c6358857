"""MTP heads for engines: the drafter becomes the native head of its target, and the engine serves that one folder."""

import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from checkpoints.engine_entry import Entry, Files, Source
from checkpoints.native import stitch


def _refuse(source: Source) -> list[str]:
    if not Path(source.target_path).is_dir():
        return [f"its target {source.target_path!r} is no folder: download it, and pass target_path"]
    return []


def _nothing_beside(source: Source) -> Files:
    raise ValueError("an MTP head is no folder of its own; it is stitched into its target")


def _stitched(source: Source, folder: Path, provenance: dict[str, Any], card: str, engine: str) -> list[str]:
    target = Path(source.target_path)
    return stitch(source.whole, target, folder, engine=engine, link=source.link, provenance=provenance, card=card)


def _vllm(folder: str, source: Source) -> str:
    draft = f'{{"method": "mtp", "num_speculative_tokens": {source.whole.declared.num_slots}}}'
    return f"vllm serve {shlex.quote(folder)} --speculative-config {shlex.quote(draft)}"


def _sglang(folder: str, source: Source) -> str:
    slots = source.whole.declared.num_slots
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(folder)} --speculative-algorithm NEXTN "
        f"--speculative-num-steps {slots} --speculative-eagle-topk 1 --speculative-num-draft-tokens {slots + 1}"
    )


def _modules(source: Source) -> str | None:
    many = source.settings.get("modules", 1) > 1
    return "vLLM's V2 runner: V1 uses the first module for every slot" if many else None


def _entry(engine: str, command: Callable[[str, Source], str], speculative: dict[str, Any] | None) -> Entry:
    whole = partial(_stitched, engine=engine)
    needs = _modules if engine == "vllm" else (lambda source: None)
    return Entry(_refuse, _nothing_beside, command, speculative, needs, whole)


MTP = {"vllm": _entry("vllm", _vllm, {"method": "mtp"}), "sglang": _entry("sglang", _sglang, None)}
