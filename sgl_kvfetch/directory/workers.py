"""The threads of a store in a directory: each kind of work has its own, so that none waits for a slower kind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar

from sgl_kvfetch.directory.files import OpenObject
from sgl_kvfetch.errors import StoreError

P = ParamSpec("P")
T = TypeVar("T")

_LOOKUP_THREADS = 2
_SCAN_THREADS = 2

# Scans are of folders and tables. Writes may all be waiting for a lock.
Kind = Literal["writes", "reads", "lookups", "scans", "upkeep"]


class Workers:
    """Runs blocking calls for one store until it is closed."""

    def __init__(self, num_threads: int, before: Callable[[], None] = lambda: None) -> None:
        """``num_threads``: as many read, and as many write. ``before`` is called on the thread before each call."""
        self._before = before
        sizes: dict[Kind, int] = {
            "lookups": _LOOKUP_THREADS,
            "reads": num_threads,
            "writes": num_threads,
            "scans": _SCAN_THREADS,
            "upkeep": 1,
        }
        self._threads = {
            kind: ThreadPoolExecutor(size, f"kvfetch-{kind.removesuffix('s')}") for kind, size in sizes.items()
        }
        self.is_closed = False

    async def run(self, kind: Kind, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function on a thread of this kind. Raises StoreError if the store is closed."""
        self.require_open()

        def work() -> T:
            self._before()
            return call(*args, **kwargs)

        return await asyncio.get_running_loop().run_in_executor(self._threads[kind], work)

    async def open(self, opener: Callable[[], OpenObject | None]) -> OpenObject | None:
        """Open a file, which is closed if nobody waits for it any more."""
        opening = asyncio.ensure_future(self.run("reads", opener))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_opened)
            raise

    def later(self, call: Callable[[], object]) -> None:
        """Call in the background, after what was submitted before."""
        self._threads["upkeep"].submit(call)

    def require_open(self) -> None:
        if self.is_closed:
            raise StoreError("io", "the store is closed")

    def shut_down(self) -> None:
        """Wait until all calls have ended."""
        for threads in self._threads.values():
            threads.shutdown()


class _HasWorkers(Protocol):
    workers: Workers


S = TypeVar("S", bound=_HasWorkers)


def on(
    kind: Kind,
) -> Callable[[Callable[Concatenate[S, P], T]], Callable[Concatenate[S, P], Coroutine[Any, Any, T]]]:
    """Make a blocking method asynchronous: its calls run on these threads."""

    def wrapped(work: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
        @wraps(work)
        async def run(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
            return await self.workers.run(kind, work, self, *args, **kwargs)

        return run

    return wrapped


def _close_opened(opening: asyncio.Future[OpenObject | None]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opened = opening.result()
        if opened is not None:
            opened.file.close()
