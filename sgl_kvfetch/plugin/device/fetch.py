"""One fetch, with what it holds of SGLang's and of the data plane's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from sgl_kvfetch.dataplane.plane import FetchCall
from sgl_kvfetch.fetch.sink import GuardedSink
from sgl_kvfetch.plugin.device.fetch_state import FetchState, State
from sgl_kvfetch.plugin.device.lookups import LookupWork


@dataclass(frozen=True, slots=True, eq=False)
class Filling:
    """Slots that are being filled. ``sink``: closed, nothing is written to them any more."""

    slots: torch.Tensor  # every token's
    sink: GuardedSink


@dataclass(eq=False)
class Fetch(FetchState):
    """Pages are counted from ``start``, the tokens that the tree had when the request arrived."""

    handle: Any  # SGLang's CacheRequestHandle
    key: Any  # SGLang's RadixKey of the whole prompt, as far as it may be cached, in whole pages
    start: int
    arrival: int  # counts the fetches before it
    arrived_s: float  # for the timeline
    urgency: int = 0
    lookup: LookupWork = field(default_factory=LookupWork)
    expected_pages: int = 0  # that are still to be fetched for it
    leader: Fetch | None = None  # whose pages it waits for
    followers: list[Fetch] = field(default_factory=list)  # that wait for these pages
    call: FetchCall | None = None
    lock: Any = None  # SGLang's TreeLock on what the tree has of the prefix
    loaded_start: int = 0  # token where the first round began
    landed_tokens: int = 0  # that rounds put into the tree, and the lock keeps there

    def __post_init__(self) -> None:
        super().__init__()

    @property
    def is_wanted(self) -> bool:
        """Whether anybody waits for its pages."""
        return not self.is_abandoned or bool(self.live_followers)

    @property
    def live_followers(self) -> list[Fetch]:
        return [follower for follower in self.followers if follower.state is State.FOLLOWING]
