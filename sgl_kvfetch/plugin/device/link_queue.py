"""Decides which fetch has the link and which is next. Pure and without a clock, so that all ranks decide alike."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from sgl_kvfetch.plugin.device.order import OrderName, Queued, Turns


class Expecting(Queued, Protocol):
    """An item that wants the link."""

    expected_pages: int  # pages still to be fetched for it


T = TypeVar("T", bound=Expecting)


class LinkQueue(Generic[T]):
    """Holds the items that wait for the link and those that occupy it. Items are hashed by identity.

    A large item gets the link alone, as in KVFetcher (section 3.3.1): even shares would only make both items late.
    Small items share the link, because it would be idle between them.
    """

    def __init__(self, order: OrderName, shared_pages: int) -> None:
        """``shared_pages``: how many pages the items that share the link may have in total."""
        self._waiting: Turns[T] = Turns(order)
        self._on_link: dict[T, int] = {}  # requested pages of each item that occupies the link
        self._link_pages = 0  # their sum
        self._shared_pages = shared_pages
        self._num_changes = 0  # changes after which the first item is worth another look
        self._put_off: tuple[T, int] | None = None  # the item, and `_num_changes` when it was put off
        self.expected_pages = 0  # of all items, waiting or not

    def __len__(self) -> int:
        return len(self._waiting)

    def wait(self, item: T) -> None:
        self._waiting.add(item)

    def leave(self, item: T) -> None:
        """Remove an item that no longer waits."""
        self._waiting.discard(item)

    def first(self) -> T | None:
        """Return the item whose turn it is. None if it was put off, and neither room nor a change has come since."""
        first = self._waiting.first()
        if first is None or (self._put_off == (first, self._num_changes) and not self.has_room(first)):
            return None
        return first

    def has_room(self, item: T) -> bool:
        """Return whether the link can serve ``item`` beside the items that occupy it."""
        return not self._on_link or self._link_pages + item.num_pages <= self._shared_pages

    def put_off(self, item: T) -> None:
        """Note that ``item`` was looked at and must go on waiting for the link."""
        self._put_off = item, self._num_changes

    def changed(self) -> None:
        """Note a change: a waiting item may find that it need not fetch any more."""
        self._num_changes += 1

    def take(self, item: T, num_pages: int) -> None:
        """Let ``item`` occupy the link: ``num_pages`` of its pages are now requested."""
        self._on_link[item] = num_pages
        self._link_pages += num_pages

    def give_back(self, item: T) -> None:
        """Note that the link could serve another item beside ``item``."""
        self._link_pages -= self._on_link.pop(item, 0)

    def expect(self, item: T, num_pages: int) -> None:
        """Set how many pages are still to be fetched for ``item``."""
        self.expected_pages += num_pages - item.expected_pages
        item.expected_pages = num_pages

    def clear(self) -> None:
        self._waiting.clear()
        self._on_link.clear()
        self._link_pages = self.expected_pages = 0
