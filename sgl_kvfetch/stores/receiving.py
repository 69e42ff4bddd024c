"""Ranged reads over HTTP/1.1 that are received where their bytes will lie.

aiohttp makes an object of each piece that arrives, and the pieces are joined afterwards. That takes four times the CPU
time of the sockets themselves. Here the socket writes into the caller's buffer (`asyncio.BufferedProtocol`), also under
TLS.

A connection carries one request after another. It understands one answer: status 206 with just the range that was asked
for, and its length. Any other answer (a missing object, a wrong token, a server without ranges, chunks) closes the
connection, and `RangeReceiver.receive` returns False. Then `http.HttpStore` asks again by aiohttp, which knows what
each of them means. So nothing is interpreted twice, and what is rare costs one more request.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from sgl_kvfetch.errors import StoreError

_MOST_HEAD_BYTES = 16 << 10
_IDLE_S = 15.0  # as aiohttp: a firewall may have dropped a connection that was idle for longer, and tells nobody


class RangeReceiver:
    """Connections to one server, which are kept open between requests. Belongs to one event loop."""

    def __init__(self, url: str, headers: Mapping[str, str], tls: ssl.SSLContext | bool, connect_timeout_s: float):
        """``url``: of the server. ``headers``: of each request. ``tls``: for https, as aiohttp takes it."""
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._host, self._port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = tls if parts.scheme == "https" else None
        self._connect_timeout_s = connect_timeout_s
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in {"Host": parts.netloc, **headers}.items())
        self._idle: list[_Connection] = []  # the last one used comes last
        self._busy: set[_Connection] = set()

    async def receive(self, url: str, start: int, into: memoryview, received: Callable[[int], None]) -> bool:
        """Fill ``into`` with the bytes of ``url`` from byte ``start`` on. ``received`` gets the size of each piece when
        it is there. Return False, without a byte received, if the answer is not the range that was asked for.

        Raises OSError if the connection breaks, StoreError if there is none to be had.
        """
        path = urlsplit(url).path
        head = f"GET {path} HTTP/1.1\r\n{self._headers}Range: bytes={start}-{start + len(into) - 1}\r\n\r\n".encode()
        while self._idle:  # the server may have closed it at this moment: then a new one is opened
            connection = self._idle.pop()
            if connection.idle_since_s < asyncio.get_running_loop().time() - _IDLE_S:
                connection.abort()
                continue
            try:
                return await self._ask(connection, head, start, into, received)
            except OSError:
                if connection.has_answered:
                    raise
        opened = await self._open(url)
        return opened is not None and await self._ask(opened, head, start, into, received)

    async def _ask(
        self, connection: _Connection, head: bytes, start: int, into: memoryview, received: Callable[[int], None]
    ) -> bool:
        self._busy.add(connection)
        try:
            is_range = await connection.ask(head, start, into, received)
        finally:
            self._busy.remove(connection)
            if connection.is_open:
                connection.idle_since_s = asyncio.get_running_loop().time()
                self._idle.append(connection)
        return is_range

    async def _open(self, url: str) -> _Connection | None:
        """Return None where only aiohttp can say what is wrong with the server's certificate."""
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: _Connection(self._closed), self._host, self._port, ssl=self._tls, happy_eyeballs_delay=0.25
                )
                return connection
        except TimeoutError as e:
            message = f"{url}: no connection within {self._connect_timeout_s:g} s"
            raise StoreError("timeout", message, retriable=True) from e
        except ssl.SSLError:
            return None
        except OSError as e:
            raise StoreError("refused", f"{url}: {e}", retriable=True) from e

    def _closed(self, connection: _Connection) -> None:
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        for connection in (*self._idle, *self._busy):
            connection.abort()
        self._idle.clear()


class _Connection(asyncio.BufferedProtocol):
    """One request at a time: its head is sent, the answer's head comes into ``_head``, and its body into the caller's
    buffer."""

    def __init__(self, closed: Callable[[_Connection], None]) -> None:
        self._closed = closed
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[bool] | None = None  # of the request under way
        self._head = memoryview(bytearray(_MOST_HEAD_BYTES))
        self._head_bytes = 0
        self._start = 0
        self._body: memoryview | None = None  # what is still to be filled, once the head has come
        self._into = memoryview(b"")
        self._received: Callable[[int], None] = lambda num_bytes: None
        self._is_kept = True
        self.idle_since_s = 0.0
        self.has_answered = False  # whether a byte of the last answer has come

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def ask(self, head: bytes, start: int, into: memoryview, received: Callable[[int], None]) -> bool:
        assert self._answer is None
        if not self.is_open:
            raise ConnectionResetError("the server closed the connection")
        assert self._transport is not None
        self._head_bytes, self._start, self._into, self._received = 0, start, into, received
        self._body, self.has_answered = None, False
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(head)
        try:
            return await self._answer
        except BaseException:
            self.abort()  # nothing may be written into the caller's buffer any more
            raise
        finally:
            self._answer, self._body, self._into = None, None, memoryview(b"")
            if not self._is_kept:
                self.abort()

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed(self)
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(exc or ConnectionResetError("the server closed the connection"))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._head[self._head_bytes :] if self._body is None else self._body

    def buffer_updated(self, nbytes: int) -> None:
        if self._answer is None or self._answer.done():  # bytes that nobody has asked for
            self.abort()
            return
        self.has_answered = True
        if self._body is not None:
            self._filled(nbytes)
            return
        self._head_bytes += nbytes
        found = bytes(self._head[: self._head_bytes])
        end = found.find(b"\r\n\r\n")
        if end < 0 and self._head_bytes < _MOST_HEAD_BYTES:
            return
        begun = found[end + 4 :]
        if end < 0 or not self._is_range(found[:end].decode("latin-1")) or len(begun) > len(self._into):
            self.abort()
            self._answer.set_result(False)
            return
        self._body = self._into
        self._body[: len(begun)] = begun
        if begun:
            self._filled(len(begun))

    def _is_range(self, head: str) -> bool:
        """Return whether an answer is the range that was asked for, with a length."""
        status, *lines = head.split("\r\n")
        headers: dict[str, str] = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        version, _, status = status.partition(" ")
        self._is_kept = version == "HTTP/1.1" and headers.get("connection", "").lower() != "close"
        end = self._start + len(self._into)
        return (
            status[:3] == "206"
            and headers.get("content-range", "").startswith(f"bytes {self._start}-{end - 1}/")
            and headers.get("content-length") == str(len(self._into))
            and not headers.keys() & {"transfer-encoding", "content-encoding"}
        )

    def _filled(self, num_bytes: int) -> None:
        assert self._body is not None
        assert self._answer is not None
        self._body = self._body[num_bytes:]
        self._received(num_bytes)
        if not self._body:
            # Of what follows, nothing belongs to this request.
            self._body, self._head_bytes = None, 0
            self._answer.set_result(True)
