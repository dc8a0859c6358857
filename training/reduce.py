"""One place divides: gradients of summed losses over the global denominator of an optimizer step.

Micro-batches and ranks hold different numbers of supervised slots, so a mean of means would weigh slots unevenly.
Losses are sums; their denominators add up over the accumulation window and over ranks; the gradient is divided once.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Window:
    """Denominators and sums of one accumulation window."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, **sums: Tensor) -> None:
        """Add detached sums (any shape) under their names."""
        for name, value in sums.items():
            value = value.detach().float()
            self._sums[name] = self._sums[name] + value if name in self._sums else value.clone()

    def close(self) -> dict[str, Tensor]:
        """Sums over the window and over all ranks; empties the window. Every rank must call it."""
        sums, self._sums = self._sums, {}
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            flat = torch.cat([value.flatten() for value in sums.values()])
            torch.distributed.all_reduce(flat)
            pieces = flat.split([value.numel() for value in sums.values()])
            sums = {name: piece.view_as(value) for (name, value), piece in zip(sums.items(), pieces, strict=True)}
        return sums


def divide_gradients(parameters: Iterable[nn.Parameter], denominator: Tensor, averaged_over: int) -> None:
    """Turn gradients that a framework averaged over `averaged_over` losses (ranks x micro-batches) into sum /
    denominator.

    A window with nothing supervised (denominator 0) gets zero gradients, never NaN.
    """
    factor = torch.where(denominator > 0, averaged_over / denominator.clamp_min(1e-12), torch.zeros_like(denominator))
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor.to(parameter.grad.dtype))


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Norm of all gradients, a scalar that is not finite when any of them is not; of the whole model where ranks hold
    shards, so every rank must call it. No sync with the host."""
    found = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return found.full_tensor() if isinstance(found, DTensor) else found
