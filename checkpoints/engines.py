"""What each serving engine reads: one table an engine, keyed by drafter architecture.

An entry is two pure functions of a saved drafter: `refuse` names what the engine cannot serve, `write` gives its
config.json, its tensors and its serve command. A later drafter adds one entry to each engine that serves it.

Layer ids: ours are outputs (0 = first decoder layer's output). vLLM and speculators count blocks applied (ours + 1);
SGLang's explicit ids are outputs. Only the default layers read the same everywhere.
"""

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoints.files import write_json, write_tensors
from checkpoints.folder import CONFIG, TENSORS, Whole
from drafters.contract import default_layers

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PROVENANCE = "headstart.json"


@dataclass(frozen=True)
class Source:
    """A saved drafter on its way out.

    target_path: folder or hub id of the target, as the engine will open it. target_head: gives the target's [V, D] head
    when a drafter that shares it needs some of its rows. dtype: of the exported floating tensors.
    """

    whole: Whole
    target_path: str
    dtype: torch.dtype
    target_head: Callable[[], Tensor] | None = None

    @property
    def settings(self) -> dict[str, Any]:
        return self.whole.declared.settings

    @property
    def num_target_layers(self) -> int:
        return int(self.whole.declared.target["num_layers"])


@dataclass(frozen=True)
class Files:
    """config: config.json. tensors: model.safetensors. notes: what a user should know, one line each."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Entry:
    """How one engine serves one architecture. command(folder, source) is the exact serve command."""

    refuse: Callable[[Source], list[str]]
    write: Callable[[Source], Files]
    command: Callable[[str, Source], str]


@dataclass(frozen=True)
class Exported:
    """A written export: its folder, the command that serves it, notes."""

    engine: str
    folder: Path
    command: str
    notes: list[str]


def export_engine(source: Source, engine: str, folder: Path) -> Exported:
    """Write `source` for an engine into `folder`, config.json last. ValueError on an unknown engine, an architecture
    the engine does not serve, or a combination it cannot serve (every reason is named)."""
    entry = entry_for(engine, source.whole.declared.architecture)
    reasons = entry.refuse(source)
    if reasons:
        raise ValueError(f"{engine} cannot serve {source.whole.folder}: " + "; ".join(reasons))
    files = entry.write(source)
    folder = Path(folder)
    if folder.resolve() == source.whole.folder.resolve():
        raise ValueError(f"the export would overwrite the drafter it is made from: {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).unlink(missing_ok=True)
    write_tensors(folder / TENSORS, files.tensors, {"format": "pt"})
    command = entry.command(str(folder), source)
    declared = source.whole.declared
    write_json(
        folder / PROVENANCE,
        {
            "engine": engine,
            "command": command,
            "architecture": declared.architecture,
            "num_slots": declared.num_slots,
            "target": declared.target,
            "tensors": declared.tensors,
            "measured": declared.measured,
        },
    )
    write_json(folder / CONFIG, files.config)
    return Exported(engine, folder, command, files.notes)


def entry_for(engine: str, architecture: str) -> Entry:
    """The table's entry; ValueError names the engines, or the architectures this engine serves."""
    if engine not in ENGINES:
        raise ValueError(f"unknown engine {engine!r}; allowed: {', '.join(ENGINES)}")
    table = ENGINES[engine]
    if architecture not in table:
        raise ValueError(f"{engine} does not serve {architecture!r}; from here it gets {', '.join(table)}")
    return table[architecture]


def both_rope_spellings(rope: dict[str, Any]) -> dict[str, Any]:
    """rope_parameters (transformers 5) together with rope_theta and rope_scaling (before): engines differ in which
    they read."""
    kind = rope.get("rope_type", "default")
    spelled: dict[str, Any] = {"rope_parameters": dict(rope)}
    if "rope_theta" in rope:
        spelled["rope_theta"] = rope["rope_theta"]
    # transformers 5 lets rope_scaling win over rope_parameters, so it is the whole dictionary, theta included.
    spelled["rope_scaling"] = None if kind == "default" else dict(rope)
    return spelled


def is_default_layers(layers: list[int], num_target_layers: int) -> bool:
    """Whether an engine that is told no layers captures exactly these."""
    try:
        return tuple(layers) == default_layers(num_target_layers)
    except ValueError:
        return False


def _vllm_command(folder: str, source: Source) -> str:
    draft = {"method": "eagle3", "model": folder, "num_speculative_tokens": source.whole.declared.num_slots}
    return f"vllm serve {shlex.quote(source.target_path)} --speculative-config {shlex.quote(json.dumps(draft))}"


def _speculators_command(folder: str, source: Source) -> str:
    return f"vllm serve {shlex.quote(folder)}"


def _sglang_command(folder: str, source: Source) -> str:
    steps = source.whole.declared.num_slots
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(source.target_path)} --speculative-algorithm EAGLE3 "
        f"--speculative-draft-model-path {shlex.quote(folder)} --speculative-num-steps {steps} "
        f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {steps + 1}"
    )


# EAGLE-3
# ---------------------------------------------------------------------------------------------------------------


