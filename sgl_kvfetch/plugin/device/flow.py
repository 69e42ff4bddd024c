"""One request's way from its arrival to a prefix in the pool."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

import torch

from sgl_kvfetch.fetch.plan import PageSource
from sgl_kvfetch.plugin.device.backend import Work


class Phase(enum.Enum):
    LOOKUP = "lookup"  # the store is being asked
    WAITING = "waiting"  # for slots, or for another request's fetch of the same pages
    FETCHING = "fetching"  # into slots of its own, with the tree's part of the prefix locked
    LANDED = "landed"  # in the tree, locked until the request is admitted


@dataclass(slots=True, eq=False)
class Flow:
    """Pages are counted from ``start``, the tokens that the tree had when the request arrived."""

    handle: Any  # SGLang's CacheRequestHandle
    key: Any  # SGLang's RadixKey of the whole prompt, as far as it may be cached, in whole pages
    start: int
    arrival: int  # counts the flows before it
    phase: Phase = Phase.LOOKUP
    cancelled: bool = False
    work: Work | None = None

    # Known after the lookup.
    hashes: list[str] = field(default_factory=list)
    sources: list[PageSource] = field(default_factory=list)  # as many as all ranks found
    need_tokens: int = 0  # as of the last attempt to begin

    # While it fetches, once or in several rounds.
    first_page: int = 0  # the round begins here
    slots: torch.Tensor | None = None
    followers: list[Flow] = field(default_factory=list)  # that wait for these pages
    lock: Any = None  # SGLang's TreeLock on what the tree has of the prefix
    loaded_start: int = 0  # token where the first round began
    landed_tokens: int = 0  # that all rounds put into the tree, and the lock keeps there

    @property
    def num_pages(self) -> int:
        return len(self.hashes)

    def fetched_hashes(self, page_size: int) -> list[str]:
        """Hashes of the pages that the slots are for."""
        assert self.slots is not None
        return self.hashes[self.first_page : self.first_page + self.slots.numel() // page_size]
