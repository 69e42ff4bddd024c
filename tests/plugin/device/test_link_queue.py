from __future__ import annotations

from dataclasses import dataclass

from sgl_kvfetch.plugin.device.link_queue import LinkQueue


@dataclass(eq=False)
class Waiter:
    arrival: int
    num_pages: int
    urgency: int = 0
    expected_pages: int = 0


def make(*sizes: int) -> tuple[LinkQueue[Waiter], list[Waiter]]:
    """Waiters of so many pages, first come first served; 16 pages share the link."""
    queue: LinkQueue[Waiter] = LinkQueue("fifo", shared_pages=16)
    waiters = [Waiter(arrival, size) for arrival, size in enumerate(sizes)]
    for waiter in waiters:
        queue.wait(waiter)
    return queue, waiters


def begin(queue: LinkQueue[Waiter], waiter: Waiter) -> None:
    queue.leave(waiter)
    queue.take(waiter, waiter.num_pages)


def test_one_that_fills_the_link_has_it_alone() -> None:
    queue, (long, short) = make(100, 2)
    assert queue.has_room(long)
    begin(queue, long)
    assert queue.first() is short
    assert not queue.has_room(short)
    queue.give_back(long)
    assert queue.has_room(short)


def test_short_ones_share_it() -> None:
    queue, waiters = make(6, 6, 6)
    for waiter, has_room in zip(waiters, (True, True, False), strict=True):
        assert queue.has_room(waiter) is has_room
        begin(queue, waiter)
    for waiter in waiters:
        queue.give_back(waiter)
        queue.give_back(waiter)  # told twice, by the link and by the end
    assert queue.has_room(Waiter(3, 100))


def test_one_that_was_put_off_is_looked_at_when_something_has_changed() -> None:
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


def test_another_one_at_the_head_is_looked_at() -> None:
    queue, (long, second, third) = make(100, 100, 100)
    begin(queue, long)
    queue.put_off(second)
    queue.leave(second)  # aborted
    assert queue.first() is third
    queue.leave(third)
    assert queue.first() is None
    assert len(queue) == 0


def test_what_is_still_to_be_fetched() -> None:
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
