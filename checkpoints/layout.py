"""Reading a head that some tool wrote: family, layout, tensor names, vocabulary map and EAGLE-3's layer ids, stated not
guessed.

Used by the importers and by the linters, so both see a foreign file in the same way.
"""

import pickle
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from checkpoints.files import index_of, read_json, read_tensors
from checkpoints.folder import FORMAT
from checkpoints.weights import PACKED, unpack_weights

Shapes = dict[str, tuple[int, ...]]
Convention = Literal["outputs", "blocks_applied"]
Family = Literal["eagle3", "block", "peagle", "medusa", "eagle1", "model"]
CONVENTIONS = ("outputs", "blocks_applied")

# Names of the plain layout, after `midlayer.` / `layers.0.` and a leading `model.` are made one.
LAYER_TENSORS = (
    r"(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj|input_layernorm|hidden_norm|post_attention_layernorm)\.weight"
)
KNOWN = re.compile(
    rf"(midlayer\.{LAYER_TENSORS}|layers\.[1-9]\d*\.{LAYER_TENSORS}|fc\.weight|norm\.weight|lm_head\.weight"
    r"|embed_tokens\.weight|d2t|t2d|input_norm\.weight|fc_norm\.\d+\.weight)"
)

BLOCK_KINDS = ("dflash", "dflash2", "dspark")
BLOCK_WORDS = ("dflash", "dspark", "domino", "museglimmer")
BLOCK_NAMES = {
    "encoder.fc": "fc",
    "encoder.output_norm_enc": "hidden_norm",
    "context_proj": "fc",
    "context_norm": "hidden_norm",
    "final_norm": "norm",
    "markov_w1": "markov_head.markov_w1",
    "markov_w2": "markov_head.markov_w2",
    "confidence_proj": "confidence_head.proj",
}


@dataclass(frozen=True)
class Head:
    """A foreign head as it lies on disk.

    family: what kind of drafter it is. layout: "speculators" or "plain" (SpecForge, the EAGLE repository, engines).
    config: config.json. body: the layer's own config (transformer_layer_config in the speculators layout, config itself
    otherwise). tensors: under unified names, packed weights unpacked. written: the name that each has in the file.
    """

    folder: Path
    layout: str
    config: dict[str, Any]
    body: dict[str, Any]
    tensors: dict[str, Tensor]
    family: Family = "eagle3"
    written: dict[str, str] = field(default_factory=dict)

    def setting(self, key: str, default: Any = None) -> Any:
        """A switch: from eagle_config, then the top level, then the layer's config."""
        for place in (self.config.get("eagle_config") or {}, self.config, self.body):
            if place.get(key) is not None:
                return place[key]
        return default


def read_head(folder: Path) -> Head:
    """Read config.json and all tensors of a foreign head. ValueError when either is missing or torn, or two tensors
    collide under one unified name."""
    folder = Path(folder)
    config = read_json(folder / "config.json")
    if config.get("format") == FORMAT:
        raise ValueError(
            f"{folder} is our own drafter folder, which no engine reads: export it, then look at the export"
        )
    speculators = "speculators_model_type" in config
    body = config.get("transformer_layer_config") if speculators else config
    if not isinstance(body, dict):
        raise ValueError(
            f"{folder / 'config.json'}: transformer_layer_config must be a dictionary, got {type(body).__name__}"
        )
    tensors: dict[str, Tensor] = {}
    written: dict[str, str] = {}
    found = _tensors(folder)
    if any(name.endswith(PACKED) for name in found):
        found = unpack_weights(found, config.get("quantization_config") or {}, str(folder))
    family = family_of(config, found)
    for name, tensor in found.items():
        unified = unify(name, family)
        if unified in tensors:
            raise ValueError(f"{folder}: two tensors are both {unified!r} (one of them is written {name!r})")
        tensors[unified], written[unified] = tensor, name
    return Head(folder, "speculators" if speculators else "plain", config, body, tensors, family, written)


def family_of(config: dict[str, Any], tensors: Collection[str] = ()) -> Family:
    """Which family of drafters a folder holds: by the words of its config.json, and where those are a plain Llama's by
    the names of its tensors; EAGLE-3 when nothing says otherwise."""
    kind = config.get("speculators_model_type")
    names = " ".join(map(str, [*(config.get("architectures") or []), config.get("model_type")])).lower()
    if kind in BLOCK_KINDS or "dflash_config" in config or any(word in names for word in BLOCK_WORDS):
        return "block"
    if "medusa" in names:
        return "medusa"
    # A plain P-EAGLE folder has EAGLE-3's architecture (vLLM renames any other) and a mask token.
    masked = config.get("mask_token_id") is not None or config.get("pard_token") is not None
    if kind == "peagle" or "peagle" in names or masked:
        return "peagle"
    if tensors and kind is None and "eagle3" not in names:
        return _plain_family(names, tensors)
    return "eagle3"


