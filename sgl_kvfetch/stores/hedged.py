"""A store with hedged reads: ask again, on another connection, when an answer is late.

One slow connection makes a whole prompt late, since a prefix counts only up to its first missing page. If a lookup or a
read takes longer than usual, or no byte arrives for longer than usual, a second request asks the same store for the
missing bytes. The first to finish wins, and the other one is ended. Writes are never hedged.

What must not happen is that hedging makes things worse. A store that is slow because it is overloaded would get twice
the requests. So late means later than most recent requests were, which rises with the load; few requests are hedged at
a time, and a tenth of all unless it is worth it (`HedgeBudget`). Nor may our own slowness count:

* Silence is counted in ticks, not in seconds: an event loop that was busy for a second has read nothing, although bytes
  may have come. It counts one silent tick. A tick is a quarter of the silence limit.
* No read waits for a connection while it is watched: that would look like a stall.

`Usual`, `judge` and `HedgeBudget` decide, without clock or I/O. Bytes that have arrived are kept: the second request
asks for the rest alone.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any, Generic, Literal, TypeVar

from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.stores.base import Lookup, Store, WrappedStore, bytes_read, left_of, require_name

T = TypeVar("T")

# won: the second request answered first, or the first failed; lost: the first answered, or the second was ended;
# failed: the second failed; refused: the budget allowed no second request.
HedgeResult = Literal["won", "lost", "failed", "refused"]
OnHedge = Callable[[str, HedgeResult], None]  # gets the kind of request, ``lookup`` or ``read``, and the result

MAX_HEDGES = 4  # concurrent second requests of each kind
_MAX_HEDGES_OF_CALL = 3  # one after another
_LATE_S = 1.0  # a read that is younger than this is never late
SILENT_TICKS = 4  # a request with so many in a row is stalled
_SILENT_TICKS_OF_SECOND = 2 * SILENT_TICKS

_MOST_MEASURED = 64
_LEAST_MEASURED = 8


class HedgedStore(WrappedStore):
    """A store with hedged reads. It belongs to one event loop. ``close`` closes the wrapped store too."""

    def __init__(
        self,
        store: Store,
        max_reads: int,
        max_hedges: int = MAX_HEDGES,
        on_hedge: OnHedge = lambda kind, result: None,
        on_received: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        """``max_reads``: concurrent ranged reads, others wait. ``max_hedges``: 0 for no second requests.
        ``on_received`` gets the size of each piece of a ranged read, as it comes."""

        def watch(kind: str, silence: Usual) -> HedgeWatch:
            pace = Usual(4.0, 0.9, least=0.0, most=float("inf"), at_first=float("inf"))
            return HedgeWatch(HedgeBudget(max_hedges), silence, pace, partial(on_hedge, kind))

        super().__init__(store)
        self._on_received = on_received
        self._lookups = watch("lookup", Usual(3.0, 0.9, least=0.02, most=0.5, at_first=0.1))
        self._reads = watch("read", Usual(6.0, 0.75, least=0.2, most=1.0, at_first=0.5))
        self._free_reads = asyncio.Semaphore(max_reads)

    async def lookup(self, namespace: str, page_hashes: Sequence[bytes]) -> Lookup:
        found = await HedgedCall(self._lookups, lambda _: self._store.lookup(namespace, page_hashes)).run()
        assert found is not None
        return found

    async def get(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        """Hedge manifests and reads with a ``length``. Other whole objects are not hedged: their size is unknown."""
        if length is not None:
            return await bytes_read(self, name, start, length)
        if require_name(name).is_manifest:
            return await HedgedCall(self._lookups, lambda _: self._store.get(name)).run()
        return await self._store.get(name)

    async def read(
        self,
        name: str,
        start: int,
        into: Sequence[memoryview],
        received: Callable[[int], None] = lambda num_bytes: None,
    ) -> bool:
        """Both requests of a hedged read write into ``into``: to equal places, equal bytes of an immutable object."""

        async def ask(attempt: Attempt) -> bool:
            def take(num_bytes: int) -> None:
                attempt.take(num_bytes)
                self._on_received(num_bytes)
                received(num_bytes)

            there = attempt.num_bytes
            return await self._store.read(name, start + there, left_of(into, there), take)

        async with self._free_reads:  # no read may wait for a connection: that would look like a stall
            return bool(await HedgedCall(self._reads, ask, sum(map(len, into))).run())


@dataclass(frozen=True, slots=True)
class HedgeWatch:
    """State that all calls of one kind share."""

    budget: HedgeBudget
    silence: Usual  # seconds without a byte
    pace: Usual  # seconds per byte
    on_hedge: Callable[[HedgeResult], None]


class Attempt:
    """One request of a call. ``num_inherited``: the bytes that earlier attempts received, behind which it begins."""

    def __init__(self, num_inherited: int, now_s: float) -> None:
        self.num_inherited = num_inherited
        self.progress = Progress()
        self.began_s = now_s
        self.longest_silence_s = 0.0
        self._last_s = now_s

    @property
    def num_bytes(self) -> int:
        return self.num_inherited + self.progress.num_bytes

    def take(self, num_bytes: int) -> None:
        self.progress.num_bytes += num_bytes
        self.heard(asyncio.get_running_loop().time())

    def heard(self, now_s: float) -> None:
        self.longest_silence_s = max(self.longest_silence_s, now_s - self._last_s)
        self._last_s = now_s


class HedgedCall(Generic[T]):
    """One hedged call. ``ask`` makes a request; reads tell ``Attempt.take`` what has
    come, and ask for the missing bytes."""

    def __init__(
        self, watch: HedgeWatch, ask: Callable[[Attempt], Coroutine[Any, Any, T | None]], num_bytes: int = 0
    ) -> None:
        """``num_bytes``: the expected size; 0 if it is unknown."""
        self._watch = watch
        self._ask = ask
        self._num_bytes = num_bytes
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[Attempt, asyncio.Task[T | None]] = {}  # running: the first, and perhaps a second
        self._ended: list[asyncio.Task[T | None]] = []
        self._received = 0  # the most bytes that any ended attempt received
        self._error: StoreError | None = None
        self._num_hedges = 0
        self._is_hedging = False
        self._was_refused = False

    async def run(self) -> T | None:
        """Return the first answer; None, if the object is missing, is one. Raises StoreError if no request succeeds."""
        tick_s = self._watch.silence.limit / SILENT_TICKS
        self._begin()
        try:
            while self._tasks:
                done, _ = await asyncio.wait(self._tasks.values(), timeout=tick_s, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    self._look()
                for attempt in [attempt for attempt, task in self._tasks.items() if task in done]:
                    try:
                        answer = self._tasks[attempt].result()
                    except StoreError as e:
                        self._note_failure(attempt, e)
                    else:
                        self._learn(attempt)
                        return answer
            assert self._error is not None
            raise self._error
        finally:
            self._end_hedge("lost")
            self._watch.budget.request_ended()
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), *self._ended, return_exceptions=True)

    def _begin(self) -> None:
        received = [self._received, *(attempt.num_bytes for attempt in self._tasks)]
        attempt = Attempt(max(received), self._loop.time())
        self._tasks[attempt] = self._loop.create_task(self._ask(attempt))

    def _look(self) -> None:
        """Count a tick in which no attempt ended, and act on the verdict."""
        first, second = (*self._tasks, None)[:2]
        assert first is not None
        for attempt in self._tasks:
            attempt.progress.tick()
        usual_s = max(_LATE_S, self._watch.pace.limit * self._num_bytes) if self._num_bytes else float("inf")
        is_late = self._loop.time() - first.began_s > usual_s
        match judge(first.progress, second.progress if second else None, is_late):
            case Verdict.END_SECOND:
                assert second is not None
                self._end_hedge("lost")
                self._drop(second)
            case Verdict.ASK_AGAIN if self._error is None:
                self._hedge()

    def _hedge(self) -> None:
        if self._num_hedges < _MAX_HEDGES_OF_CALL and self._watch.budget.try_begin():
            self._is_hedging = True
            self._num_hedges += 1
            self._begin()
        elif not self._was_refused:
            self._was_refused = True
            self._watch.on_hedge("refused")

    def _note_failure(self, attempt: Attempt, error: StoreError) -> None:
        self._error = self._error or error
        is_first = self._is_first(attempt)
        self._end_hedge("won" if is_first else "failed", was_worth_it=is_first)
        self._drop(attempt)

    def _learn(self, answered: Attempt) -> None:
        """Update measurements and end the hedge after an answer."""
        now_s = self._loop.time()
        answered.heard(now_s)
        if self._is_first(answered):
            # Also when a second request lost: the silence that caused it was not that unusual.
            self._watch.silence.note(answered.longest_silence_s)
            if answered.progress.num_bytes:
                self._watch.pace.note((now_s - answered.began_s) / answered.progress.num_bytes)
            return
        missing = self._num_bytes - answered.num_inherited
        gained = next(iter(self._tasks)).num_bytes - answered.num_inherited
        # If the first got most of the missing bytes as well, both share a slow link: a second request was no gain.
        self._end_hedge("won", was_worth_it=2 * gained <= missing)

    def _is_first(self, attempt: Attempt) -> bool:
        return attempt is next(iter(self._tasks))

    def _end_hedge(self, result: HedgeResult, *, was_worth_it: bool = False) -> None:
        if self._is_hedging:
            self._is_hedging = False
            self._watch.budget.end(was_worth_it)
            self._watch.on_hedge(result)

    def _drop(self, attempt: Attempt) -> None:
        task = self._tasks.pop(attempt)
        task.cancel()
        self._ended.append(task)
        self._received = max(self._received, attempt.num_bytes)


class Usual:
    """Measures what is normal. The limit is ``factor`` times a quantile of the last measurements, within bounds."""

    def __init__(self, factor: float, quantile: float, *, least: float, most: float, at_first: float) -> None:
        """``at_first`` is the limit until there are enough measurements."""
        assert 0 <= quantile < 1
        assert least <= at_first <= most
        self._factor, self._quantile = factor, quantile
        self._least, self._most, self._at_first = least, most, at_first
        self._measured: deque[float] = deque(maxlen=_MOST_MEASURED)

    def note(self, measured: float) -> None:
        self._measured.append(measured)

    @property
    def limit(self) -> float:
        if len(self._measured) < _LEAST_MEASURED:
            return self._at_first
        usual = sorted(self._measured)[int(self._quantile * len(self._measured))]
        return min(self._most, max(self._least, self._factor * usual))


@dataclass(slots=True)
class Progress:
    """The bytes that one request has received, checked at every tick."""

    num_bytes: int = 0
    silent_ticks: int = 0  # in a row, up to now
    _bytes_at_tick: int = 0

    def tick(self) -> None:
        self.silent_ticks = self.silent_ticks + 1 if self.num_bytes == self._bytes_at_tick else 0
        self._bytes_at_tick = self.num_bytes


class Verdict(Enum):
    WAIT = auto()
    ASK_AGAIN = auto()  # make a second request for the missing bytes
    END_SECOND = auto()  # the second is not needed, or silent too; another may follow


def judge(first: Progress, second: Progress | None, is_late: bool) -> Verdict:
    """Decide at each tick whether to hedge. ``is_late``: the first request takes far longer than normal."""
    if second is None:
        return Verdict.ASK_AGAIN if is_late or first.silent_ticks >= SILENT_TICKS else Verdict.WAIT
    has_resumed = second.num_bytes == 0 and first.silent_ticks == 0 and not is_late
    return Verdict.END_SECOND if has_resumed or second.silent_ticks >= _SILENT_TICKS_OF_SECOND else Verdict.WAIT


class HedgeBudget:
    """Limit second requests: a few at once, and a tenth of all requests.

    Second requests that were worth it do not count towards the tenth. So every request on a connection that hangs may
    be hedged, but on a link that is only slow, or down, hedging soon stops.
    """

    _SHARE = 0.1

    def __init__(self, most_at_once: int) -> None:
        self._most_at_once = most_at_once
        self._num_running = 0
        self._tokens = float(most_at_once)

    def request_ended(self) -> None:
        self._add(self._SHARE)

    def try_begin(self) -> bool:
        if self._num_running >= self._most_at_once or self._tokens < 1:
            return False
        self._num_running += 1
        self._tokens -= 1
        return True

    def end(self, was_worth_it: bool) -> None:
        assert self._num_running > 0
        self._num_running -= 1
        if was_worth_it:
            self._add(1)

    def _add(self, tokens: float) -> None:
        self._tokens = min(self._tokens + tokens, float(self._most_at_once))
