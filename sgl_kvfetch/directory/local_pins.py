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
from sgl_kvfetch.directory.page_index import page_key
from sgl_kvfetch.errors import FormatError
from sgl_kvfetch.keys import split_hashes
from sgl_kvfetch.stores import Pin, decode_pin

logger = logging.getLogger(__name__)

FOLDER = ".pins"  # no namespace is called like this


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
    with temp.open("wb") as file:
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


def enter_pin(db: sqlite3.Connection, pin: Pin) -> None:
    """Have segments pinned that are indexed from now on."""
    rows = ((page_hash, pin.name) for page_hash in pin.page_hashes)
    db.executemany("INSERT OR IGNORE INTO pinned_pages VALUES (?, ?)", rows)


def enter_all_pins(db: sqlite3.Connection, root: Path) -> None:
    """Enter all pins that have files into a new catalog. Raises OSError."""
    for name in pin_names(root):
        try:
            pin = read_pin(root, name)
        except FormatError as e:
            logger.warning("%s/%s/%s: %s", root, FOLDER, name, e)
        else:
            if pin is not None:
                enter_pin(db, pin)


def pin_segments(db: sqlite3.Connection, root: Path, pin: Pin) -> None:
    """Pin the stored segments that have one of the pin's pages. Raises OSError."""
    keys = ((page_key(folder, page_hash),) for folder in files.namespaces(root) for page_hash in pin.page_hashes)
    db.executemany("UPDATE segments SET pinned = 1 WHERE id IN (SELECT segment FROM pages WHERE key = ?)", keys)


def forget_pin(db: sqlite3.Connection, name: str) -> None:
    """Forget a pin. Segments that another pin holds stay pinned."""
    db.execute("DELETE FROM pinned_pages WHERE pin = ?", (name,))
    pinned = "SELECT segment, hashes FROM chains JOIN segments ON id = segment WHERE pinned = 1 AND state != 0"
    for segment, hashes in db.execute(pinned).fetchall():
        if not is_pinned(db, split_hashes(hashes)):
            db.execute("UPDATE segments SET pinned = 0 WHERE id = ?", (segment,))


def is_pinned(db: sqlite3.Connection, page_hashes: Iterable[bytes]) -> bool:
    """Return whether any of these pages is pinned."""
    if db.execute("SELECT 1 FROM pinned_pages LIMIT 1").fetchone() is None:
        return False
    query = "SELECT 1 FROM pinned_pages WHERE page_hash = ? LIMIT 1"
    return any(db.execute(query, (page_hash,)).fetchone() for page_hash in page_hashes)


def pinned_bytes(db: sqlite3.Connection) -> int:
    """Return the size of all files of pinned segments."""
    query = "SELECT coalesce(sum(bytes), 0) FROM files JOIN segments ON segment = segments.id WHERE pinned = 1"
    (num_bytes,) = db.execute(query).fetchone()
    return int(num_bytes)
