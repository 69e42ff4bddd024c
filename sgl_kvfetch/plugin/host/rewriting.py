"""Host mode: after a switch of the quantiser, pages that SGLang holds since before are written once more.

SGLang stores a node of its tree once, when the node's pages have reached the host pool. So a prefix that stays in the
tree, such as a system prompt that is always in use, would not be stored by the new quantiser, and nothing behind it
could be found. So when SGLang stores a node, the nodes before it are stored first, unless they have been since the
switch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_MOST_NODES = 1 << 16  # after so many, it begins anew: what the store has is recognised before it is encoded again


class Rewriting:
    """All ranks switch in the same step, and so decide alike here."""

    def __init__(self) -> None:
        self._stored: set[int] = set()  # ids of nodes

    def store(self, original: Callable[[Any, int], None], cache: Any, node_id: int) -> None:
        """Store the nodes on the path to a node of SGLang's ``UnifiedRadixCache``."""
        if len(self._stored) > _MOST_NODES:
            self._stored.clear()
        (path,) = cache.tree_core.collect_path_info([node_id])
        before = [info.node_id for info in path if info.node_id not in self._stored and info.node_id != node_id]
        for each in (*before, node_id):
            self._stored.add(each)
            original(cache, each)
