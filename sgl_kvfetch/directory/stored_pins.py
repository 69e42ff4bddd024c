"""Pins of a store in a directory. `local_pins` has their files and rows; this puts and deletes each as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from sgl_kvfetch.directory import files
from sgl_kvfetch.directory.catalog import Catalog
from sgl_kvfetch.directory.local_pins import (
    delete_pin,
    enter_pages,
    forget_pin,
    pin_names,
    pin_segments,
    pinned_bytes_with,
    read_pin,
    segments_of,
    write_pin,
)
from sgl_kvfetch.directory.room import DiskRoom
from sgl_kvfetch.directory.workers import Workers, on
from sgl_kvfetch.errors import FormatError, StoreError
from sgl_kvfetch.keys import PAGE_HASH_BYTES
from sgl_kvfetch.stores import Pin, require_pin_name

_PINNED_AT_ONCE = 256  # segments
_PINNED_HASHES_AT_ONCE = 8192 * PAGE_HASH_BYTES  # bytes: tens of milliseconds of the catalog's lock


class Pins:
    """The pins of a store."""

    def __init__(self, catalog: Catalog, room: DiskRoom, workers: Workers) -> None:
        self._root = catalog.root
        self._catalog = catalog
        self._room = room
        self.workers = workers

    @on("reads")
    def names(self) -> Sequence[str]:
        with _errors():
            return pin_names(self._root)

    @on("reads")
    def get(self, name: str) -> Pin | None:
        require_pin_name(name)
        with _errors():
            return read_pin(self._root, name)

    @on("scans")
    def put(self, pin: Pin) -> None:
        """Keep a pin, in several short transactions. From the first one on, segments that are put are pinned."""
        with _errors():
            try:
                for first in range(0, len(pin.hashes), _PINNED_HASHES_AT_ONCE):
                    with self._catalog.writing() as db:
                        enter_pages(db, pin.name, pin.hashes[first : first + _PINNED_HASHES_AT_ONCE])
                with self._catalog.reading() as snapshot:
                    segments = [] if snapshot is None else segments_of(snapshot, pin)
                    num_bytes = 0 if snapshot is None else pinned_bytes_with(snapshot, segments)
                self._room.require_pins_fit(num_bytes)
                write_pin(self._root, pin)
            except BaseException:
                if read_pin(self._root, pin.name) is None:
                    with self._catalog.writing() as db:
                        forget_pin(db, pin.name)
                raise
            for first in range(0, len(segments), _PINNED_AT_ONCE):
                with self._catalog.writing() as db:
                    pin_segments(db, segments[first : first + _PINNED_AT_ONCE])

    @on("scans")
    def delete(self, name: str) -> bool:
        require_pin_name(name)
        with _errors(), self._catalog.writing() as db:
            existed = delete_pin(self._root, name)
            forget_pin(db, name)
        return existed


@contextmanager
def _errors() -> Iterator[None]:
    try:
        with files.os_errors("reading or writing pins"):
            yield
    except FormatError as e:
        raise StoreError("io", f"a pin cannot be read: {e}") from e
