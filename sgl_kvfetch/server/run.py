"""Run the server, until a signal or within a context."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from sgl_kvfetch.log import LimitedLogger
from sgl_kvfetch.server.app import TOKENS, create_app
from sgl_kvfetch.server.config import ServerConfig
from sgl_kvfetch.server.listener import Listener, fit_connections, listening_sockets
from sgl_kvfetch.server.tokens import TokenFile

logger = logging.getLogger(__name__)
_limited = LimitedLogger(logger)


class _ClientFaults(logging.Filter):
    """Keeps what clients do out of aiohttp's log: that they leave, and, but for a line now and then, that they send
    malformed requests. Their bytes may be secret, or anybody's."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, (HttpProcessingError, web.RequestPayloadError)):
            _limited.warning("malformed", "a client sent a malformed request")
            return False
        return not isinstance(error, ConnectionError)


_aiohttp_logger = logging.getLogger(f"{__name__}.aiohttp")
_aiohttp_logger.addFilter(_ClientFaults())


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
    async with _serving(config, create_app(config)) as server:
        yield server


@asynccontextmanager
async def _serving(config: ServerConfig, app: web.Application) -> AsyncIterator[RunningServer]:
    tls = config.tls_context()
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
        )
        try:
            host, port = sockets[0].getsockname()[:2]
            yield RunningServer(host, port, "http" if tls is None else "https")
        finally:
            await listener.close()
    finally:
        await runner.cleanup()


async def serve_until_signal(config: ServerConfig) -> None:
    """Serve until SIGINT or SIGTERM. SIGHUP reads the token file again. Raises ConfigError."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    app = create_app(config)
    tokens = app[TOKENS]
    handlers = {signal.SIGINT: stop.set, signal.SIGTERM: stop.set}
    if isinstance(tokens, TokenFile):
        handlers[signal.SIGHUP] = tokens.reload
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        async with _serving(config, app) as server:
            logger.info("serving %s on %s", config.root, server.url)
            await stop.wait()
            logger.info("stopping; requests in flight get %g s", config.grace_s)
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)


def run_server(config: ServerConfig) -> None:
    """Serve on a new event loop until SIGINT or SIGTERM. Call on the main thread. Raises ConfigError."""
    asyncio.run(serve_until_signal(config))
