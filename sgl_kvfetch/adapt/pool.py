"""The decode pool: N sessions; each chunk goes to the first idle one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import Any, Generic, TypeVar

from sgl_kvfetch.adapt.decode_profile import DecodeProfile
from sgl_kvfetch.adapt.pipeline import PoolState
from sgl_kvfetch.adapt.sessions import UNCONFIGURED, SessionQueue, Start
from sgl_kvfetch.adapt.tracker import PoolTracker

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
        self._clock = clock
        self._lock = Lock()  # guards the board and the tracker
        self._board: SessionQueue[_Job[S]] = SessionQueue(len(self._sessions))
        self._tracker = None if profile is None else PoolTracker(profile, len(self._sessions))
        self._threads = ThreadPoolExecutor(len(self._sessions), thread_name_prefix="kvfetch-decode")
        self._closed = False

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def submit(self, job: Callable[[S], R], variant: int | None = None, *, work: float = 1.0) -> Future[R]:
        """Run ``job`` on the first idle session. Jobs start in the order of submission.

        ``variant``: index into the pool's profile, None if it is not there. ``work``: the chunk's number of integers
        relative to the profile's chunk. A job never runs if its future is cancelled while it waits.
        """
        future: Future[R] = Future()
        with self._lock:
            assert not self._closed, "the pool is closed"
            start = self._board.submit(UNCONFIGURED if variant is None else variant, _Job(job, work, future))
            if start is not None:
                self._note_start(start)
                self._threads.submit(self._run, start)
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
        self._threads.shutdown(wait=wait)

    def _run(self, first: Start[_Job[S]]) -> None:
        """Run jobs on one session until none waits."""
        start: Start[_Job[S]] | None = first
        while start is not None:
            job, decoded = start.item, False
            result: Any = None
            error: BaseException | None = None
            if job.future.set_running_or_notify_cancel():
                try:
                    result = job.run(self._sessions[start.session])
                    decoded = True
                except BaseException as e:  # passed to the future, as in any executor
                    error = e
            # Free the session before the future is done, so that whoever then reads the state sees it idle.
            next_start = self._next(start, decoded)
            if error is not None:
                job.future.set_exception(error)
            elif decoded:
                job.future.set_result(result)
            start = next_start

    def _next(self, ended: Start[_Job[S]], decoded: bool) -> Start[_Job[S]] | None:
        with self._lock:
            self._note_end(ended, decoded)
            start = self._board.finish(ended.session)
            if start is not None:
                self._note_start(start)
            return start

    def _note_start(self, start: Start[_Job[S]]) -> None:
        if self._tracker is not None and start.variant != UNCONFIGURED:
            self._tracker.started(self._clock(), start.session, start.variant, start.switches, start.item.work, 0)

    def _note_end(self, ended: Start[_Job[S]], decoded: bool) -> None:
        if self._tracker is None or ended.variant == UNCONFIGURED:
            return
        if decoded:
            self._tracker.finished(self._clock(), ended.session, 0)
        else:
            self._tracker.abandoned(self._clock(), ended.session)
