"""Block drafters for each engine: DFlash, DFlash 2, DSpark and Domino share one layout (z-lab's), with a few keys more.

`target_layer_ids` are outputs in all of them. `block_size` counts the input rows of a block, the anchor's included:
K + 1 in fill_in, K in anchor_first. Which row an engine reads first is its own: only DSpark and Domino can be told.
"""

import json
from typing import Any

from torch import Tensor

from checkpoints.engine_entry import (
    Entry,
    Files,
    Source,
    body_config,
    dtype_keys,
    mapped_tensors,
    only_silu,
    own_tensors,
    sglang_command,
    speculators_config,
    speculators_entry,
    vllm_entry,
)
from checkpoints.layout_block import FULL, MASK_FILE, SLIDING

MASK_TENSOR = "mask_embedding"
V2 = "vLLM's V2 model runner (a GPU with Triton, or VLLM_USE_V2_MODEL_RUNNER=1)"
RENAMED = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}


def _anchor_first(source: Source) -> bool:
    return source.whole.declared.slot_convention == "anchor_first"


def _layer_types(source: Source) -> list[str]:
    block = source.settings["block"]
    return [SLIDING if i in block["windowed"] else FULL for i in range(block["depth"])]


def _mixed(source: Source) -> bool:
    return len(set(_layer_types(source))) == 2


def _mixed_needs_v2(source: Source) -> str | None:
    return f"{V2}, because windowed and full layers are mixed" if _mixed(source) else None


def _always_v2(source: Source) -> str | None:
    return V2


def _block_size(source: Source) -> int:
    return source.whole.declared.num_slots + (not _anchor_first(source))


def _body(source: Source) -> dict[str, Any]:
    """A Qwen3 config of the draft layers, which norm heads as Qwen3 does."""
    block, types = source.settings["block"], _layer_types(source)
    return body_config(source, "qwen3", block["depth"]) | {
        "layer_types": types,
        "use_sliding_window": SLIDING in types,
        "sliding_window": block["window"],
        "num_target_layers": source.num_target_layers,
        "block_size": _block_size(source),
    }


def _ids(source: Source) -> dict[str, Any]:
    declared = source.whole.declared
    return {"mask_token_id": declared.mask_token, "target_layer_ids": list(declared.layers)}


def _tensors(source: Source) -> dict[str, Tensor]:
    """All but the mask rows' embedding, which has no place among an engine's tensors."""
    return {name: tensor for name, tensor in own_tensors(source).items() if name != MASK_TENSOR}


def _mask_file(source: Source) -> dict[str, dict[str, Any]]:
    """vLLM's own file for a trained mask embedding; it opens it with weights_only, and no other spelling."""
    if not source.settings["block"]["trained_mask"]:
        return {}
    row = source.whole.tensors[MASK_TENSOR].to(source.dtype).clone()
    return {MASK_FILE: {"embedding": row, "mask_token_id": source.whole.declared.mask_token}}


# What engines cannot do
# ----------------------------------------------------------------------------------------------------------------------


def _refuse(source: Source, *, trained_mask: bool, anchor_first: str | None) -> list[str]:
    """trained_mask: whether the engine can load one. anchor_first: why it cannot draft from the anchor's row."""
    reasons = only_silu(source)
    if source.scales_embedding:
        reasons.append("the target scales its embedding and the engine hands the drafter unscaled rows")
    if source.settings["block"]["trained_mask"] and not trained_mask:
        reasons.append("it has no place for a trained mask embedding (train with block.trained_mask=false)")
    if anchor_first and _anchor_first(source):
        reasons.append(anchor_first)
    return reasons


def _whole_vocabulary(source: Source) -> list[str]:
    vocabulary = source.whole.vocabulary
    if vocabulary.is_full:
        return []
    return [f"it needs the whole vocabulary, the drafter has {len(vocabulary)} of {vocabulary.target_size} tokens"]


NO_ANCHOR_VLLM = (
    "its dflash method reads mask rows only (it rejects sample_from_anchor); train with slot_convention=fill_in"
)
NO_ANCHOR = "it reads mask rows only; train with slot_convention=fill_in"


def _refuse_vllm(source: Source) -> list[str]:
    return _refuse(source, trained_mask=True, anchor_first=NO_ANCHOR_VLLM)


def _refuse_speculators(source: Source) -> list[str]:
    reasons = _refuse_vllm(source)
    if _mixed(source):
        reasons.append("this layout has one causality for all layers, and windowed and full layers differ in it")
    return reasons


