"""SGLang's external linker with a store behind it. SGLang constructs one in each rank, and drives it."""

from __future__ import annotations

import atexit
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker

from sgl_kvfetch import timeline
from sgl_kvfetch.engine import DataPlane
from sgl_kvfetch.errors import KVFetchError
from sgl_kvfetch.plugin import weight_updates
from sgl_kvfetch.plugin.device.offloads import Offloads
from sgl_kvfetch.plugin.device.parking import Board, Prefixes
from sgl_kvfetch.plugin.device.pools import (
    DevicePages,
    EnginePools,
    Load,
    Loader,
    SideSlots,
    SlotPages,
    ValueLoader,
    open_gpu,
    open_pools,
)
from sgl_kvfetch.plugin.hooks import try_to_connect
from sgl_kvfetch.plugin.host.pool import is_mla
from sgl_kvfetch.plugin.host.side_pools import trailing_pages
from sgl_kvfetch.plugin.launch_check import read_extra_config
from sgl_kvfetch.plugin.prefill import PrefillMeter
from sgl_kvfetch.plugin.register import BACKEND
from sgl_kvfetch.plugin.starting import open_engine_plane
from sgl_kvfetch.plugin.versions import require_distinct_images
from sgl_kvfetch.plugin.weight_updates import Access
from sgl_kvfetch.protocol import KVFetchConfig, parse_config
from sgl_kvfetch.status import Audits

logger = logging.getLogger(__name__)

_NEAR_S = 0.005  # for prompts in `memory_cache`: 8,192 tokens take 3 ms
_UNUSED_S = 30.0  # how long launched copies may take to end: a forward pass before them takes seconds


@dataclass(frozen=True)
class _Attached:
    """What there is while a store is attached. ``extra_config``: the text that says which store."""

    access: Access
    plane: DataPlane
    board: Board
    extra_config: str | None
    cache_bytes: int  # of the data plane's memory, for prompts that are kept


