"""Data over HTTP/1.1 that comes where it will lie, and is sent from where it lies.

aiohttp makes an object of each piece that arrives, and copies each that a socket does not take at once. That takes
three to four times the CPU time of the sockets themselves. Here each request has a thread while it runs, also under
TLS: `http.client` speaks the protocol, and the kernel moves the bytes from or into the caller's memory without Python's
lock, so that several cores work at once, and beside an event loop that is busy.

**Every wait ends.** Opening a TCP connection waits on the event loop. From then on a thread has the socket, and waits
for it in one place (`_Connection`): for `_SLICE_S` at a time, whether it shakes hands, sends, or reads a head or a
body. After each slice it looks whether the call was cancelled, by its deadline, by its caller, or since the store's
client is closed. So a silent server keeps nobody for longer than a slice, and a call's end is its memory's, too.

**No answer takes more memory than it may.** `http.client` reads heads, chunks and messages through `_Connection`, which
counts them.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
import select
import socket
import ssl
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, IncompleteRead
from typing import Any, Generic, NamedTuple, TypeVar
from urllib.parse import urlsplit

import aiohappyeyeballs

from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.log import printable
from sgl_kvfetch.side_by_side import call_soon
from sgl_kvfetch.stores.base import fill_pieces, left_of
from sgl_kvfetch.tls import tls_error

_IDLE_S = 15.0  # as aiohttp: a firewall may have dropped a connection that was idle for longer, and tells nobody
_EYEBALLS_S = 0.25  # as aiohttp: how long one address has before the next one is tried beside it

_SLICE_S = 0.02  # the longest wait for a socket; how soon, and how often, the event loop hears what has come
_SLICE = struct.pack("@ll", 0, round(_SLICE_S * 1e6))
_MOST_PIECES = 512  # in one call of the kernel's, which takes 1,024

LEAST_SENT_BYTES = 256 << 10  # below this, a thread costs more than it saves
_SENDERS = 4
_MOST_BODY_BYTES = 4096  # of an answer that is no range
_MOST_ANSWER_BYTES = 64 << 10  # of its head, and of what is read beside a range

_CLOSED = "the server closed the connection"
_RANGE_SENT = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/(?:[0-9]{1,18}|\*)")

T = TypeVar("T")


class Answer(NamedTuple):
    """A status, and the first bytes of the body, unless it was received elsewhere."""

    status: int
    body: bytes


def require_range(url: str, content_range: str | None, content_length: int | None, start: int, length: int) -> None:
    """Raise StoreError unless an answer with status 206 has the range that was asked for."""
    sent = _RANGE_SENT.fullmatch(content_range or "")
    if sent is None or int(sent[1]) != start or int(sent[2]) < start:
        raise StoreError("protocol", f"{url}: expected a Content-Range from byte {start} on, found {content_range!r}")
    num_bytes = int(sent[2]) + 1 - start
    if num_bytes != length:
        raise StoreError("truncated", f"{url}: expected a range of {length} bytes, found {num_bytes}")
    if content_length not in (None, length):
        raise StoreError("truncated", f"{url}: expected {length} bytes, found {content_length}", retriable=True)


class _Exchange(ABC, Generic[T]):
    """One request, and its answer."""

    has_answered = False  # whether a byte of the answer has come
    is_kept = False  # whether the connection can carry another request
    is_given_up = False  # set on the event loop; the thread sees it within a slice

    @abstractmethod
    def run(self, connection: _Connection) -> T:
        """Raises OSError, HTTPException and StoreError. Runs on a thread."""


class _Connection(io.RawIOBase):
    """A socket to the server, which is what `http.client` takes for one. One thread uses it at a time."""

    def __init__(self, sock: socket.socket, url: str, tls: ssl.SSLContext | None, connect_timeout_s: float) -> None:
        """``tls``: for https. ``connect_timeout_s``: for its handshake."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(True)
        # Python's own timeout would look at the socket before each call, and take what little is there.
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, _SLICE)
        self._sock = sock
        self._url = url
        self._tls = tls
        self._connect_timeout_s = connect_timeout_s
        self._exchange: _Exchange[Any] | None = None
        self._is_in_head = False
        self.num_allowed = 0  # bytes that `http.client` may still read of the answer
        self.idle_since_s = 0.0  # 0 before the first request

    def run(self, exchange: _Exchange[T]) -> T:
        """Raises as the exchange does. Runs on a thread: to look at a socket gives Python's lock away, and the event
        loop would wait for it."""
        self._exchange = exchange
        if self.idle_since_s and self.is_readable():
            raise ConnectionResetError("the connection has ended, or has bytes that nobody has asked for")
        if not self.idle_since_s and self._tls is not None:
            self._begin_tls(self._tls)
        return exchange.run(self)

    def _begin_tls(self, context: ssl.SSLContext) -> None:
        deadline_s, host = time.monotonic() + self._connect_timeout_s, urlsplit(self._url).hostname
        try:
            sock = context.wrap_socket(self._sock, server_hostname=host, do_handshake_on_connect=False)
            self._sock = sock
            sock.settimeout(_SLICE_S)

            def shake() -> bool:
                sock.do_handshake()
                return True

            while not self._wait(shake):
                if time.monotonic() >= deadline_s:
                    raise _no_connection(self._url, self._connect_timeout_s)
        except OSError as e:
            self._require_wanted()
            raise tls_error(self._url, urlsplit(self._url).netloc, e) from e

    def _wait(self, step: Callable[[], T]) -> T | None:
        """Return what a step returns, all of whose waits end after `_SLICE_S`; None if one did. Raises OSError, also
        if the request was given up."""
        self._require_wanted()
        try:
            return step()
        except (BlockingIOError, TimeoutError):
            return None

    def _require_wanted(self) -> None:
        if self._exchange is None or self._exchange.is_given_up:
            raise ConnectionAbortedError("the request was given up")

    def send(self, view: memoryview) -> int:
        """Return how many bytes the socket took within `_SLICE_S`. Raises OSError."""
        return self._wait(lambda: self._sock.send(view)) or 0

    def receive(self, into: Sequence[memoryview], flags: int = 0) -> int | None:
        """Return how many bytes came within `_SLICE_S`: 0 at the end of what the server sends, None if it is silent.
        Raises OSError."""
        num_bytes = self._wait(lambda: self._received(into, flags))
        if num_bytes and self._exchange is not None:
            self._exchange.has_answered = True
        return num_bytes

    def _received(self, into: Sequence[memoryview], flags: int) -> int:
        if isinstance(self._sock, ssl.SSLSocket):
            return self._sock.recv_into(into[0])
        return self._sock.recvmsg_into(into, 0, flags)[0]

    def is_readable(self) -> bool:
        """Return whether there is something to read, or the end. Under TLS, it may be of TLS itself."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(0))

    def has_answer(self) -> bool:
        """Return whether the server answers; False under TLS, where that is not known."""
        return not isinstance(self._sock, ssl.SSLSocket) and self.is_readable()

    def end(self) -> None:
        self._sock.close()

    def request(self, method: str, path: str, headers: Mapping[str, str]) -> HTTPConnection:
        """Send a request's head. Raises OSError and HTTPException."""
        client = HTTPConnection(headers["Host"])  # which it does not look at, since it is connected
        client.sock = self
        client.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in headers.items():
            client.putheader(name, value)
        client.endheaders()
        return client

    def answer(self, client: HTTPConnection) -> HTTPResponse:
        """Read an answer's head. Raises OSError and HTTPException."""
        self.num_allowed, self._is_in_head = _MOST_ANSWER_BYTES, True
        response = client.getresponse()
        self._is_in_head = False
        return response

    # What `http.client` uses.

    def sendall(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self.send(view) :]

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        into = [memoryview(buffer)[: self.num_allowed]]
        if not self.num_allowed:
            raise HTTPException("the answer is longer than it may be")
        while (num_bytes := self.receive(into)) is None:
            pass
        if self._is_in_head and not num_bytes:  # it would take half a head for a whole one
            raise ConnectionResetError(_CLOSED)
        self.num_allowed -= num_bytes
        return num_bytes

    def close(self) -> None:
        """Do nothing: it is kept, and `end` ends it."""


