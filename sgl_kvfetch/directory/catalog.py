"""The catalog of a local store: an SQLite database of its files, segments and pages.

One process owns the directory (`owner`); it may be killed at any moment, and the power may fail. The files are the
truth, and everything here can be made anew from them (`repair`). The catalog says what is where and how much room is
taken, without a scan:

* A row is there for each file with an object's name. What is being written is no row: its room is reserved in the
  owner's memory (`room`), and its file has no object's name (`files.UNFINISHED`), so that the next owner deletes it.
* An object gets or loses its name only within a write transaction, which excludes all others. In it, rows are changed
  first: what the catalog refuses gets no name.
* Data is named first and the manifest last; an eviction goes the other way. So a crash leaves data without a manifest
  at worst, which is deleted when it is old.
* A crash undoes the transaction that it meets, though not the names that it has changed, and a power cut may lose the
  last transactions: `repair.collect` compares both in small steps.
* What the catalog says is compared with the bytes when they are read. A database that is missing, damaged or of another
  version is discarded: moved aside with its log, which must never meet another database.

Lookups read snapshots, which no writer delays. Writers wait for each other, for 5 s at most, so transactions are short:
files are unlinked after them, and never within.

The page index finds the stored segment that continues a run of pages furthest, within a transaction (`stores.base`
explains the search).
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from math import inf
from pathlib import Path

import xxhash

from sgl_kvfetch.directory import files, notes
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.keys import PAGE_HASH_BYTES, split_hashes
from sgl_kvfetch.stores.base import furthest

logger = logging.getLogger(__name__)

FOLDER = ".catalog"  # no namespace is called like this
_BUSY_S = 5.0  # how long a write waits for others; lookups never wait
_WAITS = 50  # a write's wait is so many short ones: while the machine stands still, one passes, and not all
_VERSION = 8
_USES_AT_ONCE = 256
_BLOCK_BYTES = 4096
_MAX_LOG_BYTES = 64 << 20  # the write-ahead log is cut to this after it has grown


class FileRole(IntEnum):
    MANIFEST = 0
    NAMED = 1  # data that a manifest names
    PENDING = 2  # data that no manifest names: not yet, or not any more


class SegmentState(IntEnum):
    LOOSE = 0  # it has no manifest
    UNREAD = 1  # its manifest is to be read
    INCOMPLETE = 2  # it lacks some of its data
    UNREADABLE = 3  # its manifest is corrupt, or of another version
    FOUND = 4  # by lookups


_SCHEMA = """
CREATE TABLE segments (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,    -- its manifest's
    state INTEGER NOT NULL,
    digest TEXT,                  -- object_digest of the manifest, if FOUND
    last_used REAL NOT NULL,      -- seconds since the epoch
    pinned INTEGER NOT NULL DEFAULT 0,
    expires REAL,                 -- its manifest's: seconds since the epoch; NULL for never
    droppable INTEGER NOT NULL DEFAULT 0,  -- how many times it may be made coarser
    dropped INTEGER NOT NULL DEFAULT 0  -- how many times it was
);
CREATE INDEX segments_by_state ON segments (state);
CREATE INDEX segments_by_use ON segments (pinned, last_used) WHERE state != 0;
CREATE INDEX segments_to_coarsen ON segments (last_used) WHERE droppable > 0;
CREATE INDEX segments_by_expiry ON segments (expires) WHERE expires IS NOT NULL;

CREATE TABLE files (
    id INTEGER PRIMARY KEY AUTOINCREMENT,  -- another file of the name has another one
    name TEXT NOT NULL UNIQUE,    -- the object's
    segment INTEGER NOT NULL,
    bytes INTEGER NOT NULL,
    role INTEGER NOT NULL,
    since REAL NOT NULL           -- when it came into this role, in seconds since the epoch
);
CREATE INDEX files_by_segment ON files (segment);
CREATE INDEX files_pending ON files (since) WHERE role = 2;

-- The pages of segments that are FOUND. The key is a digest of namespace and page hash: half the size, and a collision
-- only hides a page, since lookups compare whole hashes, those in chains.
CREATE TABLE pages (
    key BLOB NOT NULL, first_page INTEGER NOT NULL, segment INTEGER NOT NULL,
    PRIMARY KEY (key, first_page, segment)
) WITHOUT ROWID;
CREATE TABLE chains (
    segment INTEGER PRIMARY KEY, first_page INTEGER NOT NULL, hashes BLOB NOT NULL
);

CREATE TABLE pinned_pages (page_hash BLOB NOT NULL, pin TEXT NOT NULL, PRIMARY KEY (page_hash, pin)) WITHOUT ROWID;

