"""Bytes that lie in several places, as an encoder leaves the chunks of a data object.

A data object is named by the digest of all its bytes, and is sent from its first byte to its last: neither needs them
in one place. Joining them copies each byte once more, into memory that the kernel clears first.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

from sgl_kvfetch.codec.bitstream import _ans


class Pieces:
    """Pieces of bytes, one after another. They must not change."""

    __slots__ = ("_num_bytes", "views")

    def __init__(self, pieces: Iterable[bytes | memoryview]) -> None:
        self.views = tuple(memoryview(piece).cast("B") for piece in pieces)
        self._num_bytes = sum(map(len, self.views))

    def __len__(self) -> int:
        return self._num_bytes

    def __getitem__(self, part: slice) -> bytes:
        """Return a copy of some bytes. ``part`` has no step."""
        start, end, step = part.indices(self._num_bytes)
        assert step == 1, part
        found = []
        for view in self.views:
            if start < len(view) and end > 0:
                found.append(view[max(0, start) : end])
            start, end = start - len(view), end - len(view)
        return b"".join(found)

    def joined(self) -> bytes:
        """Return a copy of all bytes, in huge pages. Releases the GIL."""
        return _ans.join(self.views)

    def hexdigest(self) -> str:
        """Return their xxh3-128, which names a data object."""
        hasher = xxhash.xxh3_128()
        for view in self.views:
            hasher.update(view)
        return hasher.hexdigest()


Content = bytes | Pieces  # of an object that is to be stored


def views_of(content: Content) -> tuple[memoryview, ...]:
    return content.views if isinstance(content, Pieces) else (memoryview(content),)


def bytes_of(content: Content) -> bytes:
    """Return a content in one place, for what takes no pieces."""
    return content.joined() if isinstance(content, Pieces) else content
