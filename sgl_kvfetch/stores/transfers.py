"""Data over HTTP/1.1 that comes where it will lie, and is sent from where it lies.

aiohttp makes an object of each piece that arrives, and copies each that a socket does not take at once. That takes
three to four times the CPU time of the sockets themselves. Here each request has a thread while it runs, also under
TLS: the kernel moves its bytes from or into the caller's memory without Python's lock, so that several cores work at
once, and beside an event loop that is busy.

A connection carries one request after another. What is rare is left to aiohttp: `http.HttpStore` asks by it whenever
`Transfers.receive` returns False or `Transfers.send` None. So nothing is interpreted twice, and what is rare costs one
more request.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import ssl
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException
from typing import Any, Generic, NamedTuple, TypeVar
from urllib.parse import urlsplit

import aiohappyeyeballs

from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.log import printable
from sgl_kvfetch.stores.base import fill_pieces, left_of

_IDLE_S = 15.0  # as aiohttp: a firewall may have dropped a connection that was idle for longer, and tells nobody
_EYEBALLS_S = 0.25  # as aiohttp: how long one address has before the next one is tried beside it

_MOST_HEAD_BYTES = 16 << 10
_TELL_S = 0.02  # how soon, and how often, the event loop hears what has come
_MOST_PIECES = 512  # in one call of the kernel's, which takes 1,024
_TIMEVAL = struct.Struct("@ll")

LEAST_SENT_BYTES = 256 << 10  # below this, a thread costs more than it saves
_SENDERS = 4
_SENT_PIECE_BYTES = 4 << 20  # after which the sender looks whether there is an answer
_MOST_ANSWER_BYTES = 4096

T = TypeVar("T")


class _Exchange(ABC, Generic[T]):
    """One request, and its answer."""

    has_answered = False  # whether a byte of the answer has come
    is_kept = False  # whether the connection can carry another request

    @abstractmethod
    def run(self, sock: socket.socket) -> T:
        """Raises OSError. Runs on a thread."""


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
        self._tls = None if parts.scheme != "https" else ssl.create_default_context() if tls is True else tls
        self._connect_timeout_s = connect_timeout_s
        self._threads = threads
        self._free = asyncio.Semaphore(max_connections)
        self._idle: list[_Connection] = []  # the last one used comes last
        self._busy: set[_Connection] = set()
        self._is_closed = False

    async def run(self, exchange: _Exchange[T]) -> T | None:
        """Return what an exchange returns; None where only aiohttp can say what is wrong with the server's certificate.
        When this returns or raises, the thread is done with the caller's memory.

        Raises OSError if the connection breaks, StoreError if there is none to be had.
        """
        async with self._free:
            while self._idle:  # the server may have closed it at this moment: then a new one is opened
                connection = self._idle.pop()
                if connection.idle_since_s < time.monotonic() - _IDLE_S:
                    connection.close()
                    continue
                try:
                    return await self._run(exchange, connection)
                except OSError:
                    if exchange.has_answered or self._is_closed:
                        raise
            opened = await self._open()
            if opened is None:
                return None
            return await self._run(exchange, opened)

    async def _run(self, exchange: _Exchange[T], connection: _Connection) -> T:
        self._busy.add(connection)
        is_done = False
        try:
            answer = await _on_thread(self._threads.submit(connection.run, exchange), connection)
            is_done = True
            return answer
        finally:
            self._busy.remove(connection)
            if is_done and exchange.is_kept and not self._is_closed:
                connection.idle_since_s = time.monotonic()
                self._idle.append(connection)
            else:
                connection.close()

    async def _open(self) -> _Connection | None:
        """Connect, with TLS if the store has it. Return None if TLS fails: aiohttp then says why. Raises StoreError."""
        loop, connection = asyncio.get_running_loop(), None
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                addresses = _numeric(*self._address)
                addresses = addresses or await loop.getaddrinfo(*self._address, type=socket.SOCK_STREAM)
                connection = _Connection(
                    await aiohappyeyeballs.start_connection(addresses, happy_eyeballs_delay=_EYEBALLS_S)
                )
                if isinstance(self._tls, ssl.SSLContext):
                    begin_tls = self._threads.submit(connection.begin_tls, self._tls, self._address[0])
                    await _on_thread(begin_tls, connection)
                opened, connection = connection, None
                return opened
        except TimeoutError as e:
            message = f"{self._url}: no connection within {self._connect_timeout_s:g} s"
            raise StoreError("timeout", message, retriable=True) from e
        except ssl.SSLError:
            return None
        except OSError as e:
            raise StoreError("refused", f"{self._url}: {e}", retriable=True) from e
        finally:
            if connection is not None:
                connection.close()

    def close(self) -> None:
        self._is_closed = True
        for connection in self._busy:
            connection.abort()
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        self._threads.shutdown(wait=False)


class _Connection:
    """A socket to the server. One thread uses it at a time."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(True)  # its users have deadlines, and shut it down
        self.sock = sock
        self.idle_since_s = 0.0  # 0 before the first request

    def begin_tls(self, context: ssl.SSLContext, host: str) -> None:
        self.sock = context.wrap_socket(self.sock, server_hostname=host)

    def run(self, exchange: _Exchange[T]) -> T:
        """Raises OSError. Runs on a thread: to look at a socket gives Python's lock away, and the event loop would wait
        for it."""
        if self.idle_since_s and _is_readable(self.sock):
            raise ConnectionResetError("the connection has ended, or has bytes that nobody has asked for")
        return exchange.run(self.sock)

    def abort(self) -> None:
        """End what a thread waits for."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)  # under TLS, without a farewell, which would wait

    def close(self) -> None:
        self.sock.close()


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


def _is_readable(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


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

    async def receive(self, url: str, start: int, into: Sequence[memoryview], received: Callable[[int], None]) -> bool:
        """Fill ``into`` with the bytes of ``url`` from byte ``start`` on. ``received`` gets the sizes of what has come,
        soon after it came.

        One answer is understood: status 206 with just the range that was asked for, and its length. For any other (a
        missing object, a wrong token, a server without ranges, chunks), return False, without a byte received. Raises
        as `_Connections.run` does.
        """
        loop, told = asyncio.get_running_loop(), 0

        def tell() -> None:
            nonlocal told
            told, num_new = reading.num_received, reading.num_received - told
            if num_new:
                received(num_new)

        def tell_soon() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(tell)

        end = start + sum(map(len, into))
        fields = {"Host": self._host, **self._headers, "Range": f"bytes={start}-{end - 1}"}
        lines = (f"{name}: {value}\r\n" for name, value in fields.items())
        head = f"GET {urlsplit(url).path} HTTP/1.1\r\n{''.join(lines)}\r\n".encode()
        reading = _Read(head, start, end, into, tell_soon)
        try:
            is_range = await self._reads.run(reading)
        except OSError:
            tell()
            raise
        tell()
        return bool(is_range)

    async def send(self, url: str, headers: Mapping[str, str], views: Sequence[memoryview]) -> PutAnswer | None:
        """Put bytes, several objects side by side. Return the answer; None if TLS fails. It may come before all bytes
        are sent: a server that is full says so at once.

        Raises as `_Connections.run` does, and StoreError if the answer is not HTTP.
        """
        fields = {"Host": self._host, **self._headers, **headers, "Content-Length": str(sum(map(len, views)))}
        try:
            return await self._sends.run(_Put(urlsplit(url).path, fields, views))
        except HTTPException as e:
            # A traceback would show the server's bytes.
            raise StoreError("protocol", f"{url}: {printable(str(e)[:500])}") from None

    def close(self) -> None:
        self._reads.close()
        self._sends.close()


class _Read(_Exchange[bool]):
    """The answer's head comes into memory of its own, its body into the caller's."""

    def __init__(self, head: bytes, start: int, end: int, into: Sequence[memoryview], tell: Callable[[], None]) -> None:
        """``tell``: that more has come; called on the thread."""
        self._head, self._start, self._end = head, start, end
        self._left = left_of(into, 0)  # what is still to be filled
        self._tell = tell
        self.num_received = 0

    def run(self, sock: socket.socket) -> bool:
        """Return whether the range was received."""
        if isinstance(sock, ssl.SSLSocket):
            sock.settimeout(_TELL_S)
        else:  # Python's own timeout would look at the socket before each call, and take what little is there
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(0, round(_TELL_S * 1e6)))
        sock.sendall(self._head)
        found, size = memoryview(bytearray(_MOST_HEAD_BYTES)), 0
        while (end := bytes(found[:size]).find(b"\r\n\r\n")) < 0:
            if size == len(found):
                return False
            size += self._come(sock, [found[size:]], 0)
        begun = found[end + 4 : size]
        may_keep = self._is_range(bytes(found[:end]).decode("latin-1"))
        if may_keep is None or len(begun) > self._end - self._start:
            return False
        fill_pieces(self._left, begun)
        self._took(len(begun))
        num_told, told_s = 0, time.monotonic()
        while self._left:
            # In one call, the kernel waits for all of it, and Python's lock is free.
            self._took(self._come(sock, self._left[:_MOST_PIECES], socket.MSG_WAITALL))
            if self._left and self.num_received > num_told and (now_s := time.monotonic()) >= told_s + _TELL_S:
                num_told, told_s = self.num_received, now_s
                self._tell()
        self.is_kept = may_keep
        return True

    def _come(self, sock: socket.socket, into: Sequence[memoryview], flags: int) -> int:
        """Return how many bytes have come into these pieces; 0 if none did for `_TELL_S`. Raises OSError."""
        try:
            is_tls = isinstance(sock, ssl.SSLSocket)
            num_bytes = sock.recv_into(into[0]) if is_tls else sock.recvmsg_into(into, 0, flags)[0]
        except (BlockingIOError, TimeoutError):
            return 0
        if not num_bytes:
            raise ConnectionResetError("the server closed the connection")
        self.has_answered = True
        return num_bytes

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


class PutAnswer(NamedTuple):
    """A status, and the first bytes of the body."""

    status: int
    body: bytes


class _Put(_Exchange[PutAnswer]):
    def __init__(self, path: str, headers: Mapping[str, str], views: Sequence[memoryview]) -> None:
        self._path, self._headers, self._views = path, headers, views

    def run(self, sock: socket.socket) -> PutAnswer:
        """Raises HTTPException, too."""
        connection = HTTPConnection(self._headers["Host"])  # which it does not look at, since it is connected
        connection.sock = sock
        is_whole = self._send(connection)
        with connection.getresponse() as response:
            self.has_answered = True
            answer = PutAnswer(response.status, response.read(_MOST_ANSWER_BYTES))
            self.is_kept = is_whole and response.isclosed() and not response.will_close
        return answer

    def _send(self, connection: HTTPConnection) -> bool:
        """Send the request. Return False if the server answers before it has all bytes."""
        sock = connection.sock
        connection.putrequest("PUT", self._path, skip_host=True, skip_accept_encoding=True)
        for name, value in self._headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        try:
            for view in self._views:
                for start in range(0, len(view), _SENT_PIECE_BYTES):
                    if _has_answer(sock):
                        return False
                    connection.send(view[start : start + _SENT_PIECE_BYTES])
        except OSError:
            # A server that refuses the request may close the connection. What it has said can still be read.
            if not _has_answer(sock):
                raise
            return False
        return True


def _has_answer(sock: socket.socket) -> bool:
    """Return whether there is something to read. Under TLS, this is not known: what has come may be of TLS itself."""
    return not isinstance(sock, ssl.SSLSocket) and _is_readable(sock)
