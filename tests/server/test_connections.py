"""Clients that take a place and do not use it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import sys
from pathlib import Path

import pytest

from harness.small_segments import data_object
from harness.store_process import StoreProcess
from harness.waiting import WAIT_S, LoopClock, until
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.server.run import fit_connections
from sgl_kvfetch.stores import wire
from tests.server.serving import are_answered, connected, request, serving, status_of

pytestmark = pytest.mark.process

IDLE_S = 600.0  # more than any stall of the machine: tests set the clock forward
HEALTH = request("GET /healthz")


async def test_a_connection_that_brings_no_request_or_no_body_is_closed(tmp_path: Path) -> None:
    clock = LoopClock()
    async with serving(tmp_path, idle_timeout_s=IDLE_S) as (server, _):
        for sent in (b"", HEALTH[:30], HEALTH):
            async with connected(server, sent) as reader:
                if sent == HEALTH:
                    assert status_of(await reader.readuntil(b"\r\n\r\n")) == 200
                assert not (await clock.until_done(reader.read(), IDLE_S)).startswith(b"HTTP/1.1")
        for line in (f"POST {wire.Route.LOOKUP}", f"PUT {wire.Route.NOTES}/pins/{'0' * 64}"):
            sent = request(line, "Content-Type: application/json", "Content-Length: 100") + b"x"
            async with connected(server, sent) as reader:
                assert status_of(await clock.until_done(reader.readline(), IDLE_S)) == 408


async def test_too_many_connections_get_503_and_a_line_of_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(tmp_path, max_connections=4) as (server, session):
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(4):
                reader = await stack.enter_async_context(connected(server, HEALTH))
                assert status_of(await reader.readline()) == 200
            for _ in range(10):
                async with connected(server) as reader, asyncio.timeout(WAIT_S):
                    assert status_of(await reader.readline()) == 503

        async def is_answered() -> bool:
            async with session.get(wire.Route.HEALTH) as response:
                return response.status == 200

        await until(is_answered)
    assert [r.message for r in caplog.records if r.name.startswith("sgl_kvfetch.server")].count(
        "a connection failed (connections): 4 are open"
    ) == 1


def put_large(root: Path) -> bytes:
    """Put an object that no socket takes whole. Return a request for it."""
    content = bytes(64 << 20)
    path = root / data_object(content)
    path.parent.mkdir()
    path.write_bytes(content)
    return request(f"GET {wire.Route.OBJECTS}/{data_object(content)}")


async def test_a_client_that_takes_no_bytes_is_dropped(tmp_path: Path) -> None:
    asking = put_large(tmp_path)
    with socket.socket() as sock:  # its own, with little room
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        async with serving(tmp_path, idle_timeout_s=0.5) as (server, session):
            await loop.sock_connect(sock, (server.host, server.port))
            await loop.sock_sendall(sock, asking)
            await until(lambda: are_answered(session, 0))


async def test_a_client_that_takes_its_time_is_kept(tmp_path: Path) -> None:
    """It takes more than a MiB in each period, though much less than the answer."""
    asking, clock, received = put_large(tmp_path), LoopClock(), 0
    async with serving(tmp_path, idle_timeout_s=60) as (server, _), connected(server, asking) as reader:
        while received < 64 << 20:
            piece = await reader.read(1 << 20)
            assert piece
            received += len(piece)
            await clock.advance(20 * len(piece) / (1 << 20))


async def test_a_client_that_leaves_leaves_nothing_behind(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    asking = put_large(tmp_path)
    async with serving(tmp_path) as (server, session):
        for _ in range(5):
            async with connected(server, asking) as reader:
                await reader.readexactly(1000)
        await until(lambda: are_answered(session, 0))
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


LIMITED = ("bash", "-c", 'ulimit -Sn 256 && ulimit -Hn 400 && exec "$0" "$@"')
SERVE = (sys.executable, "-m", "harness.serve_with", '{"max_uploads": 8, "idle_timeout_s": 5}')


def test_more_idle_connections_than_files_do_not_stop_the_server(tmp_path: Path) -> None:
    with StoreProcess(tmp_path / "store", command=(*LIMITED, *SERVE)) as server:
        with contextlib.ExitStack() as stack:
            for _ in range(500):
                stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        answer = b""  # all are gone, or will be soon
        while b" 200 " not in answer:
            with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as sock:
                sock.sendall(HEALTH)
                with contextlib.suppress(ConnectionError):
                    answer = sock.recv(1000)
        log = server.log()
    assert "400 open files allows" in log
    assert "a connection failed" in log
    assert len(log) < 1000


def test_a_limit_of_open_files_that_is_too_low_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: None)
    with pytest.raises(ConfigError, match="256 open files"):
        fit_connections(4096, 64)


async def test_garbage_costs_one_line_of_log_without_bytes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    chunked = "Transfer-Encoding: chunked"
    requests: list[bytes] = [
        b"garbage\r\n\r\n",
        request("GET /", "Authorization: Bearer s3cret\x01"),
        request("POST /v1/lookup", "Content-Length: abc"),
        request("PUT /v1/objects/x", chunked) + b"zz\r\n",
        request("POST /v1/lookup", chunked) + b"zz\r\n",
        request("GET /" + "x" * 20000),
    ]
    async with serving(tmp_path, token="t") as (server, _):
        caplog.clear()
        for sent in requests * 3:
            async with connected(server, sent) as reader, asyncio.timeout(WAIT_S):
                with contextlib.suppress(ConnectionError):
                    assert status_of(await reader.readline()) in (400, 401), sent
    assert len(caplog.records) <= 1
    assert "s3cret" not in caplog.text
    assert len(caplog.text) < 200
