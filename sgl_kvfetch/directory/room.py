"""The room in a local store's directory: reservations, eviction of the least recently used segments, deletion.

Room is reserved before a byte is written, and only then is something evicted for it. The other way round, two writers
would both count on the same free bytes. Reserved bytes count as stored at once. So all files together stay within the
capacity, with those that are half written, or deleted but still read.

A size is only what a client says. So nothing is evicted before a write is known to be possible: an object that would
not fit into the empty store is refused, and one that is larger than a tenth of it is taken only while there is free
room. A write that has evicted a tenth of the store, and still lacks room, fails.

Eviction takes, in this order: files that nobody reads any more, old data that no manifest names, what segments can do
without (they become coarser), the least recently used segments, and pinned ones when nothing else is left. It takes a
few at a time, so that no transaction is long, and one thread does it at a time. Data without a manifest is safe for a
minute, since its writer may be about to put the manifest. All such data may take a quarter of the store: otherwise
writers that die would fill it.

A full disk is not always ours to empty. What other programs have taken beyond the reserve is never made room for: the
store would evict itself to nothing while something else fills the disk. Then writes are refused, and reads go on.

Blocking and thread-safe. Methods raise StoreError (``full`` if there is no room, ``too_large`` if there never will be)
and OSError.
"""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, TypeVar

from sgl_kvfetch.codec import MAX_MANIFEST_BYTES, coarsened, decode_manifest
from sgl_kvfetch.directory import files, notes, rows
from sgl_kvfetch.directory.catalog import Catalog, FileRole, SegmentState
from sgl_kvfetch.errors import FormatError, StoreError
from sgl_kvfetch.keys import MANIFEST_SUFFIX
from sgl_kvfetch.log import LimitedLogger
from sgl_kvfetch.stores import object_digest
from sgl_kvfetch.stores.notes import MAX_PINNED_PART
from sgl_kvfetch.stores.upkeep import LIVE_RANK_SQL, decode_named_manifest

logger = logging.getLogger(__name__)
_limited = LimitedLogger(logger)
T = TypeVar("T")

# Parts of what the empty store would hold.
PENDING_PART = 1 / 4  # most bytes of data without a manifest, unless it is a single object
_EVICTED_PART = 1 / 10  # about the most that is evicted for one write; nothing is for a larger object
# How long data without a manifest is protected from eviction: its writer may still put the manifest, and readers may
# still know the manifest that was replaced.
KEEP_PENDING_S = 60.0
_SPARE_PART = 1 / 64  # an eviction frees this part of the capacity more than needed, if that takes no more steps
_EVICTED_AT_ONCE = 8  # segments in one transaction
_DELETED_AT_ONCE = 64  # files
_WAIT_S = 30.0  # for another thread's eviction, or for the files to be counted
# The reserve, which stays free for others. Where they take more, segments are evicted for as much as the reserve a day,
# and no more: the store does not make room for whatever fills the disk.
_MIN_FREE_PART, _MIN_FREE_BYTES = 1 / 100, 1 << 30
_DAY_S = 86400.0
_PAUSE_S = 60.0  # no eviction for a full disk, after others have taken what one had freed

_OLDEST_PENDING = f"SELECT name, bytes, since FROM files WHERE role = {FileRole.PENDING:d} "
_IS_SETTLED = f"""NOT EXISTS (
    SELECT 1 FROM files WHERE segment = segments.id AND role = {FileRole.PENDING:d} AND since > ?
)"""
_LEAST_USED = f"""
SELECT name, id, pinned FROM segments WHERE state != {SegmentState.LOOSE:d} AND {_IS_SETTLED}
ORDER BY {LIVE_RANK_SQL} LIMIT ?"""  # `_delete_expired` goes before
_LEAST_USED_TO_COARSEN = f"""
SELECT name FROM segments WHERE droppable > 0 AND dropped < ? AND pinned = 0 AND {_IS_SETTLED}
ORDER BY {LIVE_RANK_SQL} LIMIT ?"""
# Not those with a new file: they may be being written again, data first.
_EXPIRED = f"""
SELECT name, id FROM segments WHERE state != {SegmentState.LOOSE:d} AND expires <= ? AND NOT EXISTS (
    SELECT 1 FROM files WHERE segment = segments.id AND since > ?
) ORDER BY expires LIMIT ?"""

