"""A store in a directory, which it has alone; and how any store is opened by its URL."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import ParamSpec, TypeVar
from urllib.parse import unquote

from sgl_kvfetch.codec import MAX_MANIFEST_BYTES, Content, bytes_of, decode_manifest, views_of
from sgl_kvfetch.directory import catalog as index, files, notes
from sgl_kvfetch.directory.catalog import Catalog, SegmentState
from sgl_kvfetch.directory.files import OpenObject
from sgl_kvfetch.directory.notes import NoteWriter
from sgl_kvfetch.directory.owner import Owner
from sgl_kvfetch.directory.repair import DamageChecks, Repair
from sgl_kvfetch.directory.room import DiskRoom
from sgl_kvfetch.directory.workers import Workers, on
from sgl_kvfetch.directory.writing import DataWriter, Parts, PartsWriter, Upload, write_manifest
from sgl_kvfetch.errors import ConfigError, FormatError, StoreError
from sgl_kvfetch.keys import MANIFEST_SUFFIX, PAGE_HASH_BYTES, ObjectName, SegmentKey
from sgl_kvfetch.log import LimitedLogger
from sgl_kvfetch.stores import (
    PINS,
    AdminStore,
    HttpOptions,
    Lookup,
    NoteKind,
    ObjectInfo,
    Pin,
    S3Options,
    SegmentHit,
    Token,
    decode_pin,
    object_digest,
    open_remote,
    require_name,
    split_store_url,
)
from sgl_kvfetch.stores.base import require_namespace
from sgl_kvfetch.stores.wire import MAX_FOLDERS, MAX_LOOKUP_ANSWER_BYTES

_limited = LimitedLogger(logging.getLogger(__name__))

_PINNED_AT_ONCE = 256  # segments
_PINNED_HASHES_AT_ONCE = 8192 * PAGE_HASH_BYTES  # bytes: tens of milliseconds of the catalog's lock


P = ParamSpec("P")
T = TypeVar("T")

_LISTED_AT_ONCE = 256
_LOOKUP_ATTEMPTS = 3
_SAVE_USES_EVERY_S = 1.0
_DELETE_TURN_S = 5.0
_DELETED_AT_ONCE = 16

_FOUND = f"""
    SELECT name, last_used, pinned, length(hashes) / {PAGE_HASH_BYTES} AS pages,
        (SELECT coalesce(sum(bytes), 0) FROM files WHERE files.segment = segments.id) AS bytes
    FROM segments JOIN chains ON chains.segment = segments.id WHERE state = {SegmentState.FOUND.value}
"""
_FOLDERS = f"""
    SELECT substr(name, 1, instr(name, '/') - 1), count(*), sum(pages), sum(bytes), min(last_used), max(last_used),
        min(name) FROM ({_FOUND}) GROUP BY 1 ORDER BY 4 DESC LIMIT ?
"""
_LAST_USED = f"""
    SELECT id FROM segments WHERE state = {SegmentState.FOUND.value} AND name BETWEEN ? AND ?
    ORDER BY last_used DESC LIMIT ?
"""
_SEGMENTS = f"""
    SELECT name, pages, bytes, last_used, pinned FROM ({_FOUND} AND id IN ({_LAST_USED})) ORDER BY last_used DESC
