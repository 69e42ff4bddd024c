"""SGLang's pools on the device, seen as pages: that of K and V, and its side pools.

Two kinds of side pools are there. SGLang's tree knows the pages of windows and states, which have slots of their own,
and says in each transfer which ones are meant. An indexer's keys and a draft model's KV cache have the slots of K and
V, and SGLang's tree does not know them: whoever takes a page of K and V takes theirs, too (`EnginePools.following`).

**What is staged is loaded into them** by a `Loader`, layer by layer, while the batch that needs it already computes.
`ValueLoader` copies values, and `gpu_loads` has the loader for GPUs.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    HybridLinearKVPool,
    MHATokenToKVPool,
    MiniMaxSparseKVPool,
    MLATokenToKVPool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from sgl_kvfetch import metrics
from sgl_kvfetch.codec import CellPlace, Device, Quantiser, why_no_gpu
from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.plugin.host.side_pools import PACKED, SidePools
from sgl_kvfetch.processes import use_one_thread
from sgl_kvfetch.protocol import StagedValues, tensors_in
from sgl_kvfetch.protocol.arena import consecutive_runs
from sgl_kvfetch.types import TENSORS, KVGeometry, TensorName, dtype_name

logger = logging.getLogger(__name__)

_COMPONENT_POOLS = {
    ComponentType.FULL: PoolName.KV,
    ComponentType.SWA: PoolName.SWA,
    ComponentType.MAMBA: PoolName.MAMBA,
}


# Returns a copy of the bytes of a side page, uint8 ``(bytes,)``. Pages are counted from the first of those opened.
ReadSidePage = Callable[[int], torch.Tensor]
KVBuffers = Mapping[TensorName, Sequence[torch.Tensor]]  # of K and of V: one a layer, ``(slots, heads, dim)``


class PageRun(ABC):
    """A run of whole pages of a pool, which are read. They are counted from the run's first."""

    @abstractmethod
    def read_into(self, pages: Sequence[int], memory: torch.Tensor, offset: int) -> None:
        """Copy all layers and heads of ``pages``, as `process.ReadPages` says."""

    num_rows: Sequence[int] = ()  # integers of a token, by cell in storage order; none if it quantises nothing

    def quantise(
        self, first_page: int, pages: range, memory: torch.Tensor, offset: int
    ) -> Sequence[torch.Tensor] | None:
        """Quantise ``pages`` into shared memory, as `process.Quantising` says. None if they are to be read as they
        are. ``first_page``: the run's position in the sequence."""
        return None


class SlotPages(ABC):
    """The pages of SGLang's pool, in place. A page's slots are consecutive. MLA as in `HostPages`. ``device``: the GPU
    that has the pool."""

    device: Device | None = None

    def __init__(self, pool: Any, page_size: int) -> None:
        """``pool``: an ``MHATokenToKVPool`` or ``MLATokenToKVPool``. Raises UnsupportedError for another kind of pool,
        for a quantised one, and for a layout other than ``nhd``."""
        self._buffers = _kv_buffers(pool)
        k, v = self._buffers["k"][0], self._buffers["v"][0]  # (slots, heads, dim)
        self._dtype = pool.dtype
        self._raw_dtype = k.dtype
        self.first_layer: int = pool.start_layer
        self.geometry = KVGeometry(
            num_layers=len(self._buffers["k"]),
            num_heads=k.shape[1],
            k_head_dim=k.shape[2],
            v_head_dim=v.shape[2],
            page_size=page_size,
            dtype=dtype_name(pool.dtype),
        )

    def prepare(self, quantiser: Quantiser, places: Iterable[CellPlace]) -> None:  # noqa: B027, for GPUs
        """Upload what restoring cells of these places needs, and compile the kernels, which takes seconds."""

    def prepare_writes(self, quantiser: Quantiser, places: Iterable[CellPlace]) -> None:  # noqa: B027, for GPUs
        """The same for `PageRun.quantise`."""

    def log_memory(self) -> None:  # noqa: B027, for GPUs
        """Log how much of the device's memory is in use beside SGLang's."""

    def release(self) -> None:  # noqa: B027, for GPUs
        """Free what `prepare` and `prepare_writes` have allocated. Call this when nothing is read any more."""

    @abstractmethod
    def open_reads(self, slots: torch.Tensor) -> PageRun:
        """Return the pages of some slots for reads, ordered after everything that the model was given to compute so
        far. Call this on the scheduler's thread when slots were handed over. ``slots``: one per token."""

    @abstractmethod
    def open_side_reads(self, buffers: SideBuffers, slots: torch.Tensor) -> ReadSidePage:
        """Do the same for pages of a side pool. ``slots``: theirs, one page after another."""

    def wait_until_unused(self, timeout_s: float) -> bool:
        """Wait until no work that was launched uses the pool, for ``timeout_s`` at most. Return whether that is so.
        Call this after all sources were closed."""
        return True


