"""Writes the pages that SGLang hands over. They are copied out of the pool on another thread.

SGLang does not say where a node's pages stand in their sequence, which quantising and joining them need. But once it
has queued an offload it keeps the node, which knows its prefix. So an offload begins in the step after that:

    Queued ---> Copying ---> Over

SGLang hands a node over once. Since then, the store may have lost its pages, or another store may have been attached.
So an offload also writes pages before its own that the store is not known to have. Without them, it would not be found.
Windows and states are written with the node that has them, and with it the windows of nodes before it that its own end
needs. Side pages that have the slots of K and V (an indexer's keys, a draft model's KV cache) are written with these.

A prompt may be larger than the write queue, and is computed faster than it is encoded. So pages wait in the pool for
room in the queue, as long as half of the pool is left for other requests, and the next one needs no more than that.
"""

from __future__ import annotations

import itertools
import operator
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

from sgl_kvfetch.engine import DataPlane
from sgl_kvfetch.engine.process import Quantising
from sgl_kvfetch.keys import hash_bytes
from sgl_kvfetch.plugin.device.pools import EnginePools, GuardedSource, ReadSidePage, SlotPages
from sgl_kvfetch.plugin.device.waiting_queue import spare_tokens
from sgl_kvfetch.plugin.weight_updates import Access
from sgl_kvfetch.processes import use_one_thread
from sgl_kvfetch.types import SideKey

_MOST_KNOWN = 1 << 18  # pages


class _StoredPages:
    """The pages that are known to be in the store, the latest 262,144: their hashes, with the names of their pools if
    they are side pages."""

    def __init__(self) -> None:
        self._hashes: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, page_hash: str) -> bool:
        return page_hash in self._hashes

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


