"""Open objects for reading, without a thread where that does not wait for the disk."""

from __future__ import annotations

import time
from collections import OrderedDict

from sgl_kvfetch.directory import LocalStore, OpenObject, open_object, os_errors

_RECENT_S = 5.0
_MAX_RECENT = 4096


class Opener:
    """A client reads a large object in many ranges. Going through a thread for each would cost as much as all else.

    So a thread opens an object only if that has not happened for some seconds: then the kernel knows where it is. Only
    the thread tells the store that the object is in use.
    """

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self._recent: OrderedDict[str, float] = OrderedDict()  # when a thread opened it, oldest first

    async def open(self, name: str) -> OpenObject | None:
        """Open an object; the caller closes it. None if it is missing. Raises StoreError."""
        now_s = time.monotonic()
        while self._recent and next(iter(self._recent.values())) < now_s - _RECENT_S:
            self._recent.popitem(last=False)
        if name in self._recent:
            with os_errors(f"opening {name}"):
                return open_object(self._store.root, name)
        opened = await self._store.open_object(name)
        if opened is not None and len(self._recent) < _MAX_RECENT:
            self._recent[name] = now_s
            self._recent.move_to_end(name)
        return opened
