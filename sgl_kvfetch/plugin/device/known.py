"""What device mode knows of pages that are in the store."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

_MAX_PAGES = 1 << 18


class KnownPages:
    """Hashes of pages that need not be written: the latest 262,144."""

    def __init__(self) -> None:
        self._hashes: OrderedDict[str, None] = OrderedDict()

    def add_hashes(self, hashes: Iterable[str]) -> None:
        for page_hash in hashes:
            self._hashes[page_hash] = None
            self._hashes.move_to_end(page_hash)
        while len(self._hashes) > _MAX_PAGES:
            self._hashes.popitem(last=False)

    def remove_hashes(self, hashes: Iterable[str]) -> None:
        for page_hash in hashes:
            self._hashes.pop(page_hash, None)

    def clear(self) -> None:
        self._hashes.clear()

    def unknown_range(self, hashes: Sequence[str], start: int) -> range:
        """Return the range from the first to the last unknown page, of the pages from ``start`` on."""
        unknown = [i for i in range(start, len(hashes)) if hashes[i] not in self._hashes]
        return range(unknown[0], unknown[-1] + 1) if unknown else range(0)
