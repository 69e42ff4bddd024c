"""An event loop on a thread of its own, for callers that are not asynchronous."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from harness.waiting import WAIT_S

T = TypeVar("T")

_POLL_S = 0.05


class LoopThread:
    """Runs coroutines for other threads. Daemonic: a process that exits does not wait for it."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(
        self,
        coroutine: Coroutine[Any, Any, T],
        timeout_s: float,
        is_cancelled: Callable[[], bool] | None = None,
    ) -> T:
        """The coroutine's result.

        Cancels it and raises TimeoutError after ``timeout_s``, or CancelledError (of concurrent.futures) soon after
        ``is_cancelled`` says so.
        """
        future = self.submit(coroutine)
        deadline_s = time.monotonic() + timeout_s
        while True:
            left_s = deadline_s - time.monotonic()
            try:
                return future.result(max(0.0, left_s if is_cancelled is None else min(left_s, _POLL_S)))
            except concurrent.futures.TimeoutError:
                if future.done():  # the coroutine's own TimeoutError
                    raise
            if is_cancelled is not None and is_cancelled():
                future.cancel()
                raise concurrent.futures.CancelledError
            if left_s <= 0:
                future.cancel()
                raise TimeoutError(f"no result within {timeout_s:g} s")

    def close(self, timeout_s: float = WAIT_S) -> None:
        """Cancel what still runs and stop the thread. Idempotent."""
        if self._loop.is_closed():
            return
        self.submit(self._cancel_all()).result(timeout_s)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._loop.close()

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