class KVFetchLinker(UnifiedCacheLinker):  # type: ignore[misc]
    """Loads what was staged, and offloads to the store. ``waiting_queue`` steps it, and parks requests for it.

    SGLang asks it for an arriving request in the same way as for one that it is about to admit: by `lookup`. For the
    first kind, `arrive` has to be what makes SGLang ask. All methods run on the scheduler's thread.
    """

    is_kvfetch = True  # hooks recognise the linker by this

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: set[ComponentType],
        extra_config: dict[str, Any] | None = None,
        forward_stream: Any = None,
    ) -> None:
        """``params``: SGLang's ``CacheInitParams``. ``extra_config``: its ``config`` is the text of the extra config
        that the launch was given. Raises ConfigError and UnsupportedError, which stop SGLang's start."""
        require_distinct_images()
        self._rank = _rank_of(params)
        timeline.start(self._rank.tp_rank)
        pools = open_pools(params, components)
        pool, self._pools, self._sides = pools.kv, pools, pools.sides
        self._rank.is_mla_model = is_mla(pool)
        self.forward_stream = forward_stream
        self.pools = {PoolName.KV: pool, **dict.fromkeys(map(PoolName, pools.handed_over))}
        self.prefill_meter = PrefillMeter()
        self._pool_tokens: int = params.token_to_kv_pool_allocator.size
        self._pages, self._takes_code = _open_pages(pools, params.page_size, forward_stream)
        self._loader = _open_loader(self._pages, pools)
        if PoolName.MAMBA in self.pools:
            params.req_to_token_pool.register_layer_transfer_counter(self._loader.counter)
        self.layer_done_counter = self._loader.counter
        self._group = params.attn_tp_cache_group or params.tp_cache_group
        # Takes what SGLang looks up for `arrive`, and how many side pages that needs.
        self._arrive: Callable[[Sequence[str], Mapping[str, int]], None] | None = None
        is_writer = not self._rank.is_mla_model or self._rank.tp_rank == 0  # all ranks have the same latent vectors
        self._offloads = Offloads(self._pages, pools, is_writer=is_writer)
        self._loads: dict[str, Load] = {}  # queued, by request id
        self._attached: _Attached | None = None
        self._stepped_s = math.inf
        self.connect((extra_config or {}).get("config"))
        atexit.register(self.close)

    # Attaching

    def connect(self, extra_config: str | None) -> None:
        """Attach the store that the text of an extra config names. Raises ConfigError and UnsupportedError."""
        config, threshold_tokens = _config_of(extra_config)
        geometry = self._pages.geometry
        staging_bytes = self._pool_tokens // geometry.page_size * geometry.page_bytes
        staging_bytes += sum(buffers.num_bytes for buffers in self._pools.side_buffers.values())
        gpu = None if self._pages.device is None else self._pages.device.torch_device.index
        plane = open_engine_plane(
            config,
            self._rank,
            self._pages,
            gpu,
            sides=self._sides,
            staging_bytes=staging_bytes,
            takes_code=self._takes_code,
        )
        plane.on_switch = self._offloads.forget_stored
        access = Access(config)
        board = Board(self._agree if self._rank.tp_size > 1 else None)
        page_size = geometry.page_size
        self.prefixes = Prefixes(
            plane,
            board,
            self.prefill_meter.speed,
            page_size,
            -(-threshold_tokens // page_size),
            self._offloads.looked_up,
            self._loader.prepare,
        )
        # Of `klt` alone, a GPU takes what is kept.
        cache_bytes = config.memory_cache * (config.quantiser_name in ("klt", "exact"))
        self._loader.restores_code = True
        self._loader.attach(plane.memory, cache_bytes)
        self._offloads.connect(plane, access)
        self._attached = _Attached(access, plane, board, extra_config, cache_bytes)
        weight_updates.register_access(access, config.model_id)
        self._pages.log_memory()
        logger.info("kvfetch runs in device mode, through SGLang's linker")

    def attach(self, backend: str, extra_config: str | None, policies: Sequence[str | None]) -> tuple[bool, str]:
        """Attach a store at run time. Return whether all ranks did, and a message. SGLang calls this only while there
        are no requests. ``policies``: those of the host tier."""
        if backend != BACKEND or any(policy is not None for policy in policies):
            return False, f"device mode accepts only the storage backend {BACKEND}, and no policies of the host tier"
        if self._attached is not None:
            if extra_config in (None, self._attached.extra_config):
                return True, f"{BACKEND} is already attached with this config."
            return False, f"{BACKEND} is attached with another config: detach it first, DELETE /hicache/storage-backend"
        for begin in (_config_of, self.connect):  # in which ranks may wait for one another: all come as far, or none
            fault = try_to_connect(begin, extra_config)
            answer = torch.tensor([int(fault is None)])
            if self._rank.tp_size > 1:
                self._agree(answer)
            if not answer.item():
                self.detach()
                return False, fault or "another rank could not attach the storage backend; see its log for the reason"
        return True, f"{BACKEND} is attached."

    def detach(self) -> None:
        """Detach the store. The tree stays as it is. Waits a few seconds at most for queued pages to be written."""
        attached, self._attached = self._attached, None
        if attached is None:
            return
        self.prefixes.drop_all()
        self._offloads.disconnect()
        weight_updates.forget_access(attached.access)
        self._loader.detach()
        self._pages.release()
        try:
            attached.plane.close()
        except Exception:  # go on: it holds nothing of the tree, and the other ranks have detached
            logger.exception("kvfetch: closing the data plane failed")

    def clear(self) -> bool:
        """Empty the store, while an operator waits. Return whether it succeeded."""
        if self._attached is None:
            return False
        self._offloads.forget_stored()
        try:
            self._attached.plane.clear()
        except (KVFetchError, TimeoutError) as e:
            logger.warning("kvfetch: the store could not be cleared: %s", e)
            return False
        return True

    def _agree(self, least: torch.Tensor) -> None:
        torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN, group=self._group)

    # Parking

    def arrive(self, req: Any, tree: Any, span: Any = None, *, is_idle: bool = False) -> None:
        """Begin to stage the prefix of a request that waits. SGLang matches ``tree``, its radix cache, and asks
        `lookup` for the rest. Other arguments as for `Prefixes.arrive`."""
        if self._attached is None or not self._attached.access.reads:
            return
        prefixes = self.prefixes
        if prefixes.has(req.rid):  # SGLang has made a new list of those that wait
            return
        self._arrive = lambda hashes, trailing: prefixes.arrive(req, hashes, span, is_idle=is_idle, trailing=trailing)
        try:
            req.init_next_round_input(tree, cow_mamba=False)
        finally:
            self._arrive = None

    @property
    def access(self) -> Access | None:
        """What the attached backend may do; None while none is attached."""
        return None if self._attached is None else self._attached.access

    @property
    def threshold_tokens(self) -> int:
        """How many tokens are worth a lookup; 0 while no store is attached."""
        return 0 if self._attached is None else self.prefixes.threshold_pages * self._pages.geometry.page_size

    @property
    def audits(self) -> Audits | None:
        """What audits have found; None before the first one."""
        return None if self._attached is None else self._attached.plane.audits

    def step(self, tree: Any, wanted_tokens: Callable[[], int], *, is_beside: bool = False) -> list[Any]:
        """Process what has ended since the last step, and begin what can begin. ``tree``: SGLang's radix cache.
        ``wanted_tokens`` returns how many tokens of the pool are wanted for the next request. ``is_beside``: whether
        the device computes meanwhile: then a step may wait half of the last one. Return who must arrive again."""
        last_s, self._stepped_s = self._stepped_s, time.monotonic()
        self._loader.resume()
        if self._attached is None:
            return []
        prefixes, attached = self.prefixes, self._attached
        self._loader.attach(attached.plane.memory, attached.cache_bytes)  # of another one, if that has ended
        self._offloads.step(tree, lambda: math.inf if prefixes.has_held else wanted_tokens())
        most_s = min((self._stepped_s - last_s) / 2, _NEAR_S) if is_beside and attached.cache_bytes else 0.0
        return prefixes.step(most_s)

    def batch_ended(self, batch: Any, now_s: float) -> None:
        """Record that SGLang has processed the result of a batch."""
        self.prefill_meter.finished(batch, now_s)
        self.prefixes.computed(batch.reqs)

    # Reading

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        hashes: Sequence[str] = _kv(transfers).keys
        if self._attached is None or not self._attached.access.reads:
            return []
        if self._arrive is not None:
            needed = trailing_pages(transfers) if len(transfers) > 1 else {}
            self._arrive(hashes, needed | dict.fromkeys(self._pools.following, 0))
            return []
        # Ranks have agreed on the number. SGLang asks for every length that could be loaded; it would take the longest.
        num_pages = self.prefixes.num_staged(rid, hashes)
        return [num_pages] if num_pages else []

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Record what a request's next batch copies of its staged prefix, and to which slots. Nothing is copied yet."""
        attached = self._attached
        assert attached is not None
        transfer = _kv(transfers)
        work, staged = self.prefixes.take(rid, transfer.keys)
        on_end = partial(self._unstage, attached.plane, work)
        side_transfers = _sides(transfers)
        pages = {page_hash: page for page, page_hash in enumerate(transfer.keys)} if side_transfers else {}
        sides = [
            SideSlots(str(each.name), [pages[page_hash] for page_hash in each.keys], each.device_indices)
            for each in side_transfers
        ]
        sides += [SideSlots(name, range(len(transfer.keys)), transfer.device_indices) for name in self._pools.following]
        self._offloads.loaded(side_transfers)
        self._loads[rid] = Load(staged, transfer.device_indices, on_end, sides)
        return True

    def _unstage(self, plane: DataPlane, work: int, is_sound: bool) -> None:
        plane.unstage(work, is_sound=is_sound, takes_code=self._loader.restores_code)

    def cancel_queued_load(self, rid: str) -> bool:
        load = self._loads.pop(rid, None)
        if load is None:
            return False
        load.on_end(True)
        self.prefixes.end_load(rid)
        return True

    def start_layer_wise_loading(self) -> int:
        if not self._loads:
            return -1
        loads, self._loads = self._loads, {}
        self.prefixes.begin_loads()
        return self._loader.begin(list(loads.values()))

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return self._loader.finish(counter_index)

    # Writing

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        if self._attached is None:
            return False
        self.prefixes.landed(_kv(transfers).keys)
        if not self._attached.access.writes:
            return False  # SGLang offers the pages again when they are used, perhaps to another store
        self._offloads.add(_sides(transfers))
        return True

    def num_completed_offloads(self) -> int:
        return self._offloads.num_completed

    def pop_completed_offload(self) -> bool:
        return self._offloads.pop()

    # Ends

    def stop_using_pool(self) -> None:
        """End all work on the pool, whose memory is about to go. Raises KVFetchError, which ends the server, if a
        device does not end its part: a kernel on memory that is gone would destroy the process's context."""
        self._offloads.stop_reading()
        if not self._pages.wait_until_unused(_UNUSED_S):
            raise KVFetchError(
                f"memory was not released: the device still reads the KV pool {_UNUSED_S:g} s after the last copy was "
                "ended; it seems to hang"
            )

    def leave_gpu(self) -> None:
        """End all work on the GPU, and begin none before the next step. Raises KVFetchError as `stop_using_pool`."""
        self._loader.pause()
        self.stop_using_pool()

    def reset(self) -> None:
        self.prefixes.drop_all()
        if self._attached is not None:
            self._attached.plane.flush()
        self._offloads.drop_all()
        for load in self._loads.values():
            load.on_end(True)
        self._loads.clear()
        self._loader.reset()

    def close(self) -> None:
        self.detach()
        self._offloads.close()
        self._loader.close()


