"""The decode pool: N sessions; each chunk goes to the first idle one. Its decode times correct the profile in use, and
make the profile of a new machine."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from sgl_kvfetch.plane.adapt.decode_profile import Decoded, DecodeProfile, VariantProfile, corrections
from sgl_kvfetch.plane.adapt.pipeline import UNCONFIGURED, PoolState, SessionQueue, SessionStart, SessionState

_YIELDING_NICE = 5  # a third of the CPU time of others beside it
_NUM_MEASURED = 64
_MOST_DECODED = 64
_LEAST_LEFT = 0.02  # fraction of a late chunk that is assumed to remain

S = TypeVar("S")
R = TypeVar("R")


@dataclass(slots=True)
class _Active:
    variant: int
    switch_left_s: float
    work: float
    size_bytes: int
    started_s: float
    done: float = 0.0  # chunks that the profile expects to be done by now


class PoolTracker:
    """Estimates how fast a decode pool is, from the sessions' starts and ends: the bytes that it decodes a second, and,
    with a profile, its state and how its decode times differ from the profile.

    Pure: times are arguments, and must not decrease. The decode pool and the simulator both use it.
    """

    def __init__(self, profile: DecodeProfile | None, num_sessions: int) -> None:
        self._profile = profile
        self._num_sessions = num_sessions
        self._measured: deque[tuple[int, float]] = deque(maxlen=_NUM_MEASURED)  # bytes and seconds of a session
        self._configured: list[int | None] = [None] * num_sessions
        self._active: dict[int, _Active] = {}
        self._now_s = 0.0
        self._decoded: list[Decoded] = []

    @property
    def bytes_per_s(self) -> float | None:
        """Return the compressed bytes per second of all sessions together, or None before the first chunk."""
        seconds = sum(s for _, s in self._measured)
        return self._num_sessions * sum(size for size, _ in self._measured) / seconds if seconds > 0 else None

    @property
    def corrected_profile(self) -> DecodeProfile:
        assert self._profile is not None, "the pool has no profile"
        factors = self._factors()
        return self._profile.corrected(factors) if factors else self._profile

    def started(
        self, at_s: float, session: int, variant: int, switches: bool, work: float, size_bytes: int = 0
    ) -> None:
        """Record that a session begins a chunk. ``variant``: UNCONFIGURED if the profile does not have it."""
        self._advance(at_s)
        is_known = self._profile is not None and variant != UNCONFIGURED
        if is_known:
            self._configured[session] = variant
        switch_s = self._profile.variants[variant].switch_s if self._profile and is_known and switches else 0.0
        self._active[session] = _Active(variant if is_known else UNCONFIGURED, switch_s, work, size_bytes, at_s)

    def ended(self, at_s: float, session: int, *, decoded: bool = True) -> None:
        """Record the end of a session's chunk. The time of one that was not ``decoded`` is ignored."""
        self._advance(at_s)
        active = self._active.pop(session)
        if decoded and active.size_bytes:
            self._measured.append((active.size_bytes, at_s - active.started_s))
        ratio = active.done / active.work
        if decoded and ratio > 0:  # at 0 it ended within the expected switching time, which says nothing of decoding
            self._decoded = [*self._decoded[1 - _MOST_DECODED :], Decoded(active.variant, ratio)]

    def state(self, at_s: float, waiting: Sequence[int]) -> PoolState:
        """Return the pool's state by the corrected profile. ``waiting``: variants of the chunks without a session."""
        self._advance(at_s)
        factors = self._factors()
        sessions = [SessionState(variant) for variant in self._configured]
        for i, active in self._known.items():
            left = active.work - active.done / factors.get(active.variant, 1.0)
            sessions[i] = SessionState(active.variant, active.switch_left_s, max(left, _LEAST_LEFT * active.work))
        return PoolState(tuple(sessions), tuple(waiting))

    def _factors(self) -> dict[int, float]:
        """Return the corrections. A running chunk that is already late counts like a finished one."""
        assert self._profile is not None, "the pool has no profile"
        late = [Decoded(a.variant, a.done / a.work) for a in self._known.values() if a.done > a.work]
        return corrections([*self._decoded, *late], len(self._profile.variants))

    @property
    def _known(self) -> dict[int, _Active]:
        """The running chunks whose variants the profile has, by session."""
        return {session: active for session, active in self._active.items() if active.variant != UNCONFIGURED}

    def _advance(self, at_s: float) -> None:
        elapsed_s = at_s - self._now_s
        self._now_s = at_s
        known = self._known.values()
        concurrency = len(known)
        for active in known:
            assert self._profile is not None
            decoding_s = max(0.0, elapsed_s - active.switch_left_s)
            active.switch_left_s = max(0.0, active.switch_left_s - elapsed_s)
            active.done += decoding_s / self._profile.decode_time_s(active.variant, concurrency)


@dataclass(frozen=True, slots=True)
class _Job(Generic[S]):
    run: Callable[[S], Any]
    work: float
    size_bytes: int
    future: Future[Any]