def _eagle3_body(source: Source) -> dict[str, Any]:
    """A Llama config of the draft layer: every size spelled out, nothing left to an engine's default."""
    layer, declared = source.settings["layer"], source.whole.declared
    return {
        "model_type": "llama",
        "hidden_size": layer["hidden_size"],
        "intermediate_size": layer["intermediate_size"],
        "num_hidden_layers": 1,
        "num_attention_heads": layer["num_attention_heads"],
        "num_key_value_heads": layer["num_key_value_heads"],
        "head_dim": layer["head_dim"],
        "hidden_act": layer["hidden_act"],
        "rms_norm_eps": layer["rms_norm_eps"],
        "max_position_embeddings": layer["max_position_embeddings"],
        **both_rope_spellings(layer["rope_parameters"]),
        "vocab_size": declared.vocabulary["target_size"],
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "num_aux_hidden_states": len(declared.layers),
        "target_hidden_size": layer["hidden_size"],
    }


def _eagle3_switches(source: Source) -> dict[str, Any]:
    return {
        "draft_vocab_size": source.whole.declared.vocabulary["size"],
        "norm_before_residual": source.settings["switches"]["norm_before_residual"],
        "norm_before_fc": False,
        "fc_norm": source.settings["switches"]["fc_norm"],
        "norm_output": source.settings["switches"]["norm_output"],
    }


def _dtype_keys(source: Source) -> dict[str, str]:
    name = str(source.dtype).removeprefix("torch.")
    return {"dtype": name, "torch_dtype": name}


def _eagle3_tensors(source: Source) -> dict[str, Tensor]:
    """Trained tensors under their own names (the engines' plain layout), target head rows and maps where they are
    needed."""
    whole = source.whole
    tensors = {name: tensor.to(source.dtype) for name, tensor in whole.tensors.items()}
    vocabulary = whole.vocabulary
    if vocabulary.is_full:
        return tensors  # vLLM has no slot for d2t then; without lm_head engines share the target's
    if "lm_head.weight" not in tensors:
        if source.target_head is None:
            raise ValueError(
                f"{whole.folder} shares the target's head; its {len(vocabulary)} rows need the target's weights"
            )
        tensors["lm_head.weight"] = source.target_head()[vocabulary.ids].to(source.dtype)
    return tensors | {"d2t": vocabulary.d2t, "t2d": vocabulary.t2d}


def _eagle3_refuse(source: Source) -> list[str]:
    layer = source.settings["layer"]
    return [f"hidden_act {layer['hidden_act']!r} (only silu)"] if layer["hidden_act"] != "silu" else []


def _eagle3_refuse_sglang(source: Source) -> list[str]:
    reasons = _eagle3_refuse(source)
    if source.settings["switches"]["norm_before_residual"]:
        reasons.append("it ignores norm_before_residual and would start the residual before the norm")
    if len(source.whole.declared.layers) == 1:
        reasons.append("with one captured layer it skips fc, because the feature is as wide as the embedding")
    return reasons


def _eagle3_notes(source: Source) -> list[str]:
    notes = []
    if str(source.whole.declared.target.get("architecture", "")).startswith("Gemma"):
        notes.append(
            "this target scales its embedding and engines do not for the drafter: input_layernorm undoes it up to eps"
        )
    return notes


def _in_ids(source: Source) -> list[int]:
    return [layer + 1 for layer in source.whole.declared.layers]


def _eagle3_vllm(source: Source) -> Files:
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_eagle3_body(source),
        **_eagle3_switches(source),
        "eagle_aux_hidden_state_layer_ids": _in_ids(source),
        **_dtype_keys(source),
    }
    notes = _eagle3_notes(source)
    if not is_default_layers(source.whole.declared.layers, source.num_target_layers):
        notes.append(
            "captured layers are not the default ones: this folder is for vLLM alone, export engine=sglang for SGLang"
        )
    return Files(config, _eagle3_tensors(source), notes)


def _eagle3_speculators(source: Source) -> Files:
    body = {"architectures": ["LlamaForCausalLM"], **_eagle3_body(source), **_dtype_keys(source)}
    target = source.whole.declared.target
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": source.whole.declared.num_slots,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": source.target_path, "architectures": [target.get("architecture")]},
        },
        "transformer_layer_config": body,
        **_eagle3_switches(source),
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": _in_ids(source),
        "tie_word_embeddings": False,
        **_dtype_keys(source),
    }
    return Files(config, _eagle3_tensors(source), _eagle3_notes(source))


def _eagle3_sglang(source: Source) -> Files:
    declared = source.whole.declared
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_eagle3_body(source),
        **_eagle3_switches(source),
        **_dtype_keys(source),
    }
    notes = _eagle3_notes(source)
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
    return Files(config, _eagle3_tensors(source), notes)


ENGINES: dict[str, dict[str, Entry]] = {
    "vllm": {"eagle3": Entry(_eagle3_refuse, _eagle3_vllm, _vllm_command)},
    "vllm_speculators": {"eagle3": Entry(_eagle3_refuse, _eagle3_speculators, _speculators_command)},
    "sglang": {"eagle3": Entry(_eagle3_refuse_sglang, _eagle3_sglang, _sglang_command)},
}
