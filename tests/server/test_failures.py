"""Each answer with a status of 500 or more is logged once with its cause, and counted by it."""

from __future__ import annotations

import errno
import logging
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.log import LimitedLogger
from sgl_kvfetch.server import metrics as server_metrics
from sgl_kvfetch.stores import wire
from sgl_kvfetch.testing import data_object
from tests.server.test_server import metric, serving

pytestmark = pytest.mark.process

OBJECT = f"{wire.Route.OBJECTS}/{data_object(b'content')}"


@pytest.fixture(autouse=True)
def no_line_was_logged_before(monkeypatch: pytest.MonkeyPatch) -> None:
    limited = LimitedLogger(logging.getLogger("sgl_kvfetch.server"))
    monkeypatch.setattr(server_metrics, "_limited", limited)


def errors() -> Iterator[tuple[str, int, Exception]]:
    no_room, locked = OSError(errno.ENOSPC, "No space left on device"), sqlite3.OperationalError("database is locked")
    locked.sqlite_errorname = "SQLITE_BUSY"
    yield "full:ENOSPC", 507, store_error("full", no_room)
    yield "io:SQLITE_BUSY", 500, store_error("io", locked)
    yield "io", 500, StoreError("io", "the store is closed")
    yield "bug:KeyError", 500, KeyError("oops")


def store_error(reason: str, cause: Exception) -> StoreError:
    error = StoreError(reason, f"writing: {cause}")  # type: ignore[arg-type]
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(("cause", "status", "error"), list(errors()))
async def test_a_failure_is_logged_once_and_counted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    cause: str,
    status: int,
    error: Exception,
) -> None:
    async def fail(store: LocalStore, name: str) -> None:
        raise error

    monkeypatch.setattr(LocalStore, "head", fail)
    async with serving(tmp_path) as (_, session):
        caplog.clear()
        for _ in range(3):
            async with session.put(OBJECT, data=b"content", headers={"If-None-Match": "*"}) as response:
                assert response.status == status
        assert await metric(session, "failures_total", cause=cause) == 3
    lines = [record for record in caplog.records if record.levelno >= logging.WARNING]
    if cause.startswith("bug"):
        assert [record.exc_info is not None for record in lines] == [True] * 3
    else:
        assert [record.getMessage() for record in lines] == [f"PUT {OBJECT} failed ({cause}): {error}"]


async def test_a_client_s_mistake_is_no_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(tmp_path) as (_, session):
        caplog.clear()
        for path in (OBJECT, f"{wire.Route.OBJECTS}/bad", "/elsewhere"):
            async with session.get(path) as response:
                assert response.status in (400, 404)
        assert await metric(session, "failures_total") == 0
    assert not caplog.records
