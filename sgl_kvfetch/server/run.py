"""Run the server, until a signal or within a context.

It limits the number of connections, and closes those that keep their place without using it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import shutil
import signal
import socket
import ssl
import struct
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from sgl_kvfetch import __version__
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.log import LimitedLogger
from sgl_kvfetch.processes import hidden_memory
from sgl_kvfetch.server.app import METRICS, STORE, TOKENS, create_app
from sgl_kvfetch.server.config import ServerConfig
from sgl_kvfetch.server.metrics import ServerMetrics
from sgl_kvfetch.server.tokens import TokenFile
from sgl_kvfetch.tls import FreshContext
from sgl_kvfetch.user_files import format_size

logger = logging.getLogger(__name__)
_limited = LimitedLogger(logger)
_BACKLOG = 1024
_HANDSHAKE_S = 10.0
_ACCEPT_RETRY_S = 0.5
_LEAST_SENT_BYTES = 1 << 20  # by a connection with bytes to send, in each ``idle_timeout_s``
_LOOKS = 4  # in each ``idle_timeout_s``
# Of Linux' struct tcp_info: bytes acknowledged, and bytes not sent yet or not acknowledged (packets) yet.
_TCP_INFO = struct.Struct("=24xI92xQ16xI")
# A connection may need a socket and an open object. The rest is for uploads, the store's own files and the log.
_FILES_PER_CONNECTION = 2
_FILES_PER_UPLOAD = 3
_OTHER_FILES = 128
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Type: application/json\r\nContent-Length: 64\r\n\r\n"
    b'{"error":"service_unavailable","message":"too many connections"}'
)


class _ClientFaults(logging.Filter):
    """Keeps clients' faults out of aiohttp's log: disconnections, and malformed requests, which get only a line now and
    then. What clients send may be secret."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, (HttpProcessingError, web.RequestPayloadError)):
            _limited.warning("malformed", "a client sent a malformed request")
            return False
        return not isinstance(error, ConnectionError)


_aiohttp_logger = logging.getLogger(f"{__name__}.aiohttp")
_aiohttp_logger.addFilter(_ClientFaults())
_SWITCH_S = 0.0005  # until a thread gives up the interpreter lock: a lookup waits for it several times


@dataclass(frozen=True, slots=True)
class RunningServer:
    host: str
    port: int
    scheme: str = "http"

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


@asynccontextmanager
async def running_server(config: ServerConfig) -> AsyncIterator[RunningServer]:
    """Run a server on the running loop. On exit it accepts no new requests; those in flight get ``grace_s``.

    May raise this process's limit of open files. Raises ConfigError if the address cannot be bound.
    """
    app = create_app(config)
    async with _serving(config, app, config.tls_context(app[METRICS].record_certificates)) as server:
        yield server


@asynccontextmanager
async def _serving(
    config: ServerConfig, app: web.Application, tls: FreshContext | None
) -> AsyncIterator[RunningServer]:
    """Serve an app, from listening until its requests have had ``grace_s`` to end."""
    max_connections = fit_connections(config.max_connections, config.max_uploads)
    runner = web.AppRunner(
        app,
        shutdown_timeout=config.grace_s,
        access_log=None,
        logger=_aiohttp_logger,
        handler_cancellation=True,  # nobody can receive the answer once the connection is broken
        keepalive_timeout=config.idle_timeout_s,
        auto_decompress=False,
        read_bufsize=1 << 20,
    )
    await runner.setup()
    assert runner.server is not None
    try:
        sockets = listening_sockets(config.host, config.port)
        listener = Listener(
            runner.server,
            sockets,
            max_connections=max_connections,
            idle_timeout_s=config.idle_timeout_s,
            tls=tls,
            metrics=app[METRICS],
        )
        try:
            host, port = sockets[0].getsockname()[:2]
            server = RunningServer(host, port, "http" if tls is None else "https")
            app[STORE].owner.say_url(server.url)
            yield server
        finally:
            await listener.close()
    finally:
        await runner.cleanup()


