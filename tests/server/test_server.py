from __future__ import annotations

import asyncio
import io
import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import msgspec
import pytest

from harness.slow_link import slow_link
from harness.small_segments import FOLDER, data_object, make_segment, page_hashes, put_segment
from harness.waiting import WAIT_S, LoopClock, until
from sgl_kvfetch.directory import local
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.server.config import ServerConfig
from sgl_kvfetch.stores import HttpOptions, object_digest, wire
from sgl_kvfetch.stores.http import HttpStore
from tests.server.serving import answer_to, are_answered, connected, error_of, metric, request, serving, status_of
from tests.stores.conformance import BAD_NAMES, failing

pytestmark = pytest.mark.process

CONTENT = bytes(range(200))
OBJECT = f"{wire.Route.OBJECTS}/{data_object(CONTENT)}"


def files(root: Path) -> list[Path]:
    """Return what the store holds, without what the server keeps for itself."""
    every = (path for path in root.rglob("*") if path.is_file())
    return [path for path in every if path.parent.name != ".catalog" and path.name != ".served"]


async def test_ranges(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, session):
        await session.put(OBJECT, data=CONTENT)
        for header, start, end in (
            ("bytes=0-0", 0, 1),
            ("bytes=10-", 10, 200),
            ("bytes=-5", 195, 200),
            ("bytes=-500", 0, 200),
            ("bytes=190-1000", 190, 200),
        ):
            async with session.get(OBJECT, headers={"Range": header}) as response:
                assert response.status == 206, header
                assert response.headers["Content-Range"] == f"bytes {start}-{end - 1}/200"
                assert await response.read() == CONTENT[start:end]
        bad = ("200-", "5-4", "٠-٩", "", "-", "-0", "0-1,5-6", "a-b")
        for header in (*(f"bytes={each}" for each in bad), "lines=1-2", ""):
            async with session.get(OBJECT, headers={"Range": header}) as response:
                assert response.status == 416, header
                assert response.headers["Content-Range"] == "bytes */200"
                assert await error_of(response) == "range"
        async with session.head(OBJECT) as response:
            assert (response.status, response.content_length) == (200, 200)
            assert response.headers["Accept-Ranges"] == "bytes"
            assert "Last-Modified" in response.headers


async def test_statuses(tmp_path: Path) -> None:
    old, new = (make_segment(page_hashes(4), 0, 4, codec=codec) for codec in ("zstd", "deflate"))
    missing = f"{wire.Route.OBJECTS}/{data_object(b'missing')}"
    manifest = f"{wire.Route.OBJECTS}/{new.manifest.key.manifest_name}"
    data, content, zeros = f"{wire.Route.OBJECTS}/{new.data_name}", new.manifest.encode(), "0" * 32
    tag = wire.entity_tag(object_digest(old.manifest.encode()))
    async with serving(tmp_path, old) as (_, session):
        for method, path, body, if_match, status, error in (
            ("GET", missing, None, None, 404, "not_found"),
            ("DELETE", missing, None, None, 404, "not_found"),
            ("GET", "/elsewhere", None, None, 404, "not_found"),
            ("POST", OBJECT, b"", None, 405, "method_not_allowed"),
            ("GET", wire.Route.OBJECTS + "/bad", None, None, 400, "bad_request"),
            ("PUT", wire.Route.OBJECTS + "/bad", b"x", None, 400, "bad_request"),
            ("DELETE", wire.Route.OBJECTS, None, None, 400, "bad_request"),  # without a prefix
            ("PUT", OBJECT, b"not the digest's content", None, 422, "invalid"),
            ("PUT", manifest, b"nonsense", None, 422, "invalid"),
            ("PUT", manifest, content, None, 409, "incomplete"),
            ("PUT", manifest, content, tag, 409, "incomplete"),
            ("PUT", data, new.data, None, 201, ""),
            ("PUT", data, new.data, tag, 400, "bad_request"),
            *(
                ("PUT", manifest, content, bad, 400, "bad_request")
                for bad in ("*", "nonsense", f'"{zeros[1:]}"', f'W/"{zeros}"', f'{tag}, "x"')
            ),
            ("PUT", manifest, content, f'"{zeros}"', 412, "changed"),
            ("PUT", manifest, content, tag, 201, ""),
            ("DELETE", manifest, None, None, 204, ""),
        ):
            headers = {} if if_match is None else {"If-Match": if_match}
            async with session.request(method, path, data=body, headers=headers) as response:
                assert response.status == status, (method, path, if_match)
                assert not error or await error_of(response) == error
        for prefix, deleted in (("no such", 0), ("", 2)):
            async with session.delete(wire.Route.OBJECTS, params={"prefix": prefix}) as response:
                assert await response.json() == {"deleted": deleted, "more": False}


