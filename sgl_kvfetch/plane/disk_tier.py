"""A tier on a disk of this machine, in front of a store: data that was read is kept, and read from there next time.

The store stays the authority. It answers lookups, and takes all writes; the disk answers lookups only while the store
fails. Data objects are immutable and named by their content, so a copy is never stale.
Copies are made from the bytes that reads bring: nothing is read for them, and no read waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import xxhash

from sgl_kvfetch import metrics
from sgl_kvfetch.codec import DataObject, Manifest, decode_manifest
from sgl_kvfetch.codec.container.partial import part_with
from sgl_kvfetch.directory import LocalStore
from sgl_kvfetch.errors import FormatError, StoreError
from sgl_kvfetch.log import LimitedLogger
from sgl_kvfetch.side_by_side import Tasks
from sgl_kvfetch.stores import Breaker, Lookup, SegmentHit, Store
from sgl_kvfetch.stores.base import WrappedStore, fill_pieces

logger = logging.getLogger(__name__)
_limited = LimitedLogger(logger)

Operation = Literal["open", "read", "lookup", "fill", "delete"]

_FILL_BYTES = 256 << 20  # that may wait in memory to be written to the disk
_FILL_IDLE_S = 60.0  # how long an object may get no bytes before it is given up
_READ_S = 1.0  # a disk that takes longer to answer counts as broken
_KNOWN_BYTES = 8 << 20  # of manifests that lookups returned, as stored; decoded they take seven times as much
_MAX_FILLS = 64  # at a time; each may have two files open
_DISK_CALLS = 2  # at a time, so that the local store has threads left for reads
_VERDICTS = frozenset({"invalid", "unauthorised"})  # the store's own answers, not failures of the store


class DiskTier(WrappedStore):
    """Reads through ``disk``. Belongs to one event loop; several processes may share the disk's directory.

    A failure of the disk is counted, and never changes an answer. ``close`` closes both stores.
    """

    def __init__(self, store: Store, disk: LocalStore, lookup_timeout_s: float, heads: range | None = None) -> None:
        """``lookup_timeout_s``: how long the store may take for a lookup before the disk is asked. ``heads``: those
        that are read of each segment, counted in the model; by default all."""
        super().__init__(store)
        self._disk = disk
        self._lookup_timeout_s = lookup_timeout_s
        self._heads = heads
        self._filler = Filler(disk)
        self._store_health = Breaker()
        self._disk_health = Breaker()
        self._known: OrderedDict[str, NamedData] = OrderedDict()  # by name, from the latest lookups
        self._known_bytes = 0
        self._is_opened = False
        self._tasks = Tasks()

    # Reading

    async def lookup(self, namespace: str, page_hashes: Sequence[bytes]) -> Lookup:
        """Ask the store; if it fails, return what the disk has, with ``from_cache`` set."""
        if not self._is_opened:
            self._is_opened = True
            self._tasks.begin(self._quietly("open", self._disk.warm_up()))  # until it is open, it notes no uses
        try:
            found = await self._look_up_in_store(namespace, page_hashes)
        except StoreError as e:
            if e.reason in _VERDICTS:
                raise
            found = await self._look_up_on_disk(namespace, page_hashes, e)
        for hit in found.hits:
            await self._remember_hit(hit)
        return found

    async def _look_up_in_store(self, namespace: str, page_hashes: Sequence[bytes]) -> Lookup:
        if self._store_health.is_open(time.monotonic()):
            raise StoreError("skipped", "the store is not asked, since it keeps failing")
        try:
            async with asyncio.timeout(self._lookup_timeout_s):
                found = await self._store.lookup(namespace, page_hashes)
        except TimeoutError as e:
            self._store_health.failed(time.monotonic())
            raise StoreError("timeout", f"no answer within {self._lookup_timeout_s:g} s") from e
        except StoreError as e:
            if e.reason not in _VERDICTS:
                self._store_health.failed(time.monotonic())
            raise
        self._store_health.succeeded()
        return found

    async def _look_up_on_disk(self, namespace: str, page_hashes: Sequence[bytes], error: StoreError) -> Lookup:
        try:
            found = await self._disk.lookup(namespace, page_hashes)
        except StoreError as e:
            _count_failure("lookup", e)
            raise error from e
        _count_outage(error)
        return Lookup(found.hits, from_cache=True)

    async def _remember_hit(self, hit: SegmentHit) -> None:
        try:
            manifest = await asyncio.to_thread(decode_manifest, hit.manifest)
        except FormatError:
            return  # the reader says so
        last_page = hit.first_page + hit.num_pages - 1
        # Spans are read whole: all bytes will come if the hit has pages of all spans, and all heads are read.
        reads_all = hit.first_page < manifest.span_pages and last_page // manifest.span_pages == manifest.num_spans - 1
        reads_all &= self._heads is None or set(manifest.heads.heads) <= set(self._heads)
        for rows in (rows for variant in manifest.variants for rows in variant.objects):
            data = NamedData(hit.manifest, manifest, rows, reads_all)
            self._forget_data(data.name)
            self._known[data.name] = data
            self._known_bytes += len(data.stored)
        while self._known_bytes > _KNOWN_BYTES:
            self._forget_data(next(iter(self._known)))

    def _forget_data(self, name: str) -> None:
        if (data := self._known.pop(name, None)) is not None:
            self._known_bytes -= len(data.stored)

    async def get(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        """Return the store's bytes. They are for merging and for `kvfetch encode`: what these write for others is made
        from what the store has."""
        return await self._store.get(name, start, length)

    async def read(
        self,
        name: str,
        start: int,
        into: Sequence[memoryview],
        received: Callable[[int], None] = lambda num_bytes: None,
    ) -> bool:
        """Ranges of data that a lookup found come from the disk if they are there. All else comes from the store."""
        data, length = self._known.get(name), sum(map(len, into))
        if data is None or start + length > data.size_bytes:
            return await self._store.read(name, start, into, received)
        content = await self._read_disk(data, start, length)
        if content is not None:
            fill_pieces(into, content)
            received(length)
            metrics.LOCAL_CACHE_READ_BYTES.labels("disk").inc(length)
            return True
        if not await self._store.read(name, start, into, received):
            return False
        metrics.LOCAL_CACHE_READ_BYTES.labels("store").inc(length)
        if data.is_read_whole:
            self._filler.add_bytes(data, start, b"".join(into))
        return True

    async def _read_disk(self, data: NamedData, start: int, length: int) -> bytes | None:
        """Return sound bytes, or None. A copy that is damaged or cannot be read is deleted."""
        if self._disk_health.is_open(time.monotonic()):
            return None
        try:
            async with asyncio.timeout(_READ_S):
                try:
                    content = await self._disk.get(data.name, start, length)
                    if content is not None and not await asyncio.to_thread(data.is_sound, start, content):
                        raise StoreError("io", f"{data.name} on the disk does not match its checksums")
                except StoreError as e:
                    self._read_failed(e)
                    for name in (data.manifest.key.manifest_name, data.name):
                        await self._quietly("delete", self._disk.delete(name))
                    return None
        except TimeoutError:
            self._read_failed(StoreError("timeout", f"the disk did not answer within {_READ_S:g} s"))
            return None
        self._disk_health.succeeded()
        return content

    async def folders(self, digest: str = "") -> frozenset[str]:
        """Ask the store; if it fails, return those on the disk."""
        try:
            async with asyncio.timeout(self._lookup_timeout_s):
                return await self._store.folders(digest)
        except (StoreError, TimeoutError):
            return await self._disk.folders(digest)

    # Deleting. A report of damage goes to the store alone: damaged bytes of the disk never reach a reader.

    async def delete(self, name: str) -> bool:
        self._filler.give_up(name)
        deleting = self._tasks.begin(self._quietly("delete", self._disk.delete(name)))
        existed = await self._store.delete(name)
        await asyncio.shield(deleting)
        return existed

    async def delete_prefix(self, prefix: str) -> int:
        """Delete from both. If the store fails, the disk's copies are deleted all the same."""
        self._filler.give_up(prefix)
        deleting = self._tasks.begin(self._quietly("delete", self._disk.delete_prefix(prefix)))
        count = await self._store.delete_prefix(prefix)
        await asyncio.shield(deleting)
        return count

    async def close(self) -> None:
        await self._filler.close()
        await self._tasks.cancel()
        await self._store.close()
        await self._disk.close()

    # The disk's failures

    async def _quietly(self, operation: Operation, call: Awaitable[object]) -> None:
        try:
            await call
        except StoreError as e:
            _count_failure(operation, e)

    def _read_failed(self, error: StoreError) -> None:
        _count_failure("read", error)
        self._disk_health.failed(time.monotonic())


