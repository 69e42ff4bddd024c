"""Keep what `kvfetch verify` last found, for the page."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import msgspec
from aiohttp import web

from sgl_kvfetch.directory import LocalStore
from sgl_kvfetch.errors import FormatError, StoreError
from sgl_kvfetch.keys import parse_object_name
from sgl_kvfetch.log import LimitedLogger
from sgl_kvfetch.server.bodies import BodyReader
from sgl_kvfetch.stores import MAX_VERIFIED_BYTES, Damaged, Verified, decode_verified

_limited = LimitedLogger(logging.getLogger(__name__))
_TIMES = 4  # memory for a result, in sizes of its body
_PROFILE = "profile "


class LastVerified:
    def __init__(self, store: LocalStore, bodies: BodyReader) -> None:
        self._store = store
        self._bodies = bodies

    async def put(self, request: web.Request) -> web.StreamResponse:
        try:
            found = decode_verified(await self._bodies.read_body(request, MAX_VERIFIED_BYTES, _TIMES))
        except FormatError as e:
            raise web.HTTPBadRequest(text=str(e)) from e
        await self._store.put_verified(found)
        return web.Response(status=201)

    async def get(self, profiles: Iterable[str]) -> Verified | None:
        """Return the last result; None if there is none, or if it cannot be read. ``profiles`` are those in the store.

        Damaged objects are left out if their segment was deleted or written again since.
        """
        try:
            found = await self._store.get_verified()
            if found is None:
                return None
            names = {f"{_PROFILE}{name}" for name in profiles}
            left = [each for each in found.damaged if each.name in names or await self._is_there(each, found.at_s)]
        except (FormatError, StoreError) as e:
            _limited.warning("verified", f"the page does not show what kvfetch verify found: {e}")
            return None
        num_gone = len(found.damaged) - len(left)
        return msgspec.structs.replace(found, num_damaged=max(0, found.num_damaged - num_gone), damaged=tuple(left))

    async def _is_there(self, damaged: Damaged, at_s: float) -> bool:
        try:
            manifest = parse_object_name(damaged.name).segment.manifest_name
        except FormatError:
            return False
        info = await self._store.head(manifest)
        return info is not None and info.modified_s <= at_s
