"""A fetch, with the objects of SGLang and of the data plane that it holds, and which fetch follows which."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from sgl_kvfetch import timeline
from sgl_kvfetch.dataplane.plane import FetchCall
from sgl_kvfetch.plugin.device.backend import Filling, LookupWork
from sgl_kvfetch.plugin.device.fetch_state import FetchState, State


@dataclass(eq=False)
class Fetch(FetchState):
    """A request's fetch. Page numbers count from token ``start``: so many tokens the tree had when it arrived."""

    handle: Any  # SGLang's CacheRequestHandle
    key: Any  # SGLang's RadixKey of the whole prompt, as far as it may be cached, in whole pages
    start: int
    arrival: int  # serial number, in order of arrival
    arrived_s: float  # for the timeline
    starts_early: bool = False  # if its last pages will be restored in time
    request: timeline.Request = timeline.NOBODY
    urgency: int = 0
    lookup: LookupWork = field(default_factory=LookupWork)
    expected_pages: int = 0  # pages still to be fetched for it
    leader: Fetch | None = None  # the fetch that brings its pages
    followers: list[Fetch] = field(default_factory=list)  # fetches that wait for these pages
    granted: Filling | None = None  # the first round's slots, if there were any when the fetch began
    call: FetchCall | None = None
    lock: Any = None  # SGLang's TreeLock on the part of the prefix that is in the tree
    loaded_start: int = 0  # token where the first round began
    landed_tokens: int = 0  # tokens that rounds put into the tree, where the lock keeps them

    def __post_init__(self) -> None:
        super().__init__()

    @property
    def is_wanted(self) -> bool:
        """Return whether its own request or a follower waits for its pages."""
        return not self.is_abandoned or bool(self.live_followers)

    @property
    def live_followers(self) -> list[Fetch]:
        return [follower for follower in self.followers if follower.state is State.FOLLOWING]


class Sharing:
    """Records which fetch brings which pages, and which others follow it to share them. Equal on every rank."""

    def __init__(self) -> None:
        self._leaders: dict[str, Fetch] = {}  # by page hash
        self._resumed: deque[Fetch] = deque()  # their pages have landed, or their leader has ended

    def lead(self, fetch: Fetch, hashes: Iterable[str]) -> None:
        """Note that ``fetch`` brings these pages from now on."""
        self._leaders.update(dict.fromkeys(hashes, fetch))

    def follow(self, fetch: Fetch, page_hash: str) -> bool:
        """Let ``fetch`` wait for the fetch that brings this page. Return False if there is none."""
        leader = self._leaders.get(page_hash)
        if leader is None:
            return False
        leader.followers.append(fetch)
        fetch.leader = leader
        return True

    def ended(self, leader: Fetch, hashes: Iterable[str]) -> None:
        """Note that ``leader`` no longer brings these pages: they landed, or never will. Its followers look again."""
        for page_hash in hashes:
            if self._leaders.get(page_hash) is leader:
                del self._leaders[page_hash]
        for follower in leader.live_followers:
            follower.leader = None
            self._resumed.append(follower)
        leader.followers.clear()

    def take_resumed(self, limit: int) -> list[Fetch]:
        """Take up to ``limit`` fetches that lost their leader, in order. Return those that have not ended since."""
        resumed = [self._resumed.popleft() for _ in range(min(len(self._resumed), limit))]
        return [fetch for fetch in resumed if fetch.state is State.FOLLOWING]

    def clear(self) -> None:
        self._leaders.clear()
        self._resumed.clear()
