"""The HTTP handler of ``/healthz``."""

from __future__ import annotations

import asyncio

from aiohttp import web

from sgl_kvfetch.directory import LocalStore, StoreUsage

_AGE_S = 1.0  # an answer may be this old: anybody may ask, as often as they like


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
                self._known_until_s = loop.time() + _AGE_S
        problem = self._usage.write_problem
        body = {"status": "ok" if problem is None else "read_only", "write_problem": problem}
        return web.json_response(body, status=503 if problem is not None and "write" in request.query else 200)