async def serve_until_signal(config: ServerConfig) -> None:
    """Serve until SIGINT or SIGTERM. SIGHUP reads tokens and certificates again. Raises ConfigError."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    app = create_app(config)
    tokens, tls = app[TOKENS], config.tls_context(app[METRICS].record_certificates)

    read_again = [each.files.reload for each in (tokens, tls) if isinstance(each, TokenFile | FreshContext)]
    handlers: dict[signal.Signals, Callable[[], object]] = {signal.SIGINT: stop.set, signal.SIGTERM: stop.set}
    if read_again:
        handlers[signal.SIGHUP] = lambda: [reload() for reload in read_again]
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        async with _serving(config, app, tls) as server:
            logger.info("serving %s, and its web UI, on %s", config.root.absolute(), server.url)
            _say_how(config)
            await stop.wait()
            logger.info("stopping; requests in flight get %g s", config.grace_s)
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)


def _say_how(config: ServerConfig) -> None:
    """Log version, capacity and access, and warn of a capacity that the disk does not have."""
    root = config.root.absolute()  # the first write makes it
    disk_bytes, _, free_bytes = shutil.disk_usage(next(path for path in (root, *root.parents) if path.exists()))
    capacity = "no limit" if config.capacity_bytes is None else format_size(config.capacity_bytes)
    logger.info(
        "version %s; capacity: %s, on a disk of %s with %s free; access: %s",
        __version__,
        capacity,
        format_size(disk_bytes),
        format_size(free_bytes),
        config.access,
    )
    if config.capacity_bytes is not None and config.capacity_bytes > disk_bytes:
        logger.warning(
            "the capacity of %s is more than the disk's %s: segments are evicted before it is reached",
            capacity,
            format_size(disk_bytes),
        )


def run_server(config: ServerConfig) -> None:
    """Serve on a new event loop until SIGINT or SIGTERM. Call on the main thread. Raises ConfigError.

    Meanwhile the process's memory, which holds tokens, is hidden from other processes, and is not dumped.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        with hidden_memory():
            asyncio.run(serve_until_signal(config))
    finally:
        sys.setswitchinterval(before)