"""


@dataclass(frozen=True, slots=True)
class StoreUsage:
    stored_bytes: int  # of all files but the catalog, and what is reserved for files that are being written
    num_segments: int  # those that lookups can find
    num_evicted: int  # segments, since the start
    write_problem: str | None = None  # why nothing can be written now
    disk_bytes: int = 0  # of the directory's file system; 0 while there is no directory
    disk_free_bytes: int = field(default=0, compare=False)  # changes with whatever else writes to the disk


@dataclass(frozen=True, slots=True)
class FolderUsage:
    """Describes what lookups can find in a folder. Times are in seconds since the epoch."""

    folder: str
    num_segments: int
    num_pages: int  # pages of segments that overlap are counted separately
    stored_bytes: int
    first_used_s: float  # of the segment that was used longest ago
    last_used_s: float
    some_manifest: str  # the name of one of its manifests


@dataclass(frozen=True, slots=True)
class SegmentUsage:
    name: str  # its manifest's
    num_pages: int
    stored_bytes: int
    last_used_s: float
    is_pinned: bool


class LocalStore(AdminStore):
    """A directory of objects with a catalog of them. It belongs to this store from its first use until `close`: another
    one on it, in whatever process, raises StoreError (``io``).

    With a capacity, the least recently used segments are evicted for new ones: manifest first, then data. Data without
    a manifest is removed once it is ``orphan_age_s`` old.
    """

    def __init__(
        self,
        root: Path | str,
        *,
        capacity_bytes: int | None = None,
        min_free_bytes: int | None = None,
        drop_levels: int = 0,
        orphan_age_s: float = 900.0,
        num_threads: int = 8,
    ) -> None:
        """The first write creates the directory. Raises ConfigError for a capacity below one byte.

        ``min_free_bytes``: segments are also evicted to leave this much of the disk free, for as much as that a day if
        others take it; by default 1 % of the disk, at most 1 GiB. ``drop_levels``: how many times a segment is
        made coarser before any segment is evicted.
        """
        if capacity_bytes is not None and capacity_bytes < 1:
            raise ConfigError(f"capacity_bytes is {capacity_bytes}; expected at least 1, or none for no limit")
        self.root = Path(root)
        self.owner = Owner(self.root)
        self._catalog = Catalog(self.root, self._start_sweep, self.owner.require)
        self._room = DiskRoom(self._catalog, capacity_bytes, min_free_bytes, drop_levels)
        self._repair = Repair(self._catalog, self._room, orphan_age_s)
        self._checks = DamageChecks(self._catalog, self._room)
        self.workers = Workers(num_threads, self._require_owned)
        self._opened = False
        self._orphan_age_s = orphan_age_s
        self._collected_at = self._uses_saved_at = float("-inf")  # monotonic seconds

    def _require_owned(self) -> None:
        with files.os_errors(f"locking {self.root}"):
            self.owner.require()

    @on("reads")
    def peek(self, name: str) -> bytes | None:
        """Read a manifest, or the beginning of one that is too large. This does not count as a use of its segment."""
        require_name(name)
        with files.os_errors(f"reading {name}"):
            return files.read_object(self.root, name, MAX_MANIFEST_BYTES + 1)

    @on("writes")
    def coarsen(self, name: str) -> Mapping[str, int]:
        require_name(name)
        with files.os_errors(f"making {name} coarser"):
            return self._room.coarsen(name)

    @on("writes")
    def delete_unnamed(self, name: str) -> bool:
        """Look at the manifest and delete the data object in one transaction."""
        require_name(name)
        with files.os_errors(f"deleting {name}"):
            return bool(self._room.delete_unnamed([name]))

    @on("reads")
    def get(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        assert not start or length is not None, "a range has a length"
        opened = self._open(name)
        if opened is None:
            return None
        with opened.file as file, files.os_errors(f"reading {name}"):
            size = opened.info.size_bytes
            wanted = size if length is None else length
            data = files.read_fully(file, start, wanted)
        if start > size or len(data) < wanted:
            raise StoreError("truncated", f"{name} has {size} bytes; expected {wanted} from byte {start} on")
        return data

    async def put(self, name: str, data: Content) -> None:
        """Create or replace an object. Raises StoreError: ``invalid`` if data does not match its name's digest, or a
        manifest's data is missing."""
        parsed = require_name(name)
        self._collect_later()
        if parsed.is_manifest:
            await self._put_if(name, bytes_of(data), lambda current: True)
        else:
            await self._put_data(parsed, data)

    async def replace(self, name: str, data: bytes, expected_digest: str) -> bool:
        """Replace a manifest, atomically. Raises as ``put`` does."""
        return await self._put_if(name, data, lambda current: current == expected_digest)

    async def create(self, name: str, data: bytes) -> bool:
        """Put a manifest if there is none, atomically. Return True if the store holds ``data`` now."""
        return await self._put_if(name, data, lambda current: current is None)

    @on("writes")
    def _put_if(self, name: str, data: bytes, replaces: Callable[[str | None], bool]) -> bool:
        if not require_name(name).is_manifest:
            raise StoreError("invalid", f"{name} is not a manifest; data objects are never replaced")
        return write_manifest(self._catalog, self._room, name, data, replaces)

    @on("writes")
    def _put_data(self, name: ObjectName, data: Content) -> None:
        writer = DataWriter(self._catalog, self._room, name, len(data))
        try:
            for view in views_of(data):
                writer.write(view)
            writer.commit()
        finally:
            writer.discard()

    @asynccontextmanager
    async def upload(self, name: str, size_bytes: int | None = None) -> AsyncIterator[Upload]:
        """Write a data object in pieces. Leaving the context without ``commit`` discards it.

        If its size is known, room for all of it is reserved at once. Raises StoreError: ``invalid`` for any other name,
        ``full``, ``io``.
        """
        parsed = require_name(name)
        if parsed.is_manifest:
            raise StoreError("invalid", f"{name} is a manifest; only data objects are written in pieces")
        writer = DataWriter(self._catalog, self._room, parsed, size_bytes)
        try:
            run = self.workers.run
            await run("writes", writer.open)
            yield Upload(lambda data: run("writes", writer.write, data), lambda: run("writes", writer.commit))
        finally:  # cancelled, too: the thread goes on. It works after the store is closed.
            await asyncio.shield(asyncio.to_thread(writer.discard))

    @asynccontextmanager
    async def upload_parts(self, name: str, size_bytes: int) -> AsyncIterator[Parts]:
        """Write a data object of a known size, its parts in any order. The rest is as in `upload`."""
        writer, run = PartsWriter(self._catalog, self._room, require_name(name), size_bytes), self.workers.run
        try:
            await run("writes", writer.open)
            yield Parts(
                lambda start, data: run("writes", writer.write_at, start, data),
                lambda start, length: run("reads", writer.read_at, start, length),
                lambda: run("writes", writer.commit),
            )
        finally:
            await asyncio.shield(asyncio.to_thread(writer.discard))

    async def open_object(self, name: str) -> OpenObject | None:
        """Open an object for reading in pieces; the caller closes it. None if it is missing."""
        return await self.workers.open(partial(self._open, name))

    def _open(self, name: str) -> OpenObject | None:
        segment = require_name(name).segment
        with files.os_errors(f"opening {name}"):
            opened = files.open_object(self.root, name)
        if opened is not None:
            self._record_use([segment.manifest_name])
        return opened

    @on("reads")
    def head(self, name: str) -> ObjectInfo | None:
        require_name(name)
        with files.os_errors(f"looking at {name}"):
            return files.stat_object(self.root, name)

    @on("writes")
    def delete(self, name: str) -> bool:
        """Delete an object. If its segment needs it, lookups do not find the segment any more."""
        require_name(name)
        with files.os_errors(f"deleting {name}"):
            return bool(self._room.delete([name]))

    async def delete_prefix(self, prefix: str) -> int:
        count, more = 0, True
        while more:
            some, more = await self.delete_some(prefix, _DELETE_TURN_S)
            count += some
        return count

    @on("scans")
    def delete_some(self, prefix: str, within_s: float) -> tuple[int, bool]:
        """Like ``delete_prefix``, for about ``within_s``. Return how many were deleted, and if some may be left."""
        until_s = time.monotonic() + within_s
        count = 0
        with files.os_errors(f"deleting {prefix}*"):
            for suffix in (MANIFEST_SUFFIX, ""):
                for namespace in self._namespaces(prefix):
                    found = files.objects(self.root, namespace, prefix)
                    names = (info.name for info in found if info.name.endswith(suffix))
                    while some := list(islice(names, _DELETED_AT_ONCE)):
                        if count and time.monotonic() > until_s:  # each call deletes one batch at least
                            return count, True
                        count += len(self._room.delete(some))
        return count, False

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        for namespace in await self.workers.run("scans", self._namespaces, prefix):
            infos = files.objects(self.root, namespace, prefix)
            while some := await self.workers.run("scans", self._next, namespace, infos):
                for info in some:
                    yield info

    def _namespaces(self, prefix: str) -> Sequence[str]:
        with files.os_errors("listing namespaces"):
            return [name for name in files.namespaces(self.root) if name.startswith(prefix[: len(name)])]

    def _next(self, namespace: str, infos: Iterator[ObjectInfo]) -> Sequence[ObjectInfo]:
        with files.os_errors(f"listing {namespace}"):
            return list(islice(infos, _LISTED_AT_ONCE))

    async def folders(self, digest: str = "") -> frozenset[str]:
        found = await self.workers.run("lookups", self._namespaces, digest and f"{digest}.")
        if len(found) > MAX_FOLDERS:
            raise StoreError("too_large", f"the store has {len(found)} folders; at most {MAX_FOLDERS} are listed")
        return frozenset(found)

    @on("scans")
    def last_uses(self, segments: Sequence[SegmentKey]) -> Sequence[float | None]:
        with files.os_errors("reading when segments were used"):
            self._catalog.save_uses()
            with self._catalog.reading() as db:
                if db is None:
                    return [None] * len(segments)
                uses = dict(db.execute("SELECT name, last_used FROM segments"))
        return [uses.get(segment.manifest_name) for segment in segments]

    @on("scans")
    def expired(self, segments: Sequence[SegmentKey]) -> set[SegmentKey]:
        with files.os_errors("reading when segments expire"), self._catalog.reading() as db:
            rows = () if db is None else db.execute("SELECT name FROM segments WHERE expires <= ?", (time.time(),))
            names = {name for (name,) in rows}
        return {segment for segment in segments if segment.manifest_name in names}

    # Notes: the catalog knows those that are pins

    @on("reads")
    def notes(self, kind: NoteKind) -> Sequence[ObjectInfo]:
        with files.os_errors(f"listing {kind.name}"):
            return notes.list_notes(self.root, kind)

    async def get_note(self, kind: NoteKind, name: str, length: int | None = None) -> bytes | None:
        kind.require(name, length)
        opened = await self.open_note(kind, name, length)
        if opened is None:
            return None
        with opened.file as file, files.os_errors(f"reading {kind.one} {name}"):
            wanted = opened.info.size_bytes if length is None else length
            kind.require(name, wanted)
            data = await self.workers.run("reads", files.read_fully, file, 0, wanted)
        if len(data) < wanted:
            raise StoreError("truncated", f"{kind.one} {name} has {len(data)} bytes; expected {wanted}")
        return data

    async def put_note(self, kind: NoteKind, name: str, data: bytes) -> None:
        async with self.upload_note(kind, name, len(data)) as upload:
            await upload.write(data)
            await upload.commit()

    async def open_note(self, kind: NoteKind, name: str, length: int | None = None) -> OpenObject | None:
        """Open a note for reading in pieces; the caller closes it. None if it is missing. ``length``: how many of its
        first bytes are wanted, if not all."""
        kind.require(name)
        return await self.workers.open(partial(self._open_note, kind, name))

    def _open_note(self, kind: NoteKind, name: str) -> OpenObject | None:
        with files.os_errors(f"opening {kind.one} {name}"):
            return notes.open_note(self.root, kind, name)

    @asynccontextmanager
    async def upload_note(self, kind: NoteKind, name: str, size_bytes: int) -> AsyncIterator[Upload]:
        """Write a note in pieces. Leaving the context without ``commit`` discards it. Raises StoreError as `put_note`
        does."""
        kind.require(name)
        writer = NoteWriter(self.root, kind, name, size_bytes, self._room.capacity_bytes)

        def run(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
            with files.os_errors(f"writing {kind.one} {name}"), self._room.recording_failure():
                return call(*args, **kwargs)

        try:
            await self.workers.run("writes", self.own)
            await self.workers.run("writes", run, writer.open)
            yield Upload(
                lambda data: self.workers.run("writes", run, writer.write, data),
                lambda: self.workers.run("scans", run, self._commit_note, writer),
            )
        finally:  # cancelled, too: the thread goes on
            await asyncio.shield(asyncio.to_thread(run, writer.discard))

    def _commit_note(self, writer: NoteWriter) -> None:
        writer.check()
        if writer.kind is PINS:
            self._pin(decode_pin(writer.head), writer)
        else:
            writer.commit()
        self._room.record_written()

    def _pin(self, pin: Pin, writer: NoteWriter) -> None:
        """Keep a pin, in several short transactions. From the first one on, segments that are put are pinned."""
        try:
            for first in range(0, len(pin.hashes), _PINNED_HASHES_AT_ONCE):
                with self._catalog.writing() as db:
                    notes.enter_pages(db, pin.name, pin.hashes[first : first + _PINNED_HASHES_AT_ONCE])
            with self._catalog.reading() as snapshot:
                segments = [] if snapshot is None else notes.segments_of(snapshot, pin)
                num_bytes = 0 if snapshot is None else notes.pinned_bytes_with(snapshot, segments)
            self._room.require_pins_fit(num_bytes)
            writer.commit()
        except BaseException:
            opened = notes.open_note(self.root, PINS, pin.name)
            if opened is None:
                with self._catalog.writing() as db:
                    notes.forget_pin(db, pin.name)
            else:
                opened.file.close()
            raise
        for first in range(0, len(segments), _PINNED_AT_ONCE):
            with self._catalog.writing() as db:
                notes.pin_segments(db, segments[first : first + _PINNED_AT_ONCE])

    @on("scans")
    def delete_note(self, kind: NoteKind, name: str) -> bool:
        kind.require(name)
        with files.os_errors(f"deleting {kind.one} {name}"):
            if kind is not PINS:
                return notes.delete_note(self.root, kind, name)
            with self._catalog.writing() as db:
                existed = notes.delete_note(self.root, kind, name)
                notes.forget_pin(db, name)
            return existed

    # Looking up

    def own(self) -> None:
        """Create the directory if it is missing, and have it. Raises StoreError (``io``) if somebody else has it."""
        with files.os_errors(f"locking {self.root}"):
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.owner.require()

    async def lookup(self, namespace: str, page_hashes: Sequence[bytes]) -> Lookup:
        """Find segments as soon as they are put.

        While the catalog is rebuilt, those that are not in it yet are missed. A run whose manifests take more than
        ``MAX_LOOKUP_ANSWER_BYTES`` is shortened.
        """
        return await self.lookup_taking(namespace, page_hashes, lambda num_bytes: None)

    async def lookup_taking(self, namespace: str, page_hashes: Sequence[bytes], take: Callable[[int], None]) -> Lookup:
        """Like `lookup`, but call ``take`` with the size of the manifests before they are read: on another thread. It
        may raise an exception."""
        require_namespace(namespace)
        return await self.workers.run("lookups", self._lookup, namespace, page_hashes, take)

    def _lookup(self, namespace: str, page_hashes: Sequence[bytes], take: Callable[[int], None]) -> Lookup:
        with files.os_errors(f"looking up in {namespace}"):
            for attempt in range(_LOOKUP_ATTEMPTS):
                found = self._find(namespace, page_hashes)
                take(sum(hit.num_bytes for hit in found))
                hits = list(self._with_manifests(found, accept_other=attempt > 0))
                if len(hits) == len(found):
                    break
                if attempt:  # not merely replaced or evicted since it was found
                    self._quietly(partial(self._repair.recheck, found[len(hits)].manifest_name))
        return Lookup(tuple(hits))

    def _find(self, namespace: str, page_hashes: Sequence[bytes]) -> Sequence[index.IndexHit]:
        if not self._opened:
            self._open_later()  # even if a catalog of another version cannot be read
        with self._catalog.reading() as db:
            found = [] if db is None else index.find_pages(db, namespace, page_hashes, MAX_LOOKUP_ANSWER_BYTES)
        if db is None:
            self._open_later()
        self._record_use([hit.manifest_name for hit in found])
        return found

    def _with_manifests(self, found: Sequence[index.IndexHit], *, accept_other: bool) -> Iterator[SegmentHit]:
        """Read the manifests, up to the first that is not as in the catalog.

        ``accept_other``: accept any sound manifest of the same pages, because a writer renames the file a moment before
        its transaction ends.
        """
        room = MAX_LOOKUP_ANSWER_BYTES  # files may have been replaced by larger ones
        for hit in found:
            content = files.read_object(self.root, hit.manifest_name, min(room, MAX_MANIFEST_BYTES))
            if content is None:
                return
            room -= len(content)
            if object_digest(content) != hit.digest and not (accept_other and _is_sound(content, hit.manifest_name)):
                return
            yield SegmentHit(content, hit.first_page, hit.num_pages)

    def _open_later(self) -> None:
        """Open the catalog in the background, which rebuilds it if it is missing."""
        if self._catalog.exists or files.namespaces(self.root):
            self._opened = True
            self._quietly_later(self._catalog.open)

    def _record_use(self, manifest_names: Sequence[str]) -> None:
        if not self._catalog.is_open:
            return  # only files were read: that changes nothing
        self._catalog.record_use(manifest_names)
        now = time.monotonic()
        if now > self._uses_saved_at + _SAVE_USES_EVERY_S:
            self._uses_saved_at = now
            self._quietly_later(self._catalog.save_uses)

    def _start_sweep(self) -> None:
        if self.workers.is_closed:
            return
        self._room.counted.clear()
        self._quietly_later(self._repair.sweep)

    def _quietly_later(self, call: Callable[[], object]) -> None:
        self.workers.later(partial(self._quietly, call))

    def _quietly(self, call: Callable[[], object]) -> None:
        try:
            call()
        except (StoreError, OSError) as e:
            _limited.warning(str(self.root), f"{self.root}: {e}")

    def look_again(self, manifest_name: str) -> None:
        """Compare a segment with its files in the background, and correct the catalog."""
        self._quietly_later(partial(self._repair.recheck, manifest_name))

    async def report_damage(self, manifest_name: str) -> bool:
        if not require_name(manifest_name).is_manifest:
            raise StoreError("invalid", f"{manifest_name} is not a manifest")
        self.workers.require_open()
        return await self._checks.check(manifest_name)

    @on("reads")
    def usage(self) -> StoreUsage:
        """Return sizes and counters."""
        stored_bytes = num_segments = disk_bytes = free_bytes = 0
        problem = None
        with files.os_errors("reading the catalog"):
            if self.root.is_dir():
                problem = self._room.problem()
                disk_bytes, _, free_bytes = shutil.disk_usage(self.root)
                with self._catalog.reading() as db:
                    if db is not None:
                        (stored_bytes,) = db.execute("SELECT bytes FROM totals").fetchone()
                        count = "SELECT count(*) FROM segments WHERE state = ?"
                        (num_segments,) = db.execute(count, (SegmentState.FOUND,)).fetchone()
                stored_bytes += self._room.unnamed_bytes + notes.stored_bytes(self.root)
        return StoreUsage(stored_bytes, num_segments, self._room.num_evicted, problem, disk_bytes, free_bytes)

    @on("scans")
    def folder_usages(self, limit: int) -> Sequence[FolderUsage]:
        """Return what each folder has, of the largest ones. Reads all of the catalog's segments."""
        return self._rows(_FOLDERS, (limit,), FolderUsage)

    @on("scans")
    def segment_usages(self, folder: str, limit: int, prefix: str = "") -> Sequence[SegmentUsage]:
        """Return the last used segments of a folder, with names that begin with ``prefix``, the last one first."""
        bounds = f"{folder}/{prefix}", f"{folder}/{prefix}\x7f", limit
        return self._rows(_SEGMENTS, bounds, _segment_usage)

    def _rows(self, query: str, values: Sequence[str | int], kind: Callable[..., T]) -> Sequence[T]:
        with files.os_errors("reading the catalog"), self._catalog.reading() as db:
            return [] if db is None else [kind(*row) for row in db.execute(query, values)]

    async def collect(self) -> None:
        """Remove old orphans, and compare the disk with the catalog.

        Writes also do this in the background, at most once every ``orphan_age_s``.
        """
        self._collected_at = time.monotonic()
        if self.root.is_dir():
            await self.workers.run("upkeep", self._collect)

    def _collect_later(self) -> None:
        if time.monotonic() > self._collected_at + self._orphan_age_s:
            self._collected_at = time.monotonic()
            self._quietly_later(self._repair.collect)

    def _collect(self) -> None:
        with files.os_errors("collecting orphans"):
            self._repair.collect()

    async def close(self) -> None:
        self.workers.is_closed = True
        await asyncio.to_thread(self._shut_down)

    def _shut_down(self) -> None:
        self._repair.stopped.set()
        self.workers.shut_down()
        self._checks.shut_down()
        if self._catalog.is_open:
            self._quietly(self._catalog.save_uses)
        self._catalog.close()
        self.owner.release()


def _is_sound(content: bytes, manifest_name: str) -> bool:
    try:
        return decode_manifest(content).key.manifest_name == manifest_name
    except FormatError:
        return False


def _segment_usage(name: str, num_pages: int, stored_bytes: int, last_used_s: float, is_pinned: int) -> SegmentUsage:
    return SegmentUsage(name, num_pages, stored_bytes, last_used_s, bool(is_pinned))


def open_store(
    url: str,
    *,
    token: Token | None = None,
    capacity_bytes: int | None = None,
    options: HttpOptions | None = None,
    s3: S3Options | None = None,
) -> AdminStore:
    """Open a directory, or create a client of another store (`stores.open_remote`). ``capacity_bytes``: for ``file://``
    stores. Raises ConfigError."""
    parts = split_store_url(url)
    if parts.scheme != "file":
        if capacity_bytes is not None:
            raise ConfigError(f"capacity_bytes is for file:// stores; {url!r} has its own limit")
        return open_remote(url, token=token, options=options, s3=s3)
    if token is not None:
        raise ConfigError(f"a token is for http:// and https:// stores; {url!r} is a directory")
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise ConfigError(f"store URL {url!r} needs an absolute path, as in file:///var/cache/kv")
    if parts.query or parts.fragment:
        raise ConfigError(f"store URL {url!r} has a query or a fragment; expected only a path")
    return LocalStore(Path(unquote(parts.path)), capacity_bytes=capacity_bytes)
