"""Which nodes of SGLang's tree are stored once more. tests/e2e has whole engines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from sgl_kvfetch.plugin.host.storage import Rewriting


class Cache:
    """One rank's tree, in which each node stands behind all with smaller ids, and what another rank has lost."""

    def __init__(self) -> None:
        self.tree_core = self
        self.others_losses = 0
        self.stored: list[int] = []

    def collect_path_info(self, node_ids: list[int]) -> list[list[Any]]:
        return [[SimpleNamespace(node_id=each) for each in range(1, node_ids[0] + 1)]]

    def _all_reduce(self, least: torch.Tensor, op: Any) -> None:
        least.clamp_(max=-self.others_losses)

    def store(self, node_id: int) -> None:
        self.stored.append(node_id)


def stored(rewriting: Rewriting, cache: Cache, node_id: int, num_losses: int) -> list[int]:
    cache.stored.clear()
    rewriting.store(Cache.store, cache, node_id, num_losses)
    return cache.stored.copy()


def test_nodes_are_stored_once_more_after_a_loss_of_any_rank() -> None:
    rewriting, cache = Rewriting(), Cache()
    assert stored(rewriting, cache, 3, 0) == [3]
    assert stored(rewriting, cache, 4, 1) == [1, 2, 3, 4]
    assert stored(rewriting, cache, 5, 1) == [5]
    cache.others_losses = 2
    assert stored(rewriting, cache, 6, 1) == [1, 2, 3, 4, 5, 6]
    assert stored(rewriting, cache, 7, 2) == [7]
