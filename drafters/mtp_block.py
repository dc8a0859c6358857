"""The target's own kind of decoder layer for a drafter, built from transformers' classes by the target's config alone.

The layer runs as transformers wrote it (its attention, norms, mixture of experts, residual scales); what a drafter
chooses is its inputs, its positions, the mask, and, through a small stand-in for transformers' cache, which keys a
query meets. Latent attention (DeepSeek) keeps its latents there, so its cache is as small as in the target.

Letters in shapes: B rows, N queries, S keys, D hidden width.
"""

import copy
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers import AutoModel, LlamaConfig, PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from drafters.drafting import write_at
from drafters.layers import Rotary, layer_config, outputs_of

FULL = "full_attention"


class Keys(Protocol):
    """What a layer's attention asks of a cache: take the new rows' keys and values [B, G, N, d], give all [B, G, S, d].

    Latent attention passes its latent and its rotary part here, one "head" each. A layer that chooses the positions it
    attends to (DeepSeek-V3.2, GLM-5) passes its indexer's keys [B, N, width] and gets all [B, S, width].
    """

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]: ...

    def update_indexer(self, keys: Tensor, *_: Any) -> Tensor: ...


class ChainKeys:
    """Keys in training: those of the first call are the prefix, S = N; later calls are steps of chains.

    shared: later calls see the prefix alone, S = T; else the prefix and after it their chains' keys of every step so
    far, S = T + A, T + 2 A, ...
    """

    def __init__(self, shared: bool = False) -> None:
        self.shared = shared
        self.made: list[tuple[Tensor, Tensor]] = []
        self.index: list[Tensor] = []

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if self.shared and self.made:
            return self.made[0]
        self.made.append((keys, values))
        return torch.cat([pair[0] for pair in self.made], 2), torch.cat([pair[1] for pair in self.made], 2)

    def update_indexer(self, keys: Tensor, *_: Any) -> Tensor:
        if not (self.shared and self.index):
            self.index.append(keys)
        return torch.cat(self.index, 1)


@dataclass
class DraftKeys:
    """Keys in drafting, by column: keys and values [R, G, C, d], and keys [R, C, width] of the layer's own indexer. The
    rows of the next call are written at columns [R, N], or nowhere when None."""

    keys: Tensor
    values: Tensor
    index: Tensor | None = None
    columns: Tensor | None = None

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if self.columns is not None:
            write_at(self.keys, self.columns, keys)
            write_at(self.values, self.columns, values)
        return self.keys, self.values

    def update_indexer(self, keys: Tensor, *_: Any) -> Tensor:
        assert self.index is not None
        if self.columns is not None:
            self.index.scatter_(1, self.columns[..., None].expand_as(keys), keys)
        return self.index


