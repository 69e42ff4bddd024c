"""The interface of a store: named byte objects, and a lookup that finds segments by page hash.

A store holds two kinds of object, both named by ``sgl_kvfetch.keys``:

* data objects (``*.kvd``): immutable, named by their content;
* manifests (``*.kvm``): small, replaced atomically, and *the commit*: a segment exists when its manifest does.

Writers put the data first and the manifest last. A missing object is ``None``; every other failure raises
``StoreError``.

**The segment that continues a run of pages furthest** is found by bisection (`furthest`). Page hashes are chained: a
hash determines the whole prefix before it, and with it the page's position in the sequence. So a segment that holds
page j and starts at page i or before holds all pages from i to j. For each page, only the segment that starts earliest
matters. If no segment holds pages i to j, none holds i to j + 1. A bisection therefore finds the furthest page, however
many segments share a popular prefix.

**Pages are looked up by the names of their segments** in a store that can do no more than return objects by name, as a
bucket (`lookup_by_name`). A reader knows the hashes of all its pages; a segment's name has its length and the hash of
its last page; lengths are powers of two that divide the segment's position. So few names are possible at each page. All
of them are requested at once, and the longest segment wins: a run of s segments takes s round trips, and one more if
the last requested page is not its end.

This does not find a segment that starts before the requested pages, nor one whose last page is not among them. For
those, a store needs an index of pages.
"""

from __future__ import annotations

import asyncio
import re
import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import xxhash
from msgspec import Meta

from sgl_kvfetch.codec import (
    MAX_MANIFEST_BYTES,
    MAX_SEGMENT_PAGES,
    NO_KEYS,
    Content,
    Manifest,
    coarsened,
    decode_manifest,
)
from sgl_kvfetch.errors import FormatError, StoreError
from sgl_kvfetch.keys import (
    NAMESPACE_PATTERN,
    PAGE_HASH_BYTES,
    ObjectName,
    SegmentKey,
    parse_object_name,
)
from sgl_kvfetch.side_by_side import side_by_side, together

if TYPE_CHECKING:
    from sgl_kvfetch.status import Audits
    from sgl_kvfetch.stores.notes import NoteKind

# A store shortens a run rather than answer with manifests of more bytes; one manifest always fits.
MAX_LOOKUP_ANSWER_BYTES = 4 << 20
_READS_AT_ONCE = 16
_NAMESPACE = re.compile(NAMESPACE_PATTERN)


def object_digest(data: bytes) -> str:
    """Return the xxh3-128 of an object's content, as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data)


def require_name(name: str) -> ObjectName:
    """Parse an object's name. Raises StoreError (``invalid``) for any other text."""
    try:
        return parse_object_name(name)
    except FormatError as e:
        raise StoreError("invalid", str(e)) from e


