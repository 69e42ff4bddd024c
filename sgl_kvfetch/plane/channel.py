"""The sockets between the engine and its data plane. Sending never waits."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable

from sgl_kvfetch.errors import FormatError
from sgl_kvfetch.plane.messages import Command, Event, MessageReader, encode

_READ_BYTES = 1 << 18


class Outbox:
    """Sends messages from any thread: bytes that the socket does not take at once are sent by ``flush``."""

    def __init__(self, sock: socket.socket, on_unsent: Callable[[], object]) -> None:
        """``on_unsent`` is called when bytes are left: call ``flush`` whenever the socket takes bytes, until it returns
        True."""
        sock.setblocking(False)
        self.sock = sock
        self._on_unsent = on_unsent
        self._unsent: deque[memoryview] = deque()
        self._lock = threading.RLock()
        self._closed = False

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, message: Command | Event) -> None:
        """Send a message. Does nothing once closed. Raises FormatError for one that is too large to be sent."""
        data = memoryview(encode(message))
        with self._lock:
            if self._closed:
                return
            self._unsent.append(data)
            if len(self._unsent) == 1 and not self.flush():
                self._on_unsent()

    def flush(self) -> bool:
        """Send what is left. Return whether nothing is."""
        with self._lock:
            try:
                while self._unsent:
                    data = self._unsent[0]
                    sent = self.sock.send(data)
                    if sent == len(data):
                        self._unsent.popleft()
                    else:
                        self._unsent[0] = data[sent:]
            except BlockingIOError:
                return False
            except OSError:
                self._unsent.clear()  # the reader of this socket will notice it
            return True

    def receive(self) -> bytes:
        """Return bytes that the socket has received. Raises OSError if there are none, or once closed."""
        with self._lock:
            return self.sock.recv(_READ_BYTES)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._unsent.clear()
            self.sock.close()


class Channel:
    """The engine's end. Commands are sent from any thread. Events come over two sockets: some to a thread that waits
    for them, the others to the scheduler's steps, which do not."""

    def __init__(self, commands: socket.socket, events: socket.socket) -> None:
        """``commands`` brings the events for steps, too."""
        self._waker = os.eventfd(0, os.EFD_NONBLOCK)
        self._outbox = Outbox(commands, lambda: os.eventfd_write(self._waker, 1))
        self._events = events
        self._events.setblocking(False)
        self._reader: MessageReader[Event] = MessageReader(Event)
        self._step_reader: MessageReader[Event] = MessageReader(Event)
        self._poller = select.poll()
        self._poller.register(self._waker, select.POLLIN)
        self._poller.register(events, select.POLLIN)
        self._poller.register(commands, 0)
        self._step_poller = select.poll()
        self._step_poller.register(commands, select.POLLIN)
        self.send = self._outbox.send

    def receive(self, timeout_s: float) -> list[Event] | None:
        """Wait for events. Return an empty list only if the other end neither sends nor takes a byte for ``timeout_s``,
        and None if it is gone or sends invalid bytes."""
        while True:
            self._poller.modify(self._outbox.sock, select.POLLOUT if self._outbox.has_unsent else 0)
            ready = dict(self._poller.poll(timeout_s * 1e3))
            if not ready:
                return []
            if self._waker in ready:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._waker)
            self._outbox.flush()
            if self._events.fileno() in ready:
                try:
                    data = self._events.recv(_READ_BYTES)
                    events = list(self._reader.feed(data)) if data else None
                except BlockingIOError:
                    continue
                except (OSError, FormatError):
                    return None
                if events is None or events:
                    return events

    def receive_now(self) -> list[Event]:
        """Return the events for a step that have come, at most as many as one read returns. Raises FormatError."""
        if not self._step_poller.poll(0):  # cheaper than an attempt to read
            return []
        try:
            data = self._outbox.receive()
        except OSError:  # the other end is gone, which ``receive`` notices
            return []
        return list(self._step_reader.feed(data))

    def close(self) -> None:
        """Close the sockets. Call this on the thread that receives. Idempotent."""
        self._outbox.close()
        self._events.close()
        if self._waker >= 0:
            os.close(self._waker)
            self._waker = -1
