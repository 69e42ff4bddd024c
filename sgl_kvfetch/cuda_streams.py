"""A GPU's streams, as far as we use them: so little that a test can stand in for it, and run work in any order that
the streams allow."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol, cast

import torch


class Event(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None:
        """Wait until the stream is past it. Never on the scheduler's thread."""


class Stream(Protocol):
    """What is launched on one stream runs in that order; between streams only events order anything."""

    @property
    def cuda_stream(self) -> int:
        """The driver's handle. Never 0, which is the default stream's."""

    def record_event(self) -> Event: ...

    def wait_event(self, event: Event) -> None:
        """What is launched on this stream from now on comes after ``event``. The caller does not wait."""


class Device(ABC):
    """One GPU. From any thread."""

    torch_device: torch.device

    @abstractmethod
    def new_stream(self) -> Stream: ...

    @abstractmethod
    def current_stream(self) -> Stream:
        """The calling thread's."""

    @abstractmethod
    def launch(self, stream: Stream, work: Callable[[], None]) -> None:
        """Enqueue what ``work`` does. It may run at any later time that the stream allows."""

    @abstractmethod
    def mark(self, stream: Stream) -> Event:
        """Like ``record_event``, for threads to wait for: an event as streams want it keeps a core busy."""

    @abstractmethod
    def empty(self, shape: Sequence[int], stream: Stream) -> torch.Tensor:
        """uint8, on the device, to be used on ``stream``."""

    @abstractmethod
    def used_on(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Once ``tensor`` is nobody's any more, its memory waits for what is launched on ``stream`` by then."""

    @abstractmethod
    def pinned(self, num_bytes: int) -> torch.Tensor:
        """uint8, on the host, where copies to and from the device need not stop anybody."""


class CudaDevice(Device):
    """``torch.cuda``. Its streams do not wait for the default stream, nor it for them."""

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device

    def new_stream(self) -> Stream:
        return cast(Stream, torch.cuda.Stream(self.torch_device))  # type: ignore[no-untyped-call]

    def current_stream(self) -> Stream:
        return cast(Stream, torch.cuda.current_stream(self.torch_device))

    def launch(self, stream: Stream, work: Callable[[], None]) -> None:
        with torch.cuda.stream(cast(torch.cuda.Stream, stream)):
            work()

    def mark(self, stream: Stream) -> Event:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(cast(torch.cuda.Stream, stream))
        return cast(Event, event)

    def empty(self, shape: Sequence[int], stream: Stream) -> torch.Tensor:
        with torch.cuda.stream(cast(torch.cuda.Stream, stream)):
            return torch.empty(*shape, dtype=torch.uint8, device=self.torch_device)

    def used_on(self, tensor: torch.Tensor, stream: Stream) -> None:
        tensor.record_stream(cast(torch.cuda.Stream, stream))

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
