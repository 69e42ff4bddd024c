"""A store's server in this process, and how tests ask it: by a session, or by the bytes of a request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from harness.small_segments import put_segment
from sgl_kvfetch.codec import CodedSegment
from sgl_kvfetch.directory import LocalStore
from sgl_kvfetch.server.config import ServerConfig
from sgl_kvfetch.server.run import RunningServer, running_server
from sgl_kvfetch.stores import wire


@asynccontextmanager
async def serving(
    root: Path, *segments: CodedSegment, **options: Any
) -> AsyncIterator[tuple[RunningServer, aiohttp.ClientSession]]:
    """Serve a directory with some segments. ``options``: those of `ServerConfig`."""
    store = LocalStore(root)
    for segment in segments:
        await put_segment(store, segment)
    await store.close()
    config = ServerConfig(root, port=0, **({"grace_s": 1} | options))
    async with running_server(config) as server, aiohttp.ClientSession(server.url) as session:
        yield server, session


async def get(session: aiohttp.ClientSession, path: str, status: int = 200, **query: str) -> Any:
    """Return the JSON of an answer, which must have this status."""
    async with session.get(path, params=query) as response:
        body = await response.json()
        assert response.status == status, body
        return body


async def error_of(response: aiohttp.ClientResponse) -> str:
    body = await response.json()
    assert set(body) == {"error", "message"}
    assert body["message"]
    return str(body["error"])


async def metric(session: aiohttp.ClientSession, name: str, **labels: str) -> float:
    """Return the sum of a metric's samples that have these labels."""
    async with session.get(wire.Route.METRICS) as response:
        assert response.status == 200
        families = list(text_string_to_metric_families(await response.text()))
    return sum(
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == f"kvfetch_server_{name}" and labels.items() <= sample.labels.items()
    )


async def are_answered(session: aiohttp.ClientSession, num_requests: int) -> bool:
    """Return whether the server is at work on so many requests, beside this one."""
    return await metric(session, "requests_in_flight") == num_requests


def request(line: str, *headers: str, host: str = "localhost") -> bytes:
    """Return the bytes of a request, without its body. ``line``: method and path."""
    lines = f"{line} HTTP/1.1", f"Host: {host}", *headers, "", ""
    return "\r\n".join(lines).encode("utf-8", "surrogateescape")


@asynccontextmanager
async def connected(server: RunningServer, sent: bytes = b"") -> AsyncIterator[asyncio.StreamReader]:
    reader, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(sent)
    try:
        yield reader
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def answer_to(
    server: RunningServer, line: str, *headers: str, body: bytes = b"", host: str = "localhost"
) -> bytes:
    """Send a request on a connection of its own, and return the whole answer."""
    async with connected(server, request(line, "Connection: close", *headers, host=host) + body) as reader:
        return await reader.read()


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])
