"""Clients that take a place and do not use it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import resource
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from harness.small_segments import data_object
from harness.waiting import WAIT_S, LoopClock
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.server.config import ServerConfig
from sgl_kvfetch.server.run import RunningServer, fit_connections, running_server
from sgl_kvfetch.stores import wire
from sgl_kvfetch.stores.http import HttpStore

pytestmark = pytest.mark.process

DEADLINE_S = WAIT_S
IDLE_S = 600.0  # more than any stall of the machine: tests set the clock forward
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


@asynccontextmanager
async def connected(server: RunningServer, sent: bytes = b"") -> AsyncIterator[asyncio.StreamReader]:
    reader, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(sent)
    try:
        yield reader
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def status_of(server: RunningServer) -> int:
    async with aiohttp.ClientSession(server.url) as session, session.get(wire.Route.HEALTH) as response:
        return response.status


async def metric(server: RunningServer, name: str) -> float:
    async with aiohttp.ClientSession(server.url) as session, session.get(wire.Route.METRICS) as response:
        (line,) = re.findall(f"(?m)^kvfetch_server_{name} (.+)$", await response.text())
    return float(line)


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HTTP/1.1\r\nHost:", HEALTH], ids=["nothing", "half", "one"])
async def test_a_connection_without_a_request_is_closed(tmp_path: Path, sent: bytes) -> None:
    clock = LoopClock()
    async with (
        running_server(ServerConfig(tmp_path, port=0, idle_timeout_s=IDLE_S)) as server,
        connected(server, sent) as reader,
    ):
        if sent == HEALTH:
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        assert not (await clock.until_done(reader.read(), IDLE_S)).startswith(b"HTTP/1.1")


@pytest.mark.parametrize(
    "request_line",
    [f"POST {wire.Route.LOOKUP}", f"PUT {wire.Route.NOTES}/pins/{'0' * 64}"],
)
async def test_a_request_that_brings_no_body_is_refused(tmp_path: Path, request_line: str) -> None:
    headers = "Host: localhost\r\nContent-Type: application/json\r\nContent-Length: 100"
    head = f"{request_line} HTTP/1.1\r\n{headers}\r\n\r\n"
    clock = LoopClock()
    async with (
        running_server(ServerConfig(tmp_path, port=0, idle_timeout_s=IDLE_S)) as server,
        connected(server, head.encode() + b"x") as reader,
    ):
        assert (await clock.until_done(reader.readline(), IDLE_S)).split()[1] == b"408"


async def test_too_many_connections_get_503_and_one_line_of_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_server(ServerConfig(tmp_path, port=0, max_connections=4)) as server:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(4):
                reader = await stack.enter_async_context(connected(server, HEALTH))
                assert (await reader.readline()).split()[1] == b"200"
            for _ in range(10):
                async with connected(server) as reader, asyncio.timeout(DEADLINE_S):
                    assert (await reader.readline()).split()[1] == b"503"
        async with asyncio.timeout(DEADLINE_S):
            while await status_of(server) != 200:
                pass
    assert [r.message for r in caplog.records if r.name.startswith("sgl_kvfetch.server")].count(
        "a connection failed (connections): 4 are open"
    ) == 1


async def test_a_client_that_takes_no_bytes_is_dropped(tmp_path: Path) -> None:
    content = bytes(64 << 20)
    name = data_object(content)
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_bytes(content)
    with socket.socket() as sock:  # its own, with little room
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        async with running_server(ServerConfig(tmp_path, port=0, idle_timeout_s=0.5)) as server:
            await loop.sock_connect(sock, (server.host, server.port))
            await loop.sock_sendall(
                sock, f"GET {wire.Route.OBJECTS}/{name} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
            )
            async with asyncio.timeout(DEADLINE_S):
                while await metric(server, "requests_in_flight") > 0:
                    pass  # and take nothing


async def test_a_client_that_takes_its_time_is_kept(tmp_path: Path) -> None:
    """It takes more than a MiB in each period, though much less than the answer."""
    content = bytes(24 << 20)
    clock = LoopClock()
    async with running_server(ServerConfig(tmp_path, port=0, idle_timeout_s=60)) as server:
        store = HttpStore(server.url)
        await store.put(data_object(content), content)
        await store.close()
        request = (
            f"GET {wire.Route.OBJECTS}/{data_object(content)} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        )
        received = 0
        async with connected(server, request.encode()) as reader:
            while piece := await reader.read(1 << 20):
                received += len(piece)
                await clock.advance(20 * len(piece) / (1 << 20))
        assert received > len(content)


async def test_a_client_that_leaves_during_an_answer_leaves_nothing_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = bytes(64 << 20)
    name = data_object(content)
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_bytes(content)
    async with running_server(ServerConfig(tmp_path, port=0)) as server:
        for _ in range(5):
            async with connected(
                server, f"GET {wire.Route.OBJECTS}/{name} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
            ) as r:
                await r.readexactly(1000)
        async with asyncio.timeout(DEADLINE_S):
            while await metric(server, "requests_in_flight") > 0:
                pass
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


SERVE = """
import asyncio, resource, sys
from pathlib import Path
from sgl_kvfetch.server.config import ServerConfig
from sgl_kvfetch.server.run import run_server
import logging
import re
resource.setrlimit(resource.RLIMIT_NOFILE, (256, int(sys.argv[2])))
logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
run_server(ServerConfig(Path(sys.argv[1]), port=0, max_uploads=8, idle_timeout_s=5))
"""


def test_more_idle_connections_than_files_do_not_stop_the_server(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", SERVE, str(tmp_path / "store"), "400"]
    with log.open("w") as out, subprocess.Popen(command, stderr=out) as server:
        try:
            while "version" not in log.read_text():
                assert server.poll() is None, log.read_text()
            port = int(re.search(r"serving .*:([0-9]+)\n", log.read_text())[1])  # type: ignore[index]
            with contextlib.ExitStack() as stack:
                for _ in range(500):
                    stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            # All are gone, or will be soon.
            answer = b""
            while b" 200 " not in answer:
                with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as sock:
                    sock.sendall(HEALTH)
                    with contextlib.suppress(ConnectionError):
                        answer = sock.recv(1000)
        finally:
            server.kill()
    assert "400 open files allows" in log.read_text()
    assert "a connection failed" in log.read_text()
    assert len(log.read_text()) < 1000


@pytest.fixture
def file_limit(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    limits = [(1024, 1 << 16)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.append(new))
    return limits


def test_the_limit_of_open_files_is_raised_as_far_as_needed(file_limit: list[tuple[int, int]]) -> None:
    assert fit_connections(4096, 64) == 4096
    assert 8192 < file_limit[-1][0] < 9000
    assert fit_connections(1 << 20, 64) < 1 << 15
    assert file_limit[-1] == (1 << 16, 1 << 16)
    assert fit_connections(10, 1) == 10


def test_too_low_a_limit_of_open_files_is_a_config_error(file_limit: list[tuple[int, int]]) -> None:
    file_limit.append((256, 256))
    with pytest.raises(ConfigError, match="256 open files"):
        fit_connections(4096, 64)


async def test_garbage_costs_one_line_of_log_without_its_bytes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    requests: list[bytes] = [
        b"garbage\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer s3cret\x01\r\n\r\n",
        b"POST /v1/lookup HTTP/1.1\r\nHost: localhost\r\nContent-Length: abc\r\n\r\n",
        b"PUT /v1/objects/x HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/lookup HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /" + b"x" * 20000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ]
    async with running_server(ServerConfig(tmp_path, port=0, token="t")) as server:
        for request in requests * 3:
            async with connected(server, request) as reader, asyncio.timeout(DEADLINE_S):
                with contextlib.suppress(ConnectionError):
                    assert (await reader.readline()).split()[1] in (b"400", b"401"), request
    assert len(caplog.records) <= 1
    assert "s3cret" not in caplog.text
    assert len(caplog.text) < 200


@pytest.mark.parametrize("headers", ["", "Content-Encoding: gzip\r\n"])
async def test_a_malformed_lookup_is_the_clients_fault(
    tmp_path: Path, headers: str, caplog: pytest.LogCaptureFixture
) -> None:
    body = b"\x82\xa9namespace\xa4\xff\xff\xff\xff\xabpage_hashes\xc4\x00"  # a namespace that is not UTF-8
    request = (
        f"POST {wire.Route.LOOKUP} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode()
    )
    async with running_server(ServerConfig(tmp_path, port=0)) as server, connected(server, request + body) as reader:
        assert (await reader.readline()).split()[1] == b"400"
    assert caplog.records == []
