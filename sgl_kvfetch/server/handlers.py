"""The HTTP handlers of lookups, of pins, and of ``/healthz``."""

from __future__ import annotations

import asyncio

import msgspec
from aiohttp import web

from sgl_kvfetch.directory import LocalStore, StoreUsage
from sgl_kvfetch.errors import FormatError
from sgl_kvfetch.keys import PAGE_HASH_BYTES, split_hashes
from sgl_kvfetch.server.access import require_role
from sgl_kvfetch.server.answers import error_answer
from sgl_kvfetch.server.config import ServerConfig
from sgl_kvfetch.server.metrics import ServerMetrics
from sgl_kvfetch.server.tokens import Role
from sgl_kvfetch.stores import (
    MAX_LOOKUP_ANSWER_BYTES,
    MSGPACK_TYPE,
    Folders,
    Lookup,
    LookupRequest,
    PinNames,
    SegmentHit,
    decode_pin,
)

_HEALTH_AGE_S = 1.0  # an answer may be this old: anybody may ask, as often as they like


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
        page_hashes = split_hashes(asked.page_hashes)
        found = await self._store.lookup(asked.namespace, page_hashes)
        self._metrics.note_lookup(len(page_hashes), found.num_pages)
        answer = msgspec.msgpack.encode(_fitting(found))
        self._metrics.sent_bytes.inc(len(answer))
        return web.Response(body=answer, content_type=MSGPACK_TYPE)

    async def folders(self, request: web.Request) -> web.StreamResponse:
        found = await self._store.folders(request.match_info.get("digest", ""))
        body = msgspec.json.encode(Folders(sorted(found)))
        self._metrics.sent_bytes.inc(len(body))
        return web.Response(body=body, content_type="application/json")


def _fitting(found: Lookup) -> list[SegmentHit]:
    """Return the leading hits that fit into one answer."""
    hits = []
    room = MAX_LOOKUP_ANSWER_BYTES
    for hit in found.hits:
        room -= len(hit.manifest) + 64  # upper bound of a row's framing
        if room < 0:
            break
        hits.append(hit)
    return hits


class PinHandlers:
    """Everybody may read pins. Only admins change them: a pin keeps others' segments out."""

    def __init__(self, store: LocalStore, config: ServerConfig) -> None:
        self._store = store
        self._timeout_s = config.idle_timeout_s

    async def list(self, request: web.Request) -> web.StreamResponse:
        body = msgspec.json.encode(PinNames(tuple(await self._store.pins())))
        return web.Response(body=body, content_type="application/json")

    async def get(self, request: web.Request) -> web.StreamResponse:
        pin = await self._store.get_pin(request.match_info["name"])
        if pin is None:
            return error_answer(404, "not_found", f"no pin {request.match_info['name']}")
        return web.Response(body=pin.encode(), content_type=MSGPACK_TYPE)

    async def put(self, request: web.Request) -> web.StreamResponse:
        require_role(request, Role.ADMIN)
        try:
            async with asyncio.timeout(self._timeout_s):
                pin = decode_pin(await request.read())  # bounded by the application's client_max_size
        except TimeoutError as e:
            raise web.HTTPRequestTimeout(text="the body stalled", headers={"Connection": "close"}) from e
        except FormatError as e:
            raise web.HTTPBadRequest(text=str(e)) from e
        if pin.name != request.match_info["name"]:
            raise web.HTTPBadRequest(text=f"the pin belongs under the name {pin.name}")
        await self._store.put_pin(pin)
        return web.Response(status=201)

    async def delete(self, request: web.Request) -> web.StreamResponse:
        require_role(request, Role.ADMIN)
        if await self._store.delete_pin(request.match_info["name"]):
            return web.Response(status=204)
        return error_answer(404, "not_found", f"no pin {request.match_info['name']}")


class Health:
    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self._usage: StoreUsage | None = None
        self._known_until_s = 0.0
        self._asking = asyncio.Lock()

    async def get(self, request: web.Request) -> web.StreamResponse:
        """Answer 200 while the store can be read; ``write_problem`` says why nothing can be written, or is null.

        With the query ``?write``, answer 503 if nothing can be written.
        """
        loop = asyncio.get_running_loop()
        async with self._asking:
            if self._usage is None or loop.time() > self._known_until_s:
                self._usage = await self._store.usage()
                self._known_until_s = loop.time() + _HEALTH_AGE_S
        problem = self._usage.write_problem
        body = {"status": "ok" if problem is None else "read_only", "write_problem": problem}
        return web.json_response(body, status=503 if problem is not None and "write" in request.query else 200)
