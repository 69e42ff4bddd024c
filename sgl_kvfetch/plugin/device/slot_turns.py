"""Decides which fetch gets slots next. Pure and without a clock, so that all ranks decide alike."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import islice
from typing import Generic, TypeVar

F = TypeVar("F", bound=Hashable)

_SERVED_A_STEP = 8  # limit for each kind, because serving takes the scheduler's time


class SlotTurns(Generic[F]):
    """Serves fetches in order, but those that hold slots before the others, so that they finish and free them."""

    def __init__(self) -> None:
        self._first: dict[F, None] = {}  # fetches that want their first slots
        self._more: dict[F, None] = {}  # fetches that want more

    def __len__(self) -> int:
        return len(self._first) + len(self._more)

    def ask(self, fetch: F, *, has_slots: bool) -> None:
        (self._more if has_slots else self._first)[fetch] = None

    def leave(self, fetch: F) -> None:
        """Withdraw a fetch's request, if it has made one."""
        self._first.pop(fetch, None)
        self._more.pop(fetch, None)

    def serve(self, give: Callable[[F], bool]) -> bool:
        """Offer each fetch its turn. Return False if fetches that hold slots asked for more, and none got any.

        ``give`` returns whether there were slots for the fetch, and then calls ``leave``."""
        served = [give(fetch) for fetch in list(islice(self._more, _SERVED_A_STEP))]
        for fetch in list(islice(self._first, _SERVED_A_STEP)):
            if not give(fetch):
                break
        return not served or any(served)

    def last_of_several(self) -> F | None:
        """Return the last of several fetches that want more slots. None for a single one, which goes on waiting: its
        request could not be computed without slots either."""
        return next(reversed(self._more)) if len(self._more) > 1 else None