class DecodePool(Generic[S]):
    """Runs jobs on decoding sessions of type ``S``, on the CPU or NVDEC, one chunk at a time on each. Sessions run on
    threads of this process, so their decoders should release the GIL."""

    def __init__(
        self,
        sessions: Sequence[S],
        profile: DecodeProfile | None = None,
        *,
        num_yielding: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``profile``: the decode times that a policy uses; None if no policy uses this pool. The last ``num_yielding``
        sessions run at low priority."""
        self._sessions = list(sessions)
        self.num_sessions = len(self._sessions)
        self._clock = clock
        self._lock = threading.Lock()  # guards the board and the tracker
        self._board: SessionQueue[_Job[S]] = SessionQueue(self.num_sessions)
        self._tracker = PoolTracker(profile, self.num_sessions)
        self._num_usual = self.num_sessions - num_yielding
        self._usual = ThreadPoolExecutor(self._num_usual, "kvfetch-decode")
        self._yielding = ThreadPoolExecutor(max(1, num_yielding), "kvfetch-spare", lower_priority, (_YIELDING_NICE,))
        self._closed = False

    def submit(
        self, job: Callable[[S], R], variant: int | None = None, *, work: float = 1.0, size_bytes: int = 0
    ) -> Future[R]:
        """Run ``job`` on the first idle session. Jobs start in the order of submission.

        ``variant``: index into the pool's profile, None if it is not there. ``work``: the chunk's number of integers
        relative to the profile's chunk. ``size_bytes``: of its bitstream. A job never runs if its future is cancelled
        while it waits.
        """
        future: Future[R] = Future()
        with self._lock:
            assert not self._closed, "the pool is closed"
            item = _Job(job, work, size_bytes, future)
            self._start(self._board.submit(UNCONFIGURED if variant is None else variant, item))
        return future

    def state(self) -> PoolState:
        """Return the pool's state now, for a policy. Chunks of variants that the profile lacks are left out."""
        with self._lock:
            waiting = [variant for variant, _ in self._board.waiting if variant != UNCONFIGURED]
            return self._tracker.state(self._clock(), waiting)

    @property
    def profile(self) -> DecodeProfile:
        """Return the profile, corrected by observed decode times, for a policy."""
        with self._lock:
            return self._tracker.corrected_profile

    @property
    def bytes_per_s(self) -> float | None:
        """Return the compressed bytes per second of all sessions together, or None before the first chunk."""
        with self._lock:
            return self._tracker.bytes_per_s

    def close(self, *, wait: bool = True) -> None:
        """Cancel the waiting jobs. With ``wait``, return only when the running jobs have ended."""
        with self._lock:
            self._closed = True
            for _, job in self._board.waiting:
                job.future.cancel()
            self._board.waiting.clear()
        for threads in (self._usual, self._yielding):
            threads.shutdown(wait=wait)

    def _start(self, start: SessionStart[_Job[S]] | None) -> None:
        """Let a session begin its chunk. Call with the lock held."""
        if start is None:
            return
        job = start.item
        self._tracker.started(self._clock(), start.session, start.variant, start.switches, job.work, job.size_bytes)
        threads = self._usual if start.session < self._num_usual else self._yielding
        threads.submit(self._run, start)

    def _run(self, start: SessionStart[_Job[S]]) -> None:
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
        with self._lock:
            self._tracker.ended(self._clock(), start.session, decoded=wanted and error is None)
            self._start(self._board.finish(start.session))
        if error is not None:
            future.set_exception(error)
        elif wanted:
            future.set_result(result)


def lower_priority(nice: int) -> None:
    """Lower the priority of the calling thread by ``nice``, where that is allowed. On Linux a thread has a
    priority of its own."""
    thread = threading.get_native_id()
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, min(os.getpriority(os.PRIO_PROCESS, thread) + nice, 19))


@dataclass(frozen=True, slots=True)
class Sample(Generic[S]):
    """One chunk in one variant. ``decode`` decodes it on a session; several sessions may call it at once."""

    name: str
    size_bytes: int
    decode: Callable[[S], object]


def measure_profile(
    samples: Sequence[Sample[S]],
    sessions: Sequence[S],
    *,
    device: str,
    source: str,
    chunk_values: int,
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
    on_step: Callable[[str], None] = lambda _: None,
) -> DecodeProfile:
    """Return medians over ``rounds`` chunks per session, for 1, 2, ... sessions at once, smallest variant first."""
    ordered = sorted(samples, key=lambda s: s.size_bytes)
    for sample in ordered:
        sample.decode(sessions[0])  # warm up: one-time costs, such as loading a library, must not count
    variants = []
    for sample in ordered:
        on_step(sample.name)
        times = tuple(_median_s(sample, sessions[:k], rounds, clock) for k in range(1, len(sessions) + 1))
        others = [other for other in ordered if other is not sample]
        switch_s = _switch_s(sample, others, sessions[0], rounds, clock) if others else 0.0
        variants.append(
            VariantProfile(name=sample.name, size_bytes=sample.size_bytes, decode_s=times, switch_s=switch_s)
        )
    return DecodeProfile(device=device, source=source, variants=tuple(variants), chunk_values=chunk_values)


def _decode_s(sample: Sample[S], clock: Callable[[], float], session: S) -> float:
    started_s = clock()
    sample.decode(session)
    return clock() - started_s


def _median_s(sample: Sample[S], sessions: Sequence[S], rounds: int, clock: Callable[[], float]) -> float:
    """Return the median seconds per chunk while all ``sessions`` decode at once."""
    count, job = len(sessions), partial(_decode_s, sample, clock)
    with closing(DecodePool(sessions)) as pool:
        times = [future.result() for future in [pool.submit(job) for _ in range(count * (rounds + 2))]]
    # The first chunks set up their sessions, and the last ones run with fewer others: leave both out.
    return statistics.median(times[count : count * (rounds + 1)])


def _switch_s(
    sample: Sample[S], others: Sequence[Sample[S]], session: S, rounds: int, clock: Callable[[], float]
) -> float:
    """Return the additional seconds that a chunk takes after one of another variant on the same session."""

    def after(previous: Iterator[Sample[S]]) -> list[float]:
        times = []
        for before in previous:
            before.decode(session)
            times.append(_decode_s(sample, clock, session))
        return times

    other = statistics.median(after(others[i % len(others)] for i in range(rounds)))
    same = statistics.median(after(sample for _ in range(rounds)))
    return max(0.0, other - same)
