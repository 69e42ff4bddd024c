"""A hedged call, with scripted requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.stores.base import Store
from sgl_kvfetch.stores.hedged import Attempt, RacedCall, RaceResult, Watch
from sgl_kvfetch.stores.hedging import RaceBudget, ReplicaHealth, Usual

SILENCE_S = 0.04
Request = Callable[[Attempt], Awaitable[bool]]


@dataclass
class Rig:
    """A call whose n-th request runs the script ``requests[n]``."""

    requests: list[Request]
    num_replicas: int = 1
    num_bytes: int = 100
    budget: RaceBudget = field(default_factory=lambda: RaceBudget(1))
    races: list[RaceResult] = field(default_factory=list)
    asked: list[Attempt] = field(default_factory=list)
    num_cancelled: int = 0

    async def run(self) -> bytes | None:
        async def ask(_: Store, attempt: Attempt) -> bytes | None:
            self.asked.append(attempt)
            try:
                found = await self.requests[len(self.asked) - 1](attempt)
            except asyncio.CancelledError:
                self.num_cancelled += 1
                raise
            return b"".join(attempt.pieces) if found else None

        watch = Watch(
            [ReplicaHealth(1) for _ in range(self.num_replicas)],
            self.budget,
            Usual(1.0, 0.5, least=SILENCE_S, most=SILENCE_S, at_first=SILENCE_S),
            Usual(1.0, 0.5, least=0.0, most=float("inf"), at_first=float("inf")),
            self.races.append,
            lambda replica, error: None,
        )
        stores: list[Store] = [LocalStore("/nowhere") for _ in range(self.num_replicas)]
        async with asyncio.timeout(100 * SILENCE_S):
            return await RacedCall(watch, stores, ask, self.num_bytes).run()


async def hang(attempt: Attempt) -> bool:
    await asyncio.Event().wait()
    return True


async def missing(attempt: Attempt) -> bool:
    return False


async def fail(attempt: Attempt) -> bool:
    raise StoreError("server", "told to fail", retriable=True)


async def deliver(attempt: Attempt) -> bool:
    attempt.take(b"x" * (100 - attempt.num_bytes))
    return True


def after(wait_s: float, then: Request) -> Request:
    async def request(attempt: Attempt) -> bool:
        await asyncio.sleep(wait_s)
        return await then(attempt)

    return request


def bring(num_bytes: int, then: Request) -> Request:
    async def request(attempt: Attempt) -> bool:
        attempt.take(b"x" * num_bytes)
        return await then(attempt)

    return request


async def test_an_answer_in_time_needs_one_request() -> None:
    rig = Rig([bring(30, deliver)])
    assert await rig.run() == b"x" * 100
    assert rig.races == []


async def test_a_stalled_read_is_hedged_for_the_missing_bytes() -> None:
    rig = Rig([bring(30, hang), deliver])
    assert await rig.run() == b"x" * 100
    assert rig.asked[1].num_inherited == 30
    assert (rig.races, rig.num_cancelled) == (["won"], 1)
    assert rig.budget.try_begin()  # it was worth it


async def test_second_request_ends_when_the_first_resumes() -> None:
    rig = Rig([after(3 * SILENCE_S, bring(30, after(3 * SILENCE_S, deliver))), hang, hang])
    assert await rig.run() == b"x" * 100
    assert rig.races[0] == "lost"
    assert not rig.budget.try_begin()


async def test_a_second_request_that_wins_narrowly_is_not_worth_it() -> None:
    rig = Rig([after(2 * SILENCE_S, bring(80, hang)), bring(10, after(1.5 * SILENCE_S, deliver))])
    assert await rig.run() == b"x" * 100
    assert rig.races == ["won"]
    assert not rig.budget.try_begin()


async def test_a_call_makes_at_most_three_second_requests() -> None:
    rig = Rig([hang] * 4, budget=RaceBudget(10))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(20 * SILENCE_S):
            await rig.run()
    assert len(rig.asked) == rig.num_cancelled == 4
    assert rig.races == ["lost", "lost", "lost", "refused"]


async def test_an_error_of_one_request_leaves_the_other_running() -> None:
    rig = Rig([bring(30, after(2 * SILENCE_S, fail)), after(2 * SILENCE_S, deliver)])
    assert await rig.run() == b"x" * 100
    assert rig.races == ["won"]
    rig = Rig([after(3 * SILENCE_S, deliver), fail])
    assert await rig.run() == b"x" * 100
    assert rig.races == ["failed"]


async def test_after_an_error_another_replica_continues_the_read() -> None:
    rig = Rig([bring(30, fail), bring(20, fail), deliver], num_replicas=3)
    assert await rig.run() == b"x" * 100
    assert [attempt.num_inherited for attempt in rig.asked] == [0, 30, 50]
    assert rig.races == []


@pytest.mark.parametrize("requests", [[missing, missing], [missing, fail], [fail, missing]])
async def test_object_is_missing_if_all_answering_replicas_lack_it(requests: list[Request]) -> None:
    assert await Rig(requests, num_replicas=2).run() is None


async def test_object_is_missing_while_the_first_replica_hangs() -> None:
    rig = Rig([hang, missing])
    assert await rig.run() is None
    assert rig.num_cancelled == 1


async def test_raises_if_all_replicas_fail() -> None:
    with pytest.raises(StoreError, match="told to fail"):
        await Rig([fail, fail], num_replicas=2).run()