_FULL = (errno.ENOSPC, errno.EDQUOT)

Doomed = tuple[str, str]  # a file to delete: its object's name, and what `files.remove_aside` needs


class NewFile:
    """Writes an object's file within its reserved room. Every method may raise StoreError and OSError."""

    def __init__(self, room: DiskRoom, name: str, num_bytes: int) -> None:
        """Create the file. ``num_bytes`` are reserved once the room knows of it."""
        self.name = name
        self.num_bytes = num_bytes
        self.temp = files.TempFile(room.root)
        self._room = room
        self._written_bytes = 0

    def write(self, data: bytes | memoryview) -> None:
        """Append ``data``; reserve more room if it needs that."""
        more = self._written_bytes + len(data) - self.num_bytes
        if more > 0:
            self._room.grow(self, more)
        self.write_at(memoryview(data), self._written_bytes)

    def write_all(self, content: bytes) -> None:
        """Write all of a small file. Nothing is evicted for it."""
        self.temp.write_at(memoryview(content), 0)
        self._written_bytes = len(content)

    def write_at(self, data: memoryview, start: int) -> None:
        """Write into the reserved room, from byte ``start`` on."""
        assert start + len(data) <= self.num_bytes
        self._written_bytes = max(self._written_bytes, start + len(data))
        self._room.retried(lambda: self.temp.write_at(data, start), len(data))

    def commit(self, db: sqlite3.Connection, index: Callable[[], None] = lambda: None) -> None:
        """Give the file its object's name, within a transaction.

        ``index`` enters a manifest into the catalog. All rows are changed first: what the catalog refuses gets no name.
        """
        rows.store_file(db, self.name, self._written_bytes)
        index()
        namespace, _, file_name = self.name.partition("/")
        self.temp.commit(namespace, file_name)
        self._room.give_back(self)

    def discard(self) -> None:
        """Remove the file unless it is committed. Idempotent."""
        try:
            self.temp.discard()
        finally:
            self._room.give_back(self)


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why a write failed. ``free_bytes``: the disk's, if it lacked room; other failures have None."""

    why: str
    free_bytes: int | None
    at_s: float  # monotonic


