"""Experts one by one, as checkpoints hold them, and in one tensor, as transformers computes them. No rounding."""

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

ONE = re.compile(r"(?P<before>.*experts\.)(?P<expert>\d+)\.(?P<part>gate|up|down)_proj\.weight")
GATE_UP, DOWN = "gate_up_proj", "down_proj"


def one_by_one(names: Iterable[str]) -> bool:
    """Whether experts are stored as single tensors."""
    return any(ONE.fullmatch(name) for name in names)


def fuse_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """experts.{i}.{gate,up,down}_proj.weight as experts.gate_up_proj [E, 2I, D] and experts.down_proj [E, D, I]; other
    tensors as they are. ValueError names an expert's missing tensor."""
    found: dict[str, Tensor] = {}
    groups: dict[str, dict[tuple[int, str], Tensor]] = {}
    for name, tensor in tensors.items():
        match = ONE.fullmatch(name)
        if match is None:
            found[name] = tensor
        else:
            groups.setdefault(match["before"], {})[int(match["expert"]), match["part"]] = tensor
    for before, parts in groups.items():
        count = 1 + max(expert for expert, _ in parts)
        for expert in range(count):
            for part in ("gate", "up", "down"):
                if (expert, part) not in parts:
                    raise ValueError(f"{before}{expert}.{part}_proj.weight is missing, the other experts have it")
        pairs = [torch.cat([parts[i, "gate"], parts[i, "up"]]) for i in range(count)]
        found[before + GATE_UP] = torch.stack(pairs)
        found[before + DOWN] = torch.stack([parts[i, "down"] for i in range(count)])
    return found


def split_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse: views of the fused tensors under one name an expert."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        before, _, last = name.rpartition("experts.")
        if last == GATE_UP:
            for i, pair in enumerate(tensor):
                gate, up = pair.chunk(2)
                found[f"{before}experts.{i}.gate_proj.weight"] = gate
                found[f"{before}experts.{i}.up_proj.weight"] = up
        elif last == DOWN:
            found |= {f"{before}experts.{i}.down_proj.weight": one for i, one in enumerate(tensor)}
        else:
            found[name] = tensor
    return found