-- One row. is_counted: all files on the disk have their rows.
CREATE TABLE totals (bytes INTEGER NOT NULL, pending_bytes INTEGER NOT NULL, is_counted INTEGER NOT NULL);
CREATE TRIGGER files_inserted AFTER INSERT ON files BEGIN
    UPDATE totals SET bytes = bytes + new.bytes, pending_bytes = pending_bytes + new.bytes * (new.role = 2);
END;
CREATE TRIGGER files_deleted AFTER DELETE ON files BEGIN
    UPDATE totals SET bytes = bytes - old.bytes, pending_bytes = pending_bytes - old.bytes * (old.role = 2);
END;
CREATE TRIGGER files_updated AFTER UPDATE OF bytes, role ON files BEGIN
    UPDATE totals SET bytes = bytes + new.bytes - old.bytes,
        pending_bytes = pending_bytes + new.bytes * (new.role = 2) - old.bytes * (old.role = 2);
END;
"""


class Catalog:
    """Connections to the database: one to write, one for each thread that looks up. Blocking and thread-safe.

    All methods raise StoreError, and OSError, which is ENOSPC if the disk is full.
    """

    def __init__(
        self, root: Path, on_uncounted: Callable[[], None], on_root: Callable[[], None] = lambda: None
    ) -> None:
        """``on_uncounted`` is called when the opened database lacks rows of files on the disk, ``on_root`` once there
        is a directory for it."""
        self._on_root = on_root
        self.root = root
        self._on_uncounted = on_uncounted
        self._path = root / FOLDER / "catalog.sqlite"
        self._writer_lock = threading.Lock()
        self._local = threading.local()
        self._generation = 0  # of the database: how many were discarded
        self._writer: tuple[int, sqlite3.Connection | None] = 0, None  # with its generation, as each reader
        self._write_error: str | None = None
        self._is_checked = False
        self._readers: list[sqlite3.Connection] = []
        self._uses: dict[str, float] = {}  # of segments since they were last saved
        self._saving = threading.Lock()  # of uses: who saves some waits for those that another thread has begun to save

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Open a transaction, which excludes all others. Keep it short."""
        if not any(self._writer_lock.acquire(timeout=_BUSY_S / _WAITS) for _ in range(_WAITS)):
            self._write_error = "the catalog is locked: other writes take too long"
            raise StoreError("io", self._write_error, retriable=True)
        try:
            with self._errors():
                db = self._begin()
                try:
                    yield db
                    db.execute("COMMIT")
                finally:
                    if db.in_transaction:
                        db.execute("ROLLBACK")
        finally:
            self._writer_lock.release()

    def _begin(self) -> sqlite3.Connection:
        try:
            with files.os_errors("opening the catalog"), self._errors():
                db = self._open_writer()
                db.execute("BEGIN IMMEDIATE")
        except StoreError as e:
            self._write_error = str(e)
            self._close_writer()  # the directory may be writable by the next time
            raise
        self._write_error = None
        return db

    def write_problem(self) -> str | None:
        """Return why no transaction can be opened, or None.

        Never waits. While others write, the answer is the one from before.
        """
        if self._writer_lock.acquire(blocking=False):
            try:
                with suppress(StoreError):
                    self._begin().execute("ROLLBACK")
            finally:
                self._writer_lock.release()
        return self._write_error

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection | None]:
        """Open a snapshot for lookups, which no writer delays. Yield None if there is no catalog."""
        with self._errors():
            generation, db, is_frozen = getattr(self._local, "reader", (0, None, False))
            if db is None or generation != self._generation or (is_frozen and self._writer[1] is not None):
                generation, db = self._generation, None
                with suppress(FileNotFoundError, NotADirectoryError):
                    db, is_frozen = self._connect_reader()
                    self._local.reader = generation, db, is_frozen
                    self._readers.append(db)
            if db is None:
                yield None
                return
            db.execute("BEGIN")
            try:
                yield db
            finally:
                if db.in_transaction:  # not after some errors
                    db.execute("ROLLBACK")

    @property
    def exists(self) -> bool:
        return self._path.exists()

    @property
    def is_open(self) -> bool:
        return self._writer[1] is not None or bool(self._readers)

    def open(self) -> None:
        """Create the catalog if it is missing or unusable."""
        with self.writing():
            pass

    def record_use(self, segments: Iterable[str]) -> None:
        """Record that segments are used now. ``save_uses`` writes that to the catalog."""
        self._uses.update(dict.fromkeys(segments, time.time()))

    def save_uses(self) -> None:
        """Write the recorded access times to the catalog. The order of eviction depends on them."""
        with self._saving:
            while self._uses:
                with self.writing() as db:
                    some = [self._uses.popitem() for _ in range(min(_USES_AT_ONCE, len(self._uses)))]
                    db.executemany("UPDATE segments SET last_used = max(last_used, ?2) WHERE name = ?1", some)

    def disk_bytes(self) -> int:
        """Return the size of the database's files."""
        num_bytes = 0
        for suffix in ("", "-wal", "-shm"):
            with suppress(FileNotFoundError):
                num_bytes += os.stat(f"{self._path}{suffix}").st_size
        return num_bytes

    def discard(self) -> None:
        """Remove the database. The next use creates it anew."""
        logger.warning("the catalog %s is removed, and will be rebuilt", self._path)
        aside = self.root / f"{FOLDER}-old"
        shutil.rmtree(aside, ignore_errors=True)  # of a process that was killed here
        self._generation += 1
        with suppress(FileNotFoundError):
            os.rename(self.root / FOLDER, aside)  # with its log, which must never meet another database
        shutil.rmtree(aside, ignore_errors=True)

    def close(self) -> None:
        """Close all connections. No other thread may still use them."""
        self._close_writer()
        for db in self._readers:
            db.close()
        self._readers.clear()
        self._local = threading.local()

    def _close_writer(self) -> None:
        if self._writer[1] is not None:
            self._writer[1].close()
        self._writer = 0, None

    def _open_writer(self) -> sqlite3.Connection:
        """Return the connection that writes. Make it anew if the database was discarded, and the database if it is
        missing or damaged."""
        generation, db = self._writer
        if db is not None and generation == self._generation:
            return db
        self._close_writer()
        try:
            db = self._connect()
            self._require_sound(db)
        except FileNotFoundError:
            self._create()
            db = self._connect()
        except sqlite3.DatabaseError as e:
            if isinstance(e, sqlite3.OperationalError):
                raise  # it cannot be opened now, which says nothing about its content
            self.discard()
            self._create()
            db = self._connect()
        if db.execute("SELECT is_counted FROM totals").fetchone() == (0,):
            self._on_uncounted()
        self._writer = self._generation, db
        return db

    def _require_sound(self, db: sqlite3.Connection) -> None:
        """Close a connection, and raise sqlite3.DatabaseError, if the database is another version's or damaged. All of
        it is read, once: SQLite itself finds damage only in what it comes across."""
        try:
            if db.execute("PRAGMA user_version").fetchone() != (_VERSION,):
                raise sqlite3.DatabaseError("another version's")
            if not self._is_checked and db.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
                raise sqlite3.DatabaseError("damaged")
            totals = db.execute("SELECT * FROM totals").fetchone()
            if totals is None or None in totals:
                raise sqlite3.DatabaseError("without totals")
        except sqlite3.Error:
            db.close()
            raise
        self._is_checked = True

    def _connect_reader(self) -> tuple[sqlite3.Connection, bool]:
        """Connect for lookups. A full disk has no room for SQLite's shared memory: then nobody writes, and the log, if
        it is empty, has nothing that the database lacks. Return whether that holds: the connection sees no writes.
        Raises as `_connect` does."""
        try:
            return self._connect(), False
        except sqlite3.OperationalError:
            log = Path(f"{self._path}-wal")
            if self._writer[1] is not None or (log.exists() and log.stat().st_size):
                raise
            return self._connect("ro&immutable=1"), True

    def _connect(self, mode: str = "") -> sqlite3.Connection:
        """Connect to the database. Raises FileNotFoundError if there is none: SQLite would make an empty one."""
        if not self._path.exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._path))
        # Without writing, SQLite cannot make its shared memory; if a killed owner has not left it, none is needed.
        is_shared = os.path.exists(f"{self._path}-shm")
        mode = mode or ("rw" if os.access(self._path, os.W_OK) else "ro" if is_shared else "ro&immutable=1")
        uri = f"{self._path.absolute().as_uri()}?mode={mode}"
        db = sqlite3.connect(uri, uri=True, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute(f"PRAGMA journal_size_limit = {_MAX_LOG_BYTES}")
        return db

    def _create(self) -> None:
        """Create the database under another name, so that no lookup opens it before it is complete."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._on_root()
        is_empty = not files.namespaces(self.root)
        new = self.root / f"{FOLDER}-new"
        shutil.rmtree(new, ignore_errors=True)  # of a process that was killed here
        new.mkdir(mode=0o700)
        try:
            path = new / self._path.name
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            db = sqlite3.connect(path, isolation_level=None)
            try:
                if db.execute("PRAGMA journal_mode = WAL").fetchone() != ("wal",):
                    raise sqlite3.OperationalError("the file system does not support SQLite's write-ahead log")
                db.executescript(f"BEGIN; {_SCHEMA}; PRAGMA user_version = {_VERSION}; COMMIT;")
                db.execute("INSERT INTO totals VALUES (0, 0, ?)", (is_empty,))
                notes.enter_all_pins(db, self.root)
            finally:
                db.close()
            os.rename(new, self.root / FOLDER)
        finally:
            shutil.rmtree(new, ignore_errors=True)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as e:
            code = getattr(e, "sqlite_errorcode", 0) & 0xFF
            if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                self.discard()
            if code == sqlite3.SQLITE_FULL:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path)) from e
            if code == sqlite3.SQLITE_IOERR:
                self.try_to_write()
            busy = code == sqlite3.SQLITE_BUSY
            hint = "" if busy else "; on a network file system, run `kvfetch serve` on the disk's machine instead"
            raise StoreError("io", f"the catalog cannot be used: {e}{hint}", retriable=busy) from e

    def try_to_write(self) -> None:
        """Write as far as the log reaches, beside it. Raises the system's OSError, which SQLite does not pass on."""
        with suppress(FileNotFoundError):
            size = os.stat(f"{self._path}-wal").st_size
            with tempfile.TemporaryFile(dir=self._path.parent) as file:
                os.pwrite(file.fileno(), bytes(_BLOCK_BYTES), size)
                os.fsync(file.fileno())


_EARLIEST = """
SELECT first_page, segment FROM pages CROSS JOIN segments ON id = segment
WHERE key = ? AND (expires IS NULL OR expires > ?) ORDER BY first_page, segment LIMIT 1"""
_SEGMENT = """
SELECT name, digest, hashes, (SELECT bytes FROM files WHERE files.name = segments.name)
FROM segments JOIN chains ON segment = id WHERE id = ?"""
_HIT_BYTES = 512  # at least what one hit takes beside its manifest


@dataclass(frozen=True, slots=True)
class IndexHit:
    """A segment that covers some of the looked-up pages. See ``SegmentHit`` for the last two fields."""

    manifest_name: str
    digest: str  # object_digest of the manifest
    num_bytes: int  # the manifest's
    first_page: int
    num_pages: int


def page_rows(namespace: str, segment: int, first_page: int, hashes: bytes) -> list[tuple[bytes, int, int]]:
    """Return the rows of a segment's pages, in the table's order. Pages whose keys collide share a row."""
    keys = {page_key(namespace, page_hash) for page_hash in split_hashes(hashes)}
    return [(key, first_page, segment) for key in sorted(keys)]


def page_key(namespace: str, page_hash: bytes) -> bytes:
    return xxhash.xxh3_128_digest(namespace.encode() + page_hash)


def find_pages(
    db: sqlite3.Connection, namespace: str, page_hashes: Sequence[bytes], most_bytes: float = inf
) -> list[IndexHit]:
    """Find the longest run of stored pages that starts with ``page_hashes[0]``. See ``Store.lookup``.

    The run ends early where an answer with its manifests would take more than ``most_bytes``.
    """
    now = time.time()

    @cache
    def earliest(page: int) -> tuple[int, int] | None:
        """Return position and identifier of the segment that starts earliest of those with this page."""
        row: tuple[int, int] | None = db.execute(_EARLIEST, (page_key(namespace, page_hashes[page]), now)).fetchone()
        return row

    if not page_hashes or (first := earliest(0)) is None:
        return []
    (_, _, hashes, _) = db.execute(_SEGMENT, (first[1],)).fetchone()
    held = split_hashes(hashes)
    if page_hashes[0] not in held:
        return []  # another page has the same key
    origin = first[0] + held.index(page_hashes[0])  # position in the sequence of the first page
    hits = []
    page = 0
    while reached := furthest(earliest, page, len(page_hashes), origin + page):
        end, first_page, segment = reached
        name, digest, hashes, num_bytes = db.execute(_SEGMENT, (segment,)).fetchone()
        most_bytes -= num_bytes + _HIT_BYTES
        skipped = origin + page - first_page
        # Manifests are not trusted: one with false page hashes may hide pages, but never adds wrong ones.
        count = _matching(hashes, skipped, page_hashes[page:end])
        if count == 0 or most_bytes < 0:
            break
        hits.append(IndexHit(name, digest, num_bytes, skipped, count))
        page += count
    return hits


def _matching(hashes: bytes, first: int, page_hashes: Sequence[bytes]) -> int:
    """Count how many of ``page_hashes`` a segment with these ``hashes`` holds in a row, from its page ``first`` on."""
    start = first * PAGE_HASH_BYTES
    if hashes.startswith(b"".join(page_hashes), start):
        return len(page_hashes)
    count = 0
    while hashes.startswith(page_hashes[count], start + count * PAGE_HASH_BYTES):
        count += 1
    return count
