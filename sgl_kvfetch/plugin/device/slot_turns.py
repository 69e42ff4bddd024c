"""Who gets slots next. Pure; no clock, so that all ranks serve alike."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Generic, Protocol, TypeVar

_SERVED_A_STEP = 8  # so many of each kind: it is the scheduler's time


class Asking(Protocol):
    """What asks for slots."""

    num_rounds: int  # that have got some


T = TypeVar("T", bound=Asking)


class SlotTurns(Generic[T]):
    """First come, first served; but who holds some already goes first, so as to be done with them. Things are hashed by
    identity."""

    def __init__(self) -> None:
        self._first: dict[T, None] = {}  # those that want their first slots
        self._more: dict[T, None] = {}  # those that want more

    def __len__(self) -> int:
        return len(self._first) + len(self._more)

    def ask(self, item: T) -> None:
        (self._more if item.num_rounds else self._first)[item] = None

    def leave(self, item: T) -> None:
        """It asks no more. It may not have asked."""
        self._first.pop(item, None)
        self._more.pop(item, None)

    def serve(self, give: Callable[[T], bool]) -> bool:
        """Offer each its turn; who takes slots leaves. False: of those that hold some, none could have more.

        ``give``: whether there were slots for it."""
        served = [give(item) for item in list(islice(self._more, _SERVED_A_STEP))]
        for item in list(islice(self._first, _SERVED_A_STEP)):
            if not give(item):
                break
        return not served or any(served)

    def last_of_several(self) -> T | None:
        """Of those that want more. None for a single one, which waits: its request could not be computed without slots
        either."""
        return next(reversed(self._more)) if len(self._more) > 1 else None
