"""What background work has come to, agreed among ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch

_COLUMNS = 64
_MOST_FIELDS = 2

M = TypeVar("M", bound=tuple[int, ...])


class Done(NamedTuple):
    """Work is over, and that is all there is to say."""


class PageCount(NamedTuple):
    """How many pages work has come to, from its first on."""

    num_pages: int


@dataclass(frozen=True, slots=True)
class Ticket(Generic[M]):
    """One piece of work, which is to be reported on by an ``M``. ``serial`` tells it from an earlier one in the same
    column."""

    column: int
    serial: int


class Report(Protocol):
    """Says what a piece of work has come to."""

    def __call__(self, ticket: Ticket[M], message: M, /) -> None: ...


class Board:
    """Messages about all work under way. A message is a named tuple of whole numbers. Of several ranks' messages the
    least of each field counts by itself: fields are made so that this is what the ranks want.

    Tickets are opened, heard of and closed on the scheduler's thread, in the same order on every rank; a report comes
    from any thread. A step costs as much as was reported since the last one, and with several ranks one collective if
    anything is open: on a matrix with a column for each piece of work.
    """

    def __init__(self, agree: Callable[[torch.Tensor], None] | None) -> None:
        """``agree`` takes the least of all ranks in place; None for a single rank."""
        self._agree = agree
        self._reports: deque[tuple[Ticket[Any], Any]] = deque()
        self._serials: list[int] = []
        self._free: list[int] = []
        self._matrix = torch.empty((1 + _MOST_FIELDS, 0), dtype=torch.int64)  # whether it was reported, and the fields
        self._messages: dict[Ticket[Any], tuple[int, ...]] = {}  # of this rank, until all have reported
        self._ends: dict[Ticket[Any], Callable[[Any], None]] = {}
        self._serial = 0

    @property
    def num_open(self) -> int:
        return len(self._ends)

    def open(self, on_end: Callable[[M], None]) -> Ticket[M]:
        """``on_end`` gets the least of all ranks' messages, in the step in which every rank has reported."""
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

    def close(self, ticket: Ticket[M]) -> Callable[[M], None]:
        """Whatever is still reported for this ticket is ignored. Returns what was to happen."""
        on_end = self._ends.pop(ticket)
        self._messages.pop(ticket, None)
        self._serials[ticket.column] = 0
        self._matrix[:, ticket.column] = 0
        self._free.append(ticket.column)
        return on_end

    def report(self, ticket: Ticket[M], message: M, /) -> None:
        """From any thread, once a ticket."""
        self._reports.append((ticket, message))

    def step(self) -> None:
        """Close the tickets that every rank has reported on, and say so to those who opened them, in their opening's
        order."""
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
        for on_end, message in [(self.close(ticket), message) for ticket, message in fresh]:
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
        for column in torch.nonzero(least[0]).flatten().tolist():  # all have reported
            ticket = Ticket(column, self._serials[column])
            mine = self._messages[ticket]
            fields = least[1 : 1 + len(mine), column].tolist()
            agreed.append((ticket, type(mine)(*fields)))
        return agreed

    def clear(self) -> None:
        """Close all tickets."""
        for ticket in sorted(self._ends, key=lambda ticket: ticket.column):
            self.close(ticket)
        self._reports.clear()
