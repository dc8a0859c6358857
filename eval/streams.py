"""Two CUDA streams, one drafting and one verifying, and marks in time; on a CPU both are nothing.

A half batch's verification waits for its own draft, and its next draft for its own verification; the other half's work
fills the streams meanwhile (eval.overlap has the arithmetic).
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """A CUDA device made the current one inside: streams, events and graphs are made on that. Nothing elsewhere."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def sent(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor on a device; one of the host is on its way there, and the host does not wait for it."""
    if values.device.type == "cpu" and device.type == "cuda":
        values = values.contiguous().pin_memory()
    return values.to(device, non_blocking=True)


class Mark:
    """A point in a device's work: of the current stream on a GPU, of the clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.at = time.perf_counter()
        self.event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()

    def wait(self) -> None:
        """Let the host wait until the work before the mark is done."""
        if self.event is not None:
            self.event.synchronize()

    def since(self, other: "Mark") -> float:
        """Seconds from another mark to this one; both must be done."""
        if self.event is None or other.event is None:
            return self.at - other.at
        return other.event.elapsed_time(self.event) / 1000


class Streams:
    """Where a group drafts and verifies. apart: on two streams (a GPU alone has those), else on the current one."""

    def __init__(self, device: torch.device, apart: bool = False) -> None:
        self.device = device
        self.pair: list[torch.cuda.Stream] = []
        if apart and device.type == "cuda":
            self.pair = [torch.cuda.Stream(device), torch.cuda.Stream(device)]
        self.done: torch.cuda.Event | None = None

    def half(self) -> "Streams":
        """The same two streams for another half batch, with marks of its own."""
        other = Streams(self.device)
        other.pair = self.pair
        return other

    def draft(self) -> Any:
        """Work of the drafting stream: after this half's verification."""
        return self._on(0)

    def verify(self) -> Any:
        """Work of the verifying stream: after this half's draft."""
        return self._on(1)

    def _on(self, which: int) -> Any:
        return self._ordered(self.pair[which]) if self.pair else nullcontext()

    @contextmanager
    def _ordered(self, stream: torch.cuda.Stream) -> Iterator[None]:
        with torch.cuda.stream(stream):
            if self.done is not None:
                stream.wait_event(self.done)
            yield
            self.done = torch.cuda.Event()
            self.done.record(stream)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Work of the current stream, after all before and before all after."""
        self.join()
        yield
        for stream in self.pair:
            stream.wait_stream(torch.cuda.current_stream(self.device))

    def join(self) -> None:
        """Let the current stream wait for both."""
        for stream in self.pair:
            torch.cuda.current_stream(self.device).wait_stream(stream)