def left_of(into: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    """Return what is to be filled when the first ``num_bytes`` of these pieces have come. None of it is empty."""
    if not num_bytes:  # as for nearly every read
        return [piece for piece in into if piece]
    left = []
    for piece in into:
        if num_bytes < len(piece):
            left.append(piece[num_bytes:])
        num_bytes = max(0, num_bytes - len(piece))
    return left


def fill_pieces(into: Sequence[memoryview], data: bytes | memoryview) -> None:
    """Copy bytes into pieces, from the first one on. There is room for them."""
    rest = memoryview(data)
    for piece in into:
        num_bytes = min(len(piece), len(rest))
        piece[:num_bytes], rest = rest[:num_bytes], rest[num_bytes:]


def is_namespace(name: str) -> bool:
    """Return whether this is the name of a namespace's folder."""
    return _NAMESPACE.fullmatch(name) is not None


def require_namespace(namespace: str) -> None:
    """Raise StoreError (``invalid``) unless ``namespace`` is the name of a namespace's folder."""
    if not is_namespace(namespace):
        raise StoreError("invalid", f"not a namespace: {namespace[:120]!r}")


class ObjectInfo(msgspec.Struct, frozen=True):
    """An object's name, size and time; a line of a listing over HTTP."""

    name: str
    size_bytes: Annotated[int, Meta(ge=0)]
    modified_s: float  # seconds since the epoch


class SegmentHit(msgspec.Struct, frozen=True, array_like=True):
    """A segment that covers some of the looked-up pages. Over HTTP, an array of the three fields."""

    manifest: Annotated[bytes, Meta(min_length=1, max_length=MAX_MANIFEST_BYTES)]  # the whole manifest object
    # Index of the first page to use, from the segment's start.
    first_page: Annotated[int, Meta(ge=0, lt=MAX_SEGMENT_PAGES)]
    num_pages: Annotated[int, Meta(ge=1, le=MAX_SEGMENT_PAGES)]  # how many pages of the segment to use


@dataclass(frozen=True, slots=True)
class Lookup:
    """The longest run of stored pages that starts at the first requested page, as consecutive parts of segments."""

    hits: tuple[SegmentHit, ...]

    @property
    def num_pages(self) -> int:
        return sum(hit.num_pages for hit in self.hits)


class Store(ABC):
    """The operations that the data plane needs. Many tasks of one event loop may use a store at once."""

    keys = NO_KEYS  # of a store that signs manifests, which then need chunk digests, or wants all encrypted

    @abstractmethod
    async def get(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        """Return an object, or its bytes ``[start, start + length)`` if ``length`` is given; None if it is missing.

        Raises StoreError, with reason ``truncated`` if fewer bytes than requested arrive.
        """

    async def read(
        self,
        name: str,
        start: int,
        into: Sequence[memoryview],
        received: Callable[[int], None] = lambda num_bytes: None,
    ) -> bool:
        """Fill ``into``, one piece behind the other, with an object's bytes from byte ``start`` on. Return False if the
        object is missing.

        ``received`` gets the number of bytes that have come, again and again, in order. After an error, those bytes
        are valid: the caller may continue behind them. Nothing is written once this has returned or raised. This
        default copies what `get` returns.
        """
        data = await self.get(name, start, sum(map(len, into)))
        if data is None:
            return False
        fill_pieces(into, data)
        received(len(data))
        return True

    @abstractmethod
    async def put(self, name: str, data: Content) -> None:
        """Create or replace an object atomically: readers see the old bytes or the new ones, never a mixture. ``data``
        must not change until this returns."""

    @abstractmethod
    async def replace(self, name: str, data: bytes, expected_digest: str) -> bool:
        """Replace a manifest atomically if its digest is the expected one. Return True if the store holds ``data`` now.

        ``expected_digest`` is the ``object_digest`` of the manifest to replace; a missing manifest never matches.
        """

    async def require_replace(self) -> None:
        """Raise StoreError (``invalid``) if this store cannot replace manifests. This default is for those that can."""
        return

    @abstractmethod
    async def delete(self, name: str) -> bool:
        """Delete an object. Return True if it existed."""

    async def report_damage(self, manifest_name: str) -> bool:
        """Ask the store to check a segment that did not arrive as its manifest says. Return True if it deleted it.

        Only the store can tell damage on its disk from damage on the way: it reads its own bytes again and deletes only
        what is really broken. This default is for stores that cannot check: they delete nothing.
        """
        return False

    async def tell_audits(self, folder: str, audits: Audits) -> None:
        """Tell a server what a rank's audits of a namespace's folder found, for its page. This default does nothing:
        there is no server.

        Raises StoreError.
        """
        return

    @abstractmethod
    async def delete_prefix(self, prefix: str) -> int:
        """Delete all objects whose name starts with ``prefix``; "" means all objects. Return how many were deleted.

        Manifests go first, so that no reader finds a segment without its data. Objects put meanwhile may stay. Raises
        the first StoreError; some objects are deleted by then.
        """

    @abstractmethod
    async def folders(self, digest: str = "") -> frozenset[str]:
        """Return the folders (`HeadSlice.folder`) of a namespace, by its digest, or of all: one for each run of heads
        that ranks of any size store."""

    async def lookup(self, namespace: str, page_hashes: Sequence[bytes]) -> Lookup:
        """Find the longest run of stored pages that starts with ``page_hashes[0]``.

        ``namespace`` is `HeadSlice.folder`; ``page_hashes`` are the 32-byte chained hashes of consecutive pages. A hit
        may leave out pages at the start of its segment, at its end, or both. Where several segments cover a page, the
        one that reaches furthest wins. Expired segments are not found.

        This default goes by names: it finds no segment that starts before the requested pages, nor one whose last page
        is not among them. For those, a store needs an index of pages.
        """
        require_namespace(namespace)
        assert all(len(page_hash) == PAGE_HASH_BYTES for page_hash in page_hashes)
        return await lookup_by_name(self.get, namespace, page_hashes)

    @abstractmethod
    async def close(self) -> None:
        """Release sockets and threads. Idempotent."""


async def bytes_read(store: Store, name: str, start: int, length: int) -> bytes | None:
    """Return what `Store.read` reads; None if the object is missing. Raises StoreError."""
    into = bytearray(length)
    return bytes(into) if await store.read(name, start, [memoryview(into)]) else None


class WrappedStore(Store):
    """Base of stores that change how another store is read. It forwards all other operations to that store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def put(self, name: str, data: Content) -> None:
        await self._store.put(name, data)

    async def replace(self, name: str, data: bytes, expected_digest: str) -> bool:
        return await self._store.replace(name, data, expected_digest)

    async def require_replace(self) -> None:
        await self._store.require_replace()

    async def delete(self, name: str) -> bool:
        return await self._store.delete(name)

    async def report_damage(self, manifest_name: str) -> bool:
        return await self._store.report_damage(manifest_name)

    async def tell_audits(self, folder: str, audits: Audits) -> None:
        await self._store.tell_audits(folder, audits)

    async def delete_prefix(self, prefix: str) -> int:
        return await self._store.delete_prefix(prefix)

    async def folders(self, digest: str = "") -> frozenset[str]:
        return await self._store.folders(digest)

    async def close(self) -> None:
        await self._store.close()


class AdminStore(Store):
    """A store that can also list its objects, sweep its segments and keep notes.

    `tests/stores/conformance.py` has the tests that it must pass.
    """

    keeps_deleted = False  # whether it was seen to keep the bytes of deleted objects, as a bucket with versions does

    @abstractmethod
    async def head(self, name: str) -> ObjectInfo | None:
        """Return an object's size and modification time, or None if it is missing."""

    @abstractmethod
    def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        """Iterate over all objects whose name starts with ``prefix``, in no particular order."""

    async def last_uses(self, segments: Sequence[SegmentKey]) -> Sequence[float | None]:
        """Return when lookups last found segments, in seconds since the epoch; None where the store does not know."""
        return [None] * len(segments)

    async def expired(self, segments: Sequence[SegmentKey]) -> set[SegmentKey]:
        """Return the segments that have expired. This default reads all their manifests. Raises StoreError."""
        found: set[SegmentKey] = set()

        async def look(segment: SegmentKey) -> None:
            try:
                content = await self.get(segment.manifest_name)
                if content is not None and decode_manifest(content).is_expired(time.time()):
                    found.add(segment)
            except FormatError:
                return  # ``kvfetch verify`` reports those
            except StoreError as e:
                if not e.concerns_object:
                    raise

        await side_by_side(_READS_AT_ONCE, segments, look)
        return found

    async def peek(self, name: str) -> bytes | None:
        """Read a manifest, without counting that as a use of its segment."""
        return await self.get(name)

    async def coarsen(self, name: str) -> Mapping[str, int]:
        """Replace a manifest by the next coarser one. Return the sizes, by name, of what it does not need any more;
        nothing if there is none, or others have changed it. This does not count as a use of the segment.
        Raises FormatError and StoreError."""
        content = await self.peek(name)
        if content is None:
            return {}
        found = coarsened(decode_manifest(content), content)
        if found is None or not await self.replace(name, found[0], object_digest(content)):
            return {}
        return found[1]

    async def delete_unnamed(self, name: str) -> bool:
        """Delete a data object unless its segment's manifest names it. Return True if it existed.

        This default reads the manifest just before. If a writer puts one between the two, the data is deleted all the
        same: such stores have no transactions. Raises FormatError and StoreError.
        """
        content = await self.peek(parse_object_name(name).segment.manifest_name)
        if content is not None and name in decode_manifest(content).data_names:
            return False
        return await self.delete(name)

    def sweeping(self) -> AbstractAsyncContextManager[None]:
        """Exclude other sweepers of this store. This default excludes nobody.

        Entering raises StoreError (``skipped``) while another sweeps. The body is cancelled if the right is lost.
        """
        return nullcontext()

    # Notes: see `notes`, which says what each kind is, and reads and writes them.

    @abstractmethod
    async def notes(self, kind: NoteKind) -> Sequence[ObjectInfo]:
        """Return the names of all notes of a kind, their sizes, and when they were put."""

    @abstractmethod
    async def get_note(self, kind: NoteKind, name: str, length: int | None = None) -> bytes | None:
        """Return the first ``length`` bytes of a note, or all of it; None if there is none of this name.

        Raises StoreError: ``truncated`` if it is shorter, ``too_large`` if it has more bytes than notes of this kind.
        """

    @abstractmethod
    async def put_note(self, kind: NoteKind, name: str, data: bytes) -> None:
        """Keep a note, or replace the one of the same name, atomically.

        Raises StoreError: ``full`` if notes of this kind, or what they hold, would take too much of the store's
        capacity; ``invalid`` for other bytes than a note of this name has, if the store looks at them.
        """

    @abstractmethod
    async def delete_note(self, kind: NoteKind, name: str) -> bool:
        """Delete a note. Return True if it existed."""


async def lookup_by_name(
    get: Callable[[str], Coroutine[Any, Any, bytes | None]], namespace: str, page_hashes: Sequence[bytes]
) -> Lookup:
    """Find segments as ``Store.lookup`` does, as far as names allow. ``get`` reads a whole object.

    Raises StoreError if the first round trip fails. A later failure only ends the run, as do manifests of more than
    `MAX_LOOKUP_ANSWER_BYTES`.
    """
    hits: list[SegmentHit] = []
    room = MAX_LOOKUP_ANSWER_BYTES
    page = 0
    position: int | None = None  # of `page` in the sequence; unknown until a segment is found
    while page < len(page_hashes):
        lengths = possible_lengths(len(page_hashes) - page, position)
        keys = [SegmentKey(namespace, length, page_hashes[page + length - 1]) for length in lengths]
        try:
            contents = await together(get(key.manifest_name) for key in keys)
        except StoreError:
            if not hits:
                raise
            break
        for key, content in zip(keys, contents, strict=True):
            manifest = None if content is None else await asyncio.to_thread(decode_expected, content, key)
            if (
                content is not None
                and manifest is not None
                and len(content) <= room
                and position in (None, manifest.first_page)
                and manifest.page_hashes == tuple(page_hashes[page : page + key.num_pages])
            ):
                hits.append(SegmentHit(content, 0, key.num_pages))
                room -= len(content)
                page += key.num_pages
                position = manifest.first_page + key.num_pages
                break
        else:
            break
    return Lookup(tuple(hits))


def possible_lengths(num_pages: int, position: int | None) -> list[int]:
    """Return the lengths, longest first, of segments that may start at ``position`` and have at most ``num_pages``."""
    aligned = MAX_SEGMENT_PAGES if not position else position & -position
    longest = min(num_pages, aligned, MAX_SEGMENT_PAGES)
    return [1 << order for order in reversed(range(longest.bit_length()))]


def decode_expected(content: bytes, key: SegmentKey) -> Manifest | None:
    """Decode a manifest. Return None if it is malformed, expired, or another segment's."""
    try:
        manifest = decode_manifest(content)
    except FormatError:
        return None
    return manifest if manifest.key == key and not manifest.is_expired(time.time()) else None


T = TypeVar("T")


def furthest(
    earliest: Callable[[int], tuple[int, T] | None], page: int, num_pages: int, position: int
) -> tuple[int, int, T] | None:
    """Find the segment that holds ``page`` and reaches furthest, of ``num_pages`` that are looked up.

    ``earliest`` returns, for a page, position and identifier of the segment that starts earliest of those that hold it.
    ``position`` is that of ``page`` in the sequence. Return the page behind the segment's last one that is looked up,
    and position and identifier of the segment; None if no segment holds ``page``.
    """

    def out_of_reach(last: int) -> bool:
        holder = earliest(last)
        return holder is None or holder[0] > position

    end = bisect_left(range(num_pages), True, lo=page, key=out_of_reach)
    holder = earliest(end - 1) if end > page else None
    return None if holder is None else (end, *holder)
