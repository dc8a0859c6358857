"""What a block drafter's folder says (DFlash, DFlash 2, DSpark, Domino).

Layouts: z-lab's, SpecForge's and DeepSpec's with flat or nested keys, transformers', and speculators'.

Every setting that changes what the head computes is taken here, or named in `refusals`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from checkpoints.layout import Head, Shapes, layer_shapes, read_pickled, stated_slots

MASK_FILE = "mask_embedding.pt"
FULL, SLIDING = "full_attention", "sliding_attention"
NESTED = ("dspark_config", "dflash_config", "eagle_config")
MUST_BE_OFF = ("attention_bias", "mlp_bias", "attention_sink_bias", "add_swa_attention_sink_bias", "use_swa")
NEUTRAL = {
    "logit_scale": 1.0,
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": 0.0,
    "attention_value_scale": 1.0,
}


@dataclass(frozen=True)
class Block:
    """A block drafter as declared. kind: the architecture's module name. layers: our ids (outputs), None when not
    stated; written_layers: as they stand in the file. rows: input rows of a block. num_slots: tokens drafted. windowed:
    draft layers with a window. head: settings of its head, as in our class."""

    kind: str
    layers: list[int] | None
    written_layers: list[int] | None
    mask_token: int | None
    rows: int | None
    slot_convention: Literal["anchor_first", "fill_in"]
    depth: int
    window: int | None
    windowed: list[int]
    head: dict[str, Any]

    @property
    def num_slots(self) -> int | None:
        """Tokens drafted by a block of so many rows."""
        return None if self.rows is None else self.rows - (self.slot_convention == "fill_in")


def setting(head: Head, key: str, default: Any = None) -> Any:
    """A key of a block drafter: from its nested group, the top level, prefixed `dspark_`, or the layers' config."""
    places = [head.config.get(name) or {} for name in NESTED]
    for place in (*places, head.config, head.body):
        for spelled in (key, f"dspark_{key}"):
            if place.get(spelled) is not None:
                return place[spelled]
    return default


def describe(head: Head) -> Block:
    """What the folder declares. ValueError when a key that nobody defaults is missing."""
    kind = _kind(head)
    depth = head.body.get("num_hidden_layers")
    if not isinstance(depth, int) or depth < 1:
        raise ValueError(f"{head.folder / 'config.json'}: num_hidden_layers is {depth!r}")
    layers, written = _layers(head)
    # transformers' own class is windowed unless its config says otherwise.
    types = head.body.get("layer_types") or [SLIDING if _is_transformers(head) else FULL] * depth
    windowed = [i for i, kind_ in enumerate(types) if kind_ == SLIDING]
    convention = _convention(head, kind)
    mask = setting(head, "mask_token_id", setting(head, "noise_token_id"))
    return Block(
        kind=kind,
        layers=layers,
        written_layers=written,
        mask_token=None if mask is None else int(mask),
        rows=_rows(head, convention),
        slot_convention=convention,
        depth=depth,
        window=head.body.get("sliding_window") if windowed else None,
        windowed=windowed,
        head=_head(head, kind),
    )


def _kind(head: Head) -> str:
    declared = head.config.get("speculators_model_type")
    if declared is not None:
        return str(declared)
    projector = setting(head, "projector_type")
    if projector in ("domino", "dspark"):
        return str(projector)
    if setting(head, "selector_rank") is not None:
        return "dflash2"
    return "dspark" if int(setting(head, "markov_rank", 0)) > 0 else "dflash"


def _convention(head: Head, kind: str) -> Literal["anchor_first", "fill_in"]:
    """Which row predicts slot 1. DeepSpec's class serves DFlash too, anchor-first as DSpark; z-lab's does not."""
    deepspec = any("DSpark" in name for name in head.config.get("architectures") or [])
    default = kind != "domino" and (kind == "dspark" or deepspec) and head.layout != "speculators"
    value = setting(head, "sample_from_anchor", setting(head, "shift_label", default))
    return "anchor_first" if value else "fill_in"


def _rows(head: Head, convention: str) -> int | None:
    rows = setting(head, "block_size")
    if rows is None and (slots := stated_slots(head)) is not None:
        return slots + (convention == "fill_in")
    return None if rows is None else int(rows)


def _layers(head: Head) -> tuple[list[int] | None, list[int] | None]:
    if head.layout == "speculators":
        written = head.config.get("aux_hidden_state_layer_ids")
        return (None, None) if not written else ([int(i) - 1 for i in written], list(written))
    written = setting(head, "target_layer_ids")
    return (None, None) if not written else ([int(i) for i in written], list(written))


def _head(head: Head, kind: str) -> dict[str, Any]:
    if kind == "dspark":
        confidence = setting(head, "enable_confidence_head", setting(head, "use_confidence_head"))
        return {
            "kind": str(setting(head, "markov_head_type", "vanilla")).lower(),
            "rank": int(setting(head, "markov_rank", 0)),
            "confidence": bool("confidence_head.proj.weight" in head.tensors if confidence is None else confidence),
            "confidence_reads_token": bool(setting(head, "confidence_head_with_markov", False)),
        }
    if kind == "domino":
        return {"state": int(setting(head, "gru_hidden_dim", 1024)), "rank": int(setting(head, "emb_dim", 256))}
    if kind == "dflash2":
        return {
            "candidates": int(setting(head, "selector_top_k", 16)),
            "rank": int(setting(head, "selector_rank")),
            "taps": int(setting(head, "conv_kernel_size", 2)),
            "group": int(setting(head, "conv_group_size", 16)),
        }
    return {}


