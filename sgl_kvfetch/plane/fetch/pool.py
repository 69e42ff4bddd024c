"""The decode pool, what decoding takes there, and a model of it over time.

N sessions decode; each cell goes to the first idle one. A decode profile has a cell's size and decode time, by
variant and by the number of cells decoded at once. The pool's decode times correct the profile in use, and make the
profile of a new machine.

Policies look ahead with a model of the pool, and the simulator runs on it. Cells that are decoded at once share the
decoders. While ``k`` cells are decoded, each progresses at ``1 / decode_s[k - 1]`` cells per second. A session that
switches variants first takes ``switch_s``.
"""

from __future__ import annotations

import math
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, Self, TypeVar

import msgspec

from sgl_kvfetch.errors import DECODE_ERRORS, ConfigError, why

VERSION = 1


class VariantProfile(msgspec.Struct, frozen=True, kw_only=True):
    """One way to encode a cell.

    ``decode_s[k - 1]``: seconds per cell when ``k`` cells are decoded at once. ``switch_s``: additional seconds that
    a session needs if it is new, or if its previous cell was of another variant.
    """

    name: str  # a resolution, or a codec that has no pictures
    size_bytes: int
    decode_s: tuple[float, ...]
    switch_s: float = 0.0


class DecodeProfile(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One machine's decode times for a cell in each variant, smallest variant first as in KVFetcher's tables."""

    device: str
    source: str  # a paper's table, or when and how the figures were measured
    variants: tuple[VariantProfile, ...]
    cell_values: int | None = None  # integers in the measured cell; decode times are proportional to it
    version: int = VERSION

    def __post_init__(self) -> None:
        """Check the fields. Raises ConfigError."""
        if self.version != VERSION:
            raise ConfigError(f"decode profile has version {self.version}; expected {VERSION}")
        names = [v.name for v in self.variants]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"variants are {', '.join(names) or 'none'}; expected at least one, with unique names")
        if self.cell_values is not None and self.cell_values < 1:
            raise ConfigError(f"cell_values is {self.cell_values}; expected at least 1")
        for v in self.variants:
            if len(v.decode_s) != len(self.variants[0].decode_s) or not v.decode_s:
                raise ConfigError(
                    f"variant {v.name!r} has {len(v.decode_s)} decode times; expected one per concurrency level, "
                    f"{len(self.variants[0].decode_s)}, as in variant {self.variants[0].name!r}"
                )
            if v.size_bytes < 1 or not all(0 < t < math.inf for t in v.decode_s) or not 0 <= v.switch_s < math.inf:
                raise ConfigError(
                    f"variant {v.name!r} has size {v.size_bytes}, decode times {v.decode_s}, switch {v.switch_s}; "
                    "sizes and times must be positive and finite"
                )

    @property
    def max_concurrency(self) -> int:
        """Return the largest measured concurrency."""
        return len(self.variants[0].decode_s)

    @cached_property
    def num_sessions(self) -> int:
        """Return the pool size with the highest throughput in its fastest variant; of equal sizes, the smallest."""
        return max(
            range(1, self.max_concurrency + 1), key=lambda k: (max(k / v.decode_s[k - 1] for v in self.variants), -k)
        )

    def find_variant(self, codec: str, resolution: str) -> int | None:
        """Return the index of the profile's variant for a stored one, or None. ``kvfetch decoders`` names variants by
        codec and resolution, or by codec if it has no pictures; the paper's tables, all HEVC, by resolution."""
        wanted = [f"{codec} {resolution}", codec]
        if codec.startswith("hevc"):
            wanted.append(resolution)
        names = [v.name for v in self.variants]
        return next((names.index(name) for name in wanted if name in names), None)

    def decode_time_s(self, variant: int, concurrency: int) -> float:
        """Return the seconds per cell. Beyond the measured concurrency, throughput is assumed to be constant."""
        times = self.variants[variant].decode_s
        if concurrency <= len(times):
            return times[concurrency - 1]
        return times[-1] * concurrency / len(times)

    def corrected(self, factors: Mapping[int, float]) -> Self:
        """Return a profile with these variants' decode times multiplied by ``factors``."""
        variants = tuple(
            msgspec.structs.replace(v, decode_s=tuple(t * factors.get(i, 1.0) for t in v.decode_s))
            for i, v in enumerate(self.variants)
        )
        return msgspec.structs.replace(self, variants=variants)

    def encode(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"


class Decoded(msgspec.Struct, frozen=True):
    """One decoded cell. ``ratio``: its decode time divided by the profile's, for the concurrency at that time."""

    variant: int
    ratio: float


_LARGEST_CORRECTION = 8.0
_NEWEST_WEIGHT = 0.25


def corrections(decoded: Sequence[Decoded], num_variants: int) -> dict[int, float]:
    """Return factors for a profile's decode times, from observations ordered from oldest to newest.

    Each factor is an exponentially weighted geometric mean. A variant without observations gets the mean of all
    variants: a machine that is slower than its profile is probably slower there too. Ratios are clipped to between 1/8
    and 8, to limit the effect of an outlier.
    """
    together: float | None = None
    by_variant: dict[int, float] = {}
    for d in decoded:
        log = math.log(min(_LARGEST_CORRECTION, max(1 / _LARGEST_CORRECTION, d.ratio)))
        by_variant[d.variant] = _moved(by_variant.get(d.variant, together), log)
        together = _moved(together, log)
    if together is None:
        return {}
    return {v: math.exp(by_variant.get(v, together)) for v in range(num_variants)}


def _moved(mean: float | None, newest: float) -> float:
    return newest if mean is None else mean + _NEWEST_WEIGHT * (newest - mean)


def load_decode_profile(path: Path) -> DecodeProfile:
    """Read a decode profile. Raises ConfigError, which names the file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=DecodeProfile)
    except OSError as e:
        raise ConfigError(f"{path}: {why(e)}") from e
    except (*DECODE_ERRORS, ConfigError) as e:
        raise ConfigError(f"{path}: invalid decode profile: {e}") from e


UNCONFIGURED = -1

T = TypeVar("T")


class SessionStart(NamedTuple, Generic[T]):
    """Tells a session to decode a cell now. ``switches``: its last cell was of another variant, or it is new."""

    session: int
    variant: int
    switches: bool
    item: T


class SessionQueue(Generic[T]):
    """Assigns cells to sessions: each goes to the first idle session, or waits in a queue. Only decides, without I/O.

    The decode pool and the simulator both use it.
    """

    __slots__ = ("busy", "configured", "waiting")

    def __init__(self, num_sessions: int) -> None:
        assert num_sessions >= 1, num_sessions
        self.busy = [False] * num_sessions
        self.configured = [UNCONFIGURED] * num_sessions  # the variant last decoded
        self.waiting: list[tuple[int, T]] = []

    def submit(self, variant: int, item: T) -> SessionStart[T] | None:
        """Return the start of the cell on an idle session, or None if the cell has to wait."""
        if False not in self.busy:
            self.waiting.append((variant, item))
            return None
        # Not the session that idled longest: the first is the most likely to be set up already.
        return self._start(self.busy.index(False), variant, item)

    def finish(self, session: int) -> SessionStart[T] | None:
        """Free a session. Return the start of the cell that waited longest, or None."""
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
    """``configured``: the current or last variant, None for a new session. ``switch_left_s`` and ``cells_left`` (1 is
    a whole cell of the profile's size) are 0 for an idle session."""

    configured: int | None = None
    switch_left_s: float = 0.0
    cells_left: float = 0.0


@dataclass(frozen=True, slots=True)
class PoolState:
    """A decode pool's state at one time. ``waiting``: variants of the cells that have arrived but have no session."""

    sessions: tuple[SessionState, ...]
    waiting: tuple[int, ...] = ()


class Pipeline:
    """A simulated pool. Copies share the tables that are derived from ``profile``."""

    __slots__ = ("_active", "_switch_s", "_times", "board", "now_s", "work")

    def __init__(self, profile: DecodeProfile, num_sessions: int, *, work: float = 1.0) -> None:
        """``work``: a cell's number of integers relative to that of the profile's cell."""
        indices = range(len(profile.variants))
        # Indexed by concurrency, then by variant.
        self._times = [[0.0] * len(indices)] + [
            [profile.decode_time_s(v, k) for v in indices] for k in range(1, num_sessions + 1)
        ]
        self._switch_s = [v.switch_s for v in profile.variants]
        self.board: SessionQueue[None] = SessionQueue(num_sessions)
        self.now_s = 0.0
        self.work = work
        # [session, variant, seconds of switching left, cells left]
        self._active: list[list[float]] = []

    @classmethod
    def from_state(cls, profile: DecodeProfile, state: PoolState, *, work: float = 1.0) -> Pipeline:
        new = cls(profile, len(state.sessions), work=work)
        for i, session in enumerate(state.sessions):
            if session.configured is None:
                continue
            new.board.configured[i] = session.configured
            if session.cells_left > 0 or session.switch_left_s > 0:
                new.board.busy[i] = True
                new._active.append([i, session.configured, session.switch_left_s, session.cells_left])
        for variant in state.waiting:
            new.deliver(variant)
        return new

    def state(self) -> PoolState:
        sessions = [SessionState(None if v == UNCONFIGURED else v) for v in self.board.configured]
        for session, variant, switch_s, cells in self._active:
            sessions[int(session)] = SessionState(int(variant), switch_s, cells)
        return PoolState(tuple(sessions), tuple(variant for variant, _ in self.board.waiting))

    def copy(self) -> Pipeline:
        new = Pipeline.__new__(Pipeline)
        new._times, new._switch_s, new.now_s, new.work = self._times, self._switch_s, self.now_s, self.work
        new.board = self.board.copy()
        new._active = [entry[:] for entry in self._active]
        return new

    def deliver(self, variant: int) -> None:
        """Let a cell arrive now."""
        self.begin(self.board.submit(variant, None))

    def deliver_at(self, at_s: float, variant: int) -> None:
        """Let a cell arrive at ``at_s``, or now if that is in the past."""
        self.run_until(max(at_s, self.now_s))
        self.deliver(variant)

    def run_until_waiting(self, most: int) -> None:
        """Let time pass until at most ``most`` cells wait for a session."""
        self._run(math.inf, most)

    def run_until(self, until_s: float) -> None:
        """Let time pass until ``until_s``. With infinity, ``now_s`` becomes the time when all cells are decoded."""
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
        """Return the time when all arrived cells will be decoded. Advances the pipeline to that time."""
        self.run_until(math.inf)
        return self.now_s

    def begin(self, start: SessionStart[None] | None) -> None:
        """Let a session start a cell. A subclass may extend this, and ``end``, to observe the pool."""
        if start is not None:
            switch_s = self._switch_s[start.variant] if start.switches else 0.0
            self._active.append([start.session, start.variant, switch_s, self.work])

    def end(self, session: int) -> None:
        """Let a session that has decoded its cell take the next one."""
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


_YIELDING_NICE = 5  # a third of the CPU time of others beside it
_NUM_MEASURED = 64
_MOST_DECODED = 64
_LEAST_LEFT = 0.02  # fraction of a late cell that is assumed to remain

S = TypeVar("S")
R = TypeVar("R")


@dataclass(slots=True)
class _Active:
    variant: int
    switch_left_s: float
    work: float
    size_bytes: int
    started_s: float
    done: float = 0.0  # cells that the profile expects to be done by now


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
        """Return the compressed bytes per second of all sessions together, or None before the first cell."""
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
        """Record that a session begins a cell. ``variant``: UNCONFIGURED if the profile does not have it."""
        self._advance(at_s)
        is_known = self._profile is not None and variant != UNCONFIGURED
        if is_known:
            self._configured[session] = variant
        switch_s = self._profile.variants[variant].switch_s if self._profile and is_known and switches else 0.0
        self._active[session] = _Active(variant if is_known else UNCONFIGURED, switch_s, work, size_bytes, at_s)

    def ended(self, at_s: float, session: int, *, decoded: bool = True) -> None:
        """Record the end of a session's cell. The time of one that was not ``decoded`` is ignored."""
        self._advance(at_s)
        active = self._active.pop(session)
        if decoded and active.size_bytes:
            self._measured.append((active.size_bytes, at_s - active.started_s))
        ratio = active.done / active.work
        if decoded and ratio > 0:  # at 0 it ended within the expected switching time, which says nothing of decoding
            self._decoded = [*self._decoded[1 - _MOST_DECODED :], Decoded(active.variant, ratio)]

    def state(self, at_s: float, waiting: Sequence[int]) -> PoolState:
        """Return the pool's state by the corrected profile. ``waiting``: variants of the cells without a session."""
        self._advance(at_s)
        factors = self._factors()
        sessions = [SessionState(variant) for variant in self._configured]
        for i, active in self._known.items():
            left = active.work - active.done / factors.get(active.variant, 1.0)
            sessions[i] = SessionState(active.variant, active.switch_left_s, max(left, _LEAST_LEFT * active.work))
        return PoolState(tuple(sessions), tuple(waiting))

    def _factors(self) -> dict[int, float]:
        """Return the corrections. A running cell that is already late counts like a finished one."""
        assert self._profile is not None, "the pool has no profile"
        late = [Decoded(a.variant, a.done / a.work) for a in self._known.values() if a.done > a.work]
        return corrections([*self._decoded, *late], len(self._profile.variants))

    @property
    def _known(self) -> dict[int, _Active]:
        """The running cells whose variants the profile has, by session."""
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
    """Runs jobs on decoding sessions of type ``S``, on the CPU or NVDEC, one cell at a time on each. Sessions run on
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

        ``variant``: index into the pool's profile, None if it is not there. ``work``: the cell's number of integers
        relative to the profile's cell. ``size_bytes``: of its bitstream. A job never runs if its future is cancelled
        while it waits.
        """
        future: Future[R] = Future()
        with self._lock:
            assert not self._closed, "the pool is closed"
            item = _Job(job, work, size_bytes, future)
            self._start(self._board.submit(UNCONFIGURED if variant is None else variant, item))
        return future

    def state(self) -> PoolState:
        """Return the pool's state now, for a policy. Cells of variants that the profile lacks are left out."""
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
        """Return the compressed bytes per second of all sessions together, or None before the first cell."""
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
        """Let a session begin its cell. Call with the lock held."""
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
    """One cell in one variant. ``decode`` decodes it on a session; several sessions may call it at once."""

    name: str
    size_bytes: int
    decode: Callable[[S], object]


def measure_profile(
    samples: Sequence[Sample[S]],
    sessions: Sequence[S],
    *,
    device: str,
    source: str,
    cell_values: int,
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
    on_step: Callable[[str], None] = lambda _: None,
) -> DecodeProfile:
    """Return medians over ``rounds`` cells per session, for 1, 2, ... sessions at once, smallest variant first."""
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
    return DecodeProfile(device=device, source=source, variants=tuple(variants), cell_values=cell_values)


def _decode_s(sample: Sample[S], clock: Callable[[], float], session: S) -> float:
    started_s = clock()
    sample.decode(session)
    return clock() - started_s


def _median_s(sample: Sample[S], sessions: Sequence[S], rounds: int, clock: Callable[[], float]) -> float:
    """Return the median seconds per cell while all ``sessions`` decode at once."""
    count, job = len(sessions), partial(_decode_s, sample, clock)
    with closing(DecodePool(sessions)) as pool:
        times = [future.result() for future in [pool.submit(job) for _ in range(count * (rounds + 2))]]
    # The first cells set up their sessions, and the last ones run with fewer others: leave both out.
    return statistics.median(times[count : count * (rounds + 1)])


def _switch_s(
    sample: Sample[S], others: Sequence[Sample[S]], session: S, rounds: int, clock: Callable[[], float]
) -> float:
    """Return the additional seconds that a cell takes after one of another variant on the same session."""

    def after(previous: Iterator[Sample[S]]) -> list[float]:
        times = []
        for before in previous:
            before.decode(session)
            times.append(_decode_s(sample, clock, session))
        return times

    other = statistics.median(after(others[i % len(others)] for i in range(rounds)))
    same = statistics.median(after(sample for _ in range(rounds)))
    return max(0.0, other - same)
