"""Layers that drafters share, built from the target's config: one decoder-layer config, rotary angles, frozen target
parts.

Norms, rotary embeddings and gated MLPs are transformers' own, so every rope scaling type it knows works here.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, rotate_half

from drafters.contract import TargetParts

LAYER_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "rope_parameters",
)


def complete(where: str, defaults: dict[str, Any], given: dict[str, Any] | None) -> dict[str, Any]:
    """A group of a drafter's arguments with its defaults. ValueError names unknown keys and where they stand."""
    if unknown := sorted(set(given or {}) - set(defaults)):
        raise ValueError(f"unknown key(s) in drafter {where}: {', '.join(unknown)}; allowed: {', '.join(defaults)}")
    return defaults | (given or {})


def check_counts(where: str, **values: Any) -> None:
    """ValueError names a value that is no whole number of at least 1."""
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{where}{name} must be at least 1 and whole, got {value!r}")


def layer_config(target: PretrainedConfig, overrides: dict[str, Any] | None = None) -> LlamaConfig:
    """Config of one Llama-type decoder layer with the target's sizes and rope, changed by `overrides`.

    Raises ValueError on an override outside LAYER_KEYS, a hidden size that differs from the target's (the drafter
    shares the target's embedding), and sizes that no layer has.
    """
    overrides = dict(overrides or {})
    unknown = sorted(set(overrides) - set(LAYER_KEYS))
    if unknown:
        raise ValueError(f"unknown key(s) in drafter layer: {', '.join(unknown)}; allowed: {', '.join(LAYER_KEYS)}")
    heads = target.num_attention_heads
    latent_attention = getattr(target, "kv_lora_rank", None) is not None
    values: dict[str, Any] = {
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(target, "num_key_value_heads", None) or heads,
        "head_dim": (None if latent_attention else getattr(target, "head_dim", None)) or target.hidden_size // heads,
        "hidden_act": "silu",
        "rms_norm_eps": getattr(target, "rms_norm_eps", 1e-6),
        "max_position_embeddings": target.max_position_embeddings,
        "rope_parameters": rope_parameters(target),
    } | overrides
    if values["hidden_size"] != target.hidden_size:
        raise ValueError(f"drafter hidden_size {values['hidden_size']} must equal the target's {target.hidden_size}")
    sizes = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    check_counts("drafter layer: ", **{name: values[name] for name in sizes})
    if values["head_dim"] % 2 or values["num_attention_heads"] % values["num_key_value_heads"]:
        raise ValueError(
            "drafter layer: head_dim must be even (rotary pairs) and num_key_value_heads divide num_attention_heads, "
            f"got {values['head_dim']}, {values['num_key_value_heads']} and {values['num_attention_heads']}"
        )
    return LlamaConfig(vocab_size=target.vocab_size, num_hidden_layers=1, **values)


def rope_parameters(target: PretrainedConfig) -> dict[str, Any]:
    """The target's rope of its full-attention layers, over whole heads (a drafter layer is Llama-type: no partial
    rotary)."""
    found = dict(getattr(target, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0})
    found = dict(found.get("full_attention", found))
    found.pop("partial_rotary_factor", None)
    return found


def layer_settings(config: LlamaConfig) -> dict[str, Any]:
    """The plain values that rebuild `config` through `layer_config`."""
    return {key: getattr(config, key) for key in LAYER_KEYS}


class WholeBuffers(nn.Module):
    """Moves and casts as every module does, but float32 buffers stay float32: rotary frequencies in bf16 are off by up
    to 0.4%, and the angle of position 1000 by radians, while targets and engines keep them whole."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        whole = {name: buffer for name, buffer in self.named_buffers() if buffer.dtype == torch.float32}
        super()._apply(fn, recurse)
        for name, buffer in whole.items():
            place, _, own = name.rpartition(".")
            module = self.get_submodule(place)
            setattr(module, own, buffer.to(getattr(module, own).device))
        return self


class Rotary(WholeBuffers):
    """Rotary angles for absolute positions, every scaling type of transformers."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embedding = LlamaRotaryEmbedding(config)

    def forward(self, states: Tensor, positions: Tensor) -> Tensor:
        """Rotate states [B, H, N, d] to positions [B, N]. Returns the same shape and dtype."""
        cos, sin = self.embedding(states, positions)
        return states * cos.unsqueeze(1) + rotate_half(states) * sin.unsqueeze(1)


class SharedEmbedding(nn.Module):
    """The target's frozen input embedding, outside the state dict."""

    weight: Tensor

    def __init__(self, target: TargetParts) -> None:
        super().__init__()
        self.register_buffer("weight", target.embedding.detach(), persistent=False)
        self.scale = target.embedding_scale

    def forward(self, ids: Tensor) -> Tensor:
        """ids [...] int64 -> rows [..., D], scaled as the target scales them."""
        rows = nn.functional.embedding(ids, self.weight)
        return rows if self.scale == 1.0 else rows * self.scale


class SharedHead(nn.Module):
    """The target's frozen output projection, cut to some rows and outside the state dict."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, target: TargetParts, ids: Tensor) -> None:
        super().__init__()
        full = len(ids) == len(target.head)
        self.target = target
        self.register_buffer("weight", target.head.detach() if full else target.head.detach()[ids], persistent=False)
        bias = target.head_bias
        self.register_buffer("bias", None if bias is None else bias.detach()[ids], persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [..., D] -> logits [..., W]; no gradient reaches the weights."""
        # Under autocast the product is made in 16 bits: a head of 16 bits is then read as it lies, never copied.
        mixed = torch.is_autocast_enabled(hidden.device.type) and self.weight.dtype != torch.float32
        dtype = self.weight.dtype if mixed else hidden.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        logits = nn.functional.linear(hidden.to(dtype), self.weight.to(dtype), bias)
        return self.target.shape_logits(logits)


def plain_norm_weight(norm: nn.Module, size: int, eps: float) -> Tensor | None:
    """Weight w such that a Llama RMSNorm with w equals `norm`; None when there is none.

    Gemma stores w - 1. The equality is tried on numbers, not guessed from a class name.
    """
    weight = getattr(norm, "weight", None)
    if weight is None or weight.shape != (size,):
        return None
    probe = torch.randn(4, size, generator=torch.Generator().manual_seed(0)).to(weight.device, weight.dtype)
    with torch.no_grad():
        wanted = norm(probe).float()
        for candidate in (weight.detach().float(), weight.detach().float() + 1.0):
            mine = LlamaRMSNorm(size, eps).to(weight.device)
            mine.weight.copy_(candidate)
            if torch.allclose(mine(probe.float()), wanted, rtol=2e-2, atol=2e-2):
                return candidate
    return None


@contextmanager
def outputs_of(modules: Sequence[nn.Module], part: Callable[[Any], Tensor]) -> Iterator[list[Tensor]]:
    """Collect a part of what the modules give, call after call, while the block runs."""
    kept: list[Tensor] = []
    handles = [one.register_forward_hook(lambda _m, _i, output: kept.append(part(output))) for one in modules]
    try:
        yield kept
    finally:
        for handle in handles:
            handle.remove()
