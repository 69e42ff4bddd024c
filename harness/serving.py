"""Serve a directory as a store on a thread of this process: for tests that need a store's URL, and not its process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

from harness.waiting import WAIT_S
from sgl_kvfetch.server.config import ServerConfig
from sgl_kvfetch.server.run import running_server


@contextmanager
def serving(directory: Path) -> Iterator[str]:
    """Serve ``directory`` until the block ends. Yield the store's URL."""
    url, stop, loop = Future[str](), asyncio.Event(), asyncio.new_event_loop()

    async def serve() -> None:
        try:
            async with running_server(ServerConfig(directory, port=0, grace_s=0)) as server:
                url.set_result(server.url)
                await stop.wait()
        except BaseException as e:
            if url.done():
                raise
            url.set_exception(e)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), name="serving", daemon=True)
    thread.start()
    try:
        yield url.result(WAIT_S)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(WAIT_S)
        loop.close()
