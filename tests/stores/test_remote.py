"""What goes wrong on the way to a store, by HTTP and in S3: why a call fails, and what is asked for again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from itertools import cycle, repeat
from typing import Any

import pytest

from harness.faults import Fault, FaultyProxy
from harness.reading import read_bytes
from harness.small_segments import FOLDER, data_object, make_segment, page_hashes, parts, put_segment
from harness.waiting import WAIT_S, TimerClock, until
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.stores import Lookup
from sgl_kvfetch.stores.remote import RemoteStore, StallWatch
from tests.stores.conformance import failing
from tests.stores.conftest import MakeClient

pytestmark = pytest.mark.process

CONTENT = random.Random(0).randbytes(1 << 20)
NAME = data_object(CONTENT)
FAULTS = [
    (Fault("refuse"), "refused", "http s3"),
    (Fault("hang"), "timeout", "http s3"),
    (Fault("stall", after_bytes=100), "timeout", "s3"),  # HTTP's are below
    (Fault("slow", bytes_per_s=1e5), "timeout", "http"),
    (Fault("error", status=503), "server", "http s3"),
    (Fault("error", status=429), "server", "s3"),
    (Fault("error", status=502), "proxy", "http s3"),
    *((Fault("error", status=status), "unauthorised", "http s3") for status in (401, 403)),
    (Fault("error", status=507), "full", "http s3"),
    (Fault("error", status=400), "invalid", "http s3"),
    *((Fault("error", status=status), "protocol", "http") for status in (302, 204)),
    *((Fault("error", status=status), "protocol", "s3") for status in (301, 404)),  # 404 without S3's code: a proxy's
    (Fault("close", after_bytes=500), "truncated", "http s3"),
    (Fault("wrong_length", extra_bytes=10), "truncated", "http"),
    (Fault("garbage"), "protocol", "http s3"),
]
LASTING = ("unauthorised", "invalid", "protocol")


@pytest.fixture
async def make(make: MakeClient, link: FaultyProxy) -> MakeClient:
    """The store has an object."""
    await make().put(NAME, CONTENT)
    link.requests.clear()
    return make


@pytest.mark.parametrize(
    ("kind", "fault", "reason"),
    [
        pytest.param(kind, fault, reason, id=f"{kind}-{fault.kind}-{fault.status}-{fault.after_bytes}")
        for fault, reason, kinds in FAULTS
        for kind in kinds.split()
    ],
)
async def test_faults_have_reasons(kind: str, make: MakeClient, link: FaultyProxy, fault: Fault, reason: str) -> None:
    await link.set(fault)
    store = make(timeout_s=0.5 if reason == "timeout" else WAIT_S, max_attempts=2)
    for call in (store.get(NAME), store.get(NAME, 500, 200_000), read_bytes(store, NAME, 500, 200_000)):
        link.requests.clear()
        with failing(reason, r"\A[^\n]*\Z", retriable=reason not in LASTING):
            await asyncio.wait_for(call, WAIT_S)
        is_asked_once = reason in LASTING or (kind, reason) == ("http", "full")
        assert not is_asked_once or len(link.requests) == 1
    await link.set(None)
    assert await make().get(NAME) == CONTENT


async def test_every_call_ends_by_the_deadline(make: MakeClient, link: FaultyProxy) -> None:
    await link.set(Fault("hang"))
    store = make(timeout_s=0.5)
    for call in (
        store.put(NAME, CONTENT),
        store.head(NAME),
        store.delete(NAME),
        store.lookup(FOLDER, page_hashes(1)),
        anext(aiter(store.list())),
    ):
        with failing("timeout"):
            await asyncio.wait_for(call, WAIT_S)


PASSING = [
    *((kind, Fault("error", status=status, times=1)) for status in (502, 503) for kind in ("http", "s3")),
    *((kind, Fault("close", after_bytes=10, times=1)) for kind in ("http", "s3")),
    ("http", Fault("wrong_length", extra_bytes=5, times=1)),
]


@pytest.mark.parametrize(("kind", "fault"), PASSING, ids=lambda x: x if isinstance(x, str) else f"{x.kind}-{x.status}")
async def test_what_passes_is_tried_again(kind: str, make: MakeClient, link: FaultyProxy, fault: Fault) -> None:
    retried: list[StoreError] = []
    store = make(on_retry=retried.append)

    async def names() -> list[str]:
        return [info.name async for info in store.list()]

    calls: list[tuple[Callable[[], Coroutine[Any, Any, object]], object]] = [
        (lambda: store.put(NAME, CONTENT), None),
        (lambda: store.get(NAME), CONTENT),
        (lambda: store.lookup(FOLDER, page_hashes(1)), Lookup(())),
        (names, [NAME]),
        (lambda: store.delete(NAME), True),
    ]
    for call, expected in calls if fault.kind == "error" else calls[1:2]:
        await link.set(fault)
        assert await call() == expected
    assert kind == "s3" or len(retried) == (5 if fault.kind == "error" else 1)  # obstore tells nobody
    assert await store.get(NAME) == (None if fault.kind == "error" else CONTENT)


async def test_a_broken_read_continues_where_it_ended(make: MakeClient, link: FaultyProxy) -> None:
    await link.set(Fault("close", after_bytes=400_000, times=1))
    assert await read_bytes(make(), NAME, 10, 900_000) == CONTENT[10:900_010]
    assert len(link.requests) == 2


SILENCE_S = 0.5
HANGS = 1e6


class Asked:
    """Answers after the seconds that ``delays_s`` has for each time that it is asked."""

    def __init__(self, delays_s: Iterable[float]) -> None:
        self._delays_s = iter(delays_s)
        self.num_times = 0

    async def __call__(self, heard: Callable[[], None]) -> float:
        self.num_times += 1
        delay_s = next(self._delays_s)
        await asyncio.sleep(delay_s)
        return delay_s


async def longest_s(watch: StallWatch, asked: Asked, num_answers: int) -> float:
    """Return the time of the answer that took longest."""
    loop, longest_s = asyncio.get_running_loop(), 0.0
    for _ in range(num_answers):
        began_s = loop.time()
        await watch.answer("asking", asked)
        longest_s = max(longest_s, loop.time() - began_s)
    return longest_s


@pytest.fixture
async def watch() -> StallWatch:
    TimerClock()
    return StallWatch(SILENCE_S, lambda error: None)


async def test_an_answer_that_keeps_coming_is_not_given_up(watch: StallWatch) -> None:
    asked = 0

    async def trickle(heard: Callable[[], None]) -> int:
        nonlocal asked
        asked += 1
        for _ in range(10):
            await asyncio.sleep(0.4)
            heard()
        return 10

    assert await watch.answer("asking", trickle) == 10
    assert asked == 1
    assert await longest_s(watch, once := Asked([0.4]), 1) == pytest.approx(0.4)
    assert once.num_times == 1


async def test_a_connection_of_eight_that_hangs_makes_nothing_later(watch: StallWatch) -> None:
    asked = Asked(cycle([*repeat(0.1, 7), HANGS]))
    assert await longest_s(watch, asked, 700) == pytest.approx(SILENCE_S + 0.1)
    assert asked.num_times == 799
    twice = Asked(cycle([*repeat(0.1, 7), HANGS, HANGS]))
    assert await longest_s(watch, twice, 700) == pytest.approx(SILENCE_S + 1.0 + 0.1)


async def test_a_slow_store_is_asked_once_when_it_is_known(watch: StallWatch) -> None:
    asked = Asked(repeat(3.0))
    assert await longest_s(watch, asked, 1) == pytest.approx(SILENCE_S + 1.0 + 2.0 + 3.0)
    assert await longest_s(watch, asked, 700) == pytest.approx(3.0)
    assert asked.num_times == 4 + 700
    fast = Asked(cycle([*repeat(0.1, 999), HANGS]))
    assert await longest_s(watch, fast, 999) == pytest.approx(0.1)
    assert await longest_s(watch, fast, 1) == pytest.approx(SILENCE_S + 0.1)  # as if it had never been slow


# Over real sockets

CHAIN = page_hashes(4)
SEGMENT = make_segment(CHAIN, 0, 4)


@dataclass
class Rig:
    """A client behind a faulty network. ``retried`` and ``received``: what it tells."""

    store: RemoteStore
    proxy: FaultyProxy
    retried: list[StoreError]
    received: list[int]


@pytest.fixture
async def rig(make: MakeClient, link: FaultyProxy) -> Rig:
    retried, received = list[StoreError](), list[int]()
    store = make(silence_s=0.2, on_retry=retried.append, on_received=received.append)
    await put_segment(store, SEGMENT)
    for told in (link.requests, retried, received):
        told.clear()
    return Rig(store, link, retried, received)


STALLS = [Fault("hang", times=1), Fault("stall", after_bytes=600_000, times=1)]


@pytest.mark.parametrize("fault", STALLS, ids=lambda fault: fault.kind)
async def test_a_read_that_stalls_goes_on_at_its_byte(rig: Rig, fault: Fault) -> None:
    into, received = bytearray(900_000), list[int]()
    await rig.proxy.set(fault)
    assert await rig.store.read(NAME, 1000, [memoryview(into)], received.append)
    assert into == CONTENT[1000:901_000]
    assert sum(received) == sum(rig.received) == 900_000  # no byte twice
    assert len(rig.proxy.requests) > 1
    assert {error.reason for error in rig.retried} == {"timeout"}
    assert "nothing came for 0.2 s" in str(rig.retried[0])


async def test_lookups_and_objects_without_a_length_are_asked_for_again(rig: Rig) -> None:
    await rig.proxy.set(Fault("hang", times=1))
    assert parts(await rig.store.lookup(FOLDER, CHAIN)) == [(0, 4)]
    for name, content in ((SEGMENT.manifest.key.manifest_name, SEGMENT.manifest.encode()), (NAME, CONTENT)):
        await rig.proxy.set(Fault("hang", times=1))
        assert await rig.store.get(name) == content
    assert len(rig.retried) >= 3


async def test_writes_are_not(rig: Rig) -> None:
    await rig.proxy.set(Fault("hang", times=1))
    for content in (CONTENT, CONTENT[:1000]):
        rig.proxy.requests.clear()
        writing = asyncio.create_task(rig.store.put(data_object(content), content))
        await until(lambda: bool(rig.proxy.requests))
        await asyncio.sleep(1.0)
        assert len(rig.proxy.requests) == 1
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        await rig.proxy.set(Fault("hang", times=1))


async def test_to_wait_for_a_connection_is_no_silence(rig: Rig) -> None:
    for _ in range(rig.store.options.max_connections):
        await rig.store._free_reads.acquire()
    into = bytearray(100)
    reading = asyncio.create_task(rig.store.read(NAME, 0, [memoryview(into)]))
    await asyncio.sleep(1.0)
    assert (rig.retried, rig.proxy.requests) == ([], [])
    rig.store._free_reads.release()
    assert await reading
    assert into == CONTENT[:100]


async def test_a_read_that_is_given_up_at_its_end_is_whole(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask_twice(what: str, ask: Callable[[Callable[[], None]], Awaitable[bool]]) -> bool:
        return await ask(lambda: None) and await ask(lambda: None)

    monkeypatch.setattr(rig.store._reads, "answer", ask_twice)
    into = bytearray(100)
    assert await rig.store.read(NAME, 0, [memoryview(into)])
    assert into == CONTENT[:100]
    assert len(rig.proxy.requests) == 1
