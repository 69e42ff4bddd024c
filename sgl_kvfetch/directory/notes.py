"""The notes beside a local store's segments: a file each, ``.KIND/NAME``. Blocking. All may raise OSError.

A note is no row of the catalog: nothing evicts it, and a scan of the few files says how much of the capacity they take.
A catalog knows the pages of pins, and a new one takes them from their files again. Functions with a connection are
called within a write transaction.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import stat
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from sgl_kvfetch.directory import files
from sgl_kvfetch.errors import FormatError, StoreError
from sgl_kvfetch.keys import PAGE_HASH_BYTES
from sgl_kvfetch.stores import PINS, PROFILES, NoteKind, ObjectInfo, Pin, decode_pin

logger = logging.getLogger(__name__)

_FIRST_HASH = f"substr(hashes, 1, {PAGE_HASH_BYTES})"
_beginning = threading.Lock()  # held until a new file has its size: uploads that begin at once count each other


def list_notes(root: Path, kind: NoteKind) -> list[ObjectInfo]:
    return [info for info in _all_files(_folder(root, kind)) if kind.has_name(info.name)]


def _all_notes(root: Path, kind: NoteKind) -> Iterator[ObjectInfo]:
    """Iterate over all notes, with those that are being written, whose names are not their own."""
    yield from _all_files(_folder(root, kind))
    for info in _all_files(root / files.UNFINISHED):
        kind_name, _, rest = info.name.partition(".")
        if kind_name == kind.name:
            yield ObjectInfo(rest.replace(".", "/"), info.size_bytes, info.modified_s)


def stored_bytes(root: Path) -> int:
    """Return the size of all profiles, and of what is written of others. Other notes are small."""
    return sum(info.size_bytes for info in _all_notes(root, PROFILES))


def _folder(root: Path, kind: NoteKind) -> Path:
    return root / f".{kind.name}"  # no namespace is called like this


def _place(root: Path, kind: NoteKind, name: str) -> tuple[Path, str]:
    """Return the directory above a note's directory, and both names, as for an object."""
    above, folder, file_name = f"{_folder(root, kind)}/{name}".rsplit("/", 2)
    return Path(above), f"{folder}/{file_name}"


def _all_files(folder: Path, prefix: str = "") -> Iterator[ObjectInfo]:
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _all_files(Path(entry.path), f"{prefix}{entry.name}/")
                continue
            with suppress(FileNotFoundError):  # deleted meanwhile
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    yield ObjectInfo(f"{prefix}{entry.name}", status.st_size, status.st_mtime)


def open_note(root: Path, kind: NoteKind, name: str) -> files.OpenObject | None:
    """Open a note; the caller closes it. None if it is missing."""
    return files.open_object(*_place(root, kind, name))


def delete_note(root: Path, kind: NoteKind, name: str) -> bool:
    """Delete a note. Return True if it existed. Whoever reads it reads on."""
    try:
        os.unlink(_folder(root, kind) / name)
    except FileNotFoundError:
        return False
    return True


class NoteWriter:
    """Writes one note in pieces. Readers do not see it before ``commit``. Methods raise StoreError, too."""

    def __init__(self, root: Path, kind: NoteKind, name: str, size_bytes: int, capacity_bytes: int | None) -> None:
        self.kind = kind
        self.name = name
        self.head = b""  # the first bytes, up to ``kind.checked_bytes``
        self._root = root
        self._size_bytes = size_bytes
        self._most_bytes: int | None = None  # of all notes of this kind
        if capacity_bytes is not None and kind.max_part is not None:
            self._most_bytes = int(capacity_bytes * kind.max_part)
        self._written_bytes = 0
        self._file: files.TempFile | None = None
        self._finished = False
        # A cancelled await leaves its thread running, so discard must not close the file during a write.
        self._lock = threading.Lock()

    def open(self) -> None:
        """Create the file. Raises StoreError: ``too_large``, and ``full`` if all notes of this kind would take too much
        of the store's capacity."""
        with self._lock:
            if self._finished:
                return  # discarded meanwhile
            with _beginning:
                self._require_fits()
                _folder(self._root, self.kind).mkdir(mode=0o700, exist_ok=True)
                self._file = files.TempFile(self._root, f"{self.kind.name}.{self.name.rpartition('/')[0]}.")
                self._file.resize(self._size_bytes)

    def _require_fits(self) -> None:
        kind, (folder, slash, _) = self.kind, self.name.partition("/")
        if self._size_bytes > kind.max_bytes:
            raise StoreError("too_large", f"a {kind.one} of {self._size_bytes} bytes; the limit is {kind.max_bytes}")
        others = [info for info in _all_notes(self._root, kind) if info.name != self.name]
        needed = self._size_bytes + sum(info.size_bytes for info in others)
        if self._most_bytes is not None and needed > self._most_bytes:
            part = f"{self._most_bytes}, {kind.max_part:g} of the capacity"
            raise StoreError("full", f"{kind.name} would take {needed} bytes; the limit is {part}")
        if len(others) >= kind.max_notes:
            raise StoreError("full", f"the store has {len(others)} {kind.name}, which is the limit")
        beside = sum(info.name.startswith(f"{folder}/") for info in others) if slash else 0
        if kind.max_beside is not None and beside >= kind.max_beside:
            raise StoreError("full", f"the store has {beside} {kind.name} of weights {folder}, which is the limit")

    def write(self, data: bytes) -> None:
        with self._lock:
            if self._finished:
                return
            assert self._file is not None
            self.head += data[: self.kind.checked_bytes - len(self.head)]
            start, self._written_bytes = self._written_bytes, self._written_bytes + len(data)
            if self._written_bytes > self._size_bytes:
                raise StoreError("invalid", f"more than the {self._size_bytes} bytes that were announced")
            self._file.write_at(memoryview(data), start)

    def check(self) -> None:
        """Raise StoreError (``invalid``) if what is written is not the note of this name."""
        try:
            self.kind.check(self.name, self.head, self._written_bytes)
        except FormatError as e:
            raise StoreError("invalid", f"not the {self.kind.one} {self.name}: {e}") from e

    def commit(self) -> None:
        """Give the file its name, once it is checked. Raises StoreError (``invalid``) if it was discarded meanwhile."""
        with self._lock:
            if self._finished:
                raise StoreError("invalid", f"{self.kind.one} {self.name} was given up while it was written")
            assert self._file is not None
            self._file.resize(self._written_bytes)
            self._file.sync()
            folder, _, file_name = f"{_folder(self._root, self.kind).name}/{self.name}".rpartition("/")
            self._file.commit(folder, file_name)
            self._finished = True

    def discard(self) -> None:
        """Remove what is written unless it is committed. Idempotent."""
        with self._lock:
            self._finished = True
            if self._file is not None:
                self._file.discard()


