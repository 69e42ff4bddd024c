"""A store over one or more replicas, with hedged reads.

A read asks the replica that answers soonest. If the answer takes longer than usual, or no byte arrives for longer than
usual, a second request asks another replica for the missing bytes (the same replica on another connection if it is the
only one). The first to finish wins. ``hedging`` decides when.

A write goes to all replicas that are up, and succeeds when one replica has stored it. Failures on the others are
counted. A manifest goes only to replicas that have its data. Nothing is copied to a replica later: an object that it
lacks is a miss there, and is written again when its pages have been computed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Container, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from sgl_kvfetch.codec import decode_manifest
from sgl_kvfetch.errors import FormatError, StoreError
from sgl_kvfetch.stores.base import Lookup, Store
from sgl_kvfetch.stores.hedged import Attempt, RacedCall, RaceResult, Watch, is_its_fault
from sgl_kvfetch.stores.hedging import RaceBudget, ReplicaHealth, Usual
from sgl_kvfetch.stores.names import require_name

T = TypeVar("T")

_READ_FAILURES = 1  # in a row, before a replica is skipped for a while; each failure delays a request
_WRITE_FAILURES = 3  # as above; each failure leaves the replica without an object
# After the first replica has finished a write in t seconds, the others get grace + factor * t more.
_WRITE_GRACE_S = 2.0
_WRITE_FACTOR = 3.0
_MOST_LACKING = 1024  # names remembered per replica


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    max_reads: int = 32  # concurrent ranged reads; others wait
    max_races: int = 4  # concurrent second requests per kind of request; 0 for none
    on_race: Callable[[str, RaceResult], None] | None = None  # called with the kind of request and the result
    on_failure: Callable[[str, StoreError], None] | None = None  # called with the replica's label and its error


class ReplicatedStore(Store):
    """A store over replicas. It belongs to one event loop. ``close`` closes the replicas too."""

    def __init__(self, replicas: Sequence[tuple[str, Store]], options: ReplicaOptions | None = None) -> None:
        """``replicas``: pairs of a label and a store. Among equally good ones, the first is preferred."""
        assert replicas
        self._options = options or ReplicaOptions()
        self._labels = [label for label, _ in replicas]
        self._stores = [store for _, store in replicas]
        self._lookups = self._watch("lookup", Usual(3.0, 0.9, least=0.02, most=0.5, at_first=0.1))
        self._reads = self._watch("read", Usual(6.0, 0.75, least=0.2, most=1.0, at_first=0.5))
        self._whole = self._watch("whole", None)
        self._writes = [ReplicaHealth(_WRITE_FAILURES) for _ in replicas]
        self._free_reads = asyncio.Semaphore(self._options.max_reads)
        self._lacking: list[OrderedDict[str, None]] = [OrderedDict() for _ in replicas]  # data not put there

    def _watch(self, kind: str, silence: Usual | None) -> Watch:
        def note_race(result: RaceResult) -> None:
            if self._options.on_race is not None:
                self._options.on_race(kind, result)

        return Watch(
            healths=[ReplicaHealth(_READ_FAILURES) for _ in self._stores],
            budget=RaceBudget(self._options.max_races),
            silence=silence,
            pace=Usual(4.0, 0.9, least=0.0, most=float("inf"), at_first=float("inf")),
            on_race=note_race,
            on_failure=self._note_failure,
        )

    def _note_failure(self, replica: int, error: StoreError) -> None:
        if self._options.on_failure is not None:
            self._options.on_failure(self._labels[replica], error)

    # Reading

    async def lookup(self, namespace: str, page_hashes: Sequence[bytes]) -> Lookup:
        """Return the first answer, even if another replica has more pages."""

        async def ask(store: Store, _: Attempt) -> Lookup | None:
            return await store.lookup(namespace, page_hashes)

        found = await RacedCall(self._lookups, self._stores, ask).run()
        assert found is not None
        return found

    async def folders(self, digest: str = "") -> frozenset[str]:
        """Return the folders of all replicas that answer. Raises a StoreError if none does."""
        tasks = [asyncio.create_task(store.folders(digest)) for store in self._stores]
        try:
            await _until_all_or_late(tasks)
            answers = [task.result() for task in tasks if task.done() and task.exception() is None]
            return frozenset().union(*answers) if answers else tasks[0].result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def get(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        """Return None if all replicas that answer lack the object. Stalls are detected only with a ``length``."""
        if length is not None:
            return await self._get_part(name, start, length)

        async def ask(store: Store, _: Attempt) -> bytes | None:
            return await store.get(name, start)

        watch = self._lookups if require_name(name).is_manifest else self._whole
        return await RacedCall(watch, self._stores, ask).run()

    async def _get_part(self, name: str, start: int, length: int) -> bytes | None:
        async def ask(store: Store, attempt: Attempt) -> bytes | None:
            brought = attempt.num_bytes
            if not await store.read(name, start + brought, length - brought, attempt.take):
                return None
            return attempt.pieces[0] if len(attempt.pieces) == 1 else b"".join(attempt.pieces)

        async with self._free_reads:  # no read may wait for a connection: that would look like a stall
            return await RacedCall(self._reads, self._stores, ask, length).run()

    # Writing

    async def put(self, name: str, data: bytes) -> None:
        """Put the object to all replicas that are up. Raises StoreError if no replica stored it."""
        parsed = require_name(name)
        needs = _data_names(data) if parsed.is_manifest else frozenset()
        targets = [i for i in self._up_for_writing() if needs.isdisjoint(self._lacking[i])]
        if not targets:
            raise StoreError("skipped", f"putting {name}: its data went to no replica completely", retriable=True)
        done, failures = await self._write_all(targets, lambda store: store.put(name, data))
        if not parsed.is_manifest:
            self._note_lacking(name, done.keys())
        if not done:
            raise failures[targets[0]]

    async def replace(self, name: str, data: bytes, expected_digest: str) -> bool:
        """The first replica that is up, in the given order, decides which of several writers wins. The others follow it
        as in ``put``. If writers see different replicas as up, both may win."""

        def ask(store: Store) -> Coroutine[Any, Any, bool]:
            return store.replace(name, data, expected_digest)

        targets = self._up_for_writing()
        for i, first in enumerate(targets):
            done, failures = await self._write_all([first], ask)
            if done:
                if done[first] and targets[i + 1 :]:
                    await self._write_all(targets[i + 1 :], ask)
                return done[first]
            if not is_its_fault(failures[first]):
                break
        raise failures[first]

    async def delete(self, name: str) -> bool:
        """Delete from all replicas. Raises the first StoreError after all were asked."""
        return any(await self._of_all(lambda store: store.delete(name)))

    async def delete_prefix(self, prefix: str) -> int:
        """Delete from all replicas. Return the highest count. Raises the first StoreError after all were asked."""
        return max(await self._of_all(lambda store: store.delete_prefix(prefix)))

    async def report_damage(self, manifest_name: str) -> bool:
        """Report to all replicas, since any of them may have sent the damaged bytes. Return True if one deleted the
        segment. Raises the first StoreError after all were asked."""
        return any(await self._of_all(lambda store: store.report_damage(manifest_name)))

    def _up_for_writing(self) -> Sequence[int]:
        """Return the indices of the replicas that are up, or of all replicas if none is up."""
        now_s = asyncio.get_running_loop().time()
        everyone = range(len(self._stores))
        return [i for i in everyone if not self._writes[i].is_open(now_s)] or everyone

    async def _write_all(
        self, targets: Sequence[int], write: Callable[[Store], Coroutine[Any, Any, T]]
    ) -> tuple[dict[int, T], dict[int, StoreError]]:
        """Return answers and failures by replica. After the first success, wait only a limited time for the others."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        tasks = {i: loop.create_task(write(self._stores[i])) for i in targets}
        try:
            await _until_all_or_late(tasks.values())
            return self._judge_writes(tasks, began_s)
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    def _judge_writes(
        self, tasks: Mapping[int, asyncio.Task[T]], began_s: float
    ) -> tuple[dict[int, T], dict[int, StoreError]]:
        now_s = asyncio.get_running_loop().time()
        answers: dict[int, T] = {}
        failures: dict[int, StoreError] = {}
        for i, task in tasks.items():
            try:
                answers[i] = _answer(task)
                self._writes[i].answered(now_s - began_s)
            except StoreError as e:
                failures[i] = e
                self._note_failure(i, e)
                if is_its_fault(e):
                    self._writes[i].failed(now_s, began_s)
        return answers, failures

    def _note_lacking(self, name: str, has_it: Container[int]) -> None:
        for i, lacking in enumerate(self._lacking):
            if i in has_it:
                lacking.pop(name, None)
            else:
                lacking[name] = None
                if len(lacking) > _MOST_LACKING:
                    lacking.popitem(last=False)

    async def _of_all(self, call: Callable[[Store], Awaitable[T]]) -> Sequence[T]:
        answers = await asyncio.gather(*(call(store) for store in self._stores), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def close(self) -> None:
        for store in self._stores:
            await store.close()


def _data_names(manifest: bytes) -> frozenset[str]:
    """Return the data names in a manifest. Return none if it is malformed: the stores will refuse it."""
    with contextlib.suppress(FormatError):
        return frozenset(decode_manifest(manifest).data_names)
    return frozenset()


async def _until_all_or_late(tasks: Collection[asyncio.Task[T]]) -> None:
    """Wait until all tasks have ended, or one has succeeded and the others take far longer."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    pending = set(tasks)
    has_one = False
    while pending and not has_one:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        has_one = any(task.exception() is None for task in done)
    if pending:
        await asyncio.wait(pending, timeout=_WRITE_GRACE_S + _WRITE_FACTOR * (loop.time() - began_s))


def _answer(task: asyncio.Task[T]) -> T:
    if not task.done():
        raise StoreError("timeout", "the write took far longer than on another replica", retriable=True)
    return task.result()
