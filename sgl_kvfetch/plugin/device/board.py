"""The results of background work, agreed among ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch

_COLUMNS = 64
_MOST_FIELDS = 2

M = TypeVar("M", bound=tuple[int, ...])


class Done(NamedTuple):
    """Work is over; there is no other result."""


class PageCount(NamedTuple):
    """How many pages a piece of work has completed, from its first page on."""

    num_pages: int


@dataclass(frozen=True, slots=True)
class Ticket(Generic[M]):
    """One piece of work, whose result is an ``M``. ``serial`` tells it from earlier work in the same column."""

    column: int
    serial: int


class Board:
    """Collects messages about all work under way. A message is a named tuple of integers. If there are several ranks,
    each field becomes its minimum over all ranks; fields are defined so that the minimum is the right answer.

    Tickets are opened and closed on the scheduler's thread, in the same order on every rank. Reports come from any
    thread. The cost of a step grows only with the number of new reports. With several ranks, each step with an open
    ticket also takes one collective, on a matrix with one column per piece of work.
    """

    def __init__(self, agree: Callable[[torch.Tensor], None] | None) -> None:
        """``agree`` replaces a tensor by its minimum over all ranks, in place; None for a single rank."""
        self._agree = agree
        self._reports: deque[tuple[Ticket[Any], Any]] = deque()
        self._serials: list[int] = []
        self._free: list[int] = []
        self._matrix = torch.empty((1 + _MOST_FIELDS, 0), dtype=torch.int64)  # 1 if it was reported, then the fields
        self._messages: dict[Ticket[Any], tuple[int, ...]] = {}  # this rank's, until all ranks have reported
        self._ends: dict[Ticket[Any], Callable[[Any], None]] = {}
        self._serial = 0

    @property
    def num_open(self) -> int:
        return len(self._ends)

    def open_ticket(self, on_end: Callable[[M], None]) -> Ticket[M]:
        """Open a ticket. Once every rank has reported, ``step`` calls ``on_end`` with the minimum of their messages."""
        if not self._free:
            self._grow()
        self._serial += 1
        ticket: Ticket[M] = Ticket(self._free.pop(), self._serial)
        self._serials[ticket.column] = ticket.serial
        self._ends[ticket] = on_end
        return ticket

    def _grow(self) -> None:
        size = len(self._serials)
        more = size or _COLUMNS
        self._serials += [0] * more
        self._free = list(range(size + more - 1, size - 1, -1))
        self._matrix = torch.cat([self._matrix, torch.zeros((1 + _MOST_FIELDS, more), dtype=torch.int64)], dim=1)

    def close_ticket(self, ticket: Ticket[M]) -> Callable[[M], None]:
        """Close a ticket and return its ``on_end``. Later reports for it are ignored."""
        on_end = self._ends.pop(ticket)
        self._messages.pop(ticket, None)
        self._serials[ticket.column] = 0
        self._matrix[:, ticket.column] = 0
        self._free.append(ticket.column)
        return on_end

    def report(self, ticket: Ticket[M], message: M) -> None:
        """Report the result of a ticket's work, exactly once. Any thread may call this."""
        self._reports.append((ticket, message))

    def step(self) -> None:
        """Close the tickets that every rank has reported on, and call their ``on_end`` in the order of opening."""
        if not self._ends:
            self._reports.clear()
            return
        fresh: list[tuple[Ticket[Any], Any]] = []
        for _ in range(len(self._reports)):
            ticket, message = self._reports.popleft()
            if self._serials[ticket.column] == ticket.serial:
                fresh.append((ticket, message))
        if self._agree is not None:
            fresh = self._agreed(fresh, self._agree)
        fresh.sort(key=lambda entry: entry[0].serial)
        for on_end, message in [(self.close_ticket(ticket), message) for ticket, message in fresh]:
            on_end(message)

    def _agreed(
        self, fresh: list[tuple[Ticket[Any], Any]], agree: Callable[[torch.Tensor], None]
    ) -> list[tuple[Ticket[Any], Any]]:
        for ticket, message in fresh:
            self._messages[ticket] = message
            self._matrix[: 1 + len(message), ticket.column] = torch.tensor([1, *message])
        least = self._matrix.clone()
        agree(least)
        agreed = []
        for column in torch.nonzero(least[0]).flatten().tolist():  # all ranks have reported
            ticket = Ticket(column, self._serials[column])
            mine = self._messages[ticket]
            fields = least[1 : 1 + len(mine), column].tolist()
            agreed.append((ticket, type(mine)(*fields)))
        return agreed

    def clear(self) -> None:
        """Close all tickets."""
        for ticket in sorted(self._ends, key=lambda ticket: ticket.column):
            self.close_ticket(ticket)
        self._reports.clear()
