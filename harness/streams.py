"""Servers of plain connections that stand between a client and a server."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from typing import Self


class StreamServer(ABC):
    """A context manager that listens on a free loopback port, and serves each connection. Belongs to one event loop."""

    def __init__(self) -> None:
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self.port = 0
        self.num_connections = 0  # since the start

    @abstractmethod
    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection until it ends."""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._server.wait_closed()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        connection = asyncio.create_task(self._run(reader, writer))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _run(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await self._serve(reader, writer)


async def relay(
    host: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sent_before: bytes = b""
) -> None:
    """Copy a client's connection to a server and back, until both have ended. ``sent_before`` goes first."""
    their_reader, their_writer = await asyncio.open_connection(host, port)
    with contextlib.closing(their_writer):
        their_writer.write(sent_before)
        await asyncio.gather(_copy(reader, their_writer), _copy(their_reader, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until the sender ends. Then close the other connection, too."""
    with contextlib.suppress(OSError):
        while piece := await reader.read(1 << 16):
            writer.write(piece)
            await writer.drain()
    writer.close()
