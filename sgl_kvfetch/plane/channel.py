"""The engine's end of the socket to its data plane. Sending never waits."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections import deque

from sgl_kvfetch.errors import FormatError
from sgl_kvfetch.plane.messages import Command, Event, MessageReader, encode

_READ_BYTES = 1 << 18


class Channel:
    """Sends from any thread, receives on one thread."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._reader: MessageReader[Event] = MessageReader(Event)
        self._unsent: deque[memoryview] = deque()
        self._lock = threading.Lock()
        self._waker = os.eventfd(0, os.EFD_NONBLOCK)
        self._poller = select.poll()
        self._poller.register(self._waker, select.POLLIN)
        self._closed = False

    def send(self, command: Command) -> None:
        """Send a command; ``receive`` sends what the socket does not take at once. Does nothing once closed."""
        data = memoryview(encode(command))
        with self._lock:
            if self._closed:
                return
            self._unsent.append(data)
            self._flush()
            if self._unsent:
                os.eventfd_write(self._waker, 1)

    def receive(self, timeout_s: float) -> list[Event] | None:
        """Wait for events. Return an empty list only if the other end neither sends nor takes a byte for ``timeout_s``,
        and None if it is gone or sends invalid bytes."""
        while True:
            with self._lock:
                wanted = select.POLLIN | (select.POLLOUT if self._unsent else 0)
            self._poller.register(self._sock, wanted)
            ready = dict(self._poller.poll(timeout_s * 1e3))
            if not ready:
                return []
            if self._waker in ready:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._waker)
            with self._lock:
                self._flush()
            if ready.get(self._sock.fileno(), 0) & ~select.POLLOUT:
                try:
                    data = self._sock.recv(_READ_BYTES)
                    events = list(self._reader.feed(data)) if data else None
                except BlockingIOError:
                    continue
                except (OSError, FormatError):
                    return None
                if events is None or events:
                    return events

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._unsent.clear()
                self._sock.close()
                os.close(self._waker)

    def _flush(self) -> None:
        try:
            while self._unsent:
                data = self._unsent[0]
                sent = self._sock.send(data)
                if sent == len(data):
                    self._unsent.popleft()
                else:
                    self._unsent[0] = data[sent:]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()  # ``receive`` will notice it
