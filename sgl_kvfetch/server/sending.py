"""Send bytes of a file as the body of an answer."""

from __future__ import annotations

import asyncio
import os
from io import FileIO

from aiohttp import web

from sgl_kvfetch.directory import read_fully

_SENDFILE_BYTES = 1 << 20  # by one call, which keeps the event loop from anything else
_TLS_PIECE_BYTES = 256 << 10


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