def _count_failure(operation: Operation, error: StoreError) -> None:
    metrics.LOCAL_CACHE_FAILURES.labels(operation, error.reason).inc()
    _limited.warning(f"cache {operation} {error.reason}", f"kvfetch local_cache ({operation}, {error.reason}): {error}")


def _count_outage(error: StoreError) -> None:
    metrics.LOCAL_CACHE_LOOKUPS.inc()
    metrics.log_failure("lookup", error, "lookups are answered from local_cache")


@dataclass(frozen=True, slots=True)
class NamedData:
    """A data object that a manifest names."""

    stored: bytes  # the manifest as the store has it
    manifest: Manifest
    rows: DataObject
    is_read_whole: bool  # whether a fetch of what the lookup found reads all bytes of a variant

    @property
    def name(self) -> str:
        return self.manifest.data_name(self.rows)

    @property
    def size_bytes(self) -> int:
        return self.rows.size_bytes

    def is_sound(self, start: int, content: bytes) -> bool:
        """Return whether the whole chunks in ``content``, which begins at byte ``start``, match their checksums."""
        view = memoryview(content)
        offset = -start
        for chunk in self.rows.chunks:
            end = offset + chunk.size_bytes
            if offset >= 0 and end <= len(view) and xxhash.xxh3_128_digest(view[offset:end]) != chunk.coded_checksum:
                return False
            offset = end
        return True