def _config_of(text: str | None) -> tuple[KVFetchConfig, int]:
    """Return what an extra config says, and the smallest number of tokens that is worth a lookup."""
    extra, threshold_tokens = read_extra_config(text)
    return parse_config(extra), threshold_tokens


def _open_pages(pools: EnginePools, page_size: int, forward_stream: Any) -> tuple[SlotPages, bool]:
    """Return access to the pages of K and V, and whether coded cells can be restored there. Raises UnsupportedError for
    a pool or device that is not supported."""
    opened = open_gpu(pools.kv)
    if opened is None:
        return DevicePages(pools.kv, page_size), False
    from sgl_kvfetch.plugin.device.gpu_pages import READ_BUFFER_BYTES, CudaPages

    gpu, decodes_ans = opened
    rows = [buffers.most_row_bytes for buffers in pools.side_buffers.values()]
    stream, room = forward_stream or gpu.current_stream(), max([READ_BUFFER_BYTES, *rows])
    return CudaPages(pools.kv, page_size, gpu, stream, read_buffer_bytes=room), decodes_ans


def _open_loader(pages: SlotPages, pools: EnginePools) -> Loader:
    if isinstance(pages, DevicePages):
        return ValueLoader(pages, LayerWiseLoadCounter(len(pools.layers)), pools)
    from sgl_kvfetch.plugin.device.gpu_loads import GpuLoader
    from sgl_kvfetch.plugin.device.gpu_pages import CudaPages

    assert isinstance(pages, CudaPages)
    return GpuLoader(pages, pools)


def _kv(transfers: list[PoolTransfer]) -> Any:
    return next(transfer for transfer in transfers if transfer.name == PoolName.KV)


def _sides(transfers: list[PoolTransfer]) -> list[PoolTransfer]:
    return [transfer for transfer in transfers if transfer.name != PoolName.KV]


def _rank_of(params: Any) -> SimpleNamespace:
    """Return this process's place among the ranks that share the model's heads."""
    rank, size = 0, 1
    if torch.distributed.is_initialized():
        group = params.attn_tp_cache_group or params.tp_cache_group
        rank, size = torch.distributed.get_rank(group=group), torch.distributed.get_world_size(group=group)
    return SimpleNamespace(tp_rank=rank, tp_size=size, pp_rank=0, pp_size=1, is_mla_model=False)
