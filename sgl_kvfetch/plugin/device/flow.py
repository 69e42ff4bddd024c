"""One request's way from its arrival to a prefix in the pool."""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from sgl_kvfetch.dataplane.plane import FetchCall
from sgl_kvfetch.fetch.sink import GuardedSink
from sgl_kvfetch.plugin.device.lookups import LookupWork


class Phase(enum.Enum):
    LOOKUP = "lookup"  # the store is being asked
    WAITING = "waiting"  # for the link, or for another request's fetch of the same pages
    FETCHING = "fetching"  # with the tree's part of the prefix locked
    LANDED = "landed"  # in the tree, locked until the request is admitted


class End(enum.Enum):
    """How a flow ended, if not by an abort."""

    LANDED = "landed"  # all that the store had
    PARTLY = "partly"  # the rest failed
    FAILED = "failed"  # all of it did
    STOPPED = "stopped"  # the rest is computed, since that has become faster
    RECOMPUTED = "recomputed"  # all is computed, since that is faster
    FULL_POOL = "full_pool"  # the rest found no room
    MISSED = "missed"  # not stored, or the lookup failed
    KNOWN = "known"  # the tree had got it
    LOST = "lost"  # the tree had lost what came before it
    SUSPENDED = "suspended"  # the weights changed


@dataclass(slots=True, eq=False)
class FillingRound:
    """Slots that are being filled."""

    first_page: int
    slots: torch.Tensor  # every token's
    sink: GuardedSink  # closed, nothing is written to them any more


@dataclass(slots=True, eq=False)
class Flow:
    """Pages are counted from ``start``, the tokens that the tree had when the request arrived."""

    handle: Any  # SGLang's CacheRequestHandle
    key: Any  # SGLang's RadixKey of the whole prompt, as far as it may be cached, in whole pages
    start: int
    arrival: int  # counts the flows before it
    arrived_s: float  # for the timeline
    phase: Phase = Phase.LOOKUP
    cancelled: bool = False
    urgency: int = 0
    lookup: LookupWork | None = None

    # Known after the lookup.
    deadline_s: float = 0.0  # when the pages must be here, in time.monotonic()
    hashes: list[str] = field(default_factory=list)  # as many as all ranks found
    leader: Flow | None = None  # whose pages it waits for

    # While it fetches.
    fetch: FetchCall | None = None
    round_ends: deque[int] = field(default_factory=deque)  # pages where the rounds end that have no slots yet
    next_page: int = 0  # where the first of them begins
    num_rounds: int = 0  # that have got slots
    is_wanting: bool = False  # it asks for another round, or is about to
    is_fetch_over: bool = False
    has_gap: bool = False  # a round came short: those after it do not count
    expected_pages: int = 0  # that are still to be fetched for it
    filling: deque[FillingRound] = field(default_factory=deque)
    end: End = End.LANDED  # as far as is known
    followers: list[Flow] = field(default_factory=list)  # that wait for these pages
    lock: Any = None  # SGLang's TreeLock on what the tree has of the prefix
    loaded_start: int = 0  # token where the first round began
    landed_tokens: int = 0  # that all rounds put into the tree, and the lock keeps there

    @property
    def num_pages(self) -> int:
        return len(self.hashes)

    @property
    def is_wanted(self) -> bool:
        """Whether anybody waits for its pages."""
        return not self.cancelled or bool(self.live_followers)

    @property
    def live_followers(self) -> list[Flow]:
        return [follower for follower in self.followers if not follower.cancelled]
