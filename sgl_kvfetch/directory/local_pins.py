"""Keep the pins of a local store in files, from which a new catalog takes them again. Blocking.

Functions with a connection are called within a write transaction.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Iterable
from pathlib import Path

from sgl_kvfetch.directory import files
from sgl_kvfetch.errors import FormatError
from sgl_kvfetch.keys import PAGE_HASH_BYTES
from sgl_kvfetch.stores import Pin, decode_pin

logger = logging.getLogger(__name__)

FOLDER = ".pins"  # no namespace is called like this
_FIRST_HASH = f"substr(hashes, 1, {PAGE_HASH_BYTES})"


def pin_names(root: Path) -> list[str]:
    """List the names of all pins. Raises OSError."""
    try:
        return [name for name in os.listdir(root / FOLDER) if not name.startswith(files.TEMP_PREFIX)]
    except FileNotFoundError:
        return []


def read_pin(root: Path, name: str) -> Pin | None:
    """Read a pin; None if there is none of this name. Raises FormatError and OSError."""
    try:
        return decode_pin((root / FOLDER / name).read_bytes())
    except FileNotFoundError:
        return None


def write_pin(root: Path, pin: Pin) -> None:
    """Write a pin's file atomically. Raises OSError."""
    folder = root / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    temp = folder / f"{files.TEMP_PREFIX}{pin.name}"
    with os.fdopen(os.open(temp, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_NOFOLLOW, 0o600), "wb") as file:
        os.fchmod(file.fileno(), 0o600)  # an earlier version may have left it
        file.write(pin.encode())
        file.flush()
        os.fsync(file.fileno())
    os.replace(temp, folder / pin.name)


def delete_pin(root: Path, name: str) -> bool:
    """Delete a pin's file. Return True if it existed. Raises OSError."""
    try:
        os.unlink(root / FOLDER / name)
    except FileNotFoundError:
        return False
    return True


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
    for name in pin_names(root):
        try:
            pin = read_pin(root, name)
        except FormatError as e:
            logger.warning("%s/%s/%s: %s", root, FOLDER, name, e)
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
