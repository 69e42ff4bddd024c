"""The bodies of requests and answers: the memory they take, counted before it is used; reading; answers in JSON, values
or errors with a fixed word.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from aiohttp import web

from sgl_kvfetch.directory.writing import IncompleteSegmentError
from sgl_kvfetch.errors import StoreError, StoreErrorReason
from sgl_kvfetch.server.metrics import ServerMetrics
from sgl_kvfetch.stores.wire import ErrorBody

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


_PIECE_BYTES = 1 << 20
_STATUS: dict[StoreErrorReason, int] = {"full": 507, "invalid": 422, "too_large": 413, "truncated": 416}


class BodyTooLarge(web.HTTPRequestEntityTooLarge):
    def __init__(self, most: int) -> None:
        super().__init__(max_size=most, actual_size=most + 1, text=f"the body exceeds the limit of {most} bytes")


class BodyReader:
    """Reads bodies of a limited size from clients that may stall."""

    def __init__(self, metrics: ServerMetrics, timeout_s: float) -> None:
        """``timeout_s`` is the limit for each MiB."""
        self._metrics = metrics
        self._timeout_s = timeout_s

    async def read_body(self, request: web.Request, most: int, times: int) -> bytes:
        """Read a whole body. Raises HTTPException if it has more than ``most`` bytes, or stalls.

        ``times``: the memory that the request takes, in sizes of its body; Overloaded says that there is too little.
        """
        require_fits(request, most)
        request[ACCOUNT].take(times * (most if request.content_length is None else request.content_length))
        body = bytearray()
        while piece := await self.read_piece(request):
            body += piece
            if len(body) > most:
                raise BodyTooLarge(most)
        return bytes(body)

    async def read_piece(self, request: web.Request) -> bytes:
        """Read the next MiB of a body; b"" at its end. Raises ConnectionError if the body is cut off.

        The timeout covers the whole piece: a client that sends only a trickle is treated as stalled.
        """
        pieces: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._timeout_s):
                while size < _PIECE_BYTES and (piece := await request.content.read(_PIECE_BYTES - size)):
                    pieces.append(piece)
                    size += len(piece)
        except TimeoutError as e:
            text = f"the body stalled: less than 1 MiB in {self._timeout_s:g} s"
            raise web.HTTPRequestTimeout(text=text, headers={"Connection": "close"}) from e
        self._metrics.received_bytes.inc(size)
        return b"".join(pieces)


def require_fits(request: web.Request, most: int) -> None:
    """Refuse a body whose Content-Length is too large, before reading it."""
    if request.content_length is not None and request.content_length > most:
        raise BodyTooLarge(most)


def json_answer(value: object, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(value), content_type="application/json")


def error_answer(status: int, error: str, message: str) -> web.Response:
    return json_answer(ErrorBody(error, message), status)


def store_error_answer(method: str, error: StoreError) -> web.Response:
    """Choose the status by reason: 409 for a manifest before its data, else as in ``_STATUS``, else 500.

    A disk that refuses a write is answered with 507 as well: clients send a body again at once after a 500. What the
    upstream did not do is answered with 502, unless it has said why.
    """
    if error.url is not None and error.reason not in ("full", "invalid", "too_large"):
        return error_answer(502, error.reason, f"the upstream: {error}")
    if isinstance(error, IncompleteSegmentError):
        return error_answer(409, "incomplete", str(error))
    refuses_write = error.reason == "io" and method == "PUT"
    return error_answer(507 if refuses_write else _STATUS.get(error.reason, 500), error.reason, str(error))