class DiskRoom:
    """Keeps what is on the disk within the capacity, apart from the catalog and the rest of each file's last block."""

    def __init__(
        self, catalog: Catalog, capacity_bytes: int | None, min_free_bytes: int | None, drop_levels: int = 0
    ) -> None:
        """``drop_levels``: the most that a segment loses, instead of being evicted."""
        self.num_evicted = 0  # segments
        self.counted = threading.Event()  # set unless a sweep is counting what is on the disk
        self.counted.set()
        self._catalog = catalog
        self.root = catalog.root
        self.capacity_bytes = capacity_bytes
        self._min_free_bytes = min_free_bytes
        self._drop_levels = drop_levels
        self._new_files: set[NewFile] = set()  # it changes within write transactions, or loses one
        self._read_files: dict[str, int] = {}  # deleted but still read: their names aside, and sizes
        self._evicting = threading.Lock()
        self._share_bytes = self._shared_at_s = float("-inf")  # free or ours, at most in the last day; monotonic
        self._evicts_from_s = float("-inf")  # monotonic
        self._failure: _Failure | None = None  # of the last write

    @property
    def unnamed_bytes(self) -> int:
        """Return the size of what has no name: reserved for files that are being written, or deleted but still read."""
        return self._reserved_bytes() + self._read_bytes()

    def _reserved_bytes(self) -> int:
        return sum(new.num_bytes for new in list(self._new_files))

    def _read_bytes(self) -> int:
        return sum(list(self._read_files.values()))

    def reserve(self, name: str, num_bytes: int) -> NewFile:
        """Reserve room for a new file, which is still empty; evict segments if needed."""
        return self.retried(lambda: self._reserve(name, num_bytes), num_bytes)

    def _reserve(self, name: str, num_bytes: int) -> NewFile:
        if self.capacity_bytes is not None:
            self._catalog.open()
            if not self.counted.wait(_WAIT_S):
                raise StoreError("full", "the files in the directory are still being counted", retriable=True)
        new = None
        try:
            with self._deleting() as (db, doomed):
                self._admit(db, num_bytes, 0, doomed, is_pending=not name.endswith(MANIFEST_SUFFIX))
                self._delete_expired(db, doomed)
                new = NewFile(self, name, num_bytes)
                self._new_files.add(new)
            self._make_room(num_bytes)
        except BaseException:
            if new is not None:
                new.discard()
            raise
        return new

    def give_back(self, new: NewFile) -> None:
        """Reserve nothing for a file any more: it is committed or discarded."""
        self._new_files.discard(new)

    def grow(self, new: NewFile, num_bytes: int) -> None:
        """Reserve more room for a data object that is being written."""
        with self._deleting() as (db, doomed):
            self._admit(db, num_bytes, new.num_bytes, doomed, is_pending=True)
            new.num_bytes += num_bytes
        self._make_room(num_bytes)

    def retried(self, call: Callable[[], T], num_bytes: int) -> T:
        """Make a call. While the disk is full, evict ``num_bytes`` if possible, and call again."""
        freed = 0
        while True:
            try:
                return call()
            except OSError as e:
                if e.errno not in _FULL or self._taken_bytes():
                    raise
                if freed >= max(1, num_bytes) or time.monotonic() < self._evicts_from_s:
                    self._evicts_from_s = max(self._evicts_from_s, time.monotonic() + _PAUSE_S * (freed > 0))
                    raise
                found = self._evict(max(1, num_bytes - freed))
                if not found:
                    raise
                freed += found

    @contextmanager
    def recording_failure(self) -> Iterator[None]:
        """Record if the disk or the catalog refuses a write, for `problem`. Mistakes of clients are no failures."""
        try:
            yield
        except OSError as e:
            self._fail(f"the last write failed: {e.strerror or e}", is_full=e.errno in _FULL)
            raise
        except StoreError as e:
            if e.reason == "io":
                self._fail(f"the last write failed: {e}", is_full=False)
            raise

    def _fail(self, why: str, is_full: bool) -> None:
        self._failure = _Failure(why, self._free_beside_writes() if is_full else None, time.monotonic())

    def record_written(self) -> None:
        self._failure = None

    def delete(
        self, names: Iterable[str], condition: Callable[[sqlite3.Connection, str], bool] = lambda db, name: True
    ) -> list[str]:
        """Delete objects that meet the condition, which is called in the transaction. Return those that existed."""
        with self._deleting() as (db, doomed):
            self._remove(db, (name for name in names if condition(db, name)), doomed)
        return [name for name, _ in doomed]

    def delete_unnamed(self, names: Iterable[str]) -> list[str]:
        """Delete data that no manifest names at this moment: a writer may have put one since somebody looked.

        Return the names of what existed.
        """
        return self.delete(names, lambda db, name: rows.is_unnamed(db, self.root, name))

    @contextmanager
    def _deleting(self) -> Iterator[tuple[sqlite3.Connection, list[Doomed]]]:
        """Open a transaction. Yield it with a list of files, which are deleted after it.

        They are deleted even if the transaction fails, as on a full disk: what lost its name is lost anyway.
        """
        doomed: list[Doomed] = []
        try:
            with self._catalog.writing() as db:
                yield db, doomed
        except BaseException:
            self._delete_files(doomed)
            self._forget([name for name, _ in doomed])
            raise
        self._delete_files(doomed)

    def _delete_files(self, doomed: Iterable[Doomed]) -> None:
        for name, temp in doomed:
            try:
                self._read_files[temp] = files.remove_aside(self.root, temp)
            except OSError as e:  # the directory's next owner removes it
                logger.warning("cannot delete a file of %s: %s", name, e)
            if not self._read_files.get(temp):
                self._read_files.pop(temp, None)

    def delete_read_files(self) -> int:
        """Delete files that nobody reads any more. Return how many bytes that has freed."""
        before = dict(self._read_files)
        self._delete_files((temp, temp) for temp in before)
        return sum(size for temp, size in before.items() if temp not in self._read_files)

    def _forget(self, names: Sequence[str]) -> None:
        """Forget files that are gone. A transaction that failed has brought their rows back."""
        if not names:
            return
        with self._catalog.writing() as db:
            for name in names:
                file_id = rows.stored_id(db, name)
                if file_id is not None and files.stat_object(self.root, name) is None:
                    rows.forget_file(db, file_id)

    def require_pins_fit(self, pinned_bytes: int) -> None:
        """Raise StoreError (``full``) if pinned segments take more than half of the capacity."""
        most = None if self.capacity_bytes is None else int(self.capacity_bytes * MAX_PINNED_PART)
        if most is not None and pinned_bytes > most:
            raise StoreError("full", f"pinned segments would take {pinned_bytes} bytes; the limit is {most}")

    def problem(self) -> str | None:
        """Return why nothing can be written now, or None. It agrees with what the last write found."""
        if (problem := self._catalog.write_problem()) is not None:
            return problem
        with self._catalog.reading() as db:
            totals = None if db is None else db.execute("SELECT bytes - pending_bytes FROM totals").fetchone()
        (evictable,) = totals or (0,)
        if not os.access(self.root, os.W_OK):
            return "the store's directory is not writable"
        lacking = self._lacking_on_disk(1)
        if lacking > evictable:
            return f"the disk lacks {lacking} free bytes, and nothing is left to evict"
        return self._last_failure()

    def _last_failure(self) -> str | None:
        """Return why the last write failed, or None if it did not, or a write would not fail any more.

        A disk that was full is well once it has more free bytes. Of other failures only a write can tell; if none has
        come for a while, since clients keep away from a store that is read only, a small file is written.
        """
        if (failure := self._failure) is None:
            return None
        if failure.free_bytes is not None:
            return failure.why if self._free_beside_writes() <= failure.free_bytes else None
        if time.monotonic() > failure.at_s + _PAUSE_S:
            try:
                self._catalog.try_to_write()
            except OSError as e:
                self._fail(f"the last write failed: {e.strerror or e}", is_full=False)
            else:
                self._failure = None
        return None if self._failure is None else self._failure.why

    def _admit(
        self, db: sqlite3.Connection, num_bytes: int, has_bytes: int, doomed: list[Doomed], is_pending: bool
    ) -> None:
        """Check that an object that grows by ``num_bytes`` may be made room for, before anything is deleted for it.

        Data also has to fit among the data without a manifest, of which the oldest is deleted if needed. An object that
        is larger than their part of the store has to be the only one.
        """
        if not self.counted.is_set():
            return  # what the store would hold is not known yet
        size, room = has_bytes + num_bytes, self._room_bytes(db, has_bytes)
        if size > room:
            raise StoreError("too_large", f"no room for {size} bytes in a store of {room}")
        if size > room * _EVICTED_PART:
            lacking = self._lacking_on_disk(num_bytes)
            if self.capacity_bytes is not None:
                lacking = max(lacking, self._beyond_capacity(db, self.capacity_bytes) + num_bytes)
            if lacking > 0:
                raise StoreError("too_large", f"{size} bytes would evict more than a tenth of a store of {room}")
        if not is_pending:
            return
        most = room * PENDING_PART
        (pending,) = db.execute("SELECT pending_bytes FROM totals").fetchone()
        pending += sum(new.num_bytes for new in list(self._new_files) if not new.name.endswith(MANIFEST_SUFFIX))
        others = pending - has_bytes
        surplus, before = others + size - most, inf
        if size > most:
            surplus, before = others, time.time() - KEEP_PENDING_S
        names = []
        for name, other, since in db.execute(f"{_OLDEST_PENDING} ORDER BY since LIMIT {_DELETED_AT_ONCE}").fetchall():
            if surplus <= 0 or since > before:
                break
            names.append(name)
            surplus -= other
        if surplus > 0:
            raise StoreError(
                "full",
                f"no room for {size} bytes: {others} bytes are written or wait for their manifest, of {most:.0f}",
                retriable=True,
            )
        self._remove(db, names, doomed)

    def _room_bytes(self, db: sqlite3.Connection, has_bytes: int = 0) -> int:
        """Return how many bytes an object might have, of which ``has_bytes`` are written, if everything were evicted
        but notes and unfinished files."""
        (stored,) = db.execute("SELECT bytes FROM totals").fetchone()
        room: int = self._free_bytes() + has_bytes - self._reserve_bytes() + stored
        if self.capacity_bytes is not None:
            room = min(room, self.capacity_bytes - notes.stored_bytes(self.root))
        return room

    def _make_room(self, num_bytes: int) -> None:
        """Evict until everything reserved fits, and ``num_bytes`` more fit on the disk.

        This stops when it has evicted a tenth of the store: deleting may free nothing, as where a snapshot of the disk
        keeps the files, and the store may have a smaller capacity than before.
        """
        evicted, most = 0, inf
        while self._lacking(num_bytes) > 0:
            if not self._evicting.acquire(timeout=_WAIT_S):
                raise StoreError("full", "eviction takes too long", retriable=True)
            try:
                lacking = self._lacking(num_bytes)
                if lacking > 0:
                    if most == inf:
                        with self._catalog.writing() as db:
                            most = self._room_bytes(db) * _EVICTED_PART
                    if evicted >= most:
                        why = f"{evicted} bytes were evicted, a tenth of the store, and {lacking} more are lacking"
                        raise self._no_room(f"no room for {num_bytes} bytes: {why}")
                    if not (found := self._evict(lacking)):
                        raise self._no_room(f"no room for {num_bytes} bytes: nothing to evict")
                    evicted += found
            finally:
                self._evicting.release()
        if (free := self._free_bytes()) < num_bytes:
            why = f"others took {self._taken_bytes()} bytes beyond the reserve, which nothing is evicted for"
            raise self._no_room(f"no room for {num_bytes} bytes: the disk has {free} left; {why}")

    def _no_room(self, why: str) -> StoreError:
        self._fail(why, is_full=True)
        return StoreError("full", why, retriable=True)

    def _lacking(self, num_bytes: int) -> int:
        """Return how many bytes are to be evicted for ``num_bytes`` that are reserved, and not written yet."""
        lacking = self._lacking_on_disk(num_bytes)
        if self.capacity_bytes is not None:
            with self._catalog.writing() as db:
                lacking = max(lacking, self._beyond_capacity(db, self.capacity_bytes))
        return lacking

    def _beyond_capacity(self, db: sqlite3.Connection, capacity_bytes: int) -> int:
        """Return how many bytes more are stored and reserved than the capacity has; negative if it has room."""
        used: int
        (used,) = db.execute("SELECT bytes FROM totals").fetchone()
        return used + self.unnamed_bytes + notes.stored_bytes(self.root) - capacity_bytes

    def _lacking_on_disk(self, num_bytes: int) -> int:
        return self._reserve_bytes() + num_bytes - self._free_bytes() - self._taken_bytes()

    def _taken_bytes(self) -> int:
        """Return how many bytes others took since yesterday, beyond the reserve. Nothing is evicted for those.

        The disk's free bytes and ours together change only by what others have, except while a file is being written.
        """
        with self._catalog.reading() as db:
            if db is None:
                return 0
            stored: int
            (stored,) = db.execute("SELECT bytes FROM totals").fetchone()
        ours = stored + self._read_bytes() + self._catalog.disk_bytes()
        share, now = self._free_bytes() + ours, time.monotonic()
        if share > self._share_bytes or now > self._shared_at_s + _DAY_S:
            self._share_bytes, self._shared_at_s = share, now
        return max(0, int(self._share_bytes) - share - self._reserve_bytes() - self._reserved_bytes())

    def _free_bytes(self) -> int:
        disk = os.statvfs(self.root)
        return int(disk.f_bavail * disk.f_frsize)

    def _free_beside_writes(self) -> int:
        """Return how many bytes would be free if nothing were being written."""
        return self._free_bytes() + sum(new.temp.disk_bytes() for new in list(self._new_files))

    def _reserve_bytes(self) -> int:
        if self._min_free_bytes is not None:
            return self._min_free_bytes
        disk = os.statvfs(self.root)
        return min(_MIN_FREE_BYTES, int(disk.f_blocks * disk.f_frsize * _MIN_FREE_PART))

    def _evict(self, lacking: int) -> int:
        """Delete old data without a manifest, then make a few of the least recently used segments coarser, then delete
        such segments. Return how many bytes that has freed, 0 if there was nothing.

        Pinned segments stay as fine as they are, and go when there are no others.
        """
        if num_freed := self.delete_read_files():
            return num_freed
        self._catalog.save_uses()
        lacking += int((self.capacity_bytes or 0) * _SPARE_PART)
        before = time.time() - KEEP_PENDING_S
        freed = 0
        with self._deleting() as (db, doomed):
            pending = f"{_OLDEST_PENDING} AND since <= ? ORDER BY since LIMIT {_DELETED_AT_ONCE}"
            for name, size, _ in db.execute(pending, (before,)).fetchall():
                if freed < lacking:
                    self._remove(db, [name], doomed)
                    freed += max(1, size)
        if freed < lacking and (dropped := self._coarsen_some(lacking - freed, before)):
            return freed + dropped
        with self._deleting() as (db, doomed):
            for _, segment, pinned in self._settled(db, _LEAST_USED, before):
                if freed < lacking:
                    if pinned:
                        _limited.warning("pinned", "pinned segments are evicted: nothing else is left to evict")
                    freed += max(1, self._evict_segment(db, segment, doomed))
        return freed

    def _settled(self, db: sqlite3.Connection, query: str, *values: float) -> list[tuple[Any, ...]]:
        """Return a few of the segments that a query finds, names first, but none of which a file is being written."""
        written = {rows.manifest_name(new.name) for new in list(self._new_files)}
        found = db.execute(query, (*values, _EVICTED_AT_ONCE + len(written))).fetchall()
        return [row for row in found if row[0] not in written][:_EVICTED_AT_ONCE]

    def _coarsen_some(self, lacking: int, before: float) -> int:
        """Make a few segments coarser. Return how many bytes that has freed."""
        if not self._drop_levels:
            return 0
        with self._catalog.writing() as db:
            found = self._settled(db, _LEAST_USED_TO_COARSEN, self._drop_levels, before)
        freed = 0
        for (name,) in found:
            if freed >= lacking:
                break
            try:
                dropped = self.coarsen(name)
            except (FormatError, OSError) as e:  # such as a full disk
                _limited.warning("coarser", f"cannot make {name} coarser: {e}")
                continue
            freed += sum(dropped[name] for name in self.delete_unnamed(dropped))
        return freed

    def coarsen(self, name: str) -> Mapping[str, int]:
        """Replace a manifest by the next coarser one. Return the sizes, by name, of what it does not need any more;
        nothing if there is none. Raises FormatError and OSError.

        This does not count as a use of the segment. The manifest's own bytes may exceed the capacity for a moment.
        """
        content = files.read_object(self.root, name, MAX_MANIFEST_BYTES)
        if content is None:
            return {}
        found = coarsened(decode_named_manifest(content, name), content)
        if found is None or not self._replace_manifest(name, object_digest(content), found[0]):
            return {}
        return found[1]

    def _replace_manifest(self, name: str, digest: str, content: bytes) -> bool:
        """Replace a manifest of this digest, without counting that as a use. Return whether it was there."""
        manifest = decode_manifest(content)
        new = NewFile(self, name, len(content))
        try:
            new.write_all(content)
            new.temp.sync()
            with self._catalog.writing() as db:
                found = db.execute("SELECT digest, last_used FROM segments WHERE name = ?", (name,)).fetchone()
                if found is None or found[0] != digest:
                    return False
                new.commit(db, partial(rows.index_segment, db, manifest, content))
                db.execute("UPDATE segments SET last_used = ? WHERE name = ?", (found[1], name))
            return True
        finally:
            new.discard()

    def _delete_expired(self, db: sqlite3.Connection, doomed: list[Doomed]) -> None:
        """Delete expired segments, a few. Each write does this, so that none lasts long."""
        now = time.time()
        for _, segment in self._settled(db, _EXPIRED, now, now - KEEP_PENDING_S):
            self._evict_segment(db, segment, doomed)

    def _evict_segment(self, db: sqlite3.Connection, segment: int, doomed: list[Doomed]) -> int:
        """Evict a segment, its manifest first. Return its bytes."""
        query = "SELECT name, bytes FROM files WHERE segment = ? ORDER BY role"
        stored = db.execute(query, (segment,)).fetchall()
        self._remove(db, [name for name, _ in stored], doomed)
        self.num_evicted += 1
        return sum(size for _, size in stored)

    def _remove(self, db: sqlite3.Connection, names: Iterable[str], doomed: list[Doomed]) -> None:
        for name in names:
            temp = rows.remove_object(db, self.root, name)
            if temp is not None:
                doomed.append((name, temp))
