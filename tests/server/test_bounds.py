"""Whatever clients send, the server holds a bounded number of bytes, and other requests go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.small_segments import FOLDER, head_slice, make_segment, page_hashes, put_segment
from sgl_kvfetch.codec import CodedSegment
from sgl_kvfetch.directory import LocalStore, files, local
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.server import app as application
from sgl_kvfetch.server.bodies import Budget, Overloaded
from sgl_kvfetch.stores import wire
from tests.segments import names
from tests.server.serving import answer_to, connected, metric, request, serving, status_of

pytestmark = pytest.mark.process


def segments_of(*models: str) -> list[CodedSegment]:
    return [make_segment(page_hashes(8), 0, 8, model=model) for model in models]


def with_budget(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> Budget:
    budget = Budget(num_bytes)
    monkeypatch.setattr(application, "Budget", lambda: budget)
    return budget


def test_a_request_gets_at_most_half_of_what_is_left() -> None:
    budget = Budget(1000)
    with budget.account() as one, budget.account() as other:
        one.take(500)
        with pytest.raises(Overloaded):
            other.take(251)
        other.take(250)
        assert budget.left_bytes == 250
    assert budget.left_bytes == 1000
    with pytest.raises(Overloaded):
        one.take(1)  # a thread that goes on after its request


async def test_a_lookup_takes_memory_before_it_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = page_hashes(8)
    segments = [make_segment(chain, first, 2) for first in range(0, 8, 2)]
    size = sum(len(segment.manifest.encode()) for segment in segments)
    read: list[str] = []
    read_object = files.read_object

    def noted(root: Path, name: str, most: int) -> bytes | None:
        read.append(name)
        return read_object(root, name, most)

    budget = with_budget(monkeypatch, size)
    body = msgspec.msgpack.encode({"namespace": FOLDER, "page_hashes": b"".join(chain)})
    async with serving(tmp_path, *segments) as (_, session):
        monkeypatch.setattr(files, "read_object", noted)
        async with session.post(wire.Route.LOOKUP, data=body) as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "1"
        assert read == []
        assert budget.left_bytes == size
        budget.left_bytes = 1 << 20
        assert await metric(session, "failures_total", cause="memory") == 1
        async with session.post(wire.Route.LOOKUP, data=body) as response:
            assert len(msgspec.msgpack.decode(await response.read())) == 4
        assert len(read) == 4
    assert budget.left_bytes == 1 << 20


async def test_bodies_take_memory_before_they_are_read_and_answers_until_they_are_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = with_budget(monkeypatch, 10_000)
    async with serving(tmp_path) as (server, session):
        for line, unannounced in ((f"POST {wire.Route.LOOKUP}", 503), (f"PUT {wire.Route.NOTES}/pins/{'0' * 64}", 411)):
            for length, status in (("Content-Length: 1000000", 503), ("Transfer-Encoding: chunked", unannounced)):
                sent = request(line, length, "Content-Type: application/json")  # and none of the body
                async with connected(server, sent) as reader:
                    assert status_of(await reader.readline()) == status
        async with session.get(wire.PAGE_PATHS[-1]) as response:
            assert response.status == 503
        assert budget.left_bytes == 10_000


async def test_listing_and_deleting_go_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_LISTED_AT_ONCE", 2)
    store = LocalStore(tmp_path)
    for segment in segments_of("a", "b", "c"):
        await put_segment(store, segment)
    assert len(await names(store)) == 6
    monkeypatch.setattr(local, "MAX_FOLDERS", 2)
    with pytest.raises(StoreError, match="has 3 folders"):
        await store.folders()
    assert len(await store.folders(head_slice("a").namespace.digest())) == 1
    assert await store.delete_prefix("") == 6
    await store.close()


LOOKUP, SEGMENTS, OBJECTS, NOTES = wire.Route.LOOKUP, wire.Route.SEGMENTS, wire.Route.OBJECTS, wire.Route.NOTES
NOT_UTF8 = b"\x82\xa9namespace\xa4\xff\xff\xff\xff\xabpage_hashes\xc4\x00"
LOOKUPS: list[dict[str, Any]] = [
    *({"namespace": name, "page_hashes": b""} for name in ("x", FOLDER + "\n")),
    *({"namespace": FOLDER, "page_hashes": hashes} for hashes in (b"short", "0" * 32)),
    {"namespace": FOLDER, "page_hashes": b"", "more": 1},
]


async def test_malformed_requests_are_the_client_s_fault(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(tmp_path) as (server, session):
        caplog.clear()
        bodies = (
            b"",
            b"\xc1",
            NOT_UTF8,
            NOT_UTF8.replace(b"namespace\xa4", b"namespac\xff\xa0"),
            *map(msgspec.msgpack.encode, LOOKUPS),
        )
        for body in bodies:
            for headers in ((), ("Content-Encoding: gzip",)):
                length = f"Content-Length: {len(body)}"
                assert status_of(await answer_to(server, f"POST {LOOKUP}", length, *headers, body=body)) == 400, body
        lines = [f"GET {SEGMENTS}/%ff", f"GET {SEGMENTS}/%ff.kvm", f"GET {OBJECTS}/%ff", f"GET {SEGMENTS}?folder=%ff"]
        lines += [f"DELETE {OBJECTS}?prefix=%ff%00", f"GET {NOTES}/pins/%ff", f"GET {NOTES}/pins/{'0' * 64}%0a"]
        found = [status_of(await answer_to(server, line)) for line in lines]
        assert found == [404, 422, 400, 400, 200, 422, 404]
        assert await metric(session, "failures_total") == 0
    assert caplog.records == []


HOSTS = {
    **dict.fromkeys(("localhost", "LOCALHOST:8700", "127.0.0.1:8700", "192.0.2.1", "[::1]:8700"), 200),
    **dict.fromkeys(("evil.example", "evil.example:8700", "localhost.evil.example", "127.0.0.1.evil.example"), 421),
    **dict.fromkeys(("", "[::1"), 421),
}


async def test_a_web_page_cannot_reach_a_store_without_tokens_under_its_own_name(tmp_path: Path) -> None:
    """As by DNS rebinding. Browsers do not know tokens, and other machines use the store's own name."""
    async with serving(tmp_path / "open") as (anybodys, _), serving(tmp_path / "closed", token="secret") as (closed, _):
        for host, status in HOSTS.items():
            for server, expected in ((anybodys, status), (closed, 401)):
                assert status_of(await answer_to(server, f"DELETE {OBJECTS}?prefix=", host=host)) == expected, host
