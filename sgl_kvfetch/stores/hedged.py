"""A store with hedged reads: ask again, on another connection, when an answer is late.

If a lookup or a read takes longer than usual, or no byte arrives for longer than usual, a second request asks the same
store for the missing bytes. The first to finish wins. ``hedging`` decides when. Writes are never hedged.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Literal, TypeVar

from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.stores.base import Lookup, ObjectInfo, Store
from sgl_kvfetch.stores.hedging import SILENT_TICKS, HedgeBudget, Progress, Usual, Verdict, judge
from sgl_kvfetch.stores.names import require_name

T = TypeVar("T")

# won: the second request answered first, or the first failed; lost: the first answered, or the second was ended;
# failed: the second failed; refused: the budget allowed no second request.
HedgeResult = Literal["won", "lost", "failed", "refused"]
OnHedge = Callable[[str, HedgeResult], None]  # gets the kind of request, ``lookup`` or ``read``, and the result

MAX_HEDGES = 4  # concurrent second requests of each kind
_MAX_HEDGES_OF_CALL = 3  # one after another
_LATE_S = 1.0  # a read that is younger than this is never late


class HedgedStore(Store):
    """A store with hedged reads. It belongs to one event loop. ``close`` closes the wrapped store too."""

    def __init__(
        self,
        store: Store,
        max_reads: int,
        max_hedges: int = MAX_HEDGES,
        on_hedge: OnHedge = lambda kind, result: None,
    ) -> None:
        """``max_reads``: concurrent ranged reads, others wait. ``max_hedges``: 0 for no second requests."""

        def watch(kind: str, silence: Usual) -> Watch:
            pace = Usual(4.0, 0.9, least=0.0, most=float("inf"), at_first=float("inf"))
            return Watch(HedgeBudget(max_hedges), silence, pace, partial(on_hedge, kind))

        self._store = store
        self._lookups = watch("lookup", Usual(3.0, 0.9, least=0.02, most=0.5, at_first=0.1))
        self._reads = watch("read", Usual(6.0, 0.75, least=0.2, most=1.0, at_first=0.5))
        self._free_reads = asyncio.Semaphore(max_reads)

    async def lookup(self, namespace: str, page_hashes: Sequence[bytes]) -> Lookup:
        found = await HedgedCall(self._lookups, lambda _: self._store.lookup(namespace, page_hashes)).run()
        assert found is not None
        return found

    async def get(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        """Manifests and reads with a ``length`` are hedged. Other whole objects are not: their size is unknown."""
        if length is not None:
            async with self._free_reads:  # no read may wait for a connection: that would look like a stall
                return await self._get_part(name, start, length)
        if require_name(name).is_manifest:
            return await HedgedCall(self._lookups, lambda _: self._store.get(name, start)).run()
        return await self._store.get(name, start)

    async def _get_part(self, name: str, start: int, length: int) -> bytes | None:
        async def ask(attempt: Attempt) -> bytes | None:
            received = attempt.num_bytes
            if not await self._store.read(name, start + received, length - received, attempt.take):
                return None
            return attempt.pieces[0] if len(attempt.pieces) == 1 else b"".join(attempt.pieces)

        return await HedgedCall(self._reads, ask, length).run()

    async def head(self, name: str) -> ObjectInfo | None:
        return await HedgedCall(self._lookups, lambda _: self._store.head(name)).run()

    def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        return self._store.list(prefix)

    async def folders(self, digest: str = "") -> frozenset[str]:
        return await self._store.folders(digest)

    async def put(self, name: str, data: bytes) -> None:
        await self._store.put(name, data)

    async def replace(self, name: str, data: bytes, expected_digest: str) -> bool:
        return await self._store.replace(name, data, expected_digest)

    async def require_replace(self) -> None:
        await self._store.require_replace()

    async def delete(self, name: str) -> bool:
        return await self._store.delete(name)

    async def delete_prefix(self, prefix: str) -> int:
        return await self._store.delete_prefix(prefix)

    async def report_damage(self, manifest_name: str) -> bool:
        return await self._store.report_damage(manifest_name)

    async def close(self) -> None:
        await self._store.close()


@dataclass(frozen=True, slots=True)
class Watch:
    """State that all calls of one kind share."""

    budget: HedgeBudget
    silence: Usual  # seconds without a byte
    pace: Usual  # seconds per byte
    on_hedge: Callable[[HedgeResult], None]


class Attempt:
    """One request of a call. ``pieces`` begins with the bytes that earlier attempts received."""

    def __init__(self, inherited: Sequence[bytes], now_s: float) -> None:
        self.pieces = list(inherited)
        self.num_inherited = _num_bytes(inherited)
        self.progress = Progress()
        self.began_s = now_s
        self.longest_silence_s = 0.0
        self._last_s = now_s

    @property
    def num_bytes(self) -> int:
        return self.num_inherited + self.progress.num_bytes

    def take(self, piece: bytes) -> None:
        self.pieces.append(piece)
        self.progress.num_bytes += len(piece)
        self.heard(asyncio.get_running_loop().time())

    def heard(self, now_s: float) -> None:
        self.longest_silence_s = max(self.longest_silence_s, now_s - self._last_s)
        self._last_s = now_s


class HedgedCall(Generic[T]):
    """One hedged call. ``ask`` makes a request; reads pass bytes to ``Attempt.take``, and ask for the missing ones."""

    def __init__(
        self, watch: Watch, ask: Callable[[Attempt], Coroutine[Any, Any, T | None]], num_bytes: int = 0
    ) -> None:
        """``num_bytes``: the expected size; 0 if it is unknown."""
        self._watch = watch
        self._ask = ask
        self._num_bytes = num_bytes
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[Attempt, asyncio.Task[T | None]] = {}  # running: the first, and perhaps a second
        self._ended: list[asyncio.Task[T | None]] = []
        self._received: Sequence[bytes] = ()  # the most that any ended attempt received
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
        received = [self._received, *(attempt.pieces for attempt in self._tasks)]
        attempt = Attempt(max(received, key=_num_bytes), self._loop.time())
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
        self._received = max(self._received, attempt.pieces, key=_num_bytes)


def _num_bytes(pieces: Sequence[bytes]) -> int:
    return sum(map(len, pieces))
