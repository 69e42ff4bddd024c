from __future__ import annotations

from dataclasses import dataclass

import pytest

from sgl_kvfetch.plugin.device.order import AGEING_PAGES, OrderName, Turns


@dataclass(eq=False)
class Waiter:
    arrival: int
    num_pages: int
    urgency: int = 0


def test_the_shortest_item_is_first_but_none_starves() -> None:
    turns: Turns[Waiter] = Turns("shortest")
    long = Waiter(1, 100)
    turns.add(long)
    served = []
    for arrival in range(2, 40):
        turns.add(Waiter(arrival, 2))
        first = turns.first()
        assert first is not None
        turns.discard(first)
        served.append(first)
    assert served.index(long) == 98 // AGEING_PAGES


@pytest.mark.parametrize(("order", "expected"), [("fifo", [1, 2, 3]), ("priority", [2, 3, 1]), ("shortest", [3, 1, 2])])
def test_orders(order: OrderName, expected: list[int]) -> None:
    turns: Turns[Waiter] = Turns(order)
    for waiter in (Waiter(1, 30, urgency=0), Waiter(2, 40, urgency=7), Waiter(3, 1, urgency=7)):
        turns.add(waiter)
    served = []
    while (first := turns.first()) is not None:
        served.append(first.arrival)
        turns.discard(first)
    assert served == expected
    assert len(turns) == 0
