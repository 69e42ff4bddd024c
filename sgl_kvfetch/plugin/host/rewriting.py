"""Host mode: pages that were lost on the way to the store, and that SGLang still holds, are written once more.

SGLang stores a node of its tree once, when the node's pages have reached the host pool. A prefix may stay in the tree,
such as a system prompt that is always in use. If the store failed to take its pages, or they were stored by a quantiser
that is no longer used, nothing behind them could be found. So when SGLang stores a node, the nodes before it are stored
first, unless they have been since the last loss. Pages that the store has are recognised before they are encoded again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_MOST_NODES = 1 << 16  # after so many, it begins anew


class Rewriting:
    """SGLang stores the same nodes on all ranks, so all must decide alike which others to store."""

    def __init__(self) -> None:
        self._stored: set[int] = set()  # ids of nodes, since the last loss
        self._num_losses = 0  # of the rank that has had most

    def store(self, original: Callable[[Any, int], None], cache: Any, node_id: int, num_losses: int) -> None:
        """Store a node of SGLang's ``UnifiedRadixCache``, and those before it that may be lost. ``num_losses``: how
        often this rank has lost pages so far."""
        least = torch.tensor([-num_losses])
        # Of pipeline stages, the first one's counts. This does nothing where there is one rank.
        cache._all_reduce(least, torch.distributed.ReduceOp.MIN)
        most_losses = -int(least.item())
        if most_losses > self._num_losses or len(self._stored) > _MOST_NODES:
            self._num_losses = most_losses
            self._stored.clear()
        if not self._num_losses:
            original(cache, node_id)
            return
        (path,) = cache.tree_core.collect_path_info([node_id])
        before = [info.node_id for info in path if info.node_id not in self._stored and info.node_id != node_id]
        for each in (*before, node_id):
            self._stored.add(each)
            original(cache, each)
