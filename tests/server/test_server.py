from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import io
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from harness.slow_link import slow_link
from harness.small_segments import FOLDER, data_object, make_segment, page_hashes, put_segment
from harness.waiting import WAIT_S, LoopClock, until
from sgl_kvfetch.directory import local
from sgl_kvfetch.directory.local import LocalStore, StoreUsage
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.server import app as application
from sgl_kvfetch.server.config import ServerConfig
from sgl_kvfetch.server.run import RunningServer, running_server
from sgl_kvfetch.stores import wire
from sgl_kvfetch.stores.base import object_digest
from sgl_kvfetch.stores.http import HttpStore
from sgl_kvfetch.stores.remote import HttpOptions
from tests.stores.conformance import BAD_NAMES

CONTENT = bytes(range(200))
NAME = data_object(CONTENT)
OBJECT = f"{wire.Route.OBJECTS}/{NAME}"


@asynccontextmanager
async def serving(root: Path, **options: Any) -> AsyncIterator[tuple[RunningServer, aiohttp.ClientSession]]:
    async with (
        running_server(ServerConfig(root, port=0, **({"grace_s": 1} | options))) as server,
        aiohttp.ClientSession(server.url) as session,
    ):
        yield server, session


@pytest.fixture
async def session(tmp_path: Path) -> AsyncIterator[aiohttp.ClientSession]:
    async with serving(tmp_path) as (_, session):
        async with session.put(OBJECT, data=CONTENT) as response:
            assert response.status == 201
        yield session


def files(root: Path) -> list[Path]:
    """Return what the store holds, without what the server keeps for itself."""
    every = (path for path in root.rglob("*") if path.is_file())
    return [path for path in every if path.parent.name != ".catalog" and path.name != ".served"]


async def error_of(response: aiohttp.ClientResponse) -> str:
    body = await response.json()
    assert set(body) == {"error", "message"}
    assert body["message"]
    return str(body["error"])


@pytest.mark.process
async def test_if_match_replaces_a_manifest(tmp_path: Path) -> None:
    old, new = (make_segment(page_hashes(4), 0, 4, codec=codec) for codec in ("zstd", "deflate"))
    path = f"{wire.Route.OBJECTS}/{old.manifest.key.manifest_name}"
    content = new.manifest.encode()
    tag = {"If-Match": wire.entity_tag(object_digest(old.manifest.encode()))}
    async with serving(tmp_path) as (server, session):
        store = HttpStore(server.url)
        await put_segment(store, old)
        async with session.put(path, data=content, headers=tag) as response:
            assert (response.status, await error_of(response)) == (409, "incomplete")
        await store.put(new.data_name, new.data)
        for bad in ("*", "nonsense", '"' + "0" * 31 + '"', 'W/"' + "0" * 32 + '"', f'{tag["If-Match"]}, "x"'):
            async with session.put(path, data=content, headers={"If-Match": bad}) as response:
                assert response.status == 400, bad
        async with session.put(path, data=content, headers={"If-Match": '"' + "0" * 32 + '"'}) as response:
            assert (response.status, await error_of(response)) == (412, "changed")
        assert await store.get(old.manifest.key.manifest_name) == old.manifest.encode()
        async with session.put(path, data=content, headers=tag) as response:
            assert response.status == 201
        assert await store.get(old.manifest.key.manifest_name) == content
        async with session.put(f"{wire.Route.OBJECTS}/{new.data_name}", data=new.data, headers=tag) as response:
            assert response.status == 400
        await store.close()


async def raw(server: RunningServer, request: bytes) -> bytes:
    """Send these bytes on a new connection and return the answer."""
    reader, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(request)
    await writer.drain()
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


