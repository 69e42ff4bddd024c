"""Bring a local store's catalog and its files together again: after crashes, power cuts and changes by other means.

Segments that readers report as damaged are checked: the store judges by its own bytes, not by what arrived at a reader.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice

from sgl_kvfetch.codec import MAX_MANIFEST_BYTES
from sgl_kvfetch.directory import files, rows
from sgl_kvfetch.directory.catalog import Catalog, FileRole, SegmentState
from sgl_kvfetch.directory.room import DiskRoom
from sgl_kvfetch.errors import FormatError, FormatVersionError
from sgl_kvfetch.keys import ContentCheck, is_object_name
from sgl_kvfetch.stores import ObjectInfo
from sgl_kvfetch.stores.upkeep import decode_named_manifest

_NAMES_AT_ONCE = 256
_MANIFESTS_AT_ONCE = 32
_DELETED_AT_ONCE = 16
_PAUSE_S = 0.002  # between steps, for other threads
_SOUND_S = 300.0  # how long a segment that was found sound is not checked again
_MAX_SOUND = 4096
_MAX_CHECKS = 16  # waiting or running; further reports are ignored
_READ_BYTES = 4 << 20


class Repair:
    """Repairs the catalog on a thread of its own. Methods block, and raise StoreError and OSError."""

    def __init__(self, catalog: Catalog, room: DiskRoom, orphan_age_s: float) -> None:
        """``orphan_age_s``: how old data without a manifest is when it is deleted."""
        self.stopped = threading.Event()
        self._catalog = catalog
        self._root = catalog.root
        self._room = room
        self._orphan_age_s = orphan_age_s

    def recheck(self, manifest_name: str) -> None:
        """Compare one segment with its files, and correct the catalog."""
        with self._catalog.writing() as db:
            rows.examine_segment(db, self._root, manifest_name)

    def collect(self) -> None:
        """Remove what readers and dead writers have left, and what differs between the disk and the catalog."""
        self._room.delete_read_files()
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
            with self._catalog.writing(), suppress(OSError):  # files get their names only within it
                os.rmdir(self._root / namespace)  # of no use if it is empty
        with self._catalog.writing() as db:
            loose = f"segment IN (SELECT id FROM segments WHERE state = {SegmentState.LOOSE:d})"
            db.execute(f"UPDATE files SET role = {FileRole.PENDING:d} WHERE role = {FileRole.NAMED:d} AND {loose}")
            db.execute("UPDATE totals SET is_counted = 1")

    def _add_missing_rows(self, namespace: str, file_names: list[str]) -> None:
        names = {f"{namespace}/{file_name}" for file_name in file_names if is_object_name(f"{namespace}/{file_name}")}
        with self._catalog.reading() as db:
            known = _stored(db, names) if db is not None else set()
        if names - known:
            with self._catalog.writing() as db:
                for name in names - known:
                    info = files.stat_object(self._root, name)
                    if info is not None and rows.stored_id(db, name) is None:
                        _add_row(db, info)

    def _read_manifests(self) -> None:
        while not self.stopped.wait(_PAUSE_S):
            with self._catalog.writing() as db:
                query = "SELECT name FROM segments WHERE state = ? LIMIT ?"
                unread = db.execute(query, (SegmentState.UNREAD, _MANIFESTS_AT_ONCE)).fetchall()
                for (name,) in unread:
                    rows.examine_segment(db, self._root, name)
            if not unread:
                return

    def _remove_missing_files(self) -> None:
        last = 0
        query = "SELECT id, name FROM files WHERE id > ? ORDER BY id LIMIT ?"
        while not self.stopped.wait(_PAUSE_S):
            with self._catalog.writing() as db:
                some = db.execute(query, (last, _NAMES_AT_ONCE)).fetchall()
            if not some:
                return
            last = some[-1][0]
            for _, name in some:
                if files.stat_object(self._root, name) is None:
                    self.recheck(rows.manifest_name(name))

    def _delete_orphans(self) -> None:
        """Delete old data that no manifest names, and old manifests that lack data."""
        with self._catalog.writing() as db:
            orphans = db.execute("SELECT name FROM files WHERE role = ?", (FileRole.PENDING,)).fetchall()
            orphans += db.execute("SELECT name FROM segments WHERE state = ?", (SegmentState.INCOMPLETE,)).fetchall()
        left = iter(orphans)
        while some := list(islice(left, _DELETED_AT_ONCE)):
            self._room.delete((name for (name,) in some), self._is_old_orphan)
            if self.stopped.wait(_PAUSE_S):
                return

    def _is_old_orphan(self, db: sqlite3.Connection, name: str) -> bool:
        """Return whether an object is still an orphan, and old: a manifest may have been put since.

        Even old data may have been in use until its manifest was replaced, so the manifest has to be old, too.
        """
        owner = rows.manifest_name(name)
        row = db.execute(
            "SELECT role, segments.state FROM files JOIN segments ON segment = segments.id WHERE files.name = ?",
            (name,),
        ).fetchone()
        if row is None or not (row[0] == FileRole.PENDING or row == (FileRole.MANIFEST, SegmentState.INCOMPLETE)):
            return False
        infos = (files.stat_object(self._root, file) for file in (name, owner))
        return all(info is None or info.modified_s < time.time() - self._orphan_age_s for info in infos)


def _stored(db: sqlite3.Connection, names: set[str]) -> set[str]:
    marks = ", ".join("?" * len(names))
    return {name for (name,) in db.execute(f"SELECT name FROM files WHERE name IN ({marks})", tuple(names))}


def _add_row(db: sqlite3.Connection, info: ObjectInfo) -> None:
    """Add a file that was found. Its segment's manifest is to be read; until then, data counts as named by it."""
    rows.add_file(db, info.name, info.size_bytes, role=FileRole.NAMED, since=info.modified_s)
    unread = SegmentState.UNREAD, rows.manifest_name(info.name), SegmentState.LOOSE
    db.execute("UPDATE segments SET state = ? WHERE name = ? AND state != ?", unread)


