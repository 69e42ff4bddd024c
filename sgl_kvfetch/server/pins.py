"""The HTTP handlers of pins."""

from __future__ import annotations

import asyncio

import msgspec
from aiohttp import web

from sgl_kvfetch.directory import LocalStore
from sgl_kvfetch.errors import FormatError
from sgl_kvfetch.server.access import require_role
from sgl_kvfetch.server.answers import error_answer
from sgl_kvfetch.server.config import ServerConfig
from sgl_kvfetch.server.tokens import Role
from sgl_kvfetch.stores import MSGPACK_TYPE, PinNames, decode_pin


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
