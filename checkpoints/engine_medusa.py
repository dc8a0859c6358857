"""Medusa for vLLM, the one engine that runs it."""

from torch import Tensor

from checkpoints.engine_entry import Files, Source, dtype_keys, head_rows, own_tensors, vllm_entry


def _refuse(source: Source) -> list[str]:
    return []


def _whole_head(source: Source, rows: Tensor) -> Tensor:
    """rows [W, D] of a reduced vocabulary as a head of all words [V, D] that has the same best word.

    vLLM 0.32 has a token_map for this and then refuses it ("not initialized from checkpoint"). So every word outside
    gets the mean of the rows: its logit is the mean of theirs, and never their largest. vLLM drafts the best word only.
    """
    vocabulary = source.whole.vocabulary
    if vocabulary.is_full:
        return rows
    head = rows.float().mean(0).to(rows.dtype).repeat(vocabulary.target_size, 1)
    head[vocabulary.ids] = rows
    return head


def _vllm(source: Source) -> Files:
    """One projection for all heads (`original_lm_head`)."""
    settings, declared, vocabulary = source.settings, source.whole.declared, source.whole.vocabulary
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": declared.target["hidden_size"],
        "vocab_size": vocabulary.target_size,
        "truncated_vocab_size": vocabulary.target_size,
        "num_heads": settings["num_slots"],
        "num_hidden_layers": settings["num_layers"],
        "medusa_fc_bias": settings["bias"],
        "original_lm_head": True,
        **dtype_keys(source),
    }
    tensors: dict[str, Tensor] = own_tensors(source)
    rows = tensors["lm_head.weight"] if "lm_head.weight" in tensors else head_rows(source)
    tensors["lm_head.weight"] = _whole_head(source, rows)
    notes = []
    if not vocabulary.is_full:
        notes.append(f"the head has all {vocabulary.target_size} rows; words outside the draft vocabulary never win")
    return Files(config, tensors, notes)


MEDUSA = {"vllm": vllm_entry(_refuse, _vllm, {"method": "medusa"})}
