"""The decode pool: N sessions; each chunk goes to the first idle one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import Any, Generic, TypeVar

from sgl_kvfetch.plane.adapt.decode_profile import DecodeProfile
from sgl_kvfetch.plane.adapt.pipeline import PoolState
from sgl_kvfetch.plane.adapt.sessions import UNCONFIGURED, SessionQueue, Start
from sgl_kvfetch.plane.adapt.tracker import PoolTracker

S = TypeVar("S")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class _Job(Generic[S]):
    run: Callable[[S], Any]
    work: float
    future: Future[Any]


class DecodePool(Generic[S]):
    """Runs jobs on decoding sessions of type ``S``, on the CPU or NVDEC, one chunk at a time on each. Sessions run on
    threads of this process, so their decoders should release the GIL."""

    def __init__(
        self,
        sessions: Sequence[S],
        profile: DecodeProfile | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``profile``: the decode times that a policy uses; None if no policy uses this pool."""
        self._sessions = list(sessions)
        self.num_sessions = len(self._sessions)
        self._clock = clock
        self._lock = Lock()  # guards the board and the tracker
        self._board: SessionQueue[_Job[S]] = SessionQueue(self.num_sessions)
        self._tracker = None if profile is None else PoolTracker(profile, self.num_sessions)
        self._threads = ThreadPoolExecutor(self.num_sessions, thread_name_prefix="kvfetch-decode")
        self._closed = False

    def submit(self, job: Callable[[S], R], variant: int | None = None, *, work: float = 1.0) -> Future[R]:
        """Run ``job`` on the first idle session. Jobs start in the order of submission.

        ``variant``: index into the pool's profile, None if it is not there. ``work``: the chunk's number of integers
        relative to the profile's chunk. A job never runs if its future is cancelled while it waits.
        """
        future: Future[R] = Future()
        with self._lock:
            assert not self._closed, "the pool is closed"
            self._start(self._board.submit(UNCONFIGURED if variant is None else variant, _Job(job, work, future)))
        return future

    def state(self) -> PoolState:
        """Return the pool's state now, for a policy. Chunks of variants that the profile lacks are left out."""
        assert self._tracker is not None, "the pool has no profile"
        with self._lock:
            waiting = [variant for variant, _ in self._board.waiting if variant != UNCONFIGURED]
            return self._tracker.state(self._clock(), waiting)

    @property
    def profile(self) -> DecodeProfile:
        """Return the profile, corrected by observed decode times, for a policy."""
        assert self._tracker is not None, "the pool has no profile"
        with self._lock:
            return self._tracker.corrected_profile

    def close(self, *, wait: bool = True) -> None:
        """Cancel the waiting jobs. With ``wait``, return only when the running jobs have ended."""
        with self._lock:
            self._closed = True
            for _, job in self._board.waiting:
                job.future.cancel()
            self._board.waiting.clear()
        self._threads.shutdown(wait=wait)

    def _start(self, start: Start[_Job[S]] | None) -> None:
        """Let a session begin its chunk. Call with the lock held."""
        if start is None:
            return
        if self._tracker is not None and start.variant != UNCONFIGURED:
            self._tracker.started(self._clock(), start.session, start.variant, start.switches, start.item.work)
        self._threads.submit(self._run, start)

    def _run(self, start: Start[_Job[S]]) -> None:
        future = start.item.future
        result: Any = None
        error: BaseException | None = None
        wanted = future.set_running_or_notify_cancel()
        if wanted:
            try:
                result = start.item.run(self._sessions[start.session])
            except BaseException as e:  # passed to the future, as in any executor
                error = e
        # Free the session before the future is done, so that whoever then reads the state sees it idle.
        self._end(start, decoded=wanted and error is None)
        if error is not None:
            future.set_exception(error)
        elif wanted:
            future.set_result(result)

    def _end(self, start: Start[_Job[S]], *, decoded: bool) -> None:
        with self._lock:
            if self._tracker is not None and start.variant != UNCONFIGURED:
                if decoded:
                    self._tracker.finished(self._clock(), start.session)
                else:
                    self._tracker.abandoned(self._clock(), start.session)
            self._start(self._board.finish(start.session))
