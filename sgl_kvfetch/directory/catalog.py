"""The catalog of a local store: an SQLite database of its files, segments and pages.

It is a superset of the disk: a row with the file's size is there before the first byte is written, and until the file
is unlinked. Names change only within a write transaction. So processes that share a directory agree at any time, and a
process that is killed leaves nothing uncounted. All of it can be rebuilt from the files (``repair``).
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from pathlib import Path

from sgl_kvfetch.directory import files, local_pins
from sgl_kvfetch.errors import StoreError

logger = logging.getLogger(__name__)

FOLDER = ".catalog"  # no namespace is called like this
BUSY_S = 5.0  # how long a write waits for others; lookups never wait
_VERSION = 5
_USES_AT_ONCE = 256
_MAX_LOG_BYTES = 64 << 20  # the write-ahead log is cut to this after it has grown


class FileState(IntEnum):
    WRITING = 0  # at `temp_name(id)`
    STORED = 1  # at its object's name
    DELETING = 2  # at `temp_name(id)`; it is deleted as soon as nobody reads it


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
    expires REAL                  -- its manifest's: seconds since the epoch; NULL for never
);
CREATE INDEX segments_by_state ON segments (state);
CREATE INDEX segments_by_use ON segments (pinned, last_used) WHERE state != 0;
CREATE INDEX segments_by_expiry ON segments (expires) WHERE expires IS NOT NULL;

CREATE TABLE files (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL,           -- the object's
    segment INTEGER,              -- NULL while it is DELETING
    bytes INTEGER NOT NULL,       -- its size, or what is reserved for it
    state INTEGER NOT NULL,
    role INTEGER NOT NULL,
    since REAL NOT NULL           -- when it came into this state and role, in seconds since the epoch
);
CREATE UNIQUE INDEX files_stored ON files (name) WHERE state = 1;
CREATE INDEX files_writing ON files (id) WHERE state = 0;
CREATE INDEX files_deleting ON files (id) WHERE state = 2;
CREATE INDEX files_by_segment ON files (segment) WHERE segment IS NOT NULL;
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


def temp_name(file_id: int) -> str:
    return f"{files.TEMP_PREFIX}{file_id}"


class Catalog:
    """Connections to the database: one to write, one for each thread that looks up. Blocking and thread-safe.

    All methods raise StoreError, and OSError, which is ENOSPC if the disk is full.
    """

    def __init__(self, root: Path, on_uncounted: Callable[[], None]) -> None:
        """``on_uncounted`` is called when the opened database lacks rows of files on the disk."""
        self.root = root
        self._on_uncounted = on_uncounted
        self._path = root / FOLDER / "catalog.sqlite"
        self._writer_lock = threading.Lock()
        self._local = threading.local()
        self._writer: tuple[int, sqlite3.Connection | None] = 0, None  # the file's inode, and the connection
        self._readers: list[sqlite3.Connection] = []
        self._uses: dict[str, float] = {}  # of segments since they were last saved

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Open a transaction, which excludes all others in all processes. Keep it short."""
        if not self._writer_lock.acquire(timeout=BUSY_S):
            raise StoreError("io", f"the catalog {self._path} is locked: other writes take too long", retriable=True)
        try:
            with self._errors():
                with files.os_errors(f"opening the catalog {self._path}"):
                    db = self._open_writer()
                db.execute("BEGIN IMMEDIATE")
                try:
                    yield db
                    db.execute("COMMIT")
                finally:
                    if db.in_transaction:
                        db.execute("ROLLBACK")
        finally:
            self._writer_lock.release()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection | None]:
        """Open a snapshot for lookups, which no writer delays. Yield None if there is no catalog."""
        with self._errors():
            inode, db = getattr(self._local, "reader", (0, None))
            if db is None or inode != self._inode():
                with suppress(FileNotFoundError, NotADirectoryError):
                    inode, db = self._local.reader = self._connect()
                    self._readers.append(db)
            if db is None or inode != self._inode():
                yield None
                return
            db.execute("BEGIN")
            try:
                yield db
            finally:
                db.execute("ROLLBACK")

    @property
    def exists(self) -> bool:
        return self._inode() != 0

    @property
    def is_open(self) -> bool:
        return self._writer[1] is not None or bool(self._readers)

    def open(self) -> None:
        """Create the catalog if it is missing or unusable."""
        with self.writing():
            pass

    def note_use(self, segments: Iterable[str]) -> None:
        """Record that segments are used now. ``save_uses`` writes that to the catalog."""
        self._uses.update(dict.fromkeys(segments, time.time()))

    def save_uses(self) -> None:
        """Write the recorded access times to the catalog. The order of eviction depends on them."""
        while self._uses:
            with self.writing() as db:
                for _ in range(min(_USES_AT_ONCE, len(self._uses))):
                    name, used = self._uses.popitem()
                    db.execute("UPDATE segments SET last_used = ? WHERE name = ? AND last_used < ?", (used, name, used))

    def discard(self) -> None:
        """Remove the database. The next use creates it anew; other processes notice."""
        logger.warning("the catalog %s is removed, and will be rebuilt", self._path)
        aside = self.root / f"{FOLDER}-{secrets.token_hex(8)}"
        with suppress(FileNotFoundError):
            os.rename(self.root / FOLDER, aside)  # with its log, which must never meet another database
        shutil.rmtree(aside, ignore_errors=True)

    def close(self) -> None:
        """Close all connections. No other thread may still use them."""
        for db in (self._writer[1], *self._readers):
            if db is not None:
                db.close()
        self._writer = 0, None
        self._readers.clear()
        self._local = threading.local()

    def _inode(self) -> int:
        """Return the inode of the database at the path now; 0 if there is none."""
        try:
            return os.stat(self._path).st_ino
        except (FileNotFoundError, NotADirectoryError):
            return 0

    def _open_writer(self) -> sqlite3.Connection:
        inode, db = self._writer
        if db is not None and inode == self._inode():
            return db
        if db is not None:
            db.close()
        self._writer = 0, None
        try:
            inode, db = self._connect()
            if db.execute("PRAGMA user_version").fetchone() != (_VERSION,):
                db.close()
                raise sqlite3.DatabaseError("another version's")
        except FileNotFoundError:
            self._create()
            inode, db = self._connect()
        except sqlite3.DatabaseError as e:
            if isinstance(e, sqlite3.OperationalError):
                raise  # it cannot be opened now, which says nothing about its content
            self.discard()
            self._create()
            inode, db = self._connect()
        if db.execute("SELECT is_counted FROM totals").fetchone() == (0,):
            self._on_uncounted()
        self._writer = inode, db
        return db

    def _connect(self) -> tuple[int, sqlite3.Connection]:
        """Connect to the database. Raises FileNotFoundError if there is none: SQLite would make an empty one."""
        inode = os.stat(self._path).st_ino
        db = sqlite3.connect(self._path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute(f"PRAGMA journal_size_limit = {_MAX_LOG_BYTES}")
        return inode, db

    def _create(self) -> None:
        """Create the database under another name, so that nobody opens it before it is complete."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_empty = not files.namespaces(self.root)
        new = self.root / f"{FOLDER}-{secrets.token_hex(8)}"
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
                local_pins.enter_all_pins(db, self.root)
                # Identifiers never return: files of an earlier catalog may be left.
                db.execute("INSERT INTO sqlite_sequence VALUES ('files', ?)", (time.time_ns() // 1000,))
            finally:
                db.close()
            try:
                os.rename(new, self.root / FOLDER)
            except OSError:
                if not (self.root / FOLDER).is_dir():
                    raise
                # Another process was faster.
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
            busy = code == sqlite3.SQLITE_BUSY
            hint = "" if busy else "; on a network file system, run `kvfetch serve` beside the disk instead"
            raise StoreError("io", f"the catalog {self._path} cannot be used: {e}{hint}", retriable=busy) from e
