"""What an engine's table is made of, and what its entries share. No drafter is named here."""

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoints.folder import Whole
from drafters.contract import default_layers

PROVENANCE = "headstart.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Targets whose embedding is multiplied before the first layer; engines hand a drafter the unscaled rows.
SCALED_EMBEDDINGS = ("Gemma", "Granite")


@dataclass(frozen=True)
class Source:
    """A saved drafter on its way out.

    target_path: folder or hub id of the target, as the engine will open it. target_head: gives the target's [V, D] head
    when a drafter that shares it needs some of its rows. dtype: of the exported floating tensors. link: link, do not
    copy, files of the target that an export holds unchanged. weights: int8, int4 or NAME:GROUP (checkpoints.weights).
    """

    whole: Whole
    target_path: str
    dtype: torch.dtype
    target_head: Callable[[], Tensor] | None = None
    link: bool = False
    weights: str | None = None

    @property
    def settings(self) -> dict[str, Any]:
        return self.whole.declared.settings

    @property
    def num_target_layers(self) -> int:
        return int(self.whole.declared.target["num_layers"])

    @property
    def in_ids(self) -> list[int]:
        """Captured layers as vLLM and speculators count them: blocks applied."""
        return [layer + 1 for layer in self.whole.declared.layers]

    @property
    def scales_embedding(self) -> bool:
        return str(self.whole.declared.target.get("architecture", "")).startswith(SCALED_EMBEDDINGS)


@dataclass(frozen=True)
class Files:
    """config: config.json. tensors: model.safetensors. notes: what a user should know, one line each. torch_files:
    further files that an engine reads with torch.load, by name: plain dictionaries of tensors and numbers."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    notes: list[str] = field(default_factory=list)
    torch_files: dict[str, dict[str, Any]] = field(default_factory=dict)


def _nothing(source: Source) -> None:
    return None


@dataclass(frozen=True)
class Entry:
    """How one engine serves one architecture.

    refuse: every reason why it cannot. write: the folder's content. command(folder, source): the exact serve command.
    speculative: vLLM's speculative config without model and number of tokens; None where the engine is not vLLM.
    needs: what an engine must have beyond the ordinary, None for nothing. whole(source, folder, provenance, card):
    writes target and drafter as one model, instead of `write`, and returns notes; the engine then opens that folder as
    its target. weights: whether the engine reads packed weights of this architecture.
    """

    refuse: Callable[[Source], list[str]]
    write: Callable[[Source], Files]
    command: Callable[[str, Source], str]
    speculative: dict[str, Any] | None = None
    needs: Callable[[Source], str | None] = _nothing
    whole: Callable[[Source, Path, dict[str, Any], str], list[str]] | None = None
    weights: bool = False


def vllm_entry(
    refuse: Callable[[Source], list[str]],
    write: Callable[[Source], Files],
    speculative: dict[str, Any],
    needs: Callable[[Source], str | None] = _nothing,
) -> Entry:
    """An entry that is served with --speculative-config."""

    def command(folder: str, source: Source) -> str:
        draft = {**speculative, "model": folder, "num_speculative_tokens": source.whole.declared.num_slots}
        return f"vllm serve {shlex.quote(source.target_path)} --speculative-config {shlex.quote(json.dumps(draft))}"

    return Entry(refuse, write, command, speculative, needs)


def speculators_entry(
    refuse: Callable[[Source], list[str]],
    write: Callable[[Source], Files],
    speculative: dict[str, Any],
    needs: Callable[[Source], str | None] = _nothing,
) -> Entry:
    """An entry whose folder alone starts target and drafter."""
    return Entry(refuse, write, lambda folder, source: f"vllm serve {shlex.quote(folder)}", speculative, needs)


def sglang_command(folder: str, source: Source, algorithm: str, options: str) -> str:
    """SGLang's server with a drafter."""
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(source.target_path)} "
        f"--speculative-algorithm {algorithm} --speculative-draft-model-path {shlex.quote(folder)} {options}"
    )


def sglang_chain_command(folder: str, source: Source, algorithm: str) -> str:
    """The same for a drafted chain of the drafter's own slots."""
    chain = sglang_chain(source.whole.declared.num_slots)
    return sglang_command(folder, source, algorithm, " ".join(f"--{name} {value}" for name, value in chain.items()))


def only_silu(source: Source) -> list[str]:
    """A reason to refuse where the layers' activation is not the one that engines have."""
    act = source.settings["layer"]["hidden_act"]
    return [] if act == "silu" else [f"hidden_act {act!r} (only silu)"]


def body_config(source: Source, model_type: str, num_layers: int) -> dict[str, Any]:
    """A config of the draft layers: every size spelled out, nothing left to an engine's default."""
    layer, declared = source.settings["layer"], source.whole.declared
    return {
        "model_type": model_type,
        "hidden_size": layer["hidden_size"],
        "intermediate_size": layer["intermediate_size"],
        "num_hidden_layers": num_layers,
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
        "target_hidden_size": layer["hidden_size"],
    }


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


def dtype_keys(source: Source) -> dict[str, str]:
    """The tensors' dtype in both spellings."""
    name = str(source.dtype).removeprefix("torch.")
    return {"dtype": name, "torch_dtype": name}


def speculators_config(source: Source, algorithm: str, layer: dict[str, Any]) -> dict[str, Any]:
    """The speculators wrapper around the draft layers' config, without the keys of the algorithm."""
    declared = source.whole.declared
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": declared.num_slots,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "speculators_model_type": algorithm,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "name_or_path": source.target_path,
                "architectures": [declared.target.get("architecture")],
            },
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": declared.vocabulary["size"],
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        **dtype_keys(source),
    }


def mapped_tensors(source: Source, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` with what a reduced vocabulary needs: the target head's rows where no own head is there, and the maps.

    With a whole vocabulary nothing is added: engines share the target's head, and vLLM has no slot for d2t.
    """
    vocabulary = source.whole.vocabulary
    if vocabulary.is_full:
        return tensors
    if "lm_head.weight" not in tensors:
        tensors = tensors | {"lm_head.weight": head_rows(source)}
    return tensors | {"d2t": vocabulary.d2t, "t2d": vocabulary.t2d}


def head_rows(source: Source) -> Tensor:
    """The target head's rows of the draft vocabulary. ValueError when the target's weights are not at hand."""
    if source.target_head is None:
        raise ValueError(
            f"{source.whole.folder} shares the target's head; its {len(source.whole.vocabulary)} rows need the "
            "target's weights"
        )
    return source.target_head()[source.whole.vocabulary.ids].to(source.dtype)


def own_tensors(source: Source) -> dict[str, Tensor]:
    """Trained tensors in the export's dtype, under their own names."""
    return {name: tensor.to(source.dtype) for name, tensor in source.whole.tensors.items()}


def is_default_layers(layers: list[int], num_target_layers: int) -> bool:
    """Whether an EAGLE-type engine that is told no layers captures exactly these."""
    try:
        return tuple(layers) == default_layers(num_target_layers)
    except ValueError:
        return False


def sglang_chain(num_slots: int) -> dict[str, int]:
    """SGLang's server arguments for a drafted chain of num_slots tokens."""
    return {
        "speculative-num-steps": num_slots,
        "speculative-eagle-topk": 1,
        "speculative-num-draft-tokens": num_slots + 1,
    }
