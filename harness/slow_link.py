"""Puts a store behind a simulated link: what it sends for reads and lookups leaves at a limited rate.

In this process, `slow_link` slows every server. To run ``kvfetch serve`` behind a link, from the root of a checkout:

    python -m harness.slow_link GBPS serve DIRECTORY ...
"""

from __future__ import annotations

import asyncio
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from unittest.mock import patch

from aiohttp import web

from sgl_kvfetch.server import objects
from sgl_kvfetch.server.app import LookupHandler
from sgl_kvfetch.server.objects import send_file
from sgl_kvfetch.tools import main

# Do not sleep for less than this: the next wait includes the time that was skipped.
_SHORTEST_WAIT_S = 0.001
_CATCH_UP_S = 0.05


@contextmanager
def slow_link(gbps: float) -> Iterator[None]:
    """Limit what the servers of this process send, each by a `SlowLink` of its own for all of its clients together."""
    links: dict[web.Application, SlowLink] = defaultdict(lambda: SlowLink(gbps))
    look_up = LookupHandler.post

    async def send_slowly(
        request: web.Request, response: web.StreamResponse, file: FileIO, start: int, end: int
    ) -> None:
        link = links[request.app]
        for first in range(start, end, link.piece_bytes):
            piece_end = min(first + link.piece_bytes, end)
            await link.take(piece_end - first, continuing=first > start)
            await send_file(request, response, file, first, piece_end)

    async def look_up_slowly(handler: LookupHandler, request: web.Request) -> web.StreamResponse:
        response = await look_up(handler, request)
        assert isinstance(response, web.Response)
        assert isinstance(response.body, bytes)
        await links[request.app].take(len(response.body))
        return response

    with patch.object(objects, "send_file", send_slowly), patch.object(LookupHandler, "post", look_up_slowly):
        yield


class SlowLink:
    """Pace bytes like a serial link of ``gbps``: pieces leave one after another, in the order in which they came."""

    def __init__(self, gbps: float) -> None:
        self._bytes_per_s = gbps * 1e9 / 8
        # About 2 ms, to share the link fairly. At least one packet.
        self.piece_bytes = max(1500, min(1 << 20, int(self._bytes_per_s * 0.002)))
        self._free_at = 0.0  # loop time when the link has sent everything

    async def take(self, num_bytes: int, *, continuing: bool = False) -> None:
        """Wait until the link would have sent these bytes. ``continuing``: they follow others of the same response.

        Idle time earns no credit. A response that was delayed, for example by the event loop, may catch up a little:
        its bytes were ready, and a real link would have sent them.
        """
        now = asyncio.get_running_loop().time()
        start = max(self._free_at, now - (_CATCH_UP_S if continuing else 0.0))
        self._free_at = start + num_bytes / self._bytes_per_s
        if (wait_s := self._free_at - now) > _SHORTEST_WAIT_S:
            await asyncio.sleep(wait_s)


if __name__ == "__main__":
    with slow_link(float(sys.argv.pop(1))):
        main()
