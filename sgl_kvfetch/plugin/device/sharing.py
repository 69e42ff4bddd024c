"""Pages that several requests want are fetched once: one fetch leads, the others follow it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from sgl_kvfetch.plugin.device.fetch import Fetch
from sgl_kvfetch.plugin.device.fetch_state import State


class Sharing:
    """Records which fetch brings which pages, and which fetches follow it. Equal on every rank."""

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