# What a catalog knows of pins.


def enter_pages(db: sqlite3.Connection, pin: str, hashes: bytes) -> None:
    """Have segments pinned that are indexed from now on and have one of these pages of a pin."""
    # One statement: between the rows of `executemany`, the interpreter lock is given up, and waited for.
    db.execute(
        f"""WITH RECURSIVE pages(start) AS (
            SELECT 1 UNION ALL SELECT start + {PAGE_HASH_BYTES} FROM pages WHERE start + {PAGE_HASH_BYTES} <= :bytes
        ) INSERT OR IGNORE INTO pinned_pages SELECT substr(:hashes, start, {PAGE_HASH_BYTES}), :pin FROM pages""",
        {"hashes": hashes, "bytes": len(hashes), "pin": pin},
    )


def enter_all_pins(db: sqlite3.Connection, root: Path) -> None:
    """Enter all pins that have files into a new catalog. Raises OSError."""
    for info in list_notes(root, PINS):
        try:
            content = files.read_object(*_place(root, PINS, info.name), PINS.max_bytes)
            pin = None if content is None else decode_pin(content)
        except FormatError as e:
            logger.warning("%s/%s: %s", _folder(root, PINS), info.name, e)
        else:
            if pin is not None:
                enter_pages(db, pin.name, pin.hashes)


def segments_of(db: sqlite3.Connection, pin: Pin) -> list[int]:
    """Return the segments that lookups find and that have a page of the pin.

    Page hashes are chained, and a pin has all pages of a prompt: such a segment's first page is one of them.
    """
    pinned = set(pin.page_hashes)
    rows = db.execute(f"SELECT segment, {_FIRST_HASH} FROM chains")
    return [segment for segment, first in rows if first in pinned]


def pin_segments(db: sqlite3.Connection, segments: Iterable[int]) -> None:
    db.executemany("UPDATE segments SET pinned = 1 WHERE id = ?", ((segment,) for segment in segments))


def forget_pin(db: sqlite3.Connection, name: str) -> None:
    """Forget a pin. Segments that another pin holds stay pinned."""
    db.execute("DELETE FROM pinned_pages WHERE pin = ?", (name,))
    held = f"SELECT segment FROM chains JOIN pinned_pages ON page_hash = {_FIRST_HASH}"
    db.execute(f"UPDATE segments SET pinned = 0 WHERE pinned = 1 AND id NOT IN ({held})")


def is_pinned(db: sqlite3.Connection, first_hash: bytes) -> bool:
    """Return whether a segment that starts with this page is pinned."""
    query = "SELECT 1 FROM pinned_pages WHERE page_hash = ? LIMIT 1"
    return db.execute(query, (first_hash,)).fetchone() is not None


def pinned_bytes_with(db: sqlite3.Connection, segments: Iterable[int]) -> int:
    """Return the size of all files of pinned segments and of these."""
    pinned = {segment for (segment,) in db.execute("SELECT id FROM segments WHERE pinned = 1")}.union(segments)
    query = "SELECT coalesce(sum(bytes), 0) FROM files WHERE segment = ?"
    return sum(db.execute(query, (segment,)).fetchone()[0] for segment in pinned)
