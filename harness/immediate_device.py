"""A device on the CPU that runs work at once when it is launched, whatever the stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from sgl_kvfetch.codec import Device, Stream


class ImmediateStream:
    """A stream and its events. All work is done before anybody can ask."""

    cuda_stream = 1

    def record_event(self) -> ImmediateStream:
        return self

    def wait_event(self, event: object) -> None: ...

    def wait(self, stream: object) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class ImmediateDevice(Device):
    """Its tensors are on the CPU."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def new_stream(self) -> Stream:
        return ImmediateStream()

    def current_stream(self) -> Stream:
        return ImmediateStream()

    def launch(self, stream: Stream, work: Callable[[], object]) -> None:
        work()

    @contextmanager
    def launching(self, stream: Stream) -> Iterator[Callable[[Callable[[], object]], object]]:
        yield lambda work: work()

    def mark(self, stream: Stream) -> Any:
        return stream

    def upload(self, x: Any, stream: Stream) -> Any:
        return x

    def free_bytes(self) -> int:
        return 1 << 32

    def empty(self, shape: Sequence[int], stream: Stream) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.uint8)

    def used_on(self, tensor: torch.Tensor, stream: Stream) -> None: ...

    def pin(self, memory: torch.Tensor) -> None: ...

    def unpin(self, memory: torch.Tensor) -> None: ...

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)
