"""Measures what an entry of the index costs a real Redis: bytes, and its own CPU time for a lookup and an entry."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from harness.redis_server import RedisProcess
from harness.small_segments import FOLDER, make_segment
from sgl_kvfetch.codec.container.manifest import Manifest
from sgl_kvfetch.stores.redis_index import IndexOptions, PageIndex

SEGMENT_PAGES = 64
_CALL_TIMEOUT_S = 60.0
_LOOKUPS = 500


@dataclass(frozen=True)
class IndexCost:
    page_bytes: float
    lookup_us: float  # CPU time of Redis for each page of a lookup
    enter_us: float  # and for each page that is entered


def measure(num_pages: int, *, cluster: bool) -> IndexCost:
    """Fill an index with about ``num_pages`` pages and look them up. ``cluster``: a cluster of one node."""
    with RedisProcess(cluster=cluster) as server:
        return asyncio.run(_measure(server, num_pages))


async def _measure(server: RedisProcess, num_pages: int) -> IndexCost:
    index = PageIndex(IndexOptions(server.url, timeout_s=_CALL_TIMEOUT_S), "s3://bucket/prefix")
    manifest = make_segment(_hashes(0), 0, SEGMENT_PAGES).manifest
    num_segments = max(1, num_pages // SEGMENT_PAGES)
    await index.find(FOLDER, _hashes(0))  # connect

    async def fill() -> None:
        for number in range(num_segments):
            await index.add(_segment(manifest, number))

    async def look_up() -> None:
        for number in range(_LOOKUPS):
            found = await index.find(FOLDER, _hashes(number % num_segments))
            assert None not in found

    before = _used_bytes(server)
    enter_us = await _cpu_us(server, fill) / (num_segments * SEGMENT_PAGES)
    page_bytes = (_used_bytes(server) - before) / (num_segments * SEGMENT_PAGES)
    lookup_us = await _cpu_us(server, look_up) / (_LOOKUPS * SEGMENT_PAGES)
    await index.close()
    return IndexCost(page_bytes, lookup_us, enter_us)


def _hashes(number: int) -> list[bytes]:
    return [hashlib.sha256(b"%d %d" % (number, page)).digest() for page in range(SEGMENT_PAGES)]


def _segment(manifest: Manifest, number: int) -> Manifest:
    return replace(manifest, page_hashes=tuple(_hashes(number)))


def _used_bytes(server: RedisProcess) -> int:
    info: Any = server.client.info("memory")
    return int(info["used_memory"])


async def _cpu_us(server: RedisProcess, work: Callable[[], Awaitable[None]]) -> float:
    def now_us() -> float:
        info: Any = server.client.info("cpu")
        return float(info["used_cpu_user"] + info["used_cpu_sys"]) * 1e6

    begin_us = now_us()
    await work()
    return now_us() - begin_us
