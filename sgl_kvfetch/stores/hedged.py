"""Hedged calls: ask the best replica, and ask another one, or the same one again, when the answer is late."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.stores.base import Store
from sgl_kvfetch.stores.hedging import (
    SILENT_TICKS,
    Progress,
    RaceBudget,
    ReplicaHealth,
    Usual,
    Verdict,
    judge,
    next_replica,
    ranked,
)

T = TypeVar("T")

# won: the second request answered first, or the first failed; lost: the first answered, or the second was ended;
# failed: the second failed; refused: the budget allowed no second request.
RaceResult = Literal["won", "lost", "failed", "refused"]

_LATE_S = 1.0  # a read that is younger than this is never late
_MOST_RACES = 3  # second requests of one call, one after another


@dataclass(frozen=True, slots=True)
class Watch:
    """State that all calls of one kind share. If ``silence`` is None, only a failure makes a call ask again."""

    healths: Sequence[ReplicaHealth]  # one per replica
    budget: RaceBudget
    silence: Usual | None  # seconds without a byte
    pace: Usual  # seconds per byte
    on_race: Callable[[RaceResult], None]
    on_failure: Callable[[int, StoreError], None]  # the replica's index


class Attempt:
    """A request to one replica. ``pieces`` begins with the bytes that earlier attempts received."""

    def __init__(self, replica: int, inherited: Sequence[bytes], now_s: float) -> None:
        self.replica = replica
        self.pieces = list(inherited)
        self.num_inherited = sum(map(len, inherited))
        self.progress = Progress()
        self.began_s = now_s
        self.longest_silence_s = 0.0
        self.first_byte_s: float | None = None
        self._last_s = now_s

    @property
    def num_bytes(self) -> int:
        return self.num_inherited + self.progress.num_bytes

    def take(self, piece: bytes) -> None:
        self.pieces.append(piece)
        self.progress.num_bytes += len(piece)
        self.heard(asyncio.get_running_loop().time())

    def heard(self, now_s: float) -> None:
        if self.first_byte_s is None:
            self.first_byte_s = now_s
        self.longest_silence_s = max(self.longest_silence_s, now_s - self._last_s)
        self._last_s = now_s


class RacedCall(Generic[T]):
    """One hedged call. ``ask`` returns None if the store lacks the object; reads pass bytes to ``Attempt.take``."""

    def __init__(
        self,
        watch: Watch,
        stores: Sequence[Store],
        ask: Callable[[Store, Attempt], Coroutine[Any, Any, T | None]],
        num_bytes: int = 0,
    ) -> None:
        """``num_bytes``: the expected size; 0 if it is unknown."""
        self._watch = watch
        self._stores = stores
        self._ask = ask
        self._num_bytes = num_bytes
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[Attempt, asyncio.Task[T | None]] = {}  # running: the first, and perhaps a second
        self._ended: list[asyncio.Task[T | None]] = []
        self._brought: Sequence[bytes] = ()  # the most that any ended attempt received
        self._tried: list[int] = []
        self._failed: frozenset[int] = frozenset()
        self._error: StoreError | None = None
        self._is_missing = False
        self._is_racing = False
        self._num_races = 0
        self._was_refused = False

    async def run(self) -> T | None:
        """Return the first answer, or None if all that answer lack the object. Raises StoreError if none answers."""
        tick_s = None if self._watch.silence is None else self._watch.silence.limit / SILENT_TICKS
        try:
            while not self._is_answered_no and (self._tasks or self._begin()):
                done, _ = await asyncio.wait(self._tasks.values(), timeout=tick_s, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    self._look()
                for attempt in [attempt for attempt, task in self._tasks.items() if task in done]:
                    answer = self._result(attempt)
                    if answer is not None:
                        self._learn(attempt)
                        return answer
            if self._error is not None and not self._is_missing:
                raise self._error
            return None
        finally:
            self._end_race("lost")
            self._watch.budget.request_ended()
            await self._stop()

    @property
    def _is_answered_no(self) -> bool:
        return self._is_missing and len(self._failed) == len(self._stores)

    def _next_replica(self) -> int | None:
        now_s, healths = self._loop.time(), self._watch.healths
        is_open = frozenset(i for i, health in enumerate(healths) if health.is_open(now_s))
        return next_replica(ranked(healths, now_s), self._tried, self._failed, is_open)

    def _begin(self) -> bool:
        """Ask the next replica. Return False if no replica is left."""
        replica = self._next_replica()
        if replica is not None:
            self._ask_replica(replica)
        return replica is not None

    def _ask_replica(self, replica: int) -> None:
        now_s = self._loop.time()
        self._watch.healths[replica].asked(now_s)
        self._tried.append(replica)
        furthest = max((attempt.pieces for attempt in self._tasks), key=_num_bytes, default=self._brought)
        attempt = Attempt(replica, max(furthest, self._brought, key=_num_bytes), now_s)
        self._tasks[attempt] = self._loop.create_task(self._ask(self._stores[replica], attempt))

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
                if second.progress.silent_ticks and second.replica != first.replica:
                    self._blame(second)
                self._end_race("lost")
                self._drop(second)
            case Verdict.ASK_AGAIN:
                self._ask_again(first)

    def _ask_again(self, first: Attempt) -> None:
        replica = self._next_replica()
        if replica is None:
            return
        now_s, healths = self._loop.time(), self._watch.healths
        if healths[first.replica].is_open(now_s) and not healths[replica].is_open(now_s):
            # Other calls found that this replica hangs. Moving to another one does not count as a second request.
            self._drop(first)
            self._ask_replica(replica)
        elif self._num_races < _MOST_RACES and self._watch.budget.try_begin():
            self._is_racing = True
            self._num_races += 1
            self._ask_replica(replica)
        elif not self._was_refused:
            self._was_refused = True
            self._watch.on_race("refused")

    def _result(self, attempt: Attempt) -> T | None:
        """Return the answer of an ended attempt. If it failed or found nothing, drop it and return None."""
        try:
            answer = self._tasks[attempt].result()
        except StoreError as e:
            self._error = self._error or e
            self._watch.on_failure(attempt.replica, e)
            if is_its_fault(e):
                self._blame(attempt)
        else:
            if answer is not None:
                return answer
            self._is_missing = True
        self._failed |= {attempt.replica}
        is_second = attempt is not next(iter(self._tasks))
        self._end_race("failed" if is_second else "won", was_worth_it=not is_second)
        self._drop(attempt)
        return None

    def _learn(self, answered: Attempt) -> None:
        """Update measurements and end the race after a success."""
        now_s = self._loop.time()
        answered.heard(now_s)
        assert answered.first_byte_s is not None
        self._watch.healths[answered.replica].answered(answered.first_byte_s - answered.began_s)
        first = next(iter(self._tasks))
        if answered is first:
            # Also when a second request lost: the silence that caused it was not that unusual.
            if self._watch.silence is not None:
                self._watch.silence.note(answered.longest_silence_s)
            if answered.progress.num_bytes:
                self._watch.pace.note((now_s - answered.began_s) / answered.progress.num_bytes)
            return
        missing = self._num_bytes - answered.num_inherited
        gained = first.num_bytes - answered.num_inherited
        # If the first got most of the missing bytes as well, both share a slow link: a second request was no gain.
        self._end_race("won", was_worth_it=2 * gained <= missing)
        if gained == 0 and first.replica != answered.replica:
            self._blame(first)

    def _blame(self, attempt: Attempt) -> None:
        self._watch.healths[attempt.replica].failed(self._loop.time(), attempt.began_s)

    def _end_race(self, result: RaceResult, *, was_worth_it: bool = False) -> None:
        if self._is_racing:
            self._is_racing = False
            self._watch.budget.end(was_worth_it)
            self._watch.on_race(result)

    def _drop(self, attempt: Attempt) -> None:
        task = self._tasks.pop(attempt)
        task.cancel()
        self._ended.append(task)
        self._brought = max(self._brought, attempt.pieces, key=_num_bytes)

    async def _stop(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), *self._ended, return_exceptions=True)


def is_its_fault(error: StoreError) -> bool:
    """Return whether the replica, not the request, caused the error."""
    return error.retriable or error.reason in ("unauthorised", "protocol", "io")


def _num_bytes(pieces: Sequence[bytes]) -> int:
    return sum(map(len, pieces))
