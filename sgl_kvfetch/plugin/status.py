"""What this rank tells of itself in SGLang's ``/server_info``: see `sgl_kvfetch.status`.

Of the last requests, it remembers how they fared. Any thread notes; the scheduler's thread tells.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from sgl_kvfetch.plugin.register import BACKEND, linker_of
from sgl_kvfetch.status import MAX_RECENT, Decided, ServerStatus

if TYPE_CHECKING:  # hooks import this module in every SGLang, also without our backend
    from sgl_kvfetch.keys import HeadSlice


class _State:
    """The state of this process. It is a class so that tests can have their own."""

    def __init__(self) -> None:
        self.heads: HeadSlice | None = None
        self.coarseness = 0
        self.recent: deque[Decided] = deque(maxlen=MAX_RECENT)


_state = _State()


def serves(heads: HeadSlice, coarseness: int) -> None:
    """Record that a data plane serves by this namespace from now on. ``coarseness``: as in `ServerStatus`."""
    _state.recent.clear()  # what was found in another store, or under another namespace, says nothing of this one
    _state.heads, _state.coarseness = heads, coarseness


def record(request_id: str, hashes: Sequence[str], num_found: int, num_served: int, reason: str) -> None:
    """Record how a request fared whose pages ``hashes`` were looked up. Other arguments as in `Decided`."""
    decided = Decided(
        request_id=request_id,
        at_s=time.time(),
        first_hash=hashes[0],
        found_hash=hashes[num_found - 1] if num_found else "",
        num_pages=len(hashes),
        num_found=num_found,
        num_served=num_served,
        reason=reason if num_served < len(hashes) else "",
    )
    _state.recent.append(decided)


def record_shortfall(request_id: str, hashes: Sequence[str], num_found: int, num_served: int, reason: str) -> None:
    """Record that fewer pages of a request were served than `record` has said when they were looked up."""
    for each in reversed(list(_state.recent)):
        if (each.request_id, each.first_hash) == (request_id, hashes[0]):
            with suppress(ValueError):  # pushed out by another thread just now
                _state.recent.remove(each)
            break
    record(request_id, hashes, num_found, num_served, reason)


def status_of(scheduler: Any) -> ServerStatus | None:
    """Return what a scheduler's rank tells; None while no store is attached."""
    tree, heads = scheduler.tree_cache, _state.heads
    if (linker := linker_of(tree)) is not None:
        mode, access, threshold_tokens = "device", linker.access, linker.threshold_tokens
        audits, reasons = linker.audits, list[str]()
    else:
        controller: Any = getattr(tree, "cache_controller", None)
        is_ours = controller is not None and controller.storage_backend_type == BACKEND
        mode, access = "host", controller.storage_backend.access if is_ours else None
        threshold_tokens = tree.prefetch_threshold if is_ours else 0
        audits = controller.storage_backend.audits if is_ours else None
        reasons = controller.storage_backend.unstored if is_ours else []
    if access is None or heads is None:
        return None
    return ServerStatus(
        mode=mode,
        reads=access.reads,
        writes=access.writes,
        threshold_tokens=threshold_tokens,
        namespace=heads.namespace,
        first_head=heads.heads.start,
        end_head=heads.heads.stop,
        labels=heads.labels,
        coarseness=_state.coarseness,
        unstored=reasons,
        audits=audits,
        recent=list(_state.recent),
    )
