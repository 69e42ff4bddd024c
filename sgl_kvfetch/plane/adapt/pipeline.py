"""A model of a decode pool over time, which policies use to look ahead and the simulator runs on.

Chunks that are decoded at once share the decoders. While ``k`` chunks are decoded, each progresses at
``1 / decode_s[k - 1]`` chunks per second. A session that switches variants first takes ``switch_s``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from sgl_kvfetch.plane.adapt.decode_profile import DecodeProfile

UNCONFIGURED = -1

T = TypeVar("T")


class SessionStart(NamedTuple, Generic[T]):
    """Tells a session to decode a chunk now. ``switches``: its last chunk was of another variant, or it is new."""

    session: int
    variant: int
    switches: bool
    item: T


class SessionQueue(Generic[T]):
    """Assigns chunks to sessions: each goes to the first idle session, or waits in a queue. Only decides, without I/O.

    The decode pool and the simulator both use it.
    """

    __slots__ = ("busy", "configured", "waiting")

    def __init__(self, num_sessions: int) -> None:
        assert num_sessions >= 1, num_sessions
        self.busy = [False] * num_sessions
        self.configured = [UNCONFIGURED] * num_sessions  # the variant last decoded
        self.waiting: list[tuple[int, T]] = []

    def submit(self, variant: int, item: T) -> SessionStart[T] | None:
        """Return the start of the chunk on an idle session, or None if the chunk has to wait."""
        if False not in self.busy:
            self.waiting.append((variant, item))
            return None
        # Not the session that idled longest: the first is the most likely to be set up already.
        return self._start(self.busy.index(False), variant, item)

    def finish(self, session: int) -> SessionStart[T] | None:
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

    def _start(self, session: int, variant: int, item: T) -> SessionStart[T]:
        switches = self.configured[session] != variant
        self.busy[session] = True
        self.configured[session] = variant
        return SessionStart(session, variant, switches, item)


@dataclass(frozen=True, slots=True)
class SessionState:
    """``configured``: the current or last variant, None for a new session. ``switch_left_s`` and ``chunks_left`` (1 is
    a whole chunk of the profile's size) are 0 for an idle session."""

    configured: int | None = None
    switch_left_s: float = 0.0
    chunks_left: float = 0.0


@dataclass(frozen=True, slots=True)
class PoolState:
    """A decode pool's state at one time. ``waiting``: variants of the chunks that have arrived but have no session."""

    sessions: tuple[SessionState, ...]
    waiting: tuple[int, ...] = ()

    @property
    def num_busy(self) -> int:
        return sum(s.chunks_left > 0 or s.switch_left_s > 0 for s in self.sessions)


class Pipeline:
    """A simulated pool. Copies share the tables that are derived from ``profile``."""

    __slots__ = ("_active", "_switch_s", "_times", "board", "now_s", "work")

    def __init__(self, profile: DecodeProfile, num_sessions: int, *, work: float = 1.0) -> None:
        """``work``: a chunk's number of integers relative to that of the profile's chunk."""
        indices = range(len(profile.variants))
        # Indexed by concurrency, then by variant.
        self._times = [[0.0] * len(indices)] + [
            [profile.decode_time_s(v, k) for v in indices] for k in range(1, num_sessions + 1)
        ]
        self._switch_s = [v.switch_s for v in profile.variants]
        self.board: SessionQueue[None] = SessionQueue(num_sessions)
        self.now_s = 0.0
        self.work = work
        # [session, variant, seconds of switching left, chunks left]
        self._active: list[list[float]] = []

    @classmethod
    def from_state(cls, profile: DecodeProfile, state: PoolState, *, work: float = 1.0) -> Pipeline:
        new = cls(profile, len(state.sessions), work=work)
        for i, session in enumerate(state.sessions):
            if session.configured is None:
                continue
            new.board.configured[i] = session.configured
            if session.chunks_left > 0 or session.switch_left_s > 0:
                new.board.busy[i] = True
                new._active.append([i, session.configured, session.switch_left_s, session.chunks_left])
        for variant in state.waiting:
            new.deliver(variant)
        return new

    def state(self) -> PoolState:
        sessions = [SessionState(None if v == UNCONFIGURED else v) for v in self.board.configured]
        for session, variant, switch_s, chunks in self._active:
            sessions[int(session)] = SessionState(int(variant), switch_s, chunks)
        return PoolState(tuple(sessions), tuple(variant for variant, _ in self.board.waiting))

    def copy(self) -> Pipeline:
        new = Pipeline.__new__(Pipeline)
        new._times, new._switch_s, new.now_s, new.work = self._times, self._switch_s, self.now_s, self.work
        new.board = self.board.copy()
        new._active = [entry[:] for entry in self._active]
        return new

    def deliver(self, variant: int) -> None:
        """Let a chunk arrive now."""
        self.begin(self.board.submit(variant, None))

    def deliver_at(self, at_s: float, variant: int) -> None:
        """Let a chunk arrive at ``at_s``, or now if that is in the past."""
        self.run_until(max(at_s, self.now_s))
        self.deliver(variant)

    def run_until_waiting(self, most: int) -> None:
        """Let time pass until at most ``most`` chunks wait for a session."""
        self._run(math.inf, most)

    def run_until(self, until_s: float) -> None:
        """Let time pass until ``until_s``. With infinity, ``now_s`` becomes the time when all chunks are decoded."""
        self._run(until_s, -1)
        if until_s < math.inf:
            self.now_s = until_s

    def _run(self, until_s: float, most_waiting: int) -> None:
        active = self._active
        while active and len(self.board.waiting) > most_waiting:
            times = self._times[len(active)]
            next_s, first = math.inf, active[0]
            for entry in active:
                left_s = entry[2] + entry[3] * times[int(entry[1])]
                if left_s < next_s:
                    next_s, first = left_s, entry
            if self.now_s + next_s > until_s:
                self._progress(until_s - self.now_s, times)
                break
            active.remove(first)
            self._progress(next_s, times)
            self.now_s += next_s
            self.end(int(first[0]))

    def drained_s(self) -> float:
        """Return the time when all arrived chunks will be decoded. Advances the pipeline to that time."""
        self.run_until(math.inf)
        return self.now_s

    def begin(self, start: SessionStart[None] | None) -> None:
        """Let a session start a chunk. A subclass may extend this, and ``end``, to observe the pool."""
        if start is not None:
            switch_s = self._switch_s[start.variant] if start.switches else 0.0
            self._active.append([start.session, start.variant, switch_s, self.work])

    def end(self, session: int) -> None:
        """Let a session that has decoded its chunk take the next one."""
        self.begin(self.board.finish(session))

    def _progress(self, elapsed_s: float, times: Sequence[float]) -> None:
        for entry in self._active:
            switch_s = entry[2]
            if switch_s >= elapsed_s:
                entry[2] = switch_s - elapsed_s
            else:
                entry[2] = 0.0
                entry[3] -= (elapsed_s - switch_s) / times[int(entry[1])]
                if entry[3] < 0.0:  # rounding
                    entry[3] = 0.0
