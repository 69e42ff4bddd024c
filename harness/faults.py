"""Simulates a faulty network in front of an HTTP store, with a small proxy. A test sets its faults while it runs.

    async with FaultyProxy("127.0.0.1", server.port) as proxy:
        await proxy.set(Fault("close", after_bytes=100, times=1))
        ...                                   # the next answer breaks off after 100 bytes of its body
        await proxy.set(None)                 # no more faults

Each connection carries one answer, so that a fault affects only its own request.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Literal, Self

FaultKind = Literal[
    "refuse",  # nobody listens; open connections are reset
    "silent",  # accept a connection, and say nothing: over TLS, not even the handshake
    "hang",  # accept the request, but never answer
    "error",  # answer with ``status``, without contacting the store
    "close",  # break off after ``after_bytes`` of the answer's body
    "stall",  # send no more after ``after_bytes`` of the answer's body, but keep the connection open
    "slow",  # send the answer's body at ``bytes_per_s``
    "wrong_length",  # announce ``extra_bytes`` more (or fewer, if negative) than are sent
    "flip",  # flip the lowest bit of the body's byte ``after_bytes``
    "garbage",  # answer with something that is not HTTP
]

_PIECE_BYTES = 64 << 10
_CLOSE_S = 1.0
_ACCEPT_STEPS = 8  # of the event loop, and more than it takes to pass an accepted connection on
_LENGTH = re.compile(rb"(?im)^content-length: *(\d+)\r?$")
_CONNECTION = re.compile(rb"(?im)^connection:.*\r\n")


@dataclass(frozen=True, slots=True)
class Fault:
    kind: FaultKind
    status: int = 500
    after_bytes: int = 0
    bytes_per_s: float = 1e6
    extra_bytes: int = 1
    times: int | None = None  # how many requests it affects; None for all. Not for "refuse" and "silent"
    only: Callable[[str, str], bool] | None = None  # affects only requests for which this returns True: (method, path)


class FaultyProxy:
    """Listens on a free loopback port. ``requests`` lists the received requests: (method, path)."""

    def __init__(self, store_host: str, store_port: int, tls: ssl.SSLContext | None = None) -> None:
        """``tls``: what clients speak to the proxy. The store behind it speaks plain HTTP."""
        self._store, self._tls = (store_host, store_port), tls
        self._fault: Fault | None = None
        self._times_left: int | None = None
        self._server: asyncio.Server | None = None
        self._reserved: socket.socket | None = None  # the port, also while nobody listens there
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0
        self.requests: list[tuple[str, str]] = []

    @property
    def url(self) -> str:
        return f"{'http' if self._tls is None else 'https'}://127.0.0.1:{self.port}"

    async def set(self, fault: Fault | None) -> None:
        """Set the fault for future requests; None for no fault."""
        self._fault = fault
        self._times_left = fault.times if fault else None
        if fault is not None and fault.kind == "refuse":
            await self._stop()
        elif self._server is None:
            await self._listen()

    async def __aenter__(self) -> Self:
        # This socket is bound and never listens. So the kernel gives the port to no server that wants any free one.
        # `_listen` gets it, since both reuse the address.
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind(("127.0.0.1", 0))
        self.port = self._reserved.getsockname()[1]
        await self._listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()
        if self._reserved is not None:
            self._reserved.close()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port, limit=1 << 20)

    async def _stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            # Accept no more, but let asyncio pass on what is accepted: it leaks connections of a server that is closed.
            for listening in server.sockets:
                asyncio.get_running_loop().remove_reader(listening.fileno())
            for _ in range(_ACCEPT_STEPS):
                await asyncio.sleep(0)
            server.close()
            for writer in list(self._writers):
                _reset(writer)
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._writers.clear()
            await server.wait_closed()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._server is None:  # accepted just before it was closed
            _reset(writer)
            return
        self._writers.add(writer)  # here: a task that is cancelled before its first step never closes it
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if self._fault is not None and self._fault.kind == "silent":
                while await reader.read(_PIECE_BYTES):  # until the client gives up
                    pass
                return
            if self._tls is not None:
                await writer.start_tls(self._tls)
            head = await reader.readuntil(b"\r\n\r\n")
            method, path = (word.decode() for word in head.split(b" ", 2)[:2])
            self.requests.append((method, path))
            await self._answer(self._take_fault(method, path), head, reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            _reset(writer)  # the client or the store disconnected
        finally:
            self._writers.discard(writer)
            await _close(writer)

    def _take_fault(self, method: str, path: str) -> Fault | None:
        fault = self._fault
        if fault is None or self._times_left == 0 or (fault.only and not fault.only(method, path)):
            return None
        if self._times_left is not None:
            self._times_left -= 1
        return fault

    async def _answer(
        self, fault: Fault | None, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if fault is not None and fault.kind in ("silent", "hang", "error", "garbage"):
            async for _ in _body(head, reader):
                pass
            if fault.kind in ("silent", "hang"):  # silent: set after this connection was accepted
                await reader.read()  # until the client gives up
            elif fault.kind == "error":
                answer = f"HTTP/1.1 {fault.status} Fault\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                writer.write(answer.encode())
            else:
                writer.write(b"\x00\x01 this is no HTTP \xff\r\n\r\n")
            await writer.drain()
            return
        store_reader, store_writer = await asyncio.open_connection(*self._store, limit=1 << 20)
        self._writers.add(store_writer)
        try:
            store_writer.write(_closing(head))
            async for piece in _body(head, reader):
                store_writer.write(piece)
                await store_writer.drain()
            answer_head = _closing(await store_reader.readuntil(b"\r\n\r\n"))
            if fault is not None and fault.kind == "wrong_length":
                changed = lambda match: b"Content-Length: %d\r" % (int(match[1]) + fault.extra_bytes)  # noqa: E731
                answer_head = _LENGTH.sub(changed, answer_head)
            writer.write(answer_head)
            await self._pipe_answer(fault, store_reader, reader, writer)
        finally:
            self._writers.discard(store_writer)
            await _close(store_writer)

    async def _pipe_answer(
        self,
        fault: Fault | None,
        store_reader: asyncio.StreamReader,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        sent = 0
        while piece := await store_reader.read(_PIECE_BYTES):
            if fault is not None:
                if fault.kind in ("close", "stall") and sent + len(piece) > fault.after_bytes:
                    writer.write(piece[: fault.after_bytes - sent])
                    if fault.kind == "stall":
                        await reader.read()  # until the client gives up
                    return
                if fault.kind == "flip" and sent <= fault.after_bytes < sent + len(piece):
                    changed = bytearray(piece)
                    changed[fault.after_bytes - sent] ^= 1
                    piece = bytes(changed)
                if fault.kind == "slow":
                    await asyncio.sleep(len(piece) / fault.bytes_per_s)
            writer.write(piece)
            await writer.drain()
            sent += len(piece)


async def _body(head: bytes, reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the pieces of a request's body, whose length our clients always announce. Raises ConnectionResetError if
    the client disconnects before its end."""
    left = int(match[1]) if (match := _LENGTH.search(head)) else 0
    while left:
        piece = await reader.read(min(left, _PIECE_BYTES))
        if not piece:
            raise ConnectionResetError("the client disconnected")
        left -= len(piece)
        yield piece


def _closing(head: bytes) -> bytes:
    return _CONNECTION.sub(b"", head)[:-2] + b"Connection: close\r\n\r\n"


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close the connection with a TCP reset."""
    sock = writer.get_extra_info("socket")
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    try:
        async with asyncio.timeout(_CLOSE_S):
            await writer.wait_closed()
    except OSError:
        pass
    except TimeoutError:  # over TLS, `close` waits 30 s for the other end, and a server's end waits for its connections
        _reset(writer)
