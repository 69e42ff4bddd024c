"""Data planes on threads of the test's process, so that tests can inspect them. Values go through shared memory, and
the store is a directory of the process, without a server."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from harness.waiting import WAIT_S, until
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.engine import DataPlane
from sgl_kvfetch.plane import store as plane_store
from sgl_kvfetch.plane.service import Service, run_data_plane
from sgl_kvfetch.protocol.arena import Line
from sgl_kvfetch.protocol.messages import Start
from sgl_kvfetch.stores.base import Lookup, Store, WrappedStore
from sgl_kvfetch.stores.open import open_remote

R = TypeVar("R")


class _Client(WrappedStore):
    """One of several users of a store, which stays open. Its own calls have ended when it is closed."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._calls = set[asyncio.Task[Any]]()

    async def _until_done(self, call: Coroutine[Any, Any, R]) -> R:
        task = asyncio.ensure_future(call)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return await task

    async def lookup(self, namespace: str, page_hashes: Sequence[bytes]) -> Lookup:
        return await self._until_done(self._store.lookup(namespace, page_hashes))

    async def get(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        return await self._until_done(self._store.get(name, start, length))

    async def close(self) -> None:
        await asyncio.gather(*self._calls, return_exceptions=True)
        await asyncio.to_thread(lambda: None)  # meanwhile those who called go on


@contextlib.contextmanager
def store_in(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Open a directory for all data planes of this process. Yield the URL that their configs have."""
    url, store = "http://directory", LocalStore(directory)

    def opened(asked: str, **options: Any) -> Store:
        return _Client(store) if asked == url else open_remote(asked, **options)

    monkeypatch.setattr(plane_store, "open_remote", opened)
    yield url
    asyncio.run(store.close())


def start_by_uint8(plane: DataPlane) -> Start:
    """Return what a data plane is started with that serves in the place of this one by another quantiser."""
    namespace = dataclasses.replace(plane._start.namespace, quantiser=make_quantiser("uint8").identity)
    config = plane._start.config | {"quantiser": "uint8"}
    return msgspec.structs.replace(plane._start, namespace=namespace, config=config)


class DataPlaneThread:
    """A data plane on a thread of this process."""

    def __init__(self, work: Coroutine[Any, Any, None]) -> None:
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] = self._loop.create_task(work)
        self._thread = threading.Thread(target=self._run, name="kvfetch", daemon=True)
        self._thread.start()

    def kill(self) -> None:
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._task.cancel)

    def is_busy(self) -> bool:
        return True

    def join(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._task)
        self._loop.close()


@dataclass
class Served:
    """The data planes that were started, and their event loops."""

    services: list[Service] = field(default_factory=list)
    loops: list[asyncio.AbstractEventLoop] = field(default_factory=list)
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)  # those that run as long as their data plane

    def add(self, service: Service) -> None:
        """Runs on the data plane's event loop."""
        self.services.append(service)
        self.loops.append(asyncio.get_running_loop())
        self._tasks |= asyncio.all_tasks()

    def launch(self, line: Line) -> DataPlaneThread:
        return DataPlaneThread(run_data_plane(line, self.add))

    @property
    def service(self) -> Service:
        return self.services[-1]

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        return asyncio.run_coroutine_threadsafe(work, self.loops[-1]).result(WAIT_S)

    def write_all(self) -> None:
        async def write_all() -> None:
            for _ in range(8):  # it reads what it was sent
                await asyncio.sleep(0)
            await self.service.client.writer.drain()

        self.run(write_all())

    def wait_until_idle(self) -> None:
        """Wait until the last one has no task left, in the background either."""

        async def idle() -> None:
            this = asyncio.current_task()
            await until(lambda: asyncio.all_tasks() <= {*self._tasks, this})

        self.run(idle())
