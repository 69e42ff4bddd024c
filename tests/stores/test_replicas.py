"""Replicas, and a single store with stalling reads, over real sockets."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from harness.faults import Fault, FaultyProxy
from harness.slow_link import slow_link
from harness.small_segments import FOLDER, data_object, make_segment, page_hashes, parts, put_segment
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.errors import ConfigError, StoreError
from sgl_kvfetch.plane.open import open_replicas
from sgl_kvfetch.server import ServerConfig
from sgl_kvfetch.server.run import RunningServer, running_server
from sgl_kvfetch.stores import replicas as replicas_module
from sgl_kvfetch.stores.base import Store
from sgl_kvfetch.stores.http import HttpOptions, HttpStore
from sgl_kvfetch.stores.replicas import ReplicaOptions, ReplicatedStore

CONTENT = random.Random(0).randbytes(1 << 21)
NAME = data_object(CONTENT)
CHAIN = page_hashes(4)
SEGMENT = make_segment(CHAIN, 0, 4)
DEADLINE_S = 10.0
SOON_S = 2.0  # far below the deadline, and far above what a second request takes


class Client:
    """A replicated store that records the events it reports."""

    def __init__(self, urls: list[str], max_reads: int = 8, max_races: int = 4) -> None:
        self.races: Counter[tuple[str, str]] = Counter()
        self.failures: list[tuple[str, str]] = []
        self.store = open_replicas(
            urls,
            options=HttpOptions(timeout_s=DEADLINE_S, backoff_s=0.01, max_connections=max_reads),
            replicas=ReplicaOptions(
                max_races=max_races,
                on_race=lambda kind, result: self.races.update([(kind, result)]),
                on_failure=lambda replica, error: self.failures.append((replica, error.reason)),
            ),
        )

    async def read(self, start: int = 0, length: int = len(CONTENT)) -> float:
        """Read and return the duration in seconds."""
        began_s = time.monotonic()
        assert await self.store.get(NAME, start, length) == CONTENT[start : start + length]
        return time.monotonic() - began_s

    async def look_up(self) -> float:
        began_s = time.monotonic()
        assert parts(await self.store.lookup(FOLDER, CHAIN)) == [(0, 4)]
        return time.monotonic() - began_s


MakeClient = Callable[..., Client]


@pytest.fixture
async def make_client() -> AsyncIterator[MakeClient]:
    made: list[Client] = []

    def make(*urls: str, **options: int) -> Client:
        made.append(Client(list(urls), **options))
        return made[-1]

    yield make
    for client in made:
        await client.store.close()


@pytest.fixture
async def filled(server: RunningServer) -> RunningServer:
    store = HttpStore(server.url)
    await store.put(NAME, CONTENT)
    await put_segment(store, SEGMENT)
    await store.close()
    return server


@pytest.fixture
async def other(filled: RunningServer) -> AsyncIterator[FaultyProxy]:
    """A second proxy to the same objects, as a replica."""
    async with FaultyProxy(filled.host, filled.port) as proxy:
        yield proxy


STALLS = [Fault("hang", times=1), Fault("stall", after_bytes=300_000, times=1)]


@pytest.mark.parametrize("fault", STALLS, ids=lambda fault: fault.kind)
async def test_a_stalled_read_is_hedged_on_another_connection(
    filled: RunningServer, proxy: FaultyProxy, make_client: MakeClient, fault: Fault
) -> None:
    client = make_client(proxy.url)
    await proxy.set(fault)
    assert await client.read(1000, 900_000) < SOON_S
    assert client.races == {("read", "won"): 1}
    assert len(proxy.requests) == 2


async def test_the_second_request_asks_only_for_missing_bytes(
    filled: RunningServer, proxy: FaultyProxy, other: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int, int]] = []
    read = HttpStore.read

    async def note_and_read(self: HttpStore, name: str, start: int, length: int, take: Callable[[bytes], None]) -> bool:
        asked.append((self.url, start, length))
        return await read(self, name, start, length, take)

    monkeypatch.setattr(HttpStore, "read", note_and_read)
    client = Client([proxy.url, other.url])
    await proxy.set(Fault("stall", after_bytes=300_000, times=1))
    await client.read(1000, 900_000)
    await client.store.close()
    assert asked == [(proxy.url, 1000, 900_000), (other.url, 301_000, 600_000)]


@pytest.mark.parametrize("fault", STALLS, ids=lambda fault: fault.kind)
async def test_all_reads_move_away_from_a_hanging_replica(
    proxy: FaultyProxy, other: FaultyProxy, make_client: MakeClient, fault: Fault
) -> None:
    """There are more reads than the limit of concurrent second requests."""
    client = make_client(proxy.url, other.url, max_reads=16)
    await proxy.set(Fault(fault.kind, after_bytes=fault.after_bytes))
    took_s = await asyncio.gather(*(client.read() for _ in range(16)))
    assert max(took_s) < 2 * SOON_S
    assert client.races["read", "won"] < 16  # once it is known to hang, the others need no race
    num_asked = len(proxy.requests)
    await client.read()
    assert len(proxy.requests) == num_asked  # it is left alone


@pytest.mark.parametrize(
    "fault", [Fault("refuse"), Fault("error", status=500), Fault("hang")], ids=lambda fault: fault.kind
)
async def test_a_dead_replica_costs_little_time_and_is_skipped(
    proxy: FaultyProxy, other: FaultyProxy, make_client: MakeClient, fault: Fault
) -> None:
    client = make_client(proxy.url, other.url)
    await proxy.set(fault)
    assert await client.look_up() < SOON_S
    assert await client.read() < SOON_S
    num_asked = len(proxy.requests)
    assert num_asked == 0 or fault.kind != "refuse"
    await client.look_up()
    await client.read()
    assert len(proxy.requests) == num_asked


async def test_a_replica_that_dies_in_mid_body(proxy: FaultyProxy, other: FaultyProxy, make_client: MakeClient) -> None:
    client = make_client(proxy.url, other.url)
    await proxy.set(Fault("slow", bytes_per_s=1e6))
    reading = asyncio.create_task(client.read())
    await asyncio.sleep(0.4)
    await proxy.set(Fault("refuse"))
    assert await reading < SOON_S
    assert client.failures == [(proxy.url, "refused")]
    assert client.races == {}


async def test_a_slow_trickling_read_is_hedged(
    filled: RunningServer, proxy: FaultyProxy, make_client: MakeClient
) -> None:
    client = make_client(proxy.url)
    for _ in range(10):
        await client.read()
    await proxy.set(Fault("slow", bytes_per_s=5e5, times=1))  # never silent for long; 4 s in all
    assert 1.0 < await client.read() < 3.5
    assert client.races == {("read", "won"): 1}


@pytest.mark.parametrize("gone_s", [0.0, 3.0])
async def test_hedging_adds_little_load_to_a_shared_or_dead_link(
    tmp_path: Path, make_client: MakeClient, gone_s: float
) -> None:
    num_reads, link_bytes_per_s = 24, 8e6
    with slow_link(8 * link_bytes_per_s / 1e9):
        async with (
            running_server(ServerConfig(tmp_path, port=0)) as server,
            FaultyProxy(server.host, server.port) as proxy,
        ):
            await LocalStore(tmp_path).put(NAME, CONTENT)
            client = make_client(proxy.url)
            began_s = time.monotonic()
            reads = [asyncio.create_task(client.read(0, 1 << 19)) for _ in range(num_reads)]
            await asyncio.sleep(0.4)
            if gone_s:
                proxy.cut()
                await asyncio.sleep(gone_s)
                proxy.mend()
            await asyncio.gather(*reads)
            assert time.monotonic() - began_s < gone_s + 2 * num_reads * (1 << 19) / link_bytes_per_s
            assert len(proxy.requests) <= num_reads + 4 + num_reads // 10


async def test_a_read_ends_by_its_deadline_whatever_hangs(
    proxy: FaultyProxy, other: FaultyProxy, make_client: MakeClient
) -> None:
    client = make_client(proxy.url, other.url)
    for hanging in (proxy, other):
        await hanging.set(Fault("hang"))
    before = asyncio.all_tasks()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await client.read()
    left = {
        task for task in asyncio.all_tasks() - before if "ReplicatedStore" in repr(task) or "HttpStore" in repr(task)
    }
    assert left == set()
    await proxy.set(None)
    await other.set(None)
    assert await client.read() < SOON_S


async def test_without_hedging_a_stall_lasts_until_the_deadline(
    filled: RunningServer, proxy: FaultyProxy, make_client: MakeClient
) -> None:
    client = make_client(proxy.url, max_races=0)
    await proxy.set(Fault("hang", times=1))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.2):
            await client.read()
    assert client.races == {("read", "refused"): 1}


async def test_an_object_missing_in_one_replica_is_read_from_another(
    proxy: FaultyProxy, make_client: MakeClient, filled: RunningServer, tmp_path: Path
) -> None:
    async with running_server(ServerConfig(tmp_path / "empty", port=0)) as empty:
        client = make_client(empty.url, filled.url)
        await client.read()
        assert await client.store.get(NAME) == CONTENT
        assert await client.store.get(data_object(b"never put"), 0, 5) is None
        assert client.failures == []


async def test_if_all_replicas_fail_the_first_error_is_raised(
    proxy: FaultyProxy, other: FaultyProxy, make_client: MakeClient
) -> None:
    client = make_client(proxy.url, other.url)
    await proxy.set(Fault("error", status=401))
    await other.set(Fault("refuse"))
    for call in (client.store.get(NAME, 0, 10), client.store.get(NAME), client.store.put(NAME, CONTENT)):
        with pytest.raises(StoreError) as caught:
            await call
        assert caught.value.reason == "unauthorised"


# Writing


class Flaky(LocalStore):
    """Fails or hangs on request."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reason: str | None = None
        self.puts: list[str] = []

    async def folders(self, digest: str = "") -> frozenset[str]:
        if self.reason == "hang":
            await asyncio.Event().wait()
        if self.reason is not None:
            raise StoreError("server", "told to fail", retriable=True)
        return await super().folders(digest)

    async def put(self, name: str, data: bytes) -> None:
        self.puts.append(name)
        if self.reason == "hang":
            await asyncio.Event().wait()
        if self.reason is not None:
            raise StoreError("server", "told to fail", retriable=True)
        await super().put(name, data)


