"""The HTTP client against a server that misbehaves."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, nullcontext
from dataclasses import replace

import msgspec
import pytest
from aiohttp import web

from harness.faults import Fault, FaultyProxy
from harness.small_segments import FOLDER, data_object, make_segment, page_hashes, put_segment
from harness.waiting import WAIT_S
from sgl_kvfetch.errors import ConfigError, StoreError, StoreErrorReason
from sgl_kvfetch.stores import PINS, PROFILES, HttpOptions, SegmentHit, http, wire
from sgl_kvfetch.stores.http import HttpStore
from tests.stores.conformance import failing
from tests.stores.conftest import saying

CONTENT = bytes(range(256)) * 1000
NAME = data_object(CONTENT)
SEGMENT = make_segment(page_hashes(4), 0, 4)
OPTIONS = HttpOptions(timeout_s=WAIT_S, backoff_s=0.01)
DEADLINE_S = 0.5


@pytest.fixture
async def store(proxy: FaultyProxy) -> AsyncIterator[HttpStore]:
    store = HttpStore(proxy.url, options=OPTIONS)
    await store.put(NAME, CONTENT)
    proxy.requests.clear()
    yield store
    await store.close()


async def reason_of(call: Awaitable[object]) -> StoreErrorReason:
    with pytest.raises(StoreError) as caught:
        await asyncio.wait_for(call, WAIT_S)
    return caught.value.reason


@pytest.mark.process
async def test_large_transfers_get_more_time(store: HttpStore, proxy: FaultyProxy, answering: Start) -> None:
    async def slow(request: web.Request) -> web.StreamResponse:
        await request.read()
        await asyncio.sleep(2 * DEADLINE_S)
        return web.Response(status=201)

    await proxy.set(Fault("slow", bytes_per_s=len(CONTENT)))
    writing = await answering(slow)
    for min_bytes_per_s in (1e9, len(CONTENT) / WAIT_S):
        options = HttpOptions(timeout_s=DEADLINE_S, min_bytes_per_s=min_bytes_per_s, max_attempts=1)
        store.options = writing.options = options
        for call in (store.get(NAME, 0, len(CONTENT)), writing.put(NAME, CONTENT)):
            with failing("timeout") if min_bytes_per_s == 1e9 else nullcontext():
                await call
    store.options = replace(options, timeout_s=0.1)
    assert await reason_of(store.get(NAME)) == "timeout"  # nobody knows its size beforehand


async def test_delete_prefix_in_several_requests(answering: Start) -> None:
    """One that never finishes does not keep the client."""
    done, more = b'{"deleted": 2, "more": false}', b'{"deleted": 0, "more": true}'
    answers = [b'{"deleted": 5, "more": true}', done, b'{"deleted": -1, "more": false}', more]

    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.query["prefix"] == "ab"
        return web.Response(body=answers.pop(0) if len(answers) > 1 else more)

    store = await answering(answer)
    assert await store.delete_prefix("ab") == 7
    for _ in range(2):
        assert await reason_of(store.delete_prefix("ab")) == "protocol"


Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
Start = Callable[[Answer], Awaitable[HttpStore]]


@pytest.fixture
async def answering() -> AsyncIterator[Start]:
    """Start clients of a server that answers every request by calling a function."""
    async with AsyncExitStack() as stack:

        async def start(answer: Answer) -> HttpStore:
            runner = web.ServerRunner(web.Server(answer), shutdown_timeout=0.1)  # type: ignore[arg-type]
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            store = HttpStore(f"http://127.0.0.1:{runner.addresses[0][1]}", options=OPTIONS)
            stack.push_async_callback(store.close)
            return store

        yield start


async def test_endless_bodies_are_limited(answering: Start) -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=int(request.headers.get("X-Status", "200")))
        await response.prepare(request)
        while True:
            await response.write(bytes(1 << 16))

    store = await answering(endless)
    store.options = HttpOptions(timeout_s=WAIT_S, max_object_bytes=1 << 20)
    assert await reason_of(store.get(NAME, 1000, 5000)) == "protocol"  # it ignores the range
    assert await reason_of(store.get(NAME)) == "too_large"
    assert await reason_of(store.get(NAME, 5, (1 << 20) + 1)) == "too_large"  # which is not asked for
    assert await reason_of(store.lookup(FOLDER, page_hashes(1))) == "too_large"
    assert await reason_of(anext(aiter(store.list()))) == "protocol"


async def test_long_lookups_are_split(answering: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_LOOKUP_PAGES", 4)
    asked = []

    async def respond(request: web.Request) -> web.StreamResponse:
        lookup = msgspec.msgpack.decode(await request.read(), type=wire.LookupRequest)
        num_pages = len(lookup.page_hashes) // 32
        asked.append(num_pages)
        return web.Response(body=msgspec.msgpack.encode([[b"m", 0, min(num_pages, 4 if len(asked) < 3 else 1)]]))

    store = await answering(respond)
    found = await store.lookup(FOLDER, page_hashes(20))
    assert asked == [4, 4, 4]
    assert found.hits == (SegmentHit(b"m", 0, 4), SegmentHit(b"m", 0, 4), SegmentHit(b"m", 0, 1))


NESTED = b'{"later": ' + b"[" * 3000
INVALID_HITS: list[object] = [
    {"hits": []},
    [[b"m", 0, 2]] * 2,  # four pages, three were asked for
    [[b"m", 0, 0]],
    [[b"m", -1, 1]],
    [["text", 0, 1]],
    [[b"m", 0]],
]
LOOKUPS = [
    b"",
    b"\xc1",
    b"\x91\x94\xc4\x01m\x00\x01" + b"\x91" * 100_000,  # a field that no type knows nests without end
    *map(msgspec.msgpack.encode, INVALID_HITS),
]
LISTINGS = [b"nonsense\n", b'{"name": "../x", "size_bytes": 1, "modified_s": 1}\n', b"{}\n", NESTED + b"\n"]


async def test_invalid_answers(answering: Start) -> None:
    body, status = b"", 200

    async def respond(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, body=body)

    store = await answering(respond)
    for body in LOOKUPS:
        assert await reason_of(store.lookup(FOLDER, page_hashes(3))) == "protocol", body[:50]
    for body in LISTINGS:
        assert await reason_of(anext(aiter(store.list()))) == "protocol", body[:50]
    assert http._http_date_s("Mon, 01 Jan 99999999999 00:00:00 GMT") == 0
    body = b'{"deleted": 1}'
    assert await reason_of(store.report_damage(SEGMENT.manifest.key.manifest_name)) == "protocol"
    body = NESTED
    for status, expected in ((200, "protocol"), (500, "server")):  # noqa: B007, the server answers with it
        for asked in (store.notes(PINS), store.notes(PROFILES), store.folders()):
            assert await reason_of(asked) == expected


@pytest.mark.process
async def test_an_interrupted_listing_raises(store: HttpStore, proxy: FaultyProxy) -> None:
    await put_segment(store, SEGMENT)
    await proxy.set(Fault("close", after_bytes=200))
    with failing("truncated"):
        [info async for info in store.list()]


async def test_bodies_are_not_decompressed(answering: Start) -> None:
    async def bomb(request: web.Request) -> web.StreamResponse:
        assert request.headers["Accept-Encoding"] == "identity"
        return web.Response(body=b"not gzip", headers={"Content-Encoding": "gzip"})

    assert await (await answering(bomb)).get(NAME) == b"not gzip"


def test_bad_tokens_and_options() -> None:
    for token in ("", "a\nb", "ü"):
        with pytest.raises(ConfigError, match="token"):
            HttpStore("http://host", token=token)
    for option, value in (("timeout_s", 0), ("backoff_s", -1)):
        with pytest.raises(ConfigError, match=f"{option} is {value}"):
            HttpOptions(**{option: value})  # type: ignore[arg-type]


HOSTILE = "\x1b[2J\r\nERROR all is lost \x9b\u202e"


@pytest.mark.parametrize(
    "hostile",
    [
        "HTTP/1.1 500 no\r\nContent-Length: 1000\r\n\r\n{}",
        "\x1b[2J nonsense\r\n\r\n",
        "HTTP/1.1 200 OK\r\nBad\x1b[2J header: x\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: \x1b[2J\r\n\r\n",
    ],
)
async def test_a_servers_text_does_not_control_our_log(hostile: str) -> None:
    body = msgspec.json.encode(wire.ErrorBody(HOSTILE, HOSTILE))
    async with saying(hostile.encode().replace(b"1000", b"%d" % len(body)).replace(b"{}", body)) as url:
        store = HttpStore(url, options=HttpOptions(timeout_s=5, max_attempts=1))
        with pytest.raises(StoreError) as caught:
            await store.get(NAME, 5, 10)
        logged = "".join(traceback.format_exception(caught.value))
        assert not [each for each in ("\x1b", "\nERROR", "\x9b") if each in logged]
        await store.close()


@pytest.mark.process
@pytest.mark.parametrize(
    ("status", "reason", "what", "most"),
    [
        (401, "unauthorised", "not by kvfetch", 1),
        (413, "too_large", "client_max_body_size", 1),
        (502, "proxy", "does not reach it", 2),
        (503, "server", "look at the proxy", 4),
        (504, "proxy", "proxy_read_timeout", 2),
    ],
)
@pytest.mark.parametrize("num_bytes", [1000, 1 << 20])  # by aiohttp, and by a socket of our own
async def test_what_a_proxy_answers_to_a_write_names_the_proxy(
    store: HttpStore, proxy: FaultyProxy, status: int, reason: str, what: str, most: int, num_bytes: int
) -> None:
    """And its limit is not met again and again."""
    await proxy.set(Fault("error", status=status))
    content = bytes(num_bytes)
    with failing(reason, what):
        await store.put(data_object(content), content)
    assert len(proxy.requests) == min(most, OPTIONS.max_attempts)
