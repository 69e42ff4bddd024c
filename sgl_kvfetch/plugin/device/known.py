"""What device mode knows of pages: which are in the store, and which fetch brings which. Pure; equal on every rank."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from itertools import islice
from typing import Generic, TypeVar

_MAX_PAGES = 1 << 18

F = TypeVar("F", bound=Hashable)


class KnownPages:
    """Hashes of pages that need not be written. Equal on every rank: it learns only what all ranks agreed on."""

    def __init__(self) -> None:
        self._hashes: OrderedDict[str, None] = OrderedDict()

    def add_hashes(self, hashes: Iterable[str]) -> None:
        for page_hash in hashes:
            self._hashes[page_hash] = None
            self._hashes.move_to_end(page_hash)
        while len(self._hashes) > _MAX_PAGES:
            self._hashes.popitem(last=False)

    def remove_hashes(self, hashes: Iterable[str]) -> None:
        for page_hash in hashes:
            self._hashes.pop(page_hash, None)

    def clear(self) -> None:
        self._hashes.clear()

    def unknown_range(self, hashes: Sequence[str], start: int) -> range:
        """Return the range from the first to the last unknown page, of the pages from ``start`` on."""
        unknown = [i for i in range(start, len(hashes)) if hashes[i] not in self._hashes]
        return range(unknown[0], unknown[-1] + 1) if unknown else range(0)


class Sharing(Generic[F]):
    """The fetches that bring pages, their followers, and the followers that should look again."""

    def __init__(self) -> None:
        self._bringing: dict[str, F] = {}  # by page hash
        self._leaders: dict[F, F] = {}  # by follower
        self._followers: dict[F, dict[F, None]] = {}  # by leader
        self._resumed: dict[F, None] = {}  # their pages have landed, or their leader has ended

    def lead(self, fetch: F, hashes: Iterable[str]) -> None:
        """Note that ``fetch`` brings these pages from now on."""
        self._bringing.update(dict.fromkeys(hashes, fetch))

    def follow(self, fetch: F, page_hash: str) -> bool:
        """Let ``fetch`` wait for the fetch that brings this page. Return False if there is none."""
        leader = self._bringing.get(page_hash)
        if leader is None:
            return False
        self._leaders[fetch] = leader
        self._followers.setdefault(leader, {})[fetch] = None
        return True

    def stop_following(self, fetch: F) -> None:
        """Forget a follower that has ended."""
        self._resumed.pop(fetch, None)
        leader = self._leaders.pop(fetch, None)
        if leader is not None:
            del self._followers[leader][fetch]

    def leader_of(self, fetch: F) -> F | None:
        return self._leaders.get(fetch)

    def has_followers(self, fetch: F) -> bool:
        return bool(self._followers.get(fetch))

    def ended(self, leader: F, hashes: Iterable[str]) -> None:
        """Note that ``leader`` no longer brings these pages: they landed, or never will. Its followers look again."""
        for page_hash in hashes:
            if self._bringing.get(page_hash) is leader:
                del self._bringing[page_hash]
        for follower in self._followers.pop(leader, ()):
            del self._leaders[follower]
            self._resumed[follower] = None

    def take_resumed(self, limit: int) -> list[F]:
        """Take up to ``limit`` fetches that should look again, in order."""
        resumed = list(islice(self._resumed, limit))
        for fetch in resumed:
            del self._resumed[fetch]
        return resumed

    def clear(self) -> None:
        for each in (self._bringing, self._leaders, self._followers, self._resumed):
            each.clear()