def _plain_family(names: str, tensors: Collection[str]) -> Family:
    """EAGLE-1 and EAGLE-3 heads, and whole models, all come as LlamaForCausalLM. EAGLE-3 alone norms the hidden state;
    a whole model has no fc."""
    three = any("hidden_norm." in name or name.startswith(("midlayer", "d2t")) for name in tensors)
    if three:
        return "eagle3"
    fused = any(name.removeprefix("model.").startswith("fc.") for name in tensors)
    return "eagle1" if fused or "eagle" in names else "model"


def unify(name: str, family: Family = "eagle3") -> str:
    """One spelling for a tensor's name: no leading `model.`; for EAGLE-3 the first layer `midlayer.` and SGLang's
    aux_norm_* as fc_norm.*; for block drafters TorchSpec's, transformers' and ModelOpt's names as z-lab's."""
    if family == "model":
        return name
    name = name.removeprefix("model.")
    if family == "block":
        name = re.sub(r"^midlayer\.", "layers.0.", name)
        for found, wanted in BLOCK_NAMES.items():
            name = re.sub(rf"^{re.escape(found)}\.", f"{wanted}.", name)
        return {"draft_id_to_target_id": "d2t"}.get(name, name)
    if family in ("medusa", "eagle1"):
        return name
    if family == "peagle":
        return re.sub(r"^(midlayer|midlayers\.0)\.", "layers.0.", name)
    name = re.sub(r"^(layers\.0|midlayers\.0)\.", "midlayer.", name)
    for i, place in enumerate(("low", "mid", "high")):
        name = name.replace(f"aux_norm_{place}.", f"fc_norm.{i}.")
    return {"draft_id_to_target_id": "d2t"}.get(name, name)


def _tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder: safetensors (one file or an index), else pytorch_model.bin read without running code."""
    if (folder / "model.safetensors").exists():
        return read_tensors(folder / "model.safetensors")
    for index in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if (folder / index).exists():
            files = sorted(set(index_of(folder / index).values()))
            return {name: tensor for file in files for name, tensor in _read(folder / file).items()}
    if (folder / "pytorch_model.bin").exists():
        return _read(folder / "pytorch_model.bin")
    raise ValueError(f"{folder} holds no model.safetensors, no index of it and no pytorch_model.bin")


def _read(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        return read_tensors(path)
    found = read_pickled(path)
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise ValueError(f"{path} is no dictionary of tensors")
    return found


def read_pickled(path: Path) -> Any:
    """What torch.save wrote, without running code: tensors, numbers and containers. ValueError for any other pickle."""
    try:
        # weights_only refuses every pickle that would run code; a plain state dict needs none.
        return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(
            f"{path} is no plain dictionary of tensors, and other pickles are not opened: {error}"
        ) from error


def vocabulary_offsets(head: Head) -> Tensor | None:
    """d2t as int64 offsets, or None for a full vocabulary. ValueError when there is no map but the head is narrower
    than the target's vocabulary, or the map does not fit: absolute ids are named as such."""
    d2t, size = head.tensors.get("d2t"), target_vocabulary(head)
    rows = head.setting("draft_vocab_size") or size
    if d2t is None:
        if rows != size:
            raise ValueError(f"{head.folder}: draft_vocab_size {rows} is below {size}, but there is no d2t")
        return None
    if d2t.ndim != 1 or len(d2t) != rows:
        raise ValueError(f"{head.folder}: d2t is {tuple(d2t.shape)}, draft_vocab_size is {rows}")
    if map_is_absolute(d2t, size, head.tensors.get("t2d")):
        raise ValueError(
            f"{head.folder}: d2t holds absolute ids (as offsets they reach {int((torch.arange(rows) + d2t).max())}, "
            f"the vocabulary ends at {size - 1}); engines read offsets, so subtract arange({rows})"
        )
    return d2t.to(torch.int64)


