"""Proof that a round never waits for the device: inside `no_waits` whatever would wait raises.

What a GPU has to answer before the host can go on stops the host for the whole queue before it. On a CPU the same
operations are instant, so a dispatch mode looks for them by name: reading a number (`item`, `tolist`, `bool`), results
whose shape depends on values (nonzero, masked_select, indexing by a mask), and copies to and from the host that block,
numbers that are made into a tensor on a device among them: those wait behind the whole queue, too. On a GPU
PyTorch's own check stands beside it (`torch.cuda.set_sync_debug_mode`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Operators that give the host a number, or whose result has as many entries as values say.
WAITING = (
    *("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "nonzero_numpy", "argwhere", "masked_select"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive"),
)
BY_MASK = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")
# Ways to the host that never reach the dispatcher when the tensor lies there already.
READING = ("tolist", "numpy", "cpu", "__array__")
MAKING = ("tensor", "as_tensor")


class WaitError(RuntimeError):
    """An operation inside a round waits for the device."""


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)


def fault(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why the operator of this name waits for the device, in words; None when it does not."""
    if name in WAITING:
        return "reads values"
    if name in BY_MASK and any(one.dtype in (torch.bool, torch.uint8) for one in _tensors(args[1])):
        return "indexes by a mask"
    if name == "repeat_interleave" and len(args) + len(kwargs) < 2:
        return "has as many entries as values say"
    if name in ("_to_copy", "copy_") and not _passes(name, args, kwargs):
        return "copies to or from the host and waits"
    return None


def _passes(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a copy stays on its side, or does not wait."""
    if name == "_to_copy":
        source, goal, later = args[0].device, kwargs.get("device") or args[0].device, kwargs.get("non_blocking", False)
    else:
        source, goal, later = args[1].device, args[0].device, len(args) > 2 and args[2]
    return (source.type == "cpu") == (torch.device(goal).type == "cpu") or bool(later)


class _Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if (why := fault(name, args, kwargs or {})) is not None:
            raise WaitError(f"{name} inside a round: it {why}")
        return func(*args, **(kwargs or {}))


class _Called(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in READING:
            raise WaitError(f"{name} inside a round: it copies to the host and waits")
        if name in MAKING and torch.device(kwargs.get("device") or "cpu").type != "cpu":
            raise WaitError(f"{name} inside a round: it copies from the host and waits")
        return func(*args, **kwargs)


@contextmanager
def no_waits() -> Iterator[None]:
    """Raise WaitError (on a GPU also RuntimeError) where an operation inside waits for the device."""
    cuda = torch.cuda.is_available()
    before = torch.cuda.get_sync_debug_mode() if cuda else 0
    if cuda:
        torch.cuda.set_sync_debug_mode("error")
    try:
        with _Called(), _Dispatched():
            yield
    finally:
        if cuda:
            torch.cuda.set_sync_debug_mode(before)
