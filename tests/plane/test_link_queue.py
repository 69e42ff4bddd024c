# mypy: disable-error-code="arg-type, comparison-overlap"
# Waiter stands in for a fetch.
from __future__ import annotations

from sgl_kvfetch.plane.staging import AGEING_PAGES, Claim, LinkQueue


def make(*sizes: int) -> tuple[LinkQueue[int], list[int]]:
    """Return a queue where 16 pages share the link, and fetches of the given page counts."""
    queue: LinkQueue[int] = LinkQueue(shared_pages=16)
    for number, size in enumerate(sizes):
        queue.wait(number, Claim(size, number))
    return queue, [*range(len(sizes))]


def begin(queue: LinkQueue[int], fetch: int, num_pages: int) -> None:
    queue.leave(fetch)
    queue.occupy(fetch, num_pages)


def has_room_for_100(queue: LinkQueue[int]) -> bool:
    queue.wait(100, Claim(100, arrival=100))
    return queue.has_room(100)


def test_an_item_that_fills_the_link_has_it_alone() -> None:
    queue, (long, short) = make(100, 2)
    assert queue.has_room(long)
    begin(queue, long, 100)
    assert queue.first() == short
    assert not queue.has_room(short)
    queue.give_back(long)
    assert queue.has_room(short)


def test_short_items_share_the_link() -> None:
    queue, fetches = make(6, 6, 6)
    for fetch, has_room in zip(fetches, (True, True, False), strict=True):
        assert queue.has_room(fetch) is has_room
        begin(queue, fetch, 6)
    for fetch in fetches:
        queue.give_back(fetch)
        queue.give_back(fetch)  # called twice: by the link and at the end
    assert has_room_for_100(queue)


def test_expected_pages_are_summed() -> None:
    queue, (first, second) = make(100, 20)
    queue.expect(first, 100)
    queue.expect(second, 20)
    assert queue.expected_pages == 120
    queue.expect(first, 60)
    assert queue.expected_pages == 80
    queue.expect(second, 0)
    assert queue.expected_pages == 60


def test_the_shortest_item_is_first_but_none_starves() -> None:
    queue: LinkQueue[int] = LinkQueue(shared_pages=16)
    queue.wait(1, Claim(100, arrival=1))
    served = []
    for arrival in range(2, 40):
        queue.wait(arrival, Claim(2, arrival))
        first = queue.first()
        assert first is not None
        queue.leave(first)
        served.append(first)
    assert served.index(1) == 98 // AGEING_PAGES