def _refuse_sglang(source: Source) -> list[str]:
    return _refuse(source, trained_mask=False, anchor_first=NO_ANCHOR)


def _refuse_transformers(source: Source) -> list[str]:
    reasons = _refuse(source, trained_mask=False, anchor_first=NO_ANCHOR)
    if SLIDING in _layer_types(source):
        reasons.append("its windowed layers are not causal inside the block, ours are")
    if source.num_target_layers - 1 in source.whole.declared.layers:
        reasons.append("it replaces the last layer's output by the normed one")
    return reasons


def _every_word(source: Source) -> list[str]:
    """Note of engines that always draft with the target's own head."""
    vocabulary = source.whole.vocabulary
    if vocabulary.is_full:
        return []
    return [
        f"the engine drafts with the target's head from all {vocabulary.target_size} tokens, not from the drafter's "
        f"{len(vocabulary)}"
    ]


# DFlash and DFlash 2
# ----------------------------------------------------------------------------------------------------------------------


def _convolution(source: Source) -> dict[str, Any]:
    """Keys of DFlash 2, none for DFlash."""
    head = source.settings.get("head")
    if head is None:
        return {}
    return {
        "conv_kernel_size": head["taps"],
        "conv_group_size": head["group"],
        "selector_rank": head["rank"],
        "selector_top_k": head["candidates"],
    }


def _plain(source: Source) -> dict[str, Any]:
    extra = _convolution(source)
    return {
        "architectures": ["DFlash2DraftModel" if extra else "DFlashDraftModel"],
        **_body(source),
        "dflash_config": _ids(source) | extra,
        **dtype_keys(source),
    }


def _vllm(source: Source) -> Files:
    config = _plain(source) | {"draft_vocab_size": source.whole.declared.vocabulary["size"]}
    return Files(config, mapped_tensors(source, _tensors(source)), torch_files=_mask_file(source))


def _speculators(source: Source) -> Files:
    extra, declared = _convolution(source), source.whole.declared
    body = {"architectures": ["Qwen3ForCausalLM"], **_body(source), **dtype_keys(source)}
    kind = "dflash2" if extra else "dflash"
    config = {
        "architectures": ["DFlash2DraftModel" if extra else "DFlashDraftModel"],
        **speculators_config(source, kind, body),
        "mask_token_id": declared.mask_token,
        "block_size": _block_size(source),
        "aux_hidden_state_layer_ids": source.in_ids,
        "sample_from_anchor": False,
        **extra,
    }
    if SLIDING in body["layer_types"]:
        config["sliding_window_non_causal"] = False  # absent, it makes every layer look both ways
    return Files(config, mapped_tensors(source, _tensors(source)), torch_files=_mask_file(source))


def _sglang(source: Source) -> Files:
    return Files(_plain(source), _tensors(source), _every_word(source))


def _transformers(source: Source) -> Files:
    """transformers' own block drafter (MuseGlimmerAssistantModel), with two tensors renamed."""
    config = {
        "architectures": ["MuseGlimmerAssistantModel"],
        **_body(source),
        "model_type": "muse_glimmer_assistant",
        **_ids(source),
        **dtype_keys(source),
    }
    # Its own default of 2048; no layer is windowed here, and null is no integer.
    config["sliding_window"] = 2048
    tensors = {RENAMED.get(name, name): tensor for name, tensor in _tensors(source).items()}
    return Files(config, tensors, _every_word(source))


def _transformers_command(folder: str, source: Source) -> str:
    return (
        "target.generate(ids, attention_mask=mask, position_ids=positions, speculation_type='dflash', "
        f"assistant_model=AutoModel.from_pretrained({json.dumps(folder)}))"
    )


def _dflash_command(folder: str, source: Source) -> str:
    return sglang_command(folder, source, "DFLASH", f"--speculative-num-draft-tokens {_block_size(source)}")


DFLASH = {
    "vllm": vllm_entry(_refuse_vllm, _vllm, {"method": "dflash"}, _mixed_needs_v2),
    "vllm_speculators": speculators_entry(_refuse_speculators, _speculators, {"method": "dflash"}),
    "sglang": Entry(_refuse_sglang, _sglang, _dflash_command),
    "transformers": Entry(_refuse_transformers, _transformers, _transformers_command),
}
DFLASH2 = {
    "vllm": vllm_entry(
        lambda source: _refuse_vllm(source) + _whole_vocabulary(source), _vllm, {"method": "dflash"}, _always_v2
    ),
    "vllm_speculators": speculators_entry(
        lambda source: _refuse_speculators(source) + _whole_vocabulary(source),
        _speculators,
        {"method": "dflash"},
        _always_v2,
    ),
    "sglang": Entry(lambda source: _refuse_sglang(source) + _whole_vocabulary(source), _sglang, _dflash_command),
}


