"""Who has the link, and who is next. Pure; no clock, so that all ranks decide alike."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from sgl_kvfetch.plugin.device.order import OrderName, Queued, Turns


class Expecting(Queued, Protocol):
    """What wants the link."""

    expected_pages: int  # that are still to be fetched for it


T = TypeVar("T", bound=Expecting)


class LinkQueue(Generic[T]):
    """Those that wait for the link, and those that leave it no room for another. Things are hashed by identity.

    One has the link alone if it fills it, as KVFetcher has it (section 3.3.1): even shares would only make both late.
    Short ones share it, since it would idle between them.
    """

    def __init__(self, order: OrderName, shared_pages: int) -> None:
        """``shared_pages``: so many that share the link may have together."""
        self._waiting: Turns[T] = Turns(order)
        self._on_link: dict[T, int] = {}  # pages of those that leave it no room
        self._link_pages = 0  # of all of them
        self._shared_pages = shared_pages
        self._num_changes = 0  # of what the first in line was last looked at with
        self._put_off: tuple[T, int] | None = None  # as of which change
        self.expected_pages = 0  # of all, waiting or not

    def __len__(self) -> int:
        return len(self._waiting)

    def wait(self, item: T) -> None:
        self._waiting.add(item)

    def leave(self, item: T) -> None:
        """It waits no more."""
        self._waiting.discard(item)

    def first(self) -> T | None:
        """Who is to be looked at, if anybody: it has its turn, or something has changed since it was put off."""
        first = self._waiting.first()
        if first is None or (self._put_off == (first, self._num_changes) and not self.has_room(first)):
            return None
        return first

    def has_room(self, item: T) -> bool:
        """Whether the link can serve it beside those that have it."""
        return not self._on_link or self._link_pages + item.num_pages <= self._shared_pages

    def put_off(self, item: T) -> None:
        """It was looked at, and goes on waiting for the link."""
        self._put_off = item, self._num_changes

    def changed(self) -> None:
        """Who waits may find that it need not fetch."""
        self._num_changes += 1

    def take(self, item: T, num_pages: int) -> None:
        """So many pages of it are asked for now."""
        self._on_link[item] = num_pages
        self._link_pages += num_pages

    def give_back(self, item: T) -> None:
        """The link could serve another one beside it."""
        self._link_pages -= self._on_link.pop(item, 0)

    def expect(self, item: T, num_pages: int) -> None:
        """So many pages are still to be fetched for it."""
        self.expected_pages += num_pages - item.expected_pages
        item.expected_pages = num_pages

    def clear(self) -> None:
        self._waiting.clear()
        self._on_link.clear()
        self._link_pages = self.expected_pages = 0
