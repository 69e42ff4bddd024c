"""What background work has come to, agreed among ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

PENDING = -1
_ROWS = 64


@dataclass(frozen=True, slots=True)
class Ticket:
    """One piece of work. ``serial`` tells it from an earlier one in the same row."""

    row: int
    serial: int


Report = Callable[[Ticket, int], None]
OnEnd = Callable[[int], None]


class Board:
    """Holds a number for each piece of work under way: `PENDING`, or how many pages it came to.

    Tickets are opened, heard of and closed on the scheduler's thread, in the same order on every rank; a report comes
    from any thread. A step costs as much as was reported since the last one, and with several ranks one collective if
    anything is open.
    """

    def __init__(self, agree: Callable[[torch.Tensor], None] | None) -> None:
        """``agree`` takes the least of all ranks in place; None for a single rank."""
        self._agree = agree
        self._reports: deque[tuple[Ticket, int]] = deque()
        self._serials = [0] * _ROWS
        self._free = list(range(_ROWS - 1, -1, -1))
        self._values = torch.full((_ROWS,), PENDING, dtype=torch.int64)
        self._ends: dict[Ticket, OnEnd] = {}
        self._serial = 0

    @property
    def num_open(self) -> int:
        return len(self._ends)

    def open(self, on_end: OnEnd) -> Ticket:
        """``on_end`` gets the least of all ranks' numbers, in the step in which every rank has reported."""
        if not self._free:
            size = len(self._serials)
            self._serials += [0] * size
            self._free = list(range(2 * size - 1, size - 1, -1))
            self._values = torch.cat([self._values, torch.full((size,), PENDING, dtype=torch.int64)])
        self._serial += 1
        ticket = Ticket(self._free.pop(), self._serial)
        self._serials[ticket.row] = ticket.serial
        self._ends[ticket] = on_end
        return ticket

    def close(self, ticket: Ticket) -> OnEnd:
        """Whatever is still reported for this ticket is ignored. Returns what was to happen."""
        on_end = self._ends.pop(ticket)
        self._serials[ticket.row] = 0
        self._values[ticket.row] = PENDING
        self._free.append(ticket.row)
        return on_end

    def report(self, ticket: Ticket, num_pages: int) -> None:
        """From any thread, once a ticket."""
        assert num_pages >= 0
        self._reports.append((ticket, num_pages))

    def step(self) -> None:
        """Close the tickets that every rank has reported on, and say so to those who opened them, in their opening's
        order."""
        if not self._ends:
            self._reports.clear()
            return
        fresh = []
        for _ in range(len(self._reports)):
            ticket, value = self._reports.popleft()
            if self._serials[ticket.row] == ticket.serial:
                fresh.append((ticket, value))
        if self._agree is not None:
            fresh = self._agreed(fresh, self._agree)
        fresh.sort(key=lambda entry: entry[0].serial)
        for on_end, value in [(self.close(ticket), value) for ticket, value in fresh]:
            on_end(value)

    def _agreed(
        self, fresh: list[tuple[Ticket, int]], agree: Callable[[torch.Tensor], None]
    ) -> list[tuple[Ticket, int]]:
        for ticket, value in fresh:
            self._values[ticket.row] = value
        least = self._values.clone()
        agree(least)
        rows: list[int] = torch.nonzero(least != PENDING).flatten().tolist()
        return [(Ticket(row, self._serials[row]), int(least[row])) for row in rows]

    def clear(self) -> None:
        """Close all tickets."""
        for ticket in sorted(self._ends, key=lambda ticket: ticket.row):
            self.close(ticket)
        self._reports.clear()
