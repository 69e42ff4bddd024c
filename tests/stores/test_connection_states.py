"""Each state of a connection, in which the server is silent, closes it, or resets it: every call ends."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import trustme

from harness.small_segments import FOLDER, data_object, page_hashes
from harness.waiting import WAIT_S
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.stores import HttpOptions, TlsFiles
from sgl_kvfetch.stores.http import HttpStore

STATES = ("connecting", "handshake", "request", "head", "body", "idle")
FAULTS = ("silent", "closed", "reset")
CALLS = ("read", "put", "lookup")
CONTENT = bytes(range(256)) * 4096
NAME = data_object(CONTENT)
LARGE = bytes(16 << 20)  # more than sockets take
NO_HITS = b"\x90"  # msgpack
PATIENT = HttpOptions(timeout_s=WAIT_S, connect_timeout_s=WAIT_S, max_attempts=1)
HURRIED = HttpOptions(timeout_s=0.2, min_bytes_per_s=1e12, max_attempts=1)


class Server:
    """Does ``fault`` to each connection that comes to ``state``, until `recover`. Then it is a store."""

    def __init__(self, state: str, fault: str, tls: ssl.SSLContext | None) -> None:
        self._state, self._fault, self._tls = state, fault, tls
        self._is_well = False
        self.has_come = asyncio.Event()  # to the state
        self.is_idle = asyncio.Event()  # the client has the first answer
        self._writers: list[asyncio.StreamWriter] = []
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._waiting: list[socket.socket] = []
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        if self._state != "connecting" or self._fault == "closed":
            await self._accept_all()
            return
        if self._fault == "silent":  # the kernel answers nobody once the queue is full
            self._listener.listen(0)
            for _ in range(3):
                self._waiting.append(socket.socket())
                self._waiting[-1].setblocking(False)
                self._waiting[-1].connect_ex(("127.0.0.1", self.port))
        self.has_come.set()  # or it does not listen, which resets whoever comes

    async def recover(self) -> None:
        self._is_well = True
        self.is_idle.set()
        if self._server is None:
            await self._accept_all()

    async def close(self) -> None:
        await self.recover()
        assert self._server is not None
        self._server.close()
        for waiting in self._waiting:
            waiting.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _accept_all(self) -> None:
        self._server = await asyncio.start_server(self._serve, sock=self._listener)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        with contextlib.suppress(OSError, EOFError):  # the client has left
            if self._comes_to("connecting", writer):
                return
            if self._tls is not None:
                if self._is_at("handshake"):
                    await reader.read(10)
                if self._comes_to("handshake", writer):
                    return
                await writer.start_tls(self._tls)
            num_served = 0
            while await self._answer(reader, writer, num_served):
                num_served += 1

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, num_served: int) -> bool:
        if self._is_at("idle") and num_served and self._fault != "silent":
            await self.is_idle.wait()
            if self._comes_to("idle", writer):
                return False
        request = await reader.readexactly(20)
        if self._comes_to("request", writer):
            return False
        request += await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", request)
        await reader.readexactly(int(length[1]) if length else 0)
        if num_served and self._comes_to("idle", writer):
            return False
        if request.startswith(b"GET"):
            wanted = re.search(rb"bytes=(\d+)-(\d+)", request)
            assert wanted is not None
            start, last = int(wanted[1]), int(wanted[2])
            said, content = b"206 P\r\nContent-Range: bytes %d-%d/*" % (start, last), CONTENT[start : last + 1]
        else:
            said, content = (b"201 Created", b"") if request.startswith(b"PUT") else (b"200 OK", NO_HITS)
        answer = b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n" % (said, len(content))
        if self._is_at("head"):
            writer.write(answer[:20])
            await writer.drain()
            return not self._comes_to("head", writer)
        if self._is_at("body"):
            writer.write(answer.replace(b"201", b"422").replace(b": 0", b": 9") + content[: len(content) // 2])
            await writer.drain()
            return not self._comes_to("body", writer)
        writer.write(answer + content)
        await writer.drain()
        return True

    def _is_at(self, state: str) -> bool:
        return state == self._state and not self._is_well

    def _comes_to(self, state: str, writer: asyncio.StreamWriter) -> bool:
        """Do the fault if this is the state. Return whether the connection is not to be served."""
        if not self._is_at(state):
            return False
        if self._fault == "reset":
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        if self._fault != "silent":
            writer.transport.abort()
        self.has_come.set()
        if state == "idle" and self._fault != "silent":
            self._is_well = True  # the next connection is not to be reset while its answer is on the way
        return True


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


Begin = Callable[..., Awaitable[tuple[Server, HttpStore]]]


@pytest.fixture
async def begin(authority: trustme.CA, tmp_path: Path) -> AsyncIterator[Begin]:
    async with contextlib.AsyncExitStack() as stack:

        async def start(
            scheme: str, state: str, fault: str, options: HttpOptions = PATIENT
        ) -> tuple[Server, HttpStore]:
            context = None
            if scheme == "https":
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                authority.issue_cert("127.0.0.1").configure_cert(context)
                authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
                options = replace(options, tls=TlsFiles(ca=str(tmp_path / "ca.pem")))
            server = Server(state, fault, context)
            stack.push_async_callback(server.close)
            await server.start()
            store = HttpStore(f"{scheme}://127.0.0.1:{server.port}", options=options)
            stack.push_async_callback(store.close)
            return server, store

        yield start


def call(store: HttpStore, kind: str, into: bytearray) -> Coroutine[Any, Any, object]:
    if kind == "read":
        return store.read(NAME, 0, [memoryview(into)])
    return store.put(data_object(LARGE), LARGE) if kind == "put" else store.lookup(FOLDER, page_hashes(1))


async def ended(task: asyncio.Task[Any]) -> None:
    await asyncio.wait([task], timeout=WAIT_S)
    assert task.done()


async def is_well(server: Server, store: HttpStore, kind: str) -> None:
    await server.recover()
    store.options = PATIENT
    into = bytearray(len(CONTENT))
    await call(store, kind, into)
    assert kind != "read" or into == CONTENT


CELLS = [each for each in product(("http", "https"), CALLS, STATES) if (each[0], each[2]) != ("http", "handshake")]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("scheme", "kind", "state"), CELLS)
async def test_calls_end_and_the_next_is_well(begin: Begin, scheme: str, kind: str, state: str, fault: str) -> None:
    server, store = await begin(scheme, state, fault)
    if state == "idle":
        await call(store, kind, bytearray(len(CONTENT)))
        server.is_idle.set()
    # Over a connection that the server has closed, aiohttp sends only what it knows to be idempotent again.
    store.options = HURRIED if fault == "silent" else replace(store.options, max_attempts=2 if state == "idle" else 1)
    task = asyncio.create_task(call(store, kind, bytearray(len(CONTENT))))
    await ended(task)
    if state == "idle" and fault != "silent":
        await task  # over another connection
    else:
        error = task.exception()
        assert isinstance(error, StoreError)
        # Of a write, the status is an answer, whatever becomes of its body.
        reasons = ("refused", "truncated", "invalid") if (kind, state) == ("put", "body") else ("refused", "truncated")
        assert error.reason == "timeout" if fault == "silent" else error.reason in reasons
    await is_well(server, store, kind)


@pytest.mark.parametrize(
    ("scheme", "kind", "state", "end"),
    [
        (scheme, call, state, end)
        for scheme, call, state in CELLS
        for end in ("cancellation", "close", "connect_timeout_s")
        if end != "connect_timeout_s" or state in ("connecting", "handshake")
    ],
)
async def test_a_silent_server_keeps_nobody(begin: Begin, scheme: str, kind: str, state: str, end: str) -> None:
    connect_timeout_s = 0.2 if end == "connect_timeout_s" else WAIT_S
    options = HttpOptions(timeout_s=WAIT_S, connect_timeout_s=connect_timeout_s, max_attempts=1)
    server, store = await begin(scheme, state, "silent", options)
    if state == "idle":
        await call(store, kind, bytearray(len(CONTENT)))
    into = bytearray(len(CONTENT))
    task = asyncio.create_task(call(store, kind, into))
    await server.has_come.wait()
    if end == "cancellation":
        task.cancel()
        await ended(task)
        assert task.cancelled()
        await is_well(server, store, kind)
    if end == "close":
        await ended(asyncio.create_task(store.close()))
    await ended(task)
    if end != "cancellation":
        assert isinstance(task.exception(), StoreError)
