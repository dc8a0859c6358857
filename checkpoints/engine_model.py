"""An independent model for the engines: the ordinary folder that transformers itself writes, tokenizer left out (every
engine takes the target's)."""

import json
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from checkpoints.engine_entry import (
    Entry,
    Files,
    Source,
    both_rope_spellings,
    dtype_keys,
    own_tensors,
    sglang_chain_command,
    vllm_entry,
)


def skeleton(config: PretrainedConfig) -> PreTrainedModel:
    """The model of a config without its weights, for its names and shapes."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def name_of(model: PreTrainedModel, part: Any) -> str:
    """The name of a submodule inside its model."""
    return next(name for name, module in model.named_modules() if module is part)


@cache
def _empty(config: str) -> PreTrainedModel:
    values = json.loads(config)
    return skeleton(AutoConfig.for_model(values.pop("model_type"), **values))


def _refuse(source: Source) -> list[str]:
    vocabulary = source.whole.vocabulary
    if vocabulary.is_full:
        return []
    whole = f"{len(vocabulary)} of {vocabulary.target_size} tokens"
    return [f"the draft vocabulary has {whole}: an independent model drafts with its whole head"]


def _files(source: Source) -> Files:
    model = _empty(json.dumps(source.settings["config"]))
    names = {"body": name_of(model, model.base_model), "lm_head": name_of(model, model.get_output_embeddings())}
    tensors: dict[str, Tensor] = {}
    for name, tensor in own_tensors(source).items():
        part, _, rest = name.partition(".")
        tensors[f"{names[part]}.{rest}"] = tensor
    config = dict(source.settings["config"])
    rope = config.get("rope_parameters") or {}
    if "rope_type" in rope:
        config |= both_rope_spellings(rope)
    notes = ["tokenizer files are not written: engines take the target's"]
    return Files({"architectures": [type(model).__name__], **config, **dtype_keys(source)}, tensors, notes)


def _command(folder: str, source: Source) -> str:
    return sglang_chain_command(folder, source, "STANDALONE")


def _transformers_command(folder: str, source: Source) -> str:
    return f"target.generate(ids, assistant_model=AutoModelForCausalLM.from_pretrained({json.dumps(folder)}))"


MODEL = {
    "vllm": vllm_entry(_refuse, _files, {"method": "draft_model"}),
    "sglang": Entry(_refuse, _files, _command),
    "transformers": Entry(_refuse, _files, _transformers_command),
}