@dataclass(frozen=True, slots=True, eq=False)
class Queued:
    """``sides``: the node's side pages, each with its pool, the hash of its page, and its slots."""

    sides: Sequence[tuple[str, str, torch.Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class Copying:
    source: GuardedSource


@dataclass(frozen=True, slots=True)
class Over:
    """``is_whole``: whether all pages were queued for writing. ``dropped``: the hashes of those that were not."""

    is_whole: bool
    dropped: Sequence[str] = ()


@dataclass(slots=True, eq=False)
class _Offload:
    state: Queued | Copying | Over


class Offloads:
    """The offloads that SGLang has queued and not yet seen completed, in its order."""

    def __init__(self, pages: SlotPages, pools: EnginePools, *, is_writer: bool) -> None:
        """``is_writer`` is false if another rank has the same pages and writes them."""
        self._pages = pages
        self._pools = pools
        self._is_writer = is_writer
        self._to: tuple[DataPlane, Access] | None = None  # what is attached
        self._queue: deque[_Offload] = deque()
        self._stored = _StoredPages()  # known to this rank alone: it decides only what is copied
        self._num_losses = 0
        self._has_spare_slots = True
        # A daemon, which the process's end does not wait for: a copy may wait for the store, until `close`.
        self._copies: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=_make_copies, args=(self._copies,), name="kvfetch-copy", daemon=True).start()

    def connect(self, plane: DataPlane, access: Access) -> None:
        """Write to a store from now on."""
        self._to = plane, access
        self._num_losses = plane.num_losses

    def disconnect(self) -> None:
        """Write no more. What is under way has failed."""
        self.stop_reading()
        for offload in self._queue:
            if not isinstance(offload.state, Over):
                offload.state = Over(False)
        self._stored.clear()
        self._to = None

    def stop_reading(self) -> None:
        """End all copies. Nothing reads from the pool afterwards."""
        for offload in self._queue:
            if isinstance(offload.state, Copying):
                offload.state.source.close()

    def add(self, sides: Iterable[PoolTransfer] = ()) -> None:
        """Queue an offload of the node that SGLang hands over now. ``sides``: its side pages."""
        self._queue.append(_Offload(Queued([side for transfer in sides for side in self._side_pages(transfer)])))

    def loaded(self, sides: Iterable[PoolTransfer]) -> None:
        """Record that side pages came from the store."""
        self._stored.add(_side_hash(*side[:2]) for transfer in sides for side in self._side_pages(transfer))

    def _side_pages(self, transfer: PoolTransfer) -> Iterable[tuple[str, str, torch.Tensor]]:
        name, keys = str(transfer.name), transfer.keys or ()
        slots = transfer.device_indices.split(self._pools.side_buffers[name].page_size)
        return ((name, key, each) for key, each in zip(keys, slots, strict=True))

    def looked_up(self, hashes: Sequence[str], num_found: int) -> None:
        """Record that the store has so many of these pages, from the first on."""
        self._stored.add(hashes[:num_found])
        others = hashes[num_found:]
        self._stored.remove(
            [*others, *(_side_hash(name, each) for name in self._pools.side_buffers for each in others)]
        )

    def forget_stored(self) -> None:
        """Record that the store may have no pages."""
        self._stored.clear()

    def step(self, tree: Any, wanted_tokens: Callable[[], float]) -> None:
        """Begin what was queued. ``tree``: SGLang's radix cache. ``wanted_tokens`` returns how many tokens of the pool
        others wait for."""
        if not self._queue:
            return
        spare = spare_tokens(tree)
        leaves_half = spare >= tree.token_to_kv_pool_allocator.size // 2
        self._has_spare_slots = leaves_half and spare > wanted_tokens()
        if isinstance(self._queue[-1].state, Queued):
            for offload, pending in zip(self._queue, tree.linker.pending_offloads, strict=True):
                if isinstance(offload.state, Queued):
                    self._begin(offload, offload.state, tree, pending.lock_node_id)

    def _begin(self, offload: _Offload, queued: Queued, tree: Any, node: Any) -> None:
        """Begin to write those pages of a node that are not stored yet."""
        assert self._to is not None
        plane, access = self._to
        if plane.num_losses != self._num_losses:
            # It is not known which pages are lost. Those that are not are recognised before they are encoded again.
            self._num_losses = plane.num_losses
            self._stored.clear()
        if not access.writes or not self._is_writer:
            offload.state = Over(access.writes)
            return
        path = [*tree.tree_core.get_prefix_hash_values(node), *tree.tree_core.get_hash_values(node)]
        size, slots = self._pages.geometry.page_size, tree.path_device_indices(node)
        new = self._stored.range_of_others(path)
        sides = self._new_sides(queued, path, tree.tree_core, node)
        if sides:
            pages = [page for _, page in sides]
            new = range(min([*pages, *new[:1]]), max([*pages, *new[-1:]]) + 1)
        if not new:
            offload.state = Over(True)
            return
        hashes = path[new.start : new.stop]
        hashes_of_sides = [(page - new.start, _side_hash(name, path[page])) for name, page in sides]
        self._stored.add([*hashes, *(each for _, each in hashes_of_sides)])
        slots = slots[new.start * size : new.stop * size]
        reads = self._pages.open_reads(slots)
        numbers, side_reads = self._open_sides(sides)
        for name in self._pools.following:
            numbers |= {(name, page): number for number, page in enumerate(new)}
            side_reads[name] = self._pages.open_side_reads(self._pools.side_buffers[name], slots)
        source = GuardedSource(reads, side_reads)
        rows, offload.state = source.num_rows, Copying(source)
        write = partial(
            plane.write,
            new.start,
            hash_bytes([path[new.start - 1]])[0] if new.start else None,
            hash_bytes(hashes),
            range(len(hashes)),
            source.read_into,
            {(name, page - new.start): partial(source.read_side, name, i) for (name, page), i in numbers.items()},
            quantising=Quantising(rows, partial(source.quantise, new.start)) if rows else None,
            may_wait=lambda: self._has_spare_slots and not source.is_closed,  # SGLang keeps their slots that long
        )
        self._copies.put(partial(_copy, write, offload, hashes, hashes_of_sides))

    def _new_sides(self, queued: Queued, path: Sequence[str], core: Any, node: Any) -> dict[SideKey, torch.Tensor]:
        """Return the slots of side pages that are to be written, by pool and page of ``path``. SGLang locks a node with
        the window at its end, also where that begins in nodes before it."""
        if not self._pools.handed_over:
            return {}
        position = {page_hash: page for page, page_hash in enumerate(path)}
        found = {(name, position[page_hash]): slots for name, page_hash, slots in queued.sides}
        for page, slots in self._pools.window_pages(core, node, len(path), self._pages.geometry.page_size):
            found.setdefault((PoolName.SWA.value, page), slots)
        new = [key for key in sorted(found) if _side_hash(key[0], path[key[1]]) not in self._stored]
        return {key: found[key] for key in new}

    def _open_sides(self, sides: Mapping[SideKey, torch.Tensor]) -> tuple[dict[SideKey, int], dict[str, ReadSidePage]]:
        """Open side pages for reads, pool by pool. Return their numbers there, and how they are read."""
        numbers: dict[SideKey, int] = {}
        reads = {}
        for name, group in itertools.groupby(sides, key=operator.itemgetter(0)):
            keys = list(group)
            numbers |= {key: number for number, key in enumerate(keys)}
            slots = torch.cat([sides[key] for key in keys])
            reads[name] = self._pages.open_side_reads(self._pools.side_buffers[name], slots)
        return numbers, reads

    @property
    def num_completed(self) -> int:
        """How many have ended, from the first on."""
        return next((i for i, each in enumerate(self._queue) if not isinstance(each.state, Over)), len(self._queue))

    def pop(self) -> bool:
        """Remove the first one, which has ended. Return whether its pages were queued for writing."""
        over = self._queue.popleft().state
        assert isinstance(over, Over)
        self._stored.remove(over.dropped)
        return over.is_whole

    def drop_all(self) -> None:
        """Forget all offloads, and end their copies: SGLang forgets them, too."""
        self.stop_reading()
        self._queue.clear()
        self._stored.clear()

    def close(self) -> None:
        self.drop_all()
        self._copies.put(None)


def _side_hash(name: str, page_hash: str) -> str:
    return f"{name} {page_hash}"


def _make_copies(copies: SimpleQueue[Callable[[], None] | None]) -> None:
    use_one_thread()
    while (copy := copies.get()) is not None:
        copy()


def _copy(write: Callable[[], int], offload: _Offload, hashes: Sequence[str], sides: Sequence[tuple[int, str]]) -> None:
    """Copy pages out of the pool and queue them for writing, by ``write``, which returns how many were queued.
    ``sides``: the side pages' pages, and what `_side_hash` says of them."""
    num_queued = write()
    dropped = [*hashes[num_queued:], *(each for page, each in sides if page >= num_queued)]
    offload.state = Over(num_queued == len(hashes), dropped)
