"""A store in front of a store: what is asked of which, and what is kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from harness.small_segments import FOLDER, expiring, make_segment, page_hashes, parts, put_segment
from harness.waiting import WAIT_S, until
from sgl_kvfetch.directory import FrontStore, LocalStore, front, keeper
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.stores import Lookup, object_digest

CHAIN = page_hashes(64)
SEGMENT = make_segment(CHAIN, 0, 64)
NAME = SEGMENT.data_name
MANIFEST_NAME = SEGMENT.manifest.key.manifest_name
SIZE = len(SEGMENT.data)


class Upstream(LocalStore):
    """A store that waits, damages and counts as a test tells it to."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads: list[tuple[int, int]] = []  # start and length of each that has begun
        self.num_halves = 0
        self.may_read = asyncio.Event()
        self.may_read.set()
        self.flips = False

    async def read(self, name, start, into, received=lambda num_bytes: None) -> bool:  # type: ignore[no-untyped-def]
        self.reads.append((start, sum(map(len, into))))
        data = await self.get(name, start, len(into[0]))
        if data is None:
            return False
        half = len(data) // 2
        if self.flips:
            data = bytes([data[0] ^ 1]) + data[1:]
        into[0][:half] = data[:half]
        received(half)
        self.num_halves += 1
        await self.may_read.wait()
        into[0][half:] = data[half:]
        received(len(data) - half)
        return True

    async def lookup(self, namespace: str, page_hashes: Sequence[bytes]) -> Lookup:
        await self.may_read.wait()
        return await super().lookup(namespace, page_hashes)


@pytest.fixture
async def upstream(tmp_path: Path) -> Upstream:
    return Upstream(tmp_path / "upstream")


@pytest.fixture
def failures() -> list[tuple[str, str]]:
    return []


@pytest.fixture
async def node(tmp_path: Path, upstream: Upstream, failures: list[tuple[str, str]]) -> AsyncIterator[FrontStore]:
    store = FrontStore(tmp_path / "node", upstream, lambda what, error: failures.append((what, error.reason)))
    yield store
    upstream.may_read.set()
    await store.close()


async def passed(node: FrontStore, start: int = 0, length: int = SIZE) -> bytes | None:
    """Return what a reader gets of data that the directory lacks."""
    got = bytearray()

    async def send(piece: memoryview) -> None:
        got.extend(piece)

    return bytes(got) if await node.pass_on(NAME, start, length, send) else None


async def kept(node: FrontStore) -> None:
    """Wait until the segment is found in the directory alone."""

    async def is_kept() -> bool:
        return bool((await LocalStore.lookup_taking(node, FOLDER, CHAIN, lambda size: None)).hits)

    await until(is_kept)


async def test_a_reader_waits_for_its_range_alone_and_no_byte_comes_twice(
    node: FrontStore, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "_QUIET_S", 0.01)
    await put_segment(upstream, SEGMENT)
    assert await passed(node, 100, 50) == SEGMENT.data[100:150]
    assert upstream.reads == [(100, 50)]
    await kept(node)
    assert sorted(upstream.reads) == [(0, 100), (100, 50), (150, SIZE - 150)]
    assert (node.passed_bytes, node.kept_bytes) == (50, SIZE - 50)


