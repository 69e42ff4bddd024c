"""Fill the write queue of a data plane, as pages do that are on their way."""

from __future__ import annotations

from collections.abc import Callable

from sgl_kvfetch.engine import DataPlane


def fill_queue(plane: DataPlane) -> Callable[[], None]:
    """Leave no room for pages. Return what frees it all."""
    room = plane._peer._room
    offset = room.allocate(room.num_bytes, 0)
    assert offset is not None
    return lambda: room.free(offset)
