"""Data objects that manifests did without, until no reader can still be using them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from sgl_kvfetch.container.manifest import decode_manifest
from sgl_kvfetch.errors import FormatError, StoreError
from sgl_kvfetch.keys import parse_object_name
from sgl_kvfetch.stores.base import Store


@dataclass(frozen=True, slots=True)
class _Unnamed:
    since_s: float  # when we saw first that the manifest does without it
    modified_s: int | None  # when it was put, if that is known


class Garbage:
    """Deletes data ``grace_s`` after this process learnt that their segment's manifest does without them.

    A reader that was told of an older manifest is done by then. Goes by its own clock alone, not by the store's. What
    belongs to no manifest at all is left to the store: a writer may be about to put one. So are data younger than the
    manifest: another encoder put them, and reads them back, which may take longer than the grace period, before it
    names them.
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
        """How long until the next one may be deleted; None if there is none."""
        if not self._unnamed:
            return None
        return max(0.0, min(u.since_s for u in self._unnamed.values()) + self._grace_s - self._clock())

    def found(self, name: str, modified_s: float | None) -> None:
        """No manifest names this data object. ``modified_s``: see ``ObjectInfo``."""
        modified = None if modified_s is None else int(modified_s)  # HTTP tells whole seconds
        known = self._unnamed.get(name)
        if known is not None and known.modified_s in (None, modified):
            return
        self._unnamed[name] = _Unnamed(self._clock(), modified)

    def in_use(self, names: Iterable[str]) -> None:
        """A manifest names these."""
        for name in names:
            self._unnamed.pop(name, None)

    async def delete_due(self, on_delete: Callable[[str, int], None] = lambda name, num_bytes: None) -> None:
        """Delete what nobody has named for long enough. Raises the first StoreError; the rest stays due, but for what
        failed, which waits for the grace period anew, so that it holds up nothing else.

        ``on_delete`` is told each name and its size.
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
        manifest = await self._store.head(manifest_name)  # first: what is read next is as young or younger
        stored = await self._store.get(manifest_name)
        is_unnamed = False
        if stored is not None:
            with contextlib.suppress(FormatError):  # a newer version's perhaps
                is_unnamed = name not in decode_manifest(stored).data_names
        info = await self._store.head(name) if is_unnamed else None
        if info is None or manifest is None:
            self._unnamed.pop(name, None)
        elif unnamed.modified_s not in (None, int(info.modified_s)):
            self.found(name, info.modified_s)  # put again: some manifest is about to name it
        elif info.modified_s > manifest.modified_s:
            self._unnamed.pop(name, None)
        else:
            if await self._store.delete(name):
                on_delete(name, info.size_bytes)
            self._unnamed.pop(name, None)
