"""The HTTP handlers of lookups."""

from __future__ import annotations

import asyncio

import msgspec
from aiohttp import web

from sgl_kvfetch.directory import LocalStore
from sgl_kvfetch.keys import PAGE_HASH_BYTES
from sgl_kvfetch.server.config import ServerConfig
from sgl_kvfetch.server.metrics import ServerMetrics
from sgl_kvfetch.stores import MAX_LOOKUP_ANSWER_BYTES, MSGPACK_TYPE, Folders, HitRow, Lookup, LookupRequest


class LookupHandler:
    def __init__(self, store: LocalStore, metrics: ServerMetrics, config: ServerConfig) -> None:
        self._store = store
        self._metrics = metrics
        self._timeout_s = config.idle_timeout_s

    async def post(self, request: web.Request) -> web.StreamResponse:
        try:
            async with asyncio.timeout(self._timeout_s):
                body = await request.read()  # bounded by the application's client_max_size
        except TimeoutError as e:
            raise web.HTTPRequestTimeout(text="the body stalled", headers={"Connection": "close"}) from e
        self._metrics.received_bytes.inc(len(body))
        try:
            asked = msgspec.msgpack.decode(body, type=LookupRequest)
        except (msgspec.DecodeError, UnicodeDecodeError) as e:
            raise web.HTTPBadRequest(text=f"malformed lookup: {e}") from e
        if len(asked.page_hashes) % PAGE_HASH_BYTES:
            raise web.HTTPBadRequest(text=f"page_hashes has {len(asked.page_hashes)} bytes; expected a multiple of 32")
        page_hashes = [
            asked.page_hashes[i : i + PAGE_HASH_BYTES] for i in range(0, len(asked.page_hashes), PAGE_HASH_BYTES)
        ]
        found = await self._store.lookup(asked.namespace, page_hashes)
        self._metrics.note_lookup(len(page_hashes), found.num_pages)
        answer = msgspec.msgpack.encode(_rows(found))
        self._metrics.sent_bytes.inc(len(answer))
        return web.Response(body=answer, content_type=MSGPACK_TYPE)

    async def folders(self, request: web.Request) -> web.StreamResponse:
        found = await self._store.folders(request.match_info.get("digest", ""))
        body = msgspec.json.encode(Folders(sorted(found)))
        self._metrics.sent_bytes.inc(len(body))
        return web.Response(body=body, content_type="application/json")


def _rows(found: Lookup) -> list[HitRow]:
    """Return the leading hits that fit into one answer."""
    rows = []
    room = MAX_LOOKUP_ANSWER_BYTES
    for hit in found.hits:
        room -= len(hit.manifest) + 64  # upper bound of a row's framing
        if room < 0:
            break
        rows.append(HitRow(hit.manifest, hit.first_page, hit.num_pages))
    return rows
