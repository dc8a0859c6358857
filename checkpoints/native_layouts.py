"""How target checkpoints store a native MTP head: one entry a layout.

Read in vLLM 0.32 (model_executor/models/{deepseek,glm4_moe,qwen3_next,qwen3_5,mimo}_mtp.py, v1/spec_decode) and, for
SGLang 0.5.23, in its nextn models. A head is one or more modules; ours are named enorm, hnorm, eh_proj, norm and
block.NAME, where NAME is the tensor's name inside the target's own decoder layer; the second module's have `more.0.`
before them.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

FUSION = {"enorm.weight": "enorm.weight", "hnorm.weight": "hnorm.weight", "eh_proj.weight": "eh_proj.weight"}
BLOCK = "block."
MORE = re.compile(r"more\.(\d+)\.(.+)")


@dataclass(frozen=True)
class State:
    """What an engine hands the head: the target's state (`reads`) and, from the second step on, its own (`recycles`),
    each post_norm or pre_norm, that is after or before the final norm (for `recycles` the head's own); and whether the
    embedding at position 0 is zero (`zero_first`)."""

    reads: str
    recycles: str
    zero_first: bool


@dataclass(frozen=True)
class Layout:
    """One way to store a head.

    counts: keys of config.json that give the number of modules, the first one there counts. roots: how names of a
    module begin; {place} is its number, counted from the target's depth when `from_depth`. names: native name after the
    root to our name; whatever else follows root + block is the decoder block, experts included. copies: tensors that
    repeat the target's "embedding" or "head", and are not part of the head. concat: order of the columns of eh_proj.
    serves: what each engine computes. offset_norms: enorm, hnorm and norm are stored as w - 1. one_module: the format
    has no place for a second one.
    """

    name: str
    counts: tuple[str, ...]
    roots: tuple[str, ...]
    names: dict[str, str]
    concat: str
    serves: dict[str, State]
    from_depth: bool = False
    block: str = ""
    copies: dict[str, str] = field(default_factory=dict)
    offset_norms: bool = False
    one_module: bool = False

    def root(self, names: Iterable[str], module: int, depth: int) -> str | None:
        """How the names of module 0, 1, ... begin among `names`; None when it is not there."""
        place = depth + module if self.from_depth else module
        for root in (text.format(place=place) for text in self.roots):
            if any(name.startswith(root) for name in names):
                return root
        return None

    def own_name(self, rest: str) -> str | None:
        """Our name of a tensor whose native name goes on with `rest` after the root; None for a copy."""
        if rest in self.copies:
            return None
        if rest in self.names:
            return self.names[rest]
        return BLOCK + rest.removeprefix(self.block)

    def is_offset(self, own: str) -> bool:
        """Whether a tensor of ours is stored as w - 1 in this layout. A block's norms belong to the target's own
        layer, which knows how they are stored."""
        return self.offset_norms and own in ("enorm.weight", "hnorm.weight", "norm.weight")


POST, ZEROED = State("post_norm", "post_norm", False), State("post_norm", "post_norm", True)
DEEP = ("model.layers.{place}.", "model.language_model.layers.{place}.")
COPIES = {"embed_tokens.weight": "embedding", "shared_head.head.weight": "head"}
SHARED = FUSION | {"shared_head.norm.weight": "norm.weight"}

DEEPSEEK = Layout(
    name="deepseek_v3",
    counts=("num_nextn_predict_layers",),
    roots=DEEP,
    names=SHARED,
    concat="embedding_first",
    serves={"vllm": ZEROED, "sglang": POST},
    from_depth=True,
    copies=COPIES,
)
GLM4 = Layout(
    name="glm4_moe",
    counts=("num_nextn_predict_layers",),
    roots=DEEP,
    names=SHARED,
    concat="embedding_first",
    # vLLM's GLM-4 module returns the residual sum and norms it for the logits only.
    serves={"vllm": State("post_norm", "pre_norm", True), "sglang": POST},
    from_depth=True,
    copies=COPIES,
)
QWEN3_NEXT = Layout(
    name="qwen3_next",
    counts=("mtp_num_hidden_layers", "num_nextn_predict_layers"),
    roots=("mtp.",),
    names={
        "pre_fc_norm_embedding.weight": "enorm.weight",
        "pre_fc_norm_hidden.weight": "hnorm.weight",
        "fc.weight": "eh_proj.weight",
        "norm.weight": "norm.weight",
    },
    concat="embedding_first",
    serves={"vllm": POST, "sglang": POST},
    block="layers.0.",
    offset_norms=True,
    one_module=True,
)
MIMO = Layout(
    name="mimo",
    counts=("num_nextn_predict_layers",),
    roots=("model.mtp_layers.{place}.",),
    names={
        "token_layernorm.weight": "enorm.weight",
        "hidden_layernorm.weight": "hnorm.weight",
        "input_proj.weight": "eh_proj.weight",
        "final_layernorm.weight": "norm.weight",
    },
    concat="hidden_first",
    # vLLM's MiMo applies the target's final norm with the logits only; SGLang hands out normed states.
    serves={"vllm": State("pre_norm", "post_norm", True), "sglang": ZEROED},
)

MIMO_ARCHITECTURE = "MiMoForCausalLM"
MODEL_TYPES = {
    "deepseek_v3": DEEPSEEK,
    "deepseek_v32": DEEPSEEK,
    "glm_moe_dsa": DEEPSEEK,
    "glm4_moe": GLM4,
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5": QWEN3_NEXT,
    "qwen3_5_text": QWEN3_NEXT,
    "qwen3_5_moe": QWEN3_NEXT,
    "qwen3_5_moe_text": QWEN3_NEXT,
    "mimo": MIMO,
}


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a config.json."""
    return config.get("text_config") or config


def layout_of(config: dict[str, Any]) -> Layout | None:
    """The layout that a target of this config.json keeps a native head in; None for a family without one. Engines
    know MiMo by its architecture, the others by their model type."""
    if MIMO_ARCHITECTURE in (config.get("architectures") or []):
        return MIMO
    return MODEL_TYPES.get(config.get("model_type", "")) or MODEL_TYPES.get(text_config(config).get("model_type", ""))


def declared_modules(layout: Layout, config: dict[str, Any]) -> int | None:
    """Number of modules that config.json declares; None when it says nothing."""
    for place in (text_config(config), config):
        for key in layout.counts:
            if isinstance(place.get(key), int):
                return int(place[key])
    return None


def own_modules(tensors: Iterable[str]) -> dict[str, tuple[int, str]]:
    """Our tensor names as (module, name within it)."""
    found = {}
    for name in tensors:
        match = MORE.fullmatch(name)
        found[name] = (int(match[1]) + 1, match[2]) if match else (0, name)
    return found


def own_prefix(module: int) -> str:
    """What stands before the names of a module of ours."""
    return f"more.{module - 1}." if module else ""
