"""Writes the pages that SGLang hands over. They are copied out of the pool on another thread.

SGLang does not say where a node's pages stand in their sequence, which quantising and joining them need. But once it
has queued an offload it keeps the node, which knows its prefix. So an offload begins in the step after that.

SGLang hands a node over once. Since then, the store may have lost its pages, or another store may have been attached.
So an offload also writes pages before its own that the store is not known to have. Without them, it would not be found.

A prompt may be larger than the write queue, and is computed faster than it is encoded. So pages wait in the pool for
room in the queue, as long as half of the pool is left for other requests, and the next one needs no more than that.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

from sgl_kvfetch.openmp import use_one_thread
from sgl_kvfetch.plane import DataPlane, Quantising
from sgl_kvfetch.plugin.device.pages import GuardedSource, SlotPages
from sgl_kvfetch.plugin.page_hashes import hash_bytes
from sgl_kvfetch.plugin.waiting_queue import spare_tokens
from sgl_kvfetch.plugin.weight_updates import Access

_MOST_KNOWN = 1 << 18  # pages


class _StoredPages:
    """The hashes of pages that are known to be in the store: the latest 262,144."""

    def __init__(self) -> None:
        self._hashes: OrderedDict[str, None] = OrderedDict()

    def add(self, hashes: Iterable[str]) -> None:
        for page_hash in hashes:
            self._hashes[page_hash] = None
            self._hashes.move_to_end(page_hash)
        while len(self._hashes) > _MOST_KNOWN:
            self._hashes.popitem(last=False)

    def remove(self, hashes: Iterable[str]) -> None:
        for page_hash in hashes:
            self._hashes.pop(page_hash, None)

    def clear(self) -> None:
        self._hashes.clear()

    def range_of_others(self, hashes: Sequence[str]) -> range:
        """Return the range from the first to the last page that is not known to be stored."""
        others = [i for i, page_hash in enumerate(hashes) if page_hash not in self._hashes]
        return range(others[0], others[-1] + 1) if others else range(0)


@dataclass(slots=True, eq=False)
class _Offload:
    """``result``: whether all pages were queued for writing; None before that is known. ``dropped``: the hashes of
    the pages that were not."""

    is_begun: bool = False
    result: bool | None = None
    dropped: Sequence[str] = ()
    source: GuardedSource | None = None


class Offloads:
    """The offloads that SGLang has queued and not yet seen completed, in its order."""

    def __init__(self, pages: SlotPages, *, is_writer: bool) -> None:
        """``is_writer`` is false if another rank has the same pages and writes them."""
        self._pages = pages
        self._is_writer = is_writer
        self._plane: DataPlane | None = None
        self._access: Access | None = None
        self._queue: deque[_Offload] = deque()
        self._stored = _StoredPages()  # known to this rank alone: it decides only what is copied
        self._num_losses = 0
        self._has_spare_slots = True
        # A daemon, which the process's end does not wait for: a copy may wait for the store, until `close`.
        self._copies: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=_make_copies, args=(self._copies,), name="kvfetch-copy", daemon=True).start()

    def connect(self, plane: DataPlane, access: Access) -> None:
        """Write to a store from now on."""
        self._plane, self._access = plane, access
        self._num_losses = plane.num_losses

    def disconnect(self) -> None:
        """Write no more. What is under way has failed."""
        self.stop_reading()
        for offload in self._queue:
            offload.is_begun, offload.result = True, bool(offload.result)
        self._stored.clear()
        self._plane = self._access = None

    def stop_reading(self) -> None:
        """End all copies. Nothing reads from the pool afterwards."""
        for offload in self._queue:
            if offload.source is not None:
                offload.source.close()

    def add(self) -> None:
        """Queue an offload of the node that SGLang hands over now."""
        self._queue.append(_Offload())

    def looked_up(self, hashes: Sequence[str], num_found: int) -> None:
        """Note that the store has so many of these pages, from the first on."""
        self._stored.add(hashes[:num_found])
        self._stored.remove(hashes[num_found:])

    def forget_stored(self) -> None:
        """Note that the store may have no pages."""
        self._stored.clear()

    def step(self, tree: Any, wanted_tokens: Callable[[], float]) -> None:
        """Begin what was queued. ``tree``: SGLang's radix cache. ``wanted_tokens`` returns how many tokens of the pool
        others wait for."""
        if not self._queue:
            return
        spare = spare_tokens(tree)
        leaves_half = spare >= tree.token_to_kv_pool_allocator.size // 2
        self._has_spare_slots = leaves_half and spare > wanted_tokens()
        if not self._queue[-1].is_begun:
            for offload, pending in zip(self._queue, tree.linker.pending_offloads, strict=True):
                if not offload.is_begun:
                    offload.is_begun = True
                    self._begin(offload, tree, pending.lock_node_id)

    def _begin(self, offload: _Offload, tree: Any, node: Any) -> None:
        assert self._plane is not None
        assert self._access is not None
        if self._plane.num_losses != self._num_losses:
            # It is not known which pages are lost. Those that are not are recognised before they are encoded again.
            self._num_losses = self._plane.num_losses
            self._stored.clear()
        if not self._access.writes or not self._is_writer:
            offload.result = self._access.writes
            return
        path = [*tree.tree_core.get_prefix_hash_values(node), *tree.tree_core.get_hash_values(node)]
        new = self._stored.range_of_others(path)
        if not new:
            offload.result = True
            return
        hashes = path[new.start : new.stop]
        self._stored.add(hashes)
        size = self._pages.geometry.page_size
        slots = tree.path_device_indices(node)[new.start * size : new.stop * size]
        offload.source = GuardedSource(self._pages.open_reads(slots))
        rows = offload.source.num_rows
        write = partial(
            self._plane.write,
            new.start,
            hash_bytes([path[new.start - 1]])[0] if new.start else None,
            hash_bytes(hashes),
            range(len(hashes)),
            offload.source.read,
            quantising=Quantising(rows, partial(offload.source.quantise, new.start)) if rows else None,
            may_wait=partial(self._may_wait, offload.source),
        )
        self._copies.put(partial(_copy, write, offload, hashes))

    def _may_wait(self, source: GuardedSource) -> bool:
        """Return whether pages may wait in the pool for room in the write queue. SGLang keeps their slots that long."""
        return self._has_spare_slots and not source.is_closed

    @property
    def num_completed(self) -> int:
        """How many have ended, from the first on."""
        return next((i for i, each in enumerate(self._queue) if each.result is None), len(self._queue))

    def pop(self) -> bool:
        """Remove the first one, which has ended. Return whether its pages were queued for writing."""
        offload = self._queue.popleft()
        assert offload.result is not None
        self._stored.remove(offload.dropped)
        return offload.result

    def drop_all(self) -> None:
        """Forget all offloads, and end their copies: SGLang forgets them, too."""
        self.stop_reading()
        self._queue.clear()
        self._stored.clear()

    def close(self) -> None:
        self.drop_all()
        self._copies.put(None)


def _make_copies(copies: SimpleQueue[Callable[[], None] | None]) -> None:
    use_one_thread()
    while (copy := copies.get()) is not None:
        copy()


def _copy(write: Callable[[], int], offload: _Offload, hashes: Sequence[str]) -> None:
    """Copy pages out of the pool and queue them for writing, by ``write``, which returns how many were queued."""
    num_queued = write()
    offload.dropped = hashes[num_queued:]
    offload.result = num_queued == len(hashes)
