"""Check segments that readers report as damaged: the store judges by its own bytes, not by what arrived at a reader."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

from sgl_kvfetch.codec import MAX_MANIFEST_BYTES
from sgl_kvfetch.directory import files, rows
from sgl_kvfetch.directory.catalog import Catalog, FileState
from sgl_kvfetch.directory.room import DiskRoom
from sgl_kvfetch.errors import FormatError, FormatVersionError
from sgl_kvfetch.keys import ContentCheck
from sgl_kvfetch.stores import decode_named_manifest

_SOUND_S = 300.0  # how long a segment that was found sound is not checked again
_MAX_SOUND = 4096
_MAX_CHECKS = 16  # waiting or running; further reports are ignored
_READ_BYTES = 4 << 20


class DamageChecks:
    """One check runs at a time."""

    def __init__(self, catalog: Catalog, room: DiskRoom) -> None:
        self._catalog = catalog
        self._room = room
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvfetch-check")
        self._checks: dict[str, asyncio.Future[bool]] = {}
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
        return await asyncio.shield(check)

    def shut_down(self) -> None:
        self._thread.shutdown()

    def _done(self, manifest_name: str, check: asyncio.Future[bool]) -> None:
        del self._checks[manifest_name]
        if not check.cancelled() and check.exception() is None and not check.result():
            if len(self._sound) >= _MAX_SOUND:
                del self._sound[next(iter(self._sound))]
            self._sound[manifest_name] = time.monotonic() + _SOUND_S

    def _check(self, manifest_name: str) -> bool:
        with files.os_errors(f"checking {manifest_name}"):
            before = self._identifiers(manifest_name)
            broken = [manifest_name, *found] if (found := self._broken_data(manifest_name)) is not None else []
            if not broken:
                return False
            # A file that was replaced meanwhile is not the one that was read.
            return self._room.delete(broken, lambda db, name: rows.stored_id(db, name) == before.get(name)) > 0

    def _identifiers(self, manifest_name: str) -> dict[str, int]:
        query = (
            "SELECT files.name, files.id FROM files JOIN segments ON segment = segments.id "
            "WHERE segments.name = ? AND files.state = ?"
        )
        with self._catalog.writing() as db:
            return dict(db.execute(query, (manifest_name, FileState.STORED)).fetchall())

    def _broken_data(self, manifest_name: str) -> list[str] | None:
        """Return the data of a broken segment that is itself broken, or None if the segment is sound."""
        content = files.read_object(self._catalog.root, manifest_name, MAX_MANIFEST_BYTES + 1)
        if content is None:
            return None
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
