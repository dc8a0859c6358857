"""How hidden states are rounded: worked examples by hand, bounds by hand, and what is refused."""

import pytest
import torch
from torch import Tensor

from data.precision import Precision, round_up

NAMES = ["fp8", "fp8:16", "int12", "int12:0", "int8", "int8:0", "int8:16", "int4", "int4:16"]


def states(rows: int = 300, width: int = 64, seed: int = 0) -> Tensor:
    """Random rows with one channel a thousand times larger, one dead, and one row of zeros."""
    values = torch.randn(rows, 2, width, generator=torch.Generator().manual_seed(seed))
    values[..., 5] *= 1000
    values[..., 9] = 0
    values[3] = 0
    return values


def test_int8_by_hand() -> None:
    """Largest 254 -> scale 2; 3 -> 1.5 steps -> 2 (ties to even); -5 -> -2.5 -> -2; 1 -> 0.5 -> 0."""
    values = torch.tensor([[254.0, 3.0, -5.0, 1.0]])
    parts = Precision("int8").encode(values)
    assert parts[""].tolist() == [[127, 2, -2, 0]]
    assert parts[".scale"].tolist() == [[2.0]]
    assert Precision("int8").decode(parts).tolist() == [[254.0, 4.0, -4.0, 0.0]]


def test_int4_packs_the_even_entry_low() -> None:
    """Scale 1: 7, -7, 2, 0 become 15, 1, 10, 8 after + 8; bytes 15 + 16 * 1 and 10 + 16 * 8."""
    values = torch.tensor([[7.0, -7.0, 2.0, 0.0]])
    parts = Precision("int4").encode(values)
    assert parts[""].tolist() == [[31, 138]]
    assert Precision("int4").decode(parts).tolist() == values.tolist()


def test_int12_splits_high_and_low() -> None:
    """Scale 1: 2047 = 127 * 16 + 15; -2047 = -128 * 16 + 1; -1 = -1 * 16 + 15; 18 = 16 + 2."""
    values = torch.tensor([[2047.0, -2047.0, -1.0, 18.0]])
    parts = Precision("int12").encode(values)
    assert parts[""].tolist() == [[127, -128, -1, 1]]
    assert parts[".low"].tolist() == [[15 + 16 * 1, 15 + 16 * 2]]
    assert Precision("int12").decode(parts).tolist() == values.tolist()


def test_channels_are_divided_out() -> None:
    """Channel sizes 1 and 100: without them the small channel would be 0 in four bits."""
    values = torch.tensor([[1.0, 100.0], [-1.0, 100.0], [1.0, -100.0]])
    precision = Precision("int4")
    channels = precision.channels(values)
    assert channels is not None
    assert channels.tolist() == [1.0, 100.0]
    torch.testing.assert_close(precision.rounded(values), values, rtol=2**-7, atol=0)
    assert precision.decode(precision.encode(values))[:, 0].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", NAMES)
def test_rounding_stays_below_half_a_step(name: str) -> None:
    values = states()
    precision = Precision.parse(name, 64)
    channels = precision.channels(values)
    error = (precision.decode(precision.encode(values, channels), channels) - values).abs()
    sizes = torch.ones(2, 64) if channels is None else channels.float()
    grouped = (values / sizes).unflatten(-1, (64 // (precision.group or 64), -1)).abs().amax(-1, keepdim=True)
    largest = grouped.expand(*grouped.shape[:-1], precision.group or 64).flatten(-2) * sizes
    # Scales are rounded up by at most 2^-7 of themselves; a hair more for float32 arithmetic.
    if precision.name == "fp8":
        bound = torch.maximum(values.abs() / 16, largest / 448 / 1024 * (1 + 2**-7))
    else:
        steps = {"int12": 2047, "int8": 127, "int4": 7}[precision.name]
        bound = largest / steps / 2 * (1 + 2**-7)
    assert bool((error <= bound * (1 + 1e-4) + 1e-30).all())
    assert bool((precision.decode(precision.encode(values, channels), channels)[3] == 0).all())


def test_a_wrong_half_step_would_be_seen() -> None:
    """The bound above is tight: int8's error comes within a tenth of it."""
    values = states()[:, :, 10:42]
    precision = Precision("int8", 32)
    error = (precision.decode(precision.encode(values)) - values).abs()
    bound = values.abs().amax(-1, keepdim=True) / 127 / 2
    assert float((error / bound.clamp_min(1e-30)).max()) > 0.9


@pytest.mark.parametrize(
    ("name", "width", "bytes_each"),
    [
        ("bfloat16", 64, 128),
        ("float32", 64, 256),
        ("fp8", 64, 64 + 2),
        ("int12", 128, 128 + 64 + 4),
        ("int8:32", 64, 64 + 4),
        ("int4", 64, 32 + 4),
    ],
)
def test_bytes_of_a_row_by_hand(name: str, width: int, bytes_each: int) -> None:
    precision = Precision.parse(name, width)
    assert precision.row_bytes(width) == bytes_each
    parts = precision.encode(torch.randn(1, width))
    assert sum(part.nbytes for part in parts.values()) == bytes_each
    assert {suffix: (part.shape[-1], part.dtype) for suffix, part in parts.items()} == precision.tensors(width)


def test_round_up_never_below() -> None:
    values = torch.tensor([0.0, 1.0, 1.001, 3.1415927, 1e-30, 65504.0])
    up = round_up(values)
    assert up[:2].tolist() == [0.0, 1.0]
    assert bool((up.float() >= values).all())
    assert bool((up.float() <= values * (1 + 2**-7)).all())


def test_names_and_groups() -> None:
    assert str(Precision.parse("int8", 4096)) == "int8:64"
    assert str(Precision.parse("int8", 48)) == "int8:16"
    assert str(Precision.parse("fp8", 4096)) == "fp8:0"
    assert str(Precision.parse("bfloat16", 10)) == "bfloat16"
    for text, message in (
        ("int3", "must be one of"),
        ("bfloat16:32", "have a group"),
        ("int8:x", "have a group"),
        ("int8:48", "must divide the width 64"),
    ):
        with pytest.raises(ValueError, match=message):
            Precision.parse(text, 64)
    with pytest.raises(ValueError, match="must be even"):
        Precision.parse("int4:0", 33)