class Pair:
    def __init__(self, root: Path) -> None:
        self.first, self.second = Flaky(root / "first"), Flaky(root / "second")
        self.failures: list[tuple[str, str]] = []
        options = ReplicaOptions(on_failure=lambda replica, error: self.failures.append((replica, error.reason)))
        self.store = ReplicatedStore([("first", self.first), ("second", self.second)], options)


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    pair = Pair(tmp_path)
    yield pair
    await pair.store.close()


async def has(store: Store) -> bool:
    return parts(await store.lookup(FOLDER, CHAIN)) == [(0, 4)]


async def test_writes_reach_all_replicas_that_are_up(pair: Pair) -> None:
    await put_segment(pair.store, SEGMENT)
    assert await has(pair.first)
    assert await has(pair.second)
    pair.first.reason = "fail"
    another = make_segment(page_hashes(4, "another"), 0, 4)
    await put_segment(pair.store, another)
    assert await pair.second.get(another.data_name) == another.data
    assert pair.failures == [("first", "server")]


async def test_the_folders_of_all_replicas_that_answer_are_listed(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica may have been down when others got a folder, and clearing must reach them all."""
    monkeypatch.setattr(replicas_module, "_WRITE_GRACE_S", 0.1)
    await put_segment(pair.second, SEGMENT)
    assert await pair.store.folders() == {FOLDER}
    for reason in ("hang", "fail"):
        pair.first.reason = reason
        assert await pair.store.folders() == {FOLDER}
    pair.second.reason = "fail"
    with pytest.raises(StoreError, match="told to fail"):
        await pair.store.folders()


async def test_a_manifest_goes_only_where_its_data_went(pair: Pair) -> None:
    manifest_name, manifest = SEGMENT.manifest.key.manifest_name, SEGMENT.manifest.encode()
    pair.first.reason = "fail"
    await pair.store.put(SEGMENT.data_name, SEGMENT.data)
    pair.first.reason = None
    await pair.store.put(manifest_name, manifest)
    assert pair.first.puts == [SEGMENT.data_name]
    assert await has(pair.second)
    await put_segment(pair.store, SEGMENT)  # written again, it is whole everywhere
    assert await has(pair.first)


async def test_a_replica_that_keeps_failing_is_skipped_by_writes(pair: Pair) -> None:
    pair.second.reason = "fail"
    for _ in range(5):
        await pair.store.put(NAME, CONTENT)
    assert len(pair.second.puts) == 3


async def test_a_hanging_replica_does_not_block_writes(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas_module, "_WRITE_GRACE_S", 0.1)
    pair.second.reason = "hang"
    async with asyncio.timeout(SOON_S):
        await pair.store.put(NAME, CONTENT)
    assert pair.failures == [("second", "timeout")]


async def test_a_write_fails_if_no_replica_stores_it(pair: Pair) -> None:
    pair.first.reason = pair.second.reason = "fail"
    with pytest.raises(StoreError, match="told to fail"):
        await pair.store.put(SEGMENT.data_name, SEGMENT.data)
    pair.first.reason = pair.second.reason = None
    with pytest.raises(StoreError, match="went to no replica completely"):
        await pair.store.put(SEGMENT.manifest.key.manifest_name, SEGMENT.manifest.encode())


async def test_damage_is_reported_to_all_replicas_and_each_judges_for_itself(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any of them may have sent the damaged bytes."""
    asked: list[Store] = []

    async def report_damage(self: Flaky, manifest_name: str) -> bool:
        asked.append(self)
        return self is pair.second and await self.delete(manifest_name)

    monkeypatch.setattr(Flaky, "report_damage", report_damage)
    await put_segment(pair.store, SEGMENT)
    assert await pair.store.report_damage(SEGMENT.manifest.key.manifest_name)
    assert asked == [pair.first, pair.second]
    assert await has(pair.first)
    assert not await has(pair.second)
    assert not await pair.store.report_damage(SEGMENT.manifest.key.manifest_name)


async def test_delete_reports_the_unreachable_replica(
    proxy: FaultyProxy, other: FaultyProxy, make_client: MakeClient
) -> None:
    client = make_client(proxy.url, other.url)
    await proxy.set(Fault("refuse"))
    with pytest.raises(StoreError) as caught:
        await client.store.delete(NAME)
    assert caught.value.reason == "refused"
    assert await client.store.get(NAME) is None


def test_urls_of_replicas() -> None:
    def make(*urls: str, token: str | None = None) -> Store:
        return open_replicas(urls, token=token, options=HttpOptions(), replicas=ReplicaOptions())

    assert isinstance(make("file:///var/cache/kv"), LocalStore)
    assert isinstance(make("http://one"), ReplicatedStore)
    assert isinstance(make("http://one", "file:///two", token="t"), ReplicatedStore)
    with pytest.raises(ConfigError, match="at least one"):
        make()
    with pytest.raises(ConfigError, match="a token is for http"):
        make("file:///one", "file:///two", token="t")
    with pytest.raises(ConfigError, match="use http"):
        make("http://one", "gs://two")
