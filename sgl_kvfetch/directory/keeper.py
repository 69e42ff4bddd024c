"""Keeps what readers read through a store from its upstream, in the store's own directory.

A directory holds whole segments: a data object is checked against the digest in its name, and a manifest is found once
all its data is there. Readers read ranges. So the ranges are written into a file of the object's size, wherever they
belong, as they come: no byte is fetched twice, and what is written is served from there. What readers leave out is
fetched behind them: a segment that was used in part once is used again, by prompts that begin alike, and the second use
would go over the link again.

**Readers go first.** The rest is fetched while no reader has read from the upstream for `_QUIET_S`, one piece at a
time. A reader that comes meanwhile ends that piece; what has come of it stays.

**Nothing here is waited for.** Ranges wait in memory until the disk has taken them, and are dropped beyond
`_HELD_BYTES`: then they are fetched behind, as others. A segment is given up at the first failure, or if nothing comes
for `_GIVE_UP_S`, and not begun again for `_REST_S`. A process that is killed leaves files without a name, which the
directory's next owner removes.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass

from sgl_kvfetch.codec import Manifest
from sgl_kvfetch.directory.writing import Parts
from sgl_kvfetch.errors import FormatError, StoreError
from sgl_kvfetch.keys import parse_object_name
from sgl_kvfetch.side_by_side import Tasks
from sgl_kvfetch.stores import ObjectInfo, Store
from sgl_kvfetch.stores.upkeep import decode_named_manifest

_PIECE_BYTES = 4 << 20  # that is fetched behind readers at a time
_QUIET_S = 0.25  # between the ranges of one fetch, cells are decoded
_HELD_BYTES = 64 << 20  # that may wait in memory for the disk
_MAX_SEGMENTS = 64  # at a time
_GIVE_UP_S = 600.0
_REST_S = 60.0


@dataclass(frozen=True, slots=True)
class Disk:
    """What the keeper needs of the directory."""

    head: Callable[[str], Awaitable[ObjectInfo | None]]
    upload_parts: Callable[[str, int], AbstractAsyncContextManager[Parts]]
    put: Callable[[str, bytes], Awaitable[None]]


class _Object:
    """A data object that is being written. ``missing`` and ``unwritten`` are runs of bytes: from, to; in order."""

    def __init__(self, parts: Parts, size_bytes: int) -> None:
        self.parts = parts
        self.size_bytes = size_bytes
        self.missing = [(0, size_bytes)]  # have not come
        self.unwritten = [(0, size_bytes)]


class _Segment:
    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.objects: dict[str, _Object] | None = None  # None until the manifest is known
        self.pieces: deque[tuple[str, int, memoryview]] = deque()  # that the disk has not taken yet
        self.more = asyncio.Event()

    def first_missing(self) -> tuple[str, int, int] | None:
        """Return an object, a byte, and how many bytes from there on have not come."""
        for name, each in (self.objects or {}).items():
            if each.missing:
                start, end = each.missing[0]
                return name, start, min(_PIECE_BYTES, end - start)
        return None


class Keeper:
    """Belongs to one event loop."""

    def __init__(self, upstream: Store, disk: Disk, on_failure: Callable[[StoreError], None]) -> None:
        """``on_failure`` is called with what kept a segment from being kept."""
        self.behind_bytes = 0  # fetched behind readers
        self._upstream = upstream
        self._disk = disk
        self._on_failure = on_failure
        self._tasks = Tasks()
        self._segments: dict[str, _Segment] = {}  # by manifest's name, in the order in which their rests are fetched
        self._resting: dict[str, float] = {}  # until when, in monotonic seconds
        self._held_bytes = 0
        self._num_readers = 0
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._changed = asyncio.Event()  # there may be something to fetch
        self._fetching: asyncio.Task[bool] | None = None
        self._filling: asyncio.Task[None] | None = None

    @contextmanager
    def reading(self, name: str) -> Iterator[None]:
        """A reader reads an object from the upstream meanwhile: keep its segment, and fetch nothing else."""
        self._num_readers += 1
        self._quiet.clear()
        if self._fetching is not None:
            self._fetching.cancel()
        self._begin(parse_object_name(name).segment.manifest_name)
        try:
            yield
        finally:
            self._num_readers -= 1
            asyncio.get_running_loop().call_later(_QUIET_S, self._look_if_quiet)

    def _look_if_quiet(self) -> None:
        if not self._num_readers:
            self._quiet.set()

    def _begin(self, manifest_name: str) -> None:
        if self._filling is None:
            self._filling = self._tasks.begin(self._fill())
        if self._resting.get(manifest_name, 0.0) > time.monotonic():
            return
        if manifest_name not in self._segments and len(self._segments) < _MAX_SEGMENTS:
            segment = self._segments[manifest_name] = _Segment()
            segment.task = self._tasks.begin(self._keep(manifest_name, segment))
            segment.task.add_done_callback(lambda _: self._forget(manifest_name))

    def add(self, name: str, start: int, data: memoryview) -> None:
        """Take bytes of an object, which do not change any more. Never waits."""
        segment = self._segments.get(parse_object_name(name).segment.manifest_name)
        if segment is None or not data or self._held_bytes + len(data) > _HELD_BYTES:
            return
        if segment.objects is not None and not _record_arrival(segment.objects, name, start, len(data)):
            return
        if len(data) < _PIECE_BYTES:  # a part of what was read into, which it would hold in memory
            data = memoryview(bytes(data))
        self._held_bytes += len(data)
        segment.pieces.append((name, start, data))
        segment.more.set()

    async def read(self, name: str, start: int, length: int) -> bytes | None:
        """Return bytes of an object that is being kept; None unless they are on the disk."""
        segment = self._segments.get(parse_object_name(name).segment.manifest_name)
        found = None if segment is None or segment.objects is None else segment.objects.get(name)
        if found is None or _overlaps(found.unwritten, start, start + length):
            return None
        with contextlib.suppress(StoreError):
            return await found.parts.read(start, length)
        return None

    def give_up(self, prefix: str) -> None:
        """Give up all segments whose objects' names begin with ``prefix``, or one of whose objects this names."""
        for name, segment in self._segments.items():
            stem = name.rpartition(".")[0]
            if (stem.startswith(prefix) or prefix.startswith(stem + ".")) and segment.task is not None:
                segment.task.cancel()

    async def close(self) -> None:
        await self._tasks.cancel()

    async def _keep(self, manifest_name: str, segment: _Segment) -> None:
        """Write a segment's bytes as they come, then its manifest."""
        try:
            async with contextlib.AsyncExitStack() as stack:
                found = await self._manifest(manifest_name)
                if found is None:
                    return
                content, manifest = found
                objects = {}
                for name, size in manifest.data_sizes.items():
                    if await self._disk.head(name) is None:
                        parts = await stack.enter_async_context(self._disk.upload_parts(name, size))
                        objects[name] = _Object(parts, size)
                await self._write(segment, objects)
                for each in objects.values():
                    await each.parts.commit()
                await self._disk.put(manifest_name, content)
        except StoreError as e:
            self._rest(manifest_name, e)
        except TimeoutError:
            self._rest(manifest_name, StoreError("timeout", f"{manifest_name}: no bytes for {_GIVE_UP_S:g} s"))

    def _forget(self, manifest_name: str) -> None:
        segment = self._segments.pop(manifest_name)
        self._held_bytes -= sum(len(data) for _, _, data in segment.pieces)

    async def _manifest(self, name: str) -> tuple[bytes, Manifest] | None:
        content = await self._upstream.get(name)
        if content is None:
            return None
        try:
            manifest = await asyncio.to_thread(decode_named_manifest, content, name)
        except FormatError as e:
            raise StoreError("protocol", f"{name}: {e}") from e
        return None if manifest.is_expired(time.time()) else (content, manifest)

    async def _write(self, segment: _Segment, objects: dict[str, _Object]) -> None:
        """Write all bytes of these objects. Raises StoreError and TimeoutError."""
        segment.objects = objects
        early = list(segment.pieces)
        segment.pieces.clear()
        for piece in early:
            name, start, data = piece
            if _record_arrival(objects, name, start, len(data)):
                segment.pieces.append(piece)
            else:
                self._held_bytes -= len(data)
        self._changed.set()
        while any(each.unwritten for each in objects.values()):
            while not segment.pieces:
                segment.more.clear()
                async with asyncio.timeout(_GIVE_UP_S):
                    await segment.more.wait()
            name, start, data = segment.pieces[0]
            await objects[name].parts.write(start, data)
            self._held_bytes -= len(segment.pieces.popleft()[2])
            objects[name].unwritten = _without(objects[name].unwritten, start, start + len(data))

    def _rest(self, manifest_name: str, error: StoreError) -> None:
        now = time.monotonic()
        self._resting = {name: until for name, until in self._resting.items() if until > now}
        self._resting[manifest_name] = now + _REST_S
        self._on_failure(error)

    async def _fill(self) -> None:
        """Fetch what readers have left out, while none reads."""
        while True:
            self._changed.clear()
            await self._quiet.wait()
            for manifest_name, segment in list(self._segments.items()):
                if (missing := segment.first_missing()) is not None and self._held_bytes <= _HELD_BYTES - _PIECE_BYTES:
                    await self._fetch(manifest_name, *missing)
                    break
            else:
                with contextlib.suppress(TimeoutError):  # the disk may have taken what was held
                    async with asyncio.timeout(_QUIET_S if self._segments else None):
                        await self._changed.wait()

    async def _fetch(self, manifest_name: str, name: str, start: int, length: int) -> None:
        """Fetch bytes of an object until a reader comes, and have them written. A segment that cannot be fetched is
        given up."""
        into, num_bytes = memoryview(bytearray(length)), 0

        def received(count: int) -> None:
            nonlocal num_bytes
            num_bytes += count

        fetching = self._fetching = asyncio.ensure_future(self._upstream.read(name, start, [into], received))
        try:
            await asyncio.wait([fetching])
        finally:
            self._fetching = None
            fetching.cancel()
        self.behind_bytes += num_bytes
        self.add(name, start, into[:num_bytes])
        if fetching.cancelled():  # a reader came
            return
        error = fetching.exception()
        if isinstance(error, StoreError):
            self._rest(manifest_name, error)
        elif error is not None:
            raise error
        if error is not None or not fetching.result():
            self.give_up(manifest_name.rpartition(".")[0] + ".")


def _record_arrival(objects: dict[str, _Object], name: str, start: int, num_bytes: int) -> bool:
    """Record that bytes have come. Return whether any of them was missing, and none is behind the object's end."""
    found = objects.get(name)
    end = start + num_bytes
    if found is None or end > found.size_bytes or not _overlaps(found.missing, start, end):
        return False
    found.missing = _without(found.missing, start, end)
    return True


def _overlaps(runs: Sequence[tuple[int, int]], start: int, end: int) -> bool:
    return any(first < end and start < last for first, last in runs)


def _without(runs: Sequence[tuple[int, int]], start: int, end: int) -> list[tuple[int, int]]:
    """Return the runs without the bytes from ``start`` to ``end``."""
    left = [(first, min(last, start)) for first, last in runs] + [(max(first, end), last) for first, last in runs]
    return sorted((first, last) for first, last in left if first < last)
