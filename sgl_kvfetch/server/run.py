"""Run the server, until a signal or within a context."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web

from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.server.app import create_app
from sgl_kvfetch.server.config import ServerConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunningServer:
    host: str
    port: int

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


@asynccontextmanager
async def running_server(config: ServerConfig) -> AsyncIterator[RunningServer]:
    """Run a server on the running loop. On exit it accepts no new requests; those in flight get ``grace_s``.

    Raises ConfigError if the address cannot be bound.
    """
    runner = web.AppRunner(
        create_app(config),
        shutdown_timeout=config.grace_s,
        access_log=None,
        handler_cancellation=True,  # nobody can receive the answer once the connection is broken
        read_bufsize=1 << 20,
    )
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, config.host, config.port).start()
        except OSError as e:
            raise ConfigError(f"cannot listen on {config.host} port {config.port}: {e.strerror or e}") from e
        host, port = runner.addresses[0][:2]
        yield RunningServer(host, port)
    finally:
        await runner.cleanup()


async def serve_until_signal(config: ServerConfig) -> None:
    """Serve until SIGINT or SIGTERM. Raises ConfigError."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    try:
        async with running_server(config) as server:
            logger.info("serving %s on %s", config.root, server.url)
            await stop.wait()
            logger.info("stopping; requests in flight get %g s", config.grace_s)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def run_server(config: ServerConfig) -> None:
    """Serve on a new event loop until SIGINT or SIGTERM. Call on the main thread. Raises ConfigError."""
    asyncio.run(serve_until_signal(config))
