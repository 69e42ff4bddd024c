"""Answers that stop coming, and are asked for again over another connection."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from itertools import cycle, repeat

import pytest

from harness.faults import Fault, FaultyProxy
from harness.small_segments import FOLDER, data_object, make_segment, page_hashes, parts, put_segment
from harness.waiting import TimerClock, until
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.stores.remote import RemoteStore, StallWatch
from tests.stores.conftest import MakeClient

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


async def test_an_answer_in_time_is_asked_for_once(watch: StallWatch) -> None:
    assert await longest_s(watch, asked := Asked([0.4]), 1) == pytest.approx(0.4)
    assert asked.num_times == 1


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


async def test_one_that_hangs_is_asked_for_again(watch: StallWatch) -> None:
    assert await longest_s(watch, Asked([HANGS, 0.1]), 1) == pytest.approx(SILENCE_S + 0.1)


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


async def test_what_always_hangs_is_asked_for_every_eight_seconds(watch: StallWatch) -> None:
    asked = Asked(repeat(HANGS))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(100 + 0.1):
            await watch.answer("asking", asked)
    assert asked.num_times == 4 + 12  # after 0, 0.5, 1.5 and 3.5 s, and then after 7.5 s and every 8 s


async def test_a_timeout_of_the_answer_itself_is_an_error(watch: StallWatch) -> None:
    async def ask(heard: Callable[[], None]) -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        await watch.answer("asking", ask)


async def test_without_a_limit_it_waits() -> None:
    TimerClock()
    assert await longest_s(StallWatch(None, lambda error: None), Asked([1000.0]), 1) == pytest.approx(1000.0)


# Over real sockets

CONTENT = random.Random(0).randbytes(1 << 20)
NAME = data_object(CONTENT)
CHAIN = page_hashes(4)
SEGMENT = make_segment(CHAIN, 0, 4)


@dataclass
class Rig:
    """A store behind a faulty network."""

    proxy: FaultyProxy
    make: MakeClient
    retried: list[StoreError] = field(default_factory=list)
    received: list[int] = field(default_factory=list)

    def client(self, silence_s: float) -> RemoteStore:
        return self.make(silence_s=silence_s, on_retry=self.retried.append, on_received=self.received.append)


@pytest.fixture
async def rig(make: MakeClient, link: FaultyProxy) -> Rig:
    filling = make()
    await filling.put(NAME, CONTENT)
    await put_segment(filling, SEGMENT)
    link.requests.clear()
    return Rig(link, make)


@pytest.fixture
def store(rig: Rig) -> RemoteStore:
    return rig.client(0.2)


STALLS = [Fault("hang", times=1), Fault("stall", after_bytes=600_000, times=1)]


@pytest.mark.process
@pytest.mark.parametrize("fault", STALLS, ids=lambda fault: fault.kind)
async def test_a_read_that_stalls_goes_on_at_its_byte(rig: Rig, store: RemoteStore, fault: Fault) -> None:
    into, received = bytearray(900_000), list[int]()
    await rig.proxy.set(fault)
    assert await store.read(NAME, 1000, [memoryview(into)], received.append)
    assert into == CONTENT[1000:901_000]
    assert sum(received) == sum(rig.received) == 900_000  # no byte twice
    assert len(rig.proxy.requests) > 1
    assert {error.reason for error in rig.retried} == {"timeout"}
    assert "nothing came for 0.2 s" in str(rig.retried[0])


@pytest.mark.process
async def test_lookups_and_objects_without_a_length_are_asked_for_again(rig: Rig, store: RemoteStore) -> None:
    await rig.proxy.set(Fault("hang", times=1))
    assert parts(await store.lookup(FOLDER, CHAIN)) == [(0, 4)]
    for name, content in ((SEGMENT.manifest.key.manifest_name, SEGMENT.manifest.encode()), (NAME, CONTENT)):
        await rig.proxy.set(Fault("hang", times=1))
        assert await store.get(name) == content
    assert len(rig.retried) >= 3


@pytest.mark.process
async def test_writes_are_not(rig: Rig, store: RemoteStore) -> None:
    await rig.proxy.set(Fault("hang", times=1))
    for content in (CONTENT, CONTENT[:1000]):
        rig.proxy.requests.clear()
        writing = asyncio.create_task(store.put(data_object(content), content))
        await until(lambda: bool(rig.proxy.requests))
        await asyncio.sleep(1.0)
        assert len(rig.proxy.requests) == 1
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        await rig.proxy.set(Fault("hang", times=1))


@pytest.mark.process
async def test_to_wait_for_a_connection_is_no_silence(rig: Rig, store: RemoteStore) -> None:
    for _ in range(store.options.max_connections):
        await store._free_reads.acquire()
    into = bytearray(100)
    reading = asyncio.create_task(store.read(NAME, 0, [memoryview(into)]))
    await asyncio.sleep(1.0)
    assert (rig.retried, rig.proxy.requests) == ([], [])
    store._free_reads.release()
    assert await reading
    assert into == CONTENT[:100]


@pytest.mark.process
async def test_a_read_that_is_given_up_at_its_end_is_whole(
    rig: Rig, store: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask_twice(what: str, ask: Callable[[Callable[[], None]], Awaitable[bool]]) -> bool:
        return await ask(lambda: None) and await ask(lambda: None)

    monkeypatch.setattr(store._reads, "answer", ask_twice)
    into = bytearray(100)
    assert await store.read(NAME, 0, [memoryview(into)])
    assert into == CONTENT[:100]
    assert len(rig.proxy.requests) == 1
