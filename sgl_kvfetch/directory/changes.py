"""The changes of what lookups find in a local store, whichever process makes them.

Blocking; each log is for one thread. Methods raise StoreError and OSError.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from sgl_kvfetch.directory import files
from sgl_kvfetch.directory.catalog import Catalog
from sgl_kvfetch.directory.page_index import page_key
from sgl_kvfetch.keys import split_hashes

_AT_ONCE = 256  # changes, or segments
_READ = "SELECT id, name, previous_hash, page_size, hashes, is_added FROM changes WHERE id > ? ORDER BY id LIMIT ?"
_SEGMENTS = """
SELECT name, previous_hash, page_size, hashes FROM segments JOIN chains ON segment = id
WHERE name > ? AND (expires IS NULL OR expires > ?) ORDER BY name LIMIT ?"""


@dataclass(frozen=True, slots=True)
class Change:
    """Pages of one folder that lookups find now (``is_added``), or find no longer.

    The pages of a change that adds them follow each other; ``previous_hash`` is that of the page before the first.
    """

    is_added: bool
    folder: str
    previous_hash: bytes | None
    page_size: int  # in tokens
    page_hashes: list[bytes]


class ChangeLog:
    """A position in the catalog's log of changes. The catalog keeps the last few thousand, while a log is open."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._last = -1  # the identifier of the last change that was read; -1 before `restart`

    def restart(self) -> None:
        """Skip all changes so far. `segments` returns what they led to."""
        with self._catalog.writing() as db:
            db.execute("UPDATE totals SET logs_changes = 1")
            self._last = _newest(db)

    def read(self) -> list[Change] | None:
        """Return the next changes, a few hundred at most. Return None if some are lost: call `restart`.

        Pages that another segment of the folder still has are left out of a removal.
        """
        with self._catalog.reading() as db:
            if db is None or db.execute("SELECT logs_changes FROM totals").fetchone() != (1,):
                return None  # this catalog is another one, or another process has closed its log
            found = db.execute(_READ, (self._last, _AT_ONCE)).fetchall()
            if found[0][0] != self._last + 1 if found else _newest(db) != self._last:
                return None
            changes = [_change(*row) for _, *row in found]
            changes = [change if change.is_added else _without_held(db, change) for change in changes]
        self._last += len(found)
        return changes

    def folders(self) -> set[str]:
        return set(files.namespaces(self._catalog.root))

    def segments(self) -> Iterator[list[Change]]:
        """Yield all segments as additions, by folder, in lists of a few hundred.

        Of changes during the iteration, some may be in it. `read` returns all of them later.
        """
        last = ""
        while True:
            with self._catalog.reading() as db:
                some = [] if db is None else db.execute(_SEGMENTS, (last, time.time(), _AT_ONCE)).fetchall()
            if not some:
                return
            last = some[-1][0]
            yield [_change(*row) for row in some]

    def close(self) -> None:
        """Let the catalog log no more changes."""
        with self._catalog.writing() as db:
            db.execute("UPDATE totals SET logs_changes = 0")
            db.execute("DELETE FROM changes")


def _newest(db: sqlite3.Connection) -> int:
    """Return the identifier of the latest change, 0 if there was none in this catalog."""
    row = db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'changes'").fetchone()
    return int(row[0]) if row else 0


def _change(name: str, previous_hash: bytes | None, page_size: int, hashes: bytes, is_added: int = 1) -> Change:
    return Change(bool(is_added), name.partition("/")[0], previous_hash, page_size, split_hashes(hashes))


def _without_held(db: sqlite3.Connection, change: Change) -> Change:
    """Leave out the pages that another segment has."""
    held = "SELECT 1 FROM pages WHERE key = ?"
    gone = [h for h in change.page_hashes if not db.execute(held, (page_key(change.folder, h),)).fetchone()]
    return replace(change, page_hashes=gone)
