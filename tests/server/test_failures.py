"""Each answer with a status of 500 or more is logged once with its cause, and counted by it."""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from harness.small_segments import data_object
from sgl_kvfetch.directory import LocalStore
from sgl_kvfetch.directory.room import DiskRoom
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.log import LimitedLogger
from sgl_kvfetch.server import app as application, metrics as server_metrics
from sgl_kvfetch.stores import HttpOptions, wire
from sgl_kvfetch.stores.http import HttpStore
from tests.directory.conftest import unfinished
from tests.server.serving import get, metric, serving
from tests.stores.conformance import failing

pytestmark = pytest.mark.process

OBJECT = f"{wire.Route.OBJECTS}/{data_object(b'content')}"


@pytest.fixture(autouse=True)
def no_line_was_logged_before(monkeypatch: pytest.MonkeyPatch) -> None:
    limited = LimitedLogger(logging.getLogger("sgl_kvfetch.server"))
    monkeypatch.setattr(server_metrics, "_limited", limited)


def errors() -> Iterator[tuple[str, int, Exception]]:
    no_room, locked = OSError(errno.ENOSPC, "No space left on device"), sqlite3.OperationalError("database is locked")
    locked.sqlite_errorname = "SQLITE_BUSY"
    full, busy = StoreError("full", f"writing: {no_room}"), StoreError("io", f"writing: {locked}")
    full.__cause__, busy.__cause__ = no_room, locked
    yield "full:ENOSPC", 507, full
    yield "io:SQLITE_BUSY", 507, busy
    yield "io", 507, StoreError("io", "the store is closed")
    yield "bug:KeyError", 500, KeyError("oops")


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


@pytest.mark.parametrize(
    ("at", "number"),
    [
        ("open", errno.EROFS),
        ("open", errno.EMFILE),
        ("pwrite", errno.ENOSPC),
        ("pwrite", errno.EDQUOT),
        ("pwrite", errno.EFBIG),
        ("fsync", errno.EIO),
    ],
)
async def test_a_disk_refusing_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str, number: int) -> None:
    """Each object is sent once, and the store says that it takes none, until one is written."""
    call = getattr(os, at)

    def fail(*args: object, **kwargs: object) -> object:
        if at == "open" and "O_CREAT" not in str(args) and not (isinstance(args[1], int) and args[1] & os.O_CREAT):
            return call(*args, **kwargs)
        raise OSError(number, os.strerror(number))

    free_bytes = 1 << 40  # whatever else uses this machine's disk
    monkeypatch.setattr(DiskRoom, "_free_bytes", lambda room: free_bytes)
    monkeypatch.setattr(application, "_HEALTH_AGE_S", -1.0)
    async with serving(tmp_path) as (server, session):
        store = HttpStore(server.url)

        async def health() -> str:
            """Return why nothing can be written, "" if it can."""
            found = await get(session, wire.Route.HEALTH)
            assert found["status"] == ("ok" if found["write_problem"] is None else "read_only")
            return found["write_problem"] or ""

        await store.put(data_object(b"first"), b"first")
        assert await health() == ""
        with monkeypatch.context() as broken:
            broken.setattr(f"sgl_kvfetch.directory.files.os.{at}", fail)
            with failing("full" if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else "io"):
                await store.put(data_object(b"second"), b"second")
            assert await metric(session, "requests_total", method="PUT", status="507") == 1
            assert os.strerror(number) in await health()
            assert unfinished(tmp_path) == []
        assert os.strerror(number) in await health()
        assert os.strerror(number) in (await get(session, wire.Route.HEALTH, 503, write=""))["write_problem"]
        free_bytes += 1
        assert (await health() == "") == (number in (errno.ENOSPC, errno.EDQUOT))
        await store.put(data_object(b"third"), b"third")
        assert await health() == ""
        assert (await get(session, wire.Route.HEALTH, write=""))["write_problem"] is None
        await store.close()


async def test_a_disk_that_fails_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path) as (server, session):
        store = HttpStore(server.url, options=HttpOptions(max_attempts=1))
        await store.put(data_object(b"content"), b"content")
        monkeypatch.setattr(os, "sendfile", Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO))))
        with failing("truncated"):
            await store.get(data_object(b"content"))
        assert await metric(session, "failures_total", cause="io:EIO") == 1
        await store.close()


async def test_a_store_that_nobody_writes_to_finds_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load balancer sends no writes to a store that takes none."""
    store = LocalStore(tmp_path)
    await store.put(data_object(b"first"), b"first")
    now, fsync = time.monotonic(), os.fsync

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with failing("io", "Input/output error"):
        await store.put(data_object(b"second"), b"second")
    for later_s, is_broken in ((0, True), (100, True), (150, True), (300, False)):
        monkeypatch.setattr("sgl_kvfetch.directory.room.time.monotonic", lambda s=later_s: now + s)
        monkeypatch.setattr(os, "fsync", fail if is_broken else fsync)
        assert ((await store.usage()).write_problem is not None) == is_broken
    await store.close()
