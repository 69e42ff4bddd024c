"""SGLang's radix cache, which asks the store for what it lacks and writes what is new."""

from __future__ import annotations

import atexit
import logging
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sgl_kvfetch.errors import KVFetchError
from sgl_kvfetch.plugin.device.backend import DeviceBackend
from sgl_kvfetch.plugin.device.board import Board, Ticket
from sgl_kvfetch.plugin.device.fetches import Fetches
from sgl_kvfetch.plugin.device.known import KnownPages
from sgl_kvfetch.plugin.device.stepped import SteppedCache
from sgl_kvfetch.plugin.device.writes import Writes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Parts:
    backend: DeviceBackend
    board: Board
    ends: dict[Ticket, Callable[[int], None]]
    known: KnownPages
    fetches: Fetches
    writes: Writes


class KVFetchRadixCache(UnifiedRadixCache, SteppedCache):  # type: ignore[misc]
    """A ``UnifiedRadixCache`` with a store behind it. Does nothing of its own before ``start``."""

    _parts: _Parts | None = None  # SGLang's constructor calls reset()

    def start(
        self,
        make_backend: Callable[[Callable[[Ticket, int], None]], DeviceBackend],
        *,
        max_fetch_tokens: int,
        threshold_tokens: int,
    ) -> DeviceBackend:
        """``make_backend`` gets the function that reports what has ended."""
        board = Board(self._agree if self._num_ranks() > 1 else None)
        ends: dict[Ticket, Callable[[int], None]] = {}
        known = KnownPages()
        backend = make_backend(board.report)
        fetches = Fetches(
            self, backend, board, ends, known, max_tokens=max_fetch_tokens, threshold_tokens=threshold_tokens
        )
        self._parts = _Parts(backend, board, ends, known, fetches, Writes(self, backend, board, ends, known))
        self.enable_storage = True  # nodes get hashes
        atexit.register(self.release_host_resources)
        return backend

    def _num_ranks(self) -> int:
        groups = [group for group in (self.attn_cp_group, self.attn_tp_group, self.tp_group) if group is not None]
        return max((torch.distributed.get_world_size(group=group) for group in groups), default=1)

    def _agree(self, least: torch.Tensor) -> None:
        self._all_reduce_attn_groups(least, torch.distributed.ReduceOp.MIN)

    # Reading

    def is_backuped(self, node_id: Any) -> bool:
        """Any node's prefix may go on in the store: SGLang asks this before it calls ``prefetch_from_storage``."""
        return True

    def prefetch_from_storage(
        self,
        request: Any,
        last_host_node_id: Any,
        new_input_tokens: Any,
        last_hash: str | None = None,
        prefix_keys: list[str] | None = None,
        matched_prefix_tokens: Any = None,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        storage_hit_end: int | None = None,
    ) -> None:
        """A request has arrived, or lost a prefix that it had when it did. Never waits."""
        start = len(matched_prefix_tokens or ())
        if self._parts is None or start % self.page_size:
            return
        tokens = array("q", matched_prefix_tokens or ())
        tokens.extend(new_input_tokens)
        key = RadixKey(tokens, extra_key=extra_key, cache_salt=cache_salt).page_aligned(self.page_size)
        self._parts.fetches.arrive(request, key, start, last_hash)

    def check_prefetch_progress(self, request: Any) -> bool:
        return self._parts is None or self._parts.fetches.is_over(request)

    def finish_storage_prefetch_admission(self, request: Any, fulfilled_tokens: int, reason: str | None) -> None:
        super().finish_storage_prefetch_admission(request, fulfilled_tokens, reason)
        if self._parts is not None:
            self._parts.fetches.admitted(request)

    def release_aborted_request(self, request: Any) -> None:
        super().release_aborted_request(request)
        if self._parts is not None:
            self._parts.fetches.abandon(request)
            self._parts.writes.forget(request.rid)

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        super().on_release(req, checkpointed=checkpointed)
        if self._parts is not None:
            self._parts.fetches.abandon(req.cache_request_handle)
            self._parts.writes.forget(req.rid)

    # Writing

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        super().checkpoint(req, up_to=up_to, **kwargs)
        if self._parts is not None and not req.skip_radix_cache_insert:
            self._parts.writes.inserted(req.rid, req.last_node)

    # Stepping

    def step(self) -> None:
        if self._parts is None:
            return
        parts = self._parts
        for ticket, num_pages in parts.board.step():
            parts.ends.pop(ticket)(num_pages)
        parts.fetches.step()

    def has_pending_cache_operations(self) -> bool:
        return self._parts is not None and bool(self._parts.board.num_open or not self._parts.fetches.is_idle)

    def is_parked(self, handle: Any) -> bool:
        return self._parts is not None and self._parts.fetches.is_parked(handle)

    def take_changed(self) -> list[Any]:
        return [] if self._parts is None else self._parts.fetches.take_changed()

    # Ends

    def reset(self) -> None:
        """Empty the tree. Ends all that is under way, without waiting for more than the copy of one cell."""
        if self._parts is not None:
            self._parts.fetches.drop_all()
            self._parts.writes.drop_all()
            self._parts.board.clear()
            self._parts.ends.clear()
        super().reset()
        self.enable_storage = self._parts is not None

    def clear_storage_backend(self) -> bool:
        if self._parts is None:
            return False
        self._parts.known.clear()  # whatever comes of it, so that all ranks know the same
        try:
            self._parts.backend.clear()
        except (KVFetchError, TimeoutError) as e:
            logger.warning("kvfetch: the store could not be cleared: %s", e)
            return False
        return True

    def release_host_resources(self) -> None:
        super().release_host_resources()
        if self._parts is not None:
            self._parts.backend.close()
