"""The decode pool: N sessions, each chunk to the first that is idle."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import Any, Generic, TypeVar

from sgl_kvfetch.adapt.board import PoolBoard, Start
from sgl_kvfetch.adapt.pipeline import PoolState
from sgl_kvfetch.adapt.profile import DecodeProfile
from sgl_kvfetch.adapt.tracker import PoolTracker

S = TypeVar("S")
R = TypeVar("R")


class DecodePool(ABC, Generic[S]):
    """Sessions of type ``S`` (whatever a chunk is decoded with: nothing on a CPU, a decoder on NVDEC), each of which
    decodes one chunk at a time."""

    @abstractmethod
    def submit(self, variant: int, job: Callable[[S], R], *, work: float = 1.0) -> Future[R]:
        """Run ``job`` with the first session that is idle, in the order of submission.

        ``variant``: index into the pool's profile; ``work``: the chunk's integers against those of the profile's
        chunk. A future that is cancelled while it waits is never run.
        """

    @abstractmethod
    def state(self) -> PoolState:
        """For a policy: what the pool is at, this moment."""

    @property
    @abstractmethod
    def profile(self) -> DecodeProfile:
        """For a policy: the profile, corrected by what was observed."""

    @abstractmethod
    def close(self) -> None:
        """Cancel what waits, and wait for what runs."""


@dataclass(frozen=True, slots=True)
class _Job(Generic[S]):
    run: Callable[[S], Any]
    work: float
    future: Future[Any]


class ThreadDecodePool(DecodePool[S]):
    """Sessions on threads of this process: decoders that release the GIL, be they on the CPU or on NVDEC."""

    def __init__(
        self, profile: DecodeProfile, sessions: Sequence[S], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._sessions = list(sessions)
        self._clock = clock
        self._lock = Lock()  # guards the board and the tracker
        self._board: PoolBoard[_Job[S]] = PoolBoard(len(self._sessions))
        self._tracker = PoolTracker(profile, len(self._sessions))
        self._threads = ThreadPoolExecutor(len(self._sessions), thread_name_prefix="kvfetch-decode")
        self._closed = False

    def submit(self, variant: int, job: Callable[[S], R], *, work: float = 1.0) -> Future[R]:
        future: Future[R] = Future()
        with self._lock:
            assert not self._closed, "the pool is closed"
            start = self._board.submit(variant, _Job(job, work, future))
            if start is not None:
                self._note_start(start)
                self._threads.submit(self._run, start)
        return future

    def state(self) -> PoolState:
        with self._lock:
            return self._tracker.state(self._clock(), [variant for variant, _ in self._board.waiting])

    @property
    def profile(self) -> DecodeProfile:
        with self._lock:
            return self._tracker.corrected_profile

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for _, job in self._board.waiting:
                job.future.cancel()
        self._threads.shutdown()

    def _run(self, first: Start[_Job[S]]) -> None:
        """A session works until nothing waits."""
        start: Start[_Job[S]] | None = first
        while start is not None:
            job, decoded = start.item, False
            result: Any = None
            error: BaseException | None = None
            if job.future.set_running_or_notify_cancel():
                try:
                    result = job.run(self._sessions[start.session])
                    decoded = True
                except BaseException as e:  # whoever waits is to have it, as from any executor
                    error = e
            # The session is free before anyone hears of the result, so that whoever asks then sees it idle.
            next_start = self._next(start.session, decoded)
            if error is not None:
                job.future.set_exception(error)
            elif decoded:
                job.future.set_result(result)
            start = next_start

    def _next(self, session: int, decoded: bool) -> Start[_Job[S]] | None:
        with self._lock:
            if decoded:
                self._tracker.finished(self._clock(), session, 0)
            else:
                self._tracker.abandoned(self._clock(), session)
            start = self._board.finish(session)
            if start is not None:
                self._note_start(start)
            return start

    def _note_start(self, start: Start[_Job[S]]) -> None:
        self._tracker.started(self._clock(), start.session, start.variant, start.switches, start.item.work, 0)
