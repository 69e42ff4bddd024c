"""Who decodes what: each chunk goes to the first idle session, or waits its turn. Decides; does nothing itself.

The decode pool and the simulator both go by it.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

UNCONFIGURED = -1

T = TypeVar("T")


class Start(NamedTuple, Generic[T]):
    """A session is to decode a chunk now. ``switches``: it decoded another variant before, or none yet."""

    session: int
    variant: int
    switches: bool
    item: T


class SessionQueue(Generic[T]):
    """Sessions, what they are set up for, and the chunks that wait for one."""

    __slots__ = ("busy", "configured", "waiting")

    def __init__(self, num_sessions: int) -> None:
        assert num_sessions >= 1, num_sessions
        self.busy = [False] * num_sessions
        self.configured = [UNCONFIGURED] * num_sessions  # the variant last decoded
        self.waiting: list[tuple[int, T]] = []

    @property
    def num_sessions(self) -> int:
        return len(self.busy)

    def submit(self, variant: int, item: T) -> Start[T] | None:
        """None if it waits."""
        if False not in self.busy:
            self.waiting.append((variant, item))
            return None
        # The first, not the one that idled longest: it is the likeliest to be set up already.
        return self._start(self.busy.index(False), variant, item)

    def finish(self, session: int) -> Start[T] | None:
        """A session is done; the chunk that waited longest, if any, is its next."""
        assert self.busy[session], session
        self.busy[session] = False
        if not self.waiting:
            return None
        variant, item = self.waiting.pop(0)
        return self._start(session, variant, item)

    def copy(self) -> SessionQueue[T]:
        new: SessionQueue[T] = SessionQueue.__new__(SessionQueue)
        new.busy, new.configured, new.waiting = self.busy[:], self.configured[:], self.waiting[:]
        return new

    def _start(self, session: int, variant: int, item: T) -> Start[T]:
        switches = self.configured[session] != variant
        self.busy[session] = True
        self.configured[session] = variant
        return Start(session, variant, switches, item)
