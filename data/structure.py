"""Where a model keeps its decoder layers, final norm, head and embedding: by structure and config, not by family name.

Letters in shapes: D hidden width, V target vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from accelerate.utils import align_module_device
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel

NORM_NAMES = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "final_norm", "norm_f")
# Config keys by which families scale; the value's use is (key, multiplies?).
LOGIT_SCALES = (("logit_scale", True), ("lm_head_multiplier", True), ("logits_scaling", False))
EMBEDDING_SCALES = ("embedding_multiplier", "scale_emb")
SOFTCAPS = ("final_logit_softcapping",)
# Layers that keep keys and values by position, which can be taken back, and nothing else.
PLAIN_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")


@dataclass
class Anatomy:
    """The target's pieces by role. embedding [V', D], head [V, D], head_bias [V] or None; names say where each was."""

    config: PretrainedConfig
    decoder: nn.Module
    layers: nn.ModuleList
    norm: nn.Module
    embedding: Tensor
    head: Tensor
    head_bias: Tensor | None
    embedding_scale: float
    logit_scale: float
    logit_softcap: float | None
    names: dict[str, str]

    def last_block(self) -> dict[str, Tensor]:
        """Tensors of the last decoder layer by their names inside it."""
        block = self.layers[-1]
        return dict(whole_parameters(block))

    def check_embedding(self, tokens: Tensor, first: Tensor) -> None:
        """The first layer's input must be embedding x scale: ValueError otherwise. tokens [1, N], first [1, N, D]."""
        rows = self.embedding[tokens].to(first.device).float()
        error = float((rows * self.embedding_scale - first.float()).norm() / first.float().norm())
        if not error < 0.02:
            measured = float((rows * first.float()).sum() / rows.square().sum())
            raise ValueError(
                f"the first decoder layer does not read embedding x {self.embedding_scale:g} (relative difference "
                f"{error:.2g}; least-squares scale {measured:g}): positions or norms are added to the embedding, or an "
                f"unknown scale. {self.describe()}"
            )

    def describe(self) -> str:
        """Where each piece was found, for error messages."""
        scales = (
            f"embedding scale {self.embedding_scale:g}, logit scale {self.logit_scale:g}, softcap {self.logit_softcap}"
        )
        return ", ".join(f"{role} {name}" for role, name in self.names.items()) + f"; {scales}"


def anatomy(model: PreTrainedModel) -> Anatomy:
    """Find the pieces of a text-only or wrapped model. ValueError lists the candidates when a piece is not found."""
    config = model.config.get_text_config(decoder=True)
    embedder = _embedder(model)
    decoder_name, decoder, layers = _decoder(model, config, embedder)
    norm_name, norm = _final_norm(decoder, config, decoder_name)
    head = _head(model, config)
    multiplies = [(key, sign) for key, sign in LOGIT_SCALES if getattr(config, key, None) is not None]
    scale = 1.0
    for key, sign in multiplies:
        scale *= float(getattr(config, key)) if sign else 1.0 / float(getattr(config, key))
    softcap = next((float(getattr(config, key)) for key in SOFTCAPS if getattr(config, key, None)), None)
    names = {module: name for name, module in model.named_modules()}
    return Anatomy(
        config=config,
        decoder=decoder,
        layers=layers,
        norm=norm,
        embedding=_whole(embedder, "weight"),
        head=_whole(head, "weight"),
        head_bias=_whole(head, "bias") if getattr(head, "bias", None) is not None else None,
        embedding_scale=_embedding_scale(embedder, config),
        logit_scale=scale,
        logit_softcap=softcap,
        names={
            "decoder": decoder_name or "(the model)",
            "final norm": norm_name,
            "embedding": names[embedder],
            "head": names[head],
        },
    )


def layer_kinds(model: PreTrainedModel) -> set[str]:
    """Kinds of the decoder's layers by what they keep while decoding: the config's layer types; "recurrent state" where
    the model says that it keeps one and its layer types do not."""
    config: PretrainedConfig = model.config.get_text_config(decoder=True)
    windowed = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention" if windowed else "full_attention"])
    if getattr(model, "_is_stateful", False) and kinds <= set(PLAIN_ATTENTION):
        kinds.add("recurrent state")
    return kinds