class DamageChecks:
    """Checks reported segments, one at a time, on its own thread."""

    def __init__(self, catalog: Catalog, room: DiskRoom) -> None:
        self._catalog = catalog
        self._room = room
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvfetch-check")
        self._checks: dict[str, asyncio.Future[bool | None]] = {}
        self._sound: dict[str, float] = {}  # manifest's name -> until when, in monotonic seconds

    async def check(self, manifest_name: str) -> bool:
        """Read a segment and delete what is broken. Return True if it was. Raises StoreError."""
        if self._sound.get(manifest_name, 0.0) > time.monotonic():
            return False
        check = self._checks.get(manifest_name)
        if check is None:
            if len(self._checks) >= _MAX_CHECKS:
                return False
            check = asyncio.get_running_loop().run_in_executor(self._thread, self._check, manifest_name)
            self._checks[manifest_name] = check
            check.add_done_callback(lambda done: self._done(manifest_name, done))
        return bool(await asyncio.shield(check))

    def shut_down(self) -> None:
        self._thread.shutdown()

    def _done(self, manifest_name: str, check: asyncio.Future[bool | None]) -> None:
        del self._checks[manifest_name]
        if not check.cancelled() and check.exception() is None and check.result() is False:
            if len(self._sound) >= _MAX_SOUND:
                del self._sound[next(iter(self._sound))]
            self._sound[manifest_name] = time.monotonic() + _SOUND_S

    def _check(self, manifest_name: str) -> bool | None:
        """Return whether a segment was broken, and is deleted; None if it is gone, or was replaced meanwhile: then what
        comes to stand there has not been read."""
        with files.os_errors(f"checking {manifest_name}"):
            before = self._identifiers(manifest_name)
            content = files.read_object(self._catalog.root, manifest_name, MAX_MANIFEST_BYTES + 1)
            if content is None:
                return None
            broken_data = self._broken_data(manifest_name, content)
            if broken_data is None:
                return False
            broken = [manifest_name, *broken_data]
            # A file that was replaced meanwhile is not the one that was read.
            deleted = self._room.delete(broken, lambda db, name: rows.stored_id(db, name) == before.get(name))
            return True if deleted else None

    def _identifiers(self, manifest_name: str) -> dict[str, int]:
        query = "SELECT files.name, files.id FROM files JOIN segments ON segment = segments.id WHERE segments.name = ?"
        with self._catalog.writing() as db:
            return dict(db.execute(query, (manifest_name,)).fetchall())

    def _broken_data(self, manifest_name: str, content: bytes) -> list[str] | None:
        """Return the data of a broken segment that is itself broken, or None if the segment is sound."""
        try:
            manifest = decode_named_manifest(content, manifest_name)
        except FormatVersionError:
            return None
        except FormatError:
            return []
        broken = [name for name in manifest.data_names if not self._is_sound(name)]
        return broken or None

    def _is_sound(self, name: str) -> bool:
        check = ContentCheck(name)
        opened = files.open_object(self._catalog.root, name)
        if opened is None:
            return False
        with opened.file as file:
            try:
                while piece := file.read(_READ_BYTES):
                    check.add(piece)
            except OSError:
                return False  # the disk cannot read it
        return check.is_sound
