"""Change the catalog's rows. Each function is called within a write transaction, with its connection."""

from __future__ import annotations

import logging
import sqlite3
import time
from pathlib import Path

from sgl_kvfetch.codec import MAX_MANIFEST_BYTES, Manifest
from sgl_kvfetch.directory import files, notes
from sgl_kvfetch.directory.catalog import FileRole, SegmentState, page_rows
from sgl_kvfetch.errors import FormatError
from sgl_kvfetch.keys import parse_object_name
from sgl_kvfetch.log import one_line
from sgl_kvfetch.stores import object_digest
from sgl_kvfetch.stores.upkeep import decode_named_manifest

logger = logging.getLogger(__name__)


def manifest_name(name: str) -> str:
    """Return the name of the manifest of an object's segment."""
    return parse_object_name(name).segment.manifest_name


def stored_id(db: sqlite3.Connection, name: str) -> int | None:
    """Return the identifier of an object's file; None if the catalog has none."""
    row = db.execute("SELECT id FROM files WHERE name = ?", (name,)).fetchone()
    return row and int(row[0])


def add_file(
    db: sqlite3.Connection, name: str, num_bytes: int, *, role: FileRole | None = None, since: float | None = None
) -> None:
    """Add a stored file.

    A manifest, or data that may complete a segment, leaves its segment ``UNREAD``: call `examine_segment` or
    `index_segment`. Writing a segment again is a use of it, so that its data is not evicted before its manifest is put.
    """
    since = time.time() if since is None else since
    owner = manifest_name(name)
    db.execute(
        "INSERT INTO segments (name, state, last_used) VALUES (?, ?, ?) "
        "ON CONFLICT (name) DO UPDATE SET last_used = max(last_used, excluded.last_used)",
        (owner, SegmentState.LOOSE, since),
    )
    segment, state = db.execute("SELECT id, state FROM segments WHERE name = ?", (owner,)).fetchone()
    role = FileRole.MANIFEST if name == owner else FileRole.PENDING if role is None else role
    row = name, segment, num_bytes, role, since
    db.execute("INSERT INTO files (name, segment, bytes, role, since) VALUES (?, ?, ?, ?, ?)", row)
    if role == FileRole.MANIFEST or state == SegmentState.INCOMPLETE:
        db.execute("UPDATE segments SET state = ? WHERE id = ?", (SegmentState.UNREAD, segment))


def is_unnamed(db: sqlite3.Connection, root: Path, name: str) -> bool:
    """Return whether a data object is named by no manifest. Raises OSError.

    The catalog knows that of segments that are found. Of others, the file says it: they may not have been read yet, or
    the manifest was deleted by other means.
    """
    owner = manifest_name(name)
    known = db.execute(
        "SELECT role FROM files JOIN segments ON segment = segments.id WHERE files.name = ? AND segments.state = ?",
        (name, SegmentState.FOUND),
    ).fetchone()
    if known is not None and files.stat_object(root, owner) is not None:
        return bool(known == (FileRole.PENDING,))
    content = files.read_object(root, owner, MAX_MANIFEST_BYTES)
    try:
        return content is None or name not in decode_named_manifest(content, owner).data_names
    except FormatError:
        return False  # a newer version may have written it


def add_if_stored(db: sqlite3.Connection, root: Path, name: str) -> int | None:
    """Return the size of an object's file, or None if it is missing. Add a row if the file was put by other means.

    Raises OSError.
    """
    info = files.stat_object(root, name)
    if info is None:
        return None
    if stored_id(db, name) is None:
        add_file(db, name, info.size_bytes)
    return info.size_bytes


def store_file(db: sqlite3.Connection, name: str, num_bytes: int) -> None:
    """Record that a written file takes its object's name, from another file if one had it."""
    role = None
    replaced = db.execute("SELECT id, role FROM files WHERE name = ?", (name,)).fetchone()
    if replaced is not None:
        role = replaced[1]
        db.execute("DELETE FROM files WHERE id = ?", replaced[:1])
    add_file(db, name, num_bytes, role=role)


def remove_object(db: sqlite3.Connection, root: Path, name: str) -> str | None:
    """Take an object's name from its file. Return what `files.remove_aside` needs; None if there is no file. Raises
    OSError."""
    add_if_stored(db, root, name)
    file_id = stored_id(db, name)
    if file_id is None:
        return None
    temp = files.set_aside(root, name)
    forget_file(db, file_id)
    return temp


def forget_file(db: sqlite3.Connection, file_id: int) -> None:
    """Record that a file has lost its name. A segment that loses what it needs is not found any more."""
    segment, role, state = db.execute(
        "SELECT segment, role, segments.state FROM files JOIN segments ON segment = segments.id WHERE files.id = ?",
        (file_id,),
    ).fetchone()
    db.execute("DELETE FROM files WHERE id = ?", (file_id,))
    if role == FileRole.MANIFEST:
        hide_segment(db, segment, SegmentState.LOOSE)
        unnamed = FileRole.PENDING, time.time(), segment, FileRole.NAMED
        db.execute("UPDATE files SET role = ?, since = ? WHERE segment = ? AND role = ?", unnamed)
    elif role == FileRole.NAMED and state in (SegmentState.FOUND, SegmentState.UNREAD):
        hide_segment(db, segment, SegmentState.INCOMPLETE)
    empty = "id = ? AND NOT EXISTS (SELECT 1 FROM files WHERE segment = segments.id)"
    db.execute(f"DELETE FROM segments WHERE {empty}", (segment,))


