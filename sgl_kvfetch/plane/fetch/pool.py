"""The decode pool: sessions on threads, which decode cells one by one, and what decoding takes there.

A cell goes to the first idle session. Its time, by the way in which it is coded, says what the next ones will take:
`offers` chooses by that.
"""

from __future__ import annotations

import heapq
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

_YIELDING_NICE = 5  # a third of the CPU time of others beside it
_NUM_MEASURED = 64
_NUM_MEASURED_A_CODING = 16
# What was never decoded is tried where the decoders are the limit: it is expected to take so much of the least time.
_UNMEASURED = 0.9

S = TypeVar("S")
R = TypeVar("R")


class DecodeRates:
    """How long a session took for the last cells. Pure."""

    def __init__(self) -> None:
        self._measured: deque[tuple[int, float]] = deque(maxlen=_NUM_MEASURED)  # bytes and seconds
        # Integers and seconds, by coding.
        self._by_coding: defaultdict[str, deque[tuple[int, float]]] = defaultdict(
            lambda: deque(maxlen=_NUM_MEASURED_A_CODING)
        )

    def add(self, coding: str, num_integers: int, size_bytes: int, seconds: float) -> None:
        """Record that a session took ``seconds`` for so many integers, of ``size_bytes`` as they are coded."""
        self._measured.append((size_bytes, seconds))
        self._by_coding[coding].append((num_integers, seconds))

    @property
    def bytes_per_s(self) -> float | None:
        """Return the compressed bytes per second of a session, or None before the first cell."""
        seconds = sum(s for _, s in self._measured)
        return sum(size for size, _ in self._measured) / seconds if seconds > 0 else None

    def seconds(self, coding: str, num_integers: float) -> float:
        """Return how long a session is expected to take for so many integers: 0 before the first cell."""
        found = self._by_coding.get(coding)
        if found:
            return num_integers * _mean_s(found)
        return num_integers * _UNMEASURED * min(map(_mean_s, self._by_coding.values()), default=0.0)


def _mean_s(measured: Sequence[tuple[int, float]]) -> float:
    """Return the seconds an integer."""
    return sum(seconds for _, seconds in measured) / sum(count for count, _ in measured)


@dataclass(frozen=True, slots=True)
class _Job(Generic[S]):
    run: Callable[[S], Any]
    coding: str
    num_integers: int
    size_bytes: int
    expected_s: float
    future: Future[Any]


class DecodePool(Generic[S]):
    """Runs jobs on decoding sessions of type ``S``, on the CPU or NVDEC, one at a time on each. Sessions run on threads
    of this process, so their decoders should release the GIL."""

    def __init__(
        self, sessions: Sequence[S], *, num_yielding: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """The last ``num_yielding`` sessions run at low priority."""
        self._sessions = list(sessions)
        self.num_sessions = len(self._sessions)
        self._clock = clock
        self._lock = threading.Lock()  # guards all that follows, up to the threads
        # Not the session that idled longest: the first is the most likely to be set up already.
        self._idle = list(range(self.num_sessions))  # a heap
        self._waiting: deque[_Job[S]] = deque()
        self._rates = DecodeRates()
        self._queued_s = 0.0
        self._closed = False
        self._num_usual = self.num_sessions - num_yielding
        self._usual = ThreadPoolExecutor(self._num_usual, "kvfetch-decode")
        self._yielding = ThreadPoolExecutor(max(1, num_yielding), "kvfetch-spare", lower_priority, (_YIELDING_NICE,))

    def submit(
        self, job: Callable[[S], R], coding: str = "", *, num_integers: int = 0, size_bytes: int = 0
    ) -> Future[R]:
        """Run ``job`` on the first idle session. Jobs start in the order of submission.

        ``coding``: of its cells, which have so many integers, and take ``size_bytes`` as they are coded; without
        integers, its time is not measured. A job never runs if its future is cancelled while it waits.
        """
        future: Future[R] = Future()
        with self._lock:
            assert not self._closed, "the pool is closed"
            expected_s = self._rates.seconds(coding, num_integers)
            self._queued_s += expected_s
            self._waiting.append(_Job(job, coding, num_integers, size_bytes, expected_s, future))
            self._start()
        return future

    @property
    def bytes_per_s(self) -> float | None:
        """Return the compressed bytes per second of all sessions together, or None before the first cell."""
        with self._lock:
            a_session = self._rates.bytes_per_s
        return None if a_session is None else self.num_sessions * a_session

    def seconds(self, coding: str, num_integers: float) -> float:
        """Return how long a session is expected to take for so many integers: 0 before the first cell."""
        with self._lock:
            return self._rates.seconds(coding, num_integers)

    @property
    def queued_s(self) -> float:
        """Return how long one session would take for all jobs that are not done, by what was expected of them."""
        return self._queued_s

    def close(self, *, wait: bool = True) -> None:
        """Cancel the waiting jobs. With ``wait``, return only when the running jobs have ended."""
        with self._lock:
            self._closed = True
            for job in self._waiting:
                job.future.cancel()
            self._waiting.clear()
        for threads in (self._usual, self._yielding):
            threads.shutdown(wait=wait)

    def _start(self) -> None:
        """Let idle sessions begin what waits. Call with the lock held."""
        while self._idle and self._waiting:
            session = heapq.heappop(self._idle)
            threads = self._usual if session < self._num_usual else self._yielding
            threads.submit(self._run, session, self._waiting.popleft())

    def _run(self, session: int, job: _Job[S]) -> None:
        """Run a job on its session's thread, note its time, and let the session begin what waits."""
        result: Any = None
        error: BaseException | None = None
        started_s = self._clock()
        wanted = job.future.set_running_or_notify_cancel()
        if wanted:
            try:
                result = job.run(self._sessions[session])
            except BaseException as e:  # passed to the future, as in any executor
                error = e
        # Free the session before the future is done, so that whoever then submits finds it idle.
        with self._lock:
            if wanted and error is None and job.num_integers:
                self._rates.add(job.coding, job.num_integers, job.size_bytes, self._clock() - started_s)
            self._queued_s -= job.expected_s
            heapq.heappush(self._idle, session)
            self._start()
        if error is not None:
            job.future.set_exception(error)
        elif wanted:
            job.future.set_result(result)


def lower_priority(nice: int) -> None:
    """Lower the priority of the calling thread by ``nice``, where that is allowed. On Linux a thread has a
    priority of its own."""
    thread = threading.get_native_id()
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, min(os.getpriority(os.PRIO_PROCESS, thread) + nice, 19))
