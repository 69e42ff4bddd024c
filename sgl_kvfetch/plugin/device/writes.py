"""Copies and writes the pages that SGLang has put into the tree and the store lacks. Runs on the scheduler's thread."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from sgl_kvfetch import metrics
from sgl_kvfetch.plugin.device.backend import Copied, DeviceBackend, SlotRun
from sgl_kvfetch.plugin.device.board import Board
from sgl_kvfetch.plugin.device.known import KnownPages
from sgl_kvfetch.plugin.device.pages import GuardedSource

_MAX_COPIES = 64  # waiting or running copies, whose pages are locked


@dataclass(slots=True, eq=False)
class _Copy:
    run: SlotRun
    lock: Any  # SGLang's TreeLock on the pages
    source: GuardedSource | None = None  # closing it stops reading the pages


class Writes:
    """Tracks the pages that are being copied out of the pool. Their nodes are locked until the copy ends."""

    def __init__(self, cache: Any, backend: DeviceBackend, board: Board, known: KnownPages) -> None:
        """``cache``: SGLang's ``UnifiedRadixCache``."""
        self._cache = cache
        self._backend = backend
        self._board = board
        self._known = known
        self._page_size: int = cache.page_size
        self._num_seen: dict[str, int] = {}  # pages already handled, by request
        self._copies: dict[_Copy, None] = {}

    def inserted(self, rid: str, node: Any) -> None:
        """Write the pages on the path to ``node``, which is now in the tree, unless the store is known to have them."""
        if not self._backend.access.writes or self._cache.is_root(node):
            return
        core = self._cache.tree_core
        hashes: list[str] = core.get_prefix_hash_values(node) + core.get_hash_values(node)
        pages = self._known.unknown_range(hashes, self._num_seen.get(rid, 0))
        self._num_seen[rid] = len(hashes)
        if not pages:
            return
        if len(self._copies) >= _MAX_COPIES:
            metrics.WRITTEN_PAGES.labels("dropped_full").inc(len(pages))
            return
        slots = self._cache.path_device_indices(node)
        assert slots.numel() == len(hashes) * self._page_size, (slots.numel(), len(hashes))
        run = SlotRun(
            first_page=pages.start,
            previous_hash=hashes[pages.start - 1] if pages.start else None,
            page_hashes=hashes[pages.start : pages.stop],
            slots=slots[pages.start * self._page_size : pages.stop * self._page_size],
        )
        self._known.add_hashes(run.page_hashes)
        copy = _Copy(run, self._cache.lock(node))
        self._copies[copy] = None
        copy.source = self._backend.copy_pages(self._board.open_ticket(partial(self._copied, copy)), run)

    def _copied(self, copy: _Copy, copied: Copied) -> None:
        del self._copies[copy]
        self._known.remove_hashes(copy.run.page_hashes[copied.num_pages :])
        if not copied.is_intact:
            # It is not known which pages are lost. Those that are not are recognised before they are encoded again.
            self._known.clear()
        self._cache.unlock(copy.lock)

    def forget_request(self, rid: str) -> None:
        """Forget a request that is over."""
        self._num_seen.pop(rid, None)

    def drop_all(self) -> None:
        """End all copies. Nothing reads from the pool afterwards."""
        for copy in self._copies:
            assert copy.source is not None
            copy.source.close()
            self._cache.unlock(copy.lock)
        self._copies.clear()
        self._known.clear()  # the results of the copies are not reported any more
        self._num_seen.clear()