async def shut(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def are_answered(session: aiohttp.ClientSession, num_requests: int) -> bool:
    """Whether the server is at work on so many requests, beside this one."""
    return await metric(session, "requests_in_flight") == num_requests


async def metric(session: aiohttp.ClientSession, name: str, **labels: str) -> float:
    async with session.get(wire.Route.METRICS) as response:
        assert response.status == 200
        families = list(text_string_to_metric_families(await response.text()))
    found = [
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == f"kvfetch_server_{name}" and labels.items() <= sample.labels.items()
    ]
    return sum(found)


@pytest.mark.process
@pytest.mark.parametrize(
    ("header", "start", "end"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=0-199", 0, 200),
        ("bytes=10-", 10, 200),
        ("bytes=-5", 195, 200),
        ("bytes=-500", 0, 200),
        ("bytes=190-1000", 190, 200),
    ],
)
async def test_ranges(session: aiohttp.ClientSession, header: str, start: int, end: int) -> None:
    async with session.get(OBJECT, headers={"Range": header}) as response:
        assert response.status == 206
        assert response.headers["Content-Range"] == f"bytes {start}-{end - 1}/200"
        assert await response.read() == CONTENT[start:end]


@pytest.mark.process
@pytest.mark.parametrize(
    "header",
    [
        "bytes=200-",
        "bytes=5-4",
        "bytes=٠-٩",
        "bytes=",
        "bytes=-",
        "bytes=-0",
        "bytes=0-1,5-6",
        "lines=1-2",
        "bytes=a-b",
        "",
    ],
)
async def test_bad_ranges(session: aiohttp.ClientSession, header: str) -> None:
    async with session.get(OBJECT, headers={"Range": header}) as response:
        assert response.status == 416
        assert response.headers["Content-Range"] == "bytes */200"
        assert await error_of(response) == "range"


@pytest.mark.process
async def test_head(session: aiohttp.ClientSession) -> None:
    async with session.head(OBJECT) as response:
        assert response.status == 200
        assert response.content_length == 200
        assert response.headers["Accept-Ranges"] == "bytes"
        assert "Last-Modified" in response.headers


@pytest.mark.process
async def test_statuses(session: aiohttp.ClientSession) -> None:
    missing = f"{wire.Route.OBJECTS}/{data_object(b'missing')}"
    segment = make_segment(page_hashes(4), 0, 4)
    manifest = f"{wire.Route.OBJECTS}/{segment.manifest.key.manifest_name}"
    for method, path, body, status, error in (
        ("GET", missing, None, 404, "not_found"),
        ("DELETE", missing, None, 404, "not_found"),
        ("GET", "/elsewhere", None, 404, "not_found"),
        ("POST", OBJECT, b"", 405, "method_not_allowed"),
        ("GET", wire.Route.OBJECTS + "/bad", None, 400, "bad_request"),
        ("PUT", wire.Route.OBJECTS + "/bad", b"x", 400, "bad_request"),
        ("PUT", OBJECT, b"not the digest's content", 422, "invalid"),
        ("PUT", manifest, segment.manifest.encode(), 409, "incomplete"),
        ("PUT", manifest, b"nonsense", 422, "invalid"),
    ):
        async with session.request(method, path, data=body) as response:
            assert response.status == status, (method, path)
            assert await error_of(response) == error
    async with session.delete(OBJECT) as response:
        assert response.status == 204


@pytest.mark.process
async def test_paths_do_not_escape(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    async with serving(tmp_path / "a" / "root") as (server, _):
        names = [
            *BAD_NAMES,
            "%2e%2e/%2e%2e/secret",
            "..%2f..%2fsecret",
            "%2Fetc%2Fpasswd",
            "%00",
            f"{'0' * 32}.0-1/%2e%2e/%2e%2e/secret",
        ]
        for name in names:
            if "\n" in name or not name:
                continue
            for method in ("GET", "PUT", "DELETE", "HEAD"):
                head = f"{method} {wire.Route.OBJECTS}/{name} HTTP/1.1\r\nHost: localhost\r\n"
                answer = await raw(server, f"{head}Content-Length: 1\r\nConnection: close\r\n\r\nx".encode())
                assert answer.split(b" ", 2)[1] in (b"400", b"404"), (method, name)
    assert files(tmp_path) == [tmp_path / "secret"]
    assert (tmp_path / "secret").read_bytes() == b"secret"


class TestToken:
    @pytest.fixture
    async def server(self, tmp_path: Path) -> AsyncIterator[RunningServer]:
        token_file = tmp_path / "token"
        token_file.write_text("s3cret-token\n")
        async with running_server(ServerConfig(tmp_path, port=0, token_file=token_file)) as server:
            yield server

    @pytest.mark.parametrize("header", [None, "", "s3cret", "Bearer", "Bearer s3cret", "Basic s3cret", "bearer \udcff"])
    async def test_without_it(self, server: RunningServer, header: str | None) -> None:
        headers = b"" if header is None else b"Authorization: " + header.encode("utf-8", "surrogateescape") + b"\r\n"
        for line in (f"GET {OBJECT}", f"PUT {OBJECT}", "GET /metrics", "GET /v1/objects", "POST /v1/lookup", "GET /x"):
            answer = await raw(
                server, line.encode() + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + headers + b"\r\n"
            )
            assert answer.startswith(b"HTTP/1.1 401"), line
            assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"] == "unauthorised"
        answer = await raw(server, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200")


@pytest.mark.process
class TestBodies:
    @pytest.mark.parametrize(("limit", "num_bytes"), [("max_body_bytes", 1_500_000), ("capacity_bytes", 50_000)])
    async def test_too_large(self, tmp_path: Path, limit: str, num_bytes: int) -> None:
        content = b"x" * 2_000_000
        path = f"{wire.Route.OBJECTS}/{data_object(content)}"

        async def unannounced() -> AsyncIterator[bytes]:
            for start in range(0, len(content), 1000):
                yield content[start : start + 1000]

        async with serving(tmp_path, **{limit: num_bytes}) as (server, session):
            for data in (unannounced(), io.BytesIO(content)):
                async with session.put(path, data=data) as response:
                    assert response.status == 413
                    assert await error_of(response) == "request_entity_too_large"
            store = HttpStore(server.url)
            with pytest.raises(StoreError) as caught:
                await store.put(data_object(content), content)
            assert caught.value.reason == "too_large"
            await store.close()
        assert files(tmp_path) == []

    @pytest.mark.parametrize("sent", [0, 10, 1_200_000])
    async def test_an_incomplete_upload_leaves_nothing(self, tmp_path: Path, sent: int) -> None:
        content = b"y" * 3_000_000
        async with serving(tmp_path) as (server, session):
            _, writer = await asyncio.open_connection(server.host, server.port)
            head = (
                f"PUT {wire.Route.OBJECTS}/{data_object(content)} HTTP/1.1\r\nHost: localhost\r\n"
                f"Content-Length: {len(content)}"
            )
            writer.write(head.encode() + b"\r\n\r\n" + content[:sent])
            await writer.drain()
            await until(lambda: are_answered(session, 1))
            writer.close()
            await writer.wait_closed()
            await until(lambda: are_answered(session, 0))
            assert await metric(session, "stored_bytes") == 0
            assert files(tmp_path) == []

    async def test_a_large_body_both_ways(self, tmp_path: Path) -> None:
        content = bytes(range(256)) * (150 << 10)
        async with serving(tmp_path) as (server, _):
            store = HttpStore(server.url)
            name = data_object(content)
            await store.put(name, content)
            assert await store.get(name) == content
            assert await store.get(name, 12345, 20 << 20) == content[12345 : 12345 + (20 << 20)]
            await store.close()


@pytest.mark.process
class TestUploads:
    CONTENT = b"u" * 3_000_000
    PATH = f"{wire.Route.OBJECTS}/{data_object(CONTENT)}"

    async def stall(self, server: RunningServer, sent: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        head = f"PUT {self.PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(self.CONTENT)}\r\n\r\n"
        writer.write(head.encode() + self.CONTENT[:sent])
        await writer.drain()
        return reader, writer

    async def test_stalled_uploads_release_their_reservation(self, tmp_path: Path) -> None:
        # A quarter of the capacity is for data without a manifest.
        clock = LoopClock()
        async with serving(tmp_path, capacity_bytes=92_000_000, idle_timeout_s=60) as (server, session):
            stalled = [await self.stall(server, 1_200_000) for _ in range(7)]
            await until(lambda: len(files(tmp_path)) == 7)
            async with session.put(self.PATH, data=io.BytesIO(self.CONTENT)) as response:
                assert response.status == 507
            for reader, _ in stalled:
                assert (await clock.until_done(reader.readline(), 60)).split()[1] == b"408"
            async with session.put(self.PATH, data=io.BytesIO(self.CONTENT)) as response:
                assert response.status == 201
            for _, writer in stalled:
                await shut(writer)

    async def test_too_many_uploads_are_refused_after_a_wait(self, tmp_path: Path) -> None:
        clock = LoopClock()
        async with serving(tmp_path, max_uploads=2, upload_wait_s=60, idle_timeout_s=1e8) as (server, session):
            stalled = [await self.stall(server, 1000) for _ in range(2)]
            await until(lambda: are_answered(session, 2))
            request = session.put(OBJECT, data=CONTENT, timeout=aiohttp.ClientTimeout())
            async with await clock.until_done(request, 60) as response:
                assert response.status == 503
                assert response.headers["Retry-After"] == "1"
                assert await error_of(response) == "service_unavailable"
            waiting = asyncio.create_task(session.put(OBJECT, data=CONTENT))
            await shut(stalled[0][1])
            async with await waiting as response:
                assert response.status == 201
            await shut(stalled[1][1])


@pytest.mark.process
async def test_manifests_are_read_before_the_server_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = page_hashes(4)
    local = LocalStore(tmp_path)
    await put_segment(local, make_segment(chain, 0, 4))
    await local.close()
    warmed: list[int] = []
    warm_up = LocalStore.warm_up

    async def slow(store: LocalStore) -> int:
        await asyncio.sleep(0.1)
        warmed.append(await warm_up(store))
        return warmed[-1]

    monkeypatch.setattr(LocalStore, "warm_up", slow)
    async with running_server(ServerConfig(tmp_path, port=0)):
        assert warmed == [1]


@pytest.mark.process
async def test_reports_of_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    segment = make_segment(page_hashes(4), 0, 4)
    name = segment.manifest.key.manifest_name
    reported: list[str] = []
    go_on = asyncio.Event()

    async def check(store: LocalStore, manifest_name: str) -> bool:
        reported.append(manifest_name)
        await go_on.wait()
        return True

    monkeypatch.setattr(LocalStore, "report_damage", check)
    async with serving(tmp_path) as (server, session):
        store = HttpStore(server.url)
        checking = [asyncio.create_task(store.report_damage(name)) for _ in range(2)]
        async with asyncio.timeout(WAIT_S):
            while await metric(session, "requests_in_flight") < 2 or len(reported) < 2:
                pass
        assert await store.report_damage(name) is False  # the server is busy
        go_on.set()
        assert await asyncio.gather(*checking) == [True, True]
        assert reported == [name, name]
        async with session.post(f"{wire.Route.CHECK}/nonsense") as response:
            assert response.status == 400
        await store.close()


@pytest.mark.process
async def test_health_says_when_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem: str | None = None
    usage = LocalStore.usage

    async def changed(store: LocalStore) -> StoreUsage:
        return dataclasses.replace(await usage(store), write_problem=problem)

    monkeypatch.setattr(LocalStore, "usage", changed)
    monkeypatch.setattr(application, "_HEALTH_AGE_S", 0.0)
    async with serving(tmp_path) as (_, session):
        for problem, status, writes in ((None, "ok", 200), ("the disk is full", "read_only", 503)):
            for query, expected in (("", 200), ("?write", writes)):
                async with session.get(wire.Route.HEALTH + query) as response:
                    assert response.status == expected
                    assert await response.json() == {"status": status, "write_problem": problem}


@pytest.mark.process
async def test_delete_without_a_prefix_is_refused(session: aiohttp.ClientSession) -> None:
    async with session.delete(wire.Route.OBJECTS) as response:
        assert response.status == 400
    async with session.delete(wire.Route.OBJECTS, params={"prefix": "no such"}) as response:
        assert await response.json() == {"deleted": 0, "more": False}
    async with session.delete(wire.Route.OBJECTS, params={"prefix": ""}) as response:
        assert await response.json() == {"deleted": 1, "more": False}


@pytest.mark.process
class TestLookup:
    async def post(self, session: aiohttp.ClientSession, body: bytes) -> tuple[int, bytes]:
        async with session.post(wire.Route.LOOKUP, data=io.BytesIO(body)) as response:
            return response.status, await response.read()

    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b"\xc1",
            msgspec.msgpack.encode({"namespace": "x", "page_hashes": b""}),
            msgspec.msgpack.encode({"namespace": FOLDER, "page_hashes": b"short"}),
            msgspec.msgpack.encode({"namespace": FOLDER, "page_hashes": "0" * 32}),
            msgspec.msgpack.encode({"namespace": FOLDER, "page_hashes": b"", "more": 1}),
        ],
    )
    async def test_malformed(self, session: aiohttp.ClientSession, body: bytes) -> None:
        assert (await self.post(session, body))[0] == 400

    async def test_too_large(self, session: aiohttp.ClientSession) -> None:
        request = {"namespace": FOLDER, "page_hashes": bytes(wire.MAX_LOOKUP_REQUEST_BYTES)}
        body = msgspec.msgpack.encode(request)
        assert (await self.post(session, body))[0] == 413
        most = bytes(wire.MAX_LOOKUP_PAGES * 32)
        body = msgspec.msgpack.encode({"namespace": FOLDER, "page_hashes": most})
        assert (await self.post(session, body)) == (200, b"\x90")

    async def test_answer_size_is_limited(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        chain = page_hashes(8)
        segments = [make_segment(chain, first, 2) for first in range(0, 8, 2)]
        room = sum(len(segment.manifest.encode()) + 512 for segment in segments[:2])
        monkeypatch.setattr(local, "MAX_LOOKUP_ANSWER_BYTES", room)
        async with serving(tmp_path) as (server, _):
            store = HttpStore(server.url)
            for segment in segments:
                await put_segment(store, segment)
            assert (await store.lookup(FOLDER, chain)).num_pages == 4
            await store.close()


@pytest.mark.process
async def test_metrics(tmp_path: Path) -> None:
    chain = page_hashes(8)
    segment = make_segment(chain, 0, 4)
    async with serving(tmp_path) as (server, session):
        store = HttpStore(server.url)
        await put_segment(store, segment)
        for first, end in ((0, 4), (0, 8), (4, 8)):
            await store.lookup(FOLDER, chain[first:end])
        await store.get(segment.data_name, 0, 100)
        route = wire.Route.OBJECTS + "/{name}"
        assert await metric(session, "requests_total", method="PUT", route=route, status="201") == 2
        assert await metric(session, "requests_total", method="GET", route=route, status="206") == 1
        assert await metric(session, "lookup_pages_total", result="hit") == 8
        assert await metric(session, "lookup_pages_total", result="miss") == 8
        stored = len(segment.data) + len(segment.manifest.encode())
        assert await metric(session, "stored_bytes") == stored
        assert await metric(session, "capacity_bytes") == math.inf
        assert await metric(session, "received_bytes_total") > stored
        assert await metric(session, "sent_bytes_total") > 100
        assert await metric(session, "segments") == 1
        assert await metric(session, "requests_in_flight") == 0  # the one that asks does not count
        async with session.get("/made/up/path") as response:
            assert response.status == 404
        assert await metric(session, "requests_total", route="other") == 1
        await store.close()
        async with serving(tmp_path / "another", capacity_bytes=1 << 20) as (
            _,
            another,
        ):  # each application counts for itself
            assert await metric(another, "lookup_pages_total") == 0
            assert await metric(another, "capacity_bytes") == 1 << 20


@pytest.mark.process
class TestStopping:
    async def test_requests_in_flight_are_finished(self, tmp_path: Path) -> None:
        content = bytes(2_000_000)
        with slow_link(0.04):
            async with serving(tmp_path, grace_s=60) as (server, session):
                store = HttpStore(server.url)
                await store.put(data_object(content), content)
                fetching = asyncio.create_task(store.get(data_object(content)))
                await until(lambda: are_answered(session, 1))
        assert fetching.done()
        assert await fetching == content
        with pytest.raises(StoreError) as caught:
            await store.get(data_object(content))
        assert caught.value.reason == "refused"
        await store.close()

    async def test_requests_in_flight_are_aborted_after_the_grace_period(self, tmp_path: Path) -> None:
        content = bytes(50_000_000)
        loop = asyncio.get_running_loop()
        with slow_link(0.001):  # which takes 400 s
            async with serving(tmp_path, grace_s=0.2) as (server, session):
                store = HttpStore(server.url, options=HttpOptions(max_attempts=1))
                await store.put(data_object(content), content)
                fetching = asyncio.create_task(store.get(data_object(content)))
                await until(lambda: are_answered(session, 1))
                started = loop.time()
        assert loop.time() - started < WAIT_S
        with pytest.raises(StoreError) as caught:
            await fetching
        assert caught.value.reason == "truncated"
        await store.close()
