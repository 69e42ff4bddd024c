"""The room in a local store's directory: reservations, eviction of the least recently used segments, deletion.

Room is reserved before a byte is written, and only then is something evicted for it. The other way round, two writers
would both count on the same free bytes. Reserved bytes count as stored at once. So all files together stay within the
capacity, with those that are half written, or deleted but still read.

A size is only what a client says. So nothing is evicted before a write is known to be possible: an object that would
not fit into the empty store is refused, and one that is larger than a tenth of it is taken only while there is free
room. A write that has evicted a tenth of the store, and still lacks room, fails.

Eviction takes, in this order: files that nobody reads any more, old data that no manifest names, what segments can do
without (they become coarser), the least recently used segments, and pinned ones when nothing else is left. It takes a
few at a time, so that no transaction is long, and one thread of a process does it at a time. Data without a manifest is
safe for a minute, since its writer may be about to put the manifest. All such data may take a quarter of the store:
otherwise writers that die would fill it.

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
from typing import TypeVar

from sgl_kvfetch.codec import MAX_MANIFEST_BYTES, coarsened, decode_manifest
from sgl_kvfetch.directory import files, notes, rows
from sgl_kvfetch.directory.catalog import Catalog, FileRole, FileState, SegmentState, temp_name
from sgl_kvfetch.errors import FormatError, StoreError
from sgl_kvfetch.keys import MANIFEST_SUFFIX
from sgl_kvfetch.log import LimitedLogger, one_line
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

_OLDEST_PENDING = (
    f"SELECT name, bytes, since FROM files WHERE role = {FileRole.PENDING:d} AND state = {FileState.STORED:d} "
)
_IS_SETTLED = f"""NOT EXISTS (
    SELECT 1 FROM files WHERE segment = segments.id
    AND (files.state = {FileState.WRITING:d} OR role = {FileRole.PENDING:d} AND since > ?)
)"""
_LEAST_USED = f"""
SELECT id, pinned FROM segments WHERE state != {SegmentState.LOOSE:d} AND {_IS_SETTLED}
ORDER BY {LIVE_RANK_SQL} LIMIT {_EVICTED_AT_ONCE}"""  # `_delete_expired` goes before
_LEAST_USED_TO_COARSEN = f"""
SELECT name FROM segments WHERE droppable > 0 AND dropped < ? AND pinned = 0 AND {_IS_SETTLED}
ORDER BY {LIVE_RANK_SQL} LIMIT {_EVICTED_AT_ONCE}"""
_SET_LAST_USED = "UPDATE segments SET last_used = ? WHERE name = ?"
# Not those with a new file: they may be being written again, data first.
_EXPIRED = f"""
SELECT id FROM segments WHERE state != {SegmentState.LOOSE:d} AND expires <= ? AND NOT EXISTS (
    SELECT 1 FROM files WHERE segment = segments.id AND (files.state = {FileState.WRITING:d} OR since > ?)
) ORDER BY expires LIMIT {_EVICTED_AT_ONCE}"""

_FULL = (errno.ENOSPC, errno.EDQUOT)

Doomed = tuple[int, str]  # a file to delete: its identifier and its object's name


def name_file(
    db: sqlite3.Connection,
    temp: files.TempFile,
    file_id: int,
    name: str,
    num_bytes: int,
    index: Callable[[], None] = lambda: None,
) -> list[Doomed]:
    """Give a written file its object's name. Return the file that had it, to be deleted after the transaction.

    ``index`` enters a manifest into the catalog. All rows are changed first: what the catalog refuses gets no name.
    """
    replaced = rows.stored_id(db, name)
    rows.store_file(db, file_id, name, num_bytes, replaced)
    index()
    temp.commit(name.partition("/")[2], None if replaced is None else temp_name(replaced))
    return [] if replaced is None else [(replaced, name)]


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
        self.capacity_bytes = capacity_bytes
        self._min_free_bytes = min_free_bytes
        self._drop_levels = drop_levels
        self._evicting = threading.Lock()
        self._share_bytes = self._shared_at_s = float("-inf")  # free or ours, at most in the last day; monotonic
        self._evicts_from_s = float("-inf")  # monotonic
        self._failure: _Failure | None = None  # of the last write

    def reserve(self, name: str, num_bytes: int) -> tuple[int, files.TempFile]:
        """Reserve room for a new file; evict segments if needed. Return its identifier and the file, still empty."""
        return self.retried(lambda: self._reserve(name, num_bytes), num_bytes)

    def _reserve(self, name: str, num_bytes: int) -> tuple[int, files.TempFile]:
        if self.capacity_bytes is not None:
            self._catalog.open()
            if not self.counted.wait(_WAIT_S):
                raise StoreError("full", "the files in the directory are still being counted", retriable=True)
        temp = None
        try:
            with self._deleting() as (db, doomed):
                self._admit(db, num_bytes, 0, doomed, is_pending=not name.endswith(MANIFEST_SUFFIX))
                self._delete_expired(db, doomed)
                file_id, temp = self._new_file(db, name, num_bytes)
            self._make_room(num_bytes)
        except BaseException:
            if temp is not None:
                temp.discard()
                self.forget_file(file_id)
            raise
        return file_id, temp

    def _new_file(self, db: sqlite3.Connection, name: str, num_bytes: int) -> tuple[int, files.TempFile]:
        """Add a file's row, and create the file.

        A process that was killed between this and the end of its transaction leaves the file without a row: then the
        database gives the identifier out again, and the next one is taken. A sweep removes the file.
        """
        while True:
            file_id = rows.add_file(db, name, num_bytes, FileState.WRITING)
            try:
                return file_id, files.TempFile(self._catalog.root, name.partition("/")[0], temp_name(file_id))
            except FileExistsError:
                rows.forget_file(db, file_id)

    def grow(self, file_id: int, has_bytes: int, num_bytes: int) -> None:
        """Reserve more room for a data object that is being written."""
        with self._deleting() as (db, doomed):
            self._admit(db, num_bytes, has_bytes, doomed, is_pending=True)
            db.execute("UPDATE files SET bytes = bytes + ? WHERE id = ?", (num_bytes, file_id))
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
    def noting_failure(self) -> Iterator[None]:
        """Note whether the disk or the catalog refuses a write, for `problem`. Mistakes of clients are no failures."""
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
        self._failure = _Failure(why, self._free_bytes() if is_full else None, time.monotonic())

    def note_written(self) -> None:
        self._failure = None

    def forget_file(self, file_id: int) -> None:
        """Remove the row of a file that is gone."""
        with self._catalog.writing() as db:
            rows.forget_file(db, file_id)

    def delete(
        self, names: Iterable[str], condition: Callable[[sqlite3.Connection, str], bool] = lambda db, name: True
    ) -> list[str]:
        """Delete objects that meet the condition, which is called in the transaction. Return those that existed."""
        with self._deleting() as (db, doomed):
            self._remove(db, (name for name in names if condition(db, name)), doomed)
        return [name for _, name in doomed]

    def delete_unnamed(self, names: Iterable[str]) -> list[str]:
        """Delete data that no manifest names at this moment: a writer may have put one since somebody looked.

        Return the names of what existed.
        """
        return self.delete(names, lambda db, name: rows.is_unnamed(db, self._catalog.root, name))

    @contextmanager
    def _deleting(self) -> Iterator[tuple[sqlite3.Connection, list[Doomed]]]:
        """Open a transaction. Yield it with a list of files, which are deleted after it.

        They are deleted even if the transaction fails, as on a full disk: what lost its name is lost anyway.
        """
        doomed: list[Doomed] = []
        try:
            with self._catalog.writing() as db:
                yield db, doomed
        finally:
            self.delete_files(doomed)

    def delete_files(self, doomed: Sequence[Doomed]) -> int:
        """Delete files that have lost their names, except those that somebody reads. Return how many were deleted."""
        gone = [file_id for file_id, name in doomed if self._delete_file(file_id, name)]
        if gone:
            with self._catalog.writing() as db:
                for file_id in gone:
                    rows.forget_file(db, file_id)
        return len(gone)

    def delete_leftovers(self) -> int:
        """Delete files that somebody was reading, or whose deletion was cut short. Return how many were deleted."""
        last = count = 0
        query = f"SELECT id, name FROM files WHERE state = {FileState.DELETING:d} AND id > ? ORDER BY id LIMIT ?"
        while True:
            with self._catalog.writing() as db:
                some = db.execute(query, (last, _DELETED_AT_ONCE)).fetchall()
            if not some:
                return count
            count += self.delete_files(some)
            last = some[-1][0]

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
        if not os.access(self._catalog.root, os.W_OK):
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
            return failure.why if self._free_bytes() <= failure.free_bytes else None
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
        room: int = self._free_bytes() + has_bytes - self._reserve_bytes() + stored - self._unfinished_bytes(db)
        if self.capacity_bytes is not None:
            room = min(room, self.capacity_bytes - notes.stored_bytes(self._catalog.root))
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
        return used + notes.stored_bytes(self._catalog.root) - capacity_bytes

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
            written = self._unfinished_bytes(db)
        share, now = self._free_bytes() + stored - written + self._catalog.disk_bytes(), time.monotonic()
        if share > self._share_bytes or now > self._shared_at_s + _DAY_S:
            self._share_bytes, self._shared_at_s = share, now
        return max(0, int(self._share_bytes) - share - self._reserve_bytes() - written)

    @staticmethod
    def _unfinished_bytes(db: sqlite3.Connection) -> int:
        """Return how many bytes are reserved for files that are being written."""
        num_bytes: int
        unfinished = f"SELECT coalesce(sum(bytes), 0) FROM files WHERE state = {FileState.WRITING:d}"
        (num_bytes,) = db.execute(unfinished).fetchone()
        return num_bytes

    def _free_bytes(self) -> int:
        disk = os.statvfs(self._catalog.root)
        return int(disk.f_bavail * disk.f_frsize)

    def _reserve_bytes(self) -> int:
        if self._min_free_bytes is not None:
            return self._min_free_bytes
        disk = os.statvfs(self._catalog.root)
        return min(_MIN_FREE_BYTES, int(disk.f_blocks * disk.f_frsize * _MIN_FREE_PART))

    def _evict(self, lacking: int) -> int:
        """Delete old data without a manifest, then make a few of the least recently used segments coarser, then delete
        such segments. Return how many bytes that has freed, 0 if there was nothing.

        Pinned segments stay as fine as they are, and go when there are no others.
        """
        if num_left := self.delete_leftovers():
            return num_left
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
            for segment, pinned in db.execute(_LEAST_USED, (before,)).fetchall():
                if freed < lacking:
                    if pinned:
                        _limited.warning("pinned", "pinned segments are evicted: nothing else is left to evict")
                    freed += max(1, self._evict_segment(db, segment, doomed))
        return freed

    def _coarsen_some(self, lacking: int, before: float) -> int:
        """Make a few segments coarser. Return how many bytes that has freed."""
        if not self._drop_levels:
            return 0
        with self._catalog.writing() as db:
            found = db.execute(_LEAST_USED_TO_COARSEN, (self._drop_levels, before)).fetchall()
        freed = 0
        for (name,) in found:
            if freed >= lacking:
                break
            try:
                dropped = self.coarsen(name)
            except (FormatError, OSError) as e:  # such as a full disk
                logger.warning("cannot make %s coarser: %s", name, one_line(e))
                continue
            freed += sum(dropped[name] for name in self.delete_unnamed(dropped))
        return freed

    def coarsen(self, name: str) -> Mapping[str, int]:
        """Replace a manifest by the next coarser one. Return the sizes, by name, of what it does not need any more;
        nothing if there is none. Raises FormatError and OSError.

        This does not count as a use of the segment. The manifest's own bytes may exceed the capacity for a moment.
        """
        content = files.read_object(self._catalog.root, name, MAX_MANIFEST_BYTES)
        if content is None:
            return {}
        found = coarsened(decode_named_manifest(content, name), content)
        if found is None or not self._replace_manifest(name, object_digest(content), found[0]):
            return {}
        return found[1]

    def _replace_manifest(self, name: str, digest: str, content: bytes) -> bool:
        """Replace a manifest of this digest, without counting that as a use. Return whether it was there."""
        manifest = decode_manifest(content)
        temp = None
        try:
            with self._catalog.writing() as db:
                found = db.execute("SELECT digest, last_used FROM segments WHERE name = ?", (name,)).fetchone()
                if found is None or found[0] != digest:
                    return False
                file_id, temp = self._new_file(db, name, len(content))
                db.execute(_SET_LAST_USED, (found[1], name))
            rest = memoryview(content)
            while rest:
                rest = rest[temp.write(rest) :]
            temp.sync()
            with self._deleting() as (db, doomed):
                if db.execute("SELECT digest FROM segments WHERE name = ?", (name,)).fetchone() != (digest,):
                    return False
                index = partial(rows.index_segment, db, manifest, content)
                doomed += name_file(db, temp, file_id, name, len(content), index)
                db.execute(_SET_LAST_USED, (found[1], name))
            return True
        finally:
            if temp is not None and temp.is_open:
                temp.discard()
                self.forget_file(file_id)

    def _delete_expired(self, db: sqlite3.Connection, doomed: list[Doomed]) -> None:
        """Delete expired segments, a few. Each write does this, so that none lasts long."""
        now = time.time()
        for (segment,) in db.execute(_EXPIRED, (now, now - KEEP_PENDING_S)).fetchall():
            self._evict_segment(db, segment, doomed)

    def _evict_segment(self, db: sqlite3.Connection, segment: int, doomed: list[Doomed]) -> int:
        """Evict a segment, its manifest first. Return its bytes."""
        query = "SELECT name, bytes FROM files WHERE segment = ? AND state = ? ORDER BY role"
        stored = db.execute(query, (segment, FileState.STORED)).fetchall()
        self._remove(db, [name for name, _ in stored], doomed)
        if not stored:  # or this segment would be the next one to evict for ever
            rows.hide_segment(db, segment, SegmentState.LOOSE)
        self.num_evicted += 1
        return sum(size for _, size in stored)

    def _remove(self, db: sqlite3.Connection, names: Iterable[str], doomed: list[Doomed]) -> None:
        for name in names:
            file_id = rows.remove_object(db, self._catalog.root, name)
            if file_id is not None:
                doomed.append((file_id, name))

    def _delete_file(self, file_id: int, name: str) -> bool:
        try:
            return files.remove_temp(self._catalog.root, name.partition("/")[0], temp_name(file_id))
        except OSError as e:
            logger.warning("cannot delete a file of %s: %s", name, e)
            return False
