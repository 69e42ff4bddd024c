import asyncio

import pytest

from sgl_kvfetch.plane.fetch.link import BytesBudget
from sgl_kvfetch.stores.remote import Breaker


async def test_a_budget_is_first_come_first_served() -> None:
    budget = BytesBudget(10)
    order: list[str] = []

    async def take(name: str, num_bytes: int) -> None:
        await budget.acquire(num_bytes)
        order.append(name)

    await budget.acquire(6)
    tasks = [asyncio.create_task(take(name, n)) for name, n in (("large", 8), ("small", 1))]
    await asyncio.sleep(0)
    assert order == []
    budget.release(6)
    await asyncio.gather(*tasks)
    assert order == ["large", "small"]
    assert budget.used_bytes == 9


async def test_more_than_the_budget_counts_as_all_of_it() -> None:
    budget = BytesBudget(10)
    await budget.acquire(1000)
    assert budget.used_bytes == 10
    budget.release(1000)
    assert budget.used_bytes == 0


async def test_a_cancelled_wait_leaves_nothing_behind() -> None:
    budget = BytesBudget(10)
    await budget.acquire(10)
    waiting = asyncio.create_task(budget.acquire(5))
    behind = asyncio.create_task(budget.acquire(10))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    budget.release(10)
    await behind
    budget.release(10)
    assert budget.used_bytes == 0


async def test_cancelled_just_after_the_grant() -> None:
    budget = BytesBudget(10)
    await budget.acquire(10)
    waiting = asyncio.create_task(budget.acquire(5))
    await asyncio.sleep(0)
    budget.release(10)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert budget.used_bytes == 0


def test_a_breaker_opens_after_failures_in_a_row_and_backs_off() -> None:
    breaker = Breaker(threshold=2, first_pause_s=1.0, longest_pause_s=3.0)
    breaker.failed(0.0)
    breaker.succeeded()
    breaker.failed(0.0)
    assert not breaker.is_open(0.0)
    breaker.failed(10.0)
    assert breaker.is_open(10.9)
    assert not breaker.is_open(11.0)
    breaker.failed(11.0)
    assert breaker.is_open(12.9)
    breaker.failed(13.0)
    assert breaker.is_open(15.9)
    assert not breaker.is_open(16.0)
    breaker.succeeded()
    assert not breaker.is_open(16.0)
