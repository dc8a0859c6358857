"""Drafter weights of eight or four bits: whole numbers with a scale for each group of a row's inputs.

`round_weights` gives the values that such weights stand for, so `headstart eval weights=int4` says what tau they cost;
`pack_weights` lays the very same values out as compressed-tensors' "pack-quantized", which engines load, and
`unpack_weights` reads such files back. The projections of draft layers and the fusion are rounded; norms, embeddings,
heads and small heads' tables stay as they are.

    value = scale * code          code -8..7 (int4) or -128..127 (int8); eight or four codes to an int32, first lowest

A group's scale is the one of a few clipped ranges that leaves the least squared error.

Letters in shapes: O outputs, I inputs, G inputs of a group.
"""

import re
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

BITS = {"int8": 8, "int4": 4}
GROUPS = (128, 64, 32)
CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
LINEAR = re.compile(r"(.*\.)?([qkvo]_proj|gate_proj|up_proj|down_proj|fc)\.weight")
PACKED, SCALE, SHAPE = "weight_packed", "weight_scale", "weight_shape"
FORMAT = "pack-quantized"


@dataclass(frozen=True)
class WeightGrid:
    """name: int8 or int4. group: G."""

    name: str
    group: int

    @classmethod
    def parse(cls, text: str, tensors: dict[str, Tensor]) -> Self:
        """From "int4" or "int4:64", for these tensors; a name alone takes the largest of 128, 64 and 32 that divides
        every row. ValueError names what is allowed."""
        name, _, group = str(text).partition(":")
        widths = {tensor.shape[1] for key, tensor in tensors.items() if LINEAR.fullmatch(key)}
        if not widths:
            raise ValueError(f"weights={text}: this drafter has no projections that could be rounded")
        fitting = [str(size) for size in GROUPS if all(width % size == 0 for width in widths)]
        if name not in BITS or (group and group not in fitting) or not fitting:
            raise ValueError(
                f"weights must be null, {', '.join(BITS)} or NAME:GROUP with a group of "
                f"{', '.join(fitting) or 'none'} (of {GROUPS}, what divides rows of {sorted(widths)}), got {text!r}"
            )
        return cls(name, int(group or fitting[0]))

    @property
    def bits(self) -> int:
        return BITS[self.name]

    def encode(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """weight [O, I] -> codes int8 [O, I], scales [O, I / G] in the weight's dtype."""
        grouped = weight.float().unflatten(1, (-1, self.group))
        reach = grouped.abs().amax(-1) / (2 ** (self.bits - 1) - 0.5)
        best, scales = torch.full_like(reach, torch.inf), torch.zeros_like(reach)
        for clip in CLIPS:
            tried = (clip * reach).to(weight.dtype).float()
            missed = (self._codes(grouped, tried) * tried[..., None] - grouped).square().sum(-1)
            better = missed < best
            best, scales = missed.where(better, best), tried.where(better, scales)
        return self._codes(grouped, scales).flatten(1).to(torch.int8), scales.to(weight.dtype)

    def _codes(self, grouped: Tensor, scales: Tensor) -> Tensor:
        """grouped [O, I / G, G]; a group of zeros has scale 0, and any divisor keeps it."""
        most = 2 ** (self.bits - 1)
        return (grouped / scales.where(scales > 0, torch.ones(()))[..., None]).round().clamp(-most, most - 1)

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """codes [O, I], scales [O, I / G] -> weight [O, I] in the scales' dtype."""
        return (codes.unflatten(1, (-1, self.group)) * scales.float()[..., None]).flatten(1).to(scales.dtype)


def round_weights(tensors: dict[str, Tensor], text: str) -> dict[str, Tensor]:
    """All tensors, the projections at the values that weights of this form can hold."""
    grid = WeightGrid.parse(text, tensors)
    return {
        key: grid.decode(*grid.encode(tensor)) if LINEAR.fullmatch(key) else tensor for key, tensor in tensors.items()
    }


def pack_weights(tensors: dict[str, Tensor], text: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors with packed projections, and the quantization_config that says so."""
    grid, packed = WeightGrid.parse(text, tensors), dict[str, Tensor]()
    for key, tensor in tensors.items():
        if not LINEAR.fullmatch(key):
            packed[key] = tensor
            continue
        codes, scales = grid.encode(tensor)
        stem = key.removesuffix("weight")
        packed[stem + PACKED], packed[stem + SCALE] = _pack(codes, grid.bits), scales
        packed[stem + SHAPE] = torch.tensor(tensor.shape)
    weights = {
        "num_bits": grid.bits,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": grid.group,
        "dynamic": False,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return packed, {
        "quant_method": "compressed-tensors",
        "format": FORMAT,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def unpack_weights(tensors: dict[str, Tensor], config: dict[str, Any], where: str) -> dict[str, Tensor]:
    """Tensors with packed projections as plain weights. config: the quantization_config beside them; where: the folder,
    for errors. ValueError for any other form than pack-quantized symmetric groups or rows."""
    groups = list((config.get("config_groups") or {}).values())
    weights = [group.get("weights") or {} for group in groups]
    if config.get("format") != FORMAT or len({str(sorted(found.items())) for found in weights}) != 1:
        raise ValueError(
            f"{where}: quantised weights of {config.get('quant_method')!r}, format {config.get('format')!r}; only "
            f"compressed-tensors' {FORMAT} of one kind is read, dequantise it first"
        )
    bits, symmetric = int(weights[0].get("num_bits") or 0), weights[0].get("symmetric", True)
    if bits not in BITS.values() or not symmetric or weights[0].get("actorder"):
        raise ValueError(f"{where}: {FORMAT} weights must be symmetric, of 8 or 4 bits, in order, got {weights[0]}")
    found = {}
    for key, tensor in tensors.items():
        stem, _, last = key.rpartition(".")
        if last == PACKED:
            if missing := [f"{stem}.{part}" for part in (SCALE, SHAPE) if f"{stem}.{part}" not in tensors]:
                raise ValueError(f"{where}: {key} stands without {', '.join(missing)}")
            rows, width = tensors[f"{stem}.{SHAPE}"].tolist()
            scales = tensors[f"{stem}.{SCALE}"]
            codes = _unpack(tensor, bits)[:rows, :width]
            grid = WeightGrid(f"int{bits}", width // scales.shape[1])
            found[f"{stem}.weight"] = grid.decode(codes, scales)
        elif last not in (SCALE, SHAPE):
            found[key] = tensor
    return found


def _pack(codes: Tensor, bits: int) -> Tensor:
    """codes int8 [O, I] -> int32 [O, I * bits / 32], offset to start at 0, the first code in the lowest bits."""
    each = 32 // bits
    places = torch.arange(each) * bits
    offset = (codes.long() + 2 ** (bits - 1)).unflatten(1, (-1, each))
    whole = (offset << places).sum(-1)
    return torch.where(whole >= 2**31, whole - 2**32, whole).to(torch.int32)


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """What `_pack` gave -> codes int8."""
    places = torch.arange(32 // bits) * bits
    offset = (packed.long()[..., None] >> places) & (2**bits - 1)
    return (offset - 2 ** (bits - 1)).flatten(1).to(torch.int8)
