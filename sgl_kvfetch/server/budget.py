"""The memory that requests take: counted in bytes, before it is used."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

BUDGET_BYTES = 128 << 20


class Overloaded(web.HTTPServiceUnavailable):
    """The server cannot take this request now. ``cause`` is a word for metrics."""

    def __init__(self, cause: str, text: str) -> None:
        super().__init__(text=text, headers={"Retry-After": "1"})
        self.cause = cause


class Account:
    """What one request holds. Thread-safe."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._held_bytes = 0
        self._is_closed = False

    def take(self, num_bytes: int) -> None:
        """Take bytes of the budget until the request is over. Raises Overloaded if it lacks them.

        A request gets at most half of what is left, so that large ones leave room for small ones.
        """
        with self._budget.lock:
            if self._is_closed or 2 * num_bytes > self._budget.left_bytes:
                raise Overloaded("memory", f"this request needs {num_bytes} bytes of memory, which others hold now")
            self._budget.left_bytes -= num_bytes
            self._held_bytes += num_bytes

    def close(self) -> None:
        with self._budget.lock:
            self._is_closed = True  # a thread may still work for a request that is over
            self._budget.left_bytes += self._held_bytes


class Budget:
    """The bytes that all requests together may hold: their bodies, what is made of them, and answers until these are
    sent."""

    def __init__(self, num_bytes: int = BUDGET_BYTES) -> None:
        self.left_bytes = num_bytes
        self.lock = threading.Lock()

    @contextmanager
    def account(self) -> Iterator[Account]:
        """Open a request's account. Leaving the context gives back what it holds."""
        account = Account(self)
        try:
            yield account
        finally:
            account.close()


ACCOUNT = web.RequestKey("account", Account)
