"""How hidden states are kept on disk: as they are, or as small numbers with a scale for each group of a row's values.

    name                      a value                   scale of a group       channels
    bfloat16 float16 float32  itself                    none                   no
    fp8                       e4m3, value / scale       largest |value| / 448  no
    int12                     -2047..2047, 12 bits      largest |value| / 2047 yes
    int8                      -127..127                 largest |value| / 127  yes
    int4                      -7..7, two to a byte      largest |value| / 7    yes

A group is the whole row (one scale a token and layer) or, as "int8:64" says, 64 neighbouring values. Whole numbers are
of the row divided by its channels' sizes: hidden states have channels a thousand times larger than others, on which a
group would spend all its steps. e4m3 has 18 binades and does not care. Scales and sizes are bfloat16, scales rounded
up, so that no value is clipped. Rounding is then at most half a step: size x scale / 2 for whole numbers; for fp8 1/16
of the value, or scale / 1024 where the value is below scale / 64. Plain torch on any device.

Letters in shapes: N rows, D width of a row, G values of a group.
"""

from dataclasses import dataclass
from math import gcd
from typing import Self

import torch
from torch import Tensor

PLAIN = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
LARGEST = {"fp8": 448.0, "int12": 2047.0, "int8": 127.0, "int4": 7.0}
GROUPS = {"fp8": 0, "int12": 64, "int8": 64, "int4": 32}  # where a name stands alone
VALUES, LOW, SCALES, CHANNELS = "", ".low", ".scale", ".channel"
SAMPLED = 1024  # rows that channels' sizes are taken from
FLOOR = 1 / 256  # of the middle channel's size


@dataclass(frozen=True)
class Precision:
    """name as in the table above; group: G (0: the whole row). str() gives what `parse` reads."""

    name: str
    group: int = 0

    @classmethod
    def parse(cls, text: str, width: int) -> Self:
        """From "int8" or "int8:32", for rows of D = width values; a name alone takes its usual group, or the largest
        part of it that divides the width. ValueError names what is allowed."""
        name, _, group = str(text).partition(":")
        if name not in PLAIN and name not in LARGEST:
            allowed = ", ".join((*PLAIN, *LARGEST))
            raise ValueError(f"a precision must be one of {allowed}, or NAME:GROUP, got {text!r}")
        if group and (name in PLAIN or not group.isdecimal()):
            raise ValueError(f"only {', '.join(LARGEST)} have a group, a whole number (0: the row), got {text!r}")
        found = cls(name, int(group) if group else gcd(GROUPS.get(name, 0), width) if GROUPS.get(name) else 0)
        if found.group and width % found.group:
            raise ValueError(f"{text}: a group must divide the width {width}")
        if name in ("int4", "int12") and width % 2:
            raise ValueError(f"{text} keeps two values in a byte: the width must be even, got {width}")
        return found

    def __str__(self) -> str:
        return self.name if self.is_plain else f"{self.name}:{self.group}"

    @property
    def is_plain(self) -> bool:
        return self.name in PLAIN

    @property
    def dtype(self) -> torch.dtype:
        """What `decode` gives."""
        return PLAIN.get(self.name, torch.float32)

    @property
    def has_channels(self) -> bool:
        return self.name in ("int12", "int8", "int4")

    def tensors(self, width: int) -> dict[str, tuple[int, torch.dtype]]:
        """Suffix -> (entries of a row, dtype) of what `encode` gives."""
        if self.is_plain:
            return {VALUES: (width, self.dtype)}
        half = (width // 2, torch.uint8)
        codes = {
            "fp8": {VALUES: (width, torch.float8_e4m3fn)},
            "int12": {VALUES: (width, torch.int8), LOW: half},
            "int8": {VALUES: (width, torch.int8)},
            "int4": {VALUES: half},
        }
        return codes[self.name] | {SCALES: (width // (self.group or width), torch.bfloat16)}

    def row_bytes(self, width: int) -> int:
        """Bytes of one row."""
        return sum(entries * dtype.itemsize for entries, dtype in self.tensors(width).values())

    def channels(self, values: Tensor) -> Tensor | None:
        """Sizes of the channels: the median |value| over rows [N, ..., D] -> bfloat16 [..., D]; None where none are
        used. At most 1,024 rows are looked at, evenly spaced."""
        if not self.has_channels:
            return None
        some = values[:: max(1, len(values) // SAMPLED)].float().abs()
        sizes = some.median(0).values
        middle = sizes.median(-1, keepdim=True).values
        sizes = sizes.maximum(FLOOR * middle)
        return sizes.where(sizes > 0, torch.ones(())).to(torch.bfloat16)

    def encode(self, values: Tensor, channels: Tensor | None = None) -> dict[str, Tensor]:
        """values [..., D] finite; channels [..., D] from `channels` (None: ones). Returns suffix -> tensor."""
        if self.is_plain:
            return {VALUES: values.to(self.dtype)}
        width, rows = values.shape[-1], values.float()
        if channels is not None:
            rows = rows / channels.float()
        grouped = rows.unflatten(-1, (width // (self.group or width), -1))
        scale = round_up(grouped.abs().amax(-1) / LARGEST[self.name])
        # A group of zeros has scale 0; any divisor keeps its values 0.
        steps = (grouped / scale.float().where(scale > 0, torch.ones(())).unsqueeze(-1)).flatten(-2)
        if self.name == "fp8":
            return {VALUES: steps.clamp(-448.0, 448.0).to(torch.float8_e4m3fn), SCALES: scale}
        whole = steps.round().clamp(-LARGEST[self.name], LARGEST[self.name]).to(torch.int16)
        if self.name == "int12":
            return {VALUES: (whole >> 4).to(torch.int8), LOW: _pairs(whole & 15), SCALES: scale}
        if self.name == "int8":
            return {VALUES: whole.to(torch.int8), SCALES: scale}
        return {VALUES: _pairs(whole + 8), SCALES: scale}

    def decode(self, parts: dict[str, Tensor], channels: Tensor | None = None) -> Tensor:
        """What `encode` gave -> values [..., D] in `dtype`."""
        codes = parts[VALUES]
        if self.is_plain:
            return codes
        if self.name == "int4":
            codes = _unpaired(codes) - 8
        elif self.name == "int12":
            codes = (codes.to(torch.int16) << 4) + _unpaired(parts[LOW])
        values, scale = codes.float(), parts[SCALES].float()
        values = (values.unflatten(-1, (scale.shape[-1], -1)) * scale.unsqueeze(-1)).flatten(-2)
        return values if channels is None else values * channels.float()

    def rounded(self, values: Tensor) -> Tensor:
        """values [N, ..., D] as they come back, with their own channels."""
        channels = self.channels(values)
        return self.decode(self.encode(values, channels), channels)


def _pairs(nibbles: Tensor) -> Tensor:
    """0..15 [..., D] -> uint8 [..., D / 2], the even entry in the low half."""
    small = nibbles.to(torch.uint8)
    return small[..., 0::2] | small[..., 1::2] << 4


def _unpaired(packed: Tensor) -> Tensor:
    """uint8 [..., D / 2] -> int16 0..15 [..., D]."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2).to(torch.int16)


def round_up(values: Tensor) -> Tensor:
    """Values >= 0 float32 -> the smallest bfloat16 not below each."""
    bits = (values.contiguous().view(torch.int32) + 0xFFFF) & ~0xFFFF
    return bits.view(torch.float32).to(torch.bfloat16)
