"""Llama-type draft layers and their warm start.

The first layer reads a token's embedding beside a fused feature (EAGLE-3, arXiv 2503.01840, section 3), later ones read
the layer before them.
"""

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from drafters.contract import Needs, TargetParts, check_layers, default_layers
from drafters.layers import Rotary, SharedHead, plain_norm_weight
from drafters.vocabulary import DraftVocabulary


class Attention(nn.Module):
    """Projections of a draft layer whose queries, keys and values read inputs `width` wide."""

    def __init__(self, config: LlamaConfig, width: int) -> None:
        super().__init__()
        groups, self.head_dim = key_shape(config)
        heads = config.num_attention_heads
        self.q_proj = nn.Linear(width, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(width, groups * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, groups * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, config.hidden_size, bias=False)

    def split(self, states: Tensor) -> Tensor:
        """[B, N, H * d] -> [B, H, N, d]."""
        return states.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def merge(self, states: Tensor) -> Tensor:
        """[B, H, N, d] -> o_proj of [B, N, H * d]: [B, N, D]."""
        return self.o_proj(states.transpose(1, 2).flatten(-2))

    def query(self, inputs: Tensor, rotary: Rotary, positions: Tensor) -> Tensor:
        """Rotated queries [B, H, N, d] of inputs [B, N, width] at positions [B, N]."""
        return rotary(self.split(self.q_proj(inputs)), positions)

    def keys_values(self, inputs: Tensor, rotary: Rotary, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys, and values, [B, G, N, d] each."""
        return rotary(self.split(self.k_proj(inputs)), positions), self.split(self.v_proj(inputs))


class HeadNormAttention(nn.Module):
    """Projections of a draft layer, with RMS norms over each head of queries and keys (Qwen3's)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size, (groups, width) = config.hidden_size, key_shape(config)
        self.head_dim = width
        self.q_proj = nn.Linear(size, config.num_attention_heads * width, bias=False)
        self.k_proj = nn.Linear(size, groups * width, bias=False)
        self.v_proj = nn.Linear(size, groups * width, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * width, size, bias=False)
        self.q_norm = LlamaRMSNorm(width, config.rms_norm_eps)
        self.k_norm = LlamaRMSNorm(width, config.rms_norm_eps)

    def heads(self, states: Tensor) -> Tensor:
        """[B, N, H * d] -> [B, N, H, d]."""
        return states.unflatten(-1, (-1, self.head_dim))

    def keys_values(self, states: Tensor, rotary: Rotary, positions: Tensor) -> tuple[Tensor, Tensor]:
        """states [B, N, D] at positions [B, N] -> rotated keys and values [B, G, N, d]."""
        keys = self.k_norm(self.heads(self.k_proj(states))).transpose(1, 2)
        return rotary(keys, positions), self.heads(self.v_proj(states)).transpose(1, 2)

    def query(self, states: Tensor, rotary: Rotary, positions: Tensor) -> Tensor:
        """Rotated queries [B, H, N, d]."""
        return rotary(self.q_norm(self.heads(self.q_proj(states))).transpose(1, 2), positions)


class PlainLayer(nn.Module):
    """A decoder layer as Llama has it. `width`: of what its attention reads."""

    def __init__(self, config: LlamaConfig, width: int | None = None) -> None:
        super().__init__()
        self.self_attn = Attention(config, width or config.hidden_size)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Add attention and MLP to the residual: [B, N, D] and attended heads [B, H, N, d] -> [B, N, D]."""
        hidden = residual + self.self_attn.merge(attended)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class FusedLayer(PlainLayer):
    """The first layer: keys, queries and values read [norm(embedding), norm(hidden)], 2D wide."""

    def __init__(self, config: LlamaConfig, norm_before_residual: bool = False) -> None:
        super().__init__(config, 2 * config.hidden_size)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm_before_residual = norm_before_residual

    def join(self, hidden: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """hidden, embedded [..., D] -> attention input [..., 2D] and the residual [..., D]."""
        normed = self.hidden_norm(hidden)
        joined = torch.cat([self.input_layernorm(embedded), normed], -1)
        return joined, normed if self.norm_before_residual else hidden


def key_shape(config: LlamaConfig) -> tuple[int, int]:
    """Key-value heads and head width; a LlamaConfig fills both in when it is built."""
    assert config.num_key_value_heads is not None
    assert config.head_dim is not None
    return config.num_key_value_heads, config.head_dim


def captured(target: TargetParts, layers: list[int] | None) -> Needs:
    """The captured layers as given, or the default three. ValueError as check_layers and default_layers."""
    depth = target.config.num_hidden_layers
    return Needs(check_layers(tuple(layers), depth) if layers else default_layers(depth))


def draft_head(kind: str, target: TargetParts, vocabulary: DraftVocabulary) -> nn.Module:
    """kind "own": a head [W, D] to train; "target": the target's frozen rows. ValueError otherwise."""
    if kind not in ("own", "target"):
        raise ValueError(f'head must be "own" or "target", got {kind!r}')
    if kind == "own":
        return nn.Linear(target.config.hidden_size, len(vocabulary), bias=False)
    return SharedHead(target, vocabulary.ids.to(target.head.device))


@torch.no_grad()
def take_norm(norm: LlamaRMSNorm, target: TargetParts) -> float | None:
    """Give a drafter's final norm the target's weight.

    Returns 1 where the target stores norm weights less one (Gemma), else 0; None, and nothing taken, when the target's
    norm is no RMS norm.
    """
    weight = plain_norm_weight(target.norm, len(norm.weight), norm.variance_epsilon)
    if weight is None:
        return None
    norm.weight.copy_(weight)
    return float((weight - target.norm.weight.float()).mean())  # type: ignore[operator]


@torch.no_grad()
def take_head(head: nn.Module, vocabulary: DraftVocabulary, target: TargetParts) -> list[str]:
    """Give an own head the target's rows; a shared head needs nothing. Returns the line to report."""
    if not isinstance(head, nn.Linear):
        return []
    head.weight.copy_(target.head[vocabulary.ids.to(target.head.device)])
    return [f"lm_head <- {len(vocabulary)} rows of the target's head"]


@torch.no_grad()
def take_block(layer: PlainLayer, block: dict[str, Tensor], norm_shift: float) -> list[str]:
    """Copy tensors of the target's block whose roles and shapes match; the 2D-wide projections of a first layer take
    them into their hidden half, and their embedding half starts small and random. Returns the parameters taken.

    Queries and keys that the target norms or shifts (q_norm, biases) mean nothing without that and are left alone.
    norm_shift: see take_norm.
    """
    source_of = {}
    if isinstance(layer, FusedLayer):
        source_of = {"hidden_norm.weight": "input_layernorm.weight", "input_layernorm.weight": ""}
    if "pre_feedforward_layernorm.weight" in block:  # Gemma 2 and later norm the MLP's input under this name
        source_of["post_attention_layernorm.weight"] = "pre_feedforward_layernorm.weight"
    changed = any(name.startswith("self_attn.q_norm") or name == "self_attn.q_proj.bias" for name in block)
    size, taken = len(layer.post_attention_layernorm.weight), []
    for name, parameter in layer.named_parameters():
        source, part = block.get(source_of.get(name, name)), name.split(".")[-2]
        wide = isinstance(layer, FusedLayer) and part in ("q_proj", "k_proj", "v_proj")
        place = parameter[:, size:] if wide else parameter
        if source is None or source.shape != place.shape or (changed and part in ("q_proj", "k_proj")):
            continue
        if wide:
            parameter[:, :size].normal_(0, 0.1 * float(source.float().std()))
        place.copy_(source.float() + norm_shift if source.ndim == 1 else source)
        taken.append(name)
    return taken