class OwnRotary(Rotary):
    """The family's own rotary embedding, its frequencies always float32."""

    def __init__(self, embedding: nn.Module, layer_type: str | None) -> None:
        nn.Module.__init__(self)
        self.embedding = cast(Any, embedding)
        named = "layer_type" in inspect.signature(type(embedding).forward).parameters
        self.arguments: dict[str, Any] = {"layer_type": layer_type} if named else {}

    def angles(self, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, in the dtype of states [B, N, D], at positions [B, N]."""
        return self.embedding(states, positions, **self.arguments)


@dataclass(frozen=True)
class LayerKind:
    """A kind of decoder layer: its class, the config and layer index it is built with, its rotary embedding's class
    and its family's weight initialisation."""

    config: PretrainedConfig
    index: int
    layer: type[nn.Module]
    rotary: type[nn.Module]
    initialise: Callable[[nn.Module], None]
    layer_type: str | None

    def build(self, dense: bool) -> nn.Module:
        """A fresh layer; dense: with a plain gated MLP where the family has a mixture of experts."""
        block = self.layer(self.config, self.index)
        mlp = getattr(block, "mlp", None)
        if dense and any(parameter.ndim > 2 for parameter in _parameters(mlp)):
            config = self.config
            sizes = LlamaConfig(hidden_size=config.hidden_size, intermediate_size=config.intermediate_size)
            block.mlp = LlamaMLP(sizes)
        for module in block.modules():
            self.initialise(module)
        if (indexer := own_indexer(block)) is not None:
            indexer.requires_grad_(False)  # transformers runs it without gradients
        return block

    def build_rotary(self) -> OwnRotary:
        return OwnRotary(self.rotary(self.config), self.layer_type)


def own_indexer(block: nn.Module) -> nn.Module | None:
    """The part of a layer's attention that chooses which positions it attends to; None for one that sees all."""
    return getattr(getattr(block, "self_attn", None), "indexer", None)


def _parameters(module: nn.Module | None) -> list[nn.Parameter]:
    return [] if module is None else list(module.parameters())


def layer_kind(target: PretrainedConfig, kind: str, eager: bool = False) -> LayerKind:
    """The target's last full-attention layer ("own"), or a Llama layer of the target's sizes ("llama").

    eager: transformers' plain attention, which shows its weights; also taken where a family's attention has parts that
    the fused kernel lacks (soft caps, sinks). ValueError when transformers has no such model, or one built otherwise.
    """
    config = copy.deepcopy(target) if kind == "own" else layer_config(target)
    if type(config) not in AutoModel._model_mapping:
        raise ValueError(
            f"block.kind own: transformers has no model for {type(config).__name__}; block.kind llama takes a "
            f"Llama layer of the target's sizes"
        )
    if getattr(config, "attention_dropout", None):
        config.attention_dropout = 0.0
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    layers, rotary = getattr(model, "layers", None), getattr(model, "rotary_emb", None)
    if not isinstance(layers, nn.ModuleList) or rotary is None:
        raise ValueError(
            f"block.kind own: {type(model).__name__} has no `layers` with a `rotary_emb` beside them; use llama"
        )
    types = getattr(config, "layer_types", None)
    index = len(layers) - 1
    if types and FULL in types:
        index = max(i for i, name in enumerate(types) if name == FULL)
    if indexers := getattr(config, "indexer_types", None):  # layers may keep to an earlier one's choice; a head cannot
        config.indexer_types = [*indexers[:index], "full", *indexers[index + 1 :]]
    fused = model._supports_sdpa and not getattr(config, "attn_logit_softcapping", None)
    config._attn_implementation = "sdpa" if fused and not eager else "eager"
    layer_type = types[index] if types else None
    return LayerKind(config, index, type(layers[index]), type(rotary), model._init_weights, layer_type)


def through(block: nn.Module, rotary: OwnRotary, states: Tensor, positions: Tensor, mask: Tensor, keys: Keys) -> Tensor:
    """Run a layer.

    states [B, N, D] at positions [B, N]. mask [B, N, S] bool: which of the S keys that `keys` returns a query sees (at
    least one). Returns [B, N, D].
    """
    seen = mask[:, None]
    if block.self_attn.config._attn_implementation == "eager":  # type: ignore[union-attr]
        floor = torch.finfo(states.dtype).min
        seen = torch.zeros(seen.shape, dtype=states.dtype, device=states.device).masked_fill_(~seen, floor)
    named = inspect.signature(type(block).forward).parameters
    arguments: dict[str, Any] = {
        "attention_mask": seen,
        "position_ids": positions,
        "position_embeddings": rotary.angles(states, positions),
        # transformers 5.2x renamed the argument; both spellings are in use.
        "cache" if "cache" in named else "past_key_values": keys,
    }
    output = block(states, **arguments)
    return output[0] if isinstance(output, tuple) else output


@torch.no_grad()
def probe(block: nn.Module, rotary: OwnRotary, size: int) -> tuple[tuple[tuple[int, int], tuple[int, int]], int | None]:
    """Run one row through a fresh layer and return heads and width of the keys and of the values it caches, and the
    width of its own indexer's keys (None without one).

    ValueError when the layer does not run as `through` runs layers.
    """
    like = next(block.parameters())
    keys, row = ChainKeys(), like.new_zeros(1, 1, size)
    place = torch.zeros(1, 1, dtype=torch.int64, device=like.device)
    try:
        output = through(block, rotary, row, place, torch.ones_like(place, dtype=torch.bool)[..., None], keys)
    except (TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{type(block).__name__} does not run as a draft block ({error}); try block.mlp own, or block.kind llama"
        ) from error
    if output.shape != row.shape or len(keys.made) != 1 or any(part.ndim != 4 for part in keys.made[0]):
        raise ValueError(f"{type(block).__name__} does not cache keys and values once a call; use block.kind llama")
    made, values = ((part.shape[1], part.shape[3]) for part in keys.made[0])
    return (made, values), keys.index[0].shape[-1] if keys.index else None


def own_choices(block: nn.Module) -> AbstractContextManager[list[Tensor]]:
    """Collect the columns [B, N, top] that a layer's own indexer chooses, a call each; nothing without one."""
    indexer = own_indexer(block)
    return outputs_of([] if indexer is None else [indexer], lambda chosen: chosen)


def attention_weights(block: nn.Module) -> AbstractContextManager[list[Tensor]]:
    """Collect the attention weights [B, H, N, S] of an eager layer's calls."""
    return outputs_of([cast(nn.Module, block.self_attn)], lambda output: output[1])
