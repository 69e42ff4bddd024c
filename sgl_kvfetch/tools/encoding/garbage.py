"""Delete data objects that manifests no longer name, when no reader can still be using them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from sgl_kvfetch.codec import decode_manifest
from sgl_kvfetch.errors import FormatError, StoreError
from sgl_kvfetch.keys import parse_object_name
from sgl_kvfetch.stores import Store


@dataclass(frozen=True, slots=True)
class _Unnamed:
    since_s: float  # when this process first saw that no manifest names it
    modified_s: int | None  # when it was put, if known


class Garbage:
    """Deletes data ``grace_s`` after this process learnt that the manifest of their segment does not name them.

    By then, readers of an older manifest are done. The grace period uses this process's clock, not the store's. Two
    kinds of data are left to the store. Data without any manifest: a writer may be about to put one. Data younger than
    the manifest: another encoder put it, and may read it back for longer than the grace period before it puts a
    manifest that names it.
    """

    def __init__(self, store: Store, grace_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._grace_s = grace_s
        self._clock = clock
        self._unnamed: dict[str, _Unnamed] = {}

    def __len__(self) -> int:
        return len(self._unnamed)

    @property
    def due_in_s(self) -> float | None:
        """Seconds until the next object may be deleted; None if there is none."""
        if not self._unnamed:
            return None
        return max(0.0, min(u.since_s for u in self._unnamed.values()) + self._grace_s - self._clock())

    def found(self, name: str, modified_s: float | None) -> None:
        """Record that no manifest names this data object. ``modified_s``: see ``ObjectInfo``."""
        modified = None if modified_s is None else int(modified_s)  # HTTP has whole seconds
        known = self._unnamed.get(name)
        if known is not None and known.modified_s in (None, modified):
            return
        self._unnamed[name] = _Unnamed(self._clock(), modified)

    def in_use(self, names: Iterable[str]) -> None:
        """Record that manifests name these data objects."""
        for name in names:
            self._unnamed.pop(name, None)

    async def delete_due(self, on_delete: Callable[[str, int], None] = lambda name, num_bytes: None) -> None:
        """Delete objects that no manifest has named for ``grace_s``. ``on_delete`` gets each name and size in bytes.

        Raises the first StoreError. The object that failed waits for another grace period; the others stay due.
        """
        limit = self._clock() - self._grace_s
        for name, unnamed in list(self._unnamed.items()):
            if unnamed.since_s <= limit:
                try:
                    await self._delete(name, unnamed, on_delete)
                except StoreError:
                    self._unnamed[name] = _Unnamed(self._clock(), unnamed.modified_s)
                    raise

    async def _delete(self, name: str, unnamed: _Unnamed, on_delete: Callable[[str, int], None]) -> None:
        manifest_name = parse_object_name(name).segment.manifest_name
        manifest = await self._store.head(manifest_name)  # first, so that the content read next is not older
        stored = await self._store.get(manifest_name)
        is_unnamed = False
        if stored is not None:
            with contextlib.suppress(FormatError):  # perhaps a newer version wrote it
                is_unnamed = name not in decode_manifest(stored).data_names
        info = await self._store.head(name) if is_unnamed else None
        if info is None or manifest is None:
            self._unnamed.pop(name, None)
        elif unnamed.modified_s not in (None, int(info.modified_s)):
            self.found(name, info.modified_s)  # it was put again: a manifest may soon name it
        elif info.modified_s > manifest.modified_s:
            self._unnamed.pop(name, None)
        else:
            if await self._store.delete(name):
                on_delete(name, info.size_bytes)
            self._unnamed.pop(name, None)