def refusals(head: Head, block: Block) -> list[str]:
    """What our block drafters have no place for."""
    reasons = [f"{key} is on" for key in MUST_BE_OFF if setting(head, key)]
    for key, neutral in NEUTRAL.items():
        if float(setting(head, key, neutral)) != neutral:
            reasons.append(f"{key} is {setting(head, key)}")
    if block.kind == "domino" and int(setting(head, "pure_draft_prefix_len", 1)) != 1:
        reasons.append(f"pure_draft_prefix_len is {setting(head, 'pure_draft_prefix_len')}, not 1")
    if setting(head, "is_neox_style", True) is False:
        reasons.append("is_neox_style is false: its rotary angles are interleaved")
    causal = _stated_causality(head, block)
    for wrong, kinds in ((True, [i for i in range(block.depth) if i not in block.windowed]), (False, block.windowed)):
        if causal is wrong and kinds:
            said = "windowed" if kinds == block.windowed else "full"
            reasons.append(f"its {said} layers are {'causal' if wrong else 'not causal'} inside the block")
    return reasons


def _is_transformers(head: Head) -> bool:
    return str(head.body.get("model_type")).startswith("muse_glimmer")


def _stated_causality(head: Head, block: Block) -> bool | None:
    """One causality for all layers, or None: windowed layers are causal and full ones are not (z-lab, vLLM, SGLang)."""
    if head.layout == "speculators" and block.kind in ("dflash", "dflash2"):
        return not head.config.get("sliding_window_non_causal", True)
    if _is_transformers(head):
        return False
    return setting(head, "is_causal", setting(head, "causal"))


def expected_shapes(head: Head, block: Block) -> Shapes:
    """Name and shape of every tensor of such a drafter, from its config alone. ValueError names a size left out."""
    body = head.body
    needed = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    missing = [key for key in needed if not isinstance(body.get(key), int)]
    if missing:
        raise ValueError(f"{head.folder / 'config.json'} lacks {', '.join(missing)}")
    size = body["hidden_size"]
    width = body.get("head_dim") or size // body["num_attention_heads"]
    layer = layer_shapes(body, size) | {"self_attn.q_norm.weight": (width,), "self_attn.k_norm.weight": (width,)}
    if block.kind == "dflash2":
        taps, group = block.head["taps"], block.head["group"]
        for name in ("attention_conv", "mlp_conv"):
            layer[f"{name}.base_kernel"] = (2, taps, size)
            layer[f"{name}.kernel_projection.weight"] = (2 * taps * (size // group), size)
    shapes: Shapes = {"fc.weight": (size, size * len(block.layers or _spread(head, size)))}
    shapes |= {"hidden_norm.weight": (size,), "norm.weight": (size,)}
    shapes |= {f"layers.{i}.{name}": shape for i in range(block.depth) for name, shape in layer.items()}
    words = int(setting(head, "draft_vocab_size") or body["vocab_size"])
    return shapes | _head_shapes(block, size, body["vocab_size"], words)


def _spread(head: Head, size: int) -> range:
    """As many layers as fc reads, when the config names none."""
    fc = head.tensors.get("fc.weight")
    return range(1 if fc is None or fc.ndim != 2 else max(1, fc.shape[1] // size))


def _head_shapes(block: Block, size: int, vocabulary: int, words: int) -> Shapes:
    head, shapes = block.head, Shapes()
    if block.kind == "dspark":
        rank = head["rank"]
        shapes |= {"markov_head.markov_w1.weight": (vocabulary, rank), "markov_head.markov_w2.weight": (words, rank)}
        if head["kind"] == "gated":
            shapes |= {"markov_head.gate_proj.weight": (rank, size + rank), "markov_head.gate_proj.bias": (rank,)}
        if head["kind"] == "rnn":
            inputs = 2 * rank + size
            shapes |= {"markov_head.joint_proj.weight": (3 * rank, inputs), "markov_head.joint_proj.bias": (3 * rank,)}
        if head["confidence"]:
            reads = size + rank * head["confidence_reads_token"]
            shapes |= {"confidence_head.proj.weight": (1, reads), "confidence_head.proj.bias": (1,)}
    if block.kind == "domino":
        state, rank = head["state"], head["rank"]
        shapes |= {"prefix_gru.weight_ih_l0": (3 * state, size), "prefix_gru.weight_hh_l0": (3 * state, state)}
        shapes |= {"embed_proj.0.weight": (rank, size + state), "embed_proj.2.weight": (words, rank)}
    if block.kind == "dflash2":
        rank = head["rank"]
        shapes |= {
            "candidate_selector.predecessor_codebook": (vocabulary, rank),
            "candidate_selector.successor_codebook": (words, rank),
            "candidate_selector.hidden_projection.weight": (rank, size),
        }
    return shapes


def mask_embedding(folder: Path, mask_token: int | None) -> Tensor | None:
    """vLLM's own file with a trained mask row [D], None without one. ValueError when it is for another mask token or
    holds anything but tensors and numbers."""
    path = Path(folder) / MASK_FILE
    if not path.exists():
        return None
    found = read_pickled(path)
    row = found.get("embedding") if isinstance(found, dict) else found
    if not isinstance(row, Tensor):
        raise ValueError(f"{path} holds no embedding")
    if isinstance(found, dict) and found.get("mask_token_id", mask_token) != mask_token:
        raise ValueError(f"{path} is for mask token {found['mask_token_id']}, config.json has {mask_token}")
    return row.reshape(-1)
