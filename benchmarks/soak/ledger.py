"""What happened: operations by result, disturbances, and everything that should not have happened."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from sgl_kvfetch.errors import StoreError, StoreErrorReason

DisturbanceKind = Literal["killed", "full"]

# Errors that operations may meet during a disturbance. All others are problems. A full disk is no excuse for reads.
_EXCUSED: dict[DisturbanceKind, frozenset[StoreErrorReason]] = {
    "killed": frozenset({"refused", "truncated", "timeout", "server"}),
    "full": frozenset({"full"}),
}
_READS = frozenset({"read", "read broken off", "list"})
_NUM_RECENT = 3


@dataclass
class Problem:
    """Something that should not have happened: how often it did, and an example."""

    what: str
    first_s: float  # since the start of the run
    example: str
    count: int = 0


@dataclass
class Disturbance:
    kind: DisturbanceKind
    began_s: float
    ended_s: float = float("inf")

    def overlaps(self, began_s: float) -> bool:
        """Return whether an operation that began then, and has just ended, may have met it."""
        return self.ended_s >= began_s


class Ledger:
    def __init__(self) -> None:
        self.started_s = time.monotonic()
        self.outcomes: Counter[tuple[str, str]] = Counter()  # operation, result
        self.problems: dict[str, Problem] = {}
        self.disturbances: list[Disturbance] = []
        self.lookups_s: list[float] = []  # durations of those that no kill disturbed
        # The segments committed last. Nobody has deleted them since, and eviction has no reason to.
        self.recent: deque[str] = deque(maxlen=_NUM_RECENT)

    def problem(self, what: str, example: str = "") -> None:
        found = self.problems.setdefault(what, Problem(what, time.monotonic() - self.started_s, example))
        found.count += 1

    def note(self, operation: str, result: str) -> None:
        self.outcomes[operation, result] += 1

    def note_error(self, operation: str, error: StoreError, began_s: float) -> None:
        """Count a failed operation. It is a problem unless a disturbance explains it."""
        self.note(operation, error.reason)
        met = {each.kind for each in self._met_by(began_s)} - ({"full"} if operation in _READS else set())
        if not any(error.reason in _EXCUSED[kind] for kind in met):
            self.problem(f"{operation}: {error.reason}", str(error))

    def record_lookup(self, began_s: float) -> None:
        if not any(each.kind == "killed" for each in self._met_by(began_s)):
            self.lookups_s.append(time.monotonic() - began_s)

    def _met_by(self, began_s: float) -> Iterator[Disturbance]:
        return (each for each in self.disturbances if each.overlaps(began_s))

    @contextmanager
    def disturbing(self, kind: DisturbanceKind) -> Iterator[None]:
        disturbance = Disturbance(kind, time.monotonic())
        self.disturbances.append(disturbance)
        try:
            yield
        finally:
            disturbance.ended_s = time.monotonic()
            if kind == "full":
                self.recent.clear()  # writes that failed may have evicted everything

    def is_disturbed(self, kind: DisturbanceKind) -> bool:
        return any(each.kind == kind and each.ended_s == float("inf") for each in self.disturbances)

    def committed(self, name: str) -> None:
        if name in self.recent:
            self.recent.remove(name)
        self.recent.append(name)

    def deleting(self, name: str) -> None:
        if name in self.recent:
            self.recent.remove(name)
