"""Answer with an object: open its file, parse the range, and send the bytes."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections import OrderedDict
from io import FileIO

from aiohttp import web

from sgl_kvfetch.directory import LocalStore, OpenObject, open_object, os_errors, read_fully

_SENDFILE_BYTES = 1 << 20  # by one call, which keeps the event loop from anything else
_TLS_PIECE_BYTES = 256 << 10
_RECENT_S = 5.0
_MAX_RECENT = 4096
_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")


async def send_file(request: web.Request, response: web.StreamResponse, file: FileIO, start: int, end: int) -> None:
    """Send bytes ``[start, end)`` of ``file``. Raises ConnectionError if the client leaves, or the file is shorter."""
    transport = request.transport
    if transport is None:
        raise ConnectionResetError("the client has disconnected")
    if transport.get_extra_info("sslcontext") is None and not transport.get_write_buffer_size():
        await _sendfile(transport.get_extra_info("socket").fileno(), file.fileno(), start, end)
        return
    while start < end:
        piece = await asyncio.to_thread(read_fully, file, start, min(_TLS_PIECE_BYTES, end - start))
        if not piece:
            raise ConnectionResetError("the file is shorter than expected")
        await response.write(piece)
        start += len(piece)


async def _sendfile(socket_fd: int, file_fd: int, start: int, end: int) -> None:
    """Have the kernel copy bytes from the file to the socket.

    ``loop.sendfile`` would do the same, but it waits after each call even if the socket has room, does not notice that
    the client leaves, and then fails with errors of its own.
    """
    # Ours: the transport may close its descriptor at any time, and the loop watches for writing only one of them.
    fd = os.dup(socket_fd)
    try:
        while start < end:
            try:
                sent = os.sendfile(fd, file_fd, start, min(_SENDFILE_BYTES, end - start))
            except BlockingIOError:
                await _writable(fd)
                continue
            if not sent:
                raise ConnectionResetError("the file is shorter than expected")
            start += sent
    finally:
        os.close(fd)


async def _writable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    is_writable = loop.create_future()
    loop.add_writer(fd, _set, is_writable)
    try:
        await is_writable
    finally:
        loop.remove_writer(fd)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Opener:
    """A client reads a large object in many ranges. Going through a thread for each would cost as much as all else.

    So a thread opens an object only if that has not happened for some seconds: then the kernel knows where it is. Only
    the thread tells the store that the object is in use.
    """

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self._recent: OrderedDict[str, float] = OrderedDict()  # when a thread opened it, oldest first

    async def open(self, name: str) -> OpenObject | None:
        """Open an object; the caller closes it. None if it is missing. Raises StoreError."""
        now_s = time.monotonic()
        while self._recent and next(iter(self._recent.values())) < now_s - _RECENT_S:
            self._recent.popitem(last=False)
        if name in self._recent:
            with os_errors(f"opening {name}"):
                return open_object(self._store.root, name)
        opened = await self._store.open_object(name)
        if opened is not None and len(self._recent) < _MAX_RECENT:
            self._recent[name] = now_s
            self._recent.move_to_end(name)
        return opened


class RangeError(Exception):
    """The range is malformed or cannot be satisfied."""


def parse_range(header: str, size_bytes: int) -> tuple[int, int]:
    """Return the bytes ``[start, end)`` that the header requests of an object of ``size_bytes``. Raises RangeError.

    RFC 9110 would ignore malformed and multiple ranges, and send the whole object: a large answer to a mistake. Our
    clients send neither, so both are errors.
    """
    match = _RANGE.fullmatch(header.strip())
    if match is None or match[1] == match[2] == "":
        raise RangeError(f"malformed range {header[:80]!r}; expected one range, as in bytes=0-99")
    if match[1] == "":
        start, end = max(0, size_bytes - int(match[2])), size_bytes
    else:
        start = int(match[1])
        end = min(int(match[2]) + 1, size_bytes) if match[2] else size_bytes
        if match[2] and int(match[2]) < start:
            raise RangeError(f"range {header[:80]!r} ends before it starts")
    if start >= end:
        raise RangeError(f"range {header[:80]!r} lies outside the object's {size_bytes} bytes")
    return start, end