async def test_paths_do_not_escape(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    names = [
        *(name for name in BAD_NAMES if name and "\n" not in name),
        "%2e%2e/%2e%2e/secret",
        "..%2f..%2fsecret",
        "%2Fetc%2Fpasswd",
        "%00",
        f"{'0' * 32}.0-1/%2e%2e/%2e%2e/secret",
    ]
    async with serving(tmp_path / "a" / "root") as (server, _):
        for name in names:
            for method in ("GET", "PUT", "DELETE", "HEAD"):
                line = f"{method} {wire.Route.OBJECTS}/{name}"
                answer = await answer_to(server, line, "Content-Length: 1", body=b"x")
                assert status_of(answer) in (400, 404), line
    assert files(tmp_path) == [tmp_path / "secret"]
    assert (tmp_path / "secret").read_bytes() == b"secret"


@pytest.mark.parametrize(("limit", "num_bytes"), [("max_body_bytes", 1_500_000), ("capacity_bytes", 50_000)])
async def test_too_large_a_body(tmp_path: Path, limit: str, num_bytes: int) -> None:
    content = b"x" * 2_000_000
    path = f"{wire.Route.OBJECTS}/{data_object(content)}"

    async def unannounced() -> AsyncIterator[bytes]:
        for start in range(0, len(content), 1000):
            yield content[start : start + 1000]

    async with serving(tmp_path, **{limit: num_bytes}) as (_, session):
        for data in (unannounced(), io.BytesIO(content)):
            async with session.put(path, data=data) as response:
                assert response.status == 413
                assert await error_of(response) == "request_entity_too_large"
    assert files(tmp_path) == []


UPLOAD = b"u" * 3_000_000
UPLOADED = f"{wire.Route.OBJECTS}/{data_object(UPLOAD)}"
UPLOADING = request(f"PUT {UPLOADED}", f"Content-Length: {len(UPLOAD)}")


async def test_an_incomplete_upload_leaves_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path) as (server, session):
        for sent in (0, 10, 1_200_000):
            async with connected(server, UPLOADING + UPLOAD[:sent]):
                await until(lambda: are_answered(session, 1))
            await until(lambda: are_answered(session, 0))
            assert await metric(session, "stored_bytes") == 0
            assert files(tmp_path) == []


async def test_stalled_uploads_release_their_reservation(tmp_path: Path) -> None:
    # A quarter of the capacity is for data without a manifest.
    clock = LoopClock()
    async with (
        serving(tmp_path, capacity_bytes=92_000_000, idle_timeout_s=60) as (server, session),
        AsyncExitStack() as s,
    ):
        stalled = [await s.enter_async_context(connected(server, UPLOADING + UPLOAD[:1_200_000])) for _ in range(7)]
        await until(lambda: len(files(tmp_path)) == 7)
        async with session.put(UPLOADED, data=io.BytesIO(UPLOAD)) as response:
            assert response.status == 507
        for reader in stalled:
            assert status_of(await clock.until_done(reader.readline(), 60)) == 408
        async with session.put(UPLOADED, data=io.BytesIO(UPLOAD)) as response:
            assert response.status == 201


async def test_too_many_uploads_are_refused_after_a_wait(tmp_path: Path) -> None:
    clock = LoopClock()
    async with (
        serving(tmp_path, max_uploads=2, upload_wait_s=60, idle_timeout_s=1e8) as (server, session),
        connected(server, UPLOADING + UPLOAD[:1000]),
    ):
        async with connected(server, UPLOADING + UPLOAD[:1000]):
            await until(lambda: are_answered(session, 2))
            put = session.put(OBJECT, data=CONTENT, timeout=aiohttp.ClientTimeout())
            async with await clock.until_done(put, 60) as response:
                assert response.status == 503
                assert response.headers["Retry-After"] == "1"
                assert await error_of(response) == "service_unavailable"
            waiting = asyncio.create_task(session.put(OBJECT, data=CONTENT))
        async with await waiting as response:
            assert response.status == 201