async def test_bytes_are_passed_on_as_they_come(node: FrontStore, upstream: Upstream) -> None:
    await put_segment(upstream, SEGMENT)
    upstream.may_read.clear()
    came: list[bytes] = []

    async def send(piece: memoryview) -> None:
        came.append(bytes(piece))
        upstream.may_read.set()

    assert await node.pass_on(NAME, 0, SIZE, send)
    assert (came[0], b"".join(came)) == (SEGMENT.data[: SIZE // 2], SEGMENT.data)


async def test_a_reader_ends_what_is_fetched_behind_others(
    node: FrontStore, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "_QUIET_S", 0.01)
    await put_segment(upstream, SEGMENT)
    await passed(node, 0, 2)
    upstream.may_read.clear()
    await until(lambda: upstream.num_halves == 2)  # half of the rest has come
    reading = asyncio.ensure_future(passed(node, SIZE - 2, 2))
    await until(lambda: len(upstream.reads) == 3)
    upstream.may_read.set()
    assert await reading == SEGMENT.data[-2:]
    await kept(node)
    rest = 2 + (SIZE - 2) // 2  # what had come of the piece was not fetched again
    assert upstream.reads == [(0, 2), (2, SIZE - 2), (SIZE - 2, 2), (rest, SIZE - 2 - rest)]


async def test_what_is_being_kept_is_read(
    node: FrontStore, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "_QUIET_S", WAIT_S)  # nothing is fetched behind readers
    await put_segment(upstream, SEGMENT)
    await passed(node, 0, 1000)

    async def is_on_disk() -> bool:
        return await node._keeper.read(NAME, 0, 1000) is not None

    await until(is_on_disk)
    assert await passed(node, 10, 900) == SEGMENT.data[10:910]
    assert upstream.reads == [(0, 1000)]


@pytest.mark.parametrize("why", ["damaged", "expired", "full disk"])
async def test_what_cannot_be_kept_costs_speed_alone(
    node: FrontStore,
    upstream: Upstream,
    failures: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    why: str,
) -> None:
    await put_segment(upstream, expiring(SEGMENT, 1.0) if why == "expired" else SEGMENT)
    upstream.flips = why == "damaged"
    if why == "full disk":
        monkeypatch.setattr(node._room, "_free_bytes", lambda: 0)
    assert (await passed(node) == SEGMENT.data) == (why != "damaged")  # the reader verifies it
    expected = [] if why == "expired" else ["keep"]
    await until(lambda: not node._keeper._segments and [what for what, _ in failures] == expected)
    assert list(node.root.glob(f"{FOLDER}/*")) == []
    upstream.flips = False
    assert await passed(node) == SEGMENT.data


async def test_what_a_manifest_does_not_name_is_not_kept(node: FrontStore, upstream: Upstream) -> None:
    await put_segment(upstream, SEGMENT)
    with (upstream.root / NAME).open("ab") as file:
        file.write(b"more")
    await passed(node, 0, SIZE + 4)
    await kept(node)


async def test_a_read_that_breaks_off_holds_only_what_came(node: FrontStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node.upstream, "get", lambda name: asyncio.Event().wait())  # the manifest
    with node._keeper.reading(NAME):
        node._keeper.add(NAME, 0, memoryview(bytes(1 << 20))[:100])
    ((_, _, piece),) = node._keeper._segments[MANIFEST_NAME].pieces
    assert len(bytes(piece.obj)) == 100


async def test_readers_undo_no_deletion(node: FrontStore, upstream: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those who come before the upstream has deleted all of it."""
    delete_prefix = upstream.delete_prefix

    async def read_and_delete(prefix: str) -> int:
        await passed(node)
        await kept(node)
        return await delete_prefix(prefix)

    monkeypatch.setattr(upstream, "delete_prefix", read_and_delete)
    await put_segment(upstream, SEGMENT)
    assert await node.delete_prefix("") == 2
    assert parts(await node.lookup(FOLDER, CHAIN)) == []


async def test_the_rest_of_a_prompt_is_looked_up_in_the_upstream(
    node: FrontStore, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = make_segment(CHAIN, 0, 32), make_segment(CHAIN, 32, 32)
    await put_segment(node, first)
    await put_segment(upstream, second)
    assert parts(await node.lookup(FOLDER, CHAIN)) == [(0, 32), (0, 32)]
    with monkeypatch.context() as patch:  # an answer has no more bytes than it may have
        patch.setattr(front, "MAX_LOOKUP_ANSWER_BYTES", len(first.manifest.encode()) + front._HIT_BYTES + 100)
        assert parts(await node.lookup(FOLDER, CHAIN)) == [(0, 32)]
    await put_segment(upstream, SEGMENT)  # merged by another node
    assert parts(await node.lookup(FOLDER, CHAIN)) == [(0, 32), (32, 32)]


async def test_a_lookup_does_not_wait_for_an_upstream_that_hangs(
    node: FrontStore, upstream: Upstream, failures: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front, "_LOOKUP_S", 0.01)
    upstream.may_read.clear()
    assert parts(await node.lookup(FOLDER, CHAIN)) == []
    assert failures == [("lookup", "timeout")]


async def test_a_write_that_the_upstream_refuses_is_not_found(node: FrontStore, upstream: Upstream) -> None:
    await node.put(NAME, SEGMENT.data)
    await upstream.delete(NAME)
    with pytest.raises(StoreError, match="put the data before the manifest"):
        await node.put(MANIFEST_NAME, SEGMENT.manifest.encode())
    assert parts(await node.lookup(FOLDER, CHAIN)) == []


async def test_a_replaced_manifest_is_kept_only_with_its_data(node: FrontStore, upstream: Upstream) -> None:
    await put_segment(node, SEGMENT)
    other = make_segment(CHAIN, 0, 64, content=1)
    for name, data in other.data_objects():
        await upstream.put(name, data)
    digest = object_digest(SEGMENT.manifest.encode())
    assert await node.replace(MANIFEST_NAME, other.manifest.encode(), digest)
    assert await node.get(MANIFEST_NAME) == other.manifest.encode()
    assert parts(await LocalStore.lookup_taking(node, FOLDER, CHAIN, lambda size: None)) == []
    assert not await node.create(MANIFEST_NAME, SEGMENT.manifest.encode())