class DevicePages(SlotPages):
    """The pages of a pool on the CPU. The model computes on the thread that hands pages over, so earlier computation
    is complete. On a GPU, reads and writes must be ordered with it; see `CudaPages`."""

    def write_layer(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Copy ``k`` and ``v``, ``(tokens, heads, dim)``, into slots of one layer. ``slots``: one per token."""
        size = self.geometry.page_size
        assert slots.numel() % size == 0
        runs = list(consecutive_runs((slots[::size] // size).tolist()))
        for tensor, x in zip(TENSORS, (k, v), strict=True):
            buffer, rows = self._buffers[tensor][layer], x.view(self._raw_dtype)
            for run, positions in runs:
                tokens = slice(positions.start * size, positions.stop * size)
                buffer[run.start * size : run.stop * size] = rows[tokens]

    def open_reads(self, slots: torch.Tensor) -> PageRun:
        return _CpuRun(self._buffers, slots.view(-1, self.geometry.page_size))

    def open_side_reads(self, buffers: SideBuffers, slots: torch.Tensor) -> ReadSidePage:
        return partial(_read_side_page, buffers, slots)


def _read_side_page(buffers: SideBuffers, slots: torch.Tensor, page: int) -> torch.Tensor:
    return buffers.gather(slots[page * buffers.page_size : (page + 1) * buffers.page_size]).flatten()


class _CpuRun(PageRun):
    def __init__(self, buffers: KVBuffers, slots: torch.Tensor) -> None:
        """``slots``: ``(pages, page_size)``."""
        self._buffers, self._slots = buffers, slots

    def read_into(self, pages: Sequence[int], memory: torch.Tensor, offset: int) -> None:
        gather_slots(self._buffers, self._slots[list(pages)].flatten(), memory[offset:])


def slots_in(memory: torch.Tensor, buffers: KVBuffers, num_slots: int) -> list[torch.Tensor]:
    """Return K and V of slots in uint8 ``memory``, where they lie as `pages_in` finds them: ``(layers, tokens, heads,
    dim)`` each, of the dtype of ``buffers``."""
    sides = [buffers[tensor] for tensor in TENSORS]
    return tensors_in(memory, sides[0][0].dtype, ((len(x), num_slots, *x[0].shape[1:]) for x in sides))


def gather_slots(buffers: KVBuffers, slots: torch.Tensor, into: torch.Tensor) -> None:
    """Copy some slots into uint8 ``into``, as `slots_in` finds them. ``slots``: int64."""
    for tensor, rows in zip(TENSORS, slots_in(into, buffers, len(slots)), strict=True):
        for x, out in zip(buffers[tensor], rows.unbind(), strict=True):
            torch.index_select(x, 0, slots, out=out)


def _not_supported(what: str) -> UnsupportedError:
    return UnsupportedError(f"device mode does not support {what}: add --enable-hierarchical-cache")


def open_gpu(pool: Any) -> tuple[Device, bool] | None:
    """Return a pool's GPU, and whether ``ans`` is decoded there; None if the pool is on the CPU.

    Raises UnsupportedError for a pool or device that is not supported.
    """
    device = torch.device(pool.device)
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        raise _not_supported(str(device))
    logger.warning(
        "kvfetch: device mode has run on one GPU so far, an H200, where a hit did not pay; "
        "--enable-hierarchical-cache gives host mode"
    )
    from sgl_kvfetch.triton_kernels.ans import try_gpu_ans

    gpu = Device(_kv_buffers(pool)["k"][0].device)  # with its index
    decodes_ans, about = try_gpu_ans(gpu)
    logger.info("kvfetch: %s", about)
    metrics.LEFT_TO_CPU.labels("decode").set(not decodes_ans and not why_no_gpu())
    if why := gpu.why_no_batches():
        logger.warning("kvfetch: ranges are copied one by one: %s", why)
    return gpu, decodes_ans


def _kv_buffers(pool: Any) -> dict[TensorName, list[torch.Tensor]]:
    """Return the buffers of K and V, one a layer: ``(slots, heads, dim)``. Raises UnsupportedError."""
    # Other subclasses are refused: they may keep more than K and V, or use another layout.
    if _is_plain_mla(pool):
        rank = pool.kv_lora_rank
        return {"k": [x[..., rank:] for x in pool.kv_buffer], "v": [x[..., :rank] for x in pool.kv_buffer]}
    if type(pool) is not MHATokenToKVPool or pool.is_quantized_kv_cache:
        raise UnsupportedError(f"device mode does not support pools of the kind {type(pool).__name__}")
    if pool.kv_cache_layout != "nhd":
        raise UnsupportedError(f"device mode does not support the pool layout {pool.kv_cache_layout!r}")
    return {"k": list(pool.k_buffer), "v": list(pool.v_buffer)}


def _is_plain_mla(pool: Any) -> bool:
    """Return whether a pool has latent vectors of values, with or without the keys of an indexer beside them."""
    if type(pool) is DSATokenToKVPool:
        return bool(pool.kv_cache_dim == pool.kv_lora_rank + pool.qk_rope_head_dim)  # else their scales are among them
    return type(pool) is MLATokenToKVPool and not pool.use_dsa


@dataclass(frozen=True)
class EnginePools:
    """What SGLang keeps for a model on the device."""

    kv: Any  # the pool of K and V
    layers: Sequence[int | None]  # for each of the model's layers, its place in that pool; None if it has none
    side_buffers: Mapping[str, SideBuffers] = field(default_factory=dict)  # the side pools, by name
    window: int = 0  # tokens of a window that SGLang keeps
    following: Sequence[str] = ()  # side pools with the slots of K and V; each page of K and V needs its page there

    @cached_property
    def sides(self) -> SidePools:
        """What identifies the pages of windows and states, and how large they are."""
        sides = SidePools()
        for name, buffers in self.side_buffers.items():
            sides.add_pool(name, buffers)
        return sides

    @property
    def handed_over(self) -> list[str]:
        """The side pools of which SGLang hands pages over."""
        return [name for name in self.side_buffers if name not in self.following]

    def window_pages(self, core: Any, node: Any, num_pages: int, page_size: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the pages of the window at the end of a node's path, each with its slots in the windows' pool. Pages
        that SGLang has freed are left out. ``core``: of SGLang's radix tree. ``num_pages``: of the path.

        Of a window on a GPU, the tree's nodes say without a wait what SGLang keeps; its map from slots of K and V to
        those of windows would have to be read."""
        first = max(0, num_pages - -(-self.window // page_size))
        for part in core.collect_path_info([node])[0] if self.window else ():
            slots = core.get_component_device_value(part.node_id, ComponentType.SWA)
            if slots is None or part.path_end <= first * page_size:
                continue
            end = part.path_end // page_size
            for page in range(max(first, end - len(slots) // page_size), end):
                last = len(slots) - (end - 1 - page) * page_size
                yield page, slots[last - page_size : last]


def open_pools(params: Any, components: Collection[ComponentType]) -> EnginePools:
    """Return the pools of a model. ``params``: SGLang's ``CacheInitParams``. ``components``: what its radix cache keeps
    of a node. Raises UnsupportedError for pools that are not supported, and unless SGLang hands over pages of each."""
    pools = _open_pools(params)
    if all(layer is None for layer in pools.layers):
        raise UnsupportedError("device mode does not support models without a layer of full attention")
    following = _following_buffers(params)
    pools = replace(pools, side_buffers={**pools.side_buffers, **following}, following=tuple(following))
    handed_over = {_COMPONENT_POOLS.get(each, each) for each in components}
    if handed_over != {PoolName.KV, *map(PoolName, pools.handed_over)}:
        found, kind = ", ".join(sorted(map(str, components))), type(pools.kv).__name__
        names = ", ".join([kind, *pools.sides.page_bytes])
        raise _not_supported(f"a KV cache of {found} in the pools {names}")
    return pools


def _open_pools(params: Any) -> EnginePools:
    """Return the pool that has K and V of all tokens, where in it each layer of the model is, and the pools whose pages
    have slots of their own: of windows, of states. Raises UnsupportedError."""
    pool = params.token_to_kv_pool_allocator.get_kvcache()
    if type(pool) is SWAKVPool:
        window = pool.swa_kv_pool
        buffers = _kv_buffers(window)
        sides = SideBuffers([*buffers["k"], *buffers["v"]], params.page_size, window.store_dtype)
        places = {layer: None if is_window else index for layer, (index, is_window) in pool.layers_mapping.items()}
        layers = [places[layer] for layer in range(len(places))]
        return EnginePools(pool.full_kv_pool, layers, {PoolName.SWA.value: sides}, params.swa_retain_window)
    if type(pool) is HybridLinearKVPool:
        requests = params.req_to_token_pool
        states = {PoolName.MAMBA.value: _state_buffers(requests)}
        places = pool.full_attention_layer_id_mapping
        num_layers = 1 + max(*places, *requests.mamba_map)
        return EnginePools(pool.full_kv_pool, [places.get(layer) for layer in range(num_layers)], states)
    if type(pool) is MiniMaxSparseKVPool:
        if pool.dense_pool is not None or pool.index_kv_pool is not None:
            raise _not_supported("HiSparse, or an indexer with values")
        pool = pool.main_pool
    return EnginePools(pool, range(len(_kv_buffers(pool)["k"])))


def _following_buffers(params: Any) -> dict[str, SideBuffers]:
    """Return the side pools whose pages have the slots of those of K and V: the keys of an indexer, and the KV cache of
    a draft model. In a page, the layers that SGLang packs behind the model's (MTP) come last, as in its host pools.
    Raises UnsupportedError."""
    pool, size = params.token_to_kv_pool_allocator.get_kvcache(), params.page_size
    packed = [_full_pool(draft) for draft in params.mtp_draft_device_pools]
    if params.mtp_draft_mamba_pools:
        raise _not_supported("states of a draft model")
    found = {}
    if type(pool) is DSATokenToKVPool:
        # Layers that take the choice of the layer before have no keys.
        keys = [x for each in (pool, *packed) for x in each.index_k_with_scale_buffer if len(x)]
        if keys:
            found[PoolName.INDEXER.value] = SideBuffers(keys, size, pool.store_dtype, rows_are_pages=True)
    if type(pool) is MiniMaxSparseKVPool and pool.index_k_pool is not None:
        indexer = pool.index_k_pool
        found[PoolName.INDEXER.value] = SideBuffers(indexer.k_buffer, size, indexer.store_dtype)
    if packed:
        of_drafts = [_kv_buffers(draft) for draft in packed]
        layers = [layer for tensor in TENSORS for each in of_drafts for layer in each[tensor]]
        found[PACKED] = SideBuffers(layers, size, packed[0].store_dtype)
    for draft in map(_full_pool, params.sidecar_draft_device_pools):
        buffers, is_mla = _kv_buffers(draft), type(draft) is MLATokenToKVPool
        if type(draft) is DSATokenToKVPool:
            raise _not_supported("a draft model with an indexer")
        layers = draft.kv_buffer if is_mla else [*buffers["k"], *buffers["v"]]
        found[PoolName.DRAFT.value] = SideBuffers(layers, size, draft.store_dtype, has_heads=not is_mla)
    return found


def _full_pool(draft: Any) -> Any:
    """Return the pool of K and V of a draft model. That of a model with states may have none."""
    return draft.full_kv_pool if type(draft) is HybridLinearKVPool else draft


def _state_buffers(requests: Any) -> SideBuffers:
    """Return the states of a ``HybridReqToTokenPool``. Raises UnsupportedError."""
    pool = requests.mamba_pool
    if requests.mamba_ckpt_pool is not None or requests.short_conv_pool.enabled or requests.ngram_pool.enabled:
        raise _not_supported("states in int8, or with further states alongside")
    states = [pool.mamba_cache.temporal, *pool.mamba_cache.conv]  # (layers, slots, ...) each, as the host's pages have
    conv, temporal = pool.mamba_cache.conv[0].dtype, pool.mamba_cache.temporal.dtype
    return SideBuffers([x for state in states if state.numel() for x in state], 1, conv, conv, temporal)


class SidePart(NamedTuple):
    """A part of some side pages: all bytes that ``buffers`` have of ``pages``. ``columns``: these bytes, in a page."""

    pages: range
    buffers: slice
    columns: range


class SideBuffers:
    """The buffers of a side pool on the device, whose pages have the same bytes as those of SGLang's host pools. It has
    the part of their interface by which `SidePools` identifies pages.

    Nothing here waits for the device: slots stay there, and the work is ordered by the stream it is launched on.
    """

    layout = "layer_first"

    def __init__(
        self,
        buffers: Sequence[torch.Tensor],
        page_size: int,
        dtype: torch.dtype,
        *of_states: torch.dtype,
        rows_are_pages: bool = False,
        has_heads: bool = False,
    ) -> None:
        """``buffers``: ``(slots, ...)`` each, or ``(pages, ...)`` if ``rows_are_pages``, in the order of a page's
        bytes. ``page_size``: slots. ``of_states``: the dtypes of states, of convolutions and of the others.
        ``has_heads``: whether each rank has some of a model's heads."""
        self.num_bytes = sum(buffer.nbytes for buffer in buffers)
        self.has_heads = has_heads
        # A page's slots are consecutive, so it is a row of each buffer.
        size = 1 if rows_are_pages else page_size
        self._rows = [x[: len(x) // size * size].view(-1, size, *x.shape[1:]) for x in buffers]
        self._row_bytes: list[int] = [rows[0].nbytes for rows in self._rows]
        self.page_bytes = sum(self._row_bytes)
        self.page_size = page_size
        self.dtype = dtype
        if of_states:
            self.conv_dtype, self.temporal_dtype = of_states

    @property
    def most_row_bytes(self) -> int:
        """What `parts` needs at least."""
        return max(self._row_bytes)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.empty(self.page_bytes, dtype=torch.uint8)

    def parts(self, num_pages: int, most_bytes: int) -> Iterator[SidePart]:
        """Cut pages into parts of ``most_bytes``: of whole pages, or of some buffers of pages that are larger.

        ``most_bytes``: `most_row_bytes` at least.
        """
        assert most_bytes >= self.most_row_bytes, (most_bytes, self.most_row_bytes)
        first = begin = 0
        while first < len(self._rows):
            last, end = first, begin
            while last < len(self._rows) and end + self._row_bytes[last] - begin <= most_bytes:
                end += self._row_bytes[last]
                last += 1
            at_once = most_bytes // (end - begin)
            for page in range(0, num_pages, at_once):
                yield SidePart(range(page, min(num_pages, page + at_once)), slice(first, last), range(begin, end))
            first, begin = last, end

    def gather(self, slots: torch.Tensor, buffers: slice = slice(None)) -> torch.Tensor:
        """Return what ``buffers`` have of some pages, uint8 ``(pages, bytes)``, in memory of its own. ``slots``: of
        these pages, one page after another."""
        which = self._pages(slots)
        rows = (x.index_select(0, which) for x in self._rows[buffers])
        return torch.cat([x.flatten(1).view(torch.uint8) for x in rows], dim=1)

    def scatter(self, slots: torch.Tensor, content: torch.Tensor, buffers: slice = slice(None)) -> None:
        """Do the reverse of `gather`, which returns ``content``."""
        which = self._pages(slots)
        pieces = torch.split(content, self._row_bytes[buffers], dim=1)
        for rows, piece in zip(self._rows[buffers], pieces, strict=True):
            rows.index_copy_(0, which, _typed(piece, rows.dtype).view(len(which), *rows.shape[1:]))

    def _pages(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the rows of pages, on the device."""
        return slots[:: self.page_size].to(torch.int64) // self.page_size


def _typed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return bytes, ``(rows, bytes)``, as values of a dtype: in place if they are aligned for it."""
    is_aligned = all(number % dtype.itemsize == 0 for number in (x.data_ptr(), x.storage_offset(), x.stride(0)))
    return (x if is_aligned else x.clone(memory_format=torch.contiguous_format)).view(dtype)


@dataclass(frozen=True)
class SideSlots:
    """Pages of the side pool ``pool``, counted among the pages of a load, and their slots, one page after another."""

    pool: str
    pages: Sequence[int]
    slots: torch.Tensor


class GuardedSource:
    """Reads a run until it is closed, and never afterwards: the pages may then belong to another request."""

    def __init__(self, run: PageRun, sides: Mapping[str, ReadSidePage] | None = None) -> None:
        """``sides``: how to read the opened pages of each side pool."""
        self._run = run
        self._sides = sides or {}
        self._lock = threading.Lock()
        self.is_closed = False

    def read_into(self, pages: Sequence[int], memory: torch.Tensor, offset: int) -> bool:
        """See `PageRun.read_into`. Return False if the source is closed."""
        with self._lock:
            if not self.is_closed:
                self._run.read_into(pages, memory, offset)
            return not self.is_closed

    def read_side(self, pool: str, page: int) -> torch.Tensor | None:
        """Return a copy of a side page's bytes, uint8 ``(bytes,)``, or None if the source is closed. ``page``: counted
        from the first that was opened in its pool."""
        with self._lock:
            return None if self.is_closed else self._sides[pool](page)

    @property
    def num_rows(self) -> Sequence[int]:
        return self._run.num_rows

    def quantise(
        self, first_page: int, pages: range, memory: torch.Tensor, offset: int
    ) -> Sequence[torch.Tensor] | None:
        """See `PageRun.quantise`. Also None if the source is closed."""
        with self._lock:
            return None if self.is_closed else self._run.quantise(first_page, pages, memory, offset)

    def close(self) -> None:
        with self._lock:
            self.is_closed = True


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """Staged pages, all of which are loaded, and the slots that get them, one per token. ``sides``: side pages of them,
    and the slots that get these. ``on_end`` is called when they are not read any more, with whether they were sound."""

    staged: StagedValues
    slots: torch.Tensor
    on_end: Callable[[bool], None]
    sides: Sequence[SideSlots] = ()


class Loader(ABC):
    """Loads a batch's prefixes into the pool. ``counter``: SGLang's ``LayerWiseLoadCounter``, which the forward pass
    waits on. ``restores_code``: false once it has failed to restore coded cells, in a way that does not pass."""

    counter: Any
    restores_code = True

    @abstractmethod
    def attach(self, memory: torch.Tensor, cache_bytes: int) -> None:
        """Get the shared memory of a data plane ready, unless it is. That of a former one is left. ``cache_bytes``: at
        its end, in which prompts are kept. Never waits."""

    def detach(self) -> None:  # noqa: B027, for GPUs
        """Leave the shared memory, as soon as no load reads it. Never waits."""

    def pause(self) -> None:  # noqa: B027, for GPUs
        """Wait until nothing is launched or pinned any more, and pin nothing until `resume`."""

    def resume(self) -> None:  # noqa: B027, for GPUs
        """Go on after `pause`."""

    @abstractmethod
    def prepare(self, staged: StagedValues) -> None:
        """Get what was staged ready for its load. Never waits."""

    @abstractmethod
    def begin(self, loads: Sequence[Load]) -> int:
        """Begin to load, and return the index for ``counter``. Every layer is completed, or the load fails as a whole.
        Never waits."""

    def finish(self, index: int) -> bool:
        """Wait until nothing of a batch is written any more. Return whether all of it is loaded."""
        return bool(self.counter.finish(index))

    def reset(self) -> None:
        """Wait until nothing is written any more, and forget all loads."""
        self.counter.reset()

    @abstractmethod
    def close(self) -> None:
        """End the work under way."""


class ValueLoader(Loader):
    """Copies values on a thread, for a pool in the host's memory."""

    def __init__(self, pages: DevicePages, counter: Any, pools: EnginePools) -> None:
        self.counter = counter
        self._pages = pages
        self._pools = pools
        self._thread = ThreadPoolExecutor(1, "kvfetch-load", use_one_thread)

    def attach(self, memory: torch.Tensor, cache_bytes: int) -> None:
        pass  # it is read as it is

    def prepare(self, staged: StagedValues) -> None:
        pass

    def begin(self, loads: Sequence[Load]) -> int:
        index: int = self.counter.update_producer()
        self._thread.submit(self._run, index, loads)
        return index

    def close(self) -> None:
        self._thread.shutdown()

    def _run(self, index: int, loads: Sequence[Load]) -> None:
        try:
            for load in loads:
                for side in load.sides:
                    self._copy_side(load.staged, side)
            for number, layer in enumerate(self._pools.layers):
                if layer is not None:
                    for load in loads:
                        self._copy_twice_at_most(layer, load)
                self.counter.complete(index, number)
        except Exception as error:
            logger.exception("kvfetch: loading failed; SGLang aborts the requests of this batch's loads")
            metrics.MISSES.labels("load", "internal").inc()
            self.counter.fail(index, error)
        finally:
            for load in loads:
                load.on_end(True)

    def _copy_side(self, staged: StagedValues, side: SideSlots) -> None:
        buffers = self._pools.side_buffers[side.pool]
        for page, slots in zip(side.pages, torch.split(side.slots, buffers.page_size), strict=True):
            buffers.scatter(slots, staged.sides[side.pool, page][None])

    def _copy_twice_at_most(self, layer: int, load: Load) -> None:
        """Copy a layer, and once more if that fails: its values are still staged, and SGLang aborts requests whose
        loads fail."""
        try:
            self._copy(layer, load)
        except Exception:
            logger.exception("kvfetch: loading layer %d failed; it is tried once more", layer)
            self._copy(layer, load)

    def _copy(self, layer: int, load: Load) -> None:
        self._pages.write_layer(layer, load.slots, *(x[layer] for x in load.staged.values))