class _Connections:
    """Connections to one server, which are kept open between requests. Belongs to one event loop."""

    def __init__(
        self,
        url: str,
        tls: ssl.SSLContext | bool,
        connect_timeout_s: float,
        max_connections: int,
        threads: ThreadPoolExecutor,
    ) -> None:
        """``max_connections``: requests under way; further ones wait. ``threads``: as many."""
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._url = url
        self._address = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        context = tls if isinstance(tls, ssl.SSLContext) else ssl.create_default_context()
        self._tls = context if parts.scheme == "https" else None
        self._connect_timeout_s = connect_timeout_s
        self._threads = threads
        self._free = asyncio.Semaphore(max_connections)
        self._idle: list[_Connection] = []  # the last one used comes last
        self._is_closed = False

    async def run(self, exchange: _Exchange[T]) -> T:
        """Return what an exchange returns. When this returns or raises, the thread is done with the caller's memory.

        Raises OSError if the connection breaks, StoreError if there is none to be had or the answer is not HTTP.
        """
        async with self._free:
            while self._idle:  # the server may have closed it at this moment: then a new one is opened
                connection = self._idle.pop()
                if connection.idle_since_s < time.monotonic() - _IDLE_S:
                    connection.end()
                    continue
                try:
                    return await self._run(exchange, connection)
                except OSError:
                    if exchange.has_answered or self._is_closed:
                        raise
            return await self._run(exchange, await self._open())

    async def _run(self, exchange: _Exchange[T], connection: _Connection) -> T:
        is_done = False
        try:
            if self._is_closed:
                raise ConnectionAbortedError("the client is closed")
            answer = await self._on_thread(exchange, connection)
            is_done = True
            return answer
        except HTTPException as e:
            # A traceback would show the server's bytes.
            raise StoreError("protocol", f"{self._url}: {printable(str(e)[:500])}") from None
        finally:
            if is_done and exchange.is_kept and not self._is_closed:
                connection.idle_since_s = time.monotonic()
                self._idle.append(connection)
            else:
                connection.end()

    async def _on_thread(self, exchange: _Exchange[T], connection: _Connection) -> T:
        """If this is cancelled, the thread ends first, which takes it no longer than a slice."""
        running = asyncio.wrap_future(self._threads.submit(connection.run, exchange))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            exchange.is_given_up = True
            while not running.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([running])
            running.exception()  # nobody is to hear of it
            raise

    async def _open(self) -> _Connection:
        """Connect; TLS begins on the thread. Raises StoreError."""
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                addresses = _numeric(*self._address) or await asyncio.get_running_loop().getaddrinfo(
                    *self._address, type=socket.SOCK_STREAM
                )
                sock = await aiohappyeyeballs.start_connection(addresses, happy_eyeballs_delay=_EYEBALLS_S)
        except TimeoutError as e:
            raise _no_connection(self._url, self._connect_timeout_s) from e
        except OSError as e:
            raise StoreError("refused", f"{self._url}: {e}", retriable=True) from e
        return _Connection(sock, self._url, self._tls, self._connect_timeout_s)

    def close(self) -> None:
        """Keep no connection. Whoever has calls under way cancels them first."""
        self._is_closed = True
        for connection in self._idle:
            connection.end()
        self._idle.clear()
        self._threads.shutdown(wait=False)


