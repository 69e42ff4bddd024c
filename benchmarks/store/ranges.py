"""A client that reads ranges over HTTP at almost no cost, so that it never limits the server that it measures.

The kernel drops the bodies (``MSG_TRUNC``) instead of copying them. So lengths are checked here, and contents are not.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle

_HEADERS_END = b"\r\n\r\n"
_MAX_HEADER_BYTES = 4096
_NO_BYTES_S = 30.0


@dataclass(frozen=True)
class Reading:
    received_bytes: int  # of bodies
    seconds: float
    client_cpu_s: float


def read_ranges(port: int, path: str, object_bytes: int, range_bytes: int, connections: int, seconds: float) -> Reading:
    """Read consecutive ranges of one object for about ``seconds``, each connection one at a time.

    Raises ConnectionError for any answer other than the range.
    """
    starts = cycle(range(0, object_bytes - range_bytes + 1, range_bytes))
    buffer = memoryview(bytearray(range_bytes))  # never written to
    readers = [_Reader(port, path, range_bytes) for _ in range(connections)]
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    try:
        received = sum(_drive(readers, starts, buffer, began_s + seconds))
    finally:
        for reader in readers:
            reader.socket.close()
    return Reading(received, time.perf_counter() - began_s, time.process_time() - began_cpu_s)


def _drive(readers: list[_Reader], starts: Iterator[int], buffer: memoryview, until_s: float) -> Iterator[int]:
    """Yield the size of each range when it has arrived."""
    with selectors.DefaultSelector() as selector:
        for reader in readers:
            selector.register(reader.socket, selectors.EVENT_READ, reader)
            reader.ask(next(starts))
        while selector.get_map():
            events = selector.select(_NO_BYTES_S)
            if not events:
                raise ConnectionError(f"no byte arrived within {_NO_BYTES_S:g} s")
            for key, _ in events:
                if key.data.receive(buffer):
                    yield key.data.range_bytes
                    if time.perf_counter() < until_s:
                        key.data.ask(next(starts))
                    else:
                        selector.unregister(key.fileobj)


class _Reader:
    """One connection."""

    def __init__(self, port: int, path: str, range_bytes: int) -> None:
        self.range_bytes = range_bytes
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nRange: bytes=%d-%d\r\n\r\n"
        self._headers = b""
        self._left: int | None = None  # bytes of the body; None while the headers are incomplete

    def ask(self, start: int) -> None:
        self._headers, self._left = b"", None
        self.socket.sendall((self._request % (start, start + self.range_bytes - 1)).encode())

    def receive(self, buffer: memoryview) -> bool:
        """Take what has arrived. Return whether the answer is complete."""
        if self._left is None:
            self._receive_headers()
        elif self._left:
            count = self.socket.recv_into(buffer, self._left, socket.MSG_TRUNC)
            _require(count > 0, "the connection was closed in mid-body")
            self._left -= count
        return self._left == 0

    def _receive_headers(self) -> None:
        piece = self.socket.recv(_MAX_HEADER_BYTES)
        _require(bool(piece), "the connection was closed before the headers")
        self._headers += piece
        headers, separator, body = self._headers.partition(_HEADERS_END)
        if not separator:
            _require(len(headers) < _MAX_HEADER_BYTES, "the headers do not end")
            return
        status, *lines = headers.decode("latin-1").split("\r\n")
        fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        _require(status.split(" ", 2)[1] == "206", f"expected status 206, found {status!r}")
        length = fields.get("content-length")
        _require(length == str(self.range_bytes), f"expected {self.range_bytes} bytes, found {length}")
        self._left = self.range_bytes - len(body)


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise ConnectionError(problem)
