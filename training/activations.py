"""What a training step keeps of its forward pass, for rows too long to keep everything.

recompute: the inner states of every MLP, the widest of a decoder layer, are thrown away and made again in the backward
pass, about a third more arithmetic in the MLPs. offload: everything that the backward pass needs of the slot grid waits
in the host's memory, at the price of two transfers. The objective keeps nothing in either case: it walks chunks.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, Literal

import torch
from torch.utils.checkpoint import checkpoint

from drafters.contract import Drafter

Kept = Literal["keep", "recompute", "offload"]
KINDS = ("keep", "recompute", "offload")


def spare_activations(drafter: Drafter, kept: Kept) -> None:
    """Prepare a drafter's modules, once. ValueError on an unknown word, or without an MLP to recompute."""
    if kept not in KINDS:
        raise ValueError(f"trainer.activations must be one of {', '.join(KINDS)}, got {kept!r}")
    if kept != "recompute":
        return
    found = [module for name, module in drafter.named_modules() if name.rpartition(".")[2] == "mlp"]
    if not found:
        raise ValueError(
            f"{type(drafter).__name__} has no MLP to recompute: trainer.activations must be keep or offload"
        )
    for module in found:
        module.forward = _recomputed(module.forward)


def waiting(kept: Kept, device: torch.device) -> AbstractContextManager[Any]:
    """Where saved tensors go while the slot grid is computed."""
    if kept != "offload":
        return nullcontext()
    return torch.autograd.graph.save_on_cpu(pin_memory=device.type == "cuda")


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(*arguments: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*arguments, **named)
        return checkpoint(forward, *arguments, use_reentrant=False, **named)

    return run
