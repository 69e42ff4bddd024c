# mypy: disable-error-code="arg-type, comparison-overlap"
# Waiter stands in for a fetch.
from __future__ import annotations

from dataclasses import dataclass

import pytest

from sgl_kvfetch.plugin.device.link_queue import AGEING_PAGES, LinkQueue, OrderName


@dataclass(eq=False)
class Waiter:
    arrival: int
    num_pages: int
    urgency: int = 0
    expected_pages: int = 0


def make(*sizes: int) -> tuple[LinkQueue, list[Waiter]]:
    """Return a first-come-first-served queue, where 16 pages share the link, and waiters of the given page counts."""
    queue = LinkQueue("fifo", shared_pages=16)
    waiters = [Waiter(arrival, size) for arrival, size in enumerate(sizes)]
    for waiter in waiters:
        queue.wait(waiter)
    return queue, waiters


def begin(queue: LinkQueue, waiter: Waiter) -> None:
    queue.leave(waiter)
    queue.take(waiter, waiter.num_pages)


def test_an_item_that_fills_the_link_has_it_alone() -> None:
    queue, (long, short) = make(100, 2)
    assert queue.has_room(long)
    begin(queue, long)
    assert queue.first() is short
    assert not queue.has_room(short)
    queue.give_back(long)
    assert queue.has_room(short)


def test_short_items_share_the_link() -> None:
    queue, waiters = make(6, 6, 6)
    for waiter, has_room in zip(waiters, (True, True, False), strict=True):
        assert queue.has_room(waiter) is has_room
        begin(queue, waiter)
    for waiter in waiters:
        queue.give_back(waiter)
        queue.give_back(waiter)  # called twice: by the link and at the end
    assert queue.has_room(Waiter(3, 100))


def test_an_item_that_was_put_off_is_returned_after_a_change() -> None:
    queue, (long, second) = make(100, 100)
    begin(queue, long)
    assert queue.first() is second
    queue.put_off(second)
    assert queue.first() is None
    queue.changed()  # another one's pages have landed
    assert queue.first() is second
    queue.put_off(second)
    assert queue.first() is None
    queue.give_back(long)
    assert queue.first() is second


def test_a_new_first_item_is_returned() -> None:
    queue, (long, second, third) = make(100, 100, 100)
    begin(queue, long)
    queue.put_off(second)
    queue.leave(second)  # aborted
    assert queue.first() is third
    queue.leave(third)
    assert queue.first() is None
    assert len(queue) == 0


def test_expected_pages_are_summed() -> None:
    queue, (first, second) = make(100, 20)
    queue.expect(first, 100)
    queue.expect(second, 20)
    assert queue.expected_pages == 120
    queue.expect(first, 60)
    assert (first.expected_pages, queue.expected_pages) == (60, 80)
    begin(queue, first)
    queue.clear()
    assert queue.expected_pages == len(queue) == 0
    assert queue.has_room(Waiter(3, 100))


def test_the_shortest_item_is_first_but_none_starves() -> None:
    queue = LinkQueue("shortest", shared_pages=16)
    long = Waiter(1, 100)
    queue.wait(long)
    served = []
    for arrival in range(2, 40):
        queue.wait(Waiter(arrival, 2))
        first = queue.first()
        assert first is not None
        queue.leave(first)
        served.append(first)
    assert served.index(long) == 98 // AGEING_PAGES


@pytest.mark.parametrize(("order", "expected"), [("fifo", [1, 2, 3]), ("priority", [2, 3, 1]), ("shortest", [3, 1, 2])])
def test_orders(order: OrderName, expected: list[int]) -> None:
    queue = LinkQueue(order, shared_pages=16)
    for waiter in (Waiter(1, 30, urgency=0), Waiter(2, 40, urgency=7), Waiter(3, 1, urgency=7)):
        queue.wait(waiter)
    served = []
    while (first := queue.first()) is not None:
        served.append(first.arrival)
        queue.leave(first)
    assert served == expected
    assert len(queue) == 0
