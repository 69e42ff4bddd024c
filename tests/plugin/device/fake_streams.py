"""A fake device that does work only when something waits for it, in any order that its streams allow."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch

from sgl_kvfetch.codec.cuda_streams import Device, Event, Fence, Stream


class FakeEvent:
    """An event that objects if the calling thread has not selected its device: torch's would create a context on
    GPU 0."""

    def __init__(self, device: FakeDevice, stream: FakeStream | None = None) -> None:
        """Without a stream, it never comes by itself."""
        self._device, self.stream = device, stream
        self.is_done = False

    def query(self) -> bool:
        self._device.require_selected()
        return self.is_done

    def synchronize(self) -> None:
        self._device.require_selected()
        self._device.run(lambda: self.is_done)

    def wait(self, stream: FakeStream) -> None:
        stream.wait_event(self)


class FakeStream:
    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.cuda_stream = len(device.streams) + 1
        self.queue: deque[Callable[[], object] | FakeEvent] = deque()

    def add(self, work: Callable[[], object]) -> None:
        with self._device.lock:
            self.queue.append(work)

    def record_event(self) -> FakeEvent:
        event = FakeEvent(self._device, self)

        def reach() -> None:
            event.is_done = True

        self.add(reach)
        return event

    def wait_event(self, event: Fence) -> None:
        with self._device.lock:
            self.queue.append(cast(FakeEvent, event))

    @property
    def can_step(self) -> bool:
        return bool(self.queue) and (not isinstance(self.queue[0], FakeEvent) or self.queue[0].is_done)

    def step(self) -> None:
        first = self.queue.popleft()
        if not isinstance(first, FakeEvent):
            first()


class FakeDevice(Device):
    """A device on the CPU. ``seed`` selects the order of work. ``scheduler`` is the current stream of every thread."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(torch.device("cpu"))
        self.lock = threading.RLock()
        self._random = random.Random(seed)
        self.streams: list[FakeStream] = []
        self.num_empty = self.num_pinned = 0  # allocations
        self.pinned_memory: list[torch.Tensor] = []  # arguments of `pin`
        self.num_free_bytes = 1 << 29
        self.scheduler = cast(FakeStream, self.new_stream())
        self.forward = cast(FakeStream, self.new_stream())

    def new_stream(self) -> Stream:
        self.streams.append(FakeStream(self))
        return self.streams[-1]

    def current_stream(self) -> Stream:
        return self.scheduler

    def launch(self, stream: Stream, work: Callable[[], object]) -> None:
        cast(FakeStream, stream).add(work)

    @contextmanager
    def launching(self, stream: Stream) -> Iterator[Callable[[Callable[[], object]], object]]:
        yield partial(self.launch, stream)

    def _select(self) -> None:
        self._local.is_selected = True

    def require_selected(self) -> None:
        assert getattr(self._local, "is_selected", False), f"{threading.current_thread().name} uses GPU 0"

    def _record(self, stream: Stream) -> Event:
        return cast(FakeStream, stream).record_event()

    def free_bytes(self) -> int:
        return self.num_free_bytes

    def empty(self, shape: Sequence[int], stream: Stream) -> torch.Tensor:
        self.num_empty += 1
        return torch.full(tuple(shape), 0xEE, dtype=torch.uint8)

    def upload(self, x: Any, stream: Stream) -> Any:
        return x.to(self.torch_device)

    def used_on(self, tensor: torch.Tensor, stream: Stream) -> None:
        pass

    def pinned(self, num_bytes: int) -> torch.Tensor:
        self.num_pinned += 1
        return torch.empty(num_bytes, dtype=torch.uint8)

    def pin(self, memory: torch.Tensor) -> None:
        self.pinned_memory.append(memory)

    def unpin(self, memory: torch.Tensor) -> None:
        self.pinned_memory = [each for each in self.pinned_memory if each is not memory]

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Do launched work until ``until`` returns True, or until none is left."""
        with self.lock:
            while not until():
                ready = [stream for stream in self.streams if stream.can_step]
                if not ready:
                    assert not any(stream.queue for stream in self.streams), "streams wait for one another"
                    return
                self._random.choice(ready).step()

    def forward_pass(self, work: Callable[[], object]) -> None:
        """Launch a forward pass as SGLang's scheduler does when it overlaps with it."""
        self.forward.wait_event(self.scheduler.record_event())
        self.launch(self.forward, work)
