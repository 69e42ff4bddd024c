"""Assigns chunks to sessions: each goes to the first idle session, or waits in a queue. Only decides, without I/O.

The decode pool and the simulator both use it.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

UNCONFIGURED = -1

T = TypeVar("T")


class Start(NamedTuple, Generic[T]):
    """Tells a session to decode a chunk now. ``switches``: its last chunk was of another variant, or it is new."""

    session: int
    variant: int
    switches: bool
    item: T


class SessionQueue(Generic[T]):
    """Holds the sessions, their last variants, and the chunks that wait for a session."""

    __slots__ = ("busy", "configured", "waiting")

    def __init__(self, num_sessions: int) -> None:
        assert num_sessions >= 1, num_sessions
        self.busy = [False] * num_sessions
        self.configured = [UNCONFIGURED] * num_sessions  # the variant last decoded
        self.waiting: list[tuple[int, T]] = []

    def submit(self, variant: int, item: T) -> Start[T] | None:
        """Return the start of the chunk on an idle session, or None if the chunk has to wait."""
        if False not in self.busy:
            self.waiting.append((variant, item))
            return None
        # Not the session that idled longest: the first is the most likely to be set up already.
        return self._start(self.busy.index(False), variant, item)

    def finish(self, session: int) -> Start[T] | None:
        """Free a session. Return the start of the chunk that waited longest, or None."""
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
