"""Hedged calls: with scripted requests, and of a store over real sockets."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from harness.faults import Fault, FaultyProxy
from harness.metrics import read_metric
from harness.slow_link import slow_link
from harness.small_segments import FOLDER, data_object, make_segment, page_hashes, parts, put_segment
from harness.waiting import WAIT_S, TimerClock, until
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.server.config import ServerConfig
from sgl_kvfetch.server.run import RunningServer, running_server
from sgl_kvfetch.stores.hedged import (
    MAX_HEDGES,
    Attempt,
    HedgeBudget,
    HedgedCall,
    HedgedStore,
    HedgeResult,
    HedgeWatch,
    Usual,
)
from sgl_kvfetch.stores.http import HttpStore
from sgl_kvfetch.stores.remote import HttpOptions
from sgl_kvfetch.stores.wire import Route

SILENCE_S = 0.04
Request = Callable[[Attempt], Awaitable[bool]]


@dataclass
class Rig:
    """A call whose n-th request runs the script ``requests[n]``."""

    requests: list[Request]
    num_bytes: int = 100
    budget: HedgeBudget = field(default_factory=lambda: HedgeBudget(1))
    hedges: list[HedgeResult] = field(default_factory=list)
    asked: list[Attempt] = field(default_factory=list)
    second_asked: asyncio.Event = field(default_factory=asyncio.Event)
    num_cancelled: int = 0
    clock: TimerClock = field(default_factory=TimerClock)

    async def run(self) -> int | None:
        """Return how many bytes the request that answered has, with those before it."""

        async def ask(attempt: Attempt) -> int | None:
            self.asked.append(attempt)
            if len(self.asked) == 2:
                self.second_asked.set()
            try:
                found = await self.requests[len(self.asked) - 1](attempt)
            except asyncio.CancelledError:
                self.num_cancelled += 1
                raise
            return attempt.num_bytes if found else None

        watch = HedgeWatch(
            self.budget,
            Usual(1.0, 0.5, least=SILENCE_S, most=SILENCE_S, at_first=SILENCE_S),
            Usual(1.0, 0.5, least=0.0, most=float("inf"), at_first=float("inf")),
            self.hedges.append,
        )
        async with asyncio.timeout(100 * SILENCE_S):
            return await HedgedCall(watch, ask, self.num_bytes).run()

    async def fail_when_hedged(self, attempt: Attempt) -> bool:
        await self.second_asked.wait()
        return await fail(attempt)


async def hang(attempt: Attempt) -> bool:
    await asyncio.Event().wait()
    return True


async def missing(attempt: Attempt) -> bool:
    return False


async def fail(attempt: Attempt) -> bool:
    raise StoreError("server", "told to fail", retriable=True)


async def deliver(attempt: Attempt) -> bool:
    attempt.take(100 - attempt.num_bytes)
    return True


def after(wait_s: float, then: Request) -> Request:
    async def request(attempt: Attempt) -> bool:
        await asyncio.sleep(wait_s)
        return await then(attempt)

    return request


def bring(num_bytes: int, then: Request) -> Request:
    async def request(attempt: Attempt) -> bool:
        attempt.take(num_bytes)
        return await then(attempt)

    return request


async def test_an_answer_in_time_needs_one_request() -> None:
    rig = Rig([bring(30, deliver)])
    assert await rig.run() == 100
    assert rig.hedges == []


async def test_a_stalled_read_is_hedged_for_the_missing_bytes() -> None:
    rig = Rig([bring(30, hang), deliver])
    assert await rig.run() == 100
    assert rig.asked[1].num_inherited == 30
    assert (rig.hedges, rig.num_cancelled) == (["won"], 1)
    assert rig.budget.try_begin()  # it was worth it


async def test_second_request_ends_when_the_first_resumes() -> None:
    rig = Rig([after(3 * SILENCE_S, bring(30, after(3 * SILENCE_S, deliver))), hang, hang])
    assert await rig.run() == 100
    assert rig.hedges[0] == "lost"
    assert not rig.budget.try_begin()


async def test_a_second_request_that_wins_narrowly_is_not_worth_it() -> None:
    rig = Rig([after(2 * SILENCE_S, bring(80, hang)), bring(10, after(1.5 * SILENCE_S, deliver))])
    assert await rig.run() == 100
    assert rig.hedges == ["won"]
    assert not rig.budget.try_begin()


async def test_a_call_makes_at_most_three_second_requests() -> None:
    rig = Rig([hang] * 4, budget=HedgeBudget(10))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(20 * SILENCE_S):
            await rig.run()
    assert len(rig.asked) == rig.num_cancelled == 4
    assert rig.hedges == ["lost", "lost", "lost", "refused"]


async def test_an_error_of_one_request_leaves_the_other_running() -> None:
    rig = Rig([bring(30, after(2 * SILENCE_S, fail)), after(2 * SILENCE_S, deliver)])
    assert await rig.run() == 100
    assert rig.hedges == ["won"]
    rig = Rig([after(3 * SILENCE_S, deliver), fail])
    assert await rig.run() == 100
    assert rig.hedges == ["failed"]


async def test_after_an_error_no_more_requests_are_made() -> None:
    rig = Rig([], budget=HedgeBudget(10))
    rig.requests = [rig.fail_when_hedged, after(4 * SILENCE_S, deliver)]
    assert await rig.run() == 100
    assert rig.hedges == ["won"]
    rig = Rig([bring(30, fail)])
    with pytest.raises(StoreError, match="told to fail"):
        await rig.run()
    assert (len(rig.asked), rig.hedges) == (1, [])


async def test_the_first_error_is_raised_if_both_requests_fail() -> None:
    async def fail_otherwise(attempt: Attempt) -> bool:
        raise StoreError("server", "failed later", retriable=True)

    rig = Rig([])
    rig.requests = [rig.fail_when_hedged, after(SILENCE_S, fail_otherwise)]
    with pytest.raises(StoreError, match="told to fail"):
        await rig.run()
    assert rig.hedges == ["won"]


async def test_a_missing_object_is_an_answer() -> None:
    assert await Rig([missing]).run() is None
    rig = Rig([hang, missing])
    assert await rig.run() is None
    assert (rig.num_cancelled, rig.hedges) == (1, ["won"])


# Over real sockets

CONTENT = random.Random(0).randbytes(1 << 21)
NAME = data_object(CONTENT)
CHAIN = page_hashes(4)
SEGMENT = make_segment(CHAIN, 0, 4)
DEADLINE_S = WAIT_S
SOON_S = 60.0  # far below the deadline, and far above what a second request takes


class Client:
    """A store with hedged reads that records their results."""

    def __init__(self, url: str, max_hedges: int = MAX_HEDGES) -> None:
        self.hedges: Counter[tuple[str, str]] = Counter()
        options = HttpOptions(timeout_s=DEADLINE_S, backoff_s=0.01, max_connections=16)
        self.store = HedgedStore(
            HttpStore(url, options=options),
            8,
            max_hedges,
            on_hedge=lambda kind, result: self.hedges.update([(kind, result)]),
        )

    async def read(self, start: int = 0, length: int = len(CONTENT)) -> float:
        """Read and return the duration in seconds."""
        began_s = time.monotonic()
        assert await self.store.get(NAME, start, length) == CONTENT[start : start + length]
        return time.monotonic() - began_s


MakeClient = Callable[..., Client]


@pytest.fixture
async def make_client() -> AsyncIterator[MakeClient]:
    made: list[Client] = []

    def make(url: str, **options: int) -> Client:
        made.append(Client(url, **options))
        return made[-1]

    yield make
    for client in made:
        await client.store.close()


@pytest.fixture
async def filled(server: RunningServer) -> None:
    store = HttpStore(server.url)
    await store.put(NAME, CONTENT)
    await put_segment(store, SEGMENT)
    await store.close()


STALLS = [Fault("hang", times=1), Fault("stall", after_bytes=300_000, times=1)]


@pytest.mark.process
@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("fault", STALLS, ids=lambda fault: fault.kind)
async def test_a_stalled_read_is_hedged_on_another_connection(
    proxy: FaultyProxy, make_client: MakeClient, fault: Fault
) -> None:
    client = make_client(proxy.url)
    await proxy.set(fault)
    assert await client.read(1000, 900_000) < SOON_S
    assert client.hedges == {("read", "won"): 1}
    assert len(proxy.requests) == 2


@pytest.mark.process
@pytest.mark.usefixtures("filled")
async def test_the_second_request_asks_only_for_missing_bytes(
    proxy: FaultyProxy, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    read = HttpStore.read

    async def note_and_read(
        self: HttpStore, name: str, start: int, into: Sequence[memoryview], received: Callable[[int], None]
    ) -> bool:
        asked.append((start, sum(map(len, into))))
        return await read(self, name, start, into, received)

    monkeypatch.setattr(HttpStore, "read", note_and_read)
    await proxy.set(Fault("stall", after_bytes=300_000, times=1))
    await make_client(proxy.url).read(1000, 900_000)
    assert asked == [(1000, 900_000), (301_000, 600_000)]


@pytest.mark.process
@pytest.mark.usefixtures("filled")
async def test_lookups_and_manifests_are_hedged(proxy: FaultyProxy, make_client: MakeClient) -> None:
    client = make_client(proxy.url)
    await proxy.set(Fault("hang", times=1))
    assert parts(await client.store.lookup(FOLDER, CHAIN)) == [(0, 4)]
    name = SEGMENT.manifest.key.manifest_name
    await proxy.set(Fault("hang", times=1))
    assert await client.store.get(name) == SEGMENT.manifest.encode()
    assert client.hedges["lookup", "won"] == 2


@pytest.mark.process
@pytest.mark.usefixtures("filled")
async def test_writes_are_not_hedged(proxy: FaultyProxy, make_client: MakeClient) -> None:
    client = make_client(proxy.url)
    await proxy.set(Fault("hang", times=1))
    writing = asyncio.create_task(client.store.put(NAME, CONTENT))
    await until(lambda: bool(proxy.requests))
    await asyncio.sleep(1.0)
    assert (len(proxy.requests), client.hedges) == (1, {})
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing


@pytest.mark.process
@pytest.mark.usefixtures("filled")
async def test_a_slow_trickling_read_is_hedged(proxy: FaultyProxy, make_client: MakeClient) -> None:
    client = make_client(proxy.url)
    for _ in range(10):
        await client.read()
    await proxy.set(Fault("slow", bytes_per_s=5e5, times=1))  # never silent for long; 4 s in all
    assert await client.read() > 1.0
    assert client.hedges == {("read", "won"): 1}


@pytest.mark.process
@pytest.mark.parametrize("gone_s", [0.0, 3.0])
async def test_hedging_adds_little_load_to_a_shared_or_dead_link(
    tmp_path: Path, make_client: MakeClient, gone_s: float
) -> None:
    num_reads, link_bytes_per_s = 24, 8e6
    filling = LocalStore(tmp_path)
    await filling.put(NAME, CONTENT)
    await filling.close()
    with slow_link(8 * link_bytes_per_s / 1e9):
        async with (
            running_server(ServerConfig(tmp_path, port=0)) as server,
            FaultyProxy(server.host, server.port) as proxy,
        ):
            client = make_client(proxy.url)
            reads = [asyncio.create_task(client.read(0, 1 << 19)) for _ in range(num_reads)]
            await asyncio.sleep(0.4)
            if gone_s:
                proxy.cut()
                await asyncio.sleep(gone_s)
                proxy.mend()
            await asyncio.gather(*reads)
            async with aiohttp.ClientSession(server.url) as session, session.get(Route.METRICS) as answer:
                sent_bytes = read_metric(await answer.text(), "kvfetch_server_sent_bytes_total")
            assert sent_bytes < 1.5 * num_reads * (1 << 19)
            assert len(proxy.requests) <= num_reads + 4 + num_reads // 10


@pytest.mark.process
@pytest.mark.usefixtures("filled")
async def test_a_read_ends_by_its_deadline_whatever_hangs(proxy: FaultyProxy, make_client: MakeClient) -> None:
    client = make_client(proxy.url)
    await proxy.set(Fault("hang"))
    before = asyncio.all_tasks()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await client.read()
    assert not [task for task in asyncio.all_tasks() - before if "HttpStore" in repr(task) or "Hedged" in repr(task)]
    await proxy.set(None)
    assert await client.read() < SOON_S


@pytest.mark.process
@pytest.mark.usefixtures("filled")
async def test_without_hedging_a_stall_lasts_until_the_deadline(proxy: FaultyProxy, make_client: MakeClient) -> None:
    client = make_client(proxy.url, max_hedges=0)
    await proxy.set(Fault("hang", times=1))
    reading = asyncio.create_task(client.read())
    await until(lambda: bool(client.hedges))
    await asyncio.sleep(0.5)
    assert not reading.done()
    assert client.hedges == {("read", "refused"): 1}
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
