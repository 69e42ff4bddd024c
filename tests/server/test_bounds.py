"""Whatever clients send, the server holds a bounded number of bytes, and other requests go on."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.small_segments import FOLDER, head_slice, make_segment, page_hashes, put_segment
from harness.store_process import StoreProcess
from sgl_kvfetch.codec.container.segment import CodedSegment
from sgl_kvfetch.directory import files, local
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.prompts import page_hashes as hashes_of
from sgl_kvfetch.server import app as application, web as pages
from sgl_kvfetch.server.bodies import Budget, Overloaded
from sgl_kvfetch.stores import wire
from tests.server.test_server import metric, raw, serving as serving_root
from tests.server.test_web import get, serving

pytestmark = pytest.mark.process

TOKENS = list(range(8))
HEADERS = "Host: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"


def segments_of(tokens: list[int], *models: str) -> list[CodedSegment]:
    return [make_segment(hashes_of(tokens, 1), 0, len(tokens), model=model) for model in models]


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
    async with serving(tmp_path, *segments) as session:
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


@pytest.mark.parametrize("path", [wire.Route.LOOKUP, f"{wire.Route.NOTES}/pins/{'0' * 64}"])
async def test_bodies_take_memory_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    with_budget(monkeypatch, 100_000)
    async with serving_root(tmp_path) as (server, _):
        method, unknown = ("PUT", 411) if path.startswith(wire.Route.NOTES) else ("POST", 503)
        for length, status in (
            ("Content-Length: 1000000", 503),
            ("Transfer-Encoding: chunked", unknown),
        ):
            request = f"{method} {path} HTTP/1.1\r\n{length}\r\n{HEADERS}\r\n"  # none of the body is sent
            reader, writer = await asyncio.open_connection(server.host, server.port)
            writer.write(request.encode())
            assert (await reader.readline()).startswith(f"HTTP/1.1 {status}".encode())
            writer.close()  # or the server would wait 10 s for the body


async def test_answers_take_memory_until_they_are_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = with_budget(monkeypatch, 10_000)
    async with serving(tmp_path) as session:
        async with session.get(wire.PAGE_PATHS[-1]) as response:
            assert response.status == 503
        assert budget.left_bytes == 10_000


async def test_the_summary_has_short_names_and_few_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_MOST_FOLDERS", 2)
    segments = segments_of(TOKENS, *(str(number) + "\x01" * 2_000 for number in range(3)))
    async with serving(tmp_path, *segments) as session:
        summary = await get(session, wire.Route.SUMMARY)
        assert len(summary["folders"]) == 2
        assert {len(row["model"]) for row in summary["folders"]} == {200}
        shown = await get(session, f"{wire.Route.SEGMENTS}/{segments[0].manifest.key.manifest_name}")
        assert len(shown["model_identity"]) == 200


async def test_an_answer_about_segments_is_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    segment_usages = LocalStore.segment_usages

    async def noted(store: LocalStore, folder: str, limit: int, prefix: str) -> Any:
        asked.append(folder)
        return await segment_usages(store, folder, limit, prefix)

    monkeypatch.setattr(LocalStore, "segment_usages", noted)
    async with serving(tmp_path, make_segment(page_hashes(8), 0, 8)) as session:
        answers = await asyncio.gather(*(get(session, wire.Route.SEGMENTS, folder=FOLDER) for _ in range(20)))
        assert all(answer == answers[0] and len(answer) == 1 for answer in answers)
        assert asked == [FOLDER]
        await get(session, wire.Route.SEGMENTS, status=400, folder="x" * 1000)


async def test_listing_and_deleting_go_through_folders_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_LISTED_AT_ONCE", 2)
    held: list[int] = []
    listed = local.LocalStore._next

    def noted(store: LocalStore, *args: Any) -> Any:
        some = listed(store, *args)
        held.append(len(some))
        return some

    monkeypatch.setattr(LocalStore, "_next", noted)
    store = LocalStore(tmp_path)
    for segment in segments_of(TOKENS, "a", "b", "c"):
        await put_segment(store, segment)
    assert len([info async for info in store.list()]) == 6
    assert max(held) == 2
    assert await store.delete_prefix("") == 6
    await store.close()


async def test_a_store_of_too_many_folders_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "MAX_FOLDERS", 2)
    store = LocalStore(tmp_path)
    for segment in segments_of(TOKENS, "a", "b", "c"):
        await put_segment(store, segment)
    with pytest.raises(StoreError, match="has 3 folders"):
        await store.folders()
    assert len(await store.folders(head_slice("a").namespace.digest())) == 1
    await store.close()


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", wire.Route.LOOKUP, msgspec.msgpack.encode({"namespace": FOLDER + "\n", "page_hashes": b""})),
        ("POST", wire.Route.LOOKUP, b"\x82\xa9namespac\xff\xa0\xabpage_hashes\xc4\x00"),
        ("GET", f"{wire.Route.SEGMENTS}/%ff", None),
        ("GET", f"{wire.Route.SEGMENTS}/%ff.kvm", None),
        ("GET", f"{wire.Route.OBJECTS}/%ff", None),
        ("GET", f"{wire.Route.SEGMENTS}?folder=%ff", None),
        ("DELETE", f"{wire.Route.OBJECTS}?prefix=%ff%00", None),
        ("GET", f"{wire.Route.NOTES}/pins/%ff", None),
        ("GET", f"{wire.Route.NOTES}/pins/{'0' * 64}%0a", None),
    ],
)
async def test_malformed_requests_are_the_client_s_fault(
    tmp_path: Path, method: str, path: str, body: bytes | None
) -> None:
    async with serving_root(tmp_path) as (server, session):
        head = f"{method} {path} HTTP/1.1\r\n{HEADERS}Content-Length: {len(body or b'')}\r\n\r\n"
        answer = await raw(server, head.encode() + (body or b""))
        assert answer.split(b" ", 2)[1][:1] in (b"2", b"4"), answer[:200]
        assert await metric(session, "failures_total") == 0


HOSTS: list[tuple[str, bool]] = [
    ("localhost", True),
    ("LOCALHOST:8700", True),
    ("127.0.0.1:8700", True),
    ("192.0.2.1", True),
    ("[::1]:8700", True),
    ("evil.example", False),
    ("evil.example:8700", False),
    ("localhost.evil.example", False),
    ("127.0.0.1.evil.example", False),
    ("", False),
    ("[::1", False),
]


@pytest.mark.parametrize(("host", "is_known"), HOSTS)
async def test_a_web_page_cannot_reach_a_store_without_tokens_under_its_own_name(
    tmp_path: Path, host: str, is_known: bool
) -> None:
    """As by DNS rebinding. Browsers do not know tokens, and other machines use the store's own name."""

    async def status(**options: Any) -> bytes:
        async with serving_root(tmp_path, **options) as (server, _):
            request = f"DELETE /v1/objects?prefix= HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
            return (await raw(server, request.encode())).split(b" ", 2)[1]

    assert await status() == (b"200" if is_known else b"421")
    assert await status(token="secret") == b"401"


def test_only_its_user_may_enter_a_store_s_directory(tmp_path: Path) -> None:
    root = tmp_path / "new" / "store"
    with StoreProcess(root):
        pass
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
