"""What a store is: named byte objects, and a lookup that knows segments.

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
    """What an object's content goes by: the xxh3-128 in 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data)


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    name: str
    size_bytes: int
    modified_s: float  # seconds since the epoch


@dataclass(frozen=True, slots=True)
class SegmentHit:
    """One segment that covers a part of the pages that were looked up."""

    manifest: bytes  # the whole manifest object
    first_page: int  # the first page of the segment to use, counted from the segment's start
    num_pages: int  # how many pages of it to use


@dataclass(frozen=True, slots=True)
class Lookup:
    """The longest run of stored pages from the first one asked for, as consecutive segment parts."""

    hits: tuple[SegmentHit, ...]

    @property
    def num_pages(self) -> int:
        return sum(hit.num_pages for hit in self.hits)


class Store(ABC):
    """Client of a store. Safe to use from many tasks of one event loop; not from several loops."""

    @abstractmethod
    async def get(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        """Bytes ``[start, start + length)`` of an object (to its end if ``length`` is None), or None if it is missing.

        Raises StoreError, with reason ``truncated`` if fewer bytes than asked for could be had.
        """

    async def read(self, name: str, start: int, length: int, take: Callable[[bytes], None]) -> bool:
        """``get`` that hands its bytes to ``take`` as they come, in order. False if the object is missing.

        What was handed over before an error stands: whoever reads on begins behind it. This default hands all over at
        once.
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
        """Put a manifest if the one of that name is as expected. True if the store holds ``data`` now.

        ``expected_digest`` is the ``object_digest`` of the manifest that is to go; one that is gone is not as expected.
        This default has a gap between looking and putting: a store that can do both in one step overrides it.
        """
        current = await self.get(name)
        if current is None or object_digest(current) != expected_digest:
            return current == data
        await self.put(name, data)
        return True

    @abstractmethod
    async def head(self, name: str) -> ObjectInfo | None:
        """An object's size and age, or None if it is missing."""

    @abstractmethod
    async def delete(self, name: str) -> bool:
        """Delete an object. True if it was there."""

    @abstractmethod
    def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        """All objects whose name starts with ``prefix``, in no particular order."""

    async def delete_prefix(self, prefix: str) -> int:
        """Delete all objects whose name starts with ``prefix``; with "", all there are. How many were deleted.

        Manifests go first, so that nobody finds a segment without its data. What is put meanwhile may stay. Raises the
        first StoreError, with some of the objects deleted.
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

        ``namespace`` is `HeadSlice.folder`; ``page_hashes`` are 32-byte chained page hashes of
        consecutive pages. A segment may be used in part, at its start, its end or both. Where several segments
        cover a page, the one that reaches furthest wins.
        """

    @abstractmethod
    async def close(self) -> None:
        """Release sockets and threads. Idempotent."""
