"""What a cost model must know of a network: the weights a pass reads, the work of a token, the cache of a position.

A description is plain numbers, so that a 671B target can be reckoned with on a laptop. Sizes are parameters (not
bytes) unless a name says bytes; precision turns them into bytes. Input embeddings are looked up, not read, and do not
count.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

from safetensors import safe_open

from checkpoints.files import read_json
from checkpoints.folder import drafter_class

Family = Literal["chain", "block", "sequential", "heads"]
FAMILIES: tuple[Family, ...] = ("chain", "block", "sequential", "heads")
PRECISION_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0, "mxfp4": 0.53}
LOOKED_UP = {"markov_w1", "embed_tokens", "d2t", "t2d"}  # tables of which a pass reads single rows
BODY = ("fc", "layers", "midlayer", "norm", "hidden_norm", "fc_norm", "mask_hidden", "mask_embedding")


@dataclass(frozen=True)
class Experts:
    """The routed experts of a mixture.

    count: experts of one layer (E). chosen: of them a token takes (k). parameters: of one expert in one layer.
    layers: layers that have experts. precision: of their weights. kappa: how much consecutive tokens of one request
    repeat experts: m tokens choose like m ** kappa unrelated ones (1: unrelated; algorithms of arXiv 2505.19645
    assume that; about 0.7 fits 4 tokens that touch 2.5 times the experts of one).
    """

    count: int
    chosen: int
    parameters: int
    layers: int
    precision: str = "bf16"
    kappa: float = 0.7


@dataclass(frozen=True)
class Stack:
    """One forward pass.

    layers; width (D). parameters: dense weights that every pass reads, shared experts included, without input embedding
    and head. head: parameters of the output projection. kv_bytes: of one position, all layers. attention_flops: of one
    token over one cached position, all layers (2 multiply-adds each for scores and values). precision: of the dense
    weights and of the arithmetic; head_precision: of the head's weights.
    """

    layers: int
    width: int
    parameters: int
    head: int
    kv_bytes: float
    attention_flops: float
    experts: Experts | None = None
    precision: str = "bf16"
    head_precision: str = "bf16"

    def __post_init__(self) -> None:
        named = (self.precision, self.head_precision, *(() if self.experts is None else (self.experts.precision,)))
        for name in named:
            if name not in PRECISION_BYTES:
                raise ValueError(f"precision must be one of {', '.join(PRECISION_BYTES)}, got {name!r}")

    @property
    def dense_bytes(self) -> float:
        """Bytes of all dense weights, the head apart."""
        return self.parameters * PRECISION_BYTES[self.precision]

    @property
    def head_bytes(self) -> float:
        return self.head * PRECISION_BYTES[self.head_precision]

    @property
    def expert_bytes(self) -> float:
        """Bytes of one expert in all layers that have experts; 0 without."""
        own = self.experts
        return 0.0 if own is None else own.parameters * own.layers * PRECISION_BYTES[own.precision]

    @property
    def total_bytes(self) -> float:
        """Bytes of all weights but the input embedding."""
        count = 0 if self.experts is None else self.experts.count
        return self.dense_bytes + self.head_bytes + count * self.expert_bytes

    def quantised(self, precision: str, experts: str | None = None) -> Self:
        """The same stack with weights (and cache, where it is one byte) of another precision. The head stays."""
        kv_bytes = self.kv_bytes * (0.5 if precision == "fp8" and self.precision == "bf16" else 1.0)
        own = self.experts if self.experts is None else replace(self.experts, precision=experts or precision)
        return replace(self, precision=precision, kv_bytes=kv_bytes, experts=own)


@dataclass(frozen=True)
class DrafterShape:
    """How a drafter drafts, and what that reads.

    family: "chain", K passes of `body` one after another (autoregressive heads, repeated layers of the target's kind);
    "block", one pass over anchor and slots; "sequential", such a pass and then K small steps; "heads", one pass with
    parameters of its own for each slot. body: the pass. slot_parameters: of the small step, or of each slot's head.
    num_slots: that it was trained for.
    """

    family: Family
    body: Stack
    slot_parameters: int = 0
    num_slots: int = 7

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"drafter family must be one of {', '.join(FAMILIES)}, got {self.family!r}")

    @classmethod
    def from_folder(cls, folder: Path, target: Stack) -> Self:
        """The shape of a drafter folder of ours: sizes from the tensors' headers, family from the declared settings.

        target: whose head the drafter borrows when it has none, and whose kind of layer where it declares no sizes.
        ValueError for a folder that is none of ours.
        """
        declared = read_json(Path(folder) / "config.json")
        if declared.get("format") != "headstart-drafter":
            raise ValueError(f"{folder} is no drafter folder of headstart (format {declared.get('format')!r})")
        sizes = tensor_shapes(Path(folder) / "model.safetensors")
        return cls.from_declared(declared, sizes, target)

    @classmethod
    def from_declared(cls, declared: Mapping[str, Any], sizes: Mapping[str, tuple[int, ...]], target: Stack) -> Self:
        """declared: a drafter's config.json. sizes: tensor shapes by name. See `from_folder`. The drafter runs in the
        precision of the target's head, whatever its file holds. Its routed experts, if a layer of the target's own kind
        has some, are chosen as the target's are; ValueError when the target described has none."""
        settings, num_slots, precision = declared["settings"], int(declared["num_slots"]), target.head_precision
        family = family_of(declared)
        words, of = (declared["vocabulary"][name] for name in ("size", "target_size"))
        if "config" in settings:  # a model of its own
            whole = from_config(settings["config"], precision)
            return cls(family, replace(whole, head=whole.head * words // of), 0, num_slots)
        counted = {name: math.prod(shape) for name, shape in sizes.items() if not LOOKED_UP & set(name.split("."))}
        routed = {name: counted.pop(name) for name in list(counted) if "experts" in name.split(".")}
        modules = int(settings.get("modules", 1))
        experts = _routed(sum(routed.values()) // modules, target, precision)
        body = sum(size for name, size in counted.items() if name.split(".")[0] in BODY)
        head = sum(size for name, size in counted.items() if name.split(".")[0] == "lm_head")
        rest = sum(counted.values()) - body - head
        slot = rest // num_slots if family == "heads" else rest
        if family not in ("heads", "sequential"):
            body, slot = (body + rest) // modules, 0  # a slot reads one of its modules
        if not head and not (family == "heads" and settings.get("head") == "own"):
            head = target.head * words // of
        depth = len({name.split(".")[1] for name in sizes if name.startswith("layers.")}) or 1
        depth = 0 if family == "heads" else depth
        kv_bytes, flops = target.kv_bytes / target.layers * depth, target.attention_flops / target.layers * depth
        if layer := settings.get("layer"):  # else layers of the target's own kind
            kv_bytes = 2 * layer["num_key_value_heads"] * depth * layer["head_dim"] * PRECISION_BYTES[precision]
            flops = 4.0 * layer["num_attention_heads"] * depth * layer["head_dim"]
        stack = Stack(depth, target.width, body, head, kv_bytes, flops, experts, precision, precision)
        return cls(family, stack, slot, num_slots)


def _routed(parameters: int, target: Stack, precision: str) -> Experts | None:
    """The routed experts of one layer that holds `parameters` in all of them; None for 0."""
    if not parameters:
        return None
    if target.experts is None:
        raise ValueError("the drafter has routed experts and the target described has none: describe its own target")
    return replace(target.experts, parameters=parameters // target.experts.count, layers=1, precision=precision)


def family_of(declared: Mapping[str, Any]) -> Family:
    """How a drafter drafts, from what its class says of itself. declared: its config.json. ValueError for an unknown
    class."""
    kind = drafter_class(declared["architecture"])
    walks: bool | None = getattr(kind, "sequential", None)
    if walks is not None:  # a block: one pass, then perhaps a walk from slot to slot
        return "sequential" if walks else "block"
    if kind.branching == "slots":
        return "heads" if "num_layers" in declared["settings"] else "block"
    return "chain"


def transformer(
    layers: int,
    width: int,
    inner: int,
    heads: tuple[int, int, int],
    vocabulary: int,
    precision: str = "bf16",
    input_width: int | None = None,
) -> Stack:
    """A stack of ordinary layers with gated MLPs. inner: MLP width. heads: (query heads, key-value heads, head width).

    vocabulary: rows of the head, 0 for none. input_width: of what the query, key and value projections read (D).
    """
    if precision not in PRECISION_BYTES:
        raise ValueError(f"precision must be one of {', '.join(PRECISION_BYTES)}, got {precision!r}")
    query, kv, size = heads
    reads = input_width or width
    attention = reads * size * (query + 2 * kv) + query * size * width
    kv_bytes = 2 * kv * size * layers * PRECISION_BYTES[precision]
    parameters = layers * (attention + 3 * width * inner)
    return Stack(layers, width, parameters, vocabulary * width, kv_bytes, 4.0 * query * size * layers, None, precision)


def with_experts(stack: Stack, experts: Experts) -> Stack:
    """A stack with routed experts and their routers beside its dense weights."""
    return replace(stack, parameters=stack.parameters + stack.width * experts.count * experts.layers, experts=experts)


def from_config(config: Mapping[str, Any], precision: str = "bf16") -> Stack:
    """The shape of a dense target from its config.json. ValueError names what a description by hand needs: a mixture.

    precision: of the weights as they are run.
    """
    own = config.get("text_config") or config
    mixture = [key for key in own if "experts" in key and own[key]]
    if mixture:
        raise ValueError(f"{', '.join(mixture)}: describe a mixture by hand (eval.hardware_shapes.with_experts)")
    width, heads = own["hidden_size"], own["num_attention_heads"]
    size = own.get("head_dim") or width // heads
    chosen = (heads, own.get("num_key_value_heads") or heads, size)
    stack = transformer(own["num_hidden_layers"], width, own["intermediate_size"], chosen, own["vocab_size"], precision)
    return replace(stack, head_precision=precision)


def _latent_mixture() -> Stack:
    """DeepSeek-V3: latent attention (512 + 64 cached numbers a layer), 3 dense layers, 58 with 256 experts and a shared
    one; fp8 weights, bf16 head and cache."""
    layers, width = 61, 7168
    attention = width * 1536 + 1536 * 128 * 192 + width * 576 + 512 * 128 * 256 + 128 * 128 * width
    dense, shared = 3 * 3 * width * 18432, 58 * 3 * width * 2048
    parameters = layers * attention + dense + shared
    flops = 2.0 * layers * 128 * (576 + 512)
    stack = Stack(layers, width, parameters, 129280 * width, 576 * 2.0 * layers, flops, None, "fp8")
    return with_experts(stack, Experts(256, 8, 3 * width * 2048, 58, "fp8"))


def _oss() -> Stack:
    """gpt-oss-120B: 36 layers, 128 experts of which 4, experts in mxfp4; every second layer sees 128 positions only, so
    half the cache grows with the context."""
    stack = transformer(36, 2880, 0, (64, 8, 64), 201088)
    stack = replace(stack, kv_bytes=stack.kv_bytes / 2, attention_flops=stack.attention_flops / 2)
    return with_experts(stack, Experts(128, 4, 3 * 2880 * 2880, 36, "mxfp4"))


TARGETS: dict[str, Callable[[], Stack]] = {
    "llama-3.1-8b": lambda: transformer(32, 4096, 14336, (32, 8, 128), 128256),
    "llama-3.3-70b": lambda: transformer(80, 8192, 28672, (64, 8, 128), 128256),
    "qwen3-4b": lambda: transformer(36, 2560, 9728, (32, 8, 128), 151936),
    "qwen3-8b": lambda: transformer(36, 4096, 12288, (32, 8, 128), 151936),
    "smollm2-135m": lambda: transformer(30, 576, 1536, (9, 3, 64), 49152),
    "deepseek-v3": _latent_mixture,
    "gpt-oss-120b": _oss,
}


def target_shape(name: str, precision: str | None = None) -> Stack:
    """A known target by name, or the config.json in a folder. precision: other than its own, experts included.

    ValueError names the known ones.
    """
    if name in TARGETS:
        stack = TARGETS[name]()
        return stack if precision in (None, stack.precision) else stack.quantised(str(precision))
    if (Path(name).expanduser() / "config.json").exists():
        return from_config(read_json(Path(name).expanduser() / "config.json"), precision or "bf16")
    raise ValueError(f"no target {name!r}: known are {', '.join(TARGETS)}, or a folder with a config.json")


def one_layer_drafter(target: Stack, inner: int, heads: tuple[int, int, int], vocabulary: int) -> DrafterShape:
    """An autoregressive head of one layer over [embedding, feature], three fused target layers, a head of its own."""
    body = transformer(1, target.width, inner, heads, vocabulary, input_width=2 * target.width)
    return DrafterShape("chain", replace(body, parameters=body.parameters + 3 * target.width**2))


def block_drafter(
    target: Stack, inner: int, heads: tuple[int, int, int], depth: int, captured: int, num_slots: int
) -> DrafterShape:
    """A block drafter of `depth` layers over `captured` fused target layers with the target's head."""
    body = transformer(depth, target.width, inner, heads, target.head // target.width)
    body = replace(body, parameters=body.parameters + captured * target.width**2)
    return DrafterShape("block", body, num_slots=num_slots)


def layer_drafter(target: Stack, num_slots: int = 1) -> DrafterShape:
    """A native head: one of the target's own layers (experts and all), a projection of two widths, the target's
    head."""
    experts = None if target.experts is None else replace(target.experts, layers=1)
    layers = target.layers
    body = replace(
        target,
        layers=1,
        parameters=target.parameters // layers + 2 * target.width**2,
        kv_bytes=target.kv_bytes / layers,
        attention_flops=target.attention_flops / layers,
        experts=experts,
    )
    return DrafterShape("chain", body, num_slots=num_slots)


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes by name from a safetensors header; ValueError when the file is missing or torn."""
    try:
        with safe_open(path, framework="pt") as handle:
            return {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118
    except Exception as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error