class _Fill:
    """One object that is being copied. After its end, it only keeps the same bytes from being collected again."""

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.written_bytes = 0
        self.has_ended = False
        self._pieces: dict[int, bytes] = {}  # that cannot be written yet, by where they start
        self._more = asyncio.Event()

    @property
    def held_bytes(self) -> int:
        return sum(map(len, self._pieces.values()))

    def add_piece(self, start: int, content: bytes) -> None:
        if not self.has_ended and len(content) > len(self._pieces.get(start, b"")):
            self._pieces[start] = content
            self._more.set()

    async def next_piece(self, timeout_s: float) -> bytes:
        """Return bytes that follow the written ones. Raises TimeoutError if none come for ``timeout_s``."""
        while True:
            for start in sorted(self._pieces):
                if start > self.written_bytes:
                    break
                if rest := self._pieces.pop(start)[self.written_bytes - start :]:
                    return rest
            self._more.clear()
            async with asyncio.timeout(timeout_s):
                await self._more.wait()

    def end(self) -> None:
        self.has_ended = True
        self._pieces.clear()


class Filler:
    """Writes objects to ``disk`` piece by piece, each in order, and the manifest behind a complete one.

    Bytes that come before those in front of them wait in memory. Belongs to one event loop.
    """

    def __init__(self, disk: LocalStore) -> None:
        """An object is given up when no byte comes for _FILL_IDLE_S, or when _FILL_BYTES are not enough for what waits.
        Then it is not begun again for _FILL_IDLE_S, so that the rest of a fetch does not begin it in vain."""
        self._disk = disk
        self._tasks = Tasks()
        self._fills: OrderedDict[str, _Fill] = OrderedDict()  # the one that got no bytes for longest comes first
        self._disk_calls = asyncio.Semaphore(_DISK_CALLS)

    def add_bytes(self, data: NamedData, start: int, content: bytes) -> None:
        """Take bytes of an object, from byte ``start`` on. Never waits."""
        fill = self._fills.get(data.name)
        if fill is None:
            running = [each for each in self._fills.values() if not each.has_ended]
            if len(running) >= _MAX_FILLS:
                _give_up(running[0])
            fill = self._fills[data.name] = _Fill()
            fill.task = self._tasks.begin(self._run(data, fill))
        self._fills.move_to_end(data.name)
        if sum(each.held_bytes for each in self._fills.values()) + len(content) > _FILL_BYTES:
            _give_up(fill)
        fill.add_piece(start, content)

    def give_up(self, prefix: str) -> None:
        """Give up all objects whose name starts with ``prefix``."""
        for name, fill in self._fills.items():
            if name.startswith(prefix):
                _give_up(fill)

    async def close(self) -> None:
        await self._tasks.cancel()

    async def _run(self, data: NamedData, fill: _Fill) -> None:
        result = "dropped"
        try:
            await self._copy(data, fill)
            result = "stored"
        except TimeoutError:
            result = "incomplete"
        except StoreError as e:
            result = "failed"
            _count_failure("fill", e)
        finally:
            fill.end()
            if result == "stored":
                del self._fills[data.name]
            else:
                asyncio.get_running_loop().call_later(_FILL_IDLE_S, self._fills.pop, data.name)
            metrics.LOCAL_CACHE_FILLS.labels(result).inc()

    async def _copy(self, data: NamedData, fill: _Fill) -> None:
        """Write the object's bytes as they come. Raises TimeoutError and StoreError."""
        async with contextlib.AsyncExitStack() as stack:
            async with self._disk_calls:
                upload = await stack.enter_async_context(self._disk.upload(data.name, data.size_bytes))
            while fill.written_bytes < data.size_bytes:
                piece = await fill.next_piece(_FILL_IDLE_S)
                async with self._disk_calls:
                    await upload.write(piece)
                fill.written_bytes += len(piece)
            async with self._disk_calls:
                await upload.commit()
                await self._put_manifest(data)

    async def _put_manifest(self, data: NamedData) -> None:
        """A local store demands all data that a manifest names, so leave out the variants and levels that nobody has
        read, and side pages, which are not kept."""
        manifest = data.manifest
        names = [manifest.data_name(rows) for variant in manifest.variants for rows in variant.objects]
        part = part_with(manifest, {name for name in names if await self._disk.head(name) is not None})
        if part is None:
            return  # a level came first
        stored = data.stored if part == manifest else part.encode()
        await self._disk.put(manifest.key.manifest_name, stored)


def _give_up(fill: _Fill) -> None:
    assert fill.task is not None
    fill.end()
    # Not at once: a task that is cancelled before its first step never runs, not even its ``finally``.
    asyncio.get_running_loop().call_soon(fill.task.cancel)
