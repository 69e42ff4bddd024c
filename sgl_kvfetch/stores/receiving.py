"""Ranged reads over HTTP/1.1 that are received where their bytes will lie.

aiohttp makes an object of each piece that arrives, and the pieces are joined afterwards. That takes four times the CPU
time of the sockets themselves. Here each request has a thread while it runs, which receives into the caller's memory,
also under TLS: without Python's lock, so that several cores receive at once, and beside an event loop that is busy.

A connection carries one request after another. It understands one answer: status 206 with just the range that was asked
for, and its length. Any other answer (a missing object, a wrong token, a server without ranges, chunks) closes the
connection, and `RangeReceiver.receive` returns False. Then `http.HttpStore` asks again by aiohttp, which knows what
each of them means. So nothing is interpreted twice, and what is rare costs one more request.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohappyeyeballs

from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.stores.base import fill_pieces, left_of

_MOST_HEAD_BYTES = 16 << 10
_IDLE_S = 15.0  # as aiohttp: a firewall may have dropped a connection that was idle for longer, and tells nobody
_TELL_S = 0.02  # how soon, and how often, the event loop hears what has come
_MOST_PIECES = 512  # in one call of the kernel's, which takes 1,024
_EYEBALLS_S = 0.25  # as aiohttp: how long one address has before the next one is tried beside it

_TIMEVAL = struct.Struct("@ll")

T = TypeVar("T")


class RangeReceiver:
    """Connections to one server, which are kept open between requests. Belongs to one event loop."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        tls: ssl.SSLContext | bool,
        connect_timeout_s: float,
        max_connections: int,
    ) -> None:
        """``url``: of the server. ``headers``: of each request. ``tls``: for https, as aiohttp takes it.
        ``max_connections``: requests under way; further ones wait."""
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._host, self._port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = None if parts.scheme != "https" else ssl.create_default_context() if tls is True else tls
        self._connect_timeout_s = connect_timeout_s
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in {"Host": parts.netloc, **headers}.items())
        self._threads = ThreadPoolExecutor(max_connections, "kvfetch-receive")
        self._idle: list[_Connection] = []  # the last one used comes last
        self._busy: set[_Connection] = set()

    async def receive(self, url: str, start: int, into: Sequence[memoryview], received: Callable[[int], None]) -> bool:
        """Fill ``into`` with the bytes of ``url`` from byte ``start`` on. ``received`` gets the sizes of what has come,
        soon after it came. Return False, without a byte received, if the answer is not the range that was asked for.

        Raises OSError if the connection breaks, StoreError if there is none to be had.
        """
        end = start + sum(map(len, into))
        head = f"GET {urlsplit(url).path} HTTP/1.1\r\n{self._headers}Range: bytes={start}-{end - 1}\r\n\r\n".encode()
        while self._idle:  # the server may have closed it at this moment: then a new one is opened
            connection = self._idle.pop()
            if connection.idle_since_s < time.monotonic() - _IDLE_S or connection.is_readable:
                connection.close()
                continue
            exchange = _Exchange(connection, head, start, end, into)
            try:
                return await self._run(exchange, received)
            except OSError:
                if exchange.has_answered:
                    raise
        opened = await self._open(url)
        return opened is not None and await self._run(_Exchange(opened, head, start, end, into), received)

    async def _run(self, exchange: _Exchange, received: Callable[[int], None]) -> bool:
        """Run an exchange on a thread. When this returns or raises, the thread is done with the caller's memory."""
        loop, connection = asyncio.get_running_loop(), exchange.connection
        told = 0

        def tell() -> None:
            nonlocal told
            told, num_new = exchange.num_received, exchange.num_received - told
            if num_new:
                received(num_new)

        def tell_soon() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(tell)

        self._busy.add(connection)
        try:
            is_range = await _on_thread(self._threads.submit(exchange.run, tell_soon), connection)
            tell()
            return is_range
        except OSError:
            tell()
            raise
        except asyncio.CancelledError:
            exchange.is_kept = False
            raise
        finally:
            self._busy.remove(connection)
            if exchange.is_kept:
                connection.idle_since_s = time.monotonic()
                self._idle.append(connection)
            else:
                connection.close()

    async def _open(self, url: str) -> _Connection | None:
        """Return None where only aiohttp can say what is wrong with the server's certificate."""
        loop, sock = asyncio.get_running_loop(), None
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                addresses = _numeric(self._host, self._port)
                addresses = addresses or await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
                sock = await aiohappyeyeballs.start_connection(addresses, happy_eyeballs_delay=_EYEBALLS_S)
                connection = _Connection(sock)
                if isinstance(self._tls, ssl.SSLContext):
                    await _on_thread(self._threads.submit(connection.begin_tls, self._tls, self._host), connection)
                sock = None
                return connection
        except TimeoutError as e:
            message = f"{url}: no connection within {self._connect_timeout_s:g} s"
            raise StoreError("timeout", message, retriable=True) from e
        except ssl.SSLError:
            return None
        except OSError as e:
            raise StoreError("refused", f"{url}: {e}", retriable=True) from e
        finally:
            if sock is not None:
                sock.close()

    def close(self) -> None:
        for connection in self._busy:
            connection.abort()
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        self._threads.shutdown(wait=False)


