"""Uploads over HTTP/1.1 that are sent from where their bytes lie.

aiohttp copies each byte that a socket does not take at once, and sends on the event loop. Here a thread sends: the
kernel takes the bytes from the caller's memory, without Python's lock, and several uploads go side by side. That takes
a third of the CPU time.

A connection carries one request after another. `Sender.send` returns whatever the server answers, also before all
bytes are sent: a server that is full says so at once. It returns None if there is no TLS to be had: then
`http.HttpStore` asks by aiohttp, which knows how to say what is wrong with a certificate.
"""

from __future__ import annotations

import asyncio
import select
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from socket import SHUT_RDWR
from typing import NamedTuple
from urllib.parse import urlsplit

from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.log import printable

LEAST_BYTES = 256 << 10  # below this, a thread costs more than it saves
_THREADS = 4
_PIECE_BYTES = 4 << 20  # after which the sender looks whether there is an answer
_MOST_ANSWER_BYTES = 4096
_IDLE_S = 15.0  # as aiohttp: a firewall may have dropped a connection that was idle for longer, and tells nobody


class PutAnswer(NamedTuple):
    """A status, and the first bytes of the body."""

    status: int
    body: bytes


class Sender:
    """Connections to one server, which are kept open between requests. Belongs to one event loop."""

    def __init__(self, url: str, headers: Mapping[str, str], tls: ssl.SSLContext | bool, connect_timeout_s: float):
        """``url``: of the server. ``headers``: of each request. ``tls``: for https, as aiohttp takes it."""
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._host, self._port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = None
        if parts.scheme == "https":
            self._tls = tls if isinstance(tls, ssl.SSLContext) else ssl.create_default_context()
        self._connect_timeout_s = connect_timeout_s
        self._headers = {"Host": parts.netloc, **headers}
        self._threads = ThreadPoolExecutor(_THREADS, "kvfetch-send")
        self._lock = threading.Lock()  # guards the connections
        self._idle: list[tuple[HTTPConnection, float]] = []  # and since when; the last one used comes last
        self._busy: set[_Put] = set()
        self._is_closed = False

    async def send(self, url: str, headers: Mapping[str, str], views: Sequence[memoryview]) -> PutAnswer | None:
        """Put bytes. Return the answer; None if TLS fails. When it is cancelled, the connection is closed.

        Raises OSError if the connection breaks, StoreError if there is none to be had, or if the answer is not HTTP.
        """
        num_bytes = sum(map(len, views))
        upload = _Put(urlsplit(url).path, {**self._headers, **headers, "Content-Length": str(num_bytes)}, views)
        self._busy.add(upload)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._send, upload)
        except HTTPException as e:
            # A traceback would show the server's bytes.
            raise StoreError("protocol", f"{url}: {printable(str(e)[:500])}") from None
        except BaseException:
            upload.abort()
            raise
        finally:
            self._busy.remove(upload)

    def _send(self, upload: _Put) -> PutAnswer | None:
        """Runs on a thread."""
        while True:
            with self._lock:
                connection, since_s = self._idle.pop() if self._idle else (None, 0.0)
            if connection is None:
                break
            if since_s < time.monotonic() - _IDLE_S:
                connection.close()
                continue
            try:
                return self._sent(upload, connection)
            except OSError:
                if upload.is_aborted or upload.has_answer:
                    raise
                # The server may have closed it at this moment: a new one will tell.
        try:
            connection = self._open()
        except ssl.SSLError:
            return None
        except TimeoutError as e:
            message = f"{self._host}:{self._port}: no connection within {self._connect_timeout_s:g} s"
            raise StoreError("timeout", message, retriable=True) from e
        except OSError as e:
            raise StoreError("refused", f"{self._host}:{self._port}: {e}", retriable=True) from e
        return self._sent(upload, connection)

    def _open(self) -> HTTPConnection:
        where, timeout_s = (self._host, self._port), self._connect_timeout_s
        if self._tls is None:
            connection = HTTPConnection(*where, timeout=timeout_s)
        else:
            connection = HTTPSConnection(*where, timeout=timeout_s, context=self._tls)
        connection.connect()
        connection.sock.settimeout(None)  # from now on, the caller has a deadline
        return connection

    def _sent(self, upload: _Put, connection: HTTPConnection) -> PutAnswer:
        is_kept = False
        try:
            answer, is_kept = upload.run(connection)
        finally:
            with self._lock:
                is_kept = is_kept and not self._is_closed
                if is_kept:
                    self._idle.append((connection, time.monotonic()))
            if not is_kept:
                connection.close()
        return answer

    def close(self) -> None:
        for upload in [*self._busy]:
            upload.abort()
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for connection, _ in idle:
            connection.close()


class _Put:
    """One request, which another thread may abort."""

    def __init__(self, path: str, headers: Mapping[str, str], views: Sequence[memoryview]) -> None:
        self._path, self._headers, self._views = path, headers, views
        self._connection: HTTPConnection | None = None
        self._lock = threading.Lock()  # guards the connection: an abort must not meet the next request on it
        self.is_aborted = False
        self.has_answer = False

    def abort(self) -> None:
        with self._lock:
            self.is_aborted = True
            if self._connection is not None and self._connection.sock is not None:
                with suppress(OSError):  # it is not connected any more
                    self._connection.sock.shutdown(SHUT_RDWR)

    def run(self, connection: HTTPConnection) -> tuple[PutAnswer, bool]:
        """Return the answer, and whether the connection can take another request. Raises OSError, HTTPException."""
        with self._lock:
            if self.is_aborted:
                raise ConnectionAbortedError("the upload was cancelled")
            self._connection = connection
        try:
            is_whole = self._send(connection)
            with connection.getresponse() as response:
                self.has_answer = True
                body = response.read(_MOST_ANSWER_BYTES)
                return PutAnswer(response.status, body), is_whole and response.isclosed() and not response.will_close
        finally:
            with self._lock:
                self._connection = None

    def _send(self, connection: HTTPConnection) -> bool:
        """Send the request. Return False if the server answers before it has all bytes."""
        connection.putrequest("PUT", self._path, skip_host=True, skip_accept_encoding=True)
        for name, value in self._headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        try:
            for view in self._views:
                for start in range(0, len(view), _PIECE_BYTES):
                    if _has_answer(connection):
                        return False
                    connection.send(view[start : start + _PIECE_BYTES])
        except OSError:
            # A server that refuses the request may close the connection. What it has said can still be read.
            if not _has_answer(connection):
                raise
            return False
        return True


def _has_answer(connection: HTTPConnection) -> bool:
    """Return whether there is something to read. Under TLS, this is not known: what has come may be of TLS itself."""
    if isinstance(connection.sock, ssl.SSLSocket):
        return False
    poller = select.poll()
    poller.register(connection.sock, select.POLLIN)
    return bool(poller.poll(0))
