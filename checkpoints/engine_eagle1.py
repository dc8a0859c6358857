"""EAGLE-1 for vLLM and SGLang. Both add no norm, share the target's embedding and head, feed the last hidden state
after the final norm and recycle the layer's own output; so does `drafters/eagle.py`. HASS is the same folder."""

import torch
from torch import Tensor

from checkpoints.engine_entry import (
    Entry,
    Files,
    Source,
    body_config,
    dtype_keys,
    only_silu,
    own_tensors,
    sglang_chain_command,
    vllm_entry,
)


def _refuse(source: Source) -> list[str]:
    vocabulary, reasons = source.whole.vocabulary, only_silu(source)
    if not vocabulary.is_full:
        whole = f"{len(vocabulary)} of {vocabulary.target_size} tokens"
        reasons.append(f"the draft vocabulary has {whole}: EAGLE-1 drafts with the target's whole head")
    return reasons


def _refuse_vllm(source: Source) -> list[str]:
    return _refuse(source) + (["it drops fc.bias without a word"] if source.settings["bias"] else [])


def _files(source: Source, architecture: str, tensors: dict[str, Tensor]) -> Files:
    config = {
        "architectures": [architecture],
        **body_config(source, "llama", source.settings["depth"]),
        "bias": "fc.bias" in tensors,
        **dtype_keys(source),
    }
    return Files(config, tensors)


def _vllm(source: Source) -> Files:
    return _files(source, "EagleLlamaForCausalLM", own_tensors(source))


def _sglang(source: Source) -> Files:
    tensors = own_tensors(source)
    # Its fc always has a bias, which stays at a random start when the file has none.
    tensors.setdefault("fc.bias", torch.zeros(tensors["fc.weight"].shape[0], dtype=source.dtype))
    return _files(source, "LlamaForCausalLMEagle", tensors)


def _command(folder: str, source: Source) -> str:
    return sglang_chain_command(folder, source, "EAGLE")


EAGLE1 = {
    "vllm": vllm_entry(_refuse_vllm, _vllm, {"method": "eagle"}),
    "sglang": Entry(_refuse, _sglang, _command),
}