async def _on_thread(running: Future[T], connection: _Connection) -> T:
    """Return what a thread's work with a connection returns. If this is cancelled, the work is ended first."""
    waiting = asyncio.wrap_future(running)
    try:
        return await asyncio.shield(waiting)
    except asyncio.CancelledError:
        connection.abort()
        while not waiting.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([waiting])
        waiting.exception()  # nobody is to hear of it
        raise


def _numeric(host: str, port: int) -> list[Any]:
    """Return what `socket.getaddrinfo` says of an address that is a number, without asking anybody; nothing for a
    name."""
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        return []


class _Connection:
    """A socket to the server. One thread uses it at a time."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(0, round(_TELL_S * 1e6)))
        sock.setblocking(True)
        self._sock = sock
        self.idle_since_s = 0.0

    def begin_tls(self, context: ssl.SSLContext, host: str) -> None:
        self._sock = context.wrap_socket(self._sock, server_hostname=host)
        self._sock.settimeout(_TELL_S)

    def send(self, data: bytes) -> None:
        self._sock.sendall(data)

    def receive_some(self, into: memoryview) -> int:
        """Return how many bytes have come, at least one. Raises OSError."""
        while True:
            with contextlib.suppress(BlockingIOError, TimeoutError):
                return self._checked(self._sock.recv_into(into))

    def receive_most(self, into: Sequence[memoryview]) -> int:
        """Fill these pieces, as far as bytes come for `_TELL_S`. Return how many have come. Raises OSError."""
        with contextlib.suppress(BlockingIOError, TimeoutError):
            if isinstance(self._sock, ssl.SSLSocket):
                return self._checked(self._sock.recv_into(into[0]))
            # One call, in which the kernel waits for all of it, and Python's lock is free.
            return self._checked(self._sock.recvmsg_into(into[:_MOST_PIECES], 0, socket.MSG_WAITALL)[0])
        return 0

    def _checked(self, num_bytes: int) -> int:
        if not num_bytes:
            raise ConnectionResetError("the server closed the connection")
        return num_bytes

    @property
    def is_readable(self) -> bool:
        """Return whether bytes are there that nobody has asked for, or the end of the connection."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(0))

    def abort(self) -> None:
        """End what a thread waits for."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)  # under TLS, without a farewell, which would wait

    def close(self) -> None:
        self._sock.close()


class _Exchange:
    """One request, and its answer: the answer's head comes into memory of its own, its body into the caller's."""

    def __init__(self, connection: _Connection, head: bytes, start: int, end: int, into: Sequence[memoryview]) -> None:
        self.connection = connection
        self._head, self._start, self._end = head, start, end
        self._left = left_of(into, 0)  # what is still to be filled
        self.num_received = 0
        self.has_answered = False  # whether a byte of the answer has come
        self.is_kept = False  # whether the connection can carry another request

    def run(self, tell: Callable[[], None]) -> bool:
        """Return whether the range was received. ``tell``: that more has come. Raises OSError. Runs on a thread."""
        self.connection.send(self._head)
        found, size = memoryview(bytearray(_MOST_HEAD_BYTES)), 0
        while (end := bytes(found[:size]).find(b"\r\n\r\n")) < 0:
            if size == len(found):
                return False
            size += self.connection.receive_some(found[size:])
            self.has_answered = True
        begun = found[end + 4 : size]
        may_keep = self._is_range(bytes(found[:end]).decode("latin-1"))
        if may_keep is None or len(begun) > self._end - self._start:
            return False
        fill_pieces(self._left, begun)
        self._took(len(begun))
        num_told, told_s = 0, time.monotonic()
        while self._left:
            self._took(self.connection.receive_most(self._left))
            if self._left and self.num_received > num_told and (now_s := time.monotonic()) >= told_s + _TELL_S:
                num_told, told_s = self.num_received, now_s
                tell()
        self.is_kept = may_keep
        return True

    def _took(self, num_bytes: int) -> None:
        self._left = left_of(self._left, num_bytes)
        self.num_received += num_bytes

    def _is_range(self, head: str) -> bool | None:
        """Return None unless an answer is the range that was asked for, with a length; else whether the server keeps
        the connection open."""
        status, *lines = head.split("\r\n")
        headers: dict[str, str] = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        version, _, status = status.partition(" ")
        is_range = (
            status[:3] == "206"
            and headers.get("content-range", "").startswith(f"bytes {self._start}-{self._end - 1}/")
            and headers.get("content-length") == str(self._end - self._start)
            and not headers.keys() & {"transfer-encoding", "content-encoding"}
        )
        return version == "HTTP/1.1" and headers.get("connection", "").lower() != "close" if is_range else None
