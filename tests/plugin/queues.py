"""Fill the write queue of a data plane, as pages do that are on their way."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sgl_kvfetch.engine import DataPlane


def fill_queue(plane: DataPlane) -> Callable[[], None]:
    """Leave no room for pages. Return what frees it all."""
    room = plane._peer._room
    offset = room.allocate(room.num_bytes, 0)
    assert offset is not None
    return lambda: room.free(offset)


def note_refusals(plane: DataPlane, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which the size of each piece is added that there is no room for."""
    room, refusals = plane._peer._room, []
    allocate = room.allocate

    def noted(num_bytes: int, timeout_s: float | None = None) -> int | None:
        offset = allocate(num_bytes, timeout_s)
        if offset is None:
            refusals.append(num_bytes)
        return offset

    monkeypatch.setattr(room, "allocate", noted)
    return refusals
