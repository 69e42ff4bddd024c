"""Turn errors into HTTP answers: a status and a small JSON body."""

from __future__ import annotations

import msgspec
from aiohttp import web

from sgl_kvfetch.directory import IncompleteSegmentError
from sgl_kvfetch.errors import StoreError, StoreErrorReason
from sgl_kvfetch.stores import ErrorBody

_STATUS: dict[StoreErrorReason, int] = {"full": 507, "invalid": 422, "too_large": 413, "truncated": 416}


def error_answer(status: int, error: str, message: str) -> web.Response:
    body = msgspec.json.encode(ErrorBody(error, message))
    return web.Response(status=status, body=body, content_type="application/json")


def store_error_answer(error: StoreError) -> web.Response:
    """Choose the status by reason: 409 for a manifest before its data, else as in ``_STATUS``, else 500."""
    if isinstance(error, IncompleteSegmentError):
        return error_answer(409, "incomplete", str(error))
    return error_answer(_STATUS.get(error.reason, 500), error.reason, str(error))
