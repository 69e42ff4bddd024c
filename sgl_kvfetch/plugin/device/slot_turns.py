"""Decides which fetch gets slots next. Pure and without a clock, so that all ranks decide alike."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Generic, Protocol, TypeVar

_SERVED_A_STEP = 8  # limit for each kind, because serving takes the scheduler's time


class Asking(Protocol):
    """An item that asks for slots."""

    num_rounds: int  # rounds that have got slots


T = TypeVar("T", bound=Asking)


class SlotTurns(Generic[T]):
    """Serves items first come, first served, but items that already hold slots before the others, so that they finish
    and free them. Items are hashed by identity."""

    def __init__(self) -> None:
        self._first: dict[T, None] = {}  # items that want their first slots
        self._more: dict[T, None] = {}  # items that want more

    def __len__(self) -> int:
        return len(self._first) + len(self._more)

    def ask(self, item: T) -> None:
        (self._more if item.num_rounds else self._first)[item] = None

    def leave(self, item: T) -> None:
        """Withdraw an item's request, if it has made one."""
        self._first.pop(item, None)
        self._more.pop(item, None)

    def serve(self, give: Callable[[T], bool]) -> bool:
        """Offer each item its turn. Return False if items that hold slots asked for more, and none got any.

        ``give`` returns whether there were slots for the item, and then calls ``leave``."""
        served = [give(item) for item in list(islice(self._more, _SERVED_A_STEP))]
        for item in list(islice(self._first, _SERVED_A_STEP)):
            if not give(item):
                break
        return not served or any(served)

    def last_of_several(self) -> T | None:
        """Return the last of several items that want more slots. None for a single one, which goes on waiting: its
        request could not be computed without slots either."""
        return next(reversed(self._more)) if len(self._more) > 1 else None
