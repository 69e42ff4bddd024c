"""Each state of a connection, in which the server is silent, closes it, or resets it: every call ends."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
import struct
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import trustme

from harness.small_segments import FOLDER, data_object, page_hashes
from harness.waiting import WAIT_S, until
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
        self._is_well = threading.Event()
        self._kept: list[socket.socket] = []
        self.has_come = threading.Event()  # to the state
        self.is_idle = threading.Event()  # the client has the first answer
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads: list[threading.Thread] = []
        if state != "connecting" or fault == "closed":
            self._accept_all()
        elif fault == "silent":  # the kernel answers nobody once the queue is full
            self._listener.listen(0)
            for _ in range(3):
                waiting = socket.socket()
                waiting.setblocking(False)
                waiting.connect_ex(("127.0.0.1", self.port))
                self._kept.append(waiting)
            self.has_come.set()
        else:  # it resets whoever comes
            self.has_come.set()

    def recover(self) -> None:
        self._is_well.set()
        self.is_idle.set()
        if not self._threads:
            self._accept_all()

    def close(self) -> None:
        self.recover()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for kept in self._kept:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(kept, socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(WAIT_S)
        for kept in self._kept:
            kept.close()

    def _accept_all(self) -> None:
        self._listener.listen(100)
        self._start(self._accept)

    def _start(self, target: Callable[..., None], *args: Any) -> None:
        self._threads.append(threading.Thread(target=target, args=args, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                taken, _ = self._listener.accept()
                self._kept.append(taken)
                self._start(self._serve, taken)

    def _serve(self, taken: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):  # the client has left
            if self._comes_to("connecting", taken):
                return
            if self._tls is not None:
                if self._is_at("handshake"):
                    taken.recv(10)
                if self._comes_to("handshake", taken):
                    return
                taken = self._tls.wrap_socket(taken, server_side=True)
                self._kept.append(taken)
            num_served = 0
            while self._answer(taken, num_served):
                num_served += 1

    def _answer(self, taken: socket.socket, num_served: int) -> bool:
        if self._is_at("idle") and num_served and self._fault != "silent":
            self.is_idle.wait(WAIT_S)
            if self._comes_to("idle", taken):
                return False
        request = taken.recv(20)
        if not request or self._comes_to("request", taken):
            return False
        while b"\r\n\r\n" not in request:
            request += taken.recv(1 << 16)
        head, _, body = request.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", head)
        left = int(length[1]) - len(body) if length else 0
        while left:
            left -= len(taken.recv(min(left, 1 << 20)))
        if num_served and self._comes_to("idle", taken):
            return False
        if head.startswith(b"GET"):
            wanted = re.search(rb"bytes=(\d+)-(\d+)", head)
            assert wanted is not None
            start, last = int(wanted[1]), int(wanted[2])
            said, content = b"206 P\r\nContent-Range: bytes %d-%d/*" % (start, last), CONTENT[start : last + 1]
        else:
            said, content = (b"201 Created", b"") if head.startswith(b"PUT") else (b"200 OK", NO_HITS)
        answer = b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n" % (said, len(content))
        if self._is_at("head"):
            taken.sendall(answer[:20])
            return not self._comes_to("head", taken)
        if self._is_at("body"):
            taken.sendall(answer.replace(b"201", b"422").replace(b": 0", b": 9") + content[: len(content) // 2])
            return not self._comes_to("body", taken)
        taken.sendall(answer + content)
        return True

    def _is_at(self, state: str) -> bool:
        return state == self._state and not self._is_well.is_set()

    def _comes_to(self, state: str, taken: socket.socket) -> bool:
        """Do the fault if this is the state. Return whether the connection is not to be served."""
        if not self._is_at(state):
            return False
        if self._fault == "reset":
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if self._fault != "silent":
            taken.close()
        self.has_come.set()
        if state == "idle" and self._fault != "silent":
            self._is_well.set()  # the next connection is not to be reset while its answer is on the way
        return True


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


Begin = Callable[..., tuple[Server, HttpStore]]


@pytest.fixture
async def begin(authority: trustme.CA, tmp_path: Path) -> AsyncIterator[Begin]:
    async with contextlib.AsyncExitStack() as stack:

        def start(scheme: str, state: str, fault: str, options: HttpOptions = PATIENT) -> tuple[Server, HttpStore]:
            context = None
            if scheme == "https":
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                authority.issue_cert("127.0.0.1").configure_cert(context)
                authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
                options = replace(options, tls=TlsFiles(ca=str(tmp_path / "ca.pem")))
            server = Server(state, fault, context)
            stack.callback(server.close)
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
    server.recover()
    store.options = PATIENT
    into = bytearray(len(CONTENT))
    await call(store, kind, into)
    assert kind != "read" or into == CONTENT


CELLS = [each for each in product(("http", "https"), CALLS, STATES) if (each[0], each[2]) != ("http", "handshake")]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("scheme", "kind", "state"), CELLS)
async def test_calls_end_and_the_next_is_well(begin: Begin, scheme: str, kind: str, state: str, fault: str) -> None:
    server, store = begin(scheme, state, fault)
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
    server, store = begin(scheme, state, "silent", options)
    if state == "idle":
        await call(store, kind, bytearray(len(CONTENT)))
    into = bytearray(len(CONTENT))
    task = asyncio.create_task(call(store, kind, into))
    await until(server.has_come.is_set)
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