def _no_connection(url: str, timeout_s: float) -> StoreError:
    return StoreError("timeout", f"{url}: no connection within {timeout_s:g} s", retriable=True)


def _numeric(host: str, port: int) -> list[Any]:
    """Return what `socket.getaddrinfo` says of an address that is a number, without asking anybody; nothing for a
    name."""
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        return []


class Transfers:
    """Reads ranges from one server, and puts objects to it. Belongs to one event loop."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        tls: ssl.SSLContext | bool,
        connect_timeout_s: float,
        max_connections: int,
    ) -> None:
        """``url``: of the server. ``headers``: of each request, now and later. ``tls``: for https, as aiohttp takes it.
        ``max_connections``: reads under way; further ones wait."""
        server = url, tls, connect_timeout_s
        self._reads = _Connections(*server, max_connections, ThreadPoolExecutor(max_connections, "kvfetch-receive"))
        self._sends = _Connections(*server, _SENDERS, ThreadPoolExecutor(_SENDERS, "kvfetch-send"))
        self._host, self._headers = urlsplit(url).netloc, headers

    async def receive(
        self, url: str, start: int, into: Sequence[memoryview], received: Callable[[int], None]
    ) -> Answer:
        """Fill ``into`` with the bytes of ``url`` from byte ``start`` on, if the answer has status 206. ``received``
        gets the sizes of what has come, soon after it came.

        Raises as `_Connections.run` does, and StoreError if a status 206 has another range.
        """
        loop, told = asyncio.get_running_loop(), 0

        def tell() -> None:
            nonlocal told
            told, num_new = reading.num_received, reading.num_received - told
            if num_new:
                received(num_new)

        reading = _Read(url, {"Host": self._host, **self._headers}, start, into, partial(call_soon, loop, tell))
        try:
            return await self._reads.run(reading)
        finally:
            tell()

    async def send(self, url: str, headers: Mapping[str, str], views: Sequence[memoryview]) -> Answer:
        """Put bytes, several objects side by side. The answer may come before all bytes are sent: a server that is full
        says so at once.

        Raises as `_Connections.run` does.
        """
        fields = {"Host": self._host, **self._headers, **headers, "Content-Length": str(sum(map(len, views)))}
        return await self._sends.run(_Put(urlsplit(url).path, fields, views))

    def close(self) -> None:
        self._reads.close()
        self._sends.close()


class _Read(_Exchange[Answer]):
    """A range, which comes into the caller's memory. All else of the answer comes into memory of its own."""

    def __init__(
        self, url: str, headers: Mapping[str, str], start: int, into: Sequence[memoryview], tell: Callable[[], None]
    ) -> None:
        """``tell``: that more has come; called on the thread."""
        self._url, self._start = url, start
        self._left = left_of(into, 0)  # what is still to be filled
        self._length = sum(map(len, self._left))
        self._headers = {**headers, "Range": f"bytes={start}-{start + self._length - 1}"}
        self._tell = tell
        self.num_received = 0

    def run(self, connection: _Connection) -> Answer:
        client = connection.request("GET", urlsplit(self._url).path, self._headers)
        response = connection.answer(client)
        if response.status != 206:
            answer = Answer(response.status, response.read(_MOST_BODY_BYTES))
            self.is_kept = response.isclosed() and not response.will_close
            return answer
        require_range(self._url, response.headers["Content-Range"], response.length, self._start, self._length)
        if response.length is None:
            self._fill_slowly(connection, response)
        else:
            begun = response.fp.peek()  # what has come with the head
            if len(begun) > self._length:
                raise HTTPException("the answer is longer than its range")
            fill_pieces(self._left, begun)
            self._took(len(begun))
            self._fill(connection)
            self.is_kept = not response.will_close
        return Answer(206, b"")

    def _fill(self, connection: _Connection) -> None:
        num_told, told_s = 0, time.monotonic()
        while self._left:
            # In one call, the kernel waits for all of it, and Python's lock is free.
            num_bytes = connection.receive(self._left[:_MOST_PIECES], socket.MSG_WAITALL)
            if num_bytes is None:
                num_bytes = 0
            elif not num_bytes:
                raise ConnectionResetError(_CLOSED)
            self._took(num_bytes)
            if self._left and self.num_received > num_told and (now_s := time.monotonic()) >= told_s + _SLICE_S:
                num_told, told_s = self.num_received, now_s
                self._tell()

    def _fill_slowly(self, connection: _Connection, response: HTTPResponse) -> None:
        """Receive chunks, or all until the server closes the connection."""
        connection.num_allowed += 2 * self._length
        while self._left:
            try:
                num_bytes = response.readinto(self._left[0])
            except IncompleteRead as e:
                raise ConnectionResetError(_CLOSED) from e
            if not num_bytes:
                raise ConnectionResetError(_CLOSED)
            self._took(num_bytes)

    def _took(self, num_bytes: int) -> None:
        self._left = left_of(self._left, num_bytes)
        self.num_received += num_bytes


class _Put(_Exchange[Answer]):
    def __init__(self, path: str, headers: Mapping[str, str], views: Sequence[memoryview]) -> None:
        self._path, self._headers, self._views = path, headers, views

    def run(self, connection: _Connection) -> Answer:
        client = connection.request("PUT", self._path, self._headers)
        is_whole = self._send(connection)
        response = connection.answer(client)
        answer = Answer(response.status, response.read(_MOST_BODY_BYTES))
        self.is_kept = is_whole and response.isclosed() and not response.will_close
        return answer

    def _send(self, connection: _Connection) -> bool:
        """Send the body. Return False if the server answers, or closes the connection, before it has all bytes: then
        what it has said can still be read."""
        try:
            for view in self._views:
                while view:
                    if connection.has_answer():
                        return False
                    view = view[connection.send(view) :]
        except OSError:
            return False
        return True
