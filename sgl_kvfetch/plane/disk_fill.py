"""Copies data objects to a local store, from the bytes that reads bring. Nothing is read for it, and no read waits."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec
import xxhash

from sgl_kvfetch.codec import Manifest, Variant
from sgl_kvfetch.directory import LocalStore
from sgl_kvfetch.errors import StoreError

FillResult = Literal["stored", "incomplete", "dropped", "failed"]

_MAX_FILLS = 64  # at a time; each may have two files open
_DISK_CALLS = 2  # at a time, so that the local store has threads left for reads


@dataclass(frozen=True, slots=True)
class NamedData:
    """A data object that a manifest names."""

    stored: bytes  # the manifest as the store has it
    manifest: Manifest
    variant: Variant
    is_read_whole: bool  # whether a fetch of what the lookup found reads all bytes of a variant

    @property
    def name(self) -> str:
        return self.manifest.data_name(self.variant)

    @property
    def size_bytes(self) -> int:
        return self.manifest.data_bytes(self.variant)

    def is_sound(self, start: int, content: bytes) -> bool:
        """Return whether the whole chunks in ``content``, which begins at byte ``start``, match their checksums."""
        view = memoryview(content)
        offset = -start
        for chunk in self.variant.chunks:
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

    def add(self, start: int, content: bytes) -> None:
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

    def __init__(
        self,
        disk: LocalStore,
        memory_bytes: int,
        idle_s: float,
        on_end: Callable[[FillResult], None],
        on_failure: Callable[[StoreError], None],
    ) -> None:
        """An object is given up when no byte comes for ``idle_s``, or when ``memory_bytes`` are not enough for what
        waits. Then it is not begun again for ``idle_s``, so that the rest of a fetch does not begin it in vain."""
        self._disk = disk
        self._memory_bytes = memory_bytes
        self._idle_s = idle_s
        self._on_end = on_end
        self._on_failure = on_failure
        self._fills: OrderedDict[str, _Fill] = OrderedDict()  # the one that got no bytes for longest comes first
        self._disk_calls = asyncio.Semaphore(_DISK_CALLS)

    def add(self, data: NamedData, start: int, content: bytes) -> None:
        """Take bytes of an object, from byte ``start`` on. Never waits."""
        fill = self._fills.get(data.name)
        if fill is None:
            running = [each for each in self._fills.values() if not each.has_ended]
            if len(running) >= _MAX_FILLS:
                _give_up(running[0])
            fill = self._fills[data.name] = _Fill()
            fill.task = asyncio.get_running_loop().create_task(self._run(data, fill))
        self._fills.move_to_end(data.name)
        if sum(each.held_bytes for each in self._fills.values()) + len(content) > self._memory_bytes:
            _give_up(fill)
        fill.add(start, content)

    def give_up(self, prefix: str) -> None:
        """Give up all objects whose name starts with ``prefix``."""
        for name, fill in self._fills.items():
            if name.startswith(prefix):
                _give_up(fill)

    async def close(self) -> None:
        tasks = [fill.task for fill in self._fills.values() if fill.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, data: NamedData, fill: _Fill) -> None:
        result: FillResult = "dropped"
        try:
            await self._copy(data, fill)
            result = "stored"
        except TimeoutError:
            result = "incomplete"
        except StoreError as e:
            result = "failed"
            self._on_failure(e)
        finally:
            fill.end()
            if result == "stored":
                del self._fills[data.name]
            else:
                asyncio.get_running_loop().call_later(self._idle_s, self._fills.pop, data.name)
            self._on_end(result)

    async def _copy(self, data: NamedData, fill: _Fill) -> None:
        """Raises TimeoutError and StoreError."""
        async with contextlib.AsyncExitStack() as stack:
            async with self._disk_calls:
                upload = await stack.enter_async_context(self._disk.upload(data.name, data.size_bytes))
            while fill.written_bytes < data.size_bytes:
                piece = await fill.next_piece(self._idle_s)
                async with self._disk_calls:
                    await upload.write(piece)
                fill.written_bytes += len(piece)
            async with self._disk_calls:
                await upload.commit()
                await self._put_manifest(data)

    async def _put_manifest(self, data: NamedData) -> None:
        """A local store demands all data that a manifest names, so leave out the variants that nobody has read, and
        side pages, which are not kept."""
        manifest = data.manifest
        here = [v for v in manifest.variants if await self._disk.head(manifest.data_name(v)) is not None]
        partial = msgspec.structs.replace(manifest, variants=tuple(here), sides=())
        stored = data.stored if partial == manifest else partial.encode()
        await self._disk.put(manifest.key.manifest_name, stored)


def _give_up(fill: _Fill) -> None:
    assert fill.task is not None
    fill.end()
    # Not at once: a task that is cancelled before its first step never runs, not even its ``finally``.
    asyncio.get_running_loop().call_soon(fill.task.cancel)
