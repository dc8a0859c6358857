"""EAGLE-3 and P-EAGLE for each engine."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from checkpoints.engine_entry import (
    Entry,
    Files,
    Source,
    body_config,
    dtype_keys,
    is_default_layers,
    mapped_tensors,
    only_silu,
    own_tensors,
    sglang_chain_command,
    speculators_config,
    speculators_entry,
    vllm_entry,
)

SPECULATIVE = {"method": "eagle3"}


def _body(source: Source) -> dict[str, Any]:
    return body_config(source, "llama", 1) | {"num_aux_hidden_states": len(source.whole.declared.layers)}


def _switches(source: Source) -> dict[str, Any]:
    return {
        "draft_vocab_size": source.whole.declared.vocabulary["size"],
        "norm_before_residual": source.settings["switches"]["norm_before_residual"],
        "norm_before_fc": False,
        "fc_norm": source.settings["switches"]["fc_norm"],
        "norm_output": source.settings["switches"]["norm_output"],
    }


def _tensors(source: Source) -> dict[str, Tensor]:
    return mapped_tensors(source, own_tensors(source))


def _refuse_sglang(source: Source) -> list[str]:
    reasons = only_silu(source)
    if source.settings["switches"]["norm_before_residual"]:
        reasons.append("it ignores norm_before_residual and would start the residual before the norm")
    if len(source.whole.declared.layers) == 1:
        reasons.append("with one captured layer it skips fc, because the feature is as wide as the embedding")
    return reasons


def _notes(source: Source) -> list[str]:
    if not source.scales_embedding:
        return []
    return ["this target scales its embedding and engines do not for the drafter: input_layernorm undoes it up to eps"]


def _vllm(source: Source) -> Files:
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_body(source),
        **_switches(source),
        "eagle_aux_hidden_state_layer_ids": source.in_ids,
        **dtype_keys(source),
    }
    notes = _notes(source)
    if not is_default_layers(source.whole.declared.layers, source.num_target_layers):
        notes.append(
            "captured layers are not the default ones: this folder is for vLLM alone, export engine=sglang for SGLang"
        )
    return Files(config, _tensors(source), notes)


def _speculators(source: Source) -> Files:
    body = {"architectures": ["LlamaForCausalLM"], **_body(source), **dtype_keys(source)}
    config = {
        "architectures": ["Eagle3DraftModel"],
        **speculators_config(source, "eagle3", body),
        **_switches(source),
        "eagle_aux_hidden_state_layer_ids": source.in_ids,
    }
    return Files(config, _tensors(source), _notes(source))


def _sglang(source: Source) -> Files:
    declared = source.whole.declared
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_body(source),
        **_switches(source),
        **dtype_keys(source),
    }
    notes = _notes(source)
    if source.settings["switches"]["fc_norm"] or source.settings["switches"]["norm_output"]:
        notes.append("the EAGLE-3.1 norms need SGLang 0.5.23 or newer; an older one drops them without a word")
    if source.settings["head"] == "target" and source.whole.vocabulary.is_full:
        config["draft_vocab_size"] = None  # SGLang's sign for the target's head
    if not is_default_layers(declared.layers, source.num_target_layers):
        # Nested ids are outputs for SGLang and blocks applied for vLLM: this file must not be served by vLLM.
        config["eagle_config"] = {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(declared.layers),
        }
        notes.append("captured layers are not the default ones: vLLM would read this folder's layer ids off by one")
    return Files(config, _tensors(source), notes)


def _command(folder: str, source: Source) -> str:
    return sglang_chain_command(folder, source, "EAGLE3")


EAGLE3 = {
    "vllm": replace(vllm_entry(only_silu, _vllm, SPECULATIVE), weights=True),
    "vllm_speculators": speculators_entry(only_silu, _speculators, SPECULATIVE),
    "sglang": Entry(_refuse_sglang, _sglang, _command),
}


# P-EAGLE: EAGLE-3's tensors, more layers, and mask_hidden, which the engine sends through fc like a feature
# ----------------------------------------------------------------------------------------------------------------------


def _parallel_body(source: Source) -> dict[str, Any]:
    features = {"num_aux_hidden_states": len(source.whole.declared.layers)}
    return body_config(source, "llama", source.settings["depth"]) | features


def _parallel_keys(source: Source) -> dict[str, Any]:
    return {
        "draft_vocab_size": source.whole.declared.vocabulary["size"],
        "norm_before_residual": False,
        "norm_before_fc": False,
        "mask_token_id": source.whole.declared.mask_token,
        "eagle_aux_hidden_state_layer_ids": source.in_ids,
    }


def _parallel(source: Source) -> Files:
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_parallel_body(source),
        **_parallel_keys(source),
        **dtype_keys(source),
    }
    return Files(config, _tensors(source), _notes(source))


def _parallel_speculators(source: Source) -> Files:
    body = {"architectures": ["LlamaForCausalLM"], **_parallel_body(source), **dtype_keys(source)}
    config = {
        "architectures": ["PEagleDraftModel"],
        **speculators_config(source, "peagle", body),
        **_parallel_keys(source),
    }
    return Files(config, _tensors(source), _notes(source))


PARALLEL = {"method": "eagle3", "parallel_drafting": True}
PEAGLE = {
    "vllm": replace(vllm_entry(only_silu, _parallel, PARALLEL), weights=True),
    "vllm_speculators": speculators_entry(only_silu, _parallel_speculators, PARALLEL),
}
