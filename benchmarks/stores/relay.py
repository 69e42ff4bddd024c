"""A TCP relay in front of a server, in a process of its own: it delays requests, and notes which ones pass, and when.

It knows no protocol: a request begins when the client sends something after an answer, and its answer ends with the
server's last byte before the next request. That holds for HTTP and Redis when a connection has one request at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Self

_PIECE_BYTES = 256 << 10


@dataclass(slots=True)
class Exchange:
    """A request and its answer. Times are of ``time.monotonic()``, the same in all processes."""

    method: str  # the request's first word, such as GET
    is_first: bool  # of its connection
    begin_s: float  # when the request came, before its delay
    end_s: float = 0.0  # when the answer's last byte was passed on
    answer_bytes: int = 0


def round_trips(exchanges: Sequence[Exchange]) -> int:
    """Return the length of the longest chain of exchanges each of which began after the one before had ended."""
    length, end_s = 0, 0.0
    answered = [each for each in exchanges if each.answer_bytes]
    for exchange in sorted(answered, key=lambda each: each.end_s):
        if exchange.begin_s >= end_s:
            length, end_s = length + 1, exchange.end_s
    return length


class Relay:
    """A context manager that relays connections to a free loopback ``port`` to the server."""

    def __init__(self, host: str, port: int, rtt_s: float) -> None:
        """Each request is delayed by ``rtt_s``, the first one of a connection twice, since connecting takes a trip."""
        self._ours, self._theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_run, args=(self._theirs, host, port, rtt_s), daemon=True)
        self.port = 0

    def __enter__(self) -> Self:
        self._process.start()
        self._theirs.close()  # so that its death ends what waits for it
        self.port = self._ours.recv()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.join()
        self._ours.close()

    def take(self) -> list[Exchange]:
        """Return what has passed since the last call."""
        self._ours.send(None)
        taken: list[Exchange] = self._ours.recv()
        return taken


def _run(pipe: Connection, host: str, port: int, rtt_s: float) -> None:
    asyncio.run(_Server(host, port, rtt_s).serve(pipe))


class _Server:
    def __init__(self, host: str, port: int, rtt_s: float) -> None:
        self._to, self._rtt_s = (host, port), rtt_s
        self._exchanges: list[Exchange] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, pipe: Connection) -> None:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname()[1])
        while True:
            await asyncio.to_thread(pipe.recv)
            pipe.send(self._exchanges)
            self._exchanges = []

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._relay(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection(*self._to)
        current: list[Exchange] = []
        with contextlib.suppress(OSError):
            await asyncio.gather(
                self._pass_requests(reader, server_writer, current), self._pass_answers(server_reader, writer, current)
            )
        writer.close()
        server_writer.close()

    async def _pass_requests(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, current: list[Exchange]
    ) -> None:
        waiting: deque[bytes] = deque()

        def release() -> None:
            if piece := waiting.popleft():
                writer.write(piece)
            else:
                writer.write_eof()

        loop = asyncio.get_running_loop()
        due_s = loop.time() + 2 * self._rtt_s
        while True:
            piece = await reader.read(_PIECE_BYTES)
            if piece and (not current or current[0].answer_bytes):
                current[:] = [Exchange(_method(piece), not current, time.monotonic())]
                self._exchanges += current
            waiting.append(piece)
            due_s = max(due_s, loop.time() + self._rtt_s)
            loop.call_at(due_s, release)
            if not piece:
                return

    async def _pass_answers(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, current: list[Exchange]
    ) -> None:
        while piece := await reader.read(_PIECE_BYTES):
            for exchange in current:  # none if the server speaks first
                exchange.answer_bytes += len(piece)
                exchange.end_s = time.monotonic()
            writer.write(piece)
            await writer.drain()
        writer.close()  # which also ends the reading of requests


def _method(request: bytes) -> str:
    """Return GET of ``GET / HTTP/1.1``, and EVAL of Redis's ``*5\\r\\n$4\\r\\nEVAL\\r\\n``."""
    lines = request[:100].split(b"\r\n")
    return (lines[2] if request.startswith(b"*") and len(lines) > 2 else lines[0].split(b" ")[0]).decode("latin-1")
