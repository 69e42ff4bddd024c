"""Pages that several requests want are fetched once: one leads, the others follow it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from sgl_kvfetch.plugin.device.fetch import Fetch
from sgl_kvfetch.plugin.device.fetch_state import State


class Sharing:
    """Who fetches which pages, and who follows. The same on every rank."""

    def __init__(self) -> None:
        self._leaders: dict[str, Fetch] = {}  # by page hash
        self._resumed: deque[Fetch] = deque()  # what they followed for has landed, or has ended

    def lead(self, fetch: Fetch, hashes: Iterable[str]) -> None:
        """It fetches these pages from now on."""
        self._leaders.update(dict.fromkeys(hashes, fetch))

    def follow(self, fetch: Fetch, page_hash: str) -> bool:
        """Have it wait for whoever fetches this page. False: nobody does."""
        leader = self._leaders.get(page_hash)
        if leader is None:
            return False
        leader.followers.append(fetch)
        fetch.leader = leader
        return True

    def ended(self, leader: Fetch, hashes: Iterable[str]) -> None:
        """It fetches these pages no more: they have landed, or will not. Its followers look again."""
        for page_hash in hashes:
            if self._leaders.get(page_hash) is leader:
                del self._leaders[page_hash]
        for follower in leader.live_followers:
            follower.leader = None
            self._resumed.append(follower)
        leader.followers.clear()

    def take_resumed(self, limit: int) -> list[Fetch]:
        """Those that follow nobody any more, in their order, and are still there."""
        resumed = [self._resumed.popleft() for _ in range(min(len(self._resumed), limit))]
        return [fetch for fetch in resumed if fetch.state is State.FOLLOWING]

    def clear(self) -> None:
        self._leaders.clear()
        self._resumed.clear()
