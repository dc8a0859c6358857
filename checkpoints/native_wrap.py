"""A native head for a target that has none: a Llama-like target as a MiMo model, which engines run with an MTP head.

MiMo is Qwen2 plus `model.mtp_layers.{i}.*`. Engines find it by `architectures`; model_type stays the target's own, so
that transformers opens the folder as what the target was. Nothing of the target changes: one more file holds the head,
zero biases where the target has none (Qwen2's attention has them), and for a tied target its head once more.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoints.engine_entry import both_rope_spellings
from checkpoints.files import write_json, write_tensors
from checkpoints.folder import Whole
from checkpoints.layout import rope_of
from checkpoints.native import agree, claim, write_card
from checkpoints.native_files import CONFIG, Checkpoint, companions, copy_file, data_bytes
from checkpoints.native_layouts import BLOCK, MIMO, MIMO_ARCHITECTURE, own_modules
from checkpoints.target_files import INDEX

EXTRA = "model-mtp.safetensors"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
SIDES = ("q_proj", "k_proj", "v_proj")
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def wrap(
    whole: Whole,
    checkpoint: Checkpoint,
    out: Path,
    *,
    engine: str,
    link: bool,
    provenance: dict[str, Any] | None,
    card: str | None = None,
) -> list[str]:
    """Write the target with the drafter as its MiMo head; see native.stitch. ValueError names everything of the target
    that MiMo cannot be."""
    reasons = _unlike(checkpoint)
    if reasons:
        raise ValueError(
            f"{checkpoint.folder} has no native MTP head and cannot become a MiMo model: {'; '.join(reasons)}"
        )
    agree(whole, MIMO, engine, 1)
    tensors = _extra(whole, checkpoint)
    claim(out, [checkpoint.folder, whole.folder], provenance)
    for file in sorted(set(checkpoint.files.values())):
        copy_file(checkpoint.folder / file, out / file, link)
    for path in companions(checkpoint.folder):
        if path.name != INDEX:
            copy_file(path, out / path.name, link)
    write_tensors(out / EXTRA, tensors, {"format": "pt"})
    size = data_bytes(tensors) + sum(
        checkpoint.entry(name).end - checkpoint.entry(name).begin for name in checkpoint.files
    )
    places = checkpoint.files | dict.fromkeys(tensors, EXTRA)
    write_json(out / INDEX, {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))})
    write_card(out, card)
    write_json(out / CONFIG, _config(checkpoint))
    zeros = sum(name.startswith("model.layers.") for name in tensors)
    return [
        f"{MIMO_ARCHITECTURE} of a {checkpoint.config['model_type']}: {EXTRA} holds {len(tensors)} tensors, "
        f"{zeros} of them zero biases; every file of the target is as it was, {CONFIG} and {INDEX} are new"
    ]


def _unlike(checkpoint: Checkpoint) -> list[str]:
    """Everything in which the target is no Qwen2-like model, as engines build MiMo."""
    config, found = checkpoint.config, []
    kind = config.get("model_type")
    if kind not in FAMILIES:
        return [f"model type {kind!r} is none of {', '.join(FAMILIES)}"]
    if config.get("quantization_config"):
        found.append("it is quantised, and the head would be read as quantised too")
    width, heads = config["hidden_size"], config["num_attention_heads"]
    if (config.get("head_dim") or width // heads) * heads != width:
        found.append(f"head_dim {config['head_dim']} is not hidden_size / heads = {width / heads:g}")
    if config.get("hidden_act", "silu") != "silu":
        found.append(f"hidden_act is {config['hidden_act']!r}, MiMo has silu")
    windowed = config.get("sliding_window") is not None and (kind == "mistral" or config.get("use_sliding_window"))
    if windowed:
        found.append(f"it attends a sliding window of {config['sliding_window']}")
    names = [name for name in checkpoint.files if name.startswith("model.layers.")]
    odd = sorted({name.split(".", 3)[3] for name in names if name.endswith(("o_proj.bias", "down_proj.bias"))})
    if odd:
        found.append(f"it has {', '.join(odd)}")
    if "model.embed_tokens.weight" not in checkpoint.files:
        found.append("its tensors are not named model.embed_tokens, model.layers, ...")
    return found


def _extra(whole: Whole, checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Every tensor that the target's own files lack."""
    kind = checkpoint.entry(checkpoint.embedding()).dtype
    if kind not in DTYPES:
        raise ValueError(f"{checkpoint.embedding()} is {kind}; a head is written as {', '.join(DTYPES)}")
    dtype = DTYPES[kind]
    native = {own: name for name, own in MIMO.names.items()}
    root = MIMO.roots[0].format(place=0)
    found: dict[str, Tensor] = {}
    for name, (_, own) in own_modules(whole.tensors).items():
        rest = native.get(own) or own.removeprefix(BLOCK)
        found[root + rest] = whole.tensors[name].to(dtype)
    last = f"model.layers.{checkpoint.depth - 1}."
    wanted = {root + name for name in MIMO.names}
    wanted |= {root + name.removeprefix(last) for name in checkpoint.files if name.startswith(last)}
    missing, unknown = sorted(wanted - set(found)), sorted(set(found) - wanted)
    if missing or unknown:
        raise ValueError(
            f"{whole.folder} is no block of {checkpoint.folder}'s kind: missing {', '.join(missing) or 'none'}; left "
            f"over {', '.join(unknown) or 'none'}"
        )
    for before in [root, *(f"model.layers.{i}." for i in range(checkpoint.depth))]:
        for side in SIDES:
            weight, bias = f"{before}self_attn.{side}.weight", f"{before}self_attn.{side}.bias"
            if bias not in found and bias not in checkpoint.files:
                rows = len(found[weight]) if weight in found else checkpoint.entry(weight).shape[0]
                found[bias] = torch.zeros(rows, dtype=dtype)
    if checkpoint.head() == checkpoint.embedding():
        found["lm_head.weight"] = checkpoint.tensor(checkpoint.embedding())
    return found


def _config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The target's config with MiMo's architecture, the head, and rope in both spellings."""
    config = dict(checkpoint.config)
    normed = {"qk_norm": True} if config["model_type"] == "qwen3" else {}
    return config | {
        "architectures": [MIMO_ARCHITECTURE],
        "num_nextn_predict_layers": 1,
        "use_sliding_window": False,
        **normed,
        **both_rope_spellings(rope_of(config)),
    }
