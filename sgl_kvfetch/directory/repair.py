"""Bring a local store's catalog and its files together again: after crashes, power cuts and changes by other means.

Blocking: runs on a thread of its own. Methods raise StoreError and OSError.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from itertools import islice

from sgl_kvfetch.directory import files, rows
from sgl_kvfetch.directory.catalog import Catalog, FileRole, FileState, SegmentState, temp_name
from sgl_kvfetch.directory.room import DiskRoom
from sgl_kvfetch.errors import FormatError
from sgl_kvfetch.keys import parse_object_name
from sgl_kvfetch.stores import ObjectInfo

_NAMES_AT_ONCE = 256
_MANIFESTS_AT_ONCE = 32
_DELETED_AT_ONCE = 16
_PAUSE_S = 0.002  # between steps, for other threads and processes


class Repair:
    def __init__(self, catalog: Catalog, room: DiskRoom, orphan_age_s: float) -> None:
        """``orphan_age_s``: how old data without a manifest, and unknown temporary files, are when they are deleted."""
        self.num_collected = 0  # orphaned objects and temporary files
        self.num_unreadable = 0  # manifests
        self.stopped = threading.Event()
        self._catalog = catalog
        self._root = catalog.root
        self._room = room
        self._orphan_age_s = orphan_age_s

    def recheck(self, manifest_name: str) -> None:
        """Compare one segment with its files, and correct the catalog."""
        with self._catalog.writing() as db:
            self._examine(db, manifest_name)

    def collect(self) -> None:
        """Remove what dead writers and readers have left, and what differs between the disk and the catalog."""
        self._room.delete_leftovers()
        self._delete_abandoned()
        self.sweep()
        self._delete_orphans()

    def sweep(self) -> None:
        """Compare the whole disk with the catalog, step by step. Lookups and writes go on."""
        try:
            self._count_files()
        finally:
            self._room.counted.set()  # after a failure, too: nobody waits, and the next sweep counts again
        self._read_manifests()
        self._remove_missing_files()

    def _count_files(self) -> None:
        for namespace in files.namespaces(self._root):
            names = files.file_names(self._root, namespace)
            while some := list(islice(names, _NAMES_AT_ONCE)):
                self._add_missing_rows(namespace, some)
                if self.stopped.wait(_PAUSE_S):
                    return
        with self._catalog.writing() as db:
            loose = f"segment IN (SELECT id FROM segments WHERE state = {SegmentState.LOOSE:d})"
            db.execute(f"UPDATE files SET role = {FileRole.PENDING:d} WHERE role = {FileRole.NAMED:d} AND {loose}")
            db.execute("UPDATE totals SET is_counted = 1")

    def _examine(self, db: sqlite3.Connection, manifest_name: str) -> None:
        self.num_unreadable += rows.examine_segment(db, self._root, manifest_name) == SegmentState.UNREADABLE

    def _add_missing_rows(self, namespace: str, file_names: list[str]) -> None:
        names = {f"{namespace}/{file_name}" for file_name in file_names if _is_object(f"{namespace}/{file_name}")}
        with self._catalog.reading() as db:
            known = _stored(db, names) if db is not None else set()
        if names - known:
            with self._catalog.writing() as db:
                for name in names - known:
                    info = files.stat_object(self._root, name)
                    if info is not None and rows.stored_id(db, name) is None:
                        _add_row(db, info)
        limit = time.time() - self._orphan_age_s
        for temp in file_names:
            if temp.startswith(files.TEMP_PREFIX) and not self._has_row(temp):
                info = files.stat_object(self._root, f"{namespace}/{temp}")
                if info is not None and info.modified_s < limit:
                    self.num_collected += files.remove_temp(self._root, namespace, temp)

    def _has_row(self, temp: str) -> bool:
        number = temp.removeprefix(files.TEMP_PREFIX)
        with self._catalog.writing() as db:  # not a snapshot from before the file was made
            row = db.execute("SELECT 1 FROM files WHERE id = ? AND state != ?", (number, FileState.STORED)).fetchone()
        return row is not None

    def _read_manifests(self) -> None:
        while not self.stopped.wait(_PAUSE_S):
            with self._catalog.writing() as db:
                query = "SELECT name FROM segments WHERE state = ? LIMIT ?"
                unread = db.execute(query, (SegmentState.UNREAD, _MANIFESTS_AT_ONCE)).fetchall()
                for (name,) in unread:
                    self._examine(db, name)
            if not unread:
                return

    def _remove_missing_files(self) -> None:
        last = 0
        query = "SELECT id, name FROM files WHERE id > ? AND state = ? ORDER BY id LIMIT ?"
        while not self.stopped.wait(_PAUSE_S):
            with self._catalog.writing() as db:
                some = db.execute(query, (last, FileState.STORED, _NAMES_AT_ONCE)).fetchall()
            if not some:
                return
            last = some[-1][0]
            for _, name in some:
                if files.stat_object(self._root, name) is None:
                    self.recheck(rows.manifest_name(name))

    def _delete_abandoned(self) -> None:
        """Delete files whose writers are dead: their locks are gone."""
        abandoned = []
        with self._catalog.writing() as db:
            written = f"SELECT id, name FROM files WHERE state = {FileState.WRITING:d}"
            for file_id, name in db.execute(written).fetchall():
                if not files.is_in_use(self._root, name.partition("/")[0], temp_name(file_id)):
                    abandoned.append((file_id, name))
                    rows.mark_deleting(db, file_id)
        self.num_collected += self._room.delete_files(abandoned)

    def _delete_orphans(self) -> None:
        """Delete old data that no manifest names, and old manifests that lack data."""
        with self._catalog.writing() as db:
            found = db.execute(
                "SELECT name FROM files WHERE role = ? AND state = ?", (FileRole.PENDING, FileState.STORED)
            )
            orphans = found.fetchall()
            orphans += db.execute("SELECT name FROM segments WHERE state = ?", (SegmentState.INCOMPLETE,)).fetchall()
        left = iter(orphans)
        while some := list(islice(left, _DELETED_AT_ONCE)):
            self.num_collected += self._room.delete((name for (name,) in some), self._is_old_orphan)
            if self.stopped.wait(_PAUSE_S):
                return

    def _is_old_orphan(self, db: sqlite3.Connection, name: str) -> bool:
        """Look again: a manifest may have been put since. Even old data may have been in use until its manifest was
        replaced, so the manifest has to be old, too."""
        owner = rows.manifest_name(name)
        row = db.execute(
            "SELECT role, segments.state FROM files JOIN segments ON segment = segments.id "
            "WHERE files.name = ? AND files.state = ?",
            (name, FileState.STORED),
        ).fetchone()
        if row is None or not (row[0] == FileRole.PENDING or row == (FileRole.MANIFEST, SegmentState.INCOMPLETE)):
            return False
        infos = (files.stat_object(self._root, file) for file in (name, owner))
        return all(info is None or info.modified_s < time.time() - self._orphan_age_s for info in infos)


def _is_object(name: str) -> bool:
    try:
        parse_object_name(name)
    except FormatError:
        return False
    return True


def _stored(db: sqlite3.Connection, names: set[str]) -> set[str]:
    marks = ", ".join("?" * len(names))
    query = f"SELECT name FROM files WHERE state = {FileState.STORED:d} AND name IN ({marks})"
    return {name for (name,) in db.execute(query, tuple(names))}


def _add_row(db: sqlite3.Connection, info: ObjectInfo) -> None:
    """Add a file that was found. Its segment's manifest is to be read; until then, data counts as named by it."""
    rows.add_file(db, info.name, info.size_bytes, FileState.STORED, role=FileRole.NAMED, since=info.modified_s)
    unread = SegmentState.UNREAD, rows.manifest_name(info.name), SegmentState.LOOSE
    db.execute("UPDATE segments SET state = ? WHERE name = ? AND state != ?", unread)
