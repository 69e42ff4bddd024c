"""The results of background work, agreed among ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

_COLUMNS = 64


@dataclass(frozen=True, slots=True)
class Ticket:
    """One piece of work, whose result is a number. ``serial`` tells it from earlier work in the same column."""

    column: int
    serial: int


class Board:
    """Collects the results of all work under way. A result is a number: how many pages are there, from the first on. Of
    several ranks, the least counts.

    Tickets are opened and closed on the scheduler's thread, in the same order on every rank. Reports come from any
    thread. The cost of a step grows only with the number of new reports. With several ranks, each step with an open
    ticket also takes one collective, on a matrix with one column per piece of work.
    """

    def __init__(self, agree: Callable[[torch.Tensor], None] | None) -> None:
        """``agree`` replaces a tensor by its minimum over all ranks, in place; None for a single rank."""
        self._agree = agree
        self._reports: deque[tuple[Ticket, int]] = deque()
        self._serials: list[int] = []
        self._free: list[int] = []
        self._matrix = torch.empty((2, 0), dtype=torch.int64)  # 1 if it was reported, and the result
        self._ends: dict[Ticket, Callable[[int], None]] = {}
        self._serial = 0

    @property
    def num_open(self) -> int:
        return len(self._ends)

    def open_ticket(self, on_end: Callable[[int], None]) -> Ticket:
        """Open a ticket. Once every rank has reported, ``step`` calls ``on_end`` with the least result."""
        if not self._free:
            self._grow()
        self._serial += 1
        ticket = Ticket(self._free.pop(), self._serial)
        self._serials[ticket.column] = ticket.serial
        self._ends[ticket] = on_end
        return ticket

    def _grow(self) -> None:
        size = len(self._serials)
        more = size or _COLUMNS
        self._serials += [0] * more
        self._free = list(range(size + more - 1, size - 1, -1))
        self._matrix = torch.cat([self._matrix, torch.zeros((2, more), dtype=torch.int64)], dim=1)

    def close_ticket(self, ticket: Ticket) -> Callable[[int], None]:
        """Close a ticket and return its ``on_end``. Later reports for it are ignored."""
        on_end = self._ends.pop(ticket)
        self._serials[ticket.column] = 0
        self._matrix[:, ticket.column] = 0
        self._free.append(ticket.column)
        return on_end

    def report(self, ticket: Ticket, num_pages: int) -> None:
        """Report the result of a ticket's work, exactly once. Any thread may call this."""
        self._reports.append((ticket, num_pages))

    def step(self) -> None:
        """Close the tickets that every rank has reported on, and call their ``on_end`` in the order of opening."""
        if not self._ends:
            self._reports.clear()
            return
        fresh: list[tuple[Ticket, int]] = []
        for _ in range(len(self._reports)):
            ticket, num_pages = self._reports.popleft()
            if self._serials[ticket.column] == ticket.serial:
                fresh.append((ticket, num_pages))
        if self._agree is not None:
            fresh = self._agreed(fresh, self._agree)
        fresh.sort(key=lambda entry: entry[0].serial)
        for on_end, num_pages in [(self.close_ticket(ticket), num_pages) for ticket, num_pages in fresh]:
            on_end(num_pages)

    def _agreed(
        self, fresh: list[tuple[Ticket, int]], agree: Callable[[torch.Tensor], None]
    ) -> list[tuple[Ticket, int]]:
        for ticket, num_pages in fresh:
            self._matrix[:, ticket.column] = torch.tensor([1, num_pages])
        least = self._matrix.clone()
        agree(least)
        columns = torch.nonzero(least[0]).flatten().tolist()  # on which all ranks have reported
        return [(Ticket(column, self._serials[column]), int(least[1, column])) for column in columns]

    def clear(self) -> None:
        """Close all tickets."""
        for ticket in sorted(self._ends, key=lambda ticket: ticket.column):
            self.close_ticket(ticket)
        self._reports.clear()
