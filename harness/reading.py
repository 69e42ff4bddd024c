"""Read a part of an object as a fetch does: into memory of the caller."""

from __future__ import annotations

from sgl_kvfetch.stores import Store


async def read_bytes(store: Store, name: str, start: int, length: int) -> bytes | None:
    """Return the bytes, or None if the object is missing. What `Store.read` says of its pieces must add up."""
    into, pieces = bytearray(length), list[int]()
    is_there = await store.read(name, start, [memoryview(into)], pieces.append)
    assert sum(pieces) == (length if is_there else 0)
    return bytes(into) if is_there else None