def fit_connections(most: int, max_uploads: int) -> int:
    """Raise the soft limit of open files as far as needed. Return how many connections it allows, at most ``most``.

    Raises ConfigError if it allows fewer than 16.
    """
    others = _OTHER_FILES + _FILES_PER_UPLOAD * max_uploads
    wanted = most * _FILES_PER_CONNECTION + others
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    allowed = most if soft == resource.RLIM_INFINITY else min(most, (soft - others) // _FILES_PER_CONNECTION)
    if allowed < min(most, 16):
        raise ConfigError(
            f"the limit of {soft} open files is too low for {max_uploads} uploads and 16 connections; "
            "raise it (ulimit -n)"
        )
    if allowed < most:
        logger.warning("the limit of %d open files allows %d connections, not %d", soft, allowed, most)
    return allowed


_OF_LISTENING = {  # what to do about an error
    errno.EADDRINUSE: ": another program listens there, perhaps a store; --port takes another port",
    errno.EACCES: ": only root may listen below 1024; --port takes another port",
    errno.EADDRNOTAVAIL: ": this machine has no such address; --host takes one that it has, or 0.0.0.0 for all",
    **dict.fromkeys(
        (socket.EAI_NONAME, socket.EAI_AGAIN), ": --host takes an address of this machine, or 0.0.0.0 for all"
    ),
}


def listening_sockets(host: str, port: int) -> list[socket.socket]:
    """Listen on every address of ``host``. Raises ConfigError."""
    sockets: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in dict.fromkeys(found):
            sock = socket.socket(family, socket.SOCK_STREAM)
            sockets.append(sock)
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind(address)
            sock.listen(_BACKLOG)
    except OSError as e:
        for sock in sockets:
            sock.close()
        what_to_do = _OF_LISTENING.get(e.errno or 0, "")
        raise ConfigError(f"cannot listen on {host} port {port}: {e.strerror or e}{what_to_do}") from e
    return sockets


class Listener:
    """Accepts connections for ``server`` until it is closed.

    Beyond ``max_connections``, clients get 503 at once. A connection is aborted if its client takes less than a MiB of
    an answer in ``idle_timeout_s``. (aiohttp closes connections that send no request in its ``keepalive_timeout``.)
    """

    def __init__(
        self,
        server: web.Server,
        sockets: Sequence[socket.socket],
        *,
        max_connections: int,
        idle_timeout_s: float,
        tls: FreshContext | None,
        metrics: ServerMetrics,
    ) -> None:
        """Accept connections at once. ``sockets`` are closed with the listener."""
        self._server = server
        self._sockets = sockets
        self._max_connections = max_connections
        self._idle_timeout_s = idle_timeout_s
        self._tls = tls
        self._metrics = metrics
        self._opening: set[asyncio.Task[None]] = set()
        self._sending: dict[web.RequestHandler, tuple[int, float]] = {}  # bytes acknowledged, and when that was
        self._tasks = [asyncio.create_task(self._accept(sock)) for sock in sockets]
        self._tasks.append(asyncio.create_task(self._watch()))
        if tls is not None:
            self._tasks.append(asyncio.create_task(tls.files.watch()))

    async def close(self) -> None:
        """Stop accepting. Open connections stay open."""
        tasks = [*self._tasks, *self._opening]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for sock in self._sockets:
            sock.close()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listening)
            except OSError as e:  # no files, or the client has left already
                _limited.warning("accept", f"cannot accept a connection: {e.strerror or e}")
                await asyncio.sleep(_ACCEPT_RETRY_S)
                continue
            if len(self._server.connections) + len(self._opening) >= self._max_connections:
                self._refuse(sock)
                continue
            task = loop.create_task(self._open(sock))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    def _refuse(self, sock: socket.socket) -> None:
        self._metrics.record_failure("a connection", "connections", f"{self._max_connections} are open")
        with sock, contextlib.suppress(OSError):
            if self._tls is None:
                sock.send(_REFUSAL)

    async def _open(self, sock: socket.socket) -> None:
        handshake_s = None if self._tls is None else _HANDSHAKE_S
        tls: Any = None if self._tls is None else _Handshake(self._tls, sock)
        address = "a client that has left"
        try:
            address = sock.getpeername()[0]
            await asyncio.get_running_loop().connect_accepted_socket(
                self._server, sock, ssl=tls, ssl_handshake_timeout=handshake_s
            )
        except OSError as e:
            sock.close()
            why = getattr(e, "verify_message", "") or getattr(e, "reason", "") or type(e).__name__
            _limited.warning(f"handshake {why}", f"a TLS handshake with {address} failed: {why}")
        except BaseException:
            sock.close()
            raise

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._idle_timeout_s / _LOOKS)
            now_s = asyncio.get_running_loop().time()
            sending = {}
            for connection in self._server.connections:
                transport = connection.transport
                if transport is None:
                    continue
                acknowledged, has_more = _progress(transport)
                if has_more:
                    before, since_s = self._sending.get(connection, (-_LEAST_SENT_BYTES, now_s))
                    if acknowledged - before >= _LEAST_SENT_BYTES:
                        before, since_s = acknowledged, now_s
                    if now_s - since_s > self._idle_timeout_s:
                        transport.abort()
                    else:
                        sending[connection] = before, since_s
            self._sending = sending


@dataclass(frozen=True, slots=True)
class _Handshake:
    """Begins TLS on a connection, for asyncio, and tells a client that is refused why: asyncio closes the connection
    without the alert that says so."""

    context: ssl.SSLContext
    sock: socket.socket

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, **options: Any) -> ssl.SSLObject:
        begun = self.context.wrap_bio(incoming, outgoing, **options)
        handshake = begun.do_handshake

        def do_handshake() -> None:
            try:
                handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise
            except ssl.SSLError:
                with contextlib.suppress(OSError):
                    self.sock.send(outgoing.read())
                raise

        begun.do_handshake = do_handshake  # type: ignore[method-assign]
        return begun


def _progress(transport: asyncio.Transport) -> tuple[int, bool]:
    """Return how many bytes the client has acknowledged, and whether there are more for it."""
    try:
        info = transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except OSError:
        return 0, False  # closed
    unacknowledged, acknowledged, unsent = _TCP_INFO.unpack(info)
    return acknowledged, bool(unacknowledged or unsent or transport.get_write_buffer_size())
