"""Writes the pages that SGLang hands over. They are copied out of the pool on another thread.

SGLang does not say where a node's pages stand in their sequence, which quantising and joining them need. But once it
has queued an offload it keeps the node, which knows its prefix. So an offload begins in the step after that.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from sgl_kvfetch import metrics
from sgl_kvfetch.log import LimitedLogger
from sgl_kvfetch.openmp import use_one_thread
from sgl_kvfetch.plane import DataPlane
from sgl_kvfetch.plugin.device.known import KnownPages
from sgl_kvfetch.plugin.device.pages import GuardedSource, SlotPages
from sgl_kvfetch.plugin.page_hashes import hash_bytes
from sgl_kvfetch.plugin.weight_updates import Access

logger = logging.getLogger(__name__)
_limited = LimitedLogger(logger)


@dataclass(slots=True, eq=False)
class _Offload:
    """``result``: whether the pages were queued for writing; None before that is known. ``queued``: their hashes."""

    hashes: Sequence[str]
    slots: torch.Tensor
    is_begun: bool = False
    result: bool | None = None
    queued: Sequence[str] = ()
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
        self._known = KnownPages()  # of this rank alone: it decides only what is copied
        self._num_losses = 0
        self._copy_pool = ThreadPoolExecutor(1, "kvfetch-copy", use_one_thread)

    def connect(self, plane: DataPlane, access: Access) -> None:
        """Write to a store from now on."""
        self._plane, self._access = plane, access
        self._num_losses = plane.num_losses

    def disconnect(self) -> None:
        """Write no more. What is under way has failed."""
        self.stop_reading()
        for offload in self._queue:
            offload.is_begun, offload.result = True, bool(offload.result)
        self._known.clear()
        self._plane = self._access = None

    def stop_reading(self) -> None:
        """End all copies. Nothing reads from the pool afterwards."""
        for offload in self._queue:
            if offload.source is not None:
                offload.source.close()

    def add(self, hashes: Sequence[str], slots: torch.Tensor) -> None:
        self._queue.append(_Offload(hashes, slots))

    def looked_up(self, hashes: Sequence[str], num_found: int) -> None:
        """Note that the store has so many of these pages, from the first on."""
        self._known.add_hashes(hashes[:num_found])
        self._known.remove_hashes(hashes[num_found:])

    def forget_stored(self) -> None:
        """Note that the store may have no pages."""
        self._known.clear()

    def step(self, tree: Any) -> None:
        """Begin what was queued. ``tree``: SGLang's radix cache."""
        if self._queue and not self._queue[-1].is_begun:
            for offload, pending in zip(self._queue, tree.linker.pending_offloads, strict=True):
                if not offload.is_begun:
                    offload.is_begun = True
                    self._begin(offload, tree.tree_core, pending.lock_node_id)

    def _begin(self, offload: _Offload, tree_core: Any, node: Any) -> None:
        assert self._plane is not None
        assert self._access is not None
        new = self._known.unknown_range(offload.hashes, 0)
        if not new or not self._access.writes or not self._is_writer:
            offload.result = True
            return
        path = [*tree_core.get_prefix_hash_values(node), *tree_core.get_hash_values(node)]
        first = path.index(offload.hashes[0]) + new.start
        size = self._pages.geometry.page_size
        slots = offload.slots[new.start * size : new.stop * size]
        offload.source = GuardedSource(self._pages.open_reads(slots))
        previous = path[first - 1] if first else None
        hashes = offload.hashes[new.start : new.stop]
        write = partial(
            self._plane.write,
            first,
            None if previous is None else hash_bytes([previous])[0],
            hash_bytes(hashes),
            self._pages.page_indices(slots),
            offload.source.read,
            read_quantised=partial(offload.source.quantise, first),
        )
        self._copy_pool.submit(_copy, write, offload, hashes)

    @property
    def num_completed(self) -> int:
        """How many have ended, from the first on."""
        return next((i for i, each in enumerate(self._queue) if each.result is None), len(self._queue))

    def pop(self) -> bool:
        """Remove the first one, which has ended. Return whether its pages were queued for writing."""
        offload = self._queue.popleft()
        assert offload.result is not None
        if self._plane is not None and self._plane.num_losses != self._num_losses:
            # It is not known which pages are lost. Those that are not are recognised before they are encoded again.
            self._num_losses = self._plane.num_losses
            self._known.clear()
        self._known.add_hashes(offload.queued)
        return offload.result

    def drop_all(self) -> None:
        """Forget all offloads, and end their copies: SGLang forgets them, too."""
        self.stop_reading()
        self._queue.clear()
        self._known.clear()

    def close(self) -> None:
        self.drop_all()
        self._copy_pool.shutdown(wait=False, cancel_futures=True)


def _copy(write: Callable[[], int], offload: _Offload, hashes: Sequence[str]) -> None:
    """Copy pages out of the pool and queue them for writing, by ``write``, which returns how many were queued."""
    num_queued = 0
    try:
        num_queued = write()
    except Exception:
        logger.exception("kvfetch copy failed")
    finally:
        if dropped := len(hashes) - num_queued:
            metrics.WRITTEN_PAGES.labels("dropped_full").inc(dropped)
            _limited.warning("full", f"{dropped} pages not written: the queue is full, or the cache was flushed")
        offload.queued = hashes[:num_queued]
        offload.result = not dropped