# DSpark
# ----------------------------------------------------------------------------------------------------------------------


def _markov(source: Source) -> dict[str, Any]:
    head = source.settings["head"]
    return {
        "markov_rank": head["rank"],
        "markov_head_type": head["kind"],
        "enable_confidence_head": head["confidence"],
        "confidence_head_with_markov": head["confidence_reads_token"],
        "sample_from_anchor": _anchor_first(source),
    }


def _refuse_dspark_vllm(source: Source) -> list[str]:
    reasons = _refuse(source, trained_mask=False, anchor_first=None)
    kind = source.settings["head"]["kind"]
    if kind != "vanilla":
        reasons.append(f"it has the vanilla Markov head alone, the drafter's is {kind}; SGLang has it")
    return reasons


def _refuse_dspark_sglang(source: Source) -> list[str]:
    reasons = _refuse(source, trained_mask=False, anchor_first=None) + _whole_vocabulary(source)
    if not _anchor_first(source):
        reasons.append("it reads the anchor's row as slot 1; train with slot_convention=anchor_first")
    return reasons


def _dspark_plain(source: Source) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3DSparkModel"],
        **_body(source),
        **_ids(source),
        **_markov(source),
        "dflash_config": _ids(source),
        **dtype_keys(source),
    }


def _dspark_vllm(source: Source) -> Files:
    config = _dspark_plain(source) | {"draft_vocab_size": source.whole.declared.vocabulary["size"]}
    return Files(config, mapped_tensors(source, _tensors(source)))


def _dspark_speculators(source: Source) -> Files:
    body = {"architectures": ["Qwen3ForCausalLM"], **_body(source), **dtype_keys(source)}
    config = {
        "architectures": ["DSparkDraftModel"],
        **speculators_config(source, "dspark", body),
        "mask_token_id": source.whole.declared.mask_token,
        "block_size": _block_size(source),
        "aux_hidden_state_layer_ids": source.in_ids,
        **_markov(source),
    }
    return Files(config, mapped_tensors(source, _tensors(source)))


def _dspark_sglang(source: Source) -> Files:
    return Files(_dspark_plain(source), _tensors(source))


def _dspark_command(folder: str, source: Source) -> str:
    return sglang_command(folder, source, "DSPARK", f"--speculative-dspark-block-size {_block_size(source)}")


DSPARK = {
    "vllm": vllm_entry(_refuse_dspark_vllm, _dspark_vllm, {"method": "dspark"}, _always_v2),
    "vllm_speculators": speculators_entry(_refuse_dspark_vllm, _dspark_speculators, {"method": "dspark"}, _always_v2),
    "sglang": Entry(_refuse_dspark_sglang, _dspark_sglang, _dspark_command),
}


# Domino
# ----------------------------------------------------------------------------------------------------------------------


def _refuse_domino(source: Source) -> list[str]:
    reasons = _refuse(source, trained_mask=False, anchor_first=None) + _whole_vocabulary(source)
    if _block_size(source) < 2:
        reasons.append("it drafts block_size - 1 tokens, so a block needs at least two rows")
    return reasons


def _domino(source: Source) -> Files:
    head = source.settings["head"]
    extra = {
        "projector_type": "domino",
        "shift_label": _anchor_first(source),
        "pure_draft_prefix_len": 1,
        "gru_hidden_dim": head["state"],
        "emb_dim": head["rank"],
    }
    config = {
        "architectures": ["DFlashDraftModel"],
        **_body(source),
        "dflash_config": _ids(source) | extra,
        **dtype_keys(source),
    }
    notes = ["SGLang runs it on CUDA in bf16 alone, and corrects the 2048 best tokens of a block"]
    if _anchor_first(source):
        slots = source.whole.declared.num_slots
        notes.append(f"with shift_label it runs {slots} rows and drafts {slots - 1} tokens: compare at that K")
    return Files(config, _tensors(source), notes)


DOMINO = {"sglang": Entry(_refuse_domino, _domino, _dflash_command)}