def map_is_absolute(d2t: Tensor, target_size: int, t2d: Tensor | None = None) -> bool:
    """Whether d2t holds target ids instead of offsets.

    t2d decides when it agrees with one reading; else d2t is absolute when, as offsets, it leaves the vocabulary or
    names a token twice, and as ids it does neither.
    """
    values = d2t.to(torch.int64)
    mapped = torch.arange(len(values)) + values

    def fits(ids: Tensor) -> bool:
        return int(ids.min()) >= 0 and int(ids.max()) < target_size and len(ids.unique()) == len(ids)

    if t2d is not None and len(t2d) == target_size and int(t2d.sum()) == len(values):
        members = t2d.bool()
        if fits(mapped) and bool(members[mapped].all()):
            return False
        if fits(values) and bool(members[values].all()):
            return True
    return fits(values) and not fits(mapped)


def target_vocabulary(head: Head) -> int:
    """Size of the target's vocabulary; ValueError when the config does not say."""
    size = head.body.get("vocab_size")
    if not isinstance(size, int):
        raise ValueError(f"{head.folder / 'config.json'} has no vocab_size")
    return size


def stated_layers(head: Head, convention: Convention | None = None) -> tuple[list[int] | None, str]:
    """Captured layers as our ids (outputs), and where they were read; None when the file leaves them to the engine.

    Top-level `eagle_aux_hidden_state_layer_ids` counts blocks applied (vLLM, speculators); the list nested in
    eagle_config counts outputs (SGLang, ModelOpt, AngelSlim). `convention` overrides for a file known to break the
    rule. ValueError when both lists are there and disagree.
    """
    if convention is not None and convention not in CONVENTIONS:
        raise ValueError(f"layer convention must be one of {', '.join(CONVENTIONS)}, got {convention!r}")
    key = "eagle_aux_hidden_state_layer_ids"
    top = head.config.get(key) or head.body.get(key)
    nested = (head.config.get("eagle_config") or {}).get(key)
    found = {}
    if top:
        found["top level"] = _outputs(top, convention or "blocks_applied")
    if nested:
        found["eagle_config"] = _outputs(nested, convention or "outputs")
    if len(found) == 2 and found["top level"] != found["eagle_config"]:
        raise ValueError(
            f"{head.folder}: the layer ids at the top level {top} (blocks applied) and in eagle_config {nested} "
            "(outputs) name different layers; pass layer_convention for the list that is right"
        )
    for place, layers in found.items():
        if layers != sorted(set(layers)) or layers[0] < 0:
            raise ValueError(f"{head.folder}: layer ids at {place} give outputs {layers}, not ascending ids from 0")
        return layers, place
    return None, "not stated"


def _outputs(ids: list[int], convention: str) -> list[int]:
    return [int(i) - 1 if convention == "blocks_applied" else int(i) for i in ids]


def num_features(head: Head) -> int:
    """Captured layers that fc reads, by its shape. ValueError when fc is missing or its width is no multiple."""
    fc = head.tensors.get("fc.weight")
    if fc is None or fc.ndim != 2:
        raise ValueError(f"{head.folder} has no fc.weight: it is no EAGLE-3 head")
    width = head.setting("target_hidden_size") or head.body["hidden_size"]
    if fc.shape[1] % width:
        raise ValueError(f"{head.folder}: fc.weight reads {fc.shape[1]} values, no multiple of the target's {width}")
    return fc.shape[1] // width


def stated_slots(head: Head) -> int | None:
    """Tokens to draft as speculators write them; None in other layouts."""
    methods = (head.config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return methods[0].get("speculative_tokens")


def rope_of(body: dict[str, Any]) -> dict[str, Any]:
    """rope_parameters of a layer config in either spelling; the type's old key `type` becomes rope_type."""
    rope = dict(body.get("rope_parameters") or body.get("rope_scaling") or {})
    if "type" in rope:
        rope.setdefault("rope_type", rope["type"])
        rope.pop("type")
    rope.setdefault("rope_type", "default")
    rope.setdefault("rope_theta", body.get("rope_theta", 10000.0))
    return rope


def layer_shapes(body: dict[str, Any], reads: int) -> Shapes:
    """Names and shapes of a Llama layer of a config's sizes, whose attention reads inputs `reads` wide."""
    size, inner, heads = body["hidden_size"], body["intermediate_size"], body["num_attention_heads"]
    width, groups = body.get("head_dim") or size // heads, body.get("num_key_value_heads") or heads
    return {
        "input_layernorm.weight": (size,),
        "post_attention_layernorm.weight": (size,),
        "self_attn.q_proj.weight": (heads * width, reads),
        "self_attn.k_proj.weight": (groups * width, reads),
        "self_attn.v_proj.weight": (groups * width, reads),
        "self_attn.o_proj.weight": (size, heads * width),
        "mlp.gate_proj.weight": (inner, size),
        "mlp.up_proj.weight": (inner, size),
        "mlp.down_proj.weight": (size, inner),
    }
