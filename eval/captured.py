"""CUDA graphs of a round's parts, and what they need: a state whose tensors stay where they are.

A graph replays kernels on the addresses it was captured with. Drafters give their state new tensors as they go
(`state.length = state.length + lengths`), so after each part the new values are copied into the tensors of the start.
The same code runs without graphs on a CPU, where the tests hold it against the loop that waits.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
WARM_UP_RUNS = 2


class Pinned:
    """The tensors of a drafting state, kept in place. places: holder, key and tensor of each."""

    def __init__(self, state: Any) -> None:
        """ValueError when a tensor lies in a tuple, where nothing can be put back."""
        self.places = list(_places(state, set()))

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for _, _, tensor in self.places]

    def settle(self) -> None:
        """Copy what the state was given since into its own tensors and put those back. What has another shape now is a
        part's passing note, and stays."""
        moved = []
        own = {tensor.data_ptr() for tensor in self.tensors}
        for holder, key, tensor in self.places:
            now = read(holder, key)
            if isinstance(now, Tensor) and now is not tensor and now.shape == tensor.shape:
                moved.append((holder, key, tensor, now.clone() if now.data_ptr() in own else now))
        for holder, key, tensor, now in moved:
            tensor.copy_(now)
            _set(holder, key, tensor)


def _places(value: Any, entered: set[int]) -> Iterator[tuple[Any, Any, Tensor]]:
    """Every tensor of an object, its fields and containers, and where it lies. Modules are not entered."""
    if isinstance(value, torch.nn.Module | type | str | bytes | int | float) or value is None or id(value) in entered:
        return
    entered.add(id(value))
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list | tuple):
        items = list(enumerate(value))
    else:
        items = list(getattr(value, "__dict__", {}).items())
    for key, part in items:
        if isinstance(part, Tensor):
            if isinstance(value, tuple):
                raise ValueError("a drafting state holds tensors in a tuple: use a list, so that they can be kept")
            yield value, key, part
        else:
            yield from _places(part, entered)


def read(holder: Any, key: Any) -> Any:
    """What lies there now."""
    return holder[key] if isinstance(holder, dict | list) else getattr(holder, key, None)


def _set(holder: Any, key: Any, value: Any) -> None:
    if isinstance(holder, dict | list):
        holder[key] = value
    else:
        setattr(holder, key, value)


class Captured(Generic[T]):
    """A part of a round as a CUDA graph: `run` reads and writes fixed tensors and returns others, which every replay
    fills anew. changed: what it changes, put back after the warm-up. pool: memory that it may share (see Parts).
    RuntimeError for a part that no graph can hold.

    cuBLAS keeps a workspace for each stream, and a graph that of the stream it was captured on. Graphs that run at once
    on two streams must not write into the same: so a part is captured on the stream that it will run on, where that is
    not the default one, which cannot be captured."""

    def __init__(self, run: Callable[[], T], changed: list[Tensor], pool: Any) -> None:
        current = torch.cuda.current_stream()
        apart = current != torch.cuda.default_stream()
        saved = [tensor.clone() for tensor in changed]
        stream = current if apart else torch.cuda.Stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_RUNS):
                run()
                for tensor, before in zip(changed, saved, strict=True):
                    tensor.copy_(before)
        current.wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(self.graph, pool=pool, stream=current if apart else None):
                self.value = run()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise RuntimeError(
                f"a part of the round cannot be captured as a CUDA graph ({error}): a target or drafter that waits for "
                f"the device (experts routed by nonzero, rope that changes with the length) needs loop=waiting"
            ) from error

    def __call__(self) -> T:
        """Replay; returns the tensors of the capture, filled."""
        self.graph.replay()
        return self.value


class Parts:
    """A round's parts by name: graphs where `graphs` is set, plain calls elsewhere.

    The graphs share one pool: they never run at the same time, so what one of them needs inside another may have. It
    may be what a graph captured later leaves: so that is read by the next graph alone, and one captured after it, as
    draft, verify and commit of one depth are. Groups that run at once have parts, and so a pool, of their own.
    """

    def __init__(self, graphs: bool, changed: list[Tensor]) -> None:
        self.graphs, self.changed = graphs, changed
        self.pool: Any = None
        self._captured: dict[tuple[Any, ...], Captured[Any]] = {}

    def ready(self, key: tuple[Any, ...], run: Callable[[], Any]) -> float:
        """Capture a part unless it was; returns the seconds that took, which are no round's. key: its name and all that
        changes its shapes."""
        if not self.graphs or key in self._captured:
            return 0.0
        torch.cuda.synchronize()  # what is under way is the rounds' own time
        started = time.perf_counter()
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        self._captured[key] = Captured(run, self.changed, self.pool)
        torch.cuda.synchronize()
        return time.perf_counter() - started

    def call(self, key: tuple[Any, ...], run: Callable[[], T]) -> T:
        """Run a part that is ready."""
        return self._captured[key]() if self.graphs else run()