def _embedder(model: PreTrainedModel) -> nn.Module:
    found = model.get_input_embeddings()
    if not isinstance(getattr(found, "weight", None), Tensor) or found.weight.ndim != 2:
        seen = [name for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
        raise ValueError(f"no input embedding in {type(model).__name__}; embeddings seen: {', '.join(seen) or 'none'}")
    return found


def _head(model: PreTrainedModel, config: PretrainedConfig) -> nn.Module:
    found = model.get_output_embeddings()
    weight = getattr(found, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.is_floating_point():
        seen = [
            f"{name} {tuple(module.weight.shape)}"
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and module.in_features == config.hidden_size and "layers" not in name
        ]
        raise ValueError(f"no output head in {type(model).__name__}; linear layers seen: {', '.join(seen) or 'none'}")
    return found


def _decoder(
    model: PreTrainedModel, config: PretrainedConfig, embedder: nn.Module
) -> tuple[str, nn.Module, nn.ModuleList]:
    """The module that owns both the embedding and a list of as many layers as the text config says."""
    found, seen = [], []
    for name, module in model.named_modules():
        for child_name, child in module.named_children():
            if not isinstance(child, nn.ModuleList):
                continue
            seen.append(f"{name}.{child_name} of {len(child)}".lstrip("."))
            owns = any(other is embedder for other in module.children())
            if owns and len(child) == config.num_hidden_layers:
                found.append((name, module, child))
    if len(found) != 1:
        raise ValueError(
            f"{len(found)} decoders with {config.num_hidden_layers} layers beside the embedding in "
            f"{type(model).__name__}; layer lists seen: {', '.join(seen[:20]) or 'none'}"
        )
    return found[0]


def _final_norm(decoder: nn.Module, config: PretrainedConfig, where: str) -> tuple[str, nn.Module]:
    """The decoder's own norm: by its usual name, else the one child with a [D] weight."""
    children = dict(decoder.named_children())
    vectors = [
        name
        for name, child in children.items()
        if isinstance(weight := getattr(child, "weight", None), Tensor) and tuple(weight.shape) == (config.hidden_size,)
    ]
    named = [name for name in NORM_NAMES if name in children]
    chosen = named if len(named) == 1 else vectors
    if len(chosen) != 1:
        raise ValueError(
            f"no single final norm in {where or type(decoder).__name__}: children {', '.join(children)}; with a "
            f"[{config.hidden_size}] weight: {', '.join(vectors) or 'none'}"
        )
    return f"{where}.{chosen[0]}".lstrip("."), children[chosen[0]]


def _embedding_scale(embedder: nn.Module, config: PretrainedConfig) -> float:
    scale = 1.0
    own: Any = getattr(embedder, "embed_scale", None)
    if own is not None:
        # Families cast the scale to the weights' dtype before multiplying; a drafter must see the rounded one.
        scale *= float(torch.as_tensor(own, dtype=torch.float32).to(cast(Tensor, embedder.weight).dtype))
    for key in EMBEDDING_SCALES:
        if getattr(config, key, None) is not None:
            scale *= float(getattr(config, key))
    return scale


def _whole(module: nn.Module, name: str) -> Tensor:
    """A parameter's values, also when accelerate keeps them off the device: then a CPU copy."""
    parameter = getattr(module, name)
    if isinstance(parameter, DTensor):  # spread over processes, each of which must come here
        with torch.inference_mode(False), torch.no_grad():  # views of it are not allowed in inference mode
            return parameter.full_tensor().detach()
    if parameter.device.type != "meta":
        return parameter.detach()
    with align_module_device(module, "cpu"):
        return getattr(module, name).detach().clone()


def whole_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, values) of all parameters and persistent buffers below a module by name, offloaded and spread ones
    included. One is whole at a time."""
    found = {
        f"{prefix}.{name}".lstrip("."): (child, name)
        for prefix, child in module.named_modules()
        for name, value in [*child._parameters.items(), *child._buffers.items()]
        if value is not None and name not in child._non_persistent_buffers_set
    }
    for full in sorted(found):
        yield full, _whole(*found[full])
