"""SGLang's side pools: what models keep beside their KV, such as sliding windows or Mamba states.

SGLang's pools in host memory have an interface for their pages. `device.pools.SideBuffers` has those of the device. A
page has the same bytes in both, so servers in both modes share them.

SGLang says which pages of its side pools belong to a run. It does not for layers that it has packed into the pool of K
and V (`pool.PackedLayers`): here they are a side pool whose pages lie where those of K and V do. Each page of a run
needs its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from sgl_kvfetch.engine.process import ReadSide
from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.types import SideKey

PACKED = "packed_draft"
_DRAFT = (PoolName.DRAFT, PoolName.DRAFT_INDEXER, PoolName.DRAFT_SWA, PACKED)
_HIT_POLICIES = (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES)


class SidePools:
    """The side pools of one rank. Their pages are opaque: copied whole, never looked into."""

    def __init__(self) -> None:
        self._pools: dict[str, Any] = {}
        self._pending: dict[str, list[tuple[str, int]]] = {}  # by page hash: pools, and where the pages are in them
        self._is_new_write = True

    def add_pool(self, name: str, pool: Any) -> None:
        self._pools[name] = pool

    def __bool__(self) -> bool:
        return bool(self._pools)

    @property
    def has_draft(self) -> bool:
        """Whether there is a draft model's pool, or a pool has layers of one behind the model's own."""
        return any(name in _DRAFT or _has_packed(pool) for name, pool in self._pools.items())

    @property
    def page_bytes(self) -> dict[str, int]:
        """How many bytes a page has in each pool."""
        return {name: pool.get_dummy_flat_data_page().nbytes for name, pool in sorted(self._pools.items())}

    def identity(self, tp_rank: int, tp_size: int, is_mla: bool, pp_rank: int = 0, pp_size: int = 1) -> str:
        """Return a text that differs between pools whose pages cannot be exchanged. Raises UnsupportedError.

        With side pools, SGLang does not say which of the model's layers a pipeline stage has: the first layer is 0 on
        all stages.
        """
        if not self:
            return ""
        per_rank = [name for name, pool in sorted(self._pools.items()) if _differs_between_ranks(name, pool)]
        if is_mla and tp_size > 1 and per_rank:
            raise UnsupportedError(
                f"the model's side pools {', '.join(per_rank)} differ between ranks, but with MLA only one rank writes "
                "its KV cache: use --tp-size 1"
            )
        sizes = self.page_bytes
        pools = [f"{name}:{sizes[name]}:{_format(pool)}" for name, pool in sorted(self._pools.items())]
        rank = "" if is_mla else f",rank {tp_rank} of {tp_size}"
        return ",".join(pools) + rank + (f",stage {pp_rank} of {pp_size}" if pp_size > 1 else "")

    def with_kv(self, keys: Sequence[str], indices: torch.Tensor) -> list[PoolTransfer]:
        """Return transfers of the side pages that lie where the pages of K and V do, of which SGLang says nothing.
        ``indices``: of the run's slots of K and V."""
        if PACKED not in self._pools:
            return []
        return [PoolTransfer(name=PACKED, keys=list(keys), host_indices=indices, hit_policy=PoolHitPolicy.ALL_PAGES)]

    # Writing. SGLang announces an operation's side pages first, and then writes its KV, on the same thread; the pages
    # stay where they are until both are done.

    def announce(self, transfer: PoolTransfer) -> int:
        """Note where side pages are. Return how many there are."""
        if self._is_new_write:
            self._pending.clear()
            self._is_new_write = False
        places = self.places(transfer)
        for key, place in zip(transfer.keys or [], places, strict=True):
            self._pending.setdefault(key, []).append((str(transfer.name), place))
        return len(places)

    def take_announced(self, keys: Sequence[str]) -> dict[SideKey, ReadSide]:
        """Return how to read the announced side pages of the pages that are written now."""
        self._is_new_write = True
        return {
            (name, page): partial(self.read, name, place)
            for page, key in enumerate(keys)
            for name, place in self._pending.pop(key, ())
        }

    def read(self, name: str, place: int) -> torch.Tensor:
        """Return a copy of the bytes of a page. ``place``: where it is in its pool, as SGLang counts."""
        page: torch.Tensor = self._pools[name].get_data_page(place, flat=True)
        return page.contiguous().view(torch.uint8).flatten().cpu()

    def forget_announced(self) -> None:
        """Forget what is announced: SGLang may break off the operation, and give the places to others."""
        self._pending.clear()
        self._is_new_write = True

    # Reading

    def write(self, transfer: PoolTransfer, pages: Mapping[int, torch.Tensor]) -> None:
        """Copy those pages of a transfer into their pool that were fetched, uint8 ``(bytes,)``."""
        places, pool = self.places(transfer), self._pools[transfer.name]
        for page, content in pages.items():
            flat = pool.get_dummy_flat_data_page()  # in the dtype that the pool expects
            flat.view(torch.uint8).copy_(content)
            pool.set_from_flat_data_page(places[page], flat)

    def places(self, transfer: PoolTransfer) -> list[int]:
        """Return where the pages of a transfer are in their pool."""
        size = getattr(self._pools[transfer.name], "page_size", 1) or 1
        places: list[int] = transfer.host_indices[::size].tolist()
        assert len(places) == len(transfer.keys or ()), (transfer.name, len(places), transfer.keys)
        return places


def _format(pool: Any) -> str:
    """Return a text that says how to read the bytes of a pool's pages."""
    # A page has one layer after another in these layouts, and a state in all of them.
    is_by_layer = hasattr(pool, "conv_dtype") or pool.layout in ("layer_first", "page_first_direct")
    # A pool of states has two dtypes, which flags and SGLang's environment choose apart from the model's.
    dtypes = (str(getattr(pool, name, "-")) for name in ("dtype", "conv_dtype", "temporal_dtype"))
    return " ".join(("by layer" if is_by_layer else pool.layout, *dtypes))


def _has_packed(pool: Any) -> bool:
    num_layers = getattr(pool, "layer_num", None)
    return bool(getattr(pool, "target_layer_num", num_layers) != num_layers)


def trailing_pages(transfers: Sequence[PoolTransfer]) -> dict[str, int]:
    """Return how many pages in front of a run's end each pool needs; 0 for all. Raises UnsupportedError."""
    trailing = {}
    for transfer in transfers:
        if transfer.name == PoolName.KV:
            continue
        if transfer.hit_policy not in _HIT_POLICIES:
            raise UnsupportedError(f"side pool {transfer.name} with the hit policy {transfer.hit_policy}")
        is_whole = transfer.hit_policy == PoolHitPolicy.ALL_PAGES
        trailing[str(transfer.name)] = 0 if is_whole else max(1, len(transfer.keys or ()))
    return trailing


def _differs_between_ranks(name: str, pool: Any) -> bool:
    """Return whether a pool differs between ranks, also where all of them have the same KV."""
    has_heads = isinstance(pool, MHATokenToKVPoolHost) or getattr(pool, "has_heads", False)
    return name == PoolName.MAMBA or (name in _DRAFT and has_heads)
