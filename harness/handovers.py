"""Counts hand-overs: each time a request's work passes from one thread or process to another.

Work passes through few primitives, and these are watched: jobs for a thread pool, calls into an event loop of another
thread, messages between the engine and its data plane, reports to the board, and futures that a thread waits for. The
data plane must run on a thread of this process, so that both ends are seen, and its store in another process, because
the threads of a store in a directory would be counted, too. The main thread is SGLang's. Reads may be silent: where
a machine is slow, some would be asked for twice.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any, NamedTuple
from unittest import mock

from harness.waiting import wait_until
from sgl_kvfetch.plane import store
from sgl_kvfetch.plugin.device.parking import Board
from sgl_kvfetch.protocol import messages

_NAMES = {"kvfetch": "event loop", "MainThread": "SGLang"}
_LIVENESS = (messages.Ping, messages.Pong)


class HandOver(NamedTuple):
    giver: str  # a thread's name
    taker: str
    what: str

    def __str__(self) -> str:
        return f"{self.giver} -> {self.taker}: {self.what}"


@contextmanager
def hand_overs() -> Iterator[list[HandOver]]:
    """Record all hand-overs, in the order in which they are given or, for messages, taken."""
    seen: list[HandOver] = []
    senders: dict[bytes, deque[str]] = defaultdict(deque)
    setters: dict[Future[Any], str] = {}

    def note(giver: str, taker: str, what: str) -> None:
        if giver != taker:
            seen.append(HandOver(giver, taker, what))

    def submit(original: Any, self: ThreadPoolExecutor, job: Any, *args: Any, **kwargs: Any) -> Any:
        note(_here(), str(self._thread_name_prefix), _name(job))
        loop = asyncio._get_running_loop()
        if loop is None:
            return original(self, job, *args, **kwargs)
        # A job that ends before its giver waits for it hands nothing back. So it begins when the giver waits.
        is_awaited = threading.Event()
        loop.call_soon(is_awaited.set)

        def late(*args: Any, **kwargs: Any) -> Any:
            is_awaited.wait()
            return job(*args, **kwargs)

        return original(self, late, *args, **kwargs)

    def call_soon(original: Any, self: Any, callback: Any, *args: Any, **kwargs: Any) -> Any:
        if self._thread_id != threading.get_ident():
            note(_here(), "event loop", _name(callback))
        return original(self, callback, *args, **kwargs)

    def encode(original: Any, message: Any) -> bytes:
        data: bytes = original(message)
        senders[data].append(_here())
        return data

    def feed(original: Any, self: Any, data: bytes) -> Iterator[Any]:
        for message in original(self, data):
            if not isinstance(message, _LIVENESS):
                note(senders[real_encode(message)].popleft(), _here(), type(message).__name__)
            yield message

    def report(original: Any, self: Board, ticket: Any, num_pages: int) -> None:
        note(_here(), "SGLang", "a result, by the board")
        original(self, ticket, num_pages)

    def set_result(original: Any, self: Future[Any], result: Any) -> None:
        setters[self] = _here()
        original(self, result)

    def result(original: Any, self: Future[Any], timeout: float | None = None) -> Any:
        got = original(self, timeout)
        if asyncio._get_running_loop() is None and self in setters:
            note(setters.pop(self), _here(), f"{type(got).__name__}, by a future")
        return got

    real_encode = messages.encode
    with ExitStack() as stack:
        for owner, name, watched in (
            (ThreadPoolExecutor, "submit", submit),
            (asyncio.BaseEventLoop, "call_soon_threadsafe", call_soon),
            (messages, "encode", encode),
            (messages, "encode", encode),
            (messages.MessageReader, "feed", feed),
            (Board, "report", report),
            (Future, "set_result", set_result),
            (Future, "result", result),
        ):
            stack.enter_context(mock.patch.object(owner, name, _around(getattr(owner, name), watched)))
        stack.enter_context(mock.patch.object(store, "SILENCE_S", None))
        yield seen


def _around(original: Callable[..., Any], watched: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return watched(original, *args, **kwargs)

    return call


def _here() -> str:
    name = re.sub(r"_\d+$", "", threading.current_thread().name)
    return _NAMES.get(name, name)


def _name(callback: Any) -> str:
    while isinstance(callback, partial):
        callback = callback.func
    return str(getattr(callback, "__qualname__", callback)).replace(".<locals>", "").replace(".<lambda>", "")


def require_equal(seen: Sequence[HandOver], expected: Sequence[str]) -> None:
    """Wait until there are as many hand-overs as expected. Raise AssertionError unless they are equal, in any order."""

    def listed() -> str:
        return "\n".join(map(str, seen))

    wait_until(lambda: len(seen) >= len(expected), timeout_s=30, found=listed)
    assert sorted(map(str, seen)) == sorted(expected), listed()