def index_segment(db: sqlite3.Connection, manifest: Manifest, content: bytes) -> None:
    """Let lookups find a segment. Its manifest is ``content``; manifest and data are stored, or about to be.

    Raises FormatError if the catalog refuses the manifest; nothing is changed then.
    """
    db.execute("SAVEPOINT indexing")
    try:
        _index_segment(db, manifest, content)
    except (sqlite3.IntegrityError, sqlite3.DataError, ArithmeticError, ValueError) as e:
        db.execute("ROLLBACK TO indexing")
        raise FormatError(f"the catalog refuses the manifest: {e}") from e
    db.execute("RELEASE indexing")


def _index_segment(db: sqlite3.Connection, manifest: Manifest, content: bytes) -> None:
    """Enter a manifest: which files it names, the pages that lookups find, and what eviction must know."""
    key = manifest.key
    (segment,) = db.execute("SELECT id FROM segments WHERE name = ?", (key.manifest_name,)).fetchone()
    data = "SELECT id, name, role FROM files WHERE segment = ? AND role != ?"
    for file_id, name, role in db.execute(data, (segment, FileRole.MANIFEST)).fetchall():
        new = FileRole.NAMED if name in manifest.data_names else FileRole.PENDING
        if new != role:
            db.execute("UPDATE files SET role = ?, since = ? WHERE id = ?", (new, time.time(), file_id))
    chain = manifest.first_page, b"".join(manifest.page_hashes)
    if db.execute("SELECT first_page, hashes FROM chains WHERE segment = ?", (segment,)).fetchone() != chain:
        hide_segment(db, segment, SegmentState.UNREAD)
        db.execute("INSERT INTO chains VALUES (?, ?, ?)", (segment, *chain))
        db.executemany("INSERT INTO pages VALUES (?, ?, ?)", page_rows(key.namespace, segment, *chain))
    pinned = notes.is_pinned(db, manifest.page_hashes[0])
    coarser = manifest.num_droppable, manifest.num_dropped
    found = SegmentState.FOUND, object_digest(content), pinned, manifest.expires, *coarser, segment
    db.execute(
        "UPDATE segments SET state = ?, digest = ?, pinned = ?, expires = ?, droppable = ?, dropped = ? WHERE id = ?",
        found,
    )


def hide_segment(db: sqlite3.Connection, segment: int, state: SegmentState) -> None:
    """Hide a segment from lookups."""
    row = db.execute(
        "SELECT name, first_page, hashes FROM segments JOIN chains ON segment = id WHERE id = ?", (segment,)
    ).fetchone()
    if row is not None:
        name, first_page, hashes = row
        keys = page_rows(name.partition("/")[0], segment, first_page, hashes)
        db.executemany("DELETE FROM pages WHERE key = ? AND first_page = ? AND segment = ?", keys)
        db.execute("DELETE FROM chains WHERE segment = ?", (segment,))
    db.execute("UPDATE segments SET state = ?, digest = NULL, pinned = 0, droppable = 0 WHERE id = ?", (state, segment))


def examine_if_unread(db: sqlite3.Connection, root: Path, name: str) -> None:
    if db.execute("SELECT state FROM segments WHERE name = ?", (name,)).fetchone() == (SegmentState.UNREAD,):
        examine_segment(db, root, name)


def examine_segment(db: sqlite3.Connection, root: Path, name: str) -> SegmentState:
    """Compare a segment's rows with its files, read its manifest, and let lookups find it if it is whole.

    Return its state, ``LOOSE`` if it has no manifest. A segment that cannot be read or indexed is ``UNREADABLE``, and
    keeps nobody from examining others in the same transaction.
    """
    row = db.execute("SELECT id FROM segments WHERE name = ?", (name,)).fetchone()
    if row is None:
        return SegmentState.LOOSE
    (segment,) = row
    try:
        _compare_sizes(db, root, segment)
        if stored_id(db, name) is None:
            return SegmentState.LOOSE
        content = files.read_object(root, name, MAX_MANIFEST_BYTES + 1) or b""
        manifest = decode_named_manifest(content, name)
        if any(add_if_stored(db, root, data) != size for data, size in manifest.data_sizes.items()):
            hide_segment(db, segment, SegmentState.INCOMPLETE)
            return SegmentState.INCOMPLETE
        index_segment(db, manifest, content)
    except (FormatError, OSError) as e:
        logger.warning("skipping unreadable manifest %s: %s", name, one_line(e))
        hide_segment(db, segment, SegmentState.UNREADABLE)
        # A newer version may have written it, so its data counts as named.
        db.execute(
            "UPDATE files SET role = ? WHERE segment = ? AND role = ?", (FileRole.NAMED, segment, FileRole.PENDING)
        )
        return SegmentState.UNREADABLE
    return SegmentState.FOUND


def _compare_sizes(db: sqlite3.Connection, root: Path, segment: int) -> None:
    """Take the sizes of a segment's stored files from the disk, and forget those that are gone. Raises OSError."""
    for file_id, name in db.execute("SELECT id, name FROM files WHERE segment = ?", (segment,)).fetchall():
        info = files.stat_object(root, name)
        if info is None:
            forget_file(db, file_id)
        else:
            db.execute("UPDATE files SET bytes = ? WHERE id = ?", (info.size_bytes, file_id))
