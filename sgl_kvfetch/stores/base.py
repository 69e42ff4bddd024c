"""The interface of a store: named byte objects, and a lookup that finds segments by page hash.

A store holds two kinds of object, both named by ``sgl_kvfetch.keys``:

* data objects (``*.kvd``): immutable, named by their content;
* manifests (``*.kvm``): small, replaced atomically, and *the commit*: a segment exists when its manifest does.

Writers put the data first and the manifest last. A missing object is ``None``; every other failure raises
``StoreError``.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass

import xxhash

from sgl_kvfetch.keys import MANIFEST_SUFFIX

_DELETES_AT_ONCE = 16


def object_digest(data: bytes) -> str:
    """Return the xxh3-128 of an object's content, as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data)


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    name: str
    size_bytes: int
    modified_s: float  # seconds since the epoch


@dataclass(frozen=True, slots=True)
class SegmentHit:
    """A segment that covers some of the looked-up pages."""

    manifest: bytes  # the whole manifest object
    first_page: int  # index of the first page to use, from the segment's start
    num_pages: int  # how many pages of the segment to use


@dataclass(frozen=True, slots=True)
class Lookup:
    """The longest run of stored pages that starts at the first requested page, as consecutive parts of segments."""

    hits: tuple[SegmentHit, ...]

    @property
    def num_pages(self) -> int:
        return sum(hit.num_pages for hit in self.hits)


class Store(ABC):
    """Client of a store. Many tasks of one event loop may use it at once; tasks of different loops may not."""

    @abstractmethod
    async def get(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        """Return bytes ``[start, start + length)`` of an object (to its end if ``length`` is None); None if missing.

        Raises StoreError, with reason ``truncated`` if fewer bytes than requested arrive.
        """

    async def read(self, name: str, start: int, length: int, take: Callable[[bytes], None]) -> bool:
        """Pass the requested bytes to ``take`` as they arrive, in order. Return False if the object is missing.

        After an error, the pieces already passed are valid: the caller may continue behind them. This default passes
        everything in one piece.
        """
        data = await self.get(name, start, length)
        if data is None:
            return False
        take(data)
        return True

    @abstractmethod
    async def put(self, name: str, data: bytes) -> None:
        """Create or replace an object atomically: readers see the old bytes or the new ones, never a mixture."""

    async def replace(self, name: str, data: bytes, expected_digest: str) -> bool:
        """Replace a manifest if its digest is the expected one. Return True if the store holds ``data`` now.

        ``expected_digest`` is the ``object_digest`` of the manifest to replace; a missing manifest never matches.
        This default is not atomic: a store that can compare and replace in one step overrides it.
        """
        current = await self.get(name)
        if current is None or object_digest(current) != expected_digest:
            return current == data
        await self.put(name, data)
        return True

    @abstractmethod
    async def head(self, name: str) -> ObjectInfo | None:
        """Return an object's size and modification time, or None if it is missing."""

    @abstractmethod
    async def delete(self, name: str) -> bool:
        """Delete an object. Return True if it existed."""

    @abstractmethod
    def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        """Iterate over all objects whose name starts with ``prefix``, in no particular order."""

    async def delete_prefix(self, prefix: str) -> int:
        """Delete all objects whose name starts with ``prefix``; "" means all objects. Return how many were deleted.

        Manifests go first, so that no reader finds a segment without its data. Objects put meanwhile may stay. Raises
        the first StoreError; some objects are deleted by then.
        """
        names = [info.name async for info in self.list(prefix)]
        count = 0
        for are_manifests in (True, False):
            left = iter([name for name in names if name.endswith(MANIFEST_SUFFIX) == are_manifests])
            try:
                async with asyncio.TaskGroup() as group:
                    workers = [group.create_task(self._delete_each(left)) for _ in range(_DELETES_AT_ONCE)]
            except ExceptionGroup as e:
                raise e.exceptions[0] from None
            count += sum(worker.result() for worker in workers)
        return count

    async def _delete_each(self, names: Iterator[str]) -> int:
        count = 0
        for name in names:
            count += await self.delete(name)
        return count

    @abstractmethod
    async def lookup(self, namespace: str, page_hashes: Sequence[bytes]) -> Lookup:
        """Find the longest run of stored pages that starts with ``page_hashes[0]``.

        ``namespace`` is `HeadSlice.folder`; ``page_hashes`` are the 32-byte chained hashes of consecutive pages. A hit
        may leave out pages at the start of its segment, at its end, or both. Where several segments cover a page, the
        one that reaches furthest wins.
        """

    @abstractmethod
    async def close(self) -> None:
        """Release sockets and threads. Idempotent."""
