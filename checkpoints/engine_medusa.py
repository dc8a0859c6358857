"""Medusa for vLLM, the one engine that runs it."""

from torch import Tensor

from checkpoints.engine_entry import Files, Source, dtype_keys, head_rows, own_tensors, vllm_entry


def _refuse(source: Source) -> list[str]:
    return []


def _vllm(source: Source) -> Files:
    """One projection for all heads (`original_lm_head`); a reduced vocabulary is a token_map of target ids."""
    settings, declared, vocabulary = source.settings, source.whole.declared, source.whole.vocabulary
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": declared.target["hidden_size"],
        "vocab_size": vocabulary.target_size,
        "truncated_vocab_size": len(vocabulary),
        "num_heads": settings["num_slots"],
        "num_hidden_layers": settings["num_layers"],
        "medusa_fc_bias": settings["bias"],
        "original_lm_head": True,
        **dtype_keys(source),
    }
    tensors: dict[str, Tensor] = own_tensors(source)
    if "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = head_rows(source)
    if not vocabulary.is_full:
        tensors["token_map"] = vocabulary.ids
    return Files(config, tensors)


MEDUSA = {"vllm": vllm_entry(_refuse, _vllm, {"method": "medusa"})}