async def test_a_lookup_s_sizes_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = page_hashes(8)
    segments = [make_segment(chain, first, 2) for first in range(0, 8, 2)]
    room = sum(len(segment.manifest.encode()) + 512 for segment in segments[:2])
    async with serving(tmp_path, *segments) as (server, session):
        for hashes, expected in (
            (bytes(wire.MAX_LOOKUP_REQUEST_BYTES), (413, None)),
            (bytes(wire.MAX_LOOKUP_PAGES * 32), (200, b"\x90")),
        ):
            body = msgspec.msgpack.encode({"namespace": FOLDER, "page_hashes": hashes})
            async with session.post(wire.Route.LOOKUP, data=io.BytesIO(body)) as response:
                assert response.status == expected[0]
                assert expected[1] in (None, await response.read())
        monkeypatch.setattr(local, "MAX_LOOKUP_ANSWER_BYTES", room)
        store = HttpStore(server.url)
        assert (await store.lookup(FOLDER, chain)).num_pages == 4
        await store.close()


async def test_metrics(tmp_path: Path) -> None:
    chain = page_hashes(8)
    segment = make_segment(chain, 0, 4)
    async with serving(tmp_path) as (server, session):
        store = HttpStore(server.url)
        await put_segment(store, segment)
        for first, end in ((0, 4), (0, 8), (4, 8)):
            await store.lookup(FOLDER, chain[first:end])
        await store.get(segment.data_name, 0, 100)
        stored, route = len(segment.data) + len(segment.manifest.encode()), wire.Route.OBJECTS + "/{name}"
        for expected, name, labels in (
            (2, "requests_total", {"method": "PUT", "route": route, "status": "201"}),
            (1, "requests_total", {"method": "GET", "route": route, "status": "206"}),
            (8, "lookup_pages_total", {"result": "hit"}),
            (8, "lookup_pages_total", {"result": "miss"}),
            (stored, "stored_bytes", {}),
            (math.inf, "capacity_bytes", {}),
            (1, "segments", {}),
            (0, "requests_in_flight", {}),  # the one that asks does not count
        ):
            assert await metric(session, name, **labels) == expected
        assert await metric(session, "received_bytes_total") > stored
        assert await metric(session, "sent_bytes_total") > 100
        async with session.get("/made/up/path") as response:
            assert response.status == 404
        assert await metric(session, "requests_total", route="other") == 1
        await store.close()


@pytest.mark.parametrize(("num_bytes", "gbps", "grace_s"), [(2_000_000, 0.04, 60), (50_000_000, 0.001, 0.2)])
async def test_a_server_that_stops_finishes_what_it_can_within_the_grace_period(
    tmp_path: Path, num_bytes: int, gbps: float, grace_s: float
) -> None:
    """The second answer would take 400 s."""
    content, loop = bytes(range(250)) * (num_bytes // 250), asyncio.get_running_loop()
    with slow_link(gbps):
        async with serving(tmp_path, grace_s=grace_s) as (server, session):
            store = HttpStore(server.url, options=HttpOptions(max_attempts=1))
            await store.put(data_object(content), content)
            fetching = asyncio.create_task(store.get(data_object(content)))
            await until(lambda: are_answered(session, 1))
            started = loop.time()
    assert loop.time() - started < WAIT_S
    if grace_s == 60:
        assert fetching.done()
        assert await fetching == content
    else:
        with failing("truncated"):
            await fetching
    with failing("refused"):
        await store.get(data_object(content))
    await store.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "store.example", ""])
def test_a_public_host_needs_a_token_or_insecure(host: str) -> None:
    with pytest.raises(ConfigError, match="no token"):
        ServerConfig(Path(), host=host)
    for enough in ({"token": "t"}, {"token_file": Path("token")}, {"insecure": True}):
        ServerConfig(Path(), host=host, **enough)
    for loopback in ("127.0.0.1", "127.0.0.2", "::1", "localhost"):
        ServerConfig(Path(), host=loopback)


POSITIVE = "capacity_bytes", "max_body_bytes", "max_uploads", "max_connections", "idle_timeout_s", "orphan_age_s"
WRONG = [("port", -1), ("port", 65536), ("upload_wait_s", -1), ("grace_s", -1), *((option, 0) for option in POSITIVE)]


@pytest.mark.parametrize(("option", "value"), WRONG)
def test_bad_values_are_named(option: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{option} is {value}"):
        ServerConfig(Path(), **{option: value})  # type: ignore[arg-type]
